"""The samples of a cell that isn't finished: appended to files, whose whole lines count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ...replay.evaluating.evaluated import EvaluatedSample, EvaluationFolder, line_of, read_samples
from ..progress import Progress

if TYPE_CHECKING:
    from ...rollout.evaluate.answering import Place


class Samples:
    """A cell's samples so far: those of its parts, and the part to which this process adds.

    Args:
        folder: the evaluation's.
        cell: the cell's name.
    """

    def __init__(self, folder: EvaluationFolder, cell: str) -> None:
        self._folder = folder
        self._cell = cell

    def found(self) -> dict[Place, EvaluatedSample]:
        """Samples of all parts, by place; of several with one place the first."""
        found: dict[Place, EvaluatedSample] = {}
        for part in self._folder.parts(self._cell):
            for sample in read_samples(part):
                found.setdefault((sample.place, sample.sample), sample)
        return found

    @contextmanager
    def adding(
        self, number: int, progress: Progress | None = None
    ) -> Iterator[Callable[[list[EvaluatedSample]], None]]:
        """Yields a function that appends samples to part ``number``; a line that was cut off goes first."""
        path = self._folder.cell(self._cell) / f"part-{number}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            file.truncate(whole_lines(path))

            def add(samples: list[EvaluatedSample]) -> None:
                # One write, so that a killed process cuts at most the last line.
                file.write(b"".join(map(line_of, samples)))
                file.flush()
                if progress is not None:
                    progress.add(len(samples))

            yield add


def whole_lines(path: Path) -> int:
    """Bytes of a file up to the end of its last whole line."""
    content = path.read_bytes()
    return content.rfind(b"\n") + 1
