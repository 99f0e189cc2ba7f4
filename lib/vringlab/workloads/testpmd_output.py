"""dpdk-testpmd's periodic port statistics (`--stats-period`), read from what it printed.

Written against testpmd 24.11. Every report clears the screen, then has a block a port with
running totals and the rates since the report before.
"""

from __future__ import annotations

import itertools
import re
import statistics
from dataclasses import dataclass

from vringlab.errors import InfrastructureError

_CSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_SCREEN = re.compile(r"\x1b\[2J")
_BLOCK = re.compile(r"#+ NIC statistics for port (\d{1,5})\s+#+")
_BLOCK_END = re.compile(r"^\s*#{20,}\s*$", re.MULTILINE)
_PACKETS = re.compile(r"RX-packets:\s*(\d{1,20})")
_MISSED = re.compile(r"RX-missed:\s*(\d{1,20})")
_RATE = re.compile(r"Rx-pps:\s*(\d{1,20})")

#: Below this share of its highest rate a port counts as not receiving the stream under test
#: (neighbour and router discovery still trickle in).
_IDLE_SHARE = 0.01


@dataclass(frozen=True)
class PortSeries:
    """What one port received, report by report.

    Attributes:
        port: Its number.
        rx_pps: Packets a second since the report before; the first report is left out, because
            it has none before it.
        rx_packets: Running total, for the same reports.
        rx_missed: Running total of packets the port had no room for, for the same reports.
        first_total: Running total at the first report.
    """

    port: int
    rx_pps: tuple[int, ...]
    rx_packets: tuple[int, ...]
    rx_missed: tuple[int, ...]
    first_total: int

    @property
    def received(self) -> int:
        """Packets received between the first report and the last."""
        return self.rx_packets[-1] - self.first_total if self.rx_packets else 0

    def steady_pps(self) -> float | None:
        """Mean rate over the reports wholly inside the stream; `None` when there is none.

        The reports in which the stream began and ended cover only part of it. A pause in the
        middle counts.
        """
        floor = _IDLE_SHARE * max(self.rx_pps, default=0)
        active = [i for i, rate in enumerate(self.rx_pps) if rate > floor]
        if not active:
            return None
        inside = self.rx_pps[active[0] + 1 : active[-1]]
        return statistics.fmean(inside) if inside else None


def strip_screen(text: str) -> str:
    """The text without terminal control sequences and carriage returns."""
    return _CSI.sub("", text).replace("\r", "")


def since(text: str, offset: int) -> str:
    """The part of a log from the last report that was complete at `offset` characters.

    That report was printed before what began at `offset`, so its totals are the base of what
    follows; reports before it may show an earlier run.
    """
    starts = [found.start() for found in _SCREEN.finditer(text)]
    complete = [
        start for start, end in itertools.pairwise([*starts, len(text) + 1]) if end <= offset
    ]
    return text[complete[-1] :] if complete else text


def parse(text: str) -> dict[int, PortSeries]:
    """The statistics of every port; a block cut off at the end of the text is left out.

    Raises:
        InfrastructureError: there is no complete block.
    """
    plain = strip_screen(text)
    heads = list(_BLOCK.finditer(plain))
    found: dict[int, list[tuple[int, int, int]]] = {}
    for index, head in enumerate(heads):
        limit = heads[index + 1].start() if index + 1 < len(heads) else len(plain)
        body = plain[head.end() : limit]
        end = _BLOCK_END.search(body)
        if end is None:  # testpmd was ended, or the text fetched, in the middle of it
            continue
        body = body[: end.start()]
        packets, missed, rate = (p.search(body) for p in (_PACKETS, _MISSED, _RATE))
        if packets is None or rate is None:
            continue
        found.setdefault(int(head[1]), []).append(
            (int(rate[1]), int(packets[1]), int(missed[1]) if missed else 0)
        )
    if not found:
        raise InfrastructureError(
            "dpdk-testpmd printed no port statistics",
            remedy=(
                "look at what it says above: it needs --stats-period, and its port must have "
                "started (an error of the EAL or of the vhost socket comes before)"
            ),
            stdout=plain,
        )
    return {
        port: PortSeries(
            port=port,
            rx_pps=tuple(rate for rate, _, _ in reports[1:]),
            rx_packets=tuple(packets for _, packets, _ in reports[1:]),
            rx_missed=tuple(missed for _, _, missed in reports[1:]),
            first_total=reports[0][1],
        )
        for port, reports in sorted(found.items())
    }
