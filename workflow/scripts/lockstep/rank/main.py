"""One rank of a run: sets its strategy up, lets it train the plan, and writes down what came of it."""

import contextlib
import copy
import gc
import os
import platform
import signal
import sys
import time
import warnings
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
from lockstep.files import atomic_file, read_json, remove_unfinished, write_json
from lockstep.model import attention, lora, models
from lockstep.rank import checkpoint, environment, memory
from lockstep.rank.clock import Clock
from lockstep.rank.dev_split import DevSplit
from lockstep.rank.energy import Meter
from lockstep.rank.replay import Replay
from lockstep.rank.resumption import derived_seed
from lockstep.rank.training import Training, set_up
from lockstep.rank.workers import Workers
from lockstep.run import lifetime
from lockstep.run.progress import NODE, Progress, RankFiles

TRIES = 25  # of writing why a rank fails, 0.2 s apart


def main(folder: Path) -> None:
    """Train this process's share of the run in `folder`. Does not return.

    The process ends by os._exit: with gloo, PyTorch 2.13's DDP sometimes hangs or aborts in the interpreter's own exit,
    after all is done. So everything is written and flushed first, and what was written says how the run went.
    """
    lifetime.die_with_parent()
    files = RankFiles(folder, int(os.environ.get("RANK", 0)))
    lifetime.end_with_holder(paths.node_folder(folder, files.node))
    signal.signal(signal.SIGTERM, _end)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # not under nohup
        signal.signal(signal.SIGHUP, _end)
    code, progress = 1, None
    try:
        clock = Clock()
        settings = Settings.from_json(read_json(folder / paths.SETTINGS))
        torch.set_num_threads(settings.hardware.threads)
        torch.set_num_interop_threads(1)
        strategy = registry.load(settings.strategy)(settings)
        # Before the ranks meet: from then on Horovod's own thread takes a share of each rank's cores.
        models.import_code(Path(settings.data) / paths.WEIGHTS)
        if settings.train.lora:
            lora.load()
        clock.part("imports")
        workers = None
        if settings.hardware.workers:
            workers = Workers(settings)
            clock.part("workers")
        world = strategy.start()
        clock.part("process_group")
        _require_own_device(world)
        _require_layout(world, settings)
        files.rank = world.rank
        if NODE not in os.environ:  # started from another node, as Horovod does it
            files.node = world.rank // settings.hardware.processes_per_node
        _introduce(world)
        if world.rank:
            _redirect(paths.rank_log(folder, world.rank))
        progress = Progress(folder, files.node)
        progress.begin(world.rank)
        # On a copy, which goes with all that it prepared before the next one is made: two models may be too many.
        train(set_up(copy.copy(strategy), settings, folder, progress, clock, files, workers))
        for name, changes in settings.variations.items():
            gc.collect()
            _vary(strategy, settings, folder / name, progress, changes, workers)
        if workers:
            workers.stop()
        strategy.stop()
        code = 0
    except BaseException as error:  # not only Exception: DCP's CheckpointException is none
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher may send it now, and the reason must be written
        _write_reason(folder, files, error, progress.steps if progress else 0)
        print(f"rank {files.rank} failed:", file=sys.stderr)
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _require_own_device(world: World) -> None:
    """Raises RunFailed where a rank's GPU is not the one that its process uses where none is named.

    Whatever does not name its device would go to another rank's, where even nothing takes some 400 MiB.
    """
    if world.device.type == "cuda" and world.device.index not in (None, current := torch.cuda.current_device()):
        raise RunFailed(
            f"rank {world.rank} trains on {world.device}, and the current device is cuda:{current}. The strategy's"
            " start must call torch.cuda.set_device."
        )


def _require_layout(world: World, settings: Settings) -> None:
    """Raises RunFailed where so many ranks do not hold a replica as the row asks for."""
    if world.replicas * settings.ranks_per_replica != world.size:
        raise RunFailed(
            f"replicas: {world.size} ranks of which {settings.ranks_per_replica} each hold one are asked for, and"
            f" {settings.strategy} has {world.replicas}. Its start must return a World that says so."
        )


