"""A gate's outcome for people and machines: lines for a terminal, a comment in Markdown, and JUnit XML."""

import shlex
from xml.etree import ElementTree

from lockstep.config import machine
from lockstep.script import findings, gate

# The comment of an earlier run is found by this line, and edited in place.
MARK = "<!-- lockstep gate -->"
SAYS = {
    gate.PASSED: "passed: the same model, and not slower",
    gate.SLOWER: "failed: slower",
    gate.UNEQUAL: "failed: another model",
    gate.UNDECIDED: "undecided",
    gate.NOT_MEASURED: "could not measure",
}
ICONS = {gate.PASSED: "✅", gate.SLOWER: "❌", gate.UNEQUAL: "❌", gate.UNDECIDED: "❔", gate.NOT_MEASURED: "⚠️"}


def headline(outcome: gate.Outcome) -> str:
    return f"gate {SAYS[outcome.verdict]}"


def speed_says(outcome: gate.Outcome) -> str:
    """A sentence on the speed, whatever the verdict; "not measured" without a timed block."""
    if not outcome.speed:
        return "not measured, since it is another model" if outcome.model == gate.UNEQUAL else "not measured"
    return gate.speed_told(outcome)


def model_says(outcome: gate.Outcome) -> str:
    wrong = findings.wrong_of(outcome.findings)
    if outcome.model == gate.EQUAL:
        return f"equal to {outcome.base['name']}'s, step by step"
    return f"{outcome.model}: {wrong[0].says}" if wrong else outcome.model


def conditions(outcome: gate.Outcome) -> str:
    """The conditions under which the numbers were measured, in one line."""
    ranks = f"{outcome.world} rank{'s' * (outcome.world != 1)}"
    steps = f"{outcome.steps} timed steps a run"
    torch = f"PyTorch {outcome.torch}" if outcome.torch else ""
    parts = [ranks if outcome.world else "", steps if outcome.steps else "", torch]
    cores = f"{machine.cpu_name()}, {machine.cpu_cores()} cores"
    return ", ".join(part for part in (*parts, cores, f"{outcome.minutes:.1f} minutes") if part)


def comment(outcome: gate.Outcome) -> str:
    """Markdown: the verdict first, then the numbers, then what differs."""
    base = f"{outcome.base['name']} ({outcome.base['commit'][:10]})"
    ours = f"{outcome.ours['name']} ({outcome.ours['commit'][:10]})"
    lines = [
        MARK,
        f"### {ICONS[outcome.verdict]} Lockstep {headline(outcome)}",
        "",
        "| | |",
        "|---|---|",
        f"| model | {_cell(model_says(outcome))} |",
        f"| speed | {_cell(speed_says(outcome))}; the limit is {100 * outcome.limit:g} % slower |",
    ]
    if outcome.verdict == gate.NOT_MEASURED:
        lines.append(f"| why | {_cell(outcome.reason)} |")
    for finding in outcome.findings:
        lines.append(f"| {finding.level} | {_cell(gate.told(finding))} |")
    command = shlex.join(outcome.command).replace("`", "'")
    lines += ["", f"`{command}`: {ours} against {base}; {conditions(outcome)}."]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Text for a cell of a table, shown as it is: a script's words can't end it, or become a link or a mention."""
    plain = " ".join(text.split())[:LONGEST]
    return "".join(f"&#{ord(letter)};" if letter in LIVE else letter for letter in plain).replace("@", "@\u200b")


LONGEST = 500  # characters of a cell; GitHub refuses comments above 65,536
LIVE = "&<>|`[]!#*_~\\"  # letters that mean something in Markdown or HTML


def junit(outcome: gate.Outcome) -> str:
    """JUnit XML with two cases: whether the model is the same, and whether it is not slower."""
    model = ElementTree.Element("testcase", classname="lockstep.gate", name="trains the same model")
    name = f"a step is at most {100 * outcome.limit:g} % slower than in {outcome.base['name']}"
    speed = ElementTree.Element("testcase", classname="lockstep.gate", name=name)
    if outcome.model == gate.UNEQUAL:
        ElementTree.SubElement(model, "failure", message=model_says(outcome))
    elif outcome.model != gate.EQUAL:
        ElementTree.SubElement(model, "error", message=outcome.reason or outcome.model)
    verdict = outcome.speed.verdict if outcome.speed else gate.NOT_MEASURED
    if outcome.verdict == gate.NOT_MEASURED:  # though some blocks may have been timed
        verdict = gate.NOT_MEASURED
    if verdict == gate.SLOWER:
        ElementTree.SubElement(speed, "failure", message=speed_says(outcome))
    elif verdict == gate.UNDECIDED or outcome.model == gate.UNEQUAL:
        ElementTree.SubElement(speed, "skipped", message=speed_says(outcome))
    elif verdict == gate.NOT_MEASURED:
        ElementTree.SubElement(speed, "error", message=outcome.reason or "not measured")
    cases = [model, speed]
    counts = {kind: str(sum(case.find(tag) is not None for case in cases)) for kind, tag in COUNTED.items()}
    seconds = f"{60 * outcome.minutes:.1f}"
    suite = ElementTree.Element("testsuite", name="lockstep gate", tests="2", time=seconds, **counts)
    suite.extend(cases)
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


COUNTED = {"failures": "failure", "errors": "error", "skipped": "skipped"}
