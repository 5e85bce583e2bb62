"""Requests without a session, as harnesses send them: many prompts, many answers, log-probs of prompts."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from endpoint_calls import CONTEXT, RUN_KEY, run

from tandem.rollout.endpoint.plain import Limits

PROMPTS = ("12*3=?", "40-7=", "9")


def forward(model: Any, tokens: list[int]) -> np.ndarray:
    """``[S - 1, V]`` log-probs by a plain forward pass."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1).numpy()


def likeliest(
    known: np.ndarray, tokenizer: Any, count: int, *, own: int | None = None
) -> dict[str, float]:
    """The most likely tokens of a distribution by their texts, with the token that stands there."""
    found: dict[str, float] = {}
    best = np.argsort(-known)[:count].tolist()
    for token in [*best, *([] if own is None else [own])]:
        text = tokenizer.decode([token])
        found[text] = max(float(known[token]), found.get(text, -np.inf))
    return found


def assert_near(told: dict[str, float], known: dict[str, float]) -> None:
    assert told.keys() == known.keys()
    assert max(abs(told[text] - known[text]) for text in told) < 1e-4


class Client:
    """Posts to an endpoint, with its key unless told otherwise."""

    def __init__(self, served: Any, http: Any, key: str | None = RUN_KEY) -> None:
        self._url, self._http = served.endpoint.url, http
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    async def __call__(self, path: str, **body: Any) -> dict[str, Any]:
        status, answer = await self.post(path, **body)
        assert status == 200, answer
        return answer

    async def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        where = f"{self._url}{path}"
        async with self._http.post(where, json=body, headers=self._headers) as answer:
            return answer.status, await answer.json()

    async def completions(self, prompt: Any, **how: Any) -> list[dict[str, Any]]:
        given = {"temperature": 0, "max_tokens": 8, **how}
        found: list[dict[str, Any]] = (await self("/v1/completions", prompt=prompt, **given))[
            "choices"
        ]
        assert [one["index"] for one in found] == list(range(len(found)))
        return found


def scenario(serving: Any, body: Any, **changes: Any) -> None:
    """Runs ``body(client, served)`` against an endpoint."""
    import aiohttp

    async def whole() -> None:
        async with serving(**changes) as served, aiohttp.ClientSession() as http:
            await body(Client(served, http), served)

    run(whole())


def test_a_prompt_may_be_a_text_or_tokens_and_there_may_be_many(serving: Any) -> None:
    async def body(client: Client, served: Any) -> None:
        encode = served.tokenizer.encode
        alone = [(await client.completions(prompt))[0]["text"] for prompt in PROMPTS]
        assert len(set(alone)) > 1
        assert (await client.completions(encode(PROMPTS[0])))[0]["text"] == alone[0]
        for prompts in (list(PROMPTS), [encode(prompt) for prompt in PROMPTS]):
            assert [one["text"] for one in await client.completions(prompts)] == alone
        twice = await client.completions(list(PROMPTS), n=2)
        assert [one["text"] for one in twice] == [text for text in alone for _ in range(2)]
        whole = await client("/v1/completions", prompt=list(PROMPTS), n=2, max_tokens=3)
        assert whole["usage"]["prompt_tokens"] == sum(len(encode(prompt)) for prompt in PROMPTS)
        assert whole["system_fingerprint"] == "1.0"

    scenario(serving, body)


def test_an_echo_has_the_prompts_logprobs_and_the_likeliest_tokens(serving: Any) -> None:
    async def body(client: Client, served: Any) -> None:
        rows = [served.tokenizer.encode(prompt) for prompt in PROMPTS[:2]]
        rows.append(rows[0] + rows[1] * 40)
        for most, extra in ((0, 0), (1, 1)):
            for count in (1, 5):
                found = await client.completions(rows, max_tokens=most, echo=True, logprobs=count)
                for row, choice in zip(rows, found, strict=True):
                    known, told = forward(served.model, row), choice["logprobs"]
                    logprobs, top = told["token_logprobs"], told["top_logprobs"]
                    assert len(logprobs) == len(top) == len(told["tokens"]) == len(row) + extra
                    assert logprobs[0] is top[0] is None
                    given = np.array(logprobs[1 : len(row)])
                    own = known[np.arange(len(row) - 1), row[1:]]
                    assert np.abs(given - own).max() < 1e-4
                    for place in range(1, len(row)):
                        told_here, own = known[place - 1], row[place]
                        assert_near(
                            top[place], likeliest(told_here, served.tokenizer, count, own=own)
                        )
                        # How lm-eval finds out whether a continuation is the greedy one.
                        is_greedy = logprobs[place] == max(top[place].values())
                        assert is_greedy == (known[place - 1].argmax() == row[place])
                    said = "".join(told["tokens"])
                    assert said.startswith(served.tokenizer.decode(row))
                    offsets = told["text_offset"]
                    assert [
                        said[i:].startswith(t) for i, t in zip(offsets, told["tokens"], strict=True)
                    ]

    scenario(serving, body)


