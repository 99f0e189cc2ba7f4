"""Many hosts measure one run: who is dealt what, what a loss costs, what the run folder says."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
from tests.fakes.fake_campaign import plan

from vringlab.analysis.frames import load_run
from vringlab.analysis.stats import effect
from vringlab.campaign import catalogue
from vringlab.campaign.deal import Boot, Deal
from vringlab.campaign.experiment import Value
from vringlab.campaign.fake import FakeSession, find
from vringlab.campaign.hosts import Host, choose, from_urls, read_hosts, require_memory
from vringlab.campaign.plan import Plan
from vringlab.campaign.progress import Event, PlainDisplay, RichDisplay
from vringlab.campaign.runner import Interrupted, RunResult, Session, execute
from vringlab.campaign.store import Store
from vringlab.errors import HostLost, InfrastructureError, TransientError, UserError
from vringlab.workloads.base import Outcome

Makers = Mapping[str, Callable[[], AbstractContextManager[Session]]]

# Who is dealt what


def boots(count: int) -> list[Boot]:
    made = plan(boots=count, blocks=1)
    return [(name, [[cell for cell in made.cells if cell.boot == name]]) for name in made.boots]


def test_boots_are_dealt_in_turn() -> None:
    deal = Deal(boots(5), ["a", "b"])
    taken = [deal.take(host) for host in "ababa"]
    assert [boot and boot[0] for boot in taken] == ["b01", "b02", "b03", "b04", "b05"]


def test_a_host_that_is_done_takes_of_a_slower_one_but_not_its_first() -> None:
    deal = Deal(boots(6), ["a", "b"])
    names = [boot[0] for _ in range(5) if (boot := deal.take("a")) is not None]
    assert names == ["b01", "b03", "b05", "b06", "b04"]
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(deal.take, "a")
        first = deal.take("b")
        assert first is not None
        assert first[0] == "b02"
        assert not waiting.done(), "what the other one cannot do would be its"
        assert deal.take("b") is None
        assert waiting.result(timeout=10) is None


def test_what_a_lost_host_leaves_goes_to_the_others() -> None:
    made = plan(boots=2, blocks=3)
    blocks = [[cell for cell in made.cells if cell.block == n] for n in range(1, 7)]
    deal = Deal([("b01", blocks[:3]), ("b02", blocks[3:])], ["a", "b"])
    assert deal.take("a") == ("b01", blocks[:3])
    assert deal.take("b") == ("b02", blocks[3:])
    deal.leave("b", ("b02", blocks[5:]))
    assert deal.take("a") == ("b02", blocks[5:])
    assert deal.take("a") is None


def test_boots_of_a_host_that_never_came_go_to_the_others() -> None:
    deal = Deal(boots(4), ["a", "b"])
    deal.leave("b")
    taken = [deal.take("a") for _ in range(5)]
    assert [boot and boot[0] for boot in taken] == ["b01", "b03", "b04", "b02", None]


def test_nobody_waits_for_an_execution_that_ended() -> None:
    deal = Deal(boots(2), ["a", "b"])
    deal.take("a")
    deal.take("b")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(deal.take, "a")
        deal.end()
        assert waiting.result(timeout=10) is None
    deal = Deal(boots(1), ["a"])
    deal.end()
    assert deal.take("a") is None


# A run on several hosts, each a thread of this process


def makers(sessions: Mapping[str, FakeSession]) -> Makers:
    return {name: partial(lambda session: session, session) for name, session in sessions.items()}


def begin(
    folder: Path,
    sessions: Mapping[str, FakeSession],
    made: Plan | None = None,
    progress: Callable[[Event], None] = lambda _: None,
) -> RunResult:
    with Store.create(made or plan(boots=4, blocks=2), folder) as store:
        return execute(store, makers(sessions), progress, find=find)


def test_every_host_runs_all_arms_and_is_a_cluster_of_the_statistics(tmp_path: Path) -> None:
    sessions = {name: FakeSession(seed, delay_s=0.002) for seed, name in enumerate("abc")}
    events: list[Event] = []
    result = begin(tmp_path, sessions, plan(boots=6, blocks=2), events.append)
    assert (result.status, result.done, result.measured) == ("complete", 48, 48)
    run = load_run(result.path)
    assert run.complete
    assert not run.notes
    arms = run.samples.groupby("host")["arm"].unique()
    assert set(arms.index) == set(sessions)
    assert all(set(found) == {"queued", "queued.aa", "rfc-v1", "direct"} for found in arms)
    assert run.samples.groupby("block")["boot"].nunique().eq(1).all()
    assert run.samples.groupby("boot")["host"].nunique().eq(1).all()
    found = effect(run.samples, "rtt_mean", "direct", "queued")
    assert (found.hosts, found.unit, found.df) == (3, "host", 2)
    assert sorted(run.provenance["run"]["host"].split(", ")) == sorted(sessions)
    assert set(run.provenance["hosts"]) == set(sessions)
    assert {boot["host"] for boot in run.provenance["boots"].values()} == set(sessions)
    (attempt,) = run.time["attempts"]
    assert set(attempt["hosts"]) == set(sessions)
    assert sum(attempt["phases"].values()) >= sum(
        sum(spent.values()) for spent in attempt["hosts"].values()
    )
    # The view of all: every cell once, each with its host.
    cells = [event for event in events if event.kind == "cell-done"]
    assert [event.index for event in cells] == sorted(event.index for event in cells)
    assert {event.host for event in cells} == set(sessions)
    assert events[0].host == events[-1].host == ""
    assert all(session.calls[-1] == ("exit",) for session in sessions.values())


def test_hosts_measure_at_the_same_time(tmp_path: Path) -> None:
    inside = threading.Barrier(3, timeout=30)

    class Meeting(FakeSession):
        """Measures for the first time only when all others do."""

        def measure(self, workload: str, params: Mapping[str, Value], duration_s: float) -> Outcome:
            if not self._measured:
                inside.wait()
            return super().measure(workload, params, duration_s)

    assert begin(tmp_path, {name: Meeting() for name in "abc"}).status == "complete"


def test_a_lost_host_costs_its_block_alone_and_resume_completes_the_run(tmp_path: Path) -> None:
    # In its first boot, the second cell of the second of four blocks.
    lost = FakeSession(delay_s=0.002, faults={6: HostLost("its QEMU ended")})
    sessions = {"a": FakeSession(1, delay_s=0.002), "b": lost}
    made = plan(boots=4, blocks=4)
    events: list[Event] = []
    with pytest.raises(TransientError, match="host b was lost: its QEMU ended") as caught:
        begin(tmp_path, sessions, made, events.append)
    path = catalogue.latest(runs_dir=tmp_path)
    assert f"vringlab resume {path.name}" in caught.value.remedy
    (loss,) = [event for event in events if event.kind == "lost"]
    assert (loss.host, loss.message) == ("b", "the host takes no further part: its QEMU ended")
    assert lost.calls[-1] == ("exit",)
    run = load_run(path)
    complete = {
        block for block, cells in run.samples.groupby("block")["cell_id"] if cells.nunique() == 4
    }
    (undone,) = set(range(1, 17)) - complete
    assert f"block {undone}" in caught.value.message
    assert made.cells[4 * undone - 1].boot == "b02"
    # The rest of that boot was measured by the other host, in a guest of its own.
    rest = run.samples[run.samples["block"] == undone + 1]
    assert set(rest["host"]) == {"a"}
    assert set(rest["boot"]) == {"b02r1"}
    assert run.provenance["run"]["status"] == "failed"
    with Store.open(path) as store:
        again = execute(store, lambda: FakeSession(7), find=find)
    assert (again.status, again.measured) == ("complete", 4)
    frames = load_run(path)
    assert frames.samples.groupby("block")["boot"].nunique().eq(1).all()
    assert frames.provenance["run"]["host"].split(", ")[-1] == "fake", "all that measured are named"
    assert set(frames.provenance["run"]["host"].split(", ")) == {"a", "b", "fake"}


def test_a_guest_that_dies_is_replaced_while_its_host_stands(tmp_path: Path) -> None:
    sessions = {
        "a": FakeSession(1),
        "b": FakeSession(2, faults={2: TransientError("the guest died")}),
    }
    events: list[Event] = []
    assert begin(tmp_path, sessions, progress=events.append).status == "complete"
    (retry,) = [event for event in events if event.kind == "retry"]
    assert retry.host == "b"


def test_a_host_that_cannot_be_opened_costs_nothing(tmp_path: Path) -> None:
    def broken() -> AbstractContextManager[Session]:
        raise InfrastructureError("no QEMU there")

    stream = io.StringIO()
    with Store.create(plan(boots=4, blocks=1), tmp_path) as store:
        hosts: Makers = {**makers({"a": FakeSession()}), "b": broken}
        result = execute(store, hosts, PlainDisplay(stream), find=find)
    assert result.status == "complete"
    assert "b: the host takes no further part: no QEMU there" in stream.getvalue()


def test_when_all_hosts_are_lost_the_first_error_is_the_runs(tmp_path: Path) -> None:
    sessions = {
        "a": FakeSession(faults={1: HostLost("gone")}),
        "b": FakeSession(faults={1: InfrastructureError("fio is missing", remedy="install it")}),
    }
    with pytest.raises(InfrastructureError, match="2 of the hosts were lost") as caught:
        begin(tmp_path, sessions)
    assert not isinstance(caught.value, TransientError)
    assert "vringlab resume" in caught.value.remedy
    assert load_run(catalogue.latest(runs_dir=tmp_path)).samples.empty


@pytest.mark.parametrize("error", [UserError("it does not compile"), RuntimeError("a fault")])
def test_what_would_fail_everywhere_ends_the_run_on_all_hosts(
    tmp_path: Path, error: Exception
) -> None:
    sessions = {"a": FakeSession(1, delay_s=0.01), "b": FakeSession(2, faults={3: error})}
    with pytest.raises(type(error), match=str(error)):
        begin(tmp_path, sessions, plan(boots=20, blocks=4))
    path = catalogue.latest(runs_dir=tmp_path)
    assert load_run(path).samples["cell_id"].nunique() < 100
    assert all(session.calls[-1] == ("exit",) for session in sessions.values())


def test_kinds_of_hosts_are_not_mixed(tmp_path: Path) -> None:
    class Physical(FakeSession):
        """Claims to be a real machine."""

        host_kind = "physical"

    with pytest.raises(UserError, match="was begun on a host of kind"):
        begin(tmp_path, {"a": FakeSession(), "b": Physical()})
    run = load_run(catalogue.latest(runs_dir=tmp_path))
    assert run.samples["host_kind"].nunique() <= 1


def test_an_interrupt_ends_all_hosts_and_says_how_to_go_on(tmp_path: Path) -> None:
    stop = threading.Event()

    class Waiting(FakeSession):
        """Stands for a session that looks at the stop while it waits for its machines."""

        def measure(self, workload: str, params: Mapping[str, Value], duration_s: float) -> Outcome:
            if self._measured >= 4:
                assert stop.wait(30)
            return super().measure(workload, params, duration_s)

    sessions = {"a": Waiting(1), "b": Waiting(2)}

    def interrupt(event: Event) -> None:
        if event.kind == "cell-done" and event.index == 8:
            # As Ctrl-C: in the main thread, which waits for the hosts.
            threading.Timer(0.05, _interrupt_main).start()

    with (
        Store.create(plan(boots=4, blocks=2), tmp_path) as store,
        pytest.raises(Interrupted, match="8 of 32 cells are kept") as caught,
    ):
        execute(store, makers(sessions), interrupt, find=find, stop=stop)
    assert caught.value.result.status == "interrupted"
    assert all(session.calls[-1] == ("exit",) for session in sessions.values())
    assert load_run(caught.value.result.path).samples["cell_id"].nunique() == 8


def _interrupt_main() -> None:
    import _thread

    _thread.interrupt_main()


def test_several_hosts_stop_when_the_run_is_decided(tmp_path: Path) -> None:
    sessions = {"a": FakeSession(1, delay_s=0.01), "b": FakeSession(2, delay_s=0.01)}
    with Store.create(plan(boots=8, blocks=4), tmp_path) as store:
        result = execute(
            store,
            makers(sessions),
            until=lambda opened: len(opened.complete_blocks()) >= 3,
            find=find,
        )
    assert result.status == "decided"
    assert 12 <= result.done <= 40


def test_one_of_them_sees_which_path_the_packets_take(tmp_path: Path) -> None:
    from vringlab.campaign import experiment as experiments

    probes = experiments.load("vsock-direct-enqueue").counted
    assert probes is not None
    sessions = {name: FakeSession(seed, probes=probes) for seed, name in enumerate("ab")}
    result = begin(tmp_path, sessions)
    passes = [call for session in sessions.values() for call in session.calls if call[0] == "paths"]
    assert len(passes) == 3, "each arm once"
    assert len(load_run(result.path).provenance["exercised"]) == 3


def test_rich_progress_has_a_line_for_each_host(tmp_path: Path) -> None:
    stream = io.StringIO()
    with RichDisplay(stream) as display:
        begin(tmp_path, {"a": FakeSession(1), "b": FakeSession(2)}, progress=display)
        assert set(display._rows) == {"", "a", "b"}
        assert sum(display._cells.values()) == 32
    assert "complete: 32 of 32 cells done" in stream.getvalue()


# Hosts by name


def test_embedded_hosts_are_numbered_and_others_named_by_their_address() -> None:
    assert [host.name for host in choose(from_urls(["embedded"]))] == ["embedded"]
    several = from_urls(["embedded", "ssh://root@kvm1:2222/", "embedded"])
    assert [host.name for host in choose(several)] == ["embedded-1", "kvm1", "embedded-2"]
    assert [host.url for host in from_urls(["embedded, embedded"])] == ["embedded"] * 2


def test_a_host_is_named_once() -> None:
    with pytest.raises(UserError, match="ssh://kvm1 is named twice"):
        choose(from_urls(["ssh://kvm1", "ssh://kvm1"]))


HOSTS = """
hosts:
  - url: ssh://root@kvm1
    arch: x86_64
    cpus: 16
    memory_gib: 64
    tags: [epyc, quiet]
  - url: ssh://root@kvm2
    name: second
    cpus: 4
  - url: embedded
