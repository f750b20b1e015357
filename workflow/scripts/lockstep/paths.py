"""The layout of the project's folders and of a results folder, defined only here.

Scripts and rules use these names, so a file is renamed in one place. A function takes the folder that contains its
file; a name that it fills in may be a wildcard of Snakemake, as in plan_file(RESULTS, "{plan}").
"""

from pathlib import Path

from lockstep.errors import BadInput

PACKAGE = Path(__file__).resolve().parent
BUNDLED = PACKAGE / "_project"  # where `pip install .` puts the project's other files (pyproject.toml)
PROJECT = BUNDLED if BUNDLED.is_dir() else PACKAGE.parents[2]
WORKFLOW = PROJECT / "workflow"
SCRIPTS = WORKFLOW / "scripts"
TRAIN = SCRIPTS / "train.py"  # one process of a run
STRATEGIES = PACKAGE / "strategies"
TASKS = PACKAGE / "tasks"
STUDIES = WORKFLOW / "studies"  # what somebody has published, each a folder (report/studies.py)
IMAGES = PROJECT / "docker" / "images.yaml"  # the container images and their contents


def of_project(file: Path | str) -> Path:
    """The path of a project's file in rules and their commands, relative to Snakemake's working folder if possible.

    In the project's own folder the path is relative, so that it is the same in every clone and container. If another
    workflow uses Lockstep as a module, it is absolute. `file` is relative to the project's folder, or absolute.
    """
    file = PROJECT / file
    return file.relative_to(PROJECT) if Path.cwd() == PROJECT else file


# A results folder.
RESULTS = Path("results")  # the workflow's, in the project's folder; commands may use another by --results
QUICK = RESULTS / "quick"  # for a first look (`quick` in the configuration), which is never mixed with other results

HISTORY = Path("history")  # results that are kept by name, one folder each, and their page
HISTORY_PAGE = "history.html"


def config_file(results: Path) -> Path:
    """The requested configuration with every default; scripts that Snakemake starts read it."""
    return results / "config.yaml"


def manifest_file(results: Path) -> Path:
    """When, where and by which command the results were requested."""
    return results / "manifest.json"


def journal_file(results: Path) -> Path:
    """The journal: a line for each request and each result, with the hashes of its files."""
    return results / "journal.jsonl"


def packed_file(results: Path) -> Path:
    """The manifest of a record (lockstep/records), in a folder into which one was unpacked."""
    return results / "lockstep-record.json"


def log_file(results: Path, job: str) -> Path:
    """The output of a job of the workflow, if it is not in a run's folder."""
    return results / "logs" / f"{job}.log"


def benchmark_file(results: Path, job: str) -> Path:
    """Snakemake's measurements of a job that trains nothing."""
    return results / "benchmarks" / f"{job}.tsv"


def costs_file(results: Path) -> Path:
    """The seconds that each kind of job took in the last benchmark here, from which the time left is estimated."""
    return results / "logs" / "seconds.json"


def download_folder(results: Path) -> Path:
    """Files that were fetched for `data.url`."""
    return results / "download"


def decision_file(results: Path, block: int | str) -> Path:
    """The decision after a block, with `repeats: auto`."""
    return results / "blocks" / f"{block}.json"


def first_table_file(results: Path) -> Path:
    """Exists once there is a report over the first block, if more blocks follow."""
    return results / "blocks" / "first"


def nodes_folder(results: Path) -> Path:
    """The folder in which the nodes of a run on several nodes meet (run/coordination.py)."""
    return results / "nodes"


def lead_file(results: Path) -> Path:
    """Where node 0 listens for the others while it leads a run, and the secret by which they know each other."""
    return nodes_folder(results) / "lead.json"


def predictions_file(results: Path) -> Path:
    """The predictions of every row's model for the same inputs."""
    return results / "predict" / "predictions.csv"


def report_folder(results: Path) -> Path:
    return results / "report"


# In the report's folder:
PAGE = "report.html"
MARKDOWN = "report.md"
SUMMARY = "summary.json"  # all data of the report
TABLE = "summary.csv"  # a line for each row
PLOTS = "plots"
# For a paper, in the same folder:
METHODS = "methods.md"
LATEX = "table.tex"
RUNS_TABLE = "runs.csv"  # a line for each run
BIBTEX = "lockstep.bib"
INSTALLED = "environment.txt"
FOR_A_PAPER = (METHODS, LATEX, RUNS_TABLE, BIBTEX, INSTALLED)

ACCEPT = "accept.json"  # in the folder of `lockstep accept`: all its results

