"""How much memory there is, and what could never fit is refused before any of it is taken."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path
from typing import Any

from sparsekv.util.errors import SparseKVError


def memory_of(device: str) -> int:
    """All memory [bytes] of a device as torch names it: for `cpu` what of the machine's this process may take, for
    `balanced` that of all GPUs."""
    import psutil
    import torch

    if device == "balanced":
        return sum(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    if device.startswith("cuda"):
        return int(torch.cuda.get_device_properties(torch.device(device)).total_memory)
    limits = [psutil.virtual_memory().total, resource.getrlimit(resource.RLIMIT_AS)[0]]
    with contextlib.suppress(OSError):  # a container's
        limits += [int(word) for word in Path("/sys/fs/cgroup/memory.max").read_text().split() if word.isdigit()]
    return min(limit for limit in limits if limit > 0)


def free_memory(device: Any) -> int:
    """Memory [bytes] of a CUDA device that is free, what torch holds of it unused included, as far as torch may take
    it."""
    import torch

    free, whole = torch.cuda.mem_get_info(device)
    taken, share = torch.cuda.memory_allocated(device), torch.cuda.get_per_process_memory_fraction(device)
    return max(0, min(int(free) + torch.cuda.memory_reserved(device) - taken, int(share * whole) - taken))


def free_host_memory() -> int:
    """Memory [bytes] of the machine that this process may still take: what the system calls available, or what its
    container has left."""
    import psutil

    left = [psutil.virtual_memory().available]
    with contextlib.suppress(OSError, ValueError):
        most, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        left.append(most - used)
    return max(0, min(left))


def check_memory(needed: float, device: str, what: str, remedy: str) -> None:
    """Raises SparseKVError where `what` takes more bytes than the device has in all. needed: of what is certain, not an
    estimate: what is refused would never have run."""
    there = memory_of(device)
    if needed > there:
        raise SparseKVError(f"{what} take {_gigabytes(needed)} at least, and the device {device} has "
                            f"{_gigabytes(there)} in all; {remedy}")


def _gigabytes(count: float) -> str:
    if count > 1e18:  # a file may say any whole number, also one that no float holds
        return "more than 1e9 GB"
    return f"{count / 1e9:.3g} GB"
