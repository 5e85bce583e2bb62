"""The torch engine samples from each model family's own distribution, or refuses the family."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch

from tandem.common.errors import ConfigError
from tandem.common.records import SamplingParams, Version
from tandem.rollout.decoding.choice import choose
from tandem.rollout.decoding.torch_engine import TorchEngine
from tandem.rollout.engine import GroupRequest, ParameterSpec
from tandem.rollout.model_facts import require_checkpoint_names

BOUND = 1e-4
AGREE = [family.name for family in families.FAMILIES if not family.engine]
REFUSED = [family.name for family in families.FAMILIES if family.engine]


def sampled(model: Any, tiny: Any) -> Any:
    """Groups of unlike prompts that run side by side, up to rows far beyond every window."""
    rng = np.random.default_rng(5)
    requests = [
        GroupRequest(
            group_id=str(number),
            prompt_tokens=rng.integers(3, families.VOCABULARY, length).astype(np.int32),
            count=2,
            sampling=SamplingParams(temperature=0.8, max_new_tokens=12, top_p=1.0, top_k=0),
            seed=number,
        )
        for number, length in enumerate((3, 11, 26))
    ]

    async def run() -> Any:
        engine = TorchEngine(
            model,
            tiny.tokenizer(),
            version=Version(term=1, step=0),
            longest=families.LONGEST,
            max_rows=4,
        )
        await engine.start()
        try:
            found = {f.group_id: f.samples async for f in engine.generate(requests)}
        finally:
            await engine.close()
        return [(request, sample) for request in requests for sample in found[request.group_id]]

    return asyncio.run(run())


@pytest.mark.parametrize("name", AGREE)
def test_recorded_log_probs_are_the_models_own(name: str, tiny: Any) -> None:
    model = families.model(families.family(name))
    count = 0
    for request, sample in sampled(model, tiny):
        ids = torch.from_numpy(np.concatenate([request.prompt_tokens, sample.tokens])).long()
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
        every = torch.log_softmax(logits[len(request.prompt_tokens) - 1 : -1] / 0.8, -1)
        own = every.gather(1, ids[len(request.prompt_tokens) :, None]).squeeze(1)
        assert float((own - torch.from_numpy(sample.logprobs)).abs().max()) <= BOUND
        count += len(sample.tokens)
    assert count > 30


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_be_sampled_is_refused(name: str, tiny: Any) -> None:
    family = families.family(name)
    model = families.model(family)
    # With the kind of layer that it is told by, or with the figure.
    told = family.engine if "layers of" in family.engine else "by up to [0-9.]+ nats"
    with pytest.raises(ConfigError, match=rf"{told}.*rollout\.engine=vllm"):
        TorchEngine(model, tiny.tokenizer(), longest=families.LONGEST)


def saved(name: str, folder: Path) -> list[ParameterSpec]:
    """The parameters of a family's model, which is saved."""
    model = families.model(families.family(name))
    model.save_pretrained(folder)
    return [
        ParameterSpec(name=name, shape=tuple(p.shape), dtype="float32")
        for name, p in model.named_parameters()
    ]


@pytest.mark.parametrize("name", families.NAMES)
def test_an_engine_that_reads_checkpoints_gets_names_that_it_knows(
    name: str, tmp_path: Path
) -> None:
    specs = saved(name, tmp_path)
    told = (
        pytest.raises(ConfigError, match=r"set rollout\.engine=torch")
        if families.family(name).renamed
        else nullcontext()
    )
    with told:
        require_checkpoint_names(str(tmp_path), specs)


def test_names_are_looked_up_for_a_model_of_the_hub_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--someone--some-model"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    specs = saved("GPT-NeoX (Pythia)", kept / "snapshots" / "abc")
    with pytest.raises(ConfigError, match=r"'gpt_neox'.*set rollout\.engine=torch"):
        require_checkpoint_names("someone/some-model", specs)


def test_rows_that_would_reach_an_untried_window_are_refused(tiny: Any) -> None:
    model = families.model(families.family("Mistral"))
    engine = TorchEngine(model, tiny.tokenizer(), longest=9)
    assert engine._facts.context == 9


def test_a_fault_in_the_generic_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tandem.rollout.decoding.generic_decoder.GenericDecoder._narrowed",
        lambda self, seen, kind, at: seen,
    )
    with pytest.raises(ConfigError, match="the torch engine's log-probs are off"):
        choose(families.model(families.family("Gemma 3")).eval(), longest=families.LONGEST)
