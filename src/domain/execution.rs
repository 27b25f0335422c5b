//! Executions: one logical invocation, run once, its result kept and told to all who ask again.
//!
//! An execution is a [record](super::record) that is bound to its intent for as long as it exists:
//! released, lapsed or undone, it stays the same invocation. Its claim is for a fixed time and is
//! deliberately not renewed: work that takes longer than it said is work that another may take
//! over.

use std::sync::Arc;

use super::ids::{Binding, CorrelationId};
use super::lease::{Claim, Reference};
use super::record::{Command, Content};
use super::time::Retention;
use super::version::Version;

/// The length of a claim that names none, in milliseconds.
pub const DEFAULT_TTL_MS: i64 = 30_000;

/// To run the invocation, or learn what it came to.
#[must_use]
pub fn claim(claim: Claim, intent: Binding, correlation_id: Option<CorrelationId>) -> Command {
    Command::Claim { claim, binding: Some(intent), correlation_id, unbinds: false }
}

/// To store its result: JSON text, kept to the byte.
#[must_use]
pub fn complete(reference: Reference, result: Arc<str>, retention: Option<Retention>) -> Command {
    Command::Complete { reference, content: Content { text: result, body: None }, retention }
}

/// To let another run it.
#[must_use]
pub fn release(reference: Reference) -> Command {
    Command::Release { reference, unbinds: false }
}

/// To let another run it, whoever does now.
#[must_use]
pub fn force_release(version: Option<Version>) -> Command {
    Command::ForceRelease { version, unbinds: false }
}
