"""What every engine must do, whatever runs inside; the same tests hold for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_calls import collect, in_engine

from tandem.common.errors import TandemError, WeightsError
from tandem.common.records import FinishReason, Sample, SamplingParams, Source, Version
from tandem.rollout.engine import (
    Engine,
    FinishedGroup,
    GroupRequest,
    NamedWeights,
    Ranker,
    Scorer,
)

V1, V2, V3 = (Version(term=1, step=step) for step in (1, 2, 3))
NewEngine = Callable[..., Any]
OVERFLOWS = 24
"""A token id that no prompt of these tests has by itself."""
VLLM = [pytest.mark.vllm, pytest.mark.timeout(300)]


def prompt(length: int, key: int = 0) -> np.ndarray:
    """[length] Token ids without an end token."""
    generator = np.random.Generator(np.random.Philox(key=key))
    return generator.integers(3, 24, length).astype(np.int32)


def asks(
    group_id: str = "0-0",
    *,
    length: int = 9,
    key: int = 0,
    count: int = 4,
    new: int = 24,
    seed: int = 0,
    **settings: Any,
) -> GroupRequest:
    """A request with short defaults."""
    whole: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    sampling = {name: settings.pop(name, value) for name, value in whole.items()}
    return GroupRequest(
        group_id=group_id,
        prompt_tokens=prompt(length, key),
        count=count,
        sampling=SamplingParams(max_new_tokens=new, **sampling),
        seed=seed,
        **settings,
    )


def generate(engine: Any, *requests: GroupRequest) -> dict[str, FinishedGroup]:
    return in_engine(engine, lambda e: collect(e, *requests))


def forward_logprobs(model: Any, request: GroupRequest, sample: Sample) -> np.ndarray:
    """[L] Log-probs of a sample's tokens by transformers' own forward at its temperature."""
    row = torch.from_numpy(np.concatenate([request.prompt_tokens, sample.tokens])).long()[None]
    with torch.no_grad():
        logits = model(input_ids=row).logits[0, len(request.prompt_tokens) - 1 : -1].float()
    logprobs = (logits / (request.sampling.temperature or 1.0)).log_softmax(-1)
    chosen = logprobs.gather(1, torch.from_numpy(sample.tokens).long()[:, None])
    return chosen[:, 0].numpy()


def same_tokens(a: FinishedGroup, b: FinishedGroup) -> bool:
    assert a.samples, a.error
    return all(
        np.array_equal(x.tokens, y.tokens) for x, y in zip(a.samples, b.samples, strict=True)
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_a_full_forward_at_the_sampling_temperature(
    new_engine: NewEngine, tiny: Any, temperature: float
) -> None:
    requests = [
        asks("0-0", length=5, temperature=temperature),
        asks("0-1", length=17, key=1, temperature=temperature),
    ]
    groups = generate(new_engine(tiny.model()), *requests)
    reference = tiny.model()
    for request in requests:
        for sample in groups[request.group_id].samples:
            expected = forward_logprobs(reference, request, sample)
            np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


def test_long_responses_have_the_logprobs_of_a_full_forward(
    new_engine: NewEngine, tiny: Any
) -> None:
    # Most end early; some outgrow what was reserved for them at first.
    request = asks("0-0", count=12, new=200)
    samples = generate(new_engine(tiny.model()), request)["0-0"].samples
    longest = sorted(samples, key=lambda sample: len(sample.tokens))[-3:]
    assert len(longest[-1].tokens) > 90
    reference = tiny.model()
    for sample in longest:
        expected = forward_logprobs(reference, request, sample)
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


def test_a_group_alone_and_in_company_gives_the_same_samples(
    new_engine: NewEngine, tiny: Any, repeatable: float
) -> None:
    request = asks("0-7", key=7, temperature=repeatable)
    alone = generate(new_engine(tiny.model()), request)["0-7"]
    company = [asks(f"1-{i}", length=3 + 5 * i, key=i, new=30) for i in range(4)]
    together = generate(new_engine(tiny.model()), *company[:2], request, *company[2:])
    for a, b in zip(alone.samples, together["0-7"].samples, strict=True):
        assert np.array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=3e-5)


def test_a_group_that_joins_a_running_batch_gives_the_same_samples(
    new_engine: NewEngine, tiny: Any, repeatable: float
) -> None:
    request = asks("0-7", key=7, temperature=repeatable)
    alone = generate(new_engine(tiny.model()), request)["0-7"]

    async def scenario(engine: Any) -> FinishedGroup:
        first = asyncio.create_task(collect(engine, asks("0-1", key=1, count=8, new=200)))
        while engine.stats().decode_steps < 3:
            await asyncio.sleep(0)
        joined = (await collect(engine, request))["0-7"]
        await engine.abort(["0-1"])
        await first
        return joined

    assert same_tokens(alone, in_engine(new_engine(tiny.model()), scenario))


def test_samples_are_repeated_where_the_engine_says_that_noise_is_keyed(
    new_engine: NewEngine, tiny: Any
) -> None:
    engine = new_engine(tiny.model())
    first = generate(engine, asks("0-1", count=8))["0-1"]
    again = generate(new_engine(tiny.model()), asks("0-1", count=8))["0-1"]
    assert same_tokens(first, again) == engine.keyed_noise


def test_noise_is_keyed_by_seed_group_and_sample(keyed_engine: NewEngine, tiny: Any) -> None:
    first = generate(keyed_engine(tiny.model()), asks("0-1"))["0-1"]
    other_seed = generate(keyed_engine(tiny.model()), asks("0-1", seed=1))["0-1"]
    other_group = generate(keyed_engine(tiny.model()), asks("0-2"))["0-2"]
    assert not same_tokens(first, other_seed)
    assert not same_tokens(first, other_group)
    assert len({sample.tokens.tobytes() for sample in first.samples}) > 1


def test_the_first_samples_do_not_depend_on_how_many_are_asked_for(
    keyed_engine: NewEngine, tiny: Any
) -> None:
    seven = generate(keyed_engine(tiny.model()), asks("0-1", count=7))["0-1"]
    eight = generate(keyed_engine(tiny.model()), asks("0-1", count=8))["0-1"]
    for a, b in zip(seven.samples, eight.samples[:7], strict=True):
        assert np.array_equal(a.tokens, b.tokens)


def test_temperature_zero_is_transformers_greedy_generate(new_engine: NewEngine, tiny: Any) -> None:
    requests = [asks(f"0-{i}", length=4 + 3 * i, key=i, count=1, temperature=0.0) for i in range(4)]
    groups = generate(new_engine(tiny.model()), *requests)
    reference = tiny.model()
    for request in requests:
        row = torch.from_numpy(request.prompt_tokens).long()[None]
        with torch.no_grad():
            expected = reference.generate(
                row,
                attention_mask=torch.ones_like(row),
                do_sample=False,
                max_new_tokens=24,
                eos_token_id=tiny.EOS,
                pad_token_id=0,
            )[0, row.shape[1] :]
        sample = groups[request.group_id].samples[0]
        assert sample.tokens.tolist() == expected.tolist()


def test_samples_follow_the_models_distribution(new_engine: NewEngine, tiny: Any) -> None:
    model = tiny.model()
    request = asks("0-0", count=2000, new=1)
    group = generate(new_engine(tiny.model(), max_rows=2000), request)["0-0"]
    with torch.no_grad():
        row = torch.from_numpy(request.prompt_tokens).long()[None]
        probs = model(input_ids=row).logits[0, -1].softmax(-1).numpy()
    counts = np.bincount([s.tokens[0] for s in group.samples], minlength=tiny.VOCABULARY)
    error = np.sqrt(2000 * probs * (1 - probs)) + 1e-9
    assert np.all(np.abs(counts - 2000 * probs) < 5 * error + 1)


@pytest.mark.parametrize(("setting", "value"), [("top_k", 2), ("top_p", 0.5)])
def test_truncated_sampling_keeps_to_the_likely_tokens_and_renormalises(
    new_engine: NewEngine, tiny: Any, setting: str, value: float
) -> None:
    request = asks("0-0", count=40, new=1, **{setting: value})
    group = generate(new_engine(tiny.model()), request)["0-0"]
    with torch.no_grad():
        row = torch.from_numpy(request.prompt_tokens).long()[None]
        probs = tiny.model()(input_ids=row).logits[0, -1].softmax(-1)
    ordered = probs.sort(descending=True)
    kept = 2 if setting == "top_k" else int((ordered.values.cumsum(0) < value).sum()) + 1
    allowed = ordered.indices[:kept].tolist()
    mass = float(ordered.values[:kept].sum())
    for sample in group.samples:
        token = int(sample.tokens[0])
        assert token in allowed
        assert sample.logprobs[0] == pytest.approx(np.log(float(probs[token]) / mass), abs=1e-4)


def test_groups_with_unlike_sampling_share_a_batch(new_engine: NewEngine, tiny: Any) -> None:
    mixed = [asks("0-0", temperature=0.0, count=1), asks("0-1", temperature=0.5), asks("0-2")]
    engine, reference = new_engine(tiny.model()), tiny.model()
    together = generate(engine, *mixed)
    for request in mixed:
        for sample in together[request.group_id].samples:
            expected = forward_logprobs(reference, request, sample)
            np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)
        if engine.keyed_noise or request.sampling.temperature == 0.0:
            alone = generate(new_engine(tiny.model()), request)
            assert same_tokens(together[request.group_id], alone[request.group_id])


def test_an_end_token_beyond_the_models_vocabulary_is_never_drawn(
    keyed_engine: NewEngine, tiny: Any
) -> None:
    model = tiny.model()
    model.generation_config.eos_token_id = [tiny.EOS, tiny.VOCABULARY + 3]
    group = generate(keyed_engine(model), asks("0-0", shortest=6))["0-0"]
    assert min(len(sample.tokens) for sample in group.samples) > 6


# 256 responses: with few of them, all may reach the limit by chance.
def test_a_response_ends_with_the_end_token_or_at_the_limit(
    new_engine: NewEngine, tiny: Any
) -> None:
    group = generate(new_engine(tiny.model()), asks("0-0", count=256, new=12))["0-0"]
    reasons = {sample.finish_reason for sample in group.samples}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    for sample in group.samples:
        inside, last = sample.tokens[:-1], sample.tokens[-1]
        assert tiny.EOS not in inside
        if sample.finish_reason is FinishReason.STOP:
            assert last == tiny.EOS
            assert len(sample.tokens) <= 12
        else:
            assert last != tiny.EOS
            assert len(sample.tokens) == 12


def test_no_response_ends_before_its_least_length(new_engine: NewEngine, tiny: Any) -> None:
    """And its first log-probs are those of the distribution without the end token."""
    prefixes = (prompt(0), prompt(5, key=5))
    asked = [
        asks("0-0", count=600, new=12, shortest=6),
        asks("0-1", count=2, new=3, shortest=6),
        asks("0-2", count=2, new=12, shortest=6, prefix_tokens=prefixes),
        asks("0-3", count=600, new=12),
    ]
    found = generate(new_engine(tiny.model()), *asked)
    assert min(len(sample.tokens) for sample in found["0-0"].samples) > 6
    assert any(sample.finish_reason is FinishReason.STOP for sample in found["0-0"].samples)
    assert all(len(sample.tokens) == 3 for sample in found["0-1"].samples)
    for sample, prefix in zip(found["0-2"].samples, prefixes, strict=True):
        assert len(sample.tokens) > len(prefix) + 6
    assert min(len(sample.tokens) for sample in found["0-3"].samples) < 7

    reference = tiny.model()
    for sample in found["0-0"].samples[:8]:
        row = torch.from_numpy(np.concatenate([asked[0].prompt_tokens, sample.tokens])).long()[None]
        with torch.no_grad():
            logits = reference(input_ids=row).logits[0, len(asked[0].prompt_tokens) - 1 : -1]
        logits[:6, tiny.EOS] = -torch.inf
        expected = logits.log_softmax(-1).gather(1, row[0, -len(sample.tokens) :, None])[:, 0]
        np.testing.assert_allclose(sample.logprobs, expected.numpy(), atol=1e-4)


def test_text_is_the_response_without_special_tokens(new_engine: NewEngine, tiny: Any) -> None:
    tokenizer = tiny.tokenizer()
    group = generate(new_engine(tiny.model()), asks("0-0", count=8))["0-0"]
    for sample in group.samples:
        assert sample.text == tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=True)
        assert "<eos>" not in sample.text


def test_a_prefix_begins_every_response_and_has_no_logprobs(
    new_engine: NewEngine, tiny: Any
) -> None:
    prefix = prompt(6, key=5)
    request = asks("0-0", prefix_tokens=prefix, new=10)
    group = generate(new_engine(tiny.model(), version=V1), request)["0-0"]
    reference = tiny.model()
    for sample in group.samples:
        assert sample.tokens[:6].tolist() == prefix.tolist()
        assert sample.source.tolist() == [Source.EXPERT] * 6 + [Source.OWN] * (
            len(sample.tokens) - 6
        )
        assert np.isnan(sample.logprobs[:6]).all()
        expected = forward_logprobs(reference, request, sample)
        np.testing.assert_allclose(sample.logprobs[6:], expected[6:], atol=1e-4)
        assert 1 <= len(sample.tokens) - 6 <= 10
        (span,) = sample.spans
        assert (span.start, span.end) == (6, len(sample.tokens))


def test_each_sample_may_have_a_prefix_of_its_own(new_engine: NewEngine, tiny: Any) -> None:
    prefixes = (prompt(6, key=5), prompt(0), prompt(3, key=8))
    group = generate(new_engine(tiny.model()), asks("0-0", count=3, prefix_tokens=prefixes))["0-0"]
    for sample, prefix in zip(group.samples, prefixes, strict=True):
        assert sample.tokens[: len(prefix)].tolist() == prefix.tolist()
        assert int((sample.source == Source.EXPERT).sum()) == len(prefix)


def test_the_longest_response_counts_its_prefix(new_engine: NewEngine, tiny: Any) -> None:
    prefixes = (prompt(6, key=5), prompt(0), prompt(3, key=8))
    request = asks("0-0", count=3, new=60, prefix_tokens=prefixes, longest=8, temperature=2.0)
    full = asks("0-1", count=3, prefix_tokens=prefixes, longest=6)
    found = generate(new_engine(tiny.model()), request, full)
    for sample in found["0-0"].samples:
        cut = sample.finish_reason is FinishReason.LENGTH
        assert len(sample.tokens) == 8 if cut else len(sample.tokens) <= 8
    assert any(s.finish_reason is FinishReason.LENGTH for s in found["0-0"].samples)
    assert found["0-1"].error == "a prefix of 6 tokens, and a response has 6"


def test_a_sample_continued_from_its_own_beginning_ends_alike(
    new_engine: NewEngine, tiny: Any, repeatable: float
) -> None:
    whole = generate(new_engine(tiny.model()), asks("0-0", new=20, temperature=repeatable))["0-0"]
    cut = tuple(sample.tokens[: min(5, len(sample.tokens) - 1)] for sample in whole.samples)
    request = asks("0-0", new=20, prefix_tokens=cut, temperature=repeatable)
    again = generate(new_engine(tiny.model()), request)["0-0"]
    for a, b in zip(whole.samples, again.samples, strict=True):
        assert b.tokens[: len(a.tokens)].tolist() == a.tokens.tolist()


def test_groups_are_yielded_as_they_finish(new_engine: NewEngine, tiny: Any) -> None:
    async def scenario(engine: Any) -> list[str]:
        requests = [asks("0-0", new=120, count=16), asks("0-1", new=2, count=2)]
        return [group.group_id async for group in engine.generate(requests)]

    assert in_engine(new_engine(tiny.model()), scenario) == ["0-1", "0-0"]


def test_more_groups_than_rows_wait_their_turn(
    new_engine: NewEngine, tiny: Any, repeatable: float
) -> None:
    # The vLLM of these tests has 64 rows whatever is asked for.
    requests = [asks(f"0-{i}", key=i, count=30, temperature=repeatable) for i in range(7)]
    roomy = generate(new_engine(tiny.model()), *requests)
    narrow = generate(new_engine(tiny.model(), max_rows=4), *requests)
    assert roomy.keys() == narrow.keys()
    assert all(same_tokens(roomy[i], narrow[i]) for i in roomy)


def test_rows_that_come_and_go_leave_the_others_alone(
    new_engine: NewEngine, tiny: Any, repeatable: float
) -> None:
    # Unlike lengths, limits and sampling: places are taken over, and rows move, all the time.
    requests = [
        asks(
            f"0-{i}",
            length=3 + 7 * i % 40,
            key=i,
            count=1 + i % 3,
            new=5 + 17 * i % 60,
            temperature=repeatable * (0.5 if i % 4 == 3 else 1.0),
        )
        for i in range(12)
    ]
    together = generate(new_engine(tiny.model(), max_rows=6), *requests)
    reference = tiny.model()
    for request in requests:
        for sample in together[request.group_id].samples:
            expected = forward_logprobs(reference, request, sample)
            np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)
    for request in requests[4::3]:
        alone = generate(new_engine(tiny.model()), request)
        assert same_tokens(together[request.group_id], alone[request.group_id])


def test_abort_yields_partial_samples(new_engine: NewEngine, tiny: Any, repeatable: float) -> None:
    request = asks("0-0", new=200, count=16, temperature=repeatable)

    async def scenario(engine: Any) -> FinishedGroup:
        task = asyncio.create_task(collect(engine, request))
        while engine.stats().decode_steps < 4:
            await asyncio.sleep(0)
        await engine.pause()
        await engine.abort(["0-0", "never heard of"])
        await engine.resume()
        return (await task)["0-0"]

    group = in_engine(new_engine(tiny.model(), version=V1), scenario)
    whole = generate(new_engine(tiny.model()), request)["0-0"]
    assert FinishReason.ABORT in {s.finish_reason for s in group.samples}
    for partial, full in zip(group.samples, whole.samples, strict=True):
        length = len(partial.tokens)
        assert partial.tokens.tolist() == full.tokens[:length].tolist()
        assert not np.isnan(partial.logprobs).any()
        # vLLM may have begun one of them with no token yet.
        assert [(s.start, s.end) for s in partial.spans] == ([(0, length)] if length else [])


def test_a_group_aborted_before_its_turn_has_samples_without_own_tokens(
    new_engine: NewEngine, tiny: Any
) -> None:
    async def scenario(engine: Any) -> dict[str, FinishedGroup]:
        await engine.pause()
        task = asyncio.create_task(
            collect(engine, asks("0-0", prefix_tokens=prompt(3)), asks("0-1", count=2))
        )
        while engine.stats().waiting_groups < 2:
            await asyncio.sleep(0)
        await engine.abort(["0-0"])
        await engine.resume()
        return await task

    groups = in_engine(new_engine(tiny.model()), scenario)
    assert all(s.finish_reason is FinishReason.ABORT for s in groups["0-0"].samples)
    assert all(len(s.tokens) == 3 and s.spans == () for s in groups["0-0"].samples)
    assert all(s.finish_reason is not FinishReason.ABORT for s in groups["0-1"].samples)


def test_leaving_the_iterator_aborts_what_is_left(new_engine: NewEngine, tiny: Any) -> None:
    async def scenario(engine: Any) -> int:
        stream = engine.generate([asks("0-0", new=1, count=1), asks("0-1", new=240, count=8)])
        await anext(stream)
        await stream.aclose()
        while engine.stats().running_rows:
            await asyncio.sleep(0)
        return int(engine.stats().decode_steps)

    assert in_engine(new_engine(tiny.model()), scenario) < 200


class Slow(NamedWeights):
    """Weights whose loading occupies the decode thread until it is told to go on."""

    go_on = threading.Event()

    def tensors(self) -> Any:
        assert self.go_on.wait(30)
        return super().tensors()


@contextlib.asynccontextmanager
async def occupied(engine: Any, tiny: Any) -> AsyncIterator[None]:
    """The decode thread gets to nothing else within it."""
    Slow.go_on.clear()
    loading = asyncio.create_task(engine.load(Slow(tiny.weights(tiny.model())), V2))
    await asyncio.sleep(0.05)
    try:
        yield
    finally:
        Slow.go_on.set()
        await loading


async def cancelled(*asked: Awaitable[Any]) -> None:
    """Asks, and is cancelled a moment later."""
    tasks = [asyncio.ensure_future(one) for one in asked]
    await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends


@pytest.mark.parametrize(
    "asked",
    [
        lambda e: e.score([prompt(20)]),
        lambda e: e.rank([prompt(20)], 2),
        lambda e: collect(e, asks("0-1")),
        lambda e: e.hold(60.0),
        lambda e: e.abort(["0-1"]),
        lambda e: e.pause(),
    ],
    ids=["score", "rank", "generate", "hold", "abort", "pause"],
)
def test_whoever_is_cancelled_ends_alone(keyed_engine: NewEngine, tiny: Any, asked: Any) -> None:
    async def scenario(engine: Any) -> FinishedGroup:
        async with occupied(engine, tiny):
            await cancelled(asked(engine), asked(engine))
        return (await collect(engine, asks("0-0", urgent=True)))["0-0"]

    assert in_engine(keyed_engine(tiny.model()), scenario).error is None


def test_groups_of_a_caller_cancelled_while_they_are_taken_in_are_aborted(
    keyed_engine: NewEngine, tiny: Any
) -> None:
    async def scenario(engine: Any) -> tuple[int, int]:
        await engine.pause()
        taking_in = engine._take_in

        async def slowly(groups: Any) -> None:
            await taking_in(groups)
            await asyncio.sleep(30)

        engine._take_in = slowly
        await cancelled(collect(engine, asks("0-0", new=200)))
        await engine.resume()
        engine._take_in = taking_in
        return engine.stats().waiting_groups, len(await collect(engine, asks("0-0", new=2)))

    assert in_engine(keyed_engine(tiny.model()), scenario) == (0, 1)


def test_a_group_refused_for_its_id_leaves_the_one_that_runs(
    new_engine: NewEngine, tiny: Any
) -> None:
    async def scenario(engine: Any) -> FinishedGroup:
        await engine.pause()
        first = asyncio.create_task(collect(engine, asks("0-0")))
        while not engine.stats().waiting_groups:
            await asyncio.sleep(0)
        with pytest.raises(ValueError, match="0-0"):
            await collect(engine, asks("0-0"))
        await engine.resume()
        return (await first)["0-0"]

    group = in_engine(new_engine(tiny.model()), scenario)
    assert all(sample.finish_reason is not FinishReason.ABORT for sample in group.samples)


def test_a_decode_thread_that_fails_says_so_to_all_who_wait(
    keyed_engine: NewEngine, tiny: Any
) -> None:
    async def scenario(engine: Any) -> str:
        running = asyncio.create_task(collect(engine, asks("0-0", count=8, new=200)))
        while engine.stats().decode_steps < 2:
            await asyncio.sleep(0)
        engine._may_begin = None
        assert "TypeError" in ((await running)["0-0"].error or "")
        while not engine.broken:
            await asyncio.sleep(0)
        with pytest.raises(TandemError, match="TypeError"):
            await collect(engine, asks("0-1"))
        return str(engine.broken)

    engine = keyed_engine(tiny.model())
    assert engine.broken == ""
    assert "the decode thread has failed: TypeError" in in_engine(engine, scenario)


def test_a_request_that_cannot_be_generated_fails_alone(new_engine: NewEngine, tiny: Any) -> None:
    bad = [
        asks("0-1", length=300),
        asks("0-2", prefix_tokens=np.array([5, tiny.EOS], dtype=np.int32)),
        asks("0-3", prefix_tokens=np.array([tiny.VOCABULARY], dtype=np.int32)),
        asks("0-4", length=0),
    ]
    groups = generate(new_engine(tiny.model()), asks("0-0"), *bad)
    assert groups["0-0"].error is None
    for request, word in zip(bad, ("context", "end token", "outside", "no tokens"), strict=True):
        group = groups[request.group_id]
        assert (group.samples, group.refused) == ((), True)
        assert word in (group.error or "")


@pytest.mark.parametrize("work", ["logits", "step"])
def test_an_engine_whose_device_has_failed_says_that_it_is_broken(
    keyed_engine: NewEngine, tiny: Any, work: str
) -> None:
    """Whether a token step finds it or a command."""

    def fail(*_: Any) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    async def scenario(engine: Any) -> None:
        running = asyncio.create_task(collect(engine, asks("0-0", count=8, new=200)))
        while engine.stats().decode_steps < 2:
            await asyncio.sleep(0)
        await engine.pause()
        setattr(engine._decoder, work, fail)
        if work == "logits":
            with pytest.raises(torch.AcceleratorError):
                await engine.score([prompt(5)])
        else:
            await engine.resume()
        assert "device-side assert" in ((await running)["0-0"].error or "")
        with pytest.raises(TandemError, match="device-side assert"):
            await collect(engine, asks("0-1"))
        assert "AcceleratorError" in engine.broken

    in_engine(keyed_engine(tiny.model()), scenario)


def test_memory_that_runs_out_while_a_load_recomputes_ends_the_samples_and_leaves_the_weights_whole(
    keyed_engine: NewEngine, tiny: Any
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    async def scenario(engine: Any) -> FinishedGroup:
        running = asyncio.create_task(collect(engine, asks("0-0", count=8, new=200)))
        while engine.stats().decode_steps < 2:
            await asyncio.sleep(0)
        await engine.pause()
        prefill, engine._decoder.prefill = engine._decoder.prefill, fail
        await engine.load(NamedWeights(tiny.weights(tiny.model(seed=1))), V2)
        assert (engine.version, engine.broken) == (V2, "")
        assert "2.00 GiB" in str(engine.exhausted)
        assert "out of memory" in ((await running)["0-0"].error or "")
        engine._decoder.prefill = prefill
        await engine.resume()
        return (await collect(engine, asks("0-1")))["0-1"]

    expected = generate(keyed_engine(tiny.model(seed=1)), asks("0-1"))["0-1"]
    assert same_tokens(in_engine(keyed_engine(tiny.model()), scenario), expected)


def test_memory_that_runs_out_in_scoring_exhausts_the_engine(
    keyed_engine: NewEngine, tiny: Any
) -> None:
    """The check of new weights would take it for wrong weights."""

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    async def scenario(engine: Any) -> str:
        engine._decoder.logits = fail
        with pytest.raises(torch.OutOfMemoryError):
            await engine.score([prompt(5)])
        return str(engine.exhausted)

    assert "2.00 GiB" in in_engine(keyed_engine(tiny.model()), scenario)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_group_whose_logits_are_not_finite_fails_alone(
    keyed_engine: NewEngine, tiny: Any, temperature: float
) -> None:
    asked = [asks("0-0", key=3, new=8), asks("0-1", new=8, temperature=temperature)]
    asked[1].prompt_tokens[4] = OVERFLOWS
    expected = generate(keyed_engine(tiny.model("llama")), asked[0])
    model = tiny.model("llama")
    engine = keyed_engine(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[OVERFLOWS] = torch.inf

    async def scenario(engine: Any) -> list[dict[str, FinishedGroup]]:
        return [await collect(engine, *asked), await collect(engine, asked[1])]

    beside, alone = in_engine(engine, scenario)
    assert same_tokens(beside["0-0"], expected["0-0"])
    for found in beside, alone:
        assert "the model's logits aren't finite" in (found["0-1"].error or "")


def test_a_response_stops_at_the_models_context(new_engine: NewEngine, tiny: Any) -> None:
    group = generate(new_engine(tiny.model()), asks("0-0", length=250, count=16, new=50))["0-0"]
    assert max(len(s.tokens) for s in group.samples) == 6


def test_a_group_id_may_run_only_once_at_a_time(new_engine: NewEngine, tiny: Any) -> None:
    with pytest.raises(ValueError, match="0-0"):
        generate(new_engine(tiny.model()), asks("0-0"), asks("0-0"))


def test_pause_keeps_rows_and_resume_goes_on(
    new_engine: NewEngine, tiny: Any, repeatable: float
) -> None:
    request = asks("0-0", new=60, temperature=repeatable)
    undisturbed = generate(new_engine(tiny.model()), request)["0-0"]

    async def scenario(engine: Any) -> FinishedGroup:
        task = asyncio.create_task(collect(engine, request))
        while engine.stats().decode_steps < 2:
            await asyncio.sleep(0)
        await engine.pause()
        steps = engine.stats().decode_steps
        await asyncio.sleep(0.02)
        assert engine.stats().decode_steps == steps
        await engine.resume()
        return (await task)["0-0"]

    assert same_tokens(undisturbed, in_engine(new_engine(tiny.model()), scenario))


class TestWeightsInFlight:
    """New weights between two token steps."""

    @pytest.fixture(
        params=[
            "torch-direct",
            "torch-generic",
            pytest.param("vllm", marks=VLLM),
            pytest.param("vllm-without-versions", marks=VLLM),
        ]
    )
    def new_engine(self, request: pytest.FixtureRequest, engine_of: Any) -> NewEngine:
        """As elsewhere; and vLLM where the engine has to keep the spans itself."""
        kind = request.param
        if kind == "vllm-without-versions":
            request.getfixturevalue("without_versions")
            kind = "vllm"
        made: NewEngine = engine_of(kind)
        return made

    @staticmethod
    def changed_midway(
        engine: Any, tiny: Any, *requests: GroupRequest, after: int = 6, wait: float = 0.0
    ) -> dict[str, FinishedGroup]:
        new = NamedWeights(tiny.weights(tiny.model(seed=1)))

        async def scenario(engine: Any) -> dict[str, FinishedGroup]:
            await engine.load(NamedWeights(tiny.weights(tiny.model(seed=0))), V1)
            task = asyncio.create_task(collect(engine, *requests))
            while engine.stats().decode_steps < after:
                await asyncio.sleep(0)
            if wait:
                await engine.hold(wait)
            await engine.load(new, V2)
            assert engine.version == V2
            return await task

        groups: dict[str, FinishedGroup] = in_engine(engine, scenario)
        return groups

    def test_spans_say_which_version_sampled_which_tokens(
        self, new_engine: NewEngine, tiny: Any
    ) -> None:
        request = asks("0-0", new=60, count=16)
        group = self.changed_midway(new_engine(tiny.model(seed=5)), tiny, request)["0-0"]
        old, new = tiny.model(seed=0), tiny.model(seed=1)
        two = [s for s in group.samples if len(s.spans) == 2]
        assert two, "no sample ran through the change"
        for sample in group.samples:
            assert sample.spans[0].start == 0
            assert sample.spans[-1].end == len(sample.tokens)
            assert sample.oldest_step == 1
            for span, model in zip(sample.spans, (old, new), strict=False):
                expected = forward_logprobs(model, request, sample)[span.start : span.end]
                got = sample.logprobs[span.start : span.end]
                np.testing.assert_allclose(got, expected, atol=1e-4)
        for sample in two:
            first, second = sample.spans
            assert (first.step, second.step) == (1, 2)
            assert first.end == second.start

    def test_with_recomputed_keys_the_rest_is_that_of_a_fresh_run_from_there(
        self, new_engine: NewEngine, tiny: Any, repeatable: float
    ) -> None:
        requests = [
            asks("0-0", new=60, count=8, temperature=repeatable),
            asks(
                "0-1",
                new=60,
                length=14,
                key=1,
                prefix_tokens=prompt(4, key=2),
                temperature=repeatable,
            ),
        ]
        groups = self.changed_midway(new_engine(tiny.model(seed=5)), tiny, *requests)
        checked = 0
        for request in requests:
            for index, sample in enumerate(groups[request.group_id].samples):
                if len(sample.spans) < 2:
                    continue
                start = sample.spans[1].start
                prefixes = tuple(
                    sample.tokens[:start] if i == index else prompt(0) for i in range(request.count)
                )
                fresh = asks(
                    request.group_id,
                    length=len(request.prompt_tokens),
                    key=int(request.group_id[-1]),
                    count=request.count,
                    new=60,
                    prefix_tokens=prefixes,
                    temperature=repeatable,
                )
                engine = new_engine(tiny.model(seed=1))
                again = generate(engine, fresh)[request.group_id].samples[index]
                length = min(len(again.tokens), len(sample.tokens))
                assert again.tokens[:length].tolist() == sample.tokens[:length].tolist()
                np.testing.assert_allclose(
                    again.logprobs[start:length], sample.logprobs[start:length], atol=1e-4
                )
                checked += 1
                if checked == 4:
                    return
        assert checked

    def test_without_recomputing_the_old_keys_stay(self, new_engine: NewEngine, tiny: Any) -> None:
        request = asks("0-0", new=60, count=8)
        engine = new_engine(tiny.model(seed=5), recompute_kv=False)
        group = self.changed_midway(engine, tiny, request)["0-0"]
        new = tiny.model(seed=1)
        differences = [
            np.abs(sample.logprobs - forward_logprobs(new, request, sample))[s.start : s.end].max()
            for sample in group.samples
            for s in sample.spans[1:]
        ]
        assert max(differences) > 1e-2

    def test_new_weights_may_wait_for_the_running_samples_to_end(
        self, new_engine: NewEngine, tiny: Any
    ) -> None:
        engine = new_engine(tiny.model(seed=5))
        group = self.changed_midway(engine, tiny, asks("0-0", new=60, count=8), wait=60.0)["0-0"]
        assert {span.step for sample in group.samples for span in sample.spans} == {1}
        assert engine.version.step == 2

    def test_they_wait_no_longer_than_they_may(self, new_engine: NewEngine, tiny: Any) -> None:
        engine = new_engine(tiny.model(seed=5))
        group = self.changed_midway(engine, tiny, asks("0-0", new=60, count=8), wait=1e-3)["0-0"]
        assert {span.step for sample in group.samples for span in sample.spans} == {1, 2}

    def test_only_urgent_groups_begin_while_weights_wait(
        self, new_engine: NewEngine, tiny: Any
    ) -> None:
        wrong = tiny.weights(tiny.model(seed=1))
        wrong.popitem()

        async def scenario(engine: Any) -> list[int | None]:
            await engine.load(NamedWeights(tiny.weights(tiny.model(seed=0))), V1)
            await engine.hold(60.0)
            held = asyncio.create_task(collect(engine, asks("held")))
            urgent = (await collect(engine, replace(asks("urgent"), urgent=True)))["urgent"]
            await engine.load(NamedWeights(tiny.weights(tiny.model(seed=1))), V2)
            late = (await held)["held"]
            await engine.hold(60.0)
            left = asyncio.create_task(collect(engine, asks("left")))
            await asyncio.sleep(0)
            with pytest.raises(WeightsError):
                await engine.load(NamedWeights(wrong), V3)
            return [group.samples[0].oldest_step for group in (urgent, late, (await left)["left"])]

        assert in_engine(new_engine(tiny.model(seed=5)), scenario) == [1, 2, 2]

    def test_weights_that_do_not_fit_change_nothing(
        self, new_engine: NewEngine, tiny: Any, repeatable: float
    ) -> None:
        request = asks("0-0", temperature=repeatable)
        wrong_shape = tiny.weights(tiny.model(seed=1))
        name = next(n for n, p in wrong_shape.items() if p.ndim == 2)
        wrong_shape[name] = wrong_shape[name][:-1]
        lacking = tiny.weights(tiny.model(seed=1))
        del lacking[name]
        half = {n: p.bfloat16() for n, p in tiny.weights(tiny.model(seed=1)).items()}

        async def scenario(engine: Any) -> FinishedGroup:
            for bad in (wrong_shape, lacking, half, {**lacking, "no.such": torch.zeros(1)}):
                with pytest.raises(WeightsError, match=r"1\.2"):
                    await engine.load(NamedWeights(bad), V2)
            assert engine.version == V1
            return (await collect(engine, request))["0-0"]

        got = in_engine(new_engine(tiny.model(), version=V1), scenario)
        assert same_tokens(got, generate(new_engine(tiny.model()), request)["0-0"])

    def test_loading_gives_the_new_models_samples(
        self, new_engine: NewEngine, tiny: Any, repeatable: float
    ) -> None:
        request = asks("0-0", temperature=repeatable)

        async def scenario(engine: Any) -> FinishedGroup:
            await engine.load(NamedWeights(tiny.weights(tiny.model(seed=1))), V2)
            return (await collect(engine, request))["0-0"]

        new = tiny.model(seed=1)
        loaded = in_engine(new_engine(tiny.model(seed=0)), scenario)
        for sample in loaded.samples:
            np.testing.assert_allclose(
                sample.logprobs, forward_logprobs(new, request, sample), atol=1e-4
            )
        assert same_tokens(loaded, generate(new_engine(tiny.model(seed=1)), request)["0-0"])

    def test_a_restamp_renames_the_weights(self, new_engine: NewEngine, tiny: Any) -> None:
        async def scenario(engine: Any) -> FinishedGroup:
            await engine.restamp(V2)
            return (await collect(engine, asks("0-0")))["0-0"]

        group = in_engine(new_engine(tiny.model(), version=V1), scenario)
        assert {(s.term, s.step) for sample in group.samples for s in sample.spans} == {(1, 2)}

    def test_specs_name_every_parameter_once(self, new_engine: NewEngine, tiny: Any) -> None:
        expected = {
            name: (tuple(p.shape), "float32") for name, p in tiny.model().named_parameters()
        }
        specs = new_engine(tiny.model()).parameter_specs()
        assert {s.name: (s.shape, s.dtype) for s in specs} == expected


class TestScores:
    """What an engine says of given tokens, which is how new weights are checked."""

    @pytest.mark.parametrize("temperature", [1.0, 1.3])
    def test_are_those_of_a_full_forward_at_the_temperature(
        self, new_engine: NewEngine, tiny: Any, temperature: float
    ) -> None:
        rows = [prompt(20), prompt(2, 1), prompt(33, 2)]
        found = in_engine(new_engine(tiny.model()), lambda e: e.score(rows, temperature))
        reference = tiny.model()
        for row, scored in zip(rows, found, strict=True):
            tokens = torch.from_numpy(row).long()
            with torch.no_grad():
                logits = reference(input_ids=tokens[None]).logits[0, :-1].float()
            every = (logits / temperature).log_softmax(-1)
            expected = every.gather(1, tokens[1:, None])[:, 0].numpy()
            assert scored.dtype == np.float32
            np.testing.assert_allclose(scored, expected, atol=3e-5)

    @pytest.mark.parametrize("temperature", [1.0, 1.3])
    def test_are_the_logprobs_that_were_recorded(
        self, new_engine: NewEngine, tiny: Any, temperature: float
    ) -> None:
        request = asks("0-0", temperature=temperature)

        async def scenario(engine: Any) -> tuple[FinishedGroup, list[np.ndarray]]:
            group = (await collect(engine, request))["0-0"]
            rows = [np.concatenate([request.prompt_tokens, s.tokens]) for s in group.samples]
            return group, await engine.score(rows, temperature)

        group, found = in_engine(new_engine(tiny.model()), scenario)
        for sample, scored in zip(group.samples, found, strict=True):
            recorded = scored[len(request.prompt_tokens) - 1 :]
            np.testing.assert_allclose(recorded, sample.logprobs, atol=3e-5)

    def test_come_while_groups_are_generated(self, new_engine: NewEngine, tiny: Any) -> None:
        row = prompt(20)

        async def scenario(engine: Any) -> tuple[np.ndarray, np.ndarray, FinishedGroup]:
            alone = (await engine.score([row]))[0]
            running = asyncio.create_task(collect(engine, asks("0-0", count=8, new=100)))
            while engine.stats().decode_steps < 3:
                await asyncio.sleep(0.001)
            beside = (await engine.score([row]))[0]
            return alone, beside, (await running)["0-0"]

        alone, beside, group = in_engine(new_engine(tiny.model()), scenario)
        np.testing.assert_allclose(alone, beside, atol=3e-5)
        assert len(group.samples) == 8

    def test_are_those_of_new_weights_once_they_are_loaded(
        self, new_engine: NewEngine, tiny: Any
    ) -> None:
        row = prompt(20)

        async def scenario(engine: Any) -> list[np.ndarray]:
            await engine.load(NamedWeights(tiny.weights(tiny.model(seed=1))), V2)
            found: list[np.ndarray] = await engine.score([row])
            return found

        loaded = in_engine(new_engine(tiny.model(), version=V1), scenario)[0]
        fresh = in_engine(new_engine(tiny.model(seed=1)), lambda e: e.score([row]))[0]
        np.testing.assert_allclose(loaded, fresh, atol=3e-5)


def test_an_urgent_group_does_not_wait_its_turn(new_engine: NewEngine, tiny: Any) -> None:
    async def scenario(engine: Any) -> list[str]:
        order: list[str] = []

        async def one(request: GroupRequest) -> None:
            async for group in engine.generate([request]):
                order.append(group.group_id)

        tasks = [asyncio.create_task(one(asks("0-0", count=4, new=100, temperature=0.0)))]
        while engine.stats().decode_steps < 2:
            await asyncio.sleep(0.001)
        tasks.append(asyncio.create_task(one(asks("0-1", count=4, new=100))))
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(one(asks("check", count=2, new=2, urgent=True))))
        await asyncio.wait(tasks)
        return order

    order = in_engine(new_engine(tiny.model(), max_rows=4), scenario)
    assert order.index("check") < order.index("0-1")


class TestRanks:
    """What clients are told of prompts: log-probs of their tokens, and the most likely ones."""

    def test_they_are_those_of_a_forward_pass(self, new_engine: NewEngine, tiny: Any) -> None:
        model = tiny.model()
        rows = [prompt(length, key) for key, length in enumerate((2, 31, 9, 70))]
        engine = new_engine(tiny.model())
        found = in_engine(engine, lambda e: e.rank(rows, 3))
        for row, ranked in zip(rows, found, strict=True):
            with torch.no_grad():
                logits = model(input_ids=torch.from_numpy(row).long()[None]).logits[0, :-1]
            known = logits.float().log_softmax(-1)
            own = known.gather(1, torch.from_numpy(row[1:]).long()[:, None])[:, 0]
            np.testing.assert_allclose(ranked.own, own.numpy(), atol=2e-4)
            best = known.topk(3, -1)
            assert ranked.tokens.shape == ranked.logprobs.shape == (len(row) - 1, 3)
            np.testing.assert_allclose(ranked.logprobs, best.values.numpy(), atol=2e-4)
            at = known.gather(1, torch.from_numpy(ranked.tokens).long())
            np.testing.assert_allclose(ranked.logprobs, at.numpy(), atol=2e-4)
            # A client compares the two to find out whether a token is the greedy one.
            same = ranked.tokens == row[1:, None]
            assert (ranked.logprobs[same] == np.repeat(ranked.own, same.sum(1))).all()

    def test_samples_go_on_meanwhile(self, new_engine: NewEngine, tiny: Any) -> None:
        async def both(engine: Any) -> Any:
            return await asyncio.gather(
                collect(engine, asks(new=40)), engine.rank([prompt(20)] * 5, 1)
            )

        groups, ranked = in_engine(new_engine(tiny.model()), both)
        assert len(groups["0-0"].samples) == 4
        assert len(ranked) == 5


def test_a_noise_of_its_own_makes_equal_requests_equal(new_engine: NewEngine, tiny: Any) -> None:
    def ask(name: str, **how: Any) -> GroupRequest:
        return asks(name, new=24, count=1, **how)

    engine = new_engine(tiny.model())
    asked = [
        ask("a", seed=1, noise="0"),
        ask("b", seed=1, noise="0"),
        ask("c", seed=1, noise="1"),
        ask("d", seed=2, noise="0"),
    ]
    found = generate(engine, *asked)
    assert same_tokens(found["a"], found["b"])
    assert not same_tokens(found["a"], found["c"])
    assert not same_tokens(found["a"], found["d"])


def test_it_is_an_engine(new_engine: NewEngine, tiny: Any) -> None:
    engine = new_engine(tiny.model())
    assert isinstance(engine, Engine)
    assert isinstance(engine, Scorer)
    assert isinstance(engine, Ranker)


class TestStopStrings:
    """A sample ends with the first token after which its text holds a stop string."""

    def test_ends_a_sample(self, new_engine: NewEngine, tiny: Any, repeatable: float) -> None:
        request = asks("0-0", new=40, count=4, temperature=repeatable)
        whole = generate(new_engine(tiny.model()), request)["0-0"]
        stop = whole.samples[0].text[4:7]
        assert stop
        engine = new_engine(tiny.model(), version=V1)
        ended = generate(engine, replace(request, stop=(stop, "never")))["0-0"]
        tokenizer = tiny.tokenizer()
        found = 0
        for before, after in zip(whole.samples, ended.samples, strict=True):
            ends = [
                end
                for end in range(1, len(before.tokens) + 1)
                if stop in tokenizer.decode(before.tokens[:end].tolist())
            ]
            if not ends:
                np.testing.assert_array_equal(after.tokens, before.tokens)
                continue
            found += 1
            np.testing.assert_array_equal(after.tokens, before.tokens[: ends[0]])
            np.testing.assert_allclose(after.logprobs, before.logprobs[: ends[0]], atol=1e-4)
            assert after.finish_reason is FinishReason.STOP
            assert stop in after.text
            assert [(s.step, s.start, s.end) for s in after.spans] == [(1, 0, ends[0])]
        assert found

    def test_its_spans_say_which_weights_sampled_what(
        self, new_engine: NewEngine, tiny: Any
    ) -> None:
        request = asks("0-0", new=80, count=1, temperature=0.0)
        whole = generate(new_engine(tiny.model()), request)["0-0"].samples[0]
        text = tiny.tokenizer().decode(whole.tokens.tolist(), skip_special_tokens=False)
        stop = text[: len(text) * 3 // 4]

        async def scenario(engine: Any) -> Sample:
            task = asyncio.create_task(collect(engine, replace(request, stop=(stop,))))
            while engine.stats().decode_steps < 6:
                await asyncio.sleep(0)
            await engine.pause()
            # Equal weights, so that the sample goes on as if nothing had happened.
            await engine.load(NamedWeights(tiny.weights(tiny.model())), V2)
            await engine.resume()
            return (await task)["0-0"].samples[0]

        sample: Sample = in_engine(new_engine(tiny.model(), version=V1), scenario)
        assert sample.finish_reason is FinishReason.STOP
        assert len(sample.tokens) < len(whole.tokens)
        first, second = sample.spans
        assert (first.step, first.start, second.step) == (1, 0, 2)
        assert (second.start, second.end) == (first.end, len(sample.tokens))

    def test_leaves_groups_without_one_alone(
        self, new_engine: NewEngine, tiny: Any, repeatable: float
    ) -> None:
        request = asks("0-0", new=30, temperature=repeatable)
        alone = generate(new_engine(tiny.model()), request)["0-0"]
        stop = alone.samples[0].text[2:4]
        other = replace(request, group_id="0-1", stop=(stop,))
        both = generate(new_engine(tiny.model()), request, other)
        assert same_tokens(alone, both["0-0"])
