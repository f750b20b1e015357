"""The settings with which a run really trains, read from the live objects and compared with those of its row.

Otherwise a framework that silently uses another setting would be compared under the wrong name.
"""

from collections.abc import Callable
from dataclasses import asdict

import torch

from lockstep.config import precisions, registry
from lockstep.config.machine import not_compiling
from lockstep.config.settings import Settings
from lockstep.errors import RunFailed
from lockstep.model import attention, batch_norm, lora, models
from lockstep.model.optimizer import hyperparameters
from lockstep.strategies.single import Strategy

COMPUTING = (torch.nn.Linear, torch.nn.modules.conv._ConvNd)
# Settings of an optimizer's groups, as far as it has them.
SETTINGS = ("betas", "eps", "momentum", "nesterov", "dampening", "ns_steps", "adjust_lr_fn", "weight_decay")


def check(strategy: Strategy, asked: Settings, inputs: dict | None = None) -> dict:
    """The live settings of a strategy that is set up. Raises RunFailed if they differ from those asked for.

    Only a forward pass shows the precision. So this registers a hook, which raises in the first one. In a compiled
    model a hook would break the graph permanently; there, a batch's `inputs` go through one pass that is not compiled.
    """
    live = read(strategy)
    wanted = {"world_size": strategy.processes, "threads": asked.hardware.threads}
    wanted |= {"optimizer": asked.train.optimizer, "device": asked.hardware.device}
    actual = {name: live[name] for name in ("world_size", "threads")}
    actual |= {"optimizer": strategy.algorithm(_innermost(strategy.optimizer)), "device": strategy.world.device.type}
    if asked.dropout is not None:
        wanted["dropout"], actual["dropout"] = [asked.dropout], live["dropout"] or [asked.dropout]
    tf32 = asked.options.get("tf32", False)
    wanted |= {"tf32_convolutions": tf32, "float32_matmul_precision": "high" if tf32 else "highest"}
    actual |= {"tf32_convolutions": live["tf32_convolutions"], "float32_matmul_precision": live["matmul"]}
    wanted |= (updates := lora.asked(asked.train))
    actual |= {name: live["lora"].get(name) for name in updates}
    for number, group in enumerate(live["groups"]):
        name = f"optimizer group {number}"
        expected = {"initial_lr": asked.train.learning_rate} | hyperparameters(asked.train, group)
        wanted |= {f"{name}: {key}": value for key, value in expected.items()}
        actual |= {f"{name}: {key}": group.get(key) for key in expected}
    wanted["weight decay"] = sorted({0.0, asked.train.weight_decay})
    decays = {group["weight_decay"] for group in live["groups"]}
    # DeepSpeed drops a group without parameters, as that of biases and norms is where LoRA trains matrices only.
    actual["weight decay"] = sorted(decays if _trains_vectors(strategy.module) else decays | {0.0})
    flat = asdict(asked.train) | asdict(asked.hardware) | asked.options
    wanted |= {key: flat[key] for key in live["options"] if key in flat}
    actual |= {key: value for key, value in live["options"].items() if key in flat}
    if asked.train.activation_checkpointing:
        wanted["activation_checkpointing"], actual["activation_checkpointing"] = True, live["activation_checkpointing"]
    if models.has_batch_statistics(strategy.module) and strategy.world.replicas > 1:
        together = registry.literals(asked.strategy)["SYNCS_BATCH_NORM"]
        wanted["batch statistics of all ranks"] = any(asked.options.get(key) for key in together)
        actual["batch statistics of all ranks"] = batch_norm.is_synchronised(strategy.module)
    if "broadcast_buffers" in live["options"]:
        wanted["broadcast_buffers"] = models.has_changing_buffers(strategy.module)
        actual["broadcast_buffers"] = live["options"]["broadcast_buffers"]
    for key, value in wanted.items():
        if actual[key] != value:
            raise RunFailed(f"{key}: the row asks for {value}, but {asked.strategy} uses {actual[key]}")
    _check_precision(strategy, asked.precision, live)
    if registry.matches(asked.strategy, "COMPILES", asked.options):
        if variables := not_compiling():  # of a rank that was started by hand; `Row.unavailable` knows its own only
            raise RunFailed(f"compile: the row asks for it, but {', '.join(variables)} in the environment prevents it")
        strategy.model.eval()  # so that no random number is drawn
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            strategy.forward(inputs)
        strategy.model.train()
    return live


