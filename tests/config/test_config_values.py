"""The configuration's values agree with the rooms that read them."""

from __future__ import annotations

from dataclasses import replace

from extproc.config.values import (
    ENGINES,
    SIGNALS,
    UNSCRAPED,
    ClientPolicy,
    Config,
    ConfigWarning,
    ServiceTls,
)
from extproc.engines.dialects import DIALECTS, Signal
from extproc.routing.endpoint import Tls
from extproc.routing.policy import UNRESTRICTED, Restriction

EMPTY = Config("edge", (), ())


def test_every_engine_has_a_dialect() -> None:
    """What `engine` may say is what can be scraped, or not scraped."""
    assert set(ENGINES) == set(DIALECTS) | {UNSCRAPED}


def test_every_signal_can_be_renamed() -> None:
    """The keys of `metrics.names` are the signals."""
    assert set(SIGNALS) == {str(signal) for signal in Signal}


def test_warnings_do_not_make_a_difference() -> None:
    """A reload that changes nothing but warnings changes nothing."""
    assert replace(EMPTY, warnings=(ConfigWarning(1, "a", "b"),)) == EMPTY
    assert replace(EMPTY, max_attempts=2) != EMPTY


def test_a_clients_policy_becomes_a_restriction() -> None:
    """Only residency and no-store restrict."""
    assert ClientPolicy(tags=(("a", "b"),), strategy="chat").restriction == UNRESTRICTED
    assert ClientPolicy(residency="eu").restriction == Restriction(residency=frozenset({"eu"}))
    assert ClientPolicy(no_store=True).restriction == Restriction(no_store=True)


def test_the_services_tls_is_envoys_side_and_its_own() -> None:
    """Who renders Envoy's side reads it like an endpoint's."""
    tls = ServiceTls(sni="llmgw", cert_file="/c", key_file="/k")
    assert isinstance(tls, Tls)
    assert (tls.sni, tls.verify, tls.cert_file, tls.client_ca_file) == ("llmgw", True, "/c", None)
