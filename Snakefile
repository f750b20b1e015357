# Lockstep trains one model once per strategy, by one plan, and compares the costs and the results.
#
#   snakemake --cores all            the whole benchmark
#   snakemake --cores all ddp        one row (any name under `rows` in the configuration)
#   snakemake --cores all parity     the proof that every row trains the same model
#   snakemake --cores all profile    where a step's time goes, in every row
#   snakemake --cores all tune       this machine's fastest recipe, as results/tune/tuned.yaml
#   snakemake --cores all network    what communication between ranks costs on this machine
#   snakemake --cores all predict    the same texts through every row's model
import os
import shlex
import sys
from pathlib import Path

from snakemake.utils import min_version

min_version("9.0")
# The folder of this file, even if another workflow uses it as a module.
HERE = Path(str(workflow.current_basedir))
if not (HERE / "workflow" / "scripts" / "lockstep").is_dir():
    print(
        f"error: {workflow.included_stack[-1]} is alone, but Lockstep is more than its Snakefile. Clone Lockstep, and "
        "name the Snakefile of the clone.",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(HERE / "workflow" / "scripts"))

from lockstep import inside_snakemake, paths, remaking, trust
from lockstep import workflow as lockstep
from lockstep.analysis import decision
from lockstep.config import containers, reading
from lockstep.run import lifetime
from lockstep.view.jobs import Follower

lockstep.require_place(workflow)
DEFAULTS = str(paths.of_project(reading.DEFAULT))
# The profile has checked the files of the command line, unless it was left out; then this check reports them.
trust.check_files([DEFAULTS, *workflow.configfiles])


configfile: DEFAULTS


if workflow.modifier.is_main_snakefile() and not workflow.overwrite_configfiles:
    FOR_GPUS = reading.for_gpus(config["hardware"]["device"])
    os.environ[reading.DECIDED] = "yes" if FOR_GPUS else "no"
    for file in FOR_GPUS:

        configfile: file


report: "workflow/report/captions/workflow.rst"


include: "workflow/rules/common.smk"


# The first rule is made if no target is named.
rule all:
    input:
        REPORT / paths.PAGE,
        paths.predictions_file(RESULTS),
        # Written by the rules that make these two, but not by the substitute after a failure.
        lockstep.stamps(RESULTS),
        # Listed because the report exists without them after a failure, and Snakemake would not try them again.
        all_runs(paths.TEST_REPORT),
        [verdict(CONFIG.trial(row)) for row in ROWS.values()],
        profiles(),
        paths.first_table_file(RESULTS) if SEVERAL_BLOCKS else [],
        MISSING,


include: "workflow/rules/data.smk"
include: "workflow/rules/parity.smk"
include: "workflow/rules/blocks.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/profile.smk"
include: "workflow/rules/tune.smk"
include: "workflow/rules/network.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/report.smk"


onstart:
    begin()


onerror:
    fail()
    inside_snakemake.end_interrupted()


inside_snakemake.take_part(workflow, begin, fail)
