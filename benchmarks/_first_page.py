"""The first screen of README and of the site: one table, what it shows in sentences, and where its rows are from. All
of it is drawn from real.json and generate.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks._real_page import (
    FIRST,
    LONG,
    best_rivals,
    bound,
    card,
    first,
    measured,
    minus,
    most,
    of_card,
    of_metric,
    paired,
    placed,
    prompts,
    second,
    text_cells,
)
from sparsekv.core.registry import FULL, row_of
from sparsekv.evaluation.canvas import INK, Drawing, canvas, drawn
from sparsekv.evaluation.methods import percent, plain
from sparsekv.evaluation.tables import markdown

Rows = Sequence[dict[str, Any]]

BUDGET = 0.01
"""The share of the context that is retrieved: the table's one configuration."""
METHODS = {FULL: "full attention", "topk": "exact top-k", "sketch": "sketch",
           "sketch+centroid": "sketch + untrained centroids", "sketch+phi": "**sketch + φ**"}
"""What README shows of this project's methods, in its words."""
MODEL = "Qwen2.5-Coder-1.5B-Instruct"
TOKEN = {FULL: "dense", "sketch": "sketch", "sketch+phi": "sketch_phi"}
"""What generate.json calls them."""
TOKEN_CASES = {"coder-16k-b24": "this model, 24 requests of 16k",
               "coder-30k-b1": "this model, one request of 30k",
               "8b-128k-b1": "an 8B shape, one request of 128k"}
"""Cases of generate.json that are shown where a run has all three methods, and what they are."""


def named(method: str) -> str:
    """A rival's name as its paper writes it."""
    row = row_of(plain(method))
    names = {"token_select": "TokenSelect", "lfps": "LFPS", "quest": "Quest", "magicpig": "MagicPIG",
             "snapkv": "SnapKV", "pyramidkv": "PyramidKV", "streaming_llm": "StreamingLLM"}
    return METHODS.get(method) or names.get(plain(method)) or (row.label if row else method)


class Times(NamedTuple):
    """A column of times: header, cells by method, and whose they are."""

    header: str
    cells: dict[str, str]
    card: str


def times(rows: Rows, case: str, names: dict[str, str], metric: str) -> tuple[dict[str, float], dict[str, Any] | None]:
    """The last times of one card and commit that has all of these methods, an H100's if there are some, and one of
    their rows; else nothing."""
    groups: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for r in rows:
        if r["case"].partition(",")[0] == case and r["metric"] == metric:
            groups.setdefault((r["machine"], r["commit"]), {})[r["method"]] = r
    found = [g for g in groups.values() if set(names.values()) <= set(g)]
    if not found:
        return {}, None
    chosen = sorted(found, key=lambda g: "H100" in next(iter(g.values()))["machine"])[-1]
    return {m: chosen[name]["value"] for m, name in names.items()}, chosen[names[FULL]]


def speed(generate: Rows) -> list[Times]:
    """Columns of a token of a whole model."""
    columns = []
    for case, what in TOKEN_CASES.items():
        found, one = times(generate, case, TOKEN, "loop_ms")
        if one is not None:
            columns.append(Times(f"a token, {what} [ms]", {m: f"{v:.1f}" for m, v in found.items()}, card(one)))
    return columns


def first_table(real: Rows, generate: Rows) -> list[str]:
    """README's table: score, bytes, error and time of one budget, then where its rows are from."""
    mine, case = first(real)
    scores = {(r["method"], r["budget"]): r for r in of_metric(mine, case, "score")}
    columns = speed(generate)
    lines: list[list[str]] = []
    of_whom: dict[str, list[str]] = {}
    for method in (*list(METHODS)[:2], *best_rivals(mine, case), *list(METHODS)[2:]):
        budget = None if method == FULL else BUDGET
        one = scores.get((method, budget))
        if one is None:
            continue
        of_whom.setdefault(card(one), []).append(named(method))
        error = "0" if method == FULL else text_cells(mine, method, BUDGET)[2]
        read = "100 %" if method == FULL else f"{100 * one['bytes_share']:.1f} %"
        fewer = f", {one['samples']} prompts" if one["samples"] < most(mine, case) else ""
        name = named(method) + fewer + (" (scores every key)" if method == "topk" else "")
        points = (f"0 (score {one['value']:.1f} ± {(one['high'] - one['low']) / 2:.1f})" if method == FULL else
                  paired(mine, case, method, BUDGET))
        lines.append([name, points, read, error, *(c.cells.get(method, "–") for c in columns)])
    table = markdown([f"{percent(BUDGET)} of the tokens retrieved", "points to full attention",
                      "bytes read, of the cache's", "error of attention, prose", *(c.header for c in columns)], lines)
    return ["", table, "", origins(real, columns, of_whom), ""]