def test_an_echo_has_the_prompts_text_whole(serving: Any) -> None:
    async def body(client: Client, served: Any) -> None:
        prompt = "Grüße, 日本 🙂: 12*3=?"
        (answer,) = await client.completions(prompt)
        (echo,) = await client.completions(prompt, echo=True)
        assert echo["text"] == prompt + answer["text"]

    scenario(serving, body)


def test_alternatives_to_what_was_sampled_are_told_on_both_routes(serving: Any) -> None:
    async def body(client: Client, served: Any) -> None:
        row = served.tokenizer.encode(PROMPTS[0])
        (choice,) = await client.completions(row, logprobs=3, return_token_ids=True)
        tokens, told = choice["token_ids"], choice["logprobs"]
        known = forward(served.model, row + tokens)[len(row) - 1 :]
        assert len(told["top_logprobs"]) == len(tokens)
        for place, others in enumerate(told["top_logprobs"]):
            best = likeliest(known[place], served.tokenizer, 3, own=tokens[place])
            assert_near(others, best)
        messages = [{"role": "user", "content": "2*2=?"}]
        chat = await client(
            "/v1/chat/completions",
            messages=messages,
            temperature=0,
            max_tokens=4,
            logprobs=True,
            top_logprobs=2,
            n=2,
        )
        assert len(chat["choices"]) == 2
        for choice in chat["choices"]:
            for one in choice["logprobs"]["content"]:
                values = [other["logprob"] for other in one["top_logprobs"]]
                assert len(values) == 2
                assert values == sorted(values, reverse=True)
                # Greedy: the token itself is the likeliest.
                assert one["top_logprobs"][0]["token"] == one["token"]

    scenario(serving, body)


def test_log_probs_name_tokens_by_their_ids_where_a_client_wants_them_so(serving: Any) -> None:
    async def body(client: Client, served: Any) -> None:
        row = served.tokenizer.encode(PROMPTS[0])
        how = {"return_tokens_as_token_ids": True, "return_token_ids": True}
        (choice,) = await client.completions(row, logprobs=2, echo=True, **how)
        told, tokens = choice["logprobs"], [*row, *choice["token_ids"]]
        assert told["tokens"] == [f"token_id:{token}" for token in tokens]
        known = forward(served.model, tokens)
        for place in range(1, len(tokens)):
            best = [*np.argsort(-known[place - 1])[:2].tolist(), tokens[place]]
            assert_near(
                told["top_logprobs"][place],
                {f"token_id:{token}": float(known[place - 1][token]) for token in best},
            )
        # They are still places in the text.
        texts = [served.tokenizer.decode([token]) for token in tokens]
        assert told["text_offset"] == [len("".join(texts[:n])) for n in range(len(texts))]
        asked = {"messages": [{"role": "user", "content": "2*2=?"}], "max_tokens": 4}
        chat = await client(
            "/v1/chat/completions", **asked, **how, logprobs=True, top_logprobs=2, temperature=0
        )
        (said,) = chat["choices"]
        content = said["logprobs"]["content"]
        assert [one["token"] for one in content] == [f"token_id:{t}" for t in said["token_ids"]]
        assert all(one["top_logprobs"][0]["token"] == one["token"] for one in content)

    scenario(serving, body)


def test_equal_seeds_give_equal_answers_and_no_two_of_a_request(serving: Any) -> None:
    async def body(client: Client, served: Any) -> None:
        async def texts(**how: Any) -> list[str]:
            found = await client.completions(
                PROMPTS[0], temperature=1.0, max_tokens=24, n=4, return_token_ids=True, **how
            )
            return [str(one["token_ids"]) for one in found]

        first, again = await texts(seed=7), await texts(seed=7)
        assert first == again
        assert len(set(first)) > 1
        (alone,) = await client.completions(
            PROMPTS[0], temperature=1.0, max_tokens=24, seed=7, return_token_ids=True
        )
        assert str(alone["token_ids"]) == first[0]
        assert await texts(seed=-8) != first
        assert await texts() != await texts()

    scenario(serving, body)


