"""Run by test_compiled.py in a process without the interpreter: compiles kernels for GPUs that are not here. Reads a
line `KIND KERNEL` after another, where the kind is quick or slow, and answers each with a line of JSON."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from sparsekv.kernels import (
    FeatureMapWeights,
    KeyFeatures,
    PhiCache,
    ScoreMoments,
    attend,
    attention_mass,
    between,
    block_attention,
    codes,
    completion,
    gather,
    indexing,
    losses,
    routing,
    sketch,
    stored,
    vote,
)
from sparsekv.kernels import attend_triton as a
from sparsekv.kernels import attention_mass_triton as am
from sparsekv.kernels import between_triton as be
from sparsekv.kernels import block_attention_triton as ba
from sparsekv.kernels import bucket_mass_triton as bm
from sparsekv.kernels import bucket_query_triton as bq
from sparsekv.kernels import bucket_sums_triton as bs
from sparsekv.kernels import chunk_attention_triton as ca
from sparsekv.kernels import codes_triton as ec
from sparsekv.kernels import completion_triton as c
from sparsekv.kernels import dense_triton as da
from sparsekv.kernels import features as ft
from sparsekv.kernels import features_triton as ftt
from sparsekv.kernels import few_rows_triton as fr
from sparsekv.kernels import gather_triton as g
from sparsekv.kernels import indexing_triton as i
from sparsekv.kernels import losses_triton as lo
from sparsekv.kernels import routing_triton as r
from sparsekv.kernels import sketch_triton as sk
from sparsekv.kernels import stored_triton as d
from sparsekv.kernels import vote_triton as vo
from sparsekv.kernels.bucket_mass import QUERIES_AT_ONCE
from sparsekv.kernels.bucket_query import AT_ONCE, COLUMNS
from sparsekv.kernels.bucket_query import WARPS as BUCKET_WARPS
from sparsekv.kernels.bucket_sums import COMPARED_AT_ONCE as AGAINST
from sparsekv.kernels.bucket_sums import SUMMED_AT_ONCE as SUMS
from sparsekv.kernels.dense import ADD_WARPS, ADDED_AT_ONCE
from sparsekv.kernels.few_rows import DOT, DOT_JOINT, SUM, SUM_JOINT, SUM_MANY, SUMMED_ROWS
from sparsekv.kernels.few_rows import fitting as fitting_rows
from sparsekv.kernels.launch import Heads, Tokens, at_once, power_of_two
from sparsekv.kernels.routing import RunArguments
from sparsekv.runtime.vllm import seating
from sparsekv.runtime.vllm import seating_triton as se
from sparsekv.trainers.options import DEFAULT
from sparsekv.trainers.phi import RECIPES

SHARED = {80: 166_912, 89: 101_376, 90: 232_448}
SPILLED = 768
"""Bytes of a thread's registers that completed attention and attention by blocks may keep in memory, of 1020."""
KINDS = {
    "*i64": "starts tail_starts lengths budget first last seats",
    "*i32": "tokens order offsets table buckets counts chosen runs assigned where best part_best index "
            "positions histogram anchors wholes bits floor",
    "*i8": "planes",
    "*i16": "codes queries",
    "*u8": "bins",
    "*fp32": "steps partial partial_lse taken taken_mass out_lse logits scores z s m log_scale all_mass mass numerator "
             "offset centre cap mean_key factors rest size bound sums log_weights weights tops masses lse votes part "
             "spreads covariance",
    "fp32": "scale eps",
    "half": "q k v values out x w b y asking means features source keys centroids found logs w_in b_in w_a b_a "
            "w_b alpha w_out b_out",
}
OWN: dict[Any, dict[str, str]] = {
    # names that mean something else in one kernel
    **{kernel: {"features": "i32"} for kernel in (
        c.query_kernel, ftt.sums_kernel, ftt.features_kernel, ftt.join_kernel)},
    be.norm_kernel: {"shift": "fp32", "weight": "half"},
    be.rotate_kernel: dict.fromkeys("q k cos sin out_q out_k".split(), "half"),
    be.gate_kernel: {**dict.fromkeys("gate up out".split(), "half"), "count": "i32"},
    **{kernel: {**dict.fromkeys("x w0 w1 w2 b0 b1 b2 out".split(), "half"),
                **dict.fromkeys("n0 n1 n2 dim ROWS".split(), "i32")} for kernel in (fr.sum_kernel, fr.dot_kernel)},
    **dict.fromkeys((i.count_kernel, i.place_kernel), dict.fromkeys("keyed counts first order".split(), "*i32")),
    bm.bucket_mass_kernel: {"out": "*fp32", "buckets": "i32"},
    bq.bucket_query_kernel: {"means": "half", "features": "half", "counts": "*fp32"},
    am.merge_kernel: {"out": "*fp32"}, ba.score_kernel: {"out": "*fp32"},
    **{kernel: {"lists": "*i32"} for kernel in (ba.list_kernel, ba.block_kernel, ca.chunk_kernel)},
    ec.encode_kernel: {"codes": "*i8", "maps": "*fp32", "centre": "*fp32"}, sk.prepare_kernel: {"maps": "*fp32"},
    se.follow_kernel: {"slots": "*i64", **dict.fromkeys("lengths starts table".split(), "*i32"), "unsorted": "*i1",
                       "tokens": "i32"},
    se.lanes_kernel: {
        **dict.fromkeys("seat tail lane places anchored".split(), "*i64"), "known": "*i1", "sparse": "*i1",
        **dict.fromkeys("lengths table anchors rest".split(), "*i32"), "size": "i32"},
    g.claim_kernel: dict.fromkeys(("held", "claims", "clock"), "*i64"),
    g.fetch_kernel: {"places": "*i32", **dict.fromkeys(("held", "claims", "clock", "counts"), "*i64")},
    r.mean_kernel: {"means": "*i8"},
    sk.histogram_kernel: {"scores": "*fp16"},
    sk.score_kernel: {"scores": "*fp16", "codes": "*i8"},
    sk.score_all_kernel: {"scores": "*fp16", "codes": "*i8", "maps": "*fp32", "size": "i32", "asking": "i32"},
    sk.select_kernel: {"out": "*i32"},
    **{kernel: {
        **dict.fromkeys("student teacher gradient anchor threshold masses values outs slopes "
                        "along".split(), "*fp32"), "mask": "*i1",
        "best": "i32",
    } for kernel in (lo.kl_huber_kernel, lo.mass_kernel, lo.outputs_kernel, lo.output_gradient_kernel)},
}


