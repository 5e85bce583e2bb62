"""Prints a snapshot once for ``tandem status``: the view, then what it has no room for."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, TextIO

from rich.console import Console

from ...common.printable import printable, raw
from ..wording import human
from .history import Evaluated
from .inspection import Inspection
from .snapshot import Snapshot
from .tty import has_blocks, has_colour, wants_live
from .view import ASCII, UNICODE, draw

COLUMNS = 100
"""Columns, unless it is printed to a terminal."""
MOST = 10
"""Number of restarts and evaluations (the newest) and of groups given up (the first) that are listed."""


def show(snapshot: Snapshot, stream: TextIO, inspection: Inspection | None = None) -> None:
    """Prints the snapshot, in colour if the stream is a terminal that has any."""
    live = wants_live(stream)
    columns = os.get_terminal_size(stream.fileno()).columns if live else COLUMNS
    colours: Literal["standard"] | None = "standard" if live and has_colour() else None
    console = Console(file=raw(stream), force_terminal=live, color_system=colours)
    for text in draw(snapshot, columns - 1, glyphs=UNICODE if has_blocks(stream) else ASCII):
        console.print(text, soft_wrap=True)
    for line in more(snapshot, inspection or Inspection()):
        stream.write(printable(line) + "\n")


def more(snapshot: Snapshot, inspection: Inspection) -> list[str]:
    """Lines for what the view leaves out."""
    lines = []
    if snapshot.supervisor:
        lines.append(f"supervisor: process {snapshot.supervisor}")
    if snapshot.waiting_for:
        lines.append(snapshot.waiting_for)
    if any(snapshot.ledger.values()):
        lines.append("ledger: " + _listed(snapshot.ledger, lambda n: f"{n:,}"))
    lines += _inspected(inspection)
    for host in snapshot.hosts:
        lines.append(
            f"host {host.name} ({host.address}): {host.role}, {host.processes} "
            f"process{'es' * (host.processes != 1)}, supervised by pid {host.pid}, last heard of {host.age:.1f} s "
            f"ago{', leaving' * host.leaving}"
        )
    for member in snapshot.members:
        version = f"  version {member.version[0]}.{member.version[1]}" if member.version else ""
        idle = f"  idle {member.idle:.0%}" if member.idle is not None else ""
        waits = f"  ({member.waiting_for})" if member.waiting_for else ""
        held = f"  {human(member.memory)} of memory" if member.memory else ""
        held += f", {human(member.gpu_memory)} of its GPU" if member.gpu_memory else ""
        lines.append(
            f"  {member.member:<14} pid {member.pid} on {member.host}  heard of "
            f"{member.age:.1f} s ago{version}{idle}{held}{waits}"
        )
    for one in snapshot.evaluations[-MOST:]:
        lines.append(
            f"  {one.set} at step {one.step}: {100 * one.accuracy:.1f}% of {one.problems}{_also(one)}"
        )
    lines += _dead_letters(snapshot)
    lines += [f"alarm: {alarm}" for alarm in snapshot.alarms]
    for restart in snapshot.restarts[-MOST:]:
        lines.append(f"restart: {restart['process']} at {restart['time']} ({restart['exit']})")
    lines += [f"note: {note}" for note in inspection.notes]
    return lines


def _also(one: Evaluated) -> str:
    """pass@k and majorities, and the accuracies of sources where there are several."""
    sources = [name for name in one.figures if re.fullmatch("source/.*/accuracy", name)]
    shown = [name for name in one.figures if name.startswith(("pass@", "maj"))]
    shown += sources if len(sources) > 1 else []
    said = (
        f"{name.removeprefix('source/').removesuffix('/accuracy')} {100 * one.figures[name]:.1f}%"
        for name in shown
    )
    return "".join(f", {text}" for text in said)


def _inspected(inspection: Inspection) -> list[str]:
    lines = []
    lease, ages = inspection.oldest_lease, inspection.waiting_ages
    if lease is not None:
        lines.append(
            f"oldest lease: group {lease.group_id}, attempt {lease.attempt}, with {lease.worker} "
            f"for {lease.seconds:.1f} s"
        )
    if ages is not None and (any(ages.counts) or ages.without_own_tokens):
        last = len(ages.counts) - 1
        counts = {f"{age}{'+' * (age == last)}": n for age, n in enumerate(ages.counts)}
        none = ages.without_own_tokens
        lines.append(
            f"graded groups by age in steps: {_listed(counts, str)}"
            + (f"  (and {none:,} of traces alone)" if none else "")
        )
    journal, disk, memory = inspection.journal, inspection.disk, inspection.memory
    if journal is not None:
        steps = ", ".join(map(str, journal.quarantined))
        lines.append(
            f"journal: {journal.rows:,} rows, applied up to step {journal.applied:,}"
            + (f", quarantined: {steps}" if steps else "")
        )
    if memory is not None:
        limit = f" of {human(memory.limit)}" if memory.limit else ""
        about = "about " if memory.estimated else ""
        lines.append(f"redis: {human(memory.used)}{limit}; {about}{_listed(memory.kinds, human)}")
    if disk is not None:
        lines.append(
            f"disk: {human(sum(disk.parts.values()))}, {human(disk.free)} free; "
            f"{_listed(disk.parts, human)}"
        )
    return lines


def _dead_letters(snapshot: Snapshot) -> list[str]:
    groups = [letter for letter in snapshot.dead_letters if "group_id" in letter]
    rows = [letter for letter in snapshot.dead_letters if "group_id" not in letter]
    lines = []
    if groups:
        back = "" if snapshot.state == "finished" else "; `tandem retry` puts them back"
        lines.append(f"given up: {len(groups):,} group(s) after too many failed attempts{back}")
    for letter in groups[:MOST]:
        lines.append(
            f"  {letter['group_id']}: {failures(letter)}, the last in attempt "
            f"{letter['attempt']} with {letter['worker']}: {letter['reason']}"
        )
    if len(groups) > MOST:
        lines.append(f"  and {len(groups) - MOST:,} more (--json lists all)")
    for letter in rows[:MOST]:
        lines.append(f"quarantined: row {letter['step']}: {letter['reason']}")
    if len(rows) > MOST:
        lines.append(f"  and {len(rows) - MOST:,} more quarantined rows (--json lists all)")
    return lines


def failures(letter: Mapping[str, Any]) -> str:
    """How often a group that was given up has failed."""
    count = int(letter["failures"])
    return f"{count} failure{'s' * (count != 1)}"


def _listed(values: Mapping[str, int], form: Callable[[int], str]) -> str:
    """``name value`` of those that aren't 0."""
    shown = (f"{n.replace('_', ' ')} {form(v)}" for n, v in values.items() if v)
    return ", ".join(shown) or "nothing"
