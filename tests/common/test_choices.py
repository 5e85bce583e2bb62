"""Choices that a config, or the start of a run, refuses: what would do nothing, or fail only once the
run is under way."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import pytest
import yaml

from tandem.common import config as c
from tandem.common.config.checks.choices import micro_batch_refusal, why_not_started
from tandem.common.config.groups import own_rows
from tandem.common.errors import ConfigError
from tandem.common.objectives import KEYS, OBJECTIVES, reads

TREE: dict[str, Any] = {"run": {"steps": 10}, "data": {"train": [{"path": "a.parquet"}]}}
FRESH = "replay.max_staleness=0"
OFFLINE = "learner.source=offline"


def build(*overrides: str) -> c.Config:
    return c.build(TREE, overrides)


def start(*overrides: str) -> str | None:
    """Why a run of this config isn't started."""
    return why_not_started(build(*overrides))


def named(name: str) -> str:
    return f"learner.objective.name={name}"


# -- samples of a group --------------------------------------------------------------------------

ALONE = ("rollout.group_size=1", FRESH)
COMPARES_NO_ROWS = {"distill", "ppo", "reinforce", "reinforce_pp", "sft"}


@pytest.mark.parametrize("name", sorted(COMPARES_NO_ROWS))
def test_one_sample_a_group_is_enough_where_no_rows_are_compared(name: str):
    config = build(f"learner.objective.name={name}", *ALONE)
    assert config.learner.objective.least_verdicts == 1


WIRED = list(OBJECTIVES)


@pytest.mark.parametrize("name", sorted(set(WIRED) - COMPARES_NO_ROWS))
def test_one_sample_a_group_is_refused_where_rows_are_compared(name: str):
    with pytest.raises(ConfigError, match=r"group_size=1 leaves 1 own sample.*group_size to 2"):
        build(f"learner.objective.name={name}", *ALONE)
    assert build(f"learner.objective.name={name}", FRESH).learner.objective.least_verdicts == 2


def test_traces_take_the_place_of_samples_unless_they_enter_later_or_are_only_begun_with():
    with pytest.raises(ConfigError, match=r"group_size=3 - expert.per_group=2 .* to 4"):
        build("rollout.group_size=3", "expert.per_group=2")
    build("rollout.group_size=3", "expert.per_group=2", "expert.prefix=fixed")
    build("rollout.group_size=3", "expert.per_group=2", "expert.when=all_failed")
    build("rollout.group_size=3", "expert.per_group=2", "learner.objective.advantage=none")


def test_of_an_objective_of_your_own_the_advantage_decides():
    own = "learner.objective.name=my.module:loss"
    with pytest.raises(ConfigError, match="advantage=group_mean compares at least 2"):
        build(own, *ALONE)
    build(own, "learner.objective.advantage=none", *ALONE)


def test_a_pair_needs_two_rows():
    with pytest.raises(ConfigError, match="compares at least 2"):
        build("learner.objective.name=dpo", *ALONE)


def test_offline_no_group_is_sampled():
    build("rollout.group_size=1", OFFLINE)


def test_a_row_is_not_whitened_alone():
    alone = (named("reinforce_pp"), *ALONE, "replay.groups_per_step=1")
    with pytest.raises(ConfigError, match=r"raise replay\.groups_per_step from 1"):
        build(*alone)
    build(*alone, "replay.groups_per_step=2")
    build(*alone, "rollout.group_size=2")


def test_max_rl_takes_no_kl_out_of_the_rewards_whose_mean_it_divides_by():
    beta = "learner.objective.kl_reward_coefficient=0.1"
    for chosen in (named("max_rl"), "learner.objective.advantage=max_rl"):
        with pytest.raises(ConfigError, match=r"advantage=max_rl .*_coefficient=0\.1 changes"):
            build(chosen, beta)
        build(chosen, "learner.objective.kl_coefficient=0.1")
    build(beta)


# -- objectives ------------------------------------------------------------------------------------


