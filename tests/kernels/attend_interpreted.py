"""Run by test_attend.py in a process of its own: TRITON_INTERPRET must be set before the kernels are defined."""

import itertools
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from sparsekv.kernels import attend, reference, tuning

# (query heads, KV heads, head dim, tokens, sink, window, left padding)
SHAPES = [(4, 2, 16, 63, 4, 16, 0), (3, 3, 64, 111, 1, 30, 7), (16, 1, 80, 40, 4, 60, 0), (6, 2, 96, 1, 4, 16, 0)]
POISON = float("nan")


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    return torch.full(shape, POISON if dtype.is_floating_point else -7, dtype=dtype)


def completion(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mid: torch.Tensor, heavy: torch.Tensor | None = None,
) -> list[reference.PhiRest]:
    """Features of the keys in mid `[B, N]` and their sums, twice: in the tensors' dtype and exact. Those of the tokens
    `heavy [B, Hkv, K]` a thousand times the others', of a mass that leaves these some weight."""
    features = torch.rand(*k.shape[:3], 32)
    if heavy is not None:
        places = torch.arange(k.shape[2])
        listed = (heavy[..., None, :] == places[:, None]).any(-1)
        features = torch.where(listed[..., None], features, features / 1000)
    features = features.to(q.dtype)
    counted = features.double() * mid[:, None, :, None]
    m = torch.randn(k.shape[0], k.shape[1], 32)
    store = reference.PhiStore(m, counted.sum(2), counted.mT @ v.double(), features)
    logs = torch.randn(*q.shape[:2], 32)
    logs[0, 0] = float("-inf")
    rest = reference.phi_query(logs if heavy is None else logs + 7, store, q.dtype)
    if heavy is None:
        rest = rest._replace(cap=torch.randn(*q.shape[:2]))
    return [rest._replace(whole=rest.whole.float(), base=rest.base.float()),
            rest.map(torch.Tensor.double)]


