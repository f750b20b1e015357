"""Loops in one process, in turns: what a step costs, without starting anything."""

from pathlib import Path

from benchmarks.common import SMALL, line, prepared


def padding(folder: Path, keys: dict, rounds: int) -> list[list[str]]:
    from benchmarks.loops import PaddedLoop, PlannedLoop

    results = prepared(folder / "padding", keys | SMALL)
    ratios = in_turns(PlannedLoop(results), 16, PaddedLoop(results), 4, rounds)
    return [line("single over padding to 128, samples/s (2 x 128)", ratios, "at least 5")]


def libraries(folder: Path, keys: dict, rounds: int) -> list[list[str]]:
    from benchmarks.loops import AccelerateLoop, PlannedLoop, TrainerLoop

    results = prepared(folder / "libraries", keys | SMALL)
    return [
        line(
            f"single over {name}'s documented loop, samples/s (2 x 128)",
            in_turns(PlannedLoop(results), 16, loop(results), 12, rounds),
            "at least 2.8",
        )
        for name, loop in (("transformers.Trainer", TrainerLoop), ("accelerate", AccelerateLoop))
    ]


def tuned(folder: Path, keys: dict, rounds: int) -> list[list[str]]:
    from benchmarks.loops import PaddedLoop, TrainerLoop, TunedLoop

    results = prepared(folder / "tuned", keys | SMALL)
    return [
        line(
            f"tuned over {name}, samples/s (2 x 128)",
            in_turns(TunedLoop(results), 24, loop(results), steps, rounds),
            target,
        )
        for name, loop, steps, target in (
            ("padding to 128", PaddedLoop, 4, "at least 7"),
            ("transformers.Trainer", TrainerLoop, 12, "at least 4"),
        )
    ]


def harness(folder: Path, keys: dict, rounds: int) -> list[list[str]]:
    from benchmarks.loops import BareLoop, PlannedLoop

    results = prepared(folder / "harness", keys | SMALL)
    ours = PlannedLoop(results)
    ratios = in_turns(ours, 20, BareLoop(results), 20, 4 * rounds)
    shares = [ours.batching(part * 20, 20) for part in range(rounds)]
    return [
        line("single over a bare loop on the same plan, samples/s (2 x 128)", ratios, "at least 0.98"),
        line("putting batches together, as a share of single's time (2 x 128)", shares, digits=4),
    ]


def images(folder: Path, keys: dict, rounds: int) -> list[list[str]]:
    from benchmarks.images import CONFIGS, BareImages, PlannedImages, TrainerImages, write_images

    results = prepared(folder / "images", {"data.path": write_images(folder / "idx")}, CONFIGS)
    return _of_task("images", "BasicNet, 28 x 28", PlannedImages, BareImages, TrainerImages, results, rounds)


def language(folder: Path, keys: dict, rounds: int) -> list[list[str]]:
    from benchmarks.language import CONFIGS, BareSequences, PlannedSequences, TrainerSequences

    results = prepared(folder / "language", {"train.best": "macro_f1"}, CONFIGS)
    return _of_task("sequences", "Llama, 64 tokens", PlannedSequences, BareSequences, TrainerSequences, results, rounds)


def _of_task(examples: str, about: str, ours, bare, trainer, results: Path, rounds: int) -> list[list[str]]:
    return [
        line(f"single over {name} on {examples}, samples/s ({about})", ratios, target)
        for name, loop, target in (
            ("a bare loop", bare, "at least 0.97"),
            ("transformers.Trainer's documented loop", trainer, "at least 1.0"),
        )
        for ratios in [in_turns(ours(results), 20, loop(results), 20, 2 * rounds)]
    ]


def in_turns(ours, our_steps: int, theirs, their_steps: int, rounds: int) -> list[float]:
    """Ratios of samples per second, each of two measurements side by side; who is first changes from round to round."""
    ratios = []
    for part in range(rounds + 1):
        pair = [(ours, our_steps), (theirs, their_steps)]
        speeds = {loop: loop.train(part * steps, steps) for loop, steps in (pair if part % 2 else pair[::-1])}
        if part:  # the first round warms up
            ratios.append(speeds[ours] / speeds[theirs])
    return ratios
