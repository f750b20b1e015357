"""The configuration, as frozen dataclasses: each key is one field, with all that is known of it (config/keys.py)."""

import re
from dataclasses import dataclass

from lockstep.config.keys import NOTHING, SPEED, key, section
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
        "A local file; of images a folder, of idx files, with a folder of files for each class, or with the folders "
        "images and masks (image-segmentation). With path, url, files and hub all null, what is embedded is used (the"
        " synthetic corpus; of images scikit-learn's handwritten digits, or made-up shapes). path wins over url, url "
        "over hub.",
    )
    url: str | None = key(None, "An https address to fetch the file from; needs sha256.", pattern="^https://")
    sha256: str | None = key(None, "What the file behind url must hash to.", pattern="^[0-9a-f]{64}$")
    mirrors: list[str] = key(
        [],
        "Addresses of folders, tried in turn, that hold the files of data.files.",
        items={"pattern": "^https://"},
    )
    files: dict[str, str] = key(
        {},
        "idx files of images and labels to fetch from data.mirrors, and what each must hash to.",
        values={"pattern": "^[0-9a-f]{64}$"},
    )
    hub: str | None = key(None, "A Hugging Face data set id; needs revision.")
    revision: str | None = key(None, "The data set's revision, best a full commit hash.")
    subset: str | None = key(None, "The configuration name inside a Hugging Face data set.")
    split: str = key("train", "The split of a Hugging Face data set to read; Lockstep divides it itself.")
    format: str = key(
        "auto",
        "The file's format; auto goes by its ending. text is plain text (.txt), in which empty lines stand between "
        "two documents.",
        one_of=("auto", "json", "jsonl", "csv", "tsv", "parquet", "text"),
    )
    text: str | int = key(
        "text",
        "The column that holds the text, by name or by position from 0. Rows that are plain lists take position 0 for"
        " a name.",
        minimum=0,
    )
    prompt: str | int | None = key(
        None,
        "For language-modelling, the column of what is given, beside data.completion; null takes plain texts.",
        minimum=0,
    )
    completion: str | int | None = key(
        None,
        "The column of what is learnt to follow data.prompt; only its tokens count in the loss.",
        minimum=0,
    )
    image: str = key("image", "The column that holds the image, in a Hugging Face data set.")
    image_size: int | None = key(
        None,
        "Images are brought to this many pixels in height and width; null leaves them, and they must be alike.",
        minimum=1,
    )
    mean: list[float] | None = key(
        None,
        "What is taken from an image's pixels (0 to 1), for each channel; null takes the mean of the training split.",
    )
    std: list[float] | None = key(
        None,
        "By what the rest is divided, for each channel; null takes the training split's standard deviation.",
        items={"exclusiveMinimum": 0},
    )
    label: str | int = key(
        "label",
        "The column that holds the label, by name or by position from 0. Rows that are plain lists take position 1 "
        "for a name.",
        minimum=0,
    )
    labels: list[str | int] | None = key(
        None,
        "The label names; number k in the data, from 0, means the k-th of them, unless it is a name. null takes the "
        "names from the data.",
        items={"minLength": 1},
        minItems=2,
        uniqueItems=True,
    )
    limit: int | None = key(None, "Read only the first this many rows.", minimum=1)
    join_blanks: bool | str = key(
        "auto",
        "Remove the blanks between words, as the published experiment does. auto does so where most stand between "
        "Chinese or Japanese characters, and says so.",
        one_of=(True, False, "auto"),
    )
    splits: dict[str, float] = section(Splits)
    seed: int = key(42, "Seed of the split (and of the synthetic corpus).", minimum=0, maximum=4294967295)
    max_length: int = key(
        128,
        "Texts are cut to this many tokens; in language-modelling they are laid end to end in sequences of so many.",
        minimum=3,
    )

    @property
    def embedded(self) -> bool:
        """Whether no data is named, so that the task takes what comes with it."""
        return not (self.path or self.url or self.files or self.hub)


