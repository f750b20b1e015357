"""lockstep which: the time of full sharding on many GPUs, foretold from shapes, and held against published runs."""

import itertools
import json
import re
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.text import Text

from benchmarks import others
from lockstep.config import registry
from lockstep.config.reading import load_yaml
from lockstep.errors import BadInput
from lockstep.files import read_json
from lockstep.forecast import by_shape, clusters, model, own_rows, picture, sharded
from lockstep.forecast.picture import Mark
from lockstep.forecast.sharded import Run, Shape
from lockstep.model import metrics
from lockstep.report import pictures

LLAMA = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}
LLAMA_8B = Shape(32, 4096, 4096, 128256, 7504658432, 8030261248)
CARDS = clusters.cards()
RUN = Run(CARDS["h100"], 64, 8192, 2)


def described(folder, **keys):
    """The file of a Llama of eight billion weights, but for these keys."""
    file = folder / "model.yaml"
    file.write_text(json.dumps(LLAMA | keys), encoding="utf-8")
    return file


@pytest.fixture
def which(run_script, tmp_path):
    """Runs the command on a Llama of eight billion weights, unless the words name another model."""
    described(tmp_path)

    def run(*words: str):
        own = [] if "--model" in words else ["--model", "model.yaml"]
        return run_script("which", *own, *words)

    return run


def cells(said: str, strategy: str = "fsdp") -> dict[str, list[str]]:
    """A strategy's lines of a table, by the number of GPUs: a step, tokens/s, MFU, what a GPU keeps, and so on."""
    lines = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in said.splitlines()]
    return {line[1]: line[2:] for line in lines if line and line[0] == strategy}


@pytest.fixture(scope="module")
def computed() -> dict:
    return others.results()


def test_what_is_published_about_errors_is_what_the_benchmark_computes(computed):
    """Else: python -m benchmarks.others --write, and the constants of sharded.py"""
    published = read_json(others.RESULT)
    assert published == json.loads(json.dumps(computed))
    assert computed["rates"] == asdict(sharded.RATES)
    assert computed["intervals"] == sharded.INTERVALS
    assert computed["checked"] == sharded.CHECKED
    page = others.PAGE.read_text(encoding="utf-8")
    assert others.markdown(others.ERRORS_HEADER, others.error_lines(published)) in page
    assert others.markdown(others.PROGRAMS_HEADER, others.program_lines(published)) in page


def test_every_file_of_published_runs_has_runs_that_can_be():
    for row in [*others.read(others.TABLE), *others.read(others.PROGRAMS)]:
        assert row.run.cluster.card in CARDS
        assert row.run.gpus % min(row.run.cluster.gpus_per_machine, row.run.gpus) == 0
        assert 0 <= row.run.recomputed <= 1
        # An embedding that is not tied to the head counts in weights only; vectors do not count in products.
        assert row.shape.products <= row.shape.weights
        untied = row.shape.width * (row.shape.vocabulary + row.run.length)
        assert row.shape.weights - row.shape.products <= 1.05 * untied
        assert 0.05 < sharded.mfu(row.shape, row.run, row.run.tokens / row.run.gpus / row.speed) < 0.75


def test_rates_found_from_speeds_that_have_nothing_to_do_with_shapes_foretell_nothing():
    """Negative control: with the speeds of other rows the errors that are published would not come out."""
    rows = others.read(others.TABLE)
    mixed = np.random.default_rng(0).permutation([row.speed for row in rows])
    rows = [replace(row, speed=speed) for row, speed in zip(rows, mixed, strict=True)]
    assert others.errors(others.halves(rows))["mean"] > 50


def test_a_faster_or_slower_machine_is_seen_in_the_rates():
    """Negative control: all speeds halved are foretold as well as they were, by rates of half the size."""
    rows = [replace(row, speed=row.speed / 2) for row in others.read(others.TABLE)]
    found = others.fit(rows)
    assert found.a100_products == pytest.approx(sharded.RATES.a100_products / 2, rel=0.02)
    assert found.layer == pytest.approx(2 * sharded.RATES.layer, rel=0.02)


