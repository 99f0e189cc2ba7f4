"""Compare the bootstrap of vringlab with scipy.stats.bootstrap on the same data.

The data are those of a full run, simulated: 10 boots of 5 blocks, 4 payloads, 7 metrics, two
arms. Both sides give 95 % percentile intervals from as many resamples. They are timed in turn,
so that a slow moment of the machine falls on both, and the ratio is taken pair by pair.

    python scripts/bench_stats.py            # prints a markdown table
    python scripts/bench_stats.py --repeats 5 --draws 10000
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from scipy import stats as sps

from vringlab.analysis import matrix
from vringlab.analysis.bootstrap import Hierarchy, draw_means, percentiles
from vringlab.analysis.pairing import Floats
from vringlab.analysis.simulate import Design, Noise, as_samples, simulate

DESIGN = Design(10, 5)
PAYLOADS = (64, 512, 3584, 4096)
METRICS = ("rtt_mean", "rtt_p1", "rtt_p50", "rtt_p90", "rtt_p99", "rtt_p99.9", "round_trips")
POINTS = (0.025, 0.975)


@dataclass(frozen=True)
class Case:
    """Two functions that give intervals, shape (2, columns), for the same data."""

    name: str
    ours: Callable[[int], Floats]
    theirs: Callable[[int], Floats]


def _log_ratio(arm: Floats, reference: Floats, axis: int = -1) -> Floats:
    """Statistic for scipy: log of the ratio of geometric means, vectorised."""
    found: Floats = np.mean(np.log(arm), axis=axis) - np.mean(np.log(reference), axis=axis)
    return found


def _scipy(
    columns: Sequence[tuple[Floats, ...]],
    statistic: Callable[..., Floats],
    draws: int,
    method: Literal["percentile", "BCa"],
) -> Callable[[int], Floats]:
    def run(seed: int) -> Floats:
        rng = np.random.default_rng(seed)
        found = []
        for data in columns:
            result = sps.bootstrap(
                data,
                statistic,
                paired=len(data) > 1,
                vectorized=True,
                n_resamples=draws,
                method=method,
                rng=rng,
            )
            found.append(result.confidence_interval)
        return np.array(found).T

    return run


def cases(seed: int, draws: int) -> tuple[list[Case], pd.DataFrame]:
    """The comparisons, and the samples of the whole run."""
    count = len(PAYLOADS) * len(METRICS)
    logs = simulate(DESIGN, Noise(interaction=0.02), 0.8, count, seed)
    blocks = logs.reshape(3, count, -1)
    ratios = np.ascontiguousarray((blocks[2] - blocks[0]).T)
    arms = [(np.exp(blocks[2, i]), np.exp(blocks[0, i])) for i in range(count)]
    boot = np.repeat(np.arange(DESIGN.boots), DESIGN.blocks)
    nested = Hierarchy(boot, np.zeros(DESIGN.boots, dtype=np.int64))
    # One boot: the plain bootstrap of blocks, which is what scipy draws.
    flat = Hierarchy(np.zeros(boot.size, dtype=np.int64), np.zeros(1, dtype=np.int64))

    def ours(hierarchy: Hierarchy, columns: Floats) -> Callable[[int], Floats]:
        return lambda seed: percentiles(draw_means(columns, hierarchy, draws, seed), POINTS)

    plain = [(ratios[:, i],) for i in range(count)]
    listed = [
        Case(
            f"{count} columns, boots and blocks / scipy BCa (its default), arms",
            ours(nested, ratios),
            _scipy(arms, _log_ratio, draws, "BCa"),
        ),
        Case(
            f"{count} columns, boots and blocks / scipy percentile, arms",
            ours(nested, ratios),
            _scipy(arms, _log_ratio, draws, "percentile"),
        ),
        Case(
            f"{count} columns, blocks / scipy percentile, log ratios",
            ours(flat, ratios),
            _scipy(plain, np.mean, draws, "percentile"),
        ),
        Case(
            "1 column, blocks / scipy percentile, log ratios",
            ours(flat, ratios[:, :1]),
            _scipy(plain[:1], np.mean, draws, "percentile"),
        ),
    ]
    frames = []
    for index, payload in enumerate(PAYLOADS):
        for number, metric in enumerate(METRICS):
            one = logs[:, index * len(METRICS) + number]
            frame = as_samples(one, DESIGN, metric, params={"payload": payload})
            frame["cell_id"] += f"-{payload}"
            frames.append(frame)
    return listed, pd.concat(frames, ignore_index=True)


def _seconds(run: Callable[[int], Floats], seed: int) -> float:
    start = time.perf_counter()
    run(seed)
    return time.perf_counter() - start


def _peak_mib(run: Callable[[int], Floats]) -> float:
    tracemalloc.start()
    run(0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 2**20


def _spread(values: Floats, unit: str = "") -> str:
    low, middle, high = np.quantile(values, [0.0, 0.5, 1.0])
    return f"{middle:.3g}{unit} ({low:.3g} to {high:.3g})"


def compare(case: Case, repeats: int) -> str:
    """One row of the table."""
    case.ours(0)
    case.theirs(0)
    times = np.array([(_seconds(case.ours, i), _seconds(case.theirs, i)) for i in range(repeats)])
    ratio = times[:, 1] / times[:, 0]
    return (
        f"| {case.name} | {_spread(1e3 * times[:, 0])} | {_spread(1e3 * times[:, 1])} | "
        f"**{_spread(ratio)}** | {_peak_mib(case.ours):.1f} / {_peak_mib(case.theirs):.1f} |"
    )


def exactness(case: Case, draws: int, repeats: int, columns: Floats) -> str:
    """How far each side's interval ends are from those of 1,000,000 resamples.

    In standard deviations of the bootstrap distribution, root mean square over ends, columns
    and seeds. Both should show nothing but the noise of their resamples.
    """
    flat = Hierarchy(np.zeros(len(columns), dtype=np.int64), np.zeros(1, dtype=np.int64))
    reference = draw_means(columns, flat, 1_000_000, 987_654_321)
    ends, scale = percentiles(reference, POINTS), reference.std(axis=0)
    off = [
        [np.sqrt(np.mean(((run(seed) - ends) / scale) ** 2)) for seed in range(1, repeats + 1)]
        for run in (case.ours, case.theirs)
    ]
    # Error of a normal distribution's 2.5 % point from that many draws.
    density = float(sps.norm.pdf(sps.norm.ppf(POINTS[0])))
    expected = np.sqrt(POINTS[0] * POINTS[1] / draws) / density
    return (
        f"Exactness (blocks, log ratios, {columns.shape[1]} columns): ends are off by "
        f"{np.mean(off[0]):.4f} SD here and {np.mean(off[1]):.4f} SD in scipy; "
        f"{draws:,} resamples allow {expected:.4f} SD."
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9, help="pairs of timings")
    parser.add_argument("--draws", type=int, default=10_000, help="resamples")
    parser.add_argument("--seed", type=int, default=1, help="seed of the data")
    options = parser.parse_args()
    listed, samples = cases(options.seed, options.draws)
    print(
        f"{options.draws:,} resamples, {options.repeats} interleaved pairs; median (min to max)\n"
    )
    print("| intervals, ours / theirs | ours, ms | scipy, ms | scipy / ours | peak MiB |")
    print("|---|---:|---:|---:|---:|")
    for case in listed:
        print(compare(case, options.repeats), flush=True)
    logs = simulate(
        DESIGN, Noise(interaction=0.02), 0.8, len(PAYLOADS) * len(METRICS), options.seed
    )
    columns = np.ascontiguousarray((logs[2] - logs[0]).reshape(logs.shape[1], -1).T)
    print("\n" + exactness(listed[2], options.draws, 3, columns))
    start = time.perf_counter()
    rows = matrix.effects(samples, METRICS, ["direct", "queued.aa"], "queued", draws=options.draws)
    spent = time.perf_counter() - start
    print(
        f"Whole analysis of the run ({len(samples):,} samples, {len(rows)} effects with t, "
        f"bootstrap, Holm and BH): {spent:.2f} s."
    )


if __name__ == "__main__":
    main()