@dataclass(frozen=True)
class Model:
    name: str = key(
        "scratch",
        "scratch (a small new model of the task, as a BERT, a Llama; of images basicnet, to segment them unet), "
        "basicnet, basicnet_bn or resnet for images, unet to segment them, a Hugging Face model id, a local folder, "
        "or a model of your own (my_model.py:MyModel).",
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
        """The file of a model of one's own, whose name is that file's and a class's, as in my_model.py:MyModel."""
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
        "Samples per optimizer step over all processes; null where device_batch is set.",
        minimum=1,
    )
    device_batch: int | None = key(
        None,
        "Samples per device and micro-batch, in place of global_batch, which is then this times a row's devices and "
        "accumulation. Devices that hold one replica of the model together count as one.",
        minimum=1,
        decides=NOTHING,
    )
    accumulation: int = key(1, "Micro-batches per optimizer step.", minimum=1, decides=SPEED)
    batching: str = key(
        "bucketed",
        "bucketed puts texts of like length into one batch; plain takes them as shuffled; padded pads each to "
        "max_length too, as many do.",
        one_of=("bucketed", "plain", "padded"),
    )
    optimizer: str = key(
        "adamw",
        "PyTorch's AdamW, Adam or SGD, fused; or its Muon for the matrices of hidden layers, and AdamW for the rest. "
        "AdamW and Muon decay weights beside the update; the others add weight decay to the gradient.",
        one_of=("adamw", "adam", "sgd", "muon"),
    )
    betas: list[float] = key(
        [0.9, 0.999],
        "How much of the mean gradient and of its mean square AdamW and Adam keep in each step.",
        items={"minimum": 0, "exclusiveMaximum": 1},
        minItems=2,
        maxItems=2,
        of=("optimizer", ("adamw", "adam", "adamw8bit", "muon")),
    )
    momentum: float = key(0.0, "Momentum of SGD.", minimum=0, exclusiveMaximum=1, of=("optimizer", ("sgd",)))
    nesterov: bool = key(False, "Nesterov's momentum, for SGD.", of=("optimizer", ("sgd",)))
    learning_rate: float = key(
        0.0015,
        "Peak learning rate. SGD needs a higher one than AdamW, 0.1 for instance.",
        exclusiveMinimum=0,
    )
    weight_decay: float = key(0.01, "Weight decay; biases and normalisation weights have none.", minimum=0)
    schedule: str = key(
        "linear",
        "The learning rate after warm-up. linear falls to 0, cosine too; polynomial falls to 1e-7 by a power; step "
        "multiplies it by gamma every step_epochs epochs; constant_then_linear stays for constant_epochs, then falls "
        "to 0.",
        one_of=("constant", "linear", "cosine", "polynomial", "step", "constant_then_linear"),
        may_change=True,
    )
    power: float = key(
        1.0,
        "The power of schedule polynomial; 1 is a line, as transformers has it.",
        exclusiveMinimum=0,
        may_change=True,
        of=("schedule", ("polynomial",)),
    )
    step_epochs: int = key(
        1,
        "Epochs after which schedule step lowers the learning rate each time.",
        minimum=1,
        may_change=True,
        of=("schedule", ("step",)),
    )
    constant_epochs: int = key(
        1,
        "Epochs in which schedule constant_then_linear stays.",
        minimum=1,
        may_change=True,
        of=("schedule", ("constant_then_linear",)),
    )
    gamma: float = key(
        0.1,
        "What schedule step multiplies the learning rate by each time.",
        exclusiveMinimum=0,
        maximum=1,
        may_change=True,
        of=("schedule", ("step",)),
    )
    warmup: float = key(
        0.1,
        "Warm-up; below 1 a share of all steps, else a number of steps.",
        minimum=0,
        may_change=True,
    )
    warmup_start: float = key(
        0.0,
        "Where warm-up starts, as a share of the learning rate.",
        minimum=0,
        maximum=1,
        may_change=True,
    )
    clip: float = key(1.0, "Clip the gradient norm to this; 0 does not clip.", minimum=0)
    lora: int = key(
        0,
        "Train low-rank updates of this rank and a classifier's head, and keep all other weights (LoRA, Hu et al. "
        "2021, arXiv:2106.09685); 0 trains all weights. It needs peft.",
        minimum=0,
    )
    lora_alpha: float | None = key(
        None,
        "What the updates of LoRA are multiplied by, times its rank; null is the rank, so that they count once.",
        exclusiveMinimum=0,
    )
    lora_targets: list[str] | None = key(
        None,
        "The layers that LoRA updates, by the ends of their names, as [query, key, value]; [all-linear] is every "
        "linear layer but the head; null is what peft chooses for the model, mostly queries and values. Where a layer"
        " is narrower than `lora`, its update can do no more than its width allows.",
        items={"minLength": 1},
        minItems=1,
    )
    lora_dropout: float = key(0.0, "Dropout of what goes into LoRA's updates.", minimum=0, exclusiveMaximum=1)
    class_weights: list[float] | str | None = key(
        None,
        "What a sample of each class counts in the loss, by the order of the labels; balanced takes the number of all"
        " samples over that of the class's; null counts all alike.",
        items={"minimum": 0},
        pattern="^balanced$",
    )
    loss_weights: dict[str, float] | None = key(
        None,
        "What each term of a loss of several counts in it, by its name, as {boundary: 0.5}; those that are not named "
        "count 1. The terms of image-segmentation are cross_entropy, hard_examples and boundary.",
        values={"minimum": 0},
        of_some_tasks=True,
    )
    pos_weight: float | str | None = key(
        None,
        "How much more a pixel on an outline counts in the boundary term than another one, for image-segmentation; "
        "balanced takes the number of the others over theirs in the training split; null counts all alike.",
        exclusiveMinimum=0,
        pattern="^balanced$",
        of_some_tasks=True,
    )
    hard_share: float = key(
        0.25,
        "The share of each image's labelled pixels, those of the highest loss, that the hard_examples term of "
        "image-segmentation is the mean of.",
        exclusiveMinimum=0,
        maximum=1,
        of_some_tasks=True,
    )
    label_smoothing: float = key(
        0,
        "The share of a sample's truth that is spread over all classes.",
        minimum=0,
        exclusiveMaximum=1,
    )
    precision: str = key(
        "fp32",
        "fp32; bf16 or fp16 autocast (fp16 with loss scaling); amp is fp16 on CUDA and bf16 on CPU.",
        one_of=(*(precision.name for precision in DECLARED if precision.of_rows), "amp"),
        decides=SPEED,
    )
    attention: str = key(
        "auto",
        "Which of PyTorch's attention kernels may run. auto is PyTorch's own choice, but without cuDNN's on GPUs that"
        " would make a plan for each width of a batch anew (Hopper and newer).",
        one_of=("auto", "flash", "efficient", "cudnn", "math"),
        decides=SPEED,
    )
    eval_every: int = key(
        80,
        "Evaluate on the dev split every this many steps; 0 never.",
        minimum=0,
        decides=SPEED,
        off=0,
    )
    eval_samples: int | None = key(
        None,
        "Evaluate on this many samples of the dev split at most, the same ones each time and in every row; null takes"
        " all.",
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
        "What says which weights were best on the dev split; of loss and perplexity the lowest, of the others the "
        "highest. language-modelling has these two; image-segmentation has miou, pixel_accuracy and loss.",
        one_of=tuple(KEPT_BY),
        decides=SPEED,
    )
    checkpoint_every: int = key(
        0,
        "Save all that is needed to go on every this many steps, so that a run that was interrupted carries on from "
        "there; 0 never. Saving is not timed.",
        minimum=0,
        decides=NOTHING,
        off=0,
    )
    snapshot_every: int = key(
        0,
        "Keep the model as it is at the end of every this many epochs, in the run's folder snapshots/, each to be "
        "converted, tested and asked by --snapshot; 0 never. An epoch that max_steps cuts short has no end. Saving is"
        " not timed.",
        minimum=0,
        decides=SPEED,
        may_change=True,
        off=0,
    )
    log_every: int = key(
        0,
        "Say epoch, step, loss, learning rate, samples/s and time left every this many steps; 0 never. Training does "
        "not wait for it.",
        minimum=0,
        decides=NOTHING,
        off=0,
    )
    log_to: list[str] = key(
        [],
        "Where these figures, and the scores on the dev split, go besides. tensorboard needs tensorboardX; mlflow "
        "needs mlflow-skinny and MLFLOW_TRACKING_URI.",
        uniqueItems=True,
        items={"enum": ["tensorboard", "mlflow"]},
        decides=NOTHING,
        off=[],
    )
    pictures_every: int = key(
        0,
        "For image-segmentation, draw a few images of the dev split with their truth and the prediction every this "
        "many epochs and at the end, into the run's folder pictures; 0 never. Drawing is not timed.",
        minimum=0,
        decides=NOTHING,
        off=0,
        of_some_tasks=True,
    )
    keep: int = key(
        2,
        "How many such states are kept at a time; the older ones are removed.",
        minimum=1,
        decides=NOTHING,
    )
    seed: int = key(
        42, "Seed of the plan, the initial weights and (per replica) dropout.", minimum=0, maximum=4294967295
    )

    @property
    def plan_name(self) -> str:
        """Names the plan by all of this that shapes it."""
        cut = f"-max{self.max_steps}" if self.max_steps else ""
        return f"{self.batching}-b{self.global_batch}-e{self.epochs}{cut}-s{self.seed}"


