"""The C tool vringlab-pingpong, built here and run against itself and against faulty peers."""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

import pytest

import vringlab.image
from vringlab.workloads import pingpong_output

SOURCE = Path(vringlab.image.__file__).parent / "src"
LIMIT = 30  # seconds within which everything here must have ended


@pytest.fixture(scope="session")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None or shutil.which("make") is None:
        pytest.skip("needs a C compiler and make")
    out = tmp_path_factory.mktemp("pingpong")
    # OUT keeps the tree clean; the Makefile's own flags (-Werror) are part of what is tested.
    subprocess.run(["make", "-C", SOURCE, f"OUT={out}"], check=True, capture_output=True)
    return out / "vringlab-pingpong"


class Run:
    """One end of the tool under test; ended with the test."""

    def __init__(self, tool: Path, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [tool, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
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
        pingpong_output.parse(stdout)  # the parser knows every field
        found: dict[str, Any] = json.loads(stdout[stdout.index("{") :])
        return found

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(number)


Start = Callable[..., Run]


@pytest.fixture
def start(tool: Path) -> Iterator[Start]:
    runs: list[Run] = []

    def begin(*arguments: object) -> Run:
        runs.append(Run(tool, *arguments))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
        run.process.communicate()


class Place:
    """Where a family's listener goes and how the other side reaches it."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family = family
        self.listen: list[str] = ["0"] if family == "tcp" else [str(folder / "socket")]

    def connect(self, where: str) -> list[str]:
        return ["127.0.0.1", where] if self.family == "tcp" else [where]


@pytest.fixture(params=["tcp", "unix"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request.param, tmp_path)


def pair(
    start: Start, place: Place, *arguments: object, listener: tuple[object, ...] = ()
) -> tuple[Run, Run]:
    """A listener and the connector that uses it."""
    family = ("--family", place.family, "--json")
    server = start("listen", *place.listen, *family, *listener)
    client = start("connect", *place.connect(server.listening()), *family, *arguments)
    return server, client


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def busy_time(run: Run) -> int:
    """Context switches so far: they grow while messages move."""
    status = Path(f"/proc/{run.process.pid}/status").read_text()
    return int(status.split("voluntary_ctxt_switches:")[1].split()[0])


def wait_until_moving(run: Run) -> None:
    before = busy_time(run)
    wait_until(lambda: busy_time(run) > before + 200)


# ---- Between two of the tool ---------------------------------------------------------------------


@pytest.mark.parametrize("payload", [16, 17, 64, 4096, 131072])
def test_both_ends_agree_on_an_orderly_run(start: Start, place: Place, payload: int) -> None:
    server, client = pair(start, place, "--payload", payload, "--count", 500, "--warmup", 20)
    report, heard = client.report(), server.report()
    assert (report["ended"], heard["ended"]) == ("count", "peer finished")
    assert (report["messages"], report["warmup"], heard["messages"]) == (500, 20, 520)
    assert report["payload"] == heard["payload"] == payload
    assert report["sequence_errors"] == heard["sequence_errors"] == 0
    assert report["peer_sequence_errors"] == 0
    assert report["clock"] == "CLOCK_MONOTONIC_RAW"
    assert heard["latency_ns"] is None
    assert sum(count for _, count in report["bins"]) == 500


def bin_midpoint(ns: int) -> int:
    """The histogram of the tool, written again: 128 steps in each power of two."""
    if ns < 256:
        return ns
    width = 1 << (ns.bit_length() - 8)
    return ns // width * width + (width - 1) // 2


def test_figures_agree_with_the_raw_record(start: Start, place: Place, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    _, client = pair(start, place, "--count", 20_000, "--dump", raw)
    report = client.report()
    found = [int(line) for line in raw.read_text().split()]
    assert len(found) == report["messages"] == 20_000
    latency = report["latency_ns"]
    assert (latency["min"], latency["max"]) == (min(found), max(found))
    assert latency["mean"] == pytest.approx(statistics.fmean(found), abs=0.001)
    assert latency["stddev"] == pytest.approx(statistics.stdev(found), rel=1e-6)
    assert latency["min"] < latency["mean"] < latency["max"]

    bins: dict[int, int] = {}
    for ns in found:
        bins[bin_midpoint(ns)] = bins.get(bin_midpoint(ns), 0) + 1
    assert report["bins"] == [[midpoint, bins[midpoint]] for midpoint in sorted(bins)]
    assert report["bin_error"] == 1 / 256
    assert all(abs(bin_midpoint(ns) - ns) <= ns / 256 for ns in found)

    assert list(latency["percentile"]) == ["1", "50", "90", "99", "99.9"]
    ordered = sorted(found)
    for percent, value in latency["percentile"].items():
        rank = math.ceil(round(float(percent) * len(ordered) / 100, 6))
        assert abs(value - ordered[rank - 1]) <= ordered[rank - 1] / 256, percent
    # The round trips lie one after the other within the window.
    assert sum(found) <= report["elapsed_ns"]


def test_a_growing_record_loses_nothing(start: Start, place: Place, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    _, client = pair(start, place, "--duration", 0.3, "--dump", raw)
    report = client.report()
    found = [int(line) for line in raw.read_text().split()]
    assert len(found) == report["messages"]
    assert max(found) == report["latency_ns"]["max"]


def test_duration_is_the_timed_window_and_excludes_the_warm_up(start: Start, place: Place) -> None:
    _, client = pair(start, place, "--duration", 0.4, "--warmup", 1000)
    report = client.report()
    assert report["ended"] == "duration"
    assert report["warmup"] == 1000
    # The run goes on until the duration is over, and ends with the round trip that passes it.
    assert report["elapsed_ns"] >= 400_000_000
    assert report["elapsed_ns"] - report["latency_ns"]["max"] < 400_000_000


def test_a_listener_serves_one_client_and_leaves_no_socket(start: Start, place: Place) -> None:
    server, client = pair(start, place, "--count", 5)
    client.report()
    server.report()
    if place.family == "unix":
        assert not Path(place.listen[0]).exists()


def test_a_payload_both_ends_disagree_on_is_refused_by_both(start: Start, place: Place) -> None:
    server, client = pair(start, place, "--payload", 64, "--count", 5, listener=("--payload", 512))
    for code, stdout, stderr in (server.end(), client.end()):
        assert code == 2
        assert "give both the same --payload" in stderr
        assert "{" not in stdout


def test_pinning_is_done_and_reported(start: Start, place: Place) -> None:
    cpu = max(os.sched_getaffinity(0))
    server, client = pair(start, place, "--count", 200, "--cpu", cpu, listener=("--cpu", cpu))
    for report in (client.report(), server.report()):
        assert report["cpu"] == {"asked": cpu, "start": cpu, "end": cpu}


def test_without_pinning_the_report_says_so(start: Start, place: Place) -> None:
    _, client = pair(start, place, "--count", 5)
    cpu = client.report()["cpu"]
    assert cpu["asked"] is None
    assert cpu["start"] in os.sched_getaffinity(0)


def test_a_cpu_that_is_not_there_is_a_clear_error(start: Start) -> None:
    code, _, stderr = start("listen", 9000, "--cpu", 1023).end()
    assert code == 2
    assert "cannot pin to CPU 1023" in stderr


# ---- Ends that come early ------------------------------------------------------------------------


def test_a_killed_listener_is_noticed_and_the_figures_are_kept(start: Start, place: Place) -> None:
    server, client = pair(start, place, "--duration", 60)
    wait_until_moving(client)
    server.kill()
    report = client.report(expected=3)
    assert report["ended"] == "peer closed"
    assert "peer" in report["error"]
    assert report["messages"] > 0
    assert sum(count for _, count in report["bins"]) == report["messages"]
    assert report["peer_sequence_errors"] is None


def test_a_killed_connector_is_noticed(start: Start, place: Place) -> None:
    server, client = pair(start, place, "--duration", 60)
    wait_until_moving(client)
    client.kill()
    report = server.report(expected=3)
    assert report["ended"] == "peer closed"
    assert report["messages"] > 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_connector_in_order(
    start: Start, place: Place, number: signal.Signals
) -> None:
    server, client = pair(start, place, "--duration", 60)
    wait_until_moving(client)
    client.kill(number)
    report = client.report(expected=128 + number)
    assert report["ended"] == "signal"
    assert report["messages"] > 0
    # The message in flight was finished and the end was told: the listener saw nothing amiss.
    assert server.report()["ended"] == "peer finished"


def test_a_signal_ends_a_listener_in_mid_run(start: Start, place: Place) -> None:
    server, client = pair(start, place, "--duration", 60)
    wait_until_moving(client)
    server.kill(signal.SIGTERM)
    assert server.report(expected=143)["ended"] == "signal"
    assert client.report(expected=3)["ended"] == "peer closed"


def test_a_signal_ends_a_connector_whose_peer_hangs(start: Start, place: Place) -> None:
    server, client = pair(start, place, "--duration", 60, "--timeout", 600)
    wait_until_moving(client)
    server.kill(signal.SIGSTOP)
    before = -1

    def stalled() -> bool:
        nonlocal before
        before, last = busy_time(client), before
        time.sleep(0.1)
        return before == last

    wait_until(stalled)
    client.kill(signal.SIGTERM)
    report = client.report(expected=143)
    assert report["ended"] == "signal"
    assert report["messages"] > 0
    server.kill(signal.SIGCONT)


def test_a_signal_ends_a_listener_that_waits(start: Start, place: Place) -> None:
    server = start("listen", *place.listen, "--family", place.family, "--json")
    server.listening()
    server.kill(signal.SIGTERM)
    report = server.report(expected=143)
    assert report["messages"] == 0
    assert "before anyone connected" in report["error"]
    assert report["cpu"]["start"] == -1


def test_a_peer_that_hangs_ends_in_a_timeout(start: Start, place: Place) -> None:
    server, client = pair(start, place, "--duration", 60, "--timeout", 0.5)
    wait_until_moving(client)
    server.kill(signal.SIGSTOP)
    report = client.report(expected=4)
    assert report["ended"] == "timeout"
    assert "nothing came for 0.5 s" in report["error"]
    server.kill(signal.SIGCONT)
    assert server.report(expected=3)["ended"] == "peer closed"


def test_a_listener_nobody_comes_to_gives_up(start: Start, place: Place) -> None:
    server = start("listen", *place.listen, "--family", place.family, "--timeout", 0.2, "--json")
    report = server.report(expected=4)
    assert "nobody connected" in report["error"]


def test_no_listener_is_a_clear_error(start: Start, place: Place, tmp_path: Path) -> None:
    where = place.connect("1" if place.family == "tcp" else str(tmp_path / "nothing"))
    client = start("connect", *where, "--family", place.family, "--wait", 0.1, "--json")
    code, stdout, stderr = client.end()
    assert (code, stdout) == (2, "")
    assert "is the listener running there?" in stderr


def test_a_listener_that_comes_late_is_waited_for(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "late"
    client = start("connect", path, "--family", "unix", "--wait", LIMIT, "--count", 5, "--json")
    time.sleep(0.2)
    server = start("listen", path, "--family", "unix", "--json")
    assert client.report()["messages"] == 5
    assert server.report()["messages"] == 105


def test_an_address_in_use_is_a_clear_error(start: Start, place: Place) -> None:
    first = start("listen", *place.listen, "--family", place.family)
    where = first.listening()
    code, _, stderr = start("listen", where, "--family", place.family).end()
    assert code == 2
    assert "in use" in stderr
    if place.family == "unix":
        assert Path(where).exists()  # the first one's socket is not the second one's to remove


# ---- Peers that break the rules: the wire format, written again --------------------------------

PING, ECHO, END, END_ACK = 1, 2, 3, 4


def mix(kind: int, seq: int, token: int, ack: int) -> int:
    h = 0x811C9DC5 ^ kind
    for value in (seq, token, ack):
        h = ((h * 0x01000193) & 0xFFFFFFFF) ^ value
    return (h * 0x01000193) & 0xFFFFFFFF


def message(kind: int, seq: int, token: int, ack: int, payload: int = 64) -> bytes:
    head = struct.pack("<III", seq, token, ack)
    return head + bytes(payload - 16) + struct.pack("<I", mix(kind, seq, token, ack))


def header(data: bytes) -> tuple[int, int, int]:
    seq, token, ack = struct.unpack("<III", data[:12])
    return seq, token, ack


def receive(peer: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = peer.recv(length - len(data))
        assert more, "the tool closed"
        data += more
    return data


def hello(token: int = 7, payload: int = 64, version: int = 1) -> bytes:
    return b"VRPP" + struct.pack("<III", version, payload, token)


class Initiator:
    """Connects to a listening tool and speaks its language, as badly as a test wants."""

    def __init__(self, server: Run) -> None:
        self.peer = socket.create_connection(("127.0.0.1", int(server.listening())), LIMIT)
        self.peer.sendall(hello())
        answer = receive(self.peer, 16)
        assert answer[:4] == b"VRPP"
        self.ack = struct.unpack("<I", answer[12:])[0]
        self.seq, self.token = 0, 100

    def ping(self, kind: int = PING, ack: int | None = None, seq: int | None = None) -> bytes:
        sent_seq = self.seq if seq is None else seq
        data = message(kind, sent_seq, self.token, self.ack if ack is None else ack)
        self.seq, self.token = self.seq + 1, self.token + 1
        return data

    def take(self) -> tuple[int, int, int]:
        found = header(receive(self.peer, 64))
        self.ack = found[1]
        return found

    def finish(self) -> int:
        """Ends the run in order; the tool's count of sequence errors."""
        self.peer.sendall(self.ping(END))
        errors = self.take()[1]
        self.peer.close()
        return errors


@pytest.fixture
def listener(start: Start) -> Run:
    return start("listen", 0, "--family", "tcp", "--json", "--timeout", LIMIT / 2)


def test_an_initiator_that_keeps_the_rules_has_no_errors(listener: Run) -> None:
    peer = Initiator(listener)
    for _ in range(10):
        sent = peer.ping()
        peer.peer.sendall(sent)
        seq, _, ack = peer.take()
        assert (seq, ack) == header(sent)[:2]
    assert peer.finish() == 0
    assert listener.report()["messages"] == 10


def test_two_messages_in_flight_are_a_sequence_error(listener: Run) -> None:
    peer = Initiator(listener)
    # Numbers and checks are right; only that the second did not wait for the first echo.
    peer.peer.sendall(peer.ping() + peer.ping())
    peer.take()
    peer.take()
    assert peer.finish() == 1
    report = listener.report(expected=5)
    assert report["sequence_errors"] == 1
    assert "message 1: sent before the message before it" in report["first_sequence_error"]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"seq": 5}, "got sequence number 5"),
        ({"ack": 12345}, "sent before the message before it"),
        ({"kind": ECHO}, "not the ping that was due"),
    ],
)
def test_a_wrong_message_is_counted_once(listener: Run, bad: dict[str, int], said: str) -> None:
    peer = Initiator(listener)
    for fields in ({}, bad, {}):
        peer.peer.sendall(peer.ping(**fields))
        peer.take()
    assert peer.finish() == 1
    report = listener.report(expected=5)
    assert report["sequence_errors"] == 1
    assert said in report["first_sequence_error"]


