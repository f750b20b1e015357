"""What `lockstep prove` makes of recordings, without a training."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.script import findings, recording
from tests.script.test_gate import OTHER_DECAY, recorded


def test_a_first_gradient_that_is_summed_is_told_however_rounding_grows_later():
    alone, floor = (recorded(rows=["1", "2"] * 2, **more) for more in ({}, {"last_scale": 1.3}))
    verdict = findings.against_one(recorded(ranks=2, scale=2.0), alone, floor)
    assert verdict.floor > 0.2
    assert "summed" in {finding.kind for finding in verdict.findings}
    untold = findings.against_one(recorded(ranks=2, last_scale=1.2), alone, floor)
    assert untold.floor > 0.2
    assert "summed" not in {finding.kind for finding in untold.findings}
    assert "two runs as one process differ by" in untold.findings[-1].says


def handing_out(*chosen: list | None) -> recording.Recording:
    """Two ranks that get 32 samples each, of 256, from samplers that were given as many as `chosen` says."""
    of_both = recorded(ranks=2, rows=["1", "2"])
    ranks = []
    for rank, given in zip(of_both.ranks, chosen, strict=True):
        batches = [list(range(start, start + 8)) for start in range(32 * rank["rank"], 32 * rank["rank"] + 32, 8)]
        loader = {"size": 256, "ordinal": 0, "indexed": True, "batches": [batches], "length": 4, "chosen": given}
        loader |= {"trains": True, "evaluates": False, "dispatched": False, "subset": None, "repeats": False}
        loader["divisions"] = []
        ranks.append(rank | {"loaders": [loader]})
    return replace(of_both, ranks=ranks)


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ((None, None), ["an epoch of all ranks hands out 64 samples, and the data has 256"]),
        (([32, "one half"], [32, "the other"]), []),
        (([64, "alike"], [64, "alike"]), []),
        (([128, "alike"], [128, "alike"]), ["an epoch of all ranks hands out 64 samples, and samplers were given 128"]),
    ],
)
def test_an_epoch_is_measured_by_what_samplers_were_given(chosen, says):
    assert [each.says for each in findings.between_ranks(handing_out(*chosen))] == says


def test_a_setting_that_the_weights_do_not_show_is_told():
    of_ranks = recorded(ranks=2, steps=1)
    of_ranks.ranks[1]["steps"][0]["calls"][0]["rows"] = ["3", "4"]
    rows = ["1", "2", "3", "4"]
    alone, other = (recorded(rows=rows, steps=1, **more) for more in ({}, {"settings": OTHER_DECAY}))
    assert findings.against_one(of_ranks, alone, alone).answer == findings.EQUAL
    told = findings.against_one(of_ranks, other, other)
    assert told.answer == findings.DIFFERENT
    assert told.reason == "weight decay 0.01, 0, and 0.0101, 0 on one process"


@pytest.mark.parametrize(
    ("eps", "says"), [([None, 1e-3], ""), ([None, 2e-3], "eps (none, 0.001) against (none, 0.002)")]
)
def test_a_setting_may_have_parts_without_a_value(eps, says):
    """As Adafactor's eps has by default."""
    mine, its = (recorded(settings=[{"eps": each}]) for each in ([None, 1e-3], eps))
    assert [each.says for each in findings.two_scripts(mine, its)] == []
    assert [each.says for each in findings.other_settings(mine, its)] == ([says] if says else [])


def test_a_data_set_that_does_not_tell_its_size_is_not_judged_by_it():
    unsized = handing_out(None, None)
    for rank in unsized.ranks:
        rank["loaders"][0]["size"] = None
    assert findings.between_ranks(unsized) == []


