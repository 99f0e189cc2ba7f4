"""The command line: a thin layer over the library. Heavy imports happen inside the commands."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vringlab import __version__, cli_lab, cli_patches
from vringlab.errors import VringlabError

if TYPE_CHECKING:
    from vringlab.campaign.experiment import Experiment
    from vringlab.campaign.hosts import Host
    from vringlab.campaign.plan import Plan
    from vringlab.campaign.runner import RunResult
    from vringlab.campaign.store import Store

app = typer.Typer(
    name="vringlab",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="""Check the performance claims of virtio, vsock and vhost kernel patches.

    Every experiment compares [b]arms[/b] (a driver as shipped, and with a patch) on a KVM host.
    The default host is [b]embedded[/b]: a virtual machine of vringlab's own, so nothing is needed
    of this machine, not even a usable /dev/kvm.

    Begin with:  [b]vringlab list[/b]   then   [b]vringlab run virtio-net-napi-tx[/b]
    """,
    epilog="Exit status: 0 done, 2 user error, 3 infrastructure, 4 transient, 130 interrupted.",
)


#: Budget of --until-decided, the boots of the full profile.
_BUDGET_BOOTS = 10


class ProfileName(StrEnum):
    """How much is measured."""

    smoke = "smoke"
    quick = "quick"
    full = "full"


class SwitchName(StrEnum):
    """How an arm is loaded."""

    swap = "swap"
    reboot = "reboot"


def _version(shown: bool) -> None:
    if shown:
        print(f"vringlab {__version__}")
        raise typer.Exit


ExplainTime = Annotated[
    bool,
    typer.Option("--explain-time", help="Say at the end what was done in each phase of the time."),
]


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print and exit.")
    ] = False,
) -> None:
    """Options of all commands."""


@app.command("list")
def list_(
    runs: Annotated[bool, typer.Option("--runs", help="List the runs made here instead.")] = False,
) -> None:
    """List experiments with their arms and parameters, or the runs made here."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    if runs:
        from vringlab.campaign.catalogue import list_runs

        table = Table("run", "experiment", "profile", "cells done", "status", box=None)
        for info in list_runs():
            table.add_row(
                info.run_id,
                info.experiment,
                info.profile,
                f"{info.done} of {info.total}",
                info.state,
            )
        console.print(table if table.row_count else "no runs yet: vringlab run EXPERIMENT")
        return
    from vringlab.campaign import experiment as experiments

    for name in experiments.names():
        experiment = experiments.load(name)
        console.print(f"[bold]{name}[/bold]  {escape(experiment.title)}", highlight=False)
        arms = ", ".join(
            f"{arm} (reference)" if arm == experiment.reference else arm
            for arm in experiment.arm_names
        )
        console.print(f"  arms: {arms}", highlight=False)
        for use in experiment.workloads:
            matrix = "; ".join(
                f"{param}={','.join(map(str, values))}" for param, values in use.matrix.items()
            )
            console.print(f"  {use.workload}: {matrix}", highlight=False)


