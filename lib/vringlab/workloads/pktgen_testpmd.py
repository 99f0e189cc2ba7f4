"""Packets per second through a virtio-net transmit queue: pktgen in the guest, testpmd outside.

Seed 003's measurement: the kernel's pktgen sample 03 with a burst of 256, over vhost-user.

pktgen runs without a packet count and is stopped by time: with a count it waits until every
packet is freed, which can take for ever when TX NAPI is off.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Literal

from pydantic import Field

from vringlab.errors import InfrastructureError, TransientError
from vringlab.lab.guest import WORK, VhostUserNic
from vringlab.lab.lab import Lab
from vringlab.transport.local import Completed
from vringlab.workloads import interrupts, pktgen_output, testpmd_output
from vringlab.workloads.base import Outcome, Params
from vringlab.workloads.scripts import SHOW, sections

#: pktgen's thread, and with it the queue's work, is on this vCPU; its controller on the other.
_PKTGEN_CPU = 0
_OTHER_CPU = 1
_MARGIN_S = 60.0
#: VIRTIO_F_RING_PACKED (virtio 1.2, section 6).
_PACKED_BIT = 34
#: More than a report takes for one port: with this much of the log from before the run, the last
#: report before it is whole.
_REPORT_BYTES = 4000
#: Sections of a timed run's output.
_TIMED = ("before", "before-kicks", "after", "after-kicks", "result")
#: The first of them after the stream.
_STOPPED = "after"
#: testpmd drops all of them: no such machine exists.
_SINK_MAC = "52:54:00:76:6e:01"


class PktgenParams(Params):
    """One point of the matrix.

    Attributes:
        ring: Split or packed virtqueue.
        irq: The transmit interrupt's vCPU: pktgen's own (`same`) or another (`other`).
        ring_size: Entries of the transmit ring. One of 256 cuts a burst of 256 short: the driver
            stops while fewer than 2 + MAX_SKB_FRAGS entries are free.
        burst: Packets handed over with one notification.
    """

    ring: Literal["split", "packed"] = Field(default="split", description="split or packed")
    irq: Literal["same", "other"] = Field(default="same", description="same or other")
    ring_size: Literal[256, 512, 1024] = Field(default=256, description="256, 512 or 1024")
    burst: int = Field(default=256, ge=1, le=1024, description="packets a notification")

    @property
    def nic(self) -> VhostUserNic:
        """The device that this point runs on."""
        return VhostUserNic(packed=self.ring == "packed", ring_size=self.ring_size)


def device_settings(params: PktgenParams) -> list[str]:
    """What is written to the device's pktgen file, in order."""
    return [
        *("flag QUEUE_MAP_CPU", "count 0", "clone_skb 0", "pkt_size 60", "delay 0"),
        *("flag NO_TIMESTAMP", f"dst_mac {_SINK_MAC}"),
        *("dst_min 198.18.0.42", "dst_max 198.18.0.42", f"burst {params.burst}"),
    ]


def _setup_script(mac: str, writes: list[str]) -> str:
    """Find the device by its MAC and configure pktgen on it, in one exchange.

    By MAC: interface names change whenever the driver is swapped. Sections begin with
    `@@ NAME`; each write's section has the file's answer.
    """
    thread = f"/proc/net/pktgen/kpktgend_{_PKTGEN_CPU}"
    lines = [
        SHOW,
        "for d in /sys/class/net/*; do read -r m < $d/address; "
        f"[ $m != {mac} ] || dev=${{d##*/}}; done",
        '[ -n "$dev" ] || exit 8',
        'virtio=$(readlink -f "/sys/class/net/$dev/device")',
        'read -r features < "$virtio/features"',
        'ip link set "$dev" up || exit 9',
        'echo "@@ device"; echo "$dev ${virtio##*/} $features"',
        "echo '@@ interrupts'; show /proc/interrupts",
        "echo reset > /proc/net/pktgen/pgctrl",
        f"echo rem_device_all > {thread}",
        f'echo "add_device $dev@{_PKTGEN_CPU}" > {thread}',
        f"echo '@@ add_device'; show {thread}",
        f'target="/proc/net/pktgen/$dev@{_PKTGEN_CPU}"',
    ]
    for write in writes:
        quoted = shlex.quote(write)
        lines.append(f'echo {quoted} > "$target"; echo "@@ "{quoted}; show "$target"')
    return "\n".join(lines)


def _timed_script(device: str, irq: str, cpu: int, seconds: float) -> str:
    """Place the interrupt, count, run for `seconds`, count again; sections begin with `@@ NAME`.

    `stop` makes the blocking `start` return; the counters are read while the stream stands.
    """
    target = f"/proc/net/pktgen/{device}@{_PKTGEN_CPU}"
    count = f"show /proc/interrupts; echo '@@ %s-kicks'; ethtool -S {device}"
    return "\n".join(
        [
            SHOW,
            f"taskset -p -c {_OTHER_CPU} $$ >/dev/null",
            f"echo {cpu} > /proc/irq/{irq}/smp_affinity_list || exit 7",
            "echo '@@ before'",
            count % "before",
            "echo start > /proc/net/pktgen/pgctrl &",
            f"sleep {seconds:g}",
            "echo stop > /proc/net/pktgen/pgctrl",
            "wait",
            f"echo '@@ {_STOPPED}'",
            count % "after",
            "echo '@@ result'",
            f"show {target}",
        ]
    )


def _log_size(seen: Completed) -> int:
    if seen.returncode != 0:
        raise InfrastructureError(
            "testpmd has no log on the KVM host",
            remedy="see whether testpmd runs there: it is started with the guest",
            stderr=seen.stderr,
            returncode=seen.returncode,
        )
    return int(seen.stdout)


