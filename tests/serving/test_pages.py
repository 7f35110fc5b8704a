"""Full attention over pages, the CPU's path: every request reads its own, in the order of its table."""

from __future__ import annotations

import torch

from sparsekv.runtime.vllm.pages import attend_pages, by_slot

PAGE, HEADS, GROUP, DIM = 4, 2, 3, 8


def test_every_request_attends_to_its_own_pages() -> None:
    torch.manual_seed(0)
    pool = torch.randn(9, PAGE, HEADS, 2 * DIM, dtype=torch.float64).transpose(1, 2)
    table = torch.tensor([[7, 2, 0], [1, 3, 6], [5, 8, 4]], dtype=torch.int32)
    lengths, starts = torch.tensor([7, 0, 10]), torch.tensor([0, 3, 3, 5])
    q = torch.randn(5, HEADS * GROUP, DIM, dtype=torch.float64)
    found = attend_pages(q, *by_slot(pool), starts, lengths, table, PAGE, scale=0.3)
    for query, row, place in ((0, 0, 4), (1, 0, 5), (2, 0, 6), (3, 2, 8), (4, 2, 9)):
        kept = torch.stack([pool[table[row, i // PAGE], :, i % PAGE] for i in range(place + 1)], dim=1)
        keys, values = kept.repeat_interleave(GROUP, dim=0).split(DIM, dim=-1)
        weights = (torch.einsum("hd,hnd->hn", q[query], keys) * 0.3).softmax(-1)
        torch.testing.assert_close(found[query], torch.einsum("hn,hnd->hd", weights, values))
