"""A tier's options on the command line: `-o NAME=VALUE`, as often as needed, beside its URL."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtier.errors import ConfigError

TierOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="NAME=VALUE",
        help="An option of the tier at a URL, such as endpoint=https://host:9000 or "
        "password_file=/run/secrets/kv; repeatable.",
    ),
]


def tier_options(url: str, pairs: list[str]) -> dict[str, object]:
    """The tier's options from `name=value` pairs, with values as the settings want them.

    Raises:
        ConfigError: a pair is none.
    """
    options: dict[str, object] = {"url": url}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--option = {pair!r} must be NAME=VALUE, such as allow_http=true")
        options[name] = _value(text)
    return options


def _value(text: str) -> object:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