def test_own_successes_need_the_place_of_one_row():
    assert "expert.per_group=0: set it to 1" in str(start(named("exgrpo")))
    assert "expert.per_group=2: set it to 1" in str(start(named("exgrpo"), "expert.per_group=2"))
    one = (named("exgrpo"), "expert.per_group=1", "learner.micro_batch_tokens=99999")
    assert "set it to null" in str(start(*one, "expert.prefix=fixed"))
    assert start(*one) is None


@pytest.mark.parametrize("name", WIRED)
def test_offline_an_objective_is_refused_that_learns_nothing_from_a_trace_alone(name: str):
    entry = OBJECTIVES[name]
    taught = ("learner.teacher=a/b",) if name == "distill" else ()
    one_row = (named(name), "learner.micro_batch_tokens=99999", FRESH, OFFLINE, *taught)
    if "advantage" in reads(entry) and name != "ppo":
        compared = start("learner.objective.advantage=group_mean", *one_row)
        rewarded = start("learner.objective.advantage=none", *one_row)
    else:
        compared = rewarded = start(*one_row)
    if entry.alone == "always" or entry().rejects:
        # Whether there are pairs of responses only the data say.
        assert (compared, rewarded) == (None, None)
    elif entry.alone == "by advantage":
        assert "set learner.objective.advantage=none" in str(compared)
        assert rewarded is None
    else:
        assert "learner.source=ledger" in str(compared)
        assert "learner.source=ledger" in str(rewarded)


WHOLE = "data.train=[{path: a.jsonl, turns: all}]"


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["expert.per_group=0"], r"learns from no answer of its data.*learner\.source=offline"),
        (
            [OFFLINE, named("sft"), "data.archive=old"],
            r"learns from no answer .* without data\.archive",
        ),
        (["expert.per_group=1", "expert.prefix=fixed"], r"expert\.prefix=fixed would begin"),
        ([OFFLINE, named("sft"), "data.pack_tokens=8"], r"data\.pack_tokens=8 from all tokens"),
        ([OFFLINE, named("dpo")], r"dpo compares two responses .* choose sft"),
        ([OFFLINE, named("sft"), "data.template=qwen"], r"data\.template=qwen: set"),
        ([OFFLINE, named("sft"), "data.prefill=<think>"], r"data\.prefill='<think>' would begin"),
    ],
)
def test_all_answers_are_learned_from_only_where_they_can_be_told_apart(
    overrides: list[str], why: str
):
    assert re.search(why, str(start(WHOLE, *overrides)))
    # By default only the last one is, with any settings.
    assert "turns" not in str(start("data.train=[{path: a.jsonl}]", *overrides))


def test_all_answers_are_learned_from_offline_and_beside_own_samples():
    assert start(WHOLE, OFFLINE, named("sft")) is None
    assert start(WHOLE, "expert.per_group=1", named("luffy")) is None


def test_offline_an_objective_of_your_own_is_tried():
    assert start(named("my.module:loss"), OFFLINE) is None


@pytest.mark.parametrize("name", ["reinforce", "reinforce_baseline", "srft"])
def test_several_updates_of_a_step_need_a_ratio(name: str):
    with pytest.raises(ConfigError, match=r"set learner\.minibatches=1"):
        build(named(name), FRESH, "learner.minibatches=2")
    with pytest.raises(ConfigError, match=r"set learner\.update_epochs=1, choose"):
        build(named(name), FRESH, "learner.update_epochs=2")
    with pytest.raises(
        ConfigError, match=r"makes? 6 updates .*minibatches=1 and learner\.update_e"
    ):
        build(named(name), FRESH, "learner.minibatches=2", "learner.update_epochs=3")
    build(named(name), FRESH)
    build("learner.minibatches=2", "learner.update_epochs=3")


UNCLIPPED = ("learner.objective.clip_low=null", "learner.objective.clip_high=null")


