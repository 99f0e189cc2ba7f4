"""netperf over vhost-net and a TAP: streams into the guest and out of it, and request-response.

Seed 001's measurement. netperf runs on the host, netserver in the guest; neither is tied to a
vCPU there, which the mail does not do either. Beside the sessions the host's CPU time, that of the
vhost worker and how often it woke up are sampled, and what is reported of them is the mean over
the common window of all sessions.

With `vcpus: 1` the guest's other vCPU is taken offline for the run and brought back after it: the
machine stays the same, and so does the number of its queues.
"""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Literal

from pydantic import Field

from vringlab.errors import InfrastructureError
from vringlab.lab import vhost_nic
from vringlab.lab.guest import WORK
from vringlab.lab.lab import Lab
from vringlab.transport.ssh import Machine
from vringlab.workloads import interrupts, netperf_output, sampler, scripts
from vringlab.workloads.base import Metric, Outcome, Params

Direction = Literal["guest-rx", "guest-tx", "rr"]

#: netserver's port, and as /proc/net/tcp writes it.
_PORT = 12865
_PORT_HEX = f"{_PORT:04X}"
_OTHER_CPU = "/sys/devices/system/cpu/cpu1/online"
#: Allowed to set-up and to what comes after a run, each; emulated machines take seconds.
_MARGIN_S = 60.0
#: Some sessions start together; each one more takes this long under emulation (seen: 0.18 s).
_TOGETHER = 4
_START_S = 0.2
#: Least that must be full seconds for a standard deviation to be given.
_FEWEST_INTERIMS = 3
_FULL_S = 0.9
#: Share of the common window by which the two clocks may be apart without a word about it.
_CLOCK_SHARE = 0.05
_KEYS = (
    "THROUGHPUT,THROUGHPUT_UNITS,ELAPSED_TIME,LOCAL_CPU_UTIL,CONFIDENCE_ITERATION,"
    "THROUGHPUT_CONFID,LOCAL_SEND_SIZE,REMOTE_SEND_SIZE,LOCAL_TRANSPORT_RETRANS,"
    "REMOTE_TRANSPORT_RETRANS"
)


class NetperfParams(Params):
    """One point of the matrix.

    Attributes:
        direction: A stream into the guest, one out of it, or request-response.
        size: Bytes of a send, or of a request and of its response.
        sessions: netperf processes at once.
        vcpus: Processors online in the guest.
    """

    direction: Direction = Field(default="guest-rx", description="guest-rx, guest-tx or rr")
    size: int = Field(default=16384, ge=1, le=65535, description="bytes of a send")
    sessions: int = Field(default=1, ge=1, le=50, description="netperf processes at once")
    vcpus: Literal[1, 2] = Field(default=2, description="1 or 2 processors online in the guest")


def netperf_argv(params: NetperfParams, seconds: int) -> list[str]:
    """The command line of one session.

    In a TCP_MAERTS it is netserver that sends, so the size is the remote one (`-m LOCAL,REMOTE`).
    """
    size = params.size
    test, sizes = {
        "guest-rx": ("TCP_STREAM", ("-m", f"{size}")),
        "guest-tx": ("TCP_MAERTS", ("-m", f",{size}")),
        "rr": ("TCP_RR", ("-r", f"{size},{size}")),
    }[params.direction]
    return [
        *("netperf", "-H", vhost_nic.GUEST_ADDRESS, "-t", test, "-l", str(seconds), "-P", "0"),
        *("-D", "1", "--", *sizes, "-k", _KEYS),
    ]


