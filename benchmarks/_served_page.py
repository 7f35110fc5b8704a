"""docs/results/served.md with its figure and the table of docs/serving.md, from serving.json and served_quality.json. A
line has both methods on one card."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks._first_page import card
from benchmarks._real_page import minus
from benchmarks._speed_page import context_axes, number, runs, size
from sparsekv.evaluation.canvas import SERIES, Drawing, canvas
from sparsekv.evaluation.tables import markdown

Rows = Sequence[dict[str, Any]]

CASE = re.compile(r"(?:tp(?P<ranks>\d)-)?(?P<shape>\w+)-(?P<context>\d+k)-b(?P<rows>\d+)(?:-(?P<cache>\w+))?")
LOAD = re.compile(r"(?P<shape>\w+)-load-(?P<rate>[\d.]+)")
RULER = re.compile(r"(?P<model>[^:]+):ruler@(?P<length>\d+)")
METHODS = {"vllm_fa3": "vLLM, FlashAttention 3", "vllm_sparsekv": "vLLM, sparsekv", "attach": "`attach`"}
PROMPTS = {"vllm_sparse_prompts": "sparse prompts [s]",
           "vllm_sparse_prompts_tenth": "from 8k on at a share of 0.1 [s]"}
"""Columns of first tokens."""
SPEEDS = ["model", "context [tokens]", "requests at once", "decoded by", "vLLM's own, a token [ms]",
          "sparsekv, a token [ms]", "times faster", "measured on"]
SCORES = ["model, tokens", "decoded by", "vLLM's own, a token [ms]", "sparsekv, a token [ms]", "vLLM's own, RULER",
          "sparsekv, RULER", "prompts a task", "difference, 95 % interval", "measured on"]
SHORT = "full attention, since it is short"
"""How a request is decoded that gets no index."""
SPANS = {"tokens_per_second": "tokens a second", "between_p50_ms": "between tokens, median [ms]",
         "between_p99_ms": "between tokens, 99th percentile [ms]", "first_p50_s": "first token, median [s]",
         "first_p99_s": "first token, 99th percentile [s]", "page_wait_s": "the next request waits for pages [s]",
         "sparse_share": "tokens of sparse steps"}


def on_gpus(rows: Rows) -> list[dict[str, Any]]:
    return [r for r in rows if " CPU" not in r["machine"]]


def speeds(rows: Rows) -> list[list[str]]:
    """Of every case that both methods have on a card a line: context, requests, ms, ratio, and the row it is from."""
    found = []
    values = {(r["machine"], r["case"], r["method"]): r for r in rows if r["metric"] == "token_ms"}
    indexed = {(r["machine"], r["case"]) for r in rows if r["metric"] == "index_s"}
    for machine, case in dict.fromkeys((m, c) for m, c, _ in values):
        parts, own = CASE.fullmatch(case), values.get((machine, case, "vllm_fa3"))
        ours = values.get((machine, case, "vllm_sparsekv"))
        if parts is None or own is None or ours is None:
            continue
        order = parts["ranks"] or "1", size(parts["context"]), int(parts["rows"])
        short = not parts["ranks"] and (machine, case) not in indexed  # several GPUs have no row of their index
        found.append((order, [*said(case), SHORT if short else by(0.01), *pair(own, ours),
                              f"{own['value'] / ours['value']:.2f} ×", where(ours)]))
    return [line for _, line in sorted(found, key=lambda x: x[0])]


def said(case: str) -> list[str]:
    """Model, context and requests of a case."""
    parts = CASE.fullmatch(case)
    assert parts is not None
    more = [f"{parts['ranks']} GPUs"] if parts["ranks"] else []
    more += [f"{parts['cache']} cache"] if parts["cache"] else []
    return [f"{parts['shape'].upper()} shape", ", ".join([parts["context"], *more]), parts["rows"]]


def answers(quality: Rows) -> list[list[str]]:
    """Of every model, length and budget that was served on a card a line: speed and scores of the same answers."""
    values = {(r["machine"], r["case"], r["method"], r["metric"], r.get("budget")): r for r in quality}
    lines = []
    for machine, case, budget in dict.fromkeys((m, c, b) for m, c, method, metric, b in values
                                               if method == "vllm_sparsekv" and metric == "score"):
        if (parts := RULER.fullmatch(case)) is None:
            continue
        own, ours = ([values.get((machine, case, *m, metric, b)) for metric in ("token_ms", "score")]
                     for m, b in ((("vllm_fa3",), None), (("vllm_sparsekv",), budget)))
        above = values.get((machine, case, "vllm_sparsekv", "above_vllm_fa3", budget))
        answered = [str(r["samples"]) for r in (own[1], ours[1]) if r and "samples" in r]
        assert ours[1] is not None
        lines.append([
            f"{parts['model']}, {int(parts['length']):,}", by(budget), *pair(own[0], ours[0]),
            *(number(r["value"]) if r else "–" for r in (own[1], ours[1])),
            " and ".join(dict.fromkeys(answered)) or "–",
            minus(f"{above['value']:+.1f}, {above['low']:+.1f} to {above['high']:+.1f}") if above else "–",
            where(ours[1])])
    return lines


def counts(quality: Rows) -> str:
    """How many prompts a task the scores are of."""
    found = sorted({r["samples"] for r in on_gpus(quality) if RULER.fullmatch(r["case"]) and r["metric"] == "score"
                    and "samples" in r})
    return " or ".join(map(str, found))


def by(budget: float | None) -> str:
    return f"{100 * (budget or 0):g} %, sketch + φ"


def pair(own: dict[str, Any] | None, ours: dict[str, Any] | None) -> list[str]:
    """Milliseconds a token of both."""
    return [number(r["value"], 2) if r else "–" for r in (own, ours)]


def where(row: dict[str, Any]) -> str:
    return card(row).replace("one ", "").replace(", commit", "")


def side_by_side(rows: Rows, quality: Rows) -> str:
    """Speed and quality of served requests, a line a configuration: those with scores in a table of their own, first,
    whose times are of one request."""
    scored = answers(on_gpus(quality))
    return "\n\n".join(([markdown(SCORES, scored)] if scored else []) + [markdown(SPEEDS, speeds(on_gpus(rows)))])


def under_load(rows: Rows) -> Iterable[str]:
    """A table: a line a rate, method and card."""
    chosen = [r for r in on_gpus(rows) if LOAD.fullmatch(r["case"])]
    if not chosen:
        return
    values = {(r["case"], r["method"], where(r), r["metric"]): r["value"] for r in chosen}
    spans = {x: name for x, name in SPANS.items() if any(x == key[3] for key in values)}
    kinds = sorted({key[:3] for key in values}, key=lambda x: (float(x[0].rpartition("-")[2]), x[1:]))
    yield "## Under load"
    yield ("Poisson arrivals of prompts of 16k to 128k tokens and answers of 512 to 4,096, both even in the "
           f"logarithm, {chosen[0].get('count', 16)} requests a rate, the 8B shape. – was not recorded.")
    yield markdown(["requests a second", "served by", *spans.values(), "measured on"], [
        [case.rpartition("-")[2], METHODS.get(m, m), *(number(values.get((case, m, at, x)), 2) for x in spans), at]
        for case, m, at in kinds])
    pages = {r["method"]: int(r["value"]) for r in chosen if r["metric"] == "page_tokens"}
    if set(pages) >= set(list(METHODS)[:2]):
        own, ours = (pages[m] for m in list(METHODS)[:2])
        yield (f"The pages hold {own:,} tokens with vLLM's own attention. Beside codes and seats they hold {ours:,}. A "
               "request that does not fit waits until another one ends, and of so few requests the 99th percentile is "
               "nearly the longest wait.")


def by_task(quality: Rows) -> Iterable[str]:
    """A table a model, length and card: a line a method, a column a task."""
    for run in runs([r for r in on_gpus(quality) if r["metric"] == "score" and ":" in r["case"]]):
        for model, length in dict.fromkeys(tuple(r["case"].replace("@", ":").split(":")[::2]) for r in run):
            mine = {(r["case"].partition(":")[2].partition("@")[0], r["method"], r.get("budget")): r["value"]
                    for r in run if r["case"].startswith(f"{model}:") and r["case"].endswith(f"@{length}")}
            kinds = sorted({(list(METHODS).index(m), m, b or 0) for _, m, b in mine})
            tasks = sorted({t for t, _, _ in mine} - {"ruler"})
            yield f"## By task: {model} at {int(length):,} tokens, {where(run[0])}"
            yield markdown(
                ["task", *(METHODS[m] + (f", {100 * b:g} %" if b else "") for _, m, b in kinds)],
                [[t.removeprefix("ruler_").replace("_", " "),
                  *(number(mine.get((t, m, b or None))) for _, m, b in kinds)] for t in [*tasks, "ruler"]])
            yield from (f"Above `attach` at {100 * r['budget']:g} %, paired by prompt: {r['value']:+.1f} points, 95 % "
                        f"interval {r['low']:+.1f} to {r['high']:+.1f}." for r in quality
                        if r["metric"] == "above_attach" and r["case"] == f"{model}:ruler@{length}"
                        and where(r) == where(run[0]))


def page(rows: Rows, quality: Rows) -> str:
    """docs/results/served.md."""
    firsts, made = ({(r["machine"], r["commit"], r["case"], r["method"]): r for r in on_gpus(rows)
                     if r["metric"] == metric and CASE.fullmatch(r["case"])} for metric in ("first_s", "index_s"))
    last = {(machine, case): r for (machine, _, case, m), r in firsts.items() if m == "vllm_fa3"}
    ours = ("vllm_sparsekv", *PROMPTS)
    waits = []  # a line a run of ours, beside vLLM's own of that run, or else of another
    for machine, commit, case in dict.fromkeys(key[:3] for key in firsts if key[3] in ours):
        if own := firsts.get((machine, commit, case, "vllm_fa3"), last.get((machine, case))):
            mine = [firsts.get((machine, commit, case, m)) for m in ours]
            seconds = [number(r["value"], 2) if r else "–" for r in mine]
            index = number(made.get((machine, commit, case, "vllm_sparsekv"), {}).get("value"), 2)
            waits.append([*said(case), number(own["value"], 2), seconds[0], index, *seconds[1:],
                          where(next(r for r in mine if r))
                          + ("" if own["commit"] == commit else f", vLLM's own {own['commit']}")])
    parts = [
        "# How fast and how good is it inside vLLM?",
        "vLLM 0.26, with the default settings but for the budget, which every line names.",
        "![Time of a token inside vLLM](served.png)",
        "## Speed and quality side by side",
        "Models named by a shape have random weights and no quality. Where there are scores, the times are of the same "
        "answers, and every request decodes sparsely, even where full attention is faster. Scores are of "
        f"{counts(quality)} prompts a task; a difference is of the prompts that both answered. Where a line has two "
        "numbers of prompts, the first is vLLM's own. Elsewhere requests that are "
        "too short to gain are attended to fully. All decode steps run in full CUDA graphs.",
        side_by_side(rows, quality),
        "## First token",
        "From the request to the first token of the last request of the batch. Each request that decodes sparsely gets "
        "an index, with its summary; – where none does, or where its time is in the second token (two GPUs). "
        "Sparse prompts are those of the entry `\"prefill\": \"sparse\"`, or with the sizes that a column names, in "
        "pieces of 8,192 tokens as the others are.",
        markdown([*SPEEDS[:3], "vLLM's own [s]", "sparsekv [s]", "of that a request's index [s]",
                  *PROMPTS.values(), "measured on"], waits),
        *under_load(rows), *by_task(quality),
        "[How to serve](../how-to/serve.md), [the settings file](../serving.md)."]
    return "\n\n".join(parts) + "\n"


def figure(rows: Rows) -> Drawing:
    """Milliseconds a token inside vLLM by context, one request."""
    chosen = [r for r in on_gpus(rows) if r["metric"] == "token_ms" and re.fullmatch(r"8b-\d+k-b1", r["case"])]
    drawn, axes = canvas()
    for method, colour in (("vllm_fa3", SERIES[7]), ("vllm_sparsekv", "#882255")):
        line = sorted((size(r["case"].split("-")[1]), r["value"]) for r in chosen if r["method"] == method)
        axes.plot([x for x, _ in line], [y for _, y in line], color=colour, marker="o", markersize=3.5, linewidth=1.7,
                  label=METHODS[method])
    return context_axes(drawn, axes, "a token [ms]", scale="linear")
