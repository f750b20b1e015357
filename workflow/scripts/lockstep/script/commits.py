"""Two states of a user's Git repository side by side: copies of the working tree and of another commit.

Both copies are in a temporary folder, so that the user's own tree is only read, and so that both are alike: neither has
build products or files of earlier runs. Git's objects are not copied.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.errors import BadInput, listed


@dataclass
class Tree:
    """A copy of a repository in one state. name: what a reader calls it; commit: the hash that it is based on."""

    name: str
    commit: str
    folder: Path
    kept: frozenset[Path] = frozenset()
    shared: list[Path] = field(default_factory=list)  # within it, which are links to the user's own

    def link(self, repository: Path) -> None:
        """Link all shared paths to the user's own."""
        for name in self.shared:
            target = self.folder / name
            if target.is_dir() and not target.is_symlink():
                target.rmdir()  # a submodule's empty folder
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(repository / name)

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
        if not _names(self.folder, "ls-files", "-z"):
            return  # a commit without files, of which Git restores none
        # A link that stands for a submodule would be replaced by an empty folder.
        links = [f":(exclude,top,literal){name}" for name in self.shared]
        _git(self.folder, "checkout", "--quiet", "--force", "HEAD", "--", ".", *links)

    def contents(self) -> dict[str, str]:
        """The hash of each file, by its path within the tree; shared ones are not among them."""
        lines = (line.partition("\t") for line in _names(self.folder, "ls-files", "-z", "--stage"))
        return {path: about.split()[1] for about, _, path in lines}

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

    A later commit on that branch is no change of HEAD's. Raises BadInput for a name that Git does not know, and if no
    common commit is known.
    """
    for name in (reference, f"origin/{reference}"):
        commit = _git(repository, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", check=False)
        if commit and (common := _git(repository, "merge-base", commit, "HEAD", check=False)):
            return common
        if commit:
            raise BadInput(f"--against {reference}: it has no known commit in common with HEAD. {FETCH}")
    raise BadInput(f"--against {reference}: Git does not know it here. {FETCH}")


def copies(repository: Path, reference: str, into: Path, shared: list[Path]) -> tuple[Tree, Tree]:
    """Copies of the base (see `base_of`) and of the working tree, with all changes that are not committed.

    shared: paths within the repository that Git ignores and both need (data); both link to the user's.
    """
    commit, head = base_of(repository, reference), _git(repository, "rev-parse", "HEAD")
    changed = bool(_git(repository, "status", "--porcelain", "--untracked-files=normal"))
    # Neither copy has submodules, and a new file alone (what a build or an earlier step of a job left) is rarely run.
    tracked = _git(repository, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
    if commit == head and not tracked:
        new = _names(repository, "ls-files", "-z", "--others", "--exclude-standard")
        raise BadInput(
            f"--against {reference}: it has this same commit ({head[:10]}), and no file that Git tracks is changed"
            " since, so there is nothing to compare. Name an earlier one, as HEAD~1"
            + (f"; if new files are the change, git add them ({listed(new, most=3)})" if new else "")
        )
    base = Tree(reference, commit, into / "base")
    ours = Tree("the working tree" if changed else "HEAD", head, into / "ours")
    for path in shared:
        _refuse(path, repository, (base, ours))
    names = [path.relative_to(repository) for path in shared]
    for tree in (base, ours):
        _check_out(repository, tree)
    if changed:
        _copy_changes(repository, ours.folder, names)
    for tree in (base, ours):
        tree.shared = names
        tree.link(repository)
        tree.keep_present_files()
    return base, ours


def lacks(tree: Tree) -> list[str]:
    """The folders of submodules, which a copy has only if they are shared."""
    lines = _names(tree.folder, "ls-files", "-z", "--stage")
    modules = [line.partition("\t")[2] for line in lines if line.startswith("160000 ")]
    return [name for name in modules if not (tree.folder / name).is_symlink()]


FETCH = (
    "Fetch its history (in a CI job, check out all of it; for actions/checkout that is fetch-depth: 0, for GitLab"
    " GIT_DEPTH: 0)"
)


def _check_out(repository: Path, tree: Tree) -> None:
    """A repository of its own that borrows the user's objects; unlike a worktree, it leaves no trace in the user's."""
    tree.folder.mkdir(parents=True)
    _git(tree.folder, "init", "--quiet", "--template=")  # without the user's hooks
    objects, common = (
        _git(repository, "rev-parse", "--path-format=absolute", *what)
        for what in (("--git-path", "objects"), ("--git-common-dir",))
    )
    (tree.folder / ".git/objects/info").mkdir(exist_ok=True)
    (tree.folder / ".git/objects/info/alternates").write_text(f"{objects}\n", encoding="utf-8")
    _git(tree.folder, "config", "lfs.storage", str(Path(common) / "lfs"))
    filters = _git(repository, "config", "--local", "--get-regexp", r"^filter\.", check=False)
    for key, _, value in (line.partition(" ") for line in filters.splitlines()):
        _git(tree.folder, "config", key, value)
    _fetch_contents(repository, tree.commit)
    _git(tree.folder, "checkout", "--quiet", "--detach", tree.commit)


def _fetch_contents(repository: Path, commit: str) -> None:
    """Let a partial clone, as `git clone --filter=blob:none` makes it, fetch all files of a commit.

    It fetches what is missing when it is read, and all of it at once for a comparison with a commit without files.
    """
    if _git(repository, "config", "--get-regexp", r"^remote\..*\.promisor$", check=False):
        nothing = _git(repository, "hash-object", "-t", "tree", os.devnull)
        _git(repository, "diff-tree", "-r", "--numstat", nothing, commit)


def _copy_changes(repository: Path, folder: Path, shared: list[Path]) -> None:
    """Make a copy of HEAD one of the working tree: tracked files, and others that Git does not ignore."""
    for path in folder.iterdir():
        if path.name != ".git":
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    # A sparse checkout has not all files of its commit, which are no deletions.
    skipped = [name[2:] for name in _names(repository, "ls-files", "-z", "-t") if name.startswith("S ")]
    absent = [name for name in skipped if not os.path.lexists(repository / name)]
    if absent:
        list_of = os.fsencode("\0".join(absent))
        _run(folder, "--literal-pathspecs", "checkout", "HEAD", *FROM_A_LIST, given=list_of)
    for name in _names(repository, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"):
        source, target = repository / name, folder / name
        beneath = [repository / part for part in Path(name).parents]
        if not os.path.lexists(source) or any(part.is_symlink() for part in beneath if part != repository):
            continue  # deleted, or a folder of it has become a link
        if source.is_dir() and not source.is_symlink():
            target.mkdir(parents=True, exist_ok=True)  # a submodule or another repository
        elif not any(Path(name).is_relative_to(path) for path in shared):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    # Large files are kept as they are: by Git LFS's filter they would go into the user's own store.
    plain = ("-c", "filter.lfs.clean=", "-c", "filter.lfs.process=", "-c", "filter.lfs.required=false")
    _git(folder, *plain, "add", "--all", "--force", ".")
    author = ("-c", "user.name=lockstep", "-c", "user.email=lockstep@localhost", "-c", "commit.gpgsign=false")
    _git(folder, *author, "commit", "--quiet", "--no-verify", "--allow-empty", "--message", "The working tree")


FROM_A_LIST = ("--pathspec-from-file=-", "--pathspec-file-nul")


def _refuse(path: Path, repository: Path, trees: tuple[Tree, Tree]) -> None:
    """Raise BadInput unless a path can be shared: Git ignores it, or it is a submodule that both commits have alike."""
    if not path.is_relative_to(repository) or path == repository:
        raise BadInput(f"--share {path}: name a path within {repository}")
    if not path.exists():
        raise BadInput(f"--share {path}: it does not exist")
    name = str(path.relative_to(repository))
    entries = [_git(repository, "ls-tree", tree.commit, "--", name) for tree in trees]
    if not any(entries) and not _git(repository, "ls-files", "--", name):
        return
    if not all(entry.startswith("160000 ") for entry in entries):
        raise BadInput(f"--share {path}: Git tracks it, so that each commit has its own. Leave it out")
    present = [_git(path, "rev-parse", "HEAD"), _git(path, "status", "--porcelain")]
    if entries[0] != entries[1] or present != [entries[0].split()[2], ""]:
        raise BadInput(f"--share {path}: this submodule is not the same in both commits, so it can't be shared")


def _names(folder: Path, *words: str) -> list[str]:
    """The names that Git lists with -z, however they are encoded."""
    return [os.fsdecode(name) for name in _run(folder, *words).stdout.split(b"\0") if name]


def _git(folder: Path, *words: str, check: bool = True) -> str:
    """What Git says; with check=False nothing if it fails."""
    finished = _run(folder, *words, check=check)
    return "" if finished.returncode else os.fsdecode(finished.stdout.removesuffix(b"\n"))


# Variables that a Git hook has, by which these commands would work on another repository or index.
OF_A_HOOK = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_PREFIX")
OF_A_HOOK += ("GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_NAMESPACE")


def _run(folder: Path, *words: str, check: bool = True, given: bytes = b"") -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_HOOK}
    command = ["git", "--no-optional-locks", "-c", "core.hooksPath=/dev/null", "-C", str(folder), *words]
    try:
        finished = subprocess.run(command, input=given, capture_output=True, env=environment, check=False)
    except FileNotFoundError:
        raise BadInput("git is not installed, and the commits to compare are Git's") from None
    if finished.returncode and check:
        raise BadInput(f"git {words[0]}: {finished.stderr.decode(errors='replace').strip() or 'it failed'}")
    return finished
