"""lockstep why: where a row's steps go, and from which batch on it beats another row."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import why
from lockstep import paths
from lockstep.data import plan as planning
from lockstep.errors import BadInput
from lockstep.forecast import step
from lockstep.run.progress import WARMUP_STEPS
from tests import made

TOKENS = np.tile(np.arange(200, 1400, 100), 4)


def measured(fixed: float, each: float, noise: float = 0.01, seed: int = 1) -> np.ndarray:
    """Seconds of steps of TOKENS, some of them disturbed."""
    random = np.random.default_rng(seed)
    seconds = (fixed + each * TOKENS) * random.normal(1, noise, len(TOKENS))
    seconds[::11] *= 3
    return seconds


@settings(max_examples=20, deadline=None)
@given(st.floats(0.001, 0.1), st.floats(1e-6, 1e-4))
def test_a_line_is_found_through_steps_of_which_some_were_disturbed(fixed, each):
    line = step.fit(TOKENS, measured(fixed, each))
    for tokens in (200, 700, 1300):
        assert line.at(tokens).value == pytest.approx(fixed + each * tokens, rel=0.05)
        assert line.at(tokens).low <= line.at(tokens).value <= line.at(tokens).high
    assert line.tokens == (200, 1300)


def test_the_lines_of_two_rows_cross_where_the_faster_one_changes():
    alone, shared = step.fit(TOKENS, measured(0.004, 2e-5)), step.fit(TOKENS, measured(0.012, 1e-5, seed=2))
    crossing = step.break_even(shared, alone)
    assert crossing.value == pytest.approx(800, rel=0.1)
    assert crossing.low <= 800 <= crossing.high
    for tokens, faster in ((300, False), (1300, True), (5000, True)):
        ratio = step.times_as_fast(shared, alone, tokens)
        assert (ratio.value > 1) is faster
        assert ratio.value == pytest.approx((0.004 + 2e-5 * tokens) / (0.012 + 1e-5 * tokens), rel=0.05)
    assert step.break_even(alone, step.fit(TOKENS, measured(0.012, 4e-5))).value == 0
    assert step.break_even(step.fit(TOKENS, measured(0.012, 4e-5)), alone) is None


def test_a_row_that_is_faster_for_small_steps_only_is_said_to_be_so():
    alone, shared = step.fit(TOKENS, measured(0.004, 2e-5)), step.fit(TOKENS, measured(0.012, 1e-5, seed=2))
    assert step.break_even(alone, shared) is None
    names = {"row": "single"}, {"row": "ddp"}
    number = f"{step.break_even(shared, alone).value:,.0f}"
    assert f"It is the faster one up to {number} tokens a step (" in why._crossing(*names, alone, shared)
    assert f"It is the faster one from {number} tokens a step on (" in why._crossing(*names, shared, alone)
    slower = step.fit(TOKENS, measured(0.012, 4e-5))
    assert why._crossing(*names, slower, alone).endswith("it is faster at no batch.")
    assert why._crossing(*names, alone, slower).endswith("it is faster at every batch.")


@pytest.mark.parametrize(
    ("tokens", "said"),
    [(TOKENS[:19], "19 steps were measured"), (np.full(48, 300), "same few sizes"), (TOKENS % 300, "same few sizes")],
)
def test_too_little_makes_no_line(tokens, said):
    with pytest.raises(BadInput, match=said):
        step.fit(tokens, np.ones(len(tokens)))


def test_steps_of_another_plan_say_nothing_of_a_plan_s_tokens(tmp_path):
    """With vary_seed each repetition trains another one."""
    runs, lengths = [], np.random.default_rng(0).integers(5, 60, 600)
    for repeat in (1, 2, 3):
        plan = planning.make(lengths, global_batch=16, epochs=1, seed=repeat, batching="bucketed")
        file = paths.plan_file(tmp_path, f"seed{repeat}")
        file.parent.mkdir(parents=True, exist_ok=True)
        plan.save(file)
        folder = tmp_path / paths.RUNS / paths.run_name("ddp", 2, repeat)
        folder.mkdir(parents=True)
        np.save(folder / paths.STEPS, 0.004 + 2e-5 * np.tile(plan.widths * np.diff(plan.starts), (2, 1)))
        runs.append(made.run(repeat=repeat, world_size=2, asked={"plan": f"seed{repeat}"}))
    line = step.line(SimpleNamespace(folder=tmp_path, report={"runs": {"ddp": runs}}), "ddp")
    assert (line.fixed, line.each) == (pytest.approx(0.004), pytest.approx(2e-5))
    assert line.steps == plan.steps - WARMUP_STEPS
    first = planning.Plan.load(paths.plan_file(tmp_path, "seed1"))
    tokens = first.widths * np.diff(first.starts)
    assert line.mean == np.mean(tokens) != np.mean(tokens[WARMUP_STEPS:])
