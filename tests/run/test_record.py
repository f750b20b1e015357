"""Files are whole or absent; a ledger that is not the plan is found, whatever is wrong with it."""

import json
import os
import re
import shutil
import stat
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator, ValidationError
from safetensors.torch import save_file

from lockstep import files, paths
from lockstep.data import plan
from lockstep.errors import BadInput, RunFailed
from lockstep.run import facts, record, record_files, summing
from lockstep.run.ledger import check_ledger, gather_ledger, gather_steps, write_steps
from lockstep.run.progress import RankFiles
from tests import made

PLAN = plan.make(np.full(21, 5), global_batch=7, epochs=1, seed=0, batching="plain")


def written(tmp_path, shares):
    """Rank files as ranks write them: `shares(step, ids, rank)` says what a rank trained."""
    for rank in range(2):
        rank_files = RankFiles(tmp_path, rank)
        for step in range(PLAN.steps):
            rank_files.consume(step, np.asarray(shares(step, PLAN.step_ids(step), rank)))
        rank_files.event("run_stop")
        rank_files.write({}, np.full(PLAN.steps, 0.5 + rank))
    return gather_ledger(tmp_path, 2)


@pytest.mark.parametrize(
    ("seeds", "together", "dropout", "noted"),
    [
        ([5, 6, 7, 8], 1, [0.1], []),
        ([5, 5, 6, 6], 2, [0.1], []),  # the ranks of a replica drop the same units
        ([5, 5, 5, 5], 4, [0.1], []),
        ([5, 5, 5, 5], 1, [0.0, 0.1], [4]),
        ([5, 5, 5, 6], 1, [0.1], [4]),
        ([5, 6, 5, 6], 2, [0.1], [2]),
        ([5, 5], 1, [0.0], []),
        ([5, 5], 1, [], []),
    ],
)
def test_replicas_that_drop_the_same_units_are_noted(seeds, together, dropout, noted):
    """As where a script of one's own sets a seed, alike on all ranks; a proof, without dropout, can't see it."""
    ranks = [SimpleNamespace(seed=seed, settings={"dropout": dropout}) for seed in seeds]
    told = summing.same_seeds(SimpleNamespace(ranks_per_replica=together), ranks)
    assert [note.partition(" replicas")[0] for note in told] == [f"of its {number}" for number in noted]


def test_the_seconds_of_each_step_are_kept_by_rank(tmp_path):
    written(tmp_path, lambda step, ids, rank: plan.share(ids, rank, 2))
    write_steps(tmp_path / paths.STEPS, gather_steps(tmp_path, 2))
    kept = np.load(tmp_path / paths.STEPS)
    assert (kept.dtype, kept.shape) == (np.float32, (2, PLAN.steps))
    assert kept[:, 0].tolist() == [0.5, 1.5]


def test_a_ledger_that_follows_the_plan_is_accepted(tmp_path):
    ledger = written(tmp_path, lambda step, ids, rank: plan.share(ids, rank, 2))
    check_ledger(ledger, PLAN)
    assert np.array_equal(ledger["id"], PLAN.ids)  # in order of step and rank


@pytest.mark.parametrize(
    ("what", "shares"),
    [
        ("every rank trains the whole batch", lambda step, ids, rank: ids),
        ("every rank trains rank 0's share", lambda step, ids, rank: plan.share(ids, 0, 2)),
        ("a sampler pads", lambda step, ids, rank: np.resize(ids, 8)[rank * 4 : rank * 4 + 4]),
        ("a sample is left out", lambda step, ids, rank: plan.share(ids, rank, 2)[: 3 if step == 2 else None]),
        ("a sample is another", lambda step, ids, rank: (plan.share(ids, rank, 2) + (step == 1)) % 21),
        ("steps are swapped", lambda step, ids, rank: plan.share(PLAN.step_ids((step + 1) % 3), rank, 2)),
    ],
)
def test_a_ledger_that_does_not_is_refused(tmp_path, what, shares):
    with pytest.raises(RunFailed, match=r"the ledger differs from the plan in step \d"):
        check_ledger(written(tmp_path, shares), PLAN)