COMPLETE = ".complete"  # beside predictions and report; created by their rule after success only


# Prepared data, in a results folder.


def data_folder(results: Path) -> Path:
    """The data, initial weights and plans that all runs share, made by `prepare` and `plan`."""
    return results / "data"


# In that folder, which a run's settings name, so that ranks need not know the results folder:
ABOUT_DATA = "data.json"
DATASET = "dataset"
TOKENIZER = "tokenizer"  # of texts
WEIGHTS = "weights"  # the initial weights, as a standalone model
READY = "ready"
PLANS = "plan"


def data_file(results: Path) -> Path:
    """The summary of the prepared data."""
    return data_folder(results) / ABOUT_DATA


def ready_file(results: Path, key: str) -> Path:
    """The last file that `prepare` writes: data for the configuration with this key (Config.data_key) exists."""
    return data_folder(results) / READY / key


def plan_file(results: Path, name: str) -> Path:
    """A plan's arrays."""
    return data_folder(results) / PLANS / f"{name}.npz"


def plan_summary_file(results: Path, name: str) -> Path:
    """The summary of a plan."""
    return data_folder(results) / PLANS / f"{name}.json"


def peak_file(results: Path) -> Path:
    """The peak operations per second of this machine's cores."""
    return data_folder(results) / "peak.json"


def network_file(results: Path) -> Path:
    """What communication costs on this machine."""
    return results / "network" / "network.json"


def foretold_file(results: Path) -> Path:
    """What was foretold of rows before they ran, and sealed."""
    return results / "foretold" / "foretold.json"


def split_folder(data: Path, split: str) -> Path:
    """The samples of train, dev or test, in a folder of prepared data."""
    return data / DATASET / split


def lengths_file(data: Path) -> Path:
    """The length of each sample of the training split, int64 [n], in a folder of prepared data."""
    return data / DATASET / "lengths.npy"


def about_split(split: Path) -> Path:
    """The summary of the prepared data to which a split's folder belongs."""
    return split.parents[1] / ABOUT_DATA


# Runs, in a results folder: each kind of run (config/kinds.py) has a folder of its name.
RUNS = "runs"  # timed runs
PARITY = "parity"  # trials of the proof
PROFILED = "profile"  # runs whose steps are divided into phases
TUNE = "tune"  # tries in the search for the fastest recipe


def tune_folder(results: Path) -> Path:
    """The tries of that search, and its result."""
    return results / TUNE


# In that folder:
TUNED = "tuned.yaml"  # the fastest recipe, as a row to include
TRIES = "tries.csv"


def run_name(row: str, devices: int | str, repeat: int | str) -> str:
    """A run's folder, relative to the folder of its kind."""
    return f"{row}/n{devices}/rep{repeat}"


def run_files(results: Path, name: str, kind: str = RUNS, row: str = "*") -> list[Path]:
    """The files `name` of all runs of a kind, or of those of one row."""
    return sorted(results.glob(f"{kind}/{run_name(row, '*', '*')}/{name}"))


def row_of(run: Path) -> str:
    """The name of the row to which the run in this folder belongs."""
    return run.parts[-3]


def results_of(run: Path) -> Path | None:
    """The results folder that contains the folder of a timed run; None if it is elsewhere."""
    return run.parents[3] if len(run.parents) > 3 and run.parents[2].name == RUNS else None


def first_repetition_of(run: Path) -> Path:
    """The folder of the first repetition of the row of this run, which may be this one."""
    return run.parent / Path(run_name("*", "*", 1)).name


