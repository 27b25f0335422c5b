//! The table of leases.

use serde_json::{Value, json};
use sqlx::sqlite::SqliteRow;

use super::table::{Statements, Table, lease_columns, statements};
use crate::domain::lease::{Lease, LeaseMachine};
use crate::domain::version::Version;
use crate::store::Row;
use crate::store::columns::status_number;

impl Table for LeaseMachine {
    const STATEMENTS: Statements = statements! {
        "leases",
        list: "revision, version, status, owner_id, attempt_id, grant_id, ttl_ms, acquired_at,
               expires_at, recovered_from, metadata",
        idle: "CASE status WHEN 0 THEN expires_at ELSE revision END + ?9",
        "version" = "w.value ->> 6", "status" = "w.value ->> 7", "owner_id" = "w.value ->> 8",
        "attempt_id" = "w.value ->> 9", "grant_id" = "w.value ->> 10",
        "ttl_ms" = "w.value ->> 11", "acquired_at" = "w.value ->> 12",
        "expires_at" = "w.value ->> 13", "recovered_from" = "w.value ->> 14",
        "metadata" = "w.value ->> 15",
    };

    fn row(row: &SqliteRow, first: usize) -> Result<Row<Lease>, sqlx::Error> {
        Ok(lease_columns(row, first)?.into_row())
    }

    fn push(values: &mut Vec<Value>, lease: &Lease) {
        push_lease(values, lease);
    }
}

/// Adds the columns that a claim has in every table.
pub(super) fn push_lease(values: &mut Vec<Value>, lease: &Lease) {
    values.extend([
        json!(lease.version.get()),
        json!(status_number(lease.status)),
        json!(lease.owner_id.as_str()),
        json!(lease.attempt_id.map(|id| id.to_string())),
        json!(lease.grant_id),
        json!(lease.ttl.as_millis()),
        json!(lease.acquired_at.as_micros()),
        json!(lease.expires_at.as_micros()),
        json!(lease.recovered_from.map(Version::get)),
        json!(lease.metadata),
    ]);
}