def test_samples_that_every_rank_should_train_are_counted_as_often(tmp_path):
    ledger = written(tmp_path, lambda step, ids, rank: ids)
    check_ledger(ledger, PLAN, times=2)
    once = written(tmp_path, lambda step, ids, rank: plan.share(ids, rank, 2))
    with pytest.raises(RunFailed, match="7 of 14 samples were not trained, 0 were trained that should not"):
        check_ledger(once, PLAN, times=2)


def test_a_ledger_with_too_many_steps_is_refused(tmp_path):
    ledger = written(tmp_path, lambda step, ids, rank: plan.share(ids, rank, 2))
    ledger = {name: np.append(column, {"step": 3, "rank": 0, "id": 1}[name]) for name, column in ledger.items()}
    with pytest.raises(RunFailed, match="steps beyond the plan's 3"):
        check_ledger(ledger, PLAN)


def test_a_record_must_follow_the_schema(tmp_path):
    with pytest.raises(ValidationError):
        record_files.write_run(tmp_path / "record.json", made.record(status="great"))
    assert not list(tmp_path.iterdir())


# What users' scripts read; see the docstring of run/record.py.
NAMES = (
    *(
        "row",
        "strategy",
        "division",
        "status",
        "reason",
        "notes",
        "world_size",
        "replicas",
        "repeat",
        "session",
        "steps",
    ),
    *("disturbed_before", "precision", "global_batch", "asked", "settings", "seeds", "started", "log", "command"),
    *("wall_seconds", "losses", "rates", "departed", "terms", "gradient_norm", "dev", "resumed", "snapshots"),
    *("clock.setup", "clock.warm_up_seconds", "clock.cold_seconds", "clock.first_step_seconds", "clock.train_seconds"),
    *("clock.stall_seconds", "clock.step_seconds_median", "clock.step_seconds_quartiles", "clock.evaluation_seconds"),
    *("clock.total_seconds", "work.samples", "work.tokens", "work.padded_tokens", "work.flops", "work.padded_flops"),
    *("throughput.samples_per_second", "throughput.tokens_per_second", "throughput.padded_tokens_per_second"),
    *("throughput.flops_per_second", "throughput.padded_flops_per_second", "memory.before_mb", "memory.peak_mb"),
    *("memory.reserved_mb", "memory.proportional_mb", "memory.before_mb_per_rank", "memory.peak_mb_per_rank"),
    *("memory.reserved_mb_per_rank", "memory.proportional_mb_per_rank", "memory_by_gpu", "reserved_by_gpu"),
    *("bytes_read_per_rank", "energy.gpu_joules", "energy.cpu_joules", "energy.counters", "watch.samples"),
    *("watch.others_cores", "watch.cpu_mhz", "watch.cpu_celsius", "watch.gpu_mhz", "watch.gpu_celsius"),
    *("watch.gpus", "watch.disturbed", "hashes", "saved.count", "saved.seconds", "saved.bytes"),
    *("evaluation.seconds", "evaluation.samples", "evaluation.samples_per_second"),
)
WHOLE = {
    "saved": {"count": 1, "seconds": 0.5, "bytes": 9},
    "evaluation": {"seconds": 1.0, "samples": 20, "samples_per_second": 20.0},
    "snapshots": [{"epoch": 1, "step": 3, "dev": None, "seconds": 0.1}],
    "disturbed_before": [{"started": "2026-01-01", "train_seconds": 2.0, "disturbed": ["others"]}],
}


def test_no_name_that_users_script_against_is_gone_from_a_record(tmp_path):
    record_files.write_run(tmp_path / paths.RECORD, made.record(**WHOLE))
    content = json.loads((tmp_path / paths.RECORD).read_text())
    for name in NAMES:
        inside = content
        for part in name.split("."):
            inside = inside[part]
    assert content["snapshots"] == WHOLE["snapshots"]


