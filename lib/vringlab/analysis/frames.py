"""A run folder or a recorded bundle as data frames. Files only: no machine is asked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from vringlab.campaign import store, tables
from vringlab.campaign.files import (
    UNFINISHED,
    read_json,
    replace_json,
    sync_folder,
    write_new,
    writing,
)
from vringlab.campaign.paths import PathPass
from vringlab.campaign.plan import Plan
from vringlab.errors import UserError
from vringlab.settings import settings

#: Version of bundle.json.
FORMAT = 1

_RAW_LIMIT = 256 * 1024

T = TypeVar("T")


@dataclass(frozen=True)
class RunFrames:
    """All that a run says.

    Attributes:
        path: The folder.
        run_id: The run's name.
        samples: One row per sample and metric, in the order of measuring. A parameter that a
            workload does not have is missing in its rows; whole numbers stay whole. An invalid
            sample without any figure has one row of metric `none`.
        histograms: One row per bin; join with the samples on `cell_id`.
        plan: The plan.
        provenance: Content of provenance.json.
        time: Content of time.json; empty where the run has none.
        paths: What was counted to see which path the packets took, by arm and point.
        superseded: Cells that were measured again because their guest died; in no table.
        notes: What a reader should know of how the tables were read, one sentence each.
    """

    path: Path
    run_id: str
    samples: pd.DataFrame
    histograms: pd.DataFrame
    plan: Plan
    provenance: Mapping[str, Any]
    time: Mapping[str, Any]
    superseded: int = 0
    paths: tuple[PathPass, ...] = ()
    notes: tuple[str, ...] = ()
    _made: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` makes of this object, made once; nobody may change it.

        Args:
            key: What it is; a copy of this object by `dataclasses.replace` begins anew.
            make: Makes it.
        """
        if key not in self._made:
            self._made[key] = make()
        found: T = self._made[key]
        return found

    @property
    def params(self) -> tuple[str, ...]:
        """Names of the `param_` columns."""
        return tuple(f"param_{name}" for name in self.plan.params)

    @property
    def host_kind(self) -> str:
        """Kind of the host: `emulated`, `nested`, `physical` or `simulated`; empty if unknown."""
        return str(self.provenance["run"].get("host_kind", ""))

    @property
    def simulated(self) -> bool:
        """Whether the figures come from a random generator."""
        return "simulated" in {self.host_kind, *self.samples["host_kind"]}

    @property
    def tried(self) -> bool:
        """Whether it is of an experiment of its own, made by `vringlab try`."""
        return "try" in self.provenance

    @property
    def complete(self) -> bool:
        """Whether every cell of the plan was measured."""
        return bool(self.samples["cell_id"].nunique() == len(self.plan.cells))


def load_run(path: Path | str) -> RunFrames:
    """Read a run folder, also of a run that is going on or was killed, or a recorded bundle.

    Tables that are behind the cells, or damaged, are made from the cells, in memory.

    Raises:
        UserError: no run folder; a file is missing, damaged, of a format that this version does
            not know, or of another run.
    """
    path = Path(path)
    plan = store.read_plan(path)
    _check_bundle(path)
    provenance = store.read_provenance(path)
    run_id = str(provenance["run"]["id"])
    samples, histograms, notes = _read_tables(path, plan, run_id)
    frame = _frame(samples).sort_values(["block", "position"], kind="stable", ignore_index=True)
    _check(path, frame, plan, run_id)
    frame, merged = _one_boot_each(frame, provenance)
    time_file = path / store.TIME
    return RunFrames(
        path=path,
        run_id=run_id,
        samples=frame,
        histograms=_frame(histograms),
        plan=plan,
        provenance=provenance,
        time=read_json(time_file) if time_file.exists() else {},
        superseded=len(tables.superseded_cells(path)),
        paths=store.read_paths(path),
        notes=(*notes, *merged),
    )


