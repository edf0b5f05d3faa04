"""Runs the server: says its port, then serves until stdin closes or a signal ends it."""

from __future__ import annotations

import argparse
import signal

from benchmarks.lifeline import exit_with_parent
from benchmarks.server.serve import Server


def main() -> None:
    """Parses the command line and serves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--lifeline", action="store_true", help="end when stdin closes")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if arguments.lifeline:
        exit_with_parent()
    server = Server(arguments.host, arguments.port)
    print(server.port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
