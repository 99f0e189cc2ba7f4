"""The C tools vringlab-stream and vringlab-sample, built here and run natively."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import vringlab.image
from vringlab.workloads import slab, stream_output

SOURCE = Path(vringlab.image.__file__).parent / "src"
LIMIT = 30  # seconds within which everything here must have ended


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None or shutil.which("make") is None:
        pytest.skip("needs a C compiler and make")
    out = tmp_path_factory.mktemp("stream")
    # OUT keeps the tree clean; the Makefile's own flags (-Werror) are part of what is tested.
    subprocess.run(["make", "-C", SOURCE, f"OUT={out}"], check=True, capture_output=True)
    return out


class Run:
    """One end of the tool under test; ended with the test."""

    def __init__(self, tool: Path, *arguments: object, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [tool, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, **(env or {})},
        )

    def listening(self) -> str:
        """Waits until it listens; where."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("listening "), self.end()
        return line.removeprefix("listening ").strip()

    def end(self) -> tuple[int, str, str]:
        stdout, stderr = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, stdout, stderr

    def report(self, expected: int = 0) -> dict[str, Any]:
        code, stdout, stderr = self.end()
        assert code == expected, stderr
        stream_output.parse(stdout)  # the parser knows every field
        found: dict[str, Any] = json.loads(stdout[stdout.index("{") :])
        return found

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def cpu_ticks(self) -> int:
        """CPU time so far; it grows while bytes move."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])


Start = Callable[..., Run]


@pytest.fixture
def start(tools: Path) -> Iterator[Start]:
    runs: list[Run] = []

    def begin(*arguments: object, env: dict[str, str] | None = None) -> Run:
        runs.append(Run(tools / "vringlab-stream", *arguments, env=env))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
        run.process.communicate()


class Place:
    """Where a family's listener goes, how the other side reaches it, and the socket's type."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.family, _, self.type = kind.partition("-")
        self.listen: list[str] = ["0"] if self.family == "tcp" else [str(folder / "socket")]

    @property
    def common(self) -> tuple[str, ...]:
        return ("--family", self.family, "--type", self.type, "--json")

    def connect(self, where: str) -> list[str]:
        return ["127.0.0.1", where] if self.family == "tcp" else [where]


