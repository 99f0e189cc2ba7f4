"""Executes a plan: boots guests, loads arms, measures cells and keeps each as it is done.

Cells are compared within a block, so a block belongs to one guest lifetime. When a guest dies or
the run is killed in the middle of a block, the whole block is measured again under a new boot
identity, and what was measured of it before is put aside. Complete blocks are kept as they are.
That happens for failed machines only: no measurement is repeated because of its result.

`blocks` has the work itself; here is how one host or several are begun, watched and ended.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Literal, Protocol

from vringlab.campaign.blocks import Campaign, HostRun, Stopped, Until
from vringlab.campaign.budget import Budget
from vringlab.campaign.deal import Boot, Deal
from vringlab.campaign.experiment import FindWorkload, Value
from vringlab.campaign.paths import PathPass
from vringlab.campaign.plan import Cell
from vringlab.campaign.progress import Listener, clock, silent
from vringlab.campaign.store import Store
from vringlab.errors import InfrastructureError, TransientError, VringlabError
from vringlab.workloads import base
from vringlab.workloads.base import Outcome

Status = Literal["complete", "decided", "interrupted", "failed"]

#: Each host may take this long to end its guest when the run is stopped.
_WIND_UP_S = 60.0


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

    def boot(self, boot: str, options: Mapping[str, object], edition: int = 0) -> None:
        """End the guest, if there is one, and boot a fresh one.

        Args:
            boot: Identity of the new lifetime, for logs.
            options: Keyword arguments of the guest's specification.
            edition: Which saved lab to restore instead, if that can be; 0 for none.

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
    hosts: SessionFactory | Mapping[str, SessionFactory],
    progress: Listener = silent,
    until: Until | None = None,
    find: FindWorkload = base.find,
    stop: threading.Event | None = None,
) -> RunResult:
    """Measure what a run still lacks, on one host or on several at once.

    No session is made when nothing is left. The tables are up to date when this ends, however
    it ends. Only this process writes the run's folder.

    Several hosts are dealt the plan's boots, and each is driven by a thread of its own. A host
    that is lost costs the block that it was measuring: that block stays undone, the host's other
    blocks go to the other hosts, and the error comes when those have ended.

    Args:
        store: The run, open for writing.
        hosts: Makes the session, called once; or such makers by the name of the host.
        progress: Told of everything that happens.
        until: Asked after each complete block; the run ends early when it says True.
        find: Finds a workload by name.
        stop: Set here when several hosts shall end; their sessions may look at it while they wait.

    Raises:
        Interrupted: Ctrl-C, SIGTERM or SIGHUP. The current cell is discarded.
        UserError: the run began on another kind of host or with other builds of its arms, or two
            workloads need guests that contradict each other.
        TransientError: a guest died twice in one boot of the plan; or one of several hosts was
            lost.
        InfrastructureError: machines, tools or the disk failed. What is done is kept.
    """
    makers = hosts if isinstance(hosts, Mapping) else {"": hosts}
    campaign = Campaign(store, progress, until, find, len(makers) > 1, stop or threading.Event())
    execution = _Execution(campaign)
    if not store.remaining():
        return execution.finish("complete")
    if store.complete_blocks() and campaign.decided(execution.budget):
        return execution.finish("decided")
    try:
        with _terminating():
            status = execution.run(makers)
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        store.rescan()
        result = execution.finish("interrupted" if interrupted else "failed")
        if interrupted:
            raise Interrupted(result) from None
        hint = f"what is done is kept, continue with: {resume_command(store.run_id)}"
        if isinstance(error, VringlabError):
            error.remedy = f"{error.remedy}; {hint}" if error.remedy else hint
        else:
            error.add_note(hint)
        raise
    return execution.finish(status)


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
class _Execution:
    """How the hosts of one execution are begun and ended.

    Attributes:
        campaign: What they share.
        budget: Where the time goes while no host runs: the only host's own, when there is one.
        started: Whether a host was asked for.
        fatal: What ended the execution on all hosts.
        lost: Hosts that failed, each with its error.
        undone: Blocks that were begun by hosts that failed.
    """

    campaign: Campaign
    budget: Budget = field(default_factory=Budget)
    started: bool = False
    fatal: BaseException | None = None
    lost: dict[str, InfrastructureError] = field(default_factory=dict)
    undone: set[int] = field(default_factory=set)
    _only: str = ""

    def result(self, status: Status) -> RunResult:
        store = self.campaign.store
        return RunResult(
            run_id=store.run_id,
            path=store.path,
            status=status,
            done=len(store.done()),
            total=len(store.plan.cells),
            measured=self.campaign.measured,
            invalid=self.campaign.invalid,
            spent=self.campaign.spent(),
        )

    def finish(self, status: Status) -> RunResult:
        """Bring all files of the run up to date.

        Raises:
            InfrastructureError: the disk is full, but only where the run did not fail before:
                the first failure is the one to report, and each file is tried on its own.
        """
        campaign, store = self.campaign, self.campaign.store
        failed = status in ("failed", "interrupted")
        lenient = suppress(VringlabError) if failed else nullcontext()
        with lenient:
            store.update_provenance({"run": {"status": status}})
        with lenient, self.budget.phase("analyse"):
            store.consolidate()
        campaign.note(self._only, self.budget)
        if self.started:
            with lenient:
                campaign.write_time(status)
        result = self.result(status)
        campaign.tell("end", f"{status}: {result.done} of {result.total} cells done")
        return result

    def run(self, makers: Mapping[str, SessionFactory]) -> Status:
        campaign, store = self.campaign, self.campaign.store
        # A contradiction between workloads is found before a machine is asked for.
        _ = campaign.options
        remaining = store.remaining()
        boots: list[Boot] = [
            (boot, [list(block) for _, block in groupby(cells, lambda cell: cell.block)])
            for boot, cells in groupby(remaining, lambda cell: cell.boot)
        ]
        campaign.left_s = sum(cell.duration_s for cell in remaining)
        campaign.boots_left = len(boots)
        on = f", hosts: {len(makers)}" if campaign.several else ""
        campaign.tell(
            "run",
            f"{store.run_id}: cells to measure: {len(remaining)}, boots: {len(boots)}{on}, "
            f"timed windows: {clock(campaign.left_s)}",
        )
        self.started = True
        if campaign.several:
            return self._several(boots, makers)
        (make,) = makers.values()
        with make() as session:
            self.budget = session.time_budget
            host = HostRun(campaign, session, session.host)
            self._only = host.name
            host.begin()
            try:
                for planned, blocks in boots:
                    if host.boot(planned, blocks):
                        host.end()
                        return "decided"
            except Stopped:
                raise KeyboardInterrupt from None
            host.end()
        return "complete"

    def _several(self, boots: list[Boot], makers: Mapping[str, SessionFactory]) -> Status:
        campaign = self.campaign
        deal = Deal(boots, list(makers))
        threads = [
            threading.Thread(target=self._drive, args=(deal, name, make), name=name, daemon=True)
            for name, make in makers.items()
        ]
        campaign.active = len(threads)
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            self._end_all(deal)
            # Not for ever: a machine may be beyond answering, and ends with this process.
            deadline = time.monotonic() + _WIND_UP_S
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            raise
        finally:
            # From here on nobody else counts time.
            self.budget = Budget()
        if self.fatal is not None:
            raise self.fatal
        if self.lost and not campaign.enough and campaign.store.remaining():
            raise self._loss()
        return "decided" if campaign.enough else "complete"

    def _end_all(self, deal: Deal) -> None:
        self.campaign.stop.set()
        deal.end()

    def _drive(self, deal: Deal, name: str, make: SessionFactory) -> None:
        """Measure on one host whatever it is dealt; runs in a thread and raises nothing."""
        campaign = self.campaign
        planned, waiting = "", list[list[Cell]]()
        host: HostRun | None = None
        try:
            with make() as session:
                host = HostRun(campaign, session, name)
                host.begin()
                while (boot := deal.take(name)) is not None:
                    planned, waiting = boot
                    if host.boot(planned, waiting):
                        deal.end()
                host.end()
                campaign.note(name, host.budget)
        except Stopped:
            pass
        except InfrastructureError as error:
            block = host.lost(waiting) if host is not None else []
            with campaign.lock:
                self.lost[name] = error
                self.undone |= {cell.block for cell in block}
            campaign.tell("lost", f"the host takes no further part: {error.message}", name)
        except BaseException as error:
            with campaign.lock:
                self.fatal = self.fatal or error
            self._end_all(deal)
        finally:
            with campaign.lock:
                campaign.active -= 1
            deal.leave(name, (planned, waiting))

    def _loss(self) -> InfrastructureError:
        """The error of an execution that ended without all cells."""
        transient = all(isinstance(error, TransientError) for error in self.lost.values())
        kind = TransientError if transient else InfrastructureError
        name, first = next(iter(self.lost.items()))
        store = self.campaign.store
        left = len(store.plan.cells) - len(store.done())
        which = f"{len(self.lost)} of the hosts were" if len(self.lost) > 1 else f"host {name} was"
        blocks = ", ".join(map(str, sorted(self.undone)))
        return kind(
            f"{which} lost: {first.message}; {left} cells are not measured"
            + (f" (begun and given up: block {blocks})" if blocks else ""),
            remedy=first.remedy,
            command=first.command,
            host=name,
            stdout=first.stdout,
            stderr=first.stderr,
            returncode=first.returncode,
        )
