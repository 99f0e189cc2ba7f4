"""Time and instructions together: the words, the table, the figures, and the pairs they need."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from tests.fakes.fake_runs import NET, SHAPES, VSOCK, loaded, make_counted, with_samples
from tests.pure.test_figures import WIDTHS, check_text, marked
from typer.testing import CliRunner

from vringlab import cli
from vringlab.analysis import instructions
from vringlab.analysis.frames import RunFrames, load_run
from vringlab.analysis.power import POWER, design_half_width, design_power
from vringlab.analysis.stats import effect
from vringlab.campaign import tables
from vringlab.report import (
    events_view,
    function_view,
    instruction_figures,
    opinions,
    pairs_view,
)
from vringlab.report.canvas import RunFigure, Width, style
from vringlab.report.figures import drawn_metrics, figures_for
from vringlab.report.html import command_again, render
from vringlab.report.mail import mail_text
from vringlab.report.opinions import Gain, Opinion, gain_of, together
from vringlab.report.summary import ArmRow, summarise
from vringlab.report.trial_view import Finding, judge

PINGPONG = "vsock-pingpong"


def gain(state: opinions.State, mean: float, half: float = 0.02) -> Gain:
    return Gain(state, mean, mean - half, mean + half)


@pytest.mark.parametrize(
    ("time", "counted", "word", "why"),
    [
        (gain("better", 0.1), gain("better", 0.1), "both better", "as the instructions do"),
        (gain("better", 0.3), gain("better", 0.1), "both better", "by more than"),
        (gain("better", 0.05), gain("better", 0.1), "both better", "by less than"),
        (gain("worse", -0.1), gain("worse", -0.1), "both worse", "as the instructions do"),
        (gain("worse", -0.3), gain("worse", -0.1), "both worse", "by more than"),
        (gain("none", 0.0), gain("none", 0.0), "neither", "neither is told apart"),
        (
            gain("none", 0.02, 0.2),
            gain("better", 0.1),
            "fewer instructions, time undecided",
            "noise hides it",
        ),
        (
            gain("none", 0.05, 0.03),
            gain("better", 0.1),
            "fewer instructions but not faster: waiting, not work",
            "excludes a change of the instructions' size",
        ),
        (
            gain("none", -0.05, 0.02),
            gain("better", 0.1),
            "fewer instructions but not faster: waiting, not work",
            "excludes a change of the instructions' size",
        ),
        (
            gain("none", 0.1, 0.05),
            gain("better", 0.1),
            "fewer instructions, time undecided",
            "does not stand against the noise floor",
        ),
        (
            gain("none", 0.0, 0.2),
            gain("worse", -0.1),
            "more instructions, time undecided",
            "noise hides it",
        ),
        (
            gain("none", 0.0),
            gain("worse", -0.1),
            "more instructions but not slower",
            "excludes a change of the instructions' size",
        ),
        (
            gain("better", 0.1),
            gain("none", 0.0),
            "faster with as many instructions: less waiting",
            "excludes a change of the time's size",
        ),
        (
            gain("better", 0.1),
            gain("none", 0.05, 0.2),
            "faster, instructions undecided",
            "holds a change of the time's size",
        ),
        (
            gain("worse", -0.1),
            gain("none", 0.0),
            "slower with as many instructions: more waiting",
            "excludes a change of the time's size",
        ),
        (
            gain("worse", -0.1),
            gain("none", -0.05, 0.2),
            "slower, instructions undecided",
            "holds a change of the time's size",
        ),
        (gain("worse", -0.1), gain("better", 0.1), "disagree", "fewer instructions, and slower"),
        (gain("better", 0.1), gain("worse", -0.1), "disagree", "more instructions, and faster"),
    ],
)
def test_what_two_gains_say_together(time: Gain, counted: Gain, word: str, why: str) -> None:
    found, because = together(time, counted)
    assert found == word
    assert why in because


# Of runs


def counted(folder: Path, name: str = VSOCK, **session: Any) -> RunFrames:
    given = {"noise": 0.01, "spread": 0.005, "boots": 4, **session}
    return load_run(make_counted(folder, name, **given))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFrames]:
    """Less work: of the vsock run hidden by noise, of the other told by both."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        VSOCK: counted(folder, VSOCK, work={"direct": 0.4}, noise=0.15),
        NET: counted(folder, NET, work={"merged": 0.4}, effects={"merged": 0.8}),
    }


