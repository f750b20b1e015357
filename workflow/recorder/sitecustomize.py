"""Python imports this file automatically at the start of each process of a recorded script, including launchers.

It makes lockstep_recorder.py patch PyTorch when that is imported, or lockstep_timer.py if LOCKSTEP_WARM_UP is set, and
does nothing else, so a process without PyTorch starts as fast as before. The names are unlike any module of a script,
since a script that imports a module of such a name would get this folder's.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys


def _other_sitecustomize() -> None:
    """Run the environment's own file of this name, which this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    elsewhere = [path for path in sys.path if os.path.abspath(path or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec and spec.loader:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


class _Watched(importlib.abc.MetaPathFinder):
    """Calls the patches after each module that they are for is loaded."""

    def __init__(self, changes):
        self.changes = changes

    def find_spec(self, name, path, target=None):
        if name not in self.changes:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec and spec.loader:
            load, change = spec.loader.exec_module, self.changes[name]

            def load_and_change(module):
                load(module)
                change(module)

            spec.loader.exec_module = load_and_change
        return spec


_other_sitecustomize()
if os.environ.get("LOCKSTEP_RECORDING"):
    if "LOCKSTEP_WARM_UP" in os.environ:
        import lockstep_timer as patches
    else:
        import lockstep_recorder as patches

    sys.meta_path.insert(0, _Watched(patches.CHANGES))
