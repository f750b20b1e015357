"""Commands in forks of a server (tests/fork_server.py) do as those in processes of their own do."""

import subprocess
import time

import psutil
import pytest

from tests import fork_server
from tests.conftest import copy_project


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = copy_project(tmp_path_factory.mktemp("forks"))
    scripts = {
        "says": "import os, sys\nprint(os.getcwd(), sys.argv[1:], os.environ.get('ASKED'))\nsys.exit('wrong')\n",
        "raises": "import sys\nprint('lockstep' in str(sys.path[0]))\nraise ValueError('this')\n",
        "kills": "import os\nos.kill(os.getpid(), 9)\n",
        "hangs": "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n",
        "imports": "import sys\nfrom lockstep import paths\nprint(paths.PROJECT, 'torch' in sys.modules)\n",
    }
    for name, code in scripts.items():
        place.path(f"workflow/scripts/{name}.py").write_text(code, encoding="utf-8")
    return place


@pytest.mark.parametrize(("name", "arguments"), [("says", ("a b", "--c=1")), ("raises", ()), ("kills", ())])
def test_a_fork_ends_and_says_as_a_process_does(place, name, arguments, monkeypatch):
    monkeypatch.setenv("ASKED", "yes")
    forked = place.script(name, *arguments)
    process = place.run("python", f"workflow/scripts/{name}.py", *arguments)
    assert (forked.returncode, forked.stdout) == (process.returncode, process.stdout)
    assert forked.stderr.splitlines()[-1:] == process.stderr.splitlines()[-1:]


def test_the_project_is_the_copy_and_pytorch_is_there_already(place):
    assert place.script("imports").stdout == f"{place.folder} True\n"


def test_a_fork_whose_time_is_over_is_ended(place):
    with pytest.raises(subprocess.TimeoutExpired) as ended:
        place.script("hangs", timeout=2)
    pid = int(ended.value.output)
    for _ in range(100):
        if not psutil.pid_exists(pid):
            return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} is still there")


def test_a_server_that_a_test_has_ended_is_started_again(place):
    assert place.script("imports").returncode == 0
    before = fork_server._server()
    running = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    (server,) = [each for each in running if "fork_server.py" in " ".join(each.cmdline())]
    server.kill()
    server.wait()
    assert place.script("imports").returncode == 0
    assert fork_server._server() != before
