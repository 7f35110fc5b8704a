"""One progress bar a stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(description: str, total: int, unit: str = "steps") -> Iterator[Callable[..., None]]:
    """Show one bar on standard error; yields `advance(n=1, note="")`.

    `total` counts `unit` (for example "tokens", "steps", "heads"); the bar shows the rate in `unit`/s.
    """
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
            return Text("" if speed is None else f"{speed:,.4g} {unit}/s", style="progress.data.speed")

    columns = (
        TextColumn("{task.description:<14}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), Rate(),
        TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=total, note="")

        def advance(n: int = 1, note: str | None = None) -> None:
            bar.update(task, advance=n)
            if note is not None:
                bar.update(task, note=note)

        yield advance
