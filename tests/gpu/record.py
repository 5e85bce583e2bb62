"""What a part of the kit has found, written line by line, so that a part that is killed leaves its figures."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem.common.errors import TandemError

LAST_LINES = 12
"""Lines of a failure's traceback, or of a part's output, that are kept."""


class NotRunError(Exception):
    """Something can't be run here; the message says why."""


class Recorder:
    """Writes the results of one part.

    Args:
        path: the file, one JSON object a line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def figures(self, name: str, **values: Any) -> None:
        """Figures of one case; units are in their keys."""
        self._write({"kind": "figures", "name": name, **values})

    def not_run(self, name: str, reason: str, **more: Any) -> None:
        """A case that can't be run here."""
        self._write({"kind": "not run", "name": name, "reason": " ".join(reason.split()), **more})

    def failed(self, name: str, error: str, last_lines: list[str]) -> None:
        """A case that failed."""
        self._write({"kind": "failed", "name": name, "error": error, "last_lines": last_lines})

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Records what goes wrong in one case, so that the next one is run all the same."""
        try:
            yield
        except NotRunError as error:
            self.not_run(name, str(error))
        except Exception as error:  # noqa: BLE001 - recorded, whatever it is
            lines = traceback.format_exc().strip().splitlines()[-LAST_LINES:]
            self.failed(name, f"{type(error).__name__}: {error}"[:500], lines)

    def _write(self, line: dict[str, Any]) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


@contextmanager
def refusals() -> Iterator[None]:
    """Within it, what Tandem itself refuses counts as not run.

    Raises:
        NotRunError: it was refused; the message is Tandem's.
    """
    try:
        yield
    except TandemError as error:
        raise NotRunError(str(error)) from None


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The lines of a part's file by kind, without it: ``figures``, ``not_run``, ``failed``."""
    found: dict[str, list[dict[str, Any]]] = {"figures": [], "not_run": [], "failed": []}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue  # The last line of a part that was killed while it wrote.
        found[line.pop("kind").replace(" ", "_")].append(line)
    return found