def _one_boot_each(
    frame: pd.DataFrame, provenance: Mapping[str, Any]
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Guests restored from one snapshot are one boot, whatever they were called when they ran."""
    first: dict[str, str] = {}
    same: dict[str, str] = {}
    measured = set(frame["boot"])
    boots = provenance.get("boots")
    for name, facts in (boots if isinstance(boots, Mapping) else {}).items():
        boot_id = facts.get("boot_id") if isinstance(facts, Mapping) else None
        if boot_id and name in measured:
            known = first.setdefault(boot_id, name)
            if known != name:
                same[name] = known
    if not same:
        return frame, ()
    pairs = ", ".join(f"{name} and {known}" for name, known in same.items())
    return frame.assign(boot=frame["boot"].replace(same)), (
        f"restored from one saved lab, so one boot to the statistics: {pairs}",
    )


def _check_bundle(path: Path) -> None:
    mark = path / store.BUNDLE
    if mark.exists() and (found := read_json(mark).get("format")) != FORMAT:
        raise UserError(
            f"{mark} has format {found}; this version of vringlab reads {FORMAT}",
            remedy="use the version of vringlab that wrote the bundle",
        )


def _read_tables(path: Path, plan: Plan, run_id: str) -> tuple[pa.Table, pa.Table, tuple[str, ...]]:
    behind = tables.lag(path, plan)
    recorded = (path / store.BUNDLE).exists()
    if behind.fault and (recorded or not tables.done_cells(path)):
        if recorded or (path / tables.SAMPLES).exists():
            raise UserError(
                f"cannot read run {path}: {behind.fault}",
                remedy="restore the folder from a copy, or measure again",
            )
        # A run that was killed before its first cell was done.
        behind = tables.Lag("no cell is done yet", frozenset(), frozenset())
    parts: dict[str, list[pa.RecordBatch]] = {tables.SAMPLES: [], tables.HISTOGRAMS: []}
    dropped = sorted(behind.superseded | behind.missing)
    if not behind.fault:
        for name, batches in parts.items():
            try:
                batches += tables.kept_batches(path / name, dropped)
            except (OSError, pa.ArrowException) as error:
                raise UserError(
                    f"cannot read {path / name}: {str(error).splitlines()[0]}",
                    remedy="delete the file, it is made anew from the cells"
                    if not recorded
                    else "restore the file from a copy",
                ) from None
    for samples, histograms in tables.batches(path, behind.missing, plan, run_id):
        parts[tables.SAMPLES].append(samples)
        parts[tables.HISTOGRAMS].append(histograms)
    notes = []
    if behind.fault:
        notes.append(f"{behind.fault}: the tables were made from {len(behind.missing)} cells")
    elif not behind.current:
        notes.append(f"the tables were behind: {len(dropped)} cells were read one by one")
    return (
        pa.Table.from_batches(parts[tables.SAMPLES], tables.samples_schema(plan)),
        pa.Table.from_batches(parts[tables.HISTOGRAMS], tables.HISTOGRAM_SCHEMA),
        tuple(notes),
    )


def _frame(table: pa.Table) -> pd.DataFrame:
    frame: pd.DataFrame = table.to_pandas()
    for column in table.schema:
        # pandas turns a whole number into a float when another row has none.
        if pa.types.is_integer(column.type) and table[column.name].null_count:
            frame[column.name] = pd.array(table[column.name].to_pylist(), dtype="Int64")
    return frame


def _check(path: Path, samples: pd.DataFrame, plan: Plan, run_id: str) -> None:
    """Refuse tables that belong to another run than the plan beside them."""
    other = sorted(set(samples["run_id"]) - {run_id})
    unknown = sorted(set(samples["cell_id"]) - {cell.cell_id for cell in plan.cells})
    if other or unknown:
        what = f"samples of run {other[0]}" if other else f"cell {unknown[0]}, not in its plan"
        raise UserError(
            f"run {path} holds {what}",
            remedy="keep the files of one run together: restore the folder from a copy",
        )


def bundle(
    path: Path | str,
    out: Path | str,
    raw_limit: int = _RAW_LIMIT,
    hide: Mapping[str, str] | None = None,
) -> Path:
    """Copy what replay needs of a run, and a few of the tools' outputs as examples.

    The examples are the first valid and the first invalid cell of each workload, as many as fit.

    Args:
        path: The run folder.
        out: Folder to make; appears whole, or not at all.
        raw_limit: Bytes of raw cell folders at most.
        hide: Text to replace in all that is copied as text. By default the collection's and the
            cache's folders, which say nothing to another machine.

    Returns:
        The folder made.

    Raises:
        UserError: the run cannot be read, has no samples, or `out` exists.
        InfrastructureError: the disk is full, or the folder cannot be written.
    """
    path, out = Path(path), Path(out)
    run = load_run(path)
    if run.samples.empty:
        raise UserError(f"run {path} has no samples", remedy="measure first: vringlab resume")
    if out.exists():
        raise UserError(f"{out} exists", remedy="choose another folder, or remove that one")
    if hide is None:
        hide = {str(settings().cache): "CACHE", str(settings().root): "ROOT"}
    samples, histograms, _ = _read_tables(path, run.plan, run.run_id)
    chosen = list(_examples(path, run.samples, raw_limit))
    temporary = out.with_name(f"{UNFINISHED}{out.name}")
    with writing(out):
        try:
            temporary.mkdir(parents=True)
            for name in (store.PLAN, store.PROVENANCE, store.TIME, store.PATHS):
                if (path / name).exists():
                    write_new(temporary / name, _hidden((path / name).read_bytes(), hide))
            for name in store.own_files(path):
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                write_new(temporary / name, _hidden((path / name).read_bytes(), hide))
            for name, table in ((tables.SAMPLES, samples), (tables.HISTOGRAMS, histograms)):
                pq.write_table(table, temporary / name, compression="zstd")
            for cell_id in chosen:
                target = temporary / tables.CELLS / cell_id
                target.mkdir(parents=True)
                for file in sorted((path / tables.CELLS / cell_id).iterdir()):
                    write_new(target / file.name, _hidden(file.read_bytes(), hide))
            for cell_id, file in tables.instruction_profiles(path).items():
                (temporary / tables.INSTRUCTIONS).mkdir(exist_ok=True)
                write_new(temporary / tables.INSTRUCTIONS / f"{cell_id}.json", file.read_bytes())
            replace_json(
                temporary / store.BUNDLE,
                {
                    "format": FORMAT,
                    "run": run.run_id,
                    "cells": int(run.samples["cell_id"].nunique()),
                    "raw_cells": chosen,
                },
            )
            temporary.rename(out)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_folder(out.parent)
    return out


def _examples(path: Path, samples: pd.DataFrame, limit: int) -> Iterator[str]:
    first = samples.drop_duplicates(["workload", "valid"])
    for cell_id in first["cell_id"]:
        folder = path / tables.CELLS / str(cell_id)
        size = sum(file.stat().st_size for file in folder.iterdir()) if folder.is_dir() else None
        if size is not None and size <= limit:
            limit -= size
            yield str(cell_id)


def _hidden(content: bytes, hide: Mapping[str, str]) -> bytes:
    # The longer first: one hidden path may lie inside another.
    for text, instead in sorted(hide.items(), key=lambda item: -len(item[0])):
        # JSON text may hold the path escaped as the JSON writer would.
        content = content.replace(text.encode(), instead.encode())
        content = content.replace(json.dumps(text)[1:-1].encode(), instead.encode())
    return content
