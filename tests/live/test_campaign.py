"""The main job as a user runs it: the command line, the embedded host, both experiments."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from vringlab.analysis import instructions
from vringlab.analysis.frames import RunFrames, load_run
from vringlab.settings import settings

pytestmark = pytest.mark.timeout(500)

VRINGLAB = [sys.executable, "-m", "vringlab"]


def _environment(runs: Path) -> dict[str, str]:
    return {**os.environ, "VRINGLAB_RUNS": str(runs), "COLUMNS": "100"}


def _run(runs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*VRINGLAB, *arguments],
        capture_output=True,
        text=True,
        timeout=450,
        check=False,
        env=_environment(runs),
    )


def _only_run(runs: Path) -> RunFrames:
    (folder,) = runs.iterdir()
    return load_run(folder)


def _mean(samples: pd.DataFrame, arm: str, metric: str) -> float:
    rows = samples[(samples["arm"] == arm) & (samples["metric"] == metric) & samples["valid"]]
    assert len(rows), f"no valid {metric} of {arm}"
    return float(rows["value"].mean())


def _check_instructions(run: RunFrames) -> None:
    """The second opinion on the same samples: of each arm, by function, its module among them."""
    assert run.provenance["instructions"] == {"counted": True, "not available": ""}
    found = instructions.profiles(run)
    assert set(found["unit"]) == {"packet"}
    for arm in ("stock", "stock.aa", "merged"):
        mine = found[found["arm"] == arm]
        module = mine[(mine["side"] == "guest") & (mine["area"] == "module")]
        assert {"start_xmit", "virtnet_poll_tx"} <= set(module["function"])
        # Sending a packet is some instructions in the driver, and many more around it.
        assert _mean(run.samples, arm, "instructions_module") > 10
        assert _mean(run.samples, arm, "instructions_module") < _mean(
            run.samples, arm, "instructions_guest"
        )
    assert {"exits", "exits: npf", "context switches of the guest"} <= set(
        instructions.events(run)["what"]
    )
    (notes,) = {tuple(json.loads(path.read_text())["notes"]) for path in _profiles(run)}
    assert [note for note in notes if "testpmd polls" in note]


def _profiles(run: RunFrames) -> list[Path]:
    return sorted(run.path.glob("cells/*/instructions.json"))


def test_virtio_net_patch_is_faster_with_fewer_interrupts(tmp_path: Path) -> None:
    done = _run(tmp_path, "run", "virtio-net-napi-tx", "--profile", "smoke", "--count-instructions")
    assert done.returncode == 0, done.stderr
    run = _only_run(tmp_path)
    _check_instructions(run)
    samples = run.samples
    assert run.complete
    assert set(samples["arm"]) == {"stock", "stock.aa", "merged"}
    assert set(samples["host_kind"]) <= {"emulated", "nested"}
    assert _mean(samples, "merged", "tx_interrupts") < 0.5 * _mean(
        samples, "stock", "tx_interrupts"
    )
    for word in ("stock", "merged", "tx_interrupts", "kpps", "Where the time went", "measure"):
        assert word in done.stdout
    arms = run.provenance["arms"]
    assert arms["stock"]["build_id"] != arms["merged"]["build_id"]


def test_killed_run_resumes_and_short_reads_come_out_invalid(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*VRINGLAB, "run", "vsock-direct-enqueue", "--profile", "smoke"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(tmp_path),
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("[2/9]"):
                break
        process.send_signal(signal.SIGKILL)
    (folder,) = tmp_path.iterdir()
    assert sorted(folder.glob("cells/*/sample.json")), "what was done is kept"
    assert not list(folder.glob("samples.parquet.*")), "nothing is half-written"
    deadline = time.monotonic() + 20
    while _qemus_of(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _qemus_of(process.pid), "the embedded host ends with its owner"

    done = _run(tmp_path, "resume", "last")
    assert done.returncode == 0, done.stderr
    run = load_run(folder)
    assert run.complete
    samples = run.samples
    fio = samples[samples["workload"] == "fio-vsock-pingpong"]
    short = fio[fio["param_payload"] == 4096]
    assert len(short)
    assert not short["valid"].any(), "stock fio's 4 KiB ping-pong is an artefact on this kernel"
    assert short["reason"].str.contains("short").all()
    whole = samples[(samples["workload"] == "vsock-pingpong") & (samples["metric"] == "rtt_mean")]
    assert whole["valid"].all(), list(whole["reason"])
    assert set(whole["arm"]) == {"queued", "queued.aa", "direct"}
    assert "short-read artefact" in " ".join(done.stdout.split())


@pytest.mark.long
def test_a_host_that_dies_is_opened_again_and_its_module_swapped_anew(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*VRINGLAB, "run", "vhost-net-rx-poll", "--profile", "smoke"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(tmp_path),
    ) as process:
        assert process.stderr is not None
        said, killed = [], False
        for line in process.stderr:
            said.append(line)
            if line.startswith("[1/3]") and not killed:
                (record,) = _qemus_of(process.pid)
                os.kill(json.loads(Path(record).read_text())["qemu_pid"], signal.SIGKILL)
                killed = True
    assert process.returncode == 0, "".join(said)
    assert "was opened again" in "".join(said)
    run = _only_run(tmp_path)
    assert run.complete
    samples = run.samples
    # The block was measured in one guest, the second.
    assert samples["boot"].nunique() == 1
    assert set(samples["arm"]) == {"always-polling", "always-polling.aa", "shipped"}
    assert {"throughput", "cpu", "vhost_cpu", "vhost_wakeups"} <= set(samples["metric"])
    arms = run.provenance["arms"]
    assert arms["shipped"]["build_id"] != arms["always-polling"]["build_id"]


def test_netperf_measures_arms_of_the_guests_driver(tmp_path: Path) -> None:
    done = _run(tmp_path, "run", "virtio-net-netperf", "--profile", "smoke")
    assert done.returncode == 0, done.stderr
    run = _only_run(tmp_path)
    assert run.complete
    assert set(run.samples["arm"]) == {"stock", "stock.aa", "merged"}
    assert set(run.samples["param_vcpus"]) == {1}
    for metric in ("throughput", "tx_interrupts", "cpu"):
        assert _mean(run.samples, "merged", metric) > 0


def _qemus_of(owner: int) -> list[str]:
    """QEMU processes whose lab folder names this owner."""
    found = []
    for record in (settings().cache / "labs").glob("lab-*/owner.json"):
        values = json.loads(record.read_text())
        if values["pid"] == owner and Path(f"/proc/{values['qemu_pid']}").exists():
            found.append(str(record))
    return found


@pytest.mark.long
def test_fresh_guest_for_every_arm(tmp_path: Path) -> None:
    done = _run(
        tmp_path,
        *("run", "vsock-direct-enqueue", "--profile", "smoke", "--switch", "reboot"),
        *("--arms", "queued", "-p", "payload=64"),
    )
    assert done.returncode == 0, done.stderr
    run = _only_run(tmp_path)
    assert run.complete
    assert run.provenance["settings"]["switch"] == "reboot"
    assert run.samples["valid"].all(), list(run.samples["reason"])


def test_unknown_names_are_user_errors_and_leave_nothing(tmp_path: Path) -> None:
    for arguments, word in (
        (("run", "vsock-direct"), "vsock-direct-enqueue"),
        (("run", "vsock-direct-enqueue", "-p", "payloads=64"), "payload"),
        (("run", "vsock-direct-enqueue", "-p", "payload=much"), "payload"),
        (("run", "vsock-direct-enqueue", "--arms", "directly"), "direct"),
        (("run", "vsock-direct-enqueue", "--host", "moon"), "embedded"),
        (("show", "nothing-here"), "run"),
    ):
        done = _run(tmp_path, *arguments)
        assert done.returncode == 2, (arguments, done.stderr)
        assert word in done.stderr
        assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
