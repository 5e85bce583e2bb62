"""What a worker needs in addition where problems have environments: its endpoint, its links to the servers, a player."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from ..common.config import Config
from ..common.models import load_tokenizer
from ..common.sockets import CurveKeys, own_address
from ..replay.members import Members
from ..replay.store import RunStore
from .endpoint.server import Endpoint
from .engine import Engine
from .environments.client import EnvironmentClient, servers_in
from .player import Player

log = logging.getLogger("tandem.rollout")


class Playing:
    """A worker's episodes; for use in its loop.

    Args:
        name: the worker's member id.
        config: the run's config.
        engine: samples the turns.
        members: knows the environment servers.
        runs: has the run's own key.
        client: the run's client keys.
    """

    def __init__(
        self,
        name: str,
        config: Config,
        engine: Engine,
        members: Members,
        runs: RunStore,
        client: CurveKeys,
    ) -> None:
        self._name = name
        self._config = config
        tokenizer = load_tokenizer(config.model.path)
        self.endpoint = Endpoint(
            engine,
            tokenizer,
            context=config.data.max_prompt_tokens + config.rollout.max_new_tokens,
            model=config.model.path,
            host=own_address(config.launch.bind, config.facing(runs.store.peer[0])),
            port=config.environments.port,
            ports=config.launch.port_range,
            peer=runs.store.peer,
            key=runs.endpoint_key(),
            tools=config.environments.tools,
            observation_tokens=config.environments.observation_tokens,
        )
        self._client = EnvironmentClient(
            name,
            partial(servers_in, members),
            client,
            deadline=config.environments.episode_seconds,
            retries=config.environments.retries,
        )
        self.player = Player(engine, self.endpoint, self._client, config, tokenizer)

    async def start(self) -> None:
        """Begins to listen, and to look for environment servers."""
        await self.endpoint.start()
        await self._client.start()
        log.info(f"{self._name} answers episodes at {self.endpoint.url}")

    async def close(self) -> None:
        """Ends what is left."""
        await self._client.close()
        await self.endpoint.close()

    def lacking(self) -> str:
        """The environments that no live server has, in one line; empty if there is one for each."""
        names = [name for name in self._config.environments.use if not self._client.knows(name)]
        return f"no server with {', '.join(names)} is there" if names else ""

    def report(self) -> dict[str, Any]:
        """Figures for the worker's report."""
        player = self.player
        return {
            "under_way": player.episodes,
            **player.counts,
            **{f"{name}_seconds": spent for name, spent in player.seconds.items()},
            "endpoint": self.endpoint.url,
        }
