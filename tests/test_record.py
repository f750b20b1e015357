"""`lockstep record`: results in one file that others can check, and the page of such files."""

import csv
import io
import json
import lzma
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from lockstep import paths
from lockstep.config import reading
from lockstep.errors import BadInput
from lockstep.files import hash_bytes, read_json, write_json
from lockstep.paths import SCRIPTS
from lockstep.proof import fairness
from lockstep.records import board, checking, packing, privacy
from lockstep.report import summary
from lockstep.run import journal
from tests.made import run as one_run
from tests.proof.test_fairness import ROWS, results, run  # noqa: F401 - a fixture


@pytest.fixture
def folder(benchmark, results):  # noqa: F811
    """A fair results folder with its report, made on a machine whose names nobody else shall read."""
    asked = yaml.safe_load(benchmark.path("results/config.yaml").read_text(encoding="utf-8"))
    asked["rows"] = {name: row if name in ROWS else None for name, row in asked["rows"].items()}
    asked |= {"repeats": 3, "predict": asked["predict"] | {"texts": ["我的病历"]}}
    (results / "config.yaml").write_text(yaml.safe_dump(asked, allow_unicode=True), encoding="utf-8")
    command = "snakemake --cores all --configfile '/srv/客户 data/mine.yaml' --directory /home/zhangwei/work"
    made = {"time": "2026-11-28T10:00:00+00:00", "host": "secret-host", "commit": "0123abcd", "changed": False}
    write_json(paths.manifest_file(results), made | {"command": "snakemake ddp"})
    written = paths.journal_file(results).read_text(encoding="utf-8").splitlines(keepends=True)[1:]
    paths.journal_file(results).unlink()
    journal.note(results, "request", results, ("config.yaml",), rows=list(ROWS), command=command)
    with paths.journal_file(results).open("a", encoding="utf-8") as stream:
        stream.writelines(written)
    journal.note(results, "request", rows=["ddp"], command="snakemake ddp")
    told = summary.gather(reading.read([results / "config.yaml"]), results)  # without its page, which takes longest
    write_json(paths.report_folder(results) / paths.SUMMARY, {"headline": []} | told.as_json())
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
    manifest = json.loads(contents.pop(packing.MANIFEST))
    if packing.MANIFEST not in changed:
        for name, content in changed.items():
            if content is None:
                del manifest["files"][name]
            else:
                manifest["files"][name] |= {"sha256": hash_bytes(content)}
    return archive(file.with_name("changed.record"), {packing.MANIFEST: json.dumps(manifest).encode()} | contents)


def archive(file: Path, contents: dict[str, bytes], kind: bytes = tarfile.REGTYPE) -> Path:
    with tarfile.open(file, mode="w:xz", format=tarfile.PAX_FORMAT) as made:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size, member.type = len(content), kind
            member.linkname = "" if kind == tarfile.REGTYPE else "/etc/passwd"
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


def test_no_name_of_machine_user_or_folder_and_no_text_is_in_it(benchmark, folder, record):
    words = b"".join(
        content for name, content in members(record).items() if not name.endswith(packing.NUMBERS)
    ).decode()
    private = ("secret-host", "zhangwei", "客户", "/srv", "/home", "病历", str(folder.parent), str(benchmark.folder))
    assert [name for name in private if name in words] == []
    made_by = json.loads(members(record)[packing.MANIFEST])["command"]
    assert made_by == "snakemake --cores all --configfile '<path>/mine.yaml' --directory <path>", "not the last request"
    with (run(folder) / paths.TEST_PREDICTIONS).open(encoding="utf-8-sig", newline="") as stream:
        texts = [line["text"] for line in csv.DictReader(stream)]
    assert len(texts) > 50
    assert not [text for text in texts if text in words]
    assert not [name for name in members(record) if name.endswith((".safetensors", ".pt", ".arrow", ".log", ".html"))]
    with_host = folder.parent / "with_host.record"
    with_host.write_bytes(packing.pack(folder, with_host=True).content)
    assert "secret-host" in members(with_host)["manifest.json"].decode()


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
    told = command("check", "other.record", record.name, cwd=tmp_path)
    assert told.returncode == 2
    assert "Traceback" not in told.stderr
    assert "no breach" in told.stdout, "the other one is checked all the same"


