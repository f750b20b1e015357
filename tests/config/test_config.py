"""The configuration: defaults, overrides, and one clear message for each mistake."""

import contextlib
import importlib.metadata
import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from docs import configuration as page
from lockstep.analysis import staleness
from lockstep.config import configuration, deepspeed_file, machine, reading, registry, resolving, schema
from lockstep.config.hardware import device_count
from lockstep.config.machine import selection
from lockstep.config.row import times_trained
from lockstep.data import plan
from lockstep.errors import BadInput
from tests import made
from tests.conftest import PROJECT

DEFAULT = PROJECT / "config" / "config.yaml"
LADDER = DEFAULT.with_name("ladder.yaml")
CPU = {"hardware": {"device": "cpu", "processes": 2, "threads": 1, "oversubscribe": True}}


def test_the_default_configuration_spells_out_the_schema():
    filled = schema.fill({}, schema.of_configuration())
    assert yaml.safe_load(DEFAULT.read_text(encoding="utf-8")) == filled


def test_every_key_is_described_in_the_readme():
    assert page.table() in page.PAGE.read_text(encoding="utf-8"), "make docs writes it"


@pytest.mark.parametrize("name", ["config.yaml", "emotion.yaml"])
def test_shipped_configurations_are_valid(name):
    checked = reading.read([DEFAULT, PROJECT / "config" / name])
    published = ["dataparallel", "ddp", "ddp_spawn", "ddp_amp", "horovod", "deepspeed", "accelerate", "trainer"]
    assert list(checked.rows) == ["single", "all_threads", *published, "fabric", "fsdp"]


@pytest.mark.parametrize("rank", [8, "8", 8.0])
def test_a_whole_number_may_be_written_in_any_way(rank):
    row = reading.parse({"rows": {"x": {"strategy": "recipe", "lora": rank}}}).rows["x"]
    assert (row.train.lora, type(row.train.lora)) == (8, int)


@pytest.mark.parametrize("numbers", ["[1, 3]", "[1.0, 3.0]", "['1', '3']", ["1", 3.0]])
def test_so_may_whole_numbers_of_a_list(numbers):
    gpus = reading.parse({"hardware": {"gpus": numbers}}).hardware.gpus
    assert (gpus, [type(number) for number in gpus]) == ([1, 3], [int, int])


def test_every_level_of_the_ladder_can_be_climbed():
    checked = reading.read([DEFAULT, LADDER], ["hardware.device=cpu", "hardware.processes=2"])
    assert [name for name, row in checked.rows.items() if row.division == "closed"] == ["single"]
    assert (checked.repeats, checked.vary_seed) == (5, True)  # the smallest number of runs by which quality is judged
    for row in checked.rows.values():
        row.refuse()


def test_rows_for_slow_networks_are_for_one_machine_and_for_two():
    for nodes in (1, 2):
        keys = ["hardware.device=cpu", "hardware.processes=2", f"hardware.nodes={nodes}"]
        checked = reading.read([DEFAULT, DEFAULT.with_name("network.yaml")], keys)
        for row in checked.rows.values():
            row.refuse()
        assert {row.hardware.nodes for row in checked.rows.values()} == {1, nodes}
        open_rows = {name for name, row in checked.rows.items() if row.division == "open"}
        assert open_rows == {"accumulated", "local_sgd", "local_sgd_32", "diloco"}


@pytest.mark.parametrize(
    ("strategy", "says"), [("ddp", "first backward pass"), ("trainer", "first backward pass"), ("single", "")]
)
def test_a_static_graph_and_accumulation_are_refused(strategy, says):
    options = {"static_graph": True} if says else {}
    checked = reading.parse({"rows": {"x": {"strategy": strategy, "accumulation": 2} | options}})
    with pytest.raises(BadInput, match=says) if says else contextlib.nullcontext():
        checked.rows["x"].refuse()


@pytest.mark.parametrize(
    ("strategy", "options", "times"), [("published_deepspeed", True, 3), ("published_deepspeed", False, 1)]
)
def test_a_sample_is_trained_by_every_rank_where_a_strategy_says_so(strategy, options, times):
    assert times_trained(strategy, {"no_sampler": options}, 3) == times
    assert times_trained("ddp", {"no_sampler": options}, 3) == 1  # only for strategies that have this option


@pytest.mark.parametrize(("gpus", "batch"), [(2, 64), (4, 64), (8, 64), (16, 64), (32, 256), (64, 256)])
def test_every_row_of_the_large_configuration_can_share_out_its_batch(gpus, batch):
    on_cores = ["hardware.device=cpu", "hardware.oversubscribe=true"]
    asked = [*on_cores, f"hardware.processes={gpus}", f"train.global_batch={batch}"]
    checked = reading.read([DEFAULT, DEFAULT.with_name("large.yaml")], asked)
    assert {"fsdp", "hsdp", "deepspeed", "tp_fsdp", "pp", "cp"} == set(checked.rows)
    for row in checked.rows.values():
        row.refuse()


def test_machines_elsewhere_are_as_they_are_said_to_be(monkeypatch):
    """A login node has two cores and no GPU; the machine that trains must have what the configuration says."""
    monkeypatch.setattr(machine, "cpu_cores", lambda: 2)
    asked = {"device": "auto", "processes": "auto", "node_cores": 32, "node_gpus": 4}
    checked = reading.parse({"hardware": asked, "rows": {"x": {"strategy": "ddp"}}})
    there = checked.rows["x"].hardware
    assert (there.device, there.devices, there.threads, there.backend) == ("cuda", 4, 8, "nccl")
    with pytest.raises(BadInput, match=r"hardware.node_cores: 32, but on .* this job may use 2 CPU cores"):
        resolving.refuse_less(checked.rows["x"].asked, there)
    monkeypatch.setattr(machine, "cpu_cores", lambda: 32)
    with pytest.raises(BadInput, match=r"hardware.node_gpus: 4, but on .* this job may use 0 GPUs"):
        resolving.refuse_less(checked.rows["x"].asked, there)
    monkeypatch.setattr(machine, "visible_gpus", lambda: 4)
    monkeypatch.setattr(machine, "refuse_misnamed_gpus", lambda: None)
    monkeypatch.setattr(machine, "gpu_kinds", lambda numbers: ["A", "B"])
    with pytest.raises(BadInput, match="GPUs of different models"):
        resolving.refuse_less(checked.rows["x"].asked, there)


def test_a_cpu_refuses_levels_of_gpus_by_name():
    keys = ["hardware.device=cpu", "hardware.oversubscribe=true"]
    checked = reading.read([DEFAULT, LADDER, LADDER.with_name("ladder-gpu.yaml")], keys)
    for name in ("tf32", "resident", "resident_graphs"):
        with pytest.raises(BadInput, match=f"rows.{name}: "):
            checked.rows[name].refuse()


def test_the_published_experiment_is_pinned():
    checked = reading.read([DEFAULT, PROJECT / "config" / "emotion.yaml"])
    assert checked.model.revision == "2a995a880017c60e4683869e817130d8af548486"
    assert checked.data.sha256 == "6bf592cf7016019b28272f1fcf54bc31afe6ad15bbc60970ca521ff394524a50"
    assert checked.data.limit == 10000


