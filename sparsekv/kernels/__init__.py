"""The operations of a decode step and of capture. Every file is one operation: its truth in plain torch
(`<op>_reference`), its launch, and the door that picks the Triton kernel on CUDA and the truth elsewhere; the kernels
alone stand in `<op>_triton.py`, which nothing imports outside a launch.

Conventions (all functions):

- `B` rows of a cache, `Q = B·T` queries, row-major: all T queries of row 0 first. `Hq` query heads, `Hkv` KV heads,
  group `G = Hq // Hkv`; query head `h` reads KV head `h // G`.
- `q [Q, Hq, d]` is one query token each; `k, v [B, Hkv, N, d]` with any strides (expanded batches included).
- Partial attention returns `(out, lse)`: `out [Q, Hq, d]` normalised over its own set, `lse [Q, Hq]` the natural
  logarithm of the set's mass. The empty set is `out = 0, lse = -inf`, and every function accepts it.
- Lists of tokens or buckets are padded with -1. `order [B, Hkv, M]`, `offsets [B, Hkv, C + 1]` are an index: the tokens
  of bucket `c` are `order[b, h, offsets[b, h, c] : offsets[b, h, c + 1]]`, in ascending order.
- Arithmetic is float32 for half inputs and float64 for float64 inputs; outputs have the dtype of `q`, `lse` the
  arithmetic's.
- Query `q` sees the tokens `[starts[q], lengths[q])` (left padding before). Its anchors are the sink,
  `[starts[q], starts[q] + sink_size)`, and the local window, `[tail_starts[q], lengths[q])`, disjoint by construction:
  a token in both is read once. What lies between is the mid region.
"""

from sparsekv.kernels.attend import (
    Anchored,
    Pages,
    add_sinks,
    attend_anchors,
    attend_buckets,
    attend_gathered,
    attend_tokens,
    merge,
)
from sparsekv.kernels.attention_mass import query_statistics
from sparsekv.kernels.between import rms_norm, rotate_pair, silu_product
from sparsekv.kernels.bucket_mass import bucket_mass
from sparsekv.kernels.bucket_query import bucket_query, bucket_remainder
from sparsekv.kernels.bucket_sums import against_bucket, bucket_sums, square_sums
from sparsekv.kernels.chunk_attention import chunk_anchors, chunk_attention
from sparsekv.kernels.codes import Sketch, decode_codes, encode_keys
from sparsekv.kernels.collisions import collisions
from sparsekv.kernels.completion import (
    RANK,
    add_centre,
    factored,
    log_phi,
    log_phi_key,
    mass_cap,
    phi_query,
    read_bound,
    remainder,
)
from sparsekv.kernels.dense import dense_attention
from sparsekv.kernels.features import (
    away_from,
    for_request,
    fused,
    key_features,
    key_map,
    phi_join,
    phi_sums,
    products,
)
from sparsekv.kernels.few_rows import few_rows, few_rows_gated, fits_few_rows
from sparsekv.kernels.gather import HotRows, anchor_indices, fetch_rows, gather_rows, slots_at
from sparsekv.kernels.indexing import assign_buckets, bucket_counts, bucket_tokens, build_index, extend_index
from sparsekv.kernels.routing import (
    choose_tokens,
    group_probability,
    half_variance,
    round_means,
    route,
    route_tokens,
    top_buckets,
)
from sparsekv.kernels.sketch import Candidates, sketch_tokens
from sparsekv.kernels.stored import append_token, decode_attention
from sparsekv.kernels.types import (
    BlockFeatures,
    BucketMeans,
    BucketSums,
    CompletionQuery,
    FeatureMapWeights,
    KeyBuckets,
    KeyFeatures,
    KeyMap,
    PhiCache,
    PhiState,
    QueryModel,
    RouterScores,
    ScoreMoments,
)
from sparsekv.kernels.vote import soft_vote

__all__ = [
    "RANK",
    "Anchored",
    "BlockFeatures",
    "BucketMeans",
    "BucketSums",
    "Candidates",
    "CompletionQuery",
    "FeatureMapWeights",
    "HotRows",
    "KeyBuckets",
    "KeyFeatures",
    "KeyMap",
    "Pages",
    "PhiCache",
    "PhiState",
    "QueryModel",
    "RouterScores",
    "ScoreMoments",
    "Sketch",
    "add_centre",
    "add_sinks",
    "against_bucket",
    "anchor_indices",
    "append_token",
    "assign_buckets",
    "attend_anchors",
    "attend_buckets",
    "attend_gathered",
    "attend_tokens",
    "away_from",
    "bucket_counts",
    "bucket_mass",
    "bucket_query",
    "bucket_remainder",
    "bucket_sums",
    "bucket_tokens",
    "build_index",
    "choose_tokens",
    "chunk_anchors",
    "chunk_attention",
    "collisions",
    "decode_attention",
    "decode_codes",
    "dense_attention",
    "encode_keys",
    "extend_index",
    "factored",
    "fetch_rows",
    "few_rows",
    "few_rows_gated",
    "fits_few_rows",
    "for_request",
    "fused",
    "gather_rows",
    "group_probability",
    "half_variance",
    "key_features",
    "key_map",
    "log_phi",
    "log_phi_key",
    "mass_cap",
    "merge",
    "phi_join",
    "phi_query",
    "phi_sums",
    "products",
    "query_statistics",
    "read_bound",
    "remainder",
    "rms_norm",
    "rotate_pair",
    "round_means",
    "route",
    "route_tokens",
    "silu_product",
    "sketch_tokens",
    "slots_at",
    "soft_vote",
    "square_sums",
    "top_buckets",
]
