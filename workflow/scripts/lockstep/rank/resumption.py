"""Saving and resuming: what a run saves while it trains, and how an interrupted run continues from it.

A saved state is a folder. It holds what the strategy writes (`Strategy.save_state`) and, for each rank, what is the
same for all strategies: random states, buffers, the schedule, losses, ledger, clock and scores. It is written under a
temporary name, with manifest.json (a hash of each file) last, and then renamed; the supervisor checks these hashes
before a rank reads the state (run/saved.py). Saving is outside the timed window.
"""

import random
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from lockstep import paths
from lockstep.errors import RunStopped
from lockstep.files import link, named_when_full, put_in_place, read_json, seal, write_json
from lockstep.rank import checkpoint
from lockstep.run import saved

# Folders of a saved state:
OWN = "strategy"  # what the strategy writes
BEST = "best"  # the checkpoint that the run keeps, if it has one already


class Resumption:
    """Saves the states of a run and restores them. `replay` is the rank's part of the plan (rank/replay.py)."""

    def __init__(self, replay):
        self.replay, self.training = replay, replay.training
        self.every, self.keep = self.training.train.checkpoint_every, self.training.train.keep
        self.began_at: list[int] = []  # the number of steps after which the run was resumed, each time
        self.cost = {"count": 0, "seconds": 0.0, "bytes": 0}

    def due(self, step: int) -> bool:
        """Whether to save the state after `step` steps: every `checkpoint_every` steps, and when the run is to stop."""
        if not self.every or step == self.replay.steps:
            return False
        return step % self.every == 0 or step == self.training.progress.stop_after

    def save(self, step: int) -> None:
        """Save the state after `step` steps. Call on every rank, outside the timed window.

        Raises RunStopped after saving if the run was asked to stop here, and RunFailed if a loss is not finite.
        """
        self.replay.mean_losses()  # raises if a loss is not finite, as no run can continue from such a state
        strategy, clock = self.training.strategy, self.training.clock
        began, main = clock.now(), strategy.world.rank == 0
        final = paths.saved_state(self.training.folder, step)
        temporary = final.with_name(f".{final.name}.tmp")
        if main:
            shutil.rmtree(temporary, ignore_errors=True)
            (temporary / OWN).mkdir(parents=True)
        checkpoint.barrier(strategy)
        with named_when_full(final):
            strategy.save_state(temporary / OWN)
            self._save_rank(temporary)
        checkpoint.barrier(strategy)
        if main:
            best = self.training.folder / paths.CHECKPOINT
            if best.is_dir():
                shutil.copytree(best, temporary / BEST, copy_function=link)
            seal(temporary, saved.describe(self.training.settings, self.replay.plan, step))
            put_in_place(temporary, final)
            self._count(final, clock.now() - began)
            for older in paths.saved_states(self.training.folder)[self.keep :]:
                shutil.rmtree(older)
        checkpoint.barrier(strategy)
        self.training.files.event("saved", {"step": step})
        self.training.progress.alive()
        if step == self.training.progress.stop_after and step < self.replay.steps:
            raise RunStopped(f"it was asked to stop, and its state after step {step} is saved")

    def restore(self, folder: Path) -> None:
        """Continue from the state in `folder`. Call on every rank, after the model is wrapped.

        Another number of ranks may have saved it. Then all that was recorded is divided anew, and the random numbers
        differ from those of an uninterrupted run.
        """
        strategy = self.training.strategy
        strategy.load_state(folder / OWN)
        plain = self._load_rank(folder)
        self.replay.snapshots.take_over(folder.parents[1], plain["snapshots"])
        self.began_at.append(self.replay.done)
        self.training.progress.reached(self.replay.done)
        if strategy.world.rank == 0 and (folder / BEST).is_dir():
            shutil.copytree(folder / BEST, self.training.folder / paths.CHECKPOINT, copy_function=link)
        checkpoint.barrier(strategy)

    def _count(self, folder: Path, seconds: float) -> None:
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        self.cost = {
            "count": self.cost["count"] + 1,
            "seconds": self.cost["seconds"] + seconds,
            "bytes": size,  # of the last state only
        }

    def _save_rank(self, folder: Path) -> None:
        """Save what each rank has of its own in two files: tensors, and the rest as JSON."""
        training, replay = self.training, self.replay
        files, clock, dev_split = training.files, training.clock, replay.dev_split
        steps, ids = files.ledger()
        tensors = {
            "ledger_steps": torch.from_numpy(steps),
            "ledger_ids": torch.from_numpy(ids),
            "seconds": torch.from_numpy(clock.step_seconds()),
            "random": torch.get_rng_state(),
        }
        if training.strategy.world.loss_parts:
            tensors["losses"] = replay.losses
            if replay.terms:
                tensors["term_losses"] = replay.term_losses
        if training.strategy.world.device.type == "cuda":
            tensors["random_cuda"] = torch.cuda.get_rng_state(training.strategy.world.device)
        tensors |= {f"buffer.{name}": buffer for name, buffer in training.strategy.trained_module().named_buffers()}
        contiguous = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(contiguous, _tensors_file(folder, training.strategy.world.rank))
        _, numbers, *rest = np.random.get_state()
        plain = {
            "step": replay.done,
            "replicas": training.strategy.world.replicas,
            "counts": training.strategy.world.counts,
            "schedule": {key: value for key, value in replay.schedule.state_dict().items() if key != "lr_lambdas"},
            "random": {"python": random.getstate(), "numpy": [numbers.tolist(), *rest]},
            "rates": replay.rates,
            "train_seconds": clock.seconds,
            "evaluation_seconds": clock.evaluation,
            "events": files.events,
            "joules": training.meter.joules if training.meter else {},
            "dev": dev_split.history,
            "best": dev_split.kept.best if np.isfinite(dev_split.kept.best) else None,
            "began_at": self.began_at,
            "snapshots": replay.snapshots.noted,
            "cost": self.cost,
        }
        write_json(_plain_file(folder, training.strategy.world.rank), plain)

    def _load_rank(self, folder: Path) -> dict:
        """Restore what a rank had of its own; returns the part that was saved as JSON."""
        training, replay, world = self.training, self.replay, self.training.strategy.world
        savers = ranks_of(folder)
        # States of earlier versions lack `replicas`; they had as many as ranks.
        replicas = read_json(_plain_file(folder, 0)).get("replicas", savers)
        as_it_was = (savers, replicas) == (world.size, world.replicas)
        rank = world.rank if as_it_was else 0
        tensors, plain = load_file(_tensors_file(folder, rank)), read_json(_plain_file(folder, rank))
        everyone = [tensors] if as_it_was else [load_file(_tensors_file(folder, saver)) for saver in range(savers)]
        replay.done, replay.rates = plain["step"], plain.get("rates", [])
        # The mean over the ranks that have a loss is the global batch's, even if each of them has that mean already.
        for name, noted in (("losses", replay.losses), ("term_losses", replay.term_losses)):
            if noted_before := [theirs[name] for theirs in everyone if name in theirs]:
                noted.copy_(_as_long_as(torch.stack(noted_before).mean(dim=0), replay.steps))
        groups = training.strategy.optimizer.param_groups
        scheduled = plain["schedule"] | {"lr_lambdas": [None] * len(groups)}
        if len(scheduled["base_lrs"]) != len(groups):  # tp parts them by how it divides weights; all have one rate
            scheduled |= {name: scheduled[name][:1] * len(groups) for name in ("base_lrs", "_last_lr")}
        replay.schedule.load_state_dict(scheduled)
        for group, rate in zip(groups, replay.schedule.get_last_lr(), strict=True):
            group["lr"] = rate  # not every optimizer saves it in its state
        ledgers = everyone
        if not as_it_was:
            counted = [read_json(_plain_file(folder, saver)).get("counts", True) for saver in range(savers)]
            counting = [theirs for theirs, counts in zip(everyone, counted, strict=True) if counts]
            ledgers = counting[world.replica :: world.replicas]
        for ledger in ledgers:
            training.files.take_over(ledger["ledger_steps"].numpy(), ledger["ledger_ids"].numpy())
        training.files.events = plain["events"] + training.files.events
        if training.meter and world.rank == 0:
            training.meter.joules = joules_until(folder)
        training.clock.restore(tensors["seconds"].numpy(), plain["train_seconds"], plain["evaluation_seconds"])
        replay.dev_split.history = plain["dev"]
        if plain["best"] is not None:
            replay.dev_split.kept.best = plain["best"]
        self.began_at, self.cost = plain["began_at"], plain["cost"]
        self.cost["count"] += 1  # the restored state itself, which could not count itself
        for name, buffer in training.strategy.trained_module().named_buffers():
            buffer.copy_(tensors[f"buffer.{name}"])
        if not as_it_was:
            training.strategy.notes.append(f"{savers} processes trained it up to step {replay.done}")
            draw_anew(training, replay.done)
            return plain
        # Random states come last, because the steps before may have drawn from them.
        version, numbers, gauss = plain["random"]["python"]
        random.setstate((version, tuple(numbers), gauss))
        keys, *rest = plain["random"]["numpy"]
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), *rest))
        if "random_cuda" in tensors and world.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["random_cuda"], world.device)
        torch.set_rng_state(tensors["random"])
        return plain


