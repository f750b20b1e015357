"""The recorder: it is loaded into every process of a user's training script, and records each optimizer step.

It runs in the script's own Python, whose code knows nothing of Lockstep. So it imports only PyTorch, changes nothing
that the script computes except dropout, and writes one file per process into the recording's folder.

For each optimizer step of this process it records a hash of each sample that went into the model, the loss that was
differentiated, the optimizer's settings, and the norm and a sketch of each parameter's gradient and new value, and of
each buffer. A sketch consists of 61 sums, each over every 61st number. Sketches are linear, so the distance of two
sketches estimates the distance of two tensors. 61 is prime, so that no row or column of a usual matrix falls into a
single sum.

LOCKSTEP_RECORDING names the folder. LOCKSTEP_REPLAY names the folder of an earlier recording; this process, the only
one, then gets that recording's samples, initial weights and learning rates.
"""

import argparse
import atexit
import collections.abc
import contextlib
import copy
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import os
import pickle
import random
import sys
import threading
import traceback
import types
from array import array as packed

import lockstep_processes as processes
from lockstep_processes import FOLDER, rank_and_world

REPLAY = os.environ.get("LOCKSTEP_REPLAY")
STEPS = int(os.environ.get("LOCKSTEP_STEPS", "8"))
REVERSED = os.environ.get("LOCKSTEP_REVERSED") == "1"  # whether batches are reversed, which changes only rounding
RESEEDED = os.environ.get("LOCKSTEP_RESEEDED") == "1"  # whether the model draws other random numbers
KEEP_DROPOUT = os.environ.get("LOCKSTEP_KEEP_DROPOUT") == "1"
SCRIPT_FOLDER = os.environ.get("LOCKSTEP_SCRIPT_FOLDER", "")
BUCKETS = 61
SKETCHED = 2**14  # numbers of each bucket that are taken at once, since they are copied in double precision
LARGEST = 2**24  # bytes of a batch that is stored because no DataLoader gave it
MOST_ROWS = 4096  # of tensors that have another length than the batch seems to have
MOST_SETS = 4  # data sets of whose samples the parts are noted
WATCHED = 32  # the first items of a data set, of which it is seen whether they draw random numbers
WHATEVER_INDEX = " whatever the index"  # beside what is noted of random numbers, if a sample is the same for others
# What an optimizer is told for a group of parameters, as far as weights depend on it, which they do not on `fused`.
SETTINGS = ("lr", "weight_decay", "betas", "momentum", "dampening", "nesterov", "eps", "alpha", "amsgrad", "maximize")
# Names that wrappers insert into parameter names: DDP and DataParallel, torch.compile, Fabric, FSDP1, checkpointing.
WRAPPERS = ("module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class State:
    """Everything that this process has recorded so far."""

    def __init__(self):
        self.depth = 0  # of nested calls of modules; only the outermost call records samples
        self.stepping = 0  # the depth of nested calls of optimizers' steps
        self.losses = 0  # of the current step, before its optimizer stepped
        self.stages = False  # whether a model's layers are stages of a pipeline
        self.engine = False  # whether DeepSpeed's engine steps, whose optimizers hold only parts of the parameters
        self.models = []  # the outermost modules that were trained, in the order of their first call
        self.others = {}  # parameters that an optimizer updates and no such module has, by name
        self.made = set()  # weak references to the storages of what the models returned in training
        self.loaders = []  # the batches of each DataLoader of this process
        self.loader = None  # that gave the last batch
        self.second = {}  # whether the second dimension is that of the samples, by name of a model's input
        self.random = None  # the states of random generators when it gave it, until a backward pass
        self.drawn = 0  # the number of batches between which and their backward pass random numbers were drawn
        self.items = 0  # of data sets that were fetched in this process
        self.drawing = ""  # a hash of the random states from which the first of them that draws would be drawn
        self.other_index = False  # whether that one was drawn for another index, too
        self.after_backward = None  # these states after a backward pass, until a step: gradients may be given noise
        self.calls = 0  # of models in training, with batches that no DataLoader gave
        self.returned = []  # the graph nodes of losses that models returned since the last backward pass
        self.steps = []
        self.step = _empty_step()
        self.notes = {}  # observations that explain a difference, by name
        self.initial = None
        self.pending = {}  # parameters with gradients of their last step, by id, until they are cleared
        self.norms = {}  # of tensors that the script computed since its last backward pass, by place in memory
        self.watch_norms = None  # a function that begins or ends to note them
        self.unsettled = False  # whether the script may still change the weights of the last step, as by averaging them
        self.schedule_steps = 0  # since the last optimizer step
        self.finished = False
        self.frame = None  # of a model's method that calls its modules without Module.__call__
        self.recorded = None
        self.replayed = {}  # of that, the loader that each of this process's has to follow, by its number


def _empty_step():
    # factors: what gradients were multiplied by to clip them, by a norm of this rank's tensors
    return {"calls": [], "losses": [], "clip": [], "factors": [], "dropout": []}


state = State()


def line():
    """The script's current line, as file:line; it is the innermost frame of a file in the script's folder."""
    frame = sys._getframe(1)
    while frame:
        file = frame.f_code.co_filename
        if SCRIPT_FOLDER and file.startswith(SCRIPT_FOLDER + os.sep) and "site-packages" not in file:
            return f"{os.path.relpath(file, SCRIPT_FOLDER)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def only_records(function):
    """A function that only records, so that an error in it is none of the user's script.

    It ends the recording, as the last step does, and the note of it says that nothing can be told.
    """

    @functools.wraps(function)
    def noted(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except Exception as error:
            traceback.print_exc()
            state.notes["failed"] = processes.words_of(error)
            write()
            end()

    return noted


# --- Samples -------------------------------------------------------------------------------------------------------


def rows_of(inputs):
    """A hash of each sample of a batch: [samples]; these for each length of its tensors, as some may be no samples.

    What has the DataLoader's batch size, a part or a multiple of it comes first. Padding is left out, as ranks pad to
    other lengths than one process. It is what an attention mask leaves out, or else zeros (and -100, of labels) at a
    sample's end. What models have made is left out, too, as a generator's images: it is rounded otherwise in another
    batch.
    """
    import torch

    named = {name: tensor for name, tensor in _tensors(inputs) if not was_made(tensor)}
    if any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in named.values()):
        return []  # within torch.func a tensor stands for several, and has no values
    local = {name: getattr(tensor, "_local_tensor", tensor).detach() for name, tensor in named.items()}
    sized = {name: samples_first(name, tensor) for name, tensor in local.items() if has_values(tensor) and tensor.dim()}
    lengths = dict.fromkeys(tensor.shape[0] for tensor in sized.values())
    sizes = _batch_sizes()
    by_fit = sorted(lengths, key=lambda length: not any(_divides(*sorted((length, size))) for size in sizes))
    by_fit = [length for place, length in enumerate(by_fit) if not place or length <= MOST_ROWS]
    return [
        _rows({name: tensor.cpu() for name, tensor in sized.items() if tensor.shape[0] == length}, length)
        for length in by_fit
    ]


def _rows(sized, size):
    """A hash of each sample of tensors that all have this many samples, by name."""
    import torch

    masks = {name: keep for name in sized if (keep := kept_by(name, sized)) is not None}
    mask = next(iter(masks.values()), None)
    hashes = [hashlib.blake2b(digest_size=8) for _ in range(size)]
    for name, array in sized.items():
        if name in masks or name.endswith("position_ids"):
            continue
        masked = mask is not None and mask.shape == array.shape and not array.is_floating_point()
        if array.is_floating_point() or array.is_complex():
            array = array.to(torch.float32)  # with autocast, inputs may have another precision
        for place, digest in enumerate(hashes):
            row = array[place][mask[place]] if masked else without_end(array[place])
            digest.update(row.contiguous().numpy().tobytes())
    return [digest.hexdigest() for digest in hashes]


def has_values(tensor):
    """Whether a tensor has values that can be read one by one, unlike a sparse, nested or quantised one."""
    import torch

    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)


def samples_first(name, tensor):
    """A tensor of a batch whose first dimension is that of the samples, as it is the second one in [tokens, samples].

    The sizes of the DataLoader's batches tell, unless both dimensions may be it: then what they told before. A script
    may divide a batch into equal parts, or put several views of its samples into one, as rows of numbers.
    """
    sizes = _batch_sizes()
    if tensor.dim() < 2 or not sizes:
        return tensor
    first, second = tensor.shape[:2]
    parts = not first or any(_divides(first, size) for size in sizes)
    views = tensor.dim() == 2 and tensor.is_floating_point() and any(size and first % size == 0 for size in sizes)
    may_be = [parts or views, second in sizes]
    if may_be[0] != may_be[1]:
        state.second[name] = may_be[1]
    return tensor.transpose(0, 1) if may_be[1] and state.second.get(name) else tensor


