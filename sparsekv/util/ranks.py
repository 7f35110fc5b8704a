"""Several processes on one capture: Lightning Fabric starts or finds them; documents are dealt out in turn."""

from __future__ import annotations

import datetime
import logging
import os
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from sparsekv.util.errors import SparseKVError

T = TypeVar("T")
LEAST_PROCESSES = 8
"""Processes that a CPU takes, however few cores it has."""


class Ranks:
    """This process alone."""

    rank, size = 0, 1
    first: ClassVar[bool] = True
    """Whether this process is alone, or the first of several: what all know is printed once."""

    def device(self, wanted: str) -> str:
        return wanted

    def first_does(self, work: Callable[[], T]) -> T:
        """Rank 0 does the work; all get its result, or its SparseKVError."""
        return work()

    def all_do(self, work: Callable[[], None]) -> None:
        """Every rank does its part. Where one fails with a SparseKVError, all raise it, each after its own part."""
        work()

    def barrier(self) -> None:
        """Wait for all."""

    def stop_others(self) -> None:
        """This process goes no further: those that it started are stopped, too."""

    def mine(self, count: int) -> list[int]:
        """The documents of this rank."""
        return list(range(self.rank, count, self.size))


class FabricRanks(Ranks):
    """The processes of a Fabric. They only wait for each other: the data goes through the store."""

    def __init__(self, wanted: str, devices: int, num_nodes: int):
        import torch
        from lightning.fabric import Fabric
        from lightning.fabric.strategies import DDPStrategy

        cuda = wanted.startswith("cuda") or (wanted == "auto" and torch.cuda.is_available())
        if cuda and torch.cuda.device_count() < devices:
            raise SparseKVError(f"--devices {devices} was asked for; this machine has {torch.cuda.device_count()} "
                                "CUDA devices")
        if not cuda and devices > max(LEAST_PROCESSES, os.cpu_count() or 1):
            raise SparseKVError(f"--devices {devices} was asked for; this machine has {os.cpu_count()} CPU cores, and "
                                f"takes {max(LEAST_PROCESSES, os.cpu_count() or 1)} processes at most")
        for name in ("lightning.fabric", "lightning.pytorch"):  # their banner
            logging.getLogger(name).setLevel(logging.WARNING)
        try:
            self.fabric: Any = Fabric(
                accelerator="cuda" if cuda else "cpu", devices=devices, num_nodes=num_nodes,
                strategy=DDPStrategy(process_group_backend="gloo", timeout=datetime.timedelta(days=7)))
            self.fabric.launch()
        except (ValueError, RuntimeError) as error:
            raise SparseKVError(f"the processes could not be joined: {' '.join(str(error).split())}") from error
        self.rank, self.size = self.fabric.global_rank, self.fabric.world_size
        Ranks.first = self.rank == 0

    def device(self, wanted: str) -> str:
        return str(self.fabric.device)

    def first_does(self, work: Callable[[], T]) -> T:
        answer: tuple[Any, str | None] = (None, None)
        if self.rank == 0:
            try:
                answer = (work(), None)
            except SparseKVError as error:
                answer = (None, str(error))
        result, problem = self.fabric.broadcast(answer, src=0)
        if problem is not None:
            raise SparseKVError(problem)
        return result

    def all_do(self, work: Callable[[], None]) -> None:
        from torch.distributed import all_gather_object

        problem: str | None = None
        try:
            work()
        except SparseKVError as error:
            problem = str(error)
        problems: list[str | None] = [None] * self.size
        all_gather_object(problems, problem)
        for rank, found in enumerate(problems):
            if found is not None:
                raise SparseKVError(f"process {rank}: {found}")

    def stop_others(self) -> None:
        for child in getattr(self.fabric.strategy.launcher, "procs", ()):
            if child.poll() is None:
                child.terminate()

    def barrier(self) -> None:
        try:
            self.fabric.barrier()
        except RuntimeError as error:
            raise SparseKVError("another process of this run has ended; mend what its message says, and run the same "
                                "command again, with --resume if it trains") from error


def join(device: str, devices: int, num_nodes: int = 1) -> Ranks:
    """One process unless there are to be more, or torchrun or SLURM started several: a number that is 1 is theirs."""
    here, machines = _launched()
    devices, num_nodes = devices if devices > 1 else here, num_nodes if num_nodes > 1 else machines
    return Ranks() if devices * num_nodes == 1 else FabricRanks(device, devices, num_nodes)


def _launched() -> tuple[int, int]:
    """Processes a machine, and machines, of torchrun or srun; (1, 1) where neither started this process."""
    found = os.environ
    if "TORCHELASTIC_RUN_ID" in found:
        here = int(found["LOCAL_WORLD_SIZE"])
        return here, int(found["WORLD_SIZE"]) // here
    if int(found.get("SLURM_NTASKS", 1)) > 1:
        from lightning.fabric.plugins.environments import SLURMEnvironment

        if SLURMEnvironment.detect():
            nodes = int(found.get("SLURM_NNODES", 1))
            return int(found["SLURM_NTASKS"]) // nodes, nodes
    return 1, 1
