"""Fills a large buffer in one call, without competing for the GIL on every small read.

Without TLS, ``MSG_WAITALL`` makes the kernel fill the buffer; otherwise a call returns what has
arrived, some hundred kilobytes. The rest of this module is about TLS.

Python's ``SSLSocket.recv_into`` returns one TLS record, 16 KiB: a GiB takes 65,000 calls, each of
which releases the GIL and waits for it. With sixteen connections on four cores this waiting costs
three times the CPU of the cipher, and beside a thread that holds the GIL a load almost stops.
OpenSSL can fill a whole buffer in one call, made here without the GIL, on the same connection::

    BIO_f_buffer       repeats reads until the destination is full; keeps no data, see below
    BIO_f_ssl          reads a record by SSL_read
    SSL                Python's own, set up and verified by Python and urllib3
    BIO_f_buffer       128 KiB of ciphertext: one system call for eight records, not two for each
    the socket's BIO   Python's own

Everything else stays with Python: handshakes, small reads, writes, errors. If the native call
fails, it leaves the connection's state as it is, and Python's own read meets the same error and
raises it.

Python offers no access to the ``SSL*``. It is a member of a private struct, between two pointers
that are known. The code does not rely on a Python version: each connection verifies the pointer,
see :func:`_ssl_of`. If that fails, as in a Python with statically linked OpenSSL, the connection
uses Python's own reads.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import io
import logging
import os
import socket
import ssl
import sys
import sysconfig
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = [
    "BodyReader",
    "LongReadSocket",
    "LongReadTLSSocket",
    "WatchedSocket",
    "has_unread",
    "is_available",
]

logger = logging.getLogger("cloudckpt")

_LONG = 64 * 1024
"""Bytes; reads up to this size use Python's own method. It must exceed what a BIO_f_buffer holds by
itself, 4 KiB.
"""

_AHEAD = 8 * 1024
"""Bytes read ahead at the beginning of a response. Python 3.14's default of 128 KiB would be a long
read, which waits for bytes that the server does not send.
"""

_CIPHERTEXT = 128 * 1024
"""Bytes taken from the kernel in one call; more would not fit the CPU's caches."""

# macros of openssl/bio.h, unchanged since 1.0
_BIO_NOCLOSE = 0
_BIO_CTRL_PENDING = 10
_BIO_C_SET_SSL = 109
_BIO_C_SET_BUFF_SIZE = 117

_APP_DATA = 0  # the index that SSL_set_app_data uses


class _UnfitError(Exception):
    """Raised with the reason why a connection must use Python's own reads."""


def is_available() -> bool:
    """Returns whether this interpreter has an OpenSSL that connections may try to read by."""
    try:
        _openssl()
    except _UnfitError:
        return False
    return True


@dataclass(frozen=True)
class _OpenSSL:
    """Functions of the OpenSSL library that Python's ``_ssl`` module has loaded."""

    read: Any  # BIO_read; the only function called without the GIL
    with_gil: ctypes.PyDLL


