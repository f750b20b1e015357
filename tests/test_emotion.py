"""The published experiment, config/emotion.yaml, run to its end against a hub on this machine, made small.

All ways out of this machine lead through that hub, as a proxy, so that it sees whatever anybody asks for.
"""

import io
import json
import random
import re

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.conftest import PROJECT, Workplace, copy_project
from tests.hub import Hub, bert

CONFIG = yaml.safe_load((PROJECT / "config" / "emotion.yaml").read_text(encoding="utf-8"))
MODEL, REVISION = CONFIG["model"]["name"], CONFIG["model"]["revision"]
MOODS = ["无聊的一天", "我喜欢你", "好难过啊", "真恶心", "气死我了", "太开心了"]  # of the labels 0 to 5
WORDS = ["今天", "昨天", "朋友", "电影", "学校", "老师", "妈妈", "天气", "晚饭", "公司"]
DATA_SET = "someone/emotion"


def some_rows(count: int, seed: int) -> list[dict]:
    """Texts with blanks between words and a label from 0 to 5, as the published experiment has them."""
    dice = random.Random(seed)
    rows = []
    for number in range(count):
        label = number % len(MOODS)
        words = dice.choices(WORDS, k=dice.randint(2, 9))
        rows.append({"text": " ".join([*words, MOODS[label], str(number)]), "label": label})
    return rows


def as_file(rows: list[dict]) -> dict[str, bytes]:
    return {"train.jsonl": "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()}


@pytest.fixture(scope="module")
def hub():
    """The pinned model, under another head of its repository; and rows."""
    with Hub().running() as running:
        texts = [row["text"] for row in some_rows(400, seed=0)]
        running.model(MODEL).put(REVISION, bert(texts, seed=1))
        running.model(MODEL).add(bert(texts, seed=2))
        running.rows = running.data_set(DATA_SET).add(as_file(some_rows(400, seed=0)))
        running.data_set(DATA_SET).add(as_file(some_rows(300, seed=1)))
        yield running


@pytest.fixture(scope="module")
def small(hub) -> list[str]:
    """The configuration, with rows of a hub and made small; all of its rows but `single` and `ddp` are left out."""
    rows = yaml.safe_load((PROJECT / "config" / "config.yaml").read_text(encoding="utf-8"))["rows"]
    others = ", ".join(f"{name}: null" for name in rows if name not in ("single", "ddp"))
    return [
        "--configfile", "config/emotion.yaml", "--config",
        f"data={{url: null, sha256: null, hub: {DATA_SET}, revision: {hub.rows}, limit: 300}}",
        "train={max_steps: 4, global_batch: 16, eval_every: 2}",
        "hardware={device: cpu, processes: 2, threads: 1, timeout: 400, oversubscribe: true}",
        "predict={count: 1}", "profile={steps: 0}", "repeats=1", "retries=0", f"rows={{{others}}}",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def place(hub, tmp_path_factory) -> Workplace:
    return copy_project(tmp_path_factory.mktemp("emotion"))


@pytest.fixture(scope="module")
def snakemake(hub, place, small, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")

    def run(*arguments: str, extra: list[str] = ()):
        ways_out = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), hub.url)
        own = {"HF_ENDPOINT": "http://hub.test", "HF_HOME": str(cache), "no_proxy": "", "NO_PROXY": ""}
        return place.run("snakemake", "--cores", "all", *arguments, *small, *extra, timeout=900, **ways_out, **own)

    return run


@pytest.mark.slow
def test_the_published_experiment_runs_to_its_end_from_a_hub(hub, place, snakemake):
    """Model and rows come at their pinned revisions, through a connection that is cut; all else needs no network."""
    hub.cuts["pytorch_model.bin"] = [15_000_000]
    finished = snakemake("prepare")
    assert finished.returncode == 0, finished.stderr
    assert "bytes=10485760-" in [headers.get("Range") for headers in hub.asked("pytorch_model.bin", "GET")]
    elsewhere = [(how, path) for how, path, headers in hub.requests if not headers["Host"].endswith("hub.test")]
    assert elsewhere == []
    asked = [path for _, path, _ in hub.requests]
    assert not any(path.endswith((".h5", ".msgpack")) or "main" in path.split("/") for path in asked), asked
    about = json.loads(place.path("results/data/data.json").read_text())
    assert about["source"] == f"{DATA_SET}@{hub.rows}"
    assert about["rows_read"] == 300
    assert about["notes"] == []
    pinned = torch.load(io.BytesIO(hub.model(MODEL).commits[REVISION]["pytorch_model.bin"]))
    weights = load_file(place.path("results/data/weights/model.safetensors"))
    assert all(torch.equal(weights[name], pinned[name]) for name in weights if name.startswith("bert."))
    log = place.path("results/logs/prepare.log").read_text()
    assert re.search(rf"^{MODEL}: [\d,]+ parameters, [\d,]+ tokens in the vocabulary$", log, re.MULTILINE), log

    hub.requests.clear()
    finished = snakemake()
    assert finished.returncode == 0, finished.stderr
    assert hub.requests == []
    for row in ("single", "ddp"):
        (record,) = place.path("results/runs").glob(f"{row}/n*/rep1/record.json")
        assert json.loads(record.read_text())["status"] == "ok"
        (test,) = place.path("results/runs").glob(f"{row}/n*/rep1/test/report.json")
        assert test.is_file()
    assert place.path("results/report/report.html").is_file()
    assert place.path("results/predict/predictions.csv").is_file()

    # Trained once more, without any hub; and what is not prepared can't be had then, which leaves what is there.
    hub.status = 503
    finished = snakemake("-R", "train_ddp_1", "--until", "train_ddp_1")
    assert finished.returncode == 0, finished.stderr
    assert hub.requests == []
    finished = snakemake("prepare", extra=[f"model={{revision: {'0' * 40}}}"])
    assert finished.returncode != 0
    assert len(hub.requests) > 0
    (said,) = place.path("results/logs/prepare.log").read_text().splitlines()
    assert said.startswith(
        f"error: model.name: {MODEL} at revision {'0' * 40} can't be loaded: http://hub.test is out of"
    )
    assert json.loads(place.path("results/data/data.json").read_text()) == about
