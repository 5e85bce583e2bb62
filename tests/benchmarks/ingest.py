"""``tandem ingest`` beside a bare ``encode_batch`` of the same texts, and its memory beside the file's size.

    .venv/bin/python tests/benchmarks/ingest.py              # 46,000 rows of 2,000 tokens, 3 pairs

Rows of invented words with a question, a solution of about 1,950 tokens and a gold answer, as parquet, and a
byte-level BPE tokenizer of 8,000 entries trained on some of them. The bare side reads no file: it has the texts in
memory, and encodes them in chunks of the same size. Both are processes of their own, one after the other;
the time of the bare side is that of its calls alone, that of the command is the whole process without its
imports' time, which is measured on a file of one row. Prints the pairs, their median ratio, and the greatest
memory of the command on the whole file and on a quarter of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHUNK = 512


def words(seed: int, count: int) -> list[str]:
    """Invented words, the shorter the more frequent."""
    noise = random.Random(seed)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    return ["".join(noise.choices(letters, range(26, 0, -1), k=2 + n // 600)) for n in range(count)]


def rows(count: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Rows of about so many tokens."""
    noise = random.Random(1)
    vocabulary = words(0, 6000)
    weights = [1 / (n + 10) for n in range(len(vocabulary))]
    pool = noise.choices(vocabulary, weights, k=400_000)
    for number in range(count):
        start = noise.randrange(len(pool) - tokens)
        question = " ".join(pool[start : start + 40])
        solution = " ".join(pool[start + 40 : start + int(0.8 * tokens)])
        yield {
            "problem": f"{number}: {question}?",
            "solution": f"{solution} \\boxed{{{number}}}",
            "answer": str(number),
        }


def make(folder: Path, count: int, tokens: int) -> Path:
    """Writes the files and the tokenizer's folder; returns the latter."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    for name, some in (("one", 1), ("quarter", count // 4), ("whole", count)):
        writer = None
        batch: list[dict[str, Any]] = []
        for row in rows(some, tokens):
            batch.append(row)
            if len(batch) == 1000 or len(batch) == some:
                table = pa.Table.from_pylist(batch)
                writer = writer or pq.ParquetWriter(folder / f"{name}.parquet", table.schema)
                writer.write_table(table)
                batch = []
        assert writer is not None
        if batch:
            writer.write_table(pa.Table.from_pylist(batch))
        writer.close()
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator((row["solution"] for row in rows(200, tokens)), trainer)
    model = folder / "model"
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(model)
    (model / "config.json").write_text('{"model_type": "qwen2"}')
    return model


def ingest(file: Path, model: Path) -> tuple[float, float, dict[str, Any]]:
    """Seconds, greatest memory in MB, and what the command says of a file."""
    before = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-m", "tandem.launch.cli", "ingest", file, "--model", model, "--json"],
        stdout=subprocess.PIPE,
    )
    out = child.stdout.read() if child.stdout is not None else b""
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"tandem ingest ended with status {status}")
    return time.perf_counter() - before, usage.ru_maxrss / 1024, json.loads(out)[0]


def bare(file: Path, model: Path) -> None:
    """Prints the seconds that ``encode_batch`` alone takes for a file's texts."""
    import pyarrow.parquet as pq
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(model / "tokenizer.json"))
    spent = 0.0
    for batch in pq.ParquetFile(file).iter_batches(CHUNK):
        plain = batch.to_pylist()
        texts = [row["problem"] for row in plain] + [row["solution"] for row in plain]
        before = time.perf_counter()
        backend.encode_batch(texts, add_special_tokens=False)
        spent += time.perf_counter() - before
    print(
        json.dumps(
            {"seconds": spent, "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
        )
    )


def main() -> int:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=46_000)
    parser.add_argument("--tokens", type=int, default=2_000, help="of a row, about")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--bare", nargs=2, metavar=("FILE", "MODEL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        bare(*map(Path, arguments.bare))
        return 0
    ratios = []
    with tempfile.TemporaryDirectory(prefix="tandem-ingest-") as temporary:
        folder = Path(temporary)
        model = make(folder, arguments.rows, arguments.tokens)
        start = min(ingest(folder / "one.parquet", model)[0] for _ in range(2))
        print(f"start: {start:.1f} s", flush=True)
        file = folder / "whole.parquet"
        for pair in range(arguments.pairs):
            seconds, memory, found = ingest(file, model)
            command = [sys.executable, __file__, "--bare", str(file), str(model)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            alone = json.loads(done.stdout)["seconds"]
            ratios.append((seconds - start) / alone)
            median = found["lengths"]["response"]["p50"] + found["lengths"]["prompt"]["p50"]
            print(
                f"pair {pair}: ingest {seconds - start:.1f} s, bare {alone:.1f} s, ratio {ratios[-1]:.2f}; "
                f"{found['kept']:,} of {found['rows']:,} rows kept, {median:,} tokens in the median",
                flush=True,
            )
        quarter = ingest(folder / "quarter.parquet", model)[1]
        print(f"median ratio {statistics.median(ratios):.2f}")
        size = file.stat().st_size / (1 << 20)
        print(f"memory: {memory:.0f} MB for {size:.0f} MB, {quarter:.0f} MB for a quarter of it")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
