"""The vsock-stream workload on a lab that answers with a recorded run: parameters, commands,
outcomes, and what faults of the sampling do to them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.fake_lab import STILL_RUNNING, Answer, FakeLab, fake_lab

from vringlab.analysis.claims import load_claims
from vringlab.analysis.judgement import decidable
from vringlab.campaign import experiment as experiments
from vringlab.campaign.plan import make_plan
from vringlab.errors import InfrastructureError, TransientError, UserError
from vringlab.workloads import base, beside, slab
from vringlab.workloads.base import Outcome, parse_params
from vringlab.workloads.vsock_ends import HOST_CID
from vringlab.workloads.vsock_stream import LARGEST, StreamParams, VsockStream

OUTPUTS = Path(__file__).parent / "outputs"


def recorded(name: str) -> str:
    return (OUTPUTS / f"{name}.txt").read_text()


SENDER, RECEIVER, GUEST, HOST = (
    recorded(f"vsock-stream-6.12-{name}")
    for name in ("sender", "receiver", "sampled-guest", "sampled-host")
)
POINT: dict[str, object] = {"threads": 8, "payload": 16, "direction": "g2h"}
SECONDS = 2.0
SAMPLED = {
    *("cpu", "guest_cpu", "throughput_per_cpu"),
    *("slab_peak", "slab_median", "host_slab_peak", "host_slab_median"),
}


def ok(text: str = "", stderr: str = "") -> Answer:
    return text, stderr, 0


def stream_lab(
    sender: Answer | str = SENDER,
    receiver: Answer | str = RECEIVER,
    guest: str = GUEST,
    host: str = HOST,
    **options: str,
) -> FakeLab:
    lab = fake_lab(**options)  # type: ignore[arg-type]
    for machine, sampled in ((lab.guest, guest), (lab.host, host)):
        machine.answers["vringlab-stream connect"] = (
            ok(sender) if isinstance(sender, str) else sender
        )
        machine.answers["vringlab-stream listen"] = (
            ok(receiver) if isinstance(receiver, str) else receiver
        )
        machine.answers["vringlab-sample"] = ok(sampled)
        machine.answers["^kill -TERM"] = ok()
    return lab


def run(lab: FakeLab, **params: object) -> Outcome:
    # A rate so high that the wait for a baseline takes no time.
    workload = VsockStream(rate_hz=1000)
    return workload.run(lab.lab, parse_params(workload, {**POINT, **params}), SECONDS)


def metrics(outcome: Outcome) -> dict[str, float]:
    return {metric.name: metric.value for metric in outcome.metrics}


def changed(text: str, change: Callable[[dict[str, Any]], None]) -> str:
    document = json.loads(text[text.index("{") :])
    change(document)
    return json.dumps(document)


# --- parameters ----------------------------------------------------------------------------


def params(**values: object) -> StreamParams:
    found = parse_params(VsockStream(), values)
    assert isinstance(found, StreamParams)
    return found


def test_a_payload_from_the_command_line_is_a_number() -> None:
    assert params(payload="64").payload == 64
    assert params(payload="64") == params(payload=64)
    assert params(payload="4096-8192", sizes="normal").payload == "4096-8192"
    assert params(threads="4").threads == 4


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"payload": "4096-8192"}, "fixed sizes need a number of bytes"),
        ({"payload": 64, "sizes": "normal"}, "normal sizes need a range A-B"),
        ({"payload": "64", "sizes": "uniform"}, "uniform sizes need a range A-B"),
        ({"payload": 0}, "1 to 262144 bytes"),
        ({"payload": LARGEST + 1}, "1 to 262144 bytes"),
        ({"payload": True}, "a number of bytes or A-B"),
        ({"payload": -1}, "1 to 262144 bytes"),
        ({"payload": "many"}, "neither a number of bytes nor a range"),
        ({"payload": "1-2-3", "sizes": "uniform"}, "neither a number of bytes nor a range"),
        ({"payload": "8192-4096", "sizes": "normal"}, "a range goes up"),
        ({"payload": "0-16", "sizes": "uniform"}, "a range goes up"),
        ({"payload": "1-262145", "sizes": "uniform"}, "a range goes up"),
        ({"sizes": "poisson"}, "sizes"),
        ({"threads": 0}, "threads"),
        ({"threads": 65}, "threads"),
        ({"direction": "h-g-h"}, "direction"),
        ({"type": "dgram"}, "type"),
        ({"streams": 4}, "streams"),
    ],
)
def test_parameters_that_are_refused(values: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        params(**values)


@pytest.mark.parametrize(
    ("values", "spec"),
    [
        ({"payload": 16}, "16"),
        ({"payload": "1-5000", "sizes": "uniform"}, "uniform:1,5000"),
        # Six standard deviations fill the range.
        ({"payload": "4096-8192", "sizes": "normal"}, "normal:6144,683,4096,8192"),
        ({"payload": "1-2", "sizes": "normal"}, "normal:1,1,1,2"),
    ],
)
def test_sizes_as_the_tool_takes_them(values: dict[str, object], spec: str) -> None:
    assert params(**values).size_spec == spec


@given(
    st.integers(1, LARGEST - 1).flatmap(
        lambda low: st.tuples(st.just(low), st.integers(low + 1, LARGEST))
    )
)
def test_every_range_gives_sizes_within_it(ends: tuple[int, int]) -> None:
    low, high = ends
    spec = params(payload=f"{low}-{high}", sizes="normal").size_spec
    mean, sd, *limits = map(int, spec.removeprefix("normal:").split(","))
    assert limits == [low, high]
    assert low <= mean <= high
    assert 1 <= sd <= high - low


def test_warm_up_grows_with_the_threads() -> None:
    assert params(threads=1).warmup_s < 1
    assert params(threads=64).warmup_s >= 3


def test_full_buffers_have_time_to_drain_and_a_dead_guest_is_found_soon() -> None:
    # 12 s were seen for 8 threads of 16 B under emulation.
    assert params(threads=8, payload=16).drain_s > 12
    assert params(threads=64, payload="4096-8192", sizes="normal").drain_s < 1


def test_the_guest_keeps_its_caches_apart_and_has_room_for_64_threads() -> None:
    workload = VsockStream()
    few = workload.guest_options([params(threads=1), params(threads=16)])
    assert few == {"kernel_args": "slab_nomerge"}
    many = workload.guest_options([params(threads=1), params(threads=64)])
    assert many == {"kernel_args": "slab_nomerge", "memory_mib": 2048}


# --- experiments ---------------------------------------------------------------------------


def test_no_experiment_of_streams_measures_small_seqpacket_messages_in_quick() -> None:
    chosen = experiments.load("vsock-skb-merge")
    small = {"type": "seqpacket", "payload": 16}
    for profile, there in (("smoke", False), ("quick", False), ("full", True)):
        points = [point.params for point in chosen.points(profile)]
        assert any(small.items() <= point.items() for point in points) == there


def test_every_claim_of_merging_has_a_point_in_full() -> None:
    plan = make_plan(experiments.load("vsock-skb-merge"), "full", 1)
    found = {claim.id.partition("/")[2] for claim in decidable(load_claims(plan.experiment), plan)}
    # The corrected figure and the superseded one; a difference alone is no ratio, and neither is
    # what compares sk_buff with its predecessor.
    assert found == {"v2-reply.small", "v2-reply.large"} | {
        f"v2-reply-{which}.slab-peak" for which in ("slab", "corrected")
    }


def test_every_row_of_the_throughput_tables_is_measured_in_full() -> None:
    plan = make_plan(experiments.load("vsock-throughput"), "full", 1)
    claims = load_claims(plan.experiment)
    assert decidable(claims, plan) == claims


def test_a_payload_of_the_command_line_goes_where_it_fits() -> None:
    chosen = experiments.load("vsock-skb-merge")
    changed = chosen.override({"payload": ["64"]}, base.find)
    points = changed.points("quick")
    assert {point.params["payload"] for point in points} == {64}
    assert {point.params["sizes"] for point in points} == {"fixed"}


# --- commands ------------------------------------------------------------------------------


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


@pytest.mark.parametrize(("direction", "dialled"), [("g2h", str(HOST_CID)), ("h2g", "7")])
def test_the_receiver_listens_and_the_sender_dials_it(direction: str, dialled: str) -> None:
    lab = stream_lab()
    run(lab, direction=direction)
    near, far = (lab.guest, lab.host) if direction == "g2h" else (lab.host, lab.guest)
    (connect,), (listen,) = near.asked("vringlab-stream"), far.asked("vringlab-stream")
    sends, hears = shlex.split(connect), shlex.split(listen)
    assert sends[:3] == ["vringlab-stream", "connect", dialled]
    assert sends[3] == hears[hears.index("listen") + 1]
    assert option(sends, "--threads") == "8"
    assert option(sends, "--size") == "16"
    assert float(option(sends, "--duration")) == SECONDS
    for words, machine in ((sends, near), (hears, far)):
        assert option(words, "--family") == "vsock"
        assert option(words, "--type") == "stream"
        # Several threads have all vCPUs of the guest, and the tools' processor of the host.
        assert option(words, "--cpus") == ("0" if machine is lab.host else "0-1")
        assert "--json" in words
    assert re.search(r"timeout -s KILL \d+", listen)


def test_one_thread_is_pinned_off_the_interrupts() -> None:
    lab = stream_lab()
    run(lab, threads=1)
    (connect,) = lab.guest.asked("vringlab-stream")
    assert option(shlex.split(connect), "--cpus") == "1"


def test_samplers_run_on_both_machines_from_before_the_load_to_after_it() -> None:
    lab = stream_lab()
    run(lab)
    order = [
        next(
            word for word in ("vringlab-sample", "listen", "connect", "kill -TERM") if word in line
        )
        for line in lab.host.log
        if re.match(
            r"(guest|embedded): .*(vringlab-sample|listen|connect|kill -TERM)", line, re.DOTALL
        )
    ]
    assert order == [*["vringlab-sample"] * 2, "listen", "connect", *["kill -TERM"] * 2]
    for machine, text in ((lab.guest, GUEST), (lab.host, HOST)):
        (script,) = machine.asked("vringlab-sample")
        assert "--interval 0.001 " in script
        assert "/proc/stat:cpu" in script
        for cache in slab.CACHES:
            assert cache in script
        (pid,) = re.findall(r"^@@ sampling (\d+)$", text, re.MULTILINE)
        assert machine.asked("kill -TERM") == [f"kill -TERM {pid} 2>/dev/null"]
        assert all(process.closed for process in machine.processes if "listen" in process.command)


def test_two_runs_use_two_ports() -> None:
    workload, lab = VsockStream(rate_hz=1000), stream_lab()
    for _ in range(2):
        workload.run(lab.lab, parse_params(workload, POINT), SECONDS)
    first, second = (shlex.split(command)[3] for command in lab.guest.asked("connect"))
    assert first != second


# --- outcomes ------------------------------------------------------------------------------


def test_a_valid_sample_has_the_receivers_throughput_and_what_was_sampled() -> None:
    outcome = run(stream_lab())
    assert outcome.problems == ()
    found = metrics(outcome)
    assert set(found) == {"throughput", *SAMPLED}
    assert found["throughput"] == json.loads(RECEIVER[RECEIVER.index("{") :])["throughput"]
    assert found["throughput_per_cpu"] == pytest.approx(found["throughput"] / found["cpu"])
    assert 0 < found["guest_cpu"] <= 200
    assert 0 < found["cpu"] <= 400
    assert found["slab_peak"] >= found["slab_median"] > 0
    assert outcome.raw["stream-receiver.json"] == RECEIVER.encode()
    assert outcome.raw["sampled-guest.txt"] == GUEST.encode()
    sampled: Any = outcome.context["sampled"]
    assert sampled["rate_hz"] == 1000
    for machine, text in (("guest", GUEST), ("host", HOST)):
        cpu, elapsed = map(int, re.findall(r"cpu_ns (\d+) elapsed_ns (\d+)", text)[0])
        assert sampled[machine]["sampler_cpu_share"] == pytest.approx(cpu / elapsed)
        assert set(sampled[machine]["slab"]["bytes"]) == {*slab.CACHES, "total"}


def test_cost_of_the_sampler_is_warned_of_above_one_percent() -> None:
    def costing(text: str, cpu_ns: int) -> str:
        return re.sub(r"cpu_ns \d+ elapsed_ns \d+", f"cpu_ns {cpu_ns} elapsed_ns 1000", text)

    quiet = run(stream_lab(guest=costing(GUEST, 9), host=costing(HOST, 9)))
    assert quiet.warnings == ()
    loud = run(stream_lab(guest=costing(GUEST, 31), host=costing(HOST, 9)))
    assert loud.warnings == ("guest: slab: the sampler took 3.1% of a CPU, more than 1%",)


SLAB = {"slab_peak", "slab_median"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda text: re.sub(
                r"slabinfo - .*?(?=@@ links)",
                "grep: /proc/slabinfo: Permission denied\n",
                text,
                flags=re.DOTALL,
            ),
            "no slab_peak and slab_median: this is not the text of /proc/slabinfo",
        ),
        (
            lambda text: text.replace(
                "@@ links\n", "@@ links\nkmalloc-512 :0000512\nnapi_cache :0000512\n"
            ),
            "kmalloc-512 is merged with napi_cache",
        ),
        (
            lambda text: re.sub(r"(?m)^skbuff_small_head .*\n", "", text),
            "skbuff_small_head is not in /proc/slabinfo",
        ),
        (
            lambda text: re.sub(r"= /sys/kernel/slab/kmalloc-512/slabs\n.*\n", "", text),
            "kmalloc-512 is missing in some readings",
        ),
        (
            lambda text: re.sub(r"= /sys/kernel/slab/.*\n.*\n", "", text),
            "no reading of a slab cache",
        ),
    ],
    ids=["unreadable", "merged", "missing", "missing later", "none"],
)
def test_faults_of_slab_accounting_leave_throughput_and_cpu_alone(
    change: Callable[[str], str], said: str
) -> None:
    text = change(GUEST)
    assert text != GUEST
    outcome = run(stream_lab(guest=text))
    assert outcome.problems == ()
    assert set(metrics(outcome)) == {"throughput", *SAMPLED} - SLAB
    (words,) = [w for w in outcome.warnings if "slab_peak" in w]
    assert words.startswith("guest: no slab_peak and slab_median: ")
    assert said in words


@pytest.mark.parametrize(
    "text", ["", "@@ sampling 5\n@@ ready\n@@ samples\nvringlab-sample: not found\n"]
)
def test_a_machine_that_nothing_was_sampled_on(text: str) -> None:
    # A sampler that prints no word of its start is an error; one that then fails is not.
    if not text:
        with pytest.raises(InfrastructureError):
            run(stream_lab(host=text))
        return
    outcome = run(stream_lab(host=text))
    assert outcome.problems == ()
    assert set(metrics(outcome)) == {"throughput", "guest_cpu", *SLAB}
    assert any(w.startswith("host: nothing was sampled") for w in outcome.warnings)


def flat(text: str, slabs: Callable[[int], int]) -> str:
    """The readings with another number of slabs in each, the same for each cache."""
    begin = text.index("@@ samples")
    readings = text[begin:].split("\n@ ")
    for number, reading in enumerate(readings):
        count = slabs(number)
        readings[number] = re.sub(r"(/slabs\n)\d+ N0=\d+", rf"\g<1>{count} N0={count}", reading)
    return text[:begin] + "\n@ ".join(readings)


def test_slabs_that_are_not_above_the_baseline_are_no_metric_and_said() -> None:
    outcome = run(stream_lab(guest=flat(GUEST, lambda _: 50)))
    assert outcome.problems == ()
    assert set(metrics(outcome)) == {"throughput", *SAMPLED} - SLAB
    assert {w for w in outcome.warnings if "baseline" in w} == {
        f"guest: no {name}: nothing was seen over the baseline" for name in SLAB
    }
    # A median under the baseline, with a peak above it.
    last = GUEST.count("\n@ ")
    peaks = flat(GUEST, lambda number: 90 if number == last - 4 else 50 if number < 6 else 40)
    outcome = run(stream_lab(guest=peaks))
    assert "slab_peak" in metrics(outcome)
    assert "slab_median" not in metrics(outcome)
    (words,) = [w for w in outcome.warnings if "baseline" in w]
    assert re.match(r"guest: no slab_median: the caches took \d+ bytes less", words)


def test_too_few_readings_before_the_load() -> None:
    begin = GUEST.index("\n@ ")
    zero = json.loads(SENDER[SENDER.index("{") :])["zero_ns"]
    first = next(m.start() for m in re.finditer(r"\n@ (\d+)", GUEST) if int(m[1]) >= zero)
    outcome = run(stream_lab(guest=GUEST[:begin] + GUEST[first:]))
    assert outcome.problems == ()
    assert any("0 readings before the load" in w for w in outcome.warnings)
    assert "slab_peak" not in metrics(outcome)


def test_resets_make_a_sample_invalid() -> None:
    outcome = run(
        stream_lab(
            (recorded("stream-1.0-vsock-seqpacket-enobufs-connect"), "", 3),
            (recorded("stream-1.0-vsock-seqpacket-enobufs-listen"), "", 3),
        ),
        threads=4,
        type="seqpacket",
    )
    assert not outcome.valid
    assert "ENOBUFS" in outcome.reason
    assert "lost 4 connections to resets" in outcome.reason
    assert "throughput" not in metrics(outcome)


def test_threads_that_did_not_run_at_once_make_a_sample_invalid() -> None:
    def late(document: dict[str, Any]) -> None:
        document["window"]["begin_ns"] = document["window"]["end_ns"] - document["duration_ns"] // 2

    outcome = run(stream_lab(changed(SENDER, late)))
    assert "common window is 50%" in outcome.reason


def test_other_sizes_than_asked_for_make_a_sample_invalid() -> None:
    outcome = run(stream_lab(), payload=64)
    assert outcome.reason == "the tool sent fixed sizes of 16 to 16 bytes, not 64"


def test_a_thread_that_moved_makes_a_sample_invalid() -> None:
    outcome = run(stream_lab(seen="100 0-3\n101 3\n102 1\n"))
    assert outcome.reason == "thread 100 is on 0-3 instead of processor 2"
    assert metrics(outcome)["throughput"] > 0


@pytest.mark.parametrize("text", ["", SENDER[:300]], ids=["nothing", "cut off"])
def test_a_sender_without_a_report(text: str) -> None:
    with pytest.raises(InfrastructureError, match="vringlab-stream"):
        run(stream_lab((text, "killed", 137)))


@pytest.mark.parametrize(
    ("receiver", "kind"),
    [
        (("", "", STILL_RUNNING), TransientError),
        (("", "vringlab-stream: cannot listen on vsock port 20000", 2), InfrastructureError),
    ],
    ids=["silent", "ended"],
)
def test_a_receiver_that_never_listens_leaves_nothing_running(
    receiver: Answer, kind: type[InfrastructureError]
) -> None:
    lab = stream_lab(receiver=receiver)
    with pytest.raises(kind):
        run(lab)
    for machine in (lab.guest, lab.host):
        assert machine.asked("connect") == []
        assert machine.asked("kill -TERM"), "the samplers are ended"
        assert all(p.closed for p in machine.processes if "kill" not in p.command)


def test_a_sampler_that_hangs_ends_the_other() -> None:
    lab = stream_lab()
    lab.host.answers["vringlab-sample"] = ("", "", STILL_RUNNING)
    with pytest.raises(TransientError):
        run(lab)
    assert lab.guest.asked("kill -TERM")
    assert all(
        p.closed for p in (*lab.guest.processes, *lab.host.processes) if "kill" not in p.command
    )


@given(st.text(alphabet="@# =\n/0123456789slabinfo-cpu ", max_size=300))
def test_no_text_of_a_sampler_raises(text: str) -> None:
    seen = beside.seen(f"@@ samples\n{text}", cpu="cpu", window=(0, 10), load=(0, 10))
    assert all(metric.value > 0 for metric in seen.metrics)
