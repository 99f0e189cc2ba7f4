"""Instructions of host and guest: known loops are found where they ran, in the number that ran."""

from __future__ import annotations

import difflib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from vringlab.errors import InfrastructureError
from vringlab.image.build import Image
from vringlab.kernels.base import resolve
from vringlab.kernels.buildroot import ensure_buildroot
from vringlab.kernels.module import BuiltModule, build_module
from vringlab.kernels.patches import Arm, parse_patch
from vringlab.kernels.source import ModuleSource
from vringlab.lab import accel, attribution, counter, embedded, events, functions, guest
from vringlab.lab.attribution import Profile
from vringlab.lab.counter import Counter, Reading
from vringlab.lab.lab import Lab
from vringlab.lab.qmp import Monitor
from vringlab.lab.swap import swap, swap_host
from vringlab.transport import local
from vringlab.transport.ssh import Machine

# A cold cache fetches some 300 MB first.
pytestmark = pytest.mark.timeout(900)

TCG = accel.Accelerator("tcg", "only an emulated host counts")
TOY = ModuleSource("vringlab_toy", "drivers/toy", ("vringlab_toy",))
#: Two instructions each.
SHORT, LONG = 1000, 6000
#: What goes on beside them, some million instructions a second, is to be a small share.
CALLS = (1000, 5000)
SOURCE = f"""\
#include <linux/module.h>

#define TURNS {SHORT}

static noinline void toy_transmit(void)
{{
	unsigned long left = TURNS;

	asm volatile("1: dec %0\\n\\tjnz 1b" : "+r"(left));
}}

static int toy_send(const char *text, const struct kernel_param *parameter)
{{
	unsigned int count;
	int error = kstrtouint(text, 0, &count);

	while (!error && count--)
		toy_transmit();
	return error;
}}

static const struct kernel_param_ops toy_operations = {{ .set = toy_send }};
module_param_cb(send, &toy_operations, NULL, 0200);
MODULE_DESCRIPTION("toy");
MODULE_LICENSE("GPL");
"""
HEADER = """\
Title: a toy
Module: vringlab_toy
Side: guest
Serves: 6.12 <= version < 6.13
"""
LONGER = "".join(
    difflib.unified_diff(
        SOURCE.splitlines(keepends=True),
        SOURCE.replace(f"TURNS {SHORT}", f"TURNS {LONG}").splitlines(keepends=True),
        f"a/{TOY.files[0]}",
        f"b/{TOY.files[0]}",
    )
)

#: Loops 25 million times for each word of its command line, its name among them.
LOOP = """\
	.globl _start
_start:	imul $25000000, (%rsp), %rcx
1:	dec %rcx
	jnz 1b
	mov $60, %eax
	xor %edi, %edi
	syscall
"""
LOOP_INSTRUCTIONS = 2 * 25_000_000

#: An exit each: SVM and VMX intercept it always.
CPUIDS = 5000
CPUID = f"""\
	.globl _start
_start:	mov ${CPUIDS}, %r12
1:	xor %eax, %eax
	cpuid
	dec %r12
	jnz 1b
	mov $60, %eax
	xor %edi, %edi
	syscall
"""


def assembled(folder: Path, text: str) -> Path:
    (folder / "program.S").write_text(text)
    program = folder / "program"
    command = ["gcc", "-nostdlib", "-static", "-o", str(program), str(folder / "program.S")]
    subprocess.run(command, check=True, timeout=60)
    return program


@pytest.fixture(scope="module")
def lab(image: Image) -> Iterator[Lab]:
    with embedded.embedded_host(image, TCG, count_instructions=True) as host:
        guest.prepare_host(host)
        with guest.boot_guest(host, guest.GuestSpec()) as running:
            yield Lab(host, running)


@pytest.fixture
def counting(lab: Lab) -> Counter:
    assert lab.host.count_refusal == ""
    assert lab.host.counter is not None
    return lab.host.counter


def counted(counting: Counter, machine: Machine, command: str) -> Reading:
    before = counting.read()
    machine.run(command)
    return counting.read() - before


