"""`tandem doctor`: what it finds, what mends it, and its exit code."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.common.errors import ConfigError
from tandem.common.models import local_folder
from tandem.launch.cli import main
from tandem.launch.host import preflight, redis_server, requirements, surroundings
from tandem.launch.plan.hardware import Gpu, Machine
from tandem.launch.run.opened.presets import load

GPU = Machine(gpus=(Gpu(index=0, name="H100", memory_mb=81559),), cores=8, memory_mb=1 << 20)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tandem.launch.plan.hardware.gpus", lambda: ())


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at three presets instead of all, which takes seconds; one test below looks at all of them."""
    names = ["miniature", "miniature-easy", "qwen2.5-math-7b-luffy-8gpu"]
    monkeypatch.setattr("tandem.launch.run.opened.presets.names", lambda: names)


def doctor(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict]:
    code = main(["doctor", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def finding(found: dict, name: str) -> dict:
    return next(one for one in found["findings"] if one["name"] == name)


@pytest.mark.usefixtures("few")
def test_a_machine_that_can_run_the_miniature(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctor(capsys)
    assert (code, found["preset"], found["could_run"]) == (0, "miniature", True)
    names = {one["name"] for one in found["findings"]}
    assert names >= {
        *("Python", "GPUs", "torch", "deepspeed", "vllm", "flash-attn", "liger-kernel"),
        "bitsandbytes",
        "redis-server",
        *("/dev/shm", "open files", "host name", "disk", "memory", "compiler", "sandbox"),
    }
    assert finding(found, "redis-server")["state"] == "ok"


@pytest.mark.usefixtures("few")
def test_a_gpu_that_is_too_few_for_an_automatic_choice_is_a_note_with_the_way_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.launch.plan.hardware.gpus", lambda: GPU.gpus)
    _, found = doctor(capsys, "miniature", "launch.gpus=auto")
    gpus = finding(found, "GPUs")
    assert gpus["state"] == "note"
    assert "needs 2 GPUs" in gpus["why"]
    assert gpus["mend"].startswith("set launch.share_gpu=true")


FOUR = """
base: miniature
data: {miniature: null, train: [{path: "train.jsonl"}], evaluate: []}
evaluate: {every: 0, at_start: false, at_end: false}
stages:
  - {name: sample}
  - {name: sft, base: miniature-sft, data: {train: [{path: "{sample}/archive"}]}}
  - {name: rl, model: {path: "{sft}/model"}}
  - {name: gone, data: {train: [{path: "gone.jsonl"}]}}
"""


@pytest.mark.usefixtures("few")
def test_what_an_earlier_stage_makes_is_not_missing(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctor(capsys, "miniature-sft-rl")
    assert (code, found["could_run"]) == (0, True)
    Path("mine.yaml").write_text(FOUR)
    Path("train.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    # The folder could be the name of a set on the hub.
    code, found = doctor(capsys, "./mine.yaml", "run.dir=here")
    assert code == 1
    data = {one["found"]: one["state"] for one in found["findings"] if one["name"] == "data"}
    assert data["here/sample/archive is made by an earlier stage"] == "note"
    lacking = [one["found"] for one in found["findings"] if one["state"] == "missing"]
    assert len(lacking) == 1
    assert "gone.jsonl" in lacking[0]
    assert main(["start", "./mine.yaml", "run.dir=here", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.count("it couldn't run this preset") == 1


@pytest.mark.usefixtures("few")
def test_a_preset_that_this_machine_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctor(capsys, "qwen2.5-math-7b-luffy-8gpu")
    assert (code, found["could_run"]) == (1, False)
    gpus = finding(found, "GPUs")
    assert gpus["state"] == "missing"
    assert "needs 8 GPUs" in gpus["why"]
    assert "tandem start miniature" in gpus["mend"]
    # The others are told of in short.
    assert found["presets"]["miniature-easy"] == []


@pytest.mark.usefixtures("few")
def test_the_words_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "qwen2.5-math-7b-luffy-8gpu"]) == 1
    out = capsys.readouterr().out
    assert "MISSING  GPUs" in out
    assert "qwen2.5-math-7b-luffy-8gpu lacks: GPUs" in out
    assert "  miniature: could run here" in out


@pytest.mark.usefixtures("few")
def test_a_missing_redis_server_comes_with_its_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_server, "_candidates", list)
    code, found = doctor(capsys)
    assert code == 1
    assert "apt install redis-server" in finding(found, "redis-server")["mend"]


@pytest.mark.parametrize(
    ("setting", "package"),
    [
        ("rollout.engine=vllm", "vllm"),
        ("model.attention=flash_attention_2", "flash-attn"),
        ("model.kernels=liger", "liger-kernel"),
        ("learner.optimizer.name=adamw_8bit", "bitsandbytes"),
        ("log.wandb=offline", "wandb"),
        ("log.tensorboard=true", "tensorboard"),
    ],
)
def test_a_package_is_missing_only_for_who_wants_it(
    setting: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    hidden = {"vllm", "flash_attn", "liger_kernel", "bitsandbytes", "wandb", "tensorboard"}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name in hidden else real(name, *more),
    )
    here = Machine(gpus=(), cores=1, memory_mb=1 << 20)

    def state(*overrides: str) -> str:
        config = load("miniature").resolve(overrides)
        found = requirements.examine(config, here, tmp_path, beside=False)
        return next(one.state for one in found if one.name == package)

    assert state() == "note"
    assert state(setting) == "missing"
    if package == "bitsandbytes":
        ppo = ("learner.objective.name=ppo", "expert.per_group=0")
        assert state(*ppo) == "note"
        assert state(*ppo, "learner.critic.optimizer.name=adamw_8bit") == "missing"


def test_vllm_is_missing_only_where_something_here_samples_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "vllm" else real(name, *more),
    )
    two = replace(GPU, gpus=2 * GPU.gpus)

    def state(*overrides: str, name: str = "miniature") -> str:
        config = load(name).resolve(["launch.gpus=required", *overrides])
        found = requirements.examine(config, two, tmp_path, beside=False)
        return next(one.state for one in found if one.name == "vllm")

    assert state("rollout.engine=vllm") == "missing"
    assert state("rollout.engine=vllm", "rollout.workers=0") == "note"
    # It takes the torch engine then.
    assert state("rollout.engine=auto") == "note"
    offline = ("rollout.engine=vllm", "evaluate.every=0", "evaluate.at_start=false")
    assert state(*offline, name="miniature-sft") == "missing"
    assert state(*offline, "evaluate.at_end=false", name="miniature-sft") == "note"


@pytest.mark.parametrize(("setting", "state"), [("torch", "note"), ("vllm", "missing")])
def test_a_vllm_of_another_version_is_told_with_the_command_that_mends_it(
    setting: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: real("json") if name == "vllm" else real(name, *more),
    )
    monkeypatch.setattr(requirements.vllm_version, "found", lambda: ("vllm", "0.35.0"))
    config = load("miniature").resolve([f"rollout.engine={setting}"])
    here = Machine(gpus=(), cores=1, memory_mb=1 << 20)
    found = requirements.examine(config, here, tmp_path, beside=False)
    (vllm,) = [one for one in found if one.name == "vllm"]
    assert vllm.state == state
    assert "vllm 0.35.0 is newer" in vllm.why
    assert "pip install 'vllm>=0.28,<0.34'" in vllm.mend


@pytest.fixture
def headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Python's headers lie, whether or not this host has them."""
    folder = tmp_path / "include"
    folder.mkdir()
    (folder / "Python.h").touch()
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(folder))
    return folder


def compiler(overrides: list[str], here: Machine) -> surroundings.Finding:
    found = requirements.examine(
        load("miniature").resolve(overrides), here, Path.cwd(), beside=False
    )
    return next(one for one in found if one.name == "compiler")


@pytest.mark.parametrize(
    ("overrides", "state"),
    [
        (["rollout.engine=vllm"], "missing"),
        (["rollout.engine=vllm", "rollout.workers=0"], "note"),
        (["rollout.engine=torch", "model.kernels=liger"], "missing"),
        (["rollout.engine=torch"], "note"),
    ],
)
def test_on_a_gpu_vllm_and_liger_need_a_compiler(
    overrides: list[str], state: str, tmp_path: Path, headers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    on_gpu = [*overrides, "launch.gpus=required"]
    two = replace(GPU, gpus=2 * GPU.gpus)
    assert compiler(on_gpu, two).state == state
    (tmp_path / "gcc").touch(mode=0o755)
    assert compiler(on_gpu, two).state == "ok"


@pytest.mark.parametrize(
    ("overrides", "state"),
    [(["rollout.engine=vllm"], "missing"), (["rollout.engine=torch"], "note")],
)
def test_on_a_gpu_the_compiler_needs_pythons_headers(
    overrides: list[str], state: str, tmp_path: Path, headers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "gcc").touch(mode=0o755)
    on_gpu = [*overrides, "launch.gpus=required"]
    two = replace(GPU, gpus=2 * GPU.gpus)
    (headers / "Python.h").unlink()
    found = compiler(on_gpu, two)
    assert found.state == state
    assert re.fullmatch(r"apt install python3\.\d+-dev", found.mend)
    assert str(headers / "Python.h") in found.found
    (headers / "Python.h").touch()
    assert compiler(on_gpu, two).state == "ok"


def test_the_image_has_the_compiler(
    tmp_path: Path, headers: Path, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    wanted = compiler([], GPU).mend.removeprefix("apt install ").split()
    (packages,) = re.findall(
        r"apt-get install (.*) \\$", (root / "Dockerfile").read_text(), re.MULTILINE
    )
    assert set(wanted) <= set(packages.split())


def test_torch_and_driver_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("qwen2.5-0.5b-grpo-1gpu").resolve([])
    answer = {"available": True, "gpus": 1, "bf16": True}
    monkeypatch.setattr(surroundings, "_ask_torch", lambda: answer)

    def look(built: str | None, supported: str | None) -> surroundings.Finding:
        monkeypatch.setattr(surroundings, "cuda_of_torch", lambda: built)
        monkeypatch.setattr(surroundings, "cuda_of_driver", lambda: supported)
        return surroundings.cuda(config, GPU)[0]

    assert look("13.0", "13.1").state == "ok"
    assert look("13.2", "13.0").state == "ok"  # minor versions of one major one fit
    old = look("13.0", "12.4")
    assert (old.state, old.why) == ("missing", "the driver is too old for this build of torch")
    assert "--torch-backend auto" in old.mend
    cpu = look(None, "13.0")
    assert cpu.why == "this build of torch can't use a GPU"
    assert cpu.mend.endswith("launch/setup.sh --gpu")
    answer["bf16"] = False
    assert "bfloat16" in look("13.0", "13.0").why


def test_gpus_are_refused_where_torch_is_built_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["launch.gpus=required", "launch.share_gpu=true", "rollout.engine=torch"]
    config = load("miniature").resolve(words)
    monkeypatch.setattr(surroundings, "cuda_of_torch", lambda: None)
    with pytest.raises(
        ConfigError, match=r"built for CPUs alone.*setup\.sh --gpu.*launch.gpus=none"
    ):
        preflight.check_host(config, GPU)
    on_cpus = load("miniature").resolve(["launch.gpus=none"])
    assert preflight.check_host(on_cpus, GPU)[0].gpus == 0
    monkeypatch.setattr(surroundings, "cuda_of_torch", lambda: "13.0")
    assert preflight.check_host(config, GPU)[0].gpus == 1


def test_the_cuda_that_torch_is_built_for_is_read_without_importing_it() -> None:
    import torch

    code = (
        "import sys; from tandem.launch.host.surroundings import cuda_of_torch; told = cuda_of_torch(); "
        "print(told, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"{torch.version.cuda} False\n"


def test_torch_is_not_imported() -> None:
    # It looks at every preset.
    code = (
        "import sys; from tandem.launch.cli import main; main(['doctor']); "
        "print(sorted({'torch', 'transformers', 'vllm', 'deepspeed', 'wandb'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_model_to_be_fetched_is_no_obstacle_unless_the_hub_is_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    config = load("qwen2.5-0.5b-grpo-1gpu").resolve([])

    def state() -> str:
        found = requirements.examine(config, GPU, tmp_path, beside=False)
        return next(one.state for one in found if one.name == "model")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert state() == "note"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert state() == "missing"


def test_the_disk_must_hold_the_checkpoints_of_a_model_that_is_not_here_yet() -> None:
    config = load("qwen2.5-math-7b-luffy-8gpu").resolve([])
    # Three checkpoints of 12 bytes a parameter, the download and the export, and the rest.
    assert requirements.disk_wanted(config) > 3 * 12 * 7_615_616_512


def test_the_disk_must_hold_them_too_for_a_folder_that_has_no_weights_yet(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    shutil.copy(local_folder("miniature") / "config.json", tmp_path / "base")
    config = load("miniature").resolve([f"model.path={tmp_path / 'base'}"])
    assert requirements.disk_wanted(config) > preflight.disk_needed(config, None)