def origins(real: Rows, columns: Sequence[Times], methods: Mapping[str, list[str]]) -> str:
    """Where the table's rows are from, a line a column. methods: of every card and commit of the scores."""
    mine, case = first(real)
    one = next(r for r in of_metric(mine, case, "score") if r["method"] == FULL)
    error = next((r for r in of_metric(mine, f"perplexity_prose@{FIRST[1]}", "rel_err")), one)
    trained = next((r["trained"] for r in mine if "trained" in r), "")

    def by(of: str) -> str:
        """Whose rows they are, where not the scores'."""
        return "" if of == card(one) else f" ({of})"

    timed = [c.card.split(", commit ") for c in columns]
    cards, commits = " and ".join(dict.fromkeys(m for m, _ in timed)), ", ".join(c for _, c in timed)
    elsewhere = "".join(f" {', '.join(names)}: {of}." for of, names in methods.items() if of != card(one))
    lines = [
        f"Model: {MODEL}, {one['quantisation']} file, run in bfloat16."
        + (f" Trained on {trained.replace('made up', 'synthetic')}." if trained else ""),
        f"Points: RULER's score (of 100) minus full attention's on the same prompts, 13 tasks at {FIRST[1] // 1024}k "
        f"tokens, {most(mine, case)} prompts where a row names no other number. ± is half the 95 % interval.",
        "Bytes: what a step of a sparse layer (all but the first) reads, index and estimate included, of that layer's "
        "keys and values.",
        f"Error: relative L2 distance of a head's output to full attention's, on held-out prose{by(card(error))}.",
        *([f"Time: by `attachment.generate`, full attention too, on {cards}. Commits of the columns: {commits}. "
           "The 8B shape is Llama 3.1 8B's, with random weights."] if timed else []),
        f"Points, bytes and errors are of {card(one)}.{elsewhere} “–” was not measured."]
    return "\n".join(f"- {line}" for line in lines)


def difference(real: Rows, method: str, against: str, budget: float = BUDGET) -> dict[str, Any] | None:
    """The row of how a method stands to another on RULER, paired by prompt; None where it was not measured."""
    mine, case = first(real)
    return next((r for r in mine if r["case"] == case and r["metric"] == "difference" and r["budget"] == budget
                 and (r["method"], plain(r["against"])) == (method, against)), None)


def apart(found: dict[str, Any]) -> str:
    """What a 95 % interval says of the difference of two methods."""
    return "higher" if found["low"] > 0 else "lower" if found["high"] < 0 else "not significant"


def facts(real: Rows) -> list[str]:
    """What the scores say of pairs of methods, of untrained completion, and of other runs."""
    mine, case = first(real)
    pairs = [("sketch", FULL, BUDGET), ("topk", FULL, BUDGET), ("sketch+phi", FULL, BUDGET),
             ("sketch+phi", FULL, 0.02), ("sketch+phi", "sketch", BUDGET), ("sketch+phi", "sketch+centroid", BUDGET),
             *(("sketch+phi", plain(m), BUDGET) for m in best_rivals(mine, case))]
    lines = []
    for method, against, budget in pairs:
        found = difference(real, method, against, budget)
        if found is not None:
            lines.append([named(method).strip("*"), named(against), percent(budget), str(found["samples"]),
                          minus(f"{found['value']:+.1f}"),
                          minus(f"{bound(found['low'])} to {bound(found['high'])}"), apart(found)])
    table = markdown(["method", "against", "retrieved", "prompts", "points", "95 % interval", "difference"], lines)
    same = ("A line is of the prompts that both methods answered. So it may differ from what their rows in the first "
            "table are apart.")
    others = other_runs(real)
    return ["", table, "", " ".join(said for said in (same, untrained(real)) if said), "", *([others, ""] if others
                                                                                        else [])]


