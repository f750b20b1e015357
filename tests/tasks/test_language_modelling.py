"""Language models: packed documents that do not see each other, what can be wrong with texts and models,
and every strategy on them."""

import csv
import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from lockstep.config import reading
from lockstep.data import corpus, documents
from lockstep.data.documents import NO_TARGET, Sequences
from lockstep.errors import BadInput, RunFailed
from lockstep.files import read_json
from lockstep.model import decoders, lora, models
from lockstep.tasks.language_modelling import Task
from tests.conftest import copy_project

SMALL = """
data: {limit: 700, max_length: 24}
model: {hidden_size: 32, layers: 1, heads: 2}
train: {epochs: 2, max_steps: 40, eval_every: 20}
hardware: {device: cpu, processes: 2, threads: 1, timeout: 400, oversubscribe: true}
predict: {count: 2}
profile: {steps: 0}
repeats: 1
retries: 0
rows:
  all_threads: null
  lora: {strategy: recipe, lora: 4}
  lora_zero: {strategy: deepspeed, lora: 4, lora_targets: [q_proj, up_proj]}
  twice: {strategy: trainer, accumulation: 2}
"""
# Enough for a report: what is alone, and what has several ranks.
FEW = """
rows: {lora: null, lora_zero: null, dataparallel: null, ddp_spawn: null, ddp_amp: null, horovod: null, deepspeed: null,
  accelerate: null, trainer: null, fabric: null, fsdp: null, twice: null}
"""
WORKFLOW = ("--cores", "all", "--configfile", "config/language.yaml", "small.yaml")
WORDS = ["雨", "花", "今天", "很好", "走", "在家", "看书", "跑步", "朋友", "来"]


@pytest.fixture(scope="module")
def tokenizer():
    return decoders.byte_pairs((row["text"] for row in corpus.generate(1, 300)), 32)


def llama(vocabulary: int, tied: bool = False, **more) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=tied, use_cache=False, **sizes, **more)
    ).eval()


def gpt2(vocabulary: int) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=vocabulary, n_embd=32, n_layer=1, n_head=2, n_positions=32, use_cache=False)
    return GPT2LMHeadModel(config).eval()


def texts(count: int, seed: int = 0) -> list[str]:
    random = np.random.default_rng(seed)
    return ["".join(random.choice(WORDS, random.integers(2, 9))) for _ in range(count)]


def packed(rows, tokenizer, length: int) -> Sequences:
    arrays = documents.packed_texts([(row,) for row in rows], tokenizer, length)
    return Sequences(*(arrays[name] for name in documents.ARRAYS), pad_id=0)


def tensors(samples: Sequences, ids, width: int) -> tuple[dict, torch.Tensor]:
    batch = {name: torch.from_numpy(array) for name, array in samples.batch(np.array(ids), width).items()}
    labels = batch.pop("labels")
    return batch, labels


# Packing.


def test_every_token_but_a_documents_first_is_a_target_once(tokenizer):
    rows = texts(40)
    samples = packed(rows, tokenizer, 16)
    wanted = [[*tokenizer.encode(row, add_special_tokens=False), tokenizer.eos_token_id] for row in rows]
    labels = np.concatenate([samples.batch(np.array([at]), 16)["labels"][0] for at in range(len(samples))])
    assert labels[labels != NO_TARGET].tolist() == [token for row in wanted for token in row]
    assert samples.lengths[:-1].tolist() == [16] * (len(samples) - 1)
    assert 0 < samples.lengths[-1] <= 16
    assert samples.targets.sum() == sum(map(len, wanted))


def test_no_sequence_holds_the_last_token_alone(tokenizer):
    """It has no target, so the mean over the targets of a batch of it alone would be 0 / 0."""
    rows = texts(9)
    whole = packed(rows, tokenizer, 10_000)
    length = next(length for length in range(3, 10_000) if len(whole.input_ids) % length == 1)
    cut = packed(rows, tokenizer, length)
    assert cut.targets.min() > 0
    assert cut.targets.sum() == whole.targets.sum()


