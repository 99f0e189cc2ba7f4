"""Two embedded hosts measure one run under dask; one is killed, the rest ends, resume completes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vringlab.analysis.frames import load_run

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

VRINGLAB = [sys.executable, "-m", "vringlab"]
#: One boot for each host, a block of four cells each.
RUN = [
    *("run", "vsock-direct-enqueue", "--profile", "smoke", "--boots", "2"),
    *("--arms", "queued", "-p", "payload=64", "--host", "embedded", "--host", "embedded"),
]


def _environment(runs: Path) -> dict[str, str]:
    return {**os.environ, "VRINGLAB_RUNS": str(runs), "COLUMNS": "100"}


def _qemu_of(run: Path, host: str) -> int:
    """The QEMU that runs an embedded host of a run, by the folder of its lab."""
    hosts = json.loads((run / "provenance.json").read_text())["hosts"]
    (console,) = [
        word.removeprefix("file:")
        for word in hosts[host]["host"]["qemu_argv"]
        if word.startswith("file:") and word.endswith("console.log")
    ]
    return int(json.loads((Path(console).parent / "owner.json").read_text())["qemu_pid"])


def test_a_killed_host_costs_its_block_and_resume_completes_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    killed, qemus = "", set[int]()
    with subprocess.Popen(
        [*VRINGLAB, *RUN],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(tmp_path),
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            words = line.split()
            # Only a cell that is done says how much time is left.
            if words[-1:] == ["left"] and not killed:
                # A cell of its block is done, three are not.
                killed = words[1].rstrip(":")
                (run,) = tmp_path.iterdir()
                qemus = {_qemu_of(run, f"embedded-{n}") for n in (1, 2)}
                os.kill(_qemu_of(run, killed), signal.SIGKILL)
    text = "".join(said)
    assert killed, text
    assert process.returncode == 4, text
    assert f"{killed}: the host takes no further part" in text
    assert "continue with: vringlab resume" in text
    assert _gone(qemus), "both machines end with the run"
    (run,) = tmp_path.iterdir()
    frames = load_run(run)
    survivor = ({"embedded-1", "embedded-2"} - {killed}).pop()
    blocks = frames.samples.groupby("block")["cell_id"].nunique()
    done = frames.samples[frames.samples["block"] == blocks.idxmax()]
    assert blocks.max() == 4
    assert set(done["host"]) == {survivor}
    assert blocks.sum() < 8

    resumed = subprocess.run(
        [*VRINGLAB, "resume", "last"],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env=_environment(tmp_path),
    )
    assert resumed.returncode == 0, resumed.stderr
    frames = load_run(run)
    assert frames.complete
    assert frames.samples.groupby("block")["boot"].nunique().eq(1).all()
    assert frames.samples["boot"].nunique() == 2
    assert set(frames.samples["host_kind"]) <= {"emulated", "nested"}


def _gone(pids: set[int]) -> bool:
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
