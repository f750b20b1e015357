"""lockstep which, of one's own rows: what a step takes on several ranks, foretold, sealed, and held against runs."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lockstep import network, paths
from lockstep.config import reading, registry
from lockstep.data import plan as planning
from lockstep.data.plan import Plan
from lockstep.errors import BadInput
from lockstep.files import read_json, write_json
from lockstep.forecast import alone, foretelling, own_rows, ranks
from lockstep.forecast.ranks import Alone, Links, Message
from lockstep.paths import PROJECT
from lockstep.proof import fairness
from lockstep.rank.network import BUS
from lockstep.records import packing
from lockstep.report import foretold, page, summary
from lockstep.run import journal, seals
from tests import made

ALONE = Alone(forward=0.03, backward=0.06, optimizer=0.01, rest=0.002)
SHAPES = {"embeddings.word": (1000, 64)} | {f"encoder.layer.{n}.dense.weight": (64, 64) for n in range(4)}
SHAPES |= {"head.weight": (6, 64), "head.bias": (6,)}
NUMBERS = 1000 * 64 + 4 * 64 * 64 + 6 * 64 + 6


def measured(number: int, latency: float = 4e-4, bandwidth: float = 1e9, noise: float = 0.0) -> dict:
    """What the network rule would measure of links with this latency and bus bandwidth."""
    random = np.random.default_rng(0)
    operations = {}
    for name, factor in BUS.items():
        points = []
        for size in network.sizes():
            seconds = (latency + size * factor(number) / bandwidth) * random.uniform(1 - noise, 1 + noise)
            points.append({"bytes": size, "seconds": seconds, "low": 0.9 * seconds, "high": 1.2 * seconds})
        operations[name] = {"points": points}
    return {"ranks": number, "backend": "gloo", "device": "cpu", "operations": operations}


def total(parts: dict) -> ranks.Interval:
    return sum(parts.values(), ranks.NOTHING)


def sends(strategy: str, **options) -> list[Message]:
    """The messages of a strategy's step for SHAPES, on a CPU."""
    known = {name: option.get("default") for name, option in registry.literals("ddp")["OPTIONS"].items()}
    known |= {name: option.get("default") for name, option in registry.literals(strategy)["OPTIONS"].items()}
    known |= {"precision": "fp32", "clip": 1.0} | options
    declared = registry.sends(strategy, known)
    return ranks.messages(declared, SHAPES, known, options.get("accumulation", 1), ALONE, "cpu")


SPEEDS = st.floats(1e7, 1e11)
SIZES = st.lists(st.integers(0, 2**30), min_size=1, max_size=8)
ALONES = st.builds(Alone, *[st.floats(0, 10)] * 4, st.floats(0, 0.5))
MESSAGES = st.lists(
    st.builds(Message, st.sampled_from(sorted(BUS)), SIZES, st.floats(0.01, 8), st.floats(0, 5)), max_size=4
)


@settings(max_examples=100)
@given(ALONES, MESSAGES, st.integers(1, 64), st.one_of(st.none(), SPEEDS), SPEEDS, st.sampled_from(["cpu", "cuda"]))
def test_an_interval_contains_what_it_is_about(own, sent, number, link, bandwidth, device):
    links = Links(number, [measured(2, bandwidth=bandwidth), measured(4, noise=0.3)], link)
    for part in ranks.step(own, sent, links, ["optimizer"], device).values():
        assert 0 <= part.low * 0.999999 <= part.value <= part.high * 1.000001


@settings(max_examples=100)
@given(ALONES, MESSAGES, st.integers(2, 16), st.one_of(st.none(), SPEEDS), st.floats(1, 20), st.booleans())
def test_more_bytes_never_take_less_time(own, sent, number, link, times, gpu):
    device, links = ("cuda" if gpu else "cpu"), Links(number, [measured(2, noise=0.3)], link)
    more = [replace(message, sizes=[times * size for size in message.sizes]) for message in sent]
    few, many = (total(ranks.step(own, each, links, [], device)) for each in (sent, more))
    assert many.value >= few.value * 0.999999
    assert many.low >= few.low * 0.999999
    assert many.high >= few.high * 0.999999


@settings(max_examples=50)
@given(ALONES, MESSAGES, SPEEDS, st.floats(1.01, 100))
def test_a_faster_network_never_takes_more_time(own, sent, link, times):
    slow, fast = (
        total(ranks.step(own, sent, Links(4, [measured(4)], speed), [], "cpu")) for speed in (link, times * link)
    )
    assert fast.value <= slow.value * 1.000001