def test_positions_begin_anew_in_each_document_and_sequence(tokenizer):
    samples = packed(texts(40), tokenizer, 16)
    batch = samples.batch(np.arange(len(samples)), 16)
    starts = batch["input_ids"] == tokenizer.bos_token_id
    starts[:, 0] = True
    expected = np.zeros_like(batch["position_ids"])
    for column in range(1, 16):
        expected[:, column] = np.where(starts[:, column], 0, expected[:, column - 1] + 1)
    whole = samples.lengths == 16
    assert np.array_equal(batch["position_ids"][whole], expected[whole])


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_documents_logits_do_not_change_with_its_neighbours(tokenizer, make):
    model = make(len(tokenizer))
    document = "今天很好看书"
    alone = packed([document], tokenizer, 32)
    own, _ = tensors(alone, [0], int(alone.lengths[0]))
    with torch.no_grad():
        wanted = model(**own).logits[0]
        plain = model(input_ids=own["input_ids"]).logits[0]  # no mask, and positions as transformers counts them
        assert torch.allclose(wanted, plain, atol=1e-5)
        for seed in range(3):
            before, behind = texts(1, seed), texts(1, seed + 9)
            together = packed([*before, document, *behind], tokenizer, 32)
            begin = len(tokenizer.encode(before[0], add_special_tokens=False)) + 2
            assert begin + len(wanted) <= 32
            batch, _ = tensors(together, [0, 0], 40)  # padded beyond its length
            assert torch.allclose(model(**batch).logits[0, begin : begin + len(wanted)], wanted, atol=1e-5)
    assert decoders.separates_documents(model, len(tokenizer))


def test_a_model_that_heeds_no_mask_is_found_out(tokenizer):
    class Deaf(LlamaForCausalLM):
        def forward(self, attention_mask=None, position_ids=None, **others):
            return super().forward(**others)

    model = Deaf(llama(len(tokenizer)).config).eval()
    assert not decoders.separates_documents(model, len(tokenizer))


def test_padding_has_no_target_and_changes_nothing(tokenizer):
    samples, model, task = packed(texts(12), tokenizer, 16), llama(len(tokenizer)), Task()
    last = len(samples) - 1
    results = []
    for width in (int(samples.lengths[last]), 24):
        batch, labels = tensors(samples, [last], width)
        with torch.no_grad():
            results.append(task.results(model(**batch), labels))
    assert torch.allclose(*results, rtol=1e-5)
    assert results[0][0, 1] == samples.targets[last]


# The loss.


def test_the_loss_is_the_mean_over_the_targets_of_the_global_batch(tokenizer):
    """Sequences have unequal numbers of targets, so the mean of their means would differ."""
    samples, model, task = packed(texts(40), tokenizer, 16), llama(len(tokenizer)), Task()
    ids = list(range(len(samples) - 5, len(samples)))
    batch, labels = tensors(samples, ids, 16)
    with torch.no_grad():
        logits = model(**batch).logits.double()
    chances = logits.log_softmax(dim=-1)
    lost = [-chances[row, at, labels[row, at]] for row, at in (labels != NO_TARGET).nonzero().tolist()]
    wanted = torch.stack(lost).mean().item()
    per_sequence = task.results(type("Outputs", (), {"logits": logits.float()}), labels)
    weights = task.weights(samples)[ids]
    assert weights.tolist() == per_sequence[:, 1].tolist()
    assert per_sequence[:, 0].sum().item() / weights.sum() == pytest.approx(wanted, rel=1e-5)
    parts = []
    for share in ([0, 1, 2], [3, 4]):  # of two ranks, as Replay.loss makes them
        inputs, its = tensors(samples, [ids[at] for at in share], 16)
        with torch.no_grad():
            total = task.loss(model, model(**inputs), its, torch.float64)
        parts.append(total * (2 / weights.sum()))
    assert torch.stack(parts).mean().item() == pytest.approx(wanted, rel=1e-6)
    means = per_sequence[:, 0] / per_sequence[:, 1]
    assert abs(means.mean().item() - wanted) > 1e-4


def test_scores_weigh_each_token_alike():
    scores = Task().scores(torch.tensor([[10.0, 2.0], [1.0, 8.0]]), None)
    assert scores == {"loss": pytest.approx(1.1), "perplexity": pytest.approx(math.exp(1.1))}
    assert Task().scores(torch.tensor([[1e6, 2.0]]), None)["perplexity"] < math.inf


