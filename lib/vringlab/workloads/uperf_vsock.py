"""One-way throughput over vsock with uperf, where it is installed on both ends.

Seed 004 used uperf. It has vsock since 1.0.8 and is in no Debian suite, so the image has none:
`vsock-stream` is the generator that is always there. **This workload never ran against a real
uperf here**: profile and parser follow uperf's sources (`src/parse.c`, `workloads/vsock.xml`) and
the `-R` lines that its users read, and are tested on text only.

uperf counts what it wrote, so its throughput is the sender's: bytes in socket buffers are in it.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal
from xml.sax.saxutils import quoteattr

from pydantic import Field, field_validator

from vringlab.errors import InfrastructureError, UserError
from vringlab.lab.lab import Lab
from vringlab.transport.local import Completed
from vringlab.transport.ssh import Machine
from vringlab.workloads.base import Metric, Outcome, Params
from vringlab.workloads.stream_output import COMMON_SHARE
from vringlab.workloads.vsock_ends import TOOL_MARGIN_S, VsockBenchmark, ends
from vringlab.workloads.vsock_stream import StreamParams

_PROFILE = "/run/vringlab-uperf.xml"
_REMEDY = (
    "install uperf 1.0.8 or newer with vsock on the KVM host and in the guest, or use "
    "vsock-stream, the generator that is always there"
)
#: The second transaction of the profile: connect, write, disconnect.
_WRITING = "Txn2"
_LINE = re.compile(
    r"^timestamp_ms:(?P<at>\d{1,16}(?:\.\d{1,9})?) name:(?P<name>\S{1,40}) "
    r"nr_bytes:(?P<bytes>\d{1,20}) nr_ops:(?P<ops>\d{1,20})[ \t]*$",
    re.MULTILINE,
)


class UperfParams(StreamParams):
    """One point of the matrix; as `vsock-stream`, less what uperf cannot do."""

    type: Literal["stream"] = Field(default="stream", description="stream")

    @field_validator("sizes")
    @classmethod
    def _uniform_at_most(cls, value: str) -> str:
        if value == "normal":
            raise ValueError(
                "uperf's rand(a,b) is uniform and it has no normal distribution: use vsock-stream"
            )
        return value


def profile(params: UperfParams, duration_s: float) -> str:
    """The profile in uperf's XML; the listener's CID is in the environment as `h`."""
    size = str(params.payload)
    if params.sizes == "uniform":
        size = f"rand({size.replace('-', ',')})"
    return f"""<?xml version="1.0"?>
<profile name="vringlab">
  <group nthreads="{params.threads}">
    <transaction iterations="1">
      <flowop type="connect" options="remotehost=$h protocol=vsock"/>
    </transaction>
    <transaction duration="{duration_s:g}s">
      <flowop type="write" options={quoteattr(f"count=1 size={size}")}/>
    </transaction>
    <transaction iterations="1">
      <flowop type="disconnect"/>
    </transaction>
  </group>
</profile>
"""


def throughput(text: str) -> tuple[float, float]:
    """Bits a second of the writing transaction, and over how many seconds, of `-R` output.

    Bytes and operations count up from the transaction's begin.

    Raises:
        InfrastructureError: fewer than two lines of it, or they do not count up.
    """
    lines = [match for match in _LINE.finditer(text) if match["name"] == _WRITING]
    points = [(float(match["at"]) / 1000, int(match["bytes"])) for match in lines]
    if len(points) < 2 or points[-1][0] <= points[0][0] or points[-1][1] < points[0][1]:
        raise InfrastructureError(
            f"uperf printed {len(points)} raw lines of {_WRITING}, which give no throughput",
            remedy="look at what it printed; -R needs uperf 1.0.4 or newer",
            stdout=text,
        )
    seconds = points[-1][0] - points[0][0]
    return (points[-1][1] - points[0][1]) * 8 / seconds, seconds


def check_installed(machine: Machine) -> None:
    """See that a machine has uperf with vsock.

    Raises:
        UserError: it has none, or one without vsock.
    """
    done = machine.run(["uperf", "-V"], check=False)
    if "VSOCK" not in done.stdout:
        there = "has no vsock" if "Uperf" in done.stdout else "is not installed"
        raise UserError(
            f"uperf {there} on {machine.name}",
            remedy=_REMEDY,
            host=machine.name,
            stdout=done.stdout,
            stderr=done.stderr,
            returncode=done.returncode,
        )


class UperfVsock(VsockBenchmark):
    """See the module."""

    name = "uperf-vsock"
    summary = "uperf, where it is installed on both ends: vsock throughput as seed 004 measured it"
    params: type[Params] = UperfParams
    checks: Mapping[str, str] = {
        "throughput": "nothing was written",
        "errors": "uperf reports errors, or a reset",
        "runtime": "the run was cut short",
        "pinning": "a pinned thread moved during the run",
    }

    def run(self, lab: Lab, params: Params, duration_s: float) -> Outcome:
        """Write for `duration_s`.

        Raises:
            UserError: uperf is missing on an end, or has no vsock.
            InfrastructureError: it printed no raw lines.
        """
        assert isinstance(params, UperfParams)
        sender, receiver, cid = ends(lab, "g-h-g" if params.direction == "g2h" else "h-g-h")
        for end in (sender, receiver):
            check_installed(end.machine)
        sender.machine.put(profile(params, duration_s).encode(), _PROFILE)
        limit = duration_s + 3 * TOOL_MARGIN_S
        server = receiver.machine.start(
            f"taskset -c {receiver.cpu} timeout -s KILL {limit:g} uperf -s -S vsock & pid=$!; "
            "echo @@ $pid @@; wait"
        )
        client = ["taskset", "-c", str(sender.cpu), "uperf", "-S", "vsock", "-m", _PROFILE, "-R"]
        command = f"h={cid} {shlex.join(client)}"
        try:
            server.wait_for(" @@\n", TOOL_MARGIN_S)
            started = datetime.now(UTC).isoformat(timespec="milliseconds")
            done = _connected(sender.machine, command, limit)
        finally:
            if pid := re.search(r"@@ (\d+) @@", server.stdout):
                receiver.machine.run(f"kill {pid[1]}", check=False)
            server.close()
        rate, seconds = throughput(done.stdout)
        problems = []
        if rate == 0:
            problems.append("0 throughput: uperf wrote nothing")
        if done.returncode != 0 or "Errors detected" in done.stdout or "aborted" in done.stdout:
            problems.append(f"uperf reports errors (exit {done.returncode})")
        if seconds < COMMON_SHARE * duration_s:
            problems.append(f"uperf wrote for {seconds:.1f} of the {duration_s:g} s asked for")
        return Outcome(
            metrics=(Metric("throughput", rate, "bit/s"),) if rate > 0 else (),
            problems=(*problems, *lab.pinning_drift()),
            warnings=("uperf's throughput is the sender's",),
            started=started,
            window_s=seconds,
            raw={
                "uperf.txt": done.stdout.encode(),
                "uperf.stderr": done.stderr.encode(),
                "uperf-profile.xml": profile(params, duration_s).encode(),
            },
            context={"client": command},
        )


def _connected(machine: Machine, command: str, limit: float) -> Completed:
    """Run the client; again as long as the server, which says nothing, does not listen yet.

    What has started is never run again.
    """
    deadline = time.monotonic() + TOOL_MARGIN_S
    while True:
        done = machine.run(command, timeout=limit, check=False)
        if "Error connecting" not in done.stdout + done.stderr or time.monotonic() > deadline:
            return done
        time.sleep(0.1)


WORKLOAD = UperfVsock()
