"""What `vringlab doctor` makes of a host's readings, and of a host played by sshd."""

from __future__ import annotations

import getpass
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.fakes.processes import script
from tests.fakes.ssh_server import Keys, RealServer, SshServer, find_sshd

from vringlab import collect
from vringlab.errors import UserError
from vringlab.lab import doctor, facts
from vringlab.lab.doctor import Check, Diagnosis
from vringlab.report import doctor_view
from vringlab.settings import Settings
from vringlab.transport import login

_SSHD = find_sshd()

#: A host that is as it should be.
FINE: Mapping[str, str] = {
    "uid": "0",
    "sudo": "",
    "no tools": "",
    "filesystems": "nodev\tsysfs\nnodev\toverlay\n\text4\n\tsquashfs",
    "loaded": "loop\noverlay\nsquashfs\nkvm_amd\nvhost_vsock\nvhost_net\ntun",
    "loadable": "loop\nkvm_amd\nkvm_intel\nvhost_vsock\nvhost_net\ntun",
    "devices": "/dev/kvm\n/dev/loop-control\n/dev/vhost-vsock\n/dev/vhost-net\n/dev/net/tun",
    "networks": "",
    "autogroup": "0",
    "hugepages": "HugePages_Total:       0\nHugePages_Free:        0",
    "guests": "0",
    "disk": "/dev/sda1 100000000 1 50000000 1% /",
    "owner": "",
    "left": "",
    "arch": "x86_64",
    "release": "6.12.1",
    "cpuinfo": "vendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC 7302\nflags\t\t: fpu svm",
    "cpus": "16",
    "governor": "performance",
    "smt": "off",
    "boost": "0",
    "irqbalance": "0",
    "parameters": "/sys/module/kvm/parameters/halt_poll_ns:200000",
    "modules": "kvm",
    "memory": "MemTotal:       65000000 kB",
    "load": "0.10 0.10 0.10 1/200 4000",
    "mitigations": "/sys/devices/system/cpu/vulnerabilities/spectre_v2:Vulnerable",
    "lockdep": "0",
}


def readings(**changed: str) -> tuple[dict[str, str], dict[str, Any]]:
    parts = {**FINE, **{name.replace("_", " ", 1): text for name, text in changed.items()}}
    text = "\n".join(f"@@ {name}\n{body}" for name, body in parts.items())
    return facts.sections(text), facts.parse(text)


def rows(kind: str = "physical", **changed: str) -> dict[str, Check]:
    parts, known = readings(**changed)
    found = [
        *doctor.basics(parts, known),
        *doctor.room(parts, known, cpus=4, memory_mib=2048, disk_mb=450),
        *doctor.noise(parts, known, kind),
        doctor._free(parts),
    ]
    return {row.name: row for row in found}


def test_a_host_as_it_should_be() -> None:
    found = rows()
    assert {row.state for row in found.values()} == {"ok"}
    # What is as it should be needs no remedy, but may have a note.
    assert [row.name for row in found.values() if row.remedy] == ["halt_poll_ns"]


@pytest.mark.parametrize(
    ("name", "changed", "state", "words"),
    [
        ("rights", {"uid": "1000"}, "missing", "ssh://root@HOST"),
        ("rights", {"uid": "1000", "sudo": "yes"}, "ok", ""),
        ("processor", {"arch": "aarch64"}, "missing", "x86-64"),
        ("tools", {"no_tools": "flock\nnsenter"}, "missing", "util-linux"),
        ("file systems", {"filesystems": "ext4"}, "missing", "modules package"),
        ("vhost_vsock", {"loaded": "tun", "devices": "", "loadable": "loop"}, "missing", "vhost_v"),
        ("vhost_net", {"loaded": "tun", "devices": "/dev/loop-control"}, "ok", ""),
        ("networks", {"networks": "192.168.77.0/24 dev br0"}, "missing", "free"),
        ("cores", {"cpus": "3"}, "missing", "two vCPUs"),
        ("memory", {"memory": "MemTotal: 1000000 kB"}, "missing", "more memory"),
        ("memory", {"memory": ""}, "unknown", ""),
        ("disk", {"disk": "/dev/sda1 100 1 20000 1% /"}, "missing", "VRINGLAB_HOST_CACHE"),
        ("governor", {"governor": "powersave\nperformance"}, "warn", "--tune"),
        ("governor", {"governor": ""}, "unknown", ""),
        ("SMT", {"smt": "on"}, "warn", "share a core"),
        ("SMT", {"smt": "notsupported"}, "ok", ""),
        ("turbo", {"boost": "1"}, "warn", "heat"),
        ("irqbalance", {"irqbalance": "1"}, "warn", "--tune"),
        ("autogroup", {"autogroup": "1"}, "warn", "autogroup"),
        ("other load", {"load": "9.00 1 1 1/2 3"}, "warn", "quiet"),
        ("other load", {"guests": "2"}, "warn", "quiet"),
        ("debug kernel", {"lockdep": "1"}, "warn", "PROVE_LOCKING"),
        ("halt_poll_ns", {"parameters": "", "modules": ""}, "unknown", ""),
        ("lease", {"left": "1"}, "warn", "next run"),
    ],
)
def test_what_is_not(name: str, changed: dict[str, str], state: str, words: str) -> None:
    row = rows(**changed)[name]
    assert row.state == state
    assert words in row.remedy


