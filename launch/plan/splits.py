"""Every way to split a node's GPUs between learner and engines, at every staleness bound."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...common.config.checks.choices import why_not_started, why_refused
from ...common.errors import ConfigError
from .node import Node
from .planning import Plan, for_node, make
from .simulation import Simulated, simulate

if TYPE_CHECKING:
    from ...common.config import Config

BOUNDS = range(9)
"""Staleness bounds that are tried."""
FULL = 3
"""A worker leases this many times as many groups as have slots at once: a group keeps its place
until its longest sample has ended, while the others' slots are free for the next groups."""

IDLE = 0.005
"""Share of the time below which waiting isn't mentioned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One way to split the node, at one staleness bound."""

    ranks: int
    """Ranks of the learner, one GPU each."""
    workers: int
    """Number of engines."""
    staleness: int
    """The staleness bound η."""
    plan: Plan
    """The plan of the config with this split."""
    simulated: Simulated
    """The simulation of this split."""

    @property
    def fits(self) -> bool:
        """Whether, on paper, nothing prevents it from running."""
        return not self.plan.problems

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: bytes, seconds and shares as numbers."""
        rollout, simulated = self.plan.config.rollout, self.simulated
        return {
            "ranks": self.ranks,
            "workers": self.workers,
            "max_staleness": self.staleness,
            "window": self.plan.config.replay.window,
            "weights_every": self.plan.config.weights.every,
            "groups_per_batch": rollout.groups_per_batch,
            "groups_ahead": rollout.groups_ahead,
            "fits": self.fits,
            "share_of_fullest_gpu": self.plan.fullest(),
            "host_bytes": self.plan.host(),
            "pinned_bytes": self.plan.pinned(),
            "seconds": simulated.step,
            "learner_waits": simulated.learner_waits,
            "engines_wait": simulated.engines_wait,
            "engines_pause": simulated.engines_pause,
        }


def splits(
    name: str,
    config: Config,
    node: Node,
    bounds: Sequence[int] | None = None,
    **lengths: float | None,
) -> list[Split]:
    """Plans and simulates every split of a node, with leases that keep its engines busy.

    Args:
        name: name of the preset.
        config: the resolved config; its own split and bound are among those that are tried.
        node: the node with its GPUs.
        bounds: the staleness bounds to try, of which those are left out with which no run would be started;
            None = :data:`BOUNDS`, or 0 alone with ``run.deterministic``.
        **lengths: lengths as for :func:`~.planning.make`.

    Raises:
        ConfigError: the run is on CPUs or offline, its roles share GPUs, its learner is on several hosts, the node
            has too few GPUs, its model isn't known, or it would be started with no split.
    """
    if config.launch.gpus == "none" or config.launch.share_gpu:
        raise ConfigError(
            "--splits divides GPUs between the learner and the engines, and this preset "
            f"{'shares them' if config.launch.share_gpu else 'runs on CPUs'}: give one that has both"
        )
    if config.learner.source == "offline":
        raise ConfigError("--splits divides GPUs with engines, and offline nothing is generated")
    if config.learner.hosts > 1:
        raise ConfigError(
            f"--splits divides the GPUs of one node, and learner.hosts={config.learner.hosts} spreads the learner "
            f"over several: set learner.hosts=1"
        )
    each = config.rollout.gpus_per_worker
    if node.gpus <= each:
        raise ConfigError(
            f"--splits needs a GPU for the learner and rollout.gpus_per_worker={each} for an engine, and the node has "
            f"{node.gpus}: give {1 + each} or more with --gpus"
        )
    if bounds is None:
        bounds = BOUNDS[:1] if config.run.deterministic else BOUNDS
    found: list[Split] = []
    refusal: str | None = None
    for ranks, workers in shares(node.gpus, each):
        bound_by: Simulated | None = None
        for bound in bounds:
            plan = _plan(name, with_split(config, ranks, workers, bound), node, lengths)
            if why := why_refused(plan.config) or why_not_started(plan.config):
                refusal = refusal or why
                continue
            assert plan.scenario is not None
            simulated = bound_by or simulate(plan.scenario)
            found.append(
                Split(ranks=ranks, workers=workers, staleness=bound, plan=plan, simulated=simulated)
            )
            if is_bound(simulated, plan.scenario.slots):
                bound_by = simulated
    if refusal and not found:
        raise ConfigError(f"no split would be started: {refusal}")
    return found


def _plan(name: str, config: Config, node: Node, lengths: Mapping[str, float | None]) -> Plan:
    """The plan of a split, with leases that keep its engines busy."""
    placement = for_node(config, node)
    plan = make(name, config, node, placement, **lengths)
    if plan.scenario is None:
        raise ConfigError(
            f"--splits needs the sizes of {config.model.path}, which are neither on this machine nor "
            f"in the table of well-known models: fetch the model first"
        )
    if config.run.deterministic:
        return plan  # It says itself how many groups are leased.
    batch, ahead = leases(config, plan.scenario.slots)
    config = _with(config, "rollout", groups_per_batch=batch, groups_ahead=ahead)
    return make(name, config, node, placement, **lengths)


def is_bound(simulated: Simulated, slots: int) -> bool:
    """Whether a greater staleness bound can't shorten a step, because the learner, or each slot of the
    engines, is busy all the time."""
    full = simulated.engines_wait < IDLE and simulated.running > (1 - 4 * IDLE) * slots
    return simulated.learner_waits < IDLE or full


def shares(gpus: int, each: int) -> Iterable[tuple[int, int]]:
    """All pairs of ranks and engines that use all GPUs, with ``each`` GPUs per engine.

    >>> list(shares(4, each=1)), list(shares(5, each=2))
    ([(1, 3), (2, 2), (3, 1)], [(1, 2), (3, 1)])
    """
    for ranks in range(1, gpus):
        if (gpus - ranks) % each == 0:
            yield ranks, (gpus - ranks) // each


def leases(config: Config, slots: int) -> tuple[int, int]:
    """``groups_per_batch`` and ``groups_ahead`` with which no engine waits for a lease.

    A worker leases its share of the groups that may be under way, but no more than keep its slots
    full, and asks for more as soon as an eighth of them has ended.

    Args:
        config: the config with its split and staleness bound.
        slots: samples that an engine runs at a time.
    """
    from ...common.config.groups import own_rows

    live = config.replay.groups_per_step * max(1, config.replay.max_staleness)
    held = min(math.ceil(live / config.rollout.workers), math.ceil(FULL * slots / own_rows(config)))
    batch = max(1, held // 8)
    return batch, held - batch


def with_split(config: Config, ranks: int, workers: int, staleness: int) -> Config:
    """A config with another split of the node and another staleness bound."""
    replay, weights = config.replay, config.weights
    config = _with(config, "learner", ranks=ranks)
    config = _with(config, "rollout", workers=workers)
    window, every = min(replay.window, staleness + 1), min(weights.every, staleness + 1)
    config = _with(config, "replay", max_staleness=staleness, window=window)
    return _with(config, "weights", every=every)


def _with(config: Config, section: str, **values: Any) -> Config:
    changed = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: changed})
