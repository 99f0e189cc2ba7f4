"""Hierarchical bootstrap: hosts are drawn first, then boots of each, then blocks of each boot.

The draws of one design are weights, and many columns (metrics, parameter points, arms) with that
design share them: the cost of drawing is paid once, and each column adds one product of matrices.
That, and work in chunks that stay in the processor's cache, is where the speed comes from; no
draw is approximated.

With few boots the percentiles of these draws are no trustworthy interval: resampling m boots
sees (m-1)/m of their variance, and normal-like percentiles ignore that m-1 degrees of freedom
are few; resampling blocks on top counts the spread within boots twice (Davison and Hinkley,
"Bootstrap Methods and their Application", 1997, section 3.8). `vringlab.analysis.calibrate`
shows both faults. The bootstrap stands beside the t interval, and is not the primary one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vringlab.analysis.pairing import Floats, Ints
from vringlab.errors import UserError

#: Seed of all resampling when the caller names none, so that reports repeat digit for digit.
SEED = 20240614

#: Draws per chunk: small enough for the arrays of a usual design to stay in the cache.
_CHUNK = 256

#: Bound on the size of a chunk's arrays in bytes, for designs of many blocks.
_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Hierarchy:
    """How blocks nest in boots and boots in hosts.

    Attributes:
        boot: Boot of each block, 0 to boots-1, shape (blocks,).
        host: Host of each boot, 0 to hosts-1, shape (boots,).
    """

    boot: Ints
    host: Ints

    def __post_init__(self) -> None:
        boots = np.unique(self.boot)
        hosts = np.unique(self.host)
        if (
            self.boot.size == 0
            or not np.array_equal(boots, np.arange(self.host.size))
            or not np.array_equal(hosts, np.arange(hosts.size))
        ):
            raise UserError(
                "blocks, boots and hosts are not numbered without gaps from 0",
                remedy="take boot and host from vringlab.analysis.pairing.Pairs",
            )

    @property
    def key(self) -> tuple[bytes, bytes]:
        """Equal for columns whose draws can be shared."""
        return self.boot.tobytes(), self.host.tobytes()

    @property
    def block_weights(self) -> Floats:
        """Weight of each block in the mean of host means of boot means, shape (blocks,)."""
        in_boot = np.bincount(self.boot)
        in_host = np.bincount(self.host)
        of_boot = 1 / (in_host.size * in_host[self.host])
        weights: Floats = (of_boot / in_boot)[self.boot]
        return weights


def _chunk_size(slots: int, blocks: int) -> int:
    return max(1, min(_CHUNK, _BYTES // (8 * (4 * slots + 2 * blocks))))


def draw_means(
    columns: Floats,
    hierarchy: Hierarchy,
    draws: int = 10_000,
    seed: int | np.random.SeedSequence = SEED,
) -> Floats:
    """Bootstrap distribution of the mean of host means of boot means.

    Args:
        columns: Block values, shape (blocks, columns).
        hierarchy: Nesting of the blocks.
        draws: Number of resamples.
        seed: Seed; the same seed and hierarchy give the same resamples for any column.

    Returns:
        Means, shape (draws, columns).

    Raises:
        UserError: the shapes do not fit, or `draws` is not positive.
    """
    if columns.ndim != 2 or columns.shape[0] != hierarchy.boot.size:
        raise UserError(
            f"columns have shape {columns.shape}, the hierarchy has {hierarchy.boot.size} blocks",
            remedy="give one row per block",
        )
    if draws < 1:
        raise UserError(f"cannot draw {draws} resamples", remedy="use 1,000 or more draws")
    rng = np.random.Generator(np.random.SFC64(seed))
    # Blocks sorted by boot and boots by host, so that members are ranges.
    by_boot = np.lexsort((hierarchy.boot, hierarchy.host[hierarchy.boot]))
    boots = np.argsort(hierarchy.host, kind="stable")
    sizes = np.bincount(hierarchy.boot)[boots]
    per_host = np.bincount(hierarchy.host)
    values = np.ascontiguousarray(columns[by_boot], dtype=np.float64)
    if per_host.size == 1 and np.all(sizes == sizes[0]):
        return _balanced(values, sizes.size, int(sizes[0]), draws, rng)
    return _nested(values, per_host, sizes, draws, rng)


def _balanced(
    values: Floats, boots: int, size: int, draws: int, rng: np.random.Generator
) -> Floats:
    """One host, all boots of one size: each drawn block weighs the same, so counts suffice."""
    blocks = boots * size
    out = np.empty((draws, values.shape[1]))
    chunk = _chunk_size(blocks, blocks)
    row = (np.arange(chunk, dtype=np.int64) * blocks)[:, None, None]
    kind = np.uint16 if blocks < 2**16 else np.int64
    for start in range(0, draws, chunk):
        count = min(chunk, draws - start)
        boot = rng.integers(0, boots, (count, boots, 1), dtype=kind)
        drawn = rng.integers(0, size, (count, boots, size), dtype=kind) + boot * kind(size)
        flat = (drawn + row[:count]).ravel()
        counts = np.bincount(flat, minlength=count * blocks).reshape(count, blocks)
        np.matmul(counts.astype(np.float64), values, out=out[start : start + count])
    out /= blocks
    return out


def _nested(
    values: Floats, per_host: Ints, sizes: Ints, draws: int, rng: np.random.Generator
) -> Floats:
    """Any nesting: slots beyond the size of a drawn host or boot have weight 0."""
    hosts, boots_max, blocks_max = per_host.size, int(per_host.max()), int(sizes.max())
    blocks = values.shape[0]
    host_start = np.cumsum(per_host) - per_host
    boot_start = np.cumsum(sizes) - sizes
    out = np.empty((draws, values.shape[1]))
    chunk = _chunk_size(hosts * boots_max * blocks_max, blocks)
    for start in range(0, draws, chunk):
        count = min(chunk, draws - start)
        host = rng.integers(0, hosts, (count, hosts, 1))
        in_host = per_host[host]
        pick = rng.random((count, hosts, boots_max))
        boot = host_start[host] + (pick * in_host).astype(np.int64)
        weight = np.where(np.arange(boots_max) < in_host, 1 / (hosts * in_host), 0.0)
        in_boot = sizes[boot][..., None]
        pick = rng.random((count, hosts, boots_max, blocks_max))
        block = boot_start[boot][..., None] + (pick * in_boot).astype(np.int64)
        weights = np.where(np.arange(blocks_max) < in_boot, weight[..., None] / in_boot, 0.0)
        row = (np.arange(count, dtype=np.int64) * blocks)[:, None, None, None]
        flat = np.bincount((block + row).ravel(), weights.ravel(), minlength=count * blocks)
        np.matmul(flat.reshape(count, blocks), values, out=out[start : start + count])
    return out


def percentiles(draws: Floats, points: Sequence[float]) -> Floats:
    """Percentiles of each column by linear interpolation between order statistics.

    The definition is numpy's default (type 7 of Hyndman and Fan, 1996), computed by one partial
    sort for all points.

    Args:
        draws: Shape (draws, columns).
        points: Probabilities between 0 and 1.

    Returns:
        Shape (points, columns).
    """
    ordered = np.ascontiguousarray(draws.T)
    last = ordered.shape[1] - 1
    place = np.asarray(points, dtype=np.float64) * last
    below = np.floor(place).astype(np.int64)
    above = np.minimum(below + 1, last)
    ordered.partition(np.unique(np.concatenate([below, above])), axis=1)
    share = place - below
    found: Floats = (ordered[:, below] * (1 - share) + ordered[:, above] * share).T
    return found
