"""Commands for patches of one's own: `try` and `new`. A thin layer, as `vringlab.cli`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vringlab.campaign.experiment import Experiment
    from vringlab.campaign.hosts import Host
    from vringlab.campaign.plan import Plan
    from vringlab.campaign.store import Store
    from vringlab.campaign.trial import Trial


@dataclass(frozen=True)
class Asked:
    """What the command line says of hosts.

    Attributes:
        urls: Their addresses.
        file: A hosts.yaml.
        needs: What each must have.
        tune: Change their settings for the run.
        swap_host_module: Allow arms of their own modules.
    """

    urls: list[str]
    file: Path | None
    needs: Sequence[str]
    tune: bool
    swap_host_module: bool


#: The hosts that may measure a plan; refuses those that may not.
Choose = Callable[[Asked, "Plan"], "tuple[Host, ...]"]
#: Measures a run and shows it: the experiment, its store, hosts, scheduler, how arms are loaded.
Execute = Callable[["Experiment", "Store", "tuple[Host, ...]", str | None, str], None]


class ProfileName(StrEnum):
    """How much is measured."""

    smoke = "smoke"
    quick = "quick"
    full = "full"


class SideName(StrEnum):
    """Whose module is replaced."""

    guest = "guest"
    host = "host"


class BuildName(StrEnum):
    """What is built."""

    modules = "modules"
    full = "full"


class SwitchName(StrEnum):
    """How an arm is loaded."""

    swap = "swap"
    reboot = "reboot"


_Patches = Annotated[
    list[str],
    typer.Argument(
        metavar="PATCH...",
        help="An mbox (also .gz), a patch, a folder of a series (or of its ports, each with a line "
        "`Serves: 6.12 <= version < 6.13`), a message-id, or with --tree a range A..B. Several are "
        "compared with each other too, such as two versions of a series.",
    ),
]
_Workloads = Annotated[
    list[str] | None,
    typer.Option(
        "--workload", "-w", help="What measures it: see `vringlab list`. May be repeated."
    ),
]
HostsFile = Annotated[
    Path | None, typer.Option(help="A hosts.yaml: url, name, arch, cpus, memory_gib, tags.")
]
Needs = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TAG", help="Only hosts with this tag, arch=NAME, cpus>=N or memory_gib>=N."
    ),
]
Scheduler = Annotated[
    str | None,
    typer.Option(help="A dask scheduler whose workers drive the hosts: tcp://HOST:PORT."),
]
Tune = Annotated[
    bool,
    typer.Option(
        "--tune",
        help="On ssh:// hosts: governor performance and irqbalance held, for the run only.",
    ),
]
SwapHostModule = Annotated[
    bool,
    typer.Option(
        "--swap-host-module",
        help="On ssh:// hosts: allow arms of the host's own modules, for the run only.",
    ),
]
_Tree = Annotated[Path | None, typer.Option(help="The git tree that a range A..B is of.")]
_Base = Annotated[
    str,
    typer.Option(
        help="The base kernel: debian:6.1, debian:6.12, debian:7.x, tree:PATH, tarball:PATH or "
        "git:URL@REF."
    ),
]
_Side = Annotated[
    SideName | None,
    typer.Option(help="Whose module is replaced; by its name when not given (vhost*, tun: host)."),
]


def register(app: typer.Typer, choose: Choose, execute: Execute) -> None:
    """Add the commands to the command line.

    Args:
        app: The command line.
        choose: Chooses the hosts, before a run is made.
        execute: Measures a run and shows it.
    """

    @app.command("try")
    def try_(
        patches: _Patches,
        workload: _Workloads = None,
        param: Annotated[
            list[str] | None,
            typer.Option(
                "-p", "--param", metavar="NAME=VALUES", help="Other values: -p payload=64,512."
            ),
        ] = None,
        base: _Base = "debian:6.12",
        tree: _Tree = None,
        side: _Side = None,
        profile: Annotated[
            ProfileName, typer.Option(help="smoke: one boot; quick: minutes; full: hours.")
        ] = ProfileName.quick,
        host: Annotated[
            list[str] | None,
            typer.Option(help="The KVM host, as for `vringlab run`. May be repeated."),
        ] = None,
        hosts: HostsFile = None,
        need: Needs = None,
        scheduler: Scheduler = None,
        switch: Annotated[
            SwitchName,
            typer.Option(help="Swap the module, or boot a fresh guest for every arm."),
        ] = SwitchName.swap,
        seed: Annotated[int, typer.Option(help="What the order of the cells is drawn from.")] = 1,
        boots: Annotated[
            int | None, typer.Option(min=1, help="Guest lifetimes; the profile's when not given.")
        ] = None,
        build: Annotated[
            BuildName,
            typer.Option(help="full: whole kernels, some ten minutes each, booted for every arm."),
        ] = BuildName.modules,
        name: Annotated[
            str | None, typer.Option(help="Name of its experiment; from the patch's title else.")
        ] = None,
        dry_run: Annotated[
            bool, typer.Option(help="Fit the patch and show the plan; measure nothing.")
        ] = False,
        tune: Tune = False,
        swap_host_module: SwapHostModule = False,
    ) -> None:
        """Measure a patch of your own: stock against patched, with an A/A pair for the noise.

        The patch is fitted to the base kernel: which modules it reaches (by the base's own
        Makefiles), whether it applies (fuzz is told), which functions it changes. These are
        counted in an untimed pass, to see whether the workload reaches them at all.
        """
        from vringlab import tryout
        from vringlab.campaign.experiment import of_run, parse_overrides

        trial, plan, how = tryout.plan_try(
            patches,
            workload or [],
            base=base,
            tree=tree,
            side=side.value if side else None,
            params=parse_overrides(param or []),
            profile=profile.value,
            switch=switch.value,
            seed=seed,
            boots=boots,
            name=name,
            whole=build is BuildName.full,
            on_step=_step,
        )
        _tell(trial)
        if dry_run:
            from vringlab.campaign.progress import clock

            for cell in plan.cells:
                print(cell.cell_id)
            print(f"{len(plan.cells)} cells, timed windows {clock(plan.measuring_s)}")
            return
        asked = Asked(host or [], hosts, need or [], tune, swap_host_module)
        chosen = choose(asked, plan)
        with tryout.create(trial, plan) as store:
            execute(of_run(store.path, plan.experiment), store, chosen, scheduler, how)

    @app.command("new")
    def new(
        name: Annotated[str, typer.Argument(help="Name of the experiment: a-z, 0-9 and dashes.")],
        patch: Annotated[
            str | None, typer.Option("--from", metavar="PATCH", help="As for `vringlab try`.")
        ] = None,
        module: Annotated[
            str | None, typer.Option(help="Without --from: the module that its arms change.")
        ] = None,
        workload: _Workloads = None,
        base: _Base = "debian:6.12",
        tree: _Tree = None,
        side: _Side = None,
    ) -> None:
        """Write the files of a lasting experiment: YAML, patches, claims and a notebook.

        What is there already is never overwritten.
        """
        from vringlab.campaign import scaffold

        written = scaffold.write(
            name,
            patch=patch,
            module=module,
            workloads=workload or [],
            base=base,
            tree=tree,
            side=side.value if side else None,
            on_step=_step,
        )
        for path in written:
            print(path)
        first = "" if patch is not None else "put your diff into patched.patch, then "
        print(f"\nNext: {first}vringlab run {name} --profile smoke")


def _step(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def _tell(trial: Trial) -> None:
    """What was understood, before anything is measured."""
    for arm, stack in trial.stacks.items():
        series = stack.series
        count = "one patch" if series.total == 1 else f"{series.total} patches"
        of = f" <{series.message_id}>" if series.message_id else ""
        _step(f"{arm}: {series.title} (v{series.version}, {count}){of}")
        names = ", ".join(module.name for module in stack.modules) or "a whole kernel"
        _step(f"{arm}: builds {names}, on the {trial.experiment.side}'s side")
        watched = ", ".join(item.function for item in stack.watched)
        _step(f"{arm}: counted to prove its path: {watched or 'nothing can be'}")
    if trial.needs_reboot:
        _step("a running guest cannot change these: every arm gets a fresh one")
    for note in trial.notes:
        _step(note)
