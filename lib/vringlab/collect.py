"""Getting a run: measured now, or read from a recording. For the command line and the notebooks.

Collecting touches machines, judging only files. So a measured run is reloaded from disk before
anybody looks at it, and a notebook that replays a recording goes the same way as one that
measures.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from vringlab.analysis.frames import RunFrames, load_run
from vringlab.campaign import experiment as experiments
from vringlab.campaign import hosts as host_names
from vringlab.campaign import progress, store
from vringlab.campaign.blocks import Until
from vringlab.campaign.catalogue import find_run
from vringlab.campaign.experiment import Experiment, Value
from vringlab.campaign.hosts import Host
from vringlab.campaign.plan import Cell, Plan, guest_options, make_plan
from vringlab.campaign.runner import RunResult, SessionFactory, execute
from vringlab.campaign.store import Store
from vringlab.errors import UserError
from vringlab.report.parameters import NotebookParameters
from vringlab.settings import settings

if TYPE_CHECKING:
    from vringlab.campaign.seat import Opener
    from vringlab.transcript import OpenLab

Switch = Literal["swap", "reboot"]
OnStep = Callable[[str], None]

#: Hosts that measure, beside ssh://[user@]host[:port]. `replay` and `replay:PATH` read instead.
KEPT = "kept"
MEASURING = ("embedded", KEPT)
REPLAY = "replay"
#: The recorded diagnosis of a host, below the data.
DIAGNOSIS = "recorded/doctor/user-host.json"


class RunParameters(NotebookParameters):
    """Parameters of a notebook that looks at one run; see `collect`.

    Attributes:
        host: `replay`, `replay:PATH`, `embedded` or `ssh://[user@]host[:port]`; several hosts
            with commas.
        profile: How much to measure.
        seed: What the order of cells is drawn from.
        params: Values by parameter, one or a list; empty for the experiment's own.
        arms: Arms; empty for the profile's own.
        switch: How an arm is loaded.
        figures_folder: Where to write figures; nowhere when None. A relative folder is meant
            from the collection's.
    """

    host: str
    profile: Literal["smoke", "quick", "full"]
    seed: int
    params: dict[str, Value | list[Value]]
    arms: list[str]
    switch: Switch
    figures_folder: Path | None

    def run(self, experiment: str) -> RunFrames:
        """Collect a run of an experiment with these parameters.

        Raises:
            UserError, TransientError, InfrastructureError, Interrupted: as for `collect`.
        """
        return collect(
            experiment,
            host=self.host,
            profile=self.profile,
            seed=self.seed,
            params=self.params,
            arms=self.arms,
            switch=self.switch,
        )


class HostParameters(RunParameters):
    """Parameters of the notebook on a user's host.

    Attributes:
        boot: Whether a guest is booted under its KVM.
    """

    boot: bool

    def diagnose(self) -> Mapping[str, Any]:
        """Examine the host; the recorded diagnosis where the run is a recorded one too.

        Raises:
            UserError, TransientError, InfrastructureError: as for `diagnose`.
        """
        replayed = self.host.partition(":")[0] == REPLAY
        found = diagnose(REPLAY if replayed else self.host, boot=self.boot)
        # A notebook's plain values are taken for parameters; this is none.
        return MappingProxyType(found)


class CountedParameters(NotebookParameters):
    """Parameters of the notebook that explains runs by the instructions that they counted.

    Attributes:
        host: `replay` reads the recordings; `embedded` measures here, and counts.
        recorded: By experiment what `replay` reads: a run folder or bundle, or the id of a run
            made here.
        profile: How much to measure.
        seed: What the order of cells is drawn from.
        params: By experiment the values by parameter, one or a list.
        arms: By experiment the arms beside the reference and its twin.
        figures_folder: Where to write figures; see `RunParameters`.
    """

    host: Literal["replay", "embedded"]
    recorded: dict[str, str]
    profile: Literal["smoke", "quick", "full"]
    seed: int
    params: dict[str, dict[str, Value | list[Value]]]
    arms: dict[str, list[str]]
    figures_folder: Path | None

    def run(self, experiment: str) -> RunFrames:
        """Collect a run of an experiment whose instructions are counted.

        Raises:
            UserError: `recorded` does not name the experiment; or as for `collect`.
            TransientError, InfrastructureError, Interrupted: as for `collect`.
        """
        host: str = self.host
        if host == REPLAY:
            if experiment not in self.recorded:
                raise UserError(
                    f"`recorded` has no run of experiment {experiment!r}",
                    remedy="name one, or measure with host='embedded'",
                )
            host = f"{REPLAY}:{self.recorded[experiment]}"
        return collect(
            experiment,
            host=host,
            profile=self.profile,
            seed=self.seed,
            params=self.params.get(experiment, {}),
            arms=self.arms.get(experiment, []),
            count_instructions=True,
        )


def collect(
    experiment: str,
    *,
    host: str = REPLAY,
    profile: str = "quick",
    seed: int = 1,
    params: Mapping[str, Value | Sequence[Value]] | None = None,
    arms: Sequence[str] = (),
    switch: Switch = "swap",
    count_instructions: bool = False,
) -> RunFrames:
    """A run of an experiment as data frames.

    Args:
        experiment: Name of the experiment.
        host: `replay`: the recording that comes with the collection. `replay:PATH`: a run folder
            or bundle, or the id of a run made here. `embedded`: measure now, with progress;
            `embedded,embedded`: on two of them at once. `kept`: on the lab of `vringlab up`.
            `ssh://[user@]host[:port]`: on a machine of yours.
        profile: How much to measure: `smoke`, `quick` or `full`. A recording has its own; when
            it is another one, the run's notes say so.
        seed: What the order of cells is drawn from.
        params: Values by parameter that replace those of the experiment; of a recording, those
            to keep.
        arms: Arms to measure, or to keep; all of the profile's when empty. The reference and its
            twin are always there.
        switch: Load an arm by swapping its module, or in a fresh guest each time.
        count_instructions: Whether they are counted beside the time.

    Raises:
        UserError: an unknown host, experiment, profile, parameter or arm; or a recording that
            is not there, not readable, of another experiment, or without what is asked for.
        TransientError, InfrastructureError: a machine or tool failed; what is done is kept.
        Interrupted: the kernel was interrupted; what is done is kept.
    """
    wanted = {name: _as_list(values) for name, values in (params or {}).items()}
    if host == REPLAY or host.startswith(f"{REPLAY}:"):
        run = load_run(recording(experiment, host))
        return _as_asked(_checked(run, experiment), profile, wanted, arms)
    chosen, plan = plan_run(
        experiment, profile, seed, wanted, arms, switch, count_instructions=count_instructions
    )
    hosts = choose_hosts(host_names.from_urls([host]), plan, chosen.needs)
    with Store.create(plan) as opened:
        measure(chosen, opened, hosts=hosts, switch=switch)
        path = opened.path
    return load_run(path)


def check_host(host: str) -> None:
    """Refuse a host that cannot measure, before anything is made.

    Raises:
        UserError: an unknown host.
    """
    if host.startswith("ssh://"):
        from vringlab.lab import remote

        remote.parse(host)
    elif host not in MEASURING:
        raise UserError(
            f"unknown host {host!r}",
            remedy="`embedded` measures here, ssh://[user@]host[:port] on a machine of yours; "
            "`replay` and `replay:PATH` read a recorded run in a "
            "notebook (on the command line: vringlab show PATH)",
        )


def choose_hosts(
    hosts: Sequence[Host], plan: Plan, needs: Sequence[str] = (), until_decided: bool = False
) -> tuple[Host, ...]:
    """The hosts that a run may use, each with a name of its own; before anything is made.

    Args:
        hosts: Those to choose from.
        plan: What they are to measure.
        needs: What each of them must have; see `campaign.hosts`.
        until_decided: Whether the run is to stop early.

    Raises:
        UserError: an unknown host, none that has what is needed, one whose modules may not be
            replaced as the arms need, more than the plan has boots or this machine has memory
            for, or several for a run that may stop early.
    """
    for host in hosts:
        check_host(host.url)
        if host.url == KEPT:
            from vringlab.campaign import kept

            kept.get()
            if plan.count_instructions:
                raise UserError(
                    "a kept lab does not count instructions",
                    remedy="measure on a lab of the run's own: --host embedded",
                )
    chosen = host_names.choose(hosts, needs)
    if plan.side == "host":
        from vringlab.lab import remote

        for host in chosen:
            remote.require_leave(host.url)
    if len(chosen) > len(plan.boots):
        raise UserError(
            f"{len(chosen)} hosts cannot share {len(plan.boots)} boots: each must run all arms",
            remedy=f"ask for more guest lifetimes (--boots {len(chosen)}), or for fewer hosts",
        )
    if until_decided and len(chosen) > 1:
        raise UserError(
            "a run on several hosts cannot stop early: its looks are planned by the boots of one",
            remedy="leave --until-decided out, or name one host",
        )
    host_names.require_memory(chosen)
    return chosen


def plan_run(
    experiment: str,
    profile: str,
    seed: int = 1,
    params: Mapping[str, Sequence[Value]] | None = None,
    arms: Sequence[str] = (),
    switch: Switch = "swap",
    boots: int | None = None,
    count_instructions: bool = False,
) -> tuple[Experiment, Plan]:
    """What a run would measure, in which order; no machine is asked.

    Args:
        experiment: Name of the experiment.
        profile: How much to measure.
        seed: What the order of cells is drawn from.
        params: Values by parameter that replace those of the experiment.
        arms: Arms to measure; all of the profile's when empty.
        switch: How an arm is loaded.
        boots: Guest lifetimes; the profile's when None.
        count_instructions: Whether they are counted beside the time.

    Raises:
        UserError: an unknown experiment, profile, parameter, value or arm.
    """
    chosen = experiments.load(experiment)
    if boots is not None:
        chosen = chosen.with_boots(profile, boots)
    if switch == "reboot" or chosen.must_reboot:
        chosen = chosen.one_block_per_boot()
    plan = make_plan(chosen, profile, seed, params, arms)
    return chosen, dataclasses.replace(plan, count_instructions=count_instructions)


def measure(
    experiment: Experiment,
    opened: Store,
    *,
    hosts: Sequence[Host] = (Host(url=host_names.EMBEDDED, name=host_names.EMBEDDED),),
    scheduler: str | None = None,
    switch: Switch = "swap",
    until: Until | None = None,
    on_step: OnStep | None = None,
) -> RunResult:
    """Measure what a run still lacks, with progress where the user is looking.

    One host is driven by this process. Several are driven by a dask worker each.

    Args:
        experiment: The run's experiment.
        opened: The run, open for writing.
        hosts: The KVM hosts, from `choose_hosts`.
        scheduler: Address of a dask scheduler whose workers drive the hosts; workers are started
            here when None.
        switch: How an arm is loaded.
        until: Asked after each block whether to end the run; see `judgement.until_decided`.
        on_step: Told what is being prepared; printed when None.

    Raises:
        Interrupted: Ctrl-C, SIGTERM or SIGHUP; `str()` says how to continue.
        UserError, TransientError, InfrastructureError: as for `runner.execute`.
    """
    # Machines' libraries are loaded only where a machine is asked for.
    from vringlab.campaign import kept, session

    switch = "reboot" if experiment.must_reboot else switch
    needed = tuple(dict.fromkeys(cell.arm for cell in opened.plan.cells))
    told = on_step or print_step

    probes = experiment.counted if experiment.profile(opened.plan.profile).paths else None

    opened.update_provenance({"run": {"hosts": [host.as_record() for host in hosts]}})
    options = guest_options(opened.plan)
    # Boots are dealt to the hosts in turn.
    left = dict.fromkeys(cell.boot for cell in opened.remaining())
    editions = [*map(opened.plan.edition, left), *[0] * len(hosts)][: len(hosts)]
    openers: dict[str, Opener] = {
        host.name: functools.partial(kept.session, experiment, needed, switch=switch, probes=probes)
        if host.url == KEPT
        else functools.partial(
            session.open_session,
            experiment,
            needed,
            host=host.url,
            switch=switch,
            probes=probes,
            run=opened.run_id,
            first=(options, edition),
            count_instructions=opened.plan.count_instructions,
        )
        for host, edition in zip(hosts, editions, strict=True)
    }
    if len(hosts) == 1 and scheduler is None:
        (opener,) = openers.values()
        with progress.auto() as display:
            return execute(opened, functools.partial(opener, on_step=told), display, until)
    return _measure_on(openers, opened, scheduler, until, told)


def _measure_on(
    openers: Mapping[str, Opener],
    opened: Store,
    scheduler: str | None,
    until: Until | None,
    on_step: OnStep,
) -> RunResult:
    from vringlab.campaign.workers import Workers

    stop = threading.Event()
    # A host more than there are boots left would come up for nothing.
    left = len({cell.boot for cell in opened.remaining()})
    names = list(openers)[: max(1, left)]
    with (
        Workers(names, scheduler=scheduler, on_step=on_step, stop=stop) as workers,
        progress.auto() as display,
    ):
        sessions: dict[str, SessionFactory] = {
            name: functools.partial(workers.session, name, openers[name]) for name in names
        }
        return execute(opened, sessions, display, until, stop=stop)


def print_step(step: str) -> None:
    """Print what is being prepared: beside the output, or in the cell of a notebook."""
    # Notebooks show standard error in red, as if something were wrong.
    stream = sys.stdout if progress.in_notebook() else sys.stderr
    print(f"  {step}", file=stream, flush=True)


def recording(experiment: str, host: str = REPLAY) -> Path:
    """Folder of the recorded run that a `replay` host names.

    A relative path is looked for from the working folder, then from the collection's: what runs
    a notebook decides the working folder.

    Raises:
        UserError: there is none; the remedy says how to make one.
    """
    name = host.removeprefix(REPLAY).removeprefix(":")
    if name:
        for folder in (Path(name), settings().root / name):
            if (folder / store.PLAN).is_file():
                return folder
        return find_run(name)
    folder = settings().data / "recorded" / experiment
    if not (folder / store.PLAN).is_file():
        recorded = [path.parent.name for path in folder.parent.glob(f"*/{store.PLAN}")]
        raise UserError(
            f"no recording of experiment {experiment!r} comes with the collection",
            remedy=f"there is one of: {', '.join(sorted(recorded)) or 'none'}; measure with "
            "host='embedded', or name a run of yours: host='replay:RUN'",
        )
    return folder


def open_lab(host: str = REPLAY, experiment: str | None = None) -> OpenLab:
    """A KVM host and a guest on it, to look around in; see `vringlab.transcript`.

    Args:
        host: `embedded` boots both; `kept` is the lab that `vringlab up` keeps; `replay` or
            `replay:PATH` answers from a recorded session.
        experiment: The experiment whose arms can be loaded; when None, the kept lab's own or
            `vsock-direct-enqueue`.

    Raises:
        UserError: an unknown host, or no recorded session.
        TransientError, InfrastructureError: a machine or tool failed.
    """
    from vringlab import transcript

    if host == REPLAY or host.startswith(f"{REPLAY}:"):
        return transcript.replay(host.removeprefix(REPLAY).removeprefix(":"))
    if host == KEPT:
        return transcript.kept(experiment)
    check_host(host)
    chosen = experiments.load(experiment or "vsock-direct-enqueue")
    return transcript.live(chosen, host, print_step)


def diagnose(
    host: str = REPLAY, *, boot: bool = True, on_step: OnStep | None = None
) -> dict[str, Any]:
    """What a machine has and lacks as a KVM host; a record, see `lab.doctor.Diagnosis`.

    Args:
        host: `ssh://[user@]host[:port]`; `embedded` for this machine; `replay` for the recorded
            diagnosis that comes with the collection, `replay:PATH` for another file.
        boot: Copy the image to the host and boot a guest under its KVM.
        on_step: Told what is being done; printed when None.

    Raises:
        UserError: an unknown host, or a recording that is not there or not readable.
        InfrastructureError, TransientError: the host refuses us, or does not answer.
    """
    from vringlab.image import build
    from vringlab.image.recipe import Recipe
    from vringlab.lab import doctor

    told = on_step or print_step
    if host == REPLAY or host.startswith(f"{REPLAY}:"):
        name = host.removeprefix(REPLAY).removeprefix(":")
        path = Path(name) if name else settings().data / DIAGNOSIS
        if not path.is_absolute() and not path.exists():
            path = settings().root / path
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} holds no diagnosis: {error}",
                remedy="record one with `vringlab doctor HOST --json > FILE`",
            ) from None
        read: dict[str, Any] = doctor.Diagnosis.from_record(record).as_record()
        return {**read, **record}
    check_host(host)
    if host.startswith("ssh://"):
        make = functools.partial(build.ensure_image, on_step=told) if boot else None
        return doctor.examine(host, make, on_step=told).as_record()
    # Not built for this alone: without it the probe of KVM is only shorter.
    digest = Recipe(suite=settings().suite).digest()
    image = build.load(settings().cache / "images" / digest) if boot else None
    return doctor.examine_here(image).as_record()


def _as_list(values: Value | Sequence[Value]) -> list[Value]:
    return [values] if isinstance(values, str | int | float) else list(values)


def _checked(run: RunFrames, experiment: str) -> RunFrames:
    if run.plan.experiment != experiment:
        raise UserError(
            f"{run.path} is a run of experiment {run.plan.experiment!r}, not of {experiment!r}",
            remedy="name a run of this experiment: vringlab list --runs",
        )
    if run.samples.empty:
        raise UserError(
            f"run {run.run_id} has no samples yet",
            remedy=f"continue it: vringlab resume {run.run_id}",
        )
    return run


def _as_asked(
    run: RunFrames, profile: str, params: Mapping[str, Sequence[Value]], arms: Sequence[str]
) -> RunFrames:
    """A recording narrowed to what is asked for; what it cannot be is said in its notes."""
    if profile not in experiments.PROFILES:
        raise UserError(
            f"unknown profile {profile!r}",
            remedy=f"choose one of: {', '.join(experiments.PROFILES)}",
        )
    if params or arms:
        run = _narrowed(run, params, arms)
    if profile != run.plan.profile:
        note = f"this recording is of profile {run.plan.profile}, and {profile} was asked for"
        run = dataclasses.replace(run, notes=(*run.notes, note))
    return run


def _narrowed(
    run: RunFrames, params: Mapping[str, Sequence[Value]], arms: Sequence[str]
) -> RunFrames:
    plan = run.plan
    always = [name for name in (plan.reference, plan.twin) if name is not None]
    unknown = [name for name in arms if name not in plan.arms]
    if unknown:
        raise UserError(
            f"the recording has no arm {unknown[0]!r}",
            remedy=f"its arms: {', '.join(plan.arms)}; host='embedded' measures others",
        )
    kept_arms = {*always, *arms} if arms else set(plan.arms)
    for name, values in params.items():
        known = dict.fromkeys(str(cell.params[name]) for cell in plan.cells if name in cell.params)
        missing = [str(value) for value in values if str(value) not in known]
        if missing or not values:
            raise UserError(
                f"the recording has no {name}={missing[0]}"
                if known and missing
                else f"the recording has no parameter {name!r} with a value",
                remedy=f"it has {name}={', '.join(known)}"
                if known
                else f"its parameters: {', '.join(plan.params)}",
            )

    def kept(cell: Cell) -> bool:
        # A workload that does not have the parameter is not asked about it, as in a plan.
        return cell.arm_name in kept_arms and all(
            str(cell.params[name]) in map(str, values)
            for name, values in params.items()
            if name in cell.params
        )

    cells = tuple(cell for cell in plan.cells if kept(cell))
    names = {cell.cell_id for cell in cells}
    samples, histograms = run.samples, run.histograms
    return dataclasses.replace(
        run,
        plan=dataclasses.replace(
            plan, cells=cells, arms=tuple(arm for arm in plan.arms if arm in kept_arms)
        ),
        samples=samples[samples["cell_id"].isin(names)].reset_index(drop=True),
        histograms=histograms[histograms["cell_id"].isin(names)].reset_index(drop=True),
    )
