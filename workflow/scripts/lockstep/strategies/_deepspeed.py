"""What deepspeed.py needs besides training: ways around DeepSpeed's faults, and reading its checkpoints."""

import argparse
import contextlib
import io
import os
from pathlib import Path

import torch

SWITCH = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def load_collectives(deepspeed) -> list[str]:
    """Load DeepSpeed's collectives through shared memory, which are compiled on first use; if that fails, use gloo's.

    They only make communication faster. DeepSpeed looks into `__compatible_ops__` to see whether it may use them.
    Returns notes for the report.
    """
    builder = deepspeed.accelerator.get_accelerator().create_op_builder("ShareMemCommBuilder")
    try:
        builder.load()
    except Exception:  # no compiler, no headers or no space on the disk: each raises another exception
        deepspeed.ops.__compatible_ops__[builder.NAME] = False
        return [
            "DeepSpeed's collectives through shared memory could not be compiled, so gloo's were used instead"
            " (on Debian: apt install g++ python3-dev)"
        ]
    return []


def scale_as_native_fp16(engine) -> None:
    """Give ZeRO the loss scaler that it has for `native_precision`, with the rules of PyTorch's GradScaler.

    With `torch_autocast` DeepSpeed 0.19.8 uses a GradScaler itself. But it clips gradients while they are still
    multiplied by the scale, and it does not lower the scale after a step that overflowed, so all later steps overflow.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    zero = engine.optimizer
    zero.torch_autocast_gradscaler = None
    zero.loss_scaler = DynamicLossScaler(
        init_scale=2.0**16,
        scale_window=2000,
        min_scale=2.0**-24,
        delayed_shift=1,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=False,
    )
    zero.dynamic_loss_scale = True


def forget_gradients(engine) -> None:
    """Drop the gradients of the last backward pass, as the engine itself does after a step that overflowed."""
    zero, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 3:
        zero._overflow_clean_up(None)
    elif stage:
        zero.micro_step_id = -1  # as before the first micro-batch
        zero.zero_grad(set_to_none=True)
        zero._release_preflattened_grad_buffers()
        if engine.zero_cpu_offload():
            zero.reset_cpu_buffers()
        for number in zero.averaged_gradients:
            zero.averaged_gradients[number] = zero.all_grad_tensors[number] = None
    else:
        engine.zero_grad()
        zero.zero_grad()  # for a model that is bf16 throughout, the optimizer has gradients of its own


def pickle_plainly() -> None:
    """Make checkpoints readable that Python 3.11.0 to 3.11.3 writes.

    Those versions pickle an enum's member as a call of getattr, which is refused when the checkpoint is read.
    """
    from deepspeed.runtime.zero.config import ZeroStageEnum

    ZeroStageEnum.__reduce_ex__ = lambda stage, _: (type(stage), (stage.value,))


def make_universal(state: Path, universal: Path) -> None:
    """Write DeepSpeed's checkpoint `state` as a universal one, which any number of processes can read."""
    from deepspeed.checkpoint import ds_to_universal

    arguments = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    folders = {"input_folder": str(state), "output_folder": str(universal)}
    universal.mkdir(parents=True)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # progress bars
        ds_to_universal.main(argparse.Namespace(**arguments, **folders, inject_missing_state=True))


@contextlib.contextmanager
def values_only():
    """Run no code from a checkpoint's pickle. DeepSpeed asks PyTorch to allow it; PyTorch's own switch forbids it."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "1"
    try:
        with torch.serialization.safe_globals(its_classes()):
            yield
    finally:
        del os.environ[SWITCH]
        if before is not None:
            os.environ[SWITCH] = before


def its_classes() -> list[type]:
    """DeepSpeed's own classes that occur in its checkpoints. None of them does more than hold values."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
