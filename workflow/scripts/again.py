"""Train the runs that were disturbed once more, with the configuration they were made with, and report again."""

import subprocess
import sys
from pathlib import Path

from lockstep import cli, config, containers, record
from lockstep.errors import BadInput
from lockstep.files import read_json


def main() -> int:
    parser = cli.parser(__doc__, configured=False)
    parser.add_argument("--cores", default="all", help="as Snakemake has it")
    arguments = parser.parse_args()
    folders = sorted(file.parent for file in arguments.results.glob("runs/*/*/*/record.json"))
    if not folders:
        raise BadInput(f"{arguments.results}: no run has a record here. Name a results folder, or train first.")
    rules, made_with = [], arguments.results / "config.yaml"
    wanted = config.read([made_with])
    for folder in folders:
        found = record.read_run(folder)
        if not (reasons := found["watch"]["disturbed"]):
            continue
        row = wanted.rows.get(found["row"])
        if row and found["repeat"] in wanted.repetitions and folder == arguments.results / row.folder(found["repeat"]):
            print(f"{folder}: {'; '.join(reasons)}; it is repeated")
            rules.append(f"train_{found['row']}_{found['repeat']}")
        else:
            print(f"{folder}: {'; '.join(reasons)}; but {made_with} has no such run any more, so it is not repeated")
    print(f"{len(rules)} of {len(folders)} runs are repeated", flush=True)
    if not rules:
        return 0
    if arguments.results.resolve() != Path("results").resolve():
        raise BadInput(f"--results {arguments.results}: the workflow trains into results/ here, and nowhere else.")
    made, here = read_json(arguments.results / "manifest.json").get("container"), containers.kind()
    if "docker" in (made, here) and made != here:
        how = "docker compose run --rm again" if made == "docker" else "make again, outside of Docker"
        raise BadInput(f"{arguments.results}: was made {'in' if made == 'docker' else 'outside'} Docker, so: {how}")
    command = [sys.executable, "-m", "snakemake", "--cores", arguments.cores, "--forcerun", *rules]
    if made == "apptainer":
        command.append("--use-singularity")  # or all would be trained again, outside the images
    # In place of the default configuration, which may say something else by now.
    command += ["--configfile", str(made_with), "--replace-workflow-config"]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    cli.run(main)
