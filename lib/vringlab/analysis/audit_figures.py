"""Audit rules that look at the figures of one publication: arithmetic, copies, order."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from vringlab.analysis.claims import Claim
from vringlab.analysis.finding import Finding, figures_text, finding, point_text
from vringlab.analysis.rounding import (
    Range,
    percent_of,
    printed,
    quotient,
    raw_ratio,
    significant_digits,
    stated_ratio,
)
from vringlab.analysis.units import metric

#: Digits that must agree before a repetition is no coincidence: one in a million by chance.
COINCIDENCE_DIGITS = 6
# Two printed values of one run agree by chance once in a thousand at three digits.
_STATISTIC_DIGITS = 3
# With 1 % of the messages below the 1st percentile, the mean is at least 99 % of it.
_LEAST_MEAN = 0.99

Row = Mapping[str, Claim]
RowKey = tuple[str, str, str, tuple[tuple[str, object], ...]]
Values = tuple[tuple[str, object], ...]


def row_values(claim: Claim) -> Values:
    """The published figures in the metric's unit, comparable across tables."""
    figure = claim.published
    raw = (claim.before, claim.after, claim.difference)
    scaled = tuple(None if value is None else float(f"{value:.12g}") for value in raw)
    return ((claim.metric, (*scaled, figure.change)),)


def rows(claims: Sequence[Claim]) -> dict[RowKey, dict[str, Claim]]:
    """Claims of one point of one table together, by metric."""
    found: dict[RowKey, dict[str, Claim]] = defaultdict(dict)
    for claim in claims:
        params = tuple(sorted(claim.params.items()))
        found[(claim.experiment, claim.version, claim.table, params)][claim.metric] = claim
    return dict(found)


def check_percent(claims: Sequence[Claim]) -> Iterator[Finding]:
    """A stated percentage against the raw figures beside it."""
    for claim in claims:
        figure = claim.published
        ratio = raw_ratio(figure)
        if ratio is None or figure.change is None or figure.before is None or figure.after is None:
            continue
        possible, stated = percent_of(ratio), printed(figure.change)
        if stated.meets(possible):
            continue
        exact = (figure.after / figure.before - 1) * 100
        about = "about " if figure.approximate else ""
        message = (
            f"{about}{figure.change:+} % is stated, but {figures_text(claim)} is {exact:+.1f} %"
        )
        if f"{possible.low:.1f}" != f"{possible.high:.1f}":
            message += f" ({possible.low:.1f} to {possible.high:.1f} within rounding)"
        if figure.after > 0:
            # (after - before) / after, the change as seen from the wrong end.
            turned = (1 - figure.before / figure.after) * 100
            reversed_ratio = quotient(printed(figure.before), printed(figure.after))
            if stated.meets(Range((1 - reversed_ratio.high) * 100, (1 - reversed_ratio.low) * 100)):
                message += f"; in percent of the figure after, it would be {turned:+.1f} %"
        yield finding("percent", "warning" if figure.approximate else "fault", [claim], message)


def check_difference(claims: Sequence[Claim]) -> Iterator[Finding]:
    """A stated difference against the raw figures beside it."""
    for claim in claims:
        figure = claim.published
        if figure.difference is None or figure.before is None or figure.after is None:
            continue
        before = printed(figure.before, figure.approximate)
        after = printed(figure.after, figure.approximate)
        possible = Range(after.low - before.high, after.high - before.low)
        if printed(figure.difference, figure.approximate).meets(possible):
            continue
        about = "about " if figure.approximate else ""
        yield finding(
            "difference",
            "fault",
            [claim],
            f"{about}{figure.difference:+} {figure.unit} is stated, but {figures_text(claim)} is "
            f"{figure.after - figure.before:+} {figure.unit}",
        )


def _ratio(claim: Claim | None) -> Range | None:
    if claim is None:
        return None
    return stated_ratio(claim.published) or raw_ratio(claim.published)


