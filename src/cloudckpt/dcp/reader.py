"""``CloudStorageReader``: torch's StorageReader on an object store."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from cloudckpt.checkpoint.committed import CommitObject, Fetched, read_commit
from cloudckpt.checkpoint.inventory import Inventory
from cloudckpt.checkpoint.model_folder import KeyMapping, ModelFolder, ModelPlaces
from cloudckpt.checkpoint.objects import METADATA, PART, beneath
from cloudckpt.checkpoint.places import Places
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.config import Config
from cloudckpt.dcp.failures import portable_errors
from cloudckpt.dcp.loading import Load
from cloudckpt.dcp.same_checkpoint import LoadedSave, check_sources
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CloudCheckpointError,
    ConfigError,
    ObjectNotFoundError,
)
from cloudckpt.events import Span, Transferred
from cloudckpt.stores.base import ObjectInfo, ObjectStore
from cloudckpt.transfer.retry import Retrier, check_unchanged, open_store, retry_if_replaced
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["CloudStorageReader", "OurReader"]

logger = logging.getLogger("cloudckpt")


class OurReader(StorageReader):
    """A reader that ``cloudckpt.load`` drives."""


class CloudStorageReader(OurReader):
    """Reads a checkpoint from ``s3://``, ``file://`` or a local path.

    Works wherever torch takes a ``storage_reader``, on checkpoints of cloudckpt and of torch's own
    writers, and on models in safetensors files. Only the bytes that this rank needs are fetched,
    straight into its tensors where these are contiguous in host memory; every block is checked
    against its checksum, where there is one.

    Attributes:
        transferred: What this rank received in the last load.
    """

    def __init__(
        self,
        checkpoint_id: URILike,
        *,
        config: Config | None = None,
        trust_pickle: bool = False,
        key_mapping: KeyMapping | None = None,
    ) -> None:
        """
        Args:
            checkpoint_id: Where to load from; :meth:`reset` may name another place later.
            config: Options; read from the environment where they are not given.
            trust_pickle: Whether pickles in the checkpoint may run any code.
            key_mapping: For models in safetensors files: what a tensor of the files is called here,
                or None to leave it out.

        Raises:
            InvalidURIError: If ``checkpoint_id`` is no location.
        """
        super().__init__()
        self.uri = CheckpointURI.parse(checkpoint_id)
        self.config = config if config is not None else Config()
        self.trust_pickle = trust_pickle
        self.key_mapping = key_mapping
        self.reset()

    def __getstate__(self) -> dict[str, Any]:
        return {
            "checkpoint_id": self.uri,
            "config": self.config,
            "trust_pickle": self.trust_pickle,
            "key_mapping": self.key_mapping,
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def checkpoint_id(self) -> str:
        """The location, as a string."""
        return str(self.uri)

    @property
    def structure(self) -> Structure:
        """How what was saved was nested, beyond what the metadata says; once that was read."""
        return self._commit.structure if self._commit is not None else Structure()

    @property
    def inventory(self) -> Inventory | None:
        """Names and chunks in columns, once the metadata was read; other writers have none."""
        return self._commit.inventory if self._commit is not None else None

    @property
    def commit(self) -> CommitObject | None:
        """What the commit object that was read last says."""
        return self._commit

    @property
    def has_checksums(self) -> bool:
        """Whether the checkpoint can be verified; once its metadata was read."""
        return self._commit is not None and self._commit.record is not None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the location can be parsed."""
        return CheckpointURI.accepts(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forgets what was read, and goes to another location if one is given."""
        if checkpoint_id:
            self.uri = CheckpointURI.parse(checkpoint_id)
        self.transferred: Transferred | None = None
        self._failure: CloudCheckpointError | None = None
        self._load_id = str(uuid.uuid4())
        self._places = Places(self.uri, None)
        self._commit: CommitObject | None = None
        self._fetched: Fetched | None = None
        self._model: ModelFolder | None = None
        self._save_id: str | None = None
        self._told: str | None = None  # the save whose metadata another rank has read

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads the commit object: what this reader needs of it, by two requests mostly.

        Of a checkpoint of ours, the mappings in the result make torch's objects when they are asked
        for.

        Raises:
            CheckpointNotFoundError: If the store says that there is no committed checkpoint.
            CheckpointError: If torch's ranks have saved there each by itself.
            UntrustedPickleError: If the metadata names code that is not on the allow-list.
            CheckpointCorruptError: If it is damaged.
            CheckpointReplacedError: If it was replaced meanwhile, again and again.
        """
        # torch's loader asks a second time, for the metadata of one rank, where the first failed
        if kwargs.get("rank") is not None and self._failure is not None:
            return _UnreadableMetadata(self._failure)
        self._failure = None
        try:
            return retry_if_replaced(self._read_metadata)
        except Exception as error:
            self._failure = _named(error, str(self.uri))
            if self._failure is error:
                raise
            raise self._failure from error

    def _read_metadata(self) -> Metadata:
        key = self.uri.key(METADATA)
        try:
            commit, fetched = read_commit(
                self._store(), key, Retrier(self.config.retry), trust_pickle=self.trust_pickle
            )
        except ObjectNotFoundError as error:
            if model := ModelFolder.find(self._store(), self.uri, self.config):
                return self._begun_with(
                    model if self.key_mapping is None else model.renamed(self.key_mapping)
                )
            self._refuse_parts()
            found = beneath(self._store(), self.uri)
            raise CheckpointNotFoundError(
                "there is no committed checkpoint here: neither .metadata, nor a model in "
                "safetensors files. "
                + (found or "Check the location; a save that was interrupted leaves none"),
                uri=str(self.uri),
            ) from error
        return self._taken(commit, fetched)

    def _refuse_parts(self) -> None:
        """Names what torch has saved with ``use_collectives=False``, which is not nothing."""
        with contextlib.suppress(ObjectNotFoundError):
            Retrier(self.config.retry).call(lambda: self._store().head(self.uri.key(PART)))
            raise CheckpointError(
                "each rank has saved a part of its own here (use_collectives=False), and cloudckpt "
                "reads what ranks have saved together: load it on as many ranks with "
                "torch.distributed.checkpoint.load and a reader of torch's, then save it without "
                "that option",
                uri=str(self.uri),
            )

    def _begun_with(self, model: ModelFolder) -> Metadata:
        metadata = model.metadata
        metadata.storage_meta = StorageMeta(load_id=self._load_id)
        self._model, self._commit = model, CommitObject(model.committed, metadata, None)
        return metadata

    def packed(self) -> bytes | ModelFolder:
        """What was read, for the readers of other ranks: see :meth:`adopt`."""
        if self._model is not None:
            return self._model
        if self._fetched is None:
            raise ValueError("no metadata was read yet")
        return self._fetched.pack()

    def adopt(self, packed: bytes | bytearray | memoryview | ModelFolder) -> Metadata:
        """Takes the metadata that another rank's reader of this checkpoint has read.

        Args:
            packed: What :meth:`packed` has returned there.

        Raises:
            UntrustedPickleError: If another writer's names code that is not on the allow-list.
            CheckpointCorruptError: If it is damaged.
        """
        if isinstance(packed, ModelFolder):
            return self._begun_with(packed)
        fetched = Fetched.unpack(packed)
        uri = self._store().uri(fetched.info.key)
        commit = CommitObject.parse(fetched, uri, trust_pickle=self.trust_pickle)
        metadata = self._taken(commit, fetched)
        self._told = self._save_id
        return metadata

    def _taken(self, commit: CommitObject, fetched: Fetched) -> Metadata:
        if self.key_mapping is not None:
            raise ConfigError(
                "key_mapping is for models in safetensors files, and this is a checkpoint",
                uri=str(self.uri),
            )
        self._commit, self._fetched = commit, fetched
        metadata = commit.metadata
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self._load_id
        if commit.record is not None:  # what is stored does not say so: it may have been copied
            metadata.storage_meta.checkpoint_id = str(self.uri)
        self._save_id = metadata.storage_meta.save_id
        return metadata

    @contextlib.contextmanager
    def _unless_replaced(self) -> Iterator[None]:
        """If what is done fails since the metadata that was read is no longer there, says so."""
        try:
            yield
        except CheckpointCorruptError as error:
            if self._commit is not None:
                read, uri, retry = self._commit.info, str(self.uri), self.config.retry
                check_unchanged(self._store(), read, uri, retry, error, told=self._told)
            raise

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **options: Any
    ) -> None:
        if isinstance(metadata, _UnreadableMetadata):
            raise metadata.failure
        self._places = self.places_in(metadata)

    def places_in(self, metadata: Metadata) -> Places:
        """Where the items are, of which this reader has read the metadata last."""
        if self._model is not None:
            return ModelPlaces(self._model)
        places, commit = metadata.storage_data, self._commit
        if not isinstance(places, Mapping):
            raise CheckpointCorruptError(
                "the metadata does not say where the items are", uri=str(self.uri)
            )
        if commit is not None and places is commit.metadata.storage_data:
            return Places(self.uri, commit)
        body = (
            None if commit is None or commit.record is None else commit.record.without_inventory()
        )
        info = ObjectInfo("", 0, "") if commit is None else commit.info
        return Places(self.uri, CommitObject(info, metadata, body))

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=LoadedSave(str(self.uri), self._save_id))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Compares what the ranks load.

        Raises:
            CheckpointReplacedError: If it was replaced while they read its metadata.
            DifferentCheckpointsError: If they load from different locations.
        """
        check_sources(plans)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fetches this rank's items; returns when all of them have arrived and are verified.

        If it raises, tensors of the state dict may hold a part of the new values.

        Raises:
            CheckpointReplacedError: If another save replaced the checkpoint meanwhile.
            CheckpointCorruptError: If bytes are missing or damaged.
        """
        with self.begun(planner) as load:
            load.prepare(plan)
            load.run()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @contextlib.contextmanager
    def begun(self, planner: LoadPlanner) -> Iterator[Load]:
        """A load of the checkpoint whose metadata this reader was set up with.

        Events tell of what is done within, and :attr:`transferred` of it at its end.

        Args:
            planner: Has the tensors.
        """
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        uri = str(self.uri)
        stats = TransferStats(uri, rank)
        load = Load(
            self._store(),
            self.config,
            planner,
            stats,
            self._places,
            uri=uri,
            trust_pickle=self.trust_pickle,
            guarded=self._unless_replaced,
        )
        try:
            with portable_errors(uri), Span("load", uri, rank) as span:
                try:
                    yield load
                finally:
                    load.close()
                    self.transferred = stats.snapshot()
                    span.nbytes = self.transferred.nbytes
        finally:
            stats.tell_verified()

    def _store(self) -> ObjectStore:
        return open_store(self.uri, self.config)


class _UnreadableMetadata(Metadata):
    """Stands for metadata that could not be read, and says why wherever it is used.

    torch passes on an error of ``read_metadata`` only as a text, and goes on to ask for the
    metadata of the rank, as if the store had said that there is no other. An error of the steps
    behind that reaches every rank as it is.
    """

    def __init__(self, failure: CloudCheckpointError) -> None:
        self.failure = failure

    @property
    def state_dict_metadata(self) -> NoReturn:  # type: ignore[override]
        raise self.failure


def _named(error: Exception, uri: str) -> CloudCheckpointError:
    if isinstance(error, CloudCheckpointError):
        return error
    return CheckpointError(
        "the metadata could not be read, for a reason that says nothing about whether there is a "
        "checkpoint",
        uri=uri,
        cause=error,
    )
