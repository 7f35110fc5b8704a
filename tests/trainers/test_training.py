"""Training on a real (tiny) capture: quality must come from training, artifacts must survive the disk."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "capture"))

from test_families import captured, tiny

from sparsekv.artifacts.format import CONFIG, TENSORS
from sparsekv.artifacts.inspection import InspectConfig, inspect_path
from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.capture.store.manifest import MANIFEST, sealed
from sparsekv.capture.store.shard import checksum
from sparsekv.core.rope import rotate, unrotate
from sparsekv.trainers.metrics import read_metrics
from sparsekv.trainers.options import chosen
from sparsekv.trainers.phi import RECIPES as PHIS
from sparsekv.trainers.phi import PhiConfig, PhiRecipe, PhiTask, train_phi
from sparsekv.trainers.pool import Part, load_pool
from sparsekv.trainers.router import RECIPES as ROUTERS
from sparsekv.trainers.router import RouterConfig, RouterRecipe, RouterTask, train_router
from sparsekv.util.errors import SparseKVError


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
    short = train_phi(PhiConfig(output=str(tmp_path / "a"), max_steps=1, **options))
    long = train_phi(PhiConfig(output=str(tmp_path / "b"), max_steps=150, **options))
    quality = long.config.quality
    assert quality["sink_tail + phi error"] < 0.9 * quality["sink_tail error"]
    assert quality["sink_tail + phi error"] < 0.97 * short.config.quality["sink_tail + phi error"]  # calibrated too
    assert long.config.centred and long.config.capped
    losses = read_metrics(tmp_path / "b" / "metrics.csv")["loss"]
    assert losses[-1] < 0.8 * losses[0]
    again = PhiArtifact.load(tmp_path / "b")
    x, centre = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 16)
    torch.testing.assert_close(again.layer(1).maps.log_phi_q(x, centre), long.layer(1).maps.log_phi_q(x, centre))
    assert again.layer(7) is None
    again.check(sharp())
    with pytest.raises(SparseKVError, match="made for a model"):
        again.check(tiny("qwen2"))


@pytest.mark.parametrize(("scores", "space"), [("mlp", "pre"), ("mean_key", "rot")])
def test_router_learns_and_survives_the_disk(store, tmp_path, scores: str, space: str, capsys) -> None:
    options = {"capture": str(store.path), "num_buckets": 12, "scores": scores, "key_space": space}
    small = RouterRecipe(hidden_size=24, batch_size=32)
    long = train_router(RouterConfig(output=str(tmp_path / "b"), max_steps=150, **options), small)
    share, oracle = (long.config.quality[f"{n}mass_share@0.1"] for n in ("", "oracle_"))
    assert 0 < share <= oracle + 0.02  # the oracle ranks buckets; the last one is read in part
    if scores == "mlp":
        short = train_router(RouterConfig(output=str(tmp_path / "a"), max_steps=1, **options), small)
        assert share > short.config.quality["mass_share@0.1"]
    again = RouterArtifact.load(tmp_path / "b")
    assert torch.equal(again.centroids, long.centroids)
    assert again.config.sketch_bytes == 4 and all(torch.equal(*x) for x in zip(again.sketch, long.sketch, strict=True))
    card = long.config.quality
    for budget in (0.02, 0.05):
        assert card[f"mass_share@{budget}"] < card[f"sketch_mass_share@{budget}"] <= 1
    torch.testing.assert_close(again.centroids.norm(dim=-1), torch.ones(3, 2, 12))
    assert (again.weights is None) == (scores == "mean_key")
    inspect_path(InspectConfig(path=tmp_path / "b", heads=True))
    shown = capsys.readouterr().out
    assert "12 buckets" in shown and "layer   2:" in shown and "LlamaForCausalLM" in shown


def test_defaults_are_the_recipe_and_presets_the_papers(store) -> None:
    router, phi = RouterConfig("c", "o"), PhiConfig("c", "o")
    assert chosen(router, ROUTERS) == RouterRecipe() and RouterRecipe().scores == "mean_key"
    assert chosen(phi, PHIS) == PhiRecipe()
    saap = chosen(RouterConfig("c", "o", preset="saap", num_buckets=64, scores="mean_key"), ROUTERS)
    assert (saap.num_buckets, saap.scores, saap.key_space, saap.long_range) == (64, "mean_key", "pre", 1024)
    assert (saap.sink_size, saap.window_size, saap.constant_rate, saap.one_window) == (1, 2047, True, True)
    assert (saap.hidden_size, saap.max_steps, saap.batch_size, saap.lr) == (1024, 40_000, 1000, 1e-5)
    paper = chosen(PhiConfig("c", "o", preset="completion", centred=True), PHIS)
    assert paper.centred and not (paper.calibrate or paper.output_weight or paper.under_weight or paper.turned)
    assert (paper.query_blocks, paper.key_blocks, paper.width, paper.key_width) == (1, 1, 256, 256)
    assert paper.last_weights and not PhiRecipe().last_weights
    with pytest.raises(SparseKVError, match="unknown preset 'x': expected one of default, saap"):
        chosen(RouterConfig("c", "o", preset="x"), ROUTERS)


@pytest.mark.parametrize("preset", ["saap", "completion"])
def test_presets_train(store, tmp_path, preset: str) -> None:
    common = {"capture": str(store.path), "output": str(tmp_path / "a"), "preset": preset, "max_steps": 3}
    if preset == "saap":
        with pytest.raises(SparseKVError, match="sink of 1 and a local window of 2047"):
            train_router(RouterConfig(**common, num_buckets=12))
        small = replace(ROUTERS[preset], hidden_size=24, batch_size=8, window_size=20)
        made = train_router(RouterConfig(**common, num_buckets=12), small)
        assert made.config.key_space == "pre" and made.weights is not None and made.sketch is None
        assert (made.config.sink_size, made.config.window_size) == (1, 20)
    else:
        with pytest.raises(SparseKVError, match="--centred needs maps of keys without blocks"):
            train_phi(PhiConfig(**common, centred=True))
        phi = train_phi(PhiConfig(**common, batch_size=8, width=16, key_width=24))
        assert not (phi.config.centred or phi.config.capped)
        assert float(phi.shift.abs().max()) == 0 and float(phi.gate.min()) == 1
        again = PhiArtifact.load(phi.path)
        assert "1 ReZero block(s): a step completes outside the attention kernel" in again.summary()
        for which, width in (("query", 16), ("key", 24)):
            weights = getattr(again.maps, which)
            assert weights.w_a.shape[-2:] == (width, width) and float(weights.alpha.abs().min()) > 0
            assert torch.equal(weights.w_b, getattr(phi.maps, which).w_b)


def test_maps_of_every_form_train_and_load(store, tmp_path, monkeypatch) -> None:
    """The artifact carries the form: loaded again it is what was trained, and a form that its tensors do not have is
    refused."""
    form = {"features": 20, "query_blocks": 2, "key_width": 8, "shared": False}
    monkeypatch.setitem(PHIS, "default", replace(PHIS["default"], **form))
    out = tmp_path / "phi"
    made = train_phi(PhiConfig(str(store.path), str(out), max_steps=3, batch_size=8, keys_per_step=32, width=16))
    again = PhiArtifact.load(out)
    config = again.config
    assert (config.num_features, config.width, config.query_blocks) == (20, 16, 2)
    assert (config.key_width, config.shared) == (8, False)
    assert again.maps.centred is not None and again.maps.centred.w_out.shape[-2:] == (8, 10)
    for name, tensor in made.maps.named().items():
        assert torch.equal(again.maps.named()[name], tensor), name
    raw = json.loads((out / CONFIG).read_text())
    del raw["sha256"]
    for name, value in (("query_blocks", 1), ("key_width", 9), ("shared", True), ("key_blocks", 1)):
        (out / CONFIG).write_text(json.dumps({**raw, "format_version": 1, name: value}))
        with pytest.raises(SparseKVError, match=r"map\.|a centred half and 1 blocks"):
            PhiArtifact.load(out)
    del raw["key_width"]  # as format 1 has it
    (out / CONFIG).write_text(json.dumps({**raw, "format_version": 1}))
    with pytest.raises(SparseKVError, match=r"names no key_width.*train the maps again with sparsekv train-phi"):
        PhiArtifact.load(out)


def test_far_queries_are_those_that_look_far(store) -> None:
    pool = load_pool(store, [Part(1, 0, 2)], [0, 1], device="cpu")
    recipe = RouterRecipe(num_buckets=4, hidden_size=8, batch_size=64, long_range=60, one_window=True)
    centroids = torch.nn.functional.normalize(torch.randn(2, 4, 16), dim=-1)
    task = RouterTask(recipe, pool, pool, centroids, [Part(1, 0, 2)], 0)
    distance = pool.positions[:, None] - pool.best
    assert torch.equal(task.order, (-distance).argsort(dim=2, stable=True).int())  # the same queries on every device
    for document in range(2):
        for head in range(4):
            number = int(task.number[document, head])
            far, near = distance[document, head][task.order[document, head].long()].split([number, 64 - number])
            assert int(far.min()) > 60 or number == 16
            assert not len(near) or int(near.max()) <= int(far.min())
    draw = task.draws(0, 3)
    assert pool.group == 2 and draw["document"].shape == (3, 32)  # the heads of a group share a batch
    assert bool((draw["document"] == draw["document"][:, :1]).all())
    assert torch.equal(task.draws(2, 1)["query"][0], draw["query"][2])


def test_windows_are_turned_past_their_end(store) -> None:
    """A turned query and key score as they would at the positions that they are turned to, up to twice the window's;
    the paper's recipe turns none."""
    pool = load_pool(store, [Part(1, 0, 2)], [0, 1], device="cpu")
    recipe = PhiRecipe(width=16, keys_per_step=64, batch_size=12, turned=0.5)
    task, still = (PhiTask(r, pool, pool, [Part(1, 0, 2)], 0) for r in (recipe, replace(recipe, turned=0.0)))
    draws = task.draws(0, 200)
    plain = still.draws(0, 200)
    assert "onward" not in plain and all(torch.equal(x, draws[name]) for name, x in plain.items())
    onward, further = draws["onward"], draws["further"]
    assert int((onward + further).max()) < 200 and min(int(onward.max()), int(further.max())) > 150
    assert 0.15 < float((further > 0).float().mean()) < 0.35
    assert 0.4 < float((onward > 0).float().mean()) < 0.6

    step = int(((onward > 0) & (further > 0)).any(1).nonzero()[0])
    draw = {name: rows[step] for name, rows in draws.items()}
    found = {}
    loss = task.loss

    def seen(teacher, student, mask):
        found["teacher"] = teacher
        return loss(teacher, student, mask)

    task.loss = seen
    task.losses(draw)["loss"].sum().backward()
    assert all(bool(p.grad.isfinite().all()) and bool(p.grad.abs().sum() > 0)
               for name, p in task.named_parameters() if not name.endswith(("w_a", "w_b", "b_a")))
    cos, sin = (t[0, 1] for t in pool.rope.tables())
    angles = torch.arange(400)[:, None] * torch.atan2(sin, cos)
    document, want = draw["document"], []
    for row in range(2):
        place = pool.positions[document[row], draw["query"][row]]
        q = task._drawn("queries", draw["query"], document)[:, row]
        k = task._drawn("keys", draw["key"], document)[:, row]
        moved = []
        for x, at, by in ((q, place, draw["onward"][row] + draw["further"][row]),
                          (k, draw["key"][row], draw["onward"][row])):
            bare = unrotate(x, angles[at].cos(), angles[at].sin(), "half")
            moved.append(rotate(bare, angles[at + by].cos(), angles[at + by].sin(), "half"))
        want.append((moved[0].unflatten(0, (2, 2)) @ moved[1][:, None].mT) * pool.scale)
    teacher = found["teacher"].reshape(2, 2, 2, 6, -1)  # [Lk, D, group, queries, keys]
    torch.testing.assert_close(teacher, torch.stack(want, 1), rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["router", "phi"])