@pytest.mark.parametrize("name", ["grpo", "cispo", "luffy", "gspo"])
def test_a_new_run_needs_a_bound_of_stale_tokens_ratios(name: str):
    config = build(named(name), *UNCLIPPED, "learner.micro_batch_tokens=99999")
    assert re.search(r"replay\.max_staleness=1: set it to 0, give", str(why_not_started(config)))
    # Older versions have begun such runs.
    assert why_not_started(config, anew=False) is None
    for mended in (FRESH, "learner.objective.clip_high=1e9"):
        assert start(named(name), *UNCLIPPED, "learner.micro_batch_tokens=99999", mended) is None


def test_a_correction_bounds_stale_tokens_without_a_clip():
    assert start(named("decoupled_ppo"), *UNCLIPPED) is None


def test_the_plain_gradient_of_several_updates_is_named_and_may_be_started():
    with pytest.raises(ConfigError, match=r"cispo with .*clip_low=1e-6 and clip_high=1e-6"):
        build(named("reinforce_baseline"), FRESH, "learner.minibatches=4")
    plain = ("learner.objective.clip_low=1e-6", "learner.objective.clip_high=1e-6")
    assert start(named("cispo"), FRESH, *plain, "learner.minibatches=4") is None


def test_seeds_beyond_the_ledger_and_graders_that_cannot_start_are_refused():
    assert "run.seed=18014398509481984 is over" in (start("run.seed=18014398509481984") or "")
    assert start("run.seed=9007199254740992") is None
    assert "reward.memory_mb=64" in (start("reward.memory_mb=64") or "")
    assert start("reward.memory_mb=80") is None


def test_a_bound_of_the_kl_needs_updates_that_it_can_leave_out():
    bound = "learner.stop_kl=0.1"
    with pytest.raises(ConfigError, match=r"a step has one: raise learner\.update_epochs"):
        build(bound)
    build(bound, "learner.update_epochs=2")
    build(bound, "learner.minibatches=2")
    with pytest.raises(ConfigError, match="only stored responses"):
        build(bound, "learner.update_epochs=2", OFFLINE, named("sft"))
    build(bound, "learner.update_epochs=2", OFFLINE, "data.archive=archive")


# -- a critic --------------------------------------------------------------------------------------


def test_an_objective_that_needs_a_critic_gets_one_and_no_other_does():
    critic = build(named("ppo")).learner.critic
    assert critic is not None
    assert (critic.model, critic.optimizer.lr, critic.warmup_steps) == (None, 1e-5, 0)
    assert build().learner.critic is None
    other = build(named("ppo"), "learner.critic.optimizer.weight_decay=0.01").learner.critic
    assert other is not None
    assert (other.optimizer.lr, other.optimizer.weight_decay) == (1e-5, 0.01)


def test_settings_of_a_critic_without_one_are_refused():
    with pytest.raises(ConfigError, match=r"grpo has no critic: set learner\.critic=null"):
        build("learner.critic.warmup_steps=2")
    # Under a preset with ppo, another objective leaves them out.
    learner = {"objective": {"name": "ppo"}, "critic": {"warmup_steps": 2}}
    tree = {**TREE, "learner": learner}
    assert c.build(tree, [named("grpo")]).learner.critic is None
    assert c.unread_keys(tree, [named("grpo")]) == ["learner.critic.warmup_steps"]
    assert c.build(tree).learner.critic.warmup_steps == 2
    assert build(named("my.module:Ppo"), "learner.critic.warmup_steps=2").learner.critic


def test_ppo_takes_no_traces():
    with pytest.raises(ConfigError, match=r"set expert\.per_group=0"):
        build(named("ppo"), "expert.per_group=1")


def test_ppo_has_no_baseline_of_a_group():
    with pytest.raises(ConfigError, match="advantage"):
        build(named("ppo"), "learner.objective.advantage=group_mean")


def test_a_warm_up_of_the_critic_leaves_steps_for_the_policy():
    with pytest.raises(ConfigError, match=r"all of run\.steps=10"):
        build(named("ppo"), "learner.critic.warmup_steps=10")
    build(named("ppo"), "learner.critic.warmup_steps=9")


