"""Draws a snapshot as lines of text for a terminal of any width: a pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from ...common.printable import printable
from ..wording import duration, human
from .history import of_first
from .snapshot import Episodes, Grading, Judging, MemberStanding, RoleStanding, Snapshot

LABEL = 11
"""Columns of a line's label."""
SILENT_SECONDS = 10.0
"""A member whose last heartbeat is older is pointed out."""
NARROWEST = 40
"""Lines are laid out for at least this many columns, and cut if there are fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """What bars and curves are drawn with."""

    full: str
    """The filled part of a bar."""
    empty: str
    """The empty part of a bar."""
    curve: str
    """Heights of a curve, lowest first."""
    rule: str
    """The character of a horizontal line."""
    dot: str
    """The separator between two facts."""


UNICODE = Glyphs(full="━", empty="─", curve="▁▂▃▄▅▆▇█", rule="─", dot="·")
ASCII = Glyphs(full="#", empty=".", curve="_.-=+*%#", rule="-", dot="|")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line, and how soon it is left out of a low window."""

    text: Text
    """The line without a newline, no wider than the window."""
    weight: int
    """Lines with the highest weight are left out first."""


def draw(
    snapshot: Snapshot, width: int, height: int | None = None, glyphs: Glyphs = UNICODE
) -> list[Text]:
    """The lines of a snapshot.

    Args:
        snapshot: the state of the run.
        width: columns; no line is wider.
        height: most lines; the least important are left out. None = all.
        glyphs: :data:`ASCII` for a terminal without block characters.
    """
    pen = _Pen(max(width, NARROWEST), glyphs)
    lines = pen.lines(snapshot)
    while height is not None and len(lines) > max(1, height):
        lines.remove(max(lines, key=lambda line: line.weight))
    texts = [_seen(line.text) for line in lines]
    for text in texts:
        text.no_wrap = True
        text.rstrip()
        text.truncate(width)
    return texts


def _seen(text: Text) -> Text:
    """A text without control characters, which could move the cursor; it then has no colours either."""
    return text if text.plain.isprintable() else Text(printable(text.plain).replace("\n", " "))


