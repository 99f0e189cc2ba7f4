"""Instructions for one unit of work, of a counter whose readings are made up and known."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.fakes.counter_answer import answer
from tests.fakes.fake_lab import Answer, FakeLab, fake_lab

from vringlab.campaign import instructions
from vringlab.campaign.instructions import Counting, PluginMeter, counting_of
from vringlab.campaign.work import SIZES_S, Work, work
from vringlab.errors import InfrastructureError, TransientError
from vringlab.lab import counter, events
from vringlab.lab.counter import Counter, Reading
from vringlab.lab.guest import VhostUserNic
from vringlab.workloads.base import Metric, Outcome

KERNEL = 0xFFFFFFFF81000000
SYMBOLS = f"""\
{KERNEL:016x} T do_idle
{KERNEL + 0x100:016x} T virtqueue_add
{KERNEL + 0x200:016x} T native_queued_spin_lock_slowpath
{KERNEL + 0x400:016x} T vhost_worker
{KERNEL + 0x500:016x} T update_process_times
{KERNEL + 0x600:016x} D the_end
"""
#: A tracepoint's format as 6.12 prints it, most reasons left out.
FORM = """\
name: kvm_exit
print fmt: "vcpu %u reason %s%s%s", REC->vcpu_id, (REC->isa == 1) ? __print_symbolic(\
REC->exit_reason & 0xffff, { 0, "EXCEPTION_NMI" }, { 12, "HLT" }, { 49, "EPT_MISCONFIG" }) : \
__print_symbolic(REC->exit_reason, { 0x040 + 1, "DB excp" }, { 0x078, "hlt" }, { 0x400, "npf" }, \
{ -1, "invalid_guest_state" }), (REC->isa == 1) ? __print_flags(REC->exit_reason & ~0xffff, " ", \
{ 0x80000000, "FAILED_VMENTRY" }) : ""
"""
#: The timed run; then of busy programs, of counted and of traced runs two each.
RUNS = 1 + 3 * len(SIZES_S)
#: Threads of the lab's guest, and one of another guest.
VCPUS = (100, 101)
STRANGER = 4711


class Machines:
    """A lab on which work of some size takes known instructions, and time passes."""

    def __init__(self, start_up: int = 1_000_000) -> None:
        self.start_up = start_up
        self.done = 0.0
        self.passed = 0.0
        self.runs = 0

    def read(self) -> Reading:
        """Idle and spinning are as they come; 500 of user and 300 of the kernel for each."""
        runs, units = self.runs, int(self.done)
        return counter.parse(
            answer(
                blocks=[
                    ("guest", KERNEL + 0x10, (0, 0, 977 * runs**3, 0)),
                    ("guest", KERNEL + 0x110, (0, 0, 300 * units, 0)),
                    ("host", KERNEL + 0x210, (12_345 * runs**2, 0, 0, 0)),
                    ("host", KERNEL + 0x510, (0, 0, 0, int(90_000 * self.passed))),
                    ("host", KERNEL + 0x410, (0, 40 * units, 0, 0)),
                ],
                user=(
                    (self.start_up * runs, 11 * units, 0, 0),
                    (0, 0, 500 * units, 0),
                ),
            )
        )

    def host_stat(self, command: str) -> Answer:
        """Three switches for each unit, two exits, and what another guest does."""
        units, start_up = int(self.done), 50 * self.runs
        said = f"cpu 1 2\nctxt {3 * units + start_up}\nbtime 1\n"
        if "hist" in command:
            said += "".join(
                f"{{ common_pid: {thread:10}, isa: {2:10}, exit_reason: {code:10} }} "
                f"hitcount: {count:10}\n"
                for thread, code, count in (
                    (VCPUS[0], 0x78, units + start_up),
                    (VCPUS[1], 0x400, units // 2),
                    (VCPUS[0], 0x400, units - units // 2),
                    (VCPUS[0], 0x999, start_up),
                    (STRANGER, 0x78, 10 * units),
                )
            )
        return (said, "", 0)

    def guest_stat(self, _: str) -> Answer:
        return (f"ctxt {7 * int(self.done) + 20 * self.runs}\n", "", 0)

    def busy(self, command: str) -> Answer:
        """Programs that only spin: time passes, and kernels with it."""
        found = re.search(r"timeout (\S+) taskset", command)
        assert found is not None
        self.runs += 1
        self.passed += float(found[1])
        return ("", "", 0)

    def run(self, seconds: float, rate: float = 1000.0) -> Outcome:
        self.runs += 1
        self.passed += seconds
        self.done += rate * seconds
        return Outcome((Metric("round_trips", rate, "1/s"),), window_s=seconds)


@pytest.fixture
def machines() -> Machines:
    return Machines()


def lab_of(machines: Machines, **options: Any) -> FakeLab:
    found = fake_lab(**options)
    for machine in (found.host, found.guest):
        machine.answers["kallsyms"] = (SYMBOLS, "", 0)
    found.host.answers["halt_poll_ns"] = ("200000\n", "", 0)
    found.guest.answers["awk"] = machines.busy
    found.host.answers["awk"] = ("", "", 0)
    found.host.answers["mkdir .*vringlab-exits"] = (FORM, "", 0)
    found.host.answers["rmdir .*vringlab-exits"] = ("", "", 0)
    found.host.answers["proc/stat"] = machines.host_stat
    found.guest.answers["proc/stat"] = machines.guest_stat
    host = cast(Any, found.lab.host)
    host.counter, host.count_refusal, host.bare = cast(Counter, machines), "", None
    host.changes = []
    host.on_change = host.changes.append
    return found


def counted(machines: Machines, lab: FakeLab | None = None, seconds: float = 10) -> Outcome:
    counting, refusal = counting_of((lab or lab_of(machines)).lab)
    assert counting is not None
    assert refusal == ""
    return counting.add(machines.run(seconds), machines.run)


def figures(outcome: Outcome) -> Mapping[str, float]:
    assert {m.unit for m in outcome.metrics if m.name.startswith("instr")} <= {"instruction"}
    return {metric.name: metric.value for metric in outcome.metrics}


def profile(outcome: Outcome) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(outcome.raw["instructions.json"])
    return found


def test_the_cost_of_one_is_a_slope_without_start_up_and_waiting(machines: Machines) -> None:
    outcome = counted(machines)
    found = figures(outcome)
    assert found["round_trips"] == 1000
    # Without the tools' own 500, and without what a second takes.
    assert found["instructions_guest"] == pytest.approx(300)
    assert found["instructions_host"] == pytest.approx(51)
    assert found["instructions"] == pytest.approx(351)
    assert found["instructions_module"] == 0
    kept = profile(outcome)
    assert (kept["unit"], kept["work"]) == ("round trip", [1000, 3000])
    assert kept["waiting"] > 0
    rows = {row[3]: row[4] for row in kept["rows"] if row[3]}
    assert rows["virtqueue_add"] == pytest.approx(300)
    assert rows["vhost_worker"] == pytest.approx(40)
    assert {row[1] for row in kept["rows"] if row[3] == "do_idle"} == {"idle"}
    assert [row for row in kept["rows"] if row[1] == "tools" and row[0] == "guest"] == [
        ["guest", "tools", None, None, pytest.approx(500)]
    ]
    assert outcome.context["instructions"] == {
        "for one": "round trip",
        "method": "slope of two runs",
        "notes": [],
    }
    # The timed run comes first, and is what the sample's other figures are of.
    assert outcome.window_s == 10
    assert machines.runs == RUNS


def test_the_host_does_not_poll_for_halted_guests_meanwhile(machines: Machines) -> None:
    lab = lab_of(machines)
    counted(machines, lab)
    file = "/sys/module/kvm/parameters/halt_poll_ns"
    assert lab.host.asked("halt_poll_ns") == [
        *(f"cat {file}", f"echo 0 > {file}", f"echo 200000 > {file}")
    ]
    # A user's host knows how to undo it before it is done.
    changes = cast(Any, lab.lab.host).changes
    assert changes == [f"echo 200000 > {file}", events.undo(lab.lab.guest)]


def test_what_fails_leaves_the_host_as_it_was(machines: Machines) -> None:
    lab = lab_of(machines)
    counting, _ = counting_of(lab.lab)
    assert counting is not None

    def run(seconds: float) -> Outcome:
        if seconds == SIZES_S[1]:
            raise InfrastructureError("the tool is gone")
        return machines.run(seconds)

    with pytest.raises(InfrastructureError, match="the tool is gone"):
        counting.add(run(10), run)
    assert "echo 200000" in lab.host.asked("halt_poll_ns")[-1]


def test_exits_by_reason_and_switches_are_slopes_too(machines: Machines) -> None:
    lab = lab_of(machines)
    outcome = counted(machines, lab)
    found = figures(outcome)
    assert found["exits"] == pytest.approx(2)
    assert (found["switches_host"], found["switches_guest"]) == pytest.approx((3, 7))
    assert not {"cycles_host", "cycles_guest"} & set(found)
    others = profile(outcome)["others"]
    # A reason that this kernel has no name for, and nothing of the other guest's.
    assert {name: others[name] for name in others if name.startswith("exits: ")} == {
        "exits: hlt": pytest.approx(1),
        "exits: npf": pytest.approx(1),
        "exits: reason 0x999": pytest.approx(0),
    }
    # Counting exits executes instructions: it begins after those were counted, and ends.
    order = [line for line in lab.host.log if "vringlab-exits" in line]
    assert "mkdir" in order[0]
    assert len([line for line in order if "hist'" not in line and "/hist" in line]) == 4
    assert order[-1].endswith(events.undo(lab.lab.guest))


def test_a_host_that_counts_no_exits_says_why(machines: Machines) -> None:
    lab = lab_of(machines)
    lab.host.answers["mkdir .*vringlab-exits"] = ("", "mkdir: Permission denied\n", 1)
    outcome = counted(machines, lab)
    assert "exits" not in figures(outcome)
    assert figures(outcome)["switches_guest"] == pytest.approx(7)
    assert profile(outcome)["notes"] == [
        "exits by reason are not available: mkdir: Permission denied"
    ]


def test_reasons_are_named_by_the_kernel() -> None:
    assert events.reasons(FORM) == {
        (1, 0): "exception_nmi",
        (1, 12): "hlt",
        (1, 49): "ept_misconfig",
        (2, 0x41): "db excp",
        (2, 0x78): "hlt",
        (2, 0x400): "npf",
        (2, 0xFFFFFFFF): "invalid_guest_state",
        (2, 0x80000000): "failed_vmentry",
    }
    # Intel's has flags above: of an entry that failed.
    line = f"{{ common_pid: 7, isa: 1, exit_reason: {0x80000000 + 12} }} hitcount: 3"
    assert events.exits_of(line, [7], events.reasons(FORM)) == {"exits": 3, "exits: hlt": 3}


@pytest.mark.parametrize("which", [10, *SIZES_S])
def test_invalid_runs_are_not_counted(machines: Machines, which: float) -> None:
    counting, _ = counting_of(lab_of(machines).lab)
    assert counting is not None

    def run(seconds: float) -> Outcome:
        found = machines.run(seconds)
        return replace(found, problems=("short reads",)) if seconds == which else found

    outcome = counting.add(run(10), run)
    assert "instructions" not in figures(outcome)
    # An invalid pass beside it says nothing against the time.
    assert outcome.valid == (which != 10)
    told = cast(Mapping[str, str], outcome.context["instructions"])
    assert "invalid" in told["not available"]
    assert machines.runs == (1 if which == 10 else RUNS)


def test_small_functions_are_kept_as_one(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instructions, "_LEAST", 0.2)
    rows = profile(counted(machines))["rows"]
    assert [row for row in rows if row[3] == "vhost_worker"] == []
    (rest,) = [row for row in rows if row[0] == "host" and row[1] == "kernel"]
    assert rest[2:] == [None, "(the rest)", pytest.approx(40)]


def test_processors_that_poll_are_left_out(machines: Machines) -> None:
    lab = lab_of(machines, nics=[VhostUserNic(packed=False, ring_size=256)])
    outcome = counted(machines, lab)
    # testpmd's 11 a unit are on the backend's processor.
    assert figures(outcome)["instructions_host"] == pytest.approx(40)
    (note,) = profile(outcome)["notes"]
    assert "testpmd polls" in note


@pytest.mark.parametrize("rates", [(0.0, 0.0), (1000.0, 10.0)], ids=["no rate", "less than before"])
def test_runs_that_are_no_two_sizes_leave_the_time_alone(
    machines: Machines, rates: tuple[float, float]
) -> None:
    left = iter((1000.0, *rates, *rates))
    counting, _ = counting_of(lab_of(machines).lab)
    assert counting is not None

    def run(seconds: float) -> Outcome:
        return machines.run(seconds, next(left))

    outcome = counting.add(run(10), run)
    assert "instructions" not in figures(outcome)
    assert outcome.valid
    told = cast(Mapping[str, str], outcome.context["instructions"])
    assert "amount of work" in told["not available"]


def test_what_passing_time_costs_is_measured_once_and_taken_off(machines: Machines) -> None:
    lab = lab_of(machines)
    counting, _ = counting_of(lab.lab)
    assert counting is not None
    slow = functools.partial(machines.run, rate=100.0)
    fast, tenth = counting.add(machines.run(10), machines.run), counting.add(slow(10), slow)
    # At a tenth of the rate ten times as much time passes for one; it is no cost of it.
    assert figures(fast)["instructions_host"] == pytest.approx(51)
    assert figures(tenth)["instructions_host"] == pytest.approx(51)
    commands = [line for line in lab.host.log if "awk" in line and not line.startswith("wait")]
    assert len(commands) == 2 * len(SIZES_S)
    # Both of the guest's processors; of the host's those of the tools and of the vhost worker.
    assert sum("embedded: for cpu in 0 1; do timeout 1 taskset" in line for line in commands) == 1
    assert sum("guest: for cpu in 0 1; do timeout 3 taskset" in line for line in commands) == 1


def test_symbols_are_read_once_for_a_guest(machines: Machines) -> None:
    lab = lab_of(machines)
    counting, _ = counting_of(lab.lab)
    assert counting is not None
    for _ in range(3):
        counting.add(machines.run(1), machines.run)
    assert len(lab.guest.asked("kallsyms")) == len(lab.host.asked("kallsyms")) == 1


def test_arms_that_are_kernels_have_no_modules(machines: Machines) -> None:
    lab = lab_of(machines)
    counting = Counting(lab.lab, PluginMeter(lab.lab, cast(Counter, machines)))
    counting.loaded(None, "guest")
    assert "instructions" in figures(counting.add(machines.run(5), machines.run))
    assert lab.guest.asked("sections") == []


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"round_trips": 10.0, "rtt_mean": 5.0}, Work("round trip", 20.0)),
        ({"pps_tx": 100.0, "pps_rx": 90.0}, Work("packet", 200.0)),
        ({"throughput": 800.0, "cpu": 3.0}, Work("byte", 200.0)),
        ({"transactions": 7.0, "throughput": 800.0}, Work("transaction", 14.0)),
        ({"cpu": 3.0}, None),
    ],
)
def test_work_of_a_run(metrics: Mapping[str, float], expected: Work | None) -> None:
    outcome = Outcome(tuple(Metric(*item, "x") for item in metrics.items()), window_s=2.0)
    assert work(outcome) == expected


def broken(error: Exception) -> Iterator[Reading]:
    raise error
    yield


def test_a_lab_without_a_counter_says_why(machines: Machines) -> None:
    lab = lab_of(machines)
    host = cast(Any, lab.lab.host)
    host.counter, host.count_refusal = None, "the embedded host runs under KVM"
    assert counting_of(lab.lab) == (None, "the embedded host runs under KVM")
    host.counter = SimpleNamespace(read=lambda: next(broken(InfrastructureError("it hung up"))))
    assert counting_of(lab.lab) == (None, "it hung up")
    host.counter = SimpleNamespace(read=lambda: next(broken(TransientError("too slow"))))
    with pytest.raises(TransientError, match="too slow"):
        counting_of(lab.lab)


def test_a_sample_keeps_what_its_tools_printed(machines: Machines) -> None:
    counting, _ = counting_of(lab_of(machines).lab)
    assert counting is not None

    def run(seconds: float) -> Outcome:
        done = machines.run(seconds)
        return replace(done, raw={"tool.txt": b"said"}, context={"ring": 256})

    outcome = counting.add(run(10), run)
    assert set(outcome.raw) == {"tool.txt", "instructions.json"}
    assert outcome.context["ring"] == 256
