"""``data``: problems, expert traces and held-out sets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from .. import evaluation_sets, templates
from .section import Below1, NonNegative, Positive, Section

FILE = "file:"
"""What a text begins with that is in a file."""


class PairsConfig(Section):
    """Which right and which wrong samples of an archive's problem become a chosen and a rejected response."""

    rule: Literal["nearest_length", "random", "all", "shortest", "longest"] = "nearest_length"
    """``nearest_length``: those nearest in tokens, each sample in at most one pair. ``random``: drawn by the
    seed, each in at most one. ``all``: every right one with every wrong one. ``shortest``, ``longest``: the
    shortest or longest right one with every wrong one."""
    seed: NonNegative = 0
    """Decides between pairs that the rule likes equally."""
    per_problem: Positive | None = None
    """Greatest number of pairs of a problem, the first by the rule, then by the seed; null = all."""
    max_length_gap: NonNegative | None = None
    """Greatest difference of a pair's lengths in tokens; 0 = only pairs that their lengths can't tell apart,
    null = any."""


class SourceConfig(Section):
    """One data file, a folder of them, or an archive: problems, with or without responses to learn from."""

    path: str
    """Relative to the working directory; ``{run}`` stands for the run's folder."""
    name: str | None = None
    """Short name for metrics and ids; null = the file's stem."""
    form: str | None = None
    """Form of its rows, by name or as ``package.module:function``; null = found by the columns."""
    turns: Literal["last", "all"] = "last"
    """Answers of a conversation that are learned from: the ``last`` one, whose prompt is all that stands before it, or
    ``all``, whose prompt is what stands before the first one; users, tools and the chat template are then masked."""
    weight: Positive = 1
    """Problems that are taken from this source for each ``weight`` of the others."""
    limit: Positive | None = None
    """Use only this many problems; null = all."""
    seed: NonNegative | None = None
    """Draws the ``limit`` problems at random, so that fewer of the same seed are a part of more; null =
    the first ones."""
    correct_only: bool = False
    """Leave out rows whose response isn't correct, or that have none."""
    max_target_tokens: Positive | None = None
    """Leave out rows whose response has more tokens; null = any number."""
    regrade: bool = False
    """Grade an archive's samples anew by this run's reward; else they keep their verdicts and rewards."""
    pairs: PairsConfig | None = None
    """How pairs are made of an archive's samples for objectives that learn from worse responses; null =
    ``nearest_length``."""

    @property
    def short_name(self) -> str:
        """The given name, or the stem of the path."""
        return self.name or Path(self.path).stem


