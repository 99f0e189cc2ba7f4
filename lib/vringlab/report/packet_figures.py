"""Packets per second and transmit interrupts, by arm, kind of ring and place of the interrupt."""

from __future__ import annotations

from vringlab.report.canvas import RunFigure, Width
from vringlab.report.family import Family
from vringlab.report.panels import Column, arm_panels
from vringlab.report.summary import Summary

_RATES = (
    Column("pps_tx", "sent", zero=True, shared=True),
    Column("pps_rx", "received", zero=True, shared=True),
)
_EVENTS = (
    Column("tx_interrupts", "TX interrupts", log=True, shared=True),
    Column("kicks", "kicks", log=True, shared=True),
)


def draw(summary: Summary, workload: str, width: Width, notes: bool) -> dict[str, RunFigure]:
    """Rates on one figure, interrupts and kicks on another; none of what is no packet test."""
    if not {"pps_tx", "pps_rx"} & set(summary.metrics(workload)):
        return {}
    figures = {
        "packets": arm_panels(summary, workload, _RATES, "packets per second", width, notes),
        "interrupts": arm_panels(
            summary, workload, _EVENTS, "TX interrupts and kicks per second", width, notes
        ),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


FAMILY = Family(
    name="packets",
    metrics=("pps_tx", "pps_rx", "tx_interrupts", "kicks"),
    headline=("pps_tx", "pps_rx", "tx_interrupts"),
    draw=draw,
    order=2,
)
