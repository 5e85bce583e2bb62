"""A process that draws a made-up run: its steps and messages are what its file says.

``python drawn.py FILE``: the file's first line is the step, each further one is a message, until
one is ``end``. From one that is ``unreadable`` on, the run's figures can't be read.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from board_examples import snapshot

from tandem.launch.board.snapshot import Snapshot
from tandem.launch.board.terminal import Terminal


def main(path: Path) -> None:
    made = snapshot()

    def look() -> Snapshot:
        step, *messages = path.read_text().splitlines()
        if "unreadable" in messages:
            raise PermissionError(13, "Permission denied", "metrics.jsonl")
        return replace(made, step=int(step))

    terminal = Terminal()
    terminal.say("said before")
    terminal.go_live(look)
    told = 1
    while True:
        lines = path.read_text().splitlines()
        for line in lines[told:]:
            if line == "end":
                terminal.end_live()
                terminal.say("said after")
                return
            terminal.say(line)
        told = len(lines)
        time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