def _trains_vectors(model: torch.nn.Module) -> bool:
    """Whether a parameter of one dimension is trained. ZeRO-3 keeps the shape of each aside (ds_shape)."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return any(len(getattr(parameter, "ds_shape", parameter.shape)) < 2 for parameter in trained)


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
        # Those of the optimizer that steps, because a wrapper has its own defaults.
        "fused": all(group.get("fused") for group in inner.param_groups),
        "groups": [
            {"initial_lr": group["initial_lr"]}
            | {name: stepping[name] for name in SETTINGS if name in stepping}
            # None in ZeRO-3, whose optimizer is given empty parameters.
            | {"parameters": sum(parameter.numel() for parameter in group["params"]) or None}
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

    The optimizer inside a wrapper may get a new rate only in its next step, as with ZeroRedundancyOptimizer, so there
    the rate of the previous step is accepted too.
    """
    rate, before = (asked.train.learning_rate * factor(step) for step in (done, max(0, done - 1)))
    for optimizer, allowed in ((strategy.optimizer, (rate,)), (_innermost(strategy.optimizer), (rate, before))):
        for group in optimizer.param_groups:
            if group["lr"] not in allowed:
                raise RunFailed(
                    f"learning rate after {done} steps: the row asks for {rate:.6g} (schedule: {asked.train.schedule}),"
                    f" but {asked.strategy} uses {group['lr']:.6g}"
                )


def live_rate(strategy: Strategy) -> float:
    """The learning rate of the optimizer that steps; all its groups have the same one."""
    return _innermost(strategy.optimizer).param_groups[0]["lr"]


def skipped(strategy: Strategy, precision: str, steps: int) -> list[str]:
    """A note if some of all `steps` changed no weights, because their gradients overflowed, as fp16 allows.

    An optimizer that does not count its own steps, such as SGD, tells nothing. Raises RunFailed if no step changed any.
    """
    if not precisions.of(precision).scaled:
        return []
    states = _innermost(strategy.optimizer).state.values()
    taken = int(max((float(state["step"]) for state in states if "step" in state), default=steps))
    if not taken:
        raise RunFailed(
            f"the gradients of all {steps} steps overflowed in {precision}, so none changed the weights; set precision"
            " to bf16 or fp32"
        )
    note = f"the gradients of {steps - taken} of {steps} steps overflowed in {precision}: these changed no weights"
    return [note] if taken < steps else []


def _innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that steps; frameworks wrap it, some of them twice."""
    while hasattr(optimizer, "optimizer") or hasattr(optimizer, "optim"):
        optimizer = getattr(optimizer, "optimizer", None) or optimizer.optim
    return optimizer


def _check_precision(strategy: Strategy, precision: str, live: dict) -> None:
    """Write to `live` in which type the first layer that runs computes. Raises RunFailed if not in `precision`."""
    layers = [module for module in strategy.module.modules() if isinstance(module, COMPUTING)]

    def look(module, inputs, output):
        for handle in handles:  # of all layers: some are never called, because their owner only reads their weights
            handle.remove()
        live["computes_in"] = str(output.dtype).removeprefix("torch.")
        if live["computes_in"] != precisions.of(precision).dtype:
            raise RunFailed(f"precision: the row asks for {precision}, but the model computes in {live['computes_in']}")

    handles = [layer.register_forward_hook(look) for layer in layers]
