"""`sparsekv inspect`: what a store or an artifact is, how good it is, on what it was trained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparsekv.util.config import option
from sparsekv.util.errors import SparseKVError, printable


@dataclass(frozen=True)
class InspectConfig:
    path: str = option(help="What `generate` takes as artifacts: a folder, smollm2-135m, or a name on the hub as "
                            "user/name; or a capture store, whose path may be any fsspec URL.",
                       argument=True, metavar="PATH")
    verify: bool = option(False, help="Also read every shard of a store and compare its checksum.")
    heads: bool = option(False, help="Also print the quality of every head of an artifact.")
    model: str | None = option(None, help="Also compare all bits of this model's weights with those it was made for: "
                                          "Hugging Face name, folder, .gguf file, or package:NAME; without it weights "
                                          "are not compared.")
    dtype: str = option("auto", help="Arithmetic of that model: auto, float32, bfloat16 or float16.")
    device: str = option("auto", help="Where it is read: auto, cpu, cuda, or balanced.")


def inspect_path(config: InspectConfig) -> None:
    """Print the description. Raises SparseKVError for anything that is neither, and for a store that fails `verify`."""
    from sparsekv.artifacts.card import heads_best_dense
    from sparsekv.artifacts.format import read_config
    from sparsekv.artifacts.hub.named import find_folder
    from sparsekv.artifacts.hub.text_quality import read_quality
    from sparsekv.artifacts.phi import PhiArtifact
    from sparsekv.artifacts.router import RouterArtifact
    from sparsekv.capture.store.store import CaptureStore

    remote = "://" in str(config.path)
    path = Path(config.path) if remote or Path(config.path).exists() else find_folder(config.path)
    if all((path / kind / "config.json").is_file() for kind in ("router", "phi")):
        for kind in ("router", "phi"):
            inspect_path(replace(config, path=str(path / kind)))
        if (quality := read_quality(path)) is not None:
            say(f"\n{quality.text()}")
        return
    if remote or not (path / "config.json").is_file():
        store = CaptureStore.open(config.path)
        say(store.summary())
        _describe_model(store.model)
        say(f"corpus {store.config['corpus']} ({store.config['split']}), seed {store.config['seed']}, "
              f"{store.config.get('storage_dtype', 'bfloat16')}")
        _compare(store.model, config, f"the store {str(store.path)!r}")
        for layer, reason in store.manifest.get("skipped_layers", {}).items():
            say(f"layer {layer} was skipped: {reason}")
        if config.verify:
            problems = store.verify()
            if problems:
                raise SparseKVError(f"the store {str(store.path)!r} is damaged:\n  " + "\n  ".join(problems))
            say(f"verified: {len(store.manifest['shards'])} shards are sound")
        return
    kinds: dict[str, Any] = {"router": RouterArtifact, "phi": PhiArtifact}
    kind = read_config(path)["kind"]
    if kind not in kinds:
        raise SparseKVError(f"{str(path)!r} is a {kind!r} artifact; this version knows {', '.join(kinds)}")
    artifact = kinds[kind].load(path)
    say(artifact.summary())
    _describe_model(artifact.config.model)
    _compare(artifact.config.model, config, f"the artifact {str(path)!r}")
    origin = artifact.config.provenance
    try:
        say(f"trained on {origin['corpus']} ({origin['split']}), {len(origin['train_documents'])} windows of "
              f"{origin['context_length']} tokens; validated on {len(origin['validation_documents'])} others")
    except (KeyError, TypeError):
        say("what it was trained on is not recorded")
    if "disjoint_by" in origin:
        say(f"training and validation are disjoint by {origin['disjoint_by']} ({origin.get('hash')})")
    dense = heads_best_dense(kind, artifact.config.layers, artifact.config.quality)
    say("heads best left dense: " + ("; ".join(
        f"layer {layer}: {', '.join(map(str, heads))}" for layer, heads in dense.items()) or "none"))
    if config.heads:
        _print_heads(artifact.config)


def say(text: str) -> None:
    """Print what a file says."""
    print(printable(text))


def _describe_model(model: dict[str, Any]) -> None:
    say(f"model {model['architecture']}, {model['num_layers']} layers, {model['num_query_heads']}/"
          f"{model['num_kv_heads']} heads of {model['head_dim']}, weights {model['weights'][:12]}")


def _compare(model: dict[str, Any], config: InspectConfig, what: str) -> None:
    """Say what of the weights a model is known by, and compare all of them where a model is named."""
    from sparsekv.artifacts.fingerprint import BITS, SAMPLES_PER_TENSOR, check_all_bits
    from sparsekv.artifacts.hub.models import load_model

    say(f"its model is known by {SAMPLES_PER_TENSOR} values of every weight" + (
        f", and by all bits in {model.get('dtype')} ({model[BITS][:12]})" if isinstance(model.get(BITS), str) else ""))
    if config.model is not None:
        check_all_bits(model, load_model(config.model, dtype=config.dtype, device=config.device)[0], what)
        say(f"all bits of {config.model} are those that it was made for")


def _print_heads(config: Any) -> None:
    from sparsekv.artifacts.card import sound

    for name, table in sound(config.quality, len(config.layers)).get("per_head", {}).items():
        say(f"{name}:")
        for layer, values in zip(config.layers, table, strict=True):
            say(f"  layer {layer:>3}: " + " ".join(f"{v:.3f}" for v in values))
