"""The untrained scores a router trains on: means of the keys a query sees, and no others."""

import dataclasses

import torch

from sparsekv.trainers import targets
from sparsekv.trainers.pool import Pool


def test_mean_key_logits_see_the_past_only() -> None:
    torch.manual_seed(0)
    heads, group, length, dim, count, buckets = 2, 3, 300, 8, 20, 7
    positions = torch.stack([torch.randperm(length)[:count].sort().values for _ in range(heads * group)])[None]
    positions[0, 0, 0], positions[0, 0, -1] = 2, length - 1
    given = {"keys": torch.randn(1, heads, length, dim), "queries": torch.randn(1, heads * group, count, dim),
             "values": torch.zeros(1, heads, 0, dim), "positions": positions, "best": positions, "scale": 0.3,
             "group": group, "sink_size": 4, "window_size": 16}
    pool = Pool(**{f.name: given.get(f.name) for f in dataclasses.fields(Pool)})
    bucket = torch.randint(0, buckets, (heads, length))
    found = targets.mean_key_logits(pool, 0, bucket, buckets)
    place = torch.arange(length)
    for h in range(heads * group):
        for t in range(count):
            mid = (place >= 4) & (place <= positions[0, h, t] - 16)
            for c in range(buckets):
                keys = pool.keys[0, h // group][mid & (bucket[h // group] == c)]
                truth = torch.tensor(targets.EMPTY)
                if len(keys):
                    truth = torch.log(torch.tensor(float(len(keys)))) + 0.3 * (keys.mean(0) @ pool.queries[0, h, t])
                torch.testing.assert_close(found[h, t, c], truth, rtol=1e-5, atol=1e-5)
