"""docs/results/phi.md with its figure: what training feature maps buys, and their forms, by errors on held-out windows
of a real model (phi-training.json, phi-forms.json)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks._first_page import card
from benchmarks._real_page import minus
from sparsekv.evaluation.canvas import INK, Drawing, canvas, drawn
from sparsekv.evaluation.methods import percent
from sparsekv.evaluation.tables import markdown

HELD = {"prose@16384": "prose, 16k", "code@16384": "program text, 16k", "prose@32768": "prose, 32k"}
TEXTS = {"prose": "prose", "code": "program text", "made": "made-up text", "own": "the model's own text"}
METRICS = {"rel_err": "Relative error of the attention output", "kl": "KL of the attention to full attention's [nats]"}
BUDGETS = (0.01, 0.02)
"""At which forms are compared."""
FORMS = {
    "base": "four layers of 256 in each half",
    "shared64": "one hidden layer of 64 in each half, features of both (**what ships**)",
    "shared64 q128": "… and a map of queries half as wide",
    "shared64 q2blocks": "… and a map of queries of two blocks",
    "shared64 r64": "… and half of the features",
    "shared32": "one hidden layer of 32 in each half, features of both",
    "shared128": "one hidden layer of 128 in each half, features of both",
    "sep64": "one hidden layer of 64 in each half, features of its own",
    "shared48 r192": "one hidden layer of 48 in each half, features of both"}
"""What rows call a form, and what it is."""


def trained_on(r: dict[str, Any]) -> str:
    """The text of a training in words: `12 of prose, 12 of program text`."""
    if len(r["text"]) == 1:
        return TEXTS[next(iter(r["text"]))]
    return ", ".join(f"{n} of {TEXTS[name]}" for name, n in r["text"].items())


def trainings(rows: Sequence[dict[str, Any]], budget: float | None = 0.01, metric: str = "rel_err") -> list[list[str]]:
    """Header and a line a training: what it was of, and one metric on every held-out text."""
    method = "topk+phi" if budget else "sink_tail+phi"
    known: dict[tuple[Any, ...], dict[str, float]] = {}
    for r in rows:
        if (r["method"], r["metric"], r.get("budget")) == (method, metric, budget):
            known.setdefault(_training(r), {})[r["case"]] = r["value"]
    spent = {_training(r): r["value"] for r in rows if r["metric"] == "seconds" and r["case"] == "training"}
    lines = []
    if metric == "rel_err":
        alone = {r["case"]: r["value"] for r in rows if (r["method"], r.get("budget")) == (method[:-4], budget)}
        lines.append(["no maps", "", "", "", "", *(f"{alone[h]:.3f}" if h in alone else "–" for h in HELD)])
    for of, found in known.items():
        text, windows, length, steps = of
        lines.append([text, str(windows), f"{length // 1024}k", str(steps), f"{spent[of]:.0f}",
                      *(f"{found[h]:.3f}" if h in found else "–" for h in HELD)])
    return [["text", "windows", "length", "steps", "seconds", *HELD.values()], *lines]


def _training(r: dict[str, Any]) -> tuple[str, int, int, int]:
    return trained_on(r), r["windows"], r["length"], r["steps"]


def elsewhere(rows: Sequence[dict[str, Any]]) -> str:
    """Which trainings are of another card or commit than the first."""
    one, found = rows[0], dict[tuple[str, str], list[str]]()
    for r in rows:
        here = r["machine"].partition(",")[0], r["commit"]
        if r["case"] == "training" and here != (one["machine"].partition(",")[0], one["commit"]):
            found.setdefault(here, []).append(f"{r['windows']} windows and {r['steps']} steps")
    return "".join(f" Trainings of {', and those of '.join(of)}{',' * (len(of) > 1)} are of {machine}, commit "
                   f"{commit}. Their seconds do not compare." for (machine, commit), of in found.items())


def by_entropy(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The section of heads by the entropy of full attention, of the first training that has it."""
    found = [r for r in rows if r["case"].startswith("entropy@")]
    found = [r for r in found if _training(r) == _training(found[0])]
    if not found:
        return []
    errors = {(r["quarter"], r["method"]): r for r in found}
    lines = [[f"{i}", f"{errors[i, 'topk']['entropy']:.1f}", *(f"{errors[i, m]['value']:.3f}" for m in (
        "topk", "topk+phi")), f"{1 - errors[i, 'topk+phi']['value'] / errors[i, 'topk']['value']:.0%}"]
        for i in sorted({q for q, _ in errors})]
    text, windows, length, steps = _training(found[0])
    return ["## Heads by entropy", "Error of exact top-k 1 % on prose, by quarter of the heads, those of least entropy "
            f"first. Maps are of {windows} windows of {length // 1024}k and {steps} steps. The windows: {text}. The "
            "completion paper says that gains concentrate in heads of high entropy.",
            markdown(["quarter of the heads", "entropy of full attention [nats]", "no maps", "φ", "taken away"], lines)]


