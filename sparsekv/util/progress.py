"""One progress bar a stage; the stages of a longer job as lines of one display."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_DISPLAY: ContextVar[Any] = ContextVar("display", default=None)


@contextmanager
def progress(description: str, total: int, unit: str = "steps") -> Iterator[Callable[..., None]]:
    """Show one bar on standard error; yields `advance(n=1, note="")`.

    `total` counts `unit` (for example "tokens", "steps", "heads"); the bar shows the rate in `unit`/s. Inside `stages`
    it is a line of that display.
    """
    with _display() as bar:
        task = bar.add_task(description, total=total, note="", unit=unit)

        def advance(n: int = 1, note: str | None = None) -> None:
            bar.update(task, advance=n)
            if note is not None:
                bar.update(task, note=note)

        yield advance


class Note:
    """What `still` says beside its own words."""

    text = ""


@contextmanager
def still(what: str, every: float = 4.0) -> Iterator[Note]:
    """Say on standard error, every so many seconds, that something of unknown length goes on, and for how long; nothing
    of what is over sooner."""
    note, over, began = Note(), threading.Event(), time.monotonic()

    def tell() -> None:
        while not over.wait(every):
            print(f"{what}{note.text}, {time.monotonic() - began:.0f} s", file=sys.stderr)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield note
    finally:
        over.set()
        thread.join()


@contextmanager
def stages(name: str, parts: Sequence[str]) -> Iterator[Callable[[str], None]]:
    """One display for a job of several parts, whose bars are lines of it below its own; yields `begin(part)`. Where
    standard error is no terminal every part begins with a line, and bars stand by themselves."""
    def numbered(part: str) -> str:
        return f"{name} {parts.index(part) + 1}/{len(parts)}: {part}"

    if not sys.stderr.isatty():
        yield lambda part: print(numbered(part), file=sys.stderr)
        return
    with _display() as bar:
        task = bar.add_task(name, total=len(parts), note="", unit="stages")
        token = _DISPLAY.set(bar)
        try:
            yield lambda part: bar.update(task, description=numbered(part), completed=parts.index(part))
            bar.update(task, description=name, completed=len(parts))
        finally:
            _DISPLAY.reset(token)


@contextmanager
def _display() -> Iterator[Any]:
    """The display that there is, or one of its own."""
    if (there := _DISPLAY.get()) is not None:
        yield there
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:,.4g} {task.fields['unit']}/s", style="progress.data.speed")

    columns = (
        TextColumn("{task.description:<14}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), Rate(),
        TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield bar
