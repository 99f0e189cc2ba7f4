"""The documented vsock ping-pong: fio's net engine, one message in flight (seed 000).

The connector writes and the listener reads, both with `pingpong=1`; the writer's completion
latency is the round trip. Its first read has no MSG_WAITALL, hence the check for short reads.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

from pydantic import Field

from vringlab.errors import InfrastructureError
from vringlab.lab.lab import Lab
from vringlab.workloads.base import Outcome, Params
from vringlab.workloads.fio_output import outcome_of_text
from vringlab.workloads.latency import PERCENTILES
from vringlab.workloads.vsock_ends import TOOL_MARGIN_S, Direction, VsockBenchmark, ends


class FioParams(Params):
    """One point of the matrix.

    Attributes:
        payload: Bytes of a message.
        direction: Who sends first: host-guest-host or guest-host-guest.
    """

    payload: int = Field(default=64, ge=1, le=262144, description="bytes of a message")
    direction: Direction = Field(default="h-g-h", description="h-g-h or g-h-g")


def fio_argv(role: str, *, port: int, payload: int, runtime_s: float, cid: int = 0) -> list[str]:
    """Arguments of fio for one end (`writer` connects to `cid`, `reader` listens); pure."""
    end = ["--rw=write", f"--hostname={cid}"] if role == "writer" else ["--rw=read", "--listen"]
    return [
        "fio",
        f"--name={role}",
        *("--ioengine=net", "--protocol=vsock", "--pingpong=1", "--thread"),
        *(f"--port={port}", f"--bs={payload}", "--size=1t"),
        *("--time_based", f"--runtime={runtime_s:g}"),
        f"--percentile_list={':'.join(f'{p:g}' for p in PERCENTILES)}",
        "--output-format=json+",
        *end,
    ]


class FioVsockPingpong(VsockBenchmark):
    """See the module."""

    name = "fio-vsock-pingpong"
    summary = "fio vsock ping-pong: round-trip latency as in seed 000"
    params: type[Params] = FioParams
    checks: Mapping[str, str] = {
        "short_ios": "a message was answered in parts: more than one was in flight",
        "rate x mean": "round trips a second times their mean is not about 1",
        "runtime": "the run was cut short",
        "errors": "fio reports an error or no I/O at all",
        "pinning": "a pinned thread moved during the run",
    }

    def run(self, lab: Lab, params: Params, duration_s: float) -> Outcome:
        """Run fio on both ends for `duration_s`.

        Raises:
            InfrastructureError: fio is missing or its output is cut off.
        """
        assert isinstance(params, FioParams)
        connector, listener, cid = ends(lab, params.direction)
        port = self._ports.take()
        # The reader outlasts the writer: it ends when its peer closes.
        read = fio_argv(
            "reader", port=port, payload=params.payload, runtime_s=duration_s + TOOL_MARGIN_S
        )
        write = fio_argv("writer", port=port, payload=params.payload, runtime_s=duration_s, cid=cid)
        limit = duration_s + TOOL_MARGIN_S

        def bounded(cpu: int, argv: list[str]) -> str:
            return f"exec timeout -s KILL {limit:g} taskset -c {cpu} {shlex.join(argv)}"

        reader = listener.machine.start(bounded(listener.cpu, read))
        try:
            reader.wait_for("waiting for connection", TOOL_MARGIN_S)
            started = datetime.now(UTC).isoformat(timespec="milliseconds")
            wrote = connector.machine.start(bounded(connector.cpu, write)).wait(limit)
            done = reader.wait(TOOL_MARGIN_S)
        finally:
            reader.close()
        for end, result in (("writer", wrote), ("reader", done)):
            if result.returncode == 127:
                raise InfrastructureError(
                    f"fio is not there for the {end}",
                    remedy="the image has it; on a host of your own run from the image",
                    stderr=result.stderr,
                )
        outcome = outcome_of_text(
            wrote.stdout,
            done.stdout,
            payload=params.payload,
            asked_s=duration_s,
            started=started,
        )
        return replace(
            outcome,
            problems=(*outcome.problems, *lab.pinning_drift()),
            raw={
                **outcome.raw,
                "fio-writer.stderr": wrote.stderr.encode(),
                "fio-reader.stderr": done.stderr.encode(),
            },
            context={
                **outcome.context,
                "writer": shlex.join(write),
                "reader": shlex.join(read),
                "cpus": {"connector": connector.cpu, "listener": listener.cpu},
            },
        )


WORKLOAD = FioVsockPingpong()