def test_a_file_that_was_changed_with_its_hash_breaks_a_rule(record):
    """Negative control: the manifest alone would let anybody be faster."""
    (name,) = (name for name in members(record) if name.startswith("runs/ddp/") and name.endswith("rep2/record.json"))
    content = json.loads(members(record)[name])
    content["clock"]["train_seconds"] /= 2
    breaches = checking.check(repacked(record, **{name: json.dumps(content).encode()})).breaches
    assert any("record.json was changed after the run" in what for _, what in breaches), breaches
    assert any("training time is not that of its slowest rank" in what for _, what in breaches)


def _row(told: dict) -> dict:
    return next(row for row in told["rows"] if row["row"] == "ddp")


def faster(told: dict) -> None:
    _row(told)["train_seconds"] /= 2


def other_clocks(told: dict) -> None:
    for made in told["runs"]["ddp"]:
        made["clock"]["train_seconds"] /= 10


def invented(told: dict) -> None:
    told["rows"].append(_row(told) | {"row": "magic", "train_seconds": 0.001})
    told["runs"]["magic"] = told["runs"]["single"]


def otherwise_proven(told: dict) -> None:
    _row(told)["proof"] = "within-tolerance"


def otherwise_divided(told: dict) -> None:
    _row(told)["division"] = "open"


@pytest.mark.parametrize("forge", [faster, other_clocks, invented, otherwise_proven, otherwise_divided])
def test_a_report_that_says_otherwise_breaks_a_rule_and_is_not_believed(record, forge):
    content = json.loads(members(record)["report/summary.json"])
    forge(content)
    checked = checking.check(repacked(record, **{"report/summary.json": json.dumps(content).encode()}))
    assert any("the report has" in what for _, what in checked.breaches)
    assert checked.seconds == checking.check(record).seconds


def test_a_file_that_is_left_out_is_missed(record):
    name = next(name for name in members(record) if name.endswith("rep3/ledger.npz"))
    breaches = checking.check(repacked(record, **{name: None})).breaches
    assert any("ledger" in what for _, what in breaches)


def test_the_manifest_can_vouch_for_no_file_that_a_record_has(record):
    """Negative controls: what would otherwise switch the journal off."""
    about = members(record)[packing.MANIFEST]
    name = next(name for name in members(record) if name.endswith("rep3/steps.npy"))
    manifest = json.loads(about)
    manifest["files"][name]["before"] = manifest["files"][name]["sha256"]
    with pytest.raises(BadInput, match="which has none to remove"):
        checking.check(repacked(record, **{packing.MANIFEST: json.dumps(manifest).encode()}))
    manifest = json.loads(about)
    manifest["left_out"][name] = manifest["files"].pop(name)["sha256"]
    with pytest.raises(BadInput, match="leaves out"):
        checking.check(repacked(record, **{name: None, packing.MANIFEST: json.dumps(manifest).encode()}))
    for needed in ("config.yaml", "journal.jsonl", "report/summary.json"):
        with pytest.raises(BadInput, match="has no"):
            checking.check(repacked(record, **{needed: None}))


def vouched(file: Path, **changed: bytes) -> Path:
    """The record with other files whose names are said to have been removed, so that the journal vouches for them."""
    manifest = json.loads(members(file)[packing.MANIFEST])
    for name, content in changed.items():
        before = manifest["files"][name].get("before", manifest["files"][name]["sha256"])
        manifest["files"][name] = {"sha256": hash_bytes(content), "before": before}
    return repacked(file, **changed, **{packing.MANIFEST: json.dumps(manifest).encode()})


def test_times_follow_from_the_steps_whatever_the_manifest_vouches_for(record):
    changed = {}
    for name, content in members(record).items():
        if name.startswith("runs/ddp/") and name.endswith((paths.RECORD, "ranks/0.json", "ranks/1.json")):
            told = json.loads(content)
            told["clock"]["train_seconds"] /= 4
            changed[name] = json.dumps(told | {"note": "<path>"}).encode()
    breaches = checking.check(vouched(record, **changed)).breaches
    assert any(re.search(r"its steps took .* s, and its training", what) for _, what in breaches)


@pytest.mark.parametrize(
    ("name", "value"), [("made", "2031-01-01T00:00:00+00:00"), ("commit", "dead"), ("command", "x")]
)
def test_what_the_manifest_tells_is_held_against_the_files(record, name, value):
    manifest = json.loads(members(record)[packing.MANIFEST]) | {name: value}
    breaches = checking.check(repacked(record, **{packing.MANIFEST: json.dumps(manifest).encode()})).breaches
    assert [where for where, _ in breaches] == [packing.MANIFEST]


