"""What `netperf -P 0 -D 1 ... -- -k KEYS` prints, and N sessions of it summed over common time.

Written against netperf 2.7.1 (git 3bc455b, as in Debian). Of its sources, netlib.c says what the
interim results mean (`demo_interval_display`: a rate over the interval that ends at a time of
day) and what THROUGHPUT_CONFID is (`get_result_confid`: the full width of the confidence interval
in percent of the mean, so `-I 99,5` is kept when it is at most 5).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vringlab.errors import InfrastructureError
from vringlab.workloads.base import Metric, Outcome
from vringlab.workloads.latency import window_problem

#: netperf's names of units -> our canonical unit, and how many of it they are. Its prefixes are
#: powers of ten where it writes `10^N`, and of 1024 where it writes bytes (netlib.c,
#: format_units and calc_thruput).
UNITS: Mapping[str, tuple[str, float]] = {
    "10^3bits/s": ("bit/s", 1e3),
    "10^6bits/s": ("bit/s", 1e6),
    "10^9bits/s": ("bit/s", 1e9),
    "KBytes/s": ("bit/s", 8 * 1024.0),
    "MBytes/s": ("bit/s", 8 * 1024.0**2),
    "GBytes/s": ("bit/s", 8 * 1024.0**3),
    "Trans/s": ("1/s", 1.0),
}
_METRICS = {"bit/s": "throughput", "1/s": "transactions"}

#: Sessions must have run at once for this share of the time asked for.
COMMON_SHARE = 0.8
#: Share of the common window for which each session must have told its rate.
_TOLD_SHARE = 0.95
#: How far a session's interim results may be from its own result without a word about it.
_AGREEMENT = 0.1
#: netperf prints this or more, or a negative number, as the width when there is none (with one
#: iteration: seen -1).
_NO_WIDTH = 1000.0

_KEY = re.compile(r"^([A-Z][A-Z0-9_]{1,63})=(.{0,500})$")
_INTERIM = re.compile(r"^NETPERF_(INTERIM_RESULT|UNITS|INTERVAL|ENDING)\[(\d{1,9})\]=(.{1,64})$")
_FAULT = re.compile(
    r"(are you sure there is a netserver.*|Connection refused.*|No route to host.*"
    r"|.*(?:error|failed|fail|partial response|timed out|Broken pipe).*)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Interim:
    """One interim result.

    Attributes:
        rate: Mean over the interval, in the session's unit.
        interval_s: Its length.
        end_s: When it ended, seconds since 1970 by the clock of the machine that netperf ran on.
    """

    rate: float
    interval_s: float
    end_s: float

    @property
    def begin_s(self) -> float:
        """When it began."""
        return self.end_s - self.interval_s


@dataclass(frozen=True)
class NetperfResult:
    """One finished session.

    Attributes:
        throughput: Its result, in `unit`.
        unit: `bit/s` for streams, `1/s` for transactions.
        elapsed_s: ELAPSED_TIME; 0 when it was not asked for.
        interims: Interim results in order; none without demo mode.
        confidence_width: Width of the confidence interval reached, percent of the mean; `None`
            with one iteration or when it was not asked for.
        iterations: CONFIDENCE_ITERATION; 1 when it was not asked for.
        keys: All keys as printed.
        said: Lines that are neither keys nor interim results.
    """

    throughput: float
    unit: str
    elapsed_s: float
    interims: tuple[Interim, ...]
    confidence_width: float | None
    iterations: int
    keys: Mapping[str, str]
    said: tuple[str, ...]

    @property
    def span(self) -> tuple[float, float] | None:
        """From the begin of the first interim to the end of the last; `None` without any."""
        if not self.interims:
            return None
        return self.interims[0].begin_s, self.interims[-1].end_s

    def moved(self, begin_s: float, end_s: float) -> tuple[float, float]:
        """What was moved between two times, and for how long of it the session told its rate.

        Returns:
            Bits or transactions, and seconds.
        """
        amount = told = 0.0
        for interim in self.interims:
            overlap = min(interim.end_s, end_s) - max(interim.begin_s, begin_s)
            if overlap > 0:
                amount += overlap * interim.rate
                told += overlap
        return amount, told


@dataclass(frozen=True)
class Session:
    """One netperf process as it ended."""

    stdout: str
    stderr: str = ""
    returncode: int = 0


def parse(text: str) -> NetperfResult:
    """Read one session's output.

    Raises:
        InfrastructureError: it has no result; says what netperf gave as the reason.
    """
    keys: dict[str, str] = {}
    parts: dict[int, dict[str, str]] = {}
    said = []
    for line in text.splitlines():
        if interim := _INTERIM.match(line):
            parts.setdefault(int(interim[2]), {})[interim[1]] = interim[3]
        elif key := _KEY.match(line):
            keys[key[1]] = key[2]
        elif line.strip():
            said.append(line.strip())
    if "THROUGHPUT" not in keys or "THROUGHPUT_UNITS" not in keys:
        raise _no_result(text, said, bool(keys))
    unit, factor = _unit(keys["THROUGHPUT_UNITS"], text)
    return NetperfResult(
        throughput=_number(keys, "THROUGHPUT", text) * factor,
        unit=unit,
        elapsed_s=_number(keys, "ELAPSED_TIME", text) if "ELAPSED_TIME" in keys else 0.0,
        interims=_interims(parts, unit, text),
        confidence_width=_width(keys),
        iterations=int(_number(keys, "CONFIDENCE_ITERATION", text))
        if "CONFIDENCE_ITERATION" in keys
        else 1,
        keys=keys,
        said=tuple(said),
    )


def _no_result(text: str, said: Sequence[str], some_keys: bool) -> InfrastructureError:
    fault = next((line for line in said if _FAULT.search(line)), None)
    if fault is not None and "netserver" in fault:
        return InfrastructureError(
            f"netperf could not reach netserver: {fault}",
            remedy="netserver must listen on the other side before netperf starts, and no packet "
            "filter may be between them",
            stdout=text,
        )
    why = f": {fault}" if fault else " and is cut off" if text.strip() else " at all"
    if some_keys and fault is None:
        why = ": THROUGHPUT and THROUGHPUT_UNITS are not among its keys"
    return InfrastructureError(
        f"netperf printed no result{why}",
        remedy="ask for `-k THROUGHPUT,THROUGHPUT_UNITS,ELAPSED_TIME,...` after `--`, and look at "
        "what netperf says above",
        stdout=text,
    )


def _unit(name: str, text: str) -> tuple[str, float]:
    try:
        return UNITS[name]
    except KeyError:
        raise InfrastructureError(
            f"netperf reports in {name!r}",
            remedy=f"units understood: {', '.join(UNITS)}; leave out `-f`",
            stdout=text,
        ) from None


def _width(keys: Mapping[str, str]) -> float | None:
    try:
        value = float(keys["THROUGHPUT_CONFID"])
    except (KeyError, ValueError):
        return None
    return value if 0 <= value < _NO_WIDTH else None


def _number(keys: Mapping[str, str], name: str, text: str) -> float:
    try:
        value = float(keys[name])
    except ValueError:
        value = float("nan")
    if not 0 <= value < float("inf"):
        raise InfrastructureError(
            f"netperf's {name} is {keys[name]!r}, not a number that it can be",
            remedy="look at the whole output; a session cut off in a line looks like that",
            stdout=text,
        )
    return value


def _interims(parts: Mapping[int, Mapping[str, str]], unit: str, text: str) -> tuple[Interim, ...]:
    found = []
    for _, part in sorted(parts.items()):
        if len(part) < 4:  # cut off, as the last of a session that was killed
            continue
        own, factor = _unit(part["UNITS"], text)
        if own != unit:
            continue
        rate, interval, end = (
            _number(part, name, text) for name in ("INTERIM_RESULT", "INTERVAL", "ENDING")
        )
        if interval > 0:
            found.append(Interim(rate * factor, interval, end))
    return tuple(found)


def netperf_outcome(
    sessions: Sequence[Session],
    *,
    asked_s: float,
    confidence_width: float | None = None,
    started: str = "",
    raw: Mapping[str, bytes] | None = None,
    context: Mapping[str, object] | None = None,
) -> Outcome:
    """Judge N sessions that were started together.

    One session's figure is netperf's own. Of several, which are not synchronised, only the common
    window is summed: from the begin of the last to start to the end of the first to finish.

    Args:
        sessions: All of them, also those that failed.
        asked_s: Length of run asked for, seconds; 0 checks nothing.
        confidence_width: The width asked for with `-I level,width`, percent; `None` when none was.
        started: UTC start of the timed window, ISO 8601.
        raw: Output as printed, by file name.
        context: What else was seen; kept with what is added here.
    """
    results, problems = _results(sessions)
    warnings = [f"session {n} said: {line}" for n, found in results for line in found.said]
    units = sorted({found.unit for _, found in results})
    figure, window_s, skew_s = 0.0, 0.0, 0.0
    if len(units) > 1:
        problems.append(f"sessions report in different units: {', '.join(units)}")
    elif problems or not results:
        problems = problems or ["there was no session"]
    elif len(results) == 1:
        figure, window_s = results[0][1].throughput, results[0][1].elapsed_s
        short = window_problem(window_s, asked_s if window_s else 0.0)
        problems += [short] if short else []
    else:
        figure, window_s, skew_s, found_problems = _common(results, asked_s)
        problems += found_problems
    for number, result in results:
        problems += _confidence(number, result, confidence_width)
        warnings += _agreement(number, result)
        if result.throughput == 0:
            problems.append(f"0 throughput: session {number} moved nothing")
    metrics = (Metric(_METRICS[units[0]], figure, units[0]),) if figure > 0 else ()
    return Outcome(
        metrics=metrics,
        problems=tuple(problems),
        warnings=tuple(warnings),
        started=started,
        window_s=window_s,
        raw=raw or {},
        context={
            **(context or {}),
            "sessions": len(sessions),
            "start_skew_s": skew_s,
            "common_share": window_s / asked_s if asked_s > 0 else None,
            "by_session": [found.throughput for _, found in results],
            "keys": [dict(found.keys) for _, found in results],
        },
    )


def _results(sessions: Sequence[Session]) -> tuple[list[tuple[int, NetperfResult]], list[str]]:
    found, problems = [], []
    for number, session in enumerate(sessions):
        try:
            result = parse(session.stdout)
        except InfrastructureError as error:
            last = session.stderr.strip().splitlines()[-1:]
            status = f", exit {session.returncode}" if session.returncode else ""
            reason = "; ".join([error.message, *last])
            problems.append(f"session {number} died ({reason}{status})")
            continue
        if session.returncode:
            problems.append(f"session {number} died after its result, exit {session.returncode}")
        found.append((number, result))
    return found, problems


def _common(
    results: Sequence[tuple[int, NetperfResult]], asked_s: float
) -> tuple[float, float, float, list[str]]:
    """Sum over the common window, its length, the start skew, and problems."""
    spans = [found.span for _, found in results]
    told = [span for span in spans if span is not None]
    if len(told) < len(spans):
        return (
            0.0,
            0.0,
            0.0,
            [
                "sessions without interim results cannot be summed, because nothing says when they "
                "ran: use a netperf built with demo mode, and `-D 1`"
            ],
        )
    begins, ends = [span[0] for span in told], [span[1] for span in told]
    begin, end = max(begins), min(ends)
    window, skew = max(end - begin, 0.0), begin - min(begins)
    if window <= 0:
        return 0.0, 0.0, skew, ["the sessions never ran all at once: their common window is empty"]
    problems = []
    if asked_s > 0 and window < COMMON_SHARE * asked_s:
        problems.append(
            f"common window {window:.2f} s is {window / asked_s:.0%} of the {asked_s:g} s asked "
            f"for, under {COMMON_SHARE:.0%} (start skew {skew:.2f} s)"
        )
    total = 0.0
    for number, found in results:
        amount, seconds = found.moved(begin, end)
        if seconds < _TOLD_SHARE * window:
            problems.append(
                f"session {number} told its rate for {seconds / window:.0%} of the common window "
                "only (several iterations have pauses between them: leave out -i and -I)"
            )
        # Its mean where it told one stands for all of the window.
        total += amount / seconds if seconds > 0 else 0.0
    return total, window, skew, problems


def _confidence(number: int, result: NetperfResult, asked: float | None) -> list[str]:
    if asked is None:
        return []
    if result.confidence_width is None:
        return [
            f"session {number} reached no confidence interval ({result.iterations} iteration): ask "
            "for -i and for the keys THROUGHPUT_CONFID and CONFIDENCE_ITERATION"
        ]
    if result.confidence_width > asked:
        return [
            f"session {number} missed its confidence interval: {result.confidence_width:.3g} % "
            f"wide after {result.iterations} iterations, {asked:g} % asked for"
        ]
    return []


def _agreement(number: int, result: NetperfResult) -> list[str]:
    if not result.interims or result.iterations > 1 or result.throughput <= 0:
        return []
    seconds = sum(interim.interval_s for interim in result.interims)
    mean = sum(interim.rate * interim.interval_s for interim in result.interims) / seconds
    found = []
    if abs(mean / result.throughput - 1) > _AGREEMENT:
        found.append(
            f"session {number}: its interim results are {mean / result.throughput:.0%} of its "
            "result"
        )
    if any(b.begin_s < a.begin_s for a, b in itertools.pairwise(result.interims)):
        found.append(f"session {number}: the clock went backwards during the run")
    return found
