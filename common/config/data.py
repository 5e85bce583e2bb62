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
    """Problems taken from this source for each ``weight`` of the others."""

    @property
    def short_name(self) -> str:
        """The name given, or the stem of its path."""
        return self.name or Path(self.path).stem


class EvalSetConfig(Section):
    """One held-out set."""

    path: str
    """Parquet; ``{run}`` stands for the run's folder."""
    name: str = "heldout"
    """Names its metrics."""
    limit: Positive | None = None
    """First so many problems; None = all."""


class DataConfig(Section):
    """Problems, expert traces and held-out sets."""

    train: tuple[SourceConfig, ...] = ()
    """Mixed by ``weight``, each in its own seeded permutation."""
    evaluate: tuple[EvalSetConfig, ...] = ()
    """Held-out sets."""
    miniature: Literal["hard", "easy"] | None = None
    """Write the miniature's parquet files into ``{run}/data`` before anything reads them."""
    miniature_traces: NonNegative = 4
    """Expert traces that exist in the miniature's hard setting."""
    miniature_fresh: Positive = 1200
    """Problems without a trace that the miniature writes."""
    system_prompt: str | None = None
    """Put before the messages of a row that has none of its own."""
    max_prompt_tokens: Positive = 1024
    """A longer prompt is refused at ingest (``overlong``)."""
    overlong: Literal["drop", "refuse"] = "drop"
    """Drop (and count) or refuse prompts and traces over their limits; never cut them."""
    bad_golds: Literal["refuse", "drop"] = "refuse"
    """Refuse, or drop (and count), problems whose gold answer the grader can't read."""