@pytest.mark.parametrize("name", ["reinforce", "reinforce_baseline"])
def test_without_a_clip_nothing_holds_stale_samples(name: str):
    with pytest.raises(ConfigError, match=r"set replay\.max_staleness=0"):
        build(named(name))
    with pytest.raises(ConfigError, match=rf"clip_low isn't read by .*name={name}"):
        build(named(name), "learner.objective.clip_low=0.2")


@pytest.mark.parametrize("name", ["tis", "icepop", "mis", "decoupled_ppo"])
def test_weights_of_stale_tokens_are_chosen_and_not_empty(name: str):
    with pytest.raises(ConfigError, match="choose truncate or mask"):
        build(named(name), "learner.objective.correction=none")
    bounds = ("learner.objective.correction_low=3", "learner.objective.correction_high=2")
    with pytest.raises(ConfigError, match="which are none"):
        build(named(name), "learner.objective.correction=mask", *bounds)


def test_zero_0_in_bf16_is_refused_where_it_adds_up_micro_batches():
    bf16 = ("model.dtype=bfloat16", "learner.zero_stage=0")
    assert "set learner.zero_stage=1" in str(start(*bf16))
    assert start("learner.zero_stage=0") is None
    assert start("model.dtype=bfloat16", "learner.zero_stage=1") is None
    assert start(*bf16, "data.max_prompt_tokens=20", "rollout.max_new_tokens=20") is None


# -- naming another objective ----------------------------------------------------------------------

PRESET = {
    **TREE,
    "learner": {"objective": {"name": "luffy", "advantage": "group_mean", "gamma": 0.3}},
}


def test_another_name_brings_its_own_settings():
    objective = c.build(PRESET, [named("reinforce_pp")]).learner.objective
    assert (objective.advantage, objective.aggregation) == ("reinforce_pp", "token_mean")
    assert objective.gamma == 0.3


def test_another_name_leaves_out_what_it_does_not_read():
    assert c.unread_keys(PRESET, [named("dpo")]) == [
        "learner.objective.advantage",
        "learner.objective.gamma",
    ]
    assert c.unread_keys(PRESET, [named("reinforce_pp")]) == []
    assert c.unread_keys(PRESET) == []
    found = c.build(PRESET, [named("dpo")]).model_dump()["learner"]["objective"]
    assert set(found) == {"name", "truncation", "stragglers", "beta", "label_smoothing"}
    assert found["stragglers"] == "mask"  # A slow host isn't the text's own doing.


@pytest.mark.parametrize("key", ["gamma=0.2", "advantage=none", "params.mine=1"])
def test_a_key_that_the_name_does_not_read_is_refused_in_any_order(key: str):
    told = rf"learner.objective.{key[:5]}\w* isn't read by learner.objective.name=dpo: leave it out"
    for order in (1, -1):
        with pytest.raises(ConfigError, match=told):
            c.build(PRESET, [named("dpo"), f"learner.objective.{key}"][::order])


def test_an_objective_of_your_own_has_params_and_what_the_updates_read():
    words = [named("mine:loss"), "learner.objective.params.x=1", "learner.objective.advantage=none"]
    objective = c.build(PRESET, words).learner.objective
    assert (objective.params, objective.advantage) == ({"x": 1}, "none")
    assert objective.kl_coefficient == 0.0
    assert c.unread_keys(PRESET, words) == ["learner.objective.gamma"]


def test_settings_of_another_engine_are_refused_in_any_order():
    setting = "rollout.vllm.max_num_seqs=4"
    for engine in ("torch", "mine:engine"):
        for order in (1, -1):
            with pytest.raises(
                ConfigError, match=rf"rollout.vllm.max_num_seqs is .*rollout.engine={engine}"
            ):
                build(*[setting, f"rollout.engine={engine}"][::order])
    with pytest.raises(ConfigError, match=r"rollout.vllm.max_num_seqs"):
        build(setting, "run.deterministic=true")
    for engine in ("auto", "vllm"):
        assert build(setting, f"rollout.engine={engine}").rollout.vllm.max_num_seqs == 4


