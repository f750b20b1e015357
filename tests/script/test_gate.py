"""`lockstep gate` on small repositories: commits that are the same, slower, wrong or broken, and odd repositories."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import BadInput, RunFailed
from lockstep.script import commits, findings, gate, gate_report
from lockstep.script.recording import RECORDER, Place, Recording, Timing
from tests.conftest import PROJECT
from tests.script.test_prove import BIN, started

TRAIN = """
import torch
from torch.utils.data import DataLoader, TensorDataset

from model import network

torch.set_num_threads(1)
torch.manual_seed(0)
model = network()
data = TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(100):
    for points, labels in DataLoader(data, batch_size=16, shuffle=True):
        loss = torch.nn.functional.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
MODEL = """
from torch import nn


def network():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
"""


NET = """

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, points):
        return self.last(self.first(points).relu())
"""


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def repository(tmp_path):
    """A user's repository with one commit."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch", "main")
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    (folder / "model.py").write_text(MODEL, encoding="utf-8")
    (folder / ".gitignore").write_text("data/\n__pycache__/\n", encoding="utf-8")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "Train")
    return folder


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


def gated(
    repository: Path, *options: str, command: tuple[str, ...] = ("python", "train.py"), **variables: str
) -> tuple[int, dict, str]:
    """The gate's exit code, its outcome and its words; it must leave the repository as it was."""
    before = git(repository, "status", "--porcelain"), git(repository, "for-each-ref"), sorted(repository.rglob("*"))
    output = repository.parent / f"out-{len(list(repository.parent.glob('out-*')))}"
    words = [sys.executable, str(PROJECT / "workflow/scripts/command.py"), "gate", "--against", "main", "--blocks", "5"]
    # Few steps, since what they take on a busy machine is not tested but by large factors.
    words = [*words, "--steps", "10", "--output", str(output), *options, "--", *command]
    finished = started(["env", *(f"{name}={value}" for name, value in variables.items()), *words], repository)
    said = finished.stdout + finished.stderr
    after = git(repository, "status", "--porcelain"), git(repository, "for-each-ref"), sorted(repository.rglob("*"))
    assert after == before
    assert output.is_dir(), said
    outcome = json.loads((output / "gate.json").read_text(encoding="utf-8"))
    assert (output / "gate.md").read_text(encoding="utf-8").startswith(gate_report.MARK)
    suite = ElementTree.parse(output / "gate.xml").getroot()[0]
    failed = outcome["verdict"] in (gate.SLOWER, gate.UNEQUAL)
    assert (int(suite.get("failures")) > 0) == failed == (finished.returncode == 1)
    return finished.returncode, outcome, said


@pytest.mark.slow
@pytest.mark.ci
def test_a_change_of_nothing_passes_or_is_undecided_and_never_fails(repository):
    edit(repository / "train.py", "import torch\n", "import torch  # and a remark\n")
    code, outcome, said = gated(repository, "--fail-if-slower", "900%")
    assert (code, outcome["model"]) == (0, gate.EQUAL), said
    assert outcome["verdict"] in (gate.PASSED, gate.UNDECIDED), said  # beside other programs five blocks may be too few
    assert len(outcome["seconds"]["base"]) == len(outcome["seconds"]["ours"]) == 5
    assert outcome["torch"]


@pytest.mark.slow
@pytest.mark.ci
def test_a_slower_commit_fails_and_the_model_is_still_the_same(repository):
    git(repository, "checkout", "--quiet", "-b", "slow")
    edit(
        repository / "train.py",
        "        loss.backward()",
        "        __import__('time').sleep(0.3)\n        loss.backward()",
    )
    git(repository, "commit", "--quiet", "--all", "--message", "Sleep")
    code, outcome, said = gated(repository)
    assert (code, outcome["verdict"], outcome["model"]) == (1, gate.SLOWER, gate.EQUAL), said
    assert outcome["speed"]["low"] > 1.05


@pytest.mark.slow
@pytest.mark.ci
def test_another_model_fails_however_fast_it_is(repository):
    edit(repository / "train.py", "loss.backward()", "(loss * 2).backward()")
    code, outcome, said = gated(repository, "--fail-if-slower", "900%")
    assert (code, outcome["verdict"]) == (1, gate.UNEQUAL), said
    assert "2 times" in outcome["reason"]
    assert outcome["seconds"] == {"base": [], "ours": []}


@pytest.mark.slow
def test_another_order_of_sums_is_the_same_model(repository):
    code = "-(scores - scores.logsumexp(1, keepdim=True)).gather(1, labels[:, None]).flip(0).sum() / 16"
    edit(
        repository / "train.py",
        "torch.nn.functional.cross_entropy(model(points), labels)",
        "loss_of(model(points), labels)",
    )
    edit(repository / "train.py", "import torch\n", f"import torch\nloss_of = lambda scores, labels: {code}\n")
    outcome = gated(repository, "--fail-if-slower", "900%")[1]
    assert outcome["model"] == gate.EQUAL, outcome


