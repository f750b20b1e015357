"""Importing transformers without what it imports wherever that is installed, and training never calls."""

import contextlib
import importlib
import sys

UNUSED = ("peft", "bitsandbytes")  # for adapters and weights in 8 bits: together a second at every start


@contextlib.contextmanager
def hidden(*packages: str):
    """Have imports find none of these packages, unless they are there already."""
    absent = [package for package in packages if package not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))
    try:
        yield
    finally:
        for package in absent:
            del sys.modules[package]


@contextlib.contextmanager
def imports():
    """Have imports find none of UNUSED.

    Of scipy transformers takes the assignment for losses of object detection, a tenth of a start. Whether it is there
    is asked once, when transformers is imported; where that was before, scipy is imported with its models.
    """
    with hidden("scipy"):
        importlib.import_module("transformers")
    with hidden(*UNUSED):
        yield
