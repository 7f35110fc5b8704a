"""`sparsekv train`: capture, router, feature maps, what they cost on text, and their page, in one command, which goes
on where it stopped.

It calls the functions of the commands `capture`, `train-router` and `train-phi`, with sizes for machine and model.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sparsekv.capture.config import check_synthetic
from sparsekv.capture.corpus import check_corpus
from sparsekv.capture.store.manifest import MANIFEST
from sparsekv.trainers.estimate import CPU_THREAD, GPU, Estimate, ModelShape, Work, estimate, shape_of, store_bytes
from sparsekv.util.config import MOST_STEPS, ROPE_SCALING, SEEDS, check_ranges, option
from sparsekv.util.disk import TEMPORARIES, free_bytes, only_writer
from sparsekv.util.errors import Interrupted, SparseKVError, check_choice, printable
from sparsekv.util.memory import memory_of
from sparsekv.util.output import OutputKind, read_marker
from sparsekv.util.progress import progress, stages
from sparsekv.util.records import write_json

if TYPE_CHECKING:
    from sparsekv.artifacts.hub.text_quality import TextQuality
    from sparsekv.capture.config import CaptureConfig

MARKER = "train.json"
CAPTURE, ROUTER, PHI, QUALITY = "capture", "router", "phi", "quality"
CELLS = "cells-*.jsonl"
"""What a quality card that was interrupted has finished."""
PAGE = ("README.md", "quality.json", "quality.png", "report.html")
FREE = ("output", "device", "dry_run", "overwrite")
"""Options that change where a training runs, not what it makes."""
TOKENS, LEAST_WINDOWS, ROOM = 24 * 16_384, 16, 100_000_000_000
"""Tokens of the measured recipe, in windows of any length, and how few windows and how many bytes of disk at most."""
ELEMENTS = {"float32": 4, "bfloat16": 2, "float16": 2}


class Sizes(NamedTuple):
    """What is chosen for a machine and a model. documents: None for windows of `TOKENS` together, as far as `ROOM`
    holds them. router, phi: what differs from the trainers' own defaults. measured: on what."""

    documents: int | None
    context_length: int
    queries: int
    router: dict[str, Any]
    phi: dict[str, Any]
    measured: str


ON_GPU = Sizes(None, 16_384, 768, {}, {}, "the recipe measured with Qwen2.5-Coder-1.5B at 16384 tokens "
               "(docs/results/quality.md); on larger models its quality was not measured")
ON_CPU = Sizes(26, 2048, 128, {"num_buckets": 256},
               {"max_steps": 200, "width": 64, "batch_size": 48, "keys_per_step": 352, "optimizer": "adam", "lr": 3e-3},
               "maps of the sizes of `sparsekv demo`, measured with SmolLM2-135M (docs/start.md); a GPU has "
               "others")

SAAP = "saap"
SAAP_ON_CPU: dict[str, Any] = {"max_steps": 50, "lr": 1e-3}
"""Steps of the query model that a CPU has time for; 40,000 at the paper's 1e-5 end no earlier."""


