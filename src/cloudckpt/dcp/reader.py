"""``CloudStorageReader``: torch's StorageReader on an object store."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import pickle
import uuid
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, NoReturn, Protocol

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from cloudckpt._arguments import suggesting
from cloudckpt.checkpoint.committed import CommitObject, Fetched, read_commit
from cloudckpt.checkpoint.lazy import ReadLater, save_id_of
from cloudckpt.checkpoint.objects import METADATA, PART, beneath, is_file
from cloudckpt.checkpoint.places import Places
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.torch_private import CURRENT_DCP_VERSION
from cloudckpt.config import Config, config_or_default
from cloudckpt.dcp.failures import portable_errors
from cloudckpt.dcp.loading import Load
from cloudckpt.dcp.report import LoadReport
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CloudCheckpointError,
    ConfigError,
    DifferentCheckpointsError,
    ObjectNotFoundError,
)
from cloudckpt.events import Span, Transferred
from cloudckpt.fork import late_imports
from cloudckpt.stores.base import ObjectInfo, ObjectStore
from cloudckpt.transfer.retry import Retrier, check_unchanged, open_store, retry_if_replaced
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["CloudStorageReader", "KeyMapping", "Model", "OurReader", "committed_metadata"]

logger = logging.getLogger("cloudckpt")


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    """The checkpoint that a rank loads: its location, and the ID of the save, if it has one."""

    uri: str
    save_id: str | None


KeyMapping = Callable[[str], "str | None"]
"""Maps a tensor's name in the files to its name when loaded; None leaves the tensor out."""


class Model(Protocol):
    """A model in safetensors files, which is read like a checkpoint.

    Attributes:
        committed: The object whose existence shows that the model is complete: its index, or its
            only file.
    """

    committed: ObjectInfo

    @property
    def metadata(self) -> Metadata: ...

    @property
    def places(self) -> Places: ...

    def renamed(self, mapping: KeyMapping, /) -> Model: ...


def _model_at(store: ObjectStore, uri: CheckpointURI, config: Config) -> Model | None:
    """Returns the model in safetensors files at a location; None if there is none.

    ``ModelFolder.find`` in :mod:`cloudckpt.hf.loading` says what counts as a model.
    """
    with late_imports:  # by its name, as `hf` is built on this package
        loading = import_module("cloudckpt.hf.loading")
    model: Model | None = loading.ModelFolder.find(store, uri, config)
    return model


class OurReader(StorageReader):
    """The base class of the storage readers that ``cloudckpt.load`` accepts."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether ``checkpoint_id`` is a valid location; sends no request."""
        return CheckpointURI.accepts(checkpoint_id)


