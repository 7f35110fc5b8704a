"""The operations of a decode step. On CUDA tensors the Triton kernels run, elsewhere the plain-torch twins of the same
signature in `reference.py`; both are tested against each other."""

from sparsekv.kernels.attend import attend_buckets, attend_tokens, routed_attention
from sparsekv.kernels.completion import phi_cache, phi_query
from sparsekv.kernels.indexing import assign_buckets, extend_index
from sparsekv.kernels.paged import paged_scores
from sparsekv.kernels.reference import (
    BucketMeans,
    PhiCache,
    PhiRest,
    PhiStore,
    RouterWeights,
    ScoreMoments,
    bucket_tokens,
    build_index,
    mean_key_logits,
    merge,
    moments_cap,
    phi_bucket_sums,
    phi_extend,
    phi_features,
    phi_partial,
    phi_remainder,
    router_logits,
    top_buckets,
)
from sparsekv.kernels.routing import route

__all__ = [
    "BucketMeans", "PhiCache", "PhiRest", "PhiStore", "RouterWeights", "ScoreMoments", "assign_buckets",
    "attend_buckets", "attend_tokens", "bucket_tokens", "build_index", "extend_index", "mean_key_logits",
    "merge", "moments_cap", "paged_scores", "phi_bucket_sums", "phi_cache", "phi_extend", "phi_features", "phi_partial",
    "phi_query", "phi_remainder", "route", "routed_attention", "router_logits", "top_buckets",
]
