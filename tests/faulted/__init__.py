"""Faults that only something inside of a run's processes can make.

`into(place)` puts inside.py among the scripts of a project's copy, which are on the path of every process of a run, and
has two modules of that copy ask it; the product itself never loads it. `clock()` compiles clock.c, by which a whole run
believes in another date.
"""

import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
ASK = {
    "rank/replay.py": "Replay.step_done = inside.step_done(Replay.step_done)",
    "run/addresses.py": "free_port = inside.port(free_port)",
}


def into(place) -> None:
    """Have the runs of the project's copy `place` ask, after each step, whether something is to go wrong."""
    shutil.copy2(HERE / "inside.py", place.path("workflow/scripts/inside.py"))
    for module, line in ASK.items():
        file = place.path("workflow/scripts/lockstep") / module
        file.write_text(f"{file.read_text(encoding='utf-8')}\n\nimport inside\n\n{line}\n", encoding="utf-8")


def clock(folder: Path) -> Path:
    """The library to name in LD_PRELOAD, compiled into `folder`."""
    library = folder / "clock.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", str(HERE / "clock.c"), "-o", str(library), "-ldl"], check=True)
    return library
