"""What can be attached to: models, caches and artifacts, checked before anything is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from sparsekv.artifacts.hub.families import check_family
from sparsekv.artifacts.hub.named import find_artifacts
from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.runtime.hf.cache import SparseCache
from sparsekv.util.errors import SparseKVError

ARTIFACTS: dict[str, type[RouterArtifact] | type[PhiArtifact]] = {"router": RouterArtifact, "phi": PhiArtifact}


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise SparseKVError(f"attach expects a transformers model, found {type(model).__name__}")
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        raise SparseKVError("attach works on the model itself, found one wrapped by torch.compile; attach to the "
                            "uncompiled model (model._orig_mod, or load it again)")
    if not hasattr(model, "config"):
        raise SparseKVError(f"attach expects a transformers model with a config, found {type(model).__name__}")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise SparseKVError(f"{type(model).__name__} has no weights in memory ({name} is on the meta device); load "
                                "them, on a device or on devices that they fit on")
    if getattr(model.config, "is_encoder_decoder", False):
        raise SparseKVError(f"{type(model).__name__} is an encoder-decoder model; sparsekv works on decoder-only "
                            "models")
    check_family(model)


def check_cache(cache: Any) -> None:
    if not isinstance(cache, SparseCache):
        raise SparseKVError(f"a {type(cache).__name__} has no sparse index; leave past_key_values out, or pass the "
                            "SparseCache of attachment.cache() or attachment.prefill()")


def load_artifacts(artifacts: Any, router: Any, phi: Any) -> tuple[Any, Any]:
    """Router and feature maps, each None where there is none. artifacts: folder or name of a training, or of one of
    them, for what is not given by itself. Raises SparseKVError."""
    found: dict[str, Path] = {}
    if artifacts is not None:
        if not isinstance(artifacts, str | Path):
            raise SparseKVError(f"artifacts is a {type(artifacts).__name__}; expected a folder or a name on the hub, "
                                "as user/name")
        given = {"router": router, "phi": phi}
        found = find_artifacts(artifacts)
        if not any(kind in ARTIFACTS and given[kind] is None for kind in found):
            raise SparseKVError(f"{str(artifacts)!r} holds {', '.join(found)}; expected what is not given by router "
                                "and phi")
    return (as_artifact(found.get("router") if router is None else router, "router"),
            as_artifact(found.get("phi") if phi is None else phi, "phi"))


def as_artifact(artifact: Any, kind: str) -> Any:
    """An artifact from its folder or by its name on the hub, or the object itself; None for None. Raises SparseKVError
    for anything else."""
    wanted = ARTIFACTS[kind]
    if artifact is None or isinstance(artifact, wanted):
        return artifact
    if isinstance(artifact, str | Path):
        return wanted.load(artifact)
    raise SparseKVError(f"{kind} is a {type(artifact).__name__}; expected a {wanted.__name__} or the folder of one, "
                        "or its name on the hub, as user/name")
