"""Where things are: the project's own folders, and the layout of a results folder, which is said here alone.

Scripts and rules ask here, so a file is renamed in one place. A function takes the folder that its file lies in; a name
that it fills in may be one of Snakemake's wildcards, as in plan_file(RESULTS, "{plan}").
"""

from pathlib import Path

from lockstep.errors import BadInput

SCRIPTS = Path(__file__).resolve().parents[1]
TRAIN = SCRIPTS / "train.py"  # one process of a run
WORKFLOW = SCRIPTS.parent
PROJECT = WORKFLOW.parent
STRATEGIES = SCRIPTS / "lockstep" / "strategies"
TASKS = SCRIPTS / "lockstep" / "tasks"
IMAGES = PROJECT / "docker" / "images.yaml"  # the container images, and what they hold


def of_project(file: Path | str) -> Path:
    """A file of the project, as rules and their commands name it, from the folder in which Snakemake works.

    That is the project's own, where the name is the same in every clone and container; or, for another workflow that
    takes Lockstep as a module, one elsewhere. `file` is named from the project's folder, or in full.
    """
    file = PROJECT / file
    return file.relative_to(PROJECT) if Path.cwd() == PROJECT else file


# A results folder.
RESULTS = Path("results")  # the workflow's, in the project's folder; commands take another by --results
QUICK = RESULTS / "quick"  # the same of a first look (`quick` in the configuration), which is mixed with no others

HISTORY = Path("history")  # results that are kept by name, a folder each; and their page
HISTORY_PAGE = "history.html"


def config_file(results: Path) -> Path:
    """The configuration that was asked for, with every default: the scripts that Snakemake starts read it."""
    return results / "config.yaml"


def manifest_file(results: Path) -> Path:
    """When, where and by which command it was asked for."""
    return results / "manifest.json"


def journal_file(results: Path) -> Path:
    """What was asked for and made, a line each, with the hashes of its files."""
    return results / "journal.jsonl"


def log_file(results: Path, job: str) -> Path:
    """What a job of the workflow printed, where that is not in a run's folder."""
    return results / "logs" / f"{job}.log"


def benchmark_file(results: Path, job: str) -> Path:
    """What Snakemake measured of a job that trains nothing."""
    return results / "benchmarks" / f"{job}.tsv"


def download_folder(results: Path) -> Path:
    """Files that were fetched for `data.url`."""
    return results / "download"


def decision_file(results: Path, block: int | str) -> Path:
    """What follows after a block, with `repeats: auto`."""
    return results / "blocks" / f"{block}.json"


def first_table_file(results: Path) -> Path:
    """Left once there is a report over the first block, where more follow."""
    return results / "blocks" / "first"


def nodes_folder(results: Path) -> Path:
    """Where the nodes of a run on several meet (run/coordination.py)."""
    return results / "nodes"


def node_file(results: Path, node: int) -> Path:
    """What a node says of itself."""
    return nodes_folder(results) / f"{node}.json"


def predictions_file(results: Path) -> Path:
    """The same texts through every row's model."""
    return results / "predict" / "predictions.csv"


def report_folder(results: Path) -> Path:
    return results / "report"


# In the report's folder:
PAGE = "report.html"
MARKDOWN = "report.md"
SUMMARY = "summary.json"  # all that the report says
TABLE = "summary.csv"  # a line for each row
PLOTS = "plots"
# For a paper, in the same folder:
METHODS = "methods.md"
LATEX = "table.tex"
RUNS_TABLE = "runs.csv"  # a line for each run
BIBTEX = "lockstep.bib"
INSTALLED = "environment.txt"
FOR_A_PAPER = (METHODS, LATEX, RUNS_TABLE, BIBTEX, INSTALLED)

COMPLETE = ".complete"  # beside predictions and report: left by the rule that makes them, after success only


# Prepared data, in a results folder.


def data_folder(results: Path) -> Path:
    """What all runs share, as `prepare` and `plan` make it."""
    return results / "data"


