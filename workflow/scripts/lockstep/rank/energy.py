"""Energy, if the devices themselves count it; it is never estimated from power ratings."""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from lockstep import nvml

POWERCAP = Path("/sys/class/powercap")  # Linux's powercap interface: Intel's and AMD's RAPL counters
OFTEN = 20.0  # seconds after which `look` reads the packages' counters: AMD's wrap after 65 kJ, some four minutes
MOST_WATTS = 1000.0  # no package draws more; so a counter wraps at most once in its range divided by this

Counters = list[tuple[float, float]]  # the joules of each, and the value at which it wraps


class Meter:
    """The joules that this machine's devices used between `start` and `stop`, summed over all such periods.

    gpu: the GPUs that this process sees (NVML counts energy since Volta), if it trains on GPUs.
    cpu: all CPU packages (RAPL). Each is None if a device did not count in one of the periods, if this user may not
    read its counter, or if that may have wrapped unseen: a part is never told as the whole.
    counters: the names of the counters in these sums.
    """

    def __init__(self, device: torch.device, powercap: Path = POWERCAP, now: Callable[[], float] = time.perf_counter):
        self.now = now
        self.joules: dict[str, float | None] = {"gpu": 0.0, "cpu": 0.0}
        self.counters: list[str] = []
        self.packages = [zone for zone in sorted(powercap.glob("intel-rapl:*")) if _is_package(zone)]
        self.gpus = gpu_handles() if device.type == "cuda" else []

    def start(self) -> None:
        self.began = {kind: self._read(kind) for kind in self.joules}

    def look(self) -> None:
        """Called in each step, because a package's counter may wrap several times from start to stop."""
        if self.packages and self.joules["cpu"] is not None and self.now() - self.began["cpu"][0] > OFTEN:
            self._add("cpu")

    def stop(self) -> None:
        for kind in self.joules:
            self._add(kind)
        self.counters = []
        if self.joules["gpu"] is not None:
            self.counters += [f"GPU {number} (NVML)" for number in range(len(self.gpus))]
        if self.joules["cpu"] is not None:
            self.counters += [f"{package.name} (RAPL)" for package in self.packages]

    def _add(self, kind: str) -> None:
        """Add what was counted since `start`, or since the last call of this."""
        (at, before), (now, counters) = self.began[kind], self._read(kind)
        self.began[kind] = now, counters
        self.joules[kind] = _added(self.joules[kind], before, counters, now - at)

    def _read(self, kind: str) -> tuple[float, Counters | None]:
        """The time, and what a kind of device has counted; None if one of them can't tell."""
        return self.now(), self._gpus() if kind == "gpu" else self._packages()

    def _gpus(self) -> Counters | None:
        """Each GPU's joules since its driver was loaded; the second number says that the counter never wraps."""
        joules = [nvml.joules(gpu) for gpu in self.gpus]
        return [(each, float("inf")) for each in joules] if joules and None not in joules else None

    def _packages(self) -> Counters | None:
        """The joules of each CPU package, and the value at which its counter wraps."""
        try:
            return [
                tuple(int((package / name).read_text()) / 1e6 for name in ("energy_uj", "max_energy_range_uj"))
                for package in self.packages
            ] or None
        except OSError:  # on most systems only root can read it
            return None


def _added(joules: float | None, before: Counters | None, now: Counters | None, seconds: float) -> float | None:
    """`joules`, and what the counters have counted in these seconds; None if one of them can't tell."""
    if joules is None or before is None or now is None or any(seconds * MOST_WATTS > wrap for _, wrap in now):
        return None
    return joules + sum((b - a) % wrap for (a, wrap), (b, _) in zip(before, now, strict=True))


def _is_package(zone: Path) -> bool:
    """Whether a zone of RAPL is a CPU package. Its parts are counted in it, and the platform (psys) counts it again."""
    try:
        return (zone / "name").read_text().startswith("package")
    except OSError:
        return False


def gpu_handles() -> list:
    """NVML's handles of the GPUs that this process sees; empty if NVML does not know one of them."""
    uuids = [torch.cuda.get_device_properties(number).uuid for number in range(torch.cuda.device_count())]
    handles = [nvml.gpu_of(uuid) for uuid in uuids]
    return [] if None in handles else handles