def test_strings_from_the_command_line_get_the_right_type():
    raw = {
        "data": {"limit": "600", "join_blanks": "false", "path": "null", "labels": "[a, b]", "splits": {"dev": "0.1"}},
        "train": {"learning_rate": "1e-3", "warmup": "3", "class_weights": "[1, 2]"},
        "hardware": {"processes": "2", "threads": "auto", "oversubscribe": "true"},
        "rows": {
            "ddp": {"strategy": "ddp", "global_batch": "32"},
            "zero1": {"strategy": "deepspeed", "stage": "1"},
        },
    }
    checked = reading.parse(raw)
    assert (checked.data.limit, checked.data.join_blanks, checked.data.path) == (600, False, None)
    assert checked.data.labels == ["a", "b"]
    assert checked.train.learning_rate == 0.001
    assert checked.train.class_weights == [1, 2]
    assert reading.parse({"train": {"class_weights": "balanced"}}).train.class_weights == "balanced"
    assert (checked.hardware.processes, checked.hardware.threads) == (2, "auto")
    assert checked.rows["ddp"].train.global_batch == 32
    assert checked.rows["zero1"].options["stage"] == 1


def test_a_mapping_on_the_command_line_overrides_only_the_keys_that_it_has(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("train: {learning_rate: 0.01, seed: 7}\nrows: {ddp: {strategy: ddp, bucket_mb: 5}}\n")
    sets = ["train={epochs: 1}", "train.max_steps=3", "train={ seed: 8 }"]
    sets += ["hardware={device: cpu, oversubscribe: true}"]
    sets += ["rows={ddp: {precision: bf16}, mine: {strategy: ddp}}", "rows.mine={strategy: single}"]
    sets += ["data.splits={train: .6, dev: .2, test: .2}", "data.labels=[a, b]"]
    checked = reading.read([DEFAULT, mine], sets)
    train = checked.train
    assert (train.epochs, train.max_steps, train.seed, train.learning_rate) == (1, 3, 8, 0.01)
    assert (checked.hardware.device, checked.hardware.oversubscribe) == ("cpu", True)
    ddp = checked.rows["ddp"]
    assert (ddp.precision, ddp.options["bucket_mb"], checked.rows["mine"].strategy) == ("bf16", 5, "single")
    assert "fsdp" in checked.rows
    assert (checked.data.splits, checked.data.labels) == ({"train": 0.6, "dev": 0.2, "test": 0.2}, ["a", "b"])
    with pytest.raises(BadInput, match=re.escape("--set train={epochs: 1: not valid YAML")):
        reading.read([DEFAULT], ["train={epochs: 1"])
    with pytest.raises(
        BadInput, match=re.escape("--set train={seed: 1, seed: 2}: not valid YAML: the key seed occurs")
    ):
        reading.read([DEFAULT], ["train={seed: 1, seed: 2}"])


def test_a_device_in_a_mapping_decides_which_configuration_is_read(run_script, monkeypatch):
    monkeypatch.setattr(machine, "visible_gpus", lambda: 2)
    monkeypatch.setattr(reading, "visible_gpus", lambda: 2)
    for asked in ("hardware.device=cpu", "hardware={device: cpu}"):
        _, _, said = run_script("launch", "--row", "nothing", "--set", asked)
        assert "There are GPUs here" not in said


def test_names_of_digits_stay_as_they_are_written(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("data: {labels: ['01', '02', 3, 1.0], text: '007'}\npredict: {label: '01'}\n")
    checked = reading.read([DEFAULT, mine], ["data.label=1"])
    assert (checked.data.labels, checked.data.text, checked.data.label) == (["01", "02", "3", "1.0"], "007", 1)
    assert checked.predict.label == "01"
    given = {"data": {"labels": ["01", "02"]}, "train": {"max_steps": "064"}}  # as Snakemake's --config hands it over
    checked = reading.parse(given)
    assert (checked.data.labels, checked.train.max_steps) == (["01", "02"], 64)
    kept = tmp_path / "kept.yaml"
    kept.write_text(yaml.safe_dump(checked.source))
    assert reading.read([kept]).data.labels == ["01", "02"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {max_steps: 064}", "mine.yaml, line 1: 064: YAML reads it as 52 (octal). Write 64, or put it in"),
        ("train:\n  seed: -010", "mine.yaml, line 2: -010: YAML reads it as -8 (octal). Write 10, or put"),
        ("hardware: {timeout: 10:00}", "10:00: YAML reads it as 600 (in base 60). Write a plain number, or put it"),
        ("hardware: {timeout: 1:30.5}", "1:30.5: YAML reads it as 90.5 (in base 60)."),
        ("data: {labels: [01, 02]}", "01: YAML reads it as 1 (octal). Write 1, or put it in quotes: '01'."),
        ("data: {labels: [2020-01-01, b]}", "2020-01-01: YAML reads it as a date. If it is text, put it in quotes"),
        ("data: {labels: [1.5, b]}", "data.labels.0: expected string or integer, not 1.5. If it is text, put it in"),
        ("model: {revision: 1234567}", "model.revision: expected string or null, not 1234567. If it is text, put"),
    ],
)
def test_what_yaml_reads_otherwise_than_it_looks_is_refused(tmp_path, text, message):
    mine = tmp_path / "mine.yaml"
    mine.write_text(text)
    with pytest.raises(BadInput, match=re.escape(message)):
        reading.read([DEFAULT, mine])


def test_so_is_it_on_the_command_line():
    with pytest.raises(BadInput, match=r"01: YAML reads it as 1 \(octal\)\. Write 1, or put it in quotes: '01'\."):
        reading.read([DEFAULT], ["data.labels=[01, 02]"])
    assert reading.read([DEFAULT], ["data.labels=['01', '02']"]).data.labels == ["01", "02"]
    assert reading.read([DEFAULT], ["hardware.timeout=0600"]).hardware.timeout == 600


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"dta": {}}, "dta: unknown key. Did you mean data?"),
        ({"train": {"lerning_rate": 1}}, "train.lerning_rate: unknown key. Did you mean learning_rate?"),
        ({"train": {"epochs": "many"}}, "train.epochs: expected integer, not 'many'."),
        ({"train": {"learning_rate": "nan"}}, "train.learning_rate: nan is not a finite number."),
        ({"train": {"warmup": float("inf")}}, "train.warmup: inf is not a finite number."),
        ({"rows": {"x": {"strategy": "ddp", "clip": float("nan")}}}, "rows.x.clip: nan is not a finite number."),
        ({"hardware": {"timeout": "1e400"}}, "hardware.timeout: inf is not a finite number."),
        ({"hardware": {"port": 80}}, "hardware.port: 80 is less than the minimum of 1024."),
        ({"model": {"heads": 3}}, "model.heads: 3 heads can't share model.hidden_size: 128 evenly."),
        ({"model": {"hidden_size": 65}}, "model.heads: 2 heads can't share model.hidden_size: 65 evenly."),
        ({"train": {"epochs": 0}}, "train.epochs: 0 is less than the minimum of 1."),
        ({"train": {"precision": "fp8"}}, "train.precision: 'fp8' is not one of fp32, bf16, fp16, amp."),
        ({"hardware": {"processes": "all"}}, "hardware.processes: expected auto or a whole number, not 'all'."),
        ({"rows": {"x": {"strategy": "dpp"}}}, "rows.x.strategy: 'dpp' is not one of"),
        (
            {"rows": {"x": {"strategy": "ddp", "launcer": "launch"}}},
            "rows.x: launcer: unknown key. Did you mean launcher?",
        ),
        (
            {"rows": {"x": {"strategy": "deepspeed", "stage": 3, "hook": "fp16"}}},
            "rows.x.hook: deepspeed has no such option;"
            " ddp, ddp_amp, ddp_spawn, recipe, zero_redundancy would have it.",
        ),
        (
            {"rows": {"x": {"strategy": "dataparallel", "nodes": 2}}},
            "rows.x: nodes: 2, but it can only be 1. nn.DataParallel is one process, which can't span machines.",
        ),
        (
            {"rows": {"x": {"strategy": "ddp_amp", "precision": "fp32"}}},
            "precision: 'fp32' is not one of amp, bf16, fp16.",
        ),
        ({"rows": {"x": {"strategy": "ddp", "eval_every": 0}}}, "rows.x: checkpoint: best needs eval_every above 0"),
        ({"rows": {"report": {"strategy": "ddp"}}}, "rows.report: a rule of the workflow has this name"),
        ({"rows": {"../x": {"strategy": "ddp"}}}, "'../x' is not a valid name"),
        ({"data": {"splits": {"train": 0.9}}}, "data.splits: train, dev and test must add up to 1, not 1.1."),
        ({"data": {"url": "http://example.org/a.json"}}, "data.url"),
        ({"data": {"url": "https://example.org/a.json"}}, "data.sha256: data.url needs it"),
        ({"data": {"hub": "someone/something"}}, "data.revision: data.hub needs it"),
        (
            {"model": {"name": "someone/something"}},
            "model.revision: model.name someone/something is neither a local folder",
        ),
        ({"__use_yte__": True}, "__use_yte__: unknown key"),
        ({"data": {"text": -3}}, "data.text: -3 is less than the minimum of 0."),
        (
            {"data": {"labels": [True, False]}},
            "YAML reads a bare yes, no, on, off, true or false so; put it in quotes.",
        ),
        ({"task": "image-classification", "model": {"name": "basicnett"}}, "weights. Did you mean basicnet?"),
        ({"model": {"name": str(PROJECT / "Snakefile")}}, "Snakefile is a file. Name the class in it too"),
    ],
)
def test_a_mistake_is_named_with_what_to_do(raw, message):
    with pytest.raises(BadInput, match=re.escape(message)):
        reading.parse(raw)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [1", "not valid YAML"), ("- 1", "expected keys and values"), (None, "No such file")],
)
def test_a_broken_file_is_named(tmp_path, text, message):
    file = tmp_path / "mine.yaml"
    if text:
        file.write_text(text)
    with pytest.raises(BadInput, match=f"mine.yaml.*{message}"):
        reading.read([file])


