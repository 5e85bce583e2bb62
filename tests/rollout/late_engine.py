"""An engine some of whose samples never end: ``rollout.engine=late_engine:make``.

Of groups whose prompt tokens add up to an even number the first two samples end, the third goes on
for ever and the fourth never begins; of the others no sample ends. Beside it on the path:
``tests/faults/scripted_engine.py``.

With ``TANDEM_ENDLESS_ONCE=GROUP`` only that group's samples never end, the first time that it is
generated.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import numpy as np
from scripted_engine import ScriptedEngine, _Row
from scripted_engine import make as make_scripted

from tandem.common.records import Version
from tandem.rollout.engine import GroupRequest

ENDLESS = 1 << 20


class _Stuck(_Row):
    """A row of which no token is ever sampled."""

    def advance(self, version: Version | None) -> None:
        del version


class LateEngine(ScriptedEngine):
    """See the module."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._once = os.environ.get("TANDEM_ENDLESS_ONCE")
        self._begun: Counter[str] = Counter()

    def _script(self, request: GroupRequest, index: int) -> _Row:
        row = super()._script(request, index)
        if self._once is not None:
            self._begun[request.group_id] += 1
            if request.group_id != self._once or self._begun[self._once] > request.count:
                return row
        elif int(request.prompt_tokens.sum()) % 2 == 0 and index < 2:
            return row
        row.tokens = np.full(ENDLESS, row.tokens[0], np.int32)
        row.logprobs = np.full(ENDLESS, -0.25, np.float32)
        if index == 3:
            return _Stuck(
                tokens=row.tokens, logprobs=row.logprobs, text="", reason=row.reason, prefix=0
            )
        return row


def make(*args: Any, **options: Any) -> LateEngine:
    """The factory that ``rollout.engine`` names."""
    plain = make_scripted(*args, **options)
    return LateEngine(specs=plain.parameter_specs(), tokenizer=plain._tokenizer, step_seconds=0.005)
