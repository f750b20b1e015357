"""lockstep: short names for Snakemake's targets and the commands in workflow/scripts.

    lockstep bench [ARGUMENTS]     run the whole benchmark: snakemake --cores all
    lockstep quick [ARGUMENTS]     a first look in less than 90 seconds: few rows, a small model; in results/quick
    lockstep row NAME [ARGUMENTS]  train one row, and what it needs
    lockstep proof [ARGUMENTS]     only prove that all rows train the same model
    lockstep tune [ARGUMENTS]      search for this machine's fastest recipe
    lockstep again                 repeat the blocks in which a run was disturbed
    lockstep show NAME             show what you would write for a row in your own script, and what starts it
    lockstep prove -- COMMAND      prove that your own script trains the same model on several devices as on one
    lockstep gate -- COMMAND       for CI: does a change train the same model, and is it not slower?
    lockstep predict [ARGUMENTS]   predict texts or images with a model
    lockstep compare A B           compare two or more results folders by row; as a page with --page FILE
    lockstep keep NAME             keep the current results for a history
    lockstep history               make a page of kept results: each row's times over commits
    lockstep check [FOLDER]        check results against the rules of a fair comparison
    lockstep record submit FOLDER  pack results into one file that others can check by: lockstep record check FILE
    lockstep accept                find out what a new machine, driver or image can do: proofs and times in 8 minutes
    lockstep fits                  does a model fit? each row's largest micro-batch in a GPU's memory, without a GPU
    lockstep which                 how long does a step of each row take, before it runs; or of fsdp on 8 to 512 GPUs?
    lockstep why ROW               where a row's steps go, and from which batch on it beats one device
    lockstep network               measure what communication between ranks costs on this machine
    lockstep doctor                say what this machine can run, and what disturbs timing on it
    lockstep completion            print bash's completion for these: eval "$(lockstep completion)"

ARGUMENTS are Snakemake's, or the command's own; `lockstep COMMAND --help` lists them. All commands except prove, gate,
compare, check and record are called in Lockstep's folder. If there are GPUs and no configuration is named, they use
config/gpu.yaml, and say so.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path

from lockstep import cli
from lockstep.config import reading
from lockstep.config.configuration import Config
from lockstep.errors import BadInput, exit_on_bad_input
from lockstep.paths import PROJECT

SCRIPTS = (
    *("again", "show", "prove", "gate", "predict", "compare", "keep"),
    *("history", "check", "record", "accept", "network", "fits", "which", "why", "doctor"),
)
OF_SCRIPTS = ("prove", "gate")  # they start programs of the user's own, whose PATH comes first
ANYWHERE = (*OF_SCRIPTS, "compare", "check", "record")
TARGETS = {"bench": [], "quick": [], "row": [], "proof": ["parity"], "tune": ["tune"]}
COMMANDS = (*TARGETS, *SCRIPTS, "completion")

# Completes the names of commands, after `row` and `show` the names of rows, and otherwise files.
COMPLETION = """_lockstep() {{
  local words=""
  if [ "$COMP_CWORD" = 1 ]; then words="{commands}"; fi
  case "$COMP_CWORD ${{COMP_WORDS[1]}}" in "2 row" | "2 show") words="{rows}" ;; esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _lockstep lockstep"""


def default() -> Config:
    """The default configuration."""
    return reading.read([PROJECT / reading.DEFAULT])


def snakemake(words: list[str]) -> list[str]:
    """Snakemake's command line for a command's name and its arguments. Raises BadInput if it is incomplete."""
    name, *rest = words
    if name == "row" and (not rest or rest[0].startswith("-")):
        raise BadInput("row: name one, as in: lockstep row ddp")
    options = {word.partition("=")[0] for word in rest}
    own = options & {"--configfile", "--configfiles"}
    if name == "row" and not own | options & {"--config", "-C"}:
        default().require_row(rest[0], rest[0])
    # Targets come before options that take several words.
    target, rest = ([rest[0]], rest[1:]) if name == "row" else (TARGETS[name], rest)
    cores = [] if options & {"--cores", "-c", "--jobs", "-j"} else ["--cores", "all"]
    if name == "quick":
        if own:
            raise BadInput("quick: has its own configuration. For yours use: lockstep bench --configfile FILE")
        rest = [*rest, "--configfile", "config/quick.yaml"]
    return [str(Path(sys.executable).with_name("snakemake")), *cores, *target, *rest]


@exit_on_bad_input()
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="lockstep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", help="one of the commands above")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    asked = parser.parse_args()
    if asked.command is None:
        parser.print_help()
    elif asked.command == "completion":
        print(COMPLETION.format(commands=" ".join(COMMANDS), rows=" ".join(default().rows)))
    elif asked.command in TARGETS and {"-h", "--help"} & set(asked.arguments):
        (line,) = (
            line.strip() for line in __doc__.splitlines() if line.strip().startswith(f"lockstep {asked.command} ")
        )
        print(f"{line}\n\nARGUMENTS are Snakemake's; snakemake --help lists them.")
    elif asked.command not in COMMANDS:
        raise BadInput(f"{asked.command} is not a command. There are: {', '.join(COMMANDS)}.")
    else:
        command = [] if asked.command in SCRIPTS else snakemake([asked.command, *asked.arguments])
        anywhere = asked.command in ANYWHERE
        if not anywhere and not Path("workflow/scripts/command.py").is_file():
            raise BadInput(f"this is not Lockstep's folder; {asked.command} is called in a clone of it")
        path = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        os.environ["PATH"] = os.pathsep.join(path[::-1] if asked.command in OF_SCRIPTS else path)
        if asked.command in SCRIPTS:  # in this process, so that its usage line has the name that was typed
            sys.argv = [f"lockstep {asked.command}", *asked.arguments]
            cli.run(importlib.import_module(asked.command).main)
        sys.stdout.flush()
        os.execv(command[0], command)


if __name__ == "__main__":
    main()