def test_a_journal_without_hashes_vouches_for_nothing(record):
    lines = [json.loads(line) for line in members(record)["journal.jsonl"].splitlines()]
    hollow = [line | ({"files": {}} if line["what"] == "run" else {}) for line in lines if line["what"] != "proof"]
    content = "".join(json.dumps(line) + "\n" for line in hollow).encode()
    breaches = [what for _, what in checking.check(repacked(record, **{"journal.jsonl": content})).breaches]
    assert any("the journal has no hash of its record.json" in what for what in breaches)
    assert any("no line of the journal is about this proof" in what for what in breaches)


def test_only_rows_with_runs_are_counted_as_proven(record):
    checked = checking.check(record)
    assert set(checked.proofs) == set(ROWS), "not the references, nor rows that were proven only"


def test_an_unpacked_record_that_holds_what_was_left_out_breaks_a_rule(record, tmp_path):
    checking.check(record, tmp_path / "theirs")
    left = next(iter(json.loads((tmp_path / "theirs" / packing.MANIFEST).read_text())["left_out"]))
    (tmp_path / "theirs" / left).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "theirs" / left).write_text("")
    assert any("though the record left it out" in what for _, what in fairness.check(tmp_path / "theirs").breaches)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["../evil.json"], "which no record has"),
        (["/tmp/evil.json"], "which no record has"),
        (["."], "which no record has"),
        (["runs/ddp/n2/rep1/run.log"], "which no record has"),
        (["runs/ddp/n2/rep1/ranks/0.error.json"], "which no record has"),
        (["runs/../../evil/n2/rep1/record.json"], "which no record has"),
        (["proofs/accept.json"], "which no record has"),
        ([], "has no lockstep-record.json"),
    ],
)
def test_an_archive_with_other_files_is_refused_and_writes_nothing(tmp_path, names, said):
    about = {
        "format": 1,
        "kind": "benchmark",
        "made": "2026-11-28T10:00:00+00:00",
        "command": "make bench",
        "commit": None,
    }
    about |= {"files": {name: {"sha256": hash_bytes(b"{}")} for name in names}, "left_out": {}}
    contents = {packing.MANIFEST: json.dumps(about).encode()} | dict.fromkeys(names, b"{}") if names else {"x": b""}
    file, inside = archive(tmp_path / "evil.record", contents), tmp_path / "inside"
    inside.mkdir()
    with pytest.raises(BadInput, match=said):
        packing.unpack(file, inside)
    assert not list(inside.iterdir())
    assert sorted(tmp_path.iterdir()) == [file, inside]


def test_links_bombs_and_bytes_after_the_end_are_refused(tmp_path, monkeypatch):
    with pytest.raises(BadInput, match="is not a plain file"):
        checking.check(archive(tmp_path / "link.record", {"config.yaml": b""}, tarfile.SYMTYPE))
    file = archive(tmp_path / "more.record", {"config.yaml": b""})
    file.write_bytes(lzma.compress(lzma.decompress(file.read_bytes()) + bytes(5000)))
    with pytest.raises(BadInput, match="is no archive as"):
        checking.check(file)
    (tmp_path / "bomb.record").write_bytes(lzma.compress(bytes(3_000_000)))
    monkeypatch.setattr(packing, "MOST_UNPACKED", 1_000_000)
    with pytest.raises(BadInput, match="unpacks to more than 1 MB"):
        checking.check(tmp_path / "bomb.record")


def test_arrays_and_a_configuration_that_take_a_machine_s_memory_or_hours_are_refused(record, monkeypatch):
    """Arrays are compressed within the archive, too: a file of 3 MB can hold 3 GB."""
    packed = io.BytesIO()
    np.savez_compressed(packed, rank=np.zeros(1_000_000), step=np.zeros(1_000_000))
    assert len(packed.getvalue()) < 100_000
    monkeypatch.setattr(packing, "MOST_UNPACKED", 12_000_000)
    name = next(name for name in members(record) if name.endswith("rep3/ledger.npz"))
    with pytest.raises(BadInput, match="its arrays unpack to more than 12 MB"):
        checking.check(repacked(record, **{name: packed.getvalue()}))
    long = members(record)["config.yaml"] + 200_000 * b"# none\n"
    with pytest.raises(BadInput, match="its configuration is longer"):
        checking.check(repacked(record, **{"config.yaml": long}))
    assert any("ledger" in what for _, what in checking.check(repacked(record, **{name: b"PK\3\4"})).breaches)


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
    assert "of those that are proven" in told.stdout
    assert fairness.check(tmp_path / "theirs").breaches == []
    unpacked = command("submit", "theirs", cwd=tmp_path)
    assert "is a record that was unpacked" in unpacked.stderr
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


