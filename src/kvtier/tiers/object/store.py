"""Builds the client of a store. Nothing else reads the settings of connections.

Its threads do not survive a fork, so the engine's processes never build one: see `preflight`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from obstore.store import AzureStore, GCSStore, S3Store

from kvtier.tiers.object.credentials import profile_of, shared_file_credentials
from kvtier.tiers.object.faults import CLIENT_ERRORS, fault_of_client
from kvtier.tiers.object.settings import ca_certificates, place_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from obstore.store import ClientConfig, RetryConfig, S3Config

    from kvtier.tiers.object.settings import ObjectSettings, Place

Answer = TypeVar("Answer")

AnyStore = S3Store | GCSStore | AzureStore

_FIRST_BACKOFF = timedelta(milliseconds=50)
_LAST_BACKOFF = timedelta(seconds=2)


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """A client and where it points.

    Attributes:
        client: its paths are relative to the place's prefix.
        place: the bucket and prefix.
    """

    client: AnyStore
    place: Place

    def ask(self, doing: str, call: Callable[[AnyStore], Answer]) -> Answer:
        """The answer of `call`, with errors of the client raised as what they mean.

        Args:
            doing: what is asked for, e.g. `reading a block`.
            call: one request or several.

        Raises:
            KVTierError: see `fault_of_client`.
        """
        try:
            return call(self.client)
        except CLIENT_ERRORS as error:
            fault = fault_of_client(error, self.place, doing)
        raise fault  # out here the client's error is not even its context


def open_store(settings: ObjectSettings, setting: str = "object") -> ObjectStore:
    """The client for a place. Makes no request.

    Args:
        settings: the tier's.
        setting: path of the tier's settings, for messages.

    Raises:
        ConfigError: as `place_of`, `ca_certificates` and `shared_file_credentials`.
    """
    place = place_of(settings, setting)
    client = _client_options(settings, setting)
    retry: RetryConfig = {
        "max_retries": settings.retries,
        "retry_timeout": timedelta(seconds=settings.timeout_s),
        "backoff": {"init_backoff": _FIRST_BACKOFF, "max_backoff": _LAST_BACKOFF, "base": 2},
    }
    prefix = place.prefix or None
    if place.scheme == "gs":
        return ObjectStore(
            GCSStore(
                place.bucket,
                prefix=prefix,
                config={"base_url": place.endpoint} if place.endpoint else None,
                client_options=client,
                retry_config=retry,
                skip_signature=settings.skip_signature,
            ),
            place,
        )
    if place.scheme == "az":
        return ObjectStore(
            AzureStore(
                place.bucket,
                prefix=prefix,
                config={
                    "skip_signature": settings.skip_signature,
                    **({"account_name": settings.account} if settings.account else {}),
                    **({"endpoint": place.endpoint} if place.endpoint else {}),
                },
                client_options=client,
                retry_config=retry,
            ),
            place,
        )
    profile = None if settings.skip_signature else profile_of(settings.profile)
    return ObjectStore(
        S3Store(
            place.bucket,
            prefix=prefix,
            config=_s3_config(settings, place),
            client_options=client,
            retry_config=retry,
            credential_provider=shared_file_credentials(profile) if profile else None,
        ),
        place,
    )


def _client_options(settings: ObjectSettings, setting: str) -> ClientConfig:
    options: ClientConfig = {
        "allow_http": settings.allow_http,
        "allow_invalid_certificates": False,
        "connect_timeout": timedelta(seconds=settings.connect_timeout_s),
        "timeout": timedelta(seconds=settings.timeout_s),
        "pool_max_idle_per_host": str(settings.threads + settings.lookups_in_flight),
    }
    certificates = ca_certificates(settings, setting)
    if certificates is not None:
        options["root_certificate"] = certificates
    return options


def _s3_config(settings: ObjectSettings, place: Place) -> S3Config:
    encrypted = place.endpoint is None or place.endpoint.startswith("https:")
    config: S3Config = {
        "virtual_hosted_style_request": place.virtual,
        "skip_signature": settings.skip_signature,
        "unsigned_payload": settings.sign_payload == "never"
        or (settings.sign_payload == "auto" and encrypted),
        # not every server knows the request that deletes many; this one costs the same for one
        "disable_bulk_delete": True,
    }
    if settings.region is not None:
        config["region"] = settings.region
    if place.endpoint is not None:
        endpoint = place.endpoint
        if place.virtual:
            split = urlsplit(endpoint)
            endpoint = split._replace(netloc=f"{place.bucket}.{split.netloc}").geturl()
        # the second one would come from the environment, and be stronger than the first
        config["endpoint"] = config["aws_endpoint_url_s3"] = endpoint
    return config
