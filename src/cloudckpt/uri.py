"""Parses, checks and joins the URIs of checkpoints."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Union
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from cloudckpt.errors import InvalidURIError

__all__ = ["CheckpointURI", "URILike"]

CLOUD_SCHEMES = frozenset({"s3", "gs", "az"})
_SCHEMES = CLOUD_SCHEMES | {"hf", "file"}
_FORMS = (
    "s3://bucket/path, gs://bucket/path, az://container/path, hf://buckets/namespace/name/path, "
    "abfss://container@account.dfs.core.windows.net/path, file:///path or a local path"
)

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]*)://")
_FOREIGN = {  # schemes of other tools, and what to write instead
    "gcs": "write gs://bucket/path",
    "local": "write file:///path",
    **dict.fromkeys(("s3a", "s3n"), "write s3://bucket/path"),
    "azure": "write az://container/path",
    **dict.fromkeys(("wasb", "wasbs"), "write abfss://container@account.dfs.core.windows.net/path"),
    "dbfs": "on Databricks write /dbfs/path, or better the path of a volume, /Volumes/path",
    **dict.fromkeys(
        ("hdfs", "webhdfs", "viewfs", "nfs", "sftp", "ssh", "smb"),
        "mount it, by NFS or FUSE, and write the path of the folder",
    ),
    **dict.fromkeys(
        ("b2", "ceph", "cos", "cosn", "minio", "obs", "oss", "r2"),
        "write s3://bucket/path, and set AWS_ENDPOINT_URL_S3 to the URL of the service",
    ),
}
_FOREIGN_SCHEME = re.compile(rf"({'|'.join(_FOREIGN)}):/", re.IGNORECASE)
_AZURE_SCHEMES = frozenset({"abfss", "abfs", "https"})
_CONTAINER = r"[a-z0-9$][a-z0-9-]*"
# hosts of the public cloud, China, US Government, and of accounts in DNS zones
_AZURE_HOST = re.compile(
    r"([a-z0-9]{3,24}(?:-secondary)?(?:-ipv6|-dualstack)?(?:\.z\d+)?(?:\.privatelink)?)"
    r"\.(?:blob|dfs)\."
    r"(core\.windows\.net|core\.chinacloudapi\.cn|core\.usgovcloudapi\.net|storage\.azure\.net)"
)
# a folder named like a URI scheme of a cloud, or like other tools' schemes; https: and file: may be
# folders unless they come first
_FOLDED = re.compile(
    r"(?:^|/)(?P<scheme>(?:s3[an]?|gs|gcs|az|abfss?|wasbs?|adl):|https:(?=/+"
    + _AZURE_HOST.pattern
    + r"(?:/|$))|hf:(?=/+buckets/)|\A(?:https|file):(?=/(?!/)))"
    r"(?:/+(?P<rest>.*))?$",
    re.IGNORECASE | re.DOTALL,
)
# text before the scheme, no slashes after it, or no colon turns a URI into a local folder
_NEARLY = re.compile(
    r"[\s'\"<\ufeff]+[a-z][a-z0-9+.\-]*:/|(?:s3[an]?|gs|gcs|az|abfss?)(?::[^/]|(?!://)[^\w/]*//)",
    re.IGNORECASE,
)
_STORAGE_BUCKET = re.compile(r"(buckets/[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/|$)", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_HALVES = re.compile(r"[\ud800-\udfff]")
_ACCESS_POINT = re.compile(
    r"(arn:aws[a-z-]*:s3:[a-z0-9-]+:\d{12}:accesspoint)[:/]([A-Za-z0-9-]+)(?:/|$)"
)
# suffixes and ARNs that AWS reserves for S3 resources other than buckets and access points
_NO_BUCKET = re.compile(r"[^/]*(?:--(?:xa|ol|op|table)-s3|\.mrap)(?:/|$)|arn:")
_NO_BUCKET_ADVICE = (
    "which can't hold checkpoints (access points of directory buckets, multi-region and Object "
    "Lambda access points, Outposts and table buckets are not supported): write s3://bucket/path "
    "or s3://arn:aws:s3:region:account:accesspoint/name/path"
)

URILike = Union[str, "os.PathLike[str]", "CheckpointURI"]


@dataclass(frozen=True)
class CheckpointURI:
    """A parsed location: ``scheme://bucket/prefix``.

    It is not a ``pathlib.Path``: a path would collapse ``s3://`` into ``s3:/``.

    Attributes:
        scheme: ``s3``, ``gs``, ``az``, ``hf`` or ``file``.
        bucket: The bucket or container, or the ARN of an S3 access point; empty for ``file``.
        prefix: The key prefix without slashes at its ends; for ``file`` the absolute path.
        account: The host of the storage account's blob endpoint, if an ``az`` location names it;
            otherwise empty.
    """

    scheme: str
    bucket: str
    prefix: str
    account: str = ""

    @classmethod
    def accepts(cls, location: URILike) -> bool:
        """Returns whether :meth:`parse` accepts a location."""
        try:
            cls.parse(location)
        except InvalidURIError:
            return False
        return True

    @classmethod
    def parse(cls, location: URILike) -> CheckpointURI:
        """Parses a location as a user writes it.

        Args:
            location: A URI, a local path, or an instance of this class, which is returned.

        Raises:
            InvalidURIError: If the location can't name a checkpoint; the message says why.
        """
        if isinstance(location, CheckpointURI):
            return location
        text = text_of(location)
        if text is None:
            raise InvalidURIError(
                f"a checkpoint location must be a string or a path, "
                f"not {type(location).__name__}; write {_FORMS}"
            )
        if not text.strip():
            raise InvalidURIError(f"the checkpoint location is empty; write {_FORMS}")
        if _CONTROL.search(text):
            raise InvalidURIError(f"{_shown(text)!r} contains a control character: remove it")
        try:
            os.fsencode(text)
        except UnicodeEncodeError:
            raise InvalidURIError(
                f"{_shown(text)!r} contains half of a surrogate pair, which UTF-8 can't encode: "
                "use another name"
            ) from None
        if foreign := _FOREIGN_SCHEME.match(text):
            scheme = foreign[1].lower()
            raise InvalidURIError(
                f"unknown scheme {scheme!r} in {_shown(text)!r}: {_FOREIGN[scheme]}"
            )
        if (lost := unfolded(text)) is not None:
            whole = lost if cls.accepts(lost) else _shown(lost)  # container@account is not a secret
            raise InvalidURIError(
                f"{_shown(text)!r} would be a local folder, because a URI lost a slash "
                "(pathlib.Path and os.path collapse // to /); pass the string "
                f'"{whole}" instead'
            )
        if _NEARLY.match(text):
            raise InvalidURIError(
                f"{_shown(text)!r} looks like a mistyped URI, and would be read as a local "
                f"folder; write {_FORMS}"
            )
        match = _SCHEME.match(text)
        if match is None:
            return cls("file", "", _absolute(os.path.expanduser(text)))
        scheme, rest = match.group(1).lower(), text[match.end() :]
        if scheme in _AZURE_SCHEMES:
            return cls._azure(scheme, rest, text)
        if scheme not in _SCHEMES:
            raise InvalidURIError(f"unknown scheme {scheme!r} in {_shown(text)!r}; write {_FORMS}")
        return cls._file(text) if scheme == "file" else cls._object(scheme, rest, text)

    @classmethod
    def _file(cls, text: str) -> CheckpointURI:
        try:
            parts = urlsplit(text)
            is_valid = parts.netloc in ("", "localhost") and parts.path.startswith("/")
        except ValueError:  # for brackets and other characters that no host contains
            is_valid = False
        if not is_valid:
            raise InvalidURIError(
                f"{_shown(text)!r} is not a valid local file URI; write file:///absolute/path"
            )
        if "?" in text or "#" in text:
            raise InvalidURIError(
                f"{_shown(text)!r}: write %3F for '?' and %23 for '#' in a file URI"
            )
        # file names need not be UTF-8
        path = os.fsdecode(unquote_to_bytes(os.fsencode(parts.path)))
        if _CONTROL.search(path):
            raise InvalidURIError(f"{_shown(text)!r} contains a control character: remove it")
        return cls("file", "", os.path.abspath(path))

    @classmethod
    def _azure(cls, scheme: str, rest: str, text: str) -> CheckpointURI:
        """Parses `text`, an ``abfss``, ``abfs`` or ``https`` URI; `rest` follows its ``://``."""
        authority, slash, path = rest.partition("/")
        if scheme == "https":
            container, host = "", authority.lower()
        else:
            container, at, host = authority.partition("@")
            if not at:
                return cls._object("az", rest, text)
            host = host.lower()
        match = _AZURE_HOST.fullmatch(host)
        if match is None or (container and not re.fullmatch(_CONTAINER, container)):
            raise InvalidURIError(
                f"{_shown(text)!r} is not a location in Azure Blob Storage: its host, or the name "
                "of its account (3 to 24 lowercase letters and digits) or container (lowercase "
                "letters, digits and hyphens), is not valid; write "
                "abfss://container@account.dfs.core.windows.net/path or "
                "https://account.blob.core.windows.net/container/path. For another endpoint "
                "write az://container/path with Config(azure=AzureOptions(endpoint_url=...)); "
                "stores with the API of S3 are s3://bucket/path with "
                "S3Options(endpoint_url=...)"
            )
        if "sig=" in path.partition("?")[2]:
            raise InvalidURIError(
                f"{_shown(text)!r} contains a shared access signature: remove it, and set "
                "AZURE_STORAGE_SAS_TOKEN and AZURE_STORAGE_ACCOUNT instead"
            )
        if scheme == "https":  # https URLs are percent-encoded; the other forms are taken literally
            if re.search(r"%(?![0-9A-Fa-f]{2})", path):
                raise InvalidURIError(f"{_shown(text)!r}: write %25 for '%' in an https URI")
            try:
                rest = unquote(path, errors="strict")
            except UnicodeDecodeError:
                raise InvalidURIError(
                    f"{_shown(text)!r} is not percent-encoded UTF-8: encode it, or write "
                    "az://container/path"
                ) from None
            if _CONTROL.search(rest):
                raise InvalidURIError(f"{_shown(text)!r} contains a control character: remove it")
        else:
            rest = f"{container}{slash}{path}"
        found = cls._object("az", rest, text)
        return cls("az", found.bucket, found.prefix, f"{match[1]}.blob.{match[2]}")

    @classmethod
    def _object(cls, scheme: str, rest: str, text: str) -> CheckpointURI:
        shown = _shown(text)
        bucket, _, prefix = rest.partition("/")
        if not bucket and scheme != "hf":
            raise InvalidURIError(f"{shown!r} names no bucket; write {scheme}://bucket/path")
        if scheme == "hf":
            known = _STORAGE_BUCKET.match(rest)
            if known is None:
                raise InvalidURIError(
                    f"{shown!r} names no Storage Bucket of Hugging Face: write "
                    "hf://buckets/namespace/name/path "
                    "(repositories of models and datasets take no checkpoints)"
                )
            bucket, prefix = known[1], rest[known.end() :]
        point = _ACCESS_POINT.match(rest) if scheme == "s3" else None
        if point is not None:
            bucket, prefix = f"{point[1]}/{point[2]}", rest[point.end() :]
        elif scheme == "s3" and "@" not in bucket and _NO_BUCKET.match(rest):
            raise InvalidURIError(f"{shown!r} names {bucket!r}, {_NO_BUCKET_ADVICE}")
        if point is None and ("@" in bucket or ":" in bucket):
            raise InvalidURIError(
                f"{shown!r} has credentials, or a host with a port, in place of a bucket: write "
                f"{scheme}://bucket/path; set credentials in the environment, as for the cloud's "
                "own tools, and the host by the option endpoint_url"
            )
        if "?" in rest or "#" in rest:
            raise InvalidURIError(
                f"{shown!r} has a query or a fragment, which checkpoint URIs do not have: remove it"
            )
        if _HALVES.search(rest):
            raise InvalidURIError(
                f"{shown!r} contains half of a surrogate pair (perhaps from a file name in another "
                "encoding), which UTF-8 can't encode: use another name"
            )
        prefix = prefix.removesuffix("/")
        segments = prefix.split("/") if prefix else []
        if "" in segments:
            raise InvalidURIError(
                f"{shown!r} contains an empty path segment ('//'): remove a slash"
            )
        if "." in segments or ".." in segments:
            raise InvalidURIError(
                f"{shown!r} contains '.' or '..', which object stores do not resolve: write the "
                "path without them"
            )
        return cls(scheme, bucket, prefix)

    @property
    def is_cloud(self) -> bool:
        """Whether the location is in a cloud object store."""
        return self.scheme in CLOUD_SCHEMES or self.scheme == "hf"

    def key(self, name: str) -> str:
        """Returns the store's key of the object `name` under this prefix.

        A name of the form ``../folder/name`` refers to an object of the location `folder` in the
        same parent folder.
        """
        at, name = self._of(name)
        return f"{at.prefix.rstrip('/')}/{name}" if at.prefix else name

    def join(self, *names: str) -> CheckpointURI:
        """Returns a location beneath this one, for example ``run.join("step-1000")``.

        Args:
            names: The names of nested folders; slashes at their ends are ignored.

        Raises:
            InvalidURIError: If the result is not a valid location.
        """
        below = "/".join(name.strip("/") for name in names)
        if self.scheme == "file":
            return CheckpointURI("file", "", os.path.abspath(f"{self.prefix.rstrip('/')}/{below}"))
        return CheckpointURI.parse(f"{str(self).rstrip('/')}/{below}")

    def can_join(self, name: str) -> bool:
        """Returns whether the location of the folder `name` beneath this one is valid.

        For example, "?" and "#" are valid in the name of a folder on a disk, but not in a URI.
        """
        return self.accepts(f"{self.prefix if self.scheme == 'file' else self}/{name}")

    @property
    def parent(self) -> CheckpointURI:
        """The parent folder; for the root of a bucket or file system, the root itself."""
        root = "/" if self.scheme == "file" else ""
        return replace(self, prefix=self.prefix.rstrip("/").rpartition("/")[0] or root)

    def object(self, name: str) -> str:
        """Returns the URI of the object `name`, for messages; see :meth:`key`."""
        at, name = self._of(name)
        return f"{at}/{name}"

    def _of(self, name: str) -> tuple[CheckpointURI, str]:
        """Returns the location that contains an object, and the object's name there."""
        if not name.startswith("../"):
            return self, name
        folder, _, name = name[3:].partition("/")
        return self.beside(folder), name

    def beside(self, folder: str) -> CheckpointURI:
        """Returns the location named `folder` in the same parent folder."""
        prefix = self.prefix.rstrip("/")
        return replace(self, prefix=prefix[: len(prefix) - len(self.folder)] + folder)

    @property
    def folder(self) -> str:
        """The name of the location in its parent folder; empty for a root, which has none."""
        return self.prefix.rstrip("/").rpartition("/")[2]

    def __str__(self) -> str:
        if self.scheme == "file":
            return Path(self.prefix).as_uri()
        return f"{self.root}/{self.prefix}" if self.prefix else self.root

    @property
    def root(self) -> str:
        """``scheme://bucket``, or ``abfss://container@host`` if the URI names the account."""
        if self.account:
            return f"abfss://{self.bucket}@{self.account.replace('.blob.', '.dfs.', 1)}"
        return f"{self.scheme}://{self.bucket}"


