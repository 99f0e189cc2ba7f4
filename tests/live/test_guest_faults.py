"""What goes wrong when a guest is made, on a real host: each fault has its own clear error."""

from __future__ import annotations

import pytest

from vringlab.errors import TransientError
from vringlab.lab import embedded, guest
from vringlab.settings import Settings, settings

pytestmark = pytest.mark.timeout(300)


def test_guest_that_never_comes_up_shows_its_console(
    host: embedded.HostMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty = Settings(**{**settings().model_dump(), "boot_timeout": 60.0})
    monkeypatch.setattr("vringlab.lab.guest.settings", lambda: hasty)
    # Without an init the kernel panics, and `panic=-1` ends its QEMU.
    spec = guest.GuestSpec(kernel_args="rdinit=/none")
    with pytest.raises(TransientError) as caught, guest.boot_guest(host, spec):
        pass
    assert "Kernel panic" in str(caught.value)
    left = host.machine.run("pgrep -f '[v]ringlab-guest'", check=False)
    assert left.stdout == "", "no QEMU may stay behind"


def test_taken_cid_and_port_are_passed_over(host: embedded.HostMachine) -> None:
    # Strangers hold the first context id and the first monitor port.
    stranger = host.machine.start(
        "exec qemu-system-x86_64 -accel kvm -machine q35 -nodefaults -display none -S "
        "-device vhost-vsock-pci,guest-cid=3 -qmp tcp:127.0.0.1:4444,server=on,wait=off"
    )
    try:
        host.machine.run(
            # It greets when all its devices are there, and listens before.
            "until busybox nc -w 1 127.0.0.1 4444 < /dev/null | grep -q QMP; do "
            "busybox usleep 20000; done",
            timeout=60,
        )
        assert stranger.running, stranger.stderr
        with guest.boot_guest(host, guest.GuestSpec()) as running:
            assert running.cid == 4
            assert any("127.0.0.1:4445" in word for word in running.qemu_argv)
            assert running.machine.run("echo up").stdout == "up\n"
    finally:
        host.machine.run("pkill -KILL -f guest-cid=3", check=False)
        stranger.close()
