"""Where a request may not go: residency, no-store and the clusters that it passed through.

Everything here fails closed: what cannot be read restricts, and no combination allows more than its
parts. Nothing here chooses an endpoint.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from extproc.errors import Reason, Rejection
from extproc.routing.endpoint import Info, Kind

DEFAULT_MAX_HOPS: Final = 8

NOBODY: Final = "*nobody*"
"""A residency label outside the grammar, so that no endpoint can have it."""

_LABEL: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.ASCII)
_CLUSTER_ID: Final = re.compile(r"(?=.*[A-Za-z])[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_OFF: Final = frozenset({b"false", b"0"})
_OPTIONAL_WHITESPACE: Final = b" \t"


@dataclass(frozen=True, slots=True)
class Restriction:
    """What keeps a request off endpoints; equal restrictions allow the same endpoints.

    `residency` holds labels that an external endpoint's label must all equal, `no_store` demands an
    external endpoint that may be sent such requests; either keeps a request off every peer.
    `own_only` leaves our engines alone. `visited` are cluster ids whose peers are left out.
    """

    residency: frozenset[str] = frozenset()
    no_store: bool = False
    own_only: bool = False
    visited: frozenset[str] = frozenset()

    @property
    def is_restricted(self) -> bool:
        """Whether anything is kept from anybody."""
        return bool(self.residency or self.no_store or self.own_only or self.visited)

    def allows(self, info: Info) -> bool:
        """Whether the endpoint may serve the request; engines of our own always may."""
        if info.kind is Kind.ENGINE:
            return True
        if self.own_only:
            return False
        if info.kind is Kind.PEER:
            if self.residency or self.no_store:
                return False
            # A peer whose cluster is unknown could be one that the request passed through.
            return not self.visited or (
                info.peer is not None and info.peer.cluster_id not in self.visited
            )
        if self.no_store and not info.no_store_allowed:
            return False
        return all(label == info.residency and label != NOBODY for label in self.residency)

    def also(self, other: Restriction) -> Restriction:
        """Both restrictions at once: what either forbids is forbidden."""
        return Restriction(
            residency=self.residency | other.residency,
            no_store=self.no_store or other.no_store,
            own_only=self.own_only or other.own_only,
            visited=self.visited | other.visited,
        )

    def reduced(self, labels: AbstractSet[str], clusters: AbstractSet[str]) -> Restriction:
        """The same restriction in as few words as endpoints with these labels and peers need.

        Clients choose labels and hops freely. Reduced to what endpoints have, the number of
        different restrictions is bounded, and so is what a cache by restriction can hold.
        """
        residency = self.residency
        if len(residency) > 1 or not residency <= labels:
            residency = frozenset({NOBODY})
        closed_to_peers = self.own_only or bool(residency) or self.no_store
        return Restriction(
            residency=frozenset() if self.own_only else residency,
            no_store=self.no_store and not self.own_only,
            own_only=self.own_only,
            visited=frozenset() if closed_to_peers else self._visited_among(clusters),
        )

    def _visited_among(self, clusters: AbstractSet[str]) -> frozenset[str]:
        """The visited clusters that a peer has; one that none has stands for "some cluster"."""
        if not self.visited:
            return self.visited
        return (self.visited & clusters) or frozenset({NOBODY})


UNRESTRICTED: Final = Restriction()


def residency_label(text: str) -> str:
    """The label that `text` names, trimmed and in lower case; `NOBODY` for what is no label.

    A label is 1 to 64 of a-z, 0-9, dot, underscore and hyphen, a letter or a digit first.
    """
    label = text.strip(" \t").lower()
    return label if text.isascii() and _LABEL.fullmatch(label) else NOBODY


def is_cluster_id(text: str) -> bool:
    """Whether `text` may name a cluster in a hop list.

    A cluster id is 1 to 64 letters, digits, dots, underscores and hyphens, a letter or a digit
    first, and at least one letter: a bare number is a hop count, and a count is junk here. Upper
    and lower case differ.
    """
    return _CLUSTER_ID.fullmatch(text) is not None


def residency_of(values: Sequence[bytes]) -> frozenset[str]:
    """The labels that a request's residency header lines demand; empty when there is no line."""
    return frozenset(residency_label(value.decode("latin-1")) for value in values)


def no_store_of(values: Sequence[bytes]) -> bool:
    """Whether a request's no-store header lines restrict it.

    They do unless there is none, or every one says `false` or `0` in any case.
    """
    return any(value.strip(_OPTIONAL_WHITESPACE).lower() not in _OFF for value in values)


def client_restriction(residency: str | None, *, no_store: bool) -> Restriction:
    """What a client's policy forbids; an unreadable label forbids every external endpoint."""
    labels = frozenset() if residency is None else frozenset({residency_label(residency)})
    return Restriction(residency=labels, no_store=no_store)


def restriction_of(
    *,
    residency: Sequence[bytes] = (),
    no_store: Sequence[bytes] = (),
    hops: Sequence[str] = (),
    forward_hopped_requests: bool = False,
    client: Restriction = UNRESTRICTED,
) -> Restriction:
    """What a request's header lines, its hops and its client's policy forbid together.

    `hops` is what `parse_hops` returned. A request with hops is for our own engines, unless
    `forward_hopped_requests`; it never goes back to a cluster that it passed through.
    """
    if not (residency or no_store or hops):
        return client
    return client.also(
        Restriction(
            residency=residency_of(residency),
            no_store=no_store_of(no_store),
            own_only=bool(hops) and not forward_hopped_requests,
            visited=frozenset(hops),
        )
    )


def parse_hops(
    values: Sequence[bytes], own_id: str, max_hops: int = DEFAULT_MAX_HOPS
) -> tuple[str, ...] | Rejection:
    """The clusters that a request passed through, oldest first, or why it is refused with 508.

    `values` are the hop header's lines: none means no hops, more than one is junk. A line is a
    list of different cluster ids with commas between them; spaces and tabs around an id are
    ignored. More than `max_hops` ids and a list that names `own_id` are refused.
    """
    if not values:
        return ()
    if len(values) > 1:
        return _refused(Reason.HOP_INVALID, "The hop header was sent more than once.")
    parts = values[0].split(b",", max_hops)
    if len(parts) > max_hops:
        return _refused(
            Reason.TOO_MANY_HOPS, f"The request passed through more than {max_hops} gateways."
        )
    hops = tuple(part.strip(_OPTIONAL_WHITESPACE).decode("latin-1") for part in parts)
    if own_id in hops:
        return _refused(Reason.LOOP, "The request already passed through this gateway.")
    if len(set(hops)) < len(hops) or not all(map(is_cluster_id, hops)):
        return _refused(Reason.HOP_INVALID, "The hop header is not a list of gateway ids.")
    return hops


def append_hop(hops: Sequence[str], own_id: str) -> bytes:
    """The hop header's value towards a peer: the request's hops, ours last."""
    return ",".join((*hops, own_id)).encode("ascii")


def _refused(reason: Reason, message: str) -> Rejection:
    return Rejection(508, reason, message, code=str(reason), should_retry=False)
