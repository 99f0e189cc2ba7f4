"""Memory of slab caches while a workload runs: /proc/slabinfo and /sys/kernel/slab, read in series.

A reading of /proc/slabinfo walks the lists of every cache, one of `/sys/kernel/slab/NAME/slabs`
only adds up a counter of one cache. So a series is taken from the latter, by `vringlab-sample`
(vringlab/image/src/vringlab-sample.c), and the sizes come from one slabinfo beside it. A series of
slabinfo is understood too.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vringlab.errors import InfrastructureError
from vringlab.workloads.base import Metric

#: The caches that a vsock packet comes from: its sk_buff, and its data up to 6.2 and from 6.3 on
#: (skbuff_small_head; the mail of 2022 names kmalloc-512).
CACHES: tuple[str, ...] = ("kmalloc-512", "skbuff_head_cache", "skbuff_small_head")

#: x86's page, the unit of `pagesperslab`.
PAGE_BYTES = 4096
#: Fewer readings than this before the load, or in it, are not a baseline, or a peak.
FEWEST_READINGS = 3
#: Above this share of one CPU the sampler disturbs what it stands beside.
OVERHEAD_SHARE = 0.01
#: A gap of this many usual distances between readings may hide a peak.
_GAP = 5

_VERSION = re.compile(r"^slabinfo - version: (\d{1,4}\.\d{1,4})", re.MULTILINE)
# name active_objs num_objs objsize objperslab pagesperslab : tunables .. : slabdata active num ..
_LINE = re.compile(
    r"^(?P<name>\S{1,64}) +(?P<active>\d{1,12}) +(?P<objects>\d{1,12}) +(?P<size>\d{1,9})"
    r" +(?P<per>\d{1,6}) +(?P<pages>\d{1,4}) : tunables(?: +\d{1,9}){3}"
    r" : slabdata +(?P<active_slabs>\d{1,12}) +(?P<slabs>\d{1,12}) +\d{1,12}[ \t]*$",
    re.MULTILINE,
)
_READING = re.compile(r"^@ (\d{1,20})$", re.MULTILINE)
_SYSFS = re.compile(r"^= /sys/kernel/slab/([^/\s]{1,64})/slabs\n(\d{1,12})(?: |$)", re.MULTILINE)
_FAILED = re.compile(r"^! (.{1,300})$", re.MULTILINE)
_END = re.compile(
    r"^# samples (\d{1,12}) late (\d{1,12}) cpu_ns (\d{1,20}) elapsed_ns (\d{1,20})$", re.MULTILINE
)
_LINK = re.compile(r"^(\S{1,64}) (\S{1,64})$", re.MULTILINE)

_REMEDY = (
    "/proc/slabinfo is root's to read and needs CONFIG_SLUB or CONFIG_SLAB; look at what was "
    "printed instead"
)


@dataclass(frozen=True)
class SlabCache:
    """One line of /proc/slabinfo.

    Attributes:
        name: The cache; of several merged ones the name of the first.
        active_objects: Objects in use (SLUB counts those of per-CPU slabs as used).
        objects: Objects that its slabs have room for.
        object_bytes: Bytes of an object with its padding.
        objects_per_slab: Objects in a slab.
        pages_per_slab: Pages of a slab.
        slabs: Slabs that it holds.
    """

    name: str
    active_objects: int
    objects: int
    object_bytes: int
    objects_per_slab: int
    pages_per_slab: int
    slabs: int

    def memory(self, page_bytes: int = PAGE_BYTES) -> int:
        """Bytes that its slabs take: num_slabs x pagesperslab x page size."""
        return self.slabs * self.pages_per_slab * page_bytes


@dataclass(frozen=True)
class SlabReading:
    """One reading of a series: when (ns, the sampler's clock), and slabs by cache."""

    at_ns: int
    slabs: Mapping[str, int]


@dataclass(frozen=True)
class SlabSeries:
    """What a sampler printed.

    Attributes:
        readings: In order of time.
        failures: Files that could not be read at some time, with the reason; each once.
        late: Readings that were skipped because the one before took too long.
        cpu_share: CPU time of the sampler as a share of one CPU; `None` when it was killed before
            it could tell.
    """

    readings: tuple[SlabReading, ...]
    failures: tuple[str, ...] = ()
    late: int = 0
    cpu_share: float | None = None


@dataclass(frozen=True)
class SlabUse:
    """Memory of one cache, or of several together, in bytes."""

    baseline: int
    peak: int
    median: int

    @property
    def peak_over(self) -> int:
        """Highest reading in the load, over the baseline."""
        return self.peak - self.baseline

    @property
    def median_over(self) -> int:
        """Middle reading in the load, over the baseline."""
        return self.median - self.baseline


@dataclass(frozen=True)
class SlabFigures:
    """What a series says of a load.

    Attributes:
        total: All caches together; `None` when `problems` say why not.
        caches: Each cache.
        problems: Why there are no figures, or none to rely on.
        warnings: What a reader should know.
        cpu_share: The sampler's CPU time, as a share of one CPU; `None` when unknown.
        readings: Readings in the load.
    """

    total: SlabUse | None
    caches: Mapping[str, SlabUse] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    cpu_share: float | None = None
    readings: int = 0

    def _over(self) -> dict[str, int]:
        if self.total is None:
            return {}
        return {"slab_peak": self.total.peak_over, "slab_median": self.total.median_over}

    def metrics(self, prefix: str = "") -> tuple[Metric, ...]:
        """`slab_peak` and `slab_median`, bytes over the baseline; none without figures.

        One that is not above the baseline is left out (see `not_above`): arms are compared by
        ratios, which need figures above 0.

        Args:
            prefix: Set before the names: `host_`.
        """
        return tuple(
            Metric(prefix + name, float(over), "byte")
            for name, over in self._over().items()
            if over > 0
        )

    def not_above(self, prefix: str = "") -> tuple[str, ...]:
        """For each figure that `metrics` leaves out: why, in words."""
        return tuple(
            f"no {prefix}{name}: the caches took {-over} bytes less than before the load, so "
            "nothing was seen over the baseline"
            if over < 0
            else f"no {prefix}{name}: nothing was seen over the baseline"
            for name, over in self._over().items()
            if over <= 0
        )

    def context(self) -> dict[str, object]:
        """What a sample keeps beside its metrics: bytes by cache, absolute and over baseline."""
        uses = {**self.caches, **({"total": self.total} if self.total else {})}
        return {
            "readings": self.readings,
            "sampler_cpu_share": self.cpu_share,
            "bytes": {
                name: {
                    "baseline": use.baseline,
                    "peak": use.peak,
                    "median": use.median,
                    "peak_over": use.peak_over,
                    "median_over": use.median_over,
                }
                for name, use in uses.items()
            },
        }


def parse(text: str) -> dict[str, SlabCache]:
    """The caches of a /proc/slabinfo of version 2.1, by name.

    Raises:
        InfrastructureError: it is not one, is of another version, or has no whole line.
    """
    version = _VERSION.search(text)
    if version is None:
        raise InfrastructureError(
            "this is not the text of /proc/slabinfo: it names no version",
            remedy=_REMEDY,
            stdout=text,
        )
    if version[1] != "2.1":
        raise InfrastructureError(
            f"/proc/slabinfo is of version {version[1]}, not 2.1",
            remedy="check what its columns mean there, and extend vringlab.workloads.slab",
        )
    found = _caches(text)
    if not found:
        raise InfrastructureError(
            "/proc/slabinfo has no line of a cache", remedy=_REMEDY, stdout=text
        )
    return found


def _caches(text: str) -> dict[str, SlabCache]:
    return {
        match["name"]: SlabCache(
            name=match["name"],
            active_objects=int(match["active"]),
            objects=int(match["objects"]),
            object_bytes=int(match["size"]),
            objects_per_slab=int(match["per"]),
            pages_per_slab=int(match["pages"]),
            slabs=int(match["slabs"]),
        )
        for match in _LINE.finditer(text)
    }


def parse_links(text: str) -> dict[str, tuple[str, ...]]:
    r"""Caches that share one: name -> the other names of the same cache.

    Args:
        text: Lines of `NAME TARGET`, as from
            `find /sys/kernel/slab -maxdepth 1 -type l -printf '%f %l\n'`: a merged cache is a
            link to the one that it became part of.
    """
    members: dict[str, list[str]] = {}
    for name, target in _LINK.findall(text):
        # A target without a colon is itself the name of a cache, that others became part of.
        own = [] if target.startswith(":") else [target]
        members.setdefault(target, own).append(name)
    return {
        name: tuple(other for other in names if other != name)
        for names in members.values()
        for name in names
    }


def parse_series(text: str) -> SlabSeries:
    """Read what `vringlab-sample` printed of slab files; a last reading cut off is left out.

    Raises:
        InfrastructureError: it holds no reading.
    """
    end = _END.search(text)
    body = text[: end.start()] if end else text
    starts = list(_READING.finditer(body))
    if starts and end is None:
        # The sampler was killed, perhaps in the middle of its last reading.
        body, starts = body[: starts[-1].start()], starts[:-1]
    readings = []
    limits = [*(match.start() for match in starts[1:]), len(body)]
    for match, limit in zip(starts, limits, strict=False):
        block = body[match.end() : limit]
        slabs = {name: int(count) for name, count in _SYSFS.findall(block)}
        slabs.update({name: cache.slabs for name, cache in _caches(block).items()})
        readings.append(SlabReading(int(match[1]), slabs))
    failures = tuple(dict.fromkeys(_FAILED.findall(text)))
    if not any(reading.slabs for reading in readings):
        raise InfrastructureError(
            "the sampler printed no reading of a slab cache"
            + (f": {'; '.join(failures)}" if failures else ""),
            remedy=_REMEDY,
            stdout=text,
        )
    return SlabSeries(
        readings=tuple(readings),
        failures=failures,
        late=int(end[2]) if end else 0,
        cpu_share=int(end[3]) / int(end[4]) if end and int(end[4]) else None,
    )


def slab_figures(
    series: SlabSeries,
    sizes: Mapping[str, SlabCache],
    *,
    load: tuple[int, int],
    caches: Sequence[str] = CACHES,
    links: Mapping[str, tuple[str, ...]] | None = None,
    page_bytes: int = PAGE_BYTES,
) -> SlabFigures:
    """Peak and median of the caches' memory in a load, over what it was before.

    Args:
        series: Readings from before the load to its end.
        sizes: The caches by name, from one /proc/slabinfo of the same machine.
        load: Begin and end of the load in ns, by the sampler's clock. What was read before the
            begin is the baseline (its median).
        caches: The caches to add up.
        links: Merged caches, see `parse_links`; `None` when unknown.
        page_bytes: Bytes of a page.
    """
    problems = [
        text for name in caches if (text := _unusable(name, series, sizes, links or {})) is not None
    ]
    problems += [f"slab sampler: {failure}" for failure in series.failures]
    before = [reading for reading in series.readings if reading.at_ns < load[0]]
    during = [reading for reading in series.readings if load[0] <= reading.at_ns <= load[1]]
    for name, readings in (("before the load", before), ("in the load", during)):
        if len(readings) < FEWEST_READINGS:
            problems.append(f"slab: {len(readings)} readings {name}, fewer than {FEWEST_READINGS}")
    if problems:
        return SlabFigures(
            None,
            problems=tuple(problems),
            cpu_share=series.cpu_share,
            readings=len(during),
        )
    use = {
        name: _use(before, during, {name: sizes[name].pages_per_slab * page_bytes})
        for name in caches
    }
    scale = {name: sizes[name].pages_per_slab * page_bytes for name in caches}
    return SlabFigures(
        _use(before, during, scale),
        use,
        warnings=tuple(_warnings(series, during)),
        cpu_share=series.cpu_share,
        readings=len(during),
    )


def _unusable(
    name: str,
    series: SlabSeries,
    sizes: Mapping[str, SlabCache],
    links: Mapping[str, tuple[str, ...]],
) -> str | None:
    if others := links.get(name):
        return (
            f"slab cache {name} is merged with {', '.join(others)}, so its memory is not its own: "
            "boot that machine with slab_nomerge"
        )
    if name not in sizes:
        return (
            f"slab cache {name} is not in /proc/slabinfo: it is merged into another one (boot that "
            "machine with slab_nomerge), or its kernel has none of that name"
        )
    if any(name not in reading.slabs for reading in series.readings):
        return f"slab cache {name} is missing in some readings"
    return None


def _use(
    before: Sequence[SlabReading], during: Sequence[SlabReading], scale: Mapping[str, int]
) -> SlabUse:
    def memory(reading: SlabReading) -> int:
        return sum(reading.slabs[name] * size for name, size in scale.items())

    values = [memory(reading) for reading in during]
    return SlabUse(
        baseline=round(statistics.median(memory(reading) for reading in before)),
        peak=max(values),
        median=round(statistics.median(values)),
    )


def _warnings(series: SlabSeries, during: Sequence[SlabReading]) -> list[str]:
    found = []
    gaps = [b.at_ns - a.at_ns for a, b in itertools.pairwise(during)]
    if gaps and max(gaps) > _GAP * statistics.median(gaps):
        found.append(
            f"slab: {max(gaps) / 1e9:.2f} s without a reading, usually "
            f"{statistics.median(gaps) / 1e9:.2f} s: a peak may have been missed"
        )
    if series.cpu_share is None:
        found.append("slab: the sampler did not tell what CPU time it took")
    elif series.cpu_share > OVERHEAD_SHARE:
        found.append(
            f"slab: the sampler took {series.cpu_share:.1%} of a CPU, more than "
            f"{OVERHEAD_SHARE:.0%}"
        )
    return found
