"""Test this environment: import every framework that it has, and train two steps with each of them.

An image must have what it is for: its family's framework, and the build of PyTorch for its devices.

python workflow/scripts/self_test.py             the default command of an image
python workflow/scripts/self_test.py --versions  print the environment as JSON
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import yaml

from lockstep import cli, paths
from lockstep.config import registry
from lockstep.errors import RunFailed
from lockstep.rank import environment

SCRIPTS = Path(__file__).resolve().parent
PROJECT = SCRIPTS.parents[1]
SMALL = ["data.limit=200", "model.hidden_size=32", "model.layers=1", "train.epochs=1", "train.max_steps=2"]
SMALL += ["train.eval_every=0", "train.checkpoint=last", "hardware.processes=1", "predict.count=1"]
ROWS = ("single", "ddp", "deepspeed", "horovod")  # one for each kind of defect that an image may have


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", action="store_true", help="print this environment's versions, and train nothing")
    if parser.parse_args().versions:
        print(json.dumps(environment.describe(), indent=1))
        return
    image = os.environ.get("LOCKSTEP_IMAGE", "")  # set in each image, as lockstep/deepspeed:cpu
    if lacks := lacking(image):
        raise RunFailed(f"{image}: {lacks}. Build it again: make images")
    for name in registry.names():
        if available(name):
            registry.load(name)
            print(f"{name}: imported")
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        step("prepare.py", folder)
        step("plan.py", folder)
        for name in filter(available, ROWS):
            print(step("launch.py", folder, "--row", name), end="")


def lacking(image: str) -> str:
    """What an image of this name lacks of what it is for, in words; empty if it lacks nothing, or is none of ours."""
    name, _, variant = image.removeprefix("lockstep/").partition(":")
    table = yaml.safe_load(paths.IMAGES.read_text(encoding="utf-8"))
    if name not in (*table["families"], "bench") or variant not in ("cpu", "cuda"):
        return ""
    families = table["families"] if name == "bench" else [name]
    missing = [family for family in families if family != "torch" and not available(family)]
    if missing:
        return f"{missing[0]} is not installed"
    wanted, built = table[variant]["cuda"], torch.version.cuda
    if wanted == built:
        return ""
    meant, made = (f"CUDA {version}" if version else "CPUs alone" for version in (wanted, built))
    return f"PyTorch {torch.__version__} is built for {made}, and this image is for {meant}"


def available(strategy: str) -> bool:
    """Whether this environment has the packages that the strategy imports, except those that only some rows need."""
    for need in registry.needs(strategy):
        if need.only:
            continue
        if need.installed is None:
            return False
        if need.installed != need.version:
            raise RunFailed(f"{need.package} is {need.installed}, not {need.version}")
    return True


def step(script: str, folder: str, *arguments: str) -> str:
    command = [sys.executable, str(SCRIPTS / script), "--results", folder, *arguments]
    command += [word for value in SMALL for word in ("--set", value)]
    finished = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    if finished.returncode:
        logs = "".join(file.read_text(errors="replace") for file in paths.run_files(Path(folder), paths.LOG))
        raise RunFailed(f"{script} {' '.join(arguments)}: {finished.stdout}{finished.stderr}\n{logs}")
    return finished.stdout


if __name__ == "__main__":
    cli.run(main)
