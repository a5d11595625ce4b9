"""Writes an Envoy configuration as YAML that Envoy's parser and Python's read alike."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Final

import yaml

from extproc.config.values import Config, Steering
from extproc.xds.bootstrap import bootstrap
from extproc.xds.tree import Tree, plain

# Envoy reads YAML 1.2 and takes an unquoted 1e5 for a number and an unquoted y for a truth value;
# PyYAML, which reads 1.1, would leave both unquoted. So only what no parser can misread is.
_PLAIN: Final = re.compile(r"[A-Za-z_/@][A-Za-z0-9_./@-]*[A-Za-z0-9]|[0-9]+(\.[0-9]+)?s")
_WORDS: Final = frozenset(
    {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf", "infinity"}
)


class _Dumper(yaml.SafeDumper):
    """Without anchors, lists indented, text quoted unless it is plainly text."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - the base class's signature
        return True

    def increase_indent(
        self,
        flow: bool = False,  # noqa: FBT001, FBT002 - the base class's signature
        indentless: bool = False,  # noqa: ARG002, FBT001, FBT002 - as above
    ) -> None:
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    is_plain = _PLAIN.fullmatch(value) is not None and value.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if is_plain else '"')


_Dumper.add_representer(str, _text)


def to_yaml(tree: Tree) -> str:
    """`tree` as block-style YAML, keys in the order given, without anchors."""
    return yaml.dump(plain(tree), Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=False)


def render(config: Config, steering: Steering | None = None) -> str:
    """A complete Envoy 1.40 bootstrap for `config`, as YAML.

    `steering` stands in for the configured one. Keys are named, never written: Envoy reads them
    from its own environment or files. The same configuration always gives the same text.

    Raises:
        ValueError: two endpoints would get the same cluster.
    """
    chosen = steering or config.steering
    head = (
        f"# Envoy 1.40 for {config.cluster_id}, steered by {chosen}.\n"
        f"# Rendered from {PurePath(config.file).name}: change that and render again.\n"
    )
    return head + to_yaml(bootstrap(config, chosen))