def _batch_sizes():
    """The sizes of the batches of the DataLoader that gave the last one; none if it does not tell them."""
    loader = state.loader
    if loader is None or loader["dispatched"] or not loader["indexed"] or not loader["batches"]:
        return set()
    return {len(batch) for batch in loader["batches"][-1]}


def _divides(length, size):
    return bool(length) and size % length == 0


def kept_by(name, batch):
    """Which elements a padding mask among a batch's tensors keeps: booleans [samples, tokens]; None if it is no mask.

    One of booleans may have any name, and may mean either by True. All samples are padded at the same end, so at the
    other end all of its values are alike, and mean that a token is kept.
    """
    import torch

    mask = batch[name]
    if name.endswith("attention_mask"):
        return mask.bool()
    others = [tensor.shape[:2] for other, tensor in batch.items() if other != name]
    if mask.dtype != torch.bool or mask.dim() != 2 or not mask.numel() or mask.shape not in others:
        return None
    changes = (mask[:, 1:] != mask[:, :-1]).sum(1)
    ends = [end for end in (mask[:, 0], mask[:, -1]) if bool((end == end[0]).all())]
    return mask == ends[0][0] if ends and bool((changes < 2).all()) else None


def without_end(row):
    """A sample without the padding at its end: zeros and, before these, -100 in integers."""
    if not row.dim() or not row.numel():
        return row
    flat = row.reshape(row.shape[0], -1)
    filled = (flat != 0) if row.is_floating_point() or row.is_complex() else (flat != 0) & (flat != -100)
    filled = filled.any(1).nonzero()
    return row[: int(filled[-1]) + 1 if len(filled) else 0]


def note_made(output):
    """Remember the tensors that a model returned, as long as they are there."""
    from torch.multiprocessing.reductions import StorageWeakRef

    for _, tensor in _tensors(output):
        with contextlib.suppress(NotImplementedError, RuntimeError):  # a tensor without a storage
            state.made.add(StorageWeakRef(tensor.untyped_storage()))


def was_made(tensor):
    """Whether a tensor was computed by a model in training, or shares its memory with such a one."""
    from torch.multiprocessing.reductions import StorageWeakRef

    state.made = {each for each in state.made if not each.expired()}
    if not state.made or tensor.grad_fn is not None:
        return bool(state.made)
    with contextlib.suppress(NotImplementedError, RuntimeError):
        return StorageWeakRef(tensor.untyped_storage()) in state.made
    return False


def stored(inputs):
    """Store the tensors that a model is called with, so that a replay can be given those of all ranks.

    It is of use only if the model returns its loss: what is computed from its output and from something else, such as
    labels, can't be given to it.
    """
    import torch
    from torch.utils import _pytree as pytree

    leaves = [
        leaf if isinstance(leaf, torch.Tensor) and has_values(leaf) else None for leaf in pytree.tree_leaves(inputs)
    ]
    number, state.calls = state.calls, state.calls + 1
    if sum(leaf.nbytes for leaf in leaves if leaf is not None) <= LARGEST:
        leaves = [None if leaf is None else leaf.detach().cpu() for leaf in leaves]
        torch.save(leaves, os.path.join(FOLDER, f"inputs.{os.getpid()}.{number}.pt"))
    return inputs


def of_all_ranks(inputs):
    """In a replay, what a model is called with, but with the samples of all ranks."""
    import torch
    from torch.utils import _pytree as pytree

    number, state.calls = state.calls, state.calls + 1
    if number >= len(recorded()["calls"]):
        return inputs
    own, structure = pytree.tree_flatten(inputs)
    each = [torch.load(os.path.join(REPLAY, name), weights_only=True) for name in recorded()["calls"][number]]
    if any(len(leaves) != len(own) for leaves in each):
        return inputs
    first = _of_samples(each)
    sizes = [None if first is None else leaves[first].shape[0] for leaves in each]
    for place, parts in enumerate(zip(*each, strict=True)):
        of_samples = all(
            part is not None and part.dim() and part.shape[0] == size for part, size in zip(parts, sizes, strict=True)
        )
        if of_samples and isinstance(own[place], torch.Tensor) and len({part.shape[1:] for part in parts}) == 1:
            together = torch.cat(parts).to(own[place].device)
            own[place] = together.flip(0) if REVERSED else together
    return pytree.tree_unflatten(own, structure)


def _of_samples(each):
    """The place of the first tensor whose rows are samples, given what the model is called with on each rank.

    It is another on each rank, unless all are alike; a constant of another length may be before it.
    """
    import torch

    may_be = [
        place
        for place, parts in enumerate(zip(*each, strict=True))
        if all(part is not None and part.dim() for part in parts)
    ]
    differ = [place for place in may_be if not all(torch.equal(leaves[place], each[0][place]) for leaves in each)]
    return next(iter(differ or may_be), None)


def was_returned(loss):
    """Whether a loss is one that a model returned, or such a one times a number."""
    node = loss.grad_fn
    while node is not None and not any(node is each for each in state.returned):
        before = [parent for parent, _ in node.next_functions if parent is not None]
        scales = type(node).__name__.startswith(("Mul", "Div", "ToCopy"))
        node = before[0] if scales and len(before) == 1 else None
    return node is not None


def _tensors(value, name=""):
    """The tensors in nested containers, by name."""
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, collections.abc.Mapping):
        for key, inner in value.items():
            yield from _tensors(inner, f"{name}.{key}")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name, None), f"{name}.{field.name}")
    elif isinstance(value, (list, tuple)):
        for place, inner in enumerate(value):
            yield from _tensors(inner, f"{name}.{place}")


# --- Parameters ----------------------------------------------------------------------------------------------------


def plain(name):
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def named_parameters():
    """The distinct parameters of all models that are trained, and others that are: (name, parameter)."""
    seen = {id(parameter) for parameter in state.others.values()}
    for number, model in enumerate(state.models):
        for name, parameter in model.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield (f"{number}." if number else "") + plain(name), parameter
    yield from state.others.items()


@contextlib.contextmanager
def gathered(parameter):
    """Gather a parameter within the block, since DeepSpeed's stage 3 keeps only a part of it on each rank."""
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            yield parameter
    else:
        yield parameter


def whole(tensor):
    """The full tensor of one that may be sharded over ranks (a DTensor), and whether it is."""
    if hasattr(tensor, "full_tensor"):
        return tensor.full_tensor(), any(not placement.is_replicate() for placement in tensor.placements)
    return tensor, False


def sketched(tensor):
    """The norm and the sketch of a tensor: a list of 1 + 61 floats."""
    import torch

    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)
    sums, squares = 0.0, 0.0
    for part in flat.split(BUCKETS * SKETCHED):
        part = part.to(torch.float64) if part.device.type != "mps" else part.float().cpu().double()
        squares += part.square().sum()
        sums += torch.nn.functional.pad(part, (0, -part.numel() % BUCKETS)).reshape(-1, BUCKETS).sum(0)
    return [float(squares) ** 0.5, *sums.tolist()]


def gradients():
    """The sketch of each parameter's gradient, if it has one."""
    found = {}
    for name, parameter in named_parameters():
        if parameter.grad is not None:
            found[name] = sketched(whole(parameter.grad)[0])
    return found


def weights():
    """The sketches and hashes of all parameters, and whether any is sharded."""
    import torch

    sketches, hashes, sharded = {}, {}, False
    for name, parameter in named_parameters():
        with gathered(parameter) as full:
            value, in_parts = whole(full.detach())
            sharded |= in_parts or hasattr(parameter, "ds_id")
            sketches[name] = sketched(value)
            raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            hashes[name] = hashlib.blake2b(raw.numpy().tobytes(), digest_size=8).hexdigest()
    return sketches, hashes, sharded


def buffers():
    """The sketches of the models' floating-point buffers, as the running means of batch normalisation."""
    found = {}
    for number, model in enumerate(state.models):
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point() and has_values(buffer) and buffer.numel():
                found[(f"{number}." if number else "") + plain(name)] = sketched(whole(buffer)[0])
    return found


# --- Recording -----------------------------------------------------------------------------------------------------


@only_records
def settle():
    """Called when the script goes on after a step, whose weights are now what it makes of them; the last step ends it.

    It goes on when it calls a model, computes gradients, or draws a batch. Between this and an optimizer's step it may
    average weights over ranks, or let further optimizers step.
    """
    if not state.unsettled or state.finished:
        return
    state.unsettled = False
    if not state.initial["sharded"]:
        note_weights()
    write()
    if len(state.steps) == STEPS:
        end()


def note_weights():
    """Record the weights and buffers after the last step."""
    step = state.steps[-1]
    step["weights"], step["hashes"], _ = weights()
    step["buffers"] = buffers()


