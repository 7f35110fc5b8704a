"""The completion by bucket means: the query's side of one decode step. Every mid token is estimated by the mean key of
its bucket; the attention kernel takes the estimates of what it reads out of the sums, as it does with features."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels.completion import rest_of
from sparsekv.kernels.gather import gather_rows
from sparsekv.kernels.launch import acc_dtype, as_heads, dense_last, finite, on_device, padded, seats_or
from sparsekv.kernels.types import BucketSums, CompletionQuery, KeyBuckets

AT_ONCE, COLUMNS, WARPS = 128, 32, 4
"""Buckets at once, columns of the sum of values in one program, and its warps."""


def bucket_query(q: Tensor, buckets: BucketSums, scale: float, seats: Tensor | None = None) -> CompletionQuery:
    """Weights of a request's buckets and their sums, the query's side of a completed step.

    The estimate of key `i` in bucket `c` is `exp(scale · q · mean_c)` (RetroInfer's estimation zone).

    Args:
        q: `[Q, Hq, d]`, with RoPE.
        buckets: means, counts and sums of values of B requests.
        scale: the softmax scale.
        seats: `[Q]` int64, the rows of `buckets` that are the queries'; without it `Q` is a multiple of `B`.

    Returns:
        A `CompletionQuery` without `keys`: its features `[Q, Hq, C]` are the weights of the buckets, the largest 1.
    """
    return (launch_bucket_query if on_device(q) else bucket_query_reference)(q, buckets, scale, seats)


def bucket_query_reference(
    q: Tensor, buckets: BucketSums, scale: float, seats: Tensor | None = None,
) -> CompletionQuery:
    """`bucket_query` in plain torch."""
    if seats is not None:
        found = bucket_query_reference(q, BucketSums(*(x[seats] for x in buckets)), scale)
        return found._replace(seats=seats)
    count, heads_q, dim = q.shape
    batch, heads, number, _ = buckets.means.shape
    acc = acc_dtype(q)
    query = q.to(acc).reshape(batch, count // batch, heads, heads_q // heads, dim)
    logs = torch.einsum("bthgd,bhcd->bthgc", query, buckets.means.to(acc)) * scale
    counts = buckets.counts.to(acc)
    logs = logs.masked_fill((counts == 0)[:, None, :, None], float("-inf"))
    top = logs.amax(-1)
    features = torch.exp(logs - finite(top)[..., None]).to(q.dtype)
    exact = features.to(acc)  # rounded before it is summed, so that whole and parts agree
    mass = torch.einsum("bthgc,bhc->bthg", exact, counts)
    numerator = torch.einsum("bthgc,bhcd->bthgd", exact, buckets.sums.to(acc))
    return CompletionQuery(features.reshape(count, heads_q, number), top.reshape(count, heads_q),
                           mass.reshape(count, heads_q), numerator.reshape(count, heads_q, dim))


def bucket_remainder(query: CompletionQuery, tokens: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The estimate of the mid region less that of the tokens read, as one more partial attention.

    Args:
        query: of `bucket_query`, its `keys` the buckets of all tokens.
        tokens: `[Q, H, K]` by number, -1 = none, `H` dividing `Hq`.
        values: `[Q, H, K, d]` of those tokens.

    Returns:
        `(out [Q, Hq, d], lse [Q, Hq])`; nothing where what is left is rounding error.
    """
    assert isinstance(query.keys, KeyBuckets)
    number = query.keys.number
    count, lists, listed = tokens.shape
    if not query.keys.listed:
        flat = tokens.clamp(min=0).reshape(count, number.shape[1], lists // number.shape[1] * listed)
        number = gather_rows(number[..., None], flat)
    bucket = number.reshape(count, lists, 1, listed).long()
    features = query.features.to(acc_dtype(query.features)).unflatten(1, (lists, -1))
    taken = features.gather(-1, bucket.expand(-1, -1, features.shape[2], -1))
    return rest_of(query, taken.masked_fill((tokens < 0)[:, :, None], 0.0), values)


def launch_bucket_query(q: Tensor, buckets: BucketSums, scale: float, seats: Tensor | None = None) -> CompletionQuery:
    """`bucket_query` through Triton: a program a query, a KV head and `COLUMNS` columns of the sum."""
    from sparsekv.kernels.bucket_query_triton import bucket_query_kernel

    q = dense_last(q)
    count, heads_q, dim = q.shape
    means, counts, sums = (x.contiguous() for x in buckets)
    batch, heads, number, _ = means.shape
    group = heads_q // heads
    features = torch.empty(count, heads_q, number, dtype=q.dtype, device=q.device)
    log_scale, mass = (torch.empty(count, heads_q, dtype=torch.float32, device=q.device) for _ in range(2))
    numerator = torch.empty(count, heads_q, dim, dtype=torch.float32, device=q.device)
    per_row = 1 if seats is not None else count // batch
    bucket_query_kernel[(count * heads, -(-dim // COLUMNS))](
        as_heads(q), means, counts, sums, seats_or(seats, counts), features, log_scale, mass, numerator, scale, heads,
        number, per_row, GROUP=group, ROWS=padded(group), DIM=dim, WIDTH=padded(dim), COLUMNS=COLUMNS,
        BLOCK=min(AT_ONCE, AT_ONCE * 128 // padded(dim)),
        SEATED=seats is not None, num_warps=WARPS)
    return CompletionQuery(features, log_scale, mass, numerator, seats=seats)
