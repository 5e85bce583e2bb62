"""What a preset needs of a machine, what is there, and the command that fixes what isn't.

Starts and writes nothing, and imports no torch: versions are read from the packages' metadata.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.disk import free_bytes
from ...common.errors import TandemError
from ...common.import_path import is_installed
from ...rollout.vllm import vllm_version
from ..plan.hardware import Machine
from ..plan.placement import gpus_left_idle, gpus_needed, place, trackers_of
from ..plan.sizes import local_folder, shape_of, too_long
from ..wording import human, shown_python
from . import surroundings
from .preflight import (
    check_addresses,
    check_model,
    disk_needed,
    eight_bit,
    wants_vllm,
    weight_files,
)
from .surroundings import Finding, pip, setup, version

if TYPE_CHECKING:
    from ...common.config import Config


def examine(
    config: Config,
    machine: Machine,
    folder: Path,
    *,
    beside: bool = True,
    earlier: Sequence[Path] = (),
) -> list[Finding]:
    """Everything that a run of this config may need on this machine.

    Args:
        folder: where the run's folder would be.
        earlier: the folders of the stages before it, which make some of its data.
        beside: include what is the same for every preset.
    """
    own: list[Callable[[], list[Finding]]] = [
        lambda: _gpus(config, machine),
        lambda: _packages(config, machine),
        lambda: _compiler(config, machine),
        lambda: _model(config),
        lambda: _data(config, folder, earlier),
        lambda: _disk(config, folder),
        lambda: _addresses(config),
    ]
    if not beside:
        return [finding for look in own for finding in look()]
    looks: list[Callable[[], list[Finding]]] = [
        surroundings.python,
        lambda: _gpus(config, machine),
        lambda: _packages(config, machine),
        lambda: surroundings.cuda(config, machine),
        surroundings.redis if config.replay.redis_url is None else list,
        lambda: _model(config),
        lambda: _data(config, folder, earlier),
        lambda: _disk(config, folder),
        lambda: _memory(config, machine),
        lambda: surroundings.shared_memory(config),
        lambda: _addresses(config),
        surroundings.open_files,
        surroundings.host_name,
        lambda: _compiler(config, machine),
        lambda: surroundings.tools(config),
    ]
    return [finding for look in looks for finding in look()]


def missing(found: list[Finding]) -> list[Finding]:
    """The findings without which the preset can't run."""
    return [finding for finding in found if finding.state == "missing"]


def on_gpus(config: Config, machine: Machine) -> bool:
    """Whether the run's processes would get GPUs here."""
    if config.launch.gpus == "none":
        return False
    return config.launch.gpus == "required" or len(machine.gpus) >= gpus_needed(config)


def _gpus(config: Config, machine: Machine) -> list[Finding]:
    needed = gpus_needed(config)
    driver = surroundings.driver()
    present = str(machine) + (f", driver {driver}" if driver else "")
    try:
        place(config, machine)
    except TandemError as error:
        if shutil.which("nvidia-smi") is None:
            present += " (and no nvidia-smi)"
        why, _, mend = str(error).partition(": ")[2].partition(f" ({machine}): ")
        return [Finding(name="GPUs", found=present, state="missing", why=why, mend=mend)]
    if idle := gpus_left_idle(config, machine):
        why, _, mend = idle.partition(": ")
        return [Finding(name="GPUs", found=present, state="note", why=why, mend=mend)]
    wanted = {"none": "this preset runs on CPUs", "auto": "used where there are enough"}
    why = wanted.get(config.launch.gpus, f"{needed} are needed")
    return [Finding(name="GPUs", found=present, state="ok", why=why)]


def _packages(config: Config, machine: Machine) -> list[Finding]:
    vllm = wants_vllm(config, gpus=on_gpus(config, machine))
    flash = config.model.attention == "flash_attention_2"
    trackers = trackers_of(config)
    wanted: list[tuple[str, str, str, bool, str]] = [
        ("torch", "torch", "the learner and the torch engine", True, setup()),
        ("transformers", "transformers", "models and tokenizers", True, setup()),
        ("deepspeed", "deepspeed", "the learner", True, setup("--role learner")),
        ("math-verify", "math_verify", "grading", config.learner.source == "ledger", setup()),
        (
            "vllm",
            "vllm",
            "rollout.engine=vllm; auto takes the torch engine without it",
            vllm,
            setup("--vllm"),
        ),
        (
            "flash-attn",
            "flash_attn",
            "model.attention=flash_attention_2; auto takes varlen without it",
            flash,
            f"{shown_python()} -m pip install --no-build-isolation flash-attn",
        ),
        (
            "liger-kernel",
            "liger_kernel",
            "model.kernels=liger; auto takes transformers' operations without it",
            config.model.kernels == "liger",
            pip("liger-kernel"),
        ),
        (
            "bitsandbytes",
            "bitsandbytes",
            "an optimizer adamw_8bit",
            bool(eight_bit(config)),
            pip("bitsandbytes"),
        ),
        ("wandb", "wandb", "log.wandb", "wandb" in trackers, pip("wandb")),
        (
            "tensorboard",
            "tensorboard",
            "log.tensorboard",
            "tensorboard" in trackers,
            pip("tensorboard"),
        ),
    ]
    findings = []
    for name, module, why, needed, mend in wanted:
        there = is_installed(module)
        # The CPU build of vLLM is a package with another name.
        present = version(name) or version(f"{name}-cpu") or ("there" if there else "not installed")
        state = "ok" if there else "missing" if needed else "note"
        wrong = vllm_version.misfit() if there and name == "vllm" else None
        if wrong is not None:
            state, (why, mend) = "missing" if needed else "note", wrong
        findings.append(
            Finding(
                name=name, found=present, state=state, why=why, mend="" if state == "ok" else mend
            )
        )
    return findings


