"""Train a batch of independent heads for a number of steps, under Lightning: one progress bar, metrics as CSV,
validation, checkpoints, resume.

A task is a module that says what a step draws at random and what it loses. Steps come in blocks: the draws of a block
go to the device at once, and on CUDA every step is the replay of one graph, so that neither Python, nor Lightning,
nor a synchronisation stands between two steps.
"""

from __future__ import annotations

import contextlib
import csv
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sparsekv.progress import progress
from sparsekv.trainers.muon import Muon
from sparsekv.trainers.options import TrainingOptions

WARMUP = 0.05
EAGER_STEPS = 3
BLOCK = 200
NO_GAIN = 1e-3
M = TypeVar("M", bound=nn.Module)


class Task(nn.Module):
    """What is trained. Every parameter has the heads as its first dimension, and no head knows of another."""

    ema = 0.0
    weight_decay = 0.0
    betas = (0.9, 0.999)
    muon = False
    """Whether matrices take Muon's steps; vectors take Adam's."""

    def draws(self, first: int, count: int) -> dict[str, Tensor]:
        """Random choices of the steps `first..first + count`, on the CPU, one row a step. They depend on nothing but
        the seed and the step."""
        raise NotImplementedError

    def losses(self, draw: dict[str, Tensor]) -> dict[str, Tensor]:
        """One step's losses by name, a value a head; `loss` is the one that is minimised."""
        raise NotImplementedError

    def validate(self) -> Tensor:
        """Error of the present weights on held-out windows, one a group of heads that share weights (a KV head and its
        query heads); lower is better."""
        raise NotImplementedError


def fit(
    task: Task, options: TrainingOptions, *, output: Path, description: str, device: str, name: str = "train",
    max_seconds: float | None = None, quiet: bool = False,
) -> dict[str, list[float]]:
    """Train `task` in place, on `device`; afterwards it has the averaged weights where it asks for them, and those of
    every head's best validation where there were any. Returns the metrics by name, one row a block of steps.

    The checkpoint is `output/checkpoints/<name>.ckpt`; with `options.resume` training goes on from there and says so.
    It is read without unpickling any code.
    """
    import lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment

    checkpoint = output / "checkpoints" / f"{name}.ckpt"
    task.to(device).train()
    stepper = Stepper(task, options, device)
    if options.resume and checkpoint.is_file():
        stepper.load(torch.load(checkpoint, weights_only=True, map_location="cpu"))
        print(f"{description}: resumed from the checkpoint at step {stepper.done} of {options.max_steps}",
              file=sys.stderr)
    if stepper.done < options.max_steps and not stepper.stopped:
        bar = contextlib.nullcontext(_no_bar) if quiet else progress(description, options.max_steps, "steps")
        with _silence(), _matmul(options, device), bar as advance:
            advance(stepper.done)
            if options.validate_every and not stepper.best:
                stepper.validate()
            trainer = lightning.Trainer(
                max_epochs=1, accelerator="gpu" if device.startswith("cuda") else "cpu",
                devices=[torch.device(device).index or 0] if device.startswith("cuda") else 1,
                # one process of perhaps several: they share nothing, so Lightning must not look for the others
                plugins=[LightningEnvironment()], num_nodes=1,
                max_time=None if max_seconds is None else {"seconds": max(1, math.ceil(max_seconds))},
                logger=_tensorboard(output, name) if options.tensorboard else False, enable_progress_bar=False,
                enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0,
                use_distributed_sampler=False)
            trainer.fit(_module(stepper, options, checkpoint, advance), _data(task, options, stepper.done))
    stepper.finish()
    return stepper.history