@dataclass(frozen=True)
class AskedHardware:
    device: str = key(
        "auto",
        "auto takes CUDA where there is a GPU; AMD's count as that where PyTorch is its build for them (ROCm). "
        "Apple's (mps) are not measured.",
        one_of=("auto", "cpu", "cuda"),
        decides=SPEED,
    )
    processes: int | str = key(
        "auto",
        "Devices that train, per node, each in a process of its own (dataparallel has one for all); auto is the "
        "number of GPUs, or 2 without.",
        minimum=1,
        pattern="^auto$",
        decides=SPEED,
    )
    gpus: list[int] | None = key(
        None,
        "Which GPUs train, by the numbers that nvidia-smi shows, as in [6, 7]; null is all that CUDA_VISIBLE_DEVICES "
        "leaves.",
        items={"minimum": 0},
        minItems=1,
        uniqueItems=True,
        decides=SPEED,
    )
    mixed_gpus: bool = key(
        False,
        "Allow GPUs of unlike kinds to train together, where the slowest sets the pace of every step.",
        decides=SPEED,
    )
    threads: int | str = key(
        "auto",
        "CPU threads per process, the same for every row; auto is cores / processes. In a row, all is every core, "
        "also where the row has one process only.",
        minimum=1,
        pattern="^(auto|all)$",
        decides=SPEED,
    )
    workers: int = key(
        0,
        "Worker processes of each process, which put its batches together while it trains; 0 lets it do so itself. "
        "The batches are the same, and so are the weights.",
        minimum=0,
        decides=SPEED,
    )
    pin_memory: str | bool = key(
        "auto",
        "Copy a batch into page-locked memory, from which a GPU fetches it while the host goes on; auto is true on "
        "GPUs. On a CPU there is nothing to fetch.",
        one_of=("auto", True, False),
        decides=SPEED,
    )
    nodes: int = key(
        1,
        "Machines that train together, with as many processes each; launch.py is started on every one "
        "(docs/several-machines.md). A row that has one process is on one machine.",
        minimum=1,
        decides=SPEED,
    )
    node_cores: int | None = key(
        None,
        "CPU cores that a job has on each machine that trains, where that is another one than Snakemake's, as on a "
        "cluster (docs/clusters.md); null is as many as there are here.",
        minimum=1,
        decides=SPEED,
    )
    node_gpus: int | None = key(None, "The same of GPUs.", minimum=0, decides=SPEED)
    hosts: list[str] | str | None = key(
        None,
        "How the machines are called, for launchers that reach them by ssh (horovodrun), as [h1, h2], or a hostfile "
        "with a name in each line; null is what they call themselves.",
        items={"minLength": 1},
        minItems=1,
        decides=SPEED,
    )
    endpoint: str | None = key(
        None,
        "Where the ranks of several machines meet, HOST or HOST:PORT, on the first one; null is its own address, and "
        "MASTER_ADDR and MASTER_PORT where a scheduler sets them.",
        pattern="^[^:\\s]+(:[0-9]{1,5})?$",
        decides=SPEED,
    )
    interface: str | None = key(
        None,
        "The network interface that the ranks of several machines communicate through, as eth0; null is the one that "
        "leads to the first machine. On one machine it is loopback.",
        decides=NOTHING,
    )
    backend: str = key(
        "auto",
        "What the processes communicate through; auto is nccl on CUDA, but gloo where several processes share a GPU, "
        "and gloo on CPU. PyTorch has mpi only where it is built from source, and no such build is proven; strategy "
        "horovod talks through MPI by `controller: mpi`.",
        one_of=("auto", "gloo", "nccl"),
        decides=SPEED,
    )
    port: int | str = key(
        "auto",
        "Port of the rendezvous. One that is in use is replaced by a free one.",
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
        "Allow more processes than CPU cores or GPUs, which share them, on GPUs through gloo (for tests of "
        "correctness, never of speed).",
        decides=NOTHING,
    )


