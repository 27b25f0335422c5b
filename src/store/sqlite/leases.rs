//! The statements on leases.
//!
//! Rows travel to SQLite as one JSON array, since its parameters are scalars: so the statements
//! are static text, prepared once, whatever the size of a batch.

use std::collections::HashSet;

use serde_json::{Value, json};
use sqlx::Row as _;
use sqlx::sqlite::{SqliteConnection, SqliteRow};
use uuid::Uuid;

use crate::domain::ids::{Key, Name};
use crate::domain::lease::Lease;
use crate::domain::time::Timestamp;
use crate::domain::version::Version;
use crate::store::columns::{LeaseColumns, kind_number, status_number};
use crate::store::{Cleaned, Cursor, ListQuery, Row, Stored, Write};

const LOAD: &str = "
    SELECT wanted.key, l.revision, l.version, l.status, l.owner_id, l.attempt_id, l.grant_id,
           l.ttl_ms, l.acquired_at, l.expires_at, l.recovered_from, l.metadata
    FROM json_each(?1) AS wanted
    JOIN leases AS l
      ON l.kind = wanted.value ->> 0
     AND l.namespace = wanted.value ->> 1
     AND l.key = wanted.value ->> 2";

const UPDATE: &str = "
    UPDATE leases
    SET revision = w.value ->> 4, version = w.value ->> 5, status = w.value ->> 6,
        owner_id = w.value ->> 7, attempt_id = w.value ->> 8, grant_id = w.value ->> 9,
        ttl_ms = w.value ->> 10, acquired_at = w.value ->> 11, expires_at = w.value ->> 12,
        recovered_from = w.value ->> 13, metadata = w.value ->> 14
    FROM json_each(?1) AS w
    WHERE leases.kind = w.value ->> 0
      AND leases.namespace = w.value ->> 1
      AND leases.key = w.value ->> 2
      AND leases.revision = w.value ->> 3
    RETURNING kind, namespace, key";

const INSERT: &str = "
    INSERT INTO leases (kind, namespace, key, revision, version, status, owner_id, attempt_id,
                        grant_id, ttl_ms, acquired_at, expires_at, recovered_from, metadata)
    SELECT w.value ->> 0, w.value ->> 1, w.value ->> 2, w.value ->> 4, w.value ->> 5,
           w.value ->> 6, w.value ->> 7, w.value ->> 8, w.value ->> 9, w.value ->> 10,
           w.value ->> 11, w.value ->> 12, w.value ->> 13, w.value ->> 14
    FROM json_each(?1) AS w
    WHERE true
    ON CONFLICT DO NOTHING
    RETURNING kind, namespace, key";

const LIST: &str = "
    SELECT key, revision, version, status, owner_id, attempt_id, grant_id, ttl_ms, acquired_at,
           expires_at, recovered_from, metadata
    FROM leases
    WHERE kind = ?1 AND namespace = ?2 AND key BETWEEN ?3 AND ?4 AND key IS NOT ?5
      AND substr(CAST(key AS BLOB), 1, length(CAST(?6 AS BLOB))) = CAST(?6 AS BLOB)
    ORDER BY key
    LIMIT ?7";

const CHUNK_END: &str = "
    SELECT kind, namespace, key FROM leases
    WHERE (kind, namespace, key) > (?1, ?2, ?3)
    ORDER BY kind, namespace, key
    LIMIT 1 OFFSET ?4";

const DELETE_IDLE: &str = "
    DELETE FROM leases
    WHERE (kind, namespace, key) > (?1, ?2, ?3)
      AND (kind, namespace, key) <= (?4, ?5, ?6)
      AND CASE status WHEN 0 THEN expires_at ELSE revision END <= ?7
    RETURNING revision";

const RAISE_FLOOR: &str = "UPDATE state SET floor = max(floor, ?1)";

fn columns(row: &SqliteRow) -> Result<LeaseColumns, sqlx::Error> {
    let attempt_id: Option<String> = row.try_get(5)?;
    Ok(LeaseColumns {
        revision: row.try_get(1)?,
        version: row.try_get(2)?,
        status: row.try_get(3)?,
        owner_id: row.try_get(4)?,
        attempt_id: attempt_id.and_then(|text| Uuid::try_parse(&text).ok()),
        grant_id: row.try_get(6)?,
        ttl_ms: row.try_get(7)?,
        acquired_at: row.try_get(8)?,
        expires_at: row.try_get(9)?,
        recovered_from: row.try_get(10)?,
        metadata: row.try_get(11)?,
    })
}

