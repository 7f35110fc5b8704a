"""The options that both trainers share."""

from __future__ import annotations

from dataclasses import dataclass

from sparsekv.config import option
from sparsekv.errors import SparseKVError

PRECISIONS = ("auto", "float32", "tf32", "bf16")


@dataclass(frozen=True)
class TrainingOptions:
    capture: str = option(help="Capture store to train on (folder).")
    output: str = option(help="Folder of the new artifact.")
    max_steps: int = option(2000, help="Training steps [steps].", min=1)
    max_time: str | None = option(None, help="Stop training after this long, and save what there is [DD:HH:MM:SS or "
                                             "HH:MM:SS].")
    batch_size: int = option(64, help="Queries per query head and step [queries].", min=2)
    lr: float = option(2e-3, help="Peak learning rate (Adam, warm-up, cosine to zero).")
    gradient_clip: float = option(0.0, help="Largest norm of a head's gradient; 0 does not clip.", min=0.0)
    precision: str = option("auto", help="Arithmetic of the matrix products: float32, tf32, bf16, or auto (tf32 on "
                                         "CUDA, float32 elsewhere). Weights and losses stay float32.")
    validation_documents: int = option(1, help="Last windows of the capture, kept for validation [windows].", min=1)
    validate_every: int = option(0, help="Measure on validation windows before training, every so many steps and after "
                                         "it, and keep every head's best weights; 0 keeps the last ones [steps].",
                                 min=0)
    early_stopping: int = option(0, help="Stop after this many validations in a row without a better one; 0 never "
                                         "stops early [validations].", min=0)
    checkpoint_every: int = option(1000, help="Keep a checkpoint every so many steps; 0 keeps none [steps].", min=0)
    resume: bool = option(False, help="Go on from the last checkpoint of an interrupted run in --output.")
    layer_group: int = option(0, help="Layers trained at once; 0 takes all [layers].", min=0)
    devices: int = option(1, help="Processes on this machine, one GPU each; layers and heads are dealt out "
                                 "[processes].", min=1)
    num_nodes: int = option(1, help="Machines of a torchrun job [machines].", min=1)
    cuda_graph: bool = option(True, help="On CUDA, replay a training step as one graph.")
    tensorboard: bool = option(False, help="Also write the metrics for TensorBoard, under the output folder.")
    device: str = option("auto", help="auto, cpu or cuda.")
    seed: int = option(0, help="Seed of every random choice.")
    overwrite: bool = option(False, help="Replace an existing artifact.")

    def check(self) -> None:
        """Raises SparseKVError for options that contradict each other or cannot be read."""
        if self.precision not in PRECISIONS:
            raise SparseKVError(f"unknown precision {self.precision!r}: expected one of {', '.join(PRECISIONS)}")
        if self.early_stopping and not self.validate_every:
            raise SparseKVError("--early-stopping needs validations; add --validate-every N")
        if self.resume and self.overwrite:
            raise SparseKVError("--resume goes on with the output, --overwrite replaces it; use one of them")
        if self.tensorboard:
            import importlib.util

            if not any(importlib.util.find_spec(n) for n in ("tensorboard", "tensorboardX")):
                raise SparseKVError("--tensorboard needs the package tensorboard, which is not installed: run "
                                    "`pip install tensorboard`, or leave it out (metrics.csv is always written)")
        self.seconds()

    def seconds(self) -> float | None:
        """`max_time` in seconds; None for no limit."""
        if self.max_time is None:
            return None
        parts = self.max_time.split(":")
        if not 3 <= len(parts) <= 4 or not all(p.isdigit() for p in parts):
            raise SparseKVError(f"--max-time {self.max_time!r} is no duration; expected DD:HH:MM:SS or HH:MM:SS")
        total = 0.0
        for part, size in zip(reversed(parts), (1, 60, 3600, 86_400), strict=False):
            total += int(part) * size
        return total
