"""docs/results/phi.md and the tables of docs/train.md and docs/training.md: what training feature maps buys, and their
forms, by errors on held-out windows of a real model (phi-training.json, phi-forms.json)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparsekv.evaluation.methods import percent
from sparsekv.evaluation.tables import markdown

HELD = {"prose@16384": "prose, 16k", "code@16384": "program text, 16k", "prose@32768": "prose, 32k"}
TEXTS = {"prose": "prose", "code": "program text"}
METRICS = {"rel_err": "Relative error of the attention output", "kl": "KL of the attention to full attention's [nats]"}
FORMS = {
    "base": "four layers of 256 in each half (before)",
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
        if (r["method"], r["metric"], r["budget"]) == (method, metric, budget):
            known.setdefault(_training(r), {})[r["case"]] = r["value"]
    spent = {_training(r): r["value"] for r in rows if r["metric"] == "seconds" and r["case"] == "training"}
    lines = []
    if metric == "rel_err":
        alone = {r["case"]: r["value"] for r in rows if (r["method"], r["budget"]) == (method[:-4], budget)}
        lines.append(["no maps", "", "", "", "", *(f"{alone[h]:.3f}" for h in HELD)])
    for of, found in known.items():
        text, windows, length, steps = of
        lines.append([text, str(windows), f"{length // 1024}k", str(steps), f"{spent[of]:.0f}",
                      *(f"{found[h]:.3f}" for h in HELD)])
    return [["text", "windows", "length", "steps", "seconds of steps", *HELD.values()], *lines]


def _training(r: dict[str, Any]) -> tuple[str, int, int, int]:
    return trained_on(r), r["windows"], r["length"], r["steps"]


def forms(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The table of forms: cost of a key and of a query, what is kept, error and KL."""
    shown = [("rel_err", None), ("rel_err", 0.01), ("rel_err", 0.02), ("kl", 0.01), ("kl", 0.02)]
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


def spent(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What `sparsekv train` took, a line a stage and training, beside what it had estimated."""
    lines = []
    for r in (r for r in rows if r["case"] == "sparsekv train" and r["metric"] == "seconds"):
        rate = next(x for x in rows if x["case"] == r["case"] and x["metric"] == "rate"
                    and (x["method"], x["commit"]) == (r["method"], r["commit"]))
        lines.append([r["trained"], r["method"], f"{rate['value']:,.{0 if rate['value'] > 100 else 1}f} {rate['unit']}",
                      f"{r['value']:.0f}", f"{r['estimated']:.0f}"])
    return ["", markdown(["training", "stage", "rate", "seconds", "seconds estimated"], lines), ""]


def short(rows: Sequence[dict[str, Any]]) -> list[str]:
    """docs/train.md's table: the error of exact top-k of 1 % completed by maps of every training."""
    header, *lines = trainings(rows)
    return ["", markdown(header, lines), ""]


def page(rows: Sequence[dict[str, Any]], of_forms: Sequence[dict[str, Any]]) -> str:
    """docs/results/phi.md."""
    one, form = rows[0], of_forms[0]
    parts = [
        "# Feature maps of a real model",
        f"Qwen2.5-Coder-1.5B-Instruct ({one['quantisation']}), {one['machine']}. Exact top-k of a share of the "
        "context, a list a group, beside sink and tail; what is not read is completed by the maps, every head on. "
        "Errors and KL are means over heads and queries of one held-out window of each text, as decode steps behind "
        "four prefills (forms: six): of the 64 tokens behind each one query in 32 is measured (in the window of 32k "
        "one in 64). One seed, no intervals. So few queries do not tell errors apart that differ by a few percent. "
        "Prose is speeches to Congress, the latest of them held out; program text is Python, packages to train on, the "
        "standard library held out.",
        "## What training buys",
        f"Layers {one['layers'].replace(' ', ', ')}, commit {one['commit']}, the default form. The window lengths 8k, "
        "16k and 32k have equal numbers of tokens in 48, 24 and 12 windows. `seconds of steps` is of the four layers "
        "at once. Shift and cap are fitted to two windows more, of the same text and length; the script is not in the "
        "tree and takes its measurement from that of the forms."]
    for budget in (0.01, 0.02, 0.05, None):
        for metric, title in METRICS.items():
            header, *lines = trainings(rows, budget, metric)
            parts += [f"{title}, {'sink + tail alone' if budget is None else f'top-k {percent(budget)}'}.",
                      markdown(header, lines)]
    parts += ["## Forms of the maps",
              f"Layers {form['layers'].replace(' ', ', ')}, {form['windows']} windows of prose of {form['length']} "
              f"tokens, {form['steps']} steps, commit {form['commit']}, whose trainer made all forms; the script is "
              "`benchmarks/experiments/phi_forms.py` of 97934de. A query and a key have 128 dimensions. Bytes are of a "
              "key of one KV head whose keys and values take 512.", *forms(of_forms)[1:2]]
    return "\n\n".join(parts) + "\n"
