"""Completion by bucket means: the twin against loops in float64. The kernel against the twin: cases.py."""

from __future__ import annotations

import torch
from checks import Step, buckets_of

from sparsekv.kernels import bucket_query
from sparsekv.kernels.attend import attend_tokens_reference
from sparsekv.kernels.indexing import bucket_tokens


def test_the_twin_against_loops() -> None:
    torch.manual_seed(0)
    s = Step((4, 2, 8, 23, 2, 5, 3, 2), torch.float64, "cpu")
    buckets, keys = buckets_of(s, 4)
    scale = s.regions["scale"]
    tokens = bucket_tokens(s.order, s.offsets, s.chosen)
    completed = bucket_query(s.q, buckets, scale)._replace(keys=keys)
    out, lse = attend_tokens_reference(s.q, s.k, s.v, tokens, **s.regions, completion=completed)
    for i, h in [(0, 0), (1, 3), (2, 1), (3, 2)]:
        row, kv = i // 2, h // 2
        read = set(tokens[i, kv].tolist()) - {-1}
        mass, numerator = 0.0, torch.zeros(8, dtype=torch.float64)
        for t in range(int(s.regions["starts"][i]), int(s.regions["lengths"][i])):
            key = s.k[row, kv, t]
            if s.mid[row, t] and t not in read:
                key = buckets.means[row, kv, int(keys.number[row, kv, t])]
            weight = float(torch.exp(scale * s.q[i, h] @ key))
            mass, numerator = mass + weight, numerator + weight * s.v[row, kv, t]
        torch.testing.assert_close(out[i, h], numerator / mass)
        assert abs(float(lse[i, h].exp()) - mass) < 1e-9 * mass
