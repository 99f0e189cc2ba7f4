"""The monitor against a server that speaks QMP badly, and against a real QEMU without a machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.processes import DEADLINE_S, interrupted_after, until
from tests.fakes.qmp_server import GREETING, requests, respond, send

from vringlab.errors import InfrastructureError, TransientError
from vringlab.lab.qmp import Monitor

QEMU = shutil.which("qemu-system-x86_64")

#: Takes a command, gives what is sent back; None sends nothing, an exception hangs up.
Answer = Callable[[dict[str, Any]], dict[str, Any] | None]


class HangUp(Exception):  # noqa: N818 - not an error
    pass


@contextlib.contextmanager
def speaking(answer: Answer, *, greet: bool = True) -> Iterator[socket.socket]:
    """One end of a connection whose other end greets, then answers each line."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        with theirs, contextlib.suppress(HangUp, OSError):
            if greet:
                send(theirs, GREETING)
            for request in requests(theirs):
                reply: dict[str, Any] | None = {"return": {}}
                if request["execute"] != "qmp_capabilities":
                    reply = answer(request)
                if reply is not None:
                    respond(theirs, request, reply)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield ours
    finally:
        ours.close()
        thread.join(timeout=DEADLINE_S)
        assert not thread.is_alive()


def nothing(_request: dict[str, Any]) -> None:
    return None


def hang_up(_request: dict[str, Any]) -> None:
    raise HangUp


