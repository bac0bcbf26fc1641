"""Which model is served, from the moment the engine is ready."""

from __future__ import annotations

from pellucid_server.errors import ModelLoading
from pellucid_server.readiness import Readiness
from pellucid_server.served import ServedModel


class Directory:
    """Filled by the frontend at every engine start; asked by the services."""

    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness
        self._model: ServedModel | None = None

    def set_model(self, model: ServedModel) -> None:
        self._model = model

    def model(self) -> ServedModel:
        """What is served, ready or not. Raises ModelLoading before the first engine is ready."""
        if self._model is None:
            raise ModelLoading("the model is still loading; try again shortly")
        return self._model

    def open_model(self) -> ServedModel:
        """For work without the engine. Raises Draining or ModelLoading."""
        self._readiness.require_open()
        return self.model()

    def ready_model(self) -> ServedModel:
        """For work with the engine. Raises Draining, ModelLoading or EngineDown."""
        self._readiness.require_ready()
        return self.model()
