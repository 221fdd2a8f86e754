"""The identity of weights: directories, shards, and the cache of the hub."""

import hashlib
import json
import os
import random
import shutil
import struct
from pathlib import Path

import pytest

from kvtier.errors import NamespaceError
from kvtier.namespace import Namespace
from kvtier.weights import weights_fingerprint


def safetensors(path, tensors):
    header, offset = {}, 0
    for name, data in tensors.items():
        header[name] = {
            "dtype": "U8",
            "shape": [len(data)],
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"".join(tensors.values()))


def tensors(seed, count=40, size=60_000):
    rng = random.Random(seed)
    return {f"layer.{i}": rng.randbytes(size) for i in range(count)}


@pytest.fixture
def model(tmp_path):
    """A directory with a config and one large shard of every format."""
    root = tmp_path / "model"
    root.mkdir()
    (root / "config.json").write_text('{"hidden": 8}')
    (root / "README.md").write_text("about")
    safetensors(root / "model.safetensors", tensors(1))
    for suffix in (".bin", ".pt", ".gguf"):
        (root / f"weights{suffix}").write_bytes(random.Random(suffix).randbytes(1_000_000))
    return root


def of(path, revision=None, **extra):
    return weights_fingerprint(str(path), revision, **extra)


class TestDirectory:
    def test_a_copy_elsewhere_is_the_same(self, model, tmp_path):
        before = of(model)
        copy = tmp_path / "deep" / "elsewhere"
        shutil.copytree(model, copy)
        for path in copy.iterdir():
            os.utime(path, (1, 1))
            path.chmod(0o400)
        (copy / "README.md").write_text("changed")
        (copy / ".git").mkdir()
        (copy / ".git" / "x.bin").write_bytes(b"x")
        assert of(copy) == before
        assert of(os.path.relpath(copy)) == before
        link = tmp_path / "link"
        link.symlink_to(copy)
        assert of(link) == before
        assert str(tmp_path) not in json.dumps(before)
        assert Namespace.of({"weights": before}).describe()["facts"]["weights"] == before

    @pytest.mark.parametrize("suffix", [".safetensors", ".bin", ".pt", ".gguf"])
    def test_requantised_weights_of_the_same_size(self, model, suffix):
        before = of(model)
        (path,) = model.glob(f"*{suffix}")
        data = bytearray(path.read_bytes())
        stamp = path.stat()
        for i in range(len(data) - 900_000, len(data) - 70_000):  # the ends stay as they were
            data[i] ^= 1
        path.write_bytes(data)
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        assert path.stat().st_size == stamp.st_size
        assert of(model) != before

    @pytest.mark.parametrize("changed", range(0, 40, 3))
    def test_one_retrained_tensor_is_seen(self, model, changed):
        before = of(model)
        held = tensors(1)
        held[f"layer.{changed}"] = random.Random(99).randbytes(60_000)
        safetensors(model / "model.safetensors", held)
        assert of(model) != before

    def test_small_tensors_are_sampled_whole(self, model):
        held = tensors(1) | {"norm": bytes(64)} | {"last": random.Random(5).randbytes(200_000)}
        safetensors(model / "model.safetensors", held)
        before = of(model)
        for i in (0, 63):
            held["norm"] = bytes(64 * (j == i) for j in range(64))
            safetensors(model / "model.safetensors", held)
            assert of(model) != before

    def test_the_header_counts_whole(self, model):
        before = of(model)
        data = (model / "model.safetensors").read_bytes()
        (model / "model.safetensors").write_bytes(data.replace(b'"layer.39"', b'"layer.93"'))
        assert of(model) != before

    @pytest.mark.parametrize("position", [0, 999_999])
    def test_both_ends_count(self, model, position):
        before = of(model)
        data = bytearray((model / "weights.bin").read_bytes())
        data[position] ^= 1
        (model / "weights.bin").write_bytes(data)
        assert of(model) != before

    def test_every_file_counts(self, model):
        seen = [of(model)]

        def expect_new():
            now = of(model)
            assert now not in seen
            seen.append(now)

        (model / "config.json").write_text('{"hidden": 9}')
        expect_new()
        (model / "hf_quant_config.json").write_text("{}")
        expect_new()
        (model / "modeling_x.py").write_text("x = 1")
        expect_new()
        (model / "part").mkdir()
        (model / "part" / "more.bin").write_bytes(b"x")
        expect_new()
        (model / "weights.pt").rename(model / "renamed.pt")
        expect_new()
        (model / "weights.bin").write_bytes((model / "weights.bin").read_bytes() + b"\0")
        expect_new()

    def test_small_files_are_read_whole(self, tmp_path):
        data = bytearray(300_000)
        seen = set()
        for i in range(0, len(data), 29_999):
            data[i] ^= 1
            (tmp_path / "a.bin").write_bytes(data)
            seen.add(json.dumps(of(tmp_path)))
        assert len(seen) == 11

    def test_the_cost_of_a_large_file_is_bounded(self, tmp_path):
        path = tmp_path / "a.gguf"
        with path.open("wb") as file:
            file.truncate(1 << 40)  # sparse: reading it whole would take hours
        assert of(path) == of(tmp_path)

    def test_damaged_headers_do_not_stop_it(self, model):
        path = model / "model.safetensors"
        seen = set()
        for header in (
            b"{",
            b"[]",
            b'{"a": {"data_offsets": [-9, 1e99]}}',
            b'{"a":{"data_offsets":1}}',
        ):
            path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(1_000_000))
            seen.add(json.dumps(of(model)))
        path.write_bytes(b"\xff" * 1_000_000)
        seen.add(json.dumps(of(model)))
        assert len(seen) == 5

    def test_one_file(self, model):
        assert of(model / "weights.gguf")["files"].keys() == {"weights.gguf"}

    def test_no_weights(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(NamespaceError, match=r"no weight files.*weights_fingerprint"):
            of(tmp_path)

    @pytest.mark.parametrize(
        "name", ["s3://key:hunter2@bucket/model", "org/name/more", "../x", "", "a b", "org/absent"]
    )
    def test_what_is_not_here_is_refused(self, name, tmp_path, monkeypatch):
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")  # whatever lies beside this repository
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "here"))
        with pytest.raises(NamespaceError, match="weights_fingerprint") as error:
            weights_fingerprint(name, None)
        assert "hunter2" not in str(error.value)

    def test_unreadable_weights_are_refused(self, model):
        (model / "weights.bin").unlink()
        (model / "weights.bin").symlink_to(model / "absent")
        with pytest.raises(NamespaceError, match=r"cannot be read.*weights_fingerprint"):
            of(model)


