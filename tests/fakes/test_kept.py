"""A lab that is kept: one at a time, found by other processes, and gone without a trace."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.fakes import fake_keeper
from tests.fakes.fake_campaign import plan
from tests.fakes.processes import alive, script, until
from typer.testing import CliRunner

from vringlab import cli_lab, collect
from vringlab.analysis.frames import load_run
from vringlab.campaign import experiment as experiments
from vringlab.campaign import keeper, kept
from vringlab.campaign.budget import Budget
from vringlab.campaign.fake import find
from vringlab.campaign.hosts import from_urls
from vringlab.campaign.kept import Kept, Line
from vringlab.campaign.runner import execute
from vringlab.campaign.store import Store
from vringlab.cli import app
from vringlab.errors import HostLost, InfrastructureError, TransientError, UserError
from vringlab.settings import settings
from vringlab.transport.ssh import Address

VSOCK = "vsock-direct-enqueue"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of this test's own, under a path that no socket's name would fit; no lab is left."""
    place = tmp_path / ("a cache with blanks and a name that goes on " * 4)
    place.mkdir(parents=True)
    monkeypatch.setenv("VRINGLAB_CACHE", str(place))
    for name, value in fake_keeper.environment().items():
        monkeypatch.setenv(name, value)
    settings.cache_clear()
    yield place
    kept.down()
    monkeypatch.undo()
    settings.cache_clear()


def up(idle_s: float = 600, told: list[str] | None = None) -> tuple[Kept, bool]:
    say = (told if told is not None else []).append
    return kept.up(VSOCK, "embedded", idle_s, say, fake_keeper.command())


def pids(cache: Path) -> list[int]:
    return [int(pid) for pid in (cache / "pids").read_text().split()]


def gone(cache: Path) -> bool:
    return until(lambda: not any(alive(pid) for pid in pids(cache)))


def test_a_lab_stays_up_and_answers_any_process(cache: Path) -> None:
    told: list[str] = []
    lab, made = up(told=told)
    assert made
    assert told == [f"booting embedded for {VSOCK}"]
    assert (lab.host_kind, lab.experiment) == ("simulated", VSOCK)
    assert lab == kept.get()
    assert lab.pid == pids(cache)[0] != os.getpid()
    # Its folder is for nobody else's eyes: whoever can ask it is root on both machines.
    assert stat.S_IMODE(kept.folder().stat().st_mode) == 0o700
    with Line.open() as line:
        done = line.run("guest", "uname -r", 5.0)
    assert (done.stdout, done.returncode) == ("guest: uname -r within 5 s\n", 3)
    assert kept.down()
    assert gone(cache)
    assert (cache / "given-back").exists()
    assert not kept.folder().exists()
    assert not kept.down()


def test_a_second_up_says_that_one_is_up(cache: Path) -> None:
    first, _ = up()
    again, made = up()
    assert (again, made) == (first, False)
    with pytest.raises(UserError, match=f"a lab for {VSOCK} on embedded is up") as caught:
        kept.up("virtio-net-napi-tx", "embedded", 600, print, fake_keeper.command())
    assert "vringlab down" in caught.value.remedy
    assert alive(pids(cache)[0])


def test_two_that_come_at_once_make_one_lab(cache: Path) -> None:
    (cache / "act").write_text("")
    made, refused = [], []

    def come() -> None:
        try:
            made.append(up()[1])
        except TransientError as error:
            refused.append(error)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: come(), range(4)))
    assert made.count(True) == 1
    assert len(made) + len(refused) == 4


def test_what_keeps_a_lab_from_coming_up_is_told_as_it_is(cache: Path) -> None:
    (cache / "act").write_text("refuse")
    with pytest.raises(UserError, match="no such host") as caught:
        up()
    assert caught.value.remedy == "name another"
    assert gone(cache)
    assert not kept.folder().exists()
    (cache / "act").write_text("die")
    with pytest.raises(InfrastructureError, match="keeper ended while it booted") as died:
        up()
    assert "a fault in the keeper" in died.value.stderr
    assert died.value.returncode == 3
    assert gone(cache)
    assert not kept.folder().exists()
    with pytest.raises(UserError, match=r"experiment"):
        kept.up("nothing", "embedded", 60, print, fake_keeper.command())


