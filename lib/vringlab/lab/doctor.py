"""What a machine has and lacks as a KVM host: one SSH session, one script, a judgement a row.

A row's weight says what it means for a measurement: without a `must` nothing can be measured; what
`changes figures` makes them larger, smaller or noisier, and is recorded with every run; the rest is
`nice` to know.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import paramiko

from vringlab import __version__
from vringlab.errors import InfrastructureError, TransientError, UserError
from vringlab.image.build import Image
from vringlab.lab import accel, facts, remote
from vringlab.lab.lease import STATE, Lease
from vringlab.settings import settings
from vringlab.transport import local
from vringlab.transport.login import connect
from vringlab.transport.ssh import Machine

State = Literal["ok", "missing", "warn", "unknown"]
Weight = Literal["must", "changes figures", "nice"]
OnStep = Callable[[str], None]

_SCRIPT_S = 90.0
#: A guest of two vCPUs, one processor for the tools and one for the vhost worker (lab.pinning).
_CPUS = 4
#: A guest of 1 GiB, testpmd's 512 MiB, and the host itself.
_MEMORY_MIB = 2048
#: The image, and room beside it.
_DISK_MB = 450
_SKEW_S = 2.0
_BUSY_LOAD = 0.5

_TOOLS = ("unshare", "nsenter", "flock", "mount", "chroot", "timeout", "sha256sum", "df")
_FILESYSTEMS = ("squashfs", "overlay")
_MODULES = (
    "loop",
    "squashfs",
    "overlay",
    "kvm_amd",
    "kvm_intel",
    "vhost_vsock",
    "vhost_net",
    "tun",
)
_DEVICES = {
    "vhost_vsock": "/dev/vhost-vsock",
    "vhost_net": "/dev/vhost-net",
    "tun": "/dev/net/tun",
}


@dataclass(frozen=True)
class Check:
    """A row.

    Attributes:
        name: What was looked at.
        state: How it is.
        weight: What it means for a measurement.
        found: What was seen, for a reader.
        remedy: What to do; empty when it is as it should be.
    """

    name: str
    state: State
    weight: Weight
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All rows of one machine.

    Attributes:
        host: The machine, as the user calls it.
        kind: `physical`, `nested` or `emulated`.
        checked: When, ISO 8601 in UTC.
        seconds: How long it took.
        checks: The rows, in the order in which they are met.
        facts: What was read of the machine, as in a run's provenance.
    """

    host: str
    kind: str
    checked: str
    seconds: float
    checks: tuple[Check, ...]
    facts: Mapping[str, Any]

    @property
    def usable(self) -> bool:
        """Whether nothing is missing that must be there."""
        return not any(each.weight == "must" and each.state == "missing" for each in self.checks)

    def as_record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "format": 1,
            "vringlab": __version__,
            "host": self.host,
            "kind": self.kind,
            "checked": self.checked,
            "seconds": round(self.seconds, 1),
            "usable": self.usable,
            "checks": [asdict(each) for each in self.checks],
            "facts": self.facts,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Diagnosis:
        """The inverse of `as_record`.

        Raises:
            UserError: it is no record of a diagnosis.
        """
        try:
            if record["format"] != 1:
                raise KeyError("format")
            return cls(
                host=record["host"],
                kind=record["kind"],
                checked=record["checked"],
                seconds=record["seconds"],
                checks=tuple(Check(**row) for row in record["checks"]),
                facts=record["facts"],
            )
        except (KeyError, TypeError) as error:
            raise UserError(
                f"this is no diagnosis of a host: {error}",
                remedy="record one with `vringlab doctor HOST --json`",
            ) from error


