"""The kernels under Triton's interpreter: odd sizes, several queries a row, poisoned outputs."""

import checks
import pytest
import torch

from sparsekv.kernels import attend, attention_mass, completion, features, indexing, sketch
from sparsekv.kernels.few_rows import Launch

pytest.importorskip("triton")
pytestmark = [pytest.mark.skipif(torch.cuda.is_available(), reason="test_kernels_gpu.py runs them on the device"),
              pytest.mark.usefixtures("poisoned")]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "PLAIN", attend.PLAIN._replace(programs=8))
    monkeypatch.setattr(attend, "COMPLETED", attend.COMPLETED._replace(programs=8))
    monkeypatch.setattr(features, "PROGRAMS", 18)
    monkeypatch.setattr(completion, "QUERY_PROGRAMS", 9)


@pytest.mark.parametrize(("shape", "dtype"), [
    ((4, 2, 16, 63, 4, 16, 0, 1), torch.float16), ((3, 3, 40, 71, 1, 30, 7, 2), torch.float32),
    ((16, 1, 80, 40, 4, 60, 0, 1), torch.float16), ((6, 2, 24, 1, 4, 16, 0, 1), torch.float32)], ids=str)
def test_attention_and_completion(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_attention(shape, dtype, "cpu")


@pytest.mark.parametrize(("shape", "launch"), [
    ((1, 16, 40, 33, 71), (128, 8, 3)), ((2, 33, 17, 100, 150), (32, 4, 4)), ((3, 24, 1, 5, 90), (16, 4, 2)),
    ((5, 40, 64, 20, 131), (16, 4, 2, 2)), ((7, 16, 3, 16, 37), (128, 8, 8)), ((8, 80, 24, 48, 57), (32, 4, 2)),
    ((12, 16, 130, 7, 65), (16, 4, 1)), ((16, 32, 20, 1, 63), (32, 4, 1, 2)), ((20, 16, 16, 12, 41), (128, 8, 2)),
], ids=str)
@DTYPES
def test_completed_attention(
    shape: tuple[int, ...], launch: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attend, "COMPLETED", attend.Launch(*launch))
    checks.check_completed(shape, dtype, "cpu")


def test_a_launch_of_completed_attention_has_room() -> None:
    """128 dimensions, units and features, by queries a list, size of a number, and shared memory: keys at once."""
    blocks = {}
    for room in (101_376, 166_912, 232_448):  # sm_89, sm_80, sm_90
        for size in (2, 4):
            for group in (1, 4, 8, 16):
                how = attend.completed_launch(128, 128, 128, group, size, room)
                blocks[room, size, group] = how.block if how else 0
                assert how is None or attend.completed_bytes(how, 128, 128, 128, group, size) <= room
    assert [blocks[101_376, 2, group] for group in (1, 4, 8, 16)] == [32, 32, 16, 0]
    assert [blocks[166_912, 2, group] for group in (1, 4, 8, 16)] == [128, 128, 128, 32]
    assert [blocks[232_448, 2, group] for group in (1, 4, 8, 16)] == [128] * 4
    assert [blocks[232_448, 4, group] for group in (1, 4, 8, 16)] == [16] * 4
    assert attend.completed_launch(256, 128, 128, 4, 2, 232_448) is None


def test_attention_that_has_no_room_is_its_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "completed_launch", lambda *sizes: None)
    checks.check_completed((3, 24, 40, 20, 71), torch.float32, "cpu")


@pytest.mark.parametrize("shape", [(2, 3, 5, 77, 16), (1, 1, 33, 200, 40), (3, 2, 2, 1, 8)], ids=str)
def test_losses(shape: tuple[int, ...]) -> None:
    checks.check_losses(shape, "cpu")


@DTYPES
def test_what_is_left_where_nearly_all_is_read(dtype: torch.dtype) -> None:
    checks.check_what_is_left((4, 2, 16, 63, 4, 16, 3, 1), dtype, "cpu")


def test_keys_and_values_of_eight_bits() -> None:
    q = torch.randn(1, 4, 32).half()
    k, v = (torch.randn(1, 2, 100, 32).to(torch.float8_e4m3fn) for _ in range(2))
    tokens = torch.arange(7, 47, 2, dtype=torch.int32).expand(1, 2, -1)
    how = {"scale": 0.2, "starts": torch.tensor([0]), "sink_size": 4, "tail_starts": torch.tensor([80]),
           "lengths": torch.tensor([100])}
    checks.agree(attend.launch_attend(q, k, v, tokens, **how),
                 attend.attend_tokens_reference(q.double(), k.double(), v.double(), tokens, **how), 5e-3, "fp8")


@pytest.mark.parametrize(("shape", "dtype"), [
    ((6, 2, 24, 40, 37, 5, 3), torch.float32), ((4, 4, 20, 50, 64, 64, 1), torch.float16),
    ((16, 1, 16, 7, 9, 20, 2), torch.float16)], ids=str)
