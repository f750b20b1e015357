"""Energy, if the devices themselves count it; it is never estimated from power ratings."""

from pathlib import Path

import torch

from lockstep import nvml

POWERCAP = Path("/sys/class/powercap")  # Linux's powercap interface: Intel's and AMD's RAPL counters


class Meter:
    """The joules that this machine's devices used between `start` and `stop`, summed over all such periods.

    gpu: the GPUs that this process sees (NVML counts energy since Volta).
    cpu: all CPU packages (RAPL). Each is None if the device does not count, or if this user may not read the counter.
    counters: the names of the counters in these sums.
    """

    def __init__(self, powercap: Path = POWERCAP):
        self.joules: dict[str, float | None] = {"gpu": None, "cpu": None}
        self.counters: list[str] = []
        self.packages = sorted(powercap.glob("intel-rapl:?"))  # intel-rapl:0:1 and similar ones are parts of these
        self.gpus = gpu_handles()

    def start(self) -> None:
        self.began = {"gpu": self._gpus(), "cpu": self._packages()}

    def stop(self) -> None:
        now = {"gpu": self._gpus(), "cpu": self._packages()}
        for kind, before in self.began.items():
            if before is not None and now[kind] is not None:
                used = sum((b - a) % wrap for (a, wrap), (b, _) in zip(before, now[kind], strict=True))
                self.joules[kind] = (self.joules[kind] or 0.0) + used
        self.counters = []
        if self.joules["gpu"] is not None:
            self.counters += [f"GPU {number} (NVML)" for number in range(len(self.gpus))]
        if self.joules["cpu"] is not None:
            self.counters += [f"{package.name} (RAPL)" for package in self.packages]

    def _gpus(self) -> list[tuple[float, float]] | None:
        """The joules of each GPU since its driver was loaded, and the value at which its counter wraps: never."""
        joules = [nvml.joules(gpu) for gpu in self.gpus]
        return [(each, float("inf")) for each in joules] if joules and None not in joules else None

    def _packages(self) -> list[tuple[float, float]] | None:
        """The joules of each CPU package, and the value at which its counter wraps."""
        try:
            return [
                tuple(int((package / name).read_text()) / 1e6 for name in ("energy_uj", "max_energy_range_uj"))
                for package in self.packages
            ] or None
        except OSError:  # on most systems only root can read it
            return None


def gpu_handles() -> list:
    """NVML's handles of the GPUs that this process sees; empty if NVML does not know one of them."""
    uuids = [torch.cuda.get_device_properties(number).uuid for number in range(torch.cuda.device_count())]
    handles = [nvml.gpu_of(uuid) for uuid in uuids]
    return [] if None in handles else handles
