"""Arguments of the user's own for transformers.TrainingArguments, held against their row before anything starts.

What the row decides must be the same there. Of the rest those are taken that have an effect on a row: Trainer is given
the plan's batches, the row's optimizer and its own loss, so that most of its arguments have none.
"""

from lockstep.config.fixed import EPS
from lockstep.config.hardware import Hardware
from lockstep.config.sections import Train
from lockstep.errors import BadInput

TAKEN = ("gradient_checkpointing", "gradient_checkpointing_kwargs", "full_determinism", "torch_empty_cache_steps")
TAKEN += ("torch_compile", "torch_compile_backend", "torch_compile_mode", "use_liger_kernel", "neftune_noise_alpha")


def refuse(arguments: dict, options: dict, train: Train, hardware: Hardware, where: str) -> None:
    """Raises BadInput where an argument says something else than the row, or has no effect on it."""
    held = _wanted(options, train, hardware)
    for name, given in arguments.items():
        if name in held:
            wanted, why = held[name]
            if given != wanted:
                raise BadInput(f"{where}.{name}: {given!r}, and {why}. Leave it out, or set it to {wanted!r}.")
        elif name not in TAKEN:
            raise BadInput(
                f"{where}.{name}: has no effect on a row, or none that a row may have: the plan gives the batches, and"
                f" the row says the rest. Taken are {', '.join(TAKEN)}; and what the row decides, where it is the same."
            )


def _wanted(options: dict, train: Train, hardware: Hardware) -> dict[str, tuple]:
    """What arguments have to be where they are given, and why."""
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
        "max_grad_norm": (train.clip, f"the row clips at {train.clip:g} (0 is not at all)"),
        "num_train_epochs": (train.epochs, f"the row's epochs are {train.epochs}"),
        "lr_scheduler_type": (train.schedule, f"the row's schedule is {train.schedule}"),
        "label_smoothing_factor": (train.label_smoothing, f"the row's label_smoothing is {train.label_smoothing:g}"),
        "seed": (train.seed, f"the row's seed is {train.seed}"),
        "bf16": (train.precision == "bf16", in_precision),
        "fp16": (train.precision == "fp16", in_precision),
        "ddp_bucket_cap_mb": (options["bucket_mb"], f"the row's bucket_mb is {options['bucket_mb']}"),
        "ddp_find_unused_parameters": (
            options["find_unused_parameters"],
            f"the row's find_unused_parameters is {options['find_unused_parameters']}",
        ),
        "ddp_backend": (hardware.backend, f"the row's backend is {hardware.backend}"),
    }


def given(arguments: dict) -> dict:
    """Those that Trainer is handed as they are; of the others it gets the row's side."""
    return {name: value for name, value in arguments.items() if name in TAKEN}
