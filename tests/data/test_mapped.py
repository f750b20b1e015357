"""Memory-mapped files: a small one is read at once, a large one on demand."""

import os

import numpy as np
import pytest

from lockstep.data import mapped

ROWS, WIDTH = 4096, 4096  # 16 MiB


@pytest.fixture
def file(tmp_path):
    """An array in a file that is not in the page cache."""
    file = tmp_path / "rows.npy"
    np.save(file, np.random.default_rng(0).integers(0, 255, (ROWS, WIDTH), dtype=np.uint8))
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if not mapped.bytes_read() or file.stat().st_dev == os.stat("/dev/shm").st_dev:
        pytest.skip("needs: a kernel that counts what is read, and a temporary folder on a disk")
    return file


def test_a_large_file_is_read_as_it_is_asked_for(file, monkeypatch):
    monkeypatch.setattr(mapped, "READ_AHEAD", 0)
    rows, before = mapped.array(file), mapped.bytes_read()
    for row in range(0, ROWS, 64):
        assert rows[row].sum() > 0
    assert mapped.bytes_read() - before <= 2 * 64 * (WIDTH + 4096)  # two pages each, as rows lie across their borders


def test_a_small_file_is_read_at_once(file):
    before = mapped.bytes_read()
    rows = mapped.array(file)
    for row in range(0, ROWS, 64):
        assert rows[row].sum() > 0
    assert mapped.bytes_read() - before >= ROWS * WIDTH // 2