@dataclass(frozen=True)
class Predict:
    label: str | int | None = key(None, "Predict held-out texts of this label; null takes any label.")
    count: int = key(3, "How many held-out texts.", minimum=1)
    texts: list[str] = key([], "Predict these texts instead of held-out ones.", items={"minLength": 1})
    file: str | None = key(None, "Predict the lines of this file instead.")
    seed: int = key(0, "Which held-out texts.", minimum=0, maximum=4294967295)


@dataclass(frozen=True)
class Containers:
    torch: str = key(
        "auto",
        "The image of all strategies that need no other: a .sif file, or a registry's image by its digest "
        "(docker://…@sha256:…). auto is the file that make sif leaves in docker/sif/ for this machine's devices.",
        pattern="^[\\w.:/@+-]+$",
    )
    deepspeed: str = key("auto", "The same for DeepSpeed.", pattern="^[\\w.:/@+-]+$")
    horovod: str = key("auto", "The same for Horovod.", pattern="^[\\w.:/@+-]+$")


@dataclass(frozen=True)
class Profile:
    steps: int = key(
        8,
        "How many steps of each row are taken apart into data, forward, backward, communication, optimizer and idle; "
        "0 leaves it out.",
        minimum=0,
        maximum=200,
    )
    trace: bool = key(False, "Keep the Chrome trace of these steps, as trace.json.gz in results/profile/.")