def _introduce(world: World) -> None:
    """Say who this rank is, in one piece: print would write the line's end by itself, and ranks share the log."""
    line = f"rank {world.rank} of {world.size}: local rank {world.local_rank} on {platform.node()}, {world.device}"
    print(f"{line}, process {os.getpid()}, {world.backend or 'no'} backend\n", end="", flush=True)


def _redirect(file: Path) -> None:
    """Have all that this process writes from now on, libraries in C++ included, go to a file of its own.

    Rank 0's stays in the run's log, where its launcher's is: there is one of it to read.
    """
    with file.open("ab") as stream:
        for number in (1, 2):
            os.dup2(stream.fileno(), number)


def _write_reason(folder: Path, files: RankFiles, error: BaseException, step: int) -> None:
    """Write why this rank failed, even when the disk is full.

    Another rank may first use the space that this one freed. That rank then fails and frees it too, so this one tries
    again for five seconds, in which the launcher must not end it.
    """
    for _ in range(TRIES):
        try:
            remove_unfinished(folder)
            files.write_error(error, step)
        except (RunFailed, OSError):
            time.sleep(0.2)
        else:
            return


def _end(number, frame):
    """A launcher ends the other ranks when one dies. Saying so tells them from the one that died without a word."""
    closed = ", as where the terminal is closed in which it was started" if number == signal.SIGHUP else ""
    raise RunFailed(f"was ended by {signal.Signals(number).name}{closed}")


def train(training: Training) -> None:
    """The run itself, of which everything is measured and kept."""
    strategy, settings, clock, files = training.strategy, training.settings, training.clock, training.files
    replay, start = _prepare(training)
    if strategy.world.rank == 0:
        about = environment.describe() | {"config_hash": settings.config_hash} | provenance.commit()
        write_json(training.folder / paths.ENVIRONMENT, about)
        for name, content in strategy.files.items():
            write_json(training.folder / name, content)
    checkpoint.barrier(strategy)
    if strategy.world.local_rank == 0:
        training.meter = Meter()
    pids = training.workers.pids if training.workers else []
    training.gauge = memory.Gauge(strategy.world.device, pids)
    clock.part("data")

    files.event("run_start", {"steps": replay.steps, "world_size": strategy.world.size})
    if settings.kind.taken_apart:
        from lockstep.rank.profiling import Profiler

        training.profiler = Profiler(training, replay.steps, settings.profile.steps)
    _train_steps(replay)
    files.event("run_stop")
    if strategy.world.rank == 0:
        live = replay.live_settings
        ran = {"asked": training.train.attention, "allowed": live["attention_allowed"]}
        ran |= {"ran": live.get("attention_kernels")}
        write_json(training.folder / paths.ENVIRONMENT, about | {"attention": ran})
    if training.profiler:
        training.profiler.write(replay, settings.profile.trace)
    replay.dev_split.finish()
    replay.snapshots.finish(replay.dev_split.history)
    if training.train.checkpoint_every:  # from which a longer run goes on
        replay.resumption.save(replay.steps)
    files.write(
        {
            "clock": clock.reading(),
            "memory": training.gauge.usage,
            "memory_by_gpu": training.gauge.by_gpu,
            "reserved_by_gpu": training.gauge.reserved_by_gpu,
            "local_rank": strategy.world.local_rank,
            "node": files.node,
            "bytes_read": bytes_read(),
            "energy": training.meter.joules | {"counters": training.meter.counters} if training.meter else None,
            "seed": torch.initial_seed(),  # as it is now: a framework may have set another
            "settings": replay.live_settings
            | {"parameters": start["parameters"], "trained_parameters": start["trained"]},
            "hashes": {"weights": start["weights"], "plan": replay.plan.hash},
            "losses": replay.mean_losses(),
            "rates": replay.rates,
            "terms": replay.mean_terms(),
            "gradient_norm": files.gradient_norm,
            "dev": replay.dev_split.history,
            "resumed": replay.resumption.began_at,
            "saved": replay.resumption.cost,
            "snapshots": replay.snapshots.noted,
            "notes": strategy.notes,
        },
        clock.step_seconds(),
    )