@dataclass(frozen=True)
class TrainConfig:
    model: str = option(help="Frozen model: Hugging Face name, folder, .gguf file, or package:NAME.", argument=True,
                        metavar="MODEL")
    corpus: str = option(help="The corpus: embedded, embedded-prose, a .txt, .md, .jsonl or .parquet file, a folder or "
                              "glob of them, or the name of a Hugging Face dataset.", argument=True, metavar="CORPUS")
    output: str = option(help="Folder of the training: capture/, router/, phi/, report.html, quality.json, README.md.",
                         names=("--output", "-o"))
    num_documents: int | None = option(None, help="Windows captured; without it those of 393,216 tokens, at least 16, "
                                                  "at most what 100 GB hold, and on a CPU 26 [windows].",
                                       group="Sizes", min=2)
    context_length: int | None = option(None, help="Length of every window, best that of the contexts that will be "
                                                   "decoded; without it 16384, on a CPU 2048, at most the model's own "
                                                   "[tokens].", group="Sizes", min=64)
    synthetic_documents: int | None = option(None, help="Windows of them with synthetic text of the corpus's words: "
                                                        "records, tables, logs, repeated passages; without it a "
                                                        "quarter [windows].", group="Sizes", min=0)
    layers: str | None = option(None, help="Layers to train, for example 0-3,8,11; without it all that can be.",
                                group="Sizes")
    router: str | None = option(None, choices=(SAAP,), group="Sizes", help=(
        "saap trains the paper's router: a query model over buckets of keys without RoPE, no sketches, a sink of 1 and "
        "a window of 2047 tokens; without it buckets and sketches, nothing of them by gradient."))
    router_steps: int | None = option(None, help="Training steps of that query model; without it 40000, on a CPU 50 "
                                                 "[steps].", group="Sizes", min=1, max=MOST_STEPS)
    phi_steps: int | None = option(None, help="Training steps of the feature maps; most of the time is theirs; without "
                                              "it 2500, on a CPU 200 [steps].", group="Sizes", min=1, max=MOST_STEPS)
    rope_scaling: str | None = option(None, help=ROPE_SCALING, group="Running")
    dtype: str = option("auto", help="Arithmetic of the model: auto, float32, bfloat16 or float16.", group="Running")
    device: str = option("auto", help="auto, cpu, cuda, or balanced (the model over all GPUs, training on the first).",
                         group="Running")
    seed: int = option(0, help="Seed of every random choice.", group="Running", **SEEDS)
    dry_run: bool = option(False, group="Running", help="Say what it would take, and stop; of the corpus only the "
                           "first text is read.")
    overwrite: bool = option(False, help="Replace an existing training.", group="Running")


@dataclass(frozen=True)
class TrainingPlan:
    """Everything that is decided before the work begins; kept in the output, so that a resumed training goes on with it
    on a machine of other size."""

    documents: int
    synthetic: int
    context_length: int
    queries: int
    layer_group: int
    router: dict[str, Any]
    phi: dict[str, Any]


class Trained(NamedTuple):
    """The folder of a training and its artifacts, None after a dry run."""

    path: Path
    router: Any
    phi: Any
    quality: TextQuality | None = None

    def summary(self) -> str:
        if self.router is None or self.quality is None:
            return "dry run: nothing was written"
        store = sum(f.stat().st_size for f in (self.path / CAPTURE).rglob("*.safetensors"))
        return (f"\n{self.router.summary()}\n{self.phi.summary()}\n\n{self.quality.text()}\n\n"
                f'with sparsekv.attach(model, "{self.path}", {self.quality.recommended.arguments}):\n'
                f"{self.path / 'report.html'} shows what it gains and loses\n"
                f"sparsekv push {self.path} USER/NAME   pushes it; {self.path / CAPTURE} ({store / 1e9:.1f} GB) may go")


def run_train(config: TrainConfig) -> Trained:
    """Say what it will take, then capture, train and write the page; what a run before has finished is kept.

    Raises SparseKVError for bad options, a missing model or corpus, another training's folder and too small a disk,
    before a model is loaded; and Interrupted after Ctrl-C or SIGTERM, from where the same command goes on.
    """
    check_ranges(config)
    out = Path(config.output)
    going_on = _going_on(config, out)
    plan, sizes = plan_training(config, _kept_plan(going_on["plan"], out) if going_on else None)
    # its first text, before anything is written or loaded
    check_corpus(config.corpus, split="train")
    print(printable(sizes), file=sys.stderr)
    if config.dry_run:
        return Trained(out, None, None)
    with only_writer(out):
        if not going_on:
            _output().prepare(out, config.overwrite)
            write_json(out / MARKER, {"options": _content(config), "plan": asdict(plan)})
        try:
            made = _train(config, plan, out)
        except Interrupted as error:
            what = str(error).partition("; the same command")[0]
            raise Interrupted(f"{what}; the same command goes on from there", error.signal) from error
        except SparseKVError:
            _forget(out)
            raise
        _output().done(out)
    return made