def script() -> str:
    """The shell text that prints all readings; any user may run it, and it changes nothing."""
    modules = " ".join(_MODULES)
    devices = " ".join(_DEVICES.values())
    cache = settings().host_cache
    return "\n".join(
        [
            'export PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin" LC_ALL=C',
            "exec 2>/dev/null",
            "echo '@@ uid'; id -u",
            "echo '@@ sudo'; sudo -n true && echo yes",
            f"echo '@@ no tools'; for t in {' '.join(_TOOLS)}; do",
            "command -v $t > /dev/null || echo $t; done",
            "echo '@@ filesystems'; cat /proc/filesystems",
            f"echo '@@ loaded'; for m in {modules}; do [ -d /sys/module/$m ] && echo $m; done",
            f"echo '@@ loadable'; for m in {modules}; do modinfo -n $m >&2 && echo $m; done",
            f"echo '@@ devices'; ls -d /dev/kvm /dev/loop-control {devices}",
            f"echo '@@ networks'; {remote.NETWORKS_SCRIPT}",
            "echo '@@ autogroup'; cat /proc/sys/kernel/sched_autogroup_enabled",
            "echo '@@ hugepages'; grep -E '^HugePages_(Total|Free)' /proc/meminfo",
            # The kernel keeps 15 letters of a name.
            "echo '@@ guests'; grep -lxE 'qemu-system-x86|qemu-kvm' /proc/[0-9]*/comm | wc -l",
            f"d={cache}; until [ -d $d ]; do d=${{d%/*}}; d=${{d:-/}}; done",
            "echo '@@ disk'; df -Pk $d | tail -n 1",
            # Whoever holds the lock has the host. To look at it is not to take it for a moment.
            f"echo '@@ owner'; n=$(stat -c %i {STATE}/lock) &&",
            f'grep -q "FLOCK.*:$n " /proc/locks && {{ cat {STATE}/owner || echo somebody; }}',
            f"echo '@@ left'; cat {STATE}/leases | wc -l",
            facts.script(tools=False),
        ]
    )


def _owner(text: str) -> str:
    from vringlab.lab.lease import Owner

    return str(Owner.parse(text) or text.strip())


# --- rows ----------------------------------------------------------------------------------


def basics(parts: Mapping[str, str], known: Mapping[str, Any]) -> list[Check]:
    """Rows on what must be there before anything can be tried.

    Args:
        parts: Sections of the script's output.
        known: `facts.parse` of it.
    """
    root = parts.get("uid", "").strip() == "0"
    sudo = parts.get("sudo", "").strip() == "yes"
    arch = known["kernel"]["arch"]
    no_tools = parts.get("no tools", "").split()
    loaded, loadable = (set(parts.get(name, "").split()) for name in ("loaded", "loadable"))
    rows = [
        Check(
            "rights",
            "ok" if root or sudo else "missing",
            "must",
            "root" if root else "sudo without a password" if sudo else "an ordinary user",
            ""
            if root or sudo
            else "log in as root (ssh://root@HOST), or add a line NOPASSWD: ALL to sudoers",
        ),
        Check(
            "processor",
            "ok" if arch == "x86_64" else "missing",
            "must",
            f"{known['cpu']['model'] or 'unknown'}, {arch}",
            "" if arch == "x86_64" else "guests are x86-64; use another host",
        ),
        _listed("tools", no_tools, "all there", "install util-linux and coreutils"),
    ]
    known_fs = parts.get("filesystems", "").split()
    lacking = [name for name in _FILESYSTEMS if name not in known_fs and name not in loadable]
    if "/dev/loop-control" not in parts.get("devices", "") and "loop" not in loadable | loaded:
        lacking.append("loop")
    rows.append(
        _listed(
            "file systems",
            lacking,
            "squashfs, overlay, loop",
            "the image is mounted by them: install the kernel's modules package, or build them",
        )
    )
    devices = parts.get("devices", "").split()
    for module, device in _DEVICES.items():
        there = device in devices or module in loaded
        rows.append(
            Check(
                module,
                "ok" if there or module in loadable else "missing",
                "must",
                "loaded" if there else "loaded for a run" if module in loadable else "not there",
                "" if there or module in loadable else f"install or build the module {module}",
            )
        )
    taken = parts.get("networks", "").strip()
    rows.append(
        Check(
            "networks",
            "missing" if taken else "ok",
            "must",
            f"taken: {taken}" if taken else "192.168.77.0/24 and 192.168.78.0/24 are free",
            "the guest's two networks must be free on the host" if taken else "",
        )
    )
    return rows


def _listed(name: str, lacking: list[str], fine: str, remedy: str) -> Check:
    if lacking:
        return Check(name, "missing", "must", f"missing: {', '.join(lacking)}", remedy)
    return Check(name, "ok", "must", fine)


def room(
    parts: Mapping[str, str], known: Mapping[str, Any], *, cpus: int, memory_mib: int, disk_mb: int
) -> list[Check]:
    """Rows on processors, memory and disk, with what is needed of each."""
    count, memory = known["cpu"]["count"], known["memory_mib"]
    free = _free_mb(parts.get("disk", ""))
    return [
        Check(
            "cores",
            _least(count, cpus),
            "must",
            f"{count or 'unknown'}, {cpus} needed",
            ""
            if (count or cpus) >= cpus
            else "a guest of two vCPUs, the tools and the vhost worker need a processor each",
        ),
        Check(
            "memory",
            _least(memory, memory_mib),
            "must",
            f"{memory or 'unknown'} MiB, {memory_mib} needed",
            "" if (memory or memory_mib) >= memory_mib else "use a host with more memory",
        ),
        Check(
            "disk",
            _least(free, disk_mb),
            "must",
            f"{'unknown' if free is None else free} MB free for the image, {disk_mb} needed",
            ""
            if free is None or free >= disk_mb
            else "free some space, or set VRINGLAB_HOST_CACHE to a folder on another disk",
        ),
    ]


