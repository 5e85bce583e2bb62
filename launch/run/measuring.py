"""Measures a rank of the learner in a process of its own (``tandem plan --measure``)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from ...common.config import to_yaml
from ...common.errors import OutOfMemoryError, TandemError
from ...common.memory import kills
from ..plan.advice import advice
from ..plan.hardware import machine
from ..plan.placement import learner_threads
from .processes.parts import THREAD_VARIABLES, seeing

if TYPE_CHECKING:
    from ...common.config import Config

WHO = "the learner's longest step"
"""What runs out of memory, in a message."""
LONGEST_SECONDS = 3600.0
"""How long loading the model and two steps may take."""


def measure(config: Config) -> dict[str, Any]:
    """Makes the longest step of a config on this machine, on its first GPU if it has one.

    Returns:
        The measurement, as :mod:`tandem.learner.measuring` gives it.

    Raises:
        OutOfMemoryError: there was too little memory.
        TandemError: the step couldn't be made.
    """
    host = machine()
    gpus = host.gpus if config.launch.gpus != "none" else ()
    threads = learner_threads(config, on_gpu=bool(gpus), cores=host.cores)
    environment = {
        **os.environ,
        **dict.fromkeys(THREAD_VARIABLES, str(threads)),
        **seeing([gpu.told for gpu in gpus[:1]]),
    }
    before = kills()
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "tandem.learner.measuring"],
            input=to_yaml(config).encode(),
            capture_output=True,
            env=environment,
            timeout=LONGEST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise TandemError(
            f"the step that was to be measured took over {LONGEST_SECONDS:.0f} s: lower "
            f"learner.micro_batch_tokens, or measure on a GPU"
        ) from None
    if done.returncode == -signal.SIGKILL and kills() > before:
        amount = "so much that the kernel has killed it"
        raise OutOfMemoryError(amount, {}, WHO, advice(config, "learner"))
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = " ".join(done.stderr.decode(errors="replace").split()[-60:])
        raise TandemError(
            f"the process that measures ended with {done.returncode}; its last words: {last}"
        ) from None
    if "asked" in answer:
        raise OutOfMemoryError(answer["asked"], answer["parts"], WHO, advice(config, "learner"))
    if "error" in answer:
        raise TandemError(answer["error"])
    assert isinstance(answer, dict)
    return answer
