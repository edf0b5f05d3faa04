"""Remembers the progress of a long command, so that the same command resumes there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

__all__ = ["Unfinished"]

logger = logging.getLogger("cloudckpt")

_LIFETIME = 24 * 3600.0  # seconds after which stored progress is no longer used


class Unfinished:
    """A small file beneath ``$XDG_CACHE_HOME`` (``~/.cache``), one for each piece of work.

    Nothing depends on it: without a writable folder, which is logged once, or with an invalid file,
    interrupted work starts over.
    """

    def __init__(self, *work: object) -> None:
        """
        Args:
            work: What is done, on what, in which version of it: the same work uses the same file.
        """
        name = hashlib.sha256(json.dumps(work, default=str).encode()).hexdigest()
        root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        self.path = Path(root) / "cloudckpt" / f"{name}.json"
        self._began = time.time()
        self._has_place = True
        if not os.path.isabs(root):  # no HOME, and a user unknown to the system
            self._give_up("there is no home folder, and XDG_CACHE_HOME names no folder")

    def read(self) -> dict[str, Any]:
        """What was written last, if the work began within a day; otherwise empty."""
        if not self._has_place:
            return {}
        try:
            found = json.loads(self.path.read_bytes())
            began = float(found["began"])
            if not 0 <= time.time() - began < _LIFETIME:
                return {}
            state = dict(found["state"])
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._give_up(error)
            return {}
        except (ValueError, TypeError, KeyError) as error:
            logger.warning(
                "%s can't be read, so the work starts from the beginning: %s", self.path, error
            )
            return {}
        self._began = began
        return state

    def write(self, state: dict[str, Any]) -> None:
        """Replaces what was written before."""
        if not self._has_place:
            return
        data = json.dumps({"began": self._began, "state": state}).encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, temporary = tempfile.mkstemp(dir=self.path.parent)
            try:
                with open(descriptor, "wb") as file:
                    file.write(data)
                os.replace(temporary, self.path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            self._give_up(error)

    def _give_up(self, why: object) -> None:
        self._has_place = False
        logger.info("progress could not be recorded, so the work can't be resumed: %s", why)

    def forget(self) -> None:
        """Records that the work is done, by deleting the file."""
        if not self._has_place:
            return
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
