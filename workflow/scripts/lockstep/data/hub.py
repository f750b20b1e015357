"""Fetch files from the Hugging Face hub, or from a mirror of it (HF_ENDPOINT), and check their hashes.

The hub's library fetches files, resumes interrupted downloads and compares sizes, but not hashes. A file with wrong
bytes would stay in its cache forever, so it is removed here.
"""

import functools
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import (
    HfApi,
    HfFileSystem,
    constants,
    errors,
    get_session,
    get_token,
    hf_hub_download,
    set_client_factory,
    snapshot_download,
)
from huggingface_hub.utils import httpx

from lockstep.config import containers
from lockstep.errors import BadInput, brief, no_room
from lockstep.files import hash_file

COMMIT = re.compile("[0-9a-f]{40}")
AGAIN = "Start again; if it happens again, name another mirror (HF_ENDPOINT)."
UNREACHABLE = (httpx.TransportError, ConnectionError)


class WrongHash(Exception):
    """A file was downloaded completely, but its content is not the expected one."""


def fetch_model(name: str, revision: str, patterns: list[str]) -> Path:
    """Fetch a model's files of these patterns at one revision, and return their folder in the hub's cache.

    Files in the cache are not fetched again. Raises BadInput if a file can't be fetched or has another hash.
    """
    resume_after_reset()
    inside = ["*/*"]  # many repositories have subfolders with the same model in other formats
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=inside))
        for file in sorted({file for pattern in patterns for file in folder.glob(pattern)}):
            check(file)
    except Exception as error:  # the network, the hub, its library and the disk each raise their own
        if no_room(error):
            raise
        reason = why(error) + containers.outside(name)
        raise BadInput(f"model.name: {name} at revision {revision} can't be loaded: {reason}") from None
    return folder


def fetch_rows(urls: list[str]) -> None:
    """Fetch a data set's files (hf://datasets/name@revision/file) into the hub's cache, and check them.

    Raises WrongHash, and whatever the hub's library raises.
    """
    resume_after_reset()
    files = HfFileSystem()
    for url in urls:
        resolved = files.resolve_path(url)
        kind, revision = resolved.repo_type, resolved.revision
        check(Path(hf_hub_download(resolved.repo_id, resolved.path_in_repo, repo_type=kind, revision=revision)))


def check(file: Path) -> None:
    """Remove a file from the hub's cache and raise WrongHash if its content has another hash than the hub says.

    The cache has a symbolic link to the content, whose name is its hash: sha256 for large files, git's SHA-1 of a blob
    for others (with some mirrors, SHA-1 of the bytes alone). A file with another name can't be checked.
    """
    content = file.resolve()
    if re.fullmatch("[0-9a-f]{64}", content.name):
        actual = {hash_file(content)}
    elif COMMIT.fullmatch(content.name):
        whole = content.read_bytes()
        actual = {hashlib.sha1(begin + whole).hexdigest() for begin in (b"blob %d\0" % len(whole), b"")}
    else:
        return
    if content.name in actual:
        return
    file.unlink()
    content.unlink(missing_ok=True)
    kind = "sha256" if len(content.name) == 64 else "SHA-1"
    raise WrongHash(
        f"{file.name} has the {kind} {min(actual)}, not {content.name} as {constants.ENDPOINT} says, and was"
        f" removed. {AGAIN}"
    )


@functools.cache  # the library keeps what it is told here
def resume_after_reset() -> None:
    """Make the hub's library resume a download whose connection was reset, as it does if a connection was closed.

    Firewalls reset connections. The library would otherwise give up and discard the part that it has.
    """

    class Ended(httpx.SyncByteStream):
        def __init__(self, stream):
            self.stream = stream

        def __iter__(self):
            try:
                yield from self.stream
            except httpx.ReadError as error:
                raise httpx.RemoteProtocolError(str(error) or "connection reset") from error

        def close(self):
            self.stream.close()

    def replace_stream(response) -> None:
        response.stream = Ended(response.stream)

    usual = get_session()  # the client that the library makes by itself
    hooks = usual.event_hooks | {"response": [*usual.event_hooks["response"], replace_stream]}

    def client():
        return httpx.Client(event_hooks=hooks, follow_redirects=usual.follow_redirects, timeout=usual.timeout)

    set_client_factory(client)


def why(error: BaseException) -> str:
    """Why a file of the hub can't be fetched, and what to do, in one line."""
    return _known(error) or brief(error)


def why_no_rows(error: BaseException, name: str, revision: str) -> str:
    """Why a data set can't be fetched. The datasets library hides the hub's answer, so the hub is asked again."""
    reason = _known(error)
    if not reason and not Path(name).is_dir():
        try:
            HfApi().dataset_info(name, revision=revision)
        except Exception as answer:
            reason = _known(answer)
    return reason or brief(error)


def _known(error: BaseException) -> str | None:
    for cause in _causes(error):
        if isinstance(cause, WrongHash):
            return str(cause)
        if isinstance(cause, errors.HFValidationError):
            return (
                "it is neither a folder here nor a possible name on the hub. Name a folder, or a model as owner/name."
            )
        if "Consistency check failed" in str(cause):
            sizes = str(cause).splitlines()[0]
            return f"a file came with another size than {constants.ENDPOINT} says ({sizes}). {AGAIN}"
        offline = constants.HF_HUB_OFFLINE and isinstance(cause, UNREACHABLE)  # the error that datasets raises then
        if offline or isinstance(cause, errors.OfflineModeIsEnabled):
            cache = constants.HF_HUB_CACHE
            return f"it is not in {cache}, and HF_HUB_OFFLINE forbids fetching it. Unset HF_HUB_OFFLINE."
        if getattr(cause, "response", None) is not None:
            return _refused(cause, cause.response.status_code)
        if isinstance(cause, UNREACHABLE):
            how = containers.offline() or (
                " Check the network and the proxy (https_proxy), or name a mirror of the hub: HF_ENDPOINT."
            )
            return f"{constants.ENDPOINT} can't be reached, or ended the connection ({brief(cause)}).{how}"
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _refused(error: Exception, status: int) -> str:
    hub = constants.ENDPOINT
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{hub} has no such revision of it. Take a commit hash from its page there."
    if status in (401, 403):
        token = "the token in HF_TOKEN has no access" if get_token() else "it is private or gated, or does not exist"
        return f"{hub} refuses it ({status}): {token}. Check the name, ask for access on its page, and set HF_TOKEN."
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{hub} has no repository of that name ({status}). Check the name."
    if status == 429:
        return f"{hub} asks for fewer requests (429). Start again in some minutes, or set HF_TOKEN to a token of yours."
    if status >= 500:
        return f"{hub} is out of order ({status}). Start again later, or name a mirror of it: HF_ENDPOINT."
    return f"{hub} answers {status} to {error.response.url}. Is it a hub, or a mirror of one (HF_ENDPOINT)?"