class Broken(torch.nn.Module):
    """A model of one's own whose scores are nan."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.scores = torch.nn.Embedding.from_pretrained(torch.full((vocabulary, vocabulary), torch.nan), freeze=False)

    def forward(self, input_ids, **_):
        return self.scores(input_ids)


def test_scores_that_are_no_numbers_are_no_perplexity(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(Task, "load", lambda self, split: packed(texts(5), tokenizer, 16))
    with pytest.raises(RunFailed, match="are no finite numbers, and predict nothing"):
        Task().test(Broken(len(tokenizer)), tmp_path, tmp_path)


# Prompts and their completions.


def pairs(rows, tokenizer, length: int) -> tuple[Sequences, int]:
    arrays, cut = documents.packed_pairs(rows, tokenizer, length)
    return Sequences(*(arrays[name] for name in documents.ARRAYS), pad_id=0), cut


def test_of_a_pair_only_the_completion_is_learnt(tokenizer):
    rows = [("今天", "很好"), ("朋友来看书", "在家"), ("雨", "走")]
    samples, cut = pairs(rows, tokenizer, 32)
    assert (len(samples), cut) == (3, 0)
    for at, (prompt, completion) in enumerate(rows):
        width = int(samples.lengths[at])
        batch = samples.batch(np.array([at]), width)
        given = [tokenizer.bos_token_id, *tokenizer.encode(prompt, add_special_tokens=False)]
        learnt = [*tokenizer.encode(completion, add_special_tokens=False), tokenizer.eos_token_id]
        assert batch["input_ids"][0].tolist() == (given + learnt)[:-1]
        assert batch["labels"][0].tolist() == [NO_TARGET] * (len(given) - 1) + learnt
        assert samples.targets[at] == len(learnt)


def test_a_pair_that_is_too_long_keeps_the_prompts_end_and_the_completion(tokenizer):
    samples, cut = pairs([("雨花" * 20, "很好"), ("雨", "今天" * 30)], tokenizer, 12)
    assert cut == 2
    assert samples.lengths.max() <= 12
    labels = samples.batch(np.array([0]), 12)["labels"][0]
    wanted = [*tokenizer.encode("很好", add_special_tokens=False), tokenizer.eos_token_id]
    assert labels[labels != NO_TARGET].tolist() == wanted
    first = samples.batch(np.array([0]), 12)["input_ids"][0]
    assert first[0] == tokenizer.bos_token_id


class Letters:
    """A tokenizer without a token for the beginning, which knows letters only."""

    bos_token_id, eos_token_id = None, 1

    def __call__(self, texts, **_):
        return {"input_ids": [[ord(letter) for letter in text if letter.isalpha()] for text in texts]}


def test_a_prompt_without_a_token_moves_no_label():
    samples, _ = pairs([("\u200b", "ab"), ("c", "de")], Letters(), 8)
    a, b, c, d, e = map(ord, "abcde")
    for at, (inputs, labels) in enumerate([([a, b], [b, 1]), ([c, d, e], [d, e, 1])]):
        batch = samples.batch(np.array([at]), len(inputs))
        assert (batch["input_ids"][0].tolist(), batch["labels"][0].tolist()) == (inputs, labels)
    with pytest.raises(BadInput, match=r"no token to predict of the row \('1', '2'\)"):
        pairs([("a", "b"), ("1", "2")], Letters(), 8)


# The tokenizer, and the 3-gram model.


def test_a_new_tokenizer_writes_any_text_and_is_the_same_again(tokenizer):
    again = decoders.byte_pairs((row["text"] for row in corpus.generate(1, 300)), 32)
    assert again.get_vocab() == tokenizer.get_vocab()
    for text in ("今天 真开心！", "Two  blanks,\n\tand a tab", "🎉 naïve — Ω", "鑫龘"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_3_gram_model_is_the_one_that_counting_gives():
    def of(documents_):
        flat = np.array([token for row in documents_ for token in row], dtype=np.int32)
        labels = np.concatenate([[*row[1:], NO_TARGET] for row in documents_]).astype(np.int32)
        positions = np.concatenate([np.arange(len(row)) for row in documents_]).astype(np.int32)
        return Sequences(flat, labels, positions, np.array([len(flat)]), 0)

    random = np.random.default_rng(3)
    train, test = ([random.integers(0, 6, random.integers(2, 9)).tolist() for _ in range(n)] for n in (30, 10))
    context, followed = Counter(), Counter()
    for row in train:
        for at in range(1, len(row)):
            two = (row[at - 2] if at > 1 else None, row[at - 1])
            context[two] += 1
            followed[(*two, row[at])] += 1
    lost = []
    for row in test:
        for at in range(1, len(row)):
            two = (row[at - 2] if at > 1 else None, row[at - 1])
            lost.append(-math.log((followed[(*two, row[at])] + 1) / (context[two] + 6)))
    assert documents.trigram_perplexity(of(train), of(test), 6) == pytest.approx(math.exp(np.mean(lost)))


# Bad input.


def saved(folder, model, tokenizer):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def prepared(run_script, *words):
    data = ["--set", "data.labels=null", "--set", "data.max_length=24"]
    sizes = [word for key in ("hidden_size=16", "layers=1") for word in ("--set", f"model.{key}")]
    return run_script("prepare", "--set", "task=language-modelling", "--set", "train.best=loss", *data, *sizes, *words)


def of(**data) -> list[str]:
    return [word for key, value in data.items() for word in ("--set", f"data.{key}={value}")]


def write_lines(file, rows):
    file.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")


PAIRS = [{"question": f"{number}", "answer": "很好"} for number in range(20)]


@pytest.mark.parametrize(
    ("write", "words", "said"),
    [
        (lambda file: file.write_text("雨\n花\n"), of(path="own.txt"), "holds 1 different texts, but each of train"),
        (lambda file: file.write_text(""), of(path="own.txt"), "holds 0 different texts"),
        (
            lambda file: write_lines(file, [*PAIRS, {"question": "x", "answer": "  "}]),
            of(path="own.txt", format="jsonl", prompt="question", completion="answer"),
            "own.txt, row 21: the completion is empty. Remove the row",
        ),
        (
            lambda file: write_lines(file, PAIRS),
            of(path="own.txt", format="jsonl", prompt="question"),
            "data.prompt, data.completion: only one of them is set",
        ),
        (
            lambda file: write_lines(file, PAIRS),
            of(path="own.txt", format="jsonl"),
            "row 1: has no column 'text' (it has 'question', 'answer')",
        ),
        (lambda file: None, ["--set", "train.class_weights=balanced"], "a language model has no classes"),
        (
            lambda file: None,
            ["--set", "model.hidden_size=18", "--set", "model.heads=2"],
            "a hidden_size of 18 can't be divided into 2 heads of an even width",
        ),
        (
            lambda file: (file.parent / "my.py").write_text("class Model: pass"),
            ["--set", "model.name=my.py:Model"],
            "my.py has no class Model that is a torch.nn.Module; it has none",
        ),
    ],
)
def test_wrong_texts_are_one_message(run_script, tmp_path, write, words, said):
    write(tmp_path / "own.txt")
    code, _, errors = prepared(run_script, *words)
    assert (code, errors.count("\n")) == (2, 1), errors
    assert said in errors
    assert not (tmp_path / "results" / "data" / "data.json").exists()


def test_a_figure_that_the_task_has_not_chooses_no_checkpoint():
    with pytest.raises(BadInput, match=r"train\.best: language-modelling has no macro_f1. Set it to one of: per"):
        reading.parse({"task": "language-modelling"})
    assert reading.parse({"task": "language-modelling", "train": {"checkpoint": "last"}}).train.checkpoint == "last"


def test_texts_shorter_than_a_sequence_together_are_one_message(run_script, tmp_path):
    (tmp_path / "own.txt").write_text("雨\n\n花\n\n走", encoding="utf-8")
    code, _, errors = prepared(run_script, *of(path="own.txt"))
    assert (code, errors.count("\n")) == (2, 1)
    assert "the training texts have" in errors
    assert "one sequence of 24 (data.max_length). Give more text, or lower" in errors


def bert(tokenizer, cls=BertForMaskedLM):
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return cls(BertConfig(vocab_size=len(tokenizer), **size))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda tokenizer: bert(tokenizer), "is a BertForMaskedLM, which is not a causal language model"),
        (lambda tokenizer: bert(tokenizer, BertLMHeadModel), "would see each other"),
        (lambda tokenizer: llama(len(tokenizer) - 5), "has embeddings for"),
        (lambda tokenizer: llama(len(tokenizer)).model, "is a LlamaModel, which is not a causal language model"),
        (
            lambda tokenizer: GPT2LMHeadModel(
                GPT2Config(vocab_size=len(tokenizer), n_embd=8, n_layer=1, n_head=1, n_positions=8)
            ),
            "can't take a sequence of 24 tokens",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_one_message(run_script, tmp_path, tokenizer, make, said):
    saved(tmp_path / "other", make(tokenizer), tokenizer)
    code, _, errors = prepared(run_script, "--set", "data.limit=200", "--set", "model.name=other")
    assert (code, errors.strip().count("\n")) == (2, 0), errors
    assert "model.name: other" in errors
    assert said in errors


def test_texts_need_no_labels_whatever_the_file(run_script, tmp_path):
    rows, hashes = texts(60), set()
    (tmp_path / "a.txt").write_text("\n\n".join(rows), encoding="utf-8")
    (tmp_path / "a.json").write_text(json.dumps([[row] for row in rows]), encoding="utf-8")
    write_lines(tmp_path / "a.jsonl", [{"text": row} for row in rows])
    with (tmp_path / "a.csv").open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows([["text"], *([row] for row in rows)])
    for name in ("a.txt", "a.json", "a.jsonl", "a.csv"):
        code, _, errors = prepared(run_script, *of(path=name))
        assert code == 0, errors
        hashes.add(read_json(tmp_path / "results" / "data" / "data.json")["hash"])
    assert len(hashes) == 1


@pytest.mark.parametrize(("first", "told"), [("text", True), ("several words", False)])
def test_a_name_of_a_column_that_is_learnt_as_a_text_is_told(run_script, tmp_path, first, told):
    (tmp_path / "a.csv").write_text("\n".join([first, *texts(60)]), encoding="utf-8")
    code, out, errors = prepared(run_script, *of(path="a.csv"), "--set", "data.text=0")
    assert code == 0, errors
    assert ("the first text of a.csv is 'text', and is trained on like any other" in out) == told


def test_splits_hold_each_text_once():
    rows = [(text,) for text in texts(200)]
    data = reading.parse({"task": "language-modelling", "train": {"best": "loss"}}).data
    parts, summary = documents.divide(rows, data, "own", [])
    placed = [row for part in parts.values() for row in part]
    assert sorted(placed) == sorted(set(rows))
    assert summary["duplicates_removed"] == 200 - len(placed)
    again, _ = documents.divide(rows, data, "own", [])
    assert again == parts


# Models: tied weights, LoRA, predictions.


@pytest.mark.parametrize("make", [gpt2, lambda vocabulary: llama(vocabulary, tied=True)])
def test_tied_weights_are_named_and_come_back(tmp_path, tokenizer, make):
    from safetensors.torch import load_file

    model = make(len(tokenizer))
    tied = models.tied_names(model)
    assert list(tied) == ["lm_head.weight"]
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in stored
    whole = models.with_tied(stored, tied)
    assert models.hash_weights(whole) == models.hash_weights(model.state_dict())
    assert models.tied_names(llama(len(tokenizer))) == {}


@pytest.mark.parametrize("make", [gpt2, llama])
def test_merged_updates_say_what_the_adapters_say(tmp_path, tokenizer, make):
    pytest.importorskip("peft", reason="needs peft: make setup")
    train = reading.parse({"train": {"lora": 4}, "rows": {"x": {"strategy": "ddp"}}}).train
    adapted = lora.put_into(make(len(tokenizer)), train)
    trained = {name: weight for name, weight in adapted.named_parameters() if weight.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in trained.values():
            weight.add_(torch.randn_like(weight) / 10)
    batch, _ = tensors(packed(texts(20), tokenizer, 24), [0, 1, 2], 24)
    plain = make(len(tokenizer))
    with torch.no_grad():
        before, wanted = plain(**batch).logits, adapted.eval()(**batch).logits
        merged = lora.take_out(make(len(tokenizer)), adapted.state_dict(), train, tmp_path)
        plain.load_state_dict(merged, strict=True)
        assert torch.allclose(plain(**batch).logits, wanted, atol=1e-5)
    assert not torch.allclose(before, wanted, atol=1e-3)


def test_a_continuation_is_the_most_likely_one_token_by_token(tmp_path, tokenizer):
    model = llama(len(tokenizer), max_position_embeddings=32)
    saved(tmp_path, model, tokenizer)
    ((said, chance),) = Task().predict(tmp_path, model, ["今天很好"])
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode("今天很好", add_special_tokens=False)]])
    wanted = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=20,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=tokenizer.eos_token_id,
    )
    assert said.startswith(tokenizer.decode(wanted[0, ids.shape[1] :], skip_special_tokens=True).rstrip("�"))
    assert chance is None


# The whole of it.


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The project after its workflow over the corpus with the rows of FEW, on two processes."""
    place = copy_project(tmp_path_factory.mktemp("language"))
    place.path("small.yaml").write_text(SMALL, encoding="utf-8")
    place.path("few.yaml").write_text(FEW, encoding="utf-8")
    place.first_run = place.snakemake(*WORKFLOW, "few.yaml")
    return place


