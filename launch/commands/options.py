"""Command-line options that several sub-commands share. Imports nothing heavy."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.errors import ConfigError, DataError
from ...common.run_folder import JoinInfo, RunFolder, existing, read_join
from ..plan.hardware import oldest_capability

if TYPE_CHECKING:
    from ...common.config import Config
    from ...replay.connection import Store


def add_preset_words(parser: argparse.ArgumentParser, *, default: str) -> None:
    """``[PRESET] [KEY=VALUE …]``."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="PRESET or KEY=VALUE",
        help=f"a preset's name (default: {default}) or the path of your own .yaml, and any "
        f"settings, e.g. run.steps=20 (`tandem config` lists them)",
    )


def add_start_options(parser: argparse.ArgumentParser, *, default: str) -> None:
    """``[PRESET] [KEY=VALUE …] [--fresh] [--plain] [--dry-run]``."""
    add_preset_words(parser, default=default)
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start over: an existing run's folder is moved aside (<dir>.1, …), never deleted",
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="lines instead of the live view (as without a terminal, or with TERM=dumb)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the processes, their GPUs, commands and memory; start and write nothing",
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """``--run DIR`` or ``--join FILE``."""
    parser.add_argument("--run", metavar="DIR", help="the run's folder, on this host")
    parser.add_argument("--join", metavar="FILE", help="the file that `tandem join-file` wrote")


def locate(arguments: argparse.Namespace) -> tuple[JoinInfo, RunFolder | None]:
    """How to join the run that ``--run`` or ``--join`` names, and its folder if it is on this host.

    Raises:
        ConfigError: both or neither were given.
        DataError: the folder or the file isn't there.
    """
    if (arguments.run is None) == (arguments.join is None):
        raise ConfigError("name the run with one of --run DIR and --join FILE")
    if arguments.join is not None:
        return read_join(Path(arguments.join)), None
    folder = existing(arguments.run)
    return read_join(folder.join), folder


def add_drain(parser: argparse.ArgumentParser) -> None:
    """``--drain SECONDS``."""
    parser.add_argument(
        "--drain",
        type=float,
        metavar="SECONDS",
        help="time to finish what is under way after SIGTERM or Ctrl-C, less than the scheduler's own grace "
        "(default: launch.drain_seconds, which is the most for `tandem join`)",
    )


def drain_of(arguments: argparse.Namespace) -> float | None:
    """``--drain``; None if it wasn't given.

    Raises:
        ConfigError: it isn't a time.
    """
    seconds: float | None = arguments.drain
    if seconds is not None and not 0 < seconds < float("inf"):
        raise ConfigError(f"--drain {seconds:g} should be over 0 seconds, and finite")
    return seconds


def add_folder(parser: argparse.ArgumentParser) -> None:
    """``[DIR]`` or ``--run DIR``."""
    parser.add_argument("dir", metavar="DIR", nargs="?", help="default: the newest in runs/")
    parser.add_argument("--run", metavar="DIR", help="the same")


def named_folder(arguments: argparse.Namespace) -> RunFolder:
    """The folder that :func:`add_folder`'s arguments name, or the newest one.

    Raises:
        ConfigError: both were given.
        DataError: there is no such run.
    """
    if arguments.dir is not None and arguments.run is not None:
        raise ConfigError(f"name one run: {arguments.dir} or --run {arguments.run}")
    path = arguments.dir or arguments.run
    return existing(path) if path else newest_run()


def output_file(name: str) -> Path:
    """A file that is to hold the result of what begins now, looked at before the work is done.

    Raises:
        DataError: it is a folder, or its folder isn't there.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        raise DataError(f"{path} is a folder: name the file to write")
    if not path.absolute().parent.is_dir():
        raise DataError(f"{path.parent} isn't a folder: create it first")
    return path


def newest_run() -> RunFolder:
    """The folder under ``runs/``, or one level deeper, whose run was started or changed last.

    Raises:
        DataError: there is no run.
    """
    runs = Path("runs")
    found = [*runs.glob("*/run.json"), *runs.glob("*/*/run.json")]
    found.sort(key=lambda path: path.stat().st_mtime)
    if not found:
        raise DataError(f"there is no run under {runs}/: name its folder, or `tandem start` one")
    return RunFolder(found[-1].parent)


def joined(join: JoinInfo, name: str, deadline: float = 30.0) -> tuple[Store, Config]:
    """Connects to a run and reads its config.

    Raises:
        StoreError: Redis can't be reached or refuses the password, or holds no such run.
    """
    from ...common.config import read_config
    from ...replay.connection import connect
    from ...replay.store import RunStore

    store = connect(join, deadline=deadline, name=name)
    return store, read_config(RunStore(store).config_yaml())


def model_settings(model: str) -> dict[str, Any]:
    """A model's ``config.json``, fetched from the hub where it isn't here.

    Raises:
        DataError: it can't be read.
    """
    from ...common.models import read_model_config, unreadable

    settings = read_model_config(model)
    if not settings:
        from transformers import AutoConfig

        # The name of a model on a hub, from where the engine gets it too.
        try:
            settings = AutoConfig.from_pretrained(model).to_dict()
        except (OSError, ValueError) as error:
            raise DataError(unreadable(model, "config", error)) from None
    return settings


def in_own_dtype(config: Config, settings: Iterable[Mapping[str, Any]]) -> Config:
    """The config with the dtype of the models' own ``config.json`` where no setting names one.

    It is float32 where models differ or name none, and on a CPU or GPU that is slow in theirs.

    Args:
        config: the config.
        settings: :func:`model_settings` of each model, which are read only if they are needed.
    """
    if "dtype" in config.model.model_fields_set or config.rollout.dtype is not None:
        return config
    stored = set(map(_stored_dtype, settings))
    dtype = stored.pop() if len(stored) == 1 else "float32"
    if dtype != "float32":
        # The environment is read when torch is loaded.
        os.environ.setdefault("OMP_NUM_THREADS", str(config.rollout.threads))
        import torch

        from ...common.models import has_fast_bfloat16

        if torch.cuda.is_available():
            # GPUs before Ampere have no instructions for it, and vLLM refuses it there.
            fast = dtype == "float16" or (oldest_capability() or 8.0) >= 8.0
        else:
            fast = dtype == "bfloat16" and has_fast_bfloat16()
        dtype = dtype if fast else "float32"
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


def _stored_dtype(settings: Mapping[str, Any]) -> str:
    text = settings.get("text_config")
    for part in (settings, text if isinstance(text, dict) else {}):
        dtype = part.get("dtype") or part.get("torch_dtype")
        if dtype in ("float32", "bfloat16", "float16"):
            return str(dtype)
    return "float32"
