"""How much memory a process of a run took."""

from pathlib import Path

import torch

PROC = Path("/proc/self")


def read(device: torch.device) -> dict[str, float | None]:
    """MiB of this process. On a GPU, of all GPUs it uses: `peak_mb` allocated by tensors, `reserved_mb` by PyTorch.

    On a CPU `peak_mb` is the most that was resident (VmHWM of proc_pid_status(5)), which counts a library once in each
    process that has it loaded; `proportional_mb` is what is resident now with shared pages divided among those who
    share them (Pss of proc_pid_smaps(5), proportional set size), so that it can be added up over processes.
    """
    if device.type == "cuda":
        numbers = range(torch.cuda.device_count())
        return {
            "peak_mb": sum(map(torch.cuda.max_memory_allocated, numbers)) / 2**20,
            "reserved_mb": sum(map(torch.cuda.max_memory_reserved, numbers)) / 2**20,
            "proportional_mb": None,
        }
    return {
        "peak_mb": _kilobytes(PROC / "status", "VmHWM") / 2**10,
        "reserved_mb": None,
        "proportional_mb": _kilobytes(PROC / "smaps_rollup", "Pss") / 2**10,
    }


def _kilobytes(file: Path, key: str) -> int:
    return int(file.read_text().split(f"{key}:")[1].split()[0])