def _free_mb(text: str) -> int | None:
    words = text.split()
    return int(words[3]) * 1024 // 10**6 if len(words) > 3 and words[3].isdigit() else None


def _least(value: int | None, least: int) -> State:
    if value is None:
        return "unknown"
    return "ok" if value >= least else "missing"


def noise(parts: Mapping[str, str], known: Mapping[str, Any], kind: str) -> list[Check]:
    """Rows on what changes figures.

    Args:
        parts: Sections of the script's output.
        known: `facts.parse` of it.
        kind: Kind of the host.
    """
    cpu = known["cpu"]
    rows = [
        _level(kind, known),
        _wanted(
            "governor",
            cpu["governor"],
            "performance",
            "processors change their speed while they are measured: run with --tune, or "
            "`cpupower frequency-set -g performance`",
        ),
        _wanted(
            "SMT",
            {"on": "on", "off": "off", "forceoff": "off", "notsupported": "off"}.get(
                str(cpu["smt"]), cpu["smt"]
            ),
            "off",
            "two threads share a core: `echo off > /sys/devices/system/cpu/smt/control`, or know "
            "that a vCPU's neighbour may be the vhost worker",
        ),
        _wanted(
            "turbo",
            cpu["turbo"],
            "off",
            "speed depends on heat and on the other cores: switch it off in the firmware or by "
            "/sys/devices/system/cpu/*/no_turbo (boost)",
        ),
        _wanted(
            "irqbalance",
            None if known["irqbalance"] is None else "runs" if known["irqbalance"] else "off",
            "off",
            "it moves interrupts between processors in mid-run: run with --tune, or stop it",
        ),
    ]
    rows.append(_halt_poll(known["halt_poll_ns"]))
    rows.append(_mitigations(known["mitigations"]))
    autogroup = parts.get("autogroup", "").strip()
    rows.append(
        _wanted(
            "autogroup",
            {"0": "off", "1": "on"}.get(autogroup),
            "off",
            "the scheduler shares by session, so nice has no effect between them: "
            "`sysctl kernel.sched_autogroup_enabled=0`",
        )
    )
    rows.append(_load(known, parts.get("guests", "")))
    if known["kernel"]["lockdep"]:
        rows.append(
            Check(
                "debug kernel",
                "warn",
                "changes figures",
                "lockdep is on",
                "locks cost many times more: boot a kernel without CONFIG_PROVE_LOCKING",
            )
        )
    return rows


def _level(kind: str, known: Mapping[str, Any]) -> Check:
    level = facts.level(kind)
    if kind == "physical":
        return Check("level", "ok", "changes figures", f"{level}: its own hardware")
    words = {
        "nested": (
            f"{level}: a virtual machine; its guests run nested",
            "each exit of a guest costs several times more; absolute figures are not compared "
            "with those of a physical host",
        ),
        "emulated": (
            f"{level}: its processor is emulated, and so is its KVM",
            "only ratios mean something here; use a host with hardware virtualisation",
        ),
    }
    found, remedy = words.get(kind, ("unknown", ""))
    product = known.get("product")
    return Check(
        "level", "warn", "changes figures", f"{found} ({product})" if product else found, remedy
    )


def _wanted(name: str, value: object, wanted: str, remedy: str) -> Check:
    if value is None:
        # Virtual machines seldom have it, and then nothing is to be set.
        return Check(name, "unknown", "changes figures", "not told by this kernel")
    fine = str(value) == wanted
    return Check(
        name, "ok" if fine else "warn", "changes figures", str(value), "" if fine else remedy
    )


def _halt_poll(value: int | None) -> Check:
    if value is None:
        return Check("halt_poll_ns", "unknown", "changes figures", "kvm is not loaded yet")
    return Check(
        "halt_poll_ns",
        "ok",
        "changes figures",
        f"{value} ns" if value else "0: no polling",
        "latencies below it are polled for, those above pay a wakeup: keep it the same in what "
        "you compare",
    )


