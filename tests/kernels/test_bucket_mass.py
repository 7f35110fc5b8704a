"""Attention mass per bucket: the twin against a literal loop. The kernel against the twin: test_interpreted.py."""

import torch

from sparsekv.kernels import bucket_mass


def test_twin_against_a_literal_loop() -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(4, 6, 8), torch.randn(2, 30, 8)
    bucket, positions = torch.randint(5, (2, 30)), torch.randint(2, 30, (4, 6))
    found = bucket_mass(queries, keys, bucket, positions, 5, scale=0.3, sink_size=2, window_size=3)
    for h in range(4):
        for t in range(6):
            mid = range(2, int(positions[h, t]) - 3 + 1)
            weights = torch.tensor([float(torch.exp(0.3 * queries[h, t] @ keys[h // 2, i])) for i in mid])
            expected = torch.zeros(5)
            for i, w in zip(mid, weights, strict=True):
                expected[bucket[h // 2, i]] += w / weights.sum()
            torch.testing.assert_close(found[h, t], expected)