@pytest.fixture(scope="module")
def vsock(runs: dict[str, RunFrames]) -> RunFrames:
    return runs[VSOCK]


@pytest.fixture(scope="module")
def net(runs: dict[str, RunFrames]) -> RunFrames:
    return runs[NET]


def of_arm(run: RunFrames, arm: str, workload: str = PINGPONG) -> Opinion:
    found = [
        item for item in opinions.opinions(run) if (item.arm, item.workload) == (arm, workload)
    ]
    return found[0]


@pytest.mark.parametrize(
    ("session", "word"),
    [
        ({"effects": {"direct": 0.5}, "work": {"direct": 0.4}}, "both better"),
        ({"effects": {"direct": 2.0}, "work": {"direct": 3.0}}, "both worse"),
        ({}, "neither"),
        ({"work": {"direct": 0.4}, "noise": 0.15}, "fewer instructions, time undecided"),
        ({"work": {"direct": 0.4}}, "fewer instructions but not faster: waiting, not work"),
        ({"work": {"direct": 3.0}}, "more instructions but not slower"),
        ({"effects": {"direct": 0.5}}, "faster with as many instructions: less waiting"),
        ({"effects": {"direct": 2.0}}, "slower with as many instructions: more waiting"),
        ({"effects": {"direct": 2.0}, "work": {"direct": 0.4}}, "disagree"),
    ],
)
def test_what_a_run_says(tmp_path: Path, session: Mapping[str, Any], word: str) -> None:
    run = counted(tmp_path, VSOCK, **session)
    found = of_arm(run, "direct")
    assert found.word == word
    assert found.sentence.startswith(f"{word}: rtt_mean ")
    assert re.search(
        r"instructions [+-]\d+\.\d % \[.+\] for one round trip \(guest .+, host .+\); ",
        found.sentence,
    )
    assert not found.is_twin
    assert of_arm(run, "queued.aa").word == "equal arms agree"


def test_of_a_rate_more_is_better(net: RunFrames) -> None:
    (first, *_) = [item for item in opinions.opinions(net) if item.arm == "merged"]
    assert first.word == "both better"
    assert "pps_tx +" in first.sentence
    assert "instructions -" in first.sentence
    assert "for one packet" in first.sentence
    assert first.time is not None
    assert first.time.effect is not None
    found = gain_of(first.time.effect, "better")
    assert 0 < found.low < found.mean < found.high
    assert found.mean == pytest.approx(np.log(first.time.effect.ratio))


