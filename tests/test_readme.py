"""The READMEs: the Chinese one follows the English one, and the commands and files that they name are there."""

import hashlib
import re

import pytest

from .conftest import PROJECT

ENGLISH, CHINESE = PROJECT / "README.md", PROJECT / "README.zh-CN.md"


def commands(text: str) -> list[str]:
    """What stands in the indented blocks, without the remarks beside it."""
    lines = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    return [re.split(r"\s+#\s|\s{3,}", line)[0].strip() for line in lines]


def test_the_chinese_readme_is_of_this_english_one():
    """After changing README.md, change README.zh-CN.md too, and put the new hash into its second line."""
    digest = hashlib.sha256(ENGLISH.read_bytes()).hexdigest()
    assert digest in CHINESE.read_text(encoding="utf-8")


def test_both_show_the_same_commands():
    assert commands(CHINESE.read_text(encoding="utf-8")) == commands(ENGLISH.read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", [ENGLISH, CHINESE])
def test_what_they_link_to_is_there(file):
    text = file.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("http") or (PROJECT / link).exists(), link
    for script in re.findall(r"workflow/scripts/\w+\.py", text):
        assert (PROJECT / script).is_file(), script