def test_after_kill_minus_nine_nothing_runs_and_the_next_up_cleans_up(cache: Path) -> None:
    lab, _ = up()
    os.kill(lab.pid, signal.SIGKILL)
    assert gone(cache)
    assert kept.folder().exists()
    assert kept.current() is None
    with pytest.raises(UserError, match="no lab is up"):
        Line.open()
    told: list[str] = []
    again, made = up(told=told)
    assert made
    assert again.pid != lab.pid
    assert "ended without `vringlab down`; it is cleaned up" in told[0]


def test_down_after_kill_minus_nine_leaves_nothing(cache: Path) -> None:
    lab, _ = up()
    os.kill(lab.pid, signal.SIGKILL)
    assert gone(cache)
    assert kept.down()
    assert not kept.folder().exists()


def test_another_process_with_the_keepers_number_is_left_alone() -> None:
    lab, _ = up()
    state = kept.folder() / kept.STATE
    text = state.read_text()
    with subprocess.Popen(["sleep", "60"]) as stranger:
        state.write_text(text.replace(str(lab.pid), str(stranger.pid)))
        assert kept.current() is None
        with pytest.raises(TransientError):
            kept.down()
        assert alive(stranger.pid)
        stranger.kill()
    state.write_text(text)
    assert kept.down()


def test_ctrl_c_while_it_boots_ends_it(cache: Path) -> None:
    (cache / "act").write_text("stall")
    starting = threading.Event()

    def interrupt(_: str) -> None:
        starting.set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept.up(VSOCK, "embedded", 600, interrupt, fake_keeper.command())
    assert starting.is_set()
    assert until(lambda: not (cache / "pids").exists() or gone(cache))
    assert not kept.folder().exists()


def test_a_lab_that_nobody_uses_ends(cache: Path) -> None:
    up(idle_s=0.5)
    with Line.open():
        time.sleep(1.0)
        assert kept.current() is not None, "it is used"
    assert until(lambda: kept.current() is None)
    assert gone(cache)
    assert (cache / "given-back").exists()


def test_a_lab_that_is_lost_ends(cache: Path) -> None:
    (cache / "act").write_text("lose")
    up()
    assert until(lambda: kept.current() is None)
    assert gone(cache)
    assert until(lambda: not kept.folder().exists())


def test_errors_of_the_lab_come_as_they_are() -> None:
    up()
    with Line.open() as line:
        with pytest.raises(TransientError, match="the connection was lost") as caught:
            line.run("host", "lost", 1.0)
        assert caught.value.remedy == "look at it"
        with pytest.raises(UserError, match="has no 'provision'"):
            line.ask("provision")
        assert line.run("host", "true", 1.0).returncode == 3


def test_whoever_waits_for_a_lab_that_ends_hears_of_it() -> None:
    lab, _ = up()
    with Line.open() as line, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(line.run, "guest", "sleep 30", 60.0)
        time.sleep(0.2)
        os.kill(lab.pid, signal.SIGKILL)
        with pytest.raises(HostLost, match="the kept lab ended"):
            waiting.result(timeout=20)


# What uses it


def test_a_run_is_measured_on_it_and_leaves_it_up(tmp_path: Path) -> None:
    up()
    made = plan(boots=2, blocks=1)
    chosen = experiments.load(VSOCK)
    with (
        Store.create(made, tmp_path / "runs") as store,
        kept.session(chosen, chosen.arm_names) as session,
    ):
        result = execute(store, lambda: nullcontext(session), find=find)
        assert result.status == "complete"
        # Nobody else loads arms meanwhile; looking around is allowed.
        with Line.open() as other:
            with pytest.raises(UserError, match="another process measures on the kept lab"):
                other.adopt(chosen, chosen.arm_names)
            assert other.run("guest", "id", 1.0).returncode == 3
    run = load_run(result.path)
    assert set(run.samples["host"]) == {"kept"}
    assert run.provenance["kept_lab"]
    with Line.open() as line:
        line.adopt(chosen, chosen.arm_names)


