"""Chooses the decoder for a model: the fastest one whose log-probs are the model's own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...common.agreement import Difference, Probe, ProbeRow, Scores
from ...common.errors import ConfigError
from ...common.memory import is_out_of_memory
from ...common.plain import one_line
from .decoder import Decoder, DirectDecoder, KeyValues, layer_kinds, why_not_direct
from .generic_decoder import WAYS, GenericDecoder

log = logging.getLogger("tandem.rollout")

LONGEST = 4096
"""Greatest length of a row, in tokens, for a model that has no limit of its own."""
PREFILL_TOKENS = 4096
"""Greatest number of padded tokens that are tried at once."""


@torch.inference_mode()
def disagreement(model: Any, decoder: Decoder, probe: Probe) -> Difference:
    """The difference between a decoder's log-probs and entropies and the model's own.

    The rows run side by side, with a cache as samples do and without one as given tokens: first the
    short ones, then the long ones beside a short one.

    Args:
        model: the model of both.
        decoder: the decoder to test.
        probe: rows with the model's own scores.
    """
    rows = probe.rows
    difference = Difference()
    short = [number for number, row in enumerate(rows) if not row.long]
    long = [number for number, row in enumerate(rows) if row.long]
    for which in (short, [*short[:1], *long] if long else []):
        if which:
            chosen = [rows[number] for number in which]
            # Given tokens get all logits of a row, which may be too many for long rows.
            for way in (_decoded, _given) if which == short else (_decoded,):
                for number, one in zip(which, way(model, decoder, chosen), strict=True):
                    difference |= Difference.of(one, probe.own[number], rows[number])
    return difference


def _given(model: Any, decoder: Decoder, rows: Sequence[ProbeRow]) -> list[Scores]:
    """Scores as the engine computes them for given tokens."""
    device = model.get_input_embeddings().weight.device
    width = max(len(row.ids) for row in rows)
    scores = []
    for row in rows:
        padded = np.zeros((1, width), dtype=np.int64)
        padded[0, : len(row.ids)] = row.ids
        logits = decoder.logits(
            torch.from_numpy(padded).to(device), torch.tensor([len(row.ids)], device=device)
        )[0, len(row.prompt) - 1 : len(row.ids) - 1]
        tokens = torch.from_numpy(row.response).to(device)
        scores.append(Scores.of_logits(logits, tokens, row.temperature))
    return scores


def _decoded(model: Any, decoder: Decoder, rows: Sequence[ProbeRow]) -> list[Scores]:
    """Scores as the engine computes them: a prefill up to the prompt's last token, then one step per token."""
    device = model.get_input_embeddings().weight.device
    known = np.array([max(len(row.prompt) - 1, 1) for row in rows])
    width = int(known.max())
    steps = max(len(row.response) for row in rows)
    padded = np.zeros((len(rows), width), dtype=np.int64)
    for number, row in enumerate(rows):
        padded[number, : known[number]] = row.ids[: known[number]]
    # Only a few rows at a time if they are long.
    at_once = max(1, PREFILL_TOKENS // width)
    cache: KeyValues | None = None
    for start in range(0, len(rows), at_once):
        part = slice(start, start + at_once)
        made = decoder.prefill(
            torch.from_numpy(padded[part]).to(device), torch.from_numpy(known[part]).to(device)
        )
        if cache is None:
            cache = KeyValues([layer[:, :0] for layer in made.layers])
            cache.resize(len(rows), width + steps)
        places = torch.arange(made.rows, device=device)
        cache.write(places + start, made, places)
    assert cache is not None
    logits: list[list[Tensor]] = [[] for _ in rows]
    for step in range(steps):
        # A row that has ended feeds its last token once more.
        positions = np.array(
            [len(row.prompt) - 1 + min(step, len(row.response) - 1) for row in rows]
        )
        fed = np.array([row.ids[at] for row, at in zip(rows, positions, strict=True)])
        given = decoder.step(torch.from_numpy(fed).to(device), positions, cache)
        for number, row in enumerate(rows):
            if step < len(row.response):
                logits[number].append(given[number])
    return [
        Scores.of_logits(
            torch.stack(each), torch.from_numpy(row.response).to(device), row.temperature
        )
        for each, row in zip(logits, rows, strict=True)
    ]


def choose(model: Any, kind: str = "auto", *, longest: int | None = None) -> Decoder:
    """The fastest decoder that is right for a model.

    A decoder is right if its log-probs and entropies are those of the model's own forward, on
    a few rows that reach every branch of the model that rows of the run reach.

    Args:
        model: a transformers causal model in evaluation mode.
        kind: ``direct`` and ``generic`` force one; ``auto`` takes the direct one if it is right.
        longest: greatest number of tokens of prompt and response; None = the model's own limit.

    Raises:
        ConfigError: no decoder can run this model.
    """
    if longest is None:
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        longest = int(limit or LONGEST)
    probe = Probe.of(model, longest)
    reason = why_not_direct(model, longest)
    if kind != "generic" and reason is None:
        direct = DirectDecoder(model)
        difference = disagreement(model, direct, probe)
        if probe.allows(difference):
            return direct
        reason = f"its log-probs are off by {difference.logprob:.2g} nats"
    if kind == "direct":
        raise ConfigError(f"the direct decoder can't run this model: {reason}")
    if kind == "auto":
        log.info("generation goes through transformers' forward, which is slower: %s", reason)
    return _generic(model, probe)


def _generic(model: Any, probe: Probe) -> GenericDecoder:
    """A generic decoder with the first way of masking that is right."""
    several = len(layer_kinds(model.config.get_text_config())) > 1
    least, failure = None, None
    for way in WAYS if several else WAYS[1:]:
        decoder = GenericDecoder(model, way)
        try:
            difference = disagreement(model, decoder, probe)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            failure = failure or error
            continue
        if probe.allows(difference):
            return decoder
        if least is None or difference.logprob < least.logprob:
            least = difference
    if least is None:
        assert failure is not None
        raise ConfigError(
            f"the torch engine can't run model type {model.config.model_type!r}: "
            f"{one_line(failure, kind=True)}: use rollout.engine=vllm"
        ) from failure
    probe.require(least, "the torch engine's", "use rollout.engine=vllm")
    raise AssertionError("within its bound after all")
