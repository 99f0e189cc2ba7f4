"""perf on a KVM host: what it prints, and that it counts while a block runs, over SSH."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.processes import DEADLINE_S, script
from tests.fakes.ssh_server import Keys, SshServer
from tests.fakes.test_instructions import Machines as Counters
from tests.fakes.test_instructions import figures, lab_of, profile

from vringlab.campaign.instructions import counting_of
from vringlab.campaign.work import SIZES_S
from vringlab.errors import InfrastructureError
from vringlab.lab import perf
from vringlab.lab.guest import VhostUserNic
from vringlab.transport.ssh import Machine
from vringlab.workloads.base import Outcome

#: perf 6.1 on a virtual machine whose processor shows no counters, as it printed it.
NOTHING = """\
<not supported>,,instructions:Gu,0,100.00,,
<not supported>,,instructions:Gk,0,100.00,,
<not supported>,,instructions:Hu,0,100.00,,
<not supported>,,instructions:Hk,0,100.00,,
<not supported>,,cycles:G,0,100.00,,
<not supported>,,cycles:H,0,100.00,,
4193,,context-switches,405355484,100.00,,
"""
#: Counts for each line that the fake program is sent: start-up and three of a unit.
FAKE = """\
echo "$@" >> {log}
while [ "$1" != -- ]; do shift; done; shift
"$@"
n=$(cat {units})
cat >&2 <<END
$((1000 + 100 * n)),,instructions:Gu,1,100.00,,
$((9000 + 200 * n)),,instructions:Gk,1,100.00,,
$((5000 + 10 * n)),,instructions:Hu,1,100.00,,
$((7000 + 40 * n)),,instructions:Hk,1,100.00,,
$((2 * n)),,context-switches,1,100.00,,
<not counted>,,cycles:G,1,100.00,,
END
"""


def with_values(text: str = NOTHING) -> str:
    lines = text.splitlines()
    return "".join(
        f"{n}00{line[line.index(',') :]}\n" if line.startswith("<") else f"{line}\n"
        for n, line in enumerate(lines, 1)
    )


def test_guest_and_host_are_apart() -> None:
    found, others = perf.parse(f"some warning\n{with_values()}")
    assert [(row.side, row.area, row.vcpus) for row in found.rows] == [
        ("guest", "user", (100,)),
        ("guest", "kernel", (200,)),
        ("host", "user", (300,)),
        ("host", "kernel", (400,)),
    ]
    assert found.notes == ()
    assert others == {
        "cycles of the guest": 500,
        "cycles of the host": 600,
        "context switches of the host": 4193,
    }


def test_what_is_not_offered_is_not_available_with_the_reason() -> None:
    text = with_values().replace("500,,cycles:G", "<not supported>,,cycles:G")
    text = "".join(line for line in text.splitlines(keepends=True) if "context" not in line)
    found, others = perf.parse(text)
    assert set(others) == {"cycles of the host"}
    assert found.notes == (
        "cycles of the guest not available (cycles:G: not supported)",
        "context switches of the host not available (context-switches: not told)",
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [(NOTHING, "instructions:Gu is not supported"), ("", "perf does not tell it")],
)
def test_a_processor_without_counters_is_an_error_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(InfrastructureError, match=why) as caught:
        perf.parse(text)
    assert "perf_event_paranoid" in caught.value.remedy


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with (
        SshServer(Keys.make(tmp_path)) as server,
        Machine(server.address, timeout=DEADLINE_S) as connected,
    ):
        yield connected


@pytest.fixture
def fake_perf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A perf that counts so much a unit; its arguments are in `log`, the units in `units`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script(folder / "perf", FAKE.format(log=tmp_path / "log", units=tmp_path / "units"))
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    (tmp_path / "units").write_text("0")
    return tmp_path


def test_a_block_is_counted(machine: Machine, fake_perf: Path) -> None:
    with perf.counting(machine, [0, 2]) as found:
        assert found.profile.rows == ()
        (fake_perf / "units").write_text("10")
    assert found.profile.total(side="guest") == 2000 + 11_000
    assert found.others["context switches of the host"] == 20
    (argv,) = (fake_perf / "log").read_text().splitlines()
    assert "-a -C 0,2 -e instructions:Gu" in argv


def test_a_host_without_perf(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InfrastructureError, match="perf does not count") as caught:
        perf.counting(machine, [0]).__enter__()
    assert "linux-perf" in caught.value.remedy
    assert "not found" in caught.value.stderr


@pytest.mark.skipif(shutil.which("perf") is None, reason="no perf on this machine")
def test_the_real_perf_counts_or_says_why_it_cannot(machine: Machine) -> None:
    try:
        with perf.counting(machine, [0]) as found:
            pass
    except InfrastructureError as error:
        assert "cannot be counted: instructions:" in error.message  # noqa: PT017 - either is right
    else:
        assert found.profile.total() > 0


@pytest.mark.parametrize("polling", [False, True])
def test_a_users_host_counts_by_perf(machine: Machine, fake_perf: Path, polling: bool) -> None:
    counters = Counters()
    lab = lab_of(counters, nics=[VhostUserNic(packed=False, ring_size=256)] if polling else ())
    host = lab.lab.host
    object.__setattr__(host, "counter", None)
    object.__setattr__(host, "bare", machine)
    counting, refusal = counting_of(lab.lab)
    assert (counting is not None, refusal) == (True, "")
    assert counting is not None
    counting.loaded(None, "guest")

    def run(seconds: float) -> Outcome:
        (fake_perf / "units").write_text(str(int(1000 * seconds)))
        return counters.run(seconds)

    outcome = counting.add(run(10), run)
    found = figures(outcome)
    # The guest's user space is the benchmark's own.
    assert found["instructions_guest"] == pytest.approx(200)
    assert found["instructions_host"] == pytest.approx(50)
    assert "instructions_module" not in found
    kept = profile(outcome)
    # Of the host's switches those on the processors that perf watches, not all of /proc/stat's.
    assert figures(outcome)["switches_host"] == pytest.approx(2)
    assert figures(outcome)["switches_guest"] == pytest.approx(7)
    assert figures(outcome)["exits"] == pytest.approx(2)
    assert "cycles of the guest not available (cycles:G: not counted)" in kept["notes"]
    assert any("its processor is not counted" in note for note in kept["notes"]) == polling
    cpus = "0,2,3" if polling else "0,2,3,1"
    assert all(f"-C {cpus} " in line for line in (fake_perf / "log").read_text().splitlines())
    assert len((fake_perf / "log").read_text().splitlines()) == 1 + 2 * len(SIZES_S)


def test_a_users_host_that_cannot_says_why(machine: Machine, fake_perf: Path) -> None:
    script(fake_perf / "bin" / "perf", f'echo counting; read -r _; cat >&2 <<"END"\n{NOTHING}END')
    lab = lab_of(Counters())
    object.__setattr__(lab.lab.host, "counter", None)
    object.__setattr__(lab.lab.host, "bare", machine)
    counting, refusal = counting_of(lab.lab)
    assert counting is None
    assert "instructions:Gu is not supported" in refusal
    assert "perf_event_paranoid" in refusal
