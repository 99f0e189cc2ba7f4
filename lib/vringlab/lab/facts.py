"""What a machine is, read in one command: processor, kernel, knobs, modules, tools.

Everything is optional: a file that is not there is a reading that is missing, and no reason to
stop a measurement. The script prints sections `@@ name`; pure functions make sense of them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from vringlab.errors import InfrastructureError
from vringlab.lab.embedded import HostMachine
from vringlab.lab.guest import Guest
from vringlab.transport import local

#: Modules whose parameters and build-ids are read, where they are loaded.
MODULES = (
    "kvm",
    "kvm_amd",
    "kvm_intel",
    "tun",
    "vhost",
    "vhost_net",
    "vhost_vsock",
    "virtio_net",
    "virtio_pci",
    "vmw_vsock_virtio_transport",
    "vmw_vsock_virtio_transport_common",
    "vsock",
)

#: Files read as they stand, by section.
_FILES: Mapping[str, str] = {
    "cmdline": "/proc/cmdline",
    "release": "/proc/sys/kernel/osrelease",
    "version": "/proc/sys/kernel/version",
    "load": "/proc/loadavg",
    "memory": "/proc/meminfo",
    "driver": "/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver",
    "smt": "/sys/devices/system/cpu/smt/control",
    "no_turbo": "/sys/devices/system/cpu/intel_pstate/no_turbo",
    "boost": "/sys/devices/system/cpu/cpufreq/boost",
    "online": "/sys/devices/system/cpu/online",
    "isolated": "/sys/devices/system/cpu/isolated",
    "nodes": "/sys/devices/system/node/online",
    "thp": "/sys/kernel/mm/transparent_hugepage/enabled",
    "clocksource": "/sys/devices/system/clocksource/clocksource0/current_clocksource",
    "product": "/sys/class/dmi/id/product_name",
}

#: Those of `ethtool -k` that change how many packets a stream is cut into.
_OFFLOADS = frozenset(
    {"tcp-segmentation-offload", "generic-segmentation-offload", "generic-receive-offload"}
)

_TOOLS: Mapping[str, str] = {
    "qemu": "qemu-system-x86_64 --version",
    "fio": "fio --version",
    "netperf": "netperf -V",
    "ethtool": "ethtool --version",
    "bpftrace": "bpftrace --version",
}

#: Words of a kernel command line that change what is measured. The others are nobody's business:
#: they hold names, addresses and keys of the machine's owner, and provenance is published.
_CMDLINE = re.compile(
    r"(mitigations|nosmt|maxcpus|nr_cpus|isolcpus|nohz|nohz_full|rcu_nocbs|rcu_nocb_poll|irqaffinity"
    r"|idle|intel_idle\.\S*|processor\.\S*|cpuidle\S*|haltpoll\S*|intel_pstate|amd_pstate|cpufreq\S*"
    r"|hugepages|hugepagesz|default_hugepagesz|transparent_hugepage|numa\S*|kvm\S*|vhost\S*"
    r"|clocksource|tsc|no_timer_check|preempt|threadirqs|nopti|pti|l1tf|mds|retbleed|spec\S*"
    r"|nospec\S*|iommu|intel_iommu|amd_iommu|swiotlb|slab_nomerge|slub_debug|init_on_alloc"
    r"|init_on_free|page_poison|debug_pagealloc|lockdep|audit|lsm|selinux|apparmor|nowatchdog"
    r"|nmi_watchdog|nested\S*|random\.trust_cpu|cryptomgr\.notests)(=|$)"
)

_TIMEOUT_S = 60.0

# A GNU build-id note: this name and type.
_GNU = b"GNU\0"
_BUILD_ID_NOTE = 3


def script(threads: Sequence[int] = (), tools: bool = True) -> str:
    """The shell text that prints all readings of a machine.

    It starts few programs: under emulation each costs as much as reading a hundred files.

    Args:
        threads: Thread ids whose names and allowed processors are read too.
        tools: Whether versions of tools are asked.
    """
    parameters = " ".join(f"/sys/module/{name}/parameters/*" for name in MODULES)
    lines = [
        "exec 2>/dev/null",
        'one() { echo "@@ $1"; read -r line < "$2" && echo "$line"; }',
        *(f"one {name} {path}" for name, path in _FILES.items()),
        "echo '@@ arch'; uname -m",
        # `read` takes single bytes, of which the kernel gives the first of a number only.
        "echo '@@ tainted'; cat /proc/sys/kernel/tainted",
        # The first processor stands for all; the number of them is counted beside.
        "echo '@@ cpuinfo'; sed '/^$/q' /proc/cpuinfo",
        "echo '@@ cpus'; grep -c '^processor' /proc/cpuinfo",
        "echo '@@ governor'; cat /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
        "echo '@@ mitigations'; grep -H . /sys/devices/system/cpu/vulnerabilities/*",
        # /proc/lockdep is there only in kernels that prove their locks, at a large cost.
        "echo '@@ lockdep'; [ -e /proc/lockdep ] && echo 1 || echo 0",
        "echo '@@ irqbalance'; grep -cx irqbalance /proc/[0-9]*/comm | grep -c ':1$'",
        "echo '@@ kernel_notes'; od -An -v -tx1 /sys/kernel/notes",
        f"names=; notes=; for m in {' '.join(MODULES)}; do n=/sys/module/$m",
        '[ -d $n ] && names="$names $m"; n=$n/notes/.note.gnu.build-id',
        '[ -e $n ] && notes="$notes $n"; done',
        "echo '@@ modules'; echo $names",
        "echo '@@ noted'; echo $notes",
        "echo '@@ notes'; [ -n \"$notes\" ] && od -An -v -tx1 $notes",
        f"echo '@@ parameters'; grep -H . {parameters}",
        "echo '@@ offloads'",
        "for d in /sys/class/net/*; do",
        "[ $d/device/driver -ef /sys/bus/virtio/drivers/virtio_net ] || continue",
        'read -r line < $d/address && echo "# $line"; ethtool -k ${d##*/}; done',
    ]
    if tools:
        lines += [f"echo '@@ tool {name}'; {command}" for name, command in _TOOLS.items()]
    if threads:
        status, names = (
            " ".join(f"/proc/{tid}/{name}" for tid in threads) for name in ("status", "comm")
        )
        lines += [
            f"echo '@@ threads'; grep -H '^Cpus_allowed_list:' {status}",
            f"echo '@@ names'; grep -H . {names}",
        ]
    return "\n".join([*lines, "echo '@@ end'", "exit 0"])


def sections(text: str) -> dict[str, str]:
    """The parts of the script's output by name, without their surrounding blank lines."""
    found: dict[str, str] = {}
    for part in f"\n{text}".split("\n@@ ")[1:]:
        name, _, body = part.partition("\n")
        found[name.strip()] = body.strip("\n")
    return found


