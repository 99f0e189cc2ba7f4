"""QEMU's machine protocol for synchronous callers, also inside a notebook's running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Coroutine, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from qemu.qmp import QMPClient, Runstate
from qemu.qmp.error import QMPError

from vringlab.errors import InfrastructureError, TransientError

T = TypeVar("T")

_WIND_UP_S = 1.0

#: Whatever fails here is raised as an error of ours; the library would print it besides.
logging.getLogger("qemu.qmp").setLevel(logging.CRITICAL + 1)


class Monitor:
    """A QMP connection over a connected socket; a context manager.

    Args:
        connection: The socket; the monitor owns it from here on.
        name: What error messages call the QEMU behind it.
        timeout: Seconds allowed to every exchange.

    Raises:
        TransientError: QEMU did not greet within the time.
    """

    def __init__(self, connection: socket.socket, *, name: str, timeout: float = 60.0) -> None:
        self._name = name
        self._timeout = timeout
        # A loop of our own in a thread: in a Jupyter kernel one already runs in this thread.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self._client = self._call(self._connect(connection))
        except BaseException:
            # In this order: the loop still watches the descriptor.
            self._stop()
            connection.close()
            raise

    async def _connect(self, connection: socket.socket) -> QMPClient:
        client = QMPClient(self._name)
        connection.setblocking(False)
        try:
            await client.connect(connection)
        except BaseException:
            # Given up on while it waits for the greeting, it leaves its streams open.
            with contextlib.suppress(Exception):
                await client.disconnect()
            raise
        return client

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(self._timeout)
        except TimeoutError:
            future.cancel()
            raise TransientError(
                f"QEMU's monitor did not answer within {self._timeout:g} s",
                remedy="the machine may be overloaded or stopped",
                host=self._name,
            ) from None
        except (QMPError, OSError, EOFError) as error:
            raise InfrastructureError(
                f"QEMU's monitor: {error}",
                remedy="QEMU may have ended; see its console and log",
                host=self._name,
            ) from error

    def execute(self, command: str, arguments: Mapping[str, object] | None = None) -> Any:
        """Run a QMP command and return its `return` value.

        Raises:
            InfrastructureError: QEMU refused it or is gone.
            TransientError: no answer in time.
        """
        return self._call(self._client.execute(command, arguments))

    def execute_until(
        self,
        command: str,
        arguments: Mapping[str, object],
        event: str,
        data: Mapping[str, object],
    ) -> None:
        """Run a QMP command and wait for the event that says that it has taken effect.

        Args:
            command: The command.
            arguments: Its arguments.
            event: Name of the event.
            data: What the event must hold; it may hold more.

        Raises:
            InfrastructureError: QEMU refused it or is gone.
            TransientError: no event in time.
        """

        def fits(message: Mapping[str, Any]) -> bool:
            told: Mapping[str, object] = message.get("data", {})
            return data.items() <= told.items()

        async def gone() -> None:
            if self._client.runstate is Runstate.RUNNING:
                await self._client.runstate_changed()

        async def exchange() -> None:
            with self._client.listener(event, fits) as listener:
                await self._client.execute(command, arguments)
                heard = asyncio.ensure_future(listener.get())
                # A QEMU that ends says no more: waiting for its word alone would take the deadline.
                ended = asyncio.ensure_future(gone())
                try:
                    await asyncio.wait({heard, ended}, return_when=asyncio.FIRST_COMPLETED)
                    if not heard.done():
                        raise EOFError(f"it ended before it said {event}")
                finally:
                    heard.cancel()
                    ended.cancel()

        self._call(exchange())

    def vcpu_threads(self) -> list[int]:
        """Thread ids of the virtual processors, by their index."""
        found = self.execute("query-cpus-fast")
        return [cpu["thread-id"] for cpu in sorted(found, key=lambda cpu: cpu["cpu-index"])]

    def close(self) -> None:
        """Disconnect; QEMU goes on. Repeating it does nothing."""
        if self._loop.is_closed():
            return
        with contextlib.suppress(InfrastructureError):
            self._call(self._client.disconnect())
        self._stop()

    def _stop(self) -> None:
        """End the loop with all that still waits in it: QEMU may never say a word again."""

        async def wind_up() -> None:
            for last in (False, True):
                waiting = asyncio.all_tasks() - {asyncio.current_task()}
                if waiting and last:
                    for task in waiting:
                        task.cancel()
                if waiting:
                    await asyncio.wait(waiting, timeout=_WIND_UP_S)
            self._loop.stop()

        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(wind_up()))
        self._thread.join(timeout=3 * _WIND_UP_S)
        if not self._thread.is_alive():
            self._loop.close()

    def __enter__(self) -> Self:
        """Return the monitor."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Disconnect."""
        self.close()
