"""A program that stands in for the embedded host's QEMU: console, monitor and sshd, no machine.

`FAKE_QEMU` says how it behaves: `works`, `dies`, `port-taken N` for the first N calls, and when it
is to be saved `full` (no space left) or `stuck` (never done). With an instruction counter it ends
with `no-plugins` and `old-plugins`, and with `counts WHAT` it answers for so many processors, or
`nonsense`, or `nothing`. A machine that goes on from a state answers once it was told to.
`FAKE_QEMU_KEYS` is the folder of the keys and of what it notes.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.fakes.counter_answer import answer
from tests.fakes.qmp_server import GREETING, requests, respond, send
from tests.fakes.ssh_server import Key, Keys, SshServer

THREADS = (71, 72, 73, 74)
#: What a state begins with; the rest is not looked at.
STATE = b"state of a fake"
#: QEMU's words when it ends because of a plugin.
PLUGIN_WORDS = {
    "no-plugins": "-plugin: plugin interface not enabled in this build",
    "old-plugins": "Could not load plugin vringlab-count.so: plugin requires API version 3, but "
    "this QEMU supports only a minimum version of 5",
}
FULL = "Unable to write to file: No space left on device"


def _option(pattern: str) -> str:
    found = re.search(pattern, " ".join(sys.argv))
    assert found is not None, sys.argv
    return found[1]


class Saving:
    """What a monitor does about a machine's state."""

    def __init__(self, how: str) -> None:
        self._how = how
        self._shared_is_left_out = False
        self._status: dict[str, Any] = {}

    def answer(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """What a command returns; nothing for one that is not about this."""
        if command == "migrate-set-capabilities":
            (wanted,) = arguments["capabilities"]
            assert wanted["capability"] == "x-ignore-shared"
            self._shared_is_left_out = wanted["state"]
        elif command in ("migrate", "migrate-incoming"):
            # Else the state would hold the whole memory.
            assert self._shared_is_left_out
            state = Path(arguments["uri"].removeprefix("file:"))
            fault = self._write(state) if command == "migrate" else self._read(state)
            failed = {"status": "failed", "error-desc": fault}
            self._status = failed if fault else {"status": "completed"}
        elif command == "query-migrate":
            return {"status": "active"} if self._how == "stuck" else self._status
        return {}

    def _write(self, state: Path) -> str:
        state.write_bytes(STATE if self._how != "full" else STATE[:5])
        return FULL if self._how == "full" else ""

    def _read(self, state: Path) -> str:
        return "" if state.read_bytes().startswith(STATE) else "Not a migration stream"


def _boot(console: Path) -> None:
    """What a machine does to its console and memory until it is up."""
    console.write_text("Linux version 6.12\nvringlab: host is set up\n")
    if "memory-backend-file" in " ".join(sys.argv):
        assert _option("share=(on|off)") == "on"
        with Path(_option(r"mem-path=(\S+),share")).open("wb") as memory:
            # Mostly holes, as a real one.
            memory.seek(300_000)
            memory.write(f"memory of {os.getpid()}".encode())
            memory.truncate(4 << 20)


def _count(connection: socket.socket, what: str) -> None:
    """What the plugin does: each reading has one instruction more for each processor."""
    with connection:
        for times in itertools.count(1):
            if connection.recv(1) != b"r" or what == "nothing":
                return
            if what == "nonsense":
                connection.sendall(bytes(1000))
            else:
                connection.sendall(answer(user=[[times] * int(what)] * 2))


def main() -> None:
    folder = Path(os.environ["FAKE_QEMU_KEYS"])
    console = Path(_option(r"file:(\S+console\S+)"))
    port = int(_option(r"hostfwd=tcp:127\.0\.0\.1:(\d+)-:22"))
    with (folder / "calls").open("a") as calls:
        calls.write(f"{os.getpid()} {port}\n")
    called = len((folder / "calls").read_text().splitlines())
    behaviour, _, count = os.environ["FAKE_QEMU"].partition(" ")
    if behaviour == "port-taken" and called <= int(count):
        sys.exit(f"qemu: -netdev user: Could not set up host forwarding rule 'tcp::{port}-:22'")
    if behaviour == "dies":
        console.write_text("Linux version 6.12\nKernel panic - not syncing\n")
        sys.exit("qemu: cannot set up guest memory: Cannot allocate memory")
    if "-plugin" in sys.argv:
        if words := PLUGIN_WORDS.get(behaviour):
            sys.exit(f"qemu-system-x86_64: {words}")
        plugin = socket.socket(fileno=int(_option(r"vringlab-count\.so,fd=(\d+)")))
        what = count if behaviour == "counts" else str(len(THREADS))
        threading.Thread(target=_count, args=(plugin, what), daemon=True).start()
    keys = Keys(*(Key(folder / name, (folder / f"{name}.pub").read_text()) for name in KEYS))
    monitor = socket.socket(fileno=int(_option(r"id=qmp,fd=(\d+)")))
    # Where the programs that stand in for those of the machine write to.
    os.environ["FAKE_CONSOLE"] = str(console)
    paused, saving = "-incoming" in sys.argv, Saving(behaviour)
    with ExitStack() as stack:
        stack.enter_context(monitor)
        if not paused:
            stack.enter_context(SshServer(keys, port=port))
            _boot(console)
        send(monitor, GREETING)
        cpus = [{"cpu-index": n, "thread-id": tid} for n, tid in enumerate(THREADS)]
        for request in requests(monitor):
            command = request["execute"]
            with (folder / "monitor").open("a") as heard:
                heard.write(f"{os.getpid()} {command}\n")
            if command == "cont" and paused:
                stack.enter_context(SshServer(keys, port=port))
            known = saving.answer(command, request.get("arguments", {}))
            respond(monitor, request, {"return": cpus if command == "query-cpus-fast" else known})
            if command == "quit":
                return
        time.sleep(1000)  # A monitor that is closed does not end QEMU.


KEYS = ("host", "client", "stranger")

if __name__ == "__main__":
    main()
