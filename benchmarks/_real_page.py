"""docs/results/real.md and its figures, from the rows of real.json: every model, every length; and a table of
docs/results/phi.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._kvpress import PRESSES
from benchmarks._peers import PEERS
from benchmarks._prompts import DENSE
from sparsekv.evaluation.figures import score_by_bytes
from sparsekv.evaluation.methods import percent, plain
from sparsekv.evaluation.tables import bytes_read, cell_text, every_method, in_order, markdown, table

TARGETS = ((0.01, -2.0), (0.02, -1.0))
"""Budget, and points of sketches and φ to full attention at least, at every length."""
AGREED = (0.05, 85.0)
"""Budget, and agreement with full attention's answers at least."""
FIRST = ("coder-1.5b", 16_384)
"""The model and the length of README's figure and table."""
LONG = "coder-1.5b-32k"
"""The same model with maps of windows of twice that length."""
WORST = {4096: f"{FIRST[0]}-4k", 8192: f"{FIRST[0]}-8k", 16_384: FIRST[0]}
"""The same model with maps of windows of each length, whose budgets pay for all that is fetched."""
AGAIN, KEPT = "coder-1.5b-again", "coder-1.5b-kept"
"""The first card's maps on those prompts that the second has: it ran by the code that kept features, with maps of keys
of four layers."""
REPEATS = {AGAIN: "README's maps, a quarter of the prompts",
           KEPT: "maps of keys of four layers, by the code that kept features",
           "coder-0.5b": "Qwen2.5-Coder-0.5B-Instruct", "smollm2-long": "SmolLM2-135M tuned to 32k"}
"""Models in rows that repeat README's measurement, and what differs."""
SAAP, ALPHAS, PUBLISHED = (f"{FIRST[0]}-{name}" for name in ("saap", "alphas", "published"))
"""Models in rows: with Saap's router, with LFPS's thresholds as they are, and with maps as the completion paper has
them, each beside full attention of its own run (docs/papers.md)."""
PIECES = (SAAP, ALPHAS, PUBLISHED)
SHORT = ("topk", "topk+phi", "sketch", "sketch+centroid", "sketch+phi")
"""Its methods, beside full attention and rivals."""
WORDS = {"full": "full attention", "topk": "exact top-k, which scores every key", "topk+phi": "… + φ",
         "topk+centroid": "exact top-k + untrained centroids", "sketch": "sketches (`sketch`)",
         "sketch+centroid": "… + untrained centroids", "sketch+phi": "**… + φ**", "router+phi": "buckets alone + φ",
         "token_select": "TokenSelect, which scores every key", "quest": "Quest", "lfps": "LFPS", "snapkv": "SnapKV",
         "pyramidkv": "PyramidKV", "streaming_llm": "StreamingLLM", "magicpig": "MagicPIG",
         "kvpress_snapkv": "SnapKV by kvpress", "kvpress_expected_attention": "Expected Attention by kvpress"}
RIVALS = (*PEERS.values(), *PRESSES)
"""Rivals that are compared: each at its best setting, others have lines in the long tables alone; by another package's
code."""
NOTES = {
    "score": "Points of 100 ± half the 95 % bootstrap interval; columns are budgets.",
    "difference": "Points above full attention, paired by prompt ± half the 95 % interval.",
    "agreement": "How much of full attention's own answer is given before the first character that differs, points of "
                 "100.",
    "same_answers": "Answers equal to full attention's as far as both go, points of 100."}


