"""Waits until the workers of a sender hold a version."""

from __future__ import annotations

import time

from tandem.common.errors import DeadlineError
from tandem.common.records import Version
from tandem.common.weights.receiver import WeightReceiver
from tandem.common.weights.sender import WeightSender


def wait_served(sender: WeightSender, version: Version, deadline: float, at_least: int = 1) -> None:
    """Returns when so many live workers hold ``version`` or a newer one.

    Raises:
        DeadlineError: not within ``deadline`` seconds; names what each of them holds.
    """
    end = time.monotonic() + deadline
    wanted = [version.term, version.step]
    while True:
        held = sender.stats()["members"]
        if sum(one is not None and one >= wanted for one in held.values()) >= at_least:
            return
        if time.monotonic() >= end:
            raise DeadlineError(f"{version} wasn't served in {deadline:.0f} s: {held}")
        time.sleep(0.0005)


def wait_version(receiver: WeightReceiver, version: Version, deadline: float) -> None:
    """Returns when a worker's engine serves ``version`` or a newer one."""
    end = time.monotonic() + deadline
    while receiver.version is None or receiver.version < version:
        assert time.monotonic() < end, (
            f"{version} isn't held after {deadline:.0f} s: {receiver.version}"
        )
        time.sleep(0.002)
