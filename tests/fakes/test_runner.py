"""The runner against a session without machines: order, failures, kills, and what is kept."""

from __future__ import annotations

import io
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest
from tests.fakes import fake_campaign
from tests.fakes.fake_campaign import plan

from vringlab.analysis.frames import RunFrames, load_run
from vringlab.campaign import catalogue, progress
from vringlab.campaign.budget import MEANINGS, PHASES, Budget, table
from vringlab.campaign.experiment import Value, WorkloadUse
from vringlab.campaign.fake import FakeParams, FakeSession, FakeWorkload, find
from vringlab.campaign.plan import Plan, guest_options, make_plan
from vringlab.campaign.progress import Event, PlainDisplay, RichDisplay
from vringlab.campaign.runner import Interrupted, RunResult, execute
from vringlab.campaign.store import Store
from vringlab.errors import InfrastructureError, MeasurementInvalid, TransientError, UserError
from vringlab.workloads.base import Metric, Outcome, Workload

PROGRAM = Path(fake_campaign.__file__)
ROOT = PROGRAM.parents[2]

#: Cells of the plan of the tests below: 3 boots of 3 blocks of 3 arms and the twin.
TOTAL = 36


def begin(folder: Path, session: FakeSession, made: Plan | None = None) -> RunResult:
    with Store.create(made or plan(), folder) as store:
        return execute(store, lambda: session, find=find)


def resume(folder: Path, session: FakeSession) -> RunResult:
    with Store.open(catalogue.latest(runs_dir=folder)) as store:
        return execute(store, lambda: session, find=find)


def named(session: FakeSession, name: str) -> list[tuple[object, ...]]:
    return [call for call in session.calls if call[0] == name]


def boots(session: FakeSession) -> list[object]:
    return [call[1] for call in named(session, "boot")]


# A run without trouble


def test_every_visit_of_an_arm_begins_with_a_switch(tmp_path: Path) -> None:
    session = FakeSession()
    made = plan(boots=2, blocks=2, payloads=2)
    result = begin(tmp_path, session, made)
    assert (result.status, result.done, result.measured) == ("complete", 32, 32)
    expected: list[tuple[object, ...]] = [("enter",)]
    boot = visit = None
    for cell in made.cells:
        if cell.boot != boot:
            boot = cell.boot
            expected.append(("boot", boot, {}))
        if (cell.block, cell.arm_name) != visit:
            visit = (cell.block, cell.arm_name)
            expected.append(("switch", cell.arm))
        expected.append(("measure", cell.arm, "fake", dict(cell.params)))
    assert session.calls == [*expected, ("exit",)]
    # The twin is switched to like any other arm, also straight after the reference.
    assert len(named(session, "switch")) == 4 * 4


def test_a_run_says_that_it_was_simulated(tmp_path: Path) -> None:
    frames = load_run(begin(tmp_path, FakeSession()).path)
    assert frames.complete
    assert frames.simulated
    assert frames.host_kind == "simulated"
    assert set(frames.samples["host_kind"]) == {"simulated"}
    assert "simulated" in frames.provenance["note"]
    assert set(frames.provenance["arms"]) == {"queued", "rfc-v1", "direct"}
    assert frames.provenance["run"]["status"] == "complete"


def test_a_complete_run_needs_no_session(tmp_path: Path) -> None:
    first = begin(tmp_path, FakeSession())
    session = FakeSession()
    again = resume(tmp_path, session)
    assert (again.status, again.measured, session.calls) == ("complete", 0, [])
    attempts = load_run(first.path).time["attempts"]
    assert [attempt["status"] for attempt in attempts] == ["complete"]


def test_the_time_of_a_run_sums_up(tmp_path: Path) -> None:
    result = begin(tmp_path, FakeSession(delay_s=0.002))
    spent = load_run(result.path).time["phases"]
    assert list(spent) == list(PHASES)
    assert spent["measure"] >= TOTAL * 0.002
    assert all(seconds >= 0 for seconds in spent.values())
    assert spent["collect"] > 0
    assert spent["idle"] > 0


