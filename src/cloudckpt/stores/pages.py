"""Listings, page by page: each page is requested when it is needed, and retried by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TypeVar

from cloudckpt.errors import ServerError
from cloudckpt.stores.base import Retry

__all__ = ["Marks", "all_pages"]

P = TypeVar("P")

Marks = tuple[str, ...]
"""Where a page begins, in the store's words; empty for the first page."""


def all_pages(
    uri: str, ask: Callable[[Marks], tuple[P, Marks | None]], retry: Retry
) -> Iterator[P]:
    """The pages of a listing, each asked for when it is needed, and again if it is refused.

    A store that says that there is more without saying where, or that leads back to a page that was
    there, would be asked without an end; and if that were taken for the end, what is left out would
    be taken for missing.

    Args:
        uri: What is listed, for messages.
        ask: Asks for the page that begins at some marks, none for the first. Returns it and the
            marks of the next one, or None after the last page.
        retry: Tries the request for a page again.

    Raises:
        ServerError: If they do not end.
    """
    begun: set[Marks] = {()}

    def ask_once(marks: Marks) -> tuple[P, Marks | None]:
        page, following = ask(marks)
        if following is not None and (not any(following) or following in begun):
            where = "back to a page that was there" if any(following) else "nowhere"
            raise ServerError(
                f"the listing does not end: its page leads {where}, although it says that more "
                "follows",
                uri=uri,
            )
        return page, following

    following: Marks | None = ()
    while following is not None:
        page, following = retry(functools.partial(ask_once, following))
        yield page
        if following is not None:
            begun.add(following)
