"""Commits a model, so that readers see all of its files and their index, or nothing.

No store changes several objects at once, and the names of the files are those that transformers
expects, so a new model mostly has the file names of the old one. So a model exists if one object
does, which is written last: the index, or the only file of a model of one file. When the store has
all bytes, in uploads that are not visible yet, the commit has four steps:

1. The index is claimed: on the condition that it has not changed since the save began, it is
replaced by a text that is not an index. From now on readers see no model.
2. The files of the old model are deleted, each on the condition that it has not changed.
3. The uploads of the new files are completed, each on the condition that no file has its name.
4. The index replaces the claim, on the condition that the claim has not changed.

A model of one file needs no index. If the folder has other files of a model, steps 1 and 2 are
done, and the claim is deleted; then the upload of the file is completed, which replaces an old file
at once, on the condition that it has not changed. A save of one file and a save of several files
each check for the other's model before or after their last step: at least one of them sees the
other, and fails. Some stores ignore conditions when an upload is completed. There two saves of the
same single file may both succeed, one after the other.

This handles the following cases, where A and B are two jobs, or a process that was thought dead and
its replacement:

- *A dies.* Before step 1 the old model is intact. Until step 4 there is no model: the claim is not
  an index, and files that no index names do not count as a model. After step 4 the new model is
  complete. The next save deletes the files that A has left.
- *A and B save at the same time.* One of them claims the index first, and the other's claim fails.
  If B begins during A's commit, and replaces A's claim, then A's step 4 fails; meanwhile neither
  replaces files of the other, so that all files of the model that is committed are of one save.
- *A reader has the old index, and the files are replaced while it reads them.* It reads each file
  on the condition that it has not changed, and an old file is deleted before a new one appears: so
  the read fails, and starts again (``transfer.retry.retry_if_replaced``).
- *The answer to the last step is lost.* As in ``checkpoint.commit``, the object is read again; if
  that does not show whether the step took place, the save raises :class:`CommitUnknownError`, and
  nothing is deleted.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from cloudckpt.checkpoint.baseline import Baseline, conflict, refuse_run
from cloudckpt.checkpoint.commit import commit, conditions_work
from cloudckpt.checkpoint.objects import trial_name
from cloudckpt.config import Config
from cloudckpt.errors import (
    CheckpointConflictError,
    CheckpointCorruptError,
    CheckpointExistsError,
    CloudCheckpointError,
    CommitUnknownError,
    IncompleteSaveError,
    InvalidURIError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    PreconditionFailedError,
    StoreError,
)
from cloudckpt.events import Span
from cloudckpt.hf.safetensors import (
    INDEX,
    MOST_INDEX_BYTES,
    SINGLE_FILE,
    SUFFIX,
    FilePlan,
    claim_bytes,
    index_bytes,
    is_claim,
    parse_index,
)
from cloudckpt.hf.sending import FileUpload
from cloudckpt.stores.base import ObjectInfo, ObjectStore, Part, Upload, random_suffix
from cloudckpt.stores.listings import forget_listings
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.retry import Retrier, open_store
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.upload import put_whole
from cloudckpt.transfer.view import View
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["ModelCommit", "find_older_model", "model_location"]

_T = TypeVar("_T")
_S = TypeVar("_S")
logger = logging.getLogger("cloudckpt")

_NUMBERED = re.compile(r"model-\d+-of-\d+\.safetensors")


class ModelCommit:
    """Begins the uploads of a model's files, and makes the files visible together at the end.

    The ranks send the parts in between, see :mod:`cloudckpt.hf.sending`.
    """

    def __init__(
        self,
        uri: CheckpointURI,
        config: Config,
        files: Sequence[FilePlan],
        older: Mapping[str, ObjectInfo],
    ) -> None:
        """Opens the store of a model.

        Args:
            uri: The folder of the model.
            config: Options.
            files: The files of the new model.
            older: The result of :func:`find_older_model` when the save began.
        """
        self._uri = uri
        self._config = config
        self._files = files
        self._has_index = [file.name for file in files] != [SINGLE_FILE]
        self._store: ObjectStore = open_store(uri, config)
        self._retrier = Retrier(config.retry)
        self._older = dict(older)
        self._begun: list[FileUpload] = []
        self._claim: ObjectInfo | None = None
        self._conditional = True
        self._may_be_visible = False  # whether the model may be visible: the last step was sent

    def begin(self, part_sizes: Sequence[int]) -> list[Upload]:
        """Checks that an existing model may be replaced, and begins the files' uploads.

        If this raises, call :meth:`abandon`.

        Args:
            part_sizes: The part size of each file, in bytes.

        Returns:
            The upload of each file.

        Raises:
            CheckpointExistsError: If there is a model, or a part of one, and ``overwrite`` is off.
            ConfigError: If the store ignores or refuses conditions, and ``conditional_writes`` is
                ``auto``.
            StoreError: If the store refuses a request or stays unreachable.
        """
        if self._older and not self._config.overwrite:
            raise CheckpointExistsError(
                "a model, or a part of one, already exists here, and overwrite is off: delete it, "
                "save elsewhere, or set Config(overwrite=True) (on the command line: --overwrite)",
                uri=str(self._uri),
            )
        trial, setting = trial_name(random_suffix()), self._config.conditional_writes
        self._conditional = conditions_work(
            self._store, setting, self._uri.key(trial), self._retrier
        )
        self._begun = [
            FileUpload(
                self._store,
                self._uri.key(file.name),
                size,
                TaskGroup(1),
                self._config,
                TransferStats(str(self._uri)),
            )
            for file, size in zip(self._files, part_sizes, strict=True)
        ]

        def begin(one: FileUpload) -> Upload | Exception:
            try:
                return one.begin()
            except Exception as error:  # noqa: BLE001 - raised once no request is in progress
                return error

        begun = self._each(self._begun, begin)  # a request that is cut off may begin an upload
        if (error := next((one for one in begun if isinstance(one, Exception)), None)) is not None:
            raise error
        return [one for one in begun if isinstance(one, Upload)]

    def complete(self, parts: Sequence[Sequence[Part]]) -> None:
        """Makes the model visible: completes its files, and then writes the index, if it has one.

        If this raises, :meth:`abandon` was called already, unless the model may be visible: after a
        :class:`CommitUnknownError`, or an interrupt of the last step.

        Args:
            parts: The parts that all ranks have sent, by file.

        Raises:
            IncompleteSaveError: If the parts of a file do not add up to its size.
            CheckpointConflictError: If another writer has changed the model since the save began.
            CommitUnknownError: If the store did not say whether it carried out the last step.
            StoreError: If the store refused a request or stayed unreachable, and the model is
                certainly not visible.
        """
        try:
            with Span("commit", str(self._uri), 0):
                for file, of_file in zip(self._files, parts, strict=True):
                    if sum(part.size for part in of_file) != file.size:
                        raise IncompleteSaveError(
                            "the sent parts do not add up to the whole file: save the model again",
                            uri=self._uri.object(file.name),
                        )
                if self._has_index:
                    self._commit_with_index(parts)
                else:
                    self._commit_alone(parts[0])
        except PreconditionFailedError as error:
            self.abandon()
            raise conflict(str(self._uri), error) from error
        except BaseException:
            if not self._may_be_visible:
                self.abandon()
            raise
        finally:
            self._begun, self._claim = [], None
            forget_listings()

    def _retire_old_model(self) -> None:
        """Claims the index, and deletes the files of the old model, which are in ``_older``."""
        before = self._older.pop(INDEX, None)
        version = "" if before is None else before.version
        self._claim = put_whole(
            self._store,
            self._uri.key(INDEX),
            memoryview(claim_bytes(random_suffix())),
            self._retrier,
            if_version=version if self._conditional else None,
        )
        self._delete(self._older.values())

    def _commit_with_index(self, parts: Sequence[Sequence[Part]]) -> None:
        """Commits a model that has an index, by the four steps in this module's docstring."""
        is_new = not self._older
        self._retire_old_model()
        assert self._claim is not None
        absent = "" if self._conditional else None
        self._each(
            [*zip(self._begun, parts, strict=True)], lambda one: one[0].appear(one[1], absent)
        )
        if not is_new:
            # for stores that ignore conditions of deletions and uploads
            self._each(self._begun, lambda one: self._expect(one.key, one.info))
        self._expect(self._uri.key(SINGLE_FILE), None)
        body = [memoryview(index_bytes(self._files, random_suffix()))]
        baseline = Baseline(self._claim.key, self._claim.version)
        conditional = self._conditional
        self._may_be_visible = True
        try:
            commit(self._store, baseline, body, conditional=conditional, retrier=self._retrier)
        except (CheckpointConflictError, StoreError):
            self._may_be_visible = False  # only these two errors are certain
            raise

    def _commit_alone(self, parts: Sequence[Part]) -> None:
        """Commits a model of one file and no index: completing its upload makes it visible."""
        old = self._older.pop(SINGLE_FILE, None)
        if self._older:
            self._retire_old_model()
            assert self._claim is not None
            self._delete([self._claim])
        (only,) = self._begun
        self._expect(only.key, old)  # not all stores complete uploads on conditions
        version = "" if old is None else old.version
        self._may_be_visible = True
        try:
            only.appear(parts, version if self._conditional else None)
            self._expect(self._uri.key(INDEX), None)
        except StoreError as error:
            refused = isinstance(error, PreconditionFailedError)
            if only.info is None:
                refused = not only.is_doubtful and (refused or error.certain)
                self._may_be_visible = not refused
            if refused:
                if isinstance(error, ObjectNotFoundError):
                    self._expect(only.key, old)  # the file to replace may be what is not found
                raise
            raise CommitUnknownError(
                "it is unknown whether the model was saved: the store did not confirm that it "
                "joined the parts of the file, or that no other writer has saved a model here "
                "meanwhile; load the model to check it, or save again",
                uri=self._store.uri(only.key),
                cause=error,
            ) from error

    def abandon(self) -> None:
        """Aborts the uploads, deletes completed files and the claim; errors are only logged.

        The claim is the text that is stored in place of the index while the model is committed.
        """
        begun, self._begun = self._begun, []
        made = [one.info for one in begun if one.info is not None]
        retrier = Retrier.for_cleanup(self._config.retry)

        def delete(info: ObjectInfo) -> None:
            try:
                self._delete_one(info, retrier)
            except CloudCheckpointError as error:
                text = "a file of a failed save was not deleted; the next save here does that: %s"
                logger.warning(text, error)

        self._each([one for one in begun if one.info is None], FileUpload.abandon)
        self._each(made, delete)
        if self._claim is not None:  # last: some readers accept files without an index as a model
            delete(self._claim)

    def _expect(self, key: str, expected: ObjectInfo | None) -> None:
        """Checks that no other writer has changed an object since the save began.

        Args:
            key: The key of the object.
            expected: The object as it has to be; None if it must not exist.

        Raises:
            PreconditionFailedError: If the object differs from ``expected``.
        """
        current = None
        with contextlib.suppress(ObjectNotFoundError):
            current = self._retrier.call(lambda: self._store.head(key))
        if current != expected:
            raise PreconditionFailedError(
                "another writer has written or deleted this file since the save began; save again",
                uri=self._store.uri(key),
                certain=True,
            )

    def _delete(self, infos: Iterable[ObjectInfo]) -> None:
        """Deletes objects; ``model.safetensors`` first, as readers look for that file first."""
        ordered = sorted(infos, key=lambda info: info.key != self._uri.key(SINGLE_FILE))
        delete = functools.partial(self._delete_one, retrier=self._retrier)
        self._each(ordered[:1], delete)
        self._each(ordered[1:], delete)

    def _delete_one(self, info: ObjectInfo, retrier: Retrier) -> None:
        """Deletes an object, on the condition that it is unchanged if the store honours conditions.

        Raises:
            PreconditionFailedError: If the object has changed.
        """
        version = info.version if self._conditional else None
        retrier.call(lambda: self._store.delete(info.key, if_version=version))

    def _each(self, items: Sequence[_T], action: Callable[[_T], _S]) -> list[_S]:
        """Returns the results of ``action`` for all items, in order; calls it in several threads.

        There are at most ``Config.requests_at_once`` threads.
        """
        return View(self._uri, self._config).each(action, items)


