"""Sessions in dask workers: calls, errors, ends of workers and of the process that wants them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import LocalCluster
from tests.fakes import fake_hosts
from tests.fakes.fake_campaign import plan
from tests.fakes.fake_hosts import on_workers, opener
from tests.fakes.processes import alive, until

from vringlab.analysis.frames import load_run
from vringlab.campaign import catalogue
from vringlab.campaign.blocks import Stopped
from vringlab.campaign.fake import FakeSession, find
from vringlab.campaign.progress import Event
from vringlab.campaign.runner import RunResult, execute
from vringlab.campaign.seat import RESOURCE, Seat
from vringlab.campaign.store import Store
from vringlab.campaign.workers import Workers
from vringlab.errors import (
    HostLost,
    InfrastructureError,
    MeasurementInvalid,
    TransientError,
    UserError,
)

ROOT = Path(fake_hosts.__file__).parents[2]


@pytest.fixture(scope="module")
def told() -> list[str]:
    return []


@pytest.fixture(scope="module")
def workers(told: list[str]) -> Iterator[Workers]:
    """Two workers that the tests below take in turn: each gives its session back."""
    with Workers(["a", "b"], on_step=told.append) as made:
        yield made


def run(workers: Workers, folder: Path, acts: dict[str, dict[int, str]], **more: Any) -> RunResult:
    with Store.create(plan(boots=4, blocks=2), folder / "runs") as store:
        hosts = on_workers(workers, folder, {"a": {}, "b": {}, **acts})
        return execute(store, hosts, find=find, **more)


def measured(folder: Path) -> list[str]:
    return [line for log in folder.glob("*.log") for line in log.read_text().splitlines()]


def test_a_run_on_two_workers_is_whole_and_each_cell_is_measured_once(
    workers: Workers, told: list[str], tmp_path: Path
) -> None:
    result = run(workers, tmp_path, {"a": {2: "invalid"}})
    assert (result.status, result.done, result.invalid) == ("complete", 32, 1)
    frames = load_run(result.path)
    assert set(frames.samples["host"]) == {"a", "b"}
    assert len(measured(tmp_path)) == 32
    assert frames.samples["reason"].str.contains("rx stayed 0").any()
    # Two processes, neither of them this one.
    processes = {(tmp_path / f"{name}.pid").read_text().split()[1] for name in "ab"}
    assert len(processes | {str(os.getpid())}) == 3
    assert sorted(line.split(":")[0] for line in told) == ["a", "b"]
    assert all((tmp_path / f"{name}.closed").exists() for name in "ab")
    assert until(lambda: not any(alive(pid) for pid in companions(tmp_path)))


def companions(folder: Path) -> list[int]:
    return [int(path.read_text().split()[0]) for path in folder.glob("*.pid")]


def test_finer_phases_of_a_session_are_counted_here(workers: Workers, tmp_path: Path) -> None:
    with workers.session("a", opener("a", tmp_path)) as session:
        session.boot("b01", {})
        with session.time_budget.phase("prepare"):
            session.measure("fake", {"payload": 1}, 1.0)
        spent = session.time_budget.spent()
    assert spent["set-up"] >= 0.002
    assert spent["prepare"] >= 0.01
    assert spent["set-up"] < spent["prepare"]


def test_errors_come_with_their_kind_and_their_remedy(workers: Workers, tmp_path: Path) -> None:
    with workers.session("a", opener("a", tmp_path, {1: "fail", 2: "invalid"})) as session:
        session.boot("b01", {})
        with pytest.raises(InfrastructureError) as caught:
            session.measure("fake", {"payload": 1}, 1.0)
        assert (caught.value.remedy, caught.value.stderr) == ("install fio", "no fio")
        with pytest.raises(MeasurementInvalid):
            session.measure("fake", {"payload": 1}, 1.0)
        # Neither ends the session.
        assert session.measure("fake", {"payload": 1}, 1.0).valid


def _refuse(*, on_step: Callable[[str], None]) -> Any:
    on_step("looking")
    raise UserError("it does not compile", remedy="mend it")


def test_a_session_that_cannot_be_opened_says_why_and_frees_its_worker(
    workers: Workers, tmp_path: Path
) -> None:
    with (
        pytest.raises(UserError, match="it does not compile"),
        workers.session("a", _refuse),
    ):
        pass
    with workers.session("a", opener("a", tmp_path)) as session:
        assert session.host_kind == "simulated"


def test_a_stop_ends_a_measurement_and_gives_back_what_the_session_holds(tmp_path: Path) -> None:
    stop = threading.Event()
    with Workers(["a"], stop=stop) as workers:

        def measure() -> None:
            with workers.session("a", opener("a", tmp_path, {1: "stall"})) as session:
                session.boot("b01", {})
                threading.Timer(0.3, stop.set).start()
                session.measure("fake", {"payload": 1}, 1.0)

        with pytest.raises(Stopped):
            measure()
        assert (tmp_path / "a.closed").exists()
        assert until(lambda: not any(alive(pid) for pid in companions(tmp_path)))


def test_a_worker_that_dies_costs_its_block_and_nothing_is_run_twice(tmp_path: Path) -> None:
    events: list[Event] = []
    stop = threading.Event()
    with (
        Workers(["a", "b"], stop=stop) as workers,
        pytest.raises(TransientError, match="the worker process that drove b ended") as caught,
    ):
        run(workers, tmp_path, {"b": {6: "die"}}, progress=events.append, stop=stop)
    assert "vringlab resume" in caught.value.remedy
    path = catalogue.latest(runs_dir=tmp_path / "runs")
    frames = load_run(path)
    assert [event.host for event in events if event.kind == "lost"] == ["b"]
    assert sum(event.kind == "retry" for event in events) == 0
    # One block of four was begun and lost: its first cell was measured, its second was begun.
    assert len(measured(tmp_path)) == 28 + 2
    blocks = frames.samples.groupby("block")["cell_id"].nunique()
    assert sorted(blocks) == [1, *[4] * 7]
    with Store.open(path) as store:
        assert execute(store, FakeSession, find=find).measured == 4
    assert load_run(path).complete


def test_a_worker_that_dies_between_two_calls_is_missed(tmp_path: Path) -> None:
    def measure(workers: Workers) -> None:
        with workers.session("a", opener("a", tmp_path)) as session:
            session.boot("b01", {})
            os.kill(int((tmp_path / "a.pid").read_text().split()[1]), signal.SIGKILL)
            with pytest.raises(HostLost):
                session.switch("direct")
            session.measure("fake", {"payload": 1}, 1.0)

    with Workers(["a"]) as workers, pytest.raises(HostLost, match="that drove a ended"):
        measure(workers)


def program(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(fake_hosts.__file__), str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'lib'}"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def stalled(folder: Path) -> bool:
    return len(measured(folder)) == 6


def processes_of(folder: Path) -> list[int]:
    return [int(pid) for path in folder.glob("*.pid") for pid in path.read_text().split()]


def test_kill_minus_nine_leaves_no_process(tmp_path: Path) -> None:
    with program(tmp_path) as process:
        assert until(lambda: stalled(tmp_path))
        pids = processes_of(tmp_path)
        assert len(pids) == 4
        assert all(alive(pid) for pid in pids)
        process.kill()
    assert until(lambda: not any(alive(pid) for pid in pids))
    path = catalogue.latest(runs_dir=tmp_path / "runs")
    with Store.open(path) as store:
        assert execute(store, FakeSession, find=find).status == "complete"


@pytest.mark.parametrize("to_all", [False, True], ids=["SIGTERM", "Ctrl-C in a terminal"])
def test_a_signal_ends_all_hosts_in_order(tmp_path: Path, to_all: bool) -> None:
    with program(tmp_path) as process:
        assert until(lambda: stalled(tmp_path))
        pids = processes_of(tmp_path)
        if to_all:
            # A terminal sends it to every process of the group.
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.terminate()
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 130, text
    assert "4 of 48 cells are kept; continue with: vringlab resume" in text
    assert all((tmp_path / f"{name}.closed").exists() for name in "ab"), "given back in order"
    assert until(lambda: not any(alive(pid) for pid in pids))


# Workers of a cluster


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        processes=True,
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
        resources={RESOURCE: 1},
        memory_limit=0,
    ) as made:
        yield made


def test_workers_of_a_scheduler_are_used_and_left_as_they_were(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    address = cluster.scheduler_address
    for attempt in range(2):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        with Workers(["a", "b"], scheduler=address) as workers:
            assert run(workers, folder, {}).status == "complete"
    with (
        pytest.raises(UserError, match="3 hosts need as many workers, and 2 are free") as caught,
        Workers(["a", "b", "c"], scheduler=address),
    ):
        pass
    assert f"dask worker {address}" in caught.value.remedy
    with (
        Workers(["a"], scheduler=address) as workers,
        workers.session("a", opener("a", tmp_path)),
        pytest.raises(UserError, match="drives a"),
        Workers(["b", "c"], scheduler=address),
    ):
        pass


def test_a_scheduler_that_does_not_answer_is_named() -> None:
    with (
        pytest.raises(UserError, match="no dask scheduler answers at nowhere"),
        Workers(["a"], scheduler="nowhere"),
    ):
        pass


def test_a_session_that_nobody_asks_for_any_more_ends(tmp_path: Path) -> None:
    seat = Seat("a", opener("a", tmp_path, {1: "stall"}), lambda _: None, patience=0.4)
    facts, _ = seat.opened()
    assert facts.host_kind == "simulated"
    seat.ask("boot", ["b01", {}])
    with pytest.raises(InfrastructureError, match="has ended"):
        seat.ask("measure", ["fake", {"payload": 1}, 1.0])
    assert until(lambda: seat.over)
    assert (tmp_path / "a.closed").exists()