@given(ALONES, MESSAGES)
def test_one_rank_takes_what_it_takes_alone(own, sent):
    parts = ranks.step(own, sent, Links(1, [measured(2)]), ["optimizer"], "cpu")
    assert total(parts).value == pytest.approx(own.step)
    assert parts["communication"] == ranks.NOTHING


@given(st.integers(1, 64), st.floats(0, 1e9))
def test_what_was_measured_is_what_a_message_costs(number, size):
    assume(number > 1)
    links = Links(number, [measured(number)])
    found = links.seconds("all_reduce", size)
    assert found.value == pytest.approx(4e-4 + size * BUS["all_reduce"](number) / 1e9, rel=0.01)
    assert not links.extrapolated


def test_a_message_costs_what_it_takes_after_computing():
    found = measured(2)
    for operation in found["operations"].values():
        for point in operation["points"]:
            point["after_computing"] = {name: 2 * point[name] for name in ("seconds", "low", "high")}
    for size in (0, 3e6, 2**29):
        alone, after = (Links(2, [each]).seconds("all_gather", size) for each in (measured(2), found))
        assert after.value == pytest.approx(2 * alone.value)
        assert after.high == pytest.approx(2 * alone.high)


def test_only_the_first_of_messages_in_a_row_waits_for_ranks_that_compute():
    found = measured(2)
    for point in found["operations"]["broadcast"]["points"]:
        point["after_computing"] = {name: 2 * point[name] for name in ("seconds", "low", "high")}
    links = Links(2, [found])
    once = links.seconds("broadcast", 4096, waits=False).value
    for in_a_row, times in ((True, 2 + 9), (False, 20)):
        sent = Message("broadcast", [4096] * 10, in_a_row=in_a_row)
        assert ranks.communication(sent, links, "cpu").value == pytest.approx(times * once)


def test_gloo_sends_more_through_a_link_than_nccl():
    def through(collective, size, backend):
        return Links(4, [], 1e8, backend).seconds(collective, size)

    assert through("reduce_scatter", 8e6, "gloo") == through("all_reduce", 8e6, "gloo")
    assert through("reduce_scatter", 8e6, "nccl").value == pytest.approx(through("all_reduce", 8e6, "nccl").value / 2)
    assert through("all_gather", 1e6, "gloo") == through("all_gather", 1e6, "nccl")
    large = through("all_gather", 8e6, "gloo")
    assert large.low == through("all_gather", 8e6, "nccl").value < large.value < large.high


def test_between_numbers_of_ranks_latency_and_load_grow():
    links = Links(8, [measured(2), measured(4)])
    assert links.extrapolated == ["messages were measured between 4 ranks"]
    assert links.seconds("all_reduce", 0).value == pytest.approx(4e-4 * 7 / 3, rel=0.01)
    assert links.seconds("all_reduce", 2**28).value == pytest.approx(7 / 4 * 2**28 / 1e9, rel=0.01)


def test_a_slow_network_takes_what_its_rate_allows():
    links = Links(2, [measured(2)], 1e9)
    found = links.seconds("all_reduce", 1e8)
    assert found.value == pytest.approx(1e8 / (1e9 / 8 * 0.9415), rel=0.001)
    assert found.low == found.value < found.high
    assert Links(2, [], 1e9).extrapolated == ["a message's latency was not measured (lockstep network)"]


def test_what_backward_hides_costs_little_and_what_comes_after_it_all():
    links = Links(2, [measured(2)])
    after = Message("all_reduce", [4e6] * 4)
    hidden = replace(after, window=1.0)
    whole, costs = (ranks.communication(each, links, "cpu") for each in (after, hidden))
    assert costs.low < costs.value < whole.value <= costs.high
    last = links.seconds("all_reduce", 4e6).value
    assert ranks.communication(hidden, links, "cuda").value == pytest.approx(last, rel=0.01)
    # One bucket is full when backward ends, so none of it is hidden.
    one = replace(hidden, sizes=[16e6])
    assert ranks.communication(one, links, "cpu").value == pytest.approx(links.seconds("all_reduce", 16e6).value)


