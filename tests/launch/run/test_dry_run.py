"""`--dry-run` and `tandem plan`: what they print, and that they start and write nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.launch.cli import main
from tandem.launch.plan import memory, planning, text
from tandem.launch.plan.hardware import Gpu, machine
from tandem.launch.plan.node import KINDS
from tandem.launch.plan.placement import place
from tandem.launch.plan.sizes import TABLE
from tandem.launch.plan.splits import splits
from tandem.launch.run.opened.opening import open_folder
from tandem.launch.run.opened.presets import load
from tandem.launch.run.processes import roles
from tandem.launch.wording import human

EIGHT = "qwen2.5-math-7b-luffy-8gpu"
ROUNDS = [f"{stage}-{number}" for number in (1, 2, 3) for stage in ("sample", "sft")]
SEVEN = "Elliott/Qwen2.5-Math-7B-16k-think"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without GPUs, without downloads, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / ".." / "no-such-cache"))
    monkeypatch.setattr("tandem.launch.plan.hardware.gpus", lambda: ())
    return tmp_path


def tandem(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(words)
    out, err = capsys.readouterr()
    return code, out, err


def test_a_preset_of_eight_gpus_is_planned_where_there_is_none(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    code, out, err = tandem(capsys, "start", EIGHT, "data.train.0.path=none.parquet", "--dry-run")
    assert (code, err) == (0, "")
    for name in ("redis", *(f"learner-{i}" for i in range(6)), "rollout-0", "rollout-1"):
        assert f"\n  {name} " in out
    assert "\n  reward-0 " in out
    for gpu in range(8):
        assert f"CUDA_VISIBLE_DEVICES={gpu} " in out
    assert "needs 8 GPUs" in out
    assert "this machine has none" in out
    assert "none.parquet is missing" in out


@pytest.mark.parametrize(
    "words", [["--dry-run"], ["--plain", "learner.checkpoints_kept=999999999"]]
)
def test_a_run_that_leaves_a_gpu_idle_says_so_before_it_starts(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start is refused for want of disk, which is looked at after that."""
    one = (Gpu(index=0, name="H100", memory_mb=81559),)
    monkeypatch.setattr("tandem.launch.plan.hardware.gpus", lambda: one)
    _, out, _ = tandem(capsys, "start", "miniature", "launch.gpus=auto", *words)
    assert "warning: this preset needs 2 GPUs" in out
    assert "so the run is on CPUs: set launch.share_gpu=true" in out


