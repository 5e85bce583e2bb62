"""Serve a model, or a live run's newest weights, to any client of OpenAI's API: harnesses, agents, people."""

from __future__ import annotations

import argparse
import ipaddress
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.errors import ConfigError, DataError, StoreError
from ...common.run_folder import JoinInfo, RunFolder, existing
from .options import add_run, in_own_dtype, joined, locate, model_settings

if TYPE_CHECKING:
    from ...common.config import Config

KEY = "TANDEM_API_KEY"
"""Environment variable with the clients' key."""
PORT = 8000
REQUEST_SECONDS = 600.0
ANSWERS = 1 << 14
LOADS = 30.0
"""How long a run's Redis may take to answer, seconds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="MODEL or KEY=VALUE",
        help="a Hugging Face folder, a hub name or a shipped model; and any settings, e.g. "
        "model.dtype=bfloat16 rollout.threads=8",
    )
    add_run(parser)
    parser.add_argument(
        "--freeze",
        action="store_true",
        help="of a run: keep the weights that are the newest now",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=PORT, help=f"port; 0 = a free one ({PORT})")
    parser.add_argument("--engine", help="torch or vllm (rollout.engine; default: auto)")
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens of prompt and answer (default: the model's limit, or a run's own longest row)",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"what clients must know; {KEY} keeps it off the list of processes (default: none on "
        f"127.0.0.1, a random one elsewhere, which is printed)",
    )
    parser.add_argument(
        "--request-seconds",
        type=float,
        default=REQUEST_SECONDS,
        metavar="S",
        help=f"how long a request may take ({REQUEST_SECONDS:.0f})",
    )
    parser.add_argument(
        "--answers",
        type=int,
        default=ANSWERS,
        metavar="N",
        help=f"answers that may be under way at a time; clients that ask for more get 429 ({ANSWERS})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves until Ctrl-C or SIGTERM."""
    if not 0 <= arguments.port < 1 << 16:
        raise ConfigError(f"--port {arguments.port}: a port is a number from 0 to 65535")
    if arguments.answers < 1 or arguments.request_seconds <= 0:
        raise ConfigError("--answers and --request-seconds should be above 0")
    _check_address(arguments.host, arguments.port)
    config, join = _config(arguments)
    # The environment is read when torch is loaded, below.
    os.environ.setdefault("OMP_NUM_THREADS", str(config.rollout.threads))
    from ...common.telemetry import start_log
    from ...rollout.endpoint.plain import Limits
    from ...rollout.serving import Serving, serve
    from ..host.preflight import check_model

    check_model(config)
    start_log("serve", config.log.level)
    key, made = _key(arguments)

    def ready(url: str) -> None:
        what = "a run's newest weights" if join is not None else config.model.path
        print(f"serving {what} at {url}/v1", flush=True)
        if made:
            print(f"key: {key}", flush=True)

    code = serve(
        Serving(
            config=config,
            host=arguments.host,
            port=arguments.port,
            key=key,
            limits=Limits(seconds=arguments.request_seconds, answers=arguments.answers),
            join=join,
            freeze=arguments.freeze,
        ),
        ready,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread may still wait for the Redis of a run that has ended.
    os._exit(code)


def _check_address(host: str, port: int) -> None:
    """Refuses an address that can't be listened on before a model is loaded, which may take minutes."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        raise ConfigError(
            f"{host}:{port} can't be listened on ({error.strerror or error}): set --port to 0 or to a free port, "
            f"and --host to an address of this machine"
        ) from None


def _key(arguments: argparse.Namespace) -> tuple[str, bool]:
    """The clients' key, empty for none, and whether it was made here."""
    given = arguments.api_key if arguments.api_key is not None else os.environ.get(KEY, "")
    if arguments.api_key == "" or given != given.strip():
        raise ConfigError("--api-key should be a text without spaces around it")
    if given:
        return given, False
    if _is_loopback(arguments.host):
        return "", False
    return secrets.token_urlsafe(24), True


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _config(arguments: argparse.Namespace) -> tuple[Config, JoinInfo | None]:
    """The settings, whose lengths are those of the endpoint, and how to join the run if there is one."""
    models = [word for word in arguments.words if "=" not in word]
    overrides = [word for word in arguments.words if "=" in word]
    if arguments.engine is not None:
        overrides.append(f"rollout.engine={arguments.engine}")
    if arguments.run is not None or arguments.join is not None:
        if models:
            raise ConfigError(f"{models[0]} beside a run: name one of them")
        return _of_run(arguments, overrides)
    if arguments.freeze:
        raise ConfigError("--freeze is for a run (--run DIR): a model's weights don't change")
    if len(models) != 1:
        raise ConfigError("name one model to serve, or a live run with --run DIR")
    return _of_model(models[0], overrides, arguments.context), None


def _of_model(model: str, overrides: list[str], context: int | None) -> Config:
    from ...common.config import build, read_yaml
    from ...common.models import context_of

    path = Path(model).expanduser()
    if RunFolder(path).run_json.exists():
        raise DataError(
            f"{model} is a run's folder: `tandem serve --run {model}` while it goes on, `tandem serve "
            f"{path / 'model'}` once it has ended"
        )
    beside = RunFolder(path.absolute().parent)
    tree = {"run": {"steps": 1}, "data": {"train": [{"path": ""}]}}
    # A run's own model has the dtype and the engine that it was trained with.
    stored = path.is_dir() and beside.run_json.exists() and beside.config.exists()
    if stored:
        tree = read_yaml(beside.config)
    config = build(tree, overrides, stored=stored)
    named = config.model.model_copy(update={"path": model})
    config = config.model_copy(update={"model": named})
    settings = model_settings(model)
    limit = context_of(settings)
    if limit is None and context is None:
        raise ConfigError(f"{model} doesn't say how long its context is: give --context N")
    if limit is not None and context is not None and context > limit:
        raise ConfigError(f"--context {context}: {model} has a context of {limit} tokens")
    if not stored:
        config = in_own_dtype(config, [settings])
    return _with_context(config, context or limit or 0)


def _of_run(arguments: argparse.Namespace, overrides: list[str]) -> tuple[Config, JoinInfo]:
    from ...common.config import build, to_yaml
    from ...common.config.reading.text import parse_yaml
    from ..run.ending import supervising

    if arguments.run is not None:
        folder = existing(arguments.run)
        if supervising(folder) is None:
            raise DataError(
                f"{arguments.run} isn't going on: `tandem serve {folder.model}` serves its last model"
            )
    join, _ = locate(arguments)
    try:
        store, config = joined(join, "serve", deadline=LOADS)
    except StoreError as error:
        raise StoreError(f"the run can't be joined: {error}") from None
    store.close()
    if overrides:
        config = build(parse_yaml(to_yaml(config), "the run's settings"), overrides)
    if arguments.context is not None:
        config = _with_context(config, arguments.context)
    return config, join


def _with_context(config: Config, context: int) -> Config:
    """The config with room for ``context`` tokens of prompt and answer together."""
    if context < 2:
        raise ConfigError(f"--context {context}: a prompt and an answer have 2 tokens at least")
    lengths = {
        "data": config.data.model_copy(update={"max_prompt_tokens": context - 1}),
        "rollout": config.rollout.model_copy(update={"max_new_tokens": 1}),
    }
    return config.model_copy(update=lengths)