@pytest.mark.parametrize("name", ["7b", "1b"])
def test_a_published_model_s_shape_is_counted_from_its_configuration(tmp_path, name):
    row = next(row for row in others.read(others.TABLE) if row.name == name)
    keys = {"model_type": "mpt", "d_model": row.shape.width, "n_layers": row.shape.layers}
    keys |= {"n_heads": row.shape.width // 128, "vocab_size": row.shape.vocabulary}
    file = tmp_path / "mpt.yaml"
    file.write_text(json.dumps(keys), encoding="utf-8")
    found = sharded.shape_of(model.read(file, "language-modelling", 2048))
    assert replace(found, weights=0) == replace(row.shape, weights=0)
    assert found.weights == pytest.approx(row.shape.weights, rel=0.01)  # which has positions that are learned


def test_a_llama_s_shape_is_that_of_the_runs_of_other_programs(tmp_path):
    found = sharded.shape_of(model.read(described(tmp_path), "language-modelling", 2048))
    row = next(row for row in others.read(others.PROGRAMS) if row.name == "llama3-8b")
    assert found == LLAMA_8B
    assert replace(found, weights=row.shape.weights) == row.shape
    assert found.weights == pytest.approx(row.shape.weights, rel=1e-4)  # without norms


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(CARDS)),
    st.sampled_from([1, 2, 8, 16, 64, 512]),
    st.integers(1, 65536),
    st.integers(1, 16),
    st.floats(1e9, 4e12),
)
def test_no_step_is_foretold_that_can_not_be(card, gpus, length, micro_batch, network):
    cluster = replace(CARDS[card], network=network)
    run = Run(cluster, gpus, length, micro_batch)
    parts = sharded.parts(LLAMA_8B, run)
    seconds = sharded.step_seconds(LLAMA_8B, run)
    assert min(parts.values()) >= 0
    assert seconds == pytest.approx(sum(parts.values()))
    assert 0 < sharded.mfu(LLAMA_8B, run, seconds) < 1
    if gpus > 8:  # all bytes through the machine's network
        assert seconds >= 6 * LLAMA_8B.weights * (1 - 8 / gpus) * 8 / network * 0.999
    else:
        assert parts["network"] == parts["latency"] == 0
    assert (parts["links within machines"] == 0) == (gpus == 1)
    for slower in (
        replace(run, cluster=replace(cluster, network=network / 2)),
        replace(run, recomputed=1.0),
        replace(run, accumulation=2),
        replace(run, length=length + 1),
        replace(run, gpus=2 * max(gpus, 8)),
    ):
        assert sharded.step_seconds(LLAMA_8B, slower) >= seconds * 0.999


def test_a_step_of_several_micro_batches_takes_as_many_times_as_long():
    once, often = (sharded.step_seconds(LLAMA_8B, replace(RUN, accumulation=times)) for times in (1, 5))
    assert often == pytest.approx(5 * once)


def test_each_number_is_foretold_with_an_interval_or_extrapolated_with_a_reason(which):
    code, said, errors = which("--gpu", "h100", "--gpus", "8", "64", "1024", "--length", "8192")
    assert (code, errors) == (0, "")
    table = cells(said)
    for gpus in ("8", "64"):
        step, speed, mfu, keeps, how = table[gpus]
        assert how == "foretold"
        assert float(keeps) == pytest.approx(16 * LLAMA_8B.weights / int(gpus) / 2**30, rel=0.01)
        assert re.fullmatch(r"[\d.]+ \([\d.]+ to [\d.]+\) s", step)
        value, low, high = (float(number.replace(",", "")) for number in re.findall(r"[\d,]+", speed))
        assert low == pytest.approx(0.847 * value, rel=0.01)
        assert high == pytest.approx(1.076 * value, rel=0.01)
        assert 30 < float(mfu) < 60
    assert "to" not in table["1024"][0] + table["1024"][1]
    assert table["1024"][-1] == "foretold, extrapolated"
    assert "1024 GPUs: extrapolated, so there is no interval: 1,024 GPUs (8 to 512 were checked)." in said
    (measured,) = re.findall(r"^Measured, by llm-foundry with fsdp, .*$", said, re.MULTILINE)
    assert re.search(r" [\d,]+ tokens/s per GPU, .* 8192 tokens, 8 h100", measured)
    assert re.search(r"Not foretold by a shape: .*\btp\b.*, deepspeed at stage 3\.$", said, re.MULTILINE)
    assert "lockstep fits" in said
    assert "Lockstep's sends gradients in fp32 once a step" in said


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--gpu", "h200", "--gpus", "8"), "the rates are an H100's"),
        (("--gpu", "l40s", "--gpus", "8"), "the rates are an A100's"),
        (("--gpu", "a100-80gb", "--gpus", "256"), r"256 GPUs \(8 to 128 were checked\)"),
        (("--gpu", "h100", "--gpus", "4"), r"4 GPUs \(8 to 512 were checked\)"),
        (("--gpu", "h100", "--gpus", "16", "--network", "25Gb"), r"a network of 25 Gbit/s \(3,200 was checked\)"),
        (("--gpu", "h100", "--gpus", "8", "--length", "128"), r"128 tokens of a text \(512 to 65,536 were checked\)"),
        (("--gpu", "h100", "--gpus", "8", "--micro-batch", "1"), "2,048 tokens of a micro-batch"),
        (
            ("--gpu", "h100", "--gpus", "512", "--micro-batch", "2"),
            r"\d\d % of a step for communication \(0 to 35",
        ),
    ],
)
def test_beyond_what_was_checked_a_number_is_called_extrapolated(which, words, why):
    code, said, _ = which(*words)
    assert code == 0
    assert cells(said)[words[3]][-1] == "foretold, extrapolated"
    assert re.search(f"extrapolated, so there is no interval: .*{why}", said)


def test_a_small_model_and_one_with_a_window_are_extrapolated(which, tmp_path):
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    described(tmp_path, **tiny, num_key_value_heads=2)
    assert "weights (758,111,232 to" in which("--gpu", "h100", "--gpus", "8")[1]
    described(tmp_path, model_type="mistral", sliding_window=4096)
    assert "attention sees" not in which("--gpu", "h100", "--gpus", "8", "--length", "4096")[1]
    assert "attention sees 4,096 tokens" in which("--gpu", "h100", "--gpus", "8", "--length", "8192")[1]


def test_the_network_s_own_speed_is_nothing_new(which):
    words = ("--gpu", "h100", "--gpus", "64", "--network")
    assert cells(which(*words, "3200Gb")[1]) == cells(which(*words[:-1])[1])
    assert which(*GPUS)[1] == which("--gpu", "H100", "--gpus", "8")[1]


