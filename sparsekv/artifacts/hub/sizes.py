"""Sizes that a model's files state, checked before anything of such a size is built: a configuration's numbers, and the
counts of a GGUF header against the length of its file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

from sparsekv.artifacts.checks import brief
from sparsekv.util.config import MOST
from sparsekv.util.errors import SparseKVError

COUNTS = {"num_hidden_layers": 1000, "num_attention_heads": 65536, "num_key_value_heads": 65536, "head_dim": 65536,
          "hidden_size": 1 << 20, "intermediate_size": 1 << 24, "vocab_size": 1 << 26, "max_position_embeddings": MOST,
          "num_local_experts": 65536, "num_experts": 65536}
"""The most that a configuration may say, from 1 on."""
MOST_LABELS, MOST_ENDS, MOST_CONFIG, MOST_HEADER = 10_000, 1000, 1 << 24, 1 << 29
"""Labels, end tokens; bytes of a configuration and of the header of a file of weights."""
GGUF_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
GGUF_STRING, GGUF_ARRAY = 8, 9
GGUF_COUNTS = {"attention.head_count": 65536, "attention.head_count_kv": 65536, "attention.key_length": 65536,
               "attention.value_length": 65536, "block_count": 1000, "embedding_length": 1 << 20,
               "feed_forward_length": 1 << 24, "context_length": MOST, "vocab_size": 1 << 26}


def check_folder(folder: Path, spec: str) -> None:
    """Raises SparseKVError where the config.json of a folder is no object, or its sizes are not those of a model that
    its weights could be."""
    file = folder / "config.json"
    if file.stat().st_size > MOST_CONFIG:
        raise _impossible(spec, f"its config.json has {file.stat().st_size:,} bytes; expected at most {MOST_CONFIG:,}")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _impossible(spec, f"its config.json is no JSON ({brief(str(error))})") from error
    if not isinstance(raw, dict):
        raise _impossible(spec, "its config.json is no JSON object")
    check_sizes(raw, spec)
    weights = [f for f in folder.iterdir() if f.suffix in (".safetensors", ".bin")]
    size, names = sum(f.stat().st_size for f in weights), _names(weights, spec)
    for part in _parts(raw):
        layers, hidden, words = (part.get(n) for n in ("num_hidden_layers", "hidden_size", "vocab_size"))
        if names is not None and isinstance(layers, int) and layers > names:
            raise _impossible(spec, f"its config.json says {layers} layers and its weights are {names} tensors")
        if weights and isinstance(hidden, int) and isinstance(words, int) and hidden * words > 16 * size:
            raise _impossible(spec, f"its config.json says {words} words of {hidden} numbers and its weights have "
                                    f"{size:,} bytes")


def check_sizes(raw: dict[str, Any], spec: str) -> None:
    """Raises SparseKVError for a configuration with sizes that no model has. raw: its JSON."""
    for name, part in raw.items():
        if name.endswith("_config") and not isinstance(part, dict | None):
            raise _impossible(spec, f"its config.json says {name} {brief(part)}; expected an object")
    for part in _parts(raw):
        for name, most in COUNTS.items():
            value = part.get(name)
            listed = value if isinstance(value, list) and name != "vocab_size" else [value]
            for one in listed:
                if one is not None and not (type(one) is int and 1 <= one <= most):
                    raise _impossible(spec, f"its config.json says {name} {brief(value)}; expected a whole number from "
                                            f"1 to {most}")
        heads, groups = part.get("num_attention_heads"), part.get("num_key_value_heads")
        if type(heads) is int and type(groups) is int and heads % groups:
            raise _impossible(spec, f"its config.json says {heads} heads for {groups} KV heads; expected a multiple")
        for name in ("rope_scaling", "rope_parameters"):
            if not isinstance(part.get(name), dict | None):
                raise _impossible(spec, f"its config.json says {name} {brief(part[name])}; expected an object")
        labels = part.get("num_labels")
        if labels is not None and not (type(labels) is int and 0 <= labels <= MOST_LABELS):
            raise _impossible(spec, f"its config.json says num_labels {brief(labels)}; expected 0 to {MOST_LABELS}")
        ends = part.get("eos_token_id")
        if not isinstance(ends, int | list | None) or (isinstance(ends, list) and (
                len(ends) > MOST_ENDS or any(type(end) is not int for end in ends))):
            raise _impossible(spec, f"its config.json says eos_token_id {brief(ends)}; expected a token, or a list of "
                                    f"up to {MOST_ENDS}")


def _parts(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """A configuration, and those in it."""
    return [raw, *(part for name, part in raw.items() if name.endswith("_config") and isinstance(part, dict))]


def _names(weights: list[Path], spec: str) -> int | None:
    """Tensors in safetensors files; None where there are others, or none."""
    if not weights or any(f.suffix != ".safetensors" for f in weights):
        return None
    count = 0
    for file in weights:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > min(MOST_HEADER, file.stat().st_size):
                raise _impossible(spec, f"the header of {file.name} says that it has {length:,} bytes")
            count += opened.read(length).count(b'"data_offsets"')
    return count


def check_gguf(file: Path) -> None:
    """Raises SparseKVError for a GGUF file whose header is cut, or says sizes that no model or no file of its length
    has. The tokenizer's lists are passed over."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        try:
            _check_header(opened, size, str(file))
        except (struct.error, OverflowError) as error:
            raise _impossible(str(file), "its header ends in the middle") from error


