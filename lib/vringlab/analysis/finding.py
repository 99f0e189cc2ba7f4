"""What the claim audit reports, and the rules it goes by, each with its source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from vringlab.analysis.claims import Claim

Severity = Literal["fault", "warning", "note"]

#: Worst first.
SEVERITIES: tuple[Severity, ...] = ("fault", "warning", "note")


@dataclass(frozen=True)
class Rule:
    """One thing the audit asks of published figures.

    Attributes:
        kind: Its short name.
        title: What it asks, in words.
        source: Where the question comes from.
    """

    kind: str
    title: str
    source: str


_RULES = (
    Rule(
        "percent",
        "a stated percentage follows from the raw figures, within their rounding",
        "seed 003 and its merged form: +82 % in the text, 31 -> 58 in the figures",
    ),
    Rule(
        "difference",
        "a stated difference follows from the raw figures, within their rounding",
        "seed 004: ~50 MB in the text, ~540 -> ~390 MB in the figures",
    ),
    Rule(
        "normalised",
        "a normalised change is (1 + numerator) / (1 + denominator) - 1",
        "seed 001: normalised throughput = throughput / CPU in all of its rows",
    ),
    Rule(
        "duplicate-row",
        "two points of one table do not agree in every digit",
        "seed 001: guest rx 65535/4 and 65535/8 repeat 65535/1 and 65535/2",
    ),
    Rule(
        "stale-table",
        "two versions of a patch do not have the same table, digit for digit",
        "list, 2023-01-10: identical figures in v3 and v9; vsock v3 and v4 on different bases",
    ),
    Rule(
        "latency-against-stream",
        "one message at a time does not carry more than a stream of the same messages",
        "seed 000: 722 ns for a 4 KiB round trip; iperf-vsock: 6.87 Gb/s at 4 KiB, one stream",
    ),
    Rule(
        "payload-order",
        "a larger message does not make the shorter round trip (10 % allowed for noise)",
        "facts/workloads.md, 1: a 4 KiB message cannot be faster than a 64 B one",
    ),
    Rule(
        "magnitude",
        "the unpatched figure of one point does not move fivefold between versions",
        "vsock v1 to v3 in ns, v4 in us, for the same ping-pong",
    ),
    Rule(
        "reversal",
        "two versions do not claim opposite effects at the same point",
        "seed 003: the RFC saw no obvious difference with netperf, the merged form +82 %",
    ),
    Rule(
        "percentile-order",
        "a higher percentile is not below a lower one, nor the mean below the 1st",
        "definition of a percentile",
    ),
    Rule(
        "copied-statistic",
        "two statistics of one run do not agree in every digit",
        "firecracker#2226: a parser put the average into the maximum",
    ),
    Rule("zero", "a rate is not zero", "LNST#117: 0.00 throughput reported as a pass"),
    Rule(
        "short-read",
        "a fio vsock ping-pong message fits one receive buffer",
        "facts/workloads.md, 1: 3732 B in 6.1.y and 6.12.y; the rest is a short read, echoed twice",
    ),
    Rule(
        "tool-limit",
        "the tool named can do what is said of it",
        "facts/workloads.md, 1 and 4: vsock in fio from 3.37; uperf draws sizes uniformly only",
    ),
    Rule(
        "withdrawn",
        "a figure that its author withdrew or that was reverted is not held against a patch",
        "Message-Id 20240730-pinna-v4-0-5c9179164db5@outlook.com, which withdraws vsock v1 to v3",
    ),
    Rule(
        "single-run",
        "more than one run stands behind a figure",
        "list, 2021-09-01: 318K against 316K with n = 1",
    ),
    Rule(
        "within-noise",
        "a change exceeds 1.96 standard errors of the ratio, by the stated n and spread",
        "delta method for a ratio of means; reviewers ask for confidence intervals",
    ),
    Rule(
        "wide-spread",
        "runs of one arm spread by at most 5 %",
        "pbench#2386: 6.9 % against a limit of 5 % that was ignored",
    ),
    Rule("missing-n", "the number of runs is stated", "facts/upstream.md: what reviewers ask"),
    Rule(
        "missing-spread", "a spread or interval is stated", "facts/upstream.md: what reviewers ask"
    ),
    Rule(
        "missing-setup",
        "base kernel, length of a run and kind of host are stated",
        "facts/upstream.md: what reviewers ask",
    ),
    Rule(
        "unverified-source",
        "the mail with the figures is known by its message-id",
        "claims are held against their source",
    ),
)

#: All rules by kind.
RULES: Mapping[str, Rule] = MappingProxyType({rule.kind: rule for rule in _RULES})


@dataclass(frozen=True)
class Finding:
    """Something about published figures that a reader must know.

    Attributes:
        kind: Which rule it breaks, a key of `RULES`.
        severity: `fault`: cannot be right, or no longer stands. `warning`: do not build on it
            alone. `note`: left unsaid.
        claims: Identifiers of the claims concerned.
        message: What was found, with the numbers.
    """

    kind: str
    severity: Severity
    claims: tuple[str, ...]
    message: str

    @property
    def rule(self) -> Rule:
        """The rule that it breaks."""
        return RULES[self.kind]

    @property
    def experiment(self) -> str:
        """Experiment of its first claim."""
        return self.claims[0].partition("/")[0]


def finding(kind: str, severity: Severity, claims: Iterable[Claim], message: str) -> Finding:
    """A finding about `claims`, each named once."""
    names = dict.fromkeys(claim.id for claim in claims)
    return Finding(RULES[kind].kind, severity, tuple(names), message)


def point_text(claim: Claim) -> str:
    """The point of the matrix: `payload=64 direction=h-g-h`."""
    return " ".join(f"{name}={value}" for name, value in claim.params.items())


def figures_text(claim: Claim) -> str:
    """The figure as printed: `27.25 -> 25.04 Gb/s`, `-8.6224 %`, `-150 MB`."""
    figure = claim.published
    about = "about " if figure.approximate else ""
    if figure.before is not None:
        return f"{figure.before} -> {figure.after} {figure.unit}"
    if figure.change is not None:
        return f"{about}{figure.change:+} %"
    if figure.difference is not None:
        return f"{about}{figure.difference:+} {figure.unit}"
    return "no difference (in words)"


def versions_text(versions: Sequence[str]) -> str:
    """`v3, v4, v5` as `v3 to v5`; names that do not count upwards are listed."""
    names = list(dict.fromkeys(versions))
    runs: list[list[str]] = []
    for name in names:
        last = runs[-1][-1] if runs else ""
        number = name.removeprefix("v")
        if number.isdigit() and last.removeprefix("v") == str(int(number) - 1):
            runs[-1].append(name)
        else:
            runs.append([name])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else run
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]
