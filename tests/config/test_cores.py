"""The cores that a process may use: as Linux limits it, by affinity and by quotas of its cgroup and those around it."""

import os
from pathlib import Path

import pytest

from lockstep.config import machine

POD = "/kubepods.slice/pod7/c1"


@pytest.fixture
def limited(tmp_path, monkeypatch):
    """A function that returns how many of 16 cores a process may use.

    It gets the process's lines of /proc/self/cgroup and mountinfo, where TOP stands for the folder of all groups, and
    the files in that folder.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.setattr(machine, "PROCESS", tmp_path)

    def cores(groups: str, mounts: list[str], files: dict[str, str]) -> int:
        (tmp_path / "cgroup").write_text(groups)
        lines = [f"{number} 20 0:3{number} {mount}\n" for number, mount in enumerate(mounts)]
        (tmp_path / "mountinfo").write_text("".join(lines).replace("TOP", f"{tmp_path}/sys"))
        for name, text in files.items():
            (file := tmp_path / "sys" / name).parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
        return machine.cpu_cores()

    return cores


OF_VERSION_2 = ["/ / rw - ext4 /dev/sda1 rw", "/ TOP rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"]


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 16),
        ({"kubepods.slice/pod7/c1/cpu.max": "max 100000"}, 16),
        ({"kubepods.slice/pod7/c1/cpu.max": "600000 100000"}, 6),
        ({"kubepods.slice/pod7/c1/cpu.max": "max 100000", "kubepods.slice/cpu.max": "300000 100000"}, 3),
        ({"kubepods.slice/pod7/c1/cpu.max": "200000 100000", "kubepods.slice/cpu.max": "300000 100000"}, 2),
        ({"kubepods.slice/pod7/cpu.max": "50000 100000"}, 1),  # half a core
        ({"kubepods.slice/pod8/cpu.max": "100000 100000"}, 16),  # another one's
        ({"cpu.max": "400000 100000"}, 4),  # the outermost group that a container sees
    ],
)
def test_the_smallest_quota_of_a_group_and_all_around_it_counts(limited, files, cores):
    assert limited(f"0::{POD}\n", OF_VERSION_2, files) == cores


@pytest.mark.parametrize("group", ["/", "/../other"])  # where a process's group is the outermost it sees, or beside it
def test_in_a_container_its_own_group_is_on_top(limited, group):
    assert limited(f"0::{group}\n", OF_VERSION_2, {"cpu.max": "200000 100000"}) == 2


@pytest.mark.parametrize(
    ("group", "root", "files", "cores"),
    [
        (POD, "/", {"cpu{own}/cpu.cfs_quota_us": "-1"}, 16),
        (POD, "/", {"cpu{own}/cpu.cfs_quota_us": "500000"}, 5),
        (POD, "/", {"cpu{own}/cpu.cfs_quota_us": "-1", "cpu/kubepods.slice/cpu.cfs_quota_us": "250000"}, 2),
        (POD, POD, {"cpu/cpu.cfs_quota_us": "300000"}, 3),  # as Docker mounts a container's group for it
    ],
)
def test_so_it_does_in_the_older_version_of_groups(limited, group, root, files, cores):
    """Where there are both versions, that of the CPU counts, whichever it is."""
    mounts = [
        f"{root} TOP/cpu rw - cgroup cgroup rw,cpu,cpuacct",
        f"{root} TOP/memory rw - cgroup cgroup rw,memory",
        f"{root} TOP/unified rw - cgroup2 cgroup2 rw",
    ]
    named = {name.format(own=group): text for name, text in files.items()}
    named |= {str(Path(name).with_name("cpu.cfs_period_us")): "100000" for name in named}
    named |= {"memory/cpu.cfs_quota_us": "100000", "memory/cpu.cfs_period_us": "100000"}
    groups = f"6:memory:{group}\n4:cpu,cpuacct:{group}\n0::{group}\n"
    assert limited(groups, mounts, named) == cores


def test_without_cgroups_affinity_counts(limited, tmp_path):
    assert limited("", [], {}) == 16
    (tmp_path / "cgroup").unlink()
    assert machine.cpu_cores() == 16
