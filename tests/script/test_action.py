"""action.yml's own steps, run as GitHub would run them, in a clean clone of a user's repository; and its comment."""

import http.server
import json
import os
import re
import subprocess
import threading
from pathlib import Path

import pytest
import yaml

from tests.conftest import PROJECT
from tests.script.test_gate import edit, git, repository  # noqa: F401
from tests.script.test_prove import BIN

ACTION = yaml.safe_load((PROJECT / "action.yml").read_text(encoding="utf-8"))


class GitHub:
    """A server on loopback that keeps comments as GitHub's REST API does, a hundred on a page."""

    def __init__(self):
        bot = {"user": {"type": "Bot"}}
        self.comments = [bot | {"id": number, "body": f"a remark {number}"} for number in range(120)]
        self.refused = 0  # an HTTP status for what writes
        self.writes = []
        keeps = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                page = int(re.search(r"page=(\d+)$", self.path)[1])
                self._answer(200, keeps.comments[100 * (page - 1) : 100 * page])

            def _write(self):
                assert self.headers["Authorization"] == "Bearer secret"
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["body"]
                if keeps.refused:
                    return self._answer(keeps.refused, {})
                keeps.writes.append((self.command, self.path))
                if self.command == "POST":
                    keeps.comments.append(bot | {"id": len(keeps.comments), "body": body})
                else:
                    keeps.comments[int(self.path.rpartition("/")[2])]["body"] = body
                return self._answer(200, {})

            do_POST = do_PATCH = _write

            def _answer(self, status, value):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(value).encode())

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def github():
    github = GitHub()
    yield github
    github.server.shutdown()
    github.server.server_close()


def job(github: GitHub, place: Path, number: int | None = 7) -> dict[str, str]:
    """The variables of a job of a pull request."""
    place.mkdir(parents=True, exist_ok=True)
    event = {"pull_request": {"number": number}} if number else {}
    (place / "event.json").write_text(json.dumps(event), encoding="utf-8")
    return {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "HOME": os.environ["HOME"],
        "GITHUB_API_URL": f"http://127.0.0.1:{github.server.server_port}",
        "GITHUB_REPOSITORY": "somebody/trains",
        "GITHUB_EVENT_PATH": str(place / "event.json"),
        "GITHUB_OUTPUT": str(place / "output"),
        "GITHUB_STEP_SUMMARY": str(place / "summary"),
        "GITHUB_TOKEN": "secret",
        "RUNNER_TEMP": str(place),
    }


def comment(github: GitHub, place: Path, verdict: str, said: str, number: int | None = 7, name: str = "gate") -> str:
    environment = job(github, place, number)
    (place / "gate.md").write_text(f"<!-- lockstep gate -->\n{said}\n", encoding="utf-8")
    (place / "gate.json").write_text(json.dumps({"verdict": verdict}), encoding="utf-8")
    command = ["python", str(PROJECT / "action/comment.py"), str(place), name]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_one_comment_is_written_when_there_is_something_to_say_and_then_edited(github, tmp_path):
    assert "no comment" in comment(github, tmp_path, "passed", "fine")
    assert github.writes == []
    assert "written" in comment(github, tmp_path, "slower", "slower by a tenth")
    assert "already" in comment(github, tmp_path, "slower", "slower by a tenth")
    assert "edited" in comment(github, tmp_path, "passed", "fine again")
    assert [method for method, _ in github.writes] == ["POST", "PATCH"]
    assert "fine again" in github.comments[-1]["body"]
    assert len(github.comments) == 121


def test_each_gate_has_a_comment_of_its_own(github, tmp_path):
    comment(github, tmp_path, "slower", "one", name="one")
    comment(github, tmp_path, "unequal", "two", name="two --> x")
    comment(github, tmp_path, "unequal", "three", name="three --->")
    assert [method for method, _ in github.writes] == ["POST", "POST", "POST"]
    for body in (each["body"] for each in github.comments[-2:]):
        assert body.splitlines()[0].count("-->") == 1, "a name can't end the mark"


def test_nobody_else_s_comment_is_taken_for_the_gate_s(github, tmp_path):
    mark = '<!-- lockstep gate: "gate" -->'
    github.comments.append({"id": 120, "body": f"{mark}\nfine", "user": {"type": "User"}, "author_association": "NONE"})
    assert "written" in comment(github, tmp_path, "slower", "slower")
    assert github.writes == [("POST", "/repos/somebody/trains/issues/7/comments")]


