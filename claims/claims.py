"""The claims: what is said, by whom, and a function that measures it.

The articles: A, github.com/taishan1994/pytorch-distributed-NLP; B, blog.csdn.net/u012374012/article/details/145284637;
C, "PyTorch分布式训练基础：DDP使用" (CSDN); D, "Pytorch 多卡并行训练教程 (DDP)"; E, a Korean blog on several GPUs. The
claims are in Lockstep's words.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.common import prepared
from claims import runs
from claims.runs import Runs
from lockstep import paths, stats
from lockstep.data.tokens import table

HOLDS, NOT, UNKNOWN = "holds here", "does not hold here", "can't be told on this machine"
ROWS = "snakemake --cores all --configfile config/claims.yaml"
HERE = "python -m claims {}"
WORKERS = 2
ON_CPU = "needs two GPUs: on a CPU nn.DataParallel passes everything on to the model"


@dataclass(frozen=True)
class Claim:
    said: str
    by: str
    measure: Callable[[Runs], tuple[str, str]]  # the verdict, and what it is made of
    command: str = ROWS
    of_gpus: bool = False  # whether only GPUs allow a verdict, and a CPU merely shows how it is measured

    def judge(self, done: Runs) -> tuple[str, str]:
        """The verdict on this machine, and what it is made of."""
        verdict, told = self.measure(done)
        if self.of_gpus and verdict != UNKNOWN and not torch.cuda.is_available():
            return UNKNOWN, f"{told}; CPUs stand in for GPUs here"
        return verdict, told


def faster(ours: str, theirs: str, more_than: float = 1.0) -> Callable[[Runs], tuple[str, str]]:
    """Whether a row takes less time than another: less than theirs over `more_than`."""

    def measure(done: Runs) -> tuple[str, str]:
        if missing := _missing(done, ours, theirs):
            return UNKNOWN, missing
        ratio = done.ratio(theirs, ours)
        return _judged(ratio, more_than), f"`{ours}` is {_told(ratio)} times as fast as `{theirs}`"

    return measure


def _memory_by_gpu(done: Runs) -> list[int]:
    """The memory of each GPU in DataParallel's row; none on a CPU."""
    return done.records["dataparallel"][1].memory_by_gpu


def than_dataparallel(done: Runs) -> tuple[str, str]:
    if len(_memory_by_gpu(done)) < 2:
        return UNKNOWN, ON_CPU
    return faster("ddp", "dataparallel")(done)


def costs(ours: str, theirs: str) -> Callable[[Runs], tuple[str, str]]:
    """Whether a row takes longer than another."""

    def measure(done: Runs) -> tuple[str, str]:
        if missing := _missing(done, ours, theirs):
            return UNKNOWN, missing
        ratio = done.ratio(ours, theirs)
        return _judged(ratio), f"`{ours}` takes {_told(ratio)} times as long as `{theirs}`"

    return measure


def _missing(done: Runs, *rows: str) -> str:
    return "; ".join(f"`{row}`: {done.unavailable[row]}" for row in rows if row in done.unavailable)


def _judged(ratio: stats.Ratio, more_than: float = 1.0) -> str:
    if not ratio.kind or ratio.low <= more_than <= ratio.high:
        return UNKNOWN
    return HOLDS if ratio.low > more_than else NOT


def _told(ratio: stats.Ratio) -> str:
    return f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" if ratio.kind else f"{ratio.value:.2f}"


def amp(done: Runs) -> tuple[str, str]:
    verdict, told = faster("ddp_amp", "ddp_spawn")(done)
    quality = done.quality("ddp_amp", "ddp_spawn")
    told += f"; its macro-F1 is {quality['macro_f1_difference']:+.3f} (mean of {quality['seeds']} seeds)"
    if verdict != HOLDS or quality["quality"] == "as_good":
        return verdict, told
    return (NOT if quality["quality"] == "worse" else UNKNOWN), f"{told}, which is not shown to be as good"


def steps(done: Runs) -> tuple[str, str]:
    ours, theirs = (done.records[row][1] for row in ("ddp", "single"))
    told = f"at the same global batch of {ours.global_batch} both take {ours.steps} and {theirs.steps} steps"
    return (HOLDS if ours.steps < theirs.steps else NOT), f"{told}; the published rows doubled the batch"


def backend(done: Runs) -> tuple[str, str]:
    """Whether one pair of backends differs by the stated factor. If it does not, another pair may."""
    if missing := _missing(done, "horovod", "horovod_mpi"):
        return UNKNOWN, missing
    ratio = done.ratio("horovod", "horovod_mpi")
    far = ratio.kind and (ratio.low >= 2 or ratio.high <= 0.5)
    told = f"through gloo Horovod takes {_told(ratio)} times as long as through MPI; up to 2 to 10 was stated"
    return (HOLDS if far else UNKNOWN), f"{told}; to try NCCL takes GPUs"


