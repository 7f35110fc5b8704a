"""An artifact: `config.json` (plain JSON with its own format version) and `model.safetensors`. No pickle."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparsekv.errors import SparseKVError

FORMAT_VERSION = 1
CONFIG, TENSORS = "config.json", "model.safetensors"


def save_artifact(path: str | Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write both files under a temporary folder name each, then put them in place; `config` gains `format_version`."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    temporary = path / f".{TENSORS}.tmp"
    save_file({k: t.detach().cpu().contiguous() for k, t in tensors.items()}, str(temporary))
    os.replace(temporary, path / TENSORS)
    temporary = path / f".{CONFIG}.tmp"
    temporary.write_text(json.dumps({"format_version": FORMAT_VERSION, **config}, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path / CONFIG)


def load_artifact(path: str | Path, kind: str | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read and check an artifact. Raises SparseKVError naming what is missing, damaged, newer or of another kind."""
    path = Path(path)
    config = read_config(path)
    if kind is not None and config.get("kind") != kind:
        raise SparseKVError(f"{str(path)!r} is a {config.get('kind')!r} artifact; expected a {kind!r} artifact")
    try:
        return config, load_file(str(path / TENSORS))
    except (SafetensorError, OSError) as error:
        raise SparseKVError(f"the artifact {str(path)!r} is damaged: {TENSORS} could not be read ({error}); train it "
                            "again or fetch it anew") from error


def read_config(path: Path) -> dict[str, Any]:
    """The artifact's `config.json`, checked."""
    if not (path / CONFIG).is_file():
        what = "a capture store" if (path / "manifest.json").is_file() else "not an artifact" if path.exists() else None
        raise SparseKVError(f"{str(path)!r} is {what}; expected a folder with {CONFIG} and {TENSORS}" if what else
                            f"no artifact at {str(path)!r}: expected a folder with {CONFIG} and {TENSORS}")
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        version, _ = config["format_version"], config["kind"]
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise SparseKVError(f"{str(path / CONFIG)!r} is not the config of a sparsekv artifact "
                            f"({type(error).__name__}: {error})") from error
    if version > FORMAT_VERSION:
        raise SparseKVError(f"the artifact {str(path)!r} has format {version}; this version of sparsekv reads up to "
                            f"{FORMAT_VERSION}. Upgrade sparsekv.")
    return config


def take(tensors: dict[str, Tensor], name: str, shape: tuple[int | None, ...], where: str) -> Tensor:
    """A tensor of the expected shape (None: any size). Raises SparseKVError."""
    tensor = tensors.get(name)
    found = None if tensor is None else tuple(tensor.shape)
    fits = found is not None and len(found) == len(shape) and all(
        e is None or e == f for e, f in zip(shape, found, strict=True))
    if tensor is None or not fits:
        raise SparseKVError(f"the artifact {where!r} is damaged: tensor {name} has shape {found}, expected {shape}")
    return tensor
