"""The command `lockstep` of `pip install .`, for whoever has no clone, or is not in one.

In a clone it starts that clone's own command in this Python, as .venv/bin/lockstep does.
"""

import os
import sys
from pathlib import Path

from lockstep.paths import SCRIPTS

CLONE = Path("workflow/scripts/command.py")


def main() -> None:
    if CLONE.is_file():
        os.execv(sys.executable, [sys.executable, str(CLONE), *sys.argv[1:]])
    sys.path.insert(0, str(SCRIPTS))  # the commands are not modules of the package
    import command

    command.main()
