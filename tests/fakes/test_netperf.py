"""netperf as a workload: its scripts really run, its figures from what a lab once printed."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.fake_lab import STILL_RUNNING, Answer, FakeLab, fake_lab
from tests.fakes.processes import alive, script

from vringlab.errors import InfrastructureError, TransientError, UserError
from vringlab.lab import vhost_nic
from vringlab.lab.guest import WORK
from vringlab.workloads import netperf
from vringlab.workloads.base import Metric, Outcome, parse_params
from vringlab.workloads.netperf import Clock, Netperf, NetperfParams, netperf_argv, sections
from vringlab.workloads.netperf_output import Interim

OUTPUTS = Path(__file__).parent / "outputs"


def recorded(name: str) -> str:
    return (OUTPUTS / f"netperf-lab-6.12-{name}.txt").read_text()


#: One stream of 3 s out of a guest with one vCPU, on the embedded host without KVM.
TX, BEFORE, AFTER = (recorded(name) for name in ("guest-tx", "before", "after"))
#: Four streams of 5 s into the guest.
RX4 = recorded("guest-rx-4")
WORKER = 102


def figures(outcome: Outcome) -> dict[str, float]:
    return {metric.name: metric.value for metric in outcome.metrics}


@dataclass
class Run:
    """What guest and host answer."""

    before: Answer = (BEFORE, "", 0)
    host: Answer = (TX, "", 0)
    after: Answer = (AFTER, "", 0)
    seen: str = ""

    def lab(self) -> FakeLab:
        made = fake_lab(seen=self.seen)
        guest = cast(Any, made.lab.guest)
        guest.qemu_pid, guest.net_worker = 100, WORKER
        made.guest.answers |= {"netserver": self.before, "^echo 1 >": ("", "", 0)}
        made.guest.answers["interrupts"] = self.after
        made.host.answers["netperf -H"] = self.host
        return made


def run(made: Run | FakeLab, duration_s: float = 3.0, **params: object) -> Outcome:
    lab = made.lab() if isinstance(made, Run) else made
    workload = Netperf()
    point = parse_params(workload, {"direction": "guest-tx", "vcpus": 1, **params})
    return workload.run(lab.lab, point, duration_s)


# --- commands ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("direction", "test", "sizes"),
    [
        ("guest-rx", "TCP_STREAM", ["-m", "256"]),
        # netserver sends: LOCAL,REMOTE, and the local size stays netperf's own.
        ("guest-tx", "TCP_MAERTS", ["-m", ",256"]),
        ("rr", "TCP_RR", ["-r", "256,256"]),
    ],
)
def test_the_command_of_a_session(direction: Any, test: str, sizes: list[str]) -> None:
    words = netperf_argv(NetperfParams(direction=direction, size=256), 7)
    assert words[:5] == ["netperf", "-H", vhost_nic.GUEST_ADDRESS, "-t", test]
    split = words.index("--")
    assert words[5:split] == ["-l", "7", "-P", "0", "-D", "1"]
    assert words[split + 1 : split + 3] == sizes
    keys = words[words.index("-k") + 1].split(",")
    assert {"THROUGHPUT", "THROUGHPUT_UNITS", "ELAPSED_TIME", "THROUGHPUT_CONFID"} < set(keys)
    assert "-I" not in words


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"size": 0}, "size"),
        ({"size": 65536}, "size"),
        ({"sessions": 51}, "sessions"),
        ({"vcpus": 3}, "vcpus"),
        ({"direction": "g2h"}, "guest-rx"),
    ],
)
def test_parameters_that_are_refused(values: Mapping[str, object], word: str) -> None:
    with pytest.raises(UserError, match=word):
        parse_params(Netperf(), values)


def test_it_asks_for_the_device_of_benchmarks() -> None:
    assert Netperf().guest_options([NetperfParams()]) == {"vhost_nic": True}


@pytest.mark.parametrize(("sessions", "seconds"), [(1, 4), (4, 4), (8, 5), (25, 8), (50, 13)])
def test_many_sessions_run_longer_because_they_start_one_by_one(
    sessions: int, seconds: int
) -> None:
    text = TX + "".join(f"@@ out{n} 0\n\n@@ err{n}\n\n" for n in range(1, sessions))
    lab = Run(host=(text, "", 0)).lab()
    run(lab, 3.5, sessions=sessions)
    (asked,) = lab.host.asked("netperf -H")
    assert f"-l {seconds} " in asked
    assert f"n < {sessions};" in asked


# --- a run ---------------------------------------------------------------------------------


def test_a_recorded_run_and_its_figures() -> None:
    outcome = run(Run())
    assert outcome.problems == outcome.warnings == ()
    found = figures(outcome)
    assert set(found) == {
        *("throughput", "cpu", "vhost_cpu", "vhost_wakeups", "throughput_per_cpu"),
        "tx_interrupts",
    }
    assert found["throughput"] == 301.24e6
    assert found["throughput_per_cpu"] == pytest.approx(301.24e6 / found["cpu"])
    # Read off the recording: 615 interrupts in 3.042 s of interim results.
    assert found["tx_interrupts"] == pytest.approx(615 / 3.042, rel=1e-3)
    # A guest that runs is host time, and the worker is a part of that.
    assert 0 < found["vhost_cpu"] < found["cpu"] < 400
    assert found["vhost_wakeups"] > 0
    assert outcome.context["vcpus_online"] == "0"
    assert outcome.context["clock_error_s"] == pytest.approx(0.127, abs=0.001)
    assert set(outcome.raw) == {"netperf.txt", "interrupts-before.txt", "interrupts-after.txt"}
    assert outcome.raw["netperf.txt"] == TX.encode()


def test_four_sessions_are_summed_over_their_common_window() -> None:
    host = (RX4, "", 0)
    before, after = (text.replace("online 0\n", "online 0-1\n") for text in (BEFORE, AFTER))
    outcome = run(
        Run((before, "", 0), host, (after, "", 0)),
        4.0,
        direction="guest-rx",
        size=1024,
        sessions=4,
        vcpus=2,
    )
    assert outcome.problems == ()
    assert figures(outcome)["throughput"] == pytest.approx(146.93e6, rel=1e-3)
    assert outcome.context["start_skew_s"] == pytest.approx(0.169, abs=0.001)
    assert outcome.window_s == pytest.approx(4.83, abs=0.01)
    assert "throughput_stddev" not in figures(outcome)


def test_the_order_of_a_run() -> None:
    lab = Run().lab()
    run(lab)
    words = ("fib_trie", "netperf -H", "Cpus_allowed_list")
    order = [word for line in lab.host.log for word in words if word in line]
    assert order == [*words]
    (asked,) = lab.host.asked("netperf -H")
    assert shlex.split(asked)[:2] == ["bash", "-c"]
    assert "w=/proc/100/task/102; [ -e $w/stat ] || w=/proc/102" in asked
    assert "taskset -p -c 0" in asked


def test_the_other_vcpu_is_offline_for_the_run_only() -> None:
    lab = Run().lab()
    run(lab)
    first, last = lab.guest.commands
    assert "echo 0 > /sys/devices/system/cpu/cpu1/online" in first
    assert "echo 1 > /sys/devices/system/cpu/cpu1/online" in last
    two = Run((BEFORE.replace("online 0\n", "online 0-1\n"), "", 0)).lab()
    assert run(two, vcpus=2).valid
    assert not two.guest.asked("cpu1/online")


@pytest.mark.parametrize(
    "fault",
    [{"before": ("", "", 9)}, {"host": ("", "", 6)}, {"host": ("", "", STILL_RUNNING)}],
    ids=["guest", "host", "silence"],
)
def test_the_other_vcpu_comes_back_when_a_run_fails(fault: dict[str, Any]) -> None:
    lab = Run(**fault).lab()
    with pytest.raises(InfrastructureError):
        run(lab)
    assert lab.guest.commands[-1].startswith("echo 1 > /sys/devices/system/cpu/cpu1/online")


def test_other_vcpus_than_asked_for_make_a_sample_invalid() -> None:
    assert "vCPUs 0 were online, not 0-1" in run(Run(), vcpus=2).reason


# --- faults --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (7, "other vCPU cannot be taken offline"),
        (8, f"no usable network device {vhost_nic.MAC}"),
        (9, "netserver is not listening"),
        (1, "its set-up failed"),
    ],
)
def test_a_guest_that_is_not_ready(status: int, words: str) -> None:
    lab = Run(before=("", "sh: no", status)).lab()
    with pytest.raises(InfrastructureError, match=words) as caught:
        run(lab, vcpus=2)
    assert caught.value.stderr == "sh: no"
    assert not lab.host.asked("netperf -H")


def test_no_worker_is_an_error_and_no_skip() -> None:
    lab = Run().lab()
    cast(Any, lab.lab.guest).net_worker = None
    with pytest.raises(InfrastructureError, match="no vhost worker"):
        run(lab)
    assert lab.guest.commands == []


def changed(pattern: str, by: str, text: str = TX) -> Answer:
    found, count = re.subn(pattern, by, text, flags=re.MULTILINE | re.DOTALL)
    assert count
    return found, "", 0


DIED = changed(r"^@@ out0 0.*?^@@ err0", "@@ out0 137\n\n@@ err0\nKilled")
REFUSED = changed(
    r"^@@ out0 0.*?^@@ err0",
    "@@ out0 1\nestablish control: are you sure there is a netserver listening on 192.168.78.2 "
    "at port 12865?\n@@ err0",
)
NOTHING = changed(r"^(THROUGHPUT|NETPERF_INTERIM_RESULT\[\d\])=.*?$", r"\1=0.00")
OTHER_SIZE = changed("^REMOTE_SEND_SIZE=16384", "REMOTE_SEND_SIZE=131072")
IDLE = changed(r"( 0 0 0 0 0 )\d+ 0( 0 20 0 9)", r"\g<1>133 0\2")


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (DIED, "session 0 died"),
        (DIED, "exit 137"),
        (REFUSED, "could not reach netserver"),
        (NOTHING, "0 throughput"),
        (OTHER_SIZE, "REMOTE_SEND_SIZE is 131072, 16384 was asked for"),
        (IDLE, "path not exercised: the vhost worker took no CPU time"),
    ],
)
def test_what_makes_a_sample_invalid(host: Answer, words: str) -> None:
    assert words in run(Run(host=host)).reason


def test_a_run_cut_short_and_sessions_apart() -> None:
    assert "of the 30 s asked for" in run(Run(), 30.0).reason
    outcome = run(Run(host=(RX4, "", 0)), 10.0, direction="guest-rx", size=1024, sessions=4)
    assert "common window 4.83 s is 48% of the 10 s asked for" in outcome.reason


def test_a_session_that_died_among_others() -> None:
    host = changed(r"^@@ out2 0.*?^@@ err2", "@@ out2 1\n\n@@ err2", RX4)
    outcome = run(Run(host=host), 4.0, direction="guest-rx", size=1024, sessions=4)
    assert outcome.reason.startswith("session 2 died")


def test_a_thread_that_moved_makes_a_sample_invalid() -> None:
    outcome = run(Run(seen="100 2\n101 3\n102 0\n"))
    assert outcome.reason == "thread 102 is on 0 instead of processor 1"
    assert figures(outcome)["throughput"] > 0


def test_a_sampler_that_costs_is_warned_of() -> None:
    host = changed(r"^(# samples \d+ late \d+ cpu_ns )\d+", r"\g<1>300000000")
    outcome = run(Run(host=host))
    assert outcome.valid
    assert "more than 1%" in outcome.warnings[0]


def test_a_sampler_that_does_not_cover_the_run_has_no_figures() -> None:
    outcome = run(Run(host=changed(r"^@@ clock \S+ \S+", "@@ clock 1796076300.0 1796076300.1")))
    assert outcome.valid
    assert "no CPU figures" in outcome.warnings[0]
    assert set(figures(outcome)) == {"throughput", "tx_interrupts"}


def test_clocks_far_apart_are_warned_of() -> None:
    host = changed(r"^@@ clock \S+", "@@ clock 1796076391.603597")
    (warning,) = run(Run(host=host)).warnings
    assert "CPU figures may be of a time up to 0.23 s beside the window of 3.04 s" in warning


@pytest.mark.parametrize(
    "host",
    [
        changed(r"^@@ sample$.*", "@@ sample\nvringlab-sample: /proc/1/task/2/stat: No such file"),
        ("", "taskset: no", 6),
        ("bash: netperf", "", 0),
    ],
    ids=["no sampler", "no pinning", "nonsense"],
)
def test_a_host_that_cannot(host: Answer) -> None:
    with pytest.raises(InfrastructureError):
        run(Run(host=host))


@pytest.mark.parametrize("after", [("", "gone", 7), ("@@ noise\n", "", 0)])
def test_a_guest_without_interrupts_after_the_run(after: Answer) -> None:
    with pytest.raises(InfrastructureError, match="its interrupts after the run"):
        run(Run(after=after))


def test_a_guest_that_dies_during_a_run() -> None:
    with pytest.raises(TransientError):
        run(Run(after=("", "", STILL_RUNNING)))


# --- parts ---------------------------------------------------------------------------------


@given(
    before=st.integers(0, 4_000_000_000_000_000),
    took=st.integers(0, 10_000_000),
    share=st.floats(0, 1),
    reading=st.integers(0, 10**18),
)
def test_two_clocks_are_as_far_apart_as_the_error_says(
    before: int, took: int, share: float, reading: int
) -> None:
    texts = [f"{us // 10**6}.{us % 10**6:06}" for us in (before, before + took)]
    clock = Clock.between(texts[0], texts[1], reading)
    really = before + int(took * share)
    assert abs(clock.offset_ns - (reading - really * 1000)) <= clock.error_s * 1e9 + 1000
    assert clock.error_s == pytest.approx(took / 2e6)


def test_a_locale_with_a_decimal_comma() -> None:
    assert Clock.between("1,500000", "1,500002", 0) == Clock(-1_500_001_000, 1e-6)


@pytest.mark.parametrize(
    ("rates", "spread"),
    [
        ([100, 100, 100], 0.0),
        ([90, 100, 110], 10.0),
        # The last is shorter than a second and does not count.
        ([90, 100, 110, 5000], 10.0),
        ([90, 100], None),
        ([0, 0, 0], None),
    ],
)
def test_the_spread_of_full_seconds(rates: list[float], spread: float | None) -> None:
    interims = [Interim(rate, 0.3 if rate == 5000 else 1.0, n) for n, rate in enumerate(rates)]
    found = netperf.interim_spread(interims)
    assert found == (None if spread is None else pytest.approx(spread))


def test_transactions_by_cpu_have_their_own_metric() -> None:
    found = sections(TX)
    seen = netperf.beside(found, (1796076393.0, 1796076395.0), Metric("transactions", 50.0, "1/s"))
    per_cpu = next(metric for metric in seen.metrics if metric.name == "transactions_per_cpu")
    assert per_cpu.unit == "1/s/percent"
    assert math.isfinite(per_cpu.value)


def test_sections_may_have_words_and_be_empty() -> None:
    found = sections("noise\n@@ clock 1.0 2.0\n@@ out0 0\nA=1\n@@ err0\n\n@@ sample\n@ 5\nx")
    assert found["clock"].words == ("1.0", "2.0")
    assert found["out0"].words == ("0",)
    assert found["out0"].text == "A=1\n"
    assert found["err0"].text == "\n"
    # A reading of the sampler is no section.
    assert found["sample"].text == "@ 5\nx"


# --- the scripts, really run ---------------------------------------------------------------

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")

#: The sampler as far as the script needs it: reads until SIGTERM.
_SAMPLER = """
while [ "$1" != --output ]; do shift; done
out=$2; shift 2
trap 'echo "# samples 1 late 0 cpu_ns 5 elapsed_ns 500" >> "$out"; exit 0' TERM
for file in "$@"; do [ -e "${file%%:*}" ] || { echo "$file: none" >&2; exit 2; }; done
echo "@ 123" > "$out"
while :; do sleep 0.02; done
"""


class Host:
    """A host of stubs in a folder."""

    def __init__(self, folder: Path, session: str, sampler: str = _SAMPLER) -> None:
        self.folder = folder
        tools = folder / "bin"
        tools.mkdir()
        for name, text in (
            ("netperf", session),
            ("vringlab-sample", sampler),
            ("taskset", f'echo "$@" >> {folder}/taskset'),
            ("ip", f'echo "$@" >> {folder}/ip'),
        ):
            script(tools / name, f"#!/bin/bash\n{text}\n")

    def run(self, sessions: int = 1, limit_s: float = 20.0, worker: int = 0) -> str:
        pid = os.getpid()
        text = netperf._host_script(
            ["netperf", "-x"], sessions, qemu=pid, worker=worker or pid, cpu=3, limit_s=limit_s
        )
        done = subprocess.run(
            ["bash", "-c", text.replace(WORK, str(self.folder / "work"))],
            env={**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@needs_bash
def test_sessions_run_at_once_and_all_that_they_print_is_told(tmp_path: Path) -> None:
    host = Host(tmp_path, 'echo "A=$1"; echo odd >&2; sleep 0.5; exit 3')
    text = host.run(sessions=3)
    found = sections(text)
    assert list(found) == [
        "clock",
        "worker",
        *(f"{what}{n}" for n in range(3) for what in ("out", "err")),
        "sample",
    ]
    assert found["out2"].words == ("3",)
    assert found["out2"].text == "A=-x\n"
    assert found["err0"].text == "odd\n"
    assert found["worker"].words == (f"/proc/{os.getpid()}/task/{os.getpid()}",)
    assert found["sample"].text == "@ 123\n# samples 1 late 0 cpu_ns 5 elapsed_ns 500\n"
    begin, end = map(float, found["clock"].words)
    assert 0 < end - begin < 30
    assert (tmp_path / "taskset").read_text().startswith("-p -c 3 ")
    assert (tmp_path / "ip").read_text() == f"tcp_metrics flush {vhost_nic.GUEST_ADDRESS}\n"
    # Nothing of an earlier run may be read.
    assert "out3" not in sections(host.run(sessions=2))


@needs_bash
def test_a_session_that_hangs_is_ended_at_its_limit(tmp_path: Path) -> None:
    host = Host(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 1000")
    found = sections(host.run(limit_s=0.5))
    assert found["out0"].words == ("137",)
    assert not alive(int((tmp_path / "pid").read_text()))


@needs_bash
def test_a_worker_that_is_a_kernel_thread_of_its_own(tmp_path: Path) -> None:
    # Process 1 is no task of ours.
    found = sections(Host(tmp_path, "exit 0").run(worker=1))
    assert found["worker"].words == ("/proc/1",)


@needs_bash
def test_a_sampler_that_ends_at_once_does_not_hang_the_run(tmp_path: Path) -> None:
    found = sections(Host(tmp_path, "echo A=1", "echo broken >&2; exit 2").run())
    assert found["out0"].text == "A=1\n"


class Inside:
    """A guest of files in a folder, in which the script before a run is really run."""

    def __init__(self, folder: Path, *, up: bool = False, listening: bool = False) -> None:
        self.folder = folder
        net = folder / "sys/class/net"
        for number, (name, mac) in enumerate(
            (("eth0", "52:54:00:76:6c:01"), ("eth1", vhost_nic.MAC))
        ):
            device = folder / f"sys/devices/pci0/virtio{number + 3}"
            device.mkdir(parents=True)
            (net / name).mkdir(parents=True)
            (net / name / "address").write_text(f"{mac}\n")
            (net / name / "device").symlink_to(device)
        (folder / "proc/net").mkdir(parents=True)
        (folder / "proc/sys/net/ipv4").mkdir(parents=True)
        (folder / "proc/interrupts").write_text("  CPU0\n 35: 7 virtio4-output.0\n")
        self.routes = folder / "proc/net/fib_trie"
        self.routes.write_text("Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 127.0.0.1\n")
        if up:
            self.routes.write_text(f"           |-- {vhost_nic.GUEST_ADDRESS}\n")
        head = "  sl  local_address rem_address   st tx_queue\n"
        # Another port listens, and a connection to ours is not a listener.
        tcp = "   0: 00000000:0016 00000000:0000 0A 0\n   1: 0100007F:3241 0100007F:9999 01 0\n"
        (folder / "proc/net/tcp").write_text(head + tcp)
        (folder / "proc/net/tcp6").write_text(head)
        if listening:
            self.listen()
        online = folder / "sys/devices/system/cpu"
        (online / "cpu1").mkdir(parents=True)
        (online / "cpu1/online").write_text("1\n")
        (online / "online").write_text("0-1\n")
        tools = folder / "bin"
        tools.mkdir()
        call = f'echo "netserver $*" >> {folder}/log'
        script(tools / "netserver", f"#!/bin/sh\n{call}\n. {folder}/start\n")
        (folder / "start").write_text(f"cat {folder}/listens >> {folder}/proc/net/tcp6\n")
        (folder / "listens").write_text(self.line)
        library = folder / "usr/lib/vringlab"
        library.mkdir(parents=True)
        script(library / "net-up", f'#!/bin/sh\necho "net-up $*" >> {folder}/log; echo eth1\n')

    line = (
        "   2: 00000000000000000000000000000000:3241 00000000000000000000000000000000:0000 0A 0\n"
    )

    def listen(self) -> None:
        with (self.folder / "proc/net/tcp6").open("a") as file:
            file.write(self.line)

    def run(self, vcpus: int = 2) -> tuple[int, dict[str, netperf.Section], list[str]]:
        text = netperf._before_script(vcpus)
        for place in ("/proc/", "/sys/", "/usr/lib/"):
            text = text.replace(f" {place}", f" {self.folder}{place}")
            text = text.replace(f'"{place}', f'"{self.folder}{place}')
        done = subprocess.run(
            ["sh", "-c", text],
            env={**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        log = self.folder / "log"
        called = log.read_text().splitlines() if log.exists() else []
        return done.returncode, sections(done.stdout), called


def test_a_fresh_guest_is_set_up(tmp_path: Path) -> None:
    status, found, called = Inside(tmp_path).run()
    assert status == 0
    assert called == [
        f"net-up {vhost_nic.MAC} {vhost_nic.GUEST_ADDRESS}/24",
        "netserver -4 -p 12865",
    ]
    assert found["device"].words == ("eth1", "virtio4")
    assert found["online"].words == ("0-1",)
    assert "virtio4-output.0" in found["interrupts"].text
    assert (tmp_path / "proc/sys/net/ipv4/tcp_no_metrics_save").read_text() == "1\n"
    assert (tmp_path / "sys/devices/system/cpu/cpu1/online").read_text() == "1\n"


def test_a_guest_that_is_set_up_is_left_alone(tmp_path: Path) -> None:
    status, found, called = Inside(tmp_path, up=True, listening=True).run(vcpus=1)
    assert (status, called) == (0, [])
    assert found["device"].words == ("eth1", "virtio4")
    assert (tmp_path / "sys/devices/system/cpu/cpu1/online").read_text() == "0\n"


def test_a_netserver_that_does_not_listen(tmp_path: Path) -> None:
    inside = Inside(tmp_path)
    (tmp_path / "start").write_text("exit 0\n")
    assert inside.run()[0] == 9
    (tmp_path / "start").write_text("exit 1\n")
    assert inside.run()[0] == 9


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    inside = Inside(tmp_path, listening=True)
    shutil.rmtree(tmp_path / "sys/class/net/eth1")
    assert inside.run()[0] == 8
    script(tmp_path / "usr/lib/vringlab/net-up", "#!/bin/sh\nexit 1\n")
    assert inside.run()[0] == 8