class Stepper:
    """A task, its optimisers, averaged and best weights, and the step it has come to."""

    def __init__(self, task: Task, options: TrainingOptions, device: str):
        self.task, self.options = task, options
        self.device = torch.device(device)
        self.rate = torch.tensor(0.0, device=self.device)
        cuda = self.device.type == "cuda"
        matrices = [p for p in task.parameters() if task.muon and p.dim() == 3]
        rest = [p for p in task.parameters() if not (task.muon and p.dim() == 3)]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=self.rate, betas=task.betas, fused=True, weight_decay=task.weight_decay,
                              capturable=cuda)]
        if matrices:
            self.optimizers.append(Muon(matrices, lr=self.rate, weight_decay=task.weight_decay))
        self.average = [p.detach().clone() for p in task.parameters()] if task.ema else []
        self.best: dict[str, Tensor] = {}
        self.best_error, self.waited, self.done, self.stopped = torch.empty(0), 0, 0, False
        self.history: dict[str, list[float]] = {"step": []}
        self.graph: Any = None
        self.use_graph = cuda and options.cuda_graph
        self.eager = 0
        self.row = torch.zeros(1, dtype=torch.long, device=self.device)
        self.block: dict[str, Tensor] = {}
        self.sums: dict[str, Tensor] = {}

    def run(self, block: dict[str, Tensor], advance: Callable[..., None]) -> dict[str, float]:
        """The steps of a block; returns the means of their losses."""
        count = next(iter(block.values())).shape[0]
        fits = all(n in self.block and self.block[n].shape[0] >= count for n in block)
        if fits:
            for name, rows in block.items():
                self.block[name][:count].copy_(rows)
        else:
            self.block, self.graph = {n: rows.to(self.device).clone() for n, rows in block.items()}, None
        self.row.zero_()
        for total in self.sums.values():
            total.zero_()
        began = time.perf_counter()
        for _ in range(count):
            if self.use_graph and self.eager >= EAGER_STEPS:
                if self.graph is None:
                    self._capture()
                self.graph.replay()
            elif self.use_graph:
                side = torch.cuda.Stream(self.device)
                side.wait_stream(torch.cuda.current_stream(self.device))
                with torch.cuda.stream(side):
                    self._step()
                torch.cuda.current_stream(self.device).wait_stream(side)
                self.eager += 1
            else:
                self._step()
            self.done += 1
            if self.device.type == "cpu":
                advance(1)
        means = {k: float(v) / count for k, v in self.sums.items()}
        advance(0 if self.device.type == "cpu" else count, f"loss {means['loss']:.4g}")
        self.history["step"].append(self.done)
        for name, value in {**means, "ms_per_step": 1000 * (time.perf_counter() - began) / count}.items():
            self.history.setdefault(name, []).append(value)
        return means

    def _capture(self) -> None:
        self.task.zero_grad()
        torch.cuda.synchronize(self.device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()

    def _step(self) -> None:
        draw = {n: rows.index_select(0, self.row)[0] for n, rows in self.block.items()}
        self.rate.copy_(draw.pop("rate"))
        decay = draw.pop("decay")
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.precision == "bf16",
                            cache_enabled=False):
            losses = self.task.losses(draw)
        self.task.zero_grad()
        # a head's gradient must not depend on how many others there are
        (losses["loss"].sum() / 100).backward()
        if self.options.gradient_clip:
            clip_by_head(self.task, self.options.gradient_clip / 100)
        for optimizer in self.optimizers:
            optimizer.step()
        with torch.no_grad():
            for mean, now in zip(self.average, self.task.parameters(), strict=False):
                mean.lerp_(now, 1 - decay)
            for name, value in losses.items():
                if name not in self.sums:
                    self.sums[name] = torch.zeros((), device=self.device)
                self.sums[name].add_(value.detach().float().mean())
            self.row.add_(1)

    def validate(self) -> float:
        """Measure, keep every head's best weights, and decide whether to stop. Returns the mean error."""
        with self.averaged(), torch.no_grad():
            error = self.task.eval().validate().float()
            self.task.train()
            before = self.best_error if self.best else torch.full_like(error, math.inf)
            before = before.to(error.device)
            better = error < before
            for name, value in self.task.state_dict().items():
                kept = self.best.get(name, value).to(value.device)
                mask = better.repeat_interleave(value.shape[0] // len(better))
                self.best[name] = torch.where(mask.reshape(-1, *[1] * (value.dim() - 1)), value, kept).clone()
            self.best_error = torch.minimum(error, before)
        gain = float(before.mean() - self.best_error.mean())
        self.waited = 0 if gain > NO_GAIN * float(self.best_error.mean()) else self.waited + 1
        self.stopped = bool(self.options.early_stopping) and self.waited >= self.options.early_stopping
        return float(error.mean())

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The averaged weights, for a while."""
        held = [p.detach().clone() for p in self.task.parameters()] if self.average else []
        self._set(self.average)
        yield
        self._set(held)

    def _set(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.task.parameters(), values, strict=False):
                parameter.copy_(value)

    def finish(self) -> None:
        """Leave the task with the weights that count."""
        if self.best:
            self.task.load_state_dict(self.best)
        else:
            self._set(self.average)
        self.task.to(self.device).eval().requires_grad_(False)

    def state(self) -> dict[str, Any]:
        return {"done": self.done, "stopped": self.stopped, "waited": self.waited, "best_error": self.best_error,
                "best": self.best, "average": self.average, "history": self.history, "task": self.task.state_dict(),
                "optimizers": [o.state_dict() for o in self.optimizers]}

    def load(self, checkpoint: dict[str, Any]) -> None:
        found = checkpoint["training"]
        self.task.load_state_dict(found["task"])
        for optimizer, state in zip(self.optimizers, found["optimizers"], strict=True):
            optimizer.load_state_dict(state)
            for group in optimizer.param_groups:
                group["lr"] = self.rate
        self.average = [a.to(self.device) for a in found["average"]]
        self.best = found["best"]
        for name in ("done", "stopped", "waited", "best_error", "history"):
            setattr(self, name, found[name])


def _module(stepper: Stepper, o: TrainingOptions, checkpoint: Path, advance: Callable[..., None]) -> Any:
    import lightning

    class Heads(lightning.LightningModule):
        """Optimises by hand: a batch is a block of steps."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.task = stepper.task

        def training_step(self, block: dict[str, Tensor]) -> None:
            before = stepper.done
            means = stepper.run(block, advance)
            passed = [every and stepper.done // every > before // every for every in (o.validate_every,
                                                                                     o.checkpoint_every)]
            if passed[0] or (o.validate_every and stepper.done == o.max_steps):
                means["validation_error"] = stepper.validate()
                stepper.history.setdefault("validation_error", [math.nan] * (len(stepper.history["step"]) - 1)).append(
                    means["validation_error"])
            elif "validation_error" in stepper.history:
                stepper.history["validation_error"].append(math.nan)
            if self.logger is not None:
                self.logger.log_metrics(means, step=stepper.done)
            if passed[1]:
                checkpoint.parent.mkdir(parents=True, exist_ok=True)
                temporary = checkpoint.with_suffix(".tmp")
                self.trainer.save_checkpoint(temporary)
                os.replace(temporary, checkpoint)
            self.trainer.should_stop = self.trainer.should_stop or stepper.stopped

        def configure_optimizers(self) -> None:
            """The stepper has its own."""

        def on_save_checkpoint(self, contents: dict[str, Any]) -> None:
            contents["training"] = stepper.state()
            contents["state_dict"] = {}  # it is in there

    return Heads()


