"""All that a run has to say of a published claim: effect, noise, path, host.

A fault of the data does not raise here: it is kept as the problem, and becomes the verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np
import pandas as pd

from vringlab.analysis.pairing import check_columns, pair
from vringlab.analysis.power import (
    ASSUMED_SD,
    NoiseFloor,
    RequiredN,
    noise_floor,
    required_blocks,
    required_n,
    smallest_detectable,
)
from vringlab.analysis.sequential import Decision
from vringlab.analysis.stats import SEED, Effect, Interval, Level, from_pairs, level_of
from vringlab.errors import UserError, VringlabError

Scope = Literal["boots", "these boots"]


class Where(Protocol):
    """Where a claim was measured, as `claims.Environment`."""

    @property
    def kind(self) -> str:
        """`physical`, `nested` or `unknown`."""

    @property
    def kernel(self) -> str:
        """Kernel release, or empty."""


class Published(Protocol):
    """What is needed of a `claims.Claim`."""

    @property
    def id(self) -> str:
        """Unique name."""

    @property
    def metric(self) -> str:
        """Name of the metric."""

    @property
    def unit(self) -> str:
        """Unit of before, after and difference."""

    @property
    def params(self) -> Mapping[str, object]:
        """Parameter point."""

    @property
    def before(self) -> float | None:
        """Figure without the patch."""

    @property
    def after(self) -> float | None:
        """Figure with it."""

    @property
    def ratio(self) -> float | None:
        """After / before, when known."""

    @property
    def difference(self) -> float | None:
        """After - before, when only that was published."""

    @property
    def n(self) -> int | None:
        """Runs behind it."""

    @property
    def environment(self) -> Where:
        """Where it was measured."""

    @property
    def status(self) -> str:
        """`standing`, `withdrawn` or `superseded`."""

    @property
    def status_by(self) -> str:
        """What ended it."""

    @property
    def version(self) -> str:
        """Version of the series."""

    @property
    def message_id(self) -> str:
        """Message-id of the mail."""

    @property
    def arms(self) -> tuple[str, str]:
        """The two arms, before first."""

    @property
    def workload(self) -> str:
        """Workload that measures it."""


@dataclass(frozen=True)
class Evidence:
    """All that a run has to say of a claim, before it is judged.

    Attributes:
        effect: After against before; None when the samples give none.
        interval: The interval that is judged: the effect's, or the one of a sequential decision.
        basis: What the interval rests on, in words.
        claimed: Claimed ratio; None when it cannot be known here.
        noise: A/A pair of the before arm; None without one.
        smallest_detectable: Ratio above 1 that the run would have found with 80 % power.
        required: Design that would find the claimed effect, or half of it when there is an
            interval already; None when it cannot be reckoned.
        exercised: Whether the changed path ran in the after arm; None when not recorded.
        level: Figure of the before arm here.
        host_kinds: Kinds of the hosts of the samples.
        comparable: Whether figures in a unit may be held against the claim's.
        problem: Why there is no effect; empty when there is one.
        notes: What else a reader should know, one sentence each.
    """

    effect: Effect | None = None
    interval: Interval = field(default_factory=Interval)
    basis: str = ""
    claimed: float | None = None
    noise: NoiseFloor | None = None
    smallest_detectable: float | None = None
    required: RequiredN | None = None
    exercised: bool | None = None
    level: Level | None = None
    host_kinds: tuple[str, ...] = ()
    comparable: bool = False
    problem: str = ""
    notes: tuple[str, ...] = ()

    @property
    def floor(self) -> float:
        """Noise floor on the log scale; 0 without an A/A pair."""
        return float(np.log(self.noise.floor)) if self.noise else 0.0


def _entry(provenance: Mapping[str, object], key: str, arm: str) -> object:
    node = provenance.get(key)
    return node.get(arm) if isinstance(node, Mapping) else None


def was_exercised(
    provenance: Mapping[str, object], arm: str, params: Mapping[str, object] | None = None
) -> bool | None:
    """Whether the changed path ran in an arm, as the provenance has it; None when it does not.

    Read from `exercised.<arm>` as `campaign.paths.summary` writes it.

    Args:
        provenance: A run's.
        arm: The arm.
        params: Only points with these values count, where the provenance names points; the path
            ran when it did in one of them.
    """
    found = _entry(provenance, "exercised", arm)
    if not isinstance(found, Mapping):
        return None
    points = found.get("points")
    if params and isinstance(points, Sequence):
        known = [
            point["exercised"]
            for point in points
            if point["exercised"] is not None
            and all(str(point["params"].get(name)) == str(value) for name, value in params.items())
        ]
        if known:
            return any(known)
    ran = found.get("exercised")
    return None if ran is None else bool(ran)


def _effect(
    claim: Published, samples: pd.DataFrame, level: float, draws: int
) -> tuple[Effect, tuple[str, ...]]:
    """The effect by the claim's workload, or by another that measured the metric validly."""
    before, after = claim.arms
    measured = samples[samples["metric"] == claim.metric]
    tools = sorted(set(measured["workload"]))
    if not tools:
        # The full frame knows why: an unknown metric, or only invalid samples.
        pairs = pair(samples, claim.metric, after, before, claim.params)
        return from_pairs(pairs, level, draws, SEED), ()
    ordered = [tool for tool in tools if tool == claim.workload]
    ordered += [tool for tool in tools if tool != claim.workload]
    first: VringlabError | None = None
    for tool in ordered:
        try:
            pairs = pair(samples, claim.metric, after, before, claim.params, tool)
            found = from_pairs(pairs, level, draws, SEED)
        except VringlabError as error:
            first = first or error
            continue
        if tool == claim.workload:
            return found, ()
        why = f" ({first.message})" if first else ""
        return found, (f"measured by {tool} instead of {claim.workload}{why}",)
    assert first is not None
    raise first


