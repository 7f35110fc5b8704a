"""The settings file and the engine's configuration: what is refused, each in one sentence, and what is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import make_model
from tiny_artifacts import artifacts

from sparsekv.core.index import Untrained
from sparsekv.core.prefill import SparsePrompts
from sparsekv.runtime.vllm.checks import check_engine, served_shape
from sparsekv.runtime.vllm.index import Room
from sparsekv.runtime.vllm.settings import ServedShape, Serving, served_model
from sparsekv.runtime.vllm.summaries import bytes_of
from sparsekv.util.errors import SparseKVError

SHAPE = ServedShape("LlamaForCausalLM", 3, 4, 2, 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    where = tmp_path_factory.mktemp("settings")
    made, maps = artifacts(make_model(), scores="mean_key", space="rot")
    made.save(where / "router")
    made.save(where / "both" / "router")
    maps.save(where / "both" / "phi")
    maps.config = replace(maps.config, layers=[0, 1], sink_size=8)
    maps.maps = maps.maps.map(lambda w: w[:2])
    maps.shift, maps.gate = maps.shift[:2], maps.gate[:2]
    maps.save(where / "phi")
    artifacts(make_model(), sketched=False)[0].save(where / "bare")
    return where


def load(folder: Path, **entries: Any) -> Serving:
    (folder / "settings.json").write_text(json.dumps(entries))
    return Serving.load(folder / "settings.json")


def test_what_is_not_said_is_the_artifacts(folder: Path) -> None:
    plan = served_model(load(folder, router="router", token_budget=0.02, dense_layers=[-1]), SHAPE)
    assert plan.layers == {0, 1} and plan.selector.token_budget == 0.02
    assert (plan.sink_size, plan.window_size) == (4, 16)
    assert plan.selector.name == "sketch"
    layer = plan.layer(1)
    assert layer is not None and layer.reads_codes and plan.layer(2) is None
    assert served_model(load(folder, router="router"), SHAPE).layer(1).spent_budget == 0.05


def test_a_router_by_name(folder: Path) -> None:
    """What lies beside the file goes before the hub."""
    assert load(folder, router="user/name@main").router == "user/name@main"
    assert load(folder, router="router").router == str(folder / "router")


def test_a_router_without_sketches_is_served_by_buckets(folder: Path) -> None:
    assert served_model(load(folder, router="bare"), SHAPE).selector.name == "router"


def test_maps_complete_where_there_are_some(folder: Path) -> None:
    """On with artifacts that have them, in the layers that they have, off where the settings say so."""
    plan = served_model(load(folder, artifacts="both", dense_layers=[]), SHAPE)
    assert all(plan.maps(i) is not None for i in range(3)) and plan.layer(1) is not None
    for off in ({"artifacts": "both", "completion": "none"}, {"router": "both"}):
        assert served_model(load(folder, **off), SHAPE).maps(1) is None
    alone = served_model(load(folder, router="router", phi="phi", sink_size=4), SHAPE)
    assert alone.maps(1) is not None and alone.maps(2) is None


def test_a_budget_alone_is_served_by_what_is_fitted_to_requests(folder: Path) -> None:
    plan = served_model(load(folder, token_budget=0.02), SHAPE)
    assert plan.layers == {1, 2} and plan.by_means and plan.maps(1) is None
    assert (plan.sink_size, plan.window_size) == (4, 16)
    layer = plan.layer(1)
    assert layer is not None and isinstance(layer.trained, Untrained) and layer.reads_codes
    assert layer.trained.centroids.shape[::2] == (2, 16)
    assert not served_model(load(folder, token_budget=0.02, completion="none"), SHAPE).by_means
    completed = served_model(load(folder, token_budget=0.02, phi="phi"), SHAPE)
    assert not completed.by_means and completed.maps(1) is not None


def test_how_prompts_are_read(folder: Path) -> None:
    for entry, expected in (("dense", None), ("sparse", SparsePrompts()),
                            ({"share": 0.2, "shortest": 0}, SparsePrompts(share=0.2, shortest=0))):
        assert served_model(load(folder, router="router", prefill=entry), SHAPE).reads == expected
    assert served_model(load(folder, router="router"), SHAPE).reads is None


@pytest.mark.parametrize(("entries", "said"), [
    ({}, "names no router"),
    ({"dense_below": 0}, "names no router; expected .* or token_budget alone, which decodes by what is fitted"),
    ({"router": "router", "completion": "uniform"}, "completion 'uniform'; expected phi or centroid or none"),
    ({"router": "router", "budget": 1}, "an entry 'budget'"),
    ({"router": 3}, "router must be a name or a RouterArtifact, found 3"),
    ({"router": "router", "token_budget": 1.5}, "share of the context"),
    ({"router": "router", "candidates": "many"}, "candidates must be a finite number, found 'many'"),
    ({"router": "router", "decode_window": 0}, "decode_window must be a whole number from 1 to .*, found 0"),
    ({"router": "router", "requests": 0}, "requests must be a whole number from 1 to .*, found 0"),
    ({"router": "router", "memory_share": 1}, "memory_share must be a finite number from 0.001 to 0.999, found 1"),
    ({"router": "router", "selector": "quest"}, "selector 'quest'; expected router or sketch"),
    ({"router": "router", "placement": "cpu"}, "placement 'cpu'; expected gpu"),
    ({"router": "router", "probes": 3}, "probes 3; expected none"),
    ({"router": "router", "recommended": "a.json"}, "an entry 'recommended'; expected some of artifacts, "),
    ({"format": "sparsekv-settings", "layers": {"1": {"budget": 0.1}}}, "budgets and gates by layer, which are not"),
    ({"router": "router", "prefill": "half"}, "prefill is 'half'; expected dense, sparse, or a JSON object"),
    ({"router": "router", "prefill": True}, "prefill must be .*, found True"),
    ({"router": "router", "prefill": {"chunk": 3}}, "'chunk': 3.*with some of share, least, exact"),
    ({"router": "router", "prefill": {"share": 2}}, "share must be a finite number from 0.0 to 1.0, found 2"),
    ({"router": "router", "prefill": {"exact": None}}, "exact must be a whole number from 0 .*, found None"),
])
def test_bad_entries(folder: Path, entries: dict[str, Any], said: str) -> None:
    with pytest.raises(SparseKVError, match=said):
        load(folder, **entries)


@pytest.mark.parametrize(("entries", "said"), [
    ({"router": "nowhere"}, "nowhere"),
    ({"router": "bare", "selector": "sketch"}, "no sketches"),
    ({"router": "router", "dense_layers": [3]}, "layer 3; this model has layers 0 to 2"),
    ({"router": "router", "completion": "phi"}, "completion phi needs trained feature maps"),
    ({"artifacts": "phi"}, "hold no router"),
    ({"router": "router", "completion": "centroid"}, "centroid is served where nothing was trained, and there is a"),
    ({"token_budget": 0.02, "selector": "router"}, "selector router needs a trained router"),
    ({"router": "router", "phi": "phi"}, "different sink_size"),
    ({"router": "router", "candidates": 2.0}, "candidates of selector sketch must be .* from 0.0 to 1.0, found 2.0"),
])
def test_settings_that_do_not_fit(folder: Path, entries: dict[str, Any], said: str) -> None:
    with pytest.raises(SparseKVError, match=said):
        served_model(load(folder, **entries), SHAPE)


def test_maps_of_keys_with_blocks_are_not_served() -> None:
    maps = artifacts(make_model(), centred=False, key_blocks=1)[1].layer(1)
    assert maps is not None
    with pytest.raises(SparseKVError, match=r"residual blocks.*completion none in the settings file"):
        bytes_of(maps, Room(2, 64), torch.float32)


def test_another_model(folder: Path) -> None:
    with pytest.raises(SparseKVError, match="num_layers 3, head_dim 16; this model has num_layers 30, head_dim 64"):
        served_model(load(folder, router="router"), SHAPE._replace(num_layers=30, head_dim=64))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(SparseKVError, match="could not be read"):
        Serving.load(tmp_path / "nothing.json")


def engine(**changes: Any) -> SimpleNamespace:
    cache = {"cache_dtype": "auto", "kv_offloading_size": None, "calculate_kv_scales": False}
    parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "enable_dbo": False,
                "tensor_parallel_size": 1}
    whole = {"speculative_config": None, "kv_transfer_config": None, "model_config": SimpleNamespace(rswa_window=None)}
    for name, value in changes.items():
        next(part for part in (cache, parallel, whole) if name in part)[name] = value
    return SimpleNamespace(cache_config=SimpleNamespace(**cache), parallel_config=SimpleNamespace(**parallel), **whole)


def test_a_plain_engine_is_served() -> None:
    check_engine(engine())
    check_engine(engine(cache_dtype="fp8"))


@pytest.mark.parametrize(("changes", "said"), [
    ({"cache_dtype": "fp8_e5m2"}, "cache is of fp8_e5m2"),
    ({"cache_dtype": "fp8", "calculate_kv_scales": True}, "scales of the cache are calculated"),
    ({"speculative_config": object()}, "speculative decoding"),
    ({"decode_context_parallel_size": 2}, "decode_context_parallel_size is 2"),
    ({"prefill_context_parallel_size": 4}, "prefill_context_parallel_size is 4"),
    ({"kv_transfer_config": object()}, "KV connector"),
    ({"kv_offloading_size": 3.0}, "offloading"),
    ({"enable_dbo": True}, "cut in two"),
    ({"model_config": SimpleNamespace(rswa_window=128)}, "a window of 128 tokens behind its prompt"),
])
def test_engines_that_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SparseKVError, match=said):
        check_engine(engine(**changes))


def test_the_shape_of_a_model() -> None:
    text = SimpleNamespace(num_hidden_layers=3, num_attention_heads=4)
    model = SimpleNamespace(hf_text_config=text, hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
                            get_total_num_kv_heads=lambda: 2, get_head_size=lambda: 16)
    assert served_shape(model) == SHAPE
