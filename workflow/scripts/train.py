"""One process of a run: what launch.py's command starts once for each device. Not for calling by hand."""

import argparse
from pathlib import Path

from lockstep.rank import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the run's folder, which holds settings.json")
    parser.add_argument("--local-rank", "--local_rank", help="passed by some launchers; the environment says the same")
    main.main(parser.parse_args().folder)
