"""Trying a patch that has no experiment: planned, measured, reloaded.

The patch becomes an experiment of its run (`campaign.trial`); everything after that is as for any
other run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from vringlab import collect
from vringlab.analysis.frames import RunFrames, load_run
from vringlab.cachedir import OnStep
from vringlab.campaign import hosts
from vringlab.campaign import trial as trials
from vringlab.campaign.experiment import OF_RUN, Value, of_run
from vringlab.campaign.plan import Plan, make_plan
from vringlab.campaign.store import Store
from vringlab.campaign.trial import Trial
from vringlab.collect import REPLAY, Switch
from vringlab.errors import UserError
from vringlab.kernels.series import read_series
from vringlab.report.parameters import NotebookParameters
from vringlab.settings import settings
from vringlab.workloads import base as workload_base

Side = Literal["guest", "host"]


def plan_try(
    patches: Sequence[str],
    workloads: Sequence[str],
    *,
    base: str = "debian:6.12",
    tree: Path | None = None,
    side: Side | None = None,
    params: Mapping[str, Sequence[Value]] | None = None,
    profile: str = "quick",
    switch: Switch = "swap",
    seed: int = 1,
    boots: int | None = None,
    name: str | None = None,
    whole: bool = False,
    on_step: OnStep = lambda _: None,
) -> tuple[Trial, Plan, Switch]:
    """What trying patches would measure, in which order; nothing is measured.

    Args:
        patches: What `kernels.series.read_series` takes; each becomes an arm.
        workloads: Workloads that measure them.
        base: The base kernel.
        tree: Git tree of ranges.
        side: Whose modules are replaced; found by their names when None.
        params: Values by parameter.
        profile: How much to measure.
        switch: How an arm is loaded.
        seed: What the order of cells is drawn from.
        boots: Guest lifetimes; the profile's when None.
        name: The experiment's name; made from the first patch's title when None.
        whole: Build and boot whole kernels.
        on_step: Told what takes time.

    Returns:
        The patches as an experiment, its plan, and how arms have to be loaded.

    Raises:
        UserError, TransientError, InfrastructureError: as for `read_series` and `trial.prepare`.
    """
    if not workloads:
        raise UserError(
            "what shall measure the patch?",
            remedy=f"say --workload with one of: {', '.join(workload_base.names())}",
        )
    series = [read_series(patch, tree=tree) for patch in patches]
    trial = trials.prepare(
        series,
        workloads,
        base=base,
        side=side,
        params=params,
        name=name,
        whole=whole,
        on_step=on_step,
    )
    chosen = trial.experiment
    if boots is not None:
        chosen = chosen.with_boots(profile, boots)
    how: Switch = "reboot" if trial.needs_reboot else switch
    if how == "reboot":
        chosen = chosen.one_block_per_boot()
    return replace(trial, experiment=chosen), make_plan(chosen, profile, seed), how


def create(trial: Trial, plan: Plan) -> Store:
    """A run of patches, open for writing; its folder holds the experiment and the patches."""
    files = {OF_RUN: trial.experiment.to_yaml(), **trial.files}
    store = Store.create(plan, files=files)
    store.update_provenance({"try": trial.as_record()})
    return store


def try_patch(
    patch: str,
    workload: str,
    *,
    host: str = "embedded",
    base: str = "debian:6.12",
    params: Mapping[str, Value | Sequence[Value]] | None = None,
    profile: str = "quick",
    seed: int = 1,
) -> RunFrames:
    """Measure a patch now, with progress.

    Args:
        patch: What `kernels.series.read_series` takes.
        workload: What measures it.
        host: The KVM host.
        base: The base kernel.
        params: Values by parameter, one or a list.
        profile: How much to measure.
        seed: What the order of cells is drawn from.

    Raises:
        UserError, TransientError, InfrastructureError, Interrupted: as for `plan_try` and
            `collect.measure`.
    """
    wanted = {
        key: [value] if isinstance(value, str | int | float) else list(value)
        for key, value in (params or {}).items()
    }
    trial, plan, how = plan_try(
        [patch],
        [workload],
        base=base,
        params=wanted,
        profile=profile,
        seed=seed,
        on_step=collect.print_step,
    )
    chosen = collect.choose_hosts(hosts.from_urls([host]), plan)
    with create(trial, plan) as store:
        own = of_run(store.path, plan.experiment)
        collect.measure(own, store, hosts=chosen, switch=how)
        path = store.path
    return load_run(path)


class TryParameters(NotebookParameters):
    """Parameters of a notebook that tries a patch.

    Attributes:
        host: `replay`, `replay:PATH` or a host that measures.
        patch: The patch; a relative path is meant from the collection's folder.
        workload: What measures it.
        base: The base kernel.
        profile: How much to measure.
        seed: What the order of cells is drawn from.
        params: Values by parameter, one or a list.
        figures_folder: Where to write figures; nowhere when None.
    """

    host: str
    patch: str
    workload: str
    base: str
    profile: Literal["smoke", "quick", "full"]
    seed: int
    params: dict[str, Value | list[Value]]
    figures_folder: Path | None

    def run(self, recorded: str) -> RunFrames:
        """Measure the patch, or read the recording of that name.

        Raises:
            UserError, TransientError, InfrastructureError, Interrupted: as for `try_patch`.
        """
        if self.host == REPLAY or self.host.startswith(f"{REPLAY}:"):
            return load_run(collect.recording(recorded, self.host))
        beside = settings().root / self.patch
        return try_patch(
            str(beside) if beside.exists() else self.patch,
            self.workload,
            host=self.host,
            base=self.base,
            params=self.params,
            profile=self.profile,
            seed=self.seed,
        )
