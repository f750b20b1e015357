"""What one process trains: its run and, for a trial, the same plan again with other settings.

This module does what happens around the steps. The loop that takes the steps is a strategy's (`Run.train`), or that of
a user's own script (lockstep/session.py).
"""

import contextlib
import copy
import gc
import os
import platform
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from lockstep import paths, provenance
from lockstep.config import registry
from lockstep.config.hardware import World
from lockstep.config.settings import Settings
from lockstep.data.mapped import bytes_read
from lockstep.data.plan import Plan
from lockstep.errors import RunFailed
from lockstep.files import atomic_file, read_json, write_json
from lockstep.model import attention, lora, models
from lockstep.rank import checkpoint, environment, memory, readback
from lockstep.rank.clock import Clock
from lockstep.rank.dev_split import DevSplit
from lockstep.rank.energy import Meter
from lockstep.rank.replay import Replay
from lockstep.rank.resumption import derived_seed
from lockstep.rank.training import Training, set_up
from lockstep.rank.workers import Workers
from lockstep.run.progress import NODE, Progress, RankFiles
from lockstep.run.record import Compared, RankEnergy, RankMemory, RankSummary, Saved, Snapshot
from lockstep.tasks._task import Samples

_current: "Session | None" = None  # of this process


def current() -> "Session | None":
    """The session of this process; None if it trains nothing."""
    return _current


class Session:
    """One process of a run, from its settings to its end. Afterwards `strategy` is to be started, and `join` called."""

    def __init__(self, folder: Path, files: RankFiles):
        global _current  # a user's script asks for it, as it does not know the folder
        _current = self
        self.folder, self.files = folder, files
        self.progress: Progress | None = None
        self.trained = 0  # the number of runs that a user's script has finished
        self.clock = Clock()
        self.settings = Settings.from_json(read_json(folder / paths.SETTINGS))
        torch.set_num_threads(self.settings.hardware.threads)
        torch.set_num_interop_threads(1)
        gc.disable()
        self.strategy = registry.load(self.settings.strategy)(self.settings)
        # Before the ranks meet, because from then on Horovod's own thread uses a part of each rank's cores.
        models.import_code(Path(self.settings.data) / paths.WEIGHTS)
        if self.settings.train.lora:
            lora.load()
        gc.freeze()  # what is imported stays, so no later collection has to look through it
        gc.enable()
        self.clock.part("imports")
        self.workers = None
        if self.settings.hardware.workers:
            self.workers = Workers(self.settings)
            self.clock.part("workers")

    def join(self, world: World) -> None:
        """Called when the ranks have met; `world` is this one's place among them. Raises RunFailed if it is invalid."""
        self.clock.part("process_group")
        _require_own_device(world)
        _require_layout(world, self.settings)
        self.files.rank = world.rank
        if NODE not in os.environ:  # started from another node, as Horovod does
            self.files.node = world.rank // self.settings.hardware.processes_per_node
        _introduce(world)
        if world.rank:
            redirect(paths.rank_log(self.folder, world.rank))
        self.progress = Progress(self.folder, self.files.node)
        self.progress.begin(world.rank)

    def runs(self) -> Iterator["Run"]:
        """What to train, one after the other: the run itself, then each variation of a trial."""
        # Train on a copy, so that its memory is freed before the next variation: two models may be too large.
        started, settings, progress = self.strategy, self.settings, self.progress
        yield Run(set_up(copy.copy(started), settings, self.folder, progress, self.clock, self.files, self.workers))
        for name, changes in self.settings.variations.items():
            folder, varied = self.folder / name, settings.varied(changes)
            strategy = copy.copy(started)
            strategy.precision, strategy.accumulation = varied.precision, varied.train.accumulation
            strategy.clip = varied.train.clip
            (folder / paths.RANKS).mkdir(parents=True, exist_ok=True)
            yield Variation(set_up(strategy, varied, folder, progress, workers=self.workers))

    def stop(self) -> None:
        """Stop the workers and the strategy, after everything is trained."""
        if self.workers:
            self.workers.stop()
        self.strategy.stop()


