"""Run by test_bucket_mass.py in a process of its own: TRITON_INTERPRET is set before the kernel is defined."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from sparsekv.kernels import bucket_mass as m

# (query heads, KV heads, head dim, keys, queries, buckets, sink, window)
SHAPES = [(4, 2, 16, 150, 70, 7, 4, 16), (3, 3, 40, 63, 5, 40, 0, 1), (6, 1, 32, 201, 9, 3, 130, 8)]


def main() -> None:
    for heads_q, heads_kv, dim, length, count, buckets, sink, window in SHAPES:
        torch.manual_seed(length)
        queries, keys = torch.randn(heads_q, count, dim) * 2, torch.randn(heads_kv, length, dim)
        bucket = torch.randint(buckets - 1, (heads_kv, length))  # the last bucket is empty
        positions = torch.randint(length, (heads_q, count))
        positions[:, 0] = sink  # a query without a mid key
        truth = m.bucket_mass_reference(queries.double(), keys.double(), bucket, positions, buckets, scale=dim**-0.5,
                                        sink_size=sink, window_size=window)
        log_mass = m._launch(queries, *m.sort_by_bucket(keys, bucket, buckets), positions, dim**-0.5, sink, window)
        assert torch.isneginf(log_mass[..., -1]).all() and torch.isneginf(log_mass[:, 0]).all()
        found = log_mass.softmax(-1).nan_to_num(0.0)
        torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=1e-6)
    print("ok")


if __name__ == "__main__":
    main()
