"""What a run really trains with, read from the live objects, and checked against what its row asks for.

A framework that quietly uses another setting would otherwise be compared under a wrong name.
"""

from collections.abc import Callable
from dataclasses import asdict

import torch

from lockstep.config import precisions
from lockstep.config.settings import Settings
from lockstep.errors import RunFailed
from lockstep.model import attention, batch_norm, lora, models
from lockstep.model.optimizer import hyperparameters
from lockstep.strategies.single import Strategy

COMPUTING = (torch.nn.Linear, torch.nn.modules.conv._ConvNd)
# Of an optimizer's groups, whichever of them it has.
SETTINGS = ("betas", "eps", "momentum", "nesterov", "dampening", "ns_steps", "adjust_lr_fn", "weight_decay")


def check(strategy: Strategy, asked: Settings, inputs: dict | None = None) -> dict:
    """The live settings of a prepared strategy. Raises RunFailed if they differ.

    The precision shows in a forward pass only. This leaves a hook in the first one, which raises then. In a compiled
    model a hook breaks the graph, for good: there a pass over `inputs`, a batch's, is made that is not compiled.
    """
    live = read(strategy)
    wanted = {"world_size": strategy.processes, "threads": asked.hardware.threads}
    wanted |= {"optimizer": asked.train.optimizer, "device": asked.hardware.device}
    actual = {name: live[name] for name in ("world_size", "threads")}
    actual |= {"optimizer": strategy.algorithm(_innermost(strategy.optimizer)), "device": strategy.world.device.type}
    if asked.dropout is not None:
        wanted["dropout"], actual["dropout"] = [asked.dropout], live["dropout"] or [asked.dropout]
    wanted["tf32_convolutions"] = asked.options.get("tf32", False)
    actual["tf32_convolutions"] = live["tf32_convolutions"]
    wanted |= (updates := lora.asked(asked.train))
    actual |= {name: live["lora"].get(name) for name in updates}
    for number, group in enumerate(live["groups"]):
        name = f"optimizer group {number}"
        expected = {"initial_lr": asked.train.learning_rate} | hyperparameters(asked.train, group)
        wanted |= {f"{name}: {key}": value for key, value in expected.items()}
        actual |= {f"{name}: {key}": group.get(key) for key in expected}
    wanted["weight decay"] = sorted({0.0, asked.train.weight_decay})
    actual["weight decay"] = sorted({group["weight_decay"] for group in live["groups"]})
    flat = asdict(asked.train) | asdict(asked.hardware) | asked.options
    wanted |= {key: flat[key] for key in live["options"] if key in flat}
    actual |= {key: value for key, value in live["options"].items() if key in flat}
    if asked.train.activation_checkpointing:
        wanted["activation_checkpointing"], actual["activation_checkpointing"] = True, live["activation_checkpointing"]
    if models.has_batch_statistics(strategy.module) and strategy.world.replicas > 1:
        wanted["sync_batchnorm"] = asked.options.get("sync_batchnorm", False)
        actual["sync_batchnorm"] = batch_norm.is_synchronised(strategy.module)
    if "broadcast_buffers" in live["options"]:
        wanted["broadcast_buffers"] = models.has_changing_buffers(strategy.module)
        actual["broadcast_buffers"] = live["options"]["broadcast_buffers"]
    for key, value in wanted.items():
        if actual[key] != value:
            raise RunFailed(f"{key}: {value} is asked for, and {asked.strategy} uses {actual[key]}")
    _check_precision(strategy, asked.precision, live)
    if asked.options.get("compile", "off") != "off":
        strategy.model.eval()  # so that no random number is drawn
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            strategy.forward(inputs)
        strategy.model.train()
    return live


def read(strategy: Strategy) -> dict:
    optimizer, world = strategy.optimizer, strategy.world
    inner = _innermost(optimizer)
    return {
        "strategy": type(strategy).__module__.rsplit(".", 1)[-1],
        "model": type(strategy.model).__name__,
        "dropout": models.dropouts(strategy.module),
        "lora": lora.live(strategy.module),
        "attention": getattr(getattr(strategy.module, "config", None), "_attn_implementation", None),
        "activation_checkpointing": models.checkpoints_activations(strategy.module),
        "attention_allowed": attention.allowed(),
        "optimizer": type(inner).__name__,
        # Of the optimizer that steps, as a wrapper has defaults of its own.
        "fused": all(group.get("fused") for group in inner.param_groups),
        "groups": [
            {"initial_lr": group["initial_lr"]}
            | {name: stepping[name] for name in SETTINGS if name in stepping}
            | {"parameters": sum(parameter.numel() for parameter in group["params"])}
            for group, stepping in zip(optimizer.param_groups, inner.param_groups, strict=True)
        ],
        "precision": strategy.precision,
        "matmul": torch.get_float32_matmul_precision(),
        "tf32_convolutions": torch.backends.cudnn.allow_tf32,
        "loss_scaling": strategy.loss_scale() != 1.0,
        "world_size": world.size,
        "device": str(world.device),
        "backend": world.backend,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "options": strategy.live(),
    }


def check_rate(strategy: Strategy, asked: Settings, factor: Callable[[int], float], done: int) -> None:
    """Raises RunFailed unless the live learning rate is that of the schedule after `done` steps.

    The optimizer inside a wrapper may learn of a new rate in its next step only, as with ZeroRedundancyOptimizer, so
    that of the step before is allowed there too.
    """
    rate, before = (asked.train.learning_rate * factor(step) for step in (done, max(0, done - 1)))
    for optimizer, allowed in ((strategy.optimizer, (rate,)), (_innermost(strategy.optimizer), (rate, before))):
        for group in optimizer.param_groups:
            if group["lr"] not in allowed:
                raise RunFailed(
                    f"learning rate after {done} steps: {rate:.6g} is asked for (schedule: {asked.train.schedule}),"
                    f" and {asked.strategy} uses {group['lr']:.6g}"
                )


def live_rate(strategy: Strategy) -> float:
    """The learning rate of the optimizer that steps; its groups have the same."""
    return _innermost(strategy.optimizer).param_groups[0]["lr"]


def _innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that steps: frameworks wrap it, some twice."""
    while hasattr(optimizer, "optimizer") or hasattr(optimizer, "optim"):
        optimizer = getattr(optimizer, "optimizer", None) or optimizer.optim
    return optimizer


def _check_precision(strategy: Strategy, precision: str, live: dict) -> None:
    """Note in `live` in what the first layer of matrices computes that does; raise RunFailed if not in that."""
    layers = [module for module in strategy.module.modules() if isinstance(module, COMPUTING)]

    def look(module, inputs, output):
        for handle in handles:  # of all, as some are never called: their owner reads their weights
            handle.remove()
        live["computes_in"] = str(output.dtype).removeprefix("torch.")
        if live["computes_in"] != precisions.of(precision).dtype:
            raise RunFailed(f"precision: {precision} is asked for, and the model computes in {live['computes_in']}")

    handles = [layer.register_forward_hook(look) for layer in layers]
