"""The training loop: replays the plan on one rank, whichever strategy it runs.

    for each optimizer step of the plan:
        for each micro-batch of this rank's share:  forward, backward
        update the weights, and the learning rate

Nothing is synchronised, printed or reduced per step: losses stay on the device, and are gathered after the last step.
"""

import os
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from lockstep import checkpoint, environment, models, strategies
from lockstep.clock import Clock
from lockstep.data import Tokens
from lockstep.errors import RunFailed
from lockstep.files import read_json, write_json
from lockstep.plan import Plan, share
from lockstep.processes import die_with_parent
from lockstep.record import Progress, RankFiles


def main(folder: Path) -> None:
    """Train this process's share of the run in `folder`. Does not return.

    The process ends by os._exit: with gloo, PyTorch 2.13's DDP sometimes hangs or aborts in the interpreter's own exit,
    after all is done. So everything is written and flushed first, and what was written says how the run went.
    """
    die_with_parent()
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
        _train(strategy, settings, folder, clock, files, progress)
        strategy.stop()
        code = 0
    except BaseException as error:  # DCP's CheckpointException and sys.exit are no Exception
        files.write_error(error, int(progress.row[2]) if progress else 0)
        print(f"rank {files.rank} failed:", file=sys.stderr)
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _train(strategy, settings: dict, folder: Path, clock: Clock, files: RankFiles, progress: Progress) -> None:
    world, train, data = strategy.world, settings["train"], Path(settings["data"])
    clock.device = world.device
    seed = int(np.random.SeedSequence([train["seed"], world.rank]).generate_state(1)[0])  # dropout must differ by rank
    torch.manual_seed(seed)
    model = models.load(data / "weights", settings["dropout"]).train()
    weights = models.hash_weights(model.state_dict())
    clock.part("model")
    strategy.prepare(model, lambda prepared: models.make_optimizer(prepared, train))
    clock.part("wrap")
    plan, tokens = Plan.load(Path(settings["plan_file"])), Tokens.load(data / "dataset" / "train")
    schedule = models.make_schedule(strategy.optimizer, train, plan.steps)
    development = Development(strategy, settings, folder, files, progress, plan)
    checkpoint.barrier(strategy)
    clock.part("data")
    if world.rank == 0:
        write_json(folder / "env.json", environment.describe())
    files.event("run_start", {"steps": plan.steps, "world_size": world.size})

    losses = _steps(strategy, train, plan, tokens, schedule, clock, files, progress, development)

    files.event("run_stop")
    development.finish()
    losses = strategy.all_gather(losses).mean(dim=0).tolist()
    wrong = next((step for step, loss in enumerate(losses, 1) if not np.isfinite(loss)), None)
    if wrong:
        raise RunFailed(f"the loss is {losses[wrong - 1]} from step {wrong} on; lower train.learning_rate or clip gradients")
    files.write(
        {
            "clock": clock.reading(),
            "peak_memory_mb": environment.peak_memory_mb(world.device),
            "seed": seed,
            "settings": live_settings(strategy),
            "hashes": {"weights": weights, "plan": plan.hash},
            "losses": losses,
            "dev": development.history,
            "notes": strategy.notes,
        }
    )


