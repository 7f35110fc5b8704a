"""Run by test_attend.py in a process without the interpreter: compiles the kernels for GPUs that are not here."""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparsekv.kernels import attend, attend_triton, completion, completion_triton, routing, routing_triton, tuning

SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448}
POINTERS = {
    **dict.fromkeys(("starts", "tail_starts", "lengths"), "*i64"),
    **dict.fromkeys(("tokens", "offsets", "buckets", "counts", "chosen"), "*i32"), "mask": "*i8",
    **dict.fromkeys(("partial", "partial_lse", "partial_rest", "partial_rest_mass", "out_lse", "logits", "shift_q", "z",
                     "s", "c", "m", "offset", "whole", "base", "centre", "cap", "mean_key",
                     "factors", "rest", "size", "bound"), "*fp32"),
    **dict.fromkeys(("scale", "eps"), "fp32"),
}
HALF = ("q", "k", "v", "out", "x", "w", "b", "y", "means", "listed_k", "listed_v", "features", "feature_q", "a", "logs",
        "bucket_z", "bucket_s", "w_in", "b_in", "w_a", "b_a", "w_b", "alpha", "w_out", "b_out")


def main() -> None:
    assert "TRITON_INTERPRET" not in __import__("os").environ
    for capability, limit in SHARED_LIMIT.items():
        hopper = capability >= 90
        for dim, group, probes, phi, dtype in ((64, 3, 0, False, "fp16"), (80, 1, 32, False, "bf16"),
                                               (128, 4, 32, True, "bf16"), (256, 16, 128, False, "bf16")):
            width, rows = 1 << (dim - 1).bit_length(), max(16, group)
            shared = {"GROUP": group, "OVERLAP": hopper, "FEATURES": 128, "PHI": phi, "DIM": dim, "WIDTH": width,
                      "SPLITS": 64, "PADDED": 128, "ROWS": rows, "FOLD": 1}
            how = tuning.DEFAULTS["attend_phi" if phi else "attend"]
            for kernel, own, warps in (
                    (attend_triton.split_kernel, {
                        "PROBES": probes, "PADDED_PROBES": max(1, probes), "COPIES": dim == 80, "HALF": max(8, group),
                        "BLOCK": how["block"],
                        "ROWS": 2 * max(8, group) if phi else rows}, how["warps"]),
                    (attend_triton.merge_kernel, {"WIDTH": how["merge_width"], "PADDED_REST": 64, "CAPPED": phi},
                     how["merge_warps"]),
                    (attend_triton.bucket_kernel, {"DIM": width}, attend.SUM_WARPS),
                    (routing_triton.hidden_kernel, {"BLOCK": routing.HIDDEN_BLOCK, "DEPTH": width},
                     routing.HIDDEN_WARPS),
                    (routing_triton.score_kernel, {"MLP": True, "MEANS": dim < 256, "BLOCK": 64, "WAITS": hopper,
                                                   "DEPTH": routing.DEPTH_BLOCK}, routing.SCORE_WARPS),
                    (routing_triton.rank_kernel, {"ROWS": group if group != 3 else 4, "PADDED": 1024, "KEPT": 32,
                                                  "COUNTED": True, "DENSITY": False}, routing.RANK_WARPS),
                    (completion_triton.query_kernel, {"DIM": width, "WIDTH": 128, "CENTRED": True, "CAPPED": True,
                                                     "RANK": 16},
                     completion.QUERY_WARPS),
                    (completion_triton.cache_kernel, {"DIM": width, "MASKED": True, "BLOCK": completion.BLOCK},
                     completion.CACHE_WARPS)):
                constants = {n: v for n, v in {**shared, **own}.items() if n in kernel.arg_names}
                types = {**POINTERS, **({"features": "i32"} if {"w_out", "logs", "bucket_s"} & set(kernel.arg_names)
                                        else {})}
                signature = {n: "constexpr" if n in constants else types.get(n, f"*{dtype}" if n in HALF else "i32")
                             for n in kernel.arg_names}
                binary = triton.compile(ASTSource(kernel, signature, constants),
                                        target=GPUTarget("cuda", capability, 32),
                                        options={"num_warps": warps, "num_stages": routing.STAGES})
                used = binary.metadata.shared
                print(f"sm_{capability} d{dim} g{group} p{probes} {kernel.__name__}: {used} bytes shared")
                if used > limit:
                    sys.exit(f"{used} bytes of shared memory, {limit} allowed")


def fp8() -> None:
    """Keys and values of 8 bits, where the hardware has them."""
    kernel = attend_triton.split_kernel
    constants = {"PROBES": 32, "PADDED_PROBES": 32, "GROUP": 4, "HALF": 16, "ROWS": 16, "DIM": 128, "WIDTH": 128,
                 "BLOCK": 32, "FEATURES": 128, "PHI": False, "COPIES": False, "OVERLAP": False}
    eight = ("k", "v", "listed_k", "listed_v")
    signature = {n: "constexpr" if n in constants else POINTERS.get(
        n, "*fp8e4nv" if n in eight else "*bf16" if n in HALF else "i32") for n in kernel.arg_names}
    for capability in (89, 90):
        binary = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32),
                                options={"num_warps": 1})
        print(f"sm_{capability} fp8 {kernel.__name__}: {binary.metadata.shared} bytes shared")


if __name__ == "__main__":
    main()
    fp8()
