"""`lockstep prove` on scripts as users write them, right and wrong: it reports each mistake, and nothing else."""

import json
import os
import re
import runpy
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch
from markupsafe import escape

from tests.conftest import PROJECT

HOROVOD = find_spec("horovod") is not None
NEED_HOROVOD = pytest.mark.skipif(not HOROVOD, reason="needs: make horovod")
HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
TORCHRUN = ("torchrun", "--nproc-per-node", "2", "train.py")
SPAWN = ("python", "train.py", "--spawn", "2")
DRAWN = ("torchrun", "--nproc-per-node", "2", "drawn.py")


def proven(place: Path, *command: str, options: tuple[str, ...] = (), code: int | None = None) -> dict:
    """The verdict on a command whose script is beside this test; `code` is the expected exit code."""
    place.mkdir(exist_ok=True)
    finished = prove(*command, options=("--output", str(place / "out"), *options))
    said = finished.stdout + finished.stderr
    assert (place / "out" / "verdict.json").is_file(), said
    verdict = json.loads((place / "out" / "verdict.json").read_text(encoding="utf-8"))
    expected = {"equal": 0, "different": 1, "not told": 3}[verdict["answer"]] if code is None else code
    assert finished.returncode == expected, said
    page = (place / "out" / "proof.html").read_text(encoding="utf-8")
    assert [each["says"] for each in verdict["findings"] if str(escape(each["says"])) not in page] == []
    return verdict | {"said": said, "kinds": {each["kind"]: each for each in verdict["findings"]}}


