//! The table of records: executions and stored responses.

use std::fmt::Write as _;

use serde_json::{Value, json};
use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;

use super::leases::push_lease;
use super::table::{Statements, Table, lease_columns, statements};
use crate::domain::ids::{Binding, CorrelationId};
use crate::domain::record::{Record, RecordMachine};
use crate::domain::time::Timestamp;
use crate::store::Row;
use crate::store::columns::{LeaseColumns, RecordColumns};

impl Table for RecordMachine {
    const STATEMENTS: Statements = statements! {
        "records",
        // Without what is remembered, which can be large.
        list: "revision, version, status, owner_id, attempt_id, grant_id, ttl_ms, acquired_at,
               expires_at, recovered_from, metadata, binding, correlation_id, completed_at,
               retained_until, NULL, NULL",
        // What is remembered ends with its own time; an execution that is not done binds its
        // intent for ever; a response that is not stored goes the way of a lease.
        idle: "CASE WHEN completed_at IS NOT NULL THEN retained_until
                    WHEN kind = 3 THEN NULL
                    WHEN status = 0 THEN expires_at + ?9
                    ELSE revision + ?9 END",
        "version" = "w.value ->> 6", "status" = "w.value ->> 7", "owner_id" = "w.value ->> 8",
        "attempt_id" = "w.value ->> 9", "grant_id" = "w.value ->> 10",
        "ttl_ms" = "w.value ->> 11", "acquired_at" = "w.value ->> 12",
        "expires_at" = "w.value ->> 13", "recovered_from" = "w.value ->> 14",
        "metadata" = "w.value ->> 15", "binding" = "w.value ->> 16",
        "correlation_id" = "w.value ->> 17", "completed_at" = "w.value ->> 18",
        "retained_until" = "w.value ->> 19", "content" = "w.value ->> 20",
        "body" = "unhex(w.value ->> 21)",
    };

    fn row(row: &SqliteRow, first: usize) -> Result<Row<Record>, sqlx::Error> {
        let rest = first + LeaseColumns::COUNT;
        let columns = RecordColumns {
            binding: row.try_get(rest)?,
            correlation_id: row.try_get(rest + 1)?,
            completed_at: row.try_get(rest + 2)?,
            retained_until: row.try_get(rest + 3)?,
            content: row.try_get(rest + 4)?,
            body: row.try_get(rest + 5)?,
        };
        Ok(columns.into_row(lease_columns(row, first)?))
    }

    fn push(values: &mut Vec<Value>, record: &Record) {
        push_lease(values, &record.lease);
        let completion = record.completion.as_ref();
        values.extend([
            json!(record.binding.as_ref().map(Binding::as_str)),
            json!(record.correlation_id.as_ref().map(CorrelationId::as_str)),
            json!(completion.map(|completion| completion.at.as_micros())),
            json!(completion.and_then(|c| c.until.map(Timestamp::as_micros))),
            json!(completion.map(|completion| &*completion.content.text)),
            json!(completion.and_then(|c| c.content.body.as_deref().map(hex))),
        ]);
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing into a `String` cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
