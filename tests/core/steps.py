"""Steps of the runtime on a tiny model: what every sparse step of the last layer saw and gave. A selector or an
estimator that is registered is in here without a line."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from tiny_artifacts import artifacts

import sparsekv
from sparsekv.core.estimators import ESTIMATORS, Estimator
from sparsekv.core.layer import LayerView, Queries
from sparsekv.core.selectors import SELECTORS, Selector
from sparsekv.core.selectors.base import Spends
from sparsekv.core.step import LayerState, Step
from sparsekv.runtime.hf.attach import RunOptions
from sparsekv.runtime.hf.cache import SparseCache

BUDGET = 13


def cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """Selector and options by the name of the test: every selector that is registered, and some with other options."""
    made: dict[str, tuple[str, dict[str, Any]]] = {
        name: (name, {} if kind.spends is Spends.NOTHING else {"token_budget": BUDGET})
        for name, kind in SELECTORS.items() if name != "dense"}
    made |= {f"{name}-per_head": (name, {**given, "per_query_head": True}) for name, given in made.values()
             if "per_query_head" in SELECTORS[name].option_names()}
    return made | {
        "router-probes": ("router", {"probes": 3}),
        "router-mean_key": ("router", {"token_budget": BUDGET, "scores": "mean_key"}),
        "sketch": ("sketch", {"token_budget": BUDGET, "fit": "fixed"}),
        "sketch-buckets": ("sketch", {"token_budget": BUDGET, "candidates": 0.7, "fit": "fixed"}),
        "sketch-fitted": ("sketch", {"token_budget": BUDGET, "fit": "fitted", "candidates": 0.7}),
        "sketch-all": ("sketch", {"token_budget": BUDGET, "candidates": 1.0, "scores": "mean_key", "fit": "fixed"})}


CASES = cases()
COMPLETIONS = ("none", *ESTIMATORS)
GROUPS = (1, 3, 4, 8)
PADS = (0, 7, 30)
PROMPT, SINGLE, CHUNK = 91, 9, 3
SIZES = {"sink_size": 3, "window_size": 9, "decode_window": 6}


class Taken(NamedTuple):
    """One step, and what it was made of."""

    view: LayerView
    queries: Queries
    step: Step
    selector: Selector
    estimator: Estimator | None


@functools.cache
def tiny(group: int, dim: int, dtype: torch.dtype, device: str = "cpu", kv_heads: int = 2):
    import transformers as t

    torch.manual_seed(3)
    config = t.LlamaConfig(
        vocab_size=61, hidden_size=kv_heads * group * dim, intermediate_size=48, num_hidden_layers=2, head_dim=dim,
        num_attention_heads=kv_heads * group, num_key_value_heads=kv_heads, max_position_embeddings=512,
        pad_token_id=0, bos_token_id=None, eos_token_id=None, initializer_range=1.2 * (kv_heads * group * dim)**-0.5)
    return t.AutoModelForCausalLM.from_config(config).eval().to(device=device, dtype=dtype)


def trained(model, key_blocks: int = 0):
    """A router and feature maps, in float64 with a model that is: centred and capped with some numbers of heads, one
    head's gate closed, shifts that grow with what is read, and sums that differ by few orders of magnitude."""
    heads = model.config.num_attention_heads // 2
    router, phi = artifacts(model, features=16, centred=heads != 3 and not key_blocks, capped=heads not in (3, 8),
                            key_blocks=key_blocks)
    dtype = torch.promote_types(model.dtype, torch.float32)
    phi.maps = phi.maps.map(lambda w: 0.5 * w.to(dtype))
    phi.config = replace(phi.config, read_shares=[0.0, 0.3])
    phi.shift = torch.stack([torch.zeros_like(phi.gate), torch.full_like(phi.gate, -0.5)], dim=1)
    phi.gate[:, 1] = 0.0
    return router.to(model.device), phi.to(model.device)


def steps_of(
    model, case: str, completion: str, batch: int, monkeypatch, *, prompt: int = PROMPT, placement: str = "gpu",
    key_blocks: int = 0,
) -> tuple[list[Taken], SparseCache]:
    """Decode a padded batch, some tokens alone and the last in a chunk."""
    name, options = cases()[case]
    router, phi = trained(model, key_blocks)
    taken: list[Taken] = []
    step = LayerState.step

    def spied(self, queries):
        found = step(self, queries)
        taken.append(Taken(self.view.fork(), queries, found, self.selector.fork(),
                           None if self.estimator is None else self.estimator.fork()))
        return found

    total = prompt + SINGLE + CHUNK
    ids = torch.randint(1, 61, (batch, total), generator=torch.Generator().manual_seed(5)).to(model.device)
    mask = torch.ones_like(ids)
    for row, pad in enumerate(PADS[:batch]):
        mask[row, :min(pad, prompt - 1)] = 0
    given = {"router": router} if SELECTORS[name].is_trained() else {}
    torch.manual_seed(0)
    with monkeypatch.context() as patch, torch.inference_mode(), sparsekv.attach(
            model, selector=name, completion=completion, phi=phi, dense_below=0, placement=placement, **SIZES, **given,
            run=RunOptions(sparse_chunks=True), **options) as attachment:
        patch.setattr(LayerState, "step", spied)
        cache = attachment.prefill(ids[:, :prompt], attention_mask=mask[:, :prompt])
        for t in (*range(prompt, prompt + SINGLE), total - CHUNK):
            end = total if t == total - CHUNK else t + 1
            model(ids[:, t:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True,
                  output_hidden_states=True)  # layer by layer: a planned step has views of its own
    return taken, cache
