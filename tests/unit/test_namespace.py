"""Identity: what must change a digest does, what must not does not, and what is unknown refuses."""

import hashlib
import json
import os
from copy import deepcopy

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvtier.errors import NamespaceError
from kvtier.namespace import Namespace, cpu_facts, rope_facts

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)

facts = st.dictionaries(
    st.text(),
    st.recursive(
        scalars, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(), x, max_size=3)
    ),
    max_size=5,
)


def shape(value):
    """Equality that tells True from 1 and 1 from 1.0."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return (type(value).__name__, repr(value))


def leaves(value, path=()):
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from leaves(item, (*path, key))
    else:
        yield path


class TestDigest:
    @given(facts, facts)
    def test_equal_exactly_when_facts_are(self, a, b):
        same = Namespace.of(a).digest == Namespace.of(b).digest
        assert same == (shape(a) == shape(b))

    @given(facts, scalars, st.data())
    def test_every_leaf_counts(self, given_facts, replacement, data):
        paths = [path for path in leaves(given_facts) if path]
        assume(paths)
        *above, last = data.draw(st.sampled_from(paths))
        changed = deepcopy(given_facts)
        place = changed
        for key in above:
            place = place[key]
        assume(shape(place[last]) != shape(replacement))
        place[last] = replacement
        assert Namespace.of(changed).digest != Namespace.of(given_facts).digest

    @given(facts, st.randoms())
    def test_order_does_not_count(self, given_facts, rng):
        def shuffled(value):
            if isinstance(value, dict):
                items = list(value.items())
                rng.shuffle(items)
                return {key: shuffled(item) for key, item in items}
            return [shuffled(item) for item in value] if isinstance(value, list) else value

        assert Namespace.of(shuffled(given_facts)) == Namespace.of(given_facts)

    def test_label_epoch_and_facts_do_not_mix(self):
        digests = {
            Namespace.of({"a": "b"}).digest,
            Namespace.of({"a": "c"}).digest,
            Namespace.of({"a": ["b"]}).digest,
            Namespace.of({"a": "b"}, label="x").digest,
            Namespace.of({"a": "b"}, epoch="x").digest,
            Namespace.of({"a": "b"}, label="").digest,
            Namespace.of({"a": "b", "label": "x"}).digest,
            Namespace.of({"a": "b", "epoch": None}).digest,
        }
        assert len(digests) == 8
        assert all(len(digest) == 64 and int(digest, 16) >= 0 for digest in digests)

    def test_is_the_same_in_every_release(self):
        namespace = Namespace.of({"b": [1, 2.5, None, True], "a": {"ü": "x"}}, "l", "e")
        text = '{"epoch":"e","facts":{"a":{"ü":"x"},"b":[1,2.5,null,true]},"format":1,"label":"l"}'
        assert namespace.digest == hashlib.sha256(text.encode()).hexdigest()

    def test_with_epoch(self):
        namespace = Namespace.of({"a": 1}, "l", "1")
        assert namespace.with_epoch("2") == Namespace.of({"a": 1}, "l", "2")
        assert namespace.with_epoch("1") == namespace
        assert namespace.with_epoch("2").digest != namespace.digest

    @pytest.mark.parametrize(
        "bad",
        [float("nan"), float("inf"), object(), b"x", {1: 2}, [{"a": {1}}], "\ud800", {"\ud800": 1}],
    )
    def test_what_has_no_single_form_is_refused(self, bad):
        with pytest.raises(NamespaceError):
            Namespace.of({"a": bad})
        with pytest.raises(NamespaceError):
            Namespace.of({1: "a"})

    def test_facts_are_a_read_only_copy(self):
        given_facts = {"a": [1]}
        namespace = Namespace.of(given_facts)
        given_facts["a"].append(2)
        assert namespace.facts == {"a": [1]}
        with pytest.raises(TypeError):
            namespace.facts["a"] = 1


class TestDescribe:
    def test_is_readable_json_in_the_given_order(self):
        namespace = Namespace.of({"z": 1, "model": "/models/x", "a": [1]}, "l", "e")
        described = json.loads(json.dumps(namespace.describe()))
        assert list(described["facts"].items()) == [("z", 1), ("model", "/models/x"), ("a", [1])]
        assert (described["digest"], described["label"], described["epoch"]) == (
            namespace.digest,
            "l",
            "e",
        )

    def test_credentials_never_show(self):
        one = Namespace.of(
            {
                "model": "s3://key:hunter2@host/m?sig=hunter3#x",
                "n": {"p": ["a://b:hunter4@c", "s3://k:a/hunter5@d"]},
            }
        )
        assert "hunter" not in json.dumps(one.describe())
        assert "s3://host/m?" in json.dumps(one.describe())
        other = Namespace.of(
            {
                "model": "s3://key:rotated@host/m?sig=hunter3#x",
                "n": {"p": ["a://c", "s3://k:a/hunter5@d"]},
            }
        )
        assert one.digest == other.digest
        paths = [Namespace.of({"model": f"s3://bucket/{name}@v1"}) for name in ("a", "b")]
        assert paths[0].digest != paths[1].digest


class TestRope:
    def test_number_types_do_not_count(self):
        assert rope_facts({"rope_theta": 10000}, 1) == rope_facts({"rope_theta": 10000.0}, 2)
        assert rope_facts({"rope_theta": 10000}, 1) != rope_facts({"rope_theta": 10001}, 1)
        digests = {Namespace.of(rope_facts({"rope_theta": n}, 1)).digest for n in (10000, 10000.0)}
        assert len(digests) == 1

    def test_picks_rope_and_nothing_else(self):
        config = {
            "hidden_size": 8,
            "properties": 1,
            "id2label": {0: "rope"},
            "rope_theta": 1e6,
            "rope_scaling": None,
            "partial_rotary_factor": 0.5,
            "max_position_embeddings": 4096,
            "text_config": {"rope_local_base_freq": 1e4, "x": {"y": 1}, "mrope_section": [1, 2]},
        }
        assert rope_facts(config, 100) == {
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.5,
            "text_config.rope_local_base_freq": 1e4,
            "text_config.mrope_section": [1.0, 2.0],
        }

    @pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
    @pytest.mark.parametrize("name", ["rope_type", "type"])
    def test_length_does_not_count_where_rope_ignores_it(self, kind, name):
        config = {"rope_scaling": {name: kind, "factor": 2}, "max_position_embeddings": 1}
        other = config | {"max_position_embeddings": 2}
        assert rope_facts(config, 100) == rope_facts(other, 200) == rope_facts(config, None)

    @pytest.mark.parametrize(
        "table",
        [
            lambda kind: {"rope_scaling": {"rope_type": kind}},
            lambda kind: {"rope_scaling": {"type": kind}},
            lambda kind: {"rope_parameters": {"full_attention": {"rope_type": kind}}},
            lambda kind: {"text_config": {"rope_parameters": {"rope_type": kind}}},
            lambda kind: {"text_config": {"rope_type": kind}},
        ],
    )
    @pytest.mark.parametrize("kind", ["dynamic", "yarn", "longrope", "su", "never-heard-of"])
    def test_length_counts_where_rope_depends_on_it(self, table, kind):
        config = table(kind)
        assert rope_facts(config, 100) != rope_facts(config, 200)
        limits = [{"max_position_embeddings": n, **config} for n in (1, 2)]
        assert rope_facts(limits[0], 100) != rope_facts(limits[1], 100)
        with pytest.raises(NamespaceError, match=rf"{kind}.*max_model_len"):
            rope_facts(config, None)

    def test_is_a_fact(self):
        Namespace.of(rope_facts({"rope_scaling": {"rope_type": "yarn", "ok": True, "n": None}}, 9))
        with pytest.raises(NamespaceError):
            rope_facts({"rope_theta": object()}, 1)


class TestCpu:
    def test_this_machine(self):
        found = cpu_facts()
        assert found == cpu_facts()
        assert found["machine"] == os.uname().machine
        Namespace.of({"cpu": found})

    @pytest.mark.parametrize(
        ("text", "flags"),
        [
            (
                "flags\t\t: fpu sse avx2 avx512f amx_tile\nbugs : x\nflags\t\t: avx2 avx512f\n",
                ["avx2", "avx512f"],
            ),
            ("Features\t: fp asimd sve bf16\n", ["asimd", "bf16", "sve"]),
            ("isa\t\t: rv64imafdcv_zicsr\n", ["rvv"]),
            ("isa\t\t: rv64imafdc_zve32x\n", []),
            ("features\t: esan3 vx vxe\n", ["vx", "vxe"]),
            ("flags : fpu\nvmx flags : avx2\n", []),
        ],
    )
    def test_flags(self, tmp_path, text, flags):
        path = tmp_path / "cpuinfo"
        path.write_text(text)
        assert cpu_facts(str(path))["flags"] == flags

    def test_unknown_flags_are_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr("platform.machine", lambda: "x86_64")
        path = tmp_path / "cpuinfo"
        with pytest.raises(NamespaceError, match="cannot be read"):
            cpu_facts(str(path))
        path.write_text("processor : 0\n")
        with pytest.raises(NamespaceError, match="no CPU flags"):
            cpu_facts(str(path))
