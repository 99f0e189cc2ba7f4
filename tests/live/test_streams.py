"""Throughput over vsock for real: both arms measured, with CPU use and slab memory beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vringlab.analysis.frames import RunFrames, load_run
from vringlab.errors import TransientError

pytestmark = pytest.mark.timeout(400)

VRINGLAB = [sys.executable, "-m", "vringlab"]
CPU = {"cpu", "guest_cpu", "throughput_per_cpu"}


def _smoke(runs: Path, experiment: str) -> RunFrames:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*VRINGLAB, *arguments],
            capture_output=True,
            text=True,
            timeout=350,
            check=False,
            env={**os.environ, "VRINGLAB_RUNS": str(runs)},
        )

    done = run("run", experiment, "--profile", "smoke")
    if done.returncode == TransientError.exit_code:
        # An emulated host has been seen to die under a guest that boots.
        done = run("resume", "last")
    assert done.returncode == 0, done.stderr
    assert "throughput" in done.stdout
    (folder,) = runs.iterdir()
    return load_run(folder)


def _assert_measured(run: RunFrames, arms: set[str]) -> None:
    samples = run.samples
    assert run.complete
    assert set(samples["arm"]) == arms
    assert samples["valid"].all(), set(samples["reason"])
    for arm in arms:
        assert {"throughput", *CPU} <= set(samples[samples["arm"] == arm]["metric"])
    assert (samples["value"] > 0).all()


@pytest.mark.long
def test_merging_is_measured_with_the_memory_of_both_machines(tmp_path: Path) -> None:
    run = _smoke(tmp_path, "vsock-skb-merge")
    _assert_measured(run, {"no-merge", "no-merge.aa", "merge"})
    peaks = run.samples[run.samples["metric"] == "slab_peak"]
    assert set(peaks["arm"]) == {"no-merge", "no-merge.aa", "merge"}
    for path in run.path.glob("cells/*/sample.json"):
        context = json.loads(path.read_text())["context"]
        for machine in ("guest", "host"):
            sampled = context["sampled"][machine]
            assert 0 < sampled["sampler_cpu_share"] < 0.5
            bytes_of = sampled["slab"]["bytes"]
            assert set(bytes_of) == {
                *("kmalloc-512", "skbuff_head_cache", "skbuff_small_head", "total")
            }
            assert bytes_of["total"]["peak"] >= bytes_of["total"]["median"] > 0


def test_throughput_of_queued_and_direct_packets(tmp_path: Path) -> None:
    run = _smoke(tmp_path, "vsock-throughput")
    _assert_measured(run, {"queued", "queued.aa", "direct"})
    builds = {name: arm["build_id"] for name, arm in run.provenance["arms"].items()}
    assert builds["queued"] != builds["direct"]
