"""Where things are: the project's own folders, and what lies where in a results folder."""

from pathlib import Path

from lockstep.errors import BadInput

SCRIPTS = Path(__file__).resolve().parents[1]
WORKFLOW = SCRIPTS.parent
PROJECT = WORKFLOW.parent
STRATEGIES = SCRIPTS / "lockstep" / "strategies"


def data_file(results: Path) -> Path:
    """What is known of the prepared data: the last thing that `prepare` writes."""
    return results / "data" / "data.json"


def plan_file(results: Path, name: str) -> Path:
    """A plan's arrays; what is known of it lies beside, as .json."""
    return results / "data" / "plan" / f"{name}.npz"


def peak_file(results: Path) -> Path:
    """How many operations a second this machine's cores reach."""
    return results / "data" / "peak.json"


def decision_file(results: Path, block: int) -> Path:
    """What follows after a block, with `repeats: auto`."""
    return results / "blocks" / f"{block}.json"


def require(path: Path, script: str) -> Path:
    """`path`, which `script` makes. Raises BadInput where it is not there."""
    if not path.exists():
        raise BadInput(f"{path} does not exist. Run workflow/scripts/{script} first.")
    return path