def test_a_message_in_pieces_is_one_message(listener: Run) -> None:
    # What fio's network engine gets wrong: each piece would have been answered as a message.
    peer = Initiator(listener)
    for _ in range(3):
        data = peer.ping()
        for piece in (data[:20], data[20:63], data[63:]):
            peer.peer.sendall(piece)
            time.sleep(0.02)
        peer.take()
    peer.peer.setblocking(False)
    with pytest.raises(BlockingIOError):
        peer.peer.recv(1)  # no surplus answer
    peer.peer.settimeout(LIMIT)
    assert peer.finish() == 0
    assert listener.report()["messages"] == 3


def test_an_initiator_that_leaves_in_mid_message(listener: Run) -> None:
    peer = Initiator(listener)
    peer.peer.sendall(peer.ping()[:10])
    peer.peer.close()
    report = listener.report(expected=3)
    assert "10 of 64 bytes of the message were here" in report["error"]


@pytest.mark.parametrize("opening", [b"GET / HTTP/1.1\r\n\r\n", hello(version=2), hello(payload=8)])
def test_a_stranger_is_refused(listener: Run, opening: bytes) -> None:
    peer = socket.create_connection(("127.0.0.1", int(listener.listening())), LIMIT)
    peer.sendall(opening)
    code, stdout, stderr = listener.end()
    peer.close()
    assert code == 2
    assert "{" not in stdout
    assert "wire version" in stderr or "16 to 131072 are possible" in stderr


