"""Fetching from the hub gives the pinned revision, complete and with the hub's hash, or one clear message.

The hub's libraries request files of a small hub on the loopback interface, each in a new process, since they read their
settings when they are imported.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import PROJECT
from tests.hub import Hub

NAME = "someone/something"
REVISION = "2a995a880017c60e4683869e817130d8af548486"
# For each line a fork fetches a model or a data set as Lockstep does, and hurries where the hub's library would wait.
# What that library imports is imported once; not so the library itself, which reads its settings when it is imported.
FETCHER = """
import json, os, sys, time
from pathlib import Path
import fsspec, httpx2, pandas, pyarrow.dataset, pyarrow.parquet, tqdm.auto
from lockstep import cli, errors
from lockstep.config import reading

def model(name, revision, *patterns):
    from lockstep.data import hub
    folder = hub.fetch_model(name, revision, list(patterns))
    print(*sorted(f"{file.name}={file.read_bytes()[:20]}" for file in folder.iterdir()), sep="\\n")

def rows(name, revision):
    from lockstep.data import sources
    from lockstep.data.labels import Labels
    data = reading.parse({"data": {"hub": name, "revision": revision}}).data
    print(*[text for text, _, _ in sources.read(data, Path(), [], Labels())[1]], sep="\\n")

time.sleep = lambda seconds: None
for line in sys.stdin:
    (kind, *arguments), folder, variables = json.loads(line)
    fork = os.fork()
    if not fork:
        os.chdir(folder)
        for number, file in enumerate(("out", "err"), 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.environ.update(variables)
        code = errors.exit_code({"model": model, "rows": rows}[kind], *arguments)
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)
"""
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"the weights" * 2_000_000,  # the hub's library resumes after each 10 MiB
    "pytorch_model.bin": b"the same again",
    "onnx/config.json": b"for others",
}


@pytest.fixture
def hub():
    with Hub().running() as running:
        running.model(NAME).put(REVISION, FILES)
        running.model(NAME).add(FILES | {"config.json": b"{'of': 'today'}"})
        yield running


@pytest.fixture(scope="module")
def fetcher():
    own = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    with subprocess.Popen(
        [sys.executable, "-c", FETCHER], env=own | {"PYTHONPATH": str(PROJECT / "workflow" / "scripts")},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        yield process
        process.stdin.close()


@pytest.fixture
def fetch(tmp_path, hub, fetcher):
    """Fetch in a new process with an empty cache. Returns the exit code, the files, and the output."""

    def run(*arguments: str, revision: str = REVISION, **variables: str) -> tuple[int, list[str], str]:
        kind, name, *patterns = arguments or ("model", NAME, "*.json", "model.safetensors")
        variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache")} | variables
        fetcher.stdin.write(f"{json.dumps([[kind, name, revision, *patterns], str(tmp_path), variables])}\n")
        fetcher.stdin.flush()
        code = int(fetcher.stdout.readline())
        return code, (tmp_path / "out").read_text().splitlines(), (tmp_path / "err").read_text()

    return run


def refused(answer: tuple[int, list[str], str]) -> str:
    """The only line of the error output."""
    code, came, said = answer
    assert (code, came, said.count("\n")) == (2, [], 1), answer
    assert said.startswith("error: ")
    return said


def blobs(tmp_path) -> list[bytes]:
    return sorted(file.read_bytes() for file in (tmp_path / "cache").rglob("blobs/*"))


def test_the_files_that_are_asked_for_come_at_the_pinned_revision(tmp_path, hub, fetch):
    """They are fetched once, and the repository's newer head does not matter unless it is named."""
    expected = ["config.json=b'{}'", "model.safetensors=b'the weightsthe weigh'"]
    assert fetch() == (0, expected, "")
    asked = [path for _, path, _ in hub.requests]
    assert not any("main" in path or path.endswith((".bin", "onnx/config.json")) for path in asked), asked
    hub.requests.clear()
    assert fetch() == (0, expected, "")
    assert hub.requests == []
    assert fetch(revision="main")[1][0] == "config.json=b\"{'of': 'today'}\""