@pytest.mark.parametrize(
    ("row", "waits"),
    [
        ({"strategy": "ddp"}, True),
        ({"strategy": "accelerate"}, True),  # which inherits it
        ({"strategy": "ddp", "find_unused_parameters": True}, False),
        ({"strategy": "ddp", "processes": 1}, False),
        ({"strategy": "ddp", "lora": 4}, False),  # freezes the weights that would get none
        ({"strategy": "fsdp"}, False),
        ({"strategy": "single"}, False),
    ],
)
def test_which_rows_wait_for_gradients_that_never_come(row, waits):
    read = reading.parse(CPU | {"rows": {"x": row}}).rows["x"]
    assert read.awaits_gradients == ("Set find_unused_parameters: true in the row" if waits else "")


def test_a_row_overrides_and_keeps_the_rest():
    rows = {"a": {"strategy": "ddp", "precision": "bf16", "processes": 1}, "b": {"strategy": "ddp", "global_batch": 32}}
    checked = reading.parse(CPU | {"rows": rows})
    a, b = checked.rows["a"], checked.rows["b"]
    assert (a.precision, a.hardware.processes, a.hardware.threads) == ("bf16", 1, 1)
    assert (a.options["launcher"], a.options["gradient_as_bucket_view"]) == ("torchrun", True)
    assert (a.division, b.division) == ("closed", "open")
    assert a.folder(1) == "runs/a/n1/rep1"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{strategy: fsdp, precision: fp16}", "rows.x: precision: fp16: there is no gradient scaler for sharded"),
        ("{strategy: fabric, precision: fp16}", "rows.x: precision: fp16, device: cpu: on a CPU Fabric trains in bf16"),
        (
            "{strategy: trainer, precision: fp16}",
            "rows.x: precision: fp16, device: cpu: on a CPU Trainer silently trains in fp32",
        ),
        ("{strategy: ddp, join: true, static_graph: true}", "rows.x: join: True, static_graph: True: a rank that has"),
        ("{strategy: deepspeed, offload_optimizer: true}", "rows.x: offload_optimizer: True, device: cpu"),
        (
            "{strategy: ddp, global_batch: 1}",
            "rows.x.global_batch: 1 samples can't be shared by 2 devices in 1",
        ),
        ("{strategy: ddp, accumulation: 100}", "rows.x.global_batch: 64 samples can't be shared by 2 devices in 100"),
    ],
)
def test_contradictions_are_refused_by_name(row, message):
    checked = reading.parse(CPU | {"rows": {"x": yaml.safe_load(row)}})
    with pytest.raises(BadInput, match=re.escape(message)):
        checked.rows["x"].refuse()


@pytest.mark.parametrize(
    ("train", "row", "message"),
    [
        (
            {"momentum": 0.9},
            {},
            "train.momentum: 0.9 is for optimizer: sgd, but the optimizer is adamw. Leave",
        ),
        ({"optimizer": "sgd", "betas": [0.9, 0.95]}, {}, "train.betas: [0.9, 0.95] is for optimizer: adamw or adam"),
        ({"optimizer": "sgd", "nesterov": True}, {}, "train.nesterov: Nesterov's momentum needs a momentum above 0"),
        ({}, {"nesterov": True}, "rows.x.nesterov: True is for optimizer: sgd, but the optimizer is adamw"),
        ({"schedule": "cosine"}, {"gamma": 0.5}, "rows.x.gamma: 0.5 is for schedule: step, but the schedule is cosine"),
        ({"power": 2}, {}, "train.power: 2 is for schedule: polynomial, but the schedule is linear"),
        (
            {},
            {"schedule": "polynomial", "learning_rate": 1e-8},
            "rows.x.learning_rate: 1e-08 is not above",
        ),
        ({"best": "f1"}, {}, "train.best: 'f1' is not one of accuracy, macro_f1, perplexity"),
        ({"eval_samples": 0}, {}, "train.eval_samples: 0 is less than the minimum of 1"),
        ({"betas": [0.9]}, {}, "[0.9]"),
        ({}, {"optimizer": "adamw8bit"}, "rows.x: optimizer: 'adamw8bit' is not one of adamw, adam, sgd, muon"),
        ({"gamma": 0}, {}, "train.gamma: 0 is less than or equal to the minimum of 0"),
    ],
)
def test_what_another_optimizer_or_schedule_takes_is_refused(train, row, message):
    with pytest.raises(BadInput, match=re.escape(message)):
        reading.parse(CPU | {"train": train, "rows": {"x": {"strategy": "ddp"} | row}})


def test_a_row_with_another_optimizer_or_schedule_leaves_the_table_s_settings_alone_and_is_open():
    train = {"optimizer": "sgd", "momentum": 0.9, "schedule": "step", "gamma": 0.5}
    rows = {"x": {"strategy": "ddp", "optimizer": "adamw", "schedule": "linear"}, "y": {"strategy": "ddp"}}
    rows |= {"z": {"strategy": "recipe", "optimizer": "adamw8bit"}, "r": {"strategy": "recipe"}}
    checked = reading.parse(CPU | {"train": train, "rows": rows}).rows
    assert {name: (row.train.optimizer, row.division) for name, row in checked.items()} == {
        "x": ("adamw", "open"),
        "y": ("sgd", "closed"),
        "z": ("adamw8bit", "open"),
        "r": ("sgd", "open"),
    }


