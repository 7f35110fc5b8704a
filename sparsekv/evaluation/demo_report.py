"""What `sparsekv demo` shows: what every method read, what it found with that, and what it cost; for those who have not
read the papers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsekv.core.registry import ESTIMATOR_ROWS, FULL, row_of
from sparsekv.evaluation.methods import Method, parse_methods, percent, usual_methods

if TYPE_CHECKING:
    from sparsekv.capture.store.store import CaptureStore
    from sparsekv.evaluation.report import Table

BUDGETS = (0.01, 0.02, 0.05)
"""Budgets of the figure; a row of the table has one."""
WINDOWS_BY_BUDGET = 2
"""Windows that are continued at all of them."""
COLUMNS = ("what a step reads", "tokens", "bytes", "found", "perplexity", "error", "ms a token")
CURVE_REQUESTS = 4
READING = (
    "Every row is the same model on the same prompts. To write a token, full attention reads the keys and values of "
    "all tokens before it; the other rows read few of them, in every layer but the first. The first tokens (sink) and "
    "the last ones (tail) are always read. Beside these a step reads the best tokens of all (exact top-k), those of "
    "the buckets that the trained router chooses, or those that score best by sketches, a few bytes per key (the "
    "default). “+ φ”: trained feature maps estimate the rest.\n"
    "tokens: share of the context that is read.\n"
    "bytes: the same, with all that is read to choose; exact top-k reads every key for that.\n"
    "found: a seven-digit number was hidden in the text and asked for at its end.\n"
    "perplexity: how much the held-out text surprises the model; lower is better.\n"
    "error: relative distance of an attention head's output to full attention's; 0 is the same.\n"
    "ms a token: time of a step on this machine.")


def shown() -> list[Method]:
    """The rows of the table: what is measured where no methods are named, each at a budget of its own."""
    return [method for name in (FULL, *usual_methods(("router", "sketches", "phi"))) if (row := row_of(
        name.partition("+")[0])) is not None for method in parse_methods([name], [row.demo_budget])]


def demo_table(rows: list[dict[str, Any]], captured: CaptureStore) -> Table:
    """The table, its rows in the order of `shown`. rows: result rows of one length; captured: for the sizes of sink and
    window."""
    from sparsekv.evaluation.report import Table
    from sparsekv.evaluation.tables import hits, measured

    known = {(r["method"], r["budget"], r["metric"]): r for r in rows}
    lines = []
    for method in shown():
        texts, needles, loss, step = (known.get((method.name, method.budget, metric))
                                      for metric in ("rel_err", "score", "perplexity", "step"))
        lines.append([
            _words(method, captured.config), measured(texts, "{:.1%}", "read"),
            measured(texts, "{:.1%}", "bytes_share"), hits(needles),
            measured(loss, "{:.2f}"), measured(texts, "{:.3f}"), measured(step, "{:.1f}")])
    return Table("What was read, what was found, what it cost", COLUMNS, lines, READING, marked=len(lines) - 1)


def verdict(table: Table, captured: CaptureStore, folder: Path) -> dict[str, str]:
    """Gain, loss and setting of the default, the last row of the table, against full attention, the first; each a
    sentence, by name."""
    (_, _, _, found, loss, _, step), (_, tokens, size, mine, my_loss, error, my_step) = table.rows[0], table.rows[-1]
    slower = float(my_step) >= float(step)
    return {
        "Gain": f"A step of a sparse layer reads {tokens} of the tokens and {size} of the bytes. After "
                f"{captured.context_length} tokens it takes {my_step} ms on this machine, with full attention {step} ms"
                + ("; a cache this short is decoded with full attention by default." if slower else "."),
        "Loss": f"{mine} hidden numbers are found, by full attention {found}. Perplexity is {my_loss}, full "
                f"attention's {loss}. The relative error of attention outputs is {error}.",
        "Setting": f"sparsekv.attach(model, \"{folder}\", token_budget={shown()[-1].budget:g})"}


def in_short(table: Table, captured: CaptureStore) -> str:
    """The first and the last line of the table as a sentence, with the bytes that full attention reads."""
    about = captured.model
    size = {"float32": 4}.get(about.get("dtype", ""), 2)
    whole = 2 * about["num_layers"] * about["num_kv_heads"] * about["head_dim"] * captured.context_length * size
    full, last = table.rows[0], table.rows[-1]
    return (f"Full attention reads {whole / 1e6:.0f} MB of keys and values for every token that it writes and finds "
            f"{full[3]} hidden numbers; sketches of the keys with φ find {last[3]} and read {last[1]} of the tokens "
            f"and {last[2]} of the bytes in the layers where they work.")


def write_demo_report(
    out: Path, rows: list[dict[str, Any]], cells: list[dict[str, Any]], numbers: list[str], captured: CaptureStore, *,
    model: str, heldout_windows: int, corpora: tuple[str, str], seconds: tuple[float, float],
) -> Path:
    """`report.html` in the folder. numbers: hidden in the needle prompts, in their order; captured: what was trained
    on; corpora: of that, and of what was held out; seconds: of capture and training, and of everything."""
    from sparsekv.artifacts.hub.shipped import in_words
    from sparsekv.evaluation import figures
    from sparsekv.evaluation.report import Figure, write_report
    from sparsekv.trainers.metrics import read_metrics

    metrics = read_metrics(out / "phi" / "metrics.csv")
    fractions, quartiles = _mass_curves(captured)
    found = {(r["method"], r["budget"]): r["value"] for r in rows if r["metric"] == "rel_err"}
    errors = {m: [found[m, b if (m, b) in found else None] for b in BUDGETS]
              for m in dict.fromkeys(m for m, _ in found if m != "full")}
    table = demo_table(rows, captured)
    intro = (f"The model {model} was left as it is. The artifacts were trained in {seconds[0]:.0f} s on "
             f"{captured.num_documents} windows of {captured.context_length} tokens of {in_words(corpora[0])}. Then "
             f"the model continued {heldout_windows} windows of {in_words(corpora[1])} that were held out, and "
             f"answered {len(numbers)} questions. "
             f"{in_short(table, captured)} Everything took {seconds[1]:.0f} s.")
    return write_report(
        out / "report.html", "sparsekv demo: the same model, reading less", intro,
        [table, _answers(cells, numbers, captured)],
        [Figure("The more is read, the smaller the error", figures.error_by_budget(BUDGETS, errors),
                "Down is better. Dashed: only what is read. Solid: with the estimate φ of the rest. Held-out text."),
         Figure("Why it works: few tokens hold most of the attention", figures.mass_by_keys(fractions, quartiles),
                "How much of its attention outside sink and tail a head gives to its best tokens; heads in quarters, "
                "from those that look at few tokens to those that look at many. A window of training."),
         Figure("Training", figures.training_curves({"φ": (metrics["step"], metrics["loss"])}),
                "Loss of the feature maps on the training windows.")], verdict=verdict(table, captured, out))


def _answers(cells: list[dict[str, Any]], numbers: list[str], captured: CaptureStore) -> Table:
    """What every method answered where a number was hidden about the middle of the text."""
    from sparsekv.evaluation.report import Table

    asked = len(numbers) // 2
    answers = {(c["method"], c["budget"]): c["answers"][c["indices"].index(asked)] for c in cells
               if c["case"].startswith("needle") and asked in c["indices"]}
    lines = []
    for method in shown():
        answer = answers.get((method.name, method.budget))
        if answer is not None:
            lines.append([_words(method, captured.config), " ".join(answer.split()) or "–",
                          "yes" if numbers[asked] in answer else "no"])
    return Table(f"One of the questions: the hidden number is {numbers[asked]}",
                 ("what a step reads", "the answer", "right"), lines)


def _words(method: Method, config: dict[str, Any]) -> str:
    """A method for readers who do not know its name."""
    row, estimator = row_of(method.selector), ESTIMATOR_ROWS.get(method.completion)
    words = (row.demo_words if row is not None else "") or f"{method.selector}, {{budget}}"
    text = words.format(budget=percent(method.budget or 0.0), sink=config["sink_size"], window=config["window_size"])
    return text + ("" if estimator is None else f" + {estimator.symbol or estimator.name}")


def _mass_curves(captured: CaptureStore) -> tuple[list[float], dict[str, list[float]]]:
    import torch

    from sparsekv.core.offline import mass_curve, mid_share, requests
    from sparsekv.evaluation.diagnostic_figures import QUARTILES
    from sparsekv.evaluation.measure import captured_window

    shares, entropies = [], []
    fractions: list[float] = []
    for layer in captured.layers[1::3] or captured.layers:
        window = captured_window(captured, layer, 0, captured.config["sink_size"], captured.config["window_size"])
        curves = []
        for request in requests(window, CURVE_REQUESTS):
            fractions, curve = mass_curve(mid_share(request), int(request.view.regions.mid_sizes))
            curves.append(curve)
        shares.append(torch.stack(curves).mean(0))
        entropies.append(captured.read(layer, 0).statistics["entropy_mid"].float().mean(-1))
    every, entropy = torch.cat(shares), torch.cat(entropies)
    order = entropy.argsort().tensor_split(4)
    return fractions, {name: every[part].mean(0).tolist() for name, part in zip(QUARTILES, order, strict=True)
                       if len(part)}