@app.command()
def run(
    experiment: Annotated[str, typer.Argument(help="Name of an experiment: vringlab list.")],
    profile: Annotated[
        ProfileName,
        typer.Option(help="smoke: seconds; quick: minutes; full: as documented in the mail."),
    ] = ProfileName.quick,
    param: Annotated[
        list[str] | None,
        typer.Option(
            "-p", "--param", metavar="NAME=VALUES", help="Other values: -p payload=64,512."
        ),
    ] = None,
    arms: Annotated[
        str, typer.Option(help="Arms to measure, with commas; the reference is always added.")
    ] = "",
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="The KVM host: embedded; kept (vringlab up); or ssh://HOST, also with user@ and "
            ":port, by ~/.ssh/config, agent and known_hosts. Again for each further host."
        ),
    ] = None,
    hosts: cli_patches.HostsFile = None,
    need: cli_patches.Needs = None,
    scheduler: cli_patches.Scheduler = None,
    switch: Annotated[
        SwitchName,
        typer.Option(help="Load an arm by swapping its module, or in a fresh guest each time."),
    ] = SwitchName.swap,
    seed: Annotated[int, typer.Option(help="What the order of the cells is drawn from.")] = 1,
    boots: Annotated[
        int | None,
        typer.Option(min=1, help="Guest lifetimes; the profile's, or 10 with --until-decided."),
    ] = None,
    until_decided: Annotated[
        bool,
        typer.Option(
            "--until-decided",
            help="Stop as soon as all claims are decided, --boots at the latest; error rates kept.",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option(help="Show the plan; measure nothing.")] = False,
    tune: cli_patches.Tune = False,
    swap_host_module: cli_patches.SwapHostModule = False,
    count_instructions: Annotated[
        bool,
        typer.Option(
            "--count-instructions",
            help="Count instructions, exits and context switches for one unit of work, in runs of "
            "their own (embedded, emulated host; ssh:// by perf): a second opinion that noise "
            "hardly moves. Notebook 50 reads it.",
        ),
    ] = False,
    explain_time: ExplainTime = False,
) -> None:
    """Measure an experiment: stock against patched, with an A/A pair for the noise floor.

    Progress is shown as it goes. Ctrl-C keeps what is done; `vringlab resume` continues.

    Several hosts (--host embedded --host embedded, or --hosts FILE) share the boots of one run:
    each runs all arms, and counts as a cluster in the statistics.
    """
    from vringlab.campaign.experiment import parse_overrides
    from vringlab.campaign.store import Store
    from vringlab.collect import choose_hosts, plan_run

    chosen, plan = plan_run(
        experiment,
        profile.value,
        seed,
        parse_overrides(param or []),
        [name for name in arms.split(",") if name],
        switch.value,
        boots or (_BUDGET_BOOTS if until_decided else None),
        count_instructions,
    )
    if dry_run:
        from vringlab.campaign.progress import clock

        for cell in plan.cells:
            print(cell.cell_id)
        print(f"{len(plan.cells)} cells, timed windows {clock(plan.measuring_s)}")
        return
    listed = _with_options(_hosts(host, hosts), tune, swap_host_module)
    named = choose_hosts(listed, plan, [*chosen.needs, *(need or [])], until_decided)
    if until_decided:
        from vringlab.analysis import judgement

        judgement.asked(plan)
    with Store.create(plan) as store:
        _execute(chosen, store, named, scheduler, switch, until_decided, explain_time)


def _hosts(urls: list[str] | None, file: Path | None) -> list[Host]:
    from vringlab.campaign import hosts

    listed = hosts.read_hosts(file) if file is not None else []
    asked = hosts.from_urls(urls or [])
    return [*listed, *asked] or hosts.from_urls([hosts.EMBEDDED])


def _with_options(listed: list[Host], tune: bool, swap_host_module: bool) -> list[Host]:
    from vringlab.lab.remote import with_options

    urls = [with_options(host.url, tune=tune, swap_host_module=swap_host_module) for host in listed]
    return [host.model_copy(update={"url": url}) for host, url in zip(listed, urls, strict=True)]


@app.command()
def doctor(
    host: Annotated[
        str, typer.Argument(help="ssh://\\[user@]host\\[:port]; this machine when not given.")
    ] = "embedded",
    json: Annotated[bool, typer.Option("--json", help="Print a record instead.")] = False,
    boot: Annotated[
        bool,
        typer.Option(help="Copy the image there (once, 350 MB) and boot a guest under its KVM."),
    ] = True,
) -> None:
    """Examine a KVM host: what it lacks, what changes figures there, and what to do about it.

    Nothing is changed on it but the image that is kept in /var/cache/vringlab. Exit status: 0
    usable, 3 something is missing that must be there.
    """
    from rich.console import Console

    from vringlab.collect import diagnose
    from vringlab.report import doctor_view

    def step(text: str) -> None:
        print(f"  {text}", file=sys.stderr, flush=True)

    found = diagnose(host, boot=boot, on_step=step)
    if json:
        from json import dumps

        print(dumps(found, indent=1))
    else:
        Console().print(doctor_view.terminal(found))
    if not found["usable"]:
        raise typer.Exit(3)


@app.command()
def resume(
    run: Annotated[str, typer.Argument(help="Run id, its beginning, a path, or `last`.")] = "last",
    host: Annotated[
        list[str] | None,
        typer.Option(help="Continue on this host, or these; those of the run when not given."),
    ] = None,
    hosts: Annotated[Path | None, typer.Option(help="Continue on those of a hosts.yaml.")] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="A dask scheduler whose workers drive the hosts.")
    ] = None,
    explain_time: ExplainTime = False,
) -> None:
    """Continue a run that was interrupted, with the hosts and switch it was begun with."""
    from vringlab.analysis.judgement import SEQUENTIAL
    from vringlab.campaign import experiment as experiments
    from vringlab.campaign.hosts import Host
    from vringlab.campaign.store import Store
    from vringlab.collect import choose_hosts

    with Store.open(_find(run)) as store:
        chosen = experiments.of_run(store.path, store.plan.experiment)
        known = store.provenance()
        switch = SwitchName(known.get("settings", {}).get("switch", "swap"))
        before = [Host.model_validate(entry) for entry in known["run"].get("hosts", [])]
        asked = _hosts(host, hosts) if host or hosts or not before else before
        named = choose_hosts(asked, store.plan, until_decided=SEQUENTIAL in known)
        _execute(chosen, store, named, scheduler, switch, SEQUENTIAL in known, explain_time)


