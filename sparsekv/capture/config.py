"""The options of `sparsekv capture`, and the checks that need nothing but the options."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sparsekv.capture.corpus import SPLITS
from sparsekv.capture.store.manifest import first_query, held_queries
from sparsekv.util.config import ROPE_SCALING, SEEDS, check_ranges, option
from sparsekv.util.errors import SparseKVError, check_choice

TEXT, STORED, MACHINE = "Model and text", "What is stored", "Machine"
MOST_LAYERS = 10_000
NOT_CONTENT = ("output", "overwrite", "device", "devices")


@dataclass(frozen=True)
class CaptureConfig:
    model: str = option(help="Frozen model: Hugging Face name, folder, .gguf file, or package:NAME.")
    corpus: str = option(help="Text: embedded (Python's own language reference), embedded-prose (addresses to "
                              "Congress), both joined by +, a .txt, .md, .jsonl or .parquet file, a folder or glob of "
                              "them, or the name of a Hugging Face dataset (downloads it).")
    output: str = option(help="Folder of the new capture store, or any fsspec URL (s3://…, memory://…).")
    context_length: int = option(4096, help="Length of every window [tokens].", min=64)
    num_documents: int = option(8, help="Windows captured [windows].", min=1)

    split: str = option(
        "all", group=TEXT, help="Part of the corpus: all, train or heldout (disjoint by document; small local corpora "
                                "are cut at 80 % of their characters).")
    text_column: str | None = option(
        None, group=TEXT, help="Column of a dataset, jsonl or parquet file that holds the text.")
    dataset_options: str | None = option(
        None, group=TEXT, help='How a Hugging Face dataset is loaded, as JSON: {"name": "en", "split": "test", '
                               '"streaming": true}; its split is train unless named.')
    pack: bool = option(
        True, group=TEXT, help="Join short documents into windows; otherwise pass over those too short.")
    chat_template: bool = option(False, group=TEXT, help="Wrap every document in the model's chat template.")
    special_tokens: bool = option(
        False, group=TEXT, help="Read the text of special tokens, such as <|im_end|>, as these tokens; without it it "
                                "stays text.")
    synthetic_documents: int = option(
        0, group=TEXT, min=0, help="So many windows are synthetic text of the corpus's words: records, tables, logs, "
                                   "repeated passages; for feature maps that serve texts unlike the corpus [windows].")
    rope_scaling: str | None = option(None, group=TEXT, help=ROPE_SCALING)
    seed: int = option(0, group=TEXT, help="Seed of windows and query positions.", **SEEDS)

    layers: str | None = option(
        None, group=STORED, help="Layers to store, for example 0-3,8,11; without it all that can be.")
    queries_per_document: int = option(
        256, group=STORED, min=1, help="Positions of a window whose queries are stored, the same for all heads "
                                       "[queries].")
    sink_size: int = option(4, group=STORED, min=0, help="First tokens, counted apart in the statistics [tokens].")
    window_size: int = option(
        16, group=STORED, min=1, help="Last tokens before a query, counted apart in the statistics [tokens].")

    dtype: str = option("auto", group=MACHINE, help="Arithmetic of the model: auto, float32, bfloat16 or float16.")
    device: str = option("auto", group=MACHINE, help="auto, cpu, cuda, or balanced (spread one model over all GPUs).")
    devices: int = option(
        1, group=MACHINE, min=1, help="Processes on this machine, one a device; the documents are split among them. "
                                      "Several machines: start with torchrun or srun [processes].")
    chunk_size: int = option(
        32768, group=MACHINE, min=16, help="Tokens of a prefill chunk; bounds the activation memory [tokens].")
    overwrite: bool = option(False, group=MACHINE, help="Replace an existing store.")

    def content(self) -> dict[str, Any]:
        """The options that decide what is in the store: recorded in it, and compared when a run goes on."""
        return {k: v for k, v in asdict(self).items() if k not in NOT_CONTENT}


def check_options(config: CaptureConfig) -> None:
    """Raises SparseKVError for options that no model and no corpus could satisfy."""
    check_ranges(config)
    check_choice("split", config.split, SPLITS)
    check_synthetic(config.synthetic_documents, config.num_documents)
    if config.sink_size + config.window_size >= config.context_length:
        raise SparseKVError(f"sink ({config.sink_size}) and window ({config.window_size}) leave no mid region in "
                            f"{config.context_length} tokens; use a longer --context-length")
    if config.device == "balanced" and config.devices > 1:
        raise SparseKVError("--device balanced spreads one model over all GPUs; it cannot be joined with --devices "
                            "above 1")
    dataset_options(config)
    if config.layers is not None:
        parse_layers(config.layers)


def check_synthetic(synthetic: int, documents: int) -> None:
    """Raises SparseKVError for so many synthetic windows that none of all comes from the corpus."""
    if synthetic >= documents:
        raise SparseKVError(f"--synthetic-documents {synthetic} leaves none of the {documents} windows to the corpus; "
                            "ask for fewer, or for more --num-documents")


def dataset_options(config: CaptureConfig) -> dict[str, Any]:
    """`--dataset-options` as keywords of `datasets.load_dataset`."""
    try:
        found = json.loads(config.dataset_options or "{}")
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise SparseKVError(f"dataset options {config.dataset_options!r} are no JSON object; expected for example "
                            '{"name": "en", "split": "test", "streaming": true}')
    return found


def parse_layers(text: str) -> list[int]:
    """`0-3,8` -> `[0, 1, 2, 3, 8]`."""
    numbers: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            if not 0 <= int(first) <= int(last or first) <= MOST_LAYERS:
                raise ValueError
            numbers.update(range(int(first), int(last or first) + 1))
    except ValueError as error:
        raise SparseKVError(f"layers {text!r} not understood; expected for example 0-3,8,11") from error
    return sorted(numbers)


def query_positions(config: CaptureConfig, document: int) -> torch.Tensor:
    """Rising positions `[T]` of the queries that are stored of a document, past its first eighth."""
    length = config.context_length
    first = first_query(length, config.sink_size, config.window_size)
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + document)
    order = torch.randperm(length - first, generator=generator)[:config.queries_per_document]
    return (order + first).sort().values


def stored_queries(config: CaptureConfig) -> int:
    """How many these are."""
    return held_queries(asdict(config))