def _steps(strategy, train, plan, tokens, schedule, clock, files, progress, development) -> torch.Tensor:
    """All optimizer steps. Returns each step's loss, shape [steps]: this rank's part of it, to be averaged over ranks."""
    world, losses = strategy.world, torch.zeros(plan.steps, device=strategy.world.device)
    clock.open()
    for step in range(plan.steps):
        # Frameworks average gradients over ranks; ranks may have unequal shares, so the mean over the global batch
        # is made of sums: sum of the rank's losses * world size / global batch.
        scale = world.size / len(plan.step_ids(step))
        micro_batches = plan.micro_batches(step, world.rank, world.size, train["accumulation"])
        for ids in micro_batches:
            batch = to_device(tokens.batch(ids, plan.widths[step]), world.device)
            with strategy.autocast():
                logits = strategy.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            loss = cross_entropy(logits.float(), batch["labels"], reduction="sum") * scale
            strategy.backward(loss, last=ids is micro_batches[-1])
            losses[step] += loss.detach()
            files.consume(step, ids)
        strategy.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a step that loss scaling skipped still counts in the schedule
            schedule.step()
        clock.tick()
        progress.step()
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
    """Evaluation on the dev split while training, and the checkpoint that is kept: the best there, or the last."""

    def __init__(self, strategy, settings: dict, folder: Path, files: RankFiles, progress: Progress, plan: Plan):
        self.strategy, self.folder, self.files, self.progress, self.plan = strategy, folder, files, progress, plan
        self.every, self.keep = settings["train"]["eval_every"], settings["train"]["checkpoint"]
        self.batch = settings["train"]["global_batch"]
        self.tokens = Tokens.load(Path(settings["data"]) / "dataset" / "dev") if self.every else None
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
        from sklearn.metrics import f1_score

        logits = gather_logits(self.strategy, self.tokens, self.batch, self.progress)
        labels = torch.from_numpy(self.tokens.labels)
        predicted = logits.argmax(dim=1)
        scores = {
            "step": step,
            "loss": cross_entropy(logits, labels).item(),
            "accuracy": (predicted == labels).double().mean().item(),
            "macro_f1": float(f1_score(labels, predicted, average="macro", zero_division=0)),
        }
        self.history.append(scores)
        self.files.event("eval", scores)
        if self.strategy.world.rank == 0:
            numbers = ", ".join(f"dev {name} {scores[name]:.4f}" for name in ("loss", "accuracy", "macro_f1"))
            print(f"step {step}/{self.plan.steps}: {numbers}", flush=True)
        # Every rank has all logits, so every rank decides alike.
        if self.keep == "best" and scores["macro_f1"] > self.best:
            self.best = scores["macro_f1"]
            self._save(step)

    def _save(self, step: int) -> None:
        checkpoint.save(self.strategy, self.folder, {"step": step, "plan": self.plan.hash})
        self.files.event("checkpoint", {"step": step})
        self.progress.alive()


def gather_logits(strategy, tokens: Tokens, batch: int, progress: Progress) -> torch.Tensor:
    """The logits of every sample of a split, each once, in order, on every rank: float32 on the CPU, [n, labels].

    All ranks run the same number of equally large batches, as collectives in a forward pass need; what fills up a share is
    marked by the id -1 and dropped again.
    """
    world, all_ids, all_logits = strategy.world, [], []
    strategy.model.eval()
    with torch.no_grad():
        for ids in tokens.batches(batch):
            width = int(tokens.lengths[ids].max())
            padded = np.full(-(-len(ids) // world.size) * world.size, -1)
            padded[: len(ids)] = ids
            mine = share(padded, world.rank, world.size)
            inputs = to_device(tokens.batch(np.where(mine < 0, ids[0], mine), width), world.device)
            with strategy.autocast():
                logits = strategy.model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            all_ids.append(torch.from_numpy(mine).to(world.device))
            all_logits.append(logits.float())
            progress.alive()
    strategy.model.train()
    ids = strategy.all_gather(torch.cat(all_ids)).flatten().cpu()
    logits = strategy.all_gather(torch.cat(all_logits)).flatten(0, 1).cpu()[ids >= 0]
    order = ids[ids >= 0].argsort()
    if not torch.equal(ids[ids >= 0][order], torch.arange(len(tokens))):
        raise RunFailed("the gathered predictions do not hold each sample of the split exactly once")
    return logits[order]


def live_settings(strategy) -> dict:
    """What the run really trains with, read from the live objects."""
    optimizer, world = strategy.optimizer, strategy.world
    return {
        "strategy": type(strategy).__module__.rsplit(".", 1)[-1],
        "model": type(strategy.model).__name__,
        "parameters": sum(parameter.numel() for parameter in strategy.module.parameters()),
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