def test_a_trial_has_the_table_s_optimizer_unless_the_row_s_is_its_strategy_s_own():
    rows = {"x": {"strategy": "ddp", "optimizer": "sgd"}, "z": {"strategy": "recipe", "optimizer": "adamw8bit"}}
    checked = reading.parse(CPU | {"train": {"optimizer": "adam"}, "rows": rows})
    assert {name: checked.trial(row).train.optimizer for name, row in checked.rows.items()} == {
        "x": "adam",
        "z": "adamw8bit",
    }


def test_what_a_row_sets_of_training_and_its_trial_does_not_is_known():
    rows = {"plain": {}, "faster": {"learning_rate": 1e-3, "warmup": 0.2}, "sgd": {"optimizer": "sgd"}}
    rows |= {"half": {"precision": "bf16", "accumulation": 2}, "own": {"strategy": "recipe", "optimizer": "adamw8bit"}}
    checked = reading.parse(CPU | {"rows": {name: {"strategy": "ddp"} | row for name, row in rows.items()}})
    assert {name: checked.not_in_trial(row) for name, row in checked.rows.items()} == {
        "plain": [],
        "faster": ["learning_rate", "warmup"],
        "sgd": ["optimizer"],
        "half": [],
        "own": [],
    }


BATCHED = {
    "single": {"strategy": "single"},
    "ddp": {"strategy": "ddp"},
    "twice": {"strategy": "ddp", "accumulation": 2},
    "half": {"strategy": "ddp", "accumulation": 2, "device_batch": 8},
    "whole": {"strategy": "single", "device_batch": None},
    "own": {"strategy": "single", "global_batch": 48},
}


def test_a_device_s_batch_makes_each_row_s_global_batch():
    train = {"device_batch": 16, "global_batch": None}
    checked = reading.parse(CPU | {"train": train, "rows": BATCHED})
    assert checked.train.global_batch == 32
    assert {name: (row.train.global_batch, row.division) for name, row in checked.rows.items()} == {
        "single": (16, "open"),
        "ddp": (32, "closed"),
        "twice": (64, "open"),
        "half": (32, "closed"),
        "whole": (32, "closed"),
        "own": (48, "open"),
    }
    assert [row.train.device_batch for row in checked.rows.values()] == [16, 16, 16, 8, None, None]
    assert checked.rows["single"].plan_name.startswith("bucketed-b16-")
    again = reading.parse(checked.source)
    assert again.rows == checked.rows
    assert checked.tried("t", {"strategy": "recipe", "processes": 1}).train.global_batch == 32
    assert {checked.trial(row).plan_name for row in checked.rows.values()} == {checked.reference("fp32").plan_name}


@given(
    device_batch=st.integers(1, 40),
    processes=st.integers(1, 5),
    accumulation=st.integers(1, 4),
    strategy=st.sampled_from(["single", "ddp", "dataparallel", "fsdp"]),
)
def test_every_device_has_that_batch_in_every_micro_batch(device_batch, processes, accumulation, strategy):
    row = {"strategy": strategy, "device_batch": device_batch, "accumulation": accumulation, "processes": processes}
    made = reading.parse(CPU | {"rows": {"x": row}}).rows["x"]
    made.refuse()
    made_plan = plan.make(np.full(1000, 5), global_batch=made.train.global_batch, epochs=1, seed=0, batching="plain")
    world = made.hardware.devices
    for rank in range(world):
        assert [len(ids) for ids in made_plan.micro_batches(0, rank, world, accumulation)] == [
            device_batch
        ] * accumulation


@pytest.mark.parametrize(
    ("train", "row", "message"),
    [
        ({"device_batch": 8}, {}, "train.device_batch: 8, but global_batch is also set, to 64: one follows"),
        ({}, {"device_batch": 8, "global_batch": 16}, "rows.x.device_batch: 8, but global_batch is also set, to 16"),
        ({"global_batch": None}, {}, "train.global_batch: it is null, and so is device_batch. Set one of them."),
        ({}, {"global_batch": None}, "rows.x.global_batch: it is null, and so is device_batch. Set one of them."),
        ({}, {"device_batch": 0}, "rows.x: device_batch: 0 is less than the minimum of 1"),
    ],
)
def test_a_batch_is_said_in_one_way(train, row, message):
    with pytest.raises(BadInput, match=re.escape(message)) as caught:
        reading.parse(CPU | {"train": train, "rows": {"x": {"strategy": "ddp"} | row}})
    assert "\n" not in str(caught.value)


def test_the_table_s_batch_is_that_of_all_devices_of_all_nodes():
    hardware = CPU["hardware"] | {"nodes": 3}
    train = {"device_batch": 8, "global_batch": None}
    rows = {"ddp": {"strategy": "ddp"}, "single": {"strategy": "single"}}
    rows["named"] = {"strategy": "ddp", "global_batch": 48}
    checked = reading.parse({"hardware": hardware, "train": train, "rows": rows})
    assert checked.train.global_batch == 8 * 2 * 3
    assert [row.division for row in checked.rows.values()] == ["open", "closed", "closed"]


def test_a_batch_that_is_said_in_the_other_way_trains_nothing_again():
    ours, theirs = ({"device_batch": 32, "global_batch": None}, {"global_batch": 64})
    said = [reading.parse(CPU | {"train": train, "rows": {"x": {"strategy": "ddp"}}}) for train in (ours, theirs)]
    rows = [config.rows["x"] for config in said]
    assert rows[0].deciding() == rows[1].deciding()
    asked = [row.settings().of_row() | {"dropout": None} for row in rows]
    for config in said:
        for settings in asked:
            assert staleness.written(config, made.record(row="x", asked=settings)) == ""
    more = reading.parse(
        CPU | {"train": {"device_batch": 16, "global_batch": None}, "rows": {"x": {"strategy": "ddp"}}}
    )
    assert "train.device_batch 32, now 16" in staleness.written(more, made.record(row="x", asked=asked[0]))


def test_a_row_on_one_machine_is_not_out_of_date_because_others_have_several():
    asked = {"device": "cpu", "processes": 2, "threads": 1, "oversubscribe": True, "nodes": 2, "interface": "eth0"}
    rows = {"single": {"strategy": "single"}, "ddp": {"strategy": "ddp"}}
    config = reading.parse({"hardware": asked, "rows": rows})

    def why(row: str, **recorded) -> str:
        settings = config.rows[row].settings().of_row() | {"dropout": None}
        settings["hardware"] |= recorded
        return staleness.written(config, made.record(row=row, asked=settings))

    assert [why(row) for row in rows] == ["", ""]
    assert why("single", threads=3) == "made with other settings: hardware.threads 3, now 1"
    assert why("ddp", nodes=3) == "made with other settings: hardware.nodes 3, now 2"
    assert why("ddp", interface="ib0") == "made with other settings: hardware.interface ib0, now eth0"


