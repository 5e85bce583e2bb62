"""The presets for GPUs: what they set, where their processes go, and that they fit on paper."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import families
import pytest

from tandem.common.config import Config
from tandem.common.config.checks.choices import why_not_started
from tandem.common.errors import ConfigError
from tandem.launch.plan import placement, planning
from tandem.launch.plan.hardware import Gpu, Machine
from tandem.launch.plan.node import KINDS, Node
from tandem.launch.plan.simulation import simulate
from tandem.launch.plan.sizes import shape_of, too_long
from tandem.launch.plan.splits import splits
from tandem.launch.run.opened.presets import load, names
from tandem.reward.components.scoring import Scorer
from tandem.reward.reading.modes import mode

# The runs of a preset with stages are presets themselves.
GPU_PRESETS = [n for n in names() if not n.startswith("miniature") and not load(n).stages]
ONE = Machine(gpus=(Gpu(index=3, name="H100", memory_mb=81559),), cores=8, memory_mb=65536)


def config(name: str, *overrides: str) -> Config:
    return load(name).resolve(overrides)


LUFFY, PUBLISHED = "qwen2.5-math-7b-luffy-8gpu", "qwen2.5-math-7b-luffy-published"


@pytest.mark.parametrize("name", GPU_PRESETS)
def test_nothing_keeps_a_preset_from_being_started(name: str) -> None:
    assert why_not_started(config(name)) is None


FAMILY_OF = {
    "EleutherAI/pythia": "gpt_neox",
    "Elliott/Qwen2.5": "qwen2",
    "Qwen/Qwen2.5": "qwen2",
    "Qwen/Qwen3": "qwen3",
    "allenai/OLMo-2": "olmo2",
    "meta-llama/Meta-Llama-3": "llama",
}
"""``model_type`` of the presets' models, by how their names on the hub begin."""


@pytest.mark.parametrize("name", GPU_PRESETS)
def test_vllm_can_take_up_new_weights_of_a_presets_model(name: str) -> None:
    found = config(name)
    kind = next(
        (kind for begin, kind in FAMILY_OF.items() if found.model.path.startswith(begin)), None
    )
    assert kind is not None or found.model.path.startswith("runs/"), found.model.path
    renamed = {family.kind for family in families.FAMILIES if family.renamed}
    if kind in renamed and found.learner.lora is None:
        assert found.rollout.engine == "torch"


@pytest.mark.parametrize("name", [LUFFY, PUBLISHED])
def test_the_luffy_presets_have_the_published_settings(name: str) -> None:
    found = config(name)
    assert (found.replay.groups_per_step, found.rollout.group_size) == (128, 8)
    assert (found.expert.per_group, found.learner.minibatches) == (1, 2)
    assert (found.run.steps, found.learner.checkpoint_every, found.evaluate.every) == (500, 50, 10)
    assert (found.data.max_prompt_tokens, found.rollout.max_new_tokens) == (1024, 8192)
    assert (found.rollout.temperature, found.evaluate.temperature) == (1.0, 0.6)
    objective = found.learner.objective
    assert (objective.name, objective.advantage, objective.aggregation) == (
        "luffy",
        "group_mean",
        "constant",
    )
    assert (objective.shaping, objective.gamma) == ("ratio", 0.1)
    optimizer = found.learner.optimizer
    assert (optimizer.lr, optimizer.schedule, optimizer.warmup_steps) == (1e-6, "constant", 0)
    assert (optimizer.betas, optimizer.weight_decay) == ((0.9, 0.999), 0.01)
    # As published for a gradient that is 8 ranks / 512 rows of theirs (tests/learner/recipes/test_as_published.py).
    assert (optimizer.grad_clip, optimizer.eps) == (1 / 64, 1e-8 / 64)
    assert objective.entropy_over == "all"


def test_only_the_published_preset_leaves_own_tokens_without_a_clip_and_it_wants_fresh_samples() -> (
    None
):
    def of(name: str) -> tuple[int, tuple[float | None, ...]]:
        found = config(name)
        objective = found.learner.objective
        return found.replay.max_staleness, (
            objective.clip_low,
            objective.clip_high,
            objective.dual_clip,
        )

    assert of(PUBLISHED) == (0, (None, None, None))
    assert of(LUFFY) == (4, (0.2, 0.2, 3.0))


@pytest.mark.parametrize("kind", [pytest.param("H100", marks=pytest.mark.byhand), "A100"])
def test_the_luffy_presets_have_the_splits_that_are_reckoned_fastest(kind: str) -> None:
    """What they say of themselves in their first lines."""

    def seconds(name: str, bounds: Sequence[int]) -> tuple[float, float]:
        found = config(name)
        plan = planned(found, kind, 8)
        assert plan.scenario is not None
        assert plan.problems == ()
        assert plan.fullest() < 0.9
        tried = splits(name, found, plan.node, bounds)
        assert any((s.ranks, s.workers, s.fits) == (4, 4, True) for s in tried)
        best = min(split.simulated.step for split in tried if split.fits)
        return simulate(plan.scenario).step, best

    own, best = seconds(LUFFY, range(9))
    assert best > 0.95 * own
    published, fastest = seconds(PUBLISHED, [0])
    assert fastest > 0.95 * published
    assert own <= 0.65 * fastest
    told = {"H100": (102, 247), "A100": (251, 523)}[kind]
    assert (own, published) == (pytest.approx(told[0], rel=0.02), pytest.approx(told[1], rel=0.02))


