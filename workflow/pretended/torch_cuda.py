"""What torch.cuda and torch.distributed answer on pretended GPUs: see lockstep/script/pretended.py."""

import ctypes
import functools
import hashlib
import importlib.machinery
import importlib.util
import itertools
import os
import time
import uuid
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

AMD = os.environ.get("LOCKSTEP_PRETENDED_AMD")  # the GPUs are AMD's: where the kernel tells of them
KINDS = os.environ.get("LOCKSTEP_PRETENDED_KINDS")  # the GPUs' names in the order of the bus, where they differ
SIZES = bool(os.environ.get("LOCKSTEP_PRETENDED_SIZES"))  # only memory is counted, by one rank alone
forked = False  # whether this process was forked off one that used GPUs already


@functools.cache
def gpus():
    """The compiled group.cpp."""
    path = os.path.join(os.environ["LOCKSTEP_PRETENDED_LIBRARIES"], "group.so")
    loader = importlib.machinery.ExtensionFileLoader("pretended", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("pretended", loader))
    loader.exec_module(module)
    return module


def in_order_of_cuda() -> list[int]:
    """The GPUs of the machine in CUDA's order, each by its number on the bus. By default CUDA puts the fastest first.

    Here a kind of GPU is fast if its name begins with "Fast".
    """
    there = list(range(int(os.environ["LOCKSTEP_PRETENDED_GPUS"])))
    if KINDS and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        there.sort(key=lambda number: not KINDS.split(",")[number].startswith("Fast"))
    return there


