"""A real lab that is kept: other processes get in, and it ends without a trace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vringlab import collect
from vringlab.campaign import kept
from vringlab.image.build import ensure_image
from vringlab.settings import settings

pytestmark = pytest.mark.timeout(420)

VRINGLAB = [sys.executable, "-m", "vringlab"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The real cache, but with labs of this test's own: the user's kept lab is not ours to end."""
    real, own = settings().cache, tmp_path_factory.mktemp("cache")
    for entry in real.iterdir():
        if entry.name != "labs":
            (own / entry.name).symlink_to(entry)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VRINGLAB_CACHE", str(own))
        settings.cache_clear()
        yield own
        kept.down()
    settings.cache_clear()


def vringlab(*arguments: str, timeout: float = 400) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*VRINGLAB, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture(scope="module")
def lab(cache: Path) -> str:
    """What `up` said; the lab is up."""
    assert not list(cache.glob("labs/lab-*"))
    done = vringlab("up", "--for", "10m")
    assert done.returncode == 0, done.stderr
    return done.stdout


def until(condition: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_up_says_how_to_get_in_and_a_second_one_that_it_is_up(lab: str) -> None:
    assert lab.startswith("up: a KVM host (embedded, ")
    assert "vringlab shell" in lab
    again = vringlab("up")
    assert again.returncode == 0
    assert again.stdout.startswith("already up since")
    other = vringlab("up", "-e", "virtio-net-napi-tx")
    assert other.returncode == 2
    assert "vringlab down" in other.stderr


@pytest.mark.usefixtures("lab")
def test_a_command_runs_in_the_guest_or_on_the_host_and_its_status_is_ours() -> None:
    release = ensure_image().release
    guest = vringlab("shell", "--", "uname", "-r")
    assert (guest.stdout, guest.returncode) == (f"{release}\n", 0), guest.stderr
    host = vringlab("shell", "host", "--", "test -c /dev/kvm && exit 5")
    assert host.returncode == 5, host.stderr
    # Two machines: only the host has another under it.
    assert vringlab("shell", "guest", "--", "test -c /dev/vhost-vsock").returncode == 1
    words = vringlab("shell", "guest", "--", "printf", "%s|", "a b", "$HOME")
    assert words.stdout == "a b|$HOME|"


@pytest.mark.usefixtures("lab")
def test_a_notebook_uses_it_and_leaves_it_up(capsys: pytest.CaptureFixture[str]) -> None:
    with collect.open_lab("kept") as opened:
        opened.guest.run("uname -r")
        opened.load("direct")
        opened.load("queued")
    text = capsys.readouterr().out
    assert text.count("is loaded") == 2
    assert "[exit status" not in text
    assert kept.current() is not None


@pytest.mark.usefixtures("lab")
def test_down_leaves_nothing(cache: Path) -> None:
    keeper = kept.get().pid
    (record,) = [json.loads(path.read_text()) for path in cache.glob("labs/lab-*/owner.json")]
    assert record["pid"] == keeper
    done = vringlab("down")
    assert (done.stdout, done.returncode) == ("the kept lab has ended\n", 0), done.stderr
    for pid in (keeper, record["qemu_pid"]):
        assert until(lambda pid=pid: not Path(f"/proc/{pid}").exists())  # type: ignore[misc]
    assert [path.name for path in (cache / "labs").iterdir()] == ["kept.lock"]
    assert vringlab("shell", "--", "true").returncode == 2


def test_kill_minus_nine_of_the_keeper_ends_the_lab(cache: Path) -> None:
    with subprocess.Popen(
        [*VRINGLAB, "up"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        assert until(lambda: bool(list(cache.glob("labs/lab-*/owner.json"))))
        (path,) = cache.glob("labs/lab-*/owner.json")
        record = json.loads(path.read_text())
        os.kill(record["pid"], signal.SIGKILL)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "the lab's keeper ended" in stderr
    assert until(lambda: not Path(f"/proc/{record['qemu_pid']}").exists())
    assert not list(cache.glob("labs/lab-*"))
    assert not kept.folder().exists()
