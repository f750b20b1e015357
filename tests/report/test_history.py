"""Results kept by name: what is copied, and that a change is marked only where it is one."""

import pytest

from lockstep import files, paths
from lockstep.errors import BadInput
from lockstep.report import history
from tests.report.test_comparison_page import folder

BEFORE, SAME, FASTER = [2.0, 2.02, 1.98], [2.01, 1.99, 2.0], [1.5, 1.52, 1.48]


def kept(tmp_path, *several: dict) -> list[history.Kept]:
    """Results that were kept on one day after the other, each with what of its runs is special."""
    for day, special in enumerate(several, 1):
        about = {"cpu": "Z80", "torch": "1", "started": f"2026-01-{day:02}T00:00:00+00:00"} | special
        folder(tmp_path / f"kept{day}", **about)
    return history.read(tmp_path)[0]


def findings(several: list[history.Kept], row: str = "ddp") -> list[str]:
    return [point.finding for point in history.rows(several)[row]]


def test_a_change_is_marked_only_where_it_is_one(tmp_path):
    several = kept(tmp_path, *({"rows": {"ddp": seconds}} for seconds in (BEFORE, SAME, FASTER, FASTER)))
    assert findings(several) == ["first", "open", "change", "open"]
    written = history.page(several)
    assert written.count('<g id="history_ddp-change-') == 1
    overview = written.partition('<table class="overview">')[2].partition("</table>")[0]
    assert overview.count("<svg") == 1, "a small line for each row"
    assert overview.count(' r="4"') == overview.count("change") == 1
    assert [f"{seconds} s" in overview for seconds in ("2", "1.5")] == [True, True]
    assert "kept3: -25.0 %" in written


@pytest.mark.parametrize(
    "other",
    [
        {"cpu": "6502"},
        {"hashes": {"plan": "another", "weights": "w", "data": "d"}},
        {"asked": {"train": {"epochs": 2}}},
    ],
)
def test_what_is_not_alike_is_a_break_and_never_a_change(tmp_path, other):
    assert findings(kept(tmp_path, {"rows": {"ddp": BEFORE}}, {"rows": {"ddp": FASTER}} | other)) == ["first", "break"]


def test_settings_that_decide_no_time_are_no_break(tmp_path):
    asked = [{"train": {"epochs": 1, "log_every": n}, "hardware": {"port": 29500 + n}} for n in (0, 5)]
    looks = [{"rows": {"ddp": seconds}, "asked": each} for seconds, each in zip((BEFORE, SAME), asked, strict=True)]
    assert findings(kept(tmp_path, *looks)) == ["first", "open"]


@pytest.mark.parametrize(
    ("rows", "other", "finding"),
    [({"ddp": [1.5]}, {}, "once"), ({"ddp": FASTER}, {"watch": {"disturbed": ["others"]}}, "disturbed")],
)
def test_what_tells_nothing_is_not_judged(tmp_path, rows, other, finding):
    assert findings(kept(tmp_path, {"rows": {"ddp": BEFORE}}, {"rows": rows} | other)) == ["first", finding]


def test_many_looks_ask_for_more(tmp_path):
    """What one look would call a change is none among a hundred, of which five would be so by chance."""
    little = [1.95, 1.93, 1.91]
    assert findings(kept(tmp_path / "one", {"rows": {"ddp": BEFORE}}, {"rows": {"ddp": little}})) == ["first", "change"]
    rows = {f"row{number}": BEFORE for number in range(99)}
    many = kept(tmp_path / "many", {"rows": rows | {"ddp": BEFORE}}, {"rows": rows | {"ddp": little}})
    assert findings(many) == ["first", "open"]


def test_a_row_that_one_of_them_lacks_is_held_against_the_one_before(tmp_path):
    several = kept(tmp_path, {"rows": {"ddp": BEFORE}}, {"rows": {"single": BEFORE}}, {"rows": {"ddp": FASTER}})
    assert [(point.kept.name, point.finding) for point in history.rows(several)["ddp"]] == [
        ("kept1", "first"),
        ("kept3", "change"),
    ]


def test_weights_and_data_are_not_kept_and_a_row_may_be_named_as_they_are(tmp_path):
    results = folder(tmp_path / "results", "Z80", "1", {"model": BEFORE})
    run = results / paths.RUNS / paths.run_name("model", 1, 1)
    for file in (run / "record.json", run / "model/weights", run / "native/weights", results / "data/dataset/train"):
        files.write_text(file, "x")
    files.write_text(results / "data" / "data.json", "{}")
    made = history.keep(results, "v1", tmp_path / "history")
    assert sorted(file.relative_to(made).as_posix() for file in made.rglob("*") if file.is_file()) == [
        "data/data.json",
        "report/summary.json",
        "runs/model/n1/rep1/record.json",
    ]
    for name, said in (("v1", "exists already"), ("../v2", "can't be a name"), (".v2", "can't be a name")):
        with pytest.raises(BadInput, match=said):
            history.keep(results, name, tmp_path / "history")
    with pytest.raises(BadInput, match="does not exist"):
        history.keep(tmp_path / "empty", "v2", tmp_path / "history")


def test_from_keeping_to_the_page(tmp_path, run_script):
    folder(tmp_path / "results", "Z80", "1", {"ddp": BEFORE})
    code, _, said = run_script("history")
    assert (code, said.count("\n")) == (2, 1)
    assert "no results are kept there" in said
    assert run_script("keep", "v1")[0] == 0
    code, said, _ = run_script("history")
    assert code == 0
    assert "history/history.html" in said
    assert "ddp: no change is shown" in (tmp_path / "history" / "history.html").read_text(encoding="utf-8")


def test_what_is_damaged_is_left_out_and_named(tmp_path):
    folder(tmp_path / "v1", "Z80", "1", {"ddp": [1.0]})
    file = paths.report_folder(tmp_path / "v2") / paths.SUMMARY
    file.parent.mkdir(parents=True)
    file.write_text("{", encoding="utf-8")
    kept, damaged = history.read(tmp_path)
    assert [look.name for look in kept] == ["v1"]
    assert len(damaged) == 1
    assert str(tmp_path / "v2") in damaged[0]
