"""A campaign's session on real machines: a KVM host, a guest on it, and arms loaded into it.

Modules are built while the host boots: both take seconds and neither needs the other.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from vringlab import __version__
from vringlab.campaign.budget import Budget
from vringlab.campaign.experiment import Experiment, Probes, Value
from vringlab.campaign.files import merged
from vringlab.campaign.paths import PASS_S, PathPass, judge
from vringlab.errors import HostLost, InfrastructureError, UserError, VringlabError
from vringlab.image.build import Image, ensure_image
from vringlab.kernels.base import is_held
from vringlab.kernels.bundle import KernelBundle, as_record
from vringlab.kernels.module import BuiltModule, build_module
from vringlab.kernels.patches import load_arm
from vringlab.kernels.whole import guest_kernel, prepare_base
from vringlab.lab import accel, facts, snapshot
from vringlab.lab.embedded import HostMachine, embedded_host
from vringlab.lab.guest import Guest, GuestSpec, boot_guest, prepare_host
from vringlab.lab.lab import Lab
from vringlab.lab.probe import Probe, counting
from vringlab.lab.remote import PREFIX, require_leave, undo_swap, user_host
from vringlab.lab.swap import (
    loaded_build_id,
    restore_host,
    running_kernel,
    swap,
    swap_host,
)
from vringlab.settings import settings
from vringlab.transport import local
from vringlab.workloads import base
from vringlab.workloads.base import Outcome

if TYPE_CHECKING:
    from vringlab.campaign.instructions import Counting

Switch = Literal["swap", "reboot"]
Side = Literal["guest", "host"]
OnStep = Callable[[str], None]

#: A host that takes longer for nothing at all is as good as lost.
_ANSWER_S = 30.0
#: An error may be heard of before the loss of the connection that it came from.
_LOSS_S = 1.0


def _git_state() -> dict[str, object]:
    """Commit of the collection and whether it was changed; empty outside a git checkout."""

    def git(*arguments: str) -> str | None:
        try:
            return subprocess.run(
                ["git", "-C", str(settings().root), *arguments],
                capture_output=True,
                text=True,
                check=True,
                timeout=20,
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return {}
    return {"commit": commit, "dirty": bool(git("status", "--porcelain"))}


def build_arms(
    experiment: Experiment, arms: tuple[str, ...], image: Image, on_step: OnStep
) -> dict[str, BuiltModule]:
    """The modules of an experiment's arms for its base kernel; built where not cached.

    An arm that is a kernel has none.

    Raises:
        UserError: a patch is missing, does not apply or does not compile.
        InfrastructureError: the build root or a tool failed.
    """
    patched = [name for name in arms if not experiment.is_kernel_arm(name)]
    if not patched:
        return {}
    root = prepare_base(experiment.base_kernel, image, on_step=on_step).root
    return {
        name: build_module(
            root,
            load_arm(experiment.patches_name, experiment.base_kernel, name, data=experiment.home),
            on_step=on_step,
        )
        for name in patched
    }


@dataclass(frozen=True)
class Prepared:
    """What a session loads and boots.

    Attributes:
        modules: The module of each arm that has patches.
        kernels: The kernel of each arm whose guest boots another one than the image's.
    """

    modules: Mapping[str, BuiltModule]
    kernels: Mapping[str, KernelBundle]


def prepare_arms(
    experiment: Experiment, arms: tuple[str, ...], image: Image, on_step: OnStep
) -> Prepared:
    """Modules and kernels of an experiment's arms; made where not cached.

    Raises:
        UserError: as for `build_arms`; or arms of the host's side on another kernel than its own.
        InfrastructureError: the build root, a kernel or a tool failed.
    """
    kernels: dict[str, KernelBundle] = {}
    for name in arms:
        bundle = guest_kernel(experiment.base_of(name), image, on_step=on_step)
        if bundle is not None:
            kernels[name] = bundle
    if kernels and experiment.side == "host":
        raise UserError(
            f"modules of the KVM host are built for the kernel that it runs, {image.release}",
            remedy="use the image's base kernel: others are booted by guests",
        )
    return Prepared(build_arms(experiment, arms, image, on_step), kernels)


@dataclass(frozen=True)
class SavedLabs:
    """Labs of this machine that are restored instead of booted.

    Attributes:
        image: Their image.
        accelerator: What they run on.
        on_step: Told what is being done.
        count: Whether the host shall count instructions.
    """

    image: Image
    accelerator: accel.Accelerator
    on_step: OnStep
    count: bool = False

    @contextmanager
    def __call__(self, spec: GuestSpec, edition: int) -> Iterator[Asleep]:
        """Restore one, making it where there is none yet; it ends with the block.

        Raises:
            TransientError, InfrastructureError: it cannot be restored.
        """
        found = snapshot.ensure(
            self.image, self.accelerator, spec, edition=edition, on_step=self.on_step
        )
        with snapshot.restored(
            found,
            self.image,
            self.accelerator,
            spec,
            on_step=self.on_step,
            count_instructions=self.count,
        ) as (host, waking):
            yield Asleep(host, spec, found, waking)


@dataclass(frozen=True)
class Asleep:
    """A restored host with a guest on it that is still paused.

    Attributes:
        host: The host.
        spec: What the guest was made from.
        snapshot: What both were restored from.
        waking: Lets the guest go on; it ends with the block.
    """

    host: HostMachine
    spec: GuestSpec
    snapshot: snapshot.Snapshot
    waking: Callable[[], AbstractContextManager[Guest]]


class HostLease:
    """The KVM host of a session, which may be opened again; a context manager.

    Args:
        opening: Opens it, prepared for guests.
        saved: Restores it instead, with a guest; None where that cannot be.
        first: The guest with which it is wanted first, and which edition of it; None to open it.
        on_step: Told what is being done.

    Attributes:
        host: The host as it is now.
    """

    def __init__(
        self,
        opening: Callable[[], AbstractContextManager[HostMachine]],
        saved: SavedLabs | None = None,
        first: tuple[GuestSpec, int] | None = None,
        on_step: OnStep = lambda _: None,
    ) -> None:
        self._opening = opening
        self._saved = saved
        self._on_step = on_step
        self._asleep: Asleep | None = None
        self._stack = ExitStack()
        self._open = True
        if saved is None or first is None or not self._restore(*first):
            self.host = self._stack.enter_context(opening())
            self._open = True

    def _restore(self, spec: GuestSpec, edition: int) -> bool:
        """Put a saved lab in the host's place; when that cannot be, say why."""
        assert self._saved is not None, "asked before"
        self.drop()
        try:
            self._asleep = self._stack.enter_context(self._saved(spec, edition))
        except InfrastructureError as error:
            self._on_step(f"no saved lab is used, one is booted: {error.message}")
            # Another try would end the host that is booted now, most likely for nothing again.
            self._saved = None
            return False
        self.host = self._asleep.host
        self._open = True
        return True

    def asleep(self, spec: GuestSpec, edition: int) -> Asleep | None:
        """The host restored with a guest, which the caller is to wake; None when it is not.

        The host is another one afterwards, unless it was just restored with that very guest.

        Args:
            spec: The guest.
            edition: Which of its saved labs.
        """
        if self._saved is None:
            return None
        kept = self._asleep
        if kept is None or (kept.spec, kept.snapshot.edition) != (spec, edition):
            self._restore(spec, edition)
        found, self._asleep = self._asleep, None
        return found

    def clear(self) -> None:
        """End a guest that came with the host and is still asleep, to make room for another."""
        kept, self._asleep = self._asleep, None
        # One that is dead is ended all the same.
        with suppress(InfrastructureError):
            if kept is not None:
                with kept.waking():
                    pass

    def __enter__(self) -> Self:
        """Return the lease."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the host, or leave it."""
        self._stack.close()

    def drop(self) -> None:
        """End the host; `renew` opens it again."""
        self._open = False
        self._asleep = None
        self._stack.close()

    def renew(self) -> bool:
        """Open the host again unless it answers; True when it had been lost.

        Raises:
            TransientError, InfrastructureError: it cannot be opened.
        """
        lost = self._open
        if self._open:
            try:
                self.host.machine.run("true", timeout=_ANSWER_S)
            except InfrastructureError:
                self.drop()
        if not self._open:
            self.host = self._stack.enter_context(self._opening())
            self._open = True
            return lost
        return False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Make any failure the loss of the host when it was lost meanwhile.

        Whatever talks to a guest or its QEMU goes through the host and fails in its own words.

        Raises:
            HostLost: the host is gone.
        """
        try:
            yield
        except InfrastructureError as error:
            if isinstance(error, HostLost) or self.host.machine.outlives(_LOSS_S):
                raise
            raise HostLost(
                f"the KVM host was lost: {error.message}",
                remedy="see whether the machine is still up; one of ours has its last words here",
                host=self.host.machine.name,
                stdout=self.host.last_words(),
            ) from error


class MachineSession:
    """A session on a KVM host; made by `open_session`. A context manager.

    Args:
        lease: The host.
        side: Whose module the arms replace.
        built: The modules of the arms.
        budget: Where the wall time goes.
        switch: Replace the module in the running guest (or under it, on the host), or boot a
            fresh guest for every arm.
        on_step: Told what is being done.
        probes: What is counted to see which path packets take; None when nothing is.
        kernels: Kernels of arms whose guests boot another one than the image's.
        count: Whether instructions are counted beside the time.
    """

    def __init__(
        self,
        lease: HostLease,
        side: Side,
        built: Mapping[str, BuiltModule],
        budget: Budget,
        switch: Switch,
        on_step: OnStep,
        probes: Probes | None = None,
        kernels: Mapping[str, KernelBundle] | None = None,
        count: bool = False,
    ) -> None:
        self.sees_paths = probes is not None
        self._probes = probes
        self.host = lease.host.machine.name
        self.host_kind = lease.host.kind
        self.time_budget = budget
        self._lease = lease
        self._side = side
        self._built = built
        self._kernels = dict(kernels or {})
        self._switch: Switch = switch
        self._on_step = on_step
        self._guest_stack = ExitStack()
        self._guest: Guest | None = None
        self._spec = GuestSpec()
        self._seen: dict[str, Any] = {}
        #: The guest of which that was seen; reading it takes a second.
        self._seen_of: Guest | None = None
        self._how: dict[str, Any] = {}
        #: Build-id of each host module that was replaced, as it was before.
        self._shipped: dict[str, str] = {}
        self._count = count
        #: What counts on the guest that runs; and why nothing does.
        self._counting: Counting | None = None
        self._count_refusal = ""

    def __enter__(self) -> Self:
        """Return the session."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the guest and give the host its own modules back, also after an error.

        Raises:
            InfrastructureError: a module could not be restored. An error that is on its way
                says so instead.
        """
        try:
            with ExitStack() as stack:
                stack.callback(self._restore)
                self._end_guest()
        except InfrastructureError as error:
            if value is None:
                raise
            words = f"besides, {error.message}; {error.remedy}"
            if isinstance(value, VringlabError):
                value.remedy = f"{value.remedy}; {words}" if value.remedy else words
            else:
                value.add_note(words)

    def _end_guest(self) -> None:
        self._guest = None
        self._seen_of = None
        self._counting = None
        self._guest_stack.close()

    def _restore(self) -> None:
        # A machine of ours that died takes its modules with it, and a user's restores them itself.
        if (self._host.kind != "physical" or self._host.lost_is_undone) and (
            not self._host.machine.alive
        ):
            return
        for module, build_id in self._shipped.items():
            try:
                restore_host(self._host, module, build_id)
            except InfrastructureError as error:
                raise InfrastructureError(
                    f"the KVM host's own {module} could not be restored: {error.message}",
                    remedy=f"on {self.host} run `rmmod {module}; modprobe {module}`",
                    host=self.host,
                    stderr=error.stderr,
                ) from error

    @property
    def _host(self) -> HostMachine:
        return self._lease.host

    @property
    def lab(self) -> Lab:
        """The host with its running guest.

        Raises:
            UserError: no guest was booted yet.
        """
        if self._guest is None:
            raise UserError("there is no guest yet", remedy="boot one first")
        return Lab(self._host, self._guest)

    def take_arms(
        self,
        side: Side,
        prepared: Prepared,
        switch: Switch = "swap",
        probes: Probes | None = None,
    ) -> None:
        """Serve other arms from here on; the guest that runs goes on.

        Args:
            side: As for the class, like the rest.
            prepared: Modules and kernels of the arms.
            switch: How they are loaded.
            probes: What is counted.
        """
        self._side, self._switch = side, switch
        self._built, self._kernels = prepared.modules, dict(prepared.kernels)
        self._probes, self.sees_paths = probes, probes is not None

    def boot(self, boot: str, options: Mapping[str, object], edition: int = 0) -> None:  # noqa: ARG002 - protocol
        """End the guest and boot a fresh one; see `campaign.runner.Session`.

        A host that was lost is opened again first.
        """
        self._spec = guest_spec(options)
        self._end_guest()
        # A host whose modules were replaced stays, to be given its own back.
        if edition and self._switch == "swap" and not self._kernels and not self._shipped:
            with self.time_budget.phase("boot"):
                if self._wake(edition):
                    return
        with self.time_budget.phase("set-up"):
            if self._lease.renew():
                self._on_step("the KVM host had been lost and was opened again")
            self._lease.clear()
        # With `reboot`, every arm gets its guest when it is loaded.
        if self._switch == "swap":
            with self._lease.watched():
                # Arms that are swapped in one guest have one kernel in common.
                self._boot(next(iter(self._kernels.values()), None))

    def _wake(self, edition: int) -> bool:
        """Restore a lab and wake its guest; False when one has to be booted."""
        found = self._lease.asleep(self._spec, edition)
        if found is None:
            return False
        try:
            self._guest = self._guest_stack.enter_context(found.waking())
        except InfrastructureError as error:
            self._end_guest()
            # Who knows what of it still runs.
            self._lease.drop()
            snapshot.discard(found.snapshot)
            self._on_step(f"the saved lab's guest is dead, one is booted: {error.message}")
            return False
        self._how = {"how": "restored", "snapshot": found.snapshot.as_record()}
        return True

    def _boot(self, kernel: KernelBundle | None = None) -> None:
        self._end_guest()
        self._how = {"how": "booted"}
        self._guest = self._guest_stack.enter_context(
            boot_guest(self._host, self._spec, kernel=kernel)
        )

    def switch(self, arm: str) -> str:
        """Load an arm; see `campaign.runner.Session`."""
        identity = self._load(arm)
        if self._count:
            with self._lease.watched():
                self._count_from_here(arm)
        return identity

    def _count_from_here(self, arm: str) -> None:
        """Know where the loaded arm lies, as far as instructions can be counted here."""
        # Imported late: only who counts needs numpy to start.
        from vringlab.campaign.instructions import counting_of

        if self._counting is None and not self._count_refusal:
            self._counting, self._count_refusal = counting_of(self.lab)
            if self._count_refusal:
                self._on_step(f"instructions are not counted: {self._count_refusal}")
        if self._counting is not None:
            self._counting.loaded(self._built.get(arm), self._side)

    def _load(self, arm: str) -> str:
        built = self._built.get(arm)
        with self._lease.watched():
            if built is not None and self._side == "host":
                self._switch_host(built)
                return built.identity
            if self._switch == "reboot":
                self._boot(self._kernels.get(arm))
            if built is None:
                return running_kernel(self.lab.guest.machine, self._release(arm))
            swap(self.lab.guest, built)
        return built.identity

    def _release(self, arm: str) -> str:
        kernel = self._kernels.get(arm)
        return kernel.kernel.release if kernel is not None else self._host.image.release

    def _switch_host(self, built: BuiltModule) -> None:
        if self._switch == "reboot":
            self._end_guest()
        for item in built.loading:
            if item.module not in self._shipped:
                before = loaded_build_id(self._host.machine, item.module)
                self._host.on_change(undo_swap(item.module, before))
                self._shipped[item.module] = before
        swap_host(self._host, self._guest, built)
        if self._switch == "reboot":
            self._boot()

    def measure(self, workload: str, params: Mapping[str, Value], duration_s: float) -> Outcome:
        """Run a workload once; see `campaign.runner.Session`."""
        run = self._running(workload, params)
        with self._lease.watched():
            outcome = run(duration_s)
            if self._counting is None:
                return outcome
            with self.time_budget.phase("count"):
                return self._counting.add(outcome, run)

    def _running(self, workload: str, params: Mapping[str, Value]) -> Callable[[float], Outcome]:
        """What runs a workload at a point for so many seconds."""
        chosen = base.find(workload)
        point = base.parse_params(chosen, params)
        return lambda seconds: chosen.run(self.lab, point, seconds)

    def paths(self, arm: str, points: Sequence[tuple[str, Mapping[str, Value]]]) -> list[PathPass]:
        """Count the experiment's functions while each point runs; see `campaign.runner.Session`."""
        assert self._probes is not None, "sees_paths says so"
        probes = as_probes(self._probes)
        found = []
        with self._lease.watched():
            machine = self.lab.guest.machine if self._side == "guest" else self._host.machine
            with counting(machine, probes) as tally:
                for workload, params in points:
                    outcome = self._running(workload, params)(PASS_S)
                    counts = tally.take()
                    notes = [*tally.notes, *counts.notes]
                    if not outcome.valid:
                        notes.append(f"as a measurement it would be invalid: {outcome.reason}")
                    found.append(
                        judge(
                            self._probes,
                            arm,
                            workload,
                            params,
                            counts.values,
                            tool=tally.tool,
                            missing=tally.missing,
                            notes=notes,
                        )
                    )
        return found

    def provenance(self) -> dict[str, object]:
        """What is known by now of host, guest, kernels, tools and pinning.

        Raises:
            TransientError: a machine was lost.
        """
        image = self._host.image
        if self._guest is not None and self._seen_of is not self._guest:
            with self.time_budget.phase("boot"), self._lease.watched():
                self._seen = facts.collect(self._host, self._guest)
            self._seen_of = self._guest
        known: dict[str, Any] = {
            "command": sys.argv,
            "vringlab": __version__,
            "git": _git_state(),
            "settings": {"switch": self._switch, **settings().model_dump(mode="json")},
            "tools": dict(image.tools),
            "kernels": {
                "guest": {"release": image.release, "package": image.version},
                **(
                    {"arms": {n: as_record(k) for n, k in self._kernels.items()}}
                    if self._kernels
                    else {}
                ),
                "image": image.digest,
            },
            "arms": {
                name: {
                    "build_id": built.identity,
                    "module": ", ".join(item.module for item in built.loading),
                    "compiler": built.compiler,
                    "patched_files": list(built.patched_files),
                    "sha256": built.sha256,
                    "text_sha256": "+".join(item.text_sha256 for item in built.loading),
                }
                for name, built in self._built.items()
            },
            "host": {
                "kind": self._host.kind,
                "accelerator": asdict(self._host.accelerator),
                "qemu_argv": list(self._host.qemu_argv),
            },
        }
        if self._count:
            known["instructions"] = {
                "counted": not self._count_refusal,
                "not available": self._count_refusal,
            }
        guest = self._guest
        if guest is not None:
            known["boot"] = {**self._how, "boot_id": guest.boot_id}
            known["guest"] = {
                "spec": guest.spec.as_record(),
                "cid": guest.cid,
                "qemu_argv": list(guest.qemu_argv),
            }
            known["pinning"] = {
                "layout": guest.layout.as_record(),
                "threads": {str(tid): cpu for tid, cpu in guest.threads.items()},
                "vhost_threads": list(guest.vhost_threads),
            }
        return merged(known, self._seen)


