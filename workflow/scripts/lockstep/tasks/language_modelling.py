"""language-modelling: predict the next token, by a small new Llama, a pretrained causal model, or your own model.

Documents are packed into sequences of data.max_length tokens, and none attends to another. With data.prompt and
data.completion, each row is a sequence of its own, whose targets are the completion. A model takes input_ids and
position_ids, int64 [n, tokens], and attention_mask, bool [n, 1, tokens, tokens] (true: may be attended to), and returns
logits, float [n, tokens, vocabulary]. The loss is the mean over the targets of the whole global batch, not the mean of
the sequences' means.
"""

import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from lockstep import paths
from lockstep.data import documents
from lockstep.data.documents import NO_TARGET
from lockstep.errors import BadInput, RunFailed
from lockstep.files import atomic_folder, read_json, write_csv, write_json, write_text
from lockstep.model import models, own
from lockstep.model.outputs import NO_NUMBERS, logits
from lockstep.tasks import _task

EMBEDDED = ("resources/corpus.yaml",)
QUALITY = ("perplexity",)
BATCH_TOKENS = 4096  # tokens in a test's batch, whose logits are in memory at once
CONTINUED = 32  # the largest number of tokens that predict.py adds to a text


class Task(_task.Task):
    UNIT, INPUT, EXAMPLE = "sequences", "text", 'as in --text "今天"'

    def prepare(self, config, downloads, work, target):
        from lockstep.model import decoders, metrics

        if config.train.class_weights is not None:
            raise BadInput("train.class_weights: a language model has no classes. Leave it out.")
        notes: list[str] = []
        longest = config.data.max_length
        source, rows = documents.read(config.data, downloads, notes)
        parts, summary = documents.divide(rows, config.data, source, notes)
        tokenizer = decoders.make_tokenizer(config.model, (text for row in parts["train"] for text in row), longest)
        if config.model.file:
            sizes = {"vocab_size": len(tokenizer), "max_length": longest, "pad_id": tokenizer.pad_token_id or 0}
            model, example = own.initialise(config.model.name, sizes, config.train.seed), one_sequence([0] * longest)
            shape = (1, longest, len(tokenizer))
            own.require_scores(model, example, shape, f"{len(tokenizer)} tokens for each of {longest} in a sequence")
            shape = metrics.Shape.counted(model, example, longest)
            model = own.initialise(
                config.model.name, sizes, config.train.seed
            )  # anew, as a forward pass may change a model
        else:
            model = decoders.initialise(config.model, tokenizer, longest, config.train.seed, notes)
            shape = metrics.Shape.of_decoder(model)
        ends = (tokenizer.pad_token_id, tokenizer.eos_token_id)
        pad_id = next((number for number in ends if number is not None), 0)
        with atomic_folder(target / paths.DATASET) as temporary:
            summary |= documents.store(parts, tokenizer, longest, source, notes, temporary)
        with atomic_folder(target / paths.TOKENIZER) as temporary:
            tokenizer.save_pretrained(temporary)
        with atomic_folder(target / paths.WEIGHTS) as temporary:
            models.save(model, temporary)
        inputs = f"{len(tokenizer):,} tokens in the vocabulary, sequences of {longest}"
        return summary | {"pad_id": pad_id, "vocabulary": len(tokenizer), "shape": asdict(shape), "inputs": inputs}

    def alike(self, count, length, config):
        nothing, lengths = np.zeros(length, dtype=np.int64), np.full(count, length)
        samples = documents.Sequences(nothing, nothing, np.arange(length), lengths, pad_id=0, targets=lengths)
        samples.starts = np.zeros(count, dtype=np.int64)  # all are the same
        return samples

    def load(self, split):
        return documents.Sequences.load(split)

    def weights(self, samples):
        return samples.targets.astype(np.float64)

    def loss(self, module, outputs, labels, dtype):
        own_loss = self.own_loss(module, outputs, labels)
        if own_loss is not None:
            return own_loss.to(dtype) * (labels != NO_TARGET).sum()
        scores = logits(outputs).flatten(0, 1).to(dtype)
        smoothing = self.train.label_smoothing if self.train else 0.0
        return cross_entropy(
            scores, labels.flatten(), ignore_index=NO_TARGET, reduction="sum", label_smoothing=smoothing
        )

    def results(self, outputs, labels):
        """Each sequence's sum of negative log-likelihoods, in nats, and its number of targets: float32 [n, 2]."""
        lost = cross_entropy(logits(outputs).float().transpose(1, 2), labels, ignore_index=NO_TARGET, reduction="none")
        return torch.stack([lost.sum(dim=1), (labels != NO_TARGET).sum(dim=1).float()], dim=1)

    def scores(self, results, samples):
        lost, targets = results.double().sum(dim=0).tolist()
        return {"loss": lost / targets, "perplexity": perplexity(lost / targets)}

    def convert(self, state, data, folder):
        super().convert(state, data, folder)
        models.tokenizer(data / paths.TOKENIZER).save_pretrained(folder)

    def given(self, inputs):
        return [(text, "", text) for text in inputs]

    def choose(self, wanted, data):
        from lockstep.tasks.text_classification import lines_of

        if wanted.label is not None:
            raise BadInput("predict.label: texts have no labels in this task. Set it to null.")
        if wanted.file:
            return [(text, "", text) for text in lines_of(Path(wanted.file))]
        if wanted.texts:
            return [(text, "", text) for text in wanted.texts]
        tokenizer = models.tokenizer(data / paths.TOKENIZER)
        test = self.load(paths.split_folder(data, "test"))
        pieces = [
            (begin, middle, end) for begin, end in test.pieces() if (middle := _middle(test, begin, end)) is not None
        ]
        order = np.random.default_rng(wanted.seed).permutation(len(pieces))[: wanted.count]
        chosen = []
        for begin, middle, end in (pieces[at] for at in order):
            rest = test.labels[middle:end]
            beginning, rest = (
                tokenizer.decode(ids, skip_special_tokens=True)
                for ids in (test.input_ids[begin : middle + 1], rest[rest != NO_TARGET])
            )
            chosen.append((beginning, rest, beginning))
        return chosen

    def predict(self, folder, model, inputs):
        """Each text's greedy continuation, until the end-of-text token or CONTINUED tokens."""
        tokenizer = models.tokenizer(folder)
        begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        config = getattr(model, "config", None)  # a user's own model has none
        longest = getattr(config, "max_position_embeddings", None) or tokenizer.model_max_length
        device, continuations = next(model.parameters()).device, []
        for text in inputs:
            ids = begin + tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            given = len(ids)
            while len(ids) < given + CONTINUED:
                with torch.inference_mode():
                    sequence = {name: tensor.to(device) for name, tensor in one_sequence(ids[-longest:]).items()}
                    ids.append(int(logits(model(**sequence))[0, -1].argmax()))
                if ids[-1] == tokenizer.eos_token_id:
                    break
            continuations.append((tokenizer.decode(ids[given:], skip_special_tokens=True), None))
        return continuations

    def test(self, model, data, folder):
        samples = self.load(paths.split_folder(data, "test"))
        results, device = np.zeros((len(samples), 2)), next(model.parameters()).device
        with torch.inference_mode():
            for ids in samples.batches(max(1, BATCH_TOKENS // int(samples.lengths.max()))):
                batch = {
                    name: torch.from_numpy(array).to(device)
                    for name, array in samples.batch(ids, int(samples.lengths[ids].max())).items()
                }
                labels = batch.pop("labels")
                results[ids] = self.results(model(**batch), labels).cpu().numpy()
        lost, targets = results.sum(axis=0)
        if not math.isfinite(lost):
            raise RunFailed(NO_NUMBERS)
        train = self.load(paths.split_folder(data, "train"))
        vocabulary = read_json(paths.about_split(paths.split_folder(data, "test")))["vocabulary"]
        trigram = documents.trigram_perplexity(train, samples, vocabulary)
        scores = {
            "support": int(targets),
            "sequences": len(samples),
            "loss": lost / targets,
            "perplexity": perplexity(lost / targets),
            "trigram_perplexity": trigram,
        }
        lines = [("model", scores["loss"], scores["perplexity"]), ("3-gram, add-one", math.log(trigram), trigram)]
        table = "".join(f"{name:<16}{loss:>12.4f}{each:>14.2f}\n" for name, loss, each in lines)
        heading = f"{'':<16}{'loss (nats)':>12}{'perplexity':>14}\n"
        write_text(folder / paths.TEST_TEXT, f"{heading}{table}\nover {int(targets):,} tokens of the test split\n")
        tokenizer = models.tokenizer(data / paths.TOKENIZER)
        write_csv(
            folder / paths.TEST_PREDICTIONS,
            ["sequence", "tokens", "loss", "perplexity", "text"],
            (
                [number, int(count), *_figures(nats, count), tokenizer.decode(np.asarray(samples.input_ids[at]))]
                for number, (nats, count) in enumerate(results.tolist())
                for at in [slice(samples.starts[number], samples.starts[number] + samples.lengths[number])]
            ),
        )
        write_json(folder / paths.TEST_REPORT, scores)
        return scores


def one_sequence(ids: list[int]) -> dict[str, torch.Tensor]:
    """A model's inputs for a single document."""
    count = len(ids)
    return {
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones(1, 1, count, count, dtype=torch.bool).tril(),
        "position_ids": torch.arange(count)[None],
    }


def perplexity(loss: float) -> float:
    """exp of the mean loss in nats, which is capped at 700, as exp overflows beyond."""
    return math.exp(min(loss, 700))


def _figures(nats: float, count: float) -> list[str]:
    if not count:
        return ["", ""]
    return [f"{nats / count:.6f}", f"{perplexity(nats / count):.4f}"]


def _middle(samples: documents.Sequences, begin: int, end: int) -> int | None:
    """The position of the last token of a document that predict.py gives the model; None if the document is too short.

    It is the last token of a prompt, or the middle of a document without a prompt.
    """
    learnt = begin + np.flatnonzero(np.asarray(samples.labels[begin:end]) != NO_TARGET)
    if len(learnt) < 2:
        return None
    return int(learnt[0]) if learnt[0] > begin else int(learnt[len(learnt) // 2])