def test_comments_of_accounts_that_are_gone_are_passed_over(github, tmp_path):
    github.comments[:2] = [{"id": 0, "body": None, "user": None}, {"id": 1, "body": "<!-- lockstep gate", "user": None}]
    github.comments[2] = {"id": 2, "body": '<!-- lockstep gate: "gate" -->\nfine', "user": None}
    assert "written" in comment(github, tmp_path, "slower", "slower")


def test_where_nothing_can_be_written_the_job_goes_on_and_says_so(github, tmp_path):
    github.refused = 403
    assert "GitHub refused it" in comment(github, tmp_path, "slower", "slower")
    assert "not of a pull request" in comment(github, tmp_path, "slower", "slower", number=None)


def test_inputs_are_never_part_of_a_script():
    """Whoever names a branch or writes a command could otherwise run code with the job's token."""
    for step in ACTION["runs"]["steps"]:
        assert "${{" not in step["run"]


def given_by(step: dict, values: dict[str, str]) -> dict[str, str]:
    """A step's variables, whose expressions are names, or several with || between them, of which the first counts."""
    expressions = {name: re.fullmatch(r"\$\{\{ (.*) \}\}", value)[1] for name, value in step["env"].items()}
    return {
        name: next(filter(None, (values.get(each, "") for each in expression.split(" || "))), "")
        for name, expression in expressions.items()
    }


def in_action(repository: Path, environment: dict[str, str], **inputs: str) -> list[int]:  # noqa: F811
    """Run the action's steps for a pull request, each if its condition holds; the exit code of each."""
    defaults = {name: about.get("default", "") for name, about in ACTION["inputs"].items()}
    values = {f"inputs.{name}": value for name, value in (defaults | inputs).items()}
    values |= {"github.action_path": str(PROJECT), "inputs.token": "secret", "github.base_ref": "main"}
    codes = []
    for step in ACTION["runs"]["steps"]:
        output = Path(environment["GITHUB_OUTPUT"])
        said = dict(line.split("=", 1) for line in output.read_text().splitlines()) if output.is_file() else {}
        values |= {f"steps.gate.outputs.{name}": value for name, value in said.items()}
        if "steps.gate.outputs.folder != ''" in step.get("if", "") and not said:
            continue
        command = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]]
        variables = environment | given_by(step, values)
        finished = subprocess.run(command, cwd=repository, env=variables, capture_output=True, text=True, check=False)
        codes.append(finished.returncode)
        print(finished.stdout, finished.stderr)
    return codes


@pytest.fixture
def options(tmp_path, repository):  # noqa: F811
    """Runs action/gate.sh where the gate only notes its options; returns the exit code, and the options if it ran."""
    python, noted = tmp_path / "lockstep" / "bin" / "python", tmp_path / "options"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/bash\necho "$@" > {noted}\n')
    python.chmod(0o755)

    def run(folder: Path = repository, **changes: str) -> tuple[int, list[str]]:
        noted.unlink(missing_ok=True)
        given = {"AGAINST": "main", "SLOWER": "5%", "BLOCKS": "10", "MINUTES": "30", "STEPS": "0", "SHARE": ""}
        given |= {"STRICT": "false", "COMMAND": "python train.py", "HERE": str(PROJECT), "RUNNER_TEMP": str(tmp_path)}
        given |= {f"GITHUB_{name}": str(tmp_path / name) for name in ("STEP_SUMMARY", "OUTPUT")}
        environment = {"PATH": os.environ["PATH"]} | given | changes
        command = ["bash", str(PROJECT / "action" / "gate.sh")]
        finished = subprocess.run(command, cwd=folder, env=environment, check=False)
        return finished.returncode, noted.read_text().split() if noted.is_file() else []

    return run


@pytest.mark.parametrize(
    ("said", "strict"), [*((word, True) for word in ("true", "True", "yes", "on", "1")), ("no", False), ("", False)]
)
def test_strict_is_what_yaml_calls_true(options, said, strict):
    code, given = options(STRICT=said)
    assert (code, "--strict" in given) == (0, strict)


def test_another_word_for_strict_is_refused(options, tmp_path):
    assert options(STRICT="maybe") == (2, [])
    assert "`strict` is `maybe`. Set it to true or false." in (tmp_path / "STEP_SUMMARY").read_text()