class EvalSetConfig(Section):
    """One held-out set, or benchmark. What it leaves at null is the run's."""

    path: str
    """A data file or a folder of them; ``{run}`` stands for the run's folder."""
    name: str = "heldout"
    """Name of the set in metrics."""
    form: str | None = None
    """As for a source."""
    limit: Positive | None = None
    """Use only this many problems, the first ones; null = all."""
    rows: Positive | None = None
    """Number of rows without which it isn't the set that was meant; null = any number."""
    revision: str | None = None
    """Branch, tag or commit of a set of the hub; null = the newest."""
    repeated: bool | None = None
    """Whether rows with the same prompt and gold answer are samples of one problem, as in LUFFY's files: it
    then gets so many times the samples. null = for each source in which every prompt is there equally often,
    and more than once."""
    subject: str | None = None
    """Column that says what a problem is about; null = ``subject``, ``category`` or ``type``."""
    level: str | None = None
    """Column that says how hard it is; null = ``level`` or ``difficulty``."""
    template: str | None = None
    """``data.template`` for this set, whose stop strings then count too."""
    stop: tuple[str, ...] | None = None
    """``data.stop`` for this set."""
    mode: str | None = None
    """``reward.mode`` for this set: how answers are read and compared."""
    graded: bool = True
    """Whether answers are graded; false for sets without gold answers, such as instructions for a judge."""
    samples: Positive | None = None
    """``evaluate.samples`` for this set."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """``evaluate.temperature`` for this set."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """``evaluate.top_p`` for this set."""
    max_new_tokens: Positive | None = None
    """``rollout.max_new_tokens`` for this set: the greatest length of a response in tokens."""

    @property
    def short_name(self) -> str:
        """Name of the set in metrics and reports."""
        return self.name


class DataConfig(Section):
    """Problems, expert traces and held-out sets."""

    train: tuple[SourceConfig, ...] = ()
    """Sources of problems, mixed by ``weight``, each in its own seeded permutation."""
    evaluate: tuple[EvalSetConfig, ...] = ()
    """Held-out sets; a known one may be given by its name (``tandem/common/evaluation_sets.yaml``), or by its name and
    settings of its own."""
    archive: str | None = None
    """Folder of an archive (``tandem archive``, or a run's ``archive/``) whose groups are trained on instead
    of single traces, with ``learner.source=offline``: its steps in order, again and again if there are more."""
    heldout_pairs: Below1 = 0.0
    """Share of the prompts whose pairs aren't trained on but measured, at evaluations and at the end of an offline
    run of a preference objective; drawn by ``run.seed``."""
    miniature: Literal["hard", "easy", "tools"] | None = None
    """Write the miniature's parquet files into ``{run}/data`` before anything reads them."""
    miniature_traces: NonNegative = 4
    """Problems with an expert trace that the miniature writes."""
    miniature_fresh: Positive = 1200
    """Number of problems without a trace that the miniature writes."""
    template: str = "own"
    """Template of the prompts: ``own`` (the model's chat template), ``none`` (only the messages' contents),
    ``qwen``, ``simplerl``, ``prime``, ``r1_zero``, ``alpaca``, ``question_only``, or the path of a text file
    with one ``{question}``. All but the first two leave out the rows' system messages."""
    system_prompt: str | None = None
    """A system prompt for rows that have none of their own. ``file:PATH`` stands for the text of a file without the
    line break at its end."""
    remove_system: bool = False
    """Leave out the rows' own system messages."""
    prefill: str = ""
    """What the response begins with, as in ``<think>``; the end of the prompt."""
    stop: tuple[str, ...] | None = None
    """Strings that end a response, and stay at its end; null = those of the template."""
    pack_tokens: Positive | None = None
    """Length of the blocks to which the documents of all sources (prompt and response) are joined and cut;
    null = they stay apart. For ``sft`` on stored responses alone, which then learns from all tokens."""
    max_prompt_tokens: Positive = 1024
    """Greatest length of a prompt in tokens; ``overlong`` says what happens to longer ones."""
    overlong: Literal["drop", "refuse"] = "drop"
    """Drop (and count) or refuse prompts and traces that are over their limits; they are never cut."""
    bad_rows: Literal["leave_out", "refuse"] = "leave_out"
    """Leave out (and count) rows that can't be used, or refuse the data set: rows that are malformed, whose
    prompt the template refuses, or whose gold answer is missing or can't be read by the grader."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end a response."""
        return templates.named(self.template).stop if self.stop is None else self.stop

    @property
    def opener(self) -> str:
        """How prompts end, and so what responses go on from."""
        return templates.named(self.template).opener + self.prefill

    @model_validator(mode="after")
    def _usable(self) -> DataConfig:
        for stop in (self.stop, *(one.stop for one in self.evaluate)):
            if "" in (stop or ()):
                raise ValueError("stop has an empty string, which would end every response")
        return self

    @model_validator(mode="before")
    @classmethod
    def _older(cls, given: Any) -> Any:
        """Older runs have ``bad_golds: drop | refuse``."""
        if not isinstance(given, Mapping) or "bad_golds" not in given:
            return given
        rest = {name: value for name, value in given.items() if name != "bad_golds"}
        bad_rows = "refuse" if given["bad_golds"] == "refuse" else "leave_out"
        return {"bad_rows": bad_rows, **rest}

    @field_validator("system_prompt")
    @classmethod
    def _of_file(cls, given: str | None) -> str | None:
        """Puts a file's text in the place of its name, since other hosts and later commands may not have the file."""
        if given is None or not given.startswith(FILE):
            return given
        name = given.removeprefix(FILE)
        try:
            with open(Path(name).expanduser(), encoding="utf-8", newline="") as file:
                text = file.read(templates.MAX_CHARACTERS + 1)
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it isn't UTF-8"
            raise ValueError(f"the file {name} can't be read: {why}") from None
        if len(text) > templates.MAX_CHARACTERS:
            raise ValueError(f"{name} has more than {templates.MAX_CHARACTERS:,} characters")
        if text.startswith(FILE):
            raise ValueError(f"{name} begins with {FILE}, which would name another file")
        return text.removesuffix("\n").removesuffix("\r")

    @field_validator("evaluate", mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        """Puts known sets in the place of their names."""
        return evaluation_sets.entries(given)
