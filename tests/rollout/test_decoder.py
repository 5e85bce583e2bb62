"""The decoders give transformers' logits, and the fast one is chosen where it may be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tandem.common.agreement import Probe
from tandem.common.errors import TandemError
from tandem.rollout.decoding import choice
from tandem.rollout.decoding.choice import choose
from tandem.rollout.decoding.decoder import DirectDecoder, KeyValues, rms_norm, why_not_direct
from tandem.rollout.decoding.generic_decoder import GenericDecoder

LONGEST = 40


def disagreement(model: Any, decoder: Any) -> float:
    """Greatest difference from the model's own log-probs and entropies, in nats."""
    return choice.disagreement(model, decoder, Probe.of(model, LONGEST)).most


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "mistral"])
def test_llama_like_models_go_the_direct_way(tiny: Any, kind: str) -> None:
    model = tiny.model(kind)
    decoder = choose(model)
    assert isinstance(decoder, DirectDecoder)
    assert disagreement(model, decoder) < 1e-4


def test_other_models_go_through_transformers(tiny: Any) -> None:
    model = tiny.model("gpt2")
    decoder = choose(model)
    assert isinstance(decoder, GenericDecoder)
    assert disagreement(model, decoder) < 1e-4
    with pytest.raises(TandemError, match="gpt2"):
        choose(tiny.model("gpt2"), "direct")


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_bfloat16_stays_near_transformers(tiny: Any, kind: str) -> None:
    model = tiny.model(kind, dtype=torch.bfloat16)
    decoder = choose(model)
    assert isinstance(decoder, DirectDecoder)
    assert disagreement(model, decoder) < 0.3


def test_a_model_as_certain_as_a_trained_one_is_not_refused_for_its_rounding(tiny: Any) -> None:
    model = tiny.model("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight *= 100.0
    probe = Probe.of(model, LONGEST)
    found = choice.disagreement(model, DirectDecoder(model), probe)
    certain = max(float(own.logprobs.abs().max()) for own in probe.own)
    assert certain > 100
    assert probe.bound == pytest.approx(1e-4 * certain / 5)
    assert probe.allows(found)
    assert isinstance(choose(model), DirectDecoder)
    # What it passes is still rounding.
    model.model.layers[0].mlp.down_proj.weight.data *= 1.01
    assert not probe.allows(choice.disagreement(model, DirectDecoder(model), probe))


def test_layers_that_a_config_counts_are_no_window(tiny: Any) -> None:
    model = tiny.model("qwen2")
    assert model.config.max_window_layers < LONGEST
    assert [row.window for row in Probe.of(model, LONGEST).rows if row.long] == []


def test_a_model_whose_layers_do_something_else_is_found_out(tiny: Any) -> None:
    model = tiny.model("llama")
    forward = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: 2.0 * forward(x)
    assert why_not_direct(model, LONGEST) is None
    assert isinstance(choose(model), GenericDecoder)


def test_a_length_dependent_rope_is_left_to_transformers(tiny: Any) -> None:
    model = tiny.model("llama")
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert why_not_direct(model, LONGEST) == "rope type dynamic"


def test_a_sliding_window_goes_through_transformers_where_rows_reach_it(tiny: Any) -> None:
    model = tiny.model("mistral")
    model.config.sliding_window = 16
    assert why_not_direct(model, 18) == "a sliding window of 16 tokens"
    assert isinstance(choose(model, longest=40), GenericDecoder)
    assert isinstance(choose(model, longest=17), DirectDecoder)


def test_fused_parameters_are_still_the_models_own(tiny: Any) -> None:
    model, reference = tiny.model("qwen2", seed=0), tiny.model("qwen2", seed=1)
    before = {name: p.shape for name, p in model.named_parameters()}
    decoder = DirectDecoder(model)
    assert {name: p.shape for name, p in model.named_parameters()} == before
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(reference.get_parameter(name))
    assert disagreement(reference, decoder) < 1e-4


@pytest.mark.parametrize("decoder_of", [DirectDecoder, GenericDecoder])
def test_moving_and_replacing_rows_leaves_the_others_alone(tiny: Any, decoder_of: Any) -> None:
    model = tiny.model("qwen2")
    decoder = decoder_of(model)
    numbers = torch.randint(3, 24, (4, 10), generator=torch.Generator().manual_seed(0))
    lengths = np.array([3, 9, 5, 7])
    at = torch.from_numpy(lengths)
    with torch.inference_mode():
        cache = decoder.prefill(numbers[:, :9], at)
        cache.resize(4, 16)
        cache.move(torch.tensor([0]), torch.tensor([3]))
        late = decoder.prefill(numbers[:2, :9], at[:2])
        cache.write(torch.tensor([1]), late, torch.tensor([0]))
        cache.resize(6, 20)
        cache.write(torch.tensor([2]), late, torch.tensor([1]))
        rows = torch.tensor([3, 0, 1])
        logits = decoder.step(numbers[rows, at[rows]], lengths[rows], cache.first(3))
        expected = model(input_ids=numbers).logits[rows, at[rows]]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_growing_keeps_what_is_there_and_adds_zeros() -> None:
    cache = KeyValues([torch.ones(2, 3, 1, 4, 5)])
    cache.resize(4, 7)
    assert (cache.rows, cache.capacity) == (4, 7)
    assert float(cache.layers[0][:, :3, :, :4].min()) == 1.0
    assert float(cache.layers[0][:, :3, :, 4:].abs().max()) == 0.0
    assert float(cache.layers[0][:, 3:].abs().max()) == 0.0


def test_a_new_row_sees_nothing_of_the_one_before_it() -> None:
    cache = KeyValues([torch.full((2, 3, 1, 6, 5), float("nan"))])
    cache.write(torch.tensor([1]), KeyValues([torch.ones(2, 1, 1, 4, 5)]), torch.tensor([0]))
    assert cache.layers[0][:, 1].isfinite().all()
    assert cache.layers[0][:, [0, 2]].isnan().all()


def test_rms_norm_is_the_formula() -> None:
    x, weight = torch.randn(5, 16, dtype=torch.float32), torch.rand(16)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), expected)
    assert float(rms_norm(torch.zeros(1, 16), weight, 1e-6).abs().max()) == 0.0
