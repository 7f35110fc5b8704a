"""Learned buckets: a query model picks partitions of the keys, and every key of them is read (Saap)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsekv.config import option
from sparsekv.core.buckets import ROUNDS, restart_empty
from sparsekv.core.index import bucket_tokens, budget_tokens
from sparsekv.core.kmeans import cluster_segments
from sparsekv.core.regions import Regions
from sparsekv.core.selectors.base import LayerView, Queries, Selection, Selector, fold, one_launch
from sparsekv.errors import SparseKVError
from sparsekv.kernels import (
    BucketMeans,
    assign_buckets,
    build_index,
    mean_key_logits,
    routed_attention,
    router_logits,
)

SCORES = ("mlp", "mean_key", "hybrid")
NEG_INF = float("-inf")
BLOCK = 8192


@dataclass(eq=False)
class Router(Selector):
    """Buckets of keys by spherical k-means; scores over buckets from a trained query model (`mlp`), from the request's
    own bucket means (`mean_key`), or from both (`hybrid`). Saap §4; the untrained scores are this project's.

    `artifact` is a RouterArtifact, or anything whose `.layer(i)` has centroids, weights, key_space and scores.
    """

    name: ClassVar[str] = "router"
    source: ClassVar[str] = "Saap §4"
    row_state: ClassVar[tuple[str, ...]] = ("centroids", "assignment", "order", "offsets", "counts", "key_sums",
                                            "means")
    needs_budget: ClassVar[bool] = False

    probes: int | None = option(None, help="Buckets read per query and KV head; the paper's is 32 [buckets].")
    scores: str | None = option(None, help="How a query scores buckets: mlp, mean_key or hybrid; without it the "
                                           "artifact's, else mean_key.")
    partition: str = option("offline", help="Where buckets come from: offline (the artifact's centroids) or request "
                                            "(k-means on this request's own keys).")
    num_buckets: int = option(256, help="Buckets per KV head when the request is clustered [buckets].", min=2)
    key_space: str | None = option(None, help="Keys that are clustered on the request: rot (with RoPE, the default) or "
                                              "pre (RoPE removed).")
    segments: int = option(1, help="Position segments that are clustered apart on the request and share the buckets "
                                   "evenly [segments].", min=1)
    kmeans_iterations: int = option(10, help="Iterations of k-means on the request [iterations].", min=1)
    adapt: int | None = option(None, help="How often trained buckets that this request leaves empty restart at the "
                                          "keys furthest from their buckets' means; without it 3 for mean_key, 0 for "
                                          "scores with a query model, which knows no such bucket [rounds].", min=0)
    joint: bool = option(True, help="The heads of a group sum their probabilities and read the same buckets; otherwise "
                                    "every query head reads its own.")
    rank: str | None = option(None, help="What orders buckets: mass (probability) or density (probability per token); "
                                         "without it mass for probes and density for a token budget.")
    artifact: Any = None

    def validate(self) -> None:
        super().validate()
        for name, allowed in (("scores", (None, *SCORES)), ("partition", ("offline", "request")),
                              ("rank", (None, "mass", "density")), ("key_space", (None, "pre", "rot"))):
            if getattr(self, name) not in allowed:
                raise SparseKVError(f"unknown {name} {getattr(self, name)!r}: expected one of "
                                    f"{', '.join(a for a in allowed if a)}")
        if self.artifact is None and self.partition == "offline":
            raise SparseKVError("selector router needs a trained router: give router=..., or cluster the request's own "
                                "keys with partition='request'")
        if self.partition == "request" and self.scores in ("mlp", "hybrid"):
            raise SparseKVError(f"scores {self.scores} belongs to trained buckets; with partition='request' use "
                                "mean_key")
        if self.adapt and (self.partition == "request" or self._scores() != "mean_key"):
            raise SparseKVError("adapt restarts trained buckets that mean_key scores; found partition "
                                f"{self.partition}, scores {self._scores()}: leave adapt out or choose scores mean_key")
        if self.probes is not None and self.token_budget is not None:
            raise SparseKVError("selector router takes probes or token_budget, found both; leave one out")
        if self.probes is None and self.token_budget is None:
            self.probes = min(32, self._buckets())
        if self.probes is not None and not 1 <= self.probes <= self._buckets():
            raise SparseKVError(f"probes must be between 1 and the router's {self._buckets()} buckets, found "
                                f"{self.probes}")

    def read_share(self, view: LayerView) -> float:
        return super().read_share(view) if self.probes is None else self.probes / self._buckets()

    def _scores(self) -> str:
        config = getattr(self.artifact, "config", None)
        return self.scores or str(getattr(config, "scores", "mean_key"))

    def _buckets(self) -> int:
        return self.num_buckets if self.partition == "request" else self.artifact.centroids.shape[-2]

    def build(self, view: LayerView) -> None:
        self.order: Tensor
        self.offsets: Tensor
        self.means: Tensor | None
        self.space, self.how, self.weights = self.key_space or "rot", self.scores or "mean_key", None
        self.adapted = False
        if self.partition == "request":
            self.centroids, self.segment_ends = self._cluster(view)
        else:
            trained = self.artifact.layer(view.layer_idx)
            self.space, self.how = trained.key_space, self.scores or trained.scores
            rounds = ROUNDS if self.adapt is None else self.adapt
            self.adapted = self.how == "mean_key" and rounds > 0
            if self.adapted:
                self.centroids, self.assignment = self._adapted(view, trained.centroids, rounds)
            else:
                self.centroids = trained.centroids[None].expand(view.keys.shape[0], -1, -1, -1)
            if self.how != "mean_key":
                if trained.weights is None:
                    raise SparseKVError(f"scores {self.how} needs the query model, and this router was saved without "
                                        "one; use mean_key")
                self.weights = trained.weights
        if not self.adapted:
            end = int(view.regions.mid_last.max())
            kept = self._kept(view)
            self.assignment = torch.cat([kept[..., :end], self._assign(view, min(kept.shape[-1], end), end)], dim=-1)
        self._index(view)
        self.key_sums = None
        if self.how != "mlp":
            end = self.assignment.shape[-1]
            self.key_sums = self._sums(view, view.regions.mid_mask()[:, :end], 0, end)

    def extend(self, view: LayerView, old: Regions) -> None:
        have, end = self.assignment.shape[-1], int(view.regions.mid_last.max())
        self.assignment = torch.cat([self.assignment, self._assign(view, have, end)], dim=-1)
        self._index(view)
        if self.key_sums is not None:
            low = int(old.mid_last.min())
            positions = torch.arange(low, end, device=view.keys.device)
            first = torch.maximum(old.mid_last, view.regions.mid_first)
            joined = (positions >= first[:, None]) & (positions < view.regions.mid_last[:, None])
            self.key_sums = self.key_sums + self._sums(view, joined, low, end)

    def routed(self, view: LayerView, queries: Queries, phi: Any) -> tuple[Tensor, Selection] | None:
        if not one_launch(view, queries) or not self.joint or self.probes is None or self.rank == "density":
            return None
        q = queries.folded(queries.rot)
        if self.weights is not None and self.weights.w1.dtype != q.dtype:
            self.weights = type(self.weights)(*(w.to(q.dtype).contiguous() for w in self.weights))
        if self.key_sums is not None and self.means is None:
            self.means = (self.key_sums / self.counts.clamp(min=1)[..., None]).to(q.dtype)
        starts, tails, lengths = view.regions.per_query(1)
        out, _, chosen = routed_attention(
            q, view.keys, view.values, self.order, self.offsets, self.counts, self.probes, weights=self.weights,
            means=None if self.means is None else BucketMeans(self.means, view.scale),
            q_router=queries.folded(queries.pre) if self.weights is not None and self.space == "pre" else None,
            scale=view.scale, starts=starts, sink_size=view.regions.sink_size, tail_starts=tails, lengths=lengths,
            phi=phi)
        return out, Selection(buckets=chosen, order=self.order, offsets=self.offsets)

    def select(self, view: LayerView, queries: Queries) -> Selection:
        scores = self.bucket_scores(view, queries)
        counts, order, offsets = fold(self.counts, queries.count), self.order, self.offsets
        if not self.joint and view.group > 1:
            counts, order, offsets = (x.repeat_interleave(view.group, dim=1) for x in (counts, order, offsets))
        if (self.rank or ("mass" if self.probes is not None else "density")) == "density":
            scores = scores / counts.clamp(min=1)
        scores = scores.masked_fill(counts == 0, NEG_INF)
        if self.probes is None:
            chosen = best_buckets(scores, scores.shape[-1])
            return Selection(tokens=budget_tokens(order, offsets, chosen, self.budget_tokens(view),
                                                  self.widest_budget(view)))
        chosen = best_buckets(scores, self.probes)
        if scores.shape[1] != view.num_kv_heads:
            return Selection(tokens=bucket_tokens(order, offsets, chosen))
        return Selection(buckets=chosen, order=order, offsets=offsets)

    def bucket_scores(self, view: LayerView, queries: Queries) -> Tensor:
        """Probability of every bucket: `[B·T, Hkv, C]`, summed over the group, or `[B·T, Hq, C]` unless `joint`."""
        counts = fold(self.counts, queries.count)
        logits: Tensor | None = None
        if self.weights is not None:
            logits = router_logits(queries.folded(queries.pre if self.space == "pre" else queries.rot), self.weights)
        if self.key_sums is not None:
            means = fold(self.key_sums / self.counts.clamp(min=1)[..., None], queries.count)
            base = mean_key_logits(queries.folded(queries.rot), means, counts, view.scale)
            logits = base if logits is None else logits + base
        assert logits is not None
        empty = (counts == 0).repeat_interleave(view.group, dim=1)
        p = logits.masked_fill(empty, NEG_INF).softmax(-1).nan_to_num(0.0)
        return p.unflatten(1, (-1, view.group)).sum(2) if self.joint else p

    def _kept(self, view: LayerView) -> Tensor:
        """The assignment saved with a prefix, if these are its centroids; else nothing, `[B, Hkv, 0]`."""
        held = (view.saved or {}).get("index.centroids")
        if view.saved is not None and held is not None and held.shape == self.centroids.shape and torch.equal(
                held, self.centroids):
            return view.saved["index.assignment"]
        return torch.zeros(*view.keys.shape[:2], 0, dtype=torch.long, device=view.keys.device)

    def _keys(self, view: LayerView, first: int, last: int) -> Tensor:
        return view.keys_pre(first, last) if self.space == "pre" else view.keys[:, :, first:last]

    def _assign(self, view: LayerView, first: int, last: int) -> Tensor:
        """Bucket of the keys `first..last`, `[B, Hkv, last − first]` int64."""
        parts = [view.keys.new_zeros(*view.keys.shape[:2], 0, dtype=torch.long)]
        for a in range(first, last, BLOCK):
            keys = self._keys(view, a, min(a + BLOCK, last))
            if self.adapted:
                own = assign_buckets(keys.flatten(0, 1)[None], self.centroids.to(keys.device).flatten(0, 1))
                parts.append(own[0].unflatten(0, keys.shape[:2]))
            elif self.partition == "offline":
                parts.append(assign_buckets(keys, self.centroids[0].to(keys.device)))
            else:
                scores = keys.to(self.centroids.dtype) @ self.centroids.mT
                parts.append(scores.masked_fill(~self._allowed(a, keys.shape[2]), NEG_INF).argmax(-1))
        return torch.cat(parts, dim=-1)

    def _index(self, view: LayerView) -> None:
        self.means = None
        self.order, self.offsets = build_index(self.assignment, self.centroids.shape[2], view.regions.mid_first,
                                               view.regions.mid_last)
        self.counts = self.offsets.diff(dim=-1)

    def _sums(self, view: LayerView, mask: Tensor, first: int, last: int) -> Tensor:
        """Sum of the rotated keys of every bucket, `[B, Hkv, C, d]` float32, over the tokens in mask
        `[B, last − first]`."""
        batch, heads, _, dim = view.keys.shape
        buckets = self.centroids.shape[2]
        sums = torch.zeros(batch, heads, buckets + 1, dim, device=view.keys.device)
        place = torch.where(mask[:, None], self.assignment[..., first:last], buckets)
        for a in range(0, last - first, BLOCK):
            part = place[..., a:a + BLOCK]
            keys = view.keys[:, :, first + a:first + a + part.shape[-1]].float()
            sums.scatter_add_(2, part[..., None].expand(-1, -1, -1, dim), keys)
        return sums[:, :, :-1]

    def _cluster(self, view: LayerView) -> tuple[Tensor, Tensor]:
        """Unit centroids of this request's mid keys `[B, Hkv, C, d]`, and where the segments end."""
        ends = torch.linspace(0, view.length, self.segments + 1, device=view.keys.device)[1:-1].ceil().long()
        rows = []
        for b in range(view.keys.shape[0]):
            low, high = int(view.regions.mid_first[b]), int(view.regions.mid_last[b])
            cuts = [low, *(min(max(int(e), low), high) for e in ends), high]
            keys = self._keys(view, low, high)[b].float()
            rows.append(cluster_segments(keys, [c - low for c in cuts], self.num_buckets, self.kmeans_iterations))
        return torch.stack(rows), ends

    def _adapted(self, view: LayerView, centroids: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
        """The trained centroids after `restart_empty` over every row's mid keys, `[B, Hkv, C, d]`, and the bucket of
        every token up to their end, `[B, Hkv, n]`."""
        batch, heads = view.keys.shape[:2]
        end = int(view.regions.mid_last.max())
        # every row has its own buckets: its heads are heads of one long row
        used = view.regions.mid_mask()[:, :end].repeat_interleave(heads, dim=0).to(view.keys.device)
        started = centroids.to(view.keys.device).repeat(batch, 1, 1)
        found = restart_empty(self._keys(view, 0, end).flatten(0, 1), started, rounds, used)
        return found[0].unflatten(0, (batch, heads)), found[1].unflatten(0, (batch, heads))

    def _allowed(self, first: int, count: int) -> Tensor:
        """Which buckets a token may join, `[count, C]`: those of its segment."""
        device, buckets = self.centroids.device, self.centroids.shape[2]
        segment = torch.searchsorted(self.segment_ends, torch.arange(first, first + count, device=device), right=True)
        owner = torch.arange(buckets, device=device) * self.segments // buckets
        return segment[:, None] == owner


def best_buckets(scores: Tensor, count: int) -> Tensor:
    """The `count` best buckets, best first, -1 where fewer are non-empty: `[Q, H, C] -> [Q, H, count]` int32."""
    values, chosen = scores.topk(min(count, scores.shape[-1]), dim=-1)
    return torch.where(torch.isneginf(values), -1, chosen).to(torch.int32)
