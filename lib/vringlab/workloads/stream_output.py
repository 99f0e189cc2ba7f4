"""What `vringlab-stream --json` prints, and what a run of it is worth.

The tool is `vringlab/image/src/vringlab-stream.c`; its head describes what it sends, how sizes are
drawn, what the common window is, and the exit codes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from vringlab.workloads.base import Metric, Outcome
from vringlab.workloads.tool_report import read_report

_START = re.compile(r'^\{"tool": "vringlab-stream"', re.MULTILINE)
_REMEDY = (
    "start vringlab-stream with --json and look at its standard error; the exit codes are in the "
    "head of vringlab-stream.c"
)

#: All threads must have run at once for this share of the duration asked for.
COMMON_SHARE = 0.8
#: How far the ends' figures may be apart without a word: what one end has sent is not yet what
#: the other has, and socket buffers hold much of a short run.
_AGREEMENT = 0.05
#: Connections named in a message; the rest is only counted.
_NAMED = 3

_Count = Annotated[int, Field(ge=0, lt=2**64)]
_Figure = Annotated[float, Field(ge=0)]


class _Printed(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)


class Sizes(_Printed):
    """How message sizes were drawn, bytes: `fixed`, `uniform` or `normal` within min..max."""

    kind: Literal["fixed", "uniform", "normal"]
    mean: _Count
    sd: _Count
    min: _Count
    max: _Count


class Window(_Printed):
    """The common window, ns from the end's time zero.

    Attributes:
        begin_ns: When every thread had begun and the warm-up was over.
        end_ns: When the first thread had ended, or the duration was over.
        counted_ns: Length of the whole slots in it; 0 when there is none.
        bytes: What was counted in these slots.
    """

    begin_ns: _Count
    end_ns: _Count
    counted_ns: _Count
    bytes: _Count


class Skew(_Printed):
    """Between the threads: their first bytes, and their last, ns."""

    first: _Count
    last: _Count


class CpuTime(_Printed):
    """CPU time of the process from the start of its threads to their end, us."""

    user: _Count
    system: _Count


class Switches(_Printed):
    """Context switches of the process in the same time."""

    voluntary: int
    involuntary: int


class Connection(_Printed):
    """One connection and its thread on this end.

    Attributes:
        index: Its number, the same on both ends.
        bytes: Sent, or received.
        ops: Messages sent, or receives that returned data.
        first_ns: Its first byte, from time zero; `None` when none moved.
        last_ns: Its last byte.
        cpu_ns: CPU time of the thread.
        enobufs: How often the kernel answered ENOBUFS.
        resets: 1 when it was reset or closed by the peer.
        damaged: Pieces that were not what was sent (a listener with --verify).
        peer_bytes: What arrived by the listener's count (a sender's view); `None` when unknown.
        ended: How it ended.
        error: Why it ended early; empty when it did not.
    """

    index: _Count
    bytes: _Count
    ops: _Count
    first_ns: _Count | None
    last_ns: _Count | None
    cpu_ns: _Count
    enobufs: _Count
    resets: _Count
    damaged: _Count
    peer_bytes: _Count | None
    ended: str
    error: str


class StreamResult(_Printed):
    """What one end of the connections saw.

    Attributes:
        tool: Always `vringlab-stream`.
        version: Its version.
        role: `connect` (sends) or `listen` (receives).
        family: `vsock`, `tcp` or `unix`.
        type: `stream` or `seqpacket`.
        peer: The other end's address.
        clock: The clock behind all times.
        threads: Connections asked for.
        connections: Connections made.
        sizes: How message sizes were drawn.
        seed: Of the sizes.
        buffer: Socket buffer in force, bytes.
        verify: Whether content was checked.
        zero_ns: Time zero by `clock`: the start, or the first byte received.
        warmup_ns: Time at the begin that does not count.
        duration_ns: Time after it that does.
        elapsed_ns: From time zero to the last byte.
        ended: `duration`, `peer finished`, `peer closed`, `timeout` or `signal`.
        window: The common window.
        throughput: Bits a second in the window.
        skew_ns: Between the threads.
        bytes: In all, with warm-up.
        ops: In all.
        enobufs: In all.
        resets: In all.
        damaged: In all; on a sender, by the listener's count.
        peer_bytes: By the listener's count; `None` when a connection did not tell.
        error: The first reason for an early end; empty when there was none.
        cpu_us: CPU time.
        switches: Context switches.
        cpus: CPUs that it was bound to, as given; `None` when it was not.
        slot_ns: Length of a slot of `series`.
        series: Bytes by slot, from time zero.
        per_thread: Each connection.
    """

    tool: Literal["vringlab-stream"]
    version: str
    role: Literal["listen", "connect"]
    family: str
    type: Literal["stream", "seqpacket"]
    peer: str
    clock: str
    threads: _Count
    connections: _Count
    sizes: Sizes
    seed: _Count
    buffer: _Count
    verify: bool
    zero_ns: _Count
    warmup_ns: _Count
    duration_ns: _Count
    elapsed_ns: _Count
    ended: str
    window: Window
    throughput: _Figure
    skew_ns: Skew
    bytes: _Count
    ops: _Count
    enobufs: _Count
    resets: _Count
    damaged: _Count
    peer_bytes: _Count | None
    error: str
    cpu_us: CpuTime
    switches: Switches
    cpus: str | None
    slot_ns: Annotated[int, Field(gt=0)] | Literal[0]
    series: tuple[_Count, ...]
    per_thread: tuple[Connection, ...]

    @property
    def common_share(self) -> float:
        """The common window as a share of the duration."""
        if self.duration_ns == 0:
            return 0.0
        return max(self.window.end_ns - self.window.begin_ns, 0) / self.duration_ns

    @property
    def load_ns(self) -> tuple[int, int]:
        """Begin and end of the load by `clock`, for what was sampled beside it."""
        return self.zero_ns, self.zero_ns + self.elapsed_ns

    @property
    def cpu_share(self) -> float:
        """CPU time of the process over the time of the run; 1 is one CPU."""
        if self.elapsed_ns == 0:
            return 0.0
        return (self.cpu_us.user + self.cpu_us.system) * 1000 / self.elapsed_ns


def parse(text: str) -> StreamResult:
    """Read the report out of everything that the tool printed.

    Raises:
        InfrastructureError: there is no report, it is cut off, or it is another version's.
    """
    return read_report(
        text, tool="vringlab-stream", start=_START, model=StreamResult, remedy=_REMEDY
    )


def stream_outcome(
    sender: StreamResult,
    receiver: StreamResult | None,
    *,
    threads: int,
    started: str = "",
    raw: Mapping[str, bytes] | None = None,
) -> Outcome:
    """Judge a run by what both ends printed.

    `throughput` is the receiver's: what a sender has handed to its socket may still be in a
    buffer.

    Args:
        sender: The end that connected.
        receiver: The other end; `None` when its report could not be had, which makes the sample
            invalid.
        threads: Connections asked for.
        started: UTC start of the timed window, ISO 8601.
        raw: Output as printed, by file name.
    """
    ends = [("sending", sender)] + ([("receiving", receiver)] if receiver else [])
    problems: list[str] = []
    warnings: list[str] = []
    if sender.role != "connect" or (receiver is not None and receiver.role != "listen"):
        problems.append("the reports are not those of one sending and one receiving end")
    if receiver is None:
        problems.append("the receiving end left no report")
    for name, end in ends:
        problems += _end_problems(name, end, threads)
    problems += _count_problems(sender, receiver)
    if receiver is not None and sender.throughput > 0:
        apart = abs(receiver.throughput / sender.throughput - 1)
        if apart > _AGREEMENT:
            warnings.append(
                f"the receiving end saw {receiver.throughput / sender.throughput:.0%} of the "
                "sending end's throughput: socket buffers hold much of so short a run"
            )
    measured = receiver or sender
    metrics = (
        (Metric("throughput", measured.throughput, "bit/s"),)
        if receiver is not None and receiver.throughput > 0
        else ()
    )
    return Outcome(
        metrics=metrics,
        problems=tuple(problems),
        warnings=tuple(warnings),
        started=started,
        window_s=measured.window.counted_ns / 1e9,
        raw=raw or {},
        context={
            "tool": f"vringlab-stream {sender.version}",
            "clock": sender.clock,
            "type": sender.type,
            "threads": sender.threads,
            "sizes": sender.sizes.model_dump(),
            "seed": sender.seed,
            "buffers": {name: end.buffer for name, end in ends},
            "verified": receiver.verify if receiver is not None else None,
            "throughput": {name: end.throughput for name, end in ends},
            "common_share": {name: end.common_share for name, end in ends},
            "start_skew_s": {name: end.skew_ns.first / 1e9 for name, end in ends},
            "end_skew_s": {name: end.skew_ns.last / 1e9 for name, end in ends},
            "cpu_share": {name: end.cpu_share for name, end in ends},
            "messages": sender.ops,
            "receives": receiver.ops if receiver is not None else None,
            "bytes": {name: end.bytes for name, end in ends},
            "enobufs": {name: end.enobufs for name, end in ends},
            "resets": {name: end.resets for name, end in ends},
        },
    )


def _end_problems(name: str, end: StreamResult, threads: int) -> list[str]:
    problems = []
    if end.connections != threads:
        problems.append(f"the {name} end had {end.connections} connections, not {threads}")
    if end.enobufs:
        problems.append(f"the {name} end met ENOBUFS {end.enobufs} times")
    if end.resets:
        problems.append(f"the {name} end lost {end.resets} connections to resets")
    if end.error:
        problems.append(f"the {name} end stopped early: {end.error}")
    if end.bytes == 0:
        problems.append(f"0 throughput: the {name} end moved no byte")
    elif idle := [item.index for item in end.per_thread if item.bytes == 0]:
        problems.append(f"{_numbers(idle)} of the {name} end moved no byte")
    if end.common_share < COMMON_SHARE:
        problems.append(
            f"the {name} end's common window is {end.common_share:.0%} of the "
            f"{end.duration_ns / 1e9:g} s asked for, under {COMMON_SHARE:.0%} (start skew "
            f"{end.skew_ns.first / 1e9:.2f} s, end skew {end.skew_ns.last / 1e9:.2f} s)"
        )
    return problems


def _count_problems(sender: StreamResult, receiver: StreamResult | None) -> list[str]:
    problems = []
    if damaged := max(sender.damaged, receiver.damaged if receiver else 0):
        problems.append(f"{damaged} pieces did not arrive as they were sent")
    arrived = {item.index: item.bytes for item in receiver.per_thread} if receiver else {}
    short = []
    for item in sender.per_thread:
        seen = item.peer_bytes if receiver is None else arrived.get(item.index)
        if seen != item.bytes:
            short.append(item.index)
    if short:
        total = receiver.bytes if receiver is not None else sender.peer_bytes
        problems.append(
            f"{sender.bytes} bytes were sent and {'?' if total is None else total} arrived "
            f"({_numbers(short)} differ)"
        )
    return problems


def _numbers(indices: list[int]) -> str:
    named = ", ".join(str(index) for index in indices[:_NAMED])
    more = f" and {len(indices) - _NAMED} more" if len(indices) > _NAMED else ""
    return f"connection{'s' if len(indices) > 1 else ''} {named}{more}"