@pytest.mark.slow
def test_other_names_of_parameters_are_the_same_model(repository):
    edit(repository / "model.py", "nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))", "Net()")
    with (repository / "model.py").open("a", encoding="utf-8") as stream:
        stream.write(NET)
    (repository / "venv").symlink_to(BIN.parent)  # not in the copies, and yet its Python starts both
    with (repository / ".gitignore").open("a", encoding="utf-8") as stream:
        stream.write("venv\n")
    outcome = gated(repository, "--fail-if-slower", "900%", command=("venv/bin/python", "train.py"))[1]
    assert outcome["model"] == gate.EQUAL, outcome
    assert "first.weight for 0.weight" in outcome["findings"][0]["says"]


BROKEN = {
    "crashes": ("train.py", "        loss.backward()", "        raise SystemExit('no more')", "no more"),
    "does too few steps": ("train.py", "range(100)", "range(0)", "did no optimizer step"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_what_could_not_be_measured_is_no_failure_of_speed(name, repository):
    file, old, new, says = BROKEN[name]
    edit(repository / file, old, new)
    code, outcome, said = gated(repository)
    assert (code, outcome["verdict"]) == (4, gate.NOT_MEASURED), said
    assert says in outcome["reason"]
    assert "the working tree" in outcome["reason"]


@pytest.mark.slow
def test_modules_of_an_editable_install_come_from_each_tree(repository, tmp_path):
    """As by `pip install -e .`: the user's own tree is on Python's path, and both commits would import from it."""
    source = repository / "src"
    source.mkdir()
    git(repository, "mv", "model.py", "src/model.py")
    git(repository, "commit", "--quiet", "--message", "Move")
    edit(source / "model.py", "32, 4", "32, 4, bias=False")
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / "sitecustomize.py").write_text(f"import sys; sys.path.append({str(source)!r})\n", encoding="utf-8")
    command = ("env", f"PYTHONPATH={installed}", "python", "train.py")
    # `env` hides Lockstep's own path from the script, so nothing is recorded: not measured, and never "equal".
    code, outcome, said = gated(repository, command=command)
    assert (code, outcome["verdict"]) == (4, gate.NOT_MEASURED), said
    (repository / "train.py").write_text(f"import sys\nsys.path.append({str(source)!r})\n{TRAIN}", encoding="utf-8")
    git(repository, "commit", "--quiet", "--message", "Path", "train.py")
    code, outcome, said = gated(repository)
    assert outcome["model"] == "unequal", said
    assert "2.bias" in outcome["reason"]


@pytest.mark.slow
def test_two_ranks_find_modules_by_a_path_that_the_user_set_and_rounding_is_measured(repository):
    (repository / "src").mkdir()
    git(repository, "mv", "model.py", "src/model.py")
    ranks = TRAIN.replace("torch.set_num_threads(1)", "torch.distributed.init_process_group('gloo')")
    ranks = ranks.replace("model = network()", "model = torch.nn.parallel.DistributedDataParallel(network())")
    sampler = "sampler=torch.utils.data.DistributedSampler(data)"
    (repository / "train.py").write_text(ranks.replace("shuffle=True", sampler), encoding="utf-8")
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "Two ranks")
    edit(repository / "src/model.py", "import nn\n", "import nn\n\nprint('changed')\n")
    code = "torch.nn.functional.cross_entropy(model(points).flip(0), labels.flip(0))"
    edit(repository / "train.py", "torch.nn.functional.cross_entropy(model(points), labels)", code)
    command = ("torchrun", "--nproc-per-node", "2", "train.py")
    outcome = gated(repository, "--fail-if-slower", "900%", command=command, PYTHONPATH=str(repository / "src"))[1]
    assert (outcome["model"], outcome["world"], outcome["verdict"]) == (gate.EQUAL, 2, gate.PASSED), outcome
    logs = [log.read_text(encoding="utf-8") for log in sorted(repository.parent.glob("out-0/*-*.txt"))]
    assert ["changed" in log for log in logs[:2]] == [False, True], "each commit has its own module"


@pytest.mark.slow
def test_a_file_of_the_user_s_own_folder_is_not_taken_for_both_commits(repository):
    """Negative control: both would read the change's own file, and so train the same model."""
    code = TRAIN.replace("lr=1e-3", f"lr=float(open({str(repository / 'rate.txt')!r}).read())")
    (repository / "train.py").write_text(code, encoding="utf-8")
    (repository / "rate.txt").write_text("1e-3", encoding="utf-8")
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "A file of settings")
    (repository / "rate.txt").write_text("1e-2", encoding="utf-8")
    code, outcome, said = gated(repository)
    assert (code, outcome["verdict"]) == (4, gate.NOT_MEASURED), said
    assert "it read rate.txt in your own folder" in outcome["reason"]


def test_paths_of_the_user_s_tree_are_those_of_each_copy_wherever_they_stand(repository, tmp_path, monkeypatch):
    (repository / "data").mkdir()
    edit(repository / "train.py", "lr=1e-3", "lr=1e-4")
    trees = copied(repository, tmp_path)
    monkeypatch.chdir(repository)
    monkeypatch.setenv("ROOT_OF_IT", str(repository))
    monkeypatch.setenv("HOME", str(repository))
    words = [f"--config={repository}/model.py", f"--data={repository}/data", f"cd '{repository}' && x", "/usr/bin", "x"]
    runs = gate.Runs(gate.Asked(["python", *words], 0.05), repository, tmp_path / "work", trees)
    for tree in trees:
        own = str(tree.folder)
        assert runs.command(tree)[1:] == [
            f"--config={own}/model.py",
            f"--data={repository}/data",  # Git ignores it, so that no copy has it
            f"cd '{own}' && x",
            "/usr/bin",
            "x",
        ]
        variables = runs._variables(tree)
        assert variables["ROOT_OF_IT"] == own
        assert "HOME" not in variables


