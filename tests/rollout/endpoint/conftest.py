"""A real engine on a tiny random model with a chat template, behind a real endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tandem.common.records import SamplingParams, Version
from tandem.rollout.endpoint.server import Endpoint
from tandem.rollout.endpoint.sessions import Session, SessionSpec

CONTEXT = 4096
RUN_KEY = "the-run's-own-key"


def sampling(**changes: Any) -> SamplingParams:
    given = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 24}
    return SamplingParams(**{**given, **changes})


def spec(name: str = "g#0", **changes: Any) -> SessionSpec:
    given = {
        "name": name,
        "sampling": sampling(),
        "seed": 3,
        "longest": CONTEXT,
        "max_turns": 1000,
    }
    return SessionSpec(**{**given, **changes})


def tool(name: str = "multiply") -> dict[str, Any]:
    numbers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    parameters = {"type": "object", "properties": numbers, "required": ["a", "b"]}
    about = {"name": name, "description": "Multiplies.", "parameters": parameters}
    return {"type": "function", "function": about}


@dataclass(slots=True)
class Served:
    """An endpoint that listens."""

    endpoint: Endpoint
    engine: Any
    model: Any
    tokenizer: Any

    def open(self, name: str = "g#0", **changes: Any) -> Session:
        return self.endpoint.open(spec(name, **changes))

    def client(self, session: Session) -> Any:
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=session.base_url, api_key="unused", max_retries=0, timeout=60)


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    from tandem.launch.miniature.tools.tokenizer import build

    return build()


@pytest.fixture(scope="session")
def chat_model(chat_tokenizer: Any) -> Any:
    """A random model whose answers end soon."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(chat_tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=48,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=chat_tokenizer.eos_token_id,
        pad_token_id=chat_tokenizer.pad_token_id,
        bos_token_id=None,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(5)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.2)
    torch.random.set_rng_state(state)
    return model.eval()


@pytest.fixture(scope="session")
def serving(chat_model: Any, chat_tokenizer: Any) -> Any:
    """Makes an endpoint: ``async with serving() as served``."""

    @asynccontextmanager
    async def make(**changes: Any) -> AsyncIterator[Served]:
        import copy

        from tandem.rollout.decoding.torch_engine import TorchEngine

        model = copy.deepcopy(chat_model)
        engine = TorchEngine(
            model, chat_tokenizer, version=Version(term=1, step=0), max_rows=64, longest=CONTEXT
        )
        await engine.start()
        endpoint = Endpoint(
            engine, chat_tokenizer, context=CONTEXT, model="tiny", key=RUN_KEY, **changes
        )
        await endpoint.start()
        try:
            yield Served(endpoint, engine, chat_model, chat_tokenizer)
        finally:
            await endpoint.close()
            await engine.close()

    return make


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 110))
