"""Training on a real (tiny) capture: quality must come from training, artifacts must survive the disk."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "capture"))

from test_families import captured, tiny

from sparsekv.artifacts.format import CONFIG, TENSORS
from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.errors import SparseKVError
from sparsekv.inspection import InspectConfig, inspect_path
from sparsekv.kernels import router_logits
from sparsekv.models.feature_map import FeatureMap, log_kernel
from sparsekv.models.router import BucketRouter
from sparsekv.trainers.fit import read_metrics
from sparsekv.trainers.kmeans import imbalance, spherical_kmeans
from sparsekv.trainers.phi import PhiConfig, train_phi
from sparsekv.trainers.router import RouterConfig, train_router


def sharp(family: str = "llama"):
    """A tiny random model whose attention is far from uniform."""
    model = tiny(family)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(30)
    return model


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return captured(sharp(), tmp_path_factory.mktemp("capture") / "s", num_documents=5, context_length=200,
                    queries_per_document=64)


def test_phi_learns_and_survives_the_disk(store, tmp_path) -> None:
    options = {"capture": str(store.path), "batch_size": 16, "keys_per_step": 64, "width": 32}
    short = train_phi(PhiConfig(output=str(tmp_path / "a"), max_steps=1, calibrate=False, **options))
    long = train_phi(PhiConfig(output=str(tmp_path / "b"), max_steps=150, **options))
    quality = long.config.quality
    assert quality["sink_tail + phi error"] < 0.9 * quality["sink_tail error"]
    assert quality["sink_tail + phi error"] < 0.9 * short.config.quality["sink_tail + phi error"]
    losses = read_metrics(tmp_path / "b" / "metrics.csv")["loss"]
    assert losses[-1] < 0.8 * losses[0]
    again = PhiArtifact.load(tmp_path / "b")
    x = torch.randn(1, 4, 3, 16)
    torch.testing.assert_close(again.layer(1).log_phi_q(x), long.layer(1).log_phi_q(x))
    assert again.layer(7) is None
    again.check(sharp())
    with pytest.raises(SparseKVError, match="made for a model"):
        again.check(tiny("qwen2"))


@pytest.mark.parametrize(("scores", "space", "scope"), [
    ("mlp", "pre", "kv_head"), ("mlp", "rot", "query_head"), ("mean_key", "rot", "kv_head"),
    ("hybrid", "rot", "kv_head")])
def test_router_learns_and_survives_the_disk(store, tmp_path, scores: str, space: str, scope: str, capsys) -> None:
    options = {"capture": str(store.path), "num_buckets": 12, "hidden_size": 24, "batch_size": 32, "scores": scores,
               "key_space": space, "router_scope": scope, "long_range": 20}
    short = train_router(RouterConfig(output=str(tmp_path / "a"), max_steps=1, **options))
    long = train_router(RouterConfig(output=str(tmp_path / "b"), max_steps=150, **options))
    share, oracle = (long.config.quality[f"{n}mass_share@0.05"] for n in ("", "oracle_"))
    assert 0 < share < 1.1 * oracle  # the oracle ranks buckets; the last one is read in part
    if scores == "mlp":
        assert share > short.config.quality["mass_share@0.05"]
    again = RouterArtifact.load(tmp_path / "b")
    assert torch.equal(again.centroids, long.centroids)
    torch.testing.assert_close(again.centroids.norm(dim=-1), torch.ones(3, 2, 12))
    assert (again.weights is None) == (scores == "mean_key")
    inspect_path(InspectConfig(path=tmp_path / "b", heads=True))
    shown = capsys.readouterr().out
    assert "12 buckets" in shown and "layer   2:" in shown and "LlamaForCausalLM" in shown


@pytest.mark.parametrize("rank", [0, 4])
def test_folding_batch_norm_changes_nothing(rank: int) -> None:
    torch.manual_seed(0)
    router = BucketRouter(3, 8, 10, 16, rank)
    x = torch.randn(3, 50, 8) * 4 + 1
    for _ in range(20):
        router(x)
    router.eval()
    logits = router_logits(x.transpose(0, 1), router.fold()).transpose(0, 1)
    torch.testing.assert_close(logits, router(x), rtol=1e-4, atol=1e-4)
    assert torch.linalg.matrix_rank(router.fold().w2).tolist() == [rank or 10] * 3


@pytest.mark.parametrize("scores", ["mlp", "hybrid"])
def test_the_output_matrix_of_a_router_may_be_of_low_rank(store, tmp_path, scores: str) -> None:
    options = {"capture": str(store.path), "num_buckets": 12, "hidden_size": 24, "batch_size": 32, "long_range": 20,
               "max_steps": 40, "scores": scores, "key_space": "rot", "validate_every": 0}
    train_router(RouterConfig(output=str(tmp_path / "a"), output_rank=3, **options))
    weights = RouterArtifact.load(tmp_path / "a").weights
    assert weights is not None and weights.w2.shape == (3, 2, 24, 12)
    assert (torch.linalg.matrix_rank(weights.w2) == 3).all()
    with pytest.raises(SparseKVError, match="does not limit"):
        train_router(RouterConfig(output=str(tmp_path / "b"), output_rank=12, **options))


def test_log_kernel_is_the_log_of_the_inner_product() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 5, 6, dtype=torch.float64) * 10, torch.randn(2, 7, 6, dtype=torch.float64) * 10
    torch.testing.assert_close(log_kernel(q, k), torch.logsumexp(q[:, :, None] + k[:, None], -1))
    closed = log_kernel(torch.full_like(q, float("-inf")), k)
    assert torch.isneginf(closed).all()


def test_whitening_does_not_change_with_the_data_scale() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 400, 8)
    one, other = (FeatureMap(2, 8, 4, 16) for _ in range(2))
    other.load_state_dict(one.state_dict())
    one.whiten(x)
    other.whiten(x * 37 + 5)
    torch.testing.assert_close(one(x), other(x * 37 + 5), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("engine", ["faiss", "torch"])
def test_kmeans_finds_planted_directions(engine: str) -> None:
    torch.manual_seed(0)
    centres = torch.nn.functional.normalize(torch.randn(2, 6, 16), dim=-1)
    keys = (centres[:, torch.arange(600) % 6] + 0.02 * torch.randn(2, 600, 16)) * torch.rand(2, 600, 1).add(0.5)
    found = spherical_kmeans(keys, 40, engine=engine)
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(2, 40))
    assert float((centres @ found.mT).amax(-1).min()) > 0.99
    assert float(imbalance(torch.tensor([5, 5, 5]))) == pytest.approx(1.0)
    assert float(imbalance(torch.tensor([15, 0, 0]))) == pytest.approx(3.0)


@pytest.mark.parametrize("engine", ["faiss", "torch"])
def test_kmeans_leaves_no_bucket_empty(engine: str) -> None:
    """Two tight clusters and a few strays: most buckets that start in a cluster would end with no key."""
    torch.manual_seed(0)
    centres = torch.nn.functional.normalize(torch.randn(1, 2, 8), dim=-1)
    tight = centres[:, torch.arange(400) % 2].clone() + 1e-7 * torch.randn(1, 400, 8)
    keys = torch.cat([tight, torch.randn(1, 30, 8)], 1)
    found = spherical_kmeans(keys, 32, engine=engine, iterations=4)
    sizes = torch.bincount((keys @ found.mT).argmax(-1)[0], minlength=32)
    assert int((sizes == 0).sum()) <= 1, sizes


def test_kmeans_plus_plus_starts_in_every_cluster() -> None:
    torch.manual_seed(0)
    centres = torch.nn.functional.normalize(torch.randn(2, 24, 32), dim=-1)
    # one cluster has nearly all keys: random keys start there
    owner = torch.cat([torch.zeros(2000, dtype=torch.long), torch.arange(24).repeat(5)])
    keys = centres[:, owner] + 0.002 * torch.randn(2, len(owner), 32)
    reached = {init: int(((centres @ spherical_kmeans(keys, 24, engine="torch", init=init, iterations=0).mT).amax(-1)
                          > 0.95).sum()) for init in ("random", "kmeans++")}
    assert reached["kmeans++"] >= 44 > reached["random"]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["router", "phi"])
def test_a_graph_of_a_step_is_the_step(store, tmp_path, kind: str) -> None:
    """On CUDA: the replayed graph trains what the steps one by one do."""
    config, work = {"router": (RouterConfig, train_router), "phi": (PhiConfig, train_phi)}[kind]
    options = {"router": {"num_buckets": 12, "hidden_size": 24, "long_range": 20, "kmeans_engine": "torch"},
               "phi": {"keys_per_step": 64, "width": 16, "ema": 0.9}}[kind]
    losses = []
    for graph in (True, False):
        out = tmp_path / str(graph)
        work(config(capture=str(store.path), output=str(out), max_steps=100, batch_size=16, gradient_clip=1.0,
                    precision="float32", validate_every=25, device="cuda", cuda_graph=graph, **options))
        losses.append(torch.tensor(read_metrics(out / "metrics.csv")["loss"]))
    torch.testing.assert_close(*losses, rtol=1e-2, atol=1e-3)
    assert losses[0][-1] < losses[0][0]


def test_bad_input_is_refused_before_training(store, tmp_path) -> None:
    router = {"capture": str(store.path), "output": str(tmp_path / "r")}
    for options, message in (
            ({"num_buckets": 5000}, "fewer keys a head than the 5000 buckets"),
            ({"key_space": "x"}, "unknown key space"),
            ({"long_range": 500}, "no captured query looks further back"),
            ({"validation_documents": 5}, "validation documents"),
            ({"capture": str(tmp_path / "nothing")}, "no capture store")):
        with pytest.raises(SparseKVError, match=message):
            train_router(RouterConfig(**{**router, "num_buckets": 4, **options}))
        assert not (tmp_path / "r").exists() or not any((tmp_path / "r").iterdir())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("x")
    for overwrite, message in ((False, "already exists"), (True, "holds something else")):
        with pytest.raises(SparseKVError, match=message):
            train_phi(PhiConfig(capture=str(store.path), output=str(tmp_path / "full"), overwrite=overwrite))


def test_nan_in_a_shard_is_named(tmp_path) -> None:
    broken = captured(tiny("llama"), tmp_path / "s", num_documents=2)
    shard = tmp_path / "s" / "doc00000" / "layer001.safetensors"
    data = bytearray(shard.read_bytes())
    size = int.from_bytes(data[:8], "little")
    first, last = json.loads(data[8:8 + size])["values"]["data_offsets"]
    assert last - first == 2 * 120 * 16 * 2  # bfloat16
    data[8 + size + first:8 + size + first + 2] = b"\xc0\x7f"
    shard.write_bytes(data)
    with pytest.raises(SparseKVError, match="layer 1 of document 0"):
        train_phi(PhiConfig(capture=str(broken.path), output=str(tmp_path / "p"), max_steps=1))


def test_damaged_artifacts_are_refused(store, tmp_path) -> None:
    made = tmp_path / "phi"
    train_phi(PhiConfig(capture=str(store.path), output=str(made), max_steps=1, batch_size=4, keys_per_step=16,
                        width=8))
    with pytest.raises(SparseKVError, match="is a 'phi' artifact; expected a 'router'"):
        RouterArtifact.load(made)
    config = json.loads((made / CONFIG).read_text())
    (made / CONFIG).write_text(json.dumps({**config, "width": 9}))
    with pytest.raises(SparseKVError, match="has shape"):
        PhiArtifact.load(made)
    (made / CONFIG).write_text(json.dumps({**config, "format_version": 7}))
    with pytest.raises(SparseKVError, match="has format 7"):
        PhiArtifact.load(made)
    (made / CONFIG).write_text(json.dumps(config))
    (made / TENSORS).write_bytes((made / TENSORS).read_bytes()[:1000])
    with pytest.raises(SparseKVError, match="is damaged"):
        PhiArtifact.load(made)
    with pytest.raises(SparseKVError, match="is a capture store"):
        PhiArtifact.load(store.path)
    with pytest.raises(SparseKVError, match="no artifact at"):
        PhiArtifact.load(tmp_path / "nothing")
