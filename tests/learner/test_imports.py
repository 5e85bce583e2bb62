"""The mathematics needs torch and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

MODULES = (
    "forward.logprobs", "losses.advantages", "losses.aggregation", "losses.finite", "losses.penalties",
    "losses.preferences", "losses.ratios", "losses.shaping", "metrics.diagnostics", "objectives",
    "recipes.as_published", "losses.returns", "recipes.padded", "recipes.sequences", "rows.rows",
)  # fmt: skip
SCRIPT = """
import importlib, sys
import torch

allowed = set(sys.modules) | {{"tandem"}}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in allowed or top in sys.stdlib_module_names:
            return None
        raise ImportError(f"{{name}} is neither torch nor of the standard library")

sys.meta_path.insert(0, Refuse())
for name in {modules!r}:
    importlib.import_module("tandem.learner." + name)
from tandem.learner.objectives import make
assert make("luffy").settings.gamma == 0.1
bad = {{"pydantic", "transformers", "deepspeed", "yaml", "msgpack", "redis"}} & set(sys.modules)
assert not bad, bad
print("all imported")
"""


def test_all_of_it_is_imported_with_torch_alone() -> None:
    code = SCRIPT.format(modules=MODULES)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert ran.stdout.strip() == "all imported", ran.stderr[-2000:]


def test_the_table_needs_not_even_torch() -> None:
    code = (
        "import sys, tandem.common.objectives as o; "
        "assert 'torch' not in sys.modules and 'pydantic' not in sys.modules; print(len(o.OBJECTIVES))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert int(ran.stdout) > 20, ran.stderr


@pytest.mark.parametrize("name", MODULES)
def test_every_public_function_has_a_docstring(name: str) -> None:
    import importlib
    import inspect

    module = importlib.import_module(f"tandem.learner.{name}")
    for attribute, value in vars(module).items():
        own = getattr(value, "__module__", "") == module.__name__
        if own and not attribute.startswith("_") and inspect.isfunction(value):
            assert (value.__doc__ or "").strip(), f"{name}.{attribute}"


def test_a_learners_start_leaves_no_folder_behind_and_loads_no_compiler(tmp_path: Path) -> None:
    code = """
import os, signal, sys, torch
from tandem.learner.engine.zero import prepared
from tandem.learner.rendezvous import Seat, process_group
with process_group(Seat()):
    prepared(torch.device("cpu"))
    from deepspeed.runtime.zero.utils import is_zero_supported_optimizer
    assert not is_zero_supported_optimizer(None)
    assert "deepspeed.runtime.zero.muon.muon_optimizer" in sys.modules
    # Of torch's compiler, which takes two seconds.
    assert "torch._inductor.compile_fx" not in sys.modules
    print(os.environ["TORCH_EXTENSIONS_DIR"], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_EXTENSIONS_DIR"}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=90,
        env={**environment, "TMPDIR": str(tmp_path)},
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr[-2000:]
    # A place of its own all the same: a stranger's build must be neither found nor waited for.
    assert Path(ran.stdout.split()[-1]).parent == tmp_path
    assert list(tmp_path.iterdir()) == []
