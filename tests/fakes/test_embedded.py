"""The embedded host's life with a program in place of QEMU: up, or not, and nothing left."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.fakes.fake_qemu import THREADS
from tests.fakes.processes import alive, script
from tests.fakes.qemu_bench import Bench
from tests.fakes.ssh_server import Keys

from vringlab.errors import InfrastructureError, TransientError
from vringlab.image.build import Image
from vringlab.lab import embedded
from vringlab.lab.accel import Accelerator
from vringlab.lab.embedded import HostMachine, embedded_host
from vringlab.lab.owner import reap

TCG = Accelerator("tcg", "asked for")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def enter(bench: Bench) -> HostMachine:
    """Boot where no boot can succeed."""
    with embedded_host(bench.image, TCG):
        raise AssertionError("it cannot be up")


def test_a_host_is_up_for_the_block_and_gone_after_it(bench: Bench) -> None:
    steps: list[str] = []
    with embedded_host(bench.image, TCG, on_step=steps.append) as host:
        assert host.machine.run("echo up").stdout == "up\n"
        assert host.kind == "emulated"
        assert host.vcpu_threads == THREADS
        assert "host is set up" in host.console.read_text()
        ((pid, port),) = bench.calls
        assert host.machine.address.port == port
        (folder,) = bench.labs.iterdir()
        owner = json.loads((folder / "owner.json").read_text())
        assert owner["qemu_pid"] == pid
        assert alive(pid)
        # Whoever starts next leaves a living lab alone.
        assert reap() == []
    assert bench.nothing_left()
    assert steps == ["booting the embedded host (tcg: asked for)"]


def test_two_hosts_at_once(bench: Bench) -> None:
    with ExitStack() as stack:
        hosts = [stack.enter_context(embedded_host(bench.image, TCG)) for _ in range(2)]
        assert len({host.machine.address.port for host in hosts}) == 2
        assert [host.machine.run("echo up").stdout for host in hosts] == ["up\n"] * 2
    assert bench.nothing_left()


def test_an_error_in_the_block_ends_it_too(bench: Bench) -> None:
    with pytest.raises(ZeroDivisionError), embedded_host(bench.image, TCG):
        raise ZeroDivisionError
    assert bench.nothing_left()


def test_a_qemu_that_ends_shows_its_words_and_the_console(bench: Bench) -> None:
    bench.behaves("dies")
    with pytest.raises(InfrastructureError, match="ended while it booted") as caught:
        enter(bench)
    assert "Cannot allocate memory" in caught.value.stderr
    assert "Kernel panic" in caught.value.stdout
    assert "VRINGLAB_LAB_MEMORY_MIB" in caught.value.remedy
    assert not isinstance(caught.value, TransientError)
    assert bench.nothing_left()


def test_a_host_that_is_never_set_up_shows_its_console(bench: Bench) -> None:
    bench.behaves("silent", boot_timeout=1.5)
    # In shell, which is there at once on a busy machine too.
    script(
        bench.qemu,
        f'echo "$$ 0" >> {bench.folder}/calls; for word; do case $word in '
        'file:*console*) echo "Linux version 6.12" > "${word#file:}";; esac; done; '
        "exec sleep 1000",
    )
    with pytest.raises(TransientError, match=r"was not up within 1\.5 s") as caught:
        enter(bench)
    assert "Linux version" in caught.value.stdout
    assert "VRINGLAB_BOOT_TIMEOUT" in caught.value.remedy
    assert bench.nothing_left()


def test_a_port_taken_meanwhile_is_another_attempt(bench: Bench) -> None:
    bench.behaves("port-taken 2")
    with embedded_host(bench.image, TCG) as host:
        assert host.machine.run("echo up").stdout == "up\n"
    assert len(bench.calls) == 3
    assert bench.nothing_left()


def test_ports_that_are_always_taken_are_an_error_in_the_end(bench: Bench) -> None:
    bench.behaves("port-taken 1000")
    with pytest.raises(TransientError, match="ended while it booted") as caught:
        enter(bench)
    assert "host forwarding" in caught.value.stderr
    assert 1 < len(bench.calls) < 20
    assert bench.nothing_left()


def test_an_image_that_lost_its_qemu(bench: Bench) -> None:
    bench.qemu.unlink()
    with pytest.raises(InfrastructureError, match="is not installed") as caught:
        enter(bench)
    assert "vringlab build" in caught.value.remedy
    assert bench.nothing_left()


def test_another_host_key_than_the_images(bench: Bench) -> None:
    other = Keys.make(bench.image.folder).stranger.public
    image = Image(**{**vars(bench.image), "host_key": other})
    with (
        pytest.raises(InfrastructureError, match="another host key"),
        embedded_host(image, TCG),
    ):
        raise AssertionError("it is not our host")
    assert bench.nothing_left()


def test_what_is_emulated_is_not_asked_of_kvm(bench: Bench) -> None:
    command = {
        name: " ".join(
            embedded.qemu_argv(bench.image, Accelerator(name, ""), 2222, Path("/console"), 9)
        )
        for name in ("tcg", "kvm")
    }
    assert "-accel kvm -cpu host " in command["kvm"]
    assert "-accel tcg" in command["tcg"]
    assert "mitigations=off" not in command["kvm"]
    for text in command.values():
        # Reached from this machine alone, and reaching nobody.
        assert "restrict=on,hostfwd=tcp:127.0.0.1:2222-:22" in text
        assert "readonly=on" in text