def _train(config: TrainConfig, plan: TrainingPlan, out: Path) -> Trained:
    from sparsekv.artifacts.hub.modelcard import write_card
    from sparsekv.artifacts.hub.text_quality import read_quality
    from sparsekv.artifacts.phi import PhiArtifact
    from sparsekv.artifacts.router import RouterArtifact
    from sparsekv.capture.run import run_capture
    from sparsekv.evaluation.text_quality import write_page
    from sparsekv.trainers.phi import PhiConfig, train_phi
    from sparsekv.trainers.router import RouterConfig, train_router

    device = "auto" if config.device == "balanced" else config.device
    common: dict[str, Any] = {"capture": str(out / CAPTURE), "device": device, "seed": config.seed,
                              "layer_group": plan.layer_group}

    def where(kind: str) -> dict[str, Any]:
        return {**common, "output": str(out / kind), "resume": _begun(out / kind)}

    with stages("train", (CAPTURE, ROUTER, PHI, QUALITY)) as begin:
        begin(CAPTURE)
        if all(_finished(out / kind) for kind in (ROUTER, PHI)):
            pass  # the capture may be gone
        elif read_marker(out / CAPTURE / MANIFEST).get("complete") is True:
            _check_same(config, plan, out)
        else:
            run_capture(_capture_config(config, plan, out))
        begin(ROUTER)
        if not _finished(out / ROUTER):
            train_router(RouterConfig(**where(ROUTER), **plan.router))
        begin(PHI)
        if not _finished(out / PHI):
            train_phi(PhiConfig(**where(PHI), **plan.phi))
        router, phi = RouterArtifact.load(out / ROUTER), PhiArtifact.load(out / PHI)
        begin(QUALITY)
        quality = read_quality(out) or _measure(config, plan, out)
    write_card(out, {"router": asdict(router.config), "phi": asdict(phi.config)}, nested=True, text=quality)
    write_page(out, quality, config.model)
    return Trained(out, router, phi, quality)


def _measure(config: TrainConfig, plan: TrainingPlan, out: Path) -> TextQuality:
    """What the artifacts cost on text that training has not seen, kept in the folder."""
    from sparsekv.artifacts.hub.models import load_model
    from sparsekv.evaluation.text_quality import card_methods, measure_text

    model, tokenizer = load_model(config.model, dtype=config.dtype, device=config.device,
                                  rope_scaling=config.rope_scaling)
    windows, unseen = _held_out(config, plan, out, tokenizer)
    with progress(QUALITY, len(windows) * len(card_methods()), "windows") as advance:
        quality = measure_text(model, tokenizer, windows, out, corpus=config.corpus, unseen=unseen, advance=advance)
    quality.save(out)
    for path in out.glob(CELLS):
        path.unlink()
    return quality


def _held_out(config: TrainConfig, plan: TrainingPlan, out: Path, tokenizer: Any) -> tuple[list[list[int]], bool]:
    """Windows of the corpus's held-out part; where it has none of this length those that the capture kept from training
    and calibration had, and False."""
    from sparsekv.capture.corpus import make_windows, read_documents
    from sparsekv.capture.store.store import CaptureStore
    from sparsekv.evaluation.text_quality import WINDOWS
    from sparsekv.trainers.pool import split_documents

    windows = make_windows(read_documents(config.corpus, split="heldout"), tokenizer, length=plan.context_length,
                           count=WINDOWS, seed=config.seed, least=0)
    if windows:
        return [w.tokens for w in windows], True
    store = CaptureStore.open(out / CAPTURE)
    return [store.tokens(i).tolist() for i in split_documents(store, 0)[1]], False


