"""The operations of a decode step. On CUDA tensors the Triton kernels run, elsewhere the plain-torch twins of the same
signature in `reference.py`; both are tested against each other."""

from sparsekv.kernels.attend import attend_buckets, attend_tokens
from sparsekv.kernels.reference import (
    PhiCache,
    RouterWeights,
    assign_buckets,
    bucket_tokens,
    build_index,
    mean_key_logits,
    merge,
    phi_cache,
    phi_extend,
    phi_partial,
    phi_remainder,
    router_logits,
    top_buckets,
)
from sparsekv.kernels.routing import route

__all__ = [
    "PhiCache", "RouterWeights", "assign_buckets", "attend_buckets", "attend_tokens", "bucket_tokens", "build_index",
    "mean_key_logits", "merge", "phi_cache", "phi_extend", "phi_partial", "phi_remainder", "route",
    "router_logits", "top_buckets",
]
