//! The rules of the service, as pure functions: no I/O, no clock, no randomness.
//!
//! Each machine is one file with one `apply`: given what a key holds, a command and the store's
//! time, it says what the key holds next and what the caller is told. Every backend and every
//! protocol runs the same function, so a rule is written, read and tested in one place.

pub mod execution;
pub mod idempotency;
pub mod ids;
pub mod lease;
pub mod record;
pub mod time;
pub mod version;

use std::fmt::Debug;

use ids::Kind;
use time::Timestamp;
use version::Version;

/// A per-key state machine.
pub trait Machine: Debug + Send + Sync + 'static {
    /// What one key holds.
    type State: Clone + Debug + PartialEq + Send + Sync;
    /// What a caller asks of one key.
    type Command: Debug + Send + Sync;
    /// What the caller is told.
    type Outcome: Debug + Send;

    /// The kinds of keys that it rules.
    const KINDS: &'static [Kind];

    /// Decides one command on one key.
    fn apply(
        state: Option<&Self::State>,
        command: &Self::Command,
        at: At,
    ) -> Decision<Self::State, Self::Outcome>;

    /// A command that changes nothing and tells what the key holds.
    fn read() -> Self::Command;

    /// About how many bytes of text a command carries.
    fn bytes(command: &Self::Command) -> usize;

    /// Whether the step from `before` to `after` is one that waiters must hear of.
    fn wakes(before: Option<&Self::State>, after: &Self::State) -> bool;

    /// When time alone changes what a row means, if ever.
    fn changes_at(state: &Self::State) -> Option<Timestamp>;

    /// Whether a row is small, and likely to be written next rather than read.
    fn is_worth_remembering(state: &Self::State) -> bool;

    /// Whether the command is pointless once its caller has gone: a claim is, a release is not.
    fn is_void_without_caller(command: &Self::Command) -> bool;

    /// Whether `outcome` is still certain when an earlier try of the same command may have been
    /// applied without our knowing. "You lost it" is not: the caller may have lost to itself.
    fn is_certain_after_unknown_try(outcome: &Self::Outcome) -> bool;

    /// The command that takes back what `command` may have granted, if nobody is left to receive
    /// it and the caller has no way to ask again.
    fn undo(command: &Self::Command) -> Option<Self::Command>;

    /// Whether `outcome` reports a grant made by this very command, which `undo` would take back.
    fn is_new_grant(outcome: &Self::Outcome) -> bool;
}

/// The moment of a decision.
#[derive(Clone, Copy, Debug)]
pub struct At {
    /// The store's time when the row was loaded, never later than what the load saw.
    pub now: Timestamp,
    /// The stamp that the row takes if the decision is a write, and so the version of a new
    /// generation: above every stamp that this key ever had.
    pub stamp: Version,
}

/// What a machine decided.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision<S, O> {
    /// The row stays as it is.
    Keep(O),
    /// The row becomes `S`; the outcome holds only if that write is accepted.
    Write(S, O),
}

impl<S, O> Decision<S, O> {
    /// Converts the outcome and leaves the rest.
    pub fn map<P>(self, convert: impl FnOnce(O) -> P) -> Decision<S, P> {
        match self {
            Self::Keep(outcome) => Decision::Keep(convert(outcome)),
            Self::Write(state, outcome) => Decision::Write(state, convert(outcome)),
        }
    }
}
