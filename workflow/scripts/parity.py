"""Prove that rows train the same model as single: train a few steps of both, compare them, and print the verdicts.

The exit code is 1 if a row is not proven: it is unequal and not designed to be, its trial failed, or it could be proven
here and there is no verdict on its present settings.
"""

from lockstep import cli
from lockstep.errors import RunFailed, RunStopped
from lockstep.proof import parity, verdicts
from lockstep.terminal import print_table

COLUMNS = ["row", "same model?", "fp64", *parity.MEASURED, "times its floor", "a mistake is times further", "why"]

SPARED = ("a mistake is times further", *parity.MEASURED[::-1], "times its floor")  # dropped by a narrow terminal


def main() -> int:
    parser = cli.parser(__doc__)
    parser.add_argument(
        "--row", action="append", help="a row of the configuration, or reference, with which all are compared"
    )
    parser.add_argument("--show", action="store_true", help="print the existing verdicts, and train nothing")
    parser.add_argument("--exit-zero", action="store_true", help="exit with 0 even if a row is unequal")
    arguments = parser.parse_args()
    config = cli.configuration(arguments)
    every = [reference for row in config.rows.values() for reference in config.references(row).values()]
    references = {reference.name: reference for reference in every}
    able = [name for name, row in config.rows.items() if not row.unavailable]
    names = arguments.row or ([*config.rows] if arguments.show else ["reference", *able])
    names = [each for name in names for each in (references if name == "reference" else [name])]
    for name in names:
        if name not in references:
            config.require_row(name, f"--row {name}", besides=("reference",))
    by_name, missing = {}, {}
    for at, name in enumerate(names, 1):
        if len(names) > 1 and not arguments.show:
            print(f"{name}: {at} of {len(names)}", flush=True)
        try:
            if name in references:
                by_name[name] = parity.prove_reference(config, references[name], arguments.results)
                continue
            needed = [reference.name for reference in config.references(config.rows[name]).values()]
            if untrained := [by_name[each] for each in needed if by_name.get(each, {}).get("proof") == "failed"]:
                by_name[name] = verdicts.failed(config, config.rows[name], untrained[0]["reason"])
                continue
            if not arguments.show:
                parity.prove(config, config.rows[name], arguments.results)
        except RunStopped:
            raise
        except RunFailed as error:
            if len(names) == 1:
                raise
            print(f"failed: {error}", flush=True)
            if name in references:  # continue, as a reference may be needed by some rows only
                by_name[name] = {"proof": "failed", "reason": str(error)}
                continue
        by_name[name] = verdicts.read(config, config.rows[name], arguments.results)
        if why := verdicts.missing(config, config.rows[name], by_name[name], arguments.results):
            by_name[name], missing[name] = None, why
    print_table(COLUMNS, [line(name, verdict, missing) for name, verdict in by_name.items()], SPARED)
    unproven = {name: each for name, each in by_name.items() if each and each["proof"] in verdicts.WRONG}
    for name, verdict in unproven.items():
        if verdict.get("by_nature"):
            print(f"{name} trains another model by design: {verdict['by_nature']}")
    wrong = [name for name, verdict in unproven.items() if not verdict.get("by_nature")]
    if wrong:
        print(f"not proven to train the same model as single: {', '.join(wrong)}")
    if missing:
        print(f"no verdict on their present settings: {', '.join(missing)}. To prove them: lockstep proof")
    return bool(wrong or missing) and not arguments.exit_zero


def line(name: str, verdict: dict | None, missing: dict[str, str]) -> list[str]:
    """One line of the table; missing: why there is no verdict on a row."""
    if verdict is None:
        return [name, "not run", *[""] * 6, missing.get(name, "")]
    proof, why = verdict["proof"].replace("-", " "), verdict["reason"] or verdict.get("lossy", "")
    if not verdict.get("distances"):
        return [name, proof, *[""] * 6, why]
    exact = verdict["fp64"]
    return [
        name,
        proof,
        f"{max(exact.values()):.0e}" if exact else "–",
        *(f"{verdict['distances'][kind]:.1e}" for kind in parity.MEASURED),
        f"{verdict['above_floor']:.1g}",
        verdicts.multiple(verdict["below_mistake"]),
        why or (f"not tried in fp64: {verdict['no_fp64']}" if verdict["no_fp64"] else ""),
    ]


if __name__ == "__main__":
    cli.run(main)
