"""Artifacts by name, against a hub on this machine: fetched, pushed, offline, refused; and no network unless asked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime"))
sys.path.insert(0, str(Path(__file__).parent))

from hub_server import TOKEN, Hub, Repository
from tiny import make_model, prompt, save_model
from tiny_artifacts import artifacts

import sparsekv
from sparsekv.artifacts.hub.named import find_artifacts
from sparsekv.artifacts.hub.push import PushConfig, push, push_artifact
from sparsekv.artifacts.hub.text_quality import Setting, TextQuality
from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.evaluation.run import EvalConfig, _check
from sparsekv.util.errors import SparseKVError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Folder of a training of the tiny model."""
    folder = tmp_path_factory.mktemp("trained")
    router, phi = artifacts(make_model())
    router.save(folder / "router")
    phi.save(folder / "phi")
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty hub; huggingface_hub knows it, a token for it and an empty cache."""
    from huggingface_hub import constants

    with Hub() as made:
        for name, value in (
                ("ENDPOINT", made.url), ("HF_HUB_CACHE", str(tmp_path / "cache")), ("HF_HUB_DISABLE_XET", True),
                ("HUGGINGFACE_CO_URL_TEMPLATE", made.url + "/{repo_id}/resolve/{revision}/{filename}"),
                ("HF_HUB_OFFLINE", False), ("HF_TOKEN_PATH", str(tmp_path / "no-token"))):
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.chdir(tmp_path)
        yield made


def files(hub: Hub, name: str, revision: str = "main") -> dict[str, bytes]:
    repository = hub.repositories[name]
    return repository.commits[repository.at(revision)]


def fails(message: str):
    return pytest.raises(SparseKVError, match=message)


def same(one: RouterArtifact | PhiArtifact, other: RouterArtifact | PhiArtifact) -> bool:
    return one.config == other.config and (
        torch.equal(one.centroids, other.centroids) if isinstance(one, RouterArtifact) else
        torch.equal(one.maps.query.w_in, other.maps.query.w_in))


def test_a_training_is_pushed_and_attached_by_one_name(hub: Hub, trained: Path) -> None:
    url = push(trained, "ann/tiny", message="first")
    assert url.startswith(f"{hub.url}/ann/tiny/commit/") and hub.repositories["ann/tiny"].messages[-1] == "first"
    there = files(hub, "ann/tiny")
    assert sorted(there) == ["README.md", *(f"{kind}/{file}" for kind in ("phi", "router")
                                            for file in ("config.json", "model.safetensors"))]
    assert b'sparsekv.attach(model, "ann/tiny"' in there["README.md"]
    model, ids = make_model(), prompt(80)
    found = []
    for given in (("ann/tiny",), (str(trained),), (trained,)):
        with sparsekv.attach(model, *given, token_budget=8, dense_below=0) as attachment:
            found.append(attachment.generate(ids, max_new_tokens=6))
            assert attachment.decoding.phi is not None and attachment.decoding.selector.name == "sketch"
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    with sparsekv.attach(model, router="ann/tiny", phi="ann/tiny", token_budget=8, dense_below=0) as attachment:
        assert torch.equal(attachment.generate(ids, max_new_tokens=6), found[0])
    phi = PhiArtifact.load(trained / "phi")
    with sparsekv.attach(model, "ann/tiny", phi=phi, token_budget=8, dense_below=0) as attachment:
        assert torch.equal(attachment.generate(ids, max_new_tokens=6), found[0])


def test_only_what_is_asked_for_is_fetched(hub: Hub, trained: Path) -> None:
    push(trained, "ann/tiny")
    hub.requests.clear()
    loaded = RouterArtifact.load("ann/tiny")
    assert same(loaded, RouterArtifact.load(trained / "router"))
    fetched = {r.partition("/resolve/")[2].partition("/")[2] for r in hub.requests if "GET /ann/tiny/resolve" in r}
    assert fetched == {"router/config.json", "phi/config.json", "router/model.safetensors"}
    hub.requests.clear()
    assert same(PhiArtifact.load("ann/tiny"), PhiArtifact.load(trained / "phi"))
    RouterArtifact.load("ann/tiny")
    assert not any("router" in r or "config" in r for r in hub.requests)  # in the cache


def test_an_object_is_pushed_and_comes_back(hub: Hub, trained: Path, tmp_path: Path) -> None:
    router, phi = RouterArtifact.load(trained / "router"), PhiArtifact.load(trained / "phi")
    assert "/commit/" in router.push_to_hub("ann/router", private=True, license="apache-2.0")
    assert sorted(files(hub, "ann/router")) == ["README.md", "config.json", "model.safetensors"]
    assert hub.repositories["ann/router"].private
    assert b"\nlicense: apache-2.0\n" in files(hub, "ann/router")["README.md"]
    assert same(RouterArtifact.load("ann/router"), router)
    RouterArtifact.from_pretrained("ann/router").save_pretrained(tmp_path / "again")
    assert same(RouterArtifact.load(tmp_path / "again"), router)
    phi.push_to_hub("ann/phi")
    assert find_artifacts("ann/phi").keys() == {"phi"}
    with fails(r"'ann/phi' is a 'phi' artifact; expected a 'router' artifact"):
        sparsekv.attach(make_model(), router="ann/phi")


def test_revisions(hub: Hub, trained: Path) -> None:
    router, phi = RouterArtifact.load(trained / "router"), PhiArtifact.load(trained / "phi")
    router.push_to_hub("ann/r")
    first = hub.repositories["ann/r"].branches["main"]
    phi.push_to_hub("ann/r", revision="maps")
    assert find_artifacts("ann/r@maps").keys() == {"phi"} and find_artifacts("ann/r").keys() == {"router"}
    phi.push_to_hub("ann/r")
    assert same(RouterArtifact.load("ann/r", revision=first), router)
    assert same(RouterArtifact.load(f"ann/r@{first}"), router)
    with fails("could not fetch 'ann/r' at revision 'v9': .*Revision Not Found"):
        RouterArtifact.load("ann/r@v9")
    with fails("names one revision and revision='b' another"):
        RouterArtifact.load("ann/r@a", revision="b")
    with fails("which is a path; expected a repository"):
        RouterArtifact.load(trained / "router", revision="main")


def test_a_second_push_leaves_nothing_of_the_first(hub: Hub, trained: Path) -> None:
    push(trained / "router", "ann/r")
    push(trained, "ann/r")
    assert "config.json" not in files(hub, "ann/r") and find_artifacts("ann/r").keys() == {"router", "phi"}
    push(trained / "phi", "ann/r")
    assert find_artifacts("ann/r").keys() == {"phi"}


def test_what_was_measured_on_text_goes_with_the_training(hub: Hub, trained: Path, tmp_path) -> None:
    folder = tmp_path / "training"
    shutil.copytree(trained, folder)
    sums = {kind: json.loads((folder / kind / "config.json").read_text())["sha256"] for kind in ("router", "phi")}
    setting = Setting("sketch", "phi", 0.02, 0.004, 0.001, 0.95, 0.05)
    TextQuality("text.txt", True, 2048, 4, 256, 9.0, sums, [setting]).save(folder)
    push(folder, "ann/t")
    there = files(hub, "ann/t")
    assert {"quality.json", "quality.png"} <= set(there) and b"recommended: token_budget=0.02" in there["README.md"]
    assert b'attach(model, "ann/t", token_budget=0.02)' in there["README.md"]
    record = json.loads((folder / "quality.json").read_text())
    (folder / "quality.json").write_text(json.dumps(record | {"artifacts": {"router": "x", "phi": "y"}}))
    with fails("was measured with other artifacts"):
        push(folder, "ann/t")


def test_an_edited_page_is_pushed_as_it_is(hub: Hub, trained: Path, tmp_path) -> None:
    router = RouterArtifact.load(trained / "router")
    router.save(tmp_path / "r")
    (tmp_path / "r" / "README.md").write_text("---\ntags:\n- mine\n---\n\n# My router\n")
    (tmp_path / "r" / "notes.txt").write_text("not for others")
    push(tmp_path / "r", "ann/r", license="mit")
    there = files(hub, "ann/r")
    assert b"# My router" in there["README.md"] and b"license: mit" in there["README.md"] and "notes.txt" not in there


def test_what_lies_here_is_never_looked_for_on_the_hub(hub: Hub, trained: Path, tmp_path) -> None:
    here = tmp_path / "ann" / "tiny"
    RouterArtifact.load(trained / "router").save(here)
    RouterArtifact.load("ann/tiny")
    for name in ("./ann/none", "none", "a/b/c", str(tmp_path / "none"), Path("ann/none")):
        with fails("no artifact at"):
            RouterArtifact.load(name)
    with fails("is a 'router' artifact; expected a 'phi' artifact"):
        PhiArtifact.load("ann/tiny")
    with fails("holds router, phi; expected a 'settings' artifact"):
        find_artifacts(trained, ("settings",))
    assert not hub.requests


def test_offline_and_unreachable(hub: Hub, trained: Path, monkeypatch) -> None:
    from huggingface_hub import constants

    push(trained, "ann/tiny")
    RouterArtifact.load("ann/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert same(RouterArtifact.load("ann/tiny"), RouterArtifact.load(trained / "router"))
    with fails("could not fetch 'ann/tiny' .*offline mode is enabled.*unset the `HF_HUB_OFFLINE`"):
        PhiArtifact.load("ann/tiny")
    with fails("could not fetch 'ann/other': .*offline mode is enabled"):
        PhiArtifact.load("ann/other")
    with fails("nothing can be pushed while HF_HUB_OFFLINE is set"):
        push(trained, "ann/tiny")
    assert not hub.requests
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert same(RouterArtifact.load("ann/tiny"), RouterArtifact.load(trained / "router"))
    for ask in (lambda: PhiArtifact.load("ann/other"), lambda: push(trained, "ann/tiny")):
        with fails(r"could not (fetch|push to) 'ann/\w+': http://127.0.0.1:9 cannot be reached; check the network"):
            ask()


def test_tokens(hub: Hub, trained: Path, monkeypatch) -> None:
    push(trained, "ann/secret", private=True)
    hub.repositories["ann/gated"] = Repository(gated=True)
    with fails("could not fetch 'ann/gated': .*Cannot access gated repo"):
        RouterArtifact.load("ann/gated")
    monkeypatch.delenv("HF_TOKEN")
    with fails("'ann/secret', which is no folder here and no repository there: .*make sure you are authenticated"):
        RouterArtifact.load("ann/secret")
    with fails("needs a token: set HF_TOKEN, or run `hf auth login`"):
        push(trained, "ann/secret")
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    with fails("could not push to 'ann/secret'.*401"):
        push(trained, "ann/secret")
    with fails("no folder here and no repository there"):
        RouterArtifact.load("ann/none")


def test_what_is_no_artifact_is_not_fetched(hub: Hub) -> None:
    hub.repositories["ann/model"] = Repository()
    hub.repositories["ann/model"].commit("main", {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"x"},
                                         "a model")
    hub.repositories["ann/empty"] = Repository()
    with fails("is not the config of a sparsekv artifact"):
        RouterArtifact.load("ann/model")
    with fails("'ann/empty' on the hub is not an artifact of sparsekv; expected config.json and"):
        sparsekv.attach(make_model(), "ann/empty")
    assert not any("safetensors" in r for r in hub.requests)


def test_what_cannot_be_pushed(hub: Hub, trained: Path, tmp_path) -> None:
    hub.repositories["ann/model"] = Repository()
    hub.repositories["ann/model"].commit("main", {"config.json": b'{"model_type": "llama"}'}, "a model")
    with fails("holds something else than artifacts of sparsekv .*; choose another name"):
        push(trained, "ann/model")
    assert list(files(hub, "ann/model")) == ["config.json"]
    hub.repositories["ann/public"] = Repository()
    with fails("exists and is public; choose another name, or push without --private"):
        push(trained, "ann/public", private=True)
    for name in ("tiny", "a/b/c", "ann/tiny@main", "/ann/tiny"):
        with fails("is no name of a repository; expected user/name"):
            push(trained, name)
    with fails("is no licence that the hub knows"):
        push(trained, "ann/tiny", license="All Rights Reserved\n")
    with fails("no artifact at"):
        push(tmp_path / "none", "ann/tiny")
    RouterArtifact.load(trained / "router").save(tmp_path / "damaged")
    config = json.loads((tmp_path / "damaged" / "config.json").read_text())
    (tmp_path / "damaged" / "config.json").write_text(json.dumps({**config, "sink_size": 5}))
    with fails("is damaged: its checksum"):
        push(tmp_path / "damaged", "ann/tiny")
    hub.broken = 418
    with fails("could not push to 'ann/tiny': .*418"):
        push(trained, "ann/tiny")


def test_the_command_says_where_it_lies(hub: Hub, trained: Path) -> None:
    said = push_artifact(PushConfig(trained, "ann/tiny", revision="v1")).summary()
    assert '/ann/tiny/commit/' in said and 'with sparsekv.attach(model, "ann/tiny@v1"):' in said
    assert find_artifacts("ann/tiny@v1").keys() == {"router", "phi"}


def test_an_evaluation_takes_the_one_name(hub: Hub, trained: Path, tmp_path) -> None:
    push(trained, "ann/tiny")
    for name in ("ann/tiny", str(trained)):
        checked = _check(EvalConfig(model="m", output=tmp_path / "results", artifacts=name))
        assert same(checked.router, RouterArtifact.load(trained / "router")) and checked.phi is not None
        assert {"router", "router+phi", "topk+phi"} <= {m.name for m in checked.methods}
    with fails(r"'.*' holds router, phi; expected what is not given by router and phi"):
        sparsekv.attach(make_model(), trained, router=checked.router, phi=checked.phi)
    with fails("artifacts must be a name, found"):
        sparsekv.attach(make_model(), checked.router)


@pytest.mark.slow
def test_commands_of_a_shell(hub: Hub, trained: Path, tmp_path) -> None:
    """As a user has it: the endpoint, the cache and the token from the environment."""
    model = tmp_path / "model"
    save_model(model)
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN,
           "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}

    def run(*words: str, **changed: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "sparsekv.cli", *words], capture_output=True, text=True,
                              cwd=tmp_path, env={**env, **changed})

    pushed = run("push", str(trained), "ann/tiny", "--private", "--message", "hello")
    assert pushed.returncode == 0 and 'attach(model, "ann/tiny")' in pushed.stdout, pushed.stderr
    words = ("generate", "--model", str(model), "--artifacts", "ann/tiny", "--prompt", "hello " * 30,
             "--max-new-tokens", "3", "--token-budget", "8", "--dense-below", "0")
    done = run(*words)
    assert done.returncode == 0 and "sketch + phi read" in done.stderr, done.stderr
    assert run(*words, HF_HUB_OFFLINE="1").stdout == done.stdout
    refused = run(*words, HF_TOKEN="", HF_HOME=str(tmp_path / "other"))
    assert refused.returncode == 1 and "no repository there" in " ".join(refused.stderr.split()), refused.stderr
    assert "Traceback" not in refused.stderr
