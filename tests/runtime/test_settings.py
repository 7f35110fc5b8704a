"""A settings file gives every layer its budget and every head its gate; a bad one is refused in one sentence."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import attach, make_model, prompt
from tiny_artifacts import artifacts

import sparsekv
from sparsekv.artifacts.fingerprint import model_fingerprint
from sparsekv.runtime.settings import LayerSetting, Settings
from sparsekv.util.errors import SparseKVError

GREEDY = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
LENGTH = 120


def settings(selector: str = "topk", completion: str = "none", **layers) -> Settings:
    chosen = {1: LayerSetting(0.05), 2: LayerSetting(0.3)} if not layers else {int(k[1:]): v for k, v in layers.items()}
    return Settings(model_fingerprint(make_model()), selector, completion, 4, 16, chosen)


@pytest.mark.parametrize("selector", ["topk", "router"])
def test_every_layer_reads_what_its_setting_promises(tmp_path, selector: str) -> None:
    model, ids = make_model(), prompt(LENGTH)
    router, _ = artifacts(model)
    router.save(tmp_path / "router")
    folder = str(tmp_path / "router") if selector == "router" else None
    made = Settings(**{**vars(settings(selector)), "router": folder})
    path = made.save(tmp_path / "there" / "settings.json")
    with attach(model, settings=path) as attachment:
        cache = attachment.prefill(ids)
        for _ in range(3):
            model(ids[:, :1], past_key_values=cache)
        layers = attachment.report()["layers"]
    promised = [made.selectivity(LENGTH, generated) for generated in range(1, 4)]
    for layer in (1, 2):
        want = sum(p[layer] for p in promised) / 3
        assert layers[layer]["selectivity"] == pytest.approx(want, abs=1e-6)
    assert layers[1]["selectivity"] < layers[2]["selectivity"] < 1
    assert layers[0]["dense_calls"] == 3 and not layers[0]["sparse_calls"]


def test_gates_switch_heads_off() -> None:
    model, ids = make_model(), prompt(LENGTH)
    _, phi = artifacts(model)
    budgets = {"token_budget": 0.05, "dense_layers": (0,), "sink_size": 4, "window_size": 16}

    def logits(**options):
        with attach(model, **options):
            return torch.stack(model.generate(ids, **GREEDY).logits)

    def gated(*gate):
        layer = LayerSetting(0.05, list(gate) if gate else None)
        return logits(settings=settings(completion="phi", l1=layer, l2=layer), phi=phi)

    on, off = logits(selector="topk", phi=phi, **budgets), logits(selector="topk", **budgets)
    assert torch.allclose(gated(1, 1, 1, 1), on) and torch.allclose(gated(0, 0, 0, 0), off, atol=1e-5)
    assert torch.allclose(gated(), off)
    half = gated(1, 0, 1, 1)
    assert not torch.allclose(half, on, atol=1e-3) and not torch.allclose(half, off, atol=1e-3)


def test_a_budget_of_nothing_reads_the_anchors_alone() -> None:
    model, ids = make_model(), prompt(LENGTH)
    router, _ = artifacts(model)
    for selector in ("topk", "router"):
        with attach(model, settings=settings(selector, l1=LayerSetting(0.0)), router=router) as attachment:
            model.generate(ids, max_new_tokens=2, do_sample=False)
            assert attachment.report()["layers"][1]["selectivity"] == pytest.approx(21 / 121)


def test_bad_settings_are_refused_in_one_sentence(tmp_path) -> None:
    model = make_model()
    good = json.loads(settings(completion="phi", l1=LayerSetting(0.1, [1, 1, 1, 1])).save(tmp_path / "s").read_text())
    del good["sha256"]  # as a person who edits the file
    layer = good["layers"]["1"]
    other = {**good["model"], "num_layers": 30}
    cases = {
        "no JSON": "{", "its JSON is no object": "[]", "no settings file": "{}",
        "has format 9; this version of sparsekv reads up to 1": {**good, "format_version": 9},
        "layers is None, expected a setting": {k: v for k, v in good.items() if k != "layers"},
        "names layer 7": {**good, "layers": {"7": layer}},
        "the budget 3;": {**good, "layers": {"1": {**layer, "budget": 3}}},
        "gate of 2 values": {**good, "layers": {"1": {**layer, "gate": [1, 1]}}},
        "completion 'magic'": {**good, "completion": "magic"},
        "unknown selector 'best'": {**good, "selector": "best", "completion": "none"},
        "made for a model with num_layers 30": {**good, "model": other},
        "needs trained feature maps": good,
    }
    for message, content in cases.items():
        path = tmp_path / "bad.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(SparseKVError, match=message) as error:
            attach(model, settings=path)
        assert "\n" not in str(error.value)
    with pytest.raises(SparseKVError, match="no settings at"):
        attach(model, settings=tmp_path / "none")
    with pytest.raises(SparseKVError, match="their own token_budget"):
        attach(model, settings=tmp_path / "s", token_budget=3)


def test_a_config_a_file_and_arguments_are_the_same_options(tmp_path) -> None:
    model = make_model()
    artifacts(model)[0].save(tmp_path / "router")
    given = {"selector": "router", "token_budget": 0.1, "sink_size": 2, "dense_layers": [0, -1], "dense_below": 7,
             "prefill": {"share": 0.5}, "options": {"adapt": False}}
    (tmp_path / "c.json").write_text(json.dumps({"router": "router", **given}))
    router = str(tmp_path / "router")
    config = sparsekv.SparseConfig(router=router, **given)
    for options in ({"config": tmp_path / "c.json"}, {"config": config}, {"config": config, "sink_size": 2},
                    {"router": router, **{k: v for k, v in given.items() if k != "options"}, "adapt": False}):
        with sparsekv.attach(model, **options) as attachment:
            found = attachment.decoding
        assert found.selector.token_budget == 0.1 and found.selector.adapt is False and found.prompts.share == 0.5
        assert (found.sink_size, found.window_size, found.dense_below, found.dense_layers) == (2, 16, 7, {0, 2})
    with sparsekv.attach(model, config=config, sink_size=9) as attachment:
        assert attachment.decoding.sink_size == 9
    assert sparsekv.SparseConfig.of(config).given() == {"router": router, **given}


@pytest.mark.parametrize(("content", "message"), [
    ({"sinks": 3}, "has an entry 'sinks'; expected some of artifacts, router, "),
    ({"sink_size": "many"}, "sink_size must be a whole number from 0 to 2147483647, found 'many'"),
    ({"dense_layers": [0, "last"]}, r"dense_layers must be whole numbers such as \[0, 1\], found"),
    ({"placement": "disk"}, "unknown placement 'disk': expected one of gpu, offload, cpu"),
    ({"memory_share": 0.1}, "has an entry 'memory_share'"), ({"layers": {}}, "give it as settings=")])
def test_a_bad_config_file_is_refused_in_one_sentence(tmp_path, content: dict, message: str) -> None:
    (tmp_path / "c.json").write_text(json.dumps(content))
    with pytest.raises(SparseKVError, match=message) as error:
        attach(make_model(), config=tmp_path / "c.json")
    assert str(tmp_path / "c.json") in str(error.value)


def test_what_is_no_config_is_refused() -> None:
    for wrong in (3, {"sink_size": 4}):
        with pytest.raises(SparseKVError, match="config is a SparseConfig or the path of a settings file, found"):
            attach(make_model(), config=wrong)
