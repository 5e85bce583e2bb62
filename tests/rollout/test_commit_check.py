"""A version that isn't what the learner published is found before its samples count.

Each fault that is known to have gone unseen for days elsewhere is planted where it would come about,
on every engine, in single precision, with weights that differ as much as one step at the miniature's
learning rate makes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_calls import asks, collect, in_engine
from msgspec.structs import replace

from tandem.common.errors import TandemError
from tandem.common.records import SamplingParams, Version
from tandem.common.weights.manifest import ScoredRows
from tandem.learner.scored import LENGTH, ROWS, fixed_rows
from tandem.rollout.decoding import batch
from tandem.rollout.decoding.torch_engine import TorchEngine
from tandem.rollout.engine import NamedWeights
from tandem.rollout.new_weights import commit_check
from tandem.rollout.new_weights.commit import Committer
from tandem.rollout.new_weights.commit_check import CommitCheck, Difference
from tandem.rollout.new_weights.rounding import BOUNDS, GIVEN, MEAN, RAN_ON, SAMPLED, TIMES, Noise
from tandem.rollout.vllm import vllm_requests

LR = 5e-4
"""The miniature's."""
V1, V2, V3 = (Version(term=1, step=step) for step in (1, 2, 3))
NewEngine = Callable[..., Any]
Weights = dict[str, torch.Tensor]


def logprobs(model: Any, rows: Any) -> torch.Tensor:
    """By transformers' own forward, as the learner's are."""
    tokens = torch.from_numpy(rows)
    with torch.no_grad():
        logits = model(input_ids=tokens).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)


def figures(
    model: Any, change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x, length: int = 256
) -> ScoredRows:
    """What the learner sends with a model's weights."""
    rows = fixed_rows(32, length, seed=0)
    found = change(logprobs(model, rows))
    return ScoredRows(
        rows=tuple(map(tuple, rows.tolist())), logprobs=tuple(map(tuple, found.tolist()))
    )


def stepped(model: Any, seed: int) -> Any:
    """The model after a step of Adam at the learning rate: each weight has moved by it."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += LR * torch.randn(parameter.shape, generator=noise).sign()
    return model


class Bench:
    """An engine on version 1, checked; the learner's model is at version 2."""

    def __init__(self, new_engine: NewEngine, tiny: Any, **settings: Any) -> None:
        self.old: Weights = tiny.weights(tiny.model())
        self.learner = stepped(tiny.model(), seed=1)
        self.new: Weights = tiny.weights(self.learner)
        self.first = figures(tiny.model())
        self.settings = {
            "dtypes": ("float32",),
            "bound": None,
            "temperature": 1.0,
            "runs_on": True,
            "seconds": 20.0,
            **settings,
        }
        self.engine = new_engine(tiny.model(), version=V1, max_rows=16)

    def run(
        self,
        weights: Weights | None = None,
        scored: ScoredRows | None = None,
        *,
        plant: Callable[[Any], Any] = lambda engine: None,
        busy: bool = False,
    ) -> dict[str, Difference]:
        """What the check of version 2 finds, loaded with these weights (None: the right ones)
        after two checks that have passed; where it is busy, while others are sampled."""

        async def scenario(engine: Any) -> dict[str, Difference]:
            check = CommitCheck(engine, **self.settings)
            # The first knows no prompt before it; in the second there is what ran on.
            for version in (V1, V2):
                await self.commit(check, engine, self.old, version, self.first, busy=busy)
                assert all(d.passes for d in self.found), self.found
            plant(engine)
            await self.commit(
                check, engine, weights or self.new, V3, scored or figures(self.learner), busy=busy
            )
            return {difference.kind: difference for difference in self.found}

        found: dict[str, Difference] = in_engine(self.engine, scenario)
        return found

    async def commit(
        self,
        check: CommitCheck,
        engine: Any,
        weights: Weights,
        version: Version,
        scored: ScoredRows,
        *,
        busy: bool,
    ) -> None:
        others = None
        if busy:
            others = asyncio.create_task(collect(engine, asks(f"busy/{version}", new=240)))
            steps = engine.stats().decode_steps
            while engine.stats().decode_steps < steps + 3:
                await asyncio.sleep(0.001)
        await check.begin(version)
        await engine.load(NamedWeights(weights), version)
        self.found = await check.examine(version, scored)
        check.end(passed=all(d.passes for d in self.found))
        if others is not None:
            await engine.abort([f"busy/{version}"])
            await others