@pytest.mark.parametrize(("given", "same"), [("100Mbit", "0.1Gb"), ("200Mb/s", "0.2 Gbps"), ("25000Mb", "25Gb")])
def test_a_network_s_speed_has_any_unit_of_bits(given, same):
    assert clusters.NETWORK.read(given, "") == clusters.NETWORK.read(same, "")


@pytest.mark.parametrize("given", ["25", "25GB", "25MB/s", "100 mb"])
def test_a_network_s_speed_needs_a_unit_of_bits(given):
    with pytest.raises(BadInput, match=r"with the unit, as 25Gb or 100Mb \(bits, not bytes\)"):
        clusters.NETWORK.read(given, "--network")


def test_large_numbers_are_written_out(which):
    """As 1,230 ms, not as 1.23e+03; and columns that a narrow terminal does without are there."""
    seconds = {"value": 1.234, "low": 1.1, "high": 12.345}
    found = {"row": "ddp", "ranks": 2, "seconds": seconds, "parts": {"communication": seconds}, "global_batch": 8}
    assert own_rows._row_cells(found, None)[2:4] == ["1,230 (1,100 to 12,300)", "1,230"]
    header = next(line for line in which(*GPUS)[1].splitlines() if line.startswith("┃"))
    assert set(by_shape.SPARED) < {cell.strip() for cell in header.split("┃")}


def test_a_network_that_is_too_slow_decides(which):
    code, said, _ = which("--gpu", "a100-80gb", "--gpus", "64", "--network", "25Gb")
    assert code == 0
    assert re.search(r"texts at a time, once in a step\. fsdp: network [789]\d %", said)


def test_an_epoch_has_a_time_and_a_cost(which, tmp_path):
    words = ("--gpu", "a100-80gb", "--gpus", "64", "--batch", "512", "--strategies", "fsdp", "--json", "all.json")
    code, said, _ = which(*words, "--tokens", "20e9", "--price", "2")
    assert code == 0
    (found,) = read_json(tmp_path / "all.json")["foretold"]
    assert found["tokens_per_step"] == 512 * 2048
    assert found["gpu_hours"] == pytest.approx(20e9 / found["speed"] / 3600)
    assert found["speed"] == pytest.approx(512 * 2048 / 64 / found["step_seconds"])
    assert sum(found["parts"].values()) == pytest.approx(found["step_seconds"])
    *_, hours, cost, _ = cells(said)["64"]
    assert float(hours.split()[0]) == pytest.approx(found["gpu_hours"] / 64, rel=0.01)
    value, low, high = (float(number.replace(",", "")) for number in re.findall(r"[\d,]+", cost))
    assert value == pytest.approx(2 * found["gpu_hours"], rel=0.01)
    assert low < value < high
    assert high == pytest.approx(value / 0.907, rel=0.01)


def test_a_batch_is_shared_in_micro_batches_that_go_into_it(which):
    told = which("--gpu", "h100", "--gpus", "8", "--batch", "120")[1]  # 15 texts for each GPU, at most 8 at a time
    assert "steps of 245,760 tokens; each GPU computes 5 texts at a time, 3 times in a step" in told
    assert told == which("--gpu", "h100", "--gpus", "8", "--batch-tokens", "245760")[1]
    told = which("--gpu", "h100", "--gpus", "8", "--batch", "120", "--micro-batch", "15")[1]
    assert "each GPU computes 15 texts at a time, once in a step" in told


def test_activations_that_are_computed_again_take_time(which):
    kept, again = (
        float(cells(which("--gpu", "h100", "--gpus", "8", *words)[1])["8"][0].split()[0])
        for words in ((), ("--checkpointing",))
    )
    assert 1.2 < again / kept < 1.34


@pytest.mark.parametrize("name", sharded.MANY)
def test_a_strategy_s_bytes_and_shares_are_those_that_its_file_declares(name):
    strategy, _, stage = name.partition("_") if name.startswith("deepspeed") else (name, "", "0")
    options = {key: option.get("default") for key, option in registry.literals("ddp")["OPTIONS"].items()}
    options |= {key: option.get("default") for key, option in registry.literals(strategy)["OPTIONS"].items()}
    options |= {"precision": "fp32", "clip": 1.0, "stage": int(stage)}
    sent = [each for each in registry.sends(strategy, options) if each["numbers"] != 1]
    links = {True: 0, False: 0}  # by whether it is sent for each micro-batch
    for each in sent:
        size = 2 * each["bytes"] if each["collective"] == "all_reduce" else each["bytes"]
        if strategy == "deepspeed" and each["collective"] == "all_reduce":
            size /= 2  # in bf16
        links[each.get("per") == "micro_batch"] += size
    found = sharded.STRATEGIES[name]
    if name == "fsdp":  # in published runs all in bf16, and gradients after each micro-batch
        assert (found.each, found.once) == (sum(links.values()) / 2, 0)
    else:
        assert (found.each, found.once) == (links[True], links[False])
    assert found.frozen == sum(each["bytes"] / 2 for each in sent if each["numbers"] == "weights")
    assert set(found.sharded) == set(registry.first(strategy, "SHARDS", options) or ())


