"""One process of a run, which launch.py's command starts once for each device.

For a run with the launcher `hand`, you start it yourself by the printed line.
"""

import argparse
import gc
import sys
from pathlib import Path

from lockstep.errors import exit_code

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the run's folder, which holds settings.json")
    parser.add_argument("--local-rank", "--local_rank", help="passed by some launchers; the environment has it, too")
    parser.add_argument("--by-hand", action="store_true", help="join a run that waits for ranks started by hand")
    arguments = parser.parse_args()
    if arguments.by_hand:
        from lockstep.rank import by_hand

        sys.exit(exit_code(by_hand.start, arguments.folder))
    # Nothing of what is imported is garbage; looking for some would take a fifth of that time (rank/session.py).
    gc.disable()
    from lockstep.rank import main  # imports PyTorch, which takes seconds

    main.main(arguments.folder)
