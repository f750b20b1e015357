"""Results as pandas frames: what is in them is what the files say, and no PyTorch is imported for it."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

import lockstep
from lockstep import paths
from lockstep.errors import BadInput
from lockstep.files import read_json, write_json
from lockstep.paths import SCRIPTS
from lockstep.report import charts


@pytest.fixture(scope="module")
def loaded(benchmark):
    return lockstep.load(benchmark.path("results"))


def test_rows_and_runs_are_the_tables_of_the_report(loaded):
    folder = paths.report_folder(loaded.folder)
    table = pd.read_csv(folder / paths.TABLE).set_index("row")
    assert loaded.rows.index.tolist() == table.index.tolist()
    both = [table.train_seconds, loaded.rows.train_seconds.astype(float)]
    pd.testing.assert_series_equal(*both, check_names=False, rtol=1e-9)
    runs = pd.read_csv(folder / paths.RUNS_TABLE)
    assert (len(loaded.runs), set(loaded.runs.row)) == (len(runs), set(runs.row))
    sound = loaded.runs[(loaded.runs.status == "ok") & (loaded.runs.disturbed == "")]
    assert len(sound) == (runs.status.eq("ok") & runs.disturbed.isna()).sum()


def test_steps_are_those_of_every_rank(loaded):
    record = read_json(paths.run_files(loaded.folder, paths.RECORD, row="ddp")[0])
    ours = loaded.steps[(loaded.steps.row == "ddp") & (loaded.steps.repetition == 1)]
    assert len(ours) == record["asked"]["hardware"]["processes"] * record["steps"]
    first = ours[ours["rank"] == 0]
    assert first.step.tolist() == list(range(1, record["steps"] + 1))
    assert np.allclose(first.loss, record["losses"])
    assert (ours.seconds > 0).all()


def test_proofs_and_parts_and_ratios(loaded):
    assert loaded.proofs.loc["ddp", "proof"] == "equal"
    assert loaded.proofs.loc["ddp", "fp64"] < 1e-9
    assert {"forward", "backward", "communication"} <= set(loaded.parts.columns)
    assert {"single", "ddp"} <= set(loaded.parts.index)
    pair = loaded.ratios.set_index(["row", "against"])
    assert pair.loc[("ddp", "single"), "ratio"] == pytest.approx(1 / pair.loc[("single", "ddp"), "ratio"])
    assert pair.loc[("ddp", "single"), "ratio"] == pytest.approx(1 / loaded.rows.loc["ddp", "speedup"])


def test_pictures_are_those_of_the_page(loaded):
    page = (paths.report_folder(loaded.folder) / paths.PAGE).read_text(encoding="utf-8")
    assert {"train_seconds", "losses", "memory"} <= set(loaded.pictures)
    assert "train_seconds-title" in page
    assert loaded.plot("train_seconds").axes
    with pytest.raises(BadInput, match="there is no picture 'nonsense' here"):
        loaded.plot("nonsense")
    assert loaded.plot.memory().axes
    assert dir(loaded.plot) == sorted(loaded.pictures)
    with pytest.raises(AttributeError, match="there is no picture 'nonsense' here"):
        loaded.plot.nonsense()
    charts.plt.close("all")


def test_a_comparison_refuses_as_the_command_does(loaded, tmp_path):
    with pytest.raises(BadInput, match="breaks the rules"):  # a row that explodes is there
        loaded.compare(loaded)
    with pytest.raises(BadInput, match="one is a copy of the other"):
        loaded.compare(loaded, across=("rules",))
    report = read_json(paths.report_folder(loaded.folder) / paths.SUMMARY)
    for run in (run for runs in report["runs"].values() for run in runs if run["status"] == "ok"):
        run["session"] = "another"
        run["clock"]["train_seconds"] *= 2
    write_json(paths.report_folder(tmp_path / "later") / paths.SUMMARY, report)
    both = loaded.compare(tmp_path / "later", across=("rules",))
    assert np.allclose(both.ratio, 2)
    assert np.allclose(both.other_seconds, 2 * both.seconds)
    assert {"single", "ddp"} <= set(both.index)
    with pytest.raises(BadInput, match="does not exist"):
        lockstep.load(tmp_path)


def test_no_pytorch_is_imported(loaded):
    code = (
        f"import sys, lockstep; r = lockstep.load({str(loaded.folder)!r}); r.rows, r.runs, r.steps, r.proofs, r.ratios;"
        " r.plot('train_seconds'); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(SCRIPTS)}, check=False)
    assert done.returncode == 0