@pytest.fixture
def bench(new_engine: NewEngine, tiny: Any) -> Bench:
    return Bench(new_engine, tiny)


def test_a_version_that_is_what_was_published_passes(bench: Bench) -> None:
    found = bench.run()
    assert found.keys() == {GIVEN, SAMPLED}
    for difference in found.values():
        assert difference.passes
        assert difference.size < 1e-4
        assert difference.bound == BOUNDS[difference.kind]["float32"][0]


def test_samples_that_run_on_pass_where_their_keys_are_computed_again(bench: Bench) -> None:
    found = bench.run(busy=True)
    assert found.keys() == {GIVEN, SAMPLED, RAN_ON}
    assert all(difference.passes for difference in found.values()), found


def test_two_matrices_in_each_others_place_are_found(bench: Bench) -> None:
    first, second = (f"model.layers.{n}.mlp.gate_proj.weight" for n in (0, 1))
    swapped = {**bench.new, first: bench.new[second], second: bench.new[first]}
    found = bench.run(swapped)[GIVEN]
    assert not found.passes
    assert "row " in found.where
    assert "learner's -" in found.where


@pytest.mark.parametrize("layer", [0, 1])
def test_one_layer_of_the_version_before_is_found(bench: Bench, layer: int) -> None:
    part = f"layers.{layer}."
    mixed = {name: (bench.old if part in name else bench.new)[name] for name in bench.new}
    assert not bench.run(mixed)[GIVEN].passes


def test_labels_shifted_by_one_are_found(bench: Bench) -> None:
    shifted = figures(bench.learner, lambda found: found.roll(1, dims=1))
    assert not bench.run(scored=shifted)[GIVEN].passes


def test_a_dropped_final_norm_is_found(bench: Bench) -> None:
    norm = bench.learner.model.norm
    forward, norm.forward = norm.forward, lambda hidden: hidden
    without = figures(bench.learner)
    norm.forward = forward
    assert not bench.run(scored=without)[GIVEN].passes


