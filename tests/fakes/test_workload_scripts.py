"""The workloads' own steps on a lab that answers with recorded output: what they ask, what they
make of it."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
from tests.fakes.fake_lab import STILL_RUNNING, Answer, FakeLab, fake_lab

from vringlab.errors import InfrastructureError, TransientError
from vringlab.lab.guest import VhostUserNic, nic_mac
from vringlab.workloads import scripts
from vringlab.workloads.base import Outcome, names, parse_params
from vringlab.workloads.fio_vsock_pingpong import FioParams, FioVsockPingpong, fio_argv
from vringlab.workloads.pktgen_testpmd import PktgenParams, PktgenTestpmd, device_settings
from vringlab.workloads.vsock_ends import HIGHEST_PORT, HOST_CID, Ports, ends
from vringlab.workloads.vsock_pingpong import PingpongParams, VsockPingpong

OUTPUTS = Path(__file__).parent / "outputs"


def recorded(name: str) -> str:
    return (OUTPUTS / f"{name}.txt").read_text()


def ok(text: str = "", stderr: str = "") -> Answer:
    return text, stderr, 0


def metrics(outcome: Outcome) -> dict[str, float]:
    return {metric.name: metric.value for metric in outcome.metrics}


# --- ends ----------------------------------------------------------------------------------


def test_who_connects_to_whom_and_where_each_runs() -> None:
    lab = fake_lab(cid=9)
    connector, listener, cid = ends(lab.lab, "h-g-h")
    assert (connector.machine.name, listener.machine.name, cid) == ("embedded", "guest", 9)
    # The host's tools have processor 0; the guest's first vCPU takes the device's interrupts.
    assert (connector.cpu, listener.cpu) == (0, 1)
    connector, listener, cid = ends(lab.lab, "g-h-g")
    assert (connector.machine.name, listener.machine.name, cid) == ("guest", "embedded", HOST_CID)
    assert (connector.cpu, listener.cpu) == (1, 0)


def test_ports_are_not_used_again_at_once_and_fit_fio() -> None:
    ports = Ports()
    taken = [ports.take() for _ in range(2 * HIGHEST_PORT)]
    assert max(taken) == HIGHEST_PORT
    assert min(taken) > 1024
    assert len(set(taken[:10_000])) == 10_000


# --- fio -----------------------------------------------------------------------------------

FIO_WRITER = recorded("fio-3.39-tcp-64-writer")
FIO_READER = recorded("fio-3.39-tcp-64-reader")
assert "waiting for connection" in FIO_READER


def fio_lab(writer: Answer, reader: Answer, *, lab: FakeLab | None = None) -> FakeLab:
    made = lab or fake_lab()
    for machine in (made.host, made.guest):
        machine.answers["fio .*--rw=write"] = writer
        machine.answers["fio .*--rw=read"] = reader
    return made


def run_fio(lab: FakeLab, payload: int = 64, direction: str = "h-g-h") -> Outcome:
    params = parse_params(FioVsockPingpong(), {"payload": payload, "direction": direction})
    return FioVsockPingpong().run(lab.lab, params, 2.0)


def options(command: str) -> dict[str, str]:
    """Options of a command line by name; those without a value are empty."""
    words = shlex.split(command)
    return dict(
        word.removeprefix("--").partition("=")[::2] for word in words if word.startswith("--")
    )


def test_fio_commands_and_their_order() -> None:
    lab = fio_lab(ok(FIO_WRITER), ok(FIO_READER))
    run_fio(lab)
    (read,), (write,) = lab.guest.asked("fio"), lab.host.asked("fio")
    # The writer may not start before the reader listens.
    order = [line for line in lab.host.log if "fio" in line or line.startswith("wait")]
    assert [line.split(" ")[0] for line in order[:3]] == ["guest:", "wait_for", "embedded:"]
    reader, writer = options(read), options(write)
    assert "listen" in reader
    assert "hostname" not in reader
    assert writer["hostname"] == "7"
    assert "listen" not in writer
    assert (reader["rw"], writer["rw"]) == ("read", "write")
    for words in (reader, writer):
        assert (words["ioengine"], words["protocol"], words["pingpong"]) == ("net", "vsock", "1")
        assert words["bs"] == "64"
        assert words["output-format"] == "json+"
        assert words["percentile_list"] == "1:50:90:99:99.9"
    assert reader["port"] == writer["port"]
    assert writer["runtime"] == "2"
    assert float(reader["runtime"]) > float(writer["runtime"])
    # Each pinned, and each ended on its own machine whatever becomes of us.
    assert "taskset -c 1 fio" in read
    assert "taskset -c 0 fio" in write
    assert all(re.search(r"timeout -s KILL \d+", command) for command in (read, write))


def test_fio_the_other_way_round() -> None:
    lab = fio_lab(ok(FIO_WRITER), ok(FIO_READER))
    run_fio(lab, direction="g-h-g")
    (write,), (read,) = lab.guest.asked("fio"), lab.host.asked("fio")
    assert options(write)["hostname"] == str(HOST_CID)
    assert "taskset -c 1 fio" in write
    assert "taskset -c 0 fio" in read


def test_a_valid_fio_sample_has_its_figures_and_all_that_was_printed() -> None:
    outcome = run_fio(fio_lab(ok(FIO_WRITER, "a warning\n"), ok(FIO_READER)))
    assert outcome.problems == ()
    written = json.loads(FIO_WRITER[FIO_WRITER.index("{") :])["jobs"][0]["write"]
    assert metrics(outcome)["rtt_mean"] == written["clat_ns"]["mean"]
    assert metrics(outcome)["round_trips"] == written["iops"]
    assert outcome.raw["fio-writer.txt"] == FIO_WRITER.encode()
    assert outcome.raw["fio-reader.txt"] == FIO_READER.encode()
    assert outcome.raw["fio-writer.stderr"] == b"a warning\n"
    assert outcome.context["cpus"] == {"connector": 0, "listener": 1}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", outcome.started)


def test_two_fio_runs_use_two_ports() -> None:
    workload, lab = FioVsockPingpong(), fio_lab(ok(FIO_WRITER), ok(FIO_READER))
    for _ in range(2):
        workload.run(lab.lab, FioParams(), 2.0)
    first, second = (options(command)["port"] for command in lab.host.asked("fio"))
    assert first != second


@pytest.mark.parametrize("died", ["reader", "writer"])
def test_short_reads_make_a_sample_invalid_also_when_an_end_dies_of_them(died: str) -> None:
    # fio 3.39 with messages larger than a receive buffer: the end that outlasts the other dies
    # of SIGPIPE, which SSH does not tell: -1.
    if died == "reader":
        writer = ok(recorded("fio-3.39-tcp-65536-short-writer"))
        reader: Answer = (recorded("fio-3.39-tcp-65536-short-reader"), "", -1)
        payload = 65536
    else:
        writer = ("", "", -1)
        reader = ok("fio: waiting for connection\n" + recorded("fio-3.39-tcp-262144-short-reader"))
        payload = 262144
    outcome = run_fio(fio_lab(writer, reader), payload)
    assert not outcome.valid
    assert "short-read artefact" in outcome.reason
    assert f"the {died} printed no result" in outcome.reason


def test_nobody_to_connect_to() -> None:
    refused = (recorded("fio-3.39-tcp-refused"), "", 1)
    outcome = run_fio(fio_lab(refused, ok("fio: waiting for connection\n")))
    assert not outcome.valid
    assert "completed no I/O" in outcome.reason


def test_fio_json_that_is_cut_off() -> None:
    with pytest.raises(InfrastructureError, match="cut off or damaged"):
        run_fio(fio_lab(ok(FIO_WRITER[:3000]), ok(FIO_READER)))


def test_fio_that_prints_nothing() -> None:
    with pytest.raises(InfrastructureError, match="no JSON"):
        run_fio(fio_lab(("", "out of memory", 1), ok(FIO_READER)))


@pytest.mark.parametrize("end", ["reader", "writer"])
def test_fio_that_is_not_there(end: str) -> None:
    missing: Answer = ("waiting for connection", "taskset: failed to execute fio", 127)
    lab = fio_lab(ok(FIO_WRITER), missing) if end == "reader" else fio_lab(missing, ok(FIO_READER))
    with pytest.raises(InfrastructureError, match=f"fio is not there for the {end}") as caught:
        run_fio(lab)
    assert "taskset: failed" in caught.value.stderr


@pytest.mark.parametrize(
    ("reader", "kind"),
    [
        (("", "", STILL_RUNNING), TransientError),
        (("", "fio: bind: Address already in use", 1), InfrastructureError),
    ],
    ids=["silent", "ended"],
)
def test_a_reader_that_never_listens(reader: Answer, kind: type[InfrastructureError]) -> None:
    lab = fio_lab(ok(FIO_WRITER), reader)
    with pytest.raises(kind):
        run_fio(lab)
    assert lab.host.asked("fio") == []
    assert all(process.closed for process in lab.guest.processes)


def test_a_thread_that_moved_makes_a_fio_sample_invalid() -> None:
    lab = fio_lab(ok(FIO_WRITER), ok(FIO_READER), lab=fake_lab(seen="100 0-3\n101 3\n102 1\n"))
    outcome = run_fio(lab)
    assert not outcome.valid
    assert outcome.reason == "thread 100 is on 0-3 instead of processor 2"
    assert metrics(outcome)["rtt_mean"] > 0


def test_a_run_cut_short_is_invalid() -> None:
    lab = fio_lab(ok(FIO_WRITER), ok(FIO_READER))
    outcome = FioVsockPingpong().run(lab.lab, FioParams(), 50.0)
    assert "of the 50 s asked for" in outcome.reason


def test_fio_argv_of_both_ends() -> None:
    words = fio_argv("writer", port=1, payload=2, runtime_s=0.5, cid=3)
    assert "--runtime=0.5" in words
    assert "--hostname=3" in words
    assert "--listen" in fio_argv("reader", port=1, payload=2, runtime_s=1)


# --- our own ping-pong ---------------------------------------------------------------------

CONNECT = recorded("pingpong-1.0-tcp-connect")
LISTEN = recorded("pingpong-1.0-tcp-listen")
PINGPONG_S = json.loads(CONNECT)["elapsed_ns"] / 1e9
assert LISTEN.startswith("listening ")


def pingpong_lab(connect: Answer, listen: Answer, *, lab: FakeLab | None = None) -> FakeLab:
    made = lab or fake_lab()
    for machine in (made.host, made.guest):
        machine.answers["vringlab-pingpong connect"] = connect
        machine.answers["vringlab-pingpong listen"] = listen
    return made


def run_pingpong(lab: FakeLab, **params: object) -> Outcome:
    workload = VsockPingpong()
    return workload.run(lab.lab, parse_params(workload, params), PINGPONG_S)


def changed(text: str, **values: object) -> str:
    """A report with some of its values replaced; its first key must stay the first."""
    begin = text.index("{")
    return text[:begin] + json.dumps({**json.loads(text[begin:]), **values})


@pytest.mark.parametrize(("direction", "dialled"), [("h-g-h", "7"), ("g-h-g", str(HOST_CID))])
def test_pingpong_commands_and_their_order(direction: str, dialled: str) -> None:
    lab = pingpong_lab(ok(CONNECT), ok(LISTEN))
    run_pingpong(lab, payload=64, direction=direction)
    near, far = (lab.host, lab.guest) if direction == "h-g-h" else (lab.guest, lab.host)
    (connect,), (listen,) = near.asked("pingpong"), far.asked("pingpong")
    words, heard = shlex.split(connect), shlex.split(listen)
    assert words[:3] == ["vringlab-pingpong", "connect", dialled]
    port = words[3]
    assert heard[heard.index("listen") + 1] == port
    for each, machine in ((words, near), (heard, far)):
        assert each[each.index("--family") + 1] == "vsock"
        assert each[each.index("--cpu") + 1] == ("0" if machine is lab.host else "1")
        assert "--json" in each
        assert "--timeout" in each
    assert words[words.index("--payload") + 1] == "64"
    assert float(words[words.index("--duration") + 1]) == pytest.approx(PINGPONG_S, rel=1e-4)
    order = [line for line in lab.host.log if "pingpong" in line or line.startswith("wait_for")]
    assert ["listen" in order[0], order[1][:8], "connect" in order[2]] == [True, "wait_for", True]


def test_a_valid_pingpong_sample() -> None:
    outcome = run_pingpong(pingpong_lab(ok(CONNECT), ok(LISTEN, "a warning\n")))
    assert outcome.problems == ()
    assert metrics(outcome)["rtt_mean"] == json.loads(CONNECT)["latency_ns"]["mean"]
    assert outcome.raw["pingpong-connector.json"] == CONNECT.encode()
    assert outcome.raw["pingpong-listener.stderr"] == b"a warning\n"


def test_two_messages_in_flight_make_it_invalid() -> None:
    listen = changed(LISTEN, sequence_errors=3, first_sequence_error="a token of 5, not 4")
    outcome = run_pingpong(pingpong_lab(ok(CONNECT), (listen, "", 1)))
    assert "3 sequence errors" in outcome.reason


def test_an_end_that_was_lost_makes_it_invalid() -> None:
    connect = changed(CONNECT, error="the peer closed the connection", ended="peer closed")
    outcome = run_pingpong(pingpong_lab((connect, "", 3), ok(LISTEN)))
    assert "stopped early: the peer closed" in outcome.reason


def test_another_payload_than_asked_for_makes_it_invalid() -> None:
    outcome = run_pingpong(pingpong_lab(ok(CONNECT), ok(LISTEN)), payload=512)
    assert "used 64 bytes, not 512" in outcome.reason


@pytest.mark.parametrize("text", ["", CONNECT[:200]], ids=["nothing", "cut off"])
def test_a_connector_without_a_report(text: str) -> None:
    with pytest.raises(InfrastructureError, match="vringlab-pingpong"):
        run_pingpong(pingpong_lab((text, "killed", 137), ok(LISTEN)))


def test_a_listener_that_cannot_bind() -> None:
    lab = pingpong_lab(ok(CONNECT), ("", "vringlab-pingpong: bind: Address already in use", 2))
    with pytest.raises(InfrastructureError):
        run_pingpong(lab)
    assert lab.host.asked("pingpong") == []
    assert all(process.closed for process in lab.guest.processes)


def test_a_thread_that_moved_makes_a_pingpong_sample_invalid() -> None:
    lab = pingpong_lab(ok(CONNECT), ok(LISTEN), lab=fake_lab(seen="100 2\n101 3\n"))
    assert run_pingpong(lab).reason == "thread 102 is on gone instead of processor 1"


def test_payloads_smaller_than_the_tools_header_are_refused() -> None:
    with pytest.raises(Exception, match="payload"):
        parse_params(VsockPingpong(), {"payload": 15})
    assert PingpongParams(payload=16).payload == 16


# --- pktgen into testpmd -------------------------------------------------------------------

BEFORE, AFTER = (recorded(f"interrupts-6.12-{when}") for when in ("before", "after"))
KICKS_BEFORE, KICKS_AFTER = (recorded(f"ethtool-6.12-{when}") for when in ("before", "after"))
RESULT = recorded("pktgen-6.12-result")
SENT = 464956
SECONDS = 8.0
NIC = VhostUserNic(packed=False, ring_size=256)
ANSWER = "Result: OK: done\n"


def features(packed: bool) -> str:
    """A virtio device's feature bits as sysfs prints them, bit 0 first."""
    return "".join("1" if bit in (0, 32, *([34] if packed else [])) else "0" for bit in range(64))


