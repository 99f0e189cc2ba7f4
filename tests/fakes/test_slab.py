"""Slab caches: recorded readings, series made for the arithmetic, faults, and fuzz."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vringlab.errors import InfrastructureError
from vringlab.workloads import slab
from vringlab.workloads.slab import SlabReading, SlabSeries

OUTPUTS = Path(__file__).parent / "outputs"
SLABINFO = (OUTPUTS / "slabinfo-2.1-6.18.txt").read_text()
SERIES = (OUTPUTS / "sample-1.0-slabs.txt").read_text()
LINKS = (OUTPUTS / "slab-links-6.18.txt").read_text()

SIZES = slab.parse(SLABINFO)
SECOND = 1_000_000_000


def test_every_line_of_a_recorded_slabinfo_is_read() -> None:
    lines = [line for line in SLABINFO.splitlines() if not line.startswith(("#", "slabinfo"))]
    assert len(SIZES) == len(lines) > 200
    line = next(line for line in lines if line.startswith("kmalloc-512 "))
    cache = SIZES["kmalloc-512"]
    columns = [int(number) for number in re.findall(r" (\d+)(?= |$)", line)]
    assert columns == [
        *(cache.active_objects, cache.objects, 512, cache.objects_per_slab, cache.pages_per_slab),
        *(0, 0, 0, columns[8], cache.slabs, 0),
    ]
    assert cache.memory() == cache.slabs * cache.pages_per_slab * 4096
    assert cache.memory(65536) == 16 * cache.memory()
    # The file's own arithmetic: what has room for the objects is what is counted.
    for one in SIZES.values():
        assert one.objects <= one.slabs * one.objects_per_slab
        assert one.objects_per_slab * one.object_bytes <= one.pages_per_slab * 4096


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no version"),
        ("cat: /proc/slabinfo: Permission denied\n", "names no version"),
        (SLABINFO.replace("version: 2.1", "version: 2.0"), "of version 2.0"),
        ("slabinfo - version: 2.1\n# name\n", "has no line of a cache"),
    ],
)
def test_what_is_no_slabinfo_is_an_error(text: str, said: str) -> None:
    with pytest.raises(InfrastructureError) as caught:
        slab.parse(text)
    assert said in caught.value.message
    assert caught.value.remedy


def test_merged_caches_are_known_from_the_links() -> None:
    links = slab.parse_links(LINKS)
    assert "kmalloc-512" not in links
    assert len(links) > 20
    for name, others in links.items():
        assert name not in others
        assert all(name in links[other] for other in others)
    made = slab.parse_links("a :0000192\nb :0000192\nc :0000064\nd kmalloc-64\n")
    assert made["a"] == ("b",)
    assert made["c"] == ()
    assert made["kmalloc-64"] == ("d",)


def test_a_recorded_series_is_read() -> None:
    series = slab.parse_series(SERIES)
    assert len(series.readings) == SERIES.count("@ ")
    assert set(series.readings[0].slabs) == set(slab.CACHES)
    assert series.cpu_share is not None
    assert 0 < series.cpu_share < 0.05
    assert series.failures == ()
    times = [reading.at_ns for reading in series.readings]
    assert times == sorted(set(times))


def test_a_recorded_load_is_seen() -> None:
    series = slab.parse_series(SERIES)
    begin = series.readings[5].at_ns
    load = (begin, series.readings[-1].at_ns)
    figures = slab.slab_figures(series, SIZES, load=load, links=slab.parse_links(LINKS))
    assert figures.problems == ()
    assert figures.total is not None
    values = {metric.name: metric.value for metric in figures.metrics()}
    assert values["slab_peak"] >= values["slab_median"]
    assert values["slab_peak"] > 0
    for name, cache in SIZES.items():
        if name in slab.CACHES:
            counts = [reading.slabs[name] for reading in series.readings if reading.at_ns >= begin]
            assert figures.caches[name].peak == max(counts) * cache.pages_per_slab * 4096


def made(counts: list[int], step: int = SECOND, **fields: object) -> SlabSeries:
    """One reading a step from time 0, of kmalloc-512 alone."""
    readings = tuple(
        SlabReading(i * step, {"kmalloc-512": count}) for i, count in enumerate(counts)
    )
    return SlabSeries(readings, cpu_share=0.001, **fields)  # type: ignore[arg-type]


PAGES = SIZES["kmalloc-512"].pages_per_slab * 4096


def figures_of(series: SlabSeries, load: tuple[int, int]) -> slab.SlabFigures:
    return slab.slab_figures(series, SIZES, load=load, caches=("kmalloc-512",))


def test_peak_and_median_are_over_the_median_before() -> None:
    # Before: 10, 12, 11 -> 11. In the load: 50, 90, 70, 60 -> peak 90, median 65. After: ignored.
    series = made([10, 12, 11, 50, 90, 70, 60, 500])
    figures = figures_of(series, (3 * SECOND, 6 * SECOND))
    assert figures.problems == figures.warnings == ()
    assert figures.total is not None
    assert figures.total == figures.caches["kmalloc-512"]
    assert (figures.total.baseline, figures.total.peak) == (11 * PAGES, 90 * PAGES)
    assert figures.total.median == 65 * PAGES
    assert [(m.name, m.value, m.unit) for m in figures.metrics()] == [
        ("slab_peak", 79.0 * PAGES, "byte"),
        ("slab_median", 54.0 * PAGES, "byte"),
    ]
    assert figures.readings == 4
    bytes_ = figures.context()["bytes"]
    assert isinstance(bytes_, dict)
    assert bytes_["total"]["peak_over"] == 79 * PAGES


def test_the_total_peaks_when_the_sum_does() -> None:
    names = ("kmalloc-512", "skbuff_head_cache")
    rows = [(1, 1)] * 3 + [(10, 1), (1, 8), (4, 4)]
    readings = tuple(
        SlabReading(i, dict(zip(names, row, strict=True))) for i, row in enumerate(rows)
    )
    sizes = [SIZES[name].pages_per_slab * 4096 for name in names]
    figures = slab.slab_figures(
        SlabSeries(readings, cpu_share=0.0), SIZES, load=(3, 5), caches=names
    )
    assert figures.total is not None
    sums = [sum(n * size for n, size in zip(row, sizes, strict=True)) for row in rows]
    assert figures.total.peak == max(sums[3:])
    assert figures.total.peak < sum(use.peak for use in figures.caches.values())


def test_a_missing_cache_is_a_named_problem() -> None:
    figures = slab.slab_figures(
        made([1] * 9), {}, load=(4 * SECOND, 8 * SECOND), caches=("kmalloc-512",)
    )
    assert figures.metrics() == ()
    assert "slab cache kmalloc-512 is not in /proc/slabinfo" in figures.problems[0]
    assert "slab_nomerge" in figures.problems[0]


def test_a_merged_cache_is_a_named_problem() -> None:
    figures = slab.slab_figures(
        made([1] * 9),
        SIZES,
        load=(4 * SECOND, 8 * SECOND),
        caches=("kmalloc-512",),
        links={"kmalloc-512": ("task_group", "pool_workqueue")},
    )
    assert figures.total is None
    assert "kmalloc-512 is merged with task_group, pool_workqueue" in figures.problems[0]


def test_too_few_readings_are_no_baseline_and_no_peak() -> None:
    assert (
        "2 readings before the load"
        in figures_of(made([1] * 9), (2 * SECOND, 8 * SECOND)).problems[0]
    )
    assert (
        "1 readings in the load" in figures_of(made([1] * 9), (8 * SECOND, 8 * SECOND)).problems[0]
    )


def test_an_unreadable_file_is_a_named_problem() -> None:
    text = SERIES.replace("= /sys/kernel/slab/kmalloc-512/slabs", "! /sys/x: Permission denied")
    series = slab.parse_series(text)
    assert series.failures == ("/sys/x: Permission denied",)
    figures = slab.slab_figures(series, SIZES, load=(0, 2**63))
    assert any("kmalloc-512 is missing in some readings" in text for text in figures.problems)
    assert any("/sys/x: Permission denied" in text for text in figures.problems)
    with pytest.raises(InfrastructureError, match="no reading of a slab cache: /sys/x"):
        slab.parse_series("@ 1\n! /sys/x: Permission denied\n")


def test_gaps_and_the_samplers_own_cost_are_warned_of() -> None:
    readings = tuple(SlabReading(t, {"kmalloc-512": 1}) for t in (0, 1, 2, 3, 4, 5, 20, 21, 22))
    figures = figures_of(SlabSeries(readings, cpu_share=0.02), (3, 22))
    assert figures.total is not None
    assert "a peak may have been missed" in figures.warnings[0]
    assert "took 2.0% of a CPU" in figures.warnings[1]
    figures = figures_of(SlabSeries(readings[:6]), (3, 5))
    assert figures.warnings == ("slab: the sampler did not tell what CPU time it took",)


def test_a_series_of_slabinfo_is_understood() -> None:
    block = "\n".join(line for line in SLABINFO.splitlines() if line.startswith("kmalloc-512 "))
    text = f"@ 5\n= /proc/slabinfo\n{block}\n@ 6\n= /proc/slabinfo\n{block}\n"
    end = "# samples 2 late 1 cpu_ns 10 elapsed_ns 1000\n"
    series = slab.parse_series(text + end)
    assert [reading.slabs for reading in series.readings] == [
        {"kmalloc-512": SIZES["kmalloc-512"].slabs}
    ] * 2
    assert (series.late, series.cpu_share) == (1, 0.01)
    # Killed: the last reading may be cut off.
    assert len(slab.parse_series(text).readings) == 1


@given(st.integers(0, len(SERIES)), st.text(max_size=5))
def test_damaged_text_never_breaks_the_parsers(at: int, noise: str) -> None:
    for text in (SERIES[:at] + noise + SERIES[at:], SERIES[:at]):
        try:
            series = slab.parse_series(text)
        except InfrastructureError:
            continue
        slab.slab_figures(series, SIZES, load=(0, 2**64))
    slab.parse_links(noise + LINKS[at:])
