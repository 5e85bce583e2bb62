"""vLLM with two tensor-parallel ranks: all of them take new weights, or none does.

On CPUs, where each rank is a process and they talk over gloo. It takes a minute to start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from engine_calls import asks, collect, in_engine

from tandem.common.errors import TandemError, WeightsError
from tandem.common.records import FinishReason, Version
from tandem.rollout.engine import FinishedGroup, NamedWeights

pytestmark = [pytest.mark.vllm, pytest.mark.byhand, pytest.mark.timeout(300)]

V1, V2, V3, V4 = (Version(term=1, step=step) for step in (1, 2, 3, 4))
RANKS = 2


class Ranks:
    """An engine of two ranks that all tests share, and the file that makes one of them fail."""

    def __init__(self, shared: Any, faults: Path) -> None:
        self.shared = shared
        self._faults = faults

    def fails(self, how: str) -> None:
        """From now on; empty = no longer."""
        self._faults.write_text(how)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, vllm_module: Any, tiny: Any) -> Iterator[Ranks]:
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        # vLLM's processes are started with this environment and these paths.
        patch.setenv("TANDEM_TEST_FAULTS", str(folder / "faults"))
        patch.syspath_prepend(str(Path(__file__).parent))
        shared = vllm_module.Shared(
            folder / "model",
            tiny,
            tensor_parallel_size=RANKS,
            worker_extension_cls="worker_extensions.FailingRank",
        )
        asyncio.run(shared.process.start())
        yield Ranks(shared, folder / "faults")
        shared.close()


def versions(group: FinishedGroup) -> set[tuple[int, int]]:
    return {(span.term, span.step) for sample in group.samples for span in sample.spans}


def assert_of(model: Any, group: FinishedGroup) -> None:
    """The group's log-probs are those of the model's own forward."""
    assert group.error is None
    prompt = asks("").prompt_tokens
    for sample in group.samples:
        row = torch.from_numpy(np.concatenate([prompt, sample.tokens])).long()[None]
        with torch.no_grad():
            logprobs = model(input_ids=row).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        chosen = logprobs.gather(1, row[0, len(prompt) :, None])[:, 0]
        np.testing.assert_allclose(sample.logprobs, chosen.numpy(), atol=1e-4)


async def in_flight(engine: Any) -> asyncio.Task[dict[str, FinishedGroup]]:
    """Requests that have begun."""
    before = engine.stats().decode_steps
    running = asyncio.create_task(collect(engine, asks("running", new=200, count=8)))
    while engine.stats().decode_steps < before + 3:
        await asyncio.sleep(0.001)
    return running


def test_each_rank_is_a_process_and_listens_on_loopback_alone(ranks: Ranks) -> None:
    found = [p for p in ranks.shared.process._relatives() if "Worker_TP" in p.name()]
    assert len(found) == RANKS
    addresses = {c.laddr.ip for p in found for c in p.net_connections() if c.status == "LISTEN"}
    assert addresses == {"127.0.0.1"}


def test_all_ranks_take_new_weights_with_requests_in_flight(ranks: Ranks, tiny: Any) -> None:
    new = tiny.model(seed=1)

    async def scenario(engine: Any) -> list[FinishedGroup]:
        running = await in_flight(engine)
        await engine.load(NamedWeights(tiny.weights(new)), V2)
        return [(await running)["running"], (await collect(engine, asks("after")))["after"]]

    during, after = in_engine(ranks.shared.make(tiny.model(), version=V1), scenario)
    assert versions(during) == {(1, 1), (1, 2)}
    assert versions(after) == {(1, 2)}
    assert_of(new, after)


def test_a_rank_that_cannot_map_the_weights_leaves_all_on_the_old_ones(
    ranks: Ranks, tiny: Any
) -> None:
    old, new = tiny.model(), tiny.model(seed=1)

    async def scenario(engine: Any) -> list[FinishedGroup]:
        running = await in_flight(engine)
        # vLLM leaves the other's reply to the first unread: the second must not be taken for well.
        for version, rank in ((V2, 0), (V3, 1)):
            ranks.fails(f"map {rank}")
            with pytest.raises(
                WeightsError, match=f"{version} can't be read .* rank {rank}: .* bytes, not"
            ):
                await engine.load(NamedWeights(tiny.weights(new)), version)
        ranks.fails("")
        during, still = (await running)["running"], await collect(engine, asks("still"))
        await engine.load(NamedWeights(tiny.weights(new)), V4)
        return [during, still["still"], (await collect(engine, asks("after")))["after"]]

    during, still, after = in_engine(ranks.shared.make(old, version=V1), scenario)
    assert FinishReason.ABORT not in {sample.finish_reason for sample in during.samples}
    assert versions(during) == versions(still) == {(1, 1)}
    assert_of(old, during)
    assert_of(old, still)
    assert versions(after) == {(1, 4)}
    assert_of(new, after)


def test_a_rank_that_fails_while_it_loads_ends_sampling_for_good(ranks: Ranks, tiny: Any) -> None:
    async def scenario(engine: Any) -> FinishedGroup:
        running = await in_flight(engine)
        ranks.fails("take 0")
        with pytest.raises(TandemError, match=r"1\.2 .* half of it: .*rank 0: .*planted") as raised:
            await engine.load(NamedWeights(tiny.weights(tiny.model(seed=1))), V2)
        # It would be taken for a refusal that changed nothing.
        assert not isinstance(raised.value, WeightsError)
        await running
        return (await collect(engine, asks("after")))["after"]

    engine = ranks.shared.make(tiny.model(), version=V1)
    try:
        after = in_engine(engine, scenario)
    finally:
        ranks.fails("")
        asyncio.run(ranks.shared.process.run(engine._weights._thaw()))  # For the other tests.
    assert "half of it" in (after.error or "")


def test_a_rank_that_is_killed_while_it_loads_ends_vllm(ranks: Ranks, tiny: Any) -> None:
    # The last test: no vLLM is left after it.
    async def scenario(engine: Any) -> tuple[FinishedGroup, FinishedGroup]:
        running = await in_flight(engine)
        ranks.fails("kill 1")
        with pytest.raises(TandemError, match=r"1\.2 .* half of it") as raised:
            await engine.load(NamedWeights(tiny.weights(tiny.model(seed=1))), V2)
        assert not isinstance(raised.value, WeightsError)
        return (await running)["running"], (await collect(engine, asks("after")))["after"]

    family = ranks.shared.process._relatives()
    engine = ranks.shared.make(tiny.model(), version=V1)
    assert not engine.broken
    during, after = in_engine(engine, scenario)
    assert engine.broken
    assert versions(during) <= {(1, 1)}
    assert "half of it" in (after.error or "")
    ranks.shared.close()
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
