"""The training loop: replays the plan on one rank, whichever strategy it runs.

    for each optimizer step of the plan:
        for each micro-batch of this rank's share:  forward, backward
        update the weights, then the learning rate

Nothing is synchronised, printed or reduced per step: losses stay on the device, and are gathered after the last step.
"""

import os
import signal
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from lockstep import checkpoint, environment, models, strategies
from lockstep.clock import Clock
from lockstep.errors import RunFailed
from lockstep.files import read_json, write_json
from lockstep.plan import Plan, share
from lockstep.processes import die_with_parent
from lockstep.record import Progress, RankFiles
from lockstep.strategies.single import Strategy
from lockstep.tokens import Tokens


def main(folder: Path) -> None:
    """Train this process's share of the run in `folder`. Does not return.

    The process ends by os._exit: with gloo, PyTorch 2.13's DDP sometimes hangs or aborts in the interpreter's own exit,
    after all is done. So everything is written and flushed first, and what was written says how the run went.
    """
    die_with_parent()
    signal.signal(signal.SIGTERM, _end)
    code, files, progress = 1, RankFiles(folder, int(os.environ.get("RANK", 0))), None
    try:
        clock = Clock()
        settings = read_json(folder / "settings.json")
        torch.set_num_threads(settings["hardware"]["threads"])
        torch.set_num_interop_threads(1)
        strategy = strategies.load(settings["strategy"])(settings)
        clock.part("imports")
        world = strategy.start()
        clock.part("process_group")
        files.rank = world.rank
        progress = Progress(folder)
        progress.begin(world.rank)
        _train(settings, Session(strategy, settings["train"], settings["trial"], folder, clock, files, progress))
        strategy.stop()
        code = 0
    except BaseException as error:  # not only Exception: DCP's CheckpointException is none
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher may send it now, and the reason must be written
        files.write_error(error, int(progress.row[2]) if progress else 0)
        print(f"rank {files.rank} failed:", file=sys.stderr)
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end(number, frame):
    """A launcher ends the other ranks when one dies. Saying so tells them from the one that died without a word."""
    raise RunFailed("was ended by SIGTERM")


@dataclass
class Session:
    """What the parts of one rank's training share."""

    strategy: Strategy
    train: dict  # the configuration's `train` section
    trial: bool  # note the first gradient's norm, which the timed window of a run that is measured has no room for
    folder: Path  # of the run
    clock: Clock
    files: RankFiles
    progress: Progress


def _train(settings: dict, session: Session) -> None:
    strategy, train, clock, files = session.strategy, session.train, session.clock, session.files
    world, data = strategy.world, Path(settings["data"])
    clock.device = world.device
    # Dropout must differ from rank to rank.
    seed = int(np.random.SeedSequence([train["seed"], world.rank]).generate_state(1)[0])
    torch.manual_seed(seed)
    model = models.load(data / "weights", settings["dropout"]).train()
    weights, parameters = models.hash_weights(model.state_dict()), model.num_parameters()
    clock.part("model")
    strategy.prepare(model, lambda prepared: models.make_optimizer(prepared, train))
    clock.part("wrap")
    plan, tokens = Plan.load(Path(settings["plan_file"])), Tokens.load(data / "dataset" / "train")
    development = Development(session, plan, Tokens.load(data / "dataset" / "dev"))
    if world.rank == 0:
        write_json(session.folder / "env.json", environment.describe())
    checkpoint.barrier(strategy)
    clock.part("data")

    files.event("run_start", {"steps": plan.steps, "world_size": world.size})
    losses = _steps(session, plan, tokens, development)
    files.event("run_stop")
    development.finish()
    losses = strategy.all_gather(losses).mean(dim=0).tolist()
    wrong = next((step for step, loss in enumerate(losses, 1) if not np.isfinite(loss)), None)
    if wrong:
        raise RunFailed(f"the loss is {losses[wrong - 1]} in step {wrong}; lower train.learning_rate or set train.clip")
    files.write(
        {
            "clock": clock.reading(),
            "peak_memory_mb": environment.peak_memory_mb(world.device),
            "seed": seed,
            "settings": live_settings(strategy) | {"parameters": parameters},
            "hashes": {"weights": weights, "plan": plan.hash},
            "losses": losses,
            "gradient_norm": files.gradient_norm,
            "dev": development.history,
            "notes": strategy.notes,
        }
    )


def _steps(session: Session, plan: Plan, tokens: Tokens, development: "Development") -> torch.Tensor:
    """All optimizer steps. Returns this rank's part of each step's loss, [steps]: the mean over ranks is the loss."""
    strategy, clock, world = session.strategy, session.clock, session.strategy.world
    schedule = models.make_schedule(strategy.optimizer, session.train, plan.steps)
    losses = torch.zeros(plan.steps, device=world.device)
    clock.open()
    for step in range(plan.steps):
        # Frameworks average gradients over ranks, whose shares may be unequal. So the mean over the global batch is
        # made of sums: sum of this rank's losses * world size / global batch.
        scale = world.size / len(plan.step_ids(step))
        micro_batches = plan.micro_batches(step, world.rank, world.size, session.train["accumulation"])
        for ids in micro_batches:
            batch = to_device(tokens.batch(ids, plan.widths[step]), world.device)
            with strategy.autocast():
                logits = strategy.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            loss = cross_entropy(logits.float(), batch["labels"], reduction="sum") * scale
            strategy.backward(loss, last=ids is micro_batches[-1])
            losses[step] += loss.detach()
            session.files.consume(step, ids)
        if session.trial and step == 0:
            session.files.gradient_norm = strategy.gradient_norm().item()
        strategy.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a step that loss scaling skipped still counts in the schedule
            schedule.step()
        clock.tick()
        session.progress.step()
        if development.due(step + 1):
            clock.close()
            development.evaluate(step + 1)
            clock.open()
    clock.close()
    return losses


