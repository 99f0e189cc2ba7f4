"""/proc/net/pktgen: answers to writes, the result of a run, and what a run into testpmd is worth.

The formats are those of net/core/pktgen.c (`pktgen_if_show`, `show_results`), seen on 6.12.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from vringlab.errors import InfrastructureError
from vringlab.workloads.base import Metric, Outcome
from vringlab.workloads.latency import window_problem
from vringlab.workloads.testpmd_output import PortSeries

_ANSWER = re.compile(r"^Result: ?(.*)", re.MULTILINE)
_TIMES = re.compile(
    r"OK: (?P<elapsed>\d{1,20})\(c(?P<busy>\d{1,20})\+d(?P<idle>\d{1,20})\) usec, "
    r"(?P<packets>\d{1,20}) \((?P<size>\d{1,10})byte,(?P<frags>-?\d{1,10})frags\)"
)
_RATES = re.compile(
    r"^\s*(?P<pps>\d{1,20})pps \d{1,20}Mb/sec \((?P<bps>\d{1,20})bps\) "
    r"errors: (?P<errors>\d{1,20})",
    re.MULTILINE,
)
_PAIR = re.compile(r"(\w{1,40}): ?(\S*)")

#: Below this share of what was sent, what arrived is noise and not the stream.
_EXERCISED_SHARE = 0.001
#: How far apart sent and received packets may be, as a share of the larger. A vhost-user queue
#: loses nothing: only what is under way when testpmd's report is printed may be missing.
COUNT_TOLERANCE = 0.05
#: Share of the TX interrupts that must be on pktgen's vCPU ("same") or elsewhere ("other").
PLACED_SHARE = 0.9
#: With fewer interrupts than this their placement says nothing.
_FEW_INTERRUPTS = 10


@dataclass(frozen=True)
class PktgenResult:
    """A finished run of pktgen on one device.

    Attributes:
        device: Its name with the queue, `eth1@0`; empty when the text did not say.
        elapsed_us: From start to stop, by the kernel's clock.
        idle_us: Of these, waiting.
        packets: Packets handed to the driver.
        frame_bytes: Bytes of a packet without its checksum.
        pps: Packets a second, as the kernel computed it.
        bits_per_s: Bits a second, likewise.
        errors: Packets that the driver refused.
        params: Settings in force, by pktgen's names; `Flags` is the whole list.
    """

    device: str
    elapsed_us: int
    idle_us: int
    packets: int
    frame_bytes: int
    pps: int
    bits_per_s: int
    errors: int
    params: Mapping[str, str]


def check_written(text: str, wrote: str) -> str:
    """The answer to a write, as the file then shows it.

    pktgen accepts some writes that it does not understand and says so only there
    (`Flag -:NOSUCH:- unknown`).

    Args:
        text: The file after the write: a kpktgend_N, or a device's.
        wrote: What was written, for the message.

    Raises:
        InfrastructureError: the answer is not an OK.
    """
    answer = _answer(text)
    if answer.startswith("OK"):
        return answer
    raise InfrastructureError(
        f"pktgen did not take {wrote!r}: {answer or 'no answer'}",
        remedy="check the device's name and that this kernel's pktgen knows the setting",
        stdout=text,
    )


def _answer(text: str) -> str:
    found = _ANSWER.findall(text)
    return str(found[-1]).strip() if found else ""


def parse(text: str) -> PktgenResult:
    """Read a device's file after the run.

    Raises:
        InfrastructureError: it holds no result; says whether the run was never started, still
            goes on, or failed.
    """
    times, rates = _TIMES.search(text), _RATES.search(text)
    if times is None or rates is None:
        raise _no_result(text)
    params = _params(text)
    return PktgenResult(
        device=params.get("ifname", ""),
        elapsed_us=int(times["elapsed"]),
        idle_us=int(times["idle"]),
        packets=int(times["packets"]),
        frame_bytes=int(times["size"]),
        pps=int(rates["pps"]),
        bits_per_s=int(rates["bps"]),
        errors=int(rates["errors"]),
        params=params,
    )


def _no_result(text: str) -> InfrastructureError:
    answer = _answer(text)
    remedy = "read the file of the device (/proc/net/pktgen/DEV@Q) after pktgen was stopped"
    if answer.startswith("Starting"):
        message = "pktgen has no result yet: it is still running"
    elif answer == "Idle" or answer.startswith("OK:"):
        message = f"pktgen has no result: it was not started (its last answer: {answer})"
        remedy = "write `start` to /proc/net/pktgen/pgctrl and wait for it to return"
    elif answer:
        message = f"pktgen has no result: {answer}"
    else:
        message = "this is not the file of a pktgen device: it has no Result line"
    return InfrastructureError(message, remedy=remedy, stdout=text)


def _params(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in text.partition("Current:")[0].splitlines():
        if line.strip().startswith("Flags:"):
            found["Flags"] = " ".join(line.split()[1:])
            continue
        count = re.match(r"Params: count (\d+)", line)
        if count:
            found["count"] = count[1]
            line = line[count.end() :]
        found.update({key: value for key, value in _PAIR.findall(line) if key != "Params"})
    return found


def pktgen_outcome(
    result: PktgenResult,
    receiver: PortSeries,
    *,
    tx_interrupts: Mapping[int, int],
    kicks: int,
    irq: Literal["same", "other"],
    pktgen_cpu: int,
    asked_s: float,
    started: str = "",
    raw: Mapping[str, bytes] | None = None,
    context: Mapping[str, object] | None = None,
) -> Outcome:
    """Judge a run of pktgen in the guest into testpmd on the host.

    Args:
        result: What pktgen says.
        receiver: What testpmd's port received around and during the run.
        tx_interrupts: TX interrupts of the device during the run: vCPU -> count.
        kicks: Notifications of the device during the run.
        irq: Where the TX interrupt was to be: on pktgen's vCPU or on another.
        pktgen_cpu: The vCPU that pktgen ran on.
        asked_s: Length of run asked for, seconds; 0 checks nothing.
        started: UTC start of the timed window, ISO 8601.
        raw: Output as printed, by file name.
        context: What else was seen; kept with what is added here.
    """
    seen_s = result.elapsed_us / 1e6
    pps_rx, source = _received_pps(receiver, seen_s)
    interrupts = sum(tx_interrupts.values())
    placed, warnings = _placement(tx_interrupts, irq, pktgen_cpu)
    short = window_problem(seen_s, asked_s)
    problems = [
        *_path_problems(result, receiver.received),
        *placed,
        *([short] if short else []),
    ]
    metrics = [Metric("pps_tx", float(result.pps), "1/s"), Metric("pps_rx", pps_rx, "1/s")]
    if seen_s > 0:
        metrics.append(Metric("tx_interrupts", interrupts / seen_s, "1/s"))
        metrics.append(Metric("kicks", kicks / seen_s, "1/s"))
    return Outcome(
        metrics=tuple(metrics),
        problems=tuple(problems),
        warnings=tuple(warnings),
        started=started,
        window_s=seen_s,
        raw=raw or {},
        context={
            **(context or {}),
            "pktgen": dict(result.params),
            "tx_packets": result.packets,
            "rx_packets": receiver.received,
            "pps_rx_from": source,
            "tx_interrupts_by_cpu": {str(cpu): count for cpu, count in tx_interrupts.items()},
            "pktgen_cpu": pktgen_cpu,
        },
    )


def _received_pps(receiver: PortSeries, seen_s: float) -> tuple[float, str]:
    steady = receiver.steady_pps()
    if steady is not None:
        return steady, "mean of the reports inside the run"
    # A run shorter than a few reports: what arrived in all, over the sender's time.
    return (receiver.received / seen_s if seen_s > 0 else 0.0), "packets over pktgen's time"


def _path_problems(result: PktgenResult, received: int) -> list[str]:
    """Compare what was sent with what arrived in all: rates depend on when they were read."""
    problems = []
    if result.packets == 0 or result.pps == 0:
        problems.append("0 throughput: pktgen sent no packet")
    elif received < _EXERCISED_SHARE * result.packets:
        problems.append(
            f"path not exercised: pktgen sent {result.packets} packets, testpmd received {received}"
        )
    elif abs(received - result.packets) > COUNT_TOLERANCE * max(received, result.packets):
        problems.append(
            f"pktgen sent {result.packets} packets and testpmd received {received}: further "
            f"apart than {COUNT_TOLERANCE:.0%}"
        )
    if result.errors:
        problems.append(f"pktgen counted {result.errors} errors")
    return problems


def _placement(
    tx_interrupts: Mapping[int, int], irq: Literal["same", "other"], pktgen_cpu: int
) -> tuple[list[str], list[str]]:
    total = sum(tx_interrupts.values())
    if total < _FEW_INTERRUPTS:
        return [], [f"{total} TX interrupts: too few to see which vCPU takes them"]
    here = tx_interrupts.get(pktgen_cpu, 0) / total
    right = here if irq == "same" else 1 - here
    if right >= PLACED_SHARE:
        return [], []
    wanted = "on pktgen's vCPU" if irq == "same" else "on another vCPU than pktgen's"
    return [
        f"TX interrupts landed on the wrong vCPU: they were to be {wanted} ({pktgen_cpu}), and "
        f"{here:.0%} of {total} were on it"
    ], []
