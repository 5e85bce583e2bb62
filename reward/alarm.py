"""Decides when the pool's figures are an alarm: too many texts hang, or too many graders crash."""

from __future__ import annotations

from collections.abc import Mapping

ALARM_SHARE = 0.05
"""Share of a minute's requests to graders; in a healthy run it is well under one in a hundred."""
ENOUGH = 20
"""Requests below which a share says nothing."""


def alarm(figures: Mapping[str, float], last_error: str = "", of_servers: str = "") -> str:
    """What a person should look at, in one line; empty if nothing is wrong.

    Args:
        figures: figures of :meth:`Grader.stats`.
        last_error: the last error that a user's own function raised.
        of_servers: what is wrong with judges and reward models.
    """
    problems = [of_servers] if of_servers else []
    if figures["recent"] < ENOUGH:
        return "; ".join(problems)
    if figures["hang_share"] > ALARM_SHARE:
        problems.append(
            f"{figures['hang_share']:.0%} of the last minute's requests to graders hung or used "
            f"up their memory: the policy may be learning to"
        )
    if figures["crash_share"] > ALARM_SHARE:
        last = f" (the last: {last_error})" if last_error else ""
        problems.append(
            f"{figures['crash_share']:.0%} of the last minute's requests to graders crashed, and "
            f"their samples leave the baseline{last}"
        )
    return "; ".join(problems)