@pytest.mark.slow
@pytest.mark.ci
def test_language_models_are_trained_and_proven(place):
    assert place.first_run.returncode == 0, place.first_run.stderr[-3000:]
    assert rows_of_language_models_are_proven(place) == {"single", "ddp"}


@pytest.mark.slow
def test_every_strategy_trains_a_language_model_and_is_proven(place):
    finished = place.snakemake(*WORKFLOW)
    assert finished.returncode == 0, finished.stderr[-3000:]
    equal = rows_of_language_models_are_proven(place, ddp_amp="within-tolerance")
    assert equal > {
        "single",
        "lora",
        "lora_zero",
        "ddp",
        "horovod",
        "deepspeed",
        "accelerate",
        "trainer",
        "fabric",
        "fsdp",
        "twice",
    }


def rows_of_language_models_are_proven(place, **others: str) -> set[str]:
    """Which rows train the same model; `others` says what the proof calls other rows."""
    summary = read_json(place.path("results/report/summary.json"))
    proofs = {row["row"]: row["proof"] for row in summary["rows"]}
    assert {row: proofs.pop(row) for row in others} == others
    assert set(proofs.values()) == {"equal"}
    assert all(row["status"] == "ok" for row in summary["rows"])
    assert all(row["macro_f1"] is None and row["perplexity"] > 1 for row in summary["rows"])
    assert all(row["tokens_per_second"] > 0 for row in summary["rows"])
    return set(proofs)