def started(words: list[str], folder: Path) -> subprocess.CompletedProcess:
    """A command in a user's shell, without the variables of the test's own process."""
    kept = ("HOME", "TMPDIR", "TORCH_EXTENSIONS_DIR", "PYTHONPATH")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # beside the scripts, which are this project's
    environment["PATH"] = f"{BIN}:{os.environ['PATH']}"
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def prove(*command: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    return started([sys.executable, str(PROJECT / "workflow/scripts/prove.py"), *options, "--", *command], HERE)


RIGHT = {
    "torchrun": TORCHRUN,
    "spawn, as many epochs as ranks": (*SPAWN, "--samples", "64"),
    "launch": ("python", "-m", "torch.distributed.launch", "--use-env", "--nproc-per-node", "2", "train.py"),
    "four ranks": ("torchrun", "--nproc-per-node", "4", "train.py"),
    "accumulation": (*TORCHRUN, "--having", "accumulation"),
    "random augmentation": (*TORCHRUN, "--having", "noisy,workers"),
    "sgd, clipped": (*TORCHRUN, "--having", "sgd,clip"),
    "clipped once unscaled": (*TORCHRUN, "--having", "clip,scaler"),
    "clipped by hand": (*TORCHRUN, "--having", "sgd,clip_loop"),
    "clipped by value": (*TORCHRUN, "--having", "sgd,clip_value"),
    "gradients by hand": (*SPAWN, "--having", "by_hand"),
    "cleared before backward": (*TORCHRUN, "--having", "zero_late"),
    "a sampler of one's own": (*TORCHRUN, "--having", "own_sampler"),
    "a sampler that was given some of the samples": (*TORCHRUN, "--having", "some"),
    "validation by rank 0": (*TORCHRUN, "--having", "validation", "--samples", "64"),
    "called by forward()": (*TORCHRUN, "--having", "forward"),
    "bf16": (*TORCHRUN, "--having", "bf16"),
    "compiled": (*TORCHRUN, "--having", "compile"),
    "a compiled optimizer": (*TORCHRUN, "--having", "compiled_step"),
    "fsdp": (*TORCHRUN, "--having", "fsdp"),
    "more epochs than steps": (*TORCHRUN, "--samples", "64", "--epochs", "3"),
    "a hook that sends half precision": (*TORCHRUN, "--having", "half_hook"),
    "drawn batches": DRAWN,
    "drawn batches beside a constant of another length": (*DRAWN, "--having", "timed"),
    "drawn batches, as many as one process draws": (*DRAWN, "--having", "global_batch"),
    "accelerate": ("torchrun", "--nproc-per-node", "2", "with_accelerate.py", "--having", "accumulation"),
    "accelerate, evaluation": ("torchrun", "--nproc-per-node", "2", "with_accelerate.py", "--having", "evaluation"),
    "trainer": ("torchrun", "--nproc-per-node", "2", "with_trainer.py", "--having", "averaged"),
    "fabric": ("python", "with_fabric.py"),
    "fabric, spawned": ("python", "with_fabric.py", "--having", "spawn"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_script_is_equal_and_nothing_is_held_against_it(name, tmp_path):
    verdict = proven(tmp_path, *RIGHT[name])
    assert verdict["answer"] == "equal", verdict["said"]
    assert {each["level"] for each in verdict["findings"]} <= {"note"}
    assert len(verdict["table"]) == 8
    assert all(line["distance"] < (0.1 if name == "bf16" else 1e-3) for line in verdict["table"])
    assert all(line["loss"] < 10 for line in verdict["table"])


@pytest.mark.slow
def test_half_precision_that_a_framework_sets_within_the_model_is_allowed_its_rounding(tmp_path):
    verdict = proven(tmp_path, "torchrun", "--nproc-per-node", "2", "with_accelerate.py", "--having", "bf16")
    assert verdict["answer"] == "equal", verdict["said"]
    assert (
        "differences of up to 0.12 of what training changes do not count" in verdict["kinds"]["half_precision"]["says"]
    )


WRONG = {
    "same_samples": ("same_samples", TORCHRUN, "scores = called"),
    "other_data": ("other_data", TORCHRUN, "scores = called"),
    "other_weights": ("beginning", SPAWN, ""),
    "inner_model": ("apart", TORCHRUN, ""),
    "summed": ("summed", TORCHRUN, "scaler.scale(loss).backward()"),
    "averaged_twice": ("averaged_twice", SPAWN, "scaler.scale(loss).backward()"),
    "not_cleared": ("not_cleared", TORCHRUN, "scaler.scale(loss).backward()"),
    "drifting": ("apart", TORCHRUN, "scaler.step(optimizer)"),
    "schedule_of_ranks": ("schedule", TORCHRUN, "scaler.step(optimizer)"),
    "decay_of_ranks": ("setting", TORCHRUN, "scaler.step(optimizer)"),
    "seed_of_rank": ("divided_otherwise", TORCHRUN, "scores = called"),
    "overlap": ("shared_samples", DRAWN, "loss = wrapped(*constant, points, labels)"),
    "coarse_hook": ("communication", TORCHRUN, "scaler.scale(loss).backward()"),
    "still_evaluating": ("evaluating", (*TORCHRUN, "--having", "validation", "--samples", "64"), "scores = called"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", WRONG)
def test_each_mistake_is_named_with_its_line(mistake, tmp_path):
    kind, command, line = WRONG[mistake]
    verdict = proven(tmp_path, *command, "--mistake", mistake)
    assert verdict["answer"] == "different", verdict["said"]
    wrong = [each for each in verdict["findings"] if each["level"] == "different"]
    assert [each["kind"] for each in wrong] == [kind], verdict["said"]
    if line:
        file, _, number = wrong[0]["line"].partition(":")
        assert line in (HERE / file).read_text(encoding="utf-8").splitlines()[int(number) - 1]


@pytest.mark.slow
@pytest.mark.parametrize("clip", ["clip_loop", "clip_value"])
def test_a_sum_is_found_however_the_script_clips(clip, tmp_path):
    verdict = proven(tmp_path, *TORCHRUN, "--mistake", "summed", "--having", f"sgd,{clip}")
    assert verdict["answer"] == "different", verdict["said"]
    assert verdict["kinds"].keys() == {"summed"}
    assert "the gradient before clipping is 2 times" in verdict["kinds"]["summed"]["says"]


@pytest.mark.slow
def test_a_sum_that_clipping_hides_is_not_told(tmp_path):
    """How the script computes the norm is not seen."""
    verdict = proven(tmp_path, *TORCHRUN, "--mistake", "summed", "--having", "sgd,clip_squares")
    assert verdict["answer"] == "not told", verdict["said"]
    assert "gradients come to the same norm in each step" in verdict["reason"]


CAUTIONED = {
    "batch_norm": ("batch_norm", "different", ("--having", "batch_norm")),
    "rate_scaled": ("rate_scaled", "equal", ("--mistake", "rate_scaled")),
    "every_micro_batch": ("every_micro_batch", "equal", ("--mistake", "every_micro_batch", "--having", "accumulation")),
    "same_order": ("same_order", "equal", ("--mistake", "same_order", "--samples", "64", "--epochs", "3")),
    "scaled": ("clipped_while_scaled", "different", ("--mistake", "clipped_while_scaled", "--having", "scaler")),
    "unscaled late": (
        "clipped_while_scaled",
        "different",
        ("--mistake", "clipped_while_scaled,unscaled_late", "--having", "scaler"),
    ),
    "planned": ("schedule_planned", "equal", ("--having", "planned")),
    "group_rate": ("rate_scaled", "equal", ("--mistake", "group_rate")),
    "uneven": ("mean_of_means", "different", ("--mistake", "uneven")),
    "single_class": ("no_gradient", "equal", ("--mistake", "single_class")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUTIONED)
def test_what_may_be_meant_or_costs_time_only_is_said_too(name, tmp_path):
    kind, answer, more = CAUTIONED[name]
    verdict = proven(tmp_path, *TORCHRUN, *more)
    assert verdict["answer"] == answer, verdict["said"]
    assert kind in verdict["kinds"], verdict["said"]
    assert verdict["kinds"][kind]["do"]


@pytest.mark.slow
def test_samples_that_an_evaluation_counts_twice_are_told(tmp_path):
    """41 samples on two ranks: the sampler repeats one."""
    verdict = proven(tmp_path, *TORCHRUN, "--having", "shared_validation", "--samples", "48", "--epochs", "3")
    assert verdict["answer"] == "equal", verdict["said"]
    assert "1 of 41 samples are handed out more than once within an evaluation" in verdict["kinds"]["repeated"]["says"]
    assert not verdict["kinds"].keys() & {"same_order", "left_out"}  # the same order does an evaluation no harm


@pytest.mark.slow
def test_samples_that_an_evaluation_leaves_out_are_told(tmp_path):
    """Of 41 samples two ranks get 20 each, in four batches of five."""
    having = "shared_validation,dropped_validation"
    verdict = proven(tmp_path, *TORCHRUN, "--having", having, "--samples", "48", "--epochs", "3")
    assert verdict["answer"] == "equal", verdict["said"]
    assert "an evaluation leaves out 1 of 41 samples" in verdict["kinds"]["left_out"]["says"]
    assert "repeated" not in verdict["kinds"]


@pytest.mark.slow
@pytest.mark.parametrize("gathered", ["own_evaluation", "mean_evaluation"])
def test_samples_that_fill_up_the_last_batches_are_no_mistake_of_the_sampler(gathered, tmp_path):
    """Accelerate fills 41 samples up to five batches of each rank. What a batch comes to on average has them too."""
    script = ("torchrun", "--nproc-per-node", "2", "with_accelerate.py", "--having", gathered)
    repeated = proven(tmp_path, *script)["kinds"]["repeated"]
    assert "9 of 41 samples are handed out more than once within an evaluation" in repeated["says"]
    assert "drop_last=True" in repeated["do"]


@pytest.mark.slow
def test_batches_that_the_script_draws_are_replayed_if_the_model_returns_its_loss(tmp_path):
    verdict = proven(tmp_path, *DRAWN, "--having", "outside", "--mistake", "step_later")
    assert verdict["answer"] == "not told"
    assert "its loss is not the model's own output" in verdict["reason"]
    says = verdict["kinds"]["step_later"]["says"]
    assert says == "rank 0 trains in each step what rank 1 has trained in the step before"


BESIDE = ("torchrun", "--nproc-per-node", "2", "beside.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        *("adversarial", "temperature", "sharded", "views", "closure", "fitted", "growing", "sparse", "graph"),
        *("penalised", "tried", "stacked"),
    ],
)
def test_all_that_is_trained_is_proven(kind, tmp_path):
    verdict = proven(tmp_path, *BESIDE, kind, options=("--steps", "4"))
    assert verdict["answer"] == "equal", verdict["said"]
    assert not verdict["findings"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how"), [("later", "mean"), ("later", "halves"), ("two_optimizers", ""), ("evaluated", "")]
)
def test_a_step_ends_where_the_script_goes_on_after_it(kind, how, tmp_path):
    verdict = proven(tmp_path, *BESIDE, kind, "--mistake", how, options=("--steps", "2"))
    assert verdict["answer"] == "equal", verdict["said"]
    assert not verdict["findings"]
    assert verdict["table"][0]["gradient"] == pytest.approx(1, abs=1e-4)


@pytest.mark.slow
def test_weights_that_are_made_alike_but_of_other_gradients_are_found(tmp_path):
    verdict = proven(tmp_path, *BESIDE, "later", "--mistake", "halves_of_one", options=("--steps", "2"))
    assert verdict["answer"] == "different", verdict["said"]
    assert "they are not those of the mean gradient" in verdict["kinds"]["step"]["says"]


@pytest.mark.slow
def test_the_last_step_has_all_of_its_optimizers(tmp_path):
    command = (*BESIDE, "two_optimizers", "--mistake", "not_averaged")
    verdict = proven(tmp_path, *command, options=("--steps", "1"))
    assert "1.weight, 1.bias" in verdict["kinds"]["apart"]["says"], verdict["said"]


PADDED = ("torchrun", "--nproc-per-node", "2", "padded.py")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["mask", "ignored", "left", "tokens_first", "fields"])
def test_samples_are_the_same_to_whatever_length_a_batch_is_padded(form, tmp_path):
    verdict = proven(tmp_path, *PADDED, form, options=("--steps", "6"))
    assert verdict["answer"] == "equal", verdict["said"]
    assert not verdict["findings"]
    assert verdict["table"][0]["samples"] == [6, 6]


@pytest.mark.slow
def test_a_mean_over_each_ranks_own_tokens_is_found_though_batches_are_padded(tmp_path):
    verdict = proven(tmp_path, *PADDED, "mask", "--mistake", "own_mean", options=("--steps", "4"))
    assert verdict["answer"] == "different", verdict["said"]
    assert "a mean of means is not the mean" in verdict["findings"][0]["do"]


@pytest.mark.slow
@pytest.mark.parametrize("having", ["masked", "masked,workers", "noisy,subset"])
def test_what_a_collator_or_a_whole_batch_draws_by_chance_is_drawn_again(having, tmp_path):
    verdict = proven(tmp_path, *BESIDE, "plain", "--having", having, options=("--steps", "4"))
    assert verdict["answer"] == "equal", verdict["said"]
    assert not verdict["findings"]


@pytest.mark.slow
@pytest.mark.parametrize("having", ["noisy", "noisy,workers", "masked"])
def test_augmentation_that_is_alike_on_all_ranks_is_said(having, tmp_path):
    command = (*BESIDE, "plain", "--mistake", "random_alike", "--having", having)
    verdict = proven(tmp_path, *command, options=("--steps", "4"))
    assert verdict["answer"] == "equal", verdict["said"]
    assert "augmentation changes the samples of each in the same way" in verdict["kinds"]["random"]["says"]


@pytest.mark.slow
@pytest.mark.parametrize("having", ["pieces", "pieces,workers"])
def test_samples_that_are_drawn_by_chance_are_the_same_on_ranks_of_one_seed(having, tmp_path):
    verdict = proven(
        tmp_path, *BESIDE, "plain", "--mistake", "random_alike", "--having", having, options=("--steps", "2")
    )
    assert "every rank draws the same samples" in verdict["kinds"]["same_samples"]["says"], verdict["said"]


@pytest.mark.slow
def test_samples_that_are_drawn_by_chance_are_right_on_ranks_with_seeds_of_their_own(tmp_path):
    verdict = proven(tmp_path, *BESIDE, "plain", "--having", "pieces", options=("--steps", "2"))
    assert verdict["answer"] == "equal", verdict["said"]


@pytest.mark.slow
def test_noise_that_is_added_to_gradients_is_not_told(tmp_path):
    verdict = proven(tmp_path, *BESIDE, "plain", "--mistake", "noise", options=("--steps", "4"))
    assert verdict["answer"] == "not told", verdict["said"]
    assert "the model draws random numbers" in verdict["reason"]


@pytest.mark.slow
def test_ranks_that_each_hold_a_part_of_a_layer_are_not_told(tmp_path):
    verdict = proven(tmp_path, *BESIDE, "inputs", "--mistake", "same_samples", options=("--steps", "2"))
    assert verdict["answer"] == "not told", verdict["said"]
    assert "ranks hold parameters of their own (part.weight)" in verdict["reason"]


@pytest.mark.slow
def test_samples_that_draw_nothing_have_no_augmentation(tmp_path):
    verdict = proven(tmp_path, *BESIDE, "plain", "--mistake", "random_alike", options=("--steps", "4"))
    assert not verdict["findings"], verdict["said"]


@pytest.mark.slow
def test_a_mistake_is_found_though_a_collator_draws(tmp_path):
    command = (*BESIDE, "plain", "--having", "masked", "--mistake", "summed")
    verdict = proven(tmp_path, *command, options=("--steps", "4"))
    assert verdict["kinds"].keys() == {"summed"}, verdict["said"]


@pytest.mark.slow
@pytest.mark.parametrize("having", ["by_hand", "by_hand,noisy,workers", "by_hand,masked"])
def test_a_script_that_divides_its_data_by_hand_is_proven(having, tmp_path):
    """Each rank's loader has another part of the data, and those of one process all of it."""
    verdict = proven(tmp_path, *BESIDE, "plain", "--having", having, options=("--steps", "4"))
    assert verdict["answer"] == "equal", verdict["said"]
    assert not verdict["findings"]


@pytest.mark.slow
def test_parts_that_each_rank_takes_from_an_order_of_its_own_are_found(tmp_path):
    """Although no sample of the recorded steps need be repeated."""
    command = (*BESIDE, "plain", "--having", "by_hand", "--mistake", "own_order")
    verdict = proven(tmp_path, *command, options=("--steps", "2"))
    assert verdict["answer"] == "different", verdict["said"]
    says = verdict["kinds"]["divided_otherwise"]["says"]
    assert re.fullmatch(r"\d\d of 256 samples are in the parts of more than one rank, and \d\d in none", says)


@pytest.mark.slow
def test_what_a_collator_draws_from_its_own_generator_is_not_told(tmp_path):
    verdict = proven(tmp_path, *BESIDE, "plain", "--having", "own_generator", options=("--steps", "4"))
    assert verdict["answer"] == "not told", verdict["said"]
    assert "two runs as one process train other samples" in verdict["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mistake", "drifts"),
    [
        ("adversarial", "inner_model", "1.weight"),
        ("temperature", "not_averaged", "SGD.param_groups[1]['params'][0]"),
        ("growing", "only_old", "1.weight"),
    ],
)
def test_a_parameter_that_drifts_is_found_wherever_it_is(kind, mistake, drifts, tmp_path):
    verdict = proven(tmp_path, *BESIDE, kind, "--mistake", mistake, options=("--steps", "4"))
    assert drifts in verdict["kinds"]["apart"]["says"], verdict["said"]


@pytest.mark.slow
def test_a_parameter_beside_the_model_that_begins_otherwise_on_each_rank_is_found(tmp_path):
    verdict = proven(tmp_path, *BESIDE, "temperature", "--mistake", "other_weights", options=("--steps", "4"))
    assert "SGD.param_groups[1]['params'][0]" in verdict["kinds"]["beginning"]["says"], verdict["said"]


@pytest.mark.slow
def test_one_process_is_told_that_it_is_one_where_a_script_is_told_the_number_of_ranks(tmp_path):
    command = ("env", "NGPU=2", *BESIDE, "plain", "--mistake", "averaged_twice")
    verdict = proven(tmp_path, *command, options=("--steps", "4"))
    assert verdict["kinds"].keys() == {"averaged_twice"}, verdict["said"]


@pytest.mark.slow
def test_ranks_with_the_same_samples_are_found_beside_noise_of_their_own(tmp_path):
    verdict = proven(tmp_path, *BESIDE, "adversarial", "--mistake", "same_samples", options=("--steps", "4"))
    assert "every rank trains the same samples: 16, of which 8" in verdict["kinds"]["same_samples"]["says"]


@pytest.mark.slow
def test_a_single_number_whose_gradient_is_summed_is_found(tmp_path):
    """It is some 1e-5 of the whole gradient, which is the same within what rounding does."""
    verdict = proven(tmp_path, *BESIDE, "temperature", "--mistake", "summed", options=("--steps", "4"))
    assert re.match(
        r"the gradient of SGD\.param_groups\[1\]\['params'\]\[0\] is 2 times what it is on one process, and those of"
        " all others are the same",
        verdict["kinds"]["own_gradient"]["says"],
    ), verdict["said"]


@pytest.mark.slow
def test_the_imaginary_part_of_a_gradient_counts(tmp_path):
    verdict = proven(tmp_path, *BESIDE, "sparse", "--mistake", "imaginary", options=("--steps", "4"))
    assert verdict["answer"] == "different", verdict["said"]
    assert "turn" in verdict["reason"]


@pytest.mark.slow
def test_a_sum_of_sharded_gradients_is_found_though_they_are_clipped(tmp_path):
    verdict = proven(tmp_path, *BESIDE, "sharded", "--mistake", "summed", options=("--steps", "4"))
    assert verdict["answer"] == "different", verdict["said"]
    assert "the gradient before clipping is 2 times" in verdict["kinds"]["summed"]["says"]


@pytest.mark.slow
def test_ranks_that_update_their_shards_at_rates_of_their_own_are_found(tmp_path):
    verdict = proven(tmp_path, *BESIDE, "sharded", "--mistake", "rate_of_rank", options=("--steps", "4"))
    assert verdict["kinds"].keys() == {"apart"}, verdict["said"]
    assert "ranks step with different learning rates" in verdict["kinds"]["apart"]["says"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        # One process trains as little as the ranks.
        (("sharded", "--mistake", "never_averaged"), "no step changed any weight, as no parameter had a gradient"),
        (("plain", "--mistake", "stale_optimizer"), "no step changed any weight, though there are gradients"),
        # Each rank draws other weights of the loss than one process.
        (("plain", "--mistake", "weighted"), "two runs as one process differ by"),
        # The gradient of one process is twice as large, as its batches are.
        (("plain", "--mistake", "sum"), "a sum divided by a fixed number"),
        # Ranks have the same labels, and other noise in what belongs to them.
        (("plain", "--having", "noise_of_rank"), "a data set draws its augmentation by rank"),
        (("plain", "--having", "noise_of_rank,workers"), "a data set draws its augmentation by rank"),
        # Some ranks do steps that the others do not.
        (("joined",), "ranks end after 2, 3 steps"),
    ],
    ids=["no_gradient", "stale_optimizer", "weighted", "sum", "by_rank", "by_rank_in_workers", "joined"],
)
def test_what_proves_nothing_is_not_told(script, reason, tmp_path):
    verdict = proven(tmp_path, *BESIDE, *script, options=("--steps", "4"))
    assert verdict["answer"] == "not told", verdict["said"]
    assert reason in verdict["reason"]


@pytest.mark.slow
def test_an_optimizer_that_steps_on_one_rank_only_is_found(tmp_path):
    verdict = proven(tmp_path, *BESIDE, "plain", "--mistake", "one_steps", options=("--steps", "4"))
    assert verdict["answer"] == "different", verdict["said"]
    assert verdict["kinds"]["idle"]["says"].startswith("of 2 ranks, only these did a step: 0; the others compute")
    assert verdict["kinds"]["idle"]["line"].startswith("beside.py:")


@pytest.mark.slow
def test_ranks_that_hold_flat_parts_do_not_begin_with_other_weights(tmp_path):
    verdict = proven(tmp_path / "right", *BESIDE, "flat", options=("--steps", "4"))
    assert verdict["answer"] == "not told", verdict["said"]
    assert "FullyShardedDataParallel" in verdict["reason"]
    assert not verdict["findings"]
    wrong = proven(tmp_path / "wrong", *BESIDE, "flat", "--mistake", "same_samples", options=("--steps", "4"))
    assert "same_samples" in wrong["kinds"], wrong["said"]


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [(), ("--mistake", "marked")])
def test_ranks_with_experts_of_their_own_are_not_told(mistake, tmp_path):
    verdict = proven(tmp_path, *BESIDE, "experts", *mistake, options=("--steps", "4"))
    assert verdict["answer"] == "not told", verdict["said"]
    assert "ranks hold parameters of their own (1.weight, 1.bias)" in verdict["reason"]
    assert verdict["kinds"].keys() == {"own_parameters"}


@pytest.mark.slow
def test_parameters_that_begin_unlike_and_are_averaged_are_a_mistake(tmp_path):
    verdict = proven(tmp_path, *BESIDE, "experts", "--mistake", "averaged", options=("--steps", "4"))
    assert verdict["answer"] == "different", verdict["said"]
    assert "rank 1 begins with other weights than rank 0: 1.weight" in verdict["kinds"]["beginning"]["says"]


@pytest.mark.slow
def test_a_model_that_draws_a_number_for_a_whole_batch_is_not_told(tmp_path):
    """Each rank draws others, while both replays would draw the same."""
    verdict = proven(tmp_path, *BESIDE, "layer_drop")
    assert verdict["answer"] == "not told", verdict["said"]
    assert "the model draws random numbers" in verdict["reason"]


@pytest.mark.slow
def test_ranks_with_data_sets_of_their_own_are_not_told(tmp_path):
    """If they divide the indices of data that differ, it is a mistake (other_data)."""
    command = (*BESIDE, "plain", "--having", "own_data", "--mistake", "same_samples")
    verdict = proven(tmp_path, *command, options=("--steps", "4"))
    assert verdict["answer"] == "not told", verdict["said"]
    assert "each rank goes through all of a data set of its own" in verdict["reason"]
    assert not verdict["findings"]


@pytest.mark.slow
def test_ranks_that_divide_layers_share_samples_by_right(tmp_path):
    """Two groups of two ranks, sharded between the groups; each group divides the layers."""
    verdict = proven(tmp_path, "torchrun", "--nproc-per-node", "4", "drawn.py", "--having", "divided")
    assert verdict["answer"] == "not told", verdict["said"]
    assert "tensor parallel" in verdict["reason"]
    assert not verdict["findings"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_is_proven(stage, tmp_path):
    verdict = proven(tmp_path, "torchrun", "--nproc-per-node", "2", "with_deepspeed.py", "--stage", str(stage))
    assert verdict["answer"] == "equal", verdict["said"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_gradient_that_is_divided_twice_is_seen_behind_zero_and_adam(stage, tmp_path):
    """Of which the weights show nothing."""
    command = ("torchrun", "--nproc-per-node", "2", "with_deepspeed.py", "--stage", str(stage))
    verdict = proven(tmp_path, *command, "--mistake", "averaged_twice")
    assert verdict["answer"] == "different", verdict["said"]
    assert "the gradient is 0.5 of what it is on one process" in verdict["kinds"]["averaged_twice"]["says"]


@pytest.mark.slow
def test_a_default_of_trainer_multiplies_a_classifier_s_loss_by_the_number_of_ranks(tmp_path):
    verdict = proven(tmp_path, "torchrun", "--nproc-per-node", "2", "with_trainer.py")
    assert "average_tokens_across_devices=False" in verdict["kinds"]["summed"]["do"], verdict["said"]


@pytest.mark.slow
@NEED_HOROVOD
def test_horovod_is_proven_and_a_rate_times_ranks_is_said(tmp_path):
    start = ("horovodrun", "-np", "2", "--gloo", "python", "with_horovod.py")
    verdict = proven(tmp_path, *start, "--having", "scaled_rate")
    assert verdict["answer"] == "equal", verdict["said"]
    assert verdict["kinds"].keys() == {"rate_scaled"}
    summed = proven(tmp_path / "summed", *start, "--mistake", "summed")
    assert summed["kinds"]["summed"]["level"] == "different"


@pytest.mark.slow
@pytest.mark.ci
def test_two_mistakes_are_both_named_as_the_guide_says(tmp_path):
    page = (PROJECT / "docs" / "guide" / "script.md").read_text(encoding="utf-8")
    start = ("torchrun", "--nproc-per-node", "2")
    verdict = proven(tmp_path, *start, str(PROJECT / "docs" / "guide" / "snippets" / "by_hand.py"))
    said = verdict["said"].partition("Not the model that it should be.\n")[2].partition("\n\u250f")[0]
    assert said in page, said


@pytest.mark.slow
@pytest.mark.ci
def test_a_command_that_starts_one_process_is_not_called_equal(tmp_path):
    verdict = proven(tmp_path, "torchrun", "--nproc-per-node", "1", "train.py", options=("--steps", "2"))
    assert verdict["answer"] == "not told"
    assert "trained in one process" in verdict["reason"]


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("python", "-c", "pass"), "did not import PyTorch"),
        (("python", "-c", "import torch"), "did no optimizer step"),
        (("torchrun", "--nproc-per-node", "2", "train.py", "--wrong"), "and ended with exit code"),
        (("no-such-launcher", "train.py"), "no-such-launcher: can't be started: No such file or directory"),
    ],
)
def test_a_command_that_does_not_train_is_said_in_words(command, says):
    finished = prove(*command)
    assert finished.returncode == (2 if command[0] == "no-such-launcher" else 3)
    assert says in finished.stdout + finished.stderr
    assert "Traceback" not in finished.stderr or "--wrong" in command