def _absolute(path: str) -> str:
    try:
        return os.path.abspath(path)
    # not raised as FileNotFoundError, on which some scripts begin a new run
    except FileNotFoundError as exc:
        raise InvalidURIError(
            f"{_shown(path)!r} is relative to the working directory, which no longer exists: "
            "change to another one, or write an absolute path",
            cause=exc,
        ) from exc


def text_of(location: object) -> str | None:
    """Returns a location as text; None if the object is no location, or a path in bytes.

    A location is a string, an object of any class whose ``str()`` is a URI, such as the path
    object of a library for cloud storage, or an ``os.PathLike``.
    """
    if isinstance(location, str):
        return str.__str__(location)  # the value of a member of a string enum
    text = str(location)
    if _SCHEME.match(text):
        return text
    path = os.fspath(location) if isinstance(location, os.PathLike) else None
    return path if isinstance(path, str) else None


def unfolded(path: str) -> str | None:
    """Returns the URI that ``pathlib`` has collapsed into this local path; None for other paths.

    ``s3:/bucket/run`` was ``s3://bucket/run``, and so was ``/home/me/s3:/bucket/run``. A folder of
    such a name is never intended, and data saved there would be lost with the machine.
    """
    if scheme := _SCHEME.match(path):
        if scheme.group(1).lower() != "file":
            return None
        path = unquote(path[scheme.end() :])
    for form in (path, _absolute(path)):  # a relative path may be beneath such a folder
        if found := _FOLDED.search(form):
            root = "///" if found["scheme"].lower() == "file:" else "//"
            return f"{found['scheme']}{root}{found['rest'] or ''}"
    return None


def _shown(text: str) -> str:
    """Returns the text without possible secrets: user information and the query."""
    text = re.sub(r":(/+).*@", r":\1***@", text, flags=re.DOTALL)
    return re.sub(r"\?.*", "?***", text, flags=re.DOTALL)
