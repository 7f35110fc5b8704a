"""Launch configurations: a sane default for every kernel, and what was measured on this machine where somebody did.

    python -m sparsekv.kernels.tuning --query-heads 32 --kv-heads 8 --head-dim 128 --context-length 131072

times the candidates on the CUDA device and keeps the best in `~/.cache/sparsekv/kernels.json` (or the folder
`SPARSEKV_CACHE`), which every later launch of that shape reads. Nothing else is ever written there.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

DEFAULTS: dict[str, dict[str, int]] = {
    "attend": {"block": 32, "warps": 1, "programs": 1024, "merge_width": 32, "merge_warps": 2},
    "attend_phi": {"block": 64, "warps": 2, "programs": 512, "merge_width": 32, "merge_warps": 2},
}
CANDIDATES: dict[str, list[int]] = {
    "block": [16, 32, 64, 128], "warps": [1, 2, 4], "programs": [256, 512, 1024], "merge_width": [32, 64],
    "merge_warps": [2, 4],
}


def cache_file() -> Path:
    """Where measured configurations are kept."""
    return Path(os.environ.get("SPARSEKV_CACHE", Path.home() / ".cache" / "sparsekv")) / "kernels.json"


def key(kind: str, device: str, rows: int, group: int, dim: int, length: int, dtype: torch.dtype) -> str:
    """One entry of the cache: rows and length by powers of two."""
    return (f"{device} | {kind} | rows {_power_of_two(rows)} group {group} d {dim} n {_power_of_two(length)} "
            f"{str(dtype).removeprefix('torch.')}")


def configuration(
    kind: str, device: torch.device, *, rows: int, group: int, dim: int, length: int, dtype: torch.dtype,
) -> dict[str, int]:
    """The launch configuration of `kind`: measured for this shape on this device, else the default. rows: batch times
    KV heads; length: tokens the cache has room for."""
    if device.type != "cuda" or not _saved():
        return DEFAULTS[kind]
    found = _saved().get(key(kind, _name(device), rows, group, dim, length, dtype), {})
    return {**DEFAULTS[kind], **found}


@functools.cache
def _saved() -> dict[str, dict[str, int]]:
    """The cache's entries; a file that is not one of ours counts as none."""
    try:
        held = json.loads(cache_file().read_text(encoding="utf-8"))
        return {k: {n: int(v[n]) for n in DEFAULTS["attend"]} for k, v in held.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


@functools.cache
def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def save(name: str, best: dict[str, int]) -> Path:
    """Add an entry to the cache."""
    path, entries = cache_file(), {**_saved(), name: best}
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)
    _saved.cache_clear()
    return path


def tune(kind: str, run: Callable[[], Any], time: Callable[[Callable[[], Any]], float]) -> tuple[dict[str, int], float]:
    """The best configuration of `kind` and its time: `run` launches with `DEFAULTS[kind]`, which is put back after.
    Candidates that do not fit the device are passed over."""
    start, best = dict(DEFAULTS[kind]), (dict(DEFAULTS[kind]), float("inf"))
    try:
        for names in (("block", "warps", "programs"), ("merge_width", "merge_warps")):
            base = dict(best[0])
            for values in itertools.product(*(CANDIDATES[n] for n in names)):
                DEFAULTS[kind] = {**base, **dict(zip(names, values, strict=True))}
                try:
                    found = time(run)
                except _beyond_the_device():
                    continue
                if found < best[1]:
                    best = (dict(DEFAULTS[kind]), found)
    finally:
        DEFAULTS[kind] = start
    return best


def _beyond_the_device() -> tuple[type[Exception], ...]:
    """What a configuration raises that asks for more shared memory or registers than there are."""
    try:
        from triton.runtime.errors import OutOfResources
    except ImportError:
        return (RuntimeError,)
    return RuntimeError, OutOfResources


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, unit in (("query-heads", 32, "heads"), ("kv-heads", 8, "heads"), ("head-dim", 128, "channels"),
                                ("context-length", 131_072, "tokens"), ("batch", 1, "sequences"),
                                ("read", 8192, "tokens read a KV head"), ("features", 128, "features of φ")):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"[{unit}; default {default}]")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("tuning times kernels on a CUDA device, and there is none; the defaults serve without it")
    from sparsekv.kernels.attend import attend_tokens
    from sparsekv.kernels.reference import PhiRest

    shape = (options.batch, options.kv_heads, options.context_length)
    made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(options.batch, options.query_heads, options.head_dim, **made)
    k, v = (torch.randn(*shape, options.head_dim, **made) for _ in range(2))
    tokens = torch.rand(*shape, device="cuda").argsort(-1)[..., :options.read].int()
    zero, whole = (torch.full((options.batch,), x, device="cuda") for x in (0, options.context_length))
    regions: dict[str, Any] = {"scale": options.head_dim**-0.5, "starts": zero, "sink_size": 0, "tail_starts": whole,
                               "lengths": whole}
    features = torch.rand(*shape, options.features, **made)
    heads = (options.batch, options.query_heads)
    rest = PhiRest(torch.rand(*heads, options.features, **made), torch.zeros(heads, device="cuda"),
                   torch.ones(heads, device="cuda"), torch.ones(*heads, options.head_dim, device="cuda"), features)
    for kind, completion in (("attend", None), ("attend_phi", rest)):
        run = functools.partial(attend_tokens, q, k, v, tokens, **regions, rest=completion)
        best, seconds = tune(kind, run, _timed)
        name = key(kind, _name(q.device), options.batch * options.kv_heads, options.query_heads // options.kv_heads,
                   options.head_dim, options.context_length, q.dtype)
        print(f"{name}: {best}, {seconds * 1e6:.1f} µs; kept in {save(name, best)}")


def _timed(run: Callable[[], Any]) -> float:
    """Seconds a launch, median of five replays of twenty in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            run()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 20_000)
    return sorted(times)[2]


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


if __name__ == "__main__":
    main()
