"""Facts of machines, from recorded output: an embedded host and its guest, and a cloud machine.

In the last one, names and addresses of its owner were replaced.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vringlab.analysis.provenance import describe, key_of, readings
from vringlab.lab import facts
from vringlab.lab.facts import (
    build_ids,
    collect,
    level,
    local_facts,
    parse,
    parse_threads,
    script,
    sections,
)
from vringlab.transport.local import Completed

RECORDED = Path(__file__).parent / "outputs" / "facts"


def recorded(name: str) -> str:
    return (RECORDED / f"{name}.txt").read_text()


def test_embedded_host() -> None:
    found = parse(recorded("embedded-host"))
    assert found["kernel"]["release"] == "6.12.118+deb13-amd64"
    assert found["kernel"]["build_id"] == "67e5e727aeb3cb468dfe1bb8f9738f944c3a7d50"
    assert found["kernel"]["tainted"] == 0
    assert found["kernel"]["lockdep"] is False
    assert found["cpu"]["model"] == "QEMU TCG CPU version 2.5+"
    assert found["cpu"]["microcode"] == "0x1000065"
    assert found["cpu"]["count"] == 4
    assert found["cpu"]["hypervisor"] is True
    assert found["cpu"]["virtualisation"] == "svm"
    assert found["memory_mib"] == 3921
    assert found["thp"] == "always"
    assert found["halt_poll_ns"] == 200000
    assert found["product"] == "Standard PC (Q35 + ICH9, 2009)"
    assert found["irqbalance"] is False
    assert found["modules"]["vhost_net"]["parameters"] == {"experimental_zcopytx": "0"}
    assert found["modules"]["kvm_amd"]["parameters"]["nested"] == "1"
    assert found["mitigations"]["l1tf"] == "Not affected"


def test_every_build_id_is_that_of_its_module() -> None:
    modules = parse(recorded("embedded-host"))["modules"]
    assert modules["kvm"]["build_id"] == "1f032537366202 83acf782f8952f5dbf75cc308d".replace(
        " ", ""
    )
    assert modules["vsock"]["build_id"] == "6d8b21381a28ff22b082da4cc18c1dbc779507c0"
    # Built in: it has no note of its own, and the others must not move up into its place.
    assert modules["virtio_pci"]["build_id"] is None
    known = [one["build_id"] for one in modules.values() if one["build_id"]]
    assert len(known) == len(set(known)) == 9


def test_embedded_guest() -> None:
    found = parse(recorded("embedded-guest"))
    assert found["clocksource"] == "kvm-clock"
    assert found["cpu"]["count"] == 2
    assert found["modules"]["virtio_net"]["parameters"]["napi_tx"] == "Y"
    assert found["offloads"] == {
        "52:54:00:76:6c:01": {
            "tcp-segmentation-offload": "on",
            "generic-segmentation-offload": "on",
            "generic-receive-offload": "on",
        }
    }
    assert found["halt_poll_ns"] is None


def test_a_machine_without_drivers_lacks_readings_and_nothing_fails() -> None:
    found = parse(recorded("no-drivers"))
    for name in ("governor", "driver", "turbo", "isolated", "virtualisation"):
        assert found["cpu"][name] is None, name
    assert found["cpu"]["smt"] == "notsupported"
    assert found["kernel"]["build_id"] == "48dc540c8b76393804ca8088dbfa7d42911a9444"
    assert found["modules"]["virtio_net"] == {
        "build_id": None,
        "parameters": {"csum": "Y", "gso": "Y", "napi_tx": "Y", "napi_weight": "64"},
    }


def test_a_command_line_is_kept_without_its_owners_words() -> None:
    kept = parse(recorded("no-drivers"))["kernel"]["cmdline"]
    assert kept == (
        "mitigations=auto,no_guest_host,no_guest_guest random.trust_cpu=1 swiotlb=noforce "
        "nested_pvm=1 cpuidle_haltpoll.force=1"
    )


@pytest.mark.parametrize(
    ("text", "turbo"),
    [
        ("@@ no_turbo\n0\n@@ boost\n", "on"),
        ("@@ no_turbo\n1\n@@ boost\n", "off"),
        ("@@ no_turbo\n@@ boost\n1\n", "on"),
        ("@@ no_turbo\n@@ boost\n0\n", "off"),
        ("@@ no_turbo\n@@ boost\n", None),
        ("@@ boost\nmaybe\n", None),
    ],
)
def test_turbo_is_said_the_same_way_by_all_drivers(text: str, turbo: str | None) -> None:
    assert parse(text)["cpu"]["turbo"] == turbo


def test_governors_of_all_processors() -> None:
    found = parse("@@ governor\nperformance\nperformance\npowersave\nperformance\n")
    assert found["cpu"]["governor"] == "performance,powersave"


@pytest.mark.parametrize("text", ["", "@@ end\n", "garbage\n@@ memory\nMemTotal: many\n", "@@ \n"])
def test_no_output_is_no_reading(text: str) -> None:
    found = parse(text)
    assert found["cpu"]["model"] is None
    assert found["memory_mib"] is None
    assert found["modules"] == {}
    assert json.dumps(found)


def test_notes_that_are_cut_or_foreign() -> None:
    one = "04000000 14000000 03000000 474e5500" + "ab" * 20
    assert build_ids(one) == ["ab" * 20]
    assert build_ids("04000000 04000000 01000000 58656e00 00000001" + one) == ["ab" * 20]
    assert build_ids(one + one.replace("ab", "cd")) == ["ab" * 20, "cd" * 20]
    for broken in ("", "zz", "0400", "04000000ffffffff03000000474e5500"):
        assert build_ids(broken) in ([], [""])


def test_notes_that_do_not_match_their_modules_are_not_guessed() -> None:
    one = "040000001400000003000000474e5500" + "ab" * 20
    text = (
        "@@ modules\nkvm tun\n@@ noted\n/sys/module/kvm/notes/.note.gnu.build-id "
        f"/sys/module/tun/notes/.note.gnu.build-id\n@@ notes\n{one}\n"
    )
    assert {name: m["build_id"] for name, m in parse(text)["modules"].items()} == {
        "kvm": None,
        "tun": None,
    }


def test_threads_and_those_that_are_gone() -> None:
    assert parse_threads(recorded("no-drivers"), [1, 2, 999999]) == {
        "1": {"name": "init", "cpus": "0-1"},
        "2": {"name": "kthreadd", "cpus": "0-1"},
        "999999": {"name": "gone", "cpus": "gone"},
    }


def test_the_script_is_valid_shell_and_ends_well(tmp_path: Path) -> None:
    for text in (script(), script([1], tools=False)):
        path = tmp_path / "script"
        path.write_text(text)
        assert subprocess.run(["sh", "-n", str(path)], check=False).returncode == 0
    parts = sections(
        subprocess.run(
            ["sh", "-c", script([1], tools=False)], capture_output=True, text=True, check=True
        ).stdout
    )
    assert "end" in parts
    assert parts["arch"]


def test_this_machine() -> None:
    found = local_facts()
    assert found["kernel"]["release"]
    assert found["cpu"]["count"] >= 1


class FakeMachine:
    """Answers with recorded output, and counts the commands."""

    def __init__(self, text: str) -> None:
        self.commands: list[str] = []
        self._text = text

    def run(self, command: str, **_: object) -> Completed:
        self.commands.append(command)
        return Completed(self._text, "", 0, 0.1)


def _lab(qemu_argv: tuple[str, ...]) -> tuple[Any, Any]:
    host = SimpleNamespace(
        machine=FakeMachine(recorded("embedded-host")), kind="emulated", qemu_argv=qemu_argv
    )
    guest = SimpleNamespace(
        machine=FakeMachine(recorded("embedded-guest")),
        threads={215: 1, 217: 2, 999: 3},
        qemu_argv=("qemu-system-x86_64", "-name", "a b"),
    )
    return host, guest


def test_collecting_takes_one_command_for_each_machine() -> None:
    host, guest = _lab(())
    found = collect(host, guest)
    assert len(host.machine.commands) == len(guest.machine.commands) == 1
    assert "outer" not in found["host"]
    assert found["host"]["level"] == "L1 (emulated)"
    assert found["guest"]["level"] == "L2 (emulated)"
    assert found["guest"]["qemu_command"] == "qemu-system-x86_64 -name 'a b'"
    assert found["pinning"]["asked"] == {"215": 1, "217": 2, "999": 3}
    assert found["pinning"]["seen"] == {"215": "1", "217": "2", "999": "gone"}
    assert found["pinning"]["names"]["217"] == "CPU 0/KVM"
    assert json.dumps(found)


def test_the_machine_under_an_embedded_host_is_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "local_facts", lambda: parse(recorded("no-drivers")))
    host, _ = _lab(("qemu-system-x86_64",))
    found = collect(host)
    assert found["host"]["outer"]["cpu"]["model"] == "AMD EPYC"
    assert set(found) == {"host"}


def test_every_fact_is_in_the_registry() -> None:
    host, guest = _lab(())
    found = collect(host, guest)
    found["host"]["outer"] = parse(recorded("no-drivers"))
    unknown = [one.path for one in readings(found) if one.key is None]
    assert unknown == []
    values = [one for one in readings(found) if one.value is not None]
    assert len(values) > 150
    table = describe(found, missing=False)
    assert set(table.columns) == {"key", "value", "check", "description"}
    assert "200000 ns" in set(table["value"])
    assert key_of("host.cpu.model") is not None


@pytest.mark.parametrize(
    ("kind", "guest", "text"),
    [
        ("physical", False, "L0"),
        ("physical", True, "L1"),
        ("nested", True, "L2"),
        ("emulated", True, "L2 (emulated)"),
        ("simulated", False, None),
    ],
)
def test_levels(kind: str, guest: bool, text: str | None) -> None:
    assert level(kind, guest) == text
