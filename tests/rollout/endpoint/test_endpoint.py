"""The token endpoint with a real engine and real clients."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from chat_templates import tokenizer
from endpoint_calls import CONTEXT, RUN_KEY, planted, run, sampling, tool

from tandem.common.records import FinishReason, Source, Version
from tandem.rollout.endpoint.requests import wanted

QUESTION = [{"role": "user", "content": "137*258=?"}]
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def learner_logprobs(model: Any, tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """``[S - 1]`` log-probs of all tokens but the first, by a plain forward pass."""
    import torch

    with torch.no_grad():
        logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, :-1] / temperature
    wanted = torch.from_numpy(tokens[1:].astype(np.int64))
    return logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0].numpy()


async def converse(client: Any, turns: int, tools: Any = None) -> list[dict[str, Any]]:
    """A client that sends back what it got, and what its tools say."""
    messages: list[dict[str, Any]] = [*QUESTION]
    for number in range(turns):
        answer = (
            (
                await client.chat.completions.create(
                    model="tiny", messages=messages, **({"tools": tools} if tools else {})
                )
            )
            .choices[0]
            .message
        )
        messages.append(answer.model_dump(exclude_none=True))
        for call in answer.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{number}"})
        if not answer.tool_calls:
            messages.append({"role": "user", "content": f"and {number}?\n\n{{x}} <b>"})
    return messages


def test_what_was_sampled_is_recorded_as_the_engine_saw_it(serving: Any) -> None:
    async def scenario() -> None:
        async with serving() as served:
            sessions = [served.open(f"g#{i}") for i in range(8)]
            await asyncio.gather(
                *(
                    converse(served.client(s), 12, [tool()] if n % 2 else None)
                    for n, s in enumerate(sessions)
                )
            )
            for session in sessions:
                found = await served.endpoint.finish(session)
                assert len(found.turns) == 12
                assert (found.branches, found.retokenised) == (0, 0)
                own = found.source == Source.OWN
                assert [t.end - t.start for t in found.turns] == [
                    int(own[t.start : t.end].sum()) for t in found.turns
                ]
                assert int(own.sum()) == sum(t.end - t.start for t in found.turns)
                assert np.isnan(found.logprobs[~own]).all()
                whole = np.concatenate([found.prompt_tokens, found.tokens])
                known = learner_logprobs(served.model, whole)[len(found.prompt_tokens) - 1 :]
                assert np.abs(known - found.logprobs)[own].max() < 1e-4
                assert found.order == tuple(range(12))

    run(scenario())


FAMILIES = ("miniature", "chatml", "thinking", "llama")
"""Of 500 turns each by hand, which are 2,000."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("sessions", "turns"),
    [(2, 6), pytest.param(25, 20, marks=[pytest.mark.byhand, pytest.mark.timeout(600)])],
)
def test_no_familys_template_retokenises_a_turn(
    serving: Any, family: str, sessions: int, turns: int
) -> None:
    async def scenario() -> None:
        async with serving(tokenizer(family)) as served:
            opened = [served.open(f"g#{number}") for number in range(sessions)]
            for session in opened:
                await converse(served.client(session), turns, [tool()])
                found = await served.endpoint.finish(session)
                assert (found.branches, found.retokenised, len(found.turns)) == (0, 0, turns)
                own = found.source == Source.OWN
                whole = np.concatenate([found.prompt_tokens, found.tokens])
                known = learner_logprobs(served.model, whole)[len(found.prompt_tokens) - 1 :]
                assert np.abs(known - found.logprobs)[own].max() < 1e-4

    asyncio.run(scenario())


def test_the_first_prompt_is_the_chat_templates(serving: Any) -> None:
    async def scenario() -> None:
        async with serving() as served:
            session = served.open()
            await converse(served.client(session), 1, [tool()])
            found = await served.endpoint.finish(session)
            plain = served.tokenizer.apply_chat_template(
                QUESTION,
                tools=[tool()],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
            assert found.prompt_tokens.tolist() == list(plain)

    run(scenario())


def test_a_client_that_renders_badly_is_counted_and_its_branch_kept_apart(serving: Any) -> None:
    async def scenario() -> None:
        async with serving() as served:
            session = served.open()
            client = served.client(session)
            messages = await converse(client, 3)
            spoiled = [*messages[:1], {**messages[1], "content": messages[1]["content"] + " ."}]
            await client.chat.completions.create(model="tiny", messages=[*spoiled, *messages[2:]])
            found = await served.endpoint.finish(session)
            assert (found.branches, found.retokenised) == (1, 1)
            # The longest branch is the one that was never rendered anew.
            assert found.order == (0, 1, 2)

    run(scenario())


def test_a_new_conversation_is_a_branch_and_not_retokenised(serving: Any) -> None:
    async def scenario() -> None:
        async with serving() as served:
            session = served.open()
            client = served.client(session)
            await converse(client, 2)
            await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "a title, please"}]
            )
            found = await served.endpoint.finish(session)
            assert (found.branches, found.retokenised) == (1, 0)

    run(scenario())