Answer = Callable[[socket.socket, int, int, bytes], None]


def echo(peer: socket.socket, seq: int, token: int, _: bytes) -> None:
    peer.sendall(message(ECHO, seq, 1000 + seq, token))


def serve(start: Start, answer: Answer, errors: int = 0, count: int = 10) -> Run:
    """Runs the connecting tool against a server of ours that answers every ping by `answer`."""
    server = socket.create_server(("127.0.0.1", 0))
    client = start(
        "connect", "127.0.0.1", server.getsockname()[1], "--family", "tcp", "--json",
        "--count", count, "--warmup", 0, "--timeout", LIMIT / 2,
    )  # fmt: skip

    def run() -> None:
        peer, _ = server.accept()
        with peer, server:
            peer.settimeout(LIMIT)
            receive(peer, 16)
            peer.sendall(hello())
            while True:
                data = receive(peer, 64)
                seq, token, ack = header(data)
                if data[-4:] == struct.pack("<I", mix(END, seq, token, ack)):
                    peer.sendall(message(END_ACK, seq, errors, token))
                    return
                answer(peer, seq, token, data)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    client.process.wait(LIMIT)
    thread.join(LIMIT)
    assert not thread.is_alive()
    return client


def test_a_server_that_keeps_the_rules_has_no_errors(start: Start) -> None:
    assert serve(start, echo).report()["messages"] == 10


