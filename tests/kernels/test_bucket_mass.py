"""Attention mass per bucket: the twin against a literal loop, the kernel against the twin, compiled for real GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparsekv.kernels.bucket_mass import bucket_mass


def test_twin_against_a_literal_loop() -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(4, 6, 8), torch.randn(2, 30, 8)
    bucket, positions = torch.randint(5, (2, 30)), torch.randint(2, 30, (4, 6))
    found = bucket_mass(queries, keys, bucket, positions, 5, scale=0.3, sink_size=2, window_size=3)
    for h in range(4):
        for t in range(6):
            mid = range(2, int(positions[h, t]) - 3 + 1)
            weights = torch.tensor([float(torch.exp(0.3 * queries[h, t] @ keys[h // 2, i])) for i in mid])
            expected = torch.zeros(5)
            for i, w in zip(mid, weights, strict=True):
                expected[bucket[h // 2, i]] += w / weights.sum()
            torch.testing.assert_close(found[h, t], expected)


@pytest.mark.parametrize("script", ["bucket_mass_interpreted.py", "bucket_mass_compiled.py"])
def test_kernel(script: str) -> None:
    pytest.importorskip("triton")
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(Path(__file__).parent / script)], capture_output=True, text=True,
                          env=clean, check=False)
    assert done.returncode == 0 and done.stdout.strip().endswith("ok"), done.stdout + done.stderr