def test_a_kept_lab_is_a_host_of_runs_only_while_it_is_up() -> None:
    _, made = collect.plan_run(VSOCK, "smoke")
    with pytest.raises(UserError, match="no lab is up"):
        collect.choose_hosts(from_urls(["kept"]), made)
    up()
    (host,) = collect.choose_hosts(from_urls(["kept"]), made)
    assert (host.name, host.url) == ("kept", "kept")


def test_a_notebook_looks_around_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="no lab is up"):
        collect.open_lab("kept")
    up()
    lab = collect.open_lab("kept")
    assert "close() leaves it up" in repr(lab)
    lab.guest.run("uname -r")
    lab.load("direct")
    lab.host.run("id")
    text = capsys.readouterr().out
    assert "guest# uname -r\nguest: uname -r within 120 s\n[exit status 3]\n" in text
    assert "direct: vmw_vsock_virtio_transport_common replaced" in text or "replaced in" in text
    lab.close()
    assert kept.current() is not None
    with collect.open_lab("kept") as again:
        again.load("queued")


# Getting in


def test_ssh_is_told_which_keys_to_expect(cache: Path) -> None:
    lab, _ = up()
    for machine, port, alias in (("host", "2022", "host"), ("guest", "22", "guest")):
        text = subprocess.run(
            ["ssh", "-G", *lab.ssh[machine]], capture_output=True, text=True, check=True
        ).stdout
        told = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
        assert told["port"] == port
        assert told["user"] == "root"
        assert told["hostkeyalias"] == f"vringlab-{alias}"
        assert told["stricthostkeychecking"] in ("true", "yes")
        assert told["userknownhostsfile"] == str(kept.folder() / kept.KNOWN_HOSTS)
        assert told["identityfile"] == str(cache / "a key")
    assert told["proxycommand"].endswith("-W %h:%p host")
    known = (kept.folder() / kept.KNOWN_HOSTS).read_text()
    assert known.count(fake_keeper.HOST_KEY) == 2


