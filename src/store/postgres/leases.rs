//! The statements on leases. Each is one transaction of its own, and none waits for a row lock.

use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{Connection, Row as _};
use uuid::Uuid;

use super::link::micros;
use crate::domain::ids::{Key, Name};
use crate::domain::lease::Lease;
use crate::domain::time::Timestamp;
use crate::domain::version::Version;
use crate::store::columns::{LeaseColumns, kind_number, status_number};
use crate::store::{Cleaned, Cursor, ListQuery, Row, Write};

/// `now()` is the start of this statement's own transaction, so it is not later than the snapshot
/// that the rows come from. (`clock_timestamp()` would be, and would declare live leases dead.)
const LOAD: &str = "
    /* load_leases */
    SELECT wanted.ord, now(), f.floor,
           CASE WHEN pg_is_in_recovery() THEN NULL
                ELSE substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) END,
           l.revision, l.version, l.status, l.owner_id, l.attempt_id, l.grant_id, l.ttl_ms,
           l.acquired_at, l.expires_at, l.recovered_from, l.metadata
    FROM fencepost.floor AS f
    CROSS JOIN unnest($1::smallint[], $2::text[], $3::text[])
         WITH ORDINALITY AS wanted (kind, namespace, key, ord)
    LEFT JOIN fencepost.leases AS l
      ON l.kind = wanted.kind AND l.namespace = wanted.namespace AND l.key = wanted.key";

/// Rows are locked in the order of their keys, and those that somebody else has locked are left
/// out: so this neither waits nor deadlocks. The lock re-checks the revision against the newest
/// version of the row. `synchronous_commit` is set here too, since a session setting does not
/// survive a transaction-mode pooler.
const UPDATE: &str = "
    /* store_leases */
    WITH w AS MATERIALIZED (
        SELECT n.*
        FROM unnest($1::smallint[], $2::text[], $3::text[], $4::bigint[], $5::bigint[],
                    $6::bigint[], $7::smallint[], $8::text[], $9::uuid[], $10::bigint[],
                    $11::bigint[], $12::bigint[], $13::bigint[], $14::bigint[], $15::text[])
             WITH ORDINALITY AS n (kind, namespace, key, expected, revision, version, status,
                                   owner_id, attempt_id, grant_id, ttl_ms, acquired_at,
                                   expires_at, recovered_from, metadata, ord)
        JOIN fencepost.leases AS l
          ON l.kind = n.kind AND l.namespace = n.namespace AND l.key = n.key
         AND l.revision = n.expected
        WHERE (SELECT set_config('synchronous_commit', 'on', true)) IS NOT NULL
        ORDER BY l.kind, l.namespace, l.key
        FOR NO KEY UPDATE OF l SKIP LOCKED
    )
    UPDATE fencepost.leases AS l
    SET revision = w.revision, version = w.version, status = w.status, owner_id = w.owner_id,
        attempt_id = w.attempt_id, grant_id = w.grant_id, ttl_ms = w.ttl_ms,
        acquired_at = w.acquired_at, expires_at = w.expires_at,
        recovered_from = w.recovered_from, metadata = w.metadata
    FROM w
    WHERE l.kind = w.kind AND l.namespace = w.namespace AND l.key = w.key
    RETURNING w.ord";

/// New keys start above the floor, which clean-up cannot raise while this holds its row. If
/// clean-up has it, nothing is inserted, and the engine tries again.
const INSERT: &str = "
    /* store_new_leases */
    WITH f AS MATERIALIZED (
        SELECT floor FROM fencepost.floor
        WHERE (SELECT set_config('synchronous_commit', 'on', true)) IS NOT NULL
        FOR SHARE SKIP LOCKED
    )
    INSERT INTO fencepost.leases (kind, namespace, key, revision, version, status, owner_id,
                                  attempt_id, grant_id, ttl_ms, acquired_at, expires_at,
                                  recovered_from, metadata)
    SELECT n.kind, n.namespace, n.key, n.revision, n.version, n.status, n.owner_id, n.attempt_id,
           n.grant_id, n.ttl_ms, n.acquired_at, n.expires_at, n.recovered_from, n.metadata
    FROM f
    CROSS JOIN unnest($1::smallint[], $2::text[], $3::text[], $4::bigint[], $5::bigint[],
                      $6::bigint[], $7::smallint[], $8::text[], $9::uuid[], $10::bigint[],
                      $11::bigint[], $12::bigint[], $13::bigint[], $14::bigint[], $15::text[])
         AS n (kind, namespace, key, expected, revision, version, status, owner_id, attempt_id,
               grant_id, ttl_ms, acquired_at, expires_at, recovered_from, metadata)
    WHERE n.revision > f.floor
    ORDER BY n.kind, n.namespace COLLATE \"C\", n.key COLLATE \"C\"
    ON CONFLICT DO NOTHING
    RETURNING kind, namespace, key";

const LIST: &str = "
    /* list_leases */
    SELECT key, now(), revision, version, status, owner_id, attempt_id, grant_id, ttl_ms,
           acquired_at, expires_at, recovered_from, metadata
    FROM fencepost.leases
    WHERE kind = $1 AND namespace = $2 AND key BETWEEN $3 AND $4
      AND ($5::text IS NULL OR key <> $5) AND starts_with(key, $6)
    ORDER BY key
    LIMIT $7";

