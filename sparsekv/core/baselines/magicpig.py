"""MagicPIG: keys sampled by locality-sensitive hashing, reweighted by their chance of being sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.regions import Regions
from sparsekv.core.selectors.base import Selector
from sparsekv.kernels.collisions import collisions
from sparsekv.util.config import option

MOST_BITS, USUAL_BITS = 12, 10
BLOCK = 2048
"""Keys that are hashed at once."""
FILLED = 0.9
"""Share of a budget that the samples of the prompt's last queries have to use."""
ASKED = 8
"""Last prompt queries that are asked."""
COUNTED = 8
"""Tables whose buckets are counted, for what all of them hold."""


def sampling_probability(cosine: Tensor, bits: int | Tensor, tables: int) -> Tensor:
    """Chance that a key collides with the query in at least two of the tables (Chen et al. 2024, eq. 12).

    `p = 1 − θ/π`, `u = 1 − (1 − p^K)^L − L·p^K·(1 − p^K)^(L−1)`.
    """
    p = (1 - torch.arccos(cosine.clamp(-1, 1)) / math.pi) ** bits
    return 1 - (1 - p) ** tables - tables * p * (1 - p) ** (tables - 1)


@dataclass(eq=False)
class MagicPIG(Selector):
    """SimHash of centred keys with K bits and L tables; a token is read by a query head when at least two tables agree,
    and its weight is divided by the chance of that (Chen et al. 2024, §4). How many are read follows from K and L: with
    `bits` 0 a KV head gets the largest K whose samples use `token_budget` (`fitting_bits`, ours: the paper gives both
    for some budgets). `token_budget` caps what is sampled by keeping a uniform part, reweighted."""

    name: ClassVar[str] = "magicpig"
    scores_keys: ClassVar[bool] = True
    row_state: ClassVar[tuple[str, ...]] = ("codes", "center", "used_bits", "asked")

    bits: int = option(0, help="Hyperplanes of a table, K; 0: as many as still use token_budget, 10 without one "
                               "[bits].", min=0, max=15)
    tables: int = option(150, help="Hash tables, L [tables].", min=2, max=4096)
    seed: int = option(0, help="Seed of the hyperplanes.")

    @property
    def reads_without_budget(self) -> bool:
        return True

    def build(self, view: LayerView) -> None:
        dim = view.keys.shape[-1]
        generator = torch.Generator("cpu").manual_seed(self.seed + view.layer_idx)
        fits = self.bits == 0 and self.token_budget is not None
        self.code_bits = MOST_BITS if fits else self.bits or USUAL_BITS
        self.planes = torch.randn(dim, self.code_bits * self.tables, generator=generator, device="cpu",
                                  dtype=torch.float32).to(view.keys.device)
        inside = view.regions.mid_mask()[:, None, :, None]
        sizes = view.regions.mid_sizes.clamp(min=1)[:, None, None, None]
        self.center = (view.keys.float() * inside).sum(2, keepdim=True) / sizes
        self.used_bits = torch.full(view.keys.shape[:2], self.code_bits, device=view.keys.device)
        if fits:
            self.used_bits = self.fitting_bits(view)
        self.codes = self._hash_keys(view, 0)
        self.asked: Tensor | None = None

    def fitting_bits(self, view: LayerView) -> Tensor:
        """The largest K, `[B, Hkv]`, with which the expected samples of the prompt's last queries use `FILLED` of the
        budget, mean over queries; 1 where none does."""
        assert view.recent_queries is not None
        recent = view.recent_queries[:, :, -ASKED:].float()
        found = torch.ones(view.keys.shape[:2], dtype=torch.long, device=view.keys.device)
        if not recent.shape[2] or not self.widest:
            return found
        inside, budget = view.regions.mid_mask()[:, None], self.budget.clamp(min=1)[:, None]
        for h in range(view.num_kv_heads):
            q = torch.nn.functional.normalize(recent[:, h * view.group:(h + 1) * view.group].flatten(1, 2), dim=-1)
            keys = torch.nn.functional.normalize(view.keys[:, h].float() - self.center[:, h], dim=-1)
            cosine = q @ keys.mT
            for bits in range(2, MOST_BITS + 1):
                expected = (sampling_probability(cosine, bits, self.tables) * inside).sum(-1)
                filled = (torch.minimum(expected, budget) / budget).mean(-1) >= FILLED
                found[:, h] = torch.where(filled, bits, found[:, h])
        return found

    def extend(self, view: LayerView, old: Regions) -> None:
        self.codes = torch.cat([self.codes, self._hash_keys(view, self.codes.shape[2])], dim=2)

    def _hash_keys(self, view: LayerView, first: int) -> Tensor:
        last = int(view.regions.mid_last.max())
        parts = [self._hash(view.keys[:, :, a:min(a + BLOCK, last)].float() - self.center, self.used_bits)
                 for a in range(first, last, BLOCK)]
        empty = torch.zeros(*view.keys.shape[:2], 0, self.tables, dtype=torch.int16, device=view.keys.device)
        return torch.cat([empty, *parts], dim=2)

    def _hash(self, x: Tensor, used: Tensor) -> Tensor:
        """`[B, H, n, d] -> [B, H, n, L]` codes of `used [B, H]` bits."""
        bits = (x @ self.planes > 0).unflatten(-1, (self.tables, self.code_bits))
        place = torch.arange(self.code_bits, device=x.device)
        worth = torch.where(place < used[..., None], 2 ** place, 0).to(torch.int16)
        return (bits * worth[:, :, None, None]).sum(-1, dtype=torch.int16)

    def cost_bytes(self, view: LayerView) -> Tensor | float:
        """As the paper's hash tables are read, where ours compare codes: of every query head and table the tokens of
        one bucket and where they begin and end, four bytes each. Before the first step the codes of all keys."""
        if self.asked is None:
            return view.regions.mid_sizes * (view.num_kv_heads * self.tables * self.codes.element_size())
        return 4.0 * (self._entries(view, self.asked) + 2 * view.num_query_heads * self.tables)

    def select(self, view: LayerView, queries: Queries) -> Selection:
        asked = self._hash(queries.rot.float(), self.used_bits.repeat_interleave(view.group, dim=1))
        self.asked = asked[:, :, -1]
        sampled = collisions(self.codes, asked)
        sampled &= view.regions.mid_mask(0, self.codes.shape[2])[:, None, None]
        tokens, share = self._list(sampled)
        log_weights = self._log_weights(view, queries, tokens) - share.log()[:, :, None]
        return Selection(tokens=tokens, log_weights=log_weights)

    def _entries(self, view: LayerView, asked: Tensor) -> Tensor:
        """Tokens in the buckets of queries `[B, Hq, L]` in all tables, `[B]` float32, by the first of the tables."""
        counted = min(COUNTED, self.tables)
        query = asked[:, :, :counted].unflatten(1, (view.num_kv_heads, -1))[:, :, :, None]
        inside = view.regions.mid_mask(0, self.codes.shape[2])[:, None, None, :, None]
        met = (self.codes[:, :, None, :, :counted] == query) & inside
        return met.sum((1, 2, 3, 4)).float() * (self.tables / counted)

    def _list(self, sampled: Tensor) -> tuple[Tensor, Tensor]:
        """Sampled tokens `[B·T, Hq, K]` padded with -1, and the share of them kept under the cap `[B·T, Hq]`."""
        sampled = sampled.transpose(1, 2).flatten(0, 1)
        found = limit = sampled.sum(-1)
        if self.token_budget is not None:
            limit = torch.minimum(found, self.budget.repeat_interleave(len(found) // len(self.budget))[:, None])
        width = int(limit.max())
        order = torch.rand(sampled.shape, device=sampled.device).masked_fill(~sampled, -1.0)
        values, tokens = order.topk(width, dim=-1)
        keep = (values >= 0) & (torch.arange(width, device=tokens.device) < limit[..., None])
        return torch.where(keep, tokens, -1), limit.clamp(min=1) / found.clamp(min=1)

    def _log_weights(self, view: LayerView, queries: Queries, tokens: Tensor) -> Tensor:
        """`−log u_i` of every listed token: `[B·T, Hq, K]`."""
        q = queries.folded.float()
        per_row = q.shape[0] // view.keys.shape[0]
        row = torch.arange(q.shape[0], device=q.device)[:, None, None] // per_row
        head = torch.arange(q.shape[1], device=q.device)[:, None] // view.group
        keys = view.keys[row, head, tokens.clamp(min=0)].float() - self.center[row, head, 0]
        cosine = torch.nn.functional.cosine_similarity(q[:, :, None], keys, dim=-1)
        return -sampling_probability(cosine, self.used_bits[row, head], self.tables).clamp(min=1e-6).log()
