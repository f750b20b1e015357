# What all rules use: the checked configuration, and which code each rule depends on.
import sys

sys.path.insert(0, "workflow/scripts")

from lockstep import workflow as lockstep

lockstep.use_this_python()
CONFIG = lockstep.configuration(config, workflow.configfiles)
CONTAINED = lockstep.contain(CONFIG, workflow.deployment_settings)
ROWS = lockstep.available_rows(CONFIG, CONTAINED)
IMAGES = lockstep.containers.images(CONFIG)


wildcard_constraints:
    row="|".join(ROWS),
    n=r"\d+",
    rep=r"\d+",
    plan=r"[\w-]+",


def code(script, strategy=None):
    """A script and all of Lockstep that it and the strategy import: editing one of them runs the rule again."""
    return lockstep.code_files(f"workflow/scripts/{script}.py", strategy)


def image(row):
    """The image of the row's strategy, for --use-singularity."""
    return IMAGES[lockstep.containers.family(row.strategy)]


def run_files(row, file):
    """A file of every repetition of a row."""
    return [f"results/{row.folder(rep)}/{file}" for rep in CONFIG.repetitions]


def run_folder(wildcards):
    return f"results/runs/{wildcards.row}/n{wildcards.n}/rep{wildcards.rep}"


def first_test(wildcards):
    return f"results/runs/{wildcards.row}/n{wildcards.n}/rep1/test/report.json"


def verdict(row=None):
    """Whether a row trains the same model; without a row, the reference's own trial."""
    return f"results/{CONFIG.trial(row).folder(1)}/verdict.json"


def profiles():
    """Where the time of each row's step goes; none where the configuration asks for none."""
    rows = ROWS.values() if CONFIG.profile.steps else ()
    return [f"results/{CONFIG.profiled(row).folder(1)}/profile.json" for row in rows]