PUSHED = "github.event.before"
EVENTS = {
    "a pull request, pushed to once more": ({"github.base_ref": "main", PUSHED: "BASE"}, "main"),
    "a merge queue, whose group may have several commits": ({"github.event.merge_group.base_sha": "BASE"}, "BASE"),
    "a push": ({PUSHED: "BASE"}, "BASE"),
    "a new branch": ({PUSHED: "0" * 40}, "main"),
    "a forced push": ({PUSHED: "0" * 39 + "1"}, "main"),
    "a tag": ({PUSHED: "0" * 40, "GITHUB_REF_TYPE": "tag"}, "main"),
    "a schedule": ({}, "HEAD~1"),
    "what the user names": ({PUSHED: "0" * 40, "inputs.against": "v1"}, "v1"),
}


@pytest.fixture
def branch(repository, tmp_path):  # noqa: F811
    """A clone that is on a branch with two commits of its own, as actions/checkout makes it; and where it parted."""
    base = git(repository, "rev-parse", "HEAD").strip()
    git(repository, "checkout", "--quiet", "-b", "change")
    for number in range(2):
        git(repository, "commit", "--quiet", "--allow-empty", "--message", f"Change {number}")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", f"file://{repository}", str(clone)], check=True)
    return clone, base


def event_of(about: dict[str, str], base: str) -> dict[str, str]:
    """The variables that action.yml gives the gate at an event of a repository whose default branch is main."""
    about = {"github.event.repository.default_branch": "main"} | about
    values = {name: base if value == "BASE" else value for name, value in about.items()}
    step = next(step for step in ACTION["runs"]["steps"] if step.get("id") == "gate")
    given = given_by(step, values)
    names = {"GITHUB_REF_TYPE": values.get("GITHUB_REF_TYPE", "branch"), "GITHUB_REF_NAME": "change"}
    return {name: given[name] for name in ("AGAINST", "BEFORE", "DEFAULT")} | names


@pytest.mark.parametrize("event", EVENTS)
def test_each_event_has_the_base_that_its_change_was_made_on(event, options, branch):
    clone, base = branch
    about, against = EVENTS[event]
    code, given = options(clone, **event_of(about, base))
    assert code == 0
    assert given[given.index("--against") + 1] == (base if against == "BASE" else against)


def test_what_a_shallow_clone_lacks_is_not_taken_for_replaced(options, branch, tmp_path):
    """The gate then says that its history must be fetched."""
    _, base = branch
    shallow = tmp_path / "shallow"
    origin = f"file://{tmp_path / 'repository'}"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", origin, str(shallow)], check=True)
    code, given = options(shallow, **event_of({PUSHED: base}, base))
    assert (code, given[given.index("--against") + 1]) == (0, base)


def test_a_new_branch_without_commits_of_its_own_is_no_failure(options, branch, tmp_path):
    clone, base = branch
    git(clone, "checkout", "--quiet", "-B", "change", "origin/main")
    created = event_of({PUSHED: "0" * 40}, base)
    assert options(clone, **created) == (0, [])
    assert "This new branch has no commit that `main` lacks." in (tmp_path / "STEP_SUMMARY").read_text()
    for other in ({"GITHUB_REF_TYPE": "tag"}, {"GITHUB_REF_NAME": "main"}, {"BEFORE": "0" * 39 + "1"}):
        code, given = options(clone, **created | other)
        assert (code, "main" in given) == (0, True), "what a tag or the default branch is compared with must be said"


@pytest.mark.slow
@pytest.mark.ci
def test_a_pull_request_with_another_model_fails_and_is_commented(github, repository, tmp_path):  # noqa: F811
    git(repository, "checkout", "--quiet", "-b", "change")
    edit(repository / "train.py", "lr=1e-3", "lr=1e-2")
    git(repository, "commit", "--quiet", "--all", "--message", "Learn faster")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", f"file://{repository}", str(clone)], check=True)  # HEAD is `change`
    # A module of the user's own, which their job puts on Python's path.
    (clone / "yaml.py").write_text("raise ImportError('not the gate's')\n", encoding="utf-8")
    environment = job(github, tmp_path / "job") | {"PYTHONPATH": str(clone)}
    assert in_action(clone, environment, command="python train.py  # as 'usual'") == [0, 1, 0]
    body = github.comments[-1]["body"]
    assert "another model" in body
    assert "learning rate 0.01 against 0.001" in body
    assert Path(environment["GITHUB_STEP_SUMMARY"]).read_text(encoding="utf-8").startswith("<!-- lockstep gate -->")
    (tmp_path / "job" / "output").unlink()
    # What can't be started leaves no folder, and the step that would comment is not asked.
    assert in_action(clone, environment, command="python train.py", against="nowhere") == [0, 2]
    assert "exit code 2" in Path(environment["GITHUB_STEP_SUMMARY"]).read_text(encoding="utf-8")