@pytest.mark.slow
@pytest.mark.ci
def test_the_report_says_perplexity_beside_a_3_gram_models(place):
    run = place.path("results/runs/ddp/n2/rep1")
    scores = read_json(run / "test" / "report.json")
    assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]))
    with (run / "test" / "predictions.csv").open(encoding="utf-8-sig") as stream:
        lines = list(csv.DictReader(stream))
    assert len(lines) == scores["sequences"]
    assert sum(int(line["tokens"]) for line in lines) == scores["support"]
    lost = sum(float(line["loss"]) * int(line["tokens"]) for line in lines if line["loss"])
    assert lost / scores["support"] == pytest.approx(scores["loss"], rel=1e-5)
    page = place.path("results/report/report.html").read_text(encoding="utf-8")
    assert f"a 3-gram model&#39;s is {scores['trigram_perplexity']:.2f}" in page
    assert not place.path("results/report/plots/confusion.svg").exists()
    assert place.path("results/report/plots/quality.svg").is_file()
    assert "the report has" not in place.script("check", "results").stdout


@pytest.mark.slow
@pytest.mark.ci
def test_a_text_is_continued_by_a_trained_model(place):
    model = "results/runs/ddp/n2/rep1/model"
    said = place.script("predict", "--model", model, "--text", "今天")
    assert said.returncode == 0, said.stderr
    assert "今天" in said.stdout
    loaded = AutoModelForCausalLM.from_pretrained(place.path(model))  # by transformers alone
    assert AutoTokenizer.from_pretrained(place.path(model)).bos_token_id == loaded.config.bos_token_id


