"""Run by test_small_maps.py in a process without the interpreter: the kernels of the default maps compile and fit."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "kernels"))

import compiled as k

from sparsekv.kernels import attend, completion
from sparsekv.trainers.options import DEFAULT
from sparsekv.trainers.phi import RECIPES

recipe = RECIPES[DEFAULT]
UNITS, FEATURES = 2 * recipe.key_width, recipe.features


def compiles(kernel: Any, constants: dict[str, Any], warps: int, stages: int = 2, most: int | None = None,
             spill: int | None = None) -> None:
    k.Build(kernel, constants, warps, "bf16", 90, stages, most, spill, {}).run()


for dim, group, page in ((128, 6, 0), (64, 3, 0), (128, 4, 16)):
    how = attend.completed_launch(dim, UNITS, FEATURES, group, 2, k.SHARED[90])
    assert how is not None
    sizes = {**k.split(dim, group, how, page=page), "UNITS": UNITS, "FEATURES": FEATURES, "PADDED_FEATURES": FEATURES}
    compiles(k.a.completed_kernel, sizes, how.warps, how.stages,
             attend.completed_bytes(how, dim, UNITS, FEATURES, group, 2), k.SPILLED)
compiles(k.c.query_kernel, {"CENTRED": True, "CAPPED": True, "RANK": 16, "ROWS": 16, "BLOCKS": recipe.query_blocks,
                            "DIM": 128, "WIDTH": recipe.width, "FEATURES": FEATURES}, completion.QUERY_WARPS)
of_keys = {"BLOCK": k.ft.BLOCK, "DIM": 128, "UNITS": UNITS, "FEATURES": FEATURES}
compiles(k.ftt.sums_kernel, of_keys, k.ft.SUM_WARPS)
compiles(k.ftt.join_kernel, {"BLOCK": k.ft.JOINED_AT_ONCE, "DIM": FEATURES}, k.ft.JOIN_WARPS)
compiles(k.ftt.features_kernel, of_keys, k.ft.WARPS)
print("ok")
