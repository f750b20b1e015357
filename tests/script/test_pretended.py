"""The compiled libraries of pretended GPUs: kept, and compiled anew after a change."""

import shutil

import pytest

from lockstep.errors import BadInput
from lockstep.script import pretended


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Copied sources and an empty cache; the folders that were compiled into, without a compiler."""
    folders = []

    def compile_into(folder):
        folder.mkdir()
        folders.append(folder)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(pretended, "PARTS", shutil.copytree(pretended.PARTS, tmp_path / "parts"))
    monkeypatch.setattr(pretended, "_compile", compile_into)
    return folders


def test_libraries_are_compiled_once(compiled, tmp_path):
    folder = pretended.libraries()
    assert folder.is_dir()
    assert folder.is_relative_to(tmp_path / "cache")
    assert pretended.libraries() == folder
    assert len(compiled) == 1


@pytest.mark.parametrize("change", ["gpus.cpp", "sizes.h", "new.h", "the flags", "PyTorch"])
def test_they_are_compiled_again_after_a_change(compiled, monkeypatch, change):
    before = pretended.libraries()
    if change == "the flags":
        monkeypatch.setattr(pretended, "FLAGS", ("-O2",))
    elif change == "PyTorch":
        monkeypatch.setattr("torch.__version__", "0.1")
    else:
        with (pretended.PARTS / change).open("a", encoding="utf-8") as file:
            file.write("// changed\n")
    assert pretended.libraries() != before
    assert len(compiled) == 2


def test_what_python_only_loads_is_not_compiled_again(compiled):
    before = pretended.libraries()
    (pretended.PARTS / "torch_cuda.py").write_text("changed", encoding="utf-8")
    assert pretended.libraries() == before


def test_sources_that_fail_to_compile_leave_nothing_behind(compiled, monkeypatch, tmp_path):
    def fail(folder):
        folder.mkdir()
        raise BadInput("--gpus: as if a source were wrong")

    monkeypatch.setattr(pretended, "_compile", fail)
    with pytest.raises(BadInput, match="as if"):
        pretended.libraries()
    assert list((tmp_path / "cache" / "lockstep").iterdir()) == []
