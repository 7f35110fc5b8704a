"""Train a batch of independent heads under Lightning: its Trainer, checkpoints, timer, validation and signals.

Two things Lightning does not do are done by hand. A batch is a block of steps: on CUDA every step of it is the replay
of one graph, so that neither Python nor Lightning nor a synchronisation stands between two steps of a millisecond or
two. And every head keeps the weights of its own best validation, unless the task asks for the last ones: heads are
trained together and know nothing of each other. An epoch is one block, which makes the end of every block a place to
stop and to go on from.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import pickle
import signal
import sys
import threading
import time
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader

from sparsekv.trainers.metrics import FILE, read_rows, write_metrics
from sparsekv.trainers.muon import Muon
from sparsekv.trainers.task import Task, cosine_factor
from sparsekv.util.disk import disk_error, placed
from sparsekv.util.errors import Interrupted, SparseKVError
from sparsekv.util.progress import progress

BLOCK = 200
"""Steps of a block, at most; a run has at least a hundred blocks where it has as many steps."""
CHECKPOINT_BLOCKS = 5
VALIDATIONS = 5
"""Validations in a run, evenly spaced; the last one at its end."""
SHOWN_HEADS = 4
EAGER_STEPS = 3
"""Steps on CUDA before the graph is recorded: libraries load and Triton compiles."""


def fit(
    task: Task, *, steps: int, lr: float, output: Path, name: str, description: str, device: str, group: int = 0,
    resume: bool = False, max_seconds: float | None = None, quiet: bool = False, heads: Sequence[str] = (),
) -> None:
    """Train `task` in place, on `device`; afterwards every head has the weights of its best validation, or its last.

    `output/metrics.csv` gets a row a block, with `group` in it, unless `quiet`. The checkpoint is
    `output/checkpoints/<name>.ckpt`, read without unpickling any code; with `resume` training goes on from there and
    says so. Raises Interrupted after SIGTERM or Ctrl-C, once the block is done and the checkpoint written; and
    SparseKVError where a loss or a weight is NaN or infinite, with the step, the `heads` (names of the KV heads) and
    the last good checkpoint.
    """
    checkpoint = output / "checkpoints" / f"{name}.ckpt"
    found = checkpoint if resume and checkpoint.is_file() else None
    if found:
        check_checkpoint(found)
    module = HeadsInTraining(task, lr, name)
    size = max(1, min(BLOCK, steps // 100))
    blocks = -(-steps // size)
    every = max(1, blocks // VALIDATIONS)
    interruption = Interruption(checkpoint)
    callbacks: list[Callback] = [
        ModelCheckpoint(output / "checkpoints", name, every_n_epochs=CHECKPOINT_BLOCKS, save_on_train_epoch_end=True,
                        enable_version_counter=False),
        interruption]
    if max_seconds is not None:
        callbacks.append(Timer(timedelta(seconds=max_seconds), verbose=False))
    if not quiet:
        callbacks.append(Bar(description, steps))
    with _quietly(device), interruption.noted():
        trainer = Trainer(
            max_epochs=blocks, reload_dataloaders_every_n_epochs=1, check_val_every_n_epoch=every,
            accelerator="gpu" if device.startswith("cuda") else "cpu",
            devices=[torch.device(device).index or 0] if device.startswith("cuda") else 1,
            # one process of perhaps several: they share nothing, so Lightning must not look for the others
            plugins=[LightningEnvironment(), WholeCheckpoints()], num_nodes=1, use_distributed_sampler=False,
            callbacks=callbacks, logger=False if quiet else Metrics(output / FILE, group),
            enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0)
        try:
            trainer.fit(module, datamodule=Draws(task, steps, size), ckpt_path=found, weights_only=True)
        except SIGTERMException as error:
            stopped, interruption.received = interruption.received or signal.SIGTERM, None
            raise Interrupted(f"{description}: stopped at step {trainer.global_step} of {steps}, with a checkpoint; "
                              "the same command with --resume goes on from there", stopped) from error
        except Diverged as error:
            raise SparseKVError(f"{description}: {error.what} at step {error.step} of {steps}"
                                f"{_of_heads(error.rows, heads)}; {_good(checkpoint)}; train anew (--overwrite) with a "
                                "lower --lr") from error
    module.restore_best()
    task.to(device).eval().requires_grad_(False)


def check_checkpoint(path: Path) -> None:
    """Raises SparseKVError for what is no whole checkpoint of `fit`, or one of another part; no code in it is run.

    Its bytes are compared with the CRC-32 that a file of torch holds of each of its records."""
    try:
        with zipfile.ZipFile(path) as records:
            flipped = records.testzip()
        found = {} if flipped else torch.load(path, map_location="cpu", weights_only=True)
        problem = (f"checksum of {flipped}" if flipped else
                   "it is none of a training" if not {"state_dict", "best", "loops", "name"} <= set(found) else
                   f"it is of {found['name']}" if found["name"] != path.stem else None)
    except (OSError, EOFError, RuntimeError, ValueError, TypeError, KeyError, IndexError, NotImplementedError,
            UnicodeDecodeError, zipfile.BadZipFile, zlib.error, pickle.UnpicklingError) as error:
        problem = type(error).__name__
    if problem:
        raise SparseKVError(f"the checkpoint {str(path)!r} cannot be read; delete it, and the same command with "
                            f"--resume trains that part from its beginning ({problem})")


class Diverged(Exception):
    """A loss or weights that are NaN or infinite. rows: of which heads, of as many as the losses have."""

    def __init__(self, what: str, step: int, rows: list[int]):
        super().__init__(what)
        self.what, self.step, self.rows = what, step, rows


def _of_heads(rows: list[int], names: Sequence[str]) -> str:
    if not rows:
        return ""
    shown = [names[row] if row < len(names) else str(row) for row in rows[:SHOWN_HEADS]]
    more = f" and {len(rows) - SHOWN_HEADS} more" if len(rows) > SHOWN_HEADS else ""
    return f" in {'layer.head' if names else 'heads'} {', '.join(shown)}{more}"


def _good(checkpoint: Path) -> str:
    if not checkpoint.is_file():
        return "no checkpoint was written before"
    held = torch.load(checkpoint, map_location="cpu", weights_only=True)
    return f"the last good checkpoint is {str(checkpoint)!r}, of step {held['global_step']}"


class WholeCheckpoints(TorchCheckpointIO):
    """Checkpoints written beside their place and renamed; Lightning's own pass through the temporary folder."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        with placed(Path(path)) as temporary:
            try:
                torch.save(checkpoint, temporary)
            except RuntimeError as error:  # torch's word for a full disk
                raise disk_error(OSError(errno.ENOSPC, "not all of it was taken"), path) from error


