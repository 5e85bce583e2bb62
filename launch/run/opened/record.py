"""``run.json`` while a supervisor has the run: its state, its time, and what was found out once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ....common import disk
from ....common.errors import ConfigError
from ....common.run_folder import wall_seconds
from ...host.redis_server import password_in, without_password
from ...trackers.wandb_run import place_of, wandb_id_of

if TYPE_CHECKING:
    from .opening import Opening
    from .presets import Preset

ALIVE_SECONDS = 10.0
"""Time between two signs of life of the supervisor."""


class RunRecord:
    """The content of ``run.json``, and the clock of this start of the run.

    Args:
        opening: the folder as it was opened.
        began: when this start began, in seconds since the epoch.
    """

    def __init__(self, opening: Opening, began: float) -> None:
        self.began = began
        self._folder = opening.folder
        self._content: dict[str, Any] = {**opening.run, "start": {}}

    def get(self, key: str) -> Any:
        """A value; None if it hasn't been written yet."""
        return self._content.get(key)

    def content(self) -> Mapping[str, Any]:
        return self._content

    def begin(self, preset: Preset, opening: Opening, port: int) -> list[str]:
        """Records the start; returns the modules of the user's own whose code isn't what it was at the start before."""
        from .choices import own_code

        code, before = own_code(opening.config), self.get("own_code") or {}
        known = self._content if self._content.get("run_id") == opening.run_id else {}
        self._content.setdefault("created", time.time())
        self.write(
            run_id=opening.run_id,
            # Must be looked up before the record says that the run is here.
            wandb_id=wandb_id_of({"run_id": opening.run_id, **known}, self._folder.path),
            preset=preset.name,
            preset_path=str(preset.path),
            overrides=[as_kept(word) for word in opening.overrides],
            port=port,
            own_code=code,
            # Holds until the requests are cleared that ended it, also if this start is killed before.
            was_finished=self.get("state") == "finished" or bool(self.get("was_finished")),
            state="starting",
            wall_seconds=wall_seconds(self._content),
            began=self.began,
            **place_of(self._folder.path),
        )
        return sorted(module for module in code if before.get(module, code[module]) != code[module])

    def reached(self, what: str) -> None:
        """Notes when this start got so far, in seconds since it began."""
        self._content["start"][what] = round(time.time() - self.began, 2)

    def note(self, **changes: Any) -> None:
        """Keeps changes, which are written with the next ones."""
        self._content |= changes

    def write(self, **changes: Any) -> None:
        """Makes changes and replaces the file; raises ``OSError`` if the disk is full."""
        self._content |= changes
        # Keeps the time up to here if the supervisor is killed.
        self._content["alive"] = time.time()
        self._folder.write_run(self._content)

    def try_write(self, **changes: Any) -> bool:
        """Like :meth:`write`, but returns False if the disk is full; the file then stays as it was."""
        try:
            self.write(**changes)
        except OSError as error:
            if not disk.is_full(error):
                raise
            return False
        return True

    def note_alive(self) -> None:
        """Writes a sign of life every :data:`ALIVE_SECONDS`."""
        if time.time() - self._content["alive"] >= ALIVE_SECONDS:
            self.try_write()

    @property
    def earlier_seconds(self) -> float:
        """Seconds that the run was up before this start."""
        return float(self._content.get("wall_seconds") or 0.0)

    def all_seconds(self) -> float:
        """Seconds that the run has been up, over all starts."""
        return self.earlier_seconds + time.time() - self.began


def as_kept(word: str) -> str:
    """An override as it is kept for the next start: without the password in ``replay.redis_url``, and with the content
    of the file that ``learner.deepspeed`` names, which may be gone by then."""
    from ....common.config.checks.deepspeed import content_of

    try:
        return _changed(apart(word)[0], "learner", "deepspeed", content_of)
    except ValueError:
        # A file that is gone; a later override has taken its place, or the config would have been refused.
        return word


def apart(word: str) -> tuple[str, str | None]:
    """A word of a command line as it may be shown, stored and handed to a process, and the password that it held.

    Only ``replay.redis_url`` holds one, alone or within ``replay``. A word without one stays as it is.
    """
    found: list[str] = []

    def shown(url: str) -> str:
        if (password := password_in(url)) is None:
            return url
        found.append(unquote(password))
        return without_password(url) or ""

    try:
        changed = _changed(word, "replay", "redis_url", shown)
    except ConfigError:
        return word, None  # It is no setting.
    return (changed, found[0]) if found else (word, None)


def _changed(word: str, section: str, name: str, change: Callable[[str], Any]) -> str:
    """An override with another value of one setting, which it gives by itself or within its section."""
    from ....common.config import parse_override

    key, value = parse_override(word)
    whole = f".{key}"  # The key may begin with a stage's name.
    if whole.endswith(f".{section}.{name}") and isinstance(value, str):
        return f"{key}={json.dumps(change(value))}"
    if whole.endswith(f".{section}") and isinstance(value, dict):
        given = value.get(name)
        if isinstance(given, str):
            return f"{key}={json.dumps(value | {name: change(given)})}"
    return word
