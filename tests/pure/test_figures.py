"""The plotted data of figures, and that none of their text is cut or covered. No pixels."""

from __future__ import annotations

import itertools
import pkgutil
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from tests.fakes.fake_runs import NET, SHAPES, VSOCK, as_measured, loaded, with_samples

from vringlab.analysis.claims import load_claims
from vringlab.analysis.frames import RunFrames
from vringlab.errors import InfrastructureError
from vringlab.report import figures as figures_module
from vringlab.report.canvas import RunFigure, Width, log_ticks, text_inches, wrapped
from vringlab.report.family import Family
from vringlab.report.figures import drawn_metrics, families, figures_for, save_figures
from vringlab.report.latency_figures import curve
from vringlab.report.summary import Summary, at, summarise
from vringlab.report.time_budget import duration, phases, sentence

Drawn = dict[str, dict[str, Figure]]

WIDTHS: tuple[Width, ...] = ("wide", "narrow")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFrames]:
    folder = tmp_path_factory.mktemp("runs")
    return {name: loaded(folder, name) for name in (VSOCK, NET)}


@pytest.fixture(scope="module")
def vsock(runs: dict[str, RunFrames]) -> RunFrames:
    return runs[VSOCK]


@pytest.fixture(scope="module")
def net(runs: dict[str, RunFrames]) -> RunFrames:
    return runs[NET]


@pytest.fixture(scope="module")
def drawn(runs: dict[str, RunFrames]) -> Drawn:
    """The figures of both runs, to be looked at and not changed."""
    return {name: figures_for(run) for name, run in runs.items()}


def texts(figure: Figure) -> list[tuple[Text, Bbox]]:
    """Every visible text of a figure with its place in pixels, the watermark left out."""
    figure.draw_without_rendering()
    unseen: set[int] = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            # A tick beyond the axis keeps its label but is not drawn.
            drawn = {id(tick) for tick in axis._update_ticks()}  # type: ignore[union-attr]  # private
            for tick in [*axis.majorTicks, *axis.minorTicks]:
                if id(tick) not in drawn:
                    unseen |= {id(tick.label1), id(tick.label2)}
    return [
        (text, Text.get_window_extent(text))
        for text in figure.findobj(Text)
        if text.get_visible()
        and text.get_text().strip()
        and text.get_gid() != "watermark"
        and id(text) not in unseen
    ]


def check_text(figure: Figure) -> None:
    """Nothing is cut at an edge, nothing lies on something else."""
    found = texts(figure)
    assert found
    width, height = figure.bbox.width, figure.bbox.height
    for text, place in found:
        inside = place.x0 >= -1 and place.y0 >= -1
        inside = inside and place.x1 <= width + 1 and place.y1 <= height + 1
        assert inside, f"cut: {text.get_text()!r} at {place.extents} of {width} x {height}"
    for (one, first), (other, second) in itertools.combinations(found, 2):
        both = Bbox.intersection(first, second)
        if both is not None and both.width > 1 and both.height > 2:
            raise AssertionError(f"{one.get_text()!r} lies on {other.get_text()!r}")


def marked(figure: Figure, kind: str) -> Iterator[tuple[str, Line2D]]:
    """Lines that stand for `kind`, with their arms."""
    for line in figure.findobj(Line2D):
        name, _, arm = str(line.get_gid()).partition(":")
        if name == kind:
            yield arm, line


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", [VSOCK, NET])
def test_no_text_is_cut_or_covered(runs: dict[str, RunFrames], name: str, width: Width) -> None:
    for figure in figures_for(runs[name], width).values():
        check_text(figure)


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("name", [VSOCK, NET])
def test_every_shape_of_run_has_figures_that_can_be_read(
    runs: dict[str, RunFrames], name: str, shape: str
) -> None:
    bent = with_samples(runs[name], SHAPES[shape])
    summary = summarise(bent, drawn_metrics(bent))
    for width in WIDTHS:
        figures = figures_for(summary, width)
        assert figures
        for figure in figures.values():
            check_text(figure)


def test_a_text_on_another_would_be_seen(net: RunFrames) -> None:
    figure = figures_for(net)["packets"]
    figure.text(0.02, 0.97, "on the title")
    with pytest.raises(AssertionError, match="lies on"):
        check_text(figure)


