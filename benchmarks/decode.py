"""The decode step on one GPU: routing + attention over what it chose, sink and local window + merge, against full
attention.

`sparse*` read by the budget rule, as many tokens as 32 of 1,024 equal buckets hold (3.125 % of the mid region);
`sparse_probes` the best 32 buckets (Saap); `sparse_sketch*` the best 1 % of the mid region by the sketches of the
candidates that the best buckets give, a fifth of it, or of all where that reads less (`_fifth`, `_all`: one of them
whatever the length; `_flat`: where all scores are equal). Everything runs inside CUDA graphs over several buffer sets,
so that no figure is the cache's. First the kernels are checked against their float64 twins. Writes the rows of `decode`
(or the folder given). What a token costs in a user's hands is `benchmarks/generate.py`.

    python benchmarks/decode.py [--output FOLDER] [--cases 32x8-128k-b1 ...] [--methods sparse_sketch_phi ...]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._profile import print_kernels
from benchmarks._rows import RESULTS, add_rows, row
from sparsekv.core.estimators import PhiEstimator
from sparsekv.core.index import Buckets, RouterLayer
from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.regions import Regions
from sparsekv.core.selectors.router import Router
from sparsekv.core.selectors.sketch import CANDIDATES, SketchRouter, most_by_codes
from sparsekv.core.sketch import code_size, fit_sketch
from sparsekv.core.step import Step, sparse_step
from sparsekv.core.streams import recording_stream
from sparsekv.kernels import (
    BucketMeans,
    FeatureMapWeights,
    KeyFeatures,
    KeyMap,
    PhiState,
    QueryModel,
    ScoreMoments,
    attend,
    encode_keys,
    factored,
    phi_sums,
    read_bound,
    round_means,
    routing,
    sketch,
)
from sparsekv.trainers.options import DEFAULT
from sparsekv.trainers.phi import RECIPES

DIM, BUCKETS, PROBES, HIDDEN, SINK, TAIL = 128, 1024, 32, 1024, 1, 2047
FEATURES, MAP_WIDTH, KEY_UNITS = RECIPES[DEFAULT].features, RECIPES[DEFAULT].width, 2 * RECIPES[DEFAULT].key_width
(SKETCH_BYTES, SKETCH_WIDE), SKETCH_BUDGET = code_size(None, None, DIM), 0.01
ALL_UP_TO = 131_072
"""Keys up to which a step by all codes is timed beside one by candidates."""
SHAPES = [  # case, query heads, KV heads, tokens, batch
    ("4x1-171k-b1", 4, 1, 171_000, 1), ("32x8-8k-b1", 32, 8, 8_192, 1), ("32x8-32k-b1", 32, 8, 32_768, 1),
    ("32x8-64k-b1", 32, 8, 65_536, 1), ("32x8-128k-b1", 32, 8, 131_072, 1), ("32x8-171k-b1", 32, 8, 171_000, 1),
    ("32x8-512k-b1", 32, 8, 524_288, 1),
    ("32x8-128k-b4", 32, 8, 131_072, 4), ("32x8-128k-b8", 32, 8, 131_072, 8), ("32x8-1M-b1", 32, 8, 1_048_576, 1),
    ("32x8-32k-b8", 32, 8, 32_768, 8), ("12x2-30k-b1", 12, 2, 30_000, 1), ("12x2-30k-b8", 12, 2, 30_000, 8),
    ("12x2-30k-b24", 12, 2, 30_000, 24), ("12x2-16k-b8", 12, 2, 16_384, 8), ("12x2-16k-b24", 12, 2, 16_384, 24),
    ("12x2-16k-b64", 12, 2, 16_384, 64), ("12x2-32k-b64", 12, 2, 32_768, 64),
]


def random_maps(heads: int) -> FeatureMapWeights:
    """Maps of `heads` heads as wide as the recipe trains them, with random weights."""

    def matrix(i: int, o: int) -> torch.Tensor:
        return torch.randn(heads, i, o, device="cuda", dtype=torch.bfloat16) * max(i, 1)**-0.5

    def bias(o: int) -> torch.Tensor:
        return torch.randn(heads, o, device="cuda", dtype=torch.bfloat16) * 0.1

    rows = RECIPES[DEFAULT].query_blocks * MAP_WIDTH
    return FeatureMapWeights(matrix(DIM, MAP_WIDTH), bias(MAP_WIDTH), matrix(rows, MAP_WIDTH), bias(rows),
                             matrix(rows, MAP_WIDTH), bias(RECIPES[DEFAULT].query_blocks), matrix(MAP_WIDTH, FEATURES),
                             bias(FEATURES))


def random_key_map(batch: int, heads: int) -> KeyFeatures:
    """The map of keys of `batch` requests, as large as the recipe trains it, with random weights."""

    def random(*size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*size, device="cuda") * scale

    return KeyFeatures(random(heads, DIM, KEY_UNITS, scale=DIM**-0.5).bfloat16(), random(batch, heads, KEY_UNITS),
                       random(heads, KEY_UNITS, FEATURES, scale=KEY_UNITS**-0.5).bfloat16(), random(heads, FEATURES),
                       torch.zeros(batch, heads, FEATURES, device="cuda"))


class Buffers:
    """One buffer set of a shape: KV cache, index with log-normal bucket sizes, both kinds of router scores, query."""

    def __init__(self, heads_q: int, heads: int, length: int, batch: int, seed: int):
        generator = torch.Generator("cuda").manual_seed(seed)
        dtype = torch.bfloat16

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, device="cuda", dtype=dtype, generator=generator) * scale)

        self.q = normal(batch, heads_q, DIM)
        self.k, self.v = (normal(batch, heads, length, DIM) for _ in range(2))
        self.model = QueryModel(normal(heads, DIM, HIDDEN, scale=DIM**-0.5), normal(heads, HIDDEN),
                                normal(heads, HIDDEN, BUCKETS, scale=HIDDEN**-0.5), normal(heads, BUCKETS))
        spread = torch.rand(batch, heads, BUCKETS, device="cuda", generator=generator)
        self.means = BucketMeans(*round_means(
            normal(batch, heads, BUCKETS, DIM).float(), torch.ones_like(spread)), DIM**-0.5, spread)
        self.mid = mid = max(length - SINK - TAIL, 0)
        share = torch.exp(0.5 * torch.randn(batch, heads, BUCKETS, device="cuda", generator=generator))
        sizes = (share / share.sum(-1, keepdim=True) * mid).floor().long()
        sizes[..., -1] += mid - sizes.sum(-1)
        self.offsets = torch.nn.functional.pad(sizes.cumsum(-1), (1, 0)).to(torch.int32)
        keys = torch.rand(batch, heads, mid, device="cuda", generator=generator)
        self.order = (keys.argsort(-1) + SINK).to(torch.int32)
        self.counts = self.offsets.diff(dim=-1)
        self.starts = torch.zeros(batch, dtype=torch.long, device="cuda")
        self.lengths = torch.full((batch,), length, dtype=torch.long, device="cuda")
        self.tails = (self.lengths - TAIL).clamp(min=0)
        widest = -(-mid * PROBES // BUCKETS)
        self.budget = (torch.full((batch,), widest, dtype=torch.long, device="cuda"), widest)
        regions = Regions(self.starts, self.tails, length, SINK)
        self.first = regions.mid_first
        self.view = LayerView(self.k, self.v, regions=regions, scale=DIM**-0.5, num_query_heads=heads_q)
        self.queries = Queries(self.q[:, :, None], self.lengths)
        self.flat = Queries(torch.zeros_like(self.queries.rot), self.lengths)

    def options(self) -> dict[str, Any]:
        return {"scale": DIM**-0.5, "starts": self.starts, "sink_size": SINK, "tail_starts": self.tails,
                "lengths": self.lengths}

    def router(self, model: bool = False, probes: int | None = None) -> Router:
        """The product's selector over this index."""
        made = Router(probes=probes, layer=self.trained)
        made.weights, made.buckets = (self.model if model else None), self.buckets
        made.budget, made.widest = self.budget
        return made

    @property
    def buckets(self) -> Buckets:
        return Buckets(self.trained.centroids[None], self.order, self.offsets, means=self.means.means,
                       steps=self.means.steps, spread=self.means.spread)

    @property
    def trained(self) -> RouterLayer:
        """Of an artifact: what the selectors say they read; buckets and codes are made here."""
        return RouterLayer(self.means.means[0], self.model, "rot", "mean_key", getattr(self, "sketch", None),
                           SKETCH_BYTES)

    def step(self, router: Router, estimator: PhiEstimator | None = None, queries: Queries | None = None) -> Step:
        """A step as the runtime takes it."""
        return sparse_step(self.view, queries or self.queries, router, estimator)

    def double(self) -> Buffers:
        """The same in float64, which kernels leave to their plain-torch twins."""
        self.sketch_router()
        self.completion()
        made = copy.copy(self)
        for name, value in vars(self).items():
            setattr(made, name, double(value))
        made.view = LayerView(made.k, made.v, **self.view.described())
        made.queries = Queries(made.q[:, :, None], self.lengths)
        maps = self.phi.layer
        made.phi = PhiEstimator(SimpleNamespace(query_map=double(maps.query_map), offset=maps.offset.double()))
        made.phi.state, made.phi.bias, made.phi.in_kernel = double(self.phi.state), self.phi.bias.double(), True
        made.phi.key_map = double(self.phi.key_map)
        return made

    def sketch_router(self, candidates: float | None = None) -> SketchRouter:
        """The product's second stage over this index, with the codes of all keys and a basis of random queries."""
        if not hasattr(self, "codes"):
            rows = self.k[:, :, :8192].float()
            mean = rows.mean(2)
            spread = rows - mean[:, :, None]
            covariance = spread.mT @ spread / rows.shape[2]
            moment = torch.eye(DIM, device="cuda").expand_as(covariance)
            self.sketch = fit_sketch(moment, mean, covariance, SKETCH_BYTES, SKETCH_WIDE)
            self.codes = encode_keys(self.k, self.sketch, SKETCH_BYTES)
            self.widest = [-(-self.mid // round(1 / share)) for share in (SKETCH_BUDGET, CANDIDATES)]
            self.spent = [torch.full_like(self.starts, n) for n in self.widest]
        made = SketchRouter(candidates=candidates, layer=self.trained)
        by_codes = most_by_codes(SKETCH_BYTES, BUCKETS, DIM)
        routed = self.mid > by_codes if candidates is None else candidates < 1
        made.weights, made.buckets = None, self.buckets if routed else None
        made.basis, made.side, made.codes = self.sketch, None, self.codes
        (made.widest, made.widest_pool), (made.budget, made.pool) = self.widest, self.spent
        made.first = self.first
        return made

    def completion(self) -> PhiEstimator:
        """Maps of the trained shape and width with random weights, one half centred, the mass capped."""
        if not hasattr(self, "phi"):
            batch, heads, length, _ = self.k.shape
            mid = slice(SINK, max(length - TAIL, SINK))
            keys, of_keys = self.k[:, :, mid], random_key_map(batch, heads)
            cache = phi_sums(self.k, self.v, self.starts + SINK, self.tails, of_keys)
            mean = keys.mean(2, dtype=torch.float32) * DIM**-0.5
            covariance = (keys.mT @ keys).float() / (DIM * max(keys.shape[2], 1))
            size = torch.full((batch,), float(keys.shape[2]), device="cuda")
            moments = ScoreMoments(mean, *factored(covariance), size, read_bound(self.budget[0] / size.clamp(min=1)))
            state = PhiState(*cache, mean, moments)
            maps, offset = random_maps(self.q.shape[1]), torch.zeros(self.q.shape[1], device="cuda")
            self.phi = PhiEstimator(SimpleNamespace(query_map=maps, offset=offset))  # type: ignore[arg-type]
            self.phi.state, self.phi.bias, self.phi.in_kernel = state, of_keys.bias, True
            self.phi.key_map = KeyMap(of_keys.w_in, of_keys.bias[0], of_keys.w_in, of_keys.w_out, of_keys.b_out)
        return self.phi

    def dense(self) -> torch.Tensor:
        """For flash: the heads of a group as rows of one KV head, its fastest form."""
        grouped = self.q.view(self.q.shape[0], self.k.shape[1], -1, DIM)
        return torch.nn.functional.scaled_dot_product_attention(grouped, self.k, self.v)

    def dense_gqa(self) -> torch.Tensor:
        """For cuDNN: grouped heads as such, its fastest form."""
        return torch.nn.functional.scaled_dot_product_attention(self.q[:, :, None], self.k, self.v, enable_gqa=True)


def timed(steps: list[Callable[[], torch.Tensor]], rows: int) -> float:
    """Microseconds a step, median over replays of one CUDA graph that runs every buffer set in turn."""
    stream = recording_stream(torch.device("cuda"), rows)
    stream.wait_stream(torch.cuda.current_stream())  # which may still be making the buffers
    with torch.cuda.stream(stream):
        for _ in range(2):
            for step in steps:
                step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = max(1, 24 // len(steps))
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for step in steps:
                step()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(15):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / (rounds * len(steps)))
    return sorted(times)[len(times) // 2]


def double(x: Any) -> Any:
    """Every tensor of a named tuple, or of one in it, in float64."""
    if isinstance(x, tuple):
        return type(x)(*map(double, x)) if hasattr(x, "_fields") else tuple(map(double, x))
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


OURS: dict[str, Callable[[Buffers], Step]] = {
    "sparse": lambda b: b.step(b.router()), "sparse_phi": lambda b: b.step(b.router(), b.completion()),
    "sparse_mlp": lambda b: b.step(b.router(model=True)),
    "sparse_probes": lambda b: b.step(b.router(model=True, probes=PROBES)),
    "sparse_sketch": lambda b: b.step(b.sketch_router()),
    "sparse_sketch_fifth": lambda b: b.step(b.sketch_router(CANDIDATES)),
    "sparse_sketch_all": lambda b: b.step(b.sketch_router(1.0)),
    "sparse_sketch_phi": lambda b: b.step(b.sketch_router(), b.completion()),
    "sparse_sketch_all_phi": lambda b: b.step(b.sketch_router(1.0), b.completion()),
    "sparse_sketch_flat": lambda b: b.step(b.sketch_router(), None, b.flat),
}
"""Steps of the product. `_flat`: of a query that attends to everything alike, as those of random weights do, the
histogram's worst case."""


def check() -> None:
    """Every step against itself in float64: the choice, and the attention to what was chosen; raises where they
    differ."""
    for heads_q, heads, length, batch in ((32, 8, 5000, 2), (4, 1, 9001, 1), (8, 8, 2100, 3), (16, 1, 2050, 1)):
        b = Buffers(heads_q, heads, length, batch, seed=length)
        exact = b.double()
        for name, take in OURS.items():
            if name.endswith("flat"):  # of equal scores any choice is right
                continue
            step, chosen = take(b), marked(take(exact).selection, length)
            query = exact.completion().query(exact.view, exact.queries) if name.endswith("phi") else None
            out, lse = exact.view.attend(exact.queries, step.selection, query)
            error = float((step.out[:, :, 0].double() - out).norm() / out.norm())
            gap = float((step.lse.double() - lse).abs().max())
            missed, every = int((chosen & ~marked(step.selection, length)).sum()), int(chosen.sum())
            print(f"check {heads_q}/{heads} n{length} b{batch} {name}: out {error:.1e}, lse {gap:.1e}, {missed} of "
                  f"{every} tokens are others", flush=True)
            # one token of a list may be a tie, and of the threshold's bin of sketches any are right
            allowed = max(len(chosen.flatten(0, 1)), every // (4 if "sketch" in name else 20))
            if not (error < 5e-3 and gap < 1e-2 and missed <= allowed):
                raise SystemExit("a kernel differs from its twin; no speed is reported")


def marked(selection: Selection, length: int) -> torch.Tensor:
    """Which tokens are read, `[Q, H, length]`."""
    tokens = selection.as_tokens().long()
    found = torch.zeros(*tokens.shape[:2], length + 1, dtype=torch.bool, device=tokens.device)
    return found.scatter_(-1, torch.where(tokens >= 0, tokens, length), True)[..., :length]


ROWS: list[dict[str, Any]] = []


def of(b: Buffers, method: str) -> Callable[[], Any]:
    """A method as a function of nothing."""
    return functools.partial(OURS[method], b) if method in OURS else getattr(b, method)


def measure(case: str, sets: list[Buffers], methods: tuple[str, ...]) -> None:
    """Rows of one case; a method that cannot run here is named and left out."""
    found = {}
    for method in methods:
        name = {"sdpa_flash": "dense", "sdpa_cudnn": "dense_gqa"}.get(method, method)
        backend = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}.get(method)
        try:
            with sdpa_kernel(backend) if backend is not None else contextlib.nullcontext():
                found[method] = timed([of(b, name) for b in sets], sets[0].k.shape[0])
        except RuntimeError as error:
            print(f"{case} {method}: {str(error).splitlines()[0]}")
    ROWS.extend(row(case, m, "us", round(t, 2), "microseconds a step") for m, t in found.items())
    print(case, {m: round(t, 1) for m, t in found.items()}, flush=True)


def profile(sets: list[Buffers], method: str) -> None:
    """Print the kernels of a step, each alone: without launches that are prepared while the one before ends."""
    ours = (attend, routing, sketch)
    before = [module.overlaps for module in ours]
    rotated = itertools.cycle(sets)
    try:
        for module in ours:
            module.overlaps = lambda _: False  # type: ignore[assignment]
        for b in sets:
            of(b, method)()
        print(f"    {method}, one kernel after another:")
        print_kernels(lambda: of(next(rotated), method)(), len(sets))
    finally:
        for module, overlaps in zip(ours, before, strict=True):
            module.overlaps = overlaps


def steps(options: argparse.Namespace) -> None:
    def wanted(methods: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(m for m in methods if options.methods is None or m in options.methods)

    for case, heads_q, heads, length, batch in SHAPES:
        if case not in options.cases:
            continue
        sets = [Buffers(heads_q, heads, length, batch, seed=i) for i in range(8 if length < 600_000 else 4)]
        methods: tuple[str, ...] = ("sparse", "sparse_mlp", "sparse_probes", "sparse_sketch",
                                    "sparse_sketch_flat", "sdpa_flash", "sdpa_cudnn")
        if length <= ALL_UP_TO:
            methods += ("sparse_sketch_fifth", "sparse_sketch_all")
        measure(case, sets, wanted(methods))
        for method in wanted(("sparse", "sparse_sketch")) if options.profile else ():
            profile(sets, method)
        for b in sets[3:]:
            b.__dict__.clear()
        completed = "sparse_phi", "sparse_sketch_phi", "sparse_sketch_all_phi"
        measure(case, sets[:3], wanted(completed[:3 if length <= ALL_UP_TO else 2]))
        del sets, b
        torch.cuda.empty_cache()
        add_rows("decode", ROWS, options.output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--cases", nargs="+", choices=[s[0] for s in SHAPES], default=[s[0] for s in SHAPES],
                        help="only these")
    parser.add_argument("--methods", nargs="+", help="only these, peers and ours")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step, each alone")
    options = parser.parse_args()
    torch.manual_seed(0)
    check()
    steps(options)
    print(add_rows("decode", ROWS, options.output))


if __name__ == "__main__":
    main()
