"""Say what this machine can run, what disturbs timing on it, and how to install the rest. Changes nothing."""

import argparse
import os
import platform
import re
import shutil
from pathlib import Path

from lockstep import caches, cli, nvml, paths
from lockstep.config import containers, machine, registry
from lockstep.config.row import PEFT
from lockstep.errors import BadInput
from lockstep.provenance import horovod_has, output
from lockstep.terminal import print_table

CPU = machine.CPU
DISK, MEMORY = 4, 4  # GiB that the default benchmark needs
BUSY = 0.1  # the largest load of the last minute, per core, that is not reported
HEADER = ["what", "here", "to get more of it"]


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for title, lines in (("This machine", this_machine()), ("Strategies", strategies()), ("Around it", engines())):
        print(title)
        print_table(HEADER, lines)
    print("What makes times vary here")
    print_table(HEADER, disturbers() or [["nothing that can be detected", "", ""]])


def this_machine() -> list[list[str]]:
    """Devices, memory, disk and PyTorch's build."""
    kinds = [nvml.name(nvml.gpu(number)) or "a GPU" for number in range(nvml.count())]
    gpus, build = machine.visible_gpus(), "GPUs" if machine.built_for_gpus() else "CPUs only"
    used = "" if gpus == len(kinds) else f"; {gpus} can be used"
    unused = "make setup TORCH=cuda" if kinds and not machine.built_for_gpus() else ""
    try:
        machine.refuse_misnamed_gpus()
    except BadInput as error:
        unused = str(error)
    free, memory = shutil.disk_usage(".").free / 2**30, _memory("MemAvailable") / 2**20
    lacking = f"make room: less than {DISK} GiB" if free < DISK else ""
    return [
        ["CPU", f"{machine.cpu_cores()} cores, {machine.cpu_name()}", ""],
        ["GPUs", (", ".join(kinds) or "none") + used, unused],
        ["memory", f"{memory:.1f} GiB free", f"end other programs: less than {MEMORY} GiB" if memory < MEMORY else ""],
        ["disk, in this folder", f"{free:.0f} GiB free", lacking],
        ["caches", *_caches()],
        ["Python", platform.python_version(), ""],
        ["PyTorch", f"{registry.version('torch')}, built for {build}", ""],
    ]


def strategies() -> list[list[str]]:
    """The strategies that can be trained here, and what the others lack; those of studies are left out."""
    lines = []
    for name in registry.ours():
        needs = [need for need in registry.needs(name) if not need.only]
        lacking = [need for need in needs if need.installed != need.version]
        what = ", ".join(f"{need.package} {need.version}" for need in lacking)
        lines.append([name, f"lacks {what}" if what else "yes", "; ".join(need.command for need in lacking)])
    if PEFT.installed != PEFT.version:
        lines.append(["rows with lora", f"lacks {PEFT.package} {PEFT.version}", PEFT.command])
    if ["horovod", "yes", ""] in lines and not horovod_has("mpi"):
        lines.append(["horovod over MPI", "not built", "libopenmpi-dev, then: make horovod"])
    return lines


def engines() -> list[list[str]]:
    """Container engines and batch systems."""
    inside = containers.kind()
    docker = output("docker", "version", "--format", "{{.Server.Version}}")
    apptainer, images = output("apptainer", "--version"), sorted(containers.SIF.glob("*.sif"))
    there = "a client, but no engine that answers" if shutil.which("docker") else "not there"
    lines = [
        ["Docker", docker or there, "" if docker else "docs.docker.com/engine/install; then: make images"],
        ["Apptainer", apptainer or "not there", "" if apptainer else "apptainer.org/docs; then: make images sif"],
        ["images for Apptainer", str(len(images)) if images else "none", "" if images else "make sif"],
        ["Slurm", output("sbatch", "--version") or "not there", ""],
        ["git", output("git", "--version") or "not there", ""],
    ]
    return [["container", f"this is one ({inside})", ""], *lines] if inside else lines


def disturbers() -> list[list[str]]:
    """Causes of varying times, as far as the system reports them."""
    lines = []
    governor = machine.governor(CPU)
    if governor and governor != "performance":
        lines.append(["clock's governor", governor, "sudo cpupower frequency-set -g performance"])
    if _read(CPU / "intel_pstate/no_turbo") == "0" or _read(CPU / "cpufreq/boost") == "1":
        lines.append(["clock above its base (turbo)", "on: falls as the CPU warms up", "switch it off in the firmware"])
    if kind := machine.virtual_machine():
        lines.append(["virtual machine", f"{kind}: shares its host with others", "more blocks: repeats, budget"])
    load, cores = os.getloadavg()[0], machine.cpu_cores()
    if load > BUSY * cores:
        lines.append(["load of the last minute", f"{load:.2f} of {cores} cores", "end other programs"])
    if swapped := _memory("SwapTotal") - _memory("SwapFree"):
        lines.append(["memory on disk (swap)", f"{swapped / 2**20:.1f} GiB", "end other programs"])
    if _read(CPU / "smt/active") == "1":
        lines.append(["two threads a core (SMT)", "on: cores are fewer than they look", "hardware.threads"])
    if folder := nvml.mps_folder():
        lines.append(
            ["NVIDIA's Multi-Process Service", f"on ({folder})", "end it: echo quit | nvidia-cuda-mps-control"]
        )
    others = nvml.processes(nvml.gpus(list(range(nvml.count()))))
    lines += [["on a GPU", nvml.say(process), "end it, or choose others: hardware.gpus"] for process in others]
    if paths.run_files(paths.RESULTS, paths.LOCK, kind="*") and output("pgrep", "-f", "workflow/scripts/launch.py"):
        lines.append(["a run of Lockstep's", "under way", "wait for its end"])
    return lines


def _caches() -> list[str]:
    """The folder for caches, and how to choose another one."""
    asked = caches.asked()
    if caches.can_be_written(asked):
        return [str(asked), ""]
    return [f"{caches.here()}, as {asked} can't be written", f"for another folder: export {caches.VARIABLE}=FOLDER"]


def _memory(key: str) -> int:
    """The value of a line of /proc/meminfo, in KiB."""
    return int(re.search(rf"^{key}:\s*(\d+)", _read(Path("/proc/meminfo")), re.MULTILINE)[1])


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


if __name__ == "__main__":
    cli.run(main)
