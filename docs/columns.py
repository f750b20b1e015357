"""Write the meaning of each column of summary.csv and runs.csv into docs/guide/recipes.md, and in Chinese: make docs"""

import re
from pathlib import Path

from lockstep import columns
from lockstep.report import paper
from lockstep.report.words import meaning

PAGES = {"en": "recipes.md", "zh": "recipes.zh.md"}
HEADS = {"en": "| column | in | type | unit | meaning |", "zh": "| 列 | 所在文件 | 类型 | 单位 | 含义 |"}
TYPES = {"en": ("number", "text"), "zh": ("数", "文本")}
ENDS = {"en": ("lower end of {}", "upper end of {}"), "zh": ("{} 的下端", "{} 的上端")}
FORMER = {"en": "earlier name of {}", "zh": "{} 的旧名"}
TABLE = re.compile(r"^\| (?:column \| in|列 \| 所在文件) .*\n(?:\|.*\n)+", re.MULTILINE)
GUIDE = Path(__file__).parent / "guide"


def table(language: str) -> str:
    """The table of all columns, by their names in the files."""
    lines = [HEADS[language], "|---|---|---|---|---|"]
    for column in columns.COLUMNS:
        each_run = column.key in paper.ABOUT_RUN or column in columns.MEASURED
        files = "both" if each_run else "summary.csv"
        of = {"both": {"en": "both", "zh": "两者"}, "summary.csv": {"en": "summary.csv", "zh": "summary.csv"}}[files]
        unit = "" if column.factor != 1 else column.unit  # files have shares as shares
        kind = TYPES[language][column.digits is None and column.measure is None and not column.whole]
        lines.append(_line(column.key, of[language], kind, unit, getattr(meaning(column.key), language)))
        for end, words in zip(column.ends, ENDS[language], strict=False):
            lines.append(_line(end, "summary.csv", kind, unit, words.format(column.key)))
        if column.former:
            lines.append(_line(column.former, "summary.csv", kind, unit, FORMER[language].format(column.key)))
    beside = [name for name in paper.ABOUT_RUN if name not in columns.BY_KEY]
    for name in beside:
        kind = TYPES[language][name not in paper.NUMBERS]
        unit = "s" if name.endswith("_seconds") else ""
        lines.append(_line(name, "runs.csv", kind, unit, getattr(meaning(name), language)))
    return "\n".join(lines) + "\n"


def _line(*cells: str) -> str:
    name, *others = cells
    return f"| `{name}` | {' | '.join(others)} |"


def written(language: str) -> str:
    """The text of the page with the new table."""
    text = (GUIDE / PAGES[language]).read_text(encoding="utf-8")
    return TABLE.sub(lambda _: table(language), text, count=1)


if __name__ == "__main__":
    for spoken, page in PAGES.items():
        (GUIDE / page).write_text(written(spoken), encoding="utf-8")
        print(f"docs/guide/{page} is written")
