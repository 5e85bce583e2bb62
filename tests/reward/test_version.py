"""A change of what decides over answers raises the graders' version: nobody may forget it.

Samples record the grader's name and version, and a re-grading takes those of older versions anew;
a verdict that changed under the same version would be taken for the newer one.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from tandem.reward import modes

DECIDES = (
    "answers",
    "choices",
    "extraction",
    "formula",
    "guard",
    "latex",
    "modes",
    "numbers",
    "quantities",
    "spelling",
    "structure",
    "symbolic",
    "values",
)
"""Files of ``reward/`` in which a verdict is made."""
RECORDED = (4, "22d8a9468f4e43c6")
"""The version, and the digest of those files when it was last looked at."""


def test_files_that_decide_have_the_version_that_was_recorded_with_them() -> None:
    digest = hashlib.sha256()
    for name in DECIDES:
        source = Path(modes.__file__).with_name(f"{name}.py").read_text("utf-8")
        digest.update(f"{name}\n{source}".encode())
    now = (modes.GRADER_VERSION, digest.hexdigest()[:16])
    assert now == RECORDED, (
        f"reward/ has changed in a file that decides over answers. If any verdict may be another one, "
        f"raise GRADER_VERSION in reward/modes.py; then write RECORDED = {now} here"
    )


def test_every_file_that_decides_is_among_them() -> None:
    """What the verdict's own module draws in from this room, step by step."""
    room = Path(modes.__file__).parent
    seen: set[str] = set()
    left = ["answers", "values", "symbolic"]
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        for line in (room / f"{name}.py").read_text("utf-8").splitlines():
            words = line.split()
            if words[:1] == ["from"] and words[1] == ".":
                left += [word.strip(",()") for word in words[3:]]
            elif words[:1] == ["from"] and words[1].startswith(".") and words[1][1] != ".":
                left.append(words[1][1:])
    assert seen == set(DECIDES)
