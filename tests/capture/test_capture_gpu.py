"""Capture on a CUDA device: the statistics' kernels, and the copies behind the computation."""

import pytest
import torch
from test_families import captured, tiny

from sparsekv.kernels import query_statistics
from sparsekv.kernels.dense import split_attention, splits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads_q", "heads_kv", "dim", "length", "count"), [
    (9, 3, 64, 5000, 300), (32, 8, 128, 3001, 700), (4, 4, 80, 63, 63), (2, 1, 256, 1000, 5)])
def test_statistics_equal_the_twin_in_float64(dtype, heads_q, heads_kv, dim, length, count) -> None:
    torch.manual_seed(0)
    queries, keys = (2 * torch.randn(heads_q, count, dim)).to(dtype), torch.randn(heads_kv, length, dim).to(dtype)
    positions = torch.randperm(length)[:count].sort().values
    options = {"scale": dim**-0.5, "sink_size": 4, "window_size": 16}
    truth = query_statistics(queries.double(), keys.double(), positions, **options)
    found = query_statistics(queries.cuda(), keys.cuda(), positions.cuda(), **options)
    for name, expected in truth.items():
        if name != "top1_position":
            torch.testing.assert_close(found[name].cpu().double(), expected.double(), rtol=1e-3, atol=1e-3, msg=name)
    assert (found["top1_position"].cpu() == truth["top1_position"]).float().mean() > 0.999


@pytest.mark.parametrize("chunk", [8192, 33, 50])
def test_a_capture_on_the_device_equals_one_on_the_host(chunk: int, tmp_path) -> None:
    model = tiny("llama")
    host = captured(model, tmp_path / "host", num_documents=3)
    device = captured(model.cuda(), tmp_path / "device", num_documents=3, chunk_size=chunk)
    assert device.verify() == []
    for document in range(3):
        for layer in host.layers:
            a, b = host.read(layer, document), device.read(layer, document)
            for name in ("keys_pre", "values", "queries_pre"):
                x, y = getattr(a, name).float(), getattr(b, name).float()
                assert (x - y).norm() <= 3e-3 * x.norm(), (layer, name)
            torch.testing.assert_close(a.statistics["lse"], b.statistics["lse"], rtol=1e-2, atol=1e-2)
            assert torch.equal(a.query_positions, b.query_positions)


def test_chunks_in_half_precision_see_every_key(tmp_path) -> None:
    model = tiny("llama").to("cuda", torch.bfloat16)
    whole, cut = (captured(model, tmp_path / str(c), chunk_size=c).read(2, 0) for c in (8192, 33))
    assert (whole.keys_pre - cut.keys_pre).norm() <= 0.03 * whole.keys_pre.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads_q", "heads_kv", "dim"), [(9, 3, 64), (32, 8, 128)])
def test_a_chunk_in_two_calls_equals_attention_with_a_mask(dtype, heads_q: int, heads_kv: int, dim: int) -> None:
    torch.manual_seed(0)
    if not splits(dtype, heads_q, heads_kv, dim, torch.device("cuda", 0)):
        pytest.skip("this device keeps to torch's documented attention")
    for count, past in ((4500, 1), (63, 5000), (1000, 1111)):
        q, k, v = (torch.randn(1, h, n, dim, device="cuda").to(dtype) * 1.5 for h, n in (
            (heads_q, count), (heads_kv, past + count), (heads_kv, past + count)))
        mask = torch.ones(count, past + count, dtype=torch.bool, device="cuda").tril(past)
        truth, low = (torch.nn.functional.scaled_dot_product_attention(
            *(x.to(t) for x in (q, k, v)), attn_mask=mask, scale=0.1, enable_gqa=True) for t in (torch.float32, dtype))
        found = split_attention(q, k, v, 0.1)
        assert (found - truth).norm() <= 2 * (low - truth).norm() + 1e-3 * truth.norm()
