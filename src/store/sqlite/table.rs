//! The statements, the same for each table.
//!
//! Rows travel to SQLite as one JSON array, since its parameters are scalars: so the statements
//! are static text, prepared once, whatever the size of a batch.

use std::collections::HashSet;

use serde_json::{Value, json};
use sqlx::Row as _;
use sqlx::sqlite::{SqliteConnection, SqliteRow};
use uuid::Uuid;

use crate::domain::Machine;
use crate::domain::ids::{Key, Name};
use crate::domain::time::Timestamp;
use crate::domain::version::Version;
use crate::store::columns::{LeaseColumns, kind_number};
use crate::store::{Cleaned, Cursor, ListQuery, Row, Stored, Write};

/// The texts of a table's statements; made by [`statements!`].
pub(super) struct Statements {
    pub(super) load: &'static str,
    pub(super) update: &'static str,
    pub(super) insert: &'static str,
    pub(super) list: &'static str,
    pub(super) chunk_end: &'static str,
    pub(super) delete_idle: &'static str,
}

/// A machine whose rows are in a table of their own.
pub(super) trait Table: Machine {
    const STATEMENTS: Statements;

    /// Reads a row whose columns begin at `first`.
    fn row(row: &SqliteRow, first: usize) -> Result<Row<Self::State>, sqlx::Error>;

    /// Adds a value for each column behind the revision.
    fn push(values: &mut Vec<Value>, state: &Self::State);
}

/// Spells the statements of one table. The columns behind the revision come with how to read them
/// from the JSON array `w.value`, of which the first four are the key, then come the revision that
/// an update expects, and the new one. `list` says how to select the columns for a list, and `idle`
/// since when a row must be idle to be deleted, `?9` being the retention in microseconds.
macro_rules! statements {
    (
        $table:literal,
        list: $list:literal,
        idle: $idle:literal,
        $($column:literal = $value:literal),* $(,)?
    ) => {
        $crate::store::sqlite::table::Statements {
            load: concat!(
                "SELECT wanted.key, l.revision", $(", l.", $column,)* "
                FROM json_each(?1) AS wanted
                JOIN ", $table, " AS l
                  ON l.kind = wanted.value ->> 0 AND l.namespace = wanted.value ->> 1
                 AND l.scope = wanted.value ->> 2 AND l.key = wanted.value ->> 3"
            ),
            update: concat!(
                "UPDATE ", $table, "
                SET revision = w.value ->> 5", $(", ", $column, " = ", $value,)* "
                FROM json_each(?1) AS w
                WHERE ", $table, ".kind = w.value ->> 0
                  AND ", $table, ".namespace = w.value ->> 1
                  AND ", $table, ".scope = w.value ->> 2
                  AND ", $table, ".key = w.value ->> 3
                  AND ", $table, ".revision = w.value ->> 4
                RETURNING kind, namespace, scope, key"
            ),
            insert: concat!(
                "INSERT INTO ", $table, " (kind, namespace, scope, key, revision",
                    $(", ", $column,)* ")
                SELECT w.value ->> 0, w.value ->> 1, w.value ->> 2, w.value ->> 3, w.value ->> 5",
                    $(", ", $value,)* "
                FROM json_each(?1) AS w
                WHERE true
                ON CONFLICT DO NOTHING
                RETURNING kind, namespace, scope, key"
            ),
            list: concat!(
                "SELECT key, ", $list, "
                FROM ", $table, "
                WHERE kind = ?1 AND namespace = ?2 AND scope = ?3 AND key BETWEEN ?4 AND ?5
                  AND key IS NOT ?6
                  AND substr(CAST(key AS BLOB), 1, length(CAST(?7 AS BLOB))) = CAST(?7 AS BLOB)
                ORDER BY key
                LIMIT ?8"
            ),
            chunk_end: concat!(
                "SELECT kind, namespace, scope, key FROM ", $table, "
                WHERE (kind, namespace, scope, key) > (?1, ?2, ?3, ?4)
                ORDER BY kind, namespace, scope, key
                LIMIT 1 OFFSET ?5"
            ),
            delete_idle: concat!(
                "DELETE FROM ", $table, "
                WHERE (kind, namespace, scope, key) > (?1, ?2, ?3, ?4)
                  AND (kind, namespace, scope, key) <= (?5, ?6, ?7, ?8)
                  AND ", $idle, " <= ?10
                RETURNING revision"
            ),
        }
    };
}
pub(super) use statements;

const RAISE_FLOOR: &str = "UPDATE state SET floor = max(floor, ?1)";

/// Reads the columns that every table has, which begin at `first`.
pub(super) fn lease_columns(row: &SqliteRow, first: usize) -> Result<LeaseColumns, sqlx::Error> {
    let attempt_id: Option<String> = row.try_get(first + 4)?;
    Ok(LeaseColumns {
        revision: row.try_get(first)?,
        version: row.try_get(first + 1)?,
        status: row.try_get(first + 2)?,
        owner_id: row.try_get(first + 3)?,
        attempt_id: attempt_id.and_then(|text| Uuid::try_parse(&text).ok()),
        grant_id: row.try_get(first + 5)?,
        ttl_ms: row.try_get(first + 6)?,
        acquired_at: row.try_get(first + 7)?,
        expires_at: row.try_get(first + 8)?,
        recovered_from: row.try_get(first + 9)?,
        metadata: row.try_get(first + 10)?,
    })
}