def test_a_graph_of_a_step_is_the_step(store, tmp_path, kind: str) -> None:
    """The graph that CUDA replays trains what the CPU does step by step."""
    config, work = {"router": (RouterConfig, train_router), "phi": (PhiConfig, train_phi)}[kind]
    options = {"router": {"scores": "mlp", "num_buckets": 12},
               "phi": {"keys_per_step": 64, "width": 16, "batch_size": 16}}[kind]
    small = {"router": (RouterRecipe(hidden_size=24, batch_size=16),), "phi": ()}[kind]
    losses = []
    for device in ("cuda", "cpu"):
        out = tmp_path / device
        work(config(capture=str(store.path), output=str(out), max_steps=100, device=device, **options), *small)
        losses.append(torch.tensor(read_metrics(out / "metrics.csv")["loss"]))
    torch.testing.assert_close(losses[0][:20], losses[1][:20], rtol=2e-2, atol=2e-3)
    assert losses[0][-1] < losses[0][0]


def test_bad_input_is_refused_before_training(store, tmp_path) -> None:
    router = {"capture": str(store.path), "output": str(tmp_path / "r")}
    for options, message in (
            ({"num_buckets": 5000}, "5000 buckets need at least as many keys"),
            ({"key_space": "x"}, "unknown key space"),
            ({"sketch_bytes": 9}, "has 17 channels; expected 1 to 16, the head dimension; use other bytes"),
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
    with pytest.raises(SparseKVError, match=r"layer001\.safetensors: contents changed"):
        train_phi(PhiConfig(capture=str(broken.path), output=str(tmp_path / "p"), max_steps=1))
    manifest = {k: v for k, v in broken.manifest.items() if k != "sha256"}  # as if it had been captured like that
    manifest["shards"]["doc00000/layer001.safetensors"]["sha256"] = checksum(shard)
    (tmp_path / "s" / MANIFEST).write_text(json.dumps(sealed(manifest)))
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
    with pytest.raises(SparseKVError, match="checksum"):
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