IMPORTS = """
import json, sys

sys.path.append({packages!r})
import net.layers, lockstep_processes

print(json.dumps(lockstep_processes.imported() | {{"used": net.layers.__file__}}))
"""
DIRECT = '{{"url": "file://{0}", "dir_info": {{}}}}'  # what pip notes of `pip install .`
OTHERS = {f"net/{name}.py": "" for name in ("layers", "graph", "routing", "sockets")}
OTHERS |= {"net/__init__.py": "from net import graph, routing, sockets"}


def install(folder: Path, origin: str = "", files: dict[str, str] | None = None) -> Path:
    """A folder of packages with one that is called net."""
    files = files or {"net/__init__.py": "", "net/layers.py": "WIDTH = 0"}
    record = "".join(f"{name},,\n" for name in files)
    about = {"net-1.dist-info/METADATA": "Name: net", "net-1.dist-info/RECORD": record}
    about |= {"net-1.dist-info/direct_url.json": DIRECT.format(origin)} if origin else {}
    for name, text in (files | about).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


INSTALLED = {
    # where net is, what pip noted, its files, whether the commits differ in it; and whose is imported, if any may be.
    "by pip install .": ("env/site-packages", "{repository}", None, True, "ours"),
    "by pip install ., and alike": ("env/site-packages", "{repository}", None, False, "ours"),
    "by pip install -e .": ("repository/src", "", None, True, "ours"),
    "as a wheel from an index": ("env/site-packages", "", None, True, None),
    "as a wheel from an index, and alike": ("env/site-packages", "", None, False, "env"),
    "by pip install -e in another clone": ("clone/src", "", None, True, None),
    "another package of this name": ("env/site-packages", "", OTHERS, True, "env"),
}


@pytest.mark.parametrize("how", INSTALLED)
def test_a_package_of_the_repository_that_is_installed_is_not_taken_for_both_commits(
    how, repository, tmp_path, monkeypatch
):
    place, origin, files, differ, imported = INSTALLED[how]
    install(repository / "src")
    shutil.rmtree(repository / "src" / "net-1.dist-info")
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "A package")
    edit(*((repository / "src/net/layers.py", "0", "1") if differ else (repository / "train.py", "lr=1e-3", "lr=1e-4")))
    packages = tmp_path / place
    if place != "repository/src":
        install(packages, origin.format(repository=repository), files)
    trees = copied(repository, tmp_path)
    monkeypatch.chdir(repository)
    runs = gate.Runs(gate.Asked(["python"], 0.05), repository, tmp_path / "work", trees)
    used = {}

    def run(folder: Path, at: Place) -> Timing:
        """Import the package as a run of the script would."""
        path = os.pathsep.join([str(RECORDER), *filter(None, [at.variables.get("PYTHONPATH")])])
        command = [sys.executable, "-S", "-c", IMPORTS.format(packages=str(packages))]
        environment = os.environ | at.variables | {"PYTHONPATH": path}
        finished = subprocess.run(command, env=environment, cwd=at.folder, capture_output=True, check=True)
        modules = json.loads(finished.stdout)
        used[folder.parent.name.partition("-")[2]] = modules.pop("used")
        return Timing(1.0, 1.0, 8, 1, **modules)

    for tree in trees:
        if imported is None:
            with pytest.raises(RunFailed, match="so that both commits would run the same code"):
                runs._checked(tree, run)
        else:
            runs._checked(tree, run)
            own = tree.folder / "src" if imported == "ours" else packages
            assert used[tree.folder.name] == str(own / "net" / "layers.py")


def test_a_commit_that_lacks_a_package_does_not_import_it_from_an_installed_copy(repository, tmp_path):
    """As a change that adds one; and modules of a namespace belong to packages of their own."""
    base = {"train.py": "a"}
    ours = base | {"src/company/net/__init__.py": "b", "src/company/net/layers.py": "c"}
    files = {f"company.{name}": f"/env/site-packages/company/{name}/__init__.py" for name in ("net", "other", "third")}
    files |= {"company.net.layers": "/env/site-packages/company/net/layers.py"}
    assert gate.copies_among(files, base, ours).keys() == {"company.net", "company.net.layers"}
    assert gate.copies_among(files, ours, ours) == {}
    aside = {"utils": "/home/me/common/utils.py"}
    assert gate.copies_among(aside, base, base | {"tools/utils.py": "d"}) == {}, "a folder of the user's own"


def test_a_file_that_both_commits_have_alike_may_be_read_from_anywhere(repository, tmp_path):
    edit(repository / "train.py", "lr=1e-3", "lr=1e-4")
    (repository / "data").mkdir()
    (repository / "data" / "points.csv").write_text("1,2", encoding="utf-8")
    base, ours = copied(repository, tmp_path, "data")
    read = {"train.py": True, "model.py": False, "data/points.csv": False, ".git/HEAD": False, "nowhere": False}
    for name, wrong in read.items():
        one = recorded()
        one.ranks[0]["read"] = [str(repository / name)]
        assert (gate._read_from_elsewhere(one, base, ours, repository) == Path(name)) == wrong, name


