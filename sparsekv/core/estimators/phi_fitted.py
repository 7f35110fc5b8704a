"""Feature maps whose sums of values are fitted to the request, once, at the end of its prompt (ours, not the papers').

Out of running text the mass that maps estimate is about right and the values are not. The prompt's last queries are at
hand when decoding begins, and exact attention of them costs less than a chunk of the prompt: it says what the completed
output lacks, and `S`, the values' sums of the completion's cache, takes that up. A step reads no byte more.
"""

from __future__ import annotations

from dataclasses import fields
from typing import ClassVar

import torch
from torch import Tensor

from sparsekv.core.estimators.phi import PhiEstimator, TrainedMaps
from sparsekv.core.layer import LayerView, Queries, Selection, choose_rows
from sparsekv.core.selectors.topk import group_scores, top_tokens
from sparsekv.foundation.errors import SparseKVError
from sparsekv.kernels import PhiCache, PhiState, add_sinks, merge, phi_join, remainder
from sparsekv.kernels.launch import acc_dtype

AHEAD = (0, 64, 256, 1024)
"""Tokens after the prompt's end to which its last queries are moved: a correction fitted at the end alone does harm
some hundred tokens later."""
RIDGE = 10.0
"""Weight of the correction's size, relative to the mean square of what it is fitted by."""
AGAIN = 1.5
"""Where the share that is read is larger or smaller by this factor, it is fitted again."""
SCORES_AT_ONCE = 64_000_000
"""Of a query head and a token each."""


