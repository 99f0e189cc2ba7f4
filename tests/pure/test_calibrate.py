"""The calibration itself: its promise, the faults it must find, and what it shows."""

from __future__ import annotations

import io
import math

import matplotlib.pyplot as plt
import numpy as np
import pytest
from rich.console import Console

from vringlab.analysis import calibrate as cal
from vringlab.analysis.power import noise_floor
from vringlab.analysis.simulate import ARM, REFERENCE, TWIN, Design, Noise, as_samples, simulate
from vringlab.analysis.stats import effect
from vringlab.analysis.verdicts import compare
from vringlab.errors import UserError
from vringlab.report import calibration_view as view


@pytest.fixture(scope="module")
def result() -> cal.CalibrationResult:
    return cal.calibrate(datasets=400, seed=3, more=10)


def share(result: cal.CalibrationResult, method: str, scenario: str, design: str) -> float:
    rows = result.false_positives
    found = rows[
        (rows["method"] == method) & (rows["scenario"] == scenario) & (rows["design"] == design)
    ]
    return float(found["rejected"].iloc[0])


def test_the_promise_is_kept(result: cal.CalibrationResult) -> None:
    assert result.problems == ()
    rows = result.false_positives
    ours = rows[rows["method"] == cal.PRIMARY]
    # 4,000 data sets: four standard errors of 5 % are 1.4 %.
    assert (ours["rejected"] < 0.064).all()
    assert (ours["coverage"] > 0.936).all()
    assert (ours[ours["scenario"] != "arm x boot, bimodal"]["coverage"] < 0.964).all()
    verdict = rows[rows["method"] == cal.VERDICT]
    assert (verdict["rejected"] < 0.035).all()
    assert (verdict["rejected"] > 0).all()


def test_naive_methods_are_found_out(result: cal.CalibrationResult) -> None:
    for design in ("3x4", "5x5", "10x5"):
        for method in (cal.WELCH, cal.PERMUTATION, cal.BLOCKS, cal.PINGS):
            assert share(result, method, "own boots", design) > 0.15
        assert share(result, cal.PINGS, "same boots", design) > 0.15
        assert share(result, cal.BLOCKS, "arm x boot, bimodal", design) > 0.12
    assert share(result, cal.BOOTSTRAP, "same boots", "2x3") > 0.06
    assert share(result, cal.BOOTSTRAP, "own boots", "2x3") > 0.2


def test_power_grows_with_effect_and_boots(result: cal.CalibrationResult) -> None:
    table = view.power_table(result).xs(cal.PRIMARY, level="method")
    for scenario in cal.SCENARIOS:
        part = table.xs(scenario, level="scenario").to_numpy(dtype=float)
        assert (np.diff(part, axis=0) > -0.03).all()
        assert (np.diff(part, axis=1) > -0.03).all()
    assert float(table["5x5"].to_dict()[("same boots", "+20 %")]) > 0.95


def test_same_seed_same_table() -> None:
    kwargs = {"designs": [Design(2, 3)], "scenarios": ["same boots"], "sequential": False}
    one = cal.calibrate(datasets=100, **kwargs)  # type: ignore[arg-type]
    two = cal.calibrate(datasets=100, **kwargs)  # type: ignore[arg-type]
    assert one.table.equals(two.table)
    other = cal.calibrate(datasets=100, seed=2, **kwargs)  # type: ignore[arg-type]
    assert not one.table.equals(other.table)


def test_batch_and_product_agree_data_set_by_data_set() -> None:
    design = Design(3, 2)
    logs = simulate(design, Noise(interaction=0.03), 1.1, 30, 5)
    found = cal._primary(logs, math.log(1.1))
    for index in range(30):
        frame = as_samples(logs[:, index], design)
        one = effect(frame, "rtt_mean", "direct", "queued", draws=0)
        floor = noise_floor(frame, "rtt_mean", "queued")
        assert bool(found[cal.PRIMARY].rejected[index]) == (one.p < 0.05)
        covered = found[cal.PRIMARY].covered
        assert covered is not None
        assert bool(covered[index]) == (one.interval.low <= 1.1 <= one.interval.high)
        word, _ = compare(1.5, one.ratio, one.interval, math.log(floor.floor))
        beyond = word in ("reproduced", "same direction, other size", "contradicted")
        assert bool(found[cal.VERDICT].rejected[index]) == beyond


