"""Puts dead letters back: groups that were given up after ``max_attempts`` failed attempts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..common.errors import StoreError
from .answers import read_put_back
from .ledger import Ledger
from .rules.order import Order

PER_CALL = 500
"""Groups per call of the script, which take the server under a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried:
    """The outcome of a request to put groups back."""

    returned: tuple[str, ...]
    """Groups that are admitted again."""
    refused: Mapping[str, str]
    """Name to reason of each group that isn't; the reason is a clause that follows the name."""


def retry(ledger: Ledger, group_ids: Iterable[str]) -> Retried:
    """``rejected(attempts)`` → ``admitted``, with no failures and a new attempt number.

    Each goes behind all groups that are on their way, so that none of those becomes older than it was
    leased for. If an answer doesn't come, the whole request may be repeated.

    Args:
        ledger: the run's ledger.
        group_ids: ``<pass>-<position>`` each; those that aren't dead letters are refused one by one.

    Raises:
        StoreError: the run has cut its last row, or Redis doesn't answer.
    """
    names = list(dict.fromkeys(group_ids))
    refused = {name: why for name in names if (why := _no_group(ledger, name))}
    serials = {ledger.order.serial(name): name for name in names if name not in refused}
    returned: list[str] = []
    waiting = list(serials)
    while waiting:
        chunk, waiting = waiting[:PER_CALL], waiting[PER_CALL:]
        answer = read_put_back(ledger.store.script("retry", *chunk), serials)
        if answer.back is None:
            raise StoreError(
                f"run {ledger.store.run_id} takes no more groups ({answer.over}): let it go on "
                f"with more steps or passes (`tandem start … run.steps=N`), then put them back"
            )
        returned += [serials[serial] for serial in answer.back]
    back = set(returned)
    cursor = int(ledger.store.call("hget", ledger.store.key("meta"), "cursor") or 0)
    for name in names:
        if name not in refused and name not in back:
            later = ledger.order.serial(name) >= cursor
            refused[name] = "was never leased yet" if later else _why_not(ledger.state_of(name))
    return Retried(returned=tuple(returned), refused={n: refused[n] for n in names if n in refused})


def _no_group(ledger: Ledger, name: str) -> str:
    try:
        _, position = Order.parse(name)
    except ValueError:
        return "isn't a group id: <pass>-<position>, such as 0-12"
    most = ledger.order.pass_length
    if position >= most:
        return f"isn't a group of this run: the positions of a pass go from 0 to {most - 1}"
    try:
        ledger.order.serial(name)
    except ValueError as error:
        return f"can't be: {error}"
    return ""


def _why_not(state: str) -> str:
    if state.startswith("rejected(quarantined"):
        step = state.removesuffix(")").rpartition(" ")[2]
        return (
            f"stands in row {step}, which was quarantined and used the step's number: an id is in "
            f"one row only, and its problem comes again in the next pass"
        )
    if state == "admitted":
        return "is admitted already: it waits for a worker"
    return f"is {state}: no dead letter"
