"""Why one row is slower than another: the part of a step in which they differ, as their profiles tell."""

from lockstep.report.choice import slowest_comparable, undecided
from lockstep.report.summary import Summary
from lockstep.report.words import Text, same, say

AGREE = 2  # the factor by which a value found in two ways may differ


def why_slowest(best: dict, done: list[dict], summary: Summary) -> list[Text]:
    """Where the slowest row's time goes, if profiles tell, and its precision, if that differs from the best row's."""
    last = slowest_comparable(best, done, summary)
    if last is best or last in undecided(best, done, summary):
        return []
    steps = {row["row"]: row["step_ms"] / 1000 for row in (last, best)}
    sentences = [because(last["row"], best["row"], summary.profiles, steps)]
    if last["precision"] != best["precision"]:
        names = {"slow": last["row"], "best": best["row"], "ours": last["precision"], "theirs": best["precision"]}
        sentences.append(say("other_precision", **names))
    return [sentence for sentence in sentences if sentence.en]


def because(slower: str, faster: str, profiles: dict[str, dict | None], steps: dict[str, float]) -> Text:
    """In which phase two rows differ, by one profile of each; empty if two ways of finding it disagree.

    A step's duration is known from the recording and from timing. Exposed communication is known from the recording,
    and as the time by which a step is longer than the same work done alone; the error of this difference shows in rows
    that do not communicate. The sentence is in terms of `steps`, the rows' step times in seconds.
    """
    ours, theirs = profiles[slower], profiles[faster]
    if not ours or not theirs:
        return same("")
    recorded = sum(ours["seconds"].values()) - sum(theirs["seconds"].values())
    totals = [recorded, ours["step_seconds"] - theirs["step_seconds"], steps[slower] - steps[faster]]
    ours, theirs = of_step(ours, steps[slower]), of_step(theirs, steps[faster])
    more = {phase: ours["seconds"][phase] - theirs["seconds"][phase] for phase in ours["seconds"]}
    phase = max(more, key=more.get)
    part, error = [more[phase]] * 2, 0.0
    if phase == "communication":
        exposed = [profile["exposed_by_difference"] for profile in (ours, theirs)]
        if None in exposed:
            return same("")
        part[1] = exposed[0] - exposed[1]
        silent = [profile for profile in profiles.values() if profile and not profile["seconds"]["communication"]]
        differences = [profile["exposed_by_difference"] for profile in silent]
        error = max((abs(each) for each in differences if each is not None), default=0.0)
    if min(totals) <= 0 or min(part) <= error or any(max(found) > AGREE * min(found) for found in (totals, part)):
        return same("")
    total = totals[-1]
    spans = {"total": [total] * 2, "part": [min(seconds, total) for seconds in part]}
    took = {name: milliseconds(values) for name, values in spans.items()}
    return say("because", slow=slower, best=faster, phase=say(f"phase_{phase}"), **took)


def of_step(profile: dict, seconds: float) -> dict:
    """A profile scaled to the row's step time, `seconds`, so that its phases add up to it.

    The profile is from another run, whose steps recording has made longer, so only its proportions are used.
    """
    recorded = seconds / sum(profile["seconds"].values())
    exposed = profile["exposed_by_difference"]  # None if no single device does the row's work alone, or none can
    return {
        "step_seconds": seconds,
        "seconds": {phase: recorded * part for phase, part in profile["seconds"].items()},
        "exposed_by_difference": None if exposed is None else exposed * seconds / profile["step_seconds"],
    }


def milliseconds(seconds: list[float]) -> Text:
    """The shortest and the longest of some times in milliseconds, or one number if they agree to two digits."""
    low, high = (f"{1000 * value:.2g}" for value in (min(seconds), max(seconds)))
    return same(low) if low == high else say("span", low=low, high=high)