def test_what_is_written_is_what_is_read(tmp_path):
    whole = made.record(**WHOLE)
    record_files.write_run(tmp_path / paths.RECORD, whole)
    assert record_files.read_run(tmp_path) == whole
    assert whole.snapshots[0].epoch == 1
    assert whole.disturbed_before[0].wall_seconds == 0


def test_what_records_of_earlier_versions_lack_is_completed(tmp_path):
    files.write_json(tmp_path / paths.RECORD, made.raw() | {"a_later_version": "has this"})
    read = record_files.read_run(tmp_path)
    assert (read.session, read.resumed, read.rates, read.nodes, read.evaluation) == (None, [], [], [], None)
    assert (read.clock.cold_seconds, read.memory.before_mb, read.energy.counters, read.watch.gpus) == (
        None,
        None,
        [],
        [],
    )
    read.resumed.append(3)
    assert record_files.read_run(tmp_path).resumed == [], "a default is not shared"


def test_a_run_that_failed_has_no_figures(tmp_path):
    failed = replace(made.record(), status="failed", reason="rank 1 died")
    record_files.write_run(tmp_path / paths.FAILED, failed)
    read = record_files.read_run(tmp_path)
    assert (read.status, read.reason, read.repeat) == ("failed", "rank 1 died", 1)
    with pytest.raises(AttributeError, match="clock"):
        _ = read.clock


def test_a_field_that_is_misspelt_is_an_error():
    with pytest.raises(AttributeError, match="train_second"):
        _ = made.record().clock.train_second
    with pytest.raises(TypeError, match="byte"):
        record.Saved(count=1, seconds=0.0, byte=3)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"clock": {"train_seconds": 0}}, "$.clock.train_seconds: 0 is less than or equal to the minimum of 0"),
        ({"clock": {"setup": {"imports": -1}}}, "$.clock.setup.imports: -1 is less than the minimum of 0"),
        ({"hashes": {"plan": "p"}}, "$.hashes.plan: 'p' does not match"),
        ({"watch": None}, "$.watch: None is not of type 'object'"),
        ({"snapshots": [{"epoch": 0, "step": 3, "dev": None, "seconds": 0.1}]}, "$.snapshots[0].epoch: 0 is less than"),
        ({"resumed": [0]}, "$.resumed[0]: 0 is less than the minimum of 1"),
        ({"evaluation": {"seconds": 1.0}}, "$.evaluation: 'samples' is a required property"),
        ({"division": "fifth"}, "$.division: 'fifth' is not one of"),
        ({"losses": "none"}, "$.losses: 'none' is not of type 'array'"),
        ({"status": "failed"}, "$.status: 'failed' is not one of ['ok']"),
    ],
)
def test_a_record_that_can_not_be_is_refused_with_its_field(tmp_path, changed, said):
    whole = made.raw(**{name: value for name, value in changed.items() if name != "watch"})
    files.write_json(tmp_path / paths.RECORD, whole | ({"watch": None} if "watch" in changed else {}))
    with pytest.raises(BadInput, match=re.escape(f"{tmp_path / paths.RECORD}: is not a valid record: {said}")):
        record_files.read_run(tmp_path)


@pytest.mark.parametrize("kind", [record.Begun, record.Record, record.RankSummary])
def test_every_declared_field_has_a_valid_schema(kind):
    Draft202012Validator.check_schema(facts.schema(kind))
    assert facts.schema(kind)["properties"].keys() == {each.name for each in fields(kind)}


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, {"old": 1})
    with pytest.raises(RuntimeError), files.atomic_file(path) as temporary:
        temporary.write_text("{")
        raise RuntimeError
    assert json.loads(path.read_text()) == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_fails_half_way_leaves_the_old_one(tmp_path):
    path = tmp_path / "folder"
    for content in ("old", "new"):
        with files.atomic_folder(path) as temporary:
            (temporary / "file").write_text(content)
    with pytest.raises(RuntimeError), files.atomic_folder(path) as temporary:
        (temporary / "file").write_text("half")
        raise RuntimeError
    assert (path / "file").read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o027, 0o077])
