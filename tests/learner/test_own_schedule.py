"""A user's own learning-rate schedule: its factors, the process that computes them, and what is refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tandem.common.config import OptimizerConfig
from tandem.common.errors import ConfigError
from tandem.learner.loop import own_schedule
from tandem.learner.loop.schedule import factors_of, learning_rate

MODULE = """
import atexit, math, os, sys, time
import numpy as np
print("a module may print")
pid = os.getpid()
calls = []

def cosine(step, total_steps):
    return (1 + math.cos(math.pi * step / total_steps)) / 2

def single(step, total_steps):
    return np.float32(1) / np.float32(step)

def early(step, total_steps):
    return 1 / (step - 3)

def counting(step, total_steps):
    calls.append(step)
    return len(calls)

def negative(step, total_steps):
    return 5 - step

def endless(step, total_steps):
    return math.inf if step == 4 else 1

def nothing(step, total_steps):
    pass

def ends(step, total_steps):
    os._exit(3)

def hangs(step, total_steps):
    while True:
        pass

number = 1.0
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_schedules.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


def own(name: str, **more: object) -> OptimizerConfig:
    return OptimizerConfig(lr=0.5, schedule=f"my_schedules:{name}", **more)


def test_the_rates_are_lr_times_the_functions_factors_after_the_warm_up() -> None:
    import math

    optimizer = own("cosine", warmup_steps=2)
    factors = factors_of(optimizer, 10)
    rates = [learning_rate(optimizer, step, 10, factors) for step in range(1, 11)]
    after = [0.5 * ((1 + math.cos(math.pi * step / 10)) / 2) for step in range(3, 11)]
    assert rates == [0.25, 0.5, *after]


def test_the_module_is_imported_by_another_process_alone() -> None:
    assert factors_of(own("single"), 4) == [1.0, 0.5, 1 / 3 + 9.934107462565104e-09, 0.25]
    assert "my_schedules" not in sys.modules


def test_steps_of_the_warm_up_are_not_asked_for() -> None:
    assert factors_of(own("early", warmup_steps=3), 5) == [1.0, 0.5]
    with pytest.raises(ConfigError, match=r"at step 3 of 5, raised ZeroDivisionError: .*my_sched"):
        factors_of(own("early", warmup_steps=2), 5)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("counting", r"returned 5\.0 and then 6\.0 at step 5 of 5: .* its arguments alone"),
        ("nothing", r"at step 1 of 5, returned None: it should return the factor"),
        ("endless", r"at step 4 of 5, returned inf"),
        ("ends", r"ended with exit code 3 and without an answer"),
        ("number", r"isn't a function: 1\.0"),
        ("unknown", r"can't be imported: AttributeError"),
    ],
)
def test_a_bad_function_is_refused_with_step_and_reason(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"schedule=my_schedules:{name}.*{said}"):
        factors_of(own(name), 5)


def test_a_negative_factor_is_refused_wherever_it_comes() -> None:
    assert factors_of(own("negative"), 5) == [4.0, 3.0, 2.0, 1.0, 0.0]
    with pytest.raises(ConfigError, match=r"at step 6 of 6, returned -1\.0"):
        factors_of(own("negative"), 6)


def test_a_function_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # The same program with a shorter time.
    text = Path(own_schedule.__file__).read_text()
    assert "\nSECONDS = 60\n" in text
    hasty = tmp_path / "hasty.py"
    hasty.write_text(
        text.replace("\nSECONDS = 60\n", "\nSECONDS = 1\n").replace("...common", "tandem.common")
    )
    monkeypatch.setattr(own_schedule, "__name__", "hasty")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    with pytest.raises(ConfigError, match=r"schedule=my_schedules:hangs: .* in 60 s"):
        factors_of(own("hangs"), 5)


def test_the_table_is_kept_and_a_changed_function_is_refused(tmp_path: Path) -> None:
    kept = tmp_path / "schedule.json"
    first = factors_of(own("cosine"), 4, kept)
    assert json.loads(kept.read_text())["factors"] == first
    assert factors_of(own("cosine"), 4, kept) == first
    module = tmp_path / "my_schedules.py"
    module.write_text(MODULE.replace("/ total_steps)) / 2", "/ total_steps)) / 2 + (step > 2)"))
    with pytest.raises(ConfigError, match=r"is 1\.14\d+ at step 3 and was 0\.14\d+ when the run"):
        factors_of(own("cosine"), 4, kept)
    # With more steps it is another table, as every schedule is another one then.
    assert len(factors_of(own("cosine"), 6, kept)) == 6
    assert json.loads(kept.read_text())["last_step"] == 6


def test_a_name_that_is_neither_built_in_nor_a_path_is_refused() -> None:
    with pytest.raises(ValueError, match=r"constant, linear, cosine, or an import path"):
        OptimizerConfig(schedule="polynomial")


def test_the_critics_schedule_is_refused_by_its_own_name() -> None:
    from tandem.common.config import LearnerConfig
    from tandem.learner.loop.schedule import both_factors, learning_rates

    made = {
        "objective": {"name": "ppo"},
        "critic": {"optimizer": {"lr": 1.0, "schedule": "my_schedules:single"}},
    }
    learner = LearnerConfig.model_validate(made)
    assert learning_rates(learner, 2, 4, both_factors(learner, 4))[1] == 0.5
    made["critic"]["optimizer"]["schedule"] = "my_schedules:nothing"
    with pytest.raises(
        ConfigError, match=r"learner\.critic\.optimizer\.schedule=my_schedules:nothing, at"
    ):
        both_factors(LearnerConfig.model_validate(made), 4)


def test_the_critics_table_is_kept_beside_the_policys(tmp_path: Path) -> None:
    from tandem.common.config import LearnerConfig
    from tandem.learner.loop.schedule import both_factors

    optimizers = [{"schedule": f"my_schedules:{name}"} for name in ("single", "cosine")]
    made = {
        "objective": {"name": "ppo"},
        "optimizer": optimizers[0],
        "critic": {"optimizer": optimizers[1]},
    }
    learner, file = LearnerConfig.model_validate(made), tmp_path / "schedule.json"
    factors = both_factors(learner, 4, file)
    names = ("schedule.json", "critic-schedule.json")
    assert tuple(json.loads((tmp_path / name).read_text())["factors"] for name in names) == factors
    changed = MODULE.replace("/ total_steps)) / 2", "/ total_steps)) / 2 + (step > 2)")
    (tmp_path / "my_schedules.py").write_text(changed)
    with pytest.raises(
        ConfigError,
        match=r"learner\.critic\.optimizer\.schedule=my_schedules:cosine is .* at step 3",
    ):
        both_factors(learner, 4, file)
