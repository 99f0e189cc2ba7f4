"""Reports of vringlab-stream: recorded runs, faults made from them, and fuzz."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vringlab.errors import InfrastructureError
from vringlab.workloads import stream_output
from vringlab.workloads.base import Outcome

OUTPUTS = Path(__file__).parent / "outputs"
SENDER = (OUTPUTS / "stream-1.0-unix-connect.txt").read_text()
RECEIVER = (OUTPUTS / "stream-1.0-unix-listen.txt").read_text()

Change = Callable[[dict[str, Any]], None]


def changed(text: str, change: Change) -> str:
    document = json.loads(text[text.index("{") :])
    change(document)
    return json.dumps(document)


def outcome(
    sender: Change = lambda _: None, receiver: Change = lambda _: None, threads: int = 4
) -> Outcome:
    return stream_output.stream_outcome(
        stream_output.parse(changed(SENDER, sender)),
        stream_output.parse(changed(RECEIVER, receiver)),
        threads=threads,
    )


def values(found: Outcome) -> dict[str, tuple[float, str]]:
    return {metric.name: (metric.value, metric.unit) for metric in found.metrics}


def test_a_recorded_run_is_valid_and_complete() -> None:
    found = outcome()
    assert found.problems == found.warnings == ()
    receiver = json.loads(RECEIVER[RECEIVER.index("{") :])
    assert values(found) == {"throughput": (receiver["throughput"], "bit/s")}
    assert found.window_s == receiver["window"]["counted_ns"] / 1e9
    context = found.context
    assert context["threads"] == 4
    assert context["sizes"] == {"kind": "uniform", "mean": 2500, "sd": 0, "min": 1, "max": 5000}
    assert context["bytes"] == {"sending": receiver["bytes"], "receiving": receiver["bytes"]}
    assert context["start_skew_s"]["receiving"] == receiver["skew_ns"]["first"] / 1e9  # type: ignore[index]
    assert found.window_s > 0.9


def test_the_lines_around_a_report_do_not_matter() -> None:
    noisy = f"listening 20000\n{SENDER}vringlab-stream: bye\n"
    assert stream_output.parse(noisy) == stream_output.parse(SENDER)
    assert RECEIVER.startswith("listening ")


def test_the_load_is_given_by_the_samplers_clock() -> None:
    result = stream_output.parse(SENDER)
    begin, end = result.load_ns
    assert begin == result.zero_ns > 0
    assert end - begin == result.elapsed_ns >= 1_200_000_000
    assert 0 < result.cpu_share < 4


def share(portion: float) -> Change:
    def change(document: dict[str, Any]) -> None:
        window = document["window"]
        window["end_ns"] = window["begin_ns"] + round(portion * document["duration_ns"])

    return change


@pytest.mark.parametrize(("portion", "valid"), [(0.81, True), (0.79, False), (0.0, False)])
def test_a_common_window_under_four_fifths_is_invalid(portion: float, valid: bool) -> None:
    for found in (outcome(sender=share(portion)), outcome(receiver=share(portion))):
        assert found.valid == valid
        if not valid:
            assert f"common window is {portion:.0%} of the 1 s asked for" in found.reason
            assert "start skew" in found.reason


def test_a_window_that_ends_before_it_begins_is_empty() -> None:
    def cross(document: dict[str, Any]) -> None:
        document["window"].update(begin_ns=900, end_ns=500)

    assert stream_output.parse(changed(SENDER, cross)).common_share == 0


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("enobufs", 3, "met ENOBUFS 3 times"),
        ("resets", 1, "lost 1 connections to resets"),
        ("damaged", 2, "2 pieces did not arrive as they were sent"),
        ("error", "ended by signal 15", "stopped early: ended by signal 15"),
        ("connections", 3, "had 3 connections, not 4"),
        ("bytes", 0, "0 throughput"),
    ],
)
def test_each_fault_of_either_end_makes_a_sample_invalid(
    field: str, value: object, said: str
) -> None:
    def spoil(document: dict[str, Any]) -> None:
        document[field] = value

    for found in (outcome(sender=spoil), outcome(receiver=spoil)):
        assert not found.valid
        assert said in found.reason


def test_bytes_that_did_not_arrive_are_named_by_connection() -> None:
    def lose(document: dict[str, Any]) -> None:
        document["per_thread"][2]["bytes"] -= 1
        document["bytes"] -= 1

    found = outcome(receiver=lose)
    total = json.loads(SENDER)["bytes"]
    assert f"{total} bytes were sent and {total - 1} arrived (connection 2 differ)" in found.reason

    # Two connections that got each other's bytes add up, and are wrong all the same.
    def swap(document: dict[str, Any]) -> None:
        document["per_thread"][0]["bytes"] += 5
        document["per_thread"][1]["bytes"] -= 5

    assert "(connections 0, 1 differ)" in outcome(receiver=swap).reason


def test_an_idle_connection_is_no_stream() -> None:
    def idle(document: dict[str, Any]) -> None:
        one = document["per_thread"][3]
        one.update(bytes=0, ops=0, first_ns=None, last_ns=None)

    assert "connection 3 of the receiving end moved no byte" in outcome(receiver=idle).reason


def test_without_the_receivers_report_there_is_no_figure() -> None:
    found = stream_output.stream_outcome(stream_output.parse(SENDER), None, threads=4)
    assert found.metrics == ()
    assert found.reason == "the receiving end left no report"
    lost = changed(SENDER, lambda document: document["per_thread"][1].update(peer_bytes=None))
    found = stream_output.stream_outcome(stream_output.parse(lost), None, threads=4)
    assert "(connection 1 differ)" in found.reason


def test_reports_of_the_same_end_are_refused() -> None:
    sender = stream_output.parse(SENDER)
    found = stream_output.stream_outcome(sender, sender, threads=4)
    assert "not those of one sending and one receiving end" in found.reason


def test_ends_that_disagree_are_a_warning() -> None:
    found = outcome(receiver=lambda d: d.update(throughput=0.9 * json.loads(SENDER)["throughput"]))
    assert found.valid
    assert "saw 90% of the sending end's throughput" in found.warnings[0]


def test_no_field_is_mistaken_for_another() -> None:
    document = json.loads(SENDER)
    result = stream_output.parse(SENDER)
    dumped = json.loads(result.model_dump_json())
    assert dumped == document
    for end in (SENDER, RECEIVER):
        found = stream_output.parse(end)
        assert sum(one.bytes for one in found.per_thread) == found.bytes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "printed no report"),
        ("vringlab-stream: cannot connect to vsock 3:99\n", "printed no report"),
        (SENDER[: len(SENDER) // 2], "cut off or damaged"),
        (SENDER.replace('"bytes"', '"octets"'), "unusable"),
        (SENDER.replace('"threads": 4', '"threads": -4'), "unusable threads"),
        ('{"tool": "vringlab-stream", ' + '"x": [' * 100_000, "cut off or damaged"),
    ],
)
def test_what_is_no_report_is_an_error(text: str, said: str) -> None:
    with pytest.raises(InfrastructureError) as caught:
        stream_output.parse(text)
    assert said in caught.value.message
    assert caught.value.remedy


@given(st.integers(0, len(SENDER)), st.binary(max_size=6))
def test_a_damaged_report_never_breaks_the_parser(at: int, noise: bytes) -> None:
    text = SENDER[:at] + noise.decode("latin-1") + SENDER[at + len(noise) :]
    try:
        result = stream_output.parse(text)
    except InfrastructureError:
        return
    stream_output.stream_outcome(result, result, threads=4)


def vsock(name: str) -> Outcome:
    ends = [
        stream_output.parse((OUTPUTS / f"stream-1.0-vsock-{name}-{end}.txt").read_text())
        for end in ("connect", "listen")
    ]
    return stream_output.stream_outcome(*ends, threads=ends[0].threads)


def test_a_recorded_run_over_vsock_is_valid() -> None:
    found = vsock("16")
    assert found.problems == ()
    assert values(found)["throughput"][0] > 0
    assert found.context["verified"] is True
    # What a stream's receiver gets at once is many messages.
    messages, receives = found.context["messages"], found.context["receives"]
    assert isinstance(messages, int)
    assert isinstance(receives, int)
    assert messages > 10 * receives


def test_a_recorded_run_that_the_kernel_reset_is_invalid() -> None:
    """Small SEQPACKET messages overflow the receive queue's accounting of this base kernel."""
    found = vsock("seqpacket-enobufs")
    assert not found.valid
    assert "the receiving end met ENOBUFS 4 times" in found.reason
    assert "the sending end lost 4 connections to resets" in found.reason
    assert "bytes were sent and" in found.reason
