"""docs/results/prefill.md from prefill.json, and two figures of one request of 128k tokens: what reading its prompt
sparsely loses against the time it takes, and how long it waits for its first and its last token. The loss is of
real.json, the time of a token of generate.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks._first_page import card
from benchmarks._prompts import DENSE, sizes_of
from benchmarks._speed_page import number, runs, words
from sparsekv.core.prefill import SparsePrompts
from sparsekv.evaluation.canvas import INK, Drawing, canvas, drawn
from sparsekv.evaluation.tables import markdown

Rows = Sequence[dict[str, Any]]

CASE, LENGTH, WRITTEN = "8b-128k-b1", 16_384, 256
"""The request of the figures; tokens of the prompts whose loss is known; tokens that the request writes."""
COLUMNS = {"prompt_s": "prompt [s]", "prompt_speedup": "ratio", "cold_prompt_s": "prompt, first run [s]",
           "first_token_s": "first token [s]", "first_token_speedup": "ratio", "peak_gb": "most memory [GB]"}


def named(method: str) -> str:
    """What prefill.json calls a prompt's reading, in words: `sparse@0.2`; rows always name the share."""
    if method == "dense":
        return "full attention"
    if method == "token_select":
        return "TokenSelect, as published"
    sizes = sizes_of(method)[1]
    share = sizes.pop("share")
    return ", ".join(["sparse", f"{100 * share:.0f} %", *(f"{name} {value}" for name, value in sizes.items())])


def reading(method: str) -> str:
    """The same in real.json's words, where answers were measured."""
    return ":".join(["prompt", *(f"{n}={v}" for n, v in sizes_of(method)[1].items())])


def page(rows: Rows, real: Rows, generate: Rows) -> str:
    """docs/results/prefill.md."""
    parts = [
        "# How long does a prompt take, read densely and sparsely?",
        "Models in bfloat16, with random weights, except “coder”. [How to read prompts "
        "sparsely](../how-to/prompts.md).",
        words(("model", "shape"), ("8b", "Llama 3.1 8B"), ("8b-quarter", "eight of its layers"),
              ("coder", "Qwen2.5-Coder-1.5B, its own weights")),
        words(("column", "what it is"),
              ("prompt", "the prompt in pieces of 32,768 tokens, then index and summary"),
              ("first run", "kernels and cuDNN's plans are loaded in it; the method that a process runs first compiles "
                            "kernels in it too"),
              ("first token", "prompt and first token by `generate`, the prompt in one piece, where it fits"),
              ("full attention", "the faster of cuDNN and FlashAttention"),
              ("sparse, 10 %", "128 queries of a head choose 10 % of the tokens before them, at least 4096, in the "
                               "mean of the heads"),
              ("most memory", "the GPU's, in either"))]
    if points(rows, real):
        lost = [r for r in real if r["metric"] == "score" and ":prefill_" in r["case"] and "perplexity" not in r["case"]
                and r["length"] == LENGTH]
        parts += ["![Points lost against the time of a prompt](prefill-curve.png)",
                  f"Time: the first token of {CASE} in this page's first table. Points: RULER of the 1.5B model at "
                  f"{LENGTH // 1024}k tokens against prompts read densely, {len({r['case'] for r in lost})} tasks, "
                  f"{max(r['samples'] for r in lost)} prompts each, all decoded by sketch + φ. They are read at the "
                  "same share, with no least number of tokens: at 10 % a prompt of 16k reads 14 % of the pairs, one of "
                  "128k 12 % with the default `least` and `exact` ([rows](real.md)). Bars are 95 % intervals."]
    if ways := timeline(rows, generate):
        parts += ["![One request of 128k tokens](request.png)",
                  f"One request of 128k tokens that writes {WRITTEN}, by the first tokens of this page and the times "
                  f"of a token of [generate](generate.md), on {card(ways[0].row).partition(',')[0]}."]
    for run in runs([r for r in rows if r["method"] != "kernels"]):
        shown = [x for x in COLUMNS if any(r["metric"] == x for r in run)]
        values = {(r["case"], r["method"], r["metric"]): r["value"] for r in run}
        lines = [[*case.rsplit("-", 2)[:2], case.rpartition("-b")[2], named(m),
                  *(number(values.get((case, m, x)), 2) for x in shown)]
                 for case in dict.fromkeys(r["case"] for r in run)
                 for m in dict.fromkeys(r["method"] for r in run if r["case"] == case)]
        parts += [f"## {card(run[0]).replace('one ', '')}",
                  markdown(["model", "tokens", "requests", "prompt read by", *(COLUMNS[x] for x in shown)], lines)]
    for run in runs([r for r in rows if r["method"] == "kernels"]):
        values = {(r["case"], r["metric"]): r["value"] for r in run}
        names = list(dict.fromkeys(r["metric"] for r in run))
        parts += [f"## Kernels, {card(run[0]).replace('one ', '')}",
                  "The last 16,384 queries of a prompt, a layer of 32 query and 8 KV heads of 128. The rate is per "
                  "pair of query and key, as a share of full attention's; select is score and list. Lists hold 10 %.",
                  markdown(["case", *(n.replace("_ms", " [ms]").replace("_", " ") for n in names)],
                           [[c, *(number(values.get((c, n)), 3) for n in names)]
                            for c in dict.fromkeys(r["case"] for r in run)])]
    if not rows:
        parts.append("Nothing has been measured yet.")
    return "\n\n".join(parts) + "\n"