const NOW: &str = "SELECT now()";

/// Looks at the next rows in the order of their keys; whether each is idle.
const SCAN: &str = "
    /* scan_leases */
    SELECT kind, namespace, key,
           CASE status WHEN 0 THEN expires_at ELSE revision END
             <= (extract(epoch FROM now()) * 1000000)::bigint - $4
    FROM fencepost.leases
    WHERE (kind, namespace, key) > ($1, $2, $3)
    ORDER BY kind, namespace, key
    LIMIT $5";

const LOCK_FLOOR: &str = "SELECT floor FROM fencepost.floor FOR UPDATE";

/// Deletes what is still idle and not in use by anybody, and raises the floor with it.
const DELETE_IDLE: &str = "
    /* clean_up_leases */
    WITH idle AS MATERIALIZED (
        SELECT l.kind, l.namespace, l.key
        FROM unnest($1::smallint[], $2::text[], $3::text[]) AS n (kind, namespace, key)
        JOIN fencepost.leases AS l
          ON l.kind = n.kind AND l.namespace = n.namespace AND l.key = n.key
        WHERE CASE l.status WHEN 0 THEN l.expires_at ELSE l.revision END
                <= (extract(epoch FROM now()) * 1000000)::bigint - $4
        ORDER BY l.kind, l.namespace, l.key
        FOR UPDATE OF l SKIP LOCKED
    ), deleted AS (
        DELETE FROM fencepost.leases AS l
        USING idle AS i
        WHERE l.kind = i.kind AND l.namespace = i.namespace AND l.key = i.key
        RETURNING l.revision
    ), raised AS (
        UPDATE fencepost.floor SET floor = greatest(floor, (SELECT max(revision) FROM deleted))
        WHERE EXISTS (SELECT FROM deleted)
    )
    SELECT count(*) FROM deleted";

/// What a load brings besides the rows.
pub(super) struct Surroundings {
    pub(super) now: Timestamp,
    pub(super) floor: i64,
    /// `None` on a server in recovery.
    pub(super) timeline: Option<u32>,
}

fn columns(row: &PgRow, first: usize) -> Result<LeaseColumns, sqlx::Error> {
    Ok(LeaseColumns {
        revision: row.try_get(first)?,
        version: row.try_get(first + 1)?,
        status: row.try_get(first + 2)?,
        owner_id: row.try_get(first + 3)?,
        attempt_id: row.try_get(first + 4)?,
        grant_id: row.try_get(first + 5)?,
        ttl_ms: row.try_get(first + 6)?,
        acquired_at: row.try_get(first + 7)?,
        expires_at: row.try_get(first + 8)?,
        recovered_from: row.try_get(first + 9)?,
        metadata: row.try_get(first + 10)?,
    })
}

pub(super) async fn load(
    connection: &mut PgConnection,
    keys: &[Key],
) -> Result<(Vec<Option<Row<Lease>>>, Surroundings), sqlx::Error> {
    let kinds: Vec<i16> = keys.iter().map(|key| kind_number(key.kind)).collect();
    let namespaces: Vec<&str> = keys.iter().map(|key| key.namespace.as_str()).collect();
    let names: Vec<&str> = keys.iter().map(|key| key.name.as_str()).collect();
    let found =
        sqlx::query(LOAD).bind(kinds).bind(namespaces).bind(names).fetch_all(connection).await?;
    let mut rows = vec![None; keys.len()];
    let Some(first) = found.first() else {
        return Err(sqlx::Error::RowNotFound);
    };
    let timeline: Option<&str> = first.try_get(3)?;
    let surroundings = Surroundings {
        now: micros(first.try_get(1)?),
        floor: first.try_get(2)?,
        timeline: timeline.and_then(|hex| u32::from_str_radix(hex, 16).ok()),
    };
    for row in &found {
        let ord: i64 = row.try_get(0)?;
        let revision: Option<i64> = row.try_get(4)?;
        if revision.is_some() {
            let index = usize::try_from(ord - 1).unwrap_or_default();
            rows[index] = Some(columns(row, 4)?.into());
        }
    }
    Ok((rows, surroundings))
}

