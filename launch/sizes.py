"""Bytes as a person reads them."""

from __future__ import annotations


def human(count: float) -> str:
    """Bytes for a person.

    >>> human(3 << 29)
    '1.5 GB'
    """
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.1f} TB"