def _mitigations(found: Mapping[str, str]) -> Check:
    on = [name for name, text in found.items() if text.startswith("Mitigation")]
    bare = [name for name, text in found.items() if text.startswith("Vulnerable")]
    return Check(
        "mitigations",
        "ok" if found else "unknown",
        "changes figures",
        f"{len(on)} on, {len(bare)} vulnerable and off" if found else "not told by this kernel",
        "each costs time at every exit; a mail's figures may be from mitigations=off" if on else "",
    )


def _load(known: Mapping[str, Any], guests: str) -> Check:
    load, count = known["load"], known["cpu"]["count"] or 1
    others = int(guests) if guests.strip().isdigit() else 0
    if load is None:
        return Check("other load", "unknown", "changes figures", "not told by this kernel")
    busy = load > _BUSY_LOAD * count or others > 0
    return Check(
        "other load",
        "warn" if busy else "ok",
        "changes figures",
        f"load {load:g} on {count} processors, other guests: {others}",
        "whatever else runs is in the figures: end it, or measure when it is quiet" if busy else "",
    )


def _hugepages(text: str) -> Check:
    free = re.search(r"HugePages_Free:\s+(\d+)", text)
    count = int(free[1]) if free else 0
    return Check("hugepages", "ok", "nice", f"{count} free; none are needed (memory is a memfd)")


def _release(known: Mapping[str, Any], image: Image | None) -> Check:
    release = known["kernel"]["release"]
    if image is None:
        return Check("kernel", "unknown", "nice", str(release), "")
    same = release == image.release
    return Check(
        "kernel",
        "ok" if same else "warn",
        "nice",
        f"{release}" + (" (host-side arms possible)" if same else ""),
        ""
        if same
        else f"arms of the host's own modules (vhost_net) are built for {image.release}; arms of "
        "the guest do not care",
    )


def _skew(low: float, high: float) -> Check:
    """From the bounds of (their clock - ours), seconds."""
    near = 0.0 if low <= 0 <= high else low if low > 0 else high
    fine = abs(near) <= _SKEW_S
    return Check(
        "clock",
        "ok" if fine else "warn",
        "nice",
        f"{near:+.1f} s against this machine (within {high - low:.1f} s)",
        "" if fine else "run NTP on both; times in logs and records do not fit together",
    )


# --- a host over SSH -----------------------------------------------------------------------


def examine(
    address: str,
    image: Callable[[], Image] | None,
    *,
    on_step: OnStep = lambda _: None,
) -> Diagnosis:
    """Examine a user's host.

    Args:
        address: `ssh://[user@]host[:port]`.
        image: Makes the image; it is copied to the host, and a guest is booted. Without one the
            rows on that stay unknown.
        on_step: Told what is being done.

    Raises:
        UserError, InfrastructureError, TransientError: it cannot be logged in to.
    """
    begin = time.monotonic()
    target = remote.parse(address)
    on_step(f"logging in to {target}")
    with connect(target) as machine:
        before = time.time()
        clock = machine.run("date +%s.%N", check=False).stdout
        after = time.time()
        done = machine.run(script(), timeout=_SCRIPT_S, check=False)
        parts, known = facts.sections(done.stdout), facts.parse(done.stdout)
        kind = remote.host_kind(known["cpu"])
        rows = [Check("login", "ok", "must", f"{target}, its host key is known")]
        rows += basics(parts, known)
        rows += [_forwarding(machine), _free(parts)]
        rows += room(parts, known, cpus=_CPUS, memory_mib=_MEMORY_MIB, disk_mb=_DISK_MB)
        ready = not any(row.state == "missing" for row in rows)
        built: Image | None = None
        if image is None or not ready:
            why = "not tried" if ready else "not tried: see what is missing above"
            rows.append(Check("KVM", "unknown", "must", why))
        else:
            built = image()
            rows.append(_kvm(machine, built, kind, on_step))
        rows += noise(parts, known, kind)
        rows.append(_hugepages(parts.get("hugepages", "")))
        rows.append(_release(known, built))
        try:
            theirs = float(clock)
            rows.append(_skew(theirs - after, theirs - before))
        except ValueError:
            rows.append(Check("clock", "unknown", "nice", "its date tells no seconds"))
    return Diagnosis(
        host=f"{remote.PREFIX}{target}",
        kind=kind,
        checked=_now(),
        seconds=time.monotonic() - begin,
        checks=tuple(rows),
        facts=known,
    )