/// Runs one of the two write statements; tells which of `writes` it accepted.
async fn write(
    connection: &mut PgConnection,
    statement: &'static str,
    writes: &[&Write<Lease>],
) -> Result<Vec<PgRow>, sqlx::Error> {
    fn column<T>(writes: &[&Write<Lease>], of: impl Fn(&Write<Lease>) -> T) -> Vec<T> {
        writes.iter().map(|write| of(write)).collect()
    }
    let texts = |of: for<'a> fn(&'a Write<Lease>) -> &'a str| -> Vec<&str> {
        writes.iter().map(|write| of(write)).collect()
    };
    sqlx::query(statement)
        .bind(column(writes, |w| kind_number(w.key.kind)))
        .bind(texts(|w| w.key.namespace.as_str()))
        .bind(texts(|w| w.key.name.as_str()))
        .bind(column(writes, |w| w.expected.map(Version::get)))
        .bind(column(writes, |w| w.row.revision.get()))
        .bind(column(writes, |w| w.row.state.version.get()))
        .bind(column(writes, |w| status_number(w.row.state.status)))
        .bind(texts(|w| w.row.state.owner_id.as_str()))
        .bind(column::<Option<Uuid>>(writes, |w| w.row.state.attempt_id))
        .bind(column(writes, |w| w.row.state.grant_id))
        .bind(column(writes, |w| w.row.state.ttl.as_millis()))
        .bind(column(writes, |w| w.row.state.acquired_at.as_micros()))
        .bind(column(writes, |w| w.row.state.expires_at.as_micros()))
        .bind(column(writes, |w| w.row.state.recovered_from.map(Version::get)))
        .bind(writes.iter().map(|w| w.row.state.metadata.as_deref()).collect::<Vec<_>>())
        .fetch_all(connection)
        .await
}

/// Updates rows that exist; tells for each whether it was accepted.
pub(super) async fn update(
    connection: &mut PgConnection,
    writes: &[&Write<Lease>],
) -> Result<Vec<bool>, sqlx::Error> {
    let mut accepted = vec![false; writes.len()];
    for row in write(connection, UPDATE, writes).await? {
        let ord: i64 = row.try_get(0)?;
        accepted[usize::try_from(ord - 1).unwrap_or_default()] = true;
    }
    Ok(accepted)
}

/// Inserts rows that do not exist; tells for each whether it was accepted.
pub(super) async fn insert(
    connection: &mut PgConnection,
    writes: &[&Write<Lease>],
) -> Result<Vec<bool>, sqlx::Error> {
    let rows = write(connection, INSERT, writes).await?;
    let mut accepted = std::collections::HashSet::with_capacity(rows.len());
    for row in &rows {
        let key: (i16, &str, &str) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
        accepted.insert(key);
    }
    Ok(writes
        .iter()
        .map(|Write { key, .. }| {
            let key = (kind_number(key.kind), key.namespace.as_str(), key.name.as_str());
            accepted.contains(&key)
        })
        .collect())
}

pub(super) async fn list(
    connection: &mut PgConnection,
    query: &ListQuery,
) -> Result<(Vec<(Name, Row<Lease>)>, Timestamp), sqlx::Error> {
    let (lower, upper) = query.bounds();
    let found = sqlx::query(LIST)
        .bind(kind_number(query.kind))
        .bind(query.namespace.as_str())
        .bind(lower)
        .bind(upper)
        .bind(query.after.as_ref().map(Name::as_str))
        .bind(&query.prefix)
        .bind(i64::try_from(query.limit).unwrap_or(i64::MAX))
        .fetch_all(&mut *connection)
        .await?;
    let now = match found.first() {
        Some(row) => row.try_get(1)?,
        None => sqlx::query(NOW).fetch_one(&mut *connection).await?.try_get(0)?,
    };
    let rows = found
        .iter()
        .map(|row| {
            let name: String = row.try_get(0)?;
            Ok((Name::from_stored(name), columns(row, 2)?.into()))
        })
        .collect::<Result<_, sqlx::Error>>()?;
    Ok((rows, micros(now)))
}

/// Deletes what is idle among the next keys.
///
/// The floor is locked first, and only when there is something to delete: inserts are held off for
/// that moment.
pub(super) async fn clean_up(
    connection: &mut PgConnection,
    retention_micros: i64,
    after: Cursor,
) -> Result<Cleaned, sqlx::Error> {
    let rows = sqlx::query(SCAN)
        .bind(after.0)
        .bind(after.1)
        .bind(after.2)
        .bind(retention_micros)
        .bind(i64::try_from(Cursor::CHUNK).unwrap_or(i64::MAX))
        .fetch_all(&mut *connection)
        .await?;
    let (mut kinds, mut namespaces, mut names) = (Vec::new(), Vec::new(), Vec::new());
    let mut last = None;
    for row in &rows {
        let cursor = Cursor(row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
        if row.try_get(3)? {
            kinds.push(cursor.0);
            namespaces.push(cursor.1.clone());
            names.push(cursor.2.clone());
        }
        last = Some(cursor);
    }
    let mut deleted = 0_i64;
    if !kinds.is_empty() {
        let mut transaction = connection.begin().await?;
        // Waits for the inserts of the moment, unlike anything on the request path.
        sqlx::raw_sql("SET LOCAL lock_timeout = '5s'").execute(&mut *transaction).await?;
        sqlx::query(LOCK_FLOOR).execute(&mut *transaction).await?;
        deleted = sqlx::query(DELETE_IDLE)
            .bind(kinds)
            .bind(namespaces)
            .bind(names)
            .bind(retention_micros)
            .fetch_one(&mut *transaction)
            .await?
            .try_get(0)?;
        transaction.commit().await?;
    }
    let next = last.filter(|_| rows.len() == Cursor::CHUNK);
    Ok(Cleaned { deleted: deleted.unsigned_abs(), next })
}
