"""Credentials come from where the cloud's own tools look; nothing here keeps, logs or returns them
to anybody but the client.

The client itself knows, for S3: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and
`AWS_SESSION_TOKEN`; web identity (`AWS_WEB_IDENTITY_TOKEN_FILE`, `AWS_ROLE_ARN`); container and
instance roles. For GCS: `GOOGLE_SERVICE_ACCOUNT`, application default credentials, the metadata
server. For Azure: `AZURE_STORAGE_ACCOUNT_KEY` and its other variables, workload and managed
identity. What it lacks is here: static keys in a section of the shared AWS credentials file.
"""

from __future__ import annotations

import configparser
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from obstore.store import S3Credential

_READ_AGAIN_AFTER = timedelta(minutes=5)
"""Keys in the file are rotated by other programs."""


def profile_of(profile: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The section to read: the one that is set, else `AWS_PROFILE` unless keys are given."""
    if profile is not None or environment.get("AWS_ACCESS_KEY_ID"):
        return profile
    return environment.get("AWS_PROFILE")


def shared_file_credentials(
    profile: str, environment: Mapping[str, str] = os.environ
) -> Callable[[], S3Credential]:
    """A function that reads the keys of a section, whenever the client asks for them.

    Raises:
        ConfigError: the file or the section is missing, or holds no static keys. So does the
            function.
    """
    path = Path(
        environment.get("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws" / "credentials"
    )

    def read() -> S3Credential:
        parser = configparser.RawConfigParser()
        try:
            found = parser.read(path)
        except (configparser.Error, UnicodeDecodeError):
            # neither the error nor its cause may be shown: they repeat lines of the file
            raise ConfigError(f"{str(path)!r} is not a credentials file") from None
        if not found or not parser.has_section(profile):
            raise ConfigError(
                f"profile {profile!r} is not in {str(path)!r}: name another, or set "
                f"AWS_SHARED_CREDENTIALS_FILE"
            )
        section = parser[profile]
        if "aws_access_key_id" not in section or "aws_secret_access_key" not in section:
            raise ConfigError(
                f"profile {profile!r} of {str(path)!r} has no static keys: export them (aws "
                f"configure export-credentials --format env), or use a role"
            )
        return {
            "access_key_id": section["aws_access_key_id"],
            "secret_access_key": section["aws_secret_access_key"],
            "token": section.get("aws_session_token"),
            "expires_at": datetime.now(UTC) + _READ_AGAIN_AFTER,
        }

    read()
    return read
