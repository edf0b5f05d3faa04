"""cloudckpt as a contender."""

from __future__ import annotations

import importlib
from typing import Any

from benchmarks.places import Place
from benchmarks.stock import StockDcp


class CloudCkpt(StockDcp):
    """Stock `dcp.save` and `dcp.load` over our classes, and our own `async_save`."""

    def __init__(self, place: Place, *, process: bool = False) -> None:
        self._process = process
        self._ours = importlib.import_module("cloudckpt")
        self._config = self._ours.Config(
            connections=place.connections, **options(self._ours, place)
        )
        super().__init__(
            lambda uri: self._ours.CloudStorageWriter(uri, config=self._config),
            lambda uri: self._ours.CloudStorageReader(uri, config=self._config),
            place,
        )

    def async_save(self, state_dict: dict[str, Any], name: str) -> Any:
        """Starts a save with `cloudckpt.async_save`."""
        kinds = importlib.import_module("torch.distributed.checkpoint.state_dict_saver")
        kind = kinds.AsyncCheckpointerType
        return self._ours.async_save(
            state_dict,
            checkpoint_id=self._place.uri(name),
            config=self._config,
            async_checkpointer_type=kind.PROCESS if self._process else kind.THREAD,
        )


def options(ours: Any, place: Place) -> dict[str, Any]:
    """Returns the options of a place; checksums go along as they do to the vendors' endpoints."""
    s3 = ours.S3Options(endpoint_url=place.endpoint, addressing_style="path")
    return {"s3": s3, "checksum": "on"}
