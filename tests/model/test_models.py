"""The model: its weights, where they come from, its optimizer groups, its schedule."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lockstep.config import reading
from lockstep.errors import BadInput
from lockstep.model import encoders, models
from lockstep.model.optimizer import make_optimizer, make_schedule
from tests.data.test_data import scratch
from tests.hub import bert

TRAIN = replace(reading.parse({}).train, learning_rate=0.1)
TEXTS = ["今天真开心", "好难过"] * 2  # a character that comes once is not in the vocabulary
LABELS = ["a", "b", "c"]


def built(seed=0, **keys):
    wanted = scratch(**keys)
    return encoders.initialise(wanted, encoders.make_tokenizer(wanted, TEXTS, 16), LABELS, 16, seed)


def test_the_seed_decides_the_weights():
    assert models.hash_weights(built(1).state_dict()) == models.hash_weights(built(1).state_dict())
    assert models.hash_weights(built(1).state_dict()) != models.hash_weights(built(2).state_dict())


def test_a_folder_loads_as_it_was_written(tmp_path):
    model = built()
    model.save_pretrained(tmp_path)
    loaded = models.load(tmp_path, dropout=0.25)
    assert models.hash_weights(loaded.state_dict()) == models.hash_weights(model.state_dict())
    assert {module.p for module in loaded.modules() if isinstance(module, torch.nn.Dropout)} == {0.25}
    assert models.dropouts(loaded) == [0.25]
    assert loaded.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()


def test_every_dropout_is_turned_off_whatever_its_name(tmp_path):
    """ALBERT's `classifier_dropout_prob` once stayed at 0.1 in a trial without dropout."""
    size = {"hidden_size": 8, "embedding_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 9}
    settings = transformers.AutoConfig.for_model("albert", intermediate_size=8, classifier_dropout_prob=0.1, **size)
    model = transformers.AutoModelForSequenceClassification.from_config(settings)
    assert 0.1 in models.dropouts(model)
    model.save_pretrained(tmp_path)
    assert models.dropouts(models.load(tmp_path, dropout=0)) == [0.0]


def test_a_local_pretrained_folder_gets_a_new_head(tmp_path):
    pretrained = built()
    pretrained.save_pretrained(tmp_path)
    encoders.make_tokenizer(scratch(), TEXTS, 16).save_pretrained(tmp_path)
    wanted = scratch(name=str(tmp_path))
    tokenizer = encoders.make_tokenizer(wanted, ["别的"], 16)
    assert len(tokenizer) == pretrained.config.vocab_size
    model = encoders.initialise(wanted, tokenizer, ["x", "y", "z"], 16, 0)
    assert torch.equal(model.bert.embeddings.word_embeddings.weight, pretrained.bert.embeddings.word_embeddings.weight)


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.safetensors"])
def test_the_whole_body_of_a_pretrained_checkpoint_is_taken(tmp_path, weights):
    """The names are those of an old checkpoint that was converted from TensorFlow."""
    write(tmp_path, bert(TEXTS, weights))
    wanted, notes = scratch(name=str(tmp_path)), []
    tokenizer = encoders.make_tokenizer(wanted, ["别的"], 16)
    assert tokenizer.convert_ids_to_tokens(tokenizer("今天 X")["input_ids"]) == ["[CLS]", "今", "天", "[UNK]", "[SEP]"]
    state = encoders.initialise(wanted, tokenizer, LABELS, 16, 0, notes).state_dict()
    held = load_file(tmp_path / weights) if weights.endswith("safetensors") else torch.load(tmp_path / weights)
    body = [name for name in state if name.startswith("bert.")]
    assert len(body) == 39
    assert all(torch.equal(state[name], held[name]) for name in body)
    assert notes == []


def test_what_a_weights_file_lacks_is_said(tmp_path):
    """transformers initialises it at random; a masked language model, for example, has no pooler."""
    write(tmp_path, bert(TEXTS, "model.safetensors"))
    held = load_file(tmp_path / "model.safetensors")
    save_file({name: value for name, value in held.items() if "pooler" not in name}, tmp_path / "model.safetensors")
    wanted, notes = scratch(name=str(tmp_path)), []
    encoders.initialise(wanted, encoders.make_tokenizer(wanted, TEXTS, 16), LABELS, 16, 0, notes)
    assert notes == [
        f"{tmp_path} holds no bert.pooler.dense.weight and 1 more of 39 weights: they are initialised at random"
    ]


def test_weights_of_another_model_are_refused(tmp_path):
    write(tmp_path, bert(TEXTS, "model.safetensors"))
    held = load_file(tmp_path / "model.safetensors")
    save_file({f"other.{name}": value for name, value in held.items()}, tmp_path / "model.safetensors")
    with pytest.raises(BadInput, match=r"holds neither bert\.embeddings\.word_embeddings\.weight nor any"):
        encoders.initialise(scratch(name=str(tmp_path)), None, LABELS, 16, 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda name: None if name == "classifier.weight" else name, r"hold no classifier\.weight\. If"),
        (
            lambda name: f"module.{name}",
            r"hold no bert\.embeddings\.word_embeddings\.weight and \d+ more of its weights",
        ),
    ],
)
def test_a_stored_model_that_lacks_weights_is_not_loaded(tmp_path, change, said):
    """transformers draws those that it does not find at random, and only warns."""
    built().save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    save_file({change(name): value for name, value in held.items() if change(name)}, tmp_path / "model.safetensors")
    with pytest.raises(BadInput, match=said):
        models.load(tmp_path)