def test_a_turn_that_is_asked_again_forks(serving: Any) -> None:
    async def scenario() -> None:
        async with serving() as served:
            session = served.open()
            client = served.client(session)
            messages = await converse(client, 3)
            again = await client.chat.completions.create(model="tiny", messages=messages[:3])
            assert again.choices[0].message.content is not None
            assert (len(session.branches), session.retokenised) == (2, 0)
            first, second = session.branches
            assert second.tokens[: first.turns[0].end] == first.tokens[: first.turns[0].end]
            assert second.logprobs[:3] == pytest.approx(first.logprobs[:3])

    run(scenario())


def test_token_ids_go_in_and_out_and_both_spellings_are_there(serving: Any) -> None:
    import aiohttp

    async def scenario() -> None:
        async with serving() as served, aiohttp.ClientSession() as http:
            session = served.open()
            root = session.base_url.removesuffix("/v1")
            ids = served.tokenizer.encode("12*3=?")
            seen: list[int] = [*ids]
            for _ in range(3):
                # As the package renderers asks.
                params = {"max_tokens": 6, "logprobs": 1, "skip_special_tokens": False}
                body = {"token_ids": seen, "sampling_params": params}
                async with http.post(f"{root}/inference/v1/generate", json=body) as answer:
                    choice = (await answer.json())["choices"][0]
                content = choice["logprobs"]["content"]
                assert [one["token"] for one in content] == [
                    f"token_id:{one['token_id']}" for one in content
                ]
                assert [one["token_id"] for one in content] == choice["token_ids"]
                seen += [*choice["token_ids"], *served.tokenizer.encode(" 7+")]
            found = await served.endpoint.finish(session)
            assert found.branches == 0
            assert found.prompt_tokens.tolist() == ids
            # What the client added after the last turn is no part of the stream.
            assert [*ids, *found.tokens.tolist()] == seen[: len(ids) + len(found.tokens)]

    run(scenario())


def test_special_tokens_that_a_client_names_end_an_answer(serving: Any) -> None:
    import aiohttp

    async def scenario() -> None:
        async with serving() as served, aiohttp.ClientSession() as http:
            start, end = served.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])

            async def ask(number: int, stops: list[int]) -> tuple[int, Any]:
                session = served.open(f"g#{number}", sampling=sampling(max_new_tokens=400))
                root = session.base_url.removesuffix("/v1")
                params = {"max_tokens": 400, "stop_token_ids": stops}
                body = {"token_ids": [10, 11, 12], "sampling_params": params}
                async with http.post(f"{root}/inference/v1/generate", json=body) as answer:
                    return answer.status, await answer.json()

            found = await asyncio.gather(*(ask(n, [end, start]) for n in range(16)))
            answers = [said["choices"][0] for status, said in found if status == 200]
            assert len(answers) == 16
            lasts = [one["token_ids"][-1] for one in answers]
            assert {start, end} <= set(lasts)
            for one in answers:
                assert not {start, end} & set(one["token_ids"][:-1])
                is_cut = one["token_ids"][-1] not in (start, end)
                assert one["finish_reason"] == ("length" if is_cut else "stop")
            status, said = await ask(16, [5000])
            assert (status, said["error"]["type"]) == (400, "invalid_request_error")
            status, said = await ask(17, [served.tokenizer.convert_tokens_to_ids("a")])
            assert status == 400
            assert "isn't a special token" in said["error"]["message"]

    run(scenario())


