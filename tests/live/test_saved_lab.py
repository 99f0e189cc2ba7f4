"""Saved labs for real: restored within seconds, several at once, and never a damaged one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from vringlab.campaign.session import SavedLabs
from vringlab.image.build import Image
from vringlab.lab import accel, guest, snapshot
from vringlab.lab.lab import Lab
from vringlab.lab.snapshot import Snapshot, Unusable
from vringlab.settings import settings
from vringlab.workloads import base

pytestmark = pytest.mark.timeout(420)

SPEC = guest.GuestSpec()


@pytest.fixture(scope="module")
def chosen(image: Image) -> accel.Accelerator:
    return accel.choose(image)


@pytest.fixture
def saved(image: Image, chosen: accel.Accelerator) -> Snapshot:
    return snapshot.ensure(image, chosen, SPEC, on_step=print)


def test_restored_labs_differ_in_clock_and_random_numbers_and_are_one_boot(
    image: Image, chosen: accel.Accelerator, saved: Snapshot
) -> None:
    seen = []
    # Both at once: neither sees what the other writes.
    with ExitStack() as stack:
        for number in range(2):
            host, waking = stack.enter_context(snapshot.restored(saved, image, chosen, SPEC))
            running = stack.enter_context(waking())
            for machine in (host.machine, running.machine):
                machine.run(f"test ! -e /run/mark && echo {number} > /run/mark")
            seen.append((host, running))
        for machine in (machine for pair in seen for machine in (pair[0].machine, pair[1].machine)):
            clock = float(machine.run("date +%s.%N").stdout)
            # By how long a command takes; the snapshot's clock is minutes and days off.
            assert abs(clock - time.time()) < 30
        uuids = [
            machine.run("cat /proc/sys/kernel/random/uuid").stdout
            for pair in seen
            for machine in (pair[0].machine, pair[1].machine)
        ]
        assert len(set(uuids)) == 4
        boots = {pair[1].machine.run("cat /proc/sys/kernel/random/boot_id").stdout for pair in seen}
        assert boots == {f"{saved.boot_id}\n"}
        host, running = seen[0]
        lab = Lab(host, running)
        assert lab.pinning_drift() == []
        tool = base.find("vsock-pingpong")
        outcome = tool.run(lab, base.parse_params(tool, {}), 1.0)
        assert any(metric.name == "rtt_mean" for metric in outcome.metrics), outcome.reason


def test_a_restored_lab_counts_instructions_on_their_side(
    image: Image, chosen: accel.Accelerator, saved: Snapshot
) -> None:
    """Though the lab was saved without a counter."""
    with ExitStack() as stack:
        host, waking = stack.enter_context(
            snapshot.restored(saved, image, chosen, SPEC, count_instructions=True)
        )
        running = stack.enter_context(waking())
        if host.counter is None:
            assert "only an emulated one counts" in host.count_refusal
            return
        before = host.counter.read()
        running.machine.run("i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done")
        here = host.counter.read() - before
        in_host, in_guest = (int(counts.sum()) for counts in here.user)
        assert in_guest > 20_000_000
        assert in_host < in_guest / 5


def test_damaged_snapshot_is_recognised_and_a_lab_is_booted_and_saved_again(
    image: Image, chosen: accel.Accelerator, saved: Snapshot
) -> None:
    saved.memory.chmod(0o600)
    with saved.memory.open("r+b") as memory:
        # Somewhere in what the kernel has touched.
        place = os.lseek(memory.fileno(), 64 << 20, os.SEEK_DATA)
        memory.seek(place)
        memory.write(b"damaged")
    with (
        pytest.raises(Unusable, match="its memory is not what was written"),
        snapshot.restored(saved, image, chosen, SPEC),
    ):
        raise AssertionError("it must not be used")
    assert snapshot.find(saved.digest) is None
    again = snapshot.ensure(image, chosen, SPEC, on_step=print)
    assert again.boot_id != saved.boot_id
    with SavedLabs(image, chosen, print)(SPEC, 1) as asleep, asleep.waking() as running:
        assert running.machine.run("uname -r").stdout.strip() == image.release


SAVING = """
from vringlab.image.build import ensure_image
from vringlab.lab import accel, guest, snapshot
image = ensure_image()
snapshot.ensure(image, accel.choose(image), guest.GuestSpec(memory_mib=768), on_step=print)
"""


def qemus(folder: Path) -> list[str]:
    listed = subprocess.run(["pgrep", "-af", str(folder)], capture_output=True, text=True)
    return [line for line in listed.stdout.splitlines() if "qemu" in line]


@pytest.mark.long
def test_kill_9_while_saving_leaves_nothing_half_written_and_nothing_running(
    image: Image, chosen: accel.Accelerator
) -> None:
    spec = guest.GuestSpec(memory_mib=768)
    digest = snapshot.digest_of(image, chosen, spec)
    folder = settings().cache / "snapshots"
    command = [sys.executable, "-c", SAVING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as saving:
        assert saving.stdout is not None
        for line in saving.stdout:
            if "booting the guest" in line:
                break
        saving.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while qemus(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert qemus(folder) == []
    assert snapshot.find(digest) is None
    # Two that save at once: one does, the other waits and finds it.
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: snapshot.ensure(image, chosen, spec), range(2)))
    assert found[0] == found[1]
    assert not list(folder.glob(f".building-{digest}*"))
    for kept in found[:1]:
        snapshot.discard(kept)


@pytest.mark.long
def test_dead_guest_in_a_snapshot_is_told_and_a_lab_is_booted(
    image: Image, saved: Snapshot
) -> None:
    kept = json.loads((saved.folder / "lab.json").read_text())
    # Where its QEMU would listen if it ran.
    kept["left"]["qmp_port"] = 4999
    (saved.folder / "lab.json").write_text(json.dumps(kept))
    from vringlab.campaign.session import open_bare

    said: list[str] = []
    with open_bare("embedded", image, said.append, first=({}, 1)) as (_, session):
        session.boot("b01", {}, 1)
        boot = session.provenance()["boot"]
        assert isinstance(boot, dict)
        assert boot["how"] == "booted"
        assert session.lab.guest.machine.run("echo up").stdout == "up\n"
    assert any("guest is dead, one is booted" in line for line in said)
