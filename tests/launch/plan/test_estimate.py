"""Memory and time on paper, against numbers that were worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.common.config import Config
from tandem.common.errors import ConfigError, DataError
from tandem.common.longest_pass import longest_pass
from tandem.common.objectives import OBJECTIVES, reads
from tandem.launch.host.preflight import weight_files
from tandem.launch.plan import advice, memory, sizes, speed
from tandem.launch.plan.hardware import Gpu, Machine
from tandem.launch.plan.node import GB, KINDS, Node, node
from tandem.launch.plan.simulation import LearnerSpeed
from tandem.launch.plan.sizes import ModelShape, shape_of
from tandem.launch.run.opened.presets import load

SMALL = ModelShape(
    name="small",
    layers=2,
    hidden=8,
    heads=2,
    kv_heads=1,
    head_dim=4,
    intermediate=16,
    vocabulary=100,
    tied=True,
)
PLAIN = Node(gpus=2, kind="plain", memory=100 * GB, flops=1e12, bandwidth=1e9, link=1e9)


def config(*overrides: str, name: str = "qwen2.5-math-1.5b-grpo-2gpu") -> Config:
    return load(name).resolve(overrides)


# --- sizes ---


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-Math-1.5B", 1_543_714_304),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen2.5-Math-7B-Instruct", 7_615_616_512),
        ("Elliott/Qwen2.5-Math-7B-16k-think", 7_615_616_512),
    ],
)
def test_well_known_models_have_their_published_number_of_parameters(
    name: str, parameters: int
) -> None:
    shape = shape_of(name)
    assert shape is not None
    assert (shape.parameters, shape.source, shape.name) == (parameters, "table", name)


def test_parameters_by_hand() -> None:
    # A layer: 8·8 twice for q and o, 8·4 twice for k and v, 3·8·16 for the MLP, 2 norms of 8.
    assert SMALL.parameters == 100 * 8 + 2 * (128 + 64 + 384 + 16) + 8
    assert replace(SMALL, tied=False).parameters == SMALL.parameters + 800
    assert replace(SMALL, qkv_bias=True).parameters == SMALL.parameters + 2 * (8 + 4 + 4)


def test_looking_an_untied_input_up_is_no_multiplication() -> None:
    assert SMALL.multiplied == SMALL.parameters
    assert replace(SMALL, tied=False).multiplied == SMALL.parameters


def test_a_model_on_this_machine_is_measured_and_the_formula_agrees() -> None:
    shape = shape_of("miniature")
    assert shape is not None
    assert (shape.source, shape.counted) == ("config.json", 113_472)
    assert replace(shape, counted=None).parameters == shape.counted


def test_a_model_that_nobody_knows_has_no_sizes() -> None:
    assert shape_of("someone/some-model") is None
    with pytest.raises(DataError):
        shape_of("/nowhere/at/all")


def test_a_download_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--someone--some-model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(
        json.dumps(
            {
                "hidden_size": 8,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "intermediate_size": 16,
                "vocab_size": 100,
                "tie_word_embeddings": True,
            }
        )
    )
    shape = shape_of("someone/some-model")
    assert shape is not None
    assert (shape.parameters, shape.source) == (SMALL.parameters, "config.json")


def weights(path: Path, *sizes: int, **named: list[int]) -> None:
    """A safetensors file whose header tells of tensors of these sizes, and of these names and shapes."""
    shapes = {f"t{number}": [size] for number, size in enumerate(sizes)} | named
    header = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
        for name, shape in shapes.items()
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def test_weights_that_lie_beside_the_model_again_are_counted_once(tmp_path: Path) -> None:
    weights(tmp_path / "consolidated.safetensors", 100, 20)
    assert sizes.count_parameters(tmp_path) == 120
    weights(tmp_path / "model-00001-of-00002.safetensors", 100)
    weights(tmp_path / "model-00002-of-00002.safetensors", 20)
    assert sizes.count_parameters(tmp_path) == 120
    names = {"t0": "first.safetensors", "t1": "second.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    weights(tmp_path / "first.safetensors", 100)
    assert sizes.count_parameters(tmp_path) is None
    weights(tmp_path / "second.safetensors", 20)
    assert sizes.count_parameters(tmp_path) == 120
    assert [file.name for file in weight_files(tmp_path)] == list(names.values())


def test_a_tied_output_matrix_that_a_file_holds_again_is_counted_once(tmp_path: Path) -> None:
    head, embedding = {"lm_head.weight": [5, 2]}, {"model.embed_tokens.weight": [5, 2]}
    weights(tmp_path / "model.safetensors", 3, **embedding, **head)
    assert sizes.count_parameters(tmp_path, tied=True) == 3 + 10
    assert sizes.count_parameters(tmp_path, tied=False) == 3 + 10 + 10
    # The only one of the two.
    weights(tmp_path / "model.safetensors", 3, **head)
    assert sizes.count_parameters(tmp_path, tied=True) == 3 + 10


def test_kv_cache_of_a_token() -> None:
    # Two of 28 layers times 4 heads of 128, two bytes each.
    shape = sizes.known("Qwen/Qwen2.5-7B")
    assert shape is not None
    assert shape.kv_bytes(2) == 57_344


# --- memory of the learner ---

N = SMALL.parameters
SIXTEEN = (
    "data.max_prompt_tokens=1000",
    "rollout.max_new_tokens=25",
    "learner.micro_batch_tokens=16384",
)
"""Settings whose largest micro-batch has 16 rows of 1,024 tokens."""


@pytest.mark.parametrize(
    ("stage", "ranks", "weights", "gradients", "optimizer"),
    [
        # bf16 weights 2N; fp32 gradients 4N; master copy and moments 12N.
        (0, 1, 2 * N, 2 * N, 12 * N),
        (1, 1, 2 * N, 6 * N, 12 * N),
        (1, 4, 2 * N, 6 * N, 3 * N),
        (2, 4, 2 * N, N + 4 * N, 3 * N),
        (3, 4, N // 2, N + 4 * N, 3 * N),
    ],
)
def test_what_zero_divides(
    stage: int, ranks: int, weights: int, gradients: int, optimizer: int
) -> None:
    found = memory.learner(
        config(f"learner.zero_stage={stage}", f"learner.ranks={ranks}"), SMALL, "cuda", rank=1
    ).parts
    assert (found["weights"], found["gradients"], found["optimizer"]) == (
        weights,
        gradients,
        optimizer,
    )


def test_moments_of_8_bits_take_a_byte_each() -> None:
    overrides = ["learner.zero_stage=2", "learner.ranks=4", "learner.optimizer.name=adamw_8bit"]
    found = memory.learner(config(*overrides), SMALL, "cuda", rank=1)
    assert found.parts["optimizer"] == (4 + 2) * N // 4
    away = memory.learner(config(*overrides, "learner.offload=optimizer"), SMALL, "cuda", rank=1)
    assert away.host - found.host == (2 + 4 + 4 + 2) * N // 4


def test_float16_takes_what_bfloat16_does() -> None:
    for overrides in (["learner.zero_stage=1"], ["learner.zero_stage=3", "learner.ranks=4"]):
        of = [
            memory.learner(config(f"model.dtype={dtype}", *overrides), SMALL, "cuda")
            for dtype in ("bfloat16", "float16")
        ]
        assert of[0] == of[1]
    half = config("rollout.dtype=float16", name="miniature")
    assert memory.engine(half, SMALL, "cpu", 0).parts["weights"] == 2 * N


def test_zero_1_sums_fp32_gradients_beside_those_of_the_last_pass() -> None:
    # Measured on two ranks: 915,968 bytes of gradients for 113,472 parameters.
    settings = ["model.dtype=float32", "learner.zero_stage=1", "learner.ranks=2"]
    found = memory.learner(config(*settings), SMALL, "cuda", rank=1).parts
    assert (found["gradients"], found["optimizer"]) == (8 * N, 6 * N)


def test_rmsprop_keeps_one_moment_of_two() -> None:
    overrides = ["learner.zero_stage=1", "learner.ranks=4", "learner.optimizer.name=rmsprop"]
    found = memory.learner(config(*overrides), SMALL, "cuda", rank=1).parts
    assert found["optimizer"] == 8 * N // 4


@pytest.mark.parametrize(
    ("stage", "offload", "weights", "gradients", "host", "pinned"),
    [
        # In host memory: moments 8N, master copy and gradient 8N, pinned, and the new weight's copy 2N.
        (1, "optimizer", 2 * N, 6 * N, 18 * N // 4, 10 * N // 4),
        (2, "optimizer", 2 * N, N + 4 * N, 18 * N // 4, 10 * N // 4),
        # ZeRO-3 sums gradients there too, and has no copy of new weights.
        (3, "optimizer", N // 2, 4 * N, 20 * N // 4, 12 * N // 4),
        (3, "parameters", 2 * N, 4 * N, 22 * N // 4, 14 * N // 4),
    ],
)
def test_what_is_offloaded(
    stage: int, offload: str, weights: int, gradients: int, host: int, pinned: int
) -> None:
    overrides = (f"learner.zero_stage={stage}", "learner.ranks=4", f"learner.offload={offload}")
    found = memory.learner(config(*overrides), SMALL, "cuda", rank=1)
    assert (found.parts["weights"], found.parts["gradients"]) == (weights, gradients)
    assert found.parts["optimizer"] == 0
    assert found.host == (3 << 30) + 2 * N + host
    assert found.pinned == pinned
    # Without a GPU all of it is the same memory.
    on_cpu = memory.learner(config(*overrides), SMALL, "cpu", rank=1)
    assert (on_cpu.parts["offloaded"], on_cpu.host) == (host, 0)


def test_offloaded_weights_pass_through_the_gpu() -> None:
    overrides = ("learner.zero_stage=3", "learner.offload=parameters")
    large = replace(SMALL, counted=8_000_000_000)
    found = memory.learner(config(*overrides), large, "cuda", rank=1)
    assert found.parts["weights"] == 2 * 1_000_000_000
    few = "learner.deepspeed={zero_optimization: {stage3_max_live_parameters: 2e8}}"
    found = memory.learner(config(*overrides, few), large, "cuda", rank=1)
    assert found.parts["weights"] == 2 * 200_000_000
    # At the start all of them are there, and later less than that.
    assert found.total - found.parts["runtime"] == 2 * 8_000_000_000


def test_zero_3_gathers_weights_beside_each_ranks_share() -> None:
    def gathered(*overrides: str, count: int = 8_000_000_000) -> int:
        settings = config("learner.zero_stage=3", *overrides)
        found = memory.learner(settings, replace(SMALL, counted=count), "cuda", rank=1).parts
        return found.get("gathered weights", 0)

    assert gathered("learner.ranks=4") == 2 * 1_000_000_000
    assert gathered("learner.ranks=4", "learner.offload=optimizer", count=N) == 2 * N
    # One rank has all of them, and offloaded ones count already.
    assert gathered("learner.ranks=1") == 0
    assert gathered("learner.ranks=4", "learner.offload=parameters") == 0


def test_a_critics_states_are_offloaded_with_the_policys() -> None:
    one = ("learner.zero_stage=2", "learner.offload=optimizer")
    ppo = ("learner.objective.name=ppo", "expert.per_group=0")
    alone = memory.learner(config(*one), SMALL, "cuda", rank=1)
    both = memory.learner(config(*one, *ppo), SMALL, "cuda", rank=1)
    assert both.host - alone.host == 18 * N
    assert both.parts["critic"] == 2 * N + 4 * N + 4 * N


def test_one_fp32_rank_has_nothing_to_divide() -> None:
    found = memory.learner(config(name="miniature"), SMALL, "cpu").parts
    assert (found["weights"], found["gradients"], found["optimizer"]) == (4 * N, 4 * N, 8 * N)


@pytest.mark.parametrize(
    ("stage", "gradients", "optimizer"),
    [
        # The master copy alone; sums of gradients as DeepSpeed makes them before the first step.
        (0, 0, 4 * N),
        (1, 4 * N, N),
        (2, N + 4 * N, N),
        (3, N + 4 * N, N),
    ],
)
def test_without_training_there_are_no_moments(stage: int, gradients: int, optimizer: int) -> None:
    sampling = ("learner.train=false", "log.archive=true", f"learner.zero_stage={stage}")
    ranks = f"learner.ranks={4 if stage else 1}"
    found = memory.learner(config(*sampling, ranks), SMALL, "cuda", rank=1).parts
    assert (found["gradients"], found["optimizer"]) == (gradients, optimizer)
    if stage:
        away = config(*sampling, ranks, "learner.offload=optimizer")
        with_steps = config(f"learner.zero_stage={stage}", ranks, "learner.offload=optimizer")
        saved = [memory.offloaded(one, N, N, one.learner.optimizer) for one in (with_steps, away)]
        assert (saved[0][0] - saved[1][0], saved[0][1] - saved[1][1]) == (8 * N // 4, 0)


def test_the_bucket_stops_growing_with_the_model() -> None:
    large = replace(SMALL, counted=8_000_000_000)
    found = memory.learner(config("learner.ranks=4"), large, "cuda", rank=1).parts
    assert found["gradients"] == 8_000_000_000 + 4 * 500_000_000


def test_activations_by_hand() -> None:
    # 8·8 + 2·8 + 2·4 + 4·16 + 2·2 + 4 = 160 numbers a token and layer; 16,384 tokens of 2 bytes.
    kept = config("learner.gradient_checkpointing=false", "model.kernels=plain", *SIXTEEN)
    assert longest_pass(kept).tokens == 16_384
    assert memory.activations(kept, SMALL, "cuda") == 2 * 16_384 * 2 * 160
    # Each layer's input, and one layer whole.
    again = config("learner.gradient_checkpointing=true", "model.kernels=plain", *SIXTEEN)
    assert memory.activations(again, SMALL, "cuda") == 2 * 16_384 * (2 * 8 + 160)


@pytest.mark.parametrize(
    ("model", "tokens", "plain", "liger"),
    [("0.5B", 16384, 34.44e9, 27.74e9), ("1.5B", 8192, 56.74e9, 49.76e9)],
)
def test_with_ligers_kernels_less_is_kept_on_a_gpu(
    model: str, tokens: int, plain: float, liger: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peaks that were measured on an H200 (``docs/benchmarks.md``), and whose kernels ``auto`` takes."""
    shape = sizes.known(f"Qwen/Qwen2.5-{model}")
    assert shape is not None

    def planned(kernels: str, device: str = "cuda") -> int:
        given = config(
            *(f"model.kernels={kernels}", "model.dtype=bfloat16", "learner.zero_stage=1"),
            *(f"learner.micro_batch_tokens={tokens}", "data.max_prompt_tokens=128"),
            *("learner.ranks=1", "rollout.max_new_tokens=1024", "learner.objective.name=grpo"),
            *("learner.gradient_checkpointing=false", "learner.offload=none"),
        )
        found = memory.learner(given, shape, device)
        return sum(found.parts.values()) - found.parts["runtime"] - found.parts["weight staging"]

    for kernels, measured in (("plain", plain), ("liger", liger)):
        assert planned(kernels) == pytest.approx(measured, rel=0.03)
    for there, same in ((False, "plain"), (True, "liger")):
        monkeypatch.setattr(memory, "is_installed", lambda _, there=there: there)
        assert planned("auto") == planned(same)
        assert planned("auto", "cpu") == planned("plain", "cpu")


