"""Choices about Redis, engines, hosts and the weights' way that would do nothing, or fail only once a run is under way."""

from __future__ import annotations

from ..rollout import VLLM_COLDEST, beyond_vllm, may_be_vllm
from ..tree import Config
from ..weights import LOADS_BY
from .updates import Rule


def _existing_redis(config: Config) -> str | None:
    replay = config.replay
    files = {
        "redis_ca": replay.redis_ca,
        "redis_cert": replay.redis_cert,
        "redis_key": replay.redis_key,
    }
    given = next((f"{name}={path}" for name, path in files.items() if path), None)
    if given and not (replay.redis_url or "").startswith("rediss:"):
        return (
            f"replay.{given} is for a server with TLS, and replay.redis_url "
            f"{'is not set' if replay.redis_url is None else 'begins with redis://'}: write "
            f"replay.redis_url=rediss://…, or leave it out"
        )
    if replay.redis_key and not replay.redis_cert:
        return (
            f"replay.redis_key={replay.redis_key} is the key of a certificate that is missing: set "
            f"replay.redis_cert as well"
        )
    if replay.durability == "server" and replay.redis_url is None:
        return (
            "replay.durability=server takes an existing server as it is, and this run starts its own: set it to "
            "process or power, or name the server with replay.redis_url"
        )
    return None


def _engine_gpus(config: Config) -> str | None:
    rollout = config.rollout
    if rollout.engine != "torch" or rollout.gpus_per_worker == 1 or config.launch.gpus == "none":
        return None
    return (
        f"rollout.gpus_per_worker={rollout.gpus_per_worker} shares an engine out over GPUs, and "
        f"rollout.engine=torch uses one: set rollout.gpus_per_worker=1 and raise rollout.workers, or "
        f"rollout.engine=vllm"
    )


def _coldest(config: Config) -> str | None:
    if not may_be_vllm(config.rollout.engine):
        return None
    temperatures = {
        "evaluate.temperature": config.evaluate.temperature,
        **{
            f"data.evaluate {one.name}: temperature": one.temperature
            for one in config.data.evaluate
        },
    }
    if config.learner.source == "ledger":
        temperatures["rollout.temperature"] = config.rollout.temperature
    for key, value in temperatures.items():
        if value is None or (why := beyond_vllm(key, value)) is None:
            continue
        greedy = "" if key == "rollout.temperature" else ", to 0 for the likeliest tokens"
        return f"{why}: set it to {VLLM_COLDEST:g} or more{greedy}, or set rollout.engine=torch"
    return None


def _waits(config: Config) -> str | None:
    wait, commit = config.rollout.update_wait_seconds, config.weights.commit_seconds
    if wait <= LOADS_BY * commit:
        return None
    return (
        f"rollout.update_wait_seconds={wait:g} lets new weights wait for more than three quarters of the time that "
        f"they may take, weights.commit_seconds={commit:g}: lower the first or raise the second"
    )


def _nccl_on_cpus(config: Config) -> str | None:
    if config.weights.transport != "nccl" or config.launch.gpus != "none":
        return None
    return (
        "weights.transport=nccl joins GPUs, and launch.gpus=none: set weights.transport=auto, or "
        "launch.gpus=required"
    )


def _outside(config: Config) -> str | None:
    if config.launch.learner == "here" or config.learner.source == "ledger":
        return None
    return (
        "launch.learner=outside leaves nothing to start of a run with learner.source=offline: set "
        "launch.learner=here"
    )


def _workers_elsewhere(config: Config) -> str | None:
    online = config.learner.source == "ledger"
    if not config.launch.binds_all or config.rollout.workers or not online:
        return None
    return (
        f"rollout.workers=0 (--head) leaves the samples to other hosts, which find neither weights nor reward pools "
        f"at launch.bind={config.launch.bind}: set launch.bind to one private address of the head"
    )


LAUNCH_RULES: tuple[Rule, ...] = (
    _existing_redis,
    _engine_gpus,
    _coldest,
    _waits,
    _nccl_on_cpus,
    _outside,
    _workers_elsewhere,
)
