"""Whether KVM serves here: programs that behave as QEMU does on a KVM that does not work."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import cast

import pytest
from tests.fakes.fake_lab import STILL_RUNNING, Answer, FakeMachine
from tests.fakes.processes import DEADLINE_S, alive, script, until

from vringlab.errors import InfrastructureError, TransientError
from vringlab.image.build import Image, ensure_image
from vringlab.lab import accel
from vringlab.transport import local
from vringlab.transport.ssh import Machine

ABORT = "qemu-system-x86_64: ../accel/kvm/kvm-all.c:2970: kvm_cpu_exec: Assertion `ret' failed."


@pytest.fixture
def image(tmp_path: Path) -> Image:
    folder = tmp_path / "image"
    folder.mkdir()
    return Image(folder, "0" * 16, "trixie", "6.12.118", "6.12.118-1", {}, "ssh-ed25519 AAAA")


@pytest.fixture
def device(tmp_path: Path) -> Path:
    path = tmp_path / "kvm"
    path.touch()
    return path


class Qemu:
    """Stands in for QEMU; `rom` and `kernel` are shell text for the two stages of the probe."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self.calls = folder / "calls"
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def behaves(self, *, rom: str, kernel: str = "exit 1", image: Image | None = None) -> None:
        script(
            image.qemu if image is not None else self._folder / accel.QEMU,
            f'echo "$*" >> {self.calls}\ncase "$*" in *-kernel*) {kernel} ;; *) {rom} ;; esac',
        )

    @property
    def called(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def qemu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Qemu:
    folder = tmp_path / "bin"
    folder.mkdir()
    return Qemu(folder, monkeypatch)


ROM_RUNS = f"exit {accel._ROM_STATUS}"


def test_no_device(qemu: Qemu, tmp_path: Path) -> None:
    qemu.behaves(rom=ROM_RUNS)
    assert accel.kvm_fault(None, tmp_path / "none") == f"there is no {tmp_path / 'none'}"
    assert qemu.called == []


def test_a_device_for_others(qemu: Qemu, device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may always; the question is what others are told.
    qemu.behaves(rom=ROM_RUNS)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "group kvm" in accel.kvm_fault(None, device)
    assert qemu.called == []


def test_a_guest_that_hangs_is_found_out_and_ended(
    qemu: Qemu, device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accel, "_ROM_DEADLINE_S", 1.5)
    pids = tmp_path / "pids"
    qemu.behaves(rom=f"echo $$ > {pids}; sleep 1000")
    begin = time.monotonic()
    assert "hung" in accel.kvm_fault(None, device)
    assert time.monotonic() - begin < DEADLINE_S
    assert until(lambda: not alive(int(pids.read_text())))


@pytest.mark.parametrize("end", ["exit 134", "kill -ABRT $$"])
def test_a_guest_that_aborts_is_named_with_qemus_words(qemu: Qemu, device: Path, end: str) -> None:
    qemu.behaves(rom=f'echo warning >&2; echo "{ABORT.replace("`", "")}" >&2; {end}')
    fault = accel.kvm_fault(None, device)
    assert "aborted" in fault
    assert "kvm_cpu_exec: Assertion" in fault
    assert "warning" not in fault


@pytest.mark.parametrize("rom", ["exit 1", "exit 0", "kill -SEGV $$"])
def test_a_guest_that_ends_without_a_word(qemu: Qemu, device: Path, rom: str) -> None:
    qemu.behaves(rom=rom)
    assert accel.kvm_fault(None, device).endswith("no message")


def test_the_firmware_alone_is_asked_without_an_image(qemu: Qemu, device: Path) -> None:
    qemu.behaves(rom=ROM_RUNS)
    assert accel.kvm_fault(None, device) == ""
    assert len(qemu.called) == 1
    assert "-accel kvm" in qemu.called[0]


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        ("echo 'vringlab: probe booted'", ""),
        ("sleep 1000", "a Linux guest hung"),
        ("echo Linux version; echo 'KVM: entry failed' >&2; exit 1", "KVM: entry failed"),
        # `panic=-1` ends QEMU without an error of its own.
        ("echo 'Kernel panic'", "a Linux guest died"),
    ],
    ids=["boots", "hangs", "dies", "panics"],
)
def test_then_a_kernel(
    qemu: Qemu,
    device: Path,
    image: Image,
    monkeypatch: pytest.MonkeyPatch,
    kernel: str,
    fault: str,
) -> None:
    if "hung" in fault:
        monkeypatch.setattr(accel, "_KERNEL_DEADLINE_S", 1.0)
    qemu.behaves(rom=ROM_RUNS, kernel=kernel, image=image)
    found = accel.kvm_fault(image, device)
    assert fault in found
    assert bool(found) == bool(fault)
    assert len(qemu.called) == 2
    assert str(image.kernel) in qemu.called[1]


