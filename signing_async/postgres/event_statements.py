"""The statements of an inbox in PostgreSQL."""

from __future__ import annotations

__all__ = [
    "ADD",
    "BACKLOG",
    "CLAIM",
    "FREE",
    "IS_ENDED",
    "PAGE",
    "POSTPONE",
    "PURGE",
    "RELEASE",
    "RENEW",
    "REQUEUE",
    "SELECT",
    "SETTLE",
    "STATS",
    "TABLE",
]

PAGE = 100
"""The most events in one statement: each may have a body of 1 MiB."""
_ALONE = "2"
"""After how many crashes an event is claimed alone."""

# The planner takes `status = 'pending'` for rare, and would sort all the pending events of a table that was never
# analyzed: `pending` makes it read an index in order.
# The unique index lets one event of a signing be claimed at a time, whatever concurrent claimers see.
TABLE = """\
CREATE TABLE IF NOT EXISTS {table} (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id text NOT NULL UNIQUE,
    type text NOT NULL,
    signing_id text,
    body bytea,
    received_at timestamptz NOT NULL,
    status text NOT NULL DEFAULT 'pending',
    attempts integer NOT NULL DEFAULT 0,
    due_at timestamptz NOT NULL DEFAULT now(),
    error text,
    settled_at timestamptz,
    owner text,
    fence bigint NOT NULL DEFAULT 0,
    leased_until timestamptz,
    crashes integer NOT NULL DEFAULT 0,
    trace_context text,
    pending boolean NOT NULL GENERATED ALWAYS AS (status = 'pending') STORED
);
CREATE UNIQUE INDEX IF NOT EXISTS {name}_claimed ON {table} (signing_id) WHERE owner IS NOT NULL;
CREATE INDEX IF NOT EXISTS {name}_leased ON {table} (owner, leased_until) WHERE owner IS NOT NULL;
CREATE INDEX IF NOT EXISTS {name}_due ON {table} (due_at, seq) WHERE pending;
CREATE INDEX IF NOT EXISTS {name}_pending ON {table} (signing_id, seq) WHERE pending;
CREATE INDEX IF NOT EXISTS {name}_status ON {table} (status, seq);
CREATE INDEX IF NOT EXISTS {name}_settled ON {table} (settled_at)
    WHERE body IS NOT NULL AND status IN ('handled', 'dropped')"""
_COLUMNS = """\
event.seq, event.id, event.type, event.signing_id, event.body, event.received_at, event.status, event.attempts,
    event.error, event.settled_at, CASE WHEN event.owner IS NOT NULL THEN event.fence END AS fence,
    CASE WHEN event.status = 'pending' AND event.owner IS NULL AND event.attempts > 0 THEN event.due_at END AS due_at,
    event.trace_context"""