def test_routing(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_routing(shape, dtype, "cpu")


@DTYPES
@pytest.mark.parametrize("shape", [(4, 2, 16, 384, 256), (3, 1, 24, 0, 512), (2, 2, 64, 256, 128),
                                   (6, 2, 80, 1280, 640)], ids=str)
def test_attention_by_blocks(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_blocks(shape, dtype, "cpu")


def test_lists_of_blocks() -> None:
    checks.check_block_lists("cpu")


@DTYPES
@pytest.mark.parametrize("shape", [(2, 3, 65, 24), (1, 1, 1, 80)], ids=str)
def test_attention_added(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_added(shape, dtype, "cpu")


@pytest.mark.parametrize("buckets", [1, 33])
def test_budget_rule(buckets: int) -> None:
    checks.check_budget_rule(buckets, "cpu")


@DTYPES
@pytest.mark.parametrize("shape", [(2, 16, 24, 16, 63), (3, 40, 7, 48, 111), (1, 24, 33, 20, 300), (1, 16, 16, 9, 1)],
                         ids=str)
def test_sums_and_features_of_keys(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_sums_and_features(shape, dtype, "cpu")


@pytest.mark.parametrize("shape", [(3, 24, 16), (1, 80, 5), (2, 7, 16)], ids=str)
def test_factors_of_a_covariance(shape: tuple[int, ...]) -> None:
    checks.check_factored(shape, "cpu")


@pytest.mark.parametrize(("shape", "dtype"), [
    ((4, 2, 16, 24, 16, 1), torch.float16), ((3, 3, 80, 32, 48, 2), torch.float32),
    ((6, 1, 24, 16, 100, 3), torch.float16), ((4, 2, 16, 24, 16, 2, 0), torch.float16),
    ((3, 1, 24, 40, 20, 1, 2), torch.float32)], ids=str)
def test_query_features(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_query(shape, dtype, "cpu")


@pytest.mark.parametrize(("shape", "dtype"), [
    ((4, 2, 16, 63, 5, 3), torch.float16), ((16, 1, 64, 1, 1, 1), torch.float32),
    ((6, 2, 24, 300, 130, 1), torch.float16), ((2, 1, 256, 70, 37, 1), torch.float32),
    ((2, 1, 160, 70, 37, 1), torch.float16)], ids=str)
def test_index_and_votes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_index_and_votes(shape, dtype, "cpu")


@pytest.mark.parametrize("shape", [(4, 2, 16, 150, 70, 7, 4, 16), (3, 3, 40, 63, 5, 40, 0, 1),
                                   (6, 1, 32, 201, 9, 3, 130, 8)], ids=str)
def test_bucket_mass(shape: tuple[int, ...]) -> None:
    checks.check_bucket_mass(shape, "cpu")


@pytest.mark.parametrize("block", [64, 16], ids=["one stretch", "several stretches"])
@pytest.mark.parametrize("shape", [(4, 2, 16, 150, 9, 4, 16), (3, 3, 80, 70, 66, 0, 5), (4, 1, 32, 151, 66, 130, 8)],
                         ids=str)
def test_statistics(shape: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # several stretches of the keys, the last ones out of the sight of most queries
    monkeypatch.setattr(attention_mass, "KEYS_AT_ONCE", block)
    checks.check_statistics(shape, "cpu")


@pytest.mark.parametrize(("shape", "dtype"), [
    ((6, 2, 24, 150, 3), torch.float32), ((4, 1, 80, 63, 1), torch.float16), ((3, 3, 16, 1, 2), torch.float32),
], ids=str)
def test_a_step_on_storage_with_room(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_decode(shape, dtype, "cpu")


@DTYPES
@pytest.mark.parametrize("shape", [(2, 3, 71, 24, 9), (1, 2, 1, 80, 1), (1, 1, 200, 16, 300)], ids=str)
def test_bucket_sums(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_bucket_sums(shape, dtype, "cpu")


@DTYPES
@pytest.mark.parametrize("shape", [(4, 2, 16, 16, 8, 63, 20, 1), (3, 3, 40, 10, 7, 171, 111, 2),
                                   (6, 1, 24, 24, 24, 40, 40, 3), (16, 1, 80, 33, 19, 1, 1, 1),
                                   (2, 2, 12, 7, 7, 300, 1, 1), (2, 1, 136, 30, 19, 70, 9, 1)], ids=str)
def test_sketch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_sketch(shape, dtype, "cpu")


@pytest.mark.parametrize(("width", "block"), [(0, 1024), (1, 32), (33, 32), (33, 1024), (100, 1024)])
def test_best_tokens(width: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketch, "SELECTED_AT_ONCE", block)
    checks.check_best_tokens(width, "cpu")


def test_bins() -> None:
    checks.check_bins()


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 63, 5), (2, 300, 33)], ids=str)
def test_places_by_bucket(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "SORTED_AT_ONCE", 128)
    monkeypatch.setattr(indexing, "PLACED_AT_ONCE", 16)
    checks.check_sort(shape, "cpu")


@DTYPES
@pytest.mark.parametrize("shape", [(1, 3, 1, 8), (3, 4, 2, 40)], ids=str)
def test_norms_and_rotations(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_between(shape, dtype, "cpu")


@DTYPES
@pytest.mark.parametrize("shape", [(1, 40, 7), (2, 1032, 33), (1, 72, 5, 1, 3), (2, 136, 17, 17), (3, 40, 7),
                                   (5, 104, 65, 65), (8, 264, 70, 3, 9), (1, 24, 40_001)], ids=str)
def test_products_of_a_few_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_few_rows(shape, dtype, "cpu", Launch(4096, 16, 4) if shape[2] > 40_000 else None)
