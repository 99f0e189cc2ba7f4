"""Claim audit: what is wrong with published figures before anything is measured.

Rules about one publication's figures are in `audit_figures`, rules that hold publications against
each other in `audit_versions`; those about standing and reporting are here. A clean set of claims
gives no finding.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vringlab.analysis import audit_figures, audit_versions
from vringlab.analysis.audit_versions import payload
from vringlab.analysis.claims import (
    UNVERIFIED,
    Claim,
    experiments,
    load_claims,
    read_claims,
)
from vringlab.analysis.finding import RULES, SEVERITIES, Finding, Rule, finding, versions_text
from vringlab.analysis.units import percent_text
from vringlab.errors import UserError

__all__ = ["RULES", "SEVERITIES", "Finding", "Rule", "audit", "audit_selection"]

#: Largest relative standard deviation over runs that passes (pbench#2386).
SPREAD_LIMIT = 0.05
# Quantiles of the normal distribution for 5 % two-sided and for a power of 80 %.
_Z_LEVEL, _Z_POWER = 1.96, 0.84
#: Bytes of a message that one receive buffer holds on 6.1.y and 6.12.y (facts/workloads.md, 1).
RECEIVE_BUFFER = 3732
_FIO_WITH_VSOCK = (3, 37)

Group = dict[tuple[str, str], list[Claim]]


def _by_publication(claims: Sequence[Claim]) -> Group:
    groups: Group = defaultdict(list)
    for claim in claims:
        groups[(claim.experiment, claim.version)].append(claim)
    return groups


def _by_experiment(claims: Sequence[Claim]) -> dict[str, list[Claim]]:
    groups: dict[str, list[Claim]] = defaultdict(list)
    for claim in claims:
        groups[claim.experiment].append(claim)
    return groups


def _whose(claims: Sequence[Claim]) -> str:
    count = f"{len(claims)} figure{'s' if len(claims) > 1 else ''}"
    return f"{count} of {versions_text([claim.version for claim in claims])}"


def required_runs(change: float, spread: tuple[float, float]) -> int:
    """Runs per arm that tell a change from none, at 5 % error and 80 % power.

    n = (z_0.975 + z_0.80)^2 (cv_before^2 + cv_after^2) / log(1 + change)^2, the normal
    approximation for the logarithm of a ratio of two means (delta method).

    Args:
        change: after / before - 1, not zero.
        spread: Relative standard deviations over runs of the two arms, as fractions.
    """
    if change <= -1:
        return 2
    runs = ((_Z_LEVEL + _Z_POWER) * math.hypot(*spread) / math.log1p(change)) ** 2
    return max(2, math.ceil(runs))


def check_withdrawn(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Figures that no longer stand."""
    for (_, version), group in _by_publication(claims).items():
        gone = [claim for claim in group if claim.status == "withdrawn"]
        if gone:
            yield finding(
                "withdrawn",
                "fault",
                gone,
                f"{len(gone)} figure{'s' if len(gone) > 1 else ''} of {version} withdrawn by "
                f"{gone[0].status_by}",
            )