@pytest.mark.parametrize(
    ("strategy", "options", "expected"),
    [
        ("ddp", {}, {"all_reduce": 4 * NUMBERS}),
        ("ddp_spawn", {}, {"all_reduce": 4 * NUMBERS}),
        ("ddp_amp", {}, {"all_reduce": 4 * NUMBERS}),
        ("ddp", {"hook": "fp16"}, {"all_reduce": 2 * NUMBERS}),
        ("ddp", {"hook": "bf16"}, {"all_reduce": 2 * NUMBERS}),
        ("ddp", {"accumulation": 4}, {"all_reduce": 4 * NUMBERS}),
        ("fsdp", {}, {"all_gather": 8 * NUMBERS, "reduce_scatter": 4 * NUMBERS, "all_reduce": 4}),
        ("fsdp", {"accumulation": 3}, {"all_gather": 24 * NUMBERS, "reduce_scatter": 4 * NUMBERS, "all_reduce": 4}),
        (
            "fsdp",
            {"reshard_after_forward": False},
            {"all_gather": 4 * NUMBERS, "reduce_scatter": 4 * NUMBERS, "all_reduce": 4},
        ),
        (
            "fsdp",
            {"mixed_precision": "policy", "precision": "bf16"},
            {"all_gather": 4 * NUMBERS, "reduce_scatter": 4 * NUMBERS, "all_reduce": 4},
        ),
        ("fsdp", {"clip": 0.0}, {"all_gather": 8 * NUMBERS, "reduce_scatter": 4 * NUMBERS}),
        ("zero_redundancy", {}, {"all_reduce": 4 * NUMBERS, "broadcast": 4 * NUMBERS}),
        ("deepspeed", {"stage": 1}, {"all_reduce": 4 * NUMBERS + 4, "all_gather": 4 * NUMBERS}),
        ("deepspeed", {"stage": 2, "accumulation": 2}, {"all_reduce": 8 * NUMBERS + 4, "all_gather": 4 * NUMBERS}),
        ("deepspeed", {"stage": 3}, {"all_gather": 4 * NUMBERS, "reduce_scatter": 4 * NUMBERS, "all_reduce": 4}),
        ("local_sgd", {"every": 8}, {"all_reduce": 4 * NUMBERS / 8}),
    ],
)
def test_a_strategy_sends_what_it_declares(strategy, options, expected):
    found: dict[str, float] = {}
    for message in sends(strategy, **options):
        found[message.collective] = found.get(message.collective, 0) + message.times * sum(message.sizes)
    assert found == pytest.approx(expected)


def test_with_lora_gradients_of_few_weights_are_sent_and_all_weights_gathered():
    known = {"replicate": 1, "mixed_precision": "autocast", "reshard_after_forward": True, "clip": 0.0}
    known |= {"sync_batchnorm": False, "precision": "fp32", "lora": 4}
    few = {"head.weight": SHAPES["head.weight"], "head.bias": SHAPES["head.bias"]}
    sent = ranks.messages(registry.sends("fsdp", known), SHAPES, known, 1, ALONE, "cpu", few)
    assert [(each.collective, sum(each.sizes)) for each in sent] == [
        ("all_gather", 4 * NUMBERS),
        ("all_gather", 4 * NUMBERS),
        ("reduce_scatter", 4 * 390),
    ]


def test_powersgd_sends_two_factors_of_what_it_compresses():
    (message,) = sends("ddp", hook="powersgd", powersgd_rank=2)
    first, second = 2 * (1000 + 4 * 64 + 6), 2 * (64 + 4 * 64 + 64)
    assert message.sizes == [4 * 6, 4 * first, 4 * second]
    # Of rank 4 the head's factors have 280 numbers, which is not less than half of its 384.
    (message,) = sends("ddp", hook="powersgd", powersgd_rank=4)
    assert message.sizes[0] == 4 * (6 * 64 + 6)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("fsdp", {"replicate": 2}),
        ("ddp", {"join": True}),
        ("ddp", {"sync_batchnorm": True}),
        ("ddp_spawn", {"join": True}),
    ]
    + [("deepspeed", {"stage": 3, "offload_optimizer": True}), ("local_sgd", {"local_after": 4}), ("horovod", {})]
    + [("deepspeed", {"stage": 1, "config_file": "ds.json"}), ("deepspeed", {"stage": 2, "precision": "bf16"})]
    + [("deepspeed", {"stage": 3, "accumulation": 2})]
    + [(name, {}) for name in ("tp", "pp", "cp", "diloco", "dataparallel", "script")],
)
def test_what_is_not_declared_is_not_foretold(strategy, options):
    known = {name: option.get("default") for name, option in registry.literals(strategy)["OPTIONS"].items()}
    assert registry.sends(strategy, known | {"precision": "fp32"} | options) is None


