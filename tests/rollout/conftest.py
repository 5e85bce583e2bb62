"""Fixtures of the rollout room: tiny models, engines by name, a pool that stands in."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _beside(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


HERE = Path(__file__).resolve().parent
tiny_models = _beside("rollout_tiny_models", HERE / "tiny_models.py")
stand_in_pool = _beside("rollout_stand_in_pool", HERE / "stand_in_pool.py")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Two threads are slower than one at these sizes."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> Any:
    """:mod:`tiny_models`."""
    return tiny_models


@pytest.fixture(scope="session")
def pools() -> Any:
    """:mod:`stand_in_pool`."""
    return stand_in_pool


@pytest.fixture(params=["torch-direct", "torch-generic"])
def new_engine(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Makes an engine, not yet started, of a transformers model: each implementation in turn."""
    from tandem.rollout.torch_engine import TorchEngine

    def make(model: Any, **settings: Any) -> Any:
        return TorchEngine(
            model,
            tiny_models.tokenizer(),
            decoder=request.param.removeprefix("torch-"),
            **settings,
        )

    return make