# In that folder; a run's settings name it, so that its ranks need not know where results are:
ABOUT_DATA = "data.json"
DATASET = "dataset"
TOKENIZER = "tokenizer"  # of texts
WEIGHTS = "weights"  # the initial ones, as a model that stands by itself
READY = "ready"
PLANS = "plan"


def data_file(results: Path) -> Path:
    """What is known of the prepared data."""
    return data_folder(results) / ABOUT_DATA


def ready_file(results: Path, key: str) -> Path:
    """The last thing that `prepare` writes: the data of the configuration of this key (Config.data_key) is there."""
    return data_folder(results) / READY / key


def plan_file(results: Path, name: str) -> Path:
    """A plan's arrays."""
    return data_folder(results) / PLANS / f"{name}.npz"


def plan_summary_file(results: Path, name: str) -> Path:
    """What is known of a plan."""
    return data_folder(results) / PLANS / f"{name}.json"


def peak_file(results: Path) -> Path:
    """How many operations a second this machine's cores reach."""
    return data_folder(results) / "peak.json"


def split_folder(data: Path, split: str) -> Path:
    """The samples of train, dev or test, in a folder of prepared data."""
    return data / DATASET / split


def lengths_file(data: Path) -> Path:
    """How long each sample of the training split is: int64 [n], in a folder of prepared data."""
    return data / DATASET / "lengths.npy"


def about_split(split: Path) -> Path:
    """What is known of the prepared data that a split's folder belongs to."""
    return split.parents[1] / ABOUT_DATA


# Runs, in a results folder: each kind of run (config/kinds.py) has a folder, of its own name.
RUNS = "runs"  # the timed ones
PARITY = "parity"  # trials for the proof
PROFILED = "profile"  # those whose steps are taken apart
TUNE = "tune"  # tries of the search for the fastest recipe


def tune_folder(results: Path) -> Path:
    """Holds the tries of that search, and what it came to."""
    return results / TUNE


# In that folder:
TUNED = "tuned.yaml"  # the fastest recipe, as a row to include
TRIES = "tries.csv"


def run_name(row: str, devices: int | str, repeat: int | str) -> str:
    """A run's folder below that of its kind."""
    return f"{row}/n{devices}/rep{repeat}"


def run_files(results: Path, name: str, kind: str = RUNS, row: str = "*") -> list[Path]:
    """The files `name` of all runs of a kind, or of a row's."""
    return sorted(results.glob(f"{kind}/{run_name(row, '*', '*')}/{name}"))


def row_of(run: Path) -> str:
    """The name of the row whose run lies in this folder."""
    return run.parts[-3]


def results_of(run: Path) -> Path | None:
    """The results folder that the folder of a timed run belongs to; None where it lies elsewhere."""
    return run.parents[3] if len(run.parents) > 3 and run.parents[2].name == RUNS else None


def repetitions_of(run: Path) -> list[Path]:
    """The folders of all repetitions of the row whose run lies in this folder, itself among them."""
    return sorted(run.parent.glob(Path(run_name("*", "*", "*")).name))