def loader_of(folder: Path, rank: int, ordinal: int, part: range, size: int, evaluates: bool = False) -> dict:
    """What the recorder notes of a rank's first two batches of four from a part of a data set of this size."""
    file = f"part.{rank}.{ordinal}"
    np.array(part, np.int64).tofile(folder / file)
    batches = [[list(range(start, start + 4)) for start in (0, 4)]]
    of_whole = [[[part[index] for index in batch] for batch in epoch] for epoch in batches]
    return {
        **{"size": len(part), "ordinal": ordinal, "number": ordinal, "indexed": True, "chosen": None},
        **{"trains": not evaluates, "evaluates": evaluates, "dispatched": False, "repeats": False, "divisions": []},
        **{"length": -(-len(part) // 4), "subset": str(part), "drop_last": False},
        "batches": batches,
        "part": {"size": size, "file": file, "batches": of_whole},
    }


ALL = 41  # samples
SHARED = "{} of 41 samples are in the parts of more than one rank, and {} in none"
OTHERWISE = "divided_otherwise", findings.DIFFERENT, SHARED.format(10, 11)
OVERLAP = "divided_otherwise", findings.CAUTION, SHARED.format(16, 0)
REPEATED = "divided_otherwise", findings.CAUTION, SHARED.format(1, 0)
HALF = "epoch_too_short", findings.CAUTION, "2 ranks take one of 4 samples each: an epoch hands out 21 of 41"
LOST = "left_out", findings.CAUTION, "an evaluation leaves out 1 of 41 samples, as all ranks have as many"
PARTS = {
    # of each rank, the parts that its loaders are over, of which a second one evaluates; and what is told
    "each other sample": ([[range(0, ALL, 2)], [range(1, ALL, 2)]], []),
    "blocks, and the rest is left out": ([[range(20)], [range(20, 40)]], []),
    "blocks that overlap": ([[range(28)], [range(12, ALL)]], [OVERLAP]),
    "blocks that overlap, so that both are as large": ([[range(21)], [range(20, ALL)]], [REPEATED]),
    "each other sample of an order of its own": ([[range(20)], [range(10, 30)]], [OTHERWISE]),
    "divided by another number of ranks": ([[range(0, ALL, 4)], [range(1, ALL, 4)]], [HALF]),
    "as before, but others are for validation": (
        [[range(0, ALL, 4), range(2, ALL, 4)], [range(1, ALL, 4), range(3, ALL, 4)]],
        [],
    ),
    "a part of the data, divided": ([[range(0, 20, 2)], [range(1, 20, 2)]], []),
    "training and validation, on all ranks alike": ([[range(30), range(30, ALL)]] * 2, []),
    "validation by rank 0": ([[range(0, 30, 2), range(30, ALL)], [range(1, 30, 2)]], []),
    "validation in blocks": ([[range(40), range(20)], [range(40), range(20, 40)]], [LOST]),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_a_script_divides_by_hand_are_held_against_one_another(name, tmp_path):
    of_each, told = PARTS[name]
    of_ranks, alone = recorded(ranks=2, steps=1), recorded(rows=["1", "2", "3", "4"], steps=1)
    of_ranks.ranks[1]["steps"][0]["calls"][0]["rows"] = ["3", "4"]
    for rank, parts in zip(of_ranks.ranks, of_each, strict=True):
        rank["loaders"] = [
            loader_of(tmp_path, rank["rank"], place, part, ALL, evaluates=place > 0) for place, part in enumerate(parts)
        ]
        if "alike" in name or name == "validation in blocks":  # a sampler divides what they train on
            rank["loaders"][0]["batches"] = [[list(range(4 * rank["rank"], 4 * rank["rank"] + 4))]]
            rank["loaders"][0]["length"] //= 2
    verdict = findings.against_one(replace(of_ranks, folder=tmp_path), alone, alone)
    assert [(each.kind, each.level, each.says) for each in verdict.findings] == told
    assert verdict.answer == (findings.DIFFERENT if OTHERWISE in told else findings.EQUAL)


@pytest.mark.parametrize("same_data", [True, False])
def test_parts_are_held_against_one_another_if_ranks_show_that_they_have_the_same_data(same_data, tmp_path):
    """Where one process has not the samples of all, as for range(100 * rank, 100 * rank + 200)."""
    of_ranks, alone = recorded(ranks=2, steps=1), recorded(rows=["1", "2", "3", "4"], steps=1)
    for rank, part in zip(of_ranks.ranks, (range(24), range(3, 30)), strict=True):
        rank["loaders"] = [loader_of(tmp_path, rank["rank"], 0, part, ALL)]
        rows = [str(index if same_data else 100 * rank["rank"] + index) for index in part[:4]]
        rank["steps"][0]["calls"][0]["rows"] = rows  # both have trained the sample with index 3
    verdict = findings.against_one(replace(of_ranks, folder=tmp_path), alone, alone)
    told = [each.says for each in verdict.findings if each.kind == "divided_otherwise"]
    assert told == ([SHARED.format(21, 11)] if same_data else [])
    assert verdict.answer == (findings.DIFFERENT if same_data else findings.UNTOLD)


def test_data_that_a_sampler_divides_is_not_taken_for_parts_of_other_data(tmp_path):
    """As where random_split has no seed, so that each rank divides another set of as many samples."""
    of_ranks = recorded(ranks=2, steps=1)
    for rank, part in zip(of_ranks.ranks, (range(24), range(16, 40)), strict=True):
        rank["loaders"] = [loader_of(tmp_path, rank["rank"], 0, part, ALL) | {"length": 3}]
    (loader,) = recording.merged(of_ranks)["loaders"]
    assert loader["batches"] == [[[0, 1, 2, 3] * 2, [4, 5, 6, 7] * 2]]


def test_parts_of_data_are_replayed_by_the_indices_of_all_of_it(tmp_path):
    of_ranks = recorded(ranks=2, steps=1)
    for rank, part in zip(of_ranks.ranks, (range(0, ALL, 2), range(1, ALL, 2)), strict=True):
        rank["loaders"] = [loader_of(tmp_path, rank["rank"], 0, part, ALL)]
    (loader,) = recording.merged(replace(of_ranks, folder=tmp_path))["loaders"]
    assert loader["batches"] == [[[0, 2, 4, 6, 1, 3, 5, 7], [8, 10, 12, 14, 9, 11, 13, 15]]]


@pytest.mark.parametrize(
    ("seeds", "level"), [((0, 0), None), ((0, 1), findings.DIFFERENT), ((0, None), findings.DIFFERENT)]
)
def test_samplers_that_divide_an_epoch_in_orders_of_their_own_are_told(seeds, level):
    """Although no sample of the recorded steps is repeated."""
    recorded = handing_out([64, "alike"], [64, "alike"])
    for rank, seed in zip(recorded.ranks, seeds, strict=True):
        rank["loaders"][0]["divisions"] = [{} if seed is None else {"seed": seed, "shuffle": True}]
    assert [each.level for each in findings.between_ranks(recorded)] == ([level] if level else [])


@pytest.mark.parametrize(
    "divisions",
    [
        (
            [{"epoch": 0, "shuffle": True}, {"epoch": 1, "shuffle": True}],
            [{"epoch": 1, "shuffle": True}],
        ),  # a look before
        ([{"seed": 0, "shuffle": False}], [{"seed": 1, "shuffle": False}]),  # which nothing reads
    ],
)
def test_samplers_that_divide_an_epoch_alike_are_not_accused(divisions):
    recorded = handing_out([64, "alike"], [64, "alike"])
    for rank, each in zip(recorded.ranks, divisions, strict=True):
        rank["loaders"][0]["divisions"] = each
    assert findings.between_ranks(recorded) == []


@pytest.mark.parametrize(
    ("rows", "levels"),
    [
        ([("a", "b")] * 4, [findings.DIFFERENT]),
        ([("a", "b")] * 3, []),  # too few steps
        ([("a", "b")] * 3 + [("c", "d")], []),  # not in each
        ([("same", "b")] * 4, []),  # a constant input, which no rank can have for itself
    ],
)
def test_samples_that_ranks_share_in_each_step_are_told(rows, levels):
    """One of three: where they are as many in each step, it is not chance."""
    of_both = recorded(ranks=2, steps=1)
    for rank in of_both.ranks:
        rank["steps"] = [copy.deepcopy(rank["steps"][0]) for _ in rows]
        for step, (shared, own) in enumerate(rows):
            names = [shared if shared == "same" else f"{step}{shared}", f"{step}{own}{rank['rank']}"]
            if shared == "c":
                names[0] += str(rank["rank"])
            rank["steps"][step]["calls"][0]["rows"] = names
    assert [each.level for each in findings.between_ranks(of_both)] == levels


def test_a_learning_rate_that_the_optimizer_finds_by_itself_is_no_difference():
    of_ranks, alone = recorded(ranks=2, steps=1), recorded(rows=["1", "2"] * 2, steps=1)
    for rank in [*of_ranks.ranks, *alone.ranks]:
        rank["steps"][0]["rates"] = [None]
    verdict = findings.against_one(of_ranks, alone, alone)
    assert verdict.table[0]["rate"] is None
    assert "rate" not in {each.kind for each in [*verdict.findings, *findings.two_scripts(of_ranks, alone)]}


@pytest.mark.parametrize(
    ("of_each", "says"),
    [
        (([], []), []),
        ((["1"], ["1"]), []),  # frozen on all ranks
        (
            (["1", "3", "4"], ["1"]),
            ["rank 0 trains with layers in evaluation mode, unlike other ranks: 3, 4"],
        ),
    ],
)
def test_a_rank_that_trains_in_evaluation_mode_is_told(of_each, says):
    of_both = recorded(ranks=2, steps=1)
    for rank, names in zip(of_both.ranks, of_each, strict=True):
        rank["steps"][0]["calls"][0] |= {"rows": [str(rank["rank"])], "evaluating": names}
    assert [each.says for each in findings.between_ranks(of_both)] == says


@pytest.mark.parametrize(
    ("alone", "in_turn", "answer"),
    [
        (2.0, 1.0, findings.UNTOLD),  # twice the samples, twice the loss: a sum, divided by what does not change
        (2.0, 2.0, findings.DIFFERENT),  # divided by the number of ranks
        (1.0, 1.0, findings.DIFFERENT),  # a mean, whose gradients are divided
    ],
)
def test_a_sum_over_samples_is_not_taken_for_a_second_division(alone, in_turn, answer):
    of_ranks = recorded(ranks=2, steps=1)
    of_ranks.ranks[1]["steps"][0]["calls"][0]["rows"] = ["3", "4"]
    one, turn = (recorded(rows=["1", "2", "3", "4"], scale=2.0, steps=1) for _ in range(2))
    one.ranks[0]["steps"][0]["losses"], turn.ranks[0]["steps"][0]["losses"] = [alone], [in_turn]
    verdict = findings.against_one(of_ranks, one, one)
    assert verdict.answer == findings.DIFFERENT
    if findings.may_be_of_a_sum(verdict, of_ranks, one):
        verdict = findings.unless_of_a_sum(verdict, of_ranks, turn)
    twice = "averaged_twice" in {finding.kind for finding in verdict.findings}
    assert (verdict.answer, twice) == (answer, answer == findings.DIFFERENT)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"hashes": {"a": "a-1", "b": "another"}}, "weights of rank 1 drift apart from rank 0's: b"),
        ({"rates": [0.2]}, "ranks step with different learning rates"),
        ({"rates": [0.1 + 1e-12]}, ""),
        ({"rates": [0.1, 0.2]}, ""),  # of other groups
    ],
)
def test_what_ranks_of_a_sharded_model_do_apart_is_told(changed, says):
    of_both = recorded(ranks=2)
    for rank in of_both.ranks:
        for number, step in enumerate(rank["steps"]):
            step["calls"][0]["rows"] = [f"{number}-{rank['rank']}"]
    assert of_both.ranks[0]["initial"]["sharded"]
    of_both.ranks[1]["steps"][1] |= changed
    assert [each.says for each in findings.between_ranks(of_both)] == ([says] if says else [])


