"""Searches for runs: all runs beneath a location, or the folders that match a pattern.

A run is a folder that has a checkpoint, or the leftovers of a killed save, in a direct subfolder.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import partial
from itertools import compress

from cloudckpt.config import Config, config_or_default
from cloudckpt.errors import CheckpointNotFoundError, InvalidURIError
from cloudckpt.runs.catalog import Run, is_ours
from cloudckpt.runs.steps import DEFAULT_PATTERN
from cloudckpt.stores.base import ObjectInfo
from cloudckpt.transfer.view import AT_FIRST, View
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["is_checkpoint", "matching", "runs_beneath"]

_DEEPEST = 5  # how many levels of folders beneath a location are searched for runs
_STEPS_TRIED = 3  # how many folders named like steps are listed, to see if they are checkpoints
_WILD = ("*", "?")


def matching(location: str, config: Config | None = None) -> list[str]:
    """Lists the folders that match a pattern; a location without ``*`` and ``?`` is returned alone.

    The pattern is matched folder name by folder name, as in a shell: ``*`` never matches ``/``. A
    location without a pattern need not exist.

    Raises:
        CheckpointNotFoundError: If no folder matches.
        InvalidURIError: If the text before the pattern is not a valid location, or the name of the
            bucket contains a pattern.
        StoreError: If the store refuses or stays unreachable.
    """
    names = location.split("/")
    first = next((at for at, name in enumerate(names) if any(map(name.__contains__, _WILD))), None)
    if first is None:
        return [location]
    before = "/".join(names[:first])
    if before.endswith(":/"):
        raise InvalidURIError(
            f"{location!r} has a pattern in the name of the bucket: give the name of one bucket"
        )
    folders = [CheckpointURI.parse(before or ("/" if location.startswith("/") else "."))]
    view = View(folders[0], config_or_default(config))
    for name in filter(None, names[first:]):
        folders = [
            uri.join(folder)
            for uri in folders
            for folder in view.folders(uri.key(""))
            if fnmatchcase(folder, name) and uri.can_join(folder)
        ]
    if not folders:
        raise CheckpointNotFoundError(
            "no folder matches this pattern: check the location", uri=location
        )
    return [str(uri) for uri in folders]


def runs_beneath(
    location: URILike, *, step_name: str = DEFAULT_PATTERN, config: Config | None = None
) -> list[Run]:
    """Searches a folder or bucket, and the folders beneath it, for runs; sorted by location.

    Five levels of folders are listed, from the location down, each folder with one request per
    thousand names. Not listed are folders whose names begin with a dot, folders in checkpoints, and
    folders in which the first thousand names are names of files. Of folders named like steps only
    the newest three are looked into, to see whether they are checkpoints.

    Raises:
        InvalidURIError: If ``location`` is not a valid location.
        ConfigError: If ``step_name`` is not a valid pattern.
        StoreError: If the store refuses or stays unreachable.
    """
    root = Run(location, step_name=step_name, config=config)
    view, level, runs = root.view, [root.root], set[CheckpointURI]()
    for _ in range(_DEEPEST):
        beneath, steps = list[CheckpointURI](), list[list[CheckpointURI]]()
        for uri, (names, is_one) in zip(level, view.each(partial(_list, view), level), strict=True):
            if is_one:
                runs |= {uri.parent} - {root.root.parent}
                continue
            names = [name for name in names if uri.can_join(name)]
            newest = root.steps_among(names)[-_STEPS_TRIED:]
            steps.append([uri.join(root.names.name(step)) for step in newest])
            others = (name for name in names if root.names.step(name) is None and name[0] != ".")
            beneath += map(uri.join, others)
        are_runs = view.each(lambda group: any(is_checkpoint(view, uri) for uri in group), steps)
        runs |= {group[0].parent for group in compress(steps, are_runs)}
        level = beneath
    return [Run(uri, step_name=step_name, config=root.config) for uri in sorted(runs, key=str)]


def _list(view: View, uri: CheckpointURI) -> tuple[list[str], bool]:
    """Returns the names of subfolders, and whether the folder directly has a checkpoint's objects.

    The names are empty if the first thousand entries have no folder.
    """
    level = view.level(below := uri.key(""))
    names = [entry for entry in level if isinstance(entry, str)]
    if names and len(level) >= AT_FIRST:
        names = view.folders(below)
    objects = [entry for entry in level if isinstance(entry, ObjectInfo)]
    return names, any(is_ours(info.key.removeprefix(below)) for info in objects)


def is_checkpoint(view: View, uri: CheckpointURI) -> bool:
    """Returns whether a folder directly contains objects of a checkpoint, committed or not."""
    return _list(view, uri)[1]
