//! The statements, the same for each table.
//!
//! What a batch writes is one text of several statements, from BEGIN to COMMIT: so it takes one
//! trip to the database's thread and back, whose scheduling otherwise costs more than the work.
//! SQLite's parameters are scalars, so such a text is for a certain number of rows; there are some
//! sizes, each prepared once, and what is left over is filled up with NULL.

use std::sync::OnceLock;

use futures_util::TryStreamExt as _;
use sqlx::query::Query;
use sqlx::sqlite::{SqliteArguments, SqliteConnection, SqliteQueryResult, SqliteRow};
use sqlx::{Executor as _, Row as _, Sqlite};
use uuid::Uuid;

use super::Failure;
use crate::domain::Machine;
use crate::domain::ids::{Key, Name};
use crate::domain::time::Timestamp;
use crate::store::columns::LeaseColumns;
use crate::store::{Cleaned, Cursor, ListQuery, Row, Write};

/// How many rows a statement is for.
const SIZES: [usize; 8] = [0, 1, 4, 16, 64, 128, 256, MAX_ROWS];
/// The most rows that one transaction writes.
pub(super) const MAX_ROWS: usize = 512;

/// The texts of a table's statements.
#[derive(Debug)]
pub(super) struct Statements {
    table: &'static str,
    /// Those behind the revision.
    columns: Vec<&'static str>,
    /// By the place of its number of rows in [`SIZES`]; made when first used, as those of `write`.
    load: [OnceLock<String>; SIZES.len()],
    /// By the places of its numbers of rows to update, and to insert.
    write: [[OnceLock<String>; SIZES.len()]; SIZES.len()],
    list: String,
    chunk_end: String,
    delete_idle: String,
}

/// A query with its parameters.
pub(super) type Bound<'q> = Query<'q, Sqlite, SqliteArguments>;

/// A machine whose rows are in a table of their own.
pub(super) trait Table: Machine {
    fn statements() -> &'static Statements;

    /// Reads a row whose columns begin at `first`.
    fn row(row: &SqliteRow, first: usize) -> Result<Row<Self::State>, sqlx::Error>;

    /// Adds a parameter for each column behind the revision.
    fn bind<'q>(query: Bound<'q>, state: &Self::State) -> Bound<'q>;
}

/// The place in [`SIZES`] of the first that is large enough.
fn place(count: usize) -> usize {
    SIZES.iter().position(|size| *size >= count).unwrap_or(SIZES.len() - 1)
}

/// The VALUES of so many rows.
fn values(rows: usize, columns: usize) -> String {
    let row = format!("({})", vec!["?"; columns].join(", "));
    format!("VALUES {}", vec![row; rows].join(", "))
}

impl Statements {
    /// Of one table. `columns` are those behind the revision. `list` says how to select the columns
    /// for a list, and `idle` since when a row must be idle to be deleted, `?3` being the retention
    /// in microseconds.
    pub(super) fn of(
        table: &'static str,
        columns: Vec<&'static str>,
        list: &str,
        idle: &str,
    ) -> Self {
        Self {
            table,
            columns,
            load: Default::default(),
            write: Default::default(),
            list: format!(
                "SELECT id, {list}
                 FROM {table}
                 WHERE id BETWEEN ?1 AND ?2 AND id IS NOT ?3
                   AND substr(CAST(id AS BLOB), 1, length(CAST(?4 AS BLOB))) = CAST(?4 AS BLOB)
                 ORDER BY id
                 LIMIT ?5"
            ),
            chunk_end: format!(
                "SELECT id FROM {table} WHERE id > ?1 ORDER BY id LIMIT 1 OFFSET ?2"
            ),
            delete_idle: format!(
                "DELETE FROM {table}
                 WHERE id > ?1 AND (?2 IS NULL OR id <= ?2) AND {idle} <= ?4
                 RETURNING revision"
            ),
        }
    }
    fn load(&self, place: usize) -> &str {
        self.load[place].get_or_init(|| {
            let Self { table, columns, .. } = self;
            format!(
                "WITH w (number, id) AS ({})
                 SELECT w.number, t.revision, {}
                 FROM w CROSS JOIN {table} AS t ON t.id = w.id",
                values(SIZES[place], 2),
                columns.iter().map(|column| format!("t.{column}")).collect::<Vec<_>>().join(", "),
            )
        })
    }

    /// A conflict that is not looked for fails: the whole is then rolled back, so SQLite need not
    /// keep a journal of each statement to undo it alone.
    fn write(&self, updates: usize, inserts: usize) -> &str {
        self.write[updates][inserts].get_or_init(|| {
            let Self { table, columns, .. } = self;
            let names = columns.join(", ");
            let set: Vec<String> = columns.iter().map(|c| format!("{c} = w.{c}")).collect();
            let update = format!(
                "WITH w (id, expected, revision, {names}) AS ({})
                 UPDATE OR FAIL {table} SET revision = w.revision, {}
                 FROM w
                 WHERE {table}.id = w.id AND {table}.revision = w.expected;",
                values(SIZES[updates], 3 + columns.len()),
                set.join(", "),
            );
            let insert = format!(
                "INSERT OR FAIL INTO {table} (id, revision, {names})
                 SELECT * FROM ({})
                 WHERE column1 IS NOT NULL
                 ON CONFLICT DO NOTHING;",
                values(SIZES[inserts], 2 + columns.len()),
            );
            format!(
                "BEGIN IMMEDIATE; {} {} UPDATE state SET clock = coalesce(?, clock); COMMIT",
                Some(update).filter(|_| updates > 0).unwrap_or_default(),
                Some(insert).filter(|_| inserts > 0).unwrap_or_default(),
            )
        })
    }
}

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

