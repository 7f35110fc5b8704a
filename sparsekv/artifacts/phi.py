"""The feature-map artifact: `φ_q` of every query head, `φ_k` of every KV head, calibration and gates."""

from __future__ import annotations

import functools
from bisect import bisect_right
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsekv.artifacts.card import describe
from sparsekv.artifacts.checks import brief, check_scope, damaged, from_record
from sparsekv.artifacts.fingerprint import check_fingerprint, model_fingerprint
from sparsekv.artifacts.format import load_artifact, save_artifact, take
from sparsekv.artifacts.hub.named import find_artifact
from sparsekv.artifacts.hub.push import OnHub
from sparsekv.core.estimators.phi import phi_tokens
from sparsekv.kernels import FeatureMapWeights, KeyMap
from sparsekv.models.feature_map import FeatureMaps
from sparsekv.util.errors import SparseKVError

KIND = "phi"
OUTSIDE = "a step completes outside the attention kernel, in plain torch, and is not replayed as a CUDA graph"
"""How maps of keys with blocks are run."""


@dataclass(frozen=True)
class PhiArtifactConfig:
    """What the maps are and where they came from; stored as `config.json`."""

    model: dict[str, Any]
    layers: list[int]
    num_features: int
    width: int
    sink_size: int
    window_size: int
    provenance: dict[str, Any] = field(default_factory=dict)
    quality: dict[str, Any] = field(default_factory=dict)
    centred: bool = False
    read_shares: list[float] = field(default_factory=lambda: [0.0])
    """Shares of the context read beside sink and tail that the shift was calibrated at, ascending."""
    capped: bool = False
    """True if the estimated mass is capped by `mass_cap`, as it was when the maps were calibrated."""
    query_blocks: int = 1
    key_width: int | None = None
    """Hidden units of a map of keys; None in the format of earlier versions, which is refused."""
    shared: bool = False
    """True if the units of a centred half and those of the other make all features together."""
    key_blocks: int = 0
    """ReZero blocks of a map of keys; with some it is run outside the attention kernel."""
    kind: str = KIND


