//! What must hold when processes die, connections break, rows stay locked and callers race.
//!
//! These tests measure, so they run one at a time, whatever the test runner does. Each prints its
//! figures in lines that begin with `figure:`.

#![expect(
    unreachable_pub,
    clippy::unwrap_used,
    clippy::disallowed_types,
    clippy::disallowed_methods,
    clippy::float_cmp,
    clippy::cast_precision_loss,
    clippy::similar_names,
    clippy::items_after_statements,
    clippy::single_match_else,
    reason = "a test fails by panicking, makes its own databases, shares helpers and counts little"
)]

#[path = "../support/mod.rs"]
mod support;

mod clocks;
mod crashes;
mod deadlocks;
mod expiry;
mod failover;
mod leaders;
mod locks;
mod records;
mod rig;
mod versions;
mod wakes;
