# What all rules use: the checked configuration, and the code that each rule depends on.
lockstep.use_this_python()
# A training ends with the Snakemake that started it, even if that can't tell it to.
lifetime.name_starter(workflow.remote_exec)
CONFIG = lockstep.configuration(config, workflow.configfiles)
inside_snakemake.name_rows(CONFIG)
CONTAINED = lockstep.contain(CONFIG, workflow.deployment_settings)
ROWS = lockstep.available_rows(CONFIG, CONTAINED)
IMAGES = containers.images(CONFIG)
RESULTS = CONFIG.results
Follower.config, Follower.local = CONFIG, workflow.local_exec  # for the view
REPORT = paths.report_folder(RESULTS)
# Its name depends on the settings, so a `prepare` that fails keeps the previous data and their name.
READY = paths.ready_file(RESULTS, CONFIG.data_key)
MISSING = lockstep.missing_data(CONFIG)
# A first answer early: after the first of several blocks, the report is written on the results so far (rule
# first_table). It costs some seconds; the tests of that block's models are only done earlier than the other tests.
AFTER_FIRST_BLOCK = 10 + len(CONFIG.order) - len(CONFIG.rows) + 0.5
SEVERAL_BLOCKS = len(CONFIG.repetitions) > 1
OF_A_TASK = ("prepare", "predict", "evaluate")  # scripts that use the task's file


wildcard_constraints:
    row="|".join(ROWS),
    n=r"\d+",
    rep=r"\d+",
    plan=r"[\w-]+",
    block="|".join(map(str, decision.AFTER)),


def whole_machine(wildcards):
    """The threads of a job that nothing of the workflow may run beside. It is a function, as Snakemake knows only when it
    makes jobs whether they run here, where they share its cores, or each on a machine of its own (`node_cores`).
    """
    here = workflow.local_exec or not CONFIG.hardware.node_cores
    return workflow.cores if here else CONFIG.hardware.node_cores


def half_a_machine(wildcards):
    """The threads of a job of which two may run side by side, but none beside one that takes the whole machine. If the
    configuration sets the cores of each machine, it takes all of them."""
    cores = whole_machine(wildcards)
    return cores if CONFIG.hardware.node_cores else max(1, cores // 2)


def python(script):
    """The beginning of a script's shell command."""
    return shlex.join(["python", lockstep.script(script)])


def command(script):
    """The shell command of a script that works on all results."""
    return shlex.join(lockstep.command(script, RESULTS))


def code(script, strategy=None):
    """A script and all files of Lockstep that it imports, with its strategy's and task's files; editing one of them runs
    the rule again."""
    task = CONFIG.task if strategy or script in OF_A_TASK else None
    return remaking.code_files(script, strategy, task)


def training_input(run, result):
    """The files made before a run trains. They are the same if made again after a loss, so no row is repeated. But what
    is made again by edited code or from edited data is another, and Snakemake would not look at what is after it.
    """
    plan = paths.plan_file(RESULTS, run.plan_name)
    about = paths.plan_summary_file(RESULTS, run.plan_name)
    files = [READY, plan, about]
    return (
        files
        if remaking.any_newer(training_code(run), result)
        else [ancient(file) for file in files]
    )


def training_code(run):
    """The code and data whose change makes a run's result or verdict out of date, including those of `prepare`."""
    return remaking.training_files(
        run.strategy, CONFIG.task, run.kind
    ) + remaking.data_files(CONFIG)


def image(row):
    """The image of the row's strategy, for --use-singularity."""
    return IMAGES[containers.family(row.strategy)]


def run_files(row, file):
    """A file of each repetition that a row has in any case."""
    return [RESULTS / row.folder(rep) / file for rep in CONFIG.first_repetitions]


def run_folder(row, n, rep):
    """A timed run's folder; each argument may be a wildcard."""
    return RESULTS / paths.RUNS / paths.run_name(row, n, rep)


def first_test(wildcards):
    return run_folder(wildcards.row, wildcards.n, 1) / paths.TEST_REPORT


def verdict(trial):
    """The file of the verdict on the trial of a row or of a reference."""
    return RESULTS / trial.folder(1) / paths.VERDICT


def profiles():
    """The profiles of all rows; none if the configuration asks for none."""
    rows = ROWS.values() if CONFIG.profile.steps else ()
    return [RESULTS / CONFIG.profiled(row).folder(1) / paths.PROFILE for row in rows]


def block_runs(block, file):
    """A file of each run in a block."""
    names = ROWS
    if block not in CONFIG.first_repetitions:
        names = lockstep.next_block(checkpoints.decide.get(block=block - 1).output[0])
    return [RESULTS / ROWS[name].folder(block) / file for name in names if name in ROWS]


def all_runs(*files):
    """These files of every run, as an input function, which waits for the decisions after blocks."""

    def inputs(wildcards):
        wanted = []
        for block in CONFIG.repetitions:
            several = [path for file in files for path in block_runs(block, file)]
            if not several:
                break
            wanted += several
        return wanted

    return inputs


def begin():
    lockstep.require_slurm(workflow)
    lockstep.refuse_beside_others(RESULTS)
    lockstep.write_manifest(CONFIG, list(ROWS), sys.argv, CONTAINED)
    lockstep.tell_blocks(CONFIG, ROWS)
    inside_snakemake.let_sleep(workflow)


def fail():
    """Report the other runs although one failed, since Snakemake runs no rule whose input failed."""
    lockstep.report_what_there_is(CONFIG)
