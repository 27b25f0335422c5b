//! The statements, the same for each table. Each is one transaction of its own, and none waits for
//! a row lock.

use std::collections::HashSet;

use sqlx::postgres::{PgArguments, PgConnection, PgRow};
use sqlx::query::Query;
use sqlx::{Connection, Encode, Postgres, Row as _, Type};

use super::link::{micros, timestamp};
use crate::domain::Machine;
use crate::domain::ids::{Key, Name};
use crate::domain::time::Timestamp;
use crate::domain::version::Version;
use crate::store::columns::LeaseColumns;
use crate::store::{Cleaned, Cursor, ListQuery, Moment, Row, Write};

/// The texts of a table's statements; made by [`statements!`].
pub(super) struct Statements {
    pub(super) load: &'static str,
    pub(super) update: &'static str,
    pub(super) insert: &'static str,
    /// The same for a lone row, whose parameters are no arrays.
    pub(super) update_one: &'static str,
    pub(super) insert_one: &'static str,
    pub(super) list: &'static str,
    pub(super) scan: &'static str,
    pub(super) delete_idle: &'static str,
}

/// The parameters of a write, which are arrays of a column each; for a lone row, its columns.
pub(super) struct Columns<'q, 'r, S> {
    query: Query<'q, Postgres, PgArguments>,
    writes: &'r [&'q Write<S>],
}