def _check_same(config: TrainConfig, plan: TrainingPlan, out: Path) -> None:
    """Before a training goes on with a capture that is finished: model and corpus are still those that it was made
    with. Raises SparseKVError."""
    from sparsekv.artifacts.fingerprint import check_fingerprint, model_fingerprint
    from sparsekv.artifacts.hub.models import load_model
    from sparsekv.capture.run import corpus_windows
    from sparsekv.capture.store.store import CaptureStore

    store, name = CaptureStore.open(out / CAPTURE), f"the finished capture {str(out / CAPTURE)!r}"
    model, tokenizer = load_model(config.model, dtype=config.dtype, device=config.device,
                                  rope_scaling=config.rope_scaling)
    check_fingerprint(store.model, model_fingerprint(model), name)
    del model
    windows = corpus_windows(_capture_config(config, plan, out), tokenizer)
    if [w.sha256 for w in windows] != [d["sha256"] for d in store.documents]:
        raise SparseKVError(f"{name} holds other text than the corpus {config.corpus!r} gives now; bring the corpus or "
                            "the tokenizer back as it was, or add --overwrite to start anew")


def _capture_config(config: TrainConfig, plan: TrainingPlan, out: Path) -> CaptureConfig:
    from sparsekv.capture.config import CaptureConfig

    sizes: dict[str, Any] = {}
    if config.router == SAAP:  # maps that complete its steps leave the same to exact attention
        sizes["sink_size"], sizes["window_size"] = _exact(SAAP)
    return CaptureConfig(
        **sizes, model=config.model, corpus=config.corpus, output=str(out / CAPTURE), split="train", seed=config.seed,
        context_length=plan.context_length, num_documents=plan.documents, synthetic_documents=plan.synthetic,
        layers=config.layers,
        queries_per_document=plan.queries, rope_scaling=config.rope_scaling, dtype=config.dtype, device=config.device)


def plan_training(config: TrainConfig, kept: TrainingPlan | None = None) -> tuple[TrainingPlan, str]:
    """Sizes for this machine and model, or those `kept`, and what they will take, in words. Loads no weights."""
    from sparsekv.artifacts.hub.models import DTYPES, load_config, resolve_device
    from sparsekv.capture.config import parse_layers
    from sparsekv.capture.prepare import check_layers

    check_choice("dtype", config.dtype, DTYPES)
    device = resolve_device(config.device)
    gpu = not device.startswith("cpu")
    about = load_config(config.model)
    layers = None if config.layers is None else parse_layers(config.layers)
    check_layers(config.layers, about.get_text_config().num_hidden_layers)
    shape = shape_of(about, None if layers is None else len(layers), _element(config.dtype, about, gpu))
    sizes = _sizes(config, gpu)
    plan = kept or planned(config, sizes, shape, about.get_text_config().max_position_embeddings, _memory(gpu))
    if config.router == SAAP:
        _check_saap(plan.context_length)
    work = _work(plan)
    found = estimate(shape, work, GPU if gpu else CPU_THREAD.times(_threads()))
    return plan, _say(config, plan, shape, sizes, found, device)


def _check_saap(length: int) -> None:
    """Raises SparseKVError for windows of which nothing that is scored lies behind a mid region."""
    from sparsekv.evaluation.text_quality import TOKENS as SCORED

    exact = sum(_exact(SAAP))
    if length <= exact + SCORED:
        raise SparseKVError(f"--router saap reads {exact} tokens of a window exactly, {SCORED} more are scored, and "
                            f"windows have {length}; give a --context-length above {exact + SCORED}")


def _sizes(config: TrainConfig, gpu: bool) -> Sizes:
    """Those of the machine, with the router that is asked for. Raises SparseKVError."""
    sizes = ON_GPU if gpu else ON_CPU
    if config.router != SAAP:
        if config.router_steps is not None:
            raise SparseKVError("--router-steps is of a query model, and this router has none; add --router saap, or "
                                "leave it out")
        return sizes
    steps = {} if config.router_steps is None else {"max_steps": config.router_steps}
    router = {**sizes.router, "preset": SAAP, **({} if gpu else SAAP_ON_CPU), **steps}
    return sizes._replace(router=router, context_length=max(sizes.context_length, 2 * sum(_exact(SAAP))))


