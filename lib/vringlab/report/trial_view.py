"""What a run says of a patch of which nothing was published: effect, noise, and what it could see.

Without a claim there is no size to be reproduced. A change is an effect when its interval excludes
both no change and the noise floor of the A/A pair, after adjusting for the number of figures that
are looked at together; anything else is `no effect seen`, with the smallest that would have been.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from vringlab.analysis.evidence import was_exercised
from vringlab.analysis.frames import RunFrames
from vringlab.analysis.pairing import point_text
from vringlab.analysis.power import smallest_detectable
from vringlab.analysis.stats import adjust
from vringlab.analysis.units import METRICS
from vringlab.report.summary import ArmRow, amount, change_text, summarise

Word = Literal["effect seen", "no effect seen", "not exercised", "insufficient data"]


@dataclass(frozen=True)
class Finding:
    """What a run says of one figure of one arm.

    Attributes:
        arm: The arm.
        workload: What measured it.
        params: The parameter point.
        metric: The metric.
        word: The verdict.
        better: Whether the change is for the better; None without an effect.
        sentence: The verdict with its numbers.
    """

    arm: str
    workload: str
    params: Mapping[str, object]
    metric: str
    word: Word
    better: bool | None
    sentence: str


def findings(run: RunFrames, level: float = 0.95) -> list[Finding]:
    """Judge every headline figure of every arm against the reference.

    Args:
        run: The run.
        level: Level of the intervals, and of the whole family after Holm's adjustment.
    """
    rows = [
        row
        for row in summarise(run, level=level).rows
        if not (row.is_reference or row.is_twin) and row.metric != "none"
    ]
    rows.sort(key=lambda row: run.plan.arms.index(row.arm))
    return judge(run, rows, level)


def judge(run: RunFrames, rows: Sequence[ArmRow], level: float = 0.95) -> list[Finding]:
    """Judge rows of arms that are looked at together, in their order; see `findings`."""
    p = np.array([row.effect.p if row.effect is not None else np.nan for row in rows])
    adjusted = adjust(p, "holm") if rows else p
    return [
        _finding(run, row, float(value), level) for row, value in zip(rows, adjusted, strict=True)
    ]


def _finding(run: RunFrames, row: ArmRow, p_adjusted: float, level: float) -> Finding:
    params = dict(row.params)
    exercised = was_exercised(run.provenance, row.arm, params)
    spec = METRICS.get(row.metric)
    word, reason = _word(row, exercised, p_adjusted, level)
    better = None
    if word == "effect seen" and row.effect is not None and spec is not None:
        better = (row.effect.ratio > 1) == (spec.better > 0)
    point = point_text(params)
    parts = [
        f"{row.metric}{f' at {point}' if point else ''} by {row.workload}: {_measured(row, better)}"
    ]
    parts += [reason, *_bounds(row, word)]
    return Finding(
        row.arm,
        row.workload,
        params,
        row.metric,
        word,
        better,
        f"{word}: {'; '.join(part for part in parts if part)}.",
    )


def _word(row: ArmRow, exercised: bool | None, p_adjusted: float, level: float) -> tuple[Word, str]:
    effect = row.effect
    if exercised is False:
        return "not exercised", "no changed function ran, so the figures say nothing of the patch"
    if effect is None or not effect.interval.known:
        return "insufficient data", row.problem or "one block has no spread"
    floor = row.floor or 1.0
    if effect.interval.low > floor or effect.interval.high < 1 / floor:
        if p_adjusted <= 1 - level:
            return "effect seen", ""
        return "no effect seen", "it does not stand after adjusting for the number of figures"
    return "no effect seen", ""


def _measured(row: ArmRow, better: bool | None) -> str:
    effect = row.effect
    if effect is None:
        return "not measured"
    text = change_text(effect.ratio)
    if effect.interval.known:
        low, high = change_text(effect.interval.low), change_text(effect.interval.high)
        text += f" [{low}, {high}]"
    if better is not None:
        text += ", better" if better else ", worse"
    if row.level is not None:
        text += f" ({amount(row.level.value, row.unit, row.metric)})"
    blocks = f"{effect.blocks} blocks" if effect.blocks > 1 else "one block"
    if effect.boots == 1:
        return f"{text}, {blocks} of one boot, which says nothing of other boots"
    return f"{text}, {blocks} of {effect.boots} boots"


def _bounds(row: ArmRow, word: Word) -> list[str]:
    bounds = []
    if row.floor is not None:
        bounds.append(f"two equal arms came out {change_text(row.floor)} apart")
    if word in ("no effect seen", "insufficient data") and row.effect is not None:
        least = smallest_detectable(row.effect)
        if np.isfinite(least):
            bounds.append(
                "the smallest change that this run would have found with 80 % power is "
                f"{change_text(least)} or {change_text(1 / least)}"
            )
    return bounds


def path_words(run: RunFrames) -> list[str]:
    """Which of the changed functions ran, one line for each arm but the reference.

    Empty when the run has no passes.
    """
    lines = []
    for arm in run.plan.arms:
        passes = [item for item in run.paths if item.arm == arm]
        if arm in (run.plan.reference, run.plan.twin) or not passes:
            continue
        counted: dict[str, int] = {}
        missing: dict[str, str] = {}
        for item in passes:
            for name, count in item.counts.items():
                counted[name] = counted.get(name, 0) + count
            missing.update(item.missing)
        ran = [f"{name} {count:,} times" for name, count in counted.items() if count]
        still = [name for name, count in counted.items() if not count]
        known = {item.exercised for item in passes}
        word = (
            "exercised"
            if True in known
            else "NOT exercised"
            if known == {False}
            else "not known to be exercised"
        )
        parts = [f"path of {arm} {word}"]
        if ran:
            parts.append("ran: " + ", ".join(ran))
        if still:
            parts.append("never ran: " + ", ".join(still))
        if missing:
            parts.append("not counted: " + ", ".join(missing))
        lines.append("; ".join(parts) + ".")
    return lines


def lines(run: RunFrames) -> list[str]:
    """The verdict on a tried patch, as text: the path first, then the figures by arm."""
    told = path_words(run)
    if not run.paths:
        why = run.provenance.get("path_problem", "nothing was counted")
        told.append(f"path not known to be exercised: {why}.")
    told += [f"{arm} is machine code for machine code the reference." for arm in same_code(run)]
    told += [f"{item.arm}: {item.sentence}" for item in findings(run)]
    return told


def same_code(run: RunFrames) -> list[str]:
    """Arms whose modules have the very machine code of the reference's."""
    built = run.provenance.get("arms", {})

    def code(arm: str) -> object:
        facts = built.get(arm)
        return facts.get("text_sha256") if isinstance(facts, Mapping) else None

    reference = code(run.plan.reference)
    others = [arm for arm in run.plan.arms if arm not in (run.plan.reference, run.plan.twin)]
    return [arm for arm in others if reference is not None and code(arm) == reference]


