"""What a paper takes: LaTeX in which every text is only text, a line for each run, and what to cite."""

import csv
from types import SimpleNamespace
from unittest import mock
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as some
from pybtex import database

from lockstep import __version__, columns, files, paths
from lockstep.report import page, paper
from lockstep.report.reading import Missing


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ddp_amp", r"ddp\_amp"),
        (r"\input{/etc/passwd}", r"\textbackslash{}input\textbraceleft{}/etc/passwd\textbraceright{}"),
        ("50 % & $x$ #1\n~^", r"50 \% \& \$x\$ \#1 \textasciitilde{}\textasciicircum{}"),
    ],
)
def test_latex_prints_every_text_as_it_is(text, expected):
    assert paper.escaped(text) == expected


@pytest.mark.parametrize(
    ("values", "english", "chinese"),
    [
        (["fp32", "fp32", "fp32"], "fp32", "fp32"),
        (["fp32", "bf16", "fp32"], "fp32 (ddp: bf16)", "fp32（ddp：bf16）"),
        (["1", "2", "2"], "2 (single: 1)", "2（single：1）"),
        (["1", "2", "4"], "1 (ddp: 2; fsdp: 4)", "1（ddp：2；fsdp：4）"),
    ],
)
def test_the_methods_say_which_rows_have_another_setting(values, english, chinese):
    told = paper._by_row(["single", "ddp", "fsdp"], values)
    assert (told.en, told.zh) == (english, chinese)


def test_the_table_has_the_columns_that_decide_and_as_many_cells_in_each_line():
    row = dict.fromkeys(columns.KEYS) | {
        "row": "a_b",
        "proof": "equal",
        "status": "ok",
        "repeats": 3,
        "sm_mhz_by_gpu": "9",
    }
    times = {"train_seconds": 1.5, "train_seconds_low": 1.25, "train_seconds_high": 2.0}
    text = paper.latex(page.table([row | times, row | {"row": "late"}]), "100 % here")
    lines = [line.strip() for line in text.splitlines() if line.endswith(r"\\")]
    assert lines[0] == r"row & same model? & train s & runs \\"
    assert lines[1:] == [r"a\_b & equal & 1.50 [1.25 -- 2.00] & 3 \\", r"late & equal & -- & 3 \\"]
    assert r"100 \% here" in text
    assert paper.latex([], "") == "% no row yet\n"


def test_every_run_has_its_line_and_no_cell_is_a_formula(tmp_path):
    missing = [Missing(2, "failed", "=1+1"), Missing(3, "skipped", "not run yet")]
    row = dict.fromkeys(columns.KEYS) | {"row": "ddp", "strategy": "ddp", "world_size": 2, "division": "closed"}
    summary = SimpleNamespace(rows=[row], runs={"ddp": missing})
    file = tmp_path / paths.RUNS_TABLE
    files.write_csv(file, list(paper.ABOUT_RUN), [line[: len(paper.ABOUT_RUN)] for line in paper.run_lines(summary)])
    with file.open(encoding="utf-8-sig", newline="") as stream:
        lines = list(csv.DictReader(stream))
    assert [(line["row"], line["repetition"], line["status"]) for line in lines] == [
        ("ddp", "2", "failed"),
        ("ddp", "3", "skipped"),
    ]
    assert lines[0]["reason"] == "'=1+1"


def test_what_is_cited_is_what_the_citation_file_says():
    entry = paper.bibtex(SimpleNamespace(succeeded_runs=[]))
    assert "Lockstep: which PyTorch training strategy" in entry
    assert "author = {{The Lockstep authors}}" in entry
    assert f"version = {{{__version__}}}" in entry
    assert entry.count("{") == entry.count("}")


@given(title=some.text(), name=some.text(min_size=1), url=some.none() | some.text(min_size=1))
def test_bibtex_reads_every_text_as_it_is(title, name, url):
    """A program that reads BibTeX finds the same fields and authors, whatever stands in them."""
    authors = [{"name": name}, {"family-names": "Lovelace", "given-names": "Ada"}, {"family-names": "Sappho"}]
    cited = {"title": title, "authors": authors, "date-released": "2026-11-29"}
    with mock.patch.multiple(paper, _citation=lambda: cited, address=lambda: url):
        entry = paper.bibtex(SimpleNamespace(succeeded_runs=[]))
    (found,) = database.parse_string(entry, "bibtex").entries.values()
    assert found.fields["title"] == " ".join(f"{{{paper.escaped(title)}}}".split())
    assert unquote(found.fields.get("url", "")) == unquote(url or "")
    assert (found.fields["year"], found.fields["version"]) == ("2026", paper.escaped(__version__))
    entity, *people = found.persons["author"]
    assert str(entity) == " ".join(f"{{{paper.escaped(name)}}}".split())
    assert [str(person) for person in people] == ["Lovelace, Ada", "Sappho"]


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("git@example.com:people/lockstep.git", "https://example.com/people/lockstep.git"),
        ("https://user:secret@example.com/lockstep", "https://example.com/lockstep"),
        ("/home/somebody/lockstep", None),
    ],
)
def test_an_address_holds_no_secret_and_no_folder_of_this_machine(monkeypatch, origin, expected):
    monkeypatch.setattr(paper, "_citation", lambda: {})
    monkeypatch.setattr(paper.provenance, "origin", lambda: origin)
    paper.address.cache_clear()
    assert paper.address() == expected
    paper.address.cache_clear()
