"""Latencies as a ping-pong tool reports them, and the figures that a sample keeps of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vringlab.workloads.base import Histogram, Metric

#: The percentiles of the documented vsock runs (fio's `percentile_list=1:50:90:99:99.9`).
PERCENTILES: tuple[float, ...] = (1.0, 50.0, 90.0, 99.0, 99.9)

#: `rate x mean` of a ping-pong is 1 when exactly one message is in flight and no time passes
#: between round trips; the tools' own bookkeeping takes it a little below.
#: fio 3.39 over loopback TCP, 13 us a round trip: 0.987. The tolerance leaves room for faster
#: links and for a clock that stalls under emulation.
IN_FLIGHT_TOLERANCE = 0.2

#: A run that ended before this share of the time asked for was cut short.
SHORTEST_SHARE = 0.9


@dataclass(frozen=True)
class Latency:
    """A distribution of round-trip times in nanoseconds.

    Attributes:
        n: Number of round trips.
        minimum: The shortest.
        maximum: The longest.
        mean: Their arithmetic mean.
        stddev: Their sample standard deviation.
        percentiles: Pairs of (percent, ns) as the tool printed them, ascending.
        bins: Pairs of (bin midpoint in ns, count), ascending; empty when the tool gave none.
    """

    n: int
    minimum: float
    maximum: float
    mean: float
    stddev: float
    percentiles: tuple[tuple[float, float], ...] = ()
    bins: tuple[tuple[float, int], ...] = ()

    def percentile(self, percent: float) -> float | None:
        """The tool's own percentile, or else one from the bins; `None` with neither."""
        for known, value in self.percentiles:
            if math.isclose(known, percent, rel_tol=0, abs_tol=1e-6):
                return value
        return percentile_of_bins(self.bins, percent)


def percentile_of_bins(bins: Sequence[tuple[float, int]], percent: float) -> float | None:
    """The bin midpoint at the nearest rank, ceil(percent / 100 x count); `None` without counts.

    Args:
        bins: Pairs of (midpoint, count), ascending by midpoint.
        percent: From 0 to 100.
    """
    total = sum(count for _, count in bins)
    if total <= 0:
        return None
    # round() first: 0.999 x 1000 must be rank 999, not 1000.
    rank = max(1, math.ceil(round(percent / 100 * total, 6)))
    seen = 0
    for midpoint, count in bins:
        seen += count
        if seen >= rank:
            return midpoint
    return bins[-1][0]


def rtt_metrics(latency: Latency, round_trips_per_s: float) -> tuple[Metric, ...]:
    """`rtt_mean`, `rtt_p1` to `rtt_p99.9` (ns) and `round_trips` (1/s).

    Empty when there was no round trip; a percentile that the tool did not give is left out.
    """
    if latency.n <= 0:
        return ()
    found = [Metric("rtt_mean", latency.mean, "ns")]
    for percent in PERCENTILES:
        value = latency.percentile(percent)
        if value is not None:
            found.append(Metric(f"rtt_p{percent:g}", value, "ns"))
    found.append(Metric("round_trips", round_trips_per_s, "1/s"))
    return tuple(found)


def rtt_histograms(latency: Latency) -> tuple[Histogram, ...]:
    """The distribution as the one histogram `rtt`; none when the tool gave no bins."""
    return (Histogram("rtt", "ns", latency.bins),) if latency.bins else ()


def latency_problems(latency: Latency, round_trips_per_s: float) -> list[str]:
    """What makes these figures impossible for a ping-pong with one message in flight."""
    problems = []
    if not latency.minimum <= latency.mean <= latency.maximum:
        problems.append(
            f"min {latency.minimum:g} <= mean {latency.mean:g} <= max {latency.maximum:g} ns "
            "does not hold"
        )
    in_flight = round_trips_per_s * latency.mean / 1e9
    if abs(in_flight - 1) > IN_FLIGHT_TOLERANCE:
        problems.append(
            f"rate x mean latency is {in_flight:.3g} messages in flight, not 1 "
            f"within {IN_FLIGHT_TOLERANCE:.0%}"
        )
    return problems


def window_problem(seen_s: float, asked_s: float) -> str | None:
    """Why a timed window is too short to be the run that was asked for; `None` when it is not."""
    if asked_s > 0 and seen_s < SHORTEST_SHARE * asked_s:
        return (
            f"measured for {seen_s:.3g} s of the {asked_s:g} s asked for "
            f"(under {SHORTEST_SHARE:.0%})"
        )
    return None
