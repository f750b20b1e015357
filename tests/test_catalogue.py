"""The catalogue of proofs: its lines come from `lockstep accept`, and its page shows the newest of each."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from catalogue import __main__ as program
from catalogue import meshes, proving, table, zero_muon
from lockstep.config import reading, registry
from lockstep.errors import BadInput, RunFailed
from lockstep.files import read_json, write_json
from lockstep.proof.verdicts import WRONG as WRONG_VERDICTS

PACKAGES = {"torch": "2.13.0+cpu", "deepspeed": "0.19.8", "transformers": "5.23.0"}


def accepted(folder, torch="2.13.0+cpu", day="2026-11-28", task="text-classification", gpus=(), **proofs):
    """accept.json of a machine with these verdicts."""
    machine = {
        "packages": PACKAGES | {"torch": torch},
        "gpus": list(gpus),
        "cores": 2,
        "cpu": "X",
        "commit": "0123456789abcdef",
    }
    whole = {"reason": "", "nature": "", "above_floor": 0.21, "precision": "fp32", "world_size": 2}
    found = {name: whole | verdict for name, verdict in proofs.items()}
    about = {"time": f"{day}T10:00:00+00:00", "task": task, "machine": machine, "finished": True, "not_reached": []}
    write_json(folder / "accept.json", about | {"proofs": found, "cannot": {"horovod": "not installed"}})
    return folder / "accept.json"


EQUAL, WRONG = {"proof": "equal"}, {"proof": "unequal", "reason": "a loss | differs"}
LOCAL = {"proof": "unequal", "nature": "ranks average now and then"}


def test_a_verdict_names_its_options_and_the_version_that_decides(tmp_path):
    zero, trainer, horovod = table.lines_of(accepted(tmp_path, zero2=EQUAL, trainer=EQUAL))
    assert zero["options"] == "deepspeed, launcher: torchrun, stage: 2, accumulation: 2"
    assert [zero[name] for name in ("framework", "version", "torch")] == ["deepspeed", "0.19.8", "2.13.0"]
    assert [zero[name] for name in ("verdict", "ranks", "precision", "floors")] == ["equal", "2", "fp32", "0.2"]
    assert trainer["framework"] == "transformers"
    assert [horovod[name] for name in ("verdict", "why")] == ["not possible", "not installed"]


def test_a_newer_verdict_takes_the_place_of_one_of_the_same_versions_only(tmp_path):
    first = table.lines_of(accepted(tmp_path, ddp=WRONG))
    again = table.lines_of(accepted(tmp_path, ddp=EQUAL))
    other = table.lines_of(accepted(tmp_path, torch="2.11.0", ddp=EQUAL))
    llama = table.lines_of(accepted(tmp_path, task="language-modelling", ddp=EQUAL))
    older = table.lines_of(accepted(tmp_path, day="2025-01-01", ddp=WRONG))
    kept = [line for line in table.merged(table.merged(first, again), other + llama + older) if line["row"] == "ddp"]
    assert [(line["model"], line["torch"], line["verdict"]) for line in kept] == [
        ("bert", "2.11.0", "equal"),
        ("bert", "2.13.0", "equal"),
        ("llama", "2.13.0", "equal"),
    ]


def test_what_is_wrong_is_told_from_what_is_meant(tmp_path):
    lines = table.lines_of(accepted(tmp_path, ddp=WRONG, local_sgd=LOCAL))
    text = table.markdown(table.merged([], lines))
    assert '<a id="ddp"></a>`ddp`' in text
    assert "unequal: a loss \\| differs" in text
    assert "another model, by design (2 ranks, fp32)" in text
    assert "not tried" in text, "the other models"


def test_a_cpu_says_nothing_of_a_gpu(tmp_path):
    lines = table.lines_of(accepted(tmp_path, gpus=["H100"], ddp=WRONG))
    lines += table.lines_of(accepted(tmp_path, day="2026-11-29", ddp=EQUAL))
    assert "cuda: unequal: a loss \\| differs; cpu: equal (2 ranks, fp32)" in table.markdown(table.merged([], lines))


def test_batch_normalisation_is_over_all_ranks_where_a_row_can(tmp_path):
    rows = read_json(program.over_all_ranks(tmp_path / "rows.yaml"))["rows"]
    assert rows["zero2"] == {
        "strategy": "deepspeed", "launcher": "torchrun", "stage": 2, "accumulation": 2, "sync_batchnorm": True,
    }  # fmt: skip
    assert {"ddp", "fsdp_policy", "trainer_two"} <= set(rows)
    assert not {"single", "dataparallel", "all_threads"} & set(rows)


def test_wrong_verdicts_that_are_not_known_end_with_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(program, "DATABASE", tmp_path / "catalogue.csv")
    monkeypatch.setattr(program, "PAGE", tmp_path / "catalogue.md")
    (tmp_path / "catalogue.md").write_text("\n".join(program.MARKS), encoding="utf-8")
    for verdict, code in ((EQUAL, 0), (LOCAL, 0), (WRONG, 1)):
        monkeypatch.setattr("sys.argv", ["catalogue", "--add", str(accepted(tmp_path, ddp=verdict))])
        assert program.main() == code
    assert "1 of them wrong, 0 of these as is known" in capsys.readouterr().out
    for write, torch, code in ((["--write"], "2.13.0", 1), ([], "2.13.0", 0), ([], "2.14.0", 1)):
        file = accepted(tmp_path, torch=torch, ddp=WRONG)
        monkeypatch.setattr("sys.argv", ["catalogue", *write, "--add", str(file)])
        assert program.main() == code, "known is what is kept, of the same versions"
    monkeypatch.setattr("sys.argv", ["catalogue", "resnext"])
    with pytest.raises(SystemExit):
        program.main()
    assert "no such model: resnext" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["catalogue", "bert", "--add", "x.json"])
    with pytest.raises(SystemExit):
        program.main()
    assert "leave out the models" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"finished": False}, "lockstep accept broke off, so it is not complete"),
        ({"proofs": {}, "machine": None}, "nothing was proven"),
    ],
)
def test_what_broke_off_or_proved_nothing_is_no_success(tmp_path, monkeypatch, changes, said):
    file = accepted(tmp_path, ddp=EQUAL)
    write_json(file, read_json(file) | changes)
    monkeypatch.setattr("sys.argv", ["catalogue", "--add", str(file)])
    with pytest.raises(BadInput, match=said):
        program.main()


def test_proofs_that_there_was_no_time_for_are_named_and_end_with_1(tmp_path, monkeypatch, capsys):
    file = accepted(tmp_path, ddp=EQUAL)
    monkeypatch.setattr("sys.argv", ["catalogue", "--add", str(file)])
    write_json(file, read_json(file) | {"not_reached": ["time of ddp"]})
    assert program.main() == 0
    write_json(file, read_json(file) | {"not_reached": ["proof of fsdp", "time of ddp"]})
    assert program.main() == 1
    assert capsys.readouterr().out.endswith("accept.json: proof of fsdp\n")


def test_an_accept_json_of_an_earlier_time_is_not_taken_for_this_one_s(tmp_path, monkeypatch):
    """Where accept breaks off at once, with an error of Python's."""
    file = accepted(tmp_path, ddp=EQUAL)

    def accept(writes: bool) -> Path:
        def run(*_, **__):
            if writes:
                os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
            return subprocess.CompletedProcess([], 1)

        monkeypatch.setattr(subprocess, "run", run)
        return proving.prove(tmp_path, "bert", 1, [])

    assert accept(writes=True) == file
    with pytest.raises(RunFailed, match="bert: lockstep accept broke off"):
        accept(writes=False)