@pytest.fixture(scope="module")
def arms(image: Image, tmp_path_factory: pytest.TempPathFactory) -> dict[str, BuiltModule]:
    folder = tmp_path_factory.mktemp("toy")
    (folder / "source" / TOY.directory).mkdir(parents=True)
    (folder / "source" / TOY.files[0]).write_text(SOURCE)
    kernel = resolve("debian:6.12", suite=image.suite, release=image.release, version=image.version)
    root = replace(ensure_buildroot(kernel, on_step=print), archive=folder / "source")
    built = {}
    for name, text in (
        ("short", f"{HEADER}Diff: none\n\n"),
        ("long", f"{HEADER}\ndiff --git a/{TOY.files[0]} b/{TOY.files[0]}\n{LONGER}"),
    ):
        patch = parse_patch(text, Path(f"{name}.patch"))
        arm = Arm("toy", kernel.name, name, TOY.name, "guest", (patch,))
        built[name] = build_module(
            root, arm, on_step=print, modules={TOY.name: TOY}, cache=folder / "cache"
        )
    return built


def test_a_longer_transmit_path_is_found_in_its_function(
    lab: Lab, counting: Counter, arms: dict[str, BuiltModule]
) -> None:
    machine = lab.guest.machine
    send = f"> /sys/module/{TOY.name}/parameters/send"
    kernels = [
        functions.kernel_code(lab.host.machine, "host"),
        functions.kernel_code(machine, "guest"),
    ]
    slopes: dict[str, list[float]] = {"short": [], "long": []}
    inside: dict[str, float] = {}
    for name in ("short", "long", "long", "short"):
        swap(lab.guest, arms[name])
        code = functions.module_code(machine, "guest", arms[name])
        assert code.notes == ()
        profiles: list[Profile] = []
        for times in CALLS:
            delta = counted(counting, machine, f"echo {times} {send}")
            profiles.append(attribution.attribute(delta, [*kernels, code]))
            assert profiles[-1].total() == sum(delta.total())
            assert profiles[-1].notes == ()
        few, many = profiles
        slopes[name].append((many.total() - few.total()) / (CALLS[1] - CALLS[0]))
        inside[name] = (
            many.total(function="toy_transmit", areas=["module"], side="guest")
            - few.total(function="toy_transmit", areas=["module"], side="guest")
        ) / (CALLS[1] - CALLS[0])
        busiest = next(row for row in many.rows if row.function is not None)
        assert (busiest.module, busiest.function) == (TOY.name, "toy_transmit")
    print(slopes, inside)
    expected = 2 * (LONG - SHORT)
    # All that the loop's function executed is counted, in all of its calls.
    assert inside["long"] - inside["short"] == pytest.approx(expected, rel=0.001)
    assert inside["short"] == pytest.approx(2 * SHORT, rel=0.02)
    # And in the whole system, with all that goes on beside it.
    whole = sum(slopes["long"]) / 2 - sum(slopes["short"]) / 2
    assert whole == pytest.approx(expected, rel=0.05)


def test_one_module_on_both_sides_is_two(
    lab: Lab, counting: Counter, arms: dict[str, BuiltModule]
) -> None:
    swap(lab.guest, arms["short"])
    swap_host(lab.host, None, arms["short"])
    machines: dict[counter.Side, Machine] = {"host": lab.host.machine, "guest": lab.guest.machine}
    codes = [
        functions.module_code(machine, side, arms["short"]) for side, machine in machines.items()
    ]
    for side, machine in machines.items():
        delta = counted(counting, machine, f"echo 1000 > /sys/module/{TOY.name}/parameters/send")
        profile = attribution.attribute(delta, codes)
        inside = {name: profile.total(side=name, function="toy_transmit") for name in machines}
        assert inside.pop(side) == pytest.approx(1000 * 2 * SHORT, rel=0.01)
        assert [*inside.values()] == [0]
    with pytest.raises(InfrastructureError, match="is not loaded"):
        functions.module_code(machines["host"], "host", replace(arms["short"], module="other_toy"))