def test_a_text_over_the_edge_would_be_seen(net: RunFrames) -> None:
    figure = figures_for(net)["packets"]
    figure.text(0.98, 0.5, "much too long for this place")
    with pytest.raises(AssertionError, match="cut"):
        check_text(figure)


@pytest.mark.parametrize(
    ("name", "figure", "metrics"),
    [
        (NET, "packets", ("pps_tx", "pps_rx")),
        (NET, "interrupts", ("tx_interrupts", "kicks")),
        (VSOCK, "round-trips-fio-vsock-pingpong", ("rtt_p1", "rtt_mean", "rtt_p99")),
        (VSOCK, "round-trips-vsock-pingpong", ("rtt_p1", "rtt_mean", "rtt_p99")),
    ],
)
def test_every_sample_is_drawn_once(
    runs: dict[str, RunFrames], name: str, figure: str, metrics: tuple[str, ...]
) -> None:
    run = with_samples(runs[name], SHAPES["some invalid"])
    samples = run.samples[run.samples["metric"].isin(metrics)]
    if name == VSOCK:
        samples = samples[samples["workload"] == figure.removeprefix("round-trips-")]
    drawn = figures_for(run)[figure]
    for kind, valid in (("samples", True), ("invalid", False)):
        seen = [
            float(value)
            for _, line in marked(drawn, kind)
            for value in np.asarray(line.get_xdata())
        ]
        wanted = list(samples.loc[samples["valid"] == valid, "value"])
        # Axes are scaled by powers of ten, so the digits must agree.
        assert len(seen) == len(wanted)
        assert np.allclose(_digits(seen), _digits(wanted), rtol=1e-6)


def _digits(values: list[float]) -> list[float]:
    return sorted(v / 10 ** np.floor(np.log10(v)) if v else 0.0 for v in values)


def test_invalid_samples_are_hollow_crosses_and_in_no_mean(vsock: RunFrames) -> None:
    bent = with_samples(vsock, SHAPES["some invalid"])
    figure = figures_for(bent)["round-trips-vsock-pingpong"]
    for _, line in marked(figure, "invalid"):
        assert line.get_marker() == "X"
        assert line.get_markerfacecolor() == "none"
    summary = summarise(bent, ["rtt_mean"])
    for row in summary.of("vsock-pingpong"):
        mine = at(bent.samples, row.workload, row.params)
        mine = mine[(mine["arm"] == row.arm) & (mine["metric"] == "rtt_mean")]
        good = mine.loc[mine["valid"], "value"]
        assert row.level is not None
        # One boot has one block fewer: mean of boot means, not of samples.
        boots = np.log(good).groupby(mine.loc[mine["valid"], "boot"]).mean()
        assert row.level.value == pytest.approx(np.exp(boots.mean()))
        assert row.invalid == 1
        levels = [np.asarray(x.get_xdata())[0] for a, x in marked(figure, "level") if a == row.arm]
        assert any(
            np.isclose(row.level.value / 10.0**n, level) for level in levels for n in range(10)
        )


def test_why_samples_are_invalid_stands_in_the_figure(vsock: RunFrames) -> None:
    figure = figures_for(vsock)["round-trips-fio-vsock-pingpong"]
    words = " ".join(text.get_text() for text, _ in texts(figure))
    assert "Invalid, in no interval: 16 samples, simulated short reads" in words
    assert "all invalid" in words
    without = figures_for(vsock, notes=False)["round-trips-fio-vsock-pingpong"]
    assert "simulated short reads" in without.caption  # type: ignore[attr-defined]
    assert "in no interval" not in " ".join(text.get_text() for text, _ in texts(without))


