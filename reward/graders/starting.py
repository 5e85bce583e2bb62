"""Starts the graders' parent: its command line, and its minimal environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

KEPT_ENVIRONMENT = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "SYSTEMROOT", "PATH")
"""The only variables of our environment that graders get: none of them could be a secret."""


def start_zygote(descriptor: int, settings: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    """Starts a new zygote by its own exec; it inherits nothing of ours except one descriptor.

    Args:
        descriptor: the zygote's end of the control socket.
        settings: as :func:`tandem.reward.graders.zygote.main` reads them.
    """
    environment = {k: os.environ[k] for k in KEPT_ENVIRONMENT if k in os.environ}
    environment |= {
        # sympy and mpmath use gmpy2 if it is there, and no signal can stop its C code.
        "SYMPY_GROUND_TYPES": "python",
        "MPMATH_NOGMPY": "1",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        # A grader may not start threads, and the zygote must have none when it forks.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = [sys.executable, "-P", "-m", f"{__package__}.zygote"]
    return subprocess.Popen(
        [*command, str(descriptor), json.dumps(settings)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=environment,
        pass_fds=(descriptor,),
        # The pool answers Ctrl-C or a SIGTERM to the process group itself: it drains first.
        start_new_session=True,
    )
