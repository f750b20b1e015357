"""A user's configuration file for DeepSpeed's engine, called ds_config.json in its documentation.

Keys that the row decides must have the row's value, or "auto", or be absent. The file decides all other settings of
ZeRO, such as bucket sizes. A file that would train other data, another model or another schedule is refused. A trial
has other batches and learning rates than the row, so the trial's values override the file's there.
"""

from lockstep.config import optimizers, own_files, precisions
from lockstep.config.hardware import Hardware
from lockstep.config.sections import Train

AUTO = "auto"  # transformers' placeholder for the caller's value
# Keys that may have any value, besides those that a row decides.
FREE = ("zero_optimization", *precisions.MIXED, "torch_autocast", "activation_checkpointing", "aio", "comms_logger")
FREE += ("communication_data_type", "prescale_gradients", "gradient_predivide_factor", "sparse_gradients")
FREE += ("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "flops_profiler")
FREE += ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "disable_allgather")
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")


def refuse(file: str, options: dict, train: Train, hardware: Hardware, where: str) -> None:
    """Raise BadInput if the file does not exist or contradicts the row `where`."""
    said = _without_auto(own_files.read(file, where))
    own_files.refuse_foreign(said, (*FREE, *BATCH, "optimizer"), file, where)
    for key, (wanted, why) in _wanted(options, train, hardware).items():
        given = _at(said, key)
        if given is not None and given != wanted:
            raise own_files.contradiction(file, where, key, given, wanted, why)
    for key in ("optimizer", "zero_optimization"):
        if not isinstance(said.get(key, {}), dict):
            raise own_files.contradiction(file, where, key, said[key], {}, "DeepSpeed expects keys and values there")
    if "optimizer" in said:
        named = algorithm(said["optimizer"])
        if named != train.optimizer:
            raise own_files.contradiction(
                file,
                where,
                "optimizer.type",
                said["optimizer"].get("type"),
                train.optimizer.capitalize(),
                f"the row's optimizer is {train.optimizer}",
            )


def algorithm(optimizer: dict) -> str:
    """The optimizer that DeepSpeed creates from this section; its "Adam" is AdamW unless `adam_w_mode` is false."""
    name = str(optimizer.get("type", "")).lower()
    as_adamw = (optimizer.get("params") or {}).get("adam_w_mode", True)
    return "adamw" if name == "adam" and as_adamw else name


def merged(file: str | None, ours: dict) -> dict:
    """The engine's settings: those of the file, without its optimizer, overridden by `ours`."""
    if not file:
        return ours
    said = _without_auto(own_files.read(file, "config_file"))
    for decided in ("optimizer", *precisions.MIXED, "torch_autocast", *BATCH):
        if decided not in ours:  # in a trial, whose precision and batch may differ from the file's
            said.pop(decided, None)
    return _over(said, ours)


def optimizer(file: str | None) -> dict | None:
    """The file's section `optimizer`, from which the engine creates one; None if the row's optimizer is used."""
    return _without_auto(own_files.read(file, "config_file")).get("optimizer") if file else None


def _wanted(options: dict, train: Train, hardware: Hardware) -> dict[str, tuple]:
    """The required values of keys that the file may set, each with a reason."""
    switches, native = precisions.switches(train.precision), options["native_precision"]
    in_precision = f"the row trains in {train.precision}{', natively' if native else ''}"
    batch = train.global_batch / hardware.devices / train.accumulation
    parameters = {"lr": train.learning_rate, "weight_decay": train.weight_decay}
    own = optimizers.settings(train)
    parameters |= {name: list(value) if isinstance(value, tuple) else value for name, value in own.items()}
    offload = "cpu" if options["offload_optimizer"] else "none"
    return {
        "train_batch_size": (train.global_batch, f"the row's global batch is {train.global_batch}"),
        "train_micro_batch_size_per_gpu": (batch, f"each of the row's micro-batches has {batch:g} samples"),
        "gradient_accumulation_steps": (train.accumulation, f"the row's accumulation is {train.accumulation}"),
        "gradient_clipping": (train.clip, f"the row clips at {train.clip:g} (0: no clipping)"),
        "zero_optimization.stage": (options["stage"], f"the row's stage is {options['stage']}"),
        "zero_optimization.offload_optimizer.device": (offload, f"the row's offload_optimizer is {offload != 'none'}"),
        **{f"{name}.enabled": (native and on, in_precision) for name, on in switches.items()},
        "torch_autocast.enabled": (any(switches.values()) and not native, in_precision),
        **{f"optimizer.params.{key}": (value, f"the row's is {value}") for key, value in parameters.items()},
    }


def _at(said: dict, key: str):
    for part in key.split("."):
        said = said.get(part) if isinstance(said, dict) else None
    return said


def _without_auto(said: dict) -> dict:
    return {
        key: _without_auto(value) if isinstance(value, dict) else value for key, value in said.items() if value != AUTO
    }


def _over(said: dict, ours: dict) -> dict:
    """The file's settings overridden by `ours`, key by key."""
    both = dict(said)
    for key, value in ours.items():
        theirs = both.get(key)
        both[key] = _over(theirs, value) if isinstance(theirs, dict) and isinstance(value, dict) else value
    return both
