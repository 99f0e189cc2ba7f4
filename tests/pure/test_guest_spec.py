"""How a guest is made: refused before anything boots, or QEMU's command line as it will be run."""

from __future__ import annotations

import json
import re

import pytest

from vringlab.errors import UserError
from vringlab.lab import vhost_nic
from vringlab.lab.guest import GuestSpec, VhostUserNic, nic_mac, qemu_argv
from vringlab.lab.testpmd import testpmd_argv as argv_of_testpmd

SPLIT = VhostUserNic(packed=False, ring_size=256)
PACKED = VhostUserNic(packed=True, ring_size=1024)


def argv(spec: GuestSpec, host_kind: str = "emulated", cid: int = 3) -> list[str]:
    return qemu_argv(spec, release="6.12.1", host_kind=host_kind, cid=cid, qmp_port=4444)


def values(words: list[str], option: str) -> list[str]:
    return [words[i + 1] for i, word in enumerate(words) if word == option]


def test_vhost_user_without_shared_memory_is_refused_before_boot() -> None:
    # bess#846: it would boot, and no packet would ever be seen.
    with pytest.raises(UserError, match="shared guest memory") as caught:
        GuestSpec(nics=(SPLIT,), shared_memory=False)
    assert "shared_memory" in caught.value.remedy


def test_without_vhost_user_memory_need_not_be_shared() -> None:
    (memory,) = values(argv(GuestSpec(shared_memory=False)), "-object")
    assert "share=on" not in memory
    assert memory.startswith("memory-backend-ram,")


@pytest.mark.parametrize("size", [0, -256, 1, 128, 255, 257, 768, 2048])
def test_ring_sizes_that_qemu_refuses(size: int) -> None:
    with pytest.raises(UserError, match=f"ring of {size} entries") as caught:
        VhostUserNic(packed=False, ring_size=size)
    assert "256, 512 or 1024" in caught.value.remedy


def test_names_of_devices() -> None:
    assert (SPLIT.name, PACKED.name) == ("split256", "packed1024")


def test_memory_is_a_shared_memfd_of_the_guests_size() -> None:
    words = argv(GuestSpec(nics=(SPLIT,), memory_mib=2048))
    (memory,) = values(words, "-object")
    assert memory == "memory-backend-memfd,id=mem,size=2048M,share=on"
    assert values(words, "-numa") == ["node,memdev=mem"]
    assert values(words, "-m") == ["2048"]


def test_devices_come_in_order_with_their_addresses() -> None:
    words = argv(GuestSpec(nics=(SPLIT, PACKED)))
    users = [device for device in values(words, "-device") if "netdev=v" in device]
    assert [re.search(r"mac=([^,]*)", device)[1] for device in users] == [  # type: ignore[index]
        nic_mac(0),
        nic_mac(1),
    ]
    assert "packed=off,tx_queue_size=256" in users[0]
    assert "packed=on,tx_queue_size=1024" in users[1]
    # A transmit interrupt of its own needs MSI-X vectors.
    assert all("vectors=4" in device for device in users)
    sockets = [word for word in values(words, "-chardev") if word.startswith("socket,id=c")]
    assert [word.rpartition("=")[2] for word in sockets] == [
        "/run/vringlab/vhost0.sock",
        "/run/vringlab/vhost1.sock",
    ]


def test_addresses_are_unicast_local_and_distinct() -> None:
    addresses = [*(nic_mac(index) for index in range(16)), vhost_nic.MAC]
    assert len(set(addresses)) == 17
    assert all(re.fullmatch(r"52:54:00(:[0-9a-f]{2}){3}", address) for address in addresses)


def test_cid_and_monitor_port_are_those_asked_for() -> None:
    words = argv(GuestSpec(), cid=17)
    assert "vhost-vsock-pci,guest-cid=17" in values(words, "-device")
    assert values(words, "-qmp") == ["tcp:127.0.0.1:4444,server=on,wait=off"]


def test_management_is_on_vhost() -> None:
    (management,) = [word for word in values(argv(GuestSpec()), "-netdev") if "tap" in word]
    assert "vhost=on" in management


def test_with_a_device_for_benchmarks_vhost_net_is_left_to_it() -> None:
    words = argv(GuestSpec(vhost_nic=True))
    (management,) = [word for word in values(words, "-netdev") if "tap" in word]
    assert "vhost=off" in management, "else vhost_net could never be unloaded"
    # The device itself comes later, into this port.
    (port,) = [device for device in values(words, "-device") if "root-port" in device]
    assert f"id={vhost_nic.PORT}" in port
    assert not any(vhost_nic.MAC in word for word in words)
    assert not any("root-port" in device for device in values(argv(GuestSpec()), "-device"))


def test_shortcuts_of_emulation_are_not_taken_elsewhere() -> None:
    (emulated,), (nested,) = (
        values(argv(GuestSpec(kernel_args="a=1 b=2"), kind), "-append")
        for kind in ("emulated", "nested")
    )
    assert "mitigations=off" in emulated
    assert "mitigations" not in nested
    assert emulated.endswith("a=1 b=2")
    assert nested.endswith("a=1 b=2")
    assert "  " not in emulated + nested
    assert values(argv(GuestSpec(), "nested"), "-cpu") == ["host"]


def test_a_spec_can_be_recorded() -> None:
    spec = GuestSpec(nics=(SPLIT, PACKED), kernel_args="x")
    assert json.loads(json.dumps(spec.as_record()))["nics"] == [
        {"packed": False, "ring_size": 256},
        {"packed": True, "ring_size": 1024},
    ]


def test_testpmds_ports_are_the_devices_in_order() -> None:
    words = argv_of_testpmd(["/a", "/b"], main_cpu=0, polling_cpu=1)
    assert values(words, "--vdev") == [
        "net_vhost0,iface=/a,queues=1",
        "net_vhost1,iface=/b,queues=1",
    ]
    assert values(words, "-l") == ["0,1"]
    assert values(words, "--main-lcore") == ["0"]
    eal, _, application = " ".join(words).partition(" -- ")
    assert "--no-huge" in eal
    assert "--forward-mode=rxonly" in application
