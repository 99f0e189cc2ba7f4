"""Arms of the KVM host's own module: loaded under a guest, measured over, and taken back."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

from vringlab.campaign import experiment as experiments
from vringlab.campaign.budget import Budget
from vringlab.campaign.session import HostLease, MachineSession, build_arms
from vringlab.errors import InfrastructureError
from vringlab.image.build import Image
from vringlab.kernels.module import BuiltModule
from vringlab.lab import embedded, vhost_nic
from vringlab.lab.lab import Lab
from vringlab.lab.swap import loaded_build_id, swap_host
from vringlab.workloads import base

pytestmark = pytest.mark.timeout(420)


@pytest.fixture(scope="module")
def arms(image: Image) -> dict[str, BuiltModule]:
    chosen = experiments.load("vhost-net-rx-poll")
    return build_arms(chosen, chosen.arm_names, image, lambda _: None)


def measured(lab: Lab, **params: object) -> dict[str, float]:
    tool = base.find("netperf")
    outcome = tool.run(lab, base.parse_params(tool, params), 2.0)
    # A busy machine may cut a run short; everything else must be in order.
    assert all("measured for" in problem for problem in outcome.problems), outcome.reason
    return {metric.name: metric.value for metric in outcome.metrics}


class Enough(Exception):  # noqa: N818 - not an error
    pass


def test_the_hosts_module_is_swapped_measured_over_and_restored(
    host: embedded.HostMachine, arms: dict[str, BuiltModule]
) -> None:
    def loaded() -> str:
        return loaded_build_id(host.machine, "vhost_net")

    own = loaded()
    assert own
    assert own not in {built.build_id for built in arms.values()}
    lease = HostLease(lambda: contextlib.nullcontext(host))
    # Booted on an arm first, then others under the running guest; an error ends it all.
    with (
        pytest.raises(Enough),
        MachineSession(lease, "host", arms, Budget(), "reboot", print) as session,
    ):
        _use(session, arms)
    assert loaded() == own
    assert host.machine.run("cat /sys/module/vhost_net/refcnt").stdout == "0\n"


def _use(session: MachineSession, arms: dict[str, BuiltModule]) -> None:
    session.boot("b01", {"vhost_nic": True})
    assert session.switch("2014") == arms["2014"].build_id
    lab = session.lab
    host, running = lab.host, lab.guest
    assert loaded_build_id(host.machine, "vhost_net") == arms["2014"].build_id
    for name in ("shipped", "always-polling"):
        before = running.net_worker
        swap_host(host, running, arms[name])
        assert loaded_build_id(host.machine, "vhost_net") == arms[name].build_id
        assert running.net_worker not in (None, before)
        assert lab.pinning_drift() == []
        # The device is back, and packets go over the new worker.
        found = measured(lab, direction="rr", size=64, vcpus=1)
        assert found["transactions"] > 0
        assert found["vhost_cpu"] > 0
        assert found["vhost_wakeups"] > 0
        assert running.machine.run("cat /sys/devices/system/cpu/online").stdout == "0-1\n"
    found = measured(lab, direction="guest-rx", size=16384, sessions=4)
    assert found["throughput_per_cpu"] == pytest.approx(found["throughput"] / found["cpu"])
    with pytest.raises(InfrastructureError, match="did not take"):
        swap_host(host, running, dataclasses.replace(arms["2014"], build_id="0" * 40))
    with pytest.raises(InfrastructureError, match="no vhost worker"):
        measured(lab)
    # Whoever else uses the module keeps it.
    vhost_nic.plug(host, running)
    refused = host.machine.run(["rmmod", "vhost_net"], check=False)
    assert "in use" in refused.stderr
    raise Enough
