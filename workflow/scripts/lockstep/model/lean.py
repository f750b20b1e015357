"""Importing transformers without what it imports wherever that is installed, and training never calls."""

import contextlib
import sys

# For adapters, weights in 8 bits, and losses of object detection: together more than a second at every start.
UNUSED = ("peft", "bitsandbytes", "scipy")


@contextlib.contextmanager
def imports():
    """Have imports find none of these packages, unless they are there already."""
    hidden = [package for package in UNUSED if package not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        for package in hidden:
            del sys.modules[package]
