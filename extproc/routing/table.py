"""What scoring one model by one strategy needs, kept ready between decisions.

A score without its session term is the endpoint's own affair: it changes when the endpoint does.
So every endpoint has a row, the registry marks the rows that are out of date, and a decision renews
those few, whatever the number of endpoints.

Scores are on a grid (see `grid.on_grid`), so sums are exact, and a row that was renewed a
thousand times equals one from a rebuild bit for bit.

The module is long because the commonest renewal stands in it twice: as a rule, and written out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np
from numpy.typing import NDArray

from extproc.clusters import cluster_name
from extproc.routing import scorers
from extproc.routing.alarms import Alarms
from extproc.routing.endpoint import Kind, Stats
from extproc.routing.filters import Filter, Refusal, next_change, state
from extproc.routing.grid import SCORE_SCALE, SHIFT, on_grid
from extproc.routing.live import Live, Ticket
from extproc.routing.pool import POSITION_BITS, Group, Pool, key_of
from extproc.routing.rows import LOAD, Row, Scale, Scores
from extproc.routing.scorers import TOKENS_PER_REQUEST
from extproc.routing.strategy import Picker, Strategy

_FEW_CHANGES: Final = 64
_JOURNAL_BASE: Final = 4096
_JOURNAL_PER_ENDPOINT: Final = 8


@dataclass(frozen=True, slots=True)
class TableSettings:
    """When numbers are stale and how long a slow start takes, as the registry has it."""

    stale_after_seconds: float
    slow_start_seconds: float


class Table:
    """The rows of one model's endpoints under one strategy, as of the last `refresh`.

    `lives` are sorted by id; a position is an index into them. `excluded` names, per position, the
    filter by which requests of this table's kind rule the endpoint out. `rels` are weights over the
    largest. `class_of` numbers the endpoints that can stand in for each other: of one kind, with
    one name for the model. `pools` are by falling priority. `groups` and `keys` say where a
    candidate stands. `probing` are the positions where a probe is due. `changes` counts rows that
    were replaced; `refused` is the last refusal and the count at which it was worked out.
    """

    def __init__(
        self,
        model: str,
        lives: Sequence[Live],
        strategy: Strategy,
        *,
        excluded: Sequence[Filter | None],
        settings: TableSettings,
        now: float,
    ) -> None:
        self.model = model
        self.strategy = strategy
        self.scale = Scale(strategy)
        self.first_bonus = self.scale.session_units(scorers.FIRST_TARGET)
        self.second_bonus = self.scale.session_units(scorers.SECOND_TARGET)
        self.is_max_score = strategy.picker is Picker.MAX_SCORE
        self.lives = tuple(lives)
        count = len(self.lives)
        self.infos = tuple(live.info for live in lives)
        self.ids = tuple(info.id for info in self.infos)
        self.clusters = tuple(map(cluster_name, self.ids))
        self.authorities = tuple(info.url.authority for info in self.infos)
        self.position_of = {name: position for position, name in enumerate(self.ids)}
        self.excluded = tuple(excluded)
        largest = max((info.relative_weight for info in self.infos), default=1.0)
        # On the grid, so that their sum is exact; a weight too small for it still counts.
        least = 1.0 / SCORE_SCALE
        self.rels = tuple(
            max(least, on_grid(info.relative_weight / largest)) for info in self.infos
        )
        self.names = tuple(info.upstream_name(model) for info in self.infos)
        classes: dict[tuple[Kind, str], int] = {}
        self.class_of = tuple(
            classes.setdefault((info.kind, name), len(classes))
            for info, name in zip(self.infos, self.names, strict=True)
        )
        self.has_classes = len(classes) > 1
        priorities = sorted({info.priority for info in self.infos}, reverse=True)
        by_priority = {priority: Pool(priority, count) for priority in priorities}
        self.pools = tuple(by_priority.values())
        self.pool_of = tuple(by_priority[info.priority] for info in self.infos)
        self.tickets = [live.ticket for live in lives]
        self.probing: set[int] = set()
        self.dirty: set[int] = set()
        self.changes = 0
        self.refused: tuple[int, Refusal] | None = None
        self.groups: list[Group | None] = [None] * count
        self.keys = list(range(count))
        self._settings = settings
        self.classes = np.array(self.class_of, np.intp)
        self._constants = tuple(map(self.scale.constant, self.rels))
        # What a candidate's group and key were made of.
        self._queues = [0.0] * count
        self._kvs = [0.0] * count
        self._loads = [0.0] * count
        # What of that only a scrape changes: see `_learn`.
        self._stats: list[Stats | None] = [None] * count
        self._scraped_at: list[float | None] = [None] * count
        self._started: list[float | None] = [None] * count
        self._epochs = [0] * count
        self._backlogs: list[int | None] = [None] * count
        self._counts_own = [False] * count
        self._rates: list[float | None] = [None] * count
        self._alarms = Alarms(count)
        self._journal: deque[Row] = deque(maxlen=_JOURNAL_BASE + _JOURNAL_PER_ENDPOINT * count)
        self.rows = [self._row(position, now) for position in range(count)]
        self._rebuild()
        for position, live in enumerate(self.lives):
            live.watchers.append((self.dirty, position))

    def describes(self, lives: Sequence[Live]) -> bool:
        """Whether these are the table's endpoints, and described as they were."""
        return len(lives) == len(self.lives) and all(
            live is mine and live.info is info
            for live, mine, info in zip(lives, self.lives, self.infos, strict=True)
        )

    def close(self) -> None:
        """The registry marks nothing here any more; what was decided can still be explained."""
        for live in self.lives:
            live.watchers[:] = [pair for pair in live.watchers if pair[0] is not self.dirty]

    def forget(self) -> None:
        """What was decided cannot be explained any more, and the table keeps next to nothing."""
        self.changes += 1
        self._journal.clear()
        self.rows.clear()
        self.lives = ()

    def refresh(self, now: float) -> None:
        """Every row is as the registry has it at `now`."""
        if now >= self._alarms.first:
            for position in self._alarms.due(now):
                # More than its load may have changed.
                self._stats[position] = None
                self.dirty.add(position)
        dirty = self.dirty
        if not dirty:
            return
        if len(dirty) > _FEW_CHANGES and len(dirty) * 2 > len(self.rows):
            for position in dirty:
                self._replace(self._row(position, now))
            self._rebuild()
        else:
            for position in dirty:
                self._renew(position, now)
        dirty.clear()

    def candidates(self, refused: AbstractSet[int]) -> Pool | None:
        """The highest pool with a candidate that is not refused; None where no pool has any."""
        for pool in self.pools:
            if pool.usable and not (refused and refused >= set(pool.usable)):
                return pool
        return None

    def due_probe(self, pool: Pool | None, refused: AbstractSet[int]) -> int | None:
        """The endpoint whose probe the next request is; None where none is due.

        One of a pool below the candidates' is not asked to serve, and so not probed. The highest
        priority comes first, then the first id.
        """
        lowest = -inf if pool is None else pool.priority
        due = [
            (-self.infos[position].priority, position)
            for position in self.probing
            if position not in refused and self.infos[position].priority >= lowest
        ]
        return min(due)[1] if due else None

    def slow_totals(self, pool: Pool, offsets: dict[int, int], now: float) -> NDArray[np.int64]:
        """By position the scores of the pool's slow candidates, negative for the rest."""
        mean = pool.inflight / len(pool.usable)
        return pool.slow.totals(self.scale, mean, now, self._settings.slow_start_seconds, offsets)

    def slow_inflight(self, row: Row, pool: Pool, now: float) -> float:
        """The weighted in-flight score of a candidate that starts slowly, on the grid."""
        mean = pool.inflight / len(pool.usable)
        ramp = self._settings.slow_start_seconds
        return self.scale.slow_inflight(row, self.rels[row.position], mean, now, ramp)

    def rows_at(self, change: int) -> list[Row] | None:
        """The rows as they were when `changes` was `change`; None where that is forgotten."""
        back = self.changes - change
        if back > len(self._journal):
            return None
        rows = list(self.rows)
        newest_first = reversed(self._journal)
        for _ in range(back):
            row = next(newest_first)
            rows[row.position] = row
        return rows

    def pooled(self, rows: Sequence[Row]) -> Pool:
        """The pool that these rows make of the candidates of the highest priority; maybe empty."""
        candidates = [row for row in rows if row.is_candidate]
        priority = max((self.infos[row.position].priority for row in candidates), default=0)
        pool = Pool(priority, len(rows))
        for row in candidates:
            position = row.position
            if self.infos[position].priority == priority:
                rel = self.rels[position]
                pool.append(row, self.scale.scores(row, rel), rel, self.class_of[position])
        return pool

    def _row(self, position: int, now: float) -> Row:
        """The endpoint as it is, with an alarm set for when time alone will change it."""
        live = self.lives[position]
        ticket = self.tickets[position]
        if ticket.epoch != live.breaker.epoch:
            self.tickets[position] = Ticket(ticket.id, ticket.generation, live.breaker.epoch)
        settings = self._settings
        stale_after = settings.stale_after_seconds
        moment = next_change(live, now, stale_after, settings.slow_start_seconds)
        self._alarms.set(position, moment)
        dropped, is_probe = state(live, now, stale_after)
        if dropped is None:
            dropped = self.excluded[position]
        slow_from = live.slow_start_from
        if slow_from is not None and now >= slow_from + settings.slow_start_seconds:
            slow_from = None
        return Row(
            position,
            dropped,
            is_probe and dropped is None,
            not is_probe and dropped is None,
            live.is_stale(now, stale_after),
            slow_from,
            live.inflight,
            live.inflight_tokens,
            live.dispatched - live.ended,
            live.stats,
            live.running_capacity,
            live.drain_rate,
            live.scraped_at,
        )

    def _replace(self, row: Row) -> None:
        self._journal.append(self.rows[row.position])
        self.changes += 1
        self.rows[row.position] = row

    def _renew(self, position: int, now: float) -> None:  # noqa: C901, PLR0915 - written out
        """The row is up to date, and so are the lists and sums that it is in.

        Almost always only the load of a candidate has changed. That case is written out, formulas
        and all, because a decision has two or three of them: `_renew_fully` says what must come
        out, to the bit.
        """
        live = self.lives[position]
        group = self.groups[position]
        if (
            group is None
            or live.stats is not self._stats[position]
            or live.breaker.open_until is not None
            or live.breaker.epoch != self._epochs[position]
            or live.demotion is not None
            or live.quarantined_until > now
            or live.backpressure_until > now
            or live.scraped_at is not self._scraped_at[position]
            or live.slow_start_from is not self._started[position]
        ):
            self._renew_fully(position, now)
            return
        strategy = self.strategy
        weights = self.scale.weights
        rel = self.rels[position]
        inflight = live.inflight
        tokens = live.inflight_tokens
        own = live.dispatched - live.ended
        n = inflight + tokens / TOKENS_PER_REQUEST
        queue = 0.0
        waiting = self._backlogs[position]
        if waiting is not None:
            if self._counts_own[position]:
                waiting += own
            queue = weights.queue
            if waiting > 0:
                score = 1.0 / (1.0 + waiting / rel / strategy.queue_knee)
                queue = (queue * score + SHIFT) - SHIFT
        load = weights.load
        is_lacking = False
        if load and n > 0:
            rate = self._rates[position]
            if rate:
                score = 1.0 / (1.0 + n / rate / strategy.load_knee_seconds)
                load = (load * score + SHIFT) - SHIFT
            else:
                is_lacking = True
        score = 1.0 / (1.0 + n / rel / strategy.inflight_knee)
        own_load = (weights.inflight * score + SHIFT) - SHIFT
        if is_lacking:
            load = 0.0
        total = queue + self._kvs[position] + load + own_load + self._constants[position]
        key = int(total * SCORE_SCALE) << POSITION_BITS | position
        old_key = self.keys[position]
        pool = self.pool_of[position]
        if is_lacking is not (group.signature & LOAD > 0):
            self.keys[position] = key
            signature = group.signature ^ LOAD
            self.groups[position] = pool.regroup(group, old_key, key, signature)
        elif key != old_key:
            self.keys[position] = key
            keys = group.keys
            del keys[bisect_left(keys, old_key)]
            insort(keys, key)
        rows = self.rows
        old = rows[position]
        pool.inflight += inflight - old.inflight
        if queue != self._queues[position]:
            pool.queue += queue - self._queues[position]
            self._queues[position] = queue
        if load != self._loads[position]:
            pool.load += load - self._loads[position]
            self._loads[position] = load
        self._journal.append(old)
        self.changes += 1
        rows[position] = Row(
            position,
            None,
            False,
            True,
            old.is_stale,
            None,
            inflight,
            tokens,
            own,
            old.stats,
            old.running_capacity,
            old.drain_rate,
            old.scraped_at,
        )

    def _renew_fully(self, position: int, now: float) -> None:
        old = self.rows[position]
        row = self._row(position, now)
        self._replace(row)
        pool = self.pool_of[position]
        rel = self.rels[position]
        group = self.groups[position]
        if old.is_candidate:
            pool.count(
                -old.inflight,
                -self._queues[position],
                -self._kvs[position],
                -self._loads[position],
            )
        if row.is_candidate:
            scores = self.scale.scores(row, rel)
            key = key_of(scores.total, position)
            if (
                old.is_candidate
                and group is not None
                and row.slow_from is None
                and scores.signature == group.signature
            ):
                pool.count(row.inflight, scores.queue, scores.kv, scores.load)
                group.move(self.keys[position], key)
            else:
                if old.is_candidate:
                    pool.remove(position, self.keys[position], rel, group)
                self.groups[position] = pool.add(row, scores, rel, self.class_of[position])
            self._learn(row, scores, key)
        elif old.is_candidate:
            pool.remove(position, self.keys[position], rel, group)
            self.groups[position] = None
        if row.is_probe:
            self.probing.add(position)
        else:
            self.probing.discard(position)

    def _learn(self, row: Row, scores: Scores, key: int) -> None:
        """The next renewal of the candidate can tell whether more than its load has changed."""
        position = row.position
        live = self.lives[position]
        self.keys[position] = key
        self._queues[position] = scores.queue
        self._kvs[position] = scores.kv
        self._loads[position] = scores.load
        self._stats[position] = stats = row.stats
        self._scraped_at[position] = row.scraped_at
        self._started[position] = live.slow_start_from
        self._epochs[position] = live.breaker.epoch
        self._rates[position] = None if row.is_stale else row.drain_rate
        backlog = None
        if self.scale.weights.queue and not row.is_stale:
            backlog = scorers.backlog(stats.waiting, stats.running, row.running_capacity, 0)
        self._backlogs[position] = backlog
        self._counts_own[position] = stats.running is not None and row.running_capacity > 0

    def _rebuild(self) -> None:
        """Lists and sums are made anew from the rows."""
        for pool in self.pools:
            pool.clear()
        self.probing.clear()
        for position, row in enumerate(self.rows):
            self.groups[position] = None
            if row.is_probe:
                self.probing.add(position)
            elif row.is_candidate:
                rel = self.rels[position]
                scores = self.scale.scores(row, rel)
                pool = self.pool_of[position]
                self.groups[position] = pool.append(row, scores, rel, self.class_of[position])
                self._learn(row, scores, key_of(scores.total, position))
        for pool in self.pools:
            pool.sort()
