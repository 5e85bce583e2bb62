"""Run one reward pool that joins a run, on this host or another one."""

from __future__ import annotations

import argparse

from .options import add_drain, drain_of
from .roles import add_arguments as add_role_arguments
from .roles import run_role


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_role_arguments(parser)
    add_drain(parser)


def run(arguments: argparse.Namespace) -> int:
    """Works until the run has ended or it is asked to drain."""
    return run_role("reward", arguments, drain=drain_of(arguments))
