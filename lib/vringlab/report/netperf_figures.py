"""netperf over vhost-net: changes as the mail's matrix, and what the host did meanwhile.

A run of few points has a panel for each; one of the whole matrix has heat maps only.
"""

from __future__ import annotations

from vringlab.report.canvas import RunFigure, Width
from vringlab.report.family import Family
from vringlab.report.heat_maps import heat_maps
from vringlab.report.marks import published
from vringlab.report.netperf_matrix import (
    COLUMNS,
    DIRECTIONS,
    MatrixColumn,
    beside,
    matrix_points,
    measured_blocks,
    published_blocks,
)
from vringlab.report.panels import Column, arm_panels
from vringlab.report.summary import Summary

#: More points of one direction than these are shown as heat maps alone.
FEW = 8
#: Fewer measured points than these are no matrix, unless one was published.
_MATRIX = 4

_RATES = (
    Column("throughput", "throughput", zero=True),
    Column("transactions", "transactions", zero=True),
    Column("cpu", "host CPU", zero=True),
    Column("throughput_per_cpu", "throughput per CPU", zero=True),
    Column("transactions_per_cpu", "transactions per CPU", zero=True),
)
_HOST = (
    Column("vhost_cpu", "vhost CPU", zero=True),
    Column("vhost_wakeups", "vhost wakeups", log=True),
    Column("tx_interrupts", "TX interrupts", log=True),
    Column("throughput_stddev", "spread of throughput", zero=True),
)


def draw(summary: Summary, workload: str, width: Width, notes: bool) -> dict[str, RunFigure]:
    """For each direction the matrix, the rates of each sample, and vhost's work."""
    stated = published_blocks(summary.run.plan.experiment)
    measured = measured_blocks(summary, workload)
    there = summary.metrics(workload)
    others = [MatrixColumn((c.metric,), c.title) for c in _HOST if c.metric in there]
    host = measured_blocks(summary, workload, others)
    marks = published(summary)
    figures: dict[str, RunFigure | None] = {}
    for direction, points in matrix_points(summary, workload).items():
        named = f"{DIRECTIONS[direction]}: "
        claimed = any(block.direction == direction for block in stated)
        if claimed or len(points) >= _MATRIX:
            blocks = beside(direction, measured, stated)
            figures[f"matrix-{direction}"] = heat_maps(
                summary, workload, blocks, COLUMNS, f"{named}change in percent", width, notes
            )
        if len(points) <= FEW:
            mine_only = [
                column
                for column in _RATES
                if any(
                    row.metric == column.metric for p in points for row in summary.of(workload, p)
                )
            ]
            figures[f"rates-{direction}"] = arm_panels(
                summary,
                workload,
                mine_only,
                f"{named}rates and CPU of each sample",
                width,
                notes,
                points,
                marks,
            )
            figures[f"host-{direction}"] = arm_panels(
                summary, workload, _HOST, f"{named}vhost and interrupts", width, notes, points
            )
        elif others:
            figures[f"host-{direction}"] = heat_maps(
                summary,
                workload,
                [block for block in host if block.direction == direction],
                others,
                f"{named}vhost and interrupts, change in percent",
                width,
                notes,
            )
    return {name: figure for name, figure in figures.items() if figure is not None}


def mapped(summary: Summary, workload: str) -> bool:
    """Whether the points are so many that only heat maps show the changes of all."""
    return sum(map(len, matrix_points(summary, workload).values())) > FEW


FAMILY = Family(
    name="netperf",
    metrics=(*(column.metric for column in _RATES), *(column.metric for column in _HOST)),
    headline=("throughput", "transactions", "cpu", "throughput_per_cpu", "transactions_per_cpu"),
    draw=draw,
    mapped=mapped,
    order=3,
)
