"""The sections of the configuration, as frozen dataclasses whose fields are declared keys (config/keys.py)."""

import re
from dataclasses import dataclass

from lockstep.config import optimizers
from lockstep.config.keys import NOTHING, SPEED, key, keys, section
from lockstep.config.precisions import DECLARED
from lockstep.config.qualities import KEPT_BY

OWN = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)")


@dataclass(frozen=True)
class Splits:
    train: float = key(0.8, "Share of the rows to train on.", exclusiveMinimum=0, exclusiveMaximum=1)
    dev: float = key(0.1, "Share that chooses the best checkpoint.", exclusiveMinimum=0, exclusiveMaximum=1)
    test: float = key(0.1, "Share that the report is about.", exclusiveMinimum=0, exclusiveMaximum=1)


@dataclass(frozen=True)
class Data:
    path: str | None = key(
        None,
        "A local file; for images a folder: of idx files, with a folder for each class, or with the folders images and"
        " masks (image-segmentation). If path, url, files and hub are all null, the task's embedded data is used (the "
        "synthetic corpus; for images scikit-learn's handwritten digits, or generated shapes). path wins over url, url"
        " over hub.",
        minLength=1,
    )
    url: str | None = key(None, "The https address of the file; needs sha256.", pattern="^https://")
    sha256: str | None = key(None, "The hash of the file behind url.", pattern="^[0-9a-f]{64}$")
    mirrors: list[str] = key(
        [],
        "Addresses of folders with the files of data.files, tried in turn.",
        items={"pattern": "^https://"},
    )
    files: dict[str, str] = key(
        {},
        "idx files of images and labels to fetch from data.mirrors, each with its sha256.",
        values={"pattern": "^[0-9a-f]{64}$"},
    )
    hub: str | None = key(None, "A Hugging Face data set id; needs revision.", minLength=1)
    revision: str | None = key(None, "The data set's revision, best a full commit hash.")
    subset: str | None = key(None, "The configuration name inside a Hugging Face data set.")
    split: str = key("train", "The split of a Hugging Face data set to read; Lockstep splits it by data.splits.")
    format: str = key(
        "auto",
        "The file's format; auto goes by its content and ending. text is plain text (.txt), in which empty lines "
        "separate documents.",
        one_of=("auto", "json", "jsonl", "csv", "tsv", "parquet", "text"),
    )
    text: str | int = key(
        "text",
        "The column with the text, by name or by position from 0. In rows that are plain lists, a name means position "
        "0.",
        minimum=0,
    )
    prompt: str | int | None = key(
        None,
        "For language-modelling, the column with the prompt that data.completion continues; null reads plain texts.",
        minimum=0,
    )
    completion: str | int | None = key(
        None,
        "The column with the continuation of data.prompt; only its tokens count in the loss.",
        minimum=0,
    )
    image: str = key("image", "The column with the image, in a Hugging Face data set.")
    image_size: int | None = key(
        None,
        "Images are resized to this many pixels in height and width; null keeps their size, which must be the same.",
        minimum=1,
    )
    mean: list[float] | None = key(
        None,
        "Each channel's mean, subtracted from pixels (0 to 1); null takes the mean of the training split.",
    )
    std: list[float] | None = key(
        None,
        "Each channel's standard deviation, by which pixels are then divided; null takes that of the training split.",
        items={"exclusiveMinimum": 0},
    )
    label: str | int = key(
        "label",
        "The column with the label, by name or by position from 0. In rows that are plain lists, a name means position"
        " 1.",
        minimum=0,
    )
    labels: list[str | int] | None = key(
        None,
        "The names of the labels; number k in the data, from 0, means the k-th of them, unless it is itself a name. "
        "null takes the names from the data.",
        items={"minLength": 1},
        minItems=2,
        uniqueItems=True,
    )
    limit: int | None = key(None, "Read only this many rows, from the first.", minimum=1)
    join_blanks: bool | str = key(
        "auto",
        "Remove the blanks between words, as the published experiment does. auto removes those beside Chinese or "
        "Japanese characters if most blanks are there, and says so.",
        one_of=(True, False, "auto"),
    )
    splits: dict[str, float] = section(Splits)
    seed: int = key(42, "Seed of the split (and of the synthetic corpus).", minimum=0, maximum=4294967295)
    max_length: int = key(
        128,
        "Texts are truncated to this many tokens; in language-modelling they are packed into sequences of this length.",
        minimum=3,
    )

    @property
    def embedded(self) -> bool:
        """Whether no data is named, so that the task uses its embedded data."""
        return not (self.path or self.url or self.files or self.hub)


