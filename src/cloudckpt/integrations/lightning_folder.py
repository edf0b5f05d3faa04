"""The folder of Lightning's checkpoint callback on a URI: what is newest, what may be deleted."""

from __future__ import annotations

from cloudckpt.config import Config
from cloudckpt.runs.catalog import CheckpointSummary, list_checkpoints
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["may_be_removed", "newest_in"]


def newest_in(folder: str, config: Config | None, name_of_last: str) -> set[str]:
    """The most recently written committed checkpoint of a folder, whatever its name, if any.

    Args:
        folder: The folder.
        config: Options for finding checkpoints.
        name_of_last: The prefix of the names of copies of the newest checkpoint.
    """

    def age(one: CheckpointSummary) -> tuple[float, bool, int]:
        """Ranks by age; within one second (stores' resolution) Lightning wrote the copy last."""
        is_last = one.uri.rpartition("/")[2].startswith(name_of_last)
        return one.modified or 0.0, is_last, one.step or -1

    found = [one for one in list_checkpoints(folder, config=config) if one.is_committed]
    newest = max(found, key=age, default=None)
    return set() if newest is None else {newest.uri}


def may_be_removed(previous: str, folder: URILike | None, resumed_from: URILike | None) -> bool:
    """Whether a job may delete a checkpoint that newer ones replace.

    It may delete from its own folder, but never what it resumed from. Lightning keeps these rules
    on local disks only: its callback resumes with the best checkpoint of the previous run, and the
    first save of the new run would delete that.

    Args:
        previous: The checkpoint, on a URI.
        folder: The folder of the job's callback.
        resumed_from: The job's ``ckpt_path``.
    """
    if folder is None or not CheckpointURI.accepts(folder):
        return False
    place = CheckpointURI.parse(previous)
    if resumed_from is not None and CheckpointURI.accepts(resumed_from):
        resumed = CheckpointURI.parse(resumed_from)
        if _without_account(resumed) == _without_account(place):
            return False
    return str(place).startswith(f"{str(CheckpointURI.parse(folder)).rstrip('/')}/")


def _without_account(place: CheckpointURI) -> tuple[str, str, str]:
    """An ``az`` location need not name its account."""
    return place.scheme, place.bucket, place.prefix
