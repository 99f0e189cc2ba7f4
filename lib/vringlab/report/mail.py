"""A run as plain text for a mail: 72 columns, ASCII, everything that a reviewer asks for.

Kernel mail is read in terminals and quoted; a line that is longer gets broken by somebody's
mail program, and a character beyond ASCII by somebody's archive.
"""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vringlab.analysis.frames import RunFrames
from vringlab.report.html import NOTHING_PUBLISHED, command_again, is_measured, judged
from vringlab.report.netperf_matrix import run_lines
from vringlab.report.opinions import lines as opinion_lines
from vringlab.report.summary import ArmRow, Summary, amount, count, span, summarise
from vringlab.report.tables import Line, Section, aligned, arm_table
from vringlab.report.time_budget import sentence
from vringlab.report.trial_view import lines as trial_lines
from vringlab.report.trial_view import series_texts

COLUMNS = 72

_LETTERS = {"\u00b5": "u", "\u03bc": "u", "\u2192": "->", "\u00d7": "x", "\u2013": "-"}


def ascii_text(text: str) -> str:
    """Text in ASCII: micro signs become `u`, accents go, anything else a question mark."""
    for letter, instead in _LETTERS.items():
        text = text.replace(letter, instead)
    plain = unicodedata.normalize("NFKD", text)
    kept = "".join(letter for letter in plain if not unicodedata.combining(letter))
    return kept.encode("ascii", "replace").decode()


def _wrap(text: str, indent: str = "", hang: str | None = None) -> list[str]:
    """Lines of at most 72 columns; words that are longer are cut."""
    # A percent sign stays with its number: textwrap does not break at a no-break space.
    lines = textwrap.wrap(
        ascii_text(text).replace(" %", "\N{NO-BREAK SPACE}%"),
        COLUMNS,
        initial_indent=indent,
        subsequent_indent=indent if hang is None else hang,
        break_on_hyphens=False,
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines] or [indent.rstrip()]