@dataclass(frozen=True)
class Model:
    name: str = key(
        "scratch",
        "scratch (a small new model: a BERT or a Llama for texts, basicnet for images, unet for segmentation); "
        "basicnet, basicnet_bn or resnet for images; unet for segmentation; a Hugging Face model id; a local folder; or"
        " a model of your own (my_model.py:MyModel).",
        minLength=1,
    )
    revision: str | None = key(None, "The model's revision, best a full commit hash; a hub model needs one.")
    hidden_size: int = key(128, "Width of the scratch model.", minimum=1)
    layers: int = key(2, "Layers of the scratch model.", minimum=1)
    heads: int = key(2, "Attention heads of the scratch model.", minimum=1)
    dropout: float | None = key(
        None,
        "Dropout everywhere in the model; null keeps the model's own (0.1 for scratch).",
        minimum=0,
        exclusiveMaximum=1,
    )

    @property
    def file(self) -> str | None:
        """The Python file of a user's own model, whose name is like my_model.py:MyModel; None for other models."""
        match = OWN.fullmatch(self.name)
        return match["file"] if match else None


@dataclass(frozen=True)
class Train:
    epochs: int = key(2, "Passes over the training split.", minimum=1, may_change=True)
    max_steps: int | None = key(
        None,
        "Stop after this many optimizer steps; null trains all epochs.",
        minimum=1,
        may_change=True,
    )
    global_batch: int | None = key(
        64,
        "Samples per optimizer step over all processes; null if device_batch is set.",
        minimum=1,
    )
    device_batch: int | None = key(
        None,
        "Samples per device and micro-batch, in place of global_batch, which is then this times the row's devices "
        "times accumulation. Devices that hold one replica of the model together count as one.",
        minimum=1,
        decides=NOTHING,
    )
    accumulation: int = key(1, "Micro-batches per optimizer step.", minimum=1, decides=SPEED)
    batching: str = key(
        "bucketed",
        "bucketed puts texts of similar length into a batch; plain keeps the shuffled order; padded is plain, with "
        "every text padded to max_length, as is common.",
        one_of=("bucketed", "plain", "padded"),
    )
    optimizer: str = key(
        "adamw",
        "PyTorch's AdamW, Adam or SGD, fused; or its Muon for the matrices of hidden layers, with AdamW for the rest."
        " AdamW and Muon decouple weight decay from the gradient; the others add it to the gradient.",
        one_of=optimizers.OF_ALL,
    )
    betas: list[float] = key(
        [0.9, 0.999],
        "Decay rates of the running averages of the gradient and of its square, for AdamW and Adam.",
        items={"minimum": 0, "exclusiveMaximum": 1},
        minItems=2,
        maxItems=2,
        of=("optimizer", optimizers.ADAPTIVE),
    )
    momentum: float = key(
        0.0, "Momentum of SGD.", minimum=0, exclusiveMaximum=1, of=("optimizer", optimizers.WITH_MOMENTUM)
    )
    nesterov: bool = key(False, "Nesterov's momentum, for SGD.", of=("optimizer", optimizers.WITH_MOMENTUM))
    learning_rate: float = key(
        0.0015,
        "Peak learning rate. SGD needs a higher one than AdamW, for example 0.1.",
        exclusiveMinimum=0,
    )
    weight_decay: float = key(0.01, "Weight decay; biases and normalisation weights have none.", minimum=0)
    schedule: str = key(
        "linear",
        "The learning rate after warm-up. linear and cosine fall to 0; polynomial falls to 1e-7 by a power; step "
        "multiplies it by gamma every step_epochs epochs; constant_then_linear is constant for constant_epochs, then "
        "falls to 0.",
        one_of=("constant", "linear", "cosine", "polynomial", "step", "constant_then_linear"),
        may_change=True,
    )
    power: float = key(
        1.0,
        "The power of schedule polynomial; 1 is linear, the default of transformers.",
        exclusiveMinimum=0,
        may_change=True,
        of=("schedule", ("polynomial",)),
    )
    step_epochs: int = key(
        1,
        "The number of epochs between two reductions of the learning rate, for schedule step.",
        minimum=1,
        may_change=True,
        of=("schedule", ("step",)),
    )
    constant_epochs: int = key(
        1,
        "The number of constant epochs of schedule constant_then_linear.",
        minimum=1,
        may_change=True,
        of=("schedule", ("constant_then_linear",)),
    )
    gamma: float = key(
        0.1,
        "The factor by which schedule step multiplies the learning rate.",
        exclusiveMinimum=0,
        maximum=1,
        may_change=True,
        of=("schedule", ("step",)),
    )
    warmup: float = key(
        0.1,
        "Warm-up: below 1 a share of all steps, otherwise a number of steps.",
        minimum=0,
        may_change=True,
    )
    warmup_start: float = key(
        0.0,
        "The initial learning rate of warm-up, as a share of learning_rate.",
        minimum=0,
        maximum=1,
        may_change=True,
    )
    clip: float = key(1.0, "Clip the gradient norm to this; 0 does not clip.", minimum=0)
    lora: int = key(
        0,
        "Train low-rank updates of this rank and a classifier's head, and freeze all other weights (LoRA, Hu et al. "
        "2021, arXiv:2106.09685); 0 trains all weights. It needs peft.",
        minimum=0,
    )
    lora_alpha: float | None = key(
        None,
        "LoRA's updates are multiplied by this divided by the rank; null is the rank, which is a factor of 1.",
        exclusiveMinimum=0,
    )
    lora_targets: list[str] | None = key(
        None,
        "The layers that LoRA updates, by the ends of their names, such as [query, key, value]; [all-linear] is every "
        "linear layer except the head; null is peft's choice for the model, usually queries and values. The rank of an"
        " update can't exceed the width of its layer.",
        items={"minLength": 1},
        minItems=1,
    )
    lora_dropout: float = key(0.0, "Dropout of the inputs of LoRA's updates.", minimum=0, exclusiveMaximum=1)
    class_weights: list[float] | str | None = key(
        None,
        "The weight of each class in the loss, in the order of the labels; balanced makes it inverse to the class's "
        "frequency; null weights all classes equally.",
        items={"minimum": 0},
        pattern="^balanced$",
    )
    loss_weights: dict[str, float] | None = key(
        None,
        "The weight of each term in a loss of several terms, such as {boundary: 0.5}; by default 1. The terms of "
        "image-segmentation are cross_entropy, hard_examples and boundary.",
        values={"minimum": 0},
        of_some_tasks=True,
    )
    pos_weight: float | str | None = key(
        None,
        "The weight of a pixel on an outline in the boundary term of image-segmentation; balanced is the ratio of other"
        " pixels to those in the training split; null is 1.",
        exclusiveMinimum=0,
        pattern="^balanced$",
        of_some_tasks=True,
    )
    hard_share: float = key(
        0.25,
        "The share of each image's labelled pixels, those with the highest loss, over which the hard_examples term of "
        "image-segmentation is averaged.",
        exclusiveMinimum=0,
        maximum=1,
        of_some_tasks=True,
    )
    label_smoothing: float = key(
        0,
        "The share of a label's probability that is spread over all classes.",
        minimum=0,
        exclusiveMaximum=1,
    )
    precision: str = key(
        "fp32",
        "fp32; bf16 or fp16 autocast (fp16 with loss scaling); amp is fp16 on CUDA and bf16 on CPU.",
        one_of=(*(precision.name for precision in DECLARED if precision.of_rows), "amp"),
        decides=SPEED,
    )
    activation_checkpointing: bool = key(
        False,
        "Compute each layer's activations again in the backward pass instead of keeping them: less memory for about a "
        "third more computation. For transformers' models.",
        decides=SPEED,
    )
    attention: str = key(
        "auto",
        "The attention kernel of PyTorch. auto is PyTorch's choice, except cuDNN's kernel on GPUs where it would plan "
        "anew for each width of a batch (Hopper and newer).",
        one_of=("auto", "flash", "efficient", "cudnn", "math"),
        decides=SPEED,
    )
    eval_every: int = key(
        80,
        "The number of steps between evaluations on the dev split; 0 never evaluates.",
        minimum=0,
        decides=SPEED,
        off=0,
    )
    eval_samples: int | None = key(
        None,
        "Evaluate on at most this many samples of the dev split, the same ones each time and in every row; null takes "
        "all.",
        minimum=1,
        decides=SPEED,
    )
    checkpoint: str = key(
        "best",
        "Keep the weights that were best on the dev split, or the last ones. best needs eval_every.",
        one_of=("best", "last"),
        decides=SPEED,
        off="last",
    )
    best: str = key(
        "macro_f1",
        "The figure by which weights are best on the dev split: the lowest loss or perplexity, the highest of any "
        "other. language-modelling has these two; image-segmentation has miou, pixel_accuracy and loss.",
        one_of=tuple(KEPT_BY),
        decides=SPEED,
    )
    checkpoint_every: int = key(
        0,
        "The number of steps between saved states, from which an interrupted run resumes; 0 saves none. Saving is not "
        "timed.",
        minimum=0,
        decides=NOTHING,
        off=0,
    )
    snapshot_every: int = key(
        0,
        "The number of epochs between snapshots of the model in the run's folder snapshots/, which --snapshot converts,"
        " tests and predicts with; 0 takes none. An epoch that max_steps cuts short has no end. Saving is not timed.",
        minimum=0,
        decides=SPEED,
        may_change=True,
        off=0,
    )
    log_every: int = key(
        0,
        "The number of steps between lines with epoch, step, loss, learning rate, samples/s and time left; 0 prints "
        "none. Training does not wait for it.",
        minimum=0,
        decides=NOTHING,
        off=0,
    )
    log_to: list[str] = key(
        [],
        "Trackers that also get these figures and the scores on the dev split. tensorboard needs tensorboardX; mlflow "
        "needs mlflow-skinny and MLFLOW_TRACKING_URI.",
        uniqueItems=True,
        items={"enum": ["tensorboard", "mlflow"]},
        decides=NOTHING,
        off=[],
    )
    pictures_every: int = key(
        0,
        "For image-segmentation, the number of epochs between drawings of a few images of the dev split with their "
        "masks and predictions, in the run's folder pictures, also at the end; 0 draws none. Drawing is not timed.",
        minimum=0,
        decides=NOTHING,
        off=0,
        of_some_tasks=True,
    )
    keep: int = key(
        2,
        "The number of saved states (checkpoint_every) to keep; older ones are removed.",
        minimum=1,
        decides=NOTHING,
    )
    seed: int = key(
        42, "Seed of the plan, the initial weights and (per replica) dropout.", minimum=0, maximum=4294967295
    )

    @property
    def plan_name(self) -> str:
        """The plan's name, made of the settings that decide it."""
        cut = f"-max{self.max_steps}" if self.max_steps else ""
        return f"{self.batching}-b{self.global_batch}-e{self.epochs}{cut}-s{self.seed}"

    @classmethod
    def of(cls, settings: dict) -> "Train":
        """The section from a run's settings; keys that its version of Lockstep did not have get their default."""
        return cls(**{name: about.default for name, about in keys(cls).items()} | settings)


