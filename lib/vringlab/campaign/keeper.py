"""The process that holds a kept lab: boots it, answers what is asked of it, and ends it.

Started by `kept.up`, with a pipe, the lock, experiment, host and seconds. Until the lab is up
it says on the pipe, a JSON object a line, what it does or why it failed. It ends by SIGTERM, when
nobody used the lab for so many seconds, or when the lab is lost; its machines end with it, also
after kill -9.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, cast

from vringlab.campaign import experiment as experiments
from vringlab.campaign import kept
from vringlab.campaign.budget import Budget
from vringlab.campaign.experiment import Experiment, Probes, Value
from vringlab.campaign.paths import PathPass
from vringlab.campaign.plan import guest_options, make_plan
from vringlab.campaign.seat import Facts, Opener, Seat
from vringlab.campaign.session import (
    HostLease,
    MachineSession,
    Prepared,
    open_bare,
    prepare_arms,
)
from vringlab.errors import InfrastructureError, UserError
from vringlab.image.build import Image, ensure_image
from vringlab.kernels.whole import guest_kernel
from vringlab.lab.owner import start_time
from vringlab.transport.local import Completed
from vringlab.transport.ssh import Address
from vringlab.workloads.base import Outcome

#: How often it is looked whether the lab still stands and is still used.
_LOOK_S = 2.0
_BACKLOG = 8
#: What may be asked of a lab; the rest of it is the keeper's.
ASKED = frozenset({"adopt", "boot", "switch", "measure", "paths", "provenance", "run"})


class KeptLab:
    """A KVM host with a guest that runs on it, for whoever asks.

    Args:
        lease: The host.
        session: The session on it.
        image: What its machines were made from.
        on_step: Told what is being done.
    """

    def __init__(
        self,
        lease: HostLease,
        session: MachineSession,
        image: Image,
        on_step: Callable[[str], None],
    ) -> None:
        self._lease = lease
        self._session = session
        self._image = image
        self._on_step = on_step

    @property
    def host(self) -> str:
        """Name of the KVM host."""
        return self._session.host

    @property
    def host_kind(self) -> str:
        """Its kind."""
        return self._session.host_kind

    @property
    def sees_paths(self) -> bool:
        """Whether there is anything to count on the way of packets."""
        return self._session.sees_paths

    @property
    def time_budget(self) -> Budget:
        """Where the lab's time goes."""
        return self._session.time_budget

    @property
    def alive(self) -> bool:
        """Whether the host still stands, as far as we have heard."""
        return self._lease.host.machine.alive

    def adopt(
        self,
        experiment: Experiment,
        arms: Sequence[str],
        switch: kept.Switch,
        probes: Probes | None,
    ) -> Facts:
        """Have arms built, to be loaded into the lab; see `kept.Line.adopt`."""
        host = self._lease.host
        if experiment.side == "host" and host.swap_refusal:
            raise UserError(
                f"the arms of {experiment.name} are modules of the KVM host: {host.swap_refusal}",
                remedy="they would replace the host's own",
                host=host.machine.name,
            )
        with self.time_budget.phase("build"):
            prepared = prepare_arms(experiment, tuple(arms), self._image, self._on_step)
        self._session.take_arms(experiment.side, prepared, switch, probes)
        return Facts(self.host, self.host_kind, self.sees_paths)

    def boot(self, boot: str, options: Mapping[str, object], edition: int = 0) -> None:  # noqa: ARG002 - protocol
        """End the guest and boot a fresh one; the host stays, with what its user put there."""
        self._session.boot(boot, options)
        self._moved()

    def switch(self, arm: str) -> str:
        """Load an arm."""
        build_id = self._session.switch(arm)
        self._moved()
        return build_id

    def _moved(self) -> None:
        """Tell `ssh` of a host that was lost and opened again elsewhere."""
        # Where every arm has a guest of its own, there is none before the first arm.
        with suppress(UserError):
            write_ssh(self.ssh_hosts())

    def measure(self, workload: str, params: Mapping[str, Value], duration_s: float) -> Outcome:
        """Run a workload once."""
        return self._session.measure(workload, params, duration_s)

    def paths(self, arm: str, points: Sequence[tuple[str, Mapping[str, Value]]]) -> list[PathPass]:
        """See which path packets take."""
        return self._session.paths(arm, points)

    def provenance(self) -> dict[str, object]:
        """What is known by now of host, guest, kernels, tools and pinning."""
        return self._session.provenance()

    def run(self, machine: kept.MachineName, command: str, timeout: float) -> Completed:
        """Run a command on one of the machines; its exit status is not looked at."""
        lab = self._session.lab
        target = lab.host.machine if machine == "host" else lab.guest.machine
        return target.run(command, timeout=timeout, check=False)

    def ssh_hosts(self) -> dict[str, Address | str]:
        """How `ssh` reaches both machines: an address of ours, or words of the user's for it."""
        lab = self._session.lab
        found: dict[str, Address | str] = {}
        for name, machine in (("host", lab.host.machine), ("guest", lab.guest.machine)):
            peer = machine.address
            found[name] = peer if isinstance(peer, Address) else machine.name
        return found


