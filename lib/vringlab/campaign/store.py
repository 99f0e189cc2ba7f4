"""A run on disk: a folder that can be killed at any point and continued.

    plan.json provenance.json time.json      what was to be done, where, and how long it took
    paths.json                               which path the packets took, by arm and point
    cells/CELL/{sample.json, raw files}      a cell is done or not there
    superseded/CELL@BOOT/                    cells that were measured again under another boot
    samples.parquet histograms.parquet       tidy tables, derived from the cells
    lock                                     held by the one process that may write

A block is complete when all its cells are there. Cells are compared within a block, so they must
come from one guest lifetime: of an incomplete block nothing is kept for the analysis. What is left
to do is therefore every cell of every incomplete block.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from vringlab import __version__
from vringlab.campaign import paths, tables
from vringlab.campaign.experiment import OF_RUN
from vringlab.campaign.files import (
    UNFINISHED,
    merged,
    read_json,
    remove_unfinished,
    replace_json,
    sync_folder,
    write_new,
    writing,
)
from vringlab.campaign.paths import PathPass
from vringlab.campaign.plan import Cell, Plan, cell_document
from vringlab.errors import InfrastructureError, UserError
from vringlab.settings import settings
from vringlab.workloads.base import Outcome

PLAN = "plan.json"
PROVENANCE = "provenance.json"
TIME = "time.json"
PATHS = "paths.json"
LOCK = "lock"

#: Marks a recorded bundle: files to analyse, which no runner continues.
BUNDLE = "bundle.json"

#: Version of provenance.json and time.json.
FORMAT = 1

# A creator that was killed before it took its lock leaves a folder that only its age betrays.
_ORPHAN_AGE_S = 3600.0

_LOCK_TRIES = 5
_LOCK_PAUSE_S = 0.05


@dataclass(frozen=True)
class CellMeta:
    """Where a cell was measured.

    Attributes:
        boot: Identity of the guest lifetime.
        host: Name of the KVM host.
        host_kind: `emulated`, `nested`, `physical`, or `simulated` where nothing was measured.
        build_id: Build-id of the module under test as loaded; empty where it is not known.
    """

    boot: str
    host: str
    host_kind: str
    build_id: str = ""


class Store:
    """A run folder, opened for writing by this process alone. A context manager.

    Made by `create` or `open`.

    Attributes:
        path: The run folder.
        run_id: The run's name; the folder's, unless the user renamed it.
        plan: The plan of the run.
    """

    def __init__(self, path: Path, run_id: str, plan: Plan, lock: IO[str]) -> None:
        self.path = path
        self.run_id = run_id
        self.plan = plan
        self._lock = lock
        self._done = tables.done_cells(path)
        self._consolidated = 0
        self._attempts = _read_attempts(path)
        self._attempt: dict[str, Any] | None = None

    @classmethod
    def create(
        cls,
        plan: Plan,
        runs_dir: Path | None = None,
        now: datetime | None = None,
        files: Mapping[str, str] | None = None,
    ) -> Self:
        """Make the folder of a new run, locked; it appears under its name with its plan inside.

        Args:
            plan: What to measure.
            runs_dir: Folder of run folders; the settings' when None.
            now: Time in the run's name; the present when None.
            files: Text by path of what else belongs to the run: its own experiment and patches.

        Raises:
            InfrastructureError: the disk is full, or the folder cannot be written.
        """
        runs_dir = runs_dir or settings().runs_dir
        stamp = (now or datetime.now(UTC)).astimezone(UTC)
        run_id = f"{stamp:%Y%m%dT%H%M%S}-{plan.experiment}-{plan.profile}-{secrets.token_hex(2)}"
        temporary = runs_dir / f"{UNFINISHED}{run_id}"
        path = runs_dir / run_id
        with writing(path):
            runs_dir.mkdir(parents=True, exist_ok=True)
            _remove_orphans(runs_dir)
            temporary.mkdir()
        lock: IO[str] | None = None
        try:
            with writing(path):
                lock = _take_lock(temporary)
                (temporary / tables.CELLS).mkdir()
                write_new(temporary / PLAN, plan.to_json().encode())
                for name, text in (files or {}).items():
                    (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                    write_new(temporary / name, text.encode("utf-8", "surrogateescape"))
                run = {
                    "id": run_id,
                    "created": stamp.isoformat(timespec="seconds"),
                    "vringlab": __version__,
                    "experiment": plan.experiment,
                    "profile": plan.profile,
                    "cells": len(plan.cells),
                }
                replace_json(
                    temporary / PROVENANCE,
                    {"format": FORMAT, "run": run, "seeds": {"plan": plan.seed}},
                )
                temporary.rename(path)
                sync_folder(runs_dir)
        except BaseException:
            if lock is not None:
                lock.close()
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return cls(path, run_id, plan, lock)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a run to continue it; removes what a killed writer left half-written.

        Raises:
            UserError: no run folder, a recorded bundle, damaged, or another process has it open.
            InfrastructureError: the folder cannot be written.
        """
        if (path / BUNDLE).exists():
            raise UserError(
                f"{path} is a recorded bundle, which cannot be continued",
                remedy="start a new run of its experiment",
            )
        plan = read_plan(path)
        provenance = read_provenance(path)
        with writing(path):
            lock = _take_lock(path)
            remove_unfinished(path)
            (path / tables.CELLS).mkdir(exist_ok=True)
            remove_unfinished(path / tables.CELLS)
        return cls(path, str(provenance["run"]["id"]), plan, lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give up the lock; the folder stays as it is."""
        self._lock.close()

    # What is done and what is left

    def done(self) -> Set[str]:
        """Ids of the cells that are there: a live view, not a copy."""
        return self._done

    def rescan(self) -> None:
        """Look again at what is done: a signal can fall between a rename and its record."""
        self._done = tables.done_cells(self.path)

    def complete_blocks(self) -> set[int]:
        """Numbers of the blocks of which every cell is there."""
        there = Counter(cell.block for cell in self.plan.cells if cell.cell_id in self._done)
        return {n for n, size in self.plan.block_sizes.items() if there[n] == size}

    def remaining(self) -> list[Cell]:
        """Plan minus store: all cells of the blocks that are not complete, in the plan's order."""
        complete = self.complete_blocks()
        return [cell for cell in self.plan.cells if cell.block not in complete]

    def begin_boot(self, planned: str, host: str = "") -> str:
        """An identity for a new guest lifetime, recorded before the guest starts.

        The first is the planned name, later ones of the same plan are `b01r1`, `b01r2`, ...: a
        guest that was booted again is another cluster to the statistics.

        Args:
            planned: Name of the boot in the plan.
            host: Where it will run, when the run has several hosts.

        Raises:
            InfrastructureError: the disk is full, or the folder cannot be written.
        """
        boots = self.provenance().get("boots", {})
        earlier = sum(1 for boot in boots.values() if boot["planned"] == planned)
        identity = f"{planned}r{earlier}" if earlier else planned
        started = datetime.now(UTC).isoformat(timespec="seconds")
        record = {"planned": planned, "started": started, **({"host": host} if host else {})}
        self.update_provenance({"boots": {identity: record}})
        return identity

    # Cells

    def read_cell(self, cell_id: str) -> dict[str, Any]:
        """The sample.json of a cell that is done.

        Raises:
            UserError: the file is damaged.
        """
        return tables.read_sample(self.path / tables.CELLS / cell_id / "sample.json")

    def write_cell(self, cell: Cell, outcome: Outcome, meta: CellMeta) -> Path:
        """Keep one measured cell; afterwards it is done, and it was not there before.

        Args:
            cell: The cell of the plan.
            outcome: What its workload gave, valid or not.
            meta: Where it was measured.

        Returns:
            The cell's folder.

        Raises:
            InfrastructureError: the disk is full, or the folder cannot be written; the cell is
                then not done, and nothing of it is left.
        """
        path = self.path / tables.CELLS / cell.cell_id
        temporary = path.with_name(f"{UNFINISHED}{cell.cell_id}")
        document = _sample_document(cell, outcome, meta)
        with writing(path):
            try:
                temporary.mkdir()
                for name, content in outcome.raw.items():
                    if "/" in name or name in ("", ".", "..", "sample.json"):
                        raise InfrastructureError(
                            f"workload {cell.workload} named a raw file {name!r}",
                            remedy="this is a fault of the workload: report it",
                        )
                    write_new(temporary / name, content)
                text = json.dumps(document, default=str, allow_nan=False)
                write_new(temporary / "sample.json", f"{text}\n".encode())
                sync_folder(temporary)
                temporary.rename(path)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            sync_folder(path.parent)
        self._done.add(cell.cell_id)
        return path

    def supersede(self, cells: Iterable[Cell]) -> int:
        """Put aside those of `cells` that are done, because their block begins again.

        They stay on disk under `superseded/`, out of the tables.

        Returns:
            How many there were.

        Raises:
            InfrastructureError: the folder cannot be written.
        """
        old = [cell.cell_id for cell in cells if cell.cell_id in self._done]
        if not old:
            return 0
        target = self.path / tables.SUPERSEDED
        with writing(target):
            target.mkdir(exist_ok=True)
            for cell_id in old:
                boot = self.read_cell(cell_id)["boot"]
                (self.path / tables.CELLS / cell_id).rename(target / f"{cell_id}@{boot}")
                self._done.discard(cell_id)
            sync_folder(target)
            sync_folder(self.path / tables.CELLS)
        return len(old)

    def consolidate(self, *, force: bool = True) -> None:
        """Bring samples.parquet and histograms.parquet up to date.

        Args:
            force: Do it now. Otherwise only when the cells grew by a quarter since the last time,
                so that doing it again and again costs a constant number of times the run's size.

        Raises:
            InfrastructureError: the disk is full, or the folder cannot be written.
        """
        if force or len(self._done) >= max(1.25 * self._consolidated, 1):
            tables.consolidate(self.path, self.plan, self.run_id)
            self._consolidated = len(self._done)

    # Provenance and time

    def provenance(self) -> dict[str, Any]:
        """The content of provenance.json.

        Raises:
            UserError: the file is missing or damaged.
        """
        return read_provenance(self.path)

    def update_provenance(self, values: Mapping[str, Any]) -> None:
        """Merge `values` into provenance.json; nested mappings merge, anything else replaces.

        Raises:
            InfrastructureError: the disk is full, or the folder cannot be written.
        """
        old = self.provenance()
        new = merged(old, values)
        if new != old:
            replace_json(self.path / PROVENANCE, new)

    def paths(self) -> tuple[PathPass, ...]:
        """What was counted to see which path the packets took.

        Raises:
            UserError: the file is damaged.
        """
        return read_paths(self.path)

    def write_paths(self, passes: Sequence[PathPass]) -> None:
        """Add passes; one of the same arm and point is replaced.

        Raises:
            UserError: the file is damaged.
            InfrastructureError: the disk is full, or the folder cannot be written.
        """
        known = {path_key(item.arm, item.workload, item.params): item for item in self.paths()}
        known |= {path_key(item.arm, item.workload, item.params): item for item in passes}
        records = [item.as_record() for item in known.values()]
        replace_json(self.path / PATHS, {"format": paths.FORMAT, "passes": records})

    def write_time(
        self,
        spent: Mapping[str, float],
        status: str = "running",
        hosts: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """Record in time.json where this attempt's time went; earlier attempts are kept.

        Args:
            spent: Seconds by phase so far.
            status: How the attempt stands: `running` until it ends.
            hosts: The same by host, where several ran at once: `spent` is then their sum.

        Raises:
            InfrastructureError: the disk is full, or the folder cannot be written.
        """
        if self._attempt is None:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            self._attempt = {"recorded": now}
            self._attempts.append(self._attempt)
        self._attempt.update(status=status, total_s=sum(spent.values()), phases=dict(spent))
        if hosts:
            self._attempt["hosts"] = dict(hosts)
        phases: Counter[str] = Counter()
        for attempt in self._attempts:
            phases.update(attempt["phases"])
        replace_json(
            self.path / TIME,
            {
                "format": FORMAT,
                "total_s": sum(phases.values()),
                "phases": dict(phases),
                "attempts": self._attempts,
            },
        )


def own_files(path: Path) -> tuple[str, ...]:
    """Files of a run's own experiment, from its folder; none where it ran the collection's."""
    if not (path / OF_RUN).is_file():
        return ()
    patches = sorted((path / "patches").rglob("*.patch"))
    return (OF_RUN, *(item.relative_to(path).as_posix() for item in patches))


def path_key(arm: str, workload: str, params: Mapping[str, object]) -> str:
    """What names a pass within a run."""
    return json.dumps([arm, workload, dict(params)], sort_keys=True)


def read_paths(path: Path) -> tuple[PathPass, ...]:
    """What a run folder or bundle says of the paths that packets took; none where it says nothing.

    Raises:
        UserError: the file is damaged, or of a format that this version does not know.
    """
    file = path / PATHS
    if not file.exists():
        return ()
    document = read_json(file)
    if document.get("format") != paths.FORMAT:
        raise UserError(
            f"{file} has format {document.get('format')}; this version reads {paths.FORMAT}",
            remedy="use the version of vringlab that wrote it",
        )
    try:
        return tuple(paths.from_record(record) for record in document["passes"])
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{file} is damaged: {error}", remedy="delete it; the next resume counts again"
        ) from None


def read_plan(path: Path) -> Plan:
    """The plan of a run folder or bundle.

    Raises:
        UserError: no such folder, no plan in it, or a damaged one.
    """
    if not path.is_dir():
        raise UserError(
            f"no run folder {path}", remedy="`vringlab show` without a name lists the runs"
        )
    source = path / PLAN
    try:
        return Plan.from_json(source.read_text(encoding="utf-8"), str(source))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} is not a run folder: cannot read {PLAN} ({error})",
            remedy="name a folder that `vringlab run` made",
        ) from None


