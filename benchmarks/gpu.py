"""python -m benchmarks gpu: what a step takes on one GPU, by a bare loop and by rows, in turns in one process.

BERT-base's shape with short texts (the published texts' lengths, in buckets; 256 in a step, and 1,024) and with full
rows of 128 and 512 tokens; at least 32 thousand tokens a step, but for the 256. Beside each MFU stands that of the
matrix products of these shapes alone, as the same GPU does them one after the other: nothing that trains this model in
this way gets above it.
"""

import statistics
import time
from pathlib import Path

import numpy as np
import torch

from lockstep.config import reading, registry
from lockstep.config.row import Row
from lockstep.data.plan import Plan, make
from lockstep.data.tokens import Tokens
from lockstep.model import attention, metrics, models
from lockstep.model.optimizer import make_optimizer, make_schedule
from lockstep.rank import bare
from lockstep.rank.dev_split import DevSplit
from lockstep.rank.replay import Replay
from lockstep.rank.training import set_up
from lockstep.run.progress import Progress

# By name: tokens of the longest text, and texts of a step.
SHAPES = {"short": (24, 256), "many short": (24, 1024), "128": (128, 256), "512": (512, 64)}
STEPS = 12  # of a measurement
VOCABULARY = 21128  # bert-base-chinese's
# What is measured: a row's options, and of which shapes; the most telling first.
ROWS = {
    "single, bf16": ({"strategy": "single", "precision": "bf16"}, ("512", "128", "many short", "short")),
    "single, fp32": ({"strategy": "single"}, ("512", "short")),
    "compiled, bf16": ({"strategy": "recipe", "compile": "dynamic", "precision": "bf16"}, ("512", "128", "many short")),
    "packed, bf16": ({"strategy": "recipe", "packed": True, "precision": "bf16"}, ("many short", "short")),
    "graphs, bf16": ({"strategy": "recipe", "compile": "static", "precision": "bf16"}, ("512", "128")),
    "bf16 weights": ({"strategy": "recipe", "precision": "bf16", "weights": "bf16"}, ("512", "many short")),
    "tf32": ({"strategy": "recipe", "tf32": True}, ("512",)),
}
HEADER = ["row", "texts", "tokens of the longest", "texts in a step", "step ms", "bare loop ms", "of its speed"]
HEADER += ["real tokens/s", "MFU", "the products' own MFU", "cold s", "attention"]


def gpu(folder: Path, rounds: int, until: float = float("inf"), layers: int = 12, width: int = 768):
    """Yields a line of the table, by HEADER, for each row and shape, until `until` (time.monotonic)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights, shape = _model(folder, layers, width)
    parts = {name: _part(*size) for name, size in SHAPES.items()}
    bares: dict[str, Bare] = {}
    for name, (options, shapes) in ROWS.items():
        row = reading.parse({"train": _train(), "hardware": _hardware(device), "rows": {"row": options}}).rows["row"]
        if row.unavailable or (options.get("tf32") and device.type == "cpu"):
            continue
        ours, theirs = None, bares.setdefault(row.precision, Bare(weights, row, device))
        for kind in shapes:
            if time.monotonic() > until:
                return
            plan, samples = parts[kind]
            ours = ours or Ours(weights, row, folder)
            pairs = []
            for turn in range(rounds):
                loops = (ours, theirs) if turn % 2 else (theirs, ours)
                seconds = {loop: loop.step_seconds(plan, samples) for loop in loops}
                pairs.append((seconds[ours], seconds[theirs]))
            step, by_hand = (statistics.median(values) for values in zip(*pairs, strict=True))
            work = metrics.work(plan, samples.lengths, shape)
            peak = _peak(row, device)
            yield [
                name,
                kind,
                str(SHAPES[kind][0]),
                str(SHAPES[kind][1]),
                f"{1000 * step:.1f}",
                f"{1000 * by_hand:.1f}",
                f"{statistics.median(b / a for a, b in pairs):.2f}",
                f"{work['tokens'] / plan.steps / step:.0f}",
                _share(metrics.utilisation(work["padded_flops"] / plan.steps, step, 1, peak)),
                _share(
                    metrics.utilisation(work["padded_flops"] / plan.steps, _products(shape, plan, row, device), 1, peak)
                ),
                f"{ours.cold:.1f}",
                " ".join(ours.attention),
            ]
        del ours
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _peak(row: Row, device: torch.device) -> float | None:
    if device.type == "cpu":
        return None
    return metrics.device_peak(torch.cuda.get_device_name(), "tf32" if row.options.get("tf32") else row.precision)


def _train() -> dict:
    return {"epochs": 1, "eval_every": 0, "checkpoint": "last", "schedule": "constant", "warmup": 0}


def _hardware(device: torch.device) -> dict:
    return {"device": device.type, "processes": 1}


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.3f}"


def _model(folder: Path, layers: int, width: int):
    """A new model's folder, and how much work it is."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        intermediate_size=4 * width,
        num_labels=6,
    )
    model = BertForSequenceClassification(config)
    model.save_pretrained(folder / "weights")
    return folder / "weights", metrics.Shape.of(model)


