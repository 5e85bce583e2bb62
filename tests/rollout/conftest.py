"""Fixtures of the rollout room: tiny models, engines by name, a pool that stands in."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing.forkserver
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
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
sys.path[:0] = [str(HERE), str(HERE.parent)]
tiny_models = _beside("rollout_tiny_models", HERE / "tiny_models.py")
stand_in_pool = _beside("rollout_stand_in_pool", HERE / "stand_in_pool.py")
# By its own name: the tests import from it.
_beside("engine_calls", HERE / "engine_calls.py")
_beside("adapter_models", HERE / "adapter_models.py")
_beside("planted_engine", HERE / "planted_engine.py")


OWN_VLLM = ("test_adapters.py", "test_evaluate.py", "test_live_updates.py", "test_vllm_run.py")
"""Test files that start a vLLM of their own; the others share one."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where vLLM's tests are asked for by file, the files that share one vLLM run in one process, which starts it
    once."""
    if config.option.dist != "loadfile" or "vllm" not in config.option.markexpr.split(" and "):
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByVllm(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return file if file.endswith(OWN_VLLM) else "vllm"

    return ByVllm(config, log)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Two threads are slower than one at these sizes."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def forkserver() -> None:
    """Starts what processes of :mod:`forked` are forked from; it loads its libraries beside the test."""
    import forked  # noqa: F401 - says what it loads

    with pytest.MonkeyPatch.context() as patch:
        # Python 3.11 doesn't hand over the path.
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        multiprocessing.forkserver.ensure_running()


@pytest.fixture(scope="session")
def tiny() -> Any:
    """:mod:`tiny_models`."""
    return tiny_models


@pytest.fixture(scope="session")
def pools() -> Any:
    """:mod:`stand_in_pool`."""
    return stand_in_pool


@pytest.fixture(scope="session")
def vllm_module() -> Any:
    """:mod:`vllm_engines`."""
    return _beside("rollout_vllm_engines", HERE / "vllm_engines.py")


@pytest.fixture(scope="session")
def vllm_engines(tmp_path_factory: pytest.TempPathFactory, vllm_module: Any) -> Iterator[Any]:
    """:mod:`vllm_engines` around one vLLM that all tests share: it takes half a minute to start."""
    shared = vllm_module.Shared(tmp_path_factory.mktemp("tiny"), tiny_models)
    yield shared
    shared.close()


@pytest.fixture
def engine_of(request: pytest.FixtureRequest) -> Callable[[str], Callable[..., Any]]:
    """What makes engines of a kind, not yet started, of a transformers model."""

    def choose(kind: str) -> Callable[..., Any]:
        if kind == "vllm":
            make: Callable[..., Any] = request.getfixturevalue("vllm_engines").make
            return make
        return _torch_engines(kind)

    return choose


@pytest.fixture(
    params=[
        "torch-direct",
        "torch-generic",
        pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(300)]),
    ]
)
def new_engine(
    request: pytest.FixtureRequest, engine_of: Callable[[str], Callable[..., Any]]
) -> Callable[..., Any]:
    """Makes an engine, not yet started, of a transformers model: each implementation in turn."""
    return engine_of(request.param)


@pytest.fixture
def without_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM as it was before it said which weights sampled which tokens."""
    from vllm.v1.engine.async_llm import AsyncLLM

    from tandem.rollout.vllm import vllm_requests

    generate = AsyncLLM.generate

    async def silent(self: Any, *given: Any, **how: Any) -> AsyncIterator[Any]:
        async with contextlib.aclosing(generate(self, *given, **how)) as outputs:
            async for output in outputs:
                output.outputs = [_without_versions(one) for one in output.outputs]
                yield output

    monkeypatch.setattr(vllm_requests, "says_versions", lambda _: False)
    monkeypatch.setattr(AsyncLLM, "generate", silent)


def _without_versions(output: Any) -> SimpleNamespace:
    return SimpleNamespace(**{k: v for k, v in vars(output).items() if k != "weight_versions"})


@pytest.fixture(params=["torch-direct", "torch-generic"])
def keyed_engine(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """:func:`new_engine`, of those alone whose noise is keyed."""
    return _torch_engines(request.param)


@pytest.fixture
def repeatable(new_engine: Callable[..., Any]) -> float:
    """A temperature at which the engine repeats its samples: where noise isn't keyed, only 0."""
    return 1.0 if new_engine(tiny_models.model()).keyed_noise else 0.0


def _torch_engines(kind: str) -> Callable[..., Any]:
    from tandem.rollout.decoding.torch_engine import TorchEngine

    def make(model: Any, **settings: Any) -> Any:
        return TorchEngine(
            model,
            tiny_models.tokenizer(),
            decoder=kind.removeprefix("torch-"),
            **settings,
        )

    return make