def before_training_call(model, inputs, of_part=None):
    """Called before an outermost module is trained on a batch. of_part: what a part of it is called with, if it is not.

    A method that calls a part, as Lightning's training_step, is told from one that loops over all data by what changes
    from call to call.
    """
    state.after_backward = None
    state.watch_norms(False)
    if not any(each is model for each in state.models):
        state.models.append(model)
        _begin(model)
    rows, *others = [*rows_of(inputs), *(rows_of(of_part) if of_part else ())] or [[]]
    about = {"rows": rows, "line": line(), "model": [each is model for each in state.models].index(True)}
    if others:
        about["others"] = others
    about["evaluating"] = evaluating(model)
    state.step["calls"].append(about | {"synchronised": getattr(model, "require_backward_grad_sync", None)})
    note_autocast()


def _forget_trials():
    """Forget models that were called before the first batch, as to try them on any data: nothing was trained yet.

    Their weights may still differ between ranks, until DistributedDataParallel makes them alike.
    """
    state.models.clear()
    state.returned.clear()
    state.step, state.initial, state.calls = _empty_step(), None, 0


def note_autocast():
    """Record the precision of automatic mixed precision, if it is on."""
    import torch

    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            note_precision(torch.get_autocast_dtype(kind))


def note_precision(dtype):
    """Record a floating-point type that is used in training."""
    kinds = state.notes.setdefault("precisions", [])
    if dtype.is_floating_point and str(dtype) not in kinds:
        kinds.append(str(dtype))


def _holds_gradient(parameter):
    gradient = parameter.grad
    if gradient is None:
        return False
    gradient = getattr(gradient, "_local_tensor", gradient)
    return bool(((gradient.coalesce().values() if gradient.is_sparse else gradient) != 0).any())


def _begin(model):
    """Record a model's properties and weights before its first step."""
    import torch

    number = len(state.models) - 1
    if REPLAY:
        _put_weights_into(model, number, state.models[:-1])
    if RESEEDED and not number:
        _seed_all(torch, _seed() + 1)
    sketches, hashes, sharded = weights()
    if state.initial:  # keep the initial weights of earlier models, which may have been trained since
        sketches, hashes = sketches | state.initial["weights"], hashes | state.initial["hashes"]
    for _, parameter in named_parameters():
        note_precision(parameter.dtype)
    norms = {type(module).__name__ for each in state.models for module in each.modules() if _of_batch(module)}
    devices = sorted({str(parameter.device) for _, parameter in named_parameters()})
    rank, _ = rank_and_world()
    state.initial = {
        "weights": sketches,
        "hashes": hashes,
        "buffers": buffers() | (state.initial or {}).get("buffers", {}),
        "sharded": sharded,
        # DataParallel over several GPUs; without any it only calls the model.
        "data_parallel": type(model).__name__ == "DataParallel" and len(getattr(model, "device_ids", ())) > 1,
        "divided": next(filter(None, map(_divided_by, state.models)), None),
        "batch_norm": sorted(norms),
        "dropout": max(map(dropouts, state.models)),
        "frozen": [name for name, parameter in named_parameters() if not parameter.requires_grad],
        "not_averaged": _not_averaged(),
        "shapes": {name: list(parameter.shape) for name, parameter in named_parameters()},
        "devices": devices,
        "random": hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8).hexdigest(),
        "trainer": "transformers.trainer" in sys.modules,
    }
    if not REPLAY:
        file = os.path.join(FOLDER, f"initial.{os.getpid()}.pt")
        # Of earlier models from the file, as this copy need not be kept while they are trained.
        initial = torch.load(file, weights_only=True) if rank == 0 and number else {}
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            with gathered(value) as full:
                full, _ = whole(full.detach())
                if rank == 0:
                    initial[(f"{number}." if number else "") + plain(name)] = full.cpu().clone()
        if rank == 0:
            torch.save(initial, file)


def _not_averaged():
    """The parameters that a script leaves out of averaging, as each rank's experts.

    It tells DistributedDataParallel, or marks them for DeepSpeed, Megatron (allreduce) or Tutel (skip_allreduce).
    """
    marked = set()
    for module in itertools.chain.from_iterable(model.modules() for model in state.models):
        if type(module).__name__ == "DistributedDataParallel":
            ignored = module.parameters_to_ignore
            marked |= {id(parameter) for name, parameter in module.module.named_parameters() if name in ignored}
    return [
        name
        for name, parameter in named_parameters()
        if id(parameter) in marked
        or getattr(parameter, "allreduce", True) is False
        or getattr(parameter, "skip_allreduce", False) is True
    ]


def _seed_all(torch, seed):
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


def _random_states(torch):
    """The states of all random generators, which differ once a number was drawn."""
    numpy = sys.modules.get("numpy")
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]
    of_numpy = numpy and pickle.dumps(numpy.random.get_state())
    return [each.numpy().tobytes() for each in states], random.getstate(), of_numpy


def _of_batch(module):
    """Whether a module normalises by the statistics of a batch, which a frozen one does not."""
    normalises = type(module).__name__.startswith("BatchNorm")
    return normalises and (module.training or getattr(module, "running_mean", None) is None)


def _divided_by(model):
    """What divides a model's layers among ranks that train on the same samples; None if each rank has them all."""
    if state.stages:
        return "pipeline parallel"
    if rank_and_world()[1] > 1 and any(map(_holds_flat_parts, model.modules())):
        return "FullyShardedDataParallel"
    axes = max((_sharded_over(parameter) for parameter in model.parameters()), default=0)
    by_fsdp = any(type(module).__name__.startswith("FSDP") for module in model.modules())  # over one axis of the mesh
    return "tensor parallel" if axes > by_fsdp else None


def _holds_flat_parts(module):
    """Whether a module is FSDP1's, of whose flat parameters each rank holds a part."""
    sharded = type(module).__name__ == "FullyShardedDataParallel"
    return sharded and getattr(module.sharding_strategy, "name", "") != "NO_SHARD"


def _sharded_over(parameter):
    """The number of axes of the mesh of ranks over which a parameter is divided."""
    return sum(not placement.is_replicate() for placement in getattr(parameter, "placements", ()))


def dropouts(model):
    """The highest dropout probability of a model's modules."""
    probabilities = [getattr(module, "p", 0.0) for module in model.modules() if "Dropout" in type(module).__name__]
    return max((float(p) for p in probabilities if isinstance(p, (int, float))), default=0.0)


def evaluating(model):
    """The names of a model's modules that are in evaluation mode, of those that compute something else in it."""
    return [plain(name) for name, module in model.named_modules() if not module.training and _has_modes(module)]


def _has_modes(module):
    """Whether a module drops units in training, or normalises by the batch: layers of PyTorch and many others."""
    probabilities = [getattr(module, name, 0.0) for name in ("p", "dropout", "drop_prob", "attention_dropout")]
    drops = any(isinstance(each, float) and 0 < each < 1 for each in probabilities)
    return drops or type(module).__name__.startswith(("BatchNorm", "SyncBatchNorm"))


def _put_weights_into(model, number=0, earlier=()):
    """Give a model its recorded weights, but for those that it shares with an earlier one, which has them.

    These may be in use: a model may be called inside its wrapper before the wrapper is.
    """
    import torch

    known = {id(value) for each in earlier for value in (*each.parameters(), *each.buffers())}
    (file,) = [name for name in os.listdir(REPLAY) if name.startswith("initial.") and name.endswith(".pt")]
    stored = torch.load(os.path.join(REPLAY, file), weights_only=True)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            key = (f"{number}." if number else "") + plain(name)
            if id(value) in known:
                continue
            with gathered(value) as full:
                target = full.to_local() if hasattr(full, "to_local") else full
                if key not in stored or stored[key].shape != target.shape:
                    continue
                target.copy_(stored[key].to(target.device))


def before_step(optimizer, args, kwargs):
    """Called before an optimizer's step, whose closure, if it has one, may call the model and compute gradients."""
    state.stepping += 1
    state.watch_norms(False)
    if state.finished or state.engine:
        return
    step = state.step
    if state.initial and state.stepping == 1:
        _note_others(optimizer)
        _note_later()
    step["gradients"] = gradients()  # the innermost call wins: Horovod's averages, then calls the wrapped optimizer
    if state.stepping > 1:
        return
    _note_drawing_since(state.after_backward, sys.modules["torch"])
    state.losses = len(step["losses"])
    _note_clipping_by_hand(step)
    _describe(optimizer)
    by_closure = any(callable(each) for each in (*args[1:], kwargs.get("closure")))
    if REPLAY and (recorded := recorded_rates(by_closure)):
        for group, rate in zip(optimizer.param_groups, recorded, strict=False):
            step.setdefault("own_rates", list(step["rates"]))
            if rate is None:
                continue
            if hasattr(group["lr"], "fill_"):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def _note_clipping_by_hand(step):
    """Record what gradients were multiplied by since the script computed their norms, if it clips them by itself."""
    if step["clip"] or not state.norms:
        return
    sizes = []  # of each gradient, before and now
    for _, parameter in named_parameters():
        if parameter.grad is not None and (before := state.norms.get(_place(parameter.grad))):
            sizes.append((before, sketched(getattr(parameter.grad, "_local_tensor", parameter.grad))[0]))
    if sizes:
        before, now = (sum(size**2 for size in each) ** 0.5 for each in zip(*sizes, strict=True))
        step["by_hand"] = now / before