def test_a_dry_run_writes_nothing(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    for words in (("start", EIGHT), ("start", "miniature"), ("offline",)):
        assert tandem(capsys, *words, "--dry-run")[0] == 0
    assert list(here.iterdir()) == []


def test_a_dry_run_starts_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    class Recorded(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, arguments: list[str], *more: object, **named: object) -> None:
            started.append([str(word) for word in arguments])
            super().__init__(arguments, *more, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    assert tandem(capsys, "start", "--dry-run")[0] == 0
    # It asks programs for their version and the resolver for this host's name.
    assert started
    assert not [words for words in started if "tandem.launch.lifeline" in words]
    assert not [words for words in started if any(word.endswith(".conf") for word in words)]


def test_the_commands_are_those_that_the_job_would_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("rollout.workers=2", "log.tensorboard=true")
    code, out, _ = tandem(capsys, "start", "miniature", "--dry-run", *words)
    assert code == 0
    opening = open_folder(load("miniature"), words, fresh=False)
    parts = roles.parts(opening.config, opening.folder, place(opening.config, machine()))
    specs = [spec for part in parts for spec in part.specs()]
    assert [spec.name for spec in specs] == [
        *("learner-0", "rollout-0", "rollout-1", "reward-0", "tensorboard")
    ]
    for spec in specs:
        arguments = " ".join(spec.arguments)
        if spec.name == "learner-0":
            arguments = arguments.rpartition(" ")[0] + " PORT"
        assert f"{sys.executable} -P -m tandem.launch.lifeline $$ {arguments}\n" in out


@pytest.mark.parametrize(
    ("words", "engine", "stage"),
    [
        (("miniature",), "the torch engine in float32", "ZeRO-0 in float32 (zero_stage=1 divides"),
        (("miniature", "learner.ranks=2"), "the torch engine in float32", "ZeRO-1 in float32"),
        (("miniature", "learner.zero_stage=3"), "the torch engine in float32", "ZeRO-3 in"),
        (("miniature", "rollout.dtype=bfloat16"), "the torch engine in bfloat16", "ZeRO-0"),
        (("miniature", "rollout.engine=vllm"), "vLLM in float32", "ZeRO-0"),
        (("miniature", "rollout.engine=json:engine"), "json:engine in float32", "ZeRO-0"),
        ((EIGHT,), "vLLM in bfloat16", "ZeRO-2 in bfloat16"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, tuple) else None,
)
def test_each_process_is_told_with_its_engine_and_stage(
    words: tuple[str, ...], engine: str, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = tandem(capsys, "start", *words, "--dry-run")
    assert code == 0
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith("  ")}
    learners = [line for name, line in lines.items() if name.startswith("learner-")]
    workers = [line for name, line in lines.items() if name.startswith("rollout-")]
    assert learners
    assert workers
    assert all(stage in line and "engine" not in line for line in learners)
    assert all(engine in line and "ZeRO" not in line for line in workers)


def test_what_the_memory_would_be_is_told_for_each_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, out, _ = tandem(capsys, "start", EIGHT, "--dry-run")
    lines = [line for line in out.splitlines() if line.startswith("  learner-0 ")]
    assert len(lines) == 1
    held = memory.learner(load(EIGHT).resolve([]), TABLE[SEVEN], "cuda").total
    assert f"GPU 0, 4 threads, {human(held)} on the GPU" in lines[0]


def test_an_existing_run_would_be_resumed_or_moved_aside(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    from tandem.common.config import to_yaml

    opening = open_folder(load("miniature"), [], fresh=False)
    opening.folder.make()
    opening.folder.config.write_text(to_yaml(opening.config))
    opening.folder.write_run({"run_id": "a", "preset": "miniature", "state": "stopped"})
    before = sorted(path.name for path in opening.folder.path.iterdir())
    assert "runs/miniature (is resumed)" in tandem(capsys, "start", "--dry-run")[1]
    assert "would become runs/miniature.1" in tandem(capsys, "start", "--fresh", "--dry-run")[1]
    assert sorted(path.name for path in opening.folder.path.iterdir()) == before
    assert not (here / "runs" / "miniature.1").exists()


def test_nccl_on_a_shared_gpu_is_refused_by_a_dry_run_and_by_a_start(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    for more in (("--dry-run",), ()):
        words = ("start", "qwen2.5-0.5b-grpo-1gpu", "weights.transport=nccl", *more)
        code, out, err = tandem(capsys, *words)
        assert (code, out) == (2, "")
        assert "set weights.transport=auto" in err
        assert len(err.splitlines()) == 1
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    "setting",
    ["launch.bind=nowhere.invalid", "launch.bind=localhost", "weights.interface=no-such0"],
)
def test_an_address_that_is_not_this_hosts_is_told_and_not_started(
    setting: str, capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    code, out, _ = tandem(capsys, "start", "miniature", "--dry-run", setting)
    assert code == 0
    assert "it couldn't run this preset" in out
    assert setting in out
    code, _, err = tandem(capsys, "start", "miniature", setting)
    assert code == 2
    assert setting in err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("bind", ["0.0.0.0", "::"])
def test_a_head_that_would_bind_all_addresses_is_refused(
    bind: str, capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    # YAML reads a bare :: as a mapping.
    words = ("start", "miniature", f'launch.bind="{bind}"')
    for more in (("--head", "--dry-run"), ("--head",)):
        code, out, err = tandem(capsys, *words, *more)
        assert (code, out) == (2, "")
        assert "set launch.bind to one private address of the head" in err
    assert tandem(capsys, *words, "--dry-run")[0] == 0
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--head"], "rollout.workers=0 (--head) takes"),
        (["learner.hosts=2", "learner.ranks=2"], "learner.hosts=2 takes"),
        (["--head", "launch.bind=10.0.0.1"], None),
        ([], None),
    ],
)
def test_a_run_that_needs_other_hosts_and_binds_loopback_is_told(
    words: list[str], what: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = tandem(capsys, "start", "miniature", "--dry-run", *words)
    assert code == 0
    said = "with launch.bind=127.0.0.1 they can join from this host alone"
    assert (said in out) == (what is not None)
    assert (what or "") in out


def test_a_password_in_the_url_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    url = "replay.redis_url=redis://:secret@store.example:6380/0"
    code, out, _ = tandem(capsys, "start", "--dry-run", url)
    assert code == 0
    assert "redis://store.example:6380/0" in out
    assert "secret" not in out
    assert "redis-server" not in out.partition("processes")[2]


def test_the_plan_tells_memory_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = tandem(capsys, "plan", EIGHT, "--gpus", "8", "--gpu-memory", "80")
    assert code == 0
    assert "estimates" in out
    held = memory.learner(load(EIGHT).resolve([]), TABLE[SEVEN], "cuda").total
    assert f"GPU 0: {held / 2**30:.1f} of 80.0 GB" in out
    assert "DOES NOT FIT" not in out
    assert "a step takes about" in out
    assert "DOES NOT FIT" in tandem(capsys, "plan", EIGHT, "--gpu-memory", "40")[1]


@pytest.mark.parametrize("words", [("plan",), ("start", "--dry-run")])
@pytest.mark.parametrize(
    ("name", "models"),
    [
        ("miniature-sft-rl", {"sft": "miniature", "rl": "miniature"}),
        ("miniature-distill", {"teacher": "miniature", "student": "miniature"}),
        ("miniature-expert-iteration", dict.fromkeys(ROUNDS, "miniature")),
        (
            "llama3-8b-cs336-sft-then-dpo-4gpu",
            {"sft": "meta-llama/Meta-Llama-3-8B", "dpo": "meta-llama/Meta-Llama-3-8B"},
        ),
    ],
)
def test_a_stage_that_begins_from_a_model_of_an_earlier_one_is_planned_with_what_that_one_begins_from(
    capsys: pytest.CaptureFixture[str], name: str, models: dict[str, str], words: tuple[str, ...]
) -> None:
    code, out, err = tandem(capsys, *words, name)
    assert (code, err) == (0, "")
    _, *plans = re.split(r"^# (?:---- )?stage (.*)\n", out, flags=re.MULTILINE)
    assert plans[::2] == list(models)
    for printed, model in zip(plans[1::2], models.values(), strict=True):
        assert "learner-0 " in printed
        if words == ("plan",):
            assert f"\nmodel {model}," in printed


def test_splits_are_told_with_memory_time_and_who_waits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("plan", "qwen2.5-math-1.5b-grpo-2gpu", "--gpu", "H100", "--gpus", "4", "--splits")
    code, out, _ = tandem(capsys, *words)
    assert code == 0
    for split in ("1 rank + 3 engines", "2 ranks + 2 engines", "3 ranks + 1 engine"):
        assert f"\n{split}: fullest GPU " in out
    for row in ("staleness ", "step, s ", "learner waits ", "engines wait "):
        lines = [line.split()[-9:] for line in out.splitlines() if line.strip().startswith(row)]
        assert [len(cells) for cells in lines] == [9, 9, 9]
        if row == "staleness ":
            assert lines[0] == list("012345678")
    assert "fastest: learner.ranks=" in out
    told = json.loads(tandem(capsys, *words, "--json")[1])
    assert len(told) == 3 * 9
    assert {one["ranks"] + one["workers"] for one in told} == {4}


def test_splits_that_would_not_run_are_told_with_why(capsys: pytest.CaptureFixture[str]) -> None:
    fresh = ("run.deterministic=true", "rollout.engine=torch")
    words = ("plan", "qwen2.5-math-1.5b-grpo-2gpu", *fresh, "--splits")
    small = tandem(capsys, *words, "--gpus", "3", "--gpu-memory", "30")[1]
    heads = [line for line in small.splitlines() if "fullest GPU" in line]
    assert [line.endswith(", WOULD NOT RUN") for line in heads] == [True, False]
    assert "\nwould not run\n  - 1 + 2: GPU 0 would hold " in small
    assert "\nfastest: learner.ranks=2 rollout.workers=1 " in small
    three = ("rollout.engine=vllm", "rollout.gpus_per_worker=3", "run.deterministic=false")
    none = tandem(capsys, *words, *three, "--gpus", "7", "--gpu-memory", "80")[1]
    reason, empty, own, *problems = none.partition("\nno split would run\n")[2].splitlines()
    assert reason.startswith("  - 1 + 2, 4 + 1: rollout.gpus_per_worker: 3 ranks of vLLM can't")
    assert (empty, own) == ("", "problems of this preset")
    assert any("3 ranks of vLLM can't" in problem for problem in problems)


def test_splits_keep_to_fresh_samples_where_the_run_needs_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--gpu", "H100", "--gpus", "2", "--splits", "--json")
    two, unclipped = "qwen2.5-math-1.5b-grpo-2gpu", "learner.objective.name=reinforce"
    fresh = ("replay.max_staleness=0", unclipped)
    bare = ("replay.max_staleness=0", "learner.objective={clip_low: null, clip_high: null}")
    same = ("run.deterministic=true", "rollout.engine=torch")
    for settings in (fresh, bare, same):
        told = json.loads(tandem(capsys, "plan", two, *settings, *words)[1])
        assert [one["max_staleness"] for one in told] == [0]
    # It fixes the leases, too.
    assert (told[0]["groups_per_batch"], told[0]["groups_ahead"]) == (1, 0)


def test_the_fastest_split_is_told_with_what_its_bound_lowers() -> None:
    config = load("qwen2.5-math-1.5b-grpo-2gpu").resolve(["replay.window=3", "weights.every=2"])
    on = replace(KINDS["H100"], gpus=2)
    plan = planning.make("two", config, on, planning.for_node(config, on))

    def fastest(bound: int) -> str:
        lines = text.splits(plan, splits("two", config, on, [bound]))
        return next(line for line in lines if line.startswith("fastest: "))

    assert "replay.max_staleness=0 replay.window=1 weights.every=1 rollout." in fastest(0)
    assert "replay.max_staleness=1 replay.window=2 rollout." in fastest(1)
    assert "replay.max_staleness=2 rollout." in fastest(2)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("miniature",), "runs on CPUs"),
        (("qwen2.5-0.5b-grpo-1gpu",), "shares them"),
        (("qwen2.5-math-1.5b-grpo-2gpu", "model.path=someone/some-model"), "needs the sizes of"),
        (
            ("qwen2.5-math-1.5b-grpo-2gpu", "learner.ranks=2", "learner.hosts=2"),
            "learner.hosts=2 spreads the learner over several",
        ),
        (
            ("qwen2.5-math-1.5b-grpo-2gpu", "rollout.gpus_per_worker=2"),
            "rollout.gpus_per_worker=2 for an engine, and the node has 2: give 3 or more with --gpus",
        ),
        (
            ("qwen2.5-math-1.5b-grpo-2gpu", "learner.micro_batch_tokens=100"),
            "no split would be started: learner.micro_batch_tokens=100 is less than",
        ),
    ],
)
def test_splits_of_what_cannot_be_split_are_refused(
    words: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = tandem(capsys, "plan", *words, "--splits", "--gpus", "2")
    assert code == 2
    assert why in err


def test_the_plan_as_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "qwen2.5-0.5b-grpo-1gpu", "--gpu", "A10", "--json")
    code, out, _ = tandem(capsys, *words)
    assert code == 0
    plan = json.loads(out)
    processes = {process["name"]: process for process in plan["processes"]}
    learner, rollout = processes["learner-0"], processes["rollout-0"]
    assert learner["gpus"] == rollout["gpus"] == [0]
    assert sum(learner["bytes"].values()) == learner["total_bytes"]
    both = learner["total_bytes"] + rollout["total_bytes"]
    assert plan["gpus"]["0"]["total_bytes"] == both
    assert plan["gpus"]["0"]["share"] == both / KINDS["A10"].memory
    assert plan["estimate"] is True
    assert plan["model"]["parameters"] == 494_032_768
    found = plan["step"]["simulated"]
    assert found["trained"] == pytest.approx((1 - found["learner_waits"]) * found["step"])
    assert plan["pinned_bytes"] == learner["pinned_bytes"] == 2 * 2 * 494_032_768


def test_the_stages_of_a_preset_are_one_object_of_json_by_their_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plans = json.loads(tandem(capsys, "plan", "miniature-sft-rl", "--json")[1])
    assert {label: plan["preset"] for label, plan in plans.items()} == {
        "sft": "miniature-sft-rl-sft",
        "rl": "miniature-sft-rl-rl",
    }


def test_each_stage_cuts_lengths_that_only_another_one_allows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("plan", "miniature-sft-rl", "sft.data.max_prompt_tokens=40")
    given = ("--prompt-tokens", "40", "--response-tokens", "45", "rl.rollout.max_new_tokens=44")
    plans = json.loads(tandem(capsys, *words, *given, "--json")[1])
    steps = [plans[label]["step"] for label in ("sft", "rl")]
    assert [(one["prompt_tokens"], one["response_tokens"]) for one in steps] == [(40, 45), (32, 44)]
    # Nothing is printed before lengths that no stage allows are refused.
    code, out, err = tandem(capsys, *words, "--prompt-tokens", "41")
    assert (code, out) == (2, "")
    assert "--prompt-tokens 41 should be" in err
    assert "at most sft.data.max_prompt_tokens=40" in err


def test_a_stage_that_generates_nothing_has_no_splits(capsys: pytest.CaptureFixture[str]) -> None:
    # One bound, so that it takes no time.
    one = ("rl.run.deterministic=true", "rl.rollout.engine=torch")
    words = ("plan", "qwen2.5-math-7b-sft-then-rl-8gpu", *one, "--splits", "--gpus", "2")
    code, out, _ = tandem(capsys, *words)
    assert code == 0
    assert out.startswith("# ---- stage sft\nno splits: offline nothing is generated")
    assert "# ---- stage rl\nsplits of " in out
    found = json.loads(tandem(capsys, *words, "--json")[1])
    assert found["sft"] is None
    assert [one["ranks"] for one in found["rl"]] == [1]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("miniature", "learner.micro_batch_tokens=10"), "learner.micro_batch_tokens=10 is less"),
        (
            ("qwen2.5-math-7b-luffy-published", "replay.max_staleness=6"),
            "learner.objective.clip_low=null and clip_high=null leave nothing that bounds the ratio",
        ),
        (
            ("qwen2.5-math-1.5b-grpo-2gpu", "rollout.gpus_per_worker=8"),
            "rollout.gpus_per_worker: 8 ranks of vLLM can't share Qwen/Qwen2.5-Math-1.5B, which has 12",
        ),
    ],
)
def test_what_a_start_would_refuse_is_a_problem_of_the_plan(
    words: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = tandem(capsys, "plan", *words)
    assert code == 0
    problems = out.partition("\nproblems\n")[2].splitlines()
    assert problems[0].startswith(f"  - {why}")


def test_splits_tell_why_the_preset_that_they_are_compared_with_would_not_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("plan", "qwen2.5-math-1.5b-grpo-2gpu", "--gpu", "H100", "--gpus", "2", "--splits")
    assert "problems" not in tandem(capsys, *words)[1]
    unclipped = "learner.objective={clip_low: null, clip_high: null}"
    code, out, _ = tandem(capsys, *words, "replay.max_staleness=6", unclipped)
    assert code == 0
    problems = out.partition("\nproblems of this preset\n")[2].splitlines()
    assert problems[0].startswith("  - learner.objective.clip_low=null and clip_high=null leave")


def test_a_node_with_too_few_gpus_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = tandem(capsys, "plan", EIGHT, "--gpus", "4")
    assert code == 2
    assert "needs 8 GPUs" in err


def test_a_model_that_nobody_knows_is_planned_without_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = tandem(capsys, "plan", EIGHT, "model.path=someone/some-model")
    assert code == 0
    assert "the sizes of someone/some-model aren't known" in out
    assert "learner-5" in out


def test_no_time_is_told_if_all_samples_come_from_other_hosts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("plan", EIGHT, "--gpu", "H100", "--gpus", "8", "rollout.workers=0")
    code, out, _ = tandem(capsys, *words)
    assert code == 0
    assert "no time is estimated: all samples come from workers on other hosts" in out
    code, out, _ = tandem(capsys, *words, "--json")
    assert code == 0
    assert json.loads(out)["step"]["simulated"] is None


def test_on_cpus_no_time_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = tandem(capsys, "plan", "miniature")
    assert code == 0
    assert "no time is estimated: the run is on CPUs" in out


def test_stages_that_have_begun_are_planned_with_what_they_were_given(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    top = here / "runs" / "miniature-sft-rl"
    top.mkdir(parents=True)
    given = {"overrides": ["rl.rollout.workers=2"], "stages": ["sft", "rl"]}
    (top / "stages.json").write_text(json.dumps({"preset": "miniature-sft-rl", **given}))
    code, out, _ = tandem(capsys, "start", "miniature-sft-rl", "--dry-run")
    assert code == 0
    assert "\n  rollout-1 " in out
    # One stage has begun; the folder of both would be moved.
    (top / "sft").mkdir()
    (top / "sft" / "run.json").write_text('{"run_id": "a"}')
    code, out, _ = tandem(capsys, "start", "miniature-sft-rl", "--fresh", "--dry-run")
    assert code == 0
    assert "rollout-1" not in out
    assert "(new; the old one would become runs/miniature-sft-rl.1/sft)" in out
    assert "runs/miniature-sft-rl/rl (new)" in out
