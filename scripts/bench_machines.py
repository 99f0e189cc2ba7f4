"""Rows of `make bench` that boot virtual machines, one at a time."""

from __future__ import annotations

import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

from scripts import bench_peers
from scripts.bench_rows import Bench
from scripts.bench_table import Line, Pair, in_turn

from vringlab.campaign import experiment as experiments
from vringlab.campaign import kept
from vringlab.campaign.plan import guest_options, make_plan
from vringlab.campaign.session import MachineSession, guest_spec, open_session
from vringlab.campaign.store import CellMeta, Store
from vringlab.errors import InfrastructureError, UserError
from vringlab.kernels.module import BuiltModule, build_module
from vringlab.kernels.patches import load_arm
from vringlab.kernels.whole import prepare_base
from vringlab.lab import snapshot
from vringlab.lab.embedded import HostMachine, embedded_host
from vringlab.lab.guest import Guest, GuestSpec, boot_guest, prepare_host
from vringlab.lab.lab import Lab
from vringlab.lab.swap import swap
from vringlab.transport import local
from vringlab.workloads.base import Outcome
from vringlab.workloads.fio_output import outcome_of_text
from vringlab.workloads.fio_vsock_pingpong import fio_argv
from vringlab.workloads.vsock_ends import TOOL_MARGIN_S, ends
from vringlab.workloads.vsock_pingpong import PingpongParams, VsockPingpong

BASE = "debian:6.12"
_UP_S = 900.0
#: A lab of ours that is forgotten ends by itself.
_IDLE = "10m"
_SWITCHED = (
    ("vsock-direct-enqueue", ("queued", "direct")),
    ("virtio-net-napi-tx", ("stock", "merged")),
)
_PAYLOAD = 64
#: Away from those that the workload takes.
_FIRST_PORT = 30000
_RESTORED = "restoring a saved lab"


# --- up ------------------------------------------------------------------------------------


class _Labs:
    """`vringlab up`, a command in the guest, and `vringlab down`, as a user types them."""

    def __init__(self, bench: Bench, *, saved: bool) -> None:
        self._bench = bench
        self._saved = saved
        self._environment = bench.environment(VRINGLAB_SAVED_LABS="1" if saved else "0")

    def _vringlab(self, *words: str) -> local.Completed:
        return local.run(
            [sys.executable, "-m", "vringlab", *words], timeout=_UP_S, env=self._environment
        )

    def save(self) -> None:
        """See to it that there is a saved lab."""
        self._bench.lab_mark.touch()
        try:
            self._vringlab("up", "--for", _IDLE)
        finally:
            self._vringlab("down")
            self._bench.lab_mark.unlink()

    def seconds(self) -> float:
        """Seconds from nothing to the answer of `uname -r` in the guest; the lab then ends."""
        bench = self._bench
        bench.lab_mark.touch()
        try:
            begin = time.monotonic()
            done = self._vringlab("up", "--for", _IDLE, "--", "uname", "-r")
            seconds = time.monotonic() - begin
        finally:
            self._vringlab("down")
            bench.lab_mark.unlink()
        answer, told = done.stdout.strip(), done.stderr
        if answer != bench.image.release or (_RESTORED in told) != self._saved:
            raise InfrastructureError(
                f"the lab was not {'restored' if self._saved else 'booted'}, or its guest does "
                f"not run {bench.image.release}",
                remedy="see what it said; try `vringlab up` by hand",
                host="local",
                stdout=answer,
                stderr=told,
            )
        return seconds


def up(bench: Bench) -> Iterator[Line]:
    """`vringlab up` from a saved lab against virtme-ng's boot of one plain guest."""
    yield _against_virtme(bench, "up", saved=True, at_most=0.45)


def cold(bench: Bench) -> Iterator[Line]:
    """`vringlab up` without a saved lab against virtme-ng's boot of one plain guest."""
    yield _against_virtme(bench, "cold", saved=False, at_most=2.0)


def _against_virtme(bench: Bench, row: str, *, saved: bool, at_most: float) -> Line:
    if kept.current() is not None:
        raise UserError("a lab is up here", remedy="end it: vringlab down")
    virtme = bench_peers.ensure_virtme(bench.image, bench.accelerator, bench.say)
    labs = _Labs(bench, saved=saved)
    # What comes first saves the lab, compiles modules, and fills the page cache.
    bench.say("once each, untimed")
    if saved:
        labs.save()
    labs.seconds()
    virtme.boot()
    return Line(
        row,
        f"`vringlab up -- uname -r` {'from' if saved else 'without'} a saved lab: a KVM host and "
        "a guest on it",
        f"virtme-ng {bench_peers.VIRTME_NG}, `vng --run vmlinuz -- uname -r`: one guest",
        in_turn(bench.pairs, labs.seconds, virtme.boot, bench.say),
        at_most=at_most,
        note=f"both boot Debian's {bench.image.release} in the image's QEMU "
        f"({bench.accelerator.name}). virtme-ng from PyPI, with its defaults, in an unpacked "
        f"Debian {bench.image.suite} with udev and virtiofsd. Both times end with the answer.",
    )