@pytest.fixture
def accepted(tmp_path) -> Path:
    """A folder of `lockstep accept`, of two rows."""
    folder = tmp_path / "accept"
    for row, proof, nature in (("ddp", "equal", ""), ("local_sgd", "unequal", "ranks average now and then")):
        kinds = ("losses", "norm", "update")
        verdict = {"proof": proof, "distances": dict.fromkeys(kinds, 1e-7), "tolerance": dict.fromkeys(kinds, 1e-6)}
        verdict |= {"fp64": {"losses": 1e-15}, "reason": nature, "by_nature": nature}
        write_json(folder / "proofs" / "parity" / row / "n2" / "rep1" / "verdict.json", verdict)
    machine = {
        "cpu": "X",
        "cores": 2,
        "gpus": ["GPU"],
        "packages": {"torch": "2.13.0"},
        "commit": "01",
        "changed": False,
    }
    proofs = {"ddp": {"proof": "equal"}, "local_sgd": {"proof": "unequal"}}
    whole = {"time": "2026-11-28T10:00:00+00:00", "command": "lockstep accept", "machine": machine, "proofs": proofs}
    write_json(folder / "accept.json", whole | {"times": [], "cannot": {}, "finished": True, "not_reached": []})
    return folder


def breaches_of_acceptance(folder: Path, **changed) -> list[tuple[str, str]]:
    """The breaches of the record of a folder whose accept.json has other values."""
    write_json(folder / "accept.json", read_json(folder / "accept.json") | changed)
    (folder / "x.record").write_bytes(packing.pack(folder).content)
    return checking.check(folder / "x.record").breaches


def test_acceptance_becomes_a_record(accepted):
    assert breaches_of_acceptance(accepted) == []
    made = command("submit", ".", cwd=accepted)
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("2026-11-28-")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"proofs": {"ddp": {"proof": "banana"}}}, "says banana, but its trial equal"),
        ({"proofs": {"local_sgd": {"proof": "equal"}}}, "says equal, but its trial unequal"),
        ({"proofs": {"fsdp": {"proof": "equal"}}}, "no verdict of its trial"),
        ({"proofs": {}}, "nothing was proven"),
        ({"finished": False}, "it was interrupted"),
        ({"times": [{"name": "ddp", "failed": "no memory"}]}, "it failed: no memory"),
    ],
)
def test_acceptance_that_its_trials_do_not_bear_out_breaks_a_rule(accepted, changed, said):
    assert any(said in what for _, what in breaches_of_acceptance(accepted, **changed))


def test_a_verdict_that_its_distances_belie_breaks_a_rule(accepted):
    file = accepted / "proofs" / "parity" / "ddp" / "n2" / "rep1" / "verdict.json"
    write_json(file, read_json(file) | {"distances": {"losses": 9.0, "norm": 0.0, "update": 0.0}})
    assert breaches_of_acceptance(accepted) == [("ddp", "its verdict is equal, but its losses say otherwise")]


def test_acceptance_that_proved_nothing_is_refused(accepted):
    with pytest.raises(BadInput, match="had proven nothing"):
        breaches_of_acceptance(accepted, machine=None)