def test_only_the_timed_window_counts_as_measuring(tmp_path: Path) -> None:
    class Slow(FakeSession):
        """Takes longer around the window than in it."""

        def measure(self, workload: str, params: Mapping[str, Value], duration_s: float) -> Outcome:
            found = super().measure(workload, params, duration_s)
            return Outcome(metrics=found.metrics, window_s=0.001)

    session = Slow(delay_s=0.004)
    result = begin(tmp_path, session, plan(boots=1, blocks=1))
    assert result.spent["measure"] == pytest.approx(4 * 0.001)
    assert result.spent["prepare"] >= 4 * 0.003


# Machines that fail


def test_a_dead_guest_is_replaced_once_and_its_block_begins_again(tmp_path: Path) -> None:
    # The seventh measurement is the third of the second block.
    session = FakeSession(faults={7: TransientError("the guest died")})
    events: list[Event] = []
    with Store.create(plan(), tmp_path) as store:
        result = execute(store, lambda: session, events.append, find=find)
    assert result.status == "complete"
    assert boots(session) == ["b01", "b01r1", "b02", "b03"]
    frames = load_run(result.path)
    by_block = frames.samples.groupby("block")["boot"].unique()
    assert [list(names) for names in by_block[:4]] == [["b01"], ["b01r1"], ["b01r1"], ["b02"]]
    assert frames.superseded == 2
    assert frames.complete
    assert [event.message for event in events if event.kind == "retry"] == [
        "boot b01 failed and is repeated once: the guest died"
    ]


def test_a_guest_that_dies_twice_ends_the_run_and_what_is_done_is_kept(tmp_path: Path) -> None:
    faults = {n: TransientError("the guest died", remedy="look at its console") for n in (6, 8)}
    session = FakeSession(faults=faults)
    with pytest.raises(TransientError) as caught:
        begin(tmp_path, session)
    path = catalogue.latest(runs_dir=tmp_path)
    assert caught.value.remedy.startswith("look at its console; ")
    assert f"vringlab resume {path.name}" in caught.value.remedy
    assert boots(session) == ["b01", "b01r1"]
    assert session.calls[-1] == ("exit",)
    frames = load_run(path)
    assert not frames.notes
    assert set(frames.samples["block"]) == {1, 2}
    assert frames.provenance["run"]["status"] == "failed"
    again = FakeSession()
    assert resume(tmp_path, again).status == "complete"
    assert boots(again) == ["b01r2", "b02", "b03"]
    assert load_run(path).samples.groupby("block")["boot"].nunique().eq(1).all()


def test_each_boot_of_the_plan_may_be_repeated_once(tmp_path: Path) -> None:
    # The first guest dies at once; the second boot's first measurement is the 14th.
    faults = {n: TransientError("the guest died") for n in (1, 14)}
    session = FakeSession(faults=faults)
    assert begin(tmp_path, session).status == "complete"
    assert boots(session) == ["b01", "b01r1", "b02", "b02r1", "b03"]


class Restoring(FakeSession):
    """Restores what it is asked to restore, and says so; the boots in `dead` do not come up."""

    def __init__(self, *dead: str, faults: Mapping[int, BaseException] | None = None) -> None:
        super().__init__(faults=faults)
        self.asked: list[tuple[str, int]] = []
        self._dead = dead
        self._how: dict[str, object] = {}

    def boot(self, boot: str, options: Mapping[str, object], edition: int = 0) -> None:
        super().boot(boot, options, edition)
        self.asked.append((boot, edition))
        if boot in self._dead:
            raise TransientError("guest did not answer")
        self._how = saved(edition) if edition else {"how": "booted", "boot_id": f"id-{boot}"}

    def provenance(self) -> dict[str, object]:
        return {**super().provenance(), "boot": self._how} if self._how else super().provenance()


def saved(edition: int) -> dict[str, object]:
    return {"how": "restored", "snapshot": {"edition": edition}, "boot_id": f"id-{edition}"}


def how(frames: RunFrames, boot: str) -> object:
    facts = frames.provenance["boots"][boot]
    return {key: facts[key] for key in facts if key not in ("planned", "started")}