def test_a_users_own_machine_is_reached_as_ssh_always_reaches_it() -> None:
    kept.folder().mkdir(parents=True)
    guest = Address("guest", "192.168.77.2", 22, "root", Path("/key"), fake_keeper.HOST_KEY)
    found = keeper.write_ssh({"host": "root@kvm1:2222", "guest": guest})
    assert found["host"] == ["-p", "2222", "root@kvm1"]
    config = (kept.folder() / kept.SSH_CONFIG).read_text()
    assert "ProxyCommand ssh -p 2222 -W %h:%p root@kvm1" in config
    assert keeper.write_ssh({"host": "kvm1", "guest": guest})["host"] == ["kvm1"]


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An `ssh` that writes down its arguments, one a line, and ends with status 7."""
    folder = tmp_path / "bin"
    said = tmp_path / "said"
    script(folder / "ssh", f'for each in "$@"; do echo "$each"; done > "{said}"; exit 7')
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return said


@pytest.mark.parametrize(
    ("arguments", "machine", "words"),
    [
        ([], "guest", ["-t"]),
        (["host"], "host", ["-t"]),
        (["--", "uname", "-r"], "guest", ["--", "uname -r"]),
        (["guest", "--", "dmesg | tail"], "guest", ["--", "dmesg | tail"]),
        (["host", "--", "ls", "a b"], "host", ["--", "ls 'a b'"]),
        (["--", "ls", "--help"], "guest", ["--", "ls --help"]),
    ],
)
def test_shell_runs_ssh_and_ends_as_it_ends(
    fake_ssh: Path, arguments: list[str], machine: str, words: list[str]
) -> None:
    lab, _ = up()
    done = CliRunner().invoke(app, ["shell", *arguments])
    assert done.exit_code == 7
    said = fake_ssh.read_text().splitlines()
    way = list(lab.ssh[machine])
    assert said == (["-t", *way] if words == ["-t"] else [*way, *words])


def test_shell_without_a_lab_is_a_user_error() -> None:
    done = CliRunner().invoke(app, ["shell", "--", "true"])
    assert isinstance(done.exception, UserError)


@pytest.fixture
def fakes_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    real = kept.up

    def fake(experiment: str, host: str, idle_s: float, on_step: kept.OnStep) -> tuple[Kept, bool]:
        return real(experiment, host, idle_s, on_step, fake_keeper.command())

    monkeypatch.setattr(kept, "up", fake)


@pytest.mark.usefixtures("fakes_keep")
def test_up_may_run_a_command_and_ends_as_it_ends() -> None:
    done = CliRunner().invoke(app, ["up", "--for", "30m", "--", "ls", "-l", "a b"])
    assert done.exit_code == 3
    assert done.stdout == "guest: ls -l 'a b' within 3600 s\n"
    assert "booting embedded" in done.stderr
    assert kept.get().idle_s == 1800
    again = CliRunner().invoke(app, ["up", "--", "dmesg | tail"])
    assert again.stdout == "guest: dmesg | tail within 3600 s\n"
    lost = CliRunner().invoke(app, ["up", "--", "lost"])
    assert isinstance(lost.exception, TransientError)


@pytest.mark.usefixtures("fakes_keep")
def test_commands_say_how_to_get_in() -> None:
    done = CliRunner().invoke(app, ["up", "--for", "30m"])
    assert done.exit_code == 0, done.exception
    for word in ("vringlab shell", 'open_lab("kept")', "--host kept", "vringlab down", "30 m"):
        assert word in done.stdout
    assert kept.get().idle_s == 1800
    again = CliRunner().invoke(app, ["up"])
    assert again.exit_code == 0
    assert "already up since" in again.stdout
    assert "has ended" in CliRunner().invoke(app, ["down"]).stdout
    assert "no lab was up" in CliRunner().invoke(app, ["down"]).stdout


@pytest.mark.parametrize(("text", "value"), [("90s", 90), ("30m", 1800), ("4h", 14400)])
def test_lengths_of_time(text: str, value: float) -> None:
    assert cli_lab.seconds(text) == value


@pytest.mark.parametrize("text", ["", "4", "h", "0h", "-1h", "4 weeks"])
def test_what_is_no_length_of_time(text: str) -> None:
    with pytest.raises(UserError, match="is no length of time"):
        cli_lab.seconds(text)


# The real lab, on machines that answer as told


def test_arms_are_built_when_they_are_asked_for_and_a_lab_without_a_guest_is_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[tuple[object, ...]] = []
    monkeypatch.setattr(keeper, "prepare_arms", lambda *args: args[1])

    class Session:
        """Stands for a session whose arms each have a guest of their own."""

        host, host_kind, sees_paths = "embedded", "emulated", False
        time_budget = Budget()

        def take_arms(self, *arms: object) -> None:
            taken.append(arms)

        def boot(self, *_: object) -> None:
            taken.append(("boot",))

        def provenance(self) -> dict[str, object]:
            return {"tools": {}}

        @property
        def lab(self) -> object:
            raise UserError("there is no guest yet")

    lease = SimpleNamespace(host=SimpleNamespace(swap_refusal="", machine=SimpleNamespace()))
    lab = keeper.KeptLab(cast(Any, lease), cast(Any, Session()), cast(Any, None), print)
    chosen = experiments.load(VSOCK)
    facts = lab.adopt(chosen, ["direct"], "reboot", None)
    assert (facts.host_kind, lab.provenance()) == ("emulated", {"tools": {}})
    lab.boot("b01", {})
    assert taken == [("guest", ("direct",), "reboot", None), ("boot",)]
    lease.host.swap_refusal = "its modules are its own"
    lease.host.machine.name = "kvm1"
    with pytest.raises(UserError, match="its modules are its own"):
        lab.adopt(experiments.load("vhost-net-rx-poll"), ["shipped"], "swap", None)