def other_runs(real: Rows) -> str:
    """How sketches and φ stand to full attention by another training of the same recipe, and at twice README's length,
    there by maps of windows of either length."""
    short, long = f"ruler@{FIRST[1]}", f"ruler@{2 * FIRST[1]}"
    names = [f"{n * FIRST[1] // 1024}k" for n in (1, 2)]
    lines = []
    for some, case, windows in ((second(real), short, f"{names[0]}, trained again"),
                                (of_card(real, FIRST[0], long), long, names[0]),
                                (of_card(real, LONG, long), long, names[1])):
        points = [paired(some, case, "sketch+phi", b) for b in (BUDGET, 0.02)]
        if "–" not in points:
            lines.append([names[case == long], windows, str(prompts(some, case, "sketch+phi")), *points,
                          measured(some, case).replace("one ", "")])
    return markdown(["sketch + φ at [tokens]", "trained on windows of [tokens]", "prompts",
                     *(f"points to full attention at {percent(b)}" for b in (BUDGET, 0.02)), "measured on"],
                    lines) if lines else ""


def untrained(real: Rows) -> str:
    """How φ stands to centroids of the request's keys, which nobody trained: on RULER and on text."""
    mine, _ = first(real)
    found = difference(real, "sketch+phi", "sketch+centroid")
    errors = [text_cells(mine, m, BUDGET)[2:] for m in ("sketch+phi", "sketch+centroid")]
    said = []
    if found is not None:
        said.append({"higher": "On RULER φ scores above untrained centroids.",
                     "lower": "On RULER φ scores below untrained centroids.",
                     "not significant": "On RULER φ and untrained centroids do not differ significantly.",
                     }[apart(found)])
    if "–" not in (*errors[0], *errors[1]):
        shares = [float(a) / float(b) for a, b in zip(*errors, strict=True)]
        said.append(f"On text φ's error of attention is {shares[0]:.2f} times that of untrained centroids for prose, "
                    f"and {shares[1]:.2f} times for program text.")
    return " ".join(said)


COLOURS = {FULL: "#7f7f7f", "topk": "#0072B2", "sketch": "#B07AA1", "sketch+centroid": "#009E73",
           "sketch+phi": "#882255"}
OTHERS = ("#E69F00", "#56B4E9", "#D55E00")
"""Colours of rivals."""
LEAST = 60.0
"""Points at which the axis begins."""


def figure(real: Rows) -> Drawing:
    """Score by bytes, a line a method through its budgets, named in a legend; budgets stand at the points of sketch +
    φ."""
    mine, case = first(real)
    scores = [r for r in placed(mine, case) if r["value"] is not None]
    shown = dict(zip((*METHODS, *best_rivals(mine, case)), (*COLOURS.values(), *OTHERS), strict=False))
    whole, axes = canvas()
    shares = []
    for method, colour in shown.items():
        line = sorted((r["bytes_share"], r["value"], r["budget"]) for r in scores
                      if r["method"] == method and r.get("bytes_share") is not None and r["budget"] is not None)
        name = named(method).strip("*")
        if method == FULL:
            axes.axhline(next(r["value"] for r in scores if r["method"] == FULL), color=colour, linewidth=1.8,
                         label=name)
        elif line:
            shares += [x for x, *_ in line]
            wide = 2.4 if method == "sketch+phi" else 1.6
            axes.plot([x for x, *_ in line], [y for _, y, _ in line], color=colour, linewidth=wide, marker="o",
                      markersize=wide + 2.4, label=name)
            if method == "sketch+phi":
                for x, y, budget in line:
                    axes.annotate(percent(budget), (x, y), xytext=(6, -11), textcoords="offset points", fontsize=8,
                                  color=colour)
    low, high = min(shares, default=0.01) / 1.25, max(shares, default=1.0) * 1.25
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    ticks = [x for x in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if low <= x <= high]
    axes.set_xticks(ticks, [percent(x) for x in ticks])
    axes.minorticks_off()
    top = max(r["value"] for r in scores)
    axes.set_ylim(LEAST, top + 2)
    axes.set_xlabel("bytes that a step of a sparse layer reads, of its keys and values")
    axes.set_ylabel("RULER score [points of 100]")
    axes.legend(fontsize=8.5, frameon=False, labelcolor=INK, ncols=2, loc="lower right")
    return drawn(whole)
