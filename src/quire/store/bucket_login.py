"""Who we are to S3, from the file in which its users keep that: `~/.aws/credentials`.

The library below reads the environment and asks for the machine's role; this file it does not read.
Only if the environment names nobody is it looked into, for the profile that AWS_PROFILE names. It
is read again now and then: what a login wrote is valid for some hours, and then another follows.
Knows no bucket; says names of files and profiles, and nothing else of what is in them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from configparser import Error as BadFile
from configparser import RawConfigParser
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from quire.errors import StoreError

if TYPE_CHECKING:
    from obstore.store import S3Credential

_ASK_AGAIN = timedelta(minutes=15)
"""The library asks some minutes before."""
_SAY_WHO = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)


def login_of_file(environ: Mapping[str, str] = os.environ) -> Callable[[], S3Credential] | None:
    """None: the environment says who we are, or no file does. Raises StoreError."""
    if any(environ.get(name) for name in _SAY_WHO):
        return None
    named = environ.get("AWS_PROFILE", "")
    file = environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials"
    login = _FileLogin(os.path.expanduser(file), named or "default")
    try:
        login()
    except (OSError, KeyError):
        if not named:
            return None
        raise StoreError(
            f"profile {named!r} of AWS_PROFILE has no access key in {file}: write it there, or set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from None
    except (UnicodeDecodeError, BadFile) as error:
        raise StoreError(
            f"{file} cannot be read ({type(error).__name__}): check it, or set AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY"
        ) from None  # it quotes what is in the file
    return login


class _FileLogin:
    """What a profile of a file says at the moment."""

    def __init__(self, path: str, profile: str) -> None:
        self._path, self._profile = path, profile
        self._last: S3Credential | None = None

    def __call__(self) -> S3Credential:
        """Raises OSError, KeyError: it says nothing; and what a bad file raises."""
        try:
            self._last = self._read()
        except (OSError, UnicodeDecodeError, BadFile, KeyError):
            if self._last is None:
                raise  # else somebody is about to write it: what it said holds until it does not
            self._last = {**self._last, "expires_at": _soon()}
        return self._last

    def _read(self) -> S3Credential:
        parser = RawConfigParser(strict=False)
        with open(self._path, encoding="utf-8") as file:
            parser.read_file(file)
        section = parser[self._profile]
        return {
            "access_key_id": section["aws_access_key_id"].strip(),
            "secret_access_key": section["aws_secret_access_key"].strip(),
            "token": section.get("aws_session_token"),
            "expires_at": _soon(),
        }


def _soon() -> datetime:
    return datetime.now(UTC) + _ASK_AGAIN
