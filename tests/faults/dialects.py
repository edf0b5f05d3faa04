"""The dialects that the suite speaks: S3, Google's and Azure's.

S3 is spoken over TLS, up to the proxy that breaks things, and ``plain s3`` is the same without it.

Operations and troubles are called the same in all of them, see ``wire.naming`` and
``refusals``; so most tests don't know which they run in.
"""

from typing import Any, NamedTuple

from cloudckpt import AzureOptions, GCSOptions, S3Options
from support.emulators import Azurite

AZURITE = Azurite(url="")

CREDENTIALS = {
    "azure": {"AZURE_STORAGE_ACCOUNT": AZURITE.account, "AZURE_STORAGE_KEY": AZURITE.key}
}
"""The environment that a dialect needs beside that of all tests."""


class Endpoint(NamedTuple):
    """A way to a store: the dialect and ``http://host:port``. As JSON, a list of two."""

    dialect: str
    url: str


def vendor_options(endpoint: Endpoint) -> dict[str, Any]:
    """The options of a Config that lead to an endpoint."""
    dialect, url = endpoint
    if dialect in ("s3", "plain s3"):
        return {"s3": S3Options(endpoint_url=url, addressing_style="path")}
    if dialect == "azure":
        return {"azure": AzureOptions(endpoint_url=f"{url}/{AZURITE.account}")}
    return {"gcs": GCSOptions(endpoint_url=url)}