def guest_spec(options: Mapping[str, object]) -> GuestSpec:
    """A guest's specification from what workloads ask for."""
    return GuestSpec(
        **{key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}  # type: ignore[arg-type]  # names and types are GuestSpec's, by the workload protocol
    )


def as_probes(probes: Probes) -> list[Probe]:
    """What the lab counts; a `within` function is where its own counter says it is."""
    modules = {counter.function: counter.module for counter in probes.counters}
    return [
        Probe(
            name=counter.name,
            function=counter.function,
            module=counter.module,
            within=counter.within,
            within_module=modules.get(counter.within or ""),
            returns=counter.returns,
        )
        for counter in probes.counters
    ]


@contextmanager
def _embedded(
    image: Image, accelerator: accel.Accelerator, on_step: OnStep, count: bool
) -> Iterator[HostMachine]:
    with embedded_host(image, accelerator, on_step=on_step, count_instructions=count) as host:
        prepare_host(host)
        yield host


@contextmanager
def _other_host(name: str, image: Image, on_step: OnStep, run: str) -> Iterator[HostMachine]:
    if not name.startswith(PREFIX):
        raise UserError(
            f"unknown host {name!r}",
            remedy="use `embedded` or ssh://[user@]host[:port]; a recorded run is read with "
            "`vringlab show` and `report`",
        )
    with user_host(name, image, run=run, on_step=on_step) as host:
        prepare_host(host)
        yield host


