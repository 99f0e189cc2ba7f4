"""What is known of where a figure comes from: a registry of keys, each with unit and check.

A key is a dotted path into provenance.json; `*` stands for every name at its place. A key whose
check is `must match` changes what is measured: two runs that differ in it are not compared
unless that is forced. A key that is missing is said to be missing: it is no difference, and no
proof that there is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

Check = Literal["must match", "informative"]

#: Said of a key that a provenance does not have.
MISSING = "not recorded"


@dataclass(frozen=True)
class Key:
    """One thing that is recorded.

    Attributes:
        path: Where it stands; `*` for every name.
        check: Whether runs that differ in it may be compared.
        description: What it is, for tables.
        unit: Unit of the value; empty for words.
    """

    path: str
    check: Check
    description: str
    unit: str = ""


_MUST: Check = "must match"
_INFO: Check = "informative"


def _machine(prefix: str, what: str, check: Check) -> tuple[Key, ...]:
    """Keys of one machine, as `vringlab.lab.facts.parse` names them."""
    return (
        Key(f"{prefix}.level", check, f"virtualisation level of {what}"),
        Key(f"{prefix}.cpu.vendor", check, f"processor vendor of {what}"),
        Key(f"{prefix}.cpu.model", check, f"processor model of {what}"),
        Key(f"{prefix}.cpu.family", check, f"processor family of {what}"),
        Key(f"{prefix}.cpu.model_number", check, f"processor model number of {what}"),
        Key(f"{prefix}.cpu.stepping", check, f"processor stepping of {what}"),
        Key(f"{prefix}.cpu.microcode", check, f"microcode of {what}"),
        Key(f"{prefix}.cpu.count", check, f"processors of {what}"),
        Key(f"{prefix}.cpu.online", check, f"processors of {what} that are online"),
        Key(f"{prefix}.cpu.isolated", check, f"processors of {what} kept from the scheduler"),
        Key(f"{prefix}.cpu.governor", check, f"frequency governor of {what}"),
        Key(f"{prefix}.cpu.driver", check, f"frequency driver of {what}"),
        Key(f"{prefix}.cpu.turbo", check, f"turbo of {what}"),
        Key(f"{prefix}.cpu.smt", check, f"simultaneous multithreading of {what}"),
        Key(f"{prefix}.cpu.hypervisor", check, f"whether {what} runs under a hypervisor"),
        Key(f"{prefix}.cpu.virtualisation", _INFO, f"virtualisation extension of {what}"),
        Key(f"{prefix}.mitigations.*", check, f"mitigations of {what}"),
        Key(f"{prefix}.memory_mib", _INFO, f"memory of {what}", "MiB"),
        Key(f"{prefix}.numa_nodes", check, f"NUMA nodes of {what}"),
        Key(f"{prefix}.thp", check, f"transparent huge pages of {what}"),
        Key(f"{prefix}.clocksource", check, f"clock source of {what}"),
        Key(f"{prefix}.irqbalance", check, f"whether irqbalance runs on {what}"),
        Key(f"{prefix}.halt_poll_ns", check, f"polling before a vCPU halts on {what}", "ns"),
        Key(f"{prefix}.kernel.release", check, f"kernel release of {what}"),
        Key(f"{prefix}.kernel.version", check, f"kernel build of {what}"),
        Key(f"{prefix}.kernel.arch", check, f"architecture of {what}"),
        Key(f"{prefix}.kernel.build_id", check, f"kernel build-id of {what}"),
        Key(f"{prefix}.kernel.cmdline", check, f"kernel parameters of {what} that change timing"),
        Key(f"{prefix}.kernel.lockdep", check, f"whether the kernel of {what} proves its locks"),
        Key(f"{prefix}.kernel.tainted", _INFO, f"taint of the kernel of {what}"),
        Key(f"{prefix}.modules.*.parameters.*", check, f"module parameters on {what}"),
        Key(f"{prefix}.modules.*.build_id", _INFO, f"build-ids of modules on {what} at the end"),
        Key(f"{prefix}.offloads.*.*", check, f"offloads of virtio-net devices on {what}"),
        Key(f"{prefix}.tools.*", check, f"tool versions on {what}"),
        Key(f"{prefix}.product", _INFO, f"machine type of {what} as its firmware says"),
        Key(f"{prefix}.load", _INFO, f"load average of {what} when read"),
    )


_KEYS = (
    Key("run.experiment", _MUST, "experiment"),
    Key("run.host_kind", _MUST, "kind of host: emulated, nested, physical, simulated"),
    Key("host.kind", _MUST, "kind of host as the lab says"),
    Key("host.name", _INFO, "name of the host"),
    Key("host.accelerator.name", _MUST, "what the embedded host runs on: kvm or tcg"),
    Key("host.accelerator.reason", _INFO, "why"),
    *_machine("host", "the KVM host", _MUST),
    Key("host.qemu_argv", _INFO, "command line of the embedded host's QEMU"),
    # Under emulation the machine beneath sets the pace, and nothing else says which it was.
    *_machine("host.outer", "the machine under the embedded host", _MUST),
    *_machine("guest", "the guest", _MUST),
    Key("guest.spec.vcpus", _MUST, "vCPUs of the guest"),
    Key("guest.spec.memory_mib", _MUST, "memory given to the guest", "MiB"),
    Key("guest.spec.shared_memory", _MUST, "whether guest memory is shared"),
    # Which of them a point runs on is among its parameters; the others are idle.
    Key("guest.spec.nics", _INFO, "vhost-user devices of the guest"),
    Key("guest.spec.kernel_args", _MUST, "kernel parameters added for the guest"),
    Key("guest.cid", _INFO, "vsock context id"),
    Key(
        "guest.qemu_argv", _MUST, "command line of the guest's QEMU, without what differs each time"
    ),
    Key("guest.qemu_command", _INFO, "the same in one line, as it was run"),
    Key("kernels.guest.release", _MUST, "kernel release of the image"),
    Key("kernels.guest.package", _MUST, "kernel package of the image"),
    Key("kernels.image", _INFO, "digest of the image"),
    Key("arms.*.build_id", _MUST, "build-ids of the arms' modules"),
    Key("arms.*.module", _MUST, "modules of the arms"),
    Key("arms.*.compiler", _MUST, "compiler of the arms"),
    Key("arms.*.patched_files", _INFO, "files that an arm's patches touch"),
    Key("arms.*.sha256", _INFO, "digests of the arms' modules"),
    Key("exercised.*", _INFO, "whether the changed path ran, by arm"),
    Key("tools.*", _MUST, "package versions of the tools in the image"),
    Key("pinning.layout.*", _MUST, "processors asked for, by what runs on them"),
    Key("pinning.asked.*", _INFO, "processor asked for, by thread"),
    Key("pinning.seen.*", _INFO, "processors seen, by thread"),
    Key("pinning.names.*", _INFO, "names of the pinned threads"),
    Key("pinning.threads.*", _INFO, "processor set, by thread"),
    Key("pinning.vhost_threads", _INFO, "threads that are vhost workers"),
    Key("settings.switch", _MUST, "how arms are loaded: swap or reboot"),
    Key("settings.suite", _MUST, "suite of the image"),
    Key("settings.lab_cpus", _MUST, "vCPUs of the embedded host"),
    Key("settings.lab_memory_mib", _MUST, "memory of the embedded host", "MiB"),
    Key("settings.*", _INFO, "other settings"),
    Key("git.commit", _INFO, "commit of this collection"),
    Key("git.dirty", _INFO, "whether it was changed since"),
    Key("seeds.*", _INFO, "seeds of all random draws"),
    Key("command", _INFO, "command of the run"),
    Key("vringlab", _INFO, "version of vringlab"),
    Key("sequential.*", _INFO, "plan of looks of a run that may stop early"),
    Key("boots.*.*", _INFO, "guest lifetimes"),
    Key("note", _INFO, "remark"),
    Key("format", _INFO, "version of the file"),
    Key("run.*", _INFO, "identity and size of the run"),
)

#: All keys; the first that fits a path is meant.
KEYS: tuple[Key, ...] = _KEYS

# What a command line has anew each time: it says nothing of what was measured.
_PASSING = (
    (re.compile(r"guest-cid=\d+"), "guest-cid=N"),
    (re.compile(r"(tcp:127\.0\.0\.1:)\d+"), r"\1N"),
    (re.compile(r"\bfd=\d+"), "fd=N"),
    # Devices under test: one for each point of the matrix.
    (re.compile(r"-chardev socket,id=c\d+\S*\s*"), ""),
    (re.compile(r"-netdev vhost-user\S*\s*"), ""),
    (re.compile(r"-device virtio-net-pci,netdev=v\d+\S*\s*"), ""),
)


@dataclass(frozen=True)
class Reading:
    """One recorded value.

    Attributes:
        path: Where it stands.
        value: What was recorded; None when it is missing.
        key: The registry's entry; None for a path that it does not know.
    """

    path: str
    value: object
    key: Key | None

    @property
    def text(self) -> str:
        """The value in words, with its unit."""
        return value_text(self.value, self.key.unit if self.key else "")


@dataclass(frozen=True)
class Difference:
    """One key in which two provenances differ, or that one of them lacks.

    Attributes:
        path: Where.
        first: Value of the first; None when it lacks it.
        second: Value of the second.
        check: Whether it matters.
        description: What it is.
        unit: Its unit.
    """

    path: str
    first: object
    second: object
    check: Check
    description: str
    unit: str = ""

    @property
    def missing(self) -> bool:
        """Whether one side does not have it, so that nothing can be said."""
        return self.first is None or self.second is None

    @property
    def refuses(self) -> bool:
        """Whether it stands against comparing the two."""
        return self.check == "must match" and not self.missing

    def __str__(self) -> str:
        """`processor model of the KVM host (host.cpu.model): A against B`."""
        one, other = (value_text(value, self.unit) for value in (self.first, self.second))
        return f"{self.description} ({self.path}): {one} against {other}"


def value_text(value: object, unit: str = "") -> str:
    """A recorded value in words."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={value_text(one)}" for name, one in value.items()) or "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        plain = all(isinstance(item, str | int | float) for item in value)
        return (" " if plain else "; ").join(value_text(item) for item in value) or "none"
    text = str(value)
    return f"{text} {unit}".strip() if text else "none"


