"""What is read on both machines beside a timed run: CPU time, and the slab caches of packets.

`vringlab-sample` runs on the guest and on its host from before the load to after it. Its readings
go to a file in memory there, not over SSH: the connection would be a load of its own.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from vringlab.errors import InfrastructureError
from vringlab.transport.ssh import Machine, Process
from vringlab.workloads import sampler, slab
from vringlab.workloads.base import Metric

_STAT = "/proc/stat"
#: Starting a program in a nested guest takes tenths of a second; a machine under load, more.
_MARGIN_S = 60.0

_SECTION = re.compile(r"^@@ (\w+) ?(\d*)$", re.MULTILINE)


def script(rate_hz: float, limit_s: float) -> str:
    """Shell text: sizes of the caches, then readings until SIGTERM to the process it names.

    The caches are shrunk first, so that empty slabs left by the run before are not in the
    baseline. A cache that the kernel does not have is left out, and the shell's own words are
    used where there are any: each program costs a tenth of a second in a nested guest.

    Args:
        rate_hz: Readings a second.
        limit_s: The sampler ends by itself after so many seconds, should we be gone.
    """
    stat = sampler.command([f"{_STAT}:cpu"], rate_hz=rate_hz)
    return "\n".join(
        [
            f"for c in {' '.join(slab.CACHES)}; do",
            "  d=/sys/kernel/slab/$c",
            "  ! [ -h $d ] || merged=1",
            "  ! [ -r $d/slabs ] || files=$files' '$d/slabs",
            "  { echo 1 > $d/shrink; } 2>/dev/null",
            "done",
            "echo '@@ slabinfo'",
            f"grep -E '^(slabinfo|#|{'|'.join(slab.CACHES)}) ' /proc/slabinfo 2>&1",
            "echo '@@ links'",
            "[ -z $merged ] || find /sys/kernel/slab -maxdepth 1 -type l -printf '%f %l\\n'",
            "out=/run/vringlab-sample; : > $out; : > $out.err",
            f"{shlex.join(stat)} $files --duration {limit_s:g} --output $out 2> $out.err & pid=$!",
            # Bounded: should the connection break, nobody else would end this loop.
            "n=0; until [ -s $out ] || [ -s $out.err ] || [ $((n+=1)) = 200000 ]; do :; done",
            "echo @@ sampling $pid; echo @@ ready",
            "wait $pid",
            "echo '@@ samples'; cat $out $out.err",
        ]
    )


def sections(text: str) -> dict[str, str]:
    """The parts of what `script` printed, by name."""
    found = list(_SECTION.finditer(text))
    ends = [*(match.start() for match in found[1:]), len(text)]
    return {m[1]: text[m.end() + 1 : end] for m, end in zip(found, ends, strict=True)}


class Samplers:
    """The sampler on several machines at once; a context manager.

    Args:
        machines: Where, by the name that messages give it.
        rate_hz: Readings a second.
        limit_s: Longest time it may be needed.

    Raises:
        InfrastructureError: a sampler did not start.
    """

    def __init__(self, machines: Mapping[str, Machine], rate_hz: float, limit_s: float) -> None:
        self._machines = dict(machines)
        self._rate_hz = rate_hz
        self._limit_s = limit_s
        self._running: dict[str, tuple[Process, str]] = {}
        self._since = 0.0

    def __enter__(self) -> Self:
        """Start all of them, and wait until each has read once."""
        text = script(self._rate_hz, self._limit_s)
        started = {name: machine.start(text) for name, machine in self._machines.items()}
        try:
            for name, process in started.items():
                process.wait_for("@@ ready", _MARGIN_S)
                pid = next(m[2] for m in _SECTION.finditer(process.stdout) if m[1] == "sampling")
                self._running[name] = process, pid
        except BaseException:
            self._end()
            for process in started.values():
                process.close()
            raise
        self._since = time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End those that still run."""
        self._end()
        for process, _ in self._running.values():
            process.close()

    def _end(self) -> None:
        for name, (_, pid) in self._running.items():
            with contextlib.suppress(InfrastructureError):
                self._machines[name].start(f"kill -TERM {pid} 2>/dev/null")

    def await_baseline(self) -> None:
        """Wait until there are readings enough to stand for the time before a load."""
        due = self._since + slab.FEWEST_READINGS / self._rate_hz
        time.sleep(max(0.0, due - time.monotonic()))

    def stop(self) -> None:
        """Tell all of them to end; other things can be done until `texts` is asked for."""
        self._end()

    def texts(self) -> dict[str, str]:
        """What each printed, after `stop`.

        Raises:
            TransientError: a machine was lost.
        """
        running, self._running = self._running, {}
        return {name: process.wait(_MARGIN_S).stdout for name, (process, _) in running.items()}


@dataclass(frozen=True)
class Seen:
    """What the sampler says of one machine in one run; what could not be had is a warning."""

    metrics: tuple[Metric, ...]
    warnings: tuple[str, ...] = ()
    context: Mapping[str, object] = field(default_factory=dict)


def seen(
    text: str,
    *,
    cpu: str,
    prefix: str = "",
    window: tuple[int, int],
    load: tuple[int, int],
) -> Seen:
    """CPU use and slab memory of one machine.

    Nothing here makes a sample invalid: the throughput does not depend on it. A figure that could
    not be had is left out, and a warning says why. So is slab memory that is not above the
    baseline: a ratio to it means nothing.

    Args:
        text: What `script` printed there.
        cpu: Name of the metric of its CPU use (`cpu`, `guest_cpu`).
        prefix: Of the names of the slab metrics.
        window: Begin and end of the time that the throughput is of, ns by the sampler's clock.
        load: Begin and end of the load, warm-up included.
    """
    parts = sections(text)
    try:
        series = sampler.parse(parts.get("samples", ""))
    except InfrastructureError as error:
        return Seen((), (f"nothing was sampled: {error.message}",))
    metrics: list[Metric] = []
    warnings: list[str] = []
    try:
        busy = series.rate(_STAT, sampler.busy_s, *window) * 100
        if busy > 0:
            metrics.append(Metric(cpu, busy, "percent"))
        else:
            warnings.append(f"no {cpu}: no CPU time was counted in the window")
    except InfrastructureError as error:
        warnings.append(f"no {cpu}: {error.message}")
    try:
        figures = slab.slab_figures(
            slab.parse_series(parts["samples"]),
            slab.parse(parts.get("slabinfo", "")),
            load=load,
            links=slab.parse_links(parts.get("links", "")),
        )
    except InfrastructureError as error:
        figures = slab.SlabFigures(None, problems=(error.message,))
    metrics += figures.metrics(prefix)
    warnings += [f"no {prefix}slab_peak and {prefix}slab_median: {p}" for p in figures.problems]
    warnings += figures.not_above(prefix)
    # The series' own words on the sampler's cost are among the figures', where there are any.
    warnings += figures.warnings if figures.total else series.warnings
    return Seen(
        tuple(metrics),
        tuple(warnings),
        {
            "sampler_cpu_share": series.cpu_share,
            "sampler_readings": len(series.at_ns),
            "slab": figures.context(),
        },
    )