def test_published_ratios_stand_beside_the_measured_ones(net: RunFrames, drawn: Drawn) -> None:
    figure = drawn[NET]["effects"]
    claims = [
        claim
        for claim in load_claims(NET)
        if claim.ratio is not None and claim.params.get("ring") == "split"
    ]
    seen = sorted(
        (arm, round(float(np.asarray(line.get_xdata())[0]), 9), line.get_marker())
        for arm, line in marked(figure, "claimed")
    )
    wanted = sorted(
        (c.arms[1], round(float(np.log(c.ratio or 1)), 9), "D" if c.status == "standing" else "x")
        for c in claims
    )
    assert seen == wanted
    assert {marker for _, _, marker in seen} == {"D", "x"}
    limits = [axes.get_xlim() for axes in figure.axes]
    assert all(any(low <= x <= high for low, high in limits) for _, x, _ in seen)
    # Without claims of that name nothing is marked.
    other = replace(net, plan=replace(net.plan, experiment="nobody-claimed-this"))
    assert not list(marked(figures_for(other)["effects"], "claimed"))


def test_titles_say_arms_kernel_host_and_n(net: RunFrames) -> None:
    for figure in figures_for(as_measured(net)).values():
        words = " ".join(t.get_text() for t, _ in texts(figure) if t.get_gid() == "title")
        for wanted in (NET, "stock", "merged", "debian:6.12", "emulated host", "n=32 samples"):
            assert wanted in words, (wanted, words)


def test_simulated_figures_say_so_all_over(net: RunFrames) -> None:
    for width in WIDTHS:
        for figure in figures_for(net, width).values():
            words = [text.get_text() for text in figure.findobj(Text)]
            assert "SIMULATED, no measurement" in " ".join(words)
            assert words.count("SIMULATED") >= 1
    for figure in figures_for(as_measured(net)).values():
        assert not any("SIMULATED" in text.get_text() for text in figure.findobj(Text))


def test_an_arm_has_one_colour_in_all_figures(drawn: Drawn) -> None:
    colours: dict[str, set[str]] = {}
    for figure in drawn[VSOCK].values():
        for kind in ("samples", "curve", "effect"):
            for arm, line in marked(figure, kind):
                colour = line.get_color() if kind == "curve" else line.get_markerfacecolor()
                colours.setdefault(arm, set()).add(to_hex(colour))
    assert {arm: len(found) for arm, found in colours.items()} == dict.fromkeys(colours, 1)
    assert colours["queued"] == colours["queued.aa"]
    others = [colours[arm] for arm in ("queued", "rfc-v1", "direct")]
    assert len({next(iter(found)) for found in others}) == 3


def test_lines_join_samples_of_one_block_only(net: RunFrames, drawn: Drawn) -> None:
    figure = drawn[NET]["packets"]
    blocks = net.samples["block"].nunique()
    for axes in figure.axes:
        (pairs,) = [item for item in axes.collections if item.get_gid() == "pairs"]
        assert len(pairs.get_paths()) == blocks
        for path in pairs.get_paths():
            assert np.asarray(path.vertices).shape == (4, 2)


def test_intervals_are_those_of_the_summary(net: RunFrames, drawn: Drawn) -> None:
    figure = drawn[NET]["packets"]
    summary = summarise(net, ["pps_tx", "pps_rx"])
    rows = [row for row in summary.rows if row.level is not None]
    assert rows
    for axes, row_of in zip(
        figure.axes,
        [
            summary.of("pktgen-testpmd", params, metric)
            for params in summary.points("pktgen-testpmd")
            for metric in ("pps_tx", "pps_rx")
        ],
        strict=True,
    ):
        bars = {
            str(bar.get_gid()).partition(":")[2]: bar
            for bar in axes.patches
            if isinstance(bar, Rectangle) and str(bar.get_gid()).startswith("interval")
        }
        title = " ".join(text.get_text() for text in axes.texts)
        scale = 1e6 if "(Mpps)" in title else 1e3
        for row in row_of:
            assert row.level is not None
            bar = bars[row.arm]
            low, high = row.level.interval.low / scale, row.level.interval.high / scale
            limits = axes.get_xlim()
            assert bar.get_x() == pytest.approx(max(low, limits[0]))
            assert bar.get_x() + bar.get_width() == pytest.approx(min(high, limits[1]))


def test_an_interval_beyond_the_panel_has_an_arrow(net: RunFrames) -> None:
    wild = with_samples(net, SHAPES["wild"])
    figures = figures_for(wild)
    assert list(marked(figures["packets"], "beyond"))
    assert list(marked(figures["effects"], "beyond"))