def _check_header(file: BinaryIO, size: int, spec: str) -> None:
    def take(form: str) -> Any:
        return struct.unpack(f"<{form}", file.read(struct.calcsize(form)))[0]

    def skip(count: int, what: str) -> None:
        if count > size - file.tell():
            raise _impossible(spec, f"{what} is longer than the file")
        file.seek(count, 1)

    def text(what: str) -> str:
        length = take("Q")
        if length > min(size - file.tell(), 1 << 16):
            raise _impossible(spec, f"{what} says that it has {length:,} bytes")
        return file.read(length).decode("utf-8", "replace")

    def value(kind: int, what: str, deep: int = 0) -> Any:
        if kind == GGUF_STRING:
            skip(take("Q"), what)
            return None
        if kind == GGUF_ARRAY:
            inner, count = take("I"), take("Q")
            width = GGUF_BYTES.get(inner)
            if count * (width or 8) > size - file.tell() or deep > 4:
                raise _impossible(spec, f"{what} says that it has {count:,} entries")
            if width is not None and count > 4096:
                skip(count * width, what)
                return None
            return [value(inner, what, deep + 1) for _ in range(count)]
        if kind not in GGUF_BYTES:
            raise _impossible(spec, f"{what} is of the unknown type {kind}")
        return take({0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}[kind])

    if file.read(4) != b"GGUF":
        raise _impossible(spec, "it does not begin as a GGUF file")
    version, tensors, entries = take("I"), take("Q"), take("Q")
    if version not in (2, 3):
        raise _impossible(spec, f"its GGUF version is {version}; expected 2 or 3")
    if tensors * 24 + entries * 13 > size:
        raise _impossible(spec, f"it says that it has {tensors:,} tensors and {entries:,} entries, in {size:,} bytes")
    for _ in range(entries):
        name = text("the name of an entry")
        found = value(take("I"), f"the entry {brief(name)}")
        most = GGUF_COUNTS.get(name.partition(".")[2])
        for one in (found if isinstance(found, list) else [found]) if most is not None else ():
            if most is not None and not (type(one) is int and 1 <= one <= most):
                raise _impossible(spec, f"it says {name} {brief(found)}; expected 1 to {most}")
        if name.endswith(".block_count") and found > tensors:
            raise _impossible(spec, f"it says {found} layers and has {tensors} tensors")
    for _ in range(tensors):
        name, dimensions = text("the name of a tensor"), take("I")
        if dimensions > 8:
            raise _impossible(spec, f"tensor {brief(name)} has {dimensions} dimensions")
        numbers = 1
        for _ in range(dimensions):
            numbers *= take("Q")
        take("I")
        if take("Q") > size or numbers > 16 * size:
            raise _impossible(spec, f"tensor {brief(name)} of {numbers:,} numbers does not lie in its {size:,} bytes")


def _impossible(spec: str, what: str) -> SparseKVError:
    return SparseKVError(f"could not load a model from {spec!r}: {what}; the file is damaged or no model, "
                         "fetch it anew")
