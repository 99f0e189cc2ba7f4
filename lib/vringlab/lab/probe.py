"""Counts calls of kernel functions on a machine of the lab, to see which path packets take.

By bpftrace, which counts inside the kernel; where it is missing or cannot attach, by tracefs
kprobe events, whose trace is counted here. Both slow the probed functions down, so nothing that
is timed runs beside them.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from vringlab.errors import InfrastructureError, TransientError
from vringlab.lab.guest import WORK
from vringlab.transport.ssh import Machine, Process

Returns = Literal["zero", "nonzero", "negative", "nonnegative"]

_READY = "vringlab-counts-now"
#: bpftrace compiles its program first: seconds in a nested guest.
_START_S = 90.0
_PRINT_S = 0.25
_TRACEFS = "/sys/kernel/tracing"
_GROUP = "vringlab"
#: Per processor; about 50,000 events. Once it is full nothing more is counted.
_BUFFER_KIB = 4096

_SYMBOL = re.compile(r"^[0-9a-f]+ [tTwW] (\S+)(?:\s+\[(\S+)\])?$", re.MULTILINE)
_EVENT = re.compile(
    r"^.+-(?P<thread>\d{1,10}) +\[(?P<cpu>\d{1,5})\] \S+ +(?P<time>\d{1,12}\.\d{1,9}): "
    r"(?P<name>[a-z]\d{1,4}): \(.*\)(?: ret=(?P<value>-?\d{1,20}))?$",
    re.MULTILINE,
)
_DROPPED = re.compile(r"^(?:overrun|commit overrun|dropped events): ([1-9]\d*)$", re.MULTILINE)

_C_TEST = {"zero": "== 0", "nonzero": "!= 0", "negative": "< 0", "nonnegative": ">= 0"}


@dataclass(frozen=True)
class Probe:
    """One count.

    Attributes:
        name: Its name.
        function: Kernel function whose calls are counted.
        module: Module that holds it; when None, the kernel itself, or else the only module that
            has such a function.
        within: Only calls made while this function runs in the same thread, as the innermost of
            all `within` functions. Interrupts run in the thread that they interrupt.
        within_module: Module that holds `within`.
        returns: Only calls that return so.
    """

    name: str
    function: str
    module: str | None = None
    within: str | None = None
    within_module: str | None = None
    returns: Returns | None = None


@dataclass(frozen=True)
class Counts:
    """What was counted since the last reading.

    Attributes:
        values: Calls by probe; those that could not be counted are missing.
        notes: What a reader should know of how they were counted.
    """

    values: Mapping[str, int]
    notes: tuple[str, ...] = ()


class Tally(Protocol):
    """Counting that goes on.

    Attributes:
        tool: `bpftrace` or `tracefs`.
        missing: Probes that cannot be counted, with the reason.
        notes: What a reader should know of the tool, such as why it is the fallback.
    """

    @property
    def tool(self) -> str: ...  # noqa: D102 - described above

    @property
    def missing(self) -> Mapping[str, str]: ...  # noqa: D102

    @property
    def notes(self) -> tuple[str, ...]: ...  # noqa: D102

    def take(self) -> Counts:
        """Counts since the last `take`, or since the begin.

        Raises:
            InfrastructureError: the tool ended.
            TransientError: the machine is lost.
        """
        ...


def resolve(
    machine: Machine, probes: Sequence[Probe]
) -> tuple[dict[tuple[str, str | None], str], dict[str, str]]:
    """Symbols of the functions as the running kernel has them, and probes that it cannot serve.

    A compiler appends `.isra.0`, `.constprop.0` or `.part.0` to a function that it changed; one
    that it put inside all its callers has no symbol.

    Returns:
        Symbol by (function, module), and the reason by name of probe.

    Raises:
        InfrastructureError: /proc/kallsyms cannot be read.
    """
    wanted = {(probe.function, probe.module) for probe in probes}
    wanted |= {(probe.within, probe.within_module) for probe in probes if probe.within}
    words = "|".join(sorted({re.escape(name) for name, _ in wanted}))
    text = machine.run(
        f"grep -E ' ({words})(\\.|[[:space:]]|$)' /proc/kallsyms || [ $? = 1 ]",
        remedy="/proc/kallsyms is needed to find the functions to count",
    ).stdout
    found: dict[tuple[str, str | None], str] = {}
    for symbol, module in _SYMBOL.findall(text):
        name, _, suffix = symbol.partition(".")
        key = (name, module or None)
        # `.cold` is a part of a function that is jumped into, not called.
        if not suffix.startswith("cold"):
            found[key] = symbol if key not in found else min(found[key], symbol, key=len)
    for name, _ in {key for key in wanted if key[1] is None and key not in found}:
        holders = [symbol for (function, _), symbol in found.items() if function == name]
        if len(holders) == 1:
            found[name, None] = holders[0]
    symbols = {key: symbol for key, symbol in found.items() if key in wanted}
    missing: dict[str, str] = {}
    for probe in probes:
        for name, module in ((probe.function, probe.module), (probe.within, probe.within_module)):
            if name and (name, module) not in symbols:
                missing.setdefault(
                    probe.name,
                    f"{name} is no function of {module or 'the kernel'} as it runs: the compiler "
                    "put it inside its callers, or this kernel calls it otherwise",
                )
    return symbols, missing


@contextlib.contextmanager
def counting(machine: Machine, probes: Sequence[Probe]) -> Iterator[Tally]:
    """Count calls on a machine until the block ends.

    Args:
        machine: Guest or KVM host.
        probes: What to count.

    Raises:
        InfrastructureError: neither tool can count, or no function is there.
        TransientError: the machine is lost.
    """
    symbols, missing = resolve(machine, probes)
    served = [probe for probe in probes if probe.name not in missing]
    if not served:
        raise InfrastructureError(
            "none of the functions to count is in the running kernel",
            remedy="; ".join(dict.fromkeys(missing.values())),
            host=machine.name,
        )
    with contextlib.ExitStack() as stack:
        try:
            tally: Tally = stack.enter_context(_bpftrace(machine, served, symbols, missing))
        except TransientError:
            raise
        except InfrastructureError as error:
            last = (error.stderr.strip().splitlines() or [error.message])[-1]
            why = f"bpftrace could not count ({last}), so tracefs did"
            tally = stack.enter_context(_tracefs(machine, served, symbols, missing, why))
        yield tally


def program(probes: Sequence[Probe], symbols: Mapping[tuple[str, str | None], str]) -> str:
    """The bpftrace program that counts the probes.

    Each thread carries the number of the innermost `within` function in `@in`, and the one
    outside it in `@outer`, to which its return goes back.
    """
    within = _within(probes)
    entries: dict[tuple[str, str | None], list[str]] = {}
    returns: dict[tuple[str, str | None], list[str]] = {}
    for index, probe in enumerate(probes):
        test = f"@in[tid] == {within[_around(probe)]}" if probe.within else ""
        count = f'@c["{index}"] = count();'
        key = (probe.function, probe.module)
        if probe.returns:
            test = " && ".join(filter(None, (test, f"(int32)retval {_C_TEST[probe.returns]}")))
            returns.setdefault(key, []).append(f"if ({test}) {{ {count} }}")
        else:
            entries.setdefault(key, []).append(f"if ({test}) {{ {count} }}" if test else count)
    for key, number in within.items():
        # Its own calls are counted before it becomes the innermost one.
        entries.setdefault(key, []).append(
            f"@outer[tid, {number}] = @in[tid]; @in[tid] = {number};"
        )
        returns.setdefault(key, []).insert(0, f"@in[tid] = @outer[tid, {number}];")
    lines = [
        # Types are taken from the first assignment.
        f"BEGIN {{ @in[tid] = (int64)0; @outer[tid, 0] = (int64)0; "
        f'@c["tick"] = count(); printf("{_READY}\\n"); }}',
        f'interval:ms:{_PRINT_S * 1000:.0f} {{ @c["tick"] = count(); print(@c); }}',
        "END { clear(@in); clear(@outer); }",
    ]
    for kind, found in (("kprobe", entries), ("kretprobe", returns)):
        for (function, module), actions in found.items():
            place = f"{module}:" if module else ""
            symbol = symbols[function, module]
            lines.append(f"{kind}:{place}{symbol} {{ {' '.join(actions)} }}")
    return "\n".join(lines) + "\n"


def _around(probe: Probe) -> tuple[str, str | None]:
    assert probe.within is not None
    return probe.within, probe.within_module


def _within(probes: Sequence[Probe]) -> dict[tuple[str, str | None], int]:
    """A number above 0 for each `within` function."""
    keys = dict.fromkeys(_around(probe) for probe in probes if probe.within)
    return {key: number for number, key in enumerate(keys, start=1)}


@dataclass
class _Bpftrace:
    process: Process
    probes: Sequence[Probe]
    missing: Mapping[str, str]
    notes: tuple[str, ...] = ()
    tool: str = "bpftrace"
    before: Counter[str] = field(default_factory=Counter)

    def _latest(self) -> dict[str, int]:
        """The last print of the counts as a whole; empty before the first."""
        for line in reversed(self.process.stdout.splitlines(keepends=True)):
            if line.startswith('{"type": "map"') and line.endswith("\n"):
                found = json.loads(line)["data"].get("@c")
                if isinstance(found, dict):
                    return {str(key): int(value) for key, value in found.items()}
        return {}

    def take(self) -> Counts:
        limit = time.monotonic() + _START_S
        # Asking takes in what was printed until now; the second print after that began after now.
        self.process.running  # noqa: B018 - reading it exchanges with the process
        wanted = self._latest().get("tick", 0) + 2
        while self._latest().get("tick", 0) < wanted:
            if not self.process.running:
                done = self.process.wait(1)
                raise InfrastructureError(
                    "bpftrace ended while it counted",
                    remedy="see its last words",
                    stderr=done.stderr,
                    returncode=done.returncode,
                )
            if time.monotonic() > limit:
                raise TransientError(
                    f"bpftrace printed no counts for {_START_S:g} s",
                    remedy="the machine may be overloaded",
                )
            time.sleep(_PRINT_S / 4)
        now = Counter(self._latest())
        since = now - self.before
        self.before = now
        return Counts({p.name: since[str(i)] for i, p in enumerate(self.probes)})


@contextlib.contextmanager
def _bpftrace(
    machine: Machine,
    probes: Sequence[Probe],
    symbols: Mapping[tuple[str, str | None], str],
    missing: Mapping[str, str],
) -> Iterator[_Bpftrace]:
    path = f"{WORK}/probe.bt"
    text = shlex.quote(program(probes, symbols))
    process = machine.start(
        f"mkdir -p {WORK} && printf %s {text} > {path} && exec bpftrace -B line -f json {path}"
    )
    try:
        process.wait_for(f'"{_READY}', _START_S)
        tally = _Bpftrace(process, probes, missing)
        tally.take()
        yield tally
    finally:
        # Closing the channel does not end it: it writes only when something is printed.
        with contextlib.suppress(InfrastructureError):
            machine.run("pkill -INT -x bpftrace; true", check=False, timeout=30)
            process.wait(30)
        process.close()


@dataclass
class _Tracefs:
    machine: Machine
    probes: Sequence[Probe]
    missing: Mapping[str, str]
    notes: tuple[str, ...]
    tool: str = "tracefs"

    def take(self) -> Counts:
        where = f"{_TRACEFS}/instances/{_GROUP}"
        text = self.machine.run(
            f"cd {where} && echo 0 > tracing_on && cat trace && "
            'for c in per_cpu/*; do echo "@ ${c#per_cpu/cpu}"; cat $c/stats; done; '
            "echo > trace; echo 1 > tracing_on",
            timeout=_START_S,
        ).stdout
        return count_trace(text, self.probes)


def count_trace(text: str, probes: Sequence[Probe]) -> Counts:
    """Count a trace of the events that `_tracefs` sets up, with `per_cpu/*/stats` after it.

    Where a processor's buffer was full, only what happened before that is counted, on all
    processors alike: a share must not depend on whose buffer was the larger.
    """
    within = _within(probes)
    trace, *stats = text.split("\n@ ")
    events = list(_EVENT.finditer(trace))
    full = {part.partition("\n")[0].strip() for part in stats if _DROPPED.search(part)}
    last: dict[str, float] = {}
    for event in events:
        last[str(int(event["cpu"]))] = float(event["time"])
    end = min((last.get(cpu, 0.0) for cpu in full), default=float("inf"))
    stacks: dict[str, list[int]] = {}
    # The place around a call is the one at its entry; its result comes with the return.
    counted: Counter[str] = Counter()
    for event in events:
        if float(event["time"]) > end:
            continue
        kind, number = event["name"][0], int(event["name"][1:])
        stack = stacks.setdefault(event["thread"], [])
        if kind == "b":
            stack.append(number)
        elif kind == "e":
            if number in stack:
                del stack[len(stack) - 1 - stack[::-1].index(number) :]
        else:
            probe = probes[number]
            inner = stack[-1] if stack else 0
            if probe.within and inner != within[_around(probe)]:
                continue
            if probe.returns and not _matches(probe.returns, int(event["value"] or 0)):
                continue
            counted[probe.name] += 1
    notes = (
        (f"the trace was full after {len(events)} events; what came before that is counted",)
        if full
        else ()
    )
    return Counts({probe.name: counted[probe.name] for probe in probes}, notes)


def _matches(returns: Returns, value: int) -> bool:
    return {
        "zero": value == 0,
        "nonzero": value != 0,
        "negative": value < 0,
        "nonnegative": value >= 0,
    }[returns]


def trace_events(
    probes: Sequence[Probe], symbols: Mapping[tuple[str, str | None], str]
) -> list[str]:
    """Definitions for kprobe_events: `cN` counts probe N, `bN` and `eN` enclose a `within`."""

    def place(function: str, module: str | None) -> str:
        return f"{module}:{symbols[function, module]}" if module else symbols[function, module]

    lines = []
    for number, probe in enumerate(probes):
        where = place(probe.function, probe.module)
        if probe.returns:
            lines.append(f"r:{_GROUP}/c{number} {where} ret=$retval:s32")
        else:
            lines.append(f"p:{_GROUP}/c{number} {where}")
    for (function, module), number in _within(probes).items():
        where = place(function, module)
        lines += [f"p:{_GROUP}/b{number} {where}", f"r:{_GROUP}/e{number} {where}"]
    return lines


@contextlib.contextmanager
def _tracefs(
    machine: Machine,
    probes: Sequence[Probe],
    symbols: Mapping[tuple[str, str | None], str],
    missing: Mapping[str, str],
    why: str,
) -> Iterator[_Tracefs]:
    where = f"{_TRACEFS}/instances/{_GROUP}"
    end = (
        f"cd {_TRACEFS}; echo 0 > instances/{_GROUP}/events/{_GROUP}/enable; "
        f"rmdir instances/{_GROUP}; echo '-:{_GROUP}/' >> kprobe_events"
    )
    events = " && ".join(
        f"echo {shlex.quote(line)} >> kprobe_events" for line in trace_events(probes, symbols)
    )
    try:
        machine.run(
            f"({end}) 2>/dev/null; cd {_TRACEFS} && {events} && mkdir -p {where} && "
            f"echo 0 > {where}/options/overwrite && "
            f"echo {_BUFFER_KIB} > {where}/buffer_size_kb && "
            f"echo 1 > {where}/events/{_GROUP}/enable && echo 1 > {where}/tracing_on",
            remedy="the path can be proven only with bpftrace or tracefs (CONFIG_KPROBE_EVENTS) "
            "and root's rights on that machine",
        )
        yield _Tracefs(machine, probes, missing, (why,))
    finally:
        with contextlib.suppress(InfrastructureError):
            machine.run(f"({end}) 2>/dev/null; true", check=False, timeout=60)
