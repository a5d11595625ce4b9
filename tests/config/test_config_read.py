"""The file is read from the disk, and its secrets are looked for apart from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from extproc.config.problems import ConfigErrors
from extproc.config.read import (
    MAX_FILE_BYTES,
    MAX_SECRET_BYTES,
    missing_files,
    missing_secrets,
    read,
    read_secret,
)
from extproc.config.values import Config, Listener, Service, ServiceTls
from extproc.routing.endpoint import Auth, Info, SecretKind, SecretRef, Tls, Url

SECRET = "sk-live-5up3rs3cret"
TEXT = "endpoints:\n- {id: e, url: 'http://h', models: [m]}\n"
ENDPOINT = Info("e", Url("http", "h", 80), ("m",))


def file(path: Path) -> SecretRef:
    """A reference to a file."""
    return SecretRef(SecretKind.FILE, str(path))


def with_key(key: SecretRef) -> Config:
    """A configuration whose only endpoint demands a key."""
    return Config("edge", (replace(ENDPOINT, auth=Auth(key)),), (), file="x.yaml")


def problem(path: Path) -> str:
    """The one error of a file that must be refused."""
    with pytest.raises(ConfigErrors) as caught:
        read(path)
    (error,) = caught.value.errors
    return str(error)


class TestRead:
    def test_a_file_is_read(self, tmp_path: Path) -> None:
        """The configuration knows its file."""
        path = tmp_path / "llmgw.yaml"
        path.write_text(TEXT, encoding="utf-8")
        config = read(path)
        assert config.endpoints == (ENDPOINT,)
        assert config.file == str(path)

    def test_a_byte_order_mark_and_windows_line_ends_are_read(self, tmp_path: Path) -> None:
        """Editors write them."""
        path = tmp_path / "llmgw.yaml"
        path.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
        assert read(path).endpoints == (ENDPOINT,)

    def test_errors_name_the_file_and_the_line(self, tmp_path: Path) -> None:
        """As a path that a terminal can open."""
        path = tmp_path / "llmgw.yaml"
        path.write_text(TEXT + "colour: red\n", encoding="utf-8")
        assert problem(path).startswith(f"{path}:3: colour: unknown key")

    def test_a_file_that_is_not_there_is_an_error_of_its_own(self, tmp_path: Path) -> None:
        """The system's reason is told."""
        path = tmp_path / "none.yaml"
        assert problem(path).startswith(f"{path}: (file): cannot be read: No such file")
        assert "Is a directory" in problem(tmp_path)
        assert "not a file name" in problem(Path("a\0b"))

    def test_a_file_that_is_too_large_is_refused(self, tmp_path: Path) -> None:
        """Sixteen mebibytes are enough."""
        path = tmp_path / "llmgw.yaml"
        path.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
        assert "is larger than" in problem(path)

    def test_a_file_that_is_not_utf_8_is_refused_with_the_line(self, tmp_path: Path) -> None:
        """Another encoding would be read as other names."""
        path = tmp_path / "llmgw.yaml"
        path.write_bytes(b"a: b\nc: d\ne: \xe9\n")
        assert problem(path).startswith(f"{path}:3: (file): is not UTF-8")


class TestSecrets:
    def test_a_variable_is_read(self) -> None:
        """As it is."""
        assert read_secret(SecretRef(SecretKind.ENV, "K"), {"K": SECRET}) == SECRET

    def test_a_file_is_read_without_its_line_end(self, tmp_path: Path) -> None:
        """Editors and shells add one."""
        path = tmp_path / "key"
        for end in (b"", b"\n", b"\r\n"):
            path.write_bytes(SECRET.encode() + end)
            assert read_secret(file(path), {}) == SECRET

    @pytest.mark.parametrize(
        ("environ", "why"),
        [
            ({}, "env:K is not set"),
            ({"K": ""}, "env:K is empty"),
            ({"K": f"{SECRET}\n"}, "env:K has a character that no header can carry"),
            ({"K": f"{SECRET}é"}, "env:K has a character that no header can carry"),
        ],
    )
    def test_a_variable_that_cannot_be_used_is_told_without_its_value(
        self, environ: dict[str, str], why: str
    ) -> None:
        """Where it is, and nothing of it."""
        reference = SecretRef(SecretKind.ENV, "K")
        with pytest.raises(ValueError, match=f"^{why}$"):
            read_secret(reference, environ)
        (error,) = missing_secrets(with_key(reference), environ)
        assert str(error) == f"x.yaml: endpoints.e.api_key: {why}; put the key there"

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            (b"", "is empty"),
            (b"\n", "is empty"),
            (b"sk-live\nsecond", "has a character that no header can carry"),
            (b"\xff\xfe", "has a character that no header can carry"),
            (b"x" * (MAX_SECRET_BYTES + 1), "is larger than 65536 bytes"),
        ],
    )
    def test_a_file_that_cannot_be_used_is_told_without_its_content(
        self, tmp_path: Path, content: bytes, why: str
    ) -> None:
        """Where it is, and nothing of it."""
        path = tmp_path / "key"
        path.write_bytes(content)
        (error,) = missing_secrets(with_key(file(path)), {})
        assert error.problem == f"file:{path} {why}"

    def test_a_file_that_is_not_there_is_told(self, tmp_path: Path) -> None:
        """With the system's reason."""
        (error,) = missing_secrets(with_key(file(tmp_path / "none")), {})
        assert "cannot be read: No such file" in error.problem

    def test_a_configuration_without_keys_misses_nothing(self) -> None:
        """And one whose keys are there."""
        assert missing_secrets(Config("edge", (ENDPOINT,), ()), {}) == ()
        assert missing_secrets(with_key(SecretRef(SecretKind.ENV, "K")), {"K": "k"}) == ()


class TestFiles:
    def test_every_certificate_and_key_file_is_looked_for(self, tmp_path: Path) -> None:
        """Each that is not here is told with its key."""
        there, gone = tmp_path / "there", str(tmp_path / "gone")
        there.write_text("", encoding="utf-8")
        config = Config(
            "edge",
            (
                replace(
                    ENDPOINT, tls=Tls(ca_file=gone, client_cert_file=gone, client_key_file=gone)
                ),
            ),
            (),
            listener=Listener(tls_cert_file=str(there), tls_key_file=gone),
            service=Service(
                tls=ServiceTls(
                    cert_file=gone,
                    key_file=str(there),
                    client_ca_file=gone,
                    ca_file=gone,
                    client_cert_file=gone,
                    client_key_file=gone,
                )
            ),
        )
        assert [error.key for error in missing_files(config)] == [
            "listener.tls.key_file",
            "service.tls.cert_file",
            "service.tls.client_ca_file",
            "service.tls.ca_file",
            "service.tls.client_cert_file",
            "service.tls.client_key_file",
            "endpoints.e.tls.ca_file",
            "endpoints.e.tls.client_cert_file",
            "endpoints.e.tls.client_key_file",
        ]

    def test_a_configuration_without_tls_misses_nothing(self) -> None:
        """No file is named."""
        assert missing_files(Config("edge", (ENDPOINT,), ())) == ()