class TestShards:
    def write(self, root, names, suffix="safetensors"):
        index = {"weight_map": {f"t{i}": name for i, name in enumerate(names)}}
        (root / f"model.{suffix}.index.json").write_text(json.dumps(index))
        for name in names:
            (root / name).write_bytes(name.encode())

    def test_a_missing_shard_is_refused(self, tmp_path):
        self.write(tmp_path, ["a-1.safetensors", "a-2.safetensors"])
        of(tmp_path)
        (tmp_path / "a-2.safetensors").unlink()
        with pytest.raises(NamespaceError, match=r"2 weight files, of which 1 .*a-2\.safetensors"):
            of(tmp_path)

    def test_a_format_that_was_not_downloaded_does_not_matter(self, tmp_path):
        self.write(tmp_path, ["a-1.safetensors"])
        self.write(tmp_path, ["b-1.bin"], "bin")
        (tmp_path / "b-1.bin").unlink()
        assert len(of(tmp_path)["files"]) == 3

    def test_shards_below_a_folder(self, tmp_path):
        (tmp_path / "sub").mkdir()
        self.write(tmp_path / "sub", ["a-1.bin", "a-2.bin"], "bin")
        assert "sub/a-1.bin" in of(tmp_path)["files"]
        (tmp_path / "sub" / "a-1.bin").unlink()
        with pytest.raises(NamespaceError):
            of(tmp_path)

    @pytest.mark.parametrize(
        "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": []}}']
    )
    def test_an_odd_index_counts_as_bytes(self, tmp_path, text):
        self.write(tmp_path, ["a-1.bin"])
        (tmp_path / "model.safetensors.index.json").write_text(text)
        assert len(of(tmp_path)["files"]) == 2


COMMITS = ("a" * 40, "b" * 40)