def test_rates_begin_at_zero_and_events_are_logarithmic(drawn: Drawn) -> None:
    figures = drawn[NET]
    assert {axes.get_xlim()[0] for axes in figures["packets"].axes} == {0.0}
    assert {axes.get_xscale() for axes in figures["interrupts"].axes} == {"log"}


def test_panels_that_are_compared_share_their_axis(drawn: Drawn) -> None:
    axes = drawn[NET]["packets"].axes
    assert len({panel.get_xlim() for panel in axes[::2]}) == 1
    assert len({panel.get_xlim() for panel in axes[1::2]}) == 1


def test_effects_show_estimates_and_the_noise_floor(net: RunFrames, drawn: Drawn) -> None:
    figure = drawn[NET]["effects"]
    summary = summarise(net, ["pps_tx", "pps_rx", "tx_interrupts"])
    wanted = sorted(row.effect.log_mean for row in summary.rows if row.effect is not None)
    seen = sorted(float(np.asarray(line.get_xdata())[0]) for _, line in marked(figure, "effect"))
    assert seen == pytest.approx(wanted)
    floors = [bar.get_width() / 2 for bar in figure.findobj(Rectangle) if bar.get_gid() == "floor"]
    points = {(row.metric, str(dict(row.params))): row.floor for row in summary.rows}
    assert sorted(floors) == pytest.approx(sorted(np.log(floor or 1) for floor in points.values()))


def test_an_effect_of_one_boot_is_never_beyond_noise(net: RunFrames) -> None:
    bent = with_samples(net, SHAPES["one boot"])
    summary = summarise(bent)
    effects = [row for row in summary.rows if row.effect is not None]
    assert effects
    assert {row.effect.unit for row in effects if row.effect} <= {"block", "none"}
    assert not any(row.beyond_noise for row in effects)
    words = " ".join(text.get_text() for text in figures_for(bent)["effects"].findobj(Text))
    assert "interval of one boot alone" in words


def test_distribution_is_that_of_the_messages(vsock: RunFrames) -> None:
    summary = summarise(vsock, drawn_metrics(vsock))
    params = summary.points("vsock-pingpong")[0]
    here = at(vsock.samples, "vsock-pingpong", params)
    cells = here.loc[here["arm"] == "direct", "cell_id"].unique()
    bins = vsock.histograms[vsock.histograms["cell_id"].isin(cells)]
    found = curve(bins)
    assert found is not None
    messages = np.repeat(bins["value"].to_numpy(), bins["count"].to_numpy())
    assert found.messages == messages.size
    assert found.samples == len(cells)
    assert found.times == pytest.approx(np.quantile(messages, found.chances))
    # The tail ends where one message is left.
    assert found.chances[-1] <= 1 - 1 / messages.size
    known = ~np.isnan(found.low)
    assert (found.low[known] <= found.high[known]).all()


def test_an_empty_histogram_has_no_curve(vsock: RunFrames) -> None:
    assert curve(vsock.histograms.iloc[:0]) is None
    assert curve(vsock.histograms.head(3).assign(count=0)) is None


def test_invalid_distributions_are_faint_and_told_apart(drawn: Drawn) -> None:
    figure = drawn[VSOCK]["latency-fio-vsock-pingpong"]
    valid, invalid = list(marked(figure, "curve")), list(marked(figure, "invalid"))
    # Two panels, four arms each.
    assert (len(valid), len(invalid)) == (0, 8)
    assert all(line.get_alpha() == 0.6 for _, line in invalid)


def test_percentile_axis_ends_at_a_whole_number_of_nines(drawn: Drawn) -> None:
    figure = drawn[VSOCK]["latency-vsock-pingpong"]
    names = [label.get_text() for label in figure.axes[1].get_xticklabels()]
    assert names[:4] == ["0", "50", "90", "99"]
    assert figure.axes[1].get_xlim()[1] == pytest.approx(10 ** (len(names) - 2))


def test_a_run_without_samples_is_a_statement(net: RunFrames) -> None:
    empty = with_samples(net, SHAPES["no samples"])
    figures = figures_for(empty)
    assert "statement" in figures
    words = " ".join(text.get_text() for text in figures["statement"].findobj(Text))
    assert "No sample was measured." in words
    assert "0 of 32 planned samples" in words


