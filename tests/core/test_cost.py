"""What a step reads, in bytes: every selector's and estimator's own sum, written out."""

from __future__ import annotations

import math

import pytest
import torch
from steps import BUDGET, CASES, COMPLETIONS, SIZES, steps_of, tiny, trained

import sparsekv
from sparsekv.core.cost import extra_tokens, read_shares, token_bytes
from sparsekv.core.selectors import SELECTORS
from sparsekv.core.selectors.base import Spends

HEADS_KV, DIM, SIZE, BUCKETS = 2, 10, 8, 8
PHI, CENTROIDS, SAMPLES = 16, 256, 256


def own_bytes(case: str, x) -> float:
    """What chooses, of a row, by hand: all numbers of 8 bytes but places (4), bucket means, codes and hashes."""
    mid, context = int(x.view.regions.mid_sizes[0]), int(x.queries.lengths[0])
    keys = mid * HEADS_KV * DIM * SIZE
    places = 4 * HEADS_KV * (BUCKETS + 1)
    model = HEADS_KV * (DIM * 20 + 20 + 20 * BUCKETS + BUCKETS) * SIZE
    pages = -(-(SIZES["sink_size"] + mid) // 16)
    sketch = DIM // 3
    return {
        "topk": keys, "topk-per_head": keys, "faiss": keys, "faiss-per_head": keys,
        "magicpig": entries(x) if case == "magicpig" else 0.0,
        "quest": 2 * pages * HEADS_KV * DIM * SIZE, "router": model + places + 4 * HEADS_KV * BUDGET,
        "router-probes": model + places + 4 * HEADS_KV * int(3 / BUCKETS * x.view.length),
        "router-mean_key": HEADS_KV * BUCKETS * (DIM + 8) + places + 4 * HEADS_KV * BUDGET,
        "sketch-buckets": model + places + (4 + sketch) * HEADS_KV * math.ceil(0.7 * (context - 1)),
        "sketch-fitted": model + places + (4 + sketch) * HEADS_KV * math.ceil(0.7 * (context - 1)),
        **dict.fromkeys(("sketch", "sketch-all"), sketch * HEADS_KV * (mid + SIZES["sink_size"])),  # all codes
    }.get(case, 0.0)


def entries(x) -> float:
    """Four bytes for every mid token in the bucket of a query head and table, and for the bucket's two ends; eight of
    the 150 tables stand for all."""
    first, last = int(x.view.regions.mid_first[0]), int(x.view.regions.mid_last[0])
    codes = x.selector.codes[0, :, first:last].tolist()
    heads = x.view.num_query_heads
    asked = x.selector._hash(x.queries.rot.float(), x.selector.used_bits.repeat_interleave(heads // HEADS_KV, 1))[0]
    met = sum(token[t] == query[t] for h, query in enumerate(asked[:, 0].tolist())
              for token in codes[h // (heads // HEADS_KV)] for t in range(8))
    return 4 * (met * 150 / 8 + 2 * heads * 150)


def shares(x):
    """Of tokens and of bytes, `[2, 1, Q]`."""
    return read_shares(x.view, x.queries, [x.step.selection], extra_tokens(x.view, x.selector, x.estimator)[None])


@pytest.mark.parametrize("completion", COMPLETIONS)
@pytest.mark.parametrize("case", [c for c in CASES if not c.startswith(("lfps", "token_select"))])
def test_the_bytes_of_a_step(case: str, completion: str, monkeypatch) -> None:
    taken, _ = steps_of(tiny(4, DIM, torch.float64), case, completion, 1, monkeypatch)
    x = taken[0]  # the mid region has not grown
    row = 2 * DIM * SIZE * HEADS_KV
    assert token_bytes(x.view) == row
    context, lists = int(x.queries.lengths[0]), x.step.selection.as_tokens()[0]
    lists = lists.expand(HEADS_KV, -1) if lists.shape[0] == 1 else lists
    read = context - int(x.view.regions.mid_sizes[0]) + float((lists >= 0).sum()) / HEADS_KV
    estimate = 0.0
    if completion == "phi":
        estimate = (PHI * (DIM + 2) + (DIM + 2) * DIM) * SIZE * HEADS_KV  # features of what is read are made anew
    elif completion == "centroid":
        estimate = CENTROIDS * (2 * DIM + 1) * SIZE * HEADS_KV
    elif completion == "uniform":
        estimate = SAMPLES * 2 * DIM * SIZE * HEADS_KV
    found = float(shares(x)[1])
    assert found == pytest.approx((read + (own_bytes(case, x) + estimate) / row) / context, rel=1e-6)


@pytest.mark.parametrize("name", ["token_select", "lfps"])
def test_those_that_score_keys_read_them(name: str, monkeypatch) -> None:
    taken, _ = steps_of(tiny(4, DIM, torch.float64), name, "none", 2, monkeypatch)
    for x in taken:
        read, share = shares(x)
        assert share.shape == (1, 2 * x.queries.count) and bool((share > read - 1e-9).all())


def test_the_report_says_it() -> None:
    model = tiny(3, DIM, torch.float64)
    router, _ = trained(model)
    ids = torch.randint(1, 61, (2, 90))
    found = {}
    for name in ("streaming", "topk", "sketch"):
        options = {"token_budget": BUDGET} if SELECTORS[name].spends is not Spends.NOTHING else {}
        options |= {"router": router} if SELECTORS[name].is_trained() else {}
        with sparsekv.attach(model, selector=name, dense_below=0, **SIZES, **options) as attachment:
            model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        found[name] = attachment.report()
    assert found["streaming"]["bytes_share"] == pytest.approx(found["streaming"]["selectivity_sparse"])
    assert found["topk"]["bytes_share"] > found["topk"]["selectivity_sparse"] + 0.3
    assert found["sketch"]["layers"][1]["bytes_share"] == found["sketch"]["bytes_share"]
    with sparsekv.attach(model, selector="dense") as attachment:
        model.generate(ids, max_new_tokens=2, do_sample=False)
    assert attachment.report()["bytes_share"] is None
