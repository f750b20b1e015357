"""`lockstep record`: results in one file that others can check, and the page of such files."""

import csv
import io
import json
import lzma
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from lockstep import paths
from lockstep.errors import BadInput
from lockstep.files import hash_bytes, write_json
from lockstep.paths import SCRIPTS
from lockstep.proof import fairness
from lockstep.records import board, checking, packing
from tests.proof.test_fairness import report, results, run  # noqa: F401 - a fixture


@pytest.fixture
def folder(benchmark, results):  # noqa: F811
    """A fair results folder with its report, made on a machine whose names nobody else shall read."""
    report(benchmark, results)
    asked = {"time": "2026-11-28T10:00:00+00:00", "host": "secret-host", "commit": "0123abcd", "changed": False}
    asked["command"] = "snakemake --cores all --configfile '/srv/客户 data/mine.yaml' --directory /home/zhangwei/work"
    write_json(paths.manifest_file(results), asked)
    return results


@pytest.fixture
def record(folder, tmp_path) -> Path:
    packed = packing.pack(folder)
    file = tmp_path / packed.name
    file.write_bytes(packed.content)
    return file


def members(file: Path) -> dict[str, bytes]:
    with tarfile.open(file, mode="r:xz") as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}


def repacked(file: Path, **changed: bytes | None) -> Path:
    """The record with other files in it, whose hashes are in its manifest; None removes one."""
    contents = {name: content for name, content in (members(file) | changed).items() if content is not None}
    manifest = json.loads(contents[packing.MANIFEST])
    for name, content in changed.items():
        if content is None:
            del manifest["files"][name]
        elif name in manifest["files"]:
            manifest["files"][name] |= {"sha256": hash_bytes(content)}
    if packing.MANIFEST not in changed:
        contents[packing.MANIFEST] = json.dumps(manifest).encode()
    return archive(file.with_name("changed.record"), contents)


def archive(file: Path, contents: dict[str, bytes], kind: bytes = tarfile.REGTYPE) -> Path:
    with tarfile.open(file, mode="w:xz") as made:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size, member.type, member.linkname = len(content), kind, "/etc/passwd"
            made.addfile(member, io.BytesIO(content))
    return file


def command(*words, cwd: Path) -> subprocess.CompletedProcess:
    program = [sys.executable, SCRIPTS / "command.py", "record", *words]
    return subprocess.run(program, cwd=cwd, capture_output=True, text=True, check=False)


def test_a_fair_folder_becomes_a_record_that_holds(folder, record):
    checked = checking.check(record)
    assert checked.breaches == []
    assert set(checked.seconds) == {"single", "ddp", "fsdp"}
    assert all(len(seconds) == 3 for seconds in checked.seconds.values())
    assert record.stat().st_size < 1_000_000
    assert packing.pack(folder).content == record.read_bytes(), "the same results give the same bytes"


def test_no_name_of_machine_user_or_folder_and_no_text_is_in_it(benchmark, folder, record, monkeypatch):
    monkeypatch.setattr(packing.getpass, "getuser", lambda: "zhangwei")
    whole = b"".join(content for name, content in members(record).items() if not name.endswith(packing.NUMBERS))
    words = whole.decode()
    for private in ("secret-host", "zhangwei", "客户", "/srv", "/home", str(folder.parent), str(benchmark.folder)):
        assert private not in words, private
    assert "mine.yaml" in words, "the names of files stay"
    with (run(folder) / paths.TEST_PREDICTIONS).open(encoding="utf-8-sig", newline="") as stream:
        texts = [line["text"] for line in csv.DictReader(stream)]
    assert len(texts) > 50
    assert not [text for text in texts if text in words]
    assert not [name for name in members(record) if name.endswith((".safetensors", ".pt", ".arrow", ".log", ".html"))]
    assert "secret-host" in members_text(packing.pack(folder, with_host=True), folder)


def members_text(packed: packing.Packed, folder: Path) -> str:
    file = folder.parent / "with_host.record"
    file.write_bytes(packed.content)
    return members(file)["manifest.json"].decode()


