"""The plan of a run on paper: the memory of its processes and the time of a step.

Nothing is started, written or downloaded, and no GPU is needed to plan for one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ...common.errors import ConfigError
from ..wording import human
from . import memory
from .advice import MOST, ways_out
from .hardware import GpuName, Machine
from .memory import Holding
from .node import Node
from .node import node as node_for
from .placement import Placement, gpus_needed, place, placed, samples_here, trackers_of, workers_of
from .simulation import Scenario, simulate
from .sizes import ModelShape, shape_of, too_long, trained, unlike_ranks
from .speed import Load, load, scenario

if TYPE_CHECKING:
    from ...common.config import Config

POOL_BYTES = 200 << 20
"""Main memory of a reward pool's dispatcher, roughly."""
GRADER_BYTES = 70 << 20
"""Main memory of one grader, roughly; ``reward.memory_mb`` is its limit."""
EPISODE_BYTES = 30 << 20
"""Main memory of one episode's process, roughly; ``environments.memory_mb`` is its limit."""
SMALL_BYTES = 200 << 20
"""Main memory of the supervisor, and of a tracker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One process of the plan."""

    name: str
    """The process's name in the registry and the logs, such as ``learner-0``."""
    gpus: tuple[GpuName, ...]
    """The GPUs that it sees."""
    holding: Holding | None
    """The memory that it would hold; None if the model's sizes aren't known."""
    engine: str | None = None
    """``torch``, ``vllm`` or an import path; None unless it is a rollout worker."""
    zero_stage: int | None = None
    """None unless it is a rank of the learner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole run on paper."""

    name: str
    """Name of the preset."""
    config: Config
    """The resolved config."""
    node: Node
    """The node that it is planned for."""
    device: str
    """``cuda`` or ``cpu``."""
    shape: ModelShape | None
    """The model's sizes, if they are known."""
    processes: tuple[Planned, ...]
    """In the order of their start."""
    load: Load
    """The work of a step."""
    scenario: Scenario | None
    """What is simulated; None on CPUs, if the model's sizes aren't known, or if all samples come from
    other hosts."""
    problems: tuple[str, ...]
    """Why it wouldn't fit, on paper."""

    def by_gpu(self) -> dict[GpuName, dict[str, int]]:
        """GPU to the bytes of every process on it."""
        held: dict[GpuName, dict[str, int]] = {}
        for planned in self.processes:
            for gpu in planned.gpus:
                if planned.holding is not None:
                    held.setdefault(gpu, {})[planned.name] = planned.holding.total
        return held

    def host(self) -> int:
        """Bytes of main memory that all processes hold."""
        held = [p.holding for p in self.processes if p.holding is not None]
        return SMALL_BYTES + sum(h.host + (h.total if h.device == "cpu" else 0) for h in held)

    def pinned(self) -> int:
        """Bytes of :meth:`host` that are pinned."""
        return sum(p.holding.pinned for p in self.processes if p.holding is not None)

    def fullest(self) -> float:
        """Share of its memory that the fullest GPU would hold; 0 on CPUs."""
        totals = [sum(held.values()) for held in self.by_gpu().values()]
        return max(totals, default=0) / self.node.memory

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: bytes, seconds and tokens as numbers."""
        return {
            "preset": self.name,
            "estimate": True,
            "model": {
                "path": self.config.model.path,
                "parameters": self.shape.parameters if self.shape else None,
                "trained": trained(self.config, self.shape) if self.shape else None,
                "sizes_from": self.shape.source if self.shape else None,
            },
            "node": {
                "gpus": self.node.gpus if self.device == "cuda" else 0,
                "gpu": self.node.kind,
                "memory_bytes": self.node.memory,
                "flops": self.node.flops,
                "bandwidth_bytes_per_second": self.node.bandwidth,
                "link_bytes_per_second": self.node.link,
            },
            "processes": [_process(planned) for planned in self.processes],
            "gpus": {
                str(gpu): {
                    "processes": held,
                    "total_bytes": sum(held.values()),
                    "share": sum(held.values()) / self.node.memory,
                }
                for gpu, held in self.by_gpu().items()
            },
            "host_bytes": self.host(),
            "pinned_bytes": self.pinned(),
            "step": self._step(),
            "problems": list(self.problems),
        }

    def _step(self) -> dict[str, Any]:
        work = self.load
        simulated = None if self.scenario is None else asdict(simulate(self.scenario))
        return {
            "samples": work.samples,
            "rows": work.rows,
            "prompt_tokens": work.prompt,
            "response_tokens": work.response,
            "response_spread": work.lengths.spread,
            "max_staleness": self.config.replay.max_staleness,
            "simulated": simulated,
        }


def _process(planned: Planned) -> dict[str, Any]:
    holding = planned.holding
    return {
        "name": planned.name,
        "gpus": list(planned.gpus),
        "engine": planned.engine,
        "zero_stage": planned.zero_stage,
        "device": holding.device if holding else None,
        "bytes": dict(holding.parts) if holding else None,
        "total_bytes": holding.total if holding else None,
        "host_bytes": holding.host if holding else None,
        "pinned_bytes": holding.pinned if holding else None,
        "cache_tokens": holding.cache_tokens if holding else None,
    }


def make(
    name: str,
    config: Config,
    node: Node,
    placement: Placement,
    *,
    prompt_tokens: float | None = None,
    response_tokens: float | None = None,
    spread: float | None = None,
) -> Plan:
    """Plans a run on a node.

    Args:
        name: name of the preset.
        config: the resolved config, with ``run.dir``.
        node: its GPUs.
        placement: which process gets which GPU.
        prompt_tokens: mean length of a prompt; None = a quarter of the limit.
        response_tokens: mean length of a response; None = a third of the limit.
        spread: spread of response lengths, see :class:`~.lengths.Lengths`; None = 0.75.

    Raises:
        DataError: ``model.path`` is neither a folder nor a hub name.
    """
    device = "cuda" if placement.learner and placement.learner[0] else "cpu"
    shape = shape_of(config.model.path)
    planned = tuple(_all(config, node, placement, device, shape))
    work = load(config, prompt_tokens=prompt_tokens, response_tokens=response_tokens, spread=spread)
    engines = [p.holding for p in planned if p.holding and p.name.startswith("rollout")]
    cache = engines[0].cache_tokens if engines else 0
    elsewhere = config.learner.source == "ledger" and config.rollout.workers == 0
    known = shape is not None and device == "cuda" and not elsewhere
    plan = Plan(
        name=name,
        config=config,
        node=node,
        device=device,
        shape=shape,
        processes=planned,
        load=work,
        scenario=scenario(config, shape, node, work, cache) if known and shape else None,
        problems=tuple(_problems(config, node, device, shape, planned)),
    )
    return plan


def on_paper(config: Config, machine: Machine, node: Node) -> Placement:
    """The placement on this machine if it has enough GPUs, else on imagined GPUs."""
    try:
        return place(config, machine)
    except ConfigError:
        return placed(config, range(max(node.gpus, gpus_needed(config))))


def for_node(config: Config, node: Node) -> Placement:
    """The placement on a node of which only the number of GPUs is given.

    Raises:
        ConfigError: it has fewer GPUs than the config needs.
    """
    workers = workers_of(config)
    if config.launch.gpus == "none":
        return Placement(learner=((),) * config.ranks_per_host, rollout=((),) * workers)
    needed = gpus_needed(config)
    if node.gpus < needed:
        raise ConfigError(
            f"the preset needs {needed} GPUs (learner.ranks={config.learner.ranks}, "
            f"rollout.workers={workers} x rollout.gpus_per_worker="
            f"{config.rollout.gpus_per_worker}) and --gpus gives {node.gpus}: give more, or "
            f"lower those settings"
        )
    return placed(config, range(node.gpus))


def host_wanted(config: Config, machine: Machine) -> int | None:
    """Bytes of main memory that a run needs on this machine; None if the model is unknown."""
    node = node_for(machine, needed=gpus_needed(config))
    plan = make("", config, node, on_paper(config, machine, node))
    return plan.host() if plan.shape is not None else None


def problems_on_paper(config: Config, machine: Machine, placement: Placement) -> tuple[str, ...]:
    """Why a run that is about to start on GPUs may not fit; empty for a run on CPUs."""
    if not any(placement.learner):
        return ()
    return make("", config, node_for(machine, needed=gpus_needed(config)), placement).problems


def _all(
    config: Config, node: Node, placement: Placement, device: str, shape: ModelShape | None
) -> Iterable[Planned]:
    """Every process that the job would start, by the names that it gives them."""
    if config.replay.redis_url is None:
        yield _on_host("redis", {"data, at most": config.replay.maxmemory_mb << 20})
    for rank, gpus in enumerate(placement.learner):
        yield Planned(
            name=f"learner-{rank}",
            gpus=gpus,
            holding=None if shape is None else memory.learner(config, shape, device, rank=rank),
            zero_stage=config.zero_stage(),
        )
    for index, gpus in enumerate(placement.rollout):
        yield Planned(
            name=f"rollout-{index}",
            gpus=gpus,
            holding=None if shape is None else memory.engine(config, shape, device, node.memory),
            engine=memory.engine_name(config, device),
        )
    for index in range(config.environments.servers if config.environments.is_on else 0):
        episodes = config.environments.episodes * EPISODE_BYTES
        yield _on_host(f"environments-{index}", {"server": SMALL_BYTES, "episodes": episodes})
    # Offline, nothing is graded during a run.
    for index in range(config.reward.pools if config.learner.source == "ledger" else 0):
        graders = config.reward.graders * GRADER_BYTES
        yield _on_host(f"reward-{index}", {"dispatcher": POOL_BYTES, "graders": graders})
    for name in trackers_of(config):
        yield _on_host(name, {"libraries": SMALL_BYTES})
    if config.run.callbacks:
        # The callbacks' own process is bounded, but hardly ever comes near its bound.
        yield _on_host("callbacks", {"libraries": 2 * SMALL_BYTES})


def _on_host(name: str, parts: Mapping[str, int]) -> Planned:
    return Planned(name=name, gpus=(), holding=Holding(device="cpu", parts=parts, host=0))


def _problems(
    config: Config,
    node: Node,
    device: str,
    shape: ModelShape | None,
    planned: tuple[Planned, ...],
) -> Iterable[str]:
    if shape is None:
        yield (
            f"the sizes of {config.model.path} aren't known: it is neither on this machine nor in "
            f"the table of well-known models, so memory and time can't be estimated"
        )
        return
    found = [too_long(config, shape)]
    if samples_here(config) and memory.uses_vllm(config, device):
        found.append(unlike_ranks(config, shape, gpus=device == "cuda"))
    yield from filter(None, found)
    if device != "cuda":
        return
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    for one in planned:
        if one.name.startswith("rollout") and one.holding is not None:
            if one.holding.cache_tokens < longest:
                yield (
                    f"{one.name}: weights and workspace leave room for "
                    f"{one.holding.cache_tokens:,} tokens in the KV cache, and one row may have "
                    f"{longest:,}: raise {_cache_setting(config, device)}, lower "
                    f"rollout.max_new_tokens, or take larger GPUs"
                )
            break
    totals: dict[GpuName, int] = {}
    for one in planned:
        for gpu in one.gpus:
            totals[gpu] = totals.get(gpu, 0) + (one.holding.total if one.holding else 0)
    alike: dict[str, list[str]] = {}
    for gpu, total in totals.items():
        if total > node.memory:
            names = [one.name for one in planned if gpu in one.gpus]
            ways = ", ".join([*_room_on(config, names, device, node.memory), "larger GPUs"])
            told = f"would hold {human(total)} of {human(node.memory)}; what helps: {ways}"
            alike.setdefault(told, []).append(str(gpu))
    for told, gpus in alike.items():
        yield f"GPU{'s' * (len(gpus) > 1)} {', '.join(gpus)} {told}"


def _cache_setting(config: Config, device: str) -> str:
    """The setting that an engine's memory for keys and values follows."""
    if not memory.uses_vllm(config, device):
        return "rollout.groups_per_batch"
    set_to = memory.vllm_setting(config, "kv_cache_mb", None)
    return "rollout.vllm." + ("gpu_memory_utilization" if set_to is None else "kv_cache_mb")


def _room_on(config: Config, names: Sequence[str], device: str, size: int) -> Iterable[str]:
    """Settings that make most room on a GPU for the processes that are on it, with what each frees."""
    freed: dict[str, int] = {}
    for role in ("learner", "rollout"):
        if any(name.startswith(role) for name in names):
            freed = {**dict(ways_out(config, role, device, size)), **freed}
    for setting, some in sorted(freed.items(), key=lambda one: -one[1])[:MOST]:
        yield f"{setting} (frees {human(some)})"