def _lease(
    host: str,
    image: Image,
    first: tuple[Mapping[str, object], int] | None,
    on_step: OnStep,
    run: str,
    count: bool = False,
) -> HostLease:
    if host != "embedded":
        return HostLease(lambda: _other_host(host, image, on_step, run))
    accelerator = accel.choose(image, settings().accel)
    saved = None
    # Under KVM both boot within seconds, and nobody has seen its nested state restored.
    if settings().saved_labs and accelerator.name == "tcg":
        saved = SavedLabs(image, accelerator, on_step, count)
    return HostLease(
        lambda: _embedded(image, accelerator, on_step, count),
        saved,
        (guest_spec(first[0]), first[1]) if first is not None and first[1] else None,
        on_step,
    )


@contextmanager
def open_bare(
    host: str,
    image: Image,
    on_step: OnStep = lambda _: None,
    run: str = "",
    first: tuple[Mapping[str, object], int] | None = None,
) -> Iterator[tuple[HostLease, MachineSession]]:
    """A session on a host that serves no arms yet (`take_arms`), and the host's lease.

    Args:
        host: `embedded`, or another host that `open_session` takes.
        image: The image, from `ensure_image`.
        on_step: Told what is being done.
        run: What it is for; whoever finds the host busy is told.
        first: As for `open_session`.

    Raises:
        UserError, TransientError, InfrastructureError: as for `open_session`.
    """
    with _lease(host, image, first, on_step, run) as lease:
        budget = Budget()
        with MachineSession(lease, "guest", {}, budget, "swap", on_step) as session:
            yield lease, session