def test_an_undecided_gate_ends_with_3_only_if_it_is_strict(repository, monkeypatch, capsys):
    tree = {"name": "main", "commit": "0" * 40}
    outcome = gate.Outcome(gate.UNDECIDED, "it is close", tree, tree, ["python"], 0.05, model=gate.EQUAL)
    monkeypatch.setattr(gate, "run", lambda *arguments: outcome)
    monkeypatch.chdir(repository)
    edit(repository / "train.py", "lr=1e-3", "lr=1e-4")
    main = runpy.run_path(str(PROJECT / "workflow/scripts/gate.py"))["main"]
    for options, code in (([], 0), (["--strict"], 3)):
        monkeypatch.setattr(sys, "argv", ["gate", "--against", "main", *options, "--", "python", "train.py"])
        assert main() == code
    monkeypatch.setattr(gate, "run", lambda *arguments: 1 / 0)
    assert main() == 4, "what breaks off is no verdict"
    assert "ZeroDivisionError" in capsys.readouterr().err


# --- Without a training -------------------------------------------------------------------------------------------


SECONDS = st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)), min_size=2, max_size=12)


@given(SECONDS, st.sampled_from([0.0, 0.05, 1.0]), st.booleans())
def test_a_verdict_follows_from_the_interval(seconds, limit, last):
    base, ours = map(list, zip(*seconds, strict=True))
    speed = gate.judge(base, ours, limit, last)
    if speed.verdict == gate.PASSED:
        assert speed.high < 1 + limit
    elif speed.verdict == gate.SLOWER:
        assert last
        assert speed.low > 1 + limit
    if len(base) < gate.FEWEST_BLOCKS:
        assert speed.verdict == gate.UNDECIDED
    assert speed.ratio == pytest.approx(np.exp(np.mean(np.log(ours) - np.log(base))))


def test_what_is_left_undecided_says_how_many_blocks_would_decide():
    random = np.random.default_rng(0)
    base = random.lognormal(0, 0.05, 400)
    ours = base * random.lognormal(np.log(1.02), 0.05, 400)
    first = gate.judge(list(base[:6]), list(ours[:6]), 0.05, last=True)
    assert first.verdict == gate.UNDECIDED
    assert first.more is not None
    enough = 6 + first.more
    assert gate.judge(list(base[: 2 * enough]), list(ours[: 2 * enough]), 0.05, last=True).verdict == gate.PASSED
    assert gate.judge([1.0] * 6, [1.05] * 6, 0.05, last=True).more is None, "nothing decides on the border itself"


@pytest.mark.parametrize(("slower", "noise", "passed"), [(0.0, 0.1, 140), (0.05, 0.1, 0), (0.05, 0.5, 0)])
def test_a_change_within_the_limit_is_called_slower_once_in_a_hundred_gates_whatever_the_noise(slower, noise, passed):
    """Ratios vary by 10 % on a shared machine, and by half on a crowded one; 5 % is the limit itself."""
    random = np.random.default_rng(1)
    verdicts = [
        gate.judge([1.0] * 10, list(random.lognormal(np.log1p(slower), noise, 10)), 0.05, last=True).verdict
        for _ in range(1000)
    ]
    assert verdicts.count(gate.SLOWER) <= 15  # ten are expected on the limit
    assert verdicts.count(gate.PASSED) >= passed


class Clocked:
    """Stands for gate.Runs and for the clock: a block takes a minute, and to look at the clock takes a second."""

    def __init__(self):
        self.asked = gate.Asked(["python"], 0.05, blocks=100, steps=10)
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1
        return self.now

    def time(self, *_) -> Timing:
        return Timing(1.0, 1.0, 10, 1, {})

    def block(self, base: commits.Tree, ours: commits.Tree, steps: int, number: int) -> dict[str, Timing]:
        self.now += 60
        seconds = {base.folder.name: 1.0 + number % 2 / 100, ours.folder.name: 2.0}
        return {name: Timing(each, each, steps, 1, {}) for name, each in seconds.items()}


@pytest.mark.parametrize("until", range(380, 450))
def test_a_slower_change_is_called_so_whenever_the_time_is_over(until, monkeypatch):
    base, ours = (commits.Tree(name, "0" * 40, Path(name)) for name in ("base", "ours"))
    outcome = gate.Outcome(gate.NOT_MEASURED, "", {"name": "main"}, {"name": "HEAD"}, ["python"], 0.05)
    runs = Clocked()
    monkeypatch.setattr(gate, "time", runs)
    gate._time(base, ours, runs, outcome, until, lambda line: None)
    assert outcome.speed.verdict == gate.SLOWER
    assert 5 <= outcome.speed.blocks <= 7


def copied(repository: Path, tmp_path: Path, *shared: str) -> tuple[commits.Tree, commits.Tree]:
    return commits.copies(repository, "main", tmp_path / "trees", [repository / name for name in shared])


