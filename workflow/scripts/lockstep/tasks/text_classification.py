"""text-classification: a label for each text, by a small new BERT, a pretrained encoder, or your own model.

Texts are tokenised once; batches are padded to their longest text. A model takes input_ids and attention_mask, int64
[n, tokens], and returns the logits of the labels, float [n, labels].
"""

from dataclasses import asdict
from pathlib import Path

import numpy as np

from lockstep import paths
from lockstep.data.tokens import Tokens, table
from lockstep.errors import BadInput, brief
from lockstep.files import MANIFEST, atomic_folder, text_lines
from lockstep.model import models, own, padding
from lockstep.tasks import _classification

EMBEDDED = ("resources/corpus.yaml",)


class Task(_classification.Task):
    UNIT, INPUT, EXAMPLE = "texts", "text", 'as in --text "今天真开心"'

    def prepare(self, config, downloads, work, target):
        from lockstep.data import prepare
        from lockstep.model import encoders, metrics

        splits, summary = prepare.split(config.data, downloads, work)
        longest, labels = config.data.max_length, summary["labels"]
        tokenizer = encoders.make_tokenizer(config.model, prepare.texts(splits["train"]), longest)
        if config.model.file:
            sizes = {
                "vocab_size": len(tokenizer),
                "classes": len(labels),
                "max_length": longest,
                "pad_id": tokenizer.pad_token_id,
            }
            model = own.initialise(config.model.name, sizes, config.train.seed)
            tokens = torch_ids(longest)
            own.require_scores(model, tokens, (1, len(labels)), f"{len(labels)} classes")
            shape = metrics.Shape.counted(model, tokens, longest)
            model = own.initialise(
                config.model.name, sizes, config.train.seed
            )  # anew, as a forward pass may change a model
        else:
            example = next(prepare.texts(splits["train"]))
            model = encoders.initialise(
                config.model, tokenizer, labels, longest, config.train.seed, summary["notes"], example
            )
            shape = metrics.Shape.of(model)
        with atomic_folder(target / paths.DATASET) as temporary:
            summary |= prepare.store(
                splits,
                tokenizer,
                temporary,
                summary["notes"],
                one_end=getattr(getattr(model, "config", None), "is_encoder_decoder", False),
            )
        with atomic_folder(target / paths.TOKENIZER) as temporary:
            tokenizer.save_pretrained(temporary)
        with atomic_folder(target / paths.WEIGHTS) as temporary:
            models.save(model, temporary, labels)
        vocabulary = f"{len(tokenizer):,} tokens in the vocabulary"
        return summary | {"pad_id": tokenizer.pad_token_id, "shape": asdict(shape), "inputs": vocabulary}

    def alike(self, count, length, config):
        # A token shorter than the batch: where nothing is padded, a model may leave its mask out.
        texts, nothing = np.full(count, max(1, length - 1)), np.zeros(count, dtype=np.int64)
        pad, end = config.get("pad_token_id") or 0, config.get("eos_token_id")
        tokens = np.full(texts[0], int(pad == 0))
        if isinstance(end, int):
            tokens[-1] = end  # at which BART's classifiers look
        return Tokens(tokens, texts, nothing, pad_id=pad, starts=nothing)

    def load(self, split):
        return Tokens.load(split)

    def columns(self, split):
        columns = table(split)
        return {name: columns[name].to_pylist() for name in ("row", "text")}

    def convert(self, state, data, folder):
        super().convert(state, data, folder)
        models.tokenizer(data / paths.TOKENIZER).save_pretrained(folder)

    def given(self, inputs):
        return [(text, "", text) for text in inputs]

    def choose(self, wanted, data):
        if wanted.file:
            return [(text, "", text) for text in lines_of(Path(wanted.file))]
        if wanted.texts:
            return [(text, "", text) for text in wanted.texts]
        columns = table(paths.split_folder(data, "test"))
        texts, numbers = columns["text"].to_pylist(), columns["label"].to_numpy()
        return [(texts[at], truth, texts[at]) for at, truth in self.held_out(wanted, numbers, data)]

    def read_labelled(self, stored, data, notes, labels):
        from lockstep.data import sources

        _, rows = sources.read(data, Path(), notes, labels)
        texts, codes, numbers = [], [], []
        for text, code, number in rows:
            texts.append(text)
            codes.append(code)
            numbers.append(number)
        return {"row": numbers, "text": texts}, texts, codes

    def samples_of(self, folder, inputs, model):
        tokenizer = models.tokenizer(folder)
        if models.is_of_transformers(model):
            padding.agree(model.config, tokenizer, str(folder), [])
        token_ids = tokenizer(inputs, truncation=True)["input_ids"]
        lengths = np.array([len(ids) for ids in token_ids])
        unknown = np.zeros(len(inputs), dtype=np.int64)
        samples = Tokens(np.concatenate(token_ids), lengths, unknown, tokenizer.pad_token_id or 0)
        if models.is_of_transformers(model) and not (folder / MANIFEST).is_file():
            _require_fit(model, samples, folder)
        return samples


def _require_fit(model, samples: Tokens, folder: Path) -> None:
    """Raise BadInput if a model that Lockstep did not train can't take the longest text, or heeds padding."""
    longest = np.array([samples.lengths.argmax()])
    try:
        padding.scores(model, samples, longest, samples.longest).cpu()  # where a GPU's errors are raised
        change = padding.influence(model, samples)
    except (RuntimeError, IndexError, ValueError) as error:
        raise BadInput(
            f"{folder}: the model can't take a text of {samples.longest} tokens ({brief(error)}). Set model_max_length"
            " in its tokenizer_config.json to the number of tokens that it takes."
        ) from None
    if change:
        raise BadInput(
            f"{folder}: padding changes a text's scores by up to {change:.2g} of the largest score. It may need padding"
            " on the left, or ignore attention_mask. Name another model."
        )


def torch_ids(length: int) -> dict:
    """A model's inputs for one text of `length` tokens."""
    import torch

    return {
        "input_ids": torch.zeros(1, length, dtype=torch.int64),
        "attention_mask": torch.ones(1, length, dtype=torch.int64),
    }


def lines_of(file: Path) -> list[str]:
    """The lines of a text file that are not empty. Raises BadInput if there are none."""
    from lockstep.data import readers

    try:
        readers.require_lines(file)
        texts = [line.strip() for line in text_lines(file) if line.strip()]
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise BadInput(f"predict.file: {file} can't be read as UTF-8 text: {error}") from None
    if not texts:
        raise BadInput(f"predict.file: {file} holds no text. Write one text per line.")
    return texts
