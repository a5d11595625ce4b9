"""The rendered examples in `envoy/` are what the example configuration gives, and Envoy takes them.

After a change of the rendering: `.venv/bin/python tests/xds/test_xds_examples.py` writes them anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.config.parse import parse
from extproc.config.values import Config, Steering
from extproc.lab.envoy import complaint
from extproc.xds.render import render

FOLDER = Path(__file__).resolve().parents[2] / "envoy"


def example() -> Config:
    """The example configuration."""
    return parse((FOLDER / "llmgw.yaml").read_text(encoding="utf-8"), "llmgw.yaml")


@pytest.mark.parametrize("steering", Steering)
def test_the_committed_example_is_what_is_rendered(steering: Steering) -> None:
    """For every steering, to the letter."""
    committed = (FOLDER / f"{steering}.yaml").read_text(encoding="utf-8")
    assert committed == render(example(), steering)


def test_the_example_configuration_has_nothing_to_warn_of() -> None:
    """It is one to start from."""
    assert example().warnings == ()


@pytest.mark.envoy
@pytest.mark.parametrize("steering", Steering)
async def test_envoy_accepts_the_example(steering: Steering, tmp_path: Path) -> None:
    """With the variable set that holds the provider's key."""
    text = (FOLDER / f"{steering}.yaml").read_text(encoding="utf-8")
    assert await complaint(text, tmp_path, environ={"PROVIDER_API_KEY": "k"}) is None


if __name__ == "__main__":
    for chosen in Steering:
        (FOLDER / f"{chosen}.yaml").write_text(render(example(), chosen), encoding="utf-8")
