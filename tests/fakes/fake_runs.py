"""Runs to report on, without machines: simulated, and bent into every shape a report may meet."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from vringlab.analysis.frames import RunFrames, load_run
from vringlab.campaign import experiment as experiments
from vringlab.campaign.experiment import Arm, Profile, Value, WorkloadUse
from vringlab.campaign.fake import FakeSession, FakeWorkload
from vringlab.campaign.plan import make_plan
from vringlab.campaign.runner import execute
from vringlab.campaign.store import Store
from vringlab.campaign.work import FORMAT, WORKING
from vringlab.lab import events
from vringlab.workloads.base import Metric, Outcome, Params

VSOCK, NET = "vsock-direct-enqueue", "virtio-net-napi-tx"
RX_POLL, NETPERF = "vhost-net-rx-poll", "virtio-net-netperf"
MERGE, THROUGHPUT = "vsock-skb-merge", "vsock-throughput"

EFFECTS = {"rfc-v1": 0.9, "direct": 0.8, "rfc": 0.75, "merged": 0.62}
EFFECTS |= {"2014": 0.88, "shipped": 0.95, "merge": 0.8}


class NetperfParams(Params):
    """Parameters of netperf, for plans without machines."""

    direction: str = "guest-rx"
    size: int = 64
    sessions: int = 1
    vcpus: int = 1


class StreamParams(Params):
    """Parameters of vsock-stream, for plans without machines."""

    threads: int = 1
    payload: int | str = 64
    sizes: str = "fixed"
    direction: str = "g2h"
    type: str = "stream"


_MODELS: Mapping[str, type[Params]] = {"netperf": NetperfParams, "vsock-stream": StreamParams}


def find_fake(name: str) -> FakeWorkload:
    """A stand-in for a workload, with parameters of its own names."""
    return FakeWorkload(name, params=_MODELS[name])


def _points(*directions: str, sizes: list[Value], sessions: list[Value]) -> dict[str, list[Value]]:
    return {"direction": [*directions], "size": sizes, "sessions": sessions}


_STREAM_SIZES: list[Value] = [64, 256, 1024, 4096, 16384, 65535]
_SESSIONS: list[Value] = [1, 2, 4, 8]

#: Streams and transactions by size and sessions: of the seed's matrix a corner, or all of it.
FORMS: Mapping[str, tuple[tuple[str, ...], str, list[dict[str, list[Value]]]]] = {
    "corner": (
        ("always-polling", "shipped", "2014"),
        "netperf",
        [
            _points("guest-rx", sizes=[256, 16384], sessions=[1]),
            _points("guest-tx", sizes=[256], sessions=[1, 4]),
            _points("rr", sizes=[256], sessions=[25]),
        ],
    ),
    "whole": (
        ("always-polling", "shipped", "2014"),
        "netperf",
        [
            _points("guest-rx", "guest-tx", sizes=_STREAM_SIZES, sessions=_SESSIONS),
            _points("rr", sizes=[256, 4096], sessions=[1, 25, 50]),
        ],
    ),
    "one point": (
        ("stock", "rfc", "merged"),
        "netperf",
        [_points("guest-tx", sizes=[65535], sessions=[1])],
    ),
    "threads": (
        ("queued", "rfc-v1", "direct"),
        "vsock-stream",
        [{"payload": [4096, 65536], "threads": [1, 2, 4], "direction": ["g2h"]}],
    ),
    "payloads": (
        ("queued", "direct"),
        "vsock-stream",
        [{"payload": [64, 4096, 65536, 131072], "threads": [1], "direction": ["g2h", "h2g"]}],
    ),
    "sizes": (
        ("no-merge", "merge"),
        "vsock-stream",
        [
            {"payload": [16, 65536], "threads": [64], "direction": ["g2h", "h2g"]},
            {"payload": ["4096-8192"], "sizes": ["normal"], "threads": [64], "direction": ["g2h"]},
        ],
    ),
}


def make_form(folder: Path, name: str, form: str, boots: int = 2, blocks: int = 2) -> Path:
    """Execute a plan of one of `FORMS` with random figures; the run's folder.

    Args:
        folder: Where run folders are made.
        name: Whose claims the run is held against; its experiment file need not be there.
        form: Key of `FORMS`.
        boots: Guest lifetimes.
        blocks: Blocks in each.
    """
    arms, workload, matrices = FORMS[form]
    size = Profile(boots=boots, blocks_per_boot=blocks, duration_s=1)
    made = experiments.load(NET).model_copy(
        update={
            "name": name,
            "title": f"simulated: {name}",
            "reference": arms[0],
            "arms": tuple(Arm(name=arm, summary=arm) for arm in arms),
            "profiles": dict.fromkeys(experiments.PROFILES, size),
        }
    )
    plans = [
        make_plan(
            made.model_copy(update={"workloads": (WorkloadUse(workload=workload, matrix=matrix),)}),
            "quick",
            7,
            find=find_fake,
        )
        for matrix in matrices
    ]
    # A matrix whose rows have columns of their own is more than one product of values.
    every = (cell for plan in plans for cell in plan.cells)
    cells = sorted(every, key=lambda cell: (cell.block, plans[0].arms.index(cell.arm_name)))
    plan = replace(plans[0], cells=tuple(cells))
    with Store.create(plan, folder) as store:
        session = FakeSession(seed=3, effects=EFFECTS)
        return execute(store, lambda: session, find=find_fake).path


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


#: Instructions for one unit of work by side, area, module and function, of no machine.
PROFILE: Mapping[tuple[str, str, str | None, str | None], float] = {
    ("guest", "kernel", None, "queue_work_on"): 20_000,
    ("guest", "kernel", None, "process_one_work"): 15_000,
    ("guest", "kernel", None, "schedule"): 30_000,
    ("guest", "module", "vmw_vsock_virtio_transport", "virtio_transport_send_pkt"): 5_000,
    ("guest", "module", "vmw_vsock_virtio_transport", None): 100,
    ("guest", "user", None, None): 25_000,
    ("guest", "idle", None, "default_idle"): 40_000,
    ("host", "kernel", None, "kvm_arch_vcpu_ioctl_run"): 50_000,
    ("host", "kernel", None, "(the rest)"): 9_000,
    ("host", "spin", None, "native_queued_spin_lock_slowpath"): 7_000,
    ("host", "user", None, None): 8_000,
}

#: What else one unit of work takes; the guest's switches follow what `work` says.
EVENTS: Mapping[str, float] = {
    events.EXITS: 6.0,
    f"{events.BY_REASON}hlt": 1.5,
    f"{events.BY_REASON}npf": 2.5,
    f"{events.BY_REASON}interrupt": 1.99,
    f"{events.BY_REASON}cpuid": 0.01,
    events.HOST_SWITCHES: 11.0,
    events.GUEST_SWITCHES: 8.0,
}


class CountingSession(FakeSession):
    """A session that pretends to count, too: random figures around `PROFILE` and `EVENTS`.

    Args:
        work: Instructions of `queue_work_on` and `process_one_work`, and context switches of the
            guest, by arm, as a multiple of the reference's; 1 where not named.
        spread: Standard deviation of a cell's log instructions.
        kwargs: Those of `FakeSession`.
    """

    def __init__(
        self, work: Mapping[str, float] | None = None, spread: float = 0.01, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._work = dict(work or {})
        self._spread = spread

    def measure(self, workload: str, params: Mapping[str, Value], duration_s: float) -> Outcome:
        """The figures of one measurement, and a profile."""
        found = super().measure(workload, params, duration_s)
        if not found.valid:
            return found
        queue = self._work.get(self._arm, 1.0)
        scale = 1 + self._draw.gauss(0.0, self._spread)
        profile = {
            key: value * scale * (queue if key[3] in QUEUE else 1.0)
            for key, value in PROFILE.items()
        }

        def total(*areas: str, sides: tuple[str, ...] = ("guest", "host")) -> float:
            return sum(
                value for key, value in profile.items() if key[0] in sides and key[1] in areas
            )

        metrics = {
            "instructions": total(*WORKING),
            "instructions_guest": total(*WORKING, sides=("guest",)),
            "instructions_host": total(*WORKING, sides=("host",)),
            "instructions_module": total("module"),
        }
        unit = "packet" if workload.startswith("pktgen") else "round trip"
        rows = [[*key, value] for key, value in profile.items()]
        others = {
            what: value * scale * (queue if what == events.GUEST_SWITCHES else 1.0)
            for what, value in EVENTS.items()
        }
        record = {
            "format": FORMAT,
            "unit": unit,
            "work": [100.0, 1000.0],
            "rows": rows,
            "others": others,
        }
        return replace(
            found,
            metrics=(
                *found.metrics,
                *(Metric(name, value, "instruction") for name, value in metrics.items()),
                Metric("exits", others[events.EXITS], "event"),
                Metric("switches_guest", others[events.GUEST_SWITCHES], "event"),
                Metric("switches_host", others[events.HOST_SWITCHES], "event"),
            ),
            raw={**found.raw, "instructions.json": json.dumps(record).encode()},
        )


#: Functions that an arm of `CountingSession` may do without.
QUEUE = ("queue_work_on", "process_one_work")


def make_counted(
    folder: Path,
    name: str,
    boots: int = 4,
    blocks: int = 1,
    params: Mapping[str, list[Value]] | None = None,
    **session: Any,
) -> Path:
    """Execute a plan that counts instructions, with random figures; the run's folder.

    Args:
        folder: Where run folders are made.
        name: The experiment.
        boots: Guest lifetimes.
        blocks: Blocks in each.
        params: The points; a corner of the experiment when None.
        session: What `CountingSession` takes.
    """
    made = experiments.load(name)
    size = Profile(boots=boots, blocks_per_boot=blocks, duration_s=1)
    made = made.model_copy(update={"profiles": {**made.profiles, "quick": size}})
    plan = make_plan(made, "quick", 7, _POINTS[name] if params is None else params)
    with Store.create(replace(plan, count_instructions=True), folder) as store:
        return execute(store, lambda: CountingSession(**{"seed": 3, **session})).path
