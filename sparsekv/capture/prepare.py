"""Everything that is decided before the long work: may the output be written, does it fit, which layers."""

from __future__ import annotations

import shutil
import sys
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sparsekv.artifacts.fingerprint import check_fingerprint
from sparsekv.artifacts.hub.models import attention_sizes, cache_bytes, resolve_device
from sparsekv.capture.config import CaptureConfig, parse_layers, stored_queries
from sparsekv.capture.store.manifest import FORMAT_VERSION, MANIFEST
from sparsekv.capture.store.place import Place
from sparsekv.capture.store.store import storage_bytes
from sparsekv.core.rope import LayerRope
from sparsekv.util.disk import disk_error, temporary_of
from sparsekv.util.errors import SparseKVError
from sparsekv.util.memory import check_memory
from sparsekv.util.output import OutputKind, read_marker, refuse_others, strangers

TEMPORARY = temporary_of(MANIFEST)
OWN = (MANIFEST, TEMPORARY, *(
    f"{doc}/{name}" for doc in ("doc[0-9]*", ".doc[0-9]*.tmp") for name in ("*.safetensors", "document.json")))


def _is_store(folder: Path) -> bool:
    found = read_marker(folder / MANIFEST)
    return isinstance(found.get("config"), dict) and {"format_version", "model"} <= set(found)


STORE = OutputKind("a capture store", OWN, _is_store)


def check_output(place: Place, config: CaptureConfig) -> None:
    """Refuse what would be lost: a finished store, another run's part, a folder of something else. Writes nothing."""
    names = [n for n in place.names() if not fnmatchcase(n, TEMPORARY)]
    begun = _manifest(place)
    if config.overwrite and names and place.root is not None:
        STORE.check(place.root)
    elif config.overwrite and names:
        ours = begun is not None and {"config", "format_version", "model"} <= set(begun)
        refuse_others(str(place), STORE.what, strangers(names, (*OWN, "doc[0-9]*"), ours))
    elif begun is not None and begun.get("complete", True):
        raise SparseKVError(f"the output {str(place)!r} already holds a capture store; add --overwrite to replace it")
    elif begun is not None:
        if begun.get("config") != config.content():
            raise SparseKVError(f"the output {str(place)!r} holds an unfinished capture with other options; finish it "
                                "with the same options, or add --overwrite to start anew")
        print(f"going on with the unfinished capture in {place}", file=sys.stderr)
    elif names:
        raise SparseKVError(f"the output folder {str(place)!r} is not empty; choose another --output")
    if not place.writable():
        raise SparseKVError(f"cannot write to {str(place)!r}: the folder is read-only; choose another --output")


def begin_output(place: Place, config: CaptureConfig, model: dict[str, Any] | None = None) -> None:
    """Clear what an interrupted run left, set aside what is overwritten (a remote store is removed), and say in the
    manifest that the store is unfinished.

    model: the fingerprint of the model; an unfinished capture of another one is refused."""
    begun = None if config.overwrite else _manifest(place)
    if begun is not None and isinstance(begun.get("model"), dict) and model is not None:
        check_fingerprint(begun["model"], model, f"the unfinished capture {str(place)!r}")
    if config.overwrite and place.root is not None:
        STORE.prepare(place.root, True)
    try:
        place.make()
        for name in place.names():
            # the manifest goes last: an overwriting that is interrupted can be asked for again
            if name != MANIFEST and (config.overwrite or fnmatchcase(name, ".doc[0-9]*.tmp")):
                place.remove(name)
        place.write_json(MANIFEST, {"format_version": FORMAT_VERSION, "complete": False, "config": config.content(),
                                    "model": model})
    except OSError as error:
        raise disk_error(error, str(place)) from error


def _manifest(place: Place) -> dict[str, Any] | None:
    try:
        return place.read_json(MANIFEST)
    except SparseKVError as error:
        raise SparseKVError(f"{str(place)!r} holds a damaged {MANIFEST}; delete that folder or choose another "
                            "--output") from error


def check_space(config: CaptureConfig, model: Any, place: Place) -> int:
    """Say how many bytes the store will take; raises SparseKVError where the disk has fewer, or the device too little
    memory for the keys and values of one window. Returns the bytes.

    model: its transformers configuration (decoder part)."""
    layers, heads_q, heads_kv, dim = attention_sizes(model)
    needed = storage_bytes(
        num_documents=config.num_documents, num_layers=len(parse_layers(config.layers)) if config.layers else layers,
        heads_kv=heads_kv, heads_q=heads_q, length=config.context_length, queries=stored_queries(config), dim=dim)
    check_memory(cache_bytes(model, config.context_length), resolve_device(config.device),
                 f"keys and values of a window of {config.context_length} tokens", "use a shorter --context-length")
    free, done = place.free(), 0 if config.overwrite else _stored(place)
    print(f"the store takes {needed / 1e9:.2f} GB" + ("" if free is None else f" ({free / 1e9:.1f} GB free)"),
          file=sys.stderr)
    if free is not None and needed - done > free:
        raise SparseKVError(f"the store needs {(needed - done) / 1e9:.2f} GB and {str(place)!r} has "
                            f"{free / 1e9:.2f} GB free; use fewer documents or layers, or another --output")
    if place.root is None:
        # a document is put together locally while the one before it is uploaded
        here, folder = needed // config.num_documents * min(2, config.num_documents), tempfile.gettempdir()
        if here > (space := shutil.disk_usage(folder).free):
            raise SparseKVError(f"documents on their way to {str(place)!r} need {here / 1e9:.2f} GB in {folder} and it "
                                f"has {space / 1e9:.2f} GB free; use fewer layers, or set TMPDIR to another folder")
    return needed


def _stored(place: Place) -> int:
    if place.root is None or not place.root.exists():
        return 0
    return sum(f.stat().st_size for f in place.root.glob("doc*/*.safetensors"))


def check_layers(wanted: str | None, count: int) -> None:
    """Raises SparseKVError for a layer to store that a model of so many layers has not."""
    if wanted is not None and (most := max(parse_layers(wanted))) >= count:
        raise SparseKVError(f"--layers names layer {most}; this model has layers 0 to {count - 1}")


def choose_layers(wanted: str | None, ropes: dict[int, LayerRope], skipped: dict[int, str]) -> dict[int, LayerRope]:
    """The layers to store, and how they rotate; without `wanted` all in `ropes`, and those skipped are named on
    standard error. Raises SparseKVError, with the reason, for a layer that cannot be stored."""
    if wanted is None:
        for reason in dict.fromkeys(skipped.values()):
            layers = ", ".join(str(layer) for layer, why in skipped.items() if why == reason)
            print(f"layers {layers} are skipped: {reason}", file=sys.stderr)
        return ropes
    for layer in (chosen := parse_layers(wanted)):
        if layer not in ropes:
            raise SparseKVError(f"layer {layer} cannot be captured: "
                                f"{skipped.get(layer, 'the model has no such layer')}")
    return {layer: ropes[layer] for layer in chosen}
