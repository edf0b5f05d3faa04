"""Searches for runs: all runs beneath a location, or the folders that match a pattern.

A run is a folder that has a checkpoint, or the leftovers of a killed save, in a direct subfolder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

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
    """Lists the folders that match a pattern; a location without ``*`` and ``?`` is returned as is.

    The pattern is matched folder name by folder name, as in a shell: ``*`` never matches ``/``.

    Raises:
        CheckpointNotFoundError: If no folder matches.
        InvalidURIError: If the text before the pattern is not a valid location.
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
    found = [CheckpointURI.parse(before or ("/" if location.startswith("/") else "."))]
    view = View(found[0], config_or_default(config))
    for name in filter(None, names[first:]):
        found = [
            uri.join(folder)
            for uri in found
            for folder in view.folders(uri.key(""))
            if fnmatchcase(folder, name) and CheckpointURI.accepts(f"{uri}/{folder}")
        ]
    if not found:
        raise CheckpointNotFoundError("no folder matches this pattern", uri=location)
    return [str(uri) for uri in found]


def runs_beneath(
    location: URILike, *, step_name: str = DEFAULT_PATTERN, config: Config | None = None
) -> list[Run]:
    """Searches a folder or bucket, and the folders beneath it, for runs; sorted by location.

    Five levels of folders are searched, each folder in one request. Not searched are folders whose
    names begin with a dot, folders of checkpoints, and folders whose first thousand names are all
    names of files.

    Raises:
        InvalidURIError: If ``location`` is not a valid location.
        ConfigError: If ``step_name`` is not a valid pattern.
        StoreError: If the store refuses or stays unreachable.
    """
    root = Run(location, step_name=step_name, config=config)
    view, level, found = root.view, [root.root], set[CheckpointURI]()
    for _ in range(_DEEPEST):
        looked = dict(zip(level, view.each(partial(_Folder.of, view), level), strict=True))
        folders = {uri: folder for uri, folder in looked.items() if not folder.is_checkpoint}
        found |= {uri.parent for uri in looked.keys() - folders.keys() if uri != root.root}
        known = [(uri, *folder.children(uri, root)) for uri, folder in folders.items()]
        has_steps = view.each(lambda one: any(is_checkpoint(view, uri) for uri in one[1]), known)
        found |= {uri for (uri, _, _), is_run in zip(known, has_steps, strict=True) if is_run}
        level = [uri for _, _, others in known for uri in others]
    return [Run(uri, step_name=step_name, config=root.config) for uri in sorted(found, key=str)]


@dataclass(frozen=True)
class _Folder:
    """A listed folder: the names of its subfolders, and whether it is a checkpoint."""

    names: Sequence[str]
    is_checkpoint: bool

    @classmethod
    def of(cls, view: View, uri: CheckpointURI) -> _Folder:
        """Lists a folder, and checks whether it is a checkpoint."""
        level = view.level(below := uri.key(""))
        names = [one for one in level if isinstance(one, str)]
        if names and len(level) >= AT_FIRST:
            names = view.folders(below)
        objects = [one for one in level if isinstance(one, ObjectInfo)]
        return cls(names, any(is_ours(info.key.removeprefix(below)) for info in objects))

    def children(
        self, uri: CheckpointURI, run: Run
    ) -> tuple[list[CheckpointURI], list[CheckpointURI]]:
        """Returns the newest subfolders that are named like steps, and all other subfolders."""
        accepted = [name for name in self.names if CheckpointURI.accepts(f"{uri}/{name}")]
        others = [name for name in accepted if run.names.step(name) is None and name[0] != "."]
        steps = [run.names.name(step) for step in run.steps_among(accepted)[-_STEPS_TRIED:]]
        return [uri.join(name) for name in steps], [uri.join(name) for name in others]


def is_checkpoint(view: View, uri: CheckpointURI) -> bool:
    """Returns whether a folder directly contains objects of a checkpoint, committed or not."""
    return _Folder.of(view, uri).is_checkpoint