def test_another_engine_leaves_out_a_presets_settings_of_vllm():
    tree = {**TREE, "rollout": {"engine": "vllm", "vllm": {"max_num_seqs": 4}}}
    assert c.build(tree, ["rollout.engine=torch"]).rollout.vllm is None
    assert c.unread_keys(tree, ["rollout.engine=torch"]) == ["rollout.vllm.max_num_seqs"]
    assert c.unread_keys(tree) == []


def test_what_is_set_beside_the_name_wins():
    given = [named("reinforce_pp"), "learner.objective.advantage=own_mean"]
    assert c.build(PRESET, given).learner.objective.advantage == "own_mean"
    assert c.build(PRESET, given[::-1]).learner.objective.advantage == "own_mean"


def test_the_same_name_changes_nothing():
    tree = {**TREE, "learner": {"objective": {"name": "dapo", "clip_high": 0.3}}}
    assert c.build(tree, [named("dapo")]).learner.objective.clip_high == 0.3


# -- the longest row -------------------------------------------------------------------------------


def test_a_micro_batch_must_hold_the_longest_row():
    limits = ("data.max_prompt_tokens=100", "rollout.max_new_tokens=51")
    assert start(*limits, "learner.micro_batch_tokens=150") is None
    refusal = str(start(*limits, "learner.micro_batch_tokens=149"))
    assert "at least 150" in refusal
    assert "data.max_prompt_tokens=100" in refusal
    assert "rollout.max_new_tokens=51" in refusal


@pytest.mark.parametrize("name", ["dpo", "orpo", "cpo"])
def test_a_micro_batch_must_hold_the_longest_group_where_groups_stay_whole(name: str):
    limits = (
        "data.max_prompt_tokens=100",
        "rollout.max_new_tokens=51",
        "rollout.group_size=4",
        named(name),
    )
    assert start(*limits, "learner.micro_batch_tokens=600") is None
    refusal = str(start(*limits, "learner.micro_batch_tokens=599"))
    assert "at least 600" in refusal
    assert f"which {name} never splits" in refusal


def test_a_micro_batch_must_hold_a_held_out_pair_whatever_is_trained_on():
    limits = ("data.max_prompt_tokens=100", "rollout.max_new_tokens=51", OFFLINE, named("kto"))
    limits += ("learner.objective.advantage=none",)
    assert start(*limits, "learner.micro_batch_tokens=299") is None
    held = "data.heldout_pairs=0.2"
    assert start(*limits, held, "learner.micro_batch_tokens=300") is None
    refusal = str(start(*limits, held, "learner.micro_batch_tokens=299"))
    assert "2 rows of a group, which the comparison of data.heldout_pairs never splits" in refusal
    assert "at least 300, or lower data.max_prompt_tokens or" in refusal


def test_the_unit_of_an_objective_of_your_own_is_told_by_itself():
    config = build("learner.micro_batch_tokens=2047")
    assert micro_batch_refusal(config, unit="row") is None
    assert "16,376" in str(micro_batch_refusal(config, unit="group", what="mine"))


# -- the rest --------------------------------------------------------------------------------------

BEST = [
    "data.evaluate=[{path: a}]",
    "evaluate.exact=true",
    "evaluate.best=heldout/accuracy",
    "rollout.workers=0",
]
"""The best model is kept, and no rollout worker is the run's own."""

TAUGHT = [named("distill"), "learner.teacher=a/b"]

