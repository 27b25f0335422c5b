//! The table of leases.

use sqlx::postgres::PgRow;

use super::table::{Bound, Statements, Table, lease_columns, statements};
use crate::domain::lease::{Lease, LeaseMachine};
use crate::domain::version::Version;
use crate::store::columns::status_number;
use crate::store::{Row, Write};

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

    fn bind<'q>(query: Bound<'q>, writes: &[&'q Write<Lease>]) -> Bound<'q> {
        bind_lease(query, writes.iter().map(|write| &write.row.state))
    }
}

/// Adds the columns that a claim has in every table.
pub(super) fn bind_lease<'q>(
    query: Bound<'q>,
    leases: impl Iterator<Item = &'q Lease>,
) -> Bound<'q> {
    fn column<'q, T>(leases: &[&'q Lease], of: impl Fn(&'q Lease) -> T) -> Vec<T> {
        leases.iter().map(|lease| of(lease)).collect()
    }
    let leases: Vec<&Lease> = leases.collect();
    query
        .bind(column(&leases, |lease| lease.version.get()))
        .bind(column(&leases, |lease| status_number(lease.status)))
        .bind(column(&leases, |lease| lease.owner_id.as_str()))
        .bind(column(&leases, |lease| lease.attempt_id))
        .bind(column(&leases, |lease| lease.grant_id))
        .bind(column(&leases, |lease| lease.ttl.as_millis()))
        .bind(column(&leases, |lease| lease.acquired_at.as_micros()))
        .bind(column(&leases, |lease| lease.expires_at.as_micros()))
        .bind(column(&leases, |lease| lease.recovered_from.map(Version::get)))
        .bind(column(&leases, |lease| lease.metadata.as_deref()))
}
