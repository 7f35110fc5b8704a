"""The tables of docs/completion.md, from real.json, phi-forms.json, decode.json and generate.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks._missed_page import PLUS, STEP, found, of_prompt, over
from benchmarks._real_page import AGAIN, FIRST, KEPT, LONG, first, minus, models, most, of_metric, of_model, paired
from sparsekv.evaluation.tables import markdown

Rows = Sequence[dict[str, Any]]

METHODS = ("sketch", "sketch+centroid", "sketch+phi")
BUDGET = 0.01
LENGTHS = (4096, 16_384, 32_768)
MAPS = ((None, "none"), ("base", "four layers of 256 in each half, features kept"),
        ("shared64", "one hidden layer of 64 in each half (ships)"))
"""What phi-forms.json calls a map of keys, and what it is."""
CASE = "32x8-128k-b1"


def above(rows: Rows, length: int, method: str) -> str:
    """Perplexity of prose above full attention's."""
    one = next((r for r in of_metric(rows, f"perplexity_prose@{length}", "perplexity_ratio")
                if (r["method"], r["budget"]) == (method, BUDGET)), None)
    return "–" if one is None else minus(f"{100 * (one['value'] - 1):+.1f} %")


def by_context(real: Rows) -> list[str]:
    """Sketches alone, with untrained centroids and with φ: points and perplexity by context, of the training with most
    prompts that has all three."""
    lines = []
    for length in LENGTHS:
        case = f"ruler@{length}"
        trainings = [m for title, m in models(real).items() if title.partition(" ")[0] in (FIRST[0], LONG)]
        mine = max((t for t in trainings if set(METHODS) <= {
            r["method"] for r in of_metric(t, case, "difference") if r["budget"] == BUDGET}),
            key=lambda t: most(t, case))
        lines.append([f"{length // 1024}k", str(most(mine, case)), *(paired(mine, case, m, BUDGET) for m in METHODS),
                      *(above(mine, length, m) for m in METHODS)])
    return ["", markdown(["context", "prompts", "sketch alone", "+ `centroid`", "+ `phi`", "prose: alone",
                          "+ `centroid`", "+ `phi`"], lines), ""]


def cost(generate: Rows) -> list[str]:
    """The time of φ's pass over a prompt's keys, and of a token with it."""
    case = "8b-128k-b1"
    tokens = {v.origin: v.value for v in found(generate, case, over("sketch_phi", "sketch", "loop_ms"))}
    lines = [[v.origin, f"{v.value:.1f} %", f"{tokens[v.origin]:.2f} ×"]
             for v in found(generate, case, of_prompt("sketch_phi", "sketch"))]
    return ["", "Of the 8B shape, with one request of 128k tokens:", "",
            markdown(["measured on", "the pass, of the prompt's time", "a token with φ, to one without"], lines), ""]


def maps(forms: Rows, decode: Rows, real: Rows) -> list[str]:
    """Maps of keys by their cost, and what the columns are of."""
    errors = {r.get("form"): r for r in forms if (r["case"], r["metric"], r["budget"]) == (
        forms[0]["case"], "rel_err", BUDGET)}
    mine, case = first(real)
    kept, ships = (found(decode, c, lambda v: v[PLUS, "us"] - v[STEP, "us"])[0] for c in (f"{CASE}-kept", CASE))
    steps = {None: "0", "base": f"+{kept.value:.1f}", "shared64": f"+{ships.value:.1f}"}
    origins = {None: "–", "base": kept.origin, "shared64": ships.origin}
    before = of_model(real, KEPT)
    points = {None: paired(mine, case, "sketch", BUDGET), "shared64": paired(mine, case, "sketch+phi", BUDGET),
              "base": f"{paired(before, case, 'sketch+phi', BUDGET)} ({most(before, case)} prompts)"}
    lines = [[words, *("0" if form is None else f"{errors[form][x]:.0f}" for x in ("kflop_key", "bytes_kept")),
              steps[form], origins[form], f"{errors[form]['value']:.4f}", points[form]] for form, words in MAPS]
    return ["", markdown(["map of keys", "kFLOP a key", "bytes kept a key", "step, 128k [µs]", "step of",
                          "error, exact top-k", "points"], lines), "",
            "The step is of one layer and one row, with 32 query and 8 KV heads of 128. It is how much longer than a "
            "step by sketches alone. On the prompts of kept features what ships has "
            f"{paired(of_model(real, AGAIN), case, 'sketch+phi', BUDGET)} points.", ""]
