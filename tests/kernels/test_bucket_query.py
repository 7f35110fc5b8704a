"""Completion by bucket means: the twin against loops in float64, the kernels against the twin."""

from __future__ import annotations

import pytest
import torch
from checks import LIMITS, Step, agree, double, error

from sparsekv.kernels import BucketSums, KeyBuckets, attend, bucket_query, bucket_sums
from sparsekv.kernels.attend import attend_tokens_reference, launch_attend
from sparsekv.kernels.bucket_query import bucket_query_reference, launch_bucket_query
from sparsekv.kernels.indexing import bucket_tokens

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def completion_of(s: Step, number_of_buckets: int) -> tuple[BucketSums, KeyBuckets]:
    """Buckets of the mid region of a step's two rows, the last one empty."""
    number = torch.randint(0, max(1, number_of_buckets - 1), s.k.shape[:3], device=s.k.device)
    used = s.mid[:, None].expand_as(number)
    counts, keys = bucket_sums(s.k, number, used, number_of_buckets)
    values = bucket_sums(s.v, number, used, number_of_buckets)[1]
    means = (keys / counts.clamp(min=1)[..., None]).to(s.k.dtype)
    return BucketSums(means, counts, values), KeyBuckets(number.to(torch.int16))


def check_bucket_query(shape: tuple[int, ...], number: int, dtype: torch.dtype, device: str) -> None:
    """The query's side, then attention that takes the estimates of what it reads out of it."""
    s = Step(shape, dtype, device)
    buckets, keys = completion_of(s, number)
    scale = s.regions["scale"]
    mine = launch_bucket_query(s.q, buckets, scale)._replace(keys=keys)
    truth = bucket_query_reference(s.q.double(), double(buckets), scale)._replace(keys=keys)
    for name in ("features", "log_scale", "mass", "numerator"):
        found, exact = getattr(mine, name), getattr(truth, name)
        assert torch.equal(found.isinf(), exact.isinf()), name
        assert error(*(x.nan_to_num(neginf=0.0) for x in (found, exact))) < LIMITS[dtype], name
    seats = torch.tensor([1, 0], device=device).repeat_interleave(s.q.shape[0] // 2)
    seated = launch_bucket_query(s.q, BucketSums(*(x.flip(0) for x in buckets)), scale, seats)
    assert torch.equal(seated.numerator, mine.numerator) and torch.equal(seated.features, mine.features)
    tokens = bucket_tokens(s.order, s.offsets, s.chosen)
    group = s.q.shape[1] // s.k.shape[1]
    everything = torch.where(s.mid[:, None], torch.arange(s.k.shape[2], device=device), -1)
    everything = everything.repeat_interleave(s.q.shape[0] // 2, 0).expand(-1, s.k.shape[1], -1)
    for listed in (tokens, tokens[..., :0], tokens.repeat_interleave(group, 1), tokens[:, :1], everything):
        found = launch_attend(s.q, s.k, s.v, listed, **s.regions, completion=mine)
        exact = attend_tokens_reference(*s.wide(), listed, **s.regions, completion=truth)
        agree(found, exact, LIMITS[dtype], str(tuple(listed.shape)))
    found = launch_attend(s.q, s.k, s.v, s.order, s.offsets, s.chosen, **s.regions, completion=mine)
    agree(found, attend_tokens_reference(*s.wide(), tokens, **s.regions, completion=truth), LIMITS[dtype], "buckets")


def test_the_twin_against_loops() -> None:
    torch.manual_seed(0)
    s = Step((4, 2, 8, 23, 2, 5, 3, 2), torch.float64, "cpu")
    buckets, keys = completion_of(s, 4)
    scale = s.regions["scale"]
    tokens = bucket_tokens(s.order, s.offsets, s.chosen)
    completed = bucket_query(s.q, buckets, scale)._replace(keys=keys)
    out, lse = attend_tokens_reference(s.q, s.k, s.v, tokens, **s.regions, completion=completed)
    for i, h in [(0, 0), (1, 3), (2, 1), (3, 2)]:
        row, kv = i // 2, h // 2
        read = set(tokens[i, kv].tolist()) - {-1}
        mass, numerator = 0.0, torch.zeros(8, dtype=torch.float64)
        for t in range(int(s.regions["starts"][i]), int(s.regions["lengths"][i])):
            key = s.k[row, kv, t]
            if s.mid[row, t] and t not in read:
                key = buckets.means[row, kv, int(keys.number[row, kv, t])]
            weight = float(torch.exp(scale * s.q[i, h] @ key))
            mass, numerator = mass + weight, numerator + weight * s.v[row, kv, t]
        torch.testing.assert_close(out[i, h], numerator / mass)
        assert abs(float(lse[i, h].exp()) - mass) < 1e-9 * mass


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "number", "dtype"), [((6, 2, 24, 63, 4, 16, 3, 2), 70, torch.float16)], ids=str)
def test_the_kernels(
    shape: tuple[int, ...], number: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device == "cpu":
        pytest.importorskip("triton")
        monkeypatch.setattr(attend, "BY_BUCKETS", attend.BY_BUCKETS._replace(programs=8))
    check_bucket_query(shape, number, dtype, device)


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("shape", "number", "dtype"), [
    ((16, 1, 80, 40, 4, 60, 0, 1), 9, torch.float16), ((3, 3, 40, 71, 1, 30, 7, 2), 129, torch.float32),
    ((6, 2, 24, 1, 4, 16, 0, 1), 1, torch.float32)], ids=str)
def test_more_shapes(
    shape: tuple[int, ...], number: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(attend, "BY_BUCKETS", attend.BY_BUCKETS._replace(programs=8))
    check_bucket_query(shape, number, dtype, "cpu")
