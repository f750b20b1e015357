"""Prepared data is mapped into memory: no process holds all of it, and it may be larger than the machine's memory."""

import mmap
from pathlib import Path

import numpy as np

READ_AHEAD = 2**30  # bytes: a file of more is read as its samples are asked for


def advise(mapped: mmap.mmap) -> None:
    """Tell the kernel how a file will be read.

    A small one is read at once, so that the timed window does not wait for the disk. Of a large one each rank reads the
    samples of its own share, here and there: what lies behind each of them belongs to others.
    """
    mapped.madvise(mmap.MADV_WILLNEED if len(mapped) <= READ_AHEAD else mmap.MADV_RANDOM)


def array(file: Path) -> np.ndarray:
    """The array in a .npy file, mapped. Raises OSError or ValueError where it is damaged."""
    opened = np.load(file, mmap_mode="r", allow_pickle=False)
    advise(opened._mmap)
    return opened


def bytes_read() -> int | None:
    """Bytes that the kernel has fetched from storage for this process, mapped files included (proc_pid_io(5)).

    What is in the page cache already is not fetched, whoever asked for it first. None where the kernel does not count.
    """
    try:
        counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except OSError:
        return None
    return int(counters["read_bytes"])
