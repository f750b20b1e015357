"""Two states of a user's Git repository side by side: copies of the working tree and of another commit.

Both copies are in a temporary folder, so that the user's own tree is only read, and so that both are alike: neither has
build products or files of earlier runs. Git's objects are not copied.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import BadInput


@dataclass
class Tree:
    """A copy of a repository in one state. name: what a reader calls it; commit: the hash that it is based on."""

    name: str
    commit: str
    folder: Path
    kept: frozenset[Path] = frozenset()

    def keep_present_files(self) -> None:
        """Let `reset` keep all files that are present now."""
        self.kept = frozenset(self._present())

    def reset(self) -> None:
        """Remove what a run has written, and restore what it changed, so that no run starts from another's files."""
        for path in sorted(set(self._present()) - self.kept):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)  # its folder may be gone
        _git(self.folder, "checkout", "--quiet", "--force", "HEAD", "--", ".")

    def _present(self) -> Iterator[Path]:
        """All files and folders but Git's and compiled Python files, which only speed up the start."""
        for folder, folders, files in os.walk(self.folder):
            folders[:] = [name for name in folders if name not in (".git", "__pycache__")]
            yield from (Path(folder, name) for name in (*folders, *files))


def top(folder: Path) -> Path:
    """The folder of the Git repository that contains `folder`. Raises BadInput if there is none."""
    try:
        return Path(_git(folder, "rev-parse", "--show-toplevel")).resolve()
    except BadInput as error:
        raise BadInput(f"{folder} is in no Git repository, so there is no commit to compare with ({error})") from None


def base_of(repository: Path, reference: str) -> str:
    """The commit to compare with: where HEAD's history and that of `reference` (a branch, tag or commit) part.

    A later commit on that branch is no change of HEAD's. Without a common history (a shallow clone) it is the
    reference's own commit. Raises BadInput for a name that Git does not know.
    """
    for name in (reference, f"origin/{reference}"):
        commit = _git(repository, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", check=False)
        if commit:
            return _git(repository, "merge-base", commit, "HEAD", check=False) or commit
    raise BadInput(
        f"--against {reference}: Git does not know it here. Fetch it: git fetch origin {reference} (in a CI job, check"
        " out the whole history; for actions/checkout that is fetch-depth: 0)"
    )


def copies(repository: Path, reference: str, into: Path, shared: list[str]) -> tuple[Tree, Tree]:
    """Copies of the base (see `base_of`) and of the working tree, with all changes that are not committed.

    shared: paths within the repository that Git ignores and both need (data); both link to the user's.
    """
    commit, head = base_of(repository, reference), _git(repository, "rev-parse", "HEAD")
    changed = bool(_git(repository, "status", "--porcelain"))
    if commit == head and not changed:
        raise BadInput(
            f"--against {reference}: it has this same commit ({head[:10]}), and nothing is changed since, so there is"
            " nothing to compare. Name an earlier one, as HEAD~1"
        )
    base = Tree(reference, commit, into / "base")
    ours = Tree("the working tree" if changed else "HEAD", head, into / "ours")
    for tree in (base, ours):
        _check_out(repository, tree)
    if changed:
        _copy_changes(repository, ours.folder)
    for tree in (base, ours):
        _share(repository, tree.folder, shared)
        tree.keep_present_files()
    return base, ours


def _check_out(repository: Path, tree: Tree) -> None:
    """A repository of its own that borrows the user's objects; unlike a worktree, it leaves no trace in the user's."""
    tree.folder.mkdir(parents=True)
    _git(tree.folder, "init", "--quiet", "--template=")  # without the user's hooks
    objects, large = (
        _git(repository, "rev-parse", "--path-format=absolute", "--git-path", name) for name in ("objects", "lfs")
    )
    (tree.folder / ".git/objects/info").mkdir(exist_ok=True)
    (tree.folder / ".git/objects/info/alternates").write_text(f"{objects}\n", encoding="utf-8")
    _git(tree.folder, "config", "lfs.storage", large)
    _git(tree.folder, "checkout", "--quiet", "--detach", tree.commit)


def _copy_changes(repository: Path, folder: Path) -> None:
    """Make a copy of HEAD one of the working tree: tracked files, and others that Git does not ignore."""
    listed = ("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate")
    here = {name for name in _git(repository, *listed).split("\0") if name and os.path.lexists(repository / name)}
    for name in _git(folder, "ls-files", "-z").split("\0"):
        if name and name not in here:
            (folder / name).unlink()
    for name in here:
        source, target = repository / name, folder / name
        if source.is_dir() and not source.is_symlink():
            continue  # a submodule or another repository
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)
    _git(folder, "add", "--all", "--force", ".")
    author = ("-c", "user.name=lockstep", "-c", "user.email=lockstep@localhost", "-c", "commit.gpgsign=false")
    _git(folder, *author, "commit", "--quiet", "--no-verify", "--allow-empty", "--message", "The working tree")


def lacks(tree: Tree) -> list[str]:
    """The folders of submodules, which a copy has only if they are shared."""
    listed = _git(tree.folder, "ls-files", "--stage").splitlines()
    modules = [line.partition("\t")[2] for line in listed if line.startswith("160000 ")]
    return [name for name in modules if not (tree.folder / name).is_symlink()]


def _share(repository: Path, folder: Path, shared: list[str]) -> None:
    for name in shared:
        source = Path(os.path.abspath(repository / name))
        if not source.is_relative_to(repository) or source == repository:
            raise BadInput(f"--share {name}: name a path within {repository}")
        if not source.exists():
            raise BadInput(f"--share {name}: {source} does not exist")
        target = folder / source.relative_to(repository)
        if target.is_dir() and not target.is_symlink() and not any(target.iterdir()):
            target.rmdir()  # a submodule's folder
        if os.path.lexists(target):
            raise BadInput(f"--share {name}: Git tracks it, so that each commit has its own. Leave it out")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source)


def _git(folder: Path, *words: str, check: bool = True) -> str:
    # Variables of a hook or of another repository would redirect these commands.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        command = ["git", "--no-optional-locks", "-C", str(folder), *words]
        finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    except FileNotFoundError:
        raise BadInput("git is not installed, and the commits to compare are Git's") from None
    if finished.returncode and check:
        raise BadInput(f"git {words[0]}: {finished.stderr.strip() or 'it failed'}")
    return "" if finished.returncode else finished.stdout.strip("\n")