impl<'q, S> Columns<'q, '_, S> {
    /// Adds what `of` takes from each state.
    pub(super) fn add<T>(self, of: impl Fn(&'q S) -> T) -> Self
    where
        T: Encode<'q, Postgres> + Type<Postgres> + 'q,
        Vec<T>: Encode<'q, Postgres> + Type<Postgres> + 'q,
    {
        self.add_of(|write| of(&write.row.state))
    }

    fn add_of<T>(self, of: impl Fn(&'q Write<S>) -> T) -> Self
    where
        T: Encode<'q, Postgres> + Type<Postgres> + 'q,
        Vec<T>: Encode<'q, Postgres> + Type<Postgres> + 'q,
    {
        let Self { query, writes } = self;
        let query = match writes {
            [write] => query.bind(of(write)),
            _ => query.bind(writes.iter().map(|write| of(write)).collect::<Vec<T>>()),
        };
        Self { query, writes }
    }
}

/// A machine whose rows are in a table of their own.
pub(super) trait Table: Machine {
    const STATEMENTS: Statements;

    /// Reads a row whose columns begin at `first`.
    fn row(row: &PgRow, first: usize) -> Result<Row<Self::State>, sqlx::Error>;

    /// Adds the columns behind the revision.
    fn bind<'q, 'r>(columns: Columns<'q, 'r, Self::State>) -> Columns<'q, 'r, Self::State>;
}

/// What all writes must find: the time that the decision is good for (`$4`, `$5`), and the timeline
/// (`$6`) that it was made on. That needs no saying of what was loaded a moment ago, but of what was
/// only known. `synchronous_commit` is set here too, since a session's setting does not survive a
/// transaction-mode pooler.
macro_rules! guard {
    () => {
        "now() >= $4 AND now() <= coalesce($5, 'infinity')
         AND starts_with(pg_walfile_name(pg_current_wal_lsn()), $6)
         AND CASE current_setting('synchronous_commit')
             WHEN 'on' THEN 'on'
             ELSE set_config('synchronous_commit', 'on', true) END IS NOT NULL"
    };
}
pub(super) use guard;

/// Spells the statements of one table. The columns behind the revision come with the numbers of
/// their parameters. `$1` is the key, `$2` the revision that an update expects, `$3` the new one, and
/// `$4` to `$6` are the guard. `list` says how to select the columns for a list, and `idle` since
/// when a row must be idle to be deleted, `$1` being the retention in microseconds.
macro_rules! statements {
    (
        $table:literal,
        list: $list:literal,
        idle: $idle:literal,
        $($number:literal $column:literal $type:literal),* $(,)?
    ) => {
        $crate::store::postgres::table::Statements {
            // `now()` is the start of this statement's own transaction, so it is not later than
            // the snapshot that the rows come from. (`clock_timestamp()` would be, and would
            // declare live leases dead.)
            load: concat!(
                "/* load ", $table, " */
                SELECT wanted.ord, now(), f.floor,
                       (SELECT CASE WHEN pg_is_in_recovery() THEN NULL
                               ELSE substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) END),
                       l.revision",
                $(", l.", $column,)*
                " FROM fencepost.floor AS f
                CROSS JOIN unnest($1::text[]) WITH ORDINALITY AS wanted (id, ord)
                LEFT JOIN ", $table, " AS l ON l.id = wanted.id"
            ),
            // Rows that somebody else has locked are left out: so this neither waits nor
            // deadlocks. The lock re-checks the revision against the newest version of the row, and
            // keeps that where it is.
            update: concat!(
                "/* update ", $table, " */
                WITH w AS MATERIALIZED (
                    SELECT n.*, l.ctid AS place
                    FROM unnest($1::text[], $2::bigint[], $3::bigint[]",
                    $(", $", $number, "::", $type, "[]",)*
                    ") WITH ORDINALITY AS n (id, expected, revision", $(", ", $column,)* ", ord)
                    JOIN ", $table, " AS l ON l.id = n.id AND l.revision = n.expected
                    WHERE (SELECT ", $crate::store::postgres::table::guard!(), ")
                    FOR NO KEY UPDATE OF l SKIP LOCKED
                ), updated AS (
                    UPDATE ", $table, " AS l
                    SET revision = w.revision", $(", ", $column, " = w.", $column,)* "
                    FROM w
                    WHERE l.ctid = w.place
                    RETURNING w.ord
                )
                SELECT count(*), CASE WHEN count(*) < cardinality($3) THEN array_agg(ord) END
                FROM updated"
            ),
            // New keys start above the floor, which clean-up cannot raise while this holds its
            // row. If clean-up has it, nothing is inserted, and the engine tries again. The rows
            // come, and are inserted, in the order of their keys: two replicas that insert the same
            // ones wait for each other in one direction only.
            insert: concat!(
                "/* insert ", $table, " */
                WITH f AS MATERIALIZED (
                    SELECT floor FROM fencepost.floor
                    WHERE ", $crate::store::postgres::table::guard!(), "
                    FOR SHARE SKIP LOCKED
                ), inserted AS (
                    INSERT INTO ", $table, " (id, revision", $(", ", $column,)* ")
                    SELECT n.id, n.revision", $(", n.", $column,)* "
                    FROM f
                    CROSS JOIN unnest($1::text[], $2::bigint[], $3::bigint[]",
                        $(", $", $number, "::", $type, "[]",)*
                        ") AS n (id, expected, revision", $(", ", $column,)* ")
                    WHERE n.revision > f.floor
                    ON CONFLICT DO NOTHING
                    RETURNING id
                )
                SELECT count(*), CASE WHEN count(*) < cardinality($3) THEN array_agg(id) END
                FROM inserted"
            ),
            // A lone row is what a service that is not busy writes: an array for each column, and the
            // plan that takes them apart, would be a quarter of the time that its caller waits.
            update_one: concat!(
                "/* update one ", $table, " */
                UPDATE ", $table, " AS l
                SET revision = $3::bigint", $(", ", $column, " = $", $number, "::", $type,)* "
                FROM (
                    SELECT id
                    FROM ", $table, "
                    WHERE id = $1::text AND revision = $2::bigint AND ", $crate::store::postgres::table::guard!(), "
                    FOR NO KEY UPDATE SKIP LOCKED
                ) AS w
                WHERE l.id = w.id"
            ),
            insert_one: concat!(
                "/* insert one ", $table, " */
                INSERT INTO ", $table, " (id, revision", $(", ", $column,)* ")
                SELECT $1::text, $3::bigint", $(", $", $number, "::", $type,)* "
                FROM (
                    SELECT
                    FROM fencepost.floor
                    WHERE $2::bigint IS NULL AND $3::bigint > floor AND ", $crate::store::postgres::table::guard!(), "
                    FOR SHARE SKIP LOCKED
                ) AS f
                ON CONFLICT DO NOTHING"
            ),
            list: concat!(
                "/* list ", $table, " */
                SELECT id, now(), ", $list, "
                FROM ", $table, "
                WHERE id BETWEEN $1 AND $2 AND ($3::text IS NULL OR id <> $3)
                  AND starts_with(id, $4)
                ORDER BY id
                LIMIT $5"
            ),
            // Looks at the next rows in the order of their keys; whether each is idle. A clock
            // beyond what can be counted (2^53 - 2^40 µs) must not delete what is in use.
            scan: concat!(
                "/* scan ", $table, " */
                SELECT id,
                       ", $idle, " <= (extract(epoch FROM now()) * 1000000)::bigint
                         AND now() < '2255-05-01'
                FROM ", $table, " AS l
                WHERE id > $2
                ORDER BY id
                LIMIT $3"
            ),
            // Deletes what is still idle and not in use by anybody, and raises the floor with it.
            delete_idle: concat!(
                "/* clean up ", $table, " */
                WITH idle AS MATERIALIZED (
                    SELECT l.id
                    FROM unnest($2::text[]) AS n (id) JOIN ", $table, " AS l ON l.id = n.id
                    WHERE ", $idle, " <= (extract(epoch FROM now()) * 1000000)::bigint
                      AND now() < '2255-05-01'
                    FOR UPDATE OF l SKIP LOCKED
                ), deleted AS (
                    DELETE FROM ", $table, " AS l USING idle WHERE l.id = idle.id
                    RETURNING l.revision
                ), raised AS (
                    UPDATE fencepost.floor
                    SET floor = greatest(floor, (SELECT max(revision) FROM deleted))
                    WHERE EXISTS (SELECT FROM deleted)
                )
                SELECT count(*) FROM deleted"
            ),
        }
    };
}
pub(super) use statements;

const NOW: &str = "SELECT now()";

const LOCK_FLOOR: &str = "SELECT floor FROM fencepost.floor FOR UPDATE";

/// What a load brings besides the rows.
pub(super) struct Surroundings {
    pub(super) now: Timestamp,
    pub(super) floor: i64,
    /// `None` on a server in recovery.
    pub(super) timeline: Option<u32>,
}

/// Reads the columns that every table has, which begin at `first`.
pub(super) fn lease_columns(row: &PgRow, first: usize) -> Result<LeaseColumns, sqlx::Error> {
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

pub(super) async fn load<T: Table>(
    connection: &mut PgConnection,
    wanted: &[Key],
) -> Result<(Vec<Option<Row<T::State>>>, Surroundings), sqlx::Error> {
    let ids: Vec<&str> = wanted.iter().map(Key::as_str).collect();
    let found = sqlx::query(T::STATEMENTS.load).bind(ids).fetch_all(connection).await?;
    let mut rows = vec![None; wanted.len()];
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
            rows[usize::try_from(ord - 1).unwrap_or_default()] = Some(T::row(row, 4)?);
        }
    }
    Ok((rows, surroundings))
}

/// What a write must find at the server besides its rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Guard {
    pub(super) moment: Moment,
    pub(super) timeline: u32,
}

/// A write with its parameters.
fn write<'q, T: Table>(
    statement: &'static str,
    guard: Guard,
    writes: &[&'q Write<T::State>],
) -> Query<'q, Postgres, PgArguments> {
    let Guard { moment, timeline } = guard;
    let Columns { query, .. } = Columns { query: sqlx::query(statement), writes }
        .add_of(|write| write.key.as_str())
        .add_of(|write| write.expected.map(Version::get))
        .add_of(|write| write.row.revision.get());
    let query = query
        .bind(timestamp(moment.clock.now))
        .bind(moment.until.map(timestamp))
        .bind(format!("{timeline:08X}"));
    T::bind(Columns { query, writes }).query
}

/// Updates rows that exist; tells for each whether it was accepted.
pub(super) async fn update<T: Table>(
    connection: &mut PgConnection,
    guard: Guard,
    writes: &[&Write<T::State>],
) -> Result<Vec<bool>, sqlx::Error> {
    if writes.len() == 1 {
        let done = write::<T>(T::STATEMENTS.update_one, guard, writes).execute(connection).await?;
        return Ok(vec![done.rows_affected() == 1]);
    }
    let row = write::<T>(T::STATEMENTS.update, guard, writes).fetch_one(connection).await?;
    if usize::try_from(row.try_get::<i64, _>(0)?) == Ok(writes.len()) {
        return Ok(vec![true; writes.len()]);
    }
    let mut accepted = vec![false; writes.len()];
    for ord in row.try_get::<Option<Vec<i64>>, _>(1)?.unwrap_or_default() {
        accepted[usize::try_from(ord - 1).unwrap_or_default()] = true;
    }
    Ok(accepted)
}

/// Inserts rows that do not exist, which must come in the order of their keys; tells for each
/// whether it was accepted.
pub(super) async fn insert<T: Table>(
    connection: &mut PgConnection,
    guard: Guard,
    writes: &[&Write<T::State>],
) -> Result<Vec<bool>, sqlx::Error> {
    if writes.len() == 1 {
        let done = write::<T>(T::STATEMENTS.insert_one, guard, writes).execute(connection).await?;
        return Ok(vec![done.rows_affected() == 1]);
    }
    let row = write::<T>(T::STATEMENTS.insert, guard, writes).fetch_one(connection).await?;
    if usize::try_from(row.try_get::<i64, _>(0)?) == Ok(writes.len()) {
        return Ok(vec![true; writes.len()]);
    }
    let accepted: HashSet<String> =
        row.try_get::<Option<Vec<String>>, _>(1)?.unwrap_or_default().into_iter().collect();
    Ok(writes.iter().map(|write| accepted.contains(write.key.as_str())).collect())
}

/// A stretch of rows, and the server's time.
type Stretch<S> = (Vec<(Name, Row<S>)>, Timestamp);

pub(super) async fn list<T: Table>(
    connection: &mut PgConnection,
    query: &ListQuery,
) -> Result<Stretch<T::State>, sqlx::Error> {
    let (lower, upper) = query.bounds();
    let found = sqlx::query(T::STATEMENTS.list)
        .bind(lower.as_str())
        .bind(upper.as_str())
        .bind(query.after().as_ref().map(Key::as_str))
        .bind(query.prefix().as_str())
        .bind(i64::try_from(query.limit).unwrap_or(i64::MAX))
        .fetch_all(&mut *connection)
        .await?;
    let now = match found.first() {
        Some(row) => row.try_get(1)?,
        None => sqlx::query(NOW).fetch_one(&mut *connection).await?.try_get(0)?,
    };
    let mut rows = Vec::with_capacity(found.len());
    for row in &found {
        let key = Key::from_stored(row.try_get::<&str, _>(0)?);
        rows.push((Name::from_stored(key.name()), T::row(row, 2)?));
    }
    Ok((rows, micros(now)))
}

/// Deletes what is idle among the next keys.
///
/// The floor is locked first, and only when there is something to delete: inserts are held off for
/// that moment.
pub(super) async fn clean_up<T: Table>(
    connection: &mut PgConnection,
    retention_micros: i64,
    after: &Cursor,
) -> Result<Cleaned, sqlx::Error> {
    let rows = sqlx::query(T::STATEMENTS.scan)
        .bind(retention_micros)
        .bind(after.key.as_str())
        .bind(i64::try_from(Cursor::CHUNK).unwrap_or(i64::MAX))
        .fetch_all(&mut *connection)
        .await?;
    let mut idle: Vec<&str> = Vec::new();
    for row in &rows {
        // NULL for what is kept for ever.
        if row.try_get::<Option<bool>, _>(1)?.unwrap_or(false) {
            idle.push(row.try_get(0)?);
        }
    }
    let last: Option<&str> = rows.last().map(|row| row.try_get(0)).transpose()?;
    let last = last.map(|id| Cursor { table: after.table, key: Key::from_stored(id) });
    let mut deleted = 0_i64;
    if !idle.is_empty() {
        let mut transaction = connection.begin().await?;
        // Waits for the inserts of the moment, unlike anything on the request path.
        sqlx::raw_sql("SET LOCAL lock_timeout = '5s'").execute(&mut *transaction).await?;
        sqlx::query(LOCK_FLOOR).execute(&mut *transaction).await?;
        deleted = sqlx::query(T::STATEMENTS.delete_idle)
            .bind(retention_micros)
            .bind(idle)
            .fetch_one(&mut *transaction)
            .await?
            .try_get(0)?;
        transaction.commit().await?;
    }
    let next = last.filter(|_| rows.len() == Cursor::CHUNK);
    Ok(Cleaned { deleted: deleted.unsigned_abs(), next })
}