def test_the_first_boots_are_asked_for_as_saved_labs_and_each_says_how_it_came_up(
    tmp_path: Path,
) -> None:
    session = Restoring()
    result = begin(tmp_path, session, replace(plan(), restores=2))
    assert session.asked == [("b01", 1), ("b02", 2), ("b03", 0)]
    frames = load_run(result.path)
    assert [how(frames, boot) for boot in ("b01", "b02", "b03")] == [
        saved(1),
        saved(2),
        {"how": "booted", "boot_id": "id-b03"},
    ]
    # Of one boot alone it would say how the last came up, with the snapshot of another.
    assert "boot" not in frames.provenance
    assert set(frames.samples["boot"]) == {"b01", "b02", "b03"}
    assert not frames.notes


def test_a_boot_that_failed_once_is_booted_cold(tmp_path: Path) -> None:
    # The second boot comes up, and its guest dies in the 14th measurement.
    session = Restoring("b01", faults={14: TransientError("the guest died")})
    result = begin(tmp_path, session, replace(plan(), restores=3))
    assert session.asked == [("b01", 1), ("b01r1", 0), ("b02", 2), ("b02r1", 0), ("b03", 3)]
    boots = load_run(result.path).provenance["boots"]
    assert {name: facts.get("how") for name, facts in boots.items()} == {
        "b01": None,
        "b01r1": "booted",
        "b02": "restored",
        "b02r1": "booted",
        "b03": "restored",
    }


def test_a_run_resumed_from_the_same_saved_lab_goes_on_in_the_same_boot(tmp_path: Path) -> None:
    # In the second block of three.
    stopped = Restoring(faults={6: InfrastructureError("broken")})
    with pytest.raises(InfrastructureError):
        begin(tmp_path, stopped, replace(plan(), restores=1))
    again = Restoring()
    result = resume(tmp_path, again)
    assert again.asked == [("b01r1", 1), ("b02", 0), ("b03", 0)]
    frames = load_run(result.path)
    assert how(frames, "b01r1") == saved(1)
    assert frames.samples.groupby("boot")["block"].unique().map(list).to_dict() == {
        "b01": [1, 2, 3],
        "b02": [4, 5, 6],
        "b03": [7, 8, 9],
    }
    assert frames.notes == (
        "restored from one saved lab, so one boot to the statistics: b01r1 and b01",
    )


@pytest.mark.parametrize("kind", [InfrastructureError, UserError])
def test_other_failures_end_the_run_at_once(
    tmp_path: Path, kind: type[InfrastructureError]
) -> None:
    session = FakeSession(faults={6: kind("broken")})
    with pytest.raises(kind, match="broken") as caught:
        begin(tmp_path, session)
    assert "vringlab resume" in caught.value.remedy
    assert boots(session) == ["b01"]
    assert load_run(catalogue.latest(runs_dir=tmp_path)).samples["cell_id"].nunique() == 5


def test_an_unforeseen_error_keeps_what_is_done_and_says_how_to_go_on(tmp_path: Path) -> None:
    session = FakeSession(faults={6: RuntimeError("a fault in the code")})
    with pytest.raises(RuntimeError) as caught:
        begin(tmp_path, session)
    assert any("vringlab resume" in note for note in caught.value.__notes__)
    assert load_run(catalogue.latest(runs_dir=tmp_path)).samples["cell_id"].nunique() == 5


def test_a_full_disk_is_reported_although_the_tables_cannot_be_written_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise InfrastructureError("no space left to write it")

    with Store.create(plan(), tmp_path) as store:
        monkeypatch.setattr(store, "write_cell", full)
        monkeypatch.setattr(store, "consolidate", full)
        with pytest.raises(InfrastructureError, match="no space left") as caught:
            execute(store, FakeSession, find=find)
        assert "vringlab resume" in caught.value.remedy
        # What does fit is still written.
        assert store.provenance()["run"]["status"] == "failed"


# Measurements that mean nothing