@pytest.mark.parametrize("resets", [False, True], ids=["closed", "reset"])
def test_a_cut_connection_is_taken_up_where_it_was_cut(tmp_path, hub, fetch, resets):
    """Only what is less than the 10 MiB that the hub's library reads at a time is fetched twice."""
    hub.cuts["model.safetensors"] = [21_900_000, 0, 300_000]
    hub.resets = resets
    code, _, said = fetch()
    assert (code, said) == (0, "")
    assert sorted(blobs(tmp_path)) == sorted([FILES["config.json"], FILES["model.safetensors"]])
    ranges = [headers.get("Range") for headers in hub.asked("model.safetensors", "GET")]
    assert ranges[0] is None
    assert len(ranges) == 4
    assert {*ranges[1:]} <= {"bytes=10485760-", "bytes=20971520-"}


def test_a_hub_that_can_only_begin_anew_is_let_do_so(tmp_path, hub, fetch):
    hub.cuts["model.safetensors"] = [12_000_000]
    hub.ignores_range = True
    assert fetch()[0] == 0
    assert FILES["model.safetensors"] in blobs(tmp_path)


def test_a_connection_that_is_cut_again_and_again_is_one_message(tmp_path, hub, fetch):
    """No incomplete file is left, and the next attempt succeeds."""
    hub.cuts["model.safetensors"] = [0] * 50
    assert "can't be reached, or ended the connection" in refused(fetch())
    assert blobs(tmp_path) == [FILES["config.json"]]
    hub.cuts.clear()
    assert fetch()[0] == 0
    assert FILES["model.safetensors"] in blobs(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_with_another_hash_is_refused_and_removed(tmp_path, hub, fetch, name):
    """It has the right size, which is all that the hub's library checks."""
    hub.spoilt[name] = bytes(len(FILES[name]))
    said = refused(fetch())
    assert f"model.name: {NAME} at revision {REVISION} can't be loaded: {name} has the " in said
    assert "as http://127.0.0.1:" in said
    assert "says, and was removed. Start again" in said
    assert hub.spoilt[name] not in blobs(tmp_path)
    hub.spoilt.clear()
    assert fetch()[0] == 0
    assert FILES[name] in blobs(tmp_path)


def test_a_file_of_another_size_is_refused(tmp_path, hub, fetch):
    hub.spoilt["model.safetensors"] = FILES["model.safetensors"] + b"more"
    assert f"can't be loaded: a file came with another size than {hub.url} says (" in refused(fetch())
    assert blobs(tmp_path) == [FILES["config.json"]]


def test_a_file_that_was_damaged_in_the_cache_is_found_and_fetched_again(tmp_path, hub, fetch):
    assert fetch()[0] == 0
    (weights,) = (file for file in (tmp_path / "cache").rglob("blobs/*") if file.stat().st_size > 10)
    weights.write_bytes(b"X" + weights.read_bytes()[1:])
    assert "model.safetensors has the sha256" in refused(fetch())
    assert fetch()[0] == 0
    assert FILES["model.safetensors"] in blobs(tmp_path)


def test_an_unknown_revision_or_name_is_one_message(hub, fetch):
    wanted = f"at revision {'0' * 40} can't be loaded: {hub.url} has no such revision of it. Take a commit hash"
    assert wanted in refused(fetch(revision="0" * 40))
    assert f"{hub.url} has no such revision" in refused(fetch(revision="v9"))
    said = refused(fetch("model", "someone/else", "*.json"))
    assert f"model.name: someone/else at revision {REVISION} can't be loaded: {hub.url} refuses it (401)" in said
    said = refused(fetch("model", "someone/else", "*.json", HF_TOKEN="hf_mine"))
    assert f"{hub.url} has no repository of that name (404). Check the name." in said
    assert "it is neither a folder here nor a possible name on the hub" in refused(
        fetch("model", "/no/such/folder", "*.json")
    )


def test_a_gated_model_needs_a_token(tmp_path, hub, fetch):
    hub.gated = "hf_mine"
    assert "refuses it (401): it is private or gated, or does not exist. Check" in refused(fetch())
    assert "refuses it (403): the token in HF_TOKEN has no access" in refused(fetch(HF_TOKEN="hf_other"))
    hub.requests.clear()
    code, came, said = fetch(HF_TOKEN="hf_mine")
    assert (code, len(came), said) == (0, 2, "")
    shown = {(headers["Host"].split(":")[0], headers.get("Authorization")) for _, _, headers in hub.requests}
    assert ("127.0.0.1", "Bearer hf_mine") in shown
    assert ("localhost", "Bearer hf_mine") not in shown, "the token is for no other host"
    assert ("localhost", None) in shown


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (429, "asks for fewer requests (429). Start again in some minutes"),
        (503, "is out of order (503). Start again later, or name a mirror"),
        (404, "Is it a hub, or a mirror of one (HF_ENDPOINT)?"),
    ],
)
def test_a_hub_that_does_not_serve_is_one_message(hub, fetch, status, words):
    hub.status = status
    assert words in refused(fetch())


