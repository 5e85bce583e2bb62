"""Tokens a second of ``tandem evaluate`` beside its bare engine, in one run.

    .venv/bin/python tests/benchmarks/evaluate.py                             # 500 problems x 8 samples, vLLM
    .venv/bin/python tests/benchmarks/evaluate.py --engine torch --problems 20 --samples 2 --pairs 1

The miniature answers held-out problems of its own at temperature 1. One side is what an evaluation does: every sample by
itself, graded, and appended to a file. The other gives the same engine all problems at once, each with all of its
samples, and counts their tokens. Sides take turns; the medians of the pairs are printed, and the median of the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from random import Random

import pyarrow.parquet as pq

from tandem.common.config import EvalSetConfig, build
from tandem.common.models import load_tokenizer
from tandem.common.records import SamplingParams
from tandem.launch.ingest.rows import SourceReader
from tandem.launch.miniature.parquet import table
from tandem.launch.miniature.problems import distinct
from tandem.replay.evaluating.evaluated import Cell, EvaluatedSample, line_of
from tandem.reward.grading import Grader
from tandem.rollout.engine import Engine, GroupRequest
from tandem.rollout.engines import make_engine
from tandem.rollout.evaluate.answering import Benchmark, answer

ROWS = 256
"""Responses that the engine generates at a time."""


async def evaluated(
    engine: Engine, benchmark: Benchmark, cell: Cell, out: Path
) -> tuple[int, float]:
    """Tokens and seconds of an evaluation."""
    tokens = 0
    start = time.perf_counter()
    with open(out, "ab") as file:

        def keep(samples: list[EvaluatedSample]) -> None:
            nonlocal tokens
            tokens += sum(one.tokens for one in samples)
            file.write(b"".join(map(line_of, samples)))
            file.flush()

        await answer(engine, benchmark, cell, benchmark.places(cell), keep)
    return tokens, time.perf_counter() - start


async def bare(engine: Engine, benchmark: Benchmark, cell: Cell) -> tuple[int, float]:
    """Tokens and seconds of the engine alone."""
    sampling = SamplingParams(
        temperature=cell.temperature, top_p=1.0, top_k=0, max_new_tokens=cell.max_new_tokens
    )
    requests = [
        GroupRequest(
            group_id=f"bare:{place}",
            prompt_tokens=problem.prompt_tokens,
            count=cell.samples,
            sampling=sampling,
            seed=cell.seed,
        )
        for place, problem in enumerate(benchmark.problems)
    ]
    tokens = 0
    start = time.perf_counter()
    async for group in engine.generate(requests):
        assert group.error is None, group.error
        tokens += sum(len(sample.tokens) for sample in group.samples)
    return tokens, time.perf_counter() - start


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """The medians of all pairs."""
    data = folder / "problems.parquet"
    rows = table(distinct(Random(0), 6, arguments.problems), split="heldout", with_target=False)
    pq.write_table(rows, data)
    settings = [f"rollout.engine={arguments.engine}", "rollout.max_new_tokens=96"]
    config = build({"run": {"steps": 1}, "data": {"train": [{"path": ""}]}}, settings)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"path": "miniature"})}
    )
    cell = Cell(
        name="bench", model="miniature", benchmark="heldout", template="own", temperature=1.0, top_p=1.0,
        samples=arguments.samples, max_new_tokens=96, stop=(), mode="boxed", seed=0,
    )  # fmt: skip
    with Grader(config.reward) as grader:
        held_out = EvalSetConfig(path=str(data), name="heldout")
        reader = SourceReader(config, load_tokenizer("miniature"), grader, lambda text: None)
        benchmark = Benchmark(problems=reader.read(held_out, data)[0], grader=grader)
        longest = max(len(problem.prompt_tokens) for problem in benchmark.problems)
        engine = make_engine(config.model, config.rollout, max_rows=ROWS, max_prompt_tokens=longest)
        await engine.start()
        sides: dict[str, list[float]] = {"evaluate": [], "engine": []}
        try:
            # What is compiled or started on the first call counts for neither.
            await bare(engine, benchmark, cell)
            await evaluated(engine, benchmark, cell, folder / "warm.jsonl")
            for pair in range(arguments.pairs):
                both = ("evaluate", "engine") if pair % 2 == 0 else ("engine", "evaluate")
                for side in both:
                    grader.forget()
                    tokens, seconds = (
                        await evaluated(engine, benchmark, cell, folder / f"{pair}.jsonl")
                        if side == "evaluate"
                        else await bare(engine, benchmark, cell)
                    )
                    sides[side].append(tokens / seconds)
        finally:
            await engine.close()
    ratios = [a / b for a, b in zip(sides["evaluate"], sides["engine"], strict=True)]
    return {
        "engine": arguments.engine,
        "problems": arguments.problems,
        "samples": arguments.samples,
        **{f"{side}_tokens_per_second": statistics.median(found) for side, found in sides.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", default="vllm", choices=("vllm", "torch"))
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(arguments, Path(folder))), indent=1))


if __name__ == "__main__":
    main()
