"""A run as one self-contained HTML page: verdicts, figures, tables, provenance.

The page loads nothing. Each figure is in it twice as inline SVG, wide and narrow, and the style
sheet shows one of them; its colours are the page's, in light and in dark.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from vringlab import __version__
from vringlab.analysis.claims import Claim
from vringlab.analysis.frames import RunFrames, load_run
from vringlab.analysis.judgement import verdicts_of
from vringlab.analysis.pairing import PARAM, point_text
from vringlab.analysis.provenance import readings
from vringlab.analysis.units import humanize
from vringlab.analysis.verdicts import Verdict
from vringlab.analysis.wording import change, interval_text
from vringlab.campaign.files import replacing
from vringlab.errors import UserError
from vringlab.report.canvas import GRID, INK, MUTED, PAPER, RunFigure, Width, looks
from vringlab.report.figures import drawn_metrics, figures_for
from vringlab.report.opinions import lines as opinion_lines
from vringlab.report.path_view import path_rows
from vringlab.report.summary import HEADLINE, Summary, count, host_text, run_notes, summarise
from vringlab.report.tables import ArmTable, arm_table
from vringlab.report.time_budget import duration, phases, sentence
from vringlab.report.trial_view import lines as trial_lines
from vringlab.report.verdict_view import WORDS

#: Name of the page in a run folder.
REPORT = "report.html"

#: Archive of the kernel's mailing lists; a link, which nothing fetches before a reader follows it.
_ARCHIVE = "https://lore.kernel.org/r/"

# The neutral colours of figures, and those of arms, are the page's.
_COLOURS = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    PAPER: "var(--paper)",
    "#0072b2": "var(--c0)",
    "#d55e00": "var(--c1)",
    "#009e73": "var(--c2)",
    "#cc79a7": "var(--c3)",
    "#e69f00": "var(--c4)",
    "#56b4e9": "var(--c5)",
}

_STATES = ("standing", "superseded", "withdrawn")

_GROUPS = {
    "run": "Run",
    "host": "KVM host",
    "outer": "Machine under the embedded host",
    "guest": "Guest",
    "kernels": "Kernel and image",
    "arms": "Arms",
    "exercised": "Changed path",
    "tools": "Tools",
    "pinning": "Pinning",
    "settings": "Settings",
    "git": "Collection",
    "seeds": "Seeds",
    "boots": "Boots",
}


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("vringlab.report"),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    # Jinja's own `capitalize` makes the rest small: `A/A` becomes `a/a`.
    made.filters["upper_first"] = lambda text: text[:1].upper() + text[1:]
    return made


def write_report(path: Path | str, out: Path | str | None = None) -> Path:
    """Write the page of a run.

    Args:
        path: The run folder or bundle.
        out: File to write; `report.html` in the folder when None.

    Returns:
        The file.

    Raises:
        UserError: the run cannot be read.
        InfrastructureError: the page cannot be written.
    """
    run = load_run(path)
    target = Path(out) if out is not None else run.path / REPORT
    page = render(run)
    with replacing(target) as stream:
        stream.write(page.encode())
    return target


NOTHING_PUBLISHED = "No published figure is about what this run measured."


def render(run: RunFrames) -> str:
    """The page of a run as text. Never raises for a fault of the run's data."""
    every = list(dict.fromkeys([*HEADLINE, *drawn_metrics(run)]))
    summary = summarise(run, every)
    provenance = _hidden(run.provenance)
    verdicts, problem = judged(run)
    measured = [verdict for claim, verdict in verdicts if is_measured(claim, run)]
    # What still stands comes first.
    measured.sort(key=lambda verdict: _STATES.index(verdict.claim.status))
    others = [claim for claim, _ in verdicts if not is_measured(claim, run)]
    spent = phases(run.time)
    total = sum(spent.values())
    table = arm_table(_headline(summary))
    template = _environment().get_template("report.html.j2")
    return template.render(
        version=__version__,
        css=Markup(_css()),
        plan=run.plan,
        run_id=run.run_id,
        created=str(run.provenance["run"].get("created", "")).replace("T", " ")[:16],
        badges=_badges(summary),
        notes=run_notes(summary),
        verdicts=[_verdict(verdict) for verdict in measured],
        verdict_counts=_counts(measured),
        findings=[] if measured else [_unbroken(line) for line in trial_lines(run)],
        no_verdicts=problem or ("" if run.tried else NOTHING_PUBLISHED),
        opinions=[_unbroken(line) for line in opinion_lines(run)],
        others=[_claim_text(claim) for claim in others],
        figures=_figures(summary),
        table=_table(table, run),
        paths=path_rows(run),
        path_problem=str(run.provenance.get("path_problem", "")),
        phases=[
            (name, duration(seconds), f"{100 * seconds / total:.1f} %")
            for name, seconds in spent.items()
        ],
        time_sentence=sentence(run.time),
        command=command_again(run),
        as_typed=_as_typed(run),
        commit=_commit(run),
        dirty=bool(_mapping(run.provenance.get("git")).get("dirty")),
        provenance=_provenance(provenance),
        missing=[reading.path for reading in readings(provenance) if reading.value is None],
    )


