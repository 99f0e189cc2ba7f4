"""Profiles of instructions by function: their arithmetic, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats as sps
from tests.fakes.fake_runs import PROFILE, VSOCK, make_counted

from vringlab.analysis.frames import RunFrames, load_run
from vringlab.analysis.instructions import at, difference, profiles
from vringlab.campaign import tables
from vringlab.campaign.work import FORMAT, WAITING, WORKING
from vringlab.errors import UserError

Cell = tuple[str, str, int, str]


def profile(
    cells: Iterable[tuple[Cell, dict[str, float]]], workload: str = "ping-pong"
) -> pd.DataFrame:
    """Rows of cells (host, boot, block, arm) by function of the guest's kernel."""
    rows = [
        (f"c{number}", host, boot, block, arm, workload, "round trip", name, value)
        for number, ((host, boot, block, arm), values) in enumerate(cells)
        for name, value in values.items()
    ]
    columns = ["cell_id", "host", "boot", "block", "arm", "workload", "unit", "function", "value"]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.assign(side="guest", area="kernel", module="")


def pairs(*values: tuple[str, int, dict[str, float], dict[str, float]]) -> pd.DataFrame:
    """Blocks of (boot, block, the old arm's functions, the new one's) on one host."""
    return profile(
        [
            (("here", boot, block, arm), functions)
            for boot, block, old, new in values
            for arm, functions in (("old", old), ("new", new))
        ]
    )


def changes(table: pd.DataFrame) -> dict[str, float]:
    return dict(zip(table["function"], table["change"], strict=True))


def test_the_difference_is_the_mean_over_boots_with_students_interval() -> None:
    found = difference(
        pairs(
            ("b1", 0, {"send": 100, "copy": 50}, {"send": 92, "copy": 51}),
            ("b1", 1, {"send": 100, "copy": 50}, {"send": 88, "copy": 53}),
            ("b2", 2, {"send": 110, "copy": 50}, {"send": 90, "copy": 50}),
        ),
        "new",
        "old",
    )
    send, copy = (found[found["function"] == name].iloc[0] for name in ("send", "copy"))
    assert list(found["function"]) == ["send", "copy"]
    # Boots weigh the same: -10 and -20.
    assert (send["reference"], send["arm"], send["change"]) == (105.0, 90.0, -15.0)
    half = sps.t.ppf(0.975, 1) * 5.0
    assert (send["low"], send["high"]) == pytest.approx((-15 - half, -15 + half))
    assert copy["change"] == pytest.approx(1.0)
    narrow = difference(
        pairs(("b1", 0, {"send": 2}, {"send": 1}), ("b2", 1, {"send": 3}, {"send": 1})),
        "new",
        "old",
        0.5,
    )
    assert narrow["high"].iloc[0] - narrow["low"].iloc[0] == pytest.approx(sps.t.ppf(0.75, 1))


def test_a_function_that_an_arm_or_a_block_lacks_ran_no_instruction_there() -> None:
    found = difference(
        pairs(
            ("b1", 0, {"queue": 40, "send": 9}, {"send": 10, "lock": 5}),
            ("b2", 1, {"queue": 60, "send": 9}, {"send": 10}),
        ),
        "new",
        "old",
    )
    assert changes(found) == {"queue": -50.0, "lock": 2.5, "send": 1.0}
    queue = found[found["function"] == "queue"].iloc[0]
    assert (queue["reference"], queue["arm"]) == (50.0, 0.0)


def test_a_block_that_lacks_one_of_the_arms_is_left_out() -> None:
    whole = pairs(("b1", 0, {"send": 100}, {"send": 90}), ("b2", 2, {"send": 100}, {"send": 80}))
    lone = profile([(("here", "b1", 1, "old"), {"send": 1000.0, "other": 7.0})])
    lone["cell_id"] = "lone"
    found = difference(pd.concat([whole, lone]), "new", "old")
    assert changes(found) == {"send": -15.0}
    assert found["reference"].iloc[0] == 100.0


def test_an_arm_twice_in_a_block_is_averaged() -> None:
    twice = profile(
        [
            (("here", "b1", 0, "old"), {"send": 100.0}),
            (("here", "b1", 0, "new"), {"send": 80.0}),
            (("here", "b1", 0, "new"), {"send": 60.0, "lock": 8.0}),
            (("here", "b1", 0, "old"), {"send": 120.0}),
        ]
    )
    assert changes(difference(twice, "new", "old")) == {"send": -40.0, "lock": 4.0}


def test_one_boot_has_no_interval() -> None:
    found = difference(
        pairs(("b1", 0, {"send": 100}, {"send": 90}), ("b1", 1, {"send": 100}, {"send": 80})),
        "new",
        "old",
    )
    assert found["change"].iloc[0] == -15.0
    assert np.isnan(found[["low", "high"]].to_numpy(dtype=np.float64)).all()


def test_arms_with_boots_of_their_own_are_paired_by_block() -> None:
    apart = profile(
        [
            (("here", "b1", 0, "old"), {"send": 100.0}),
            (("here", "b2", 0, "new"), {"send": 90.0}),
            (("here", "b3", 1, "old"), {"send": 100.0}),
            (("here", "b4", 1, "new"), {"send": 70.0}),
        ]
    )
    found = difference(apart, "new", "old").iloc[0]
    assert found["change"] == -20.0
    assert found["high"] - found["low"] == pytest.approx(2 * sps.t.ppf(0.975, 1) * 10)