def test_a_server_that_sends_the_ping_back_is_a_sequence_error(start: Start) -> None:
    client = serve(start, lambda peer, _seq, _token, data: peer.sendall(data))
    report = client.report(expected=5)
    assert report["sequence_errors"] == 10
    assert "not the echo that was due" in report["first_sequence_error"]


def test_an_answer_one_late_is_a_sequence_error_each_time(start: Start) -> None:
    # As after one short read: the stream carries one message too many from then on.
    seen: list[tuple[int, int]] = []

    def late(peer: socket.socket, seq: int, token: int, data: bytes) -> None:
        seen.append((seq, token))
        echo(peer, *seen[max(0, len(seen) - 2)], data)

    report = serve(start, late).report(expected=5)
    assert report["sequence_errors"] == 9
    assert report["first_sequence_error"] == "message 1: got sequence number 0"


def test_an_echo_in_pieces_is_waited_for(start: Start) -> None:
    pause = 0.05

    def pieces(peer: socket.socket, seq: int, token: int, _: bytes) -> None:
        data = message(ECHO, seq, 5, token)
        peer.sendall(data[:40])
        time.sleep(pause)
        peer.sendall(data[40:])

    report = serve(start, pieces, count=4).report()
    assert report["messages"] == 4
    # A lower bound is no bet on speed: the echo was not whole before the pause was over.
    assert report["latency_ns"]["min"] >= 0.99 * pause * 1e9  # the clocks differ by their slew


