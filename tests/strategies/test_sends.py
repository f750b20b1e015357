"""What strategies declare that their ranks send (SENDS) is what a rank sends: its messages are counted, by bytes."""

import json
import os
import subprocess
import sys

import pytest

from lockstep.config import registry
from lockstep.forecast import ranks
from lockstep.paths import PROJECT, SCRIPTS

pytestmark = pytest.mark.slow
PROGRAM = PROJECT / "tests" / "strategies" / "counted.py"
FEW = 512  # bytes of what is not told apart: norms, and whether something has overflowed


def counted(strategy: str, options: dict) -> dict:
    command = [sys.executable, str(PROGRAM), strategy, json.dumps(options)]
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert finished.returncode == 0, finished.stderr[-2000:]
    return json.loads(finished.stdout.splitlines()[-1])


def declared(strategy: str, options: dict, shapes: dict, trained: dict) -> dict[str, tuple[float, float]]:
    """Bytes and messages of a step by collective, by what the strategy declares."""
    known = {name: option.get("default") for name, option in registry.literals("ddp")["OPTIONS"].items()}
    known |= {name: option.get("default") for name, option in registry.literals(strategy)["OPTIONS"].items()}
    known |= {"precision": "fp32", "clip": 1.0} | options
    accumulation = options.get("accumulation", 1)
    found: dict[str, tuple[float, float]] = {}
    alone = ranks.Alone(1.0, 1.0, 1.0, 0.0)
    sent = registry.sends(strategy, known)
    for message in ranks.messages(sent, shapes, known, accumulation, alone, "cpu", trained):
        size, number = found.get(message.collective, (0, 0))
        more = message.times * sum(message.sizes), message.times * len(message.sizes)
        found[message.collective] = (size + more[0], number + more[1])
    return found


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        pytest.param("ddp", {}, marks=pytest.mark.ci),
        pytest.param("fsdp", {}, marks=pytest.mark.ci),
        pytest.param("zero_redundancy", {}, marks=pytest.mark.ci),
        ("ddp", {"hook": "fp16", "accumulation": 2}),
        ("ddp", {"hook": "powersgd"}),
        ("ddp", {"bucket_mb": 0.05}),
        ("fsdp", {"accumulation": 3}),
        ("fsdp", {"reshard_after_forward": False}),
        ("fsdp", {"clip": 0}),
        ("local_sgd", {"every": 4}),
        pytest.param("ddp", {"lora": 4}, marks=pytest.mark.ci),
        pytest.param("fsdp", {"lora": 4}, marks=pytest.mark.ci),
        ("zero_redundancy", {"lora": 4}),
        ("local_sgd", {"lora": 4, "every": 4}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(f"{k}-{v}" for k, v in value.items()) or "default",
)
def test_a_rank_sends_what_its_strategy_declares(strategy, options):
    found = counted(strategy, options)
    shapes = {name: tuple(shape) for name, shape in found["shapes"].items()}
    expected = declared(strategy, options, shapes, {name: shapes[name] for name in found["trained"]})
    told = {name: sent for name, sent in found["sent"].items() if sent[0] > FEW or name in expected}
    assert told.keys() == expected.keys()
    for name, (size, number) in expected.items():
        assert told[name][0] == pytest.approx(size, rel=0.03, abs=FEW)
        assert told[name][1] == pytest.approx(number, abs=1)
