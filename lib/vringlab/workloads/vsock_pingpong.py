"""The second tool: a vsock ping-pong of our own that waits for whole messages.

It answers what fio cannot on kernels where a message does not fit one receive buffer: there its
short reads make fio's figures meaningless, and this tool's stay true (every message carries the
token of the one before, so two in flight are seen).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

from pydantic import Field

from vringlab.lab.lab import Lab
from vringlab.workloads.base import Outcome, Params
from vringlab.workloads.pingpong_output import parse, pingpong_outcome
from vringlab.workloads.vsock_ends import TOOL_MARGIN_S, Direction, VsockBenchmark, ends

#: Round trips that are not counted: connection set-up and cold caches.
_WARMUP = 50


class PingpongParams(Params):
    """One point of the matrix.

    Attributes:
        payload: Bytes of a message; the tool's own header needs 16.
        direction: Who sends first: host-guest-host or guest-host-guest.
    """

    payload: int = Field(default=64, ge=16, le=131072, description="bytes of a message")
    direction: Direction = Field(default="h-g-h", description="h-g-h or g-h-g")


class VsockPingpong(VsockBenchmark):
    """See the module."""

    name = "vsock-pingpong"
    summary = "vringlab-pingpong: vsock round-trip latency with whole messages, any payload"
    params: type[Params] = PingpongParams
    checks: Mapping[str, str] = {
        "sequence": "a message was not the answer to the one before",
        "rate x mean": "round trips a second times their mean is not about 1",
        "runtime": "the run was cut short, or an end was lost",
        "pinning": "a pinned thread moved during the run",
    }

    def run(self, lab: Lab, params: Params, duration_s: float) -> Outcome:
        """Run both ends for `duration_s`.

        Raises:
            InfrastructureError: the tool is missing or its output is cut off.
        """
        assert isinstance(params, PingpongParams)
        connector, listener, cid = ends(lab, params.direction)
        port = str(self._ports.take())
        common = ["--family", "vsock", "--timeout", f"{TOOL_MARGIN_S:g}", "--json"]
        listen = ["vringlab-pingpong", "listen", port, *common, "--cpu", str(listener.cpu)]
        connect = [
            *("vringlab-pingpong", "connect", str(cid), port, *common),
            *("--cpu", str(connector.cpu), "--payload", str(params.payload)),
            *("--duration", f"{duration_s:g}", "--warmup", str(_WARMUP)),
        ]
        limit = duration_s + 2 * TOOL_MARGIN_S
        far = listener.machine.start(f"exec timeout -s KILL {limit:g} {shlex.join(listen)}")
        try:
            far.wait_for("listening", TOOL_MARGIN_S)
            started = datetime.now(UTC).isoformat(timespec="milliseconds")
            near = connector.machine.run(connect, timeout=limit, check=False)
            heard = far.wait(TOOL_MARGIN_S)
        finally:
            far.close()
        raw = {
            "pingpong-connector.json": near.stdout.encode(),
            "pingpong-connector.stderr": near.stderr.encode(),
            "pingpong-listener.json": heard.stdout.encode(),
            "pingpong-listener.stderr": heard.stderr.encode(),
        }
        outcome = pingpong_outcome(
            parse(near.stdout),
            parse(heard.stdout),
            payload=params.payload,
            asked_s=duration_s,
            started=started,
            raw=raw,
        )
        return replace(
            outcome,
            problems=(*outcome.problems, *lab.pinning_drift()),
            context={
                **outcome.context,
                "connector": shlex.join(connect),
                "listener": shlex.join(listen),
            },
        )


WORKLOAD = VsockPingpong()
