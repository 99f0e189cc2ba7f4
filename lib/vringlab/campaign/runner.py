"""Executes a plan: boots guests, loads arms, measures cells and keeps each as it is done.

Cells are compared within a block, so a block belongs to one guest lifetime. When a guest dies or
the run is killed in the middle of a block, the whole block is measured again under a new boot
identity, and what was measured of it before is put aside. Complete blocks are kept as they are.
That happens for failed machines only: no measurement is repeated because of its result.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Literal, Protocol

from vringlab.campaign.budget import Budget
from vringlab.campaign.experiment import FindWorkload, Value
from vringlab.campaign.paths import PathPass, summary
from vringlab.campaign.plan import Cell, Plan, guest_options
from vringlab.campaign.progress import Event, Kind, Listener, clock, headline, silent
from vringlab.campaign.store import CellMeta, Store, path_key
from vringlab.errors import (
    InfrastructureError,
    MeasurementInvalid,
    TransientError,
    UserError,
    VringlabError,
)
from vringlab.workloads import base
from vringlab.workloads.base import Outcome

Status = Literal["complete", "decided", "interrupted", "failed"]


class Session(Protocol):
    """A KVM host and the guest on it, held for the length of a campaign. A context manager.

    Attributes:
        host: Name of the KVM host.
        host_kind: `emulated`, `nested`, `physical`, or `simulated` for the fake.
        time_budget: Where the wall time goes. The runner enters `boot`, `switch`, `prepare` and
            `collect` around the calls below; the session may enter finer phases inside them.
        sees_paths: Whether `paths` has anything to count.
    """

    @property
    def host(self) -> str: ...  # noqa: D102 - described above

    @property
    def host_kind(self) -> str: ...  # noqa: D102

    @property
    def time_budget(self) -> Budget: ...  # noqa: D102

    @property
    def sees_paths(self) -> bool: ...  # noqa: D102

    def boot(self, boot: str, options: Mapping[str, object]) -> None:
        """End the guest, if there is one, and boot a fresh one.

        Args:
            boot: Identity of the new lifetime, for logs.
            options: Keyword arguments of the guest's specification.

        Raises:
            TransientError: the guest did not come up this time.
            InfrastructureError: it cannot come up.
        """
        ...

    def switch(self, arm: str) -> str | None:
        """Load an arm's module, also when the same arm is loaded, and verify its build-id.

        Returns:
            The build-id of the module as loaded; None where there is none to see.

        Raises:
            TransientError: the guest died.
            InfrastructureError: the swap did not take.
        """
        ...

    def measure(self, workload: str, params: Mapping[str, Value], duration_s: float) -> Outcome:
        """Run a workload once on the arm that is loaded.

        Raises:
            TransientError: the guest died; the runner boots another one.
            InfrastructureError: tools or machines failed.
        """
        ...

    def paths(
        self, arm: str, points: Sequence[tuple[str, Mapping[str, Value]]]
    ) -> Sequence[PathPass]:
        """See which path packets take: run points untimed on the loaded arm, counting functions.

        Args:
            arm: The arm that is loaded.
            points: Workloads with their parameters.

        Returns:
            One pass for each point.

        Raises:
            TransientError: the guest died.
            InfrastructureError: tools failed, or nothing could be counted.
        """
        ...

    def provenance(self) -> Mapping[str, object]:
        """What is known by now of host, guest, kernels, tools and pinning."""
        ...


SessionFactory = Callable[[], AbstractContextManager[Session]]
Until = Callable[[Store], bool]


@dataclass(frozen=True)
class RunResult:
    """How an execution ended.

    Attributes:
        run_id: The run.
        path: Its folder.
        status: `complete`, or `decided` when `until` ended it; `interrupted` inside `Interrupted`.
        done: Cells that the run holds now.
        total: Cells of the plan.
        measured: Cells that this execution measured.
        invalid: How many of those were invalid.
        spent: Seconds by phase of this execution.
    """

    run_id: str
    path: Path
    status: Status
    done: int
    total: int
    measured: int
    invalid: int
    spent: Mapping[str, float]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM ended a run cleanly; `str()` says how to continue.

    Attributes:
        result: What was done until then.
    """

    def __init__(self, result: RunResult) -> None:
        super().__init__(
            f"interrupted: {result.done} of {result.total} cells are kept; "
            f"continue with: {resume_command(result.run_id)}"
        )
        self.result = result