def test_strategies_stand_in_the_order_of_their_time_and_what_does_not_fit_is_told(which, tmp_path):
    code, said, _ = which("--gpu", "h100", "--gpus", "16", "8", "--json", "all.json")
    assert code == 0
    found = read_json(tmp_path / "all.json")
    lines = [(each["run"]["gpus"], each["step_seconds"]) for each in found["foretold"]]
    assert lines == sorted(lines, key=lambda line: (line[0] != 16, line[1]))
    names = {each["run"]["strategy"] for each in found["foretold"]}
    assert names == set(sharded.MANY) - {"ddp"}  # 16 bytes for each of 8 billion weights
    assert {(run["strategy"], run["gpus"]) for run in found["does_not_fit"]} == {("ddp", 16), ("ddp", 8)}
    assert "ddp does not fit on 8 GPUs: it keeps 120 GiB on each, which has 79.6, of which 1.5GB stay free." in said
    assert cells(said, "zero_redundancy")["8"][-1] == "foretold, extrapolated"
    assert re.search("8 GPUs: .*zero_redundancy.*: extrapolated, as there is no published run by them", said)


def test_a_card_has_the_memory_that_nvidia_smi_shows_and_not_what_it_is_sold_with(which, tmp_path):
    keys = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 19, "tie_word_embeddings": True}
    described(tmp_path, **keys)  # 1.42 billion weights take 21.1 GiB, and 1.5 stay free
    code, said, _ = which("--gpu", "l4", "--gpus", "8")
    assert code == 0
    assert "ddp does not fit on 8 GPUs: it keeps 21.1 GiB on each, which has 22.5, of which 1.5GB stay free." in said
    assert set(cells(said)) == {"8"}


def test_accumulation_spares_what_ddp_sends_and_not_what_fsdp_does():
    model = replace(LLAMA_8B, weights=10**9, products=10**9)
    for name, spares in (("ddp", True), ("zero_redundancy", True), ("fsdp", False)):
        once, often = (
            sum(sharded.communication(model, replace(RUN, strategy=name, accumulation=times))[:2]) for times in (1, 4)
        )
        assert often == pytest.approx(once if spares else 4 * once)


def test_with_lora_less_is_kept_sent_and_computed(which):
    words = ("--gpu", "h100", "--gpus", "16")
    plain, lora = which(*words)[1], which(*words, "--lora")[1]
    assert ", by LoRA, texts of" in lora
    assert "no published run is with LoRA" in lora
    step, _, _, keeps, how = cells(lora, "ddp")["16"]
    assert float(keeps) == pytest.approx(4 * LLAMA_8B.weights / 2**30, rel=0.01)
    assert how == "foretold, extrapolated"
    assert "to" not in step
    of_all, of_few = (float(cells(said)["16"][0].split()[0]) for said in (plain, lora))
    assert 0.6 < of_few / of_all < 0.9
    # Nothing is sent by ddp but LoRA's own weights.
    lone = replace(RUN, strategy="ddp", lora=True)
    assert sharded.communication(LLAMA_8B, lone) == (0, 0, 0)


def test_a_number_of_gpus_that_does_not_do_leaves_the_others(which, tmp_path):
    described(tmp_path, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64)
    code, said, _ = which("--gpu", "h100", "--gpus", "8", "64")
    assert code == 0
    assert set(cells(said)) == {"64"}
    assert "fsdp does not fit on 8 GPUs" in said
    assert "\n8 GPUs: " not in said


def test_zero_keeps_a_copy_of_its_share_and_a_bucket_and_whole_tensors():
    run = replace(RUN, strategy="deepspeed_1")
    weights = LLAMA_8B.weights
    assert sharded.kept(LLAMA_8B, run) == pytest.approx(8 * weights + 12 * weights / 64 + 2e9)
    assert sharded.kept(LLAMA_8B, replace(run, strategy="deepspeed_2")) == pytest.approx(
        4 * weights + weights / 4 + 2e9
    )
    whole = sharded.kept(LLAMA_8B, replace(run, strategy="zero_redundancy"))
    assert whole == pytest.approx(8 * weights + 8 * 128256 * 4096)


def test_one_gpu_sends_nothing_and_shares_nothing(which):
    code, said, _ = which("--gpu", "h200", "--gpus", "1")
    assert code == 0
    assert float(cells(said, "single")["1"][3]) == pytest.approx(16 * LLAMA_8B.weights / 2**30, rel=0.01)
    assert "links" not in said.split("single: ")[1].split("\n")[0]


