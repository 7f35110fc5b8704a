"""Run by test_attend.py in a process of its own: TRITON_INTERPRET must be set before the kernels are defined."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from sparsekv.kernels import completion, reference

# (query heads, KV heads, head dim, width, features, keys)
SHAPES = [(4, 2, 16, 24, 16, 63), (3, 3, 80, 32, 48, 111), (6, 1, 64, 40, 64, 1), (2, 2, 24, 16, 100, 1000)]


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def main() -> None:
    torch.empty = poisoned
    completion.PROGRAMS = 12
    for heads_q, heads, dim, width, features, keys in SHAPES:
        torch.manual_seed(keys)
        v = torch.randn(2, heads, keys, dim, dtype=torch.float64)
        # what a map can give at its worst: logarithms of ±1e4, and all the mass in one key
        spread = torch.tensor([1.0, 1e4])[:, None, None, None]
        logs = torch.randn(2, heads, keys, features, dtype=torch.float64) * spread
        mask = torch.rand(2, heads, keys) < 0.7
        mask[0, 0] = False
        for dtype, counted in ((torch.float32, None), (torch.float32, mask), (torch.float16, mask)):
            given = logs.to(torch.float32), v.to(dtype)
            found = completion.launch_cache(*given, counted)
            truth = reference.phi_cache(given[0].double(), given[1].double(), counted)
            limit = 1e-5
            assert torch.equal(found.m.double(), truth.m)
            for name, mine, right in zip("zs", found[1:], truth[1:], strict=True):
                error = float((mine.double() - right).norm() / right.norm().clamp(min=1e-30))
                print(f"cache {heads} d{dim} r{features} n{keys} {dtype} {name}: {error:.1e}")
                if not error < limit:
                    sys.exit("the cache differs from its twin")
        for dtype in (torch.float32, torch.float16):
            def random(*shape: int, scale: float = 1.0, kind: torch.dtype = dtype) -> torch.Tensor:
                return (torch.randn(*shape) * scale).to(kind)

            maps = reference.FeatureMapWeights(
                random(heads_q, dim, width, scale=dim**-0.5), random(heads_q, width),
                random(heads_q, width, width, scale=width**-0.5), random(heads_q, width),
                random(heads_q, width, width, scale=width**-0.5), random(heads_q, 1),
                random(heads_q, width, features, scale=width**-0.5), random(heads_q, features))
            # one offset a head, or one a row and head
            q, offset = random(2, heads_q, dim), torch.randn((heads_q,) if dtype == torch.float32 else (2, heads_q))
            offset[..., 0] = float("-inf")
            cache = reference.phi_cache(torch.randn(2, heads, keys, features), v.float())
            centre = torch.randn(2, heads, dim) * dim**-0.5 if dtype == torch.float32 else None
            moments = None
            if dtype == torch.float32:
                # one row that reads nothing, and spreads from none at all to far past the bound
                spreads = torch.logspace(-3, 0.5, heads)[:, None, None]
                moments = reference.ScoreMoments(
                    torch.randn(2, heads, dim), torch.randn(2, heads, 5, dim) * spreads, torch.rand(2, heads, dim),
                    torch.rand(2) * 50, torch.tensor([float("inf"), 1.5]))
            store = reference.PhiStore(*cache, torch.ones(1), centre=centre, moments=moments)
            found = completion.launch_query(q, maps, offset, store)
            exact = reference.FeatureMapWeights(*(w.double() for w in maps))
            log_q = reference.log_phi(q.double()[:, :, None], exact)
            log_q = reference.add_centre(log_q, q.double()[:, :, None], centre)[:, :, 0] + offset[..., None]
            truth = reference.phi_query(log_q, reference.PhiStore(*(x.double() for x in store[:4])))
            limit = 1e-5 if dtype == torch.float32 else 2e-2
            if moments is not None:
                wide = reference.ScoreMoments(*(x.double() for x in moments))
                right = reference.moments_cap(q.double(), wide, offset)
                if not torch.allclose(found.cap[:, 1:].double(), right[:, 1:], rtol=1e-5, atol=1e-4):
                    sys.exit("the cap of the mass differs from its twin")
            scale = [x.c.double().exp() for x in (found, truth)]
            for name in ("a", "whole", "base"):
                mine, right = (getattr(x, name).double() * (s if name == "whole" else s[..., None])
                               for x, s in zip((found, truth), scale, strict=True))
                error = float((mine - right).norm() / right.norm())
                print(f"query {heads_q}/{heads} d{dim} w{width} r{features} {dtype} {name}: {error:.1e}")
                if not error < limit or bool((mine[:, 0] != 0).any()):
                    sys.exit("the query's features differ from their twin")
    print("worst is fine")


if __name__ == "__main__":
    main()
