"""Adapters in the engines: what PEFT's model says, and what happens to samples when they change."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import adapter_models
import numpy as np
import pytest
import torch
from adapter_models import drawn, greedy, logprobs, with_adapters
from engine_calls import asks, collect, in_engine

from tandem.common.config import ModelConfig, RolloutConfig
from tandem.common.config.learner import LoraConfig
from tandem.common.errors import ConfigError, WeightsError
from tandem.common.records import FinishReason, Sample, SamplingParams, Version
from tandem.common.weights.manifest import ScoredRows
from tandem.rollout import engines
from tandem.rollout.contract import Response
from tandem.rollout.decoding.torch_engine import TorchEngine
from tandem.rollout.engine import GroupRequest, NamedWeights
from tandem.rollout.new_weights.commit_check import CommitCheck
from tandem.rollout.new_weights.rounding import GIVEN, RAN_ON, SAMPLED
from tandem.rollout.vllm import vllm_adapters

LORA = LoraConfig(rank=4, alpha=6.0)
EOS = 1
PROMPT = list(range(3, 12))
"""Of :func:`engine_calls.asks`."""
V1, V2, V3 = (Version(term=1, step=step) for step in (1, 2, 3))
SAME = 2e-4
"""Log-probs (nats) that are of the same weights, in single precision; others are off by 1 and more."""


@pytest.fixture(scope="module")
def tiny(tiny: Any) -> Any:
    """:mod:`tiny_models`, whose model is of a family whose output head vLLM knows adapters for: Qwen2's isn't."""

    def model(kind: str = "llama", **settings: Any) -> Any:
        # Of this seed its greedy samples are long.
        return tiny.model(kind, seed=2, **settings)

    return SimpleNamespace(**{**vars(tiny), "model": model})


@pytest.fixture(scope="module")
def vllm(
    tmp_path_factory: pytest.TempPathFactory, vllm_module: Any, tiny: Any
) -> Iterator[Callable[..., Any]]:
    """Makes engines around one vLLM that takes up to three adapters of rank 4 in a batch."""
    shared = vllm_module.Adapted(tmp_path_factory.mktemp("tiny"), tiny, LORA, versions=3)
    yield shared.make
    shared.close()


@pytest.fixture(
    params=[
        "direct",
        "generic",
        pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(300)]),
    ]
)
def new_engine(request: pytest.FixtureRequest, tiny: Any) -> Callable[..., Any]:
    """Makes an engine of each kind for adapters of the tiny model, not yet started."""
    if request.param == "vllm":
        made: Callable[..., Any] = request.getfixturevalue("vllm")
        return made
    return lambda **settings: TorchEngine(
        tiny.model(), tiny.tokenizer(), decoder=request.param, lora=LORA, **settings
    )


def adapters(tiny: Any, seed: int) -> dict[str, torch.Tensor]:
    """Random ones of the tiny model."""
    return drawn(tiny.model(), LORA, seed)


def peft_model(tiny: Any, seed: int) -> Any:
    """What is right with :func:`adapters` of the same seed."""
    return with_adapters(tiny.model(), LORA, adapters(tiny, seed))


def zero_b(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same A, and B as training begins with."""
    return {name: t * (0.0 if ".lora_B." in name else 1.0) for name, t in tensors.items()}


async def greedy_tokens(engine: Any, name: str = "greedy") -> list[int]:
    """The likeliest continuation of the prompt."""
    group = (await collect(engine, asks(name, count=1, temperature=0.0)))[name]
    tokens: list[int] = group.samples[0].tokens.tolist()
    return tokens


async def scores(engine: Any, row: list[int]) -> np.ndarray:
    """Of one row."""
    (found,) = await engine.score([np.array(row, dtype=np.int32)])
    return np.array(found)


async def running(engine: Any, tokens: int = 8) -> None:
    """Returns after a few token steps, which all samples of one group have made."""
    before = engine.stats().sampled_tokens
    while engine.stats().sampled_tokens < before + tokens:
        await asyncio.sleep(0.002)