def loops() -> int:
    """Threads of monitors; each should end with its monitor."""
    return sum("run_forever" in thread.name for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    assert until(lambda: loops() == 0)


def test_a_command_and_its_answer() -> None:
    asked = []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        asked.append((request["execute"], request.get("arguments")))
        return {"return": {"status": "running"}}

    with speaking(answer) as end, Monitor(end, name="guest") as monitor:
        assert monitor.execute("query-status") == {"status": "running"}
        monitor.execute("screendump", {"filename": "x"})
    assert asked == [("query-status", None), ("screendump", {"filename": "x"})]


def test_vcpu_threads_come_by_index() -> None:
    found = [
        {"cpu-index": 1, "thread-id": 11, "target": "x86_64"},
        {"cpu-index": 0, "thread-id": 22, "target": "x86_64"},
    ]
    with speaking(lambda _: {"return": found}) as end, Monitor(end, name="guest") as monitor:
        assert monitor.vcpu_threads() == [22, 11]


def test_a_refusal_carries_qemus_words() -> None:
    def refuse(_request: dict[str, Any]) -> dict[str, Any]:
        return {"error": {"class": "GenericError", "desc": "Device 'x' not found"}}

    with speaking(refuse) as end, Monitor(end, name="guest") as monitor:
        with pytest.raises(InfrastructureError, match="Device 'x' not found") as caught:
            monitor.execute("device_del", {"id": "x"})
        assert caught.value.host == "guest"


def test_a_qemu_that_never_greets() -> None:
    begin = time.monotonic()
    with (
        speaking(nothing, greet=False) as end,
        pytest.raises(TransientError, match=r"did not answer within 0\.3 s"),
    ):
        Monitor(end, name="guest", timeout=0.3)
    assert time.monotonic() - begin < DEADLINE_S


def test_a_qemu_that_is_gone_before_it_greets() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with pytest.raises(InfrastructureError, match="QEMU's monitor"):
        Monitor(ours, name="guest")
    assert ours.fileno() == -1


def test_something_else_that_answers() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        with pytest.raises(InfrastructureError, match="QEMU's monitor"):
            Monitor(ours, name="guest")


def test_a_command_without_an_answer() -> None:
    with (
        speaking(nothing) as end,
        Monitor(end, name="guest", timeout=2.0) as monitor,
        pytest.raises(TransientError, match="did not answer"),
    ):
        monitor.execute("stop")


def test_a_qemu_that_dies_while_it_is_asked(capfd: pytest.CaptureFixture[str]) -> None:
    with speaking(hang_up) as end, Monitor(end, name="guest") as monitor:
        for _ in range(2):
            with pytest.raises(InfrastructureError, match="QEMU's monitor") as caught:
                monitor.execute("query-status")
            assert "see its console" in caught.value.remedy
    # Told by the error, not by a library's log besides.
    assert capfd.readouterr() == ("", "")


def test_a_qemu_that_dies_unasked(capfd: pytest.CaptureFixture[str]) -> None:
    ours, theirs = socket.socketpair()
    monitors: list[Monitor] = []
    with theirs:
        opener = threading.Thread(target=lambda: monitors.append(Monitor(ours, name="guest")))
        opener.start()
        send(theirs, GREETING)
        respond(theirs, next(requests(theirs)), {"return": {}})
        opener.join(timeout=DEADLINE_S)
    with monitors[0] as monitor, pytest.raises(InfrastructureError):
        monitor.execute("query-status")
    assert capfd.readouterr() == ("", "")


@contextlib.contextmanager
def telling(*events: dict[str, Any], hang_up: bool = False) -> Iterator[socket.socket]:
    """A QEMU that takes a command, tells of events, and then stays silent or is gone."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        with theirs, contextlib.suppress(OSError):
            send(theirs, GREETING)
            for request in requests(theirs):
                respond(theirs, request, {"return": {}})
                if request["execute"] == "qmp_capabilities":
                    continue
                for event in events:
                    send(theirs, {"timestamp": {"seconds": 1, "microseconds": 0}, **event})
                if hang_up:
                    return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield ours
    finally:
        ours.close()
        thread.join(timeout=DEADLINE_S)


def deleted(device: str) -> dict[str, Any]:
    return {"event": "DEVICE_DELETED", "data": {"device": device, "path": f"/x/{device}"}}


def unplug(monitor: Monitor) -> None:
    monitor.execute_until("device_del", {"id": "nic"}, "DEVICE_DELETED", {"device": "nic"})


def test_a_command_is_over_with_its_event() -> None:
    # The path of a device's inner part is told without its name.
    inner = {"event": "DEVICE_DELETED", "data": {"path": "/x/nic/backend"}}
    with (
        telling(deleted("other"), inner, {"event": "RESUME"}, deleted("nic")) as end,
        Monitor(end, name="guest") as monitor,
    ):
        unplug(monitor)
        unplug(monitor)


def test_the_event_of_another_device_is_not_enough() -> None:
    with (
        telling(deleted("other")) as end,
        Monitor(end, name="guest", timeout=1.0) as monitor,
        pytest.raises(TransientError, match="did not answer within 1 s"),
    ):
        unplug(monitor)


def test_a_qemu_that_dies_before_the_event_is_not_waited_for() -> None:
    begin = time.monotonic()
    with (
        telling(deleted("other"), hang_up=True) as end,
        Monitor(end, name="guest", timeout=2 * DEADLINE_S) as monitor,
        pytest.raises(InfrastructureError, match="before it said DEVICE_DELETED"),
    ):
        unplug(monitor)
    assert time.monotonic() - begin < DEADLINE_S


def test_a_refused_command_has_no_event() -> None:
    def refuse(_request: dict[str, Any]) -> dict[str, Any]:
        return {"error": {"class": "DeviceNotFound", "desc": "Device 'nic' not found"}}

    with (
        speaking(refuse) as end,
        Monitor(end, name="guest") as monitor,
        pytest.raises(InfrastructureError, match="'nic' not found"),
    ):
        unplug(monitor)


def test_an_answer_of_many_megabytes() -> None:
    # qom-get and friends: longer than a stream's default limit of 64 KiB.
    big = "x" * 3_000_000
    with speaking(lambda _: {"return": big}) as end, Monitor(end, name="guest") as monitor:
        assert monitor.execute("query-big") == big


def test_it_works_where_a_loop_already_runs() -> None:
    # As in every cell of a notebook.
    async def cell() -> object:
        with speaking(lambda _: {"return": 7}) as end, Monitor(end, name="guest") as monitor:
            return monitor.execute("query-status")

    assert asyncio.run(cell()) == 7


def test_closing_twice_does_no_harm() -> None:
    with speaking(nothing) as end:
        monitor = Monitor(end, name="guest")
        monitor.close()
        monitor.close()


def test_an_interrupt_while_qemu_is_silent_leaves_nothing() -> None:
    with speaking(nothing, greet=False) as end:
        with interrupted_after(0.3), pytest.raises(KeyboardInterrupt):
            Monitor(end, name="guest")
        assert end.fileno() == -1


# --- a real QEMU ---------------------------------------------------------------------------


@contextlib.contextmanager
def real_qemu(folder: Path) -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    assert QEMU is not None
    ours, theirs = socket.socketpair()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(QEMU, "-M", "none", "-display", "none", "-nodefaults"),
                *("-chardev", f"socket,id=qmp,fd={theirs.fileno()}"),
                *("-mon", "chardev=qmp,mode=control"),
            ],
            pass_fds=[theirs.fileno()],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
    theirs.close()
    try:
        yield ours, process
    finally:
        ours.close()
        process.kill()
        process.wait()


needs_qemu = pytest.mark.skipif(QEMU is None, reason="needs qemu-system-x86_64: `make setup`")


@needs_qemu
def test_a_real_qemu(tmp_path: Path) -> None:
    with (
        real_qemu(tmp_path) as (end, process),
        Monitor(end, name="none", timeout=DEADLINE_S) as monitor,
    ):
        assert monitor.execute("query-status")["running"] is True
        assert monitor.vcpu_threads() == []
        monitor.execute_until("stop", {}, "STOP", {})
        monitor.execute_until("cont", {}, "RESUME", {})
        with pytest.raises(InfrastructureError, match="has not been found"):
            monitor.execute("no-such-command")
        # More than 64 KiB come back.
        assert len(json.dumps(monitor.execute("query-qmp-schema"))) > 65536
        monitor.close()
        assert process.poll() is None


@needs_qemu
def test_a_real_qemu_that_is_killed(tmp_path: Path) -> None:
    with (
        real_qemu(tmp_path) as (end, process),
        Monitor(end, name="none", timeout=DEADLINE_S) as monitor,
    ):
        process.kill()
        process.wait()
        with pytest.raises(InfrastructureError, match="QEMU's monitor"):
            monitor.execute("query-status")
