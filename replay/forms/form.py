"""A form of data: which columns it has, and how a row with them is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .row import Content


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One form. A row has it if it has all columns of one of the alternatives."""

    name: str
    """Name in ``data.train.N.form``."""
    about: str
    """Whose data have this form, in a few words."""
    columns: tuple[tuple[str, ...], ...]
    """Alternatives of required columns."""
    also: tuple[str, ...] = ()
    """Columns that it reads if they are there."""
    read: Callable[[Mapping[str, Any]], Content]
    """Reads one row; raises :class:`~.row.RowError` if it can't be used."""
    read_whole: Callable[[Mapping[str, Any]], Content] | None = None
    """The same such that all answers of a conversation are learned from; None = the form has one response a row."""
    write: Callable[[Content], dict[str, Any]] | None = None
    """Makes a row that reads as this content; raises :class:`~.row.RowError` if the form can't hold it."""
    of_extra: tuple[str, ...] | None = ()
    """Columns that :attr:`write` takes from a row's other columns; None = it makes no columns of these."""
    claims: Callable[[Mapping[str, Any]], bool] | None = None
    """Whether a row with these columns has this form, by its values; None = always. One such row among the
    first of a file is enough."""
    reads: Callable[[Collection[str]], list[str]] | None = None
    """Which of a file's columns have to be read; None = all."""

    def match(self, row: Mapping[str, Any]) -> tuple[int, bool]:
        """How well a row fits: how many of its columns the form reads, and whether its values show the
        form as well; (0, False) if it hasn't this form."""
        found = [len(names) for names in self.columns if all(name in row for name in names)]
        if not found or (self.claims is not None and not self.claims(row)):
            return 0, False
        return max(found) + sum(name in row for name in self.also), self.claims is not None