def spans_of(sample: Sample) -> list[tuple[int, int, int]]:
    """Step, start and end of each."""
    return [(span.step, span.start, span.end) for span in sample.spans]


def off(sample: Sample, models: dict[int, Any], prompt: list[int] | None = None) -> float:
    """The greatest difference of a sample's log-probs from those of its spans' models."""
    prompt = PROMPT if prompt is None else prompt
    worst = 0.0
    for step, start, end in spans_of(sample):
        row = [*prompt, *sample.tokens[:end].tolist()]
        own = logprobs(models[step], row)[len(prompt) - 1 + start :].numpy()
        worst = max(worst, float(np.abs(own - sample.logprobs[start:end]).max()))
    return worst


def long_group(name: str, *, count: int = 4, new: int = 200) -> GroupRequest:
    """Samples that are still running when the adapters change: the tiny model's seldom end at once."""
    return asks(name, new=new, count=count)


# What an engine computes.


def test_its_tensors_are_those_of_the_adapters(new_engine: Any, tiny: Any) -> None:
    expected = {n: (tuple(t.shape), "float32") for n, t in adapters(tiny, 1).items()}
    specs = new_engine().parameter_specs()
    assert [spec.name for spec in specs] == list(expected)
    assert {spec.name: (spec.shape, spec.dtype) for spec in specs} == expected


def test_before_the_first_load_and_with_b_at_zero_it_is_the_base_model(
    new_engine: Any, tiny: Any
) -> None:
    row = [*PROMPT, 20, 4, 9]
    base = tiny.model()

    async def scenario(engine: Any) -> None:
        plain = await scores(engine, row)
        assert np.abs(plain - logprobs(base, row).numpy()).max() < SAME
        said = await greedy_tokens(engine)
        assert said == greedy(base, PROMPT, 24, EOS)[0]
        await engine.load(NamedWeights(zero_b(adapters(tiny, 1))), V1)
        assert np.abs(await scores(engine, row) - plain).max() < 1e-6
        assert await greedy_tokens(engine) == said

    in_engine(new_engine(), scenario)


def test_it_says_what_pefts_model_says_with_the_adapters(new_engine: Any, tiny: Any) -> None:
    row = [*PROMPT, 20, 4, 9]

    async def scenario(engine: Any) -> list[list[int]]:
        said = []
        for seed in (1, 2, 3):
            model = peft_model(tiny, seed)
            await engine.load(NamedWeights(adapters(tiny, seed)), Version(term=1, step=seed))
            assert np.abs(await scores(engine, row) - logprobs(model, row).numpy()).max() < SAME
            expected, distance = greedy(model, PROMPT, 24, EOS)
            # Else rounding may decide which token is the likeliest.
            assert distance > 1e-3
            said.append(await greedy_tokens(engine))
            assert said[-1] == expected
            (group,) = (await collect(engine, asks(count=8))).values()
            for sample in group.samples:
                assert spans_of(sample) == [(seed, 0, len(sample.tokens))]
                assert off(sample, {seed: model}) < SAME
        return said

    one, two, three = in_engine(new_engine(), scenario)
    assert one != two != three != one


