"""What is left for torch.compile to bring: a token of a whole model whose layers run their own code, have norms,
rotations and gates in one launch each, have products of few rows by a kernel, too (what the runtime does), or are
compiled.

    python benchmarks/experiments/compiled_layers.py [--shape 8b|smollm2|tiny] [--model PATH] [--length 8192]
                                                     [--rows 1] [--tokens 200] [--output FOLDER]

--model takes a real model in place of a shape. Full attention on `length` drawn keys and values, median of the last
half of the tokens by `attachment.generate`. `logits_apart`: from the same model's in float32. A way may be half as much
again from them as the model's own code is, which is what rounding does.
`setup_s`: what the way costs before its pace, capture included; the compiler with `coordinate_descent_tuning`, which
tunes products with one row. The rows go to compiled-layers.json.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import sparsekv
from benchmarks._rows import RESULTS, add_rows, row
from benchmarks.generate import SHAPES, Clock, make_model, synchronize
from sparsekv.runtime.fused import Fused
from sparsekv.runtime.model_pass import PLANNED
from sparsekv.runtime.process import NOW

WAYS = ("own code", "one launch each", "products of few rows", "compiled")
STEPS = 3
HALF = torch.bfloat16


@torch.library.custom_op("sparsekv_bench::decode_layer", mutates_args=())
def decode_layer(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """The next layer of the plan that runs, as a compiled layer calls it."""
    result: Tensor = NOW.plan.layer(query, key, value, scale, None)
    return result


@decode_layer.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return query.new_empty(query.shape[0], 1, query.shape[1], query.shape[3])


def planned_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None,
                      **kwargs: Any) -> tuple[Tensor, None]:
    return decode_layer(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling), None


class Nothing(Fused):
    """The model's own code."""

    def put(self) -> None:
        pass

    def rotation(self, own: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return own(q, k, cos, sin)


class OneEach(Fused):
    """Norms, rotations and gates alone."""

    def __init__(self, model: Any, attention: Any):
        super().__init__(model, attention)
        self.products, self.attentions = [], []

    def _few(self, kernel: Any, own: Any, parts: Any, x: Tensor) -> Any:
        return own(x)


class Compiled(Nothing):
    """Compiled decoder layers for the time of a pass, alike in all that a compiled program looks at."""

    def __init__(self, model: Any, layers: Any):
        super().__init__(model, layers.modules[0])
        self.layers, self.numbers = layers, [m.layer_idx for m in layers.modules]
        self.hooks = [m._forward_pre_hooks for m in (*layers.modules, *layers.decoders)]
        kind = type(layers.decoders[0])
        self.compiled = torch.compile(kind.forward, fullgraph=True, dynamic=False,
                                      options={"coordinate_descent_tuning": layers.modules[0].training is False
                                               and next(model.parameters()).is_cuda})

    def put(self) -> None:
        for module in self.layers.modules:
            module.layer_idx, module._forward_pre_hooks = 0, OrderedDict()
        for decoder in self.layers.decoders:
            decoder.__dict__["forward"] = functools.partial(self.compiled, decoder)

    def restore(self) -> None:
        for module, number, own in zip(self.layers.modules, self.numbers, self.hooks, strict=False):
            module.layer_idx, module._forward_pre_hooks = number, own
        for decoder in self.layers.decoders:
            decoder.__dict__.pop("forward", None)


def drawn(model: Any, cache: Any, ids: Tensor, seed: int) -> None:
    """Fill all but the last token of a cache with drawn keys and values, the same in every precision."""
    config = model.config
    shape = ids.shape[0], config.num_key_value_heads, ids.shape[1] - 1, config.head_dim
    torch.manual_seed(seed)
    for layer in cache.layers:
        layer.update(*(torch.randn(shape, device=ids.device, dtype=HALF).to(model.dtype) for _ in range(2)))


def run(model: Any, way: str, ids: Tensor, tokens: int, seed: int) -> tuple[Tensor, float, float]:
    """Logits of some steps, milliseconds a token, and seconds before that pace; without `tokens` no pace."""
    from transformers import AttentionInterface

    from sparsekv.runtime import hooks

    clock = Clock(streams=True)
    with sparsekv.attach(model, selector="dense") as attachment, torch.no_grad():
        layers = hooks.seat_of(attachment).layers
        if way == "own code":
            layers.fused = Nothing(model, layers.modules[0])
        elif way == "one launch each":
            layers.fused = OneEach(model, layers.modules[0])
        elif way == "compiled":
            layers.fused = Compiled(model, layers)
            AttentionInterface.register(PLANNED, planned_attention)
        cache = attachment.cache(ids.shape[1] + tokens + 64)
        drawn(model, cache, ids, seed)
        synchronize(ids)
        began = time.perf_counter()
        logits = torch.stack([attachment.step(ids[:, -1:], cache).float() for _ in range(STEPS)])
        synchronize(ids)
        setup = time.perf_counter() - began
        if tokens:
            attachment.generate(ids[:, -1:], max_new_tokens=tokens, streamer=clock, cache=cache, eos_token_id=[])
        if attachment.report()["not_replayed"] is not None:
            sys.exit(f"{way}: {attachment.report()['not_replayed']}")
    return logits, clock.pace if tokens else 0.0, setup


def in_float32(model: Any, ids: Tensor, seed: int) -> Tensor:
    """Logits of the same steps with the same weights in float32; buffers keep their precision."""
    kinds = [(p, p.dtype) for p in model.parameters()]
    for p, _ in kinds:
        p.data = p.data.float()
    exact = run(model, "own code", ids, 0, seed)[0]
    for p, kind in kinds:
        p.data = p.data.to(kind)
    return exact


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--model", help="a real model: a folder or a GGUF file")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = "coder" if options.model else options.shape
    model, _ = make_model(name, device, options.model)
    torch.manual_seed(1)
    ids = torch.randint(1, model.config.vocab_size, (options.rows, options.length), device=device)
    case, rows, found, limit = f"{name}-{options.length}-b{options.rows}", [], {}, 0.0
    exact = in_float32(model, ids, seed=2)
    for way in WAYS:
        logits, pace, setup = run(model, way, ids, options.tokens, seed=2)
        apart = max(float((a - b).norm() / b.norm()) for a, b in zip(logits, exact, strict=True))
        limit = limit or 1.5 * apart + 1e-5  # the model's own code is the first
        if not apart < limit:
            sys.exit(f"{way}: logits are {apart:.1e} from float32's, {limit:.1e} allowed")
        found[way] = pace
        rows += [row(case, way, "loop_ms", round(pace, 3), "milliseconds"),
                 row(case, way, "setup_s", round(setup, 3), "seconds"),
                 row(case, way, "logits_apart", apart, "relative")]
        print(f"{case:18} {way:22} {pace:8.3f} ms a token, set up in {setup:6.2f} s, {apart:.1e} from float32",
              flush=True)
    ours = found["products of few rows"]
    saved = ours - found["compiled"]
    print(f"compiling would bring {saved:.3f} ms a token, {100 * saved / ours:.1f} %")
    print(add_rows("compiled-layers", rows, options.output))


if __name__ == "__main__":
    main()
