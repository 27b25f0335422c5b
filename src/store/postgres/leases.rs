//! The table of leases.

use sqlx::postgres::PgRow;

use super::table::{Columns, Statements, Table, lease_columns, statements};
use crate::domain::lease::{Lease, LeaseMachine};
use crate::domain::version::Version;
use crate::store::Row;
use crate::store::columns::status_number;

impl Table for LeaseMachine {
    const STATEMENTS: Statements = statements! {
        "fencepost.leases",
        list: "revision, version, status, owner_id, attempt_id, grant_id, ttl_ms, acquired_at,
               expires_at, recovered_from, metadata",
        idle: "CASE l.status WHEN 0 THEN l.expires_at ELSE l.revision END + $1",
        7 "version" "bigint", 8 "status" "smallint", 9 "owner_id" "text", 10 "attempt_id" "uuid",
        11 "grant_id" "bigint", 12 "ttl_ms" "bigint", 13 "acquired_at" "bigint",
        14 "expires_at" "bigint", 15 "recovered_from" "bigint", 16 "metadata" "text",
    };

    fn row(row: &PgRow, first: usize) -> Result<Row<Lease>, sqlx::Error> {
        Ok(lease_columns(row, first)?.into_row())
    }

    fn bind<'q, 'r>(columns: Columns<'q, 'r, Lease>) -> Columns<'q, 'r, Lease> {
        bind_lease(columns, |lease| lease)
    }
}

/// Adds the columns that a claim has in every table.
pub(super) fn bind_lease<'q, 'r, S>(
    columns: Columns<'q, 'r, S>,
    of: impl Fn(&'q S) -> &'q Lease,
) -> Columns<'q, 'r, S> {
    columns
        .add(|row| of(row).version.get())
        .add(|row| status_number(of(row).status))
        .add(|row| of(row).owner_id.as_str())
        .add(|row| of(row).attempt_id)
        .add(|row| of(row).grant_id)
        .add(|row| of(row).ttl.as_millis())
        .add(|row| of(row).acquired_at.as_micros())
        .add(|row| of(row).expires_at.as_micros())
        .add(|row| of(row).recovered_from.map(Version::get))
        .add(|row| of(row).metadata.as_deref())
}
