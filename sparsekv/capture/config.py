"""What `sparsekv capture` can be told, and the checks that need nothing but the options."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from sparsekv.config import option
from sparsekv.corpus import SPLITS
from sparsekv.errors import SparseKVError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NOT_CONTENT = ("output", "overwrite", "device", "devices", "num_nodes")


@dataclass(frozen=True)
class CaptureConfig:
    model: str = option(help="Frozen model: Hugging Face name, folder, .gguf file, or package:NAME.")
    corpus: str = option(help="Text: embedded (Python's own language reference), a .txt, .md, .jsonl or .parquet file, "
                              "a folder or glob of them, or the name of a Hugging Face dataset (downloads it).")
    output: str = option(help="Folder of the new capture store, or any fsspec URL (s3://…, memory://…).")
    split: str = option("all", help="Part of the corpus: all, train or heldout (disjoint by document; small local "
                                    "corpora are cut at 80 % of their characters).")
    context_length: int = option(4096, help="Length of every window [tokens].", min=64)
    num_documents: int = option(8, help="Windows captured [windows].", min=1)
    noise_documents: int = option(0, help="The first so many windows get stretches of random tokens in half of their "
                                          "length: for feature maps that serve texts unlike the corpus [windows].",
                                  min=0)
    generated_documents: int = option(0, help="The first so many windows are text that the model writes itself, from "
                                              "random first tokens: for feature maps that serve texts unlike the "
                                              "corpus; --noise-documents counts from the windows after them [windows].",
                                      min=0)
    queries_per_document: int = option(256, help="Queries sampled per window and query head [queries].", min=1)
    query_sampling: str = option("uniform", help="Which positions: uniform, or long_range (per head, queries whose "
                                                 "best key lies more than --long-range tokens away come first).")
    long_range: int = option(1024, help="Distance from which a query counts as long-range [tokens].", min=1)
    key_fraction: float = option(1.0, help="Share of the keys and values that is stored, drawn at random; statistics "
                                           "always see every key [0..1].")
    sink_size: int = option(4, help="First tokens, counted apart in the statistics [tokens].", min=0)
    window_size: int = option(16, help="Last tokens before a query, counted apart in the statistics [tokens].", min=1)
    top_keys: int = option(0, help="Keys stored per query, the best ones outside the sink with their scores; 0 keeps "
                                   "the best one alone [keys].", min=0)
    layers: str | None = option(None, help="Layers to store, for example 0-3,8,11; without it all that can be.")
    kv_heads: str | None = option(None, help="KV heads to store, with the query heads of their groups, for example "
                                             "0,2-3; without it all.")
    chunk_size: int = option(32768, help="Tokens of a prefill chunk; bounds the activation memory [tokens].", min=16)
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
    device: str = option("auto", help="auto, cpu, cuda, or balanced (spread one model over all GPUs).")
    devices: int = option(1, help="Processes on this machine, one a device; the documents are split among them "
                                  "[processes].", min=1)
    num_nodes: int = option(1, help="Machines that share the work (torchrun or SLURM starts one process a device on "
                                    "each) [machines].", min=1)
    seed: int = option(0, help="Seed of windows, query and key positions.")
    overwrite: bool = option(False, help="Replace an existing store.")

    def content(self) -> dict[str, Any]:
        """The options that decide what is in the store: recorded in it, and compared when a run goes on."""
        return {k: v for k, v in asdict(self).items() if k not in NOT_CONTENT}


def check_options(config: CaptureConfig) -> None:
    """Raises SparseKVError for options that no model and no corpus could satisfy."""
    for name, value, allowed in (("split", config.split, SPLITS), ("storage dtype", config.storage_dtype, DTYPES),
                                 ("query sampling", config.query_sampling, ("uniform", "long_range"))):
        if value not in allowed:
            raise SparseKVError(f"unknown {name} {value!r}: expected one of {', '.join(allowed)}")
    if not 0.0 < config.key_fraction <= 1.0:
        raise SparseKVError(f"key fraction {config.key_fraction} is not above 0 and at most 1")
    if config.generated_documents >= config.num_documents:
        raise SparseKVError(f"--generated-documents {config.generated_documents} leaves none of the "
                            f"{config.num_documents} windows to the corpus; ask for fewer, or for more --num-documents")
    if config.sink_size + config.window_size >= config.context_length:
        raise SparseKVError(f"sink ({config.sink_size}) and window ({config.window_size}) leave no middle in a context "
                            f"of {config.context_length} tokens; use a longer --context-length")
    if config.device == "balanced" and config.devices * config.num_nodes > 1:
        raise SparseKVError("--device balanced spreads one model over all GPUs; it cannot be joined with --devices or "
                            "--num-nodes above 1")
    for text, what in ((config.layers, "layers"), (config.kv_heads, "KV heads")):
        if text is not None:
            parse_numbers(text, what)


def parse_numbers(text: str, what: str) -> list[int]:
    """`0-3,8` -> `[0, 1, 2, 3, 8]`."""
    numbers: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
    except ValueError as error:
        raise SparseKVError(f"{what} {text!r} not understood; expected for example 0-3,8,11") from error
    if not numbers:
        raise SparseKVError(f"{what} {text!r} names none; expected for example 0-3,8,11")
    return sorted(numbers)


def sampled_queries(config: CaptureConfig, document: int) -> torch.Tensor:
    """Sorted positions of the queries looked at, the same for every layer; long-range sampling looks at 4 × as many."""
    first = _first_query(config)
    wanted = config.queries_per_document * (4 if config.query_sampling == "long_range" else 1)
    order = torch.randperm(config.context_length - first, generator=_generator(config, document))[:wanted]
    return (order + first).sort().values


def num_queries(config: CaptureConfig) -> int:
    """Queries stored per document and query head."""
    return min(config.queries_per_document, config.context_length - _first_query(config))


def _first_query(config: CaptureConfig) -> int:
    return min(max(config.sink_size + config.window_size, config.context_length // 8), config.context_length - 1)


def sampled_keys(config: CaptureConfig, document: int) -> torch.Tensor:
    """Sorted positions of the keys that are stored, `[M]`."""
    if config.key_fraction == 1.0:
        return torch.arange(config.context_length)
    count = max(1, round(config.key_fraction * config.context_length))
    generator = _generator(config, document + 500_000)
    return torch.randperm(config.context_length, generator=generator)[:count].sort().values


def _generator(config: CaptureConfig, document: int) -> torch.Generator:
    return torch.Generator().manual_seed(config.seed * 1_000_003 + document)
