"""What tells one set of weights from another, the same on every host that has them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import BinaryIO

from kvtier.errors import NamespaceError
from kvtier.namespace import Fact, without_credentials

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_OVERRIDE = "set weights_fingerprint to a label of your own that changes whenever the weights do"
_REPOSITORY = re.compile(r"[A-Za-z0-9_][\w.-]*(?:/[A-Za-z0-9_][\w.-]*)?", re.ASCII)
_REVISION = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)*", re.ASCII)
_BLOB_ID = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

_EDGE_BYTES = 64 * 1024
_PIECE_BYTES = 4 * 1024
_PIECES = 64
_TENSORS_MAX = 4096
_HEADER_MAX = 100_000_000  # the limit of the safetensors format


def weights_fingerprint(
    model: str, revision: str | None, cache_dir: str | None = None
) -> dict[str, Fact]:
    """What tells one set of weights from another, the same on every host that has them.

    A snapshot in the hub cache is known by its revision and blob ids, which are content hashes; any
    other file by its size, its safetensors header and a sample of its content: both ends, evenly
    spread pieces, and a piece of every tensor where the format tells where tensors lie (0.4 MiB a
    file, and 4 KiB for each of at most 4096 tensors). Files that configure the model or hold its
    code are hashed whole.

    A sample cannot see a change that leaves the size, the header and all sampled bytes as they
    were: a few values edited by hand, a patched row of an embedding, a tensor of which only a part
    was trained. Quantising, training or merging changes practically all bytes of a tensor, and is
    seen. A blob of the hub cache that was overwritten in place is not seen. A branch in the hub
    cache may move after an engine loaded it: give the commit that was loaded where it is known.

    Args:
        model: directory, single weight file, or `organisation/name` in the hub cache.
        revision: branch, tag or commit of the latter; None for its main branch.
        cache_dir: hub cache; None for where the environment says that it is.

    Raises:
        NamespaceError: no weight files are found, some are missing, or they cannot be read.
    """
    try:
        if os.path.isfile(model):
            return _fingerprint({os.path.basename(model): model}, None)
        root = model if os.path.isdir(model) else _find_snapshot(model, revision, cache_dir)
        root = os.path.realpath(root)
        return _fingerprint(_identity_files(root), _snapshot_revision(root))
    except OSError as error:
        raise NamespaceError(
            f"the weights of model = {model!r} cannot be read ({error}): make them readable, or "
            f"{_OVERRIDE}"
        ) from error


def _fingerprint(files: Mapping[str, str], revision: str | None) -> dict[str, Fact]:
    """From paths by portable name; with a revision, blob ids stand for content."""
    _refuse_incomplete(files)
    entries: dict[str, Fact] = {}
    for name, path in sorted(files.items()):
        blob = _blob_id(path) if revision else None
        size = os.stat(path).st_size
        entries[name] = f"{size}:blob:{blob}" if blob else f"{size}:sample:{_sampled(path, size)}"
    found: dict[str, Fact] = {"revision": revision} if revision else {}
    return found | {"files": entries}


def _identity_files(root: str) -> dict[str, str]:
    """Files that decide what a model computes, by path below `root`; hidden ones are not its."""
    found = {}
    for directory, below, names in os.walk(root, onerror=_raise):
        below[:] = sorted(name for name in below if not name.startswith((".", "__pycache__")))
        for name in names:
            if name.endswith((*_WEIGHTS, ".py", ".index.json")) or _configures(name):
                path = os.path.join(directory, name)
                found[os.path.relpath(path, root).replace(os.sep, "/")] = path
    return found


def _raise(error: OSError) -> None:
    raise error


def _configures(name: str) -> bool:
    return name == "config.json" or bool(re.fullmatch(r".*quant.*config\.json|params\.json", name))


def _refuse_incomplete(files: Mapping[str, str]) -> None:
    if not any(name.endswith(_WEIGHTS) for name in files):
        raise NamespaceError(
            f"no weight files ({', '.join(_WEIGHTS)}) are found for the model: give a directory "
            f"that has them, or {_OVERRIDE}"
        )
    for name, path in files.items():
        if not name.endswith(".index.json"):
            continue
        folder = name.rpartition("/")[0]
        shards = {f"{folder}/{shard}" if folder else shard for shard in _shards(path)}
        absent = sorted(shards - files.keys())
        # an index without any of its shards belongs to a format that was not downloaded
        if absent and len(absent) < len(shards):
            raise NamespaceError(
                f"{name} names {len(shards)} weight files, of which {len(absent)} are missing "
                f"({absent[0]}): complete the download, or {_OVERRIDE}"
            )


def _shards(path: str) -> set[str]:
    with open(path, "rb") as file:
        try:
            return set(json.load(file)["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            return set()  # not an index of weights; its bytes count all the same


def _find_snapshot(model: str, revision: str | None, cache_dir: str | None) -> str:
    """Directory of a revision in the hub cache."""
    reference = revision or "main"
    if not _REPOSITORY.fullmatch(model) or not _REVISION.fullmatch(reference):
        raise NamespaceError(
            f"model = {without_credentials(model)!r} is neither a directory nor a "
            f"name in the hub cache, so its weights cannot be told from others: {_OVERRIDE}"
        )
    repository = os.path.join(cache_dir or _hub_cache(), "models--" + model.replace("/", "--"))
    commit = reference
    pointer = os.path.join(repository, "refs", reference)
    if os.path.isfile(pointer):
        with open(pointer, encoding="ascii", errors="replace") as file:
            commit = file.read(256).strip()
    snapshot = os.path.join(repository, "snapshots", commit)
    if "/" in commit or not _REVISION.fullmatch(commit) or not os.path.isdir(snapshot):
        raise NamespaceError(
            f"model = {model!r} at revision {reference!r} is neither a directory nor in the hub "
            f"cache ({repository}): download it first, set HF_HUB_CACHE, or {_OVERRIDE}"
        )
    return snapshot


def _hub_cache() -> str:
    """Where the Hugging Face hub keeps downloads, by its own rules."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if place := os.environ.get(name):
            return os.path.expanduser(place)
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(caches, "huggingface")
    return os.path.join(os.path.expanduser(home), "hub")


