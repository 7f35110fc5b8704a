"""Run by test_attend.py in a process without the interpreter: compiles the kernels for GPUs that are not here."""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparsekv.kernels import attend, routing

SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448}


def main() -> None:
    assert "TRITON_INTERPRET" not in __import__("os").environ
    split_kernel, merge_kernel = attend.kernels()
    pointers = {"starts": "*i64", "tail_starts": "*i64", "lengths": "*i64", "tokens": "*i32", "offsets": "*i32",
                "buckets": "*i32", "partial": "*fp32", "partial_lse": "*fp32", "out_lse": "*fp32", "scale": "fp32",
                "logits": "*fp32", "counts": "*i32", "chosen": "*i32"}
    for capability, limit in SHARED_LIMIT.items():
        for dim, group, probes, dtype in ((64, 3, 0, "fp16"), (80, 1, 32, "bf16"), (128, 4, 32, "bf16"),
                                          (256, 16, 128, "bf16")):
            constants = {"PROBES": probes, "PADDED_PROBES": max(1, probes), "SPLITS": 64, "PADDED": 64, "GROUP": group,
                         "ROWS": 16, "DIM": dim, "WIDTH": 1 << (dim - 1).bit_length(), "BLOCK": attend.BLOCK}
            constants |= {"RELU": True, "DEPTH": routing.DEPTH_BLOCK, "COUNTED": True, "KEPT": 32}
            for kernel in (split_kernel, merge_kernel, *routing.kernels()):
                if kernel is routing.kernels()[0]:
                    constants = {**constants, "BLOCK": routing.HIDDEN_BLOCK}
                if kernel is routing.kernels()[1]:
                    constants = {**constants, "PADDED": 1024, "ROWS": group if group != 3 else 4}
                names = kernel.arg_names
                signature = {n: "constexpr" if n in constants else pointers.get(
                    n, f"*{dtype}" if n in ("q", "k", "v", "out", "x", "w", "b", "y") else "i32") for n in names}
                used = {n: constants[n] for n in names if n in constants}
                binary = triton.compile(ASTSource(kernel, signature, used), target=GPUTarget("cuda", capability, 32),
                                        options={"num_warps": 4})
                shared = binary.metadata.shared
                print(f"sm_{capability} d{dim} g{group} p{probes} {kernel.__name__}: {shared} bytes shared")
                if shared > limit:
                    sys.exit(f"{shared} bytes of shared memory, {limit} allowed")


if __name__ == "__main__":
    main()
