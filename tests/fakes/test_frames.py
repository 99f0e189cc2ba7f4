"""A run folder as data frames: what is read, what is rebuilt, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.fakes.fake_campaign import experiment, plan

from vringlab.analysis.frames import RunFrames, bundle, load_run
from vringlab.campaign.experiment import WorkloadUse
from vringlab.campaign.fake import FakeParams, FakeSession, FakeWorkload, find
from vringlab.campaign.plan import Plan, make_plan
from vringlab.campaign.runner import execute
from vringlab.campaign.store import Store
from vringlab.errors import InfrastructureError, MeasurementInvalid, UserError
from vringlab.workloads.base import Params, Workload

FAULTS = {3: MeasurementInvalid("rx stayed 0")}


class OtherParams(Params):
    ring_size: int = 256
    ring: str = "split"


def find_two(name: str) -> Workload:
    return FakeWorkload(name, params=OtherParams if name.startswith("pktgen") else FakeParams)


def two_workloads() -> Plan:
    uses = (
        WorkloadUse(workload="fio-like", matrix={"payload": [64, 4096]}),
        WorkloadUse(workload="pktgen-like", matrix={"ring": ["split", "packed"]}),
    )
    mixed = experiment(boots=2, blocks=1).model_copy(update={"workloads": uses})
    return make_plan(mixed, "quick", 1, find=find_two)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A complete run of two workloads with different parameters and some invalid samples."""
    with Store.create(two_workloads(), tmp_path / "runs") as store:
        return execute(store, lambda: FakeSession(faults=FAULTS), find=find_two).path


@pytest.fixture
def recorded(run: Path, tmp_path: Path) -> Path:
    return bundle(run, tmp_path / "bundle")


def same(left: RunFrames, right: RunFrames) -> None:
    order = ["cell_id", "metric", "value"]
    pd.testing.assert_frame_equal(left.samples, right.samples)
    pd.testing.assert_frame_equal(
        left.histograms.sort_values(order, ignore_index=True),
        right.histograms.sort_values(order, ignore_index=True),
    )


def test_samples_are_in_the_order_of_measuring_and_parameters_keep_their_types(run: Path) -> None:
    frames = load_run(run)
    assert frames.complete
    assert frames.notes == ()
    assert frames.params == tuple(f"param_{name}" for name in frames.plan.params)
    assert list(dict.fromkeys(frames.samples["cell_id"])) == [
        cell.cell_id for cell in frames.plan.cells
    ]
    pktgen = frames.samples[frames.samples["workload"] == "pktgen-like"]
    assert set(pktgen["param_ring_size"]) == {256}
    assert pktgen["param_payload"].isna().all()
    assert frames.samples["param_payload"].dtype == "Int64"
    assert set(pktgen["metric"]) == {"pps_tx", "pps_rx", "tx_interrupts", "kicks"}


def test_whole_numbers_without_gaps_are_plain_integers(tmp_path: Path) -> None:
    with Store.create(plan(1, 1), tmp_path) as store:
        path = execute(store, FakeSession, find=find).path
    assert load_run(path).samples["param_payload"].dtype == "int64"


def test_invalid_samples_keep_their_reason(run: Path) -> None:
    frames = load_run(run)
    invalid = frames.samples[~frames.samples["valid"]]
    assert set(invalid["reason"]) == {"simulated short reads", "rx stayed 0"}
    assert set(invalid.loc[invalid["reason"] == "rx stayed 0", "metric"]) == {"none"}
    short = invalid[invalid["reason"] == "simulated short reads"]
    assert set(short["param_payload"]) == {4096}
    assert set(frames.samples.loc[frames.samples["valid"], "reason"]) == {""}


def test_histograms_count_every_message(run: Path) -> None:
    frames = load_run(run)
    counts = frames.histograms.groupby("cell_id")["count"].sum()
    assert set(counts) == {400}
    assert set(counts.index) <= set(frames.samples["cell_id"])


def restored(boot_id: str) -> dict[str, str]:
    return {"how": "restored", "boot_id": boot_id}