def test_a_row_on_one_of_the_chosen_gpus_is_up_to_date():
    asked = {"device": "cuda", "node_gpus": 8, "node_cores": 8, "gpus": [7, 6]}
    rows = {"single": {"strategy": "single"}, "ddp": {"strategy": "ddp"}}
    config = reading.parse({"hardware": asked, "rows": rows})
    other = reading.parse({"hardware": asked | {"gpus": [5, 6]}, "rows": rows})
    for row in config.rows.values():
        settings = row.settings().of_row() | {"dropout": None}
        assert staleness.written(config, made.record(row=row.name, asked=settings)) == ""
        assert "hardware.gpus [6" in staleness.written(other, made.record(row=row.name, asked=settings))


def test_a_seed_that_no_generator_takes_is_refused():
    with pytest.raises(BadInput, match=r"train\.seed: 99999999999999999999 is greater than the maximum"):
        reading.parse({"train": {"seed": 99999999999999999999}})


def test_a_strategy_takes_over_the_options_of_the_one_it_extends():
    checked = reading.parse(CPU | {"rows": {name: {"strategy": name} for name in ("ddp", "ddp_amp", "fsdp")}})
    ddp, ddp_amp, fsdp = (set(row.options) for row in checked.rows.values())
    assert ddp_amp == ddp | {"rendezvous"}
    assert checked.rows["ddp_amp"].options["launcher"] == "spawn"
    assert fsdp == {"launcher", "sync_batchnorm", "reshard_after_forward", "mixed_precision", "replicate"}


def test_a_strategy_without_its_package_is_unavailable_with_what_mends_it(monkeypatch):
    checked = reading.parse(CPU | {"rows": {name: {"strategy": name} for name in ("horovod", "ddp")}})
    row = checked.rows["horovod"]
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.27.0")
    assert row.unavailable == "horovod is 0.27.0 here, and 0.28.1 is what Lockstep was tested with: make horovod"
    monkeypatch.setattr("importlib.metadata.version", lambda name: importlib.metadata.distribution("no-such").version)
    assert row.unavailable == "horovod 0.28.1 is not installed; to install it: make horovod"
    assert checked.rows["ddp"].unavailable == ""


def test_a_lossy_row_says_why():
    rows = {"x": {"strategy": "ddp", "hook": "fp16"}, "y": {"strategy": "ddp"}}
    x, y = reading.parse(CPU | {"rows": rows}).rows.values()
    assert x.lossy == "gradients are compressed before they are sent (hook: fp16)"
    assert y.lossy == ""


def test_a_trial_does_the_same_for_every_row():
    rows = {"x": {"strategy": "ddp", "learning_rate": 0.1, "processes": 1, "accumulation": 2}}
    checked = reading.parse(CPU | {"rows": rows})
    trial, reference = checked.trial(checked.rows["x"]), checked.reference("fp32")
    assert (trial.hardware.processes, trial.train.accumulation) == (2, 2)
    assert (reference.hardware.processes, reference.precision) == (1, "fp32")
    assert trial.plan_name == reference.plan_name
    assert trial.train.learning_rate == reference.train.learning_rate
    assert trial.folder(1) == "parity/x/n2/rep1"


def test_a_row_is_held_against_references_in_its_own_precision_and_in_float64():
    rows = {
        "x": {"strategy": "ddp"},
        "bf16": {"strategy": "ddp", "precision": "bf16"},
        "hook": {"strategy": "ddp", "hook": "fp16"},
        "zero": {"strategy": "deepspeed"},
    }
    checked = reading.parse(CPU | {"rows": rows})
    precisions = {name: list(checked.references(row)) for name, row in checked.rows.items()}
    assert precisions == {"x": ["fp32", "fp64"], "bf16": ["bf16"], "hook": ["fp32"], "zero": ["fp32"]}
    assert {name: bool(checked.trial(row).variations) for name, row in checked.rows.items()} == {
        "x": True, "bf16": False, "hook": False, "zero": False,
    }  # fmt: skip
    assert checked.rows["zero"].no_fp64 == "ZeRO keeps the weights that it trains in fp32"


def test_a_row_with_updates_of_its_own_is_held_against_single_with_the_same():
    rows = {
        "plain": {},
        "ours": {"lora": 4},
        "same": {"lora": 4, "lora_alpha": 4, "lora_dropout": 0.1, "strategy": "fsdp"},
        "alpha": {"lora": 4, "lora_alpha": 8},
        "named": {"lora": 4, "lora_targets": "[query, key]"},
        "other_order": {"lora": 4, "lora_targets": ["key", "query"]},
    }
    checked = reading.parse(CPU | {"rows": {name: {"strategy": "ddp"} | row for name, row in rows.items()}})
    names = {name: checked.references(row)["fp32"].name for name, row in checked.rows.items()}
    assert names["plain"] == "reference_fp32"
    assert names["ours"] == names["same"]
    assert names["named"] == names["other_order"]
    assert len(set(names.values())) == 4
    assert all(name.startswith("reference_fp32_lora4_") for row, name in names.items() if row != "plain")
    for row in checked.rows.values():
        for reference in checked.references(row).values():
            assert (reference.strategy, reference.train.lora, reference.train.lora_targets) == (
                "single", row.train.lora, row.train.lora_targets,
            )  # fmt: skip
            assert reference.train.lora_dropout == checked.trial(row).train.lora_dropout == 0  # as all dropout
    assert checked.not_in_trial(checked.rows["same"]) == ["lora_dropout"]
    divisions = {name: row.division for name, row in checked.rows.items()}
    assert divisions == dict.fromkeys(rows, "open") | {"plain": "closed"}


def test_where_the_table_trains_updates_its_rows_are_closed():
    rows = {"same": {"strategy": "ddp"}, "whole": {"strategy": "ddp", "lora": 0}}
    checked = reading.parse(CPU | {"train": {"lora": 8}, "rows": rows})
    assert {name: row.division for name, row in checked.rows.items()} == {"same": "closed", "whole": "open"}
    names = {name: [each.name for each in checked.references(row).values()] for name, row in checked.rows.items()}
    assert names == {
        "same": ["reference_fp32", "reference_fp64"],
        "whole": ["reference_fp32_all_weights", "reference_fp64_all_weights"],
    }


@pytest.mark.parametrize("strategy", registry.names())
def test_every_strategy_has_lora_but_those_of_others_scripts_and_those_that_divide_layers(monkeypatch, strategy):
    task = {"task": "language-modelling", "train": {"best": "loss"}} if strategy == "cp" else {}
    row = reading.parse(CPU | task | {"rows": {"x": {"strategy": strategy, "lora": 8}}}).rows["x"]
    divided = {"tp": "it divides layers, but would not divide peft's", "pp": "its stages are parts of the plain model"}
    if strategy in divided:
        with pytest.raises(BadInput, match=f"lora: 8: {divided[strategy]}"):
            row.refuse()
        return
    if registry.study(strategy):
        with pytest.raises(BadInput, match=r"lora: 8: the published code trained all weights\. Set lora to 0"):
            row.refuse()
        return
    row.refuse()
    if not row.unavailable:
        version = registry.version
        monkeypatch.setattr(registry, "version", lambda name: None if name == "peft" else version(name))
        assert row.unavailable == "peft 0.21.2 is not installed; to install it: make setup"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"lora_alpha": 8}, "rows.x.lora_alpha: 8 is for LoRA, but lora is 0. Leave lora_alpha out, or set lora."),
        ({"lora": -1}, "lora: -1 is less than the minimum of 0."),
        ({"lora": 4, "lora_targets": []}, "lora_targets: [] should be non-empty"),
        (
            {"strategy": "deepspeed", "lora": 4, "precision": "bf16", "native_precision": True},
            "rows.x: lora: 4, native_precision: True, precision: bf16: the engine would round the frozen weights",
        ),
    ],
)
def test_settings_of_lora_that_can_t_be_are_refused(row, message):
    with pytest.raises(BadInput) as refused:
        reading.parse(CPU | {"rows": {"x": {"strategy": "ddp"} | row}}).rows["x"].refuse()
    assert message in str(refused.value)


