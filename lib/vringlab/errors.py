"""The four kinds of failure, and what each one tells the person who meets it.

The kind decides what happens next: a `UserError` is the caller's to mend, a
`TransientError` may be tried again, an `InfrastructureError` may not, and a
`MeasurementInvalid` never is: a measurement is not repeated to get a better number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_TAIL_LINES = 20


def _tail(text: str, lines: int = _TAIL_LINES) -> str:
    kept = text.rstrip().splitlines()[-lines:]
    return "\n".join(f"    {line}" for line in kept)


@dataclass(eq=False)
class VringlabError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        message: What went wrong, one sentence.
        remedy: What the reader can do about it.
        command: The command that failed, as an argument vector or shell text.
        host: The machine it ran on: `local`, `embedded`, `guest`, or an SSH address.
        stdout: What it printed on standard output.
        stderr: What it printed on standard error (a guest's console counts as one).
        returncode: Its exit status, when it had one.
    """

    message: str
    remedy: str = ""
    command: Sequence[str] | str | None = None
    host: str | None = None
    stdout: str = ""
    stderr: str = ""
    returncode: int | None = None

    #: Exit status of the command line tool for this kind.
    exit_code = 1
    #: The word that opens the message.
    kind = "error"

    def __str__(self) -> str:
        lines = [self.message]
        if self.command is not None:
            shown = self.command if isinstance(self.command, str) else " ".join(self.command)
            where = f" on {self.host}" if self.host else ""
            status = f" (exit {self.returncode})" if self.returncode is not None else ""
            lines.append(f"  command{where}{status}: {shown}")
        elif self.host:
            lines.append(f"  host: {self.host}")
        if self.stdout.strip():
            lines += ["  stdout, last lines:", _tail(self.stdout)]
        if self.stderr.strip():
            lines += ["  stderr, last lines:", _tail(self.stderr)]
        if self.remedy:
            lines.append(f"  remedy: {self.remedy}")
        return "\n".join(lines)

    # Exceptions built by dataclasses lose their arguments when pickled between processes.
    def __reduce__(self) -> tuple[object, ...]:
        return (
            type(self),
            (
                self.message,
                self.remedy,
                self.command,
                self.host,
                self.stdout,
                self.stderr,
                self.returncode,
            ),
        )


class UserError(VringlabError):
    """The request cannot be served as it stands: a wrong name, value, file or patch."""

    exit_code = 2
    kind = "user error"


class InfrastructureError(VringlabError):
    """A machine, tool or disk failed, and trying again would not help by itself."""

    exit_code = 3
    kind = "infrastructure error"


class TransientError(InfrastructureError):
    """A machine did not answer this time; the same step may work when tried again."""

    exit_code = 4
    kind = "transient error"


class HostLost(TransientError):  # noqa: N818 - the project's own word
    """The KVM host itself is gone, and every guest with it."""


class MeasurementInvalid(VringlabError):  # noqa: N818 - the project's own word
    """A measurement was taken but means nothing; `message` is the reason kept with the sample."""

    exit_code = 5
    kind = "measurement invalid"
