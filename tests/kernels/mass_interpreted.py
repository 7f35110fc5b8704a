"""Run by test_attention_mass.py in a process of its own: TRITON_INTERPRET is set before the kernels are defined."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from sparsekv.capture import statistics
from sparsekv.kernels import attention_mass

# (query heads, KV heads, head dim, keys, queries, sink, window)
SHAPES = [(4, 2, 16, 150, 9, 4, 16), (3, 3, 80, 70, 66, 0, 5), (6, 1, 32, 201, 70, 130, 8), (2, 1, 16, 40, 40, 4, 16)]


def main() -> None:
    check()
    # several stretches of the keys, the last ones out of the sight of most queries
    attention_mass._stretches = lambda heads, count, keys: (64, -(-keys // 64))
    check()
    print("ok")


def check() -> None:
    for heads_q, heads_kv, dim, length, count, sink, window in SHAPES:
        torch.manual_seed(length)
        queries, keys = torch.randn(heads_q, count, dim) * 2, torch.randn(heads_kv, length + 3, dim)[:, :length]
        positions = torch.randperm(length)[:count].sort().values
        options = {"scale": dim**-0.5, "sink_size": sink, "window_size": window}
        truth = statistics.query_statistics(queries.double(), keys.double(), positions, **options)
        found = statistics._on_device(queries, keys, positions, options["scale"], sink, window)
        assert set(found) == set(truth)
        for name, expected in truth.items():
            if name.startswith("cover"):
                error = (found[name] - expected).abs()
                assert (error <= (0.03 * expected).clamp(min=1)).all(), (name, error.max())
            else:
                torch.testing.assert_close(found[name].double(), expected.double(), rtol=1e-4, atol=1e-4, msg=name)
                assert found[name].dtype == (torch.int32 if name == "top1_position" else torch.float32)


if __name__ == "__main__":
    main()