def resume_command(run_id: str) -> str:
    """The command that continues a run."""
    return f"vringlab resume {run_id}"


def execute(
    store: Store,
    session_factory: SessionFactory,
    progress: Listener = silent,
    until: Until | None = None,
    find: FindWorkload = base.find,
) -> RunResult:
    """Measure what a run still lacks.

    No session is made when nothing is left. The tables are up to date when this ends, however
    it ends.

    Args:
        store: The run, open for writing.
        session_factory: Makes the session: called once.
        progress: Told of everything that happens.
        until: Asked after each complete block; the run ends early when it says True.
        find: Finds a workload by name.

    Raises:
        Interrupted: Ctrl-C, SIGTERM or SIGHUP. The current cell is discarded.
        UserError: the run began on another kind of host or with other builds of its arms, or two
            workloads need guests that contradict each other.
        TransientError: a guest died twice in one boot of the plan.
        InfrastructureError: machines, tools or the disk failed. What is done is kept.
    """
    campaign = _Campaign(store, progress, until, find)
    if not store.remaining():
        return campaign.finish("complete")
    if store.complete_blocks() and campaign.decided():
        return campaign.finish("decided")
    try:
        with _terminating():
            status = campaign.run(session_factory)
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        store.rescan()
        result = campaign.finish("interrupted" if interrupted else "failed")
        if interrupted:
            raise Interrupted(result) from None
        hint = f"what is done is kept, continue with: {resume_command(store.run_id)}"
        if isinstance(error, VringlabError):
            error.remedy = f"{error.remedy}; {hint}" if error.remedy else hint
        else:
            error.add_note(hint)
        raise
    return campaign.finish(status)


