"""Answers that are sent while they are sampled: the same as whole ones, and their failures."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import openai
import pytest

# In this folder.
from endpoint_calls import CONTEXT, RUN_KEY, Served, planted, run, sampling, spec
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tandem.common.records import FinishReason, Source
from tandem.rollout.endpoint.live import GrowingText
from tandem.rollout.endpoint.sessions import Session

QUESTION = [{"role": "user", "content": "what is 2+2?"}]


def client(served: Served) -> Any:
    return openai.AsyncOpenAI(
        base_url=f"{served.endpoint.url}/v1", api_key=RUN_KEY, max_retries=0, timeout=60
    )


async def answered(served: Served, form: str, **asked: Any) -> Any:
    if form == "chat":
        return await client(served).chat.completions.create(
            model="tiny", messages=QUESTION, **asked
        )
    return await client(served).completions.create(model="tiny", prompt="ab", **asked)


async def long_seed(served: Served) -> int:
    """A seed whose answer to the question goes on for a while."""
    for seed in range(100):
        whole = await answered(served, "chat", max_tokens=200, seed=seed)
        if whole.choices[0].finish_reason == "length":
            return seed
    raise AssertionError("every answer is short")


def text_of(choice: Any) -> str:
    if hasattr(choice, "text"):
        return choice.text or ""
    part = choice.delta if hasattr(choice, "delta") else choice.message
    return part.content or ""


@pytest.mark.parametrize("form", ["chat", "text"])
def test_it_begins_while_the_answers_are_sampled_and_is_what_whole_ones_are(
    serving: Any, form: str
) -> None:
    async def scenario() -> None:
        async with serving() as served:
            asked = {"max_tokens": 400, "seed": 7, "n": 2, "temperature": 1.0}
            texts, early, ends, ids = ["", ""], 0, 0, set()
            async for chunk in await answered(served, form, stream=True, **asked):
                ids.add(chunk.id)
                for choice in chunk.choices:
                    texts[choice.index] += text_of(choice)
                    ends += choice.finish_reason is not None
                    early += bool(text_of(choice)) and served.engine.stats().running_rows > 0
            whole = await answered(served, form, **asked)
            assert texts == [text_of(choice) for choice in whole.choices]
            assert (ends, len(ids)) == (2, 1)
            assert early > 5

    run(scenario())


@pytest.mark.parametrize("form", ["chat", "text"])
def test_what_may_become_a_stop_string_is_never_shown(serving: Any, form: str) -> None:
    async def scenario() -> None:
        async with serving() as served:
            asked = {"max_tokens": 200, "seed": 3}
            text = text_of((await answered(served, form, **asked)).choices[0])
            for size in (1, 2, 5):
                stop = text[20 : 20 + size]
                shown = ""
                async for chunk in await answered(served, form, stop=[stop], stream=True, **asked):
                    for choice in chunk.choices:
                        shown += text_of(choice)
                        assert stop not in shown
                assert shown == text[: text.index(stop)]

    run(scenario())


def test_a_failure_under_way_ends_it_with_an_error(serving: Any) -> None:
    async def scenario() -> None:
        async with serving() as served:
            said: list[str] = []
            asked = {"max_tokens": 3000, "seed": await long_seed(served)}

            async def read() -> None:
                async for chunk in await answered(served, "chat", stream=True, **asked):
                    said.extend(text_of(choice) for choice in chunk.choices if text_of(choice))
                    if len(said) == 3:
                        served.engine._batch.step = lambda: 1 / 0

            with pytest.raises(openai.APIError, match="ZeroDivisionError"):
                await read()
            assert len(said) >= 3

    run(scenario())


def test_a_refusal_before_the_first_token_has_a_status(serving: Any) -> None:
    async def scenario() -> None:
        async with serving() as served:
            with pytest.raises(openai.BadRequestError, match="min_p"):
                await answered(served, "chat", stream=True, extra_body={"min_p": 0.5})

    run(scenario())


def test_a_client_that_leaves_ends_the_sampling(serving: Any) -> None:
    async def scenario() -> None:
        import asyncio

        async with serving() as served:
            stream = await answered(served, "chat", stream=True, max_tokens=3900)
            async for _ in stream:
                break
            await stream.close()
            while served.engine.stats().running_rows:
                await asyncio.sleep(0.005)
            assert served.engine.stats().sampled_tokens < 3900

    run(scenario())


def test_what_was_streamed_in_a_session_is_recorded(serving: Any) -> None:
    async def scenario() -> None:
        async with serving() as served:
            session = served.open()
            shown = ""
            async for chunk in await served.client(session).chat.completions.create(
                model="tiny", messages=QUESTION, stream=True
            ):
                shown += "".join(text_of(choice) for choice in chunk.choices)
            found = await served.endpoint.finish(session)
            assert shown == found.texts[0]

    run(scenario())


async def read_some(served: Served, session: Any, messages: Any) -> str:
    """Leaves a stream after a few tokens; returns what it read."""
    shown = ""
    stream = await served.client(session).chat.completions.create(
        model="tiny", messages=messages, stream=True
    )
    async for chunk in stream:
        shown += "".join(text_of(choice) for choice in chunk.choices)
        if len(shown) > 20:
            break
    await stream.close()
    return shown


def test_a_client_that_leaves_a_stream_of_a_session_goes_on_with_what_it_has_read(
    serving: Any,
) -> None:
    async def scenario() -> None:
        async with serving() as served:
            session = served.open(sampling=sampling(max_new_tokens=1500), stop=())
            shown = await read_some(served, session, QUESTION)
            more = [{"role": "assistant", "content": shown}, {"role": "user", "content": "go on"}]
            await served.client(session).chat.completions.create(
                model="tiny", messages=[*QUESTION, *more], max_tokens=4
            )
            found = await served.endpoint.finish(session, was_cut=False)
            first, second = found.turns
            assert found.texts[0] == shown
            assert served.tokenizer.decode(found.tokens[first.start : first.end].tolist()) == shown
            assert "go on" in served.tokenizer.decode(
                found.tokens[first.end : second.start].tolist()
            )
            own = found.source == Source.OWN
            assert own.sum() == first.end - first.start + second.end - second.start
            assert np.isfinite(found.logprobs[own]).all()
            assert [(span.start, span.end) for span in found.spans] == [
                (first.start, first.end),
                (second.start, second.end),
            ]
            assert (found.branches, found.retokenised) == (0, 0)

    run(scenario())


def test_a_client_that_leaves_a_stream_when_its_answer_is_whole_goes_on_with_what_it_has_read(
    serving: Any,
) -> None:
    async def scenario() -> None:
        async with serving() as served:
            session = served.open(sampling=sampling(max_new_tokens=60), stop=())
            stream = await served.client(session).chat.completions.create(
                model="tiny", messages=QUESTION, stream=True
            )
            # The engine is faster than the client, which hasn't read a word yet.
            while not any(branch.turns for branch in session.branches):
                await asyncio.sleep(0.001)
            whole, shown = session.branches[0].turns[0].text, ""
            async for chunk in stream:
                shown += "".join(text_of(choice) for choice in chunk.choices)
                if len(shown) > 10:
                    break
            await stream.close()
            assert len(shown) < len(whole)
            more = [{"role": "assistant", "content": shown}, {"role": "user", "content": "go on"}]
            await served.client(session).chat.completions.create(
                model="tiny", messages=[*QUESTION, *more], max_tokens=4
            )
            found = await served.endpoint.finish(session, was_cut=False)
            assert (found.branches, found.retokenised) == (0, 0)
            assert [found.texts[0], len(found.turns)] == [shown, 2]

    run(scenario())


def test_a_client_that_leaves_a_stream_of_text_goes_on_with_what_it_has_read(serving: Any) -> None:
    async def scenario() -> None:
        async with serving() as served:
            session = served.open(sampling=sampling(max_new_tokens=1500), stop=())
            asking, shown = served.client(session).completions, ""
            stream = await asking.create(model="tiny", prompt="ab", stream=True)
            async for chunk in stream:
                shown += "".join(text_of(choice) for choice in chunk.choices)
                if len(shown) > 20:
                    break
            await stream.close()
            await asking.create(model="tiny", prompt=f"ab{shown}\ngo on\n", max_tokens=4)
            found = await served.endpoint.finish(session, was_cut=False)
            first, second = found.turns
            assert found.texts[0] == shown
            assert (found.branches, found.retokenised) == (0, 0)
            told = served.tokenizer.decode(found.tokens[first.end : second.start].tolist())
            assert told == "\ngo on\n"
            own = np.isfinite(found.logprobs)
            assert (own == (found.source == Source.OWN)).all()
            assert own.sum() == first.end - first.start + second.end - second.start

    run(scenario())


def left_with(tokens: list[int]) -> Session:
    """A session whose client has left its first answer: these tokens behind the token 0."""
    session = Session("key", "url", spec(), CONTEXT)
    ticket = session.begin([0])
    ticket.streamed = ticket.branch.left = True
    session.record(ticket, planted(tokens, letters(tokens)))
    return session


def letters(tokens: Any) -> str:
    """Texts of a vocabulary in which the last token has two letters."""
    return "".join(("?", "a", "b", "c", "bc")[token] for token in tokens)


@pytest.mark.parametrize(
    ("sampled", "prompt", "kept", "added"),
    [
        ([1, 2, 3], [0, 1, 2, 1, 1], [1, 2], [1, 1]),
        ([1, 4, 1], [0, 1, 2, 1], [1], [2, 1]),
        ([1, 4, 1], [0, 1, 2, 3, 2], [1, 4], [2]),
        ([1, 2, 1], [0, 1, 4, 3], None, None),
        ([1, 2, 3], [0, 3, 3, 3], None, None),
        ([1, 2, 3], [1, 2, 3], None, None),
    ],
)
def test_of_a_text_that_was_left_the_tokens_stay_that_the_next_prompt_holds(
    sampled: list[int], prompt: list[int], kept: list[int] | None, added: list[int] | None
) -> None:
    session = left_with(sampled)
    ticket = session.place(prompt, letters)
    first = session.branches[0]
    if kept is None:
        assert ticket.is_new
        assert first.tokens == [0, *sampled]
        return
    assert (ticket.branch, first.tokens, ticket.added) == (first, [0, *kept], added)
    assert (len(first.logprobs), first.turns[0].end) == (len(kept), 1 + len(kept))
    assert session.retokenised == 0


def test_an_answer_that_was_cut_to_what_a_client_has_read_has_ended_by_itself() -> None:
    session = Session("key", "url", spec(), CONTEXT)
    ticket = session.begin([7])
    ticket.streamed = True
    sample = replace(planted([1, 2, 3], "abc"), finish_reason=FinishReason.LENGTH)
    turn = session.record(ticket, sample)
    assert turn.streamed
    assert session.shorten(
        ticket.branch, "ab", lambda tokens: "".join("?abc"[token] for token in tokens)
    )
    found = session.recorded(was_cut=False)
    assert found is not None
    assert (found.tokens.tolist(), found.finish_reason) == ([1, 2], FinishReason.STOP)


def test_an_episode_that_ends_with_a_part_of_a_stream_keeps_that_turn(serving: Any) -> None:
    async def scenario() -> None:
        async with serving() as served:
            session = served.open(sampling=sampling(max_new_tokens=1500), stop=())
            shown = await read_some(served, session, QUESTION)
            while served.engine.stats().running_rows:
                await asyncio.sleep(0.001)
            found = await served.endpoint.finish(session, was_cut=False)
            assert found.texts[0].startswith(shown)
            assert (len(found.turns), found.finish_reason) == (1, FinishReason.STOP)

    run(scenario())


def byte_tokenizer() -> Any:
    """As Llama 2's: characters without a token of their own are tokens of bytes."""
    from tokenizers import Tokenizer, decoders, models

    words = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b"]
    made = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, [], byte_fallback=True))
    made.add_special_tokens(["<s>", "</s>"])
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


