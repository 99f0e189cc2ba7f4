"""The claim audit for people and for programs: a table in a terminal, records for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from types import MappingProxyType

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vringlab.analysis.finding import SEVERITIES, Finding, Severity

_STYLES: Mapping[Severity, str] = MappingProxyType(
    {"fault": "bold red", "warning": "yellow", "note": "dim"}
)
# Below this the rule's name stands over its message instead of beside it.
_NARROW = 72


def findings_as_records(findings: Sequence[Finding]) -> list[dict[str, object]]:
    """Findings as plain values, for `--json`.

    Each has `kind`, `severity`, `experiment`, `claims` (identifiers), `message`, and the `rule`
    it breaks with that rule's `source`.
    """
    return [
        {
            "kind": item.kind,
            "severity": item.severity,
            "experiment": item.experiment,
            "claims": list(item.claims),
            "message": item.message,
            "rule": item.rule.title,
            "source": item.rule.source,
        }
        for item in findings
    ]


def summary(findings: Sequence[Finding]) -> str:
    """How many findings of each severity, in words."""
    if not findings:
        return "no findings"
    counts = Counter(item.severity for item in findings)
    parts = [
        f"{counts[severity]} {severity}{'' if counts[severity] == 1 else 's'}"
        for severity in SEVERITIES
        if counts[severity]
    ]
    return ", ".join(parts)


def render(findings: Sequence[Finding], console: Console) -> None:
    """Print findings by experiment, the worst first, and how many there are.

    Args:
        findings: From `vringlab.analysis.audit`.
        console: Where to; any width.
    """
    ordered = sorted(findings, key=lambda item: (item.experiment, SEVERITIES.index(item.severity)))
    for experiment, group in groupby(ordered, key=lambda item: item.experiment):
        console.print(Text(experiment, style="bold"))
        console.print(_table(list(group), narrow=console.width < _NARROW))
        console.print()
    console.print(Text(summary(findings), style="bold"))


def _table(findings: Sequence[Finding], narrow: bool) -> Table:
    table = Table.grid(padding=(0, 2), expand=False)
    table.add_column(no_wrap=True)
    if not narrow:
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for item in findings:
        severity = Text(f"  {item.severity}", style=_STYLES[item.severity])
        # Text objects, so that brackets in a message are never taken for markup.
        message = Text(item.message)
        if narrow:
            table.add_row(severity, Text.assemble(f"{item.kind}\n", message))
        else:
            table.add_row(severity, item.kind, message)
    return table
