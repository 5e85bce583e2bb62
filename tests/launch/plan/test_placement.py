"""Which GPUs the processes get, and what is refused before anything is started."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from tandem.common import models
from tandem.common.config import CHANGEABLE, Config
from tandem.common.errors import ConfigError, DataError
from tandem.common.models import resolve
from tandem.common.run_folder import RunFolder
from tandem.launch.host import preflight, requirements
from tandem.launch.plan import hardware, placement, planning
from tandem.launch.plan.hardware import Gpu, Machine
from tandem.launch.plan.node import node
from tandem.launch.plan.sizes import shape_of
from tandem.launch.run.joining import gpus_of
from tandem.launch.run.opened.presets import load
from tandem.launch.run.processes import roles
from tandem.launch.run.processes.parts import seeing
from tandem.learner.engine.critic import load_critic
from tandem.rollout.vllm import vllm_version

EIGHT = tuple(Gpu(index=i, name="H100", memory_mb=81559) for i in range(8))


def test_gpus_are_read_from_nvidia_smi_and_masked() -> None:
    listed = hardware.parse_gpus(
        "0, NVIDIA H100 80GB HBM3, 81559, GPU-a\n1, NVIDIA H100, 81559, GPU-b\nerror\n"
    )
    assert [gpu.index for gpu in listed] == [0, 1]
    assert [gpu.index for gpu in hardware.visible(listed, "1")] == [1]
    assert hardware.visible(listed, "") == ()
    assert hardware.visible(listed, "7,0") == ()
    assert hardware.visible(listed, None) == listed


WHOLE = [f"GPU-{n}{n}57f032-34ab-a064-c37c-7a4f75601cc5" for n in range(6)]
PARTS = ["MIG-377e0049-554c-540b-93c6-d0976f8426cb", "MIG-f39aa248-6f1b-5769-b119-8d650bb34b27"]


@pytest.fixture
def six(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with six GPUs, of which the first is in two parts."""
    rows = "\n".join(f"{i}, NVIDIA H100, 81559, {uuid}" for i, uuid in enumerate(WHOLE))
    below = [
        f"  MIG {3 - i}g.{40 - 20 * i}gb     Device  {i}: (UUID: {u})" for i, u in enumerate(PARTS)
    ]
    listed = [f"GPU {i}: NVIDIA H100 (UUID: {uuid})" for i, uuid in enumerate(WHOLE)]
    tree = "\n".join([listed[0], *below, *listed[1:]])
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\ncase "$1" in\n-L) echo "{tree}";;\n'
        f'--query-gpu=index,name,memory.total,uuid) echo "{rows}";;\n*) exit 6;;\nesac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return monkeypatch


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        ("4,5", ["4", "5"]),
        ("5,4", ["5", "4"]),
        (f"{WHOLE[3]},{WHOLE[1]}", [WHOLE[3], WHOLE[1]]),
        # CUDA takes the beginning of a UUID, vLLM doesn't.
        ("GPU-33, GPU-11", [WHOLE[3], WHOLE[1]]),
        (f"2,{WHOLE[1]}", [WHOLE[2], WHOLE[1]]),
        (f"{PARTS[1]},{PARTS[0]}", [PARTS[1], PARTS[0]]),
    ],
)
def test_processes_see_the_gpus_that_the_mask_names(
    six: pytest.MonkeyPatch, tmp_path: Path, mask: str, seen: list[str]
) -> None:
    six.setenv("CUDA_VISIBLE_DEVICES", mask)
    there = hardware.machine()
    config = load("miniature").resolve(["launch.gpus=required"])
    placed = placement.place(config, there)
    folder = RunFolder(tmp_path)
    (rank,) = roles.learner(config, folder, placed, "1")
    (worker,) = roles.rollout(config, folder, placed)
    asked = [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in (rank, worker)]
    assert asked == seen
    # A host that joins the run.
    assert [seeing(gpus)["CUDA_VISIBLE_DEVICES"] for gpus in gpus_of(config, "rollout", 2)] == seen
    plan = planning.make("", config, node(there, needed=2), placed)
    assert [str(gpu) for gpu in plan.by_gpu()] == seen


def test_a_part_of_a_gpu_has_the_parts_memory(six: pytest.MonkeyPatch) -> None:
    six.setenv("CUDA_VISIBLE_DEVICES", PARTS[1])
    (part,) = hardware.gpus()
    assert (part.name, part.memory_mb) == ("NVIDIA H100 MIG 2g.20gb", 20 << 10)


