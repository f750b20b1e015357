"""Snapshots: the model at the end of every few epochs, which can be converted, tested and used for predictions.

A snapshot's folder has the layout of a run's: settings.json, the checkpoint in the strategy's own format, and what is
made from it. It is written under a temporary name, outside the timed window, and renamed when it is complete.
"""

import shutil
from pathlib import Path

from lockstep import paths
from lockstep.data.plan import Plan
from lockstep.files import link, named_when_full, put_in_place
from lockstep.rank import checkpoint
from lockstep.rank.training import Training


class Snapshots:
    """The snapshots of one run; `samples` is the size of the training split, which determines where an epoch ends."""

    def __init__(self, training: Training, plan: Plan, samples: int):
        self.training, self.plan = training, plan
        every = training.train.snapshot_every
        ends = plan.epoch_ends(samples) if every else {}
        # By the number of steps at their end.
        self.epochs = {step: epoch for epoch, step in ends.items() if epoch % every == 0}
        self.noted: list[dict] = []
        if every and not self.epochs:
            none = f"no snapshot was taken: none of its {plan.steps} steps ends epoch {every}"
            training.strategy.notes.append(none)

    def due(self, step: int) -> bool:
        """Whether to take one after `step`; that of the last step is taken by `finish`, after the last evaluation."""
        return step in self.epochs and step < self.plan.steps

    def finish(self, dev: list[dict]) -> None:
        """Take the last snapshot, if one is due after the last step; `dev` as in `take`."""
        if self.plan.steps in self.epochs:
            self.take(self.plan.steps, dev)

    def take(self, step: int, dev: list[dict]) -> None:
        """Write the model as it is after `step`. Call on every rank, outside the timed window.

        `dev` is the history of evaluations (rank/dev_split.py); if one was made after this step, its scores are noted.
        """
        training, epoch = self.training, self.epochs[step]
        strategy, began, main = training.strategy, training.clock.now(), training.strategy.world.rank == 0
        final = paths.snapshot(training.folder, epoch)
        temporary = final.with_name(f".{final.name}.tmp")
        with named_when_full(final):
            if main:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
            checkpoint.barrier(strategy)
            with strategy.as_kept():
                checkpoint.save(strategy, temporary, {"epoch": epoch, "step": step, "plan": self.plan.hash})
            if main:
                shutil.copy2(training.folder / paths.SETTINGS, temporary)
                put_in_place(temporary, final)
        checkpoint.barrier(strategy)
        scores = [{key: value for key, value in each.items() if key != "step"} for each in dev if each["step"] == step]
        about = {"epoch": epoch, "step": step, "dev": scores[0] if scores else None}
        self.noted.append(about | {"seconds": training.clock.now() - began})
        training.files.event("snapshot", {"epoch": epoch, "step": step})
        training.progress.alive()

    def take_over(self, run: Path, noted: list[dict]) -> None:
        """Continue with exactly the snapshots that were `noted` in a saved state of `run`; any others are removed.

        Call on every rank.
        """
        self.noted, folder = noted, self.training.folder
        if self.training.strategy.world.rank:
            return
        epochs = [about["epoch"] for about in noted]
        for epoch, later in paths.snapshots(folder).items():
            if epoch not in epochs or run.resolve() != folder.resolve():
                shutil.rmtree(later)
        for epoch in epochs:
            theirs, ours = paths.snapshot(run, epoch), paths.snapshot(folder, epoch)
            if not theirs.is_dir():
                self.training.strategy.notes.append(f"its snapshot of epoch {epoch} was missing when it resumed")
            elif not ours.is_dir():
                made = shutil.ignore_patterns(paths.MODEL, paths.TEST)
                shutil.copytree(theirs, ours, copy_function=link, ignore=made)