def test_a_loop_in_user_space_is_counted_where_it_ran(
    lab: Lab, counting: Counter, tmp_path: Path
) -> None:
    loop = assembled(tmp_path, LOOP)
    machines: dict[counter.Side, Machine] = {"host": lab.host.machine, "guest": lab.guest.machine}
    for machine in machines.values():
        machine.put(loop, "/tmp/loop")
        machine.run("chmod +x /tmp/loop")
    for side, machine in machines.items():
        once, thrice = (
            counted(counting, machine, f"taskset -c 1 /tmp/loop {words}") for words in ("", "2 3")
        )
        here, there = (counter.SIDES.index(name) for name in (side, *set(machines) - {side}))
        user = thrice.user.astype(float) - once.user
        assert user[here].sum() == pytest.approx(2 * LOOP_INSTRUCTIONS, rel=0.01)
        assert abs(user[there].sum()) < 0.05 * LOOP_INSTRUCTIONS
        # It ran on one processor, and that is known: the guest's are pinned, one to one.
        ran_on = 1 if side == "host" else lab.guest.layout.vcpus[1]
        assert user[here, ran_on] == pytest.approx(2 * LOOP_INSTRUCTIONS, rel=0.01)


def test_exits_are_counted_by_reason(lab: Lab, tmp_path: Path) -> None:
    host, guest = lab.host.machine, lab.guest.machine
    guest.put(assembled(tmp_path, CPUID), "/tmp/cpuid")
    guest.run("chmod +x /tmp/cpuid; /tmp/cpuid")
    instances = "/sys/kernel/tracing/instances"
    # What a run that was killed left is no hindrance.
    host.run(f"mkdir {instances}/vringlab-exits-{lab.guest.cid}")
    with events.counting_events(lab.host, lab.guest) as counting:
        before = counting.read()
        guest.run("/tmp/cpuid")
        found = counting.read() - before
    assert found.notes == ()
    print(found.counts)
    # Starting a program takes some, too.
    assert CPUIDS <= found.counts["exits: cpuid"] < 1.2 * CPUIDS
    reasons = [count for name, count in found.counts.items() if name.startswith("exits: ")]
    assert sum(reasons) == found.counts["exits"]
    assert found.counts[events.GUEST_SWITCHES] > 0
    assert found.counts[events.HOST_SWITCHES] > 0
    assert host.run(["ls", instances]).stdout == ""


def test_readings_go_on_while_processors_are_reset(image: Image, tmp_path: Path) -> None:
    with ExitStack() as stack:
        ends = [stack.enter_context(end) for _ in range(2) for end in socket.socketpair()]
        qmp, qmp_there, ours, ours_there = ends
        argv = embedded.qemu_argv(
            image, TCG, 0, tmp_path / "console", qmp_there.fileno(), None, ours_there.fileno()
        )
        # With it a machine ends instead of being reset.
        argv.remove("-no-reboot")
        passed = [qmp_there.fileno(), ours_there.fileno()]
        stack.enter_context(local.companion(argv, log=tmp_path / "log", pass_fds=passed))
        monitor = stack.enter_context(Monitor(qmp, name="embedded"))
        vcpus = len(monitor.vcpu_threads())
        counting = stack.enter_context(Counter(ours, vcpus))
        last = counting.read()
        for _ in range(5):
            monitor.execute("system_reset")
            for _ in range(10):
                now = counting.read()
                # A counter that fell is an error of this difference.
                assert (now - last).vcpus == vcpus
                last = now
            time.sleep(0.2)
            assert sum((counting.read() - last).total()) > 0


def test_a_plugin_that_does_not_load_leaves_a_host_without_a_counter(
    image: Image, tmp_path: Path
) -> None:
    for path in image.folder.iterdir():
        if path.name != "qemu":
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "qemu").mkdir()
    for path in (image.folder / "qemu").iterdir():
        if path != image.counter:
            (tmp_path / "qemu" / path.name).symlink_to(path)
    broken = replace(image, folder=tmp_path)
    broken.counter.write_bytes(os.urandom(100))
    steps: list[str] = []
    with embedded.embedded_host(broken, TCG, count_instructions=True, on_step=steps.append) as host:
        assert host.counter is None
        assert "QEMU does not take the instruction counter" in host.count_refusal
        assert "vringlab-count.so" in host.count_refusal
        assert steps[-1] == f"{host.count_refusal}; booting without it"
        assert host.machine.run("echo up").stdout == "up\n"
        assert "-plugin" not in host.qemu_argv