def _css() -> str:
    loader = _environment().loader
    assert loader is not None
    return loader.get_source(_environment(), "report.css")[0]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _headline(summary: Summary) -> Summary:
    """The summary with the headline metrics of each workload only."""
    rows = []
    for workload in summary.workloads:
        there = summary.metrics(workload)
        chosen = [name for name in there if name in HEADLINE] or there
        rows += [row for row in summary.of(workload) if row.metric in chosen]
    return Summary(summary.run, tuple(rows), summary.level)


def _badges(summary: Summary) -> list[str]:
    run = summary.run
    samples = run.samples
    invalid = samples.loc[~samples["valid"].astype(bool), "cell_id"].nunique()
    return [
        host_text(run),
        run.plan.base_kernel,
        f"module {run.plan.module}",
        f"arms {', '.join(arm for arm in summary.arms if arm != run.plan.twin)}",
        f"{count(samples['cell_id'].nunique(), 'sample')}, {invalid} invalid",
        f"{count(samples['block'].nunique(), 'block')}, "
        f"{count(len(samples[['host', 'boot']].drop_duplicates()), 'boot')}",
    ]


# Verdicts


def judged(run: RunFrames) -> tuple[list[tuple[Claim, Verdict]], str]:
    """The claims of the run's experiment with their verdicts, or why there are none."""
    try:
        found = verdicts_of(run)
    except UserError as error:
        return [], f"No verdict: {error.message}."
    return [(v.claim, v) for v in found if isinstance(v.claim, Claim)], ""


def is_measured(claim: Claim, run: RunFrames) -> bool:
    """Whether the run has samples of the claim's arms, metric and point, valid or not."""
    samples = run.samples
    rows = samples[(samples["metric"] == claim.metric) & samples["arm"].isin(claim.arms)]
    for name, value in claim.params.items():
        if PARAM + name not in rows.columns:
            return False
        rows = rows[rows[PARAM + name].astype(str) == str(value)]
    return set(rows["arm"]) == set(claim.arms)


def _verdict(verdict: Verdict) -> dict[str, object]:
    claim, found = verdict.claim, verdict.evidence
    numbers: list[tuple[str, str]] = []
    if found.claimed is not None:
        numbers.append(("claimed", change(found.claimed)))
    if isinstance(claim.before, float) and isinstance(claim.after, float):
        before, after = (humanize(value, claim.unit) for value in (claim.before, claim.after))
        numbers.append(("claimed figures", f"{before} \N{RIGHTWARDS ARROW} {after}"))
    if found.effect is not None:
        text = change(found.effect.ratio)
        if found.interval.known:
            text += f" {interval_text(found.interval)}"
        numbers.append(("measured here", text))
        blocks, boots = found.effect.blocks, found.effect.boots
        numbers.append(("n", f"{count(blocks, 'block')}, {count(boots, 'boot')}"))
    if found.noise is not None:
        numbers.append(("noise floor", f"{100 * (found.noise.floor - 1):.1f} %"))
    if found.smallest_detectable is not None:
        numbers.append(("detectable", f"{100 * (found.smallest_detectable - 1):.1f} %"))
    mail = claim.message_id
    known = "@" in mail
    return {
        "word": verdict.word,
        "css": verdict.word.replace(",", "").replace(" ", "-"),
        "metric": claim.metric,
        "point": point_text(dict(claim.params)),
        "version": claim.version,
        "status": claim.status,
        "link": _ARCHIVE + quote(mail.strip("<>"), safe="@") if known else "",
        "numbers": numbers,
        "reason": _unbroken(verdict.reason or found.problem),
        "details": [_unbroken(line) for line in (verdict.sentence, *verdict.details)],
    }


