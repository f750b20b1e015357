"""Every launcher with every mistake: what `lockstep prove` answers, which mistakes it names, in which lines.

A case is a set of mistakes of which none hides another, so that few runs tell many cells; a right script is one, too.
LAUNCHERS has how each starts train.py, CASES what is then to be said, and FRAMEWORKS the same of scripts that are
written for one. Cells that can't be told must say so.

`make test` runs QUICK, in which each launcher and each mistake occurs.
"""

import shutil
import subprocess
from dataclasses import dataclass, field
from importlib.util import find_spec

import pytest
import torch

from tests.script.test_prove import HERE, HOROVOD, proven

TWO = ("--nproc-per-node", "2")
ACCELERATE = ("accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")
ACCELERATE += ("--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no")
# On CPUs, DeepSpeed's launcher starts LOCAL_SIZE ranks.
DEEPSPEED = ("env", "LOCAL_SIZE=2", "deepspeed", "--master_port", "29533")
PORT = ("--port", "29535")  # other tests may use the usual one at the same time
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2")
LAUNCHERS = {
    "torchrun": ("torchrun", *TWO, "train.py"),
    "launch": ("python", "-m", "torch.distributed.launch", "--use-env", "--master-port", "29536", *TWO, "train.py"),
    "accelerate": (*ACCELERATE, "train.py"),
    "deepspeed": (*DEEPSPEED, "train.py"),
    "srun": ("srun", "-n", "2", "python", "train.py", *PORT),
    "mpirun": (*MPIRUN, "python", "train.py", *PORT),
    "mp.spawn": ("python", "train.py", "--spawn", "2", *PORT),
    "fork": ("python", "train.py", "--fork", "2", *PORT),
}
CALL, BACKWARD, STEP, FIT = "(points", "backward(", "step(", "trainer.fit("  # in the line that is named


@dataclass(frozen=True)
class Case:
    """Options of a script; the level of each finding, by kind, with what its line holds; what can't be told else."""

    options: tuple[str, ...] = ()
    found: dict[str, tuple[str, str]] = field(default_factory=dict)
    untold: str = ""  # the reason

    @property
    def answer(self) -> str:
        wrong = any(level == "different" for level, _ in self.found.values())
        return "different" if wrong else "not told" if self.untold else "equal"


def mistakes(*names: str, having: str = "", samples: int = 256) -> tuple[str, ...]:
    options = ("--mistake", ",".join(names)) if names else ()
    options += ("--having", having) if having else ()
    return options if samples == 256 else (*options, "--samples", str(samples), "--epochs", "8")


SAME_SAMPLES = {"same_samples": ("different", CALL)}
SUMMED = {"summed": ("different", BACKWARD)}
TWICE = {"averaged_twice": ("different", BACKWARD)}
NOT_CLEARED = {"not_cleared": ("different", BACKWARD)}
APART = {"apart": ("different", STEP)}
BATCH_NORM = {"batch_norm": ("different", BACKWARD)}
CLIPPED = {"clipped_apart": ("different", "clip_grad_norm_")}
RANDOM = {"random": ("note", "")}
REPEATED = {"repeated": ("caution", "")}
CASES = {
    "right": Case(),
    "samples": Case(
        mistakes("same_samples", "summed", "schedule_of_ranks", "not_cleared", "unused", "random_alike"),
        SAME_SAMPLES
        | SUMMED
        | NOT_CLEARED
        | RANDOM
        | {"schedule": ("different", STEP), "without_gradient": ("note", "")},
    ),
    "average": Case(
        mistakes(
            *("averaged_twice", "every_micro_batch", "rate_scaled", "same_order", "saved_as_module"),
            having="accumulation",
            samples=31,
        ),
        TWICE
        | REPEATED
        | {
            "every_micro_batch": ("note", CALL),
            "rate_scaled": ("caution", STEP),
            "same_order": ("caution", ""),
            "saved_as_module": ("note", "torch.save"),
        },
    ),
    "beginning": Case(
        mistakes("other_weights", "clipped_apart", having="planned"),
        {"beginning": ("different", ""), "schedule_planned": ("caution", STEP)} | CLIPPED,
    ),
    "drift": Case(mistakes("drifting", "wrong_number"), APART | {"gradient_scale": ("different", BACKWARD)}),
    "data": Case(
        mistakes("inner_model", "other_data", "clipped_while_scaled", having="scaler"),
        APART | {"other_data": ("different", CALL), "clipped_while_scaled": ("different", "clip_grad_norm_")},
    ),
    "hook": Case(mistakes("coarse_hook"), {"communication": ("different", BACKWARD)}),
    "norm": Case(mistakes(having="batch_norm"), BATCH_NORM),
    "uneven": Case(mistakes("uneven"), {"mean_of_means": ("different", BACKWARD)}),
    "clipped": Case(mistakes("summed", having="clip,sgd"), SUMMED),  # which makes the gradients alike
    "two": Case(
        mistakes("uneven", "not_cleared", having="frozen_norm"),
        {"mean_of_means": ("different", BACKWARD)} | NOT_CLEARED,
    ),
    "tokens": Case(mistakes("tokens"), {"gradient": ("different", BACKWARD)}),
    "crash": Case(mistakes("crash"), untold="after 3 of 4 steps"),
}
# What only a comparison with one process can tell.
COMPARED = {"summed", "averaged_twice", "gradient_scale", "schedule", "schedule_planned", "rate_scaled", "other_data"}
COMPARED |= {"communication", "batch_norm", "mean_of_means", "gradient"}
FORKED = "forks of a process that had imported PyTorch"