def test_every_message_that_is_declared_can_be_counted():
    keys = {"where", "collective", "numbers", "bytes", "pieces", "per", "during", "hidden_on", "in_a_row"}
    for name in registry.names():
        declared = registry.literals(name)["SENDS"]
        for settings_, sent in [] if isinstance(declared, str) else declared:
            for message in sent or ():
                assert message.keys() <= keys
                assert message["collective"] in BUS
                assert message.get("per", "micro_batch") in ("micro_batch", *registry.literals(name)["OPTIONS"])
                assert ("during" in message) == ("hidden_on" in message)
                assert isinstance(settings_, dict)


def test_pieces_are_buckets_layers_and_parameters():
    assert ranks.pieces("one", "weights", SHAPES, {}) == [NUMBERS]
    assert ranks.pieces("one", 1, SHAPES, {}) == [1]
    assert ranks.pieces("layers", "weights", SHAPES, {}) == [NUMBERS - 4 * 4096, *[4096] * 4]
    assert ranks.pieces("parameters", "weights", SHAPES, {}) == [64000, *[4096] * 4, 384, 6]
    # From the last weight on; a bucket is closed by the weight that fills it.
    assert ranks.pieces("bucket_mb", "weights", SHAPES, {"bucket_mb": 0.03}) == [390 + 2 * 4096, 2 * 4096, 64000]
    assert ranks.pieces("bucket_mb", "weights", SHAPES, {"bucket_mb": 25}) == [NUMBERS]


@pytest.mark.parametrize(("processes", "accumulation"), [(1, 1), (2, 1), (2, 3), (3, 2)])
def test_one_rank_alone_trains_the_first_rank_s_share(processes, accumulation):
    lengths = np.random.default_rng(0).integers(5, 60, 400)
    hardware = {"device": "cpu", "processes": processes, "threads": 1, "oversubscribe": True}
    own = {"strategy": "ddp", "accumulation": accumulation}
    row = reading.parse({"hardware": hardware, "train": {"global_batch": 31}, "rows": {"ddp": own}}).rows["ddp"]
    from lockstep.data import plan as planning

    whole = planning.make(lengths, global_batch=31, epochs=1, seed=1, batching="bucketed")
    found = alone.share(whole, row)
    excerpt = whole.excerpt(alone.WARMUP_STEPS, alone.STEPS)
    assert found.steps == excerpt.steps
    assert (found.widths == excerpt.widths).all()
    for step in range(found.steps):
        theirs = excerpt.micro_batches(step, 0, processes, accumulation)
        ours = found.micro_batches(step, 0, 1, accumulation)
        assert sorted(np.concatenate(ours)) == sorted(np.concatenate(theirs))
        assert max(map(len, ours)) <= max(map(len, theirs))
    assert isinstance(found, Plan)


# Sealed forecasts.

ROWS = ("single", "ddp")
UNDECLARED = "its strategy does not declare what it sends with these options (SENDS)"


def forecast(row: str, settings_hash: str = "0") -> dict:
    seconds = {"value": 0.01, "low": 0.009, "high": 0.012}
    return {"row": row, "seconds": seconds, "known": "foretold", "why": [], "settings": settings_hash}


def run(results, row: str, started: str, **more) -> None:
    """A timed run of a row, and its line in the journal."""
    folder = results / paths.RUNS / paths.run_name(row, 2, 1)
    folder.mkdir(parents=True)
    write_json(folder / paths.RECORD, made.raw(row=row, started=started, **more))
    journal.note(results, "run", folder, (paths.RECORD,))


@pytest.fixture
def sealed(tmp_path):
    """A results folder whose rows were foretold and then run."""
    journal.note(tmp_path, "request", rows=list(ROWS))
    seals.seal(tmp_path, [forecast(row) for row in ROWS])
    for row in ROWS:
        run(tmp_path, row, "2100-01-01T00:00:00+00:00")
    return tmp_path


def lines_of(results) -> list[dict]:
    return journal.read(results)