def test_a_call_that_ends_with_a_stop_string_is_read(serving: Any) -> None:
    async def scenario() -> None:
        async with serving() as served:
            session = served.open()
            for ending in ([], [served.tokenizer.eos_token_id]):
                answer = await answered(served, session, CALL, ending)
                (call,) = answer["tool_calls"]
                assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}

    run(scenario())


def test_a_template_that_refuses_other_ids_of_calls_than_its_own_gets_such(serving: Any) -> None:
    import aiohttp

    called = '[TOOL_CALLS][{"name": "multiply", "arguments": {"a": 1, "b": 2}}]'

    async def scenario() -> None:
        own = tokenizer("mistral")
        async with serving(own) as served, aiohttp.ClientSession() as http:
            session = served.open()
            said = await answered(served, session, called, [own.eos_token_id])
            (call,) = said["tool_calls"]
            result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
            body = {"messages": [*QUESTION, said, result], "tools": [tool()], "max_tokens": 4}
            async with http.post(f"{session.base_url}/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
            (branch,) = session.branches
            text = own.decode(branch.tokens[branch.turns[0].end : branch.turns[1].start])
            assert (
                text
                == f'[TOOL_RESULTS]{{"content": "2", "call_id": "{call["id"]}"}}[/TOOL_RESULTS]'
            )

    run(scenario())


def test_a_call_has_one_id_wherever_its_episode_is_played_and_no_other_call_has_it(
    serving: Any,
) -> None:
    async def scenario() -> None:
        async with serving() as served:

            async def ids(session: Any) -> list[str]:
                answer = await answered(served, session, f"{CALL}\n{CALL}", [])
                return [call["id"] for call in answer["tool_calls"]]

            session = served.open("g#0")
            first, second = await ids(session), await ids(session)
            again, other = served.open("g#0", attempt=1), served.open("g#1")
            assert [await ids(again), await ids(again)] == [first, second]
            # Each request without a session has one that nobody sees.
            plain = [await ids(served.endpoint._plain.session()) for _ in range(2)]
            found = [*first, *second, *await ids(other), *plain[0], *plain[1]]
            assert len(set(found)) == 10

    run(scenario())


def test_one_call_alone_is_read_where_a_client_wants_no_parallel_ones(serving: Any) -> None:
    async def scenario() -> None:
        async with serving() as served:
            both = [
                await answered(served, served.open(), f"{CALL}\n{CALL}", [], **asked)
                for asked in ({}, {"parallel_tool_calls": False})
            ]
            assert [len(answer["tool_calls"]) for answer in both] == [2, 1]

    run(scenario())


def test_a_stop_string_is_in_the_tokens_and_not_in_the_answer(serving: Any) -> None:
    text = "Action: look\nObservation: "

    async def scenario() -> None:
        async with serving() as served:
            session = served.open()
            kept = {"include_stop_str_in_output": True}
            for asked, said in (({}, "Action: look\n"), (kept, text)):
                answer = await answered(served, session, text, [], stop=["Observation:"], **asked)
                assert answer["content"] == said
            # A client that sends it back as it got it goes on in the same branch.
            before = session.branches[-1]
            messages = [*QUESTION, answer, {"role": "user", "content": "a door"}]
            ticket = await served.endpoint._chat.place(session, messages, [tool()])
            assert ticket.branch is before
            assert served.tokenizer.decode(before.tokens).endswith(text)

    run(scenario())


async def answered(
    served: Any, session: Any, text: str, ending: list[int], **asked: Any
) -> dict[str, Any]:
    """The message that a client gets for a text that the policy is taken to have written."""
    chat = served.endpoint._chat
    ticket = await chat.place(session, QUESTION, [tool()])
    sample = planted([*served.tokenizer.encode(text), *ending], text)
    message: dict[str, Any] = chat.answer(
        session, ticket, sample, QUESTION, [tool()], wanted(asked)
    ).message
    return message


def test_a_prompt_of_other_tokens_but_equal_text_goes_on_with_the_recorded_ones(
    serving: Any,
) -> None:
    async def scenario() -> None:
        async with serving() as served:
            session = served.open()
            client = served.client(session)
            first = await client.completions.create(
                model="tiny", prompt="user", max_tokens=5, extra_body={"return_token_ids": True}
            )
            sampled = first.choices[0].model_extra["token_ids"]
            text = served.tokenizer.decode([*served.tokenizer.encode("user"), *sampled])
            # Byte by byte where the tokenizer has a token for the word: the same text.
            letters = [t for c in "user" for t in served.tokenizer.encode(c)]
            ids = [*letters, *sampled, *served.tokenizer.encode("?")]
            assert served.tokenizer.decode(ids) == text + "?"
            await client.completions.create(model="tiny", prompt=ids, max_tokens=5)
            found = await served.endpoint.finish(session)
            assert (found.branches, len(found.turns)) == (0, 2)
            assert found.prompt_tokens.tolist() == served.tokenizer.encode("user")

    run(scenario())


def test_new_weights_in_mid_session_are_in_the_spans(serving: Any) -> None:
    async def scenario() -> None:
        async with serving() as served:
            session = served.open()
            client = served.client(session)
            messages = await converse(client, 1)
            await served.engine.restamp(Version(term=1, step=1))
            await client.chat.completions.create(model="tiny", messages=messages)
            found = await served.endpoint.finish(session)
            assert [(s.step, s.start, s.end) for s in found.spans] == [
                (number, turn.start, turn.end) for number, turn in enumerate(found.turns)
            ]

    run(scenario())


def test_nothing_is_answered_without_a_key_and_no_session_sees_another(serving: Any) -> None:
    import aiohttp

    async def scenario() -> None:
        async with serving() as served, aiohttp.ClientSession() as http:
            url, one, two = served.endpoint.url, served.open("g#0"), served.open("g#1")
            body = {"messages": QUESTION, "max_tokens": 4}
            for path, headers in (
                ("/v1/chat/completions", {}),
                ("/v1/models", {}),
                ("/v1/chat/completions", {"Authorization": "Bearer EMPTY"}),
                ("/v1/chat/completions", {"X-Session-ID": one.key}),
                ("/sessions/wrong/v1/chat/completions", {}),
                ("/", {}),
            ):
                async with http.post(url + path, json=body, headers=headers) as answer:
                    assert answer.status == 401
                    assert one.key not in await answer.text()
            by_header = {"Authorization": f"Bearer {one.key}"}
            async with http.post(f"{url}/v1/chat/completions", json=body, headers=by_header) as ok:
                assert ok.status == 200
            assert (len(one.branches), len(two.branches)) == (1, 0)
            await served.endpoint.finish(one)
            async with http.post(f"{one.base_url}/chat/completions", json=body) as late:
                assert late.status == 404
            assert await served.endpoint.finish(two) is None

    run(scenario())


def test_the_runs_own_key_samples_without_recording(serving: Any) -> None:
    from openai import AsyncOpenAI

    async def scenario() -> None:
        async with serving() as served:
            client = AsyncOpenAI(
                base_url=f"{served.endpoint.url}/v1", api_key=RUN_KEY, max_retries=0
            )
            assert [m.id async for m in client.models.list()] == ["tiny"]
            greedy = [
                (
                    await client.chat.completions.create(
                        model="tiny", messages=QUESTION, temperature=0, max_tokens=12
                    )
                )
                .choices[0]
                .message.content
                for _ in range(2)
            ]
            assert greedy[0] == greedy[1]
            scored = await client.completions.create(
                model="tiny", prompt="12*3=?", max_tokens=0, echo=True, logprobs=1
            )
            ids = np.array(served.tokenizer.encode("12*3=?"))
            known = scored.choices[0].logprobs.token_logprobs
            assert known[0] is None
            assert np.abs(np.array(known[1:]) - learner_logprobs(served.model, ids)).max() < 1e-4

    run(scenario())


def test_a_session_samples_as_the_run_says_whatever_is_asked(serving: Any) -> None:
    async def scenario() -> None:
        async with serving() as served:
            session = served.open(sampling=sampling(temperature=0.5))
            client = served.client(session)
            await client.chat.completions.create(
                model="tiny", messages=QUESTION, temperature=2.0, top_p=0.1
            )
            found = await served.endpoint.finish(session)
            whole = np.concatenate([found.prompt_tokens, found.tokens])
            known = learner_logprobs(served.model, whole, 0.5)[len(found.prompt_tokens) - 1 :]
            assert np.abs(known - found.logprobs).max() < 1e-4

    run(scenario())


@pytest.mark.parametrize("limits", [{"longest": 60}, {"max_turns": 2}], ids=["tokens", "turns"])
def test_a_session_that_is_full_says_so_in_openais_words(serving: Any, limits: Any) -> None:
    from openai import BadRequestError

    async def scenario() -> None:
        async with serving() as served:
            session = served.open(**limits)
            with pytest.raises(BadRequestError) as refused:
                await converse(served.client(session), 50)
            assert refused.value.code == "context_length_exceeded"
            found = await served.endpoint.finish(session)
            assert found.finish_reason is FinishReason.LENGTH
            assert len(found.prompt_tokens) + len(found.tokens) <= limits.get("longest", CONTEXT)
            assert len(found.turns) <= limits.get("max_turns", 50)

    run(scenario())


@pytest.mark.parametrize(
    "messages",
    [QUESTION * 151, [{"role": "user", "content": "x" * 10_000}]],
    ids=["messages", "characters"],
)
def test_a_conversation_that_is_refused_unrendered_has_ended_its_episode_by_length(
    serving: Any, messages: Any
) -> None:
    import aiohttp

    async def scenario() -> None:
        async with serving() as served, aiohttp.ClientSession() as http:
            session = served.open(longest=150)
            await answered(served, session, "yes", [served.tokenizer.eos_token_id])
            body = {"messages": messages}
            async with http.post(f"{session.base_url}/chat/completions", json=body) as answer:
                assert (await answer.json())["error"]["code"] == "context_length_exceeded"
            found = await served.endpoint.finish(session)
            assert found.finish_reason is FinishReason.LENGTH

    run(scenario())


def test_an_aborted_session_keeps_what_it_has(serving: Any) -> None:
    async def scenario() -> None:
        async with serving() as served:
            session = served.open(sampling=sampling(max_new_tokens=3000), stop=())
            asking = asyncio.create_task(converse(served.client(session), 400))
            while served.engine.stats().sampled_tokens < 20:
                await asyncio.sleep(0.005)
            await served.endpoint.abort(session)
            with pytest.raises(Exception, match="404"):
                await asking
            found = await served.endpoint.finish(session)
            assert len(found.tokens) > 0
            assert not session.running

    run(scenario())


def test_a_turn_that_an_episode_didnt_wait_for_is_no_part_of_it(serving: Any) -> None:
    """An agent asks twice at once, takes the first answer and ends."""

    async def scenario(served: Any, turns: int) -> None:
        session = served.open(sampling=sampling(max_new_tokens=3000), stop=())
        client = served.client(session)
        for _ in range(turns):
            await client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=4)
        asking = asyncio.create_task(
            client.chat.completions.create(model="tiny", messages=[*QUESTION, *QUESTION])
        )
        before = served.engine.stats().sampled_tokens
        while served.engine.stats().sampled_tokens < before + 20:
            await asyncio.sleep(0.005)
        found = await served.endpoint.finish(session, was_cut=False)
        asking.cancel()
        if not turns:
            assert found is None
            return
        assert len(found.turns) == 1
        assert len(found.tokens) <= 4
        assert found.finish_reason is not FinishReason.ABORT

    async def both() -> None:
        async with serving() as served:
            await scenario(served, 1)
            await scenario(served, 0)

    run(both())


