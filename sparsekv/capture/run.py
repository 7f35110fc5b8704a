"""`sparsekv capture`: the frozen model over a corpus, into a capture store."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsekv.artifacts.fingerprint import model_fingerprint
from sparsekv.capture.corpus import SPLITS, Window, make_windows, read_documents
from sparsekv.capture.rope import LayerRope, unrotate
from sparsekv.capture.statistics import query_statistics
from sparsekv.capture.store import (
    FORMAT_VERSION,
    MANIFEST,
    CaptureStore,
    DocumentWriter,
    document_name,
    finished_document,
    storage_bytes,
    write_json,
)
from sparsekv.capture.tap import AttentionCall, StopForward, decoder, probe, tap
from sparsekv.config import option
from sparsekv.errors import SparseKVError
from sparsekv.progress import progress

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
OPTIONS = "options.json"


@dataclass(frozen=True)
class CaptureConfig:
    model: str = option(help="Frozen model: Hugging Face name, folder, .gguf file, or package:NAME.")
    corpus: str = option(help="Text: embedded (Python's own language reference), a .txt, .md, .jsonl or .parquet file, "
                              "a folder or glob of them, or the name of a Hugging Face dataset (downloads it).")
    output: str = option(help="Folder of the new capture store.")
    split: str = option("all", help="Part of the corpus: all, train or heldout (disjoint by document; small local "
                                    "corpora are cut at 80 % of their characters).")
    context_length: int = option(4096, help="Length of every window [tokens].", min=64)
    num_documents: int = option(8, help="Windows captured [windows].", min=1)
    queries_per_document: int = option(256, help="Queries sampled per window and query head [queries].", min=1)
    query_sampling: str = option("uniform", help="Which positions: uniform, or long_range (per head, queries whose "
                                                 "best key lies more than --long-range tokens away come first).")
    long_range: int = option(1024, help="Distance from which a query counts as long-range [tokens].", min=1)
    sink_size: int = option(4, help="First tokens, counted apart in the statistics [tokens].", min=0)
    window_size: int = option(16, help="Last tokens before a query, counted apart in the statistics [tokens].", min=1)
    layers: str | None = option(None, help="Layers to store, for example 0-3,8,11; without it all that can be.")
    chunk_size: int = option(8192, help="Tokens of a prefill chunk; bounds the activation memory [tokens].", min=16)
    storage_dtype: str = option("bfloat16", help="Numbers in the store: bfloat16, float16 or float32.")
    text_column: str | None = option(None, help="Column of a dataset, jsonl or parquet file that holds the text.")
    dataset_split: str = option("train", help="Split of a Hugging Face dataset.")
    dataset_config: str | None = option(None, help="Configuration of a Hugging Face dataset.")
    streaming: bool = option(False, help="Stream a Hugging Face dataset instead of downloading it whole.")
    pack: bool = option(True, help="Join short documents into windows; otherwise pass over those too short.")
    chat_template: bool = option(False, help="Wrap every document in the model's chat template.")
    rope_scaling: str | None = option(None, help='Replace rotary parameters, as JSON: {"rope_type": "yarn", '
                                                 '"factor": 4.0}; for contexts past the trained length.')
    dtype: str = option("auto", help="Arithmetic of the model: auto, float32, bfloat16 or float16.")
    device: str = option("auto", help="auto, cpu, cuda, or balanced (spread the model over all GPUs).")
    seed: int = option(0, help="Seed of windows and query positions.")
    overwrite: bool = option(False, help="Replace an existing store.")


def run_capture(config: CaptureConfig, *, model: Any = None, tokenizer: Any = None) -> CaptureStore:
    """Capture `config.num_documents` windows; a run that was interrupted goes on where it stopped.

    `model` and `tokenizer` are loaded by name unless given. Raises SparseKVError for bad options, a missing model, a
    corpus without enough text, an unsupported architecture, an existing output, or a disk that is too small.
    """
    _check_options(config)
    output = Path(config.output)
    options = {k: v for k, v in asdict(config).items() if k not in ("output", "overwrite", "device")}
    _prepare(output, options, config.overwrite)
    if tokenizer is None or model is None:
        from sparsekv.hub import load_model

        model, tokenizer = load_model(config.model, dtype=config.dtype, device=config.device,
                                      rope_scaling=config.rope_scaling)
    windows = make_windows(
        read_documents(config.corpus, split=config.split, text_column=config.text_column,
                       dataset_split=config.dataset_split, dataset_config=config.dataset_config,
                       streaming=config.streaming),
        tokenizer, length=config.context_length, count=config.num_documents, seed=config.seed, pack=config.pack,
        chat_template=config.chat_template)
    ropes, skipped = probe(model)
    layers = _choose_layers(config.layers, ropes, skipped)
    if skipped:
        _say_skipped(skipped)
    fingerprint = model_fingerprint(model)
    _check_space(config, fingerprint, len(layers), output)

    output.mkdir(parents=True, exist_ok=True)
    write_json(output / OPTIONS, options)
    with progress("capture", config.num_documents * config.context_length, "tokens") as advance:
        for index, window in enumerate(windows):
            if finished_document(output, index) is None:
                layer_notes = _capture_document(config, model, window, index, layers, ropes, output, advance)
                write_json(output / "layers.json", layer_notes)
            else:
                advance(config.context_length)
    about = json.loads((output / "layers.json").read_text(encoding="utf-8"))
    finished = [finished_document(output, i) or {} for i in range(config.num_documents)]
    write_json(output / MANIFEST, {
        "format_version": FORMAT_VERSION, "model": fingerprint, "config": options, "layers": about,
        "skipped_layers": {str(k): v for k, v in skipped.items()}, "context_length": config.context_length,
        "documents": [d["document"] for d in finished],
        "shards": {k: v for d in finished for k, v in d["shards"].items()},
    })
    for index in range(config.num_documents):
        (output / document_name(index) / "document.json").unlink()
    for name in ("layers.json", OPTIONS):
        (output / name).unlink()
    return CaptureStore.open(output)


class _DocumentTap:
    """Collects one document: everything is copied to the host as its layer runs."""

    def __init__(self, config: CaptureConfig, layers: list[int], ropes: dict[int, LayerRope], positions: Tensor):
        self.config, self.ropes = config, ropes
        self.layers, self.last = set(layers), max(layers)
        self.positions = positions
        self.dtype = DTYPES[config.storage_dtype]
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.queries: dict[int, list[Tensor]] = {}
        self.statistics: dict[int, list[dict[str, Tensor]]] = {}
        self.scales: dict[int, float] = {}
        self.tables: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.group_of: dict[int, int] = {}
        self._full: dict[tuple[int, LayerRope], tuple[int, tuple[Tensor, Tensor]]] = {}

    def start_chunk(self) -> None:
        self._full.clear()

    def __call__(self, call: AttentionCall) -> None:
        if call.layer in self.layers:
            self._take(call)
        if call.layer == self.last:
            raise StopForward

    def _take(self, call: AttentionCall) -> None:
        layer, rope, length = call.layer, self.ropes[call.layer], self.config.context_length
        if call.cos is None or call.sin is None:
            raise SparseKVError(f"layer {layer} gave no rotary tables in this forward pass")
        q_len, k_len = call.query.shape[2], call.key.shape[2]
        cos, sin = self._tables(call, rope)
        if layer not in self.keys:
            shape = (call.key.shape[1], length, call.key.shape[3])
            self.keys[layer], self.values[layer] = (torch.empty(shape, dtype=self.dtype) for _ in range(2))
            self.queries[layer], self.statistics[layer] = [], []
            self.scales[layer] = call.scale
        first = k_len - q_len
        fresh = call.key[0, :, first:]
        self.keys[layer][:, first:k_len] = unrotate(fresh, cos, sin, rope.layout).to(self.dtype)
        self.values[layer][:, first:k_len] = call.value[0, :, first:].to(self.dtype)
        inside = self.positions[(self.positions >= first) & (self.positions < k_len)].to(call.query.device)
        if len(inside):
            queries = call.query[0, :, inside - first]
            local = inside - first
            self.queries[layer].append(unrotate(queries, cos[local], sin[local], rope.layout).to(self.dtype).cpu())
            found = query_statistics(queries, call.key[0], inside[None], scale=call.scale,
                                     sink_size=self.config.sink_size, window_size=self.config.window_size)
            self.statistics[layer].append({k: v.cpu() for k, v in found.items()})

    def _tables(self, call: AttentionCall, rope: LayerRope) -> tuple[Tensor, Tensor]:
        """Full-width tables of this chunk; layers that were handed the same table share one group in the store."""
        assert call.cos is not None and call.sin is not None
        key = (call.cos.data_ptr(), rope)
        if key not in self._full:
            group = len(self._full)
            full = (rope.table(call.cos), rope.table(call.sin))
            self._full[key] = (group, full)
            self.tables.setdefault(group, []).append((full[0].cpu(), full[1].cpu()))
        self.group_of[call.layer], full = self._full[key]
        return full


def _capture_document(
    config: CaptureConfig, model: Any, window: Window, index: int, layers: list[int], ropes: dict[int, LayerRope],
    output: Path, advance: Callable[..., None],
) -> dict[str, Any]:
    """Prefill one window in chunks under the tap and write its shards."""
    from transformers import DynamicCache

    positions = _sample_positions(config, index)
    collector = _DocumentTap(config, layers, ropes, positions)
    tokens = torch.tensor(window.tokens, device=next(model.parameters()).device)[None]
    chunks = range(0, tokens.shape[1], config.chunk_size)
    cache = DynamicCache(config=model.config) if len(chunks) > 1 else None
    with torch.inference_mode(), tap(model, collector):
        for start in chunks:
            piece = tokens[:, start:start + config.chunk_size]
            collector.start_chunk()
            try:
                decoder(model)(input_ids=piece, past_key_values=cache, use_cache=cache is not None)
            except StopForward:
                pass
            advance(piece.shape[1])
    writer = DocumentWriter(output, index)
    try:
        for layer in layers:
            writer.write(f"layer{layer:03d}", _layer_tensors(config, collector, layer))
        rotary: dict[str, Tensor] = {"tokens": tokens[0].to(torch.int32).cpu()}
        for group, parts in collector.tables.items():
            rotary[f"cos.{group}"], rotary[f"sin.{group}"] = (torch.cat([p[i] for p in parts]) for i in (0, 1))
        writer.write("rotary", rotary)
        writer.commit({"id": index, "sources": sorted(set(window.sources)), "sha256": window.sha256,
                       "num_tokens": len(window.tokens)})
    except OSError as error:
        raise SparseKVError(f"could not write to {str(output)!r}: {error.strerror or error}. Finished documents are "
                            "kept; free some space and run the same command again.") from error
    return {str(layer): {"layout": ropes[layer].layout, "rotary": collector.group_of[layer],
                         "scale": collector.scales[layer]} for layer in layers}


def _layer_tensors(config: CaptureConfig, taken: _DocumentTap, layer: int) -> dict[str, Tensor]:
    queries = torch.cat(taken.queries[layer], dim=1)
    statistics = {k: torch.cat([s[k] for s in taken.statistics[layer]], dim=1) for k in taken.statistics[layer][0]}
    positions = taken.positions.to(torch.int32).expand(queries.shape[0], -1)
    if config.query_sampling == "long_range":
        chosen = _prefer_long_range(positions, statistics["top1_position"], config)
        queries = queries.gather(1, chosen[..., None].expand(-1, -1, queries.shape[-1]))
        statistics = {k: v.gather(1, chosen) for k, v in statistics.items()}
        positions = positions.gather(1, chosen)
    return {"keys_pre": taken.keys[layer], "values": taken.values[layer], "queries_pre": queries,
            "query_positions": positions, **statistics}


def _sample_positions(config: CaptureConfig, index: int) -> Tensor:
    """Sorted query positions of a document, the same for every layer; long-range sampling looks at 4 × as many."""
    first = min(max(config.sink_size + config.window_size, config.context_length // 8), config.context_length - 1)
    wanted = config.queries_per_document * (4 if config.query_sampling == "long_range" else 1)
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + index)
    order = torch.randperm(config.context_length - first, generator=generator)[:wanted]
    return (order + first).sort().values


def _prefer_long_range(positions: Tensor, best: Tensor, config: CaptureConfig) -> Tensor:
    """Per head the queries that look far first, then the rest, in order of position: indices `[Hq, T]`."""
    far = (positions - best) > config.long_range
    order = torch.argsort(far.to(torch.int8), dim=1, descending=True, stable=True)
    return order[:, : config.queries_per_document].sort(dim=1).values


def _check_options(config: CaptureConfig) -> None:
    if config.split not in SPLITS:
        raise SparseKVError(f"unknown split {config.split!r}: expected one of {', '.join(SPLITS)}")
    if config.storage_dtype not in DTYPES:
        raise SparseKVError(f"unknown storage dtype {config.storage_dtype!r}: expected one of {', '.join(DTYPES)}")
    if config.query_sampling not in ("uniform", "long_range"):
        raise SparseKVError(f"unknown query sampling {config.query_sampling!r}: expected uniform or long_range")
    if config.sink_size + config.window_size >= config.context_length:
        raise SparseKVError(f"sink ({config.sink_size}) and window ({config.window_size}) leave no middle in a context "
                            f"of {config.context_length} tokens; use a longer --context-length")


def _prepare(output: Path, options: dict[str, Any], overwrite: bool) -> None:
    """Refuse what would be lost: a finished store, another run's part, or a folder of something else."""
    if not output.exists():
        return
    if not output.is_dir():
        raise SparseKVError(f"the output {str(output)!r} is a file; expected a new folder")
    part = output / OPTIONS
    if overwrite:
        if any(output.iterdir()) and not (part.exists() or (output / MANIFEST).exists()):
            raise SparseKVError(f"{str(output)!r} holds something else than a capture store; choose another --output")
        shutil.rmtree(output)
    elif (output / MANIFEST).exists():
        raise SparseKVError(f"the output {str(output)!r} already holds a capture store; add --overwrite to replace it")
    elif part.exists():
        if json.loads(part.read_text(encoding="utf-8")) != options:
            raise SparseKVError(f"the output {str(output)!r} holds an unfinished capture with other options; finish it "
                                "with the same options, or add --overwrite to start anew")
        print(f"going on with the unfinished capture in {output}", file=sys.stderr)
    elif any(output.iterdir()):
        raise SparseKVError(f"the output folder {str(output)!r} is not empty; choose another --output")


