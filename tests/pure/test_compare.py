"""Comparing runs and their provenance: refused with the difference named, or forced and said."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats
from tests.fakes.fake_runs import NET, SHAPES, VSOCK, as_measured, loaded, with_samples

from vringlab.analysis.frames import RunFrames
from vringlab.analysis.provenance import (
    KEYS,
    MISSING,
    describe,
    differences,
    flatten,
    key_of,
    readings,
    value_text,
)
from vringlab.errors import UserError
from vringlab.report.compare import Comparison, Pair, compare

LAB: dict[str, Any] = {
    "format": 1,
    "run": {"id": "a", "experiment": NET, "host_kind": "emulated"},
    "host": {
        "kind": "emulated",
        "cpu": {"model": "EPYC", "microcode": "0x1", "governor": "performance", "smt": "on"},
        "halt_poll_ns": 200000,
        "mitigations": {"l1tf": "Not affected", "mds": "Mitigation: x"},
        "modules": {"vhost_net": {"parameters": {"experimental_zcopytx": "0"}}},
        "load": 0.5,
    },
    "guest": {
        "cid": 3,
        "spec": {"vcpus": 2},
        "qemu_argv": [
            *("qemu", "-smp", "2", "-device", "vhost-vsock-pci,guest-cid=3"),
            *("-qmp", "tcp:127.0.0.1:4444,server=on"),
        ],
    },
    "arms": {"stock": {"build_id": "aa"}, "merged": {"build_id": "bb"}},
    "tools": {"fio": "3.39-1"},
    "seeds": {"plan": 1},
}


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    other = copy.deepcopy(LAB)
    change(other)
    return other


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFrames]:
    folder = tmp_path_factory.mktemp("runs")
    return {name: loaded(folder, name) for name in (VSOCK, NET)}


@pytest.fixture(scope="module")
def net(runs: dict[str, RunFrames]) -> RunFrames:
    return as_measured(runs[NET])


def elsewhere(run: RunFrames, **host: object) -> RunFrames:
    provenance = {**run.provenance, "host": {**run.provenance["host"], **host}}
    return replace(run, provenance=provenance, run_id="other")


# Provenance


def test_the_same_provenance_has_no_difference() -> None:
    assert differences(LAB, copy.deepcopy(LAB)) == []


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda p: p["host"]["cpu"].update(model="Xeon"), "host.cpu.model"),
        (lambda p: p["host"]["cpu"].update(microcode="0x2"), "host.cpu.microcode"),
        (lambda p: p["host"]["cpu"].update(governor="powersave"), "host.cpu.governor"),
        (lambda p: p["host"]["cpu"].update(smt="off"), "host.cpu.smt"),
        (lambda p: p["host"].update(halt_poll_ns=0), "host.halt_poll_ns"),
        (lambda p: p["host"]["mitigations"].update(mds="off"), "host.mitigations.mds"),
        (
            lambda p: p["host"]["modules"]["vhost_net"]["parameters"].update(
                experimental_zcopytx="1"
            ),
            "host.modules.vhost_net.parameters.experimental_zcopytx",
        ),
        (lambda p: p["guest"]["spec"].update(vcpus=4), "guest.spec.vcpus"),
        (lambda p: p["guest"]["qemu_argv"].append("-no-hpet"), "guest.qemu_argv"),
        (lambda p: p["arms"]["stock"].update(build_id="cc"), "arms.stock.build_id"),
        (lambda p: p["tools"].update(fio="3.40-1"), "tools.fio"),
        (lambda p: p["run"].update(host_kind="nested"), "run.host_kind"),
    ],
)
def test_what_changes_a_measurement_refuses(
    change: Callable[[dict[str, Any]], object], path: str
) -> None:
    (found,) = differences(LAB, changed(change))
    assert found.path == path
    assert found.refuses
    assert path in str(found)


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p["run"].update(id="b"),
        lambda p: p["host"].update(load=7.0),
        lambda p: p["seeds"].update(plan=2),
        lambda p: p.update(git={"commit": "x"}),
        lambda p: p["guest"].update(cid=9),
    ],
)
def test_what_does_not_change_it_is_said_and_does_not_refuse(
    change: Callable[[dict[str, Any]], object],
) -> None:
    (found,) = differences(LAB, changed(change))
    assert not found.refuses


def test_numbers_that_are_new_each_time_are_no_difference() -> None:
    def boot_again(provenance: dict[str, Any]) -> None:
        argv = provenance["guest"]["qemu_argv"]
        argv[4] = "vhost-vsock-pci,guest-cid=12"
        argv[6] = "tcp:127.0.0.1:4711,server=on"
        argv += ["-chardev", "socket,id=c0,path=/run/v0.sock"]
        argv += ["-netdev", "vhost-user,id=v0,chardev=c0"]
        argv += ["-device", "virtio-net-pci,netdev=v0,mac=52:54:00:00:00:01,packed=on"]

    assert differences(LAB, changed(boot_again)) == []


def test_a_missing_key_is_said_to_be_missing_and_is_no_failure() -> None:
    lacking = changed(lambda p: p["host"]["cpu"].pop("microcode"))
    (found,) = differences(LAB, lacking)
    assert found.missing
    assert not found.refuses
    assert MISSING in str(found)
    assert differences(LAB, lacking, missing=False) == []
    table = describe(lacking)
    row = table[table["key"] == "host.cpu.microcode"].iloc[0]
    assert row["value"] == MISSING
    assert "host.cpu.microcode" not in set(describe(lacking, missing=False)["key"])


def test_arms_that_only_one_run_has_are_not_compared() -> None:
    other = changed(lambda p: p["arms"].update(rfc={"build_id": "dd"}))
    assert differences(LAB, other) == []
    assert differences(other, LAB) == []


def test_differences_that_refuse_come_first() -> None:
    def both(provenance: dict[str, Any]) -> None:
        provenance["run"]["id"] = "b"
        provenance["tools"]["fio"] = "4"

    found = differences(LAB, changed(both))
    assert [one.refuses for one in found] == [True, False]


def test_registry_is_consistent() -> None:
    paths = [key.path for key in KEYS]
    assert len(paths) == len(set(paths))
    assert all(key.description for key in KEYS)
    for path in ("host.cpu.model", "arms.rfc-v1.build_id", "tools.qemu-system-x86"):
        assert key_of(path) is not None, path
    # A star at the end takes names with dots in them; one in the middle does not.
    assert key_of("host.offloads.52:54:00:00:00:01.tso") is not None
    assert key_of("settings.some.thing") is not None
    assert key_of("nothing.like.it") is None


def test_unknown_keys_are_kept_and_come_last() -> None:
    odd = changed(lambda p: p.update(weather={"outside": "rain"}))
    last = readings(odd)[-1]
    assert (last.path, last.value, last.key) == ("weather.outside", "rain", None)
    assert dict(flatten(odd))["weather.outside"] == "rain"
    (found,) = differences(LAB, odd)
    assert found.check == "informative"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, MISSING),
        (True, "yes"),
        (["a", 1], "a 1"),
        ([], "none"),
        ([{"packed": True}, {"packed": False}], "packed=yes; packed=no"),
        ("", "none"),
        (0, "0"),
    ],
)
def test_values_in_words(value: object, text: str) -> None:
    assert value_text(value) == text
    assert value_text(200000, "ns") == "200000 ns"


@pytest.mark.parametrize("odd", [{}, {"arms": None, "host": "x"}, {"arms": ["a"]}])
def test_a_provenance_of_another_shape_is_read_as_it_is(odd: dict[str, Any]) -> None:
    assert isinstance(differences(odd, LAB), list)
    assert len(describe(odd)) > 10


# Runs


def test_runs_of_one_place_are_compared(net: RunFrames) -> None:
    found = compare(net, elsewhere(net))
    assert not found.forced
    # Its run id differs and nothing else, so every shift is none.
    shifts = [pair.shift for pair in found.pairs if pair.arm != "stock"]
    assert shifts
    assert all(shift is not None and shift[0] == pytest.approx(1) for shift in shifts)
    assert not any(pair.differ for pair in found.pairs)
    assert "FORCED" not in found.text()


def test_another_processor_is_refused_by_name(net: RunFrames) -> None:
    here, there = elsewhere(net, cpu={"model": "EPYC"}), elsewhere(net, cpu={"model": "Xeon"})
    with pytest.raises(UserError) as caught:
        compare(here, there)
    assert "host.cpu.model" in caught.value.message
    assert "EPYC against Xeon" in caught.value.message
    assert "--force" in caught.value.remedy


def test_many_differences_are_named_up_to_a_limit(net: RunFrames) -> None:
    there = elsewhere(net, mitigations={f"bug{n}": "off" for n in range(20)})
    here = elsewhere(net, mitigations={f"bug{n}": "on" for n in range(20)})
    with pytest.raises(UserError, match="and 14 more"):
        compare(here, there)


def test_a_forced_comparison_says_so_in_every_form(net: RunFrames) -> None:
    here, there = elsewhere(net, cpu={"model": "EPYC"}), elsewhere(net, cpu={"model": "Xeon"})
    found = compare(here, there, force=True)
    assert found.forced
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(found)
    for text in (found.text(), found.markdown(), console.export_text()):
        assert "FORCED" in text
        assert "host.cpu.model" in text
    assert found.frame()["forced"].all()


def test_other_experiments_are_refused_even_when_forced(runs: dict[str, RunFrames]) -> None:
    with pytest.raises(UserError, match="different experiments"):
        compare(runs[NET], runs[VSOCK], force=True)


def test_another_base_kernel_is_refused_and_can_be_forced(net: RunFrames) -> None:
    other = replace(net, plan=replace(net.plan, base_kernel="debian:6.1"))
    with pytest.raises(UserError, match=r"debian:6\.1"):
        compare(net, other)
    found = compare(net, other, force=True)
    assert "debian:6.12 against debian:6.1" in found.text()


def test_what_one_run_did_not_record_is_said(net: RunFrames) -> None:
    found = compare(elsewhere(net, cpu={"model": "EPYC"}), net)
    assert not found.forced
    assert "host.cpu.model" in " ".join(found.warnings)


def test_a_real_shift_is_seen_and_its_interval_is_welchs(net: RunFrames) -> None:
    def faster(samples: Any) -> Any:
        mine = (samples["arm"] == "merged") & (samples["metric"] == "pps_tx")
        return samples.assign(value=samples["value"].where(~mine, 3 * samples["value"]))

    found = compare(net, elsewhere(with_samples(net, faster)))
    (pair, *_) = [p for p in found.pairs if p.arm == "merged" and p.metric == "pps_tx"]
    assert pair.shift is not None
    ratio, interval = pair.shift
    assert ratio == pytest.approx(3)
    assert interval.low < 3 < interval.high
    one = pair.first.effect if pair.first else None
    assert one is not None
    # Equal variances and degrees of freedom: Welch's are twice those of one run.
    half = stats.t.ppf(0.975, 2 * one.df) * np.sqrt(2) * one.se
    assert np.log(interval.high / ratio) == pytest.approx(half)


@pytest.mark.parametrize("shape", list(SHAPES))
def test_runs_of_every_shape_are_compared(net: RunFrames, shape: str) -> None:
    bent = with_samples(net, SHAPES[shape])
    for found in (compare(net, bent), compare(bent, net)):
        assert isinstance(found, Comparison)
        assert found.text()
        assert found.markdown()
        assert len(found.frame()) == len(found.pairs)


def test_a_run_without_samples_has_nothing_in_common(net: RunFrames) -> None:
    found = compare(net, with_samples(net, SHAPES["no samples"]))
    assert found.pairs == ()
    assert "nothing in common" in found.text()
    assert "Only A measured" in found.text()


def test_a_missing_arm_is_not_measured(net: RunFrames) -> None:
    found = compare(net, with_samples(net, SHAPES["one arm missing"]))
    assert "all invalid" not in found.text()
    assert "no pair" in found.text() or "not measured" in found.text()


def test_one_boot_gives_a_shift_without_an_interval(net: RunFrames) -> None:
    found = compare(net, with_samples(net, SHAPES["one boot"]))
    shifts = [pair.shift for pair in found.pairs if pair.shift is not None]
    assert shifts
    assert not any(interval.known for _, interval in shifts)
    assert "[unknown]" in found.text()


def test_simulated_runs_are_called_so(runs: dict[str, RunFrames]) -> None:
    found = compare(runs[NET], runs[NET])
    assert found.text().count("SIMULATED: run") == 2


def test_an_empty_pair_has_no_shift() -> None:
    pair = Pair("w", {}, "pps_tx", "merged", None, None)
    assert pair.shift is None
    assert not pair.differ
