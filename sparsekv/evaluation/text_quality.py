"""The quality card of a training on text: the default method, completed and not, beside full attention on windows that
training has not seen."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sparsekv.artifacts.format import read_config
from sparsekv.artifacts.hub.text_quality import CAPTION, COLUMNS, Setting, TextQuality, checksums
from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.core.registry import FULL, default_selector
from sparsekv.evaluation.cells import read_cells
from sparsekv.evaluation.evaluator import Evaluator
from sparsekv.evaluation.methods import Method, parse_methods
from sparsekv.evaluation.own_tasks import continuations
from sparsekv.evaluation.scores import score_rows
from sparsekv.util.errors import SparseKVError

BUDGETS = (0.01, 0.02, 0.05)
WINDOWS, TOKENS = 4, 256
"""Windows at most, and the tokens at the end of each that are scored."""
ORIGIN = ("machine", "commit", "weights", "dtype")
"""What a card says of where it was measured: nothing of a user's folders."""
PAGE = "report.html"
LEAST = 512
"""Windows are not made shorter than this where the memory is short [tokens]."""


def card_methods(sketches: bool = True) -> list[Method]:
    """Full attention and what `attach` decodes with where router and maps are given, without the maps and with them.
    sketches: whether the router has some."""
    name = default_selector(("router", "sketches") if sketches else ("router",))
    return parse_methods([FULL, name, f"{name}+phi"], BUDGETS)


def measure_text(
    model: Any, tokenizer: Any, windows: Sequence[Sequence[int]], folder: Path, *, corpus: str, unseen: bool,
    advance: Callable[..., None] = lambda n=1: None,
) -> TextQuality:
    """The card of the training in a folder, from windows of token ids; corpus and unseen: as the card says them.

    What an interrupted run has finished is kept, in `cells-*.jsonl` there. Where the device's memory does not hold what
    a window takes the first half of each is measured, and so on. `advance(n)` is called as windows are measured by
    methods. Raises SparseKVError where even the shortest do not fit."""
    router = RouterArtifact.load(folder / "router")
    methods = card_methods(router.sketch is not None)
    artifacts: dict[str, Any] = {"router": router, "phi": PhiArtifact.load(folder / "phi")}
    while True:
        requests = continuations(windows, tail=TOKENS)
        evaluator = Evaluator(model, tokenizer, requests, output=folder, part=f"-{len(windows[0])}", resume=True,
                              kl="chunk", **artifacts)
        try:
            evaluator.run(methods, advance)
            speeds = evaluator.speeds(methods, requests[0])
            break
        except torch.OutOfMemoryError as error:
            length = len(windows[0]) // 2
            if length < LEAST:
                raise SparseKVError(f"the device's memory holds no window of {2 * length} tokens beside the model; "
                                    "measure with `sparsekv eval` on another machine") from error
            print(f"the memory is too short for windows of {2 * length} tokens: quality is measured on {length}",
                  file=sys.stderr)
            windows = [w[:length] for w in windows]
            torch.cuda.empty_cache()
    header, cells = read_cells(evaluator.path)
    return TextQuality(corpus, unseen, len(windows[0]), len(windows), requests[0].max_new_tokens,
                       math.exp(statistics.fmean(_of(cells, methods[0], "losses"))),
                       checksums({kind: read_config(folder / kind) for kind in artifacts}),
                       _settings(cells, methods[1:], speeds),
                       {k: v for k, v in {**header["origin"], **header}.items() if k in ORIGIN},
                       ms_per_token=speeds[FULL, None])


def write_page(folder: Path, quality: TextQuality, model: str) -> Path:
    """`report.html` of a training: what the recommended setting gains and loses, beside the others."""
    from sparsekv.artifacts.hub.modelcard import local_name
    from sparsekv.evaluation.report import Figure, Table, write_report

    table = Table("What every setting loses and takes", COLUMNS, quality.lines(), quality.about(),
                  marked=quality.settings.index(quality.recommended))
    return write_report(
        folder / PAGE, f"sparsekv train: {local_name(model)}, reading less", f"{quality.advice()}.", [table],
        [Figure("Perplexity and next tokens by budget", quality.figure(), CAPTION)], verdict=quality.verdict())


def _settings(
    cells: Sequence[dict[str, Any]], methods: Sequence[Method], speeds: dict[tuple[str, float | None], float],
) -> list[Setting]:
    rows = {(r["method"], r["budget"], r["metric"]): r for r in score_rows(cells)}
    whole = _of(cells, Method(FULL), "token_losses")
    found = []
    for method in methods:
        more = [a - b for mine, other in zip(_of(cells, method, "token_losses"), whole, strict=True)
                for a, b in zip(mine, other, strict=True)]
        ratio, same = (rows[method.name, method.budget, metric] for metric in ("perplexity_ratio", "same_tokens"))
        # tokens are many and windows few: the interval is that of the mean over tokens, paired
        margin = 1.96 * statistics.stdev(more) / math.sqrt(len(more)) * ratio["value"]
        kl = rows[method.name, method.budget, "kl"]["value"]
        found.append(Setting(method.selector, method.completion, float(method.budget or 0), ratio["value"] - 1, margin,
                             same["value"] / 100, ratio["bytes_share"], kl, speeds[method.name, method.budget]))
    return found


def _of(cells: Sequence[dict[str, Any]], method: Method, name: str) -> list[Any]:
    """What the cells of a method say, window after window."""
    known = {i: x for c in cells if (c["method"], c["budget"]) == (method.name, method.budget)
             for i, x in zip(c["indices"], c[name], strict=True)}
    return [known[i] for i in sorted(known)]
