"""The timer: it is loaded into every process of a user's training script, and times its optimizer steps.

It is the recorder's light counterpart for `lockstep gate`. It changes nothing that the script computes, and adds two
readings of the clock to a step. LOCKSTEP_RECORDING names the folder, LOCKSTEP_WARM_UP the number of steps before the
timed window, and LOCKSTEP_STEPS the number of all steps, after which this process ends.

The window opens after the last warm-up step, and closes after the last step, each time with the device's queue empty.
If the script ends by itself before, the window closes with its last step, whose work may still be queued; the gate then
times as many steps as the script has (lockstep/script/gate.py).
"""

import atexit
import os
import sys
import time

import lockstep_processes as processes

WARM_UP = int(os.environ.get("LOCKSTEP_WARM_UP", "3"))
STEPS = int(os.environ.get("LOCKSTEP_STEPS", "8"))


class State:
    def __init__(self):
        self.depth = 0  # of nested calls of optimizers' steps
        self.times = []  # when each step ended, in seconds of time.perf_counter
        self.finished = False
        self.computed = False  # whether gradients were computed since the last step that counts
        self.by_backward = False  # whether they are ever computed by torch.autograd.backward
        self.engine = False  # whether DeepSpeed's engine steps, which calls its optimizer's step


state = State()


def before_step(*_):
    state.depth += 1


def after_step(*_):
    """Count a step. Further optimizers that step on the same gradients belong to it, as for the recorder."""
    state.depth -= 1
    if state.depth or state.engine or (state.by_backward and not state.computed):
        return
    state.computed = False
    step_done()


def step_done():
    if state.finished:
        return
    if len(state.times) + 1 in (WARM_UP, STEPS):
        _wait_for_devices()
    state.times.append(time.perf_counter())
    if len(state.times) in (1, WARM_UP):
        write()
        state.times[-1] = time.perf_counter()  # writing is not a part of the window
    if len(state.times) == STEPS:
        state.finished = True
        write()
        processes.end_together()


def _wait_for_devices():
    torch = sys.modules["torch"]
    if hasattr(torch, "accelerator"):  # PyTorch 2.6 and later
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
    elif torch.cuda.is_initialized():
        torch.cuda.synchronize()


def write():
    processes.write({"steps": state.times})


@atexit.register
def _at_exit():
    if state.times and not state.finished:
        write()


def change_torch(module):
    """Add the timer to PyTorch. Called as soon as PyTorch is imported."""
    from torch.optim import optimizer

    processes.note_start()
    optimizer.register_optimizer_step_pre_hook(before_step)
    optimizer.register_optimizer_step_post_hook(after_step)
    backward = module.autograd.backward

    def noted(*args, **kwargs):
        state.computed = state.by_backward = True
        return backward(*args, **kwargs)

    module.autograd.backward = noted


def change_deepspeed(module):
    processes.follow_engine(module, state, lambda engine: step_done())


CHANGES = {"torch": change_torch, "deepspeed.runtime.engine": change_deepspeed}
