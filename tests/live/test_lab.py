"""The embedded host with a guest, for real: what it offers, what it refuses, what it leaves."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from vringlab.campaign import experiment as experiments
from vringlab.campaign import paths
from vringlab.campaign.session import as_probes, build_arms
from vringlab.errors import InfrastructureError, TransientError, UserError
from vringlab.image.build import Image
from vringlab.kernels.module import BuiltModule
from vringlab.lab import accel, embedded, guest, owner, pinning, probe, swap
from vringlab.lab.lab import Lab
from vringlab.settings import settings
from vringlab.transport.ssh import Address, Machine
from vringlab.workloads import base

pytestmark = pytest.mark.timeout(420)

SPLIT, PACKED = (guest.VhostUserNic(packed=packed, ring_size=256) for packed in (False, True))


@pytest.fixture(scope="module")
def lab(image: Image) -> Iterator[Lab]:
    with ExitStack() as stack:
        host = stack.enter_context(embedded.embedded_host(image, accel.choose(image)))
        guest.prepare_host(host)
        running = stack.enter_context(guest.boot_guest(host, guest.GuestSpec(nics=(SPLIT, PACKED))))
        yield Lab(host, running)


@pytest.fixture(scope="module")
def arms(image: Image) -> dict[str, BuiltModule]:
    """The arms of both experiments by name."""
    built: dict[str, BuiltModule] = {}
    for name in ("vsock-direct-enqueue", "virtio-net-napi-tx"):
        chosen = experiments.load(name)
        built |= build_arms(chosen, chosen.arm_names, image, lambda _: None)
    return built


def test_kvm_is_used_only_where_a_guest_boots_and_found_out_in_seconds(image: Image) -> None:
    fault = accel.kvm_fault(image)
    chosen = accel.choose(image)
    assert (chosen.name == "kvm") == (not fault and not accel._nested_fault())
    if fault:
        assert "/dev/kvm" in fault
        with pytest.raises(InfrastructureError, match="KVM cannot be used"):
            accel.choose(image, "kvm")


def test_host_has_what_kvm_guests_need(lab: Lab) -> None:
    machine = lab.host.machine
    machine.run("test -c /dev/kvm && test -c /dev/vhost-vsock && test -c /dev/vhost-net")
    assert machine.run(["uname", "-r"]).stdout.strip() == lab.host.image.release
    # fio with vsock, testpmd, netperf and bpftrace are in the image.
    tools = "fio dpdk-testpmd netperf netserver bpftrace ethtool vringlab-pingpong"
    assert machine.run(f"for t in {tools}; do command -v $t; done").stdout.count("\n") == len(
        tools.split()
    )
    version = machine.run(["fio", "--version"]).stdout.strip().removeprefix("fio-")
    assert tuple(map(int, version.split("."))) >= (3, 37)


def test_host_answers_to_its_pinned_key_alone(lab: Lab) -> None:
    address = lab.host.machine.address
    assert isinstance(address, Address)
    # Another valid key: the one that the client has for itself.
    other = " ".join((lab.host.image.folder / "id_ed25519.pub").read_text().split()[:2])
    with pytest.raises(InfrastructureError, match="another host key"):
        Machine(dataclasses.replace(address, host_key=other), timeout=60)


def test_ten_mebibytes_on_both_streams_at_once(lab: Lab) -> None:
    size = 10 * 2**20
    done = lab.host.machine.run(
        f"head -c {size} /dev/zero | tr '\\0' o & head -c {size} /dev/zero | tr '\\0' e >&2; wait",
        timeout=120,
    )
    assert (len(done.stdout), len(done.stderr)) == (size, size)
    assert set(done.stdout) == {"o"}
    assert set(done.stderr) == {"e"}


def test_silent_command_ends_at_its_deadline_on_the_far_side_too(lab: Lab) -> None:
    with pytest.raises(TransientError, match="did not end within"):
        lab.guest.machine.run("exec sleep 4321", timeout=2)
    done = lab.guest.machine.run("pgrep -f '[s]leep 4321'", check=False)
    assert done.stdout == ""


def test_guest_runs_under_kvm_with_its_devices(lab: Lab) -> None:
    machine = lab.guest.machine
    assert machine.run(["nproc"]).stdout.strip() == "2"
    assert "hypervisor" in machine.run("grep -m1 flags /proc/cpuinfo").stdout
    macs = machine.run("cat /sys/class/net/*/address").stdout.split()
    assert {guest.nic_mac(0), guest.nic_mac(1)} < set(macs)
    assert lab.guest.cid >= 3
    assert lab.guest.monitor.execute("query-status")["status"] == "running"
    assert lab.guest.monitor.vcpu_threads() == list(lab.guest.threads)[:2]


def test_threads_are_pinned_and_drift_is_seen(lab: Lab) -> None:
    assert lab.guest.vhost_threads, "vhost workers of the management interface and of vsock"
    assert lab.pinning_drift() == []
    moved = lab.guest.vhost_threads[0]
    pinning.pin(lab.host.machine, {moved: 3})
    try:
        assert [drift.split()[1] for drift in lab.pinning_drift()] == [str(moved)]
    finally:
        pinning.pin(lab.host.machine, {moved: lab.guest.threads[moved]})
    assert lab.pinning_drift() == []


@pytest.mark.parametrize("arm", ["queued", "rfc-v1", "direct", "stock", "rfc", "merged"])
def test_arm_is_swapped_in_and_its_build_id_seen(
    lab: Lab, arms: dict[str, BuiltModule], arm: str
) -> None:
    built = arms[arm]
    swap.swap(lab.guest, built)
    assert swap.loaded_build_id(lab.guest.machine, built.module) == built.build_id
    # The management interface is virtio-net too: the very connection came back.
    assert lab.guest.machine.run("echo back").stdout == "back\n"


def test_swap_that_did_not_take_is_an_error(lab: Lab, arms: dict[str, BuiltModule]) -> None:
    wrong = dataclasses.replace(arms["direct"], build_id="0" * 40)
    with pytest.raises(InfrastructureError, match="did not take"):
        swap.swap(lab.guest, wrong)


def test_module_that_the_kernel_refuses_is_an_error_and_the_guest_goes_on(
    lab: Lab, arms: dict[str, BuiltModule], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.ko"
    broken.write_bytes(arms["direct"].path.read_bytes()[:4000])
    with pytest.raises(InfrastructureError, match="could not be loaded: insmod"):
        swap.swap(lab.guest, dataclasses.replace(arms["direct"], path=broken, build_id="1" * 40))
    swap.swap(lab.guest, arms["direct"])


@pytest.mark.parametrize("direction", ["h-g-h", "g-h-g"])
def test_our_ping_pong_is_valid_where_fio_is_not(
    lab: Lab, arms: dict[str, BuiltModule], direction: str
) -> None:
    swap.swap(lab.guest, arms["direct"])
    tool = base.find("vsock-pingpong")
    point = base.parse_params(tool, {"payload": 4096, "direction": direction})
    outcome = tool.run(lab, point, 2.0)
    assert outcome.valid, outcome.reason
    figures = {metric.name: metric.value for metric in outcome.metrics}
    assert 0 < figures["rtt_p1"] <= figures["rtt_p50"] <= figures["rtt_p99"]
    assert sum(count for _, count in outcome.histograms[0].bins) > 0


@pytest.mark.parametrize("tool", ["bpftrace", "tracefs"])
def test_path_is_seen_by_either_tool(lab: Lab, arms: dict[str, BuiltModule], tool: str) -> None:
    swap.swap(lab.guest, arms["direct"])
    found = experiments.load("vsock-direct-enqueue").counted
    assert found is not None
    inlined = probe.Probe("inlined", "virtio_transport_can_merge", found.counters[0].module)
    ping = base.find("vsock-pingpong")
    point = base.parse_params(ping, {"direction": "g-h-g"})
    away = "/usr/bin/bpftrace"
    if tool == "tracefs":
        lab.guest.machine.run(["mv", away, f"{away}.away"])
    try:
        with probe.counting(lab.guest.machine, [*as_probes(found), inlined]) as tally:
            assert tally.tool == tool
            # What has no symbol is said, and the rest is counted.
            assert list(tally.missing) == ["inlined"]
            tally.take()
            ping.run(lab, point, 1.0)
            counts = tally.take().values
    finally:
        if tool == "tracefs":
            lab.guest.machine.run(["mv", f"{away}.away", away])
    seen = paths.judge(found, "direct", "vsock-pingpong", {}, counts)
    assert seen.exercised is True
    assert counts["offered"] > 20
    # One message at a time finds the queue empty.
    assert seen.shares["direct-share"] > 90
    left = lab.guest.machine.run("cat /sys/kernel/tracing/kprobe_events; pidof bpftrace || true")
    assert left.stdout == ""


def test_packed_and_split_rings_are_negotiated(lab: Lab) -> None:
    tool = base.find("pktgen-testpmd")
    for ring in ("packed", "split"):
        point = base.parse_params(tool, {"ring": ring, "irq": "other"})
        outcome = tool.run(lab, point, 3.0)
        assert outcome.context["ring_packed"] == (ring == "packed")
        assert outcome.valid, outcome.reason


def test_unshared_memory_is_refused_before_boot() -> None:
    with pytest.raises(UserError, match="shared guest memory"):
        guest.GuestSpec(nics=(SPLIT,), shared_memory=False)


_HOLDER = """
import sys, time
from vringlab.image.build import ensure_image
from vringlab.lab import accel, embedded
image = ensure_image()
with embedded.embedded_host(image, accel.choose(image)) as host:
    print(host.qemu_argv[0], flush=True)
    time.sleep(600)
"""


def _qemus(owner: int) -> list[int]:
    found = subprocess.run(
        ["pgrep", "-P", str(owner), "-f", "qemu-system"],
        capture_output=True,
        text=True,
        check=False,
    )
    return [int(pid) for pid in found.stdout.split()]


def test_nothing_outlives_kill_minus_nine_of_the_owner() -> None:
    before = set((settings().cache / "labs").glob("lab-*"))
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert "qemu" in holder.stdout.readline()
        (qemu,) = _qemus(holder.pid)
        holder.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{qemu}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{qemu}").exists(), "QEMU must end with its owner"
    left = set((settings().cache / "labs").glob("lab-*")) - before
    assert left, "the dead owner's folder is still there for the reaper"
    assert left <= set(owner.reap())
    assert not any(folder.exists() for folder in left)
