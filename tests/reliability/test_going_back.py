"""A cache that was cut, refused or asked for everything is as if nothing had been."""

from __future__ import annotations

import pytest
import torch
from test_state import MEMORY, SPARSE, decode, options
from tiny import make_model, prompt

from sparsekv.runtime.hf.attach import attach
from sparsekv.util.errors import SparseKVError

PROMPT, WINDOW = 100, 8
QUICK = ("topk", "sketch", "h2o", "quest")


def choices() -> list[object]:
    return [pytest.param(name, completion, marks=() if name in QUICK and completion != "centroid" else pytest.mark.slow)
            for name in SPARSE if name not in MEMORY for completion in ("none", "phi", "centroid")]


@pytest.mark.parametrize("name,completion", choices())
def test_a_cut_before_a_border_that_moved_brings_it_back(name: str, completion: str) -> None:
    with attach(make_model(), **{**options(name, completion), "decode_window": WINDOW}) as attachment:
        cache = attachment.prefill(prompt(400)[:, :PROMPT])
        start = PROMPT + 2 * WINDOW + 3
        decode(cache, PROMPT, start - PROMPT)
        before = cache.fork()
        decode(cache, start, WINDOW, at=300)  # the border moves here
        cache.crop(-WINDOW)
        cut, never = (decode(c, start, 2 * WINDOW) for c in (cache, before))
    assert torch.allclose(cut, never, rtol=1e-4, atol=1e-4)


def test_rows_that_a_cache_does_not_hold_leave_it_as_it_was() -> None:
    model, ids = make_model(), prompt(120)
    more = torch.cat([ids, prompt(5, seed=4)], dim=1)
    with attach(model, selector="token_select", token_budget=8, extrapolate=True, dense_below=0) as attachment:
        cache = attachment.prefill(ids)
        with pytest.raises(SparseKVError, match="holds 1 rows and input_ids have 4"):
            model.generate(more, past_key_values=cache, num_return_sequences=4, do_sample=True, max_new_tokens=3)
        rotary = next(iter(cache.rope.values()))
        assert cache.get_seq_length() == rotary.length == 120 and rotary.tables()[0].shape[0] == 1
        again = model.generate(more, past_key_values=cache, do_sample=False, max_new_tokens=3)
        fresh = model.generate(more, past_key_values=attachment.prefill(ids), do_sample=False, max_new_tokens=3)
    assert torch.equal(again, fresh)


def test_a_budget_of_everything_is_everything_in_every_layer_of_a_pyramid() -> None:
    model, ids = make_model(), prompt(65)
    with torch.no_grad():
        plain = model(ids).logits[:, -1:]
        with attach(model, selector="pyramidkv", token_budget=4096, dense_below=0, dense_layers=()) as attachment:
            found = attachment.step(ids[:, -1:], attachment.prefill(ids[:, :-1]))
            assert attachment.report()["selectivity_sparse"] == 1.0
    assert torch.allclose(found, plain, atol=1e-4)