# --- ssh -----------------------------------------------------------------------------------


def write_ssh(machines: Mapping[str, Address | str]) -> dict[str, list[str]]:
    """Write what `ssh` needs to reach the machines, and return its arguments for each.

    Only keys of ours are pinned here; a user's own machine is reached as `ssh` always reaches it.
    """
    place = kept.folder()
    config, known = place / kept.SSH_CONFIG, place / kept.KNOWN_HOSTS
    arguments: dict[str, list[str]] = {}
    blocks, keys = [], []
    for name, machine in machines.items():
        if isinstance(machine, str):
            arguments[name] = _user_argv(machine)
            continue
        way = ""
        if name == "guest":
            jump = shlex.join(["ssh", *arguments["host"][:-1], "-W", "%h:%p"])
            last = shlex.quote(arguments["host"][-1])
            way = f"    ProxyCommand {jump.replace('%', '%%').replace('%%h:%%p', '%h:%p')} {last}\n"
        keys.append(f"vringlab-{name} {machine.host_key}\n")
        blocks.append(
            f"Host {name}\n"
            f"    HostName {machine.host}\n"
            f"    Port {machine.port}\n"
            f"    User {machine.user}\n"
            f'    IdentityFile "{machine.key}"\n'
            "    IdentitiesOnly yes\n"
            "    IdentityAgent none\n"
            f'    UserKnownHostsFile "{known}"\n'
            f"    HostKeyAlias vringlab-{name}\n"
            "    StrictHostKeyChecking yes\n"
            "    LogLevel ERROR\n"
            f"{way}"
        )
        arguments[name] = ["-F", str(config), name]
    _replace(known, "".join(keys))
    _replace(config, "\n".join(blocks))
    return arguments


def _user_argv(name: str) -> list[str]:
    """`root@kvm1:2222` as arguments of `ssh`."""
    bare, _, port = name.rpartition(":")
    return ["-p", port, bare] if bare and port.isdigit() else [name]


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(text)
    temporary.replace(path)


# --- the process ---------------------------------------------------------------------------


@contextmanager
def open_lab(
    experiment: Experiment, host: str, *, on_step: Callable[[str], None]
) -> Iterator[KeptLab]:
    """Boot a host and a guest on it.

    Args:
        experiment: Its workloads say what guest it is.
        host: The KVM host.
        on_step: Told what is being done.

    Raises:
        UserError, TransientError, InfrastructureError: as for `session.open_session`.
    """
    options = guest_options(make_plan(experiment, "quick", 1))
    image = ensure_image(on_step=on_step)
    base = guest_kernel(experiment.base_of(experiment.reference), image, on_step=on_step)
    kernels = {experiment.reference: base} if base is not None else {}
    first = (options, 1) if base is None else None
    with open_bare(host, image, on_step, "a kept lab (vringlab up)", first) as (lease, session):
        lab = KeptLab(lease, session, image, on_step)
        session.take_arms("guest", Prepared({}, kernels))
        session.boot("kept", options, 1)
        yield lab


class _Said:
    """The pipe to the process that waits for the lab."""

    def __init__(self, descriptor: int) -> None:
        self._stream = os.fdopen(descriptor, "w", encoding="utf-8")
        self._lock = threading.Lock()

    def __call__(self, **told: Any) -> None:
        """Say something, as long as somebody listens.

        Raises:
            InfrastructureError: nobody does any more.
        """
        with self._lock:
            if self._stream.closed:
                print(told, file=sys.stderr, flush=True)
                return
            try:
                print(json.dumps(told, default=str), file=self._stream, flush=True)
            except BrokenPipeError as error:
                raise InfrastructureError("nobody waits for the lab any more") from error

    def close(self) -> None:
        """Say no more."""
        with self._lock, suppress(BrokenPipeError):
            self._stream.close()