def rewrite(results, lines: list[dict]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    paths.journal_file(results).write_text(text, encoding="utf-8")


def whys(results) -> str:
    return "; ".join(why for _, why in seals.broken(results))


def test_a_forecast_that_was_sealed_before_its_runs_holds(sealed):
    assert seals.broken(sealed) == []
    assert journal.changed(sealed, lines_of(sealed)) == []
    assert seals.read(sealed)["rows"].keys() == set(ROWS)


def test_nothing_sealed_is_nothing_broken(tmp_path):
    assert seals.broken(tmp_path) == []
    assert seals.read(tmp_path) is None


def test_a_row_that_has_run_can_not_be_sealed(sealed):
    with pytest.raises(BadInput, match=r"single, ddp have run in .* already"):
        seals.seal(sealed, [forecast(row) for row in ROWS])


def test_a_forecast_whose_row_has_run_is_not_replaced(sealed):
    with pytest.raises(BadInput, match=r"single, ddp have run in .* already, after being foretold"):
        seals.seal(sealed, [forecast("fsdp")])
    assert seals.read(sealed)["rows"].keys() == set(ROWS)


def test_a_forecast_may_be_replaced_until_its_row_has_run(tmp_path):
    seals.seal(tmp_path, [forecast("ddp")])
    seals.seal(tmp_path, [forecast("fsdp")])
    run(tmp_path, "ddp", "2100-01-01T00:00:00+00:00")
    assert seals.broken(tmp_path) == []


def better(results):
    """Negative control: the forecast is improved afterwards."""
    file = paths.foretold_file(results)
    content = read_json(file)
    content["rows"]["ddp"]["seconds"]["value"] = 0.011
    write_json(file, content)


def better_and_noted(results):
    """The file is improved, and a new line of the journal vouches for it."""
    better(results)
    line = next(line for line in lines_of(results) if line["what"] == "foretold")
    file = paths.foretold_file(results)
    about = {name: line[name] for name in ("rows", "sealed", "before")}
    journal.note(results, "foretold", file.parent, (file.name,), **about)


def replaced(results):
    """Forged: another row's forecast is sealed in place of one whose row has run."""
    file, now = paths.foretold_file(results), lines_of(results)[-1]["time"]
    write_json(file, {"time": now, "rows": {"fsdp": forecast("fsdp")}})
    about = {"rows": ["fsdp"], "sealed": now, "before": seals.hash_file(paths.journal_file(results))}
    journal.note(results, "foretold", file.parent, (file.name,), **about)


def late(results):
    """A run had begun before the seal; the journal's order is right."""
    file = results / paths.RUNS / paths.run_name("ddp", 2, 1) / paths.RECORD
    write_json(file, read_json(file) | {"started": "2020-01-01T00:00:00+00:00"})


def late_attempt(results):
    """A disturbed attempt of the run had begun before the seal."""
    file = results / paths.RUNS / paths.run_name("ddp", 2, 1) / paths.RECORD
    before = {"started": "2020-01-01T00:00:00+00:00", "train_seconds": 1.0, "disturbed": ["by others"]}
    write_json(file, read_json(file) | {"disturbed_before": [before]})


def moved_up(results):
    """Forged: runs first, then the seal, whose line is moved to the front."""
    lines = lines_of(results)
    request, seal, *runs = lines
    assert seal["what"] == "foretold"
    rewrite(results, [seal, request, *runs])


def runs_first(results):
    """The lines of the runs stand before the seal's."""
    request, seal, *runs = lines_of(results)
    rewrite(results, [request, *runs, seal])


def line_removed(results):
    """Forged: a line before the seal's, as of an earlier run, is removed."""
    rewrite(results, lines_of(results)[1:])


def other_time(results):
    """Forged: the journal's time of the seal is set back."""
    lines = lines_of(results)
    lines[1]["time"] = "2020-01-01T00:00:00+00:00"
    rewrite(results, lines)


def both_times(results):
    """Forged: the file's time, its hash and the journal's time are set back, but not those of the lines before."""
    file = paths.foretold_file(results)
    write_json(file, read_json(file) | {"time": "2020-01-01T00:00:00+00:00"})
    lines = lines_of(results)
    lines[1] |= {"time": "2020-01-01T00:00:00+00:00", "sealed": "2020-01-01T00:00:00+00:00"}
    lines[1]["files"] = {file.name: seals.hash_file(file)}
    rewrite(results, lines)


def unsealed_row(results):
    """Forged: a row is added to the file, with its hash in the journal."""
    file = paths.foretold_file(results)
    content = read_json(file)
    content["rows"]["fsdp"] = forecast("fsdp")
    write_json(file, content)
    lines = lines_of(results)
    lines[1]["files"] = {file.name: seals.hash_file(file)}
    rewrite(results, lines)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (better, "was changed after it was sealed"),
        (better_and_noted, "was foretold after its first run, by the order of the journal's lines"),
        (replaced, "had run when another seal took the place of its forecast"),
        (lambda results: paths.foretold_file(results).unlink(), "was sealed, and is gone"),
        (late, "after its first run had begun at 2020"),
        (late_attempt, "after its first run had begun at 2020"),
        (moved_up, "lines of the journal before its own were changed, removed or added since"),
        (runs_first, "was foretold after its first run, by the order of the journal's lines"),
        (line_removed, "lines of the journal before its own were changed, removed or added since"),
        (other_time, "and the journal says 2020"),
        (both_times, "its time in the journal is not between those of the lines around it"),
        (unsealed_row, "was not among what was sealed"),
        (lambda results: rewrite(results, lines_of(results)[:1] + lines_of(results)[2:]), "no line of the journal"),
    ],
)
def test_a_forecast_that_was_changed_made_late_or_forged_is_refused(sealed, spoil, told):
    assert seals.broken(sealed) == []
    spoil(sealed)
    assert told in whys(sealed)
    assert told in "; ".join(why for _, why in fairness._foretold({}, sealed))