def test_an_error_of_lockstep_itself_is_not_taken_for_another_model(monkeypatch, capsys):
    script = runpy.run_path(str(PROJECT / "workflow/scripts/prove.py"))

    def broken(*_):
        raise TypeError("a mistake of ours")

    monkeypatch.setitem(script["main"].__globals__, "_prove", broken)
    monkeypatch.setattr(sys, "argv", ["prove.py", "--", "python", "train.py"])
    assert script["main"]() == 4
    assert "TypeError: a mistake of ours" in capsys.readouterr().err


UNAWARE = """
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).mean().backward()
    optimizer.step()
"""


MOVES = """
import os, runpy, sys

os.chdir(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, {here!r})
sys.argv = ["beside.py", "plain"]
runpy.run_path({here!r} + "/beside.py", run_name="__main__")
"""


@pytest.mark.slow
def test_a_script_that_leaves_its_folder_before_it_imports_pytorch_is_found_again(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "moves.py").write_text(MOVES.format(here=str(HERE)), encoding="utf-8")
    start = f"cd {tmp_path} && torchrun --nproc-per-node 2 inner/moves.py"
    verdict = proven(tmp_path, "sh", "-c", start, options=("--steps", "2"))
    assert verdict["answer"] == "equal", verdict["said"]


@pytest.mark.slow
def test_processes_that_do_not_know_of_each_other_are_said(tmp_path):
    (tmp_path / "unaware.py").write_text(UNAWARE, encoding="utf-8")
    start = f"{sys.executable} {tmp_path / 'unaware.py'}"
    verdict = proven(tmp_path, "sh", "-c", f"{start} & {start}; wait")
    assert verdict["answer"] == "not told", verdict["said"]
    assert "2 processes trained as rank 0 of 1, so they do not know of each other" in verdict["reason"]


