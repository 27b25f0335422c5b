//! The statements, the same for each table. Each is one transaction of its own, and none waits for
//! a row lock.

use std::collections::HashSet;

use sqlx::postgres::{PgArguments, PgConnection, PgRow};
use sqlx::query::Query;
use sqlx::{Connection, Postgres, Row as _};

use super::link::micros;
use crate::domain::Machine;
use crate::domain::ids::{Key, Name};
use crate::domain::time::Timestamp;
use crate::domain::version::Version;
use crate::store::columns::{LeaseColumns, kind_number};
use crate::store::{Cleaned, Cursor, ListQuery, Row, Write};

/// The texts of a table's statements; made by [`statements!`].
pub(super) struct Statements {
    pub(super) load: &'static str,
    pub(super) update: &'static str,
    pub(super) insert: &'static str,
    pub(super) list: &'static str,
    pub(super) scan: &'static str,
    pub(super) delete_idle: &'static str,
}

/// A query with its parameters.
pub(super) type Bound<'q> = Query<'q, Postgres, PgArguments>;

/// A machine whose rows are in a table of their own.
pub(super) trait Table: Machine {
    const STATEMENTS: Statements;

    /// Reads a row whose columns begin at `first`.
    fn row(row: &PgRow, first: usize) -> Result<Row<Self::State>, sqlx::Error>;

