"""Requests to a hub have a time limit, and each way in which a hub can fail has a sentence of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from sparsekv.artifacts.checks import reason
from sparsekv.util.errors import SparseKVError

WRITING, SILENCE = 6, 3
"""How many times as long as for a question is waited for an answer to what was sent; and for any answer at all, over
all tries."""


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
    """What a hub's error means, in one sentence."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import (
        GatedRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = constants.ENDPOINT
    token = "your token" if get_token() else "a token (HF_TOKEN, or `hf auth login`)"
    chain = _chain(error)
    if any(isinstance(e, GatedRepoError) for e in chain):
        return SparseKVError(f"{repo!r} is gated: accept its terms at {hub}/{repo} and use {token} of that account")
    if any(isinstance(e, RevisionNotFoundError) for e in chain):
        return SparseKVError(f"{repo!r} on {hub} has no revision {revision!r}; expected one of its branches, tags or "
                             "commits")
    if any(isinstance(e, RepositoryNotFoundError) for e in chain):
        need = ("a private one needs a token (HF_TOKEN, or `hf auth login`)" if token != "your token" else
                "or your token may not see it")
        return SparseKVError(f"no folder at {repo!r} and no such repository on {hub}; check the name, {need}")
    if constants.HF_HUB_OFFLINE or any(isinstance(e, OfflineModeIsEnabled) for e in chain):
        return SparseKVError(f"could not {verb} {repo!r}: HF_HUB_OFFLINE is set and it is not in the cache "
                             f"({constants.HF_HUB_CACHE}); fetch it once while online, or give a folder")
    return failed_request(chain, f"{verb} {repo!r}", hub, token) or SparseKVError(
        f"could not {verb} {repo!r} ({hub}: {reason(error)})")


def failed_request(error: BaseException | list[BaseException], what: str, hub: str, token: str = "your token",
                   ) -> SparseKVError | None:
    """By the status that a hub answered with, or by how it could not be reached; None for an error of another kind."""
    import httpx

    chain = error if isinstance(error, list) else _chain(error)
    responses: list[Any] = [getattr(e, "response", None) for e in chain]
    status = next((response.status_code for response in responses if response is not None), None)
    if status in (401, 403):
        return SparseKVError(f"{hub} refuses to {what} (status {status}): check {token}, and that its account may do "
                             "that")
    if status == 404:
        return SparseKVError(f"could not {what}: {hub} knows no such thing (status 404); check the name, and that "
                             "HF_ENDPOINT is a hub")
    if status == 429:
        return SparseKVError(f"could not {what}: {hub} takes no more requests for now (status 429); wait some minutes, "
                             "or use a token (HF_TOKEN), for which it takes more")
    if status is not None and status >= 500:
        return SparseKVError(f"could not {what}: {hub} has a fault of its own (status {status}); try again later")
    if status is not None and status >= 400:
        return SparseKVError(f"could not {what} ({hub} answered with status {status}: {reason(chain[0])})")
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
