"""A snapshot printed once, as ``tandem status`` does: the view, then what it has no room for."""

from __future__ import annotations

import os
from typing import TextIO

from rich.color import ColorSystem

from .painter import Painter, plain
from .snapshot import Snapshot
from .tty import has_blocks, has_colour, wants_live
from .view import ASCII, UNICODE, draw

COLUMNS = 100
"""Where it isn't printed to a terminal."""
MOST = 10
"""Restarts, evaluations and groups given up that are listed, the newest."""


def show(snapshot: Snapshot, stream: TextIO) -> None:
    """Prints it; in colour on a terminal that has any."""
    live = wants_live(stream)
    columns = os.get_terminal_size(stream.fileno()).columns if live else COLUMNS
    glyphs = UNICODE if has_blocks(stream) else ASCII
    painter = Painter(ColorSystem.STANDARD if live and has_colour() else None)
    lines = draw(snapshot, columns - 1, glyphs=glyphs)
    stream.write(painter.paint(lines, [], columns).replace("\r\n", "\n"))
    for line in more(snapshot):
        stream.write(plain(line) + "\n")


def more(snapshot: Snapshot) -> list[str]:
    """What the view leaves out."""
    told = []
    if snapshot.supervisor:
        told.append(f"supervisor: process {snapshot.supervisor}")
    if snapshot.waiting_for:
        told.append(snapshot.waiting_for)
    for member in snapshot.members:
        version = f"  version {member.version[0]}.{member.version[1]}" if member.version else ""
        idle = f"  idle {member.idle:.0%}" if member.idle is not None else ""
        waits = f"  ({member.waiting_for})" if member.waiting_for else ""
        told.append(
            f"  {member.member:<14} pid {member.pid} on {member.host}  heard of "
            f"{member.age:.1f} s ago{version}{idle}{waits}"
        )
    for one in snapshot.evaluations[-MOST:]:
        told.append(f"  {one.set} at step {one.step}: {100 * one.accuracy:.1f}% of {one.problems}")
    for letter in snapshot.dead_letters[-MOST:]:
        told.append(f"given up: {dict(letter)}")
    for restart in snapshot.restarts[-MOST:]:
        told.append(f"restart: {restart['process']} at {restart['time']} ({restart['exit']})")
    return told