@dataclass(frozen=True)
class AskedHardware:
    device: str = key(
        "auto",
        "auto is cuda if there is a GPU; AMD's GPUs count if PyTorch is built for ROCm. Apple's GPUs (mps) are not "
        "supported.",
        one_of=("auto", "cpu", "cuda"),
        decides=SPEED,
    )
    processes: int | str = key(
        "auto",
        "The number of devices per node that train, each with a process of its own (dataparallel has one for all); "
        "auto is the number of GPUs, or 2 without GPUs.",
        minimum=1,
        pattern="^auto$",
        decides=SPEED,
    )
    world_sizes: list[int] = key(
        [],
        "Numbers of devices, such as [1, 2, 4]: instead of one row there is one for each of them, named ddp_1, ddp_2 "
        "and so on, and the report shows how the row scales. Set here, it is for all rows that can have several and "
        "do not set processes, with those of the numbers that their options allow, and for dataparallel only those of "
        "one machine; a row with none left is refused.",
        items={"minimum": 1},
        uniqueItems=True,
        decides=NOTHING,
    )
    gpus: list[int] | None = key(
        None,
        "The GPUs that train, by their numbers in nvidia-smi, such as [6, 7]; null is all that CUDA_VISIBLE_DEVICES "
        "allows.",
        items={"minimum": 0},
        minItems=1,
        uniqueItems=True,
        decides=SPEED,
    )
    mixed_gpus: bool = key(
        False,
        "Allow GPUs of different models to train together, although the slowest sets the pace of every step.",
        decides=SPEED,
    )
    threads: int | str = key(
        "auto",
        "CPU threads per process, the same for every row; auto is cores / processes. In a row, all is every core, even"
        " if the row has only one process.",
        minimum=1,
        pattern="^(auto|all)$",
        decides=SPEED,
    )
    workers: int = key(
        0,
        "Worker processes of each process that make its batches while it trains; with 0 it makes them itself. Batches "
        "and weights are the same either way.",
        minimum=0,
        decides=SPEED,
    )
    pin_memory: str | bool = key(
        "auto",
        "Copy batches into page-locked memory, from which a GPU copies them while the host continues; auto is true on "
        "GPUs. It has no use on a CPU.",
        one_of=("auto", True, False),
        decides=SPEED,
    )
    nodes: int = key(
        1,
        "The number of machines that train together, with the same number of processes each; launch.py is started on "
        "every machine (docs/several-machines.md). A row with one process uses one machine.",
        minimum=1,
        decides=SPEED,
    )
    node_cores: int | None = key(
        None,
        "The number of CPU cores of a job on each machine that trains, if those are not Snakemake's machine, as on a "
        "cluster (docs/clusters.md); null is the number of cores here.",
        minimum=1,
        decides=SPEED,
    )
    node_gpus: int | None = key(None, "The same for GPUs.", minimum=0, decides=SPEED)
    hosts: list[str] | str | None = key(
        None,
        "The names of the machines, such as [h1, h2], or a hostfile with one name per line, for launchers that use ssh "
        "(horovodrun); null is each machine's own host name.",
        items={"minLength": 1},
        minItems=1,
        decides=SPEED,
    )
    endpoint: str | None = key(
        None,
        "The rendezvous of several machines, HOST or HOST:PORT, on the first one; null is its own address, or "
        "MASTER_ADDR and MASTER_PORT if a scheduler sets them.",
        pattern="^[^:\\s]+(:[0-9]{1,5})?$",
        decides=SPEED,
    )
    interface: str | None = key(
        None,
        "The network interface between several machines, such as eth0; null is the one with the route to the first "
        "machine. On one machine it is loopback.",
        decides=SPEED,
    )
    backend: str = key(
        "auto",
        "The communication backend; auto is nccl on CUDA, but gloo if several processes share a GPU, and gloo on a "
        "CPU. PyTorch has mpi only if it is built from source, which was never tested; strategy horovod uses MPI with "
        "`controller: mpi`.",
        one_of=("auto", "gloo", "nccl"),
        decides=SPEED,
    )
    port: int | str = key(
        "auto",
        "The port of the rendezvous; if it is in use, a free one is used instead.",
        minimum=1024,
        maximum=65535,
        pattern="^auto$",
        decides=NOTHING,
    )
    timeout: float = key(
        600,
        "Seconds without progress after which a run is ended as hung.",
        exclusiveMinimum=0,
        decides=NOTHING,
    )
    oversubscribe: bool = key(
        False,
        "Allow more processes than CPU cores or GPUs; processes that share a GPU communicate by gloo. For tests of "
        "correctness, never of speed.",
        decides=NOTHING,
    )