@functools.cache
def _openssl() -> _OpenSSL:
    """Loads the functions of OpenSSL; raises _UnfitError if this interpreter has none to use.

    The error is not cached: each call checks again, which takes microseconds.
    """
    if sys.implementation.name != "cpython":
        raise _UnfitError(f"the Python implementation is {sys.implementation.name}, not CPython")
    if sys.platform != "linux":
        raise _UnfitError(f"the platform is {sys.platform}")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise _UnfitError("the Python is free-threaded")
    import _ssl

    # None: the Python executable and its libraries, if OpenSSL's symbols are visible there
    path = getattr(_ssl, "__file__", None)
    pointer, number = ctypes.c_void_p, ctypes.c_int
    try:
        library = ctypes.PyDLL(path)
        for name, result, arguments in (
            ("BIO_ctrl", ctypes.c_long, (pointer, number, ctypes.c_long, pointer)),
            ("BIO_f_buffer", pointer, ()),
            ("BIO_f_ssl", pointer, ()),
            ("BIO_free_all", None, (pointer,)),
            ("BIO_new", pointer, (pointer,)),
            ("BIO_push", pointer, (pointer, pointer)),
            ("BIO_s_socket", pointer, ()),
            ("BIO_up_ref", number, (pointer,)),
            ("ERR_clear_error", None, ()),
            ("SSL_get_SSL_CTX", pointer, (pointer,)),
            ("SSL_get_ex_data", pointer, (pointer, number)),
            ("SSL_get_fd", number, (pointer,)),
            ("SSL_get_rbio", pointer, (pointer,)),
            ("SSL_set0_rbio", None, (pointer, pointer)),
            ("SSL_set_quiet_shutdown", None, (pointer, number)),
            ("TLS_method", pointer, ()),
            ("dladdr", number, (pointer, pointer)),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        read = ctypes.CDLL(path).BIO_read
        read.restype, read.argtypes = number, (pointer, pointer, number)
    except (AttributeError, OSError) as exc:
        where = "linked into Python" if path is None else "not accessible"
        raise _UnfitError(f"OpenSSL is {where}: {exc}") from exc
    return _OpenSSL(read, library)


_WORD = ctypes.sizeof(ctypes.c_void_p)
_FIRST = 4  # leading words of a BIO or SSL that include its method table, OpenSSL 1.1 to 3.6

_Words = tuple[int, ...]


def _words(address: int) -> _Words:
    """Reads the first words at an address that may be invalid, without the risk of a crash.

    The kernel reads the memory, as the data of a write to a pipe: for an invalid address the write
    fails. A pipe is only guaranteed to hold a few pages, and this is a few words.

    Raises:
        _UnfitError: If the address is null, misaligned or not readable.
    """
    if not address or address % _WORD or address >= 1 << (8 * _WORD - 1):
        raise _UnfitError("a pointer to OpenSSL's TLS connection is null or invalid")
    there = (ctypes.c_char * (_FIRST * _WORD)).from_address(address)
    try:
        taken, given = os.pipe()
        try:
            os.write(given, there)
            data = os.read(taken, ctypes.sizeof(there))
        finally:
            os.close(given)
            os.close(taken)
    except OSError as exc:
        raise _UnfitError(
            f"a pointer to OpenSSL's TLS connection can't be followed: {exc}"
        ) from exc
    return tuple(memoryview(data).cast("P"))


class _Loaded(ctypes.Structure):
    """The struct ``Dl_info`` of dlfcn.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _loaded(address: int, library: ctypes.PyDLL) -> int | None:
    """Returns the base address of the library that contains an address (not dereferenced)."""
    found = _Loaded()
    return found.base if library.dladdr(address, ctypes.byref(found)) else None


def _own_words(thing: Any, kind: type, count: int) -> _Words:
    """Reads the first words of a Python object after its header, within the object's size.

    Raises:
        _UnfitError: If the object has another type, or is smaller.
    """
    head = object.__basicsize__
    if not isinstance(thing, kind) or type(thing).__basicsize__ < head + count * _WORD:
        raise _UnfitError("Python's TLS connection object has an unknown layout")
    return tuple((ctypes.c_size_t * count).from_address(id(thing) + head))


def _ssl_of(sock: ssl.SSLSocket, sslobj: Any, library: ctypes.PyDLL) -> int:
    """Finds the ``SSL*`` of a socket, verifying each pointer before it is followed.

    1. It is the member of Python's object between two pointers that are known.
    2. Its first words are readable, as the kernel confirms, and one of them points into the library
       that contains ``TLS_method``. Only objects of this copy of libssl have a method table there;
       Python objects, socket BIOs and sessions have not.
    3. It is not an ``SSL_CTX``, which has such a table as well: it differs from that of Python's
       context.
    4. So it is an ``SSL``, whose functions may be called: it refers to this object, this context
       and this socket.
    5. It reads from a socket BIO of the libcrypto whose functions are called here.

    Raises:
        _UnfitError: If a step fails.
    """
    import _ssl

    # struct PySSLSocket { PyObject_HEAD; PyObject *Socket; SSL *ssl; PySSLContext *ctx; ...
    # struct PySSLContext { PyObject_HEAD; SSL_CTX *ctx; ...
    # Socket is a weak reference without callback; an object has only one such reference.
    reference = weakref.ref(sock)
    kind = _ssl._SSLSocket  # type: ignore[attr-defined]
    before, found, behind = _own_words(sslobj, kind, 3)
    context = sslobj.context
    if before != id(reference) or behind != id(context):
        raise _UnfitError("Python's TLS connection object has an unknown layout")
    [shared] = _own_words(context, _ssl._SSLContext, 1)
    home = _loaded(library.TLS_method(), library)
    if found == shared or home is None:
        raise _UnfitError("Python's TLS connection object has an unknown layout")
    if all(_loaded(word, library) != home for word in _words(found)):
        raise _UnfitError("the OpenSSL library that was loaded is not the one that Python uses")
    if library.SSL_get_ex_data(found, _APP_DATA) != id(sslobj):
        raise _UnfitError("OpenSSL's TLS connection does not refer to Python's object")
    if library.SSL_get_SSL_CTX(found) != shared:
        raise _UnfitError("OpenSSL's TLS connection has an unexpected context")
    if library.SSL_get_fd(found) != sock.fileno():
        raise _UnfitError("OpenSSL's TLS connection has an unexpected socket")
    if library.BIO_s_socket() not in _words(library.SSL_get_rbio(found) or 0):
        raise _UnfitError("OpenSSL's TLS connection does not read from its socket")
    return int(found)


class _Chain:
    """The chain of BIOs that reads from one TLS connection.

    It keeps Python's object alive, and with it the ``SSL``: a reading thread holds the chain, so
    that nothing is freed under it if another thread closes the socket.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._upper: int | None = None
        openssl = _openssl()
        library = self._library = openssl.with_gil
        self._read = openssl.read
        self.sslobj: Any = sock._sslobj  # type: ignore[attr-defined]
        tls = _ssl_of(sock, self.sslobj, library)
        below = library.BIO_new(library.BIO_f_buffer())
        records = library.BIO_new(library.BIO_f_ssl())
        upper = library.BIO_new(library.BIO_f_buffer())
        for_reads = ctypes.byref(ctypes.c_int(0))
        if not (
            below
            and records
            and upper
            and library.BIO_ctrl(below, _BIO_C_SET_BUFF_SIZE, _CIPHERTEXT, for_reads)
        ):
            for bio in (below, records, upper):
                library.BIO_free_all(bio)  # NULL is ignored
            raise _UnfitError("OpenSSL could not allocate its buffers (BIO)")
        # SSL_set0_rbio drops one reference of the old BIO and takes ownership of the new BIO
        plain = library.SSL_get_rbio(tls)
        library.BIO_up_ref(plain)
        library.SSL_set0_rbio(tls, library.BIO_push(below, plain))
        # A BIO_f_ssl calls SSL_shutdown when it is freed, even with BIO_NOCLOSE. In quiet mode that
        # sends nothing: the socket may belong to a parent process, or its descriptor to another
        # connection by then. Python itself sends a TLS shutdown only in `unwrap`, which is not
        # called here.
        library.SSL_set_quiet_shutdown(tls, 1)
        library.BIO_ctrl(records, _BIO_C_SET_SSL, _BIO_NOCLOSE, tls)
        self._below = below
        self._upper = library.BIO_push(upper, records)

    def read_into(self, view: memoryview) -> int:
        """Fills `view`, of more than 4 KiB; returns fewer bytes only at an error or the end.

        A BIO_f_buffer that is asked for more than it can hold reads straight into the destination.
        So the upper BIO never keeps plaintext that Python's own reads would miss.
        """
        start = ctypes.c_char.from_buffer(view)
        return int(self._read(self._upper, ctypes.addressof(start), view.nbytes))

    @property
    def unread(self) -> int:
        """Bytes of ciphertext that were received but not decrypted yet."""
        return int(self._library.BIO_ctrl(self._below, _BIO_CTRL_PENDING, 0, None))

    def __del__(self) -> None:
        if self._upper is not None:
            self._library.BIO_free_all(self._upper)
            # errors that a broken connection left in this thread's queue must not reach the next
            # connection
            self._library.ERR_clear_error()


def has_unread(sock: ssl.SSLSocket) -> bool:
    """Returns whether a TLS connection holds received but unread data outside of the kernel."""
    chain = sock._chain if isinstance(sock, LongReadTLSSocket) else None
    return sock.pending() > 0 or (chain is not None and chain.unread > 0)


class BodyReader(io.BufferedReader):
    """A buffered reader whose long reads report all bytes that arrived before the connection broke.

    A BufferedReader reads until its buffer is full; if that fails, it does not report the bytes
    already received, up to a whole step, which would have to be sent again. A long read fills the
    caller's buffer by itself. Short reads, and chunks (which http.client reads whole), are left to
    BufferedReader.
    """

    has_chunks = True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Reads into `buffer`; a long read of a body without chunks is one call to the socket."""
        if self.has_chunks or memoryview(buffer).nbytes <= _LONG:
            return super().readinto(buffer)
        return self.readinto1(buffer)


class WatchedSocket(socket.socket):
    """A socket without a timeout: the watch ends whatever takes too long.

    urllib3 sets a timeout before each request and response. Each would be a system call, which
    releases the GIL and waits for it.
    """

    is_watched = False

    fills_buffers = True
    """Whether a long read returns fewer bytes only if there are no more, or at a failure."""

    def makefile(self, mode: str = "r", buffering: int | None = None, **text: Any) -> Any:
        """Returns ``socket.makefile``'s file, with a :class:`BodyReader` for a BufferedReader."""
        file = super().makefile(mode, buffering, **text)  # type: ignore[call-overload]
        if type(file) is not io.BufferedReader:
            return file
        return BodyReader(file.detach(), _AHEAD if buffering is None else buffering)

    def settimeout(self, value: float | None) -> None:
        """Sets the timeout, but does nothing once the socket is watched."""
        if not self.is_watched:
            super().settimeout(value)

    def watched(self) -> None:
        """Removes the timeout and ignores later ones; the watch takes over."""
        self.settimeout(None)
        self.is_watched = True


class LongReadSocket(WatchedSocket):
    """A plain socket that fills the buffer of a long read in one call, if it has no timeout."""

    @classmethod
    def of(cls, sock: socket.socket) -> LongReadSocket:
        """Returns a socket that takes over the connection of `sock`, which becomes unusable."""
        return cls(sock.family, sock.type, sock.proto, fileno=sock.detach())

    def recv_into(self, buffer: WriteableBuffer, nbytes: int = 0, flags: int = 0) -> int:
        """Receives into `buffer`; a long read returns when the buffer is full or the data ends."""
        wanted = nbytes or memoryview(buffer).nbytes
        if wanted > _LONG and not flags and self.gettimeout() is None:
            flags = socket.MSG_WAITALL
        return super().recv_into(buffer, nbytes, flags)


class LongReadTLSSocket(WatchedSocket, ssl.SSLSocket):
    """A TLS socket that makes each long read in one native call, where that is possible.

    A read of more than 64 KiB into a socket without a timeout then returns when the buffer is full
    or the connection has ended. One thread at a time may use the socket, as with every
    ``SSLSocket``; another thread may shut it down with ``socket.shutdown``, or close it.
    """

    _chain: _Chain | None = None
    _tried = False

    @property
    def fills_buffers(self) -> bool:  # type: ignore[override]
        return self._chain is not None if self._tried else is_available()

    def getpeername(self) -> Any:
        """Returns the peer's address, as needed by the handshake; closes a broken socket.

        If the connection was broken just before (by the peer or another thread), Python takes the
        socket for one that is still to be connected, and does not close it.
        """
        try:
            return super().getpeername()
        except OSError as exc:
            if self._sslobj is not None or self.fileno() < 0:  # type: ignore[attr-defined]
                raise
            self.close()
            raise ConnectionResetError(
                errno.ECONNRESET, "the connection was broken before TLS began"
            ) from exc

    def do_handshake(self, block: bool = False) -> None:
        """Performs the handshake; closes the socket if that fails, also by a KeyboardInterrupt."""
        try:
            super().do_handshake(block)
        except BaseException:
            self.close()
            raise

    def recv_into(self, buffer: WriteableBuffer, nbytes: int | None = None, flags: int = 0) -> int:
        """Receives into `buffer`: a long read in one native call, others as ``SSLSocket`` does."""
        view = memoryview(buffer).cast("B")
        wanted = min(nbytes, view.nbytes) if nbytes else view.nbytes
        if wanted > _LONG and not flags and self.gettimeout() is None:
            chain = self._chain or self._new_chain()
            if chain is not None and chain.sslobj is self._sslobj:  # type: ignore[attr-defined]
                count = chain.read_into(view[:wanted])
                if count > 0:
                    return count
        # Python's read meets the same end or error; or a signal interrupted, whose handler has run
        # by now
        return super().recv_into(buffer, nbytes, flags)

    def _new_chain(self) -> _Chain | None:
        if self._tried:
            return None
        self._tried = True
        try:
            self._chain = _Chain(self)
        except _UnfitError as exc:
            # as text: a log record that is kept must not keep the connection
            why = str(exc)
            logger.debug("TLS connections are read record by record, which is slower: %s", why)
        else:
            logger.debug("TLS connections are read in whole buffers, without the GIL")
        return self._chain

    def _real_close(self) -> None:
        """Closes the socket, after its last file object; ``socket.close`` calls it."""
        self._chain = None
        super()._real_close()  # type: ignore[misc]