@pytest.mark.parametrize("mask", ["GPU-77", "NoDevFiles", "GPU-", "MIG-9", "-1", "6"])
def test_a_mask_that_names_no_gpu_leaves_none(six: pytest.MonkeyPatch, mask: str) -> None:
    six.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert hardware.gpus() == ()
    six.setenv("CUDA_VISIBLE_DEVICES", f"{WHOLE[1]},{mask},{WHOLE[2]}")
    assert [gpu.told for gpu in hardware.gpus()] == [WHOLE[1]]


def test_the_learner_gets_the_first_gpus_and_the_engines_the_next() -> None:
    config = load("qwen2.5-math-7b-luffy-8gpu").resolve(
        ["learner.ranks=2", "rollout.workers=3", "rollout.gpus_per_worker=2"]
    )
    placed = placement.place(config, Machine(gpus=EIGHT, cores=64, memory_mb=1))
    assert placed.learner == ((0,), (1,))
    assert placed.rollout == ((2, 3), (4, 5), (6, 7))


def test_too_few_gpus_are_refused_or_left_alone_as_the_preset_says() -> None:
    one = Machine(gpus=EIGHT[:1], cores=8, memory_mb=1)
    preset = load("qwen2.5-math-7b-luffy-8gpu")
    with pytest.raises(ConfigError, match=r"needs 8 GPUs .* this machine has 1"):
        placement.place(preset.resolve([]), one)
    assert placement.place(preset.resolve(["launch.gpus=auto"]), one).learner == ((),) * 6
    all_eight = Machine(gpus=EIGHT, cores=8, memory_mb=1)
    assert placement.place(load("miniature").resolve([]), all_eight).learner == ((),)


def test_gpus_that_are_too_few_for_an_automatic_choice_are_told_with_the_way_out() -> None:
    one = Machine(gpus=EIGHT[:1], cores=8, memory_mb=1)
    config = load("miniature").resolve(["launch.gpus=auto"])
    told = placement.gpus_left_idle(config, one)
    assert told is not None
    assert re.search(
        r"needs 2 GPUs .* this machine has 1 .* so the run is on CPUs: set launch.share_gpu=true",
        told,
    )
    # There is nothing to share where the ranks alone are too many.
    told = placement.gpus_left_idle(
        load("miniature").resolve(["launch.gpus=auto", "learner.ranks=2"]), one
    )
    assert told is not None
    assert "share_gpu" not in told
    for words in (["launch.gpus=none"], ["launch.gpus=auto", "launch.share_gpu=true"]):
        assert placement.gpus_left_idle(load("miniature").resolve(words), one) is None
    none = Machine(gpus=(), cores=8, memory_mb=1)
    assert placement.gpus_left_idle(config, none) is None


CPUS = placement.Placement(learner=((),), rollout=((),))
ONE_GPU = placement.Placement(learner=((0,),), rollout=((1,),))


def test_vllm_that_is_not_installed_is_told_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = load("miniature").resolve(["rollout.engine=vllm"])
    with pytest.raises(ConfigError, match=r"setup\.sh --vllm"):
        preflight.check_engine(config, CPUS)
    for others in (["rollout.engine=vllm", "rollout.workers=0"], ["rollout.engine=torch"]):
        preflight.check_engine(load("miniature").resolve(others), CPUS)
    preflight.check_engine(load("miniature").resolve(["rollout.engine=auto"]), ONE_GPU)


def test_an_offline_run_is_told_of_the_vllm_that_its_evaluations_lack_before_it_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check(*overrides: str) -> None:
        config = load("miniature-sft").resolve(
            ["rollout.engine=vllm", "evaluate.every=0", *overrides]
        )
        preflight.check_engine(config, CPUS)

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    neither = ("evaluate.at_start=false", "evaluate.at_end=false")
    for one in neither:
        with pytest.raises(ConfigError, match=r"setup\.sh --vllm") as refused:
            check(one)
        assert all(word in str(refused.value) for word in neither)
    # What the message names last may also be said to a run that goes on.
    assert "evaluate.*" in CHANGEABLE
    check(*neither)
    check("data.evaluate=[]")
    check("rollout.engine=torch")


