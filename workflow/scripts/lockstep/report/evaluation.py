"""Predictions of a converted model, and the classification report made of them."""

import contextlib
import csv
from pathlib import Path

import numpy as np
import torch

from lockstep import paths
from lockstep.config.sections import Predict
from lockstep.data.tokens import Tokens, table
from lockstep.errors import BadInput, brief
from lockstep.files import MANIFEST, atomic_file, read_json, verify, write_json, write_text
from lockstep.model import models

BATCH = 64


def probabilities(model: torch.nn.Module, tokens: Tokens) -> np.ndarray:
    """Each label's probability for every sample, each once, in order: float32 [n, labels]."""
    device = next(model.parameters()).device
    result = np.zeros((len(tokens), model.config.num_labels), dtype=np.float32)
    with torch.inference_mode():
        for ids in tokens.batches(BATCH):
            batch = tokens.batch(ids, int(tokens.lengths[ids].max()))
            inputs = {name: torch.from_numpy(batch[name]).to(device) for name in ("input_ids", "attention_mask")}
            result[ids] = model(**inputs).logits.float().softmax(dim=1).cpu().numpy()
    return result


def load_model(folder: Path) -> torch.nn.Module:
    """A converted model, ready to predict, on the GPU if there is one.

    Raises RunFailed where it has changed since it was converted. A folder that Lockstep did not make has no seal.
    """
    if not (folder / "config.json").is_file():
        raise BadInput(f"{folder}: is no model folder (no config.json). Name one like results/runs/ddp/n2/rep1/model.")
    if (folder / MANIFEST).is_file() or (folder.parent / paths.SETTINGS).is_file():
        verify(folder, f"Make it again: python workflow/scripts/convert.py {folder.parent}")
    with readable(folder):
        return models.load(folder).eval().to("cuda" if torch.cuda.is_available() else "cpu")


@contextlib.contextmanager
def readable(folder: Path):
    """What the libraries say of a model folder that they can't read, in one line."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:  # safetensors, pickle, transformers and tokenizers each have their own
        raise BadInput(f"{folder}: can't be read as a model: {brief(error)}") from None


def test(run: Path) -> dict:
    """Predict the whole test split with a run's converted model, and write test/report.txt, .json, predictions.csv."""
    from sklearn.metrics import classification_report, confusion_matrix

    model = load_model(run / paths.MODEL)
    split = paths.split_folder(Path(read_json(run / paths.SETTINGS)["data"]), "test")
    tokens, columns = Tokens.load(split), table(split)
    names = [model.config.id2label[number] for number in range(model.config.num_labels)]
    chances = probabilities(model, tokens)
    predicted, numbers = chances.argmax(axis=1), range(len(names))
    report = {"labels": numbers, "target_names": names, "zero_division": 0, "digits": 4}
    by_class = classification_report(tokens.labels, predicted, output_dict=True, **report)
    scores = {
        "labels": names,
        "support": len(tokens),
        "accuracy": float((predicted == tokens.labels).mean()),
        "macro_f1": by_class["macro avg"]["f1-score"],
        "by_class": by_class,
        "confusion_matrix": confusion_matrix(tokens.labels, predicted, labels=numbers).tolist(),
    }
    write_text(run / paths.TEST_TEXT, classification_report(tokens.labels, predicted, **report))
    write_csv(
        run / paths.TEST_PREDICTIONS,
        ["row", "text", "truth", "predicted", *(f"p_{name}" for name in names)],
        (
            [row, text, names[truth], names[guess], *(f"{chance:.6f}" for chance in chances_of_one)]
            for row, text, truth, guess, chances_of_one in zip(
                columns["row"].to_pylist(), columns["text"].to_pylist(), tokens.labels, predicted, chances, strict=True
            )
        ),
    )
    write_json(run / paths.TEST_REPORT, scores)
    return scores


def choose_texts(wanted: Predict, data: Path, labels: list[str]) -> list[tuple[str, str]]:
    """(text, true label) pairs to predict: the configured texts, the lines of a file, or held-out texts of a label.

    The truth is empty where it is not known. Raises BadInput.
    """
    if wanted.file:
        try:
            lines = Path(wanted.file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"predict.file: {wanted.file} can't be read as UTF-8 text: {error}") from None
        texts = [line.strip() for line in lines if line.strip()]
        if not texts:
            raise BadInput(f"predict.file: {wanted.file} holds no text. Give it one text a line.")
        return [(text, "") for text in texts]
    if wanted.texts:
        return [(text, "") for text in wanted.texts]
    if wanted.label is not None and wanted.label not in labels:
        raise BadInput(f"predict.label: {wanted.label!r} is not one of {', '.join(labels)}.")
    columns = table(paths.split_folder(data, "test"))
    held_out = [
        (text, labels[label])
        for text, label in zip(columns["text"].to_pylist(), columns["label"].to_pylist(), strict=True)
        if wanted.label in (None, labels[label])
    ]
    chosen = np.random.default_rng(wanted.seed).permutation(len(held_out))[: wanted.count]
    return [held_out[index] for index in chosen]


def predict(model_folder: Path, texts: list[str]) -> list[tuple[str, float]]:
    """The label that a converted model gives each text, and its probability."""
    from transformers import AutoTokenizer

    model = load_model(model_folder)
    with readable(model_folder):
        tokenizer = AutoTokenizer.from_pretrained(model_folder, **models.LOCAL)
    token_ids = tokenizer(texts, truncation=True)["input_ids"]
    lengths = np.array([len(ids) for ids in token_ids])
    tokens = Tokens(
        np.concatenate(token_ids), lengths, np.zeros(len(texts), dtype=np.int64), tokenizer.pad_token_id or 0
    )
    chances = probabilities(model, tokens)
    return [(model.config.id2label[row.argmax()], float(row.max())) for row in chances]


def write_csv(path: Path, header: list[str], rows) -> None:
    """A CSV file in UTF-8 with a byte-order mark, without which spreadsheets garble Chinese."""
    with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8-sig", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([_harmless(cell) for cell in header])
        writer.writerows([_harmless(cell) for cell in row] for row in rows)


def _harmless(cell):
    """A text that a spreadsheet would run as a formula gets an apostrophe before it (OWASP, "CSV Injection")."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell
