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


# --- instruction counter ---------------------------------------------------------------------


def with_plugin(bench: Bench) -> Image:
    bench.image.counter.write_bytes(b"plugin")
    return bench.image


def test_without_being_asked_for_there_is_no_counter(bench: Bench) -> None:
    with embedded_host(with_plugin(bench), TCG) as host:
        assert (host.counter, host.count_refusal) == (None, "not asked for")
        assert "-plugin" not in host.qemu_argv
        assert "plugin" not in " ".join(
            embedded.qemu_argv(bench.image, TCG, 2222, Path("/console"), 9)
        )


def test_a_host_that_counts_is_read_as_often_as_one_likes(bench: Bench) -> None:
    with embedded_host(with_plugin(bench), TCG, count_instructions=True) as host:
        assert host.count_refusal == ""
        assert host.counter is not None
        before = host.counter.read()
        assert (host.counter.read() - before).total() == (2,) * len(THREADS)
    assert bench.nothing_left()
    # The file is closed with the block.
    with pytest.raises(InfrastructureError, match="cannot be read"):
        host.counter.read()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("no-plugins", "plugin interface not enabled in this build"),
        ("old-plugins", "plugin requires API version 3"),
    ],
)
def test_a_qemu_that_does_not_take_the_plugin_is_started_without(
    bench: Bench, how: str, words: str
) -> None:
    bench.behaves(how)
    steps: list[str] = []
    with embedded_host(
        with_plugin(bench), TCG, count_instructions=True, on_step=steps.append
    ) as host:
        assert host.machine.run("echo up").stdout == "up\n"
        assert host.counter is None
        assert words in host.count_refusal
        assert steps[-1] == f"{host.count_refusal}; booting without it"
    assert len(bench.calls) == 2
    assert bench.nothing_left()


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("8", "it counts 8 processors, the host has 4"),
        ("nonsense", "is not of version 1"),
        ("nothing", "it hung up"),
    ],
)
def test_a_counter_that_cannot_be_read_is_none(bench: Bench, how: str, why: str) -> None:
    bench.behaves(f"counts {how}")
    with embedded_host(with_plugin(bench), TCG, count_instructions=True) as host:
        assert host.machine.run("echo up").stdout == "up\n"
        assert host.counter is None
        assert why in host.count_refusal
    assert len(bench.calls) == 1


def test_a_host_that_cannot_count_says_why(bench: Bench) -> None:
    with embedded_host(bench.image, TCG, count_instructions=True) as host:
        assert host.count_refusal == "the image has no instruction counter"
    kvm = Accelerator("kvm", "a probe guest booted")
    with embedded_host(with_plugin(bench), kvm, count_instructions=True) as host:
        assert "only an emulated one counts" in host.count_refusal
        assert "-plugin" not in host.qemu_argv


def test_a_qemu_that_ends_for_another_reason_is_not_tried_without(bench: Bench) -> None:
    bench.behaves("dies")
    with (
        pytest.raises(InfrastructureError, match="ended while it booted"),
        embedded_host(with_plugin(bench), TCG, count_instructions=True),
    ):
        raise AssertionError("it cannot be up")
    assert len(bench.calls) == 1
