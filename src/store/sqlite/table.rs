//! The statements, the same for each table.
//!
//! A table has its rows in the order in which their keys came, and a second one says where the row
//! of a key is; what that lacks, [`Index`] knows.
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

use super::index::{Index, STRETCH};
use super::{Failure, Indexes};
use crate::domain::Machine;
use crate::domain::ids::{Key, Name};
use crate::domain::time::Timestamp;
use crate::store::columns::LeaseColumns;
use crate::store::{Cleaned, Cursor, KeyMap, ListQuery, Row, Write, first};

/// How many rows a statement is for.
const SIZES: [usize; 8] = [0, 1, 4, 16, 64, 128, 256, MAX_ROWS];
/// The most rows that one transaction writes.
pub(super) const MAX_ROWS: usize = 512;

/// The texts of a table's statements.
#[derive(Debug)]
pub(super) struct Statements {
    table: &'static str,
    /// The table that says where the row of a key is.
    keys: &'static str,
    /// Those behind the revision.
    columns: Vec<&'static str>,
    /// By the place of its number of rows in [`SIZES`]; made when first used, as those of `write`.
    load: [OnceLock<String>; SIZES.len()],
    /// By the places of its numbers of rows to update, and to insert; and whether a stretch of new
    /// keys goes along.
    write: [[[OnceLock<String>; 2]; SIZES.len()]; SIZES.len()],
    /// The keys that the table of keys lacks.
    recent: String,
    /// The greatest number that was used.
    last: String,
    list: String,
    chunk_end: String,
    delete_idle: String,
    delete_keys: String,
}

/// A query with its parameters.
pub(super) type Bound<'q> = Query<'q, Sqlite, SqliteArguments>;

/// A machine whose rows are in a table of their own.
pub(super) trait Table: Machine {
    fn statements() -> &'static Statements;