def write(folder, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def test_a_head_of_another_size_is_replaced_and_said_so(tmp_path):
    """Any model that was fine-tuned before has such a head."""
    pretrained = built()  # for three labels
    pretrained.save_pretrained(tmp_path)
    wanted, notes = scratch(name=str(tmp_path)), []
    tokenizer = encoders.make_tokenizer(scratch(), TEXTS, 16)
    first, same, other = (encoders.initialise(wanted, tokenizer, ["x", "y"], 16, seed, notes) for seed in (0, 0, 1))
    assert notes[0] == f"{tmp_path} ends in a head of 3 classes, and the data has 2: a new head replaces it"
    assert torch.equal(first.bert.pooler.dense.weight, pretrained.bert.pooler.dense.weight)
    assert first.classifier.weight.shape == (2, 8)
    assert models.hash_weights(first.state_dict()) == models.hash_weights(same.state_dict())
    assert not torch.equal(first.classifier.weight, other.classifier.weight)


def test_a_model_that_does_not_fit_its_tokenizer_or_the_texts_is_refused(tmp_path):
    """Otherwise every row would fail, on a GPU with a message that does not help."""
    built().save_pretrained(tmp_path)
    wanted = scratch(name=str(tmp_path))
    large = encoders.character_tokenizer(["".join(map(chr, range(0x4E00, 0x4F00))) * 2], 16)
    with pytest.raises(BadInput, match=r"has embeddings for \d+ tokens, but its tokenizer has 261"):
        encoders.initialise(wanted, large, LABELS, 16, 0)
    with pytest.raises(BadInput, match=r"can't take a text of 99 tokens .*Lower data\.max_length"):
        encoders.initialise(wanted, encoders.make_tokenizer(scratch(), TEXTS, 99), LABELS, 99, 0)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    """transformers would create one without a vocabulary, to which every word is unknown."""
    built().save_pretrained(tmp_path)
    with pytest.raises(BadInput, match=r"holds no tokenizer|can't be loaded"):
        encoders.make_tokenizer(scratch(name=str(tmp_path)), TEXTS, 16)


def test_code_that_comes_with_a_model_is_neither_run_nor_asked_for(tmp_path, monkeypatch):
    """transformers would ask at the terminal whether to run it."""
    built().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    classes = {"AutoConfig": "evil.Config", "AutoModelForSequenceClassification": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "evil", "auto_map": classes}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.Tok", None]}}))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    wanted = scratch(name=str(tmp_path))
    for attempt in (
        lambda: encoders.make_tokenizer(wanted, TEXTS, 16),
        lambda: encoders.initialise(wanted, encoders.make_tokenizer(scratch(), TEXTS, 16), LABELS, 16, 0),
    ):
        with pytest.raises(BadInput, match="can't be loaded"):
            attempt()
    with pytest.raises(ValueError, match=r"trust_remote_code|does not recognize"):
        models.load(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_body_of_another_size_is_refused(tmp_path):
    built().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 7}))
    with pytest.raises(BadInput, match=r"has another shape than in its config\.json"):
        encoders.initialise(scratch(name=str(tmp_path)), None, LABELS, 16, 0)