def test_samples_without_figures_are_a_statement_with_the_reason(net: RunFrames) -> None:
    figures = figures_for(with_samples(net, SHAPES["no figures"]))
    words = " ".join(text.get_text() for text in figures["invalid"].findobj(Text))
    assert "no result" in words


def test_metrics_of_no_family_have_panels_of_their_own(net: RunFrames) -> None:
    figures = figures_for(with_samples(net, SHAPES["unknown metric"]))
    assert "figures" in figures
    words = " ".join(text.get_text() for text in figures["figures"].findobj(Text))
    assert "throughput" in words


def test_a_new_family_is_one_new_module(net: RunFrames, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(summary: Summary, workload: str, width: Width, notes: bool) -> Mapping[str, Figure]:
        from vringlab.report.canvas import statement

        assert notes
        return {"mine": statement(summary, "mine", f"of {workload}", width)}

    module = types.ModuleType("vringlab.report.kick_figures")
    module.FAMILY = Family("kicks", ("kicks",), ("kicks",), draw)  # type: ignore[attr-defined, arg-type]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    known = list(pkgutil.iter_modules([str(Path(figures_module.__file__).parent)]))
    extra = known[0]._replace(name="kick_figures")
    monkeypatch.setattr(pkgutil, "iter_modules", lambda _: [*known, extra])
    families.cache_clear()
    try:
        assert "mine" in figures_for(net)
    finally:
        families.cache_clear()


def test_figures_are_saved_as_png_and_svg(net: RunFrames, tmp_path: Path) -> None:
    paths = save_figures(net, tmp_path / "new" / "folder")
    assert {path.suffix for path in paths} == {".png", ".svg"}
    names = {path.stem for path in paths}
    assert names == {"packets", "interrupts", "effects", "time"}
    assert all(path.stat().st_size > 1000 for path in paths)


def test_the_same_figure_gives_the_same_bytes(net: RunFrames, drawn: Drawn) -> None:
    for name, figure in figures_for(net).items():
        assert isinstance(figure, RunFigure)
        before = drawn[NET][name]
        assert isinstance(before, RunFigure)
        assert figure.svg() == before.svg(), name


def test_a_folder_that_cannot_be_made_is_an_error_with_a_remedy(
    net: RunFrames, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InfrastructureError) as caught:
        save_figures(net, tmp_path / "file" / "figures")
    assert caught.value.remedy


def test_a_notebook_shows_a_figure_without_pyplot(net: RunFrames) -> None:
    figure = figures_for(net)["time"]
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_log_ticks_are_round_and_have_room() -> None:
    assert log_ticks(0.5, 2000, 4) == [1, 10, 100, 1000]
    assert log_ticks(11, 19, 3)
    assert len(log_ticks(1e-9, 1e9, 2)) <= 4
    for low, high in ((1, 2), (3, 3.3), (1e-3, 1e5), (5e5, 9e6)):
        ticks = log_ticks(low, high, 2.0)
        assert ticks
        assert all(low <= tick <= high for tick in ticks)
        gaps = np.diff(np.log(ticks)) * 2.0 / np.log(high / low)
        assert (gaps >= 0.6 - 1e-9).all()


def test_lines_are_as_long_as_measured() -> None:
    words = "percentiles end where one message is left, and 12.9 Mpps with µs"
    for line in wrapped(f"{words} {words} {words}", 3.0, 9.5):
        assert text_inches(line, 9.5) <= 3.0
    assert " ".join(wrapped(words, 1.0)) == words
    assert "".join(wrapped("x" * 200, 1.0)) == "x" * 200
    assert wrapped("", 1.0) == []


def test_time_budget_in_words() -> None:
    assert duration(0.0123) == "12.3 ms"
    assert duration(59.94) == "59.9 s"
    assert duration(125) == "2 min 05 s"
    assert duration(7265) == "2 h 01 min"
    time = {"phases": {"measure": 60.0, "boot": 40.0, "idle": 0.0, "later": 20}}
    assert list(phases(time)) == ["boot", "measure", "later"]
    assert sentence(time) == "Of 2 min 00 s, 50 % went to measuring."
    for broken in ({}, {"phases": None}, {"phases": {"boot": "soon"}}):
        assert phases(broken) == {}
        assert sentence(broken) == ""