    /// Adds a parameter for each column behind the revision.
    fn bind<'q>(query: Bound<'q>, writes: &[&'q Write<Self::State>]) -> Bound<'q>;
}

/// Spells the statements of one table. The columns behind the revision come with the numbers of
/// their parameters; `$1` to `$4` are the key, `$5` is the revision that an update expects, and `$6`
/// the new one. `list` says how to select
/// the columns for a list, and `idle` since when a row must be idle to be deleted, `$1` being the
/// retention in microseconds.
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
                       CASE WHEN pg_is_in_recovery() THEN NULL
                            ELSE substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) END,
                       l.revision",
                $(", l.", $column,)*
                " FROM fencepost.floor AS f
                CROSS JOIN unnest($1::smallint[], $2::text[], $3::text[], $4::text[])
                     WITH ORDINALITY AS wanted (kind, namespace, scope, key, ord)
                LEFT JOIN ", $table, " AS l
                  ON l.kind = wanted.kind AND l.namespace = wanted.namespace
                 AND l.scope = wanted.scope AND l.key = wanted.key"
            ),
            // Rows are locked in the order of their keys, and those that somebody else has locked
            // are left out: so this neither waits nor deadlocks. The lock re-checks the revision
            // against the newest version of the row. `synchronous_commit` is set here too, since a
            // session's setting does not survive a transaction-mode pooler.
            update: concat!(
                "/* update ", $table, " */
                WITH w AS MATERIALIZED (
                    SELECT n.*
                    FROM unnest($1::smallint[], $2::text[], $3::text[], $4::text[], $5::bigint[],
                                $6::bigint[]",
                    $(", $", $number, "::", $type, "[]",)*
                    ") WITH ORDINALITY AS n (kind, namespace, scope, key, expected, revision",
                    $(", ", $column,)*
                    ", ord)
                    JOIN ", $table, " AS l
                      ON l.kind = n.kind AND l.namespace = n.namespace AND l.scope = n.scope
                     AND l.key = n.key AND l.revision = n.expected
                    WHERE (SELECT set_config('synchronous_commit', 'on', true)) IS NOT NULL
                    ORDER BY l.kind, l.namespace, l.scope, l.key
                    FOR NO KEY UPDATE OF l SKIP LOCKED
                )
                UPDATE ", $table, " AS l
                SET revision = w.revision", $(", ", $column, " = w.", $column,)* "
                FROM w
                WHERE l.kind = w.kind AND l.namespace = w.namespace AND l.scope = w.scope
                  AND l.key = w.key
                RETURNING w.ord"
            ),
            // New keys start above the floor, which clean-up cannot raise while this holds its
            // row. If clean-up has it, nothing is inserted, and the engine tries again.
            insert: concat!(
                "/* insert ", $table, " */
                WITH f AS MATERIALIZED (
                    SELECT floor FROM fencepost.floor
                    WHERE (SELECT set_config('synchronous_commit', 'on', true)) IS NOT NULL
                    FOR SHARE SKIP LOCKED
                )
                INSERT INTO ", $table, " (kind, namespace, scope, key, revision",
                    $(", ", $column,)* ")
                SELECT n.kind, n.namespace, n.scope, n.key, n.revision", $(", n.", $column,)* "
                FROM f
                CROSS JOIN unnest($1::smallint[], $2::text[], $3::text[], $4::text[],
                                  $5::bigint[], $6::bigint[]",
                    $(", $", $number, "::", $type, "[]",)*
                    ") AS n (kind, namespace, scope, key, expected, revision",
                    $(", ", $column,)* ")
                WHERE n.revision > f.floor
                ORDER BY n.kind, n.namespace COLLATE \"C\", n.scope COLLATE \"C\",
                         n.key COLLATE \"C\"
                ON CONFLICT DO NOTHING
                RETURNING kind, namespace, scope, key"
            ),
            list: concat!(
                "/* list ", $table, " */
                SELECT key, now(), ", $list, "
                FROM ", $table, "
                WHERE kind = $1 AND namespace = $2 AND scope = $3 AND key BETWEEN $4 AND $5
                  AND ($6::text IS NULL OR key <> $6) AND starts_with(key, $7)
                ORDER BY key
                LIMIT $8"
            ),
            // Looks at the next rows in the order of their keys; whether each is idle. A clock
            // beyond what can be counted (2^53 - 2^40 µs) must not delete what is in use.
            scan: concat!(
                "/* scan ", $table, " */
                SELECT kind, namespace, scope, key,
                       ", $idle, " <= (extract(epoch FROM now()) * 1000000)::bigint
                         AND now() < '2255-05-01'
                FROM ", $table, " AS l
                WHERE (kind, namespace, scope, key) > ($2, $3, $4, $5)
                ORDER BY kind, namespace, scope, key
                LIMIT $6"
            ),
            // Deletes what is still idle and not in use by anybody, and raises the floor with it.
            delete_idle: concat!(
                "/* clean up ", $table, " */
                WITH idle AS MATERIALIZED (
                    SELECT l.kind, l.namespace, l.scope, l.key
                    FROM unnest($2::smallint[], $3::text[], $4::text[], $5::text[])
                         AS n (kind, namespace, scope, key)
                    JOIN ", $table, " AS l
                      ON l.kind = n.kind AND l.namespace = n.namespace AND l.scope = n.scope
                     AND l.key = n.key
                    WHERE ", $idle, " <= (extract(epoch FROM now()) * 1000000)::bigint
                      AND now() < '2255-05-01'
                    ORDER BY l.kind, l.namespace, l.scope, l.key
                    FOR UPDATE OF l SKIP LOCKED
                ), deleted AS (
                    DELETE FROM ", $table, " AS l
                    USING idle AS i
                    WHERE l.kind = i.kind AND l.namespace = i.namespace AND l.scope = i.scope
                      AND l.key = i.key
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

fn keys<'q>(query: Bound<'q>, keys: impl Iterator<Item = &'q Key> + Clone) -> Bound<'q> {
    query
        .bind(keys.clone().map(|key| kind_number(key.kind)).collect::<Vec<_>>())
        .bind(keys.clone().map(|key| key.namespace.as_str()).collect::<Vec<_>>())
        .bind(keys.clone().map(|key| key.scope.as_str()).collect::<Vec<_>>())
        .bind(keys.map(|key| key.name.as_str()).collect::<Vec<_>>())
}

pub(super) async fn load<T: Table>(
    connection: &mut PgConnection,
    wanted: &[Key],
) -> Result<(Vec<Option<Row<T::State>>>, Surroundings), sqlx::Error> {
    let query = keys(sqlx::query(T::STATEMENTS.load), wanted.iter());
    let found = query.fetch_all(connection).await?;
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

async fn write<T: Table>(
    connection: &mut PgConnection,
    statement: &'static str,
    writes: &[&Write<T::State>],
) -> Result<Vec<PgRow>, sqlx::Error> {
    let expected: Vec<Option<i64>> =
        writes.iter().map(|write| write.expected.map(Version::get)).collect();
    let revisions: Vec<i64> = writes.iter().map(|write| write.row.revision.get()).collect();
    let query = keys(sqlx::query(statement), writes.iter().map(|write| &write.key));
    T::bind(query.bind(expected).bind(revisions), writes).fetch_all(connection).await
}

/// Updates rows that exist; tells for each whether it was accepted.
pub(super) async fn update<T: Table>(
    connection: &mut PgConnection,
    writes: &[&Write<T::State>],
) -> Result<Vec<bool>, sqlx::Error> {
    let mut accepted = vec![false; writes.len()];
    for row in write::<T>(connection, T::STATEMENTS.update, writes).await? {
        let ord: i64 = row.try_get(0)?;
        accepted[usize::try_from(ord - 1).unwrap_or_default()] = true;
    }
    Ok(accepted)
}

/// Inserts rows that do not exist; tells for each whether it was accepted.
pub(super) async fn insert<T: Table>(
    connection: &mut PgConnection,
    writes: &[&Write<T::State>],
) -> Result<Vec<bool>, sqlx::Error> {
    let rows = write::<T>(connection, T::STATEMENTS.insert, writes).await?;
    let mut accepted: HashSet<(i16, &str, &str, &str)> = HashSet::with_capacity(rows.len());
    for row in &rows {
        accepted.insert((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?, row.try_get(3)?));
    }
    let is_accepted = |Key { kind, namespace, scope, name }: &Key| {
        let key = (kind_number(*kind), namespace.as_str(), scope.as_str(), name.as_str());
        accepted.contains(&key)
    };
    Ok(writes.iter().map(|write| is_accepted(&write.key)).collect())
}

/// A stretch of rows, and the server's time.
type Stretch<S> = (Vec<(Name, Row<S>)>, Timestamp);

pub(super) async fn list<T: Table>(
    connection: &mut PgConnection,
    query: &ListQuery,
) -> Result<Stretch<T::State>, sqlx::Error> {
    let (lower, upper) = query.bounds();
    let found = sqlx::query(T::STATEMENTS.list)
        .bind(kind_number(query.kind))
        .bind(query.namespace.as_str())
        .bind(query.scope.as_str())
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
    let mut rows = Vec::with_capacity(found.len());
    for row in &found {
        let name: String = row.try_get(0)?;
        rows.push((Name::from_stored(name), T::row(row, 2)?));
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
        .bind(after.kind)
        .bind(&after.namespace)
        .bind(&after.scope)
        .bind(&after.key)
        .bind(i64::try_from(Cursor::CHUNK).unwrap_or(i64::MAX))
        .fetch_all(&mut *connection)
        .await?;
    let mut idle: (Vec<i16>, Vec<String>, Vec<String>, Vec<String>) = Default::default();
    let mut last = None;
    for row in &rows {
        let cursor = Cursor {
            table: after.table,
            kind: row.try_get(0)?,
            namespace: row.try_get(1)?,
            scope: row.try_get(2)?,
            key: row.try_get(3)?,
        };
        // NULL for what is kept for ever.
        if row.try_get::<Option<bool>, _>(4)?.unwrap_or(false) {
            idle.0.push(cursor.kind);
            idle.1.push(cursor.namespace.clone());
            idle.2.push(cursor.scope.clone());
            idle.3.push(cursor.key.clone());
        }
        last = Some(cursor);
    }
    let mut deleted = 0_i64;
    if !idle.0.is_empty() {
        let mut transaction = connection.begin().await?;
        // Waits for the inserts of the moment, unlike anything on the request path.
        sqlx::raw_sql("SET LOCAL lock_timeout = '5s'").execute(&mut *transaction).await?;
        sqlx::query(LOCK_FLOOR).execute(&mut *transaction).await?;
        deleted = sqlx::query(T::STATEMENTS.delete_idle)
            .bind(retention_micros)
            .bind(idle.0)
            .bind(idle.1)
            .bind(idle.2)
            .bind(idle.3)
            .fetch_one(&mut *transaction)
            .await?
            .try_get(0)?;
        transaction.commit().await?;
    }
    let next = last.filter(|_| rows.len() == Cursor::CHUNK);
    Ok(Cleaned { deleted: deleted.unsigned_abs(), next })
}
