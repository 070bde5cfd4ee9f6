"""The interface at which gloo listens when ranks are on several machines."""

from __future__ import annotations

import pytest

from hetplan.runtime.launch import interfaces
from hetplan.runtime.launch.interfaces import interface_towards, interface_with, local_address
from hetplan.runtime.launch.torchrun import INTERFACE, choose_interface


def test_interfaces_of_addresses() -> None:
    assert interface_with("127.0.0.1") == "lo"
    assert interface_with("192.0.2.77") is None
    assert local_address("127.0.0.1") == "127.0.0.1"
    assert local_address("no-such-host.invalid") is None


@pytest.mark.parametrize(
    ("addresses", "interface"),
    [
        ({"desk": "10.0.0.2"}, "eth0"),
        # this machine's own name, as Debian's /etc/hosts has it
        ({"desk": "127.0.1.1", interfaces.ELSEWHERE: "10.0.0.2"}, "eth0"),
        ({"desk": "127.0.1.1", interfaces.ELSEWHERE: "127.0.0.1"}, None),
        ({}, None),
    ],
)
def test_no_other_machine_reaches_a_loopback_address(
    addresses: dict[str, str], interface: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interfaces, "local_address", addresses.get)
    monkeypatch.setattr(interfaces, "interface_with", {"10.0.0.2": "eth0"}.__getitem__)
    assert interface_towards("desk") == interface


@pytest.mark.parametrize(
    ("machines", "stated", "chosen"),
    [("1", None, None), ("2", None, "eth0"), ("2", "wlan0", "wlan0"), (None, None, None)],
)
def test_gloo_listens_where_other_machines_reach_this_one(
    machines: str | None, stated: str | None, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hetplan.runtime.launch.torchrun.interface_towards", {"desk": "eth0"}.__getitem__
    )
    variables = {"GROUP_WORLD_SIZE": machines, INTERFACE: stated, "MASTER_ADDR": "desk"}
    environment = {name: value for name, value in variables.items() if value is not None}
    monkeypatch.setattr("os.environ", environment)
    choose_interface()
    assert environment.get(INTERFACE) == chosen
