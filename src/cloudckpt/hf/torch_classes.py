"""Makes torch's own safetensors classes ours for locations in stores, through ``install``."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from cloudckpt.dcp.install import Change, chosen_config, our_uri
from cloudckpt.dcp.meeting import Meeting
from cloudckpt.dcp.reader import CloudStorageReader
from cloudckpt.errors import InstallError, InvalidURIError
from cloudckpt.hf.exporting import export_checkpoint
from cloudckpt.hf.writer import SafetensorsWriter

__all__ = ["changes"]

_DCP = "torch.distributed.checkpoint"
_CONSOLIDATIONS = ("consolidate_safetensors_files", "consolidate_safetensors_files_on_every_rank")


def changes() -> Iterator[Change]:
    """What :func:`cloudckpt.install` replaces in torch for safetensors files.

    Raises:
        InstallError: If the running torch does not look as expected.
    """
    try:
        storage = importlib.import_module(f"{_DCP}.hf_storage")
        consolidation = importlib.import_module(f"{_DCP}._consolidate_hf_safetensors")
    except ModuleNotFoundError:  # a torch that no longer has them
        return
    try:
        for name, become in (
            ("HuggingFaceStorageWriter", _become_writer),
            ("HuggingFaceStorageReader", _become_reader),
        ):
            kind = getattr(storage, name)
            yield kind, "__init__", _becoming(kind, become)
        for name in _CONSOLIDATIONS:
            replaced = _consolidating(getattr(consolidation, name))
            for module in (consolidation, storage):
                if name in vars(module):
                    yield module, name, replaced
    except AttributeError as exc:
        raise InstallError(
            f"torch's code for safetensors looks otherwise than this cloudckpt knows: {exc}"
        ) from exc


def _becoming(kind: type, become: Callable[[Any, str, dict[str, Any]], None]) -> Any:
    """The constructor of a torch class; for a location of ours it makes the object one of ours."""
    original = vars(kind)["__init__"]
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        given = signature.bind(self, *args, **kwargs).arguments
        uri = our_uri(given["path"])
        if uri is None or type(self) is not kind:
            original(self, *args, **kwargs)
        else:
            become(self, uri, given)

    return __init__


def _become_writer(self: Any, uri: str, given: dict[str, Any]) -> None:
    """Torch writes shards and consolidates them; ours writes the final files at once."""
    self.__class__ = SafetensorsWriter
    mapping = given.get("fqn_to_index_mapping")
    config = chosen_config()
    SafetensorsWriter.__init__(
        self, uri, max_shard_size=sys.maxsize, fqn_to_file=mapping, config=config
    )


def _become_reader(self: Any, uri: str, given: dict[str, Any]) -> None:
    self.__class__ = CloudStorageReader
    CloudStorageReader.__init__(self, uri, config=chosen_config())


def _consolidating(original: Callable[..., None]) -> Any:
    """A torch function that consolidates shards; for locations of ours it runs on one rank."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def consolidate(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        source, target = given["input_dir"], given["output_dir"]
        if our_uri(source) is None and our_uri(target) is None:
            original(*args, **kwargs)
            return
        if target is None or str(target) == str(source):
            raise InvalidURIError("shards are put together in another folder: give output_dir")
        together = original.__name__ == _CONSOLIDATIONS[1]
        group: dist.ProcessGroup | None = given.get("process_group")
        Meeting.of(group, no_dist=not together).broadcast_from_first(
            lambda: export_checkpoint(
                str(source),
                str(target),
                max_shard_size=sys.maxsize,
                fqn_to_file=given.get("fqn_to_index_mapping"),
                config=chosen_config(),
            )
        )

    return consolidate
