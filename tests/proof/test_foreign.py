"""Somebody else's checkpoint is read as values only, in any nesting, and must have all tensors of the given model."""

import io
import json
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from lockstep.errors import BadInput
from lockstep.model import convnets, models, own
from lockstep.proof import foreign
from tests.conftest import PROJECT

SIZES = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
TEXTS = "text,label\nab,good\nba,bad\nabab,good\nbb,bad\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A classifier's folder, for texts of the letters a and b."""
    folder = tmp_path_factory.mktemp("model")
    labels = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    torch.manual_seed(1)
    BertForSequenceClassification(BertConfig(**SIZES, **labels)).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##b"]))
    BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def theirs(model):
    """Other weights of that model."""
    return {name: tensor + 0.5 for name, tensor in load_file(model / "model.safetensors").items()}


def written(kind: str, state: dict, folder):
    """A checkpoint of this kind, as a user's script saves it."""
    file = folder / "theirs.pt"
    match kind:
        case "state dict":
            torch.save(state, file)
        case "DistributedDataParallel":
            torch.save({f"module.{name}": tensor for name, tensor in state.items()}, file)
        case "compiled, in an epoch's dict":
            inner = {f"_orig_mod.{name}": tensor for name, tensor in state.items()}
            optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}
            torch.save({"model": inner, "ep": 3, "optimizer": optimizer, "best": 0.5}, file)
        case "safetensors":
            file = file.with_suffix(".safetensors")
            save_file(state, file)
        case "half, older":
            old = {name: tensor.half() for name, tensor in state.items()}
            torch.save(old | {"bert.embeddings.position_ids": torch.arange(512)[None]}, file)
        case "distributed checkpoint":
            file = folder / "dcp"
            optimizer = {"state": {"a": {"exp_avg": torch.ones(2)}}}
            dcp.save({"model": state, "optim": optimizer}, checkpoint_id=file, no_dist=True)
        case "folder of transformers'":
            file = folder / "hf"
            file.mkdir()
            torch.save(state, file / "pytorch_model.bin")
    return file


KINDS = ("state dict", "DistributedDataParallel", "compiled, in an epoch's dict", "safetensors")
KINDS += ("distributed checkpoint", "folder of transformers'")


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_becomes_the_models(kind, model, theirs, tmp_path):
    foreign.convert(written(kind, theirs, tmp_path), model, tmp_path / "made", None)
    made = load_file(tmp_path / "made" / "model.safetensors")
    assert made.keys() == theirs.keys()
    assert all(torch.equal(made[name], theirs[name]) for name in theirs)
    assert (tmp_path / "made" / "tokenizer_config.json").is_file()


def test_half_precision_and_what_older_versions_stored_are_told(model, theirs, tmp_path):
    notes = foreign.convert(written("half, older", theirs, tmp_path), model, tmp_path / "made", None)
    assert notes == ["weights in float16 are converted to float32"]
    made = load_file(tmp_path / "made" / "model.safetensors")
    assert all(torch.equal(made[name], theirs[name].half().float()) for name in theirs)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda state: {name: state[name] for name in state if "classifier" not in name}, "lacks classifier.weight"),
        (lambda state: state | {"classifier.bias": torch.ones(3)}, r"classifier.bias is \[3\], but \[2\] in the model"),
        (lambda state: {"model": state, "ema": state}, "holds such a model 2 times, under ema., model."),
        (
            lambda state: state | {f"module.{name}": tensor + 1 for name, tensor in state.items()},
            "holds two such models that differ, as ",
        ),
        (
            lambda state: state | {"classifier.weight": (100 * state["classifier.weight"]).to(torch.int8)},
            "classifier.weight is int8, .* Dequantise the weights",
        ),
        (lambda state: state | {"classifier.bias": torch.tensor([0.0, torch.nan])}, "holds nan or infinity"),
        (
            lambda state: state | {"classifier.weight": state["classifier.weight"].to_sparse()},
            r"theirs.pt: classifier.weight is a tensor sparse or quantised\. Save it as a dense tensor",
        ),
        (
            lambda state: state | {"classifier.weight": torch.empty(2, 8, device="meta")},
            r"theirs.pt: classifier.weight is a tensor without values \(meta\)",
        ),
        (
            lambda state: state | {f"module.{name}": tensor.half() for name, tensor in state.items()},
            "holds two such models that differ, as ",
        ),
        (
            lambda state: (
                state
                | {"classifier.weight": state["classifier.weight"].to(torch.float8_e4m3fn)}
                | {"classifier.weight_scale_inv": torch.full((1,), 0.1)}
            ),
            r"theirs.pt: classifier.weight is a tensor in 8 bits, whose scale is stored elsewhere\. Dequantise",
        ),
        (lambda state: {"encoder.weight": torch.ones(2)}, "holds no tensor called bert"),
        (lambda state: {}, "holds no tensor called bert"),
        (lambda state: torch.nn.Linear(2, 2), "can't be read as tensors only"),
    ],
)
def test_what_is_not_that_model_is_refused_and_nothing_is_made(change, reason, model, theirs, tmp_path):
    torch.save(change(theirs), tmp_path / "theirs.pt")
    with pytest.raises(BadInput, match=reason):
        foreign.convert(tmp_path / "theirs.pt", model, tmp_path / "made", None)
    assert not (tmp_path / "made").exists()


