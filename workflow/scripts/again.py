"""Repeat the blocks in which a run was disturbed, with their configuration, and make the report again.

Whole blocks are repeated, since a single new run would be compared with runs of hours ago, under other conditions.
"""

import subprocess
import sys

from lockstep import cli, paths
from lockstep.config import containers, reading
from lockstep.errors import BadInput
from lockstep.files import read_json
from lockstep.run import record_files


def main() -> int:
    parser = cli.parser(__doc__, configured=False)
    parser.add_argument("--cores", default="all", help="Snakemake's option --cores")
    arguments = parser.parse_args()
    folders = [file.parent for file in paths.run_files(arguments.results, paths.RECORD)]
    if not folders:
        raise BadInput(f"{arguments.results}: holds no run with a record. Name a results folder, or train first.")
    made_with = paths.config_file(arguments.results)
    wanted = reading.read([made_with])
    blocks, runs = set(), {}
    for folder in folders:
        run = record_files.read_run(folder)
        row, repeat = wanted.rows.get(run.row), run.repeat
        known = row and repeat in wanted.repetitions and folder == arguments.results / row.folder(repeat)
        if known:
            runs.setdefault(repeat, {})[run.row] = run
        if not (reasons := run.watch.disturbed):
            continue
        if known:
            print(f"{folder}: {'; '.join(reasons)}")
            blocks.add(repeat)
        else:
            print(f"{folder}: {'; '.join(reasons)}; but {made_with} has no such run any more, so it is not repeated")
    for repeat, several in runs.items():
        if len({run.session for run in several.values()}) > 1:
            print(f"repetition {repeat}: its runs are of several sessions, in which the machine may have differed")
            blocks.add(repeat)
    rules = [f"train_{row}_{repeat}" for repeat in sorted(blocks) for row in runs[repeat]]
    repeated = f"{len(blocks)} of {len(runs)} blocks are repeated, with {len(rules)} of {len(folders)} runs"
    if not rules:
        print(repeated)
        return 0
    if arguments.results.resolve() != wanted.results.resolve():
        raise BadInput(f"--results {arguments.results}: the workflow here trains into {wanted.results} only.")
    made, here = read_json(paths.manifest_file(arguments.results)).get("container"), containers.kind()
    if "docker" in (made, here) and made != here:
        how = "docker compose run --rm again" if made == "docker" else "make again, outside of Docker"
        raise BadInput(f"{arguments.results}: was made {'in' if made == 'docker' else 'outside'} Docker, so: {how}")
    print(repeated, flush=True)
    command = [sys.executable, "-m", "snakemake", "--cores", arguments.cores, "--forcerun", *rules]
    if made == "apptainer":
        command.append("--use-singularity")  # otherwise everything would be trained again, outside the images
    # The results' configuration replaces the default one, which may have changed.
    command += ["--configfile", str(made_with), "--replace-workflow-config"]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    cli.run(main)
