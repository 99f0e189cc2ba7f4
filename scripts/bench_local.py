"""Rows of `make bench` that need no virtual machine."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scripts import bench_campaign, bench_peers, bench_stats
from scripts.bench_rows import Bench
from scripts.bench_table import Line, Pair, in_turn

from vringlab.analysis import latencies
from vringlab.analysis.pairing import Floats
from vringlab.errors import InfrastructureError
from vringlab.kernels.buildroot import BuildRoot
from vringlab.kernels.module import build_module
from vringlab.kernels.patches import load_arm
from vringlab.settings import settings

BASE = "debian:6.12"
_ARMS = (("vsock-direct-enqueue", "direct"), ("virtio-net-napi-tx", "rfc"))
_FOLDERS = ("net/vmw_vsock/", "drivers/net/")
_SMALL_PLAN = 1000
_LATENCIES = 10_000_000
_DRAWS = 10_000
#: A program of a tenth of a second is started so often for one figure.
_STARTS = 5


# --- building ------------------------------------------------------------------------------


def _fresh_build(root: BuildRoot, experiment: str, arm: str, place: Path) -> float:
    """Build an arm whose sources are at hand and whose result is not."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        cache = Path(folder)
        for name in ("sources", "indexes"):
            (settings().cache / name).mkdir(exist_ok=True)
            (cache / name).symlink_to(settings().cache / name)
        begin = time.perf_counter()
        built = build_module(
            root, load_arm(experiment, BASE, arm), on_step=lambda _: None, cache=cache
        )
        seconds = time.perf_counter() - begin
    assert not built.cached, "its cache was empty"
    return seconds


def build(bench: Bench) -> Iterator[Line]:
    """An arm's warm build against folders of the same kernel's tree."""
    yield from _build(bench, whole=False)


def whole(bench: Bench) -> Iterator[Line]:
    """An arm's warm build against the whole kernel: ten minutes and more for each pair."""
    yield from _build(bench, whole=True)


def _build(bench: Bench, *, whole: bool) -> Iterator[Line]:
    out = bench.scratch / "kernel"
    root, sample = bench_peers.kernel_sample(bench.image, _FOLDERS, out, bench.say)
    files_of_whole = sample.files_of_whole()
    # Sources are unpacked once, by the first build.
    for experiment, arm in _ARMS:
        _fresh_build(root, experiment, arm, bench.scratch)
    found: dict[str, list[Pair]] = {arm: [] for _, arm in _ARMS}
    estimated: dict[str, list[Pair]] = {arm: [] for _, arm in _ARMS}
    counted: list[int] = []
    for number in range(bench.pairs):

        def ours() -> list[float]:
            return [_fresh_build(root, *arm, bench.scratch) for arm in _ARMS]

        first = ours() if number % 2 == 0 else []
        theirs = sample.whole() if whole else sample.build()
        counted.append(theirs.files)
        times = first or ours()
        for (_, arm), seconds in zip(_ARMS, times, strict=True):
            found[arm].append(Pair(seconds, theirs.seconds))
            estimated[arm].append(Pair(seconds, theirs.of(files_of_whole)))
        shown = ", ".join(f"{seconds:.2f} s" for seconds in times)
        bench.say(f"pair {number + 1} of {bench.pairs}: {shown} against {theirs.seconds:.1f} s")
    files = round(statistics.median(counted))
    part = f"`make {' '.join(_FOLDERS)}`"
    what = f"{'the whole kernel and its modules' if whole else part}: {files:,} files"
    note = (
        f"linux {root.kernel.version}, the same source and {sample.root.compiler.split()[0]} on "
        "both sides, in the same sandbox. An arm's sources are unpacked; it is patched, compiled, "
        "linked and examined. The kernel is configured as `vringlab try --build full` does "
        "(defconfig, kvm_guest.config, what a lab needs), and `make prepare` is done before."
    )
    if not whole:
        note += (
            f" `make -n` counts {files_of_whole:,} files for the whole kernel; its estimated time "
            "is that of the folders in proportion (what make takes when there is nothing to do is "
            "counted once), without linking. The row `whole` builds it."
        )
    for experiment, arm in _ARMS:
        name = f"`{load_arm(experiment, BASE, arm).module}`, arm {arm}: warm build"
        pairs = tuple(found[arm])
        if whole:
            yield Line("whole", name, what, pairs, at_most=1 / 150, note=note)
            continue
        yield Line("build", name, what, pairs, note=note)
        yield Line(
            "build",
            name,
            f"(estimated) a whole kernel: {files_of_whole:,} files at that rate",
            tuple(estimated[arm]),
            at_most=1 / 150,
            note=note,
        )


# --- planner and store ---------------------------------------------------------------------


def store(bench: Bench) -> Iterator[Line]:
    """Planner and store: a cell of a large plan against one of a small plan."""
    totals: dict[str, list[Pair]] = {"wall": [], "cpu": []}

    def cost(cells: int) -> Mapping[str, float]:
        with tempfile.TemporaryDirectory(dir=bench.scratch) as place:
            found = bench_campaign.growth(cells, Path(place)).values()
        return {
            kind: 1e6 * sum(getattr(each, kind) for each in found) / cells
            for kind in ("wall", "cpu")
        }

    for number in range(bench.pairs):
        small = [cost(_SMALL_PLAN) for _ in range(3)]
        large = cost(bench.cells)
        small += [cost(_SMALL_PLAN) for _ in range(3)]
        for kind, pairs in totals.items():
            pairs.append(Pair(large[kind], statistics.median(each[kind] for each in small)))
        bench.say(
            f"pair {number + 1} of {bench.pairs}: {large['wall']:.0f} us a cell, "
            f"ratio {totals['wall'][-1].ratio:.3g}"
        )
    for kind, words in (("wall", "by the clock"), ("cpu", "processor time")):
        yield Line(
            "store",
            f"a cell of a run of {bench.cells:,}, {words}",
            f"a cell of a run of {_SMALL_PLAN:,}",
            tuple(totals[kind]),
            unit="us",
            at_most=1.2,
            note="planned, run without machines, written (one folder a cell), opened again and "
            "loaded for analysis; each large run between six small ones.",
        )


