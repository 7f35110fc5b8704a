"""One token of an 8B-shaped model (random weights, 32 layers, bf16, KV on the GPU) in a CUDA graph, dense and sparse.

    python benchmarks/decode.py --parts e2e
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks._rows import row
from sparsekv.kernels import BucketMeans, QueryModel, routed_attention

LAYERS, WIDTH, INNER, HEADS_Q, HEADS, DIM = 32, 4096, 14_336, 32, 8, 128
BUCKETS, PROBES, HIDDEN, SINK, TAIL = 1024, 32, 1024, 1, 2047
LENGTHS = {"8k": 8192, "16k": 16_384, "32k": 32_768, "64k": 65_536, "128k": 131_072, "512k": 524_288}


def weight(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / math.sqrt(shape[-2])


class Layer:
    """Weights of a block and its routers."""

    def __init__(self) -> None:
        self.qkv, self.o = weight(WIDTH, (HEADS_Q + 2 * HEADS) * DIM), weight(HEADS_Q * DIM, WIDTH)
        self.up, self.down = weight(WIDTH, 2 * INNER), weight(INNER, WIDTH)
        self.norms = torch.ones(2, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.router = QueryModel(weight(HEADS, DIM, HIDDEN), weight(HEADS, HIDDEN), weight(HEADS, HIDDEN, BUCKETS),
                                    weight(HEADS, BUCKETS))
        self.means = BucketMeans(weight(1, HEADS, BUCKETS, DIM), DIM**-0.5)


def before(x: Tensor, layer: Layer, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (F.rms_norm(x, (WIDTH,), layer.norms[0]) @ layer.qkv).view(1, -1, DIM).split([HEADS_Q, HEADS, HEADS], 1)

    def turn(y: Tensor) -> Tensor:
        a, b = y.chunk(2, -1)
        return y * cos + torch.cat([-b, a], -1) * sin

    return turn(q), turn(k), v


def after(x: Tensor, out: Tensor, layer: Layer) -> Tensor:
    x = x + out.reshape(1, -1) @ layer.o
    gate, up = (F.rms_norm(x, (WIDTH,), layer.norms[1]) @ layer.up).chunk(2, -1)
    return x + (F.silu(gate) * up) @ layer.down


def end_to_end() -> list[dict[str, Any]]:
    """Milliseconds a token at each length. Layer 0 stays dense, as the runtime's default; every step writes its key and
    value into the cache first. `dense` is cuDNN's attention, the fastest there is at these shapes."""
    with torch.no_grad():
        return _measure()


def _measure() -> list[dict[str, Any]]:
    layers = [Layer() for _ in range(LAYERS)]
    pre, post = torch.compile(before), torch.compile(after)
    angle = torch.rand(1, DIM, device="cuda")
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    x = torch.randn(1, WIDTH, device="cuda", dtype=torch.bfloat16)
    head = weight(WIDTH, 128_256)
    rows = []
    for name, length in LENGTHS.items():
        caches = [torch.randn(2, 1, HEADS, length, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
        mid = length - SINK - TAIL
        share = torch.exp(0.5 * torch.randn(1, HEADS, BUCKETS, device="cuda"))
        sizes = (share / share.sum(-1, keepdim=True) * mid).long()
        sizes[..., -1] += mid - sizes.sum(-1)
        offsets = F.pad(sizes.cumsum(-1), (1, 0)).int()
        counts = sizes.int()
        orders = [(torch.rand(1, HEADS, mid, device="cuda").argsort(-1) + SINK).int() for _ in range(LAYERS)]
        lengths = torch.tensor([length], device="cuda")
        place = lengths - 1
        regions: dict[str, Any] = {"scale": DIM**-0.5, "starts": torch.zeros_like(lengths), "sink_size": SINK,
                                   "tail_starts": lengths - TAIL, "lengths": lengths}

        def token(method: str, caches: list[Tensor] = caches, orders: list[Tensor] = orders, offsets: Tensor = offsets,
                  counts: Tensor = counts, place: Tensor = place, regions: dict[str, Any] = regions) -> Tensor:
            h = x
            for i, layer in enumerate(layers):
                q, k, v = pre(h, layer, cos, sin)
                keys, values = caches[i]
                keys.index_copy_(2, place, k[:, :, None])
                values.index_copy_(2, place, v[:, :, None])
                if method == "dense" or i == 0:
                    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                        out = F.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)[:, :, 0]
                else:
                    scores = layer.router if method == "sparse" else layer.means
                    out = routed_attention(q, keys, values, orders[i], offsets, counts, scores, probes=PROBES,
                                           **regions)[0]
                h = post(h, out, layer)
            return (h @ head).argmax(-1)

        for method in ("dense", "sparse", "sparse_mean_key"):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    token(method)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                token(method)
            times = []
            for _ in range(12):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                times.append(begin.elapsed_time(end))
            value = sorted(times)[len(times) // 2]
            rows.append(row(f"e2e-{name}", method, "ms_per_token", round(value, 3), "milliseconds a token"))
            print(f"e2e-{name} {method} {value:.2f} ms", flush=True)
            del graph
        del caches, orders
        torch.cuda.empty_cache()
    return rows