GPUS = ("--gpu", "h100", "--gpus", "8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpu", "h100", "--gpus", "0"), "--gpus 0: expected 1 to 16,384"),
        (("--gpu", "h100", "--gpus", "-8"), "--gpus -8: expected 1 to"),
        (("--gpu", "h100", "--gpus", "8", "99999999999"), "--gpus 99999999999: expected 1 to"),
        (("--gpu", "h100", "--gpus", "12"), "--gpus 12: machines have 8 GPUs each"),
        (("--gpu", "b100", "--gpus", "8"), "invalid choice: 'b100'"),
        ((*GPUS, "--length", "0"), "--length 0: expected 1 to 1,048,576"),
        ((*GPUS, "--length", "99999999999"), "--length 99999999999: expected 1 to"),
        ((*GPUS, "--length", "8193"), "--length 8193: the model takes texts of at most 8192 tokens"),
        ((*GPUS, "--batch", "0"), "--batch 0: expected at least 1"),
        ((*GPUS, "--batch", "100"), "--batch 100: 100 texts can't be shared evenly by 8 GPUs. Name a multiple of 8."),
        ((*GPUS, "--batch-tokens", "-1"), "--batch-tokens -1: expected at least 1"),
        ((*GPUS, "--batch-tokens", "1000000"), "is no whole number of texts of 2048 tokens"),
        ((*GPUS, "--batch", "8", "--batch-tokens", "16384"), "not allowed with"),
        ((*GPUS, "--micro-batch", "0"), "--micro-batch 0: expected at least 1"),
        ((*GPUS, "--batch", "64", "--micro-batch", "3"), "--micro-batch 3: each of 8 GPUs has 8 texts of a step"),
        ((*GPUS, "--batch", "8", "--micro-batch", "2"), "--micro-batch 2: each of 8 GPUs has 1 texts of a step"),
        ((*GPUS, "--network", "0Gb"), "--network 0Gb: give .1 to 100000 Gbit/s"),
        ((*GPUS, "--network", "25GB"), "--network 25GB: give .1"),
        ((*GPUS, "--network", "fast"), "--network fast: give .1"),
        ((*GPUS, "--network", "١٠٠Gb"), "give .1"),
        ((*GPUS, "--micro-batch", "99999999999999"), "expected at most 1,048,576 tokens for a GPU at a time"),
        ((*GPUS, "--batch", "99999992"), "--batch 99999992: expected at most 4,294,967,296 tokens in a step"),
        (("--gpu", "h100", "--gpus", "16384", "--micro-batch", "256"), "--gpus 16384: expected at most 4,294,967,296"),
        ((*GPUS, "--tokens", "1e300"), "--tokens 1e+300: expected a number above 0, of at most 1e+18"),
        ((*GPUS, "--tokens", "0"), "--tokens 0: expected a number above 0"),
        ((*GPUS, "--tokens", "nan"), "--tokens nan: expected a number above 0"),
        ((*GPUS, "--tokens", "0.5"), "--tokens 0.5: expected at least 1"),
        ((*GPUS, "--tokens", "1e9", "--price", "-2"), "--price -2: expected a number above 0"),
        ((*GPUS, "--tokens", "1e9", "--price", "inf"), "--price inf: expected a number above 0"),
        ((*GPUS, "--price", "2"), "--price: say of how many tokens"),
        (("--gpu", "a100-40gb", "--gpus", "2"), "--gpus 2: it does not fit"),
        (("--gpu", "l4", "--gpus", "1", "--lora"), "Weights, in fp32, take 4 bytes for each weight, 30 GiB in all"),
        (
            (*GPUS, "--strategies", "ddp"),
            "ddp keeps 120 GiB on each GPU, which has 79.6, of which 1.5GB stay free. fsdp",
        ),
        (("--gpu", "h200", "--gpus", "1", "--strategies", "ddp"), "--strategies: are of several GPUs"),
        ((*GPUS, "--strategies", "tp"), "invalid choice: 'tp'"),
        ((*GPUS, "--model", "nothing.yaml"), "--model nothing.yaml: there is no such file or folder."),
        ((*GPUS, "--json", "model.yaml"), "--json: model.yaml exists already"),
    ],
)
def test_bad_input_gets_one_clear_message(which, words, said):
    code, out, errors = which(*words)
    assert (code, out) == (2, "")
    assert said in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"model_type": "bert"}, "the time of bert is not foretold, only that of decoders"),
        ({"model_type": "mamba"}, "the time of mamba is not foretold"),
        ({"model_type": "t5"}, "transformers has no t5 for language-modelling"),
        ({"model_type": "mixtral"}, "a mixture of experts"),
        ({"model_type": "lama"}, "transformers has no such model. Did you mean llama?"),
        ({"model_type": ["llama"]}, "transformers has no such model"),
        ({"num_key_value_heads": 7}, "32 heads can't share 7 for keys and values"),
        ({"hidden_sizes": 64}, "hidden_sizes: no key of a llama"),
        ({"num_hidden_layers": 0}, "it has no layers"),
        ({"num_hidden_layers": 1000000}, "has 1,000,000 layers"),
        ({"num_hidden_layers": "many"}, "expected int"),
        ({"num_attention_heads": 0}, "--model"),
        ({"hidden_size": 0}, "--model"),
        ({"hidden_size": -64}, "--model"),
        ({"vocab_size": 0}, "it has no vocabulary"),
    ],
)
def test_another_model_is_refused(which, tmp_path, keys, said):
    kept = LLAMA if keys.get("model_type", "llama") == "llama" else {}
    (tmp_path / "other.yaml").write_text(json.dumps(kept | keys), encoding="utf-8")
    code, out, errors = which(*GPUS, "--length", "128", "--model", "other.yaml")
    assert (code, out) == (2, "")
    assert said in errors
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1


def test_a_config_json_s_numbers_are_all_taken_or_told(which, tmp_path):
    """A misspelt size was ignored, and the forecast was that of transformers' default."""
    (tmp_path / "misspelt.json").write_text(
        json.dumps({"hiden_size": 2048} | {key: value for key, value in LLAMA.items() if key != "hidden_size"}),
        encoding="utf-8",
    )
    code, out, errors = which(*GPUS, "--model", "misspelt.json")
    assert (code, out) == (2, "")
    assert "hiden_size: no key of a llama. Did you mean hidden_size?" in errors
    others_keys = {"n_ctx": 8192, "rope_theta": 5e5, "torch_dtype": "bfloat16", "_commit": "a"}
    described(tmp_path, **others_keys).rename(tmp_path / "config.json")
    code, said, _ = which(*GPUS, "--model", "config.json")
    assert code == 0
    assert "\nNot counted, as a llama has no such keys: n_ctx.\n" in said
    described(tmp_path)
    assert "no such keys" not in which(*GPUS)[1]