def visible() -> list[int]:
    """The GPUs that this process sees, each by its number on the bus."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if AMD:
        chosen = os.environ.get("HIP_VISIBLE_DEVICES", chosen)
    there = {str(place): number for place, number in enumerate(in_order_of_cuda())}
    named = there if chosen is None else [name.strip() for name in chosen.split(",")]
    return [there[name] for name in itertools.takewhile(there.__contains__, named)]  # no further, as CUDA does


# ---- torch.cuda: what its Python asks of its compiled part ----


class Idle:
    """A stream or an event on a device that has done all work by the time a call returns."""

    def query(self):
        return True

    def synchronize(self):
        pass


class Stream(Idle):
    def __new__(cls, device=None, priority=0, stream_id=0, device_index=0, device_type=1, stream_ptr=0, **_):
        made = object.__new__(cls)
        import torch

        index = device_index if device is None else torch.device(device).index
        made.device_index, made.stream_id, made.device_type = index or 0, stream_id, device_type
        made.device, made.cuda_stream, made.priority = torch.device("cuda", made.device_index), 0, priority
        return made

    def __init__(self, *arguments, **more):
        pass

    def __eq__(self, other):
        return isinstance(other, Stream) and self.device_index == other.device_index

    def __hash__(self):
        return self.device_index


class Event(Idle):
    def __new__(cls, enable_timing=False, **_):
        made = object.__new__(cls)
        made.timed, made.at = enable_timing, None
        return made

    def __init__(self, *arguments, **more):
        pass

    def record(self, stream=None):
        self.at = time.perf_counter()

    def wait(self, stream=None):
        pass

    def elapsed_time(self, end):
        if not (self.timed and end.timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.at is None or end.at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return 1000 * (end.at - self.at)


def properties(number):
    number = visible()[number]
    return SimpleNamespace(
        name=KINDS.split(",")[number] if KINDS else f"Pretended GPU {number}",
        major=9,
        minor=0,
        total_memory=gpus().memory_of_a_gpu,
        multi_processor_count=1,
        uuid=str(uuid.UUID(int=number)),
        is_integrated=False,
        is_multi_gpu_board=False,
        gcnArchName="",
        warp_size=32,
        L2_cache_size=2**20,
        max_threads_per_multi_processor=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=49152,
        shared_memory_per_multiprocessor=65536,
        pci_bus_id=number,
        pci_device_id=0,
        pci_domain_id=0,
    )


def memory_stats(number):
    *allocated, reserved, most_reserved = gpus().memory(number)
    stats = {}
    for name in (
        "allocated_bytes",
        "active_bytes",
        "requested_bytes",
        "reserved_bytes",
        "allocation",
        "segment",
        "active",
    ):
        now, most = (reserved, most_reserved) if name == "reserved_bytes" else allocated
        each = {"current": now, "peak": most, "allocated": most, "freed": most - now}
        stats[name] = {kind: dict(each) for kind in ("all", "small_pool", "large_pool")}
    return stats | {"num_alloc_retries": 0, "num_ooms": 0}


def set_device(number):
    gpus().see(len(visible()))
    gpus().set_device(number)


def exchange_device(number):
    before = gpus().current_device()
    if number >= 0:
        set_device(number)
    return before


def start():
    import torch

    gpus().see(len(visible()))
    torch.cuda.default_generators = (torch.default_generator,) * len(visible())
    os.register_at_fork(after_in_child=after_fork)


def after_fork():
    """Make torch.cuda refuse to start CUDA again in a fork, as it does on real GPUs."""
    global forked
    forked = True
    gpus().ask_for_initialisation()


def pin_memory(tensor, device=None):
    if tensor.device.type != "cpu" or tensor.is_sparse:
        raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
    return tensor


def stream_of(number):
    return 0, number, 1


def before_compiled_part():
    """Load the pretended CUDA first: PyTorch looks for one only once, while its compiled part is imported."""
    libraries = Path(importlib.util.find_spec("torch").origin).parent / "lib"
    for library in (libraries / "libtorch_cpu.so", os.path.join(os.environ["LOCKSTEP_PRETENDED_LIBRARIES"], "gpus.so")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def before_torch_cuda():
    import torch  # so far as it is imported: its compiled part is there

    gpus()
    nothing = lambda *arguments, **more: None  # noqa: E731
    answers = {
        "_CudaStreamBase": Stream,
        "_CudaEventBase": Event,
        "_CudaDeviceProperties": SimpleNamespace,
        "_CUDAGraph": type("_CUDAGraph", (), {}),
        "_graph_pool_handle": nothing,
        "_cuda_init": start,
        "_cuda_getDeviceCount": lambda: len(visible()),
        "_cuda_getDevice": gpus().current_device,
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": exchange_device,
        "_cuda_maybeExchangeDevice": lambda number: exchange_device(number),  # as Dynamo wants two functions
        "_cuda_isInBadFork": lambda: forked,
        "_cuda_synchronize": nothing,
        "_cuda_getCurrentStream": stream_of,
        "_cuda_getDefaultStream": stream_of,
        "_cuda_getCurrentRawStream": lambda number: 0,
        "_cuda_setStream": nothing,
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_getCompiledVersion": lambda: 13000,
        "_cuda_memoryStats": memory_stats,
        "_cuda_resetPeakMemoryStats": gpus().reset_peak,
        "_cuda_resetAccumulatedMemoryStats": nothing,
        "_cuda_emptyCache": gpus().empty_cache,
        "_cuda_canDeviceAccessPeer": lambda *devices: False,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_getAllocatorBackend": lambda: "pretended",
        "_nccl_version": lambda: 2 << 32 | 28 << 16 | 9,
        "_nccl_version_suffix": lambda: b"",
        "_cuda_attach_out_of_memory_observer": nothing,
        "_show_config": lambda: "PyTorch on pretended GPUs",  # which asks a library of CUDA's for its version
    }
    torch._C._has_cuda = True
    for name, answer in answers.items():
        setattr(torch._C, name, answer)


def after_torch_cuda(cuda):
    import torch

    memory = gpus().memory_of_a_gpu
    cuda._cudart = SimpleNamespace(cudaMemGetInfo=lambda number: (memory, memory), cudaError=None)
    cuda.cudart = lambda: cuda._cudart
    cuda.get_device_properties = lambda device=None: properties(cuda._utils._get_device_index(device, optional=True))
    cuda.mem_get_info = lambda device=None: (memory, memory)
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.memory._host_allocator = None
    torch.version.cuda, torch.version.hip = (None, "7.0") if AMD else ("13.0", None)
    torch.Tensor.pin_memory = pin_memory
    torch.Tensor.record_stream = lambda self, stream: None  # which takes no stream but PyTorch's own
    torch.Tensor.is_pinned = lambda self, device=None: False
    resize = torch.UntypedStorage.resize_

    def resize_(storage, size):
        if storage.device.type != "cuda":
            return resize(storage, size)
        gpus().resize_storage(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), int(size))
        return storage

    def clone(storage):
        if storage.device.type != "cuda":
            return torch.UntypedStorage(storage.nbytes(), device=storage.device).copy_(storage)
        return torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device).untyped_storage().copy_(storage)

    to = torch.UntypedStorage.to

    def to_device(storage, *, device, non_blocking=False):  # as torch.load does with what it reads
        if torch.device(device).type != "cuda":
            return to(storage, device=device, non_blocking=non_blocking)
        return torch.empty(storage.nbytes(), dtype=torch.uint8, device=device).untyped_storage().copy_(storage)

    torch.UntypedStorage.resize_, torch.UntypedStorage.clone, torch.UntypedStorage.to = resize_, clone, to_device


# ---- several devices of one process, and of several ----


def after_comm(comm):
    """DataParallel's: copies between the devices, with gradients as torch/nn/parallel/_functions.py has them."""

    def broadcast_coalesced(tensors, devices, buffer_size=0):
        return [[tensor if tensor.get_device() == device else tensor.to(f"cuda:{device}") for tensor in tensors]
                for device in devices]  # fmt: skip

    def scatter(tensor, devices=None, chunk_sizes=None, dim=0, streams=None, *, out=None):
        parts = tensor.split(chunk_sizes, dim) if chunk_sizes else tensor.chunk(len(devices), dim)
        return tuple(part.to(f"cuda:{device}") for part, device in zip(parts, devices, strict=False))

    def gather(tensors, dim=0, destination=None, *, out=None):
        import torch

        return torch.cat([tensor.to(f"cuda:{destination or 0}") for tensor in tensors], dim)

    def reduce_add_coalesced(inputs, destination=None, buffer_size=0):
        target = f"cuda:{destination or 0}"
        return tuple(sum(tensor.to(target) for tensor in tensors) for tensors in zip(*inputs, strict=True))

    comm.broadcast_coalesced, comm.scatter = broadcast_coalesced, scatter
    comm.gather, comm.reduce_add_coalesced = gather, reduce_add_coalesced


