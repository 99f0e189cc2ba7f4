"""Raw latencies: read, binned and summarised as the numbers themselves say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vringlab.analysis import latencies
from vringlab.errors import MeasurementInvalid, UserError
from vringlab.report import raw_latencies


@given(st.lists(st.floats(min_value=0, max_value=1e15), min_size=1, max_size=200))
def test_histogram_keeps_every_latency_within_its_error(values: list[float]) -> None:
    found = np.asarray(values)
    table = latencies.histogram(found)
    assert table["count"].sum() == found.size
    assert table["value"].is_monotonic_increasing
    expanded = np.repeat(table["value"].to_numpy(), table["count"].to_numpy())
    assert np.allclose(expanded, np.sort(found), rtol=1 / 256, atol=1e-300)


def test_summary_is_that_of_numpy() -> None:
    values = np.random.default_rng(1).lognormal(13, 0.5, 100_000)
    found = latencies.summary(values)
    assert found["mean"] == pytest.approx(values.mean())
    assert found["p99"] == pytest.approx(np.percentile(values, 99))
    assert found["min"] < found["p1"] < found["p50"] < found["mean"] < found["max"]


def test_a_million_lines_come_back(tmp_path: Path) -> None:
    values = np.random.default_rng(2).integers(100, 10**9, 1_000_000)
    text = tmp_path / "raw.txt"
    text.write_text("\n".join(map(str, values.tolist())) + "\n")
    assert (latencies.load(text) == values).all()
    np.save(tmp_path / "raw.npy", values)
    assert (latencies.load(tmp_path / "raw.npy") == values).all()
    table = latencies.histogram(values.astype(float))
    # However many there are, 23 octaves hold them.
    assert len(table) <= 24 * latencies.BINS_PER_OCTAVE


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("", MeasurementInvalid),
        ("12\n-3\n", MeasurementInvalid),
        ("12\nnan\n", MeasurementInvalid),
        ("12\nlatency\n", UserError),
        ("12 13\n14\n", UserError),
    ],
)
def test_what_is_no_latency_is_named(tmp_path: Path, content: str, kind: type[Exception]) -> None:
    path = tmp_path / "raw.txt"
    path.write_text(content)
    with pytest.raises(kind, match=r"raw\.txt"):
        latencies.load(path)
    with pytest.raises(UserError, match="cannot be read"):
        latencies.load(tmp_path / "absent.txt")


def test_figure_and_table_show_every_file() -> None:
    rng = np.random.default_rng(3)
    samples = {
        "before.txt": rng.lognormal(13, 0.4, 5000),
        "after.txt": rng.lognormal(12.8, 0.4, 10),
    }
    drawn = raw_latencies.figure(samples)
    labels = {text.get_text() for text in drawn.legends[0].get_texts()}
    assert labels == set(samples)
    for axes in drawn.axes:
        assert len(axes.lines) == len(samples)
    columns = [column.header for column in raw_latencies.table(samples).columns]
    assert columns == ["", *samples]