def _claimed(claim: Published, level: Level | None, comparable: bool) -> float | None:
    ratio = claim.ratio
    if ratio is not None:
        if not (np.isfinite(ratio) and ratio > 0):
            raise UserError(
                f"claim {claim.id}: {ratio} is no ratio", remedy="correct the claim's figures"
            )
        return ratio
    if claim.difference is None or level is None or not comparable:
        return None
    # A difference in a unit, as a share of what this host has without the patch.
    ratio = 1 + claim.difference / level.value
    return ratio if ratio > 0 else None


def _required(
    claimed: float | None, effect: Effect | None, noise: NoiseFloor | None, interval: Interval
) -> RequiredN | None:
    """The design that settles it: the claimed effect, or half of it once there is an interval."""
    if claimed is None or abs(np.log(claimed)) < 1e-9:
        return None
    target = float(np.sqrt(claimed)) if interval.known else claimed
    source = effect if effect is not None and effect.blocks > 1 else None
    if source is None and noise is not None and noise.effect.blocks > 1:
        source = noise.effect
    try:
        if source is None:
            return required_blocks(target, ASSUMED_SD, assumed=True)
        return required_n(source, target)
    except UserError:
        return None


def gather(
    claim: Published,
    samples: pd.DataFrame,
    provenance: Mapping[str, object],
    exercised: bool | None = None,
    level: float = 0.95,
    draws: int = 10_000,
    decision: Decision | None = None,
    scope: Scope = "boots",
) -> Evidence:
    """The numbers behind a verdict; see `judge`. A fault of the data is in `problem`."""
    before, after = claim.arms
    ran = was_exercised(provenance, after, claim.params) if exercised is None else exercised
    try:
        check_columns(samples)
        kinds = tuple(sorted(set(samples["host_kind"].astype(str))))
        comparable = kinds == ("physical",) and claim.environment.kind == "physical"
        base = Evidence(exercised=ran, host_kinds=kinds, comparable=comparable)
        claimed = _claimed(claim, None, comparable)
    except VringlabError as error:
        return Evidence(exercised=ran, problem=error.message)
    base = replace(base, claimed=claimed, required=_required(claimed, None, None, Interval()))
    try:
        effect, notes = _effect(claim, samples, level, draws)
    except VringlabError as error:
        return replace(base, problem=error.message)
    tool = effect.pairs.workload
    noise = None
    try:
        noise = noise_floor(samples, claim.metric, before, claim.params, level, tool)
    except VringlabError as error:
        notes = (*notes, f"no noise floor: {error.message}")
    here = level_of(samples, claim.metric, before, claim.params, level, tool)
    claimed = _claimed(claim, here, comparable)
    interval, basis = effect.interval, f"{effect.method}, {effect.blocks} blocks"
    if scope == "these boots":
        interval = effect.within
        basis = f"spread of {effect.blocks} blocks within these {effect.boots} boots alone"
    elif effect.boots == 1:
        count = "one block" if effect.blocks == 1 else f"{effect.blocks} blocks"
        interval, basis = Interval(), f"{count} of one boot"
    if decision is not None:
        interval = decision.interval
        basis = f"look {decision.look} of {decision.looks} at {decision.units} {decision.unit}s"
    return replace(
        base,
        effect=effect,
        interval=interval,
        basis=basis,
        claimed=claimed,
        noise=noise,
        smallest_detectable=_smallest(effect, noise),
        required=_required(claimed, effect, noise, interval),
        level=here,
        notes=(*notes, *effect.notes),
    )


def _smallest(effect: Effect, noise: NoiseFloor | None) -> float | None:
    found = [smallest_detectable(effect)]
    if noise is not None:
        found.append(noise.smallest_detectable)
    # Two estimates of one noise: the larger is promised.
    largest = max(found)
    return largest if np.isfinite(largest) and effect.unit != "block" else None
