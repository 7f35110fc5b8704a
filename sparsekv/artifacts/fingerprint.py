"""What identifies a frozen model: an artifact is refused on any other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsekv.util.errors import SparseKVError

SAMPLES_PER_TENSOR = 64
WEIGHTS = ("weights", "weights_float16")
"""Hashes of rounded weights; older fingerprints have the first alone."""
MODES = ("rope", "scale", "window", "softcap")
"""How a model rotates and attends, which its weights do not say."""


def model_fingerprint(model: Any) -> dict[str, Any]:
    """Architecture, layer and head counts, head dimension, RoPE parameters, how layers attend, the arithmetic, and
    hashes of the weights.

    A hash covers every parameter's name and shape and an even sample of its values, rounded to bfloat16 (`weights`) or
    to float16 (`weights_float16`): 8B parameters are hashed in seconds, and of two models of one checkpoint, loaded in
    whatever arithmetic, at least one hash is the same. But for one pair: a float32 checkpoint loaded in float16 and in
    bfloat16, since rounding twice is not rounding once.
    """
    config = model.config.get_text_config()
    digests = {torch.bfloat16: hashlib.sha256(), torch.float16: hashlib.sha256()}
    parameters = dict(sorted(model.named_parameters()))
    for (name, parameter), sample in zip(parameters.items(), _samples(list(parameters.values())), strict=True):
        for dtype, digest in digests.items():
            digest.update(f"{name}{tuple(parameter.shape)}".encode())
            digest.update(sample.to(dtype).float().numpy().tobytes())
    first = next(iter(model.parameters()), None)
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        "architecture": type(model).__name__,
        "num_layers": config.num_hidden_layers,
        "num_query_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "rope": json.loads(json.dumps(rope, default=str)),
        "attention": _attention(model, config),
        "dtype": str(getattr(first, "dtype", None)).removeprefix("torch."),
        "weights": digests[torch.bfloat16].hexdigest()[:32],
        "weights_float16": digests[torch.float16].hexdigest()[:32],
    }


def _attention(model: Any, config: Any) -> dict[str, Any]:
    """The softmax scale, sliding window [tokens] and soft cap of the layers: one value where all have the same, else a
    list by layer. A window that no context of the model reaches is none."""
    from sparsekv.artifacts.hub.families import window_of
    from sparsekv.artifacts.hub.models import attention_modules

    found: dict[str, list[Any]] = {"scale": [], "window": [], "softcap": []}
    for layer, module in sorted(attention_modules(model).items()):
        scale = getattr(module, "scaling", None)
        found["scale"].append(float(f"{scale:.6g}") if isinstance(scale, float | int) else None)
        found["window"].append(window_of(module, config, layer))
        found["softcap"].append(getattr(module, "attn_logit_softcapping", None))
    return {name: values[0] if len(set(values)) == 1 else values for name, values in found.items() if values}


def _samples(parameters: Sequence[Tensor]) -> list[Tensor]:
    """An even sample of every parameter's values, on the CPU: one copy a device and dtype, for each waits for all that
    the device has to do."""
    flat = [p.detach().reshape(-1) for p in parameters]
    samples = [x[::max(1, x.numel() // SAMPLES_PER_TENSOR)][:SAMPLES_PER_TENSOR] for x in flat]
    alike: dict[Any, list[int]] = {}
    for i, x in enumerate(samples):
        alike.setdefault((x.device, x.dtype), []).append(i)
    for members in alike.values():
        together = torch.cat([samples[i] for i in members]).cpu()
        for i, x in zip(members, together.split([len(samples[i]) for i in members]), strict=True):
            samples[i] = x
    return samples


def _agree(expected: Any, found: Any) -> bool:
    """Whether two records say nothing that contradicts: what one of them does not say, as versions of transformers and
    of sparsekv differ in, is not compared."""
    if isinstance(expected, dict) and isinstance(found, dict):
        return all(_agree(expected[k], found[k]) for k in expected.keys() & found.keys())
    numbers = all(type(x) in (int, float) and abs(x) < 1e300 for x in (expected, found))
    return expected == found or (numbers and abs(expected - found) <= 1e-6 * abs(expected))


def check_fingerprint(expected: dict[str, Any], found: dict[str, Any], what: str) -> None:
    """Refuse a mismatch: `expected` is what `what` (an artifact or store) was made for, `found` the model at hand. The
    weights are the same where they are the same rounded to bfloat16 or to float16; their arithmetic is not compared.
    Of how a model rotates and attends, what both say is compared.

    Raises SparseKVError naming both sides of every field that differs.
    """
    apart = (*WEIGHTS, "dtype", "rope", "attention")
    differ = [key for key in expected if key not in apart and expected[key] != found.get(key)]
    expected, found = ({**x, **x.get("attention", {})} for x in (expected, found))
    differ += [key for key in MODES if key in expected and key in found and not _agree(expected[key], found[key])]
    same = any(key in expected and expected[key] == found.get(key) for key in WEIGHTS)
    if not same:
        differ.append("weights")
    if differ:
        made = ", ".join(f"{key} {expected[key]}" for key in differ)
        here = ", ".join(f"{key} {found.get(key)}" for key in differ)
        dtypes = tuple(str(x.get("dtype", "float32 or bfloat16")) for x in (expected, found))
        rounded = ""
        if differ == ["weights"] and dtypes[0] != dtypes[1]:
            rounded = (f" It was made in {dtypes[0]} and this model is in {dtypes[1]}: where both are rounded from one "
                       f"checkpoint, load the model in float32 or {dtypes[0].split()[-1]}.")
        raise SparseKVError(f"{what} was made for a model with {made}; this model has {here}. "
                            f"Use the model it was made for, or train again for this one.{rounded}")