def test_a_copy_of_the_working_tree_has_what_git_would_have(repository, tmp_path):
    (repository / "new.txt").write_text("new", encoding="utf-8")
    (repository / "model.py").unlink()
    edit(repository / "train.py", "lr=1e-3", "lr=1e-4")
    (repository / "link").symlink_to("train.py")
    (repository / "data").mkdir()
    (repository / "data" / "points.csv").write_text("1,2", encoding="utf-8")
    base, ours = copied(repository, tmp_path, "data")
    present = {str(path.relative_to(ours.folder)) for path in ours.folder.iterdir()}
    assert present == {".git", ".gitignore", "train.py", "new.txt", "link", "data"}
    assert "lr=1e-4" in (ours.folder / "train.py").read_text(encoding="utf-8")
    assert "lr=1e-3" in (base.folder / "train.py").read_text(encoding="utf-8")
    assert os.readlink(ours.folder / "link") == "train.py"
    assert (base.folder / "data" / "points.csv").read_text(encoding="utf-8") == "1,2"


def test_no_run_starts_from_files_of_another(repository, tmp_path):
    edit(repository / "train.py", "lr=1e-3", "lr=1e-4")
    (repository / "data").mkdir()
    _, ours = copied(repository, tmp_path, "data")
    (ours.folder / "checkpoints").mkdir()
    (ours.folder / "checkpoints" / "last.pt").write_text("1", encoding="utf-8")
    (ours.folder / "train.py").write_text("", encoding="utf-8")
    (ours.folder / "model.py").unlink()
    ours.reset()
    assert not (ours.folder / "checkpoints").exists()
    assert "lr=1e-4" in (ours.folder / "train.py").read_text(encoding="utf-8")
    assert (ours.folder / "model.py").is_file()
    assert (ours.folder / "data").is_symlink()


def test_later_commits_of_the_branch_are_no_change_of_ours(repository, tmp_path):
    git(repository, "checkout", "--quiet", "-b", "ours")
    edit(repository / "train.py", "lr=1e-3", "lr=1e-4")
    git(repository, "commit", "--quiet", "--all", "--message", "Ours")
    git(repository, "checkout", "--quiet", "main")
    (repository / "later.txt").write_text("", encoding="utf-8")
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "Later")
    git(repository, "checkout", "--quiet", "ours")
    base, _ = copied(repository, tmp_path)
    assert not (base.folder / "later.txt").exists()


def test_a_shallow_clone_and_a_folder_within_the_repository_work(repository, tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{repository}", str(clone)], check=True)
    edit(clone / "train.py", "lr=1e-3", "lr=1e-4")
    base, ours = commits.copies(clone, "main", tmp_path / "trees", [])
    assert "lr=1e-3" in (base.folder / "train.py").read_text(encoding="utf-8")
    assert "lr=1e-4" in (ours.folder / "train.py").read_text(encoding="utf-8")
    (repository / "part").mkdir()
    assert commits.top(repository / "part") == repository.resolve()


def test_a_partial_clone_fetches_the_files_of_both_commits(repository, tmp_path):
    git(repository, "config", "uploadpack.allowFilter", "true")
    git(repository, "branch", "old")
    edit(repository / "train.py", "lr=1e-3", "lr=1e-4")
    git(repository, "commit", "--quiet", "--all", "--message", "Learn slower")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--filter=blob:none", f"file://{repository}", str(clone)], check=True)
    base, ours = commits.copies(clone, "old", tmp_path / "trees", [])
    base.reset()
    assert "lr=1e-3" in (base.folder / "train.py").read_text(encoding="utf-8")
    assert "lr=1e-4" in (ours.folder / "train.py").read_text(encoding="utf-8")


def test_what_a_sparse_checkout_leaves_out_is_not_deleted(repository, tmp_path):
    git(repository, "sparse-checkout", "set", "--no-cone", "/train.py")
    assert not (repository / "model.py").exists()
    edit(repository / "train.py", "lr=1e-3", "lr=1e-4")
    _, ours = copied(repository, tmp_path)
    assert (ours.folder / "model.py").read_text(encoding="utf-8") == MODEL
    assert "lr=1e-4" in (ours.folder / "train.py").read_text(encoding="utf-8")


def test_a_base_without_files_is_a_copy_like_any(repository, tmp_path):
    git(repository, "checkout", "--quiet", "--orphan", "start")
    git(repository, "rm", "--quiet", "-r", "--force", ".")
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "Nothing yet")
    (repository / "train.py").write_text(TRAIN, encoding="utf-8")
    git(repository, "add", "train.py")
    base, ours = commits.copies(repository, "start", tmp_path / "trees", [])
    (base.folder / "written.txt").write_text("", encoding="utf-8")
    base.reset()
    assert [path.name for path in base.folder.iterdir()] == [".git"]
    assert (ours.folder / "train.py").is_file()


def test_submodules_are_named_until_they_are_shared(repository, tmp_path):
    module = tmp_path / "module"
    module.mkdir()
    git(module, "init", "--quiet")
    git(module, "commit", "--quiet", "--allow-empty", "--message", "Empty")
    git(repository, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(module), "library")
    git(repository, "commit", "--quiet", "--message", "Add a module")
    git(repository, "branch", "--force", "old", "HEAD~1")
    _, ours = commits.copies(repository, "old", tmp_path / "without", [])
    assert commits.lacks(ours) == ["library"]
    with pytest.raises(BadInput, match="Git tracks it"):
        commits.copies(repository, "old", tmp_path / "refused", [repository / "library"])
    edit(repository / "train.py", "lr=1e-3", "lr=1e-4")
    _, ours = commits.copies(repository, "main", tmp_path / "with", [repository / "library"])
    ours.reset()
    assert (ours.folder / "library").is_symlink()
    assert commits.lacks(ours) == []
    (module / "new.txt").write_text("", encoding="utf-8")
    (repository / "library" / "new.txt").write_text("", encoding="utf-8")
    with pytest.raises(BadInput, match="not the same in both"):
        commits.copies(repository, "main", tmp_path / "changed", [repository / "library"])


