"""Where things are: the project's own folders, and what lies where in a results folder."""

from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1]
WORKFLOW = SCRIPTS.parent
PROJECT = WORKFLOW.parent
STRATEGIES = SCRIPTS / "lockstep" / "strategies"
