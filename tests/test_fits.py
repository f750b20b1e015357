"""lockstep fits: the largest micro-batch of a row, counted without a GPU."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import model_type_to_module_name

from lockstep import paths
from lockstep.config import reading
from lockstep.data import plan as planning
from lockstep.errors import BadInput
from lockstep.forecast import foretelling, memory, model
from lockstep.forecast.memory import Peak
from lockstep.model import models
from lockstep.rank import sizing
from tests.conftest import copy_project

GIB = 2**30
BERT = "model_type: bert\nhidden_size: 64\nnum_hidden_layers: 2\nnum_attention_heads: 2\nintermediate_size: 128\n"
LLAMA = BERT.replace("bert", "llama") + "vocab_size: 512\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return copy_project(tmp_path_factory.mktemp("fits"))


def growing(fixed: int, each: int, pieces: float = 1.0):
    """`memory.peaks` of a row whose memory is a straight line; reserved is `pieces` times as much."""

    def peaks(row, shape, sizes, capacity=None, workspace=0):
        found = [Peak(size, fixed + each * size, int(pieces * (fixed + each * size))) for size in sizes]
        return [peak for peak in found if capacity is None or peak.reserved <= capacity]

    return peaks


@pytest.mark.parametrize(
    ("fixed", "each", "pieces"), [(5, 1, 1), (5, 1, 1.3), (0, 7, 1), (23, 1, 1), (30, 1, 1), (1, 30, 1.1)]
)
def test_the_largest_size_fits_and_the_next_does_not(monkeypatch, fixed, each, pieces):
    peaks = growing(fixed * GIB, each * GIB // 10, pieces)
    monkeypatch.setattr(memory, "peaks", peaks)
    tries = []
    monkeypatch.setattr(memory, "peaks", lambda *given, **more: tries.append(given) or peaks(*given, **more))
    largest, counted = memory.largest(None, None, 24 * GIB)
    assert len(tries) < 16
    assert not peaks(None, None, [largest + 1], 24 * GIB)
    assert largest == 0 or peaks(None, None, [largest], 24 * GIB)
    assert memory.line(counted) == (pytest.approx(fixed * GIB, abs=99), pytest.approx(each * GIB / 10, rel=1e-6))


def test_a_row_whose_small_sizes_do_not_grow_is_tried_at_larger_ones(monkeypatch):
    def peaks(row, shape, sizes, capacity=None, workspace=0):  # at small sizes the optimizer needs more than the batch
        found = [Peak(size, bytes_, bytes_) for size in sizes for bytes_ in [max(3 * GIB, size * GIB // 8)]]
        return [peak for peak in found if capacity is None or peak.reserved <= capacity]

    monkeypatch.setattr(memory, "peaks", peaks)
    assert memory.largest(None, None, 24 * GIB)[0] == 192


@pytest.mark.parametrize(
    ("content", "task", "length", "said"),
    [
        ("hidden_size: 8\n", "text-classification", 8, "no key model_type"),
        ("model_type: bart2\n", "text-classification", 8, "has no such model"),
        (LLAMA + "num_key_value_heads: 3\n", "language-modelling", 8, "num_key_value_heads a number that divides"),
        (BERT, "text-classification", 513, "at most 512 tokens"),
        ("model_type: roberta\nmax_position_embeddings: 514\n", "text-classification", 513, "at most 512 tokens"),
        ("model_type: resnet\n", "language-modelling", 8, "has no resnet for language-modelling"),
        (BERT, "image-segmentation", 8, "is not counted"),
        ("- a\n", "text-classification", 8, "expected keys and values"),
        (
            LLAMA + "hidden_sizes: 9\n",
            "language-modelling",
            8,
            "hidden_sizes: no key of a llama",
        ),
        ("model_type: mixtral\n", "language-modelling", 8, "a mixture of experts"),
        (LLAMA + "quantization_config: {bits: 4}\n", "language-modelling", 8, "quantization_config"),
        ("model_type: resnet\n", "image-classification", 8, "takes images of any size"),
    ],
)
def test_a_model_that_is_none_is_refused(tmp_path, content, task, length, said):
    file = tmp_path / "model.yaml"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(BadInput, match=said):
        model.read(file, task, length)


def test_models_whose_positions_begin_after_the_padding_s_number_are_known():
    """Pretended GPUs look nothing up, so that a text which is too long would be counted."""
    kinds = {*auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, *auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}

    def begins_late(kind: str) -> bool:
        folder = Path(transformers.__file__).parent / "models" / model_type_to_module_name(kind)
        sources = [file.read_text(encoding="utf-8") for file in folder.glob("modeling_*.py")]
        words = ("create_position_ids_from_input_ids(", "self.position_embeddings = ")
        return any(all(word in source for word in words) for source in sources)

    assert {kind for kind in kinds if begins_late(kind)} == set(model.AFTER_PADDING)


def test_a_model_by_its_shape_has_the_class_of_its_task(tmp_path):
    file = tmp_path / "model.yaml"
    file.write_text(LLAMA + "rms_norm_eps: 1e-5\n", encoding="utf-8")
    assert model.read(file, "language-modelling", 64).config["architectures"] == ["LlamaForCausalLM"]
    folder = tmp_path / "folder"
    folder.mkdir()
    shape = model.read(file, "text-classification", 64)
    (folder / "config.json").write_text(json.dumps(shape.config), encoding="utf-8")
    assert model.read(folder, "text-classification", 64) == shape
    with pytest.raises(BadInput, match="no such file or folder"):
        model.read(tmp_path / "none", "text-classification", 64)


def test_a_model_is_counted_in_fp32_with_its_tied_weights_once(tmp_path):
    file = tmp_path / "config.json"
    keys = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    keys |= {"intermediate_size": 128, "vocab_size": 512, "tie_word_embeddings": True, "dtype": "bfloat16"}
    file.write_text(json.dumps(keys), encoding="utf-8")
    left_behind = [torch.full((size,), torch.nan) for size in (64, 64 * 64, 512 * 64) for _ in range(8)]
    del left_behind  # an allocator gives such memory out again
    for task, tied in (("language-modelling", True), ("text-classification", False)):
        shape = model.read(file, task, 64)
        file.with_name("config.json").write_text(json.dumps(shape.config), encoding="utf-8")
        counted, real = sizing.untrained(tmp_path, None), models.build(tmp_path)
        assert models.count_parameters(counted) == models.count_parameters(real)
        assert {parameter.dtype for parameter in counted.parameters()} == {torch.float32}
        assert not any(parameter.any() for parameter in counted.parameters())
        if tied:
            assert counted.lm_head.weight is counted.model.embed_tokens.weight
        assert shape.config["pad_token_id"] is not None or task == "language-modelling"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--memory", "24"], "--memory 24: give a number and its unit, as 24GB"),
        (["--memory", "24TB"], "--memory 24TB: give a number and its unit"),
        (["--memory", "1GB"], "--reserve 1.5GB: nothing of 1GB would be left"),
        (["--memory", "8GB", "--gpus", "0"], "--gpus 0: expected at least 1"),
        (["--memory", "8GB"], "--model: name one; results has no data that was prepared"),
        (["--memory", "8GB", "--model", "m.yaml", "--rows", "ddpp"], "--rows ddpp: no such row"),
        (["--memory", "8GB", "--model", "m.yaml", "--set", "hardware.processes=4"], "--gpus says what trains"),
        (["--memory", "8GB", "--model", "m.yaml", "--set", "hardware={nodes: 2}"], "--set hardware.nodes: here --gpus"),
        (["--memory", "8GB", "--model", "m.yaml", "--length", "0"], "--length 0: expected at least 1"),
        (["--memory=8GB", "--model=m.yaml", "--task=image-classification", "--length=9"], "--length: an image has no"),
    ],
)
def test_wrong_arguments_are_refused(place, words, said):
    place.path("m.yaml").write_text(BERT, encoding="utf-8")
    finished = place.script("fits", *words)
    assert finished.returncode == 2
    assert said in finished.stderr
    assert finished.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_guide_s_answer_for_a_7b_with_lora_is_what_the_command_counts(place):
    guide = (paths.PROJECT / "docs" / "guide" / "large.md").read_text(encoding="utf-8")
    section = guide.split("### A 7B with LoRA")[1]
    place.path("qwen.yaml").write_text(section.split("```yaml\n")[1].split("```")[0], encoding="utf-8")
    on_eight = re.search("^    lockstep fits (--model qwen.yaml .*)$", section, re.MULTILINE)[1]
    on_one = on_eight.replace("--gpus 8 --rows fsdp", "--gpus 1 --rows single")
    for words, largest, said in (
        (on_eight, "4", "in {} GiB of tensors"),
        (on_one, "does not fit", "it counts {} GiB for one text"),
    ):
        out = place.script("fits", *words.split()).stdout
        cells = [cell.strip() for cell in re.search("│ (fsdp|single) .*", out)[0].split("│")[1:-1]]
        assert cells[2] == largest
        assert said.format(cells[3]) in section


@pytest.mark.slow
@pytest.mark.ci
def test_rows_are_counted_for_gpus_that_are_not_here(place):
    place.path("m.yaml").write_text(LLAMA, encoding="utf-8")
    asked = ["--model=m.yaml", "--task=language-modelling", "--length", "128", "--memory=140MB", "--reserve=10MB"]
    finished = place.script(
        "fits", *asked, "--gpus=8", "--json=fits.json", "--rows", "ddp", "fsdp", "horovod", "single"
    )
    assert finished.returncode == 1, finished.stderr  # horovod was asked for
    assert finished.stdout.startswith("LlamaForCausalLM, ")
    assert " weights, language-modelling in fp32\n" in finished.stdout
    assert "with 140MB (140 MiB in nvidia-smi), of which 10MB stay free" in finished.stdout
    written = json.loads(place.path("fits.json").read_text(encoding="utf-8"))
    rows = {row["row"]: row for row in written["rows"]}
    assert rows["horovod"]["failed"]
    for name in ("ddp", "fsdp"):
        assert rows[name]["largest"] > 4
        fitting = [step for step in rows[name]["steps"] if step["samples"] <= rows[name]["largest"]]
        assert all(step["allocated"] <= written["capacity"] == 110 * 2**20 for step in fitting)
        assert re.search(rf"{name} +│ +128 │ +{rows[name]['largest']} ", finished.stdout)
    # Shards are smaller than whole weights with their gradients in buckets; activations are the same.
    assert rows["fsdp"]["fixed"] < rows["ddp"]["fixed"]
    assert rows["ddp"]["per_sample"] == pytest.approx(rows["fsdp"]["per_sample"], rel=0.05)


@pytest.mark.slow
@pytest.mark.ci
def test_fsdp_trains_a_model_that_no_gpu_holds_whole(tmp_path):
    file = tmp_path / "deep.yaml"
    keys = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 24, "num_attention_heads": 8}
    keys |= {"model_type": "llama", "vocab_size": 512, "max_position_embeddings": 64}
    file.write_text(json.dumps(keys), encoding="utf-8")
    shape = model.read(file, "language-modelling", 32)
    config = reading.parse({"task": "language-modelling", "train": {"best": "loss"}})
    row = memory.countable(memory.on_gpus(config, 16).rows["fsdp"])
    (peak,) = memory.peaks(row, shape, [1])
    whole = 4 * peak.parameters
    assert peak.allocated < 0.9 * whole  # a byte of each weight's 16, and the layer that computes
    assert memory.peaks(row, shape, [1], capacity=int(0.9 * whole))


@pytest.mark.parametrize(
    ("capacity", "fits", "tries"), [(None, True, 1), (24, True, 1), (20, True, 2), (18, False, 2), (14, False, 1)]
)
def test_a_batch_fits_by_its_segments_or_where_the_allocator_comes_by(monkeypatch, capacity, fits, tries):
    tried = []

    def peaks(row, shape, sizes, capacity=None, workspace=0):  # 15 in tensors, 24 in segments, and 19 do
        tried.append(capacity)
        return [Peak(4, 15 * GIB, 24 * GIB)] if capacity is None or capacity >= 19 * GIB else []

    monkeypatch.setattr(memory, "peaks", peaks)
    found = memory.of_batch(None, None, 4, None if capacity is None else capacity * GIB)
    assert found == (Peak(4, 15 * GIB, 24 * GIB), fits)
    assert len(tried) == tries


def test_rows_of_any_machine_are_counted_as_if_it_had_gpus():
    hardware = {"device": "cpu", "processes": 2, "threads": 1, "oversubscribe": True}
    rows = {"own": {"strategy": "ddp", "accumulation": 3}, "pp": {"strategy": "pp", "stages": 2}}
    config = reading.parse({"hardware": hardware, "train": {"global_batch": 48}, "rows": rows})
    there = memory.on_gpus(config, 4)
    assert there.rows.keys() == config.rows.keys()
    own = memory.countable(there.rows["own"])
    assert (own.hardware.device, own.hardware.processes, own.hardware.gpu_count) == ("cuda", 4, 4)
    assert own.train.global_batch == 4 * 3
    with pytest.raises(BadInput, match="each stage needs a different amount"):
        memory.countable(there.rows["pp"])


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (None, {"fsdp": (2, 24), "four": (4, 12), "single": (1, 48)}),
        (2, {"fsdp": (2, 24), "four": (2, 24), "single": (1, 48)}),
        (4, {"fsdp": (4, 12), "four": (4, 12), "single": (1, 48)}),
    ],
)
def test_a_row_is_counted_on_as_many_gpus_as_its_time_is_foretold_for(tmp_path, monkeypatch, gpus, expected):
    hardware = {"device": "cpu", "processes": 2, "threads": 1, "oversubscribe": True}
    rows = {name: {"strategy": name} for name in ("fsdp", "single")} | {"four": {"strategy": "fsdp", "processes": 4}}
    config = reading.parse({"hardware": hardware, "train": {"global_batch": 48}, "rows": rows})
    file = paths.plan_file(tmp_path, config.rows["fsdp"].plan_name)
    file.parent.mkdir(parents=True)
    planning.make(np.full(96, 8), global_batch=48, epochs=1, seed=1, batching="plain").save(file)
    counted = {}

    def of_batch(row, shape, samples, capacity):
        counted[row.name] = (row.hardware.devices, samples)
        return Peak(samples, GIB, GIB), True

    monkeypatch.setattr(memory, "of_batch", of_batch)
    monkeypatch.setattr(memory, "read_model", lambda *asked: model.Model({}, 8))
    monkeypatch.setattr(memory.pretended, "variables", lambda number: {})
    memory.of_rows(config, [foretelling.on(row, gpus) for row in config.rows.values()], tmp_path, None)
    assert counted == expected


def test_ranks_that_meet_in_some_steps_only_meet_in_each_that_is_counted():
    hardware = {"device": "cpu", "processes": 2, "threads": 1, "oversubscribe": True}
    rows = {"local": {"strategy": "local_sgd", "every": 16, "local_after": 100}, "ddp": {"strategy": "ddp"}}
    config = reading.parse({"hardware": hardware, "rows": rows})
    counted = {name: memory._settings(row) for name, row in config.rows.items()}
    assert (counted["local"].options["every"], counted["local"].options["local_after"]) == (1, 0)
    assert "every" not in counted["ddp"].options
