-- Rows stand in the order in which their keys came, and are found by a table of keys: so what is
-- written together lies together, and a batch of new keys goes to a few pages, not to one for each.

-- Where the row of a key is. New keys may be missing: those of the rows after the number in `state`.
CREATE TABLE lease_keys (
    id     TEXT NOT NULL,
    number INTEGER NOT NULL,
    PRIMARY KEY (id)
) STRICT, WITHOUT ROWID;

CREATE TABLE record_keys (
    id     TEXT NOT NULL,
    number INTEGER NOT NULL,
    PRIMARY KEY (id)
) STRICT, WITHOUT ROWID;

-- As before, but for the number.
CREATE TABLE new_leases (
    -- Rises from row to row, and is never used again.
    number         INTEGER PRIMARY KEY,
    -- Kind (1 lease, 2 leader), namespace, scope (always empty here) and key, with U+001F between
    -- them.
    id             TEXT NOT NULL,
    revision       INTEGER NOT NULL,
    version        INTEGER NOT NULL,
    status         INTEGER NOT NULL,
    owner_id       TEXT NOT NULL,
    attempt_id     TEXT,
    grant_id       INTEGER NOT NULL,
    ttl_ms         INTEGER NOT NULL,
    acquired_at    INTEGER NOT NULL,
    expires_at     INTEGER NOT NULL,
    recovered_from INTEGER,
    metadata       TEXT
) STRICT;
INSERT INTO new_leases (id, revision, version, status, owner_id, attempt_id, grant_id, ttl_ms,
                        acquired_at, expires_at, recovered_from, metadata)
    SELECT id, revision, version, status, owner_id, attempt_id, grant_id, ttl_ms,
           acquired_at, expires_at, recovered_from, metadata
    FROM leases;
DROP TABLE leases;
ALTER TABLE new_leases RENAME TO leases;
INSERT INTO lease_keys SELECT id, number FROM leases ORDER BY id;

CREATE TABLE new_records (
    number         INTEGER PRIMARY KEY,
    -- As in leases. Kind: 3 execution, 4 stored response.
    id             TEXT NOT NULL,
    revision       INTEGER NOT NULL,
    version        INTEGER NOT NULL,
    status         INTEGER NOT NULL,
    owner_id       TEXT NOT NULL,
    attempt_id     TEXT,
    grant_id       INTEGER NOT NULL,
    ttl_ms         INTEGER NOT NULL,
    acquired_at    INTEGER NOT NULL,
    expires_at     INTEGER NOT NULL,
    recovered_from INTEGER,
    metadata       TEXT,
    binding        TEXT,
    correlation_id TEXT,
    completed_at   INTEGER,
    retained_until INTEGER,
    content        TEXT,
    body           BLOB
) STRICT;
INSERT INTO new_records (id, revision, version, status, owner_id, attempt_id, grant_id, ttl_ms,
                         acquired_at, expires_at, recovered_from, metadata, binding,
                         correlation_id, completed_at, retained_until, content, body)
    SELECT id, revision, version, status, owner_id, attempt_id, grant_id, ttl_ms,
           acquired_at, expires_at, recovered_from, metadata, binding,
           correlation_id, completed_at, retained_until, content, body
    FROM records;
DROP TABLE records;
ALTER TABLE new_records RENAME TO records;
INSERT INTO record_keys SELECT id, number FROM records ORDER BY id;

-- All rows up to these numbers are in the tables of keys.
ALTER TABLE state ADD COLUMN leases_indexed INTEGER NOT NULL DEFAULT 0;
ALTER TABLE state ADD COLUMN records_indexed INTEGER NOT NULL DEFAULT 0;
UPDATE state SET leases_indexed = (SELECT coalesce(max(number), 0) FROM leases),
                 records_indexed = (SELECT coalesce(max(number), 0) FROM records);