BYTES = byte_tokenizer()


def test_bytes_that_are_tokens_are_shown_as_the_characters_that_they_become() -> None:
    tokens = [BYTES.token_to_id("▁a"), *(3 + byte for byte in "é€".encode()), 3 + 0xC3]
    growing = GrowingText(BYTES, ())
    assert "".join(growing.add([token]) for token in tokens) == "a"
    whole = "a" + "\ufffd" * 6 + "b"
    assert growing.add([BYTES.token_to_id("b")]) == whole[1:]
    assert BYTES.decode([*tokens, BYTES.token_to_id("b")]) == whole


@settings(deadline=None)
@given(st.lists(st.sampled_from([0, 1, 3 + 0x41, 3 + 0xC3, 3 + 0xA9, 259, 260, 261])))
def test_no_text_that_is_shown_becomes_another_one(tokens: list[int]) -> None:
    growing = GrowingText(BYTES, ())
    shown = "".join(growing.add([token]) for token in tokens)
    whole = BYTES.decode(tokens)
    assert whole.startswith(shown)
    assert shown or "b" not in whole


@settings(deadline=None)
@given(st.data())
def test_every_text_is_shown_as_it_grows(chat_tokenizer: Any, data: st.DataObject) -> None:
    vocabulary = len(chat_tokenizer)
    tokens = data.draw(st.lists(st.integers(0, vocabulary - 1), max_size=30))
    whole = chat_tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=True)
    stops = data.draw(st.lists(st.text("ab é<", min_size=1, max_size=3), max_size=2))
    growing = GrowingText(chat_tokenizer.backend_tokenizer, stops)
    shown = "".join(growing.add([token]) for token in tokens)
    places = [whole.find(stop) for stop in stops if stop in whole]
    assert shown == growing.sent
    if places:
        assert shown == whole[: min(places)]
    assert whole.startswith(shown)
    assert not any(stop in shown for stop in stops)
    assert json.loads(json.dumps(shown)) == shown