def to_device(batch: dict[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    if device.type == "cuda":
        return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in tensors.items()}
    return tensors


class Development:
    """Evaluation on the dev split while training, and which checkpoint is kept: the best there, or the last."""

    def __init__(self, session: Session, plan: Plan, tokens: Tokens):
        self.session, self.plan, self.tokens = session, plan, tokens
        self.every, self.keep = session.train["eval_every"], session.train["checkpoint"]
        self.history: list[dict] = []
        self.best = -1.0

    def due(self, step: int) -> bool:
        return bool(self.every) and step % self.every == 0 and step < self.plan.steps

    def finish(self) -> None:
        """After the last step: the last evaluation, and the last weights if it is them that are kept."""
        if self.every:
            self.evaluate(self.plan.steps)
        if self.keep == "last":
            self._save(self.plan.steps)

    def evaluate(self, step: int) -> None:
        logits = gather_logits(self.session, self.tokens)
        labels = torch.from_numpy(self.tokens.labels)
        predicted = logits.argmax(dim=1)
        scores = {
            "step": step,
            "loss": cross_entropy(logits, labels).item(),
            "accuracy": (predicted == labels).double().mean().item(),
            "macro_f1": macro_f1(labels, predicted, logits.shape[1]),
        }
        self.history.append(scores)
        self.session.files.event("eval", scores)
        if self.session.strategy.world.rank == 0:
            numbers = ", ".join(f"dev {name} {scores[name]:.4f}" for name in ("loss", "accuracy", "macro_f1"))
            print(f"step {step}/{self.plan.steps}: {numbers}", flush=True)
        # Every rank has all logits, so every rank decides alike.
        if self.keep == "best" and scores["macro_f1"] > self.best:
            self.best = scores["macro_f1"]
            self._save(step)

    def _save(self, step: int) -> None:
        checkpoint.save(self.session.strategy, self.session.folder, {"step": step, "plan": self.plan.hash})
        self.session.files.event("checkpoint", {"step": step})
        self.session.progress.alive()


def macro_f1(labels: torch.Tensor, predicted: torch.Tensor, classes: int) -> float:
    """The mean over classes of 2 * hits / (truths + guesses), 0 for a class with neither; labels and predicted: [n].

    The report's figure is scikit-learn's; importing that would cost every rank over a second.
    """
    hits, truths, guesses = (
        part.bincount(minlength=classes) for part in (labels[labels == predicted], labels, predicted)
    )
    return (2 * hits / (truths + guesses).clamp(min=1)).mean().item()


def gather_logits(session: Session, tokens: Tokens) -> torch.Tensor:
    """The logits of every sample of a split, each once, in order, on every rank: float32 on the CPU, [n, labels].

    All ranks run the same number of equally large batches, as collectives inside a forward pass need. What fills up a
    share is marked by the id -1, and dropped again.
    """
    strategy, world = session.strategy, session.strategy.world
    all_ids, all_logits = [], []
    strategy.model.eval()
    with torch.no_grad():
        for ids in tokens.batches(session.train["global_batch"]):
            padded = np.full(-(-len(ids) // world.size) * world.size, -1)
            padded[: len(ids)] = ids
            mine = share(padded, world.rank, world.size)
            width = int(tokens.lengths[ids].max())
            inputs = to_device(tokens.batch(np.where(mine < 0, ids[0], mine), width), world.device)
            with strategy.autocast():
                logits = strategy.model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            all_ids.append(torch.from_numpy(mine).to(world.device))
            all_logits.append(logits.float())
            session.progress.alive()
    strategy.model.train()
    ids = strategy.all_gather(torch.cat(all_ids)).flatten().cpu()
    logits = strategy.all_gather(torch.cat(all_logits)).flatten(0, 1).cpu()[ids >= 0]
    order = ids[ids >= 0].argsort()
    if not torch.equal(ids[ids >= 0][order], torch.arange(len(tokens))):
        raise RunFailed("the gathered predictions do not hold each sample of the split exactly once")
    return logits[order]


def live_settings(strategy: Strategy) -> dict:
    """What the run really trains with, read from the live objects."""
    optimizer, world = strategy.optimizer, strategy.world
    return {
        "strategy": type(strategy).__module__.rsplit(".", 1)[-1],
        "model": type(strategy.model).__name__,
        "dropout": sorted({module.p for module in strategy.module.modules() if isinstance(module, torch.nn.Dropout)}),
        "attention": getattr(strategy.module.config, "_attn_implementation", None),
        "optimizer": type(optimizer).__name__,
        "groups": [
            {name: group[name] for name in ("initial_lr", "betas", "eps", "weight_decay")}
            | {"parameters": sum(parameter.numel() for parameter in group["params"])}
            for group in optimizer.param_groups
        ],
        "precision": strategy.precision,
        "loss_scaling": strategy.scaler.is_enabled(),
        "world_size": world.size,
        "device": str(world.device),
        "backend": world.backend,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
    }
