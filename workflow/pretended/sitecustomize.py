"""Imported by Python itself at the start of each process: has torch_cuda.py change modules as they are imported."""

import importlib.abc
import importlib.machinery
import os
import sys


class Changed(importlib.abc.MetaPathFinder):
    """Finds the modules of which torch_cuda.py changes something, and has it done before and after they are loaded."""

    def find_spec(self, name, path, target=None):
        if name in torch_cuda.BEFORE:
            torch_cuda.BEFORE.pop(name)()  # now, as a compiled module is loaded before it is executed
        if name not in torch_cuda.AFTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec and spec.loader:
            load = spec.loader.exec_module

            def load_changed(module):
                load(module)
                torch_cuda.AFTER[name](module)

            spec.loader.exec_module = load_changed
        return spec


if os.environ.get("LOCKSTEP_PRETENDED_GPUS"):
    import torch_cuda

    sys.meta_path.insert(0, Changed())
