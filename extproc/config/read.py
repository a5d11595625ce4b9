"""`llmgw.yaml` from the disk, and whether the secrets that it names are there.

The two are apart: the process that checks a file need not be one that may see its secrets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from extproc.config.parse import parse
from extproc.config.problems import ConfigErrors, joined
from extproc.config.values import Config
from extproc.errors import ConfigError
from extproc.routing.endpoint import SecretKind, SecretRef

MAX_FILE_BYTES: Final = 16 * 1024 * 1024
MAX_SECRET_BYTES: Final = 64 * 1024


def read(path: Path) -> Config:
    """The configuration in a file of at most 16 MiB of UTF-8.

    Raises:
        ConfigErrors: the file cannot be read, or what it says is wrong.
    """
    name = str(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise _unreadable(name, f"cannot be read: {_why(error)}", "give a readable file") from None
    if len(data) > MAX_FILE_BYTES:
        raise _unreadable(name, f"is larger than {MAX_FILE_BYTES} bytes", "say less")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _unreadable(name, "is not UTF-8", "save the file as UTF-8", line) from None
    return parse(text, name)


def read_secret(reference: SecretRef, environ: Mapping[str, str]) -> str:
    """The secret itself, without the line end of its file.

    Raises:
        ValueError: it is not there, empty, or cannot stand in a header; the text shows where the
            secret is, and nothing of it.
    """
    if reference.kind is SecretKind.ENV:
        value = environ.get(reference.name)
        if value is None:
            raise ValueError(f"{reference} is not set")
    else:
        value = _secret_in(reference).rstrip("\r\n")
    if not value:
        raise ValueError(f"{reference} is empty")
    if not (value.isascii() and value.isprintable()):
        raise ValueError(f"{reference} has a character that no header can carry")
    return value


def missing_secrets(config: Config, environ: Mapping[str, str]) -> tuple[ConfigError, ...]:
    """The secrets that the configuration names and that cannot be used here, with their place."""
    return tuple(_missing_secrets(config, environ))


def missing_files(config: Config) -> tuple[ConfigError, ...]:
    """The certificate and key files that the configuration names and that are not here.

    Envoy reads most of them, and may run where they are; so this is no part of `read`.
    """
    return tuple(
        ConfigError(config.file, 0, key, f"{name} is no file that can be read", "put it there")
        for key, name in _files(config)
        if not _is_readable(Path(name))
    )


def _missing_secrets(config: Config, environ: Mapping[str, str]) -> Iterator[ConfigError]:
    for info in config.endpoints:
        if info.auth is None:
            continue
        try:
            read_secret(info.auth.key, environ)
        except ValueError as error:
            key = f"{joined('endpoints', info.id)}.api_key"
            yield ConfigError(config.file, 0, key, str(error), "put the key there")


def _files(config: Config) -> Iterator[tuple[str, str]]:
    named: list[tuple[str, str | None]] = [
        ("listener.tls.cert_file", config.listener.tls_cert_file),
        ("listener.tls.key_file", config.listener.tls_key_file),
    ]
    service = config.service.tls
    if service is not None:
        named += [
            ("service.tls.cert_file", service.cert_file),
            ("service.tls.key_file", service.key_file),
            ("service.tls.client_ca_file", service.client_ca_file),
            ("service.tls.ca_file", service.ca_file),
            ("service.tls.client_cert_file", service.client_cert_file),
            ("service.tls.client_key_file", service.client_key_file),
        ]
    for info in config.endpoints:
        place = f"{joined('endpoints', info.id)}.tls"
        named += [
            (f"{place}.ca_file", info.tls.ca_file),
            (f"{place}.client_cert_file", info.tls.client_cert_file),
            (f"{place}.client_key_file", info.tls.client_key_file),
        ]
    return ((key, name) for key, name in named if name is not None)


def _secret_in(reference: SecretRef) -> str:
    try:
        with Path(reference.name).open("rb") as file:
            data = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{reference} cannot be read: {_why(error)}") from None
    if len(data) > MAX_SECRET_BYTES:
        raise ValueError(f"{reference} is larger than {MAX_SECRET_BYTES} bytes")
    return data.decode("latin-1")


def _is_readable(path: Path) -> bool:
    try:
        with path.open("rb"):
            return True
    except OSError:
        return False


def _why(error: Exception) -> str:
    """The reason in the system's words, without the file's name, which stands before it."""
    return (error.strerror if isinstance(error, OSError) else None) or "not a file name"


def _unreadable(file: str, problem: str, expected: str, line: int = 0) -> ConfigErrors:
    return ConfigErrors([ConfigError(file, line, "(file)", problem, expected)])