def _fits(path: str, pattern: str) -> bool:
    names, wanted = path.split("."), pattern.split(".")
    if wanted[-1] == "*" and len(names) > len(wanted):
        # A name may hold dots itself, as versions and addresses do.
        names = [*names[: len(wanted) - 1], ".".join(names[len(wanted) - 1 :])]
    return len(names) == len(wanted) and all(
        want in ("*", name) for name, want in zip(names, wanted, strict=True)
    )


def key_of(path: str) -> Key | None:
    """The registry's entry for a path; None when it knows none."""
    return next((key for key in KEYS if _fits(path, key.path)), None)


_LEAVES = frozenset(key.path for key in KEYS if "*" not in key.path)


def flatten(provenance: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every value with its path, in order; a registered key's value is not taken apart."""
    for name, value in provenance.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and path not in _LEAVES:
            yield from flatten(value, f"{path}.")
        else:
            yield path, value


def readings(provenance: Mapping[str, Any]) -> list[Reading]:
    """What a provenance holds, in the order of the registry, and what of it is missing.

    A key with `*` has a reading for each name that is there, and none when there is none. What
    the registry does not know comes last.
    """
    values = dict(flatten(provenance))
    known: dict[str, Key | None] = {path: key_of(path) for path in values}
    found: list[Reading] = []
    for key in KEYS:
        mine = [Reading(path, values[path], key) for path, one in known.items() if one is key]
        found += mine
        if not mine and "*" not in key.path:
            found.append(Reading(key.path, None, key))
    return [*found, *(Reading(path, values[path], None) for path, key in known.items() if not key)]


def describe(provenance: Mapping[str, Any], missing: bool = True) -> pd.DataFrame:
    """A provenance as a table.

    Args:
        provenance: Content of provenance.json.
        missing: Whether keys that it lacks have a row.

    Returns:
        Columns key, value (text with its unit), check, description.
    """
    rows = [
        {
            "key": reading.path,
            "value": reading.text,
            "check": reading.key.check if reading.key else "informative",
            "description": reading.key.description if reading.key else "not in the registry",
        }
        for reading in readings(provenance)
        if missing or reading.value is not None
    ]
    return pd.DataFrame(rows, columns=["key", "value", "check", "description"])


def _lasting(value: object) -> object:
    """A value without what differs from run to run and means nothing."""
    if isinstance(value, str):
        for pattern, instead in _PASSING:
            value = pattern.sub(instead, value)
        return value
    if isinstance(value, Mapping):
        return {name: _lasting(one) for name, one in value.items()}
    if isinstance(value, Sequence):
        if all(isinstance(one, str) for one in value):
            return str(_lasting(" ".join(value))).strip()
        return [_lasting(one) for one in value]
    return value


def differences(
    first: Mapping[str, Any], second: Mapping[str, Any], missing: bool = True
) -> list[Difference]:
    """Keys in which two provenances differ; those that refuse a comparison come first.

    Arms that only one of them has are not compared.

    Args:
        first: Content of one provenance.json.
        second: Content of the other.
        missing: Whether keys that only one of them has are listed.
    """
    one, other = dict(flatten(first)), dict(flatten(second))
    both = _arms(first) & _arms(second)
    found = []
    for path in [*one, *(path for path in other if path not in one)]:
        names = path.split(".")
        if names[0] in ("arms", "exercised") and len(names) > 1 and names[1] not in both:
            continue
        a, b = one.get(path), other.get(path)
        if _lasting(a) == _lasting(b) or (not missing and (a is None or b is None)):
            continue
        key = key_of(path)
        found.append(
            Difference(
                path,
                a,
                b,
                key.check if key else "informative",
                key.description if key else "not in the registry",
                key.unit if key else "",
            )
        )
    return sorted(found, key=lambda item: (not item.refuses, item.check != "must match"))


def _arms(provenance: Mapping[str, Any]) -> set[str]:
    arms = provenance.get("arms")
    return set(arms) if isinstance(arms, Mapping) else set()
