"""Heads and padding tokens of pretrained classifiers, in the variants that users save."""

import numpy as np
import pytest
import torch
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForSequenceClassification,
    XLNetConfig,
    XLNetForSequenceClassification,
    pipeline,
)

from lockstep.data.tokens import Tokens
from lockstep.errors import BadInput
from lockstep.files import read_json
from lockstep.model import encoders, models, padding
from lockstep.tasks._classification import probabilities
from lockstep.tasks.text_classification import Task
from tests.data.test_data import scratch

TEXTS = ["a good day it was", "bad", "so good and so bad a day", "it was bad"] * 3
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def tokenizer_of(folder, **names):
    """A tokenizer of whole words; `names` are its special tokens."""
    from tokenizers import Tokenizer, pre_tokenizers, processors
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    special = list(dict.fromkeys(names.values()))
    words = sorted({word for text in TEXTS for word in text.split()})
    vocabulary = {word: number for number, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(kinds.WordLevel(vocabulary, unk_token=names["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if "sep_token" in names:
        begin, end = names["cls_token"], names["sep_token"]
        pairs = [(begin, vocabulary[begin]), (end, vocabulary[end])]
        tokenizer.post_processor = processors.TemplateProcessing(f"{begin} $A {end}", special_tokens=pairs)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.save_pretrained(folder)
    return fast


BERTS = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
BARTS = {"cls_token": "<s>", "bos_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>", "eos_token": "</s>"}
BARTS |= {"unk_token": "<unk>"}


def a_bert(folder, **settings):
    torch.manual_seed(3)
    config = BertConfig(vocab_size=len(tokenizer_of(folder, **BERTS)), **SMALL, **settings)
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    return model


def loaded(folder, labels, notes=None):
    """A saved model as `prepare` takes it, with its tokenizer."""
    wanted = scratch(name=str(folder))
    tokenizer = encoders.make_tokenizer(wanted, TEXTS, 16)
    model = encoders.initialise(wanted, tokenizer, labels, 16, 0, [] if notes is None else notes, TEXTS[0])
    return model, tokenizer


def samples(tokenizer, texts=TEXTS) -> Tokens:
    ids = tokenizer(texts)["input_ids"]
    lengths = np.array([len(each) for each in ids])
    return Tokens(np.concatenate(ids), lengths, np.zeros(len(ids), np.int64), tokenizer.pad_token_id)


def scores(model, tokenizer) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**tokenizer(TEXTS, padding=True, return_tensors="pt", return_token_type_ids=False)).logits


@pytest.mark.parametrize("own", [("good", "bad", "so so"), ("GOOD", " bad", "So So")])
def test_a_head_for_the_same_labels_is_put_into_their_order(tmp_path, own):
    """Otherwise the classifier would start with the labels swapped."""
    saved, notes = a_bert(tmp_path, id2label=dict(enumerate(own)), label2id={n: i for i, n in enumerate(own)}), []
    model, tokenizer = loaded(tmp_path, ["bad", "good", "so so"], notes)
    assert torch.equal(scores(model, tokenizer), scores(saved, tokenizer)[:, [1, 0, 2]])
    assert notes == [f"the head of {tmp_path} is reordered from {', '.join(own)} to bad, good, so so"]
    assert model.config.id2label == {0: "bad", 1: "good", 2: "so so"}


def test_a_head_in_the_right_order_stays_without_a_word(tmp_path):
    saved, notes = a_bert(tmp_path, id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1}), []
    model, tokenizer = loaded(tmp_path, ["bad", "good"], notes)
    assert torch.equal(scores(model, tokenizer), scores(saved, tokenizer))
    assert notes == []


@pytest.mark.parametrize(
    ("own", "has"),
    [
        ({}, "labels without names"),
        ({"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}, "the labels no, yes"),
    ],
)
def test_a_head_for_other_labels_of_the_same_number_is_replaced(tmp_path, own, has):
    saved, notes = a_bert(tmp_path, **own), []
    model, _ = loaded(tmp_path, ["bad", "good"], notes)
    assert notes == [f"{tmp_path} ends in a head for {has}, and the data has bad, good: a new head replaces it"]
    assert not torch.equal(model.classifier.weight, saved.classifier.weight)
    assert 0 < model.classifier.weight.std() < 0.1
    body = {name: value for name, value in saved.state_dict().items() if name.startswith("bert.")}
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in body.items())
    assert models.hash_weights(model.state_dict()) == models.hash_weights(
        loaded(tmp_path, ["bad", "good"])[0].state_dict()
    )


@pytest.mark.parametrize("kind", ["multi_label_classification", "regression"])
def test_a_model_for_another_kind_of_answer_says_afterwards_what_it_was_trained_for(tmp_path, kind):
    """transformers' pipeline follows config.json, which made it apply a sigmoid to each score."""
    notes = []
    a_bert(tmp_path / "own", problem_type=kind, num_labels=1 if kind == "regression" else 2)
    model, tokenizer = loaded(tmp_path / "own", ["bad", "good"], notes)
    assert f"own was made for {kind.replace('_', ' ')}; here it is trained to give each sample one label" in notes[0]
    model.save_pretrained(tmp_path / "new"), tokenizer.save_pretrained(tmp_path / "new")
    answer = pipeline("text-classification", str(tmp_path / "new"), top_k=None)([TEXTS[0]])[0]
    expected = dict(zip(["bad", "good"], scores(model, tokenizer)[0].softmax(dim=0).tolist(), strict=True))
    assert {each["label"]: each["score"] for each in answer} == pytest.approx(expected)
    assert read_json(tmp_path / "new" / "config.json")["problem_type"] == "single_label_classification"


def gpt2(folder, of_model, of_tokenizer):
    torch.manual_seed(3)
    names = {"unk_token": "<|unk|>", "eos_token": "<|end|>", "mask_token": "<|pad|>"}
    tokenizer = tokenizer_of(folder, **names | ({"pad_token": of_tokenizer} if of_tokenizer else {}))
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=32, n_embd=16, n_layer=1, n_head=2, num_labels=2, pad_token_id=of_model
    )
    GPT2ForSequenceClassification(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("of_model", "of_tokenizer", "pads", "said"),
    [
        (2, None, "<|pad|>", "pads with '<|pad|>', as its config.json says; its tokenizer named none"),
        (None, "<|pad|>", "<|pad|>", None),
        (None, None, "<|end|>", "and its tokenizer name no padding token, so '<|end|>' is used"),
        (2, "<|unk|>", "<|pad|>", "pads with '<|pad|>', as its config.json says; its tokenizer named '<|unk|>'"),
        (-1, "<|pad|>", "<|pad|>", None),
        (2, "<|pad|>", "<|pad|>", None),
    ],
)
def test_a_model_and_its_tokenizer_pad_alike(tmp_path, of_model, of_tokenizer, pads, said):
    """A classifier that reads the last token before the padding would otherwise read a padding token."""
    gpt2(tmp_path, of_model, of_tokenizer)
    notes = []
    model, tokenizer = loaded(tmp_path, ["bad", "good"], notes)
    assert tokenizer.pad_token == pads
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert [note for note in notes if "pad" in note.removeprefix(str(tmp_path))] == (
        [f"{tmp_path} {said}"] if said else []
    )
    assert padding.influence(model, samples(tokenizer)) == 0


@pytest.mark.parametrize("of_model", [2, None, -1])
@pytest.mark.parametrize("of_tokenizer", [None, "<|unk|>"])
def test_texts_for_a_model_from_elsewhere_are_padded_as_it_expects(tmp_path, of_model, of_tokenizer):
    """Each has the scores that it has alone, though a batch pads it."""
    gpt2(tmp_path, of_model, of_tokenizer)
    model, task = models.load(tmp_path).eval(), Task()
    texts = task.samples_of(tmp_path, TEXTS, model)
    with torch.no_grad():
        alone = [
            model(torch.from_numpy(texts.batch(np.array([at]), texts.lengths[at])["input_ids"])) for at in range(4)
        ]
    expected = torch.cat([outputs.logits for outputs in alone]).softmax(dim=1)
    assert np.allclose(probabilities(model, texts)[:4], expected, atol=1e-6)


def test_a_model_from_elsewhere_that_can_t_take_the_texts_is_refused(tmp_path):
    tokenizer = tokenizer_of(tmp_path / "xlnet", **BERTS)
    torch.manual_seed(3)
    sizes = {"vocab_size": len(tokenizer), "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16, "pad_token_id": 0}
    XLNetForSequenceClassification(XLNetConfig(**sizes)).save_pretrained(tmp_path / "xlnet")
    a_bert(tmp_path / "short", max_position_embeddings=5)
    for name, said in (("xlnet", "padding changes a text's scores"), ("short", "can't take a text of 9 tokens")):
        model = models.load(tmp_path / name).eval()
        with pytest.raises(BadInput, match=said):
            Task().samples_of(tmp_path / name, TEXTS, model)


def test_without_any_token_to_pad_with_it_is_said(tmp_path):
    class Nothing:
        pad_token_id = eos_token = unk_token = None

        def __len__(self):
            return 9

    with pytest.raises(BadInput, match=r"neither its config\.json \(pad_token_id\) nor its tokenizer has a padding"):
        padding.agree(GPT2Config(pad_token_id=None), Nothing(), "mine", [])


@pytest.mark.parametrize("kind", ["bart", "t5", "roberta"])
def test_models_that_look_for_marks_of_real_texts_are_taken(tmp_path, kind):
    """BART and T5 classify by the end-of-text token; RoBERTa counts positions from its padding token."""
    size = len(tokenizer_of(tmp_path, **BARTS))
    tokens = {"vocab_size": size, "pad_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(3)
    if kind == "bart":
        layers = dict.fromkeys(("encoder_layers", "decoder_layers"), 1) | {"d_model": 16, "max_position_embeddings": 32}
        heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
        wide = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 16)
        model = BartForSequenceClassification(BartConfig(**tokens, **layers, **heads, **wide, num_labels=2))
    elif kind == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
        model = T5ForSequenceClassification(T5Config(**tokens, **sizes, decoder_start_token_id=1, num_labels=2))
    else:
        model = RobertaForSequenceClassification(RobertaConfig(**tokens, **SMALL, max_position_embeddings=18))
    model.save_pretrained(tmp_path)
    model, tokenizer = loaded(tmp_path, ["bad", "good"])
    assert padding.influence(model, samples(tokenizer)) == 0


def test_padding_that_shows_is_found(tmp_path):
    """There are several causes: XLNet pads on the left; here a mask is ignored, or the wrong token pads."""
    tokenizer = tokenizer_of(tmp_path, **BERTS)
    torch.manual_seed(3)
    xlnet = XLNetForSequenceClassification(
        XLNetConfig(vocab_size=len(tokenizer), d_model=16, n_layer=1, n_head=2, d_inner=16)
    )
    assert padding.influence(xlnet, samples(tokenizer)) > 0.01

    class Deaf(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(len(tokenizer), 2)

        def forward(self, input_ids, attention_mask):
            return self.embedding(input_ids).mean(dim=1)

    assert padding.influence(Deaf(), samples(tokenizer)) > 0.01
    gpt2(tmp_path, 2, None)
    model, tokenizer = loaded(tmp_path, ["bad", "good"])
    texts = samples(tokenizer)
    texts.pad_id = 0
    assert padding.influence(model, texts) > 0.01


def test_texts_of_one_length_have_no_padding():
    assert padding.influence(None, samples(encoders.character_tokenizer(["ab"], 8), ["ab", "ba"])) == 0