pub(super) async fn load<T: Table>(
    connection: &mut SqliteConnection,
    keys: &[Key],
) -> Result<Vec<Option<Row<T::State>>>, sqlx::Error> {
    let mut rows = vec![None; keys.len()];
    for (piece, keys) in keys.chunks(MAX_ROWS).enumerate() {
        let mut query = sqlx::query(T::statements().load(place(keys.len())));
        for (number, key) in keys.iter().enumerate() {
            let number = i64::try_from(piece * MAX_ROWS + number).unwrap_or(i64::MAX);
            query = query.bind(number).bind(key.as_str());
        }
        for row in query.fetch_all(&mut *connection).await? {
            let number: i64 = row.try_get(0)?;
            rows[usize::try_from(number).unwrap_or_default()] = Some(T::row(&row, 1)?);
        }
    }
    Ok(rows)
}

/// Stores at most [`MAX_ROWS`] rows in one transaction, and with them the clock; tells for each
/// whether it was accepted.
pub(super) async fn store<T: Table>(
    connection: &mut SqliteConnection,
    writes: &[Write<T::State>],
    floor: i64,
    clock: Option<Timestamp>,
) -> Result<Vec<bool>, Failure> {
    let statements = T::statements();
    let (updates, inserts): (Vec<usize>, Vec<usize>) = (0..writes.len())
        .filter(|&i| writes[i].expected.is_some() || writes[i].row.revision.get() > floor)
        .partition(|&i| writes[i].expected.is_some());
    let places = [place(updates.len()), place(inserts.len())];
    let mut query = sqlx::query(statements.write(places[0], places[1]));
    // An update has one more: the revision that it expects.
    for (chosen, place, more) in [(&updates, places[0], 3), (&inserts, places[1], 2)] {
        for Write { key, expected, row } in chosen.iter().map(|&i| &writes[i]) {
            query = query.bind(key.as_str());
            if let Some(expected) = expected {
                query = query.bind(expected.get());
            }
            query = T::bind(query.bind(row.revision.get()), &row.state);
        }
        // What is left over of the statement's parameters.
        for _ in 0..(SIZES[place] - chosen.len()) * (statements.columns.len() + more) {
            query = query.bind(None::<i64>);
        }
    }
    query = query.bind(clock.map(Timestamp::as_micros));
    let done: Result<Vec<_>, _> = (&mut *connection).fetch_many(query).try_collect().await;
    let done = match done {
        Ok(done) => done,
        Err(error) => {
            // Fails if SQLite has rolled back by itself.
            let _ = sqlx::query("ROLLBACK").execute(&mut *connection).await;
            return Err(Failure::NotApplied(error));
        }
    };
    // One for BEGIN, then one for each statement.
    let mut counts = done.iter().filter_map(|done| done.as_ref().left()).skip(1);
    let mut accepted = vec![false; writes.len()];
    for chosen in [updates, inserts] {
        if chosen.is_empty() {
            continue;
        }
        let count = counts.next().map_or(0, SqliteQueryResult::rows_affected);
        if count == chosen.len() as u64 {
            for i in chosen {
                accepted[i] = true;
            }
        } else if count > 0 {
            let keys: Vec<Key> = chosen.iter().map(|&i| writes[i].key.clone()).collect();
            let rows = load::<T>(connection, &keys).await.map_err(Failure::Unknown)?;
            // Accepted is what is there as it was to be written: nobody else has written since,
            // and nobody writes the same stamp twice.
            for (&i, row) in chosen.iter().zip(&rows) {
                accepted[i] = row.as_ref() == Some(&writes[i].row);
            }
        }
    }
    Ok(accepted)
}

pub(super) async fn list<T: Table>(
    connection: &mut SqliteConnection,
    query: &ListQuery,
) -> Result<Vec<(Name, Row<T::State>)>, sqlx::Error> {
    let (lower, upper) = query.bounds();
    let rows = sqlx::query(T::statements().list.as_str())
        .bind(lower.as_str())
        .bind(upper.as_str())
        .bind(query.after().as_ref().map(Key::as_str))
        .bind(query.prefix().as_str())
        .bind(i64::try_from(query.limit).unwrap_or(i64::MAX))
        .fetch_all(connection)
        .await?;
    rows.iter()
        .map(|row| {
            let key = Key::from_stored(row.try_get::<&str, _>(0)?);
            Ok((Name::from_stored(key.name()), T::row(row, 1)?))
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
    let end: Option<String> = sqlx::query_scalar(T::statements().chunk_end.as_str())
        .bind(after.key.as_str())
        .bind(i64::try_from(Cursor::CHUNK).unwrap_or(i64::MAX) - 1)
        .fetch_optional(&mut *connection)
        .await?;
    let next = end.map(|id| Cursor { table: after.table, key: Key::from_stored(id) });
    let deleted = sqlx::query(T::statements().delete_idle.as_str())
        .bind(after.key.as_str())
        .bind(next.as_ref().map(|next| next.key.as_str()))
        .bind(retention_micros)
        .bind(now.as_micros())
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
