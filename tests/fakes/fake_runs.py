"""Runs to report on, without machines: simulated, and bent into every shape a report may meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pandas as pd

from vringlab.analysis.frames import RunFrames, load_run
from vringlab.campaign import experiment as experiments
from vringlab.campaign.experiment import Profile, Value
from vringlab.campaign.fake import FakeSession
from vringlab.campaign.plan import make_plan
from vringlab.campaign.runner import execute
from vringlab.campaign.store import Store

VSOCK, NET = "vsock-direct-enqueue", "virtio-net-napi-tx"

EFFECTS = {"rfc-v1": 0.9, "direct": 0.8, "rfc": 0.75, "merged": 0.62}


#: Two points each: enough to tell apart what a figure must, and quick to draw.
_POINTS: Mapping[str, Mapping[str, list[Value]]] = {
    VSOCK: {"payload": [4096]},
    NET: {"ring": ["split"]},
}


def make_run(folder: Path, name: str, profile: str = "quick", whole: bool = False) -> Path:
    """Execute a plan with random figures; the run's folder.

    Args:
        folder: Where run folders are made.
        name: The experiment.
        profile: The profile.
        whole: All points of the profile, not only two.
    """
    made = experiments.load(name)
    # Of its own size: the shipped profiles change with what machines can bear.
    size = Profile(boots=2, blocks_per_boot=2, duration_s=1)
    made = made.model_copy(update={"profiles": {**made.profiles, "quick": size}})
    plan = make_plan(made, profile, 7, {} if whole else _POINTS[name])
    with Store.create(plan, folder) as store:
        return execute(store, lambda: FakeSession(seed=3, effects=EFFECTS)).path


def with_samples(run: RunFrames, change: Callable[[pd.DataFrame], pd.DataFrame]) -> RunFrames:
    """The run with other samples."""
    return replace(run, samples=change(run.samples.copy()))


def as_measured(run: RunFrames) -> RunFrames:
    """The run as if an emulated host had measured it, to see what a real one looks like."""
    provenance = {**run.provenance, "run": {**run.provenance["run"], "host_kind": "emulated"}}
    return replace(
        run,
        samples=run.samples.assign(host_kind="emulated", host="embedded"),
        provenance=provenance,
    )


def _no_samples(samples: pd.DataFrame) -> pd.DataFrame:
    return samples.iloc[:0]


def _all_invalid(samples: pd.DataFrame) -> pd.DataFrame:
    return samples.assign(valid=False, reason="12 packets lost")


def _no_figures(samples: pd.DataFrame) -> pd.DataFrame:
    kept = samples.drop_duplicates("cell_id")
    return kept.assign(valid=False, reason="no result", metric="none", value=float("nan"), unit="")


def _one_arm_missing(samples: pd.DataFrame) -> pd.DataFrame:
    return samples.query("arm != @samples.arm.iloc[-1]")


def _reference_missing(samples: pd.DataFrame) -> pd.DataFrame:
    return samples[~samples["arm"].isin(["queued", "stock"])]


def _one_block(samples: pd.DataFrame) -> pd.DataFrame:
    return samples.query("block == block.min()")


def _one_boot(samples: pd.DataFrame) -> pd.DataFrame:
    return samples.query("boot == boot.min()")


def _wild(samples: pd.DataFrame) -> pd.DataFrame:
    """Arms that differ by a factor of a million from block to block."""
    factor = 10.0 ** ((samples["block"] * 7 + samples["position"] * 5) % 7 - 3)
    return samples.assign(value=samples["value"] * factor)


def _zero_counts(samples: pd.DataFrame) -> pd.DataFrame:
    counts = samples["metric"].isin(["tx_interrupts", "kicks"]) & (samples["arm"] == "merged")
    return samples.assign(value=samples["value"].where(~counts, 0.0))


def _some_invalid(samples: pd.DataFrame) -> pd.DataFrame:
    bad = samples["block"] == samples["block"].max()
    reason = "pktgen sent " + samples["position"].astype(str) + " packets and none came"
    return samples.assign(valid=~bad & samples["valid"], reason=reason.where(bad, ""))


def _unknown_metric(samples: pd.DataFrame) -> pd.DataFrame:
    names = {"kicks": "throughput", "round_trips": "entropy"}
    return samples.assign(metric=samples["metric"].replace(names))


def _mixed_units(samples: pd.DataFrame) -> pd.DataFrame:
    odd = samples["block"] == samples["block"].max()
    return samples.assign(unit=samples["unit"].where(~odd, "us"))


#: Everything that a report must say something sensible of.
SHAPES: Mapping[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "no samples": _no_samples,
    "all invalid": _all_invalid,
    "no figures": _no_figures,
    "one arm missing": _one_arm_missing,
    "reference missing": _reference_missing,
    "one block": _one_block,
    "one boot": _one_boot,
    "wild": _wild,
    "zero counts": _zero_counts,
    "some invalid": _some_invalid,
    "unknown metric": _unknown_metric,
    "mixed units": _mixed_units,
}


def loaded(folder: Path, name: str, profile: str = "quick", whole: bool = False) -> RunFrames:
    """Execute and load."""
    return load_run(make_run(folder, name, profile, whole))
