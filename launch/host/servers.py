"""Asks the servers of a reward's judges and reward models for a sign of life before anything starts."""

from __future__ import annotations

import json
import threading

from ...common.config import RewardConfig
from ...common.errors import ConfigError
from ...reward.components.asking import Asking
from ...reward.components.judge import Judge
from ...reward.components.scoring import Scorer
from ...reward.exchange import Exchange, ExchangeError

SECONDS = 15.0
"""Time for an answer."""
SHOWN = 10
"""Names of models that an error lists."""


def check_servers(reward: RewardConfig) -> None:
    """Looks whether every server that the reward asks answers, accepts the key and knows the model.

    Raises:
        ConfigError: one doesn't; the message says what to do.
    """
    for part in Scorer(reward).remote:
        _check(part.name, part.function)


def _check(name: str, asking: Asking) -> None:
    where = f"reward component {name}: params.url={asking.address.url}"
    # Every server of these kinds has the list of its models there, save TEI, which then refuses: an
    # answer too.
    exchange = Exchange(address=asking.address.at("/v1/models"), body=None, seconds=SECONDS)
    timer = threading.Timer(SECONDS, exchange.abort)
    timer.daemon = True
    timer.start()
    try:
        answer = exchange.run()
    except ExchangeError as error:
        if error.status in (401, 403):
            variable = asking.address.key_variable
            raise ConfigError(
                f"{where} refuses the key ({error}): "
                + (f"check {variable}" if variable else "name its variable with params.api_key_env")
            ) from None
        if error.status is None or error.status >= 500 or 300 <= error.status < 400:
            raise ConfigError(
                f"{where} doesn't answer as it should ({error}): start the server and wait until it is "
                f"ready, correct the address, or take the component out of reward.components"
            ) from None
        return
    finally:
        timer.cancel()
    models = _models(answer)
    wanted = asking.api.model if isinstance(asking.api, Judge) else None
    if wanted is not None and models and wanted not in models:
        raise ConfigError(
            f"{where} has no model {wanted!r} (params.model); it has "
            f"{', '.join(models[:SHOWN])}{', …' if len(models) > SHOWN else ''}"
        )


def _models(answer: bytes) -> list[str]:
    """Names of the models in a list; empty if it isn't one."""
    try:
        return [str(model["id"]) for model in json.loads(answer)["data"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
