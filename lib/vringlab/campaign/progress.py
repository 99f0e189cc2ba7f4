"""What happens in a run, as events, and three ways to show them.

The runner calls one listener with each event; `fan_out` makes one of many.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol, Self

from vringlab.workloads.base import Outcome

if TYPE_CHECKING:
    from vringlab.campaign.plan import Cell

Kind = Literal["run", "boot", "switch", "cell", "cell-done", "path", "retry", "lost", "end"]


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    Attributes:
        kind: `run` (the runner starts), `boot`, `switch` (an arm is loaded), `cell` (a
            measurement starts), `cell-done`, `path` (which path an arm's packets took), `retry`
            (a boot is repeated after a transient failure), `lost` (one of several hosts) or `end`.
        run_id: The run.
        index: Cells of the run that are done.
        total: Cells of the run.
        message: The event in one line for a person.
        left_s: Estimate of the seconds left; None while nothing is known.
        boot: Identity of the guest lifetime.
        cell: The cell, for `cell` and `cell-done`.
        outcome: What it gave, for `cell-done`.
        host: Name of the host; empty where there is one only, and for events of all.
    """

    kind: Kind
    run_id: str
    index: int
    total: int
    message: str
    left_s: float | None = None
    boot: str = ""
    cell: Cell | None = None
    outcome: Outcome | None = None
    host: str = ""


Listener = Callable[[Event], None]


def silent(event: Event) -> None:
    """Show nothing."""


def fan_out(*listeners: Listener) -> Listener:
    """One listener that passes each event to all `listeners`, in order."""

    def every(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return every


class Display(Protocol):
    """A listener that holds the terminal or a widget: a context manager."""

    def __call__(self, event: Event) -> None:
        """Show an event."""
        ...

    def __enter__(self) -> Self:
        """Start to show."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the terminal back."""
        ...


def clock(seconds: float) -> str:
    """A duration for people: `45 s`, `2 min 05 s`, `1 h 03 min`, rounded to its last part."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min"


def headline(outcome: Outcome) -> str:
    """The first figure of an outcome, or why it is invalid."""
    if not outcome.valid:
        return f"invalid: {outcome.reason}"
    if not outcome.metrics:
        return "no figure"
    first = outcome.metrics[0]
    return f"{first.name} {first.value:,.6g} {first.unit}"


def _line(event: Event) -> str:
    counted = f"[{event.index}/{event.total}]"
    left = f", {clock(event.left_s)} left" if event.left_s is not None else ""
    return f"{counted} {_message(event)}{left if event.kind == 'cell-done' else ''}"


def _message(event: Event) -> str:
    return f"{event.host}: {event.message}" if event.host else event.message


class PlainDisplay:
    """One line per finished cell and per event of note, for logs and pipes."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stderr

    def __call__(self, event: Event) -> None:
        """Print an event, but not the start of a cell or a switch."""
        if event.kind not in ("cell", "switch"):
            print(_line(event), file=self._stream, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class RichDisplay:
    """A bar with cell k of n and the time left; what is worth keeping scrolls above it.

    Several hosts have a line each below it, with the part of the cells that each has done.
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("{task.fields[who]}", markup=False),
            MofNCompleteColumn(),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[left]}", style="cyan"),
            TextColumn("{task.description}", markup=False),
            console=Console(file=stream or sys.stderr),
            transient=True,
        )
        self._rows: dict[str, Any] = {}
        self._cells: Counter[str] = Counter()

    def __call__(self, event: Event) -> None:
        """Move the bars; keep invalid samples, retries, losses and the end in the scrollback."""
        left = f"{clock(event.left_s)} left" if event.left_s is not None else ""
        if event.host:
            self._cells[event.host] += event.kind == "cell-done"
            self._move("", event, event.index, "", left)
            self._move(event.host, event, self._cells[event.host], event.message, "")
        else:
            self._move("", event, event.index, event.message, left)
        invalid = event.outcome is not None and not event.outcome.valid
        if invalid or event.kind in ("run", "retry", "lost", "end"):
            self._progress.console.print(
                _line(event), markup=False, highlight=False, style="yellow" if invalid else None
            )

    def _move(self, host: str, event: Event, done: int, text: str, left: str) -> None:
        if host not in self._rows:
            self._rows[host] = self._progress.add_task("", total=0, left="", who=host or "cell")
        self._progress.update(
            self._rows[host], completed=done, total=event.total, description=text, left=left
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


class NotebookDisplay:
    """A tqdm bar, as a widget where the front end has widgets and as text elsewhere."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __call__(self, event: Event) -> None:
        """Move the bar; print retries, losses and the end below it."""
        from tqdm.auto import tqdm

        if self._bar is None:
            # Our own estimate counts boots; tqdm's would not know of them.
            self._bar = tqdm(
                total=event.total, unit="cell", bar_format="{desc} {bar} {n_fmt}/{total_fmt}"
            )
        left = f", {clock(event.left_s)} left" if event.left_s is not None else ""
        self._bar.set_description_str(f"{_message(event)}{left}", refresh=False)
        self._bar.n = event.index
        self._bar.refresh()
        if event.kind in ("retry", "lost", "end"):
            self._bar.write(_line(event))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel, papermill's and nbval's among them."""
    shell = sys.modules.get("IPython")
    current = shell.get_ipython() if shell is not None else None
    return current is not None and type(current).__name__ == "ZMQInteractiveShell"


def auto(stream: IO[str] | None = None) -> Display:
    """The display that suits: tqdm in a notebook, rich in a terminal, else plain lines."""
    if in_notebook():
        return NotebookDisplay()
    stream = stream or sys.stderr
    return RichDisplay(stream) if stream.isatty() else PlainDisplay(stream)