class FittedPhi(PhiEstimator):
    """φ whose `S` becomes `S + ΔS`. The prompt's last queries `q_i` are moved to its end and beyond: they see all of it
    from as far as the answer's queries will. The best keys are read, as many as a step reads. Let `e_i` be the output
    of full attention less the completed one, and `a_ij` what a unit of `S_j` adds to it, both relative to the output's
    size. Then `ΔS = argmin Σ_i |e_i − a_i ΔS|² + λ Σ_j |ΔS_j / z_j|²`, one for the heads of a group. The mass does not
    change.

    Fitted where the cache is built, and again for another share that is read. Without the prompt's queries it is φ.
    Raises SparseKVError where the model's rotation is unknown.
    """

    row_state: ClassVar[tuple[str, ...]] = (*PhiEstimator.row_state, "correction", "fitted")

    def __init__(self, layer: TrainedMaps):
        super().__init__(layer)
        self.correction: PhiCache
        """ΔS, as a cache without mass."""
        self.fitted: Tensor
        """The share `[B]` that was read when it was fitted; -1 before."""

    def build(self, view: LayerView) -> None:
        super().build(view)
        m, z, s = self.state[:3]
        self.correction = PhiCache(m, torch.zeros_like(z), torch.zeros_like(s))
        self.fitted = torch.full(z.shape[:1], -1.0, dtype=torch.float64, device=z.device)

    def reads(self, view: LayerView, share: float | Tensor) -> None:
        super().reads(view, share)
        if view.recent_queries is None or not view.recent_queries.shape[2]:
            return
        read = torch.zeros_like(self.fitted) + share
        due = (self.fitted < 0) | (read > AGAIN * self.fitted) | (AGAIN * read < self.fitted)
        if not bool(due.any()):
            return
        old, before = self.correction, self.state
        self.state = corrected(before, old._replace(s=-old.s))
        found = PhiCache(self.state.m, torch.zeros_like(self.state.z), self._fit(view, read))
        self.correction = choose_rows(due, found, old)
        self.state = choose_rows(due, corrected(self.state, found), before)
        self.fitted = torch.where(due, read, self.fitted)

    def _fit(self, view: LayerView, share: Tensor) -> Tensor:
        """ΔS `[B, Hkv, r, d]`, relative to the cache's shift."""
        view, z = on_device(view), self.state.z
        square, product = z.new_zeros(*z.shape, z.shape[-1]), torch.zeros_like(self.state.s)
        at_once = max(1, SCORES_AT_ONCE // (z.shape[0] * view.num_query_heads * view.length))
        for ahead in AHEAD:
            queries, known = queries_at_end(view, ahead)
            for q, real in zip(queries.split(at_once, dim=2), known.split(at_once, dim=1), strict=True):
                adds, lacks = self._lacking(view, q, share)
                adds, lacks = (torch.where(real[:, None, :, None, None], x, 0.0).flatten(2, 3)
                               for x in (adds * z[:, :, None, None], lacks))
                square, product = square + adds.mT @ adds, product + adds.mT @ lacks
        return z[..., None] * ridge(square, product, RIDGE)

    def _lacking(self, view: LayerView, q: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """For queries `[B, Hq, T, d]` that see the whole cache: what a unit of every sum of values adds to the output,
        `[B, Hkv, T, G, r]`, and what the output lacks, `[B, Hkv, T, G, d]`. Both are relative to the output's size."""
        batch, _, count, _ = q.shape
        queries = Queries(q, torch.full((batch * count,), view.length, device=q.device), view.rope)
        scores = group_scores(view, q)
        number = torch.minimum(torch.ceil(share * view.regions.context - 1e-9).long(), view.regions.mid_sizes)
        outside = torch.isneginf(scores[:, :, :, 0])
        best = scores.softmax(-1).nan_to_num(0.0).sum(3).masked_fill(outside, float("-inf"))
        tokens = top_tokens(best, number, int(number.max()))
        exact = view.attend(queries, Selection(tokens=tokens))
        query, read = self.query(view, queries), self.read(view, tokens)
        rest, uncapped = remainder(query, *read), remainder(query._replace(cap=None), *read)[1]
        whole, _ = completed(view, exact, unread(view, scores, tokens))
        found, mass = completed(view, exact, rest)
        weight = torch.where(torch.isneginf(uncapped), 0.0, torch.exp(rest[1] - mass - uncapped + query.log_scale))
        size = whole.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        made = weight[..., None] * query.features.to(weight.dtype) / size, (whole - found) / size
        adds, lacks = (x.unflatten(0, (batch, count)).unflatten(2, (view.num_kv_heads, -1)).transpose(1, 2)
                       for x in made)
        return adds, lacks


def on_device(view: LayerView) -> LayerView:
    """The layer with all its keys and values where decoding happens."""
    if view.keys_on_device:
        return view
    given = {f.name: getattr(view, f.name) for f in fields(LayerView)}
    return LayerView(**{**given, "keys": view.keys.to(view.device), "values": view.values.to(view.device)})


def corrected(state: PhiState, correction: PhiCache) -> PhiState:
    """The state with a correction added."""
    return state._replace(**phi_join(PhiCache(*state[:3]), correction)._asdict())


def queries_at_end(view: LayerView, ahead: int) -> tuple[Tensor, Tensor]:
    """The prompt's last queries as if each stood `ahead` tokens after the cache's last, or as many as a prompt has if
    that is less, `[B, Hq, w, d]`, and whether each is of a token, `[B, w]`. Raises SparseKVError where the model's
    rotation is unknown."""
    recent, rope, starts = view.recent_queries, view.rope, view.regions.starts[:, None]
    assert recent is not None
    if rope is None:
        raise SparseKVError("completion phi_fitted moves the prompt's last queries, and this model rotates in a way "
                            "sparsekv cannot undo; use completion='phi'")
    columns = torch.arange(view.recent_end - recent.shape[2], view.recent_end, device=recent.device)[None]
    last = view.length - 1
    moved = rope.move(recent.to(acc_dtype(recent)), columns, torch.full_like(columns, last))
    moved = rope.move(moved, starts, (starts + ahead).clamp(max=last))
    return moved.to(recent.dtype), columns >= starts


def unread(view: LayerView, scores: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the mid tokens that are not among `tokens [Q, Hkv, K]`, by `group_scores`: out `[Q, Hq, d]`, lse
    `[Q, Hq]`."""
    batch, heads, count, group, length = scores.shape
    listed = tokens.unflatten(0, (batch, count)).transpose(1, 2)
    read = torch.zeros(batch, heads, count, length + 1, dtype=torch.bool, device=scores.device)
    read.scatter_(-1, torch.where(listed < 0, length, listed), True)
    scores = scores.masked_fill(read[:, :, :, None, :-1], float("-inf"))
    weights = scores.softmax(-1).nan_to_num(0.0).flatten(2, 3)
    out = (weights.to(view.values.dtype) @ view.values).to(weights.dtype)
    made = out.unflatten(2, (count, group)), scores.logsumexp(-1)
    return tuple(x.transpose(1, 2).flatten(2, 3).flatten(0, 1) for x in made)  # type: ignore[return-value]


def completed(
    view: LayerView, exact: tuple[Tensor, Tensor], rest: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Output `[Q, Hq, d]` and log mass `[Q, Hq]` of two parts and the learned sinks."""
    dtype = torch.promote_types(exact[0].dtype, rest[0].dtype)
    out, lse = merge(*(torch.stack([a.to(dtype), b.to(dtype)]) for a, b in zip(exact, rest, strict=True)))
    return (out, lse) if view.sinks is None else add_sinks(out, lse, view.sinks)


def ridge(square: Tensor, product: Tensor, weight: float) -> Tensor:
    """`argmin_x |A x − y|² + weight · mean(diag AᵀA) · |x|²` from AᵀA `[..., r, r]` and Aᵀy `[..., r, d]`; zero where A
    is."""
    level = weight * square.diagonal(dim1=-2, dim2=-1).mean(-1)
    level = torch.where(level > 0, level, 1.0)[..., None, None]
    eye = torch.eye(square.shape[-1], dtype=square.dtype, device=square.device)
    factor, _ = torch.linalg.cholesky_ex(square + level * eye)
    return torch.cholesky_solve(product, factor)