@contextmanager
def _terminating() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the run as Ctrl-C does; a second one does not stop clean-up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ended = False

    def end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - signal's signature
        nonlocal ended
        if not ended:
            ended = True
            raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    # nohup ignores SIGHUP, and that is meant to last.
    mine = {number: old for number, old in before.items() if old is not signal.SIG_IGN}
    for number in mine:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, old in mine.items():
            signal.signal(number, old)


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
class _Campaign:
    """One execution: what is fixed for it, and what it counts."""

    store: Store
    progress: Listener
    until: Until | None
    find: FindWorkload
    budget: Budget = field(default_factory=Budget)
    started: bool = False
    measured: int = 0
    invalid: int = 0
    pace: _Pace = field(default_factory=_Pace)
    boots_left: int = 0
    left_s: float = 0.0
    mark: float = 0.0
    build_ids: dict[str, str] = field(default_factory=dict)
    unseen: bool = False

    @property
    def plan(self) -> Plan:
        return self.store.plan

    def decided(self) -> bool:
        if self.until is None:
            return False
        with self.budget.phase("analyse"):
            return self.until(self.store)

    def result(self, status: Status) -> RunResult:
        return RunResult(
            run_id=self.store.run_id,
            path=self.store.path,
            status=status,
            done=len(self.store.done()),
            total=len(self.plan.cells),
            measured=self.measured,
            invalid=self.invalid,
            spent=self.budget.spent(),
        )

    def finish(self, status: Status) -> RunResult:
        """Bring all files of the run up to date.

        Raises:
            InfrastructureError: the disk is full, but only where the run did not fail before:
                the first failure is the one to report, and each file is tried on its own.
        """
        failed = status in ("failed", "interrupted")
        lenient = suppress(VringlabError) if failed else nullcontext()
        with lenient:
            self.store.update_provenance({"run": {"status": status}})
        with lenient, self.budget.phase("analyse"):
            self.store.consolidate()
        result = self.result(status)
        if self.started:
            with lenient:
                self.store.write_time(result.spent, status)
        self._tell("end", f"{status}: {result.done} of {result.total} cells done")
        return result

    def run(self, session_factory: SessionFactory) -> Status:
        options = guest_options(self.plan, self.find)
        remaining = self.store.remaining()
        boots = [(boot, list(cells)) for boot, cells in groupby(remaining, lambda c: c.boot)]
        self.left_s = sum(cell.duration_s for cell in remaining)
        self.boots_left = len(boots)
        self._tell(
            "run",
            f"{self.store.run_id}: cells to measure: {len(remaining)}, boots: {len(boots)}, "
            f"timed windows: {clock(self.left_s)}",
        )
        self.started = True
        with session_factory() as session:
            self.budget = session.time_budget
            self._begin(session)
            for boot, cells in boots:
                blocks = [list(block) for _, block in groupby(cells, lambda c: c.block)]
                if self._boot(session, boot, blocks, options):
                    self.store.update_provenance(session.provenance())
                    return "decided"
            self.store.update_provenance(session.provenance())
        return "complete"

    def _begin(self, session: Session) -> None:
        """Record the host, and refuse to mix kinds of host in one run.

        A ratio measured under emulation says nothing of one measured on hardware, and simulated
        figures must never stand beside measured ones.
        """
        known = self.store.provenance()
        before = known["run"].get("host_kind")
        if self.store.done() and before not in (None, session.host_kind):
            raise UserError(
                f"run {self.store.run_id} was begun on a host of kind {before}, and "
                f"{session.host} is {session.host_kind}",
                remedy="resume it on the host it was begun on, or start a new run",
            )
        if self.store.done():
            self.build_ids = _build_ids(known)
        facts = session.provenance()
        for arm, build_id in _build_ids(facts).items():
            self._check_build(arm, build_id)
        self.store.update_provenance(facts)
        self.store.update_provenance(
            {"run": {"host": session.host, "host_kind": session.host_kind, "status": "running"}}
        )

    def _check_build(self, arm: str, build_id: str) -> None:
        """Refuse another build under an arm's name; before it is recorded, or it would pass next.

        Raises:
            UserError: the run measured another build of that arm.
        """
        before = self.build_ids.setdefault(arm, build_id)
        if before != build_id:
            raise UserError(
                f"arm {arm} is another build ({build_id}) than the one that this run measured "
                f"before ({before})",
                remedy="restore the sources, compiler and base kernel of the first build, or "
                "start a new run",
            )

    def _boot(
        self,
        session: Session,
        planned: str,
        blocks: list[list[Cell]],
        options: Mapping[str, object],
    ) -> bool:
        """Measure the blocks of one planned boot; True when the run is decided.

        A guest that dies is replaced once: what kills it twice will not go away by itself.
        """
        waiting = list(blocks)
        retried = False
        while waiting:
            try:
                identity = self._start_guest(session, planned, options)
                while waiting:
                    self._block(session, identity, waiting[0])
                    del waiting[0]
                    with self.budget.phase("analyse"):
                        self.store.consolidate(force=False)
                    if self.decided():
                        self._paths(session, identity)
                        return True
                self._paths(session, identity)
            except TransientError as error:
                if retried:
                    raise
                retried = True
                self._tell("retry", f"boot {planned} failed and is repeated once: {error.message}")
        self.boots_left -= 1
        return False

    def _start_guest(self, session: Session, planned: str, options: Mapping[str, object]) -> str:
        identity = self.store.begin_boot(planned)
        self._tell("boot", f"booting guest {identity}", boot=identity)
        start = time.monotonic()
        with self.budget.phase("boot"):
            session.boot(identity, options)
        self.pace.boots += 1
        self.pace.boots_s += time.monotonic() - start
        self.store.update_provenance(session.provenance())
        return identity

    def _block(self, session: Session, identity: str, cells: Sequence[Cell]) -> None:
        """Measure a whole block in the guest that runs now."""
        done = self.store.done()
        # The estimate of the time left counted these as done.
        again = sum(cell.duration_s for cell in cells if cell.cell_id in done)
        if self.store.supersede(cells) and self.measured:
            self.left_s += again
        for _, visit in groupby(cells, lambda cell: cell.arm_name):
            self.mark = time.monotonic()
            arm_cells = list(visit)
            build_id = self._switch(session, identity, arm_cells[0].arm, arm_cells[0].arm_name)
            meta = CellMeta(identity, session.host, session.host_kind, build_id)
            for cell in arm_cells:
                self._cell(session, cell, meta)
                with self.budget.phase("collect"):
                    self.store.write_time(self.budget.spent())

    def _switch(self, session: Session, identity: str, arm: str, shown: str) -> str:
        self._tell("switch", f"loading {shown}", boot=identity)
        with self.budget.phase("switch"):
            build_id = session.switch(arm) or ""
        if build_id:
            new = arm not in self.build_ids
            self._check_build(arm, build_id)
            if new:
                self.store.update_provenance({"arms": {arm: {"build_id": build_id}}})
        return build_id

    def _paths(self, session: Session, identity: str) -> None:
        """See which path the packets of each arm take, where that was not seen yet.

        After the blocks of a boot, so that no measurement follows it in the same guest. That the
        path could not be seen does not fail a run; its verdicts say so.
        """
        seen = {path_key(item.arm, item.workload, item.params) for item in self.store.paths()}
        todo: dict[str, dict[str, Cell]] = {}
        for cell in self.plan.cells:
            key = path_key(cell.arm, cell.workload, cell.params)
            if key not in seen:
                todo.setdefault(cell.arm, {})[key] = cell
        if self.unseen or not session.sees_paths:
            return
        for arm, cells in todo.items():
            points = [(cell.workload, cell.params) for cell in cells.values()]
            with self.budget.phase("path"):
                try:
                    build_id = session.switch(arm)
                    if build_id:
                        self._check_build(arm, build_id)
                    found = session.paths(arm, points)
                except TransientError:
                    raise
                except InfrastructureError as error:
                    self.unseen = True
                    self._tell("path", f"the path could not be seen: {error.message}")
                    self.store.update_provenance({"path_problem": error.message})
                    return
            with self.budget.phase("collect"):
                self.store.write_paths(found)
                known = [item for item in self.store.paths() if item.arm == arm]
                self.store.update_provenance({"exercised": {arm: summary(known)}})
            for item in found:
                shown = ", ".join(f"{name}={value}" for name, value in item.params.items())
                what = f"{arm} {item.workload} {shown}".rstrip()
                self._tell("path", f"{what}: {item.headline}", boot=identity)

    def _cell(self, session: Session, cell: Cell, meta: CellMeta) -> None:
        shown = ", ".join(f"{name}={value}" for name, value in cell.params.items())
        what = f"{cell.arm_name} {cell.workload} {shown}".rstrip()
        self._tell("cell", what, boot=meta.boot, cell=cell)
        started = datetime.now(UTC).isoformat(timespec="milliseconds")
        before = self.budget.spent()["measure"]
        start = time.monotonic()
        with self.budget.phase("prepare"):
            try:
                outcome = session.measure(cell.workload, cell.params, cell.duration_s)
            except MeasurementInvalid as error:
                outcome = Outcome(metrics=(), problems=(error.message,))
        # Only the timed window counts as measuring; what surrounds it is preparation.
        window = min(outcome.window_s, time.monotonic() - start)
        own = self.budget.spent()["measure"] - before
        self.budget.move(window - own, "prepare", "measure")
        outcome = _checked(outcome, started)
        with self.budget.phase("collect"):
            self.store.write_cell(cell, outcome, meta)
        self.measured += 1
        self.invalid += not outcome.valid
        self._count(cell)
        self._tell(
            "cell-done", f"{what}: {headline(outcome)}", boot=meta.boot, cell=cell, outcome=outcome
        )

    def _count(self, cell: Cell) -> None:
        """Take the time since the last cell, a switch included, as the price of this one."""
        now = time.monotonic()
        self.pace.planned_s += cell.duration_s
        self.pace.cells_s += now - self.mark
        self.mark = now
        self.left_s -= cell.duration_s

    def _tell(
        self,
        kind: Kind,
        message: str,
        boot: str = "",
        cell: Cell | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        self.progress(
            Event(
                kind=kind,
                run_id=self.store.run_id,
                index=len(self.store.done()),
                total=len(self.plan.cells),
                message=message,
                left_s=self.pace.left(self.left_s, max(0, self.boots_left - 1)),
                boot=boot,
                cell=cell,
                outcome=outcome,
            )
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
