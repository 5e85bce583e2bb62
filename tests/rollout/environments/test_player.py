"""Episodes as samples of a group: a real engine and endpoint, a real environment server with its processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from environment_runs import Run, connected

from tandem.common.config import build
from tandem.common.records import FinishReason, SamplingParams, Source, Verdict, Version
from tandem.rollout.engine import FinishedGroup, GroupRequest, Task, no_tokens
from tandem.rollout.player import Player, shared_prompt

CONTEXT = 1024
TURNS = 3
SETTINGS = build(
    {"run": {"steps": 1}, "data": {"train": [{"path": "a.parquet"}], "max_prompt_tokens": 800}},
    [
        f"environments.max_turns={TURNS}",
        "environments.use={agent: {form: agent, target: 'played_worlds:agent'}}",
    ],
)


@pytest.fixture(scope="module")
def model() -> Any:
    """A random model, and the tokenizer of the miniature with a tool."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tandem.launch.miniature.tools.tokenizer import build as tokenizer

    made = tokenizer()
    config = Qwen2Config(
        vocab_size=len(made), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=48, max_position_embeddings=CONTEXT,
        tie_word_embeddings=True, eos_token_id=made.eos_token_id, pad_token_id=made.pad_token_id,
        bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(5)
    random = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in random.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.2)
    return random.eval(), made


@asynccontextmanager
async def playing(run: Run, model: Any) -> AsyncIterator[Player]:
    import copy

    from tandem.rollout.decoding.torch_engine import TorchEngine
    from tandem.rollout.endpoint.server import Endpoint

    random, tokenizer = model
    engine = TorchEngine(
        copy.deepcopy(random), tokenizer, version=Version(term=1, step=0), longest=CONTEXT
    )
    await engine.start()
    endpoint = Endpoint(engine, tokenizer, context=CONTEXT, model="tiny")
    await endpoint.start()
    client = run.client()
    await client.start()
    try:
        await connected(client)
        yield Player(engine, endpoint, client, SETTINGS, tokenizer)
    finally:
        await client.close()
        await endpoint.close()
        await engine.close()


def sampling(most: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=most)


def request(name: str, environment: str | None, count: int = 4, **row: Any) -> GroupRequest:
    task = None if environment is None else Task(environment=environment, row=row)
    return GroupRequest(
        group_id=name,
        prompt_tokens=no_tokens() if task else np.arange(5, 9, dtype=np.int32),
        count=count,
        sampling=sampling(16),
        seed=7,
        task=task,
    )


def together(run: Run, model: Any, *requests: GroupRequest) -> dict[str, FinishedGroup]:
    async def scenario() -> dict[str, FinishedGroup]:
        async with playing(run, model) as player, asyncio.timeout(100):
            found = {group.group_id: group async for group in player.generate(requests)}
            assert (player.episodes, player.over) == (0, 0)
            assert {name: group.error for name, group in found.items() if group.error} == {}
            return found

    return asyncio.run(scenario())


@pytest.mark.usefixtures("running")
def test_an_episode_is_a_sample_of_own_and_environment_tokens(run: Run, model: Any) -> None:
    import torch

    prompt = [{"role": "user", "content": "let us talk"}]
    groups = together(
        run, model, request("0-0", "talks", prompt=prompt), request("0-1", None, count=2)
    )
    assert len(groups["0-1"].samples) == 2
    assert groups["0-1"].prompt_tokens is None
    group = groups["0-0"]
    assert group.prompt_tokens is not None
    assert "let us talk" in str(group.prompt_text)
    for sample in group.samples:
        assert sample.episode is not None
        assert sample.episode.failure is None, sample.episode.detail
        assert len(sample.episode.turns) == TURNS
        own = sample.source == Source.OWN
        turns = sample.episode.turns
        assert int(own.sum()) == sum(turn.end - turn.start for turn in turns)
        assert all(own[turn.start : turn.end].all() for turn in turns)
        # What the environment said stands between the turns, in its template.
        text = model[1].decode(sample.tokens[turns[0].end : turns[1].start].tolist())
        assert "you said" in text
        assert sample.text == model[1].decode(
            sample.tokens[turns[-1].start : turns[-1].end].tolist(), skip_special_tokens=True
        )
        whole = np.concatenate([group.prompt_tokens, sample.tokens]).astype(np.int64)
        with torch.no_grad():
            logits = model[0](torch.from_numpy(whole)[None]).logits[0, :-1].log_softmax(-1)
        known = logits.gather(1, torch.from_numpy(whole[1:])[:, None])[:, 0].numpy()
        known = known[len(group.prompt_tokens) - 1 :]
        assert np.abs(known - sample.logprobs)[own].max() < 1e-4
        assert np.isnan(sample.logprobs[~own]).all()
        assert sample.oldest_step == 0