def points(rows: Rows, real: Rows) -> list[tuple[str, float, dict[str, Any]]]:
    """Readings with seconds of a prompt of `CASE` and the row of what they lose, of the run that has most."""
    lost = {r["method"]: r for r in real if r["case"].endswith(f":prefill@{LENGTH}") and r["metric"] == "difference"
            and r["value"] is not None and r.get("against") == DENSE}
    best: list[tuple[str, float, dict[str, Any]]] = []
    for run in runs([r for r in rows if r["case"] == CASE and r["metric"] == "first_token_s"]):
        found = [(r["method"], r["value"], lost[reading(r["method"])]) for r in run
                 if r["method"].startswith("sparse") and reading(r["method"]) in lost]
        best = max(best, found, key=len)
    return best if len(best) > 1 else []


def curve(rows: Rows, real: Rows) -> Drawing:
    """Points lost against seconds of a prompt, full attention a point at zero."""
    figure, axes = canvas()
    line = sorted((s, r["value"], r["value"] - r["low"], r["high"] - r["value"], m) for m, s, r in points(rows, real))
    if line:
        axes.errorbar([x[0] for x in line], [x[1] for x in line], yerr=[[x[i] for x in line] for i in (2, 3)],
                      color="#882255", marker="o", markersize=4, linewidth=1.7, elinewidth=0.8, capsize=2,
                      label="sparse")
        for x, y, *_, m in line:
            axes.annotate(named(m).partition(", ")[2], (x, y), xytext=(8, -10), textcoords="offset points", fontsize=8,
                          color="#882255")
    dense = [r["value"] for r in rows if (r["case"], r["method"], r["metric"]) == (CASE, "dense", "first_token_s")]
    if dense:
        axes.plot(dense[-1:], [0.0], marker="s", color="#7f7f7f", linestyle="none", label="full attention")
    axes.set_xlim(left=0.0)
    axes.set_xlabel("seconds of a prompt of 128k tokens, 8B shape")
    axes.set_ylabel("points of RULER, 1.5B, 16k")
    axes.legend(fontsize=8.5, frameon=False, labelcolor=INK, loc="lower right")
    return drawn(figure)


class Way(NamedTuple):
    """One request: how it is read and decoded, seconds to its first token and of the others, a row that says where."""

    name: str
    first: float
    rest: float
    row: dict[str, Any]


def timeline(rows: Rows, generate: Rows) -> list[Way]:
    """Of one request its readings and decodings on one card, the last that has all of them; else nothing."""
    ways = (("full attention", rows, "dense", "dense"),
            ("decoded by sketch + φ", generate, "sketch_phi", "sketch_phi"),
            ("prompt read sparsely too", rows, f"sparse@{SparsePrompts().share}", "sketch_phi"))

    def last(of: Rows, machine: str, method: str, metric: str) -> dict[str, Any] | None:
        wanted = (machine, CASE, method, metric)
        return next((r for r in reversed(of) if (r["machine"], r["case"], r["method"], r["metric"]) == wanted), None)

    best: list[Way] = []
    for machine in dict.fromkeys(r["machine"] for r in rows):
        found = [Way(name, first["value"], pace["value"] * (WRITTEN - 1) / 1e3, first)
                 for name, of, read, decoded in ways
                 if (first := last(of, machine, read, "first_token_s")) is not None
                 and (pace := last(generate, machine, decoded, "loop_ms")) is not None]
        best = found if len(found) == len(ways) else best
    return best


def request(rows: Rows, generate: Rows) -> Drawing:
    """A bar a way: the wait for the first token, and the tokens after it."""
    figure, axes = canvas()
    ways = timeline(rows, generate)[::-1]
    for y, (_, first, rest, _) in enumerate(ways):
        axes.barh(y, first, color="#7f7f7f", alpha=0.55)
        axes.barh(y, rest, left=first, color="#882255", alpha=0.8)
        axes.annotate(f"{first:.1f} s + {rest:.1f} s", (first + rest, y), xytext=(5, -3), textcoords="offset points",
                      fontsize=9, color=INK)
    axes.set_yticks(range(len(ways)), [name for name, *_ in ways])
    axes.set_xlim(0, 1.18 * max((way.first + way.rest for way in ways), default=1.0))
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"seconds: to the first token (grey), the other {WRITTEN - 1} tokens (purple)")
    return drawn(figure)