NOTHING = [
    (BEST, "set it to a number of steps"),
    ([*BEST, "evaluate.every=5", OFFLINE, named("sft")], "set rollout.workers=1"),
    ([named("sft")], "set expert.per_group=1"),
    ([named("distill")], "set learner.teacher to a model with the policy's tokenizer"),
    (["learner.teacher=a/b"], "set learner.teacher=null, or learner.objective.name=distill"),
    ([*TAUGHT, "learner.objective.sft_coefficient=1"], "set learner.objective.sft_coefficient=0"),
    (["reward.own_reward=1"], "pays every sample alike"),
    (["reward.components=[{name: accuracy, weight: 0}]"], "is paid 0"),
    (["reward.components=[]", "expert.per_group=1"], "is paid 0"),
    (
        [
            named("luffy"),
            "learner.objective.expert_clip_low=3",
            "learner.objective.expert_clip_high=1",
        ],
        "swap them",
    ),
    (["learner.objective.entropy_target=0.3"], "set learner.objective.entropy_coefficient"),
    (["replay.maxmemory_mb=1", "rollout.max_new_tokens=9000"], "raise it to 2 or more"),
    (["replay.redis_ca=a.pem"], "and replay.redis_url is not set"),
    (
        ["replay.redis_cert=a.pem", "replay.redis_url=redis://h:1/0"],
        "begins with redis://: write replay.redis_url=rediss://",
    ),
    (
        ["replay.redis_key=a.key", "replay.redis_url=rediss://h:1/0"],
        "set replay.redis_cert as well",
    ),
    (["replay.durability=server"], "set it to process or power"),
    (["rollout.engine=vllm", "rollout.vllm.max_model_len=2047"], "raise it to at least 2,048"),
    (["rollout.engine=torch", "rollout.gpus_per_worker=2"], "set rollout.gpus_per_worker=1"),
    (["rollout.temperature=0.009"], "rollout.temperature=0.009 is less than vLLM samples at"),
    (["evaluate.temperature=0.009", "rollout.engine=vllm"], "set it to 0.01 or more, to 0 for"),
    (["data.evaluate=[{path: a, temperature: 0.009}]"], "data.evaluate heldout: temperature=0.009"),
    (["expert.accept=[corect]"], "did you mean correct?"),
    (["expert.accept=[crashed]"], "which isn't one of"),
    (["expert.prefix_low=0.5"], "expert.prefix=null begins none"),
    (["expert.prefix_steps=5"], "schedules in time alone"),
    (["data.system_prompt=Think.", "data.template=r1_zero"], "set data.system_prompt=null"),
    (
        ["expert.per_group=1", "expert.prefix=random", "expert.prefix_steps=5"],
        "schedules in time alone",
    ),
    (["evaluate.every=5"], "name one in data.evaluate"),
    (["evaluate.samples=4"], "set evaluate.temperature=1"),
    (["data.train=[{path: x/a.parquet}, {path: y/a.parquet}]"], "two entries named 'a'"),
    (["data.evaluate=[{path: a}, {path: b}]"], "two entries named 'heldout'"),
    (["model.attention=flash_attention_2"], "set model.dtype=bfloat16"),
    (
        ["model.attention=flash_attention_2", "model.dtype=bfloat16", "launch.gpus=none"],
        "needs a GPU",
    ),
    (["model.attention=flex", "launch.gpus=none"], "set model.attention=sdpa"),
    (["model.kernels=liger", "launch.gpus=none"], "set model.kernels=auto"),
    (["rollout.update_wait_seconds=46"], "weights.commit_seconds=60"),
    (["weights.transport=nccl", "launch.gpus=none"], "weights.transport=auto"),
]


def test_a_run_that_began_with_a_system_prompt_for_nothing_goes_on() -> None:
    config = build("data.system_prompt=Think.", "data.template=r1_zero")
    assert why_not_started(config) is not None
    assert why_not_started(config, anew=False) is None


@pytest.mark.parametrize(
    "words",
    [
        ["data.template=none"],
        ["data.template=r1_zero", "data.evaluate=[{path: a, template: own}]"],
    ],
)
def test_a_system_prompt_may_be_of_some_prompts_alone(words: list[str]) -> None:
    assert why_not_started(build("data.system_prompt=Think.", *words)) is None


@pytest.mark.parametrize(
    "override",
    [
        "learner.optimizer.lr=.inf",
        "learner.optimizer.betas=[0.9, 1]",
        "learner.optimizer.betas=[-0.1, 0.9]",
        "learner.optimizer.eps=-1",
        "learner.optimizer.weight_decay=-1",
        "replay.lease_seconds=.inf",
        "learner.objective.sft_coefficient=.nan",
    ],
)
def test_a_number_that_no_optimizer_or_clock_takes_is_refused(override: str):
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        build(override)


