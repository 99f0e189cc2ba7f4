"""A program that stands in for the embedded host's QEMU: console, monitor and sshd, no machine.

`FAKE_QEMU` says how it behaves: `works`, `dies`, or `port-taken N` for the first N calls;
`FAKE_QEMU_KEYS` is the folder of the keys and of what it notes.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from pathlib import Path

from tests.fakes.qmp_server import GREETING, requests, respond, send
from tests.fakes.ssh_server import Key, Keys, SshServer

THREADS = (71, 72, 73, 74)


def _option(pattern: str) -> str:
    found = re.search(pattern, " ".join(sys.argv))
    assert found is not None, sys.argv
    return found[1]


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
    console.write_text("Linux version 6.12\n")
    if behaviour == "dies":
        console.write_text("Linux version 6.12\nKernel panic - not syncing\n")
        sys.exit("qemu: cannot set up guest memory: Cannot allocate memory")
    keys = Keys(*(Key(folder / name, (folder / f"{name}.pub").read_text()) for name in KEYS))
    monitor = socket.socket(fileno=int(_option(r"id=qmp,fd=(\d+)")))
    with SshServer(keys, port=port), monitor:
        console.write_text("Linux version 6.12\nvringlab: host is set up\n")
        send(monitor, GREETING)
        cpus = [{"cpu-index": n, "thread-id": tid} for n, tid in enumerate(THREADS)]
        for request in requests(monitor):
            found = cpus if request["execute"] == "query-cpus-fast" else {}
            respond(monitor, request, {"return": found})
        time.sleep(1000)  # A monitor that is closed does not end QEMU.


KEYS = ("host", "client", "stranger")

if __name__ == "__main__":
    main()
