"""uperf's profile and raw lines, on text: no uperf ran here."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.fake_lab import Answer, FakeLab, fake_lab

from vringlab.errors import InfrastructureError, UserError
from vringlab.workloads.base import Outcome, parse_params
from vringlab.workloads.uperf_vsock import UperfParams, UperfVsock, profile, throughput

VERSION = "Uperf Version 1.0.8\nSupported protocols: TCP, UDP, SSL, SCTP, VSOCK\n"
LINES = "".join(
    f"timestamp_ms:{1559581000962.5 + 1000 * second:.4f} name:{name} nr_bytes:{size} nr_ops:{ops}\n"
    for second, name, size, ops in (
        (0, "Txn1", 0, 1),
        (0, "Txn2", 0, 0),
        (1, "Txn2", 1_000_000, 62_500),
        (2, "Txn2", 2_500_000, 156_250),
        (3, "Txn3", 0, 0),
        (3, "Total", 2_500_000, 156_251),
    )
)
TEXT = f"Starting 8 threads running profile:vringlab ...   0.01 seconds\n{LINES}"


def uperf_lab(client: Answer = (TEXT, "", 0), version: str = VERSION) -> FakeLab:
    lab = fake_lab()
    for machine in (lab.guest, lab.host):
        machine.answers["^uperf -V"] = (version, "", 0 if version else 127)
        machine.answers["uperf -s"] = ("@@ 77 @@\n", "", 0)
        machine.answers["uperf -S vsock -m"] = client
        machine.answers["^kill 77"] = ("", "", 0)
    return lab


def run(lab: FakeLab, **params: object) -> Outcome:
    workload = UperfVsock()
    given_ = {"threads": 8, "payload": 16, **params}
    return workload.run(lab.lab, parse_params(workload, given_), 2.0)


def test_profile_of_fixed_and_uniform_sizes() -> None:
    root = ElementTree.fromstring(profile(UperfParams(threads=64, payload=16), 100))
    (group,) = root
    assert group.attrib == {"nthreads": "64"}
    flowops = [(part.attrib, part[0].attrib) for part in group]
    assert flowops == [
        ({"iterations": "1"}, {"type": "connect", "options": "remotehost=$h protocol=vsock"}),
        ({"duration": "100s"}, {"type": "write", "options": "count=1 size=16"}),
        ({"iterations": "1"}, {"type": "disconnect"}),
    ]
    ranged = profile(UperfParams(payload="4096-8192", sizes="uniform"), 1)
    assert "size=rand(4096,8192)" in ranged


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"sizes": "normal", "payload": "4096-8192"}, "no normal distribution: use vsock-stream"),
        ({"type": "seqpacket"}, "type"),
        ({"payload": "4096-8192"}, "fixed sizes need a number"),
    ],
)
def test_what_uperf_cannot_do_is_refused(values: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_params(UperfVsock(), values)


def test_raw_lines_of_the_writing_transaction_count() -> None:
    assert throughput(LINES) == (2_500_000 * 8 / 2, 2.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "timestamp_ms:1.0 name:Txn2 nr_bytes:1 nr_ops:1\n",
        "timestamp_ms:1.0 name:Txn2 nr_bytes:1 nr_ops:1\n" * 2,
        "timestamp_ms:1 name:Txn2 nr_bytes:9 nr_ops:1\n"
        "timestamp_ms:2 name:Txn2 nr_bytes:1 nr_ops:1\n",
    ],
    ids=["nothing", "one", "no time", "backwards"],
)
def test_raw_lines_that_give_no_throughput(text: str) -> None:
    with pytest.raises(InfrastructureError, match="give no throughput"):
        throughput(text)


@given(st.text(alphabet="timestamp_ms:0123456789. nameTxn2r_byteso\n", max_size=200))
def test_no_text_breaks_the_parser(text: str) -> None:
    with pytest.raises(InfrastructureError):
        throughput(text)


def test_a_run_on_text() -> None:
    lab = uperf_lab()
    outcome = run(lab)
    assert outcome.problems == ()
    assert [(m.name, m.value) for m in outcome.metrics] == [("throughput", 1e7)]
    (client,) = lab.guest.asked("uperf -S vsock -m")
    assert client.startswith("h=2 taskset -c 1 uperf")
    assert b'nthreads="8"' in lab.guest.files["/run/vringlab-uperf.xml"]
    assert lab.host.asked("kill 77"), "the server does not end by itself"


def test_errors_and_short_runs_are_invalid() -> None:
    lab = uperf_lab((TEXT + "\nWARNING: Errors detected during run\n", "", 1))
    assert run(lab).reason == "uperf reports errors (exit 1)"
    workload = UperfVsock()
    outcome = workload.run(uperf_lab().lab, parse_params(workload, {"payload": 16}), 100.0)
    assert outcome.reason == "uperf wrote for 2.0 of the 100 s asked for"


@pytest.mark.parametrize(
    ("version", "said"),
    [("", "is not installed"), ("Uperf Version 1.0.7\nSupported protocols: TCP\n", "no vsock")],
)
def test_a_machine_without_it(version: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        run(uperf_lab(version=version))
    assert "vsock-stream" in caught.value.remedy