def test_a_vllm_that_is_too_old_or_too_new_is_told_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_version, "installed", lambda: True)
    monkeypatch.setattr(vllm_version, "found", lambda: ("vllm", "0.27.1"))
    auto = load("miniature").resolve(["rollout.engine=auto"])
    for config, place in (
        (load("miniature").resolve(["rollout.engine=vllm"]), CPUS),
        (auto, ONE_GPU),
    ):
        with pytest.raises(ConfigError, match=r"vllm 0\.27\.1 is older: .*rollout\.engine=torch"):
            preflight.check_engine(config, place)
    preflight.check_engine(auto, CPUS)
    monkeypatch.setattr(vllm_version, "found", lambda: ("vllm", "0.28.0"))
    preflight.check_engine(auto, ONE_GPU)


def test_adapters_in_a_dtype_that_vllm_lacks_on_gpus_are_told_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_version, "installed", lambda: True)
    monkeypatch.setattr(vllm_version, "found", lambda: ("vllm", "0.28.0"))

    def check(
        *words: str, preset: str = "miniature-lora", on: placement.Placement = ONE_GPU
    ) -> None:
        preflight.check_engine(load(preset).resolve(["rollout.engine=vllm", *words]), on)

    for words in ([], ["rollout.engine=auto"], ["model.dtype=bfloat16", "rollout.dtype=float32"]):
        with pytest.raises(
            ConfigError, match=r"dtype=float32: .*: set rollout.dtype=bfloat16, or .*engine=torch"
        ):
            check(*words)
    check("rollout.dtype=bfloat16")
    check("rollout.engine=torch")
    check(preset="miniature")
    check(on=CPUS)


def test_ranks_that_cannot_share_the_models_heads_are_told_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_version, "installed", lambda: True)
    monkeypatch.setattr(vllm_version, "found", lambda: ("vllm", "0.28.0"))

    def check(each: int, *overrides: str) -> None:
        # 28 attention heads, and 4 of keys and values.
        words = [f"rollout.gpus_per_worker={each}", "rollout.workers=1", *overrides]
        config = load("qwen2.5-math-7b-luffy-8gpu").resolve(words)
        preflight.check_engine(config, placement.placed(config, range(40)))

    for each in (1, 2, 4, 28):
        check(each)
    for each in (3, 7, 8):
        told = rf"rollout\.gpus_per_worker: {each} ranks .* 28 attention .* one of 1, 2, 4, 28$"
        with pytest.raises(ConfigError, match=told):
            check(each)
    check(8, "rollout.vllm.args={pipeline_parallel_size: 2}")
    check(3, "rollout.engine=torch")
    with pytest.raises(ConfigError, match=r"makes 2 ranks, and rollout\.gpus_per_worker is 1"):
        check(1, "rollout.vllm.args={tensor_parallel_size: 2}")


def test_an_attention_that_this_host_cannot_run_is_told_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    bf16 = ["launch.gpus=auto", "model.dtype=bfloat16"]
    for name in ("flash_attention_2", "flex"):
        config = load("miniature").resolve([*bf16, f"model.attention={name}"])
        with pytest.raises(ConfigError, match=rf"{name} needs a GPU.* set model\.attention=auto"):
            preflight.check_kernels(config, CPUS)
    flash = load("miniature").resolve([*bf16, "model.attention=flash_attention_2"])
    with pytest.raises(ConfigError, match=r"pip install --no-build-isolation flash-attn"):
        preflight.check_kernels(flash, ONE_GPU)
    liger = load("miniature").resolve([*bf16, "model.kernels=liger"])
    with pytest.raises(ConfigError, match=r"needs a GPU.* set model\.kernels=auto"):
        preflight.check_kernels(liger, CPUS)
    with pytest.raises(ConfigError, match=r"pip install liger-kernel"):
        preflight.check_kernels(liger, ONE_GPU)
    for name in ("auto", "varlen", "flex"):
        config = load("miniature").resolve([*bf16, f"model.attention={name}"])
        preflight.check_kernels(config, ONE_GPU)
    preflight.check_kernels(load("miniature").resolve(["model.attention=varlen"]), CPUS)


def test_the_disk_that_a_run_may_need_grows_with_its_checkpoints() -> None:
    config = load("miniature").resolve([])
    model = preflight.check_model(config)
    less = preflight.disk_needed(config, model)
    more = preflight.disk_needed(load("miniature").resolve(["learner.checkpoints_kept=9"]), model)
    assert more > less > 64 << 20


