"""The dispatcher's end of the zygote: its process, and the socket between the two."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from ...common.errors import WireError
from .pipes import MAX_MESSAGE, Kill, Message, Spawn, read_control

logger = logging.getLogger("tandem.reward")

END_SECONDS = 2.0
"""How long a zygote may take to end by itself when its socket closes; then it is killed."""
KEPT_ENVIRONMENT = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "SYSTEMROOT", "PATH")
"""The only variables of our environment that graders get: none of them could be a secret."""


class ZygoteLink:
    """One zygote, from its start to its end.

    Args:
        settings: as :func:`tandem.reward.graders.zygote.main` reads them.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = _start(theirs.fileno(), settings)
        theirs.close()
        ours.setblocking(False)
        self._socket = ours
        self.started = time.monotonic()
        """The ``time.monotonic`` of its start."""

    @property
    def pid(self) -> int:
        """Process id of the zygote."""
        return self._process.pid

    def fileno(self) -> int:
        """The descriptor of its socket."""
        return self._socket.fileno()

    def hear(self) -> tuple[list[Message], bool]:
        """Messages since the last call, and whether it goes on; a zygote that sends nonsense doesn't."""
        heard: list[Message] = []
        while True:
            try:
                data = self._socket.recv(MAX_MESSAGE)
            except BlockingIOError:
                return heard, True
            except ConnectionResetError:
                data = b""
            if not data:
                return heard, False
            try:
                heard.append(read_control(data))
            except WireError as error:
                logger.warning("the zygote is ended: %s", error)
                self.kill()
                return heard, False

    def spawn(self, number: int) -> socket.socket | None:
        """Requests a grader with that number; returns our end of its socket, None if the zygote is gone."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            socket.send_fds(self._socket, [Spawn(number).pack()], [theirs.fileno()])
        except (BrokenPipeError, ConnectionResetError, BlockingIOError):
            # The owner will next see its closed socket.
            ours.close()
            return None
        finally:
            theirs.close()
        return ours

    def end(self, number: int) -> None:
        """Requests that a grader be killed; if the zygote is gone, its graders are too."""
        try:
            self._socket.send(Kill(number).pack())
        except (BrokenPipeError, ConnectionResetError, BlockingIOError):
            logger.debug("zygote was gone when grader %d was to be killed", number)

    def kill(self) -> None:
        """Kills its process; the kernel then kills the graders."""
        self._process.kill()

    def close(self) -> int:
        """Ends the zygote with all its graders, reaps it and returns its exit status."""
        self._socket.close()
        try:
            return self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _start(descriptor: int, settings: Mapping[str, Any]) -> subprocess.Popen[bytes]:
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
