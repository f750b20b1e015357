"""A user's arguments for transformers.TrainingArguments, checked against their row before anything starts.

Arguments that the row decides must have the row's value. Others are accepted only if they have an effect on a row; most
have none, since Trainer gets the plan's batches, the row's optimizer and the row's loss.
"""

from lockstep.config import precisions
from lockstep.config.fixed import EPS
from lockstep.config.hardware import Hardware
from lockstep.config.sections import Train
from lockstep.errors import BadInput

TAKEN = ("gradient_checkpointing", "gradient_checkpointing_kwargs", "full_determinism", "torch_empty_cache_steps")
TAKEN += ("torch_compile", "torch_compile_backend", "torch_compile_mode", "use_liger_kernel", "neftune_noise_alpha")


def refuse(arguments: dict, options: dict, train: Train, hardware: Hardware, where: str) -> None:
    """Raise BadInput if an argument contradicts the row, or has no effect on it."""
    held = _wanted(options, train, hardware)
    for name, given in arguments.items():
        if name in held:
            wanted, why = held[name]
            if given != wanted:
                raise BadInput(f"{where}.{name}: {given!r}, but {why}. Leave it out, or set it to {wanted!r}.")
        elif name == "gradient_checkpointing" and train.activation_checkpointing and not given:
            raise BadInput(
                f"{where}.{name}: {given!r}, but train.activation_checkpointing is true for this row. Leave it out, or"
                " set activation_checkpointing to false in the row."
            )
        elif name not in TAKEN:
            raise BadInput(
                f"{where}.{name}: has no effect on a row, or one that is not allowed, since the plan and the row decide"
                f" it. Accepted are {', '.join(TAKEN)}, and arguments that the row decides, with the row's value."
            )


def _wanted(options: dict, train: Train, hardware: Hardware) -> dict[str, tuple]:
    """The required values of arguments that the row decides, each with a reason."""
    batch = train.global_batch / hardware.devices / train.accumulation
    in_precision = f"the row trains in {train.precision}"
    return {
        "per_device_train_batch_size": (batch, f"each of the row's micro-batches has {batch:g} samples"),
        "gradient_accumulation_steps": (train.accumulation, f"the row's accumulation is {train.accumulation}"),
        "learning_rate": (train.learning_rate, f"the row's is {train.learning_rate:g}"),
        "weight_decay": (train.weight_decay, f"the row's is {train.weight_decay:g}"),
        "adam_beta1": (train.betas[0], f"the row's betas are {train.betas}"),
        "adam_beta2": (train.betas[1], f"the row's betas are {train.betas}"),
        "adam_epsilon": (EPS, f"all rows have {EPS:g}"),
        "max_grad_norm": (train.clip, f"the row clips at {train.clip:g} (0: no clipping)"),
        "num_train_epochs": (train.epochs, f"the row's epochs are {train.epochs}"),
        "lr_scheduler_type": (train.schedule, f"the row's schedule is {train.schedule}"),
        "label_smoothing_factor": (train.label_smoothing, f"the row's label_smoothing is {train.label_smoothing:g}"),
        "seed": (train.seed, f"the row's seed is {train.seed}"),
        **{name: (on, in_precision) for name, on in precisions.switches(train.precision).items()},
        "ddp_bucket_cap_mb": (options["bucket_mb"], f"the row's bucket_mb is {options['bucket_mb']}"),
        "ddp_find_unused_parameters": (
            options["find_unused_parameters"],
            f"the row's find_unused_parameters is {options['find_unused_parameters']}",
        ),
        "ddp_backend": (hardware.backend, f"the row's backend is {hardware.backend}"),
    }


def given(arguments: dict) -> dict:
    """The arguments that are passed to Trainer unchanged; the others have the row's values anyway."""
    return {name: value for name, value in arguments.items() if name in TAKEN}
