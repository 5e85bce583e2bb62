"""What every test relies on: a quiet environment, the command's path, and one finished run to read."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent  # not resolved: a virtual environment's python is a link
FINISHED_RUN_DEADLINE_S = 400

# Before any test imports torch or starts a process: one thread each (the machine is shared by several
# processes of one run), nothing from the network, the environment's own commands first.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
if str(BIN) not in os.environ.get("PATH", "").split(os.pathsep):
    os.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"


def lists_a_gpu() -> bool:
    """Does ``nvidia-smi`` list a GPU? Asked without importing torch."""
    if shutil.which("nvidia-smi") is None:
        return False
    done = subprocess.run(
        ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False
    )
    return "GPU " in done.stdout


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what this machine cannot run; give readers of the finished run its time."""
    without: dict[str, str] = {}
    if any(item.get_closest_marker("gpu") for item in items) and not lists_a_gpu():
        without["gpu"] = "nvidia-smi lists no GPU"
    if importlib.util.find_spec("vllm") is None:
        without["vllm"] = "vLLM is not installed (bash launch/setup.sh --dev --vllm)"
    for item in items:
        for marker, reason in without.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
        reads_run = "finished_run" in getattr(item, "fixturenames", ())
        if reads_run and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(FINISHED_RUN_DEADLINE_S + 60))


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def tandem_command() -> str:
    """The path of the installed ``tandem`` command."""
    path = BIN / "tandem"
    assert path.exists(), f"{path} is missing: bash launch/setup.sh --dev installs it"
    return str(path)


def _module(stem: str) -> ModuleType:
    name = f"tandem_tests_{stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / f"{stem}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Any]]:
    """Mounts file systems of so many megabytes; skips where this machine doesn't let it."""
    module = _module("small_disk")
    made: list[Any] = []

    def mount(megabytes: int) -> Any:
        made.append(module.SmallDisk(tmp_path / f"disk-{len(made)}", megabytes))
        return made[-1]

    yield mount
    for one in made:
        one.close()


@pytest.fixture(scope="session")
def servers() -> ModuleType:
    """``tests/redis_server.py``: real redis-servers (tests are no package, hence by path)."""
    module = _module("redis_server")
    if module.executable() is None:
        pytest.skip("no redis-server: install it, or the extra tandem-rl[redis-server]")
    return module


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, servers: ModuleType) -> Iterator[Any]:
    """A redis-server that all tests share; each has a run of its own on it."""
    with servers.running(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def own_server(tmp_path: Path, servers: ModuleType) -> Iterator[Any]:
    """A redis-server that a test may kill."""
    with servers.running(tmp_path) as running:
        yield running


@pytest.fixture(scope="session", autouse=True)
def own_torch_extensions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Builds that a killed process left locked in the shared cache would hang these tests."""
    key = "TORCH_EXTENSIONS_DIR"
    if key in os.environ:
        yield
        return
    os.environ[key] = str(tmp_path_factory.mktemp("torch-extensions"))
    yield
    del os.environ[key]


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, tandem_command: str) -> Path:
    """The folder of a finished run of the miniature, made once for all stages; read it, never write.

    ``tests/stages.py`` names a place in TANDEM_TEST_RUNS that its stages share; without it, each
    session of pytest makes its own.
    """
    shared = os.environ.get("TANDEM_TEST_RUNS")
    place = Path(shared) if shared else tmp_path_factory.mktemp("runs")
    folder, complete = place / "miniature", place / "miniature.complete"
    place.mkdir(parents=True, exist_ok=True)
    with (place / "miniature.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of pytest may be making it
        if complete.exists():
            return folder
        with (place / "miniature.log").open("w+") as log:
            done = subprocess.run(
                [tandem_command, "start", "miniature", f"run.dir={folder}"],
                cwd=place,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=FINISHED_RUN_DEADLINE_S,
                check=False,
            )
            log.seek(0)
            assert done.returncode == 0, f"tandem start miniature failed:\n{log.read()[-4000:]}"
        complete.touch()
    return folder