def test_several_hosts_count_as_hosts() -> None:
    boots = [("one", "b1", 0, -10), ("one", "b2", 1, -30), ("two", "b3", 2, -40)]
    cells = [
        ((host, boot, block, arm), {"send": 100.0 + (change if arm == "new" else 0)})
        for host, boot, block, change in boots
        for arm in ("old", "new")
    ]
    found = difference(profile(cells), "new", "old").iloc[0]
    assert found["change"] == -30.0
    assert found["high"] - found["low"] == pytest.approx(2 * sps.t.ppf(0.975, 1) * 10)


def test_kinds_of_code_are_summed_before_the_interval() -> None:
    rows = pairs(
        ("b1", 0, {"send": 100, "copy": 50}, {"send": 90, "copy": 60}),
        ("b2", 1, {"send": 100, "copy": 50}, {"send": 80, "copy": 72}),
    )
    (found,) = difference(rows, "new", "old", by=("side", "area")).to_dict("records")
    # +0 and +2: what one function saves the other takes, so that the sum is surer than each.
    assert (found["side"], found["area"], found["change"]) == ("guest", "kernel", 1.0)
    assert found["high"] - found["low"] == pytest.approx(2 * sps.t.ppf(0.975, 1))


@pytest.mark.parametrize("arm", ["old", "none"])
def test_without_a_pair_there_is_no_difference(arm: str) -> None:
    lone = profile([(("here", "b1", 0, "old"), {"send": 1.0})])
    for rows in (lone, lone.iloc[:0]):
        found = difference(rows, "new", arm)
        assert found.empty
        assert {"function", "change", "low", "high"} <= set(found.columns)


def test_a_point_is_found_by_its_parameters_as_text_or_number() -> None:
    rows = pairs(("b1", 0, {"send": 1}, {"send": 2}))
    rows["param_payload"] = [64, 4096]
    assert len(at(rows, "ping-pong", {"payload": 64})) == 1
    assert len(at(rows, "ping-pong", {"payload": "4096"})) == 1
    assert at(rows, "other", {}).empty
    assert at(rows, "ping-pong", {"payload": 1}).empty


# Read from a run


@pytest.fixture
def run(tmp_path: Path) -> RunFrames:
    return load_run(make_counted(tmp_path, VSOCK, boots=2, work={"direct": 0.5}))


def first_file(run: RunFrames) -> Path:
    """The profile of a valid cell."""
    valid = run.samples[run.samples["valid"].astype(bool)]["cell_id"]
    return tables.instruction_profiles(run.path)[str(valid.iloc[0])]


def test_profiles_sum_up_to_the_metric_and_hold_what_was_executed_to_wait(run: RunFrames) -> None:
    found = profiles(run)
    assert set(zip(found["side"], found["area"], strict=True)) == {key[:2] for key in PROFILE}
    samples = run.samples[(run.samples["metric"] == "instructions") & run.samples["valid"]]
    wanted = samples.set_index("cell_id")["value"]
    summed = found[found["area"].isin(WORKING)].groupby("cell_id")["value"].sum()
    assert set(summed.index) == set(wanted.index)
    assert np.allclose(summed, wanted[summed.index])
    assert (found.loc[found["area"].isin(WAITING), "value"] > 0).all()
    # fio's short reads are invalid, and so are their instructions.
    assert set(found["workload"]) == {"vsock-pingpong"}
    assert set(found["unit"]) == {"round trip"}


def test_the_difference_of_a_run_is_what_its_arms_do_without(run: RunFrames) -> None:
    here = at(profiles(run), "vsock-pingpong", {"payload": 4096})
    found = difference(here, "direct", "queued")
    assert set(found["function"].head(2)) == {"queue_work_on", "process_one_work"}
    assert changes(found)["queue_work_on"] == pytest.approx(-10_000, rel=0.1)
    equal = difference(here, "queued.aa", "queued")
    assert equal["change"].abs().max() < 0.1 * 50_000


def test_a_run_that_did_not_count_has_no_profiles(run: RunFrames) -> None:
    for file in tables.instruction_profiles(run.path).values():
        file.unlink()
    found = profiles(run)
    assert found.empty
    assert {"cell_id", "host", "function", "value"} <= set(found.columns)


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: json.dumps(record)[:-20],
        lambda record: json.dumps({key: record[key] for key in record if key != "unit"}),
        lambda record: json.dumps({**record, "rows": [row[1:] for row in record["rows"]]}),
        lambda record: json.dumps(
            {**record, "rows": [[*row[:4], "many"] for row in record["rows"]]}
        ),
        lambda record: json.dumps([record]),
    ],
    ids=["cut short", "no unit", "a column less", "no number", "a list"],
)
def test_a_damaged_profile_is_named(run: RunFrames, damage: object) -> None:
    file = first_file(run)
    assert callable(damage)
    file.write_text(damage(json.loads(file.read_text())))
    with pytest.raises(UserError, match="is damaged") as caught:
        profiles(run)
    assert str(file) in caught.value.message


def test_a_profile_of_another_format_is_refused(run: RunFrames) -> None:
    file = first_file(run)
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
    with pytest.raises(UserError, match=f"has format 99; this version reads {FORMAT}"):
        profiles(run)
