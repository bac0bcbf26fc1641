"""Whether the server takes requests: the one answer that health, metrics and admission share.

In come the engine's comings and goings and the wish to drain; out go listeners' calls whenever the answer changes.
"""

from __future__ import annotations

from collections.abc import Callable

from pellucid_server.errors import Draining, EngineDown, ModelLoading


class Readiness:
    """Ready while an engine is up and the server is not draining."""

    def __init__(self) -> None:
        self._was_up = False
        self._up = False
        self._draining = False
        self._listeners: list[Callable[[bool], None]] = []

    @property
    def is_ready(self) -> bool:
        return self._up and not self._draining

    @property
    def engine_is_up(self) -> bool:
        return self._up

    @property
    def is_draining(self) -> bool:
        return self._draining

    def listen(self, listener: Callable[[bool], None]) -> None:
        """Calls `listener` now and after every change."""
        self._listeners.append(listener)
        listener(self.is_ready)

    def engine_up(self) -> None:
        self._was_up = self._up = True
        self._tell()

    def engine_down(self) -> None:
        self._up = False
        self._tell()

    def drain(self) -> None:
        """From now on and for good, no new requests."""
        self._draining = True
        self._tell()

    def require_open(self) -> None:
        """Raises Draining or ModelLoading."""
        if self._draining:
            raise Draining("the server is shutting down; try another one or try again later")
        if not self._was_up:
            raise ModelLoading("the model is still loading; try again shortly")

    def require_ready(self) -> None:
        """Raises Draining, ModelLoading or EngineDown."""
        self.require_open()
        if not self._up:
            raise EngineDown("the engine is restarting; try again shortly")

    def _tell(self) -> None:
        for listener in self._listeners:
            listener(self.is_ready)
