"""Parsers of tool output: recorded runs, faults made from them, and fuzz."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vringlab.errors import InfrastructureError
from vringlab.workloads import (
    fio_output,
    interrupts,
    latency,
    pingpong_output,
    pktgen_output,
    testpmd_output,
)
from vringlab.workloads.base import Outcome
from vringlab.workloads.latency import Latency
from vringlab.workloads.testpmd_output import PortSeries

OUTPUTS = Path(__file__).parent / "outputs"


def recorded(name: str) -> str:
    return (OUTPUTS / f"{name}.txt").read_text()


FIO_WRITER = recorded("fio-3.39-tcp-64-writer")
FIO_READER = recorded("fio-3.39-tcp-64-reader")


def fio_json(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text[text.index("{") :])
    return found


def changed(text: str, **fields: object) -> str:
    """fio's text with fields of its first job's active direction replaced; `clat_x` goes deeper."""
    document = fio_json(text)
    job = document["jobs"][0]
    side = job[job["job options"]["rw"]]
    for key, value in fields.items():
        if key == "error":
            job["error"] = value
        elif key.startswith("clat_"):
            side["clat_ns"][key.removeprefix("clat_")] = value
        else:
            side[key] = value
    return json.dumps(document)


def values(outcome: Outcome) -> dict[str, float]:
    return {metric.name: metric.value for metric in outcome.metrics}


# ---- Latency -----------------------------------------------------------------------------------


def test_percentile_of_bins_is_the_nearest_rank() -> None:
    bins = ((10.0, 1), (20.0, 98), (30.0, 1))
    assert latency.percentile_of_bins(bins, 1) == 10
    assert latency.percentile_of_bins(bins, 1.5) == 20
    assert latency.percentile_of_bins(bins, 99) == 20
    assert latency.percentile_of_bins(bins, 99.9) == 30
    assert latency.percentile_of_bins((), 50) is None


@given(st.lists(st.integers(0, 50), min_size=1, max_size=300), st.sampled_from([1, 50, 90, 99.9]))
def test_percentile_of_bins_agrees_with_sorting(found: list[int], percent: float) -> None:
    bins = tuple((float(v), found.count(v)) for v in sorted(set(found)))
    rank = max(1, math.ceil(round(len(found) * percent / 100, 9)))
    assert latency.percentile_of_bins(bins, percent) == sorted(found)[rank - 1]


def test_p999_of_a_thousand_is_rank_999() -> None:
    assert latency.percentile_of_bins(((1.0, 999), (2.0, 1)), 99.9) == 1.0


# ---- fio ---------------------------------------------------------------------------------------


def test_recorded_fio_run_is_valid_and_complete() -> None:
    outcome = fio_output.outcome_of_text(FIO_WRITER, FIO_READER, payload=64, asked_s=2)
    assert outcome.problems == ()
    assert values(outcome) == {
        "rtt_mean": 12774.506329,
        "rtt_p1": 11968,
        "rtt_p50": 12352,
        "rtt_p90": 13376,
        "rtt_p99": 16064,
        "rtt_p99.9": 39680,
        "round_trips": 77267.866067,
    }
    assert {metric.unit for metric in outcome.metrics} == {"ns", "1/s"}
    (histogram,) = outcome.histograms
    assert (histogram.metric, histogram.unit) == ("rtt", "ns")
    assert sum(count for _, count in histogram.bins) == 154613
    assert list(histogram.bins) == sorted(histogram.bins)
    assert outcome.window_s == 2.001
    assert outcome.raw["fio-writer.txt"].decode() == FIO_WRITER


def test_no_fio_field_is_mistaken_for_another() -> None:
    # firecracker#2226: a parser put the average into the maximum.
    (job,) = fio_output.parse(FIO_WRITER).jobs
    clat = job.clat
    assert (clat.minimum, clat.mean, clat.maximum) == (11708, 12774.506329, 2720489)
    assert (clat.stddev, clat.n) == (8306.478389, 154613)
    assert (job.rw, job.runtime_ms, job.total_ios, job.io_bytes) == ("write", 2001, 154613, 9895232)
    assert (job.short_ios, job.dropped_ios, job.error) == (0, 0, 0)
    distinct = changed(
        FIO_WRITER, total_ios=1, short_ios=2, drop_ios=3, runtime=4, io_bytes=5, iops=6.5, error=7,
        clat_min=8, clat_max=9, clat_mean=8.5, clat_stddev=0.25, clat_N=10,
    )  # fmt: skip
    (job,) = fio_output.parse(distinct).jobs
    assert (job.total_ios, job.short_ios, job.dropped_ios, job.runtime_ms) == (1, 2, 3, 4)
    assert (job.io_bytes, job.iops, job.error) == (5, 6.5, 7)
    assert (job.clat.minimum, job.clat.maximum, job.clat.mean) == (8, 9, 8.5)
    assert (job.clat.stddev, job.clat.n) == (0.25, 10)


def test_reader_figures_are_never_the_round_trip() -> None:
    reader = fio_output.parse(FIO_READER)
    assert reader.jobs[0].rw == "read"
    assert reader.jobs[0].clat.mean == 12781.015548
    outcome = fio_output.outcome_of_text(FIO_READER, FIO_WRITER, payload=64, asked_s=2)
    assert "ran rw=read, not rw=write" in outcome.reason


def test_text_around_the_json_is_kept_as_a_warning() -> None:
    # axboe/fio#1333
    noisy = "fio: cpu affinity is odd\n" + FIO_WRITER + "\nfio: terminating on signal 15\n"
    result = fio_output.parse(noisy)
    assert result.jobs == fio_output.parse(FIO_WRITER).jobs
    assert result.warnings == (
        "fio printed: fio: cpu affinity is odd",
        "fio printed: fio: terminating on signal 15",
    )
    outcome = fio_output.outcome_of_text(noisy, FIO_READER, payload=64, asked_s=2)
    assert outcome.valid
    assert any("cpu affinity" in warning for warning in outcome.warnings)


def test_the_listeners_greeting_precedes_its_json_and_is_no_warning() -> None:
    result = fio_output.parse(FIO_READER)
    assert result.preamble == "fio: waiting for connection"
    assert result.warnings == ()


def test_short_reads_of_a_recorded_run_make_it_invalid_though_the_reader_died() -> None:
    writer = recorded("fio-3.39-tcp-65536-short-writer")
    reader = recorded("fio-3.39-tcp-65536-short-reader")
    outcome = fio_output.outcome_of_text(writer, reader, payload=65536, asked_s=2)
    assert not outcome.valid
    assert "short-read artefact at 65536 bytes (writer short_ios=654)" in outcome.reason
    assert "the reader printed no result" in outcome.reason
    # The other check is blind to it: rate x mean is 1 here too.
    assert "in flight, not 1" not in outcome.reason
    assert values(outcome)["rtt_mean"] == 44263.336232  # kept, to be shown as invalid


def test_short_reads_of_a_recorded_run_make_it_invalid_though_the_writer_died() -> None:
    reader = recorded("fio-3.39-tcp-262144-short-reader")
    outcome = fio_output.outcome_of_text("", reader, payload=262144, asked_s=2)
    assert "reader short_ios=93" in outcome.reason
    assert outcome.metrics == ()


@pytest.mark.parametrize("end", ["writer", "reader"])
def test_one_short_read_on_either_end_is_enough(end: str) -> None:
    texts = {"writer": FIO_WRITER, "reader": FIO_READER}
    texts[end] = changed(texts[end], short_ios=1)
    outcome = fio_output.outcome_of_text(texts["writer"], texts["reader"], payload=64, asked_s=2)
    assert len(outcome.problems) == 1
    assert f"{end} short_ios=1" in outcome.reason


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"error": 110}, "ended with error 110 (Connection timed out)"),
        ({"total_ios": 0, "clat_N": 0, "iops": 0.0}, "completed no I/O"),
        ({"drop_ios": 3}, "dropped 3 I/Os"),
        ({"iops": 150000.0}, "1.92 messages in flight, not 1 within 20%"),
        ({"iops": 40000.0}, "0.511 messages in flight, not 1 within 20%"),
        ({"runtime": 1700}, "measured for 1.7 s of the 2 s asked for"),
        ({"clat_max": 100.0}, "min 11708 <= mean 12774.5 <= max 100 ns does not hold"),
    ],
)
def test_what_makes_a_fio_run_invalid(fields: dict[str, object], reason: str) -> None:
    writer = changed(FIO_WRITER, **fields)
    outcome = fio_output.outcome_of_text(writer, FIO_READER, payload=64, asked_s=2)
    assert reason in outcome.reason


def test_zero_throughput_is_invalid_with_a_reason_and_no_figures() -> None:
    # LNST#117: 0.00 for 64 s was reported as a pass.
    writer = changed(FIO_WRITER, total_ios=0, iops=0.0, clat_N=0, clat_bins={}, runtime=64000)
    reader = changed(FIO_READER, total_ios=0, iops=0.0, clat_N=0, clat_bins={}, runtime=64000)
    outcome = fio_output.outcome_of_text(writer, reader, payload=64, asked_s=64)
    assert "the writer's job 'writer' completed no I/O" in outcome.reason
    assert outcome.metrics == ()


def test_refused_connection_is_invalid_and_says_so() -> None:
    text = recorded("fio-3.39-tcp-refused")
    outcome = fio_output.outcome_of_text(text, "", payload=64, asked_s=2)
    assert "error 111 (Connection refused)" in outcome.reason
    assert any("func=connect" in warning for warning in outcome.warnings)


def test_plain_json_without_bins_gives_figures_and_a_warning() -> None:
    document = fio_json(FIO_WRITER)
    del document["jobs"][0]["write"]["clat_ns"]["bins"]
    text = json.dumps(document)
    outcome = fio_output.outcome_of_text(text, FIO_READER, payload=64, asked_s=2)
    assert outcome.valid
    assert outcome.histograms == ()
    assert values(outcome)["rtt_p99.9"] == 39680
    assert any("no bins" in warning for warning in outcome.warnings)


def test_a_percentile_that_fio_did_not_print_comes_from_its_bins() -> None:
    document = fio_json(FIO_WRITER)
    printed = document["jobs"][0]["write"]["clat_ns"]["percentile"]
    del document["jobs"][0]["write"]["clat_ns"]["percentile"]
    (job,) = fio_output.parse(json.dumps(document)).jobs
    for key, value in printed.items():
        found = job.clat.percentile(float(key))
        assert found is not None
        assert abs(found - value) <= value / 64, key


def test_percentiles_are_left_out_where_neither_is_there() -> None:
    document = fio_json(FIO_WRITER)
    for field in ("bins", "percentile"):
        del document["jobs"][0]["write"]["clat_ns"][field]
    outcome = fio_output.outcome_of_text(json.dumps(document), FIO_READER, payload=64, asked_s=2)
    assert set(values(outcome)) == {"rtt_mean", "round_trips"}


def test_truncated_fio_json_is_an_infrastructure_error_with_its_tail_and_a_remedy() -> None:
    cut = FIO_WRITER[: len(FIO_WRITER) // 2]
    with pytest.raises(InfrastructureError, match="cut off or damaged") as caught:
        fio_output.parse(cut)
    assert cut.splitlines()[-2].strip() in str(caught.value)
    assert caught.value.remedy
    for texts in ((cut, FIO_READER), (FIO_WRITER, 'fio: waiting for connection\n{\n "jobs" : [')):
        with pytest.raises(InfrastructureError, match="cut off or damaged"):
            fio_output.outcome_of_text(*texts, payload=64, asked_s=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "printed no JSON"),
        ("fio: engine net not loadable\n", "printed no JSON"),
        ('{"fio version": "fio-3.39", "jobs": []}', "lists no job"),
        ('{"fio version": "fio-3.39"}', "unusable jobs"),
        ('{"jobs": [{"write": {"iops": NaN}}]}', "unusable jobs.0.write.iops"),
        ('{"jobs": [{"write": {"total_ios": "many"}}]}', "unusable jobs.0.write.total_ios"),
        ('{"jobs": [{"error": 1e30}]}', "unusable jobs.0.error"),
        ('{"jobs": ' + "[" * 100_000, "cut off or damaged"),
        ('{"jobs": [{"error": ' + "1" * 5000 + "}]}", "cut off or damaged"),
    ],
)
def test_what_is_not_fios_json_is_an_infrastructure_error(text: str, message: str) -> None:
    with pytest.raises(InfrastructureError, match=re.escape(message)) as caught:
        fio_output.parse(text)
    assert caught.value.remedy


def test_writer_without_output_and_without_short_reads_is_a_broken_tool() -> None:
    with pytest.raises(InfrastructureError, match="printed no JSON"):
        fio_output.outcome_of_text("Segmentation fault\n", FIO_READER, payload=64, asked_s=2)


# ---- vringlab-pingpong -------------------------------------------------------------------------

PINGPONG = recorded("pingpong-1.0-tcp-connect")
PINGPONG_LISTENER = recorded("pingpong-1.0-tcp-listen")


def pingpong_changed(text: str, **fields: object) -> pingpong_output.PingpongResult:
    document = json.loads(text[text.index("{") :])
    document.update(fields)
    return pingpong_output.parse(json.dumps(document))


def judged(
    connector: pingpong_output.PingpongResult,
    listener: pingpong_output.PingpongResult | None = None,
    payload: int = 64,
    asked_s: float = 0,
) -> Outcome:
    ends = connector, listener or pingpong_output.parse(PINGPONG_LISTENER)
    return pingpong_output.pingpong_outcome(*ends, payload=payload, asked_s=asked_s)


def test_recorded_pingpong_is_valid_and_its_fields_are_in_place() -> None:
    result = pingpong_output.parse(PINGPONG)
    assert result.latency is not None
    assert (result.role, result.payload, result.messages, result.warmup) == (
        "connect", 64, 1000, 100,
    )  # fmt: skip
    minimum, mean, maximum = (
        result.latency.minimum, result.latency.mean, result.latency.maximum,
    )  # fmt: skip
    assert minimum < mean < maximum
    assert sum(count for _, count in result.latency.bins) == 1000
    listener = pingpong_output.parse(PINGPONG_LISTENER)  # after its "listening" line
    assert (listener.role, listener.messages, listener.latency) == ("listen", 1100, None)
    outcome = judged(result)
    assert outcome.valid
    assert list(values(outcome)) == [
        "rtt_mean", "rtt_p1", "rtt_p50", "rtt_p90", "rtt_p99", "rtt_p99.9", "round_trips",
    ]  # fmt: skip
    assert values(outcome)["round_trips"] == pytest.approx(1000 / result.elapsed_ns * 1e9)
    assert outcome.window_s == result.elapsed_ns / 1e9


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sequence_errors": 2, "first_sequence_error": "message 7"}, "first: message 7"),
        ({"error": "the peer closed"}, "stopped early: the peer closed"),
        ({"payload": 63}, "used 63 bytes, not 64"),
        ({"cpu": {"asked": 1, "start": 1, "end": 0}}, "was to stay on CPU 1"),
        ({"messages": 0, "latency_ns": None, "elapsed_ns": 0}, "no round trip was completed"),
        ({"elapsed_ns": 10**12}, "messages in flight, not 1"),
        ({"role": "listen"}, "not those of one connecting and one listening end"),
    ],
)
def test_what_makes_a_pingpong_invalid(fields: dict[str, object], reason: str) -> None:
    assert reason in judged(pingpong_changed(PINGPONG, **fields)).reason


def test_a_sequence_error_of_the_listener_counts_with_and_without_its_report() -> None:
    listener = pingpong_changed(PINGPONG_LISTENER, sequence_errors=4)
    connector = pingpong_output.parse(PINGPONG)
    assert "listening end counted 4 sequence errors" in judged(connector, listener).reason
    told = pingpong_changed(PINGPONG, peer_sequence_errors=4)
    outcome = pingpong_output.pingpong_outcome(told, None, payload=64, asked_s=0)
    assert "listening end counted 4 sequence errors" in outcome.reason
    assert outcome.warnings == ("the listening end left no report",)


def test_a_pingpong_cut_short_is_invalid() -> None:
    assert "of the 60 s asked for" in judged(pingpong_output.parse(PINGPONG), asked_s=60).reason


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "printed no report"),
        ("listening 9000\n", "printed no report"),
        (PINGPONG[:300], "cut off or damaged"),
        (PINGPONG.replace('"payload"', '"pay"'), "unusable payload"),
        (PINGPONG.replace('"messages": 1000', '"messages": -1'), "unusable messages"),
    ],
)
def test_unusable_pingpong_reports_are_infrastructure_errors(text: str, message: str) -> None:
    with pytest.raises(InfrastructureError, match=message) as caught:
        pingpong_output.parse(text)
    assert caught.value.remedy


# ---- testpmd -----------------------------------------------------------------------------------

TESTPMD = recorded("testpmd-24.11-two-ports")


def block(pps: int, total: int, port: int = 0) -> str:
    """A report of one port, laid out as testpmd 24.11 does."""
    bar = "#" * 24
    return (
        "\x1b[2J\x1b[1;1H\nPort statistics ====================================\n"
        f"  {bar} NIC statistics for port {port}  {bar}\n"
        f"  RX-packets: {total:<10} RX-missed: 0          RX-bytes:  {60 * total}\n"
        "  RX-errors: 0\n  RX-nombuf:  0         \n"
        "  TX-packets: 0          TX-errors: 0          TX-bytes:  0\n\n"
        "  Throughput (since last show)\n"
        f"  Rx-pps: {pps:>12}          Rx-bps: {480 * pps:>12}\n"
        "  Tx-pps:            0          Tx-bps:            0\n"
        f"  {'#' * 76}\n"
    )


def series(*pps: int, period: int = 2) -> PortSeries:
    """A port that received at these rates, after a first report."""
    total, text = 1000, block(123456, 1000)
    for rate in pps:
        total += rate * period
        text += block(rate, total)
    return testpmd_output.parse(text)[0]


def test_recorded_testpmd_has_both_ports_and_drops_the_first_report() -> None:
    ports = testpmd_output.parse(TESTPMD)
    assert list(ports) == [0, 1]
    # The totals of the recording, copied by hand: first report and the last one of each port.
    assert ports[0].first_total == 464512
    assert ports[1].first_total == 477056
    assert ports[0].rx_packets[-1] == 241725728
    assert ports[1].rx_packets[-1] == 241738304
    assert ports[0].rx_pps[-1] == 30141623
    assert len(ports[0].rx_pps) == 4
    assert TESTPMD.count("NIC statistics for port 0") == 5
    # Totals and rates of the recording agree, so neither is mistaken for the other.
    for port in ports.values():
        assert port.received / 8 == pytest.approx(sum(port.rx_pps) / 4, rel=0.01)


def test_forward_statistics_at_the_end_are_no_report() -> None:
    assert "Forward statistics for port 0" in TESTPMD
    assert 271363808 not in testpmd_output.parse(TESTPMD)[0].rx_packets


def test_screen_control_is_stripped() -> None:
    assert testpmd_output.strip_screen("\x1b[2J\x1b[1;1HRx\r\n\x1b[0;31mred\x1b[0m") == "Rx\nred"


def test_a_block_cut_off_is_left_out_at_every_length() -> None:
    whole = block(1, 10) + block(500, 1010)
    assert testpmd_output.parse(whole)[0].rx_pps == (500,)
    last = block(987654321, 2001010)
    # The rates come before the closing line: a cut inside a number must not give a smaller one.
    for cut in range(len(last) - len(f"  {'#' * 76}\n")):
        assert testpmd_output.parse(whole + last[:cut])[0].rx_pps == (500,), cut


def test_the_steady_rate_leaves_out_where_the_stream_began_and_ended() -> None:
    assert series(0, 0, 400, 1000, 1100, 700, 0).steady_pps() == 1050
    assert series(0, 2, 400, 1000, 1100, 700, 3, 2).steady_pps() == 1050  # a trickle is no stream
    assert series(400, 1000, 0, 1000, 700).steady_pps() == pytest.approx(2000 / 3)  # a stall counts
    assert series(400, 700).steady_pps() is None
    assert series(0, 0, 0).steady_pps() is None


def test_received_counts_from_the_first_report() -> None:
    assert series(0, 500, 500, 0).received == 2000


@pytest.mark.parametrize(
    "text", ["", "EAL: Error - exiting with code: 1\n", block(5, 10)[:300], "# NIC statistics"]
)
def test_testpmd_without_statistics_is_an_infrastructure_error(text: str) -> None:
    with pytest.raises(InfrastructureError, match="no port statistics") as caught:
        testpmd_output.parse(text)
    assert caught.value.remedy


# ---- /proc/interrupts and ethtool --------------------------------------------------------------

BEFORE = interrupts.parse(recorded("interrupts-6.12-before"))
AFTER = interrupts.parse(recorded("interrupts-6.12-after"))

FOUR = """\
           CPU0       CPU1       CPU3
  1:          9          0          0   IO-APIC   1-edge      i8042
 19:          4          5          6   IO-APIC  19-fasteoi   ehci_hcd:usb1, virtio9
 30:          0          1          2   PCI-MSIX-0000:00:05.0   0-edge      virtio1-config
 31:         10         20         30   PCI-MSIX-0000:00:05.0   1-edge      virtio1-input.0
 32:        100        200        300   PCI-MSIX-0000:00:05.0   2-edge      virtio1-output.0
 33:          7          8          9   PCI-MSIX-0000:00:05.0   4-edge      virtio1-output.1
 34:          5          5          5   PCI-MSIX-0000:00:06.0   2-edge      virtio11-output.0
