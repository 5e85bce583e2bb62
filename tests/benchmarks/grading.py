"""Verdicts a second and core: the grader beside bare math-verify, on the same texts in one run.

    .venv/bin/python tests/benchmarks/grading.py
    .venv/bin/python tests/benchmarks/grading.py --hangs 8 --good 200 --graders 4
    .venv/bin/python tests/benchmarks/grading.py --engines

The texts are those of ``responses.py``. Bare math-verify is ``verify(parse(gold), parse(text))``
on the whole text, as most trainers call it. Times are CPU seconds of all processes that take part,
so that other things that the machine does hardly matter; starting them is left out. "Without the cache"
is every text by itself, "with it" all eight of each group in the order in which they would come.
``--engines`` leaves out one engine of the comparison after the other, and shows what each is there
for: facts (``tests/reward/answers/facts``) whose verdict is wrong without it, and texts that a grader
process must compare instead.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import psutil
from responses import GROUP, Response, responses

from tandem.common.config import RewardConfig
from tandem.common.records import FinishReason, Verdict
from tandem.reward.answers import comparison
from tandem.reward.grading import Grade, GradeItem, Grader

FACTS = Path(__file__).parents[1] / "reward" / "answers" / "facts"
HANG = "(x+y+z+w+v+1)^{97}"


def cpu_seconds(grader: Grader) -> float:
    """Of this process, the graders and their parent, so far."""
    pids = [*grader.grader_pids(), grader.zygote_pid()]
    processes = [psutil.Process(), *(psutil.Process(pid) for pid in pids if pid)]
    return sum(sum(p.cpu_times()[:2]) for p in processes)


def item(response: Response) -> GradeItem:
    """As the pool would have it."""
    reason = FinishReason.LENGTH if response.truncated else FinishReason.STOP
    return GradeItem(text=response.text, gold=response.gold, finish_reason=reason)


def bare(group: Sequence[Response]) -> tuple[list[bool], float]:
    """math-verify's verdicts on whole texts, and its CPU seconds."""
    from math_verify import parse, verify

    start = time.process_time()
    found = [bool(verify(parse(f"${r.gold}$"), parse(r.text))) for r in group]
    return found, time.process_time() - start


def ours(grader: Grader, texts: Sequence[Response]) -> tuple[list[Grade], float]:
    """The grader's grades, and the CPU seconds of all its processes."""
    items = [item(text) for text in texts]
    start = cpu_seconds(grader)
    grades = grader.grade_texts(items)
    return grades, cpu_seconds(grader) - start


def throughput(problems: int, seed: int) -> None:
    """Prints the table."""
    logging.disable(logging.WARNING)
    groups = responses(problems, seed)
    texts = [text for group in groups for text in group]
    characters = statistics.fmean(len(text.text) for text in texts)
    print(f"{len(texts):,} texts of {characters:,.0f} characters, {problems:,} groups of {GROUP}")
    bare(groups[0])  # Loads what is loaded lazily.
    theirs, bare_seconds = bare(texts)
    with Grader(RewardConfig(graders=1, deadline_seconds=30.0)) as grader:
        grader.canary()
        grader.grade_texts([item(text) for text in groups[0]])
        alone_seconds = 0.0
        for place in range(GROUP):
            # No two of these are of one problem, and none was seen before.
            grader.forget()
            alone_seconds += ours(grader, [group[place] for group in groups])[1]
        grader.forget()
        before = grader.stats()
        grades, cached_seconds = ours(grader, texts)
        after = grader.stats()
    rates = [len(texts) / s for s in (bare_seconds, alone_seconds, cached_seconds)]
    compared = after["to_process"] - before.get("to_process", 0)
    print(f"compared in a grader process: {compared / len(texts):.1%} of the texts with the cache")
    print("\n| | verdicts/s and core | of bare math-verify |\n|---|---|---|")
    names = ("math-verify on the whole text", "grader, without its cache", "grader")
    for name, rate in zip(names, rates, strict=True):
        print(f"| {name} | {rate:,.0f} | {rate / rates[0]:.1f} |")
    agreement(texts, theirs, [grade.verdict is Verdict.CORRECT for grade in grades])