def test_a_folder_that_became_a_link_and_the_other_way_are_copied_and_nothing_is_written_through(repository, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "points.csv").write_text("theirs", encoding="utf-8")
    (repository / "set").symlink_to(outside)
    (repository / "folder").mkdir()
    (repository / "folder" / "file").write_text("", encoding="utf-8")
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "A link and a folder")
    (repository / "set").unlink()
    (repository / "set").mkdir()
    (repository / "set" / "points.csv").write_text("ours", encoding="utf-8")
    shutil.rmtree(repository / "folder")
    (repository / "folder").symlink_to(outside)
    (repository / "odd\rname\nhere").write_text("", encoding="utf-8")
    _, ours = copied(repository, tmp_path)
    assert (outside / "points.csv").read_text(encoding="utf-8") == "theirs"
    assert (ours.folder / "set" / "points.csv").read_text(encoding="utf-8") == "ours"
    assert (ours.folder / "folder").is_symlink()
    assert (ours.folder / "odd\rname\nhere").is_file()


def test_a_worktree_is_a_repository_too(repository, tmp_path):
    git(repository, "worktree", "add", "--quiet", str(tmp_path / "tree"), "-b", "other")
    edit(tmp_path / "tree" / "train.py", "lr=1e-3", "lr=1e-4")
    base, ours = commits.copies(commits.top(tmp_path / "tree"), "main", tmp_path / "trees", [])
    texts = [(tree.folder / "train.py").read_text(encoding="utf-8") for tree in (base, ours)]
    assert ["lr=1e-3" in texts[0], "lr=1e-4" in texts[1]] == [True, True]


# --- Models that differ, without a training: recordings as the recorder writes them --------------------------------


def sketch(*values: float) -> list[float]:
    padded = [*values, *[0.0] * (61 - len(values))]
    return [float(np.linalg.norm(padded)), *padded]


SETTINGS = [
    {"lr": 0.1, "betas": [0.9, 0.999], "weight_decay": 0.01, "amsgrad": False},
    {"lr": 0.1, "betas": [0.9, 0.999], "weight_decay": 0.0, "amsgrad": False},
]
OTHER_DECAY = [SETTINGS[0] | {"weight_decay": 0.0101}, SETTINGS[1]]
OTHER_BETAS = [each | {"betas": [0.9, 0.95]} for each in SETTINGS]
OTHER_RATE = [SETTINGS[0], SETTINGS[1] | {"lr": 0.1001}]
DIVIDED = [SETTINGS[1], SETTINGS[0] | {"fused": True}, SETTINGS[0] | {"lr": 0.1 + 1e-12}]


def recorded(ranks: int = 1, names: tuple[str, ...] = ("a", "b"), scale: float = 1.0, **changed) -> Recording:
    """Two steps of a small model. scale: of the gradients of the second step, and of what they change."""
    about = {"rows": ["1", "2"], "dropout": [0.1], "precisions": ["torch.float32"], "steps": 2, "last_scale": scale}
    about |= {"settings": SETTINGS} | changed
    start = {name: sketch(1.0, 2.0) for name in names}
    each = []
    for rank in range(ranks):
        scales = [scale, about["last_scale"] if rank == ranks - 1 else scale]
        steps = [
            {
                "calls": [{"rows": about["rows"], "line": "", "model": 0, "synchronised": None}],
                "losses": [1.0],
                "clip": [],
                "dropout": about["dropout"],
                "rates": [0.1],
                "settings": about["settings"],
                "schedule_steps": 1,
                "gradients": {name: sketch(*(scales[step] * value for value in (3.0, 4.0))) for name in names},
                "weights": {name: sketch(*(1.0 - 0.1 * scales[step] * (step + 1), 2.0)) for name in names},
                "hashes": {name: f"{name}-{step}" for name in names},
            }
            for step in range(about["steps"])
        ]
        initial = {
            "weights": start,
            "hashes": {name: f"hash-{place}" for place, name in enumerate(names)},
            "dropout": 0.0,
            "frozen": [],
            "sharded": True,
            "divided": None,
            "devices": ["cpu"],
            "random": str(rank),
            "trainer": False,
        }
        notes = {"precisions": about["precisions"]}
        each.append(
            {"rank": rank, "world": ranks, "initial": initial, "steps": steps, "notes": notes, "loaders": []}
            | {"elsewhere": {}, "pid": rank, "parent": 0}
        )
    return Recording(Path(), each, 0, None)


