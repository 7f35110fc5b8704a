"""docs/results/quality.md, quality-rivals.md and quality-worst.md, from the rows beside them: RULER on the yardstick
model, a table a length, card and commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks._first_page import card
from benchmarks._lanes import AGREEMENT, targets
from benchmarks._speed_page import runs
from sparsekv.evaluation.tables import BYTES, GAINS, bytes_read, every_method, gains, markdown, table

Rows = Sequence[dict[str, Any]]

MODEL = ("The yardstick model is SmolLM2-135M, tuned to retrieve over 32k tokens. Its answers hang on single keys, so "
         "that losing one shows. It says what selection loses. It claims nothing about other models.")
ABOUT = {
    "quality": (
        "How many single keys does selection lose?", MODEL,
        "![RULER score by bytes, 16k tokens](quality-keys.png)",
        "Router, codes and maps are those of `sparsekv train` without options, of other text than the tasks: 24 "
        "windows of 16k tokens of speeches, six of them made up."),
    "quality-rivals": (
        "How do other systems do at the same budget?", MODEL + " Every system has the same prompts, the first ones of "
        "each task.",
        "![RULER score by bytes, 16k tokens](quality-16384.png)",
        "What each system is set to stands in [The papers](../papers.md#the-rivals-at-one-budget). At 4096 tokens "
        "sketches score every code. The same figures of [4096](quality-4096.png) and [32k tokens](quality-32768.png) "
        "are of several runs each."),
    "quality-worst": (
        "Does completion pay where its own bytes are taken off the budget?", MODEL,
        "![RULER score by worst-case budget, 4096 tokens](quality-worst.png)",
        "Anchors and the completion's cache are taken off a budget here ([accounting](../runtime.md#budgets)).")}
OLDER = ("c04f146", "ef2dbd1", "d7bb713")
"""Commits whose rows call the codes fitted to a request `sketch`, and those of the artifact's basis
`sketch:fit=fixed`."""


def named(rows: Rows) -> list[dict[str, Any]]:
    """The rows by the names that methods have: `sketch` is of the artifact's own basis, `sketch:fit=fitted` of the
    request's."""

    def name(method: str) -> str:
        if method.startswith("sketch:fit=fixed"):
            return method.replace("sketch:fit=fixed", "sketch")
        return method.replace("sketch", "sketch:fit=fitted", 1) if method.startswith("sketch") else method

    return [{**r, "method": name(r["method"]), **({"against": name(r["against"])} if "against" in r else {})}
            if r["commit"] in OLDER else r for r in rows]


def page(rows: Rows, name: str) -> str:
    """The page of `<name>.json`."""
    title, *lead = ABOUT[name]
    rows = named(rows)
    parts = [f"# {title}", *lead,
             "Points of 100 ± half the 95 % bootstrap interval. Columns are budgets: the share of the context that a "
             "query may retrieve. Prompts are read with full attention but for their last token, layer 0 keeps full "
             "attention, and 4 + 16 anchors are always read. “–”: the budget cannot pay for what is always read. "
             f"{name}.json has the command of every row."]
    lengths = sorted({int(r["case"].partition("@")[2]) for r in rows if r["case"].startswith("ruler@")})
    for length in sorted(lengths, key=lambda n: (n != 16_384, n)):
        case = f"ruler@{length}"
        for run in runs([r for r in rows if r["case"] == case]):
            prompts = max(r.get("samples") or 0 for r in run)
            parts += [f"## {length:,} tokens, {card(run[0]).replace('one ', '')}", f"{prompts} prompts of six tasks.",
                      markdown(*table(run, case, every_method(run)))]
            for note, (header, lines) in (
                    (GAINS, gains(run, case)), (BYTES, bytes_read(run, case)),
                    (AGREEMENT, table(run, case, every_method(run), "agreement")),
                    ("What was to be reached.", targets(run, case))):
                if lines:
                    parts += [note, markdown(header, lines)]
    singles = [r for r in rows if r["metric"] == "score" and not r["case"].startswith("ruler@")]
    parts += ["## Each task"] if singles else []
    for case in dict.fromkeys(r["case"] for r in singles):
        for run in runs([r for r in singles if r["case"] == case]):
            parts += [f"### {case}, {card(run[0]).replace('one ', '')}", markdown(*table(run, case, every_method(run)))]
    return "\n\n".join(parts) + "\n"


def missed(rows: Rows) -> list[list[str]]:
    """A line a target that the yardstick model's rows do not reach: target with length, prompts, what was found."""
    rows = named(rows)
    return [[f"{what}, {int(case.partition('@')[2]) // 1024}k tokens", str(max(r.get("samples") or 0 for r in run)),
             found.replace("-", "−")]
            for case in dict.fromkeys(r["case"] for r in rows if r["case"].startswith("ruler@"))
            for run in runs([r for r in rows if r["case"] == case])
            for what, found, reached in targets(run, case)[1] if reached == "no"]