# --- switch --------------------------------------------------------------------------------


class _Guests:
    """One guest after the other on one host."""

    def __init__(self, host: HostMachine, stack: ExitStack) -> None:
        self._host = host
        self._stack = stack.enter_context(ExitStack())
        self.guest: Guest | None = None

    def reboot(self) -> float:
        """End the guest and boot a fresh one, until it answers; wall seconds."""
        begin = time.monotonic()
        self._stack.close()
        self.guest = self._stack.enter_context(boot_guest(self._host, GuestSpec()))
        return time.monotonic() - begin

    def switch(self, arms: tuple[BuiltModule, BuiltModule]) -> float:
        """Load the second arm over the first, both of which the guest has; wall seconds."""
        assert self.guest is not None, "booted before"
        for arm in (arms[1], arms[0]):
            swap(self.guest, arm)
        begin = time.monotonic()
        swap(self.guest, arms[1])
        return time.monotonic() - begin


def switch(bench: Bench) -> Iterator[Line]:
    """An arm's switch in the running guest against a guest's reboot."""
    root = prepare_base(BASE, bench.image, on_step=bench.say).root
    arms: dict[str, tuple[BuiltModule, BuiltModule]] = {}
    for experiment, (first, second) in _SWITCHED:
        arms[experiment] = (
            build_module(root, load_arm(experiment, BASE, first), on_step=bench.say),
            build_module(root, load_arm(experiment, BASE, second), on_step=bench.say),
        )
    found: dict[str, list[Pair]] = {experiment: [] for experiment in arms}
    with ExitStack() as stack:
        host = stack.enter_context(embedded_host(bench.image, bench.accelerator, on_step=bench.say))
        prepare_host(host)
        guests = _Guests(host, stack)
        guests.reboot()
        for number in range(bench.pairs):
            if number % 2:
                reboot = guests.reboot()
                times = {name: guests.switch(pair) for name, pair in arms.items()}
            else:
                times = {name: guests.switch(pair) for name, pair in arms.items()}
                reboot = guests.reboot()
            for name, seconds in times.items():
                found[name].append(Pair(seconds, reboot))
            shown = ", ".join(f"{seconds:.2f} s" for seconds in times.values())
            bench.say(f"pair {number + 1} of {bench.pairs}: {shown} against {reboot:.1f} s")
    for name, pair in arms.items():
        yield Line(
            "switch",
            f"`{pair[1].module}`: arm {pair[0].arm} to {pair[1].arm} in the running guest",
            "the guest ended and a fresh one booted, until it answers",
            tuple(found[name]),
            at_most=1 / 15,
            note="the module's file is in the guest already; the switch ends when the build-id "
            "of what is loaded was checked, and for virtio_net when the guest's network is back.",
        )


# --- harness -------------------------------------------------------------------------------


class _Fio:
    """fio's vsock ping-pong, bare and by the harness, with the same arguments."""

    def __init__(self, bench: Bench, session: MachineSession, store: Store) -> None:
        self._bench = bench
        self._session = session
        self._store = store
        self._cells = iter(
            cell for cell in store.plan.cells if cell.workload == "fio-vsock-pingpong"
        )
        self._port = _FIRST_PORT

    def bare(self) -> tuple[float, float]:
        """Bare fio on both ends: wall seconds, and the mean round trip in ns."""
        lab, length = self._session.lab, self._bench.seconds
        connector, listener, cid = ends(lab, "h-g-h")
        self._port += 1
        reads = fio_argv(
            "reader", port=self._port, payload=_PAYLOAD, runtime_s=length + TOOL_MARGIN_S
        )
        writes = fio_argv("writer", port=self._port, payload=_PAYLOAD, runtime_s=length, cid=cid)
        begin = time.monotonic()
        reader = listener.machine.start(f"exec taskset -c {listener.cpu} {shlex.join(reads)}")
        try:
            reader.wait_for("waiting for connection", TOOL_MARGIN_S)
            writer = connector.machine.start(
                f"exec taskset -c {connector.cpu} {shlex.join(writes)}"
            )
            wrote = writer.wait(length + TOOL_MARGIN_S)
            read = reader.wait(TOOL_MARGIN_S)
        finally:
            reader.close()
        seconds = time.monotonic() - begin
        outcome = outcome_of_text(wrote.stdout, read.stdout, payload=_PAYLOAD, asked_s=length)
        return seconds, _round_trip(outcome)

    def harness(self) -> tuple[float, float]:
        """One cell of a run: measured, checked and kept on disk; as `bare`."""
        cell = next(self._cells)
        begin = time.monotonic()
        outcome = self._session.measure(cell.workload, {"payload": _PAYLOAD}, self._bench.seconds)
        self._store.write_cell(
            cell, outcome, CellMeta("b01", self._session.host, self._session.host_kind)
        )
        seconds = time.monotonic() - begin
        return seconds, _round_trip(outcome)