def main() -> None:
    torch.empty = lambda *shape, dtype=torch.float32, device=None: poisoned(*shape, dtype=dtype, device=device)
    for how in tuning.DEFAULTS.values():
        how["programs"] = 16
    worst = 0.0
    for (heads_q, heads_kv, dim, length, sink, window, pad), dtype in itertools.product(
            SHAPES, (torch.float32, torch.float16)):
        torch.manual_seed(length)
        batch, buckets = 2, 9
        q = torch.randn(batch, heads_q, dim, dtype=torch.float64)
        k, v = (torch.randn(1, heads_kv, length + 3, dim, dtype=torch.float64)[:, :, :length] for _ in range(2))
        q, k, v = (x.to(dtype) for x in (q, k, v))
        k, v = k.expand(batch, -1, -1, -1), v.expand(batch, -1, -1, -1)
        starts = torch.tensor([0, pad])
        lengths = torch.tensor([length, max(1, length - 2)])
        tails = (lengths - window).clamp(min=0).maximum(starts)
        assignment = reference.assign_buckets(k, torch.randn(heads_kv, buckets, dim))
        assignment[:, 0] = 3
        order, offsets = reference.build_index(assignment, buckets, (starts + sink).minimum(tails), tails)
        options = {"scale": dim**-0.5, "starts": starts, "sink_size": sink, "tail_starts": tails, "lengths": lengths}
        chosen = torch.stack([torch.randperm(buckets)[:5] for _ in range(batch * heads_kv)])
        chosen = chosen.reshape(batch, heads_kv, 5).to(torch.int32)
        chosen[..., 3] = -1
        cases = {
            "buckets": (attend.launch(q, k, v, order, offsets, chosen, **options),
                        reference.attend_buckets(*(x.double() for x in (q, k, v)), order, offsets, chosen, **options)),
        }
        tokens = reference.bucket_tokens(order, offsets, chosen)
        per_head = tokens.repeat_interleave(heads_q // heads_kv, 1).clone()
        per_head[:, ::2, :2] = -1
        for name, listed in (("tokens", tokens), ("per head", per_head), ("none", tokens[..., :0])):
            cases[name] = (attend.launch(q, k, v, listed, **options),
                           reference.attend_tokens(*(x.double() for x in (q, k, v)), listed, **options))
        place = torch.arange(length)
        mid = (place >= (starts + sink)[:, None]) & (place < tails[:, None])
        everything = torch.where(mid[:, None], place, -1).to(torch.int32).expand(-1, heads_kv, -1)
        rest, exact_rest = completion(q, k, v, mid)
        for name, listed in (("completed", tokens), ("completed per head", per_head), ("all read", everything)):
            truth = reference.attend_tokens(*(x.double() for x in (q, k, v)), listed, **options, rest=exact_rest)
            cases[name] = (attend.launch(q, k, v, listed, **options, rest=rest), truth)
        # nearly all of the estimate is of keys that are read: what is left of it is a difference of large numbers
        heavy, exact_heavy = completion(q, k, v, mid, tokens)
        cases["mostly read"] = (
            attend.launch(q, k, v, tokens, **options, rest=heavy),
            reference.attend_tokens(*(x.double() for x in (q, k, v)), tokens, **options, rest=exact_heavy))
        copied = [x.gather(2, order.clamp(min=0).long()[..., None].expand(-1, -1, -1, dim)) for x in (k, v)]
        found = attend.launch(q, k, v, order, offsets, chosen, **options, copies=copied)
        cases["copies"] = (found, cases["buckets"][1])
        found = attend.launch(q, k, v, order, offsets, chosen, **options, rest=rest)
        truth = reference.attend_buckets(*(x.double() for x in (q, k, v)), order, offsets, chosen, **options,
                                         rest=exact_rest)
        cases["completed buckets"] = (found, truth)
        sums = reference.phi_bucket_sums(exact_rest.features, v.double(), order, offsets)
        half = [x.to(dtype) for x in sums]
        found = attend.launch(q, k, v, order, offsets, chosen, **options,
                              rest=rest._replace(features=None, bucket_z=half[0], bucket_s=half[1]))
        if dtype == torch.float32:
            cases["completed by sums"] = (found, truth)
        whole = exact_rest._replace(features=None, bucket_z=half[0].double(), bucket_s=half[1].double())
        cases["completed by rounded sums"] = (found, reference.attend_buckets(
            *(x.double() for x in (q, k, v)), order, offsets, chosen, **options, rest=whole))
        limit = 1e-5 if dtype == torch.float32 else 5e-3
        for name, ((out, lse), (true_out, true_lse)) in cases.items():
            error = float((out.double() - true_out).norm() / true_out.norm())
            gap = float((lse.double() - true_lse).abs().max())
            print(f"{heads_q}/{heads_kv} d{dim} n{length} {dtype} {name}: {error:.1e} lse {gap:.1e}")
            within = limit if name != "mostly read" else 2e-3
            if not (error < within and gap < within * 4):
                sys.exit(f"error {error:.2e}, lse {gap:.2e} above {limit:.0e}")
            worst = max(worst, error)
    q = torch.randn(1, 4, 32).half()
    k, v = (torch.randn(1, 2, 100, 32).to(torch.float8_e4m3fn) for _ in range(2))
    indices = torch.arange(7, 47, 2, dtype=torch.int32).expand(1, 2, -1)
    options = {"scale": 0.2, "starts": torch.tensor([0]), "sink_size": 4, "tail_starts": torch.tensor([80]),
               "lengths": torch.tensor([100])}
    out, _ = attend.launch(q, k, v, indices, **options)
    truth, _ = reference.attend_tokens(q.double(), k.double(), v.double(), indices, **options)
    error = float((out.double() - truth).norm() / truth.norm())
    print(f"fp8 keys and values: {error:.1e}")
    if not error < 5e-3:
        sys.exit("fp8 keys differ from the twin")
    print(f"worst {worst:.1e}")


if __name__ == "__main__":
    main()
