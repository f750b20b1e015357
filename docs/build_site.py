"""Build the guide as a site, in English and Chinese: make site

The pages are where GitHub shows them: README.md, config/, docs/ and records/. MkDocs needs them in a folder of their
own, so this program copies them there, under the same paths, and adds what only a site needs. Drawings become part of
their page, where they take its colours, and each file of the project that a page links to becomes a page, too.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
READMES = {"README.md": "README.md", "README.zh-CN.md": "README.zh.md"}
READMES |= {name: name for name in ("config/README.md", "records/README.md")}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
# The end of a line within a Chinese sentence, which a browser would show as a blank.
WRAPPED = re.compile(r"(?<=[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef])\n(?=[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef])")
DRAWING = re.compile(r"^!\[([^\]]*)\]\((\S+\.svg)\)$", re.MULTILINE)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        gather(Path(folder))
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", *sys.argv[1:]]
        environment = os.environ | {"LOCKSTEP_PAGES": folder, "NO_MKDOCS_2_WARNING": "1"}
        built = subprocess.run(command, cwd=PROJECT, env=environment, check=False)
    if not built.returncode and len(sys.argv) == 1:
        print("the guide: site/index.html, and in Chinese site/zh/index.html")
    return built.returncode


def pages() -> Iterator[tuple[Path, str]]:
    """Each page with the path of its copy, relative to the folder of the copies."""
    for page, place in READMES.items():
        yield PROJECT / page, place
    for page in sorted((PROJECT / "docs").rglob("*.md")):
        yield page, page.relative_to(PROJECT).as_posix()


def gather(folder: Path) -> None:
    """Copy all pages and pictures into the folder that MkDocs reads."""
    places = {page: folder / place for page, place in pages()}
    for page, copy in places.items():
        text = page.read_text(encoding="utf-8")
        text = DRAWING.sub(lambda match, page=page: drawn(page.parent / match[2], match[1]), text)
        text = LINK.sub(lambda match, page=page: linked(match, page, places, folder), text)
        write(copy, WRAPPED.sub("", text))
    for file in (file for kind in ("png", "css", "svg") for file in (PROJECT / "docs").rglob(f"*.{kind}")):
        copy = folder / file.relative_to(PROJECT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def drawn(file: Path, label: str) -> str:
    """A drawing as part of the page, with a label for those who can't see it, and without the style for GitHub."""
    text = re.sub(r"<style>.*?</style>\n?", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
    named = text.strip().replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return f'<div class="drawn" tabindex="0">\n{named}\n</div>'


def linked(match: re.Match, page: Path, places: dict[Path, Path], folder: Path) -> str:
    """A link as it is on the site: unchanged if it leads to a page; else it leads to a page that shows the linked file.

    Links to folders, which have no page, and to the other language, which the site's header has, become plain text. A
    link that leads nowhere stays as it is, so that MkDocs refuses it.
    """
    label, target = match[1], (page.parent / match[2]).resolve()
    if target.is_dir() or {page.name, target.name} == {"README.md", "README.zh-CN.md"}:
        return label
    if target in places or not target.is_file() or not target.is_relative_to(PROJECT) or target.suffix == ".png":
        return match[0]
    name = target.relative_to(PROJECT).as_posix()
    shown = folder / "source" / (name.replace(".", "_") + ".md")
    if not shown.exists():
        kind = {".py": "python", ".yaml": "yaml"}.get(target.suffix, "text")
        code = target.read_text(encoding="utf-8")
        write(shown, f"---\nsearch: {{exclude: true}}\n---\n# {name}\n\n~~~~~~{kind}\n{code}~~~~~~\n")
    return f"[{label}]({os.path.relpath(shown, places[page].parent)})"


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
