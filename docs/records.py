"""Check all records in records/, and write their tables into records/README.md: make docs"""

import re
from pathlib import Path

from lockstep.records import board

FOLDER = Path(__file__).parents[1] / "records"
PAGE = FOLDER / "README.md"
TABLES = re.compile(r"(?<=<!-- records: make docs -->\n).*", re.DOTALL)


def written() -> str:
    """The text of the page with tables of all records."""
    tables = board.markdown(board.read(FOLDER), board.pinned_torch())
    return TABLES.sub(lambda _: tables, PAGE.read_text(encoding="utf-8"), count=1)


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
    print("records/README.md is written")