def _exact(preset: str) -> tuple[int, int]:
    """Sink and window of a preset that has its own [tokens]."""
    from sparsekv.trainers.router import RECIPES

    recipe = RECIPES[preset]
    return recipe.sink_size or 0, recipe.window_size or 0


def planned(config: TrainConfig, sizes: Sizes, shape: ModelShape, longest: int, memory: int) -> TrainingPlan:
    """Plan what is asked for, with `sizes` for the rest. longest: context of the model [tokens]; memory: where heads
    are trained [bytes]."""
    length = config.context_length or min(sizes.context_length, longest)
    queries = min(sizes.queries, length // 2)
    documents = config.num_documents or sizes.documents or max(
        LEAST_WINDOWS, min(TOKENS // length, ROOM // store_bytes(shape, 1, length, queries)))
    phi = {**sizes.phi, **({} if config.phi_steps is None else {"max_steps": config.phi_steps})}
    made = documents // 4 if config.synthetic_documents is None else config.synthetic_documents
    check_synthetic(made, documents)
    plan = TrainingPlan(documents, made, length, queries, 0, sizes.router, phi)
    fit = estimate(shape, _work(plan), GPU).layers_at_once(memory, shape.layers)
    return replace(plan, layer_group=0 if fit == shape.layers else fit)


def _work(plan: TrainingPlan) -> Work:
    from sparsekv.trainers.options import DEFAULT
    from sparsekv.trainers.phi import RECIPES as PHI_RECIPES
    from sparsekv.trainers.router import RECIPES as ROUTER_RECIPES

    phi = {**asdict(PHI_RECIPES[DEFAULT]), **plan.phi}
    router = {**asdict(ROUTER_RECIPES[plan.router.get("preset", DEFAULT)]), **plan.router}
    learns = router["scores"] == "mlp"
    model = (router[name] if learns else 0 for name in ("max_steps", "batch_size", "hidden_size"))
    return Work(plan.documents, plan.context_length, plan.queries, router["num_buckets"], phi["max_steps"],
                phi["width"], phi["batch_size"], phi["keys_per_step"], phi["key_width"], phi["features"],
                phi["query_blocks"], phi["optimizer"] == "muon", *model)


def _say(config: TrainConfig, plan: TrainingPlan, shape: ModelShape, sizes: Sizes, found: Estimate, device: str) -> str:
    at_once = plan.layer_group or shape.layers
    rates = CPU_THREAD if device == "cpu" else GPU
    training = found.training_memory(at_once)
    rows = {
        "model": f"{config.model}, {shape.parameters / 1e9:.2f} B parameters, {shape.layers} of {shape.all_layers} "
                 "layers",
        "sizes": f"{plan.documents} windows of {plan.context_length} tokens, {plan.synthetic} of them synthetic, "
                 f"{plan.queries} queries each; {at_once} "
                 f"layers at once; {sizes.measured}",
        "disk": f"{_bytes(found.store)} for the capture, {_bytes(found.artifacts)} for the artifacts; "
                f"{_bytes(free_bytes(Path(config.output)))} free",
        "memory": f"{_bytes(found.capture_memory)} for the capture, {_bytes(training)} for training; "
                  f"{_bytes(_memory(device != 'cpu'))} on this machine's {'CPU' if device == 'cpu' else 'GPU'}",
        "time": f"{_time(found.seconds)}: capture {_time(found.capture_seconds)}, router "
                f"{_time(found.router_seconds)}, φ {_time(found.phi_seconds)}, quality cards "
                f"{_time(found.card_seconds)}, quality on text {_time(found.text_seconds)}; loading and compiling "
                "come on top",
        "estimated": f"memory and time, from {rates.measured}"}
    return "\n".join(f"{name:<10}{text}" for name, text in rows.items())


def _going_on(config: TrainConfig, out: Path) -> dict[str, Any] | None:
    """The marker of the training that this command goes on with. Raises SparseKVError for another's, and a finished
    one, without `overwrite`."""
    marker = read_marker(out / MARKER)
    if config.overwrite or not {"options", "plan"} <= set(marker):
        _output().found(out, config.overwrite)
        return None
    name, mine = f"the training in {str(out)!r}", _content(config)
    if not isinstance(marker["options"], dict):
        raise SparseKVError(f"{str(out / MARKER)!r} is damaged: its options are no object; add --overwrite to start "
                            "anew")
    differ = [k for k, v in mine.items() if marker["options"].get(k) != v]
    if differ:
        raise SparseKVError(f"{name} was started with " + ", ".join(
            f"{k} {marker['options'].get(k)}" for k in differ) + "; now found " + ", ".join(
            f"{k} {mine[k]}" for k in differ) + ". Give the same options, or --overwrite.")
    if all(_finished(out / kind) for kind in (ROUTER, PHI)) and all((out / name).is_file() for name in PAGE):
        raise SparseKVError(f"{name} is finished; --overwrite trains again")
    print(printable(f"going on with {name}"), file=sys.stderr)
    return marker


def _kept_plan(plan: Any, out: Path) -> TrainingPlan:
    """What a marker says was decided. Raises SparseKVError for what this version could not have decided."""
    from sparsekv.artifacts.checks import damaged, from_record

    where = f"{str(out / MARKER)!r}, of a training that was begun,"
    if not isinstance(plan, dict) or set(plan) != {f.name for f in fields(TrainingPlan)}:
        raise SparseKVError(f"{where} is damaged or of another version of sparsekv; go on with that version, or add "
                            "--overwrite to start anew")
    made: TrainingPlan = from_record(TrainingPlan, plan, where)
    if min(made.documents, made.context_length, made.queries) < 1 or min(made.layer_group, made.synthetic) < 0:
        raise damaged(where, "a size of its plan is below 1")
    return made


def _forget(out: Path) -> None:
    """Leave nothing of a training that failed before its capture began: other options may follow."""
    if not (out / CAPTURE / MANIFEST).is_file() and not any(_finished(out / kind) for kind in (ROUTER, PHI)):
        (out / MARKER).unlink(missing_ok=True)
        for folder in (out / CAPTURE, out):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _content(config: TrainConfig) -> dict[str, Any]:
    return {k: v for k, v in asdict(config).items() if k not in FREE}


def _finished(folder: Path) -> bool:
    return (folder / "config.json").is_file() and not _begun(folder)


def _begun(folder: Path) -> bool:
    from sparsekv.trainers.work import MARK

    return (folder / MARK).is_file()


def _output() -> OutputKind:
    from sparsekv.capture.prepare import OWN as STORE
    from sparsekv.trainers.work import OWN as ARTIFACT

    parts = [f"{folder}/{name}" for folders, names in (((CAPTURE,), STORE), ((ROUTER, PHI), ARTIFACT))
             for folder in folders for name in names]
    return OutputKind("a training", (MARKER, *PAGE, CELLS, TEMPORARIES, ".*.lock", *parts),
                      lambda folder: {"options", "plan"} <= set(read_marker(folder / MARKER)))


def _element(dtype: str, about: Any, gpu: bool) -> int:
    """Bytes of a weight, as `load_model` chooses them."""
    if dtype != "auto":
        return ELEMENTS[dtype]
    own = str(getattr(about, "dtype", None) or "float32").removeprefix("torch.")
    return ELEMENTS.get(own, 2) if gpu else 4


def _memory(gpu: bool) -> int:
    """Of the first GPU, or of the machine [bytes]."""
    return memory_of("cuda:0" if gpu else "cpu")


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _bytes(number: float) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