@pytest.mark.parametrize("task", ["image-classification", "image-segmentation"])
@pytest.mark.parametrize(("option", "message"), [("packed", "only texts can be"), ("resident", "only the token ids")])
def test_what_is_for_texts_is_refused_for_images(task, option, message):
    rows = {"x": {"strategy": "recipe", option: True}}
    quality = {"train": {"best": "miou"}} if task == "image-segmentation" else {}
    with pytest.raises(BadInput, match=rf"rows.x: {option}: True, task: {task}: {message}"):
        reading.parse(CPU | {"task": task, "rows": rows} | quality).rows["x"].refuse()


def test_a_hook_that_needs_nccl_is_refused_on_a_cpu():
    with pytest.raises(BadInput, match=r"rows.x: hook: bf16, device: cpu: .* set hook to fp16"):
        reading.parse(CPU | {"rows": {"x": {"strategy": "ddp", "hook": "bf16"}}}).rows["x"].refuse()


@pytest.mark.parametrize(("asked", "processes", "accumulation"), [(1, 2, 15), (3, 3, 10), (9, 4, 7)])
def test_a_trial_has_several_ranks_and_no_more_micro_batches_than_texts(asked, processes, accumulation):
    rows = {"x": {"strategy": "ddp", "processes": asked, "threads": 1, "oversubscribe": True, "accumulation": 100}}
    checked = reading.parse(CPU | {"rows": rows})
    trial = checked.trial(checked.rows["x"])
    assert (trial.hardware.processes, trial.train.accumulation) == (processes, accumulation)


def test_a_trial_has_a_sample_in_every_micro_batch():
    checked = reading.parse(CPU | {"rows": {"x": {"strategy": "ddp", "accumulation": 30}}})
    row = checked.rows["x"]
    row.refuse()
    trial = checked.trial(row)
    trial.refuse()
    assert trial.train.accumulation == trial.train.global_batch // trial.replicas == 15
    as_in_the_row = replace(trial, train=replace(trial.train, accumulation=row.train.accumulation))
    with pytest.raises(BadInput, match=r"31 samples can't be shared by 2 devices in 30 micro-batches each"):
        as_in_the_row.refuse()


def deciding(row: dict, **sections) -> dict:
    return reading.parse(CPU | sections | {"rows": {"x": {"strategy": "ddp"} | row}}).rows["x"].deciding()


def test_what_decides_no_result_is_no_setting_that_does():
    """A change of these keys neither trains anything again nor makes a result stale."""
    assert deciding({}) == deciding({"timeout": 5.0, "port": 29600})
    assert deciding({"clip": 2.0}) == deciding({}, train={"clip": 2.0})  # in the closed or the open division
    for different in ({"clip": 2.0}, {"bucket_mb": 50}, {"launcher": "launch"}, {"precision": "bf16"}):
        assert deciding({}) != deciding(different)


ACCELERATE = {"distributed_type": "MULTI_GPU", "num_processes": 2, "mixed_precision": "no", "gpu_ids": "all"}


def accelerate_row(file, **changes):
    rows = {"x": {"strategy": "accelerate", "config_file": str(file)} | changes}
    return reading.parse(CPU | {"rows": rows}).rows["x"]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"num_processes": 4}, "says num_processes: 4, and the row has 2. Set it to 2."),
        ({"mixed_precision": "fp16"}, "says mixed_precision: 'fp16', and the row trains in fp32. Set it to 'no'."),
        ({"mixed_precision": False}, "says mixed_precision: False, and the row trains in fp32. Set it to 'no'."),
        ({"distributed_type": "FSDP"}, "says distributed_type: 'FSDP', and the row trains with Distributed"),
        ({"distributed_type": "MULTI_CPU"}, "for which Accelerate starts processes by that name only, on a CPU too."),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, "and the row trains on this machine. Set it to 'LOCAL_MACHINE'."),
        ({"num_machines": 2}, "says num_machines: 2, and the row has 1"),
        ({"gpu_ids": "2,3"}, "says gpu_ids: '2,3', and the row's GPUs are chosen by hardware.gpus"),
        ({"distributed_type": None}, "does not say distributed_type"),
        ({"distributed_type": ""}, "says distributed_type: '', and the row trains with Distributed"),
        (
            {"deepspeed_config": {"training_script": "other.py"}},
            "sets deepspeed_config, which has no counterpart in a row",
        ),
    ],
)
def test_an_accelerate_file_that_contradicts_its_row_is_refused(tmp_path, said, reason):
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in (ACCELERATE | said).items() if value is not None}))
    with pytest.raises(BadInput, match=re.escape(reason)) as refused:
        accelerate_row(file).refuse()
    assert str(refused.value).startswith(f"rows.x.config_file: {file} ")


def test_an_accelerate_file_that_agrees_is_taken_and_known_by_its_content(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump(ACCELERATE))
    row = accelerate_row(file)
    row.refuse()
    before = row.deciding()
    assert before == accelerate_row(file).deciding()
    file.write_text(yaml.safe_dump(ACCELERATE | {"debug": True, "tpu_env": [], "tpu_use_cluster": False}))
    accelerate_row(file).refuse()
    assert before != accelerate_row(file).deciding()
    for launcher in registry.literals("accelerate")["OPTIONS"]["launcher"]["enum"][1:]:
        with pytest.raises(BadInput, match="config_file is read by `accelerate launch` only; set launcher to"):
            accelerate_row(file, launcher=launcher).refuse()
    for text, reason in (("[1]", "holds no keys and values"), ("{", "is not valid YAML")):
        file.write_text(text)
        with pytest.raises(BadInput, match=reason):
            accelerate_row(file).refuse()
    file.unlink()
    with pytest.raises(BadInput, match=r"own\.yaml does not exist"):
        accelerate_row(file).refuse()


DEEPSPEED = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 200_000, "offload_optimizer": {"device": "none"}},
    "optimizer": {"type": "Adam", "params": {"lr": 5e-4, "eps": 1e-8, "betas": "auto"}},
    "bf16": {"enabled": False},
}


def deepspeed_row(file, **changes):
    rows = {"x": {"strategy": "deepspeed", "stage": 2, "config_file": str(file)} | changes}
    train = {"clip": 1.0, "learning_rate": 5e-4}
    return reading.parse(CPU | {"rows": rows, "train": train}).rows["x"]


