"""What a transformers cache must be able to do, a prefix on disk, long generation."""

from __future__ import annotations

import gc
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import attach, make_model, prompt
from tiny_artifacts import artifacts
from torch._subclasses import FakeTensor

from sparsekv.util.errors import SparseKVError


def step(model, ids, cache):
    return model(ids, past_key_values=cache, use_cache=True).logits


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_several_turns_equal_one_prompt(family: str):
    model, ids = make_model(family), prompt(140)
    plain = model(ids).logits
    with attach(model, selector="topk", token_budget=1.0, dense_layers=(), decode_window=8) as attachment:
        cache = attachment.prefill(ids[:, :50], chunk_size=20)
        got = [step(model, ids[:, t:t + 1], cache) for t in range(50, 80)]
        got.append(step(model, ids[:, 80:110], cache))
        got += [step(model, ids[:, t:t + 1], cache) for t in range(110, 140)]
    torch.testing.assert_close(torch.cat(got, 1), plain[:, 50:], rtol=1e-3, atol=1e-3)


def test_crop_into_the_index_builds_it_again():
    model, ids = make_model(), prompt(120)
    router, phi = artifacts(model)
    options = {"router": router, "phi": phi, "token_budget": 10, "decode_window": 8}
    with attach(model, **options) as attachment:
        cache = attachment.prefill(ids[:, :60])
        for t in range(60, 100):
            step(model, ids[:, t:t + 1], cache)
        cache.crop(-45)
        assert cache.get_seq_length() == 55
        after = [step(model, ids[:, t:t + 1], cache) for t in range(55, 65)]
        fresh = attachment.prefill(ids[:, :55])
        want = [step(model, ids[:, t:t + 1], fresh) for t in range(55, 65)]
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.isfinite(step(model, ids[:, :30], cache)).all()
    # earlier decoded tokens changed the keys of deeper layers, so only the shape of things is the same
    assert all(torch.isfinite(a).all() and a.shape == b.shape for a, b in zip(after, want, strict=True))


def test_rows_are_selected_repeated_and_reordered():
    model, ids = make_model(), prompt(60, 3)
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    router, phi = artifacts(model)
    with attach(model, router=router, phi=phi, token_budget=10) as attachment:
        cache = attachment.prefill(ids, mask)
        more = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], 1)
        new = prompt(1, 3, seed=5)
        want = model(new, past_key_values=cache.fork(), attention_mask=more, use_cache=True).logits
        for order in ([2, 0, 1], [1, 1]):
            fork = cache.fork()
            model(new, past_key_values=fork, attention_mask=more, use_cache=True)
            fork.crop(-1)
            fork.batch_select_indices(torch.tensor(order))
            got = model(new[order], past_key_values=fork, attention_mask=more[order], use_cache=True).logits
            torch.testing.assert_close(got, want[order], rtol=1e-4, atol=1e-4)
        cache.batch_repeat_interleave(2)
        six = model(new.repeat_interleave(2, 0), past_key_values=cache, attention_mask=more.repeat_interleave(2, 0),
                    use_cache=True).logits
    torch.testing.assert_close(six, want.repeat_interleave(2, 0), rtol=1e-4, atol=1e-4)


def test_beam_search_and_prompt_lookup_equal_the_plain_model():
    model, ids = make_model(), prompt(40)
    for options in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
        plain = model.generate(ids, max_new_tokens=12, do_sample=False, **options)
        with attach(model, selector="topk", token_budget=1.0, dense_layers=()):
            assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False, **options), plain)


def test_a_prefix_that_is_read_whole_is_saved_too(tmp_path):
    """Nothing lies between its sink and its window, so that the estimate is of an empty sum."""
    model, ids = make_model(), prompt(90)
    router, phi = artifacts(model)
    with attach(model, router=router, phi=phi, token_budget=12, window_size=100) as attachment:
        cache = attachment.prefill(ids[:, :80])
        want = step(model, ids[:, 80:81], cache.fork())
        attachment.save_prefix(cache, tmp_path / "prefix")
        torch.testing.assert_close(step(model, ids[:, 80:81], attachment.load_prefix(tmp_path / "prefix")), want)


def test_a_prefix_is_saved_and_loaded(tmp_path):
    model, ids = make_model(), prompt(90)
    router, phi = artifacts(model)
    options = {"router": router, "phi": phi, "token_budget": 12}
    path = tmp_path / "prefix.safetensors"
    with attach(model, **options) as attachment:
        cache = attachment.prefill(ids[:, :80])
        want = step(model, ids[:, 80:81], cache.fork())
        attachment.save_prefix(cache, path)
        with pytest.raises(SparseKVError, match="empty"):
            attachment.save_prefix(attachment.cache(), tmp_path / "empty")
    with attach(model, **options) as again:
        torch.testing.assert_close(step(model, ids[:, 80:81], again.load_prefix(path)), want)
    other, _ = artifacts(make_model("qwen3"))
    with attach(make_model("qwen3"), router=other, token_budget=3) as foreign:
        with pytest.raises(SparseKVError, match="LlamaForCausalLM"):
            foreign.load_prefix(path)
        with pytest.raises(SparseKVError, match="no prefix"):
            foreign.load_prefix(tmp_path / "nothing")


