"""One rank of the learner: it makes the engine, and then leads the other ranks or follows."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from ..common.config import Config
from ..common.config.checks.choices import micro_batch_refusal
from ..common.errors import ConfigError, DamagedError, DataError, FencedError, RunFailedError
from ..common.memory import keep_freed, telling_parts
from ..common.models import load_class, load_model, warn_of_slow_bfloat16
from ..common.parts import parts
from ..common.run_folder import JoinInfo, RunFolder
from ..replay.connection import connect
from ..replay.store import RunStore
from .engine.critic import load_critic
from .engine.deepspeed_engine import DeepSpeedEngine
from .engine.memory import MemoryWatch, load_libraries
from .engine.zero import deepspeed_for
from .loop.stop_signal import StopSignal
from .loop.trainer import Trainer
from .objectives.configured import check_own
from .ranks import Leader, follow
from .rendezvous import Seat, device_of, process_group
from .resume.checkpoints import what_is_left
from .resume.far_files import CheckpointFiles
from .updates.updates import Updates


def main(
    join: JoinInfo,
    config: Config,
    *,
    name: str,
    folder: RunFolder | None,
    seat: Seat | None = None,
    scratch: Path | None = None,
) -> int:
    """Runs one rank of the learner; returns the exit code.

    Returns 0 when the run is finished, and after SIGTERM, once the current step is done and a
    checkpoint is written.

    Args:
        join: how to join the run.
        config: the run's config.
        name: member id.
        folder: the run's folder, which rank 0 must have.
        seat: this rank's place; None = it is alone.
        scratch: a folder of this host's for what a rank without the run's folder keeps for a while.

    Raises:
        TandemError: the run can't go on; the message says why.
    """
    seat = seat or Seat()
    if folder is None and seat.rank == 0:
        raise DataError(
            "the learner keeps its journal and checkpoints in the run's folder: give --run DIR"
        )
    place = folder.path if folder is not None else scratch or Path(tempfile.gettempdir())
    stop = StopSignal(heed=seat.rank == 0)
    device = prepare(config, seat.local_rank)
    with process_group(seat, config.weights_interface if config.may_use_nccl else None):
        updates = build(config, device, folder.reference if folder else place / "reference")
        files = CheckpointFiles.agreed(
            config.learner.checkpoints,
            folder.checkpoints if folder is not None and seat.rank == 0 else None,
            place,
            local_rank=seat.local_rank,
            several_hosts=config.learner.hosts > 1,
        )
        with telling_parts(updates.engine.memory.parts):
            if folder is not None and seat.rank == 0:
                _lead(join, config, name, folder, updates, files, stop)
            else:
                first = seat.rank > 0 and seat.local_rank == 0
                follow(updates.engine, updates, files, first_of_host=first)
    return 0


def load(config: Config) -> None:
    """Loads the libraries that :func:`main` will need."""
    deepspeed_for(device_of(0))
    load_class(config.model.path)


def _lead(
    join: JoinInfo,
    config: Config,
    name: str,
    folder: RunFolder,
    updates: Updates,
    files: CheckpointFiles,
    stop: StopSignal,
) -> None:
    # What older versions have begun goes on.
    if not parts(folder.journal):
        check_own(updates.objective, config)
    leader = Leader(updates.engine, updates, files)
    store = connect(join, name=name)
    try:
        Trainer(store, join, config, name, folder, leader, stop).run()
    except FencedError:
        # A newer learner owns the run's state, so this one leaves without touching it.
        raise
    except DamagedError as error:
        raise DamagedError(f"{error}. {what_is_left(folder)}") from None
    except RunFailedError:
        RunStore(store).set_state("failed")
        raise
    finally:
        store.close()
    leader.stop()


def prepare(config: Config, local_rank: int) -> torch.device:
    """Sets this process up as a rank of the learner; returns its device."""
    # Otherwise OMP_NUM_THREADS says it, which this process was started with.
    if config.learner.threads is not None:
        torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.run.seed)
    device = device_of(local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed()
    return device


def build(config: Config, device: torch.device, reference_folder: Path | None) -> Updates:
    """Loads the models of a run and makes this rank's engine; the process group must exist.

    Args:
        config: the run's config.
        device: this rank's device.
        reference_folder: where the reference's log-probs of stored rows are kept; None = nowhere.
    """
    load_libraries(device)
    warn_of_slow_bfloat16("model.dtype", config.model.dtype, device)
    memory = MemoryWatch(device)
    model = load_model(
        config.model.path,
        dtype=config.model.dtype,
        attention=config.model.attention,
        device=device,
    )
    vocabulary = model.config.get_text_config().vocab_size
    critic = load_critic(config, device, vocabulary)
    engine = DeepSpeedEngine(model, config, device, critic, memory)
    updates = Updates(engine, config, reference_folder=reference_folder)
    _check_unit(updates, config)
    return updates


def _check_unit(updates: Updates, config: Config) -> None:
    """Refuses a micro-batch that is too small for the unit of a user's own objective, which only the
    objective itself knows."""
    unit, name = updates.objective.unit, config.learner.objective.name
    if unit != "row" and (refusal := micro_batch_refusal(config, unit=unit, what=name)):
        raise ConfigError(refusal)
