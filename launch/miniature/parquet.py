"""Writes the miniature's problems as parquet files with the columns that LUFFY published.

Columns, as in the data of Yan et al., "Learning to Reason under Off-Policy Guidance" (2025):

==============  =================================  ==========================================
column          type                               here
==============  =================================  ==========================================
data_source     string                             ``miniature``
prompt          list of {role, content}            one user message; that of a chain ends in ``<think>``
target          list of {role, content}, or null   one assistant message: the expert's trace
ability         string                             ``math``
reward_model    {style, ground_truth}              ``rule`` and the answer
extra_info      {split, index}                     the file's name and the row in it
==============  =================================  ==========================================

A target is exactly the text that follows the rendered prompt: the prompt has opened ``<think>``,
so the target does not repeat it. It has no end token.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from ...common.errors import DataError
from ...common.run_folder import write_atomic
from .problems import Problem, distinct
from .tools import problems as products

Setting = Literal["hard", "easy", "tools"]

OPERATIONS: dict[Setting, int] = {"hard": 8, "easy": 4, "tools": 1}
"""Operations of a problem of each setting. 8 is the smallest k at which rewards alone stall for good."""

HELD_OUT = 500
"""Held-out problems: a standard error of about 2 points on an accuracy."""

MANIFEST = "manifest.json"

_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", _MESSAGES),
        ("target", _MESSAGES),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        ("extra_info", pa.struct([("split", pa.string()), ("index", pa.int64())])),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a folder of miniature data holds; stored beside the files as ``manifest.json``."""

    setting: Setting
    """``hard``, ``easy`` or ``tools``."""
    k: int
    """Operations per problem."""
    seed: int
    """Seed of the training problems; the held-out ones are the same for every seed."""
    rows: dict[str, int]
    """File name to number of problems."""
    traces: int
    """Problems with an expert trace."""


def write(
    out_dir: Path,
    setting: Setting = "hard",
    *,
    seed: int = 0,
    traces: int = 4,
    fresh: int = 2048,
    train: int = 2048,
    held_out: int = HELD_OUT,
) -> Manifest:
    """Writes the files of one setting and returns their manifest.

    - ``hard`` (k=8): ``expert.parquet`` (``traces`` problems with a trace), ``fresh.parquet``
      (``fresh`` problems with an answer and a null target), ``heldout.parquet``;
    - ``easy`` (k=4): ``train.parquet`` (``train`` problems with a null target),
      ``expert.parquet`` (``traces`` further ones with a trace), ``heldout.parquet``;
    - ``tools`` (one product, see ``tools/problems.py``): ``train.parquet`` (``train`` problems),
      ``heldout.parquet``.

    All problems of a setting differ. The held-out ones depend on ``held_out`` alone, so that runs
    with different seeds are compared on the same problems. 250 updates with 4 fresh prompts each
    use 1,000; the default leaves as many again for an asynchronous run to draw ahead.

    Each file appears whole, the manifest last. Writing the same data again changes nothing.
    Raises ``DataError``, before writing anything, when a file of the same name holds other data.
    """
    if setting not in OPERATIONS:
        raise DataError(f"setting {setting!r} is not one of {', '.join(OPERATIONS)}")
    k = OPERATIONS[setting]
    if setting == "tools":
        tables = _products(seed=seed, train=train, held_out=held_out)
        traces = 0
    else:
        tables = _chains(
            setting, seed=seed, traces=traces, fresh=fresh, train=train, held_out=held_out
        )
    manifest = Manifest(
        setting=setting,
        k=k,
        seed=seed,
        rows={name: content.num_rows for name, content in tables.items()},
        traces=traces,
    )

    missing = [name for name, content in tables.items() if not _holds(out_dir / name, content)]
    out_dir.mkdir(parents=True, exist_ok=True)
    for name in missing:
        write_atomic(out_dir / name, _encoded(tables[name]))
    text = json.dumps(asdict(manifest), indent=2) + "\n"
    path = out_dir / MANIFEST
    if missing or not path.exists() or path.read_text() != text:
        write_atomic(path, text)
    return manifest


def _chains(
    setting: Setting, *, seed: int, traces: int, fresh: int, train: int, held_out: int
) -> dict[str, pa.Table]:
    """The files of ``hard`` or ``easy``."""
    k = OPERATIONS[setting]
    held = distinct(Random(f"miniature {k} held out"), k, held_out)
    rng = Random(f"miniature {k} {seed}")
    tables: dict[str, pa.Table] = {}
    if setting == "hard":
        drawn = distinct(rng, k, traces + fresh, exclude=held)
        tables |= {
            "expert.parquet": table(drawn[:traces], split="expert", with_target=True),
            "fresh.parquet": table(drawn[traces:], split="fresh", with_target=False),
        }
    else:
        drawn = distinct(rng, k, train + traces, exclude=held)
        tables |= {
            "train.parquet": table(drawn[:train], split="train", with_target=False),
            "expert.parquet": table(drawn[train:], split="expert", with_target=True),
        }
    tables["heldout.parquet"] = table(held, split="heldout", with_target=False)
    return tables


def _products(*, seed: int, train: int, held_out: int) -> dict[str, pa.Table]:
    """The files of ``tools``."""
    held = products.distinct(Random("miniature tools held out"), held_out)
    drawn = products.distinct(Random(f"miniature tools {seed}"), train, exclude=held)
    return {
        f"{split}.parquet": _rows(split, [(p.question, None, p.answer) for p in problems])
        for split, problems in (("train", drawn), ("heldout", held))
    }


def table(problems: Sequence[Problem], *, split: str, with_target: bool) -> pa.Table:
    """The problems as rows of ``SCHEMA``, with the full right response as target or with null."""
    return _rows(
        split, [(p.prompt, p.response if with_target else None, p.answer) for p in problems]
    )


def _rows(split: str, problems: Sequence[tuple[str, str | None, str]]) -> pa.Table:
    """Rows of ``SCHEMA`` of prompts, targets and answers."""
    rows = [
        {
            "data_source": "miniature",
            "prompt": [{"role": "user", "content": prompt}],
            "target": None if target is None else [{"role": "assistant", "content": target}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": split, "index": index},
        }
        for index, (prompt, target, answer) in enumerate(problems)
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def _holds(path: Path, content: pa.Table) -> bool:
    """Whether the file holds these rows already; ``DataError`` if it holds others."""
    if not path.exists():
        return False
    try:
        same = pq.read_table(path).equals(content)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(
            f"{path} can't be read as parquet ({error}): remove it, or name another folder"
        ) from error
    if not same:
        raise DataError(
            f"{path} holds other data than was asked for: remove it, or name another folder"
        )
    return True


def _encoded(content: pa.Table) -> bytes:
    made = io.BytesIO()
    pq.write_table(content, made)
    return made.getvalue()