def agreement(texts: Sequence[Response], theirs: Sequence[bool], paid: Sequence[bool]) -> None:
    """Prints by kind how often the two agree with what is known, and each disagreement."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    differ: Counter[tuple[str, str, str, bool, bool]] = Counter()
    for text, bare_says, we_say in zip(texts, theirs, paid, strict=True):
        rows[text.kind].update(
            texts=1,
            bare=bare_says == text.right,
            ours=we_say == text.right,
            same=bare_says == we_say,
        )
        if bare_says != we_say:
            end = text.text[-60:].replace("\n", " ")
            differ[(text.kind, end, text.gold, bare_says, we_say)] += 1
    print("\n| answers | texts | same verdict | math-verify is right | the grader is right |")
    print("|---|---|---|---|---|")
    for kind, row in rows.items():
        shares = " | ".join(f"{row[name] / row['texts']:.1%}" for name in ("same", "bare", "ours"))
        print(f"| {kind} | {row['texts']:,} | {shares} |")
    print(f"\n{sum(differ.values())} differ:")
    for (kind, end, gold, bare_says, we_say), count in differ.most_common(20):
        print(
            f"  {count} x {kind}: …{end!r} for {gold!r}: math-verify {bare_says}, grader {we_say}"
        )


def facts() -> list[tuple[GradeItem, bool]]:
    """The facts of the tests, and whether each is right."""
    found = []
    for name in ("upstream", "neighbours", "responses"):
        for line in (FACTS / f"{name}.jsonl").read_text("utf-8").splitlines():
            row = json.loads(line)
            text = row.get("response", f"</think> $\\boxed{{{row.get('answer')}}}$")
            right = row.get("ours", row.get("upstream", row.get("right")))
            found.append((GradeItem(text=text, gold=row["gold"]), right))
    return found


def settled(grader: Grader, items: Sequence[GradeItem]) -> list[comparison.Decision | None]:
    """What the dispatcher settles of each."""
    found = []
    for given in items:
        truncated = given.finish_reason is not FinishReason.STOP
        answer = grader.mode.read(given.text, given.prompt_text, truncated).answer
        found.append(comparison.decide(answer, given.gold, grader.mode))
    return found


def engines(problems: int, seed: int) -> None:
    """Prints what changes where one engine is left out."""
    logging.disable(logging.WARNING)
    known = facts()
    texts = [item(text) for group in responses(problems, seed) for text in group]
    with Grader(RewardConfig(graders=2, deadline_seconds=30.0)) as grader:
        grader.canary()
        every = comparison.ENGINES
        usual = settled(grader, [given for given, _ in known])
        usual_left = sum(found is None for found in settled(grader, texts))
        print(f"{len(known):,} facts; {usual_left} of {len(texts):,} texts go to a grader process")
        print("\n| without | facts settled otherwise | of them wrong | texts more to a process |")
        print("|---|---|---|---|")
        for left_out in every:
            comparison.ENGINES = tuple(engine for engine in every if engine is not left_out)
            otherwise = settled(grader, [given for given, _ in known])
            changed = [
                known[place] for place in range(len(known)) if usual[place] != otherwise[place]
            ]
            grades = grader.grade_texts([given for given, _ in changed])
            wrong = sum(
                (grade.verdict is Verdict.CORRECT) is not right
                for grade, (_, right) in zip(grades, changed, strict=True)
            )
            more = sum(found is None for found in settled(grader, texts)) - usual_left
            name = f"{left_out[0]} ({left_out[1].__name__})"
            print(f"| {name} | {len(changed)} | {wrong} | {more} |")
            grader.forget()
        comparison.ENGINES = every


def hangs(count: int, good: int, graders: int, deadline: float) -> None:
    """Prints how long K hangs among M good requests take, and the bound."""
    texts = [f"</think>\\boxed{{{HANG}}}"] * count
    golds = [f"{n}x+1" for n in range(2, 2 + count)]
    # In j, which may be an imaginary unit: for a grader process to say.
    texts += [f"</think>\\boxed{{{n} + j}}" for n in range(2, 2 + good)]
    golds += [f"j + {n}" for n in range(2, 2 + good)]
    items = [GradeItem(text=t, gold=g) for t, g in zip(texts, golds, strict=True)]
    with Grader(RewardConfig(graders=graders, deadline_seconds=deadline)) as grader:
        grader.canary()
        grader.wait(lambda: len(grader.grader_pids()) == graders, "all graders")
        start = time.monotonic()
        verdicts = Counter(grade.verdict.value for grade in grader.grade_texts(items))
        seconds = time.monotonic() - start
    bound = math.ceil(count / graders) * deadline + 1.0
    print(
        f"{count} hangs, {good} good, {graders} graders, deadline {deadline:g} s: {seconds:.2f} s"
    )
    print(f"bound {bound:g} s; verdicts {dict(verdicts)}")


def main() -> None:
    """Reads the command line and runs one of the three."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--problems", type=int, default=250, help="groups of eight (default 250)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hangs", type=int, help="measure K hangs among good requests instead")
    parser.add_argument("--good", type=int, default=200)
    parser.add_argument("--graders", type=int, default=4)
    parser.add_argument("--deadline", type=float, default=2.0)
    parser.add_argument("--engines", action="store_true", help="leave out one engine after another")
    given = parser.parse_args()
    if given.engines:
        engines(given.problems, given.seed)
    elif given.hangs is not None:
        hangs(given.hangs, given.good, given.graders, given.deadline)
    else:
        throughput(given.problems, given.seed)


if __name__ == "__main__":
    main()
