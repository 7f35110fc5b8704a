"""Training as a job: killed, interrupted and resumed, on several ranks, out of time, refused."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forks import Fork, Forks
from test_families import captured, tiny
from test_training import sharp
from training_child import stopped, train

from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.capture.store.store import CaptureStore
from sparsekv.models.router import BucketRouter
from sparsekv.trainers.fit import VALIDATIONS, fit
from sparsekv.trainers.metrics import read_metrics
from sparsekv.trainers.options import TrainingOptions
from sparsekv.trainers.pool import split_documents
from sparsekv.trainers.task import Task, by_head
from sparsekv.util.errors import SparseKVError

CHILD = Path(__file__).parent / "training_child.py"
ARTIFACTS = {"router": RouterArtifact, "phi": PhiArtifact}


@pytest.fixture
def training(forks: Forks) -> Callable[..., Fork]:
    """Starts training_child.py: `training("phi", store, output, "max_steps=60")`."""
    return lambda *words, **variables: forks.start(CHILD, *words, merged=True, **variables)


class Toy(Task):
    """A number a head that rises by about the learning rate a step; each head has a place where it is best."""

    muon = True

    def __init__(self, signal_at: int = -1, which: int = 0):
        super().__init__()
        self.place, self.matrix = torch.nn.Parameter(torch.zeros(3, 1)), torch.nn.Parameter(torch.ones(3, 2, 4))
        self.target = torch.tensor([0.3, 0.9, 9.0])
        self.signal_at, self.which = signal_at, which
        self.seen: list[torch.Tensor] = []

    def draws(self, first: int, count: int) -> dict[str, torch.Tensor]:
        return {"number": torch.arange(first, first + count).float()}

    def losses(self, draw: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if int(draw["number"]) == self.signal_at:
            os.kill(os.getpid(), self.which)
        noise = torch.rand(2, 4, generator=torch.Generator().manual_seed(int(draw["number"])))
        return {"loss": -self.place[:, 0] + (self.matrix * noise).sum((1, 2))}

    def validate(self) -> torch.Tensor:
        self.seen.append(self.place[:, 0].detach().clone())
        return (self.place[:, 0] - self.target).abs()


def fit_toy(task: Toy, output: Path, **options: object) -> Toy:
    fit(task, **{"steps": 120, "lr": 0.02, "output": output, "name": "toy", "description": "toy", "device": "cpu",
                 **options})
    return task


def test_every_head_keeps_its_best_weights(tmp_path) -> None:
    output = tmp_path / "a"
    output.mkdir()
    task = fit_toy(Toy(), output)
    seen = torch.stack(task.seen)
    best = (seen - task.target).abs().argmin(dim=0)
    assert torch.equal(task.place[:, 0], seen[best, range(3)])
    assert best[0] < best[1] < best[2] == len(seen) - 1 and float(task.place[2]) > 1.0  # still rising at the end
    metrics = read_metrics(output / "metrics.csv")
    assert metrics["step"] == list(range(1, 121))
    assert len([e for e in metrics["validation_error"] if e == e]) == VALIDATIONS


def test_a_task_that_asks_for_them_ends_with_its_last_weights(tmp_path) -> None:
    task = Toy()
    task.last_weights = True
    assert torch.equal(fit_toy(task, tmp_path, quiet=True).place[:, 0], task.seen[-1])
    assert float((task.place[0] - task.target[0]).abs()) > 0.9


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT], ids=["sigterm", "ctrl-c"])
def test_an_interrupted_run_stops_after_the_block_and_resumes(tmp_path, capsys, which: int) -> None:
    before = signal.getsignal(signal.SIGINT)
    finished = fit_toy(Toy(), tmp_path, name="whole", group=0)
    with pytest.raises(SparseKVError, match=r"toy: stopped at step 48 of 120.*--resume goes on"):
        fit_toy(Toy(47, which), tmp_path, group=1)
    assert signal.getsignal(signal.SIGINT) is before
    resumed = fit_toy(Toy(), tmp_path, resume=True, group=1)
    assert "resumed from the checkpoint at step 48" in capsys.readouterr().err
    for one, other in zip(finished.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    metrics = read_metrics(tmp_path / "metrics.csv")
    assert metrics["group"] == [0.0] * 120 + [1.0] * 120 and metrics["step"] == 2 * list(range(1, 121))
    assert metrics["loss"][:120] == metrics["loss"][120:]


def test_no_head_knows_of_the_others(tmp_path) -> None:
    make = lambda heads: BucketRouter(heads, 4, 3, 8)  # noqa: E731
    both, second = by_head(make, [5, 6]), by_head(make, [6])
    assert torch.equal(both.w1[1], second.w1[0]) and not torch.equal(both.w1[0], both.w1[1])


def tensors(artifact) -> dict[str, torch.Tensor]:
    if isinstance(artifact, RouterArtifact):
        return {"centroids": artifact.centroids, **(artifact.weights._asdict() if artifact.weights else {})}
    return {**artifact.maps.named(), "shift": artifact.shift, "gate": artifact.gate}


def assert_same(one, other, tolerance: float) -> None:
    for name, tensor in tensors(one).items():
        torch.testing.assert_close(tensors(other)[name], tensor, rtol=tolerance, atol=tolerance, msg=name)


def kill_at_first_checkpoint(training: Callable[..., Fork], kind: str, store: Path, output: Path, steps: int) -> None:
    process = training(kind, store, output, f"max_steps={steps}")
    ends = time.monotonic() + 120
    while not list(output.glob("checkpoints/*.ckpt")):
        assert process.poll() is None and time.monotonic() < ends, process.communicate()[0]
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("kind", ["router", "phi"])
def test_a_killed_run_resumes_where_it_was(training, store, tmp_path, capsys, kind: str) -> None:
    steps = 150
    whole = train(kind, str(store), str(tmp_path / "whole"), max_steps=steps)
    cut = tmp_path / "cut"
    kill_at_first_checkpoint(training, kind, store, cut, steps)
    with pytest.raises(SparseKVError, match="interrupted training; add --resume"):
        train(kind, str(store), str(cut), max_steps=steps)
    with pytest.raises(SparseKVError, match="was started with max_steps 150; now found max_steps 7"):
        train(kind, str(store), str(cut), max_steps=7, resume=True)
    capsys.readouterr()
    resumed = train(kind, str(store), str(cut), max_steps=steps, resume=True)
    assert "resumed from the checkpoint at step" in capsys.readouterr().err
    assert_same(whole, resumed, 1e-3)
    assert sorted(p.name for p in cut.iterdir()) == ["README.md", "config.json", "metrics.csv", "model.safetensors",
                                                     "quality.png"]
    steps_seen = read_metrics(cut / "metrics.csv")["step"]
    assert steps_seen == sorted(set(steps_seen)) and steps_seen[-1] == steps
    with pytest.raises(SparseKVError, match="is finished: there is nothing to resume"):
        train(kind, str(store), str(cut), max_steps=steps, resume=True)


def test_a_resumed_run_refuses_another_model_and_other_documents(training, store, tmp_path) -> None:
    output = tmp_path / "cut"
    kill_at_first_checkpoint(training, "phi", store, output, 400)
    other = captured(tiny("qwen2"), tmp_path / "q", num_documents=4, context_length=160, queries_per_document=32)
    with pytest.raises(SparseKVError, match=r"was made for a model with architecture LlamaForCausalLM.*Qwen2"):
        train("phi", str(other.path), str(output), max_steps=400, resume=True)
    fewer = captured(sharp(), tmp_path / "f", num_documents=3, context_length=160, queries_per_document=32)
    with pytest.raises(SparseKVError, match="read other documents"):
        train("phi", str(fewer.path), str(output), max_steps=400, resume=True)


@pytest.mark.parametrize("kind", ["router", "phi"])
def test_finished_parts_are_not_trained_again(store, tmp_path, capsys, kind: str) -> None:
    whole = train(kind, str(store), str(tmp_path / "a"), max_steps=20, layer_group=1)
    from sparsekv.trainers import work

    with stopped("finish"):
        train(kind, str(store), str(tmp_path / "b"), max_steps=20, layer_group=1)
    (tmp_path / "b" / "parts" / "layer002-heads000-001.safetensors").unlink()
    mark = tmp_path / "b" / work.MARK
    held = json.loads(mark.read_text())
    for residual in (True, False):  # an option of an older version: one that was off changed nothing
        mark.write_text(json.dumps({**held, "options": {**held["options"], "residual": residual}}))
        if residual:
            with pytest.raises(SparseKVError, match="was started with residual True; now found residual None"):
                train(kind, str(store), str(tmp_path / "b"), max_steps=20, layer_group=1, resume=True)
    capsys.readouterr()
    again = train(kind, str(store), str(tmp_path / "b"), max_steps=20, layer_group=1, resume=True)
    assert capsys.readouterr().err.count("trained before the run was interrupted") == 2
    assert_same(whole, again, 1e-5)


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("its own", marks=pytest.mark.slow)])
def test_two_ranks_give_the_artifacts_of_one(training, store, tmp_path, launcher: str) -> None:
    """Two processes as torchrun starts them, or one that starts the other."""
    words = ("both", store, tmp_path, "devices=2", "max_steps=20")
    if launcher == "torchrun":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            common = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
                      "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        ranks = [training(*words, RANK=rank, LOCAL_RANK=rank, **common) for rank in "01"]
    else:
        ranks = [training(*words)]
    for process in ranks:
        said, _ = process.communicate()
        assert process.returncode == 0, said
    for kind, artifact in ARTIFACTS.items():
        one, two = train(kind, str(store), str(tmp_path / f"one-{kind}"), max_steps=20), artifact.load(tmp_path / kind)
        assert_same(one, two, 1e-3)
        for name, value in one.config.quality.items():
            if isinstance(value, float):
                assert two.config.quality[name] == pytest.approx(value, abs=2e-3), name
        assert two.config.provenance["options"]["devices"] == 2


def test_heads_are_dealt_out_where_layers_are_few(store, tmp_path) -> None:
    """More ranks than layers: a layer's heads are cut, and the pieces put together are the layer."""
    from sparsekv.trainers.work import pieces

    assert [pieces(layers, heads, ranks) for layers, heads, ranks in (
        (3, 8, 2), (3, 8, 4), (1, 8, 8), (1, 6, 4), (2, 2, 64))] == [1, 2, 8, 6, 2]
    one = train("phi", str(store), str(tmp_path / "one"), max_steps=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparsekv.trainers.work.pieces", lambda *_: 2)
        split = train("phi", str(store), str(tmp_path / "cut"), layer_group=1, max_steps=20)
    assert_same(one, split, 1e-3)


def test_time_runs_out(store, tmp_path) -> None:
    began = time.monotonic()
    train("router", str(store), str(tmp_path / "a"), max_steps=10_000_000, max_time="00:00:02")
    assert time.monotonic() - began < 60
    assert RouterArtifact.load(tmp_path / "a").config.quality["mass_share@0.05"] > 0


def test_options_of_the_trainers(store, tmp_path) -> None:
    common = {"max_steps": 5}
    plain = train("router", str(store), str(tmp_path / "a"), **common)
    for i, options in enumerate(({"key_space": "pre"}, {"lr": 1e-2}, {"seed": 1})):
        other = train("router", str(store), str(tmp_path / f"r{i}"), **common, **options)
        assert not torch.equal(other.weights.w1, plain.weights.w1), options
    maps = train("phi", str(store), str(tmp_path / "p"), **common)
    for i, options in enumerate(({"keys_per_step": 4096}, {"centred": False}, {"optimizer": "adam"},
                                 {"output_weight": 0.0}, {"seed": 1})):
        other = train("phi", str(store), str(tmp_path / f"p{i}"), **common, **options)
        assert not torch.equal(other.maps.query.w_in, maps.maps.query.w_in), options


def test_contradictions_are_refused(store, tmp_path) -> None:
    for options, message in (
            ({"preset": "saap"}, "unknown preset 'saap'"), ({"optimizer": "sgd"}, "unknown optimizer 'sgd'"),
            ({"resume": True, "overwrite": True}, "use one of them"), ({"max_time": "soon"}, "is no duration")):
        with pytest.raises(SparseKVError, match=message):
            train("phi", str(store), str(tmp_path / "a"), **options)
        assert not (tmp_path / "a").exists()
    with pytest.raises(SparseKVError, match="unknown scores 'hybrid'"):
        train("router", str(store), str(tmp_path / "a"), scores="hybrid")
    assert TrainingOptions("c", "o", max_time="1:00:00:01").seconds() == 86_401


def test_windows_of_one_source_stay_together(store, capsys) -> None:
    fake = CaptureStore.open(store)
    for document, sources in zip(fake.documents, (["a"], ["b"], ["b", "c"], ["c", "d"]), strict=True):
        document["sources"] = sources
    assert split_documents(fake, 1) == ([0, 1], [3])
    assert "1 of 4 windows share a source document with the 1 for validation" in capsys.readouterr().err
    for document in fake.documents:
        document["sources"] = ["one file"]
    assert split_documents(fake, 1) == ([0, 1, 2], [3])