def _round_trip(outcome: Outcome) -> float:
    if not outcome.valid:
        raise InfrastructureError(
            f"a fio run is invalid: {outcome.reason}", remedy="try again on a quieter machine"
        )
    return next(metric.value for metric in outcome.metrics if metric.name == "rtt_mean")


def _unseen(found: list[Pair], twin: list[Pair]) -> bool:
    """Whether ratios have their median within those of a side against itself."""
    both = [pair.ratio for pair in twin] + [1 / pair.ratio for pair in twin]
    return min(both) <= statistics.median(pair.ratio for pair in found) <= max(both)


def fio(bench: Bench) -> Iterator[Line]:
    """The harness around a fio ping-pong run against bare fio with the same arguments."""
    experiment = experiments.load("vsock-direct-enqueue")
    arm = experiment.reference
    plan = make_plan(experiment, "full", 1, {"payload": [_PAYLOAD]})
    wall: list[Pair] = []
    trip: list[Pair] = []
    twin: list[Pair] = []
    with (
        Store.create(plan, bench.scratch) as store,
        open_session(experiment, (arm,), on_step=bench.say) as session,
    ):
        session.boot("b01", {})
        session.switch(arm)
        runs = _Fio(bench, session, store)
        # The first one reads its program from the image's disk.
        runs.bare()
        for number in range(bench.pairs):
            # The three stand in every place in turn.
            order = [("a", runs.bare), ("ours", runs.harness), ("b", runs.bare)]
            turn = number % 3
            found = {name: run() for name, run in order[turn:] + order[:turn]}
            bare = statistics.mean(found[name][0] for name in "ab")
            wall.append(Pair(found["ours"][0], bare))
            trip.append(Pair(found["ours"][1] / 1e6, found["a"][1] / 1e6))
            twin.append(Pair(found["b"][1] / 1e6, found["a"][1] / 1e6))
            bench.say(
                f"pair {number + 1} of {bench.pairs}: {wall[-1].ours:.2f} s against {bare:.2f} s; "
                f"round trip {trip[-1].ratio:.3f}, bare against bare {twin[-1].ratio:.3f}"
            )
    note = (
        f"{_PAYLOAD}-byte messages, arm {arm}, in one guest; bare fio is started on both ends over "
        "connections that are open, pinned to the same processors, and waited for. The harness "
        "parses, checks pinning, and writes the cell to disk. In the latency it "
        f"{'cannot' if _unseen(trip, twin) else 'can'} be told from bare fio: the median of its "
        f"ratios lies {'within' if _unseen(trip, twin) else 'outside of'} those of bare fio "
        "against itself, in either direction."
    )
    shown = f"fio ping-pong of {bench.seconds:g} s"
    yield Line("fio", f"{shown}, one cell", "bare fio", tuple(wall), at_most=1.03, note=note)
    yield Line("fio", f"{shown}: mean round trip", "bare fio", tuple(trip), "ms", note=note)
    yield Line("fio", "(A/A) bare fio: mean round trip", "bare fio", tuple(twin), "ms", note=note)


# --- counter -------------------------------------------------------------------------------


def counter(bench: Bench) -> Iterator[Line]:
    """The vsock ping-pong on a lab that counts instructions against one that does not."""
    if bench.accelerator.name != "tcg":
        raise UserError(
            "only an emulated host counts instructions", remedy="VRINGLAB_ACCEL=tcg emulates it"
        )
    plan = make_plan(experiments.load("vsock-direct-enqueue"), "quick", 1)
    spec = guest_spec(guest_options(plan))
    saved = snapshot.ensure(bench.image, bench.accelerator, spec, on_step=bench.say)

    def round_trip_ms(count: bool) -> float:
        with (
            snapshot.restored(
                saved, bench.image, bench.accelerator, spec, count_instructions=count
            ) as (host, waking),
            waking() as guest,
        ):
            if count and host.counter is None:
                raise InfrastructureError(f"nothing is counted: {host.count_refusal}")
            point = PingpongParams(payload=_PAYLOAD)
            return _round_trip(VsockPingpong().run(Lab(host, guest), point, bench.seconds)) / 1e6

    yield Line(
        "counter",
        f"vringlab-pingpong of {bench.seconds:g} s with the instruction counter: mean round trip",
        "the same without it",
        in_turn(
            bench.pairs,
            lambda: round_trip_ms(True),
            lambda: round_trip_ms(False),
            bench.say,
            "ms",
        ),
        "ms",
        at_most=1.10,
        note=f"{_PAYLOAD}-byte messages, both in labs restored from one snapshot, one after the "
        "other.",
    )