def model_location(uri: URILike) -> CheckpointURI:
    """Parses the location of a model to be written.

    Raises:
        InvalidURIError: If ``uri`` is not a valid location, or that of a single file.
    """
    found = CheckpointURI.parse(uri)
    if found.prefix.endswith(SUFFIX):
        raise InvalidURIError(
            f"{found} is the name of a file, but a model is saved to a folder, with one or "
            "several files: give the folder"
        )
    return found


def find_older_model(view: View) -> dict[str, ObjectInfo]:
    """Lists the index and files of an existing model, or of an interrupted save, by name.

    The files are those with names that transformers gives to the files of a model, and those that
    the index names; other files, such as adapters, are not listed. The result is empty if there is
    no such file.

    Raises:
        ConfigError: If there is no such file, and the location is the folder of a run.
        StoreError: If the store refuses or stays unreachable.
    """
    uri = view.location
    below = uri.key("")
    files: dict[str, ObjectInfo] = {}
    for prefix in (SINGLE_FILE, "model-"):  # the index before the files that it names
        for info in view.objects(below + prefix):
            name = info.key.removeprefix(below)
            if name == INDEX or _is_usual(name):
                files[name] = info
    if INDEX in files:
        for name in set(_named_by(view)) - files.keys():
            if not _is_usual(name):
                with contextlib.suppress(ObjectNotFoundError):
                    files[name] = view.look(uri.key(name))
    if not files:
        refuse_run(view)
    return files


def _is_usual(name: str) -> bool:
    """Returns whether a name is one that transformers gives to the files of a model."""
    return name == SINGLE_FILE or _NUMBERED.fullmatch(name) is not None


def _named_by(view: View) -> Iterable[str]:
    """Returns the names of the files that the index lists; none if there is no valid index."""
    uri = view.location
    try:
        data = view.read(uri.key(INDEX), limit=MOST_INDEX_BYTES)
        return () if is_claim(data) else parse_index(data, uri.object(INDEX)).values()
    except (CheckpointCorruptError, ObjectNotFoundError, ObjectTooLargeError):
        return ()