@contextmanager
def open_session(
    experiment: Experiment,
    arms: tuple[str, ...],
    *,
    host: str = "embedded",
    switch: Switch = "swap",
    on_step: OnStep = lambda _: None,
    probes: Probes | None = None,
    run: str = "",
    first: tuple[Mapping[str, object], int] | None = None,
    count_instructions: bool = False,
) -> Iterator[MachineSession]:
    """A session on a host with everything built that the arms need.

    Args:
        experiment: The experiment.
        arms: Names of the arms that will be loaded.
        host: `embedded`, or `ssh://[user@]host[:port]`.
        switch: How an arm is loaded.
        on_step: Told what is being done; called from a second thread too.
        probes: What is counted to see which path packets take; nothing when None.
        run: The run that it is for; whoever finds a user's host busy is told.
        first: Options and edition of the first boot, so that the host is restored with that guest
            instead of booted, where that can be.
        count_instructions: Whether they are counted beside the time, where the host can.

    Raises:
        UserError: an unknown host, one whose modules may not be replaced as the arms need, or an
            arm that cannot be built.
        InfrastructureError: a tool, a machine or the disk failed.
    """
    if experiment.side == "host":
        require_leave(host)
    budget = Budget()
    with ExitStack() as stack:
        with budget.phase("build"):
            image = ensure_image(on_step=on_step)
        pool = stack.enter_context(ThreadPoolExecutor(max_workers=1))
        # Nobody who wants to leave waits for a kernel to be built.
        stop = local.Stop()
        stack.callback(stop)
        prepared: Future[Prepared] = pool.submit(
            stop.around, prepare_arms, experiment, arms, image, on_step
        )
        with budget.phase("set-up"):
            restorable = switch == "swap" and all(
                is_held(experiment.base_of(arm), image.release) for arm in arms
            )
            lease = stack.enter_context(
                _lease(host, image, first if restorable else None, on_step, run, count_instructions)
            )
            if experiment.side == "host" and lease.host.swap_refusal:
                raise UserError(
                    f"the arms of {experiment.name} are modules of the KVM host: "
                    f"{lease.host.swap_refusal}",
                    remedy="boot that kernel there, or measure them on the embedded host",
                    host=lease.host.machine.name,
                )
        with budget.phase("build"):
            ready = prepared.result()
        yield stack.enter_context(
            MachineSession(
                lease,
                experiment.side,
                ready.modules,
                budget,
                switch,
                on_step,
                probes,
                ready.kernels,
                count_instructions,
            )
        )