def test_a_stop_string_ends_an_answer_and_isnt_in_its_text(serving: Any) -> None:
    async def body(client: Client, served: Any) -> None:
        (whole,) = await client.completions(PROMPTS[0], max_tokens=24)
        text = whole["text"]
        assert len(text) > 6
        stop = text[4:6]
        for stops in (stop, [f"{stop}§", stop, "§§", "§§§", "§§§§"]):
            (cut,) = await client.completions(PROMPTS[0], max_tokens=24, stop=stops)
            assert cut["text"] == text[: text.index(stop)]
            assert cut["finish_reason"] == "stop"
        (kept,) = await client.completions(
            PROMPTS[0], max_tokens=24, stop=stop, include_stop_str_in_output=True
        )
        assert stop in kept["text"]
        assert text.startswith(kept["text"])

    scenario(serving, body)


def test_messages_are_rendered_as_the_chat_template_does_special_tokens_included(
    serving: Any,
) -> None:
    async def body(client: Client, served: Any) -> None:
        said = f"x{served.tokenizer.eos_token}y <tool_call>"
        messages = [{"role": "user", "content": said}]
        plain = served.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        found = await client(
            "/v1/chat/completions", messages=messages, max_tokens=1, return_token_ids=True
        )
        assert found["prompt_token_ids"] == list(plain)
        assert (await client("/tokenize", messages=messages))["tokens"] == list(plain)

    scenario(serving, body)


def test_the_tokenizer_can_be_asked(serving: Any) -> None:
    async def body(client: Client, served: Any) -> None:
        import aiohttp

        tokens = served.tokenizer.encode("12*3=?")
        said = await client("/tokenize", prompt="12*3=?", add_special_tokens=False)
        assert said == {"count": len(tokens), "max_model_len": CONTEXT, "tokens": tokens}
        assert await client("/detokenize", tokens=tokens) == {"prompt": "12*3=?"}
        assert await client("/detokenize", tokens=[]) == {"prompt": ""}
        assert (await client.post("/tokenize", prompt=3))[0] == 400
        headers = {"Authorization": f"Bearer {RUN_KEY}"}
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{served.endpoint.url}/tokenizer_info", headers=headers) as answer,
        ):
            info = await answer.json()
        assert info["eos_token"] == served.tokenizer.eos_token
        assert info["chat_template"] == served.tokenizer.chat_template

    scenario(serving, body)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"n": 2}, "n=2"),
        ({"prompt": ["1", "2"]}, "2 prompts"),
        ({"logprobs": 5}, "5 log-probs"),
        ({"echo": True}, "echo"),
    ],
)
def test_a_session_has_one_answer_a_request(serving: Any, asked: Any, said: str) -> None:
    async def body(client: Client, served: Any) -> None:
        import aiohttp

        session = served.open()
        async with aiohttp.ClientSession() as http:
            given = {"prompt": "1", "max_tokens": 4, **asked}
            async with http.post(f"{session.base_url}/completions", json=given) as answer:
                assert answer.status == 400
                assert said in (await answer.json())["error"]["message"]
        assert await served.endpoint.finish(session) is None

    scenario(serving, body)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"prompt": []}, "prompt should be"),
        ({"prompt": ["1", 2]}, "prompt 1"),
        ({"prompt": [[1], []]}, "prompt 1"),
        ({"prompt": [[1], [10**6]]}, "1000000"),
        ({"prompt": "1", "n": 0}, "n=0"),
        ({"prompt": ["1"] * 600, "n": 2}, "600 prompts"),
        ({"prompt": "1", "seed": 1.5}, "seed=1.5"),
        ({"prompt": "1", "logprobs": 21}, "logprobs=21"),
        ({"prompt": "1", "max_tokens": 0}, "max_tokens=0"),
        ({"prompt": [1] * CONTEXT, "max_tokens": 0, "echo": True, "logprobs": 1}, "tokens of"),
        ({"prompt": "", "max_tokens": 0, "echo": True, "logprobs": 1}, "the prompt is empty"),
        ({"prompt": ""}, "the prompt is empty"),
    ],
)
def test_what_can_not_be_answered_is_refused_by_name(serving: Any, asked: Any, said: str) -> None:
    async def body(client: Client, served: Any) -> None:
        status, answer = await client.post("/v1/completions", **{"max_tokens": 4, **asked})
        assert status == 400
        assert said in answer["error"]["message"]

    scenario(serving, body)