@dataclass(frozen=True)
class Tune:
    seconds: float = key(
        600,
        "How long `snakemake --cores all tune` may search for this machine's fastest recipe; no try is begun after "
        "that.",
        exclusiveMinimum=0,
    )
    steps: int = key(60, "Steps of each try.", minimum=8)


COMPARED = ("dataparallel", "ddp", "ddp_spawn", "ddp_amp", "horovod", "deepspeed", "accelerate", "trainer", "fabric")
COMPARED += ("fsdp",)


@dataclass(frozen=True)
class Asked:
    """A whole configuration, as it is asked for."""

    task: str = key("text-classification", "What is trained, by the name of a file in lockstep/tasks.")
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
        "The table's rows, a name each with its strategy, that strategy's options, and any key of train or hardware to"
        " override. null drops a row.",
        minProperties=1,
        propertyNames={"pattern": "^[a-z][a-z0-9_]{0,39}$"},
        additionalProperties={"type": ["object", "null"]},
    )
    containers: dict[str, str] = section(Containers)  # the image of each family of strategies, or "auto"
    profile: Profile
    tune: Tune
    vary_seed: bool = key(
        False,
        "Give repetition k the seed train.seed + k - 1, for rows whose quality is compared (see The open division). "
        "Repetitions of one seed tell more of speed.",
    )
    quick: bool = key(
        False,
        "A first look, as config/quick.yaml is. Its results go into results/quick, are marked as such, and are "
        "compared with no others.",
    )
    repeats: int | str = key(
        "auto",
        "How often each row is trained. Raising it later adds runs, and repeats none. auto is twice, and the fastest "
        "rows more often, until the widest interval between any two of them is 5 % or the budget is spent.",
        minimum=1,
        maximum=99,
        pattern="^auto$",
    )
    budget: float = key(
        330,
        "Seconds that all runs together may take where repeats is auto; after the two blocks that are trained in any "
        "case, none is begun that would take longer. There are 20 at most.",
        exclusiveMinimum=0,
    )
    retries: int = key(
        1,
        "How often a run that others disturbed is repeated at once, within its block.",
        minimum=0,
        maximum=9,
    )


@dataclass(frozen=True)
class Shared:
    """What rows share: the task; and what they override: the configuration's own `train` and `hardware` sections."""

    task: str
    train: Train
    hardware: AskedHardware