def models(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of every model and card, their cases without the model's name."""
    found: dict[str, list[dict[str, Any]]] = {}
    for r in rows:
        name, _, case = r["case"].partition(":")
        found.setdefault(f"{name} · {r['machine'].partition(',')[0]}", []).append({**r, "case": case})
    return found


def of_model(rows: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The rows of a model on every card, their cases without its name."""
    return [{**r, "case": r["case"].partition(":")[2]} for r in rows if r["case"].startswith(f"{name}:")]


CASES = {"ruler": "RULER, all tasks", "perplexity_prose": "Going on with prose",
         "perplexity_code": "Going on with program text", "long": "Long generation", "second_turn": "Second turn",
         "worst": "RULER at equal worst-case budgets"}
"""What a case's name says, in words."""


def of_card(rows: Sequence[dict[str, Any]], name: str, case: str) -> list[dict[str, Any]]:
    """The rows of a model on the card with most prompts of a case; none where the case was not measured."""
    found = [m for title, m in models(rows).items() if title.partition(" ")[0] == name]
    best = max(found, key=lambda m: prompts(m, case), default=[])
    return best if prompts(best, case) else []


def prompts(rows: Sequence[dict[str, Any]], case: str, method: str | None = None) -> int:
    """The prompts of a case, of one method where it is given; 0 where there are none."""
    return max((r.get("samples") or 0 for r in rows if r["case"] == case and r["metric"] == "score"
                and method in (None, r["method"])), default=0)


def titled(case: str) -> str:
    """`ruler@16384` in words."""
    name, _, length = case.partition("@")
    return f"{CASES.get(name, f'`{name}`')}, {round(int(length) / 1024)}k tokens" if length.isdigit() else case


def of_metric(rows: Sequence[dict[str, Any]], case: str, metric: str) -> list[dict[str, Any]]:
    """Rows of a case, differences only to full attention."""
    return [r for r in rows if r["case"] == case and r["metric"] == metric and r.get("against", "full") == "full"]


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The page of real.json."""
    parts = ["# How good are the answers of a real model?",
             "The model is as its publisher made it; nobody tuned it to retrieve. Prompts are read with full attention "
             "but for their last token. Layer 0 keeps full attention. A budget is the share of the context that a "
             "query may retrieve. A table is of one card, full attention included. real.json has the command and the "
             "commit of every row."]
    if first(rows)[0]:
        parts += [
            "![RULER score by bytes read](real.png)\n\nThe grey line is full attention. The axis begins at 60 points.",
            f"## In short, {FIRST[1] // 1024}k tokens",
            "Points to full attention, paired by prompt ± half the 95 % interval, and bytes of a sparse layer's keys "
            f"and values. Measured on {measured(*first(rows))}.", short(rows)[1],
            "The same model goes on with held-out windows of prose and of program text, 256 tokens each. Perplexity "
            "says how likely the text was. The error is the relative L2 distance of a head's output to full "
            "attention's. Perplexity may fall below full attention's, so lower is not always nearer. Equal answers "
            "are those to RULER's prompts, equal as far as both go, in points of 100.", beyond(rows)[1],
            "How one method's score stands to another's on the same prompts, in points, with the 95 % interval. Where "
            "the interval has zero in it, the difference is not significant.", pairs(rows)[1],
            "With few prompts a task, one changed answer moves the mean by more than a point. Maps were trained on the "
            "earlier part of this prose; the windows are from its later part. RULER's texts are others.",
            *after_answers(rows), *longer(rows)]
    return "\n\n".join([*parts, *sections(ours(rows))]) + "\n"


def after_answers(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Where the rows of long answers and second questions stand; nothing without such rows."""
    kinds = {r["case"].partition(":")[2].partition("@")[0] for r in rows}
    if not {"long", "second_turn"} <= kinds:
        return []
    return ["How answers of 4,096 tokens go on: [long generation](#long-generation-16k-tokens). A second question "
            "about the same text, after an answer of 1,000 tokens: [second turn](#second-turn-16k-tokens)."]


def ours(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of README's model with what the default recipe trains, but for contexts shorter than README's: of the first
    card, and of another what the first has no rows of."""
    mine = [r for r in rows if r["case"].partition(":")[0] == FIRST[0]] or list(rows)
    best, _ = first(rows)
    machine, held = best[0]["machine"] if best else None, {f"{FIRST[0]}:{r['case']}" for r in best}
    return [r for r in mine if not is_shorter(r) and (r["machine"] == machine or r["case"] not in held)]


def is_shorter(row: dict[str, Any]) -> bool:
    """Whether a row is of README's model at a shorter context than README's."""
    length = row["case"].rpartition("@")[2]
    return (row["case"].partition(":")[0] == FIRST[0] and length.isdigit()
            and round(int(length) / 1024) < FIRST[1] // 1024)


def card(r: dict[str, Any]) -> str:
    """The machine of a row and its commit."""
    name = r["machine"].partition(",")[0].replace("NVIDIA ", "").replace(" 80GB HBM3", "")
    return f"one {name}, commit{'s' if ' and ' in r['commit'] else ''} {r['commit']}"


def measured(rows: Sequence[dict[str, Any]], case: str) -> str:
    """The card and commit of a case's scores."""
    return card(next(r for r in of_metric(rows, case, "score") if r["method"] == "full"))


def longer(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The section of twice README's length: maps of windows of either length, and which tasks lose."""
    length = 2 * FIRST[1]
    case = f"ruler@{length}"
    found = {name: mine for name in (FIRST[0], LONG)
             if of_metric(mine := of_card(rows, name, case), case, "difference")}
    lines = [[mine[0]["trained"].partition(",")[0], str(most(mine, case)),
              *(paired(mine, case, m, b) for m in ("sketch", "sketch+phi") for b in (0.01, 0.02)), measured(mine, case)]
             for mine in found.values()]
    if not lines:
        return []
    parts = [f"## In short, {length // 1024}k tokens", "Points to full attention ± half the 95 % interval.",
             markdown(["maps of", "prompts", "sketch: 1 %", "2 %", "sketch + φ: 1 %", "2 %", "measured on"], lines)]
    tasks = lost(found.get(LONG, []), length)
    if tasks:
        parts += [f"By task, with maps of windows of {length // 1024}k, in points of that task. A task has "
                  f"{most(found[LONG], tasks[0][0])} prompts. Tasks that are not named have no difference under φ.",
                  markdown(["task", "sketch: 1 %", "2 %", "sketch + φ: 1 %", "2 %"],
                           [[task.partition("@")[0], *(minus(f"{value:+.1f}") for value in values)]
                            for task, values in tasks])]
    return parts


def lost(rows: Sequence[dict[str, Any]], length: int) -> list[tuple[str, list[float]]]:
    """Tasks whose score differs from full attention's under φ, and the differences under sketches and φ."""
    scores = {(r["case"], r["method"], r["budget"]): r["value"] for r in rows
              if r["metric"] == "score" and r["case"].endswith(f"@{length}") and not r["case"].startswith("ruler@")}
    made = []
    for case in dict.fromkeys(c for c, _, _ in scores):
        full = scores[case, "full", None]
        values = [scores[case, m, b] - full for m in ("sketch", "sketch+phi") for b in (0.01, 0.02)]
        if any(abs(v) > 1e-6 for v in values[2:]):
            made.append((case, values))
    return sorted(made, key=lambda m: sum(m[1][2:]))


def most(rows: Sequence[dict[str, Any]], case: str) -> int:
    """The prompts of a case."""
    return max(r["samples"] for r in rows if r["case"] == case and r["metric"] == "score" and r["value"] is not None)


def other_page(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of models and trainings that are not README's."""
    return "\n\n".join([
        "# What do other trainings give, and the rivals?",
        "README's model with router and maps that were trained otherwise, and other models, each as it was measured, "
        "with the rivals that were run beside it. [The first page](real.md) has the default recipe's.",
        *sections([r for r in rows if r["case"].partition(":")[0] not in (FIRST[0], *REPEATS, *PIECES)],
                   tasks=False)]) + "\n"


def repeats_page(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of the same measurement with another training, or of another model."""
    case, lines = f"ruler@{FIRST[1]}", []
    for words, mine in (*((words, of_model(rows, name)) for name, words in REPEATS.items()),
                        ("the same recipe trained on another card ([rows](real-untrained.md))", second(rows))):
        if of_metric(mine, case, "difference"):
            lines += [[words if m == "sketch" else "…", str(most(mine, case)), f"`{m}`",
                       *(paired(mine, case, m, b) for b in (0.01, 0.02, 0.05))] for m in ("sketch", "sketch+phi")]
    return "\n\n".join([
        "# Is it the same again, and with a smaller model?",
        "README's measurement on a quarter of the prompts, with maps of keys of four layers on the same, by a model of "
        "a third of the size, and with another training. `smollm2-long` is [SmolLM2-135M tuned to 32k](quality.md), "
        "whose prompts are read sparsely. [The first page](real.md) says what is measured and how.",
        f"Points to full attention at {FIRST[1] // 1024}k tokens ± half the 95 % interval.",
        markdown(["what is measured", "prompts", "method", "1 %", "2 %", "5 %"], lines),
        *sections([r for r in rows if r["case"].partition(":")[0] in REPEATS], tasks=False)]) + "\n"


def untrained_page(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of README's model on the cards that are not the first, which have untrained completions."""
    here = {id(r) for r in ours(rows)}
    return "\n\n".join([
        "# And with completions that nobody trained?",
        "README's model and recipe, another training of it, on another card: with untrained completions (centroids, "
        "uniform samples), the other fit of the codes, a list for each query head, wide budgets, and rivals by another "
        "package's code. Last come [pieces of the papers](../papers.md): a router as Saap trains it, LFPS's "
        "thresholds, and maps as the completion paper publishes them. [The first page](real.md) says what is "
        "measured and how.",
        *sections([r for r in rows if (r["case"].partition(":")[0] == FIRST[0] and id(r) not in here
                                       and not is_shorter(r)) or r["case"].partition(":")[0] in PIECES],
                  tasks=False)]) + "\n"


def shorter_page(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of README's model at shorter contexts."""
    return "\n\n".join([
        "# And at shorter contexts?",
        "README's model and recipe at contexts shorter than the windows that its maps were trained on. "
        "[The first page](real.md) says what is measured and how.",
        "## At equal worst-case budgets",
        "Points that φ adds to exact top-k, paired by prompt ± half the 95 % interval. A budget pays for sink, local "
        "window, φ's cache and the tokens retrieved, as if all were fetched for one token (the completion paper's "
        "table 2).", by_length(rows)[1],
        "Maps of windows of 4k and 8k were measured on an H200 ([rows](real-others.md)). The run at 8k was cut: it has "
        "two prompts of each of twelve tasks, without `niah_single_1`.",
        *sections([r for r in rows if is_shorter(r)])]) + "\n"


def sections(rows: Sequence[dict[str, Any]], tasks: bool = True) -> list[str]:
    """Every table of every model and card; with `tasks` every task's."""
    parts: list[str] = []
    for title, mine in models(rows).items():
        one = mine[0]
        trained = f" Router and maps were trained on {one['trained']}." if "trained" in one else ""
        form = "not quantised" if one["quantisation"] == "none" else one["quantisation"]
        parts += [f"## {title}", f"{form}, sha256 `{one['weights_sha256'][:16]}…`; commits "
                  f"{', '.join(sorted({c for r in mine for c in r['commit'].split(' and ')}))}.{trained}"]
        cases = list(dict.fromkeys(r["case"] for r in mine))
        for case in (c for c in cases if c.startswith("ruler@")):
            name, length = title.partition(" ")[0], case.partition("@")[2]
            figure = [f"![{titled(case)}, score by bytes](real-{name}-{length}.png)"] if (
                several(mine, case) and has_figure(rows, title, case)) else []
            parts += [f"### {titled(case)}", *figure, samples(mine, case)]
            for metric, note in NOTES.items():
                found = of_metric(mine, case, metric)
                if found:
                    parts += [note, markdown(*of_prompts(*table(found, case, every_method(found), metric), found))]
            parts += ["Bytes that a step of a sparse layer reads, of its keys' and values'.",
                      markdown(*bytes_read(mine, case)), *judged(mine, case)]
        for case in (c for c in cases if c.startswith("perplexity")):
            parts += [f"### {titled(case)}", continued(mine, case)]
        for case in (c for c in cases if c.startswith("worst@")):
            parts += [f"### {titled(case)}", "A budget pays for sink, local window, φ's cache and the tokens "
                      "retrieved, as if all were fetched for one token (the completion paper's table 2). Points ± half "
                      "the 95 % interval.", equal_budgets(mine, case)]
        for length in sorted({r["length"] for r in mine if r["case"].startswith("prefill")}):
            parts += [f"### Prompts read sparsely, {length // 1024}k tokens",
                      "All are decoded by sketch + φ alike; the first line's prompts are read "
                      "densely. Points of RULER to these, and perplexities above theirs, are paired ± half the "
                      "95 % interval. Of a text its own tokens count (`prompt`), or those that go on with it "
                      "(`perplexity`).", prompts_read(mine, length)]
        for case in (c for c in cases if c.startswith("long@")):
            parts += [f"### {titled(case)}", "A method writes 4,096 tokens after a window of text, and full attention "
                      "judges every one. A loss near zero says that the text repeats itself; there KL says little. "
                      + windows_of(mine, case), generated(mine, case)]
        for case in (c for c in cases if c.startswith("second_turn@")):
            parts += [f"### {titled(case)}", "Second questions answered, points of 100 ± half the 95 % interval.",
                      markdown(*table([r for r in mine if r["case"] == case], case, every_method(mine)))]
        single = [c for c in cases if tasks and "@" in c and not c.startswith(
            ("ruler@", "perplexity", "long@", "second_turn@", "prefill", "worst@"))]
        parts += ["### Each task"] if single else []
        for case in single:
            parts += [f"#### {titled(case)}", markdown(*table(mine, case, every_method(mine)))]
    return parts


def of_prompts(
    header: list[str], lines: list[list[str]], rows: Sequence[dict[str, Any]],
) -> tuple[list[str], list[list[str]]]:
    """A table whose cells say of how many prompts they are, where that is fewer than the most."""
    most = max(r["samples"] for r in rows)
    counts = {(r["method"], None if r["budget"] is None else percent(r["budget"])): r["samples"] for r in rows}
    made = []
    for method, *cells in lines:
        found = [counts.get((method, None), counts.get((method, b), most)) for b in header[1:]]
        made.append([method, *(cell if n == most or cell == "–" else f"{cell} ({n})"
                               for cell, n in zip(cells, found, strict=True))])
    return header, made


def samples(rows: Sequence[dict[str, Any]], case: str) -> str:
    """How many prompts a mean is of."""
    return (f"{most(rows, case)} prompts of all tasks together; cells of fewer say how many, and are compared by the "
            "differences, which are of the same prompts.")


def judged(rows: Sequence[dict[str, Any]], case: str) -> list[str]:
    """The table of `targets`, and its heading."""
    lines = [line[:3] for line in targets(rows, case)]
    return ["What was to be reached.", markdown(["target", "found", "reached"], lines)] if lines else []


def targets(rows: Sequence[dict[str, Any]], case: str) -> list[list[str]]:
    """What the project set out to reach, what was found, whether it is reached, and by how many prompts; against rivals
    and untrained completions a difference counts where its interval is above zero."""
    known = {(r["method"], r["against"], r["budget"]): r for r in rows if r["case"] == case
             and r["metric"] == "difference"}
    lines = []
    for budget, least in TARGETS:
        found = known.get(("sketch+phi", "full", budget))
        if found is not None:
            points = f"{-least:g} point{'s' * (least != -1.0)}"
            lines.append([f"sketch+phi is within {points} of full attention at {percent(budget)}",
                          cell_text(found, "+"), "yes" if found["value"] >= least else "no", str(found["samples"])])
    agreed = next((r for r in rows if r["case"] == case and r["metric"] == "agreement"
                   and (r["method"], r["budget"]) == ("sketch+phi", AGREED[0])), None)
    if agreed is not None:
        lines.append([f"sketch+phi agrees with full attention to {AGREED[1]:g} points at {percent(AGREED[0])}",
                      cell_text(agreed), "yes" if agreed["value"] >= AGREED[1] else "no", str(agreed["samples"])])
    for (method, against, budget), found in sorted(known.items(), key=str):
        untrained = against in ("sketch+centroid", "sketch+uniform", "sketch:untrained")
        if method == "sketch+phi" and (against in RIVALS or untrained):
            lines.append([f"sketch+phi is above {against} at {percent(budget)}", cell_text(found, "+"),
                          "yes" if found["low"] > 0 else "no", str(found["samples"])])
    return lines


def missed(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A line a target that README's model does not reach, at README's length and at twice that, there with maps of
    windows of either length too: target, prompts, what was found. What the first card has is not asked of another."""
    (mine, case), twice = first(rows), f"ruler@{2 * FIRST[1]}"
    of_long = f"maps of windows of {2 * FIRST[1] // 1024}k"
    lines: dict[str, tuple[str, str, str]] = {}
    for some, of, more in ((mine, case, ""), (second(rows), case, ""), (of_card(rows, FIRST[0], twice), twice, ""),
                           (of_card(rows, LONG, twice), twice, f", {of_long}")):
        for what, found, reached, prompts in targets(some, of):
            lines.setdefault(f"{what}, {int(of.partition('@')[2]) // 1024}k tokens{more}",
                             (prompts, minus(found), reached))
    return [[what, prompts, found] for what, (prompts, found, reached) in lines.items() if reached == "no"]


def continued(rows: Sequence[dict[str, Any]], case: str) -> str:
    """Perplexity, its ratio to full attention's on the same windows and the error of attention, by method and
    budget."""
    parts = []
    for metric, form, note in (
            ("perplexity", "{:.4g}", "Perplexity; cells of fewer windows say how many."),
            ("perplexity_ratio", "{:+.2%}", "Above full attention's on the same windows ± half the 95 % interval."),
            ("rel_err", "{:.3f}", "Relative error of the sparse layers' attention.")):
        found = [r for r in rows if r["case"] == case and r["metric"] == metric]
        budgets = sorted({r["budget"] for r in found if r["budget"] is not None})
        known, most = {(r["method"], r["budget"]): r for r in found}, max((r["samples"] for r in found), default=0)
        lines = []
        for method in in_order({m for m, _ in known}, ("full", *every_method(rows))):
            cells = [known.get((method, None), known.get((method, b))) for b in budgets]
            lines.append([method, *("–" if r is None else form.format(r["value"] - (metric == "perplexity_ratio")) + (
                f" ± {(r['high'] - r['low']) / 2:.2%}" if metric == "perplexity_ratio" else "") + (
                "" if r["samples"] == most else f" ({r['samples']})") for r in cells)])
        if lines:
            parts += [note, markdown(["method", *map(percent, budgets)], lines)]
    return "\n\n".join(parts)


def prompts_read(rows: Sequence[dict[str, Any]], length: int) -> str:
    """Prompts of a length read in several ways: pairs of query and key, points, perplexities."""
    mine = [r for r in rows if r["case"].startswith("prefill") and r["length"] == length]
    mean = f"prefill@{length}"
    texts = list(dict.fromkeys(r["case"] for r in mine if r["metric"] == "perplexity_ratio"))
    budget = next((percent(r["budget"]) for r in mine if r["budget"]), "")

    def cell(case: str, method: str, metric: str, form: str, less: float = 0.0) -> str:
        found = [r for r in mine if (r["case"], r["method"], r["metric"]) == (case, method, metric)
                 and r.get("against", DENSE) == DENSE and r["value"] is not None]
        return "–" if not found else minus(form.format(found[0]["value"] - less) + " ± " + form.format(
            (found[0]["high"] - found[0]["low"]) / 2).lstrip("+"))

    lines = [[read_by(method), next(f"{r['pairs']:.1%}" for r in mine if r["method"] == method),
              str(max((r["samples"] for r in mine if (r["case"], r["method"]) == (mean, method)), default=0)),
              f"0 (score {cell(mean, method, 'score', '{:.1f}')})" if method == DENSE
              else cell(mean, method, "difference", "{:+.1f}"),
              *(cell(c, method, "perplexity_ratio", "{:+.2%}", 1.0) for c in texts)]
             for method in dict.fromkeys(r["method"] for r in mine)]
    titles = [c.removeprefix("prefill_").partition("@")[0].replace("_", ", ") for c in texts]
    return markdown([f"prompt read by, decoded at {budget}", "pairs", "prompts", "points", *titles], lines)


def read_by(method: str) -> str:
    """A reading of a prompt in words: `prompt:share=0.1`."""
    rule, _, sizes = method.partition(":")
    if rule == DENSE:
        return "full attention"
    return f"`{sizes}`" if rule == "prompt" else f"XAttention's rule, as many pairs as `{sizes}`"


def equal_budgets(rows: Sequence[dict[str, Any]], case: str) -> str:
    """Points to full attention, and of completion, by budget."""
    found = {(r["method"], r["against"], r["budget"]): r for r in rows if r["case"] == case
             and r["metric"] == "difference"}
    budgets = sorted({b for *_, b in found})
    lines = [[f"`{m}` above `{of}`", *(minus(cell_text(found.get((m, of, b)), "+")) for b in budgets)]
             for m, of in (("topk", "full"), ("topk+phi", "full"), ("topk+phi", "topk"))]
    return markdown(["", *map(percent, budgets)], lines)


def by_length(rows: Sequence[dict[str, Any]], method: str = "topk+phi", against: str = "topk") -> list[str]:
    """What completion gains at equal worst-case budgets, by context and by the windows of its maps; contexts and maps
    without rows have no line."""
    gains = {}
    for length in WORST:
        for name in dict.fromkeys((WORST[length], FIRST[0])):
            found = {r["budget"]: r for r in of_model(rows, name) if r["case"] == f"worst@{length}"
                     and (r["metric"], r["method"], r.get("against")) == ("difference", method, against)}
            if found:
                gains[length, name] = found
    if not gains:
        return ["", "Not measured.", ""]
    budgets = sorted({b for found in gains.values() for b in found})
    windows = {name: f"{length // 1024}k" for length, name in WORST.items()}
    lines = [[f"{length // 1024}k", windows[name], str(max(r["samples"] for r in found.values())),
              *(minus(cell_text(found.get(b), "+")) for b in budgets)] for (length, name), found in gains.items()]
    return ["", markdown(["context", "maps of windows of", "prompts", *map(percent, budgets)], lines), ""]


def windows_of(rows: Sequence[dict[str, Any]], case: str) -> str:
    """Which cards the windows of long generation are of, where these are several."""
    joined: dict[tuple[str, str], dict[str, int]] = {}
    for r in rows:
        if r["case"] == case:
            for o in r.get("origins", ()):
                of = joined.setdefault((o["machine"].partition(",")[0], o["commit"]), {})
                of[percent(r["budget"])] = o["samples"]
    if not joined:
        return ""
    parts = [f"{' and '.join(f'{n} at {b}' for b, n in of.items())} on {machine}, commit {commit}"
             for (machine, commit), of in joined.items()]
    return f"Windows: {'; '.join(parts)}. Each is written and judged on one card."


VOTES = f"{FIRST[0]}-votes"
"""Its rows of TokenSelect's other votes, beside full attention of their own run."""
BALLOTS = {"token_select": "sum of the heads' softmax (equation 10, the default)",
           "token_select:scaled=true": "… of scores with `1/√d`",
           "token_select:vote=hard": "heads that have the token in their own top-k (equation 9)",
           "token_select:vote=topk": "sum of raw scores (equation 8)"}


def votes(rows: Sequence[dict[str, Any]], budget: float = 0.02) -> list[str]:
    """How TokenSelect's heads vote: points to full attention and equal answers, of the same prompts."""
    case = f"ruler@{FIRST[1]}"
    mine = [*first(rows)[0], *of_model(rows, VOTES)]
    lines = []
    for method, words in BALLOTS.items():
        same = next((r for r in of_metric(mine, case, "same_answers")
                     if (r["method"], r["budget"]) == (method, budget)), None)
        if same:
            lines.append([words, paired(mine, case, method, budget), cell_text(same),
                          f"{same['machine'].partition(',')[0]}, {same['commit']}"])
    return ["", markdown([f"vote, {percent(budget)} of {FIRST[1] // 1024}k", "points to full attention",
                          "equal answers", "card, commit"], lines), ""]


BUCKETS = {"topk": "exact top-k", "router:scores=mlp": "the query model as published",
           "router:scores=mean_key": "mean keys of the same buckets, moved to the request",
           "router:scores=mean_key:adapt=false": "mean keys of the same buckets as trained"}


def own_run(rows: Sequence[dict[str, Any]], name: str) -> tuple[list[dict[str, Any]], str]:
    """The rows of a model on the card with most prompts at README's length, and in words what they are of; nothing
    where it was not measured."""
    case = f"ruler@{FIRST[1]}"
    mine = of_card(rows, name, case)
    return mine, f"{most(mine, case)} prompts, {measured(mine, case)}." if mine else ""


def saap(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Saap's query model on tasks, and its buckets scored by mean keys: points to full attention and tokens read."""
    case, (mine, of) = f"ruler@{FIRST[1]}", own_run(rows, SAAP)
    read = {(r["method"], r["budget"]): r["read"] for r in of_metric(mine, case, "score") if r["budget"] is not None}
    budgets = sorted({b for _, b in read})
    lines = [[words, *(paired(mine, case, m, b) for b in budgets),
              *(f"{100 * read[m, b]:.1f} %" if (m, b) in read else "–" for b in budgets)]
             for m, words in BUCKETS.items() if any(m == k for k, _ in read)]
    return [] if not mine else ["", markdown(
        ["chosen by", *(f"points: {percent(b)}" if not i else percent(b) for i, b in enumerate(budgets)),
         *(f"tokens read: {percent(b)}" if not i else percent(b) for i, b in enumerate(budgets))], lines), "", of, ""]


def alphas(rows: Sequence[dict[str, Any]], budget: float = 0.02) -> list[str]:
    """LFPS's thresholds as they are: tokens that a step reads, points to full attention, equal answers."""
    case, (mine, of) = f"ruler@{FIRST[1]}", own_run(rows, ALPHAS)
    same = {r["method"]: r for r in of_metric(mine, case, "same_answers")}
    lines = [[r["method"].partition("alpha=")[2], f"{100 * r['read']:.1f} %", f"{100 * r['bytes_share']:.1f} %",
              paired(mine, case, r["method"], budget), cell_text(same[r["method"]])]
             for r in of_metric(mine, case, "score") if r["budget"] == budget]
    header = ["α", "tokens read", "bytes of a sparse layer", "points to full attention", "equal answers"]
    return ["", markdown(header, lines), "", of, ""] if mine else []


def published(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Maps as the completion paper publishes them beside the recipe's: points to full attention by budget."""
    case, budgets, recipe, mine = f"ruler@{FIRST[1]}", (0.01, 0.02, 0.05), first(rows)[0], own_run(rows, PUBLISHED)[0]
    if not mine:
        return []
    lines = []
    for alone in ("topk", "sketch"):
        lines += [[words, f"`{m}`", *(paired(some, case, m, b) for b in budgets), str(prompts(some, case, m))]
                  for some, m, words in ((mine, alone, "none"), (mine, f"{alone}+phi", "as published"),
                                         (recipe, f"{alone}+phi", "the recipe's")) if prompts(some, case, m)]
    return ["", markdown(["maps", "method", *map(percent, budgets), "prompts"], lines), "",
            f"The recipe's are of {measured(recipe, case)}; the others of {measured(mine, case)}.", ""]


def generated(rows: Sequence[dict[str, Any]], case: str) -> str:
    """What full attention says of what a method wrote, by quarter of the positions and on both sides of the decode
    window; of KL also the last quarter to the first."""
    names = {"kl": "KL, nats a token", "agrees": "same likeliest token", "loss": "full attention's loss, nats a token"}
    columns = [("quarter", 1), ("quarter", 2), ("quarter", 3), ("quarter", 4), ("past_window", False),
               ("past_window", True)]
    mine = [r for r in rows if r["case"] == case]
    lines = []
    for method, budget, metric in dict.fromkeys((r["method"], r["budget"], r["metric"]) for r in mine):
        found = {next(((k, r[k]) for k in ("quarter", "past_window") if k in r), None): r for r in mine
                 if (r["method"], r["budget"], r["metric"]) == (method, budget, metric)}
        first, last = (found.get(("quarter", n)) for n in (1, 4))
        lines.append([method, "" if budget is None else percent(budget), str(next(iter(found.values()))["samples"]),
                      names[metric], *(f"{found[c]['value']:.4f}" if c in found else "–" for c in (None, *columns)),
                      f"{last['value'] / first['value']:.2f}" if metric == "kl" and first and last else ""])
    return markdown(["method", "budget", "windows", "measured", "all", "1st quarter", "2nd", "3rd", "4th",
                     "in the decode window", "past it", "4th / 1st"], lines)


def several(rows: Sequence[dict[str, Any]], case: str) -> bool:
    """Whether a case has several budgets, so that a figure tells something."""
    return len({r["budget"] for r in rows if r["case"] == case and r["budget"] is not None}) > 1


def has_figure(rows: Sequence[dict[str, Any]], title: str, case: str) -> bool:
    """Whether a model's card is the one with most prompts of a case."""
    name, _, machine = title.partition(" · ")
    return of_card(rows, name, case)[0]["machine"].partition(",")[0] == machine


def figures(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Score by bytes, full attention a line: a figure a model and length (`real-coder-1.5b-16384.png`)."""
    for title, mine in models(rows).items():
        for case in dict.fromkeys(r["case"] for r in mine if r["case"].startswith("ruler@")):
            if not several(mine, case) or not has_figure(rows, title, case):
                continue
            drawn = score_by_bytes(placed(mine, case), case,
                                   in_order({r["method"] for r in mine}, ["full", *every_method(mine)]))
            (folder / f"real-{title.partition(' ')[0]}-{case.partition('@')[2]}.png").write_bytes(drawn.png)


def first(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The rows of README's model on the card with most prompts, and their case of RULER."""
    name, length = FIRST
    case = f"ruler@{length}"
    return of_card(rows, name, case), case


def second(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of README's model on other cards, which have methods that the first has not."""
    mine, _ = first(rows)
    return [r for r in of_model(rows, FIRST[0]) if mine and r["machine"] != mine[0]["machine"]]


def placed(rows: Sequence[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    """Rows of scores for a figure: a method of fewer prompts than full attention stands at full attention's score plus
    its paired difference, since other prompts are easier or harder."""
    scores = of_metric(rows, case, "score")
    full = next((r for r in scores if r["method"] == "full"), None)
    above = {(r["method"], r["budget"]): r["value"] for r in of_metric(rows, case, "difference")}
    return [r if full is None or r["value"] is None or (r["method"], r["budget"]) not in above else
            {**r, "value": full["value"] + above[r["method"], r["budget"]]} for r in scores]


def rivals_of(rows: Sequence[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    """The rivals' scores, the best first."""
    found = [r for r in of_metric(rows, case, "score") if r["method"] in RIVALS]
    return sorted(found, key=lambda r: r["value"], reverse=True)


def best_rivals(rows: Sequence[dict[str, Any]], case: str) -> list[str]:
    """The rival of the best score, and the best of those that read less than half of a sparse layer's bytes."""
    found = rivals_of(rows, case)
    return list(dict.fromkeys(r["method"] for some in (found, [r for r in found if r["bytes_share"] < 0.5])
                              for r in some[:1]))


def paired(rows: Sequence[dict[str, Any]], case: str, method: str, budget: float) -> str:
    """Points above full attention, with half of the interval."""
    return minus(cell_text(next((r for r in of_metric(rows, case, "difference")
                                 if (r["method"], r["budget"]) == (method, budget)), None), "+"))


def minus(text: str) -> str:
    return text.replace("-", "−").replace("+0.0 ± 0.0", "0.0 ± 0.0")


def short(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The short table: points to full attention and bytes of a sparse layer, by budget, rivals behind."""
    mine, case = first(rows)
    scores = {(r["method"], r["budget"]): r for r in of_metric(mine, case, "score")}
    budgets = sorted({b for m, b in scores if b is not None and b <= AGREED[0] and m in SHORT})
    others = list(dict.fromkeys(r["method"] for r in rivals_of(mine, case)))
    lines = []
    for method in (*(m for m in SHORT if any(m == k for k, _ in scores)), *others):
        share = [f"{100 * scores[method, b]['bytes_share']:.1f} %" if (method, b) in scores else "–" for b in budgets]
        lines.append([WORDS[plain(method)], str(prompts(mine, case, method)),
                      *(paired(mine, case, method, b) for b in budgets), *share])
    header = ["what a step reads", "prompts", *(f"points to full attention: {percent(b)}" if not i else percent(b)
                                     for i, b in enumerate(budgets)),
              *(f"bytes: {percent(b)}" if not i else percent(b) for i, b in enumerate(budgets))]
    return ["", "\n\n".join([markdown(header, lines), *by_others(second(rows), case, set(others))]), ""]


def by_others(rows: Sequence[dict[str, Any]], case: str, shown: set[str]) -> list[str]:
    """Rivals that only another card has."""
    found = [r for r in rivals_of(rows, case) if r["method"] not in shown]
    if not found:
        return []
    return [f"On {found[0]['machine'].partition(',')[0]}, {found[0]['samples']} prompts:", markdown(
        ["what a step reads", "budget", "points to full attention", "bytes"],
        [[WORDS[plain(r["method"])], percent(r["budget"]), paired(rows, case, r["method"], r["budget"]),
          f"{100 * r['bytes_share']:.1f} %"] for r in found])]


def beyond(rows: Sequence[dict[str, Any]], budget: float = 0.01) -> list[str]:
    """The second table: perplexity and error of attention on texts, and answers equal to full attention's."""
    mine, case = first(rows)
    lines = [[WORDS[m], *text_cells(mine, m, budget),
              next((cell_text(r) for r in of_metric(mine, case, "same_answers")
                    if (r["method"], r["budget"]) == (m, budget)), "–")] for m in SHORT]
    return ["", markdown([f"at {percent(budget)}", *TEXT_COLUMNS, "answers equal to full attention's"], lines), ""]


PAIRS = (("topk", "full"), ("sketch", "full"), ("sketch+phi", "full"), ("topk+phi", "topk"), ("topk+centroid", "topk"),
         ("topk+phi", "topk+centroid"), ("topk+phi", "topk+uniform"), ("sketch+phi", "sketch"),
         ("sketch+centroid", "sketch"), ("sketch+phi", "sketch+centroid"), ("sketch+phi", "sketch+uniform"),
         ("sketch+phi", "token_select"), ("sketch+phi", "lfps"), ("sketch+phi", "quest"), ("sketch+phi", "snapkv"))
"""What is compared."""


def pairs(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Differences between methods, paired by prompt, with their intervals; those that the first card lacks by another's
    rows."""
    mine, case = first(rows)
    other, parts, shown = second(rows), [], set()
    for some in (mine, other):
        known = {(r["method"], plain(r["against"]), r["budget"]): r for r in some
                 if r["case"] == case and r["metric"] == "difference"
                 and (r["against"] in RIVALS or r["against"] == plain(r["against"]))}
        here = [p for p in PAIRS if p not in shown and any(k[:2] == p for k in known)]
        if not here:
            continue
        shown |= set(here)
        budgets = sorted({b for *p, b in known if tuple(p) in here})
        if some is other:
            counts = {r["samples"] for k, r in known.items() if k[:2] in here}
            parts.append(f"Other comparisons are of {' or '.join(map(str, sorted(counts)))} prompts, on "
                         f"{other[0]['machine'].partition(',')[0]} ([rows](real-untrained.md)):")
        parts.append(markdown(["", *map(percent, budgets)],
                              [[f"`{m}` above `{of}`", *(interval(known.get((m, of, b))) for b in budgets)]
                               for m, of in here]))
    return ["", "\n\n".join(parts), ""]


def interval(found: dict[str, Any] | None) -> str:
    return "–" if found is None else minus(
        f"{found['value']:+.1f} ({bound(found['low'])} to {bound(found['high'])})")


def bound(value: float) -> str:
    """An end of an interval, with a second decimal where the first would hide on which side of zero it is."""
    return f"{value:.2f}" if value and abs(value) < 0.05 else f"{value:.1f}"


TEXT_COLUMNS = ("perplexity above full attention's: prose", "program text", "error of attention: prose", "program text")


def text_cells(rows: Sequence[dict[str, Any]], method: str, budget: float) -> list[str]:
    """The ratio of perplexity and the error of attention on prose and on code, at README's length."""
    cells = []
    for metric in ("perplexity_ratio", "rel_err"):
        for text in ("prose", "code"):
            found = next((r for r in of_metric(rows, f"perplexity_{text}@{FIRST[1]}", metric)
                          if (r["method"], r["budget"]) == (method, budget)), None)
            if found is None:
                cells.append("–")
            elif metric == "rel_err":
                cells.append(f"{found['value']:.3f}")
            else:
                half = 50 * (found["high"] - found["low"])
                cells.append(minus(f"{100 * (found['value'] - 1):+.1f} ± {half:.1f} %"))
    return cells


def by_answers(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Tables of docs/results/phi.md: answers by maps of four layers and by those that ship, at README's length and at
    twice that."""
    budgets, forms = (0.01, 0.02), {KEPT: "four layers of 256 in each half", AGAIN: "what ships"}
    parts = []
    for length in (FIRST[1], 2 * FIRST[1]):
        case = f"ruler@{length}"
        held = {name: of_card(rows, name, case) for name in forms}
        if not all(held.values()):
            continue

        def line(name: str, method: str, case: str = case, held: Any = held) -> list[str]:
            agreed = {r["budget"]: r for r in of_metric(held[name], case, "agreement") if r["method"] == method}
            return [forms[name], f"`{method}`", *(paired(held[name], case, method, b) for b in budgets),
                    *(cell_text(agreed.get(b)) for b in budgets)]

        parts += [f"{most(held[KEPT], case)} prompts of {length // 1024}k:", markdown(
            ["map of keys", "method", *(f"{m}, {percent(b)}" for m in ("points", "agreement") for b in budgets)],
            [line(name, m) for name in forms for m in ("topk+phi", "sketch", "sketch+phi")])]
    if not parts:
        return []
    commit = of_model(rows, KEPT)[0]["commit"]
    return [f"Answers are to the same prompts, by maps of 24 windows of {FIRST[1] // 1024}k and 2500 steps. The first "
            f"form is of the code of {commit}, which keeps features. Its windows are all of prose. Points are to full "
            "attention. Agreement is how much of its answer is given before the first character that differs.", *parts]


def by_text(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A table of docs/results/phi.md: what router and maps were trained on, and what that does to points, perplexity
    and error; untrained completion first."""
    case = f"ruler@{FIRST[1]}"
    mine, _ = first(rows)
    untrained = next((m for m in (mine, second(rows))
                      if any((r["case"], r["method"]) == (case, "topk+centroid") for r in m)), mine)

    def line(of: Sequence[dict[str, Any]], trained: str, method: str) -> list[str]:
        return [trained, f"`{method}`", *(paired(of, case, method, b) for b in (0.01, 0.02, 0.05)),
                *text_cells(of, method, 0.01)]

    lines = [line(untrained, "nothing", "topk"), line(untrained, "…", "topk+centroid")]
    for title, found in models(rows).items():
        if title.startswith(FIRST[0]) and not title.startswith(AGAIN):
            made = [line(found, "…", m) for m in ("sketch", "sketch+centroid", "topk+phi", "sketch+phi", "router+phi")]
            made = [x for x in made if set(x[2:]) != {"–"}]
            if not made:
                continue
            commits = ", ".join(dict.fromkeys(r["commit"] for r in of_metric(found, case, "difference")
                                              if r["method"] in ("sketch", "sketch+phi")))
            lines += [[f"{found[0]['trained']} ({commits})", *made[0][1:]], *made[1:]]
    header = ["router and maps trained on", "method", "points to full attention: 1 %", "2 %", "5 %",
              *(c if i % 2 else c.replace(":", " at 1 %:") for i, c in enumerate(TEXT_COLUMNS))]
    return ["", markdown(header, lines), ""]