def test_a_hub_that_is_not_there_is_one_message(hub, fetch):
    said = refused(fetch(HF_ENDPOINT="http://127.0.0.1:9"))
    assert "http://127.0.0.1:9 can't be reached" in said
    assert "name a mirror of the hub: HF_ENDPOINT" in said
    said = refused(fetch(HF_HUB_OFFLINE="1"))
    assert "HF_HUB_OFFLINE forbids fetching it" in said
    assert hub.requests == []


def test_a_proxy_is_used_where_one_is_named(hub, fetch):
    """The hub's real name can't be resolved here, so the request must have gone to the proxy."""
    assert "can't be reached" in refused(fetch(HF_ENDPOINT="http://hub.test"))
    assert fetch(HF_ENDPOINT="http://hub.test", http_proxy=hub.url)[0] == 0
    assert hub.asked("model.safetensors")[0]["Host"] == "hub.test"
    said = refused(fetch(HF_ENDPOINT="http://hub.test", http_proxy="http://127.0.0.1:9", HF_HOME="elsewhere"))
    assert "can't be reached" in said
    assert "proxy" in said


def some_rows(*texts: str) -> dict[str, bytes]:
    lines = [json.dumps({"text": text, "label": 1}, ensure_ascii=False) for text in texts]
    return {"README.md": b"---\nlicense: mit\n---\n", "train.jsonl": "\n".join(lines).encode()}


def test_a_data_set_comes_at_its_pinned_revision_with_its_hash(tmp_path, hub, fetch):
    """This holds even if another revision is in the cache, which datasets would use if the hub does not answer."""
    first = hub.data_set(NAME).add(some_rows("今天", "明天"))
    head = hub.data_set(NAME).add(some_rows("后天"))
    hub.spoilt["train.jsonl"] = some_rows("今夭", "明天")["train.jsonl"]
    said = refused(fetch("rows", NAME, revision=first))
    assert f"data.hub: {NAME} at revision {first} can't be read: train.jsonl has the SHA-1" in said
    hub.spoilt.clear()
    hub.cuts["train.jsonl"] = [20]
    assert fetch("rows", NAME, revision=first) == (0, ["今天", "明天"], "")
    hub.status = 503
    assert fetch("rows", NAME, revision=first) == (0, ["今天", "明天"], "")
    assert f"the cache holds revision {first}" in refused(fetch("rows", NAME, revision=head))
    hub.status = 0
    assert fetch("rows", NAME, revision=head) == (0, ["后天"], "")


def test_a_data_set_that_cannot_be_had_is_one_message(hub, fetch):
    revision = hub.data_set(NAME).add(some_rows("今天"))
    assert f"{hub.url} has no such revision of it" in refused(fetch("rows", NAME, revision="0" * 40))
    assert f"data.hub: someone/else at revision {revision} can't be read: {hub.url} refuses it (401)" in refused(
        fetch("rows", "someone/else", revision=revision)
    )
    assert "HF_HUB_OFFLINE forbids fetching it" in refused(fetch("rows", NAME, revision=revision, HF_HUB_OFFLINE="1"))
    hub.status = 503
    assert f"{hub.url} is out of order (503)" in refused(fetch("rows", NAME, revision=revision))
    assert "can't be reached" in refused(fetch("rows", NAME, revision=revision, HF_ENDPOINT="http://127.0.0.1:9"))
