"""A dask worker's one KVM host: its session, in a thread of its own, and what is asked of it.

Everything here runs in the worker. Dask starts it with this module as a preload.
"""

from __future__ import annotations

import ctypes
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from vringlab import __version__
from vringlab.campaign.budget import Budget, Phase
from vringlab.errors import InfrastructureError, UserError

if TYPE_CHECKING:
    from vringlab.campaign.experiment import Value
    from vringlab.campaign.paths import PathPass
    from vringlab.campaign.runner import Session
    from vringlab.workloads.base import Outcome

#: What a worker may hold one of.
RESOURCE = "kvmhost"


class Opener(Protocol):
    """Opens a session; must be fit to be sent to another process."""

    def __call__(self, *, on_step: Callable[[str], None]) -> AbstractContextManager[Session]:
        """Open it; `on_step` is told what is being done."""
        ...


@dataclass(frozen=True)
class Facts:
    """What a session says of itself when it is open, as `runner.Session` has it."""

    host: str
    host_kind: str
    sees_paths: bool


@dataclass(frozen=True)
class Answer:
    """What came of a call.

    Attributes:
        value: What the method returned.
        spent: Seconds by phase that the session claimed within the call.
    """

    value: Any
    spent: Mapping[str, float]


class AskedSession:
    """A session that another process holds; see `campaign.runner.Session`.

    Args:
        name: What the host is called in the run.
        facts: What the session says of itself.
        budget: Where the time goes, seen from here.
    """

    def __init__(self, name: str, facts: Facts, budget: Budget) -> None:
        self.host = name
        self.host_kind = facts.host_kind
        self.sees_paths = facts.sees_paths
        self.time_budget = budget

    def _answer(self, method: str, arguments: Sequence[Any]) -> Answer:
        raise NotImplementedError

    def ask(self, method: str, outer: Phase, *arguments: Any) -> Any:
        """Call a method there; the phases that it enters are taken out of `outer` here.

        Raises:
            HostLost: the other process ended.
            Exception: what the method raised.
        """
        answer = self._answer(method, arguments)
        self.time_budget.claim(outer, answer.spent)
        return answer.value

    def boot(self, boot: str, options: Mapping[str, object], edition: int = 0) -> None:
        """End the guest and boot a fresh one."""
        self.ask("boot", "boot", boot, dict(options), edition)

    def switch(self, arm: str) -> str | None:
        """Load an arm."""
        found: str | None = self.ask("switch", "switch", arm)
        return found

    def measure(self, workload: str, params: Mapping[str, Value], duration_s: float) -> Outcome:
        """Run a workload once."""
        outcome: Outcome = self.ask("measure", "prepare", workload, dict(params), duration_s)
        return outcome

    def paths(
        self, arm: str, points: Sequence[tuple[str, Mapping[str, Value]]]
    ) -> Sequence[PathPass]:
        """See which path packets take."""
        sent = [(workload, dict(params)) for workload, params in points]
        found: Sequence[PathPass] = self.ask("paths", "path", arm, sent)
        return found

    def provenance(self) -> Mapping[str, object]:
        """What is known by now of host, guest, kernels, tools and pinning."""
        found: Mapping[str, object] = self.ask("provenance", "collect")
        return found