def test_the_page_shows_what_is_kept_and_says_why_anything_in_it_is_wrong():
    """Else: python -m catalogue --write"""
    lines = program.read()
    shown = program.PAGE.read_text(encoding="utf-8")
    assert f"{program.MARKS[0]}\n{table.markdown(lines)}\n{program.MARKS[1]}" in shown
    explained = shown.partition("## What is wrong, and why")[2].partition("\n## ")[0]
    assert not [line for line in lines if line["verdict"] in WRONG_VERDICTS and f"`{line['row']}`" not in explained]
    assert set(re.findall(r'<a id="(\w+)">', shown)) == {line["row"] for line in lines} != set()


NO_MUON = dict.fromkeys(("pp", "deepspeed"), "optimizer: muon")


def test_each_strategy_has_a_row_to_accept_a_machine_or_is_named_as_one_without():
    text = table.ROWS.read_text(encoding="utf-8")
    strategies = {row["strategy"] for row in yaml.safe_load(text)["rows"].values() if row}
    without = set(registry.ours()) - strategies
    assert without == {"tp", "pp", "cp", "script"}
    _, _, about = text.partition("Four strategies have no row")
    assert without <= set(re.findall(r"\w+", about.partition("\ndata:")[0]))


@pytest.mark.parametrize("kind", meshes.KINDS)
def test_rows_that_share_out_a_model_are_proven_with_all_their_processes(kind):
    """Each trial has as many as its row. A classifier has no tokens to divide; pipelines and ZeRO have no Muon."""
    refused = {"bert": {"cp": "it divides the tokens of a sequence"}, "llama": {}, "llama_muon": NO_MUON}[kind]
    config = reading.parse(meshes.asked(kind))
    sizes = set()
    for name, row in config.rows.items():
        trial = config.trial(row)
        if row.strategy in refused:
            with pytest.raises(BadInput, match=refused[row.strategy]):
                trial.refuse()
            continue
        for each in (row, trial):  # `lockstep accept` refuses a row, too, whose trial could be
            each.refuse()
        sizes.add(trial.hardware.processes)
        assert name.endswith(f"_{trial.hardware.processes}")
    assert sizes == {2, 4, 8}


def test_their_table_has_the_distance_in_float64_and_names_what_is_wrong():
    equal = {"proof": "equal", "fp64": {"losses": 1e-16, "weights": 3e-14}}
    proven = {"tp_2": equal, "tp_4": EQUAL | {"fp64": None, "above_floor": 0.31}, "tp_8": WRONG}
    lines = meshes.table({"llama": proven}).splitlines()
    assert lines[0] == "| row | Llama |"
    assert "| `tp, tensor: n` | 3e-14, fp32: 0.3, **unequal** |" in lines
    assert "| `cp, context: 2, replicate: 2` | –, –, – |" in lines


def test_a_step_that_is_clipped_is_told_from_one_that_is_rounded():
    distances = {
        (stage, clip): 0.4 if stage and clip else 0.012 for stage in zero_muon.STAGES for clip in zero_muon.CLIPS
    }
    lines = zero_muon.table(distances).splitlines()
    assert lines[2:4] == ["| 0 | 1.2 % | 1.2 % |", "| 1 | 1.2 % | **40.0 %** |"]


@pytest.mark.slow
def test_zero_clips_the_step_of_its_muon_which_is_why_rows_refuse_it():
    alone, rounded, clipped = (
        zero_muon.updates(processes, stage=stage, clip=clip)
        for processes, stage, clip in ((1, None, 1), (2, 1, 0), (2, 1, 1))
    )
    assert zero_muon.distance(rounded, alone) < 0.05
    assert zero_muon.distance(clipped, alone) > 0.2