@pytest.mark.parametrize(
    ("overrides", "way_out"),
    [
        (["name=rmsprop", "betas=[0.9, 0.99]"], "betas=.* is adamw's, .* leave it out"),
        (["alpha=0.9"], "alpha=0.9 is rmsprop's, .* set name=rmsprop"),
        (["warmup_steps=5", "warmup_share=0.1"], "leave one out"),
        (["warmup_share=1.5"], "warmup_share"),
        (["name=adam"], "name"),
    ],
)
def test_settings_of_an_optimizer_that_do_not_go_together_are_refused(
    overrides: list[str], way_out: str
):
    with pytest.raises(ConfigError, match=way_out):
        build(*(f"learner.optimizer.{one}" for one in overrides))


@pytest.mark.parametrize(
    ("overrides", "way_out"),
    [
        ([], "learner.source=ledger .* set data.pack_tokens=null"),
        ([OFFLINE, named("dpo")], "learner.objective.name=dpo"),
        ([OFFLINE, named("sft"), "data.archive=a"], "data.archive=a"),
        ([OFFLINE, named("sft"), "rollout.max_new_tokens=63"], "rollout.max_new_tokens=63"),
        ([OFFLINE, named("sft"), "data.train=[{path: a, weight: 2}]"], "leave the weights out"),
    ],
)
def test_blocks_are_for_sft_on_stored_responses_alone(overrides: list[str], way_out: str):
    with pytest.raises(ConfigError, match=way_out):
        build("data.pack_tokens=64", *overrides)


def test_a_preset_over_another_optimizers_leaves_its_keys_out():
    tree = {**TREE, "learner": {"optimizer": {"betas": [0.9, 0.99], "lr": 1e-5}}}
    override = "learner.optimizer.name=rmsprop"
    optimizer = c.build(tree, [override]).learner.optimizer
    assert (optimizer.alpha, optimizer.betas, optimizer.lr) == (0.99, None, 1e-5)
    assert c.unread_keys(tree, [override]) == ["learner.optimizer.betas"]
    assert c.read_config(c.to_yaml(c.build(tree, [override]))).learner.optimizer == optimizer


@pytest.mark.parametrize(("overrides", "way_out"), NOTHING, ids=lambda v: str(v)[:60])
def test_what_would_do_nothing_or_fail_later_is_not_started(overrides: list[str], way_out: str):
    assert way_out in str(start(*overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [named("sft"), "expert.per_group=1"],
        TAUGHT,
        [*TAUGHT, OFFLINE, "learner.objective.sft_coefficient=1"],
        [*TAUGHT, "learner.objective.sft_coefficient=1", "expert.per_group=1"],
        [*TAUGHT, "reward.components=[]"],
        [*TAUGHT, "reward.own_reward=0"],
        ["reward.own_reward=1", "expert.per_group=1"],
        ["reward.own_reward=1", named("reinforce"), FRESH],
        ["expert.accept=[correct, wrong]"],
        ["expert.per_group=1", "expert.prefix=linear", "expert.prefix_steps=5"],
        ["evaluate.every=5", "data.evaluate=[{path: a}]"],
        [*BEST, "evaluate.every=5"],  # A worker that joins evaluates.
        ["evaluate.samples=4", "evaluate.temperature=1"],
        ["rollout.temperature=0.009", "evaluate.temperature=0.009", "rollout.engine=torch"],
        ["rollout.temperature=0.01", "evaluate.temperature=0.01"],
        ["rollout.temperature=0.009", OFFLINE, named("sft")],
        ["weights.transport=nccl"],
    ],
    ids=lambda v: " ".join(v)[:60],
)
def test_what_has_an_effect_is_started(overrides: list[str]):
    assert start(*overrides) is None


# -- a run that was begun before -------------------------------------------------------------------


