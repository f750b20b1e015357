"""Energy, where the devices themselves count it; never a guess from power ratings."""

from pathlib import Path

from lockstep import nvml
from lockstep.rank.environment import gpu_handles

POWERCAP = Path("/sys/class/powercap")  # Linux's powercap interface: Intel's and AMD's RAPL counters


class Meter:
    """Joules that this machine's devices took between `start` and `stop`, summed over all such times.

    gpu: the GPUs that this process sees (NVML has that since Volta).
    cpu: all CPU packages (RAPL). Each is None where the device does not tell, or this user may not ask.
    counters: the names of the counters that are in these sums.
    """

    def __init__(self, powercap: Path = POWERCAP):
        self.joules: dict[str, float | None] = {"gpu": None, "cpu": None}
        self.counters: list[str] = []
        self.packages = sorted(powercap.glob("intel-rapl:?"))  # intel-rapl:0:1 and its like are parts of these
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
        """The joules of each GPU since its driver was loaded, and at how many the counter begins anew: never."""
        joules = [nvml.joules(gpu) for gpu in self.gpus]
        return [(each, float("inf")) for each in joules] if joules and None not in joules else None

    def _packages(self) -> list[tuple[float, float]] | None:
        """The joules of each CPU package, and at how many the counter begins anew."""
        try:
            return [
                tuple(int((package / name).read_text()) / 1e6 for name in ("energy_uj", "max_energy_range_uj"))
                for package in self.packages
            ] or None
        except OSError:  # readable by root only, on most systems
            return None
