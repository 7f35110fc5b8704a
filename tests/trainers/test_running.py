"""Training as a job: killed and resumed, on several ranks, stopped early, refused."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "capture"))
sys.path.insert(0, str(Path(__file__).parent))

from test_families import captured, tiny
from test_training import sharp
from training_child import train

from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.core.buckets import request_buckets
from sparsekv.errors import SparseKVError
from sparsekv.models.router import BucketRouter
from sparsekv.store.store import CaptureStore
from sparsekv.trainers.fit import by_head, clip_by_head, read_metrics
from sparsekv.trainers.options import TrainingOptions
from sparsekv.trainers.pool import load_pool, split_documents
from sparsekv.trainers.targets import assign, bucket_sizes, held_out, make_targets, recall

CHILD = Path(__file__).parent / "training_child.py"
ARTIFACTS = {"router": RouterArtifact, "phi": PhiArtifact}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return captured(sharp(), tmp_path_factory.mktemp("capture") / "s", num_documents=4, context_length=160,
                    queries_per_document=32)


def child(*words: str, wait: bool = True) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, str(CHILD), *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if wait:
        shown, _ = process.communicate(timeout=200)
        assert process.returncode == 0, shown
    return process


def tensors(artifact) -> dict[str, torch.Tensor]:
    if isinstance(artifact, RouterArtifact):
        return {"centroids": artifact.centroids, **(artifact.weights._asdict() if artifact.weights else {})}
    return {**artifact.maps.named(), "shift": artifact.shift, "gate": artifact.gate}


def assert_same(one, other, tolerance: float) -> None:
    for name, tensor in tensors(one).items():
        torch.testing.assert_close(tensors(other)[name], tensor, rtol=tolerance, atol=tolerance, msg=name)


def kill_at_first_checkpoint(kind: str, store: CaptureStore, output: Path, steps: int) -> None:
    process = child(kind, str(store.path), str(output), f"max_steps={steps}", wait=False)
    ends = time.monotonic() + 120
    while not list(output.glob("checkpoints/*.ckpt")):
        assert process.poll() is None and time.monotonic() < ends, process.communicate()[0]
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("kind", ["router", "phi"])
def test_a_killed_run_resumes_where_it_was(store, tmp_path, capsys, kind: str) -> None:
    steps = 600
    whole = train(kind, str(store.path), str(tmp_path / "whole"), max_steps=steps)
    cut = tmp_path / "cut"
    kill_at_first_checkpoint(kind, store, cut, steps)
    with pytest.raises(SparseKVError, match="interrupted training; add --resume"):
        train(kind, str(store.path), str(cut), max_steps=steps)
    with pytest.raises(SparseKVError, match="was started with max_steps 600; now found max_steps 7"):
        train(kind, str(store.path), str(cut), max_steps=7, resume=True)
    capsys.readouterr()
    resumed = train(kind, str(store.path), str(cut), max_steps=steps, resume=True)
    assert "resumed from the checkpoint at step" in capsys.readouterr().err
    assert_same(whole, resumed, 1e-3)
    assert sorted(p.name for p in cut.iterdir()) == ["config.json", "metrics.csv", "model.safetensors"]
    steps_seen = read_metrics(cut / "metrics.csv")["step"]
    assert steps_seen == sorted(set(steps_seen)) and steps_seen[-1] == steps
    with pytest.raises(SparseKVError, match="is finished: there is nothing to resume"):
        train(kind, str(store.path), str(cut), max_steps=steps, resume=True)


def test_a_resumed_run_refuses_another_model_and_other_documents(store, tmp_path) -> None:
    output = tmp_path / "cut"
    kill_at_first_checkpoint("phi", store, output, 1500)
    other = captured(tiny("qwen2"), tmp_path / "q", num_documents=4, context_length=160, queries_per_document=32)
    with pytest.raises(SparseKVError, match=r"was made for a model with architecture LlamaForCausalLM.*Qwen2"):
        train("phi", str(other.path), str(output), max_steps=1500, resume=True)
    fewer = captured(sharp(), tmp_path / "f", num_documents=3, context_length=160, queries_per_document=32)
    with pytest.raises(SparseKVError, match="read other documents"):
        train("phi", str(fewer.path), str(output), max_steps=1500, resume=True)


@pytest.mark.parametrize("kind", ["router", "phi"])
def test_finished_parts_are_not_trained_again(store, tmp_path, capsys, kind: str) -> None:
    whole = train(kind, str(store.path), str(tmp_path / "a"), layer_group=1)
    from sparsekv.trainers import work

    kept = work.Run.finish
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work.Run, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(kind, str(store.path), str(tmp_path / "b"), layer_group=1)
    assert work.Run.finish is kept
    (tmp_path / "b" / "parts" / "layer002-heads000-001.safetensors").unlink()
    capsys.readouterr()
    again = train(kind, str(store.path), str(tmp_path / "b"), layer_group=1, resume=True)
    assert capsys.readouterr().err.count("trained before the run was interrupted") == 2
    assert_same(whole, again, 1e-5)


def test_two_ranks_give_the_artifacts_of_one(store, tmp_path) -> None:
    child("both", str(store.path), str(tmp_path), "devices=2")
    for kind, artifact in ARTIFACTS.items():
        one, two = train(kind, str(store.path), str(tmp_path / f"one-{kind}")), artifact.load(tmp_path / kind)
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
    one = train("phi", str(store.path), str(tmp_path / "one"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparsekv.trainers.work.pieces", lambda *_: 2)
        split = train("phi", str(store.path), str(tmp_path / "cut"), layer_group=1)
    assert_same(one, split, 1e-3)


def test_early_stopping_keeps_the_best_weights(store, tmp_path) -> None:
    long = train("phi", str(store.path), str(tmp_path / "a"), max_steps=4000, validate_every=20, early_stopping=3,
                 lr=0.02, calibrate=False)
    metrics = read_metrics(tmp_path / "a" / "metrics.csv")
    errors = [e for e in metrics["validation_error"] if e == e]
    assert metrics["step"][-1] < 4000 and len(errors) > 3
    assert min(errors) < errors[0]
    assert long.config.quality["sink_tail + phi error"] < long.config.quality["sink_tail error"]


def test_time_runs_out(store, tmp_path) -> None:
    began = time.monotonic()
    train("router", str(store.path), str(tmp_path / "a"), max_steps=10_000_000, max_time="00:00:02",
          checkpoint_every=0)
    assert time.monotonic() - began < 60
    assert RouterArtifact.load(tmp_path / "a").config.quality["mass_share@0.05"] > 0


def test_options_of_the_trainers(store, tmp_path) -> None:
    plain = train("router", str(store.path), str(tmp_path / "a"))
    for i, options in enumerate(({"gradient_clip": 1e-4}, {"precision": "bf16"}, {"init": "kmeans++"},
                                 {"key_space": "pre", "weights_dtype": "float8"})):
        other = train("router", str(store.path), str(tmp_path / f"r{i}"), **options)
        assert not torch.equal(other.weights.w1, plain.weights.w1), options
        assert 0 < other.config.quality["mass_share@0.05"] <= 1
    saved = RouterArtifact.load(tmp_path / "r3")
    torch.testing.assert_close(saved.weights.w2, other.weights.w2, rtol=0.07, atol=1e-3)
    maps = train("phi", str(store.path), str(tmp_path / "p"))
    for i, options in enumerate(({"ema": 0.95}, {"documents_per_step": 2}, {"random_windows": 1.0},
                                 {"keys_per_step": 0}, {"position_shift": 9}, {"centred": False})):
        other = train("phi", str(store.path), str(tmp_path / f"p{i}"), **options)
        assert not torch.equal(other.maps.query.w_in, maps.maps.query.w_in), options


def test_contradictions_are_refused(store, tmp_path) -> None:
    for options, message in (
            ({"precision": "int4"}, "unknown precision 'int4'"), ({"early_stopping": 2}, "needs validations"),
            ({"resume": True, "overwrite": True}, "use one of them"), ({"max_time": "soon"}, "is no duration"),
            ({"documents_per_step": 9}, "more than the 8 queries")):
        with pytest.raises(SparseKVError, match=message):
            train("phi", str(store.path), str(tmp_path / "a"), **options)
        assert not (tmp_path / "a").exists()
    for options, message in (({"init": "best"}, "unknown init"), ({"weights_dtype": "int2"}, "unknown weights dtype")):
        with pytest.raises(SparseKVError, match=message):
            train("router", str(store.path), str(tmp_path / "a"), **options)
    assert TrainingOptions("c", "o", max_time="1:00:00:01").seconds() == 86_401


def test_heads_clip_and_start_each_for_itself() -> None:
    make = lambda heads: BucketRouter(heads, 4, 3, 8)  # noqa: E731
    both, second = by_head(make, [5, 6]), by_head(make, [6])
    assert torch.equal(both.w1[1], second.w1[0]) and not torch.equal(both.w1[0], both.w1[1])
    whole = torch.nn.ModuleList([both])
    for p in whole.parameters():
        p.grad = torch.ones_like(p)
        p.grad[0] *= 1e-6
    before = both.w1.grad[0].clone()
    clip_by_head(whole, 0.5)
    norms = torch.stack([p.grad.flatten(1).square().sum(1) for p in whole.parameters()]).sum(0).sqrt()
    assert torch.equal(both.w1.grad[0], before) and float(norms[1]) == pytest.approx(0.5)


def test_windows_of_one_source_stay_together(store) -> None:
    manifest = json.loads(json.dumps(store.manifest))
    fake = CaptureStore(store._place, manifest)
    for document, sources in zip(fake.documents, (["a"], ["b"], ["b", "c"], ["c", "d"]), strict=True):
        document["sources"] = sources
    assert split_documents(fake, 1) == ([0, 1], [3])
    for document in fake.documents:
        document["sources"] = ["one file"]
    assert split_documents(fake, 1) == ([0, 1, 2], [3])


def test_a_hybrid_is_never_below_the_untrained_router_on_validation(store, tmp_path) -> None:
    """It starts there, its residual at zero, and keeps the best, even when training destroys it."""
    untrained, kept, last = (
        train("router", str(store.path), str(tmp_path / f"{lr}{every}"), scores="hybrid", validate_every=every, lr=lr,
              max_steps=30, num_buckets=30).config.quality
        for lr, every in ((1e-12, 0), (1.0, 10), (1.0, 0)))
    assert last["mass_share@0.05"] < untrained["mass_share@0.05"] - 0.01
    by_head = [torch.tensor(q["per_head"]["mass_share@0.05"]).unflatten(1, (2, 2)).mean(2) for q in (kept, untrained)]
    assert bool((by_head[0] >= by_head[1] - 1e-4).all())


def test_the_card_of_mean_key_is_of_buckets_that_restart(store, tmp_path) -> None:
    """As a request has them: of 90 buckets for 96 keys many would be empty."""
    cards = {scores: train("router", str(store.path), str(tmp_path / scores), scores=scores, max_steps=1, lr=1e-12,
                           validate_every=0, num_buckets=90) for scores in ("mean_key", "hybrid")}
    pool = load_pool(store, [1], [3], device="cpu")
    torch.testing.assert_close(cards["mean_key"].centroids, cards["hybrid"].centroids)
    for scores, made in cards.items():
        centroids = made.centroids[made.config.layers.index(1)]
        keys = pool.keys[0].float()
        bucket = request_buckets(keys, centroids, scores, sink_size=4, window_size=16)
        assert (scores == "mean_key") == bool((bucket != assign(keys, centroids)).any())
        share = bucket_sizes(bucket, 90) / bucket.shape[1]
        found = made.config.quality["per_head"]["imbalance"][made.config.layers.index(1)]
        torch.testing.assert_close(torch.tensor(found), 90 * share.square().sum(1), rtol=1e-3, atol=1e-3)
    recalls = [cards[s].config.quality["mass_share@0.1"] for s in ("mean_key", "hybrid")]
    assert recalls[0] > recalls[1]


def test_recall_is_that_of_the_keys_read(store) -> None:
    """The bucket-wise recall against the keys one by one, where budgets end with a bucket."""
    pool = load_pool(store, [1], [0, 1], device="cpu")
    torch.manual_seed(0)
    centroids = torch.nn.functional.normalize(torch.randn(2, 6, 16), dim=-1)
    targets = make_targets(pool, centroids, "rot", mean_key=True)
    some = (pool.positions - 16 - 4 >= 0).float()
    torch.testing.assert_close(targets.mass.float().sum(-1), some, rtol=0, atol=1e-2)
    held = held_out(pool, centroids, "rot", scores="hybrid", limit=8)[1]
    bucket = assign(pool.keys[1], centroids)
    guess = torch.rand(held.mass.shape).softmax(-1)
    shared = guess.reshape(2, 2, 8, 6).sum(1)
    for head in range(4):
        for t in range(8):
            position = int(held.context[head, t]) - 1
            mid = range(4, position - 16 + 1)
            sizes = torch.tensor([sum(int(bucket[head // 2, i]) == c for i in mid) for c in range(6)])
            torch.testing.assert_close(held.sizes[head, t], sizes.float(), rtol=1e-3, atol=1e-2)
    fraction = 0.3
    found = recall(held, guess, 2, (fraction, 1.0))
    expected = torch.zeros(4)
    for head in range(4):
        for t in range(8):
            left = float(torch.ceil(held.context[head, t] * fraction))
            sizes, density = held.sizes[head, t], shared[head // 2, t] / held.sizes[head, t].clamp(min=1e-6)
            for c in sorted(range(6), key=lambda c: -float(density[c])):
                if sizes[c] > 0.5:
                    part = min(1.0, max(0.0, left / float(sizes[c])))
                    expected[head] += part * held.mass[head, t, c] / 8
                    left -= float(sizes[c])
    torch.testing.assert_close(found[0], expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[1], torch.ones(4), rtol=1e-3, atol=1e-3)