def build_ids(notes: str) -> list[str]:
    """The GNU build-ids in the hexadecimal text of ELF notes, in order.

    Notes: name size, description size, type, name, description, each padded to four bytes
    (ELF specification, note section); little-endian.
    """
    found = []
    with suppress(ValueError):
        raw = bytes.fromhex("".join(notes.split()))
        place = 0
        while place + 12 <= len(raw):
            name, size, kind = (
                int.from_bytes(raw[place + n : place + n + 4], "little") for n in (0, 4, 8)
            )
            begin = place + 12 + -(-name // 4) * 4
            if kind == _BUILD_ID_NOTE and raw[place + 12 : place + 12 + name] == _GNU:
                found.append(raw[begin : begin + size].hex())
            place = begin + -(-size // 4) * 4
    return found


def _line(part: str | None) -> str | None:
    """The first line of a section; None for a missing or empty one."""
    lines = (part or "").strip().splitlines()
    return lines[0].strip() if lines else None


def _relevant(part: str | None) -> str | None:
    """The words of a kernel command line that change what is measured."""
    line = _line(part)
    if line is None:
        return None
    return " ".join(word for word in line.split() if _CMDLINE.match(word))


def _chosen(part: str | None) -> str | None:
    """The word in brackets of `always [madvise] never`."""
    match = re.search(r"\[(\w+)\]", part or "")
    return match.group(1) if match else _line(part)


def _number(part: str | None) -> int | None:
    with suppress(TypeError, ValueError):
        return int(str(_line(part)))
    return None


def _pairs(part: str | None, separator: str = ":") -> dict[str, str]:
    """Lines `name<separator>value`, as `grep -H . *` prints them."""
    found = {}
    for line in (part or "").splitlines():
        name, mark, value = line.partition(separator)
        if mark and name.strip():
            found[name.strip()] = value.strip()
    return found


def _turbo(parts: Mapping[str, str]) -> str | None:
    """`on` or `off`, from whichever driver says it."""
    # intel_pstate counts the other way round than the generic switch.
    for name, on in (("no_turbo", "0"), ("boost", "1")):
        value = _line(parts.get(name))
        if value in ("0", "1"):
            return "on" if value == on else "off"
    return None


def _cpu(parts: Mapping[str, str]) -> dict[str, object]:
    info = _pairs(parts.get("cpuinfo"))
    flags = set(info.get("flags", "").split())
    governors = sorted(set(parts.get("governor", "").split()))
    return {
        "vendor": info.get("vendor_id"),
        "model": info.get("model name"),
        "family": _number(info.get("cpu family")),
        "model_number": _number(info.get("model")),
        "stepping": _number(info.get("stepping")),
        "microcode": info.get("microcode"),
        "count": _number(parts.get("cpus")),
        "online": _line(parts.get("online")),
        "isolated": _line(parts.get("isolated")),
        "governor": ",".join(governors) or None,
        "driver": _line(parts.get("driver")),
        "turbo": _turbo(parts),
        "smt": _line(parts.get("smt")),
        "hypervisor": "hypervisor" in flags if flags else None,
        "virtualisation": next((flag for flag in ("svm", "vmx") if flag in flags), None),
    }


def _base_names(part: str | None) -> dict[str, str]:
    """Lines `/path/to/name:value` by name."""
    return {path.rpartition("/")[2]: value for path, value in _pairs(part).items()}


def _modules(parts: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {
        name: {"build_id": None, "parameters": {}} for name in parts.get("modules", "").split()
    }
    noted = [path.split("/")[3] for path in parts.get("noted", "").split()]
    identities = build_ids(parts.get("notes", ""))
    # One note each; with any other number nobody could say whose is whose.
    if len(noted) == len(identities):
        for module, identity in zip(noted, identities, strict=True):
            found[module]["build_id"] = identity
    for path, value in _pairs(parts.get("parameters")).items():
        _, _, _, module, _, name = path.split("/", 5)
        found.setdefault(module, {"build_id": None, "parameters": {}})["parameters"][name] = value
    return found


def _offloads(part: str | None) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    address = ""
    for line in (part or "").splitlines():
        if line.startswith("# "):
            address = line[2:].strip()
            found[address] = {}
        elif address:
            name, _, value = line.partition(":")
            if name in _OFFLOADS and value.split():
                found[address][name] = value.split()[0]
    return {device: values for device, values in found.items() if values}


def _version(text: str | None) -> str | None:
    line = _line(text)
    if line is None:
        return None
    match = re.search(r"\d+(\.\d+)+[\w.+:~-]*", line)
    return match.group(0) if match else line[:80]


def parse(text: str) -> dict[str, Any]:
    """The facts of one machine from the script's output.

    A reading that was not there is None; mappings hold only what was there. Keys and units are
    those of `vringlab.analysis.provenance.KEYS`.
    """
    parts = sections(text)
    memory = re.search(r"MemTotal:\s+(\d+) kB", parts.get("memory", ""))
    modules = _modules(parts)
    halt = modules.get("kvm", {}).get("parameters", {}).get("halt_poll_ns")
    load = _line(parts.get("load"))
    lockdep, balance = _number(parts.get("lockdep")), _number(parts.get("irqbalance"))
    tools = {name: _version(parts.get(f"tool {name}")) for name in _TOOLS}
    return {
        "kernel": {
            "release": _line(parts.get("release")),
            "version": _line(parts.get("version")),
            "arch": _line(parts.get("arch")),
            "cmdline": _relevant(parts.get("cmdline")),
            "build_id": next(iter(build_ids(parts.get("kernel_notes", ""))), None),
            "tainted": _number(parts.get("tainted")),
            "lockdep": None if lockdep is None else bool(lockdep),
        },
        "cpu": _cpu(parts),
        "mitigations": _base_names(parts.get("mitigations")),
        "memory_mib": int(memory.group(1)) // 1024 if memory else None,
        "numa_nodes": _line(parts.get("nodes")),
        "thp": _chosen(parts.get("thp")),
        "clocksource": _line(parts.get("clocksource")),
        "product": _line(parts.get("product")),
        "irqbalance": None if balance is None else bool(balance),
        "load": float(load.split()[0]) if load else None,
        "halt_poll_ns": _number(halt),
        "modules": modules,
        "offloads": _offloads(parts.get("offloads")),
        "tools": {name: version for name, version in tools.items() if version},
    }


def parse_threads(text: str, threads: Sequence[int]) -> dict[str, dict[str, str]]:
    """Name and allowed processors of each thread asked for; `gone` for an ended one."""
    parts = sections(text)
    names = {path.split("/")[2]: name for path, name in _pairs(parts.get("names")).items()}
    cpus = {}
    for line in parts.get("threads", "").splitlines():
        path, _, rest = line.partition(":")
        cpus[path.split("/")[2]] = rest.partition(":")[2].strip()
    return {
        str(tid): {"name": names.get(str(tid), "gone"), "cpus": cpus.get(str(tid), "gone")}
        for tid in threads
    }


def local_facts() -> dict[str, Any]:
    """The facts of this machine; empty where the shell is missing."""
    try:
        return parse(local.run(["sh", "-c", script()], timeout=_TIMEOUT_S, check=False).stdout)
    except InfrastructureError:
        return {}


def collect(host: HostMachine, guest: Guest | None = None) -> dict[str, Any]:
    """Read the facts of a host and its guest, in one command each. Never a reason to stop.

    Args:
        host: The KVM host. For the embedded one, this machine's facts are under `host.outer`.
        guest: The guest on it, when there is one.

    Returns:
        A nested mapping to merge into provenance: `host`, `guest`, `pinning`.

    Raises:
        TransientError: a connection was lost.
    """
    threads = sorted(guest.threads) if guest is not None else []
    # Tools run from the image, whose package versions are known without starting them.
    text = host.machine.run(script(threads, tools=False), timeout=_TIMEOUT_S, check=False).stdout
    facts: dict[str, Any] = {"host": {**parse(text), "level": level(host.kind)}}
    if host.qemu_argv:
        facts["host"]["outer"] = local_facts()
    if guest is not None:
        inside = guest.machine.run(script(tools=False), timeout=_TIMEOUT_S, check=False).stdout
        facts["guest"] = {
            **parse(inside),
            "qemu_command": shlex.join(guest.qemu_argv),
            "level": level(host.kind, guest=True),
        }
        seen = parse_threads(text, threads)
        facts["pinning"] = {
            "asked": {str(tid): cpu for tid, cpu in sorted(guest.threads.items())},
            "seen": {tid: one["cpus"] for tid, one in seen.items()},
            "names": {tid: one["name"] for tid, one in seen.items()},
        }
    return facts


def level(kind: str, guest: bool = False) -> str | None:
    """How deep a machine is virtualised: `L0` on the metal, each hypervisor adds one.

    An emulated host has a hypervisor of its own beneath its guest, but no hardware under it.
    """
    depth = {"physical": 0, "nested": 1, "emulated": 1}.get(kind)
    if depth is None:
        return None
    mark = " (emulated)" if kind == "emulated" else ""
    return f"L{depth + guest}{mark}"
