"""Finding run folders: all, the latest, or one by name."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from vringlab.campaign import store, tables
from vringlab.errors import UserError
from vringlab.settings import settings


@dataclass(frozen=True)
class RunInfo:
    """One line of the list of runs.

    Attributes:
        run_id: Name of the run.
        path: Its folder.
        experiment: Name of its experiment.
        profile: Name of its profile.
        done: Cells measured.
        total: Cells planned.
        state: `running`, `complete`, `decided` (stopped early on purpose), `incomplete`,
            `recorded` (a bundle) or `damaged`.
        pid: The process that measures it now, or None.
    """

    run_id: str
    path: Path
    experiment: str
    profile: str
    done: int
    total: int
    state: str
    pid: int | None = None


def describe(path: Path) -> RunInfo:
    """What a run folder is, without reading its plan or its cells; never fails."""
    try:
        run = store.read_provenance(path)["run"]
        total = int(run["cells"])
        names = str(run["id"]), path, str(run["experiment"]), str(run["profile"])
    except (UserError, KeyError, ValueError, TypeError):
        return RunInfo(path.name, path, "", "", len(tables.done_cells(path)), 0, "damaged")
    if (path / store.BUNDLE).exists():
        return RunInfo(*names, total, total, "recorded")
    pid = store.lock_owner(path)
    done = len(tables.done_cells(path))
    if pid is not None:
        state = "running"
    elif done >= total:
        state = "complete"
    else:
        state = "decided" if run.get("status") == "decided" else "incomplete"
    return RunInfo(*names, done, total, state, pid)


def _folders(runs_dir: Path) -> list[Path]:
    if not runs_dir.is_dir():
        return []
    return sorted(
        path for path in runs_dir.iterdir() if not path.name.startswith(".") and path.is_dir()
    )


def list_runs(runs_dir: Path | None = None) -> list[RunInfo]:
    """All runs, the oldest first."""
    return [describe(path) for path in _folders(runs_dir or settings().runs_dir)]


def latest(experiment: str | None = None, runs_dir: Path | None = None) -> Path:
    """Folder of the newest run, of one experiment when it is named.

    Raises:
        UserError: there is none.
    """
    runs_dir = runs_dir or settings().runs_dir
    for path in reversed(_folders(runs_dir)):
        info = describe(path)
        if info.state != "damaged" and experiment in (None, info.experiment):
            return path
    of = f" of {experiment}" if experiment else ""
    raise UserError(
        f"no run{of} in {runs_dir}", remedy="make one: vringlab run EXPERIMENT --profile quick"
    )


def find_run(name: str, runs_dir: Path | None = None) -> Path:
    """The folder of a run by its path, its id, a unique part of its id, or `latest`.

    Raises:
        UserError: there is none, or more than one; lists those that come close.
    """
    runs_dir = runs_dir or settings().runs_dir
    if name == "latest":
        return latest(runs_dir=runs_dir)
    path = Path(name)
    if (path / store.PLAN).is_file():
        return path
    folders = {folder.name: folder for folder in _folders(runs_dir)}
    if name in folders:
        return folders[name]
    parts = [run_id for run_id in folders if name and name in run_id]
    if len(parts) == 1:
        return folders[parts[0]]
    if parts:
        raise UserError(f"{name!r} names {len(parts)} runs", remedy=f"say which: {_some(parts)}")
    close = difflib.get_close_matches(name, folders, n=3, cutoff=0.4) or sorted(folders)[-3:]
    raise UserError(
        f"no run {name!r} in {runs_dir}",
        remedy=f"choose one of: {_some(close)}" if close else "make one: vringlab run EXPERIMENT",
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[-5:])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
