"""What identifies a frozen model: an artifact is refused on any other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from sparsekv.util.errors import SparseKVError

SAMPLES_PER_TENSOR = 64
AT_ONCE = 1 << 26
"""Values that are hashed at once."""
BITS = "bits"
WEIGHTS = ("weights", "weights_float16")
"""Hashes of rounded weights; older fingerprints have the first alone."""
MODES = ("rope", "scale", "window", "softcap")
"""How a model rotates and attends, which its weights do not say."""


def model_fingerprint(model: Any, *, whole: bool = False) -> dict[str, Any]:
    """Architecture, layer and head counts, head dimension, RoPE parameters, how layers attend, the arithmetic, and
    hashes of the weights.

    A hash covers every weight's name and shape and an even sample of 64 of its values, rounded to bfloat16 (`weights`)
    or to float16 (`weights_float16`): 8B parameters are hashed in seconds, and of two models of one checkpoint, loaded
    in whatever arithmetic, at least one hash is the same. But for one pair: a float32 checkpoint loaded in float16 and
    in bfloat16, since rounding twice is not rounding once. whole: also a hash of all bits (`bits`), of this arithmetic
    alone, for one read of the weights. Raises SparseKVError for weights that are not in memory.
    """
    config = model.config.get_text_config()
    digests = {torch.bfloat16: hashlib.sha256(), torch.float16: hashlib.sha256()}
    parameters = dict(sorted(_weights(model).items()))
    for (name, parameter), sample in zip(parameters.items(), _samples(list(parameters.values())), strict=True):
        for dtype, digest in digests.items():
            digest.update(f"{name}{tuple(parameter.shape)}".encode())
            digest.update(sample.to(dtype).float().numpy().tobytes())
    floating = (p.dtype for p in parameters.values() if p.is_floating_point() and not p.is_quantized)
    arithmetic = next((p.dtype for p in model.parameters() if p.is_floating_point()), next(floating, None))
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        "architecture": type(model).__name__,
        "num_layers": config.num_hidden_layers,
        "num_query_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "rope": json.loads(json.dumps(rope, default=str)),
        "attention": _attention(model, config),
        "dtype": str(arithmetic).removeprefix("torch."),
        "weights": digests[torch.bfloat16].hexdigest()[:32],
        "weights_float16": digests[torch.float16].hexdigest()[:32],
        **({"bits": _all_bits(parameters)} if whole else {}),
    }


def _weights(model: Any) -> dict[str, Tensor]:
    """Parameters and what else a checkpoint has of the model: packed and quantized layers keep weights as buffers."""
    found = dict(model.named_parameters())
    for name, value in model.state_dict().items():
        if name not in found:
            parts = value if isinstance(value, tuple) else (value,)
            found |= {f"{name}.{i}" if len(parts) > 1 else name: part for i, part in enumerate(parts)
                      if isinstance(part, Tensor) and part.numel()}
    # a weight that is tied has several names in a checkpoint and one among the parameters
    named = {p.data_ptr() for p in model.parameters() if not p.is_meta}
    own = {name for name, _ in model.named_parameters()}
    found = {name: x for name, x in found.items() if name in own or x.is_quantized or x.data_ptr() not in named}
    for name, x in found.items():
        if x.is_meta:
            raise SparseKVError(f"{type(model).__name__} has no weights in memory ({name} is on the meta device), "
                                "which its fingerprint reads; load them, on a device or on devices that they fit on")
    return found


def _all_bits(weights: dict[str, Tensor]) -> str:
    """A hash of names, dtypes, shapes and all bytes, one weight at a time."""
    found = xxhash.xxh3_128()
    for name, x in weights.items():
        found.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        plain = x.detach().int_repr() if x.is_quantized else x.detach()
        for part in plain.contiguous().reshape(-1).split(AT_ONCE):
            found.update(part.cpu().view(torch.uint8).numpy().data)
    return found.hexdigest()


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
    flat = [(p.detach().dequantize() if p.is_quantized else p.detach()).reshape(-1) for p in parameters]
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
    apart = (*WEIGHTS, BITS, "dtype", "rope", "attention")
    differ = [key for key in expected if key not in apart and expected[key] != found.get(key)]
    expected, found = ({**x, **x.get("attention", {})} for x in (expected, found))
    differ += [key for key in MODES if key in expected and key in found and not _agree(expected[key], found[key])]
    same = any(key in expected and expected[key] == found.get(key) for key in WEIGHTS)
    if not same:
        differ.append("weights")
    elif expected.get("dtype") == found.get("dtype") and {BITS} <= expected.keys() & found.keys() and (
            expected[BITS] != found[BITS]):
        differ.append(BITS)
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


def check_all_bits(expected: dict[str, Any], model: Any, what: str) -> None:
    """Do what `check_fingerprint` does, of all bits of the weights. Raises SparseKVError also where `expected` has no
    hash of them in the arithmetic of the model at hand."""
    found = model_fingerprint(model, whole=True)
    check_fingerprint(expected, found, what)
    if BITS not in expected or expected.get("dtype") != found["dtype"]:
        made = f"in {expected['dtype']}" if BITS in expected else "before they were hashed"
        raise SparseKVError(f"{what} cannot be compared with all bits of this model in {found['dtype']}: it was made "
                            f"{made}; a sample of 64 values a weight agrees")
