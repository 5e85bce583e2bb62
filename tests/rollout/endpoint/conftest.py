"""A real engine on a tiny random model with a chat template, behind a real endpoint."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from endpoint_calls import CONTEXT, RUN_KEY, Served

from tandem.common.records import Version
from tandem.rollout.endpoint.server import Endpoint


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    from tandem.launch.miniature.tools.tokenizer import build

    return build()


def random_model(chat_tokenizer: Any) -> Any:
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
def chat_model(chat_tokenizer: Any) -> Any:
    return random_model(chat_tokenizer)


@pytest.fixture(scope="session")
def serving(chat_model: Any, chat_tokenizer: Any) -> Any:
    """Makes an endpoint: ``async with serving() as served``; with another tokenizer, of a model of its own."""

    @asynccontextmanager
    async def make(tokenizer: Any = None, **changes: Any) -> AsyncIterator[Served]:
        import copy

        from tandem.rollout.decoding.torch_engine import TorchEngine

        known = chat_model if tokenizer is None else random_model(tokenizer)
        tokenizer = tokenizer or chat_tokenizer
        model = copy.deepcopy(known)
        engine = TorchEngine(
            model, tokenizer, version=Version(term=1, step=0), max_rows=64, longest=CONTEXT
        )
        await engine.start()
        given = {"key": RUN_KEY, **changes}
        endpoint = Endpoint(engine, tokenizer, context=CONTEXT, model="tiny", **given)
        await endpoint.start()
        try:
            yield Served(endpoint, engine, known, tokenizer)
        finally:
            await endpoint.close()
            await engine.close()

    return make
