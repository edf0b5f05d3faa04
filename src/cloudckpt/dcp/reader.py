"""``CloudStorageReader``: torch's StorageReader on an object store."""

from __future__ import annotations

import dataclasses
import logging
import os
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from cloudckpt.checkpoint.committed import CommitObject, Fetched, read_commit
from cloudckpt.checkpoint.inventory import Inventory
from cloudckpt.checkpoint.model_folder import KeyMapping, ModelFolder, ModelPlaces
from cloudckpt.checkpoint.objects import beneath, metadata_name
from cloudckpt.checkpoint.places import Places
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.config import Config
from cloudckpt.dcp.failures import portable_errors
from cloudckpt.dcp.loading import Load
from cloudckpt.dcp.same_checkpoint import LoadedSave, check_sources
from cloudckpt.dcp.sharing import SharedReads
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CloudCheckpointError,
    ConfigError,
    ObjectNotFoundError,
)
from cloudckpt.events import Span
from cloudckpt.stores.base import ObjectInfo, ObjectStore
from cloudckpt.transfer.retry import Retrier, begun_anew, check_unchanged, open_store
from cloudckpt.transfer.stats import Transferred, TransferStats
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["CloudStorageReader"]

logger = logging.getLogger("cloudckpt")


class CloudStorageReader(StorageReader):
    """Reads a checkpoint from ``s3://``, ``file://`` or a local path.

    Works wherever torch takes a ``storage_reader``, on checkpoints of cloudckpt and of torch's own
    writers, and on models in safetensors files. Only the bytes that this rank needs are fetched,
    straight into its tensors where these are contiguous in host memory; every block is checked
    against its checksum, where there is one.

    Attributes:
        transferred: What this rank received in the last load.
        failure: Why the metadata could not be read.
        reads_alone: Whether the metadata is that of this rank alone.
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
        self.failure: CloudCheckpointError | None = None
        self.reads_alone = False
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
            UntrustedPickleError: If the metadata names code that is not on the allow-list.
            CheckpointCorruptError: If it is damaged.
            CheckpointReplacedError: If it was replaced meanwhile, again and again.
        """
        # torch asks for the metadata of one rank through a parameter named exactly `kwargs`
        rank = kwargs.get("rank")
        earlier = None if rank is None else self.failure  # that of the metadata of all ranks
        if earlier is not None and not isinstance(earlier, CheckpointNotFoundError):
            return _UnreadableMetadata(earlier)  # what the rank has may be of an older save
        try:
            if rank is None:
                metadata = begun_anew(lambda: self._read_metadata(None))
            else:  # that of all ranks may be there by now
                metadata = self._read_metadata(rank)
        except Exception as error:
            failure = _named(error, str(self.uri))
            if earlier is not None and isinstance(failure, CheckpointNotFoundError):
                failure = earlier
            self.failure = failure
            if earlier is not None:
                return _UnreadableMetadata(failure)
            if failure is error:
                raise
            raise failure from error
        self.failure = None
        return metadata

    def _read_metadata(self, rank: int | None) -> Metadata:
        key = self.uri.key(metadata_name(rank))
        try:
            commit, fetched = read_commit(
                self._store(), key, Retrier(self.config.retry), trust_pickle=self.trust_pickle
            )
        except ObjectNotFoundError as error:
            if rank is None and (model := ModelFolder.find(self._store(), self.uri, self.config)):
                return self._begun_with(
                    model if self.key_mapping is None else model.renamed(self.key_mapping)
                )
            found = beneath(self._store(), self.uri) if rank is None else ""
            raise CheckpointNotFoundError(
                "there is no committed checkpoint here: neither .metadata, nor a model in "
                "safetensors files. "
                + (found or "Check the location; a save that was interrupted leaves none"),
                uri=str(self.uri),
            ) from error
        return self._taken(commit, fetched, is_shared=rank is None)

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
        metadata = self._taken(commit, fetched, is_shared=True)
        self._told = self._save_id
        return metadata

    def _taken(self, commit: CommitObject, fetched: Fetched, *, is_shared: bool) -> Metadata:
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
        self._save_id = metadata.storage_meta.save_id if is_shared else None
        return metadata

    def _unless_replaced(self, work: Callable[[], None]) -> None:
        """Does it; if it fails since the metadata that was read is no longer there, says so."""
        try:
            work()
        except CheckpointCorruptError as error:
            if self._commit is not None:
                read, uri, retry = self._commit.info, str(self.uri), self.config.retry
                check_unchanged(self._store(), read, uri, retry, error, told=self._told)
            raise

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if isinstance(metadata, _UnreadableMetadata):
            raise metadata.failure
        self._places = self.places_in(metadata)
        # torch says so only to a parameter named exactly `kwargs`
        self.reads_alone = not kwargs.get("use_collectives", True)

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
        self.read(plan, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def read(
        self,
        plan: LoadPlan,
        planner: LoadPlanner,
        *,
        begin: Callable[[Callable[[], None]], None] = lambda prepare: prepare(),
        shared: SharedReads | None = None,
    ) -> None:
        """As :meth:`read_data`.

        Args:
            plan: What to read.
            planner: Where it goes.
            begin: Calls its argument, which finds out what is to be fetched, before anything is.
            shared: Reads that other ranks take part in; a collective call then.
        """
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        stats = TransferStats(str(self.uri), rank)
        load = Load(
            self._store(),
            self.config,
            planner,
            stats,
            uri=str(self.uri),
            trust_pickle=self.trust_pickle,
        )
        try:
            with portable_errors(str(self.uri)), Span("load", str(self.uri), rank) as span:
                try:
                    begin(lambda: self._unless_replaced(lambda: load.prepare(plan, self._places)))
                    self._unless_replaced(lambda: load.run(shared))
                finally:
                    load.close()
                    self.transferred = stats.snapshot()
                    span.bytes = self.transferred.bytes
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
