"""fio's JSON output (`--output-format=json` or `json+`), and what a ping-pong of it is worth.

Written against fio 3.39. Both ends of a ping-pong print one; text may come before and after the
JSON on the same stream (axboe/fio#1333; a listener always prints "fio: waiting for connection").
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vringlab.errors import InfrastructureError
from vringlab.workloads.base import Outcome
from vringlab.workloads.latency import (
    Latency,
    latency_problems,
    rtt_histograms,
    rtt_metrics,
    window_problem,
)

_START = re.compile(r'\{\s*"(?:fio version|timestamp|global options|jobs)"')
_TRUNCATED_REMEDY = (
    "fio was ended while it printed, or its disk is full: look at what it says above and on its "
    "standard error, then run the cell again"
)
_NO_JSON_REMEDY = "start fio with --output-format=json+ and look at its standard error"

# fio counts in 64 bits. Without a bound a damaged number could have thousands of digits.
_Count = Annotated[int, Field(ge=0, lt=2**64)]


class _Stats(BaseModel):
    # fio prints some sixty more fields, and newer releases add to them.
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class _Clat(_Stats):
    min: float = 0.0
    max: float = 0.0
    mean: float = 0.0
    stddev: float = 0.0
    n: _Count = Field(default=0, alias="N")
    percentile: dict[str, float] = {}
    bins: dict[float, _Count] = {}


class _Direction(_Stats):
    total_ios: _Count = 0
    short_ios: _Count = 0
    drop_ios: _Count = 0
    io_bytes: _Count = 0
    iops: float = Field(default=0.0, ge=0)
    runtime: _Count = 0
    clat_ns: _Clat = _Clat()


class _Job(_Stats):
    jobname: str = ""
    error: int = Field(default=0, gt=-(2**31), lt=2**31)
    job_options: dict[str, str] = Field(default={}, alias="job options")
    read: _Direction = _Direction()
    write: _Direction = _Direction()


class _Document(_Stats):
    version: str = Field(default="", alias="fio version")
    global_options: dict[str, str] = Field(default={}, alias="global options")
    jobs: list[_Job]


@dataclass(frozen=True)
class FioJob:
    """One job in the direction it ran.

    Attributes:
        name: Its `name=`.
        rw: `read` or `write`.
        error: fio's error code of the job, an errno; 0 for none.
        runtime_ms: How long it ran, by fio's clock.
        iops: Completed I/Os in a second.
        total_ios: I/Os issued, short ones included.
        short_ios: I/Os that moved fewer bytes than asked; each is counted again for its rest.
        dropped_ios: I/Os given up.
        io_bytes: Bytes moved.
        clat: Completion latencies: for the writer of a ping-pong the round trips, because its
            engine is synchronous; for the reader waiting plus the echo.
    """

    name: str
    rw: str
    error: int
    runtime_ms: int
    iops: float
    total_ios: int
    short_ios: int
    dropped_ios: int
    io_bytes: int
    clat: Latency


@dataclass(frozen=True)
class FioResult:
    """What one fio printed.

    Attributes:
        version: `fio-3.39`.
        jobs: Its jobs, at least one.
        preamble: Text around the JSON, without the JSON; empty when there was none.
    """

    version: str
    jobs: tuple[FioJob, ...]
    preamble: str

    @property
    def warnings(self) -> tuple[str, ...]:
        """The text around the JSON, a line each, without the listener's usual greeting."""
        lines = (line.strip() for line in self.preamble.splitlines())
        return tuple(
            f"fio printed: {line}"
            for line in lines
            if line and line != "fio: waiting for connection"
        )


def parse(text: str) -> FioResult:
    """Read fio's JSON, with or without bins, out of everything that fio printed.

    Raises:
        InfrastructureError: there is no JSON, it is cut off, or it is not fio's; carries the end
            of the text.
    """
    found, preamble = _extract(text)
    try:
        document = _Document.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _unusable(f"fio's JSON has an unusable {where}: {first['msg']}", text) from None
    if not document.jobs:
        raise _unusable("fio's JSON lists no job", text)
    jobs = tuple(_job(job, document.global_options) for job in document.jobs)
    return FioResult(document.version, jobs, preamble)


def _extract(text: str) -> tuple[object, str]:
    match = _START.search(text)
    if match is None:
        raise InfrastructureError("fio printed no JSON", remedy=_NO_JSON_REMEDY, stdout=text)
    try:
        # Only so many digits make an int (ValueError), and only so much nesting an object.
        found, end = json.JSONDecoder().raw_decode(text, match.start())
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise _unusable(f"fio's JSON is cut off or damaged: {reason}", text) from None
    before, after = text[: match.start()], text[end:]
    return found, "\n".join(part for part in (before.strip(), after.strip()) if part)


def _unusable(message: str, text: str) -> InfrastructureError:
    return InfrastructureError(message, remedy=_TRUNCATED_REMEDY, stdout=text)


def _job(job: _Job, options: Mapping[str, str]) -> FioJob:
    asked = job.job_options.get("rw", options.get("rw", ""))
    if asked not in ("read", "write"):
        asked = "write" if job.write.total_ios >= job.read.total_ios else "read"
    side = job.write if asked == "write" else job.read
    clat = side.clat_ns
    return FioJob(
        name=job.jobname,
        rw=asked,
        error=job.error,
        runtime_ms=side.runtime,
        iops=side.iops,
        total_ios=side.total_ios,
        short_ios=side.short_ios,
        dropped_ios=side.drop_ios,
        io_bytes=side.io_bytes,
        clat=Latency(
            n=clat.n,
            minimum=clat.min,
            maximum=clat.max,
            mean=clat.mean,
            stddev=clat.stddev,
            percentiles=_percentiles(clat.percentile),
            bins=tuple((ns, n) for ns, n in sorted(clat.bins.items()) if n > 0),
        ),
    )


