-- Everything of Fencepost lives in its own schema, which the service creates before this runs.
--
-- All times are microseconds since the Unix epoch, by this database's clock. All texts are
-- compared byte by byte (COLLATE "C"), as the API promises for keys.

-- One row for each key that was claimed and is not forgotten yet: its newest generation.
CREATE TABLE fencepost.leases (
    -- The guard of every write, and never below the clock: greatest(revision + 1, floor + 1, now).
    revision       bigint NOT NULL,
    -- The fencing token of the generation: the revision that its grant took.
    version        bigint NOT NULL,
    -- The service's own name for the grant, by which it knows it again after a lost reply.
    grant_id       bigint NOT NULL,
    ttl_ms         bigint NOT NULL,
    acquired_at    bigint NOT NULL,
    expires_at     bigint NOT NULL,
    -- The version before this one, where that generation was lost and not given back.
    recovered_from bigint,
    -- The caller's name for its attempt; kept after the end, to refuse late duplicates.
    attempt_id     uuid,
    -- 0 held (until expires_at), 1 released, 2 expired, 3 revoked, 4 undone.
    status         smallint NOT NULL,
    -- Kind (1 lease, 2 leader), namespace, scope (always empty here) and key, with U+001F between
    -- them: split_part(id, E'\x1f', 4) is the key. One column, since an index on four took a third
    -- of the time of an insert.
    id             text COLLATE "C" NOT NULL,
    owner_id       text COLLATE "C" NOT NULL,
    -- A JSON object of strings, as text: jsonb would reorder it.
    metadata       text,
    -- The only index. One on expires_at would make each renewal an index update (none would be
    -- heap-only any more), and clean-up walks this one.
    PRIMARY KEY (id)
) WITH (
    -- Room on each page for the next versions of its rows, so that updates stay heap-only.
    fillfactor = 60,
    -- A small hot table must be vacuumed by what changes, not by how large it is.
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_analyze_scale_factor = 0.1
);

-- One row for each execution and each stored response that was claimed or put and is not forgotten:
-- the newest generation of its claim, and what it led to.
CREATE TABLE fencepost.records (
    -- As in leases.
    revision       bigint NOT NULL,
    version        bigint NOT NULL,
    grant_id       bigint NOT NULL,
    ttl_ms         bigint NOT NULL,
    acquired_at    bigint NOT NULL,
    expires_at     bigint NOT NULL,
    recovered_from bigint,
    -- When it was completed or put, and until when it is remembered (NULL: for ever).
    completed_at   bigint,
    retained_until bigint,
    attempt_id     uuid,
    -- 0 in progress (held until expires_at), 1 released, 2 expired, 3 revoked, 4 undone,
    -- 5 completed, 6 put.
    status         smallint NOT NULL,
    -- As in leases. Kind: 3 execution, 4 stored response. Scope: whose it is within the namespace;
    -- empty for executions.
    id             text COLLATE "C" NOT NULL,
    owner_id       text COLLATE "C" NOT NULL,
    metadata       text,
    -- The intent of an execution, or the fingerprint of a request.
    binding        text COLLATE "C",
    -- For tracing; decides nothing.
    correlation_id text,
    -- What is remembered: the result, or the response without its body. JSON as text, since jsonb
    -- reorders members, drops duplicates and respells numbers.
    content        text,
    -- The response's body, whatever bytes it has.
    body           bytea,
    -- The only index, as in leases. Clean-up walks it too.
    PRIMARY KEY (id)
) WITH (
    -- A record is mostly written twice, claimed and completed, and then only read.
    fillfactor = 80,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_analyze_scale_factor = 0.1
);

-- The largest stamp that clean-up has deleted: one row. New keys start above it, so that a key
-- that was forgotten and comes back goes on with higher versions.
CREATE TABLE fencepost.floor (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    floor    bigint NOT NULL
);
INSERT INTO fencepost.floor (floor) VALUES (0);

-- The servers and timelines that this data has been served from. On a new one, after a failover or
-- a restore, the floor is raised above what the lost commits may have given out.
CREATE TABLE fencepost.timelines (
    system_identifier bigint NOT NULL,
    timeline          integer NOT NULL,
    first_seen        timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (system_identifier, timeline)
);