def test_a_record_with_one_other_byte_is_refused(record, tmp_path):
    content = record.read_bytes()
    other = tmp_path / "other.record"
    for place in [*range(0, len(content), max(1, len(content) // 40)), len(content) - 1]:
        other.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(BadInput, match=r"other\.record: "):
            checking.check(other)
    for damaged in (content[:-9], content + b"more", content[:100], b"", b"PK\3\4"):
        other.write_bytes(damaged)
        with pytest.raises(BadInput, match=r"other\.record: "):
            checking.check(other)
    refused = command("check", "other.record", cwd=tmp_path)
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr


def test_a_file_that_was_changed_with_its_hash_breaks_a_rule(record):
    """Negative control: the manifest alone would let anybody be faster."""
    (name,) = (name for name in members(record) if name.startswith("runs/ddp/") and name.endswith("rep2/record.json"))
    content = json.loads(members(record)[name])
    content["clock"]["train_seconds"] /= 2
    breaches = checking.check(repacked(record, **{name: json.dumps(content).encode()})).breaches
    assert any("record.json was changed after the run" in what for _, what in breaches), breaches
    assert any("training time is not that of its slowest rank" in what for _, what in breaches)


def test_a_report_that_says_otherwise_breaks_a_rule(record):
    content = json.loads(members(record)["report/summary.json"])
    (line,) = (row for row in content["rows"] if row["row"] == "ddp")
    line["train_seconds"] /= 2
    breaches = checking.check(repacked(record, **{"report/summary.json": json.dumps(content).encode()})).breaches
    assert any("the report has train_seconds" in what for _, what in breaches)


def test_a_file_that_is_left_out_is_missed(record):
    name = next(name for name in members(record) if name.endswith("rep3/ledger.npz"))
    breaches = checking.check(repacked(record, **{name: None})).breaches
    assert any("ledger" in what for _, what in breaches)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["../evil.json"], "which no record has"),
        (["/tmp/evil.json"], "which no record has"),
        (["runs/ddp/n2/rep1/run.log"], "which no record has"),
        (["runs/../../evil/n2/rep1/record.json"], "which no record has"),
        (["proofs/accept.json"], "which no record has"),
        ([], "has no lockstep-record.json"),
    ],
)
def test_an_archive_with_other_files_is_refused_and_writes_nothing(tmp_path, names, said):
    contents = dict.fromkeys(names, b"{}")
    about = {"format": 1, "files": {name: {"sha256": hash_bytes(b"{}")} for name in names}, "left_out": {}}
    if names:
        contents[packing.MANIFEST] = json.dumps(about).encode()
    file, inside = archive(tmp_path / "evil.record", contents), tmp_path / "inside"
    inside.mkdir()
    with pytest.raises(BadInput, match=said):
        packing.unpack(file, inside)
    assert not list(inside.iterdir())
    assert sorted(tmp_path.iterdir()) == [file, inside]


def test_links_and_bombs_are_refused(tmp_path, monkeypatch):
    with pytest.raises(BadInput, match="is not a file"):
        checking.check(archive(tmp_path / "link.record", {"config.yaml": b""}, tarfile.SYMTYPE))
    (tmp_path / "bomb.record").write_bytes(lzma.compress(bytes(3_000_000)))
    monkeypatch.setattr(packing, "MOST_UNPACKED", 1_000_000)
    with pytest.raises(BadInput, match="unpacks to more than 1 MB"):
        checking.check(tmp_path / "bomb.record")


