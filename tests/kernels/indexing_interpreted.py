"""Run by test_attend.py in a process of its own: TRITON_INTERPRET must be set before the kernels are defined."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from sparsekv.kernels import indexing, paged, reference


def main() -> None:
    full = torch.full
    torch.empty = lambda *shape, dtype=torch.float32, device=None: full(
        shape, float("nan") if dtype.is_floating_point else -7, dtype=dtype)
    shapes = ((4, 2, 16, 63, 5), (3, 3, 80, 111, 70), (16, 1, 64, 1, 1), (6, 2, 24, 1000, 130))
    for heads_q, heads, dim, keys, buckets in shapes:
        torch.manual_seed(keys)
        k = torch.randn(2, heads, keys, dim, dtype=torch.float64)
        centroids = torch.randn(heads, buckets, dim, dtype=torch.float64)
        q = torch.randn(2, heads_q, dim, dtype=torch.float64)
        first, last = torch.tensor([0, min(3, keys - 1)]), torch.tensor([keys, max(keys - 5, 0)])
        table = torch.stack([torch.randperm(keys) for _ in range(2)])
        for dtype in (torch.float32, torch.float16):
            mine = indexing.launch_assign(k.to(dtype), centroids.to(dtype))
            scores = torch.einsum("bhnd,hcd->bhnc", k.to(dtype).double(), centroids.to(dtype).double())
            # equals within rounding may swap: the product reached must agree
            gap = float((scores.max(-1).values - scores.gather(-1, mine.long()[..., None])[..., 0]).max())
            print(f"assign {heads} d{dim} n{keys} C{buckets} {dtype}: {gap:.1e}")
            limit = 1e-4 if dtype == torch.float32 else 5e-3
            if not gap < limit:
                sys.exit("a key is not with its best centroid")
            for pages in (None, table):
                for per_group in (False, True):
                    how = {"scale": dim**-0.5, "table": pages, "per_group": per_group}
                    found = paged.launch(q.to(dtype), k.to(dtype), first, last, **how)
                    truth = reference.paged_scores(q.to(dtype).double(), k.to(dtype).double(), first, last, **how)
                    error = float((found.double() - truth).norm() / truth.norm())
                    print(f"votes {heads_q}/{heads} d{dim} n{keys} {dtype} {pages is not None}: {error:.1e}")
                    if not error < (1e-5 if dtype == torch.float32 else 5e-3):
                        sys.exit("votes differ from their twin")
    print("worst is fine")


if __name__ == "__main__":
    main()
