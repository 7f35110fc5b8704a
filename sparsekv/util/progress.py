"""One progress bar a stage, all of a command in one display; where standard error is no terminal, lines of text."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, Task

_DISPLAY: ContextVar[Progress | None] = ContextVar("display", default=None)
EVERY, GROWTH = 3.0, 0.02
"""A line of text comes after so many seconds, and the next after as many, or after this share of the time so far."""
_SPOKEN = [time.monotonic()]
"""Time of the last line; at first that of the start."""
SPEED_SECONDS = 600
"""Time over which the rate is taken [s]: a window of a large model takes minutes."""


@contextmanager
def progress(
    description: str, total: int | None = None, unit: str = "steps", every: float = EVERY,
) -> Iterator[Callable[..., None]]:
    """Show one bar on standard error; yields `advance(n=1, note="")`.

    total counts `unit` (for example "tokens", "steps", "heads"); the bar shows the rate in `unit`/s. None: nobody knows
    how long it takes; the bar goes when it is over. Within another bar it is a line of that display. every: seconds
    between two lines where bars cannot be drawn.
    """
    with _display() as bar:
        name = bar.add_task(description, total=total, note="", unit=unit)
        task, over, out = bar.tasks[-1], threading.Event(), sys.stderr
        teller = threading.Thread(target=_tell, args=(bar, task, over, every, out), daemon=True)

        def advance(n: int = 1, note: str | None = None) -> None:
            bar.update(name, advance=n)
            if note is not None:
                bar.update(name, note=note)

        told = bar.disable and not _other_rank()
        if told:
            teller.start()
        try:
            yield advance
        finally:
            over.set()
            if told:
                teller.join()
                if total is not None:
                    print(_line(task), file=out)
            if bar.disable or total is None:
                bar.remove_task(name)


@contextmanager
def stages(name: str, parts: Sequence[str]) -> Iterator[Callable[[str], None]]:
    """A bar for a job of several parts, whose own bars are lines below it; yields `begin(part)`. Where bars cannot be
    drawn every part begins with a line."""
    def numbered(part: str) -> str:
        return f"{name} {parts.index(part) + 1}/{len(parts)}: {part}"

    with _display() as bar:
        if bar.disable:
            yield lambda part: print(numbered(part), file=sys.stderr)
            return
        task = bar.add_task(name, total=len(parts), note="", unit="stages")
        yield lambda part: bar.update(task, description=numbered(part), completed=parts.index(part))
        bar.update(task, description=name, completed=len(parts))


def hide() -> None:
    """Take the display away, finished bars excepted, for who writes to standard output; the next bar brings it back."""
    bar = _DISPLAY.get()
    if bar is not None and any(task.visible for task in bar.tasks):
        for task in bar.tasks:
            bar.update(task.id, visible=task.finished)
        bar.live.stop()
        for task in bar.tasks:
            bar.update(task.id, visible=False)


def _other_rank() -> bool:
    """True in a process that torchrun, Lightning or SLURM started beside a first one, which speaks for all."""
    return (os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0") != "0"


def _tell(bar: Progress, task: Task, over: threading.Event, every: float, out: TextIO) -> None:
    """Print the innermost task's line from time to time, counted from the last line of any task."""
    pause = max(every / 10, min(every, _SPOKEN[0] + every - time.monotonic()))
    while not over.wait(pause):
        if bar.tasks[-1] is task and task.visible:
            print(_line(task), file=out, flush=True)
            _SPOKEN[0] = time.monotonic()
        pause = max(every, GROWTH * (task.elapsed or 0))


def _line(task: Task) -> str:
    done = "" if task.total is None else f"{task.completed:,.0f} of {task.total:,.0f} {task.fields['unit']}"
    parts = (done, task.fields["note"], f"{task.elapsed or 0:.0f} s", _rate(task))
    return f"{task.description}: {', '.join(filter(None, parts))}"


def _rate(task: Task) -> str:
    speed = task.finished_speed or task.speed
    if speed is None and task.elapsed and task.elapsed > 1:
        speed = task.completed / task.elapsed
    return f"{speed:,.4g} {task.fields['unit']}/s" if speed else ""


@contextmanager
def _display() -> Iterator[Progress]:
    """The display that there is, or one of its own."""
    if (there := _DISPLAY.get()) is not None:
        for task in there.tasks:
            there.update(task.id, visible=not task.finished)
        there.start()
        yield there
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(_rate(task), style="progress.data.speed")

    columns = (
        TextColumn("{task.description:<14}", markup=False), BarColumn(), TaskProgressColumn(), Rate(),
        TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}", markup=False),
    )
    console = Console(file=sys.stderr, stderr=True)
    with Progress(*columns, console=console, disable=not console.is_interactive or _other_rank(), redirect_stdout=False,
                  speed_estimate_period=SPEED_SECONDS) as bar:
        token = _DISPLAY.set(bar)
        try:
            yield bar
        finally:
            _DISPLAY.reset(token)
            bar.live.transient = not any(task.visible for task in bar.tasks)
