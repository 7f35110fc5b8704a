"""The papers' figures, re-drawn from the diagnostics of this model, and their tables."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.evaluation import figures as draw
from sparsekv.evaluation.diagnostics import GAP_EDGES, Diagnostics
from sparsekv.evaluation.methods import label, percent
from sparsekv.evaluation.report import Figure, Table

TASK_COLUMNS = {"entropy_mid": "entropy", "mass_mid": "mid mass", "cover75": "keys for 75 %",
                "cover95": "keys for 95 %"}
QUARTILES = ("most peaked quarter", "second", "third", "most diffuse quarter")


def quartiles(d: Diagnostics) -> list[Tensor]:
    """Indices into the flattened (layer, head) pairs, four parts from low to high entropy of the mid region."""
    return list(d.heads["entropy"].flatten().argsort().tensor_split(4))


def by_quartile(d: Diagnostics, table: Tensor) -> list[list[float]]:
    """Means of a table `[L, Hq, B]` over each quarter of the heads."""
    flat = table.reshape(-1, table.shape[-1])
    return [flat[part].nanmean(0).tolist() for part in quartiles(d)]


def diagnostic_tables(d: Diagnostics) -> tuple[list[Table], list[Table]]:
    """Error by method and budget, router, completion, texts; then, for a second look, entropy quarters and layers."""
    header = ["method", *("sink + tail" if b == 0 else percent(b) for b in d.budgets)]
    tables = [Table("Relative output error", header, _lines(d.errors), "Mean over layers, heads and queries of the L2 "
                    "distance to full attention, by the share of the context retrieved."),
              Table("Attention read exactly", header, _lines(d.mass), "Share of a head's attention, sink and tail "
                    "included."),
              Table("Selectivity", header, _lines(d.read), "Share of the context read, sink and tail included.")]
    if d.recall:
        recall = {"mid mass over that of the best buckets": d.recall["oracle"],
                  "share of exact top-k's keys": d.recall["topk"]}
        tables.append(Table("Router recall", header, _lines(recall),
                            "At equal budgets; the best buckets are those with the most mid mass a key."))
    if d.completion:
        share = {"estimated by φ": d.completion["share"], "true": 1.0 - d.mass["topk"]}
        tables.append(Table("Share of the attention left to completion, exact top-k", header, _lines(share),
                            "What φ puts on the keys that are not read, beside what is there."))
    details = []
    for name, table in d.errors.items():
        lines = [[q, *(f"{x:.3f}" for x in line)] for q, line in zip(QUARTILES, by_quartile(d, table), strict=True)]
        details.append(Table(f"Error by entropy of the head, {label(name)}", header, lines,
                             "Quarters of all heads by the normalised entropy of their mid region."))
    names = [n for n in ("entropy", "mass_mid", "cover75", "cover95", "imbalance", "gap_mean", "gap_std")
             if n in d.heads]
    lines = [[str(layer), *(f"{float(d.heads[n][row].nanmean()):.4g}" for n in names)]
             for row, layer in enumerate(d.layers)]
    shown = {"mass_mid": "mid mass", "cover75": "keys for 75 %", "cover95": "keys for 95 %", "gap_mean": "ŝ − s",
             "gap_std": "its spread", "imbalance": "bucket imbalance"}
    by_task = [[text, *(f"{sum(t[n]) / len(t[n]):.4g}" if n in t else "–" for n in TASK_COLUMNS)]
               for text, t in d.tasks.items()]
    tables.append(Table("Texts", ["text", *TASK_COLUMNS.values()], by_task, "Means over layers and heads; entropy of "
                        f"the mid region from 0 to 1, keys in tokens of {d.context_length}."))
    details.append(Table("Layers", ["layer", *(shown.get(n, n) for n in names)], lines,
                         "Means over heads; entropy from 0 to 1, keys in tokens, ŝ − s in nats."))
    return tables, details


def _lines(tables: dict[str, Tensor]) -> list[list[str]]:
    return [[label(name), *(f"{x:.3f}" for x in table.nanmean((0, 1)).tolist())]
            for name, table in tables.items()]


def diagnostic_figures(d: Diagnostics) -> list[Figure]:
    """Every figure there is data for."""
    made = [Figure("Error by budget", draw.error_by_budget(d.budgets, _means(d.errors)),
                   "Relative error of the attention output, mean over layers and heads. The colour says what is read, "
                   "the line what completes it: dashed nothing, solid φ.")]
    entropy = {text: t["entropy_mid"] for text, t in d.tasks.items()}
    made.append(Figure("Entropy by layer", draw.by_layer(d.layers, entropy, "entropy of the mid region, 0 to 1",
                                                         band=_band(d.heads["entropy"])),
                       "Normalised entropy of the attention between sink and tail, by task; band: 10 to 90 % of the "
                       "heads."))
    curve = by_quartile(d, d.curves["mass"])
    made.append(Figure("Mass curve", draw.mass_by_keys(d.fractions, dict(zip(QUARTILES, curve, strict=True))),
                       "How concentrated attention is, heads in quarters of their entropy."))
    if "cover75" in d.heads:
        lines = {f"{text}, {share} %" if len(d.tasks) > 1 else f"{share} % of the mass": t[f"cover{share}"]
                 for text, t in d.tasks.items() for share in (75, 95) if f"cover{share}" in t}
        made.append(Figure("Keys that hold the attention",
                           draw.by_layer(d.layers, lines, "fewest keys [tokens]", log=True),
                           f"Fewest keys with 75 % and 95 % of the attention; windows of {d.context_length} tokens."))
    if d.recall:
        budgets = [i for i, b in enumerate(d.budgets) if b in (0.01, 0.05)] or [len(d.budgets) - 1]
        lines = {f"at {100 * d.budgets[i]:g} %": d.recall["oracle"][..., i].nanmean(1).tolist() for i in budgets}
        made.append(Figure("Router recall by layer", draw.by_layer(d.layers, lines, "mass reached / best buckets'"),
                           "Mid mass in the buckets the router picks, over that of the best buckets."))
    if len(d.tasks) > 1:
        means = {text: [sum(line) / len(line)] for text, line in entropy.items()}
        made.append(Figure("Entropy by task", draw.bars(list(means), {"entropy": [m[0] for m in means.values()]},
                                                        "entropy of the mid region, 0 to 1"),
                           "The same, mean over layers: how diffuse attention is on each text."))
    if "topk+phi" in d.errors:
        made += _completion_figures(d)
    return made


def _completion_figures(d: Diagnostics) -> list[Figure]:
    gain = by_quartile(d, d.errors["topk"] - d.errors["topk+phi"])
    made = [Figure("Gain by entropy", draw.gain_by_quartile(d.budgets, dict(zip(QUARTILES, gain, strict=True))),
                   "Error of exact top-k minus error of top-k + φ: above zero completion helps.")]
    if d.scatter:
        made.append(Figure("Kernel values", draw.kernel_scatter(d.scatter),
                           "Logit of the teacher, s, against the feature maps', ŝ, both minus the query's largest s; "
                           "on the line the map is exact."))
        made.append(Figure("ŝ − s", draw.histogram(GAP_EDGES, d.gaps, "ŝ − s [nats]"),
                           "Over mid keys of all heads; the outer bars hold all beyond."))
    return made


def _means(tables: dict[str, Tensor]) -> dict[str, list[float]]:
    return {name: t.nanmean((0, 1)).tolist() for name, t in tables.items()}


def _band(table: Tensor) -> tuple[list[float], list[float]]:
    low, high = torch.quantile(table, torch.tensor([0.1, 0.9], dtype=table.dtype), dim=1).tolist()
    return low, high
