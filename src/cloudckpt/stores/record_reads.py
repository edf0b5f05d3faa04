"""Long reads of TLS where OpenSSL can't be called: record by record, by one thread at a time.

``SSLSocket.recv_into`` returns one record, 16 KiB, and gives the GIL away for it. A thread that
reads alone gets the GIL back at once; of several, each waits for the others 65,000 times a GiB,
which costs more than the cipher. So a thread that reads keeps the others waiting for as long as its
connection has more, and lets the next one read while the network is slower than itself.

Where something else keeps the GIL, such as a thread that computes in Python, a record takes 5 ms
however few threads read. There many get more of it than one, so none waits for its turn for long.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import sys
import sysconfig
import threading

from urllib3.util.wait import wait_for_socket

__all__ = ["read_by_records"]

_LONGEST_WAIT = 0.25
"""Seconds until a thread reads although it is another one's turn. Sixteen threads that each read
16 MiB, at a GiB a second, are through in that time."""

_RECORD = 32 * 1024
"""Bytes, more than a record has: so many OpenSSL may hold already, of a record without its end."""

_AT_LEAST = 256 * 1024
"""Bytes that are worth waking a thread for; or whatever has come, if the connection ends."""

_turn = threading.Lock()


def _wake_at(sock: ssl.SSLSocket, nbytes: int) -> None:
    """Says from how many bytes on a connection counts as readable, where the kernel goes by it."""
    if sys.platform == "linux":
        nbytes = max(1, min(nbytes, _AT_LEAST))
        with contextlib.suppress(OSError):  # closed by another thread
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)


def _new_turn() -> None:
    global _turn
    _turn = threading.Lock()


os.register_at_fork(after_in_child=_new_turn)  # another thread of the parent may have had it

_IS_FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def read_by_records(sock: ssl.SSLSocket, view: memoryview) -> int:
    """Fills ``view`` from a connection without a timeout; fewer bytes come at an error or the end.

    Raises:
        OSError: If nothing came before an error. Behind something that came, the next read has it.
    """
    done = 0
    number = sock.fileno()
    socket.socket.settimeout(sock, 0.0)
    try:
        while done < view.nbytes:
            turn = _turn
            is_ours = not _IS_FREE_THREADED and turn.acquire(timeout=_LONGEST_WAIT)
            try:
                while done < view.nbytes:
                    count = ssl.SSLSocket.recv_into(sock, view[done:])
                    if not count:
                        return done
                    done += count
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wanted:
                is_answer = isinstance(wanted, ssl.SSLWantWriteError)  # to a message of TLS
            finally:
                if is_ours:
                    turn.release()
            if done < view.nbytes:
                _wake_at(sock, view.nbytes - done - _RECORD)
                # its number stays what it was if another thread closes the socket
                wait_for_socket(number, read=not is_answer, write=is_answer)  # type: ignore[arg-type]
    except OSError:
        if not done:
            raise
    finally:
        if sock.fileno() >= 0:
            _wake_at(sock, 1)
            socket.socket.settimeout(sock, None)
    return done
