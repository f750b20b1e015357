"""Private names of PyTorch, which another version may have changed: all of them are known, and each is there.

Nightly this runs at both ends of the range of versions (.github/workflows/nightly.yml), as all proofs do.
"""

import ast
import importlib
import re

import pytest
import torch

from lockstep.paths import SCRIPTS, STUDIES

# What is used, each tried with PyTorch 2.11, 2.12 and 2.13. What has no second way in the code fails here, by its name.
USED = {
    "torch._foreach_copy_",
    "torch._foreach_mul_",
    "torch._dynamo.config",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.nn.modules.conv._ConvNd",
    "torch.nn.modules.dropout._DropoutNd",
    "torch.utils._python_dispatch.TorchDispatchMode",
}


def private_names(code: str) -> set[str]:
    """The names below torch that code takes and whose path has a part with an underscore in front."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            names.add(ast.unparse(node))
    return {name for name in names if re.search(r"\._(?!_)", name) and "(" not in name}


def part_of(shorter: str, longer: str) -> bool:
    return f"{longer}.".startswith(f"{shorter}.")


def test_private_names_of_pytorch_are_few_and_known():
    files = [*SCRIPTS.rglob("*.py"), *STUDIES.rglob("*.py")]
    used = set().union(*(private_names(file.read_text(encoding="utf-8")) for file in files))
    # `torch._dynamo` is a part of `torch._dynamo.config`, and that of the key that is set in it.
    assert not {name for name in used if not any(part_of(known, name) or part_of(name, known) for known in USED)}
    assert not {known for known in USED if not any(part_of(known, name) for name in used)}


@pytest.mark.parametrize("name", sorted(USED))
def test_a_private_name_is_there(name):
    module, _, attribute = name.rpartition(".")
    found = torch if module == "torch" else importlib.import_module(module)
    assert hasattr(found, attribute), f"PyTorch {torch.__version__} has no {name}"