def test_of_several_checkpoints_of_deepspeed_the_latest_is_read(model, theirs, tmp_path):
    """Those of ZeRO stage 0 are read by themselves, without DeepSpeed's converter."""
    for number, tag in enumerate(("global_step10", "global_step20")):
        (tmp_path / "engine" / tag).mkdir(parents=True)
        state = {name: tensor + number for name, tensor in theirs.items()}
        torch.save({"module": state}, tmp_path / "engine" / tag / "mp_rank_00_model_states.pt")
    (tmp_path / "engine" / "latest").write_text("global_step20")
    foreign.convert(tmp_path / "engine", model, tmp_path / "made", None)
    made = load_file(tmp_path / "made" / "model.safetensors")
    assert all(torch.equal(made[name], theirs[name] + 1) for name in theirs)


def test_of_several_files_with_one_model_none_is_taken_by_its_name(model, theirs, tmp_path):
    (tmp_path / "both").mkdir()
    save_file(theirs, tmp_path / "both" / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in theirs.items()}, tmp_path / "both" / "model_ema.safetensors")
    with pytest.raises(BadInput, match=r"both: holds \S+ in model_ema\.safetensors and, with other values, in another"):
        foreign.convert(tmp_path / "both", model, tmp_path / "made", None)
    save_file(theirs, tmp_path / "both" / "model_ema.safetensors")
    foreign.convert(tmp_path / "both", model, tmp_path / "made", None)