def test_a_deepspeed_file_that_agrees_is_taken_and_its_trial_is_the_rows(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(DEEPSPEED))  # 1e-08 among it, a word in YAML
    row = deepspeed_row(file)
    row.refuse()
    merged = deepspeed_file.merged(str(file), {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.0})
    assert merged["zero_optimization"] == DEEPSPEED["zero_optimization"]
    assert merged["gradient_clipping"] == 0.0
    assert {"optimizer", "bf16", "train_batch_size", "train_micro_batch_size_per_gpu"}.isdisjoint(merged)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"train_batch_size": 32}, "says train_batch_size: 32, and the row's global batch is 64. Set it to 64."),
        ({"train_micro_batch_size_per_gpu": 64}, "and each of the row's micro-batches has 32 samples. Set it to 32"),
        ({"gradient_accumulation_steps": 4}, "and the row's accumulation is 1. Set it to 1."),
        ({"gradient_clipping": 0.5}, "says gradient_clipping: 0.5, and the row clips at 1"),
        ({"zero_optimization": {"stage": 3}}, "says zero_optimization.stage: 3, and the row's stage is 2"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "the row's offload_optimizer is False"),
        ({"bf16": {"enabled": True}}, "says bf16.enabled: True, and the row trains in fp32. Set it to False."),
        ({"optimizer": {"type": "Lamb"}}, "says optimizer.type: 'Lamb', and the row's optimizer is adamw"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "and the row's optimizer is adamw"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, "says optimizer.params.lr: 0.001, and the row's is"),
        ({"optimizer": {"params": {}}}, "says optimizer.type: None"),
        ({"optimizer": "AdamW"}, "says optimizer: 'AdamW'"),
        ({"scheduler": {"type": "WarmupLR"}}, "sets scheduler, which has no counterpart in a row. Remove it."),
        ({"curriculum_learning": {"enabled": True}}, "sets curriculum_learning, which has no counterpart"),
    ],
)
def test_a_deepspeed_file_that_contradicts_its_row_is_refused(tmp_path, said, reason):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(DEEPSPEED | said))
    with pytest.raises(BadInput, match=re.escape(reason)) as refused:
        deepspeed_row(file).refuse()
    assert str(refused.value).startswith(f"rows.x.config_file: {file} ")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            {"learning_rate": 5e-5},
            "arguments.learning_rate: 5e-05, but the row's is 0.0015. Leave it out, or set it to",
        ),
        (
            {"per_device_train_batch_size": 8},
            "arguments.per_device_train_batch_size: 8, but each of the row's micro-batches has 32 samples",
        ),
        ({"bf16": True}, "arguments.bf16: True, but the row trains in fp32"),
        ({"lr_scheduler_type": "cosine"}, "arguments.lr_scheduler_type: 'cosine', but the row's schedule is linear"),
        ({"group_by_length": True}, "arguments.group_by_length: has no effect on a row, or one that is not allowed"),
        ({"learning_rat": 5e-5}, "arguments.learning_rat: has no effect on a row"),
        ({"deepspeed": "ds.json"}, "arguments.deepspeed: has no effect on a row"),
    ],
)
def test_arguments_of_trainer_that_contradict_the_row_or_do_nothing_are_refused(given, reason):
    rows = {"x": {"strategy": "trainer", "arguments": {"gradient_checkpointing": True, "seed": 42} | given}}
    with pytest.raises(BadInput, match=re.escape(f"rows.x.{reason}")):
        reading.parse(CPU | {"rows": rows}).rows["x"].refuse()


def test_arguments_of_trainer_that_agree_are_taken():
    given = {"torch_compile": True, "learning_rate": 0.0015, "num_train_epochs": 2, "weight_decay": 0.01}
    reading.parse(CPU | {"train": {"epochs": 2}, "rows": {"x": {"strategy": "trainer", "arguments": given}}}).rows[
        "x"
    ].refuse()


