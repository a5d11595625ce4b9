"""The command `llmgw` as its user types it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from extproc.cli.llmgw import app

GOOD = """
cluster_id: home
endpoints:
  - {id: a, url: 'http://127.0.0.1:9001', models: [m]}
"""


@pytest.fixture
def runner() -> CliRunner:
    """Runs the command in this process."""
    return CliRunner()


def write(folder: Path, text: str) -> str:
    """A configuration file with `text`."""
    file = folder / "llmgw.yaml"
    file.write_text(text)
    return str(file)


def test_check_says_that_a_good_file_is_good(runner: CliRunner, tmp_path: Path) -> None:
    """Exit 0, and what the file has in it."""
    result = runner.invoke(app, ["check", write(tmp_path, GOOD)])
    assert result.exit_code == 0
    assert "ok, 1 endpoint, 1 model, steering priority-group" in result.stdout


def test_check_names_file_line_key_and_what_would_be_right(
    runner: CliRunner, tmp_path: Path
) -> None:
    """Every mistake is told at once, and the exit status is 1."""
    file = write(tmp_path, GOOD.replace("models: [m]", "model: [m], weight: -1"))
    result = runner.invoke(app, ["check", file])
    assert result.exit_code == 1
    assert f"{file}:4: endpoints[0].model" in result.stderr
    assert "weight" in result.stderr
    assert result.stdout == ""


def test_check_tells_of_a_key_that_is_not_there(
    runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key named but not set is found before Envoy would be."""
    monkeypatch.delenv("LLMGW_TEST_KEY", raising=False)
    file = write(tmp_path, GOOD.replace("models:", "api_key: 'env:LLMGW_TEST_KEY', models:"))
    result = runner.invoke(app, ["check", file])
    assert result.exit_code == 1
    assert "env:LLMGW_TEST_KEY is not set" in result.stderr
    monkeypatch.setenv("LLMGW_TEST_KEY", "sk-secret")
    result = runner.invoke(app, ["check", file])
    assert result.exit_code == 0
    assert "sk-secret" not in result.output


def test_check_tells_what_the_steering_cannot_reach(runner: CliRunner, tmp_path: Path) -> None:
    """An endpoint that would never get a request is not silently idle."""
    named = "  - {id: named, url: 'http://engine.test:9001', models: [m]}\n"
    result = runner.invoke(
        app, ["check", write(tmp_path, f"steering: endpoint-picker\n{GOOD}{named}")]
    )
    assert result.exit_code == 0
    assert "endpoints.named: warning: endpoint-picker never sends there" in result.stderr
    assert "endpoints.a:" not in result.stderr


def test_check_of_a_missing_file_says_so(runner: CliRunner, tmp_path: Path) -> None:
    """A wrong name is an error and no traceback."""
    result = runner.invoke(app, ["check", str(tmp_path / "nowhere.yaml")])
    assert result.exit_code == 1
    assert "cannot be read" in result.stderr


def test_warnings_are_told_and_bounded(runner: CliRunner, tmp_path: Path) -> None:
    """A file with a hundred doubtful places does not fill the screen."""
    lines = [f"  - {{id: e{n}, url: 'http://127.0.0.1:9001', models: [m]}}" for n in range(100)]
    file = write(tmp_path, "cluster_id: home\nendpoints:\n" + "\n".join(lines))
    result = runner.invoke(app, ["check", file])
    assert result.exit_code == 0
    assert f"{file}:4: endpoints[1].url: warning:" in result.stderr
    assert "and 79 more" in result.stderr


@pytest.mark.parametrize("steering", ["priority-group", "cluster-header", "endpoint-picker"])
def test_envoy_config_renders_the_steering_that_is_asked_for(
    runner: CliRunner, tmp_path: Path, steering: str
) -> None:
    """The text is YAML with our listener and a cluster for the endpoint."""
    output = tmp_path / "envoy.yaml"
    file = write(tmp_path, GOOD)
    arguments = ["envoy-config", "--config", file, "--steering", steering, "-o", str(output)]
    assert runner.invoke(app, arguments).exit_code == 0
    rendered = yaml.safe_load(output.read_text())
    names = {cluster["name"] for cluster in rendered["static_resources"]["clusters"]}
    assert "ep-a" in names
    printed = runner.invoke(app, arguments[:-2])
    assert printed.stdout == output.read_text()


@pytest.mark.parametrize(
    "command",
    [[], ["serve"], ["up"], ["check"], ["envoy-config"]],
    ids="-".join,
)
def test_help_tells_what_each_command_does(runner: CliRunner, command: list[str]) -> None:
    """`--help` works everywhere and says something."""
    result = runner.invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.stdout
