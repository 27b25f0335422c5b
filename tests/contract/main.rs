//! The contract: what the service promises, as laws that hold on every store, over HTTP.

#![expect(
    unreachable_pub,
    clippy::unwrap_used,
    clippy::disallowed_types,
    clippy::float_cmp,
    clippy::cast_precision_loss,
    reason = "a test fails by panicking, makes its own databases, shares helpers and counts little"
)]

#[path = "../support/mod.rs"]
mod support;

mod check;
mod claims;
mod coordinator;
mod executions;
mod field_cases;
mod idempotency;
mod layers;
mod leaders;
mod model;
mod moments;
mod operations;
mod reads;
mod releases;
mod renewals;
mod requests;
mod waits;
mod wire;
