"""Import transformers without optional packages that it would import if they are installed, but training never uses."""

import contextlib
import importlib
import sys

UNUSED = ("peft", "bitsandbytes")  # adapters and 8-bit weights; importing both takes a second at every start


@contextlib.contextmanager
def hidden(*packages: str):
    """Make these packages look uninstalled within the block, unless they are imported already."""
    absent = [package for package in packages if package not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))
    try:
        yield
    finally:
        for package in absent:
            del sys.modules[package]


@contextlib.contextmanager
def without_unused():
    """Make the packages in UNUSED look uninstalled within the block, and scipy while transformers is imported.

    transformers uses scipy only for losses of object detection, and importing scipy is a tenth of a start. transformers
    looks for scipy once, when it is imported itself; if that happened before, scipy is imported with its models.
    """
    with hidden("scipy"):
        importlib.import_module("transformers")
    with hidden(*UNUSED):
        yield
