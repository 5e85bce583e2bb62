"""What Redis holds and its scripts answer as JSON, checked before anybody relies on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..common.errors import StoreError
from ..common.plain import damaged, fits, read_object

WAY_OUT = "do all processes run one version of Tandem, and does nobody else write to this Redis?"


def checked(what: str, content: Mapping[str, Any], **kinds: type) -> dict[str, Any]:
    """These fields of an object, each of its type.

    Raises:
        StoreError: one is missing or of another type.
    """
    for name, kind in kinds.items():
        if name not in content or not fits(content[name], kind):
            value = repr(content.get(name))[:80]
            why = f"has {name}={value}" if name in content else f"lacks {name}"
            raise damaged(what, f"{why}, not a value of type {kind.__name__}", StoreError, WAY_OUT)
    return {name: content[name] for name in kinds}


def lease_answer(raw: bytes) -> dict[str, Any]:
    """Of ``lease``: ``leases`` as (serial, attempt, deadline ms), and the run's state."""
    what = "the answer to a lease"
    content = read_object(raw, what, StoreError, WAY_OUT)
    found = checked(what, content, wait=str, state=str, journalled=int, now=int, lease_ms=int)
    # An empty list is an empty object to Lua's encoder.
    leases = content.get("leases") or []
    if not isinstance(leases, list) or not all(map(_is_lease, leases)):
        raise damaged(what, f"has leases={str(leases)[:80]!r}", StoreError, WAY_OUT)
    return {**found, "leases": leases}


def _is_lease(entry: Any) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 3
        and all(type(number) is int and number >= 0 for number in entry)
    )


def row_answer(plain: Any) -> dict[str, Any]:
    """A row, as Redis and the journal hold it: step, short, and its groups' entries."""
    if not isinstance(plain, Mapping):
        raise damaged("a row of the ledger", "isn't an object", StoreError, WAY_OUT)
    what = f"row {str(plain.get('step'))[:20]} of the ledger"
    row = checked(what, plain, step=int, short=bool, groups=list)
    if row["step"] < 1:
        raise damaged(what, "has no step from 1", StoreError, WAY_OUT)
    for entry in row["groups"]:
        if not isinstance(entry, Mapping):
            raise damaged(what, f"has the entry {str(entry)[:80]!r}", StoreError, WAY_OUT)
        found = checked(what, entry, id=str, attempt=int, digest=str, bytes=int, traces=list)
        if (
            found["attempt"] < 0
            or found["bytes"] < 0
            or not all(isinstance(name, str) for name in found["traces"])
            or not _are_places(entry.get("replaced", []))
        ):
            raise damaged(what, f"has the entry {str(found)[:200]}", StoreError, WAY_OUT)
    return row


def _are_places(replaced: Any) -> bool:
    return isinstance(replaced, list) and all(type(one) is int and one >= 0 for one in replaced)


def settings_from(stored: Mapping[bytes, bytes], read: Callable[[Mapping[str, str]], Any]) -> Any:
    """What ``read`` makes of the fields of ``meta``."""
    try:
        return read({name.decode(): value.decode() for name, value in stored.items()})
    except KeyError as error:
        why = f"lacks the setting {error}"
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        why = f"has a setting that can't be read: {str(error)[:120]}"
    raise damaged("the ledger in Redis", why, StoreError, WAY_OUT)


def text(raw: bytes, what: str) -> str:
    """UTF-8 text."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise damaged(what, f"isn't UTF-8: {error}", StoreError, WAY_OUT) from None