def _percentiles(printed: Mapping[str, float]) -> tuple[tuple[float, float], ...]:
    found = []
    for key, value in printed.items():
        try:
            found.append((float(key), value))
        except ValueError:  # not a number: a field of a later fio, none of ours
            continue
    return tuple(sorted(found))


def pingpong_outcome(
    writer: FioResult | None,
    reader: FioResult | None,
    *,
    payload: int,
    asked_s: float,
    started: str = "",
    raw: Mapping[str, bytes] | None = None,
) -> Outcome:
    """Judge a fio ping-pong by what both ends printed.

    The round trip is the writer's `clat_ns`. An end is `None` when it printed no JSON: with short
    reads the end that outlasts the other dies of SIGPIPE while it echoes the surplus (seen with
    fio 3.39), and that run has to come out invalid, not as a broken tool.

    Args:
        writer: The side with `rw=write`, which connects and measures.
        reader: The side with `rw=read`, which listens and echoes.
        payload: Bytes of a message.
        asked_s: The runtime asked for, seconds; 0 checks nothing.
        started: UTC start of the timed window, ISO 8601.
        raw: Output as printed, by file name.

    Raises:
        InfrastructureError: neither end printed anything usable.
    """
    if writer is None and reader is None:
        raise InfrastructureError(
            "neither end of the fio ping-pong printed a result", remedy=_NO_JSON_REMEDY
        )
    ends = [(name, end) for name, end in (("writer", writer), ("reader", reader)) if end]
    problems = _end_problems(ends, payload)
    problems += [
        f"the {name} printed no result (ended by a signal?)"
        for name, end in (("writer", writer), ("reader", reader))
        if end is None
    ]
    warnings = [f"{name}: {line}" for name, end in ends for line in end.warnings]
    context: dict[str, object] = {"fio": ends[0][1].version, "payload": payload}
    for name, end in ends:
        context[f"{name}_total_ios"] = sum(job.total_ios for job in end.jobs)
        context[f"{name}_short_ios"] = sum(job.short_ios for job in end.jobs)
    if writer is None:
        return Outcome((), (), tuple(problems), tuple(warnings), started, 0.0, raw or {}, context)

    job = writer.jobs[0]
    seen_s = job.runtime_ms / 1000
    if len(writer.jobs) != 1:
        problems.append(f"{len(writer.jobs)} jobs wrote, a ping-pong has one")
    if job.total_ios > 0:
        problems += latency_problems(job.clat, job.iops)
        short = window_problem(seen_s, asked_s)
        problems += [short] if short else []
    warnings += _bin_warnings(job.clat)
    return Outcome(
        metrics=rtt_metrics(job.clat, job.iops),
        histograms=rtt_histograms(job.clat),
        problems=tuple(problems),
        warnings=tuple(warnings),
        started=started,
        window_s=seen_s,
        raw=raw or {},
        context=context,
    )


def outcome_of_text(
    writer_text: str,
    reader_text: str,
    *,
    payload: int,
    asked_s: float,
    started: str = "",
) -> Outcome:
    """`pingpong_outcome` of everything both ends printed, which is kept as raw output.

    Raises:
        InfrastructureError: an end's JSON is cut off, or the writer printed none and the reader
            does not explain it by short reads.
    """
    raw = {
        "fio-writer.txt": writer_text.encode(errors="surrogateescape"),
        "fio-reader.txt": reader_text.encode(errors="surrogateescape"),
    }
    writer = parse(writer_text) if _START.search(writer_text) else None
    reader = parse(reader_text) if _START.search(reader_text) else None
    explained = reader is not None and any(job.short_ios for job in reader.jobs)
    if writer is None and not explained:
        parse(writer_text)  # raises, with what the writer printed instead
    return pingpong_outcome(
        writer, reader, payload=payload, asked_s=asked_s, started=started, raw=raw
    )


def _end_problems(ends: list[tuple[str, FioResult]], payload: int) -> list[str]:
    problems = []
    short = {name: sum(job.short_ios for job in end.jobs) for name, end in ends}
    if any(short.values()):
        counts = ", ".join(f"{name} short_ios={count}" for name, count in short.items())
        problems.append(
            f"short-read artefact at {payload} bytes ({counts}): fio answered parts of messages "
            "as whole ones, so more than one was in flight and its latencies mean nothing"
        )
    for name, end in ends:
        for job in end.jobs:
            if job.error:
                problems.append(
                    f"the {name}'s job {job.name!r} ended with error {job.error} "
                    f"({_error_name(job.error)})"
                )
            if job.dropped_ios:
                problems.append(f"the {name}'s job {job.name!r} dropped {job.dropped_ios} I/Os")
            if job.total_ios == 0:
                problems.append(f"the {name}'s job {job.name!r} completed no I/O")
            wanted = "write" if name == "writer" else "read"
            if job.rw != wanted:
                problems.append(f"the {name}'s job {job.name!r} ran rw={job.rw}, not rw={wanted}")
    return problems


def _error_name(code: int) -> str:
    try:
        return os.strerror(code)
    except (ValueError, OverflowError):
        return "no errno"


def _bin_warnings(clat: Latency) -> list[str]:
    if not clat.n:
        return []
    if not clat.bins:
        return ["fio printed no bins: start it with --output-format=json+ for distributions"]
    counted = sum(count for _, count in clat.bins)
    if counted != clat.n:
        return [f"fio's bins hold {counted} latencies, its mean {clat.n}"]
    return []
