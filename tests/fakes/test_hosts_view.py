"""What is shown of a run on several hosts, and that a campaign's cost grows no faster than it."""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tests.fakes.fake_campaign import plan

from vringlab.analysis.frames import RunFrames, load_run
from vringlab.analysis.pairing import pair
from vringlab.analysis.stats import effect
from vringlab.campaign.fake import FakeSession, find
from vringlab.campaign.runner import execute
from vringlab.campaign.store import Store
from vringlab.report.hosts_view import cluster_figure, hosts_of, level_table, levels
from vringlab.settings import settings


def measured(folder: Path, names: str, boots: int) -> RunFrames:
    hosts = {
        name: partial(FakeSession, seed, {"direct": 0.8}, delay_s=0.002)
        for seed, name in enumerate(names)
    }
    with Store.create(plan(boots=boots, blocks=2), folder) as store:
        return load_run(execute(store, hosts, find=find).path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFrames:
    """Three hosts, two boots each."""
    return measured(tmp_path_factory.mktemp("runs"), "abc", 6)


def test_each_host_has_a_line(run: RunFrames) -> None:
    table = hosts_of(run).set_index("host")
    assert list(table.index) == ["a", "b", "c"]
    assert table["boots"].sum() == 6
    assert table["begun"].sum() == 6
    assert table["samples"].sum() == 48
    assert set(table["arms"]) == {"direct, queued, queued.aa, rfc-v1"}
    assert table["in timed windows"].str.endswith("%").all()


def test_the_widest_level_is_what_verdicts_count(run: RunFrames) -> None:
    pairs = pair(run.samples, "rtt_mean", "direct", "queued")
    blocks, boots, hosts = levels(pairs)
    assert [each.number for each in (blocks, boots, hosts)] == [12, 6, 3]
    found = effect(run.samples, "rtt_mean", "direct", "queued", draws=0)
    assert found.unit == "host"
    assert found.log_mean == pytest.approx(hosts.log_mean)
    assert np.log(found.interval.high) == pytest.approx(hosts.log_mean + hosts.half)
    table = level_table(run, "rtt_mean", "direct", "fake")
    assert list(table["counted"]) == ["blocks", "boots", "hosts"]
    assert table.iloc[:, 2].str.fullmatch(r"-\d+\.\d % \[-\d+\.\d, [+-]?\d+\.\d\]").all()


def test_the_figure_says_how_few_hosts_there_are(run: RunFrames) -> None:
    figure = cluster_figure(run, "rtt_mean", "direct", "fake")
    assert "verdicts count hosts" in figure.caption
    assert "3 hosts leave 2 degrees of freedom" in figure.caption
    texts = {text.get_text() for axes in figure.axes for text in axes.get_yticklabels()}
    assert {"a", "b", "c", "counting hosts (3)", "counting blocks (12)"} <= texts


def test_a_run_on_one_host_counts_boots(tmp_path: Path) -> None:
    run = measured(tmp_path, "a", 2)
    figure = cluster_figure(run, "rtt_mean", "direct", "fake", width="narrow")
    assert "verdicts count boots" in figure.caption
    assert str(level_table(run, "rtt_mean", "direct", "fake").iloc[2, 2]).endswith("[n=1]")
    (line,) = hosts_of(run).to_dict("records")
    assert line["in timed windows"] == ""


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = settings().root / "scripts" / "bench_campaign.py"
    spec = importlib.util.spec_from_file_location("bench_campaign", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(600)
def test_a_cell_of_a_large_campaign_costs_about_as_much_as_one_of_a_small(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Waiting for the disk is most of it, and the same for each.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    # In processor time, which other jobs change little; `scripts/bench_campaign.py` is exact.
    per_cell = {}
    for cells in (400, 1600):
        folder = tmp_path / str(cells)
        folder.mkdir()
        costs = bench.growth(cells, folder)
        per_cell[cells] = sum(cost.cpu for cost in costs.values()) / cells
    assert per_cell[1600] < 2 * per_cell[400], per_cell
