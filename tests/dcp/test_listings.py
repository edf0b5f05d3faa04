"""Listings that other libraries have cached show what we have committed and deleted."""

import pytest
import torch.distributed.checkpoint as dcp
from fsspec.spec import AbstractFileSystem
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt

from .places import Place
from .values import numbered

_PATIENCE = 150.0  # seconds
_PROCESS = AsyncCheckpointerType.PROCESS


class Remembering(AbstractFileSystem):
    """As s3fs: it lists a folder once, and then shows what it remembers."""

    protocol = ("s3", "s3a")

    def __init__(self, place: Place | None) -> None:
        super().__init__()
        self._place = place

    def ls(self, path: str = "", detail: bool = False, **kwargs) -> list:
        return self.dircache.setdefault(path, self._place.names())

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()
        super().invalidate_cache(path)


class Derived(Remembering):
    """A class that others build on it; without a place, its cache can't be cleared."""

    def invalidate_cache(self, path: str | None = None) -> None:
        if self._place is None:
            raise ArithmeticError("not this one")
        super().invalidate_cache(path)


@pytest.fixture
def listing(s3, tmp_path, monkeypatch):
    """A file system of fsspec that has listed the empty place."""
    monkeypatch.chdir(tmp_path)  # where a torch that takes a URI for a folder would save
    # a class that can't be asked which URIs it is for hinders no other
    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.protocol", None)
    _other, made = Derived(None), Derived(s3)  # nor does one whose cache can't be cleared
    assert made.ls() == []
    yield made
    Derived.clear_instance_cache()
    cloudckpt.checkpointer.close_async_savers()


def _state() -> dict:
    return {"t": numbered(10)}


def _in_a_stock_thread(place: Place) -> None:
    dcp.async_save(_state(), checkpoint_id=place.uri).result(_PATIENCE)


def _in_a_process(place: Place) -> None:
    cloudckpt.async_save(
        _state(), checkpoint_id=place.uri, config=place.config, async_checkpointer_type=_PROCESS
    ).result(_PATIENCE)


@pytest.mark.parametrize("save", [_in_a_process, _in_a_stock_thread])
def test_a_new_checkpoint_is_listed_and_a_replaced_one_is_not(save, listing, installed, s3):
    save(s3)
    first = listing.ls()
    assert ".metadata" in first
    save(s3)
    second = listing.ls()
    assert second == s3.names()
    assert set(first) & set(second) == {".metadata"}


def test_what_a_failed_save_has_deleted_is_not_listed(listing, s3):
    class Looking(cloudckpt.checkpointer.CommitHook):
        def before_commit(self, uri, metadata):
            listing.invalidate_cache()
            assert listing.ls() != []
            raise ArithmeticError("not this one")

    writer = cloudckpt.CloudStorageWriter(s3.uri, config=s3.config, commit_hook=Looking())
    with pytest.raises(cloudckpt.errors.RanksFailedError):
        cloudckpt.save(_state(), storage_writer=writer)
    assert listing.ls() == []