def _before_script(vcpus: int) -> str:
    """In the guest: interface and netserver are there, or made; then the interrupts.

    An interface is found by its MAC, because names change whenever virtio_net is swapped.
    """
    return "\n".join(
        [
            scripts.SHOW,
            "has() { while read -r a b c; do "
            f'[ "$b" != {vhost_nic.GUEST_ADDRESS} ] || return 0; '
            "done < /proc/net/fib_trie; return 1; }",
            "listens() { for f in /proc/net/tcp /proc/net/tcp6; do "
            "while read -r n at from state z; do "
            f"case $at-$state in *:{_PORT_HEX}-0A) return 0;; esac; "
            'done < "$f"; done; return 1; }',
            f"has || /usr/lib/vringlab/net-up {vhost_nic.MAC} {vhost_nic.GUEST_ADDRESS}/24 "
            ">/dev/null || exit 8",
            f"listens || netserver -4 -p {_PORT} >/dev/null || exit 9",
            "listens || exit 9",
            "for d in /sys/class/net/*; do read -r m < $d/address; "
            f"[ $m != {vhost_nic.MAC} ] || dev=${{d##*/}}; done",
            '[ -n "$dev" ] || exit 8',
            # Else a connection begins with what the kernel learnt of the path under another arm.
            "echo 1 > /proc/sys/net/ipv4/tcp_no_metrics_save",
            *([f"echo 0 > {_OTHER_CPU} || exit 7"] if vcpus == 1 else []),
            'cd -P "/sys/class/net/$dev/device" || exit 8',
            'echo "@@ device $dev ${PWD##*/}"',
            "read -r online < /sys/devices/system/cpu/online",
            'echo "@@ online $online"',
            "echo '@@ interrupts'; show /proc/interrupts",
        ]
    )


def _after_script(vcpus: int) -> str:
    return "\n".join(
        [
            scripts.SHOW,
            "echo '@@ interrupts'; show /proc/interrupts",
            *([f"echo 1 > {_OTHER_CPU} || exit 7"] if vcpus == 1 else []),
        ]
    )


