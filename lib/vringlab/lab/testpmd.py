"""testpmd on the KVM host: one process that receives on all vhost-user devices of a guest."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence

from vringlab.errors import InfrastructureError, TransientError
from vringlab.lab.pinning import Layout
from vringlab.transport.ssh import Machine, Process

_READY_S = 60.0
#: Statistics are printed this often; two reports must lie within a timed window.
STATS_PERIOD_S = 1


def testpmd_argv(sockets: Sequence[str], *, main_cpu: int, polling_cpu: int) -> list[str]:
    """Arguments for `rxonly` over the sockets; port N serves the N-th.

    Without a statistics period testpmd ends when its standard input does.
    """
    argv = [
        *("dpdk-testpmd", "-l", f"{main_cpu},{polling_cpu}", "--main-lcore", str(main_cpu)),
        *("-m", "512", "--no-huge", "--no-pci", "--file-prefix=vringlab"),
    ]
    for index, path in enumerate(sockets):
        argv += ["--vdev", f"net_vhost{index},iface={path},queues=1"]
    return [
        *argv,
        "--",
        *("--forward-mode=rxonly", "--auto-start", f"--stats-period={STATS_PERIOD_S}"),
        *("--total-num-mbufs=16384", "--no-mlockall"),
    ]


def start(machine: Machine, folder: str, sockets: Sequence[str], layout: Layout) -> Process:
    """Run testpmd until it is ready for the guest.

    Args:
        machine: The KVM host.
        folder: There, for its log and its pid.
        sockets: One for each device.
        layout: Where it runs.

    Raises:
        InfrastructureError: it did not come up.
        TransientError: the host was lost.
    """
    argv = testpmd_argv(sockets, main_cpu=layout.tools, polling_cpu=layout.backend)
    machine.run(["rm", "-f", *sockets, f"{folder}/testpmd.log"])
    process = machine.start(
        f"echo $$ > {folder}/testpmd.pid; exec {shlex.join(argv)} > {folder}/testpmd.log 2>&1"
    )
    ready = " && ".join(f"[ -S {path} ]" for path in sockets)
    try:
        done = machine.run(
            f"until {ready}; do [ -d /proc/$(cat {folder}/testpmd.pid) ] || exit 9; "
            "busybox usleep 20000; done",
            timeout=_READY_S,
            check=False,
        )
    except TransientError:
        done = None
    if done is not None and done.returncode == 0:
        return process
    log = machine.run(["tail", "-n", "20", f"{folder}/testpmd.log"], check=False)
    end(machine, folder)
    process.close()
    raise InfrastructureError(
        "testpmd did not come up on the KVM host",
        remedy="see its last lines; it needs 512 MiB of free memory and SSE4.2",
        command=argv,
        host=machine.name,
        stdout=log.stdout,
    )


def end(machine: Machine, folder: str) -> None:
    """End the testpmd that was started with that folder, whoever started it."""
    with contextlib.suppress(InfrastructureError):
        machine.run(f"kill -KILL $(cat {folder}/testpmd.pid)", check=False)