def _place(tensor):
    """Where a tensor of this rank is in memory, and its number of elements."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    try:
        return tensor.data_ptr(), tensor.numel()
    except (NotImplementedError, RuntimeError):  # as of a sparse one
        return None


def _note_others(optimizer):
    """Record parameters that no model in training has, as a temperature beside it, before their first step."""
    known = {id(parameter) for _, parameter in named_parameters()}
    others = {}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter.grad is not None and id(parameter) not in known:
                name = f"{type(optimizer).__name__}.param_groups[{number}]['params'][{place}]"
                others[f"{len(state.others)}: {name}" if name in state.others else name] = parameter
    if others:
        state.others |= others
        sketches, hashes, _ = weights()
        state.initial["weights"] |= {name: sketches[name] for name in others}
        state.initial["hashes"] |= {name: hashes[name] for name in others}


def _note_later():
    """Record parameters that a model was given since its first call, before their first step."""
    if any(name not in state.initial["weights"] for name, _ in named_parameters()):
        sketches, hashes, _ = weights()
        state.initial["weights"] = sketches | state.initial["weights"]
        state.initial["hashes"] = hashes | state.initial["hashes"]


def after_step(optimizer, *_):
    state.stepping -= 1
    state.after_backward = None
    if state.stepping or state.finished or state.engine:
        return
    for group, rate in zip(optimizer.param_groups, state.step.get("own_rates", ()), strict=False):
        if rate is not None and not hasattr(group["lr"], "fill_"):
            group["lr"] = rate  # since a schedule may start from the current rate
    if not state.models:  # nothing is trained yet
        state.step = _empty_step()
        return
    if len(state.step["losses"]) > state.losses:  # its closure has computed the gradients
        _describe(optimizer)
        state.step["evaluations"] = len(state.step["losses"]) - state.losses
        state.step["gradients"] = gradients()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if state.step["losses"] and any(id(parameter) in state.pending for parameter in parameters):
        about = {"step": len(state.steps) + 1, "line": state.step.get("backward_line", "")}
        state.notes.setdefault("not_cleared", about)
    state.pending |= {id(each): each for each in parameters if _holds_gradient(each)}
    step_done()


def _describe(optimizer):
    state.step["line"] = line()
    state.step["rates"] = [_rate(group) for group in optimizer.param_groups]
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = [(name, id(parameter) in held) for name, parameter in named_parameters() if parameter.grad is not None]
    if any(updated for _, updated in trained):  # otherwise it holds copies of them
        state.step["unstepped"] = [name for name, updated in trained if not updated]
    trained = [group for group in optimizer.param_groups if any(each.grad is not None for each in group["params"])]
    state.step["settings"] = [{name: plainly(group[name]) for name in SETTINGS if name in group} for group in trained]


def _rate(group):
    """The learning rate of a group of parameters; None if its optimizer finds it by itself, as Adafactor may."""
    rate = group.get("lr")
    return None if rate is None else float(rate)


def plainly(value):
    """A setting of an optimizer as JSON can hold it."""
    if isinstance(value, (list, tuple)):
        return [plainly(each) for each in value]
    return float(value) if hasattr(value, "item") else value


def of_same_step():
    """Whether a step of an optimizer now belongs to the last recorded step, as nothing was computed since."""
    return bool(state.steps) and not state.step["calls"] and not state.step["losses"]


def step_done():
    """Record a step of an optimizer; `settle` records its weights, as soon as they are those of the whole step."""
    same = of_same_step()
    state.step["schedule_steps"], state.schedule_steps = state.schedule_steps, 0
    if same:
        last = state.steps[-1]
        last["gradients"] |= state.step["gradients"]
        last["unstepped"] = [name for name in last.get("unstepped", ()) if name in state.step.get("unstepped", ())]
        last["rates"] += state.step["rates"]
        last["settings"] = last.get("settings", []) + state.step.get("settings", [])
        last["own_rates"] = last.get("own_rates", []) + state.step.get("own_rates", [])
    else:
        state.steps.append(state.step)
    state.step, state.frame, state.unsettled = _empty_step(), None, True
    is_last = len(state.steps) == STEPS
    if is_last or state.initial["sharded"]:
        # Sharded weights are gathered by all ranks at one place. After the last step a rank may wait for one that has
        # gone on, and then does not come further than this.
        note_weights()
    if not same or is_last:
        write()
    if is_last and not same:
        processes.end_with_others()


def _seed():
    """A seed for scripts that set none: it differs between ranks, and a replay has that of rank 0."""
    multiprocessing = sys.modules.get("multiprocessing")
    name = multiprocessing.current_process().name if multiprocessing else ""
    started = name.rpartition("-")[2]  # SpawnProcess-1 is rank 0's
    spawned = int(started) - 1 if name.startswith("SpawnProcess-") and started.isdigit() else None
    rank = rank_and_world()[0] if spawned is None else spawned
    return 1_000_003 * (0 if REPLAY else rank) + 17


def change_random(module):
    """Called once numpy.random is imported, which NumPy may do late."""
    module.seed(_seed())


def write(ended=False):
    """Write all that is recorded. ended: whether this process ends by itself."""
    if drawing := _drawing():
        state.notes["drawing"] = drawing
    processes.write(
        {
            "ended": ended,
            "idle": _idle() if ended else None,
            "initial": state.initial,
            "steps": state.steps,
            "notes": state.notes,
            "loaders": [loader for loader in state.loaders if loader["batches"]],
        }
    )


def _idle():
    """What this process computed if no optimizer has stepped in it: backward passes, and whether its weights changed.

    None if one has stepped, or if weights can't be read on one rank alone.
    """
    if state.steps or not state.step["losses"] or state.initial["sharded"]:
        return None
    try:
        began, (_, hashes, _) = state.initial["hashes"], weights()
    except RuntimeError:  # as of a GPU on which something has failed
        return None
    return {"passes": len(state.step["losses"]), "changed": any(hashes.get(name) != began[name] for name in began)}


def _drawing():
    """A hash of the random states from which samples are first drawn, here or in a DataLoader's worker, if they are."""
    file = os.path.join(FOLDER, f"drawing.{os.getpid()}")
    if not state.drawing and os.path.exists(file):
        with open(file) as stream:
            return stream.read()
    return state.drawing


def end():
    """End this process when all ranks have done their steps."""
    state.finished = True
    processes.end_together()


@atexit.register
def _at_exit():
    if state.finished:
        return
    settle()
    if says := processes.failure():
        processes.write_failure({"says": says, "steps": len(state.steps)})
    if state.initial:
        write(ended=True)


# --- Patches of PyTorch --------------------------------------------------------------------------------------------


def change_torch(torch):
    """Called once PyTorch is imported."""
    from torch.optim import optimizer

    processes.note_start()
    torch.manual_seed(_seed())
    # A script may compile its optimizer's step, whose graph must not have what the recorder does.
    optimizer.register_optimizer_step_pre_hook(torch.compiler.disable(only_records(before_step)))
    optimizer.register_optimizer_step_post_hook(torch.compiler.disable(only_records(after_step)))
    _change_modules(torch)
    _change_backward(torch)
    _change_loaders(torch)
    _change_clipping(torch)
    _change_norms(torch)
    _change_autocast(torch)
    _change_communication(torch)
    _change_saving(torch)
    _change_schedules(torch)
    if not KEEP_DROPOUT:
        _change_dropout(torch)
    if REPLAY:
        _be_alone(torch)


