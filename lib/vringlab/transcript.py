"""A KVM host and its guest to look around in: live, or as a recorded session.

The notebook on hosts and guests needs machines; to be readable anywhere it has a recording of
what real ones answered. Both are one `OpenLab`, so the notebook does not know which it has.
"""

from __future__ import annotations

import ast
import atexit
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vringlab import __version__
from vringlab.campaign import experiment as experiments
from vringlab.campaign.experiment import Experiment
from vringlab.campaign.files import replace_json
from vringlab.errors import UserError
from vringlab.settings import settings

if TYPE_CHECKING:
    from vringlab.campaign.session import MachineSession
    from vringlab.transport.local import Completed

#: Where the collection keeps its recorded session, below its data.
FOLDER = "recorded/host-and-guest"
FILE = "transcript.json"

MachineName = Literal["host", "guest"]

_COMMAND_S = 120.0
_SHOWN_LINES = 40


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Exchange(_Document):
    """A command and what a machine answered.

    Attributes:
        machine: `host` or `guest`.
        arm: Arm that was loaded at the time; empty before the first.
        command: Shell text.
        stdout: Its output.
        stderr: Its errors.
        returncode: Its exit status.
        seconds: How long it took.
    """

    machine: MachineName
    arm: str = ""
    command: str
    stdout: str
    stderr: str = ""
    returncode: int = 0
    seconds: float = Field(ge=0)

    def text(self) -> str:
        """As a terminal shows it."""
        lines = [f"{self.machine}# {self.command}"]
        output = [*self.stdout.rstrip().splitlines(), *self.stderr.rstrip().splitlines()]
        lines += output[:_SHOWN_LINES]
        if len(output) > _SHOWN_LINES:
            lines.append(f"[{len(output) - _SHOWN_LINES} more lines]")
        if self.returncode:
            lines.append(f"[exit status {self.returncode}]")
        return "\n".join(lines)


class Load(_Document):
    """An arm as it was loaded.

    Attributes:
        arm: Its name.
        module: The module that was replaced.
        build_id: Build-id of the module found loaded afterwards.
        seconds: How long the swap took.
    """

    arm: str
    module: str
    build_id: str
    seconds: float = Field(ge=0)

    def text(self) -> str:
        """One line."""
        return (
            f"{self.arm}: {self.module} replaced in {self.seconds:.1f} s, "
            f"build-id {self.build_id} is loaded"
        )


class Transcript(_Document):
    """A recorded session.

    Attributes:
        format: Version of this document.
        recorded: When, ISO 8601 in UTC.
        vringlab: Version that recorded it.
        host_kind: Kind of the host.
        experiment: The experiment whose arms were loaded.
        arms: Names of its arms.
        steps: Seconds that each step of provisioning took, in order.
        provenance: What was known of host, guest, kernels and tools.
        loads: Arms as they were loaded.
        exchanges: Commands and their answers.
    """

    format: Literal[1] = 1
    recorded: str
    vringlab: str
    host_kind: str
    experiment: str
    arms: tuple[str, ...]
    steps: dict[str, float]
    provenance: dict[str, object]
    loads: tuple[Load, ...] = ()
    exchanges: tuple[Exchange, ...] = ()


class Backend(Protocol):
    """What answers: machines, or a transcript."""

    def run(self, machine: MachineName, command: str) -> Exchange:
        """Run a command.

        Raises:
            UserError: a transcript does not have it.
            TransientError: the connection was lost, or the command took too long.
        """
        ...

    def load(self, arm: str) -> Load:
        """Load an arm.

        Raises:
            UserError: there is no such arm, or a transcript did not load it.
            InfrastructureError: the swap did not take.
        """
        ...


class Console:
    """A machine's command line in a notebook.

    Args:
        name: `host` or `guest`.
        backend: What answers.
    """

    def __init__(self, name: MachineName, backend: Backend) -> None:
        self.name: MachineName = name
        self._backend = backend

    def run(self, *commands: str) -> None:
        """Run commands one after the other and print what they say.

        Raises:
            UserError: a recorded session does not have the command.
            TransientError: the connection was lost, or the command took too long.
        """
        for command in commands:
            print(self._backend.run(self.name, command).text(), flush=True)

    def output(self, command: str) -> str:
        """Standard output of a command, for a program.

        Raises:
            UserError, TransientError: as for `run`.
        """
        return self._backend.run(self.name, command).stdout


