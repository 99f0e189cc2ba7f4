"""One-way throughput over vsock, many connections at once: our own `vringlab-stream`.

Seed 004 used uperf with 64 threads, 16 B, 64 KB, and 4-8 KB "picked randomly according to normal
distribution". uperf draws sizes uniformly only, so a generator of our own stands in for it, which
also tells when the threads did not run at once. The mail does not say how wide its distribution
was: here the mean is the middle of the range, the standard deviation a sixth of it, and what falls
outside is drawn again (3 in 1000).

Beside the run CPU time and the slab caches that packets come from are read on both machines, see
`vringlab.workloads.beside`; they can fail without making the throughput invalid.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from vringlab.lab.lab import Lab
from vringlab.workloads import sampler
from vringlab.workloads.base import Metric, Outcome, Params
from vringlab.workloads.beside import Samplers, Seen, seen
from vringlab.workloads.stream_output import StreamResult, parse, stream_outcome
from vringlab.workloads.vsock_ends import TOOL_MARGIN_S, VsockBenchmark, ends

#: What vringlab-stream sends at most in one message: more does not fit a vsock buffer.
LARGEST = 262144
#: Of a normal distribution's range: six standard deviations.
_DEVIATIONS = 6

#: Warm-up, s: threads start one after the other, under emulation within about 30 ms of each other
#: (measured: up to 2 s for 64), and the throughput counts only when all of them run.
_WARMUP_S = 0.5
_WARMUP_THREAD_S = 0.04

#: With 16 B messages the packets of a full socket buffer (256 KiB of payload) take about 15 MB, a
#: thread: above so many threads the guest gets more memory.
_MANY_THREADS = 16
_MANY_THREADS_MIB = 2048

#: Payload of a full vsock buffer, and the slowest rate at which messages were seen to leave it
#: (16 B from host to guest under emulation): what is in the buffers when the sender is done must
#: still be received.
_BUFFER_BYTES = 262144
_DRAIN_MESSAGES_S = 7000

_RANGE = re.compile(r"(\d{1,6})-(\d{1,6})")


class StreamParams(Params):
    """One point of the matrix.

    Attributes:
        threads: Connections, each with a thread on both ends.
        sizes: How message sizes are drawn.
        payload: Bytes of a message: a number for fixed sizes, `A-B` for drawn ones.
        direction: Guest to host or host to guest.
        type: Of the sockets: stream or seqpacket.
    """

    threads: int = Field(default=1, ge=1, le=64, description="connections, 1 to 64")
    # Before the payload, whose check looks at it.
    sizes: Literal["fixed", "uniform", "normal"] = Field(
        default="fixed", description="fixed, uniform or normal"
    )
    payload: int | str = Field(
        default=65536,
        validate_default=True,
        description="bytes of a message; A-B for uniform and normal sizes",
    )
    direction: Literal["g2h", "h2g"] = Field(default="g2h", description="g2h or h2g")
    type: Literal["stream", "seqpacket"] = Field(
        default="stream", description="stream or seqpacket"
    )

    @field_validator("payload", mode="before")
    @classmethod
    def _number(cls, value: object) -> object:
        if isinstance(value, bool):
            raise ValueError("a payload is a number of bytes or A-B")
        text = str(value).strip()
        return int(text) if text.isascii() and text.isdigit() else value

    @field_validator("payload")
    @classmethod
    def _fits_sizes(cls, value: int | str, info: ValidationInfo) -> int | str:
        # Without sizes they were wrong, and their own message is enough.
        sizes = info.data.get("sizes", "fixed" if isinstance(value, int) else "uniform")
        if isinstance(value, int):
            if sizes != "fixed":
                raise ValueError(f"{sizes} sizes need a range A-B, not {value}")
            if not 1 <= value <= LARGEST:
                raise ValueError(f"a message has 1 to {LARGEST} bytes, not {value}")
            return value
        match = _RANGE.fullmatch(value)
        if match is None:
            raise ValueError(f"{value!r} is neither a number of bytes nor a range A-B")
        if sizes == "fixed":
            raise ValueError(f"fixed sizes need a number of bytes, not {value}")
        if not 1 <= int(match[1]) < int(match[2]) <= LARGEST:
            raise ValueError(f"a range goes up, from 1 at least to {LARGEST} at most: not {value}")
        return value

    @property
    def size_spec(self) -> str:
        """What `vringlab-stream --size` takes."""
        if isinstance(self.payload, int):
            return str(self.payload)
        low, high = map(int, self.payload.split("-"))
        if self.sizes == "uniform":
            return f"uniform:{low},{high}"
        mean, sd = (low + high) // 2, max(1, round((high - low) / _DEVIATIONS))
        return f"normal:{mean},{sd},{low},{high}"

    @property
    def drain_s(self) -> float:
        """Time that full buffers may take to be received after the sender is done."""
        least = int(str(self.payload).partition("-")[0])
        return self.threads * _BUFFER_BYTES / least / _DRAIN_MESSAGES_S

    @property
    def warmup_s(self) -> float:
        """Time before the timed window in which all threads come to run."""
        return _WARMUP_S + _WARMUP_THREAD_S * self.threads


class VsockStream(VsockBenchmark):
    """See the module.

    Args:
        rate_hz: Readings a second of what is sampled beside the run.
    """

    name = "vsock-stream"
    summary = "vringlab-stream: vsock throughput, 1 to 64 threads, with CPU use and slab memory"
    params: type[Params] = StreamParams
    checks: Mapping[str, str] = {
        "throughput": "nothing arrived, or a connection moved no byte",
        "common window": "the threads ran at once for less than 80 % of the time",
        "resets": "a connection was reset or lost, or the kernel answered ENOBUFS",
        "bytes": "what arrived is not what was sent",
        "pinning": "a pinned thread moved during the run",
    }

    def __init__(self, rate_hz: float = sampler.RATE_HZ) -> None:
        super().__init__()
        self._rate_hz = rate_hz

    def guest_options(self, points: list[Params]) -> dict[str, object]:
        """Slab caches that are not merged, and memory for what many threads leave in sockets."""
        options: dict[str, object] = {"kernel_args": "slab_nomerge"}
        threads = [point.threads for point in points if isinstance(point, StreamParams)]
        if max(threads, default=0) > _MANY_THREADS:
            options["memory_mib"] = _MANY_THREADS_MIB
        return options

    def run(self, lab: Lab, params: Params, duration_s: float) -> Outcome:
        """Send for `duration_s` after the warm-up.

        Raises:
            InfrastructureError: a tool is missing or its output is cut off.
        """
        assert isinstance(params, StreamParams)
        sender, receiver, cid = ends(lab, "g-h-g" if params.direction == "g2h" else "h-g-h")
        port = str(self._ports.take())

        def common(machine: object, cpu: int) -> list[str]:
            # Threads on one vCPU would take turns and never meet on a lock, so the guest's have
            # all of them. The host's other processors run the vCPUs and the vhost worker.
            several = params.threads > 1 and machine is lab.guest.machine
            return [
                *("--family", "vsock", "--type", params.type, "--json"),
                *("--timeout", f"{TOOL_MARGIN_S:g}"),
                *("--cpus", f"0-{lab.guest.spec.vcpus - 1}" if several else str(cpu)),
            ]

        listen = [
            *("vringlab-stream", "listen", port),
            *common(receiver.machine, receiver.cpu),
        ]
        connect = [
            *("vringlab-stream", "connect", str(cid), port),
            *common(sender.machine, sender.cpu),
            *("--threads", str(params.threads), "--size", params.size_spec),
            *("--duration", f"{duration_s:g}", "--warmup", f"{params.warmup_s:g}"),
        ]
        limit = duration_s + params.warmup_s + params.drain_s + TOOL_MARGIN_S
        machines = {"guest": lab.guest.machine, "host": lab.host.machine}
        with Samplers(machines, self._rate_hz, limit) as samplers:
            far = receiver.machine.start(f"exec timeout -s KILL {limit:g} {shlex.join(listen)}")
            try:
                far.wait_for("listening", TOOL_MARGIN_S)
                samplers.await_baseline()
                started = datetime.now(UTC).isoformat(timespec="milliseconds")
                near = sender.machine.run(connect, timeout=limit, check=False)
                heard = far.wait(TOOL_MARGIN_S)
            finally:
                far.close()
            samplers.stop()
            drift = lab.pinning_drift()
            sampled = samplers.texts()
        sent, arrived = parse(near.stdout), parse(heard.stdout)
        guest_end, host_end = (sent, arrived) if params.direction == "g2h" else (arrived, sent)
        guest = _seen(sampled["guest"], guest_end, cpu="guest_cpu")
        host = _seen(sampled["host"], host_end, cpu="cpu", prefix="host_")
        outcome = stream_outcome(
            sent,
            arrived,
            threads=params.threads,
            started=started,
            raw={
                "stream-sender.json": near.stdout.encode(),
                "stream-sender.stderr": near.stderr.encode(),
                "stream-receiver.json": heard.stdout.encode(),
                "stream-receiver.stderr": heard.stderr.encode(),
                **{f"sampled-{name}.txt": text.encode() for name, text in sampled.items()},
            },
        )
        metrics = [*outcome.metrics, *guest.metrics, *host.metrics]
        values = {metric.name: metric.value for metric in metrics}
        if "throughput" in values and "cpu" in values:
            per_cpu = values["throughput"] / values["cpu"]
            metrics.append(Metric("throughput_per_cpu", per_cpu, "bit/s/percent"))
        return replace(
            outcome,
            metrics=tuple(metrics),
            problems=(*outcome.problems, *_other_sizes(params, sent), *drift),
            warnings=(
                *outcome.warnings,
                *(f"guest: {words}" for words in guest.warnings),
                *(f"host: {words}" for words in host.warnings),
            ),
            context={
                **outcome.context,
                "sender": shlex.join(connect),
                "receiver": shlex.join(listen),
                "sampled": {
                    "rate_hz": self._rate_hz,
                    "guest": guest.context,
                    "host": host.context,
                },
            },
        )


def _seen(text: str, end: StreamResult, *, cpu: str, prefix: str = "") -> Seen:
    window = (end.zero_ns + end.window.begin_ns, end.zero_ns + end.window.end_ns)
    return seen(text, cpu=cpu, prefix=prefix, window=window, load=end.load_ns)


def _other_sizes(params: StreamParams, sent: StreamResult) -> list[str]:
    low, _, high = str(params.payload).partition("-")
    asked = (params.sizes, int(low), int(high or low))
    used = (sent.sizes.kind, sent.sizes.min, sent.sizes.max)
    if used == asked:
        return []
    return [f"the tool sent {used[0]} sizes of {used[1]} to {used[2]} bytes, not {params.payload}"]


WORKLOAD = VsockStream()