fn key_values(key: &Key) -> Vec<Value> {
    let Key { kind, namespace, scope, name } = key;
    let texts = [namespace.as_str(), scope.as_str(), name.as_str()];
    let mut values = vec![json!(kind_number(*kind))];
    values.extend(texts.map(Value::from));
    values
}

pub(super) async fn load<T: Table>(
    connection: &mut SqliteConnection,
    keys: &[Key],
) -> Result<Vec<Option<Row<T::State>>>, sqlx::Error> {
    let wanted: Value = keys.iter().map(key_values).collect();
    let query = sqlx::query(T::STATEMENTS.load).bind(wanted.to_string());
    let mut rows = vec![None; keys.len()];
    for row in query.fetch_all(connection).await? {
        let index: i64 = row.try_get(0)?;
        rows[usize::try_from(index).unwrap_or_default()] = Some(T::row(&row, 1)?);
    }
    Ok(rows)
}

/// Stores a batch, in the transaction that the caller has begun.
pub(super) async fn store<T: Table>(
    connection: &mut SqliteConnection,
    writes: &[Write<T::State>],
    floor: i64,
) -> Result<Vec<Stored>, sqlx::Error> {
    let as_json = |write: &Write<T::State>| {
        let mut values = key_values(&write.key);
        values.push(json!(write.expected.map(Version::get)));
        values.push(json!(write.row.revision.get()));
        T::push(&mut values, &write.row.state);
        Value::from(values)
    };
    let updates: Vec<Value> = writes.iter().filter(|w| w.expected.is_some()).map(as_json).collect();
    let inserts: Vec<Value> = writes
        .iter()
        .filter(|w| w.expected.is_none() && w.row.revision.get() > floor)
        .map(as_json)
        .collect();
    let mut accepted = HashSet::new();
    for (statement, rows) in [(T::STATEMENTS.update, updates), (T::STATEMENTS.insert, inserts)] {
        if rows.is_empty() {
            continue;
        }
        let rows = Value::from(rows).to_string();
        for row in sqlx::query(statement).bind(rows).fetch_all(&mut *connection).await? {
            let key: (i16, String, String, String) =
                (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?, row.try_get(3)?);
            accepted.insert(key);
        }
    }
    let is_accepted = |Key { kind, namespace, scope, name }: &Key| {
        let [namespace, scope, name] =
            [namespace.as_str(), scope.as_str(), name.as_str()].map(str::to_owned);
        accepted.contains(&(kind_number(*kind), namespace, scope, name))
    };
    let result = |write: &Write<T::State>| {
        if is_accepted(&write.key) { Stored::Accepted } else { Stored::NotAccepted }
    };
    Ok(writes.iter().map(result).collect())
}

pub(super) async fn list<T: Table>(
    connection: &mut SqliteConnection,
    query: &ListQuery,
) -> Result<Vec<(Name, Row<T::State>)>, sqlx::Error> {
    let (lower, upper) = query.bounds();
    let rows = sqlx::query(T::STATEMENTS.list)
        .bind(kind_number(query.kind))
        .bind(query.namespace.as_str())
        .bind(query.scope.as_str())
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
            Ok((Name::from_stored(name), T::row(row, 1)?))
        })
        .collect()
}

/// Deletes what is idle among the next rows, and raises the floor with it, in the transaction that
/// the caller has begun. Also tells the largest stamp deleted, or 0.
pub(super) async fn clean_up<T: Table>(
    connection: &mut SqliteConnection,
    after: &Cursor,
    retention_micros: i64,
    now: Timestamp,
) -> Result<(Cleaned, i64), sqlx::Error> {
    let end = sqlx::query(T::STATEMENTS.chunk_end)
        .bind(after.kind)
        .bind(&after.namespace)
        .bind(&after.scope)
        .bind(&after.key)
        .bind(i64::try_from(Cursor::CHUNK).unwrap_or(i64::MAX) - 1)
        .fetch_optional(&mut *connection)
        .await?;
    let next = match end {
        Some(row) => Some(Cursor {
            table: after.table,
            kind: row.try_get(0)?,
            namespace: row.try_get(1)?,
            scope: row.try_get(2)?,
            key: row.try_get(3)?,
        }),
        None => None,
    };
    let last = next.clone().unwrap_or(Cursor { kind: i16::MAX, ..Cursor::first() });
    let mut query = sqlx::query(T::STATEMENTS.delete_idle);
    for Cursor { kind, namespace, scope, key, .. } in [after, &last] {
        query = query.bind(*kind).bind(namespace).bind(scope).bind(key);
    }
    let deleted =
        query.bind(retention_micros).bind(now.as_micros()).fetch_all(&mut *connection).await?;
    let mut floor = 0;
    for row in &deleted {
        floor = floor.max(row.try_get(0)?);
    }
    if floor > 0 {
        sqlx::query(RAISE_FLOOR).bind(floor).execute(&mut *connection).await?;
    }
    Ok((Cleaned { deleted: deleted.len() as u64, next }, floor))
}