class Run:
    """One training of the plan, with all measurements and results.

    Call `model`, have the strategy wrap that, then call `begin`, run the loop, and call `finish`.
    """

    def __init__(self, training: Training):
        self.training = training

    def train(self) -> None:
        """Do all of this, with the strategy's own loop."""
        model = self.model()
        self.refuse_too_large(model)
        self.training.wrap(model)
        replay = self.begin()
        with self.computing():
            self.training.strategy.train(replay)
        self.finish()

    def refuse_too_large(self, model: torch.nn.Module) -> None:
        """Raises RunFailed if the model can't fit into a GPU's memory, before it goes there."""
        memory.refuse_too_large(model, self.training.settings, self.training.strategy.world.device)

    def model(self) -> torch.nn.Module:
        """The plain model on the host, with the same initial weights as in all rows."""
        gc.collect()  # the model that was trained before may be in a reference cycle
        training, strategy, settings = self.training, self.training.strategy, self.training.settings
        # A step that loss scaling skipped still counts in the schedule. The filter is set only here, because setting it
        # in each step would reset Python's record of the warnings that were shown.
        warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler\.step\(\)` before")
        # Dropout must differ between replicas, and agree on all ranks of one replica.
        torch.manual_seed(derived_seed(training.train.seed, strategy.world.replica))
        models.keep_masks()
        model = self._initial().train()
        self.start["parameters"] = models.count_parameters(model)
        if training.train.activation_checkpointing:
            models.checkpoint_activations(model)
        model = lora.put_into(model, training.train).train()
        self.start["trained"] = lora.count_trained(model)
        if training.train.lora:
            trained, whole = self.start["trained"], self.start["parameters"]
            strategy.notes.append(f"LoRA trains {trained:,} numbers; the model has {whole:,}")
        if settings.precision == "fp64":
            model.double()
        if settings.weights_times != 1:
            with torch.no_grad():
                torch._foreach_mul_(list(model.parameters()), settings.weights_times)
        training.clock.part("model")
        self.plan, self.samples, self.dev = self._work()
        widths = len(set(self.plan.widths.tolist()))
        strategy.notes += attention.choose(training.train.attention, strategy.world.device, widths, strategy.precision)
        strategy.sample = self.samples.batch(np.zeros(1, dtype=np.int64), int(self.samples.lengths[0]))
        return strategy.synchronised(model)

    def _initial(self) -> torch.nn.Module:
        """The stored model, whose weights are hashed."""
        settings = self.training.settings
        model = models.load(Path(settings.data) / paths.WEIGHTS, settings.dropout)
        self.start = {"weights": models.hash_weights(model.state_dict())}
        return model

    def _work(self) -> tuple[Plan, Samples, Samples]:
        """The plan, the training split and the dev split."""
        data, load = Path(self.training.settings.data), self.training.task.load
        splits = [load(paths.split_folder(data, name)) for name in ("train", "dev")]
        plan, steps = Plan.load(Path(self.training.settings.plan_file)), self.training.settings.steps
        return plan.first(steps) if steps else plan, *splits

    def begin(self) -> Replay:
        """The plan, ready to be trained; call when the strategy has its model and optimizer."""
        training, settings = self.training, self.training.settings
        if settings.loss_times != 1:  # only the reference sets it; its scaler divides the gradient by it again
            strategy = training.strategy
            scale = strategy.loss_scale() * settings.loss_times
            strategy.scaler = torch.amp.GradScaler(strategy.world.device.type, init_scale=scale)
        training.clock.part("wrap")
        self.replay = Replay(training, self.plan, self.samples, DevSplit(training, self.plan, self.dev))
        self._watch()
        return self.replay

    def computing(self) -> contextlib.AbstractContextManager:
        """The context in which the loop runs."""
        wide = self.training.strategy.precision == "fp64"
        return models.keep_float64() if wide else contextlib.nullcontext()

    def _watch(self) -> None:
        """Set up what is measured besides the steps."""
        training, strategy = self.training, self.training.strategy
        if strategy.world.rank == 0:
            self.about = environment.describe() | {"config_hash": training.settings.config_hash} | provenance.commit()
            write_json(training.folder / paths.ENVIRONMENT, self.about)
            for name, content in strategy.files.items():
                write_json(training.folder / name, content)
        checkpoint.barrier(strategy)
        if strategy.world.local_rank == 0:
            training.meter = Meter(strategy.world.device)
        pids = training.workers.pids if training.workers else []
        training.gauge = memory.Gauge(strategy.world.device, pids)
        training.clock.part("data")
        training.files.event("run_start", {"steps": self.replay.steps, "world_size": strategy.world.size})
        if training.settings.kind.profiled:
            from lockstep.rank.profiling import Profiler

            training.profiler = Profiler(training, self.replay.steps, training.settings.profile.steps)

    def finish(self) -> None:
        """Write the results, after all steps are trained. Call on every rank."""
        training, strategy, replay = self.training, self.training.strategy, self.replay
        training.files.event("run_stop")
        strategy.notes += readback.skipped(strategy, training.settings.precision, replay.steps)
        if strategy.world.rank == 0:
            live = replay.live_settings
            ran = {"asked": training.train.attention, "allowed": live["attention_allowed"]}
            ran |= {"ran": live.get("attention_kernels")}
            write_json(training.folder / paths.ENVIRONMENT, self.about | {"attention": ran})
        if training.profiler:
            training.profiler.write(replay, training.settings.profile.trace)
        replay.dev_split.finish()
        replay.snapshots.finish(replay.dev_split.history)
        if training.train.checkpoint_every:  # so that a longer run can continue from it
            replay.resumption.save(replay.steps)
        training.files.write(asdict(self._summary()), training.clock.step_seconds())

    def _summary(self) -> RankSummary:
        training, strategy, replay = self.training, self.training.strategy, self.replay
        meter = training.meter
        parameters = {"parameters": self.start["parameters"], "trained_parameters": self.start["trained"]}
        return RankSummary(
            clock=training.clock.reading(),
            memory=RankMemory(**training.gauge.usage),
            memory_by_gpu=training.gauge.by_gpu,
            reserved_by_gpu=training.gauge.reserved_by_gpu,
            local_rank=strategy.world.local_rank,
            node=training.files.node,
            bytes_read=bytes_read(),
            energy=RankEnergy(**meter.joules, counters=meter.counters) if meter else None,
            seed=torch.initial_seed(),  # the current one, because a framework may have set another
            settings=replay.live_settings | parameters,
            hashes={"weights": self.start["weights"], "plan": replay.plan.hash},
            losses=replay.mean_losses(),
            rates=replay.rates,
            terms=replay.mean_terms(),
            gradient_norm=training.files.gradient_norm,
            dev=replay.dev_split.history,
            resumed=replay.resumption.began_at,
            saved=Saved(**replay.resumption.cost),
            snapshots=[Snapshot(**noted) for noted in replay.snapshots.noted],
            notes=strategy.notes,
        )


class Variation(Run):
    """A trial's plan again, in the same processes, with other settings.

    These are a precision, keys of `train`, or a factor for the initial weights or the loss. Its folder gets what the
    proof compares: losses, gradient norm, ledger and final weights.
    """

    def _watch(self):
        pass

    def finish(self):
        training, strategy = self.training, self.training.strategy
        # Called on every rank, because each may have only a part of the weights.
        weights = models.with_tied(strategy.state_dict(), models.tied_names(strategy.module))
        if strategy.world.rank == 0:
            whole = {name: weight.cpu().contiguous().clone() for name, weight in weights.items()}
            with atomic_file(training.folder / paths.FINAL_WEIGHTS) as temporary:
                save_file(whole, temporary)
        compared = Compared(losses=self.replay.mean_losses(), gradient_norm=training.files.gradient_norm)
        training.files.write(asdict(compared), training.clock.step_seconds())


def _require_own_device(world: World) -> None:
    """Raises RunFailed unless a rank's GPU is the current device of its process.

    Code that names no device would use another rank's GPU, where even an empty CUDA context takes some 400 MiB.
    """
    if world.device.type == "cuda" and world.device.index not in (None, current := torch.cuda.current_device()):
        raise RunFailed(
            f"rank {world.rank} trains on {world.device}, and the current device is cuda:{current}. The strategy's"
            " start must call torch.cuda.set_device."
        )


def _require_layout(world: World, settings: Settings) -> None:
    """Raises RunFailed unless as many ranks hold each replica as the row asks for."""
    if world.replicas * settings.ranks_per_replica != world.size:
        raise RunFailed(
            f"replicas: the row asks for {world.size} ranks, {settings.ranks_per_replica} to each replica, but"
            f" {settings.strategy} has {world.replicas} replicas. Its start must return a World with that layout."
        )


def _introduce(world: World) -> None:
    """Print who this rank is, the line's end included: print would write that separately, and ranks share the log."""
    line = f"rank {world.rank} of {world.size}: local rank {world.local_rank} on {platform.node()}, {world.device}"
    print(f"{line}, process {os.getpid()}, {world.backend or 'no'} backend\n", end="", flush=True)


def redirect(file: Path) -> None:
    """Send all further output of this process, including that of C++ libraries, to a file of its own.

    Rank 0's output stays in the run's log, beside its launcher's, so that one log is enough to read.
    """
    with file.open("ab") as stream:
        for number in (1, 2):
            os.dup2(stream.fileno(), number)