PPO = ("learner.objective.name=ppo", "expert.per_group=0")


@pytest.mark.parametrize("optimizer", ["adamw", "rmsprop", "adamw_8bit"])
def test_the_disk_must_hold_the_moments_of_policy_and_critic(optimizer: str) -> None:
    """Of 4 bytes each in AdamW's checkpoints, of which RMSprop has one, and of 8 bytes in those of adamw_8bit."""
    plain = load("miniature").resolve([])
    model = preflight.check_model(plain)
    assert model is not None
    count = (plain.learner.checkpoints_kept + 1) * sum(
        path.stat().st_size // 2 for path in model.glob("*.safetensors")
    )
    each = {"adamw": 12, "rmsprop": 8, "adamw_8bit": 20}[optimizer]

    def needed(*overrides: str) -> int:
        return preflight.disk_needed(load("miniature").resolve(list(overrides)), model)

    own = f"learner.optimizer.name={optimizer}"
    assert needed(own) - needed() == (each - 12) * count
    critic = (*PPO, f"learner.critic={{optimizer: {{name: {optimizer}}}}}")
    assert needed(*critic) - needed() == each * count


def test_a_critic_of_a_known_size_counts_by_its_own_once() -> None:
    """Also where the policy's model isn't here yet."""
    settings = [*PPO, "model.path=Qwen/Qwen2.5-Math-7B"]
    more, less = (
        requirements.disk_wanted(load("miniature").resolve([*settings, f"learner.critic={critic}"]))
        for critic in ("{}", "{model: Qwen/Qwen2.5-Math-1.5B}")
    )
    shapes = [shape_of(f"Qwen/Qwen2.5-Math-{size}B") for size in ("7", "1.5")]
    seven, one = (shape.parameters for shape in shapes if shape is not None)
    assert more - less == 3 * 12 * (seven - one)


def test_float16_is_refused_where_the_learner_has_no_gpu() -> None:
    half = load("miniature").resolve(["model.dtype=float16", "launch.gpus=auto"])
    with pytest.raises(ConfigError, match=r"model.dtype=float16 .*set model.dtype=bfloat16"):
        preflight.check_dtype(half, placement.Placement(learner=((),), rollout=()))
    preflight.check_dtype(half, placement.Placement(learner=((0,),), rollout=()))
    preflight.check_dtype(
        load("miniature").resolve([]), placement.Placement(learner=((),), rollout=())
    )


def test_a_critics_model_that_is_missing_is_refused_by_its_own_name(tmp_path: Path) -> None:
    def config_of(path: Path) -> Config:
        ppo = ("learner.objective.name=ppo", "expert.per_group=0")
        return load("miniature").resolve([*ppo, f"learner.critic.model={path}"])

    with pytest.raises(DataError, match=r"^learner\.critic\.model=.*none: there is no such folder"):
        preflight.check_critic(config_of(tmp_path / "none"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"^learner\.critic\.model=.* has no weights"):
        preflight.check_critic(config_of(tmp_path))
    (tmp_path / "model.safetensors").touch()
    # It only reads ids.
    preflight.check_critic(config_of(tmp_path))
    # Before an earlier stage has made the policy's model.
    preflight.check_critic(config_of(tmp_path), alone=True)
    base = Path(resolve("miniature"))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, tmp_path)
    preflight.check_critic(config_of(tmp_path))
    content = json.loads((base / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"max_position_embeddings": 20}))
    with pytest.raises(ConfigError, match="over the critic's context of 20 tokens: lower"):
        preflight.check_critic(config_of(tmp_path))
    shutil.copy(base / "config.json", tmp_path)
    with pytest.raises(DataError, match=r"^learner\.critic\.model=.*: its weights can't be read"):
        load_critic(config_of(tmp_path), torch.device("cpu"), 1)
    preflight.check_critic(load("miniature").resolve([]))


