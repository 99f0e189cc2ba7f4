"""Audit rules that hold publications against each other: copies, size, sign, plausibility."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vringlab.analysis.audit_figures import COINCIDENCE_DIGITS, row_values
from vringlab.analysis.claims import Claim
from vringlab.analysis.finding import Finding, figures_text, finding, point_text, versions_text
from vringlab.analysis.rounding import significant_digits
from vringlab.analysis.units import convert, humanize

#: A baseline of one point that differs by this factor was not measured the same way.
MAGNITUDE = 5.0
#: Changes below this share may differ in sign without contradicting each other.
SMALL_CHANGE = 0.02
#: A change of this share contradicts "no obvious difference".
OBVIOUS_CHANGE = 0.10
#: Noise allowed when round trips of two message sizes are compared.
PAYLOAD_TOLERANCE = 0.10

# The tail above the median is made by scheduling, not by the size of the message.
_SIZED_LATENCIES = ("rtt_mean", "rtt_p1", "rtt_p50")
# Around the thousand that lies between ns and us, or Mb/s and Gb/s.
_UNIT_SLIP = (300, 3000)
_STREAM_COUNTS = ("streams", "sessions", "threads")


def _versions(claims: Sequence[Claim]) -> list[str]:
    return list(dict.fromkeys(claim.version for claim in claims))


def _point(claim: Claim) -> tuple[object, ...]:
    return (claim.experiment, claim.metric, tuple(sorted(claim.params.items())))


def check_stale(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Tables that two or more versions share digit for digit."""
    points: dict[tuple[object, ...], dict[object, list[Claim]]] = defaultdict(dict)
    for claim in claims:
        if significant_digits(claim):
            points[_point(claim)].setdefault(row_values(claim), []).append(claim)
    copies: dict[tuple[str, tuple[str, ...]], list[list[Claim]]] = defaultdict(list)
    for values in points.values():
        for same in values.values():
            versions = tuple(_versions(same))
            if len(versions) > 1:
                copies[(same[0].experiment, versions)].append(same)
    for (experiment, versions), groups in copies.items():
        digits = sum(significant_digits(group[0]) for group in groups)
        if digits < COINCIDENCE_DIGITS:
            continue
        common = sum(
            point[0] == experiment
            and set(versions) <= {claim.version for same in values.values() for claim in same}
            for point, values in points.items()
        )
        kernels = {claim.version: claim.environment.kernel for group in groups for claim in group}
        bases = [kernels[version] for version in versions]
        moved = all(bases) and len(set(bases)) > 1
        message = (
            f"{len(groups)} of {common} figures are identical in {versions_text(versions)}, "
            f"in all {digits} digits"
        )
        if moved:
            message += f", though the base moved: {' -> '.join(bases)}"
        yield finding(
            "stale-table",
            "fault" if moved else "warning",
            itertools.chain.from_iterable(groups),
            message,
        )