def test_the_luffy_preset_pays_nothing_before_the_thoughts_have_ended() -> None:
    gates = [c for c in config("qwen2.5-math-7b-luffy-8gpu").reward.components if c.gate]
    (gate,) = gates
    pattern = re.compile(gate.params["pattern"], re.DOTALL)
    assert pattern.fullmatch("It is\n4.\n</think>\n\\boxed{4}")
    assert not pattern.fullmatch("It is \\boxed{4}")


@pytest.mark.parametrize("name", GPU_PRESETS)
def test_a_presets_rewards_can_be_made_and_its_rows_fit_the_model(name: str) -> None:
    found = config(name)
    Scorer(found.reward)
    mode(found.reward.mode)
    assert too_long(found, shape_of(found.model.path)) is None


@pytest.mark.parametrize("name", [name for name in GPU_PRESETS if name != PUBLISHED])
def test_a_preset_fits_its_gpus_on_paper(name: str) -> None:
    """As many as its name says, of the memory that its line in `tandem presets` says."""
    preset = load(name)
    found = preset.resolve([])
    needed = int(re.search(r"(\d+)gpu", name)[1])  # type: ignore[index]
    gigabytes = int(re.search(r"(\d+) GB", preset.about)[1])  # type: ignore[index]
    assert placement.gpus_needed(found) == needed
    assert planned(found, {80: "H100", 48: "L40S", 24: "A10"}[gigabytes], needed).problems == ()


def planned(found: Config, kind: str, gpus: int) -> planning.Plan:
    node = KINDS[kind]
    paper = Node(
        gpus=gpus,
        kind=kind,
        memory=node.memory,
        flops=node.flops,
        bandwidth=node.bandwidth,
        link=node.link,
    )
    return planning.make("p", found, paper, planning.for_node(found, paper))


def test_what_makes_room_on_a_gpu_is_named_by_who_is_on_it() -> None:
    def problems(name: str, *overrides: str) -> tuple[str, ...]:
        found = config(name, "learner.gradient_checkpointing=false", *overrides)
        tight = replace(KINDS["A10"], gpus=placement.gpus_needed(found), memory=8 << 30)
        return planning.make("p", found, tight, planning.for_node(found, tight)).problems

    torch = ("rollout.engine=torch", "rollout.groups_per_batch=64")
    apart = [one.partition("; ")[2] for one in problems("qwen2.5-math-1.5b-grpo-2gpu", *torch)]
    learner, engine = (re.findall(r"([a-z_.]+=\S+) \(frees", one) for one in apart)
    assert {
        "learner.gradient_checkpointing=true",
        "learner.lora={}",
        "learner.offload=optimizer",
    } < {*learner}
    assert engine == ["rollout.groups_per_batch=32", "rollout.max_new_tokens=1536"]
    room = problems("qwen2.5-math-1.5b-grpo-2gpu")[0].partition("what helps: ")[2]
    assert room.endswith("), larger GPUs")
    shared = problems("qwen2.5-0.5b-grpo-1gpu", *torch)
    assert "learner.lora={} (frees" in shared[0]
    alike = problems("qwen2.5-math-7b-luffy-8gpu")
    assert [one.partition(" would")[0] for one in alike[-2:]] == [
        "GPUs 0, 1, 2, 3, 4, 5",
        "GPUs 6, 7",
    ]


def test_engine_and_learner_share_the_one_gpu() -> None:
    placed = placement.place(config("qwen2.5-0.5b-grpo-1gpu"), ONE)
    assert placed.learner == placed.rollout == ((3,),)


def test_with_shared_gpus_each_has_one_rank_and_one_engine_at_most() -> None:
    found = config("qwen2.5-0.5b-grpo-1gpu", "learner.ranks=2", "rollout.workers=3")
    assert placement.gpus_needed(found) == 3
    placed = placement.placed(found, range(3))
    assert placed.learner == ((0,), (1,))
    assert placed.rollout == ((0,), (1,), (2,))


def test_too_few_gpus_to_share_are_told() -> None:
    none = Machine(gpus=(), cores=2, memory_mb=1)
    with pytest.raises(ConfigError, match=r"needs 1 GPU .* on the same GPUs\) .* none"):
        placement.place(config("qwen2.5-0.5b-grpo-1gpu"), none)


def test_nccl_on_a_shared_gpu_is_refused_with_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"can't share one: set weights\.transport=auto"):
        config("qwen2.5-0.5b-grpo-1gpu", "weights.transport=nccl")
    apart = config("qwen2.5-math-1.5b-grpo-2gpu", "weights.transport=nccl")
    assert apart.weights.transport == "nccl"


@pytest.mark.parametrize(
    ("given", "read"),
    [("off", "off"), ("false", "off"), ("on", "online"), ("offline", "offline")],
)
def test_yaml_reads_on_and_off_as_booleans_and_the_tracker_understands(
    given: str, read: str
) -> None:
    assert config("miniature", f"log.wandb={given}").log.wandb == read
