"""What a run says of a published claim, in one word and one sentence that carries its numbers.

Rules, on the log scale, with c the claimed effect, [l, u] the effect's interval turned so that c
is positive, and f the noise floor of the A/A pair:

    invalid as published        the figure was withdrawn; what was measured stands beside it
    not exercised               the changed path did not run
    insufficient data           no interval, or one that fits none of the other words
    not comparable              only figures in a unit were claimed, and this host is another kind
    reproduced                  l > f, and the size fits: c within [l, u], or the estimate between
                                half and twice c
    same direction, other size  l > f, and the size does not fit
    contradicted                u < -f
    no effect seen              the interval lies within c / 2 on both sides

A claim of less than 1 % is one of no change: reproduced when the interval lies within 5 % (or
the noise floor) on both sides, contradicted when it lies outside.

The interval is t on boot means. One boot, or one block, therefore gives `insufficient data`; with
`scope="these boots"` the spread within boots is used instead, and the sentence says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pandas as pd

from vringlab.analysis import wording
from vringlab.analysis.evidence import Evidence, Published, Scope, gather, was_exercised
from vringlab.analysis.sequential import Decision, SequentialPlan, decide, undecided
from vringlab.analysis.stats import Interval, adjust
from vringlab.errors import VringlabError

Word = Literal[
    "reproduced",
    "same direction, other size",
    "no effect seen",
    "contradicted",
    "not exercised",
    "invalid as published",
    "not comparable",
    "insufficient data",
]

#: An estimate within this factor of the claimed effect (log scale) is of the claimed size.
SIZE_FACTOR = 2.0

#: A claimed change below this is a claim of no change.
NEGLIGIBLE = 0.01

#: A claim of no change holds when the interval lies within this change on both sides.
NO_CHANGE_MARGIN = 0.05


@dataclass(frozen=True)
class Verdict:
    """What a run says of a claim.

    Attributes:
        claim: The claim.
        word: The verdict.
        reason: Why, as the end of the sentence.
        evidence: The numbers.
        p_adjusted: P value adjusted for the number of claims judged together; NaN when alone.
    """

    claim: Published = field(repr=False)
    word: Word
    reason: str
    evidence: Evidence = field(repr=False)
    p_adjusted: float = float("nan")

    @property
    def sentence(self) -> str:
        """One sentence with the numbers that carry the verdict."""
        return wording.sentence(self.claim, self.word, self.reason, self.evidence)

    @property
    def details(self) -> tuple[str, ...]:
        """Further sentences: noise, path, environment, notes."""
        return wording.details(self.claim, self.evidence)

    def as_record(self) -> dict[str, object]:
        """Flat, plain values for a table or JSON; None where a number is not known."""
        evidence, effect = self.evidence, self.evidence.effect
        numbers = {
            "claimed_ratio": evidence.claimed,
            "ratio": effect.ratio if effect else None,
            "low": evidence.interval.low if evidence.interval.known else None,
            "high": evidence.interval.high if evidence.interval.known else None,
            "p": effect.p if effect else None,
            "p_adjusted": self.p_adjusted,
            "noise_floor": evidence.noise.floor if evidence.noise else None,
            "smallest_detectable": evidence.smallest_detectable,
            "level_before_here": evidence.level.value if evidence.level else None,
        }
        finite = {k: v if v is not None and np.isfinite(v) else None for k, v in numbers.items()}
        return {
            "claim": self.claim.id,
            "version": self.claim.version,
            "message_id": self.claim.message_id,
            "status": self.claim.status,
            "metric": self.claim.metric,
            "unit": self.claim.unit,
            "params": dict(sorted(self.claim.params.items())),
            "before": self.claim.arms[0],
            "after": self.claim.arms[1],
            "verdict": self.word,
            **finite,
            "level": effect.level if effect else None,
            "basis": evidence.basis,
            "blocks": effect.blocks if effect else 0,
            "boots": effect.boots if effect else 0,
            "hosts": effect.hosts if effect else 0,
            "samples": effect.pairs.samples if effect else 0,
            "invalid_samples": sum(effect.pairs.invalid.values()) if effect else None,
            "outliers": len(effect.outliers) if effect else 0,
            "workload": effect.pairs.workload if effect else None,
            "required_blocks": evidence.required.blocks if evidence.required else None,
            "required_boots": evidence.required.boots if evidence.required else None,
            "exercised": evidence.exercised,
            "claimed_host": self.claim.environment.kind,
            "host": "+".join(evidence.host_kinds),
            "figures_comparable": evidence.comparable,
            "claimed_before": self.claim.before,
            "claimed_after": self.claim.after,
            "claimed_n": self.claim.n,
            "problem": evidence.problem,
            "sentence": self.sentence,
        }


def compare(
    claimed: float, estimate: float, interval: Interval, floor: float = 0.0
) -> tuple[Word, str]:
    """The verdict on a measured ratio, and the reason.

    Args:
        claimed: Claimed ratio.
        estimate: Measured ratio.
        interval: Its interval.
        floor: Noise floor on the log scale.
    """
    if not interval.known:
        return "insufficient data", "there is no interval"
    size, here = abs(float(np.log(claimed))), float(np.log(estimate))
    low, high = float(np.log(max(interval.low, 1e-300))), float(np.log(interval.high))
    if size < np.log1p(NEGLIGIBLE):
        return _no_change(low, high, floor)
    if claimed < 1:
        here, low, high = -here, -high, -low
    beyond = " beyond the noise floor" if floor else ""
    if low > floor:
        share = here / size
        if low <= size <= high:
            return (
                "reproduced",
                f"the interval excludes no effect{beyond} and holds the claimed size",
            )
        if 1 / SIZE_FACTOR <= share <= SIZE_FACTOR:
            return (
                "reproduced",
                f"the interval excludes no effect{beyond} and the effect is {share:.2f} times the "
                "claimed one (log scale)",
            )
        return (
            "same direction, other size",
            f"the interval excludes no effect{beyond}, but the effect is {share:.2g} times the "
            "claimed one (log scale)",
        )
    if high < -floor:
        return "contradicted", f"the effect goes the other way{beyond}"
    half = size / SIZE_FACTOR
    if high < half and low > -half:
        return "no effect seen", "the interval excludes half of the claimed effect and more"
    if high < half:
        return (
            "insufficient data",
            "half of the claimed effect and more is excluded, but not whether there is none or "
            "the opposite",
        )
    noise = f" (or the noise floor of {100 * np.expm1(floor):.1f} %)" if floor else ""
    return (
        "insufficient data",
        f"the interval reaches both no effect{noise} and half of the claimed effect",
    )


def _no_change(low: float, high: float, floor: float) -> tuple[Word, str]:
    margin = max(float(np.log1p(NO_CHANGE_MARGIN)), floor)
    shown = f"{100 * np.expm1(margin):.1f} %"
    if -margin < low and high < margin:
        return "reproduced", f"no change was claimed, and any is within {shown}"
    if low > margin or high < -margin:
        return "contradicted", f"no change was claimed, and there is one of over {shown}"
    return "insufficient data", f"no change was claimed, and one of over {shown} remains possible"


def _word(claim: Published, found: Evidence, p_adjusted: float, alpha: float) -> tuple[Word, str]:
    if claim.status == "withdrawn":
        by = f" by {claim.status_by}" if claim.status_by else ""
        return "invalid as published", f"the figure was withdrawn{by}"
    if found.exercised is False:
        return "not exercised", "the changed path did not run, so the samples say nothing of it"
    if found.problem or found.effect is None:
        return "insufficient data", found.problem
    if found.claimed is None:
        kinds = " and ".join(found.host_kinds)
        return "not comparable", f"only a figure in {claim.unit} was claimed; this host is {kinds}"
    if found.effect.unit == "none":
        return "insufficient data", "one block has no spread"
    if not found.interval.known:
        return "insufficient data", "one boot does not show how the effect differs between boots"
    word, reason = compare(found.claimed, found.effect.ratio, found.interval, found.floor)
    shows = word in ("reproduced", "same direction, other size", "contradicted")
    if shows and p_adjusted > alpha and abs(np.log(found.claimed)) >= np.log1p(NEGLIGIBLE):
        return "insufficient data", "it does not stand after adjusting for the number of claims"
    return word, reason


def judge(
    claim: Published,
    samples: pd.DataFrame,
    provenance: Mapping[str, object] | None = None,
    exercised: bool | None = None,
    level: float = 0.95,
    draws: int = 10_000,
    decision: Decision | None = None,
    scope: Scope = "boots",
) -> Verdict:
    """Judge one claim by a run. Never raises for a fault of the data: it becomes the verdict.

    Args:
        claim: The claim.
        samples: Tidy samples of the run.
        provenance: The run's provenance, for whether the path was exercised.
        exercised: Overrides what the provenance says of that.
        level: Level of the interval.
        draws: Draws of the bootstrap that stands beside; 0 for none.
        decision: The sequential decision that ended the run: its interval is judged then, since
            the one of a fixed design is too narrow after several looks.
        scope: `boots` to speak of boots in general, `these boots` of those measured only.
    """
    found = gather(claim, samples, provenance or {}, exercised, level, draws, decision, scope)
    word, reason = _word(claim, found, float("nan"), 1 - level)
    return Verdict(claim, word, reason, found)


def decide_claim(
    claim: Published,
    samples: pd.DataFrame,
    plan: SequentialPlan,
    provenance: Mapping[str, object] | None = None,
    exercised: bool | None = None,
    draws: int = 0,
) -> tuple[Decision, Verdict]:
    """Whether a claim is decided by the samples so far, and its verdict by them.

    For `--until-decided`: call it after each block with one plan, and stop when `stop` is set for
    each claim, or when the plan's budget is used up. The verdict rests on the decision's interval.

    Args:
        claim: The claim; its ratio takes the place of the plan's `claimed`.
        samples: Tidy samples so far.
        plan: The plan, fixed before the first block.
        provenance: The run's provenance so far.
        exercised: Overrides what the provenance says of the path.
        draws: Draws of the bootstrap that stands beside.
    """
    level = 1 - plan.alpha
    own = plan
    if claim.ratio is not None and claim.ratio > 0:
        negligible = abs(np.log(claim.ratio)) < np.log1p(NEGLIGIBLE)
        # A plan ends on half of what is claimed; of no change, on the margin that is allowed.
        target = (1 + NO_CHANGE_MARGIN) ** 2 if negligible else claim.ratio
        own = replace(plan, claimed=target)
    found = gather(claim, samples, provenance or {}, exercised, level, 0)
    tool = found.effect.pairs.workload if found.effect else claim.workload
    before, after = claim.arms
    try:
        decision = decide(
            samples, own, claim.metric, after, before, claim.params, tool, found.floor
        )
    except VringlabError as error:
        # More blocks may mend it; the budget ends it if they do not.
        decision = undecided(own, error.message)
    return decision, judge(claim, samples, provenance, exercised, level, draws, decision)


def judge_all(
    claims: Iterable[Published],
    samples: pd.DataFrame,
    provenance: Mapping[str, object] | None = None,
    exercised: Mapping[str, bool] | None = None,
    level: float = 0.95,
    draws: int = 10_000,
    method: Literal["holm", "bh"] | None = "holm",
    scope: Scope = "boots",
) -> list[Verdict]:
    """Judge claims together, with p values adjusted for their number.

    Args:
        claims: The claims.
        samples: Tidy samples of the run.
        provenance: The run's provenance.
        exercised: Overrides, by arm, of whether the path was exercised.
        level: Level of the intervals; they are not adjusted, the p values are.
        draws: Draws of the bootstrap.
        method: Adjustment, or None for none. The family is the claims that have an effect here
            and still stand.
        scope: As for `judge`.
    """
    listed: Sequence[Published] = list(claims)
    over = exercised or {}
    evidence = [
        gather(c, samples, provenance or {}, over.get(c.arms[1]), level, draws, None, scope)
        for c in listed
    ]
    p = np.full(len(listed), np.nan)
    for index, (claim, found) in enumerate(zip(listed, evidence, strict=True)):
        if found.effect is not None and claim.status != "withdrawn" and scope == "boots":
            p[index] = found.effect.p
    adjusted = adjust(p, method) if method else np.full(len(listed), np.nan)
    verdicts = []
    for claim, found, value in zip(listed, evidence, adjusted, strict=True):
        word, reason = _word(claim, found, float(value), 1 - level)
        verdicts.append(Verdict(claim, word, reason, found, float(value)))
    return verdicts


__all__ = [
    "NEGLIGIBLE",
    "NO_CHANGE_MARGIN",
    "SIZE_FACTOR",
    "Evidence",
    "Published",
    "Scope",
    "Verdict",
    "Word",
    "compare",
    "decide_claim",
    "judge",
    "judge_all",
    "was_exercised",
]
