"""Every check of a kernel against its twin, with its cases: quick ones under Triton's interpreter, slow ones there, and
those of a CUDA device."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import checks
import pytest
import torch
from seating_traffic import check_seating

import sparsekv
from sparsekv.kernels import attend
from sparsekv.kernels.few_rows import Launch
from sparsekv.trainers.options import DEFAULT
from sparsekv.trainers.phi import RECIPES

ROOT = Path(sparsekv.__file__).parent
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
ON_A_DEVICE = [F32, BF16, F16]
INTERPRETED = [F32, F16]
"""Types that the interpreter computes as a device does; its bfloat16 is wrong."""
FEW_PROGRAMS = {"kernels.attend.PLAIN": attend.PLAIN._replace(block=16, programs=4),
                "kernels.attend.BY_BUCKETS": attend.BY_BUCKETS._replace(block=16, programs=4),
                "kernels.attend.COMPLETED": attend.COMPLETED._replace(block=16, programs=4),
                "kernels.features.PROGRAMS": 18, "kernels.completion.QUERY_PROGRAMS": 9}
"""Constants under the interpreter, which runs one program after another: few, of several small blocks each."""


class Case(NamedTuple):
    """One call of a check: `run(*given, device=..., **options)` with the constants of `sparsekv` set. kernels: all that
    it may launch, and in a quick case does."""

    run: Callable[..., None]
    kernels: frozenset[str]
    given: tuple[Any, ...]
    options: dict[str, Any]
    constants: dict[str, Any]

    def __str__(self) -> str:
        said = [self.run.__name__.removeprefix("check_"), *self.given, *self.options.values(), *self.constants.values()]
        return "-".join(str(x).removeprefix("torch.") for x in said)


class Check(NamedTuple):
    quick: list[Case]
    slow: list[Case]
    gpu: list[Case]


Group = tuple[list[tuple[Any, ...]], dict[str, Any], dict[str, Any]]


def each(shapes: Iterable[Any], dtypes: Iterable[torch.dtype | None] = (None,), *,
         constants: dict[str, Any] | None = None, **options: Any) -> Group:
    """Every shape with every type."""
    given = [(shape,) if dtype is None else (shape, dtype) for dtype in dtypes for shape in shapes]
    return given, options, constants or {}


def check(run: Callable[..., None], kernels: str, *, quick: Sequence[Group] = (), slow: Sequence[Group] = (),
          gpu: Sequence[Group] = ()) -> Check:
    def cases(groups: Sequence[Group]) -> list[Case]:
        return [Case(run, frozenset(kernels.split()), given, options, constants)
                for made, options, constants in groups for given in made]

    return Check(cases(quick), cases(slow), cases(gpu))


def completed(shape: tuple[int, ...], *launch: int) -> Group:
    return each([shape], INTERPRETED, constants={"kernels.attend.COMPLETED": attend.Launch(*launch)})


def stretches(keys: int, *shapes: tuple[int, ...]) -> Group:
    return each(shapes, constants={"kernels.attention_mass.KEYS_AT_ONCE": keys})


def selected(block: int, *widths: int, **options: Any) -> Group:
    return each(widths, constants={"kernels.sketch.SELECTED_AT_ONCE": block}, **options)


def sorted_in(*shapes: tuple[int, ...]) -> Group:
    return each(shapes, constants={"kernels.indexing.SORTED_AT_ONCE": 128, "kernels.indexing.PLACED_AT_ONCE": 16})


def traffic(*run: int) -> Group:
    """Launches of many programs in all runs but the first."""
    sizes = {"SLOTS_AT_ONCE": 4, "PAGES_AT_ONCE": 8, "ROWS_AT_ONCE": 4} if run[0] else {}
    return each([run], constants={"runtime.vllm.seats.SLACK": 8,
                                  **{f"runtime.vllm.seating.{name}": size for name, size in sizes.items()}})


DEFAULT_MAPS = RECIPES[DEFAULT]
UNITS, FEATURES = 2 * DEFAULT_MAPS.key_width, DEFAULT_MAPS.features
STEPS = [(4, 2, 64, 63, 4, 16, 0, 1), (3, 3, 80, 111, 1, 30, 7, 3), (16, 1, 96, 40, 4, 60, 0, 2),
         (6, 2, 128, 1, 4, 16, 0, 1), (32, 8, 128, 1000, 1, 111, 5, 1), (8, 8, 256, 300, 4, 16, 0, 5)]
SMALL_STEP = (4, 2, 24, 37, 1, 16, 3, 1)
WHOLE_STEP = (4, 2, 16, 63, 4, 16, 3, 1)
ATTENTION = "attend.split attend.completed attend.merge"
SKETCH = "codes.encode sketch.prepare sketch.score sketch.score_all sketch.histogram sketch.select"
TRAFFIC = [traffic(0, 3, 5, 30, 0, 150), traffic(1, 1, 3, 33, 25, 100), traffic(2, 8, 13, 31, 20, 50),
           traffic(3, 64, 5, 12, 12, 60), traffic(4, 2, 70, 28, 0, 15)]

CHECKS = [
    check(checks.check_attention, "attend.split attend.merge",
          quick=[each([SMALL_STEP], [F16], only=part) for part in ("lists", "buckets", "pages")]),
    check(checks.check_attention, "attend.completed attend.merge",
          quick=[each([SMALL_STEP], [F16], only=f"{part} completed") for part in ("lists", "buckets", "pages")]),
    check(checks.check_attention, ATTENTION, slow=[
        each([(4, 2, 16, 63, 4, 16, 0, 1), (16, 1, 80, 40, 4, 60, 0, 1)], [F16]),
        each([(3, 3, 40, 71, 1, 30, 7, 2), (6, 2, 24, 1, 4, 16, 0, 1)], [F32])],
          # a logit of 1e4 is exact to 1e-3 in float32: so are the weights of near ties
          gpu=[each(STEPS, ON_A_DEVICE, logits=logits) for logits in (1.0, 1e4)]),
    check(checks.check_eight_bits, "attend.split attend.merge", quick=[each([45], [F16])], slow=[each([100], [F16])],
          gpu=[each([45, 1001], [F16, BF16])]),
    check(checks.check_what_is_left, "attend.completed attend.merge",
          quick=[each([(2, 1, 16, 31, 4, 6, 3, 1)], [F16])], slow=[each([WHOLE_STEP], INTERPRETED)],
          gpu=[each(STEPS, ON_A_DEVICE)]),
    check(checks.check_completed, ATTENTION, quick=[
        each([(3, 24, 1, 5, 23)], [F16], constants={"kernels.attend.COMPLETED": attend.Launch(16, 4, 2),
                                                    "kernels.attend.ANCHOR_SLICES": 2}, few=True),
        each([(2, 128, UNITS, FEATURES, 24)], [F16], constants={"kernels.attend.ANCHOR_SLICES": 2}, few=True)], slow=[
        completed((1, 16, 40, 33, 71), 128, 8, 3), completed((2, 33, 17, 100, 150), 32, 4, 4),
        completed((3, 24, 1, 5, 90), 16, 4, 2), completed((5, 40, 64, 20, 131), 16, 4, 2, 2),
        completed((7, 16, 3, 16, 37), 128, 8, 8), completed((8, 80, 24, 48, 57), 32, 4, 2),
        completed((12, 16, 130, 7, 65), 16, 4, 1), completed((16, 32, 20, 1, 63), 32, 4, 1, 2),
        completed((20, 16, 16, 12, 41), 128, 8, 2)],
          gpu=[each([(4, 128, 128, 128, 20_001), (16, 64, 99, 40, 3001), (7, 80, 64, 192, 501)], [F32, BF16])]),
    check(checks.check_losses, "losses.kl_huber losses.mass losses.outputs losses.output_gradient",
          quick=[each([(2, 1, 3, 17, 5)], few=True)],
          slow=[each([(2, 3, 5, 77, 16), (1, 1, 33, 200, 40), (3, 2, 2, 1, 8)])],
          gpu=[each([(2, 3, 5, 77, 16), (4, 3, 96, 2048, 64), (1, 2, 40, 8192, 128), (2, 1, 33, 500, 256)])]),
    check(checks.check_routing, "routing.hidden routing.score routing.mean routing.rank routing.runs routing.fill",
          quick=[each([(3, 1, 20, 7, 9, 5, 1)], [F16])],
          slow=[each([(6, 2, 24, 40, 37, 5, 3)], [F32]), each([(4, 4, 20, 50, 64, 64, 1), (16, 1, 16, 7, 9, 20, 2)],
                                                              [F16])],
          gpu=[each([(6, 2, 24, 40, 37, 5, 3), (4, 4, 64, 100, 64, 64, 1), (16, 1, 16, 7, 9, 20, 5),
                     (32, 8, 128, 1024, 1024, 32, 1), (16, 1, 64, 256, 4096, 100, 2)], ON_A_DEVICE)]),
    check(checks.check_budget_rule, "routing.runs routing.fill", quick=[each([9], few=True)],
          slow=[each([1, 33])],
          gpu=[each([1, 33, 1024, 4096])]),
    check(checks.check_blocks, "block_attention.score block_attention.mass block_attention.floor block_attention.list "
                               "block_attention.block",
          quick=[each([(3, 1, 24, 128, 128)], [F16], shares=((0.25, 1),))],
          slow=[each([(4, 2, 16, 384, 256), (3, 1, 24, 0, 512), (2, 2, 64, 256, 128), (6, 2, 80, 1280, 640)],
                     INTERPRETED)],
          gpu=[each([(32, 8, 128, 5120, 1280), (4, 4, 64, 0, 1024), (6, 2, 80, 1280, 640), (2, 1, 256, 256, 384)],
                    ON_A_DEVICE)]),
    check(checks.check_block_lists, "block_attention.mass block_attention.floor block_attention.list",
          quick=[each([9], lists=((0, 2),))], slow=[each([128])], gpu=[each([128])]),
    check(checks.check_chunk_attention, "chunk_attention.chunk", quick=[each([(4, 2, 24, 330, 2, 50, 37)], [F16])],
          slow=[each([(3, 1, 16, 700, 2, 130, 200), (2, 2, 64, 300, 1, 300, 0)], INTERPRETED)],
          gpu=[each([(32, 8, 128, 6000, 4, 512, 1000), (7, 1, 80, 900, 3, 77, 333), (2, 2, 256, 700, 2, 130, 300)],
                    ON_A_DEVICE)]),
    check(checks.check_added, "dense.add", quick=[each([(2, 3, 65, 24)], [F16])],
          slow=[each([(2, 3, 65, 24)], [F32]), each([(1, 1, 1, 80)], INTERPRETED)],
          gpu=[each([(2, 3, 65, 80), (1, 32, 2048, 128)], ON_A_DEVICE)]),
    check(checks.check_sums_and_features, "features.sums features.join features.features",
          quick=[each([(2, 24, 7, 9, 63)], [F16])],
          slow=[each([(2, 16, 24, 16, 63), (3, 40, 7, 48, 111), (1, 24, 33, 20, 300), (1, 16, 16, 9, 1)],
                     INTERPRETED)],
          gpu=[each([(2, 64, 24, 16, 63), (3, 80, 100, 48, 111), (1, 128, 128, 128, 1000), (2, 128, 96, 192, 5000)],
                    ON_A_DEVICE)]),
    check(checks.check_factored, "completion.factor", quick=[each([(2, 7, 16)])],
          slow=[each([(3, 24, 16), (1, 80, 5)])],
          gpu=[each([(3, 24, 16), (1, 80, 5), (2, 7, 16), (8, 128, 16), (3, 256, 16)])]),
    check(checks.check_query, "completion.query", quick=[each([
        (4, 2, 24, 7, 9, 1), (2, 1, 128, DEFAULT_MAPS.width, FEATURES, 2, DEFAULT_MAPS.query_blocks)], [F16])],
          slow=[each([(4, 2, 16, 24, 16, 1), (6, 1, 24, 16, 100, 3), (4, 2, 16, 24, 16, 2, 0)], [F16]),
                each([(3, 3, 80, 32, 48, 2), (3, 1, 24, 40, 20, 1, 2)], [F32])],
          gpu=[each([(4, 2, 64, 40, 16, 1), (6, 3, 80, 40, 48, 3), (8, 2, 128, 128, 128, 2)], ON_A_DEVICE)]),
    check(checks.check_index_and_votes, "indexing.assign vote.scores vote.vote",
          quick=[each([(4, 2, 16, 63, 5, 3)], [F16])],
          slow=[each([(6, 2, 24, 300, 130, 1), (2, 1, 160, 70, 37, 1)], [F16]),
                each([(16, 1, 64, 1, 1, 1), (2, 1, 256, 70, 37, 1)], [F32])],
          gpu=[each([(4, 2, 64, 63, 5, 3), (3, 3, 80, 111, 70, 1), (16, 1, 64, 1, 1, 2), (32, 8, 128, 1000, 130, 1),
                     (4, 1, 256, 300, 130, 1)], ON_A_DEVICE)]),
    check(checks.check_fetch, "gather.fetch", quick=[each([(3, 2, 24, 41, 19, 2)], [F16])],
          slow=[each([(1, 3, 80, 7, 33, 1), (2, 1, 10, 5, 1, 3), (1, 1, 256, 20, 40, 1)], INTERPRETED)],
          gpu=[each([(3, 2, 24, 41, 19, 2), (1, 8, 256, 1000, 333, 1), (2, 1, 10, 5, 1, 3)], ON_A_DEVICE,
                    on_host=on_host) for on_host in (False, True)]),
    check(checks.check_hot, "gather.claim gather.fetch", quick=[each([(2, 2, 24, 41, 11, 1, 17)], [F16])],
          slow=[each([(1, 3, 80, 70, 33, 2, 9), (3, 1, 10, 30, 7, 2, 40)], INTERPRETED)],
          gpu=[each([(2, 2, 24, 41, 11, 1, 17), (1, 3, 80, 700, 300, 1, 901)], ON_A_DEVICE)]),
    check(checks.check_bucket_query, "bucket_query.bucket_query attend.split attend.merge",
          quick=[each([(6, 2, 24, 33, 4, 16, 3, 1)], [F16], number=9)],
          slow=[each([(6, 2, 24, 63, 4, 16, 3, 2), (16, 1, 80, 40, 4, 60, 0, 1)], [F16]),
                each([(3, 3, 40, 71, 1, 30, 7, 2), (6, 2, 24, 1, 4, 16, 0, 1)], [F32], number=129)],
          gpu=[each(STEPS, ON_A_DEVICE, number=256)]),
    check(checks.check_bucket_mass, "bucket_mass.bucket_mass", quick=[each([(3, 3, 24, 41, 5, 7, 0, 1)])],
          slow=[each([(4, 2, 16, 150, 70, 7, 4, 16), (3, 3, 40, 63, 5, 40, 0, 1), (6, 1, 32, 201, 9, 3, 130, 8)])],
          gpu=[each([(4, 2, 64, 150, 70, 7, 4, 16), (32, 8, 128, 1001, 130, 64, 1, 100)])]),
    check(checks.check_statistics, "attention_mass.summary attention_mass.merge",
          quick=[stretches(16, (4, 2, 16, 41, 9, 4, 6))],  # several stretches, the last out of most queries' sight
          slow=[stretches(block, (4, 2, 16, 150, 9, 4, 16), (3, 3, 80, 70, 66, 0, 5), (4, 1, 32, 151, 66, 130, 8))
                for block in (64, 16)],
          gpu=[each([(4, 2, 16, 150, 9, 4, 16), (3, 3, 80, 70, 66, 0, 5), (8, 2, 128, 5000, 70, 1, 111)])]),
    check(checks.check_decode, "stored.append stored.decode attend.merge", quick=[each([(6, 2, 24, 71, 3)], [F16])],
          slow=[each([(6, 2, 24, 150, 3), (3, 3, 16, 1, 2)], [F32]), each([(4, 1, 80, 63, 1)], [F16])],
          gpu=[each([(6, 2, 24, 150, 3), (4, 1, 80, 63, 1), (32, 8, 128, 10_001, 2), (9, 3, 64, 777, 4)],
                    ON_A_DEVICE)]),
    check(checks.check_bucket_sums, "bucket_sums.sums bucket_sums.rows", quick=[each([(2, 3, 37, 24, 9)], [F16])],
          slow=[each([(2, 3, 71, 24, 9), (1, 2, 1, 80, 1), (1, 1, 200, 16, 300)], INTERPRETED)],
          gpu=[each([(2, 3, 71, 24, 9), (1, 2, 1, 80, 1), (1, 8, 20_000, 128, 1024)], ON_A_DEVICE)]),
    check(checks.check_sketch, f"{SKETCH} routing.mean routing.runs routing.fill",
          quick=[each([(2, 1, 24, 10, 7, 19, 9, 1)], [F16], few=True)]),
    check(checks.check_sketch, f"{SKETCH} routing.hidden routing.score routing.mean routing.runs routing.fill",
          slow=[each([(4, 2, 16, 16, 8, 63, 20, 1), (3, 3, 40, 10, 7, 171, 111, 2), (6, 1, 24, 24, 24, 40, 40, 3),
                      (16, 1, 80, 33, 19, 1, 1, 1), (2, 2, 12, 7, 7, 300, 1, 1), (2, 1, 136, 30, 19, 70, 9, 1)],
                     INTERPRETED)],
          gpu=[each([(32, 8, 128, 60, 32, 1000, 111, 1), (3, 3, 64, 32, 16, 700, 700, 3),
                     (16, 1, 96, 33, 19, 63, 20, 2), (8, 8, 256, 256, 256, 40, 1, 1)], ON_A_DEVICE)]),
    check(checks.check_best_tokens, "sketch.histogram sketch.select", quick=[selected(32, 33, few=True)],
          slow=[selected(1024, 0, 33, 100), selected(32, 1, 33)], gpu=[each([1, 1000, 5001, 300_001])]),
    check(checks.check_sort, "indexing.count indexing.place", quick=[sorted_in((3, 63, 5))],
          slow=[sorted_in((1, 1, 1), (2, 300, 33))],
          gpu=[each([(1, 1, 1), (3, 63, 5), (2, 300, 33), (54, 30_001, 1024)])]),
    check(checks.check_between, "between.norm between.rotate between.gate", quick=[each([(3, 4, 2, 40)], [F16])],
          slow=[each([(3, 4, 2, 40)], [F32]), each([(1, 3, 1, 8)], INTERPRETED)],
          gpu=[each([(1, 3, 1, 8), (3, 4, 2, 40), (8, 32, 8, 128)], ON_A_DEVICE)]),
    check(checks.check_few_rows, "few_rows.sum", quick=[each([(2, 72, 5, 5)], [F16])]),
    check(checks.check_few_rows, "few_rows.dot", quick=[each([(3, 40, 7)], [F16])]),
    check(checks.check_few_rows, "few_rows.sum few_rows.dot", slow=[
        each([(3, 40, 7)], [F32]),
        each([(1, 40, 7), (2, 1032, 33), (1, 72, 5, 1, 3), (2, 136, 17, 17), (5, 104, 65, 65), (8, 264, 70, 3, 9)],
             INTERPRETED), each([(1, 24, 40_001)], INTERPRETED, how=Launch(4096, 16, 4))],
          gpu=[each([(1, 40, 7), (2, 1032, 33), (1, 72, 5, 1, 3), (2, 136, 17, 17), (3, 40, 7), (5, 104, 65, 65),
                     (8, 264, 70, 3, 9), (1, 4096, 4096, 1024, 1024), (8, 1536, 1536, 256, 256), (1, 1536, 151_936),
                     (2, 8960, 1536), (4, 4096, 14_336, 14_336), (8, 1536, 151_936)], [BF16, F16])]),
    check(check_seating, "seating.follow seating.lanes", quick=[traffic(5, 2, 5, 31, 20, 9)], slow=TRAFFIC,
          gpu=TRAFFIC),
]


def of_kind(kind: str) -> list[Case]:
    """kind: quick, slow or gpu."""
    return [case for made in CHECKS for case in getattr(made, kind)]


def cases(kind: str) -> list[Any]:
    """Parameters of pytest: the cases of a kind, by name."""
    return [pytest.param(case, id=str(case)) for case in of_kind(kind)]


@cache
def entry_kernels() -> dict[str, tuple[str, str]]:
    """Module and function of every kernel that is launched, by the name it has here: functions of `*_triton.py` that
    `triton.jit` compiles and that no other such function calls."""
    found: dict[str, tuple[str, str]] = {}
    called: set[str] = set()
    for path in sorted(ROOT.rglob("*_triton.py")):
        module = ".".join(["sparsekv", *path.relative_to(ROOT).with_suffix("").parts])
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(x) for x in node.decorator_list):
                short = f"{path.stem.removesuffix('_triton')}.{node.name.removesuffix('_kernel')}"
                found[short] = module, node.name
                called |= {x.func.id for x in ast.walk(node)
                           if isinstance(x, ast.Call) and isinstance(x.func, ast.Name)}
    return {short: place for short, place in found.items() if place[1] not in called}
