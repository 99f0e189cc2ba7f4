"""What a family of figures is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vringlab.report.canvas import RunFigure, Width
from vringlab.report.summary import Summary

#: Draws the figures of one workload: (summary, workload, width, notes) -> figures by name.
Draw = Callable[[Summary, str, Width, bool], Mapping[str, RunFigure]]

#: Draws figures of the run as a whole: (summary, width, notes) -> figures by name.
DrawRun = Callable[[Summary, Width, bool], Mapping[str, RunFigure]]


@dataclass(frozen=True)
class Family:
    """Figures that belong together.

    Attributes:
        name: Its name.
        metrics: Metrics it draws; it is asked for each workload that has one of them.
        headline: Those of them that the overview of effects shows.
        draw: Draws one workload. Where it gives no figure, the metrics are left to the panels that
            every metric may have.
        covers: Metrics that need no figure of their own beside these, such as the inverse of one.
        mapped: (summary, workload) -> whether its figures show so many changes that the overview
            of effects has no room for them, and leaves them out.
        order: Place among the families.
    """

    name: str
    metrics: tuple[str, ...]
    headline: tuple[str, ...]
    draw: Draw
    covers: tuple[str, ...] = ()
    mapped: Callable[[Summary, str], bool] = lambda _summary, _workload: False
    order: int = 0
