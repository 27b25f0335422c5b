-- The same rows as on Postgres. All times are microseconds since the Unix epoch, by the service's
-- own clock. Texts are compared byte by byte (SQLite's BINARY, the default).

-- One row for each key that was claimed and is not forgotten yet: its newest generation.
CREATE TABLE leases (
    -- Kind (1 lease, 2 leader), namespace, scope (always empty here) and key, with U+001F between
    -- them.
    id             TEXT NOT NULL,
    -- The guard of every write, and never below the clock.
    revision       INTEGER NOT NULL,
    -- The fencing token of the generation: the revision that its grant took.
    version        INTEGER NOT NULL,
    -- 0 held (until expires_at), 1 released, 2 expired, 3 revoked, 4 undone.
    status         INTEGER NOT NULL,
    owner_id       TEXT NOT NULL,
    -- The caller's name for its attempt; kept after the end, to refuse late duplicates.
    attempt_id     TEXT,
    -- The service's own name for the grant, by which it knows it again after a lost reply.
    grant_id       INTEGER NOT NULL,
    ttl_ms         INTEGER NOT NULL,
    acquired_at    INTEGER NOT NULL,
    expires_at     INTEGER NOT NULL,
    -- The version before this one, where that generation was lost and not given back.
    recovered_from INTEGER,
    -- A JSON object of strings, as text.
    metadata       TEXT,
    -- The only index, and the table itself: every access is by key, clean-up included.
    PRIMARY KEY (id)
) STRICT, WITHOUT ROWID;

-- One row for each execution and each stored response that was claimed or put and is not forgotten:
-- the newest generation of its claim, and what it led to.
CREATE TABLE records (
    -- As in leases. Kind: 3 execution, 4 stored response. Scope: whose it is within the namespace;
    -- empty for executions.
    id             TEXT NOT NULL,
    -- As in leases.
    revision       INTEGER NOT NULL,
    version        INTEGER NOT NULL,
    -- 0 in progress (held until expires_at), 1 released, 2 expired, 3 revoked, 4 undone,
    -- 5 completed, 6 put.
    status         INTEGER NOT NULL,
    owner_id       TEXT NOT NULL,
    attempt_id     TEXT,
    grant_id       INTEGER NOT NULL,
    ttl_ms         INTEGER NOT NULL,
    acquired_at    INTEGER NOT NULL,
    expires_at     INTEGER NOT NULL,
    recovered_from INTEGER,
    metadata       TEXT,
    -- The intent of an execution, or the fingerprint of a request.
    binding        TEXT,
    -- For tracing; decides nothing.
    correlation_id TEXT,
    -- When it was completed or put, and until when it is remembered (NULL: for ever).
    completed_at   INTEGER,
    retained_until INTEGER,
    -- What is remembered: the result, or the response without its body, as JSON text.
    content        TEXT,
    -- The response's body, whatever bytes it has.
    body           BLOB,
    -- With a rowid, unlike leases: the rows can be large, and would make a tree of them slow.
    PRIMARY KEY (id)
) STRICT;

-- One row of what the service must remember about itself.
CREATE TABLE state (
    only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
    -- The largest stamp that clean-up has deleted. New keys start above it.
    floor    INTEGER NOT NULL,
    -- The service's time at its last commit. Its clock never starts below it.
    clock    INTEGER NOT NULL
) STRICT;
INSERT INTO state (only_row, floor, clock) VALUES (1, 0, 0);