@pytest.fixture(params=["tcp-stream", "unix-stream", "unix-seqpacket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request.param, tmp_path)


QUICK = ("--duration", 0.2, "--warmup", 0.05)


def pair(
    start: Start, place: Place, *arguments: object, listener: tuple[object, ...] = ()
) -> tuple[Run, Run]:
    """A listener and the sender that uses it."""
    server = start("listen", *place.listen, *place.common, *listener)
    client = start("connect", *place.connect(server.listening()), *place.common, *arguments)
    return server, client


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_until_moving(run: Run) -> None:
    before = run.cpu_ticks()
    wait_until(lambda: run.cpu_ticks() > before + 2)


# ---- Between two of the tool ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threads", "size"), [(1, "16"), (3, "uniform:1,5000"), (8, "normal:6144,683,4096,8192")]
)
def test_all_that_was_sent_arrives_as_it_was_sent(
    start: Start, place: Place, threads: int, size: str
) -> None:
    server, client = pair(
        start, place, *QUICK, "--threads", threads, "--size", size, listener=("--verify",)
    )
    sent, heard = client.report(), server.report()
    assert (sent["ended"], heard["ended"]) == ("duration", "peer finished")
    assert sent["bytes"] == sent["peer_bytes"] == heard["bytes"] > 0
    assert sent["damaged"] == heard["damaged"] == sent["resets"] == heard["enobufs"] == 0
    for report in (sent, heard):
        assert report["connections"] == report["threads"] == threads
        assert [one["index"] for one in report["per_thread"]] == list(range(threads))
        assert sum(one["bytes"] for one in report["per_thread"]) == report["bytes"]
        assert sum(one["ops"] for one in report["per_thread"]) == report["ops"]
        assert (report["warmup_ns"], report["duration_ns"]) == (50_000_000, 200_000_000)
        assert report["clock"] == "CLOCK_MONOTONIC_RAW"
    for a, b in zip(sent["per_thread"], heard["per_thread"], strict=True):
        assert a["bytes"] == a["peer_bytes"] == b["bytes"]
    assert sent["sizes"] == heard["sizes"]
    if place.type == "seqpacket":
        assert sent["ops"] == heard["ops"]
    if place.family == "unix":
        assert not Path(place.listen[0]).exists()


def test_the_window_is_the_time_that_all_threads_share(start: Start, place: Place) -> None:
    """Every figure of the window, worked out again from the threads and the slots."""
    server, client = pair(start, place, *QUICK, "--threads", 4, "--size", 1000)
    for report in (client.report(), server.report()):
        firsts = [one["first_ns"] for one in report["per_thread"]]
        lasts = [one["last_ns"] for one in report["per_thread"]]
        window = report["window"]
        assert window["begin_ns"] == max(50_000_000, *firsts)
        assert window["end_ns"] == min(250_000_000, *lasts)
        slot = report["slot_ns"]
        assert slot == 1_000_000  # 250 ms in 500 slots would be less: the shortest there is
        whole = range(-(-window["begin_ns"] // slot), window["end_ns"] // slot)
        assert window["counted_ns"] == len(whole) * slot
        assert window["bytes"] == sum(report["series"][i] for i in whole)
        assert report["throughput"] == pytest.approx(
            window["bytes"] * 8e9 / window["counted_ns"], rel=1e-6
        )
        assert report["skew_ns"] == {
            "first": max(firsts) - min(firsts),
            "last": max(lasts) - min(lasts),
        }
        assert report["elapsed_ns"] == max(lasts)
        assert sum(report["series"]) <= report["bytes"]


def test_cpu_time_is_that_of_the_threads(start: Start, tmp_path: Path) -> None:
    place = Place("unix-stream", tmp_path)
    server, client = pair(start, place, "--duration", 0.4, "--warmup", 0, "--threads", 2)
    for report in (client.report(), server.report()):
        total = 1000 * (report["cpu_us"]["user"] + report["cpu_us"]["system"])
        threads = sum(one["cpu_ns"] for one in report["per_thread"])
        assert threads > 0
        assert total == pytest.approx(threads, rel=0.25, abs=20e6)


def test_running_on_named_cpus_is_done_and_reported(start: Start, tmp_path: Path) -> None:
    cpu = str(max(os.sched_getaffinity(0)))
    server, client = pair(
        start, Place("unix-stream", tmp_path), *QUICK, "--cpus", cpu, listener=("--cpus", cpu)
    )
    assert client.report()["cpus"] == server.report()["cpus"] == cpu


def test_a_report_file_is_there_whole(start: Start, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    server, client = pair(start, Place("unix-stream", tmp_path), *QUICK, "--output", out)
    assert client.end()[:2] == (0, "")
    server.report()
    assert stream_output.parse(out.read_text()).bytes > 0
    assert not out.with_name("report.json.part").exists()


# ---- Ends that come early ------------------------------------------------------------------------


def test_a_killed_listener_is_noticed_and_the_figures_are_kept(start: Start, place: Place) -> None:
    server, client = pair(start, place, "--duration", 60, "--threads", 2)
    wait_until_moving(client)
    server.kill()
    report = client.report(expected=3)
    assert report["ended"] == "peer closed"
    assert report["resets"] >= 1
    assert "connection 0: the peer went away" in report["error"]
    assert report["bytes"] > 0
    assert report["peer_bytes"] is None


def test_a_killed_sender_leaves_the_listener_with_less_than_the_duration(
    start: Start, place: Place
) -> None:
    server, client = pair(start, place, "--duration", 60)
    wait_until_moving(client)
    client.kill()
    code, stdout, _ = server.end()
    result = stream_output.parse(stdout)
    assert code in (0, 3)  # an end of the stream, or a reset when data was under way
    assert result.bytes > 0
    assert result.common_share < 0.5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_sender_in_order(
    start: Start, place: Place, number: signal.Signals
) -> None:
    server, client = pair(start, place, "--duration", 60, "--threads", 2)
    wait_until_moving(client)
    client.kill(number)
    report = client.report(expected=128 + number)
    assert report["ended"] == "signal"
    assert server.report()["bytes"] == report["bytes"] == report["peer_bytes"] > 0


def test_a_signal_ends_a_listener_in_mid_run(start: Start, place: Place) -> None:
    server, client = pair(start, place, "--duration", 60, "--threads", 2)
    wait_until_moving(client)
    server.kill(signal.SIGTERM)
    assert server.report(expected=143)["ended"] == "signal"
    assert client.report(expected=3)["ended"] == "peer closed"


def test_a_signal_ends_a_listener_that_waits(start: Start, place: Place) -> None:
    server = start("listen", *place.listen, *place.common)
    server.listening()
    server.kill(signal.SIGTERM)
    report = server.report(expected=143)
    assert report["connections"] == report["bytes"] == 0
    assert "before the start" in report["error"]


def test_a_peer_that_hangs_ends_in_a_timeout(start: Start, place: Place) -> None:
    server, client = pair(start, place, "--duration", 0.5, "--timeout", 0.5, "--threads", 2)
    wait_until(lambda: client.cpu_ticks() > 0)
    server.kill(signal.SIGSTOP)
    report = client.report(expected=4)
    assert report["ended"] == "timeout"
    assert "nothing moved for 0.5 s" in report["error"]
    server.kill(signal.SIGCONT)
    server.end()


def test_a_listener_nobody_comes_to_gives_up(start: Start, place: Place) -> None:
    server = start("listen", *place.listen, *place.common, "--timeout", 0.2)
    assert "nobody connected" in server.report(expected=4)["error"]


def test_no_listener_is_a_clear_error(start: Start, place: Place, tmp_path: Path) -> None:
    where = place.connect("1" if place.family == "tcp" else str(tmp_path / "nothing"))
    code, stdout, stderr = start("connect", *where, *place.common, "--wait", 0.1).end()
    assert (code, stdout) == (2, "")
    assert "is the listener running there?" in stderr


def test_an_address_in_use_is_a_clear_error(start: Start, place: Place) -> None:
    first = start("listen", *place.listen, *place.common)
    where = first.listening()
    code, _, stderr = start("listen", where, *place.common).end()
    assert code == 2
    assert "in use" in stderr


# ---- Peers of our own: the wire format, the sizes and the content written again ------------------

PERIOD, STEP, SIZES = 65521, 997, 4096
MASK = 2**64 - 1
KINDS = {"fixed": 0, "uniform": 1, "normal": 2}


def splitmix64(state: int) -> Iterator[int]:
    while True:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
        yield z ^ z >> 31


PATTERN = bytes(value >> 56 for value in itertools.islice(splitmix64(0x76726E676C6162), PERIOD))


def content(index: int, at: int, length: int) -> bytes:
    begin = (at + STEP * index) % PERIOD
    doubled = PATTERN * (2 + length // PERIOD)
    return doubled[begin : begin + length]


def unit(numbers: Iterator[int]) -> float:
    return ((next(numbers) >> 11) + 0.5) / 2**53


def sizes_of(seed: int, index: int, spec: str) -> list[int]:
    kind, _, rest = spec.partition(":")
    numbers = splitmix64(seed << 32 | index)
    if not rest:
        return [int(kind)] * SIZES
    values = [int(value) for value in rest.split(",")]
    found: list[int] = []
    while len(found) < SIZES:
        if kind == "uniform":
            low, high = values
            found.append(low + ((next(numbers) >> 32) * (high - low + 1) >> 32))
            continue
        mean, sd, low, high = values
        radius = math.sqrt(-2 * math.log(unit(numbers)))
        value = math.floor(mean + sd * radius * math.cos(2 * math.pi * unit(numbers)) + 0.5)
        if low <= value <= high:
            found.append(value)
    return found


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    """Closes what it was given with the test."""
    with ExitStack() as stack:
        yield stack


class FakeListener:
    """Serves one connection of a sender over a unix socket and keeps what arrives."""

    def __init__(self, sockets: ExitStack, path: Path, kind: int = socket.SOCK_SEQPACKET) -> None:
        self.sockets = sockets
        self.server = sockets.enter_context(socket.socket(socket.AF_UNIX, kind))
        self.server.bind(str(path))
        self.server.listen(8)
        self.server.settimeout(LIMIT)
        self.messages: list[bytes] = []
        self.count = 0

    def accept(self) -> socket.socket:
        client = self.sockets.enter_context(self.server.accept()[0])
        client.settimeout(LIMIT)
        self.hello = client.recv(64)
        return client

    def go(self, client: socket.socket) -> None:
        client.sendall(b"VRSG" + bytes(4) + self.hello[8:16])

    def serve(self, most: int, lie: int = 0) -> None:
        client = self.accept()
        self.go(client)
        while data := client.recv(262144):
            if len(self.messages) < most:
                self.messages.append(data)
            self.count += len(data)
        client.sendall(b"VRSC" + bytes(4) + struct.pack("<QQQ", self.count + lie, 0, 0))


@pytest.mark.parametrize(
    "spec", ["700", "uniform:1,40", "uniform:5,5", "normal:6144,683,4096,8192", "normal:50,0,1,90"]
)
def test_sizes_and_content_are_the_documented_ones(
    start: Start, sockets: ExitStack, tmp_path: Path, spec: str
) -> None:
    listener = FakeListener(sockets, tmp_path / "s")
    server = threading.Thread(target=listener.serve, args=(SIZES + 10,))
    server.start()
    client = start(
        *("connect", tmp_path / "s", "--family", "unix", "--type", "seqpacket", "--json"),
        *("--size", spec, "--seed", 7, "--duration", 0.5, "--warmup", 0),
    )
    report = client.report()
    server.join()
    expected = sizes_of(7, 0, spec)
    lengths = [len(message) for message in listener.messages]
    assert len(lengths) == SIZES + 10
    assert lengths == [*expected, *expected[:10]]  # drawn once, then taken in turn
    at = 0
    for message in listener.messages:
        assert message == content(0, at, len(message))
        at += len(message)
    assert report["ops"] > SIZES
    kind = spec.partition(":")[0] if ":" in spec else "fixed"
    assert report["sizes"]["kind"] == kind
    assert struct.unpack("<I", listener.hello[24:28])[0] == KINDS[kind]
    if spec.startswith("normal:6144"):
        assert statistics.fmean(expected) == pytest.approx(6144, abs=50)
        # Cut off at three deviations: 0.9866 of 683.
        assert statistics.stdev(expected) == pytest.approx(0.9866 * 683, rel=0.05)


def test_another_seed_or_thread_draws_other_sizes() -> None:
    spec = "uniform:1,1000"
    assert len({tuple(sizes_of(s, i, spec)) for s, i in ((1, 0), (1, 1), (2, 0), (2, 1))}) == 4


def test_what_the_listener_did_not_get_is_a_mismatch(
    start: Start, sockets: ExitStack, tmp_path: Path
) -> None:
    listener = FakeListener(sockets, tmp_path / "s", socket.SOCK_STREAM)
    server = threading.Thread(target=listener.serve, args=(0, -3))
    server.start()
    client = start("connect", tmp_path / "s", "--family", "unix", "--json", *QUICK)
    code, stdout, stderr = client.end()
    server.join()
    assert code == 5
    assert "bytes were sent and" in stderr
    result = stream_output.parse(stdout)
    assert result.peer_bytes == result.bytes - 3


def test_threads_start_only_when_all_are_served(
    start: Start, sockets: ExitStack, tmp_path: Path
) -> None:
    listener = FakeListener(sockets, tmp_path / "s", socket.SOCK_STREAM)
    start("connect", tmp_path / "s", "--family", "unix", "--threads", 3, "--json")
    clients = [listener.accept() for _ in range(3)]
    for client in clients[:2]:
        listener.go(client)
    clients[0].settimeout(0.3)
    with pytest.raises(TimeoutError):
        clients[0].recv(1)
    listener.go(clients[2])
    for client in clients:
        client.settimeout(LIMIT)
        assert client.recv(1)


class FakeSender:
    """Connects to a listening tool over TCP as a run of several connections."""

    def __init__(self, sockets: ExitStack, server: Run, threads: int) -> None:
        self.sockets = sockets
        self.address = ("127.0.0.1", int(server.listening()))
        self.threads = threads
        self.peers: list[socket.socket] = []

    def hello(self, index: int, **fields: int) -> bytes:
        values = {"version": 1, "token": 99, "index": index, "threads": self.threads}
        values |= fields
        return b"VRST" + struct.pack(
            "<IQIIIIIIIIQQ", values["version"], values["token"], values["index"],
            values["threads"], 0, 100, 0, 100, 100, 1, 0, 1_000_000_000,
        )  # fmt: skip

    def connect(self, data: bytes) -> socket.socket:
        peer = self.sockets.enter_context(socket.create_connection(self.address, LIMIT))
        peer.sendall(data)
        self.peers.append(peer)
        return peer

    def ready(self) -> None:
        for index in range(self.threads):
            self.connect(self.hello(index))
        for peer in self.peers:
            assert peer.recv(16)[:4] == b"VRSG"

    def finish(self) -> list[int]:
        counts = []
        for peer in self.peers:
            peer.shutdown(socket.SHUT_WR)
            answer = peer.recv(32)
            assert answer[:4] == b"VRSC"
            counts.append(struct.unpack("<Q", answer[8:16])[0])
            peer.close()  # which the tool waits for
        return counts


@pytest.fixture
def listener(start: Start) -> Run:
    return start("listen", 0, "--family", "tcp", "--json", "--timeout", LIMIT / 2, "--verify")


def test_a_late_thread_shortens_the_common_window(sockets: ExitStack, listener: Run) -> None:
    sender = FakeSender(sockets, listener, 2)
    sender.ready()
    sent = [0, 0]
    for turn in range(30):
        for index in (0, 1) if turn >= 15 else (0,):
            sender.peers[index].sendall(content(index, sent[index], 100))
            sent[index] += 100
        time.sleep(0.02)
    assert sender.finish() == sent == [3000, 1500]
    report = listener.report()
    late = report["per_thread"][1]["first_ns"]
    assert late >= 15 * 20_000_000 * 0.9
    assert report["window"]["begin_ns"] == report["skew_ns"]["first"] == late
    # Both threads send 100 bytes at a time in it, and what came before does not count.
    assert report["window"]["bytes"] <= 3000
    assert stream_output.parse(json.dumps(report)).common_share < 0.5


@pytest.mark.parametrize("place_of_damage", [0, 57, 99])
def test_damage_is_seen_by_a_listener_that_verifies(
    sockets: ExitStack, listener: Run, place_of_damage: int
) -> None:
    sender = FakeSender(sockets, listener, 1)
    sender.ready()
    data = bytearray(content(0, 0, 100))
    data[place_of_damage] ^= 1
    sender.peers[0].sendall(data)
    time.sleep(0.1)
    sender.peers[0].sendall(content(0, 100, 100))
    assert sender.finish() == [200]
    report = listener.report(expected=5)
    assert report["damaged"] == 1


def test_swapped_connections_are_damage(sockets: ExitStack, listener: Run) -> None:
    sender = FakeSender(sockets, listener, 2)
    sender.ready()
    for index in (0, 1):
        sender.peers[index].sendall(content(1 - index, 0, 100))
    sender.finish()
    assert listener.report(expected=5)["damaged"] == 2


def test_two_messages_made_one_are_damage(start: Start, sockets: ExitStack, tmp_path: Path) -> None:
    """What a driver must never do with SEQPACKET, though no byte is lost."""
    path = tmp_path / "s"
    server = start(
        *("listen", path, "--family", "unix", "--type", "seqpacket", "--json", "--verify")
    )
    server.listening()
    peer = sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    peer.connect(str(path))
    peer.settimeout(LIMIT)
    peer.send(
        b"VRST" + struct.pack("<IQIIIIIIIIQQ", 1, 5, 0, 1, 0, 16, 0, 16, 16, 1, 0, 1_000_000_000)
    )
    assert peer.recv(16)[:4] == b"VRSG"
    peer.send(content(0, 0, 16))
    peer.send(content(0, 16, 32))
    peer.shutdown(socket.SHUT_WR)
    peer.recv(32)
    peer.close()
    report = server.report(expected=5)
    assert (report["bytes"], report["damaged"]) == (48, 1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"version": 2}, "does not speak wire version 1"), ({"threads": 65}, "cannot do"),
     ({"threads": 0}, "cannot do"), ({"index": 1}, "another sender")],
)  # fmt: skip
def test_a_hello_that_does_not_fit_is_refused(
    sockets: ExitStack, listener: Run, fields: dict[str, int], said: str
) -> None:
    sender = FakeSender(sockets, listener, 1)
    sender.connect(sender.hello(**{"index": 0, **fields}))
    code, stdout, stderr = listener.end()
    assert (code, stdout) == (2, "")
    assert said in stderr


def test_a_second_sender_is_refused(sockets: ExitStack, listener: Run) -> None:
    sender = FakeSender(sockets, listener, 2)
    sender.connect(sender.hello(0))
    sender.connect(sender.hello(1, token=100))
    code, _, stderr = listener.end()
    assert code == 2
    assert "another sender" in stderr


def test_a_stranger_is_refused(sockets: ExitStack, listener: Run) -> None:
    FakeSender(sockets, listener, 1).connect(b"GET / HTTP/1.1\r\n\r\n".ljust(64))
    assert listener.end()[0] == 2


def test_a_missing_connection_is_not_waited_for_for_ever(start: Start, sockets: ExitStack) -> None:
    server = start("listen", 0, "--family", "tcp", "--json", "--timeout", 0.3)
    sender = FakeSender(sockets, server, 2)
    sender.connect(sender.hello(0))
    assert "connections were missing" in server.report(expected=4)["error"]


SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/socket.h>
ssize_t send(int fd, const void *from, size_t length, int flags)
{
	static atomic_int calls;
	static ssize_t (*real)(int, const void *, size_t, int);
	if (!real)
		real = (ssize_t (*)(int, const void *, size_t, int))dlsym(RTLD_NEXT, "send");
	int call = atomic_fetch_add(&calls, 1);
	if (call >= 10 && call < 13) {
		errno = atoi(getenv("SHIM_ERRNO"));
		return -1;
	}
	return real(fd, from, length, flags);
}
"""


@pytest.fixture(scope="session")
def shim(tools: Path) -> Path:
    """Makes three of the tool's sends fail with $SHIM_ERRNO."""
    source, out = tools / "shim.c", tools / "shim.so"
    source.write_text(SHIM)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", out, source, "-ldl"], check=True)
    return out


def failing(start: Start, shim: Path, path: Path, error: str) -> tuple[Run, Run]:
    server = start("listen", path, "--family", "unix", "--json", "--verify")
    server.listening()
    client = start(
        *("connect", path, "--family", "unix", "--json", *QUICK),
        env={"LD_PRELOAD": str(shim), "SHIM_ERRNO": str(getattr(errno, error))},
    )
    return server, client


def test_enobufs_is_counted_and_the_connection_goes_on(
    start: Start, shim: Path, tmp_path: Path
) -> None:
    server, client = failing(start, shim, tmp_path / "s", "ENOBUFS")
    report, heard = client.report(), server.report()
    assert (report["enobufs"], report["resets"]) == (3, 0)
    assert report["bytes"] == heard["bytes"] > 0
    assert heard["damaged"] == 0


def test_a_reset_is_counted_apart(start: Start, shim: Path, tmp_path: Path) -> None:
    server, client = failing(start, shim, tmp_path / "s", "ECONNRESET")
    report = client.report(expected=3)
    assert (report["enobufs"], report["resets"]) == (0, 1)
    assert report["per_thread"][0]["ended"] == "peer closed"
    server.end()


# ---- Command line --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "listen or connect?"),
        (("listen",), "takes a port"),
        (("listen", "0", "--threads", "2", "--family", "tcp"), "--threads is the sender's to say"),
        (("connect", "3", "99", "--threads", "65"), "from 1 to 64"),
        (("connect", "3", "99", "--threads", "0"), "from 1 to 64"),
        (("connect", "3", "99", "--size", "0"), "from 1 to 262144"),
        (("connect", "3", "99", "--size", "uniform:9"), "has 1 numbers, not 2"),
        (("connect", "3", "99", "--size", "uniform:9,8"), "9 is more than 8"),
        (("connect", "3", "99", "--size", "normal:5,1,6,9"), "lies outside"),
        (("connect", "3", "99", "--size", "normal:6,900,6,9"), "too much"),
        (("connect", "3", "99", "--size", "poisson:3"), "whole number"),
        (("connect", "3", "99", "--verify"), "is the listener's"),
        (("connect", "1.2.3.4", "99", "--family", "tcp", "--type", "seqpacket"), "no seqpacket"),
        (("connect", "3", "99", "--type", "dgram"), "stream or seqpacket"),
        (("connect", "3", "99", "--cpus", ","), "names no CPU"),
        (("connect", "3", "99", "--cpus", "3-1"), "whole number from 3"),
        (("connect", "3", "99", "--duration", "nan"), "seconds from"),
        (("connect", "3", "99", "--frob", "1"), "unknown option"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    start: Start, arguments: tuple[str, ...], said: str
) -> None:
    code, stdout, stderr = start(*arguments).end()
    assert (code, stdout) == (1, "")
    assert said in stderr.splitlines()[0]
    assert "usage:" in stderr


def test_help_and_version(start: Start) -> None:
    assert start("--version").end()[:2] == (0, "vringlab-stream 1.0\n")
    code, stdout, _ = start("--help").end()
    assert code == 0
    assert "--size SPEC" in stdout


# ---- vringlab-sample -----------------------------------------------------------------------------


def sample(tools: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [tools / "vringlab-sample", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def test_named_lines_of_files_are_read_again_and_again(tools: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("cpu 1 2\ncpu0 3 4\nintr: 5\nlong line without end")
    second.write_text("7 N0=7\n")
    done = sample(tools, "--interval", 0.05, "--duration", 0.3, f"{first}:cpu,intr", second)
    assert done.returncode == 0, done.stderr
    blocks = done.stdout.split("@ ")[1:]
    assert 3 <= len(blocks) <= 7
    for block in blocks:
        kept = [line for line in block.splitlines()[1:] if not line.startswith("#")]
        assert kept == [f"= {first}", "cpu 1 2", "intr: 5", f"= {second}", "7 N0=7"]
    times = [int(block.split()[0]) for block in blocks]
    assert times == sorted(times)
    end = done.stdout.splitlines()[-1].split()
    assert end[:3] == ["#", "samples", str(len(blocks))]
    assert int(end[-1]) >= 300_000_000


def test_a_change_is_seen_and_the_cost_is_told(tools: Path, tmp_path: Path) -> None:
    file = tmp_path / "slabs"
    file.write_text("1 N0=1\n")
    out = tmp_path / "out"
    process = subprocess.Popen(
        [tools / "vringlab-sample", "--interval", "0.02", "--output", out, file]
    )
    wait_until(lambda: out.exists() and out.read_text().count("@") > 2)
    with file.open("r+") as stream:
        stream.write("9")
    wait_until(lambda: "9 N0=1" in out.read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT) == 0
    assert "cpu_ns" in out.read_text().splitlines()[-1]


def test_slab_files_of_this_machine_are_understood(tools: Path) -> None:
    folder = Path("/sys/kernel/slab/kmalloc-512")
    if not os.access("/proc/slabinfo", os.R_OK) or not (folder / "slabs").exists():
        pytest.skip("slab files are root's to read")
    done = sample(
        tools, "--interval", 0.02, "--duration", 0.1, folder / "slabs", "/proc/slabinfo:kmalloc-64"
    )
    series = slab.parse_series(done.stdout)
    assert len(series.readings) >= 2
    assert all(set(reading.slabs) == {"kmalloc-512", "kmalloc-64"} for reading in series.readings)
    assert all(count > 0 for reading in series.readings for count in reading.slabs.values())


def test_a_file_that_cannot_be_read_is_an_error_at_the_start(tools: Path, tmp_path: Path) -> None:
    done = sample(tools, "--duration", 0.1, tmp_path / "nothing")
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot read" in done.stderr
    assert sample(tools).returncode == 1
    assert sample(tools, "--interval", 0, "/proc/stat").returncode == 1