def _change_modules(torch):
    call = torch.nn.Module.__call__
    is_compiling = torch.compiler.is_compiling

    def noted(self, *args, **kwargs):
        if is_compiling() or state.depth or threading.current_thread() is not threading.main_thread():
            return call(self, *args, **kwargs)
        return outermost(self, args, kwargs)

    @torch.compiler.disable
    def outermost(module, args, kwargs):
        in_backward = torch._C._current_graph_task_id() != -1  # activation checkpointing recomputes the forward pass
        if in_backward or state.finished or not FOLDER or not has_parameters(module):
            return call(module, *args, **kwargs)
        trains, args, kwargs, before = before_call(module, args, kwargs)
        state.depth += 1
        try:
            output = call(module, *args, **kwargs)
        finally:
            state.depth -= 1
        if trains:
            after_call(output, before)
        return output

    @only_records
    def before_call(module, args, kwargs):
        """Whether it trains, what the module is to be called with, and the states of random generators, if watched."""
        settle()
        frame, model = enclosing(module)
        seen_already = frame is not None and frame is state.frame
        state.frame = frame
        inputs = (args, kwargs) if frame is None else arguments_of(frame)
        trains = torch.is_grad_enabled() and any(part.training for part in module.modules())  # a wrapper may not say so
        if state.loader is not None:
            state.loader["trains"] |= trains
            state.loader["evaluates"] |= not trains
        if frame is None and trains and state.loader is None:
            args, kwargs = inputs = of_all_ranks(inputs) if REPLAY else stored(inputs)
        if not seen_already and trains:
            before_training_call(model, inputs, None if frame is None else (args, kwargs))
        watched = trains and not state.notes.get("draws")
        return trains, args, kwargs, _random_states(torch) if watched else None

    @only_records
    def after_call(output, before):
        if before is not None and before != _random_states(torch):
            state.notes["draws"] = True
        for _, tensor in _tensors(output):
            note_precision(tensor.dtype)
            if state.loader is None and not tensor.dim() and tensor.grad_fn is not None:
                state.returned.append(tensor.grad_fn)
        note_made(output)

    def enclosing(module):
        """The module whose method calls this one: a model's forward() may be called directly, or by Lightning."""
        found, frame = (None, module), sys._getframe(2)
        while frame:
            owner = frame.f_locals.get("self")
            if (
                isinstance(owner, torch.nn.Module)
                and owner is not module
                and any(each is module for each in owner.modules())
                and any(True for _ in _tensors(arguments_of(frame)))  # a loop over batches is no forward pass
            ):
                found = frame, owner
            frame = frame.f_back
        return found

    def arguments_of(frame):
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
        return {name: frame.f_locals.get(name) for name in code.co_varnames[:count] if name != "self"}

    def has_parameters(module):
        """Whether a module has parameters that are real, not torch.func's wrapped ones, nor lazy ones without shapes.

        Lazy ones get their shapes in their first call, which a script makes with any data.
        """
        first = next(module.parameters(), None)
        if first is None or torch._C._functorch.is_functorch_wrapped_tensor(first):
            return False
        return not any(map(torch.nn.parameter.is_lazy, module.parameters()))

    torch.nn.Module.__call__ = noted


def _note_drawing_loop(torch):
    """Note that random numbers are drawn between batch and backward pass, in the loop or the loss."""
    _note_drawing_since(state.random, torch)
    state.random = None


def _note_drawing_since(before, torch):
    """Note that random numbers were drawn since a moment, given their generators' states then, if in several steps."""
    if before is not None and before != _random_states(torch):
        state.drawn += 1
        if state.drawn > 1:  # in a single one they may initialise a layer
            state.notes["draws"] = True


def _change_backward(torch):
    backward = torch.autograd.backward

    @only_records
    def before_backward(roots):
        settle()
        _note_drawing_loop(torch)
        state.pending = {id(each): each for each in state.pending.values() if _holds_gradient(each)}
        # An edge of a graph is a root, too.
        if len(roots) == 1 and isinstance(roots[0], torch.Tensor) and roots[0].numel() == 1:
            state.step["losses"].append(float(roots[0].detach()) / getattr(roots[0], "_lockstep_scale", 1.0))
            state.step["backward_line"] = line()
            state.step["inside"] = state.step.get("inside", True) and was_returned(roots[0])

    def noted(tensors, *args, **kwargs):
        if not isinstance(tensors, (torch.Tensor, tuple)):
            tensors = list(tensors)  # it may be an iterator
        if state.models and not state.finished:
            before_backward([tensors] if isinstance(tensors, torch.Tensor) else tensors)
        state.returned.clear()
        state.norms.clear()
        result = backward(tensors, *args, **kwargs)
        if state.models and not state.finished:
            state.watch_norms(True)
            state.after_backward = _random_states(torch)
        return result

    torch.autograd.backward = noted
    scale = torch.amp.GradScaler.scale

    def noted_scale(self, outputs):
        scaled = scale(self, outputs)
        if isinstance(scaled, torch.Tensor) and self.is_enabled():
            scaled._lockstep_scale = self.get_scale()  # the loss is to be told without it
        return scaled

    torch.amp.GradScaler.scale = noted_scale


def _change_clipping(torch):
    import torch.nn.utils.clip_grad as module

    clipped = set()  # the ids of parameters that were clipped since their last step
    by_norm, by_value = module.clip_grad_norm_, module.clip_grad_value_
    with_norm = getattr(torch.nn.utils, "clip_grads_with_norm_", None)  # PyTorch 2.6 and later

    def clips(parameters):
        """Note that parameters are clipped; their list, as they may come from a generator."""
        state.step["clip"].append(line())
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        clipped.update(map(id, parameters))
        return parameters

    @only_records
    def note_factor(most, norm):
        if not torch.compiler.is_compiling():
            norm = float(whole(norm)[0])  # of a DTensor, of all ranks
            state.step["factors"].append(min(1.0, float(most) / (norm or 1.0)))

    def noted_by_norm(parameters, max_norm, *args, **kwargs):
        norm = by_norm(clips(parameters), max_norm, *args, **kwargs)
        note_factor(max_norm, norm)
        return norm

    def noted_with_norm(parameters, max_norm, total_norm, *args, **kwargs):
        note_factor(max_norm, total_norm)
        return with_norm(clips(parameters), max_norm, total_norm, *args, **kwargs)

    def noted_by_value(parameters, clip_value, *args, **kwargs):
        parameters = clips(parameters)
        compiling = torch.compiler.is_compiling()
        before = 0.0 if compiling else size(parameters)
        by_value(parameters, clip_value, *args, **kwargs)
        if not compiling:
            state.step["factors"].append(size(parameters) / (before or 1.0))

    @only_records
    def size(parameters):
        sizes = [sketched(whole(each.grad)[0])[0] for each in parameters if each.grad is not None]
        return sum(size**2 for size in sizes) ** 0.5

    for name, noted in (("clip_grad_norm_", noted_by_norm), ("clip_grad_value_", noted_by_value)):
        setattr(module, name, noted)
        setattr(torch.nn.utils, name, noted)
    if with_norm:
        torch.nn.utils.clip_grads_with_norm_ = noted_with_norm
    unscale, step = torch.amp.GradScaler.unscale_, torch.amp.GradScaler.step

    def held(optimizer):
        return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

    @only_records
    def check(scaler, optimizer):
        if scaler.is_enabled() and state.step["clip"] and clipped & held(optimizer):
            state.notes.setdefault(
                "clipped_while_scaled", {"step": len(state.steps) + 1, "line": state.step["clip"][0]}
            )

    def noted_unscale(self, optimizer):
        check(self, optimizer)
        return unscale(self, optimizer)

    def noted_step(self, optimizer, *args, **kwargs):
        # A fused optimizer unscales by itself.
        if self.is_enabled() and self._per_optimizer_states[id(optimizer)]["stage"].name == "READY":
            check(self, optimizer)
        try:
            return step(self, optimizer, *args, **kwargs)
        finally:
            clipped.difference_update(held(optimizer))  # also where gradients are infinite, and it takes no step

    torch.amp.GradScaler.unscale_, torch.amp.GradScaler.step = noted_unscale, noted_step


def _change_norms(torch):
    """Note the norms that a script computes between backward pass and step, as it does to clip gradients by itself."""

    def watched(usual):
        @functools.wraps(usual)
        def noted(*args, **kwargs):
            if not (torch.compiler.is_compiling() or state.finished or state.step["clip"]):
                tensors = args[0] if args else next(iter(kwargs.values()))
                for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
                    with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError, TypeError):  # no values
                        tensor = getattr(tensor, "_local_tensor", tensor).detach()
                        state.norms[_place(tensor)] = float(norm_of(tensor, dtype=torch.float64))
            return usual(*args, **kwargs)

        return noted

    norm_of = torch.linalg.vector_norm
    functions = [(torch, "norm"), (torch.linalg, "vector_norm"), (torch, "_foreach_norm")]  # Tensor.norm: the first
    each = [(owner, name, getattr(owner, name)) for owner, name in functions]
    each = [(owner, name, usual, watched(usual)) for owner, name, usual in each]

    def watch_norms(on):
        for owner, name, usual, noted in each:
            setattr(owner, name, noted if on else usual)

    state.watch_norms = watch_norms


def _change_autocast(torch):
    """Note that a model begins to compute in half precision by itself, as Accelerate lets it."""
    begin = torch.autocast.__enter__

    def noted(self):
        result = begin(self)
        if not torch.compiler.is_compiling() and state.depth and torch.is_grad_enabled() and not state.finished:
            note_autocast()
        return result

    torch.autocast.__enter__ = noted


