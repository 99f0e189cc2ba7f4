"""How far a printed figure may be from the one it was rounded from.

A mail's `31` stands for anything from 30.5 to 31.5. Whether two printed figures can both be right
is asked of these ranges, never of the digits themselves: `+82 %` beside `31 -> 58` is wrong only
because no pair of figures that rounds to 31 and 58 gives a change that rounds to 82.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from vringlab.analysis.claims import Claim, Published


@dataclass(frozen=True)
class Range:
    """A closed interval; of ratios or of percent, as the function that makes it says."""

    low: Decimal
    high: Decimal

    def meets(self, other: Range) -> bool:
        """Whether any value lies in both."""
        return self.low <= other.high and other.low <= self.high


def _half_unit(value: Decimal, approximate: bool) -> Decimal:
    exponent = int(value.as_tuple().exponent)
    if approximate and exponent == 0 and value != 0:
        # "about 540" is rounded to its last digit that is not a zero.
        exponent = max(exponent, int(value.normalize().as_tuple().exponent))
    return Decimal(1).scaleb(exponent) / 2


def printed(value: Decimal, approximate: bool = False) -> Range:
    """What a printed figure may stand for, in its own unit."""
    half = _half_unit(value, approximate)
    return Range(value - half, value + half)


def quotient(upper: Range, lower: Range) -> Range:
    """Range of a quotient; both ranges are of figures that are not negative.

    A denominator that may be zero gives no upper bound.
    """
    top = max(upper.high, Decimal(0))
    bottom = max(upper.low, Decimal(0))
    high = top / lower.low if lower.low > 0 else Decimal("Infinity")
    return Range(bottom / lower.high, high)


def percent_of(ratio: Range) -> Range:
    """A range of ratios as changes in percent."""
    return Range((ratio.low - 1) * 100, (ratio.high - 1) * 100)


def raw_ratio(figure: Published) -> Range | None:
    """After / before from the raw figures, when both were printed."""
    if figure.before is None or figure.after is None:
        return None
    return quotient(
        printed(figure.after, figure.approximate), printed(figure.before, figure.approximate)
    )


def stated_ratio(figure: Published) -> Range | None:
    """After / before from the change in percent, when one was printed."""
    if figure.change is None:
        return None
    change = printed(figure.change)
    return Range(1 + change.low / 100, 1 + change.high / 100)


def significant_digits(claim: Claim) -> int:
    """How many digits of a claim would have to agree by chance for another to repeat it."""
    figure = claim.published
    values = (figure.before, figure.after, figure.change, figure.difference)
    return sum(len(value.normalize().as_tuple().digits) for value in values if value)