def test_a_temperature_that_is_not_recorded_is_found(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each engine's own step from the distribution asked for to the one drawn from.
    draw, sample = batch.draw, vllm_requests.sample

    def hot(sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, temperature=1.1)

    def plant(engine: Any) -> None:
        monkeypatch.setattr(batch, "draw", lambda logits, s, u: draw(logits, hot(s), u))
        monkeypatch.setattr(
            vllm_requests,
            "sample",
            lambda llm, name, context, s, **rest: sample(llm, name, context, hot(s), **rest),
        )

    found = bench.run(plant=plant)
    assert found[GIVEN].passes
    assert not found[SAMPLED].passes


def test_log_probs_of_another_temperature_than_the_runs_are_found(
    new_engine: NewEngine, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(new_engine, tiny, temperature=1.3)
    assert all(difference.passes for difference in bench.run().values())
    present = commit_check._of_version

    def raw(request: Any, samples: Any, *rest: Any, **more: Any) -> Any:
        # As an engine has it that records log-probs before it divides by the temperature.
        plain = [
            replace(
                sample,
                logprobs=logprobs_after(bench.learner, request.prompt_tokens, sample.tokens).astype(
                    np.float32
                ),
            )
            for sample in samples
        ]
        return present(request, plain, *rest, **more)

    again = Bench(new_engine, tiny, temperature=1.3)
    plant: Callable[[Any], Any] = lambda engine: monkeypatch.setattr(  # noqa: E731
        commit_check, "_of_version", raw
    )
    assert not again.run(plant=plant)[SAMPLED].passes


def logprobs_after(model: Any, prompt: Any, tokens: Any) -> Any:
    row = np.concatenate([prompt, tokens]).astype(np.int64)[None]
    return logprobs(model, row)[0, len(prompt) - 1 :].numpy()


def test_keys_and_values_that_were_not_computed_again_are_found(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plant(engine: Any) -> None:
        # The torch engine's way to compute them again, and vLLM's.
        monkeypatch.setattr(batch.Batch, "recompute", lambda self: None)
        monkeypatch.setattr(getattr(engine, "_weights", engine), "_recompute", False)

    found = bench.run(plant=plant, busy=True)
    assert found[GIVEN].passes
    assert not found[RAN_ON].passes


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_keys_in_the_prefix_cache_of_older_weights_are_found(
    engine_of: Callable[[str], NewEngine], tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = vllm_requests.sample
    bench = Bench(engine_of("vllm"), tiny)

    async def nothing(**_: Any) -> bool:
        return True

    # One name for the keys of all versions, and nobody drops them.
    monkeypatch.setattr(
        vllm_requests, "sample", lambda *args, **rest: sample(*args, **{**rest, "salt": "same"})
    )

    def plant(engine: Any) -> None:
        monkeypatch.setattr(engine._process.llm, "reset_prefix_cache", nothing)

    found = bench.run(plant=plant)
    assert found[GIVEN].passes
    assert not found[SAMPLED].passes


# The bound, and what there is to check.


def test_the_bound_follows_what_earlier_checks_found() -> None:
    noise = Noise(GIVEN, "bfloat16")
    least, first = BOUNDS[GIVEN]["bfloat16"]
    assert noise.bound == first
    for size in (0.3, 0.1, 0.2):
        noise.add(size)
    assert noise.bound == pytest.approx(TIMES["bfloat16"] * 0.2)
    for _ in range(200):
        noise.add(1e-5)
    assert noise.bound == least
    for _ in range(200):
        noise.add(3.0)
    assert noise.bound == first
    # A setting moves what passes at first, of all kinds alike.
    assert Noise(GIVEN, "float32", 6.0).bound == 6.0
    assert Noise(MEAN, "float32", 6.0).bound == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("dtypes", "coarser"),
    [
        (("float32", "float32"), "float32"),
        (("float32", "bfloat16"), "bfloat16"),
        (("bfloat16", "float32"), "bfloat16"),
    ],
)
def test_the_first_bound_is_that_of_the_less_exact_dtype(
    dtypes: tuple[str, str], coarser: str, engine_of: Any, tiny: Any
) -> None:
    check = CommitCheck(
        engine_of("torch-direct")(tiny.model()),
        dtypes=dtypes,
        bound=None,
        temperature=1.0,
        runs_on=True,
        seconds=5.0,
    )
    assert {kind: noise.bound for kind, noise in check._noise.items()} == {
        kind: BOUNDS[kind][coarser][1] for kind in BOUNDS
    }


def test_a_sample_that_is_less_certain_than_those_before_is_no_alarm(
    engine_of: Any, tiny: Any
) -> None:
    check = CommitCheck(
        engine_of("torch-direct")(tiny.model()),
        dtypes=("bfloat16",),
        bound=None,
        temperature=1.0,
        runs_on=True,
        seconds=5.0,
    )
    for _ in range(20):
        check._noise[GIVEN].add(0.5)
        check._noise[SAMPLED].add(0.0)
    row, recorded = np.array([3, 4, 5], np.int32), np.array([-1.0, -0.2])
    near, far = np.array([-2.9, -0.2], np.float32), np.array([-3.1, -0.2], np.float32)
    assert check._greatest(SAMPLED, [row], [1], [recorded], [near], "recorded").passes
    assert not check._greatest(SAMPLED, [row], [1], [recorded], [far], "recorded").passes


@pytest.mark.parametrize(("moved", "passes"), [(1, True), (2, False)])
def test_a_token_of_one_sample_alone_is_rounding_and_in_most_it_is_not(
    moved: int, passes: bool, engine_of: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(engine_of("torch-direct"), tiny)
    present = commit_check._of_version

    def rounded(*args: Any, **rest: Any) -> Any:
        samples = present(*args, **rest)
        for _, sample, start, _ in samples[:moved]:
            sample.logprobs[start] -= 2.0
        return samples

    plant: Callable[[Any], Any] = lambda engine: monkeypatch.setattr(  # noqa: E731
        commit_check, "_of_version", rounded
    )
    assert bench.run(plant=plant)[SAMPLED].passes is passes


def test_a_small_difference_everywhere_is_found_by_its_mean(engine_of: Any, tiny: Any) -> None:
    bench = Bench(engine_of("torch-direct"), tiny, dtypes=("bfloat16",))
    # As rounding would be: some in the checks that pass, three times as much in the one that fails.
    noise = torch.Generator().manual_seed(0)
    off = torch.rand((ROWS, LENGTH - 1), generator=noise) * 2 - 1
    bench.first = figures(tiny.model(), lambda found: found + 0.1 * off)
    found = bench.run(scored=figures(bench.learner, lambda found: found + 0.3 * off))[GIVEN]
    assert found.size < found.bound
    assert found.mean > found.mean_bound
    assert not found.passes
    assert "in the mean 0.1" in str(found)


@pytest.mark.parametrize(("tokens", "passes"), [(1, True), (8, False)])
def test_in_half_precision_one_token_may_round_far_and_many_may_not(
    tokens: int, passes: bool, engine_of: Any, tiny: Any
) -> None:
    bench = Bench(engine_of("torch-direct"), tiny, dtypes=("bfloat16",))
    noise = torch.Generator().manual_seed(0)
    off = torch.rand((ROWS, LENGTH - 1), generator=noise) * 2 - 1
    # The median of the greatest is 0.4, that of the mean 0.2.
    bench.first = figures(tiny.model(), lambda found: found + 0.4 * off)

    def far(found: torch.Tensor) -> torch.Tensor:
        found = found + 0.4 * off
        found[0, :tokens] -= 12.0
        return found

    assert bench.run(scored=figures(bench.learner, far))[GIVEN].passes is passes


def test_a_figure_that_is_no_number_is_a_difference(engine_of: Any, tiny: Any) -> None:
    bench = Bench(engine_of("torch-direct"), tiny)
    broken = {name: tensor.clone() for name, tensor in bench.new.items()}
    broken["model.norm.weight"][0] = float("nan")
    found = bench.run(broken)[GIVEN]
    assert found.size == float("inf")
    assert not found.passes


def test_what_has_a_token_of_a_version_waits_until_its_check_is_over(
    engine_of: Any, tiny: Any
) -> None:
    bench = Bench(engine_of("torch-direct"), tiny)

    async def scenario(engine: Any) -> None:
        check = CommitCheck(engine, **bench.settings)
        older = (await collect(engine, asks("0-1", new=3)))["0-1"].samples
        await check.begin(V2)
        await engine.load(NamedWeights(bench.new), V2)
        newer = (await collect(engine, asks("0-2", new=3)))["0-2"].samples
        await asyncio.wait_for(check.settled(older), 5)
        waiting = asyncio.create_task(check.settled(newer))
        await asyncio.sleep(0)
        found = await check.examine(V2, figures(bench.learner))
        assert all(difference.passes for difference in found)
        assert not waiting.done()
        check.end(passed=True)
        await asyncio.wait_for(waiting, 5)

    in_engine(bench.engine, scenario)


def test_an_engine_that_can_not_score_is_not_checked(caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"temperature": 1.0, "runs_on": True, "seconds": 1.0}
    check = CommitCheck(object(), dtypes=("float32",), bound=None, **settings)  # type: ignore[arg-type]
    assert not check.is_on
    assert "aren't checked: object has no method `score`" in caplog.text


def test_that_an_engine_has_died_says_nothing_about_its_weights(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Dead:
        broken = "it has died"

        def generate(self, requests: Any) -> Any:
            raise TandemError(self.broken)

        async def score(self, rows: Any, temperature: float = 1.0) -> Any:
            raise TandemError(self.broken)

        def stats(self) -> Any:
            return SimpleNamespace(running_rows=0)

    async def examined() -> Committer:
        check = CommitCheck(
            Dead(),  # type: ignore[arg-type]
            dtypes=("float32",),
            bound=None,
            temperature=1.0,
            runs_on=False,
            seconds=20.0,
        )
        nothing = partial(int, 0)
        committer = Committer(
            Dead(),  # type: ignore[arg-type]
            check,
            loop=asyncio.get_running_loop(),
            seconds=20.0,
            update_wait=0.0,
            on_change=nothing,
            spoil=nothing,
        )
        scored = ScoredRows(rows=((3, 4, 5),), logprobs=((-1.0, -1.0),))
        for _ in range(2):
            assert await committer._examine(V2, scored)
        assert check.suspect
        return committer

    assert asyncio.run(examined()).hopeless == ""
    assert "published" not in caplog.text


def test_without_figures_of_the_learner_nothing_is_found(
    engine_of: Any, tiny: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(engine: Any) -> list[Difference]:
        check = CommitCheck(
            engine, dtypes=("float32",), bound=None, temperature=1.0, runs_on=True, seconds=5.0
        )
        return [*await check.examine(V1, None), *await check.examine(V2, None)]

    assert in_engine(engine_of("torch-direct")(tiny.model(), version=V1), scenario) == []
    assert caplog.text.count("the learner sends no figures") == 1


def test_its_tokens_are_less_than_a_hundredth_of_a_step_of_the_largest_preset() -> None:
    import yaml

    import tandem.launch
    from tandem.common.config import build

    path = Path(tandem.launch.__file__).parent / "configs" / "qwen2.5-math-7b-luffy-8gpu.yaml"
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    config = build({key: raw[key] for key in raw if key not in ("about", "untested")})
    learner = ROWS * LENGTH
    samples = commit_check.SAMPLES + commit_check.RUN_ON_SAMPLES
    sampled = samples * (commit_check.BLOCK + 1 + commit_check.TOKENS + commit_check.STEPS_BEFORE)
    # Drawn, and then scored.
    worker = learner + 2 * sampled
    rows = config.replay.groups_per_step * config.rollout.group_size
    # Its responses may have 8192 tokens, and have a thousand and more; let them have 64.
    assert learner + config.rollout.workers * worker < 0.01 * rows * (64 + 64)


def test_scores_of_one_temperature_are_asked_for_together(
    engine_of: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, float]] = []
    score = TorchEngine.score

    async def watched(self: Any, rows: Any, temperature: float = 1.0) -> Any:
        asked.append((len(rows), temperature))
        return await score(self, rows, temperature)

    monkeypatch.setattr(TorchEngine, "score", watched)
    Bench(engine_of("torch-direct"), tiny).run(busy=True)
    given, ran_on = asked[-2:]
    assert given == (ROWS + commit_check.SAMPLES, 1.0)
    assert 1 <= ran_on[0] <= commit_check.RUN_ON_SAMPLES
    assert ran_on[1] == commit_check.HOT


def test_where_other_temperatures_are_expensive_all_is_drawn_and_scored_at_1(
    engine_of: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[float] = set()
    score = TorchEngine.score

    async def watched(self: Any, rows: Any, temperature: float = 1.0) -> Any:
        asked.add(temperature)
        return await score(self, rows, temperature)

    monkeypatch.setattr(TorchEngine, "score", watched)
    monkeypatch.setattr(TorchEngine, "scores_plain", True, raising=False)
    # vLLM's tables of a large vocabulary are gigabytes, for every token of a batch.
    found = Bench(engine_of("torch-direct"), tiny, temperature=1.3).run(busy=True)
    assert asked == {1.0}
    assert found.keys() == {GIVEN, SAMPLED, RAN_ON}
    assert all(difference.passes for difference in found.values())


def test_after_the_first_checks_samples_are_drawn_for_a_share_of_the_time(
    engine_of: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(engine_of("torch-direct"), tiny)

    async def scenario(engine: Any) -> list[set[str]]:
        check = CommitCheck(engine, **bench.settings)
        seen = []

        async def once(scored: ScoredRows) -> None:
            version = Version(term=1, step=10 + len(seen))
            await bench.commit(check, engine, bench.old, version, scored, busy=False)
            seen.append({difference.kind for difference in bench.found})

        monkeypatch.setattr(commit_check, "SAMPLES_SHARE", 1e-9)
        for _ in range(commit_check.FIRST_CHECKS + 2):
            await once(bench.first)
        await once(figures(bench.learner))
        monkeypatch.setattr(commit_check, "SAMPLES_SHARE", 1e9)
        # After a failure it looks at everything again.
        await once(bench.first)
        await once(bench.first)
        return seen

    seen = in_engine(bench.engine, scenario)
    both = {GIVEN, SAMPLED}
    assert seen == [both] * commit_check.FIRST_CHECKS + [{GIVEN}] * 3 + [both] * 2


def test_no_row_of_the_check_is_longer_than_the_runs_own(
    engine_of: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []
    score = TorchEngine.score

    async def watched(self: Any, rows: Any, temperature: float = 1.0) -> Any:
        lengths.extend(map(len, rows[:2]))
        return await score(self, rows, temperature)

    monkeypatch.setattr(TorchEngine, "score", watched)
    bench = Bench(engine_of("torch-direct"), tiny, longest=20)
    bench.first, shorter = figures(tiny.model(), length=19), figures(bench.learner, length=19)
    found = bench.run(scored=shorter, busy=True)
    assert found.keys() >= {GIVEN, SAMPLED}
    assert all(difference.passes for difference in found.values())
    # An engine may have to sample one token more.
    assert max(lengths) == 19
