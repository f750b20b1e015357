"""The journal of a results folder: appended to, and what tells whether a file was changed since."""

import pytest

from lockstep import paths
from lockstep.errors import BadInput
from lockstep.run import journal


@pytest.fixture
def folder(tmp_path):
    run = tmp_path / "runs" / "ddp" / "n2" / "rep1"
    run.mkdir(parents=True)
    (run / "record.json").write_text("{}")
    journal.note(tmp_path, "request", rows=["ddp"])
    journal.note(tmp_path, "run", run, ("record.json", "ranks/*.json"))
    return run


def test_it_is_appended_to(tmp_path, folder):
    before = paths.journal_file(tmp_path).read_bytes()
    journal.note(tmp_path, "run", folder, ("record.json",))
    assert paths.journal_file(tmp_path).read_bytes().startswith(before)
    request, first, again = journal.read(tmp_path)
    assert request["rows"] == ["ddp"]
    assert first["files"] == again["files"]
    assert first["folder"] == "runs/ddp/n2/rep1"


def test_what_was_changed_or_is_gone_is_told_until_it_is_made_again(tmp_path, folder):
    assert journal.changed(tmp_path, journal.read(tmp_path)) == []
    (folder / "record.json").write_text("{ }")
    said = "record.json was changed after the run that left it"
    assert journal.changed(tmp_path, journal.read(tmp_path)) == [(str(folder), said)]
    journal.note(tmp_path, "run", folder, ("record.json",))
    assert journal.changed(tmp_path, journal.read(tmp_path)) == []
    (folder / "record.json").unlink()
    said = "record.json, which the run left, is gone"
    assert journal.changed(tmp_path, journal.read(tmp_path)) == [(str(folder), said)]


@pytest.mark.parametrize("line", [b"5", b'{"what": ', b"\xff\xfe", b"{}"])
def test_a_damaged_line_is_named_by_its_number(tmp_path, folder, line):
    with paths.journal_file(tmp_path).open("ab") as stream:
        stream.write(line + b"\n")
    with pytest.raises(BadInput, match=r"journal\.jsonl, line 3: is damaged"):
        journal.read(tmp_path)


def test_only_a_run_in_a_results_folder_has_one(tmp_path):
    (tmp_path / "elsewhere" / "test").mkdir(parents=True)
    journal.note_test(tmp_path / "elsewhere")
    assert not list(tmp_path.rglob(paths.journal_file(tmp_path).name))


def test_a_line_that_a_power_cut_left_unfinished_does_not_spoil_the_next(tmp_path, folder):
    file = paths.journal_file(tmp_path)
    file.write_bytes(file.read_bytes()[:-20])
    journal.note(tmp_path, "run", folder, ("record.json",))
    *_, cut, last = file.read_text().splitlines()
    assert not cut.endswith("}")
    assert last.startswith("{")
    with pytest.raises(BadInput, match="line 2: is damaged"):
        journal.read(tmp_path)
