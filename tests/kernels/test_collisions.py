"""Shared hash tables, against a literal loop."""

import torch

from sparsekv.kernels import collisions


def test_against_a_literal_loop() -> None:
    for batch, heads, group, count, length, tables in ((1, 1, 1, 1, 1, 2), (2, 2, 3, 1, 37, 40), (2, 1, 4, 5, 13, 16),
                                                       (2, 2, 2, 1, 0, 5), (2, 2, 2, 0, 6, 5)):
        torch.manual_seed(length)
        few = torch.tensor([-(1 << 15), -1, 0, 1, (1 << 15) - 1], dtype=torch.int16)
        codes = few[torch.randint(5, (batch, heads, length, tables))]
        queries = few[torch.randint(5, (batch, heads * group, count, tables))]
        same = (codes.repeat_interleave(group, 1)[:, :, None] == queries[:, :, :, None]).sum(-1)
        for least in (1, 2, 5):
            found = collisions(codes, queries, least=least)
            assert found.dtype == torch.bool and torch.equal(found, same >= least)