@pytest.mark.parametrize("decoder", ["direct", "generic"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize(
    "lora",
    [
        LoraConfig(rank=3, alpha=4.0, rslora=True),
        LoraConfig(rank=2, targets=("q_proj", "v_proj", "down_proj")),
        LoraConfig(rank=1, targets=("k_proj", "up_proj", "layers.1.self_attn.o_proj")),
    ],
    ids=["rslora", "q-v-down", "one-layer"],
)
def test_torch_takes_any_choice_of_layers(
    kind: str, decoder: str, lora: LoraConfig, tiny: Any
) -> None:
    tensors = drawn(tiny.model(kind), lora, 5)
    if "layers.1" in str(lora.targets):
        assert any("layers.1.self_attn.o" in n for n in tensors)
        assert not any("layers.0.self_attn.o" in n for n in tensors)
    model = with_adapters(tiny.model(kind), lora, tensors)
    engine = TorchEngine(tiny.model(kind), tiny.tokenizer(), decoder=decoder, lora=lora)

    async def scenario(engine: Any) -> None:
        await engine.load(NamedWeights(tensors), V1)
        (group,) = (await collect(engine, asks(count=4))).values()
        assert max(off(sample, {1: model}) for sample in group.samples) < SAME

    in_engine(engine, scenario)


def test_bfloat16_adapters_stay_near_pefts_model(tiny: Any) -> None:
    row = [*PROMPT, 20, 4, 9]
    half, exact = torch.bfloat16, peft_model(tiny, 1)
    engine = TorchEngine(tiny.model(dtype=half), tiny.tokenizer(), lora=LORA)
    tensors = drawn(tiny.model(dtype=half), LORA, 1)
    assert {spec.dtype for spec in engine.parameter_specs()} == {"bfloat16"}

    async def scenario(engine: Any) -> None:
        plain = await scores(engine, row)
        await engine.load(NamedWeights(tensors), V1)
        own = await scores(engine, row)
        right = logprobs(exact, row).numpy()
        assert np.abs(own - right).mean() < 0.1 < 1 < np.abs(plain - right).mean()

    in_engine(engine, scenario)


# Samples that run when the adapters change.


def test_running_samples_go_on_with_the_new_adapter(new_engine: Any, tiny: Any) -> None:
    models = {seed: peft_model(tiny, seed) for seed in (1, 2, 3)}

    async def scenario(engine: Any) -> list[Sample]:
        await engine.load(NamedWeights(adapters(tiny, 1)), V1)
        groups = [long_group(f"0-{number}", count=6) for number in range(3)]
        task = asyncio.create_task(collect(engine, *groups))
        for seed in (2, 3):
            await running(engine, 60)
            await engine.load(NamedWeights(adapters(tiny, seed)), Version(term=1, step=seed))
            assert engine.version == Version(term=1, step=seed)
        found = await task
        assert engine.stats().loads == 3
        return [sample for group in found.values() for sample in group.samples]

    samples = in_engine(new_engine(), scenario)
    assert len(samples) == 18
    crossing = 0
    for sample in samples:
        spans = spans_of(sample)
        steps = [step for step, _, _ in spans]
        assert steps == sorted(set(steps))
        edges = [0, *(end for *_, end in spans)]
        assert [start for _, start, _ in spans] == edges[:-1]
        assert edges[-1] == len(sample.tokens)
        ended = sample.tokens[-1] == EOS
        assert sample.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert EOS not in sample.tokens[:-1]
        assert len(sample.tokens) == 200 or ended
        crossing += steps == [1, 2, 3]
        # Keys and values of all earlier tokens are those of the span's own adapter.
        assert off(sample, models) < SAME
    assert crossing >= 3


def test_a_restamp_renames_the_adapter_in_use(new_engine: Any, tiny: Any) -> None:
    model = peft_model(tiny, 1)

    async def scenario(engine: Any) -> None:
        await engine.load(NamedWeights(adapters(tiny, 1)), V1)
        await engine.restamp(V2)
        assert engine.version == V2
        (group,) = (await collect(engine, asks(count=2))).values()
        for sample in group.samples:
            assert spans_of(sample) == [(2, 0, len(sample.tokens))]
            assert off(sample, {2: model}) < SAME

    in_engine(new_engine(), scenario)


def test_a_paused_engine_takes_an_adapter_and_goes_on_with_it(new_engine: Any, tiny: Any) -> None:
    models = {seed: peft_model(tiny, seed) for seed in (1, 2)}

    async def scenario(engine: Any) -> tuple[Sample, ...]:
        await engine.load(NamedWeights(adapters(tiny, 1)), V1)
        task = asyncio.create_task(collect(engine, long_group("0-0", count=8)))
        await running(engine, 30)
        await engine.pause()
        await engine.load(NamedWeights(adapters(tiny, 2)), V2)
        sampled = engine.stats().sampled_tokens
        await asyncio.sleep(0.2)
        assert engine.stats().sampled_tokens == sampled
        await engine.resume()
        (group,) = (await task).values()
        samples: tuple[Sample, ...] = group.samples
        return samples

    samples = in_engine(new_engine(), scenario)
    assert max(off(sample, models) for sample in samples) < SAME
    assert any([step for step, _, _ in spans_of(sample)] == [1, 2] for sample in samples)


def test_aborted_groups_stay_aborted_while_the_adapter_changes(new_engine: Any, tiny: Any) -> None:
    async def scenario(engine: Any) -> tuple[Sample, ...]:
        await engine.load(NamedWeights(adapters(tiny, 1)), V1)
        task = asyncio.create_task(collect(engine, long_group("0-0", count=8)))
        await running(engine, 30)
        await engine.pause()
        await engine.load(NamedWeights(adapters(tiny, 2)), V2)
        await engine.abort(["0-0"])
        (group,) = (await asyncio.wait_for(task, 20)).values()
        await engine.resume()
        samples: tuple[Sample, ...] = group.samples
        return samples

    samples = in_engine(new_engine(), scenario)
    assert {sample.finish_reason for sample in samples} >= {FinishReason.ABORT}
    assert all(step == 1 for sample in samples for step, _, _ in spans_of(sample))


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_an_abort_meets_samples_that_are_about_to_go_on_with_the_new_adapter(
    vllm: Any, tiny: Any
) -> None:
    async def scenario(engine: Any) -> list[Response]:
        await engine.load(NamedWeights(adapters(tiny, 1)), V1)
        # The group is gone from when its samples were first asked whether it is.
        asked = itertools.count()
        request = long_group("0-0", count=3)
        task = asyncio.create_task(
            engine._process.run(
                engine._weights.sample(
                    ["0-0"],
                    lambda: next(asked) > 0,
                    PROMPT,
                    request.sampling,
                    count=request.count,
                    room=200,
                    end_tokens=[EOS],
                    urgent=False,
                    stops=None,
                    follow=None,
                )
            )
        )
        await running(engine, 30)
        await engine.load(NamedWeights(adapters(tiny, 2)), V2)
        found: list[Response] = await asyncio.wait_for(task, 60)
        return found

    found = in_engine(vllm(), scenario)
    assert len(found) == 3
    assert any(one.reason is FinishReason.ABORT for one in found)
    assert {version for one in found for version, *_ in one.spans} <= {V1}


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_samples_that_run_while_an_adapter_is_written_are_not_counted_as_paused(
    vllm: Any, tiny: Any
) -> None:
    async def scenario(engine: Any) -> float:
        write = engine._weights._folders.write

        def slow(*args: Any) -> Path:
            time.sleep(5)
            return Path(write(*args))

        engine._weights._folders.write = slow
        await engine.load(NamedWeights(adapters(tiny, 1)), V1)
        return float(engine.stats().load_seconds)

    assert in_engine(vllm(), scenario) < 5


def test_a_stop_string_that_spans_the_change_ends_the_sample(new_engine: Any, tiny: Any) -> None:
    """Ten tokens of a greedy sample are a stop string, and the adapter changes for an equal one while they
    are sampled."""
    tokenizer = tiny.tokenizer()
    expected, _ = greedy(peft_model(tiny, 3), PROMPT, 200, EOS)
    assert len(expected) > 60
    text = tokenizer.decode(expected, skip_special_tokens=False)

    async def scenario(engine: Any) -> Sample:
        await engine.load(NamedWeights(adapters(tiny, 3)), V1)
        plain = asks("0-0", new=200, count=1, temperature=0.0)
        request = GroupRequest(
            group_id="0-0",
            prompt_tokens=plain.prompt_tokens,
            count=1,
            sampling=plain.sampling,
            seed=0,
            stop=(text[: len(text) * 3 // 4],),
        )
        task = asyncio.create_task(collect(engine, request))
        await running(engine, 5)
        await engine.load(NamedWeights(adapters(tiny, 3)), V2)
        (group,) = (await task).values()
        sample: Sample = group.samples[0]
        return sample

    sample = in_engine(new_engine(), scenario)
    assert [step for step, _, _ in spans_of(sample)] == [1, 2]
    assert sample.finish_reason is FinishReason.STOP
    assert sample.tokens.tolist() == expected[: len(sample.tokens)]
    assert len(sample.tokens) < len(expected)


def test_weights_that_dont_fit_are_refused(new_engine: Any, tiny: Any) -> None:
    async def scenario(engine: Any) -> None:
        await engine.load(NamedWeights(adapters(tiny, 1)), V1)
        other = drawn(tiny.model(), LoraConfig(rank=2), 1)
        with pytest.raises(WeightsError, match=r"q_proj\.lora_A\.weight is float32 \(2, 64\), not"):
            await engine.load(NamedWeights(other), V2)
        with pytest.raises(WeightsError, match="unknown"):
            await engine.load(NamedWeights(tiny.weights(tiny.model())), V2)
        assert engine.version == V1
        assert await greedy_tokens(engine) == greedy(peft_model(tiny, 1), PROMPT, 24, EOS)[0]

    in_engine(new_engine(), scenario)


# The check of new weights.


def scored(model: Any) -> ScoredRows:
    """What the learner sends of its rows."""
    generator = np.random.default_rng(4)
    rows = [generator.integers(3, 30, 24).tolist() for _ in range(4)]
    return ScoredRows(
        rows=tuple(map(tuple, rows)),
        logprobs=tuple(tuple(logprobs(model, row).tolist()) for row in rows),
    )


def test_the_check_of_new_weights_is_of_the_new_adapter(new_engine: Any, tiny: Any) -> None:
    right = {seed: scored(peft_model(tiny, seed)) for seed in (1, 2, 3)}

    async def scenario(engine: Any) -> None:
        check = CommitCheck(
            engine,
            dtypes=("float32", "float32"),
            bound=None,
            temperature=1.0,
            runs_on=True,
            seconds=20.0,
            longest=200,
        )

        async def load(seed: int, figures: ScoredRows) -> dict[str, bool]:
            version = Version(term=1, step=seed)
            await check.begin(version)
            await engine.load(NamedWeights(adapters(tiny, seed)), version)
            found = await check.examine(version, figures)
            check.end(passed=all(one.passes for one in found))
            return {one.kind: one.passes for one in found}

        assert await load(1, right[1]) == {GIVEN: True, SAMPLED: True}
        task = asyncio.create_task(collect(engine, long_group("0-0", count=16, new=240)))
        await running(engine, 40)
        assert await load(2, right[2]) == {GIVEN: True, SAMPLED: True, RAN_ON: True}
        assert not (await load(3, right[2]))[GIVEN]
        await task

    in_engine(new_engine(), scenario)


# What only vLLM has: names, folders, adapters side by side.


def folders(engine: Any) -> list[str]:
    """Names of the adapters on the disk."""
    root = engine._adapters._folders._root
    return sorted(path.name for path in root.iterdir() if path.name != vllm_adapters.LOCK)


async def known(engine: Any) -> set[int]:
    """Numbers of the adapters that vLLM holds."""

    async def ask() -> set[int]:
        return set(await engine._process.llm.list_loras())

    return set(await engine._process.run(ask()))


async def settled(engine: Any) -> None:
    """Returns when all adapters that nobody uses are gone."""
    while engine._adapters._removals:
        await asyncio.sleep(0.002)


@pytest.mark.vllm
@pytest.mark.timeout(300)
class TestVllm:
    def test_an_adapter_that_cant_be_loaded_leaves_the_old_one(
        self, vllm: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write = vllm_adapters.AdapterFolders.write

        def damaging(self: Any, *given: Any) -> Path:
            folder = write(self, *given)
            file = folder / vllm_adapters.TENSORS
            file.write_bytes(file.read_bytes()[:-100])
            return folder

        async def scenario(engine: Any) -> None:
            await engine.load(NamedWeights(adapters(tiny, 1)), V1)
            expected = greedy(peft_model(tiny, 1), PROMPT, 24, EOS)[0]
            before, names = await known(engine), folders(engine)
            task = asyncio.create_task(collect(engine, long_group("0-0", count=4)))
            await running(engine)
            with monkeypatch.context() as patch:
                patch.setattr(vllm_adapters.AdapterFolders, "write", damaging)
                with pytest.raises(WeightsError, match=r"adapter 1\.2-.* can't be loaded by vLLM"):
                    await engine.load(NamedWeights(adapters(tiny, 2)), V2)
            assert engine.version == V1
            assert (await known(engine), folders(engine)) == (before, names)
            assert await greedy_tokens(engine) == expected
            (group,) = (await task).values()
            assert all(step == 1 for one in group.samples for step, _, _ in spans_of(one))
            # The next one is loaded as if nothing had happened.
            await engine.load(NamedWeights(adapters(tiny, 2)), V2)
            assert await greedy_tokens(engine) == greedy(peft_model(tiny, 2), PROMPT, 24, EOS)[0]

        in_engine(vllm(), scenario)

    def test_a_number_that_comes_twice_is_refused(
        self, vllm: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def scenario(engine: Any) -> None:
            await engine.load(NamedWeights(adapters(tiny, 1)), V1)
            with monkeypatch.context() as patch:
                patch.setattr(vllm_adapters, "_numbers", iter(await known(engine)))
                with pytest.raises(WeightsError, match="another adapter has the number"):
                    await engine.load(NamedWeights(adapters(tiny, 2)), V2)
            assert engine.version == V1
            assert await greedy_tokens(engine) == greedy(peft_model(tiny, 1), PROMPT, 24, EOS)[0]

        in_engine(vllm(), scenario)

    def test_an_adapter_that_cant_be_written_leaves_the_old_one(
        self, vllm: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def scenario(engine: Any) -> None:
            await engine.load(NamedWeights(adapters(tiny, 1)), V1)
            with monkeypatch.context() as patch:
                patch.setattr(engine._adapters._folders, "_root", Path("/proc/none"))
                with pytest.raises(WeightsError, match="can't be written to /proc/none"):
                    await engine.load(NamedWeights(adapters(tiny, 2)), V2)
            assert engine.version == V1
            assert await greedy_tokens(engine) == greedy(peft_model(tiny, 1), PROMPT, 24, EOS)[0]

        in_engine(vllm(), scenario)

    def test_only_adapters_in_use_are_kept(self, vllm: Any, tiny: Any) -> None:
        seen: list[str] = []

        async def scenario(engine: Any) -> Path:
            for seed in range(1, 6):
                await engine.load(NamedWeights(adapters(tiny, seed)), Version(term=1, step=seed))
                await greedy_tokens(engine)
                await settled(engine)
                (name,) = folders(engine)
                assert len(await known(engine)) == 1
                assert name.startswith(f"1.{seed}-")
                seen.append(name)
            # The same version once more, as after a failed check, is another adapter.
            await engine.load(NamedWeights(adapters(tiny, 5)), Version(term=1, step=5))
            await settled(engine)
            seen.extend(folders(engine))
            root: Path = engine._adapters._folders._root
            return root

        root = in_engine(vllm(), scenario)
        assert len(set(seen)) == 6
        assert len({name.split("-")[1] for name in seen}) == 6
        assert not root.exists()

    def test_a_folder_is_one_that_peft_reads(self, vllm: Any, tiny: Any) -> None:
        import peft

        async def scenario(engine: Any) -> None:
            await engine.load(NamedWeights(adapters(tiny, 1)), V1)
            await settled(engine)
            (name,) = folders(engine)
            folder = engine._adapters._folders._root / name
            settings = json.loads((folder / vllm_adapters.CONFIG).read_text())
            assert (settings["r"], settings["lora_alpha"]) == (4, 6.0)
            read = peft.PeftModel.from_pretrained(tiny.model(), folder).eval()
            row = [*PROMPT, 5, 6]
            assert torch.equal(logprobs(read, row), logprobs(peft_model(tiny, 1), row))

        in_engine(vllm(), scenario)

    def test_without_recomputed_keys_samples_end_with_the_adapter_they_began_with(
        self, vllm: Any, tiny: Any
    ) -> None:
        models = {seed: peft_model(tiny, seed) for seed in (1, 2, 3, 4)}

        async def scenario(engine: Any) -> list[Sample]:
            tasks = []
            for seed in (1, 2, 3, 4):
                await engine.load(NamedWeights(adapters(tiny, seed)), Version(term=1, step=seed))
                if seed == 3:
                    # As many as fit into one batch of vLLM's.
                    assert len(await known(engine)) == 3
                if seed == 4:
                    await settled(engine)
                    assert len(await known(engine)) == 3
                else:
                    task = collect(engine, long_group(f"0-{seed}", count=12, new=240))
                    tasks.append(asyncio.create_task(task))
                    await running(engine, 40)
            found = [await task for task in tasks]
            await settled(engine)
            assert len(folders(engine)) == len(await known(engine)) == 1
            return [one for groups in found for group in groups.values() for one in group.samples]

        samples = in_engine(vllm(recompute_kv=False), scenario)
        steps = [[step for step, _, _ in spans_of(sample)] for sample in samples]
        # Only the oldest had to make room.
        assert [4] not in steps
        assert steps.count([2]) == steps.count([3]) == 12
        assert [1, 4] in steps[:12]
        assert max(off(sample, models) for sample in samples) < SAME

    def test_it_need_not_say_which_weights_sampled_what(
        self, vllm: Any, tiny: Any, without_versions: None
    ) -> None:
        models = {seed: peft_model(tiny, seed) for seed in (1, 2)}

        async def scenario(engine: Any) -> tuple[Sample, ...]:
            await engine.load(NamedWeights(adapters(tiny, 1)), V1)
            task = asyncio.create_task(collect(engine, long_group("0-0", count=8)))
            await running(engine, 30)
            await engine.load(NamedWeights(adapters(tiny, 2)), V2)
            (group,) = (await task).values()
            assert group.error is None
            samples: tuple[Sample, ...] = group.samples
            return samples

        samples = in_engine(vllm(), scenario)
        assert [1, 2] in [[step for step, _, _ in spans_of(sample)] for sample in samples]
        assert all(spans_of(sample)[-1][2] == len(sample.tokens) for sample in samples)
        assert max(off(sample, models) for sample in samples) < SAME

    def test_a_seeded_sample_goes_on_with_other_noise(self, vllm: Any, tiny: Any) -> None:
        # At the highest temperature equal noise gives equal tokens more often than not, whatever is before them.
        request = replace(asks("0-0", new=200, count=16, temperature=2.0), noise="0")

        async def scenario(engine: Any) -> tuple[Sample, ...]:
            await engine.load(NamedWeights(zero_b(adapters(tiny, 1))), V1)
            task = asyncio.create_task(collect(engine, request))
            await running(engine, 16 * 8)
            await engine.pause()
            await engine.load(NamedWeights(zero_b(adapters(tiny, 2))), V2)
            await engine.resume()
            (group,) = (await task).values()
            samples: tuple[Sample, ...] = group.samples
            return samples

        def alike(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> float:
            same = [a == b for one, other in pairs for a, b in zip(one, other, strict=False)]
            assert len(same) > 50
            return float(np.mean(same))

        begun, gone_on = [], []
        for sample in in_engine(vllm(), scenario):
            spans = spans_of(sample)
            if len(spans) == 2:
                begun.append(sample.tokens[: spans[1][1]])
                gone_on.append(sample.tokens[spans[1][1] :])
        # Other noise gives 2 to 4% equal tokens.
        assert alike(zip(begun, gone_on, strict=True)) < 0.25
        assert alike(itertools.pairwise(gone_on)) < 0.25

    def test_a_prompt_in_the_prefix_cache_isnt_taken_for_another_adapters(
        self, vllm: Any, tiny: Any
    ) -> None:
        generator = np.random.default_rng(0)
        models = {seed: peft_model(tiny, seed) for seed in (1, 2)}

        async def scenario(engine: Any) -> None:
            size = engine.prefix_block + 30
            prompt = generator.integers(3, 30, size).astype(np.int32)
            for name, seed in (("a", 1), ("b", 1), ("c", 2), ("d", 2)):
                if name in "ac":
                    await engine.load(
                        NamedWeights(adapters(tiny, seed)), Version(term=1, step=seed)
                    )
                request = GroupRequest(
                    group_id=name,
                    prompt_tokens=prompt,
                    count=2,
                    sampling=SamplingParams(temperature=1.0, max_new_tokens=8, top_p=1.0, top_k=0),
                    seed=0,
                )
                for sample in (await collect(engine, request))[name].samples:
                    assert off(sample, models, prompt.tolist()) < SAME

        in_engine(vllm(), scenario)

    def test_adapters_that_vllm_doesnt_take_are_refused_at_the_start(
        self, vllm: Any, tiny: Any, vllm_module: Any
    ) -> None:
        # This vLLM takes ranks up to 8.
        engine = vllm(lora=LoraConfig(rank=9))
        with pytest.raises(ConfigError, match=r"can't load the adapters of learner\.lora.*rank 9"):
            asyncio.run(engine.start())
        asyncio.run(engine.close())


def test_a_folder_of_a_killed_process_is_removed_by_the_next() -> None:
    code = """
import sys, time, torch
from tandem.common.config.learner import LoraConfig
from tandem.rollout.vllm.vllm_adapters import AdapterFolders
folders = AdapterFolders()
made = folders.write("one", {"x.lora_A.weight": torch.zeros(1, 2)}, LoraConfig())
print(made.parent, flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        try:
            assert left.parent == Path(tempfile.gettempdir())
            vllm_adapters.remove_left_behind()
            # Its process lives.
            assert (left / "one" / vllm_adapters.TENSORS).is_file()
        finally:
            process.send_signal(signal.SIGKILL)
    vllm_adapters.remove_left_behind()
    assert not left.exists()


@pytest.mark.parametrize(("rank", "most"), [(1, 1), (2, 8), (16, 16), (257, 320), (512, 512)])
def test_vllm_is_started_with_the_least_rank_that_it_knows(rank: int, most: int) -> None:
    found = vllm_adapters.arguments(LoraConfig(rank=rank), 3, ())
    assert found["max_lora_rank"] == most
    assert found["max_loras"] == 3


def test_an_engine_of_ones_own_must_take_adapters() -> None:
    rollout = RolloutConfig(engine="adapter_models:no_adapters")
    with pytest.raises(ConfigError, match="takes no argument lora"):
        engines.make_engine(ModelConfig(), rollout, lora=LORA)
    given = adapter_models.taken
    engines.make_engine(ModelConfig(), RolloutConfig(engine="adapter_models:takes"), lora=LORA)
    assert given == [LORA]
