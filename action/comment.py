"""Keep one comment on a pull request up to date: python comment.py FOLDER NAME, with FOLDER/gate.md.

It is edited in place. A first comment is written only if there is something to say: a gate that passed is silent until
it has once not passed. It needs Python's standard library alone, and GitHub's variables of a job: GITHUB_API_URL,
GITHUB_REPOSITORY, GITHUB_EVENT_PATH and GITHUB_TOKEN. Nothing else is asked of the token than comments.
(REST API endpoints for issue comments: https://docs.github.com/en/rest/issues/comments)
"""

import http.client
import json
import os
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path

PAGE = 100  # comments; the most that GitHub sends at once


def main() -> int:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    number = _pull_request()
    if number is None:
        print("no comment: this job is not of a pull request")
        return 0
    mark = f"<!-- lockstep gate: {re.sub('-(?=-)', '- ', json.dumps(name))} -->"  # a name can't end it
    # The first line of gate.md is the mark of a gate without a name.
    body = "\n".join([mark, *(folder / "gate.md").read_text(encoding="utf-8").splitlines()[1:]]) + "\n"
    verdict = json.loads((folder / "gate.json").read_text(encoding="utf-8"))["verdict"]
    try:
        print(_keep(number, mark, body, silent=verdict == "passed"))
    except urllib.error.HTTPError as error:
        # As for a pull request from a fork, whose token can only read; the job's summary has the same.
        print(f"::notice::no comment: GitHub refused it ({error.code}); see the job's summary")
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(f"::notice::no comment: GitHub does not answer ({error}); see the job's summary")
    return 0


def _keep(number: int, mark: str, body: str, silent: bool) -> str:
    repository = os.environ["GITHUB_REPOSITORY"]
    comment = _first(f"/repos/{repository}/issues/{number}/comments", mark)
    if comment is None and silent:
        return "no comment: it passed, as before"
    if comment is None:
        _ask("POST", f"/repos/{repository}/issues/{number}/comments", {"body": body})
        return "comment written"
    if comment["body"].replace("\r\n", "\n").strip() == body.strip():
        return "the comment says this already"
    _ask("PATCH", f"/repos/{repository}/issues/comments/{comment['id']}", {"body": body})
    return "comment edited"


def _pull_request() -> int | None:
    file = os.environ.get("GITHUB_EVENT_PATH")
    event = json.loads(Path(file).read_text(encoding="utf-8")) if file else {}
    return event.get("pull_request", {}).get("number")


def _first(path: str, mark: str) -> dict | None:
    """The first comment that begins with a mark."""
    page = 1
    while True:
        comments = _ask("GET", f"{path}?per_page={PAGE}&page={page}")
        for comment in comments:
            if (comment.get("body") or "").startswith(mark) and _may_write_here(comment):
                return comment
        if len(comments) < PAGE:
            return None
        page += 1


def _may_write_here(comment: dict) -> bool:
    """Whether a comment is of a job or of a member: anybody else could begin one with a gate's mark."""
    trusted = comment.get("author_association") in ("OWNER", "MEMBER", "COLLABORATOR")
    author = comment.get("user") or {}  # null where somebody's account is gone
    return author.get("type") == "Bot" or trusted


def _ask(method: str, path: str, about: dict | None = None):
    request = urllib.request.Request(
        os.environ["GITHUB_API_URL"] + path,
        data=None if about is None else json.dumps(about).encode(),
        method=method,
        headers={
            "Authorization": f"Bearer {os.environ['GITHUB_TOKEN']}",
            "Accept": "application/vnd.github+json",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


if __name__ == "__main__":
    sys.exit(main())