class _Desk:
    """Who uses the lab, and what they ask."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._holder: int | None = None
        self.used = time.monotonic()

    @property
    def busy(self) -> bool:
        """Whether anybody uses the lab now."""
        return bool(self._open)

    def listen(self, listener: Listener) -> None:
        """Answer everybody, each in a thread."""
        for number in range(2**62):
            try:
                connection = listener.accept()
            except (OSError, EOFError, AuthenticationError):
                if self._seat.over:
                    return
                time.sleep(0.05)
                continue
            with self._lock:
                self._open.add(number)
            threading.Thread(target=self._answer, args=(number, connection), daemon=True).start()

    def _answer(self, number: int, connection: Connection[Any, Any]) -> None:
        try:
            with contextlib.closing(connection), suppress(OSError, EOFError):
                while True:
                    method, arguments = connection.recv()
                    reply = self._ask(number, method, arguments)
                    try:
                        connection.send(reply)
                    except (TypeError, AttributeError, ValueError) as error:
                        # Something in it cannot be sent.
                        connection.send((False, InfrastructureError(f"{method}: {error}")))
        finally:
            with self._lock:
                self._open.discard(number)
                self.used = time.monotonic()
                if self._holder == number:
                    self._holder = None

    def _ask(self, number: int, method: str, arguments: Sequence[Any]) -> tuple[bool, Any]:
        try:
            if method not in ASKED:
                raise UserError(f"a kept lab has no {method!r}")
            if method not in ("run", "provenance"):
                self._claim(number)
            return True, self._seat.ask(method, arguments)
        except Exception as error:
            return False, error

    def _claim(self, number: int) -> None:
        with self._lock:
            if self._holder not in (None, number):
                raise UserError(
                    "another process measures on the kept lab, or has arms loaded into it",
                    remedy="wait for it to end, or close its lab",
                )
            self._holder = number


def main(
    opening: Callable[..., AbstractContextManager[Any]] = open_lab,
    arguments: Sequence[str] | None = None,
) -> None:
    """See the module.

    Args:
        opening: Opens the lab; another one in tests.
        arguments: Those of the command line.
    """
    pipe, _lock, name, host, idle = (arguments or sys.argv[1:])[:5]
    said = _Said(int(pipe))
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    seat: Seat | None = None
    try:
        experiment = experiments.load(name)
        opener = cast(Opener, partial(opening, experiment, host))
        seat = Seat(kept.HOST, opener, lambda text: said(step=text))
        while not (seat.comes_up(0.2) or stop.is_set()):
            pass
        if not stop.is_set():
            facts, _ = seat.opened()
            _serve(seat, facts, said, stop, name, host, float(idle))
    except BaseException as error:
        with suppress(InfrastructureError):
            said(error=kept.as_record(error))
    finally:
        if seat is not None:
            seat.interrupt()
            with suppress(Exception):
                seat.close()
        said.close()
        shutil.rmtree(kept.folder(), ignore_errors=True)


def _serve(
    seat: Seat,
    facts: Facts,
    said: _Said,
    stop: threading.Event,
    experiment: str,
    host: str,
    idle_s: float,
) -> None:
    """Answer until the lab is to end: asked for, unused for long, or lost."""
    lab = cast(KeptLab, seat.session)
    place = kept.folder()
    secret = (place / kept.SECRET).read_bytes()
    with (
        kept.short_path(place) as path,
        Listener(path, "AF_UNIX", backlog=_BACKLOG, authkey=secret) as listener,
    ):
        desk = _Desk(seat)
        threading.Thread(target=desk.listen, args=(listener,), daemon=True).start()
        pid = os.getpid()
        kept.Kept(
            pid=pid,
            started=start_time(pid) or "",
            host=host,
            host_kind=facts.host_kind,
            experiment=experiment,
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            idle_s=idle_s,
            ssh=write_ssh(lab.ssh_hosts()),
        ).write()
        said.close()
        while not stop.wait(_LOOK_S):
            if seat.over or not (desk.busy or lab.alive):
                print("the lab was lost", file=sys.stderr, flush=True)
                return
            if not desk.busy and time.monotonic() - desk.used > idle_s:
                print(f"nobody used the lab for {idle_s:g} s", file=sys.stderr, flush=True)
                return


if __name__ == "__main__":
    main()
