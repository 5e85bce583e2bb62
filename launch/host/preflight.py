"""Checks before anything is started or written: machine, model folder, disk, Redis."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.disk import free_bytes
from ...common.errors import ConfigError, DataError
from ...common.hub import TOKENIZER_FILES, has_tokenizer
from ...common.import_path import is_installed
from ...rollout.vllm import vllm_version
from ..plan.hardware import Machine
from ..plan.placement import Placement, place, samples_here, trackers_of, workers_of
from ..plan.sizes import over_context, safetensors_of, shape_of, trained, unlike_ranks
from ..wording import human, shown_python
from .environments import check_environments
from .servers import check_servers
from .surroundings import check_torch

if TYPE_CHECKING:
    from ...common.config import Config

TOKENIZER_SETTINGS = (
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "merges.txt",
)
"""Files that may stand beside a tokenizer's own."""
LOG_BYTES = 64 << 20
"""Size of a run's metrics, samples and logs, roughly."""


def check_host(
    config: Config, machine: Machine, *, anew: bool = True
) -> tuple[Placement, Path | None]:
    """Everything that can be checked within a second or two, apart from the disk.

    Args:
        config: the run's.
        machine: this one.
        anew: whether the run is begun, and not gone on with.

    Returns:
        Which process gets which GPU, and the model's folder (None: a model on a hub).

    Raises:
        ConfigError: this machine can't run the config, an environment can't be loaded, or a judge of its reward
            doesn't answer.
        DataError: the model's folder, the critic's or the teacher's lacks something, or the archive is too long, of
            another group size, or teaches the objective nothing.
    """
    placement = place(config, machine)
    if placement.gpus:
        check_torch()
    check_dtype(config, placement)
    check_trackers(config)
    check_optimizers(config)
    check_engine(config, placement)
    check_kernels(config, placement)
    check_addresses(config)
    check_environments(config)
    if config.learner.source == "ledger" and config.reward.pools:
        check_servers(config.reward)
    model = check_model(config)
    check_critic(config)
    check_teacher(config)
    if config.data.archive is not None:
        from .archive_check import check_archive

        check_archive(config, anew=anew)
    return placement, model


def check_model(config: Config) -> Path | None:
    """Checks the model's folder and returns it; None if the path is the name of a model on a hub.

    Raises:
        DataError: the folder lacks something, which the message names.
        ConfigError: prompts and responses don't fit into the model's context.
    """
    from ...common.models import read_model_config, resolve

    path = Path(resolve(config.model.path))
    if not path.is_dir():
        return None
    settings = read_model_config(config.model.path)
    if not has_tokenizer(path):
        raise DataError(
            f"model.path={config.model.path} has no tokenizer (none of "
            f"{', '.join(TOKENIZER_FILES)}): copy the tokenizer files of the model that it "
            f"comes from into it"
        )
    _require_weights(path, f"model.path={config.model.path}")
    _require_context(config, settings, "the model's")
    return path


def _require_context(config: Config, settings: Mapping[str, Any], whose: str) -> None:
    from ...common.models import context_of

    if why := over_context(config, context_of(settings), whose):
        raise ConfigError(why)


def check_critic(config: Config, *, alone: bool = False) -> None:
    """Checks the critic's own model, as :func:`check_teacher` does the teacher's."""
    critic = config.learner.critic
    if critic is not None and critic.model is not None:
        _check_reader(config, "learner.critic.model", critic.model, "critic", alone=alone)


def check_teacher(config: Config, *, alone: bool = False) -> None:
    """Checks the teacher's folder, and that its token ids mean what the policy's do.

    Args:
        config: the run's settings.
        alone: whether the policy's model isn't there yet, so that no tokenizers are compared.

    Raises:
        DataError: the folder lacks something, which the message names.
        ConfigError: its tokenizer is another one, or prompts and responses don't fit into its context.
    """
    if config.learner.teacher is not None:
        _check_reader(config, "learner.teacher", config.learner.teacher, "teacher", alone=alone)


def _check_reader(config: Config, key: str, model: str, role: str, *, alone: bool) -> None:
    """Checks a model that reads the policy's tokens, see :func:`check_teacher`. A critic may know more tokens, and as it
    only reads ids, its folder may lack a tokenizer."""
    from ...common.models import load_tokenizer, read_model_config, resolve

    path = Path(resolve(model, key))
    if path.is_dir():
        _require_weights(path, f"{key}={model}")
        _require_context(config, read_model_config(model), f"the {role}'s")
    is_critic = role == "critic"
    if alone or (is_critic and path.is_dir() and not has_tokenizer(path)):
        return
    own_path = Path(resolve(config.model.path))
    if own_path == path or _same_tokenizer(own_path, path):
        return
    own = load_tokenizer(config.model.path).get_vocab()
    theirs = load_tokenizer(model, key).get_vocab()
    differ = own.items() - theirs.items() if is_critic else own.items() ^ theirs.items()
    if differ:
        token, number = min(differ, key=lambda one: (one[1], one[0]))
        raise ConfigError(
            f"{key}={model} has another tokenizer than model.path={config.model.path}: "
            f"{len({one for _, one in differ}):,} token ids differ, such as {number} ({token!r} in one of them alone): "
            f"name a {role} with the policy's tokenizer"
        )