def _vary(started, settings: Settings, folder: Path, progress: Progress, changes: dict, workers) -> None:
    """Train a trial's plan once more in the processes that there are, with `changes` to its settings.

    These are a precision, keys of `train`, or a factor for the initial weights or for the loss. What the proof compares
    is left in `folder`: losses, gradient norm, ledger and final weights.
    """
    strategy = copy.copy(started)
    settings = settings.varied(changes)
    strategy.precision, strategy.accumulation = settings.precision, settings.train.accumulation
    (folder / paths.RANKS).mkdir(parents=True, exist_ok=True)
    training = set_up(strategy, settings, folder, progress, workers=workers)
    replay, _ = _prepare(training)
    _train_steps(replay)
    # Called on every rank, as each may have a share only.
    weights = models.with_tied(strategy.state_dict(), models.tied_names(strategy.module))
    if strategy.world.rank == 0:
        whole = {name: weight.cpu().contiguous().clone() for name, weight in weights.items()}
        with atomic_file(folder / paths.FINAL_WEIGHTS) as temporary:
            save_file(whole, temporary)
    summary = {"losses": replay.mean_losses(), "gradient_norm": training.files.gradient_norm}
    training.files.write(summary, training.clock.step_seconds())


def _prepare(training: Training) -> tuple[Replay, dict]:
    """The plan, ready to be trained by the wrapped model; and the hash and size that the model had before."""
    strategy, settings, clock = training.strategy, training.settings, training.clock
    world, data = strategy.world, Path(settings.data)
    # A step that loss scaling skipped still counts in the schedule. Said here once: in each step it would undo Python's
    # memory of which warnings were shown already.
    warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler\.step\(\)` before")
    # Dropout must differ from replica to replica, and agree on all ranks of one.
    torch.manual_seed(derived_seed(training.train.seed, world.replica))
    models.keep_masks()
    model = models.load(data / paths.WEIGHTS, settings.dropout).train()
    start = {"weights": models.hash_weights(model.state_dict()), "parameters": models.count_parameters(model)}
    model = lora.put_into(model, training.train).train()
    start["trained"] = lora.count_trained(model)
    if training.train.lora:
        strategy.notes.append(f"LoRA trains {start['trained']:,} numbers; the model has {start['parameters']:,}")
    if settings.precision == "fp64":
        model.double()
    if settings.weights_times != 1:
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), settings.weights_times)
    clock.part("model")
    plan, samples = Plan.load(Path(settings.plan_file)), training.task.load(paths.split_folder(data, "train"))
    strategy.notes += attention.choose(
        training.train.attention, world.device, len(set(plan.widths.tolist())), strategy.precision
    )
    strategy.sample = samples.batch(np.zeros(1, dtype=np.int64), int(samples.lengths[0]))
    training.wrap(strategy.synchronised(model))
    if settings.loss_times != 1:  # the reference alone has it, whose scaler takes it back from the gradient
        scale = strategy.loss_scale() * settings.loss_times
        strategy.scaler = torch.amp.GradScaler(world.device.type, init_scale=scale)
    clock.part("wrap")
    dev_split = DevSplit(training, plan, training.task.load(paths.split_folder(data, "dev")))
    return Replay(training, plan, samples, dev_split), start


def _train_steps(replay: Replay) -> None:
    strategy = replay.training.strategy
    with models.kept_wide() if strategy.precision == "fp64" else contextlib.nullcontext():
        strategy.train(replay)