def _forwarding(machine: Machine) -> Check:
    try:
        # Nobody has to listen there: a refusal by sshd is told from one by the system.
        machine.open_tcp("127.0.0.1", 9, timeout=10).close()
    except paramiko.ChannelException as error:
        if error.code == 1:  # SSH_OPEN_ADMINISTRATIVELY_PROHIBITED, RFC 4254
            return Check(
                "forwarding",
                "missing",
                "must",
                "sshd does not forward connections",
                "set `AllowTcpForwarding local` (or yes) in its sshd_config: guests are reached so",
            )
    except (OSError, EOFError, paramiko.SSHException) as error:
        return Check("forwarding", "unknown", "must", f"{type(error).__name__}: {error}")
    return Check("forwarding", "ok", "must", "sshd forwards connections")


def _free(parts: Mapping[str, str]) -> Check:
    owner = parts.get("owner", "").strip()
    if owner:
        return Check(
            "lease",
            "missing",
            "must",
            f"busy: {_owner(owner)} has it",
            "one campaign runs on a host at a time: wait for its end",
        )
    left = parts.get("left", "").strip() not in ("", "0")
    return Check(
        "lease",
        "warn" if left else "ok",
        "must",
        "free, but a dead session left something" if left else "free",
        "the next run undoes it" if left else "",
    )


def _kvm(machine: Machine, image: Image, kind: str, on_step: OnStep) -> Check:
    remedy = (
        "switch virtualisation (VT-x, SVM) on in the firmware; on a virtual machine switch nesting "
        "on in its hypervisor (kvm_intel or kvm_amd nested=1, -cpu host)"
    )
    try:
        with ExitStack() as stack:
            lease = stack.enter_context(Lease(machine, run="doctor", on_step=on_step))
            lease.open(remote.stage_image(machine, lease.root, image, on_step=on_step))
            on_step("booting a probe guest under its KVM")
            kernel = "vmlinux" if kind == "emulated" else "vmlinuz"
            begin = time.monotonic()
            fault = accel.host_kvm_fault(lease.inside, image, kernel)
            seconds = time.monotonic() - begin
    except TransientError:
        raise
    except (InfrastructureError, UserError) as error:
        return Check("KVM", "missing", "must", error.message, error.remedy)
    if fault:
        return Check("KVM", "missing", "must", fault, remedy)
    return Check("KVM", "ok", "must", f"a Linux guest booted under it ({seconds:.0f} s with QEMU)")


# --- this machine --------------------------------------------------------------------------


def examine_here(image: Image | None) -> Diagnosis:
    """Examine this machine, as the place of an embedded host.

    Args:
        image: Its kernel is booted to probe KVM; only a firmware is when None.

    Raises:
        InfrastructureError: there is no shell.
    """
    begin = time.monotonic()
    text = local.run(["sh", "-c", script()], timeout=_SCRIPT_S, check=False).stdout
    parts, known = facts.sections(text), facts.parse(text)
    kind = remote.host_kind(known["cpu"])
    limits = settings()
    limits.cache.mkdir(parents=True, exist_ok=True)
    parts = {**parts, "disk": _df(limits.cache)}
    rows = [*_embedded(image)]
    # What two cores have to do is shared; four are no must here.
    rows += room(
        parts,
        known,
        cpus=2,
        memory_mib=limits.lab_memory_mib + 512,
        disk_mb=_DISK_MB if image else 3200,
    )
    rows += noise(parts, known, kind)
    here = "this machine, for an embedded host"
    return Diagnosis(here, kind, _now(), time.monotonic() - begin, tuple(rows), known)


def _df(folder: Path) -> str:
    done = local.run(["df", "-Pk", str(folder)], timeout=10, check=False)
    return done.stdout.strip().rpartition("\n")[2]


def _embedded(image: Image | None) -> Iterable[Check]:
    try:
        chosen = accel.choose(image, settings().accel)
    except InfrastructureError as error:
        yield Check("QEMU", "missing", "must", error.message, error.remedy)
        return
    yield Check("QEMU", "ok", "must", accel.qemu_of(image))
    kvm = chosen.name == "kvm"
    yield Check(
        "embedded host",
        "ok" if kvm else "warn",
        "changes figures",
        f"would run {chosen.host_kind}, by {chosen.name}: {chosen.reason}",
        ""
        if kvm
        else "everything works, slowly, and only ratios mean something; for absolute figures use "
        "a host of your own: vringlab doctor ssh://HOST",
    )
    yield Check(
        "image",
        "ok" if image else "warn",
        "nice",
        f"{image.digest}, kernel {image.release}" if image else "not built yet",
        "" if image else "`vringlab build` makes it now (two minutes), the first run otherwise",
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
