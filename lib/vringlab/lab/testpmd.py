"""testpmd's command line: one process that receives on all vhost-user devices of a guest."""

from __future__ import annotations

from collections.abc import Sequence

TESTPMD_READY_S = 60.0
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