def test_an_episode_that_is_played_again_asks_while_its_lost_turn_is_sampled(serving: Any) -> None:
    async def scenario() -> None:
        async with serving() as served:
            texts = []
            for attempt in (0, 1):
                session = served.open(
                    sampling=sampling(max_new_tokens=400), attempt=attempt, stop=()
                )
                texts.append(
                    asyncio.create_task(
                        served.client(session).chat.completions.create(
                            model="tiny", messages=QUESTION
                        )
                    )
                )
                while served.engine.stats().running_rows < attempt + 1:
                    await asyncio.sleep(0.002)
            first, second = await asyncio.gather(*texts)
            # The same noise.
            assert first.choices[0].message.content == second.choices[0].message.content

    run(scenario())


@pytest.mark.parametrize(
    ("field", "refused", "neutral"),
    [
        ("repetition_penalty", 1.05, 1.0),
        ("length_penalty", 0.5, 1),
        ("min_tokens", 4, 0),
        ("ignore_eos", True, False),
        ("bad_words", ["x"], []),
        ("guided_choice", ["yes", "no"], None),
        ("prompt_logprobs", 1, None),
        ("add_generation_prompt", False, True),
        ("add_special_tokens", True, False),
        ("skip_special_tokens", False, True),
        ("reasoning_effort", "high", None),
    ],
)
def test_what_would_have_an_effect_that_isnt_there_is_refused(
    serving: Any, field: str, refused: Any, neutral: Any
) -> None:
    import aiohttp

    async def scenario() -> None:
        async with serving() as served, aiohttp.ClientSession() as http:
            url = f"{served.open().base_url}/chat/completions"
            body = {"messages": QUESTION, "max_tokens": 4}
            async with http.post(url, json={**body, field: refused}) as answer:
                assert answer.status == 400
                assert field in (await answer.json())["error"]["message"]
            async with http.post(url, json={**body, field: neutral}) as answer:
                assert answer.status == 200

    run(scenario())