def test_invalid_measurements_are_kept_and_never_repeated(tmp_path: Path) -> None:
    session = FakeSession(faults={3: MeasurementInvalid("rx stayed 0")})
    result = begin(tmp_path, session)
    assert (result.done, result.measured, result.invalid) == (TOTAL, TOTAL, 1)
    assert len(named(session, "measure")) == TOTAL
    samples = load_run(result.path).samples
    (row,) = samples[~samples["valid"]].to_dict("records")
    assert (row["metric"], row["reason"]) == ("none", "rx stayed 0")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_figure_that_is_no_number_makes_the_sample_invalid(tmp_path: Path, value: float) -> None:
    class Broken(FakeSession):
        """Gives one figure that is no number."""

        def measure(self, workload: str, params: Mapping[str, Value], duration_s: float) -> Outcome:
            super().measure(workload, params, duration_s)
            return Outcome(metrics=(Metric("rtt_mean", value, "ns"), Metric("kicks", 1.0, "1/s")))

    result = begin(tmp_path, Broken(), plan(boots=1, blocks=1))
    assert result.invalid == 4
    samples = load_run(result.path).samples
    assert set(samples["reason"]) == {f"rtt_mean is {value}, not a finite number"}
    assert samples["started"].str.startswith("20").all()


# Stopping early


def test_a_run_ends_when_it_is_decided_and_goes_on_when_asked_again(tmp_path: Path) -> None:
    def enough(store: Store) -> bool:
        return len(store.complete_blocks()) >= 4

    with Store.create(plan(), tmp_path) as store:
        result = execute(store, FakeSession, until=enough, find=find)
        assert (result.status, result.done) == ("decided", 16)
        session = FakeSession()
        assert execute(store, lambda: session, until=enough, find=find).status == "decided"
        assert session.calls == []
    assert catalogue.describe(result.path).state == "decided"
    assert resume(tmp_path, FakeSession()).measured == TOTAL - 16


# What must not be mixed in one run


def test_a_run_is_not_resumed_on_another_kind_of_host(tmp_path: Path) -> None:
    class Physical(FakeSession):
        """Claims to be a real machine."""

        host_kind = "physical"

    with pytest.raises(InfrastructureError):
        begin(tmp_path, FakeSession(faults={6: InfrastructureError("broken")}))
    session = Physical()
    with pytest.raises(UserError, match="begun on a host of kind simulated") as caught:
        resume(tmp_path, session)
    assert "start a new run" in caught.value.remedy
    assert not named(session, "boot")
    assert load_run(catalogue.latest(runs_dir=tmp_path)).host_kind == "simulated"


@pytest.mark.parametrize("announced", [False, True])
def test_a_run_is_not_resumed_with_another_build_of_an_arm(tmp_path: Path, announced: bool) -> None:
    class Rebuilt(FakeSession):
        """Has another build of one arm, which it knows from the start or only when loaded."""

        def switch(self, arm: str) -> str:
            return super().switch(arm) + ("ff" if arm == "direct" else "")

        def provenance(self) -> dict[str, object]:
            arms = {"direct": {"build_id": "ff"}} if announced else {}
            return {**super().provenance(), "arms": arms}

    with pytest.raises(InfrastructureError):
        begin(tmp_path, FakeSession(faults={6: InfrastructureError("broken")}))
    # Refused once does not mean known: it is refused again.
    for _ in range(2):
        session = Rebuilt()
        with pytest.raises(UserError, match="arm direct is another build"):
            resume(tmp_path, session)
        assert bool(named(session, "boot")) is not announced
    path = catalogue.latest(runs_dir=tmp_path)
    assert load_run(path).samples.groupby("block")["boot"].nunique().eq(1).all()
    assert resume(tmp_path, FakeSession()).status == "complete"


def test_guests_are_booted_with_what_all_workloads_need(tmp_path: Path) -> None:
    made = plan(boots=1, blocks=1)
    session = FakeSession()
    wants = FakeWorkload("fake", options={"nics": ["split"], "vsock": True})
    with Store.create(made, tmp_path) as store:
        execute(store, lambda: session, find=lambda _: wants)
    assert named(session, "boot") == [("boot", "b01", {"nics": ["split"], "vsock": True})]


