"""One process group for DeepSpeed, and the stand-ins of ``made_up.py``."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

torch.set_num_threads(1)
TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))


def load(path: Path) -> ModuleType:
    """A module that stands in ``tests/``, which is no package."""
    known = f"tandem_tests_{path.parent.name}_{path.stem}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[known] = module
        spec.loader.exec_module(module)
    return sys.modules[known]


@pytest.fixture(scope="session")
def made_up() -> ModuleType:
    """``made_up.py``."""
    return load(TESTS / "learner" / "made_up.py")


@pytest.fixture(scope="session")
def many() -> ModuleType:
    """``many_ranks.py``."""
    return load(TESTS / "learner" / "many_ranks.py")


@pytest.fixture(scope="session")
def states() -> ModuleType:
    """``rank_of_states.py``."""
    return load(TESTS / "learner" / "rank_of_states.py")


@pytest.fixture(scope="session")
def written(
    tmp_path_factory: pytest.TempPathFactory, many: ModuleType, states: ModuleType, group: None
) -> Path:
    """Checkpoints of one and of two ranks at every stage, the models, and what came of each checkpoint at every stage
    of the other number of ranks."""
    place: Path = tmp_path_factory.mktemp("states")
    states.go_through(place, 1, sources=0)
    many.start("rank_of_states.py", 2, place)
    states.go_through(place, 1, sources=2, fresh=False)
    return place


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory, made_up: ModuleType) -> Path:
    """The folder of a tiny model with the miniature's tokenizer, as a base is, and one more chat template."""
    from tandem.common.models import resolve

    folder: Path = tmp_path_factory.mktemp("base")
    made_up.tiny_model().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(resolve("miniature")) / name, folder / name)
    # Where transformers keeps the chat templates of a tokenizer that has several.
    further = folder / "additional_chat_templates"
    further.mkdir()
    (further / "tools.jinja").write_text("{{ tools }}")
    return folder


@pytest.fixture(scope="session")
def hand() -> ModuleType:
    """``hand_made.py``."""
    return load(TESTS / "learner" / "hand_made.py")


@pytest.fixture(scope="session")
def formula() -> ModuleType:
    """``by_the_formula.py``."""
    return load(TESTS / "learner" / "by_the_formula.py")


@pytest.fixture(scope="session")
def plain() -> ModuleType:
    """``in_float64.py``."""
    return load(TESTS / "learner" / "in_float64.py")


@pytest.fixture(scope="session")
def parity() -> ModuleType:
    """``parity.py``."""
    return load(TESTS / "learner" / "parity.py")


@pytest.fixture(scope="session")
def group() -> Iterator[None]:
    """The process group of one rank, in which this process may make DeepSpeed engines."""
    pytest.importorskip("deepspeed")
    import peft  # noqa: F401
    import torch._dynamo  # noqa: F401
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    from tandem.learner.rendezvous import Seat, process_group

    before = dict(os.environ)
    # DeepSpeed looks for garbage several times while it makes an engine: half a second each time, if it looks through
    # all that is loaded.
    gc.freeze()
    # As for a role: some libraries report what isn't freed at the end. Before it pytest looks for garbage, too.
    atexit.register(gc.unfreeze)
    with process_group(Seat()):
        yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
