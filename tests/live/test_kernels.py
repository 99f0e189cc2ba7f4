"""Guests on another kernel than the image's, and arms of several modules, on a real host."""

from __future__ import annotations

from pathlib import Path

import pytest

from vringlab.image.build import Image
from vringlab.kernels.base import BaseKernel
from vringlab.kernels.buildroot import ensure_buildroot
from vringlab.kernels.bundle import base_kernel
from vringlab.kernels.elf import ModuleFile
from vringlab.kernels.module import build_module
from vringlab.kernels.patches import Arm, parse_patch
from vringlab.lab import embedded, guest
from vringlab.lab.lab import Lab
from vringlab.lab.swap import loaded_build_id, running_kernel, swap
from vringlab.workloads import base

# A cold cache fetches a kernel (70 MB) first.
pytestmark = pytest.mark.timeout(900)

COMMON, TRANSPORT = "vmw_vsock_virtio_transport_common", "vmw_vsock_virtio_transport"


def as_shipped(kernel: BaseKernel, module: str, *others: str) -> Arm:
    """An arm of the base kernel's own source."""
    header = f"Title: as shipped\nModule: {module}\nSide: guest\nServes: 6.1 <= version < 8\n"
    patch = parse_patch(f"{header}Diff: none\n\n", Path("shipped.patch"))
    return Arm("several", kernel.name, "shipped", module, "guest", (patch,), others)


def ping(lab: Lab) -> None:
    tool = base.find("vsock-pingpong")
    outcome = tool.run(lab, base.parse_params(tool, {}), 1.0)
    assert any(metric.name == "rtt_mean" for metric in outcome.metrics), outcome.reason


@pytest.mark.parametrize(
    ("spec", "begin"),
    [("debian:6.1", "6.1."), pytest.param("debian:7.x", "7.", marks=pytest.mark.long)],
)
def test_a_guest_boots_another_debian_kernel_and_takes_a_module_built_for_it(
    host: embedded.HostMachine, image: Image, spec: str, begin: str
) -> None:
    kernel, bundle = base_kernel(spec, image, on_step=print)
    assert bundle is not None
    assert kernel.release.startswith(begin)
    own = ModuleFile.read(bundle.vmlinux).note_build_id(".notes")
    root = ensure_buildroot(kernel, on_step=print)
    built = build_module(root, as_shipped(kernel, TRANSPORT), on_step=print)
    with guest.boot_guest(host, guest.GuestSpec(), kernel=bundle) as running:
        machine = running.machine
        assert running_kernel(machine, kernel.release) == own
        # Found where its kernel's modules belong, and loaded with what it needs.
        machine.run("modprobe vhost_vsock && test -c /dev/vhost-vsock")
        ping(Lab(host, running))
        assert loaded_build_id(machine, TRANSPORT) != built.build_id
        swap(running, built)
        assert loaded_build_id(machine, TRANSPORT) == built.build_id
        ping(Lab(host, running))


@pytest.mark.long
def test_modules_that_belong_together_are_swapped_together(
    host: embedded.HostMachine, image: Image
) -> None:
    kernel, _ = base_kernel("debian:6.12", image, on_step=print)
    root = ensure_buildroot(kernel, on_step=print)
    both = build_module(root, as_shipped(kernel, TRANSPORT, COMMON), on_step=print)
    assert [item.module for item in both.loading] == [COMMON, TRANSPORT]
    alone = build_module(root, as_shipped(kernel, COMMON), on_step=print)
    with guest.boot_guest(host, guest.GuestSpec()) as running:
        machine = running.machine
        shipped = loaded_build_id(machine, TRANSPORT)
        swap(running, both)
        for item in both.loading:
            assert loaded_build_id(machine, item.module) == item.build_id
        ping(Lab(host, running))
        # One that another uses: the other goes before it and comes back after it.
        swap(running, alone)
        assert loaded_build_id(machine, COMMON) == alone.build_id
        assert loaded_build_id(machine, TRANSPORT) == shipped
        ping(Lab(host, running))