"""


@pytest.mark.parametrize(
    ("needs", "names"),
    [
        ([], ["kvm1", "second", "embedded"]),
        (["epyc"], ["kvm1"]),
        (["cpus>=4"], ["kvm1", "second", "embedded"]),
        (["cpus>=8", "quiet"], ["kvm1"]),
        (["arch=x86_64", "memory_gib>=32"], ["kvm1"]),
        (["embedded"], ["embedded"]),
    ],
)
def test_hosts_are_chosen_by_what_they_have(
    tmp_path: Path, needs: Sequence[str], names: Sequence[str]
) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_text(HOSTS)
    assert [host.name for host in choose(read_hosts(path), needs)] == names


def test_a_need_that_no_host_has_is_named_with_what_each_lacks(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_text(HOSTS)
    with pytest.raises(UserError, match=r"ssh://root@kvm2 lacks sapphire"):
        choose(read_hosts(path), ["sapphire"])
    with pytest.raises(UserError, match="cannot read the need 'cpus=8'"):
        choose(read_hosts(path), ["cpus=8"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is no YAML"),
        ("[]", "has no list `hosts`"),
        ("hosts: []", "has no list `hosts`"),
        ("hosts: [{name: a}]", "url: Field required"),
        ("hosts: [{url: embedded, cpu: 4}]", "cpu: Extra inputs"),
        ("hosts: [{url: embedded, cpus: 0}]", "cpus: Input should be"),
    ],
)
def test_a_damaged_hosts_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_hosts(path)
    assert str(path) in caught.value.message
    assert says in caught.value.message
    with pytest.raises(UserError, match="cannot read"):
        read_hosts(tmp_path / "none.yaml")


def test_more_machines_than_memory_are_refused() -> None:
    require_memory(choose(from_urls(["embedded"])))
    with pytest.raises(UserError, match="5000 embedded hosts need"):
        require_memory([Host(url="embedded", name=f"embedded-{n}") for n in range(5000)])