def test_a_config_json_may_begin_with_a_mark_of_its_encoding(which, tmp_path):
    """As editors on Windows write it."""
    file = described(tmp_path)
    file.write_text(json.dumps(LLAMA), encoding="utf-8-sig")
    assert which(*GPUS, "--model", "model.yaml")[0] == 0
    file.rename(tmp_path / "config.json")
    assert which(*GPUS, "--model", "config.json")[0] == 0
    (tmp_path / "config.json").write_text('{"model_type": "llama"', encoding="utf-8")
    code, _, errors = which(*GPUS, "--model", "config.json")
    assert code == 2
    assert "--model config.json: is not JSON: " in errors
    assert "Remove it" not in errors


def test_where_it_can_not_fit_the_message_says_how_many_are_needed(which, tmp_path):
    described(tmp_path, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64)
    code, _, errors = which("--gpu", "h100", "--gpus", "8")
    needed = int(re.search(r"fsdp needs at least (\d+) GPUs", errors)[1])
    assert code == 2
    assert needed == 16  # 14 would be no whole number of machines
    assert which("--gpu", "h100", "--gpus", "16")[0] == 0


def test_the_guide_prints_what_the_command_says(which, tmp_path):
    guide = (others.PROJECT / "docs" / "guide" / "large.md").read_text(encoding="utf-8")
    keys = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True}
    described(tmp_path, **keys).rename(tmp_path / "llama.yaml")
    command, *_ = re.findall(r"^    lockstep which (--model .* --gpu .*)$", guide, re.MULTILINE)
    code, said, _ = which(*command.split())
    table = cells(said)
    assert code == 0
    for gpus in ("8", "64", "512"):
        step, speed, mfu, _, _, cost, how = table[gpus]
        assert f"\n| {' | '.join(('`fsdp`', gpus, step, speed, mfu, cost, how))} |\n" in guide
    step, speed, mfu, _, _, cost, how = cells(said, "ddp")["8"]
    assert f"\n| {' | '.join(('`ddp`', '8', step, speed, mfu, cost, how))} |\n" in guide


def test_the_guide_s_answer_for_a_7b_with_lora_is_what_the_command_says(which, tmp_path):
    guide = (others.PROJECT / "docs" / "guide" / "large.md").read_text(encoding="utf-8")
    section = guide.split("### A 7B with LoRA")[1]
    (tmp_path / "qwen.yaml").write_text(section.split("```yaml\n")[1].split("```")[0], encoding="utf-8")
    command = re.search("^    lockstep which (--model qwen.yaml .*)$", section, re.MULTILINE)[1]
    code, said, _ = which(*command.split())
    step, _, _, _, hours, cost, how = cells(said)["8"]
    assert (code, how) == (0, "foretold, extrapolated")
    assert f"takes {60 * float(hours):.0f} minutes** and costs {cost}, in steps of {step}" in section
    assert "ddp does not fit on 8 GPUs" in said


def test_the_guide_has_the_errors_that_are_published():
    """The sentences say them in words; a new fit changes the figures there, too."""
    guide = (others.PROJECT / "docs" / "guide" / "large.md").read_text(encoding="utf-8")
    found = read_json(others.RESULT)["errors"]
    seconds, many, _, a100, *_ = found.values()
    section = guide.split("## How long, and for how much")[1].split("## Try it small")[0]
    for sentence in (
        f"{seconds['mean']} % off the others in the mean; nine in ten are within {seconds['nine in ten']} %",
        f"the worst is {seconds['worst']} % off",
        f"they are {many['mean']} % off on more of them, at\nmost {many['worst']} %",
        f"on A100 are within {a100['worst']} %",
        f"from {len(others.read(others.TABLE))} runs that others have published",
    ):
        assert sentence in section


# Clusters of one's own.

OWN = """peak: 312 TFLOPS
memory: 80GB
memory_bandwidth: 2.039 TB/s
link: 300 GB/s
gpus_per_machine: 8
network: 1600Gb
rates: a100
"""


def test_each_card_s_numbers_have_a_source():
    described = load_yaml(clusters.CARDS_FILE)
    assert len(described) >= 8
    for name, keys in described.items():
        sources = {key: source for named, source in keys["source"].items() for key in named.split(", ")}
        assert sources.keys() == keys.keys() - {"source", "rates"}, name
        assert all(source.startswith("https://") for source in sources.values()), name


def test_a_card_has_the_same_peak_where_mfu_is_computed():
    devices = {device["name"]: device for device in load_yaml(metrics.PEAKS_FILE)["devices"]}
    for name, card in CARDS.items():
        device = devices[name.split("-")[0].upper()]
        assert card.peak == pytest.approx(1e12 * device["tflops"]["bf16"])
        if name != "a100-80gb":  # there the slower model of the two
            assert card.memory_bandwidth == pytest.approx(1e9 * device["gigabytes_per_second"])


