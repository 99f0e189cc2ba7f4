"""A run for others: CSV and Parquet tables, and an RO-Crate for publication.

The crate is a folder or a zip that describes itself (RO-Crate 1.1, https://w3id.org/ro/crate/1.1):
who measured what, with which software, under which licence, file by file.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from rocrate.model.contextentity import ContextEntity
from rocrate.rocrate import ROCrate

from vringlab import __version__
from vringlab.analysis.frames import RunFrames, bundle, load_run
from vringlab.analysis.provenance import describe
from vringlab.campaign import store, tables
from vringlab.campaign.files import UNFINISHED, replacing, writing
from vringlab.errors import UserError
from vringlab.report.figures import save_figures
from vringlab.report.html import REPORT, judged, render
from vringlab.report.mail import mail_text
from vringlab.report.summary import heading, host_text
from vringlab.report.tables import arm_table

Format = Literal["csv", "parquet"]

#: Licence of published data when none is named: use it, and say whose it is.
LICENCE = "https://creativecommons.org/licenses/by/4.0/"


def export_tables(run: RunFrames, folder: Path | str, kind: Format = "csv") -> list[Path]:
    """Write the tidy tables of a run: samples, histograms, arms, verdicts, provenance.

    Args:
        run: The run.
        folder: Where to; made if it is not there.
        kind: `csv` or `parquet`.

    Returns:
        The files.

    Raises:
        UserError: an unknown kind.
        InfrastructureError: the folder cannot be written.
    """
    if kind not in ("csv", "parquet"):
        raise UserError(f"unknown format {kind!r}", remedy="use csv or parquet")
    folder = Path(folder)
    frames = {
        "samples": run.samples,
        "histograms": run.histograms,
        "arms": arm_table(run).frame(),
        "verdicts": pd.DataFrame([_plain(v.as_record()) for _, v in judged(run)[0]]),
        "provenance": describe(run.provenance),
    }
    paths = []
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, frame in frames.items():
            path = folder / f"{name}.{kind}"
            with replacing(path) as stream:
                if kind == "csv":
                    frame.to_csv(stream, index=False)
                else:
                    frame.to_parquet(stream, index=False)
            paths.append(path)
    return paths


def _plain(record: dict[str, object]) -> dict[str, object]:
    """A record whose mappings are text: a table's cell holds one value."""
    return {
        name: json.dumps(value) if isinstance(value, dict) else value
        for name, value in record.items()
    }


def export_crate(path: Path | str, out: Path | str, licence: str = LICENCE) -> Path:
    """Publish a run as an RO-Crate, which is a recorded bundle too: `load_run` reads the folder.

    Args:
        path: The run folder or bundle.
        out: Folder to make, or a file that ends in `.zip`.
        licence: Address of the licence of the data.

    Returns:
        The folder or file; it appears whole, or not at all.

    Raises:
        UserError: the run cannot be read, has no sample, or `out` exists.
        InfrastructureError: the disk is full, or the folder cannot be written.
    """
    run = load_run(path)
    out = Path(out)
    if run.samples.empty:
        raise UserError(f"run {path} has no samples", remedy="measure first: vringlab resume")
    if out.exists():
        raise UserError(f"{out} exists", remedy="choose another name, or remove it")
    with _staging(out) as stage:
        _fill(run, stage)
        made = stage.with_name(f"{stage.name}.crate")
        crate = _crate(run, stage, licence)
        if out.suffix == ".zip":
            crate.write_zip(made)
        else:
            crate.write(made)
        with writing(out):
            made.rename(out)
    return out


@contextmanager
def _staging(out: Path) -> Iterator[Path]:
    """A folder beside `out`, on its disk, that is gone afterwards."""
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        parent = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=out.parent))
    try:
        with writing(out):
            yield parent / "files"
    finally:
        shutil.rmtree(parent, ignore_errors=True)


def _fill(run: RunFrames, stage: Path) -> None:
    """Everything that the crate holds."""
    bundle(run.path, stage)
    export_tables(run, stage / "tables", "csv")
    save_figures(run, stage / "figures")
    (stage / REPORT).write_text(render(run), encoding="utf-8")
    (stage / "mail.txt").write_text(mail_text(run), encoding="ascii")
    if (run.path / tables.CELLS).is_dir():
        # The bundle holds a few of the tools' outputs as examples; here are all of them.
        shutil.copytree(
            run.path / tables.CELLS,
            stage / tables.CELLS,
            ignore=lambda _, names: [n for n in names if n.startswith(UNFINISHED)],
            copy_function=_copy_new,
            dirs_exist_ok=True,
        )


