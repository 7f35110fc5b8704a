"""What training feature maps buys on a real model: trainings of four layers that differ in steps, windows, length and
text, each with its errors on held-out windows and its seconds. Rows of docs/results/phi-training.json.

    python3 benchmarks/phi_training.py --model FOLDER --weights FILE --prose FILE.txt --output DIR [--minutes 9]
        [--only default prose ...] [--list]
    python3 benchmarks/phi_training.py --collect DIR

Every training is `train-phi` with its own defaults over a `capture` of those layers. Prose is the first 80 % of FILE,
its rest is held out. Program text is of installed packages, Python's own library is held out. A training's rows are on
disk when it is measured: the same command goes on, and several may run side by side with other `--only`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, row, write_rows
from benchmarks._training import calibration_scores, measured, side_by_side
from benchmarks.real import model_record
from sparsekv.artifacts.hub.models import load_model, resolve_device
from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.capture.run import CaptureConfig, run_capture
from sparsekv.capture.store.store import CaptureStore
from sparsekv.core import offline
from sparsekv.core.estimators import PhiEstimator
from sparsekv.core.layer import Selection
from sparsekv.core.step import Parts
from sparsekv.evaluation.rows import as_text
from sparsekv.runtime.hf.attach import writing
from sparsekv.trainers.calibrate import reader, shifted_errors
from sparsekv.trainers.phi import PhiConfig, train_phi

LENGTH = 16_384
BUDGETS = (None, 0.01, 0.02, 0.05)
VALIDATION, HELDOUT = 2, 2
"""Windows that shift and cap are fitted to, beside those of a training; windows of each held-out text."""
QUARTERS = 4
"""Into which heads are put by the entropy of full attention."""
MADE = {"own": "generated_documents", "made": "synthetic_documents"}
"""Kinds of windows that no corpus holds, and the options of `capture` for them."""
QUERIES = 32
"""Of a held-out window, each right behind a prefill of its own."""
OTHERS = ("spent", "sparsekv train")
"""Cases of rows that this script does not make."""


@dataclass(frozen=True)
class Training:
    """Windows by kind of text (`prose`, `code`, `made` up of the corpus's words, `own`: written by the model), their
    length as a share of `LENGTH`, steps."""

    name: str
    text: dict[str, int]
    longer: float = 1.0
    steps: int = 2500


TRAININGS = (
    Training("default", {"prose": 18, "made": 6}),
    Training("prose", {"prose": 24}),
    Training("steps-1000", {"prose": 18, "made": 6}, steps=1000),
    Training("code", {"code": 18, "made": 6}),
    Training("half-code", {"prose": 9, "code": 9, "made": 6}),
    Training("windows-8", {"prose": 6, "made": 2}),
    Training("short", {"prose": 36, "made": 12}, longer=0.5),
    Training("long", {"prose": 9, "made": 3}, longer=2.0),
    Training("own", {"prose": 12, "made": 6, "own": 6}),
    Training("steps-10000", {"prose": 18, "made": 6}, steps=10_000),
    Training("windows-96", {"prose": 72, "made": 24}),
    Training("steps-22000", {"prose": 18, "made": 6}, steps=22_000),
)
"""In the order of their importance."""
HELD = (("prose", 1.0), ("code", 1.0), ("prose", 2.0))


def program_text(folder: Path, characters: int, out: Path) -> Path:
    """The Python files below a folder as one text, spread over all of it."""
    files = sorted(f for f in folder.rglob("*.py") if 4000 < f.stat().st_size < 200_000)
    parts, size = [], 0
    for f in files[::max(1, len(files) * 12_000 // characters)]:
        parts.append(f.read_text(encoding="utf-8", errors="replace"))
        size += len(parts[-1])
        if size > characters:
            break
    out.write_text("\n\n".join(parts), encoding="utf-8")
    return out


class Texts:
    """The corpora: of a kind of text for training, or held out."""

    def __init__(self, prose: Path, folder: Path):
        self.prose, self.folder, self.code = prose, folder, folder / "code.txt"
        self.held_code = folder / "held-code.txt"
        folder.mkdir(parents=True, exist_ok=True)
        if not self.code.is_file():
            program_text(Path(sysconfig.get_path("purelib")), 8_000_000, self.code)
            program_text(Path(sysconfig.get_path("stdlib")) / "asyncio", 1_000_000, self.held_code)

    def train(self, text: dict[str, int]) -> str:
        """One file for a mix: stretches of each kind in turn."""
        kinds = [k for k in ("prose", "code") if k in text]
        if len(kinds) == 1:
            return str(self.prose if kinds == ["prose"] else self.code)
        mixed = self.folder / "mixed.txt"
        if not mixed.is_file():
            stretch = 60_000
            prose, code = (p.read_text(encoding="utf-8") for p in (self.prose, self.code))
            prose = prose[:int(0.8 * len(prose))]
            mixed.write_text("\n\n".join(x[a:a + stretch] for a in range(0, min(len(prose), len(code)), stretch)
                                         for x in (prose, code)), encoding="utf-8")
        return str(mixed)

    def split(self, text: dict[str, int]) -> str:
        return "train" if set(text) & {"prose", "code"} == {"prose"} else "all"


def stored(options: argparse.Namespace, loaded: list[Any], place: Path, corpus: str, split: str, length: int,
           windows: int, queries: int, **made: int) -> CaptureStore:
    """A capture of the layers, opened if it is there."""
    if not (place / "manifest.json").is_file():
        if not loaded:
            loaded[:] = load_model(str(options.model), dtype="auto", device=options.device)
        run_capture(CaptureConfig(
            model=str(options.model), corpus=corpus, split=split, output=str(place), layers=options.layers,
            context_length=length, num_documents=windows, queries_per_document=queries, seed=1, overwrite=True,
            device=options.device, **made), model=loaded[0], tokenizer=loaded[1], generator=writing)
    return CaptureStore.open(place)


def held_out(options: argparse.Namespace, loaded: list[Any], texts: Texts) -> dict[str, CaptureStore]:
    """Captures of the held-out texts, by the name of their case. Shorter texts give fewer windows."""
    found = {}
    for kind, longer in HELD:
        length = int(longer * options.length)
        corpus, split = (str(texts.prose), "heldout") if kind == "prose" else (str(texts.held_code), "all")
        place = options.output / f"held-{kind}-{length}"
        found[f"{kind}@{length}"] = stored(options, loaded, place, corpus, split, length, HELDOUT, length // 32)
    return found


def completed_weights(request: offline.Request, read: Selection, estimator: PhiEstimator, rest_lse: torch.Tensor,
                      exact_lse: torch.Tensor) -> torch.Tensor:
    """Logarithms of the weights of completed attention, `[T, Hq, N]`: those of keys that are read are exact, the others
    share the estimated mass as the maps say."""
    view = request.view
    scores = offline.scores(view, request.queries)
    tokens = read.as_tokens().long()
    tokens = tokens.repeat_interleave(scores.shape[1] // tokens.shape[1], dim=1)
    chosen = torch.zeros(*scores.shape[:2], scores.shape[2] + 1, dtype=torch.bool, device=scores.device)
    chosen.scatter_(-1, torch.where(tokens < 0, scores.shape[2], tokens), True)
    left = view.regions.mid_mask(0, scores.shape[-1])[0] & scores.isfinite() & ~chosen[..., :-1]
    first, last = int(view.regions.mid_first[0]), int(view.regions.mid_last[0])
    guess = torch.full_like(scores, -torch.inf)
    guess[..., first:last] = calibration_scores(request, estimator)
    guess = guess.masked_fill(~left, -torch.inf)
    guess = guess - (guess.logsumexp(-1) - rest_lse)[..., None].nan_to_num(0.0)
    return torch.where(left, guess, scores) - torch.logaddexp(exact_lse, rest_lse)[..., None]


def attention_kl(request: offline.Request, *completed: Any) -> torch.Tensor:
    """KL of the attention of `completed_weights` from full attention's [nats], `[T, Hq]`."""
    full = offline.scores(request.view, request.queries).log_softmax(-1)
    mine = completed_weights(request, *completed)
    return torch.where(full.isfinite(), full.exp() * (full - mine), 0.0).sum(-1)


def measure(store: CaptureStore, phi: PhiArtifact, device: str) -> Iterator[dict[str, Any]]:
    """Rows of a held-out text: errors without and with the maps, every head on, and KL."""
    layer = side_by_side(phi, gated=False)
    sums: dict[tuple[str, str, Any], list[torch.Tensor]] = {}
    entropy: list[torch.Tensor] = []
    for request in measured(store, list(range(store.num_documents)), device, QUERIES):
        estimator = PhiEstimator(layer)
        estimator.build(request.prefill)
        weights = offline.scores(request.view, request.queries).log_softmax(-1)
        entropy.append(-torch.where(weights.isfinite(), weights.exp() * weights, 0.0).sum(-1).mean(0))
        for budget in BUDGETS:
            selection = request.build(reader(budget), None)[0].select(request.view, request.queries)
            out, lse = request.view.attend(request.queries, selection)
            estimator.set_read_share(request.prefill, budget or 0.0)
            rest = estimator.partial(request.view, request.queries, selection)
            name = "sink_tail" if budget is None else "topk"
            found = {(name, "rel_err"): offline.relative_error(out, request.full),
                     (f"{name}+phi", "rel_err"): shifted_errors(Parts(out, lse, *rest, selection), request.full,
                                                                lse.new_zeros(1))[0],
                     (f"{name}+phi", "kl"): attention_kl(request, selection, estimator, rest[1], lse)}
            for key, value in found.items():
                sums.setdefault((*key, budget), []).append(value.mean(0))
    heads = {key: torch.stack(v).mean(0) for key, v in sums.items()}
    units = {"rel_err": "relative L2", "kl": "nats"}
    yield from ({"method": m, "metric": x, "value": float(v.mean()), "unit": units[x], "budget": b}
                for (m, x, b), v in heads.items())
    spread = torch.stack(entropy).mean(0)
    for i, part in enumerate(spread.argsort().tensor_split(QUARTERS)):
        yield from ({"method": m, "metric": x, "value": float(heads[m, x, 0.01][part].mean()), "unit": units[x],
                     "budget": 0.01, "quarter": i + 1, "entropy": round(float(spread[part].mean()), 3)}
                    for m, x in (("topk", "rel_err"), ("topk+phi", "rel_err")))


def train(options: argparse.Namespace, loaded: list[Any], texts: Texts, training: Training,
          held: dict[str, CaptureStore]) -> list[dict[str, Any]]:
    """Capture, train, measure; the rows."""
    length, steps = int(training.longer * options.length), max(1, round(training.steps * options.part))
    made = {name: training.text[kind] for kind, name in MADE.items() if kind in training.text}
    text = "-".join(f"{n}{k}" for k, n in training.text.items())
    place, folder = options.output / f"store-{text}-{length}", options.output / f"phi-{training.name}"
    began = time.perf_counter()
    store = stored(options, loaded, place, texts.train(training.text), texts.split(training.text), length,
                   sum(training.text.values()) + VALIDATION, min(768, length // 2), **made)
    captured = time.perf_counter() - began
    began = time.perf_counter()
    phi = train_phi(PhiConfig(capture=str(store.path), output=str(folder), validation_documents=VALIDATION,
                              device=options.device, max_steps=steps, overwrite=True, **options.sizes))
    spent, phi = time.perf_counter() - began, phi.to(options.device)
    said = {"text": training.text, "windows": sum(training.text.values()), "length": length, "steps": steps,
            "samples": HELDOUT, "seed": 0, "layers": options.layers.replace(",", " ")}
    rows = [row("training", "phi", "seconds", round(spent, 1), "s", captured=round(captured, 1), **said)]
    for case, window in held.items():
        for found in measure(window, phi, options.device):
            entropy = case == f"prose@{options.length}" and "quarter" in found
            if "quarter" not in found or entropy:
                name = f"entropy@{options.length}" if entropy else case
                rows.append(row(name, found.pop("method"), found.pop("metric"), found.pop("value"), found.pop("unit"),
                                **found, **said))
    print(f"{training.name}: captured in {captured:.0f} s, trained in {spent:.0f} s, measured in "
          f"{time.perf_counter() - began - spent:.0f} s", flush=True)
    return rows


def collected(folder: Path, results: Path = RESULTS) -> None:
    """The rows of an output's trainings in place of those of the same trainings before; the others stay."""
    path, names = results / "phi-training.json", [t.name for t in TRAININGS]
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    files = sorted(folder.glob("rows-*.json"))
    new = [r for f in files for r in json.loads(f.read_text(encoding="utf-8"))]
    again = {f.stem.removeprefix("rows-") for f in files}

    def place(r: dict[str, Any]) -> int:
        """Of its training among all; behind them, of rows that this script does not make."""
        of = tuple(r.get(n) for n in ("text", "steps", "length"))
        return next((i for i, t in enumerate(TRAININGS) if (t.text, t.steps, round(t.longer * LENGTH)) == of),
                    len(TRAININGS))

    stay = [r for r in kept if place(r) == len(names) or names[place(r)] not in again]
    path.write_text(as_text(sorted([*new, *stay], key=place)), encoding="utf-8")
    print(f"{len(new)} rows of {len(files)} trainings: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--weights", type=Path, help="the file that the folder was made of, whose hash rows have")
    parser.add_argument("--quantisation", help="without it what a .gguf file says")
    parser.add_argument("--name", default="coder-1.5b")
    parser.add_argument("--prose", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--layers", default="4,10,16,22")
    parser.add_argument("--only", nargs="+", choices=[t.name for t in TRAININGS], help="these, in this order")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin nothing after this time [minutes]")
    parser.add_argument("--length", type=int, default=LENGTH, help="of windows, to try the command [tokens]")
    parser.add_argument("--part", type=float, default=1.0, help="of the steps, to try the command")
    parser.add_argument("--sizes", type=json.loads, default={}, help="other options of train-phi, as JSON")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--list", action="store_true", help="only say which trainings there are")
    parser.add_argument("--collect", type=Path, help="only put the rows of this output into docs/results")
    options = parser.parse_args()
    if options.collect:
        return collected(options.collect)
    if options.list:
        return print("\n".join(f"{t.name}: {t.text}, {t.longer:g} × {LENGTH} tokens, {t.steps} steps"
                               for t in TRAININGS))
    until = time.perf_counter() + 60 * options.minutes
    options.device, options.trained = resolve_device(options.device), None
    torch.set_float32_matmul_precision("high")
    known, loaded = {t.name: t for t in TRAININGS}, list[Any]()
    texts = Texts(options.prose, options.output)
    about, held = model_record(options), held_out(options, loaded, texts)
    for training in [known[n] for n in options.only or known]:
        path = options.output / f"rows-{training.name}.json"
        if path.is_file():
            continue
        if time.perf_counter() >= until:
            break
        rows = train(options, loaded, texts, training, held)
        write_rows(path.stem, [{**r, **about} for r in rows], options.output)
        shutil.rmtree(options.output / f"phi-{training.name}")
    return None


if __name__ == "__main__":
    main()
