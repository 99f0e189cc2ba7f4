"""Simulated runs with known truth, for calibration and tests. Nothing here is a measurement.

The log of a run's figure is the sum of
    an offset of its boot, shared by all arms of the boot (page placement, KASLR);
    an offset of its arm in that boot (an arm-by-boot interaction), 0 on average;
    noise of the run, with a slow mode that a share of the runs falls into;
    the arm's effect.
Two layouts: `swap`, all arms in each boot, as vringlab measures by default; `reboot`, a boot of
its own for each arm, as most published comparisons are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from vringlab.analysis.pairing import Floats
from vringlab.analysis.units import metric as metric_spec
from vringlab.errors import UserError

Layout = Literal["swap", "reboot"]

#: Index of the arms in simulated arrays: the reference, its twin, and the arm with the effect.
REFERENCE, TWIN, ARM = 0, 1, 2


@dataclass(frozen=True)
class Noise:
    """Spreads on the log scale.

    The defaults are chosen, not fitted: wide like the three hand-measured runs per arm of nested
    pktgen (461, 562 and 604 kpps, 14 % in the log), and bimodal, as runs under emulation are.

    Attributes:
        boot: Standard deviation of a boot's offset.
        interaction: Standard deviation of an arm's offset within a boot.
        run: Standard deviation of a run's noise.
        slow: Shift of the slow mode.
        slow_share: Share of the runs in it.
        ping: Standard deviation of the log of single messages within a run.
    """

    boot: float = 0.10
    interaction: float = 0.0
    run: float = 0.04
    slow: float = 0.15
    slow_share: float = 0.25
    ping: float = 0.30

    def __post_init__(self) -> None:
        spreads = (self.boot, self.interaction, self.run, self.slow, self.ping)
        if not np.isfinite(spreads).all() or min(spreads) < 0 or not 0 <= self.slow_share <= 1:
            raise UserError(
                "a spread of the noise is negative or no number, or the share is no share",
                remedy="give spreads >= 0 on the log scale and a share between 0 and 1",
            )

    @property
    def sd_run(self) -> float:
        """Standard deviation of one run about its boot's level."""
        share = self.slow_share * (1 - self.slow_share)
        return float(np.sqrt(self.run**2 + share * self.slow**2))

    @property
    def sd_block(self) -> float:
        """Standard deviation of the log ratio of two runs of one block."""
        return float(np.sqrt(2)) * self.sd_run

    @property
    def sd_boot(self) -> float:
        """Standard deviation of the true log ratio from boot to boot, in the swap layout."""
        return float(np.sqrt(2)) * self.interaction


@dataclass(frozen=True)
class Design:
    """How much is measured: `boots` boots with `blocks` blocks in each."""

    boots: int
    blocks: int
    layout: Layout = "swap"

    def __post_init__(self) -> None:
        if self.boots < 1 or self.blocks < 1:
            raise UserError("a design has at least one boot and block", remedy="use 3 x 4 or more")

    def __str__(self) -> str:
        """`3x4`: boots x blocks in each."""
        return f"{self.boots}x{self.blocks}"


def simulate(
    design: Design,
    noise: Noise,
    ratio: float = 1.0,
    datasets: int = 1,
    seed: int | np.random.SeedSequence | np.random.Generator = 0,
    arms: int = 3,
) -> Floats:
    """Logs of the figures of many data sets at once.

    Args:
        design: Boots and blocks.
        noise: Spreads.
        ratio: True ratio of arm `ARM` to the reference; the other arms equal the reference.
        datasets: Number of data sets.
        seed: Seed or generator.
        arms: Number of arms.

    Returns:
        Shape (arms, datasets, boots, blocks).
    """
    rng = np.random.default_rng(seed)
    shape = (arms, datasets, design.boots, design.blocks)
    shared = 1 if design.layout == "swap" else arms
    logs: Floats = noise.boot * rng.standard_normal((shared, *shape[1:3], 1))
    logs = logs + noise.interaction * rng.standard_normal((*shape[:3], 1))
    logs = logs + noise.run * rng.standard_normal(shape)
    logs = logs + noise.slow * (rng.random(shape) < noise.slow_share)
    if arms > ARM:
        logs[ARM] += np.log(ratio)
    return logs


def messages(logs: Floats, noise: Noise, count: int, rng: np.random.Generator) -> Floats:
    """Logs of single messages of each run: a new last axis of that length."""
    return logs[..., None] + noise.ping * rng.standard_normal((*logs.shape, count))


def as_samples(
    logs: Floats,
    design: Design,
    metric: str = "rtt_mean",
    base: float = 1e6,
    arms: Sequence[str] = ("queued", "queued.aa", "direct"),
    workload: str = "simulated",
    params: dict[str, object] | None = None,
    seed: int = 0,
    host_kind: str = "simulated",
    host: str = "simulated",
    window_s: float = 4.0,
) -> pd.DataFrame:
    """One simulated data set as a frame of samples, arms in random order within each block.

    Args:
        logs: Shape (arms, boots, blocks).
        design: The design they were simulated with.
        metric: Name of the metric.
        base: Figure at a log of 0, in the metric's unit.
        arms: Names of the arms.
        workload: Name of the workload.
        params: Parameter point.
        seed: Seed of the order of arms.
        host_kind: Kind of the host; `simulated` unless a test needs another.
        host: Name of the host.
        window_s: Timed window in seconds.
    """
    rng = np.random.default_rng(seed)
    rows = []
    clock = pd.Timestamp("2024-06-14T00:00:00Z")
    for boot in range(design.boots):
        for block in range(design.blocks):
            number = boot * design.blocks + block + 1
            for position, index in enumerate(rng.permutation(len(arms)), 1):
                clock += pd.Timedelta(seconds=10)
                own = f"-{arms[index]}" if design.layout == "reboot" else ""
                rows.append(
                    {
                        "run_id": "simulated",
                        "experiment": "simulated",
                        "cell_id": f"b{number:03d}-{arms[index]}",
                        "block": number,
                        "position": position,
                        "boot": f"{host}-b{boot + 1:02d}{own}",
                        "host": host,
                        "host_kind": host_kind,
                        "arm": arms[index],
                        "base_kernel": "simulated",
                        "workload": workload,
                        **{f"param_{name}": value for name, value in (params or {}).items()},
                        "metric": metric,
                        "value": base * float(np.exp(logs[index, boot, block])),
                        "unit": metric_spec(metric).unit,
                        "valid": True,
                        "reason": "",
                        "started": clock.isoformat(),
                        "window_s": window_s,
                    }
                )
    return pd.DataFrame(rows)
