"""The options that both trainers share, and how a preset fills in those that are not given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from sparsekv.util.config import SEEDS, check_ranges, option
from sparsekv.util.errors import SparseKVError, check_choice

DEFAULT = "default"
HIGHEST_RATE = 10.0
R = TypeVar("R")


@dataclass(frozen=True)
class TrainingOptions:
    capture: str = option(help="Capture store to train on (folder).")
    output: str = option(help="Folder of the new artifact.")
    validation_documents: int = option(0, group="Run", min=0, help="Last windows of the capture, kept for validation; "
                                       "0 takes a tenth of them, 1 to 4. Earlier windows of the same source documents "
                                       "are left out of training, where enough others are left [windows].")
    max_time: str | None = option(None, group="Run", help="Stop training after this long, and save what there is "
                                  "[DD:HH:MM:SS or HH:MM:SS]; looked at after every block of a hundredth of the steps, "
                                  "at most 200, and every group of layers has one. Without it no limit.")
    layer_group: int = option(0, group="Run", min=0, help="Layers trained at once, as memory allows; 0 takes all "
                              "[layers].")
    seed: int = option(0, group="Run", help="Seed of every random choice.", **SEEDS)
    resume: bool = option(False, group="Run", help="Go on from the last checkpoint of an interrupted run in --output.")
    overwrite: bool = option(False, group="Run", help="Replace an existing artifact.")
    verify: bool = option(False, group="Run", help="Compare the checksums of all shards of the capture first; without "
                          "it of 2 GiB of them, drawn by the seed.")
    device: str = option("auto", group="Run", help="auto, cpu or cuda.")
    devices: int = option(1, group="Run", min=1, help="Processes on this machine, one GPU each; layers and heads are "
                          "dealt out [processes].")

    def check(self) -> None:
        """Raises SparseKVError for options that contradict each other or cannot be read, and sizes that cannot be."""
        check_ranges(self)
        if self.resume and self.overwrite:
            raise SparseKVError("--resume goes on with the output, --overwrite replaces it; use one of them")
        self.seconds()

    def seconds(self) -> float | None:
        """`max_time` in seconds; None for no limit."""
        if self.max_time is None:
            return None
        parts = self.max_time.split(":")
        if not 3 <= len(parts) <= 4 or not all(p.isdigit() for p in parts):
            raise SparseKVError(f"--max-time {self.max_time!r} is no duration; expected DD:HH:MM:SS or HH:MM:SS")
        return float(sum(int(p) * size for p, size in zip(reversed(parts), (1, 60, 3600, 86_400), strict=False)))


def recipe_option(recipes: Mapping[str, Any], name: str, *, help: str, **extra: Any) -> Any:
    """An option whose default is a preset's: None until `chosen` looks it up. The help names all of them."""
    shown = str(getattr(recipes[DEFAULT], name))
    shown += "".join(f"; {preset}: {getattr(recipe, name)}" for preset, recipe in recipes.items()
                     if getattr(recipe, name) != getattr(recipes[DEFAULT], name))
    return option(None, help=f"{help} [default: {shown}]", **extra)


def chosen(options: Any, recipes: Mapping[str, R], recipe: R | None = None) -> R:
    """The preset's recipe, or `recipe`, with the options that were given in place of its own. Raises SparseKVError."""
    check_choice("preset", options.preset, recipes)
    given = {f.name: getattr(options, f.name, None) for f in fields(recipes[DEFAULT])}  # type: ignore[arg-type]
    lr = given.get("lr")
    if lr is not None and not 0 < lr <= HIGHEST_RATE:
        raise SparseKVError(f"--lr must be above 0 and up to {HIGHEST_RATE:g}, found {lr:g}")
    return replace(recipe or recipes[options.preset],  # type: ignore[type-var]
                   **{name: value for name, value in given.items() if value is not None})