class Options:
    class Config:
        pass

    def __init__(self, is_high_priority_stream=False):
        self._timeout, self.config = timedelta(minutes=10), self.Config()


class IsNamedSo(type):
    def __instancecheck__(cls, group):
        return callable(getattr(group, "name", None)) and group.name() == cls.backend


class ProcessGroupNCCL(metaclass=IsNamedSo):
    backend = "nccl"
    Options = Options

    def __new__(cls, store, rank, size, options=None):
        timeout = options._timeout if options else timedelta(minutes=10)
        return process_group("nccl", store, rank, size, timeout)


class ProcessGroupGloo(metaclass=IsNamedSo):
    """Gloo sends tensors of GPUs through the host, too, which the gloo of PyTorch's CPU build can't."""

    backend = "gloo"

    def __new__(cls, store, rank, size, timeout):
        return process_group("gloo", store, rank, size, timeout)


def process_group(name, store, rank, size, timeout):
    """A process group of this name, which communicates by gloo."""
    import torch.distributed as dist
    from torch._C import _distributed_c10d as compiled

    if SIZES:
        return gpus().make_alone(rank, size, name)
    gloo = compiled.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
    return gpus().make_group(store, gloo, name)


def after_distributed(distributed):
    import torch

    distributed.ProcessGroupGloo = ProcessGroupGloo
    # PyTorch writes into a group's options, which nothing reads here.
    torch._C._distributed_c10d.Backend.options = property(lambda group: Options())
    distributed._NCCL_AVAILABLE = True
    distributed.ProcessGroupNCCL = ProcessGroupNCCL
    distributed.default_pg_nccl_timeout = timedelta(minutes=10)
    if SIZES:
        distributed._store_based_barrier = lambda *arguments, **more: None


