"""Reads bodies by TLS from a peer that spoils them on their way, in a process of its own.

    python noise.py bundle certificate native rounds

Between the server and the client there is a wire that changes, repeats, drops, cuts and invents
ciphertext. Every read must end, and what it says has come must be what was sent.
"""

import contextlib
import random
import socket
import ssl
import sys
import threading

from cloudckpt import Config
from cloudckpt.errors import ConnectionLostError, TLSError
from cloudckpt.stores.http import native_tls
from cloudckpt.stores.http.client import HttpClient
from cloudckpt.stores.http.options import HttpOptions

SIZE = 1_500_000
BODY = random.Random(0).randbytes(SIZE)
HEAD = f"HTTP/1.1 200 OK\r\nContent-Length: {SIZE}\r\n\r\n".encode()


def serve(listener, context):
    while True:
        raw, _ = listener.accept()
        with contextlib.suppress(OSError), raw:
            raw.settimeout(20)
            with context.wrap_socket(raw, server_side=True) as tls:
                while not tls.recv(65536).endswith(b"\r\n\r\n"):
                    pass
                tls.sendall(HEAD)
                tls.sendall(BODY)
                tls.recv(1)


def spoiled(data, dice):
    """What arrives in place of some bytes."""
    data = bytearray(data)
    kind = dice.randrange(7)
    at = dice.randrange(len(data))
    if kind == 0:
        data[at] ^= 1 << dice.randrange(8)
    elif kind == 1:
        del data[at : at + dice.choice([1, 5, 1000])]
    elif kind == 2:
        data[at:at] = data[:at]
    elif kind == 3:
        data[at:at] = dice.randbytes(dice.choice([1, 5, 100, 20_000]))
    elif kind == 4:
        head = bytes([dice.choice([20, 21, 22, 23, 24, 99]), 3, dice.choice([1, 3, 4])])
        size = dice.choice([0, 1, 2, 17, 48, 16_385, 65_535])
        data[at:at] = head + size.to_bytes(2, "big") + dice.randbytes(min(size, 20_000))
    elif kind == 5:
        del data[at:]
    else:
        data[at : at + 16] = dice.randbytes(16)
    return bytes(data), kind == 5


def spoil(listener, server, seed):
    """One connection of a client after the other, each spoiled at another place."""
    dice = random.Random(seed)
    while True:
        client, _ = listener.accept()
        upstream = socket.create_connection(server)
        with contextlib.suppress(OSError), client, upstream:
            client.settimeout(20)
            upstream.settimeout(20)
            threading.Thread(target=pass_on, args=(client, upstream), daemon=True).start()
            until = dice.choice([0, 3000, 10_000, 200_000, 1_000_000, 1_490_000])
            passed = 0
            while data := upstream.recv(65536):
                if passed + len(data) > until:
                    data, is_cut = spoiled(data, dice)
                    until += dice.choice([1, 100_000, SIZE * 2])
                    client.sendall(data)
                    if is_cut:
                        break
                else:
                    client.sendall(data)
                passed += len(data)
            client.shutdown(socket.SHUT_RDWR)


def pass_on(source, target):
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


def unfit():
    raise native_tls._UnfitError("out of reach")


def main(bundle, certificate, native, rounds):
    if not native:
        native_tls._openssl = unfit
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = socket.create_server(("127.0.0.1", 0))
    wire = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(server, context), daemon=True).start()
    threading.Thread(target=spoil, args=(wire, server.getsockname(), 1), daemon=True).start()
    client = HttpClient(
        HttpOptions(
            config=Config(connect_timeout=2.0, read_timeout=2.0, stall_timeout=1.0),
            ca_bundle=bundle,
        )
    )
    for _ in range(rounds):
        memory = bytearray(SIZE)
        received = 0
        try:
            with client.send("GET", f"https://127.0.0.1:{wire.getsockname()[1]}", {}) as reply:
                received = SIZE
                reply.read_into([memoryview(memory)])
        except ConnectionLostError as error:
            received = error.received
        except TLSError:
            received = 0
        assert memory[:received] == BODY[:received]
    print(rounds)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] == "1", int(sys.argv[4]))