def check_normalised(claims: Sequence[Claim]) -> Iterator[Finding]:
    """A normalised change against those of its numerator and denominator."""
    for row in rows(claims).values():
        for name, claim in row.items():
            per = metric(name).per
            if per is None:
                continue
            parts = [row.get(part) for part in per]
            upper, lower, stated = _ratio(parts[0]), _ratio(parts[1]), _ratio(claim)
            if upper is None or lower is None or stated is None or lower.high == 0:
                continue
            possible = quotient(upper, lower)
            if stated.meets(possible):
                continue
            shown = percent_of(possible)
            yield finding(
                "normalised",
                "fault",
                [claim, *(part for part in parts if part is not None)],
                f"{point_text(claim)}: {figures_text(claim)} is stated, but "
                f"{per[0]} {figures_text(row[per[0]])} over {per[1]} {figures_text(row[per[1]])} "
                f"gives {shown.low:+.4f} to {shown.high:+.4f} %",
            )


def check_duplicates(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Rows of one publication that repeat each other in every digit."""
    same: dict[tuple[str, str, Values], list[Row]] = defaultdict(list)
    for (experiment, version, _, _), row in rows(claims).items():
        values = tuple(sorted(pair for claim in row.values() for pair in row_values(claim)))
        same[(experiment, version, values)].append(row)
    for group in same.values():
        digits = sum(significant_digits(claim) for claim in group[0].values())
        if len(group) < 2 or digits < COINCIDENCE_DIGITS:
            continue
        points = [point_text(next(iter(row.values()))) for row in group]
        shown = ", ".join(f"{name} {figures_text(claim)}" for name, claim in group[0].items())
        yield finding(
            "duplicate-row",
            "fault",
            itertools.chain.from_iterable(row.values() for row in group),
            f"identical in all {digits} digits: {' = '.join(points)} ({shown})",
        )


def _sides(claim: Claim) -> tuple[tuple[str, float | None], ...]:
    return (("before", claim.before), ("after", claim.after))


def check_statistics(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Percentiles and mean of one distribution: their order, and copies among them."""
    for row in rows(claims).values():
        points = [claim for claim in row.values() if metric(claim.metric).percentile is not None]
        points.sort(key=lambda claim: metric(claim.metric).percentile or 0.0)
        mean = row.get("rtt_mean")
        for low, high in itertools.pairwise(points):
            yield from _ordered(low, high, 1.0)
        if mean is not None and points:
            yield from _ordered(points[0], mean, _LEAST_MEAN)
        for one, two in itertools.combinations([*points, *([mean] if mean else [])], 2):
            yield from _distinct(one, two)


def _ordered(low: Claim, high: Claim, share: float) -> Iterator[Finding]:
    for (side, less), (_, more) in zip(_sides(low), _sides(high), strict=True):
        if less is not None and more is not None and more < share * less:
            yield finding(
                "percentile-order",
                "fault",
                [low, high],
                f"{point_text(low)}, {side}: {high.metric} {more:g} {high.unit} is below "
                f"{low.metric} {less:g} {low.unit}",
            )


def _distinct(one: Claim, two: Claim) -> Iterator[Finding]:
    for side in ("before", "after"):
        first, second = getattr(one.published, side), getattr(two.published, side)
        if first is None or first != second or one.published.unit != two.published.unit:
            continue
        if len(first.normalize().as_tuple().digits) >= _STATISTIC_DIGITS:
            yield finding(
                "copied-statistic",
                "warning",
                [one, two],
                f"{point_text(one)}, {side}: {one.metric} and {two.metric} are both {first} "
                f"{one.published.unit}",
            )


def check_zero(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Rates of which none was seen."""
    for claim in claims:
        if claim.direction == "higher" and (claim.after == 0 or claim.stated_change == -1):
            yield finding(
                "zero",
                "fault",
                [claim],
                f"{point_text(claim)}: {claim.metric} {figures_text(claim)}; nothing moved, so "
                "the run failed and its figure is no result",
            )


RULES = (
    check_percent,
    check_difference,
    check_normalised,
    check_duplicates,
    check_statistics,
    check_zero,
)
