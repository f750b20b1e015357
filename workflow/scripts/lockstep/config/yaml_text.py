"""Text in YAML, as users mean it: what YAML 1.1 reads otherwise than it looks is refused, and so are repeated keys.

Snakemake reads configuration files itself, after they were checked by this.
"""

import re

import yaml

INT, FLOAT, TIME = (f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp"))
OCTAL = re.compile(r"[-+]?0[0-7_]+")
OF_BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")


class Misread(yaml.constructor.ConstructorError):
    """A value that YAML would read as another one than is written there; the message says what to write instead."""

    def __str__(self):
        return f"line {self.problem_mark.line + 1}: {self.problem}"


class Loader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys, of which YAML would silently use the last, and what it misreads."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if key.value in seen and isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value} occurs twice", problem_mark=key.start_mark
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)

    def construct_number(self, node):
        """A number, as it looks: not 064, which YAML reads as 52 (octal), nor 10:00, which it reads as 600."""
        plain = self.construct_yaml_int if node.tag == INT else self.construct_yaml_float
        value, text = plain(node), node.value
        if node.tag == INT and OCTAL.fullmatch(text):
            remedy = text.replace("_", "").lstrip("+-0") or "0"
            raise self._misread(node, f"YAML reads it as {value} (octal). Write {remedy}, or")
        if OF_BASE_60.fullmatch(text):
            raise self._misread(node, f"YAML reads it as {value} (in base 60). Write a plain number, or")
        return value

    def construct_time(self, node):
        raise self._misread(node, "YAML reads it as a date. If it is text,")

    def _misread(self, node, why: str) -> Misread:
        return Misread(problem=f"{node.value}: {why} put it in quotes: '{node.value}'.", problem_mark=node.start_mark)


for tag in (INT, FLOAT):
    Loader.add_constructor(tag, Loader.construct_number)
Loader.add_constructor(TIME, Loader.construct_time)


def load(text: str):
    """The value of a text in YAML. Raises yaml.YAMLError or ValueError if it is not valid, or Misread."""
    return yaml.load(text, Loader)
