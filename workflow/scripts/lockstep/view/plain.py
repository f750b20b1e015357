"""The view for a log or a pipe: a line for each finished run, with the time left; the end of a failed job's log."""

import sys
import time

from lockstep.errors import printable
from lockstep.view import jobs
from lockstep.view.jobs import Follower, Job


class LogHandler(Follower):
    """Writes to stderr, as Snakemake does."""

    def say(self, text: str) -> None:
        for line in text.splitlines():
            if line.strip() and line != "None":
                print(printable(line).rstrip(), file=sys.stderr, flush=True)

    def planned(self) -> None:
        self.say(
            f"{self.total} jobs; a line follows for each finished run; Snakemake's own output is in .snakemake/log"
        )

    def ended_job(self, job: Job) -> None:
        if outcome := self._outcome(job):
            self.say(f"{job.message}{' ' if job.message.endswith('?') else ': '}{outcome}; {self.how_far()}")

    def _outcome(self, job: Job) -> str:
        """The outcome of a job; empty if it was not a run."""
        name, _, row = job.rule.partition("_")
        if name == "train" and (run := self.run(*jobs.trained(job.rule))):
            return "; ".join([f"{run['seconds']:.2f} s", *(f"disturbed: {reason}" for reason in run["disturbed"])])
        if name == "prove" and row in self.config.rows:
            return self.verdict(row)
        if name in ("prepare", "profile", "prove"):
            return jobs.format_duration(time.monotonic() - job.began)
        return ""