def _data(task: Task, o: TrainingOptions, done: int) -> Any:
    import lightning

    size = max(1, min(BLOCK, o.max_steps // 100))
    marks = {o.max_steps}
    for every in (size, o.validate_every, o.checkpoint_every):
        marks.update(range(every, o.max_steps, every) if every else ())
    ends = sorted(m for m in marks if m > done)

    class Blocks(torch.utils.data.Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return len(ends)

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            if index >= len(ends):
                raise IndexError(index)
            first = ends[index - 1] if index else done
            count = ends[index] - first
            steps = range(first, first + count)
            rate = [o.lr * cosine_factor(s, o.max_steps) for s in steps]
            decay = [min(task.ema, (1 + s) / (10 + s)) for s in steps]
            return {**task.draws(first, count), "rate": torch.tensor(rate), "decay": torch.tensor(decay)}

    class Data(lightning.LightningDataModule):
        """The draws of the steps that are left, block by block."""

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Blocks(), batch_size=None)

    return Data()


def clip_by_head(task: nn.Module, limit: float) -> None:
    """Scale the gradient of every head, over all parameters of a child module, to a norm of at most `limit`."""
    for child in task.children():
        gradients = [p.grad for p in child.parameters() if p.grad is not None]
        if gradients:
            norm = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
            factor = (limit / norm.clamp(min=1e-20)).clamp(max=1.0)
            for g in gradients:
                g.mul_(factor.reshape(-1, *[1] * (g.dim() - 1)))


def cosine_factor(step: int, steps: int, warmup: float = WARMUP) -> float:
    """Learning rate as a share of its peak: linear warm-up over a share of the steps, then half a cosine to zero."""
    rise = max(1, int(steps * warmup))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - rise) / max(1, steps - rise))))


def by_head(make: Callable[[int], M], seeds: list[int]) -> M:
    """`make(heads)` with the initial weights of every head drawn from its own seed, whichever others are beside it."""
    with torch.random.fork_rng(devices=[]):
        whole = make(len(seeds))
        with torch.no_grad():
            for row, seed in enumerate(seeds):
                torch.manual_seed(seed)
                for into, one in zip(whole.parameters(), make(1).parameters(), strict=True):
                    into[row] = one[0]
    return whole


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


def _tensorboard(output: Path, name: str) -> Any:
    from lightning.pytorch.loggers import TensorBoardLogger

    return TensorBoardLogger(str(output), name="tensorboard", version=name)


@contextlib.contextmanager
def _matmul(options: TrainingOptions, device: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    fast = options.precision in ("auto", "tf32", "bf16") and device.startswith("cuda")
    torch.set_float32_matmul_precision("high" if fast else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _no_bar(*_: Any) -> None:
    pass


@contextlib.contextmanager
def _silence() -> Iterator[None]:
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