def test_what_it_was_made_of_is_written_only_if_it_holds(folder, tmp_path):
    made = command("submit", folder.name, "--output", "mine.record", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "times <path>" in made.stdout
    again = command("submit", folder.name, "--output", "mine.record", cwd=tmp_path)
    assert again.returncode == 2
    assert "exists already" in again.stderr
    told = command("check", "mine.record", "--unpack", "theirs", cwd=tmp_path)
    assert told.returncode == 0, told.stdout
    assert "no breach" in told.stdout
    assert fairness.check(tmp_path / "theirs").breaches == []
    (run(tmp_path / "theirs") / paths.RECORD).write_text("{}")
    assert fairness.check(tmp_path / "theirs").breaches

    shutil.rmtree(run(folder, "ddp", 3))
    refused = command("submit", folder.name, "--output", "other.record", cwd=tmp_path)
    assert refused.returncode == 2
    assert "breaks the rules" in refused.stderr
    assert not (tmp_path / "other.record").exists()


def test_a_folder_without_results_is_told(tmp_path):
    told = command("submit", ".", cwd=tmp_path)
    assert told.returncode == 2
    assert "holds no report and no accept.json" in told.stderr


def test_acceptance_becomes_a_record_and_a_wrong_proof_breaks_it(tmp_path):
    verdict = {"proof": "equal", "reason": "", "nature": ""}
    wrong = {"proof": "unequal", "reason": "a loss differs", "nature": ""}
    machine = {"cpu": "X", "cores": 2, "gpus": ["GPU"], "packages": {"torch": "2.13.0"}}
    accepted = {"machine": machine, "proofs": {"ddp": verdict, "fsdp": wrong}, "times": [], "cannot": {}}
    write_json(tmp_path / "accept.json", accepted)
    trial = tmp_path / "proofs" / "parity" / "ddp" / "n2" / "rep1"
    write_json(trial / "verdict.json", verdict)
    packed = packing.pack(tmp_path)
    (tmp_path / packed.name).write_bytes(packed.content)
    assert checking.check(tmp_path / packed.name).breaches == [("fsdp", "it is unequal: a loss differs")]
    write_json(trial / "verdict.json", wrong)
    packed = packing.pack(tmp_path)
    (tmp_path / packed.name).write_bytes(packed.content)
    assert ("ddp", "accept.json says equal, but its trial unequal") in checking.check(tmp_path / packed.name).breaches


def made(
    name: str, seconds: dict[str, list[float]], torch: str = "2.13.0", session: str = "", **row
) -> checking.Checked:
    """A record of rows with these training seconds."""
    environment = {"cpu": "X", "cores": 2, "gpus": [], "packages": {"torch": torch}}
    quiet = {"status": "ok", "precision": "fp32", "hashes": {"plan": "p"}, "session": session or name}
    quiet |= {"watch": {"disturbed": []}}
    runs = {one: [quiet | {"clock": {"train_seconds": each}} for each in several] for one, several in seconds.items()}
    of_row = {"division": "closed", "proof": "equal", "train_seconds": 1.0, "speedup": None, "steps": 9}
    rows = [{"row": one, "global_batch": 32} | of_row | row for one in seconds]
    data = {"unit": "texts", "parameters": 5, "splits": {"train": {"texts": 100}}}
    whole = {"rows": rows, "runs": runs, "environment": environment, "data": data, "headline": []}
    manifest = {"made": f"2026-01-0{name}", "commit": None, "command": "make bench", "files": {}, "left_out": {}}
    return checking.Checked(Path(f"{name}.record"), name, manifest, whole)


FAST, SLOW = [1.00, 1.01, 0.99], [1.30, 1.31, 1.29]


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ([SLOW, FAST], ["1", "2"]),
        ([FAST, SLOW], ["1"]),
        ([FAST, [0.998, 1.0, 1.002]], ["1"]),  # no faster than by chance
        ([SLOW, [1.0]], ["1"]),  # one run shows nothing
        ([[2.0, 2.1, 2.05], SLOW, [1.29, 1.31, 1.28], FAST], ["1", "2", "4"]),
    ],
)
def test_a_new_best_must_be_shown_to_be_faster(times, best):
    records = [made(str(number), {"ddp": seconds}) for number, seconds in enumerate(times, 1)]
    assert [record.identity for record in board.bests(records)] == best


@pytest.mark.parametrize("row", [{"division": "open"}, {"proof": "unequal"}, {"proof": "not-run"}])
def test_rows_that_are_open_or_not_proven_are_no_best(row):
    assert board.bests([made("1", {"ddp": FAST}, **row)]) == []


def test_a_record_is_verified_by_another_session_and_stale_after_a_new_pytorch():
    first = made("1", {"single": SLOW, "ddp": FAST})
    same, other = made("2", {"single": SLOW, "ddp": FAST}), made("3", {"single": SLOW, "ddp": SLOW})
    copied = made("4", {"single": SLOW, "ddp": FAST}, session="1")
    assert board.state(first, [], "2.13.0") == "reported"
    assert board.state(first, [other], "2.13.0") == "reported"
    assert board.state(first, [copied], "2.13.0") == "reported"
    assert board.state(first, [other, same], "2.13.1") == "verified"
    assert board.state(first, [same], "2.14.0") == "stale"
    assert board.state(first, [same], "2.9.0") == "verified"


def test_the_page_has_every_record_under_its_hardware():
    text = board.markdown([made("1", {"ddp": SLOW}), made("2", {"ddp": FAST}), made("3", {"ddp": FAST})], "2.13.0")
    assert text.count("### 2 cores of X") == 1
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in lines] == ["3", "2", "1"]
    assert [line.split(" | ")[5:7] for line in lines] == [["verified", ""], ["verified", "yes"], ["reported", "once"]]
    assert board.markdown([], "2.13.0") == "There is none yet.\n"


def test_this_projects_page_has_its_records():
    """Else: make docs"""
    program = runpy.run_path(str(paths.PROJECT / "docs" / "records.py"))
    assert program["written"]() == program["PAGE"].read_text(encoding="utf-8")


@pytest.mark.parametrize("file", sorted((paths.PROJECT / "records").glob("*.record")), ids=lambda file: file.stem)
def test_the_records_of_this_project_hold(file):
    assert checking.check(file).breaches == []