def test_a_stored_config_is_read_whatever_is_refused_today():
    tree = build(FRESH).model_dump(mode="json")
    tree["rollout"]["group_size"] = 1
    with pytest.raises(ConfigError, match=r"raise rollout\.group_size"):
        c.build(tree)
    assert c.read_config(yaml.safe_dump(tree)).rollout.group_size == 1


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_stored_config_that_lists_every_key_is_read_as_its_own_objectives(name: str):
    tree = build(FRESH).model_dump(mode="json")
    own = OBJECTIVES[name](truncation="mask")
    tree["learner"]["objective"] = dict.fromkeys(KEYS - {"params"}, 0.25) | asdict(own)
    assert c.read_config(yaml.safe_dump(tree)).learner.objective == own


def test_a_stored_config_of_the_torch_engine_may_list_settings_of_vllm():
    tree = build("rollout.engine=torch").model_dump(mode="json")
    tree["rollout"]["vllm"] = {"max_num_seqs": 4, "args": {}}
    assert c.read_config(yaml.safe_dump(tree)) == build("rollout.engine=torch")


def test_a_resumed_run_may_raise_its_micro_batches():
    before, after = build(), build("learner.micro_batch_tokens=9999")
    assert c.frozen_differences(before, after) == {}


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["expert.per_group=0"], r"no trace to put.*per_group to 1"),
        (
            ["expert.per_group=1", "expert.prefix=fixed"],
            r"expert.prefix=null, or expert.when=always",
        ),
        (["expert.per_group=1", "learner.source=offline"], r"offline has none: set expert.when"),
    ],
)
def test_traces_chosen_after_grading_need_graded_groups_and_whole_traces(
    overrides: list[str], told: str
):
    with pytest.raises(ConfigError, match=told):
        build("expert.when=all_failed", *overrides)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["learner.objective.advantage=none"], "learns from these too"),
        (["learner.objective.name=ppo"], "learns from these too"),
        (["learner.objective.name=distill"], "learns from these too"),
        (["learner.objective.name=rl_sft_loss", FRESH], "their expert rows whatever they are paid"),
        (["learner.objective.kl_reward_coefficient=0.1"], "set one of the two to 0"),
        (
            [
                "learner.objective.turn_discount=0.9",
                "environments.use={e: {form: text, target: 'a.b:C'}}",
            ],
            "their turns may differ",
        ),
    ],
)
def test_groups_without_a_signal_are_left_out_only_where_they_teach_nothing(
    overrides: list[str], told: str
):
    with pytest.raises(ConfigError, match=rf"replay\.dynamic_sampling=4 .*{told}"):
        build("expert.per_group=1", "replay.dynamic_sampling=4", *overrides)
    build("expert.per_group=1", "replay.dynamic_sampling=4")
    build("replay.dynamic_sampling=4", "learner.source=offline", "learner.objective.advantage=none")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["replay.dynamic_sampling=4", "replay.dynamic_sampling_means=[0.8,0.2]"],
            "leaves no group",
        ),
        (["replay.dynamic_sampling_means=[0.2,0.8]"], "set replay.dynamic_sampling to"),
        (["replay.dynamic_sampling=4", "replay.dynamic_sampling_means=[0.2]"], "field required"),
        (["replay.dynamic_sampling=4", "replay.dynamic_sampling_means=[0,.inf]"], "finite"),
        (
            [
                "replay.dynamic_sampling=4",
                "replay.dynamic_sampling_means=[0.2,0.8]",
                "expert.per_group=1",
                "expert.when=all_failed",
            ],
            "set one of the two to its default",
        ),
    ],
)
def test_bounds_of_the_mean_reward_that_cannot_hold_are_refused(overrides: list[str], told: str):
    with pytest.raises(ConfigError, match=told):
        build(*overrides)
    build("replay.dynamic_sampling=4", "replay.dynamic_sampling_means=[0.2,0.8]")


def test_where_traces_enter_after_grading_all_own_samples_are_asked_for():
    config = build("rollout.group_size=2", "expert.per_group=1", "expert.when=all_failed")
    assert own_rows(config) == 2
    with pytest.raises(ConfigError, match="leaves 1 own sample"):
        build("rollout.group_size=2", "expert.per_group=1")