def test_the_listeners_errors_reach_the_connectors_report(start: Start) -> None:
    client = serve(start, echo, errors=3)
    report = client.report(expected=5)
    assert (report["sequence_errors"], report["peer_sequence_errors"]) == (0, 3)


# ---- Output and command line ---------------------------------------------------------------------


def test_a_report_goes_to_a_file_whole(start: Start, place: Place, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    _, client = pair(start, place, "--count", 50, "--output", file)
    assert client.end() == (0, "", "")
    assert json.loads(file.read_text())["messages"] == 50
    assert [path.name for path in tmp_path.glob("report*")] == ["report.json"]


def test_a_report_that_cannot_be_written_is_an_error(
    start: Start, place: Place, tool: Path, tmp_path: Path
) -> None:
    _, client = pair(start, place, "--count", 5, "--output", tmp_path / "missing" / "file")
    code, _, stderr = client.end()
    assert code == 6
    assert "cannot write to" in stderr
    server = start("listen", 0, "--family", "tcp")
    arguments = ["connect", "127.0.0.1", server.listening(), "--family", "tcp", "--count", "5"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [tool, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT
        )
    assert done.returncode == 6
    assert "No space left" in done.stderr


def test_the_report_for_people(start: Start) -> None:
    server = start("listen", 0, "--family", "tcp")
    arguments = ("127.0.0.1", server.listening(), "--family", "tcp", "--count", 50)
    code, stdout, _ = start("connect", *arguments).end()
    assert code == 0
    assert "50 messages" in stdout
    assert "p99.9" in stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "listen or connect?"),
        (["answer", "1"], "listen or connect, not 'answer'"),
        (["listen"], "listen over vsock takes a port"),
        (["connect", "3"], "connect over vsock takes a CID and a port"),
        (["connect", "1", "2", "3"], "what is '3'?"),
        (["listen", "1", "2"], "listen over vsock takes a port"),
        (["listen", "0"], "the port must be a whole number from 1"),
        (["listen", "-1"], "the port must be"),
        (["listen", "70000", "--family", "tcp"], "from 0 to 65535"),
        (["connect", "x", "1"], "the CID must be"),
        (["listen", "1", "--payload", "15"], "--payload must be a whole number from 16 to 131072"),
        (["listen", "1", "--payload", "131073"], "--payload must be"),
        (["listen", "1", "--payload", "64k"], "not '64k'"),
        (["listen", "1", "--count", "99999999999999999999"], "--count must be"),
        (["connect", "1", "1", "--duration", "nan"], "--duration must be seconds"),
        (["connect", "1", "1", "--duration", "0"], "--duration must be seconds"),
        (["connect", "1", "1", "--duration", "1", "--count", "1"], "not both"),
        (["listen", "1", "--timeout", "0"], "--timeout must be"),
        (["listen", "1", "--family", "ipx"], "--family is vsock, tcp or unix"),
        (["listen", "1", "--speed", "9"], "unknown option --speed"),
        (["listen", "1", "--payload"], "--payload needs a value"),
        (["connect", "localhost", "9", "--family", "tcp"], "is not an IPv4 address"),
        (["listen", "/" + "x" * 200, "--family", "unix"], "at most 107 bytes"),
    ],
)
def test_wrong_usage_is_said(start: Start, arguments: list[str], said: str) -> None:
    code, stdout, stderr = start(*arguments).end()
    assert (code, stdout) == (1, "")
    assert said in stderr