def test_a_report_with_another_forecast_is_refused(sealed):
    told = {"row": "ddp", "foretold": forecast("ddp")["seconds"]}
    write_json(paths.report_folder(sealed) / paths.SUMMARY, {"foretold": {"rows": [told]}})
    assert list(fairness._foretold({}, sealed)) == []
    told["foretold"] = told["foretold"] | {"value": 0.0111}
    write_json(paths.report_folder(sealed) / paths.SUMMARY, {"foretold": {"rows": [told]}})
    assert list(fairness._foretold({}, sealed)) == [
        ("ddp", "the report has another forecast than the one that was sealed")
    ]


def test_the_report_compares_what_was_foretold_with_the_same_settings(tmp_path):
    config = reading.parse({"hardware": {"device": "cpu", "processes": 2, "threads": 1, "oversubscribe": True}})
    own = {name: seals.settings_hash(config.rows[name]) for name in ("single", "ddp", "fsdp", "horovod", "fabric")}
    not_foretold = forecast("horovod", own["horovod"]) | {"seconds": None, "why": ["its strategy does not declare"]}
    extrapolated = forecast("fabric", own["fabric"]) | {"known": "extrapolated"}
    extrapolated["seconds"] = {"value": 0.02, "low": None, "high": None}
    rows = [forecast("single", own["single"]), forecast("ddp", own["ddp"]), forecast("fsdp", "another")]
    seals.seal(tmp_path, [*rows, not_foretold, extrapolated])
    lines = [{"row": name, "step_ms": ms} for name, ms in (("single", 10), ("ddp", 20), ("fsdp", 10), ("fabric", 25))]
    damaged = []
    found = foretold.against(config, lines, tmp_path, damaged)
    assert damaged == found["broken"] == []
    assert [(line["row"], line["inside"]) for line in found["rows"]] == [
        ("single", True),
        ("ddp", False),
        ("fabric", None),
    ]
    assert [line["error"] for line in found["rows"]] == pytest.approx([0, -0.5, -0.2])
    assert (found["inside"], found["with_interval"]) == (1, 2)
    assert found["mean_error"] == pytest.approx(0.7 / 3)
    assert found["not_compared"] == {
        "fsdp": "it was foretold with other settings",
        "horovod": "its strategy does not declare",
    }


def test_of_a_forecast_that_was_made_late_nothing_is_compared(sealed):
    config = reading.parse({"hardware": {"device": "cpu", "processes": 2, "threads": 1, "oversubscribe": True}})
    late(sealed)
    lines = [{"row": name, "step_ms": 10} for name in ROWS]
    assert foretold.against(config, lines, sealed, [])["not_compared"]["ddp"] == "its seal does not hold"
    better(sealed)
    found = foretold.against(config, lines, sealed, [])
    assert set(found["not_compared"].values()) == {"its seal does not hold"}
    assert (found["rows"], found["mean_error"]) == ([], None)


def test_the_page_shows_foretold_against_measured_in_both_languages(tmp_path):
    packing.unpack(next((PROJECT / "records").glob("*.record")), tmp_path)
    config = reading.read([tmp_path / "config.yaml"])
    made, damaged = summary.gather(config, tmp_path), []
    assert made.foretold is None
    row = config.rows["ddp"]
    for run_folder in (tmp_path / paths.RUNS).iterdir():
        shutil.rmtree(run_folder)
    paths.journal_file(tmp_path).unlink()
    rows = [forecast("ddp", seals.settings_hash(row)), forecast("horovod") | {"seconds": None, "why": [UNDECLARED]}]
    seals.seal(tmp_path, rows)
    found = foretold.against(config, [{"row": "ddp", "step_ms": 20}], tmp_path, damaged)
    page.write(replace(made, foretold=found), tmp_path / "report", tmp_path / "none.csv")
    html = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    markdown = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    for text in (
        "Foretold against measured",
        "预测与实测",
        '<a href="#foretold">',
        UNDECLARED,
        "其策略没有写明",
        ">-50<",
    ):
        assert text in html
    assert "10.0 (9 – 12)" in markdown.replace("10 (", "10.0 (")
    assert "0 of 1 rows with an interval are inside it" in markdown
    assert read_json(tmp_path / "report" / "summary.json")["foretold"] == found
    page.write(made, tmp_path / "report", tmp_path / "none.csv")
    assert 'id="foretold"' not in (tmp_path / "report" / "report.html").read_text(encoding="utf-8")