def test_the_head_of_another_size_is_refused(tmp_path, tokenizer):
    saved(tmp_path / "other", llama(len(tokenizer)), tokenizer)
    config = read_json(tmp_path / "other" / "config.json")
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"vocab_size": len(tokenizer) + 3}))
    model = reading.parse({"model": {"name": str(tmp_path / "other")}}).model
    with pytest.raises(BadInput, match="has another shape than in its config"):
        decoders.initialise(model, tokenizer, 24, 0, [])


@pytest.mark.slow
def test_the_default_size_foretells_better_than_a_3_gram_model(place):
    asked = ["--config", "config/language.yaml", "--results", "default", "--set", "hardware.device=cpu"]
    for script, *more in (("prepare",), ("plan",), ("launch", "--row=single")):
        finished = place.script(script, *asked, *more)
        assert finished.returncode == 0, finished.stderr
    (run,) = place.path("default/runs/single").glob("n*/rep1")
    finished = place.script("evaluate", str(run.relative_to(place.folder)))
    assert finished.returncode == 0, finished.stderr
    scores = read_json(run / "test" / "report.json")
    assert scores["perplexity"] < scores["trigram_perplexity"] / 10


OWN_MODEL = """
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention


class Tiny(nn.Module):
    def __init__(self, vocab_size, max_length, width=32):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, width), nn.Embedding(max_length, width)
        self.attention, self.head = nn.Linear(width, 3 * width), nn.Linear(width, vocab_size)

    def forward(self, input_ids, position_ids, attention_mask):
        inputs = self.tokens(input_ids) + self.places(position_ids)
        queries, keys, values = self.attention(inputs).chunk(3, dim=-1)
        attended = scaled_dot_product_attention(queries, keys, values, attn_mask=attention_mask.squeeze(1))
        return self.head(inputs + attended)


class WithLoss(Tiny):
    def loss(self, outputs, labels):
        return cross_entropy(outputs.flatten(0, 1), labels.flatten())


class Flat(Tiny):
    def forward(self, **inputs):
        return super().forward(**inputs)[:, -1]
"""