@pytest.mark.slow
def test_a_command_that_fails_on_its_way_is_not_called_equal(tmp_path):
    verdict = proven(tmp_path, *TORCHRUN, "--mistake", "crash")
    assert verdict["answer"] == "not told"
    assert "after 3 of 8 steps" in verdict["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["torchrun --nproc-per-node 2 train.py", "python train.py --spawn 2 --port 29537"])
def test_a_wrapper_that_hides_that_its_training_failed_is_not_called_equal(script, tmp_path):
    verdict = proven(tmp_path, "sh", "-c", f"{script} --mistake crash; true")
    assert verdict["answer"] == "not told", verdict["said"]
    assert "the command failed after 3 of 8 steps: " in verdict["reason"]


@pytest.mark.slow
def test_a_wrapper_whose_training_ends_early_is_right(tmp_path):
    verdict = proven(tmp_path, "sh", "-c", "torchrun --nproc-per-node 2 train.py --samples 64 --epochs 1; true")
    assert verdict["answer"] == "equal", verdict["said"]
    assert len(verdict["table"]) == 4


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="PyTorch is built for real GPUs here")
def test_a_script_for_gpus_is_rehearsed_without_any(tmp_path):
    start = ("torchrun", "--nproc-per-node", "2", "on_gpus.py")
    verdict = proven(tmp_path / "right", *start, options=("--gpus", "2"))
    assert verdict["answer"] == "equal", verdict["said"]
    sharded = proven(tmp_path / "sharded", *start, "--sharded", options=("--gpus", "2"))  # begins with random DTensors
    assert sharded["answer"] == "equal", sharded["said"]
    wrong = proven(tmp_path / "wrong", *start, "--mistake", "left_on_the_host", options=("--gpus", "2"))
    assert wrong["answer"] == "not told"
    assert "found at least two devices" in wrong["said"]


