"""Everything that a person starts and looks at. From Python: :func:`start` a run, or :func:`open_run` one that is there.

>>> import tandem.launch
>>> tandem.launch.start.__name__, tandem.launch.open_run.__name__
('start', 'open_run')
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .notebook.handle import Run, open_run, start

__all__ = ["Run", "open_run", "start"]


def __getattr__(name: str) -> Any:
    # Loaded when asked for, so that `tandem --help` stays quick.
    if name in __all__:
        from .notebook import handle

        return getattr(handle, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