def test_tied_weights_that_differ_are_not_of_that_model(tmp_path):
    sizes = {"vocab_size": 8, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
    tied = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    tied.save_pretrained(tmp_path / "tied")
    state = tied.state_dict()
    torch.save(state, tmp_path / "theirs.pt")
    assert foreign.convert(tmp_path / "theirs.pt", tmp_path / "tied", tmp_path / "made", None) == []
    torch.save(state | {"lm_head.weight": state["lm_head.weight"] + 1}, tmp_path / "theirs.pt")
    with pytest.raises(BadInput, match=r"transformer\.wte\.weight and lm_head\.weight differ, but are one tensor"):
        foreign.convert(tmp_path / "theirs.pt", tmp_path / "tied", tmp_path / "other", None)


@pytest.mark.parametrize("labels", [None, ["bad", "good"]])
def test_weights_are_not_rounded_to_the_precision_in_the_folder_s_configuration(tmp_path, labels):
    sizes = SIZES | {"num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(1)
    llama = LlamaForSequenceClassification(LlamaConfig(**sizes))
    state = {name: tensor.clone() for name, tensor in llama.state_dict().items()}
    llama.bfloat16().save_pretrained(tmp_path / "half")
    save_file(state, tmp_path / "theirs.safetensors")
    foreign.convert(tmp_path / "theirs.safetensors", tmp_path / "half", tmp_path / "made", labels)
    made = load_file(tmp_path / "made" / "model.safetensors")
    assert all(torch.equal(made[name], state[name]) for name in state)


def test_weights_of_a_segmentation_make_a_segmentation(tmp_path):
    (tmp_path / "unet").mkdir()
    unet = own.initialise(convnets.NAMES["unet"], {"channels": 3, "classes": 2}, 0)
    own.save(unet, tmp_path / "unet", ["ground", "thing"])
    (tmp_path / "unet" / "segments.json").write_text(json.dumps({"labels": ["ground", "thing"]}))
    theirs = {name: tensor + 1 for name, tensor in unet.state_dict().items()}
    torch.save(theirs, tmp_path / "theirs.pt")
    foreign.convert(tmp_path / "theirs.pt", tmp_path / "unet", tmp_path / "made", None)
    assert models.task_name(tmp_path / "made") == "image-segmentation"


class Harmful:
    def __reduce__(self):
        return open, ("ran", "w")


def test_nothing_that_stands_in_a_checkpoint_is_run(model, theirs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(theirs | {"x": Harmful()}, "theirs.pt")
    folder = written("distributed checkpoint", theirs, tmp_path)
    index = pickle.loads((folder / ".metadata").read_bytes())
    index.planner_data = Harmful()
    stream = io.BytesIO()
    pickle.dump(index, stream)
    (folder / ".metadata").write_bytes(stream.getvalue())
    for file in (tmp_path / "theirs.pt", folder):
        with pytest.raises(BadInput, match="can't be read as tensors only"):
            foreign.convert(file, model, tmp_path / "made", None)
    assert not (tmp_path / "ran").exists()


def script(name: str, *words) -> subprocess.CompletedProcess:
    command = [sys.executable, f"workflow/scripts/{name}.py", *map(str, words)]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)


def test_any_saved_weights_are_tested_and_predict(model, theirs, tmp_path):
    """The report is about these weights: a head that always says "good" is right for two of four texts."""
    always = {name: torch.zeros_like(tensor) for name, tensor in theirs.items()}
    always["classifier.bias"] = torch.tensor([0.0, 5.0])
    weights = written("compiled, in an epoch's dict", always, tmp_path)
    (tmp_path / "texts.csv").write_text(TEXTS)
    asked = ["--model", model, "--weights", weights]
    out = tmp_path / "out"
    columns = ["--set=data.text=text", "--set=data.label=label"]
    tested = script("test", *asked, "--data", tmp_path / "texts.csv", "--output", out, *columns)
    assert tested.returncode == 0, tested.stderr
    assert "support 4, accuracy 0.5000, macro_f1 0.3333" in tested.stdout
    lines = (out / "test" / "predictions.csv").read_text(encoding="utf-8-sig").splitlines()
    assert lines[0] == "row,text,truth,predicted,p_bad,p_good"
    assert lines[2].startswith("3,ba,bad,good,0.0066")
    said = script("predict", *asked, "--text", "ab")
    assert said.returncode == 0, said.stderr
    assert "good" in said.stdout
    assert "0.993" in said.stdout
    # With numbers as labels, and new names for the classes: the same report, and a note on which is which.
    (tmp_path / "numbers.csv").write_text(TEXTS.replace("good", "1").replace("bad", "0"))
    numbered = script("test", *asked, "--data", tmp_path / "numbers.csv", *columns)
    assert "labels that are numbers are taken for the model's classes: 0 is bad, 1 is good" in numbered.stderr
    assert "accuracy 0.5000" in numbered.stdout
    # In another order, data.labels says what the numbers are.
    other_order = script("test", *asked, "--data", tmp_path / "numbers.csv", *columns, "--set=data.labels=[good, bad]")
    assert "labels that are numbers are taken for the model's classes: 0 is good, 1 is bad" in other_order.stderr
    (tmp_path / "other.csv").write_text(TEXTS.replace("good", "nice"))
    refused = script("test", *asked, "--data", tmp_path / "other.csv", *columns)
    assert refused.returncode == 2
    assert "label 'nice' is not one of bad, good" in refused.stderr
    renamed = script("test", *asked, "--labels", "bad,nice", "--data", tmp_path / "other.csv", *columns)
    assert "accuracy 0.5000" in renamed.stdout, renamed.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_tested_and_predicts(kind, model, theirs, tmp_path):
    always = {name: torch.zeros_like(tensor) for name, tensor in theirs.items()}
    always["classifier.bias"] = torch.tensor([0.0, 5.0])
    weights = written(kind, always, tmp_path)
    (tmp_path / "texts.csv").write_text(TEXTS)
    asked = ["--model", model, "--weights", weights]
    columns = ["--set=data.text=text", "--set=data.label=label"]
    tested = script("test", *asked, "--data", tmp_path / "texts.csv", *columns)
    assert "support 4, accuracy 0.5000, macro_f1 0.3333" in tested.stdout, tested.stderr
    said = script("predict", *asked, "--text", "ab")
    assert "0.993" in said.stdout, said.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["test"], "Give a run's folder, or --model FOLDER with --data FILE."),
        (["test", "--model", "."], "--model needs --data FILE"),
        (["test", "--model", ".", "--data", "no.csv"], "--data: no.csv does not exist"),
        (["convert", "--model", "."], "or --model FOLDER, --weights FILE and --output FOLDER."),
        (["convert", "--model", ".", "--weights", "no.pt", "--output", "tests"], "--output: tests exists already"),
        (["convert", "--model", ".", "--weights", "no.pt", "--output", "made"], "is not a model folder"),
        (
            ["predict", "--weights", "no.pt", "--text", "x"],
            "name the folder of the model that they belong to by --model",
        ),
        (["predict", "--model", ".", "--labels", "a", "--text", "x"], "--labels: a: give at least two different names"),
    ],
)
def test_what_is_missing_is_named(words, reason):
    refused = script(*words)
    assert refused.returncode == 2
    assert reason in refused.stderr