def read_provenance(path: Path) -> dict[str, Any]:
    """The content of a run folder's provenance.json.

    Raises:
        UserError: the file is missing, damaged, or of a format that this version does not know.
    """
    document = read_json(path / PROVENANCE)
    if document.get("format") != FORMAT:
        raise UserError(
            f"{path / PROVENANCE} has format {document.get('format')}; this version of vringlab "
            f"reads {FORMAT}",
            remedy="use the version of vringlab that wrote the run",
        )
    run = document.get("run")
    if not isinstance(run, dict) or "id" not in run:
        raise UserError(
            f"{path / PROVENANCE} is damaged: it does not name its run",
            remedy="restore the file from a copy, or measure again",
        )
    return document


def _read_attempts(path: Path) -> list[dict[str, Any]]:
    """Earlier attempts of time.json; a lost record of time is no reason to lose a run."""
    try:
        attempts = read_json(path / TIME)["attempts"]
    except (UserError, KeyError):
        return []
    return [item for item in attempts if isinstance(item.get("phases"), dict)]


def _number(value: float) -> float | None:
    # JSON has no NaN; the tables turn the null back into one.
    return value if math.isfinite(value) else None


def _sample_document(cell: Cell, outcome: Outcome, meta: CellMeta) -> dict[str, Any]:
    return {
        "format": tables.FORMAT,
        "cell": cell_document(cell),
        "boot": meta.boot,
        "host": meta.host,
        "host_kind": meta.host_kind,
        "build_id": meta.build_id,
        "started": outcome.started,
        "window_s": outcome.window_s,
        "metrics": [
            {"name": metric.name, "value": _number(metric.value), "unit": metric.unit}
            for metric in outcome.metrics
        ],
        "histograms": [
            {"metric": item.metric, "unit": item.unit, "bins": item.bins}
            for item in outcome.histograms
        ],
        "problems": list(outcome.problems),
        "warnings": list(outcome.warnings),
        "context": dict(outcome.context),
        "raw": sorted(outcome.raw),
    }


