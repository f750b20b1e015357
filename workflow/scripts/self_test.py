"""Test this environment: import every framework that it has, and train two steps with each of them.

python workflow/scripts/self_test.py             the default command of an image
python workflow/scripts/self_test.py --versions  print the environment as JSON
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

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
    for name in registry.names():
        if available(name):
            registry.load(name)
            print(f"{name}: imported")
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        step("prepare.py", folder)
        step("plan.py", folder)
        for name in filter(available, ROWS):
            print(step("launch.py", folder, "--row", name), end="")


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
