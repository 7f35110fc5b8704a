"""A hub that is silent, slow, broken or hostile: one sentence each, in time, without a secret in it."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "artifacts"))

from hub_server import TOKEN, Hub
from tiny import make_model
from tiny_artifacts import artifacts

from sparsekv.artifacts.hub.models import load_config, load_model
from sparsekv.artifacts.hub.named import find_artifacts
from sparsekv.artifacts.hub.network import in_time
from sparsekv.artifacts.hub.push import push
from sparsekv.util.errors import SparseKVError


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    for kind, made in zip(("router", "phi"), artifacts(make_model()), strict=True):
        made.save(folder / kind)
    return folder


def use(monkeypatch, tmp_path: Path, url: str) -> None:
    """huggingface_hub asks this address, with a token and an empty cache, and waits 0.2 seconds."""
    from huggingface_hub import constants

    for name, value in (("ENDPOINT", url), ("HF_HUB_CACHE", str(tmp_path / "cache")),
                        ("HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"),
                        ("HF_HUB_DISABLE_XET", True), ("HF_HUB_OFFLINE", False), ("HF_HUB_DOWNLOAD_TIMEOUT", 0.2),
                        ("HF_HUB_ETAG_TIMEOUT", 0.2)):
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("time.sleep", lambda _: None)  # between two tries
    monkeypatch.chdir(tmp_path)


def asked(trained: Path) -> dict[str, Callable[[], Any]]:
    return {"fetch": lambda: find_artifacts("ann/tiny"), "push": lambda: push(trained, "ann/tiny"),
            "config": lambda: load_config("ann/tiny"), "model": lambda: load_model("ann/tiny", device="cpu")}


@pytest.fixture
def silent() -> Iterator[str]:
    """A hub that takes every request and answers none."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("what", ["fetch", "push", "config", "model"])
def test_a_hub_that_never_answers_is_given_up(what: str, silent: str, trained, tmp_path, monkeypatch) -> None:
    use(monkeypatch, tmp_path, silent)
    began = time.monotonic()
    with pytest.raises(SparseKVError, match="did not answer in time; try again, or give it longer by HF_HUB_DOWNLOAD"):
        asked(trained)[what]()
    assert time.monotonic() - began < 60


SAID = {403: "403 Forbidden", 404: "404 Client Error|Not Found", 429: "429 Too Many Requests", 500: "500 Internal",
        503: "503 Service"}


@pytest.mark.parametrize("what", ["fetch", "push", "config"])
@pytest.mark.parametrize("status", SAID)
def test_statuses_are_told_apart(status: int, what: str, trained, tmp_path, monkeypatch) -> None:
    with Hub() as hub:
        use(monkeypatch, tmp_path, hub.url)
        hub.broken = status
        with pytest.raises(SparseKVError, match=SAID[status]) as error:
            asked(trained)[what]()
        assert hub.url in str(error.value) and "Request ID" not in str(error.value)


def test_a_hub_that_is_not_there(trained, tmp_path, monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    use(monkeypatch, tmp_path, url)
    for ask in asked(trained).values():
        with pytest.raises(SparseKVError, match="cannot be reached; check the network and HF_ENDPOINT"):
            ask()


def test_no_secret_of_an_address_is_printed(silent: str, trained, tmp_path, monkeypatch, capfd) -> None:
    use(monkeypatch, tmp_path, silent.replace("://", "://ann:hf_verysecret1@"))
    for ask in asked(trained).values():
        with pytest.raises(SparseKVError, match="://…@127") as error:
            ask()
        assert "verysecret" not in str(error.value)
    assert "verysecret" not in "".join(capfd.readouterr())
    for text in ("s3://key:secret9@bucket/x", "https://h/x?token=secret9", "https://h/?a=1&X-Amz-Signature=secret9&b=2"):
        assert "secret9" not in str(SparseKVError(f"no store at {text!r}"))


def test_the_session_is_as_it_was() -> None:
    from huggingface_hub import get_session

    before = get_session().event_hooks
    with pytest.raises(KeyError), in_time():
        raise KeyError
    assert get_session().event_hooks == before


def test_push_sends_no_file_that_a_link_leads_to(trained, tmp_path, monkeypatch) -> None:
    folder = tmp_path / "made"
    for kind, made in zip(("router", "phi"), artifacts(make_model()), strict=True):
        made.save(folder / kind)
    (tmp_path / "secret").write_text("TOP SECRET")
    with Hub() as hub:
        use(monkeypatch, tmp_path, hub.url)
        for place in ("README.md", "router/metrics.csv"):
            (folder / place).symlink_to(tmp_path / "secret")
            with pytest.raises(SparseKVError, match=r"is a link; put the file itself there, or remove it"):
                push(folder, "ann/tiny")
            (folder / place).unlink()
        os.mkfifo(folder / "README.md")
        with pytest.raises(SparseKVError, match="is no file; remove it"):
            push(folder, "ann/tiny")
        (folder / "README.md").unlink()
        (folder / ".env").write_text("TOP SECRET")
        (folder / "router" / "notes.txt").write_text("TOP SECRET")
        push(folder, "ann/tiny")
        repository = hub.repositories["ann/tiny"]
        assert sorted(repository.commits[repository.branches["main"]]) == ["README.md", *(
            f"{kind}/{file}" for kind in ("phi", "router") for file in ("config.json", "model.safetensors"))]
        assert not any(b"TOP SECRET" in data for commit in repository.commits.values() for data in commit.values())
