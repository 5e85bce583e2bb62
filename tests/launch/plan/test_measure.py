"""``tandem plan --measure``: a real step beside the plan's figures, and too little memory for it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable

import pytest

from tandem.common.config import Config
from tandem.common.longest_pass import longest_pass
from tandem.launch.plan.advice import ways_out
from tandem.launch.plan.comparison import compare, speed_on_paper
from tandem.launch.plan.node import Node
from tandem.launch.plan.sizes import shape_of
from tandem.launch.run.opened.presets import load

COUNTED = ("weights", "gradients", "optimizer")
"""Parts that a measurement counts tensor by tensor."""


def plan(*words: str, before: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "tandem.launch.cli", "plan", *words],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        preexec_fn=before,
    )


def test_what_can_be_counted_is_what_the_plan_says() -> None:
    done = plan("miniature", "--measure", "--json", "learner.gradient_checkpointing=true")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["measured"]
    assert set(found["paper"]) == set(found["measured"]) == {*COUNTED, "activations", "runtime"}
    for part in COUNTED:
        assert found["measured"][part] == pytest.approx(found["paper"][part], rel=0.01), part
    # A machine's libraries differ; a step that holds twice the plan's memory means a wrong formula.
    assert 0.5 < found["ratio"] < 2
    wanted = longest_pass(load("miniature").resolve([]))
    assert (found["step"]["rows"], found["step"]["row_tokens"]) == (wanted.rows, wanted.width + 1)
    assert found["step"]["applied"]
    assert found["tokens_per_second"] > 0
    assert any("weight staging" in note for note in found["notes"])


def test_nothing_is_measured_where_nothing_is_trained() -> None:
    done = plan("miniature", "--measure", "learner.train=false")
    assert done.returncode == 2
    assert "with learner.train=false it makes none: leave out --measure" in done.stderr


def limited() -> None:
    # Enough for the libraries and the model, and much less than the step would take.
    resource.setrlimit(resource.RLIMIT_DATA, (1500 << 20, 1500 << 20))


@pytest.mark.skipif(sys.platform != "linux", reason="the limit counts all memory on Linux alone")
def test_too_little_memory_is_told_with_what_would_free_most() -> None:
    large = ("replay.groups_per_step=512", "learner.micro_batch_tokens=350000")
    done = plan("miniature", "--measure", *large, before=limited)
    assert done.returncode == 1, done.stdout
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("tandem: no memory is left for the learner's longest step: it asked for")
    assert "it holds libraries 0." in line
    named = [f"{name} (" for name, _ in ways_out(config(*large), "learner", "cpu", 0)]
    assert named[0] == "learner.gradient_checkpointing=true ("
    places = [line.index(name) for name in named]
    assert places == sorted(places)


def config(*overrides: str, name: str = "miniature") -> Config:
    return load(name).resolve(list(overrides))


def test_ways_out_are_ordered_and_only_those_that_free_something() -> None:
    on_gpu = ways_out(config(name="qwen2.5-math-7b-luffy-8gpu"), "learner", "cuda", 80 << 30)
    freed = [size for _, size in on_gpu]
    assert freed == sorted(freed, reverse=True)
    assert min(freed) > 0
    names = [name for name, _ in on_gpu]
    # It recomputes activations already.
    assert "learner.gradient_checkpointing=true" not in names
    assert "learner.zero_stage=3" in names
    engine = ways_out(config(name="qwen2.5-0.5b-grpo-1gpu"), "rollout", "cuda", 80 << 30)
    assert engine == [("rollout.vllm.gpu_memory_utilization=0.25", 8 << 30)]


def test_a_setting_with_which_the_run_would_not_start_is_no_way_out() -> None:
    def halves(*overrides: str) -> bool:
        # 16 rows of 1,023 tokens; a pass of half as many takes less memory.
        of_one_pass = config(
            "replay.groups_per_step=2",
            "learner.micro_batch_tokens=16384",
            "learner.gradient_checkpointing=false",
            *overrides,
            name="qwen2.5-0.5b-grpo-1gpu",
        )
        found = ways_out(of_one_pass, "learner", "cuda", 80 << 30)
        return any(name == "learner.micro_batch_tokens=8192" for name, _ in found)

    assert halves("learner.zero_stage=2")
    # It would add up two passes' gradients in bfloat16.
    assert not halves("learner.zero_stage=0")


def test_several_ranks_are_compared_as_one_and_it_is_said() -> None:
    shape = shape_of("miniature")
    assert shape is not None
    step = {
        "device": "cpu",
        "parts": dict.fromkeys([*COUNTED, "activations", "runtime"], 1 << 20),
        "forward_tokens": 500,
        "seconds": 0.25,
        "applied": True,
        "rows": 4,
        "row_tokens": 10,
        "micro_batches": 1,
    }
    found = compare(config("learner.ranks=2", "learner.zero_stage=2"), shape, step)
    # One rank of float32 divides nothing: 4, 4 and 8 bytes a parameter.
    sizes = [found.paper[part] for part in COUNTED]
    assert sizes == [4 * shape.parameters, 4 * shape.parameters, 8 * shape.parameters]
    assert found.tokens_per_second == 2000
    assert any("learner.ranks=2" in note for note in found.notes)
    assert any("2,000 tokens/s" in line for line in found.lines())
    assert found.paper_tokens_per_second is None  # No speed is known of a CPU.


def test_the_speed_on_paper_is_that_of_one_rank_on_a_gpu() -> None:
    shape = shape_of("Qwen/Qwen2.5-Math-7B")
    assert shape is not None
    settings = config(name="qwen2.5-math-7b-luffy-8gpu")
    step = {"rows": 4, "row_tokens": 4096}
    node = Node(gpus=8, kind="plain", memory=80 << 30, flops=1e15, bandwidth=3e12, link=1e11)
    found = speed_on_paper(settings, shape, step, node)
    # Forward and backward with recomputation, four times 2 operations a parameter, at 0.4 of 1e15 a second; the
    # attention and the optimizer slow it down.
    bound = 0.4e15 / (8 * shape.multiplied)
    assert 0.5 * bound < found < bound