# A run's folder. What is in it while it trains:
SETTINGS = "settings.json"  # what it is to train, and how
LOCK = "lock"  # held by the run's supervisor (run/lifetime.py); stays afterwards
LOG = "run.log"
PROGRESS = "progress"  # how far each rank is
LIVE = "live"  # rank 0's losses, with `train.log_every`
RANKS = "ranks"  # what each rank leaves
NODES = "nodes"  # of a run on several: a folder for each but the first
RENDEZVOUS = "rendezvous"  # where processes meet that torch.multiprocessing.spawn started
ACCELERATE = "accelerate.yaml"  # for `accelerate launch`
DEEPSPEED = "deepspeed.json"  # what DeepSpeed's engine was configured with
HAND = "hand"  # where ranks that somebody starts by hand meet their supervisor (run/hand.py)
HOSTS = "hosts"  # of a run on several nodes, for DeepSpeed's launcher
# What it leaves:
RECORD = "record.json"  # of a run that succeeded
FAILED = "failed.json"  # the same of one that did not
ENVIRONMENT = "env.json"  # machine, devices, versions
LEDGER = "ledger.npz"  # which rank trained which sample in which step
STEPS = "steps.npy"  # float32 [ranks, steps], seconds of each step by each rank's clock
EVENTS = "events.jsonl"  # what the ranks noted, in order of time
WATCH = "watch.jsonl"  # what else used the machine, second by second
CHECKPOINT = "native"  # in the strategy's own format
TENSORBOARD = "tensorboard"  # with `train.log_to`
PICTURES = "pictures"  # of some samples of the dev split, with `train.pictures_every`
SAVED = "saved"  # states to go on from, with `train.checkpoint_every`
SNAPSHOTS = "snapshots"  # the model at the end of epochs, with `train.snapshot_every`
# What `evaluate` makes of it:
EVALUATION_LOG = "evaluate.log"
MODEL = "model"  # the checkpoint as a model that stands by itself
ADAPTER = "adapter"  # in it, of a run of LoRA: the updates alone, as peft keeps them
UNTESTED = "untested.json"  # why it could not be converted and tested
TEST = "test"
TEST_REPORT = f"{TEST}/report.json"
TEST_TEXT = f"{TEST}/report.txt"
TEST_PREDICTIONS = f"{TEST}/predictions.csv"
# What a trial for the proof leaves besides:
VERDICT = "verdict.json"
FINAL_WEIGHTS = "weights.safetensors"
# What a profiled run leaves besides:
PROFILE = "profile.json"
TRACE = "trace.json.gz"  # with `profile.trace`


def node_folder(run: Path, node: int) -> Path:
    """Where a node's supervisor keeps what is this node's: LOCK, LOG, PROGRESS and WATCH; the first one's in `run`."""
    return run / NODES / str(node) if node else run


def rank_summary(run: Path, rank: int | str) -> Path:
    """What a rank did: clocks, losses, settings as read back."""
    return run / RANKS / f"{rank}.json"


def rank_arrays(run: Path, rank: int) -> Path:
    """A rank's ledger, and its seconds of each step."""
    return run / RANKS / f"{rank}.npz"


def rank_error(run: Path, rank: int | str) -> Path:
    """Why a rank failed."""
    return run / RANKS / f"{rank}.error.json"


def rank_log(run: Path, rank: int | str) -> Path:
    """What a rank has printed, but for the main one, whose words stand in the run's log."""
    return run / RANKS / f"{rank}.log"


def test_mask(run: Path, number: int) -> Path:
    """What the model said of each pixel of a sample of the test, by its number from 0."""
    return run / TEST / "masks" / f"{number:06d}.png"


def rank_trace(run: Path, rank: int) -> Path:
    """What torch.profiler recorded of a rank, until it is taken apart."""
    return run / RANKS / f"{rank}.trace.json"


def picture_file(run: Path, epoch: int | str) -> Path:
    """What the model said of some samples after so many epochs."""
    return run / PICTURES / f"epoch-{epoch:0>4}.png"


def saved_state(run: Path, step: int) -> Path:
    """What is needed to go on after so many steps."""
    return run / SAVED / f"step-{step:08d}"


def saved_states(run: Path) -> list[Path]:
    """All that are there, the latest first."""
    return sorted((run / SAVED).glob("step-*"), reverse=True)


def snapshot(run: Path, epoch: int) -> Path:
    """The model at the end of an epoch, from 1. What is in this folder has the names that it has in a run's."""
    return run / SNAPSHOTS / f"epoch_{epoch}"


def snapshots(run: Path) -> dict[int, Path]:
    """All that are there, by their epochs."""
    folders = {int(folder.name.partition("_")[2]): folder for folder in (run / SNAPSHOTS).glob("epoch_*")}
    return dict(sorted(folders.items()))


def require(path: Path, script: str) -> Path:
    """`path`, which `script` makes. Raises BadInput where it is not there."""
    if not path.exists():
        raise BadInput(f"{path} does not exist. Run workflow/scripts/{script} first.")
    return path


def must_be_run(folder: Path) -> None:
    """Raises BadInput where `folder` is none of a run."""
    if not (folder / SETTINGS).is_file():
        raise BadInput(f"{folder}: is not a folder of a run (no {SETTINGS}). Name one like results/runs/ddp/n2/rep1.")
