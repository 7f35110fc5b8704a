"""Shared hash tables: the twin against a literal loop, the kernel against the twin, compiled for real GPUs.

The file is also what it runs in processes of its own: with the interpreter, which must be chosen before the kernel is
defined, and without it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

if __name__ == "__main__" and sys.argv[1] == "interpreted":
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from torch import Tensor

from sparsekv.kernels import collisions as m

# (batch, KV heads, group, queries a head, keys, tables)
SHAPES = [(1, 1, 1, 1, 1, 2), (2, 2, 3, 1, 37, 150), (1, 3, 1, 2, 65, 7), (2, 1, 4, 5, 33, 16), (1, 2, 2, 4, 9, 31),
          (3, 2, 1, 1, 50, 48), (1, 2, 9, 1, 17, 33), (2, 2, 2, 1, 0, 5), (2, 2, 2, 0, 6, 5)]
SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448}


def scenes(device: str = "cpu") -> Iterator[tuple[Tensor, Tensor]]:
    """Codes of few values, so that many meet, with the strides a caller may bring."""
    for batch, heads, group, count, length, tables in SHAPES:
        torch.manual_seed(length)
        few = torch.tensor([-(1 << 15), -1, 0, 1, 2, 511, 512, (1 << 15) - 1], dtype=torch.int16, device=device)
        codes = few[torch.randint(8, (batch, heads, length, tables), device=device)]
        queries = few[torch.randint(8, (batch, heads * group, count, tables), device=device)]
        yield codes, queries
        room = torch.zeros(batch, heads, length + 3, tables + 5, dtype=torch.int16, device=device)
        room[:, :, 1:1 + length, 2:2 + tables] = codes
        yield room[:, :, 1:1 + length, 2:2 + tables], queries.transpose(1, 2).contiguous().transpose(1, 2)
        yield codes.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0), queries.mT.contiguous().mT
        yield codes[:1].expand(2, -1, -1, -1), queries[:1].repeat(2, 1, 1, 1)


def poisoned(value: bool) -> Any:
    """`torch.empty` whose every entry is `value`."""
    return lambda *shape, dtype, device: torch.full(shape, value, dtype=dtype, device=device)


def test_twin_against_a_literal_loop() -> None:
    for codes, queries in scenes():
        for least in (1, 2, 5):
            found = m.collisions(codes, queries, least=least)
            group = queries.shape[1] // codes.shape[1]
            assert found.shape == (*queries.shape[:3], codes.shape[2]) and found.dtype == torch.bool
            for at in torch.cartesian_prod(*(torch.arange(n) for n in found.shape[:3])).tolist():
                same = codes[at[0], at[1] // group] == queries[at[0], at[1], at[2]]
                assert found[tuple(at)].tolist() == [sum(row) >= least for row in same.tolist()]


@pytest.mark.gpu
def test_kernel_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for value in (True, False):
        monkeypatch.setattr(torch, "empty", poisoned(value))
        found.append([m.collisions(*scene) for scene in scenes("cuda")])
        monkeypatch.undo()
    for scene, one, other in zip(scenes("cuda"), *found, strict=True):
        truth = m.collisions_reference(*scene)
        assert torch.equal(one, truth) and torch.equal(other, truth)


@pytest.mark.parametrize("how", ["interpreted", "compiled"])
def test_kernel(how: str) -> None:
    pytest.importorskip("triton")
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__, how], capture_output=True, text=True, env=clean, check=False)
    assert done.returncode == 0 and done.stdout.strip().endswith("ok"), done.stdout + done.stderr


def interpreted() -> None:
    empty, met = torch.empty, set()
    for codes, queries in scenes():
        for least, value in ((1, False), (2, True), (5, False)):
            truth = m.collisions_reference(codes, queries, least=least)
            torch.empty = poisoned(value)  # type: ignore[assignment]
            found = m.launch(codes, queries, least=least)
            torch.empty = empty
            assert found.dtype == torch.bool and torch.equal(found, truth), (codes.shape, queries.shape, least)
            met |= set(truth.flatten().tolist())
    assert met == {False, True}


def compiled() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = m.kernel()
    pointers = {"codes": "*i16", "queries": "*i16", "out": "*i1"}
    for capability, limit in SHARED_LIMIT.items():
        for rows, tables, step, contiguous in ((1, 150, 2, True), (4, 150, 2, True), (8, 33, 1, False)):
            constants = {"C_TOKEN": tables, "STEP": step, "GROUP": 4, "TABLES": tables, "ROWS": rows,
                         "BLOCK": min(m.BLOCK, m.PAIRS // rows), "WIDTH": m.WIDTH,
                         **(dict.fromkeys(("c_table", "q_table", "count"), 1) if contiguous else {})}
            signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in kernel.arg_names}
            binary = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32),
                                    options={"num_warps": m.WARPS})
            assert binary.metadata.shared <= limit, (capability, rows, binary.metadata.shared)


if __name__ == "__main__":
    {"interpreted": interpreted, "compiled": compiled}[sys.argv[1]]()
    print("ok")
