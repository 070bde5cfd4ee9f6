"""The network interface by which the ranks of several machines reach each other.

gloo listens at the address that this machine's own name has. On many machines this is a loopback
address (Debian writes `127.0.1.1 NAME` to /etc/hosts), where no other machine reaches it. NCCL
looks for an interface by itself.
"""

import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress

GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
DISCARD_PORT = 9  # a port to choose a route for; nothing is sent
# An address of the documentation: packets to it take the default route.
ELSEWHERE = "192.0.2.1"


def interface_towards(address: str) -> str | None:
    """The name of the interface that other machines can reach, as seen from one of them; None where
    none is found.

    address: name or IP address of the machine of rank 0. It may be this machine, or have a loopback
    address here: then the interface of the default route counts.
    """
    for towards in (address, ELSEWHERE):
        local = local_address(towards)
        if local is not None and not ipaddress.ip_address(local).is_loopback:
            return interface_with(local)
    return None


def local_address(towards: str) -> str | None:
    """This machine's IPv4 address on the way to another one; None where no route leads there."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, DISCARD_PORT))  # a datagram socket sends nothing here
        return str(probe.getsockname()[0])
    return None


def interface_with(address: str) -> str | None:
    """The name of this machine's interface with an IPv4 address; None without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(any_socket.fileno(), GET_ADDRESS, request)
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
