"""The ``tandem`` command: finds the sub-command, and shows a user's error as one line.

Nothing heavy is imported before the sub-command is known, so that ``tandem --help`` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..common.errors import ConfigError
from ..common.printable import guard_output
from .failures import tell
from .wording import nearest

COMMANDS: dict[str, str] = {
    "start": "start or resume a whole run on this host",
    "plan": "what a preset needs of a node: memory, time, processes; starts nothing",
    "doctor": "what this machine lacks for a preset, and the command that fixes it",
    "offline": "train on stored expert traces, without rollout workers",
    "sweep": "a preset with several values of its settings and several seeds, as one table",
    "evaluate": "accuracy of models on benchmarks, with every sample kept",
    "compare": "two evaluations of the same problems, paired by problem",
    "judge": "ask another model about an evaluation's samples",
    "serve": "a model, or a live run's newest weights, behind OpenAI's API",
    "view": "read an evaluation's or a run's samples in Inspect's viewer",
    "get": "download a model or a data set into a local folder, and verify it",
    "ingest": "check data files, count what can't be used, write them in another form",
    "tasks": "write the tasks of verifiers' tasksets or of AppWorld as data rows, once",
    "grade": "grade completions in a file, by any mode and reward",
    "status": "the state of a run: ledger, members, versions, restarts, memory, disk",
    "retry": "put groups that were given up back into the ledger",
    "archive": "write every group that a run has trained on, as parquet",
    "export": "write the model of a run's newest checkpoint, even if the run can't go on",
    "track": "send a run's metrics to W&B or TensorBoard",
    "callbacks": "call a run's own callbacks, as `tandem start` does",
    "stop": "drain and checkpoint a run, as Ctrl-C in its terminal does",
    "join": "processes of one role on another host: started, restarted and drained there",
    "rollout": "one rollout worker, by hand or on another host",
    "environments": "one environment server, by hand or on another host",
    "reward": "one reward pool, by hand or on another host",
    "learner": "one learner rank, by hand",
    "cluster": "write scripts for Slurm, manifests for Kubernetes, or a task for SkyPilot",
    "health": "whether this host's part of a run is well, for probes",
    "join-file": "write the file that lets another host join a run",
    "presets": "list the presets",
    "config": "print the resolved settings of a preset, with their meaning",
    "make-base": "a base model for long thoughts: longer context, think tokens",
    "make-miniature": "write the miniature's problems and traces, or make its base model",
}
"""Sub-command to its line in the help; ``commands/<name>.py`` implements it."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are shown like every other user error."""

    def error(self, message: str) -> NoReturn:
        """Raises ``ConfigError`` instead of printing the usage and exiting."""
        raise ConfigError(f"{message} (`{self.prog} --help` lists what it takes)")


def usage() -> str:
    """The text of ``tandem --help``."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{about}" for name, about in COMMANDS.items()]
    return "\n".join(
        [
            "usage: tandem COMMAND [ARGS ...]",
            "",
            "Asynchronous reinforcement learning for language models. `tandem start` alone trains",
            "the miniature: a whole run on two CPU cores in about a minute.",
            "",
            *lines,
            "",
            "`tandem COMMAND --help` shows the options of one.",
        ]
    )


def dispatch(arguments: Sequence[str]) -> int:
    """Runs one sub-command and returns its exit code.

    Raises:
        TandemError: the user should read its message as one line.
    """
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    name, *rest = arguments
    if name in ("--version", "-V"):
        from importlib.metadata import version

        print(f"tandem {version('tandem-rl')}")
        return 0
    if name not in COMMANDS:
        raise ConfigError(f"unknown command {name!r}{nearest(name, list(COMMANDS))}")
    command = importlib.import_module(f"tandem.launch.commands.{name.replace('-', '_')}")
    parser = Parser(prog=f"tandem {name}", description=command.__doc__, allow_abbrev=False)
    command.add_arguments(parser)
    return int(command.run(parser.parse_intermixed_args(rest)))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code; a user's error is one line on standard error."""
    guard_output()
    words = sys.argv[1:] if argv is None else argv
    try:
        code = dispatch(words)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        told = tell(error, words)
        if told is None:
            raise
        return told
    return code


if __name__ == "__main__":
    sys.exit(main())