def _unbroken(text: str) -> str:
    """Keeps a percent sign on the line of its number."""
    return text.replace(" %", "\N{NO-BREAK SPACE}%")


def _counts(verdicts: Sequence[Verdict]) -> str:
    counts = Counter(verdict.word for verdict in verdicts)
    parts = [f"{counts[word]} {word}" for word in WORDS if counts[word]]
    return f"{count(len(verdicts), 'published figure')}: {'; '.join(parts)}."


def _claim_text(claim: Claim) -> str:
    point = point_text(dict(claim.params))
    arms = f"{claim.arms[1]} against {claim.arms[0]}"
    return ", ".join(part for part in (claim.version, claim.metric, point, arms) if part)


# Figures


def _figures(summary: Summary) -> list[dict[str, object]]:
    wide = figures_for(summary, "wide", notes=False)
    narrow = figures_for(summary, "narrow", notes=False)
    found: list[dict[str, object]] = []
    # The answer first, then what it comes from.
    for name in sorted(wide, key=lambda name: name != "effects"):
        one, other = wide[name], narrow[name]
        assert isinstance(one, RunFigure)
        assert isinstance(other, RunFigure)
        found.append(
            {
                "name": name,
                "caption": one.caption,
                "wide": inline_svg(one, f"{name}-w", "wide"),
                "narrow": inline_svg(other, f"{name}-n", "narrow"),
            }
        )
    return found


_PATH = re.compile(r' d="([^"]*)"')
_DECIMALS = re.compile(r"(\.\d\d)\d+")
_IDENTITY = re.compile(r'\s\bid="([^"]+)"')
_REFERENCE = re.compile(r'\bhref="#([^"]+)"')
_ADDRESS = re.compile(r"url\(#([^)]+)\)")


def inline_svg(figure: RunFigure, prefix: str, width: Width) -> Markup:
    """A figure as an SVG element for a page: its colours, names of its own, and a description.

    Args:
        figure: The figure.
        prefix: Put before every name in it, since names are shared by the whole page.
        width: Class of the element.
    """
    text = figure.svg()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # A hundredth of a point is finer than any screen, and halves the page.
    text = _PATH.sub(lambda found: f' d="{_DECIMALS.sub(chr(92) + "1", found[1])}"', text)
    text = re.sub(r"\s*\n\s*", "\n", text)
    for colour, variable in _COLOURS.items():
        text = text.replace(colour, variable)
    used = set(_REFERENCE.findall(text)) | set(_ADDRESS.findall(text))
    text = _IDENTITY.sub(
        # A name that nothing refers to may stand for many parts, and a page has each once.
        lambda found: f' id="{prefix}-{_plain(found[1])}"' if found[1] in used else "",
        text,
    )
    text = _REFERENCE.sub(lambda found: f'href="#{prefix}-{_plain(found[1])}"', text)
    text = _ADDRESS.sub(lambda found: f"url(#{prefix}-{_plain(found[1])})", text)
    head, _, rest = text.partition(">")
    size = re.search(r'viewBox="[^"]+"', head)
    alt = Markup.escape(figure.alt)
    opened = (
        f'<svg class="{width}" role="img" aria-label="{alt}" {size[0] if size else ""} '
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    )
    return Markup(opened + rest)


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)


# Table


def _table(table: ArmTable, run: RunFrames) -> dict[str, object]:
    shown = looks(run)
    sections = []
    for part in table.sections:
        lines: list[dict[str, object]] = []
        before = ""
        for line in part.lines:
            kinds = ["first"] if before and line.metric != before else []
            kinds += ["sure"] if line.row.beyond_noise else []
            kinds += [] if line.row.valid else ["void"]
            last, before = before, line.metric
            colour = shown[line.arm].colour
            lines.append(
                {
                    "metric": line.metric,
                    "first": line.metric != last,
                    "arm": line.arm,
                    "figure": line.figure,
                    "interval": line.interval,
                    "n": line.n,
                    "change": line.change,
                    "css": " ".join(kinds),
                    "colour": _COLOURS.get(colour, colour),
                }
            )
        sections.append({"title": part.title, "lines": lines, "notes": part.notes})
    return {"sections": sections, "statement": table.statement, "legend": table.legend}


