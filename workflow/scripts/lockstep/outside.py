"""The command `lockstep` of `pip install .`, for whoever has no clone, or is not in one.

In a clone it starts that clone's own command in this Python, as .venv/bin/lockstep does.
"""

import os
import sys
from pathlib import Path

from lockstep.paths import SCRIPTS

COMMAND = Path("workflow/scripts/command.py")
IN_A_CLONE = Path("workflow/scripts/lockstep/outside.py")  # other projects may have a workflow/scripts/command.py, too


def main() -> None:
    if IN_A_CLONE.is_file():
        os.execv(sys.executable, [sys.executable, str(COMMAND), *sys.argv[1:]])
    sys.path.insert(0, str(SCRIPTS))  # the commands are not modules of the package
    import command

    command.main()