class PktgenTestpmd:
    """See the module."""

    name = "pktgen-testpmd"
    summary = "pktgen (burst 256) in the guest into testpmd rxonly: packets per second, interrupts"
    params: type[Params] = PktgenParams
    checks: Mapping[str, str] = {
        "throughput": "pktgen sent nothing or reports errors",
        "path": "packets were sent and testpmd received none, or far fewer",
        "placement": "the transmit interrupt was not on the vCPU asked for",
        "ring": "the device negotiated another kind of ring than asked for",
        "runtime": "the run was cut short",
        "pinning": "a pinned thread moved during the run",
    }

    def guest_options(self, points: list[Params]) -> dict[str, object]:
        """One vhost-user device for each kind and size of ring among the points."""
        nics = {point.nic for point in points if isinstance(point, PktgenParams)}
        return {"nics": sorted(nics, key=lambda nic: (nic.packed, nic.ring_size))}

    def run(self, lab: Lab, params: Params, duration_s: float) -> Outcome:
        """Send for `duration_s` through the point's device.

        Raises:
            InfrastructureError: the device or its interrupt is missing, or a tool failed.
            TransientError: testpmd says nothing any more, or a machine was lost.
        """
        assert isinstance(params, PktgenParams)
        guest, host = lab.guest.machine, lab.host.machine
        mac = lab.guest.nics[params.nic]
        # Reports from here on: earlier ones may show the run before.
        log = f"{WORK}/testpmd.log"
        size = host.start(["stat", "-c", "%s", log])
        done = guest.run(
            _setup_script(mac, device_settings(params)), timeout=_MARGIN_S, check=False
        )
        ready = sections(done.stdout)
        if "add_device" not in ready:
            raise InfrastructureError(
                f"the guest's network device {mac} cannot be used by pktgen",
                remedy="the virtio_net module may have failed to come up after a swap, or pktgen "
                "is not loaded",
                host="guest",
                stdout=done.stdout,
                stderr=done.stderr,
                returncode=done.returncode,
            )
        offset = _log_size(size.wait(_MARGIN_S))
        device, virtio, features = ready.pop("device").split()
        reading = interrupts.parse(ready.pop("interrupts"))
        queue = interrupts.tx_queues(reading, virtio)[0]
        irq = str(reading.numbers[queue][0])
        for wrote, answer in ready.items():
            pktgen_output.check_written(answer, wrote)

        cpu = _PKTGEN_CPU if params.irq == "same" else _OTHER_CPU
        started = datetime.now(UTC).isoformat(timespec="milliseconds")
        limit = duration_s + _MARGIN_S
        script = _timed_script(device, irq, cpu, duration_s)
        sending = guest.start(f"exec timeout -s KILL {limit:g} sh -c {shlex.quote(script)}")
        sending.wait_for(f"@@ {_STOPPED}", limit)
        # The next report is the first with all that was sent; testpmd flushes each as a whole. It
        # is waited for while the guest reads its counters.
        begin = max(0, offset - _REPORT_BYTES * len(lab.guest.nics))
        reporting = host.start(
            f"exec timeout -s KILL {_MARGIN_S:g} sh -c "
            + shlex.quote(
                f"n=$(grep -c '^Port stat' {log}); "
                f"while [ $(grep -c '^Port stat' {log}) = $n ]; do busybox usleep 20000; done; "
                f"busybox usleep 50000; tail -c +{begin + 1} {log}"
            )
        )
        timed = sending.wait(_MARGIN_S).stdout
        # Killed over there before our patience ends.
        reported = reporting.wait(2 * _MARGIN_S)
        reports = reported.stdout
        if reported.returncode != 0:
            raise TransientError(
                "testpmd stopped printing reports",
                remedy="see whether it still runs on the KVM host",
                host=host.name,
                stdout=reports,
                stderr=reported.stderr,
                returncode=reported.returncode,
            )

        found = sections(timed)
        if missing := [name for name in _TIMED if name not in found]:
            raise InfrastructureError(
                f"the run of pktgen printed no {missing[0]}",
                remedy="look at what the guest printed instead",
                host="guest",
                stdout=timed,
            )
        ports = testpmd_output.parse(testpmd_output.since(reports, offset - begin))
        port = lab.guest.testpmd_ports[params.nic]
        if port not in ports:
            raise InfrastructureError(
                f"testpmd reports nothing of port {port}",
                remedy="see whether testpmd still runs on the KVM host",
                host=host.name,
                stdout=reports,
            )
        kicks = sum(
            interrupts.kicks(interrupts.parse_ethtool(found["after-kicks"])).values()
        ) - sum(interrupts.kicks(interrupts.parse_ethtool(found["before-kicks"])).values())
        packed = features[_PACKED_BIT : _PACKED_BIT + 1] == "1"
        outcome = pktgen_output.pktgen_outcome(
            pktgen_output.parse(found["result"]),
            ports[port],
            tx_interrupts=interrupts.delta(
                interrupts.parse(found["before"]), interrupts.parse(found["after"]), queue
            ),
            kicks=kicks,
            irq=params.irq,
            pktgen_cpu=_PKTGEN_CPU,
            asked_s=duration_s,
            started=started,
            raw={
                "pktgen.txt": timed.encode(),
                "pktgen-setup.txt": done.stdout.encode(),
                "testpmd.txt": reports.encode(),
            },
            context={"device": device, "irq": irq, "ring_packed": packed},
        )
        ring_problem = (
            [f"the device has a {'packed' if packed else 'split'} ring, {params.ring} was asked"]
            if packed != (params.ring == "packed")
            else []
        )
        return replace(outcome, problems=(*outcome.problems, *ring_problem, *lab.pinning_drift()))


WORKLOAD = PktgenTestpmd()