class TestHubCache:
    @pytest.fixture
    def hub(self, tmp_path, monkeypatch):
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        return tmp_path / "hub"

    def add(self, hub, commit, content, refs=("main",), name="models--org--name"):
        repository = hub / name
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (repository / "blobs").mkdir(exist_ok=True)
        for file, data in {"config.json": b"{}", "model.safetensors": content}.items():
            blob = hashlib.sha256(data).hexdigest()
            (repository / "blobs" / blob).write_bytes(data)
            (snapshot / file).symlink_to(Path("../../blobs") / blob)
        for ref in refs:
            pointer = repository / "refs" / ref
            pointer.parent.mkdir(parents=True, exist_ok=True)
            pointer.write_text(commit)
        return snapshot

    def test_name_commit_and_directory_agree(self, hub):
        snapshot = self.add(hub, COMMITS[0], b"one", ("main", "v1", "refs/pr/1"))
        found = weights_fingerprint("org/name", None)
        assert found["revision"] == COMMITS[0]
        assert hashlib.sha256(b"one").hexdigest() in found["files"]["model.safetensors"]
        for revision in ("main", "v1", "refs/pr/1", COMMITS[0]):
            assert weights_fingerprint("org/name", revision) == found
        assert of(snapshot) == found
        (hub / "link").symlink_to(snapshot)
        assert of(hub / "link") == found

    def test_blobs_are_not_read(self, hub):
        snapshot = self.add(hub, COMMITS[0], b"one")
        before = of(snapshot)
        (snapshot / "model.safetensors").resolve().write_bytes(b"two")
        assert of(snapshot) == before

    def test_revision_and_content_count(self, hub):
        self.add(hub, COMMITS[0], b"one", ("v1",))
        self.add(hub, COMMITS[1], b"one", ("v2",))
        self.add(hub, COMMITS[0], b"two", ("v1",), "models--org--other")
        found = [
            weights_fingerprint("org/name", "v1"),
            weights_fingerprint("org/name", "v2"),
            weights_fingerprint("org/other", "v1"),
        ]
        assert all(a != b for i, a in enumerate(found) for b in found[:i])

    def test_files_that_are_no_links_are_sampled(self, hub):
        snapshot = self.add(hub, COMMITS[0], b"one")
        linked = of(snapshot)
        data = (snapshot / "model.safetensors").read_bytes()
        (snapshot / "model.safetensors").unlink()
        (snapshot / "model.safetensors").write_bytes(data)
        copied = of(snapshot)
        assert copied != linked
        (snapshot / "model.safetensors").write_bytes(b"two")
        assert of(snapshot) != copied

    def test_a_blob_without_a_content_hash_is_sampled(self, hub):
        snapshot = self.add(hub, COMMITS[0], b"one")
        (snapshot / "model.safetensors").unlink()
        odd = hub / "models--org--name" / "blobs" / "not-a-hash"
        odd.write_bytes(b"one")
        (snapshot / "model.safetensors").symlink_to(Path("../../blobs/not-a-hash"))
        before = of(snapshot)
        odd.write_bytes(b"two")
        assert of(snapshot) != before

    def test_a_link_out_of_the_cache_is_sampled(self, hub):
        snapshot = self.add(hub, COMMITS[0], b"one")
        (snapshot / "model.safetensors").unlink()
        outside = hub / ("c" * 64)
        outside.write_bytes(b"one")
        (snapshot / "model.safetensors").symlink_to(outside)
        before = of(snapshot)
        outside.write_bytes(b"two")
        assert of(snapshot) != before

    @pytest.mark.parametrize(
        "revision", ["v9", "..", "../blobs", ".", "pr/../main", "a" * 39, "/etc"]
    )
    def test_an_unknown_revision_is_refused(self, hub, revision):
        self.add(hub, COMMITS[0], b"one", ("main", "pr/1"))
        with pytest.raises(NamespaceError, match="weights_fingerprint") as error:
            weights_fingerprint("org/name", revision)
        assert "cannot be read" not in str(error.value)

    @pytest.mark.parametrize("pointer", ["../..", "", ".", COMMITS[1], "\xff"])
    def test_a_bad_pointer_is_refused(self, hub, pointer):
        self.add(hub, COMMITS[0], b"one")
        (hub / "models--org--name" / "refs" / "main").write_bytes(pointer.encode("latin-1"))
        with pytest.raises(NamespaceError):
            weights_fingerprint("org/name", None)

    def test_where_the_cache_is(self, hub, tmp_path, monkeypatch):
        self.add(hub, COMMITS[0], b"one", name="models--gpt2")
        found = weights_fingerprint("gpt2", None)
        monkeypatch.delenv("HF_HUB_CACHE")
        assert weights_fingerprint("gpt2", None, cache_dir=str(hub)) == found
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        assert weights_fingerprint("gpt2", None) == found
        monkeypatch.delenv("HF_HOME")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        with pytest.raises(NamespaceError):
            weights_fingerprint("gpt2", None)
        shutil.copytree(hub, tmp_path / "cache" / "huggingface" / "hub", symlinks=True)
        assert weights_fingerprint("gpt2", None) == found
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        (tmp_path / "home").mkdir()
        (tmp_path / "cache").rename(tmp_path / "home" / ".cache")
        assert weights_fingerprint("gpt2", None) == found
