"""What communication costs: the fit, and the measurement itself on two ranks."""

import json
import os
import signal
import subprocess
import time

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as some

from lockstep import network
from lockstep.config import reading
from lockstep.errors import BadInput
from lockstep.rank.network import BUS
from lockstep.report import charts
from tests.conftest import copy_project


def points(latency: float, bandwidth: float, factor: float, sizes) -> list[dict]:
    return [{"bytes": size, "seconds": latency + size * factor / bandwidth} for size in sizes]


@given(some.floats(1e-6, 1e-2), some.floats(1e6, 1e12), some.sampled_from(list(BUS)), some.integers(2, 64))
def test_what_is_a_latency_and_a_bandwidth_is_found_again(latency, bandwidth, operation, ranks):
    factor = BUS[operation](ranks)
    sizes = network.sizes()
    found = network.fit(points(latency, bandwidth, factor, sizes), factor)
    assert found["worst"] < 1e-6
    if sizes[0] * factor / bandwidth < 1e3 * latency < 1e6 * sizes[-1] * factor / bandwidth:  # both are seen
        assert found["latency"] == pytest.approx(latency, rel=1e-3)
        assert found["bandwidth"] == pytest.approx(bandwidth, rel=1e-3)


@given(some.lists(some.floats(0.1, 10), min_size=10, max_size=10))
def test_a_point_that_is_too_slow_counts_as_much_as_one_that_is_too_fast(times):
    """Turned around, errors of a message's time turn the fitted times around, too."""
    both = []
    for factors in (times, [1 / factor for factor in times]):
        measured = [{"bytes": 1e6, "seconds": 1e-3 * factor} for factor in factors]
        found = network.fit(measured, 1.0)
        both.append(found["latency"] + 1e6 / (found["bandwidth"] or np.inf))
    assert both[0] * both[1] == pytest.approx(1e-6, rel=1e-3)


def test_neither_is_below_zero():
    falling = [{"bytes": size, "seconds": 1e-3 * (1 + at % 2)} for at, size in enumerate(reversed(network.sizes()))]
    found = network.fit(falling, 1.0)
    assert found["latency"] >= 0
    assert found["bandwidth"] is None or found["bandwidth"] > 0


def test_bus_bandwidth_is_that_of_nccl_tests():
    """What the links carry: the same for all_reduce as for its two halves, which each send every byte once less."""
    assert BUS["all_reduce"](4) == pytest.approx(BUS["reduce_scatter"](4) + BUS["all_gather"](4))
    assert [BUS[name](4) for name in ("all_reduce", "all_gather", "broadcast")] == [1.5, 0.75, 1.0]


def test_sizes_go_from_one_kibibyte_to_what_is_asked_for():
    assert network.sizes()[0] == 1024
    assert network.sizes()[-1] == 2**28
    assert network.sizes(2**20) == [2**10, 2**12, 2**14, 2**16, 2**18, 2**20]
    assert network.sizes(3 * 2**20) == [*network.sizes(2**20), 3 * 2**20]  # what was asked for, not less


def test_by_default_there_are_as_many_ranks_as_devices():
    config = reading.parse({"hardware": {"device": "cpu", "threads": 1, "node_cores": 3}})
    assert [row.hardware.processes for row in network.rows(config, None, None)] == [2]
    with pytest.raises(BadInput, match=r"^--ranks: 4, but there are 3 CPU cores"):
        network.rows(config, [4], None)
    with pytest.raises(BadInput, match="nccl works between GPUs only"):
        network.rows(config, [2], "nccl")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return copy_project(tmp_path_factory.mktemp("network"))


def test_it_is_measured_and_stands_in_the_report(place):
    done = place.script("network", "--largest=1", "--set=hardware.device=cpu", "--set=hardware.oversubscribe=true")
    assert done.returncode == 0, done.stderr
    assert "reduce_scatter" in done.stdout
    measured = json.loads(place.path("results/network/network.json").read_text())["measured"]
    assert [each["ranks"] for each in measured] == [2, 4]
    for each in measured:
        assert list(each["operations"]) == list(BUS)
        for name, found in each["operations"].items():
            assert [point["bytes"] for point in found["points"]] == network.sizes(2**20)
            for point in found["points"]:
                assert 0 < point["low"] <= point["seconds"] <= point["high"]
                after = point["after_computing"]
                assert 0 <= after["low"] <= after["seconds"] <= after["high"]
                assert after["high"] > 0
                expected = BUS[name](each["ranks"]) * point["bytes"] / point["seconds"]
                assert point["bus_bandwidth"] == pytest.approx(expected)
    drawn = charts.network(measured)
    assert len(drawn.table) == len(drawn.figure.axes[0].lines) == 2 * len(BUS)
    charts.plt.close("all")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--ranks", "1"], "--ranks 1: it takes at least two"),
        (["--largest", "0"], "--largest 0: expected 1 to 4096"),
        (["--ranks", "4096"], "4096, but there"),
    ],
)
def test_what_can_not_be_is_one_message(place, asked, said):
    done = place.script("network", "--set=hardware.device=cpu", *asked)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_and_no_result(place):
    command = ["python", "workflow/scripts/network.py", "--results=other", "--set=hardware.device=cpu"]
    with subprocess.Popen(command, cwd=place.folder, env=place.environment(), start_new_session=True) as process:
        deadline = time.monotonic() + 120
        while not any("rank/network.py" in " ".join(child.cmdline()) for child in below(process)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        ranks = below(process)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive
    assert not place.path("other/network/network.json").exists()


def below(process) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
