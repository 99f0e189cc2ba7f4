"""netperf's output: recorded sessions, windows made for the arithmetic, faults, and fuzz."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vringlab.errors import InfrastructureError
from vringlab.workloads import netperf_output
from vringlab.workloads.base import Outcome
from vringlab.workloads.netperf_output import Session, netperf_outcome

OUTPUTS = Path(__file__).parent / "outputs"


def recorded(name: str) -> str:
    return (OUTPUTS / f"netperf-2.7.1-{name}.txt").read_text()


STREAM = recorded("tcp-stream")
PAIR = (recorded("tcp-stream-early"), recorded("tcp-stream-late"))
MAERTS = recorded("tcp-maerts")
RR = recorded("tcp-rr")


def values(outcome: Outcome) -> dict[str, tuple[float, str]]:
    return {metric.name: (metric.value, metric.unit) for metric in outcome.metrics}


def key(text: str, name: str) -> float:
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name}=")]
    return float(line.partition("=")[2])


def judge(*texts: str, asked_s: float = 3.0, confidence_width: float | None = None) -> Outcome:
    sessions = [Session(text) for text in texts]
    return netperf_outcome(sessions, asked_s=asked_s, confidence_width=confidence_width)


# ---- Recorded ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [STREAM, MAERTS])
def test_a_recorded_stream_is_read(text: str) -> None:
    result = netperf_output.parse(text)
    assert result.unit == "bit/s"
    assert result.throughput == key(text, "THROUGHPUT") * 1e6
    assert result.elapsed_s == key(text, "ELAPSED_TIME")
    assert len(result.interims) == text.count("NETPERF_ENDING")
    assert result.confidence_width is None
    assert result.iterations == 1
    assert result.said == ()
    span = result.span
    assert span is not None
    assert span[1] - span[0] == pytest.approx(result.elapsed_s, abs=0.1)
    amount, told = result.moved(*span)
    assert told == pytest.approx(span[1] - span[0], abs=0.01)
    assert amount / told == pytest.approx(result.throughput, rel=0.05)
    outcome = judge(text)
    assert outcome.problems == outcome.warnings == ()
    assert values(outcome) == {"throughput": (result.throughput, "bit/s")}
    assert outcome.window_s == result.elapsed_s


def test_recorded_transactions_have_a_metric_of_their_own() -> None:
    outcome = judge(RR)
    assert outcome.problems == ()
    assert values(outcome) == {"transactions": (key(RR, "THROUGHPUT"), "1/s")}


def test_two_recorded_sessions_are_summed_over_common_time() -> None:
    early, late = (netperf_output.parse(text) for text in PAIR)
    assert early.span is not None
    assert late.span is not None
    assert early.span[0] < late.span[0] < early.span[1] < late.span[1]
    outcome = judge(*PAIR)
    assert outcome.context["start_skew_s"] == pytest.approx(late.span[0] - early.span[0])
    assert outcome.window_s == pytest.approx(early.span[1] - late.span[0])
    # Recorded with a skew on purpose: too much of it.
    assert outcome.problems
    assert "start skew" in outcome.reason
    # A session alone on the machine for a while was faster then: the plain sum says too much.
    plain = early.throughput + late.throughput
    (figure, _) = values(outcome)["throughput"]
    assert 0.3 * plain < figure < plain
    assert judge(*PAIR, asked_s=outcome.window_s).problems == ()


def test_a_recorded_missed_confidence_interval_is_a_problem() -> None:
    text = recorded("confidence-missed")
    result = netperf_output.parse(text)
    assert result.iterations == 3
    assert result.confidence_width == key(text, "THROUGHPUT_CONFID")
    assert result.confidence_width is not None
    width = result.confidence_width
    assert width > 0.01
    missed = judge(text, asked_s=1, confidence_width=width * 0.9)
    assert f"missed its confidence interval: {width:.3g} %" in missed.reason
    assert judge(text, asked_s=1, confidence_width=width * 1.1).problems == ()
    assert judge(text, asked_s=1).problems == ()


def test_confidence_asked_for_but_not_reached_for_want_of_iterations() -> None:
    outcome = judge(STREAM, confidence_width=5.0)
    assert "reached no confidence interval" in outcome.reason


def test_no_netserver_is_said_as_such() -> None:
    text = recorded("refused")
    with pytest.raises(InfrastructureError, match="could not reach netserver") as caught:
        netperf_output.parse(text)
    assert "netserver must listen" in caught.value.remedy
    outcome = netperf_outcome([Session(text, returncode=255)], asked_s=3)
    assert outcome.metrics == ()
    assert "session 0 died (netperf could not reach netserver" in outcome.reason
    assert "exit 255" in outcome.reason


def test_a_session_that_died_takes_the_figure_with_it() -> None:
    dead = Session(recorded("killed"), stderr="", returncode=255)
    outcome = netperf_outcome([Session(STREAM), dead], asked_s=3)
    assert outcome.metrics == ()
    assert "session 1 died" in outcome.reason
    # What the living one printed is kept.
    assert outcome.context["by_session"] == [netperf_output.parse(STREAM).throughput]
    outcome = netperf_outcome([Session(STREAM, returncode=1)], asked_s=3)
    assert "died after its result" in outcome.reason


# ---- Made ----------------------------------------------------------------------------------------


def made(
    begin: float,
    rates: list[float],
    *,
    step: float = 1.0,
    unit: str = "10^6bits",
    pause: float = 0.0,
    **keys: object,
) -> str:
    """A session whose interim intervals of `step` seconds begin at `begin`."""
    lines, end = [], begin
    for i, rate in enumerate(rates):
        end += step + (pause if i else 0.0)
        lines += [
            f"NETPERF_INTERIM_RESULT[{i}]={rate:.2f}",
            f"NETPERF_UNITS[{i}]={unit}/s",
            f"NETPERF_INTERVAL[{i}]={step:.3f}",
            f"NETPERF_ENDING[{i}]={end:.3f}",
        ]
    mean = sum(rates) / len(rates) if rates else 1.0
    all_keys = {
        "THROUGHPUT": f"{mean:.2f}",
        "THROUGHPUT_UNITS": f"{unit}/s",
        "ELAPSED_TIME": f"{len(rates) * step:.2f}",
        **keys,
    }
    return "\n".join(lines + [f"{name}={value}" for name, value in all_keys.items()]) + "\n"


def test_the_sum_is_over_the_common_window_only() -> None:
    # Common: 2 s to 10 s. There the first runs at 4 for 8 s, the second at 6; before and after
    # each is alone and at 100.
    first = made(0, [100, 100, 4, 4, 4, 4, 4, 4, 4, 4])
    second = made(2, [6, 6, 6, 6, 6, 6, 6, 6, 100, 100])
    outcome = judge(first, second, asked_s=10)
    assert outcome.problems == ()
    figure, unit = values(outcome)["throughput"]
    assert figure == pytest.approx(10e6)
    assert unit == "bit/s"
    assert outcome.window_s == pytest.approx(8)
    assert outcome.context["start_skew_s"] == pytest.approx(2)
    assert outcome.context["common_share"] == pytest.approx(0.8)


def test_an_interval_that_the_window_cuts_counts_in_part() -> None:
    first = made(0, [10, 20, 30], step=2)
    second = made(1, [1, 1, 1], step=2)
    outcome = judge(first, second, asked_s=5)
    # 1..6 s: one second at 10, two at 20, two at 30 -> 22; and 1.
    assert values(outcome)["throughput"][0] == pytest.approx(23e6)


@pytest.mark.parametrize(("late", "valid"), [(2.0, True), (2.1, False), (9.5, False)])
def test_a_common_window_under_four_fifths_is_invalid(late: float, valid: bool) -> None:
    outcome = judge(made(0, [5] * 10), made(late, [5] * 10), asked_s=10)
    assert outcome.valid == valid
    if not valid:
        assert f"is {(10 - late) / 10:.0%} of the 10 s asked for" in outcome.reason


def test_sessions_that_never_met_have_no_sum() -> None:
    outcome = judge(made(0, [5] * 3), made(4, [5] * 3))
    assert "common window is empty" in outcome.reason
    assert outcome.metrics == ()


def test_sessions_without_interim_results_cannot_be_summed() -> None:
    silent = made(0, [], THROUGHPUT="5.0", ELAPSED_TIME="3.00")
    assert judge(silent).problems == ()
    outcome = judge(silent, silent)
    assert "-D 1" in outcome.reason
    assert outcome.metrics == ()


def test_pauses_between_iterations_are_no_continuous_run() -> None:
    outcome = judge(made(0, [5] * 5, pause=0.5), made(0, [5] * 7), asked_s=5)
    assert "told its rate for" in outcome.reason


def test_a_short_session_is_no_run() -> None:
    assert "measured for 2 s of the 3 s" in judge(made(0, [5, 5])).reason


def test_a_session_that_moved_nothing_is_a_problem() -> None:
    outcome = judge(made(0, [0, 0, 0]))
    assert "0 throughput: session 0" in outcome.reason
    assert outcome.metrics == ()
    assert "0 throughput: session 1" in judge(made(0, [5, 5, 5]), made(0, [0, 0, 0])).reason


def test_interim_results_that_tell_another_story_are_warned_of() -> None:
    outcome = judge(made(0, [5, 5, 5], THROUGHPUT="8.00"))
    assert outcome.valid
    assert "its interim results are 62% of its result" in outcome.warnings[0]
    backwards = made(10, [5, 5]) + made(3, [5]).replace("[0]", "[2]")
    assert any("clock went backwards" in warning for warning in judge(backwards).warnings)


def test_units_are_converted_and_not_mixed() -> None:
    assert netperf_output.parse(made(0, [2], unit="10^3bits")).throughput == 2e3
    assert netperf_output.parse(made(0, [2], unit="MBytes")).throughput == 2 * 8 * 2**20
    assert netperf_output.parse(made(0, [2], unit="Trans")).unit == "1/s"
    mixed = judge(made(0, [5] * 3), made(0, [5] * 3, unit="Trans"))
    assert "different units: 1/s, bit/s" in mixed.reason
    with pytest.raises(InfrastructureError, match="reports in 'furlongs/s'"):
        netperf_output.parse(made(0, [2], unit="furlongs"))


def test_no_session_at_all_is_a_problem() -> None:
    assert netperf_outcome([], asked_s=3).reason == "there was no session"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "printed no result at all"),
        (STREAM[: STREAM.index("THROUGHPUT=")], "printed no result"),
        ("ELAPSED_TIME=3.00\n", "THROUGHPUT and THROUGHPUT_UNITS are not among its keys"),
        (made(0, [1]).replace("THROUGHPUT=1.00", "THROUGHPUT=1.0.0"), "not a number"),
        (made(0, [1]).replace("THROUGHPUT=1.00", "THROUGHPUT=-1"), "not a number"),
        (made(0, [1]).replace("THROUGHPUT=1.00", "THROUGHPUT=nan"), "not a number"),
    ],
)
def test_what_is_no_result_is_an_error(text: str, said: str) -> None:
    with pytest.raises(InfrastructureError) as caught:
        netperf_output.parse(text)
    assert said in caught.value.message
    assert caught.value.remedy


def test_a_last_interim_result_cut_off_is_left_out() -> None:
    text = made(0, [5, 5, 5])
    cut = text.replace("NETPERF_ENDING[2]=3.000\n", "")
    assert len(netperf_output.parse(cut).interims) == 2


def test_other_lines_are_kept_as_warnings() -> None:
    outcome = judge("netperf: cpu affinity is odd\n" + made(0, [5, 5, 5]))
    assert outcome.valid
    assert outcome.warnings == ("session 0 said: netperf: cpu affinity is odd",)


@given(st.integers(0, len(STREAM)), st.text(max_size=6))
def test_damaged_output_never_breaks_the_parser(at: int, noise: str) -> None:
    for text in (STREAM[:at], STREAM[:at] + noise + STREAM[at + len(noise) :]):
        judge(text, STREAM)
        judge(text, confidence_width=5.0)
