"""A training run on disk: which parts of the model this process trains, what is finished, and what a resumed run may go
on with.

Heads are independent, so ranks share nothing but the folder: each writes `parts/<part>.safetensors` for the layers and
heads it was dealt, and the first rank puts them together.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparsekv.artifacts.checks import digest, reason
from sparsekv.artifacts.fingerprint import check_fingerprint
from sparsekv.artifacts.format import CONFIG, TENSORS, write_tensors
from sparsekv.artifacts.hub.modelcard import FIGURE, README
from sparsekv.capture.store.store import CaptureStore
from sparsekv.trainers.metrics import FILE
from sparsekv.trainers.options import TrainingOptions
from sparsekv.trainers.pool import Part
from sparsekv.trainers.task import Task
from sparsekv.util.disk import TEMPORARIES, only_writer, temporary_of
from sparsekv.util.errors import SparseKVError
from sparsekv.util.memory import check_memory
from sparsekv.util.output import OutputKind, read_marker
from sparsekv.util.ranks import Ranks, join
from sparsekv.util.records import write_json

MARK = "training.json"
FREE = ("capture", "preset", "output", "resume", "overwrite", "verify", "device", "devices", "max_time")
"""Options that change where or how long a run goes on, or that say nothing by themselves; not what it computes."""
OWN = (*(x for name in (CONFIG, TENSORS, MARK, FILE, README, FIGURE) for x in (name, temporary_of(name))),
       "parts/*.safetensors", f"parts/{TEMPORARIES}", "checkpoints/*.ckpt", f"checkpoints/{TEMPORARIES}")


def artifact_output(kind: str) -> OutputKind:
    """The folder of a finished or interrupted training of this kind of artifact."""
    def made(folder: Path) -> bool:
        config, mark = read_marker(folder / CONFIG), read_marker(folder / MARK)
        if (folder / CONFIG).is_file():
            return "format_version" in config and config.get("kind") == kind
        return "options" in mark and "documents" in mark and mark.get("kind", kind) == kind

    return OutputKind(f"a {kind} artifact", OWN, made)


class Run:
    """One training command, the only one that writes to its output until its block ends. `groups` are the parts this
    rank trains, those of a group at once."""

    def __init__(self, kind: str, options: TrainingOptions, recipe: Any, store: CaptureStore,
                 least: Callable[[int], int] = lambda heads: 0, sizes: str = ""):
        """least: bytes that so many KV heads take at the least when they are trained at once, by the options `sizes`.
        Raises SparseKVError where the device has fewer, before the output is touched."""
        from sparsekv.artifacts.hub.models import resolve_device

        self.options, self.recipe, self.store, self.out = options, recipe, store, Path(options.output)
        self.kind, self.output = kind, artifact_output(kind)
        self.ranks: Ranks = join(options.device, options.devices, 1)
        self.device = resolve_device(self.ranks.device(options.device))
        chosen = {k: v for k, v in {**asdict(options), **asdict(recipe)}.items() if k not in FREE}
        documents = [d["sha256"] for d in store.documents]
        self._mark: dict[str, Any] = json.loads(json.dumps(
            {"kind": kind, "options": chosen, "model": store.model, "documents": documents}))
        self._held = contextlib.ExitStack()
        self.pieces = pieces(len(store.layers), store.num_kv_heads, self.ranks.size)
        mine, most = (self.parts()[rank::self.ranks.size] for rank in (self.ranks.rank, 0))
        size = options.layer_group * self.pieces or max(1, len(mine))
        self.groups = [mine[i:i + size] for i in range(0, len(mine), size)]
        heads = sum(part.heads for part in most[:options.layer_group * self.pieces or None])
        check_memory(least(heads), self.device, f"{heads} KV heads at once, with {sizes},",
                     "use smaller ones, or fewer layers at once (--layer-group)")
        self.ranks.first_does(self._begin)
        self._ends = None if options.seconds() is None else time.monotonic() + (options.seconds() or 0)

    def parts(self) -> list[Part]:
        size = self.store.num_kv_heads // self.pieces
        return [Part(layer, a, size) for layer in self.store.layers for a in range(0, self.store.num_kv_heads, size)]

    def _begin(self) -> None:
        """A store that is sound, and a new output folder or the one of the run that is resumed."""
        with contextlib.ExitStack() as held:
            held.enter_context(only_writer(self.out))
            self.store.check(self.options.verify, self.options.seed)
            self._open_folder()
            self._held = held.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None:
            self.ranks.stop_others()
        self._held.close()

    def _open_folder(self) -> None:
        mark = self.out / MARK
        mine = self._mark
        if self.options.resume and mark.is_file():
            theirs = read_marker(mark)
            if not all(isinstance(theirs.get(k), kind) for k, kind in (
                    ("model", dict), ("options", dict), ("documents", list))):
                raise SparseKVError(f"{str(mark)!r} is damaged; delete that folder and train again")
            name = f"the interrupted training in {str(self.out)!r}"
            check_fingerprint(theirs["model"], mine["model"], name)
            differ = [k for k, v in theirs["options"].items()  # an option that this version lacks and that was off
                      if (v or k in mine["options"]) and v != mine["options"].get(k)]
            if differ:
                raise SparseKVError(f"{name} was started with " + ", ".join(
                    f"{k} {theirs['options'][k]}" for k in differ) + "; now found " + ", ".join(
                    f"{k} {mine['options'].get(k)}" for k in differ) + ". Give the same options, or --overwrite.")
            if theirs["documents"] != mine["documents"]:
                raise SparseKVError(f"{name} read other documents than the capture store {str(self.store.path)!r} "
                                    "holds; give the same store, or --overwrite")
            return
        if self.options.resume and (self.out / CONFIG).is_file():
            raise SparseKVError(f"the training in {str(self.out)!r} is finished: there is nothing to resume; "
                                "--overwrite trains again")
        if mark.is_file() and not self.options.overwrite:
            raise SparseKVError(f"{str(self.out)!r} holds an interrupted training; add --resume to go on with it, or "
                                "--overwrite to start again")
        if self.options.resume and not (self.out.exists() and any(self.out.iterdir())):
            print(f"nothing to resume in {str(self.out)!r}: starting from the beginning", file=sys.stderr)
        self.output.prepare(self.out, self.options.overwrite)

    def start(self) -> None:
        """The store is sound and training begins: from now on the folder holds a run that can be resumed."""
        if self.ranks.rank == 0 and not (self.out / MARK).is_file():
            write_json(self.out / MARK, self._mark)

    def fit(self, task: Task, group: int, kind: str, description: str, steps: int, lr: float) -> None:
        """Train the task of a group of parts; it gets its share of what is left of --max-time."""
        from sparsekv.trainers.fit import fit

        seconds = None
        if self._ends is not None:
            seconds = max(1.0, (self._ends - time.monotonic()) / (len(self.groups) - group))
        fit(task, steps=steps, lr=lr, output=self.out, name=f"{kind}-{self.groups[group][0].name}", group=group,
            description=description, device=self.device, resume=self.options.resume, max_seconds=seconds,
            quiet=self.ranks.rank > 0,
            heads=[f"{part.layer}.{part.first + h}" for part in self.groups[group] for h in range(part.heads)])

    def finished(self, parts: list[Part]) -> bool:
        """Return whether an earlier run has trained these."""
        there = all(self._file(p.name).is_file() for p in parts)
        if there:
            print(f"{parts[0].name} to {parts[-1].name}: trained before the run was interrupted", file=sys.stderr)
        return there

    def keep(self, parts: list[Part], result: dict[str, Tensor]) -> None:
        """Write what was trained for a group of parts: tensors `[heads of all parts, ...]`."""
        for i, part in enumerate(parts):
            rows = {k: v.detach().unflatten(0, (len(parts), -1))[i] for k, v in result.items()}
            self.save(part.name, rows)
        for past in (*self.out.glob(f"checkpoints/*-{parts[0].name}.ckpt"), self._file(f"kmeans-{parts[0].name}")):
            past.unlink(missing_ok=True)

    def save(self, name: str, tensors: dict[str, Tensor]) -> None:
        """A file of this run's own, written whole or not at all, with its checksum."""
        held = {k: t.cpu() for k, t in tensors.items()}
        write_tensors(self._file(name), held, {"sha256": digest(self._whose(name), held)})

    def saved(self, name: str) -> dict[str, Tensor] | None:
        """Return what `save` wrote in the run that is resumed."""
        return self._read(name, self.device) if self.options.resume and self._file(name).is_file() else None

    def _whose(self, name: str) -> dict[str, Any]:
        """What a part's checksum is over beside its tensors: name, kind, model and text."""
        return {"part": name, **{k: self._mark[k] for k in ("kind", "model", "documents")}}

    def _read(self, name: str, device: str = "cpu") -> dict[str, Tensor]:
        path = self._file(name)
        try:
            with safe_open(str(path), framework="pt") as file:
                sha = (file.metadata() or {}).get("sha256")
                tensors = {k: file.get_tensor(k) for k in file.keys()}
            problem = None if sha == digest(self._whose(name), tensors) else "its checksum differs"
        except (OSError, SafetensorError, ValueError) as error:
            problem = reason(error)
        if problem:
            raise SparseKVError(f"{str(path)!r} is damaged ({problem}); delete it, and the same command with --resume "
                                "trains that part again")
        return {k: t.to(device) for k, t in tensors.items()}

    def _file(self, name: str) -> Path:
        return self.out / "parts" / f"{name}.safetensors"

    def finish(self, assemble: Callable[[dict[str, Tensor]], None]) -> None:
        """Wait for all ranks; the first then gives `assemble` every tensor, `[L, H, ...]`, and clears up."""
        self.ranks.barrier()
        if self.ranks.rank == 0:
            files = [self._read(p.name) for p in self.parts()]
            layers = [files[i:i + self.pieces] for i in range(0, len(files), self.pieces)]
            assemble({k: torch.stack([torch.cat([f[k] for f in layer]) for layer in layers]) for k in files[0]})
            for folder in ("parts", "checkpoints"):
                shutil.rmtree(self.out / folder, ignore_errors=True)
            (self.out / MARK).unlink(missing_ok=True)
            self.output.done(self.out)
        self.ranks.barrier()


def pieces(layers: int, heads: int, ranks: int) -> int:
    """Into how many parts the KV heads of a layer are cut, so that every rank has one where that is possible."""
    return next((p for p in range(1, heads + 1) if heads % p == 0 and layers * p >= ranks), heads)
