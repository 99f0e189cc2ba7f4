"""Patches that nobody wrote an experiment for, tried end to end on the embedded host."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from vringlab.analysis.frames import RunFrames, load_run
from vringlab.image.build import ensure_image
from vringlab.kernels.base import resolve
from vringlab.kernels.buildroot import ensure_buildroot
from vringlab.kernels.source import MODULES, ensure_source
from vringlab.report import trial_view

pytestmark = pytest.mark.timeout(600)

DRIVER = "drivers/net/virtio_net.c"
#: Far more than a packet takes, also on a busy machine, so that a few samples decide.
DELAY_US = 20
#: What is built while machines boot is held against their boot.
COLD = {"VRINGLAB_SAVED_LABS": "0"}


@pytest.fixture(scope="module")
def driver() -> str:
    """The driver's source as the base kernel has it."""
    image = ensure_image(on_step=print)
    kernel = resolve("debian:6.12", suite=image.suite, release=image.release, version=image.version)
    root = ensure_buildroot(kernel, on_step=print)
    tree = ensure_source(root.archive, kernel.version, on_step=print)
    return tree.read(MODULES["virtio_net"])[DRIVER].decode()


def start_xmit(source: str) -> tuple[int, int]:
    begin = source.index("static netdev_tx_t start_xmit(")
    return begin, source.index("\n}\n", begin)


def mail(number: int, title: str, before: str, after: str) -> str:
    diff = "".join(
        difflib.unified_diff(
            before.splitlines(True), after.splitlines(True), f"a/{DRIVER}", f"b/{DRIVER}"
        )
    )
    return (
        f"From: A Test <test@vringlab.example>\nDate: Mon, 1 Sep 2025 10:00:00 +0000\n"
        f"Message-ID: <{number}@vringlab.example>\nSubject: [PATCH] {title}\n\n"
        f"Written by a test.\n---\n{diff}-- \n2.47.1\n"
    )


def slower(source: str) -> str:
    begin, end = start_xmit(source)
    body = source[begin:end]
    first = body.index("\n\n") + 1
    delayed = f"{body[:first]}\n\tudelay({DELAY_US});\n{body[first:]}"
    return "#include <linux/delay.h>\n" + source[:begin] + delayed + source[end:]


def renamed(source: str) -> str:
    begin, end = start_xmit(source)
    body = re.sub(r"\bqnum\b", "queue_number", source[begin:end])
    assert body != source[begin:end]
    return source[:begin] + body + source[end:]


def vringlab(runs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vringlab", *arguments],
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
        env={**os.environ, "VRINGLAB_RUNS": str(runs), "COLUMNS": "100", **COLD},
    )


@pytest.fixture(scope="module")
def tried(driver: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFrames, str, float]:
    """A run of both patches: what it holds, what was printed, seconds to the first sample."""
    folder = tmp_path_factory.mktemp("try")
    (folder / "slow.patch").write_text(mail(1, "wait in start_xmit", driver, slower(driver)))
    (folder / "same.patch").write_text(mail(2, "rename a local", driver, renamed(driver)))
    runs = folder / "runs"
    # What is read once for a base is not what is timed.
    warm = vringlab(
        runs, "try", str(folder / "slow.patch"), "--workload", "pktgen-testpmd", "--dry-run"
    )
    assert warm.returncode == 0, warm.stderr
    begin, clock = datetime.now(UTC), time.monotonic()
    done = vringlab(
        runs,
        *("try", str(folder / "slow.patch"), str(folder / "same.patch")),
        *("--workload", "pktgen-testpmd", "--profile", "smoke"),
    )
    assert done.returncode == 0, done.stderr
    print(done.stderr, done.stdout, f"{time.monotonic() - clock:.0f} s in all")
    (path,) = runs.iterdir()
    run = load_run(path)
    first = datetime.fromisoformat(str(run.samples["started"].min()))
    return run, done.stdout, (first - begin).total_seconds()


def finding(run: RunFrames, arm: str, metric: str = "pps_tx") -> trial_view.Finding:
    (found,) = [
        item for item in trial_view.findings(run) if (item.arm, item.metric) == (arm, metric)
    ]
    return found


def test_a_delay_is_seen_as_slower_and_its_path_as_exercised(
    tried: tuple[RunFrames, str, float],
) -> None:
    run, printed, _ = tried
    assert run.complete
    # A window of one second may end between two of testpmd's reports.
    assert run.samples["valid"].mean() > 0.8, list(run.samples["reason"])
    slow = finding(run, "slow")
    assert (slow.word, slow.better) == ("effect seen", False), slow.sentence
    assert "start_xmit" in " ".join(printed.split())
    assert "path of slow exercised" in printed
    passes = [item for item in run.paths if item.arm == "slow"]
    assert all(item.exercised for item in passes)
    assert all(item.counts["start_xmit"] > 0 for item in passes)


def test_a_rename_has_no_effect_and_says_what_would_have_been_seen(
    tried: tuple[RunFrames, str, float],
) -> None:
    run, printed, _ = tried
    same = finding(run, "same")
    assert same.word == "no effect seen", same.sentence
    assert "the smallest change that this run would have found" in same.sentence
    assert "two equal arms came out" in same.sentence
    # Told apart by build-id all the same.
    ids = {arm: facts["build_id"] for arm, facts in run.provenance["arms"].items()}
    assert len(set(ids.values())) == 3
    assert trial_view.same_code(run) == ["same"]
    assert "same is machine code for machine code the reference" in " ".join(printed.split())


def test_the_run_has_its_experiment_and_patches_with_it(
    tried: tuple[RunFrames, str, float], tmp_path: Path
) -> None:
    run, _, _ = tried
    record = run.provenance["try"]
    assert record["slow"]["message_id"] == "1@vringlab.example"
    assert (record["slow"]["version"], record["slow"]["patches"]) == (1, 1)
    assert record["slow"]["modules"] == ["virtio_net"]
    folder = run.path / "patches" / run.plan.experiment / "debian-6.12"
    assert sorted(path.name for path in folder.iterdir()) == [
        "same.patch",
        "slow.patch",
        "stock.patch",
    ]
    shown = vringlab(run.path.parent, "show", run.run_id)
    assert shown.returncode == 0, shown.stderr
    assert "effect seen" in shown.stdout
    page = tmp_path / "page.html"
    done = vringlab(run.path.parent, "report", run.run_id, "--out", str(page))
    assert done.returncode == 0, done.stderr
    assert "effect seen" in page.read_text()


def test_the_first_sample_comes_soon_after_the_boot(tried: tuple[RunFrames, str, float]) -> None:
    """Modules are built while the host boots; what is left is fitting, loading, preparing."""
    run, _, first_s = tried
    spent = run.time["phases"]
    boot_s = spent["set-up"] + spent["boot"]
    print(
        f"first sample after {first_s:.1f} s: {first_s / boot_s:.2f} of the boots, {boot_s:.1f} s"
    )
    assert first_s < 1.5 * boot_s