def check_runs(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Figures with one run, or with a number of runs that is not stated."""
    for group in _by_experiment(claims).values():
        unsaid = [claim for claim in group if claim.n is None]
        if unsaid:
            yield finding(
                "missing-n", "warning", unsaid, f"number of runs not stated: {_whose(unsaid)}"
            )
    for claim in claims:
        if claim.n != 1:
            continue
        message = "n = 1: a single run cannot be told from noise"
        if claim.change:
            spread = claim.spread or (SPREAD_LIMIT, SPREAD_LIMIT)
            given = "the stated spread" if claim.spread else f"a spread of {SPREAD_LIMIT:.0%}"
            runs = required_runs(claim.change, spread)
            message += f"; {percent_text(claim.change)} at {given} needs {runs} runs per arm"
        yield finding("single-run", "fault", [claim], message)


def check_spread(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Spread that is not stated, too wide, or as large as the change itself."""
    for group in _by_experiment(claims).values():
        unsaid = [claim for claim in group if claim.spread is None]
        if unsaid:
            yield finding(
                "missing-spread", "note", unsaid, f"no spread or interval: {_whose(unsaid)}"
            )
    for claim in claims:
        if claim.spread is None:
            continue
        if max(claim.spread) > SPREAD_LIMIT:
            yield finding(
                "wide-spread",
                "warning",
                [claim],
                f"runs spread by {claim.spread[0]:.1%} before and {claim.spread[1]:.1%} after, "
                f"against a limit of {SPREAD_LIMIT:.0%}",
            )
        if claim.n is None or claim.n < 2 or not claim.change or claim.change <= -1:
            continue
        # The standard error of the logarithm of a ratio of means, by the delta method.
        noise = _Z_LEVEL * math.hypot(*claim.spread) / math.sqrt(claim.n)
        if abs(math.log1p(claim.change)) < noise:
            yield finding(
                "within-noise",
                "warning",
                [claim],
                f"{percent_text(claim.change)} is within the noise of {math.expm1(noise):.1%} by "
                f"the stated spread and n = {claim.n}; "
                f"{required_runs(claim.change, claim.spread)} runs per arm would tell",
            )


def check_setup(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Publications that leave out where and how long was measured, or cannot be traced."""
    for group in _by_experiment(claims).values():
        missing = {
            "base kernel": [claim for claim in group if not claim.environment.kernel],
            "length of a run": [claim for claim in group if claim.duration_s is None],
            "kind of host": [claim for claim in group if claim.environment.kind == "unknown"],
        }
        unsaid = [f"{name} ({_whose(some)})" for name, some in missing.items() if some]
        if unsaid:
            concerned = itertools.chain.from_iterable(missing.values())
            yield finding("missing-setup", "note", concerned, f"not stated: {', '.join(unsaid)}")
        untraced = [claim for claim in group if claim.message_id == UNVERIFIED]
        if untraced:
            yield finding(
                "unverified-source",
                "note",
                untraced,
                f"no message-id known: {_whose(untraced)}",
            )


def check_tools(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Measurements that the tool named could not make."""
    groups: dict[tuple[str, str, str], list[Claim]] = defaultdict(list)
    for claim in claims:
        groups[(claim.experiment, claim.version, claim.tool)].append(claim)
    for (_, _, tool), group in groups.items():
        if tool.startswith("uperf"):
            yield from _uperf_sizes(group)
        if tool.startswith("fio") and group[0].path.startswith("vsock"):
            yield from _fio_version(tool, group)
            yield from _fio_short_reads(group)


def _uperf_sizes(claims: Sequence[Claim]) -> Iterator[Finding]:
    normal = [claim for claim in claims if claim.params.get("sizes") == "normal"]
    if normal:
        yield finding(
            "tool-limit",
            "warning",
            normal,
            "sizes are said to be normally distributed, but uperf draws them uniformly only, by "
            "its rand(a,b)",
        )


def _fio_version(tool: str, claims: Sequence[Claim]) -> Iterator[Finding]:
    version = re.match(r"fio (\d+)\.(\d+)", tool)
    if version and (int(version[1]), int(version[2])) < _FIO_WITH_VSOCK:
        first = ".".join(map(str, _FIO_WITH_VSOCK))
        yield finding(
            "tool-limit", "fault", claims, f"{version[0]} has no vsock: it came with fio {first}"
        )


def _fio_short_reads(claims: Sequence[Claim]) -> Iterator[Finding]:
    long = [
        claim
        for claim in claims
        if claim.params.get("direction") == "h-g-h"
        and (payload(claim) or 0) > RECEIVE_BUFFER
        and claim.metric.startswith("rtt_")
    ]
    if long:
        size = max(payload(claim) or 0 for claim in long)
        yield finding(
            "short-read",
            "fault" if long[0].status == "withdrawn" else "note",
            long,
            f"{long[0].version}: {size:g} B do not fit one receive buffer of {RECEIVE_BUFFER} B "
            "on 6.1.y and 6.12.y, where fio echoes the short read too: not to be repeated with "
            "it there; use vsock-pingpong",
        )


Check = Callable[[Sequence[Claim]], Iterator[Finding]]
_CHECKS: tuple[Check, ...] = (
    *audit_figures.RULES,
    *audit_versions.RULES,
    check_withdrawn,
    check_runs,
    check_spread,
    check_setup,
    check_tools,
)


def audit(claims: Sequence[Claim], context: Sequence[Claim] = ()) -> list[Finding]:
    """What is wrong with published figures, the worst first.

    Args:
        claims: The claims to judge.
        context: Further claims to hold them against, such as those of other experiments on the
            same data path. They are not judged themselves.

    Returns:
        Findings whose first claim is one of `claims`; empty for claims without fault.
    """
    own = {claim.id for claim in claims}
    pool = [*claims, *(claim for claim in context if claim.id not in own)]
    found = [item for check in _CHECKS for item in check(pool) if item.claims[0] in own]
    # Sorting is stable: within a severity the rules keep their order.
    return sorted(found, key=lambda item: (SEVERITIES.index(item.severity), item.experiment))


def audit_selection(
    experiment: str | None = None, file: Path | None = None, folder: Path | None = None
) -> tuple[list[Claim], list[Finding]]:
    """Audit one experiment, one file, or everything, against all claims of the collection.

    Args:
        experiment: Name of an experiment with claims; all when None.
        file: A claims file of one's own, instead of the collection's.
        folder: Where the collection's claims are; `data/claims` when None.

    Returns:
        The claims judged, and the findings.

    Raises:
        UserError: no such experiment or file, a file that breaks the schema, or both given.
    """
    if experiment is not None and file is not None:
        raise UserError(
            f"both an experiment ({experiment}) and a file ({file}) to audit",
            remedy="give one of them; a file is held against the collection's claims anyway",
        )
    claims = read_claims(file) if file is not None else load_claims(experiment, folder)
    judged = {claim.experiment for claim in claims}
    others = [
        claim
        for name in experiments(folder)
        if name not in judged
        for claim in load_claims(name, folder)
    ]
    return claims, audit(claims, others)