def _copy_new(source: str, target: str) -> None:
    if not Path(target).exists():
        shutil.copyfile(source, target)


_DESCRIPTIONS = {
    store.PLAN: ("Plan", "Every cell in order of measuring, with the seed of the order"),
    store.PROVENANCE: ("Provenance", "Host, guest, kernels, arms, tools, pinning, command"),
    store.BUNDLE: ("Bundle", "Marks the folder as one that vringlab reads"),
    store.TIME: ("Time budget", "Seconds by phase of each attempt"),
    tables.SAMPLES: ("Samples", "Tidy: one row per sample and metric, unit in a column"),
    tables.HISTOGRAMS: ("Histograms", "One row per bin; joins the samples on cell_id"),
    REPORT: ("Report", "Verdicts, figures, tables and provenance on one page"),
    "mail.txt": ("Text for a mail", "72 columns of ASCII"),
}

_TYPES = {
    ".json": "application/json",
    ".parquet": "application/vnd.apache.parquet",
    ".csv": "text/csv",
    ".html": "text/html",
    ".txt": "text/plain",
    ".png": "image/png",
    ".svg": "image/svg+xml",
}


def _crate(run: RunFrames, stage: Path, licence: str) -> ROCrate:
    crate = ROCrate()
    plan = run.plan
    simulated = "SIMULATED, no measurement: " if run.simulated else ""
    root: dict[str, Any] = {
        "name": f"{plan.experiment}, profile {plan.profile}, run {run.run_id}",
        "description": f"{simulated}{plan.title}. {heading(run)}. Made by vringlab {__version__}.",
        "license": {"@id": licence},
        "datePublished": _date(run),
        "keywords": ["benchmark", "KVM", "Linux kernel", plan.module, host_text(run)],
    }
    for name, value in root.items():
        crate.root_dataset[name] = value
    crate.add(ContextEntity(crate, licence, {"@type": "CreativeWork", "name": licence}))
    files = []
    for path in sorted(path for path in stage.rglob("*") if path.is_file()):
        name = path.relative_to(stage).as_posix()
        title, text = _DESCRIPTIONS.get(name, (name, ""))
        properties: dict[str, Any] = {"name": title, "contentSize": str(path.stat().st_size)}
        properties |= {"description": text} if text else {}
        kind = _TYPES.get(path.suffix)
        properties |= {"encodingFormat": kind} if kind else {}
        files.append(crate.add_file(path, name, properties=properties))
    _action(run, crate, files)
    return crate


def _date(run: RunFrames) -> str:
    created = str(run.provenance["run"].get("created", ""))
    return created or datetime.now(UTC).isoformat(timespec="seconds")


def _action(run: RunFrames, crate: ROCrate, files: list[Any]) -> None:
    """What made the files: the command, with the software behind it and the arms as its objects."""
    provenance = run.provenance
    software = crate.add(
        ContextEntity(
            crate,
            "#vringlab",
            {"@type": "SoftwareApplication", "name": "vringlab", "version": __version__},
        )
    )
    arms = provenance.get("arms")
    objects = []
    for arm, facts in (arms if isinstance(arms, dict) else {}).items():
        known = facts if isinstance(facts, dict) else {}
        objects.append(
            crate.add(
                ContextEntity(
                    crate,
                    f"#arm-{arm}",
                    {
                        "@type": "SoftwareApplication",
                        "name": f"{run.plan.module}, arm {arm}, on {run.plan.base_kernel}",
                        "identifier": str(known.get("build_id", "")),
                    },
                )
            )
        )
    command = provenance.get("command")
    words = command if isinstance(command, list) else [command] if command else []
    crate.add(
        ContextEntity(
            crate,
            "#measurement",
            {
                "@type": "CreateAction",
                "name": " ".join(map(str, words)) or f"vringlab run {run.plan.experiment}",
                "instrument": software,
                "object": objects,
                "result": files,
                "startTime": str(provenance["run"].get("created", "")),
            },
        )
    )
    crate.root_dataset["mentions"] = {"@id": "#measurement"}