class _Pen:
    def __init__(self, width: int, glyphs: Glyphs) -> None:
        self._width = width
        self._glyphs = glyphs

    def lines(self, s: Snapshot) -> list[Line]:
        lines = [
            Line(text=self._title(s), weight=2),
            Line(text=self._steps(s), weight=0),
            Line(text=self._reward(s), weight=1),
        ]
        if held_out := self._held_out(s):
            lines.append(Line(text=held_out, weight=1))
        lines.append(Line(text=self._tokens(s), weight=4))
        if any(s.ledger.values()):
            lines += [Line(text=t, weight=5 + n) for n, t in enumerate(self._queues(s))]
        if s.staleness.mean is not None:
            lines.append(Line(text=self._staleness(s), weight=6))
        if "learner_peak_bytes" in s.memory_peaks or any(m.memory for m in s.members):
            lines.append(Line(text=self._memory(s), weight=7))
        for number, role in enumerate(s.roles):
            lines.append(Line(text=self._role(role, number == 0), weight=3))
        lines += [Line(text=text, weight=7) for text in self._members(s.members)]
        if s.episodes is not None:
            lines.append(Line(text=self._episodes(s.episodes), weight=5))
        if s.grading is not None and s.grading.to_process:
            lines.append(Line(text=self._grading(s.grading), weight=8))
        if s.grading is not None and s.grading.judge is not None:
            lines.append(Line(text=self._judge(s.grading.judge), weight=7))
        lines.append(Line(text=self._restarts(s), weight=2))
        for alarm in s.alarms:
            lines.append(Line(text=self._labelled("alarm").append(alarm, "bold red"), weight=1))
        if s.problem:
            text = self._labelled("redis").append(s.problem, "yellow")
            lines.append(Line(text=text, weight=1))
        return lines

    # One line each.

    def _title(self, s: Snapshot) -> Text:
        text = Text().append(f"{self._glyphs.rule} ", "dim")
        text.append(s.preset or "run", "bold cyan")
        for fact in (s.run, s.state):
            if fact:
                text.append(f" {self._glyphs.dot} ", "dim").append(fact)
        if s.elapsed_seconds is not None:
            text.append(f" {self._glyphs.dot} ", "dim").append(duration(s.elapsed_seconds))
        text.append(" ")
        text.append(self._glyphs.rule * max(0, self._width - text.cell_len), "dim")
        return text

    def _steps(self, s: Snapshot) -> Text:
        text = self._labelled("step")
        text.append(f"{s.step:,}", "bold")
        if s.total_steps:
            text.append(f"/{s.total_steps:,} ")
            wide = max(8, self._width - 56)
            self._bar(text, s.step / s.total_steps, wide)
            text.append(f" {min(1.0, s.step / s.total_steps):4.0%}")
        if s.seconds_per_step:
            pace = s.seconds_per_step
            text.append(f"  {pace:.1f} s/step" if pace >= 1 else f"  {1 / pace:.1f} steps/s")
        if s.seconds_left is not None:
            text.append("  ").append(duration(s.seconds_left), "bold").append(" left")
        return text

    def _reward(self, s: Snapshot) -> Text:
        text = self._labelled("reward" if s.reward is not None or s.loss is None else "loss")
        value = s.reward if s.reward is not None else s.loss
        text.append("-" if value is None else f"{value:.3f}", "bold")
        if s.rewards:
            text.append("  ").append(self._curve(s.rewards, self._width - 60), "cyan")
        if s.zero_variance is not None:
            text.append("  no signal in ").append(f"{s.zero_variance:.0%}", "bold")
            text.append(" of groups")
        return text

    def _held_out(self, s: Snapshot) -> Text | None:
        name, evaluations = of_first(s.evaluations, s.held_out)
        if not evaluations:
            return None
        last, of = evaluations[-1], f" of {name}" if name else ""
        text = self._labelled("held-out")
        text.append(f"{last.accuracy:.1%}", "bold green").append(f" at step {last.step:,}")
        text.append(f" ({last.problems:,} problems{of})  ", "dim")
        values = [one.accuracy for one in evaluations]
        text.append(self._curve(values, self._width - 62 - len(of), top=1.0), "green")
        room = (self._width - text.cell_len - 2) // 6
        shown = [f"{100 * value:.1f}" for value in values[-max(0, min(room, 8)) :]]
        if room > 0 and len(values) > 1:
            text.append("  " + " ".join(shown), "dim")
        return text

    def _tokens(self, s: Snapshot) -> Text:
        text = self._labelled("tokens")
        facts = [
            ("sampled", s.tokens_sampled_per_second, "{:,.0f}/s"),
            ("trained", s.tokens_trained_per_second, "{:,.0f}/s"),
            ("length", s.response_length, "{:,.1f}"),
            ("entropy", s.entropy, "{:.3f}"),
        ]
        return self._facts(text, [(n, f.format(v)) for n, v, f in facts if v is not None])

    def _queues(self, s: Snapshot) -> list[Text]:
        q = s.queues
        first = [
            ("leased", q.leased),
            ("submitted", q.submitted),
            ("grading", q.grading),
            ("graded", q.graded),
            ("taken", q.taken),
        ]
        rejected = sum(count for state, count in s.ledger.items() if state.startswith("rejected"))
        second = [
            ("trained", s.ledger.get("trained", 0)),
            ("to lease again", q.returned),
            ("rejected", rejected),
            ("evaluations due", q.evaluations),
        ]
        return [
            self._facts(self._labelled("groups"), [(n, f"{v:,}") for n, v in first]),
            self._facts(self._labelled(""), [(n, f"{v:,}") for n, v in second]),
        ]

    def _staleness(self, s: Snapshot) -> Text:
        ages = s.staleness
        text = self._labelled("staleness")
        text.append(f"{ages.mean:.1f}", "bold").append(" steps ")
        if ages.limit is not None:
            text.append(f"(limit {ages.limit}) ", "dim")
        shares = ages.shares
        each = max(3, min(16, (self._width - text.cell_len) // max(1, len(shares)) - 10))
        for age, share in enumerate(shares):
            more = "+" if age == 8 else ""
            text.append(f" {age}{more} ", "dim")
            full = round(share * each)
            text.append(self._glyphs.full * full, "magenta")
            text.append(f"{' ' if full else ''}{share:.0%} ")
        return text

    def _episodes(self, episodes: Episodes) -> Text:
        played = max(1, episodes.played)
        spent = episodes.environment_seconds + episodes.model_seconds
        facts = [
            ("under way", f"{episodes.under_way:,}"),
            ("played", f"{episodes.played:,}"),
            ("failed", f"{episodes.failed / played:.1%}"),
            ("turns", f"{episodes.turns / played:.1f}"),
            ("in environments", f"{episodes.environment_seconds / spent:.0%}" if spent else "-"),
        ]
        return self._facts(self._labelled("episodes"), facts)

    def _grading(self, grading: Grading) -> Text:
        compared = grading.to_process + grading.cached
        facts = [
            ("compared", f"{grading.to_process:,}"),
            ("cached", f"{grading.cached / compared:.0%}"),
            ("each", f"{1000 * grading.seconds:.1f} ms"),
            ("waited", f"{1000 * grading.queue_wait:.1f} ms"),
            ("hung", f"{grading.hang_share:.1%}"),
        ]
        return self._facts(self._labelled("grading"), facts)

    def _judge(self, judge: Judging) -> Text:
        facts = [
            ("asked", f"{judge.asked:,}"),
            ("waiting", f"{judge.waiting:,}"),
            ("each", f"{judge.seconds:.1f} s"),
            ("retries", f"{judge.retries:,}"),
            ("failed", f"{judge.failed:,} ({judge.failed_share:.1%} lately)"),
        ]
        return self._facts(self._labelled("judge"), facts)

    def _memory(self, s: Snapshot) -> Text:
        """The peaks of the learner's latest step and of the worker with the most."""
        names = ("peak", "weights", "gradients", "optimizer", "activations")
        sizes = [(name, s.memory_peaks.get(f"learner_{name}_bytes")) for name in names]
        facts = [("learner" if n == "peak" else n, human(v)) for n, v in sizes if v is not None]
        held = [m.memory or 0 for m in s.members if m.role == "rollout"]
        most = max(held, default=0) or s.memory_peaks.get("rollout_peak_bytes", 0.0)
        if most:
            facts.insert(1, ("rollout", human(most)))
        return self._facts(self._labelled("memory"), facts)

    def _role(self, role: RoleStanding, first: bool) -> Text:
        text = self._labelled("idle" if first else "")
        text.append(f"{role.role:<8}")
        if role.idle is None:
            return text.append("   -", "dim")
        text.append(f"{role.idle:4.0%} ", "bold")
        self._bar(text, role.idle, 10 if self._width < 100 else 20)
        if role.waits_for:
            text.append("  waits for ").append(role.waits_for, "bold")
            text.append(f": {role.waits_what}")
        elif role.waits_what:
            text.append(f"  waits for {role.waits_what}")
        elif role.members:
            text.append("  busy", "dim")
        return text

    def _members(self, members: Sequence[MemberStanding]) -> list[Text]:
        """At most two lines of members, and how many more there are."""
        if not members:
            return []
        texts = [self._labelled("processes")]
        for number, member in enumerate(members):
            piece = self._member(member)
            left = len(members) - number
            # The last line keeps room for the number of members left over.
            room = self._width - (6 if len(texts) == 2 and left > 1 else 0)
            if texts[-1].cell_len > LABEL:
                if texts[-1].cell_len + 3 + piece.cell_len <= room:
                    texts[-1].append("   ")
                elif len(texts) == 2:
                    texts[-1].append(f"  +{left}", "dim")
                    break
                else:
                    texts.append(self._labelled(""))
            texts[-1].append_text(piece)
        return texts

    def _member(self, member: MemberStanding) -> Text:
        text = Text(member.member)
        if member.version is not None:
            text.append(f" v{member.version[0]}.{member.version[1]}", "cyan")
        if member.age >= SILENT_SECONDS:
            text.append(f" silent for {member.age:.0f} s", "bold red")
        return text

    def _restarts(self, s: Snapshot) -> Text:
        text = self._labelled("restarts")
        count = len(s.restarts)
        text.append(str(count), "bold yellow" if count else "bold")
        if count:
            last = s.restarts[-1]
            text.append(f"  last: {last.get('process')} ({last.get('exit')})")
            text.append(f" at {str(last.get('time'))[11:19]}", "dim")
        if s.grader_restarts:
            text.append(f"  graders {s.grader_restarts:,}")
        return text

    # Pieces.

    def _labelled(self, name: str) -> Text:
        return Text().append(f" {name:<{LABEL - 1}}", "dim")

    def _facts(self, text: Text, facts: Sequence[tuple[str, str]]) -> Text:
        for number, (name, value) in enumerate(facts):
            if number:
                text.append("   ")
            text.append(f"{name} ", "dim").append(value, "bold")
        return text

    def _bar(self, text: Text, share: float, width: int) -> None:
        full = round(min(1.0, max(0.0, share)) * width)
        text.append(self._glyphs.full * full, "cyan")
        text.append(self._glyphs.empty * (width - full), "dim")

    def _curve(self, values: Sequence[float], width: int, top: float | None = None) -> str:
        """The newest values as heights, from the lowest value (or 0) to the highest (or ``top``)."""
        kept = values[-max(4, width) :]
        low = 0.0 if top is not None else min(kept)
        high = max(top or 0.0, max(kept)) if top is not None else max(kept)
        steps = len(self._glyphs.curve) - 1
        span = high - low
        return "".join(
            self._glyphs.curve[round((value - low) / span * steps) if span > 0 else 0]
            for value in kept
        )