@dataclass(frozen=True)
class Predict:
    label: str | int | None = key(None, "Predict held-out texts of this label; null takes any label.")
    count: int = key(3, "The number of held-out texts.", minimum=1)
    texts: list[str] = key([], "Predict these texts instead of held-out ones.", items={"minLength": 1})
    file: str | None = key(None, "Predict the lines of this file instead.")
    seed: int = key(0, "Seed of the choice of held-out texts.", minimum=0, maximum=4294967295)


@dataclass(frozen=True)
class Containers:
    torch: str = key(
        "auto",
        "The image for strategies that need no other: a .sif file, or a registry's image by digest "
        "(docker://…@sha256:…). auto is the file that make sif builds in docker/sif/ for this machine's devices.",
        pattern="^[\\w.:/@+-]+$",
    )
    deepspeed: str = key("auto", "The same for DeepSpeed.", pattern="^[\\w.:/@+-]+$")
    horovod: str = key("auto", "The same for Horovod.", pattern="^[\\w.:/@+-]+$")


@dataclass(frozen=True)
class Profile:
    steps: int = key(
        8,
        "The number of steps of each row that are profiled, by data, forward, backward, communication, optimizer and "
        "idle time; 0 profiles none.",
        minimum=0,
        maximum=200,
    )
    trace: bool = key(False, "Keep the Chrome trace of these steps, as trace.json.gz in results/profile/.")


