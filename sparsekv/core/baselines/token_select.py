"""TokenSelect: one list for all heads of a layer, by a vote of the heads, kept while the query hardly changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsekv.core.layer import LayerView, Queries, Selection, needed
from sparsekv.core.prefill import prefill_chunks
from sparsekv.core.selectors.base import ReadsPrompts, Selector
from sparsekv.core.selectors.topk import group_products, key_bytes, top_tokens
from sparsekv.kernels import soft_vote
from sparsekv.util.config import option
from sparsekv.util.errors import check_choice

VOTES = ("soft", "hard", "topk")


def vote(scores: Tensor, k: Tensor, widest: int, how: str) -> Tensor:
    """One score a token from all heads (TokenSelect §5.1): `[B, H, T, N] -> [B, 1, T, N]`, -inf where not allowed.

    `soft` sums the heads' softmax (equation 10), `hard` counts the heads that have the token in their own top-k
    (equation 9), `topk` sums raw scores (equation 8).
    """
    outside = torch.isneginf(scores[:, :1])
    if how == "soft":
        total = scores.softmax(-1).nan_to_num(0.0).sum(1, keepdim=True)
    elif how == "topk":
        total = scores.masked_fill(torch.isneginf(scores), 0.0).sum(1, keepdim=True)
    else:
        heads = scores.shape[1]
        own = top_tokens(scores, k, widest).reshape(scores.shape[0], scores.shape[2], heads, -1).transpose(1, 2)
        ballots = torch.zeros(*scores.shape[:3], scores.shape[3] + 1, device=scores.device)
        ballots.scatter_(-1, torch.where(own < 0, scores.shape[3], own), 1.0)
        total = ballots[..., :-1].sum(1, keepdim=True)
    return total.masked_fill(outside, float("-inf"))


@dataclass(eq=False)
class TokenSelect(Selector):
    """Head soft vote over per-token scores, with a selection cache (TokenSelect §5.1, algorithm 1). In a chunk of
    several tokens the mean query of the chunk selects for all of them (§5.2). With `prefill_chunk` the prompt is read
    that way, too: every chunk attends to itself, the sink, the local window before it and what its mean query selects
    (`core/prefill.py`). With `extrapolate` the keys that are read get contiguous positions, so that no distance exceeds
    what was read (length extrapolation).

    `PUBLISHED` are the paper's own settings (§6.1), as arguments of `attach`; θ is given in no text, 0.98 is ours.
    Equation 10 is printed without the `1/√d` of equation 4, which changes nothing in equations 8 and 9 but does here:
    `scaled` has both; the default is as printed.
    """

    PUBLISHED: ClassVar[dict[str, int]] = {"token_budget": 2048, "sink_size": 128, "window_size": 512,
                                           "prefill_chunk": 512}

    name: ClassVar[str] = "token_select"
    scores_keys: ClassVar[bool] = True
    row_state: ClassVar[tuple[str, ...]] = ("cached_query", "cached_tokens")

    vote: str = option("soft", help="How heads agree: soft (sum of softmax), hard (count of top-k lists) or topk (sum "
                                    "of raw scores).")
    theta: float = option(0.98, help="Cosine similarity with the cached query from which its selection is reused; "
                                     "above 1 never [cosine].")
    scaled: bool = option(False, help="The soft vote's softmax is of q·k/√d, as attention's, and not of q·k, as the "
                                      "paper prints it.")
    prefill_chunk: int = option(0, help="Tokens of a prompt that select together, by their mean query; 0 reads prompts "
                                        "densely [tokens].", min=0)
    extrapolate: bool = option(False, help="Give the keys that are read contiguous positions (length extrapolation).")

    def validate(self) -> None:
        super().validate()
        check_choice("vote", self.vote, VOTES)

    def reader(self, sink: int, window: int) -> ReadsPrompts | None:
        return PromptReader(self, sink, window) if self.prefill_chunk else None

    def build(self, view: LayerView) -> None:
        self.cached_query: Tensor | None = None
        self.cached_tokens: Tensor | None = None
        self.hits = self.steps = 0

    def extend(self, view: LayerView, old: object) -> None:
        self.cached_query = self.cached_tokens = None

    def cost_bytes(self, view: LayerView) -> Tensor | float:
        """Less the steps whose selection was the one before."""
        return key_bytes(view) * (1 - self.hits / max(1, self.steps))

    def select(self, view: LayerView, queries: Queries) -> Selection:
        q = (queries.pre if self.extrapolate else queries.rot).mean(2, keepdim=True)
        flat = q.flatten(1)
        self.steps += 1
        tokens, reuse = None, None
        if self.cached_query is not None and self.cached_tokens is not None:
            reuse = torch.nn.functional.cosine_similarity(flat.float(), self.cached_query.float(), dim=-1) >= self.theta
            if bool(reuse.all()):
                self.hits += 1
                tokens = self.cached_tokens
        if tokens is None:
            tokens = self.choose(view, q, view.regions.mid_first, view.regions.mid_last)
            if reuse is not None and self.cached_tokens is not None and self.cached_tokens.shape == tokens.shape:
                tokens = torch.where(reuse[:, None, None], self.cached_tokens, tokens)
                flat = torch.where(reuse[:, None], self.cached_query, flat)  # type: ignore[arg-type]
            self.cached_query, self.cached_tokens = flat, tokens
        return Selection(tokens=queries.per_query(tokens), contiguous=self.extrapolate)

    def choose(self, view: LayerView, q: Tensor, first: Tensor, last: Tensor) -> Tensor:
        """The tokens from `first` to `last`, `[B·n]` each, that queries `[B, Hq, n, d]` read, `[B·n, 1, K]` padded with
        -1; with `extrapolate` they have RoPE removed."""
        keys = view.keys_pre(0, view.keys.shape[2]) if self.extrapolate else view.keys
        place = torch.arange(keys.shape[2], device=q.device)
        outside = ((place < first[:, None]) | (place >= last[:, None]))[:, None]
        if self.vote == "soft":
            votes = soft_vote(q.transpose(1, 2).flatten(0, 1), keys, first, last,
                              scale=view.scale if self.scaled else 1.0).masked_fill_(outside, float("-inf"))[:, :, None]
        else:
            scores = (group_products(q, keys) * view.scale).unflatten(2, (q.shape[2], -1)).transpose(1, 2)
            scores = scores.flatten(2, 3).flatten(0, 1).masked_fill(outside, float("-inf"))[:, :, None]
            votes = vote(scores, self.budget, self.widest, self.vote)
        return top_tokens(votes, self.budget, self.widest, stable=self.vote == "hard")  # ballots are whole numbers

    def statistics(self) -> dict[str, float]:
        """Share of steps that reused the cached selection."""
        return {"cache_hit_rate": self.hits / self.steps} if self.steps else {}


@dataclass(frozen=True)
class PromptReader:
    """The paper's reading of prompts (§5.2): every `prefill_chunk` tokens their mean query selects, for all heads."""

    selector: TokenSelect
    sink: int
    window: int

    shortest: ClassVar[int] = 0

    @property
    def chunk(self) -> int:
        return self.selector.prefill_chunk

    @property
    def extrapolate(self) -> bool:
        return self.selector.extrapolate

    def read(self, view: LayerView, query: Tensor, *, after: int = 0) -> Tensor:
        return prefill_chunks(view, query, self)

    def selects(self, view: LayerView) -> Tensor:
        self.selector.prepare(view)
        return view.regions.mid_sizes > self.selector.budget

    def listed(self, view: LayerView, q: Tensor, firsts: Tensor) -> Tensor:
        self.selector.prepare(view)
        if self.extrapolate:
            q = needed(view.rope).unrotate(q, firsts[0] + torch.arange(q.shape[2], device=q.device))
        moved = (view.length - firsts).repeat(len(q))
        tokens = self.selector.choose(view, q.unflatten(2, (len(firsts), -1)).mean(3), view.regions.mid_first - moved,
                                      view.regions.mid_last - moved)
        return tokens.view(len(q), len(firsts), -1)
