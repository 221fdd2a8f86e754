"""Settings: what is accepted, and that every refusal names setting, value and remedy."""

import re
from types import MappingProxyType

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier.config import Settings, check_pool, parse_size
from kvtier.errors import ConfigError

UNITS = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


def decode(**extra):
    return Settings.decode({"cpu_bytes_to_use": "1GiB"} | extra)


def refusal(**extra):
    with pytest.raises(ConfigError) as error:
        decode(**extra)
    return str(error.value)


class TestDefaultsAndAcceptance:
    def test_defaults(self):
        settings = decode()
        assert settings.cpu_bytes_to_use == 2**30
        assert (settings.offload_prompt_only, settings.canonical_layout) == (True, True)
        assert (settings.eviction_policy, settings.secondary_tiers) == ("lru", ())
        assert (settings.max_wait_ms, settings.hold_ms, settings.job_deadline_ms) == (
            30_000,
            10_000,
            30_000,
        )
        assert (settings.promotion_share, settings.cascade_share) == (0.5, 0.25)
        assert settings.absent_ttl_ms == 10_000

    def test_every_key_is_taken_over(self):
        given = {
            "cpu_bytes_to_use": 4096,
            "spec_name": "S",
            "spec_module_path": "a.b",
            "blocks_per_chunk": 4,
            "eviction_policy": "my.policies:Mine",
            "offload_prompt_only": False,
            "self_describing_kv_events": True,
            "canonical_layout": True,
            "namespace": "team-a.prod_1",
            "weights_epoch": "7",
            "weights_fingerprint": "ab" * 64,
            "max_wait_ms": 5,
            "hold_ms": 4,
            "job_deadline_ms": 3,
            "promotion_share": 0.3,
            "cascade_share": 0.5,
            "lending_share": 0.1,
            "store_filter": "second_touch",
            "prefill_tokens_per_s": 1234.5,
            "tier_failures_max": 2,
            "tier_stall_ms": 6,
            "tier_backoff_ms": 7,
            "tier_backoff_max_ms": 8,
            "absent_ttl_ms": 2,
        }
        settings = Settings.decode(MappingProxyType(given))
        assert {name: getattr(settings, name) for name in given} == given
        assert decode(block_size=64).block_size == 64
        unused = set(Settings.__struct_fields__) - set(given)
        assert unused == {"block_size", "secondary_tiers"}

    @pytest.mark.parametrize("name", ["lru", "s3fifo", "arc", "pkg.mod:Class"])
    def test_policies(self, name):
        assert decode(eviction_policy=name).eviction_policy == name

    def test_is_frozen(self):
        with pytest.raises(AttributeError):
            decode().max_wait_ms = 1


class TestRefusals:
    @pytest.mark.parametrize(
        ("wrong", "right"),
        [
            ("cpu_bytes_to_usee", "cpu_bytes_to_use"),
            ("max_wait", "max_wait_ms"),
            ("NAMESPACE", "namespace"),
            ("weight_epoch", "weights_epoch"),
            ("secondary_tier", "secondary_tiers"),
        ],
    )
    def test_unknown_key_names_the_nearest(self, wrong, right):
        message = refusal(**{wrong: 1})
        assert message.startswith(wrong)
        assert f"`{right}`" in message

    def test_unknown_key_like_no_other_lists_all(self):
        assert "absent_ttl_ms" in refusal(zzzzz=1)

    @pytest.mark.parametrize(
        ("setting", "value"),
        [
            *(
                (setting, value)
                for setting in ("max_wait_ms", "hold_ms", "job_deadline_ms", "absent_ttl_ms")
                for value in (0, -1, True, "5", 1.5, None)
            ),
            *(
                (setting, value)
                for setting in ("promotion_share", "cascade_share")
                for value in (0, 0.0, 1, -0.1, float("nan"), float("inf"), True, "0.5", None)
            ),
            *((s, v) for s in ("block_size", "blocks_per_chunk") for v in (0, -4, True, "16", 2.0)),
            *((s, 1) for s in ("offload_prompt_only", "self_describing_kv_events")),
            ("canonical_layout", "true"),
            ("spec_name", 3),
            ("eviction_policy", 3),
            ("eviction_policy", None),
            ("spec_module_path", ""),
            *(
                (setting, value)
                for setting in ("namespace", "weights_epoch", "weights_fingerprint")
                for value in ("", "a/b", "a\\b", "..", "a..b", ".", ".a", "a b", "a\n", "ä", 5)
            ),
            ("namespace", "a" * 65),
            ("weights_epoch", "a" * 65),
            ("weights_fingerprint", "a" * 129),
        ],
    )
    def test_wrong_value_names_setting_value_and_what_is_allowed(self, setting, value):
        message = refusal(**{setting: value})
        assert message.startswith(f"{setting} = {value!r}"[:70])
        assert "it must be" in message
        assert "Annotated" not in message
        assert "Expected" not in message

    def test_unknown_policy_lists_those_that_exist(self):
        message = refusal(eviction_policy="s3-fifo")
        assert message.startswith("eviction_policy = 's3-fifo'")
        assert "did you mean 's3fifo'?" in message
        assert "arc, lru, s3fifo" in message
        assert "did you mean" not in refusal(eviction_policy="zzz")

    def test_canonical_layout_cannot_be_off(self):
        assert "always" in refusal(canonical_layout=False)

    def test_block_size_excludes_blocks_per_chunk(self):
        message = refusal(block_size=32, blocks_per_chunk=2)
        assert "block_size = 32" in message
        assert "blocks_per_chunk = 2" in message

    def test_hold_may_not_outlast_the_wait(self):
        assert decode(hold_ms=30_000).hold_ms == 30_000
        message = refusal(hold_ms=30_001)
        assert "hold_ms = 30001" in message
        assert "max_wait_ms = 30000" in message

    def test_default_hold_follows_a_short_wait(self):
        assert decode(max_wait_ms=500).hold_ms == 500
        assert decode(max_wait_ms=60_000).hold_ms == 10_000

    @given(st.integers(1, 99), st.integers(1, 99))
    @example(34, 56)  # more than 0.9 in floating point
    @example(45, 46)
    def test_shares_leave_room_for_stores(self, promotion, cascade):
        shares = {"promotion_share": promotion / 100, "cascade_share": cascade / 100}
        if promotion + cascade <= 90:
            assert decode(**shares).promotion_share == promotion / 100
        else:
            message = refusal(**shares)
            assert f"promotion_share = {promotion / 100}" in message
            assert f"cascade_share = {cascade / 100}" in message

    @pytest.mark.parametrize("extra", [{}, {"cpu_bytes_to_use": None}])
    def test_missing_pool_size_says_how_to_set_it(self, extra):
        with pytest.raises(ConfigError, match=r'cpu_bytes_to_use is not set.*"8GiB"'):
            Settings.decode(extra)


