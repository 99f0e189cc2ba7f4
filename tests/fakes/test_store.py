"""The run folder: whole cells, one writer, derived tables, and what damage looks like."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.fakes.fake_campaign import plan

from vringlab.campaign import catalogue, files, tables
from vringlab.campaign.plan import Cell, Plan
from vringlab.campaign.store import CellMeta, Store
from vringlab.errors import InfrastructureError, TransientError, UserError
from vringlab.workloads.base import Histogram, Metric, Outcome

META = CellMeta("b01", "here", "simulated", "abcd")


def outcome(value: float = 2.0, **changes: object) -> Outcome:
    fields: dict[str, object] = {
        "metrics": (Metric("rtt_mean", value, "ns"), Metric("round_trips", 5.0, "1/s")),
        "histograms": (Histogram("rtt", "ns", ((1.0, 3), (2.0, 4))),),
        "started": "2026-01-01T00:00:00+00:00",
        "window_s": 1.5,
        "raw": {"tool.json": b"{}\n"},
        "context": {"ring": 256},
    }
    return Outcome(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def made() -> Plan:
    return plan(boots=1, blocks=2)


def fill(store: Store, cells: list[Cell] | None = None, meta: CellMeta = META) -> None:
    for cell in store.plan.cells if cells is None else cells:
        store.write_cell(cell, outcome(), meta)


def open_elsewhere(path: Path) -> str:
    """What another process hears when it opens the run."""
    code = (
        "import sys, pathlib; from vringlab.campaign.store import Store\n"
        "try: Store.open(pathlib.Path(sys.argv[1])); print('opened')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_a_new_run_has_its_name_its_plan_and_its_seed(tmp_path: Path, made: Plan) -> None:
    now = datetime(2026, 11, 30, 18, 15, 0, tzinfo=UTC)
    with Store.create(made, tmp_path, now) as store:
        assert store.run_id.startswith("20261130T181500-vsock-direct-enqueue-quick-")
        assert store.path == tmp_path / store.run_id
        assert store.provenance()["seeds"] == {"plan": 1}
    with Store.open(store.path) as again:
        assert again.plan == made
        assert again.run_id == store.run_id
    assert [path.name for path in tmp_path.iterdir()] == [store.run_id]


def test_only_one_process_has_a_run_open(tmp_path: Path, made: Plan) -> None:
    with Store.create(made, tmp_path) as store:
        heard = open_elsewhere(store.path)
        assert heard.startswith("UserError")
        assert f"process {os.getpid()}" in heard
        assert catalogue.describe(store.path).pid == os.getpid()
        assert catalogue.describe(store.path).state == "running"
    assert open_elsewhere(store.path) == "opened\n"
    assert catalogue.describe(store.path).state == "incomplete"


def test_a_cell_is_kept_with_all_that_was_measured(tmp_path: Path, made: Plan) -> None:
    with Store.create(made, tmp_path) as store:
        cell = made.cells[0]
        folder = store.write_cell(cell, outcome(warnings=("text before JSON",)), META)
        assert (folder / "tool.json").read_bytes() == b"{}\n"
        document = store.read_cell(cell.cell_id)
        assert document["format"] == 1
        assert document["cell"]["arm_name"] == cell.arm_name
        assert (document["boot"], document["host_kind"]) == ("b01", "simulated")
        assert document["build_id"] == "abcd"
        assert document["warnings"] == ["text before JSON"]
        assert document["context"] == {"ring": 256}
        assert store.done() == {cell.cell_id}


def test_what_is_left_is_every_cell_of_the_incomplete_blocks(tmp_path: Path, made: Plan) -> None:
    with Store.create(made, tmp_path) as store:
        assert store.remaining() == list(made.cells)
        fill(store, list(made.cells[:5]))
        assert store.complete_blocks() == {1}
        assert store.remaining() == [cell for cell in made.cells if cell.block == 2]
        fill(store, list(made.cells[5:]))
        assert store.remaining() == []


def test_leftovers_of_killed_writers_are_cleaned_on_open(tmp_path: Path, made: Plan) -> None:
    with Store.create(made, tmp_path) as store:
        fill(store, list(made.cells[:1]))
    cells = store.path / tables.CELLS
    (cells / f"{files.UNFINISHED}{made.cells[1].cell_id}").mkdir()
    (cells / f"{files.UNFINISHED}{made.cells[1].cell_id}" / "sample.json").write_text('{"form')
    (store.path / f"{files.UNFINISHED}samples.parquet").write_bytes(b"PAR1")
    with Store.open(store.path) as again:
        assert again.done() == {made.cells[0].cell_id}
        assert not list(store.path.rglob(f"{files.UNFINISHED}*"))


def test_folders_of_killed_creators_are_removed_but_not_those_of_living_ones(
    tmp_path: Path, made: Plan
) -> None:
    dead, young, alive = (tmp_path / f"{files.UNFINISHED}{n}" for n in ("dead", "young", "alive"))
    with Store.create(made, tmp_path) as living:
        shutil.copytree(living.path, dead)
        young.mkdir()
        living.path.rename(alive)
        Store.create(made, tmp_path).close()
        assert not dead.exists()
        assert young.exists()
        assert alive.exists()
    assert all(info.state == "incomplete" for info in catalogue.list_runs(tmp_path))


@pytest.mark.parametrize("name", ["../escape", "a/b", "sample.json", "", ".."])
def test_a_raw_file_cannot_leave_its_cell(tmp_path: Path, made: Plan, name: str) -> None:
    with Store.create(made, tmp_path) as store:
        with pytest.raises(InfrastructureError, match="raw file"):
            store.write_cell(made.cells[0], outcome(raw={name: b"x"}), META)
        assert not list((store.path / tables.CELLS).iterdir())


def test_a_cell_is_not_written_twice(tmp_path: Path, made: Plan) -> None:
    with Store.create(made, tmp_path) as store:
        fill(store, list(made.cells[:1]))
        before = store.read_cell(made.cells[0].cell_id)
        with pytest.raises(InfrastructureError):
            store.write_cell(made.cells[0], outcome(9.0), META)
        assert store.read_cell(made.cells[0].cell_id) == before


# A full disk


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_leaves_nothing_half_written(
    tmp_path: Path, made: Plan, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with Store.create(made, tmp_path) as store:
        fill(store, list(made.cells[:4]))
        store.consolidate()
        held = {name: (store.path / name).read_bytes() for name in (tables.SAMPLES, "plan.json")}

        def full(_: int) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            for write in (
                lambda: store.write_cell(made.cells[4], outcome(), META),
                lambda: store.update_provenance({"new": 1}),
                lambda: store.write_time({"boot": 1.0}),
            ):
                with pytest.raises(InfrastructureError, match="no space left") as caught:
                    write()
                assert not isinstance(caught.value, TransientError)
                assert "free space" in caught.value.remedy
            with pytest.raises(InfrastructureError, match="no space left"):
                Store.create(made, tmp_path / "other")
        assert not list((tmp_path / "other").iterdir())
        assert not list(store.path.rglob(f"{files.UNFINISHED}*"))
        assert len(store.done()) == 4
        assert all((store.path / name).read_bytes() == held[name] for name in held)
        # With space again it goes on.
        fill(store, list(made.cells[4:]))
        store.consolidate()
        assert pq.read_table(store.path / tables.SAMPLES).num_rows == 2 * len(made.cells)


def test_a_write_that_the_kernel_cuts_short_leaves_nothing(tmp_path: Path, made: Plan) -> None:
    with Store.create(made, tmp_path) as store:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, before[1]))
        try:
            with pytest.raises(InfrastructureError, match="no space left"):
                store.write_cell(made.cells[0], outcome(raw={"big": b"x" * 1_000_000}), META)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not list((store.path / tables.CELLS).iterdir())
        assert not store.done()


def test_a_folder_that_vanished_is_named(tmp_path: Path, made: Plan) -> None:
    with Store.create(made, tmp_path) as store:
        shutil.rmtree(store.path)
        with pytest.raises(InfrastructureError, match="cannot write"):
            store.write_cell(made.cells[0], outcome(), META)


# Tables


def test_the_tables_hold_one_row_per_sample_and_metric(tmp_path: Path, made: Plan) -> None:
    with Store.create(made, tmp_path) as store:
        fill(store)
        store.consolidate()
    samples = pq.read_table(store.path / tables.SAMPLES).to_pylist()
    assert len(samples) == 2 * len(made.cells)
    first = next(row for row in samples if row["cell_id"] == made.cells[0].cell_id)
    assert first == {
        "run_id": store.run_id,
        "experiment": "vsock-direct-enqueue",
        "cell_id": made.cells[0].cell_id,
        "block": 1,
        "position": 1,
        "boot": "b01",
        "host": "here",
        "host_kind": "simulated",
        "arm": made.cells[0].arm_name,
        "base_kernel": "debian:6.12",
        "workload": "fake",
        "param_payload": 1,
        "param_mode": "plain",
        "metric": "rtt_mean",
        "value": 2.0,
        "unit": "ns",
        "valid": True,
        "reason": "",
        "started": "2026-01-01T00:00:00+00:00",
        "window_s": 1.5,
    }
    bins = pq.read_table(store.path / tables.HISTOGRAMS).to_pylist()
    assert len(bins) == 2 * len(made.cells)
    assert {(row["metric"], row["value"], row["count"], row["unit"]) for row in bins} == {
        ("rtt", 1.0, 3, "ns"),
        ("rtt", 2.0, 4, "ns"),
    }
    assert "queued.aa" in {row["arm"] for row in samples}


def test_an_invalid_sample_is_visible_also_without_figures(tmp_path: Path, made: Plan) -> None:
    nothing = outcome(metrics=(), histograms=(), problems=("no output", "rx stayed 0"))
    partly = outcome(math.nan, problems=("rtt_mean is nan",))
    with Store.create(made, tmp_path) as store:
        store.write_cell(made.cells[0], nothing, META)
        store.write_cell(made.cells[1], partly, META)
        store.consolidate()
    rows = pq.read_table(store.path / tables.SAMPLES).to_pylist()
    assert [row["metric"] for row in rows] == ["none", "rtt_mean", "round_trips"]
    assert rows[0]["reason"] == "no output; rx stayed 0"
    assert not any(row["valid"] for row in rows)
    assert math.isnan(rows[0]["value"])
    assert math.isnan(rows[1]["value"])


def test_each_cell_is_read_once_however_often_the_tables_are_brought_up_to_date(
    tmp_path: Path, made: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    real = tables.read_sample

    def counting(path: Path) -> dict[str, Any]:
        read.append(path)
        return real(path)

    monkeypatch.setattr(tables, "read_sample", counting)
    with Store.create(made, tmp_path) as store:
        for cell in made.cells:
            fill(store, [cell])
            store.consolidate(force=False)
        store.consolidate()
        store.consolidate()
    assert len(read) == len(made.cells)
    assert pq.read_table(store.path / tables.SAMPLES).num_rows == 2 * len(made.cells)


@pytest.mark.parametrize("name", [tables.SAMPLES, tables.HISTOGRAMS])
@pytest.mark.parametrize("damage", ["missing", "truncated", "garbage"])
def test_a_damaged_table_is_made_anew(tmp_path: Path, made: Plan, name: str, damage: str) -> None:
    with Store.create(made, tmp_path) as store:
        fill(store)
        store.consolidate()
        expected = pq.read_table(store.path / name).to_pylist()
        path = store.path / name
        content = path.read_bytes()
        path.unlink()
        if damage != "missing":
            path.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"no")
        store.consolidate()
        assert pq.read_table(path).to_pylist() == expected


def test_a_kill_between_the_two_tables_doubles_nothing(tmp_path: Path, made: Plan) -> None:
    with Store.create(made, tmp_path) as store:
        fill(store, list(made.cells[:4]))
        store.consolidate()
        old = (store.path / tables.SAMPLES).read_bytes()
        fill(store, list(made.cells[4:]))
        store.consolidate()
        (store.path / tables.SAMPLES).write_bytes(old)
        store.consolidate()
        assert pq.read_table(store.path / tables.SAMPLES).num_rows == 2 * len(made.cells)
        assert pq.read_table(store.path / tables.HISTOGRAMS).num_rows == 2 * len(made.cells)


def test_superseded_cells_stay_on_disk_and_leave_the_tables(tmp_path: Path, made: Plan) -> None:
    block = [cell for cell in made.cells if cell.block == 1]
    with Store.create(made, tmp_path) as store:
        fill(store, block[:2])
        store.consolidate()
        assert store.supersede(block) == 2
        assert not store.done()
        store.consolidate()
        assert pq.read_table(store.path / tables.SAMPLES).num_rows == 0
        fill(store, block, CellMeta("b01r1", "here", "simulated"))
        store.consolidate()
    rows = pq.read_table(store.path / tables.SAMPLES).to_pylist()
    assert {row["boot"] for row in rows} == {"b01r1"}
    assert len(rows) == 2 * len(block)
    assert pq.read_table(store.path / tables.HISTOGRAMS).num_rows == 2 * len(block)
    assert {path.name for path in (store.path / "superseded").iterdir()} == {
        f"{cell.cell_id}@b01" for cell in block[:2]
    }


def test_a_damaged_cell_is_named(tmp_path: Path, made: Plan) -> None:
    with Store.create(made, tmp_path) as store:
        fill(store, list(made.cells[:1]))
        path = store.path / tables.CELLS / made.cells[0].cell_id / "sample.json"
        content = path.read_text()
        for text, says in (
            (content[:40], "damaged"),
            ("[]", "damaged"),
            (json.dumps({**json.loads(content), "format": 7}), "format 7"),
            (content.replace('"problems"', '"trouble"'), "problems"),
        ):
            path.write_text(text)
            with pytest.raises(UserError, match=says) as caught:
                store.consolidate()
            assert str(path) in str(caught.value)


# Boots, provenance, time


def test_a_guest_that_is_booted_again_has_another_identity(tmp_path: Path, made: Plan) -> None:
    with Store.create(made, tmp_path) as store:
        assert [store.begin_boot("b01"), store.begin_boot("b01")] == ["b01", "b01r1"]
    with Store.open(store.path) as again:
        assert [again.begin_boot("b01"), again.begin_boot("b02")] == ["b01r2", "b02"]
        assert set(again.provenance()["boots"]) == {"b01", "b01r1", "b01r2", "b02"}


def test_provenance_merges_nested_values_and_keeps_the_rest(tmp_path: Path, made: Plan) -> None:
    with Store.create(made, tmp_path) as store:
        store.update_provenance({"arms": {"queued": {"build_id": "1"}}, "tools": ["fio 3.39"]})
        store.update_provenance({"arms": {"direct": {"build_id": "2"}}, "tools": ["fio 3.40"]})
        found = store.provenance()
    assert found["arms"] == {"queued": {"build_id": "1"}, "direct": {"build_id": "2"}}
    assert found["tools"] == ["fio 3.40"]
    assert found["run"]["id"] == store.run_id


def test_time_adds_up_over_attempts(tmp_path: Path, made: Plan) -> None:
    with Store.create(made, tmp_path) as store:
        store.write_time({"boot": 1.0, "measure": 2.0})
        store.write_time({"boot": 1.0, "measure": 4.0}, "interrupted")
    with Store.open(store.path) as again:
        again.write_time({"boot": 3.0, "measure": 5.0}, "complete")
    found = json.loads((store.path / "time.json").read_text())
    assert found["phases"] == {"boot": 4.0, "measure": 9.0}
    assert found["total_s"] == 13.0
    assert [attempt["status"] for attempt in found["attempts"]] == ["interrupted", "complete"]


# Opening and finding


def test_what_is_no_run_folder_is_refused(tmp_path: Path, made: Plan) -> None:
    with pytest.raises(UserError, match="no run folder"):
        Store.open(tmp_path / "none")
    with pytest.raises(UserError, match="not a run folder"):
        Store.open(tmp_path)
    with Store.create(made, tmp_path) as store:
        pass
    (store.path / "provenance.json").write_text("{")
    with pytest.raises(UserError, match=r"provenance\.json is damaged"):
        Store.open(store.path)
    (store.path / "bundle.json").write_text("{}")
    with pytest.raises(UserError, match="recorded bundle"):
        Store.open(store.path)


def test_runs_are_listed_with_their_state(tmp_path: Path, made: Plan) -> None:
    assert catalogue.list_runs(tmp_path / "none") == []
    stamps = [datetime(2026, 1, day, tzinfo=UTC) for day in (3, 1, 2)]
    stores = [Store.create(made, tmp_path, stamp) for stamp in stamps]
    fill(stores[0])
    fill(stores[1], list(made.cells[:3]))
    stores[2].update_provenance({"run": {"status": "decided"}})
    for store in stores:
        store.close()
    (tmp_path / "notes").mkdir()
    listed = catalogue.list_runs(tmp_path)
    assert [(info.run_id[:8], info.done, info.total, info.state) for info in listed[:3]] == [
        ("20260101", 3, 8, "incomplete"),
        ("20260102", 0, 8, "decided"),
        ("20260103", 8, 8, "complete"),
    ]
    assert listed[3].state == "damaged"
    assert catalogue.latest(runs_dir=tmp_path) == stores[0].path
    assert catalogue.latest("vsock-direct-enqueue", tmp_path) == stores[0].path
    with pytest.raises(UserError, match="no run of virtio-net-napi-tx"):
        catalogue.latest("virtio-net-napi-tx", tmp_path)


def test_a_run_is_found_by_path_id_part_or_latest(tmp_path: Path, made: Plan) -> None:
    with pytest.raises(UserError, match="make one"):
        catalogue.find_run("latest", tmp_path)
    stamps = [datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2)]
    first, second = (Store.create(made, tmp_path, stamp) for stamp in stamps)
    for name, store in (
        (str(first.path), first),
        (first.run_id, first),
        ("20260101", first),
        (second.run_id[-4:], second),
        ("latest", second),
    ):
        assert catalogue.find_run(name, tmp_path) == store.path
    with pytest.raises(UserError) as caught:
        catalogue.find_run("vsock", tmp_path)
    assert "names 2 runs" in str(caught.value)
    assert first.run_id in str(caught.value)
    with pytest.raises(UserError) as caught:
        catalogue.find_run("20260101T000000-vsock-direct-enqueue-full-zzzz", tmp_path)
    assert first.run_id in str(caught.value)
    first.close()
    second.close()