def _host_script(
    argv: Sequence[str], sessions: int, *, qemu: int, worker: int, cpu: int, limit_s: float
) -> str:
    """On the host, in bash: sampler and sessions side by side, pinned; then all that they printed.

    The clock of netperf's interim results is read on both sides of the sampler's first reading,
    whose own clock is another one. Sessions that hang are ended after `limit_s`.
    """
    out = f"{WORK}/netperf"
    sample = sampler.command(["/proc/stat:cpu"], output=f"{out}/sample")
    lines = [
        f"taskset -p -c {cpu} $$ >/dev/null || exit 6",
        f"rm -rf {out}; mkdir -p {out} && mkfifo {out}/never && exec {{never}}<>{out}/never "
        "|| exit 5",
        # What the kernel learnt of the path under another arm; the guest keeps none.
        f"ip tcp_metrics flush {vhost_nic.GUEST_ADDRESS} >/dev/null 2>&1",
        # A task of QEMU since 6.4; in /proc/TID its figures would be those of all of QEMU.
        f"w=/proc/{qemu}/task/{worker}; [ -e $w/stat ] || w=/proc/{worker}",
        "began=$EPOCHREALTIME",
        f'{shlex.join(sample)} "$w/stat" "$w/status:voluntary_ctxt_switches" 2> {out}/sample.err &',
        "sampler=$!",
        f"until [ -s {out}/sample ] || ! kill -0 $sampler 2>/dev/null; do "
        "read -t 0.005 -u $never; done",
        'echo "@@ clock $began $EPOCHREALTIME"; echo "@@ worker $w"',
        f"for ((n = 0; n < {sessions}; n++)); do",
        f"  {shlex.join(argv)} > {out}/$n.out 2> {out}/$n.err & pids[n]=$!",
        "done",
        f'{{ read -t {limit_s:g} -u $never; kill -KILL "${{pids[@]}}"; }} 2>/dev/null & guard=$!',
        f"for ((n = 0; n < {sessions}; n++)); do wait ${{pids[n]}}; status[n]=$?; done 2>/dev/null",
        "kill -TERM $sampler; kill -KILL $guard; wait $sampler $guard 2>/dev/null",
        f"for ((n = 0; n < {sessions}; n++)); do",
        f'  echo "@@ out$n ${{status[n]}}"; echo "$(<{out}/$n.out)"',
        f'  echo "@@ err$n"; echo "$(<{out}/$n.err)"',
        "done",
        f"echo '@@ sample'; cat {out}/sample {out}/sample.err 2>/dev/null; exit 0",
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class Section:
    """A part of a script's output: what stands in its first line, and the text below."""

    words: tuple[str, ...]
    text: str


def sections(text: str) -> dict[str, Section]:
    """The parts of a script's output by the first word of their names."""
    found = {}
    for heading, body in scripts.sections(text).items():
        name, *words = heading.split()
        found[name] = Section(tuple(words), body)
    return found


@dataclass(frozen=True)
class Clock:
    """How seconds since 1970 on the host relate to the sampler's clock.

    Attributes:
        offset_ns: Sampler's clock minus the host's time of day, ns.
        error_s: How far that may be off.
    """

    offset_ns: int
    error_s: float

    @classmethod
    def between(cls, before: str, after: str, reading_ns: int) -> Clock:
        """The reading was made at some time between two readings of `$EPOCHREALTIME`."""
        # In microseconds and whole: a float of such a time has no room for them.
        begin, end = (int(re.sub(r"[.,]", "", text)) for text in (before, after))
        return cls(reading_ns - (begin + end) * 500, (end - begin) / 2e6)

    def raw_ns(self, epoch_s: float) -> int:
        """A time of the host's in the sampler's clock."""
        return round(epoch_s * 1e9) + self.offset_ns


@dataclass(frozen=True)
class _Guest:
    """What was seen in the guest before a run."""

    device: str
    virtio: str
    online: str
    reading: interrupts.Interrupts
    text: str


def _prepare(machine: Machine, vcpus: int) -> _Guest:
    done = machine.run(_before_script(vcpus), timeout=_MARGIN_S, check=False)
    found = sections(done.stdout)
    if done.returncode != 0 or "interrupts" not in found:
        what, remedy = {
            7: ("its other vCPU cannot be taken offline", "it needs two vCPUs"),
            8: (
                f"it has no usable network device {vhost_nic.MAC}",
                "virtio_net may have failed to come up after a swap",
            ),
            9: ("netserver is not listening", f"see whether its port {_PORT} is free"),
        }.get(done.returncode, ("its set-up failed", "look at what the guest says"))
        raise InfrastructureError(
            f"the guest is not ready for netperf: {what}",
            remedy=remedy,
            host="guest",
            stdout=done.stdout,
            stderr=done.stderr,
            returncode=done.returncode,
        )
    device, virtio = found["device"].words
    return _Guest(
        device,
        virtio,
        " ".join(found["online"].words),
        interrupts.parse(found["interrupts"].text),
        done.stdout,
    )


@contextlib.contextmanager
def _brought_back(machine: Machine, vcpus: int) -> Iterator[None]:
    """Bring the other vCPU back should the run fail; its ordinary end does that itself."""
    try:
        yield
    except BaseException:
        if vcpus == 1:
            with contextlib.suppress(InfrastructureError):
                machine.run(f"echo 1 > {_OTHER_CPU}", check=False)
        raise


def interim_spread(interims: Sequence[netperf_output.Interim]) -> float | None:
    """Standard deviation of the full interim results as percent of their mean.

    The last is shorter than the others and left out; `None` with fewer than three.
    """
    rates = [interim.rate for interim in interims if interim.interval_s >= _FULL_S]
    if len(rates) < _FEWEST_INTERIMS or not (mean := statistics.fmean(rates)):
        return None
    return 100 * statistics.stdev(rates) / mean


def _window(results: Sequence[netperf_output.NetperfResult]) -> tuple[float, float] | None:
    """The time that all sessions have in common, seconds since 1970."""
    spans = [result.span for result in results]
    known = [span for span in spans if span is not None]
    if not known or len(known) < len(spans):
        return None
    begin, end = max(span[0] for span in known), min(span[1] for span in known)
    return (begin, end) if end > begin else None


def _results(sessions: Sequence[netperf_output.Session]) -> list[netperf_output.NetperfResult]:
    """Those that have one; the outcome says what became of the others."""
    found = []
    for session in sessions:
        with contextlib.suppress(InfrastructureError):
            found.append(netperf_output.parse(session.stdout))
    return found


@dataclass(frozen=True)
class Beside:
    """What the sampler says of a run."""

    metrics: tuple[Metric, ...] = ()
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    context: Mapping[str, object] = field(default_factory=dict)


def beside(
    found: Mapping[str, Section], window: tuple[float, float] | None, rate: Metric | None
) -> Beside:
    """The host's CPU use over the sessions' common window, and what it gives for it.

    Args:
        found: What the host's script printed.
        window: Begin and end, seconds since 1970; `None` when there is none.
        rate: Throughput or transactions.

    Raises:
        InfrastructureError: the sampler read nothing.
    """
    series = sampler.parse(found["sample"].text)
    before, after = found["clock"].words
    clock = Clock.between(before, after, series.at_ns[0])
    context: dict[str, object] = {
        "clock_error_s": clock.error_s,
        "sampler_cpu_share": series.cpu_share,
        "sampler_readings": len(series.at_ns),
    }
    if window is None:
        return Beside(warnings=series.warnings, context=context)
    worker = found["worker"].words[0]
    begin, end = (clock.raw_ns(moment) for moment in window)
    warnings = list(series.warnings)
    if clock.error_s > _CLOCK_SHARE * (window[1] - window[0]):
        warnings.append(
            f"CPU figures may be of a time up to {clock.error_s:.2f} s beside the window of "
            f"{window[1] - window[0]:.2f} s"
        )
    try:
        cpu = series.rate("/proc/stat", sampler.busy_s, begin, end) * 100
        vhost = series.rate(f"{worker}/stat", sampler.thread_s, begin, end) * 100
        wakeups = series.rate(f"{worker}/status", sampler.switches, begin, end)
    except InfrastructureError as error:
        return Beside((), (), (*warnings, f"no CPU figures: {error.message}"), context)
    metrics = [
        Metric("cpu", cpu, "percent"),
        Metric("vhost_cpu", vhost, "percent"),
        Metric("vhost_wakeups", wakeups, "1/s"),
    ]
    if rate is not None and cpu > 0:
        metrics.append(Metric(f"{rate.name}_per_cpu", rate.value / cpu, f"{rate.unit}/percent"))
    problems = []
    if vhost == 0 and rate is not None:
        problems.append("path not exercised: the vhost worker took no CPU time")
    return Beside(tuple(metrics), tuple(problems), tuple(warnings), context)


def _size_problem(params: NetperfParams, keys: Mapping[str, str]) -> str | None:
    """Why the sizes sent are not those asked for."""
    name = {"guest-rx": "LOCAL_SEND_SIZE", "guest-tx": "REMOTE_SEND_SIZE"}.get(params.direction)
    seen = keys.get(name or "")
    if name is None or seen is None or seen == str(params.size):
        return None
    return f"{name} is {seen}, {params.size} was asked for"


class Netperf:
    """See the module."""

    name = "netperf"
    summary = "netperf over vhost-net/TAP: throughput or transactions, and CPU time for it"
    params: type[Params] = NetperfParams
    checks: Mapping[str, str] = {
        "sessions": "a session died, reached no netserver or moved nothing",
        "common window": "the sessions ran at once for less than 80 % of the time",
        "size": "sends were of another size than asked for",
        "path": "the vhost worker took no CPU time",
        "processors": "other vCPUs were online than asked for",
        "runtime": "the run was cut short",
        "pinning": "a pinned thread moved during the run",
    }

    def guest_options(self, points: list[Params]) -> dict[str, object]:  # noqa: ARG002 - protocol
        """The benchmark's device over vhost-net."""
        return {"vhost_nic": True}

    def run(self, lab: Lab, params: Params, duration_s: float) -> Outcome:
        """Run all sessions for `duration_s` at once.

        Raises:
            InfrastructureError: the device, its vhost worker or netserver is missing.
            TransientError: a machine was lost.
        """
        assert isinstance(params, NetperfParams)
        worker = lab.guest.net_worker
        if worker is None:
            raise InfrastructureError(
                "the benchmark's device has no vhost worker that could be accounted",
                remedy="the guest needs `vhost_nic`, and vhost_net must be loaded on its host",
            )
        # netperf takes whole seconds, and all sessions must be under way for as many as asked.
        seconds = math.ceil(duration_s + _START_S * max(0, params.sessions - _TOGETHER))
        argv = netperf_argv(params, seconds)
        guest, host = lab.guest.machine, lab.host.machine
        with _brought_back(guest, params.vcpus):
            ready = _prepare(guest, params.vcpus)
            longest = seconds + _MARGIN_S
            script = _host_script(
                argv,
                params.sessions,
                qemu=lab.guest.qemu_pid,
                worker=worker,
                cpu=lab.guest.layout.tools,
                limit_s=longest,
            )
            started = datetime.now(UTC).isoformat(timespec="milliseconds")
            done = host.run(["bash", "-c", script], timeout=longest + _MARGIN_S)
            after = guest.start(_after_script(params.vcpus))
            drift = lab.pinning_drift()
            last = after.wait(_MARGIN_S)
            if last.returncode != 0 or "@@ interrupts" not in last.stdout:
                raise InfrastructureError(
                    "the guest did not tell its interrupts after the run",
                    remedy="look at what it says; with one vCPU the other must come back online",
                    host="guest",
                    stdout=last.stdout,
                    stderr=last.stderr,
                    returncode=last.returncode,
                )
        found = sections(done.stdout)
        if "sample" not in found:
            raise InfrastructureError(
                "the host's part of a run of netperf printed only some of what it shall",
                remedy="look at what it printed instead",
                host=host.name,
                stdout=done.stdout,
                stderr=done.stderr,
            )
        sessions = [
            netperf_output.Session(
                found[f"out{n}"].text, found[f"err{n}"].text, int(found[f"out{n}"].words[0])
            )
            for n in range(params.sessions)
        ]
        outcome = netperf_output.netperf_outcome(
            sessions,
            asked_s=duration_s,
            started=started,
            raw={
                "netperf.txt": done.stdout.encode(),
                "interrupts-before.txt": ready.text.encode(),
                "interrupts-after.txt": last.stdout.encode(),
            },
            context={
                "command": shlex.join(argv),
                "device": ready.device,
                "vcpus_online": ready.online,
                "other_vcpu": "offline for the run" if params.vcpus == 1 else "online",
                "netserver": "not pinned in the guest",
            },
        )
        results = _results(sessions)
        extra = beside(found, _window(results), next(iter(outcome.metrics), None))
        metrics, problems = [*outcome.metrics, *extra.metrics], [*outcome.problems]
        spans = [span for result in results if (span := result.span)]
        if spans:
            queue = interrupts.tx_queues(ready.reading, ready.virtio)[0]
            count = interrupts.delta(
                ready.reading, interrupts.parse(sections(last.stdout)["interrupts"].text), queue
            )
            # Those of set-up and end are a handful.
            ran_s = max(end for _, end in spans) - min(begin for begin, _ in spans)
            metrics.append(Metric("tx_interrupts", sum(count.values()) / ran_s, "1/s"))
        if len(results) == 1 and results[0].unit == "bit/s":
            spread = interim_spread(results[0].interims)
            metrics += [] if spread is None else [Metric("throughput_stddev", spread, "percent")]
        problems += {p for result in results if (p := _size_problem(params, result.keys))}
        wanted = "0" if params.vcpus == 1 else "0-1"
        if ready.online != wanted:
            problems.append(f"vCPUs {ready.online} were online, not {wanted}")
        return replace(
            outcome,
            metrics=tuple(metrics),
            problems=(*problems, *extra.problems, *drift),
            warnings=(*outcome.warnings, *extra.warnings),
            context={**outcome.context, **extra.context},
        )


WORKLOAD = Netperf()
