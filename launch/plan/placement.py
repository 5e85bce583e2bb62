"""Which processes a run has, and which GPUs each of them gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...common.errors import ConfigError
from .hardware import GpuName, Machine

if TYPE_CHECKING:
    from ...common.config import Config

MOST_THREADS = 8
"""Most threads that a rank of the learner gets by default: beyond them the memory's own bandwidth bounds an optimizer
step in host memory, roughly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The GPUs that each process sees; empty if the run is on CPUs."""

    learner: tuple[tuple[GpuName, ...], ...]
    """One entry per rank on the head."""
    rollout: tuple[tuple[GpuName, ...], ...]
    """One entry per worker."""

    @property
    def gpus(self) -> int:
        """Number of GPUs that the processes see together."""
        return len({gpu for seen in (*self.learner, *self.rollout) for gpu in seen})


def gpus_needed(config: Config) -> int:
    """The head's GPUs: one for every learner rank there and for every engine's tensor-parallel rank."""
    engines = workers_of(config) * config.rollout.gpus_per_worker
    if config.launch.share_gpu:
        return max(config.ranks_per_host, engines)
    return config.ranks_per_host + engines


def workers_of(config: Config) -> int:
    """Number of rollout workers that are started; offline, one if there are evaluations during the run."""
    if config.learner.source == "ledger":
        return config.rollout.workers
    return min(1, config.rollout.workers) if config.evaluate.every else 0


def evaluates_offline(config: Config) -> bool:
    """Whether an offline run is evaluated before or after its training, in processes of ``tandem evaluate``."""
    if config.learner.source == "ledger" or not config.data.evaluate:
        return False
    return config.evaluate.at_start or config.evaluate.at_end


def samples_here(config: Config) -> bool:
    """Whether a process that is started here makes an engine: a rollout worker, or an evaluation of an offline
    run."""
    return workers_of(config) > 0 or evaluates_offline(config)


def learner_threads(config: Config, *, on_gpu: bool, cores: int) -> int:
    """CPU threads of one rank of the learner: ``learner.threads``, or what the host's workers leave idle.

    Args:
        config: the run's config.
        on_gpu: whether the ranks compute on GPUs.
        cores: the host's cores.
    """
    if config.learner.threads is not None:
        return config.learner.threads
    on_host = not on_gpu or config.learner.offload != "none"
    # The same sums on every host, however many cores it has.
    if not on_host or config.run.deterministic:
        return 1
    taken = workers_of(config) * config.rollout.threads if samples_meanwhile(config) else 0
    return max(1, min(MOST_THREADS, (cores - taken) // config.ranks_per_host))


def samples_meanwhile(config: Config) -> bool:
    """Whether workers sample while the learner computes; strictly on-policy they wait for its weights."""
    return config.learner.source == "ledger" and config.replay.max_staleness > 0


def trackers_of(config: Config) -> list[str]:
    """The trackers that a run writes to. Each is an optional package, and an extra of the same name."""
    wanted = {"wandb": config.log.wandb != "off", "tensorboard": config.log.tensorboard}
    return [name for name, is_wanted in wanted.items() if is_wanted]


def place(config: Config, machine: Machine) -> Placement:
    """Gives the learner's ranks the first GPUs and the engines the next ones.

    With ``launch.share_gpu`` the engines begin at the first one too, so that a GPU carries at most
    one rank and one engine.

    Raises:
        ConfigError: ``launch.gpus=required``, and the machine has fewer than are needed.
    """
    needed = gpus_needed(config)
    on_cpu = Placement(learner=((),) * config.ranks_per_host, rollout=((),) * workers_of(config))
    if config.launch.gpus == "none":
        return on_cpu
    if len(machine.gpus) < needed:
        if config.launch.gpus == "auto":
            return on_cpu
        raise ConfigError(
            f"{config.run.dir}: {_too_few(config, machine)}: run it where there "
            f"{'are' if needed > 1 else 'is'} {needed}, lower those settings, or try the whole system on CPUs with "
            f"`tandem start miniature`"
        )
    return placed(config, [gpu.told for gpu in machine.gpus])


def gpus_left_idle(config: Config, machine: Machine) -> str | None:
    """Why a run with ``launch.gpus=auto`` is on CPUs although the machine has GPUs, and the way out; None if it isn't."""
    have = len(machine.gpus)
    if config.launch.gpus != "auto" or not 0 < have < gpus_needed(config):
        return None
    engines = workers_of(config) * config.rollout.gpus_per_worker
    could_share = not config.launch.share_gpu and max(config.ranks_per_host, engines) <= have
    share = (
        "set launch.share_gpu=true, by which engines get the learner's GPUs, "
        if could_share
        else ""
    )
    return (
        f"{_too_few(config, machine)}, so the run is on CPUs: {share}lower those settings, or set "
        f"launch.gpus=required, which refuses to start without enough GPUs"
    )


def bound_for_one_host(config: Config) -> str | None:
    """That no other host can join a run that needs or awaits some, and the way out; None if they can."""
    if config.learner.hosts > 1:
        what = f"learner.hosts={config.learner.hosts}"
    elif config.learner.source == "ledger" and not config.rollout.workers:
        what = "rollout.workers=0 (--head)"
    else:
        return None
    from ...common.sockets import is_loopback  # It loads ZeroMQ.

    if not is_loopback(config.launch.bind):
        return None
    return (
        f"{what} takes processes that join, and with launch.bind={config.launch.bind} they can join from this host alone: "
        f"for other hosts set launch.bind to one private address of it"
    )


def _too_few(config: Config, machine: Machine) -> str:
    """What is needed and what is there."""
    needed, have = gpus_needed(config), len(machine.gpus)
    named = "learner.ranks" if config.learner.hosts == 1 else "learner.ranks / learner.hosts"
    shared = " on the same GPUs" if config.launch.share_gpu else ""
    return (
        f"this preset needs {needed} GPU{'s' * (needed > 1)} ({named}={config.ranks_per_host} + rollout.workers="
        f"{workers_of(config)} x rollout.gpus_per_worker={config.rollout.gpus_per_worker}{shared}) and this machine "
        f"has {have or 'none'} ({machine})"
    )


def placed(config: Config, gpus: Sequence[GpuName]) -> Placement:
    """Distributes these GPUs, of which there are enough."""
    ranks, each = config.ranks_per_host, config.rollout.gpus_per_worker
    rest = gpus if config.launch.share_gpu else gpus[ranks:]
    return Placement(
        learner=tuple((gpu,) for gpu in gpus[:ranks]),
        rollout=tuple(tuple(rest[i * each : (i + 1) * each]) for i in range(workers_of(config))),
    )