@dataclass(frozen=True)
class Tune:
    seconds: float = key(
        600,
        "The time in which `snakemake --cores all tune` searches for this machine's fastest recipe; no try starts after"
        " it.",
        exclusiveMinimum=0,
    )
    steps: int = key(60, "Steps of each try.", minimum=8)


COMPARED = ("dataparallel", "ddp", "ddp_spawn", "ddp_amp", "horovod", "deepspeed", "accelerate", "trainer", "fabric")
COMPARED += ("fsdp",)


@dataclass(frozen=True)
class Asked:
    """A whole configuration, as the user writes it."""

    task: str = key("text-classification", "The task: the name of a file in lockstep/tasks.")
    data: Data
    model: Model
    train: Train
    hardware: AskedHardware
    predict: Predict
    rows: dict = key(
        {
            "single": {"strategy": "single"},
            "all_threads": {"strategy": "single", "threads": "all"},
            **{name: {"strategy": name} for name in COMPARED},
        },
        "The table's rows: each name with a strategy, options of that strategy, and any keys of train or hardware to "
        "override. null removes a row.",
        minProperties=1,
        propertyNames={"pattern": "^[a-z][a-z0-9_]{0,39}$"},
        additionalProperties={"type": ["object", "null"]},
    )
    containers: dict[str, str] = section(Containers)  # the image of each family of strategies, or "auto"
    profile: Profile
    tune: Tune
    vary_seed: bool = key(
        False,
        "Give repetition k the seed train.seed + k - 1, to compare the quality of rows (see The open division). "
        "Repetitions with one seed compare speed more precisely.",
    )
    quick: bool = key(
        False,
        "A first look, like config/quick.yaml. Its results are in results/quick, are marked as a first look, and are "
        "never compared with others.",
    )
    repeats: int | str = key(
        "auto",
        "How often each row is trained. Raising it later adds runs and repeats none. auto trains each row twice, and "
        "the fastest rows more often, until the widest interval between any two of them is 5 % or the budget is spent.",
        minimum=1,
        maximum=99,
        pattern="^auto$",
    )
    budget: float = key(
        330,
        "Seconds for all runs together if repeats is auto; after the first two blocks, no block starts that would "
        "exceed it. There are at most 20 blocks.",
        exclusiveMinimum=0,
    )
    retries: int = key(
        1,
        "How often a disturbed run is repeated immediately, within its block.",
        minimum=0,
        maximum=9,
    )
    trial_processes: int = key(
        4,
        "The most processes of a row's trial in the proof. A trial has as many as its row up to this, and more only if "
        "the row's options need more.",
        minimum=1,
        maximum=31,
    )


@dataclass(frozen=True)
class Shared:
    """What rows have in common: the task, and the sections `train` and `hardware`, which they may override."""

    task: str
    train: Train
    hardware: AskedHardware