def test_a_client_that_leaves_frees_its_place_and_may_ask_again(serving: Any) -> None:
    async def scenario() -> None:
        async with serving() as served:
            session = served.open(sampling=sampling(max_new_tokens=3000))
            client = served.client(session)
            asking = asyncio.create_task(
                client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=3000)
            )
            while not served.engine.stats().running_rows:
                await asyncio.sleep(0.002)
            asking.cancel()
            while served.engine.stats().running_rows:
                await asyncio.sleep(0.005)
            await client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=4)
            found = await served.endpoint.finish(session)
            assert (len(found.turns), found.branches) == (1, 0)

    run(scenario())


def test_a_stream_has_what_the_whole_answer_has(serving: Any) -> None:
    async def scenario() -> None:
        async with serving() as served:
            session = served.open()
            stream = await served.client(session).chat.completions.create(
                model="tiny", messages=QUESTION, stream=True, stream_options={"include_usage": True}
            )
            text, ends, used = "", [], None
            async for chunk in stream:
                used = chunk.usage or used
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    ends += [choice.finish_reason] if choice.finish_reason else []
            found = await served.endpoint.finish(session)
            assert text == found.texts[0]
            assert len(ends) == 1
            assert used.completion_tokens == len(found.tokens)

    run(scenario())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "JSON"),
        (b"[1]", "object"),
        (json.dumps({"messages": []}).encode(), "messages"),
        (json.dumps({"messages": [{"role": "user", "content": 3}]}).encode(), "content"),
        (json.dumps({"messages": QUESTION, "n": 2}).encode(), "n=2"),
        (json.dumps({"messages": QUESTION, "tools": [{}]}).encode(), "tool"),
        (json.dumps({"messages": QUESTION, "max_tokens": "x"}).encode(), "max_tokens"),
        (json.dumps({"messages": QUESTION, "logit_bias": {"1": 2}}).encode(), "logit_bias"),
        (json.dumps({"messages": QUESTION, "top_k": float("inf")}).encode(), "finite"),
        (json.dumps({"messages": QUESTION, "temperature": 10**400}).encode(), "finite"),
        (json.dumps({"messages": QUESTION, "stop": ["\ud800"]}).encode(), "surrogate"),
        (json.dumps({"messages": QUESTION * (CONTEXT + 1)}).encode(), "4,097 messages"),
    ],
    ids=lambda value: value[-24:] if isinstance(value, str) else "",
)
def test_bad_requests_are_refused_by_name(serving: Any, body: bytes, said: str) -> None:
    import aiohttp

    async def scenario() -> None:
        async with serving() as served, aiohttp.ClientSession() as http:
            session = served.open()
            async with http.post(f"{session.base_url}/chat/completions", data=body) as answer:
                assert answer.status == 400
                assert said in (await answer.json())["error"]["message"]
            assert await served.endpoint.finish(session) is None

    run(scenario())


def test_a_request_that_is_too_long_is_refused(serving: Any) -> None:
    import aiohttp

    async def scenario() -> None:
        async with serving() as served, aiohttp.ClientSession() as http:
            session = served.open()
            async with http.post(
                f"{session.base_url}/chat/completions", data=b" " * (33 << 20)
            ) as answer:
                assert answer.status == 413

    run(scenario())


def test_where_all_interfaces_are_bound_sessions_have_an_address_that_others_reach(
    serving: Any,
) -> None:
    async def scenario() -> None:
        async with serving(host="0.0.0.0", peer=("127.0.0.1", 6379)) as served:
            session = served.open()
            assert session.base_url.startswith("http://127.0.0.1:")
            await converse(served.client(session), 1)

    run(scenario())