# --- statistics ----------------------------------------------------------------------------


def bootstrap(bench: Bench) -> Iterator[Line]:
    """Intervals of a full run: our bootstrap against scipy's."""
    listed, _ = bench_stats.cases(1, _DRAWS)

    def timed(run: Callable[[int], object]) -> float:
        begin = time.perf_counter()
        run(1)
        return 1e3 * (time.perf_counter() - begin)

    for case in listed:
        case.ours(0)
        case.theirs(0)
        bench.say(case.name)
        ours, _, theirs = case.name.partition(" / ")
        pairs = in_turn(
            bench.pairs,
            lambda run=case.ours: timed(run),  # type: ignore[misc]  # the loop's own
            lambda run=case.theirs: timed(run),  # type: ignore[misc]
            bench.say,
            "ms",
        )
        yield Line(
            "bootstrap",
            ours,
            theirs,
            pairs,
            unit="ms",
            note=f"95 % intervals from {_DRAWS:,} resamples of a full run's data (10 boots of 5 "
            "blocks; 4 payloads x 7 metrics), scipy.stats.bootstrap vectorised.",
        )


def load(bench: Bench) -> Iterator[Line]:
    """Loading ten million raw latencies."""
    path = bench.scratch / "latencies.txt"
    bench.say(f"writing {_LATENCIES:,} latencies")
    values = np.random.default_rng(1).lognormal(13.8, 0.3, _LATENCIES).astype(np.int64)
    path.write_text("\n".join(map(str, values.tolist())) + "\n")

    def timed(read: Callable[[], Floats]) -> float:
        begin = time.perf_counter()
        found = read()
        seconds = time.perf_counter() - begin
        if found.size != _LATENCIES or not np.array_equal(found, values):
            raise InfrastructureError("what was read is not what was written", host="local")
        return seconds

    def by_pandas() -> Floats:
        frame = pd.read_csv(path, header=None, names=["ns"], dtype={"ns": np.float64})
        return frame["ns"].to_numpy()

    def by_numpy() -> Floats:
        found: Floats = np.loadtxt(path)
        return found

    others = {"pandas.read_csv": by_pandas, "numpy.loadtxt": by_numpy}
    for name, other in others.items():
        bench.say(name)
        for read in (lambda: latencies.load(path), other):
            timed(read)
        yield Line(
            "load",
            f"{_LATENCIES:,} latencies of a text file",
            f"`{name}`",
            in_turn(
                bench.pairs,
                lambda: timed(lambda: latencies.load(path)),
                lambda other=other: timed(other),  # type: ignore[misc]  # the loop's own
                bench.say,
            ),
            note=f"one whole number of ns a line, {path.stat().st_size / 1e6:.0f} MB, in the page "
            "cache; ours also checks that none is negative.",
        )
    path.unlink()


# --- starting ------------------------------------------------------------------------------


def _cpu(argv: Sequence[str], environment: Mapping[str, str]) -> float:
    """Processor time of a program, user and system, ms; the median of several starts."""
    found = []
    for _ in range(_STARTS):
        with subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **environment},
        ) as process:
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise InfrastructureError(
                "a program failed that only prints its help",
                remedy="run it by hand",
                command=list(argv),
                host="local",
                returncode=process.returncode,
            )
        found.append(1e3 * (used.ru_utime + used.ru_stime))
    return statistics.median(found)


def start(bench: Bench) -> Iterator[Line]:
    """Processor time to `--help` and of the package's import."""
    virtme = bench_peers.ensure_virtme(bench.image, bench.accelerator, bench.say)
    own = bench.environment()
    peer = bench.environment(PYTHONPATH=str(virtme.python_path))
    python = sys.executable
    help_ = [str(Path(python).with_name("vringlab")), "--help"]
    vng = [python, "-c", "from virtme_ng.run import main; main()", "--help"]
    note = (
        f"user and system time of {_STARTS} starts (their median), modules compiled before, the "
        f"same Python; virtme-ng {bench_peers.VIRTME_NG}."
    )
    cases: tuple[tuple[str, list[str], str, list[str], float | None], ...] = (
        ("`vringlab --help`", help_, "`vng --help`", vng, 300.0),
        (
            "`import vringlab`",
            [python, "-c", "import vringlab"],
            "`pass`",
            [python, "-c", ""],
            None,
        ),
        (
            "import of all that `vringlab run` measures with",
            [python, "-c", "import vringlab.collect"],
            "`import pandas`",
            [python, "-c", "import pandas"],
            None,
        ),
    )
    for ours, argv, theirs, other, limit in cases:
        bench.say(f"{ours} against {theirs}")
        for each, environment in ((argv, own), (other, peer)):
            _cpu(each, environment)
        pairs = in_turn(
            bench.pairs,
            lambda argv=argv: _cpu(argv, own),  # type: ignore[misc]  # the loop's own
            lambda other=other: _cpu(other, peer),  # type: ignore[misc]
            bench.say,
            "ms",
        )
        yield Line("start", f"{ours}, CPU", theirs, pairs, "ms", ours_at_most=limit, note=note)
