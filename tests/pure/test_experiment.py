"""Experiment files: what they hold, what they refuse, and what -p and --arms change."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import Field

from vringlab.campaign import experiment as experiments
from vringlab.campaign.experiment import PROFILES, Experiment, parse_overrides
from vringlab.campaign.fake import FakeWorkload
from vringlab.errors import UserError
from vringlab.settings import settings
from vringlab.workloads import base
from vringlab.workloads.base import Params, Workload

SHIPPED = ("virtio-net-napi-tx", "vsock-direct-enqueue")


class FioParams(Params):
    payload: int = Field(ge=1, le=65536)
    direction: Literal["h-g-h"] = "h-g-h"


class PingParams(Params):
    payload: int = Field(ge=1, le=65536)
    direction: Literal["h-g-h", "g-h-g"] = "h-g-h"
    streams: int = Field(default=1, ge=1, le=64)


def find(name: str) -> Workload:
    return FakeWorkload(name, params=FioParams if name.startswith("fio") else PingParams)


@pytest.fixture
def vsock() -> Experiment:
    return experiments.load("vsock-direct-enqueue")


def document(**changes: Any) -> dict[str, Any]:
    path = settings().data / "experiments" / "vsock-direct-enqueue.yaml"
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {**content, **changes}


def load_changed(folder: Path, **changes: Any) -> Experiment:
    path = folder / "vsock-direct-enqueue.yaml"
    path.write_text(yaml.safe_dump(document(**changes), sort_keys=False), encoding="utf-8")
    return experiments.load_file(path)


def test_the_two_experiments_are_found() -> None:
    assert set(SHIPPED) <= set(experiments.names())


@pytest.mark.parametrize("name", experiments.names())
@pytest.mark.parametrize("profile", PROFILES)
def test_every_shipped_point_is_accepted_by_its_workload(name: str, profile: str) -> None:
    points = experiments.load(name).points(profile)
    assert points
    for point in points:
        model = base.find(point.workload).params
        assert set(point.params) == set(model.model_fields)


@pytest.mark.parametrize("name", experiments.names())
def test_every_shipped_experiment_has_an_aa_pair_in_each_profile(name: str) -> None:
    assert all(profile.aa for profile in experiments.load(name).profiles.values())


def test_quick_keeps_the_message_that_fio_cannot_measure_and_its_cross_check(
    vsock: Experiment,
) -> None:
    seen = {(point.workload, point.params["payload"]) for point in vsock.points("quick", find)}
    assert {
        (tool, size) for tool in ("fio-vsock-pingpong", "vsock-pingpong") for size in (64, 4096)
    } <= seen


def test_an_unknown_name_lists_what_exists_and_the_nearest() -> None:
    with pytest.raises(UserError) as caught:
        experiments.load("vsock-direct-enqeue")
    shown = str(caught.value)
    assert "did you mean 'vsock-direct-enqueue'?" in shown
    assert all(name in shown for name in SHIPPED)


def test_a_name_is_no_path() -> None:
    with pytest.raises(UserError, match="unknown experiment"):
        experiments.load("../experiments/vsock-direct-enqueue")


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"colour": "red"}, "colour"),
        ({"reference": "stock"}, "stock"),
        ({"side": "both"}, "side"),
        ({"base_kernel": "6.12"}, "base_kernel"),
        ({"arms": []}, "arms"),
        ({"arms": document()["arms"] + document()["arms"][:1]}, "named twice: queued"),
        ({"profiles": {"quick": document()["profiles"]["quick"]}}, "no profile smoke, full"),
        (
            {"profiles": {**document()["profiles"], "huge": document()["profiles"]["full"]}},
            "profiles.huge",
        ),
        (
            {
                "profiles": {
                    **document()["profiles"],
                    "smoke": {"boots": 0, "blocks_per_boot": 1, "duration_s": 1},
                }
            },
            "profiles.smoke.boots",
        ),
        (
            {
                "profiles": {
                    **document()["profiles"],
                    "smoke": {
                        "boots": 1,
                        "blocks_per_boot": 1,
                        "duration_s": 1,
                        "arms": ["indirect"],
                    },
                }
            },
            "indirect",
        ),
        (
            {
                "workloads": [
                    {
                        "workload": "fio-vsock-pingpong",
                        "matrix": {"payload": [64]},
                        "profiles": {"quick": {"matrix": {"payload": [65]}}},
                    }
                ]
            },
            "payload=[65]",
        ),
        (
            {"workloads": [{"workload": "fio-vsock-pingpong", "matrix": {"payload": []}}]},
            "payload",
        ),
        ({"name": "vsock-other"}, "name the file vsock-other.yaml"),
        ({"name": "No Name"}, "name"),
    ],
)
def test_a_wrong_file_is_refused_by_the_place(
    tmp_path: Path, changes: dict[str, Any], place: str
) -> None:
    with pytest.raises(UserError) as caught:
        load_changed(tmp_path, **changes)
    assert place in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize("content", ["", "a: [", "- 1", "\x00", "name: \xff"])
def test_a_file_that_holds_no_experiment_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError):
        experiments.load_file(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        experiments.load_file(tmp_path / "none.yaml")


def test_points_name_every_parameter_and_the_profile_sets_values_and_time(
    tmp_path: Path,
) -> None:
    uses = [
        {
            "workload": "vsock-pingpong",
            "matrix": {"payload": [64, 512], "direction": ["h-g-h", "g-h-g"]},
            "profiles": {"smoke": {"matrix": {"payload": [512]}, "duration_s": 0.5}},
        }
    ]
    changed = load_changed(tmp_path, workloads=uses)
    full = changed.points("full", find)
    assert [(p.params["payload"], p.params["direction"]) for p in full] == [
        (64, "h-g-h"),
        (64, "g-h-g"),
        (512, "h-g-h"),
        (512, "g-h-g"),
    ]
    assert {p.params["streams"] for p in full} == {1}
    assert {p.duration_s for p in full} == {50.0}
    smoke = changed.points("smoke", find)
    assert {p.params["payload"] for p in smoke} == {512}
    assert {p.duration_s for p in smoke} == {0.5}


def test_an_unknown_profile_lists_the_profiles(vsock: Experiment) -> None:
    with pytest.raises(UserError) as caught:
        vsock.points("fast", find)
    assert "smoke, quick, full" in str(caught.value)


def test_an_override_replaces_the_values_in_every_profile_and_is_typed(vsock: Experiment) -> None:
    changed = vsock.override({"payload": ["128", "64", "64"]}, find)
    for profile in PROFILES:
        values = [p.params["payload"] for p in changed.points(profile, find)]
        assert set(values) == {64, 128}
        assert all(type(value) is int for value in values)
    once = {(p.workload, *p.params.values()) for p in changed.points("quick", find)}
    assert len(once) == len(changed.points("quick", find))
    # The experiment itself is as it was.
    assert {p.params["payload"] for p in vsock.points("quick", find)} == {64, 4096}


def test_an_override_leaves_workloads_without_the_parameter_alone(vsock: Experiment) -> None:
    changed = vsock.override({"streams": ["2"]}, find)
    points = changed.points("smoke", find)
    assert {p.workload for p in points} == {"fio-vsock-pingpong", "vsock-pingpong"}
    assert all("streams" not in p.params for p in points if p.workload.startswith("fio"))
    assert all(p.params["streams"] == 2 for p in points if not p.workload.startswith("fio"))


def test_each_workload_keeps_the_values_that_it_accepts(vsock: Experiment) -> None:
    both = vsock.override({"direction": ["h-g-h", "g-h-g"]}, find).points("quick", find)
    seen = {(p.workload, p.params["direction"]) for p in both}
    assert seen == {
        ("fio-vsock-pingpong", "h-g-h"),
        ("vsock-pingpong", "h-g-h"),
        ("vsock-pingpong", "g-h-g"),
    }
    turned = vsock.override({"direction": ["g-h-g"]}, find).points("quick", find)
    assert {p.workload for p in turned} == {"vsock-pingpong"}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"payloda": ["64"]}, ["did you mean 'payload'?", "direction, payload, streams"]),
        ({"payload": ["0"]}, ["payload=0", ">= 1 and <= 65536"]),
        ({"payload": ["64", "many"]}, ["payload=many", "integer"]),
        ({"payload": ["64.5"]}, ["payload=64.5", "integer"]),
        ({"direction": ["up"]}, ["direction=up", "h-g-h, g-h-g (vsock-pingpong)"]),
        ({"payload": []}, ["no value"]),
    ],
)
def test_a_wrong_override_says_what_is_allowed(
    vsock: Experiment, params: dict[str, list[str]], expected: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        vsock.override(params, find)
    assert all(text in str(caught.value) for text in expected), str(caught.value)


def test_arms_are_selected_in_the_files_order_with_the_reference(vsock: Experiment) -> None:
    assert vsock.arms_of("quick") == ("queued", "rfc-v1", "direct")
    assert vsock.arms_of("smoke") == ("queued", "direct")
    assert vsock.arms_of("smoke", ["rfc-v1"]) == ("queued", "rfc-v1")
    assert vsock.arms_of("quick", ["direct", "queued"]) == ("queued", "direct")
    with pytest.raises(UserError) as caught:
        vsock.arms_of("quick", ["dircet"])
    assert "did you mean 'direct'?" in str(caught.value)
    assert "queued, rfc-v1, direct" in str(caught.value)


def test_overrides_are_read_from_text() -> None:
    assert parse_overrides(["payload=64, 512", "ring=packed", "payload=4096"]) == {
        "payload": ["64", "512", "4096"],
        "ring": ["packed"],
    }


@pytest.mark.parametrize("text", ["payload", "payload=", "=64", "", "payload=,", " = "])
def test_an_override_without_name_or_value_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="cannot read parameter"):
        parse_overrides([text])