def test_a_cut_pretrained_model_is_one_message(tmp_path):
    built().save_pretrained(tmp_path)
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(BadInput, match=r"model\.name: .* can't be loaded: .*"):
        encoders.initialise(scratch(name=str(tmp_path)), None, LABELS, 16, 0)


def test_a_hub_model_is_loaded_at_its_revision(tmp_path, monkeypatch):
    """Lay out the files like a real cache of the hub, so that its library finds them without a network."""
    revision = "2a995a880017c60e4683869e817130d8af548486"
    snapshot = tmp_path / "models--someone--something" / "snapshots" / revision
    pretrained = built()
    pretrained.save_pretrained(snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    tokenizer = encoders.make_tokenizer(scratch(), TEXTS, 16)
    model = encoders.initialise(scratch(name="someone/something", revision=revision), tokenizer, LABELS, 16, 0)
    assert torch.equal(model.bert.pooler.dense.weight, pretrained.bert.pooler.dense.weight)
    with pytest.raises(BadInput, match=r"model\.name: someone/something at revision 0a1b can't be loaded"):
        encoders.initialise(scratch(name="someone/something", revision="0a1b"), tokenizer, LABELS, 16, 0)


def test_a_folder_without_weights_is_named(tmp_path):
    built().config.save_pretrained(tmp_path)
    wanted = scratch(name=str(tmp_path))
    with pytest.raises(BadInput, match="holds no model weights"):
        encoders.initialise(wanted, None, LABELS, 16, 0)


def test_heads_must_divide_the_width():
    with pytest.raises(BadInput, match=r"model\.heads: a hidden_size of 8 can.t be divided into 3 heads"):
        built(heads=3)


def test_biases_and_norms_do_not_decay():
    model = built()
    optimizer = make_optimizer(model, TRAIN)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        bare = name.endswith("bias") or "LayerNorm" in name
        assert decays[id(parameter)] == (0.0 if bare else 0.01), name


@pytest.mark.parametrize(
    ("schedule", "warmup", "rates"),
    [
        ("constant", 2, [0, 0.05, 0.1, 0.1, 0.1]),
        ("linear", 0, [0.1, 0.08, 0.06, 0.04, 0.02]),
        ("linear", 0.4, [0, 0.05, 0.1, 0.1 * 2 / 3, 0.1 / 3]),
        ("cosine", 0, [0.1, 0.0904508, 0.0654508, 0.0345492, 0.0095492]),
        ("polynomial", 1, [0, 0.1, 0.075, 0.05, 0.025]),
    ],
)
def test_schedules(schedule, warmup, rates):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    stepped = make_schedule(optimizer, replace(TRAIN, schedule=schedule, warmup=warmup), 5)
    seen = []
    for _ in range(5):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        stepped.step()
    assert seen == pytest.approx(rates, abs=1e-6)


def test_labels_are_those_that_transformers_takes(tmp_path):
    """Its version 4 left the default names of two labels out of config.json."""
    transformers.BertConfig(vocab_size=8).save_pretrained(tmp_path / "two")
    about = json.loads((tmp_path / "two" / "config.json").read_text())
    about.pop("id2label", None)
    (tmp_path / "two" / "config.json").write_text(json.dumps(about))
    assert models.labels(tmp_path / "two") == ["LABEL_0", "LABEL_1"]
    (tmp_path / "two" / "config.json").write_text(json.dumps(about | {"id2label": {"1": "b", "0": "a"}}))
    assert models.labels(tmp_path / "two") == ["a", "b"]
    (tmp_path / "two" / "config.json").write_text(json.dumps(about | {"id2label": {"0": "score"}}))
    with pytest.raises(BadInput, match="has one output, as for regression, and no classes"):
        models.labels(tmp_path / "two")