def _part(tokens: int, texts: int) -> tuple[Plan, Tokens]:
    """A plan of STEPS steps, and its texts: full rows, or for the short ones of lengths as the published texts have."""
    random = np.random.default_rng(0)
    count = STEPS * texts
    lengths = np.full(count, tokens)
    if tokens == SHAPES["short"][0]:  # log-normal with the published data's median, cut as it is there
        lengths = np.clip(random.lognormal(np.log(15), 0.6, count), 3, 128).astype(np.int64)
    ids = random.integers(5, VOCABULARY, int(lengths.sum())).astype(np.int32)
    samples = Tokens(ids, lengths, random.integers(0, 6, count), pad_id=0)
    return make(lengths, global_batch=texts, epochs=1, seed=0, batching="bucketed"), samples


class Bare:
    """The loop that one would write by hand."""

    def __init__(self, weights: Path, row: Row, device: torch.device):
        self.row, self.device = row, device
        models.keep_masks()
        self.model = models.load(weights).train().to(device)
        self.optimizer = make_optimizer(self.model, row.train)

    def step_seconds(self, plan: Plan, samples: Tokens) -> float:
        torch.set_float32_matmul_precision("high" if self.row.options.get("tf32") else "highest")
        attention.choose("auto", self.device, len(set(plan.widths.tolist())))
        schedule = make_schedule(self.optimizer, self.row.train, plan.steps, plan.epochs)
        clip = self.row.train.clip
        seconds = bare.timed(self.model, self.optimizer, schedule, plan, samples, self.row.precision, clip)
        return float(seconds.mean())


class Ours:
    """A row's own loop, by its own clock."""

    def __init__(self, weights: Path, row: Row, folder: Path):
        self.folder, self.settings = folder, row.settings()
        self.row = row
        torch.set_num_threads(row.hardware.threads)
        self.strategy = registry.load(row.strategy)(self.settings)
        self.device = self.strategy.start().device
        models.keep_masks()
        self.strategy.set_up(models.load(weights).train(), lambda model: make_optimizer(model, row.train))
        self.progress = Progress(folder, ranks=1)
        self.progress.begin(0)
        self.cold, self.attention = 0.0, []

    def step_seconds(self, plan: Plan, samples: Tokens) -> float:
        torch.set_float32_matmul_precision("high" if self.row.options.get("tf32") else "highest")
        attention.choose("auto", self.device, len(set(plan.widths.tolist())))
        training = set_up(self.strategy, self.settings, self.folder, self.progress)
        replay = Replay(training, plan, samples, DevSplit(training, plan, samples))
        self.strategy.train(replay)
        self.cold = max(self.cold, training.clock.reading().cold_seconds)
        self.attention = replay.live_settings["attention_kernels"]
        return float(training.clock.step_seconds().mean())


def _products(shape: metrics.Shape, plan: Plan, row: Row, device: torch.device) -> float:
    """Seconds that the matrix products of a step take alone, one after the other: the mean over the plan's steps."""
    width, kind = shape.width, {"bf16": torch.bfloat16, "fp16": torch.float16}.get(row.precision, torch.float32)
    sizes = [(width, width, 4), (width, 4 * width, 1), (4 * width, width, 1)]  # and how many of each a layer has
    tokens, steps = np.unique(np.diff(plan.starts) * plan.widths, return_counts=True)
    seconds = 0.0
    for rows, often in zip(tokens.tolist(), steps.tolist(), strict=True):
        for inner, outer, count in sizes:
            x, w = (torch.randn(a, b, device=device, dtype=kind) for a, b in ((rows, inner), (inner, outer)))
            g = torch.randn(rows, outer, device=device, dtype=kind)
            # Forward, and backward the gradients of the input and of the weight.
            once = _seconds(lambda x=x, w=w, g=g: (x @ w, g @ w.t(), x.t() @ g), device)
            seconds += often * count * shape.layers * once
    return seconds / plan.steps


def _seconds(work, device: torch.device, times: int = 10) -> float:
    for _ in range(3):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / times