def _command(text: str) -> list[str]:
    """A command that can be copied whole: broken lines end as a shell wants them."""
    lines = textwrap.wrap(
        ascii_text(text),
        COLUMNS - 2,
        initial_indent="  ",
        subsequent_indent="    ",
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def mail_text(run: RunFrames | Summary) -> str:
    """The block for a cover letter. Never raises for a fault of the data.

    Args:
        run: The run, or its summary.

    Returns:
        Lines of at most 72 ASCII characters.
    """
    summary = run if isinstance(run, Summary) else summarise(run)
    frames = summary.run
    table = arm_table(summary)
    lines = _wrap(f"{frames.plan.experiment}, measured with vringlab (profile {_profile(frames)})")
    lines += ["-" * min(COLUMNS, len(lines[0]))]
    if frames.simulated:
        lines += _wrap("SIMULATED: random numbers. Nothing was measured. Do not mail this.")
    lines += [""]
    for name, value in configuration(summary):
        lines += _wrap(f"{name + ':':<9}{value}", "", " " * 9)
    if table.statement:
        lines += ["", *_wrap(f"{table.statement[0].upper()}{table.statement[1:]}.")]
    for part in table.sections:
        lines += ["", *_section(part, frames.plan.reference)]
    if table.sections:
        lines += ["", *_wrap(f"{table.legend[0].upper()}{table.legend[1:]}.")]
    matrix = run_lines(summary, whole=False)
    # Rows of a matrix are short; titles need not be.
    lines += [part for line in ["", *matrix] if matrix for part in _wrap(line) or [""]]
    lines += _verdict_lines(frames)
    both = opinion_lines(frames)
    lines += ["", "Two opinions, time and instructions:"] if both else []
    lines += [part for line in both for part in _wrap(line, "- ", "  ")]
    lines += ["", "Again:", *_command(command_again(frames))]
    if sentence(frames.time):
        lines += _wrap(sentence(frames.time))
    for note in table.notes[sum(len(part.notes) for part in table.sections) :]:
        if not note.startswith("SIMULATED"):
            lines += _wrap(note)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _profile(run: RunFrames) -> str:
    return f"{run.plan.profile}, run {run.run_id}"


def _at(provenance: Mapping[str, Any], *path: str) -> Any:
    node: Any = provenance
    for name in path:
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def configuration(summary: Summary) -> list[tuple[str, str]]:
    """Host, guest, arms and size of a run as reviewers want them, by name; unknowns left out."""
    run = summary.run
    known = run.provenance
    kinds = " and ".join(sorted(set(run.samples["host_kind"]))) or run.host_kind or "unknown"
    accelerator = _at(known, "host", "accelerator", "name")
    beneath = "host" if _at(known, "host", "outer") is None else "outer"
    place = ("host",) if beneath == "host" else ("host", "outer")

    def join(*parts: str) -> str:
        return ", ".join(part for part in parts if part)

    def said(text: str, value: object) -> str:
        return text.format(value) if value not in (None, "") else ""

    host = join(
        kinds + (f" ({accelerator})" if accelerator else ""),
        said("{}", _at(known, *place, "cpu", "model")),
        said("microcode {}", _at(known, *place, "cpu", "microcode")),
        said("{} CPUs", _at(known, *place, "cpu", "count")),
        said("governor {}", _at(known, *place, "cpu", "governor")),
        said("turbo {}", _at(known, *place, "cpu", "turbo")),
        said("SMT {}", _at(known, *place, "cpu", "smt")),
        said("Linux {}", _at(known, "host", "kernel", "release")),
        said("halt_poll_ns {}", _at(known, "host", "halt_poll_ns")),
        said("QEMU {}", _at(known, "tools", "qemu-system-x86")),
    )
    guest = join(
        run.plan.base_kernel,
        said("{}", _at(known, "kernels", "guest", "release")),
        said("{} vCPUs", _at(known, "guest", "spec", "vcpus")),
        said("{} MiB", _at(known, "guest", "spec", "memory_mib")),
        "pinned" if _at(known, "pinning", "layout") else "",
    )
    twin = run.plan.twin
    arms = ", ".join(
        f"{arm} (reference)" if arm == run.plan.reference else arm
        for arm in summary.arms
        if arm != twin
    )
    arms += f"; {twin} is {run.plan.reference} again" if twin else ""
    samples = run.samples
    boots = len(samples[["host", "boot"]].drop_duplicates())
    invalid = samples.loc[~samples["valid"].astype(bool), "cell_id"].nunique()
    windows = sorted({cell.duration_s for cell in run.plan.cells})
    lengths = " and ".join(f"{window:g} s" for window in windows)
    size = (
        f"{count(samples['cell_id'].nunique(), 'sample')} of {lengths or 'unknown length'} in "
        f"{count(samples['block'].nunique(), 'randomised block')} of {count(boots, 'boot')}, "
        f"{invalid} invalid"
    )
    module = f"{run.plan.module} ({run.plan.side}), swapped"
    if _at(known, "settings", "switch") == "reboot":
        module = f"{run.plan.module} ({run.plan.side}), booted afresh for each arm"
    return [
        ("Host", host),
        ("Guest", guest),
        ("Module", module),
        ("Arms", arms),
        *(("Patch", f"{arm}: {text}") for arm, text in series_texts(run).items()),
        ("n", size),
    ]


def _section(part: Section, reference: str) -> Iterator[str]:
    yield from _wrap(part.title)
    if not any(line.row.valid for line in part.lines):
        for note in part.notes:
            yield from _wrap(f"NOT VALID: {note}", "  ")
        return
    metric = ""
    for group in _by_metric(part.lines):
        metric = group[0].metric
        yield from _wrap(f"{metric}, change against {reference}", "  ")
        yield from _rows(group)
    for note in part.notes:
        yield from _wrap(f"left out: {note}", "  ")


def _by_metric(lines: Sequence[Line]) -> list[list[Line]]:
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(line.metric, []).append(line)
    return list(groups.values())


def _rows(lines: Sequence[Line]) -> list[str]:
    """The arms of one metric in columns; the change goes below where there is no room beside."""
    cells = [
        [ascii_text(cell) for cell in (line.arm, _figure(line.row), f"n={line.n}", line.change)]
        for line in lines
    ]
    beside = aligned(cells, indent=4)
    if max(map(len, beside)) <= COLUMNS:
        return beside
    below = aligned([row[:3] for row in cells], indent=4)
    if max(map(len, below)) > COLUMNS:
        return [line for row in cells for line in _wrap("  ".join(row), "    ", "        ")]
    found = []
    for text, row in zip(below, cells, strict=True):
        found.append(text)
        found += _wrap(row[3], "        ") if row[3] else []
    return found


def _figure(row: ArmRow) -> str:
    if row.level is None:
        return "all invalid" if row.invalid else "no sample"
    shown = amount(row.level.value, row.unit, row.metric)
    return f"{shown} {span(row.level.interval, row.unit, row.metric)}".strip()


def _verdict_lines(run: RunFrames) -> Iterator[str]:
    verdicts, problem = judged(run)
    shown = [(claim, verdict) for claim, verdict in verdicts if is_measured(claim, run)]
    yield ""
    if not shown:
        nothing = "What this run says of the patch:" if run.tried else NOTHING_PUBLISHED
        yield from _wrap(problem or nothing)
        for line in trial_lines(run):
            yield from _wrap(line, "- ", "  ")
        return
    yield "Verdicts on the published figures:"
    for claim, verdict in shown:
        yield from _wrap(f"[{claim.version}] {verdict.sentence}", "- ", "  ")
    others = len(verdicts) - len(shown)
    if others:
        yield from _wrap(f"{count(others, 'published figure')} not measured here.")
