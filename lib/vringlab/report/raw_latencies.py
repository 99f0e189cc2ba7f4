"""Raw latencies side by side: a table of their summaries and the figure of their distributions."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.table import Table

from vringlab.analysis.latencies import histogram, summary
from vringlab.report.canvas import Look, style
from vringlab.report.latency_figures import cumulative, curve, percentiles
from vringlab.report.summary import amount

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_INCHES = 4.6


def table(samples: Mapping[str, np.ndarray[tuple[int], np.dtype[np.float64]]]) -> Table:
    """One column a file: count, mean, spread and percentiles; latencies in nanoseconds."""
    found = {name: summary(values) for name, values in samples.items()}
    shown = Table("", *found, box=None)
    for row in next(iter(found.values())).index:
        cells = [one[row] for one in found.values()]
        shown.add_row(row, *(f"{c:,.0f}" if row == "n" else amount(float(c), "ns") for c in cells))
    return shown


def figure(samples: Mapping[str, np.ndarray[tuple[int], np.dtype[np.float64]]]) -> Figure:
    """Cumulative distribution and percentile plot on logarithmic axes; one line a file.

    What is drawn is a histogram of bins no wider than 1/128 of their value, so the figure costs
    the same whether it shows a thousand latencies or ten million.
    """
    curves, looks = {}, {}
    for number, (name, values) in enumerate(samples.items()):
        bins = histogram(values).assign(cell_id=name)
        found = curve(pd.DataFrame(bins))
        if found is not None:
            curves[name] = found
            dashes = "-" if number < len(_COLOURS) else (0, (4, 2))
            looks[name] = Look(_COLOURS[number % len(_COLOURS)], "o", dashes)
    with style():
        made, (left, right) = plt.subplots(1, 2, figsize=(2 * _INCHES + 1.5, 4.2))
        cumulative(left, curves, looks, _INCHES)
        percentiles(right, curves, looks)
        total = sum(one.messages for one in curves.values())
        counted = f"{total:,}".replace(",", " ")
        left.set_title(f"{counted} raw latencies", loc="left", weight="bold")
        handles = [
            Line2D([], [], color=look.colour, ls=look.dashes, label=name)
            for name, look in looks.items()
        ]
        made.legend(handles=handles, loc="lower left", ncols=3, frameon=False)
        made.subplots_adjust(left=0.08, right=0.97, top=0.9, bottom=0.2, wspace=0.22)
        plt.close(made)
    return made
