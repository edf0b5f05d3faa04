"""TLS before the server: nginx, which passes the bytes on as they are."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.children import ChildFailedError

_MODULE = Path("/usr/lib/nginx/modules/ngx_stream_module.so")
_START_TIMEOUT = 10.0
_CONFIGURATION = """
{module}
daemon off; master_process on; worker_processes {cores}; pid {folder}/pid;
error_log {folder}/errors.txt;
events {{ worker_connections 512; }}
stream {{
    server {{
        listen 127.0.0.1:{port} ssl reuseport;
        ssl_certificate {folder}/certificate.pem; ssl_certificate_key {folder}/key.pem;
        ssl_protocols TLSv1.3; ssl_conf_command Ciphersuites TLS_AES_256_GCM_SHA384;
        proxy_pass 127.0.0.1:{behind}; proxy_buffer_size 128k; tcp_nodelay on;
    }}
}}
"""


@dataclass(frozen=True)
class Terminator:
    """A running one.

    Attributes:
        port: Where it speaks TLS.
        bundle: The file with the authority that its certificate is signed by.
        pid: Its first process.
    """

    port: int
    bundle: str
    pid: int

    def cpu_seconds(self) -> float:
        """What its processes have used up to now."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        ticks = 0
        for pid in (str(self.pid), *children):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # utime and stime: see proc(5)
        return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def running_terminator(behind: int) -> Iterator[Terminator]:
    """Starts one before the server at port `behind`, and stops it at the end.

    Raises:
        ChildFailedError: If there is none to start (Debian: nginx-light, libnginx-mod-stream).
    """
    nginx = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if nginx is None or shutil.which("openssl") is None:
        raise ChildFailedError("https needs nginx with its stream module, and openssl")
    with tempfile.TemporaryDirectory(prefix="bench-tls-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        _make_certificates(folder)
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            port = int(free.getsockname()[1])
        configuration = folder / "nginx.conf"
        configuration.write_text(
            _CONFIGURATION.format(
                module=f"load_module {_MODULE};" if _MODULE.exists() else "",
                cores=os.cpu_count() or 1,
                folder=folder,
                port=port,
                behind=behind,
            )
        )
        process = subprocess.Popen([nginx, "-c", str(configuration), "-p", name])
        try:
            _await_port(process, port)
            yield Terminator(port, str(folder / "authority.pem"), process.pid)
        finally:
            process.terminate()
            process.wait(10)


def _make_certificates(folder: Path) -> None:
    """Makes an authority and the server's certificate: rustls takes no certificate that is both."""
    new = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    for command in (
        f"{new} -subj /CN=authority -addext keyUsage=keyCertSign "
        "-keyout authority-key.pem -out authority.pem",
        f"{new} -subj /CN=benchmarks -CA authority.pem -CAkey authority-key.pem "
        "-addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE "
        "-keyout key.pem -out certificate.pem",
    ):
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)


def _await_port(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_TIMEOUT
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise ChildFailedError("nginx did not start: has it the stream module, with TLS?")
