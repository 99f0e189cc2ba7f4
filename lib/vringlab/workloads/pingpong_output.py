"""What `vringlab-pingpong --json` prints, and what a run of it is worth.

The tool is `vringlab/image/src/vringlab-pingpong.c`; its head describes the wire format and the
exit codes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from vringlab.workloads.base import Outcome
from vringlab.workloads.latency import (
    Latency,
    latency_problems,
    rtt_histograms,
    rtt_metrics,
    window_problem,
)
from vringlab.workloads.tool_report import read_report

_START = re.compile(r'^\{"tool": "vringlab-pingpong"', re.MULTILINE)
_REMEDY = (
    "start vringlab-pingpong with --json and look at its standard error; the exit codes are in "
    "the head of vringlab-pingpong.c"
)
_Count = Annotated[int, Field(ge=0, lt=2**64)]


class _Printed(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class _LatencyNs(_Printed):
    min: _Count
    max: _Count
    mean: Annotated[float, Field(ge=0)]
    stddev: Annotated[float, Field(ge=0)]
    percentile: dict[float, _Count]


class _Cpu(_Printed):
    asked: int | None
    start: int
    end: int


class _Switches(_Printed):
    voluntary: int
    involuntary: int


class _Report(_Printed):
    tool: Literal["vringlab-pingpong"]
    version: str
    role: Literal["listen", "connect"]
    family: str
    peer: str
    clock: str
    payload: _Count
    warmup: _Count
    messages: _Count
    elapsed_ns: _Count
    ended: str
    latency_ns: _LatencyNs | None
    bin_error: float
    bins: list[tuple[_Count, _Count]]
    sequence_errors: _Count
    first_sequence_error: str
    peer_sequence_errors: _Count | None
    error: str
    cpu: _Cpu
    switches: _Switches


@dataclass(frozen=True)
class PingpongResult:
    """What one end of a ping-pong saw.

    Attributes:
        version: Version of the tool.
        role: `connect` (sends first and measures) or `listen` (echoes).
        peer: The other end's address.
        clock: The clock behind all times.
        payload: Bytes of a message.
        warmup: Round trips before the timed ones.
        messages: Timed round trips; for a listener all messages echoed.
        elapsed_ns: From the first timed send to the last echo.
        ended: `count`, `duration`, `peer finished`, `peer closed`, `timeout` or `signal`.
        latency: Round trips; `None` on a listener or when there were none.
        bin_error: Largest relative error of a bin midpoint, 1/256.
        sequence_errors: Messages that prove more than one in flight, or damage.
        first_sequence_error: What the first of them was.
        peer_sequence_errors: The other end's count; `None` when the run had no orderly end.
        error: Why the run ended early; empty when it did not.
        cpu_asked: CPU it was pinned to, `None` when not pinned.
        cpu_start: CPU it ran on when the run began; -1 when it never began.
        cpu_end: CPU it ran on at the end; -1 when it never began.
        involuntary_switches: How often it was taken off its CPU.
    """

    version: str
    role: str
    peer: str
    clock: str
    payload: int
    warmup: int
    messages: int
    elapsed_ns: int
    ended: str
    latency: Latency | None
    bin_error: float
    sequence_errors: int
    first_sequence_error: str
    peer_sequence_errors: int | None
    error: str
    cpu_asked: int | None
    cpu_start: int
    cpu_end: int
    involuntary_switches: int

    @property
    def round_trips_per_s(self) -> float:
        """Timed round trips in a second; 0 when none were timed."""
        return self.messages / self.elapsed_ns * 1e9 if self.elapsed_ns > 0 else 0.0


def parse(text: str) -> PingpongResult:
    """Read the report out of everything that the tool printed.

    Raises:
        InfrastructureError: there is no report, it is cut off, or it is another version's.
    """
    return _result(
        read_report(text, tool="vringlab-pingpong", start=_START, model=_Report, remedy=_REMEDY)
    )


def _result(report: _Report) -> PingpongResult:
    latency = None
    if report.latency_ns is not None:
        ns = report.latency_ns
        latency = Latency(
            n=report.messages,
            minimum=ns.min,
            maximum=ns.max,
            mean=ns.mean,
            stddev=ns.stddev,
            percentiles=tuple(sorted((p, float(v)) for p, v in ns.percentile.items())),
            bins=tuple(sorted((float(at), count) for at, count in report.bins if count)),
        )
    return PingpongResult(
        version=report.version,
        role=report.role,
        peer=report.peer,
        clock=report.clock,
        payload=report.payload,
        warmup=report.warmup,
        messages=report.messages,
        elapsed_ns=report.elapsed_ns,
        ended=report.ended,
        latency=latency,
        bin_error=report.bin_error,
        sequence_errors=report.sequence_errors,
        first_sequence_error=report.first_sequence_error,
        peer_sequence_errors=report.peer_sequence_errors,
        error=report.error,
        cpu_asked=report.cpu.asked,
        cpu_start=report.cpu.start,
        cpu_end=report.cpu.end,
        involuntary_switches=report.switches.involuntary,
    )


def pingpong_outcome(
    connector: PingpongResult,
    listener: PingpongResult | None,
    *,
    payload: int,
    asked_s: float,
    started: str = "",
    raw: Mapping[str, bytes] | None = None,
) -> Outcome:
    """Judge a ping-pong of our own tool by what both ends printed.

    Args:
        connector: The side that connected and measured.
        listener: The other side; `None` when its report could not be had, which is only a
            warning because the connector's report has its count of sequence errors.
        payload: Bytes of a message as asked for.
        asked_s: Duration asked for, seconds; 0 (a run by count) checks nothing.
        started: UTC start of the timed window, ISO 8601.
        raw: Output as printed, by file name.
    """
    problems = []
    warnings = []
    ends = [("connecting", connector)] + ([("listening", listener)] if listener else [])
    for name, end in ends:
        if end.sequence_errors:
            problems.append(
                f"the {name} end counted {end.sequence_errors} sequence errors, so more than one "
                f"message was in flight or one was damaged (first: {end.first_sequence_error})"
            )
        if end.error:
            problems.append(f"the {name} end stopped early: {end.error}")
        if end.payload != payload:
            problems.append(f"the {name} end used {end.payload} bytes, not {payload}")
        if end.cpu_asked is not None and {end.cpu_start, end.cpu_end} != {end.cpu_asked}:
            problems.append(
                f"the {name} end was to stay on CPU {end.cpu_asked} and ran on "
                f"{end.cpu_start} at its start and {end.cpu_end} at its end"
            )
    if connector.role != "connect" or (listener is not None and listener.role != "listen"):
        problems.append("the reports are not those of one connecting and one listening end")
    if listener is None:
        warnings.append("the listening end left no report")
        if connector.peer_sequence_errors:
            problems.append(
                f"the listening end counted {connector.peer_sequence_errors} sequence errors"
            )
    rate = connector.round_trips_per_s
    latency = connector.latency
    if latency is None or connector.messages == 0:
        problems.append("no round trip was completed")
    else:
        problems += latency_problems(latency, rate)
        short = window_problem(connector.elapsed_ns / 1e9, asked_s)
        problems += [short] if short else []
    return Outcome(
        metrics=rtt_metrics(latency, rate) if latency else (),
        histograms=rtt_histograms(latency) if latency else (),
        problems=tuple(problems),
        warnings=tuple(warnings),
        started=started,
        window_s=connector.elapsed_ns / 1e9,
        raw=raw or {},
        context={
            "tool": f"vringlab-pingpong {connector.version}",
            "clock": connector.clock,
            "payload": connector.payload,
            "warmup": connector.warmup,
            "peer": connector.peer,
            "cpus": {name: [end.cpu_start, end.cpu_end] for name, end in ends},
            "involuntary_switches": {name: end.involuntary_switches for name, end in ends},
        },
    )
