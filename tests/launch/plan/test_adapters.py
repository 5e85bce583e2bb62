"""What adapters take on paper, against numbers that were worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.common.config import Config, LoraConfig
from tandem.common.models import resolve
from tandem.launch.host.preflight import disk_needed
from tandem.launch.plan import memory, speed
from tandem.launch.plan.node import GB, Node
from tandem.launch.plan.sizes import ModelShape, known, shape_of, trained
from tandem.launch.run.opened.presets import load

SMALL = ModelShape(
    name="small",
    layers=2,
    hidden=8,
    heads=2,
    kv_heads=1,
    head_dim=4,
    intermediate=16,
    vocabulary=10000,
    tied=True,
)
N = SMALL.parameters
# Inputs and outputs of a layer: q and o 8 + 8, k and v 8 + 4, the MLP's three 8 + 16.
T = 2 * 2 * (16 + 12 + 12 + 16 + 24 + 24 + 24)
RANK_2 = ("learner.lora.rank=2",)


def config(*overrides: str, name: str = "qwen2.5-math-1.5b-grpo-2gpu") -> Config:
    return load(name).resolve([*RANK_2, *overrides])


def test_the_number_of_an_adapters_parameters_by_hand() -> None:
    assert SMALL.adapters(LoraConfig(rank=2)) == T == 512
    assert SMALL.adapters(LoraConfig(rank=3, targets=("q_proj", "self_attn.v_proj"))) == 3 * 2 * 28
    assert trained(config(), SMALL) == T
    assert trained(load("miniature").resolve([]), SMALL) == N


def test_the_miniatures_adapters_are_those_of_the_learner() -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    from tandem.common.adapters import adapted_layers, adapter_tensors

    shape, lora = shape_of("miniature"), LoraConfig(rank=2)
    assert shape is not None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(resolve("miniature")))
    tensors = adapter_tensors(adapted_layers(model, lora), 2)
    assert shape.adapters(lora) == sum(rows * columns for _, (rows, columns) in tensors)


@pytest.mark.parametrize(
    ("stage", "ranks", "weights", "adapters", "gradients", "optimizer"),
    [
        # bf16 weights 2N, and of the adapters: fp32 gradients 4T; master copy and moments 12T.
        (0, 1, 2 * N, 2 * T, 2 * T, 12 * T),
        (1, 1, 2 * N, 2 * T, 6 * T, 12 * T),
        (1, 4, 2 * N, 2 * T, 6 * T, 3 * T),
        (2, 4, 2 * N, 2 * T, T + 4 * T, 3 * T),
        (3, 4, N // 2, T // 2, T + 4 * T, 3 * T),
    ],
)
def test_gradients_and_optimizer_are_the_adapters_alone(
    stage: int, ranks: int, weights: int, adapters: int, gradients: int, optimizer: int
) -> None:
    settings = config(f"learner.zero_stage={stage}", f"learner.ranks={ranks}")
    found = memory.learner(settings, SMALL, "cuda", rank=1).parts
    names = ("weights", "adapters", "gradients", "optimizer")
    assert tuple(found[name] for name in names) == (weights, adapters, gradients, optimizer)
    staged = memory.learner(settings, SMALL, "cuda", rank=0)
    assert staged.pinned == 2 * 2 * T


def test_there_is_no_second_model_and_no_gradient_of_the_output_matrix() -> None:
    wanted = "learner.objective.kl_coefficient=0.01"
    full = load("qwen2.5-math-1.5b-grpo-2gpu").resolve([wanted])
    before = memory.learner(full, SMALL, "cuda").parts
    after = memory.learner(config(wanted), SMALL, "cuda").parts
    assert before["reference"] == 2 * N
    assert "reference" not in after
    assert before["logits"] - after["logits"] == 4 * 10000 * 8


def test_an_engine_receives_adapters_beside_its_weights() -> None:
    settings = ("replay.max_staleness=1", "rollout.vllm.gpu_memory_utilization=0.5")
    found = memory.engine(config(*settings), SMALL, "cuda", 8 * GB)
    # vLLM has room for those of three versions, and its cache is what they leave.
    assert (found.parts["weights"], found.parts["adapters"]) == (2 * N, 3 * 2 * T)
    assert found.parts["KV cache"] == 4 * GB - 2 * N - 3 * 2 * T - 2 * GB
    assert found.host == (3 << 30) + 2 * T


def test_a_7b_model_on_one_gpu_needs_a_quarter_of_full_training() -> None:
    seven = known("Qwen/Qwen2.5-Math-7B")
    assert seven is not None
    overrides = ["learner.ranks=1", "learner.zero_stage=1", "learner.lora.rank=16"]
    lora = memory.learner(config(*overrides), seven, "cuda").parts
    full = load("qwen2.5-math-1.5b-grpo-2gpu").resolve(overrides[:2])
    states = ("weights", "adapters", "gradients", "optimizer")
    taken = [
        sum(parts.get(name, 0) for name in states)
        for parts in (lora, memory.learner(full, seven, "cuda").parts)
    ]
    assert taken[0] < 16.1e9
    assert taken[1] > 150e9


def test_adapters_are_sent_and_stepped_in_their_share_of_the_time() -> None:
    node = Node(gpus=2, kind="plain", memory=100 * GB, flops=1e12, bandwidth=1e9, link=1e9)
    full = load("qwen2.5-math-1.5b-grpo-2gpu").resolve([])
    work = speed.load(full)
    sent = [speed.transfer_seconds(one, SMALL, node) for one in (full, config())]
    assert sent[1] == pytest.approx(sent[0] * T / N)
    # Forward, and the backward pass to the activations alone.
    assert speed.learner_passes(config()) == speed.learner_passes(full) - 1
    assert speed.learner_seconds(config(), SMALL, node, work) < speed.learner_seconds(
        full, SMALL, node, work
    )


def test_checkpoints_on_disk_are_the_adapters() -> None:
    folder = Path(resolve("miniature"))
    full, lora = load("miniature").resolve([]), load("miniature").resolve([*RANK_2])
    shape = shape_of("miniature")
    assert shape is not None
    # The miniature's file has four bytes a parameter, and two are assumed.
    counted = sum(path.stat().st_size for path in folder.glob("*.safetensors")) // 2
    saved = disk_needed(full, folder) - disk_needed(lora, folder)
    kept = full.learner.checkpoints_kept + 1
    assert saved == kept * 12 * (counted - trained(lora, shape))
    assert replace(shape, counted=None).adapters(LoraConfig(rank=2)) == trained(lora, shape)
