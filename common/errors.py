"""The errors that a person is meant to read: one message, no traceback."""

from __future__ import annotations


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


class DamagedError(StoreError):
    """Data that a run needs to go on are gone or changed; starting again can't help."""

    exit_code = 2


class FencedError(TandemError):
    """The caller belongs to an older term: a newer learner has taken over."""


class DeadlineError(TandemError):
    """Something that was waited for didn't come in time; the message names it."""


class WeightsError(TandemError):
    """A weight transfer that was refused or failed; the receiver keeps its old version."""


class RunFailedError(TandemError):
    """The run can't go on just by restarting a process; the message says what can help."""

    exit_code = 3
