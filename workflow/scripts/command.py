"""lockstep: thin covers over Snakemake's targets and the commands in workflow/scripts.

    lockstep bench [ARGUMENTS]     the whole benchmark: snakemake --cores all
    lockstep quick [ARGUMENTS]     a first look in less than 90 seconds: few rows, a small model; in results/quick
    lockstep row NAME [ARGUMENTS]  one row, with what it needs
    lockstep proof [ARGUMENTS]     only the proof that all rows train the same model
    lockstep tune [ARGUMENTS]      this machine's fastest recipe
    lockstep again                 repeat the blocks in which a run was disturbed
    lockstep show NAME             what one would write for a row in a script of one's own, and what starts it
    lockstep prove -- COMMAND      whether a script of your own trains the same model on several devices as on one
    lockstep predict [ARGUMENTS]   texts through a model
    lockstep compare A B           two results folders or more, row by row; as a page with --page FILE
    lockstep keep NAME             keep the results that are there now, for a history
    lockstep history               a page of what was kept: each row's times over commits
    lockstep check [FOLDER]        results against the rules of a fair run
    lockstep accept                what a new machine, driver or image can do: proofs and times in 8 minutes
    lockstep doctor                what this machine can run, and what disturbs timing on it
    lockstep completion            what bash needs to complete these: eval "$(lockstep completion)"

ARGUMENTS are Snakemake's, or the command's own; `lockstep COMMAND --help` lists them. All but prove are called in
Lockstep's folder. Where there are GPUs and no configuration is named, all take config/gpu.yaml, and say so.
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

SCRIPTS = ("again", "show", "prove", "predict", "compare", "keep", "history", "check", "accept", "doctor")
TARGETS = {"bench": [], "quick": [], "row": [], "proof": ["parity"], "tune": ["tune"]}
COMMANDS = (*TARGETS, *SCRIPTS, "completion")

# The names of commands, then after `row` and `show` those of rows, else files.
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
    """Snakemake's command line for a target's name and what follows it. Raises BadInput where it is not complete."""
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
            raise BadInput("quick: has a configuration of its own. With yours: lockstep bench --configfile FILE")
        rest = [*rest, "--configfile", "config/quick.yaml"]
    return [str(Path(sys.executable).with_name("snakemake")), *cores, *target, *rest]


@exit_on_bad_input()
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="lockstep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", help="one of those above")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what it takes")
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
        anywhere = asked.command == "prove"  # of scripts that lie elsewhere, and start what their own shell finds first
        if not anywhere and not Path("workflow/scripts/command.py").is_file():
            raise BadInput("this is not Lockstep's folder; its commands are called there")
        path = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        os.environ["PATH"] = os.pathsep.join(path[::-1] if anywhere else path)
        if asked.command in SCRIPTS:  # in this process, so that it calls itself by the name that was typed
            sys.argv = [f"lockstep {asked.command}", *asked.arguments]
            cli.run(importlib.import_module(asked.command).main)
        sys.stdout.flush()
        os.execv(command[0], command)


if __name__ == "__main__":
    main()
