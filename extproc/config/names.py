"""The parts of a configuration that the user gives names to: models, strategies, clients."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace

from extproc.config import grammar
from extproc.config.fields import Section
from extproc.config.values import ClientPolicy
from extproc.routing.catalog import MAX_WEIGHT, ModelEntry, faults
from extproc.routing.endpoint import Info
from extproc.routing.policy import residency_label
from extproc.routing.strategy import BUILT_IN, Strategy, Weights


def read_models(
    top: Section, infos: Sequence[Info], strategies: Collection[str]
) -> tuple[ModelEntry, ...]:
    """An entry for every model, alias and split: the ones listed, then what else is served."""
    served = dict.fromkeys(model for info in infos for model in info.models)
    sections = dict(top.named("models", grammar.MODEL))
    entries = [_model(name, section, strategies) for name, section in sections.items()]
    entries += [ModelEntry(name) for name in served if name not in sections]
    for fault in faults(entries):
        sections[fault.entry].error_in(fault.field, fault.item, fault.problem, fault.expected)
    for entry in entries:
        section = sections.get(entry.name)
        if section is None:
            continue
        if entry.split and entry.name in served:
            section.error("split", "an endpoint serves this name", "give the split its own name")
        if not entry.split and not section.has("split") and entry.name not in served:
            section.warn("", "no endpoint serves this model")
    return tuple(entries)


def read_strategies(top: Section) -> Mapping[str, Strategy]:
    """The built-in strategies and the configured ones; a base is a built-in one as shipped."""
    found = dict(BUILT_IN)
    for name, section in top.named("strategies", grammar.NAME):
        base = section.choice("base", BUILT_IN, name if name in BUILT_IN else "chat", "base")
        found[name] = _strategy(name, section, BUILT_IN[base])
    return found


def read_strategy_name(section: Section, name: str, known: Collection[str]) -> str | None:
    """The strategy that a model, a client or the file names; None when it names none."""
    return section.choice(name, known, None, "strategy")


def read_clients(top: Section, strategies: Collection[str]) -> Mapping[str, ClientPolicy]:
    """The policy of every client that the file names."""
    clients: dict[str, ClientPolicy] = {}
    for name, section in top.named("clients", grammar.CLIENT):
        residency = section.text("residency", grammar.RESIDENCY, None)
        clients[name] = ClientPolicy(
            residency=None if residency is None else residency_label(residency),
            no_store=section.boolean("no_store", default=False),
            tags=_tags(section.section("tags")),
            strategy=read_strategy_name(section, "strategy", strategies),
        )
        section.close()
    return clients


def _model(name: str, section: Section, strategies: Collection[str]) -> ModelEntry:
    split = section.section("split")
    weights = [(member, split.number(member, 1.0, high=MAX_WEIGHT)) for member, _ in split.names()]
    if section.is_empty("split"):
        section.error("split", "is empty", "give every member a weight")
    entry = ModelEntry(
        name=name,
        aliases=section.texts("aliases", grammar.MODEL),
        fallbacks=section.texts("fallbacks", grammar.MODEL),
        split=tuple(weights),
        strategy=read_strategy_name(section, "strategy", strategies),
    )
    section.close()
    return entry


def _strategy(name: str, section: Section, base: Strategy) -> Strategy:
    weights = section.section("weights")
    numbers: dict[str, float] = asdict(base.weights)
    found = {scorer: weights.number(scorer, default) for scorer, default in numbers.items()}
    weights.close()
    if not any(found.values()):
        section.error("weights", "every weight is 0", "give at least one scorer a weight")
    strategy = replace(
        base,
        name=name,
        weights=Weights(**found),
        picker=section.member("picker", base.picker, "picker"),
        temperature=section.positive("temperature", base.temperature),
        queue_knee=section.positive("queue_knee", base.queue_knee),
        inflight_knee=section.positive("inflight_knee", base.inflight_knee),
        load_knee_seconds=section.positive("load_knee_seconds", base.load_knee_seconds),
        kv_knee_ratio=section.number("kv_knee_ratio", base.kv_knee_ratio, high=1),
        kv_ceiling_ratio=section.positive("kv_ceiling_ratio", base.kv_ceiling_ratio, high=1),
        session_bound_factor=section.number("session_bound_factor", base.session_bound_factor, 1),
        session_bound_slack=section.number("session_bound_slack", base.session_bound_slack),
    )
    section.close()
    if strategy.kv_knee_ratio >= strategy.kv_ceiling_ratio:
        name = "kv_knee_ratio" if section.has("kv_knee_ratio") else "kv_ceiling_ratio"
        section.error(
            name,
            f"a knee of {strategy.kv_knee_ratio:g} is not below"
            f" the ceiling {strategy.kv_ceiling_ratio:g}",
            "let kv_knee_ratio be below kv_ceiling_ratio",
        )
    return strategy


def _tags(section: Section) -> tuple[tuple[str, str], ...]:
    return tuple(
        (key, section.text(key, grammar.TAG_VALUE, ""))
        for key, _ in section.names()
        if section.follows(key, key, grammar.TAG_KEY)
    )
