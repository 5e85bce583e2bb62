"""The errors that a person is meant to read: one message, no traceback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class TandemError(Exception):
    """Base of every error that is shown to the user as one message.

    The message names the thing, its value and the way out. The command line prints it
    without a traceback and exits with ``exit_code``.
    """

    exit_code = 1


class ConfigError(TandemError):
    """A preset, an override or a combination of settings that can't be run."""

    exit_code = 2


class DataError(TandemError):
    """A data set, model folder or archive that can't be read as what it should be."""

    exit_code = 2


class WireError(TandemError):
    """A message that was refused: unknown version, unknown field, too long, cut or damaged."""


class StoreError(TandemError):
    """Redis could not be reached, refused the password, or holds another run."""


class RefusedError(StoreError):
    """The ledger refused a call that its state doesn't allow."""


class FullError(StoreError):
    """Redis has no memory for what was to be stored."""


class DamagedError(StoreError):
    """Data that a run needs to go on are gone or changed; starting again can't help."""

    exit_code = 2


class FencedError(TandemError):
    """The caller belongs to an older term: a newer learner has taken over."""


class HeldError(TandemError):
    """Another process, which is alive, has what is asked for: a scheduler may try again later."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


class DeadlineError(TandemError):
    """Something that was waited for didn't come in time; the message names it."""


class WeightsError(TandemError):
    """A weight transfer that was refused or failed; the receiver keeps its old version."""


class RunFailedError(TandemError):
    """The run can't go on just by restarting a process; the message says what can help."""

    exit_code = 3


class OutOfMemoryError(TandemError):
    """A process has no memory left, on its GPU or on its host.

    Args:
        asked: what was asked for, such as ``2.00 GiB``.
        parts: name to bytes of what the process holds.
        who: names the process, if it is known.
        advice: sentences on what can help; whoever knows the run's settings adds them.
    """

    def __init__(
        self,
        asked: str,
        parts: Mapping[str, int],
        who: str = "this process",
        advice: Sequence[str] = (),
    ) -> None:
        self.asked, self.parts = asked, dict(parts)
        held = ", ".join(f"{name} {size / 2**30:.3g} GB" for name, size in parts.items())
        holds = f", and it holds {held}" if held else ""
        first = f"no memory is left for {who}: it asked for {asked}{holds}"
        super().__init__(". ".join([first, *advice]))