LOC:       1457        811        123   Local timer interrupts
ERR:          0
"""


def test_recorded_interrupts_give_the_transmit_counts_by_cpu() -> None:
    assert BEFORE.cpus == (0, 1)
    assert BEFORE.counts["virtio0-output.0"] == (3, 0)
    assert BEFORE.numbers["virtio0-output.0"] == (26,)
    assert interrupts.tx_queues(BEFORE, "virtio0") == {0: "virtio0-output.0"}
    assert interrupts.delta(BEFORE, AFTER, "virtio0-output.0") == {0: 683, 1: 0}
    assert interrupts.delta(BEFORE, AFTER, "virtio0-input.0") == {0: 0, 1: 12}
    assert interrupts.delta(BEFORE, AFTER, "LOC")[0] > 0


def test_several_queues_offline_cpus_and_like_named_devices() -> None:
    reading = interrupts.parse(FOUR)
    assert reading.cpus == (0, 1, 3)
    assert interrupts.tx_queues(reading, "virtio1") == {
        0: "virtio1-output.0",
        1: "virtio1-output.1",
    }
    assert reading.counts["virtio1-output.1"] == (7, 8, 9)
    assert reading.counts["virtio9"] == reading.counts["ehci_hcd:usb1"] == (4, 5, 6)
    assert "ERR" not in reading.counts
    later = interrupts.parse(FOUR.replace("300   PCI", "345   PCI"))
    assert interrupts.delta(reading, later, "virtio1-output.0") == {0: 0, 1: 0, 3: 45}


def test_lines_of_one_name_are_added_up() -> None:
    again = FOUR.replace("virtio11-output.0", "virtio1-output.0")
    reading = interrupts.parse(again)
    assert reading.counts["virtio1-output.0"] == (105, 205, 305)
    assert reading.numbers["virtio1-output.0"] == (32, 34)


def test_a_device_without_msix_is_named_as_such() -> None:
    with pytest.raises(InfrastructureError, match="virtio9 has no transmit interrupt") as caught:
        interrupts.tx_queues(interrupts.parse(FOUR), "virtio9")
    assert "without MSI-X" in caught.value.remedy
    assert "virtio1-output.0" in caught.value.remedy


def test_counters_that_vanish_or_go_backwards_are_errors() -> None:
    with pytest.raises(InfrastructureError, match=r"first reading .* has no virtio7-output.0"):
        interrupts.delta(BEFORE, AFTER, "virtio7-output.0")
    with pytest.raises(InfrastructureError, match="went backwards") as caught:
        interrupts.delta(AFTER, BEFORE, "virtio0-output.0")
    assert "reloaded" in caught.value.remedy
    with pytest.raises(InfrastructureError, match="names no CPU"):
        interrupts.parse("sh: cat: not found\n")


def test_recorded_ethtool_gives_the_kicks_without_their_total() -> None:
    before = interrupts.parse_ethtool(recorded("ethtool-6.12-before"))
    after = interrupts.parse_ethtool(recorded("ethtool-6.12-after"))
    assert (before["tx_kicks"], after["tx_kicks"]) == (3, 468)
    assert interrupts.kicks(before) == {0: 3}
    assert interrupts.kicks(after) == {0: 468}


def test_kicks_of_older_kernels_have_another_name() -> None:
    text = "NIC statistics:\n     rx_queue_0_kicks: 5\n     tx_queue_0_kicks: 6\n"
    text += "     tx_queue_1_kicks: 7\n     tx_queue_1_packets: 8\n"
    assert interrupts.kicks(interrupts.parse_ethtool(text)) == {0: 6, 1: 7}


def test_ethtool_of_another_driver_or_device_is_an_error() -> None:
    with pytest.raises(InfrastructureError, match="no counter"):
        interrupts.parse_ethtool("Cannot get stats strings information: No such device\n")
    with pytest.raises(InfrastructureError, match="no kicks"):
        interrupts.kicks(interrupts.parse_ethtool("NIC statistics:\n     rx_packets: 5\n"))


# ---- pktgen ------------------------------------------------------------------------------------

PKTGEN = recorded("pktgen-6.12-result")


def test_recorded_pktgen_result() -> None:
    result = pktgen_output.parse(PKTGEN)
    assert result.device == "eth0@0"
    assert (result.elapsed_us, result.idle_us, result.packets) == (8136187, 2603, 464956)
    assert (result.pps, result.bits_per_s, result.errors) == (57146, 27430080, 0)
    assert result.frame_bytes == 60
    assert result.params["burst"] == "256"
    assert result.params["count"] == "0"
    assert result.params["src_min"] == ""
    assert result.params["dst_min"] == "198.18.0.42"
    assert result.params["dst_mac"] == "52:55:0a:00:02:02"
    assert result.params["Flags"].split() == ["NO_TIMESTAMP", "QUEUE_MAP_CPU", "SHARED"]
    # The kernel's own figures agree, so none is mistaken for another.
    assert result.packets / result.elapsed_us * 1e6 == pytest.approx(result.pps, abs=1)
    assert result.pps * 8 * result.frame_bytes == result.bits_per_s


def test_the_result_line_of_the_documentation() -> None:
    text = (
        "Result: OK: 9915676(c9893177+d22498) usec, 9237975 (60byte,0frags)\n"
        "  931653pps 447Mb/sec (447193440bps) errors: 12\n"
    )
    result = pktgen_output.parse(text)
    assert (result.elapsed_us, result.idle_us, result.packets) == (9915676, 22498, 9237975)
    assert (result.pps, result.bits_per_s, result.errors) == (931653, 447193440, 12)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (recorded("pktgen-6.12-running"), "still running"),
        (recorded("pktgen-6.12-idle"), "not started"),
        (recorded("pktgen-6.12-thread"), "not started"),
        ("Result: ERROR: not running\n", "no result: ERROR: not running"),
        (PKTGEN[: PKTGEN.index("pps")], "no result"),
        ("", "no Result line"),
    ],
)
def test_pktgen_without_a_result_is_an_infrastructure_error(text: str, message: str) -> None:
    with pytest.raises(InfrastructureError, match=re.escape(message)) as caught:
        pktgen_output.parse(text)
    assert caught.value.remedy


def test_the_answer_to_a_write_is_checked() -> None:
    thread = recorded("pktgen-6.12-thread")
    assert pktgen_output.check_written(thread, "add_device eth0@0") == "OK: add_device=eth0@0"
    for answer in (
        'No such parameter "nonsense"',
        "Flag -:NOSUCH:- unknown",
        "ERROR: can not add device nosuch@0",
        "",
    ):
        with pytest.raises(InfrastructureError, match="did not take 'flag X'") as caught:
            pktgen_output.check_written(f"Params: count 0\nResult: {answer}\n", "flag X")
        assert answer in str(caught.value)


def run_of(
    pps: int = 1_000_000,
    rx: tuple[int, ...] = (0, 600_000, 1_000_000, 1_000_000, 1_000_000, 400_000, 0),
    seconds: float = 8.0,
    errors: int = 0,
    by_cpu: dict[int, int] | None = None,
    irq: str = "same",
    asked_s: float = 8.0,
) -> Outcome:
    text = (
        f"Result: OK: {int(seconds * 1e6)}(c1+d1) usec, {int(pps * seconds)} (60byte,0frags)\n"
        f"  {pps}pps {pps * 480 // 10**6}Mb/sec ({pps * 480}bps) errors: {errors}\n"
    )
    return pktgen_output.pktgen_outcome(
        pktgen_output.parse(text),
        series(*rx),
        tx_interrupts={0: 16000, 1: 0} if by_cpu is None else by_cpu,
        kicks=40_000,
        irq="same" if irq == "same" else "other",
        pktgen_cpu=0,
        asked_s=asked_s,
    )


def test_a_good_pktgen_run() -> None:
    outcome = run_of()
    assert outcome.problems == ()
    assert values(outcome) == {
        "pps_tx": 1e6,
        "pps_rx": 1e6,
        "tx_interrupts": 2000,
        "kicks": 5000,
    }
    assert {metric.unit for metric in outcome.metrics} == {"1/s"}
    assert outcome.window_s == 8
    assert outcome.context["tx_interrupts_by_cpu"] == {"0": 16000, "1": 0}


def test_reports_of_an_earlier_run_are_left_out() -> None:
    text = (OUTPUTS / "testpmd-24.11-two-ports.txt").read_text()
    starts = [at for at in range(len(text)) if text.startswith("\x1b[2J", at)]
    whole = testpmd_output.parse(text)[0]
    # In the middle of the third report, the second is the last that was complete.
    cut = testpmd_output.parse(testpmd_output.since(text, starts[2] + 10))[0]
    assert cut.first_total == whole.rx_packets[0]
    assert cut.rx_packets == whole.rx_packets[1:]
    assert testpmd_output.since(text, 0) == text


def test_a_run_too_short_for_the_reports_uses_the_totals() -> None:
    outcome = run_of(seconds=3.0, asked_s=3.0, rx=(0, 900_000, 600_000, 0))
    assert values(outcome)["pps_rx"] == 1e6  # 2 x (0.9 + 0.6) million in 3 s
    assert outcome.context["pps_rx_from"] == "packets over pktgen's time"
    assert outcome.valid


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"pps": 0}, "0 throughput"),
        # Pktgen-DPDK#77: the link is up, tx counts, rx stays 0.
        ({"rx": (0, 0, 0, 0, 0)}, "path not exercised: pktgen sent 8000000 packets"),
        ({"rx": (3, 2, 3, 1, 3)}, "path not exercised"),
        ({"rx": (0, 1, 700_000, 790_000, 700_000, 1)}, "further apart than 5%"),
        ({"rx": (0, 1, 2_000_000, 2_000_000, 2_000_000, 1)}, "further apart than 5%"),
        ({"errors": 3}, "pktgen counted 3 errors"),
        ({"by_cpu": {0: 800, 1: 200}}, "wrong vCPU: they were to be on pktgen's vCPU (0), and 80%"),
        ({"by_cpu": {0: 200, 1: 800}, "irq": "other"}, "on another vCPU than pktgen's (0), and 20"),
        ({"asked_s": 10.0}, "measured for 8 s of the 10 s asked for"),
    ],
)
def test_what_makes_a_pktgen_run_invalid(case: dict[str, Any], reason: str) -> None:
    outcome = run_of(**case)
    assert reason in outcome.reason
    assert len(outcome.problems) == 1


def test_placement_is_right_on_either_side_and_unknown_with_few_interrupts() -> None:
    assert run_of(by_cpu={0: 0, 1: 500}, irq="other").valid
    few = run_of(by_cpu={0: 1, 1: 3})
    assert few.valid
    assert "too few to see" in few.warnings[0]


# ---- Fuzz: nothing but the named error comes out -----------------------------------------------

RECORDINGS = [path.read_text() for path in sorted(OUTPUTS.glob("*.txt"))]
PIECES = [
    *"{}[]\":,#\n\x1b0", "-1", "1e999", "NaN", "null", "true", "9" * 40, "\u0663", "CPU",
    "Result: OK: ", "RX-packets: ", "# NIC statistics for port 7 #", '"jobs": ', "\udcff", "\x00",
]  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A recorded output with a few edits: pieces cut, doubled, swapped or replaced."""
    text = draw(st.sampled_from(RECORDINGS))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        length = draw(st.integers(0, 40))
        new = draw(st.sampled_from([*PIECES, text[at : at + 60]]) | st.text(max_size=5))
        text = text[:at] + new + text[at + length :]
    return text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text


