"""What an error of the client means: one of our own, with a message that holds no secret.

Servers repeat parts of a request in their answers, signatures and session tokens included, and the
client repeats the whole answer. So a message is made of the error's code, its HTTP status and the
operation, never of the text, and the client's error is not kept as a cause.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from obstore.exceptions import BaseError

from kvtier.errors import (
    KVTierError,
    MissingBlockError,
    TierDeniedError,
    TierError,
    TierFullError,
    TierThrottledError,
    TierTimeoutError,
    TierUnreachableError,
)

if TYPE_CHECKING:
    from kvtier.tiers.object.settings import Place

CLIENT_ERRORS = (BaseError, OSError, ValueError)
"""What calls of the client raise."""

_STATUS = re.compile(r"Server returned non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9_.]{1,64})\s*</Code>")
_REGION = re.compile(r"<Region>\s*([a-z0-9-]{1,32})\s*</Region>")
_KIND = re.compile(r"\bkind: (Connect|Timeout|Interrupted|Request|Decode|Body)\b")
_CREDENTIAL_SOURCES = re.compile(
    r"169\.254\.\d+\.\d+|metadata\.google|/latest/api/token|AssumeRoleWithWebIdentity"
    r"|oauth2|ExternalAccount|credential provider"
)

_BUCKET_CODES = {"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"}
_FULL_CODES = {"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "StorageFull"}
_FULL_CODES |= {"XMinioAdminBucketQuotaExceeded", "AccountLimitExceeded"}
_THROTTLED_CODES = {"SlowDown", "SlowDownRead", "SlowDownWrite", "Throttling", "ServerBusy"}
_THROTTLED_CODES |= {"ThrottlingException", "RequestLimitExceeded", "TooManyRequests"}
_EXPIRED_CODES = {"ExpiredToken", "TokenRefreshRequired", "RequestExpired"}
_REGION_CODES = {"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraint"}
_DENIED_CODES = {"InvalidToken", "InvalidTokenId", "InvalidAccessKeyId", "AccessDenied"}

_CAUSES = {
    "ConnectionRefused": "connection refused",
    "ConnectionReset": "connection reset",
    "dns error": "the host name cannot be resolved",
    "IncompleteBody": "the answer was cut short",
    "UnexpectedEof": "the connection ended in the middle of an answer",
}

_LATE = re.compile(r"\b(?:Timeout|TimedOut)\b")

_CERTIFICATE_CAUSES = {
    "UnknownIssuer": "is of an unknown authority: set ca_bundle to the authority's certificate",
    "Expired": "has expired",
    "NotValidYet": "is not valid yet: is this host's clock right?",
    "NotValidForName": "is for another host name: use the name that it was made for",
}


def status_of(error: Exception) -> int:
    """HTTP status in an error of the client; 0 if there was no answer."""
    match = _STATUS.search(str(error))
    return int(match.group(1)) if match else 0


def fault_of_client(error: Exception, place: Place, doing: str) -> KVTierError:
    """The error of ours that `error` of the client stands for.

    Args:
        error: what a call of the client raised.
        place: where it went.
        doing: what was asked for, e.g. `writing a block`.
    """
    text = str(error)
    status = status_of(error)
    match = _CODE.search(text)
    code = match.group(1) if match else ""
    said = " ".join(filter(None, (str(status or ""), code))) or type(error).__name__
    where = f"{place.url}: {doing} failed ({said})"
    # the client hides the address of the token service, the only one that it posts to
    if _CREDENTIAL_SOURCES.search(text) or (status and "POST REDACTED" in text):
        return TierDeniedError(
            f"{where}: no credentials could be had, neither from the environment nor from a role "
            f"of this machine"
        )
    if code in _BUCKET_CODES:
        return TierError(f"{where}: the bucket does not exist: create it, or correct the url")
    if isinstance(error, FileNotFoundError) or status == 416:
        return MissingBlockError(f"{where}: no such object")
    if code in _FULL_CODES or status == 507:
        return TierFullError(f"{where}: no room")
    if code in _REGION_CODES or "incorrectly configured region" in text:
        match = _REGION.search(text)
        right = f"set region to {match.group(1)}" if match else "set region to the bucket's own"
        return TierError(f"{where}: the bucket is in another region: {right}, or set endpoint")
    denied = _denial(code, status)
    if denied:
        return TierDeniedError(f"{where}: {denied}")
    if status in (429, 503) or code in _THROTTLED_CODES:
        return TierThrottledError(f"{where}: the server asks for fewer requests")
    if status in (408, 502, 504):
        return TierUnreachableError(f"{where}: what stands behind the server does not answer")
    if status:
        return TierError(where)
    return _connection_error(text, where)


def _denial(code: str, status: int) -> str:
    """Why a request was denied; empty if it was not."""
    if code == "RequestTimeTooSkewed":
        return "this host's clock is wrong: correct it"
    if code in _EXPIRED_CODES:
        return "the credentials have expired: renew them"
    if code == "SignatureDoesNotMatch":
        return "the secret key is not the one of this access key, or a proxy changed the request"
    if code in _DENIED_CODES or status in (401, 403):
        return "the credentials or their permissions are refused"
    return ""


def _connection_error(text: str, where: str) -> KVTierError:
    if "BadScheme" in text:
        return TierError(f"{where}: the endpoint is not https:// and allow_http is off")
    if "certificate" in text.lower():
        known = (advice for word, advice in _CERTIFICATE_CAUSES.items() if word in text)
        return TierDeniedError(f"{where}: the server's certificate {next(known, 'is refused')}")
    known = (cause for word, cause in _CAUSES.items() if word in text)
    cause = next(known, "")
    if not cause and _LATE.search(text):
        return TierTimeoutError(f"{where}: no answer in time")
    if cause or _KIND.search(text):
        return TierUnreachableError(f"{where}: {cause or 'the connection broke'}")
    return TierError(where)
