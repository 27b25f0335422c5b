//! The table of leases.

use std::sync::LazyLock;

use sqlx::sqlite::SqliteRow;

use super::Indexes;
use super::index::Index;
use super::table::{Bound, Statements, Table, lease_columns};
use crate::domain::lease::{Lease, LeaseMachine};
use crate::domain::version::Version;
use crate::store::Row;
use crate::store::columns::status_number;

/// The columns that a claim has in every table, behind the revision.
pub(super) const CLAIM: [&str; 10] = [
    "version",
    "status",
    "owner_id",
    "attempt_id",
    "grant_id",
    "ttl_ms",
    "acquired_at",
    "expires_at",
    "recovered_from",
    "metadata",
];

static STATEMENTS: LazyLock<Statements> = LazyLock::new(|| {
    let list = format!("revision, {}", CLAIM.join(", "));
    let idle = "CASE status WHEN 0 THEN expires_at ELSE revision END + ?3";
    Statements::of("leases", "lease_keys", CLAIM.to_vec(), &list, idle)
});

impl Table for LeaseMachine {
    fn statements() -> &'static Statements {
        &STATEMENTS
    }

    fn index(indexes: &mut Indexes) -> &mut Option<Index> {
        &mut indexes.leases
    }

    fn row(row: &SqliteRow, first: usize) -> Result<Row<Lease>, sqlx::Error> {
        Ok(lease_columns(row, first)?.into_row())
    }

    fn bind<'q>(query: Bound<'q>, lease: &Lease) -> Bound<'q> {
        bind_lease(query, lease)
    }
}

/// Adds the columns that a claim has in every table.
pub(super) fn bind_lease<'q>(query: Bound<'q>, lease: &Lease) -> Bound<'q> {
    query
        .bind(lease.version.get())
        .bind(status_number(lease.status))
        .bind(lease.owner_id.as_str())
        .bind(lease.attempt_id.map(|id| id.to_string()))
        .bind(lease.grant_id)
        .bind(lease.ttl.as_millis())
        .bind(lease.acquired_at.as_micros())
        .bind(lease.expires_at.as_micros())
        .bind(lease.recovered_from.map(Version::get))
        .bind(lease.metadata.as_deref())
}