@pytest.mark.parametrize("options", [{"fit": "fixed"}, {"fit": "fitted"}, {"selector": "router"},
                                     {"selector": "router", "scores": "mlp"}, {"selector": "topk"},
                                     {"selector": "quest", "completion": "centroid"}], ids=str)
def test_a_prefix_brings_its_index_and_estimates(tmp_path, options, monkeypatch):
    """Nothing is built again, and steps are those of the cache that was saved, a question of several tokens later too;
    other artifacts, selectors and options are refused."""
    model, ids = make_model(), prompt(90)
    router, phi = artifacts(model)
    options = {"router": router, "phi": phi, "token_budget": 12, **options}
    path, built = tmp_path / "prefix.safetensors", []
    with attach(model, **options) as attachment:
        cache = attachment.prefill(ids[:, :80])
        attachment.save_prefix(cache, path)
        assert all(layer.state is None for layer in cache.layers)
        want = [step(model, ids[:, t:t + 1], cache) for t in range(80, 84)]
    monkeypatch.setattr("sparsekv.runtime.hf.begin.build_layers", lambda *given: built.append(given))
    with attach(model, **{**options, "token_budget": 12}) as again:
        held = again.load_prefix(path)
        for t, one in zip(range(80, 84), want, strict=True):
            torch.testing.assert_close(step(model, ids[:, t:t + 1], held), one)
        asked = again.prefill(ids[:, 80:86], cache=again.load_prefix(path))
        assert torch.isfinite(step(model, ids[:, 86:87], asked)).all()
        assert int(asked.layers[1].state.view.regions.mid_last) == 64 and not built
        cut = again.load_prefix(path)
        cut.crop(70)
        assert cut.built is None
    other = "topk" if options.get("selector") == "quest" else "quest"
    with attach(model, **{**options, "selector": other, "fit": None, "scores": None}) as wrong:
        with pytest.raises(SparseKVError, match=f"index and estimates made with selector .*; this attachment has select"
                                                f"or '{other}'.*index=False"):
            wrong.load_prefix(path)
        assert wrong.load_prefix(path, index=False).get_seq_length() == 80
    if "selector" not in options:
        router.centroids = router.centroids.flip(-1)
        with attach(model, **options) as wrong, pytest.raises(SparseKVError, match=r"made with router '.*has router '"):
            wrong.load_prefix(path)


def test_a_prefix_written_with_index_and_estimate_inside_still_loads(tmp_path):
    """As version 0.1 wrote them when decoding had begun before they were saved."""
    model, ids = make_model(), prompt(90)
    router, phi = artifacts(model)
    new, old = tmp_path / "new.safetensors", tmp_path / "old.safetensors"
    with attach(model, router=router, phi=phi, token_budget=12) as attachment:
        cache = attachment.prefill(ids[:, :80])
        attachment.save_prefix(cache, new)
        with safe_open(str(new), framework="pt") as file:
            meta = json.loads(file.metadata()["sparsekv"])
        del meta["sha256"]
        tensors = load_file(new)
        for i in (1, 2):
            tensors |= {f"{i}.index.centroids": router.centroids[i], f"{i}.index.assignment": torch.zeros(1, 2, 64)}
            tensors |= {f"{i}.phi.{part}": torch.zeros(1, 2, 12) for part in (
                "m", "z", "s", "mid", "centre", "centre_of", "mark")}
        save_file(tensors, old, metadata={"sparsekv": json.dumps({**meta, "format_version": 1})})
        want = step(model, ids[:, 80:81], cache)
        torch.testing.assert_close(step(model, ids[:, 80:81], attachment.load_prefix(old)), want)


def held_bytes() -> int:
    """Bytes of all live tensors, every storage counted once; the fake ones that a compiler keeps have none."""
    gc.collect()
    storages = (x.untyped_storage() for x in gc.get_objects()
                if issubclass(type(x), torch.Tensor) and not issubclass(type(x), FakeTensor))
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


@pytest.mark.parametrize("tokens", [
    120, pytest.param(800, marks=pytest.mark.slow),
    pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])])
def test_soak_memory_grows_by_keys_values_and_index_alone(tokens: int):
    model, ids = make_model(), prompt(64)
    router, phi = artifacts(model)
    with torch.inference_mode(), attach(model, router=router, phi=phi, token_budget=32,
                                                 decode_window=24 if tokens < 500 else 256) as attachment:
        cache, token = attachment.prefill(ids), ids[:, -1:]
        sizes = {}
        for t in range(tokens):
            logits = step(model, token, cache)
            token = logits[:, -1].argmax(-1, keepdim=True)
            if t in (tokens // 2 - 1, tokens - 1):
                sizes[t] = held_bytes()
                assert torch.isfinite(logits).all()
        report = attachment.report()
    layers, heads, dim = len(cache.layers), *cache.layers[1].keys.shape[1::2]
    kv = layers * 2 * heads * dim * 4 + 2 * dim * 4
    index = (layers - 1) * heads * (8 + 8 + dim // 3 + 12 * 4)  # bucket and place of a key, its code and features
    grown = sizes[tokens - 1] - sizes[tokens // 2 - 1]
    # a tensor that grows has an eighth of itself to spare, and 64 tokens at least
    room = (tokens // 8 + 64) * (kv + index)
    assert grown < tokens // 2 * (kv + index) + room
    assert report["selectivity_sparse"] < (0.2 if tokens > 10_000 else 0.7)
