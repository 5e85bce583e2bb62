"""What keeps one engine on a run's newest weights: what receives them, loads them, and checks them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...common.config import Config
from ..engine import Engine
from .commit import Committer
from .commit_check import CommitCheck

if TYPE_CHECKING:
    from ...common.weights.protocol import Membership
    from ...common.weights.receiver import WeightReceiver


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiving:
    """The three parts of it. Whoever has them starts the receiver, and closes it."""

    receiver: WeightReceiver
    committer: Committer
    check: CommitCheck


def receiving(
    membership: Membership,
    config: Config,
    engine: Engine,
    *,
    term: Callable[[], int],
    base: str,
    on_change: Callable[[], None],
    spoil: Callable[[], None],
) -> Receiving:
    """Puts them together; call it in the loop that drives the engine.

    Args:
        membership: the process in the run.
        config: the run's config.
        engine: an engine that has been started.
        term: gives the ledger's newest term.
        base: digest of the model that new weights are adapters for; empty if they are a whole model.
        on_change, spoil: see :class:`.commit.Committer`.
    """
    from ...common.weights.receiver import Target, WeightReceiver

    weights, rollout = config.weights, config.rollout
    check = CommitCheck(
        engine,
        dtypes=(config.model.dtype, config.engine_dtype),
        bound=weights.check_bound,
        temperature=rollout.temperature,
        runs_on=rollout.recompute_kv,
        seconds=weights.commit_seconds,
        longest=config.data.max_prompt_tokens + rollout.max_new_tokens,
    )
    committer = Committer(
        engine,
        check,
        loop=asyncio.get_running_loop(),
        seconds=weights.commit_seconds,
        update_wait=rollout.update_wait_seconds,
        on_change=on_change,
        spoil=spoil,
    )
    receiver = WeightReceiver(
        membership,
        config,
        Target(
            specs=[(s.name, s.shape, s.dtype) for s in engine.parameter_specs()],
            load=committer.load,
            check=committer.examine if check.is_on else None,
            base=base,
            # An engine by import path may not have it.
            device=getattr(engine, "weights_device", "cpu"),
        ),
        term,
    )
    return Receiving(receiver=receiver, committer=committer, check=check)
