"""Verdicts in sentences: what was measured, how sure it is, what was claimed, and what follows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vringlab.analysis.pairing import point_text
from vringlab.analysis.units import humanize, percent_text

if TYPE_CHECKING:
    from vringlab.analysis.evidence import Evidence, Published
    from vringlab.analysis.stats import Interval

_HOSTS = {
    "emulated": "an emulated host",
    "nested": "a nested host",
    "physical": "a physical host",
    "simulated": "simulated samples",
    "unknown": "a host not stated",
}


def change(ratio: float) -> str:
    """A ratio as a change, `+62.8 %`; beyond a factor of ten as a factor."""
    if ratio > 10:
        return f"x{ratio:.3g}"
    if 0 < ratio < 0.01:
        return f"{100 * (ratio - 1):.2f} %"
    return percent_text(ratio - 1)


def interval_text(interval: Interval) -> str:
    """`[+55.1 %, +70.9 %]`."""
    return f"[{change(interval.low)}, {change(interval.high)}]"


def _subject(claim: Published, found: Evidence) -> str:
    point = point_text(dict(claim.params))
    text = claim.metric + (f" at {point}" if point else "")
    if found.effect is not None:
        text += f" by {found.effect.pairs.workload}"
    if found.host_kinds:
        text += " on " + " and ".join(_HOSTS.get(kind, kind) for kind in found.host_kinds)
    return text


def _measured(claim: Published, found: Evidence) -> str:
    effect = found.effect
    if effect is None:
        return ""
    before, after = claim.arms
    text = f"{after} against {before} is {change(effect.ratio)}"
    if found.interval.known:
        text += f" {interval_text(found.interval)} ({100 * effect.level:g} %, {found.basis})"
    elif effect.within.known:
        text += f" ({found.basis}, {interval_text(effect.within)} for that boot alone)"
    else:
        text += f" ({found.basis})"
    return text


def _published(claim: Published, found: Evidence) -> str:
    runs = f", n={claim.n}" if claim.n else ""
    if found.claimed is not None and claim.ratio is not None:
        return f"claimed {change(found.claimed)} ({claim.version}{runs})"
    if claim.difference is not None:
        return f"claimed {humanize(claim.difference, claim.unit)} ({claim.version}{runs})"
    return f"claimed in {claim.version}{runs}"


def sentence(claim: Published, word: str, reason: str, found: Evidence) -> str:
    """The verdict in one sentence."""
    parts = [_measured(claim, found), _published(claim, found), reason]
    detectable = found.smallest_detectable
    if word in ("no effect seen", "insufficient data") and detectable is not None:
        parts.append(
            "the smallest change that this run would have found with 80 % power is "
            f"{change(detectable)} or {change(1 / detectable)}"
        )
    need = found.required
    measured = found.effect.blocks if found.effect is not None else 0
    if word == "insufficient data" and need is not None and need.blocks > measured:
        parts.append(f"needed: {need}")
    body = "; ".join(part for part in parts if part)
    return f"{word}: {_subject(claim, found)}: {body}."


def details(claim: Published, found: Evidence) -> tuple[str, ...]:
    """What stands behind the sentence, one sentence each."""
    lines = []
    effect = found.effect
    if found.noise is not None:
        equal = found.noise.effect
        text = f"Two equal arms came out {change(equal.ratio)} apart"
        if found.noise.differ:
            text += (
                f" {interval_text(equal.interval)}, which is beyond chance: order or carry-over "
                "matters in this run, and the far end of that interval is the noise floor"
            )
        lines.append(text + ".")
    if found.exercised:
        lines.append("The changed path was seen to run.")
    elif found.exercised is None:
        lines.append("Whether the changed path ran was not recorded.")
    if effect is not None and found.exercised is False:
        lines.append("The figures are of a path that the patch does not touch.")
    lines += _environment(claim, found)
    if claim.status == "superseded":
        lines.append(f"The figure was superseded by {claim.status_by}.")
    if claim.n == 1:
        lines.append("It was published from one run, of which no noise is known.")
    if effect is not None:
        invalid = effect.pairs.invalid
        lines += [f"{count} samples are invalid: {reason}." for reason, count in invalid.items()]
        if effect.pairs.unpaired:
            lines.append(f"{effect.pairs.unpaired} samples have no partner in their block.")
        far = effect.outliers
        if len(far):
            names = ", ".join(f"{b} ({o})" for b, o in zip(far["block"], far["off"], strict=True))
            lines.append(
                f"Blocks far from the others, kept: {names}; without them the change would be "
                f"{change(float(far['ratio_without'].iloc[0]))}."
            )
    lines += [f"{note[0].upper()}{note[1:]}." for note in found.notes]
    return tuple(lines)


def _environment(claim: Published, found: Evidence) -> list[str]:
    if not found.host_kinds:
        return []
    here = " and ".join(_HOSTS.get(kind, kind) for kind in found.host_kinds)
    there = _HOSTS.get(claim.environment.kind, claim.environment.kind)
    if claim.environment.kernel:
        there += f" with kernel {claim.environment.kernel}"
    text = f"Claimed on {there}; measured on {here}"
    if claim.before is None:
        return [text + "."]
    if not found.comparable:
        return [text + ": the ratios are compared, the figures in their unit are not comparable."]
    if found.level is None:
        return [text + "."]
    apart = abs(float(np.log(found.level.value / claim.before)))
    return [
        f"{text}: {claim.arms[0]} is {humanize(found.level.value, claim.unit)} here and "
        f"{humanize(claim.before, claim.unit)} there, a factor of {np.exp(apart):.2g} apart."
    ]
