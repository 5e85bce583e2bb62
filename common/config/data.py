"""``data``: problems, expert traces and held-out sets."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from .section import NonNegative, Positive, Section


class SourceConfig(Section):
    """One parquet file (or folder of them) of problems, with LUFFY's columns."""

    path: str
    """Relative to the working directory; ``{run}`` stands for the run's folder."""
    name: str | None = None
    """Short name for metrics and ids; None = the file's stem."""
    weight: Positive = 1
    """Problems that are taken from this source for each ``weight`` of the others."""

    @property
    def short_name(self) -> str:
        """The given name, or the stem of the path."""
        return self.name or Path(self.path).stem


class EvalSetConfig(Section):
    """One held-out set."""

    path: str
    """A parquet file; ``{run}`` stands for the run's folder."""
    name: str = "heldout"
    """Name of the set in metrics."""
    limit: Positive | None = None
    """Use only this many problems, the first ones; None = all."""


class DataConfig(Section):
    """Problems, expert traces and held-out sets."""

    train: tuple[SourceConfig, ...] = ()
    """Sources of problems, mixed by ``weight``, each in its own seeded permutation."""
    evaluate: tuple[EvalSetConfig, ...] = ()
    """Held-out sets."""
    miniature: Literal["hard", "easy"] | None = None
    """Write the miniature's parquet files into ``{run}/data`` before anything reads them."""
    miniature_traces: NonNegative = 4
    """Expert traces that exist in the miniature's hard setting."""
    miniature_fresh: Positive = 1200
    """Number of problems without a trace that the miniature writes."""
    system_prompt: str | None = None
    """A system prompt for rows that have none of their own."""
    max_prompt_tokens: Positive = 1024
    """Greatest length of a prompt in tokens; ``overlong`` says what happens to longer ones."""
    overlong: Literal["drop", "refuse"] = "drop"
    """Drop (and count) or refuse prompts and traces that are over their limits; they are never cut."""
    bad_golds: Literal["refuse", "drop"] = "refuse"
    """Refuse, or drop (and count), problems whose gold answer the grader can't read."""