@pytest.mark.slow
def test_a_model_of_one_s_own_is_trained_tested_and_continues_a_text(tmp_path):
    place = copy_project(tmp_path)
    place.path("small.yaml").write_text(SMALL, encoding="utf-8")
    place.path("own.py").write_text(OWN_MODEL, encoding="utf-8")

    def script(name, *arguments, model="Tiny"):
        configs = [f"--config=config/{file}" for file in ("config.yaml", "language.yaml")] + ["--config=small.yaml"]
        return place.script(name, *configs, f"--results={model}", f"--set=model.name=own.py:{model}", *arguments)

    losses = {}
    for model in ("Tiny", "WithLoss"):
        for name, *arguments in (("prepare",), ("plan",), ("launch", "--row=single"), ("launch", "--row=ddp")):
            finished = script(name, *arguments, model=model)
            assert finished.returncode == 0, finished.stderr
        for row in ("single/n1", "ddp/n2"):
            losses[model, row] = json.loads(place.path(f"{model}/runs/{row}/rep1/record.json").read_text())["losses"]
    assert losses["Tiny", "ddp/n2"] == pytest.approx(losses["Tiny", "single/n1"], abs=1e-5)
    # Its own loss is the mean over targets too.
    assert losses["WithLoss", "single/n1"] == pytest.approx(losses["Tiny", "single/n1"], abs=1e-5)
    assert losses["Tiny", "single/n1"][-1] < losses["Tiny", "single/n1"][0]
    evaluated = place.script("evaluate", "Tiny/runs/ddp/n2/rep1")
    assert evaluated.returncode == 0, evaluated.stderr
    said = place.script("predict", "--model", "Tiny/runs/ddp/n2/rep1/model", "--text", "今天")
    assert (said.returncode, "今天" in said.stdout) == (0, True), said.stderr
    refused = script("prepare", model="Flat")
    assert refused.returncode == 2
    assert "must return the scores of" in refused.stderr