def test_a_busy_host_says_by_whom() -> None:
    owner = {"who": "eve@desk", "pid": 7, "run": "r1", "since": "2026-01-01T00:00:00Z"}
    row = rows(owner=json.dumps({**owner, "process": "x"}))["lease"]
    assert row.state == "missing"
    assert "eve@desk (process 7) for run r1 since 2026-01-01" in row.found


@pytest.mark.parametrize("kind", ["nested", "emulated"])
def test_the_level_of_a_virtual_machine(kind: str) -> None:
    row = rows(kind, product="KVM")["level"]
    assert row.state == "warn"
    assert "L1" in row.found
    assert "KVM" in row.found


@pytest.mark.parametrize(
    ("low", "high", "state"),
    [(-0.5, 0.5, "ok"), (1.5, 2.5, "ok"), (3, 4, "warn"), (-9, -8, "warn")],
)
def test_clock_skew(low: float, high: float, state: str) -> None:
    assert doctor._skew(low, high).state == state


# --- a diagnosis as a whole ----------------------------------------------------------------


def diagnosis(**changed: str) -> Diagnosis:
    parts, known = readings(**changed)
    checks = (*doctor.basics(parts, known), *doctor.noise(parts, known, "physical"))
    return Diagnosis("ssh://kvm1", "physical", "2026-01-01T00:00:00+00:00", 1.0, checks, known)


def test_it_survives_json() -> None:
    found = diagnosis(smt="on")
    record = json.loads(json.dumps(found.as_record()))
    assert Diagnosis.from_record(record) == found
    assert record["usable"] is True
    assert diagnosis(uid="1000").as_record()["usable"] is False
    for broken in ({}, {**record, "format": 2}, {**record, "checks": [{"name": "x"}]}):
        with pytest.raises(UserError, match="no diagnosis"):
            Diagnosis.from_record(broken)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({}, "Usable."),
        ({"smt": "on", "boost": "1"}, "Usable. Figures depend on: SMT, turbo."),
        ({"uid": "1000"}, "Not usable as a KVM host: rights."),
    ],
)
def test_what_the_rows_come_to(changed: dict[str, str], sentence: str) -> None:
    record = diagnosis(**changed).as_record()
    assert doctor_view.verdict(record) == sentence
    console = Console(width=160, record=True, file=None, force_terminal=False)
    with console.capture() as shown:
        console.print(doctor_view.terminal(record))
    assert sentence in shown.get()
    assert "changes figures" in shown.get()
    assert list(doctor_view.frame(record).columns) == ["what", "state", "weight", "found", "remedy"]


# --- hosts ---------------------------------------------------------------------------------


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    # What a test puts there goes before the host's own tools.
    tools = f"SetEnv PATH={tmp_path}/bin:/usr/local/bin:/usr/bin:/bin\n"
    keys = Keys.make(tmp_path)
    ssh = tmp_path / "home" / ".ssh"
    ssh.mkdir(parents=True)
    shutil.copy(keys.client.path, ssh / "id_ed25519")
    monkeypatch.setenv("HOME", str(ssh.parent))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setattr(login, "_SYSTEM_CONFIG", tmp_path / "none")
    own = Settings(host_cache=str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "settings", lambda: own)
    server: RealServer | SshServer = (
        RealServer(keys, tmp_path, _SSHD, f"AllowTcpForwarding no\n{tools}")
        if _SSHD
        else SshServer(keys)
    )
    with server:
        (ssh / "known_hosts").write_text(f"[127.0.0.1]:{server.port} {keys.host.public}\n")
        yield f"ssh://{getpass.getuser()}@127.0.0.1:{server.port}"


def test_a_real_host_is_read_in_one_session(address: str) -> None:
    found = doctor.examine(address, None)
    named = {row.name: row for row in found.checks}
    assert found.host == address
    assert named["login"].state == "ok"
    assert named["clock"].state == "ok"
    assert named["KVM"].state == "unknown"
    assert named["cores"].found.split(",")[0] == str(_processors())
    assert set(named) >= {"rights", "tools", "vhost_net", "governor", "SMT", "disk", "lease"}
    assert named["forwarding"].state == ("missing" if _SSHD else "ok")
    if _SSHD:
        assert "AllowTcpForwarding" in named["forwarding"].remedy
        assert not found.usable
    json.dumps(found.as_record())


@pytest.mark.skipif(not _SSHD, reason="there is no sshd here")
@pytest.mark.parametrize("shift", ["90 seconds ago", "2 hours"])
def test_a_real_host_whose_clock_is_wrong(address: str, tmp_path: Path, shift: str) -> None:
    script(tmp_path / "bin" / "date", f'exec /bin/date -d "{shift}" "$@"')
    clock = {row.name: row for row in doctor.examine(address, None).checks}["clock"]
    assert clock.state == "warn"
    assert clock.remedy


def _processors() -> int:
    done = subprocess.run(
        ["grep", "-c", "^processor", "/proc/cpuinfo"], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_the_recorded_diagnosis_is_shown() -> None:
    record = collect.diagnose()
    assert record["usable"] is True
    assert record["provenance"]["recorded_by"]
    names = [row["name"] for row in record["checks"]]
    assert len(names) == len(set(names))
    assert "KVM" in names


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}'])
def test_a_file_that_is_no_diagnosis(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(UserError, match="no diagnosis"):
        collect.diagnose(f"replay:{path}")
    with pytest.raises(UserError, match="no diagnosis"):
        collect.diagnose(f"replay:{tmp_path}/none")
