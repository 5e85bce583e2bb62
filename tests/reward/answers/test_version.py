"""A change of what decides over answers raises the graders' version: nobody may forget it.

Samples record the grader's name and version, and a re-grading takes those of older versions anew;
a verdict that changed under the same version would be taken for the newer one.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from tandem import reward
from tandem.reward.reading import modes

RECORDED = (4, "1ce583c20f9cdd01")
"""The version, and the digest of ``reward/reading/`` and ``reward/answers/`` when it was last
looked at."""


def test_files_that_decide_have_the_version_that_was_recorded_with_them() -> None:
    room = Path(reward.__file__).parent
    files = sorted([*room.glob("reading/*.py"), *room.glob("answers/*.py")])
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.stem}\n{file.read_text('utf-8')}".encode())
    now = (modes.GRADER_VERSION, digest.hexdigest()[:16])
    assert now == RECORDED, (
        f"a file that decides over answers has changed. If any verdict may be another one, raise "
        f"GRADER_VERSION in reward/reading/modes.py; then write RECORDED = {now} here"
    )
