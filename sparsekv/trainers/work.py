"""A training run on disk: which parts of the model this process trains, what is finished, and what a resumed run may go
on with.

Heads are independent, so ranks share nothing but the folder: each writes `parts/<part>.safetensors` for the layers and
heads it was dealt, and the first rank puts them together.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparsekv.artifacts.fingerprint import check_fingerprint
from sparsekv.artifacts.format import CONFIG, prepare_output
from sparsekv.errors import SparseKVError
from sparsekv.ranks import Ranks, join
from sparsekv.store.store import CaptureStore
from sparsekv.trainers.fit import read_metrics, write_metrics
from sparsekv.trainers.options import TrainingOptions
from sparsekv.trainers.pool import Part

MARK = "training.json"
# options that change where or how long a run goes on, not what it computes
FREE = ("output", "resume", "overwrite", "device", "devices", "num_nodes", "max_time", "checkpoint_every",
        "tensorboard", "cuda_graph")


class Run:
    """One training command. `groups` are the parts this rank trains, those of a group at once."""

    def __init__(self, options: TrainingOptions, store: CaptureStore):
        from sparsekv.hub import resolve_device

        self.options, self.store, self.out = options, store, Path(options.output)
        self.ranks: Ranks = join(options.device, options.devices, options.num_nodes)
        self.device = resolve_device(self.ranks.device(options.device))
        self.ranks.first_does(self._begin)
        self.pieces = pieces(len(store.layers), store.num_kv_heads, self.ranks.size)
        mine = self.parts()[self.ranks.rank::self.ranks.size]
        size = options.layer_group * self.pieces or max(1, len(mine))
        self.groups = [mine[i:i + size] for i in range(0, len(mine), size)]
        self.history: dict[str, list[float]] = {}
        self._ends = None if options.seconds() is None else time.monotonic() + (options.seconds() or 0)

    def parts(self) -> list[Part]:
        size = self.store.num_kv_heads // self.pieces
        return [Part(layer, a, size) for layer in self.store.layers for a in range(0, self.store.num_kv_heads, size)]

    def _begin(self) -> None:
        """A new output folder, or the one of the run that is resumed."""
        mark = self.out / MARK
        mine = {"options": {k: v for k, v in asdict(self.options).items() if k not in FREE}, "model": self.store.model,
                "documents": [d["sha256"] for d in self.store.documents]}
        mine = self._mark = json.loads(json.dumps(mine))
        if self.options.resume and mark.is_file():
            held = json.loads(mark.read_text(encoding="utf-8"))
            name = f"the interrupted training in {str(self.out)!r}"
            check_fingerprint(held["model"], mine["model"], name)
            differ = [k for k, v in held["options"].items() if v != mine["options"].get(k) and k != "capture"]
            if differ:
                raise SparseKVError(f"{name} was started with " + ", ".join(
                    f"{k} {held['options'][k]}" for k in differ) + "; now found " + ", ".join(
                    f"{k} {mine['options'].get(k)}" for k in differ) + ". Give the same options, or --overwrite.")
            if held["documents"] != mine["documents"]:
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
        prepare_output(self.out, self.options.overwrite)

    def start(self) -> None:
        """The store is sound and training begins: from now on the folder holds a run that can be resumed."""
        if self.ranks.rank == 0 and not (self.out / MARK).is_file():
            (self.out / MARK).write_text(json.dumps(self._mark, indent=1) + "\n", encoding="utf-8")

    def seconds_left(self, group: int) -> float | None:
        """This group's share of what is left of --max-time; None without a limit."""
        if self._ends is None:
            return None
        return max(1.0, (self._ends - time.monotonic()) / (len(self.groups) - group))

    def finished(self, parts: list[Part]) -> bool:
        """Whether an earlier run has trained these."""
        there = all(self._file(p.name).is_file() for p in parts)
        if there:
            print(f"{parts[0].name} to {parts[-1].name}: trained before the run was interrupted", file=sys.stderr)
        return there

    def keep(self, parts: list[Part], result: dict[str, Tensor]) -> None:
        """Write what was trained for a group of parts: tensors `[heads of all parts, ...]`."""
        for i, part in enumerate(parts):
            rows = {k: v.detach().unflatten(0, (len(parts), -1))[i].cpu().contiguous() for k, v in result.items()}
            self.save(part.name, rows)
        for held in (*self.out.glob(f"checkpoints/*-{parts[0].name}.ckpt"), self._file(f"kmeans-{parts[0].name}")):
            held.unlink(missing_ok=True)

    def save(self, name: str, tensors: dict[str, Tensor]) -> None:
        """A file of this run's own, written whole or not at all."""
        path = self._file(name)
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_suffix(".tmp")
        save_file(tensors, str(temporary))
        temporary.replace(path)

    def held(self, name: str) -> dict[str, Tensor] | None:
        """What `save` wrote in the run that is resumed."""
        path = self._file(name)
        return load_file(str(path), device=self.device) if self.options.resume and path.is_file() else None

    def _file(self, name: str) -> Path:
        return self.out / "parts" / f"{name}.safetensors"

    def log(self, group: int, history: dict[str, list[float]]) -> None:
        """Add a group's metrics to `metrics.csv` (the first rank's)."""
        path = self.out / "metrics.csv"
        if not self.history and self.options.resume and path.is_file():
            self.history = read_metrics(path)
        have = len(next(iter(self.history.values()), []))
        rows = len(next(iter(history.values()), []))
        for name, values in {"group": [float(group)] * rows, **history}.items():
            self.history.setdefault(name, [float("nan")] * have).extend(values)
        for values in self.history.values():
            values.extend([float("nan")] * (have + rows - len(values)))
        if self.ranks.rank == 0:
            write_metrics(path, self.history)

    def finish(self, assemble: Callable[[dict[str, Tensor]], None]) -> None:
        """When all ranks are done, the first gives `assemble` every tensor, `[L, H, ...]`, and clears up."""
        self.ranks.barrier()
        if self.ranks.rank == 0:
            files = [load_file(str(self._file(p.name))) for p in self.parts()]
            layers = [files[i:i + self.pieces] for i in range(0, len(files), self.pieces)]
            assemble({k: torch.stack([torch.cat([f[k] for f in layer]) for layer in layers]) for k in files[0]})
            for folder in ("parts", "checkpoints"):
                shutil.rmtree(self.out / folder, ignore_errors=True)
            (self.out / MARK).unlink(missing_ok=True)
        self.ranks.barrier()


def pieces(layers: int, heads: int, ranks: int) -> int:
    """Into how many parts the KV heads of a layer are cut, so that every rank has one where that is possible."""
    return next((p for p in range(1, heads + 1) if heads % p == 0 and layers * p >= ranks), heads)
