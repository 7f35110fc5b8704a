"""Run by test_attention_mass.py in a process without the interpreter: compiles for GPUs that are not here."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparsekv.kernels import attention_mass

POINTERS = {**dict.fromkeys(("positions", "best", "part_best", "found"), "*i32"),
            **dict.fromkeys(("out", "part", "bracket", "lse"), "*fp32"),
            **dict.fromkeys(("scale", "depth", "goal0", "goal1"), "fp32")}


def main() -> None:
    for capability, limit in ((80, 166_912), (90, 232_448)):
        for dim, group, dtype in ((64, 3, "bf16"), (256, 1, "fp32")):
            constants = {"GROUP": group, "ROWS": attention_mass.ROWS, "DIM": dim, "WIDTH": attention_mass._padded(dim),
                         "BLOCK": attention_mass.ABOVE_BLOCK, "SLOTS": attention_mass.SLOTS, "FIRST": dtype == "fp32"}
            for kernel in attention_mass.kernels():
                signature = {n: "constexpr" if n in constants else POINTERS.get(
                    n, f"*{dtype}" if n in ("q", "k") else "i32") for n in kernel.arg_names}
                used = {n: constants[n] for n in kernel.arg_names if n in constants}
                binary = triton.compile(ASTSource(kernel, signature, used), target=GPUTarget("cuda", capability, 32),
                                        options={"num_warps": 8, "num_stages": 2})
                assert binary.metadata.shared <= limit, (kernel.__name__, capability, binary.metadata.shared)
    print("ok")


if __name__ == "__main__":
    main()
