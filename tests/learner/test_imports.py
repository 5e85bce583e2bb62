"""The mathematics needs torch and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = (
    "advantages", "aggregation", "diagnostics", "finite", "logprobs", "mixing", "objectives",
    "padded", "penalties", "published", "preferences", "ratios", "returns", "rows", "sequences", "shaping",
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