# PostgreSQL sends equal notifications of a transaction once.
ADD = """\
WITH added AS (
    INSERT INTO {table} (id, type, signing_id, body, received_at, trace_context)
    SELECT id, type, signing_id, body, received_at, trace_context
    FROM unnest($2::text[], $3::text[], $4::text[], $5::bytea[], $6::timestamptz[], $7::text[])
        WITH ORDINALITY AS event (id, type, signing_id, body, received_at, trace_context, number)
    ORDER BY number
    ON CONFLICT (id) DO NOTHING
    RETURNING id
)
SELECT id, pg_notify($1, '') FROM added"""
# One of the events under way may have killed its process. After two crashes an event is claimed alone, when its owner
# handles nothing else and after all events that were due before; an attempt counts when its process dies only if it ran
# alone. The leases of an owner may end at different times: all its claims are freed when the first expires, and taken
# over when their own leases do. A freed claim keeps its fence: an owner that was only paused may still end it.
# The planner takes a range of times for rare, and reads an index.
FREE = """\
UPDATE {table} AS event
SET owner = '', crashes = crashes + 1, attempts = attempts - (crashes < {alone} AND crashed.events > 1)::int,
    due_at = statement_timestamp()
FROM (
    SELECT seq, count(*) OVER (PARTITION BY owner) AS events FROM (
        SELECT seq, owner FROM {table}
        WHERE owner = ANY(ARRAY(
            SELECT owner FROM {table}
            WHERE owner IS NOT NULL AND owner NOT IN ('', $1)
                AND leased_until BETWEEN '-infinity' AND statement_timestamp()
        ))
        FOR UPDATE SKIP LOCKED
    ) AS claimed
) AS crashed
WHERE event.seq = crashed.seq""".replace("{alone}", _ALONE)
# An expired claim is taken over before other events of its signing are claimed. If the response to a claim was lost,
# the next claim returns its events, which have this owner but are not held, and counts no second attempt.
# Every other minute the owner claims nothing after an event that must run alone, until it handles nothing else. In the
# minutes between, it passes that event over: a handler that hangs does not stop all others.
CLAIM = (
    """\
WITH due AS (
    SELECT seq, due_at, crashes >= {alone} AS alone FROM {table} AS event
    WHERE pending AND due_at <= statement_timestamp() AND id <> ALL($4::text[])
        AND (
            crashes < {alone} OR cardinality($4::text[]) = 0
            OR extract(epoch FROM statement_timestamp() - due_at)::bigint / 60 % 2 = 0
        )
        AND (
            owner IS NULL OR owner = '' AND leased_until <= statement_timestamp()
            OR owner = $2 AND (id <> ALL($5::text[]) OR leased_until <= statement_timestamp())
        )
        AND (owner IS NOT NULL OR NOT EXISTS (
            SELECT FROM {table} AS other
            WHERE other.signing_id = event.signing_id AND other.pending
                AND (other.seq < event.seq OR other.seq > event.seq AND other.owner IS NOT NULL)
        ))
    ORDER BY due_at, seq LIMIT $1 FOR UPDATE SKIP LOCKED
), queue AS (
    SELECT seq, alone, row_number() OVER in_order AS place, bool_or(alone) OVER in_order AS waits
    FROM due WINDOW in_order AS (ORDER BY due_at, seq)
)
UPDATE {table} AS event
SET owner = $2, fence = event.fence + 1, leased_until = statement_timestamp() + $3,
    attempts = event.attempts + (event.owner IS DISTINCT FROM $2)::int
FROM queue
WHERE event.seq = queue.seq AND (NOT waits OR alone AND place = 1 AND cardinality($4::text[]) = 0)
    AND NOT EXISTS (SELECT FROM {table} AS held WHERE held.id = ANY($4::text[]) AND held.crashes >= {alone})
RETURNING {columns}, event.due_at AS due""".replace("{columns}", _COLUMNS)
    .replace("{alone}", _ALONE)
    .replace("{turn}", "60")
)
RENEW = """\
UPDATE {table} AS event SET leased_until = statement_timestamp() + $3
FROM unnest($1::text[], $2::bigint[]) AS held (key, fence)
WHERE event.id = held.key AND event.fence = held.fence AND event.owner IS NOT NULL
RETURNING held.key"""
# `POSTPONE` also postpones the later events of the signing, so that claims do not read them in vain; `SETTLE` makes
# them due.
SETTLE = """\
WITH settled AS (
    UPDATE {table} SET status = $3, error = $4, settled_at = statement_timestamp(), owner = NULL,
        leased_until = NULL, crashes = 0
    WHERE id = $1 AND fence = $2 AND owner IS NOT NULL
    RETURNING signing_id
), due AS (
    UPDATE {table} AS event SET due_at = statement_timestamp()
    FROM settled
    WHERE event.signing_id = settled.signing_id AND event.pending AND event.attempts = 0
        AND event.due_at > statement_timestamp()
)
SELECT true FROM settled"""
POSTPONE = """\
WITH postponed AS (
    UPDATE {table} SET due_at = statement_timestamp() + $3, error = $4, attempts = greatest(attempts - $5::int, 0),
        owner = NULL, leased_until = NULL, crashes = 0
    WHERE id = $1 AND fence = $2 AND owner IS NOT NULL
    RETURNING seq, signing_id, due_at
), waiting AS (
    UPDATE {table} AS event SET due_at = postponed.due_at
    FROM postponed
    WHERE event.signing_id = postponed.signing_id AND event.pending AND event.seq > postponed.seq
        AND event.attempts = 0 AND event.due_at < postponed.due_at
)
SELECT true FROM postponed"""
IS_ENDED = "SELECT true FROM {table} WHERE id = $1 AND fence = $2 AND owner IS NULL"
RELEASE = """\
WITH released AS (
    UPDATE {table} AS event SET attempts = greatest(attempts - 1, 0), owner = NULL, leased_until = NULL
    FROM unnest($1::text[], $2::bigint[]) AS held (id, fence)
    WHERE event.id = held.id AND event.fence = held.fence AND event.owner IS NOT NULL
    RETURNING true
)
SELECT pg_notify($3, '') FROM released"""
_SELECTED = """\
seq > $1 AND ($2::text[] IS NULL OR id = ANY($2)) AND ($3::text IS NULL OR status = $3)
    AND ($4::text IS NULL OR type LIKE $4) AND ($5::timestamptz IS NULL OR received_at >= $5)
    AND ($6::timestamptz IS NULL OR received_at < $6)"""
SELECT = (
    """\
SELECT {columns} FROM {table} AS event WHERE {selected} ORDER BY seq LIMIT {page}\
""".replace("{columns}", _COLUMNS)
    .replace("{selected}", _SELECTED)
    .replace("{page}", f"{PAGE}")
)
# A thousand events at a time: the statement has to end within the timeout.
REQUEUE = """\
WITH chosen AS (
    SELECT seq FROM {table} WHERE {selected} AND owner IS NULL AND body IS NOT NULL
    ORDER BY seq LIMIT 1000 FOR UPDATE
), requeued AS (
    UPDATE {table} AS event
    SET status = 'pending', attempts = 0, crashes = 0, due_at = statement_timestamp(), error = NULL, settled_at = NULL
    FROM chosen WHERE event.seq = chosen.seq
    RETURNING event.seq
)
SELECT seq, pg_notify($7, '') FROM requeued""".replace("{selected}", _SELECTED)
PURGE = """\
UPDATE {table} SET body = NULL WHERE seq IN (
    SELECT seq FROM {table} WHERE settled_at < $1 AND body IS NOT NULL AND status IN ('handled', 'dropped')
    LIMIT 1000 FOR UPDATE SKIP LOCKED
) RETURNING seq"""
STATS = """\
SELECT status, count(*) AS number, min(received_at) FILTER (WHERE status = 'pending') AS oldest
FROM {table} GROUP BY status"""
BACKLOG = """\
SELECT count(*) FILTER (WHERE status = 'pending') AS pending, count(*) FILTER (WHERE status = 'dead') AS dead,
    min(received_at) FILTER (WHERE status = 'pending') AS oldest
FROM {table} WHERE status IN ('pending', 'dead')"""
