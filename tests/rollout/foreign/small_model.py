"""A small random model of Qwen3's architecture, with a tokenizer that both Tandem and renderers can use.

Renderers writes the messages of Qwen3 itself, and asks the tokenizer for nothing but the ids of its special
tokens, so a tokenizer without merges does.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tandem.common.records import SamplingParams, Version
from tandem.rollout.endpoint.server import Endpoint
from tandem.rollout.endpoint.sessions import Session, SessionSpec
from tandem.rollout.environments.requests import (
    EnvironmentTask,
    Limits,
    ModelClient,
    RunRequest,
)

CONTEXT = 8192
MODEL = "tiny"


def write(folder: Path) -> tuple[Any, Any]:
    """Writes model and tokenizer into a folder, and returns them."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tandem.launch.miniature.tools.tokenizer import build

    tokenizer = build()
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save_pretrained(folder)
    # As Qwen3's own says; else transformers gives it the token for padding, which renderers then takes for unknown.
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"unk_token": None}))
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=48,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(5)
    model = Qwen3ForCausalLM(config).eval()
    torch.random.set_rng_state(state)
    model.save_pretrained(folder)
    return model, tokenizer


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Endpoint]:
    """A real engine of that model behind a real endpoint."""
    from tandem.rollout.decoding.torch_engine import TorchEngine

    model, tokenizer = write(folder)
    engine = TorchEngine(
        model, tokenizer, version=Version(term=1, step=0), max_rows=64, longest=CONTEXT
    )
    await engine.start()
    endpoint = Endpoint(engine, tokenizer, context=CONTEXT, model=MODEL)
    await endpoint.start()
    try:
        yield endpoint
    finally:
        await endpoint.close()
        await engine.close()


def session(endpoint: Endpoint, name: str, **changes: Any) -> Session:
    given = {"seed": 3, "longest": CONTEXT, "max_turns": 100, **changes}
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=24)
    return endpoint.open(SessionSpec(name=name, sampling=sampling, **given))


def request(task: dict[str, Any] | None, url: str, environment: str = "game") -> RunRequest:
    row = {} if task is None else {"task": task}
    return RunRequest(
        task_data=EnvironmentTask(environment=environment, row=row),
        client=ModelClient(type="train", base_url=url, api_key="in the URL"),
        model=MODEL,
        limits=Limits(turns=8, calls=8, observation_tokens=2000),
    )


def blackjack(seed: int) -> dict[str, Any]:
    """A task of verifiers' textarena that its own ``load`` doesn't offer, written by hand."""
    return {
        "name": f"Blackjack-v0#{seed}",
        "system_prompt": "You play a game. Answer with one move in square brackets.",
        "prompt": "[GAME] You play Blackjack against the dealer. [hit] takes a card, [stand] ends your turn.",
        "info": {"game": "Blackjack-v0", "seed": seed},
    }