pub(super) async fn load(
    connection: &mut SqliteConnection,
    keys: &[Key],
) -> Result<Vec<Option<Row<Lease>>>, sqlx::Error> {
    let wanted: Value = keys
        .iter()
        .map(|key| json!([kind_number(key.kind), key.namespace.as_str(), key.name.as_str()]))
        .collect();
    let found = sqlx::query(LOAD).bind(wanted.to_string()).fetch_all(connection).await?;
    let mut rows = vec![None; keys.len()];
    for row in found {
        let index: i64 = row.try_get(0)?;
        rows[usize::try_from(index).unwrap_or_default()] = Some(columns(&row)?.into());
    }
    Ok(rows)
}

/// Stores a batch, in the transaction that the caller has begun.
pub(super) async fn store(
    connection: &mut SqliteConnection,
    writes: &[Write<Lease>],
    floor: i64,
) -> Result<Vec<Stored>, sqlx::Error> {
    let updates: Vec<Value> = writes.iter().filter(|w| w.expected.is_some()).map(as_json).collect();
    let inserts: Vec<Value> = writes
        .iter()
        .filter(|w| w.expected.is_none() && w.row.revision.get() > floor)
        .map(as_json)
        .collect();
    let mut accepted = HashSet::new();
    for (statement, rows) in [(UPDATE, updates), (INSERT, inserts)] {
        if rows.is_empty() {
            continue;
        }
        let rows = Value::from(rows).to_string();
        for row in sqlx::query(statement).bind(rows).fetch_all(&mut *connection).await? {
            let key: (i16, String, String) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
            accepted.insert(key);
        }
    }
    let is_accepted = |key: &Key| {
        let namespace = key.namespace.as_str().to_owned();
        accepted.contains(&(kind_number(key.kind), namespace, key.name.as_str().to_owned()))
    };
    let result = |write: &Write<Lease>| {
        if is_accepted(&write.key) { Stored::Accepted } else { Stored::NotAccepted }
    };
    Ok(writes.iter().map(result).collect())
}

fn as_json(write: &Write<Lease>) -> Value {
    let Write { key, expected, row: Row { revision, state } } = write;
    json!([
        kind_number(key.kind),
        key.namespace.as_str(),
        key.name.as_str(),
        expected.map(Version::get),
        revision.get(),
        state.version.get(),
        status_number(state.status),
        state.owner_id.as_str(),
        state.attempt_id.map(|id| id.to_string()),
        state.grant_id,
        state.ttl.as_millis(),
        state.acquired_at.as_micros(),
        state.expires_at.as_micros(),
        state.recovered_from.map(Version::get),
        state.metadata,
    ])
}

pub(super) async fn list(
    connection: &mut SqliteConnection,
    query: &ListQuery,
) -> Result<Vec<(Name, Row<Lease>)>, sqlx::Error> {
    let (lower, upper) = query.bounds();
    let rows = sqlx::query(LIST)
        .bind(kind_number(query.kind))
        .bind(query.namespace.as_str())
        .bind(lower)
        .bind(upper)
        .bind(query.after.as_ref().map(Name::as_str))
        .bind(&query.prefix)
        .bind(i64::try_from(query.limit).unwrap_or(i64::MAX))
        .fetch_all(connection)
        .await?;
    rows.iter()
        .map(|row| {
            let name: String = row.try_get(0)?;
            Ok((Name::from_stored(name), columns(row)?.into()))
        })
        .collect()
}

/// Deletes what is idle among the next rows, and raises the floor with it, in the transaction that
/// the caller has begun. Also tells the largest stamp deleted, or 0.
pub(super) async fn clean_up(
    connection: &mut SqliteConnection,
    after: Cursor,
    cutoff: Timestamp,
) -> Result<(Cleaned, i64), sqlx::Error> {
    let end = sqlx::query(CHUNK_END)
        .bind(after.0)
        .bind(&after.1)
        .bind(&after.2)
        .bind(i64::try_from(Cursor::CHUNK).unwrap_or(i64::MAX) - 1)
        .fetch_optional(&mut *connection)
        .await?;
    let next = match end {
        Some(row) => Some(Cursor(row.try_get(0)?, row.try_get(1)?, row.try_get(2)?)),
        None => None,
    };
    let last = next.clone().unwrap_or(Cursor(i16::MAX, String::new(), String::new()));
    let deleted = sqlx::query(DELETE_IDLE)
        .bind(after.0)
        .bind(after.1)
        .bind(after.2)
        .bind(last.0)
        .bind(last.1)
        .bind(last.2)
        .bind(cutoff.as_micros())
        .fetch_all(&mut *connection)
        .await?;
    let mut floor = 0;
    for row in &deleted {
        floor = floor.max(row.try_get(0)?);
    }
    if floor > 0 {
        sqlx::query(RAISE_FLOOR).bind(floor).execute(&mut *connection).await?;
    }
    Ok((Cleaned { deleted: deleted.len() as u64, next }, floor))
}