RUN = RunArguments("*fp32", "*i32", "*i64", "*i64", "*i32", "*i32")


def heads(base: Any) -> Any:
    return Heads(base, "i32", "i32")


def tokens(base: Any) -> Any:
    return Tokens(base, "i32", "i32", "i32")


MAP = KeyFeatures("half", "*fp32", "half", "*fp32", "*fp32")
STRUCTS: dict[Any, dict[str, Any]] = {
    ftt.sums_kernel: {"k": tokens("half"), "v": tokens("half"), "maps": MAP, "firsts": "*i64", "lasts": "*i64",
                      "cache": PhiCache(*["*fp32"] * 3)},
    ftt.features_kernel: {"k": tokens("half"), "maps": MAP},
    ftt.join_kernel: {n: PhiCache(*["*fp32"] * 3) for n in ("parts", "found")},
    ba.score_kernel: {n: tokens("half") for n in ("q", "k")},
    **{kernel: {n: tokens("half") for n in ("q", "k", "v", "o")} for kernel in (ba.block_kernel, ca.chunk_kernel)},
    da.add_kernel: {**{n: tokens("half") for n in ("o", "more")}, "more_lse": "*fp32"},
    r.runs_kernel: {"run": RUN}, sk.prepare_kernel: {"run": RUN, "q": heads("half")},
    sk.score_all_kernel: {"q": heads("half")},
    **{kernel: {
        "q": heads("half"), **{n: tokens("half") for n in ("k", "v")}, "maps": MAP, "features": "half",
        "number": heads("*i16"),
        **{n: heads("*i32") for n in ("tokens", "offsets", "buckets")}, "log_weights": heads("*fp32"),
        "edges": attend.Edges(*["*i64"] * 3), "pages": attend.PageArguments(*["*i32"] * 3, "i32", "i32"),
        "partial": attend.Partial(*["*fp32"] * 4),
    } for kernel in (a.split_kernel, a.completed_kernel)},
    bq.bucket_query_kernel: {"q": heads("half")},
    c.query_kernel: {
        "q": heads("half"), "maps": FeatureMapWeights(*["half"] * 8), "cache": PhiCache(*["*fp32"] * 3),
        "moments": ScoreMoments(*["*fp32"] * 5), "found": completion.QueryOutputs("half", *["*fp32"] * 4)},
    se.follow_kernel: {"seats": seating.SeatState(*["*i64"] * 4, "*i32", "*i32"),
                       "found": seating.SeatMatches("*i1", "*i64", "*i1", "*i64", "*i1")},
    lo.kl_huber_kernel: {"terms": losses.Terms(*["*fp32"] * 6), "weights": losses.Weights(*["fp32"] * 7)},
}