FRAMEWORKS = {
    "with_accelerate": {
        "right": Case(mistakes(having="accumulation"), RANDOM),
        "average": Case(mistakes("averaged_twice", "not_cleared"), TWICE | NOT_CLEARED | RANDOM),
        "samples": Case(mistakes("same_samples"), SAME_SAMPLES | RANDOM),
        "divided": Case(mistakes("divided_twice", samples=64), {"epoch_too_short": ("caution", "")} | RANDOM),
        "schedule": Case(mistakes("schedule_of_ranks"), {"schedule": ("different", STEP)} | RANDOM),
        "prepared": Case(mistakes(having="prepared_schedule"), {"schedule_planned": ("caution", STEP)} | RANDOM),
        "inner": Case(mistakes("inner_model"), APART | RANDOM),
        "norm": Case(mistakes(having="batch_norm"), BATCH_NORM | RANDOM),
        "dispatched": Case(mistakes(having="dispatch,accumulation,planned,workers,alike"), RANDOM),
        "dispatched_rest": Case(mistakes(having="dispatch,uneven", samples=41), REPEATED),
        "dispatched_split": Case(mistakes(having="dispatch,split,accumulation", samples=41), REPEATED),
        "dispatched_whole": Case(mistakes(having="dispatch,drop_last", samples=41)),
        "dispatched_average": Case(mistakes("averaged_twice", "not_cleared", having="dispatch"), TWICE | NOT_CLEARED),
        "streamed": Case(mistakes(having="streamed,accumulation,planned,workers"), RANDOM),
        "streamed_rest": Case(mistakes(having="streamed", samples=41), RANDOM),
        "streamed_split": Case(mistakes(having="streamed,split", samples=41), RANDOM),
        "streamed_sum": Case(mistakes("summed", having="streamed,accumulation"), SUMMED | RANDOM),
        "streamed_clip": Case(mistakes("clipped_apart", having="streamed,accumulation"), CLIPPED | RANDOM),
        "streamed_by_each": Case(mistakes(having="streamed,not_dispatched"), RANDOM, untold="(IterableDataset"),
    },
    "with_deepspeed": {
        "right": Case(found=RANDOM),
        "average": Case(mistakes("averaged_twice"), TWICE | RANDOM),
        "drift": Case(mistakes("drifting"), APART | RANDOM),
    },
    "with_horovod": {
        "right": Case(),
        "samples": Case(mistakes("same_samples", "summed", "not_cleared"), SAME_SAMPLES | SUMMED | NOT_CLEARED),
        "beginning": Case(
            mistakes("other_weights", having="scaled_rate"),
            {"beginning": ("different", ""), "rate_scaled": ("caution", STEP)},
        ),
    },
    "with_trainer": {
        "right": Case(mistakes(having="averaged"), RANDOM),
        "average": Case(found=RANDOM | {"summed": ("different", ".train()")}),  # its default, of a classifier
    },
    "with_fabric": {
        "right": Case(found=RANDOM),
        "average": Case(mistakes("averaged_twice", "not_cleared"), TWICE | NOT_CLEARED | RANDOM),
        "samples": Case(mistakes("same_samples"), SAME_SAMPLES | RANDOM),
        "inner": Case(mistakes("inner_model"), APART | RANDOM),
        "norm": Case(mistakes(having="batch_norm"), BATCH_NORM | RANDOM),
    },
    "with_lightning": {
        "right": Case(mistakes(having="clip"), RANDOM),
        "average": Case(
            mistakes("averaged_twice", "rate_scaled"),
            {"averaged_twice": ("different", FIT), "rate_scaled": ("caution", FIT)} | RANDOM,
        ),
        "samples": Case(mistakes("same_samples"), RANDOM | {"same_samples": ("different", FIT)}),
        "drift": Case(mistakes("drifting"), RANDOM | {"apart": ("different", FIT)}),
        "norm": Case(mistakes(having="batch_norm"), RANDOM | {"batch_norm": ("different", FIT)}),
    },
}
STARTED = {
    "with_accelerate": ACCELERATE,
    "with_deepspeed": DEEPSPEED,
    "with_horovod": ("horovodrun", "-np", "2", "--gloo", "python"),
    "with_trainer": ("torchrun", *TWO),
    "with_fabric": ("python",),
    "with_lightning": ("python",),
}
QUICK = {
    *(("torchrun", "average"), ("torchrun", "uneven"), ("launch", "beginning"), ("launch", "drift")),
    *(("accelerate", "data"), ("deepspeed", "hook"), ("mp.spawn", "samples"), ("mp.spawn", "tokens")),
    *(("fork", "drift"), ("srun", "beginning"), ("mpirun", "data"), ("with_accelerate", "inner")),
    ("with_accelerate", "dispatched_rest"),
    *(("with_deepspeed", "average"), ("with_horovod", "samples"), ("with_trainer", "average")),
    *(("with_fabric", "norm"), ("with_lightning", "average")),
}


