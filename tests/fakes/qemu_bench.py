"""An image whose QEMU is a fake that behaves as told, and a cache of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.fakes.processes import DEADLINE_S, alive, script, until
from tests.fakes.ssh_server import Keys

from vringlab.image.build import Image
from vringlab.lab import embedded, owner, snapshot
from vringlab.settings import Settings

ROOT = Path(__file__).resolve().parents[2]

#: Programs of the machine that must not be run on this one: its clock, its console, its sshd.
_PROGRAMS = {
    "vringlab-wake": """
echo "$1 $(od -An -v -tx1 | tr -d ' \\n')" >> "$FAKE_QEMU_KEYS/wakes"
[ ! -e "$FAKE_QEMU_KEYS/refuses" ] || { echo 'vringlab-wake: the clock cannot be set' >&2; exit 2; }
""",
    "setsid": """exec sh -c "$(printf %s "$3" | sed "s,/dev/console,$FAKE_CONSOLE,")" """,
    "pgrep": """[ -e "$FAKE_QEMU_KEYS/hangs-on" ]""",
    "busybox": "exec sleep 0.05",
}


class Bench:
    """A QEMU that behaves as told, an image with its keys, and a cache of our own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.folder = folder
        self.labs = folder / "cache" / "labs"
        self.snapshots = folder / "cache" / "snapshots"
        keys = Keys.make(folder)
        image = folder / "image"
        image.mkdir()
        (image / "id_ed25519").write_bytes(keys.client.path.read_bytes())
        self.image = Image(image, "0" * 16, "trixie", "6.12.1", "6.12.1-1", {}, keys.host.public)
        command = f"PYTHONPATH={ROOT}:{ROOT / 'lib'} exec {sys.executable} -m tests.fakes.fake_qemu"
        self.qemu = self.image.qemu
        script(self.qemu, f'{command} "$@"')
        for name, text in _PROGRAMS.items():
            script(folder / "bin" / name, text)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
        monkeypatch.setenv("FAKE_QEMU_KEYS", str(folder))
        self.behaves("works")

    def behaves(
        self, how: str, boot_timeout: float = DEADLINE_S, cpus: int = 4, memory_mib: int = 4096
    ) -> None:
        """Have the next QEMU behave so, under these settings."""
        self._monkeypatch.setenv("FAKE_QEMU", how)
        found = Settings(
            cache=self.folder / "cache",
            boot_timeout=boot_timeout,
            lab_cpus=cpus,
            lab_memory_mib=memory_mib,
        )
        for module in (embedded, owner, snapshot):
            self._monkeypatch.setattr(module, "settings", lambda: found)

    def _noted(self, name: str) -> list[list[str]]:
        path = self.folder / name
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def calls(self) -> list[tuple[int, int]]:
        """Process number and forwarded port of each QEMU that was started."""
        return [(int(pid), int(port)) for pid, port in self._noted("calls")]

    @property
    def monitor(self) -> list[list[str]]:
        """What each QEMU was told through its monitor."""
        heard = self._noted("monitor")
        return [[text for of, text in heard if int(of) == pid] for pid, _ in self.calls]

    @property
    def wakes(self) -> list[tuple[float, bytes]]:
        """Clock and seed that each machine was given which went on from a state."""
        return [(float(clock), bytes.fromhex(seed)) for clock, seed in self._noted("wakes")]

    def nothing_left(self) -> bool:
        return until(lambda: not any(alive(pid) for pid, _ in self.calls)) and not (
            self.labs.exists() and list(self.labs.iterdir())
        )