def test_boots_restored_from_one_saved_lab_are_one_cluster(run: Path, tmp_path: Path) -> None:
    edit(run / "provenance.json", boots={"b01": restored("same"), "b02": restored("same")})
    frames = load_run(run)
    assert set(frames.samples["boot"]) == {"b01"}
    assert frames.samples["block"].nunique() == 2
    note = "restored from one saved lab, so one boot to the statistics: b02 and b01"
    assert frames.notes == (note,)
    # Its files say what ran under which name, and so does a bundle's.
    kept = bundle(run, tmp_path / "bundle")
    assert set(pd.read_parquet(kept / "samples.parquet")["boot"]) == {"b01", "b02"}
    assert load_run(kept).notes == (note,)
    same(frames, load_run(kept))


@pytest.mark.parametrize(
    "boots",
    [
        {"b01": restored("one"), "b02": restored("other")},
        {"b01": restored("same"), "b02": {"how": "booted"}},
        # Of the one that was begun again after its guest had died, nothing is left.
        {"b01": restored("same"), "b02": restored("other"), "b01r1": restored("same")},
        {"b01": restored(""), "b02": restored("")},
        {"b01": 1, "b02": [], "b03": None},
        [],
        "b01",
        None,
    ],
    ids=str,
)
def test_all_other_boots_are_clusters_of_their_own(run: Path, boots: object) -> None:
    edit(run / "provenance.json", boots=boots)
    frames = load_run(run)
    assert set(frames.samples["boot"]) == {"b01", "b02"}
    assert frames.notes == ()


