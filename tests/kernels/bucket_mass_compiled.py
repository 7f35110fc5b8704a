"""Run by test_bucket_mass.py in a process without the interpreter: compiles for GPUs that are not here."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparsekv.kernels import bucket_mass

POINTERS = {"where": "*i32", "offsets": "*i32", "positions": "*i32", "out": "*fp32", "scale": "fp32"}


def main() -> None:
    kernel = bucket_mass.kernel()
    for capability, limit in ((80, 166_912), (89, 101_376), (90, 232_448)):
        for dim, block, dtype in ((128, 64, "bf16"), (64, 16, "bf16"), (80, 32, "fp32")):
            constants = {"GROUP": 4, "ROWS": bucket_mass.ROWS, "DIM": dim, "WIDTH": 1 << (dim - 1).bit_length(),
                         "BLOCK": block}
            signature = {n: "constexpr" if n in constants else POINTERS.get(
                n, f"*{dtype}" if n in ("q", "k") else "i32") for n in kernel.arg_names}
            binary = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32),
                                    options={"num_warps": 4, "num_stages": 2})
            assert binary.metadata.shared <= limit, (capability, dim, binary.metadata.shared)
    print("ok")


if __name__ == "__main__":
    main()