def ranks_of(folder: Path) -> int:
    """The number of ranks that saved the state in `folder`."""
    return len(list(folder.glob("rank-*.json")))


def joules_until(folder: Path) -> dict[str, float | None]:
    """What all machines together had counted when the state in `folder` was saved; None if one of them can't tell.

    The first rank takes over all of it, because the run may go on on other machines, or on more or fewer of them.
    """
    every = [read_json(_plain_file(folder, rank))["joules"] for rank in range(ranks_of(folder))]
    by_kind = {kind: [joules[kind] for joules in every if joules] for kind in ("gpu", "cpu")}
    return {kind: None if None in joules else sum(joules) for kind, joules in by_kind.items()}


def draw_anew(training, step: int) -> None:
    """Seed this rank after `step` steps that other ranks have trained, whose random states it can't take over."""
    strategy = training.strategy
    torch.manual_seed(derived_seed(training.train.seed, strategy.world.replica, step) + strategy.draws)


def derived_seed(*numbers: int) -> int:
    """A seed derived from all `numbers`; if one of them differs, so does the seed."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def _tensors_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.safetensors"


def _plain_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _as_long_as(losses: torch.Tensor, steps: int) -> torch.Tensor:
    """Losses as [..., steps], from a run that may have had another number of steps; missing ones are 0."""
    whole = losses.new_zeros(*losses.shape[:-1], steps)
    whole[..., : losses.shape[-1]] = losses[..., :steps]
    return whole