def after_rendezvous(rendezvous):
    """Let a rank that runs alone wait for no other."""

    def alone(url, **more):
        import torch.distributed as dist

        yield dist.HashStore(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    if SIZES:
        rendezvous._rendezvous_handlers |= dict.fromkeys(("env", "file", "tcp"), alone)


def after_package(package):
    package.ProcessGroupNCCL = ProcessGroupNCCL


def after_machine(machine):
    machine.built_for_gpus = lambda: True
    if AMD:
        machine.built_for_amd, machine.KFD = lambda: True, Path(AMD)


def after_profiler(profiler):
    """Record no GPU: the work of a pretended one is done by the host, and so recorded already."""
    record = profiler.profile.__init__

    @functools.wraps(record)
    def record_the_host(self, *, activities=None, **more):
        record(self, activities=[profiler.ProfilerActivity.CPU], **more)

    profiler.profile.__init__ = record_the_host


def after_nvtx(nvtx):
    for name in ("rangePushA", "rangePop", "markA", "rangeStartA", "rangeEnd"):
        setattr(nvtx._nvtx, name, lambda *arguments: 0)


def after_varlen(varlen):
    """FlashAttention's part for texts of any lengths, by its formula; as there, in bf16 and fp16 only."""
    import inspect

    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    takes = inspect.signature(varlen.varlen_attn)

    def varlen_attn(*arguments, **named):
        takes.bind(*arguments, **named)
        with _disable_current_modes():  # it reads lengths on the host, which the kernel does not
            return attend_within(*arguments, **named)

    def attend_within(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None):
        if not (query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)):
            raise RuntimeError("FlashAttention only supports fp16 and bf16, on GPUs")
        if cu_seq_q.dtype != torch.int32 or max_q < cu_seq_q.diff().max():
            raise RuntimeError("cu_seqlens must be int32, and no text longer than max_seqlen")
        lengths = cu_seq_q.diff().tolist()
        texts = zip(*(tensor.transpose(0, 1).split(lengths, 1) for tensor in (query, key, value)), strict=True)
        attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, scale=scale)
        return torch.cat([attend(*(part[None] for part in text))[0] for text in texts], 1).transpose(0, 1)

    varlen.varlen_attn = varlen_attn


def after_torch(torch):
    torch.nn.Module.compile = compile_module
    compute_batch_norm(torch)


def compile_module(module, *, dynamic, mode="default"):
    """torch.compile without its compiler, which makes kernels; "reduce-overhead" is CUDA graphs, which are replayed."""
    import torch
    from torch._dynamo.backends.common import aot_autograd

    def kept(graph, inputs):
        """Like a CUDA graph it puts its results into the same memory each time, over those of the time before."""
        from functorch.compile import make_boxed_func

        memory = []

        def replay(*inputs):
            results = graph(*inputs)
            if not memory:
                memory.extend(torch.clone(each) if isinstance(each, torch.Tensor) else each for each in results)
            else:
                for place, each in zip(memory, results, strict=True):
                    if isinstance(each, torch.Tensor):
                        place.copy_(each)
            return [each.detach() if isinstance(each, torch.Tensor) else each for each in memory]

        return make_boxed_func(replay)

    backend = aot_autograd(fw_compiler=kept) if mode == "reduce-overhead" else "aot_eager"
    module._compiled_call_impl = torch.compile(module._call_impl, dynamic=dynamic, backend=backend)


