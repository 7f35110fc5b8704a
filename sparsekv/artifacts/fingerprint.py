"""What identifies a frozen model: an artifact is refused on any other."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from sparsekv.errors import SparseKVError

SAMPLES_PER_TENSOR = 64


def model_fingerprint(model: Any) -> dict[str, Any]:
    """Architecture, layer and head counts, head dimension, RoPE parameters, and a hash of the weights.

    The hash covers every parameter's name and shape and an even sample of its values rounded to bfloat16, so that the
    same checkpoint loaded in float32 or bfloat16 has one fingerprint, and 8B parameters are hashed in seconds.
    """
    config = model.config.get_text_config()
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        flat = parameter.detach().reshape(-1)
        step = max(1, flat.numel() // SAMPLES_PER_TENSOR)
        sample = flat[::step][:SAMPLES_PER_TENSOR].to(torch.bfloat16).float().cpu()
        digest.update(sample.numpy().tobytes())
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        "architecture": type(model).__name__,
        "num_layers": config.num_hidden_layers,
        "num_query_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "rope": json.loads(json.dumps(rope, default=str)),
        "weights": digest.hexdigest()[:32],
    }


def check_fingerprint(
    expected: dict[str, Any], found: dict[str, Any], what: str, *, ignore: tuple[str, ...] = (),
) -> None:
    """Refuse a mismatch: `expected` is what `what` (an artifact or store) was made for, `found` the model at hand.

    Raises SparseKVError naming both sides of every field that differs.
    """
    differ = [key for key in expected if key not in ignore and expected[key] != found.get(key)]
    if differ:
        made = ", ".join(f"{key} {expected[key]}" for key in differ)
        here = ", ".join(f"{key} {found.get(key)}" for key in differ)
        raise SparseKVError(f"{what} was made for a model with {made}; this model has {here}. "
                            "Use the model it was made for, or train again for this one.")