class HeadsInTraining(LightningModule):
    """A task, its optimisers, and every head's best weights."""

    def __init__(self, task: Task, lr: float, part: str):
        super().__init__()
        self.automatic_optimization = False
        self.task, self.lr, self.part = task, lr, part
        self.best: dict[str, Tensor] = {}
        self.best_error = torch.empty(0)
        self.validated = -1
        self.draw: dict[str, Tensor] = {}
        self.sums: dict[str, Tensor] = {}
        self.graph: torch.cuda.CUDAGraph | None = None
        self.eager = 0

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        task = self.task
        matrices = [p for p in task.parameters() if task.muon and p.dim() > 2]
        others = [p for p in task.parameters() if not (task.muon and p.dim() > 2)]
        self.rate = torch.tensor(self.lr, device=self.device)
        found: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, lr=self.rate, betas=task.betas, fused=True, weight_decay=task.weight_decay,
                              capturable=self.device.type == "cuda")]
        if matrices:
            found.append(Muon(matrices, lr=self.rate, weight_decay=task.weight_decay))
        return found

    def on_train_start(self) -> None:
        for optimizer in self.trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.rate  # a checkpoint brings its own
        if self.global_step:
            print(f"resumed from the checkpoint at step {self.global_step}", file=sys.stderr)

    def training_step(self, block: dict[str, Tensor]) -> Tensor:
        """The steps of a block, one after the other; returns their mean loss."""
        count = block["rate"].shape[0]
        began = time.perf_counter()
        for total in self.sums.values():
            total.zero_()
        if not self.draw:
            self.draw = {name: rows[0].clone() for name, rows in block.items()}
        for step in range(count):
            for name, rows in block.items():
                self.draw[name].copy_(rows[step])
            self._replay() if self.device.type == "cuda" else self._step()
        # Lightning counts the steps of the optimisers that it calls itself
        self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total.completed += count
        means = {name: float(total.mean()) / count for name, total in self.sums.items()}
        self._report({**means, "ms_per_step": 1000 * (time.perf_counter() - began) / count})
        self._check_numbers()
        return self.sums["loss"].mean() / count

    def _check_numbers(self) -> None:
        """Raises Diverged; before the block's checkpoint is written."""
        loss = self.sums["loss"].reshape(len(self.sums["loss"]), -1).sum(1)
        rows = (~loss.isfinite()).nonzero().flatten().tolist()
        if rows:
            raise Diverged(f"the loss is {float(loss[rows[0]])}", self.global_step, rows)
        heads = len(loss)
        sums = torch.stack([p.detach().reshape(heads, -1).sum(1) for p in self.task.parameters()
                            if len(p) % heads == 0])
        rows = (~sums.isfinite()).any(0).nonzero().flatten().tolist()
        if rows:
            raise Diverged("weights are NaN or infinite", self.global_step, rows)

    def _report(self, metrics: dict[str, float]) -> None:
        if self.logger is not None:
            self.logger.log_metrics(metrics, self.global_step)

    def _replay(self) -> None:
        if self.eager < EAGER_STEPS:
            side = torch.cuda.Stream(self.device)
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):
                self._step()
            torch.cuda.current_stream(self.device).wait_stream(side)
            self.eager += 1
            return
        if self.graph is None:
            self.task.zero_grad()
            torch.cuda.synchronize(self.device)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._step()
        self.graph.replay()

    def _step(self) -> None:
        draw = dict(self.draw)
        self.rate.copy_(draw.pop("rate") * self.lr)
        losses = self.task.losses(draw)
        self.task.zero_grad()
        # a head's gradient must not depend on how many others there are
        (losses["loss"].sum() / 100).backward()
        for optimizer in self.trainer.optimizers:
            optimizer.step()
        with torch.no_grad():
            for name, value in losses.items():
                if name not in self.sums:
                    self.sums[name] = torch.zeros_like(value, dtype=torch.float32)
                self.sums[name].add_(value.detach().float())

    def validation_step(self, _: Any) -> None:
        error = self.task.validate().float()
        before = self.best_error.to(error.device) if self.best else torch.full_like(error, math.inf)
        for name, value in self.task.state_dict().items():
            better = (error < before) | self.task.last_weights
            better = better.repeat_interleave(value.shape[0] // len(error))
            kept = self.best.get(name, value).to(value.device)
            self.best[name] = torch.where(better.reshape(-1, *[1] * (value.dim() - 1)), value, kept).clone()
        self.best_error = torch.minimum(error, before)
        self.validated = self.global_step
        self._report({"validation_error": float(error.mean())})

    @torch.no_grad()
    def on_train_end(self) -> None:
        if self.validated != self.global_step:
            self.task.eval()
            self.validation_step(None)

    def restore_best(self) -> None:
        if self.best:
            self.task.load_state_dict(self.best)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["name"] = self.part
        checkpoint["best"] = {"weights": self.best, "error": self.best_error, "step": self.validated}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        kept = checkpoint["best"]
        self.best, self.best_error, self.validated = kept["weights"], kept["error"], kept["step"]


class Draws(LightningDataModule):
    """The random choices of the next block; and a validation, which draws nothing."""

    def __init__(self, task: Task, steps: int, size: int):
        super().__init__()
        self.task, self.steps, self.size = task, steps, size

    def train_dataloader(self) -> DataLoader[Any]:
        first = self.trainer.global_step  # type: ignore[union-attr]
        count = min(self.size, self.steps - first)
        if count <= 0:  # resumed from the checkpoint of the last step
            return DataLoader([], batch_size=None)  # type: ignore[arg-type]
        rate = torch.tensor([1.0 if self.task.constant_rate else cosine_factor(s, self.steps)
                             for s in range(first, first + count)])
        return DataLoader([{**self.task.draws(first, count), "rate": rate}], batch_size=None)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader([0], batch_size=None)  # type: ignore[arg-type]


class Interruption(Callback):
    """SIGTERM and Ctrl-C end the run after the block, with a checkpoint."""

    def __init__(self, checkpoint: Path):
        self.checkpoint = checkpoint
        self.received: int | None = None

    def note(self, number: int, _: Any) -> None:
        self.received = number

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """A signal within is noted, here and by Lightning's own handler; one that stopped nothing is sent again."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.received is not None:
            signal.raise_signal(self.received)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning stops after the batch on SIGTERM and puts the handlers back afterwards; on Ctrl-C it stops within it
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.getsignal(signal.SIGTERM))
            if self.received is not None:
                signal.raise_signal(self.received)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException):
            trainer.save_checkpoint(self.checkpoint)


class Bar(Callback):
    """One bar, in steps."""

    def __init__(self, description: str, steps: int):
        self.bar = progress(description, steps, "steps")
        self.shown = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.advance, self.shown = self.bar.__enter__(), True
        self.advance(trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
                           ) -> None:
        self.advance(batch["rate"].shape[0], f"loss {float(outputs['loss']):.4g}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.bar.__exit__(None, None, None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.shown:
            self.on_train_end(trainer, pl_module)


class Metrics(Logger):
    """`metrics.csv`, one group's rows after the other's; a resumed run drops those past its checkpoint."""

    name, version = "metrics", 0

    def __init__(self, path: Path, group: int):
        super().__init__()
        self.path, self.group = path, group
        self.rows: list[dict[str, Any]] | None = None

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self.rows is None:
            before = read_rows(self.path) if self.path.is_file() else []
            self.rows = [{**r, "group": int(float(r["group"])), "step": int(float(r["step"]))} for r in before]
            self.rows = [r for r in self.rows if (r["group"], r["step"]) < (self.group, step)]
        if self.rows and self.rows[-1]["step"] == step and self.rows[-1]["group"] == self.group:
            self.rows[-1] |= metrics
        else:
            self.rows.append({"group": self.group, "step": step or 0, **metrics})
        write_metrics(self.path, self.rows)


@contextlib.contextmanager
def _quietly(device: str) -> Iterator[None]:
    """Lightning's remarks left out; matrix products in TF32 on CUDA."""
    loggers = [logging.getLogger(n) for n in ("lightning", "lightning.pytorch", "lightning.fabric")]
    levels, before = [logger.level for logger in loggers], torch.get_float32_matmul_precision()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    torch.set_float32_matmul_precision("high" if device.startswith("cuda") else "highest")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_float32_matmul_precision(before)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