@pytest.mark.usefixtures("running")
def test_an_episode_that_ends_at_the_greatest_number_of_turns_is_cut_by_its_length(
    run: Run, model: Any
) -> None:
    # The policy ends each of its turns itself, by whatever it writes first.
    asked = request("0-0", "talks", prompt=[{"role": "user", "content": "let us talk"}])
    group = together(run, model, replace(asked, stop=tuple(map(chr, range(32, 127)))))["0-0"]
    for sample in group.samples:
        assert sample.episode is not None
        assert (sample.episode.detail, len(sample.episode.turns)) == ("max_turns", TURNS)
        assert sample.finish_reason is FinishReason.LENGTH


@pytest.mark.usefixtures("running")
def test_episodes_of_one_seed_are_the_same_and_those_of_a_group_differ(
    run: Run, model: Any
) -> None:
    prompt = [{"role": "user", "content": "let us talk"}]
    one, two = (
        together(run, model, request("0-0", "talks", prompt=prompt))["0-0"] for _ in range(2)
    )
    tokens = [[sample.tokens.tolist() for sample in group.samples] for group in (one, two)]
    assert tokens[0] == tokens[1]
    assert len({tuple(row) for row in tokens[0]}) > 1


@pytest.mark.usefixtures("running")
def test_the_models_time_is_no_time_of_an_agents_environment(run: Run, model: Any) -> None:
    async def scenario() -> list[FinishedGroup]:
        async with playing(run, model) as player, asyncio.timeout(100):
            sample = player._endpoint._turns.sample

            async def slow(*given: Any) -> Any:
                await asyncio.sleep(0.5)
                return await sample(*given)

            player._endpoint._turns.sample = slow  # type: ignore[method-assign]
            asked = request("0-0", "agent", count=2, question="how long?", answer="half a second")
            return [group async for group in player.generate([asked])]

    (group,) = asyncio.run(scenario())
    assert (group.error, len(group.samples)) == (None, 2)
    for sample in group.samples:
        assert sample.episode is not None
        figures = sample.episode.metrics
        assert figures["model_seconds"] > 0.5
        spent = figures["environment_seconds"] + figures["model_seconds"]
        assert spent < figures["episode_seconds"] + 0.01


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize(
    ("row", "verdict", "has_tokens"),
    [
        ({"where": "reset", "what": "raise", "number": 3}, Verdict.ENV_RESET, False),
        ({"where": "step", "what": "raise", "number": 3}, Verdict.ENV_FAILED, True),
        ({"where": "step", "what": "nan"}, Verdict.ENV_FAILED, True),
        ({"where": "step", "what": "kill"}, Verdict.ENV_FAILED, True),
    ],
)
def test_a_failed_episode_says_how_and_has_no_reward(
    run: Run, model: Any, row: dict[str, Any], verdict: Verdict, has_tokens: bool
) -> None:
    group = together(run, model, request("0-0", "bad", count=2, **row))["0-0"]
    for sample in group.samples:
        assert sample.episode is not None
        assert (sample.episode.failure, sample.episode.reward) == (verdict, None)
        assert sample.episode.detail
        assert (len(sample.tokens) > 0) == has_tokens


@pytest.mark.usefixtures("running")
def test_an_episode_whose_beginning_has_no_room_says_which_settings_to_raise(
    run: Run, model: Any
) -> None:
    prompt = "twelve letters " * 300
    (sample,) = together(run, model, request("0-0", "talks", count=1, prompt=prompt))["0-0"].samples
    assert sample.episode is not None
    assert sample.episode.failure is Verdict.ENV_FAILED
    assert "data.max_prompt_tokens" in sample.episode.detail


@pytest.mark.usefixtures("running")
def test_a_group_that_is_ended_keeps_what_it_has(run: Run, model: Any) -> None:
    async def scenario() -> FinishedGroup:
        async with playing(run, model) as player, asyncio.timeout(100):
            groups = player.generate([request("0-0", "bad", count=2, where="step", what="hang")])
            waiting = asyncio.ensure_future(anext(aiter(groups)))
            while sum(len(s.branches) for s in player._endpoint._sessions.values()) < 2:
                await asyncio.sleep(0.01)
            await player.abort(["0-0", "another"])
            return await waiting

    group = asyncio.run(scenario())
    for sample in group.samples:
        assert sample.finish_reason is FinishReason.ABORT


@pytest.mark.usefixtures("running")
def test_prompts_that_differ_share_what_they_begin_with(run: Run, model: Any) -> None:
    # This environment shows the number of its process.
    group = together(run, model, request("0-0", "guess", count=3, number=3))["0-0"]
    assert group.prompt_tokens is not None
    decoded = [
        model[1].decode([*group.prompt_tokens.tolist(), *sample.tokens.tolist()])
        for sample in group.samples
    ]
    assert all("I think of a number. Episode" in text for text in decoded)
    assert "Episode" in str(group.prompt_text)
    for sample in group.samples:
        assert sample.episode is not None
        assert sample.source[0] == Source.ENVIRONMENT or sample.episode.turns[0].start == 0


def test_a_prompt_without_a_common_beginning_doesnt_shorten_the_others() -> None:
    rows = [[5, 6, 7], [5, 6, 8, 9], [4]]
    assert shared_prompt([np.array(row, np.int32) for row in rows]).tolist() == [5, 6]
    assert shared_prompt([]).tolist() == []