def test_who_may_read_a_file_is_for_the_umask_to_say(tmp_path, umask):
    """Whatever made it: safetensors and tempfile make files for their owner alone, and a copied tree brings its own."""
    copied, shared = tmp_path / "copied", tmp_path / "shared"
    copied.mkdir(mode=0o700)
    shared.mkdir()
    before = os.umask(umask)
    try:
        shared.chmod(0o2775 & ~umask)  # of a group: what is made in it is the group's
        files.write_text(shared / "plain", "text")
        with files.atomic_file(shared / "weights") as temporary:
            save_file({"a": torch.zeros(1)}, temporary)
        with files.atomic_folder(shared / "model") as temporary:
            (temporary / "inside").mkdir()
            shutil.copytree(copied, temporary, dirs_exist_ok=True)
            save_file({"a": torch.zeros(1)}, temporary / "inside" / "weights")
        (shared / "native").mkdir()
        save_file({"a": torch.zeros(1)}, shared / "native" / "weights")
        (shared / "native" / "program").touch(mode=0o766)
        files.seal(shared / "native", {})
    finally:
        os.umask(before)
    modes = {str(file.relative_to(tmp_path)): stat.S_IMODE(file.stat().st_mode) for file in shared.rglob("*")}
    for name in ("shared/model", "shared/model/inside", "shared/native"):
        assert modes.pop(name) == 0o2777 & ~umask, name
    assert modes.pop("shared/native/program") == 0o766 & ~umask
    assert {name for name, mode in modes.items() if mode != 0o666 & ~umask} == set()


def test_array_hashes_see_names_types_shapes_and_values():
    original = {"a": np.arange(6)}
    others = [{"b": np.arange(6)}, {"a": np.arange(6.0)}, {"a": np.arange(6).reshape(2, 3)}, {"a": np.arange(1, 7)}]
    assert len({files.hash_arrays(arrays) for arrays in [original, *others]}) == 5
    assert files.hash_arrays(original) == files.hash_arrays({"a": np.arange(6).copy()})


def test_which_rank_failed_first_does_not_depend_on_a_clock_that_is_set(tmp_path, monkeypatch):
    dates = iter([1000.0, 500.0])
    monkeypatch.setattr("lockstep.run.progress.time.time", lambda: next(dates))
    for rank in (1, 0):
        RankFiles(tmp_path, rank).write_error(ValueError("wrong"), step=3)
    assert [error["rank"] for error in record_files.read_errors(tmp_path)] == [1, 0]


def test_a_full_disk_has_room_for_the_reason_once_what_was_being_written_is_gone(tmp_path):
    for name in (".native.tmp", "saved/.step-00000005.tmp", "saved/step-00000005", "native"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / ".record.json.1.tmp").touch()  # somebody may be writing it now
    files.remove_unfinished(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"saved", "saved/step-00000005", "native", ".record.json.1.tmp"}


TORCHRUN = """\
$ python -m torch.distributed.run --nproc-per-node 2 train.py
Traceback (most recent call last):
  File "run.py", line 949, in main
torch.distributed.DistNetworkError: The server socket has failed to listen: EADDRINUSE
"""


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (TORCHRUN, ": torch.distributed.DistNetworkError: The server socket has failed to listen: EADDRINUSE"),
        ("$ python train.py\nError: \nError in the wording\n", ""),
    ],
)
def test_why_a_launcher_did_not_start(tmp_path, log, said):
    (tmp_path / "run.log").write_text(log)
    assert record_files.first_error(tmp_path / "run.log") == said
