"""What the errors of a bucket come to: the status of a page, a sentence for a person.

Never what the server said: there may be keys and signatures in it. Of that only the code is taken,
one word that says what is wrong. Knows no bucket.
"""

from __future__ import annotations

import re

from obstore import exceptions

from quire.errors import StoreError
from quire.types import PageStatus

_CODE = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")
_REGION = re.compile(r"<Region>([a-z0-9-]{1,32})</Region>")
_ROLE_ADDRESS = "169.254.169.254"
"""Where a machine's role is asked for, if nothing else says who we are."""

_MISSING = ("NoSuchBucket", "ContainerNotFound")
"""As S3 and Google say it, and as Azure does."""
_ELSEWHERE = ("AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraint")
_REFUSED = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken")
_BUSY = ("SlowDown", "InternalError", "ServiceUnavailable", "ServerBusy")
_STATUS_501 = "non-2xx status code: 501 "
_REDIRECTED, _NOT_SENT = "Received redirect without LOCATION", "HTTP error: error sending request"


def is_missing(answer: object) -> bool:
    """The object, or all of the bucket."""
    return isinstance(answer, FileNotFoundError | exceptions.NotFoundError)


def is_no_bucket(answer: object) -> bool:
    return is_missing(answer) and _code(str(answer)) in _MISSING


def is_not_implemented(answer: BaseException) -> bool:
    """The server, or the library for it, does not know what it was asked for: a condition."""
    if isinstance(answer, NotImplementedError | exceptions.NotSupportedError):
        return True
    text = _told(answer)
    return _code(text) == "NotImplemented" or _STATUS_501 in text


def as_status(answer: PageStatus | BaseException) -> PageStatus:
    if not isinstance(answer, BaseException):
        return answer
    if is_missing(answer):
        return PageStatus.MISS
    if isinstance(answer, TimeoutError):
        return PageStatus.TIMEOUT
    if isinstance(answer, PermissionError | exceptions.PermissionDeniedError):
        return PageStatus.REJECTED
    return PageStatus.FAILED


def as_error(answer: BaseException) -> OSError | StoreError:
    return answer if isinstance(answer, TimeoutError) else StoreError(_sentence(answer))


def _sentence(answer: BaseException) -> str:
    text = _told(answer)
    code, region = _code(text), _REGION.search(text)
    if is_missing(answer):
        said = "there is no such bucket: create it, or check its name and endpoint"
    elif code == "RequestTimeTooSkewed":
        said = "the bucket's clock and ours differ by minutes: set this machine's clock"
    elif code in _REFUSED:
        said = f"the bucket does not take our credentials ({code}): check those in the environment"
    elif isinstance(answer, PermissionError | exceptions.PermissionDeniedError):
        said = "the bucket turns us away: check the credentials and their rights"
    elif isinstance(answer, exceptions.UnauthenticatedError):
        said = "the bucket does not know us: check the credentials"
    elif code in _ELSEWHERE or _REDIRECTED in text:
        where = f"region {region[1]}" if region else "another region"
        said = f"the bucket is in {where}: say so with ?region=, or by its endpoint"
    elif code in _BUSY:
        said = f"the bucket's server is busy or in trouble ({code}): try again later"
    elif _ROLE_ADDRESS in text:
        said = (
            "there are no credentials in the environment or their file, nor has this machine a "
            "role: set them, of S3 for example AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    elif _NOT_SENT in text:
        said = (
            "the bucket cannot be used, since its server cannot be reached: check its endpoint, "
            "and whether that is http:// or https://"
        )
    else:
        said = (
            f"the bucket cannot be used ({code or type(answer).__name__}): check its name, "
            "endpoint and region, and the credentials in the environment"
        )
    return said


def _told(answer: BaseException) -> str:
    return str(answer).partition("\n\nDebug source")[0]


def _code(text: str) -> str:
    found = _CODE.search(text)
    return found[1] if found else ""
