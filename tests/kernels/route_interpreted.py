"""Run by test_attend.py in a process of its own: TRITON_INTERPRET must be set before the kernels are defined."""

import itertools
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from sparsekv.kernels import reference, routing


def main() -> None:
    empty = torch.full
    torch.empty = lambda *shape, dtype=torch.float32, device=None: empty(
        shape, float("nan") if dtype.is_floating_point else -7, dtype=dtype)
    shapes = ((6, 2, 24, 40, 37, 5), (4, 4, 64, 100, 64, 64), (16, 1, 16, 7, 9, 20))
    for heads_q, heads, dim, hidden, buckets, probes in shapes:
        for dtype in (torch.float32, torch.float16):
            torch.manual_seed(heads_q)
            q = torch.randn(2, heads_q, dim, dtype=torch.float64)
            weights = [torch.randn(heads, dim, hidden), torch.randn(heads, hidden),
                       torch.randn(heads, hidden, buckets) * hidden**-0.5, torch.randn(heads, buckets)]
            weights = reference.RouterWeights(*(w.to(dtype) for w in weights))
            q = (q * dim**-0.5).to(dtype)
            counts = torch.randint(0, 3, (2, heads, buckets), dtype=torch.int32)
            counts[0, 0] = 0
            means = reference.BucketMeans(torch.randn(2, heads, buckets, dim).to(dtype), 0.3)
            exact = reference.RouterWeights(*(w.double() for w in weights))
            wide = reference.BucketMeans(means.means.double(), means.scale)
            cases = ((None, weights, None), (counts, weights, None), (counts, None, means), (counts, weights, means))
            for (sizes, model, by_mean), density in itertools.product(cases, (False, True)):
                if density and sizes is None:
                    continue
                found = routing.launch(q, model, heads, probes, sizes, by_mean, density=density)
                logits = torch.zeros(2, heads_q, buckets, dtype=torch.float64)
                if model is not None:
                    logits = logits + reference.router_logits(q.double(), exact)
                if by_mean is not None:
                    logits = logits + reference.mean_key_logits(q.double(), wide.means, sizes, wide.scale)
                truth = reference.top_buckets(logits, heads, probes, sizes, density)
                if sizes is not None:
                    logits = logits.masked_fill((sizes == 0).repeat_interleave(heads_q // heads, 1), float("-inf"))
                mass = logits.softmax(-1).nan_to_num(0.0).reshape(2, heads, -1, buckets).sum(2)
                if density:
                    mass = mass / sizes.clamp(min=1)
                # ties within rounding may swap: the mass reached must agree, and the padding exactly
                reached = [torch.where(c >= 0, mass.gather(-1, c.clamp(min=0).long()), 0.0) for c in (found, truth)]
                gap = float((reached[0] - reached[1]).abs().max())
                print(f"{heads_q}/{heads} d{dim} C{buckets} {dtype}: gap {gap:.1e}")
                unique = all(len(set(r)) == len(r) for r in ([x for x in row.tolist() if x >= 0]
                                                             for row in found.flatten(0, 1)))
                limit = 1e-5 if dtype == torch.float32 else 5e-3
                if not torch.equal(found >= 0, truth >= 0) or gap > limit or not unique:
                    sys.exit("routing differs from its twin")
    print("worst is fine")


if __name__ == "__main__":
    main()