@functools.cache
def _grid(shares: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The shares on a device, which waits for it once."""
    return torch.tensor(shares, dtype=dtype, device=device)


def _bracket(grid: tuple[float, ...], share: float) -> tuple[int, int, float]:
    """The places of the grid below and above a share, and the part of the way between them. A share of the grid, or
    outside, has one place twice: 0 times a closed gate's -inf would be no number."""
    after = bisect_right(grid, share)
    low, high = max(after - 1, 0), min(after, len(grid) - 1)
    if low == high or grid[low] >= share:
        return low, low, 0.5
    return low, high, (share - grid[low]) / (grid[high] - grid[low])


class PhiLayer(NamedTuple):
    """The maps of one layer; offset `[Hq]` is added to `log φ_q`: calibration shift and logarithm of the gate. offsets
    `[S, Hq]`: what it is when each of `shares` of the context is read beside sink and tail. capped: the mass is first
    capped by `mass_cap`."""

    maps: FeatureMaps
    offsets: Tensor
    shares: tuple[float, ...] = (0.0,)
    capped: bool = False

    @property
    def offset(self) -> Tensor:
        return self.offsets[0]

    def at(self, share: float | Tensor) -> PhiLayer:
        """Calibrated for a share of the context that is read, or for one a row: the best keys are the ones the
        maps underestimate, so that what is left without them wants another shift. Linear between the shares measured.
        Ours, not the paper's."""
        if isinstance(share, Tensor):
            return self._at_rows(share)
        table, (low, high, part) = self.offsets, _bracket(self.shares, share)
        if low == high:
            return self._replace(offsets=table[low:low + 1], shares=(share,))
        between = (1 - part) * table[low:low + 1] + part * table[high:high + 1]
        return self._replace(offsets=between, shares=(share,))

    def _at_rows(self, share: Tensor) -> PhiLayer:
        """offset: `[B, Hq]`."""
        table, grid = self.offsets, _grid(self.shares, share.dtype, share.device)
        after = torch.bucketize(share, grid, right=True)
        low, high = (after - 1).clamp(min=0), after.clamp(max=len(self.shares) - 1)
        part = ((share - grid[low]) / (grid[high] - grid[low])).nan_to_num(0.0, 0.0, 0.0).clamp(0.0, 1.0)[:, None]
        between = torch.where(part > 0, (1 - part).to(table.dtype) * table[low] + part.to(table.dtype) * table[high],
                              table[low])
        return self._replace(offsets=between[None], shares=(0.0,))

    @property
    def query_map(self) -> FeatureMapWeights:
        return self.maps.query

    @property
    def centred(self) -> bool:
        """Return whether queries and keys want the request's mean key."""
        return self.maps.centred is not None

    def of_keys(self, dtype: torch.dtype) -> KeyMap | FeatureMapWeights:
        """φ_k as it is run, with products in `dtype`; as it is where it has blocks."""
        return self.maps.of_keys(dtype)

    def run_on(self, device: Any) -> PhiLayer:
        """Move to a device what an estimator there needs at once; it takes the maps from where they are, once, in the
        precision that it runs: the trained ones in float32 are twice as large."""
        return self._replace(offsets=self.offsets.to(device))

    def to(self, device: Any) -> PhiLayer:
        return self._replace(maps=self.maps.map(lambda w: w.to(device)), offsets=self.offsets.to(device))


class PhiArtifact(OnHub):
    """maps with leading dimensions `[L, Hq]` (queries) and `[L, Hkv]` (keys); shift `[L, S, Hq]` by `read_shares`, gate
    `[L, Hq]`: the completion's mass is multiplied by `gate · exp(shift)`."""

    def __init__(self, config: PhiArtifactConfig, maps: FeatureMaps, shift: Tensor, gate: Tensor,
                 path: Path | None = None):
        self.config, self.maps, self.path = config, maps, path
        self.shift, self.gate = shift, gate
        self._open: list[bool] = (gate > 0).any(-1).tolist()
        self._row = {layer: row for row, layer in enumerate(config.layers)}

    def layer(self, layer_idx: int) -> PhiLayer | None:
        """The maps of a model layer; None where it has none or all gates are closed: nothing completes it, at no
        cost."""
        row = self._row.get(layer_idx)
        if row is None or not self._open[row]:
            return None
        return PhiLayer(self.maps.map(lambda w: w[row]), self.shift[row] + self.gate[row].log(),
                        tuple(self.config.read_shares), self.config.capped)

    @property
    def cache_tokens(self) -> float:
        """Count what a decoded token fetches of the cache, per layer and KV head, in tokens of `2d` elements."""
        config = self.config
        return phi_tokens(config.num_features, config.model["head_dim"], moments=config.capped)

    def save(self, path: str | Path, *, eight_bits: bool = False) -> None:
        """eight_bits: matrices rounded to 8 bits, a quarter of the size."""
        save_artifact(path, asdict(self.config), {**self.maps.named(), "shift": self.shift, "gate": self.gate},
                      eight_bits=eight_bits)

    @classmethod
    def load(cls, path: str | Path, revision: str | None = None) -> PhiArtifact:
        """From a folder, or by its name on the hub (`artifacts/hub/named.py`). Raises SparseKVError for a missing,
        damaged, newer or foreign artifact."""
        path = find_artifact(path, KIND, revision)
        raw, tensors = load_artifact(path, KIND)
        where = f"the artifact {str(path)!r}"
        config = from_record(PhiArtifactConfig, raw, where)
        check_scope(config, where, num_features=1, width=1, query_blocks=0, key_blocks=0)
        if config.key_width is None:
            raise SparseKVError(f"{where} names no key_width, the hidden units of its maps of keys: an earlier "
                                "version wrote it; train the maps again with sparsekv train-phi")
        if config.centred and config.key_blocks:
            raise damaged(where, f"its maps of keys have a centred half and {config.key_blocks} blocks, expected one "
                                 "of them")
        shares = config.read_shares
        if not shares or sorted(set(shares)) != shares or not 0 <= shares[0] <= shares[-1] <= 1:
            raise damaged(where, f"read_shares are {brief(shares)}, expected shares between 0 and 1, ascending")
        layers = len(config.layers)
        d, r = config.model["head_dim"], config.num_features
        half = r // 2 if config.centred else 0
        halves = (r, r) if config.shared and config.centred else (r - half, half)
        heads_q, heads_kv = config.model["num_query_heads"], config.model["num_kv_heads"]
        maps = []
        for part, heads, made, w, n in (("query", heads_q, r, config.width, config.query_blocks),
                                        ("key", heads_kv, halves[0], config.key_width, config.key_blocks),
                                        ("centred", heads_kv, halves[1], config.key_width, 0)):
            shapes = {"w_in": (d, w), "b_in": (w,), "w_a": (n * w, w), "b_a": (n * w,), "w_b": (n * w, w),
                      "alpha": (n,), "w_out": (w, made), "b_out": (made,)}
            if made:
                maps.append(FeatureMapWeights(**{k: take(tensors, f"{part}_map.{k}", (layers, heads, *shape), where)
                                                 for k, shape in shapes.items()}))
        shift = take(tensors, "shift", (layers, len(config.read_shares), heads_q), where)
        gate = take(tensors, "gate", (layers, heads_q), where)
        if (gate < 0).any():
            raise damaged(where, "a gate is negative")
        return cls(config, FeatureMaps(*maps), shift, gate, Path(path))

    def check(self, model: nn.Module) -> None:
        """Refuse a model other than the one trained on, or one that attends otherwise."""
        check_fingerprint(self.config.model, model_fingerprint(model), f"the feature maps {str(self.path or '')!r}")

    def to(self, device: Any) -> PhiArtifact:
        return PhiArtifact(self.config, self.maps.map(lambda w: w.to(device)), self.shift.to(device),
                           self.gate.to(device), self.path)

    def summary(self) -> str:
        c = self.config
        half = ", half of them centred" if c.centred else ""
        blocks = [f"maps of keys have {c.key_blocks} ReZero block(s): {OUTSIDE}"] if c.key_blocks else []
        lines = [f"feature maps {self.path or ''}: {len(c.layers)} layers, r = {c.num_features}{half}, "
                 f"width {c.width}, of keys {c.key_width}", *blocks,
                 f"completion on for {int((self.gate > 0).sum())} of {self.gate.numel()} heads", *describe(c.quality)]
        return "\n".join(lines)