def _same_tokenizer(one: Path, other: Path) -> bool:
    """Whether two folders hold the same files of a tokenizer, which then needn't be loaded: that takes seconds."""
    names = (*TOKENIZER_FILES, *TOKENIZER_SETTINGS)
    found = [
        {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
        for folder in (one, other)
    ]
    return bool(found[0].keys() & set(TOKENIZER_FILES)) and found[0] == found[1]


def _require_weights(folder: Path, setting: str) -> None:
    if not weight_files(folder):
        raise DataError(
            f"{setting} has no weights (*.safetensors or *.bin): copy them into it, or name another folder"
        )


def check_dtype(config: Config, placement: Placement) -> None:
    """Raises ``ConfigError`` if the learner would train in float16 without a GPU."""
    if config.model.dtype != "float16" or not config.learner.train or all(placement.learner):
        return
    raise ConfigError(
        "model.dtype=float16 trains only on GPUs, and the learner has none here: set model.dtype=bfloat16, which "
        "has the range of float32, or run it where there is a GPU (launch.gpus=required says how many)"
    )


def check_trackers(config: Config) -> None:
    """Raises ``ConfigError`` if a tracker is switched on whose package isn't installed."""
    for name in trackers_of(config):
        if not is_installed(name):
            setting = f"log.wandb={config.log.wandb}" if name == "wandb" else f"log.{name}=true"
            raise ConfigError(
                f"{setting} needs the package {name}, which isn't installed: "
                f"`{shown_python()} -m pip install {name}` (the extra tandem-rl[{name}]), or set "
                f"log.{name}={'off' if name == 'wandb' else 'false'}"
            )


def eight_bit(config: Config) -> list[str]:
    """Keys of the optimizers, the policy's and the critic's, that step with ``adamw_8bit``."""
    critic = config.learner.critic
    wanted = {"learner.optimizer": config.learner.optimizer}
    if critic is not None:
        wanted["learner.critic.optimizer"] = critic.optimizer
    names = [key for key, optimizer in wanted.items() if optimizer.name == "adamw_8bit"]
    return names if config.learner.train else []


def check_optimizers(config: Config) -> None:
    """Raises ``ConfigError`` if an optimizer's package isn't installed."""
    for key in eight_bit(config):
        if not is_installed("bitsandbytes"):
            raise ConfigError(
                f"{key}.name=adamw_8bit needs the package bitsandbytes, which isn't installed: "
                f"`{shown_python()} -m pip install bitsandbytes` (the extra tandem-rl[bitsandbytes]), or set "
                f"{key}.name=adamw, with learner.offload=optimizer where GPUs lack the memory for its states"
            )


def wants_vllm(config: Config, *, gpus: bool) -> bool:
    """Whether a process that is started here makes a vLLM engine, which ``auto`` is where there is a GPU and vLLM
    is installed."""
    engine = config.rollout.engine
    chosen = engine == "auto" and gpus and vllm_version.installed()
    return samples_here(config) and (chosen or engine == "vllm")


def check_engine(config: Config, placement: Placement) -> None:
    """Raises ``ConfigError`` if workers, or an offline run's evaluations, would be started with a vLLM that can't serve
    them or their adapters, or that can't divide the model among its ranks."""
    if not wants_vllm(config, gpus=placement.gpus > 0):
        return
    try:
        vllm_version.require()
    except ConfigError as error:
        if workers_of(config):
            raise
        raise ConfigError(
            f"{error}; or do without the evaluations before and after the training: evaluate.at_start=false "
            f"evaluate.at_end=false"
        ) from None
    from ...rollout.engines import require_adapter_dtype

    on_gpus = placement.gpus > 0
    require_adapter_dtype(config.model, config.rollout, config.learner.lora, gpus=on_gpus)
    if refusal := unlike_ranks(config, shape_of(config.model.path), gpus=on_gpus):
        raise ConfigError(refusal)


def check_kernels(config: Config, placement: Placement) -> None:
    """Raises ``ConfigError`` if the learner's attention or kernels are named and can't run here."""
    if config.model.kernels == "liger":
        if not any(placement.learner):
            raise ConfigError(
                "model.kernels=liger needs a GPU, and the learner gets none here: set model.kernels=auto"
            )
        if not is_installed("liger_kernel"):
            raise ConfigError(
                f"model.kernels=liger needs the package liger-kernel, which isn't installed: "
                f"`{shown_python()} -m pip install liger-kernel` (the extra tandem-rl[liger]), or set model.kernels=auto"
            )
    attention = config.model.attention
    if attention not in ("flash_attention_2", "flex"):
        return
    if not any(placement.learner):
        raise ConfigError(
            f"model.attention={attention} needs a GPU, and the learner gets none here: set "
            f"model.attention=auto"
        )
    if attention == "flash_attention_2" and not is_installed("flash_attn"):
        raise ConfigError(
            f"model.attention={attention} needs the package flash-attn, which isn't installed: "
            f"`{shown_python()} -m pip install --no-build-isolation flash-attn` (it builds for about an "
            f"hour), or set model.attention=auto, which takes torch's own kernel without it"
        )


def check_addresses(config: Config) -> None:
    """Raises ``ConfigError`` if Redis, ZeroMQ or the weight channel can't bind its address, or too few of
    ``launch.ports`` are free."""
    from ...common.sockets import local_address
    from .redis_server import choose_port

    bind = config.launch.bind
    try:
        ipaddress.ip_address(bind)
    except ValueError:
        raise ConfigError(
            f"launch.bind={bind} is no IP address: name one of this host's, or 127.0.0.1"
        ) from None
    choose_port(bind, None)
    local_address(config.weights_interface)
    if config.launch.port_range is not None:
        check_ports(config, config.launch.port_range)


def ports_wanted(config: Config) -> int:
    """How many of ``launch.ports`` the processes that one host starts may need at a time, Redis' included."""
    workers = workers_of(config)
    served = config.learner.source == "ledger"
    # The learner's control socket, its ranks' meeting point, and one meeting point a worker for weights.
    wanted = 2 + (config.learner.ranks > 1) + workers
    wanted += config.reward.pools if served else 0
    if config.environments.is_on:
        wanted += config.environments.servers + workers
    return wanted


def check_ports(config: Config, ports: range) -> None:
    """Raises ``ConfigError`` if a port that must be free is taken, or too few of the others are free."""
    from ...common.sockets import is_free
    from .redis_server import holder_of

    bind, wanted = config.launch.bind, ports_wanted(config)
    taken = [port for port in ports[1:] if not is_free(bind, port)]
    free = len(ports) - len(taken)
    if free < wanted:
        names = ", ".join(f"{port}{holder_of(port)}" for port in taken[:3])
        named = f" ({names}{', …' if len(taken) > 3 else ''} taken)" if taken else ""
        raise ConfigError(
            f"launch.ports={config.launch.ports} has {free} free ports on {bind}{named}, and this run may need "
            f"{wanted} of them on one host: widen it, or name another range"
        )


def weight_files(path: Path) -> list[Path]:
    """The files that hold a folder's model.

    Raises:
        DataError: its index can't be read.
    """
    files = safetensors_of(path)
    if files is None:  # Whoever loads the model says which is missing.
        files = sorted(path.glob("*.safetensors"))
    return files or sorted(path.glob("pytorch_model*.bin"))


def disk_needed(config: Config, model: Path | None, parameters: int = 0) -> int:
    """Bytes that a run's folder may come to hold, roughly.

    Args:
        config: the run's settings.
        model: the model's folder; None = it isn't here yet.
        parameters: number of its parameters then, if that is known.
    """
    if model is not None:
        # Most published folders have two bytes per parameter, the miniature's has four: assuming the
        # fewest bytes gives the largest count.
        parameters = sum(file.stat().st_size for file in weight_files(model)) // 2
    redis = 2 * (config.replay.maxmemory_mb << 20) // 4
    return checkpoints_bytes(config, parameters) + 4 * parameters + redis + LOG_BYTES


def checkpoints_bytes(config: Config, parameters: int) -> int:
    """Bytes of all checkpoints that are there at a time: one is being written while the others are kept.

    Adapters count alone if the model's sizes are known, and a critic as a model of the policy's size if its own
    aren't.

    Args:
        config: a run's settings.
        parameters: number of parameters of the policy's model.
    """
    learner = config.learner
    shape = None if learner.lora is None else shape_of(config.model.path)
    own = parameters if shape is None else min(parameters, trained(config, shape))
    each = learner.optimizer.saved_bytes * own
    if learner.critic is not None:
        path = learner.critic.model
        shape = None if path is None else shape_of(path, "learner.critic.model")
        count = parameters if shape is None else shape.parameters
        each += learner.critic.optimizer.saved_bytes * count
    return (learner.checkpoints_kept + 1) * each


def check_disk(config: Config, folder: Path, model: Path | None) -> None:
    """Raises ``ConfigError`` if the disk can't hold the run."""
    needed, free = disk_needed(config, model), free_bytes(folder)
    if needed > free:
        raise ConfigError(
            f"the disk of {folder} has {human(free)} free and the run may need {human(needed)} "
            f"(learner.checkpoints_kept={config.learner.checkpoints_kept}): make room, or name a "
            f"folder on another disk with run.dir=…"
        )