def _take_lock(folder: Path) -> IO[str]:
    """Lock a run folder for this process; the kernel frees the lock when the process ends.

    Raises:
        UserError: another process holds it.
    """
    stream = (folder / LOCK).open("a+", encoding="ascii")
    try:
        if not _flock(stream):
            stream.seek(0)
            owner = stream.read().strip() or "unknown"
            raise UserError(
                f"run {folder.name} is being measured by process {owner}",
                remedy="wait for it to end, or stop it with Ctrl-C (SIGTERM works too)",
            )
        stream.truncate(0)
        stream.write(f"{os.getpid()}\n")
        stream.flush()
    except BaseException:
        stream.close()
        raise
    return stream


def _flock(stream: IO[str]) -> bool:
    # A listing of runs holds a shared lock for an instant to see whether anyone has it.
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_PAUSE_S)
        else:
            return True
    return False


def lock_owner(folder: Path) -> int | None:
    """Process that has the run open, or None."""
    try:
        with (folder / LOCK).open("r", encoding="ascii") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(stream.read().strip() or 0)
    except (OSError, ValueError):
        return None
    return None


def _remove_orphans(runs_dir: Path) -> None:
    """Remove run folders whose creator was killed before they had their name."""
    for folder in runs_dir.glob(f"{UNFINISHED}*"):
        with_lock = (folder / LOCK).exists()
        if (with_lock and lock_owner(folder) is None) or (
            not with_lock and time.time() - folder.stat().st_mtime > _ORPHAN_AGE_S
        ):
            shutil.rmtree(folder, ignore_errors=True)