def test_acceptance_can_not_pass_for_a_benchmark(accepted):
    breaches_of_acceptance(accepted)
    manifest = json.loads(members(accepted / "x.record")[packing.MANIFEST]) | {"kind": "benchmark"}
    forged = repacked(accepted / "x.record", **{packing.MANIFEST: json.dumps(manifest).encode()})
    with pytest.raises(BadInput, match=r"has no config\.yaml"):
        checking.check(forged)


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("/home/li/data/x.csv", "<path>/x.csv"),
        ("/home/Zhang Wei/my data/x.csv", "<path>/x.csv"),
        ("~/work", "<path>"),
        (r"C:\Users\li\x.csv", "<path>/x.csv"),
        (r"\\server\share\x.csv", "<path>/x.csv"),
        ("LD_PRELOAD=/home/li/lib.so:/export/b/c.so", "LD_PRELOAD=<path>/lib.so:<path>/c.so"),
        ("loaded /home/li/x.csv and 'sub/y.csv'", "loaded <path>/x.csv and 'sub/y.csv'"),
        ("-I/home/li/include", "-I<path>"),
        ("中文/home/li/x.py", "中文<path>/x.py"),
        ("../../Acme/x.csv", "<path>/x.csv"),
        ("/usr/lib/x86_64/libc.so", "/usr/lib/x86_64/libc.so"),
        ("/dev/shm/li/x", "<path>"),
        ("runs/ddp/n2, samples/s, 1/2, a / b", "runs/ddp/n2, samples/s, 1/2, a / b"),
        ("https://bob:pw@host.org/x?sig=1", "https://host.org/x<secret>"),
        ("https://pytorch.org/docs", "https://pytorch.org/docs"),
        ("tcp://127.0.0.1:29500", "tcp://127.0.0.1:29500"),
        ("tcp://10.0.0.7:29500 s3://bucket/x", "<url> <url>"),
        ("file:///srv/x/rendezvous", "<path>"),
        ("key hf_abcdefghijk, mail li.wei@acme.org", "key <secret>, mail <address>"),
        ("WANDB_API_KEY=abc user@node7 192.168.3.17", "WANDB_API_KEY=<secret> <address> <host>"),
        ("/home/li.wei", "<path>"),
        ("~li/data", "<path>"),
        ("in '/home/Zhang Wei/Acme Project/run'", "in '<path>'"),
        ('predict={"texts": ["我的"]} hosts=[a,b]', 'predict={"texts": <text>} hosts=<host>'),
        ("ssh alice@10.0.0.3", "ssh <address>"),
        ("data={path: /home/alice/my data/secret project.csv}", "data={path: <path>/secret project.csv}"),
        ("--config 'data={path: /srv/my data/a.csv, limit: 3}'", "--config 'data={path: <path>/a.csv, limit: 3}'"),
        ("fe80::1 and 2001:db8::8a2e:370:7334 at 12:30:45", "<host> and <host> at 12:30:45"),
        (
            "std::vector, c10::Error, a::b, 2026-11-29T15:38:20+00:00",
            "std::vector, c10::Error, a::b, 2026-11-29T15:38:20+00:00",
        ),
        (
            "USER=alice {'hostname': 'n7'} {'password': 'abc d'}",
            "USER=<address> {'hostname': <host>} {'password': <secret>}",
        ),
        ("Authorization: Bearer abcdef123456, 550 tokens: 12", "Authorization: Bearer <secret>, 550 tokens: 12"),
        ("torch 2.13.0, 0.1.2.3.4, batch=64", "torch 2.13.0, 0.1.2.3.4, batch=64"),
    ],
)
def test_what_tells_whose_machine_it_was_is_removed(text, cleaned):
    names = privacy.Names(with_host=False)
    assert names.text(text) == cleaned
    assert json.loads(names.clean("x.json", json.dumps([text]).encode())) == [cleaned]


def test_hosts_of_all_nodes_are_removed_wherever_they_stand():
    names = privacy.Names(with_host=False)
    made = {"nodes": [{"host": "node7.acme.org", "address": "10.0.0.7"}], "note": "lost node7 at 10.0.0.7", "loss": 1.5}
    content = json.dumps(made).encode()
    names.learn("record.json", content)
    cleaned = json.loads(names.clean("record.json", content))
    assert cleaned == {"nodes": [{"host": "<host>", "address": "<host>"}], "note": "lost <host> at <host>", "loss": 1.5}
    kept = privacy.Names(with_host=True)
    kept.learn("record.json", content)
    assert json.loads(kept.clean("record.json", content)) == made


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", b'{"a":   1}'),
        ("a.jsonl", b'{"a":   1}\n{"b": 2}\n'),
        ("a.yaml", b"a:    1 # one\n"),
        ("a.md", b"a\n"),
    ],
)
def test_a_file_with_nothing_to_remove_keeps_its_bytes(name, content):
    assert privacy.Names(with_host=False).clean(name, content) == content


def test_a_file_that_is_no_text_is_named():
    with pytest.raises(BadInput, match=r"a\.md: is damaged, as it is not UTF-8"):
        privacy.Names(with_host=False).clean("a.md", b"\xff")


FAST, SLOW = [1.00, 1.01, 0.99], [1.30, 1.31, 1.29]