def _choose_layers(wanted: str | None, ropes: dict[int, LayerRope], skipped: dict[int, str]) -> list[int]:
    if wanted is None:
        return sorted(ropes)
    layers = parse_layers(wanted)
    for layer in layers:
        if layer not in ropes:
            reason = skipped.get(layer, "the model has no such layer")
            raise SparseKVError(f"layer {layer} cannot be captured: {reason}")
    return layers


def parse_layers(text: str) -> list[int]:
    """`0-3,8` -> `[0, 1, 2, 3, 8]`."""
    layers: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            layers.update(range(int(first), int(last or first) + 1))
    except ValueError as error:
        raise SparseKVError(f"layers {text!r} not understood; expected for example 0-3,8,11") from error
    return sorted(layers)


def _say_skipped(skipped: dict[int, str]) -> None:
    by_reason: dict[str, list[int]] = {}
    for layer, reason in skipped.items():
        by_reason.setdefault(reason, []).append(layer)
    for reason, layers in by_reason.items():
        print(f"layers {', '.join(map(str, layers))} are skipped: {reason}", file=sys.stderr)


def _check_space(config: CaptureConfig, model: dict[str, Any], num_layers: int, output: Path) -> None:
    needed = storage_bytes(
        num_documents=config.num_documents, num_layers=num_layers, heads_kv=model["num_kv_heads"],
        heads_q=model["num_query_heads"], length=config.context_length, queries=config.queries_per_document,
        dim=model["head_dim"], item=DTYPES[config.storage_dtype].itemsize)
    place = output.absolute()
    while not place.exists():
        place = place.parent
    done = sum(f.stat().st_size for f in output.rglob("*.safetensors")) if output.exists() else 0
    free = shutil.disk_usage(place).free
    print(f"the store takes {needed / 1e9:.2f} GB ({free / 1e9:.1f} GB free)", file=sys.stderr)
    if needed - done > free:
        raise SparseKVError(f"the store needs {(needed - done) / 1e9:.2f} GB and {str(place)!r} has "
                            f"{free / 1e9:.2f} GB free; use fewer documents or layers, or another --output")
