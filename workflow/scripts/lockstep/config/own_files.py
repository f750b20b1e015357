"""A user's configuration files for frameworks: Accelerate's and DeepSpeed's.

Each is checked against its row before anything starts (accelerate_file.py, deepspeed_file.py).
"""

import json
from pathlib import Path

import yaml

from lockstep.config import yaml_text
from lockstep.errors import BadInput
from lockstep.files import hash_text


def digest(file: str) -> str | None:
    """A hash by which a changed file is recognised; None if the file does not exist."""
    path = Path(file)
    return hash_text(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else None


def read(file: str, where: str) -> dict:
    """The keys and values of a file in YAML or JSON. Raises BadInput if it can't be read, or holds none."""
    path = Path(file)
    if not path.is_file():
        raise BadInput(f"{where}: {file} does not exist. Name an existing file; a container sees only this folder's.")
    try:
        text = path.read_text(encoding="utf-8-sig")
        try:
            said = json.loads(text)  # YAML would read JSON's 1e-8 as a string
        except ValueError:
            said = yaml_text.load(text)
    except yaml_text.Misread as error:
        raise BadInput(f"{where}: {file}, {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadInput(f"{where}: {file} is not valid YAML or JSON: {' '.join(str(error).split())}") from None
    if not isinstance(said, dict):
        raise BadInput(f"{where}: {file} holds no keys and values.")
    return said


def refuse_foreign(said: dict, known: tuple[str, ...], file: str, where: str) -> None:
    """Raise BadInput if a file sets a key that has no counterpart in a row."""
    if more := [str(key) for key, value in said.items() if value and key not in known]:
        raise BadInput(f"{where}: {file} sets {', '.join(more)}, which has no counterpart in a row. Remove it.")


def contradiction(file: str, where: str, key: str, said, wanted, why: str) -> BadInput:
    return BadInput(f"{where}: {file} says {key}: {said!r}, and {why}. Set it to {wanted!r}.")
