"""Lockstep measured against what one would otherwise take. `python -m benchmarks` finds Lockstep beside this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "workflow" / "scripts"))