# The command.


def test_the_number_of_devices_may_be_several_machines_of_this_kind():
    parsed = {"hardware": {"device": "cpu", "processes": 2, "threads": 1, "oversubscribe": True}}
    row = reading.parse(parsed).rows["ddp"]
    assert foretelling.on(row, None) is row
    assert foretelling.on(row, 1).hardware.processes == 1
    four = foretelling.on(row, 4).hardware
    assert (four.nodes, four.processes, four.processes_per_node) == (2, 4, 2)
    with pytest.raises(BadInput, match=r"--gpus 3: this machine has 2 devices .* Name 2 or 4"):
        foretelling.on(row, 3)
    single = reading.parse(parsed).rows["single"]
    assert foretelling.on(single, 4) is single


@pytest.mark.parametrize(("number", "nodes", "on_each"), [(1, 1, 1), (2, 1, 2), (4, 1, 4), (8, 2, 4)])
def test_a_row_with_fewer_processes_of_its_own_is_on_the_same_machine(number, nodes, on_each):
    hardware = {"device": "cpu", "processes": 4, "threads": 1, "oversubscribe": True}
    row = reading.parse({"hardware": hardware, "rows": {"two": {"strategy": "ddp", "processes": 2}}}).rows["two"]
    found = foretelling.on(row, number).hardware
    assert (found.nodes, found.processes_per_node) == (nodes, on_each)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpu", "h100"), "--gpu: is for a model by its shape"),
        (("--tokens", "1e9"), "--tokens: is for a model by its shape"),
        (("--cluster", "mine.yaml"), "--cluster: is for a model by its shape"),
        (("--lora",), "--lora: is for a model by its shape"),
        (("--strategies", "ddp"), "--strategies: is for a model by its shape"),
        (("--price", "-1"), "--price -1: expected a number above 0"),
        (("--json", "config"), "--json: config exists already"),
        (("--picture", "config"), "--picture: config exists already"),
        (("--gpus", "2", "4"), "--gpus 2 4: name one number"),
        (("--gpus", "0"), "--gpus 0: name one number, from 1"),
        (("--rows", "dpp"), "--rows dpp: no such row"),
        ((), "lockstep bench --until plan"),
        (("--model", "m.yaml"), "--gpu: say which, as in --gpu h100 --gpus 8 64"),
        (("--model", "m.yaml", "--gpu", "h100"), "--gpus: say how many"),
        (("--model", "m.yaml", "--gpu", "h100", "--gpus", "8", "--seal"), "--seal: is for your own rows"),
        (("--model", "m.yaml", "--gpu", "h100", "--gpus", "8", "--memory", "9GB"), "--memory: is for your own rows"),
        (("--model", "m.yaml", "--gpu", "h100", "--gpus", "8", "--set", "train.lora=8"), "--set: is for your own rows"),
        (("--model", "m.yaml", "--gpu", "h100", "--gpus", "8", "--config", "a.yaml"), "--config: is for your own rows"),
    ],
)
def test_bad_input_gets_one_clear_message(run_script, words, said):
    code, out, errors = run_script("which", *words)
    assert (code, out) == (2, "")
    assert said in errors
    assert "Traceback" not in errors


def told(row: str, milliseconds: float | None, **more) -> dict:
    """What foretelling.foretell says of a row."""
    seconds = milliseconds and {"value": milliseconds / 1000, "low": 0.9e-3 * milliseconds, "high": 2e-3 * milliseconds}
    found = {"row": row, "ranks": 2, "global_batch": 64, "seconds": seconds, "parts": {}, "known": "foretold"}
    found |= {"devices": 2, "epoch_steps": 36000}
    found |= {"parts": {"communication": {"value": 0.001}}, "why": [], "disturbed": []}
    return found | more