def _snapshot_revision(root: str) -> str | None:
    """Commit of a directory that is a snapshot in a hub cache."""
    above, revision = os.path.split(root)
    repository, folder = os.path.split(above)
    inside = folder == "snapshots" and os.path.basename(repository).startswith("models--")
    return revision if inside else None


def _blob_id(path: str) -> str | None:
    """Content hash of a snapshot's file, if it is a link to `blobs/<hash>`."""
    folder, blob = os.path.split(os.path.realpath(path))
    linked = os.path.basename(folder) == "blobs"
    return blob if linked and _BLOB_ID.fullmatch(blob) else None


def _sampled(path: str, size: int) -> str:
    """Digest of a file's bytes: all of them unless it is a large weight file."""
    with open(path, "rb") as file:
        if not path.endswith(_WEIGHTS):
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        for offset, length in _pieces(file, size):
            file.seek(offset)
            digest.update(offset.to_bytes(8, "big"))
            digest.update(file.read(length))
        return digest.hexdigest()


def _pieces(file: BinaryIO, size: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of what is sampled; the whole of a small file."""
    if size <= 2 * _EDGE_BYTES + _PIECES * _PIECE_BYTES:
        yield 0, size
        return
    header = _safetensors_header(file, size)
    data = 8 + len(header)
    yield 0, max(data, _EDGE_BYTES)
    for i in range(_PIECES):
        yield _EDGE_BYTES + i * (size - 2 * _EDGE_BYTES) // _PIECES, _PIECE_BYTES
    for begin, end in _tensors(header):
        length = min(_PIECE_BYTES, end - begin)
        yield data + begin + (end - begin - length) // 2, length
    yield size - _EDGE_BYTES, _EDGE_BYTES


def _safetensors_header(file: BinaryIO, size: int) -> bytes:
    """The JSON header; empty for a file of another format."""
    length = int.from_bytes(file.read(8), "little")
    if not file.name.endswith(".safetensors") or length > min(_HEADER_MAX, size - 8):
        return b""
    return file.read(length)


def _tensors(header: bytes) -> list[tuple[int, int]]:
    """(begin, end) of tensors within the data; of very many, evenly chosen ones."""
    try:
        described = json.loads(header or b"{}").values()
        spans = sorted(tuple(d["data_offsets"]) for d in described if "data_offsets" in d)
        spans = [(int(begin), int(end)) for begin, end in spans if 0 <= begin < end]
    except (ValueError, TypeError, AttributeError):
        return []  # damaged, or not safetensors after all; its first bytes count all the same
    step = -(-len(spans) // _TENSORS_MAX) or 1
    return spans[::step]
