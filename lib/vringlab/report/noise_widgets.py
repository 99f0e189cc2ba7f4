"""Sliders for noise, power and stopping, for a notebook; without a front end they draw once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as widgets
from IPython.display import display

from vringlab.analysis.power import required_blocks
from vringlab.errors import UserError
from vringlab.report.noise_view import Question
from vringlab.report.power_view import better, power_figure, stopping_figure

_WIDE = {"description_width": "13em"}
_LAYOUT = widgets.Layout(width="34em")


def _slider(text: str, value: float, low: float, high: float, step: float) -> Any:
    return widgets.FloatSlider(
        value=min(max(value, low), high),
        min=low,
        max=high,
        step=step,
        description=text,
        style=_WIDE,
        layout=_LAYOUT,
        # A figure takes a moment: draw when the hand lets go.
        continuous_update=False,
    )


def _counter(text: str, value: int, low: int, high: int) -> Any:
    return widgets.IntSlider(
        value=min(max(value, low), high),
        min=low,
        max=high,
        description=text,
        style=_WIDE,
        layout=_LAYOUT,
        continuous_update=False,
    )


def _panel(draw: Callable[..., None], controls: Mapping[str, Any]) -> Any:
    shown = widgets.interactive_output(draw, dict(controls))
    return widgets.VBox([*controls.values(), shown])


def explore_power(asked: Question) -> Any:
    """Power curves and the design needed, for an effect and spreads set by sliders.

    The sliders begin at the spreads of the question's run.
    """
    block, boot = asked.spreads

    def draw(percent: float, per_boot: int, block: float, boot: float) -> None:
        ratio = better(asked, percent)
        try:
            print(required_blocks(ratio, block / 100, boot / 100, per_boot))
        except UserError as error:
            print(error)
        display(  # type: ignore[no-untyped-call]  # IPython's
            power_figure(
                asked,
                sd_block=block / 100,
                sd_boot=boot / 100,
                blocks_per_boot=per_boot,
                ratios=(ratio,),
            )
        )

    return _panel(
        draw,
        {
            "percent": _slider("change to be found, %", 10, 1, 80, 1),
            "per_boot": _counter("blocks per boot", asked.blocks_per_boot, 1, 20),
            "block": _slider("spread per block, %", 100 * block, 0, 60, 0.5),
            "boot": _slider("spread per boot, %", 100 * boot, 0.5, 60, 0.5),
        },
    )


def explore_stopping(asked: Question) -> Any:
    """A simulated campaign with early stopping, for a true and a claimed effect set by sliders."""

    def draw(true: float, claimed: float, boots: int, seed: int) -> None:
        display(  # type: ignore[no-untyped-call]  # IPython's
            stopping_figure(
                asked,
                better(asked, claimed),
                1.0 if true == 0 else better(asked, true),
                boots,
                seed,
            )
        )

    return _panel(
        draw,
        {
            "true": _slider("true improvement, %", 0, -40, 80, 1),
            "claimed": _slider("claimed improvement, %", 20, 1, 80, 1),
            "boots": _counter("budget, boots", 10, 4, 30),
            "seed": _counter("seed of the simulation", 1, 1, 50),
        },
    )
