"""Run a Lightning module for a number of steps: one progress bar, metrics as CSV, checkpoints, nothing else printed."""

from __future__ import annotations

import contextlib
import csv
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sparsekv.progress import progress


def fit(
    module: Any, *, steps: int, output: Path, description: str, device: str, precision: Any = "32-true",
    checkpoint_every: int = 0, resume: bool = False, seed: int = 0,
) -> dict[str, list[float]]:
    """Train `module`, whose `training_step` receives the step's number. Returns the metrics it logged, by name.

    Metrics go to `output/metrics.csv`. With `checkpoint_every` a checkpoint is kept in `output/checkpoints`, from which
    `resume` goes on (weights and optimiser state only: no code is unpickled).
    """
    import lightning
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    history: dict[str, list[float]] = {"step": []}
    checkpoint = output / "checkpoints" / "last.ckpt"

    class Bar(Callback):
        def __init__(self, advance: Callable[..., None]):
            self.advance = advance

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            every = max(1, steps // 100)
            note = None
            if trainer.global_step % every == 0 or trainer.global_step == steps:
                values = {k: float(v) for k, v in trainer.callback_metrics.items()}
                history["step"].append(trainer.global_step)
                for name, value in values.items():
                    history.setdefault(name, []).append(value)
                note = f"loss {values['loss']:.4g}" if "loss" in values else None
            self.advance(1, note)

    with _silence(), progress(description, steps, "steps") as advance:
        callbacks: list[Any] = [Bar(advance)]
        if checkpoint_every:
            callbacks.append(ModelCheckpoint(
                dirpath=checkpoint.parent, filename="last", every_n_train_steps=checkpoint_every, save_top_k=1,
                enable_version_counter=False))
        if resume and checkpoint.is_file():
            state = torch.load(checkpoint, weights_only=True, map_location="cpu")
            advance(int(state["global_step"]))
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="gpu" if device.startswith("cuda") else "cpu", devices=1, precision=precision,
            logger=False, callbacks=callbacks, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=bool(checkpoint_every), num_sanity_val_steps=0, use_distributed_sampler=False)
        extra: dict[str, Any] = {"weights_only": True} if resume and checkpoint.is_file() else {}
        trainer.fit(module, Steps(steps), ckpt_path=str(checkpoint) if extra else None, **extra)
    write_metrics(output / "metrics.csv", history)
    return history


def Steps(count: int) -> Any:
    """A data module that yields the numbers of the steps; the module draws its batch from them, on its own device."""
    import lightning

    class _Steps(lightning.LightningDataModule):
        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(range(count), batch_size=None)  # type: ignore[arg-type]

    return _Steps()


def write_metrics(path: Path, history: dict[str, list[float]]) -> None:
    names = list(history)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(zip(*history.values(), strict=False))


def read_metrics(path: Path) -> dict[str, list[float]]:
    """The columns of a `metrics.csv`."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.reader(file))
    return {name: [float(r[i]) for r in rows[1:]] for i, name in enumerate(rows[0])} if rows else {}


@contextlib.contextmanager
def _silence() -> Any:
    loggers = [logging.getLogger(n) for n in ("lightning", "lightning.pytorch", "lightning.fabric")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def cosine(optimizer: Any, steps: int, warmup: float = 0.05) -> Any:
    """Learning rate: linear warm-up over a share of the steps, then half a cosine to zero."""
    import math

    def factor(step: int) -> float:
        rise = max(1, int(steps * warmup))
        if step < rise:
            return (step + 1) / rise
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - rise) / max(1, steps - rise))))

    return {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, factor), "interval": "step"}
