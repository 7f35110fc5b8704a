"""Draw the pages of docs/results/ from the rows beside them, README's table and the tables of methods,
which `python benchmarks/tables.py methods` draws alone. No figure is ever typed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import (
    _completion_page,
    _first_page,
    _missed_page,
    _phi_page,
    _prefill_page,
    _quality_page,
    _real_page,
    _served_page,
    _speed_page,
    _training_page,
)
from benchmarks._rows import RESULTS, filled

ROOT = RESULTS.parent.parent


def load(name: str) -> list[dict[str, Any]]:
    """The rows of a file; none where nothing has been measured yet."""
    if not (RESULTS / f"{name}.json").exists():
        return []
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def phi() -> str:
    models, training = load("real"), load("phi-training")
    return _phi_page.page(training, load("phi-forms"), _real_page.by_text(models)[1], _phi_page.spent(training)[1],
                          _real_page.by_answers(models))


PAGES: dict[str, Callable[[], str]] = {
    "real": lambda: _real_page.page(load("real")),
    "real-others": lambda: _real_page.other_page(load("real")),
    "real-untrained": lambda: _real_page.untrained_page(load("real")),
    "real-repeats": lambda: _real_page.repeats_page(load("real")),
    "real-short": lambda: _real_page.shorter_page(load("real")),
    "phi": phi,
    "decode": lambda: _speed_page.decode(load("decode")),
    "generate": lambda: _speed_page.generate(load("generate")),
    "prefill": lambda: _prefill_page.page(load("prefill"), load("real"), load("generate")),
    "served": lambda: _served_page.page(load("serving"), load("served_quality")),
    "training": lambda: _training_page.page(load("training")),
    "sketch": lambda: _training_page.sketch(load("sketch")),
    **{name: lambda name=name: _quality_page.page(load(name), name) for name in _quality_page.ABOUT}}
"""Pages of docs/results/ that are drawn as a whole."""


def first_screen() -> dict[str, list[str]]:
    """README's table, and what its scores say."""
    real = load("real")
    return {"first": _first_page.first_table(real, load("generate")), "facts": _first_page.facts(real)}


def demo() -> dict[str, list[str]]:
    """What `sparsekv demo` prints."""
    from sparsekv.evaluation.demo_report import demo_table

    rows = load("demo")
    # the table asks the captured text for the sizes of sink and window alone: those of `capture`
    sizes: Any = SimpleNamespace(config={"sink_size": 4, "window_size": 16})
    cores, commit = rows[0]["machine"].partition(",")[0], rows[0]["commit"]
    return {"demo": ["", demo_table(rows, sizes).text(), "", f"One run, {cores} with two cores, commit {commit}. "
                     "Perplexity and error are of held-out addresses to Congress. Tokens and bytes are the shares of "
                     "its cache that a sparse layer reads in a step. Found are hidden numbers. The error is the "
                     "relative L2 distance of a head's output to full attention's.", ""]}


def missed() -> dict[str, list[str]]:
    """Targets that were not reached, of answers and of speed, and those that no row tells of."""
    lines = [*([*line, "[real](real.md)"] for line in _real_page.missed(load("real"))),
             *([*line, "[quality](quality.md)"] for line in _quality_page.missed(load("quality")))]
    table = "\n".join(f"| {' | '.join(line)} |" for line in (
        ["target", "prompts", "found [points]", "rows"], ["---", "---:", "---:", "---"], *lines))
    speed, unmeasured = _missed_page.speed(load("decode"), load("generate"))
    masses = _missed_page.table(["of the codes", "model", "found"], _training_page.masses(load("sketch")))
    return {"missed": ["", table, ""], "masses": masses, "speed": speed, "unmeasured": unmeasured}


def completion() -> dict[str, list[str]]:
    """Completion by context, what it costs, and maps of keys."""
    real, generate = load("real"), load("generate")
    return {"by context": _completion_page.by_context(real), "cost": _completion_page.cost(generate),
            "maps": _completion_page.maps(load("phi-forms"), load("decode"), real)}


def papers() -> dict[str, list[str]]:
    """Completion at equal worst-case budgets, beside the paper's table 2; TokenSelect's votes; what was measured of the
    papers' own settings on the real model."""
    real = load("real")
    measured = {"saap": _real_page.saap(real), "alphas": _real_page.alphas(real),
                "published": _real_page.published(real)}
    return {"equal budgets": _real_page.by_length(real), "votes": _real_page.votes(real),
            **{name: lines for name, lines in measured.items() if lines}}


def served() -> dict[str, list[str]]:
    """Speed and quality of served requests."""
    return {"served": ["", _served_page.side_by_side(load("serving"), load("served_quality")), ""]}


PLACES: dict[str, Callable[[], dict[str, list[str]]]] = {
    "README.md": first_screen, "docs/index.md": first_screen, "docs/start.md": demo,
    "docs/results/missed.md": missed, "docs/serving.md": served,
    "docs/completion.md": completion, "docs/papers.md": papers}
"""Pages with tables between markers (`_rows.filled`), by the names of the markers."""


def written(page: str) -> str:
    """A page of `PLACES` as the rows are now."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, lines in PLACES[page]().items():
        text = filled(text, lines, name)
    return text


def figures() -> None:
    """The figures of all pages that are drawn here."""
    from benchmarks.quality import figures as of_quality
    from sparsekv.evaluation.figures import score_by_budget, score_by_bytes

    _real_page.figures(load("real"), RESULTS)
    of_quality(_quality_page.named(load("quality-rivals")), RESULTS)
    for name, drawing in (("real", _first_page.figure(load("real"))),
                          ("decode-growth", _speed_page.growth(load("decode"))),
                          ("generate", _speed_page.tokens(load("generate"))),
                          ("served", _served_page.figure(load("serving"))),
                          ("phi", _phi_page.bars(load("phi-training"))),
                          ("training", _training_page.bars(load("training"))),
                          ("quality-keys", score_by_bytes(_quality_page.named(load("quality")), "ruler@16384")),
                          ("quality-worst", score_by_budget(_quality_page.named(load("quality-worst")), "ruler@4096")),
                          ("sketch", _training_page.sketch_bars(load("sketch"))),
                          ("capture", _training_page.capture_bars(load("capture")))):
        (RESULTS / f"{name}.png").write_bytes(drawing.png)
    if _prefill_page.points(load("prefill"), load("real")):
        (RESULTS / "prefill-curve.png").write_bytes(_prefill_page.curve(load("prefill"), load("real")).png)
    if _prefill_page.timeline(load("prefill"), load("generate")):
        (RESULTS / "request.png").write_bytes(_prefill_page.request(load("prefill"), load("generate")).png)


if __name__ == "__main__":
    from benchmarks import _methods

    _methods.write()
    if sys.argv[1:] == ["methods"]:
        raise SystemExit
    for name, make in PAGES.items():
        (RESULTS / f"{name}.md").write_text(make(), encoding="utf-8")
    figures()
    for page in PLACES:
        (ROOT / page).write_text(written(page), encoding="utf-8")
