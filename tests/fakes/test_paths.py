"""Which path packets take: programs, traces, what counts say, and passes within a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from tests.fakes.fake_campaign import plan
from tests.fakes.fake_lab import FakeMachine

from vringlab.analysis.evidence import was_exercised
from vringlab.analysis.frames import bundle, load_run
from vringlab.campaign import paths
from vringlab.campaign.experiment import Counter, Probes, Share, Value
from vringlab.campaign.experiment import load as load_experiment
from vringlab.campaign.experiment import names as experiment_names
from vringlab.campaign.fake import FakeSession, find
from vringlab.campaign.runner import RunResult, execute
from vringlab.campaign.store import PATHS, Store, read_paths
from vringlab.errors import InfrastructureError, TransientError, UserError
from vringlab.lab import probe
from vringlab.lab.probe import Probe
from vringlab.transport.ssh import Machine

SEND = ("virtio_transport_send_pkt", "vsock")
WORK = ("virtio_transport_send_pkt_work", "vsock")
PROBES = [
    Probe("offered", *SEND),
    Probe("direct", "virtqueue_add_sgs", None, *SEND, "zero"),
    Probe("queued", "virtqueue_add_sgs", None, *WORK, "zero"),
    Probe("full", "virtqueue_add_sgs", None, *SEND, "negative"),
]
SYMBOLS = {
    SEND: "virtio_transport_send_pkt",
    WORK: "virtio_transport_send_pkt_work.isra.0",
    ("virtqueue_add_sgs", None): "virtqueue_add_sgs",
}
KALLSYMS = """\
ffffffff81867a00 T virtqueue_add_sgs
ffffffff81867a99 t virtqueue_add_sgs.cold
ffffffffc02b4410 t virtio_transport_send_pkt_work.isra.0\t[vsock]
ffffffffc02b4810 t virtio_transport_send_pkt\t[vsock]
ffffffffc02a27a0 t virtio_transport_send_pkt_info\t[vsock_common]
ffffffffc0000000 t virtio_transport_send_pkt\t[another]
"""


def test_program_keeps_the_innermost_function_of_each_thread() -> None:
    lines = probe.program(PROBES, SYMBOLS).splitlines()
    entry = next(
        line for line in lines if line.startswith("kprobe:vsock:virtio_transport_send_pkt ")
    )
    # Counted as a call before it is what later calls are within.
    assert entry.index('@c["0"]') < entry.index("@in[tid] = 1")
    assert "kprobe:vsock:virtio_transport_send_pkt_work.isra.0 " in "\n".join(lines)
    (result,) = [line for line in lines if line.startswith("kretprobe:virtqueue_add_sgs")]
    assert 'if (@in[tid] == 1 && (int32)retval == 0) { @c["1"] = count(); }' in result
    assert 'if (@in[tid] == 2 && (int32)retval == 0) { @c["2"] = count(); }' in result
    assert 'if (@in[tid] == 1 && (int32)retval < 0) { @c["3"] = count(); }' in result


def test_symbols_are_found_with_what_the_compiler_appends_and_in_their_module() -> None:
    machine = FakeMachine("guest", [], {"kallsyms": (KALLSYMS, "", 0)})
    nosuch = Probe("gone", "virtio_transport_send_skb", "vsock")
    symbols, missing = probe.resolve(cast(Machine, machine), [*PROBES, nosuch])
    assert symbols == SYMBOLS
    assert list(missing) == ["gone"]
    assert "put it inside its callers" in missing["gone"]


def test_a_function_of_no_named_module_is_the_kernels_or_that_of_the_only_module_with_it() -> None:
    machine = FakeMachine("guest", [], {"kallsyms": (KALLSYMS, "", 0)})
    names = ("virtqueue_add_sgs", "virtio_transport_send_pkt_work", "virtio_transport_send_pkt")
    symbols, missing = probe.resolve(cast(Machine, machine), [Probe(name, name) for name in names])
    assert symbols == {
        ("virtqueue_add_sgs", None): "virtqueue_add_sgs",
        ("virtio_transport_send_pkt_work", None): "virtio_transport_send_pkt_work.isra.0",
    }
    # Two modules have it: which one is meant?
    assert list(missing) == ["virtio_transport_send_pkt"]


def event(name: str, at: float, thread: int = 7, cpu: int = 0, tail: str = "") -> str:
    where = "(virtqueue_add_sgs+0x0/0x90)"
    return f"  kworker/0:2-{thread}  [{cpu:03}] d..1.  {at:.6f}: {name}: {where}{tail}\n"


def test_trace_is_counted_as_bpftrace_would() -> None:
    trace = "# tracer: nop\n#\n" + "".join(
        [
            event("c0", 1.0),
            event("b1", 1.1),
            event("c1", 1.2, tail=" ret=0"),
            event("c2", 1.2, tail=" ret=0"),
            event("c3", 1.2, tail=" ret=0"),
            # The worker in another thread meanwhile.
            event("b2", 1.25, thread=9, cpu=1),
            event("c1", 1.3, thread=9, cpu=1, tail=" ret=0"),
            event("c2", 1.3, thread=9, cpu=1, tail=" ret=0"),
            event("c3", 1.35, tail=" ret=-28"),
            event("c1", 1.35, tail=" ret=-28"),
            event("e1", 1.4),
            event("e2", 1.4, thread=9, cpu=1),
            # Outside of both.
            event("c1", 1.5, tail=" ret=0"),
        ]
    )
    counted = probe.count_trace(trace + "\n@ 0\nentries: 9\noverrun: 0\n@ 1\noverrun: 0\n", PROBES)
    assert counted.values == {"offered": 1, "direct": 1, "queued": 1, "full": 1}
    assert counted.notes == ()


def test_full_trace_counts_until_the_first_processor_was_full() -> None:
    trace = "".join(event("c0", 1 + i / 10) for i in range(5))
    trace += "".join(event("c0", 1 + i / 10, thread=9, cpu=1) for i in range(20))
    stats = "\n@ 0\nentries: 5\ndropped events: 12\n@ 1\ndropped events: 0\n"
    counted = probe.count_trace(trace + stats, PROBES[:1])
    assert counted.values == {"offered": 10}
    assert "full" in counted.notes[0]


def test_tracefs_serves_where_bpftrace_is_missing() -> None:
    machine = FakeMachine(
        "guest",
        [],
        {
            "grep -E": (KALLSYMS, "", 0),
            "exec bpftrace": ("", "bash: bpftrace: command not found\n", 127),
            "pkill": ("", "", 0),
            "cat trace": (event("c0", 1.0) + "\n@ 0\noverrun: 0\n", "", 0),
            "kprobe_events": ("", "", 0),
        },
    )
    with probe.counting(cast(Machine, machine), PROBES) as tally:
        assert tally.tool == "tracefs"
        assert "command not found" in tally.notes[0]
        assert tally.take().values["offered"] == 1
    set_up = next(text for text in machine.commands if "events/vringlab/enable &&" in text)
    assert "p:vringlab/b2 vsock:virtio_transport_send_pkt_work.isra.0" in set_up
    assert "r:vringlab/c1 virtqueue_add_sgs ret=$retval:s32" in set_up
    assert "rmdir instances/vringlab" in machine.commands[-1], "nothing stays behind"


def test_nothing_to_count_is_an_error_with_the_reason() -> None:
    machine = FakeMachine("guest", [], {"kallsyms": ("", "", 0)})
    with (
        pytest.raises(InfrastructureError, match="none of the functions") as raised,
        probe.counting(cast(Machine, machine), PROBES),
    ):
        pass
    assert "virtqueue_add_sgs" in str(raised.value.remedy)


# What counts say


def probes() -> Probes:
    return Probes(
        counters=tuple(
            Counter(name=name, function=name, shows="Calls.") for name in ("direct", "queued")
        ),
        proof={"after": ("direct",), "before": ("direct", "queued")},
        shares=(
            Share(name="direct-share", of="direct", among=("direct", "queued"), shows="Directly."),
        ),
    )


@pytest.mark.parametrize(
    ("arm", "counts", "ran", "share"),
    [
        ("after", {"direct": 99, "queued": 1}, True, 99.0),
        ("after", {"direct": 0, "queued": 7}, False, 0.0),
        ("after", {"direct": 0, "queued": 0}, False, None),
        ("after", {"queued": 7}, None, None),
        # One of two that would prove it is not known, so nothing is disproved.
        ("before", {"direct": 0}, None, None),
        ("before", {"queued": 1}, True, None),
        ("third", {"direct": 1, "queued": 1}, None, 50.0),
    ],
)
def test_path_is_proven_by_counts(
    arm: str, counts: Mapping[str, int], ran: bool | None, share: float | None
) -> None:
    found = paths.judge(probes(), arm, "w", {"payload": 64}, counts)
    assert found.exercised is ran
    assert found.shares.get("direct-share") == share
    assert paths.from_record(found.as_record()) == found


def test_every_arm_of_every_experiment_has_a_proof() -> None:
    for name in experiment_names():
        experiment = load_experiment(name)
        found = experiment.counted
        if experiment.module == "vmlinux":
            # Whole kernels: there is no one path that they are about.
            assert found is None
            continue
        assert found is not None
        assert set(found.proof) >= set(experiment.arm_names)


# Passes within a run


Points = Sequence[tuple[str, Mapping[str, Value]]]


class Blind(FakeSession):
    """A session whose tools fail when the path is looked at."""

    fault: Exception = InfrastructureError("no kprobes here")

    def paths(self, arm: str, points: Points) -> list[paths.PathPass]:  # noqa: ARG002 - protocol
        raise self.fault


def run(folder: Path, session: FakeSession) -> RunResult:
    with Store.create(plan(), folder) as store:
        return execute(store, lambda: session, find=find)


def arms_seen() -> Probes:
    names = {cell.arm for cell in plan().cells}
    return probes().model_copy(update={"proof": dict.fromkeys(names, ("direct",))})


def test_each_arm_and_point_is_seen_once_after_the_first_boot(tmp_path: Path) -> None:
    session = FakeSession(probes=arms_seen())
    result = run(tmp_path, session)
    passes = read_paths(result.path)
    wanted = {(cell.arm, str(sorted(cell.params.items()))) for cell in plan().cells}
    assert {(item.arm, str(sorted(item.params.items()))) for item in passes} == wanted
    assert len(passes) == len(wanted)
    kinds = [call[0] for call in session.calls]
    first, second, *_ = (place for place, kind in enumerate(kinds) if kind == "boot")
    assert first < kinds.index("paths") < second
    assert "paths" not in kinds[second:]
    assert "measure" not in kinds[kinds.index("paths") : second], "nothing is timed after it"
    loaded = load_run(result.path)
    assert loaded.paths == passes
    arm = plan().cells[0].arm
    assert was_exercised(loaded.provenance, arm) is True
    assert result.spent["path"] >= 0
    copied = load_run(bundle(result.path, tmp_path / "bundle"))
    assert copied.paths == passes


def test_path_that_cannot_be_seen_fails_no_run(tmp_path: Path) -> None:
    result = run(tmp_path, Blind(probes=arms_seen()))
    assert result.status == "complete"
    loaded = load_run(result.path)
    assert loaded.paths == ()
    assert loaded.provenance["path_problem"] == "no kprobes here"
    assert was_exercised(loaded.provenance, plan().cells[0].arm) is None


def test_guest_that_dies_meanwhile_is_replaced(tmp_path: Path) -> None:
    session = Blind(probes=arms_seen())
    session.fault = TransientError("the guest died")
    result = run(tmp_path, session)
    assert result.status == "complete"
    # Each boot tries once more; its blocks are kept.
    assert len([call for call in session.calls if call[0] == "boot"]) == len(
        {cell.boot for cell in plan().cells}
    )


def test_damaged_file_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / PATHS).write_text('{"format": 1, "passes": [{"arm": "x"}]}')
    with pytest.raises(UserError, match="damaged"):
        read_paths(tmp_path)
    (tmp_path / PATHS).write_text('{"format": 9, "passes": []}')
    with pytest.raises(UserError, match="format 9"):
        read_paths(tmp_path)


def test_replaced_pass_stands_once(tmp_path: Path) -> None:
    found = paths.judge(probes(), "after", "w", {"payload": 64}, {"direct": 1, "queued": 1})
    with Store.create(plan(), tmp_path) as store:
        store.write_paths([found])
        store.write_paths([replace(found, counts={"direct": 2, "queued": 1})])
        (kept,) = store.paths()
    assert kept.counts["direct"] == 2
