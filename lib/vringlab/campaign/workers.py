"""Sessions in worker processes, one for each KVM host: dask.distributed as the engine.

Dask carries calls to the process that holds a host and answers back, on this machine or on a
cluster. It decides nothing about measurements: every task is pinned to one worker, none is tried
twice, and when a worker ends, what ran on it has failed and is not run elsewhere. Results come
back to this process, which alone writes the run.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any, Self

import dask
from distributed import Client, KilledWorker, LocalCluster

from vringlab import __version__
from vringlab.campaign import seat
from vringlab.campaign.blocks import Stopped
from vringlab.campaign.budget import Budget
from vringlab.campaign.seat import RESOURCE, Answer, AskedSession, Facts, Opener
from vringlab.errors import HostLost, UserError

OnStep = Callable[[str], None]

#: How often a wait looks whether the run was stopped, and whether its worker still lives.
_LOOK_S = 0.25
_LOOKS_PER_CHECK = 8
#: A session may take this long to give back what it holds before its worker is ended.
_LEAVE_S = 60.0
_CONNECT_S = 15.0
#: A worker of a cluster that hears nothing for so long ends its session: we are dead then.
_PATIENCE_S = 120.0

_CONFIG = {
    "distributed.scheduler.allowed-failures": 0,
    "distributed.scheduler.work-stealing": False,
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "distributed.scheduler.active-memory-manager.start": False,
    "distributed.admin.tick.limit": "60s",
}


class Workers:
    """A worker for each of some hosts; a context manager.

    Args:
        names: Names of the hosts.
        scheduler: Address of a dask scheduler with such workers; processes of this machine, made
            for the purpose, when None.
        on_step: Told what is being prepared, and on which host.
        stop: Whether the run is to end is looked for here while a session is waited for.

    Raises:
        UserError: the scheduler does not answer, or has too few free workers.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        scheduler: str | None = None,
        on_step: OnStep = lambda _: None,
        stop: threading.Event | None = None,
    ) -> None:
        self._names = tuple(names)
        self._scheduler = scheduler
        self._on_step = on_step
        self._stop = stop or threading.Event()
        self._stack = ExitStack()
        self._topic = f"vringlab-{secrets.token_hex(8)}"

    def __enter__(self) -> Self:
        """Start the workers, or find them.

        Raises:
            UserError: as for the class.
        """
        with ExitStack() as stack:
            stack.enter_context(dask.config.set(_CONFIG))
            self._client = stack.enter_context(self._connect(stack))
            self._address = dict(zip(self._names, self._choose(), strict=True))
            self._client.subscribe_topic(self._topic, self._step)
            if self._scheduler is not None:
                stack.enter_context(self._heartbeat())
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the workers that were started here."""
        self._stack.close()

    def _connect(self, stack: ExitStack) -> Client:
        if self._scheduler is not None:
            try:
                return Client(self._scheduler, timeout=_CONNECT_S, set_as_default=False)
            except (OSError, ValueError) as error:
                raise UserError(
                    f"no dask scheduler answers at {self._scheduler}: {error}",
                    remedy="start one (`dask scheduler`) and name its address, tcp://HOST:PORT; "
                    "without --scheduler the workers are processes of this machine",
                ) from None
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="vringlab-", ignore_cleanup_errors=True)
        )
        cluster = stack.enter_context(
            LocalCluster(
                n_workers=len(self._names),
                threads_per_worker=1,
                processes=True,
                host="127.0.0.1",
                # Its HTTP server cannot be left out: then for this machine only, on any port.
                dashboard_address="127.0.0.1:0",
                worker_dashboard_address="127.0.0.1:0",
                scheduler_kwargs={"dashboard": False},
                memory_limit=0,
                resources={RESOURCE: 1},
                preload=[seat.__name__],
                local_directory=folder,
                silence_logs=logging.CRITICAL,
            )
        )
        return Client(cluster, timeout=_CONNECT_S, set_as_default=False)

    def _choose(self) -> list[str]:
        """Addresses of free workers, one for each host; before anything waits for ever."""
        found: Mapping[str, Any] = self._client.run(seat.survey, on_error="return")
        fit, why = [], []
        for address, said in found.items():
            if isinstance(said, BaseException):
                why.append(f"{address} cannot load vringlab: {said}")
            elif said["version"] != __version__:
                why.append(f"{address} has vringlab {said['version']}, this is {__version__}")
            elif said["resources"].get(RESOURCE, 0) < 1:
                why.append(f"{address} was started without --resources {RESOURCE}=1")
            elif said["host"] is not None:
                why.append(f"{address} drives {said['host']}")
            else:
                fit.append(address)
        if len(fit) < len(self._names):
            raise UserError(
                f"{len(self._names)} hosts need as many workers, and {len(fit)} are free"
                + "".join(f"; {reason}" for reason in why),
                remedy=f"start more: dask worker {self._scheduler or ''} --nthreads 1 "
                f"--resources {RESOURCE}=1",
            )
        return fit[: len(self._names)]

    def _step(self, event: tuple[float, Mapping[str, str]]) -> None:
        _, told = event
        self._on_step(f"{told['host']}: {told['step']}")

    @contextmanager
    def _heartbeat(self) -> Iterator[None]:
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(_PATIENCE_S / 6):
                with suppress(Exception):
                    self._client.run(seat.heard, workers=self._alive(), on_error="ignore")

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(_LOOK_S)

    def _alive(self) -> list[str]:
        return sorted(set(self._address.values()) & set(self._client.nthreads()))

    @contextmanager
    def session(self, name: str, opener: Opener) -> Iterator[RemoteSession]:
        """Open a session on the worker of a host.

        Args:
            name: The host.
            opener: Opens the session there; it is sent to the worker.

        Raises:
            HostLost: the worker ended.
            Stopped: the run is to end.
            Exception: as for the opener.
        """
        link = _Link(self._client, name, self._address[name], self._topic, self._stop)
        budget = Budget()
        patience = _PATIENCE_S if self._scheduler is not None else None
        left = False
        try:
            facts, spent = link.run(seat.sit, name, opener, self._topic, patience)
            budget.claim("idle", spent)
            yield RemoteSession(link, facts, budget)
            left = True
            link.run(seat.leave, name)
        finally:
            if not left:
                link.abandon()


class _Link:
    """Calls to one worker, one at a time."""

    def __init__(
        self, client: Client, name: str, address: str, topic: str, stop: threading.Event
    ) -> None:
        self._client = client
        self.name = name
        self._address = address
        self._topic = topic
        self._stop = stop
        self._number = itertools.count()

    def run(
        self, function: Callable[..., Any], *arguments: Any, within: float | None = None
    ) -> Any:
        """Run a function on the worker, once.

        Args:
            function: It must be importable there.
            arguments: Its arguments.
            within: Seconds to wait, whether the run is to end or not; for ever when None, but
                only as long as the run goes on.

        Raises:
            HostLost: the worker ended, or the way to it, or its time was over.
            Stopped: the run is to end; the function may still run.
            Exception: what the function raised.
        """
        number = next(self._number)
        future = self._client.submit(
            function,
            *arguments,
            key=f"{self._topic}/{self.name}/{number:06}-{function.__name__}",
            workers=[self._address],
            allow_other_workers=False,
            retries=0,
            pure=False,
            resources={RESOURCE: 1},
            priority=-number,
        )
        try:
            for look in itertools.count(1):
                # Waits without raising what the function raised, which may be this very error.
                with suppress(TimeoutError):
                    future.exception(timeout=_LOOK_S)
                if future.done():
                    break
                if within is None and self._stop.is_set():
                    raise Stopped
                if within is not None and look * _LOOK_S > within:
                    raise self._lost()
                if look % _LOOKS_PER_CHECK == 0 and self._address not in self._client.nthreads():
                    raise self._lost()
            if future.status == "finished":
                return future.result()
            error = future.exception() if future.status == "error" else None
            if error is None or isinstance(error, KilledWorker):
                raise self._lost()
            raise error
        finally:
            future.release()

    def _lost(self) -> HostLost:
        return HostLost(
            f"the worker process that drove {self.name} ended",
            remedy="its machines ended with it; see whether this machine ran out of memory",
            host=self.name,
        )

    def abandon(self) -> None:
        """End the session whatever it is doing, and wait a while for that. Never fails."""
        with suppress(Exception):
            if self._address in self._client.nthreads():
                self._client.run(seat.interrupt, self.name, workers=[self._address])
                self.run(seat.leave, self.name, within=_LEAVE_S)


class RemoteSession(AskedSession):
    """A session that a worker holds. Made by `Workers.session`.

    Args:
        link: The way to the worker.
        facts: What the session says of itself.
        budget: Where the time goes, seen from here.
    """

    def __init__(self, link: _Link, facts: Facts, budget: Budget) -> None:
        super().__init__(link.name, facts, budget)
        self._link = link

    def _answer(self, method: str, arguments: Sequence[Any]) -> Answer:
        answer: Answer = self._link.run(seat.ask, self.host, method, arguments)
        return answer
