"""The forms in which an environment may be written, as the process that plays its episodes knows them.

Each form is a file with a class: made of the user's class or function once, it plays one episode after
another against a session of the worker's endpoint, and says what it is doing (:data:`~..pipes.Phase`), so
that the server knows which deadline counts. Nothing here imports more than the standard library and
msgspec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ....common.import_path import resolve
from ..pipes import Done, Phase, Play

Tell = Callable[[Phase], None]
"""Says that the episode has entered a phase."""
Player = Callable[[Play, Tell], Done]
"""Plays one episode."""

FORMS = ("text", "tools", "agent")
"""Forms whose episodes are played in processes of our own."""


def load(form: str, target: str, params: Mapping[str, Any]) -> Player:
    """Imports the user's class or function, and makes the environment of it.

    Args:
        form: one of :data:`FORMS`.
        target: its import path.
        params: keyword arguments of it, from the config.
    """
    made = resolve(target)
    if form == "text":
        from .text import TextEpisodes

        return TextEpisodes(made, params).play
    if form == "tools":
        from .tools import ToolEpisodes

        return ToolEpisodes(made, params).play
    if form == "agent":
        from .agent import AgentEpisodes

        return AgentEpisodes(made, params).play
    raise ValueError(f"there is no form {form!r}: it is one of {', '.join(FORMS)}")