def test_on_a_cpu_prompts_are_shared_and_attention_is_padded() -> None:
    small = config(
        "rollout.group_size=4",
        "data.max_prompt_tokens=11",
        "rollout.max_new_tokens=6",
        "learner.micro_batch_tokens=64",
        "learner.gradient_checkpointing=false",
        "model.dtype=float32",
    )
    # A group of 4 rows, whose prompt of 11 tokens is read once, and 5 tokens of each response.
    line = (11 + 4 * 5) * (6 * 8 + 8 + 4 * 16 + 4)
    assert memory.kept_by_layer(small, SMALL, "cpu") == 4 * (line + 64 * (4 * 8 + 2 * 2))
    eager = small.model_copy(
        update={"model": small.model.model_copy(update={"attention": "eager"})}
    )
    # No prompt is shared, and each head has 16 scores for each of 64 tokens.
    wide = 64 * (6 * 8 + 8 + 4 * 16 + 4) + 64 * (4 * 8 + 2 * 16 + 2 * 2)
    assert memory.kept_by_layer(eager, SMALL, "cpu") == 4 * wide


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_activations_are_what_autograd_keeps(dtype: str) -> None:
    """Measured: all tensors that a real model saves for its backward pass, of two layers."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokens = 128
    shape = replace(SMALL, hidden=128, heads=4, kv_heads=2, head_dim=32, intermediate=512)

    def saved(layers: int) -> int:
        settings = Qwen2Config(
            hidden_size=shape.hidden,
            num_hidden_layers=layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            intermediate_size=shape.intermediate,
            vocab_size=shape.vocabulary,
            tie_word_embeddings=True,
        )
        settings._attn_implementation = "sdpa"
        body = Qwen2ForCausalLM(settings).to(getattr(torch, dtype)).train().model
        weights = {p.untyped_storage().data_ptr() for p in body.parameters()}
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            ids = torch.zeros(1, tokens, dtype=torch.int64)
            out = body(input_ids=ids, use_cache=False)
        assert out.last_hidden_state.requires_grad
        return sum(kept.values())

    a_layer = (saved(3) - saved(1)) / 2
    pass_ = config(f"model.dtype={dtype}", "model.kernels=plain", *SIXTEEN)
    by_token = memory.kept_by_layer(pass_, shape, "cuda") / longest_pass(pass_).tokens
    assert a_layer == pytest.approx(tokens * by_token, rel=0.02)


def test_a_micro_batch_is_no_larger_than_the_update() -> None:
    few = config("replay.groups_per_step=1", "rollout.group_size=2", "rollout.max_new_tokens=76")
    assert longest_pass(few).tokens == 2 * 1099


def test_logits_are_made_chunk_by_chunk() -> None:
    # 16 rows of 1,024 tokens, of which the prompt has 1,000, and the last one more that isn't read.
    wide, tokens = replace(SMALL, vocabulary=1_000_000), 16 * 25
    hidden, matrix = (2 * 2 + 4) * tokens * 8, 2 * 2 * 1_000_000 * 8
    found = memory.logits(config(*SIXTEEN), wide, "cuda")
    assert found == 3 * (256 << 20) + hidden + matrix
    # A CPU keeps the first of its logits, and has smaller chunks.
    kept = 3 * (32 << 20) + (1 << 30) + hidden + matrix
    assert memory.logits(config(*SIXTEEN), wide, "cpu") == int(1.6 * kept)
    assert memory.logits(config(*SIXTEEN), SMALL, "cuda") == 3 * 4 * tokens * 100


def test_the_chunks_and_short_rows_are_those_of_the_learner() -> None:
    from tandem.learner.forward import logprobs, shared_prompts

    assert memory.SHORT_ROWS == shared_prompts.SHORT
    assert memory.LOGIT_CHUNK == logprobs.CHUNK_BYTES
    assert memory.LOGITS_KEPT["cpu"] == logprobs.KEPT_BYTES["cpu"]
    assert memory.CHUNKED_FROM == logprobs.CHUNKED_FROM


@pytest.mark.parametrize(
    ("overrides", "held"),
    [
        ((), 0),
        (("kl_coefficient=0.01",), 2 * N),
        (("kl_reward_coefficient=0.01",), 2 * N),
        (("name=dpo",), 2 * N),
        (("name=kto",), 2 * N),
        (("name=sft",), 0),
        (("name=orpo",), 0),
        (("name=my.module:loss",), 0),
        (("name=my.module:loss", "kl_coefficient=0.01"), 2 * N),
    ],
)
def test_the_reference_is_held_whole_where_the_objective_asks_for_it(
    overrides: tuple[str, ...], held: int
) -> None:
    wanted = [f"learner.objective.{one}" for one in overrides]
    for stage in (1, 3):
        settings = config(*wanted, "learner.ranks=2", f"learner.zero_stage={stage}")
        found = memory.learner(settings, SMALL, "cuda", rank=1)
        assert found.parts.get("reference", 0) == held


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_the_columns_by_config_are_those_of_the_objective(name: str) -> None:
    pytest.importorskip("torch")
    from tandem.learner.objectives import make

    for options in (
        {},
        {"kl_coefficient": 0.1, "entropy_coefficient": 0.1, "max_probability": 0.9},
        {"entropy_coefficient": 0.1, "entropy_target": 0.3},
        {"entropy_coefficient": 0.1, "entropy_target": 0.3, "entropy_adapt": "stepped"},
    ):
        read = {key: value for key, value in options.items() if key in reads(OBJECTIVES[name])}
        assert OBJECTIVES[name](**read).columns == make(name, **read).columns


def test_two_versions_are_staged_in_pinned_memory_of_rank_0_and_two_buckets_on_its_gpu() -> None:
    def held(rank: int, *overrides: str) -> tuple[int, int]:
        found = memory.learner(config(*overrides), SMALL, "cuda", rank=rank)
        assert found.host >= found.pinned
        return found.pinned, found.parts["weight staging"] >> 20

    assert held(0, "weights.bucket_mb=64") == (2 * 2 * N, 128)
    assert held(1, "learner.ranks=2") == (0, 0)
    # Nothing passes through a GPU on its way to gloo or to shared memory.
    assert held(0, "weights.transport=gloo") == (2 * 2 * N, 0)
    assert held(0, "launch.share_gpu=true") == (2 * 2 * N, 0)


def test_on_cpus_staged_versions_are_counted_once() -> None:
    found = memory.learner(config(name="miniature"), SMALL, "cpu")
    assert (found.parts["weight staging"], found.host, found.pinned) == (2 * 4 * N, 0, 0)


# --- memory of an engine ---


def test_vllm_gives_the_cache_what_is_left_of_its_share() -> None:
    found = memory.engine(config("rollout.vllm.gpu_memory_utilization=0.5"), SMALL, "cuda", 8 * GB)
    assert found.parts["KV cache"] == 4 * GB - 2 * N - 2 * GB
    # 2 layers x 1 head x 4 x 2 (keys and values) x 2 bytes.
    assert found.cache_tokens == found.parts["KV cache"] // 32
    assert found.parts["weight staging"] == 2 * (256 << 20)


def test_on_a_gpu_the_cache_is_what_it_was_set_to() -> None:
    set_to = config("rollout.vllm.kv_cache_mb=512")
    found = memory.engine(set_to, SMALL, "cuda", 8 * GB)
    assert found.parts["KV cache"] == 512 << 20
    assert found.total == (512 << 20) + 2 * N + 2 * GB + 2 * (256 << 20)


def test_what_frees_memory_of_vllm_on_a_gpu_is_what_its_cache_follows() -> None:
    def named(*overrides: str) -> set[str]:
        found = advice.ways_out(config(*overrides), "rollout", "cuda", 48 * GB)
        return {setting.partition("=")[0] for setting, _ in found}

    share, size = "rollout.vllm.gpu_memory_utilization", "rollout.vllm.kv_cache_mb"
    assert named() & {share, size} == {share}
    assert named(f"{size}=4096") & {share, size} == {size}


def test_tensor_parallel_ranks_hold_a_part_each() -> None:
    found = memory.engine(config("rollout.gpus_per_worker=2"), SMALL, "cuda", 8 * GB)
    assert found.parts["weights"] == N


def test_a_head_of_keys_and_values_is_copied_where_tensor_parallel_ranks_outnumber_them() -> None:
    def by_token(each: int, *overrides: str) -> int:
        given = config(f"rollout.gpus_per_worker={each}", *overrides)
        return memory.cached_token(given, replace(SMALL, heads=4, kv_heads=2), "cuda")

    # 2 layers x 2 heads x 4 x 2 (keys and values) x 2 bytes.
    assert [by_token(each) for each in (1, 2, 4)] == [64, 32, 32]
    # A pipeline of two has half of the layers on each.
    assert by_token(4, "rollout.vllm.args={pipeline_parallel_size: 2}") == 16


def test_vllm_on_cpus_is_several_processes() -> None:
    def of(*overrides: str) -> tuple[int, int]:
        found = memory.engine(
            config("rollout.engine=vllm", *overrides, name="miniature"), SMALL, "cpu", 0
        )
        return found.parts["runtime"] // memory.VLLM_PROCESS, found.parts["KV cache"] >> 20

    assert of() == (2, 1024)
    assert of("rollout.vllm.kv_cache_mb=64") == (2, 64)
    assert of("rollout.vllm.args.tensor_parallel_size=2") == (4, 2048)


def test_an_engine_in_another_dtype_than_the_learner() -> None:
    half = config("rollout.dtype=bfloat16", name="miniature")
    assert memory.engine(half, SMALL, "cpu", 0).parts["weights"] == 2 * N
    found = memory.learner(half, SMALL, "cpu").parts
    assert (found["weights"], found["weight staging"]) == (4 * N, memory.STAGED * 2 * N)


def test_the_torch_engines_cache_holds_all_its_rows() -> None:
    found = memory.engine(config(name="miniature"), SMALL, "cpu", 0)
    assert found.cache_tokens == 8 * 8 * (32 + 54)


# --- time ---


def test_a_step_counts_expert_rows_to_train_on_and_not_to_generate() -> None:
    work = speed.load(config(name="qwen2.5-math-7b-luffy-8gpu"), response_tokens=3000)
    assert (work.samples, work.rows, work.groups) == (128 * 7, 128 * 8, 128)
    assert (work.prompt, work.response, work.lengths.limit) == (256, 3000, 8192)
    assert work.trained == 1024 * 3256


def test_offline_nothing_is_generated() -> None:
    work = speed.load(config(name="miniature-sft"))
    assert (work.samples, work.rows) == (0, 4)


def test_offline_a_group_has_as_many_rows_as_are_stored() -> None:
    pairs = speed.load(config(name="llama3-8b-cs336-dpo-4gpu"))
    assert (pairs.samples, pairs.rows, pairs.groups) == (0, 64 * 2, 64)
    stored = ["learner.source=offline", "data.archive=kept", "replay.groups_per_step=128"]
    archive = speed.load(config(*stored, "rollout.group_size=4", name="miniature"))
    assert (archive.samples, archive.rows, archive.groups) == (0, 128 * 4, 128)


def test_blocks_have_their_own_length_whatever_is_said_of_responses() -> None:
    work = speed.load(
        config(name="llama3-8b-cs336-sft-4gpu"), prompt_tokens=100, response_tokens=900
    )
    assert (work.rows, work.trained) == (32, 32 * 512)
    assert (work.lengths.limit, work.lengths.spread) == (512, 0.0)


def test_forward_flops_by_hand() -> None:
    # 2 N T, and for each token 2 · layers · a·d · context.
    assert speed.forward_flops(SMALL, 10, 5) == 2 * N * 10 + 2 * 2 * 8 * 5 * 10


def test_training_is_three_forward_passes_and_four_with_recomputation() -> None:
    work = speed.load(config(), prompt_tokens=100, response_tokens=900)
    # One rank: nothing is exchanged. Arithmetic at 40% of 1e12, 30 bytes a parameter at 70% of 1e9.
    forward = speed.forward_flops(SMALL, 512_000, 1000) / 0.4e12
    optimizer = 30 * N / 0.7e9

    def seconds(checkpointing: str) -> float:
        settings = config(f"learner.gradient_checkpointing={checkpointing}")
        return speed.learner_seconds(settings, SMALL, PLAIN, work)

    assert seconds("false") == pytest.approx(3 * forward + optimizer)
    assert seconds("true") == pytest.approx(4 * forward + optimizer)


def test_each_column_is_a_forward_pass_more() -> None:
    work = speed.load(config(), prompt_tokens=100, response_tokens=900)
    forward = speed.forward_flops(SMALL, 512_000, 1000) / 0.4e12

    def seconds(*overrides: str) -> float:
        settings = config(*(f"learner.objective.{one}" for one in overrides))
        return speed.learner_seconds(settings, SMALL, PLAIN, work)

    plain = seconds()
    assert seconds("kl_coefficient=0.1") == pytest.approx(plain + forward)
    both = seconds("kl_coefficient=0.1", "kl_reward_coefficient=0.1")
    assert both == pytest.approx(plain + 2 * forward)
    assert seconds("name=decoupled_ppo") == pytest.approx(plain + forward)


def test_each_epoch_trains_on_every_token_again_and_scores_none() -> None:
    work = speed.load(config(), prompt_tokens=100, response_tokens=900)
    forward = speed.forward_flops(SMALL, 512_000, 1000) / 0.4e12
    optimizer = 30 * N / 0.7e9

    def seconds(*overrides: str) -> float:
        settings = config("learner.gradient_checkpointing=false", *overrides)
        return speed.learner_seconds(settings, SMALL, PLAIN, work)

    assert seconds("learner.update_epochs=4") == pytest.approx(12 * forward + 4 * optimizer)
    both = seconds("learner.update_epochs=4", "learner.minibatches=2")
    assert both == pytest.approx(12 * forward + 8 * optimizer)
    # The log-probs of the step's start are scored once.
    bound = seconds("learner.update_epochs=4", "learner.stop_kl=0.1")
    assert bound == pytest.approx(13 * forward + 4 * optimizer)


def test_an_offloaded_step_takes_the_time_of_its_threads_and_of_the_way_to_them() -> None:
    work = speed.load(config(), prompt_tokens=100, response_tokens=900)
    forward = speed.forward_flops(SMALL, 512_000, 1000) / 0.4e12

    def seconds(*overrides: str) -> float:
        settings = config("learner.gradient_checkpointing=false", *overrides)
        return speed.learner_seconds(settings, SMALL, PLAIN, work)

    # 30 bytes of each parameter at 10 GB/s and thread; its gradient of 4 bytes goes there, and its weight back.
    step = N * (30 / 40e9 + 6 / 20e9)
    found = seconds("learner.offload=optimizer", "learner.threads=4", "learner.zero_stage=2")
    assert found == pytest.approx(3 * forward + step)
    # Weights go to the GPU twice for each of 32 micro-batches.
    found = seconds("learner.offload=parameters", "learner.threads=4", "learner.zero_stage=3")
    assert found == pytest.approx(3 * forward + step + 2 * 32 * 2 * N / 20e9)


PPO = ("learner.objective.name=ppo", "learner.gradient_checkpointing=false")


def test_a_critic_takes_the_time_and_memory_of_a_second_model() -> None:
    work = speed.load(config(), prompt_tokens=100, response_tokens=900)
    forward = speed.forward_flops(SMALL, 512_000, 1000) / 0.4e12
    optimizer = 30 * N / 0.7e9
    found = speed.learner_seconds(config(*PPO, "learner.update_epochs=2"), SMALL, PLAIN, work)
    # Two epochs of forward and backward each, and its values at the step's start.
    assert found == pytest.approx((6 + 7) * forward + 2 * 2 * optimizer)
    for stage, ranks in ((1, 1), (1, 2), (3, 2)):
        settings = config(*PPO, f"learner.ranks={ranks}", f"learner.zero_stage={stage}")
        parts = memory.learner(settings, SMALL, "cuda", rank=1).parts
        assert parts["critic"] == sum(parts[one] for one in ("weights", "gradients", "optimizer"))
    assert "critic" not in memory.learner(config(), SMALL, "cuda").parts


def test_a_critic_of_another_model_has_its_own_size() -> None:
    # Without the bucket of ZeRO-2 and 3, which has one size.
    stage = (*PPO, "learner.zero_stage=1")
    settings = config(*stage, "learner.critic.model=Qwen/Qwen2.5-0.5B")
    policy = shape_of("Qwen/Qwen2.5-Math-1.5B")
    assert policy is not None
    found = memory.learner(settings, policy, "cuda").parts
    whole = memory.learner(config(*stage), policy, "cuda").parts
    share = 494_032_768 / policy.parameters
    assert found["critic"] == pytest.approx(share * whole["critic"], rel=0.01)


def test_a_teacher_takes_the_weights_and_the_passes_of_its_own_size() -> None:
    taught = ("learner.objective.name=distill", "learner.gradient_checkpointing=false")
    policy, teacher = shape_of("Qwen/Qwen2.5-0.5B"), shape_of("Qwen/Qwen2.5-Math-1.5B")
    assert policy is not None
    assert teacher is not None
    settings = config(*taught, "learner.teacher=Qwen/Qwen2.5-Math-1.5B", "learner.update_epochs=2")
    for stage, ranks in ((1, 1), (3, 2)):
        ranked = config(
            *taught, "learner.teacher=Qwen/Qwen2.5-Math-1.5B",
            f"learner.ranks={ranks}", f"learner.zero_stage={stage}",
        )  # fmt: skip
        parts = memory.learner(ranked, policy, "cuda", rank=1).parts
        assert parts["teacher"] == 2 * teacher.parameters
    work = speed.load(settings, prompt_tokens=100, response_tokens=900)
    found = speed.forward_seconds(settings, policy, PLAIN, 512_000, 1000)
    plain = config("learner.gradient_checkpointing=false", "learner.update_epochs=2")
    alone = speed.forward_seconds(plain, policy, PLAIN, 512_000, 1000)
    assert work.trained == 512_000
    forward = speed.forward_flops(teacher, 512_000, 1000) / 0.4e12
    assert found - alone == pytest.approx(2 * forward)
    assert "teacher" not in memory.learner(config(), policy, "cuda").parts


def test_decoding_reads_weights_and_cache_once_an_iteration() -> None:
    found = speed.engine_speed(config(), SMALL, PLAIN)
    # 32 bytes a cached token, 4 rows of 200 tokens.
    read = (2 * N + 4 * 200 * 32) / 0.7e9
    assert found.iteration(4, 800) == pytest.approx(read + 0.005)
    # With many short rows the arithmetic takes longer.
    assert found.iteration(10**6, 0) == pytest.approx(2 * N * 10**6 / 0.5e12 + 0.005)
    # Two GPUs read twice as fast, but each of them the one head of keys and values.
    both = speed.engine_speed(config("rollout.gpus_per_worker=2"), SMALL, PLAIN)
    read = (2 * N / 2 + 4 * 200 * 32) / 0.7e9
    assert both.iteration(4, 800) == pytest.approx(read + 0.005)


def test_slots_are_what_vllm_is_set_to_and_what_its_cache_holds() -> None:
    def slots(cache: int, *overrides: str) -> int:
        settings = config(*overrides)
        work = speed.load(settings, prompt_tokens=100, response_tokens=200, spread=0.0)
        return speed.slots(settings, work, cache)

    assert slots(10**9) == 256  # 32 groups of 8
    assert slots(10**9, "rollout.groups_per_batch=64") == 512
    assert slots(10**9, "rollout.vllm.max_num_seqs=300") == 300
    # Rows of 100 and, half done, 100 tokens.
    assert slots(3000) == 15


def test_what_the_learner_takes_follows_the_tokens_of_its_row() -> None:
    settings = config()
    work = speed.load(settings, prompt_tokens=100, response_tokens=900, spread=0.0)
    found = speed.scenario(settings, SMALL, PLAIN, work, 10**9).learner
    whole = found.step + found.token * work.samples * 900
    assert whole == pytest.approx(speed.learner_seconds(settings, SMALL, PLAIN, work))


def test_where_nothing_is_trained_a_step_is_the_engines_alone() -> None:
    settings = config("learner.train=false", "log.archive=true")
    work = speed.load(settings)
    assert (work.samples, work.rows) == (speed.load(config()).samples, 0)
    found = speed.scenario(settings, SMALL, PLAIN, work, 10**9)
    assert found.learner == LearnerSpeed(step=0.0)
    # New versions are the same weights, for which no engine pauses.
    assert (found.engine.load, found.recompute) == (0.0, False)
    for device in ("cpu", "cuda"):
        assert not {"activations", "logits"} & set(memory.learner(settings, SMALL, device).parts)


# --- the node ---


def machine(*gpus: Gpu) -> Machine:
    return Machine(gpus=gpus, cores=1, memory_mb=1)


def test_without_gpus_here_as_many_h100_as_are_needed_are_planned_for() -> None:
    found = node(machine(), needed=8)
    assert (found.gpus, found.kind, found.memory) == (8, "H100", 80 * GB)


def test_gpus_like_this_machines_are_planned_for_and_at_least_as_many_as_are_needed() -> None:
    here = machine(Gpu(index=0, name="NVIDIA A100-SXM4-40GB", memory_mb=40_960))
    found = node(here, needed=8)
    assert (found.gpus, found.kind, found.memory) == (8, "A100-40", 40_960 << 20)
    assert node(here, needed=8, gpus=1).gpus == 1
    two = machine(*(Gpu(index=i, name="NVIDIA H100", memory_mb=81_559) for i in range(2)))
    assert node(two, needed=1).gpus == 2
    other = node(machine(Gpu(index=0, name="NVIDIA Z9", memory_mb=1)), needed=1)
    assert other.kind == "NVIDIA Z9 (taken for an H100)"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA RTX A1000", "NVIDIA RTX A1000 (taken for an H100)"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "A100"),
    ],
)
def test_a_gpu_is_known_by_its_whole_name(name: str, kind: str) -> None:
    assert node(machine(Gpu(index=0, name=name, memory_mb=80_000)), needed=1).kind == kind


def test_what_is_given_goes_over_what_is_here() -> None:
    here = machine(Gpu(index=0, name="NVIDIA L4", memory_mb=24_000))
    found = node(here, needed=2, gpus=4, kind="h200", memory_gb=100)
    assert (found.gpus, found.kind, found.memory) == (4, "H200", 100 * GB)
    assert found.flops == KINDS["H200"].flops
    with pytest.raises(ConfigError, match="--gpu X1 is not known"):
        node(here, needed=1, kind="X1")
