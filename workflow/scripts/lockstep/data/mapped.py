"""Memory-map prepared data, so that no process holds all of it, and it may be larger than the machine's memory."""

import mmap
from pathlib import Path

import numpy as np

READ_AHEAD = 2**30  # bytes; larger files are read on demand


def advise(mapped: mmap.mmap) -> None:
    """Tell the kernel how a mapped file will be read.

    A small file is read at once, so that the timed window does not wait for the disk. A large file is read at random
    places: each rank reads only the samples of its own share, so reading ahead would fetch those of other ranks.
    """
    mapped.madvise(mmap.MADV_WILLNEED if len(mapped) <= READ_AHEAD else mmap.MADV_RANDOM)


def array(file: Path) -> np.ndarray:
    """The array in a .npy file, memory-mapped. Raises OSError or ValueError if the file is damaged."""
    opened = np.load(file, mmap_mode="r", allow_pickle=False)
    advise(opened._mmap)
    return opened


def bytes_read() -> int | None:
    """Bytes that the kernel has fetched from storage for this process, mapped files included (proc_pid_io(5)).

    Pages that are in the page cache already do not count. None if the kernel does not count.
    """
    try:
        counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except OSError:
        return None
    return int(counters["read_bytes"])