def report(port: int, packets: int, rate: int) -> str:
    return (
        f"  ######################## NIC statistics for port {port}  ########################\n"
        f"  RX-packets: {packets} RX-missed: 0          RX-bytes:  0\n"
        "  RX-errors: 0\n  RX-nombuf:  0\n"
        "  TX-packets: 0          TX-errors: 0          TX-bytes:  0\n\n"
        "  Throughput (since last show)\n"
        f"  Rx-pps: {rate:12}          Rx-bps:            0\n"
        "  Tx-pps:            0          Tx-bps:            0\n"
        "  ############################################################################\n\n"
    )


def reports(*totals: int, ports: int = 1, port: int = 0) -> str:
    """testpmd's log: one report for each total of `port`, the other ports standing still."""
    text, last = "", totals[0]
    for total in totals:
        text += "\x1b[2J\x1b[1;1H\nPort statistics ====================================\n"
        for each in range(ports):
            moved = each == port
            text += report(each, total if moved else 0, total - last if moved else 0)
        last = total
    return text


@dataclasses.dataclass
class Pktgen:
    """What the machines print in a run of pktgen; each part can be replaced."""

    packed: bool = False
    log: str = dataclasses.field(
        default_factory=lambda: reports(
            1000, 1000, *(1000 + SENT * step // 8 for step in range(1, 9))
        )
    )
    offset: int = dataclasses.field(default_factory=lambda: 2 * len(reports(1000)))
    result: str = RESULT
    before: str = BEFORE
    after: str = AFTER
    kicks_after: str = KICKS_AFTER
    refuse: str = ""
    setup: Answer | None = None
    timed: Answer | None = None

    def lab(self, nics: tuple[VhostUserNic, ...] = (NIC,), **options: str) -> FakeLab:
        lab = fake_lab(nics=nics, **options)  # type: ignore[arg-type]
        writes = device_settings(PktgenParams())
        answers = "".join(
            f"@@ {write}\n{'Result: Error' if write == self.refuse else ANSWER}" for write in writes
        )
        setup = (
            f"@@ device\neth7 virtio0 {features(self.packed)}\n@@ interrupts\n{BEFORE}"
            f"@@ add_device\n{recorded('pktgen-6.12-thread')}{answers}"
        )
        timed = (
            f"@@ before\n{self.before}@@ before-kicks\n{KICKS_BEFORE}"
            f"@@ after\n{self.after}@@ after-kicks\n{self.kicks_after}@@ result\n{self.result}"
        )
        lab.guest.answers["echo start > /proc/net/pktgen/pgctrl"] = self.timed or ok(timed)
        lab.guest.answers["add_device"] = self.setup or ok(setup)
        lab.host.answers[r"^stat "] = ok(f"{self.offset}\n")

        def tail(command: str) -> Answer:
            (start,) = re.findall(r"tail -c \+(\d+)", command)
            return ok(self.log[int(start) - 1 :])

        lab.host.answers["tail -c"] = tail
        return lab


def run_pktgen(lab: FakeLab, **params: object) -> Outcome:
    workload = PktgenTestpmd()
    return workload.run(lab.lab, parse_params(workload, params), SECONDS)


def test_a_valid_pktgen_sample() -> None:
    outcome = run_pktgen(Pktgen().lab())
    assert outcome.problems == ()
    found = metrics(outcome)
    assert found["pps_tx"] == 57146
    assert found["tx_interrupts"] == pytest.approx((686 - 3) / 8.136187)
    assert found["kicks"] == pytest.approx((468 - 3) / 8.136187)
    assert found["pps_rx"] == pytest.approx(SENT / 8, rel=0.01)
    assert outcome.context["device"] == "eth7"
    assert outcome.context["irq"] == "26"
    assert outcome.context["ring_packed"] is False
    assert {"pktgen.txt", "pktgen-setup.txt", "testpmd.txt"} <= set(outcome.raw)


@pytest.mark.parametrize(("irq", "cpu"), [("same", 0), ("other", 1)])
def test_pktgen_commands(irq: str, cpu: int) -> None:
    lab = Pktgen().lab()
    run_pktgen(lab, irq=irq)
    (setup,) = lab.guest.asked("add_device")
    (timed,) = lab.guest.asked("echo start")
    # By its address: names change whenever the driver is swapped.
    assert nic_mac(0) in setup
    assert "eth7" not in setup
    for setting in ("count 0", "burst 256", "pkt_size 60", "clone_skb 0", "flag QUEUE_MAP_CPU"):
        assert f"'{setting}'" in setup
    assert f"echo {cpu} > /proc/irq/26/smp_affinity_list" in timed
    assert "eth7@0" in timed
    assert "sleep 8\n" in timed
    # Stopped before the counters are read, and started after.
    places = [timed.index(word) for word in ("@@ before", "echo start", "echo stop", "@@ after")]
    assert places == sorted(places)


def test_pktgen_that_sends_while_nobody_receives() -> None:
    # Pktgen-DPDK#77: link up, transmit counts, receive stays 0.
    outcome = run_pktgen(Pktgen(log=reports(*[1000] * 10)).lab())
    assert not outcome.valid
    assert "path not exercised" in outcome.reason
    assert metrics(outcome)["pps_tx"] == 57146


def test_packets_of_the_run_before_do_not_count() -> None:
    earlier = reports(0, 400_000, 900_000, 900_000)
    log = earlier + reports(900_000, 900_000)
    outcome = run_pktgen(Pktgen(log=log, offset=len(earlier)).lab())
    assert "path not exercised" in outcome.reason


def test_pktgen_that_sends_nothing() -> None:
    result = re.sub(r"464956 \(60byte", "0 (60byte", RESULT)
    result = result.replace("57146pps 27Mb/sec (27430080bps)", "0pps 0Mb/sec (0bps)")
    outcome = run_pktgen(Pktgen(result=result).lab())
    assert "0 throughput" in outcome.reason


def test_half_of_the_packets_lost() -> None:
    log = reports(1000, 1000, *(1000 + SENT * step // 16 for step in range(1, 9)))
    outcome = run_pktgen(Pktgen(log=log).lab())
    assert "further apart than" in outcome.reason


def test_errors_that_pktgen_counted() -> None:
    outcome = run_pktgen(Pktgen(result=RESULT.replace("errors: 0", "errors: 12")).lab())
    assert "pktgen counted 12 errors" in outcome.reason


def test_interrupts_on_the_wrong_processor() -> None:
    assert run_pktgen(Pktgen().lab(), irq="same").valid
    outcome = run_pktgen(Pktgen().lab(), irq="other")
    assert "wrong vCPU" in outcome.reason


@pytest.mark.parametrize(("asked", "packed"), [("split", True), ("packed", False)])
def test_another_ring_than_asked_for(asked: str, packed: bool) -> None:
    nic = VhostUserNic(packed=asked == "packed", ring_size=256)
    outcome = run_pktgen(Pktgen(packed=packed).lab((nic,)), ring=asked)
    kind = "packed" if packed else "split"
    assert outcome.reason == f"the device has a {kind} ring, {asked} was asked"


def test_the_device_of_the_point_is_measured_and_its_port_read() -> None:
    packed = VhostUserNic(packed=True, ring_size=1024)
    totals = (0, 0, *(SENT * step // 8 for step in range(1, 9)))
    run = Pktgen(
        packed=True,
        log=reports(*totals, ports=2, port=1),
        offset=2 * len(reports(0, ports=2)),
    )
    lab = run.lab((NIC, packed))
    outcome = run_pktgen(lab, ring="packed", ring_size=1024)
    assert outcome.problems == ()
    (setup,) = lab.guest.asked("add_device")
    assert nic_mac(1) in setup
    # Read as the other port's, nothing would have arrived.
    lab = run.lab((packed, NIC))
    assert "path not exercised" in run_pktgen(lab, ring="packed", ring_size=1024).reason


def test_a_thread_that_moved_makes_a_pktgen_sample_invalid() -> None:
    outcome = run_pktgen(Pktgen().lab(seen="100 2\n101 3\n102 0\n"))
    assert outcome.reason == "thread 102 is on 0 instead of processor 1"


def test_pktgen_cut_short() -> None:
    outcome = PktgenTestpmd().run(Pktgen().lab().lab, PktgenParams(), 50.0)
    assert "of the 50 s asked for" in outcome.reason


def test_a_setting_that_pktgen_refuses() -> None:
    with pytest.raises(InfrastructureError, match="did not take 'burst 256'"):
        run_pktgen(Pktgen(refuse="burst 256").lab())


@pytest.mark.parametrize(
    "setup", [("", "", 8), ("@@ device\neth7 virtio0 1\n@@ interrupts\n", "no pktgen", 2)]
)
def test_a_device_that_is_not_there(setup: Answer) -> None:
    lab = Pktgen(setup=setup).lab()
    with pytest.raises(InfrastructureError, match=nic_mac(0)) as caught:
        run_pktgen(lab)
    assert "pktgen" in caught.value.remedy
    assert lab.guest.asked("echo start") == []


def test_a_testpmd_without_a_log() -> None:
    lab = Pktgen().lab()
    lab.host.answers[r"^stat "] = ("", "stat: cannot statx", 1)
    with pytest.raises(InfrastructureError, match="testpmd"):
        run_pktgen(lab)


def test_a_testpmd_that_stopped_printing() -> None:
    lab = Pktgen().lab()
    lab.host.answers["tail -c"] = ("", "Killed\n", 137)
    with pytest.raises(TransientError, match="testpmd stopped printing"):
        run_pktgen(lab)


def test_a_testpmd_that_does_not_know_the_port() -> None:
    with pytest.raises(InfrastructureError, match="nothing of port 1"):
        run_pktgen(Pktgen().lab((NIC, VhostUserNic(packed=False, ring_size=512))), ring_size=512)


@pytest.mark.parametrize("status", [7, 1])
def test_an_interrupt_that_cannot_be_moved(status: int) -> None:
    with pytest.raises(InfrastructureError):
        run_pktgen(Pktgen(timed=("", "I/O error", status)).lab())


@pytest.mark.parametrize(("after", "says"), [("", "@@ after"), ("@@ after\n", "no after-kicks")])
def test_a_timed_script_that_printed_only_half(after: str, says: str) -> None:
    half = f"@@ before\n{BEFORE}@@ before-kicks\n{KICKS_BEFORE}{after}"
    with pytest.raises(InfrastructureError, match=says):
        run_pktgen(Pktgen(timed=ok(half)).lab())


def test_a_driver_without_statistics() -> None:
    with pytest.raises(InfrastructureError, match="ethtool"):
        run_pktgen(Pktgen(kicks_after="no stats available\n").lab())


def test_sections_are_read_by_name() -> None:
    text = "noise\n@@ one\na\n@@ two words\nb\nc\n@@ empty\n"
    assert scripts.sections(text) == {"one": "a\n", "two words": "b\nc\n", "empty": ""}
    assert scripts.sections("@@ first\nx")["first"] == "x"
    assert scripts.sections("") == {}


def test_one_device_for_each_ring_of_a_boot() -> None:
    workload = PktgenTestpmd()
    points = [
        parse_params(workload, {"ring": ring, "irq": irq, "ring_size": size})
        for ring in ("packed", "split")
        for irq in ("same", "other")
        for size in (256, 1024)
    ]
    nics = workload.guest_options(points)["nics"]
    assert nics == [
        VhostUserNic(packed=packed, ring_size=size)
        for packed in (False, True)
        for size in (256, 1024)
    ]


# --- all -----------------------------------------------------------------------------------


def test_the_three_workloads_are_found() -> None:
    assert {"fio-vsock-pingpong", "vsock-pingpong", "pktgen-testpmd"} <= set(names())
