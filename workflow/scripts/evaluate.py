"""Convert a run's checkpoint and test the model: convert.py and test.py in one process.

If a row's first repetition ended with exactly the same weights, later ones copy its model and test instead.
"""

import argparse
import os
import shutil
from pathlib import Path

from lockstep import cli, paths
from lockstep.config import registry
from lockstep.config.machine import selection
from lockstep.errors import RunFailed
from lockstep.files import MANIFEST, atomic_folder, read_json, verify, write_json
from lockstep.run import journal, record_files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder, such as results/runs/ddp/n2/rep1")
    run = parser.parse_args().run
    paths.must_be_run(run)
    try:
        scores = evaluate(run)
    except RunFailed as error:
        write_json(run / paths.UNTESTED, {"reason": str(error)})
        raise
    (run / paths.UNTESTED).unlink(missing_ok=True)
    journal.note_test(run)
    print(registry.format_scores(scores))


def evaluate(run: Path) -> dict:
    """Convert and test, and return the scores. Raises RunFailed."""
    if twin := tested_twin(run):
        for part in (paths.MODEL, paths.TEST):
            with atomic_folder(run / part) as temporary:
                shutil.copytree(twin / part, temporary, dirs_exist_ok=True)
        print(f"the same weights, to the last bit, as {twin}")
        return read_json(run / paths.TEST_REPORT)
    os.environ.update(selection(read_json(run / paths.SETTINGS)["hardware"].get("gpus")))
    from lockstep import evaluation  # imported here, as importing PyTorch takes longer than copying
    from lockstep.proof import conversion

    conversion.convert(run, run / paths.MODEL)
    return evaluation.test(run)


def tested_twin(run: Path) -> Path | None:
    """The row's first repetition, if it is tested and what decides a test is the same there; otherwise None.

    That is the weights, by their sha256, the data, the task and the strategy's options. Snakemake tests the first
    repetition before the others. It never copies itself: when the code of a test has changed, all others are outdated.
    """
    first = paths.first_repetition_of(run)
    files = (f"{paths.CHECKPOINT}/{MANIFEST}", paths.RECORD, paths.SETTINGS)
    ended = all((folder / file).is_file() for folder in (first, run) for file in files)
    if run.resolve() == first.resolve() or not (ended and (first / paths.TEST_REPORT).is_file()):
        return None
    return first if _decides(run) == _decides(first) and _sealed(first / paths.MODEL) else None


def _decides(run: Path) -> tuple:
    """What decides the result of a run's test, beside the code."""
    weights = read_json(run / paths.CHECKPOINT / MANIFEST)["weights"]
    settings = read_json(run / paths.SETTINGS)
    return weights, record_files.read_run(run).hashes["data"], settings["task"], settings.get("options")


def _sealed(model: Path) -> bool:
    try:
        return bool(verify(model, ""))
    except RunFailed:
        return False


if __name__ == "__main__":
    cli.run(main)
