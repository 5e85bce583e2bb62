"""Hosts as network namespaces: own addresses, a switch between them, no loopback in common.

A cable is pulled at the switch, so that the host itself sees its link up and its packets vanish, as when a switch or
a router fails. Namespaces outlive the process that makes them: :meth:`Network.close` takes them away.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

SUBNET = "10.77.0"


@dataclass(frozen=True)
class Host:
    """One namespace."""

    name: str
    address: str

    @property
    def inside(self) -> list[str]:
        """The words before a command that runs there; they become it, so that its process id is theirs."""
        return ["ip", "netns", "exec", self.name]


class Network:
    """So many hosts, and a switch.

    Skips the test where this machine has no namespaces.
    """

    def __init__(self, count: int) -> None:
        tag = f"{os.getpid():x}{secrets.token_hex(1)}"
        self._switch = f"tandem-{tag}-net"
        self._port = {}
        self.hosts = [Host(f"tandem-{tag}-{i}", f"{SUBNET}.{i + 1}") for i in range(count)]
        if shutil.which("ip") is None:
            pytest.skip("network namespaces need the program ip: apt-get install iproute2")
        made = subprocess.run(
            ["ip", "netns", "add", self._switch], capture_output=True, text=True, check=False
        )
        if made.returncode:
            pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
        try:
            self._ip(self._switch, "link", "add", "switch", "type", "bridge")
            self._ip(self._switch, "link", "set", "switch", "up")
            for index, host in enumerate(self.hosts):
                self._connect(host, index)
        except BaseException:
            self.close()
            raise

    def _connect(self, host: Host, index: int) -> None:
        port = f"port{index}"
        subprocess.run(["ip", "netns", "add", host.name], check=True)
        # Names differ between hosts, as they do on real ones.
        cable = ("link", "add", port, "type", "veth", "peer", "name", f"net{index}")
        self._ip(self._switch, *cable, "netns", host.name)
        self._ip(self._switch, "link", "set", port, "master", "switch", "up")
        self._ip(host.name, "link", "set", "lo", "up")
        self._ip(host.name, "addr", "add", f"{host.address}/24", "dev", f"net{index}")
        self._ip(host.name, "link", "set", f"net{index}", "up")
        self._port[host.name] = port

    def cut(self, host: Host) -> None:
        """Pulls a host's cable out of the switch."""
        self._ip(self._switch, "link", "set", self._port[host.name], "nomaster")

    def mend(self, host: Host) -> None:
        """Puts it back."""
        self._ip(self._switch, "link", "set", self._port[host.name], "master", "switch")

    def close(self) -> None:
        """Takes the namespaces away; no process may be left in them."""
        for name in [host.name for host in self.hosts] + [self._switch]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def _ip(self, place: str, *words: str) -> None:
        subprocess.run(["ip", "-n", place, *words], check=True)


def listening(pid: int) -> set[str]:
    """Addresses on which anything listens in the network namespace of a process, from ``/proc``."""
    found = set()
    for name, size in (("tcp", 8), ("tcp6", 32)):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":  # TCP_LISTEN
                found.add(_address(words[1].partition(":")[0][:size]))
    return found


def _address(text: str) -> str:
    """An address as the kernel writes it: hexadecimal words of four bytes, each of this machine's own order."""
    import ipaddress
    import sys

    raw = b"".join(
        int(text[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(text), 8)
    )
    return str(ipaddress.ip_address(raw))