CHANGES = {
    "nothing": ({}, []),
    "other names": ({"names": ("c", "d")}, []),
    "other names and another gradient": ({"names": ("c", "d"), "scale": 2.0}, ["gradient"]),
    "a gradient that rounds otherwise": ({"scale": 1 + 1e-7}, []),
    "a gradient of half precision's rounding": ({"scale": 1.05, "precisions": ["torch.bfloat16"]}, ["gradient"]),
    "a gradient that is no number": ({"scale": float("nan")}, ["gradient"]),
    "another precision": ({"precisions": ["torch.float32", "torch.bfloat16"]}, ["precision"]),
    "other dropouts": ({"dropout": [0.1, 0.3]}, ["dropout"]),
    "other samples": ({"rows": ["1", "3"], "scale": 1.5}, ["samples"]),
    "the same samples in another form": ({"rows": ["4", "5"]}, []),
    "another length": ({"steps": 1}, ["length"]),
    "another weight decay, which moves weights by less than rounding may": ({"settings": OTHER_DECAY}, ["setting"]),
    "other betas": ({"settings": OTHER_BETAS}, ["setting"]),
    "another learning rate of the second group": ({"settings": OTHER_RATE}, ["rate"]),
    "the same settings in other groups": ({"settings": DIVIDED}, []),
    "another optimizer, which has no such settings": ({"settings": [{"lr": 0.1, "momentum": 0.0}]}, []),
    "another last rank": ({"last_scale": 3.0}, ["gradient"]),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_change_does_to_the_model_is_told(name, ranks):
    change, kinds = CHANGES[name]
    if name == "a gradient of half precision's rounding":
        before = recorded(ranks, precisions=["torch.bfloat16"])
    else:
        before = recorded(ranks)
    found = findings.two_commits(recorded(ranks, **({"last_scale": change.get("scale", 1.0)} | change)), before)
    assert sorted({each.kind for each in findings.wrong_of(found)}) == sorted(kinds), found


NEVER = float("-inf")


@pytest.mark.parametrize(
    ("before", "now", "rounding", "wrong"),
    [
        ([0.0, 0.1, 0.2], [0.0, 0.1, 0.3], None, [2]),
        ([0.0, 0.1, 0.2], [0.0, 0.1, 0.2 + 1e-7], None, []),
        ([0.0, 0.1, 0.2], [0.0, 0.1, 0.201], [(1e-3, 1e-3)], []),
        ([0.0, 0.1, 0.2], [0.0, 0.1, float("nan")], None, [2]),
        ([0.5, 0.5, 0.5], [0.5, 0.6, 0.5], None, [1]),  # of a table that does not move
        ([NEVER, NEVER, NEVER], [NEVER, NEVER, NEVER], None, []),  # a mask
    ],
)
def test_buffers_that_differ_are_another_model(before, now, rounding, wrong):
    """As another momentum of batch normalisation makes them: it changes no gradient. `before` and `now` by step."""
    recordings = []
    for values in (now, before):
        recordings.append(recorded())
        (rank,) = recordings[-1].ranks
        for noted, value in zip((rank["initial"], *rank["steps"]), values, strict=True):
            noted["buffers"] = {"norm.running_mean": sketch(value, value)}
    found = findings.wrong_of(findings.two_commits(*recordings, rounding))
    assert [(each.kind, each.step) for each in found] == [("buffer", step) for step in wrong]
    assert all("buffers are not: norm.running_mean" in each.says for each in found)


NORMALISED = "nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32, momentum=0.1), nn.ReLU(), nn.Linear(32, 4))"


@pytest.mark.slow
@pytest.mark.ci
def test_another_momentum_of_batch_normalisation_is_another_model(repository):
    edit(repository / "model.py", "nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))", NORMALISED)
    git(repository, "commit", "--quiet", "--all", "--message", "Normalise")
    edit(repository / "model.py", "momentum=0.1", "momentum=0.2")
    code, outcome, said = gated(repository)
    assert (code, outcome["verdict"]) == (1, gate.UNEQUAL), said
    assert "buffers are not: 1.running_mean, 1.running_var" in outcome["reason"]


@pytest.mark.parametrize(
    ("gradients", "weights", "says"),
    [
        ({"a": (6.0, 8.0)}, (0.5, 2.0), "in 1 of 2 weights: a, 2 times as large"),
        (
            {"a": (6.0, 8.0), "b": (1.5, 2.0)},
            (0.5, 2.0),
            "in 2 of 2 weights, the nearest to the loss is b, 0.5 times as",
        ),
        ({"b": (-3.0, 4.0)}, (0.5, 2.0), "in 1 of 2 weights: b, in another direction"),
        # Too little of the whole gradient to be seen in its norm, and not the same.
        ({"a": (0.0, 0.0)}, (0.5, 2.0), "in 1 of 2 weights: a, 0 times as large"),
    ],
)
def test_the_weight_whose_gradient_differs_is_named(gradients, weights, says):
    before, now = recorded(), recorded()
    if (0.0, 0.0) in gradients.values():
        for step in before.ranks[0]["steps"] + now.ranks[0]["steps"]:
            step["gradients"]["a"] = sketch(1e-5, 1e-5)
    now.ranks[0]["steps"][0]["gradients"] |= {name: sketch(*values) for name, values in gradients.items()}
    now.ranks[0]["steps"][0]["weights"]["a"] = sketch(*weights)
    (finding,) = findings.wrong_of(findings.two_commits(now, before))
    assert says in finding.says


class Recorded:
    """Stands for gate.Runs, with recordings that are there already: of the base, and of a change."""

    repository = Path("/nowhere")

    def __init__(self, before: Recording, now: Recording):
        self.by_name = {"main": before, "HEAD": now}

    def record(self, tree: commits.Tree) -> Recording:
        return self.by_name[tree.name]

    def rounding(self, *_) -> list:
        raise RunFailed("no replay")


def without_numbers(recorded: Recording, step: int) -> Recording:
    """A recording whose weights are no numbers from a step on, counted from 1."""
    for rank in recorded.ranks:
        for noted in rank["steps"][step - 1 :]:
            noted["weights"] = {name: [float("nan")] * 62 for name in noted["weights"]}
    return recorded


NO_NUMBERS = {
    "in both": (without_numbers(recorded(), 2), without_numbers(recorded(), 2), "step 2 .* in both commits"),
    "from the start": (without_numbers(recorded(), 1), recorded(), "step 1 .* in main"),
    "in the base, later": (without_numbers(recorded(), 2), recorded(), "step 2 .* in main"),
    "in the change alone": (recorded(), without_numbers(recorded(), 2), None),
    "in the base, after a difference": (without_numbers(recorded(), 2), recorded(dropout=[0.2]), None),
}


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_weights_that_are_no_numbers_are_compared_with_nothing(name):
    before, now, says = NO_NUMBERS[name]
    trees = [commits.Tree(each, "0", Path()) for each in ("main", "HEAD")]
    if says:
        with pytest.raises(RunFailed, match=says):
            gate._compare_models(*trees, Recorded(before, now))
    else:
        assert gate._compare_models(*trees, Recorded(before, now))[0] == gate.UNEQUAL


def test_rounding_that_was_measured_is_allowed_for():
    found = findings.two_commits(recorded(scale=1.001), recorded(), [(1e-4, 1e-4), (1e-4, 1e-4)])
    assert findings.wrong_of(found) == []
    assert findings.not_finite(recorded(scale=float("nan"))) == 1
    assert findings.not_finite(recorded()) is None


def test_junit_has_an_error_where_timing_broke_off(tmp_path):
    tree = {"name": "main", "commit": "0" * 40}
    outcome = gate.Outcome(gate.NOT_MEASURED, "\x1b[31mit broke off", tree, tree, ["python"], 0.05, model=gate.EQUAL)
    outcome.speed = gate.Speed(1.0, 0.9, 1.1, 2, gate.UNDECIDED, 3)
    gate._conclude(outcome)
    suite = ElementTree.fromstring(gate_report.junit(outcome).encode())[0]
    assert (suite.get("errors"), suite.get("skipped")) == ("1", "0")


def test_what_can_t_be_compared_is_refused_in_one_sentence(repository, tmp_path):
    with pytest.raises(BadInput, match="nothing to compare"):
        copied(repository, tmp_path)
    (repository / "left.log").write_text("of a step before", encoding="utf-8")
    with pytest.raises(BadInput, match=r"nothing to compare\. Name an earlier one.*git add them \(left\.log\)"):
        copied(repository, tmp_path)
    with pytest.raises(BadInput, match="Git does not know it"):
        commits.base_of(repository, "nowhere")
    with pytest.raises(BadInput, match="in no Git repository"):
        commits.top(tmp_path)
    edit(repository / "train.py", "lr=1e-3", "lr=1e-4")
    for shared, says in (("model.py", "Git tracks it"), ("nothing", "does not exist"), ("../x", "within")):
        with pytest.raises(BadInput, match=says):
            commits.copies(repository, "main", tmp_path / "trees", [Path(os.path.normpath(repository / shared))])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--fail-if-slower", "0.05"), "with its sign"),
        (("--blocks", "4"), "at least 5"),
        (("--minutes", "0"), "more than 0"),
        (("--warm-up", "0"), "at least 1"),
        (("--steps", "2"), "at least 3"),
        (("--patience", "nan"), "more than 0"),
        (("--fail-if-slower", f"{'9' * 400}%"), "with its sign"),
        (("--output", "."), "exists already"),
        (("--output", "/proc/nowhere/gate"), "/proc/nowhere"),
        (("python", "train.py", "--strict"), "write -- between"),
        ((), "name the command"),
    ],
)
def test_wrong_options_are_told_in_one_line(options, says, tmp_path):
    script = str(PROJECT / "workflow/scripts/gate.py")
    command = ("--", "python", "train.py") if options else ()
    finished = started([sys.executable, script, "--against", "main", *options, *command], tmp_path)
    assert finished.returncode == 2
    assert says in finished.stderr
    assert finished.stderr.count("\n") == 1


def test_a_comment_shows_the_words_of_a_script_as_they_are():
    reason = "the command failed: |<b>@somebody `x`\n"
    tree = {"name": "main", "commit": "0" * 40}
    outcome = gate.Outcome(gate.NOT_MEASURED, reason, tree, tree, ["python", "train.py"], 0.05)
    comment = gate_report.comment(outcome)
    (line,) = [line for line in comment.splitlines() if line.startswith("| why")]
    assert line.count("|") == 3
    assert "<b>" not in line
    assert "@somebody" not in line
    assert ElementTree.fromstring(gate_report.junit(outcome).encode())[0].get("errors") == "2"