def _execute(
    chosen: Experiment,
    store: Store,
    hosts: tuple[Host, ...],
    scheduler: str | None,
    switch: SwitchName,
    until_decided: bool,
    explain_time: bool = False,
) -> None:
    from vringlab.analysis import judgement
    from vringlab.campaign.budget import table
    from vringlab.campaign.runner import Interrupted
    from vringlab.collect import measure, print_step

    until = judgement.until_decided(store, print_step) if until_decided else None
    try:
        result = measure(
            chosen, store, hosts=hosts, scheduler=scheduler, switch=switch.value, until=until
        )
    except Interrupted as error:
        # Typer would end with this status too, but in silence.
        print(f"\nvringlab: {error}", file=sys.stderr)
        raise typer.Exit(130) from None
    _show(store.path)
    of = f", {len(hosts)} hosts together" if len(hosts) > 1 else ""
    print(f"\nWhere the time went (vringlab run, {result.measured} cells measured{of})")
    print(table(result.spent, explain_time))
    _point_on(result)


def _find(run: str) -> Path:
    from vringlab.campaign.catalogue import find_run, latest

    return latest() if run == "last" else find_run(run)


def _point_on(result: RunResult) -> None:
    print(f"\nrun {result.run_id} is {result.status}: {result.done} of {result.total} cells")
    print(f"  vringlab show {result.run_id}     the table again")
    print(f"  vringlab report {result.run_id}   figures, verdicts, provenance as one HTML page")


def _show(path: Path) -> None:
    from rich.console import Console
    from rich.markup import escape

    from vringlab.analysis.frames import load_run
    from vringlab.analysis.judgement import verdicts_of
    from vringlab.report.netperf_matrix import run_lines
    from vringlab.report.path_view import path_lines
    from vringlab.report.tables import arm_table

    console = Console()
    loaded = load_run(path)
    console.print(arm_table(loaded))
    for line in [*run_lines(loaded, whole=False), *path_lines(loaded)]:
        console.print(line, highlight=False)
    verdicts = verdicts_of(loaded)
    if not verdicts:
        from vringlab.report import trial_view

        of = "of the patch" if loaded.tried else "(no figure was published)"
        console.print(f"\nWhat this run says {of}", style="bold")
        for line in trial_view.lines(loaded):
            console.print(f"  {line}", highlight=False, markup=False)
    else:
        console.print("\nVerdicts on the published claims", style="bold")
    for verdict in verdicts:
        rest = verdict.sentence.removeprefix(verdict.word)
        console.print(f"  [bold]{verdict.word}[/bold]{escape(rest)}", highlight=False)
    if loaded.plan.count_instructions:
        from vringlab.report import opinions

        console.print("\nTwo opinions, time and instructions", style="bold")
        for line in opinions.lines(loaded):
            console.print(f"  {line}", highlight=False, markup=False)


@app.command()
def show(
    run: Annotated[str, typer.Argument(help="Run id, its beginning, a path, or `last`.")] = "last",
) -> None:
    """Show a run's figures by arm, with intervals; invalid samples with their reason."""
    _show(_find(run))


@app.command()
def audit(
    experiment: Annotated[str | None, typer.Argument(help="Only this experiment's.")] = None,
    file: Annotated[Path | None, typer.Option(help="Audit this claims file instead.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print records instead of text.")] = False,
) -> None:
    """Check published figures against themselves: arithmetic, copies, plausibility, status."""
    from rich.console import Console

    from vringlab.analysis.audit import audit_selection
    from vringlab.report.audit_view import findings_as_records, render

    _, findings = audit_selection(experiment, file)
    if json:
        from json import dumps

        print(dumps(findings_as_records(findings), indent=1))
    else:
        render(findings, Console())