def test_more_answers_than_there_is_room_for_and_late_ones_are_refused(serving: Any) -> None:
    async def body(client: Client, served: Any) -> None:
        status, answer = await client.post("/v1/completions", prompt="1", n=4, max_tokens=2)
        assert (status, answer["error"]["code"]) == (429, "too_many_requests")
        await served.engine.pause()
        status, answer = await client.post("/v1/completions", prompt=["1", "2", "3"], max_tokens=2)
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
        await served.engine.resume()
        # Their places are free again.
        end = asyncio.get_running_loop().time() + 30
        while served.engine.stats().running_rows or served.engine.stats().waiting_groups:
            assert asyncio.get_running_loop().time() < end
            await asyncio.sleep(0.01)
        assert len(await client.completions("1", n=3, max_tokens=1)) == 3

    scenario(serving, body, limits=Limits(seconds=2.0, answers=3))


def test_anyone_may_ask_an_endpoint_without_a_key_and_nobody_one_with_another_key(
    serving: Any,
) -> None:
    async def body(client: Client, served: Any) -> None:
        import aiohttp

        async with aiohttp.ClientSession() as http:
            for key in (None, "", "anything"):
                assert len(await Client(served, http, key).completions("1", max_tokens=1)) == 1

    async def closed(client: Client, served: Any) -> None:
        import aiohttp

        async with aiohttp.ClientSession() as http:
            for key in (None, "", "anything"):
                status, answer = await Client(served, http, key).post("/v1/completions", prompt="1")
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
                assert (await Client(served, http, key).post("/tokenize", prompt="1"))[0] == 401

    scenario(serving, body, key="", anyone=True)
    scenario(serving, closed)


def test_an_engine_without_ranks_says_so(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.rollout.decoding.torch_engine import TorchEngine

    monkeypatch.delattr(TorchEngine, "rank")

    async def body(client: Client, served: Any) -> None:
        status, answer = await client.post(
            "/v1/completions", prompt="12", max_tokens=0, echo=True, logprobs=1
        )
        assert status == 400
        assert "can't score" in answer["error"]["message"]

    scenario(serving, body)


def test_what_the_engine_refuses_is_the_clients_mistake(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tandem.rollout.decoding import torch_engine

    monkeypatch.setattr(torch_engine, "refusal", lambda *_: "temperature 0.001 is too cold")

    async def body(client: Client, served: Any) -> None:
        status, answer = await client.post("/v1/completions", prompt="12", temperature=0.001)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert answer["error"]["message"] == "temperature 0.001 is too cold"

    scenario(serving, body)


def test_an_error_that_nobody_has_foreseen_is_told_in_openais_form(
    serving: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tandem.rollout.endpoint import forms

    monkeypatch.setattr(forms, "completion", lambda *_: 1 / 0)

    async def body(client: Client, served: Any) -> None:
        status, answer = await client.post("/v1/completions", prompt="12", max_tokens=2)
        assert (status, answer["error"]["type"]) == (500, "server_error")
        assert answer["error"]["message"] == "ZeroDivisionError: division by zero"

    scenario(serving, body)
    assert "a request has failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_what_nobody_vouches_for_is_done_again_and_answered_as_if_once(serving: Any) -> None:
    done = 0

    async def twice(work: Any) -> Any:
        nonlocal done
        done += 1
        await work()
        return await work()

    asked = {"prompt": list(PROMPTS), "n": 2, "seed": 3, "echo": True, "logprobs": 2}
    answers: list[Any] = []

    async def body(client: Client, served: Any) -> None:
        answers.append((await client("/v1/completions", max_tokens=8, **asked))["choices"])
        params = {"max_tokens": 8, "seed": 3}
        answers[-1] += (
            await client("/inference/v1/generate", token_ids=[5, 6, 7], sampling_params=params)
        )["choices"]

    scenario(serving, body)
    scenario(serving, body, vouch=twice)
    # The last bits of a log-prob depend on what else is in its batch.
    numbers: list[list[float]] = [[], []]
    texts = [
        json.loads(
            json.dumps(one), parse_float=lambda number, into=into: into.append(float(number))
        )
        for one, into in zip(answers, numbers, strict=True)
    ]
    assert texts[1] == texts[0]
    assert numbers[1] == pytest.approx(numbers[0], abs=1e-4)
    # What is sampled on either route, and what is scored.
    assert done == 3
