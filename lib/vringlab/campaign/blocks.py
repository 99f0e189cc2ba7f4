"""Blocks of cells measured on one host, a guest lifetime at a time, and what all hosts share.

`HostRun` is one host's part of an execution, in a thread of its own where there are several;
`Campaign` is what they have in common: the store, which only this process writes, the counts, and
the listener. Its methods may be called by any of the threads.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

from vringlab.campaign.budget import Budget
from vringlab.campaign.experiment import FindWorkload
from vringlab.campaign.paths import summary
from vringlab.campaign.plan import Cell, Plan, guest_options
from vringlab.campaign.progress import Event, Kind, Listener, headline
from vringlab.campaign.store import CellMeta, Store, path_key
from vringlab.errors import (
    HostLost,
    InfrastructureError,
    MeasurementInvalid,
    TransientError,
    UserError,
)
from vringlab.workloads.base import Outcome

if TYPE_CHECKING:
    from vringlab.campaign.runner import Session

Until = Callable[[Store], bool]

#: What a session knows of its own host, and not of the run.
_OF_HOST = ("host", "guest", "pinning")


class Stopped(Exception):  # noqa: N818 - it is no error
    """The execution ends: somebody asked for it, or another host failed for all."""


@dataclass
class _Pace:
    """Estimates the seconds left from what boots and cells took so far."""

    boots: int = 0
    boots_s: float = 0.0
    cells_s: float = 0.0
    planned_s: float = 0.0

    def left(self, planned_s: float, boots: int) -> float | None:
        if not self.planned_s:
            return None
        each_boot = self.boots_s / self.boots if self.boots else 0.0
        return planned_s * self.cells_s / self.planned_s + boots * each_boot


@dataclass
class Campaign:
    """What the hosts of one execution share.

    Attributes:
        store: The run, open for writing.
        progress: Told of everything that happens, by one thread at a time.
        until: Asked after each complete block whether the run is decided.
        find: Finds a workload by name.
        several: Whether there is more than one host.
        stop: Set when all hosts shall end.
        lock: Held by whoever uses the store or the counts.
        measured: Cells measured by this execution.
        invalid: How many of those were invalid.
        active: Hosts that measure now.
    """

    store: Store
    progress: Listener
    until: Until | None
    find: FindWorkload
    several: bool = False
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.RLock = field(default_factory=threading.RLock)
    measured: int = 0
    invalid: int = 0
    active: int = 0
    pace: _Pace = field(default_factory=_Pace)
    boots_left: int = 0
    left_s: float = 0.0
    enough: bool = False
    build_ids: dict[str, str] = field(default_factory=dict)
    unseen: bool = False
    _spent: dict[str, Mapping[str, float]] = field(default_factory=dict)
    _kind: str | None = None
    _watching: str | None = None

    @property
    def plan(self) -> Plan:
        """The run's plan."""
        return self.store.plan

    @cached_property
    def options(self) -> Mapping[str, object]:
        """How guests are booted.

        Raises:
            UserError: two workloads contradict each other.
        """
        return guest_options(self.plan, self.find)

    @cached_property
    def points(self) -> Mapping[str, Mapping[str, Cell]]:
        """A cell for each arm and point of the plan, by arm and by the name of its path pass."""
        found: dict[str, dict[str, Cell]] = {}
        for cell in self.plan.cells:
            key = path_key(cell.arm, cell.workload, cell.params)
            found.setdefault(cell.arm, {}).setdefault(key, cell)
        return found

    def decided(self, budget: Budget) -> bool:
        """Whether what is measured is enough; once it is, it stays so."""
        if self.until is None:
            return False
        with budget.phase("analyse"), self.lock:
            self.enough = self.enough or self.until(self.store)
            return self.enough

    def going_on(self) -> None:
        """Do nothing while the execution goes on.

        Raises:
            Stopped: it does not.
        """
        if self.stop.is_set():
            raise Stopped

    # Time

    def note(self, host: str, budget: Budget) -> None:
        """Take down where a host's time went until now; called by the host's own thread."""
        spent = budget.spent()
        with self.lock:
            self._spent[host] = spent

    def spent(self) -> dict[str, float]:
        """Seconds by phase, of all hosts together."""
        with self.lock:
            total: Counter[str] = Counter()
            for spent in self._spent.values():
                total.update(spent)
            return dict(total)

    def write_time(self, status: str = "running") -> None:
        """Record where the time went; by host too where there are several.

        Raises:
            InfrastructureError: the disk is full, or the folder cannot be written.
        """
        with self.lock:
            hosts = {name: dict(spent) for name, spent in self._spent.items() if name}
            self.store.write_time(self.spent(), status, hosts if self.several else {})

    # What must not be mixed in one run

    def admit(self, name: str, kind: str, facts: Mapping[str, object]) -> None:
        """Record a host that begins, and refuse to mix kinds of host in one run.

        A ratio measured under emulation says nothing of one measured on hardware, and simulated
        figures must never stand beside measured ones.

        Raises:
            UserError: another kind of host, or other builds of the arms, than the run has.
        """
        with self.lock:
            known = self.store.provenance()
            before = self._kind or (known["run"].get("host_kind") if self.store.done() else None)
            if before not in (None, kind):
                raise UserError(
                    f"run {self.store.run_id} was begun on a host of kind {before}, and "
                    f"{name} is {kind}",
                    remedy="resume it on the host it was begun on, or start a new run",
                )
            first = self._kind is None
            self._kind = kind
            if self.store.done():
                self.build_ids = {**_build_ids(known), **self.build_ids}
            for arm, build_id in _build_ids(facts).items():
                self.check_build(arm, build_id)
            self.record(name, facts)
            kept = bool(self.store.done()) or not first
            names = str(known["run"].get("host") or name).split(", ") if kept else []
            self.store.update_provenance(
                {
                    "run": {
                        "host": ", ".join(dict.fromkeys([*names, name])),
                        "host_kind": kind,
                        "status": "running",
                    }
                }
            )

    def record(self, name: str, facts: Mapping[str, object]) -> None:
        """Keep what a session knows; of several hosts each has its own place.

        What is said of `host`, `guest` and `pinning` without a name is then the first host's. How
        a guest came up is kept by its name alone, see `HostRun.boot`.
        """
        facts = {key: value for key, value in facts.items() if key != "boot"}
        with self.lock:
            if not self.several:
                self.store.update_provenance(facts)
                return
            own = {key: value for key, value in facts.items() if key in _OF_HOST}
            shared = {key: value for key, value in facts.items() if key not in _OF_HOST}
            hosts = self.store.provenance().get("hosts", {})
            if not hosts or next(iter(hosts)) == name:
                shared |= own
            # Sessions may live in other processes, whose command lines say nothing.
            self.store.update_provenance({**shared, "command": sys.argv, "hosts": {name: own}})

    def check_build(self, arm: str, build_id: str) -> None:
        """Refuse another build under an arm's name; before it is recorded, or it would pass next.

        Raises:
            UserError: the run measured another build of that arm.
        """
        with self.lock:
            before = self.build_ids.setdefault(arm, build_id)
        if before != build_id:
            raise UserError(
                f"arm {arm} is another build ({build_id}) than the one that this run measured "
                f"before ({before})",
                remedy="restore the sources, compiler and base kernel of the first build, or "
                "start a new run",
            )

    @contextmanager
    def watching(self, name: str) -> Iterator[bool]:
        """Whether this host is the one to see which path packets take; one at a time is."""
        with self.lock:
            free = self._watching is None and not self.unseen
            if free:
                self._watching = name
        try:
            yield free
        finally:
            if free:
                self._watching = None

    # Progress

    def count(self, cell: Cell, outcome: Outcome, seconds: float) -> None:
        """Count a cell that is done; `seconds` is what it took, the switch before it included."""
        with self.lock:
            self.measured += 1
            self.invalid += not outcome.valid
            self.pace.planned_s += cell.duration_s
            self.pace.cells_s += seconds
            self.left_s -= cell.duration_s

    def tell(
        self,
        kind: Kind,
        message: str,
        host: str = "",
        boot: str = "",
        cell: Cell | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        """Tell the listener."""
        with self.lock:
            # The boots that run now have been waited for already.
            hosts = max(1, self.active)
            left = self.pace.left(self.left_s, max(0, self.boots_left - hosts))
            self.progress(
                Event(
                    kind=kind,
                    run_id=self.store.run_id,
                    index=len(self.store.done()),
                    total=len(self.plan.cells),
                    message=message,
                    left_s=None if left is None else left / hosts,
                    boot=boot,
                    cell=cell,
                    outcome=outcome,
                    host=host if self.several else "",
                )
            )


@dataclass
class HostRun:
    """One host's part of an execution.

    Attributes:
        campaign: What it shares with other hosts.
        session: The host with its guests.
        name: What the host is called in the run.
    """

    campaign: Campaign
    session: Session
    name: str
    _mark: float = 0.0
    _begun: bool = False

    @property
    def budget(self) -> Budget:
        """Where this host's time goes."""
        return self.session.time_budget

    def begin(self) -> None:
        """Record the host; see `Campaign.admit`.

        Raises:
            UserError: as there.
        """
        self.campaign.admit(self.name, self.session.host_kind, self.session.provenance())

    def boot(self, planned: str, waiting: list[list[Cell]]) -> bool:
        """Measure the blocks of one planned boot; True when the run is decided.

        A guest that dies is replaced once: what kills it twice will not go away by itself. With
        several hosts that holds while the host stands; a host that is lost stays lost.

        Args:
            planned: Name of the boot in the plan.
            waiting: Its blocks; those that are done are taken out, whatever happens.

        Raises:
            Stopped: the execution ends.
            TransientError: a guest died twice, or the host was lost (`HostLost`).
            UserError, InfrastructureError: as for `runner.execute`.
        """
        retried = False
        while waiting:
            try:
                # What failed once is booted.
                edition = 0 if retried else self.campaign.plan.edition(planned)
                identity = self._start_guest(planned, edition)
                while waiting:
                    self.campaign.going_on()
                    self._block(identity, waiting[0])
                    del waiting[0]
                    self._begun = False
                    with self.budget.phase("analyse"), self.campaign.lock:
                        self.campaign.store.consolidate(force=False)
                    if self.campaign.decided(self.budget):
                        self._paths(identity)
                        return True
                self._paths(identity)
            except TransientError as error:
                if retried or (self.campaign.several and isinstance(error, HostLost)):
                    raise
                retried = True
                self._tell("retry", f"boot {planned} failed and is repeated once: {error.message}")
        with self.campaign.lock:
            self.campaign.boots_left -= 1
        return False

    def lost(self, waiting: list[list[Cell]]) -> list[Cell]:
        """The cells of the block in which a failure fell, taken out of `waiting`; none between."""
        return waiting.pop(0) if self._begun and waiting else []

    def end(self) -> None:
        """Record what is known at the end."""
        self.campaign.record(self.name, self.session.provenance())

    def _tell(self, kind: Kind, message: str, boot: str = "", **more: object) -> None:
        self.campaign.tell(kind, message, self.name, boot, **more)  # type: ignore[arg-type]  # cell and outcome

    def _start_guest(self, planned: str, edition: int) -> str:
        campaign = self.campaign
        self._begun = False
        campaign.going_on()
        with campaign.lock:
            identity = campaign.store.begin_boot(planned, self.name if campaign.several else "")
        self._tell("boot", f"starting guest {identity}", identity)
        start = time.monotonic()
        with self.budget.phase("boot"):
            self.session.boot(identity, campaign.options, edition)
        with campaign.lock:
            campaign.pace.boots += 1
            campaign.pace.boots_s += time.monotonic() - start
        known = self.session.provenance()
        campaign.record(self.name, known)
        how = known.get("boot")
        if isinstance(how, Mapping):
            with campaign.lock:
                campaign.store.update_provenance({"boots": {identity: dict(how)}})
        return identity

    def _block(self, identity: str, cells: Sequence[Cell]) -> None:
        """Measure a whole block in the guest that runs now."""
        campaign, session = self.campaign, self.session
        self._begun = True
        with campaign.lock:
            done = campaign.store.done()
            # The estimate of the time left counted these as done.
            again = sum(cell.duration_s for cell in cells if cell.cell_id in done)
            if campaign.store.supersede(cells) and campaign.measured:
                campaign.left_s += again
        for _, visit in groupby(cells, lambda cell: cell.arm_name):
            self._mark = time.monotonic()
            arm_cells = list(visit)
            build_id = self._switch(identity, arm_cells[0].arm, arm_cells[0].arm_name)
            host = self.name if campaign.several else session.host
            meta = CellMeta(identity, host, session.host_kind, build_id)
            for cell in arm_cells:
                campaign.going_on()
                self._cell(cell, meta)
                with self.budget.phase("collect"):
                    campaign.note(self.name, self.budget)
                    campaign.write_time()

    def _switch(self, identity: str, arm: str, shown: str) -> str:
        self._tell("switch", f"loading {shown}", identity)
        with self.budget.phase("switch"):
            build_id = self.session.switch(arm) or ""
        if build_id:
            with self.campaign.lock:
                new = arm not in self.campaign.build_ids
                self.campaign.check_build(arm, build_id)
                if new:
                    self.campaign.store.update_provenance({"arms": {arm: {"build_id": build_id}}})
        return build_id

    def _paths(self, identity: str) -> None:
        """See which path the packets of each arm take, where that was not seen yet.

        After the blocks of a boot, so that no measurement follows it in the same guest. That the
        path could not be seen does not fail a run; its verdicts say so.
        """
        if not self.session.sees_paths:
            return
        with self.campaign.watching(self.name) as mine:
            if mine:
                self._watch_paths(identity)

    def _watch_paths(self, identity: str) -> None:
        campaign, store = self.campaign, self.campaign.store
        with campaign.lock:
            seen = {path_key(item.arm, item.workload, item.params) for item in store.paths()}
        for arm, cells in campaign.points.items():
            points = [
                (cell.workload, cell.params) for key, cell in cells.items() if key not in seen
            ]
            if not points:
                continue
            with self.budget.phase("path"):
                try:
                    build_id = self.session.switch(arm)
                    if build_id:
                        campaign.check_build(arm, build_id)
                    found = self.session.paths(arm, points)
                except TransientError:
                    raise
                except InfrastructureError as error:
                    campaign.unseen = True
                    self._tell("path", f"the path could not be seen: {error.message}")
                    with campaign.lock:
                        store.update_provenance({"path_problem": error.message})
                    return
            with self.budget.phase("collect"), campaign.lock:
                store.write_paths(found)
                known = [item for item in store.paths() if item.arm == arm]
                store.update_provenance({"exercised": {arm: summary(known)}})
            for item in found:
                shown = ", ".join(f"{name}={value}" for name, value in item.params.items())
                what = f"{arm} {item.workload} {shown}".rstrip()
                self._tell("path", f"{what}: {item.headline}", identity)

    def _cell(self, cell: Cell, meta: CellMeta) -> None:
        shown = ", ".join(f"{name}={value}" for name, value in cell.params.items())
        what = f"{cell.arm_name} {cell.workload} {shown}".rstrip()
        self._tell("cell", what, meta.boot, cell=cell)
        started = datetime.now(UTC).isoformat(timespec="milliseconds")
        before = self.budget.spent()["measure"]
        start = time.monotonic()
        with self.budget.phase("prepare"):
            try:
                outcome = self.session.measure(cell.workload, cell.params, cell.duration_s)
            except MeasurementInvalid as error:
                outcome = Outcome(metrics=(), problems=(error.message,))
        # Only the timed window counts as measuring; what surrounds it is preparation.
        window = min(outcome.window_s, time.monotonic() - start)
        own = self.budget.spent()["measure"] - before
        self.budget.move(window - own, "prepare", "measure")
        self.campaign.going_on()
        outcome = _checked(outcome, started)
        with self.budget.phase("collect"), self.campaign.lock:
            self.campaign.store.write_cell(cell, outcome, meta)
        now = time.monotonic()
        self.campaign.count(cell, outcome, now - self._mark)
        self._mark = now
        self._tell(
            "cell-done", f"{what}: {headline(outcome)}", meta.boot, cell=cell, outcome=outcome
        )


def _build_ids(provenance: Mapping[str, object]) -> dict[str, str]:
    """Build-ids by arm, of the arms that a provenance names."""
    arms = provenance.get("arms")
    if not isinstance(arms, Mapping):
        return {}
    return {
        str(arm): str(facts["build_id"])
        for arm, facts in arms.items()
        if isinstance(facts, Mapping) and facts.get("build_id")
    }


def _checked(outcome: Outcome, started: str) -> Outcome:
    """An outcome that says when it began, and in which a figure that is no number is a problem."""
    broken = tuple(
        f"{metric.name} is {metric.value}, not a finite number"
        for metric in outcome.metrics
        if not math.isfinite(metric.value)
    )
    return replace(
        outcome,
        problems=(*outcome.problems, *broken),
        started=outcome.started or started,
    )
