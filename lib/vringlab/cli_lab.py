"""Commands for a lab that is kept: `up`, `shell` and `down`. A thin layer, as `vringlab.cli`."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from vringlab.errors import UserError

if TYPE_CHECKING:
    from vringlab.campaign.kept import Kept

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(text: str) -> float:
    """`90s`, `30m`, `4h` or `1d` in seconds.

    Raises:
        UserError: it is none of that, or 0.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text.strip())
    value = float(found[1]) * _UNITS[found[2]] if found is not None else 0.0
    if not value:
        raise UserError(f"{text!r} is no length of time", remedy="give one such as 30m or 4h")
    return value


def place(words: list[str]) -> tuple[Literal["guest", "host"], list[str]]:
    """The machine that the words of `shell` name, and the command."""
    machine: Literal["guest", "host"] = "host" if words[:1] == ["host"] else "guest"
    rest = words[1:] if words[:1] in (["host"], ["guest"]) else words
    return machine, rest[1:] if rest[:1] == ["--"] else rest


def _length(idle_s: float) -> str:
    """Seconds as `seconds` reads them, in the largest unit that fits."""
    unit = max((u for u in _UNITS if idle_s >= _UNITS[u]), key=_UNITS.__getitem__, default="s")
    return f"{idle_s / _UNITS[unit]:g} {unit}"


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""

    @app.command(
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
        epilog="Exit status with a command: the command's.",
    )
    def up(
        words: Annotated[
            list[str] | None,
            typer.Argument(
                metavar="[-- COMMAND...]",
                help="Run it in the guest once the lab is up; its output comes when it has ended.",
            ),
        ] = None,
        experiment: Annotated[
            str, typer.Option("--experiment", "-e", help="Make a guest for its workloads.")
        ] = "vsock-direct-enqueue",
        host: Annotated[
            str, typer.Option(help="The KVM host: embedded, or ssh://USER@HOST:PORT.")
        ] = "embedded",
        idle: Annotated[
            str, typer.Option("--for", help="End it when nobody used it for so long: 30m, 4h.")
        ] = "4h",
    ) -> None:
        """Boot a KVM host with a guest on it, and keep both until `vringlab down`.

        They are there for `vringlab shell`, for notebooks (open_lab("kept")) and for runs
        (--host kept).
        """
        # Imports nothing that the keeper needs too: it starts the sooner.
        from vringlab.campaign import kept

        if host == kept.HOST:
            raise UserError("a kept lab is not on a kept lab", remedy="name a KVM host")
        lab, made = kept.up(
            experiment,
            host,
            seconds(idle),
            lambda text: print(f"  {text}", file=sys.stderr, flush=True),
        )
        if not words:
            _tell(lab, made)
            return
        done = kept.run("guest", words)
        sys.stdout.write(done.stdout)
        sys.stderr.write(done.stderr)
        sys.exit(done.returncode)

    @app.command(
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
        epilog="Exit status: the command's; 255 when the machine was not reached.",
    )
    def shell(
        words: Annotated[
            list[str] | None,
            typer.Argument(
                metavar="MACHINE -- COMMAND...",
                help="MACHINE is guest (when not given) or host; a shell there without COMMAND.",
            ),
        ] = None,
    ) -> None:
        """Open a shell in the kept lab's guest, or on its host; or run one command there.

        vringlab shell;  vringlab shell host;  vringlab shell -- uname -r
        """
        from vringlab.campaign import kept

        machine, command = place(words or [])
        sys.exit(kept.shell(machine, command))

    @app.command()
    def down() -> None:
        """End the kept lab; nothing of it is left."""
        from vringlab.campaign import kept

        print("the kept lab has ended" if kept.down() else "no lab was up")


def _tell(lab: Kept, made: bool) -> None:
    print(
        f"{'up' if made else f'already up since {lab.since}'}: a KVM host ({lab.host}, "
        f"{lab.host_kind}) and a guest on it, for {lab.experiment}"
    )
    print("  vringlab shell                 a shell in the guest")
    print("  vringlab shell host            a shell on the KVM host")
    print("  vringlab shell -- uname -r     one command, with its exit status")
    print('  open_lab("kept")               in a notebook')
    print(f"  vringlab run {lab.experiment} --host kept")
    print(f"  vringlab down                  end it; by itself after {_length(lab.idle_s)} unused")