def _change_communication(torch):
    """Note what a script lets DistributedDataParallel do with gradients in the place of averaging them."""
    import torch.nn.parallel.distributed as module

    register = module.DistributedDataParallel.register_comm_hook

    def noted(self, *args, **kwargs):
        hook = kwargs["hook"] if "hook" in kwargs else args[1]
        name = getattr(hook, "__qualname__", type(hook).__name__).rpartition(".")[2]
        state.notes["communication"] = name
        for part, dtype in {"fp16": torch.float16, "bf16": torch.bfloat16}.items():
            if part in name:
                note_precision(dtype)
        return register(self, *args, **kwargs)

    module.DistributedDataParallel.register_comm_hook = noted


def _change_schedules(torch):
    """Count the steps of schedules, also of classes whose step is their own, as ReduceLROnPlateau's."""
    module = torch.optim.lr_scheduler
    schedule = module.LRScheduler

    def change(kind):
        if "step" in vars(kind):
            kind.step = counted(kind.step)

    def counted(step):
        @functools.wraps(step)
        def noted(self, *args, **kwargs):
            before = state.schedule_steps
            try:
                return step(self, *args, **kwargs)
            finally:
                state.schedule_steps = before + 1  # also where it steps other schedules, or calls its base's step

        return noted

    def change_subclass(kind, **kwargs):
        super(schedule, kind).__init_subclass__(**kwargs)
        change(kind)

    for kind in vars(module).values():
        if isinstance(kind, type) and issubclass(kind, (schedule, module.ReduceLROnPlateau)):
            change(kind)
    schedule.__init_subclass__ = classmethod(change_subclass)


def _change_saving(torch):
    save = torch.save

    def noted(value, *args, **kwargs):
        if isinstance(value, dict) and not state.finished:
            for name in _keys(value):
                if isinstance(name, str) and name.startswith("module."):
                    state.notes.setdefault("saved_as_module", {"name": name, "line": line()})
                    break
        return save(value, *args, **kwargs)

    torch.save = noted


def _keys(value):
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from inner
        yield key


def _change_dropout(torch):
    """Disable dropout, since runs that drop different units can't be compared; its probabilities are recorded."""
    functional = torch.nn.functional
    is_compiling = torch.compiler.is_compiling

    def note_dropout(probability):
        if not is_compiling() and state.models and not state.finished and probability:
            state.step["dropout"].append(float(probability))

    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        usual = getattr(functional, name)

        def without(input, p=0.5, training=True, inplace=False, _usual=usual):
            if training:
                note_dropout(p)
            return _usual(input, 0.0, training, inplace)

        setattr(functional, name, without)
    attention = functional.scaled_dot_product_attention

    def without_dropout(query, key, value, attn_mask=None, dropout_p=0.0, *args, **kwargs):
        note_dropout(dropout_p)
        return attention(query, key, value, attn_mask, 0.0, *args, **kwargs)

    functional.scaled_dot_product_attention = without_dropout


# --- Data loaders: record their batches; in a replay, return the batches of all ranks ------------------------------


def _change_loaders(torch):
    from torch.utils.data import dataloader
    from torch.utils.data._utils import fetch

    next_index = dataloader._BaseDataLoaderIter._next_index
    initialise = dataloader.DataLoader.__init__
    length = dataloader.DataLoader.__len__
    reset = dataloader._BaseDataLoaderIter.__init__
    reset_again = dataloader._BaseDataLoaderIter._reset
    fetch_usual = fetch._MapDatasetFetcher.fetch
    unseeded = []  # the states of random generators before a batch is fetched
    seen = set()  # the ids of data sets of which a batch was fetched in this process

    @functools.wraps(initialise)  # Lightning makes loaders again, with the arguments that it finds in the signature
    def noted_init(self, dataset, *args, **kwargs):
        initialise(self, dataset, *args, **kwargs)
        note_loader(self, dataset)

    @only_records
    def note_loader(self, dataset):
        size = None
        with contextlib.suppress(Exception):  # whatever a stream raises that has no length
            size = len(dataset)
        ordinal = sum(loader["size"] == size for loader in state.loaders)
        about = {"size": size, "ordinal": ordinal, "batches": [], "length": None, "trains": False, "evaluates": False}
        about["dispatched"] = False  # whether rank 0 draws the batches of all ranks
        about["divisions"] = []  # by what each epoch is divided among ranks
        about["subset"] = _digest(getattr(dataset, "indices", None))
        about["number"] = len(state.loaders)
        about["part"] = None if REPLAY else _part(dataset, about["number"])
        about["repeats"] = bool(getattr(self.sampler, "replacement", False))
        parts = (self, self.sampler, self.batch_sampler)
        about["drop_last"] = any(getattr(part, "drop_last", False) for part in parts)
        about["chosen"] = _chosen(self)
        about["indexed"] = self._dataset_kind == dataloader._DatasetKind.Map and self._auto_collation
        state.loaders.append(about)
        object.__setattr__(self, "_lockstep", about)
        if about["indexed"] and not REPLAY:
            with contextlib.suppress(Exception):
                about["length"] = length(self)

    def noted_length(self):
        recorded = recorded_loader(getattr(self, "_lockstep", None), self.dataset)
        return length(self) if recorded is None or recorded["length"] is None else recorded["length"]

    def noted_iterator(self, loader, *args, **kwargs):
        self._lockstep = getattr(loader, "_lockstep", None)
        begin_epoch(loader)
        reset(self, loader, *args, **kwargs)

    def noted_reset(self, loader, first_iter=False):
        if not first_iter:  # persistent workers begin another epoch
            begin_epoch(loader)
        reset_again(self, loader, first_iter)

    @only_records
    def begin_epoch(loader):
        if about := getattr(loader, "_lockstep", None):
            about["batches"].append([])
            about["divisions"].append(_division(loader))
            if about["part"]:
                about["part"]["batches"].append([])

    def noted_index(self):
        settle()
        if state.loader is None and not state.steps and not state.step["losses"]:
            _forget_trials()
        about = state.loader = self._lockstep
        if about is None or not about["indexed"] or state.finished:
            return next_index(self)
        if about["dispatched"] and rank_and_world()[0]:  # its workers prefetch batches that nobody takes
            return next_index(self)
        epoch = about["batches"][-1]
        recorded = recorded_loader(about, self._dataset)
        if recorded is None:
            index = next_index(self)
        else:
            epochs = recorded["batches"]
            at = len(about["batches"]) - 1
            if at >= len(epochs) or len(epoch) >= len(epochs[at]):
                raise StopIteration
            index = Indices(epochs[at][len(epoch)], recorded["parts"][at][len(epoch)])
            if REVERSED and not about["dispatched"]:
                index.reverse()
        try:
            epoch.append([int(each) for each in index])
            if about["part"]:
                about["part"]["batches"][-1].append([_in_whole(self._dataset, each) for each in index])
        except (TypeError, ValueError):  # indices that are not integers
            about["indexed"] = False
        state.random = _random_states(torch)
        return index

    def same_items(self, index):
        """Make items and their collator draw the same random numbers for the same indices, on any rank or worker."""
        if not self.auto_collation:
            return fetch_usual(self, index)
        batch, drew = fetched(self, index)
        with contextlib.suppress(Exception):
            note_parts(self.dataset, index, batch)
        parts = getattr(index, "parts", [list(index)])
        if drew and parts != [list(index)]:  # what is drawn depends on a rank's whole batch
            with contextlib.suppress(RuntimeError, TypeError, ValueError):  # as where parts are padded to other lengths
                return _together([fetched(self, part)[0] for part in parts], list(map(len, parts)))
        return batch

    def note_parts(dataset, index, batch):
        """Write hashes of the parts of each sample, as its inputs and its label, in the first batch of a data set."""
        if id(dataset) in seen or len(seen) == MOST_SETS:
            return
        seen.add(id(dataset))
        tensors = [tensor for _, tensor in _tensors(batch) if tensor.dim() and tensor.shape[0] == len(index)]
        hashes = {}
        for place, each in enumerate(map(_integer, index)):
            rows = [tensor[place].contiguous() for tensor in tensors]
            raw = [None if not row.dim() and row.item() == each else row.numpy().tobytes() for row in rows]
            hashes[each] = [row and hashlib.blake2b(row, digest_size=8).hexdigest() for row in raw]
        rank_pid = os.getppid() if torch.utils.data.get_worker_info() else os.getpid()
        processes.write_parts(rank_pid, len(seen), {"size": len(dataset), "hashes": hashes})

    def fetched(self, index):
        """The batch with these indices, and whether it drew random numbers beyond those of each item by itself."""

        def fetch():
            if getattr(self.dataset, "__getitems__", None):
                return self.collate_fn(self.dataset.__getitems__(index))
            return self.collate_fn([item(self.dataset, each) for each in index])

        unseeded[:] = _random_states(torch)
        return drawn(fetch, [_in_whole(self.dataset, each) for each in index])

    def item(dataset, index):
        state.items += 1
        name = _in_whole(dataset, index)
        result, drew = drawn(lambda: dataset[index], name, state.items <= WATCHED)
        if drew and not state.other_index:
            state.other_index = True
            if same_at_another_index(dataset, index, name, result):
                note_drawing([], WHATEVER_INDEX)
        return result

    def same_at_another_index(dataset, index, name, result):
        """Whether a sample depends on the random numbers that it draws alone, so that another index gives the same."""
        with contextlib.suppress(Exception):  # as where a data set has no length
            other = (int(index) + 1) % len(dataset)
            return other != int(index) and _same(result, drawn(lambda: dataset[other], name, watched=False)[0])
        return False

    def drawn(call, name, watched=True):
        """What a call returns whose random numbers depend on a name only, and whether it draws any, if watched."""
        numpy = sys.modules.get("numpy")
        before = random.getstate(), torch.get_rng_state(), numpy and numpy.random.get_state()
        seed = int.from_bytes(hashlib.blake2b(repr(name).encode(), digest_size=4).digest(), "little")
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if numpy:
            numpy.random.seed(seed)
        seeded = watched and _random_states(torch)
        try:
            result = call()
            after = watched and _random_states(torch)
            if drew := seeded != after:
                note_drawing([own for own, one, other in zip(unseeded, seeded, after, strict=True) if one != other])
            return result, drew
        finally:
            random.setstate(before[0])
            torch.set_rng_state(before[1])
            if numpy:
                numpy.random.set_state(before[2])

    def note_drawing(states, more=""):
        """Note from which states of random generators the first sample that draws would be drawn; then, more of it."""
        if state.drawing and not more:
            return
        state.drawing = state.drawing or hashlib.blake2b(repr(states).encode(), digest_size=8).hexdigest()
        state.drawing += more
        worker = torch.utils.data.get_worker_info()
        if worker and worker.id == 0:
            with open(os.path.join(FOLDER, f"drawing.{os.getppid()}"), "w") as stream:
                stream.write(state.drawing)

    dataloader.DataLoader.__init__ = noted_init
    dataloader.DataLoader.__len__ = noted_length
    dataloader._BaseDataLoaderIter.__init__ = noted_iterator
    dataloader._BaseDataLoaderIter._reset = noted_reset
    dataloader._BaseDataLoaderIter._next_index = noted_index
    fetch._MapDatasetFetcher.fetch = same_items