def test_workloads_that_need_different_guests_are_named() -> None:
    made = make_plan(
        fake_campaign.experiment(1, 1).model_copy(
            update={
                "workloads": tuple(
                    WorkloadUse(workload=name, matrix={"payload": [1]}) for name in ("one", "two")
                )
            }
        ),
        "quick",
        1,
        find=find,
    )
    options: dict[str, dict[str, object]] = {
        "one": {"nics": ["split"], "memory_mib": 512},
        "two": {"nics": ["split", "packed"], "memory_mib": 512},
    }

    def needing(name: str) -> Workload:
        return FakeWorkload(name, params=FakeParams, options=options[name])

    assert guest_options(made, needing) == {"nics": ["split", "packed"], "memory_mib": 512}
    options["two"]["memory_mib"] = 1024
    with pytest.raises(UserError) as caught:
        guest_options(made, needing)
    assert "memory_mib=512" in str(caught.value)
    assert "memory_mib=1024" in str(caught.value)


# Kills


def program(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *arguments[:1], str(folder), *arguments[1:]],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'lib'}"},
        stdout=subprocess.PIPE,
        text=True,
    )


def cells_of(folder: Path) -> int:
    return len([path for path in folder.glob("2*/cells/*") if not path.name.startswith(".")])


def wait_for(folder: Path, cells: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while cells_of(folder) < cells:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def output_of(process: subprocess.Popen[str]) -> str:
    assert isinstance(process.stdout, IO | io.TextIOBase)
    with process:
        return process.communicate(timeout=60)[0]


def test_killed_at_cell_28_of_36_the_rerun_measures_8(tmp_path: Path) -> None:
    # papermill#824: nothing resumed after 24 hours. 28 cells are seven complete blocks.
    process = program(tmp_path, "run", "29")
    wait_for(tmp_path, 28, process)
    process.kill()
    output_of(process)
    assert cells_of(tmp_path) == 28
    path = catalogue.latest(runs_dir=tmp_path)
    assert load_run(path).samples["cell_id"].nunique() == 28
    session = FakeSession()
    result = resume(tmp_path, session)
    assert (result.measured, result.done) == (8, TOTAL)
    # The rest of the third boot is measured in another guest, which the statistics must know.
    assert boots(session) == ["b03r1"]
    frames = load_run(path)
    assert frames.complete
    assert [list(b) for b in frames.samples.groupby("block")["boot"].unique()[6:]] == [
        ["b03"],
        ["b03r1"],
        ["b03r1"],
    ]
    assert frames.superseded == 0


def test_killed_inside_a_block_the_whole_block_is_measured_again(tmp_path: Path) -> None:
    process = program(tmp_path, "run", "31")
    wait_for(tmp_path, 30, process)
    process.kill()
    output_of(process)
    assert cells_of(tmp_path) == 30
    result = resume(tmp_path, FakeSession())
    assert (result.measured, result.done) == (8, TOTAL)
    frames = load_run(result.path)
    assert frames.superseded == 2
    assert frames.samples.groupby("block")["boot"].nunique().eq(1).all()
    assert not frames.samples.duplicated(["cell_id", "metric"]).any()


def test_killed_at_any_file_operation_a_run_resumes_to_the_same_result(tmp_path: Path) -> None:
    process = program(tmp_path, "sweep", "4")
    text = output_of(process)
    assert process.returncode == 0, text
    # The last line is the number of operations of a whole run; fewer were not reached.
    assert int(text.split()[-1]) > 50


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_cleanly_and_says_how_to_resume(tmp_path: Path, number: int) -> None:
    process = program(tmp_path, "run", "6")
    wait_for(tmp_path, 5, process)
    process.send_signal(number)
    text = output_of(process)
    assert process.returncode == 130, text
    path = catalogue.latest(runs_dir=tmp_path)
    kept = cells_of(tmp_path)
    assert f"{kept} of {TOTAL} cells are kept; continue with: vringlab resume {path.name}" in text
    frames = load_run(path)
    assert not frames.notes, "the tables are up to date"
    assert frames.samples["cell_id"].nunique() == kept
    assert frames.provenance["run"]["status"] == "interrupted"
    assert frames.time["attempts"][0]["status"] == "interrupted"
    assert not list(path.rglob(".new-*"))
    assert resume(tmp_path, FakeSession()).done == TOTAL


def test_an_interrupt_in_a_notebook_stops_the_notebook_too(tmp_path: Path) -> None:
    session = FakeSession(faults={6: KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt) as caught:
        begin(tmp_path, session)
    assert isinstance(caught.value, Interrupted)
    assert (caught.value.result.done, caught.value.result.status) == (5, "interrupted")
    assert session.calls[-1] == ("exit",)


def test_handlers_are_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    begin(tmp_path, FakeSession(), plan(boots=1, blocks=1))
    assert signal.getsignal(signal.SIGTERM) is before


# Budget and progress


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nested_phases_count_once() -> None:
    clock = Clock()
    budget = Budget(clock)
    clock.now += 1
    with budget.phase("set-up"):
        clock.now += 2
        with budget.phase("build"):
            clock.now += 4
            with suppress(RuntimeError), budget.phase("boot"):
                clock.now += 8
                raise RuntimeError
        clock.now += 16
    clock.now += 32
    spent = budget.spent()
    assert {name: s for name, s in spent.items() if s} == {
        "set-up": 18,
        "build": 4,
        "boot": 8,
        "idle": 33,
    }
    assert sum(spent.values()) == budget.total == 63
    budget.move(100, "set-up", "measure")
    assert (budget.spent()["set-up"], budget.spent()["measure"]) == (0, 18)
    budget.move(-5, "measure", "set-up")
    assert budget.spent()["measure"] == 18
    assert budget.share("measure") == pytest.approx(18 / 63)
    budget.stop()
    clock.now += 1000
    assert budget.total == 63
    assert "measure       18.0 s   28.6%\n" in table(budget.spent())
    assert "measure       18.0 s   28.6%  the timed windows" in table(budget.spent(), explain=True)
    assert set(MEANINGS) == set(PHASES)
    with pytest.raises(ValueError, match="unknown phase"), budget.phase("lunch"):  # type: ignore[arg-type]
        pass


def test_plain_progress_has_a_line_per_cell_with_its_number_and_the_time_left(
    tmp_path: Path,
) -> None:
    stream = io.StringIO()
    seen: list[Event] = []
    made = plan(boots=2, blocks=1)
    with Store.create(made, tmp_path) as store:
        execute(store, FakeSession, progress.fan_out(seen.append, PlainDisplay(stream)), find=find)
    lines = stream.getvalue().splitlines()
    cells = [line for line in lines if "rtt_mean" in line]
    assert [line.split()[0] for line in cells] == [f"[{n}/8]" for n in range(1, 9)]
    assert all(line.endswith(" left") for line in cells)
    assert [event.kind for event in seen[:4]] == ["run", "boot", "switch", "cell"]
    assert seen[-1].kind == "end"
    assert [event.index for event in seen if event.kind == "cell-done"] == list(range(1, 9))
    left = [event.left_s for event in seen if event.kind == "cell-done"]
    assert left[-1] == pytest.approx(0)


def test_rich_progress_keeps_invalid_samples_in_the_scrollback(tmp_path: Path) -> None:
    stream = io.StringIO()
    session = FakeSession(faults={2: MeasurementInvalid("[short] reads")})
    with Store.create(plan(boots=1, blocks=1), tmp_path) as store, RichDisplay(stream) as display:
        execute(store, lambda: session, display, find=find)
    assert "invalid: [short] reads" in " ".join(stream.getvalue().split())
    assert "complete: 4 of 4 cells done" in stream.getvalue()


def test_a_stream_that_is_no_terminal_gets_plain_lines() -> None:
    assert isinstance(progress.auto(io.StringIO()), PlainDisplay)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (125, "2 min 05 s"), (3780, "1 h 03 min")],
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert progress.clock(seconds) == text