class OpenLab:
    """A KVM host with a guest on it, live or recorded. A context manager; made by `open_lab`.

    A notebook has no block that lasts for several cells, so it calls `close` in its last one. If
    it does not, the end of its kernel closes the lab, and if the kernel is killed, the machines
    end with it (see `transport.local.companion`).

    Attributes:
        host: The KVM host's command line.
        guest: The guest's.
        arms: Arms that can be loaded.
        steps: Seconds that each step of provisioning took, in order.
        source: Where the answers come from, one sentence.
    """

    def __init__(
        self,
        backend: Backend,
        arms: Sequence[str],
        steps: dict[str, float],
        source: str,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.host = Console("host", backend)
        self.guest = Console("guest", backend)
        self.arms = tuple(arms)
        self.steps = dict(steps)
        self.source = source
        self._backend = backend
        self._close: Callable[[], None] | None = close
        atexit.register(self.close)

    def __repr__(self) -> str:
        return self.source

    def load(self, *arms: str) -> None:
        """Load arms into the running guest one after the other, and print their identity.

        Raises:
            UserError: no such arm.
            InfrastructureError: the swap did not take.
        """
        for arm in arms:
            if arm not in self.arms:
                raise UserError(f"no arm {arm!r}", remedy=f"choose from: {', '.join(self.arms)}")
            print(self._backend.load(arm).text(), flush=True)

    def provisioning(self) -> pd.DataFrame:
        """How long each step took: columns `step` and `seconds`, as text."""
        seconds = [f"{seconds:.1f}" for seconds in self.steps.values()]
        return pd.DataFrame({"step": list(self.steps), "seconds": seconds})

    def close(self) -> None:
        """End the guest and the host; more than once does no harm."""
        close, self._close = self._close, None
        atexit.unregister(self.close)
        if close is not None:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Recorded:
    """Answers from a transcript."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self._arm = ""

    def run(self, machine: MachineName, command: str) -> Exchange:
        known = [each for each in self._transcript.exchanges if each.machine == machine]
        same = [each for each in known if each.command == command]
        if not same:
            listed = "; ".join(dict.fromkeys(each.command for each in known))
            raise UserError(
                f"the recorded session has no answer of the {machine} to: {command}",
                remedy=f"with host='embedded' a real one answers; recorded are: {listed}",
            )
        # The same question may have another answer once another arm is loaded.
        return next((each for each in same if each.arm == self._arm), same[0])

    def load(self, arm: str) -> Load:
        for each in self._transcript.loads:
            if each.arm == arm:
                self._arm = arm
                return each
        raise UserError(
            f"arm {arm!r} was not loaded in the recorded session",
            remedy="with host='embedded' any arm can be loaded",
        )


def replay(name: str = "") -> OpenLab:
    """A recorded session.

    Args:
        name: The transcript or its folder; the collection's when empty.

    Raises:
        UserError: it is missing, damaged, or of a format that this version does not know.
    """
    path = _transcript_path(name)
    try:
        transcript = Transcript.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"no recorded session: cannot read {path} ({error.strerror})",
            remedy="use host='embedded'; `python -m vringlab.transcript` records a session",
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"{path} is no recorded session of this version: "
            f"{'.'.join(map(str, first['loc']))}: {first['msg']}",
            remedy="restore the file, or record anew: python -m vringlab.transcript",
        ) from None
    day = transcript.recorded.partition("T")[0]
    source = (
        f"RECORDED on {day}: what a real {transcript.host_kind} host and its guest answered then; "
        "no machine runs now"
    )
    return OpenLab(_Recorded(transcript), transcript.arms, transcript.steps, source)


def _transcript_path(name: str) -> Path:
    if not name:
        return settings().data / FOLDER / FILE
    for path in (Path(name), settings().root / name):
        if path.exists():
            return path / FILE if path.is_dir() else path
    return Path(name)


class _Machines:
    """Answers from real machines, and keeps them.

    Args:
        ask: Runs a command on a machine; its exit status is not looked at.
        switch: Loads an arm and returns its build-id.
        module: What is replaced then.
    """

    def __init__(
        self,
        ask: Callable[[MachineName, str], Completed],
        switch: Callable[[str], str],
        module: str,
    ) -> None:
        self._ask = ask
        self._switch = switch
        self._module = module
        self._arm = ""
        self.exchanges: list[Exchange] = []
        self.loads: list[Load] = []

    def run(self, machine: MachineName, command: str) -> Exchange:
        done = self._ask(machine, command)
        exchange = Exchange(
            machine=machine,
            arm=self._arm,
            command=command,
            stdout=done.stdout,
            stderr=done.stderr,
            returncode=done.returncode,
            seconds=round(done.seconds, 3),
        )
        self.exchanges.append(exchange)
        return exchange

    def load(self, arm: str) -> Load:
        begin = time.monotonic()
        build_id = self._switch(arm)
        load = Load(
            arm=arm,
            module=self._module,
            build_id=build_id,
            seconds=round(time.monotonic() - begin, 3),
        )
        self._arm = arm
        self.loads.append(load)
        return load


def live(experiment: Experiment, host: str, on_step: Callable[[str], None]) -> OpenLab:
    """Boot a host and a guest on it, with every arm of an experiment built.

    Args:
        experiment: The experiment.
        host: `embedded`.
        on_step: Told what is being done.

    Raises:
        UserError: an unknown host, or an arm that cannot be built.
        TransientError, InfrastructureError: a machine or tool failed.
    """
    lab, _, _ = _live(experiment, host, on_step)
    return lab


def _live(
    experiment: Experiment, host: str, on_step: Callable[[str], None]
) -> tuple[OpenLab, _Machines, MachineSession]:
    from vringlab.campaign.session import open_session

    with ExitStack() as stack:
        session = stack.enter_context(
            open_session(
                experiment, experiment.arm_names, host=host, on_step=on_step, first=({}, 1)
            )
        )
        spent = session.time_budget.spent()
        steps = {
            "image and arms: build, or find in the cache": round(spent["build"], 1),
            "KVM host: until it answers": round(spent["set-up"], 1),
        }
        begin = time.monotonic()
        session.boot("look-around", {}, 1)
        steps["guest inside it: until it answers"] = round(time.monotonic() - begin, 1)
        kept = stack.pop_all()

    def ask(machine: MachineName, command: str) -> Completed:
        lab = session.lab
        target = lab.host.machine if machine == "host" else lab.guest.machine
        return target.run(command, timeout=_COMMAND_S, check=False)

    machines = _Machines(ask, session.switch, experiment.module)
    source = f"live: a KVM host of kind {session.host_kind} and a guest on it; close() ends both"
    return (
        OpenLab(machines, experiment.arm_names, steps, source, kept.close),
        machines,
        session,
    )


def kept(name: str | None = None) -> OpenLab:
    """The lab that `vringlab up` keeps; closing it leaves it up.

    Arms are built when the first one is loaded, and other processes can load none until this is
    closed.

    Args:
        name: The experiment whose arms can be loaded; the lab's own when None.

    Raises:
        UserError: no lab is up.
        TransientError: its keeper does not answer.
    """
    from vringlab.campaign.kept import Line, get

    lab = get()
    experiment = experiments.load(name or lab.experiment)
    line = Line.open()
    adopted = False

    def switch(arm: str) -> str:
        nonlocal adopted
        if not adopted:
            line.adopt(experiment, experiment.arm_names)
            adopted = True
        return str(line.ask("switch", arm).value)

    return OpenLab(
        _Machines(
            lambda machine, text: line.run(machine, text, _COMMAND_S), switch, experiment.module
        ),
        experiment.arm_names,
        {},
        f"live: the lab that is kept since {lab.since}, a KVM host of kind {lab.host_kind} and a "
        "guest on it; close() leaves it up, `vringlab down` ends it",
        line.close,
    )


def tour(notebook: Path) -> list[tuple[str, str]]:
    """What a notebook asks of its lab, in order: (`host`, `guest` or `load`, command or arm).

    Only calls of `lab.host.run`, `lab.guest.run` and `lab.load` with literal text count.

    Raises:
        UserError: the notebook cannot be read.
    """
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        trees = [ast.parse(source) for source in sources]
    except (OSError, ValueError, KeyError, SyntaxError) as error:
        raise UserError(
            f"cannot read notebook {notebook}: {error}", remedy="restore it from a copy"
        ) from None
    calls = {"lab.host.run": "host", "lab.guest.run": "guest", "lab.load": "load"}
    return [
        (calls[ast.unparse(node.func)], argument.value)
        for tree in trees
        for node in _calls(tree)
        if ast.unparse(node.func) in calls
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]


def _calls(tree: ast.Module) -> list[ast.Call]:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def record_lab(
    experiment: Experiment, out: Path, notebook: Path, host: str = "embedded"
) -> Transcript:
    """Boot a real lab, ask it all that a notebook asks, and keep the answers.

    Args:
        experiment: The experiment whose arms are loaded.
        out: The file to write; it appears whole or not at all.
        notebook: The notebook.
        host: The KVM host.

    Raises:
        UserError, TransientError, InfrastructureError: as for `live`, or a command failed: a
            recording of a failure is of no use.
    """
    steps = tour(notebook)
    lab, machines, session = _live(experiment, host, lambda step: print(f"  {step}", flush=True))
    with lab:
        for machine, text in steps:
            if machine == "load":
                lab.load(text)
            else:
                (lab.host if machine == "host" else lab.guest).run(text)
        transcript = Transcript(
            recorded=datetime.now(UTC).isoformat(timespec="seconds"),
            vringlab=__version__,
            host_kind=session.host_kind,
            experiment=experiment.name,
            arms=lab.arms,
            steps=lab.steps,
            provenance=session.provenance(),
            loads=tuple(machines.loads),
            exchanges=tuple(machines.exchanges),
        )
    failed = [each for each in transcript.exchanges if each.returncode]
    if failed:
        raise UserError(
            f"nothing was recorded: a command failed\n{failed[0].text()}",
            remedy="mend it in the notebook",
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_json(out, _without_paths(transcript.model_dump(mode="json")))
    return transcript


def _without_paths(value: Any) -> Any:
    """The same without this machine's folders, which say nothing to another one."""
    if isinstance(value, dict):
        return {key: _without_paths(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_paths(each) for each in value]
    if isinstance(value, str):
        value = value.replace(str(settings().cache), "CACHE")
        return value.replace(str(settings().root), "ROOT")
    return value


def main() -> None:
    """Record the session that the notebook on hosts and guests replays."""
    found = settings()
    record_lab(
        experiments.load("vsock-direct-enqueue"),
        found.data / FOLDER / FILE,
        found.root / "notebooks" / "01_host_and_guest.ipynb",
    )


if __name__ == "__main__":
    main()