def compute_batch_norm(torch):
    """The kernels of SyncBatchNorm (torch/nn/modules/_functions.py), by their formulas: PyTorch has them for GPUs only.

    `x` and `dy` are [samples, channels, ...]; all statistics are [channels], of half precision in fp32.
    """

    def over(x):
        return [dimension for dimension in range(x.dim()) if dimension != 1]

    def wide(x):
        return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x

    def along(statistic, x):
        return statistic.view([1, -1] + [1] * (x.dim() - 2))

    def stats(x, eps):
        variance, mean = torch.var_mean(wide(x), over(x), correction=0)
        return mean, (variance + eps).rsqrt()

    def gather_stats_with_counts(x, means, invstds, running_mean, running_var, momentum, eps, counts):
        counts = counts.to(means.dtype).view(-1, 1)
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        variance = (counts * (invstds**-2 - eps + (means - mean) ** 2)).sum(0) / total
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((variance * total / (total - 1)).to(running_var.dtype), momentum)
        return mean, (variance + eps).rsqrt()

    def elemt(x, weight, bias, mean, invstd, eps):
        y = (wide(x) - along(mean, x)) * along(invstd, x)
        return (y if weight is None else y * along(weight, x) + along(bias, x)).to(x.dtype)

    def backward_reduce(dy, x, mean, invstd, weight, of_input, of_weight, of_bias):
        dy = wide(dy)
        sum_dy = dy.sum(over(x))
        sum_dy_xmu = (dy * (wide(x) - along(mean, x))).sum(over(x))
        like = mean if weight is None else weight
        return sum_dy, sum_dy_xmu, (sum_dy_xmu * invstd).to(like.dtype), sum_dy.to(like.dtype)

    def backward_elemt(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, counts):
        total = counts.sum().to(mean.dtype)
        slope = along(invstd**2 * sum_dy_xmu / total, x)
        dx = (wide(dy) - along(sum_dy / total, x) - (wide(x) - along(mean, x)) * slope) * along(invstd, x)
        return (dx if weight is None else dx * along(weight, x)).to(x.dtype)

    library = torch.pretended = torch.library.Library("aten", "IMPL")  # which takes them back when it goes
    for kernel in (stats, gather_stats_with_counts, elemt, backward_reduce, backward_elemt):
        library.impl(f"batch_norm_{kernel.__name__}", kernel, "CUDA")


class StateOfHost:
    """The state of the host's generator after an offset, which a GPU's has and the host's has not: another seed's.

    It stands in for _PhiloxState, by which DTensors draw: ranks with the same part of a tensor have the same offset.
    """

    def __init__(self, state):
        import torch

        self.began, self.offset = state.cpu(), torch.zeros(1, dtype=torch.int64)

    @property
    def state(self):
        import torch

        named = self.began.numpy().tobytes() + str(int(self.offset)).encode()
        seed = int.from_bytes(hashlib.blake2b(named, digest_size=7).digest(), "little")
        return torch.Generator().manual_seed(seed).get_state()


def after_random_of_tensors(random):
    random._PhiloxState = StateOfHost


def after_horovod(operations):
    """Horovod's compiled part knows tensors of the CPU only: the same memory is handed to it."""
    operations.mpi_lib = HorovodOnHost(operations.mpi_lib)


class HorovodOnHost:
    def __init__(self, library):
        self.library, self.handed = library, {}

    def __getattr__(self, name):
        if "_torch_cuda_" not in name:
            return getattr(self.library, name)
        function = getattr(self.library, name.replace("_torch_cuda_", "_torch_"))

        def on_host(*arguments):
            pairs = []
            handle = function(*(handed(argument, pairs) for argument in arguments))
            self.handed[handle] = pairs
            return handle

        return on_host

    def horovod_torch_wait_and_clear(self, handle):
        result = self.library.horovod_torch_wait_and_clear(handle)
        for tensor, host in self.handed.pop(handle, ()):
            if tensor.shape != host.shape:  # what is gathered gets its size when all have said theirs
                tensor.resize_(host.shape).copy_(host)
        return result


def handed(argument, pairs):
    import torch

    if isinstance(argument, torch.Tensor) and argument.is_cuda:
        host = gpus().on_host(argument.detach())
        pairs.append((argument, host))
        return host
    return [handed(each, pairs) for each in argument] if isinstance(argument, (list, tuple)) else argument


BEFORE = {"torch._C": before_compiled_part, "torch.cuda": before_torch_cuda}
AFTER = {
    "torch.cuda": after_torch_cuda,
    "torch.cuda.nvtx": after_nvtx,
    "torch.profiler.profiler": after_profiler,
    "torch.nn.parallel.comm": after_comm,
    "torch.nn.attention.varlen": after_varlen,
    "torch": after_torch,
    "torch.distributed.distributed_c10d": after_distributed,
    "torch.distributed.rendezvous": after_rendezvous,
    "torch.distributed": after_package,
    "torch.distributed.tensor._random": after_random_of_tensors,
    "lockstep.config.machine": after_machine,
    "horovod.torch.mpi_ops": after_horovod,
}