@pytest.mark.slow
def test_two_scripts_are_held_against_one_another(tmp_path):
    against = ("--against", "torchrun --nproc-per-node 1 train.py")
    verdict = proven(tmp_path, *TORCHRUN, options=against)
    assert "16 samples against 8" in verdict["reason"]
    same = proven(tmp_path / "same", *TORCHRUN, options=("--against", " ".join(SPAWN)))
    assert same["answer"] == "equal", same["said"]
    summed = proven(tmp_path / "summed", *TORCHRUN, "--mistake", "summed", options=("--against", " ".join(SPAWN)))
    assert "the nearest to the loss is 5.bias, 2 times as large" in summed["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(("mistake", "answer"), [("", "equal"), ("own_term", "different")])
def test_whole_steps_that_adam_makes_of_rounding_are_no_difference_of_two_scripts(mistake, answer, tmp_path):
    """The gradient of a key's bias in attention is nothing but rounding."""
    script = ("torchrun", "--nproc-per-node", "2", "attending.py", f"--mistake={mistake}")
    verdict = proven(tmp_path, *script, options=("--against", "python attending.py"))
    assert verdict["answer"] == answer, verdict["said"]


@pytest.mark.slow
def test_two_scripts_whose_clipping_hides_a_sum_are_not_told(tmp_path):
    clips = "--having sgd,by_hand,clip_squares"
    against = ("--against", f"{' '.join(SPAWN)} {clips}", "--steps", "4")
    verdict = proven(tmp_path, *TORCHRUN, *clips.split(), "--mistake", "summed", options=against)
    assert verdict["answer"] == "not told", verdict["said"]
    assert "gradients come to the same norm in each step" in verdict["reason"]


@pytest.mark.slow
def test_another_script_that_fails_or_ends_earlier_is_not_called_equal(tmp_path):
    spawned = " ".join(SPAWN)
    crashed = proven(tmp_path / "crashed", *TORCHRUN, options=("--against", f"{spawned} --mistake crash"))
    assert crashed["answer"] == "not told", crashed["said"]
    assert "the other command ended with exit code 1 after 3 of 8 steps" in crashed["reason"]
    longer = (*TORCHRUN, "--samples", "64", "--epochs", "2")  # 8 steps
    ends = proven(tmp_path / "ends", *longer, options=("--against", f"{spawned} --samples 64 --epochs 1"))
    assert "training ends after 8 steps, against 4" in ends["kinds"]["length"]["says"], ends["said"]


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_and_nothing_beside_the_script(tmp_path):
    words = [sys.executable, str(PROJECT / "workflow/scripts/prove.py"), "--steps", "100000", "--", *TORCHRUN]
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    before = sorted(HERE.iterdir())
    process = subprocess.Popen([*words, "--epochs", "100000"], cwd=HERE, env=environment, stderr=subprocess.PIPE)
    until = time.monotonic() + 60
    while time.monotonic() < until and len(psutil.Process(process.pid).children(recursive=True)) < 3:
        time.sleep(0.2)
    time.sleep(5)
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(2)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(below) >= 3
    assert not [each for each in below if each.is_running()]
    assert sorted(HERE.iterdir()) == before


HANGS = """
import subprocess
from pathlib import Path

import torch

lock = Path(__file__).with_name("lock")
lock.touch()
print("compiles")
try:
    subprocess.run(["sleep", "600"])
finally:
    lock.unlink()
"""


def test_a_script_that_hangs_is_ended_as_by_ctrl_c_and_leaves_no_lock(tmp_path):
    """PyTorch compiles under such a lock, and for one that is left later runs would wait for ever."""
    (tmp_path / "hangs.py").write_text(HANGS, encoding="utf-8")
    finished = prove(sys.executable, "-u", str(tmp_path / "hangs.py"), options=("--patience", "20"))
    assert finished.returncode == 3
    assert "compiles" in finished.stdout
    assert "no further step in 20 s; it was ended" in finished.stdout + finished.stderr
    assert not (tmp_path / "lock").exists()


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["", "same_samples"])
def test_a_training_that_hangs_says_where_each_rank_waits_and_what_was_found(mistake, tmp_path):
    command = (*BESIDE, "waits", *(("--mistake", mistake) if mistake else ()))
    verdict = proven(tmp_path, *command, options=("--patience", "20"))
    lines = (HERE / "beside.py").read_text(encoding="utf-8").splitlines()
    hung = verdict["kinds"]["not_compared"]["says"] if mistake else verdict["reason"]
    assert "no further step in 20 s" in hung, verdict["said"]
    at = dict(re.findall(r"rank (\d) did 2 steps and is at (beside.py:\d+ in \w+)", hung))
    for rank, call in (("0", "recv"), ("1", "backward")):
        place, _, called = at[rank].partition(" in ")
        assert called == call
        assert f"{call}(" in lines[int(place.partition(":")[2]) - 1]
    assert verdict["kinds"].keys() == ({"same_samples", "not_compared"} if mistake else set())


STUBBORN = """
import signal
import time
from pathlib import Path

import torch

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(__file__).with_name("ignores").touch()
time.sleep(600)
"""


def test_ctrl_c_twice_ends_also_a_script_that_ignores_it(tmp_path):
    (tmp_path / "stubborn.py").write_text(STUBBORN, encoding="utf-8")
    words = [sys.executable, str(PROJECT / "workflow/scripts/prove.py"), "--", sys.executable]
    process = subprocess.Popen([*words, str(tmp_path / "stubborn.py")], cwd=tmp_path, stderr=subprocess.PIPE)
    until = time.monotonic() + 60
    while time.monotonic() < until and not (tmp_path / "ignores").exists():
        time.sleep(0.2)
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(2)
    time.sleep(2)  # it waits for the script to end
    process.send_signal(2)
    process.communicate(timeout=60)
    _, left = psutil.wait_procs(below, 2)
    for each in left:
        each.kill()
    assert below
    assert not left