def test_a_cluster_of_one_s_own_with_a_card_s_numbers_takes_as_long(which, tmp_path):
    (tmp_path / "mine.yaml").write_text(OWN, encoding="utf-8")
    (tmp_path / "card.yaml").write_text("card: a100-80gb\n", encoding="utf-8")
    words = ("--gpus", "8", "64")
    known = cells(which("--gpu", "a100-80gb", *words)[1])
    assert cells(which("--cluster", "card.yaml", *words)[1]) == known
    code, said, errors = which("--cluster", "mine.yaml", *words)
    assert (code, errors) == (0, "")
    assert "mine.yaml: 312 TFLOPS in bf16, 80 GiB at 2039 GB/s; 8 to a machine" in said
    for gpus in ("8", "64"):  # but nobody has checked such a card
        assert cells(said)[gpus][0] == re.sub(r" \(.*\)", "", known[gpus][0])
        assert cells(said)[gpus][-1] == "foretold, extrapolated"
        assert f"{gpus} GPUs: extrapolated, so there is no interval: the rates are an A100's." in said


@pytest.mark.parametrize(
    ("keys", "gpus", "why"),
    [
        ("peak: 500 TFLOPS", "8", r"a peak of 500 TFLOPS \(989.5 was checked\)"),
        ("memory_bandwidth: 2TB/s", "8", r"a memory with 2,000 GB/s \(3,350 was checked\)"),
        ("link: 64 GB/s", "8", r"links of 64 GB/s within a machine \(450 was checked\)"),
        ("network: 400Gb", "16", r"a network of 400 Gbit/s \(3,200 was checked\)"),
        ("gpus_per_machine: 4", "8", r"machines with 4 GPUs \(8 was checked\)"),
        ("rates: a100", "8", "the rates are an A100's"),
        ("network: 400Gb", "8", None),  # which one machine does not use
        ("memory: 94GB", "8", None),
        ("price: 2", "8", None),
    ],
)
def test_a_card_with_other_numbers_is_extrapolated_if_they_matter(which, tmp_path, keys, gpus, why):
    (tmp_path / "mine.yaml").write_text(f"card: h100\n{keys}\n", encoding="utf-8")
    code, said, _ = which("--cluster", "mine.yaml", "--gpus", gpus)
    assert code == 0
    assert cells(said)[gpus][-1] == ("foretold, extrapolated" if why else "foretold")
    assert why is None or re.search(f"extrapolated, so there is no interval: .*{why}", said)


def test_a_card_s_number_in_another_unit_is_the_same(which, tmp_path):
    (tmp_path / "mine.yaml").write_text("card: a100-80gb\nmemory_bandwidth: 2.039 TB/s\n", encoding="utf-8")
    assert cells(which("--cluster", "mine.yaml", "--gpus", "8")[1])["8"][-1] == "foretold"


def test_slower_numbers_take_longer(tmp_path):
    run = replace(RUN, gpus=16)
    for name in ("peak", "memory_bandwidth", "link", "network"):
        slower = replace(run.cluster, **{name: getattr(run.cluster, name) / 4})
        assert sharded.step_seconds(LLAMA_8B, replace(run, cluster=slower)) > sharded.step_seconds(LLAMA_8B, run)


def test_a_cluster_s_price_is_that_of_its_gpus(which, tmp_path):
    (tmp_path / "mine.yaml").write_text("card: h100\nprice: 2.5\n", encoding="utf-8")
    words = ("--gpus", "8", "--tokens", "1e9")
    own, asked = which("--cluster", "mine.yaml", *words)[1], which("--gpu", "h100", *words, "--price", "2.5")[1]
    assert "cost of them" in own
    assert cells(own) == cells(asked)
    assert cells(which("--cluster", "mine.yaml", *words, "--price", "5")[1]) != cells(own)
    assert "cost" not in which("--cluster", "mine.yaml", "--gpus", "8")[1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (OWN.replace("peak", "paek"), "mine.yaml: paek: no key of a cluster, which has peak, memory"),
        (OWN.replace("peak", "paek"), "Did you mean peak?"),
        (OWN.replace("rates: a100\n", "").replace("link: 300 GB/s\n", ""), "mine.yaml: link, rates: missing."),
        (OWN.replace("1600Gb", "1600GB"), "mine.yaml: network: 1600GB: give .1 to 100000 Gbit/s"),
        (OWN.replace("1600Gb", "1600"), "mine.yaml: network: 1600: give .1 to 100000 Gbit/s"),
        (OWN.replace("80GB", "80Gb"), "mine.yaml: memory: 80Gb: give a number and its unit, as 24GB"),
        (OWN.replace("80GB", "0GB"), "mine.yaml: memory: 0GB: give a number"),
        (OWN.replace("300 GB/s", "300 Gb/s"), "mine.yaml: link: 300 Gb/s: give .1 to 1000000 GB/s"),
        (OWN.replace("300 GB/s", "-300 GB/s"), "mine.yaml: link: -300 GB/s: give .1"),
        (OWN.replace("312 TFLOPS", "312"), "mine.yaml: peak: 312: give 1 to 100000 TFLOPS"),
        (OWN.replace("312 TFLOPS", "312e12 TFLOPS"), "mine.yaml: peak: 312e12 TFLOPS: give 1"),
        (OWN.replace("312 TFLOPS", "[312]"), "mine.yaml: peak: [312]: give 1"),
        (OWN.replace("machine: 8", "machine: 0"), "mine.yaml: gpus_per_machine: 0: expected a whole number above 0"),
        (OWN.replace("machine: 8", "machine: 8.5"), "mine.yaml: gpus_per_machine: 8.5: expected a whole number"),
        (OWN.replace("machine: 8", "machine: yes"), "mine.yaml: gpus_per_machine: True: expected a whole number"),
        (OWN + "price: -1\n", "mine.yaml: price: -1: expected a number above 0"),
        (OWN + "price: .nan\n", "mine.yaml: price: nan: expected a number above 0"),
        (OWN + "price: 3 EUR\n", "mine.yaml: price: 3 EUR: expected a number above 0"),
        (OWN.replace("rates: a100", "rates: v100"), "mine.yaml: rates: v100: is none of a100, h100. Did you mean"),
        ("card: h1000\n", "mine.yaml: card: h1000: is none of a100-40gb,"),
        ("card: [h100]\n", "mine.yaml: card: ['h100']: is none of a100-40gb,"),
        (OWN + "peak: 2 TFLOPS\n", "the key peak occurs twice"),
        ("- h100\n", "mine.yaml: expected keys and values"),
        ("", "mine.yaml: expected keys and values"),
    ],
)
def test_a_bad_cluster_gets_one_clear_message(which, tmp_path, content, said):
    (tmp_path / "mine.yaml").write_text(content, encoding="utf-8")
    code, out, errors = which("--cluster", "mine.yaml", "--gpus", "8")
    assert (code, out) == (2, "")
    assert said in errors
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpu", "h100", "--cluster", "mine.yaml", "--gpus", "8"), "not allowed with"),
        (("--cluster", "none.yaml", "--gpus", "8"), "none.yaml: No such file"),
        (("--gpus", "8"), "--gpu: say which, as in --gpu h100 --gpus 8 64, or --cluster"),
        (("--cluster", "mine.yaml", "--gpus", "12"), "--gpus 12: machines have 8 GPUs each"),
        (("--cluster", "mine.yaml", "--gpus", "8", "--picture", "a.svg"), "--picture: is for your own rows"),
    ],
)
def test_a_cluster_is_asked_for_in_one_way(which, tmp_path, words, said):
    (tmp_path / "mine.yaml").write_text(OWN, encoding="utf-8")
    code, out, errors = which(*words)
    assert (code, out) == (2, "")
    assert said in errors