    /// Where its index is kept.
    fn index(indexes: &mut Indexes) -> &mut Option<Index>;

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
    /// Of one table, and that of its keys. `columns` are those behind the revision. `list` says how
    /// to select the columns for a list, and `idle` since when a row must be idle to be deleted,
    /// `?3` being the retention in microseconds.
    pub(super) fn of(
        table: &'static str,
        keys: &'static str,
        columns: Vec<&'static str>,
        list: &str,
        idle: &str,
    ) -> Self {
        Self {
            table,
            keys,
            columns,
            load: Default::default(),
            write: Default::default(),
            recent: format!(
                "SELECT t.id, t.number
                 FROM state CROSS JOIN {table} AS t ON t.number > state.{table}_indexed
                 WHERE NOT EXISTS (SELECT 1 FROM {keys} AS k WHERE k.id = t.id)"
            ),
            last: format!(
                "SELECT max({table}_indexed, (SELECT coalesce(max(number), 0) FROM {table}))
                 FROM state"
            ),
            list: format!(
                "WITH indexed AS (
                     SELECT number
                     FROM {keys}
                     WHERE id BETWEEN ?1 AND ?2 AND id IS NOT ?3
                       AND substr(CAST(id AS BLOB), 1, length(CAST(?4 AS BLOB))) = CAST(?4 AS BLOB)
                     ORDER BY id
                     LIMIT ?5
                 )
                 SELECT t.id, {list}
                 FROM (SELECT number FROM indexed UNION ALL SELECT value FROM json_each(?6)) AS n
                 CROSS JOIN {table} AS t ON t.number = n.number
                 ORDER BY t.id
                 LIMIT ?5"
            ),
            chunk_end: format!("SELECT id FROM {keys} WHERE id > ?1 ORDER BY id LIMIT 1 OFFSET ?2"),
            delete_idle: format!(
                "DELETE FROM {table}
                 WHERE number IN (SELECT number FROM {keys} WHERE id > ?1 AND id <= ?2)
                   AND {idle} <= ?4
                 RETURNING revision"
            ),
            delete_keys: format!(
                "DELETE FROM {keys}
                 WHERE id > ?1 AND id <= ?2
                   AND NOT EXISTS (SELECT 1 FROM {table} AS t WHERE t.number = {keys}.number)"
            ),
        }
    }

    /// How to find a row of `w`, which has its number, or else its key.
    fn number(&self) -> String {
        format!("coalesce(w.number, (SELECT k.number FROM {} AS k WHERE k.id = w.id))", self.keys)
    }

    fn load(&self, place: usize) -> &str {
        self.load[place].get_or_init(|| {
            let Self { table, columns, .. } = self;
            format!(
                "WITH w (place, id, number) AS ({})
                 SELECT w.place, t.revision, {}
                 FROM w CROSS JOIN {table} AS t ON t.number = {}",
                values(SIZES[place], 3),
                columns.iter().map(|column| format!("t.{column}")).collect::<Vec<_>>().join(", "),
                self.number(),
            )
        })
    }

    /// A conflict that is not looked for fails: the whole is then rolled back, so SQLite need not
    /// keep a journal of each statement to undo it alone.
    fn write(&self, updates: usize, inserts: usize, has_stretch: bool) -> &str {
        self.write[updates][inserts][usize::from(has_stretch)].get_or_init(|| {
            let Self { table, keys, columns, .. } = self;
            let names = columns.join(", ");
            let set: Vec<String> = columns.iter().map(|c| format!("{c} = w.{c}")).collect();
            let update = format!(
                "WITH w (id, number, expected, revision, {names}) AS ({})
                 UPDATE OR FAIL {table} SET revision = w.revision, {}
                 FROM w
                 WHERE {table}.number = {} AND {table}.revision = w.expected;",
                values(SIZES[updates], 4 + columns.len()),
                set.join(", "),
                self.number(),
            );
            let insert = format!(
                "INSERT OR FAIL INTO {table} (id, number, revision, {names})
                 SELECT * FROM ({})
                 WHERE column1 IS NOT NULL
                   AND NOT EXISTS (SELECT 1 FROM {keys} AS k WHERE k.id = column1);",
                values(SIZES[inserts], 3 + columns.len()),
            );
            let stretch = format!(
                "INSERT OR FAIL INTO {keys} (id, number)
                 SELECT * FROM ({})
                 WHERE column1 IS NOT NULL;",
                values(STRETCH, 2),
            );
            format!(
                "BEGIN IMMEDIATE; {} {} {}
                 UPDATE state SET clock = coalesce(?, clock),
                                  {table}_indexed = coalesce(?, {table}_indexed);
                 COMMIT",
                Some(update).filter(|_| updates > 0).unwrap_or_default(),
                Some(insert).filter(|_| inserts > 0).unwrap_or_default(),
                Some(stretch).filter(|_| has_stretch).unwrap_or_default(),
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

/// The index of a table, read from the file.
pub(super) async fn read_index<T: Table>(
    connection: &mut SqliteConnection,
) -> Result<Index, sqlx::Error> {
    let statements = T::statements();
    let mut recent = KeyMap::default();
    let mut rows = sqlx::query(statements.recent.as_str()).fetch(&mut *connection);
    while let Some(row) = rows.try_next().await? {
        recent.insert(Key::from_stored(row.try_get::<&str, _>(0)?), row.try_get(1)?);
    }
    drop(rows);
    let last = sqlx::query_scalar(statements.last.as_str()).fetch_one(connection).await?;
    Ok(Index::new(recent, last))
}

/// How the row of a key is found: by its key or by its number.
fn whereabouts<'k>(index: &Index, key: &'k Key) -> (Option<&'k str>, Option<i64>) {
    match index.number(key) {
        None => (Some(key.as_str()), None),
        number => (None, number),
    }
}

pub(super) async fn load<T: Table>(
    connection: &mut SqliteConnection,
    index: &Index,
    keys: &[Key],
) -> Result<Vec<Option<Row<T::State>>>, sqlx::Error> {
    let mut rows = Vec::with_capacity(keys.len());
    for keys in keys.chunks(MAX_ROWS) {
        let wanted: Vec<_> = keys.iter().map(|key| whereabouts(index, key)).collect();
        rows.extend(load_some::<T>(connection, &wanted).await?);
    }
    Ok(rows)
}

/// Loads at most [`MAX_ROWS`] rows, each by its key or its number.
async fn load_some<T: Table>(
    connection: &mut SqliteConnection,
    wanted: &[(Option<&str>, Option<i64>)],
) -> Result<Vec<Option<Row<T::State>>>, sqlx::Error> {
    let size = place(wanted.len());
    let mut query = sqlx::query(T::statements().load(size));
    for (i, (id, number)) in (0_i64..).zip(wanted) {
        query = query.bind(i).bind(*id).bind(*number);
    }
    let mut rows = vec![None; wanted.len()];
    for row in query.fetch_all(connection).await? {
        let i: i64 = row.try_get(0)?;
        rows[usize::try_from(i).unwrap_or_default()] = Some(T::row(&row, 1)?);
    }
    Ok(rows)
}

/// Stores at most [`MAX_ROWS`] rows in one transaction, and with them the clock and a stretch of new
/// keys, if one is due; tells for each row whether it was accepted.
pub(super) async fn store<T: Table>(
    connection: &mut SqliteConnection,
    index: &mut Index,
    writes: &[Write<T::State>],
    floor: i64,
    clock: Option<Timestamp>,
) -> Result<Vec<bool>, Failure> {
    let statements = T::statements();
    let (updates, inserts): (Vec<usize>, Vec<usize>) = (0..writes.len())
        .filter(|&i| {
            let Write { key, expected, row } = &writes[i];
            expected.is_some() || (row.revision.get() > floor && index.number(key).is_none())
        })
        .partition(|&i| writes[i].expected.is_some());
    let places = [place(updates.len()), place(inserts.len())];
    let first = index.next();
    let stretch = index.due();
    let has_stretch = !stretch.keys.is_empty();
    // How each is found.
    let found: Vec<_> = updates
        .iter()
        .map(|&i| whereabouts(index, &writes[i].key))
        .chain((first..).take(inserts.len()).map(|number| (None, Some(number))))
        .collect();
    let mut query = sqlx::query(statements.write(places[0], places[1], has_stretch));
    // An update has one more: the revision that it expects.
    for (chosen, found, place, more) in [
        (&updates, &found[..updates.len()], places[0], 4),
        (&inserts, &found[updates.len()..], places[1], 3),
    ] {
        for (&i, (_, number)) in chosen.iter().zip(found) {
            let Write { key, expected, row } = &writes[i];
            query = query.bind(key.as_str()).bind(*number);
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
    if has_stretch {
        for (key, number) in &stretch.keys {
            query = query.bind(key.as_str()).bind(*number);
        }
        for _ in 0..(STRETCH - stretch.keys.len()) * 2 {
            query = query.bind(None::<i64>);
        }
    }
    query = query.bind(clock.map(Timestamp::as_micros)).bind(stretch.complete);
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
    for (chosen, found) in
        [(&updates, &found[..updates.len()]), (&inserts, &found[updates.len()..])]
    {
        if chosen.is_empty() {
            continue;
        }
        let count = counts.next().map_or(0, SqliteQueryResult::rows_affected);
        if count == chosen.len() as u64 {
            for &i in chosen {
                accepted[i] = true;
            }
        } else if count > 0 {
            let rows = load_some::<T>(connection, found).await.map_err(Failure::Unknown)?;
            // Accepted is what is there as it was to be written: nobody else has written since,
            // and nobody writes the same stamp twice.
            for (&i, row) in chosen.iter().zip(&rows) {
                accepted[i] = row.as_ref() == Some(&writes[i].row);
            }
        }
    }
    index.taken(&stretch);
    let added = inserts.iter().zip(first..).filter(|&(&i, _)| accepted[i]);
    let added = added.map(|(&i, number)| (writes[i].key.clone(), number));
    index.added(added, first + i64::try_from(inserts.len()).unwrap_or(0));
    Ok(accepted)
}

pub(super) async fn list<T: Table>(
    connection: &mut SqliteConnection,
    index: &Index,
    query: &ListQuery,
) -> Result<Vec<(Name, Row<T::State>)>, sqlx::Error> {
    let (lower, upper) = query.bounds();
    let is_wanted = query.filter();
    let recent = index.recent().filter(|(key, _)| is_wanted(key)).collect();
    let recent: Vec<i64> =
        first(recent, query.limit).into_iter().map(|(_, number)| number).collect();
    let rows = sqlx::query(T::statements().list.as_str())
        .bind(lower.as_str())
        .bind(upper.as_str())
        .bind(query.after().as_ref().map(Key::as_str))
        .bind(query.prefix().as_str())
        .bind(i64::try_from(query.limit).unwrap_or(i64::MAX))
        .bind(serde_json::to_string(&recent).unwrap_or_default())
        .fetch_all(connection)
        .await?;
    rows.iter()
        .map(|row| {
            let key = Key::from_stored(row.try_get::<&str, _>(0)?);
            Ok((Name::from_stored(key.name()), T::row(row, 1)?))
        })
        .collect()
}

/// Deletes what is idle among the next rows of the table of keys, and raises the floor with it, in
/// the transaction that the caller has begun. Also tells the largest stamp deleted, or 0.
pub(super) async fn clean_up<T: Table>(
    connection: &mut SqliteConnection,
    after: &Cursor,
    retention_micros: i64,
    now: Timestamp,
) -> Result<(Cleaned, i64), sqlx::Error> {
    let statements = T::statements();
    let end: Option<String> = sqlx::query_scalar(statements.chunk_end.as_str())
        .bind(after.key.as_str())
        .bind(i64::try_from(Cursor::CHUNK).unwrap_or(i64::MAX) - 1)
        .fetch_optional(&mut *connection)
        .await?;
    let next = end.map(|id| Cursor { table: after.table, key: Key::from_stored(id) });
    // Every key begins with a digit.
    let last = next.as_ref().map_or("\u{10ffff}", |next| next.key.as_str());
    let deleted = sqlx::query(statements.delete_idle.as_str())
        .bind(after.key.as_str())
        .bind(last)
        .bind(retention_micros)
        .bind(now.as_micros())
        .fetch_all(&mut *connection)
        .await?;
    let mut floor = 0;
    for row in &deleted {
        floor = floor.max(row.try_get(0)?);
    }
    if !deleted.is_empty() {
        sqlx::query(statements.delete_keys.as_str())
            .bind(after.key.as_str())
            .bind(last)
            .execute(&mut *connection)
            .await?;
        sqlx::query(RAISE_FLOOR).bind(floor).execute(&mut *connection).await?;
    }
    Ok((Cleaned { deleted: deleted.len() as u64, next }, floor))
}
