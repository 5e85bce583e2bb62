"""Writes the tasks of an environment that has its own as data rows of the form `task`, once.

An environment server never loads data, so the rows of a foreign environment are written before a run: those of
a taskset of verifiers by the Python of its own virtual environment, those of AppWorld from its folder.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...common.config import parse_value
from ...common.config.environments import VerifiersEnvironment
from ...common.errors import ConfigError, TandemError
from ...common.printable import printable
from ...common.run_folder import write_atomic
from ...rollout.environments.verifiers import LAUNCHER, variables_of
from ..wording import shown
from .options import output_file

SECONDS = 3600.0
"""Deadline of a taskset to list its tasks; it may have to download them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=("verifiers", "appworld"), help="whose tasks they are")
    parser.add_argument("--out", metavar="FILE", required=True, help="the JSONL file to write")
    parser.add_argument("--environment", metavar="NAME", help="its name in environments.use")
    parser.add_argument("--count", metavar="N", type=int, help="the first N (default: all)")
    parser.add_argument(
        "--python", metavar="PATH", help="verifiers: the Python of its virtual environment"
    )
    parser.add_argument("--taskset", metavar="ID", help="verifiers: the taskset")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="verifiers: a setting of the taskset, such as game=Wordle-v0",
    )
    parser.add_argument("--root", metavar="DIR", help="appworld: the folder with its `data`")
    parser.add_argument(
        "--split", metavar="NAME", default="train", help="appworld: (default: train)"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.count is not None and arguments.count < 1:
        raise ConfigError(f"--count {arguments.count} should be at least 1")
    # Usually data/NAME.jsonl, and a fresh clone has no such folder.
    Path(arguments.out).expanduser().parent.mkdir(parents=True, exist_ok=True)
    out = output_file(arguments.out)
    if arguments.kind == "verifiers":
        tasks = _of_verifiers(arguments)
    else:
        tasks = _of_appworld(arguments)
    named = {} if arguments.environment is None else {"environment": arguments.environment}
    lines = [json.dumps({**named, "task": task}, ensure_ascii=False) + "\n" for task in tasks]
    if not lines:
        raise TandemError(f"there are no tasks, so {out} isn't written")
    write_atomic(out, "".join(lines))
    print(f"{shown(out.absolute())}: {len(lines)} tasks")
    return 0


def _of_verifiers(arguments: argparse.Namespace) -> Iterator[Mapping[str, Any]]:
    if not arguments.python or not arguments.taskset:
        raise ConfigError("verifiers' tasks need --python and --taskset")
    taskset = {"id": arguments.taskset}
    for setting in arguments.set:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting} should be KEY=VALUE")
        taskset[key] = parse_value(value, f"the value of --set {key}, {value!r},")
    spec = VerifiersEnvironment(python=arguments.python, config={"taskset": taskset})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tasks"
        order = {
            "do": "list",
            "config": dict(spec.config),
            "count": arguments.count,
            "file": str(file),
        }
        try:
            done = subprocess.run(
                [spec.python, "-P", str(LAUNCHER)],
                input=json.dumps(order) + "\n",
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=variables_of(spec),
                text=True,
                errors="replace",
                timeout=SECONDS,
            )
        except OSError as error:
            raise ConfigError(
                f"{spec.python} can't be run ({error.strerror}): --python names the Python of a "
                f"virtual environment that has verifiers"
            ) from None
        except subprocess.TimeoutExpired:
            raise TandemError(f"the taskset wasn't listed within {SECONDS:.0f} s") from None
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if any(map(str.isalnum, line))]
            why = printable(said[-1].strip()[:500]) if said else f"exit code {done.returncode}"
            raise ConfigError(f"the taskset {arguments.taskset} can't be listed: {why}")
        with file.open(encoding="utf-8") as rows:
            for line in rows:
                yield json.loads(line)


def _of_appworld(arguments: argparse.Namespace) -> Iterator[Mapping[str, Any]]:
    file = Path(arguments.root or ".").expanduser() / "data/datasets" / f"{arguments.split}.txt"
    try:
        names = file.read_text(encoding="utf-8").split()
    except OSError as error:
        raise ConfigError(
            f"{file} can't be read ({error.strerror}): --root names the folder in which `appworld download data` "
            f"was run, --split one of its data sets"
        ) from None
    for name in names[: arguments.count]:
        yield {"task_id": name}