def test_what_rows_need_is_told_and_drawn(tmp_path, capsys):
    gib = 2**30
    found = [told("single", 50), told("ddp", 30), told("fsdp", 40), told("tp", 60, global_batch=32)]
    found += [told("horovod", None, known="not foretold", why=[UNDECLARED])]
    counted = {
        row: {"why": "", "allocated": size * gib, "fits": size < 20} for row, size in zip(ROWS, (12, 21), strict=True)
    }
    counted |= {"fsdp": {"why": "", "allocated": gib, "fits": True}, "horovod": {"why": "in a library of its own"}}
    counted["tp"] = {"why": "it is not counted"}
    own_rows._tell_rows(found, {}, counted, None)
    said = capsys.readouterr().out
    lines = {line.split("│")[1].strip(): line for line in said.splitlines() if line.startswith("│")}
    assert "12" in lines["single"]
    assert "21, does not fit" in lines["ddp"]
    assert "tp: memory not counted: it is not counted" in said
    assert f"horovod: not foretold: {UNDECLARED}" in said
    own_rows._draw(tmp_path / "a.svg", found, counted, 20 * gib)
    drawn = (tmp_path / "a.svg").read_text(encoding="utf-8")
    for text in ("ddp: 30 ms, 21 GiB, does not fit", "single: 50 ms, 12 GiB", "fsdp: 40 ms, 1 GiB", "tp: it is not"):
        assert text in drawn
    assert UNDECLARED[:40] in drawn
    own_rows._draw(tmp_path / "b.svg", found[3:], counted, None)
    assert not (tmp_path / "b.svg").exists()
    assert "not drawn: of no row are both time and memory known" in capsys.readouterr().out


def test_a_row_that_does_not_fit_is_said_so_though_its_time_is_not_foretold(capsys):
    sizes = {"ddp": (2**30, True), "cp": (2**35, False)}
    counted = {row: {"why": "", "allocated": size, "fits": fits} for row, (size, fits) in sizes.items()}
    own_rows._tell_rows([told("ddp", 30), told("cp", None, known="not foretold", why=[UNDECLARED])], {}, counted, None)
    said = capsys.readouterr().out
    assert f"cp: not foretold: {UNDECLARED}\ncp: a GPU, GiB: 32, does not fit\n" in said
    assert "ddp: a GPU" not in said


def test_an_epoch_of_a_row_has_a_time_and_a_cost(capsys):
    brief = told("ddp", 20, epoch_steps=100) | {"seconds": {"value": 0.02, "low": None, "high": None}}
    own_rows._tell_rows([told("single", 50), brief], {}, {}, 3.0)
    lines = {
        line.split("│")[1].strip(): line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line
    }
    *_, epoch, cost, _, _ = lines["single"]
    assert epoch.strip() == "30 (27 to 60) min"  # 36,000 steps of 50 ms
    assert cost.strip() == "3 (2.7 to 6)"  # of half an hour of two devices at 3 an hour each
    *_, epoch, cost, _, _ = lines["ddp"]
    assert (epoch.strip(), cost.strip()) == ("2 s", "0.00333")


def test_a_row_with_another_batch_than_was_planned_gets_the_plan_that_it_would_have(tmp_path):
    config = reading.parse({"hardware": {"device": "cpu", "processes": 2, "threads": 1, "oversubscribe": True}})
    row = config.rows["ddp"]
    row = replace(row, train=replace(row.train, global_batch=24, device_batch=12, max_steps=5))
    lengths = np.random.default_rng(0).integers(4, 60, 400)
    paths.lengths_file(paths.data_folder(tmp_path)).parent.mkdir(parents=True)
    planning.save_lengths(paths.data_folder(tmp_path), lengths)
    made_anew = alone.plan_of(config, row, tmp_path)
    assert made_anew.hash == planning.of_training(row.train, lengths, config.data.max_length).hash
    file = paths.plan_file(tmp_path, row.plan_name)
    file.parent.mkdir(parents=True)
    made_anew.first(3).save(file)
    assert alone.plan_of(config, row, tmp_path).steps == 3


def test_only_runs_with_the_same_settings_and_data_stand_beside_what_is_foretold(tmp_path):
    parsed = {"hardware": {"device": "cpu", "processes": 2, "threads": 1, "oversubscribe": True}}
    config = reading.parse(parsed)
    row = config.rows["ddp"]
    made_from = {"hash": 64 * "d", "weights": 64 * "f"}  # as in a sound record
    write_json(paths.data_file(tmp_path), made_from)
    run(tmp_path, "ddp", "2026-01-01T00:00:00+00:00", asked=row.deciding())
    assert own_rows._measured(config, row, tmp_path) == pytest.approx(50)
    assert own_rows._measured(config, foretelling.on(row, 4), tmp_path) is None
    other = reading.parse(parsed | {"train": {"precision": "bf16"}})
    assert own_rows._measured(other, other.rows["ddp"], tmp_path) is None
    write_json(paths.data_file(tmp_path), made_from | {"hash": 64 * "0"})
    assert own_rows._measured(config, row, tmp_path) is None