# The picture.


def mark(row: str, gib: float, fits: bool = True, low: float | None = 9.0) -> Mark:
    return Mark(row, 10.0, low, low and 12.0, gib, fits)


def test_a_picture_s_labels_are_apart_and_in_the_order_of_their_marks():
    wanted = sorted([0.1, 0.11, 0.111, 0.5, 0.97, 0.98, 0.99])
    places = picture.spread(wanted, 0.08)
    assert all(after - before >= 0.08 - 1e-9 for before, after in itertools.pairwise(places))
    assert min(places) >= 0
    assert max(places) <= 1
    assert picture.spread([0.2, 0.8], 0.1) == [0.2, 0.8]
    crowded = picture.spread([0.5] * 30, 0.08)  # there is no room for such gaps
    assert crowded == sorted(crowded)
    assert (min(crowded) >= -1e-9, max(crowded) <= 1) == (True, True)


def test_no_label_of_a_picture_covers_another_and_what_does_not_fit_is_grey():
    marks = [mark(f"row_{number}", 1 + 0.01 * number) for number in range(14)]
    marks += [mark("large", 30.0, fits=False), mark("far", 2.0, low=None)]
    with pictures.plt.rc_context(pictures.SETTINGS):
        drawn = picture.figure(marks, 22.5, {"pp": "its strategy does not declare what it sends"})
        drawn.canvas.draw()
    (axes,) = drawn.axes
    labels = {text.get_text(): text for text in axes.texts if ": " in text.get_text()}
    assert len(labels) == len(marks)
    boxes = [Text.get_window_extent(label) for label in labels.values()]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    edge = drawn.bbox
    assert all(edge.x0 <= box.x0 and box.x1 <= edge.x1 and edge.y0 <= box.y0 and box.y1 <= edge.y1 for box in boxes)
    assert labels["large: 10 ms, 30 GiB, does not fit"].get_color() == picture.GREY
    assert labels["row_0: 10 ms, 1 GiB"].get_color() != picture.GREY
    assert "far: 10 ms, 2 GiB, extrapolated" in labels
    assert drawn.get_supxlabel() == "pp: its strategy does not declare what it sends"
    hollow = {line.get_gid() for line in axes.lines if line.get_markerfacecolor() == "white"}
    assert hollow == {"mark-large"}
    assert "ms" in axes.get_xlabel()
    assert "GiB" in axes.get_ylabel()


def test_a_memory_that_is_far_larger_is_not_drawn(tmp_path):
    with pictures.plt.rc_context(pictures.SETTINGS):
        low, high = (picture.figure([mark("ddp", 1.0)], there, {}).axes[0].get_ylim()[1] for there in (1.5, 80.0))
    assert low > 1.5
    assert high < 1.5
    picture.draw(tmp_path / "a.svg", [mark("ddp", 1.0)], 1.5, {})
    picture.draw(tmp_path / "b.svg", [mark("ddp", 1.0)], 1.5, {})
    drawn = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert drawn == (tmp_path / "b.svg").read_text(encoding="utf-8")
    assert "ddp: 10 ms, 1 GiB" in drawn