def test_times_and_instructions_of_all_arms_are_adjusted_together(
    net: RunFrames, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def spy(run: RunFrames, rows: list[ArmRow], level: float) -> list[Finding]:
        asked.append(len(rows))
        return judge(run, rows, level)

    monkeypatch.setattr(opinions, "judge", spy)
    found = opinions.opinions(replace(net))
    # Time and instructions of two arms at two points; the A/A pair is no claim. Then both sides.
    assert asked == [8, 8]
    assert len(found) == 6


def test_equal_arms_that_differ_are_told(vsock: RunFrames) -> None:
    def apart(samples: pd.DataFrame) -> pd.DataFrame:
        twin = (samples["arm"] == "queued.aa") & (samples["metric"] == "instructions")
        return samples.assign(value=samples["value"].where(~twin, 1.5 * samples["value"]))

    found = of_arm(with_samples(vsock, apart), "queued.aa")
    assert found.word == "equal arms differ"
    assert "instructions apart beyond chance" in found.sentence


@pytest.mark.parametrize("back", [False, True])
def test_work_that_moves_from_one_side_to_the_other_is_told(tmp_path: Path, back: bool) -> None:
    fewer, more = ("host", "guest") if back else ("guest", "host")

    def moved(samples: pd.DataFrame) -> pd.DataFrame:
        value = samples["value"]
        for side, factor in ((fewer, 0.6), (more, 1.4)):
            mine = (samples["arm"] == "direct") & (samples["metric"] == f"instructions_{side}")
            value = value.where(~mine, factor * value)
        return samples.assign(value=value)

    word = f"work moves from {fewer} to {more}"
    # In the sum nothing is seen, and nothing in the time.
    plain = counted(tmp_path, VSOCK)
    found = of_arm(with_samples(plain, moved), "direct")
    assert found.word == word
    assert "neither their sum nor the time" in found.because
    assert "work moves" not in of_arm(plain, "direct").sentence
    # Beside another word it is told, too.
    faster = counted(tmp_path, VSOCK, effects={"direct": 0.5})
    found = of_arm(with_samples(faster, moved), "direct")
    assert found.word == "faster with as many instructions: less waiting"
    assert found.because.endswith(word)


def test_a_path_that_never_ran_says_nothing(net: RunFrames) -> None:
    known = {**net.provenance, "exercised": {"merged": {"exercised": False, "points": []}}}
    found = of_arm(replace(net, provenance=known), "merged", "pktgen-testpmd")
    assert found.word == "not exercised"


def test_what_is_missing_is_told_with_its_reason(vsock: RunFrames) -> None:
    short = of_arm(vsock, "direct", "fio-vsock-pingpong")
    assert short.word == "not available"
    assert "simulated short reads" in short.sentence
    one = of_arm(with_samples(vsock, SHAPES["one block"]), "direct")
    assert (one.word, "one block has no spread" in one.sentence) == ("not available", True)


def test_a_host_that_cannot_count_says_why(vsock: RunFrames) -> None:
    def without(samples: pd.DataFrame) -> pd.DataFrame:
        return samples[~samples["metric"].str.startswith("instructions")]

    why = "the embedded host runs under KVM"
    known = {**vsock.provenance, "instructions": {"counted": False, "not available": why}}
    run = replace(with_samples(vsock, without), provenance=known)
    assert opinions.lines(run) == [f"Instructions are not available: {why}."]
    assert opinions.chosen(run) is None
    assert why in pairs_view.answer(run).lines[0]
    assert {item.word for item in opinions.opinions(run)} == {"not available"}
    assert why in render(run)
    assert why in re.sub(r"\s+", " ", mail_text(run))


def test_what_perf_counted_has_no_functions_and_is_said_to_be_its(vsock: RunFrames) -> None:
    run = with_samples(vsock, lambda samples: samples.assign(host_kind="physical"))
    assert "as perf reads them" in opinions.method(run)
    assert "executed to wait" not in opinions.method(run)
    assert "tools' own user space in the guest" in opinions.method(run)
    assert function_view.name_of("guest", "kernel", "", "") == "guest, kernel as a whole"
    assert function_view.name_of("host", "user", "", "") == "host, user space"
    assert function_view.name_of("guest", "module", "toy", "") == "guest (no symbol) [toy]"
    assert function_view.name_of("host", "kernel", "kvm", "exit") == "host exit [kvm]"


def test_a_run_that_was_not_asked_says_nothing_of_instructions(
    tmp_path: Path, vsock: RunFrames
) -> None:
    plain = loaded(tmp_path, VSOCK)
    assert opinions.opinions(plain) == []
    assert opinions.lines(plain) == []
    assert opinions.table(plain).empty
    for text in (render(plain), mail_text(plain)):
        assert "Two opinions" not in text
    assert "--count-instructions" not in command_again(plain)
    assert "--count-instructions" in command_again(vsock)


def test_show_page_and_mail_have_both_opinions(vsock: RunFrames) -> None:
    done = CliRunner().invoke(cli.app, ["show", str(vsock.path)])
    assert done.exit_code == 0
    said = of_arm(vsock, "direct").word
    for text in (done.output, render(vsock), mail_text(vsock)):
        plain = re.sub(r"\s+", " ", text)
        assert "Two opinions, time and instructions" in plain
        assert f"{said}: rtt_mean" in plain
        assert "slope between two untimed runs" in plain
        assert "those of the emulated processors" in plain


def test_the_table_has_a_row_for_each_arm_and_point(vsock: RunFrames) -> None:
    found = opinions.table(vsock)
    told = opinions.opinions(vsock)
    assert list(found["both say"]) == [item.word for item in told]
    assert set(found["arm"]) == {"queued.aa", "rfc-v1", "direct"}
    direct = found[(found["arm"] == "direct") & (found["workload"] == PINGPONG)].iloc[0]
    assert direct["time"].startswith("rtt_mean ")
    assert re.fullmatch(r"-\d+\.\d % \[.+\]", direct["instructions"])
    assert direct["for one"] == "round trip"


@pytest.mark.parametrize("shape", list(SHAPES))
def test_every_shape_of_run_has_words(vsock: RunFrames, shape: str) -> None:
    bent = with_samples(vsock, SHAPES[shape])
    told = opinions.lines(bent)
    assert told
    assert all(line.endswith(".") for line in told)


# Figures


def counted_figures(run: RunFrames, width: Width = "wide") -> dict[str, RunFigure]:
    """The figures about instructions of the first workload, and that of pairs."""
    summary = summarise(run, drawn_metrics(run))
    with style():
        found = instruction_figures.draw(summary, summary.workloads[0], width, True)
    return {**found, "pairs": pairs_view.answer(run, width=width).figure}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", [VSOCK, NET])
def test_no_text_is_cut_or_covered(runs: dict[str, RunFrames], name: str, width: Width) -> None:
    figures = counted_figures(runs[name], width)
    assert set(figures) == {"opinions", "instructions", "functions", "events", "pairs"}
    for figure in figures.values():
        check_text(figure)


@pytest.mark.parametrize("shape", list(SHAPES))
def test_every_shape_of_run_has_figures_that_can_be_read(net: RunFrames, shape: str) -> None:
    bent = with_samples(net, SHAPES[shape])
    summary = summarise(bent, drawn_metrics(bent))
    for width in WIDTHS:
        check_text(pairs_view.answer(bent, width=width).figure)
        with style():
            for workload in summary.workloads:
                for figure in instruction_figures.draw(summary, workload, width, True).values():
                    check_text(figure)


def test_a_report_has_the_figures_and_one_without_counts_has_not(
    vsock: RunFrames, tmp_path: Path
) -> None:
    assert {"opinions", "functions"} <= set(figures_for(vsock))
    assert not {"opinions", "functions"} & set(figures_for(loaded(tmp_path, VSOCK)))


def test_both_opinions_are_drawn_with_their_intervals_on_one_scale(net: RunFrames) -> None:
    summary = opinions.summary_of(net)
    with style():
        figure = instruction_figures.opinions_figure(summary, "pktgen-testpmd")
    assert figure is not None
    left, right = figure.axes
    assert left.get_xlim() == right.get_xlim()
    for axes, metric in ((left, "pps_tx"), (right, "instructions")):
        rows = [row for row in summary.of("pktgen-testpmd", None, metric) if not row.is_reference]
        drawn = [
            float(np.asarray(line.get_xdata())[0])
            for line in axes.findobj(Line2D)
            if str(line.get_gid()).startswith("effect:")
        ]
        assert drawn == pytest.approx([row.effect.log_mean for row in rows if row.effect])
        assert len(drawn) == 6
    said = [text.get_text() for text in left.texts if text.get_gid() == "word"]
    words = [item.word for item in opinions.opinions(net) if not item.is_twin]
    assert [text.partition(" ")[2] for text in said] == words


def test_bars_are_the_largest_differences_and_stacks_both_arms(net: RunFrames) -> None:
    item = opinions.chosen(net)
    assert item is not None
    assert item.arm == "merged"
    figure = counted_figures(net)["functions"]
    here = instructions.at(instructions.profiles(net), item.workload, item.params)
    table = function_view.working(instructions.difference(here, "merged", "stock"))
    bars = {
        str(patch.get_gid()): patch.get_width()
        for patch in figure.findobj(Rectangle)
        if str(patch.get_gid()).startswith(("change:", "stack:"))
    }
    for _, row in table.head(12).iterrows():
        gid = f"change:{row['side']}:{row['area']}:{row['function']}"
        assert bars[gid] == pytest.approx(row["change"])
    for column in ("reference", "arm"):
        stacked = sum(width for gid, width in bars.items() if gid.startswith(f"stack:{column}:"))
        assert stacked == pytest.approx(table[column].sum())
    assert not any("idle" in gid or "spin" in gid for gid in bars)
    assert "Executed to wait, and left out: 47" in figure.caption


def test_a_table_of_functions_ends_with_the_others_and_all(net: RunFrames) -> None:
    found = function_view.table_of(net, most=3)
    assert list(found["function"])[3:] == ["6 others", "all"]
    assert found["function"].iloc[0] == "queue_work_on"
    areas = function_view.areas_of(net).set_index(["side", "code"])
    assert list(areas[areas[""] != ""].index) == [("guest", "idle"), ("host", "spin")]
    assert str(areas.loc[("guest", "kernel"), "change"]).startswith("-2")
    assert found["change"].iloc[0].startswith("-11,9") or found["change"].iloc[0].startswith(
        "-12,0"
    )
    numbers = found["change"].str.replace(",", "").astype(float)
    assert numbers.iloc[:4].sum() == pytest.approx(numbers.iloc[4], abs=5)


def test_events_are_drawn_and_tabled_as_they_were_counted(vsock: RunFrames) -> None:
    item = opinions.chosen(vsock, PINGPONG)
    assert item is not None
    assert item.arm == "direct"
    here = instructions.at(instructions.events(vsock), PINGPONG, item.params)
    found = events_view.event_table(here, "direct", "queued", 0.95)
    # Exits, their reasons from the most frequent on, then switches.
    assert list(found["what"]) == [
        *("exits", "exits: npf", "exits: interrupt", "exits: hlt", "exits: cpuid"),
        *("context switches of the guest", "context switches of the host"),
    ]
    switches = found.set_index("what").loc["context switches of the guest"]
    assert switches["arm"] / switches["reference"] == pytest.approx(0.4, rel=0.05)
    assert switches["low"] < switches["change"] < switches["high"] < 0
    with style():
        figure = instruction_figures.other_events(opinions.summary_of(vsock), PINGPONG)
    assert figure is not None
    drawn = {
        str(line.get_gid()): np.asarray(line.get_xdata(), dtype=float)
        for line in figure.findobj(Line2D)
    }
    # The reason of one exit in six hundred is in the table only.
    kept = found[found["what"] != "exits: cpuid"]
    for column in ("reference", "arm"):
        assert drawn[f"events:{column}"] == pytest.approx(kept[column].to_numpy(dtype=float))
    assert "1 of under 1 % of the exits" in figure.caption
    table = events_view.table_of(vsock, PINGPONG)
    assert list(table.columns[:3]) == ["for one round trip", "queued", "direct"]
    assert re.fullmatch(r"-4\.\d\d", table["change"].iloc[5])
    assert re.search(
        r"For one round trip: 6\.\d+ exits from the guest \(", "".join(opinions.lines(vsock))
    )


def test_a_run_without_events_has_no_figure_of_them(vsock: RunFrames, tmp_path: Path) -> None:
    def without(samples: pd.DataFrame) -> pd.DataFrame:
        return samples[~samples["metric"].isin(opinions.EVENTS)]

    run = replace(with_samples(vsock, without), path=tmp_path)
    with style():
        assert instruction_figures.other_events(opinions.summary_of(run), PINGPONG) is None
    assert events_view.table_of(run, PINGPONG).empty
    assert "For one round trip" not in "".join(opinions.lines(run))


def test_the_rest_is_no_function_and_comes_last(net: RunFrames) -> None:
    item = opinions.chosen(net)
    assert item is not None
    here = instructions.at(instructions.profiles(net), item.workload, item.params)
    here["value"] = here["value"].where(here["function"] != function_view.REST, 1e6 * here["block"])
    table = function_view.working(instructions.difference(here, "rfc", "merged"))
    assert table["function"].iloc[-1] == function_view.REST


def test_little_waiting_is_not_worth_a_sentence(net: RunFrames) -> None:
    profile = instructions.profiles(net)
    assert "Executed to wait" in function_view.waiting_sentence(profile, "rfc", "stock")
    little = profile.assign(value=profile["value"].where(profile["area"] == "kernel", 1.0))
    assert function_view.waiting_sentence(little, "rfc", "stock") == ""


def test_a_damaged_profile_costs_a_report_that_figure_only(tmp_path: Path) -> None:
    run = counted(tmp_path, boots=2)
    next(iter(tables.instruction_profiles(run.path).values())).write_text("{")
    figures = figures_for(run)
    assert "opinions" in figures
    assert "functions" not in figures


# Pairs


@pytest.fixture(scope="module")
def asked(vsock: RunFrames) -> tuple[pairs_view.Pairing, pairs_view.Pairing]:
    return pairs_view.pairings_of(vsock)


def test_after_so_many_pairs_the_interval_is_that_of_a_run_that_ended_there(
    vsock: RunFrames, asked: tuple[pairs_view.Pairing, pairs_view.Pairing]
) -> None:
    for one in asked:
        measured = one.measured()
        assert list(measured["pairs"]) == [2, 3, 4]
        blocks = list(one.effect.pairs.table["block"])
        for _, row in measured.iterrows():
            some = vsock.samples[vsock.samples["block"].isin(blocks[: row["pairs"]])]
            alone = effect(some, one.asked.metric, "direct", "queued", workload=PINGPONG, draws=0)
            assert row["half"] == pytest.approx(np.log(alone.interval.high) - alone.log_mean)
            assert not row["one_boot"]


def test_pairs_of_one_boot_are_marked(tmp_path: Path) -> None:
    run = counted(tmp_path, boots=2, blocks=3, work={"direct": 0.4})
    time, _ = pairs_view.pairings_of(run)
    assert list(time.measured()["one_boot"]) == [True, True, False, False, False]
    alone = dict(marked(pairs_view.answer(run).figure, "alone"))
    assert len(np.asarray(alone["rtt_mean"].get_xdata())) == 2
    assert alone["rtt_mean"].get_markerfacecolor() == "none"


def test_the_needed_pairs_are_the_fewest_with_the_power(
    asked: tuple[pairs_view.Pairing, pairs_view.Pairing],
) -> None:
    for one in asked:
        assert one.needed is not None
        size, spreads = abs(np.log(one.ratio)), one.asked.spreads

        def power(boots: int, size: float = size, spreads: tuple[float, float] = spreads) -> float:
            return design_power(size, boots, 1, *spreads)

        least = next(boots for boots in range(2, 1000) if power(boots) >= POWER)
        assert one.needed.blocks == least
        # One sample of a second for each arm; counted runs are of one and of three seconds.
        each = 2 if one.asked.metric == "rtt_mean" else 8
        assert one.needed_s == pytest.approx(each * least)
    time, counted_ = asked
    assert time.needed is not None
    assert counted_.needed is not None
    assert counted_.needed.blocks < time.needed.blocks
    told = pairs_view.pairs_lines(asked)
    assert f"{time.needed.blocks} pairs" in told[0]
    assert f"{counted_.needed.blocks} pairs" in told[1]
    share = 100 * 8 * counted_.needed.blocks / (2 * time.needed.blocks)
    assert f"{share:.3g} % of the measuring time" in told[2]


def test_the_same_size_is_asked_of_a_rate_and_of_a_time(
    net: RunFrames, asked: tuple[pairs_view.Pairing, pairs_view.Pairing]
) -> None:
    time, counted_ = asked
    assert time.ratio == counted_.ratio == pytest.approx(counted_.effect.ratio)
    rate, work = pairs_view.pairings_of(net)
    assert rate.ratio == pytest.approx(1 / work.effect.ratio)


def test_the_figure_of_pairs_shows_what_was_measured_and_needed(
    vsock: RunFrames, asked: tuple[pairs_view.Pairing, pairs_view.Pairing]
) -> None:
    figure = pairs_view.answer(vsock).figure
    measured, needed = dict(marked(figure, "measured")), dict(marked(figure, "needed"))
    for one in asked:
        line = measured[one.asked.metric]
        assert list(np.asarray(line.get_xdata())) == [2, 3, 4]
        heights = 100 * np.expm1(one.measured()["half"])
        assert np.asarray(line.get_ydata()) == pytest.approx(heights)
        assert one.needed is not None
        assert list(np.asarray(needed[one.asked.metric].get_xdata())) == [one.needed.blocks]
    sizes = [line for line in figure.findobj(Line2D) if line.get_gid() == "size"]
    assert np.asarray(sizes[0].get_ydata())[0] == pytest.approx(
        100 * np.expm1(abs(asked[1].effect.log_mean))
    )


def test_one_side_can_be_asked_for_alone(vsock: RunFrames) -> None:
    item = opinions.chosen(vsock)
    assert item is not None
    guest, host = (pairs_view.pairings_of(vsock, PINGPONG, side)[1] for side in ("guest", "host"))
    assert guest.asked.metric == "instructions_guest"
    assert guest.ratio == pytest.approx(item.sides["guest"].effect.ratio)  # type: ignore[union-attr]
    assert abs(np.log(guest.ratio)) > abs(np.log(host.ratio))
    told = pairs_view.answer(vsock, side="guest").lines
    assert "By guest's instructions, a change of -" in told[1]
    nothing = pairs_view.answer(vsock, "fio-vsock-pingpong")
    assert "no point with both" in nothing.lines[0]


def test_equal_arms_apart_is_the_median_over_pairs(
    asked: tuple[pairs_view.Pairing, pairs_view.Pairing],
) -> None:
    for one in asked:
        ratios = np.abs(one.asked.noise.effect.pairs.log_ratio)
        assert np.log(one.apart) == pytest.approx(sum(sorted(ratios)[1:3]) / 2)


def test_instructions_that_are_the_same_everywhere_are_no_measurement(vsock: RunFrames) -> None:
    def same(samples: pd.DataFrame) -> pd.DataFrame:
        counted = samples["metric"] == "instructions"
        return samples.assign(value=samples["value"].where(~counted, 150_000.0))

    answer = pairs_view.answer(with_samples(vsock, same))
    assert "no point with both time and instructions" in answer.lines[0]
    check_text(answer.figure)


def test_one_block_reckons_with_an_assumed_spread(vsock: RunFrames) -> None:
    told = pairs_view.answer(with_samples(vsock, SHAPES["one block"])).lines
    assert "at an assumed spread of 5 %" in told[0]


def test_a_design_whose_half_width_is_the_effect_finds_it_every_other_time() -> None:
    half = design_half_width(400, 2, 0.1, 0.02)
    assert design_power(half, 400, 2, 0.1, 0.02) == pytest.approx(0.5, abs=0.01)
    assert design_half_width(1, 2, 0.1) == np.inf
    wide, narrow = (design_half_width(boots, 1, 0.1) for boots in (2, 8))
    assert wide > 10 * narrow


def test_the_first_pairs_are_those_of_the_first_boots(tmp_path: Path) -> None:
    run = counted(tmp_path, boots=3, blocks=2)
    item = of_arm(run, "direct")
    assert item.time is not None
    assert item.time.effect is not None
    pairs = item.time.effect.pairs
    some = pairs.first(3)
    assert (some.blocks, some.boots, some.hosts) == (3, 2, 1)
    assert np.array_equal(some.log_ratio, pairs.log_ratio[:3])
    assert len(some.table) == 3
