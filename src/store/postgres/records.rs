//! The table of records: executions and stored responses.

use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::leases::bind_lease;
use super::table::{Columns, Statements, Table, lease_columns, statements};
use crate::domain::ids::{Binding, CorrelationId};
use crate::domain::record::{Completion, Record, RecordMachine};
use crate::domain::time::Timestamp;
use crate::store::Row;
use crate::store::columns::{LeaseColumns, RecordColumns};

impl Table for RecordMachine {
    const STATEMENTS: Statements = statements! {
        "fencepost.records",
        // Without what is remembered, which can be large.
        list: "revision, version, status, owner_id, attempt_id, grant_id, ttl_ms, acquired_at,
               expires_at, recovered_from, metadata, binding, correlation_id, completed_at,
               retained_until, NULL::text, NULL::bytea",
        // What is remembered ends with its own time; an execution that is not done binds its
        // intent for ever; a response that is not stored goes the way of a lease.
        idle: "CASE WHEN l.completed_at IS NOT NULL THEN l.retained_until
                    WHEN starts_with(l.id, '3') THEN NULL
                    WHEN l.status = 0 THEN l.expires_at + $1
                    ELSE l.revision + $1 END",
        7 "version" "bigint", 8 "status" "smallint", 9 "owner_id" "text", 10 "attempt_id" "uuid",
        11 "grant_id" "bigint", 12 "ttl_ms" "bigint", 13 "acquired_at" "bigint",
        14 "expires_at" "bigint", 15 "recovered_from" "bigint", 16 "metadata" "text",
        17 "binding" "text", 18 "correlation_id" "text", 19 "completed_at" "bigint",
        20 "retained_until" "bigint", 21 "content" "text", 22 "body" "bytea",
    };

    fn row(row: &PgRow, first: usize) -> Result<Row<Record>, sqlx::Error> {
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

    fn bind<'q, 'r>(columns: Columns<'q, 'r, Record>) -> Columns<'q, 'r, Record> {
        fn completion(record: &Record) -> Option<&Completion> {
            record.completion.as_ref()
        }
        bind_lease(columns, |record| &record.lease)
            .add(|record| record.binding.as_ref().map(Binding::as_str))
            .add(|record| record.correlation_id.as_ref().map(CorrelationId::as_str))
            .add(|record| completion(record).map(|completion| completion.at.as_micros()))
            .add(|record| completion(record)?.until.map(Timestamp::as_micros))
            .add(|record| completion(record).map(|completion| &*completion.content.text))
            .add(|record| completion(record)?.content.body.as_deref())
    }
}
