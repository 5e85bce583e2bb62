"""The token endpoint with vLLM as its engine: the same promises as with torch's."""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from endpoint_calls import RUN_KEY, Served, sampling

from tandem.common.records import FinishReason, Source, Version
from tandem.rollout.endpoint.server import Endpoint

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

CONTEXT = 200
TEMPLATE = (
    "{%- for m in messages -%}{{- m.content -}}{%- if m.role == 'assistant' -%}{{- eos_token -}}"
    "{%- endif -%}{%- endfor -%}"
)
QUESTION = [{"role": "user", "content": "41+7-3=?"}]


@asynccontextmanager
async def serving(shared: Any, tiny: Any) -> AsyncIterator[Served]:
    model = tiny.model()
    engine = shared.make(model, version=Version(term=1, step=0))
    tokenizer = copy.deepcopy(shared.tokenizer)
    tokenizer.chat_template = TEMPLATE
    await engine.start()
    endpoint = Endpoint(engine, tokenizer, context=CONTEXT, model="tiny", key=RUN_KEY)
    await endpoint.start()
    try:
        yield Served(endpoint, engine, model, tokenizer)
    finally:
        await endpoint.close()
        await engine.close()


async def converse(client: Any, turns: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [*QUESTION]
    for number in range(turns):
        answer = await client.chat.completions.create(model="tiny", messages=messages)
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        messages.append({"role": "user", "content": f"{number}+1=?"})
    return messages


def test_what_was_sampled_is_recorded_with_the_models_own_log_probs(
    vllm_engines: Any, tiny: Any
) -> None:
    import torch

    async def scenario() -> None:
        async with serving(vllm_engines, tiny) as served:
            sessions = [
                served.open(f"g#{n}", sampling=sampling(max_new_tokens=12)) for n in range(8)
            ]
            await asyncio.gather(*(converse(served.client(one), 5) for one in sessions))
            for session in sessions:
                found = await served.endpoint.finish(session)
                assert found is not None
                assert (found.branches, found.retokenised, len(found.turns)) == (0, 0, 5)
                own = found.source == Source.OWN
                assert {(span.term, span.step) for span in found.spans} == {(1, 0)}
                whole = np.concatenate([found.prompt_tokens, found.tokens]).astype(np.int64)
                with torch.no_grad():
                    logits = served.model(torch.from_numpy(whole)[None]).logits[0, :-1]
                chosen = torch.from_numpy(whole[1:])[:, None]
                known = logits.log_softmax(-1).gather(1, chosen)[:, 0].numpy()
                known = known[len(found.prompt_tokens) - 1 :]
                assert np.abs(known - found.logprobs)[own].max() < 1e-4

    asyncio.run(scenario())


def test_tokens_go_in_and_out_and_the_runs_key_samples_as_it_is_told(
    vllm_engines: Any, tiny: Any
) -> None:
    import aiohttp

    async def scenario() -> None:
        async with serving(vllm_engines, tiny) as served, aiohttp.ClientSession() as http:
            ids = served.tokenizer.encode("41+7=?", add_special_tokens=False)
            body = {"token_ids": ids, "sampling_params": {"temperature": 0.0, "max_tokens": 6}}
            said = []
            for _ in range(2):
                async with http.post(
                    f"{served.endpoint.url}/inference/v1/generate",
                    json=body,
                    headers={"Authorization": f"Bearer {RUN_KEY}"},
                ) as answer:
                    assert answer.status == 200
                    said.append((await answer.json())["choices"][0])
            assert said[0]["token_ids"] == said[1]["token_ids"]
            entries = said[0]["logprobs"]["content"]
            assert [one["token_id"] for one in entries] == said[0]["token_ids"]
            assert [one["token"] for one in entries] == [
                f"token_id:{token}" for token in said[0]["token_ids"]
            ]

    asyncio.run(scenario())


def test_a_stream_begins_while_its_answer_is_sampled(vllm_engines: Any, tiny: Any) -> None:
    async def scenario() -> None:
        async with serving(vllm_engines, tiny) as served:
            client = served.client(served.open()).with_options(
                base_url=f"{served.endpoint.url}/v1", api_key=RUN_KEY
            )
            asked = {"model": "tiny", "messages": QUESTION, "max_tokens": 120, "temperature": 0.0}
            whole = await client.chat.completions.create(**asked)
            shown, events, early = "", 0, 0
            async for chunk in await client.chat.completions.create(stream=True, **asked):
                for choice in chunk.choices:
                    shown += choice.delta.content or ""
                    events += bool(choice.delta.content)
                    early += bool(choice.delta.content) and choice.finish_reason is None
            assert shown == whole.choices[0].message.content
            assert events == early > 5

    asyncio.run(scenario())


def test_a_client_that_leaves_frees_its_place_and_a_session_ends_in_mid_answer(
    vllm_engines: Any, tiny: Any
) -> None:
    async def scenario() -> None:
        async with serving(vllm_engines, tiny) as served:
            session = served.open(sampling=sampling(max_new_tokens=150))
            client = served.client(session)

            async def asked() -> Any:
                return await client.chat.completions.create(model="tiny", messages=QUESTION)

            leaving = asyncio.create_task(asked())
            while not session.running:
                await asyncio.sleep(0.001)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            while session.running:
                await asyncio.sleep(0.001)
            staying = asyncio.create_task(asked())
            while not session.running:
                await asyncio.sleep(0.001)
            found = await served.endpoint.finish(session)
            await asyncio.gather(staying, return_exceptions=True)
            assert not session.running
            assert found is None or found.finish_reason in (
                FinishReason.ABORT,
                FinishReason.STOP,
                FinishReason.LENGTH,
            )
            again = served.open("g#1")
            await converse(served.client(again), 1)

    asyncio.run(scenario())