def test_qemu_that_is_not_installed(
    device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InfrastructureError, match="is not installed") as caught:
        accel.kvm_fault(None, device)
    assert "qemu-system-x86" in caught.value.remedy


# --- the choice ----------------------------------------------------------------------------


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the probes find, by their name."""
    found = {"kvm": "", "nested": ""}
    monkeypatch.setattr(accel, "kvm_fault", lambda *_: found["kvm"])
    monkeypatch.setattr(accel, "_nested_fault", lambda: found["nested"])
    return found


def test_kvm_where_it_works(faults: dict[str, str]) -> None:
    assert faults == {"kvm": "", "nested": ""}
    for wish in ("auto", "kvm"):
        chosen = accel.choose(None, wish)
        assert (chosen.name, chosen.host_kind) == ("kvm", "nested")


@pytest.mark.parametrize("which", ["kvm", "nested"])
def test_emulation_where_it_does_not_with_the_reason(faults: dict[str, str], which: str) -> None:
    faults[which] = "it aborted"
    chosen = accel.choose(None)
    assert (chosen.name, chosen.reason, chosen.host_kind) == ("tcg", "it aborted", "emulated")


def test_kvm_insisted_on_where_it_does_not_work(faults: dict[str, str]) -> None:
    faults["kvm"] = "/dev/kvm exists but a guest of four instructions hung under it"
    with pytest.raises(InfrastructureError, match="four instructions hung") as caught:
        accel.choose(None, "kvm")
    assert "VRINGLAB_ACCEL" in caught.value.remedy


def test_emulation_asked_for_probes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accel, "kvm_fault", lambda *_: pytest.fail("no probe was wanted"))
    assert accel.choose(None, "tcg").name == "tcg"


# --- this machine --------------------------------------------------------------------------


@pytest.mark.timeout(900)  # The image may have to be built.
def test_the_firmware_does_what_the_probe_takes_for_success(tmp_path: Path) -> None:
    # Emulated, since KVM may be what is broken.
    rom = tmp_path / "probe.rom"
    rom.write_bytes(accel._ROM)
    done = local.run(
        [
            *(accel.qemu_of(ensure_image()), "-accel", "tcg", "-nodefaults", "-display", "none"),
            *("-machine", "pc", "-m", "16", "-bios", str(rom), "-no-reboot"),
            *("-device", "isa-debug-exit,iobase=0xf4,iosize=4"),
        ],
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == accel._ROM_STATUS


@pytest.mark.timeout(900)
def test_this_machines_kvm_is_judged_within_seconds() -> None:
    image = ensure_image()
    begin = time.monotonic()
    fault = accel.kvm_fault(image)
    assert time.monotonic() - begin < DEADLINE_S
    assert (accel.choose(image).name == "kvm") == (not fault and not accel._nested_fault())
    if fault:
        assert "/dev/kvm" in fault
        with pytest.raises(InfrastructureError, match="KVM cannot be used"):
            accel.choose(image, "kvm")


# --- KVM of another host -------------------------------------------------------------------


class Host(FakeMachine):
    """A host whose probes end as told."""

    alive = True


@pytest.mark.parametrize(
    ("device", "rom", "kernel", "fault"),
    [
        (1, ("", "", 0), ("", "", 0), "there is no /dev/kvm"),
        (0, ("", "", STILL_RUNNING), ("", "", 0), "four instructions hung"),
        (0, ("", ABORT, 134), ("", "", 0), "a guest aborted under it"),
        (0, ("", "", 33), ("", "", STILL_RUNNING), "a Linux guest hung"),
        (0, ("", "", 33), ("oops", "", 0), "a Linux guest died"),
        (0, ("", "", 33), ("vringlab: probe booted\n", "", 0), ""),
    ],
)
def test_kvm_of_another_host(
    image: Image, device: int, rom: Answer, kernel: Answer, fault: str
) -> None:
    image.initrd.write_bytes(b"initrd")
    host = Host("kvm1", [], {"^test -c": ("", "", device), "-kernel": kernel, "-bios": rom})
    found = accel.host_kvm_fault(cast(Machine, host), image, "vmlinux")
    assert fault in found
    assert bool(found) == bool(fault)
    if not fault:
        (asked,) = host.asked("-kernel")
        assert "/boot/vmlinux-6.12.118" in asked
    assert accel.host_kvm_fault(cast(Machine, host)) == (found if "Linux" not in found else "")


def test_a_host_lost_while_it_is_probed_is_not_one_without_kvm() -> None:
    host = Host("kvm1", [], {"^test -c": ("", "", 0), "-bios": ("", "", STILL_RUNNING)})
    host.alive = False
    with pytest.raises(TransientError):
        accel.host_kvm_fault(cast(Machine, host))