class TestTiers:
    def names(self, *entries):
        return [tier.name for tier in decode(secondary_tiers=list(entries)).secondary_tiers]

    def test_options_are_kept_and_frozen(self):
        given = {"type": "fs", "root_dir": "/a", "roots": ["/b"], "limits": {"queue": 3}}
        (tier,) = decode(secondary_tiers=[given]).secondary_tiers
        assert (tier.type, tier.name) == ("fs", "fs")
        given["limits"]["queue"] = 4
        assert tier.options["limits"]["queue"] == 3
        with pytest.raises(TypeError):
            tier.options["limits"]["queue"] = 5
        with pytest.raises(TypeError):
            tier.options["root_dir"] = "/c"
        plain = {"root_dir": "/a", "roots": ["/b"], "limits": {"queue": 3}}
        assert tier.plain_options() == plain
        assert type(tier.plain_options()["limits"]) is dict

    def test_default_names(self):
        assert self.names({"type": "fs"}, {"type": "fs"}, {"type": "valkey"}, {"type": "fs"}) == [
            "fs",
            "fs-2",
            "valkey",
            "fs-3",
        ]

    def test_default_names_avoid_given_ones(self):
        assert self.names({"type": "fs"}, {"type": "fs"}, {"type": "p", "name": "fs-2"}) == [
            "fs",
            "fs-3",
            "fs-2",
        ]
        assert self.names({"type": "primary"}) == ["primary-2"]
        assert self.names({"type": "my.pkg:Tier"}) == ["my-pkg-tier"]

    @pytest.mark.parametrize("name", ["", "A", "a b", "a/b", "ä", "a.b", 3, "x" * 65])
    def test_bad_name(self, name):
        message = refusal(secondary_tiers=[{"type": "a"}, {"type": "fs", "name": name}])
        assert message.startswith("secondary_tiers[1].name = ")

    def test_repeated_name(self):
        message = refusal(secondary_tiers=[{"type": "a", "name": "x"}, {"type": "b", "name": "x"}])
        assert message.startswith("secondary_tiers[1].name = 'x'")
        assert "secondary_tiers[0]" in message
        assert "primary" in refusal(secondary_tiers=[{"type": "a", "name": "primary"}])

    def test_type(self):
        assert "'typ'" in refusal(secondary_tiers=[{"typ": "fs"}])
        assert refusal(secondary_tiers=[{"type": 3}]).startswith("secondary_tiers[0].type = 3")
        assert refusal(secondary_tiers=[{"type": ""}]).startswith("secondary_tiers[0].type = ''")

    @pytest.mark.parametrize("tiers", ["fs://user:hunter2@x", {"password": "hunter2"}, None])
    def test_not_a_list(self, tiers):
        message = refusal(secondary_tiers=tiers)
        assert "secondary_tiers" in message
        assert "hunter2" not in message
        assert "hunter2" not in refusal(secondary_tiers=["fs://user:hunter2@x"])

    def test_where_blocks_are_promoted_to(self):
        tiers = decode(
            secondary_tiers=[
                {"type": "fs"},
                {"type": "valkey", "promote_to": ["fs"]},
                {"type": "object", "name": "far", "promote_to": []},
            ]
        ).secondary_tiers
        assert [tier.promote_to for tier in tiers] == [None, ("fs",), ()]
        assert "promote_to" not in tiers[1].plain_options()
        assert "('fs',)" in repr(tiers[1])

    @pytest.mark.parametrize(
        ("promote_to", "why"),
        [
            ("fs", "must be a list of names"),
            ([1], "must be a list of names"),
            ({"fs": True}, "must be a list of names"),
            (["fast"], "'fast', which is no tier.*there are fs, other"),
            (["fss"], "did you mean 'fs'"),
            (["primary"], "'primary', which is no tier"),
            (["far"], "'far', which is the tier itself"),
            (["fs", "fs"], "'fs', which is there twice"),
        ],
    )
    def test_wrong_targets_of_promotions(self, promote_to, why):
        tiers = [
            {"type": "fs"},
            {"type": "object", "name": "far", "promote_to": promote_to},
            {"type": "x", "name": "other"},
        ]
        message = refusal(secondary_tiers=tiers)
        assert message.startswith("secondary_tiers[1].promote_to")
        assert re.search(why, message), message

    def test_representations_show_no_option(self):
        settings = decode(secondary_tiers=[{"type": "valkey", "password": "hunter2"}])
        assert "hunter2" not in repr(settings)
        assert "hunter2" not in repr(list(settings.secondary_tiers[0].__rich_repr__()))


