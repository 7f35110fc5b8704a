"""A storage that somebody else wrote: one class, in this file, and requests are built, grown and decoded over it as
over tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from test_stacked import DIM, HEADS, LENGTH, layers_of, lengthened, phi_layers
from torch import Tensor

from sparsekv.core.estimators import PhiEstimator, UniformEstimator
from sparsekv.core.layer import CacheLayer, LayerView, Queries
from sparsekv.core.selectors import SELECTORS
from sparsekv.core.step import build_layers, grow, sparse_step

BLOCK = 7


@dataclass
class Blocks(CacheLayer):
    """Keys and values of BLOCK tokens a tensor, `[B, Hkv, 2, BLOCK, d]`, in a list."""

    blocks: list[Tensor]
    tokens: int

    @classmethod
    def of(cls, view: LayerView) -> Blocks:
        both = torch.nn.functional.pad(torch.stack([view.keys, view.values], 2), (0, 0, 0, -view.stored % BLOCK))
        return cls(list(both.split(BLOCK, dim=3)), view.stored, **view.described())

    @property
    def shape(self) -> tuple[int, int, int, int]:
        rows, heads, _, _, dim = self.blocks[0].shape
        return rows, heads, self.tokens, dim

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks[0].dtype

    def keys_at(self, first: int, last: int, step: int = 1) -> Tensor:
        return torch.cat(self.blocks, 3)[:, :, 0, :self.tokens][:, :, first:last:step]

    def values_at(self, first: int, last: int) -> Tensor:
        return torch.cat(self.blocks, 3)[:, :, 1, :self.tokens][:, :, first:last]

    def gather(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        own = torch.arange(tokens.shape[0]) * self.shape[0] // tokens.shape[0]
        head = torch.arange(tokens.shape[1]) * self.shape[1] // tokens.shape[1]
        at = own[:, None, None], head[:, None], tokens.clamp(min=0).long()
        return self.keys_at(0, self.tokens)[at], self.values_at(0, self.tokens)[at]


@pytest.mark.parametrize("completion", ["none", "phi", "uniform"])
@pytest.mark.parametrize(("name", "options", "space"), [
    ("router", {}, "rot"), ("router", {"scores": "mlp"}, "pre"), ("sketch", {"candidates": 0.5}, "pre"),
    ("sketch", {}, "rot"), ("streaming", {}, "rot")])
@pytest.mark.parametrize("pads", [(0,), (0, 31, 90)])
def test_its_steps_are_those_over_tensors(name: str, options: dict, space: str, completion: str, pads) -> None:
    views, longer, trained = layers_of(3, pads, space, options.get("scores", "mean_key"), name == "sketch")
    maps, queries = phi_layers(3, centred=True, capped=True), torch.randn(3, len(pads), 2 * HEADS, 1, DIM).double()
    given = options if name == "streaming" else {"token_budget": 0.1, **options}
    outs = []
    for storage in (lambda view: replace(view), Blocks.of):
        selectors = [SELECTORS[name](**given, **({"layer": t} if SELECTORS[name].is_trained() else {}))
                     for t in trained]
        estimators = [{"none": None, "phi": PhiEstimator(m), "uniform": UniformEstimator()}[completion] for m in maps]
        build_layers([storage(view) for view in views], selectors, estimators)
        for view, after, selector, estimator, q in zip(views, longer, selectors, estimators, queries, strict=True):
            for old in lengthened(view, after):
                here = storage(after)
                if old is not None:
                    grow(here, old, selector, estimator)
                outs.append(sparse_step(here, Queries.last(q, LENGTH + 1, view.rope), selector, estimator).out)
    half = len(outs) // 2
    for found, wanted in zip(outs[half:], outs[:half], strict=True):
        torch.testing.assert_close(found, wanted)
    assert any(not torch.equal(a, b) for a, b in zip(outs[0::2], outs[1::2], strict=True)), "the border has moved"
