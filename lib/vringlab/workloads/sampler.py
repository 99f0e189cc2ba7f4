"""Counters read in series beside a timed run by `vringlab-sample`: CPU time, context switches.

The tool is vringlab/image/src/vringlab-sample.c; its head describes the output. Its own CPU time
is in it and is held against a bound: a sampler must not disturb what it stands beside.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vringlab.errors import InfrastructureError

#: Readings a second: 10 to 60 of them in a sample of 1 to 6 s, at under 1 % of a CPU.
RATE_HZ = 5.0
#: Above this share of one CPU the sampler disturbs what it stands beside.
OVERHEAD_SHARE = 0.01
#: The kernel's unit of CPU time in /proc (sysconf(_SC_CLK_TCK); 100 on every Linux of x86).
TICKS_PER_S = 100

_READING = re.compile(r"^@ (\d{1,20})$", re.MULTILINE)
_FILE = re.compile(r"^= (\S{1,200})$", re.MULTILINE)
_FAILED = re.compile(r"^! (.{1,300})$", re.MULTILINE)
_END = re.compile(
    r"^# samples (\d{1,12}) late (\d{1,12}) cpu_ns (\d{1,20}) elapsed_ns (\d{1,20})$", re.MULTILINE
)
_CPU = re.compile(r"^cpu((?: +\d{1,20}){8,})", re.MULTILINE)
# `pid (comm) state` and 10 more fields; then utime and stime (proc_pid_stat(5)).
_THREAD = re.compile(r"^\d{1,10} \(.*\) \S(?: -?\d{1,20}){10} (\d{1,20}) (\d{1,20}) ")
_SWITCHES = re.compile(r"^voluntary_ctxt_switches:\s*(\d{1,20})", re.MULTILINE)


@dataclass(frozen=True)
class Series:
    """What the sampler read.

    Attributes:
        at_ns: Time of each reading by CLOCK_MONOTONIC_RAW, ns, ascending.
        texts: Content of each file at each reading (empty where it could not be read), by file.
        failures: What could not be read.
        cpu_share: CPU time of the sampler over its life, 1 is one CPU; `None` when it was killed.
    """

    at_ns: tuple[int, ...]
    texts: dict[str, tuple[str, ...]]
    failures: tuple[str, ...]
    cpu_share: float | None

    def rate(self, file: str, value: Callable[[str], float], begin_ns: int, end_ns: int) -> float:
        """Mean growth per second of a counter between two times, by linear interpolation.

        Args:
            file: The file, as given to the sampler without the names of lines.
            value: Reads the counter out of the file's content.
            begin_ns: Begin of the window, by the series' clock.
            end_ns: Its end.

        Raises:
            InfrastructureError: the file was not read on both sides of the window, or holds no
                such counter.
        """
        found = [
            (at, value(text))
            for at, text in zip(self.at_ns, self.texts.get(file, ()), strict=False)
            if text
        ]
        if end_ns <= begin_ns or len(found) < 2:
            raise InfrastructureError(
                f"the sampler has {len(found)} readings of {file} for a window of "
                f"{(end_ns - begin_ns) / 1e9:.2f} s",
                remedy="; ".join(self.failures) or "a longer window is needed",
            )
        # A window may begin or end a reading's distance outside; no further.
        slack = (found[-1][0] - found[0][0]) / (len(found) - 1) * 1.5
        if begin_ns < found[0][0] - slack or end_ns > found[-1][0] + slack:
            raise InfrastructureError(
                f"the sampler's readings of {file} do not cover the window",
                remedy="; ".join(self.failures) or "the sampler started late or was ended early",
            )
        times = [at for at, _ in found]

        def at(moment: int) -> float:
            after = min(max(bisect.bisect_left(times, moment), 1), len(found) - 1)
            (t0, v0), (t1, v1) = found[after - 1], found[after]
            return v0 + (v1 - v0) * (moment - t0) / (t1 - t0)

        return (at(end_ns) - at(begin_ns)) / (end_ns - begin_ns) * 1e9

    @property
    def warnings(self) -> tuple[str, ...]:
        """Words about its own cost."""
        if self.cpu_share is None:
            return ("the sampler did not tell what CPU time it took",)
        if self.cpu_share > OVERHEAD_SHARE:
            return (
                f"the sampler took {self.cpu_share:.1%} of a CPU, more than {OVERHEAD_SHARE:.0%}",
            )
        return ()


def command(files: Sequence[str], *, output: str = "", rate_hz: float = RATE_HZ) -> list[str]:
    """The sampler's command line; it runs until SIGTERM.

    Args:
        files: Each `FILE` or `FILE:NAME,NAME`, of which only lines that begin with a name count.
        output: File to write to instead of standard output.
        rate_hz: Readings a second.
    """
    where = ["--output", output] if output else []
    return ["vringlab-sample", "--interval", f"{1 / rate_hz:g}", *where, *files]


def parse(text: str) -> Series:
    """Read what `vringlab-sample` printed; a last reading cut off is left out.

    Raises:
        InfrastructureError: it holds no reading.
    """
    end = _END.search(text)
    body = text[: end.start()] if end else text
    starts = list(_READING.finditer(body))
    if end is None and starts:
        body, starts = body[: starts[-1].start()], starts[:-1]
    if not starts:
        raise InfrastructureError(
            "the sampler printed no reading",
            remedy="; ".join(_FAILED.findall(text)) or "see what it says on standard error",
            stdout=text,
        )
    limits = [*(match.start() for match in starts[1:]), len(body)]
    blocks = [body[m.end() : limit] for m, limit in zip(starts, limits, strict=True)]
    found: list[dict[str, str]] = []
    for block in blocks:
        files = list(_FILE.finditer(block))
        ends = [*(match.start() for match in files[1:]), len(block)]
        found.append({m[1]: block[m.end() + 1 : stop] for m, stop in zip(files, ends, strict=True)})
    names = dict.fromkeys(name for block in found for name in block)
    return Series(
        at_ns=tuple(int(match[1]) for match in starts),
        texts={name: tuple(block.get(name, "") for block in found) for name in names},
        failures=tuple(dict.fromkeys(_FAILED.findall(text))),
        cpu_share=int(end[3]) / max(int(end[4]), 1) if end else None,
    )


def busy_s(text: str) -> float:
    """CPU time that was not idle since boot, s, of a /proc/stat (its first line).

    Idle is what proc_stat(5) calls idle and iowait. Guest time is part of user time there and is
    not added again; what the hypervisor took (steal) is not this machine's work.

    Raises:
        InfrastructureError: the text has no such line.
    """
    match = _CPU.search(text)
    if match is None:
        raise InfrastructureError("/proc/stat has no line `cpu`", remedy="see it", stdout=text)
    user, nice, system, _, _, irq, softirq, *_ = (int(word) for word in match[1].split())
    return (user + nice + system + irq + softirq) / TICKS_PER_S


def thread_s(text: str) -> float:
    """CPU time of a thread since its start, s, of a /proc/PID/stat or /proc/PID/task/TID/stat.

    Raises:
        InfrastructureError: the text is none.
    """
    match = _THREAD.match(text)
    if match is None:
        raise InfrastructureError("not the stat of a thread", remedy="see it", stdout=text)
    return (int(match[1]) + int(match[2])) / TICKS_PER_S


def switches(text: str) -> float:
    """How often a thread has gone to sleep by itself, of its /proc/PID/status.

    For a worker that sleeps until it is given work this is the number of its wakeups.

    Raises:
        InfrastructureError: the text has no such line.
    """
    match = _SWITCHES.search(text)
    if match is None:
        raise InfrastructureError(
            "no line `voluntary_ctxt_switches` in a thread's status", remedy="see it", stdout=text
        )
    return float(match[1])