class Indices(list):
    """The indices of all ranks for a batch of a replay; parts: those of each rank, given their numbers."""

    def __init__(self, indices, sizes):
        super().__init__(indices)
        following = iter(indices)
        self.parts = [list(itertools.islice(following, size)) for size in sizes]

    def __reduce__(self):  # for a DataLoader's workers
        return _restored, (list(self), self.parts)


def _restored(indices, parts):
    restored = Indices(indices, ())
    restored.parts = parts
    return restored


def _together(parts, sizes):
    """Batches of several ranks as one, whose tensors have a row for each sample; sizes: their numbers of samples.

    In a reversed replay samples are in reverse order. Raises ValueError or RuntimeError if they can't be joined.
    """
    import torch

    first = parts[0]
    if isinstance(first, collections.abc.MutableMapping):
        joined = copy.copy(first)
        joined.update({key: _together([part[key] for part in parts], sizes) for key in first})
        return joined
    if isinstance(first, (list, tuple)):
        joined = [_together(list(each), sizes) for each in zip(*parts, strict=True)]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    if [len(part) for part in parts] != sizes:  # a TypeError for what is no tensor
        raise ValueError("not a row for each sample")
    joined = torch.cat(parts)
    return joined.flip(0) if REVERSED else joined


def _same(one, other):
    """Whether two samples are equal."""
    import torch
    from torch.utils import _pytree as pytree

    (mine, form), (its, other_form) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    if form != other_form:
        return False
    for left, right in zip(mine, its, strict=True):
        equal = torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
        if not (equal.all() if hasattr(equal, "all") else equal):  # of a NumPy array
            return False
    return True


def _integer(index):
    """An index that is the same in a replay, to which it comes by way of JSON: samplers may give NumPy's integers."""
    try:
        return int(index)
    except (TypeError, ValueError):
        return index


def _in_whole(dataset, index):
    """An index of a data set; if that is a part of another, the index there, which is the same on all ranks."""
    from torch.utils.data import Subset

    with contextlib.suppress(IndexError, TypeError, ValueError):
        return int(dataset.indices[index]) if isinstance(dataset, Subset) else _integer(index)
    return _integer(index)


def _part(dataset, number):
    """Of what a data set is a part, if it is a Subset. Its indices are written to a file, in order."""
    from torch.utils.data import Subset

    if not isinstance(dataset, Subset) or len(dataset) > LARGEST:
        return None
    try:
        size, indices = len(dataset.dataset), packed("q", map(int, dataset.indices))
    except (TypeError, ValueError):
        return None
    with open(os.path.join(FOLDER, f"part.{os.getpid()}.{number}"), "wb") as stream:
        indices.tofile(stream)
    return {"size": size, "file": os.path.basename(stream.name), "batches": []}


def _samplers(loader):
    """A DataLoader's sampler and those within it: Accelerate divides a batch sampler among ranks by one around it."""
    part = loader.sampler
    for _ in range(4):
        yield part
        part = getattr(part, "sampler", None) or getattr(part, "batch_sampler", None) or loader.batch_sampler


def _chosen(loader):
    """How many samples its sampler draws from, and a hash of them, if it was given some (SubsetRandomSampler)."""
    for part in _samplers(loader):
        if (indices := getattr(part, "indices", None)) is not None and (digest := _digest(indices)):
            return [len(indices), digest]
    return None


def _division(loader):
    """By what samplers that divide an epoch among ranks shuffle it: settings by name, which all ranks must share."""
    parts = list(_samplers(loader))
    if not any(hasattr(part, name) for part in parts for name in ("num_replicas", "num_processes")):
        return {}
    names = ("seed", "initial_seed", "epoch", "shuffle")
    return {name: value for part in parts for name in names if isinstance(value := getattr(part, name, None), int)}


def _digest(indices):
    """A hash of the indices of a subset; None if a data set is not a subset."""
    try:
        return None if indices is None else hashlib.blake2b(repr(list(indices)).encode(), digest_size=8).hexdigest()
    except TypeError:
        return None


def recorded():
    """The recording to replay: its loaders with the batches of all ranks, and its learning rates."""
    if state.recorded is None:
        with open(os.path.join(REPLAY, "replay.json")) as stream:
            state.recorded = json.load(stream)
    return state.recorded


def recorded_loader(about, dataset):
    """What a DataLoader of this replay over a data set is to hand out; None if nothing was recorded for it."""
    if not REPLAY or about is None or not about["indexed"]:
        return None
    if about["number"] not in state.replayed:
        state.replayed[about["number"]] = _of_ranks(about, dataset)
    return state.replayed[about["number"]]


def _of_ranks(about, dataset):
    """The recorded loader of all ranks that corresponds to a loader, with this data set's indices."""
    divided = [loader for loader in recorded()["loaders"] if loader.get("divided")]
    if same := next((loader for loader in divided if loader["number"] == about["number"]), None):
        # Its indices are those of the whole, of which each rank had a part.
        place = {_in_whole(dataset, index): index for index in range(about["size"] or 0)}
        batches = [[[place.get(each) for each in batch] for batch in epoch] for epoch in same["batches"]]
        known = all(None not in batch for epoch in batches for batch in epoch)
        return same | {"batches": batches} if known else None
    kind = about["size"], about["ordinal"]
    others = (loader for loader in recorded()["loaders"] if not loader.get("divided"))
    return next((loader for loader in others if (loader["size"], loader["ordinal"]) == kind), None)


def recorded_rates(by_closure):
    """The recorded learning rates of the parameter groups of the optimizer that is about to step."""
    rates, step, before = recorded()["rates"], len(state.steps), 0
    if of_same_step() and not by_closure:
        step, before = step - 1, len(state.steps[-1]["rates"])
    return rates[step][before:] if step < len(rates) else None


# --- A replay is a single process, whatever the script says about its ranks ----------------------------------------


def _be_alone(torch):
    import torch.distributed as dist

    parallel = torch.nn.DataParallel.__init__

    def on_one_device(self, module, device_ids=None, output_device=None, dim=0):
        first = (device_ids or [0])[:1] if torch.accelerator.is_available() else device_ids
        parallel(self, module, first, first and first[0], dim)

    torch.nn.DataParallel.__init__ = on_one_device
    if not dist.is_available():
        return
    initialise = dist.init_process_group

    def alone(*args, **kwargs):
        kwargs = {
            key: value for key, value in kwargs.items() if key not in ("rank", "world_size", "init_method", "store")
        }
        backend = args[0] if args else kwargs.pop("backend", None)
        return initialise(backend, store=dist.HashStore(), rank=0, world_size=1, **kwargs)

    dist.init_process_group = alone
    dist.distributed_c10d.init_process_group = alone


