//! The table of records: executions and stored responses.

use std::sync::LazyLock;

use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;

use super::Indexes;
use super::index::Index;
use super::leases::{CLAIM, bind_lease};
use super::table::{Bound, Statements, Table, lease_columns};
use crate::domain::ids::{Binding, CorrelationId};
use crate::domain::record::{Record, RecordMachine};
use crate::domain::time::Timestamp;
use crate::store::Row;
use crate::store::columns::{LeaseColumns, RecordColumns};

/// The columns that a record has besides.
const RECORD: [&str; 6] =
    ["binding", "correlation_id", "completed_at", "retained_until", "content", "body"];

static STATEMENTS: LazyLock<Statements> = LazyLock::new(|| {
    let columns: Vec<&str> = CLAIM.into_iter().chain(RECORD).collect();
    // Without what is remembered, which can be large.
    let listed = columns.iter().map(|column| match *column {
        "content" | "body" => "NULL",
        column => column,
    });
    let list = format!("revision, {}", listed.collect::<Vec<_>>().join(", "));
    // What is remembered ends with its own time; an execution that is not done binds its intent for
    // ever; a response that is not stored goes the way of a lease.
    let idle = "CASE WHEN completed_at IS NOT NULL THEN retained_until
                     WHEN substr(id, 1, 1) = '3' THEN NULL
                     WHEN status = 0 THEN expires_at + ?3
                     ELSE revision + ?3 END";
    Statements::of("records", "record_keys", columns, &list, idle)
});

impl Table for RecordMachine {
    fn statements() -> &'static Statements {
        &STATEMENTS
    }

    fn index(indexes: &mut Indexes) -> &mut Option<Index> {
        &mut indexes.records
    }

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

    fn bind<'q>(query: Bound<'q>, record: &Record) -> Bound<'q> {
        let completion = record.completion.as_ref();
        bind_lease(query, &record.lease)
            .bind(record.binding.as_ref().map(Binding::as_str))
            .bind(record.correlation_id.as_ref().map(CorrelationId::as_str))
            .bind(completion.map(|completion| completion.at.as_micros()))
            .bind(completion.and_then(|c| c.until.map(Timestamp::as_micros)))
            .bind(completion.map(|completion| &*completion.content.text))
            .bind(completion.and_then(|c| c.content.body.as_deref()))
    }
}