# Files in a run's folder while it trains:
SIZES, PEAKS = "sizes.json", "peaks.json"  # of a rank whose memory is counted (rank/sizing.py)
SETTINGS = "settings.json"  # the settings that ranks read
LOCK = "lock"  # held by the run's supervisor (run/lifetime.py); never deleted
LOG = "run.log"
PROGRESS = "progress"  # the progress of each rank
LIVE = "live"  # rank 0's losses, with `train.log_every`
RANKS = "ranks"  # the files of each rank
NODES = "nodes"  # for a run on several nodes, a folder for each node except the first
RENDEZVOUS = "rendezvous"  # the rendezvous of processes that torch.multiprocessing.spawn started
ACCELERATE = "accelerate.yaml"  # for `accelerate launch`
DEEPSPEED = "deepspeed.json"  # the configuration of DeepSpeed's engine
HAND = "hand"  # the rendezvous of ranks that are started by hand with their supervisor (run/hand.py)
RAY = "ray"  # in the folder of a run: Ray's own files, while the run lasts
HOSTS = "hosts"  # for a run on several nodes by DeepSpeed's launcher
# Files that a run leaves:
RECORD = "record.json"  # of a run that succeeded
FAILED = "failed.json"  # of a run that failed
ENVIRONMENT = "env.json"  # machine, devices, versions
LEDGER = "ledger.npz"  # which rank trained which sample in which step
STEPS = "steps.npy"  # float32 [ranks, steps], seconds of each step by each rank's clock
EVENTS = "events.jsonl"  # events of the ranks, in order of time
WATCH = "watch.jsonl"  # the load of the machine by others, second by second
CHECKPOINT = "native"  # in the strategy's own format
TENSORBOARD = "tensorboard"  # with `train.log_to`
PICTURES = "pictures"  # of some samples of the dev split, with `train.pictures_every`
SAVED = "saved"  # states from which the run can resume, with `train.checkpoint_every`
SNAPSHOTS = "snapshots"  # the model at the end of epochs, with `train.snapshot_every`
# Files that `evaluate` makes from it:
EVALUATION_LOG = "evaluate.log"
MODEL = "model"  # the checkpoint converted into a standalone model
ADAPTER = "adapter"  # in that folder, after LoRA: the adapter in peft's format
UNTESTED = "untested.json"  # why it could not be converted and tested
TEST = "test"
TEST_REPORT = f"{TEST}/report.json"
TEST_TEXT = f"{TEST}/report.txt"
TEST_PREDICTIONS = f"{TEST}/predictions.csv"
# Further files of a trial of the proof:
VERDICT = "verdict.json"
FINAL_WEIGHTS = "weights.safetensors"
# Further files of a profiled run:
PROFILE = "profile.json"
TRACE = "trace.json.gz"  # with `profile.trace`


def node_folder(run: Path, node: int) -> Path:
    """The folder of a node's LOCK, LOG, PROGRESS and WATCH; for the first node it is `run` itself."""
    return run / NODES / str(node) if node else run


def rank_summary(run: Path, rank: int | str) -> Path:
    """A rank's clocks, losses and settings as read back."""
    return run / RANKS / f"{rank}.json"


def rank_arrays(run: Path, rank: int) -> Path:
    """A rank's ledger, and the seconds of each of its steps."""
    return run / RANKS / f"{rank}.npz"


def rank_error(run: Path, rank: int | str) -> Path:
    """Why a rank failed."""
    return run / RANKS / f"{rank}.error.json"


def rank_log(run: Path, rank: int | str) -> Path:
    """A rank's output; the output of the main rank is in the run's log."""
    return run / RANKS / f"{rank}.log"


def test_mask(run: Path, number: int) -> Path:
    """The predicted mask of a sample of the test split, by its number from 0."""
    return run / TEST / "masks" / f"{number:06d}.png"


def rank_trace(run: Path, rank: int) -> Path:
    """torch.profiler's trace of a rank, which is deleted when it has been analysed."""
    return run / RANKS / f"{rank}.trace.json"


def picture_file(run: Path, epoch: int | str) -> Path:
    """The drawing of some samples' predictions after an epoch."""
    return run / PICTURES / f"epoch-{epoch:0>4}.png"


def saved_state(run: Path, step: int) -> Path:
    """The state from which a run resumes after `step` steps."""
    return run / SAVED / f"step-{step:08d}"


def saved_states(run: Path) -> list[Path]:
    """All saved states of a run, the latest first."""
    return sorted((run / SAVED).glob("step-*"), reverse=True)


def snapshot(run: Path, epoch: int) -> Path:
    """The model at the end of an epoch, from 1. Files in this folder have the same names as in a run's folder."""
    return run / SNAPSHOTS / f"epoch_{epoch}"


def snapshots(run: Path) -> dict[int, Path]:
    """All snapshots of a run, by epoch."""
    folders = {int(folder.name.partition("_")[2]): folder for folder in (run / SNAPSHOTS).glob("epoch_*")}
    return dict(sorted(folders.items()))


def require(path: Path, script: str) -> Path:
    """Return `path`, which `script` creates. Raises BadInput if it does not exist."""
    if not path.exists():
        raise BadInput(f"{path} does not exist. Run workflow/scripts/{script} first.")
    return path


def must_be_run(folder: Path) -> None:
    """Raise BadInput if `folder` is not a run's folder."""
    if not (folder / SETTINGS).is_file():
        raise BadInput(f"{folder}: is not a folder of a run (no {SETTINGS}). Name one like results/runs/ddp/n2/rep1.")