def table(run: RunFrames) -> pd.DataFrame:
    """The verdicts as a table: arm, what was measured where, word, and the sentence."""
    rows = [
        {
            "arm": item.arm,
            "metric": item.metric,
            "point": point_text(dict(item.params)),
            "verdict": item.word,
            "": "" if item.better is None else "better" if item.better else "worse",
            "in full": item.sentence.partition(": ")[2],
        }
        for item in findings(run)
    ]
    return pd.DataFrame(rows, columns=["arm", "metric", "point", "verdict", "", "in full"])


def series_table(run: RunFrames) -> pd.DataFrame:
    """What was tried: by arm the series, its version, patches, modules, fuzz and functions."""
    rows = []
    for arm, known in run.provenance.get("try", {}).items():
        rows.append(
            {
                "arm": arm,
                "title": known["title"],
                "message-id": known["message_id"] or "not mailed",
                "version": known["version"],
                "patches": known["patches"],
                "modules": ", ".join(known["modules"]),
                "fuzz": "; ".join(known["fuzz"]) or "none",
                "functions counted": ", ".join(known["functions"]),
            }
        )
    return pd.DataFrame(rows)


def series_texts(run: RunFrames) -> dict[str, str]:
    """What was tried in a line, by arm: title, version, number of patches and message-id."""
    texts = {}
    for arm, known in run.provenance.get("try", {}).items():
        count = "one patch" if known["patches"] == 1 else f"{known['patches']} patches"
        named = f", <{known['message_id']}>" if known["message_id"] else ""
        texts[arm] = f"{known['title']} (v{known['version']}, {count}{named})"
    return texts


def of_arm(found: Sequence[Finding], arm: str) -> list[Finding]:
    """Those of one arm."""
    return [item for item in found if item.arm == arm]
