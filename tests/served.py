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
    transfers = sender._service
    assert transfers is not None

    def is_served() -> bool:
        newer = [held for held in transfers.held.values() if held is not None and held >= version]
        return len(newer) >= at_least

    with transfers.served:
        if not transfers.served.wait_for(is_served, deadline):
            raise DeadlineError(f"{version} wasn't served in {deadline:.0f} s: {transfers.held}")


def wait_version(receiver: WeightReceiver, version: Version, deadline: float) -> None:
    """Returns when a worker's engine serves ``version`` or a newer one."""
    end = time.monotonic() + deadline
    while receiver.version is None or receiver.version < version:
        assert time.monotonic() < end, (
            f"{version} isn't held after {deadline:.0f} s: {receiver.version}"
        )
        time.sleep(0.002)