def made(name: str, seconds: dict[str, list[float]], torch="2.13.0", session="", **changed) -> checking.Checked:
    """A record of rows with these training seconds."""
    machine = {"cpu": "X", "cores": 2, "gpus": [], "packages": {"torch": torch}}
    whole = {
        "session": session or name,
        "steps": 9,
        "global_batch": 32,
        "asked": {"hardware": {"threads": 1}},
    } | changed
    runs = [
        one_run(
            **whole | {"row": row, "strategy": "single" if row == "single" else "ddp"},
            repeat=number,
            clock={"train_seconds": each},
        )
        for row, several in seconds.items()
        for number, each in enumerate(several, 1)
    ]
    data = {"unit": "texts", "parameters": 5, "splits": {"train": {"texts": 100}}}
    manifest = {"kind": "benchmark", "made": f"2026-01-0{name}", "commit": None, "command": "make bench", "files": {}}
    proofs = dict.fromkeys(seconds, "equal")
    return checking.Checked(Path(f"{name}.record"), name, manifest, machine, runs, proofs, data)


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
    assert [each.identity for each in board.bests(records)] == best


def test_rows_that_are_open_disturbed_not_proven_or_of_other_work_are_no_best():
    for changed in ({"division": "open"}, {"watch": {"disturbed": ["others"]}}, {"departed": ["other samples"]}):
        assert board.bests([made("1", {"ddp": FAST}, **changed)]) == []
    mixed = made("1", {"single": SLOW, "ddp": FAST, "amp": [0.5, 0.51, 0.49], "wrong": [0.1, 0.11, 0.1]})
    mixed.proofs["wrong"] = "unequal"
    mixed = replace(mixed, runs=[replace(run, precision="bf16") if run.row == "amp" else run for run in mixed.runs])
    assert mixed.fastest == "ddp"
    assert mixed.speedup.value == pytest.approx(1.3, rel=0.01)
    assert mixed.speedup.distinct
    assert made("2", {"single": SLOW, "ddp": FAST}).question == mixed.question, "another row asks no other question"


def test_the_speed_up_is_over_one_process_with_one_thread():
    several = made("1", {"all_threads": [1.1, 1.11, 1.09], "single": SLOW, "ddp": FAST})
    by_two = {"strategy": "single", "asked": {"hardware": {"threads": 2}}}
    runs = [replace(run, **by_two) if run.row == "all_threads" else run for run in several.runs]
    several = replace(several, runs=runs)
    assert several.baseline == "single"
    assert several.speedup.value == pytest.approx(1.3, rel=0.01)


def test_this_projects_records_say_what_their_reports_say(tmp_path):
    for file in (paths.PROJECT / "records").glob("*.record"):
        checked = checking.check(file, keep=tmp_path / file.stem)
        report = read_json(tmp_path / file.stem / "report/summary.json")
        (row,) = [row for row in report["rows"] if row["row"] == checked.fastest]
        ratio = checked.speedup
        told = [row[key] for key in ("train_seconds", "speedup", "speedup_low", "speedup_high")]
        assert [np.median(checked.seconds[checked.fastest]), ratio.value, ratio.low, ratio.high] == pytest.approx(told)


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
    records = [made("1", {"ddp": SLOW}), made("2", {"ddp": FAST}), made("3", {"ddp": FAST, "single": SLOW})]
    records.append(made("4", {"ddp": FAST}, hashes={"plan": "another"}))
    text = board.markdown(records, "2.13.0")
    assert text.count("### 2 cores of X") == 1
    assert text.count("| record |") == 2, "one table for each question"
    lines = {line.split("`")[1]: line.split(" | ") for line in text.splitlines() if line.startswith("| `")}
    states = [["verified", ""], ["verified", "yes"], ["reported", "once"], ["reported", "yes"]]
    assert [lines[name][5:7] for name in "3214"] == states
    assert lines["3"][3].startswith("1.30 (1.2")
    assert board.markdown([], "2.13.0") == "There is none yet.\n"


def test_words_of_others_are_no_markup_on_the_page():
    theirs = made("1", {"ddp": FAST})
    theirs.machine["cpu"] = "X <script>alert(1)</script> | `y`\n### more"
    theirs.manifest["command"] = "make `x` | <b>"
    text = board.markdown([theirs], "2.13.0")
    assert r"\<script\>" in text
    assert "\n### " not in text
    assert "`make  x  / <b>`" in text


def test_a_folder_with_a_broken_record_makes_no_page(record, tmp_path):
    (tmp_path / "records").mkdir()
    repacked(record, **{"data/data.json": b"{}"}).rename(tmp_path / "records" / "x.record")
    with pytest.raises(BadInput, match=r"x\.record: "):
        board.read(tmp_path / "records")


def test_this_projects_page_has_its_records():
    """Else: make docs"""
    program = runpy.run_path(str(paths.PROJECT / "docs" / "records.py"))
    assert program["written"]() == program["PAGE"].read_text(encoding="utf-8")