# Provenance


def _hidden(provenance: Mapping[str, Any]) -> Mapping[str, Any]:
    """A provenance without the folders of the machine's owner, which say nothing to a reader."""
    settings = _mapping(provenance.get("settings"))
    hide = {str(settings[key]): key.upper() for key in ("cache", "root") if settings.get(key)}
    # The longer first: one may lie inside the other.
    ordered = sorted(hide.items(), key=lambda item: -len(item[0]))

    def clean(value: object) -> Any:
        if isinstance(value, str):
            for text, instead in ordered:
                value = value.replace(text, instead)
            return value
        if isinstance(value, Mapping):
            return {name: clean(one) for name, one in value.items()}
        if isinstance(value, Sequence):
            return [clean(one) for one in value]
        return value

    cleaned: Mapping[str, Any] = clean(provenance)
    return cleaned


def _provenance(provenance: Mapping[str, Any]) -> list[dict[str, object]]:
    groups: dict[str, list[dict[str, object]]] = {}
    for reading in readings(provenance):
        if reading.value is None:
            continue
        names = reading.path.split(".")
        group = "outer" if names[:2] == ["host", "outer"] else names[0]
        group = group if group in _GROUPS else "run"
        key = reading.key
        described = key.description if key else reading.path
        if key and "*" in key.path:
            described = f"{described}: {_starred(reading.path, key.path)}"
        groups.setdefault(group, []).append(
            {
                "path": reading.path,
                "description": described,
                "value": reading.text,
                "must": bool(key and key.check == "must match"),
            }
        )
    return [
        {"title": title, "rows": groups[name], "open": name in ("host", "kernels")}
        for name, title in _GROUPS.items()
        if name in groups
    ]


def _starred(path: str, pattern: str) -> str:
    """The names that the stars of a key stand for."""
    names, wanted = path.split("."), pattern.split(".")
    if wanted[-1] == "*":
        names = [*names[: len(wanted) - 1], ".".join(names[len(wanted) - 1 :])]
    return ", ".join(n for n, want in zip(names, wanted, strict=True) if want == "*")


def command_again(run: RunFrames) -> str:
    """The command that measures the same plan again; of tried patches, given their files."""
    plan = run.plan
    words = ["vringlab", "run", plan.experiment]
    overrides: Mapping[str, Iterable[object]] = plan.overrides
    if run.tried:
        words = ["vringlab", "try", *_patches(run), "--base", plan.base_kernel]
        words += ["--side", plan.side] if plan.module != "vmlinux" else ["--build", "full"]
        for workload in dict.fromkeys(cell.workload for cell in plan.cells):
            words += ["--workload", workload]
        overrides = {
            name: dict.fromkeys(cell.params[name] for cell in plan.cells if name in cell.params)
            for name in plan.params
        }
    words += ["--profile", plan.profile, "--seed", str(plan.seed)]
    for name, values in overrides.items():
        words += ["-p", f"{name}={','.join(map(str, values))}"]
    settings = _mapping(run.provenance.get("settings"))
    if settings.get("switch") not in (None, "swap"):
        words += ["--switch", str(settings["switch"])]
    if plan.count_instructions:
        words.append("--count-instructions")
    return shlex.join(words)


def _patches(run: RunFrames) -> list[str]:
    """What was tried, as it is typed; of files the name alone."""
    words = []
    for known in _mapping(run.provenance.get("try")).values():
        source = str(known["source"])
        if known["kind"] == "git range":
            words += [source, "--tree", "TREE"]
        else:
            words.append(
                known["message_id"] if known["kind"] == "message-id" else Path(source).name
            )
    return words


def _as_typed(run: RunFrames) -> str:
    typed = run.provenance.get("command")
    if isinstance(typed, str):
        return typed
    if isinstance(typed, Iterable):
        words = [str(word) for word in typed]
        return shlex.join([Path(words[0]).name, *words[1:]]) if words else ""
    return ""


def _commit(run: RunFrames) -> str:
    return str(_mapping(run.provenance.get("git")).get("commit", ""))[:12]