@pytest.mark.parametrize(
    ("names", "shapes", "own"),
    [
        (("a", "c"), [1], "b, c"),  # of another layer
        (("a", "b"), [2], "a, b"),  # a part of each layer
    ],
)
def test_ranks_that_divide_layers_by_hand_are_not_accused(names, shapes, own):
    """They train the same samples by right."""
    of_both = recorded(ranks=2)
    other = recorded(ranks=2, names=names)
    of_both.ranks[1] = other.ranks[1]
    for rank, held, shape in zip(of_both.ranks, (("a", "b"), names), ([1], shapes), strict=True):
        rank["initial"]["shapes"] = dict.fromkeys(held, shape)
    levels = {each.kind: each.level for each in findings.between_ranks(of_both)}
    assert levels == dict.fromkeys(("own_parameters", "same_samples"), findings.CAUTION)
    assert f"ranks hold parameters of their own ({own})" in findings.incomparable(of_both)


@pytest.mark.parametrize(
    ("labels", "answer"),
    [
        (["a", "b", "a", "b"], findings.UNTOLD),  # as by augmentation of each rank's own
        (["a", "b", "b", "b"], findings.DIFFERENT),  # other samples
    ],
)
def test_data_that_differ_in_part_only_are_not_called_other_data(labels, answer):
    of_ranks, alone = handing_out(None, None), recorded(rows=["1", "2", "5", "6"])
    for rank in of_ranks.ranks:
        for step in rank["steps"]:
            step["calls"][0]["rows"] = [["1", "2"], ["3", "4"]][rank["rank"]]
    of_ranks.ranks[1]["parts"] = {(256, str(at)): [f"noisy {at}", label] for at, label in enumerate("abab")}
    alone.ranks[0]["parts"] = {(256, str(at)): [f"other {at}", label] for at, label in enumerate(labels)}
    verdict = findings.against_one(of_ranks, alone, alone)
    assert verdict.answer == answer
    assert ("other_data" in {each.kind for each in verdict.findings}) == (answer == findings.DIFFERENT)
