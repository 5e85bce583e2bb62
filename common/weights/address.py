"""Which address of this host the weight channel binds; without torch, for it is looked at before a
run starts."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from ..errors import ConfigError


def local_address(interface: str, facing: str | None = None) -> str:
    """The one address of this host that the weight channel binds.

    Args:
        interface: an address or the name of a network interface. An address that is another
            host's (the setting is shared by the run) stands for the address of this host
            from which that one, or ``facing``, is reached.
        facing: host of the other side.

    Raises:
        ConfigError: it would listen everywhere, or names nothing on this host.
    """
    addresses = psutil.net_if_addrs()
    if interface in addresses:
        for family in (socket.AF_INET, socket.AF_INET6):
            for entry in addresses[interface]:
                if entry.family == family:
                    return entry.address
        raise ConfigError(f"weights.interface={interface} has no IP address on this host")
    try:
        wanted = ipaddress.ip_address(interface)
    except ValueError:
        raise ConfigError(
            f"weights.interface={interface} is neither an address nor an interface of this host "
            f"(there are: {', '.join(addresses)})"
        ) from None
    if wanted.is_unspecified:
        raise ConfigError(
            f"refused weights.interface={interface}: the weight channel has no credentials of its "
            f"own, so it binds loopback or one private address, never all of them"
        )
    mine = {entry.address for entries in addresses.values() for entry in entries}
    if interface in mine or wanted.is_loopback:
        return interface
    family = socket.AF_INET6 if wanted.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it only asks the routing table.
        try:
            probe.connect((facing or interface, 9))
        except OSError as error:
            raise ConfigError(
                f"no address of this host reaches {facing or interface}: {error}"
            ) from None
        return str(probe.getsockname()[0])
