"""What plays the episodes of one environment: processes of ours, or a foreign server behind ours."""

from __future__ import annotations

from typing import Protocol

from ...common.errors import ConfigError, TandemError
from .hosts import Hosts
from .pipes import Play
from .process import (
    EpisodeFailed,
    NotStarted,
)
from .requests import RunRequest
from .wire import (
    Played,
    failed,
)


class Lost(Exception):
    """What played an episode was ended by no fault of that episode: it may be played again, in a new session."""


class World(Protocol):
    """Plays the episodes of one environment."""

    async def start(self) -> None:
        """Makes it ready.

        Raises:
            TandemError: it can't be; a ``ConfigError`` where another attempt would end alike.
        """
        ...

    async def play(self, run: RunRequest, seconds: float) -> Played:
        """Plays one episode within ``seconds``. A failure is a result; being cancelled ends the episode.

        Raises:
            Lost: it should be played elsewhere.
        """
        ...

    async def close(self) -> None:
        """Ends whatever it has started."""
        ...


class HostWorld:
    """An environment of one of our forms (:mod:`.forms`)."""

    def __init__(self, name: str, hosts: Hosts) -> None:
        self._name, self._hosts = name, hosts

    async def start(self) -> None:
        """Loads the environment in a first process."""
        try:
            await self._hosts.check(self._name)
        except NotStarted as error:
            raise not_started(self._name, error) from None

    async def play(self, run: RunRequest, seconds: float) -> Played:
        """Plays one episode."""
        play = Play(
            run.task_data.row,
            run.client.base_url,
            run.client.api_key,
            run.model,
            dict(run.sampling),
            run.limits.turns,
            run.limits.calls,
            run.limits.observation_tokens,
            seconds,
        )
        try:
            return await self._hosts.play(self._name, play)
        except EpisodeFailed as error:
            return failed(error.verdict, error.detail)

    async def close(self) -> None:
        """Nothing: the processes are the server's, and end with it."""


def not_started(name: str, error: NotStarted) -> TandemError:
    """The error for an environment that can't be loaded."""
    if not error.refused:
        return TandemError(f"environments.use.{name} can't be started: {error}")
    return ConfigError(f"environments.use.{name} can't be loaded: {error}")