def test_a_script_takes_arguments_of_its_own_which_are_not_trainers(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("")
    row = {"strategy": "script", "script": str(file), "arguments": ["--bucket", "25"]}
    reading.parse(CPU | {"rows": {"x": row}}).rows["x"].refuse()
    file.unlink()
    with pytest.raises(BadInput, match=r"rows\.x\.script: .*mine\.py does not exist\. Name an existing file"):
        reading.parse(CPU | {"rows": {"x": row}}).rows["x"].refuse()


def test_horovod_without_mpi_can_not_meet_by_it(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.28.1")
    monkeypatch.setattr("lockstep.provenance.horovod_has", lambda library: False)
    rows = {"x": {"strategy": "horovod", "controller": "mpi"}, "y": {"strategy": "horovod"}}
    x, y = reading.parse(CPU | {"rows": rows}).rows.values()
    assert x.unavailable.startswith("Horovod is built without MPI; install it")
    assert y.unavailable == ""


def test_rows_of_ones_own_come_after_the_default_ones():
    rows = {"mine": {"strategy": "ddp"}, "ddp": {"strategy": "ddp"}, "single": {"strategy": "single"}}
    assert list(reading.parse({"rows": rows}).rows) == ["single", "ddp", "mine"]


def test_null_drops_a_row():
    for null in (None, "null"):  # the latter from the command line
        checked = reading.parse({"rows": {"single": {"strategy": "single"}, "ddp": null}})
        assert list(checked.rows) == ["single"]


def test_strategies_with_one_device_have_a_world_of_one_and_the_same_threads():
    rows = {"single": {"strategy": "single"}, "dataparallel": {"strategy": "dataparallel"}, "ddp": {"strategy": "ddp"}}
    checked = reading.parse(CPU | {"rows": rows})
    assert [row.hardware.processes for row in checked.rows.values()] == [1, 1, 2]
    assert {row.hardware.threads for row in checked.rows.values()} == {1}


def test_mixed_precision_is_bf16_on_a_cpu():
    checked = reading.parse(CPU | {"rows": {"x": {"strategy": "ddp_amp"}}})
    assert checked.rows["x"].precision == "bf16"


@pytest.mark.parametrize(
    ("hardware", "message"),
    [
        ({"device": "cpu", "processes": 4096}, r"processes: 4096, but there are \d+ CPU cores here"),
        ({"device": "cpu", "processes": 1, "threads": 4096}, "threads: 1 processes of 4096 threads need more"),
        ({"device": "cpu", "backend": "nccl"}, "backend: nccl works between GPUs only"),
    ],
)
def test_more_than_the_machine_has_is_refused(hardware, message):
    checked = reading.parse({"hardware": hardware, "rows": {"x": {"strategy": "ddp"}}})
    with pytest.raises(BadInput, match=message):
        checked.rows["x"].settings()


@pytest.mark.parametrize(
    ("version", "why"),
    [
        (
            "cuda: Optional[str] = None",
            r"PyTorch is its CPU build\)\. .* or install its build for CUDA: make setup TORCH=cuda\.",
        ),
        ("cuda: Optional[str] = '13.0'", r"no GPU or driver is visible\)\. Set it to cpu or auto\."),
    ],
)
def test_no_gpu_is_no_traceback(monkeypatch, tmp_path, version, why):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(version)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    checked = reading.parse({"hardware": {"device": "cuda"}, "rows": {"x": {"strategy": "ddp"}}})
    with pytest.raises(BadInput, match=rf"device: cuda is asked for, but no GPU can be used here \({why}"):
        checked.rows["x"].settings()


def test_a_row_may_have_all_cores_in_one_process(monkeypatch):
    rows = {"single": {"strategy": "single"}, "every": {"strategy": "single", "threads": "all"}}
    rows |= {"both": {"strategy": "ddp", "threads": "all"}, "ddp": {"strategy": "ddp"}}
    asked = {"device": "cpu", "processes": 2}
    monkeypatch.setattr("lockstep.config.machine.cpu_cores", lambda: 8)
    monkeypatch.setattr("lockstep.config.row.cpu_cores", lambda: 8)
    checked = reading.parse({"rows": rows, "hardware": asked})
    used = {name: (row.hardware.processes, row.hardware.threads) for name, row in checked.rows.items()}
    assert used == {"single": (1, 4), "every": (1, 8), "both": (2, 4), "ddp": (2, 4)}
    assert not checked.rows["every"].unavailable
    monkeypatch.setattr("lockstep.config.machine.visible_gpus", lambda: 2)
    on_gpus = reading.parse({"rows": rows}).rows
    assert on_gpus["every"].unavailable == "threads: all gives a row all cores of a CPU, but here GPUs train"
    assert not on_gpus["single"].unavailable


def test_repetitions_that_are_decided_on_follow_the_same_order():
    rows = {name: {"strategy": "single"} for name in ("a", "b", "c", "d", "e")}
    auto, three = (reading.parse({"rows": rows, "repeats": repeats}) for repeats in ("auto", 3))
    first = [(row.name, repeat) for row, repeat in auto.order[:15]]
    assert first == [(row.name, repeat) for row, repeat in three.order]
    assert (list(auto.first_repetitions), auto.repetitions[-1]) == ([1, 2], configuration.MOST_BLOCKS)


def test_trainings_come_in_blocks_that_more_repetitions_leave_as_they_are():
    rows = {name: {"strategy": "single"} for name in ("a", "b", "c", "d", "e")}
    order = reading.parse({"rows": rows, "repeats": 3}).order
    blocks = [[row.name for row, repeat in order if repeat == number] for number in (1, 2, 3)]
    assert [repeat for _, repeat in order] == [1] * 5 + [2] * 5 + [3] * 5
    assert all(sorted(block) == sorted(rows) for block in blocks)
    assert len(set(map(tuple, blocks))) > 1
    more = reading.parse({"rows": dict(reversed(rows.items())), "repeats": 5}).order
    assert [(row.name, repeat) for row, repeat in more[:15]] == [(row.name, repeat) for row, repeat in order]


@pytest.mark.parametrize("labels", [[0, 1], ["0", 1], "[0, 1]"])
def test_labels_may_be_numbers(labels):
    assert reading.parse({"data": {"labels": labels}}).data.labels == ["0", "1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__use_yte__: true", "c.yaml: __use_yte__ would run Python from this file. Remove that line."),
        ("[" * 10_000, "c.yaml: not valid YAML"),
        (f"repeats: {'9' * 5000}", "c.yaml: not valid YAML: Exceeds the limit"),
        ("data: {limit: 8}\nrepeats: 2\ndata: {limit: 9}", "c.yaml: not valid YAML: the key data occurs twice"),
        ("rows: {single: {strategy: single, strategy: ddp}}", "c.yaml: not valid YAML: the key strategy occurs twice"),
        ("rows: {1: {strategy: single}}", "c.yaml: rows.1: YAML does not read this name as text. Put it in quotes."),
        ("rows: {2026-01-01: {strategy: single}}", "2026-01-01: YAML reads it as a date. If it is text, put"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(BadInput, match=re.escape(message)):
        reading.read([tmp_path / "c.yaml"])


def test_gpus_are_chosen_by_their_numbers(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("lockstep.config.machine.visible_gpus", lambda: 4)
    rows = {name: {"strategy": name} for name in ("single", "ddp", "dataparallel")} | {
        "one": {"strategy": "ddp", "gpus": [1]}
    }
    checked = reading.parse({"hardware": {"gpus": [3, 2]}, "rows": rows})
    used = {name: (row.hardware.devices, row.hardware.gpus) for name, row in checked.rows.items()}
    assert used == {"single": (1, [2]), "ddp": (2, [2, 3]), "dataparallel": (2, [2, 3]), "one": (1, [1])}
    assert selection([2, 3]) == {"CUDA_VISIBLE_DEVICES": "2,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert selection(None) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # or NVML would be asked of others


def test_keys_of_yaml_may_be_merged(tmp_path):
    text = "rows:\n  single: &same {strategy: single, precision: bf16}\n  again: {<<: *same, precision: fp32}\n"
    (tmp_path / "c.yaml").write_text(text)
    rows = reading.read([tmp_path / "c.yaml"]).rows
    assert [rows[name].precision for name in ("single", "again")] == ["bf16", "fp32"]


def test_ranks_on_one_gpu_are_one_device():
    shape = {"devices": 2, "processes": 2, "gpu_count": 1, "nodes": 1}
    assert device_count(shape) == 1
    assert device_count(shape | {"gpu_count": 2, "nodes": 3}) == 6
    assert device_count(shape | {"gpu_count": 0}) == 2  # on a CPU


@pytest.mark.parametrize(("device", "gpus", "taken"), [("auto", 2, 1), ("cuda", 2, 1), ("cpu", 2, 0), ("auto", 0, 0)])
def test_where_gpus_are_their_configuration_is_taken(monkeypatch, capsys, device, gpus, taken):
    monkeypatch.delenv(reading.DECIDED, raising=False)
    monkeypatch.setattr(reading, "visible_gpus", lambda: gpus)
    assert reading.for_gpus(device) == ["config/gpu.yaml"] * taken
    assert ("so config/gpu.yaml is used" in capsys.readouterr().err) == taken
    monkeypatch.setenv(reading.DECIDED, "no" if taken else "yes")  # as on the machine that sent this job
    assert reading.for_gpus(device) == ["config/gpu.yaml"] * (not taken)


@pytest.mark.parametrize(
    ("visible", "asked", "message"),
    [
        (None, {"gpus": [3, 7]}, r"hardware\.gpus: \[7\] can't be used here; the GPUs here are 0, 1, 2, 3"),
        ("2,3", {"gpus": [1]}, r"\[1\] can't be used here; the GPUs here are 2, 3"),
        (None, {"gpus": [1, 2], "processes": 3}, r"processes: 3, but there are 2 GPUs here"),
        (None, {"gpus": [1], "device": "cpu"}, r"gpus: \[1\] are asked for, but this runs on the CPU"),
        (None, {"gpus": [1, 1]}, r"gpus"),
        (None, {"gpus": []}, r"gpus"),
    ],
)
def test_gpus_that_can_not_be_had_are_named(monkeypatch, visible, asked, message):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("lockstep.config.machine.visible_gpus", lambda: 4)
    with pytest.raises(BadInput, match=message):
        _ = reading.parse({"hardware": asked, "rows": {"x": {"strategy": "ddp"}}}).rows["x"].hardware


def test_gpus_of_unlike_kinds_train_together_only_where_that_is_asked_for(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("lockstep.config.machine.visible_gpus", lambda: 3)
    monkeypatch.setattr("lockstep.config.machine.cpu_cores", lambda: 8)
    names = ["T4", "A100", "A100"]
    monkeypatch.setattr("lockstep.config.machine.gpu_kinds", lambda numbers: sorted({names[n] for n in numbers}))

    def used(**asked) -> int:
        return reading.parse({"hardware": asked, "rows": {"x": {"strategy": "ddp"}}}).rows["x"].hardware.devices

    with pytest.raises(BadInput, match=r"GPUs of different models would train together \(A100, T4\)"):
        used()
    assert used(gpus=[1, 2]) == 2
    assert used(processes=1) == 1
    assert used(mixed_gpus=True) == 3


def test_a_first_look_has_a_folder_of_its_own():
    quick = reading.read([DEFAULT, DEFAULT.with_name("quick.yaml")])
    assert (quick.results.as_posix(), list(quick.rows)) == ("results/quick", ["single", "ddp"])
    assert reading.read([DEFAULT]).results.as_posix() == "results"