def check_magnitude(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Baselines of the same point that are far apart in two versions."""
    points: dict[tuple[object, ...], list[Claim]] = defaultdict(list)
    for claim in claims:
        if claim.before:
            points[(*_point(claim), claim.arms[0])].append(claim)
    pairs: dict[tuple[str, str, str], list[tuple[Claim, Claim]]] = defaultdict(list)
    for same in points.values():
        for one, two in itertools.combinations(same, 2):
            if one.version != two.version and _factor(one, two) >= MAGNITUDE:
                pairs[(one.experiment, one.version, two.version)].append((one, two))
    for (_, old, new), found in pairs.items():
        shown = ", ".join(
            f"{one.metric} at {_size_text(one)} {humanize(_baseline(one), one.unit)} -> "
            f"{humanize(_baseline(two), two.unit)} (factor {_factor(one, two):.3g})"
            for one, two in found
        )
        units = list(dict.fromkeys(claim.published.unit for pair in found for claim in pair))
        message = f"the unpatched figures of {old} and {new} differ: {shown}"
        if len(units) > 1:
            message += f"; published in {units[0]}, then in {units[-1]}"
        if all(_UNIT_SLIP[0] < _factor(one, two) < _UNIT_SLIP[1] for one, two in found):
            message += "; near a factor of 1000: a slip of the unit?"
        yield finding("magnitude", "fault", itertools.chain.from_iterable(found), message)


def _baseline(claim: Claim) -> float:
    assert claim.before is not None
    return claim.before


def _factor(one: Claim, two: Claim) -> float:
    ratio = _baseline(two) / _baseline(one)
    return max(ratio, 1 / ratio)


def check_reversal(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Versions that claim opposite effects where their parameters can be the same."""
    groups: dict[tuple[str, str, str], list[Claim]] = defaultdict(list)
    for claim in claims:
        if claim.change is not None:
            groups[(claim.experiment, claim.metric, claim.arms[0])].append(claim)
    for group in groups.values():
        for index, one in enumerate(group):
            against = [
                two
                for two in group[index + 1 :]
                if two.version != one.version and _compatible(one, two) and _opposite(one, two)
            ]
            if not against:
                continue
            shown: dict[str, list[Claim]] = defaultdict(list)
            for two in against:
                shown[_with_change(two)].append(two)
            later = "; ".join(
                f"{versions_text(_versions(same))} {text}" for text, same in shown.items()
            )
            yield finding(
                "reversal",
                "warning",
                [one, *against],
                f"{one.metric}: {one.version} {_with_change(one)} against {later}",
            )


def _with_change(claim: Claim) -> str:
    text = figures_text(claim)
    return text if claim.before is None else f"{text} ({100 * (claim.change or 0.0):+.1f} %)"


def _compatible(one: Claim, two: Claim) -> bool:
    return all(two.params.get(name, value) == value for name, value in one.params.items())


def _opposite(one: Claim, two: Claim) -> bool:
    first, second = one.change or 0.0, two.change or 0.0
    if one.no_difference != two.no_difference:
        return max(abs(first), abs(second)) >= OBVIOUS_CHANGE
    return first * second < 0 and min(abs(first), abs(second)) >= SMALL_CHANGE


def payload(claim: Claim) -> float | None:
    """Bytes of a message, where the claim is for one size."""
    size = claim.params.get("payload", claim.params.get("size"))
    return float(size) if isinstance(size, int | float) and not isinstance(size, bool) else None


def _size_text(claim: Claim) -> str:
    size = payload(claim)
    return point_text(claim) if size is None else f"{size:g} B"


@dataclass(frozen=True)
class _Clash:
    """A figure held against another that rules it out; of several the most `telling` is shown."""

    claim: Claim
    against: Claim
    telling: float
    text: str


def _report(kind: str, heading: str, clashes: Sequence[_Clash]) -> Finding:
    worst: dict[str, _Clash] = {}
    for clash in sorted(clashes, key=lambda item: -item.telling):
        worst.setdefault(clash.claim.metric, clash)
    concerned = [
        *(clash.claim for clash in clashes),
        *(clash.against for clash in clashes),
    ]
    shown = "; ".join(clash.text for clash in worst.values())
    return finding(kind, "fault", concerned, f"{heading}: {shown}")


def check_payload_order(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Round trips of a larger message that are shorter than those of a smaller one."""
    groups: dict[tuple[object, ...], list[tuple[float, float, str, Claim]]] = defaultdict(list)
    for claim in claims:
        size = payload(claim)
        if claim.metric not in _SIZED_LATENCIES or size is None:
            continue
        other = tuple(
            sorted(item for item in claim.params.items() if item[0] not in ("payload", "size"))
        )
        for arm, value in zip(claim.arms, (claim.before, claim.after), strict=True):
            if value:
                key = (claim.path, claim.workload, claim.metric, arm, other)
                groups[key].append((size, value, arm, claim))
    clashes: dict[tuple[str, str, str], list[_Clash]] = defaultdict(list)
    for group in groups.values():
        for (size, value, arm, claim), (less, slower, _, small) in itertools.permutations(group, 2):
            if size > less and value < slower * (1 - PAYLOAD_TOLERANCE):
                text = (
                    f"{claim.metric} of {arm}, {size:g} B in {humanize(value, claim.unit)} but "
                    f"{less:g} B in {humanize(slower, small.unit)}"
                )
                versions = (claim.experiment, claim.version, small.version)
                clashes[versions].append(_Clash(claim, small, size / less, text))
    for (_, large, other_version), found in clashes.items():
        where = f"in {large}" if large == other_version else f"{large} against {other_version}"
        yield _report("payload-order", f"{where}, the larger message is the faster", found)


def _single_streams(claims: Sequence[Claim]) -> list[Claim]:
    return [
        claim
        for claim in claims
        if claim.metric == "throughput"
        and any(claim.params.get(name) == 1 for name in _STREAM_COUNTS)
    ]


def check_latency_against_stream(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Round trips that move more bytes one by one than a stream of the same messages does.

    A round trip holds one message each way, so payload / round-trip time is the rate in each
    direction with a single message under way. A stream has many under way: it bounds that rate.
    """
    streams = _single_streams(claims)
    clashes: dict[tuple[str, str], list[_Clash]] = defaultdict(list)
    for claim in claims:
        size = payload(claim)
        if claim.metric not in _SIZED_LATENCIES or size is None:
            continue
        same = [other for other in streams if (other.path, payload(other)) == (claim.path, size)]
        for side in ("before", "after"):
            value = getattr(claim, side)
            # A stream of zero is a failed run, which has a rule of its own.
            rates = {getattr(stream, side): stream for stream in same if getattr(stream, side)}
            if not value or not rates:
                continue
            # The fastest stream that anyone published is the kindest bound.
            bound = max(rates)
            rate = size * 8 / convert(value, claim.unit, "s")
            if rate > bound:
                each = size * 8 / bound
                text = (
                    f"{claim.metric} {side}, {size:g} B in {humanize(value, claim.unit)} is "
                    f"{humanize(rate, 'bit/s')} each way, but one way a stream reached "
                    f"{humanize(bound, 'bit/s')}, {humanize(convert(each, 's', 'ns'), 'ns')} per "
                    f"message ({rates[bound].id})"
                )
                key = (claim.experiment, claim.version)
                clashes[key].append(_Clash(claim, rates[bound], rate / bound, text))
    for (_, version), found in clashes.items():
        heading = f"{version}, one message at a time outruns a stream of them"
        yield _report("latency-against-stream", heading, found)


RULES = (
    check_stale,
    check_magnitude,
    check_reversal,
    check_payload_order,
    check_latency_against_stream,
)