def test_help_and_version(start: Start) -> None:
    code, stdout, _ = start("--help").end()
    assert code == 0
    assert "--payload BYTES" in stdout
    code, stdout, _ = start("--version").end()
    assert (code, stdout) == (0, "vringlab-pingpong 1.0\n")


def test_vsock_without_a_peer_is_a_clear_error(start: Start) -> None:
    # No vsock here may also mean no address family: either way one line and the exit code.
    code, stdout, stderr = start("connect", 12345, 9, "--wait", 0, "--json").end()
    assert (code, stdout) == (2, "")
    assert "cannot connect to vsock 12345:9" in stderr or "no vsock socket" in stderr


def test_the_tool_links_statically(tmp_path: Path, tool: Path) -> None:
    built = subprocess.run(
        ["make", "-C", SOURCE, f"OUT={tmp_path}", "STATIC=1"], capture_output=True, text=True
    )
    if built.returncode != 0 and ("-lc" in built.stderr or "-lm" in built.stderr):
        pytest.skip("no static C library here")
    assert built.returncode == 0, built.stderr
    data = (tmp_path / tool.name).read_bytes()
    # PT_INTERP (3) among the program headers of an ELF64 file would name a dynamic loader.
    offset, size, count = (
        struct.unpack_from("<Q", data, 32)[0],
        *struct.unpack_from("<HH", data, 54),
    )
    kinds = [struct.unpack_from("<I", data, offset + i * size)[0] for i in range(count)]
    assert kinds
    assert 3 not in kinds
