"""Record, as text, what a terminal shows while the benchmark runs: docs/terminal.md. Needs tmux.

    python docs/record_terminal.py

A small benchmark of four rows runs in a clone of its own. One row fails, and one is disturbed by a program that takes
the cores while it trains. This is recorded in terminals of 80, 100 and 140 columns.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
PAGE = PROJECT / "docs" / "terminal.md"
LINES = 40
CONFIG = """
data: {limit: 3000}
model: {hidden_size: 64, layers: 1}
train: {epochs: 8, eval_every: 0, checkpoint: last}
hardware: {device: cpu, processes: 2, oversubscribe: true}
profile: {steps: 0}
predict: {count: 2}
repeats: 2
retries: 0
rows:
  all_threads: null
  accelerate: null
  dataparallel: null
  ddp_amp: null
  horovod: null
  deepspeed: null
  trainer: null
  fabric: null
  fsdp: null
  exploding: {strategy: single, learning_rate: 1.0e+30, clip: 0}
"""
DISTURBED = "ddp_spawn"
HEAD = """# What the terminal shows

Recorded with tmux by `python docs/record_terminal.py`: a small benchmark in two blocks. The row `exploding` is made to
fail; while `{disturbed}` trained in the second block, another program took the cores.
"""


def main() -> None:
    page = [HEAD.format(disturbed=DISTURBED)]
    for columns in (80, 100, 140):
        during, after = recorded(columns)
        page += [f"## {columns} columns\n", "While it runs:\n", block(during), "At the end:\n", block(after)]
    PAGE.write_text("\n".join(page), encoding="utf-8")


def block(screen: str) -> str:
    return f"```text\n{screen}\n```\n"


def recorded(columns: int) -> tuple[str, str]:
    """Two screens: one of the second block, after its run was disturbed, and one after the end of the benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "lockstep"
        subprocess.run(["git", "clone", "--quiet", PROJECT, clone], check=True)
        (clone / "small.yaml").write_text(CONFIG, encoding="utf-8")
        session = f"lockstep-{os.getpid()}-{columns}"
        snakemake = Path(sys.executable).with_name("snakemake")
        command = f"{snakemake} --configfile small.yaml; echo the end; sleep 60"
        size = ["-x", str(columns), "-y", str(LINES)]
        subprocess.run(["tmux", "new-session", "-d", "-s", session, *size, "-c", clone, command], check=True)
        try:
            return follow(session, clone)
        finally:
            subprocess.run(["tmux", "kill-session", "-t", session], check=False)


def follow(session: str, clone: Path) -> tuple[str, str]:
    during, busy = "", []
    try:
        while True:
            shown = screen(session)
            if re.search(r"^the end$", shown, re.MULTILINE):
                return during, screen(session, whole=True).removesuffix("the end").rstrip()
            if "disturbed" in shown and "1 failed" in shown and "repetition 2" in shown:
                during = shown
            log = clone / "results" / "runs" / DISTURBED / "n2" / "rep2" / "run.log"
            if not busy and log.is_file():
                busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
            if busy and (log.parent / "record.json").is_file():
                end(busy)
            time.sleep(0.5)
    finally:
        end(busy)


def end(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def screen(session: str, whole: bool = False) -> str:
    """The text in the terminal; if `whole`, with the lines that have scrolled away."""
    capture = ["tmux", "capture-pane", "-p", "-J", "-t", session, *(["-S", "-"] if whole else [])]
    text = subprocess.run(capture, capture_output=True, text=True, check=True).stdout
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")


if __name__ == "__main__":
    main()
