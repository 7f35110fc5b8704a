"""The kernels of a step, as torch's profiler sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def print_kernels(step: Callable[[], Any], steps: int) -> None:
    """Run a step some times and print its kernels, most time first: microseconds and launches of one step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    times = sorted(((e.self_device_time_total / steps, e.count / steps, e.key) for e in found.key_averages()),
                   reverse=True)
    print(f"    {sum(t[1] for t in times):.0f} kernels, {sum(t[0] for t in times) / 1e3:.3f} ms")
    for microseconds, count, name in times[:24]:
        print(f"    {microseconds:9.1f} us {count:6.1f} {name[:100]}", flush=True)
