"""One process of a run: what launch.py's command starts once for each device.

By hand it is called where a run whose launcher is `hand` has printed the line for it.
"""

import argparse
import sys
from pathlib import Path

from lockstep.errors import exit_code

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the run's folder, which holds settings.json")
    parser.add_argument("--local-rank", "--local_rank", help="passed by some launchers; the environment says the same")
    parser.add_argument("--by-hand", action="store_true", help="answer a run that waits for its ranks to be started")
    arguments = parser.parse_args()
    if arguments.by_hand:
        from lockstep.rank import by_hand

        sys.exit(exit_code(by_hand.start, arguments.folder))
    from lockstep.rank import main  # which takes PyTorch's seconds

    main.main(arguments.folder)
