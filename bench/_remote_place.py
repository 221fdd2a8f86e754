"""Where the faults of `remote_faults.py` happen: a server, and a proxy in front of it."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import trustme
from _proxy import ProxyProcess

from kvtier.testing.s3_servers import JuiceServer
from kvtier.testing.valkey_servers import ValkeyServer

BUCKET = "kvtier-faults"
TIMEOUT_S = 1.0


@dataclass(frozen=True)
class Place:
    """What faults are made with.

    Attributes:
        server: behind the proxy.
        proxy: in front of it.
        scratch: for files.
        papers: PEM files by what they are good for.
    """

    server: JuiceServer | ValkeyServer
    proxy: ProxyProcess
    scratch: Path
    papers: dict[str, str]


def entry(tier: str, at: Place, *, tls: bool) -> dict[str, object]:
    """The tier's settings."""
    host, port = at.proxy.address
    trust = {"ca_bundle": at.papers["authority"]} if tls else {}
    if tier == "object":
        return {
            "type": "object",
            "name": "store",
            "url": f"s3://{BUCKET}/kv",
            "retries": 1,
            "endpoint": f"{'https' if tls else 'http'}://{host}:{port}",
            "allow_http": not tls,
            "timeout_s": TIMEOUT_S,
            "connect_timeout_s": TIMEOUT_S,
            "threads": 8,
            **trust,
        }
    scheme = "valkeys" if tls else "valkey"
    os.environ["KVTIER_FAULTS_PASSWORD"] = "sesame"
    return {
        "type": "valkey",
        "name": "store",
        "url": f"{scheme}://engine@{host}:{port}",
        "password_env": "KVTIER_FAULTS_PASSWORD",
        "request_timeout_ms": int(TIMEOUT_S * 1e3),
        "threads": 4,
        **trust,
    }


@contextlib.contextmanager
def place_of(tier: str, certificate: str = "") -> Iterator[Place]:
    """A server, and a proxy in front of it that shows a certificate if it is named."""
    with tempfile.TemporaryDirectory(prefix="kvtier-faults-") as name:
        scratch = Path(name)
        papers = write_papers(scratch)
        directory = scratch / "server"
        directory.mkdir()
        server: JuiceServer | ValkeyServer = JuiceServer(directory)
        if tier == "valkey":
            users = scratch / "users.acl"
            everything = "~* &* +@all"
            users.write_text(
                f"user default on nopass {everything}\nuser engine on >sesame {everything}\n"
            )
            server = ValkeyServer(directory, {"aclfile": str(users)})
        with server:
            if isinstance(server, JuiceServer):
                server.make_bucket(BUCKET)
            target = server.address if tier == "object" else ("127.0.0.1", server.port)
            speaks = "http" if tier == "object" else "resp"
            with ProxyProcess(target, speaks, papers.get(certificate, "")) as proxy:
                yield Place(server, proxy, scratch, papers)


def write_papers(directory: Path) -> dict[str, str]:
    """Certificates for 127.0.0.1: a good one, an expired one, one by somebody else."""
    authority, other = trustme.CA(), trustme.CA()
    ended = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)
    began = ended - dt.timedelta(days=9)
    certificates = {
        "good": authority.issue_cert("127.0.0.1"),
        "expired": authority.issue_cert("127.0.0.1", not_before=began, not_after=ended),
        "other": other.issue_cert("127.0.0.1"),
    }
    papers = {name: str(directory / f"{name}.pem") for name in (*certificates, "authority")}
    authority.cert_pem.write_to_path(papers["authority"])
    for name, each in certificates.items():
        each.private_key_and_cert_chain_pem.write_to_path(papers[name])
    return papers


def set_password(at: Place, password: str) -> None:
    at.server.ask("ACL", "SETUSER", "engine", "resetpass", f">{password}")
