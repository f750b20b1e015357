"""Check the configuration files on a Snakemake command line before Snakemake reads them, since they could run code.

Snakemake passes every configuration file to YTE, which runs Python in files with `__use_yte__`, even in a dry run, and
before the Snakefile is read. Only the profile is read earlier, so profiles/default/config.yaml calls this.
"""

import argparse
from pathlib import Path

from lockstep.config import reading
from lockstep.errors import BadInput, exit_on_bad_input


@exit_on_bad_input()
def check_command(words: list[str]) -> None:
    """End the program with one message if a configuration on the command line is invalid."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--configfile", "--configfiles", nargs="+", default=[])
    parser.add_argument("--config", "-C", nargs="*", default=[])
    named, _ = parser.parse_known_args(words)
    for entry in named.config:
        key, _, value = entry.partition("=")
        first, *inner = key.split(".")
        if inner:
            nested = "".join(f"{{{name}: " for name in inner) + value + "}" * len(inner)
            raise BadInput(f"--config {entry}: Snakemake accepts no dots in a key. Write: --config '{first}={nested}'")
    for name in named.configfile[1:]:
        if not Path(name).suffix and not Path(name).exists():
            first = named.configfile[0]
            raise BadInput(f"--configfile: there is no file {name}. Put targets first: {name} --configfile {first}")
    check_files(named.configfile)


@exit_on_bad_input()
def check_files(files: list) -> None:
    """End the program with one message if one of the configuration `files` would run code, or can't be read."""
    for file in files:
        reading.load_yaml(Path(file))