def lacking(launcher: str) -> str:
    """What a launcher needs that is not there; empty if it can be tried."""
    if launcher == "with_lightning" and not find_spec("lightning"):
        return "needs: pip install lightning"
    if launcher == "with_horovod" and not HOROVOD:
        return "needs: make horovod"
    if launcher == "mpirun" and not shutil.which("mpirun"):
        return "needs: Open MPI"
    if launcher == "srun":
        asked = ["sinfo", "-h", "-t", "idle"]
        slurm = shutil.which("sinfo") and subprocess.run(asked, capture_output=True, check=False)
        if not slurm or not slurm.stdout:
            return "needs: a Slurm with an idle node"
    return ""


def cells() -> list:
    """Each launcher with each case; all but those of QUICK are slow."""
    everything = [(launcher, name) for launcher in LAUNCHERS for name in CASES]
    everything += [(script, name) for script, cases in FRAMEWORKS.items() for name in cases]
    assert set(everything) >= QUICK
    return [
        pytest.param(*cell, id="-".join(cell), marks=() if cell in QUICK else pytest.mark.slow) for cell in everything
    ]


@pytest.mark.parametrize(("launcher", "name"), cells())
def test_each_launcher_with_each_mistake(launcher, name, tmp_path):
    if missing := lacking(launcher):
        pytest.skip(missing)
    if launcher in FRAMEWORKS:
        command, case = (*STARTED[launcher], f"{launcher}.py"), FRAMEWORKS[launcher][name]
    else:
        command, case = LAUNCHERS[launcher], CASES[name]
    if launcher == "fork":
        case = Case(case.options, {kind: case.found[kind] for kind in case.found.keys() - COMPARED}, FORKED)
    verdict = proven(tmp_path, *command, *case.options, options=("--steps", "4", "--patience", "300"))
    assert verdict["answer"] == case.answer, verdict["said"]
    untold = verdict["kinds"].pop("not_compared", {}).get("says", verdict["reason"])
    assert case.untold in untold
    assert {kind: each["level"] for kind, each in verdict["kinds"].items()} == {
        kind: level for kind, (level, _) in case.found.items()
    }, verdict["said"]
    for kind, (_, text) in case.found.items():
        if text:
            file, _, number = verdict["kinds"][kind]["line"].partition(":")
            assert text in (HERE / file).read_text(encoding="utf-8").splitlines()[int(number) - 1], kind


@pytest.mark.slow
def test_one_process_by_itself_is_not_told(tmp_path):
    assert "trained in one process" in proven(tmp_path, "python", "train.py", options=("--steps", "2"))["reason"]


@pytest.mark.slow
def test_a_batch_of_each_device_is_told_against_the_script_of_one(tmp_path):
    one = ("--against", "torchrun --nproc-per-node 1 train.py", "--steps", "2")
    for launcher in ("torchrun", "mp.spawn"):
        verdict = proven(tmp_path / launcher, *LAUNCHERS[launcher], options=one)
        assert verdict["answer"] == "different"
        assert "16 samples against 8" in verdict["reason"]


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="PyTorch is built for real GPUs here")
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_ranks_that_share_one_gpu_are_refused_as_nccl_refuses_them(launcher, tmp_path):
    command = (*LAUNCHERS[launcher][:-1], "on_gpus.py", "--mistake", "one_gpu")
    verdict = proven(tmp_path, *command, options=("--gpus", "2", "--steps", "2"))
    assert verdict["answer"] == "not told"
    assert "Duplicate GPU" in verdict["said"]