def test_permutation_is_exact_where_runs_are_independent() -> None:
    noise = Noise(boot=0, interaction=0)
    logs = simulate(Design(2, 4), noise, 1.0, 4000, 6)
    rejected = cal._permutation(logs, np.random.default_rng(7)).rejected.mean()
    # One set of 999 permutations is shared by all, which moves the level a little.
    assert 0.03 < rejected < 0.07


def test_layouts_differ_as_they_should() -> None:
    noise = Noise(boot=0.3, run=0.01, slow=0)
    swap = simulate(Design(50, 1), noise, 1.2, 40, 8)
    own = simulate(Design(50, 1, "reboot"), noise, 1.2, 40, 8)
    ratio = swap[ARM] - swap[REFERENCE]
    assert ratio.mean() == pytest.approx(math.log(1.2), abs=0.005)
    assert ratio.std() == pytest.approx(noise.sd_block, rel=0.1)
    assert (own[TWIN] - own[REFERENCE]).std() == pytest.approx(0.3 * math.sqrt(2), rel=0.1)
    assert Noise().sd_block == pytest.approx(math.sqrt(2 * (0.04**2 + 0.1875 * 0.15**2)))


def test_problems_name_what_is_off(result: cal.CalibrationResult) -> None:
    table = result.table.copy()
    first = table.index[(table["method"] == cal.PRIMARY) & (table["ratio"] == 1.0)][0]
    table.loc[first, "rejected"] = 0.09
    table.loc[first, "coverage"] = 0.90
    off = cal.CalibrationResult(table, result.sequential, 400, 3, Noise())
    assert len(off.problems) == 2
    assert "9.0 % false positives" in off.problems[0]
    assert "90.0 %" in off.problems[1]
    assert "Off beyond chance" in view.markdown(off)


def test_sequential_table(result: cal.CalibrationResult) -> None:
    rows = result.sequential
    power = rows[rows["rule"] == "power"].set_index(["interaction", "ratio"])
    assert (power.xs(1.0, level="ratio")["effect"] < 0.07).all()
    assert (power["coverage"] > 0.92).all()
    for ratio in (1.2, 1.6):
        large = power.xs(ratio, level="ratio")
        assert (large["agree"] > 0.97).all()
        assert (large["saved"] > 0.4).all()
    always = rows[rows["rule"] == "always valid"].set_index(["interaction", "ratio"])
    assert (always["effect"] <= power["effect"] + 0.02).all()


def test_tables_and_caption_say_simulated(result: cal.CalibrationResult) -> None:
    text = view.markdown(result)
    assert "400 simulated data sets" in text
    assert "no measurement" in text
    assert text.count("| same boots |") >= 7
    console = Console(width=120, file=io.StringIO())
    console.print(view.terminal(result))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for row in view.false_positive_table(result).to_numpy(dtype=float):
        assert all(f"{100 * value:.1f}" in shown for value in row)
    assert "no measurement" in shown


def test_figure_shows_the_tables_numbers(result: cal.CalibrationResult) -> None:
    figure = view.figure(result)
    try:
        panels = figure.axes
        assert len(panels) == len(cal.SCENARIOS)
        for panel, scenario in zip(panels, cal.SCENARIOS, strict=True):
            drawn = {c.get_label(): c.lines[0].get_ydata() for c in panel.containers}  # type: ignore[attr-defined]
            assert set(drawn) == set(cal.METHODS)
            for method, values in drawn.items():
                for design, value in zip(("2x3", "3x4", "5x5", "10x5"), values, strict=True):
                    known = share(result, str(method), scenario, design)
                    assert value == pytest.approx(max(known, 0.004))
    finally:
        plt.close(figure)


def test_share_interval_is_wilsons() -> None:
    low, high = cal.share_interval(0.05, 2000)
    assert low == pytest.approx(0.0413, abs=2e-4)
    assert high == pytest.approx(0.0605, abs=2e-4)


@pytest.mark.parametrize(
    "call",
    [
        lambda: cal.calibrate(datasets=10),
        lambda: cal.calibrate(designs=[Design(1, 8)]),
        lambda: Noise(boot=-1),
        lambda: Noise(slow_share=2),
        lambda: Noise(run=math.nan),
        lambda: Design(0, 3),
    ],
)
def test_bad_requests_are_refused(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError) as caught:
        call()
    assert caught.value.remedy