@app.command()
def report(
    run: Annotated[str, typer.Argument(help="Run id, its beginning, a path, or `last`.")] = "last",
    out: Annotated[
        Path | None, typer.Option(help="Write the page here; RUN/report.html when not given.")
    ] = None,
    mail: Annotated[
        bool, typer.Option("--mail", help="Print the block for a cover letter (72 columns).")
    ] = False,
    csv: Annotated[
        Path | None, typer.Option(help="Write samples, figures and verdicts as CSV here.")
    ] = None,
    parquet: Annotated[Path | None, typer.Option(help="The same as Parquet.")] = None,
    crate: Annotated[
        Path | None, typer.Option(help="Write an RO-Crate for publication: a folder, or a .zip.")
    ] = None,
) -> None:
    """Write a run's report: one HTML page, or a text block, tables and a crate to publish."""
    from vringlab.analysis.frames import load_run
    from vringlab.report import export, html
    from vringlab.report.mail import mail_text

    path = _find(run)
    if mail:
        print(mail_text(load_run(path)))
        return
    written: list[Path] = []
    if csv is not None:
        written += export.export_tables(load_run(path), csv, "csv")
    if parquet is not None:
        written += export.export_tables(load_run(path), parquet, "parquet")
    if crate is not None:
        written.append(export.export_crate(path, crate))
    if out is not None or not written:
        written.append(html.write_report(path, out))
    for each in written:
        print(each)


@app.command()
def compare(
    first: Annotated[str, typer.Argument(help="A run.")],
    second: Annotated[str, typer.Argument(help="Another run of the same experiment.")],
    force: Annotated[
        bool, typer.Option("--force", help="Compare although checked provenance differs.")
    ] = False,
) -> None:
    """Compare two runs, ratio by ratio; refused when they were not made under one condition."""
    from rich.console import Console

    from vringlab.analysis.frames import load_run
    from vringlab.report.compare import compare as side_by_side

    Console().print(side_by_side(load_run(_find(first)), load_run(_find(second)), force=force))


@app.command()
def calibrate(
    datasets: Annotated[
        int, typer.Option(min=100, help="Simulated data sets for each noise and design.")
    ] = 2000,
    seed: Annotated[int, typer.Option(help="What they are drawn from.")] = 1,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    figure: Annotated[
        Path | None, typer.Option(help="Write the figure here, .png or .svg.")
    ] = None,
) -> None:
    """Simulate drivers that do not differ, and drivers that do: are the error rates kept?"""
    from rich.console import Console

    from vringlab.analysis.calibrate import calibrate as simulate
    from vringlab.report import calibration_view

    result = simulate(datasets=datasets, seed=seed)
    if markdown:
        print(calibration_view.markdown(result))
    else:
        Console().print(calibration_view.terminal(result))
    if figure is not None:
        figure.parent.mkdir(parents=True, exist_ok=True)
        calibration_view.figure(result).savefig(figure, dpi=160, bbox_inches="tight")


@app.command()
def latencies(
    files: Annotated[
        list[Path], typer.Argument(help="Text files with one latency in ns a line, or .npy files.")
    ],
    figure: Annotated[
        Path | None, typer.Option(help="Write the distributions here, .png or .svg.")
    ] = None,
) -> None:
    """Summarise raw latencies side by side (vringlab-pingpong --dump writes such files)."""
    from rich.console import Console

    from vringlab.analysis.latencies import load
    from vringlab.report import raw_latencies

    samples = {path.name: load(path) for path in files}
    Console().print(raw_latencies.table(samples))
    if figure is not None:
        figure.parent.mkdir(parents=True, exist_ok=True)
        raw_latencies.figure(samples).savefig(figure, dpi=160)


@app.command()
def build(
    experiment: Annotated[
        str | None, typer.Argument(help="Only this experiment's arms; all when not given.")
    ] = None,
) -> None:
    """Build the image and every arm now, so that later runs only measure."""
    from vringlab.campaign import experiment as experiments
    from vringlab.campaign.session import build_arms
    from vringlab.image.build import ensure_image

    def step(text: str) -> None:
        print(f"  {text}", file=sys.stderr, flush=True)

    image = ensure_image(on_step=step)
    print(f"image {image.digest}: {image.suite}, kernel {image.release}")
    for name in [experiment] if experiment else experiments.names():
        chosen = experiments.load(name)
        for arm, built in build_arms(chosen, chosen.arm_names, image, step).items():
            print(f"{name} {arm}: {built.module} build-id {built.build_id}")


def _choose_tried(asked: cli_patches.Asked, plan: Plan) -> tuple[Host, ...]:
    from vringlab.collect import choose_hosts

    listed = _with_options(_hosts(asked.urls, asked.file), asked.tune, asked.swap_host_module)
    return choose_hosts(listed, plan, asked.needs)


def _execute_tried(
    chosen: Experiment, store: Store, hosts: tuple[Host, ...], scheduler: str | None, switch: str
) -> None:
    _execute(chosen, store, hosts, scheduler, SwitchName(switch), until_decided=False)


cli_lab.register(app)
cli_patches.register(app, _choose_tried, _execute_tried)


def main() -> None:
    """Run the command line; errors of ours become a message and an exit status."""
    try:
        app()
    except VringlabError as error:
        print(f"vringlab: {error.kind}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