def changes(ours: str, theirs: str) -> Callable[[Runs], tuple[str, str]]:
    """Whether the times of two rows differ, in either direction."""

    def measure(done: Runs) -> tuple[str, str]:
        verdict, told = faster(ours, theirs)(done)
        return (UNKNOWN if verdict == UNKNOWN else HOLDS), told

    return measure


def first_gpu(done: Runs) -> tuple[str, str]:
    """Whether DataParallel uses a tenth more memory on GPU 0 than on any other."""
    memory = _memory_by_gpu(done)
    if len(memory) < 2:
        return UNKNOWN, ON_CPU
    return (HOLDS if memory[0] > 1.1 * max(memory[1:]) else NOT), f"MiB on each GPU: {memory}"


def map_location(_: Runs) -> tuple[str, str]:
    if torch.cuda.device_count() < 2:
        return UNKNOWN, "needs two GPUs"
    with tempfile.NamedTemporaryFile() as file, torch.cuda.device(1):
        torch.save(torch.ones(1, device="cuda:0"), file.name)
        device = torch.load(file.name, weights_only=True).device
    return (HOLDS if device.index == 0 else NOT), f"a process whose device is 1 loads it onto {device}"


def whole_checkpoint(done: Runs) -> tuple[str, str]:
    if missing := _missing(done, "deepspeed"):
        return UNKNOWN, missing
    states = sorted(done.folders["deepspeed"].glob("native/final/*model_states.pt"))
    whole = 4 * done.records["deepspeed"][1].settings["parameters"]
    from lockstep.strategies._deepspeed import its_classes

    with torch.serialization.safe_globals(its_classes()):
        first = torch.load(states[0], map_location="cpu", weights_only=True)["module"]
    held = sum(tensor.numel() * tensor.element_size() for tensor in first.values())
    told = f"{len(states)} files of model states, the first of which holds {held:,} of {whole:,} bytes of weights"
    return (HOLDS if held < whole else NOT), told


def equal_seeds(_: Runs) -> tuple[str, str]:
    masks = []
    for seed in (42, 42, 43):  # of two ranks with one seed, and of one with its own
        torch.manual_seed(seed)
        masks.append(torch.nn.functional.dropout(torch.ones(1000)))
    same = [torch.equal(masks[0], mask) for mask in masks[1:]]
    told = f"dropout of two ranks with one seed: {'equal' if same[0] else 'unequal'}; with seeds of their own:"
    return (HOLDS if same == [True, False] else NOT), f"{told} {'equal' if same[1] else 'unequal'}"


def set_epoch(_: Runs) -> tuple[str, str]:
    sampler = DistributedSampler(range(1000), num_replicas=2, rank=0)
    orders = [list(sampler), list(sampler)]
    sampler.set_epoch(1)
    other = list(sampler) != orders[0]
    told = f"two epochs have {'the same order' if orders[0] == orders[1] else 'other orders'}"
    return (HOLDS if orders[0] == orders[1] and other else NOT), f"{told}; after `set_epoch` it is another"


def odd_numbers(_: Runs) -> tuple[str, str]:
    counted = sum(len(list(DistributedSampler(range(10_000), 7, rank, shuffle=False))) for rank in range(7))
    return (HOLDS if counted != 10_000 else NOT), f"on 7 ranks 10,000 samples are counted {counted:,} times"


def batch_norm(_: Runs) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        verdicts = [
            runs.proof(Path(folder) / name, "ddp", {"sync_batchnorm": name}, "basicnet_bn")
            for name in ("true", "false")
        ]
    told = f"the proof calls two ranks with it {verdicts[0]} to one process, and without it {verdicts[1]}"
    return (HOLDS if verdicts == ["equal", "unequal"] else NOT), told


def divided_batch(_: Runs) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        verdict = runs.proof(Path(folder), "ddp", {}, model="basicnet")
    told = f"two ranks with half of the batch each are {verdict} to one process with all of it (proof, images)"
    return (HOLDS if verdict == "equal" else NOT), told


def unused_parameters(_: Runs) -> tuple[str, str]:
    """DDP on two processes, over a model with a layer that nothing calls."""
    trained = {}
    for find in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            try:
                torch.multiprocessing.spawn(_with_unused_layer, (f"file://{folder}/meet", find), nprocs=2)
                trained[find] = True
            except torch.multiprocessing.ProcessRaisedException as error:
                if "Expected to have finished reduction" not in str(error):
                    raise
                trained[find] = False
    told = "; ".join(f"with {find} two steps {'train' if trained[find] else 'end in an error'}" for find in trained)
    return (HOLDS if trained == {False: False, True: True} else NOT), told


def _with_unused_layer(rank: int, rendezvous: str, find: bool) -> None:
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    layers = torch.nn.ModuleDict({"used": torch.nn.Linear(4, 1), "unused": torch.nn.Linear(4, 1)})
    layers.forward = layers["used"].forward
    model = torch.nn.parallel.DistributedDataParallel(layers, find_unused_parameters=find)
    for _ in range(2):  # the first step's missing gradients are found as the second begins
        model(torch.ones(2, 4)).sum().backward()
    torch.distributed.destroy_process_group()


