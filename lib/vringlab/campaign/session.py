"""A campaign's session on real machines: a KVM host, a guest on it, and arms loaded into it.

Modules are built while the host boots: both take seconds and neither needs the other.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any, Literal

from vringlab import __version__
from vringlab.campaign.budget import Budget
from vringlab.campaign.experiment import Experiment, Value
from vringlab.campaign.store import merged
from vringlab.errors import UserError
from vringlab.image.build import Image, ensure_image
from vringlab.kernels.base import resolve
from vringlab.kernels.buildroot import ensure_buildroot
from vringlab.kernels.module import BuiltModule, build_module
from vringlab.kernels.patches import load_arm
from vringlab.lab import accel, facts
from vringlab.lab.embedded import HostMachine, embedded_host
from vringlab.lab.guest import Guest, GuestSpec, boot_guest, prepare_host
from vringlab.lab.lab import Lab
from vringlab.lab.swap import swap
from vringlab.settings import settings
from vringlab.workloads import base
from vringlab.workloads.base import Outcome

Switch = Literal["swap", "reboot"]
OnStep = Callable[[str], None]


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
    """The modules of an experiment's arms for the image's kernel; built where not cached.

    Raises:
        UserError: a patch is missing, does not apply or does not compile.
        InfrastructureError: the build root or a tool failed.
    """
    kernel = resolve(
        experiment.base_kernel, suite=image.suite, release=image.release, version=image.version
    )
    root = ensure_buildroot(kernel, on_step=on_step)
    return {
        name: build_module(
            root, load_arm(experiment.patches_name, experiment.base_kernel, name), on_step=on_step
        )
        for name in arms
    }


class MachineSession:
    """A session on a KVM host; made by `open_session`.

    Args:
        host: The host, prepared for guests.
        built: The modules of the arms.
        budget: Where the wall time goes.
        switch: Replace the module in the running guest, or boot a fresh guest for every arm.
        on_step: Told what is being done.
    """

    def __init__(
        self,
        host: HostMachine,
        built: Mapping[str, BuiltModule],
        budget: Budget,
        switch: Switch,
        on_step: OnStep,
    ) -> None:
        self.host = host.machine.name
        self.host_kind = host.kind
        self.time_budget = budget
        self._host = host
        self._built = built
        self._switch: Switch = switch
        self._on_step = on_step
        self._guest_stack = ExitStack()
        self._guest: Guest | None = None
        self._spec = GuestSpec()
        self._seen: dict[str, Any] = {}

    def close(self) -> None:
        """End the guest."""
        self._guest = None
        self._guest_stack.close()

    @property
    def lab(self) -> Lab:
        """The host with its running guest.

        Raises:
            UserError: no guest was booted yet.
        """
        if self._guest is None:
            raise UserError("there is no guest yet", remedy="boot one first")
        return Lab(self._host, self._guest)

    def boot(self, boot: str, options: Mapping[str, object]) -> None:  # noqa: ARG002 - protocol
        """End the guest and boot a fresh one; see `campaign.runner.Session`."""
        self._spec = GuestSpec(
            **{key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}  # type: ignore[arg-type]  # names and types are GuestSpec's, by the workload protocol
        )
        self.close()
        # With `reboot`, every arm gets its guest when it is loaded.
        if self._switch == "swap":
            self._boot()

    def _boot(self) -> None:
        self.close()
        self._guest = self._guest_stack.enter_context(boot_guest(self._host, self._spec))
        self._seen = facts.collect(self._host, self._guest)

    def switch(self, arm: str) -> str:
        """Load an arm; see `campaign.runner.Session`."""
        if self._switch == "reboot":
            self._boot()
        built = self._built[arm]
        swap(self.lab.guest, built)
        return built.build_id

    def measure(self, workload: str, params: Mapping[str, Value], duration_s: float) -> Outcome:
        """Run a workload once; see `campaign.runner.Session`."""
        chosen = base.find(workload)
        return chosen.run(self.lab, base.parse_params(chosen, params), duration_s)

    def provenance(self) -> dict[str, object]:
        """What is known by now of host, guest, kernels, tools and pinning."""
        image = self._host.image
        known: dict[str, Any] = {
            "command": sys.argv,
            "vringlab": __version__,
            "git": _git_state(),
            "settings": {"switch": self._switch, **settings().model_dump(mode="json")},
            "tools": dict(image.tools),
            "kernels": {
                "guest": {"release": image.release, "package": image.version},
                "image": image.digest,
            },
            "arms": {
                name: {
                    "build_id": built.build_id,
                    "module": built.module,
                    "compiler": built.compiler,
                    "patched_files": list(built.patched_files),
                    "sha256": built.sha256,
                }
                for name, built in self._built.items()
            },
            "host": {
                "kind": self._host.kind,
                "accelerator": asdict(self._host.accelerator),
                "qemu_argv": list(self._host.qemu_argv),
            },
        }
        guest = self._guest
        if guest is not None:
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


@contextmanager
def _host(name: str, image: Image, on_step: OnStep) -> Iterator[HostMachine]:
    if name != "embedded":
        raise UserError(
            f"unknown host {name!r}",
            remedy="use `embedded`; a recorded run is read with `vringlab show` and `report`",
        )
    accelerator = accel.choose(image, settings().accel)
    with embedded_host(image, accelerator, on_step=on_step) as host:
        prepare_host(host)
        yield host


@contextmanager
def open_session(
    experiment: Experiment,
    arms: tuple[str, ...],
    *,
    host: str = "embedded",
    switch: Switch = "swap",
    on_step: OnStep = lambda _: None,
) -> Iterator[MachineSession]:
    """A session on a host with everything built that the arms need.

    Args:
        experiment: The experiment.
        arms: Names of the arms that will be loaded.
        host: `embedded`.
        switch: How an arm is loaded.
        on_step: Told what is being done; called from a second thread too.

    Raises:
        UserError: an unknown host, or an arm that cannot be built.
        InfrastructureError: a tool, a machine or the disk failed.
    """
    budget = Budget()
    with ExitStack() as stack:
        with budget.phase("build"):
            image = ensure_image(on_step=on_step)
        pool = stack.enter_context(ThreadPoolExecutor(max_workers=1))
        modules: Future[dict[str, BuiltModule]] = pool.submit(
            build_arms, experiment, arms, image, on_step
        )
        with budget.phase("set-up"):
            machine = stack.enter_context(_host(host, image, on_step))
        with budget.phase("build"):
            built = modules.result()
        session = MachineSession(machine, built, budget, switch, on_step)
        stack.callback(session.close)
        yield session
