"""The torch engine with its model on another device than the host: no tensor of one meets one of the other."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from elsewhere import move, played

from tandem.common.config.learner import LoraConfig
from tandem.common.models import load_model, load_tokenizer
from tandem.common.records import SamplingParams, Version
from tandem.rollout.decoding import choice
from tandem.rollout.decoding.torch_engine import TorchEngine
from tandem.rollout.engine import GroupRequest, NamedWeights

WAYS = {"direct": {}, "generic": {}, "adapters": {"lora": LoraConfig(rank=2)}}
# Temperature, top-p and top-k.
SAMPLING = [(1.0, 1.0, 0), (0.7, 0.9, 0), (0.0, 1.0, 0), (1.0, 1.0, 5)]


def requests() -> list[GroupRequest]:
    """Groups of different prompts, lengths and ways of sampling, more than have room at once."""
    return [
        GroupRequest(
            group_id=f"g{number}",
            prompt_tokens=np.arange(5, 9 + number, dtype=np.int32),
            count=3,
            sampling=SamplingParams(
                max_new_tokens=6 + 3 * number, temperature=heat, top_p=top_p, top_k=top_k
            ),
            seed=0,
        )
        for number, (heat, top_p, top_k) in enumerate(SAMPLING)
    ]


async def sampled(engine: TorchEngine, own: dict[str, torch.Tensor]) -> list[Any]:
    """Tokens of every sample, with new weights in between, and scores of two rows."""
    await engine.start()
    try:
        first = [group async for group in engine.generate(requests()[:1])]
        await engine.load(NamedWeights(own, None), Version(term=1, step=1))
        rest = [group async for group in engine.generate(requests()[1:])]
        rows = [np.arange(3, 20, dtype=np.int32), np.arange(3, 10, dtype=np.int32)]
        scores = await engine.score(rows, 0.7)
    finally:
        await engine.close()
    assert all(group.error is None for group in (*first, *rest))
    found = {g.group_id: [s.tokens.tolist() for s in g.samples] for g in (*first, *rest)}
    return [found, np.concatenate(scores)]


@pytest.mark.parametrize("way", WAYS)
def test_sampling_keeps_to_the_models_device(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: Any = {
        "decoder": "direct" if way == "adapters" else way,
        "max_rows": 8,
        "longest": 60,
        **WAYS[way],
    }
    found = []
    for elsewhere in (False, True):
        model = load_model("miniature", attention="sdpa")
        if elsewhere:
            # The played device can't tell in-place operations of tensors of inference.
            monkeypatch.setattr(torch, "inference_mode", torch.no_grad)
            plain = torch.no_grad()(choice.disagreement.__wrapped__)  # type: ignore[attr-defined]
            monkeypatch.setattr(choice, "disagreement", plain)
            run = TorchEngine._run

            def there(self: TorchEngine, run: Any = run) -> None:
                with played():
                    run(self)

            monkeypatch.setattr(TorchEngine, "_run", there)
            with played():
                engine = TorchEngine(move(model), load_tokenizer("miniature"), **settings)
        else:
            engine = TorchEngine(model, load_tokenizer("miniature"), **settings)
        generator = torch.Generator().manual_seed(0)
        own = {
            spec.name: torch.randn(spec.shape, generator=generator) * 0.05
            for spec in engine.parameter_specs()
        }
        found.append(asyncio.run(sampled(engine, own)))
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-3)
