"""Requests to a hub have a time limit, which huggingface_hub's client has not; what fails is said in its words."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from typing import Any

from sparsekv.artifacts.checks import reason
from sparsekv.util.errors import SparseKVError

WRITING, SILENCE = 6, 3
"""How many times as long as for a question is waited for an answer to what was sent; and for any answer at all, over
all tries."""

_REQUEST = re.compile(r" \(Request ID:[^)]*\)|For more information check: \S+")


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Requests of huggingface_hub have HF_HUB_DOWNLOAD_TIMEOUT (10 s unless set) to connect and between two pieces of
    an answer, or less where they name less, and six times that where they send something. A hub from which nothing
    came for three times as long is not asked again."""
    import httpx
    from huggingface_hub import constants, get_session

    heard = [time.monotonic()]

    def limit(request: Any) -> None:
        seconds = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        answer = seconds if request.method in ("GET", "HEAD") else WRITING * seconds
        if time.monotonic() - heard[0] > SILENCE * answer:
            raise httpx.ReadTimeout("nothing was heard from the hub", request=request)
        ours = {"connect": seconds, "read": answer, "write": answer, "pool": answer}
        given = request.extensions.get("timeout") or {}
        request.extensions["timeout"] = {k: v if given.get(k) is None else min(v, given[k]) for k, v in ours.items()}

    def hear(_: Any) -> None:
        heard[0] = time.monotonic()

    session = get_session()
    for name, hook in (("request", limit), ("response", hear)):
        session.event_hooks[name].append(hook)
    try:
        yield
    finally:
        for name, hook in (("request", limit), ("response", hear)):
            session.event_hooks[name].remove(hook)


def refused(error: BaseException, repo: str, revision: str | None, verb: str) -> SparseKVError:
    """A hub's error in one sentence, in huggingface_hub's words."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    what = f"{verb} {repo!r}" + ("" if revision is None else f" at revision {revision!r}")
    if any(isinstance(e, RepositoryNotFoundError) and not isinstance(e, GatedRepoError) for e in _chain(error)):
        what += ", which is no folder here and no repository there"
    return failed_request(error, what, constants.ENDPOINT) or SparseKVError(f"could not {what}: {reason(error)}")


def failed_request(error: BaseException, what: str, hub: str) -> SparseKVError | None:
    """Return what huggingface_hub says of a request that failed, or how the hub could not be reached; None for an
    error of another kind."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    chain = _chain(error)
    said = next((e for e in chain if isinstance(e, HfHubHTTPError | OfflineModeIsEnabled)), None)
    if said is not None:
        return SparseKVError(f"could not {what}: {' '.join(_REQUEST.sub('', str(said)).split())}")
    if any(isinstance(e, httpx.TimeoutException) for e in chain):
        return SparseKVError(f"could not {what}: {hub} did not answer in time; try again, or give it longer by "
                             "HF_HUB_DOWNLOAD_TIMEOUT [s]")
    if any(isinstance(e, httpx.TransportError | ConnectionError) for e in chain):
        return SparseKVError(f"could not {what}: {hub} cannot be reached; check the network and HF_ENDPOINT")
    return None


def _chain(error: BaseException) -> list[BaseException]:
    """An exception and what it came from."""
    found: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in found:
        found.append(at)
        at = at.__cause__ or at.__context__
    return found