@pytest.mark.parametrize("name", ["samples.parquet", "histograms.parquet"])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_tables_are_made_from_the_cells_where_they_are_damaged(
    run: Path, name: str, damage: str
) -> None:
    before = load_run(run)
    content = (run / name).read_bytes()
    (run / name).unlink()
    if damage == "truncated":
        (run / name).write_bytes(content[: len(content) // 2])
    after = load_run(run)
    same(before, after)
    assert name in after.notes[0]
    assert f"{len(before.plan.cells)} cells" in after.notes[0]


def test_a_run_that_was_killed_before_its_tables_were_written_is_read(tmp_path: Path) -> None:
    made = two_workloads()
    with Store.create(made, tmp_path) as store:
        session = FakeSession(faults={12: InfrastructureError("broken")})
        with pytest.raises(InfrastructureError):
            execute(store, lambda: session, find=find_two)
        whole = load_run(store.path)
        assert not whole.complete
        for name in ("samples.parquet", "histograms.parquet"):
            (store.path / name).unlink()
        same(whole, load_run(store.path))
        # While it is running, too: the lock keeps nobody from reading.
        assert load_run(store.path).samples["cell_id"].nunique() == 11


def test_a_run_without_a_cell_is_empty(tmp_path: Path) -> None:
    with Store.create(plan(), tmp_path) as store:
        frames = load_run(store.path)
    assert frames.samples.empty
    assert "value" in frames.samples
    assert not frames.complete
    assert frames.time == {}
    assert frames.host_kind == ""
    with pytest.raises(UserError, match="no samples"):
        bundle(store.path, tmp_path / "bundle")


def edit(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "no run folder"),
    "no plan": (lambda path: (path / "plan.json").unlink(), "not a run folder"),
    "half a plan": (lambda path: (path / "plan.json").write_text('{"format": 1'), "plan.json"),
    "a plan of the future": (lambda path: edit(path / "plan.json", format=9), "format 9"),
    "no provenance": (lambda path: (path / "provenance.json").unlink(), "provenance.json"),
    "half a provenance": (lambda path: (path / "provenance.json").write_text("{"), "damaged"),
    "a provenance of no run": (lambda path: edit(path / "provenance.json", run=3), "its run"),
    "a provenance of the future": (lambda path: edit(path / "provenance.json", format=9), "9"),
    "half a time": (lambda path: (path / "time.json").write_text("["), "time.json"),
    "no samples": (lambda path: (path / "samples.parquet").unlink(), "samples.parquet is missing"),
    "no samples that are a table": (
        lambda path: (path / "samples.parquet").write_bytes(b"PAR1"),
        "samples.parquet is damaged",
    ),
    "no histograms": (lambda path: (path / "histograms.parquet").unlink(), "is missing"),
    "samples without a column": (
        lambda path: rewrite(path / "samples.parquet", lambda frame: frame.drop(columns="unit")),
        "lacks unit",
    ),
    "samples of another format": (
        lambda path: pd.read_parquet(path / "samples.parquet").to_parquet(path / "samples.parquet"),
        "format unknown",
    ),
    "another run's samples": (
        lambda path: rewrite(path / "samples.parquet", lambda frame: frame.assign(run_id="x")),
        "samples of run x",
    ),
    "another plan's samples": (
        lambda path: rewrite(path / "samples.parquet", lambda frame: frame.assign(cell_id="x")),
        "cell x, not in its plan",
    ),
    "a bundle of the future": (lambda path: edit(path / "bundle.json", format=9), "format 9"),
}


def rewrite(path: Path, change: Callable[[pd.DataFrame], pd.DataFrame]) -> None:
    """Change a table, keeping its format's mark."""
    table = pq.read_table(path)
    changed = pa.Table.from_pandas(change(table.to_pandas()), preserve_index=False)
    fields = [table.schema.field(name) for name in changed.column_names]
    changed = changed.cast(pa.schema(fields))
    pq.write_table(changed.replace_schema_metadata(table.schema.metadata), path)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_a_recorded_bundle_is_one_clear_error(recorded: Path, damage: str) -> None:
    harm, says = DAMAGE[damage]
    harm(recorded)
    with pytest.raises(UserError) as caught:
        load_run(recorded)
    assert says in str(caught.value)
    assert caught.value.remedy


def test_a_table_that_breaks_in_the_middle_is_an_error_too(recorded: Path) -> None:
    path = recorded / "samples.parquet"
    content = bytearray(path.read_bytes())
    content[4:200] = bytes(196)
    path.write_bytes(bytes(content))
    with pytest.raises(UserError, match=r"samples\.parquet"):
        load_run(recorded)


def test_a_bundle_says_the_same_as_its_run(run: Path, recorded: Path) -> None:
    same(load_run(run), load_run(recorded))
    assert load_run(recorded).run_id == run.name
    mark = json.loads((recorded / "bundle.json").read_text())
    assert mark["cells"] == len(load_run(run).plan.cells)
    # The first valid and the first invalid cell of each workload: none of pktgen's was invalid,
    # unless the measurement that failed was its.
    kept = {path.name for path in (recorded / "cells").iterdir()}
    assert kept == set(mark["raw_cells"])
    assert 3 <= len(kept) <= 4
    for name in kept:
        assert (recorded / "cells" / name / "sample.json").exists()


def test_a_bundle_keeps_to_its_size(run: Path, tmp_path: Path) -> None:
    small = bundle(run, tmp_path / "small", raw_limit=0)
    assert not (small / "cells").exists()
    same(load_run(run), load_run(small))


def test_a_bundle_names_no_folder_of_this_machine(run: Path, tmp_path: Path) -> None:
    edit(run / "provenance.json", command=f"qemu -kernel {tmp_path}/cache/vmlinuz")
    out = bundle(run, tmp_path / "out", hide={f"{tmp_path}/cache": "CACHE", str(tmp_path): "TMP"})
    assert load_run(out).provenance["command"] == "qemu -kernel CACHE/vmlinuz"


def test_a_bundle_overwrites_nothing(run: Path, recorded: Path) -> None:
    with pytest.raises(UserError, match="exists"):
        bundle(run, recorded)


def test_a_bundle_of_a_bundle_is_the_same(recorded: Path, tmp_path: Path) -> None:
    again = bundle(recorded, tmp_path / "again")
    same(load_run(recorded), load_run(again))


def test_a_bundle_cannot_be_resumed(recorded: Path) -> None:
    with pytest.raises(UserError, match="recorded bundle"):
        Store.open(recorded)
