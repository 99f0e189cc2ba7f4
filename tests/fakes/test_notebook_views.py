"""What notebooks show of a run: tables, and the data behind the figures. All runs are simulated."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from vringlab.analysis.frames import RunFrames, load_run
from vringlab.analysis.judgement import verdicts_of
from vringlab.analysis.pairing import point_text
from vringlab.campaign import experiment as experiments
from vringlab.campaign.experiment import Profile
from vringlab.campaign.fake import FakeSession
from vringlab.campaign.plan import make_plan
from vringlab.campaign.runner import execute
from vringlab.campaign.store import Store
from vringlab.collect import RunParameters
from vringlab.errors import UserError
from vringlab.report import noise_view, noise_widgets, notebook, power_view, verdict_view
from vringlab.report.canvas import RunFigure
from vringlab.report.change_axis import change_ticks

PKTGEN = "virtio-net-napi-tx"
VSOCK = "vsock-direct-enqueue"
EFFECTS = {"merged": 0.6, "rfc": 0.7, "direct": 0.8}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], RunFrames]:
    """Each experiment by profile; `quick` has two boots of two blocks."""
    found = {}
    for name in (PKTGEN, VSOCK):
        for profile, boots in (("smoke", 1), ("quick", 2)):
            # The profiles of the experiments change; what is expected here does not.
            own = Profile(boots=boots, blocks_per_boot=boots, duration_s=1)
            experiment = experiments.load(name)
            profiles = {**experiment.profiles, profile: own}
            plan = make_plan(experiment.model_copy(update={"profiles": profiles}), profile, 1)
            with Store.create(plan, tmp_path_factory.mktemp("runs")) as store:
                path = execute(store, lambda: FakeSession(effects=EFFECTS)).path
            found[name, profile] = load_run(path)
    return found


@pytest.fixture(scope="module")
def quick(runs: dict[tuple[str, str], RunFrames]) -> RunFrames:
    return runs[PKTGEN, "quick"]


def texts(figure: RunFigure) -> str:
    found = [text.get_text() for text in figure.texts]
    for axes in figure.axes:
        found += [axes.get_title("left"), *(label.get_text() for label in axes.get_yticklabels())]
    return "\n".join(found)


# A question


def test_a_question_is_the_first_comparison_of_the_run(quick: RunFrames) -> None:
    asked = noise_view.question(quick)
    assert (asked.metric, asked.arm, asked.reference) == ("pps_tx", "merged", "stock")
    assert asked.blocks_per_boot == 2
    assert asked.effect.ratio > 1.3
    assert 0.5 < asked.noise.effect.ratio < 2
    assert point_text(asked.params) in str(asked)
    block, boot = asked.spreads
    assert 0 < block < 0.5
    assert 0 <= boot < 0.5


def test_a_question_can_be_chosen(quick: RunFrames) -> None:
    asked = noise_view.question(quick, "tx_interrupts", "rfc")
    assert (asked.metric, asked.arm) == ("tx_interrupts", "rfc")
    assert power_view.better(asked, 20) == pytest.approx(0.8)
    assert power_view.better(noise_view.question(quick), 20) == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("metric", "arm", "why"),
    [("rtt_mean", None, "rtt_mean"), (None, "direct", "no arm 'direct'"), ("pps", None, "pps")],
)
def test_a_question_that_the_run_cannot_answer_is_refused(
    quick: RunFrames, metric: str | None, arm: str | None, why: str
) -> None:
    with pytest.raises(UserError, match="no comparison to look at") as caught:
        noise_view.question(quick, metric, arm)
    assert why in caught.value.message
    assert "merged" in caught.value.remedy


def test_one_block_gives_a_question_with_spreads_assumed(
    runs: dict[tuple[str, str], RunFrames],
) -> None:
    asked = noise_view.question(runs[PKTGEN, "smoke"])
    assert asked.spreads == (0.05, 0.0)
    assert list(noise_view.pair_table(asked)["95 % interval"]) == ["none: one boot"] * 2
    assert "no smallest detectable change" in noise_view.floor_sentence(asked)
    assert "not beyond" in noise_view.floor_sentence(asked)
    noise_view.block_figure(asked)


# Figures: what is plotted


def test_every_block_is_a_point_and_both_sides_share_a_scale(quick: RunFrames) -> None:
    asked = noise_view.question(quick)
    figure = noise_view.block_figure(asked)
    left, right = figure.axes
    for axes, found in ((left, asked.noise.effect), (right, asked.effect)):
        dots = [line for line in axes.get_lines() if line.get_marker() == "o"]
        plotted = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in dots])
        assert sorted(plotted) == pytest.approx(sorted(found.pairs.log_ratio))
        assert len(dots) == found.boots
    assert left.get_ylim() == right.get_ylim()
    assert "SIMULATED" in texts(figure)


def test_power_rises_with_boots_and_with_the_effect(quick: RunFrames) -> None:
    asked = noise_view.question(quick)
    figure = power_view.power_figure(asked, sd_block=0.1, sd_boot=0.02, blocks_per_boot=2)
    curves = [np.asarray(line.get_ydata(), dtype=float) for line in figure.axes[0].get_lines()[:5]]
    for curve in curves:
        assert (np.diff(curve) >= -1e-9).all()
    for smaller, larger in pairwise(curves):
        assert (larger >= smaller - 1e-9).all()
    needed = power_view.needed(asked)
    counts = [int(count) for count in needed["boots"]]
    assert counts == sorted(counts, reverse=True)


def test_stopping_early_is_right_as_often_as_it_says(quick: RunFrames) -> None:
    asked = noise_view.question(quick)
    table = power_view.stopping_table(asked, 1.2).set_index("true effect")
    none = table.iloc[0]
    assert float(none["found, stopping early"].rstrip(" %")) <= 6.0
    assert float(none["found, whole budget"].rstrip(" %")) <= 6.5
    figure = power_view.stopping_figure(asked, 1.2)
    assert "SIMULATED" in texts(figure)
    with pytest.raises(UserError, match="needs 3 or more"):
        power_view.stopping_figure(asked, 1.2, max_boots=2)


def test_tests_that_count_messages_are_fooled_by_equal_arms(quick: RunFrames) -> None:
    table = noise_view.false_positives(noise_view.question(quick), datasets=150)
    shares = table.set_index("method").drop(columns="counts").map(lambda t: float(t.rstrip(" %")))
    assert (shares.loc["t on boot means"] <= 11).all()
    assert (shares.loc["Mann-Whitney over pings"] > 15).all()


@pytest.mark.parametrize(("low", "high"), [(-0.1, 0.1), (-5.0, 0.2), (0.0, 3.0), (0.4, 0.5)])
def test_ticks_are_round_changes_well_apart(low: float, high: float) -> None:
    ticks = change_ticks(low, high)
    places = list(ticks)
    assert places == sorted(places)
    assert all(low <= place <= high for place in places)
    assert (np.diff(places) > (high - low) / 8).all()
    assert (0.0 in ticks) == (low <= 0 <= high)
    assert ticks.get(0.0, "0 %") == "0 %"


def test_sliders_begin_at_the_spreads_of_the_run_and_draw_again_when_moved(
    quick: RunFrames, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = noise_view.question(quick)
    panel = noise_widgets.explore_power(asked)
    change, _, block, _ = panel.children[:4]
    assert block.value == pytest.approx(100 * asked.spreads[0])
    assert "for a change of +10.0 %" in capsys.readouterr().out
    change.value = 30
    assert "for a change of +30.0 %" in capsys.readouterr().out
    block.value = 0
    panel.children[3].value = 0.5
    assert "needed" not in capsys.readouterr().err
    stopping = noise_widgets.explore_stopping(asked)
    stopping.children[0].value = 20
    assert "Figure" in capsys.readouterr().out


# Verdicts


def test_the_table_of_verdicts_has_a_row_for_every_claim(quick: RunFrames) -> None:
    verdicts = verdicts_of(quick)
    frame = verdict_view.verdict_table(verdicts).data  # type: ignore[attr-defined]  # pandas-stubs
    assert list(frame["verdict"]) == [verdict.word for verdict in verdicts]
    assert frame["because"].str.len().gt(10).all()
    counts = verdict_view.counts(verdicts)
    assert int(counts.to_numpy().sum()) == len(verdicts)
    assert set(counts.columns) == {verdict.word for verdict in verdicts}
    text = verdict_view.sentences(verdicts, details=True)
    assert text.count("\n- **") + 1 == len(verdicts)
    assert "Two equal arms" in text
    assert verdict_view.sentences([]) == "No claim."
    assert "no claim" in verdict_view.verdict_table([]).to_html()


def test_claims_stand_beside_what_was_measured(quick: RunFrames) -> None:
    verdicts = verdicts_of(quick)
    figure = verdict_view.claimed_and_measured(quick, verdicts)
    assert len(figure.axes) == 2
    for axes, metric in zip(figure.axes, ("pps_tx", "tx_interrupts"), strict=True):
        mine = [v for v in verdicts if v.claim.metric == metric]
        dots = [line for line in axes.get_lines() if line.get_marker() == "o"]
        seen = [float(np.asarray(line.get_xdata(), dtype=float)[0]) for line in dots]
        assert seen == pytest.approx(
            [v.evidence.effect.log_mean for v in mine if v.evidence.effect]
        )
        marks = [line for line in axes.get_lines() if line.get_marker() in ("D", "X")]
        claimed = [float(np.asarray(line.get_xdata(), dtype=float)[0]) for line in marks]
        assert claimed == pytest.approx([np.log(v.claim.ratio or 0) for v in mine])
        low, high = axes.get_xlim()
        assert all(low < place < high for place in [*seen, *claimed])


def test_claims_that_have_no_measured_ratio_are_counted_below(
    runs: dict[tuple[str, str], RunFrames],
) -> None:
    run = runs[VSOCK, "smoke"]
    figure = verdict_view.claimed_and_measured(run, verdicts_of(run))
    assert "claims have no measured ratio here" in figure.caption
    empty = replace(run, samples=run.samples.iloc[:0], histograms=run.histograms.iloc[:0])
    bare = verdict_view.claimed_and_measured(empty, verdicts_of(empty))
    assert bare.axes == []


# Other tables


def test_invalid_samples_are_counted_by_point_and_reason(
    runs: dict[tuple[str, str], RunFrames],
) -> None:
    table = notebook.invalid_samples(runs[VSOCK, "quick"])
    (row,) = table.to_dict("records")
    assert row["workload"] == "fio-vsock-pingpong"
    assert "payload=4096" in row["point"]
    assert row["samples"] == 16
    assert row["finding"] == "simulated short reads"
    assert notebook.invalid_samples(runs[PKTGEN, "quick"]).empty


def test_where_a_run_comes_from_is_said_without_gaps(quick: RunFrames) -> None:
    facts = notebook.about(quick)
    text = facts.to_string()
    assert "SIMULATED, no measurement" in text
    assert "64 of 64 planned" in text
    assert "None" not in text
    arms = notebook.arms_of(quick)
    assert list(arms["arm"]) == ["merged", "rfc", "stock (reference)"]
    assert set(arms["module"]) == {"virtio_net"}


@pytest.mark.parametrize(
    ("boots", "words"),
    [
        ({}, ""),
        ({"b01": {}}, ""),
        ({"b01": {"how": "booted"}}, "b01 booted"),
        (
            {"b01": {"how": "restored"}, "b02": {"how": "booted"}, "b03": {"how": "restored"}},
            "b01, b03 restored from saved labs; b02 booted",
        ),
        ({"b01": {"how": "moved"}}, "b01 moved"),
        (3, ""),
    ],
)
def test_how_boots_came_up_is_said(quick: RunFrames, boots: object, words: str) -> None:
    told = replace(quick, provenance={**quick.provenance, "boots": boots})
    assert notebook.boots_in_words(told) == words
    about = dict(notebook.about(told).itertuples(index=False, name=None))
    assert about.get("boots", "") == words


def test_figures_are_kept_by_experiment_below_the_folder(
    quick: RunFrames, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook.keep_figures(quick, None)
    assert capsys.readouterr().out == ""
    more = verdict_view.claimed_and_measured(quick, verdicts_of(quick))
    notebook.keep_figures(quick, tmp_path, claimed_and_measured=more)
    written = {path.name for path in (tmp_path / PKTGEN).iterdir()}
    assert {"effects.png", "effects.svg", "claimed-and-measured.svg"} <= written
    assert f"{len(written)} files in" in capsys.readouterr().out


def test_a_figure_that_the_run_does_not_have_is_named(quick: RunFrames) -> None:
    with pytest.raises(UserError, match="no figure 'latency'") as caught:
        notebook.show_figures(quick, "latency")
    assert "packets" in caught.value.remedy


PARAMETERS = {
    "host": "replay",
    "profile": "quick",
    "seed": 1,
    "params": {},
    "arms": [],
    "switch": "swap",
    "figures_folder": None,
}


def test_parameters_of_a_run_are_checked_before_it() -> None:
    read = RunParameters.read({**PARAMETERS, "params": {"payload": [64, 512], "ring": "split"}})
    assert read.params == {"payload": [64, 512], "ring": "split"}
    for wrong in ({"profile": "fast"}, {"switch": "boot"}, {"arms": "direct"}, {"seed": "x"}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            RunParameters.read({**PARAMETERS, **wrong})
