"""What comes from the Hugging Face hub, or from a mirror of it (HF_ENDPOINT), checked against its hash.

The hub's own library fetches it, goes on where a connection was cut, and compares sizes. It compares no hashes, and a
file with other bytes would stay in its cache for good: here such a file is removed.
"""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import (
    HfApi,
    HfFileSystem,
    constants,
    errors,
    get_token,
    hf_hub_download,
    set_client_factory,
    snapshot_download,
)
from huggingface_hub.utils import httpx
from huggingface_hub.utils._http import default_client_factory

from lockstep.config import containers
from lockstep.errors import BadInput, brief, no_room
from lockstep.files import hash_file

COMMIT = re.compile("[0-9a-f]{40}")
AGAIN = "Start again, and name another mirror (HF_ENDPOINT) where it comes like that again."
UNREACHABLE = (httpx.TransportError, ConnectionError)


class WrongHash(Exception):
    """A file has come whole, and holds something else."""


def fetch_model(name: str, revision: str, patterns: list[str]) -> Path:
    """The folder in the hub's cache that holds a model's files of these patterns, all at this revision.

    Only files that are not there are fetched. Raises BadInput where they can't be had, or have another hash.
    """
    go_on_after_a_reset()
    inside = ["*/*"]  # the same model for other programs, which many a repository has in folders of its own
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=inside))
        for file in sorted({file for pattern in patterns for file in folder.glob(pattern)}):
            check(file)
    except Exception as error:  # of the network, the hub, its library, the disk: each has its own
        if no_room(error):
            raise
        reason = why(error) + containers.outside(name)
        raise BadInput(f"model.name: {name} at revision {revision} can't be loaded: {reason}") from None
    return folder


def fetch_rows(urls: list[str]) -> None:
    """Fetch a data set's files, as hf://datasets/name@revision/file, into the hub's cache, and check them.

    Raises whatever the hub's library does, and WrongHash.
    """
    go_on_after_a_reset()
    files = HfFileSystem()
    for url in urls:
        resolved = files.resolve_path(url)
        kind, revision = resolved.repo_type, resolved.revision
        check(Path(hf_hub_download(resolved.repo_id, resolved.path_in_repo, repo_type=kind, revision=revision)))


def check(file: Path) -> None:
    """Raises WrongHash where a file in the hub's cache is not what the hub said, after removing it.

    There a file is a link to its content, which is named by its hash: sha256 for large files, SHA-1 as git has it for
    others (or of the bytes alone, with some mirrors). What has another name, or is not a link, can't be checked.
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


def go_on_after_a_reset() -> None:
    """Have the hub's library take up a download where its connection was reset, as it does where one was closed.

    Firewalls reset them. Without this the library gives up, and throws away what has come.
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

    def client():
        hooked = default_client_factory()
        hooked.event_hooks["response"].append(replace_stream)
        return hooked

    set_client_factory(client)


def why(error: BaseException) -> str:
    """What stands between here and a file of the hub, and what to do about it, in a line."""
    return _known(error) or brief(error)


def why_no_rows(error: BaseException, name: str, revision: str) -> str:
    """What stands between here and a data set. The datasets library hides what the hub said, so it is asked again."""
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
        offline = constants.HF_HUB_OFFLINE and isinstance(cause, UNREACHABLE)  # in the words of datasets
        if offline or isinstance(cause, errors.OfflineModeIsEnabled):
            cache = constants.HF_HUB_CACHE
            return f"it is not in {cache}, and HF_HUB_OFFLINE forbids to fetch it. Unset HF_HUB_OFFLINE."
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
        token = "the token in HF_TOKEN does not open it" if get_token() else "it is private or gated, or is not there"
        return f"{hub} refuses it ({status}): {token}. Check the name, ask for access on its page, and set HF_TOKEN."
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{hub} has none of that name ({status}). Check the name."
    if status == 429:
        return f"{hub} asks for fewer requests (429). Start again in some minutes, or set HF_TOKEN to a token of yours."
    if status >= 500:
        return f"{hub} is out of order ({status}). Start again later, or name a mirror of it: HF_ENDPOINT."
    return f"{hub} answers {status} to {error.response.url}. Is it a hub, or a mirror of one (HF_ENDPOINT)?"
