"""Write the table of all keys into config/README.md, from their declarations (lockstep/config/sections.py).

make docs
"""

import json
import re
from pathlib import Path

from lockstep.config import schema

PAGE = Path(__file__).parents[1] / "config" / "README.md"
TABLE = re.compile(r"\| key \| default \| meaning \|\n(\|.*\n)+")
OF_ROWS = "the published comparison's nine rows, `all_threads`, `fabric` and `fsdp`"


def table() -> str:
    """The table of all keys, as section.key, each with its default and its meaning."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key, (default, description) in dotted(schema.of_configuration()["properties"]).items():
        shown = OF_ROWS if key == "rows" else f"`{json.dumps(default, ensure_ascii=False)}`"
        lines.append(f"| `{key}` | {shown} | {description} |")
    return "\n".join(lines) + "\n"


def dotted(properties: dict, prefix: str = "") -> dict:
    keys = {}
    for name, inner in properties.items():
        if "properties" in inner:
            keys |= dotted(inner["properties"], f"{prefix}{name}.")
        else:
            keys[prefix + name] = (inner["default"], inner["description"])
    return keys


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda _: table(), text, count=1), encoding="utf-8")
    print(f"{PAGE.relative_to(Path.cwd())} is written")
