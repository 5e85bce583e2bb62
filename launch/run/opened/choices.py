"""Checks that what a config names exists on this host: grading modes, reward components, the user's modules.

It runs before a run starts. This process imports no module of the user's: what has to be imported to be
checked is imported by a process of its own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import lru_cache

import xxhash

from ....common import templates
from ....common.config import Config, DataConfig, OptimizerConfig
from ....common.errors import ConfigError
from ....common.import_path import is_import_path, require_module, source_of, split_path
from ....learner.loop import own_schedule
from ....learner.loop.schedule import CRITIC_KEY, warmup_of
from ....reward.components.scoring import Scorer
from ....reward.reading import modes
from ...callbacks.caller import Caller, Ended
from ...host import existing_redis, own_functions


def check_named(config: Config) -> None:
    """Raises ``ConfigError`` for a name that leads nowhere."""
    modes.mode(config.reward.mode, tuple_for_set=config.reward.tuple_for_set)
    Scorer(config.reward)
    _check_data(config.data)
    if config.replay.redis_url is not None:
        existing_redis.joining(config.replay, "", None)
    for key, path in _own(config):
        require_module(path, key)
    _check_functions(config)
    if config.run.callbacks:
        _check_callbacks(config.run.callbacks, config.run.callback_memory_mb)
    total = config.run.steps
    for key, optimizer in _optimizers(config).items() if config.learner.train else ():
        if is_import_path(optimizer.schedule):
            first = 1 if total is None else warmup_of(optimizer, total) + 1
            _check_schedule(key, optimizer.schedule, first, total)


def _check_data(data: DataConfig) -> None:
    """Looks up the forms, modes and templates that the data's settings name; functions of the user's are only found."""
    templates.named(data.template)
    for place, one in enumerate(data.evaluate):
        if one.mode is not None:
            modes.mode(one.mode, key=f"data.evaluate.{place}.mode")
        if one.template is not None:
            templates.named(one.template, key=f"data.evaluate.{place}.template")
    if forms := _forms(data):
        # Readers of files are loaded with the forms.
        from ....replay.forms import named_form

        for key, form in forms.items():
            if ":" in form:
                require_module(form, key)
            else:
                named_form(form, key=key)


def _forms(data: DataConfig) -> dict[str, str]:
    """The forms that sources and held-out sets name, by key."""
    forms = {
        **{f"data.train.{place}.form": one.form for place, one in enumerate(data.train)},
        **{f"data.evaluate.{place}.form": one.form for place, one in enumerate(data.evaluate)},
    }
    return {key: form for key, form in forms.items() if form is not None}


def _optimizers(config: Config) -> dict[str, OptimizerConfig]:
    """The optimizers of the policy and of a critic, by the key of their schedule."""
    critic = config.learner.critic
    optimizers = {own_schedule.KEY: config.learner.optimizer}
    return optimizers if critic is None else {**optimizers, CRITIC_KEY: critic.optimizer}


def _check_functions(config: Config) -> None:
    """Imports the objective and the reward functions, if processes of this host will call them."""
    name, launch = config.learner.objective.name, config.launch
    # An objective's module needs torch, which a host with a dry run or with other processes alone may lack.
    if is_import_path(name) and launch.learner == "here" and importlib.util.find_spec("torch"):
        own_functions.check("objective", (name,))
    rewards = tuple(part.name for part in config.reward.components if is_import_path(part.name))
    if rewards and (config.reward.pools or config.learner.source == "offline"):
        own_functions.check("rewards", rewards)


@lru_cache
def _check_callbacks(paths: tuple[str, ...], memory_mb: int) -> None:
    """Imports the callbacks as the run will, in a process of their own, and calls none."""
    caller = Caller(paths, seconds=1.0, memory_mb=memory_mb)
    try:
        caller.start()
    except Ended as error:
        raise ConfigError(
            f"run.callbacks={', '.join(paths)}: the process that imports them {error}; do their modules "
            f"need more than run.callback_memory_mb={memory_mb}, or end the interpreter?"
        ) from None
    finally:
        caller.close()


@lru_cache
def _check_schedule(key: str, path: str, first: int, total: int | None) -> None:
    """Computes the factors of the whole run where its steps are known before its data are read; else only
    imports the function. The runs of a sweep, which have the same one, ask once."""
    if total is None:
        own_schedule.check(path, key)
    else:
        own_schedule.factors(path, first, total, key)


def _own(config: Config) -> Iterator[tuple[str, str]]:
    """Yields key and import path of the user's own objective and engine."""
    name = config.learner.objective.name
    if is_import_path(name):
        yield "learner.objective.name", name
    if (
        is_import_path(config.rollout.engine)
        and config.rollout.workers
        and config.learner.source == "ledger"
    ):
        yield "rollout.engine", config.rollout.engine


def own_code(config: Config) -> dict[str, str]:
    """Digest of the file of each module that has functions or classes of the user's own, by the module's name.

    Imports none of them, and doesn't look at what they import.
    """
    named = [
        config.learner.objective.name,
        *(optimizer.schedule for optimizer in _optimizers(config).values()),
        config.rollout.engine,
        *(part.name for part in config.reward.components),
        *_forms(config.data).values(),
        *config.run.callbacks,
        *(getattr(one, "target", "") for one in config.environments.use.values()),
    ]
    digests = {}
    for path in filter(is_import_path, named):
        # A module may stand in an archive, where it is no file.
        if (source := source_of(path)) is not None and source.is_file():
            digests[split_path(path)[0]] = xxhash.xxh3_64_hexdigest(source.read_bytes())
    return digests
