"""Keys in CPU memory: the same answers as with everything in one place."""

from __future__ import annotations

import psutil
import pytest
import torch
from tiny import attach, make_model, prompt
from tiny_artifacts import artifacts

from sparsekv.core.selectors import SELECTORS
from sparsekv.core.selectors.base import Spends
from sparsekv.runtime.hf import generate_hook
from sparsekv.runtime.hf.cache import HostLayer
from sparsekv.util.errors import SparseKVError

GREEDY = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
OPTIONS = {"max_new_tokens": 6, "eos_token_id": []}
INDEXED = [name for name, kind in SELECTORS.items() if name != "dense" and not kind.scores_keys]


@pytest.mark.parametrize("completion", ["none", "phi", "centroid"])
@pytest.mark.parametrize("name", [*INDEXED, "topk"])
def test_placement_changes_nothing(name: str, completion: str):
    model, kind = make_model(), SELECTORS[name]
    router, phi = artifacts(model, scores="mean_key" if name == "router" else "mlp")
    ids = prompt(80, 2)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    options = {"selector": name, "completion": completion, "phi": phi, "decode_window": 8}
    options |= {"token_budget": 20} if kind.spends is not Spends.NOTHING else {}
    options |= {"router": router} if kind.is_trained() else {}
    outs = {}
    for placement in ("gpu", "cpu") if kind.scores_keys else ("gpu", "cpu", "offload"):
        with attach(model, placement=placement, **options) as attachment:
            outs[placement] = model.generate(ids, attention_mask=mask, max_new_tokens=12, min_new_tokens=12, **GREEDY)
            assert attachment.report()["sparse_calls"] > 0
    want = outs.pop("gpu")
    for out in outs.values():
        for a, b in zip(out.logits, want.logits, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", [name for name, kind in SELECTORS.items() if kind.scores_keys])
def test_offload_wants_a_selector_with_an_index(name: str):
    with pytest.raises(SparseKVError, match="placement='cpu'"):
        attach(make_model(), placement="offload", selector=name, token_budget=20)


def test_offloaded_caches_chunk_crop_fork_and_reorder():
    model = make_model()
    router, phi = artifacts(model)
    ids = prompt(100)
    options = {"router": router, "phi": phi, "token_budget": 15}
    logits = {}
    places = {"gpu": {}, "offload": {"placement": "offload"}, "cold": {"placement": "offload", "kv_memory": 0}}
    for place, given in places.items():
        with attach(model, **given, **options) as attachment:
            cache = attachment.prefill(ids[:, :60], chunk_size=25)
            fork = cache.fork()
            out = [model(ids[:, t:t + 1], past_key_values=fork, use_cache=True).logits for t in range(60, 70)]
            fork.crop(-4)
            out.append(model(ids[:, 66:72], past_key_values=fork, use_cache=True).logits)
            out.append(model(ids[:, 72:73], past_key_values=fork, use_cache=True).logits)
            fork.crop(-30)
            out.append(model(ids[:, 43:44], past_key_values=fork, use_cache=True).logits)
            cache.batch_repeat_interleave(3)
            out.append(model(ids[:, 60:61].expand(3, -1), past_key_values=cache, use_cache=True).logits)
            cache.reorder_cache(torch.tensor([2, 0, 1]))
            out.append(model(ids[:, 61:62].expand(3, -1), past_key_values=cache, use_cache=True).logits)
            logits[place] = out
    for a, b, c in zip(*logits.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
        assert torch.equal(b, c), "rows that stay on the device are those of the cache"


def test_steps_over_host_memory_are_planned_like_others():
    """Two borders of the mid region in the answer, rows of two lengths; one plan for all layers, none by itself."""
    model = make_model()
    router, phi = artifacts(model)
    ids = prompt(80, 2)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    answers = {}
    for place in ("gpu", "offload"):
        with attach(model, placement=place, router=router, phi=phi, token_budget=20, decode_window=8) as attachment:
            answers[place] = attachment.generate(ids, mask, max_new_tokens=24, eos_token_id=[])
            report = attachment.report()
            assert report["not_replayed"] is None and report["replayed_steps"] >= 22, report
    assert torch.equal(answers["gpu"], answers["offload"])


def test_the_next_layer_comes_while_one_attends():
    """A chunk's pass, layer by layer: what comes ahead was stored before, the chunk's own tokens follow."""
    model, here = make_model(), torch.device("cpu")
    router, _ = artifacts(model)
    with attach(model, router=router, placement="offload") as attachment:
        cache = attachment.prefill(prompt(60, 2), chunk_size=25)
    host = [i for i, layer in enumerate(cache.layers) if isinstance(layer, HostLayer)]
    for count in (7, 130, 1):  # within the storage's room, beyond it, and one token
        for i in host:
            layer = cache.layers[i]
            past = layer.get_seq_length()
            layer.update(*(torch.randn(2, layer.keys.shape[1], count, layer.keys.shape[3]) for _ in range(2)))
            keys, values = cache.ahead.read(cache.layers, i, here)
            assert torch.equal(keys, layer.keys) and torch.equal(values, layer.values)
            coming = cache.ahead.coming
            assert (coming is None) == (i == host[-1]) and (coming is None or coming.tokens == past)
    cache.layers[host[0]].update(*(torch.randn(2, layer.keys.shape[1], 3, layer.keys.shape[3]) for _ in range(2)))
    cache.ahead.read(cache.layers, host[0], here)  # a pass that ends here
    assert cache.ahead.coming is not None
    cache.crop(40)
    assert cache.ahead.coming is None


@pytest.mark.parametrize("completion", ["none", "phi", "centroid"])
def test_rows_that_were_read_lately_are_not_fetched_again(completion: str):
    """The same answer to the bit whatever stays on the device; the report has what came over the bus."""
    model = make_model()
    router, phi = artifacts(model)
    ids, answers, reports = prompt(300, 2), [], {}
    of_slot = 4 * model.config.num_key_value_heads * (2 * model.config.head_dim * 4 + 16)  # two rows, two layers
    for slots in (0, 20, 80, 300):
        memory = 0 if not slots else None if slots == 80 else (
            reports[0]["kv_places"]["gpu_bytes"] + (slots + 0.5) * of_slot) / 1e9
        with attach(model, router=router, phi=phi, selector="sketch", completion=completion, token_budget=20,
                    placement="offload", kv_memory=memory, decode_window=16) as attachment:
            answers.append(attachment.generate(ids, max_new_tokens=40, eos_token_id=[]))
            reports[slots] = attachment.report()
    assert all(torch.equal(x, answers[0]) for x in answers)
    none, few, usual, most = (report["hit_rate"] for report in reports.values())
    row, listed = 2 * model.config.head_dim * 4, reports[0]["sparse_calls"] * 2 * model.config.num_key_value_heads * 20
    assert none == 0 and reports[0]["bus_bytes"] == listed * row
    assert 0 < few < usual < most
    assert reports[300]["bus_bytes"] == pytest.approx((1 - most) * listed * row)


def test_keys_beyond_kv_memory_lie_in_cpu_memory():
    model = make_model()
    router, _ = artifacts(model)
    ids, wanted = prompt(80), None
    for given, away in ((None, False), (1.0, False), (1e-6, True)):
        with attach(model, router=router, token_budget=20, kv_memory=given) as attachment:
            cache = attachment.prefill(ids[:, :-1])
            assert [isinstance(x, HostLayer) for x in cache.layers[1:]] == [away] * (len(cache.layers) - 1)
            places = attachment.report()["kv_places"]
            assert (places["host_bytes"] > 0) == away and places["gpu_bytes"] > 0
            made = attachment.generate(ids[:, -1:], cache=cache, **OPTIONS)
            wanted = made if wanted is None else wanted
            assert torch.equal(made, wanted)


def test_too_little_memory_of_the_cpu_is_refused_before_the_prompt_is_read(monkeypatch):
    model = make_model()
    router, _ = artifacts(model)
    monkeypatch.setattr(generate_hook, "free_host_memory", lambda: 1000)
    with attach(model, router=router, placement="offload") as attachment:
        with pytest.raises(SparseKVError, match=r"keys and values of 1 x 86 tokens take .* of CPU memory, of which"):
            attachment.generate(prompt(80), **OPTIONS)
    with pytest.raises(SparseKVError, match="give one of them"):
        attach(model, router=router, placement="cpu", kv_memory=1.0)
    with pytest.raises(SparseKVError, match="kv_memory must be a finite number from 0 on, or auto, found 'much'"):
        attach(model, router=router, kv_memory="much")


@pytest.mark.slow
@torch.no_grad()
def test_ten_thousand_tokens_take_no_more_memory():
    """Of an answer whose storage is there from the beginning: what lies beside it does not grow."""
    model, steps = make_model(max_position_embeddings=16_384), 10_000
    router, phi = artifacts(model)
    with attach(model, router=router, phi=phi, token_budget=20, decode_window=128, placement="offload") as attachment:
        cache = attachment.prefill(prompt(200), cache=attachment.cache(steps + 300))
        token, taken = torch.ones(1, 1, dtype=torch.long), {}
        for step in range(steps):
            token = attachment.step(token, cache)[:, -1].argmax(-1, keepdim=True).clone()
            if step in (steps // 4, steps - 1):
                view = cache.layers[1].state.view
                taken[step] = psutil.Process().memory_info().rss, view.near.data.shape[2]
        report = attachment.report()
        assert report["not_replayed"] is None and report["hit_rate"] > 0
    (before, slots), (after, slots_later) = taken.values()
    codes = 3 * steps * 64  # what is kept of a token of two layers, at most
    assert after - before < 16e6 + codes and abs(slots_later - slots) <= 256