def change_spawn(module):
    """Make mp.spawn start one process in a replay, and set the number of ranks in its arguments to 1.

    Fabric spawns by start_processes.
    """
    if not REPLAY:
        return
    spawn, start = module.spawn, module.start_processes

    def spawn_one(fn, args=(), nprocs=1, *rest, **kwargs):
        return spawn(fn, _arguments_of_one(fn, args, nprocs), 1, *rest, **kwargs)

    def start_one(fn, args=(), nprocs=1, *rest, **kwargs):
        return start(fn, args, 1, *rest, **kwargs)

    module.spawn, module.start_processes = spawn_one, start_one


# Parts of names of settings that count ranks.
COUNTS = ("world", "nproc", "gpus", "ngpu", "n_gpu", "num_gpu", "num_devices", "processes", "replicas", "ranks")


def _counts_ranks(name):
    return any(word in str(name).lower().replace("-", "_") for word in COUNTS)


def _count_one():
    """Set the number of ranks to 1 in this process's variables and arguments, also where argparse has it as default."""
    world = recorded()["world"]
    if world == 1:
        return
    for name, value in os.environ.items():
        if value == str(world) and _counts_ranks(name) and not name.startswith("LOCKSTEP_"):
            os.environ[name] = "1"
    for place in range(1, len(sys.argv)):
        option, sign, value = sys.argv[place].rpartition("=")
        before = sys.argv[place - 1]
        if value == str(world) and sign and _counts_ranks(option):
            sys.argv[place] = f"{option}=1"
        elif value == str(world) and not sign and before.startswith("-") and _counts_ranks(before):
            sys.argv[place] = "1"
    parse = argparse.ArgumentParser.parse_known_args

    @functools.wraps(parse)
    def parse_of_one(self, *args, **kwargs):
        namespace, rest = parse(self, *args, **kwargs)
        vars(namespace).update(_counted(vars(namespace), world))
        return namespace, rest

    argparse.ArgumentParser.parse_known_args = parse_of_one


def _arguments_of_one(fn, args, ranks):
    """The arguments of a spawned function with its number of ranks set to 1.

    An argument with that value need not be it: the name tells, if any of them has such a name.
    """
    names = list(inspect.signature(fn).parameters)[1:]
    alike = {place for place, value in enumerate(args) if type(value) is int and value == ranks}
    named = {place for place in alike if place < len(names) and _counts_ranks(names[place])}
    return tuple(1 if place in (named or alike) else _of_one(value, ranks) for place, value in enumerate(args))


def _of_one(value, ranks):
    """Settings of any kind, such as a dictionary or a dataclass, with their number of ranks set to 1: a copy."""
    of_items = isinstance(value, collections.abc.MutableMapping)
    counted = _counted(value if of_items else getattr(value, "__dict__", {}), ranks)
    if not counted or isinstance(value, type):
        return value
    changed = copy.copy(value)
    for name in counted:
        if of_items:
            changed[name] = 1
        else:
            object.__setattr__(changed, name, 1)  # also where it is frozen
    return changed


def _counted(settings, ranks):
    """What changes among settings, given by name, if there is 1 rank: those that hold the number of ranks."""
    return {name: 1 for name, each in settings.items() if type(each) is int and each == ranks and _counts_ranks(name)}


def change_stages(module):
    """Note that a model is divided into stages of a pipeline."""
    begin = module._PipelineStageBase.__init__

    def noted(self, *args, **kwargs):
        state.stages = True
        begin(self, *args, **kwargs)

    module._PipelineStageBase.__init__ = noted


def change_lightning(module):
    """In a replay, tell Lightning that it is one process, so that it starts no others and its world has one rank."""
    if REPLAY:
        environment = module.LightningEnvironment
        environment.creates_processes_externally = property(lambda self: True)
        environment.set_world_size = lambda self, size: None  # it remains 1


def change_accelerate(module):
    """Note evaluations whose repeated samples Accelerate leaves out of a metric."""
    gather = module.Accelerator.gather_for_metrics

    def noted(self, input_data, *args, **kwargs):
        tensors = [tensor for _, tensor in _tensors(input_data)]
        of_samples = any(tensor.dim() for tensor in tensors) or not tensors  # not the mean of a batch
        if state.loader is not None and of_samples:
            state.loader["left_out"] = True
        return gather(self, input_data, *args, **kwargs)

    module.Accelerator.gather_for_metrics = noted


def change_prepared_schedules(module):
    """Count as one step what a schedule does that Accelerate prepared, which is a step for each rank."""
    step = module.AcceleratedScheduler.step

    def noted(self, *args, **kwargs):
        before = state.schedule_steps
        try:
            return step(self, *args, **kwargs)
        finally:
            state.schedule_steps = min(state.schedule_steps, before + 1)

    module.AcceleratedScheduler.step = noted


def change_dispatching(module):
    """Follow Accelerate's dispatcher, whose rank 0 draws the batches of all ranks and sends each rank its share.

    In a replay it dispatches to as many ranks as were recorded, and the only process takes all of their shares.
    """
    from accelerate.utils.operations import recursively_apply

    dispatcher = module.DataLoaderDispatcher
    begin, iterate = dispatcher.__init__, dispatcher.__iter__

    @functools.wraps(begin)
    def noted_init(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        if about := getattr(self.base_dataloader, "_lockstep", None):
            about["dispatched"] = True
        if REPLAY and not recorded()["in_turn"]:
            ranks = {"process_index": 0, "num_processes": recorded()["world"]}
            self.state = types.SimpleNamespace(**vars(self.state) | ranks)
            self.slice_fn = functools.partial(all_shares, self.slice_fn)

    def noted_iterator(self):
        about = getattr(self.base_dataloader, "_lockstep", None)
        for batch in iterate(self):
            if about:
                state.loader = about  # only rank 0 has drawn from it
                if self.end_of_dataloader and not self._drop_last:
                    about["filled"] = -self.remainder % self.state.num_processes
            yield recursively_apply(lambda tensor: tensor.flip(0), batch) if REVERSED else batch

    def all_shares(share, batch, first, *, process_index, num_processes):
        return share(batch, slice(0, first.stop * num_processes), process_index=0, num_processes=1)

    dispatcher.__init__, dispatcher.__iter__ = noted_init, noted_iterator


def change_deepspeed(module):
    """Record the steps of DeepSpeed's engine, and its gradients or, where it keeps them to itself, their norm."""

    def begin(engine):
        state.watch_norms(False)  # the engine's own
        if state.models and not state.finished:
            by_pytorch = isinstance(engine.optimizer, sys.modules["torch"].optim.Optimizer)  # not by ZeRO
            managed = getattr(engine, "managed_gradient_accumulation", lambda: True)  # older versions always do
            averaged = engine.enable_backward_allreduce and managed()
            state.step["gradients"] = gradients() if by_pytorch and averaged else {}

    def done(engine):
        if state.models and not state.finished:
            state.step["line"] = line()
            state.step["rates"] = [float(rate) for rate in engine.get_lr()]
            state.step.setdefault("gradients", {})
            if norm := engine.get_global_grad_norm():  # before clipping
                state.step["norm"] = float(norm)
            step_done()

    processes.follow_engine(module, state, only_records(done), only_records(begin))


def change_deepspeed_itself(module):
    """In a replay, give DeepSpeed's single process the initial weights, and a batch size for all ranks' samples."""
    if not REPLAY:
        return
    initialise, numbers = module.initialize, itertools.count()

    def alone(args=None, model=None, **kwargs):
        world = recorded()["world"]
        given = kwargs.pop("config", None) or kwargs.pop("config_params", None)
        given = given or getattr(args, "deepspeed_config", None)
        if isinstance(given, str):
            with open(given) as stream:
                given = json.load(stream)
        given = dict(given)
        micro = given.get("train_micro_batch_size_per_gpu")
        if isinstance(micro, int):
            given["train_micro_batch_size_per_gpu"] = micro * world
        _put_weights_into(model, next(numbers))
        if args is not None and hasattr(args, "deepspeed_config"):
            args = copy.copy(args)  # a script may make several engines with them
            args.deepspeed_config = None
        return initialise(args=args, model=model, config=given, **kwargs)

    module.initialize = alone


random.seed(_seed())
if REPLAY:
    _count_one()
processes.watch_files()
processes.watch_exits()
CHANGES = {
    "torch": change_torch,
    "numpy.random": change_random,
    "torch.multiprocessing": change_spawn,
    "torch.distributed.pipelining.stage": change_stages,
    "lightning_fabric.plugins.environments.lightning": change_lightning,  # of pytorch_lightning, too
    "lightning.fabric.plugins.environments.lightning": change_lightning,
    "accelerate.accelerator": change_accelerate,
    "accelerate.data_loader": change_dispatching,
    "accelerate.scheduler": change_prepared_schedules,
    "deepspeed.runtime.engine": change_deepspeed,
    "deepspeed": change_deepspeed_itself,
}
