"""How much memory a process of a run used."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch

from lockstep.config import precisions, registry
from lockstep.config.optimizers import OPTIMIZERS
from lockstep.config.settings import Settings, in_one
from lockstep.errors import RunFailed
from lockstep.model import lora, models

PROC = Path("/proc")


def read(device: torch.device, workers: Sequence[int] = ()) -> dict[str, float | None]:
    """MiB of this process. On a GPU, of all GPUs it uses: `peak_mb` allocated by tensors, `reserved_mb` by PyTorch.

    On a CPU, `peak_mb` is the peak resident memory (VmHWM of proc_pid_status(5)), which counts a library in every
    process that has loaded it. `proportional_mb` is the memory that is resident now, with shared pages divided among
    the processes that share them (Pss of proc_pid_smaps(5), proportional set size), so that it can be summed over
    processes. Both include the process's `workers`, given by their ids; on a GPU workers do not count.
    """
    if device.type == "cuda":
        numbers = range(torch.cuda.device_count())
        return {
            "peak_mb": sum(map(torch.cuda.max_memory_allocated, numbers)) / 2**20,
            "reserved_mb": sum(map(torch.cuda.max_memory_reserved, numbers)) / 2**20,
            "proportional_mb": None,
        }
    return {
        "peak_mb": _of_all(workers, "status", "VmHWM"),
        "reserved_mb": None,
        "proportional_mb": _of_all(workers, "smaps_rollup", "Pss"),
    }


def refuse_too_large(model: torch.nn.Module, settings: Settings, device: torch.device) -> None:
    """Raises RunFailed if a rank's share of weights and optimizer alone is more than its GPU has.

    `model` is whole, on the host. What is not known to be whole on each rank (SHARDS) is taken to be shared out among
    all, and gradients, activations and buckets are not counted, so that no row is refused that fits.
    """
    # DeepSpeed's own file may keep weights on the host.
    if device.type != "cuda" or settings.options.get("config_file"):
        return
    asked = in_one(settings.options, settings.train, settings.hardware, settings.precision, settings.task)
    if registry.matches(settings.strategy, "UNCOUNTED", asked):
        return
    shared = registry.first(settings.strategy, "SHARDS", asked)
    if shared is None:  # it sends what it declares, and declares no shares
        shared = [] if registry.sends(settings.strategy, asked) else ["weights", "optimizer"]
    # Weights and optimizer may be in the type that is computed in, even if autocast usually leaves them in float32.
    number = getattr(torch, precisions.of(settings.precision).dtype).itemsize
    moments = OPTIMIZERS[settings.train.optimizer].moments
    numbers = {"weights": models.count_parameters(model), "optimizer": moments * lora.count_trained(model)}
    ranks = settings.hardware.processes
    needs = sum(number * count / (ranks if what in shared else 1) for what, count in numbers.items())
    there = torch.cuda.get_device_properties(device).total_memory
    if needs > there:
        raise RunFailed(
            f"it would end out of memory: weights and optimizer take at least {needs / 2**30:.3g} GiB of each GPU, and"
            f" it has {there / 2**30:.3g}. Share them out (fsdp, deepspeed with stage: 3), or take more or larger GPUs;"
            " lockstep fits counts what else is needed"
        )


class Gauge:
    """The peak of this process's memory in the timed windows, between `start` and `stop`, by the keys of `read`.

    before_mb: the memory in use when the first window opened: on a CPU mostly imports, on a GPU model and optimizer.
    Memory that is used after the windows, such as for a model that is gathered to be saved, is not included.
    """

    def __init__(self, device: torch.device, workers: Sequence[int] = ()):
        self.device, self.workers = device, workers
        self.usage: dict[str, float | None] = {}
        # The peak MiB of this process on each visible GPU, in tensors and reserved for them; empty if a CPU trains.
        self.by_gpu = [0.0] * torch.cuda.device_count() if device.type == "cuda" else []
        self.reserved_by_gpu = list(self.by_gpu)

    def start(self) -> None:
        """Called before a window opens: the peak is counted anew from here."""
        self._note_by_gpu()
        if self.device.type == "cuda":
            numbers = range(torch.cuda.device_count())
            now = sum(map(torch.cuda.memory_allocated, numbers)) / 2**20
            for number in numbers:
                torch.cuda.reset_peak_memory_stats(number)
        else:
            now = _of_all(self.workers, "status", "VmRSS")
            for pid in ("self", *self.workers):
                with contextlib.suppress(OSError):  # if it can't be written, the peak is that since the launch
                    # This resets the peak to the current value (proc_pid_clear_refs(5)).
                    (PROC / str(pid) / "clear_refs").write_text("5")
        self.usage.setdefault("before_mb", now)

    def stop(self) -> None:
        """Called after a window has closed."""
        self._note_by_gpu()
        for kind, value in read(self.device, self.workers).items():
            peaks = [each for each in (value, self.usage.get(kind)) if each is not None]
            self.usage[kind] = max(peaks, default=None)

    def _note_by_gpu(self) -> None:
        for number, before in enumerate(self.by_gpu):
            self.by_gpu[number] = max(before, torch.cuda.max_memory_allocated(number) / 2**20)
        for number, before in enumerate(self.reserved_by_gpu):
            self.reserved_by_gpu[number] = max(before, torch.cuda.max_memory_reserved(number) / 2**20)


def _of_all(workers: Sequence[int], file: str, key: str) -> float:
    """The MiB of this process and its workers together; a worker that has ended counts as 0."""
    total = _kilobytes(PROC / "self" / file, key)
    for pid in workers:
        with contextlib.suppress(OSError, IndexError):
            total += _kilobytes(PROC / str(pid) / file, key)
    return total / 2**10


def _kilobytes(file: Path, key: str) -> int:
    return int(file.read_text().split(f"{key}:")[1].split()[0])