def forms(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The table of forms: cost of a key and of a query, what is kept, error and KL."""
    shown = [("rel_err", None), ("rel_err", 0.01), ("rel_err", 0.02), ("kl", 0.01), ("kl", 0.02)]
    rows = [r for r in rows if r["case"] == rows[0]["case"]]
    known = {(r.get("form"), r["metric"], r["budget"]): r for r in rows}
    alone = [known[None, "rel_err", b]["value"] for m, b in shown if m == "rel_err"]
    lines = [["no maps", "", "", "", "", *(f"{v:.4f}" for v in alone), "", ""]]
    for form in dict.fromkeys(r["form"] for r in rows if "form" in r):
        one = known[form, "rel_err", None]
        lines.append([FORMS[form], f"{one['kflop_key']:.0f}", f"{one['kflop_query']:.0f}", str(one["features"]),
                      str(one["bytes_kept"]), *(f"{known[form, m, b]['value']:.4f}" for m, b in shown)])
    words = {"rel_err": "error", "kl": "KL"}
    return ["", markdown(["map of keys", "kFLOP a key", "kFLOP a query", "features", "bytes kept a key",
                          *(f"{words[m]}, {'sink + tail' if b is None else f'top-k {percent(b)}'}" for m, b in shown)],
                         lines), ""]


def ships(rows: Sequence[dict[str, Any]]) -> str:
    """How errors and KL of the form that ships stand to those of the first one."""
    known = {(r["case"], r.get("form"), r["metric"], r["budget"]): r for r in rows}
    cases = list(dict.fromkeys(r["case"] for r in rows))

    def more(case: str, metric: str, budget: float) -> str:
        mine, first = (known[case, form, metric, budget]["value"] for form in ("shared64", "base"))
        return minus(f"{100 * mine / first - 100:+.1f} %")

    lines = []
    for case in cases:
        one = known[case, "shared64", "rel_err", BUDGETS[0]]
        lines.append([f"{one['length'] // 1024}k, {card(one).removeprefix('one ')}",
                      *(more(case, m, b) for m in ("rel_err", "kl") for b in BUDGETS)])
    one, other = (known[cases[-1], form, "rel_err", BUDGETS[0]] for form in ("shared64", "base"))
    return ("The form that ships has an eighth of the operations of the first one. Its errors and KL beside the "
            "first one's, where up to +3 % was allowed:\n\n"
            + markdown(["windows", *(f"{m}, top-k {percent(b)}" for m in ("error", "KL") for b in BUDGETS)], lines)
            + f"\n\nOf windows of {one['length'] // 1024}k there were {one['windows']}. Their training took "
              f"{one['train_seconds']:.0f} s with what ships and {other['train_seconds']:.0f} s with the first form, "
              "one after the other on one card.")


def spent(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What `sparsekv train` took, a line a stage and training, beside what it had estimated."""
    lines = []
    for r in (r for r in rows if r["case"] == "sparsekv train" and r["metric"] == "seconds"):
        rate = next(x for x in rows if x["case"] == r["case"] and x["metric"] == "rate"
                    and (x["method"], x["commit"]) == (r["method"], r["commit"]))
        lines.append([r["trained"], r["method"], f"{rate['value']:,.{0 if rate['value'] > 100 else 1}f} {rate['unit']}",
                      f"{r['value']:.0f}", f"{r['estimated']:.0f}"])
    return ["", markdown(["training", "stage", "rate", "seconds", "seconds estimated"], lines), ""]


def bars(rows: Sequence[dict[str, Any]]) -> Drawing:
    """The error of exact top-k of 1 % completed by maps of every training, on prose and on program text."""
    _, alone, *lines = trainings(rows)
    figure, axes = canvas()
    figure.set_size_inches(7.2, 0.42 * (len(lines) + 1) + 1.0)
    names = [f"{text},\n{windows} × {length}, {steps} steps" for text, windows, length, steps, *_ in lines]
    for shift, column, name, colour in ((-.2, 5, HELD["prose@16384"], "#0072B2"),
                                        (.2, 6, HELD["code@16384"], "#D55E00")):
        axes.barh([i + shift for i in range(len(lines))], [float(x[column]) for x in lines], 0.36, color=colour,
                  label=f"{name} (no maps {alone[column]})")
    axes.set_yticks(range(len(lines)), names, fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color="#8888", linewidth=0.5)
    axes.set_xlabel("error of the attention output, top-k 1 % + φ")
    figure.legend(fontsize=8, frameon=False, labelcolor=INK, ncols=2, loc="outside upper left")
    return drawn(figure)


def page(
    rows: Sequence[dict[str, Any]], of_forms: Sequence[dict[str, Any]], of_models: str, took: str,
    answers: Sequence[str],
) -> str:
    """docs/results/phi.md. of_models, took: tables of whole trainings' answers and of their seconds; answers: by maps
    of other forms."""
    one, form = rows[0], of_forms[0]
    ours = one["command"].startswith("phi_training.py")
    how = ("two held-out windows of each text, each query a decode step right behind a prefill of its own"
           if ours else "one held-out window of each text, taken as decode steps behind four prefills (forms: six). Of "
           "the 64 tokens behind each one query in 32 is measured (in the window of 32k one in 64)")
    about = ("Seconds are those of `train-phi` as a whole, the capture not counted. The script is "
             "`benchmarks/phi_training.py`." if ours else "Maps of keys have GELU units. Seconds are those of the "
             "steps of four layers at once. The script is not in the tree.")
    header, *lines = trainings(rows)
    parts = [
        "# What does training buy?",
        f"Feature maps of Qwen2.5-Coder-1.5B-Instruct ({one['quantisation']}) on {one['machine'].partition(',')[0]}. "
        "Exact top-k reads a share of the context, one list a group of heads, beside sink and tail. What is not read "
        "is completed by the maps, every head on.",
        "![Error by training](phi.png)",
        "A pair of bars is a training: its text, windows × length, steps. All maps more than halve the error.",
        "What it advises:",
        "- **Train on text like what is served.** Maps of one kind of text are worse on the other kind. Half of each "
        "is nearly the best of both.\n"
        "- **Take windows as long as the contexts served.** Maps of shorter windows lose most at 32k. Windows that are "
        "too long cost a little at 16k.\n"
        "- **8 windows of 16k are nearly as good as 24**, the default of `sparsekv train`.\n"
        "- **2500 steps, the default, have 7 % less error than 1000.** On prose 10,000 steps have 4 % less again and "
        "22,000 have 6 %. On program text neither has less. They are four and nine times the work.\n"
        "- **96 windows bring nothing over 24.** [The form before](../log/maps.md#more-steps-and-more-windows) gained "
        "as little.\n"
        "- **The model's own text brings nothing** on prose, and a few percent on program text.",
        f"Errors and KL are means over heads and queries of {how}. There is one seed and there are no intervals: "
        "differences of a few percent may be noise. Prose is speeches to Congress, the latest of them held out. "
        "Program text is Python: packages to train on, the standard library held out.",
        "## Trainings, by error",
        f"Commit {one['commit']}. Layers: {one['layers'].replace(' ', ', ')}. Windows of every length have equally "
        "many tokens in all. Shift and cap are fitted to two more windows of the same text and length. " + about
        + elsewhere(rows),
        markdown(header, lines), *by_entropy(rows),
        "## Whole trainings, by answers",
        "All layers, RULER's 13 tasks at 16k and 12 windows of text ([how](real.md)). Router and codes were trained on "
        "the same text as the maps. `sketch+centroid` is a trained router with untrained completion. A training's "
        "commit is in parentheses.", of_models,
        "Trainings e2aef9d and 115e7ca have no synthetic windows, and GELU units in the maps of keys. The default "
        "recipe has synthetic windows and ReLU units. "
        "[How φ stands to untrained centroids](real.md#in-short-16k-tokens).",
        "## Seconds of a training", "`sparsekv train` on one H100, measurements at work on another card, beside its "
        "own estimate. Seconds are those of a stage's bar, validation included; loading and quality cards are not "
        "in them.", took]
    parts.append("## Other budgets and KL")
    for budget in (0.01, 0.02, 0.05, None):
        for metric, title in METRICS.items():
            if (budget, metric) != (0.01, "rel_err"):
                header, *lines = trainings(rows, budget, metric)
                parts += [f"{title}, {'sink + tail alone' if budget is None else f'top-k {percent(budget)}'}.",
                          markdown(header, lines)]
    parts += ["## Forms of the maps",
              f"All forms were trained by the code of commit {form['commit']} on {form['windows']} windows of prose of "
              f"{form['length'] // 1024}k tokens, for {form['steps']} steps. Layers: "
              f"{form['layers'].replace(' ', ', ')}. The script is `benchmarks/experiments/phi_forms.py` of 97934de. "
              "All have GELU units. A query and a key have 128 dimensions. Bytes are of a key of one KV head whose "
              "keys and values take 512.", *forms(of_forms)[1:2],
              ships(of_forms), *answers]
    return "\n\n".join(parts) + "\n"