def four_workers(_: Runs) -> tuple[str, str]:
    """Images per second that one device trains, by its worker processes (`hardware.workers`): no claim of loading."""
    with tempfile.TemporaryDirectory() as folder:
        speeds = runs.by_workers(Path(folder), (0, 1, 2, 4, 8), turns=3)
    medians = {number: statistics.median(several) for number, several in speeds.items()}
    told = ", ".join(f"{number}: {median:,.0f}" for number, median in medians.items())
    best = medians[4] >= max(medians.values()) / 1.05
    return (HOLDS if best else NOT), f"images trained a second by the number of workers: {told}"


def workers(_: Runs) -> tuple[str, str]:
    """Seconds to load texts that are tokenised in collate, with and without worker processes, in turns."""
    from transformers import AutoTokenizer

    seconds = {number: [] for number in (0, WORKERS)}
    with tempfile.TemporaryDirectory() as folder:
        data = paths.data_folder(prepared(Path(folder), {}))
        texts = table(paths.split_folder(data, "train")).column("text").to_pylist()
        collate = Collate(AutoTokenizer.from_pretrained(data / paths.TOKENIZER, local_files_only=True))
        for turn in range(5):
            for number in seconds if turn % 2 else reversed(seconds):
                began = time.perf_counter()
                for _batch in DataLoader(texts, batch_size=32, num_workers=number, collate_fn=collate):
                    pass
                seconds[number].append(time.perf_counter() - began)
    ratio = stats.ratio(*({(k, None): value for k, value in enumerate(seconds[number])} for number in (0, WORKERS)))
    told = f"{WORKERS} workers load {len(texts):,} texts {_told(ratio)} times as fast as none, their start included"
    return _judged(ratio), f"{told}; pinned memory needs a GPU"


@dataclass
class Collate:
    """Tokenises the texts of a batch, as the published scripts do."""

    tokenizer: object

    def __call__(self, texts: list[str]) -> dict:
        return self.tokenizer(texts, padding="max_length", truncation=True, max_length=128, return_tensors="pt")


def local_sgd(done: Runs) -> tuple[str, str]:
    verdict, told = faster("local_sgd", "ddp")(done)
    quality = done.quality("local_sgd", "ddp")
    return verdict, f"{told}; macro-F1 {quality['macro_f1_difference']:+.3f} ({quality['quality'].replace('_', ' ')})"


CLAIMS = (
    Claim("DataParallel's one process is the limit", "A, E", than_dataparallel),
    Claim("DataParallel uses more memory on GPU 0 than on the others", "E", first_gpu),
    Claim("DistributedDataParallel is faster than DataParallel", "A, E", than_dataparallel),
    Claim("DDP halves the number of steps, because the data is shared", "A", steps),
    Claim("AMP shortens training clearly, and quality does not fall", "A", amp, of_gpus=True),
    Claim("Horovod is slower than one device", "A", costs("horovod", "single"), of_gpus=True),
    Claim("ZeRO-3 checkpoints need putting together", "A", whole_checkpoint),
    Claim("Backend and mode change the speed by up to two- to tenfold", "C", backend),
    Claim("Workers and pinned memory speed loading up", "C", workers, HERE.format("workers"), of_gpus=True),
    Claim("Four workers a GPU are about right", "E", four_workers, HERE.format("four_workers"), of_gpus=True),
    Claim(
        "Several ranks on a device speed up or slow down, by the card", "C", changes("more_ranks", "ddp"), of_gpus=True
    ),
    Claim("Loading without map_location fills device 0", "C, D", map_location, HERE.format("map_location")),
    Claim(
        "Equal seeds on all ranks make equal random numbers, so dropout and augmentation are alike",
        "D",
        equal_seeds,
        HERE.format("equal_seeds"),
    ),
    Claim("SyncBatchNorm makes batch normalisation global", "D", batch_norm, HERE.format("batch_norm")),
    Claim(
        "find_unused_parameters avoids an error where parts of the model are unused",
        "D",
        unused_parameters,
        HERE.format("unused_parameters"),
    ),
    Claim("find_unused_parameters costs time", "–", costs("ddp_unused", "ddp")),
    Claim("A sampler without set_epoch repeats its order", "A", set_epoch, HERE.format("set_epoch")),
    Claim("DistributedSampler distorts a test on odd numbers", "E", odd_numbers, HERE.format("odd_numbers")),
    Claim(
        "Each rank takes the batch size divided by the number of ranks",
        "E",
        divided_batch,
        HERE.format("divided_batch"),
    ),
    Claim("Local SGD is faster, as it talks less", "–", local_sgd),
    Claim("Compressing gradients to fp16 helps", "–", faster("ddp_fp16", "ddp"), of_gpus=True),
    Claim("Compressing gradients by PowerSGD helps", "–", faster("ddp_powersgd", "ddp"), of_gpus=True),
)