def judge_fio(text: str) -> None:
    fio_output.outcome_of_text(text, text, payload=64, asked_s=2)


def judge_pingpong(text: str) -> None:
    result = pingpong_output.parse(text)
    pingpong_output.pingpong_outcome(result, result, payload=64, asked_s=2)


def judge_testpmd(text: str) -> None:
    for port in testpmd_output.parse(text).values():
        port.steady_pps()
        assert len(port.rx_pps) == len(port.rx_packets) == len(port.rx_missed)


def judge_interrupts(text: str) -> None:
    reading = interrupts.parse(text)
    assert all(len(row) == len(reading.cpus) for row in reading.counts.values())
    for name in interrupts.tx_queues(reading, "virtio0").values():
        assert set(interrupts.delta(reading, reading, name).values()) <= {0}


def judge_ethtool(text: str) -> None:
    interrupts.kicks(interrupts.parse_ethtool(text))


def judge_pktgen(text: str) -> None:
    result = pktgen_output.parse(text)
    pktgen_output.pktgen_outcome(
        result, series(0, 1, 2, 3), tx_interrupts={0: 20}, kicks=1, irq="same", pktgen_cpu=0,
        asked_s=1,
    )  # fmt: skip


def judge_written(text: str) -> None:
    pktgen_output.check_written(text, "start")


JUDGES = [
    judge_fio, judge_pingpong, judge_testpmd, judge_interrupts, judge_ethtool, judge_pktgen,
    judge_written,
]  # fmt: skip


@pytest.mark.parametrize("judge", JUDGES)
@given(text=damaged() | st.text(max_size=200))
@example(text='{"jobs": [{"write": {"clat_ns": {"bins": {"1e400": 1}, "percentile": {"x": 1}}}}]}')
@example(text='{"jobs": [{"write": {"clat_ns": {"bins": {"' + "9" * 400 + '": 1}}}}]}')
@settings(max_examples=150, deadline=None)
def test_damaged_output_raises_the_named_error_or_nothing(
    judge: Callable[[str], None], text: str
) -> None:
    caught: InfrastructureError | None = None
    try:
        judge(text)
    except InfrastructureError as error:
        caught = error
    if caught is not None:
        assert caught.message
        assert caught.remedy
        assert str(caught)


def test_without_figures_there_is_no_percentile() -> None:
    assert Latency(0, 0, 0, 0, 0).percentile(50) is None