class TestParseSize:
    @given(st.integers(1, 2**63 - 1))
    def test_numbers(self, size):
        assert parse_size(size, "x") == size
        assert parse_size(str(size), "x") == size

    @given(st.integers(1, 8_000), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " ", "\t"]))
    def test_units(self, number, unit, space):
        assert parse_size(f" {number}{space}{unit} ", "x") == number * UNITS[unit]

    @given(st.integers(0, 7_000), st.integers(0, 999), st.sampled_from(["KiB", "GiB", "MB", "TB"]))
    def test_fractions_are_exact_and_round_down(self, whole, thousandths, unit):
        expected = (whole * 1000 + thousandths) * UNITS[unit] // 1000
        if expected:
            assert parse_size(f"{whole}.{thousandths:03}{unit}", "x") == expected

    @pytest.mark.parametrize("text", ["8G", "8g", "8gb", "8Gib", "8Gb"])
    def test_ambiguous_units_name_both(self, text):
        with pytest.raises(ConfigError, match=r"x = '8.*8GiB.*8GB"):
            parse_size(text, "x")

    @pytest.mark.parametrize("text", ["8PiB", "8 parsecs"])
    def test_unknown_units_list_all(self, text):
        with pytest.raises(ConfigError, match=r"GiB.*GB"):
            parse_size(text, "x")

    @pytest.mark.parametrize(
        "value",
        [
            *(True, False, None, 1.0, 8e9, float("nan"), [], {}, b"8", "", "GiB", "nan", "inf"),
            *("1e9", "1,5GiB", "0x10", "8 GiB x", "٣GiB", "1_000", "+8GiB", ".5GiB", "5.GiB"),
            "9" * 5000,
        ],
    )
    def test_not_a_size(self, value):
        with pytest.raises(ConfigError, match=r"^x = .*it must be a whole number of bytes"):
            parse_size(value, "x")

    @pytest.mark.parametrize("value", [0, -1, "0", "-8GiB", "0.1B", "0KiB", 2**63, "9000000000TiB"])
    def test_out_of_range_tells_the_figures(self, value):
        with pytest.raises(
            ConfigError, match=r"^x = .* is -?\d+ bytes: .* 1 and 9223372036854775807"
        ):
            parse_size(value, "x")


class TestCheckPool:
    def test_slots(self):
        assert check_pool(10_000, 4096, 10_000, "x") == 2
        assert check_pool(4096, 4096, 4096, "x") == 1

    def test_smaller_than_one_block(self):
        with pytest.raises(ConfigError, match=r"x = 4095 bytes.*4096 bytes.*at least 4096"):
            check_pool(4095, 4096, 10**9, "x")

    def test_larger_than_available(self):
        with pytest.raises(
            ConfigError, match=r"x = 10001 bytes.*10000 bytes.*at most 8192.*/dev/shm"
        ):
            check_pool(10_001, 4096, 10_000, "x")
        with pytest.raises(ConfigError) as error:
            check_pool(10_001, 4096, 100, "x")
        assert "at most" not in str(error.value)
