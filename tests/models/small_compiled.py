"""Run by test_small_maps.py in a process without the interpreter: the kernels of the default maps compile and fit."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "kernels"))

import compiled as k

from sparsekv.kernels import attend, completion
from sparsekv.trainers.options import DEFAULT
from sparsekv.trainers.phi import RECIPES

recipe = RECIPES[DEFAULT]
UNITS, FEATURES = 2 * recipe.key_width, recipe.features
for dim, group, page in ((128, 4, 0), (128, 6, 0), (64, 3, 0), (128, 4, 16)):
    how = attend.completed_launch(dim, UNITS, FEATURES, group, 2, k.SHARED[90])
    assert how is not None
    sizes = {**k.split(dim, group, how, **({"page": page} if page else {})), "UNITS": UNITS, "FEATURES": FEATURES,
             "PADDED_FEATURES": FEATURES}
    k.check(k.a.completed_kernel, sizes, how.warps, "bf16", (90,), stages=how.stages,
            most=attend.completed_bytes(how, dim, UNITS, FEATURES, group, 2), spill=k.SPILLED)
k.check(k.c.query_kernel, {"CENTRED": True, "CAPPED": True, "RANK": 16, "ROWS": 16, "BLOCKS": recipe.query_blocks,
                           "DIM": 128, "WIDTH": recipe.width, "FEATURES": FEATURES}, completion.QUERY_WARPS, "bf16",
        (90,))
of_keys = {"BLOCK": k.ft.BLOCK, "DIM": 128, "UNITS": UNITS, "FEATURES": FEATURES}
k.check(k.ftt.sums_kernel, of_keys, k.ft.SUM_WARPS, "bf16", (90,))
k.check(k.ftt.join_kernel, {"BLOCK": k.ft.JOINED_AT_ONCE, "DIM": FEATURES}, k.ft.JOIN_WARPS, "bf16", (90,))
k.check(k.ftt.features_kernel, of_keys, k.ft.WARPS, "bf16", (90,))
print("ok")
