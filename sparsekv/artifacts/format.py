"""An artifact: `config.json` (plain JSON with its own format version) and `model.safetensors`. No pickle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparsekv.artifacts.checks import (
    brief,
    check_digest,
    check_finite,
    check_version,
    damaged,
    digest,
    parse_object,
    reason,
)
from sparsekv.util.disk import disk_error, placed
from sparsekv.util.errors import SparseKVError
from sparsekv.util.records import write_json

FORMAT_VERSION = 3
"""1 had no checksum, 2 one that a single core takes."""
CONFIG, TENSORS = "config.json", "model.safetensors"
SCALE = ".scale"
"""Behind the name of a matrix in 8 bits: the tensor of its rows' scales."""


def save_artifact(
    path: str | Path, config: dict[str, Any], tensors: dict[str, Tensor], *, eight_bits: bool = False,
) -> None:
    """Write both files under a temporary name each, then put them in place; `config` gains `format_version` and
    `sha256`, over itself and the tensors. eight_bits: matrices are rounded to 8 bits, a quarter of float32's size.
    Raises SparseKVError for values that are not finite, and a disk that fails."""
    path = Path(path)
    tensors = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    check_finite(tensors, f"the artifact for {str(path)!r}", "the training diverged; train with a lower learning rate")
    tensors = _rounded(tensors) if eight_bits else tensors
    config = {"format_version": FORMAT_VERSION, **config}
    config["sha256"] = digest(config, tensors)
    write_tensors(path / TENSORS, tensors)
    write_json(path / CONFIG, config)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file of CPU tensors, whole or not at all. Raises SparseKVError where it cannot be written."""
    with placed(path) as temporary:
        try:
            mode = temporary.stat().st_mode  # 0666 less the umask; safetensors makes files of its own for their owner
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(temporary), metadata)
            temporary.chmod(mode & 0o777)
        except SafetensorError as error:
            raise disk_error(error, path) from error


def load_artifact(path: str | Path, kind: str | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read and check an artifact. Raises SparseKVError naming what is missing, damaged, newer or of another kind."""
    path = Path(path)
    config = read_config(path)
    where = f"the artifact {str(path)!r}"
    if kind is not None and config["kind"] != kind:
        raise SparseKVError(f"{str(path)!r} is a {config['kind']!r} artifact; expected a {kind!r} artifact")
    try:
        tensors = load_file(str(path / TENSORS))
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise damaged(where, f"{TENSORS} could not be read ({reason(error)})") from error
    check_digest(config, tensors, where)
    tensors = _widened(tensors, where)
    check_finite(tensors, where, "its training diverged; train it again")
    return config, tensors


def _rounded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices of heads `[L, H, m, n]` as int8, with a float32 scale a row `[L, H, m, 1]`; the rest as it is."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 4:
            found[name] = tensor
            continue
        scale = (tensor.float().abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        found |= {name: (tensor / scale).round().to(torch.int8), name + SCALE: scale}
    return found


def _widened(tensors: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """Matrices in 8 bits as float32, without their scales; the rest as it is. Raises SparseKVError."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            found[name] = tensor * take(tensors, name + SCALE, (*tensor.shape[:-1], 1), where).float()
            del found[name + SCALE]
    return found


def read_config(path: Path) -> dict[str, Any]:
    """The artifact's `config.json`, checked as far as it stands alone."""
    try:
        there = (path / CONFIG).is_file()
    except OSError as error:
        raise SparseKVError(f"no artifact can be at {brief(str(path))} ({error.strerror}): expected a folder with "
                            f"{CONFIG} and {TENSORS}") from error
    if not there:
        what = "a capture store" if (path / "manifest.json").is_file() else "not an artifact" if path.exists() else None
        raise SparseKVError(f"{str(path)!r} is {what}; expected a folder with {CONFIG} and {TENSORS}" if what else
                            f"no artifact at {str(path)!r}: expected a folder with {CONFIG} and {TENSORS}")
    try:
        text = (path / CONFIG).read_bytes()
    except OSError as error:
        raise SparseKVError(f"{str(path / CONFIG)!r} could not be read ({reason(error)}); expected an artifact's config"
                            ) from error
    config = parse_object(text, f"the artifact's config {str(path / CONFIG)!r}")
    if "format_version" not in config or not isinstance(config.get("kind"), str):
        raise SparseKVError(f"{str(path / CONFIG)!r} is not the config of a sparsekv artifact: expected format_version "
                            "and kind")
    check_version(config["format_version"], FORMAT_VERSION, f"the artifact {str(path)!r}")
    return config


def take(tensors: dict[str, Tensor], name: str, shape: tuple[int | None, ...], where: str) -> Tensor:
    """A floating-point tensor of the expected shape (None: any size); where as in `the artifact 'x'`. Raises
    SparseKVError."""
    tensor = tensors.get(name)
    found = None if tensor is None else tuple(tensor.shape)
    fits = found is not None and len(found) == len(shape) and all(
        e is None or e == f for e, f in zip(shape, found, strict=True))
    if tensor is None or not fits:
        raise damaged(where, f"tensor {name} has shape {found}, expected {shape}")
    if not tensor.is_floating_point():
        raise damaged(where, f"tensor {name} has {tensor.dtype}, expected floating point")
    return tensor