class CloudStorageReader(OurReader):
    """Reads a checkpoint from ``s3://``, ``gs://``, ``az://``, ``file://`` or a local path.

    It works wherever torch takes a ``storage_reader``: for checkpoints of cloudckpt and of torch's
    own writers, and for models in safetensors files. It fetches only the bytes that this rank
    needs, directly into its tensors if these are contiguous in host memory, and verifies every
    block that has a checksum, unless ``Config(verify=False)`` is given.

    Attributes:
        transferred: The bytes and requests of this rank in the last load; None before.
        report: The report of the last load; None before.
    """

    @suggesting
    def __init__(
        self,
        checkpoint_id: URILike,
        *,
        config: Config | None = None,
        trust_pickle: bool = False,
        key_mapping: KeyMapping | None = None,
    ) -> None:
        """Makes a reader; sends no request.

        Args:
            checkpoint_id: The location to load from; :meth:`reset` may change it later.
            config: Options; those not given are read from the environment.
            trust_pickle: Whether pickles in the checkpoint may run arbitrary code.
            key_mapping: For models in safetensors files only: maps a tensor's name in the files to
                its name in the state dict, or to None to leave it out. None keeps all names.

        Raises:
            InvalidURIError: If ``checkpoint_id`` is not a valid location.
            ConfigError: If ``config`` is not a Config, or a variable in the environment is invalid.
        """
        super().__init__()
        self.uri = CheckpointURI.parse(checkpoint_id)
        self.config = config_or_default(config)
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
        """The original keys and empty dicts of the saved state dict, which torch's metadata lacks.

        Empty until the metadata is read, and if another library saved the checkpoint.
        """
        return self._commit.structure if self._commit is not None else Structure()

    @property
    def commit(self) -> CommitObject | None:
        """The commit object that was read last; None before.

        For a model in safetensors files, an object that is made for it.
        """
        return self._commit

    @property
    def has_checksums(self) -> bool:
        """Whether the checkpoint has checksums to verify; False until its metadata is read."""
        return self._commit is not None and self._commit.record is not None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Drops everything that was read, and changes to another location if one is given.

        Args:
            checkpoint_id: The new location; None keeps the old one.

        Raises:
            InvalidURIError: If ``checkpoint_id`` is not a valid location.
        """
        if checkpoint_id:
            self.uri = CheckpointURI.parse(checkpoint_id)
        self.transferred: Transferred | None = None
        self.report: LoadReport | None = None
        self._failure: CloudCheckpointError | None = None
        self._load_id = str(uuid.uuid4())
        self._places = Places(self.uri, None)
        self._commit: CommitObject | None = None
        self._fetched: Fetched | None = None
        self._model: Model | None = None
        self._save_id: str | None = None
        self._adopted_save: str | None = None  # the save whose metadata came from another rank

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads the metadata of the checkpoint.

        For checkpoints of cloudckpt, the mappings in the result create torch's objects on access.
        torch's loader asks once more after a failure, with the argument ``rank``: that call returns
        metadata whose entries raise the earlier error on access.

        Raises:
            CheckpointNotFoundError: If the store says that no committed checkpoint exists.
            CheckpointError: If torch has saved there with ``use_collectives=False``, or an
                unexpected error prevents reading the metadata.
            UntrustedPickleError: If the metadata names code that is not on the allow-list.
            CheckpointCorruptError: If the commit object is damaged.
            CheckpointReplacedError: If the checkpoint was replaced during each of several attempts
                to read its metadata.
            ConfigError: If ``key_mapping`` was given, and the location has a checkpoint.
            StoreError: If the store refuses or stays unreachable.
        """
        # torch's loader passes on a failure only as text, and then asks for the metadata of its
        # rank; an error of set_up_storage_reader reaches every rank unchanged
        if kwargs.get("rank") is not None and self._failure is not None:
            return Metadata(ReadLater(self._raise_failure))  # type: ignore[arg-type]
        self._failure = None
        try:
            return retry_if_replaced(self._read_metadata)
        except CloudCheckpointError as error:
            self._failure = error
            raise
        except Exception as error:
            self._failure = CheckpointError(
                "the metadata could not be read, so it is unknown whether there is a checkpoint; "
                "see the cause, and load again",
                uri=str(self.uri),
                cause=error,
            )
            raise self._failure from error

    def _raise_failure(self) -> NoReturn:
        assert self._failure is not None
        raise self._failure

    def _read_metadata(self) -> Metadata:
        key = self.uri.key(METADATA)
        try:
            commit, fetched = read_commit(
                self._store(), key, Retrier(self.config.retry), trust_pickle=self.trust_pickle
            )
        except ObjectNotFoundError as error:
            if model := _model_at(self._store(), self.uri, self.config):
                return self._begun_with(
                    model if self.key_mapping is None else model.renamed(self.key_mapping)
                )
            self._refuse_parts()
            raise CheckpointNotFoundError(
                "there is no committed checkpoint here: neither a .metadata object, nor a "
                "model in safetensors files. " + self._what_is_there(),
                uri=str(self.uri),
            ) from error
        return self._taken(commit, fetched)

    def _what_is_there(self) -> str:
        """Returns a sentence about a location without a checkpoint, for an error message."""
        if content := beneath(self._store(), self.uri):
            return content
        with contextlib.suppress(CloudCheckpointError):
            if is_file(self._store().head, self.uri):
                return (
                    "This is a file; if torch.save wrote it, 'cloudckpt convert' makes a "
                    "checkpoint of it"
                )
        return "Check the location; an interrupted save leaves no checkpoint"

    def _refuse_parts(self) -> None:
        """Raises an error if torch has saved here with ``use_collectives=False``.

        Raises:
            CheckpointError: If the location has the metadata of such a save.
        """
        with contextlib.suppress(ObjectNotFoundError):
            Retrier(self.config.retry).call(lambda: self._store().head(self.uri.key(PART)))
            raise CheckpointError(
                "each rank has saved its part by itself here (use_collectives=False), which "
                "cloudckpt can't read: load it on as many ranks as saved it, with "
                "torch.distributed.checkpoint.load and torch's own reader, then save it "
                "without that option",
                uri=str(self.uri),
            )

    def _begun_with(self, model: Model) -> Metadata:
        metadata = model.metadata
        metadata.storage_meta = StorageMeta(load_id=self._load_id)
        self._model, self._commit = model, CommitObject(model.committed, metadata, None)
        return metadata

    def packed(self) -> bytes | Model:
        """Returns the metadata that was read, for the readers of other ranks to :meth:`adopt`.

        The result is the pickled commit object of a checkpoint, or the :class:`Model` if the
        location has a model in safetensors files.
        """
        return pickle.dumps(self._fetched) if self._model is None else self._model

    def adopt(self, packed: bytes | bytearray | memoryview | Model) -> Metadata:
        """Takes over the metadata that another rank's reader has read, and returns it.

        Args:
            packed: The result of :meth:`packed` on that rank.

        Raises:
            UntrustedPickleError: If another writer's metadata names code that is not on the
                allow-list.
            CheckpointCorruptError: If the metadata is damaged.
            ConfigError: If ``key_mapping`` was given, and the location has a checkpoint.
        """
        if not isinstance(packed, (bytes, bytearray, memoryview)):
            return self._begun_with(packed)
        fetched: Fetched = pickle.loads(packed)  # noqa: S301 - of a rank of this job
        uri = self._store().uri(fetched.info.key)
        commit = CommitObject.parse(fetched, uri, trust_pickle=self.trust_pickle)
        metadata = self._taken(commit, fetched)
        self._adopted_save = self._save_id
        return metadata

    def _taken(self, commit: CommitObject, fetched: Fetched) -> Metadata:
        if self.key_mapping is not None:
            raise ConfigError(
                "key_mapping= is for models in safetensors files, but this is a checkpoint: "
                "leave key_mapping out",
                uri=str(self.uri),
            )
        self._commit, self._fetched = commit, fetched
        metadata = commit.metadata
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self._load_id
        if commit.record is not None:  # not stored: the checkpoint may have been copied
            metadata.storage_meta.checkpoint_id = str(self.uri)
        self._save_id = metadata.storage_meta.save_id
        return metadata

    @contextlib.contextmanager
    def _unless_replaced(self) -> Iterator[None]:
        """Turns damage into a CheckpointReplacedError if the checkpoint has changed."""
        try:
            yield
        except CheckpointCorruptError as error:
            if self._commit is not None:
                read, uri, retry = self._commit.info, str(self.uri), self.config.retry
                store, known_save = self._store(), self._adopted_save
                check_unchanged(store, read, uri, retry, error, known_save=known_save)
            raise

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **options: Any
    ) -> None:
        if self._failure is not None:
            raise self._failure
        self._places = self.places_in(metadata)

    def places_in(self, metadata: Metadata) -> Places:
        """Returns the locations of the items of ``metadata``, which this reader has read.

        Raises:
            CheckpointCorruptError: If the metadata has no locations.
        """
        if self._model is not None:
            return self._model.places
        places = metadata.storage_data
        if not isinstance(places, Mapping):
            raise CheckpointCorruptError(
                "invalid metadata: it has no locations of the items (storage_data); load an "
                "older checkpoint",
                uri=str(self.uri),
            )
        commit = self._commit or CommitObject(ObjectInfo("", 0, ""), metadata, None)
        record = commit.record
        # a library has renamed items, or reads the metadata of another checkpoint
        if record is not None and getattr(places, "record", None) is not record:
            record = dataclasses.replace(record, table=None)
        return Places(self.uri, dataclasses.replace(commit, metadata=metadata, record=record))

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=_Source(str(self.uri), self._save_id))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans unchanged, after checking that all ranks load the same checkpoint.

        A job that derives the location on each rank, say from a listing, may derive different ones.

        Raises:
            CheckpointReplacedError: If the checkpoint was replaced while the ranks read its
                metadata.
            DifferentCheckpointsError: If ranks load from different locations.
        """
        first: _Source | None = plans[0].storage_data if plans else None
        for rank, plan in enumerate(plans):
            source: _Source | None = plan.storage_data
            if first is None or source is None or source == first:
                continue
            if source.uri == first.uri:
                raise CheckpointReplacedError(
                    f"the checkpoint was replaced while ranks 0 and {rank} read its metadata; "
                    "load it again",
                    saves=(first.save_id, source.save_id),
                    uri=first.uri,
                )
            raise DifferentCheckpointsError(
                f"rank 0 loads from {first.uri}, but rank {rank} from {source.uri}: give the "
                "same checkpoint_id on all ranks, for example by broadcasting it",
                uri=first.uri,
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Loads this rank's items; returns a completed future once all have arrived.

        If it raises, some tensors of the state dict may already hold new values.

        Raises:
            CheckpointReplacedError: If another save replaced the checkpoint meanwhile.
            CheckpointCorruptError: If bytes are missing or damaged.
            KeyCollisionError: If tensors that share memory have different values in the checkpoint.
            UntrustedPickleError: If a value needs code that is not on the allow-list.
            ShapeMismatchError: If the planner's tensor does not have the planned shape.
            UnsupportedTensorError: If the planner's tensor can't be filled.
            CheckpointError: If the metadata has classes or values that torch's does not have.
            StoreError: If the store refuses or stays unreachable.
        """
        with self.begun(planner) as load:
            load.prepare(plan)
            load.run()
        wanted = getattr(planner, "state_dict", None)
        if self._commit is not None and isinstance(wanted, Mapping):
            self.report = LoadReport.of(wanted, self._commit.metadata, plan, str(self.uri))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @contextlib.contextmanager
    def begun(self, planner: LoadPlanner) -> Iterator[Load]:
        """Yields a load of the checkpoint whose metadata this reader was set up with.

        At the end of the block, :attr:`transferred` is set, and the last events are emitted.

        Args:
            planner: Provides the tensors.
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
            stats.emit_verified()

    def _store(self) -> ObjectStore:
        return open_store(self.uri, self.config)


def committed_metadata(uri: CheckpointURI, config: Config, attempt: str) -> Metadata:
    """Returns the metadata of another rank's committed save; it is read on first access.

    Most callers drop the result of ``save``, so the metadata is not sent to all ranks. On first
    access, its mappings raise CheckpointReplacedError if another save has replaced the checkpoint,
    or any error of reading metadata.

    Args:
        uri: The location of the checkpoint.
        config: Options.
        attempt: The random name of the save.
    """
    wanted = save_id_of(attempt)

    @functools.cache
    def read() -> Metadata:
        metadata = CloudStorageReader(uri, config=config).read_metadata()
        save_id = getattr(metadata.storage_meta, "save_id", None)
        if save_id != wanted:
            raise CheckpointReplacedError(
                "another save replaced this checkpoint before its metadata was read: inspect "
                "the new checkpoint, or save to another location",
                saves=(wanted, save_id),
                uri=str(uri),
            )
        return metadata

    metadata: Any = Metadata(ReadLater(lambda: read().state_dict_metadata))  # type: ignore[arg-type]
    metadata.planner_data = ReadLater(lambda: read().planner_data or {})
    metadata.storage_data = ReadLater(lambda: read().storage_data or {})
    metadata.storage_meta = StorageMeta(checkpoint_id=str(uri), save_id=wanted)
    metadata.version = CURRENT_DCP_VERSION
    return metadata  # type: ignore[no-any-return]