class Seat:
    """A session in a thread of its own.

    A machine of ours ends with the thread that started it, so no thread of dask's will do.

    Args:
        name: What the host is called in the run.
        opener: Opens the session.
        tell: Told what is being done.
        patience: End the session when nobody asked for anything for so long, s; never when None.
    """

    def __init__(
        self,
        name: str,
        opener: Opener,
        tell: Callable[[str], None],
        patience: float | None = None,
    ) -> None:
        self.name = name
        self._opener = opener
        self._tell = tell
        self._work: queue.SimpleQueue[tuple[Callable[[Session], Any], Future[Answer]] | None] = (
            queue.SimpleQueue()
        )
        self._opened: Future[Facts] = Future()
        self._ended: Future[None] = Future()
        self._session: Session | None = None
        self._lock = threading.Lock()
        self._may_interrupt = True
        self._heard = time.monotonic()
        self._thread = threading.Thread(target=self._live, name=f"seat {name}", daemon=True)
        self._thread.start()
        if patience is not None:
            threading.Thread(target=self._watch, args=(patience,), daemon=True).start()

    def _live(self) -> None:
        waiting: Future[Answer] | None = None
        error: BaseException | None = None
        try:
            with self._opener(on_step=self._tell) as session:
                self._session = session
                self._opened.set_result(Facts(session.host, session.host_kind, session.sees_paths))
                before = session.time_budget.spent()
                self._opened_spent = _claimed({}, before)
                while (item := self._work.get()) is not None:
                    work, waiting = item
                    before = session.time_budget.spent()
                    try:
                        value = work(session)
                    except Exception as failure:
                        waiting.set_exception(failure)
                    else:
                        spent = _claimed(before, session.time_budget.spent())
                        waiting.set_result(Answer(value, spent))
                    waiting = None
                with self._lock:
                    self._may_interrupt = False
        except BaseException as failure:
            error = failure
        finally:
            with self._lock:
                self._may_interrupt = False
        # An interrupt is for this thread alone, not for whoever waits for it.
        gone = error if isinstance(error, Exception) else self._gone()
        for future in (self._opened, waiting):
            if future is not None and not future.done():
                future.set_exception(gone)
        with suppress(queue.Empty):
            while True:
                item = self._work.get_nowait()
                if item is not None:
                    item[1].set_exception(gone)
        if error is None or isinstance(error, KeyboardInterrupt):
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    def _watch(self, patience: float) -> None:
        while not self.over:
            self._thread.join(patience / 4)
            if time.monotonic() - self._heard > patience:
                self.interrupt()
                self._work.put(None)
                return

    @property
    def session(self) -> Session:
        """The session once it is open, for a look from another thread; `ask` is for the rest."""
        assert self._session is not None, "wait until it is open"
        return self._session

    @property
    def over(self) -> bool:
        """Whether the session has ended."""
        return not self._thread.is_alive()

    def _gone(self) -> InfrastructureError:
        return InfrastructureError(f"the session on {self.name} has ended")

    def heard(self) -> None:
        """Somebody still wants this session."""
        self._heard = time.monotonic()

    def comes_up(self, seconds: float) -> bool:
        """Wait so long for the session to be open, or to fail; whether either has happened."""
        return bool(wait([self._opened], timeout=seconds).done)

    def opened(self) -> tuple[Facts, Mapping[str, float]]:
        """Wait until the session is open: what it says of itself, and seconds by phase.

        Raises:
            Exception: it could not be opened.
        """
        facts = self._opened.result()
        return facts, self._opened_spent

    def ask(self, method: str, arguments: Sequence[Any]) -> Answer:
        """Call a method of the session and wait for it.

        Raises:
            Exception: what the method raised, or what ended the session.
        """
        future: Future[Answer] = Future()
        if self.over:
            raise self._gone()
        self._work.put((lambda session: _call(session, method, arguments), future))
        while True:
            try:
                return future.result(timeout=1.0)
            except TimeoutError:
                if future.done():
                    raise
                if self.over:
                    raise self._gone() from None

    def interrupt(self) -> None:
        """End what the session does now, as Ctrl-C would: what it holds is given back in order."""
        with self._lock:
            if self._may_interrupt and self._thread.ident is not None:
                self._may_interrupt = False
                # Delivered with the thread's next step of Python: all waits for machines are
                # made of short ones.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread.ident), ctypes.py_object(KeyboardInterrupt)
                )

    def close(self) -> None:
        """End the session and wait for that.

        Raises:
            Exception: something of the host could not be given back.
        """
        self._work.put(None)
        self._ended.result()


def _call(session: Session, method: str, arguments: Sequence[Any]) -> Any:
    found = getattr(session, method)(*arguments)
    return found if method != "provenance" else dict(found)


def _claimed(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase between two looks at a budget, without those that no phase claims."""
    grown = {name: after[name] - before.get(name, 0.0) for name in after if name != "idle"}
    return {name: seconds for name, seconds in grown.items() if seconds > 0}


_held: Seat | None = None


def dask_setup(worker: object) -> None:  # noqa: ARG001 - dask's protocol
    """Leave Ctrl-C in a terminal to the process that the user started; called by dask."""
    with suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def survey(dask_worker: Any) -> dict[str, Any]:
    """What a worker is: the version it runs, its threads, its resources and whom it serves."""
    held = _held
    return {
        "version": __version__,
        "threads": dask_worker.state.nthreads,
        "resources": dict(dask_worker.state.total_resources),
        "host": held.name if held is not None and not held.over else None,
    }


def sit(
    name: str, opener: Opener, topic: str, patience: float | None
) -> tuple[Facts, Mapping[str, float]]:
    """Open a session on this worker; a task.

    Raises:
        UserError: the worker holds another host.
        Exception: the session could not be opened.
    """
    from distributed import get_worker

    global _held
    if _held is not None and not _held.over:
        raise UserError(
            f"the worker for {name} already drives {_held.name}",
            remedy="one worker drives one host: start another, or wait",
        )
    worker = get_worker()
    seat = _held = Seat(
        name, opener, lambda text: worker.log_event(topic, {"host": name, "step": text}), patience
    )
    try:
        return seat.opened()
    except BaseException:
        _held = None
        raise


def ask(name: str, method: str, arguments: Sequence[Any]) -> Answer:
    """Call a method of the session that this worker holds; a task.

    Raises:
        InfrastructureError: it holds none.
        Exception: as for the method.
    """
    if _held is None or _held.name != name:
        raise InfrastructureError(f"the worker of {name} holds no session of it")
    return _held.ask(method, arguments)


def leave(name: str) -> None:
    """End the session that this worker holds; a task.

    Raises:
        Exception: something of the host could not be given back.
    """
    global _held
    seat = _held
    if seat is not None and seat.name == name:
        try:
            seat.close()
        finally:
            _held = None


def interrupt(name: str) -> None:
    """End what the session does now; not a task, since the worker is busy with one."""
    if _held is not None and _held.name == name:
        _held.interrupt()


def heard() -> None:
    """The process that wants the sessions lives; not a task."""
    if _held is not None:
        _held.heard()