def typed(kind: Any, half: str) -> Any:
    """A type, or a struct of types, of which `half` is a pointer to that."""
    if isinstance(kind, tuple):
        return type(kind)(*(typed(x, half) for x in kind))
    return f"*{half}" if kind == "half" else kind


def aligned(kind: Any, at: tuple[int, ...], divisible: bool) -> dict[tuple[int, ...], Any]:
    """What a launch finds out: pointers, and where `divisible` whole numbers, are multiples of 16."""
    if isinstance(kind, tuple):
        return {place: how for i, x in enumerate(kind) for place, how in aligned(x, (*at, i), divisible).items()}
    return {at: [["tt.divisibility", 16]]} if kind.startswith("*") or (divisible and kind == "i32") else {}


def spilled(ptx: str, capability: int) -> int:
    """Bytes of a thread's registers that a kernel keeps in memory."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        name = f"--gpu-name=sm_{capability}{'a' if capability == 90 else ''}"
        done = subprocess.run([get_ptxas(capability).path, "-v", name, str(source), "-o", f"{folder}/kernel.cubin"],
                              capture_output=True, text=True, check=True)
    return sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", done.stderr))


class Build(NamedTuple):
    """One compilation of a kernel: its constants, warps, half precision and stages for a GPU of a capability, with at
    most `most` bytes of shared memory, or what the GPU has. With `spill` its arguments are what a launch finds them to
    be, and at most so many bytes of registers are kept in memory."""

    kernel: Any
    constants: dict[str, Any]
    warps: int
    half: str
    capability: int
    stages: int
    most: int | None
    spill: int | None
    types: dict[str, Any]

    @property
    def name(self) -> str:
        module, function = self.kernel.__module__.rpartition(".")[2], self.kernel.__name__
        return f"{module.removesuffix('_triton')}.{function.removesuffix('_kernel')}"

    def run(self) -> None:
        """Raises ValueError where it takes too much."""
        kernel, capability = self.kernel, self.capability
        types: dict[str, Any] = {name: kind for kind, names in KINDS.items() for name in names.split()}
        types |= OWN.get(kernel, {}) | STRUCTS.get(kernel, {}) | self.types
        types = {name: typed(kind, self.half) for name, kind in types.items()}
        every = {**self.constants, **{n: capability >= 90 for n in ("OVERLAP", "WAITS", "SEATED")}}
        known = {n: v for n, v in every.items() if n in kernel.arg_names}
        signature = {n: "constexpr" if n in known else types.get(n, "i32") for n in kernel.arg_names}
        known_of = {} if self.spill is None else {
            place: how for i, n in enumerate(kernel.arg_names) if n not in known
            for place, how in aligned(signature[n], (i,), n in ("q", "k", "v", "units")).items()}
        binary = triton.compile(ASTSource(kernel, signature, known, known_of), target=GPUTarget("cuda", capability, 32),
                                options={"num_warps": self.warps, "num_stages": self.stages})
        # sm_89 runs what sm_80 does, in less shared memory
        allowed = self.most or (min(SHARED[80], SHARED[89]) if capability == 80 else SHARED[capability])
        if (used := binary.metadata.shared) > allowed:
            raise ValueError(f"{used} bytes of shared memory, {allowed} allowed")
        if self.spill is not None and (found := spilled(binary.asm["ptx"], capability)) > self.spill:
            raise ValueError(f"{found} bytes of registers in memory, {self.spill} allowed")


def split(dim: int, group: int, how: attend.Launch, *, probes: int = 0, weighted: bool = False,
          page: int = 0) -> dict[str, Any]:
    return {"PROBES": probes, "PADDED_PROBES": max(1, probes), "LISTS": 1, "GROUP": group, "ROWS": max(16, group),
            "QUARTER": attend.quarter(group), "DIM": dim, "WIDTH": 1 << (dim - 1).bit_length(), "FEATURES": 128,
            "PADDED_FEATURES": 128, "UNITS": 128, "WEIGHTED": weighted, "BLOCK": how.block, "AHEAD": how.stages == 1,
            "PAGE": page}


def plainly(*sizes: Any, features: int = 0, **more: Any) -> dict[str, Any]:
    """Without a map of keys: by itself, or with so many buckets."""
    return {**split(*sizes, **more), "FEATURES": features}


def block_kernels(build: Callable[..., None], dim: int, half: str, capability: int) -> None:
    """Scores of blocks and attention to them, in the launches of a device of such a capability."""
    size, room, every = 4 if half == "fp32" else 2, SHARED[capability], block_attention
    how = every.score_tiles(size, room)
    build(ba.score_kernel, {"DIM": dim, "STRIDE": every.STRIDE, "EACH": every.EACH, "ROWS": how.rows,
                            "COLUMNS": how.columns, "CHANNELS": min(how.channels, dim)}, how.warps, half,
          (capability,), stages=how.stages, most=room, spill=SPILLED)
    launch = every.attention_launch(dim * size, room)
    assert launch is not None
    for kernel in (ba.block_kernel, ca.chunk_kernel):
        build(kernel, {"DIM": dim, "WIDTH": dim, "BLOCK": every.BLOCK, "KEYS": launch.keys}, launch.warps, half,
              (capability,), stages=launch.stages, most=room, spill=SPILLED)


def builds() -> list[Build]:
    """All of them; the first of a kernel, a small one or that of the default maps, is its quick one."""
    made: list[Build] = []

    def build(
        kernel: Any, constants: dict[str, Any], warps: int, half: str, capabilities: Any = (80, 90), stages: int = 2,
        most: int | None = None, spill: int | None = None, **types: Any,
    ) -> None:
        made.extend(Build(kernel, constants, warps, half, capability, stages, most, spill, types)
                    for capability in capabilities)

    plain, completed = attend.PLAIN, attend.COMPLETED
    build(a.split_kernel, plainly(64, 3, plain, weighted=True), plain.warps, "fp16", SHARED)
    build(a.split_kernel, plainly(256, 16, plain, probes=128), plain.warps, "bf16")
    default = RECIPES[DEFAULT]
    units, features = 2 * default.key_width, default.features
    for dim, group, page in ((128, 6, 0), (64, 3, 0), (128, 4, 16)):
        how = attend.completed_launch(dim, units, features, group, 2, SHARED[90])
        assert how is not None
        sizes = {"UNITS": units, "FEATURES": features, "PADDED_FEATURES": features}
        build(a.completed_kernel, {**split(dim, group, how, page=page), **sizes}, how.warps, "bf16", (90,),
              stages=how.stages, most=attend.completed_bytes(how, dim, units, features, group, 2), spill=SPILLED)
    completions: list[tuple[int, int, str, int, dict[str, Any]]] = [
        (128, 4, "bf16", 90, {}), (64, 8, "fp16", 90, {"weighted": True}), (128, 16, "bf16", 90, {"page": 16}),
        (128, 16, "fp32", 90, {}), (128, 4, "bf16", 80, {}), (128, 16, "bf16", 80, {}), (64, 4, "fp32", 80, {}),
        (128, 4, "bf16", 89, {"weighted": True}), (128, 8, "fp16", 89, {"page": 16}),
        (80, 1, "bf16", 89, {"probes": 32})]
    for dim, group, half, capability, more in completions:
        size = 4 if half == "fp32" else 2
        how = attend.completed_launch(dim, 128, 128, group, size, SHARED[capability])
        assert how is not None and how.block != 64
        build(a.completed_kernel, split(dim, group, how, **more), how.warps, half, (capability,), stages=how.stages,
              most=attend.completed_bytes(how, dim, 128, 128, group, size), spill=SPILLED)
    build(a.split_kernel, plainly(128, 4, plain), plain.warps, "bf16", (89, 90), k=tokens("*fp8e4nv"),
          v=tokens("*fp8e4nv"))
    build(a.completed_kernel, split(128, 4, completed, page=16), completed.warps, "bf16", (90,), stages=1,
          most=attend.completed_bytes(completed, 128, 128, 128, 4, 2), spill=SPILLED, k=tokens("*fp8e4nv"),
          v=tokens("*fp8e4nv"))
    build(a.split_kernel, plainly(128, 4, plain, page=16), plain.warps, "bf16", (90,))
    by_buckets = attend.BY_BUCKETS
    build(a.split_kernel, plainly(128, 4, by_buckets, features=256), by_buckets.warps, "bf16")
    for dim in (64, 128):
        build(bq.bucket_query_kernel, {"GROUP": 4, "ROWS": 16, "DIM": dim, "WIDTH": dim, "COLUMNS": COLUMNS,
                                       "BLOCK": AT_ONCE}, BUCKET_WARPS, "bf16", (90,) if dim == 64 else (80, 90))
    merged = {"PADDED": 128, "DIM": 80, "WIDTH": attend.MERGE_WIDTH, "PHI": True, "CAPPED": True}
    build(a.merge_kernel, merged, attend.MERGE_WARPS, "bf16")
    shape = {"FOLD": 2, "GROUP": 4, "ROWS": 16}
    build(r.hidden_kernel, {**shape, "BLOCK": routing.HIDDEN_BLOCK, "DEPTH": 256}, routing.HIDDEN_WARPS, "bf16")
    wide = {**shape, "BLOCK": 64, "OFFSETS": True}
    build(r.mean_kernel, {**wide, "WIDTH": 64}, routing.SCORE_WARPS, "bf16", (80,))
    build(r.score_kernel, {**wide, "DEPTH": routing.DEPTH_BLOCK}, routing.SCORE_WARPS, "bf16")
    build(r.mean_kernel, {**wide, "WIDTH": 256}, routing.SCORE_WARPS, "bf16")
    group = {"LISTS": 1, "GROUP": 3, "ROWS": 4, "PADDED": 1024}
    build(r.rank_kernel, {**group, "PADDED": 128, "KEPT": 32}, routing.rank_warps(4 * 128), "bf16", (80,))
    build(r.rank_kernel, {**group, "KEPT": 32}, routing.RANK_WARPS, "bf16")
    build(r.runs_kernel, {**group, "LOGITS": True}, routing.RANK_WARPS, "bf16")
    build(r.runs_kernel, {**group, "GROUP": 16, "ROWS": 16, "PADDED": 4096, "LOGITS": True},
          routing.rank_warps(16 * 4096), "bf16", (80,))
    build(r.fill_kernel, {"LISTS": 1, "PADDED": 1024, "BLOCK": routing.FILL_BLOCK},
          routing.FILL_WARPS, "bf16", (90,))
    build(c.query_kernel, {"CENTRED": True, "CAPPED": True, "RANK": 16, "ROWS": 16, "BLOCKS": default.query_blocks,
                           "DIM": 128, "WIDTH": default.width, "FEATURES": features}, completion.QUERY_WARPS, "bf16",
          (90,))
    maps = {"CENTRED": True, "CAPPED": True, "RANK": 16, "ROWS": 16, "BLOCKS": 1, "DIM": 128, "WIDTH": 128,
            "FEATURES": 128}
    build(c.query_kernel, maps, completion.QUERY_WARPS, "bf16")
    build(c.query_kernel, {**maps, "BLOCKS": 2, "WIDTH": 256}, completion.QUERY_WARPS, "bf16", (90,))
    build(c.factor_kernel, {"DIM": 64, "RANK": 16}, completion.FACTOR_WARPS, "bf16", (90,), rows="*fp32")
    build(c.factor_kernel, {"DIM": 256, "RANK": 16}, completion.FACTOR_WARPS, "bf16", (90,), rows="*fp32")
    for of_keys in ({"UNITS": units, "FEATURES": features}, {"UNITS": 128, "FEATURES": 128},
                    {"UNITS": 128, "FEATURES": 256}):  # 192 padded
        of_keys = {"BLOCK": ft.BLOCK, "DIM": 128, **of_keys}
        capabilities = (89, 90) if of_keys["FEATURES"] == 128 else (90,)
        build(ftt.sums_kernel, of_keys, ft.SUM_WARPS, "bf16", capabilities)
        build(ftt.join_kernel, {"BLOCK": ft.JOINED_AT_ONCE, "DIM": of_keys["FEATURES"]}, ft.JOIN_WARPS, "bf16")
        build(ftt.features_kernel, of_keys, ft.WARPS, "bf16", capabilities)
    for dim in (64, 128, 256):
        build(d.decode_kernel, {"GROUP": 4, "ROWS": 16, "DIM": dim, "WIDTH": dim, "BLOCK": stored.KEYS_AT_ONCE,
                                "STAGES": stored.stages_of(dim, 2)}, stored.WARPS, "bf16", SHARED)
    for dim, capability in ((64, 89), (128, 80), (128, 89), (128, 90), (256, 80), (256, 90)):
        build(da.add_kernel, {"DIM": dim, "WIDTH": dim, "ROWS": ADDED_AT_ONCE}, ADD_WARPS, "bf16", (capability,))
    for dim in (64, 128, 256):
        for capability in (89, 80, 90):
            block_kernels(build, dim, "bf16", capability)
    block_kernels(build, 256, "fp32", 80)
    each = {"EACH": block_attention.EACH, "BITS": block_attention.SHARE_BITS}
    for kernel, (columns, warps) in ((ba.mass_kernel, block_attention.MASS), (ba.floor_kernel, block_attention.FLOOR),
                                     (ba.list_kernel, block_attention.LIST)):
        build(kernel, {**each, "COLUMNS": columns}, warps, "bf16", SHARED)
    build(d.append_kernel, {"DIM": 80, "WIDTH": 128}, 1, "bf16", (90,))
    for half, dim in (("bf16", 128), ("bf16", 256), ("fp32", 64), ("fp32", 128), ("fp32", 256)):
        size = 4 if half == "fp32" else 2
        blocks = {n: at_once(block, size * dim, indexing.ROW_BYTES) for n, block in (
            ("BLOCK", indexing.ASSIGNED_AT_ONCE), ("BUCKETS", indexing.BUCKETS_AT_ONCE))}
        build(i.assign_kernel, {**blocks, "DIM": dim}, indexing.assign_warps(size), half, SHARED,
              stages=indexing.STAGES, spill=128)
    build(i.count_kernel, {"STRETCH": indexing.SORTED_AT_ONCE}, indexing.WARPS, "bf16")
    stretch = {"STRETCH": indexing.SORTED_AT_ONCE, "BLOCK": indexing.PLACED_AT_ONCE}
    build(i.place_kernel, stretch, indexing.WARPS, "bf16")
    build(be.norm_kernel, {"WIDTH": 4096, "ROUNDS": True}, between.NORM_WARPS, "bf16")
    build(be.rotate_kernel, {"HALF": 64, "WIDTH": 64}, between.ROTATE_WARPS, "bf16")
    build(be.gate_kernel, {"BLOCK": between.GATED_AT_ONCE}, between.GATE_WARPS, "bf16")
    forms = {"parts": {"PARTS": 3, "GATED": False, "BIAS": True}, "gated": {"PARTS": 1, "GATED": True, "BIAS": True},
             "one": {"PARTS": 1, "GATED": False, "BIAS": False}}
    for rows in (1, SUMMED_ROWS):
        for form, how in (("parts", SUM_JOINT), ("gated", SUM_JOINT), ("one", SUM), ("one", SUM_MANY)):
            build(fr.sum_kernel, {**forms[form], "ROWS": rows, "BLOCK_N": how.outputs, "BLOCK_K": how.inputs},
                  how.warps, "bf16")
    for form, how in (("parts", DOT_JOINT), ("gated", DOT_JOINT), ("one", DOT)):
        for capability in (80, 90):
            room = min(SHARED[80], SHARED[89]) if capability == 80 else SHARED[capability]
            fit = fitting_rows(how, 1 + (form == "gated"), 2, room)
            build(fr.dot_kernel, {**forms[form], "BLOCK_N": fit.outputs, "BLOCK_K": fit.inputs}, fit.warps, "bf16",
                  (capability,), stages=fit.stages)
    build(vo.scores_kernel, {"GROUP": 4, "ROWS": 16, "BLOCK": vote.KEYS_AT_ONCE, "DIM": 128}, vote.WARPS,
          "bf16")
    build(vo.vote_kernel, {"HEADS": 32, "ROWS": 32, "BLOCK": vote.VOTES_AT_ONCE}, vote.WARPS, "bf16", (90,))
    build(bs.sums_kernel, {"DIM": 80, "WIDTH": 128, "BLOCK": SUMS}, 4, "bf16", (90,))
    for apart in (False, True):
        build(bs.rows_kernel, {"DIM": 80, "WIDTH": 128, "BLOCK": AGAINST, "APART": apart}, 4, "bf16", (90,),
              bucket="*i32", table="*fp32")
    build(g.claim_kernel, {"LISTS": 3, "BLOCK": gather.CLAIMED}, 4, "bf16")
    for hot in (False, True):
        build(g.fetch_kernel, {"LISTS": 3, "DIM": 160, "WIDTH": 256, "BLOCK": gather.FETCHED, "HOT": hot,
                               "COUNTS": hot}, 4, "bf16", (80, 90))
    for dim in (32, 128):
        build(bm.bucket_mass_kernel, {"GROUP": 4, "ROWS": QUERIES_AT_ONCE, "DIM": dim, "WIDTH": dim, "BLOCK": 64}, 4,
              "bf16", (80,) if dim == 32 else (80, 90))
    small = {"RANK": 60, "BYTES": 32, "WIDTH": 32, "GROUP": 4, "ROWS": 4, "DIM": 64, "PADDED": 64}
    build(sk.prepare_kernel, small, routing.RANK_WARPS, "bf16", (90,))
    for rank, width in ((60, 32), (96, 96)):
        code = {"RANK": rank, "BYTES": width, "WIDTH": 32 if width == 32 else 128, "GROUP": 4, "ROWS": 16}
        build(ec.encode_kernel, {**code, "BLOCK": codes.ENCODE_KEYS, "DEPTH": codes.ENCODE_DEPTH},
              codes.ENCODE_WARPS, "bf16")
        build(sk.prepare_kernel, {**code, "ROWS": 4, "DIM": 256, "PADDED": 1024}, routing.RANK_WARPS, "bf16", (90,))
        build(sk.score_kernel, {**code, "HEADS": 4, "ALIGNED": 16, "PADDED": 1024, "BLOCK": sketch.SCORED_AT_ONCE,
                                "PACKED": True}, sketch.SCORE_WARPS, "bf16")
        for group in (4, 7):
            build(sk.score_all_kernel, {**code, "GROUP": group, "HEADS": power_of_two(group), "ALIGNED": 16,
                                        "DEPTH": sketch.side_depth(128, width), "BLOCK": sketch.all_at_once(width),
                                        "STAGES": sketch.all_stages(width), "PACKED": True}, sketch.ALL_WARPS, "bf16")
    build(sk.score_all_kernel, {"RANK": 256, "BYTES": 256, "WIDTH": 256, "GROUP": 2, "HEADS": 2, "ALIGNED": 16,
                                "DEPTH": sketch.side_depth(256, 256), "BLOCK": sketch.all_at_once(256),
                                "STAGES": sketch.all_stages(256), "PACKED": True}, sketch.ALL_WARPS, "bf16", SHARED)
    for half in ("bf16", "fp32"):
        build(ec.encode_kernel, {"RANK": 256, "BYTES": 256, "WIDTH": 256, "BLOCK": codes.ENCODE_KEYS,
                                 "DEPTH": codes.ENCODE_DEPTH}, codes.ENCODE_WARPS, half, SHARED)
    for seats in (2, 128):
        build(se.follow_kernel, {"PAGE": 16, "SEATS": seats, "TILE": seating.ROWS_AT_ONCE,
                                 "BLOCK": seating.SLOTS_AT_ONCE, "PAGES": seating.PAGES_AT_ONCE}, seating.WARPS, "bf16")
    build(se.lanes_kernel, {"PAGE": 16, "BLOCK": seating.SLOTS_AT_ONCE}, seating.WARPS, "bf16")
    for parts in (1, 64, sketch.BINNED_PARTS):
        build(sk.histogram_kernel, {"GROUP": 3, "HEADS": 4, "PARTS": parts, "SCORED": sketch.SCORED_AT_ONCE,
                                    "BLOCK": sketch.BINNED_AT_ONCE, "LISTED": parts > 1},
              sketch.BINNED_WARPS, "bf16", (90,))
    for length in (256, 2048, losses.LONGEST):
        row = {"PADDED": length, "READS": True}
        for kernel in (lo.kl_huber_kernel, lo.mass_kernel):
            build(kernel, row, losses.row_warps(length), "bf16", (80,))
    for width in (16, losses.WIDTH):
        for kernel in (lo.outputs_kernel, lo.output_gradient_kernel):
            build(kernel, {"ROWS": losses.QUERIES_AT_ONCE, "BLOCK": losses.KEYS_AT_ONCE, "WIDTH": width,
                           "READS": True}, losses.WARPS, "bf16", (80, 89, 90))
    for listed in (True, False):
        build(sk.select_kernel, {"BLOCK": sketch.SELECTED_AT_ONCE, "LOOK_BACK": sketch.LOOK_BACK, "LISTED": listed},
              sketch.SELECT_WARPS, "bf16", (90,))
    whole = {"GROUP": 3, "ROWS": attention_mass.QUERIES_AT_ONCE, "DIM": 256, "WIDTH": 256,
             "SLOTS": attention_mass.MERGED_AT_ONCE}
    blocks = {**whole, "BLOCK": attention_mass.KEYS_AT_ONCE}
    build(am.summary_kernel, {**blocks, "DIM": 32, "WIDTH": 32}, 4, "bf16", (80,))
    build(am.summary_kernel, blocks, 4, "bf16")
    build(am.merge_kernel, whole, 4, "bf16", (80,))
    # float32 of 256: blocks of as many rows as the launches take; compiling them is slow, and the least limit is
    # that of what is compiled for sm_80
    least = (80,)
    row = 4 * 256
    build(am.summary_kernel, {**whole, "BLOCK": at_once(attention_mass.KEYS_AT_ONCE, row)}, 4, "fp32", least)
    build(bm.bucket_mass_kernel, {"GROUP": 4, "ROWS": QUERIES_AT_ONCE, "DIM": 256, "WIDTH": 256,
                                  "BLOCK": at_once(64, row)}, 4, "fp32", least)
    build(vo.scores_kernel, {"GROUP": 4, "ROWS": 16, "BLOCK": at_once(vote.KEYS_AT_ONCE, row), "DIM": 256}, vote.WARPS,
          "fp32", least, stages=3)
    build(r.mean_kernel, {"FOLD": 16, "GROUP": 4, "ROWS": 64, "BLOCK": at_once(64, row), "WIDTH": 256,
                          "OFFSETS": True}, routing.SCORE_WARPS, "fp32", least, stages=3)
    build(d.decode_kernel, {"GROUP": 4, "ROWS": 16, "DIM": 256, "WIDTH": 256,
                            "BLOCK": at_once(stored.KEYS_AT_ONCE, row), "STAGES": stored.stages_of(256, 4)},
          stored.WARPS, "fp32", least)
    return made



def answer(kind: str, name: str) -> dict[str, Any]:
    """How many builds of a kernel there are of a kind, and what the first that fails says."""
    asked = [build for build in builds() if build.name == name]
    asked = asked[:1] if kind == "quick" else asked
    for build in asked:
        try:
            build.run()
        except Exception as err:
            return {"builds": len(asked), "failed": f"{build}: {type(err).__name__}: {err}"}
    return {"builds": len(asked), "failed": None}


if __name__ == "__main__":
    assert "TRITON_INTERPRET" not in os.environ
    for line in sys.stdin:
        with redirect_stdout(sys.stderr):
            found = answer(*line.split())
        print(json.dumps(found), flush=True)
