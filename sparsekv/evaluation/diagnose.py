"""`sparsekv eval diagnostics`: the tables and figures of every head, from a capture of held-out text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sparsekv.evaluation.diagnostics import FORMAT, Diagnostics
from sparsekv.evaluation.measure import BUDGETS, add_task, measure
from sparsekv.evaluation.run import numbers
from sparsekv.util.config import check_ranges, option
from sparsekv.util.disk import TEMPORARIES, write_text
from sparsekv.util.errors import SparseKVError, as_markdown
from sparsekv.util.output import OutputKind, read_marker
from sparsekv.util.progress import progress

FILE = "diagnostics.json"


@dataclass(frozen=True)
class DiagnosticsConfig:
    capture: str = option(help="Capture store of held-out text (`sparsekv capture --split heldout`).")
    output: Path = option(help="Folder for diagnostics.json, table.md, report.html and the figures as PNG.")
    router: str | None = option(None, help="Router artifact (folder or name); adds the selector router, and sketch if "
                                          "it has sketches. Without it neither is measured.")
    phi: str | None = option(None, help="Feature-map artifact (folder or name); adds completion by φ. Without it that "
                                       "is not measured.")
    budgets: str = option(",".join(f"{b:g}" for b in BUDGETS), help="Tokens retrieved per query and KV head, as "
                                                                    "fractions of the context; 0 is sink and tail.")
    requests: int = option(8, help="Prefills per window, each followed by the queries captured soon after its end "
                                   "[requests].", min=1)
    shoot_out: bool = option(False, help="Also the untrained completion, bucket centroids at the bytes of φ's cache, "
                                         "over exact top-k.")
    tasks: str | None = option(None, help="More captures of the same model, LABEL=STORE separated by commas: entropy "
                                          "and coverage by task; without it the one of --capture alone.")
    device: str = option("auto", help="auto, cpu or cuda.")
    overwrite: bool = option(False, help="Replace existing results.")


class DiagnosticsResult(NamedTuple):
    """What was measured, as a table too, and the folder it was written to."""

    diagnostics: Diagnostics
    table: str
    output: Path

    def summary(self) -> str:
        files = ", ".join(str(self.output / name) for name in (FILE, "report.html", "figures/"))
        return f"\n{self.table}\n\nwritten: {files}"


def run_diagnostics(config: DiagnosticsConfig) -> DiagnosticsResult:
    """Measure, write and draw. Raises SparseKVError for bad options, stores and artifacts."""
    from sparsekv.artifacts.hub.models import resolve_device
    from sparsekv.artifacts.phi import PhiArtifact
    from sparsekv.artifacts.router import RouterArtifact
    from sparsekv.capture.store.store import CaptureStore
    from sparsekv.evaluation.diagnostic_figures import diagnostic_figures, diagnostic_tables
    from sparsekv.evaluation.report import write_pngs, write_report
    from sparsekv.evaluation.rows import origin_line

    check_ranges(config)
    output = Path(config.output)
    OutputKind("the results of eval diagnostics", (FILE, "table.md", "report.html", "figures/*.png", TEMPORARIES),
               lambda folder: read_marker(folder / FILE).get("format") == FORMAT).found(output, config.overwrite)
    budgets = sorted(set(numbers(config.budgets, float, lambda b: 0 <= b <= 1, "budgets",
                                 "fractions of the context from 0 to 1, as 0,0.01,0.05")))
    store = CaptureStore.open(config.capture)
    others = {label: CaptureStore.open(place) for label, place in _labels(config.tasks)}
    if (own := Path(str(store.config["corpus"])).name) in others:
        raise SparseKVError(f"tasks {config.tasks!r} have the label {own!r}, which the corpus of --capture has; give "
                            "another")
    router = None if config.router is None else RouterArtifact.load(config.router)
    phi = None if config.phi is None else PhiArtifact.load(config.phi)
    device = resolve_device(config.device)
    with progress("diagnostics", len(store.layers) * store.num_documents, "layers") as advance:
        made = measure(store, router=router, phi=phi, budgets=budgets, count=config.requests, rivals=config.shoot_out,
                       device=device, advance=advance)
    for label, other in others.items():
        add_task(made, label, other, device)
    made.save(output / FILE)
    (tables, details), figures = diagnostic_tables(made), diagnostic_figures(made)
    text, more = ("\n\n".join(f"{t.title}\n\n{t.text()}" for t in part) for part in (tables, details))
    write_text(output / "table.md", as_markdown(f"{text}\n\n{more}\n"))
    intro = (f"{made.model['architecture']}, {len(made.layers)} layers; {store.num_documents} windows of "
             f"{made.context_length} tokens of {next(iter(made.tasks))}, {config.requests} requests a window. "
             f"{origin_line()}")
    write_report(output / "report.html", "sparsekv eval diagnostics", intro, tables, figures, details)
    write_pngs(output, figures)
    return DiagnosticsResult(made, text, output)


def _labels(text: str | None) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for part in (text or "").split(","):
        label, _, place = part.strip().partition("=")
        if part.strip() and not (label and place):
            raise SparseKVError(f"tasks {text!r} not understood; expected LABEL=STORE, separated by commas")
        if label in dict(found):
            raise SparseKVError(f"tasks {text!r} have {label!r} twice; every capture needs a label of its own")
        if label:
            found.append((label, place))
    return found