def test_a_teachers_model_is_checked_by_its_own_name(tmp_path: Path) -> None:
    def check(path: Path | str, *words: str) -> None:
        settings = ("learner.objective.name=distill", f"learner.teacher={path}", *words)
        preflight.check_teacher(load("miniature").resolve(settings))

    with pytest.raises(DataError, match=r"^learner\.teacher=.*none: there is no such folder"):
        check(tmp_path / "none")
    base = Path(resolve("miniature"))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(DataError, match=r"^learner\.teacher=.* has no config\.json"):
        check(tmp_path)
    shutil.copy(base / "config.json", tmp_path)
    with pytest.raises(DataError, match=r"^learner\.teacher=.* has no weights"):
        check(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(DataError, match=r"^learner\.teacher=.* has no tokenizer"):
        check(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, tmp_path)
    check(tmp_path)
    check("miniature")
    content = json.loads((tmp_path / "config.json").read_text())
    context = content["max_position_embeddings"]
    with pytest.raises(ConfigError, match=rf"over the teacher's context of {context} tokens"):
        check(tmp_path, f"data.max_prompt_tokens={context}")


def test_a_teacher_or_critic_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    shutil.copytree(resolve("miniature"), tmp_path, dirs_exist_ok=True)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["7"], ids["8"] = ids["8"], ids["7"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = "has another tokenizer than model.path=.*: 2 token ids differ, such as"
    distill = ["learner.objective.name=distill", f"learner.teacher={tmp_path}"]
    with pytest.raises(ConfigError, match=rf"^learner\.teacher=.* {said} .* name a teacher"):
        preflight.check_teacher(load("miniature").resolve(distill))
    ppo = ["learner.objective.name=ppo", "expert.per_group=0", f"learner.critic.model={tmp_path}"]
    with pytest.raises(ConfigError, match=rf"^learner\.critic\.model=.* {said} .* name a critic"):
        preflight.check_critic(load("miniature").resolve(ppo))


def test_a_teacher_with_the_policys_own_tokenizer_files_is_taken_without_loading_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loads(path: str, key: str = "") -> None:
        raise AssertionError("it loads a tokenizer")

    shutil.copytree(resolve("miniature"), tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(models, "load_tokenizer", loads)
    config = load("miniature").resolve(
        ["learner.objective.name=distill", f"learner.teacher={tmp_path}"]
    )
    preflight.check_teacher(config)
    (tmp_path / "added_tokens.json").write_text("{}")
    with pytest.raises(AssertionError, match="it loads a tokenizer"):
        preflight.check_teacher(config)


@pytest.mark.parametrize("key", ["learner.optimizer", "learner.critic.optimizer"])
def test_an_optimizer_without_its_package_is_refused(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ppo = ["learner.objective.name=ppo", "expert.per_group=0"] if "critic" in key else []
    wanted = load("miniature").resolve([*ppo, f"{key}.name=adamw_8bit"])
    with pytest.raises(
        ConfigError, match=rf"{key}.name=adamw_8bit needs .*tandem-rl\[bitsandbytes"
    ):
        preflight.check_optimizers(wanted)
    preflight.check_optimizers(load("miniature").resolve([]))


@pytest.mark.parametrize(
    ("words", "on_gpu", "cores", "threads"),
    [
        # The worker samples meanwhile, or it doesn't.
        ([], False, 2, 1),
        ([], False, 4, 3),
        (["rollout.workers=2", "rollout.threads=2"], False, 6, 2),
        (["rollout.workers=4"], False, 2, 1),
        (["replay.max_staleness=0"], False, 2, 2),
        (["replay.max_staleness=0", "learner.ranks=2"], False, 2, 1),
        (["replay.max_staleness=0"], False, 64, placement.MOST_THREADS),
        (["learner.source=offline", "evaluate.every=0"], False, 4, 4),
        (["learner.source=offline", "evaluate.every=5"], False, 4, 4),
        # One that says it has it.
        (["replay.max_staleness=0", "learner.threads=3"], False, 2, 3),
        (["learner.threads=3"], True, 2, 3),
        # The same sums on every host.
        (["run.deterministic=true"], False, 8, 1),
        # A GPU computes, but where the optimizer steps in host memory.
        (["replay.max_staleness=0"], True, 8, 1),
        (["learner.offload=optimizer", "learner.zero_stage=2"], True, 8, 7),
    ],
)
def test_a_rank_has_the_threads_that_the_workers_leave_idle(
    words: list[str], on_gpu: bool, cores: int, threads: int
) -> None:
    config = load("miniature").resolve(words)
    assert placement.learner_threads(config, on_gpu=on_gpu, cores=cores) == threads