def _compiler(config: Config, machine: Machine) -> list[Finding]:
    compiled = config.model.kernels == "liger" or wants_vllm(config, gpus=True)
    return surroundings.compiler(needed=on_gpus(config, machine) and compiled)


def _addresses(config: Config) -> list[Finding]:
    addresses = f"{config.launch.bind}, weights by {config.weights_interface}"
    try:
        check_addresses(config)
    except TandemError as error:
        return [Finding(name="addresses", found=addresses, state="missing", why=str(error))]
    return [Finding(name="addresses", found=addresses, state="ok")]


def _model(config: Config) -> list[Finding]:
    path = config.model.path
    try:
        shape = shape_of(path)
        folder = check_model(config)
        held = local_folder(path)
    except TandemError as error:
        return [Finding(name="model", found=path, state="missing", why=str(error))]
    problem = too_long(config, shape)
    if problem:
        return [Finding(name="model", found=path, state="missing", why=problem)]
    if folder is not None or held is not None:
        size = f"{shape.parameters:,} parameters, " if shape else ""
        return [Finding(name="model", found=f"{size}{held or folder}", state="ok")]
    size = f" (about {human(2 * shape.parameters)})" if shape else ""
    from ...common.hub import is_offline

    offline = is_offline()
    return [
        Finding(
            name="model",
            found=f"{path} is not on this machine",
            state="missing" if offline else "note",
            why="HF_HUB_OFFLINE is set" if offline else f"is fetched at the start{size}",
            mend=f"hf download {path}",
        )
    ]


def _data(config: Config, folder: Path, earlier: Sequence[Path]) -> list[Finding]:
    from ...common.hub import is_hub_name
    from ...common.run_folder import RunFolder
    from ...replay.forms import data_files

    if config.data.miniature is not None:
        return [Finding(name="data", found="made by the run itself", state="ok")]
    run = RunFolder(folder)
    found = []
    paths = [source.path for source in config.data.train]
    paths += [held_out.path for held_out in config.data.evaluate]
    for path in paths:
        place = run.resolve(path)
        if not place.exists() and any(place.absolute().is_relative_to(one) for one in earlier):
            what = f"{path} is made by an earlier stage"
            found.append(Finding(name="data", found=what, state="note"))
            continue
        if is_hub_name(path, place):
            what = f"{path} is fetched from the hub at the start"
            found.append(Finding(name="data", found=what, state="note"))
            continue
        try:
            count = len(data_files(place))
        except TandemError as error:
            found.append(
                Finding(
                    name="data",
                    found=str(error).partition(": ")[0],
                    state="missing",
                    mend="put it there, or name other files (data.train, data.evaluate)",
                )
            )
            continue
        files = f"{path} ({count} file{'s' * (count > 1)})"
        found.append(Finding(name="data", found=files, state="ok"))
    return found


def disk_wanted(config: Config) -> int:
    """Bytes on disk, including the download of a model that isn't here yet."""
    held = local_folder(config.model.path)
    # A folder may have no more than a config and a tokenizer yet.
    if held is not None and weight_files(held):
        return disk_needed(config, held)
    shape = shape_of(config.model.path)
    if shape is None:
        return disk_needed(config, None)
    # The download, and what a run needs with a model of that size.
    return 2 * shape.parameters + disk_needed(config, None, shape.parameters)


def _disk(config: Config, folder: Path) -> list[Finding]:
    try:
        needed = disk_wanted(config)
    except TandemError:
        return []  # The finding about the model says so.
    free = free_bytes(folder)
    return [
        Finding(
            name="disk",
            found=f"{human(free)} free for {folder}",
            state="ok" if free >= needed else "missing",
            why=f"the run may need {human(needed)} (checkpoints, model, Redis)",
            mend="" if free >= needed else "run.dir=/a/folder/on/another/disk",
        )
    ]


def _memory(config: Config, machine: Machine) -> list[Finding]:
    from ..plan.planning import host_wanted

    try:
        needed = host_wanted(config, machine)
    except TandemError:
        return []
    if needed is None:
        return []
    have = machine.memory_mb << 20
    return [
        Finding(
            name="memory",
            found=f"{human(have)} of main memory",
            state="ok" if have >= needed else "note",
            why=f"the processes may want {human(needed)} on paper",
        )
    ]
