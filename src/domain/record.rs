//! The record: something that is done once, by one owner at a time, and then remembered.
//!
//! Executions and stored responses are both records. A record is claimed, like a lease; its owner
//! completes it, with content that is kept and told to everyone who asks from then on, or releases
//! it, so that another may try. What differs between the two is said by the commands that
//! [`super::execution`] and [`super::idempotency`] make.
//!
//! A record is *bound*: to the intent of an execution, to the fingerprint of a request. A claim
//! that is bound otherwise conflicts, whatever state the record is in.
//!
//! The owner may complete after its time is over, as long as nobody else has begun: the work is
//! done, and storing it is what keeps it from being done twice.

use std::sync::Arc;

use bytes::Bytes;

use super::ids::{Binding, CorrelationId, Kind, OwnerId};
use super::lease::{
    self, Claim, Ending, ForceReleaseOutcome, Lease, LeaseMachine, Reference, Stale, StaleReason,
    Status,
};
use super::time::{Retention, Timestamp, Ttl};
use super::version::Version;
use super::{At, Decision, Machine};

/// The record machine.
#[derive(Debug)]
pub enum RecordMachine {}

/// What a key holds: the newest generation of its claim, and what it led to.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// The claim. [`Ending::Completed`] and [`Ending::Put`] go with a completion, and only they.
    pub lease: Lease,
    /// What the record is for.
    pub binding: Option<Binding>,
    /// The newest claim's name in its caller's traces; decides nothing.
    pub correlation_id: Option<CorrelationId>,
    /// What is remembered.
    pub completion: Option<Completion>,
}

/// What is remembered.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// Since when.
    pub at: Timestamp,
    /// Until when; `None`: for ever.
    pub until: Option<Timestamp>,
    /// What.
    pub content: Content,
}

/// Content, of which only equality matters here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    /// JSON text, exactly as it came.
    pub text: Arc<str>,
    /// Bytes beside it.
    pub body: Option<Bytes>,
}

/// What can be asked of a record.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// See [`claim`].
    Claim {
        /// As of a lease.
        claim: Claim,
        /// What it is for.
        binding: Option<Binding>,
        /// Its name in the caller's traces.
        correlation_id: Option<CorrelationId>,
        /// Whether, taken back, it lets the next claim be for something else.
        unbinds: bool,
    },
    /// See [`complete`].
    Complete {
        /// The claim.
        reference: Reference,
        /// What to remember.
        content: Content,
        /// For how long; `None`: for ever.
        retention: Option<Retention>,
    },
    /// Moves the end of a claim that is held, as a lease's.
    Renew {
        /// The claim.
        reference: Reference,
        /// The new length, or the claim's own.
        ttl: Option<Ttl>,
    },
    /// See [`release`].
    Release {
        /// The claim.
        reference: Reference,
        /// Whether the next claim may be for something else.
        unbinds: bool,
    },
    /// See [`put`].
    Put {
        /// What to remember.
        content: Content,
        /// For how long.
        retention: Retention,
    },
    /// Forgets what is remembered.
    Delete,
    /// What the key holds.
    Read,
    /// Ends a claim that is held, whoever owns it.
    ForceRelease {
        /// End only this generation.
        version: Option<Version>,
        /// Whether the next claim may be for something else.
        unbinds: bool,
    },
    /// Takes back a grant that nobody received.
    Undo {
        /// The grant.
        grant_id: i64,
        /// Whether the next claim may be for something else.
        unbinds: bool,
    },
}

/// The answers, one variant for each command.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// To [`Command::Claim`].
    Claim(ClaimOutcome),
    /// To [`Command::Complete`].
    Complete(CompleteOutcome),
    /// To [`Command::Renew`].
    Renew(RenewOutcome),
    /// To [`Command::Release`].
    Release(ReleaseOutcome),
    /// To [`Command::Put`].
    Put(PutOutcome),
    /// To [`Command::Delete`].
    Delete(DeleteOutcome),
    /// To [`Command::Read`].
    Read(Option<Record>),
    /// To [`Command::ForceRelease`].
    ForceRelease(ForceReleaseOutcome),
    /// To [`Command::Undo`].
    Undo,
}

/// The answer to a claim.
#[derive(Clone, Debug, PartialEq)]
pub enum ClaimOutcome {
    /// The caller owns the record.
    Claimed {
        /// The claim.
        lease: Lease,
        /// The grant was made to an earlier request of the same attempt.
        repeated: bool,
    },
    /// It is done.
    Completed(Record, Completion),
    /// Somebody, perhaps the caller, is at it.
    InProgress(Lease),
    /// Nobody is at it, and the claim was not to take it.
    Free,
    /// It is for something else.
    Conflict,
    /// The attempt had its grant, and that has ended.
    Stale(Stale),
}

/// The answer to a completion.
#[derive(Clone, Debug, PartialEq)]
pub enum CompleteOutcome {
    /// Remembered, by this or an earlier request alike.
    Completed,
    /// Something else is remembered.
    AlreadyCompleted(Lease),
    /// The claim is not the record's newest, or was given up.
    Stale(Stale),
}

/// The answer to a renewal.
#[derive(Clone, Debug, PartialEq)]
pub enum RenewOutcome {
    /// The claim as it is now.
    Renewed(Lease),
    /// There is nothing left to do.
    AlreadyCompleted(Lease),
    /// The caller does not hold the claim.
    Stale(Stale),
}

/// The answer to a release.
#[derive(Clone, Debug, PartialEq)]
pub enum ReleaseOutcome {
    /// The record can be claimed, by this release or an earlier one of the same reference.
    Released,
    /// There is nothing to give back.
    AlreadyCompleted(Lease),
    /// The claim is not the record's newest, or was ended.
    Stale(Stale),
}

/// The answer to a put.
#[derive(Clone, Debug, PartialEq)]
pub enum PutOutcome {
    /// Remembered.
    Stored {
        /// The version that it took.
        version: Version,
        /// Since when, and until when.
        completion: Completion,
    },
    /// Somebody is at it.
    InProgress(Lease),
}

/// The answer to a deletion.
#[derive(Clone, Debug, PartialEq)]
pub enum DeleteOutcome {
    /// It is forgotten.
    Deleted,
    /// There was nothing to forget.
    Absent,
    /// Somebody is at it.
    InProgress(Lease),
}

/// Where a record stands at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordState {
    /// Somebody is at it, or was and let the time pass.
    InProgress {
        /// The time is over: the next claim gets it.
        is_reclaimable: bool,
    },
    /// Nobody is at it: given back, freed by force, deleted or taken back.
    Released,
    /// It is done.
    Completed,
}

impl Record {
    /// Where it stands at `now`.
    #[must_use]
    pub fn state(&self, now: Timestamp) -> RecordState {
        match self.lease.status {
            _ if self.completion.is_some() => RecordState::Completed,
            Status::Held => RecordState::InProgress { is_reclaimable: !self.lease.is_held(now) },
            Status::Ended(Ending::Expired) => RecordState::InProgress { is_reclaimable: true },
            Status::Ended(_) => RecordState::Released,
        }
    }

    /// Whether somebody is at it at `now`.
    #[must_use]
    pub fn is_in_progress(&self, now: Timestamp) -> bool {
        self.completion.is_none() && self.lease.is_held(now)
    }

    /// Whether its time to be remembered is over at `now`: then it is as good as never stored.
    #[must_use]
    pub fn is_forgotten(&self, now: Timestamp) -> bool {
        self.completion.as_ref().is_some_and(|c| c.until.is_some_and(|until| until <= now))
    }

    /// Whether its newest claim may still be completed.
    fn is_unfinished(&self) -> bool {
        self.completion.is_none()
            && matches!(self.lease.status, Status::Held | Status::Ended(Ending::Expired))
    }

    fn with(&self, lease: Lease) -> Self {
        Self { lease, ..self.clone() }
    }

    fn ended(&self, ending: Ending, unbinds: bool) -> Self {
        Self {
            lease: self.lease.ended(ending),
            binding: self.binding.clone().filter(|_| !unbinds),
            completion: None,
            correlation_id: self.correlation_id.clone(),
        }
    }
}

impl Machine for RecordMachine {
    type State = Record;
    type Command = Command;
    type Outcome = Outcome;

    const KINDS: &'static [Kind] = &[Kind::Execution, Kind::Idempotency];

    fn apply(state: Option<&Record>, command: &Command, at: At) -> Decision<Record, Outcome> {
        // What is over is as good as never stored; only its stamps live on.
        let record = state.filter(|record| !record.is_forgotten(at.now));
        match command {
            Command::Claim { claim: wish, binding, correlation_id, .. } => {
                claim(record, wish, binding.as_ref(), correlation_id.as_ref(), at)
                    .map(Outcome::Claim)
            }
            Command::Complete { reference, content, retention } => {
                complete(record, reference, content, *retention, at).map(Outcome::Complete)
            }
            Command::Renew { reference, ttl } => {
                renew(record, reference, *ttl, at).map(Outcome::Renew)
            }
            Command::Release { reference, unbinds } => {
                release(record, reference, *unbinds).map(Outcome::Release)
            }
            Command::Put { content, retention } => {
                put(record, content, *retention, at).map(Outcome::Put)
            }
            Command::Delete => delete(record, at).map(Outcome::Delete),
            Command::Read => Decision::Keep(Outcome::Read(record.cloned())),
            Command::ForceRelease { version, unbinds } => {
                force_release(record, *version, *unbinds).map(Outcome::ForceRelease)
            }
            Command::Undo { grant_id, unbinds } => match record {
                Some(record)
                    if record.lease.grant_id == *grant_id
                        && record.lease.status == Status::Held =>
                {
                    // What a lapse left bound stays so, as if the undone claim had never been.
                    let unbinds = *unbinds && record.lease.recovered_from.is_none();
                    Decision::Write(record.ended(Ending::Undone, unbinds), Outcome::Undo)
                }
                _ => Decision::Keep(Outcome::Undo),
            },
        }
    }

    fn read() -> Command {
        Command::Read
    }

    fn bytes(command: &Command) -> usize {
        match command {
            Command::Complete { content, .. } | Command::Put { content, .. } => {
                content.text.len() + content.body.as_ref().map_or(0, Bytes::len)
            }
            Command::Claim { .. }
            | Command::Renew { .. }
            | Command::Release { .. }
            | Command::Delete
            | Command::Read
            | Command::ForceRelease { .. }
            | Command::Undo { .. } => 0,
        }
    }

    fn wakes(before: Option<&Record>, after: &Record) -> bool {
        lease::has_ended(before.map(|record| &record.lease), &after.lease)
    }

    fn changes_at(record: &Record) -> Option<Timestamp> {
        match &record.completion {
            Some(completion) => completion.until,
            None => LeaseMachine::changes_at(&record.lease),
        }
    }

    /// What is completed is only replayed.
    fn is_worth_remembering(record: &Record) -> bool {
        record.completion.is_none() && LeaseMachine::is_worth_remembering(&record.lease)
    }

    fn is_void_without_caller(command: &Command) -> bool {
        match command {
            Command::Claim { .. } | Command::Read => true,
            Command::Complete { .. }
            | Command::Renew { .. }
            | Command::Release { .. }
            | Command::Put { .. }
            | Command::Delete
            | Command::ForceRelease { .. }
            | Command::Undo { .. } => false,
        }
    }

    fn is_certain_after_unknown_try(outcome: &Outcome) -> bool {
        match outcome {
            // A completed record, or another intent, is so whatever became of this claim.
            Outcome::Claim(
                ClaimOutcome::Claimed { .. } | ClaimOutcome::Completed(..) | ClaimOutcome::Conflict,
            )
            | Outcome::Complete(CompleteOutcome::Completed)
            | Outcome::Renew(RenewOutcome::Renewed(_))
            | Outcome::Release(ReleaseOutcome::Released)
            | Outcome::Put(PutOutcome::Stored { .. })
            | Outcome::Delete(DeleteOutcome::Deleted)
            | Outcome::ForceRelease(ForceReleaseOutcome::Released(_))
            | Outcome::Read(_)
            | Outcome::Undo => true,
            Outcome::Claim(
                ClaimOutcome::InProgress(_) | ClaimOutcome::Free | ClaimOutcome::Stale(_),
            )
            | Outcome::Complete(CompleteOutcome::AlreadyCompleted(_) | CompleteOutcome::Stale(_))
            | Outcome::Renew(RenewOutcome::AlreadyCompleted(_) | RenewOutcome::Stale(_))
            | Outcome::Release(ReleaseOutcome::AlreadyCompleted(_) | ReleaseOutcome::Stale(_))
            | Outcome::Put(PutOutcome::InProgress(_))
            | Outcome::Delete(DeleteOutcome::Absent | DeleteOutcome::InProgress(_))
            | Outcome::ForceRelease(ForceReleaseOutcome::NotHeld) => false,
        }
    }

    fn undo(command: &Command) -> Option<Command> {
        match command {
            Command::Claim { claim, unbinds, .. } if claim.attempt_id.is_none() => {
                Some(Command::Undo { grant_id: claim.grant_id, unbinds: *unbinds })
            }
            _ => None,
        }
    }

    fn is_new_grant(outcome: &Outcome) -> bool {
        matches!(outcome, Outcome::Claim(ClaimOutcome::Claimed { repeated: false, .. }))
    }
}

/// Grants the record unless it is for something else, done, or being done.
fn claim(
    record: Option<&Record>,
    wish: &Claim,
    binding: Option<&Binding>,
    correlation_id: Option<&CorrelationId>,
    at: At,
) -> Decision<Record, ClaimOutcome> {
    let bound = record.and_then(|record| record.binding.as_ref());
    if let (Some(bound), Some(binding)) = (bound, binding)
        && bound != binding
    {
        return Decision::Keep(ClaimOutcome::Conflict);
    }
    if let Some(record) = record
        && let Some(completion) = &record.completion
    {
        return Decision::Keep(ClaimOutcome::Completed(record.clone(), completion.clone()));
    }
    match lease::claim(record.map(|record| &record.lease), wish, at) {
        Decision::Keep(outcome) => Decision::Keep(outcome.into()),
        Decision::Write(lease, outcome) => {
            let is_grant = matches!(outcome, lease::ClaimOutcome::Claimed { .. });
            let record = match record {
                // A lapse that is told, not a grant.
                Some(record) if !is_grant => record.with(lease),
                _ => Record {
                    lease,
                    binding: binding.or(bound).cloned(),
                    correlation_id: correlation_id.cloned(),
                    completion: None,
                },
            };
            Decision::Write(record, outcome.into())
        }
    }
}

impl From<lease::ClaimOutcome> for ClaimOutcome {
    fn from(outcome: lease::ClaimOutcome) -> Self {
        match outcome {
            lease::ClaimOutcome::Claimed { lease, repeated } => Self::Claimed { lease, repeated },
            lease::ClaimOutcome::Held(lease) => Self::InProgress(lease),
            lease::ClaimOutcome::Free => Self::Free,
            lease::ClaimOutcome::Stale(stale) => Self::Stale(stale),
        }
    }
}

/// What a reference is to the record that it names.
enum Standing<'a> {
    /// Its claim, held or lapsed.
    Unfinished(&'a Record),
    /// Its claim, which was completed.
    Completed(&'a Record, &'a Completion),
    /// Its claim, which was given back.
    Released(Stale),
    /// Not its claim any more, since something was put in its place.
    Replaced(&'a Record),
    /// Not its claim.
    Stale(Stale),
}

fn standing<'a>(record: Option<&'a Record>, reference: &Reference) -> Standing<'a> {
    let stale = |reason| Stale { reason, current: record.map(|record| record.lease.clone()) };
    let Some(record) = record else {
        return Standing::Stale(stale(StaleReason::Unknown));
    };
    let lease = &record.lease;
    if !lease.matches(reference) {
        let is_older = reference.version < lease.version;
        return match lease.status {
            Status::Ended(Ending::Put) if is_older => Standing::Replaced(record),
            _ if is_older => Standing::Stale(stale(StaleReason::Superseded)),
            _ => Standing::Stale(stale(StaleReason::Unknown)),
        };
    }
    match (lease.status, &record.completion) {
        (_, Some(completion)) => Standing::Completed(record, completion),
        (Status::Held | Status::Ended(Ending::Expired), None) => Standing::Unfinished(record),
        (Status::Ended(Ending::Released), None) => Standing::Released(stale(StaleReason::Released)),
        (Status::Ended(ending), None) => Standing::Stale(stale(ending.stale_reason())),
    }
}

/// Stores what the work came to. Doing so twice is the same as once.
fn complete(
    record: Option<&Record>,
    reference: &Reference,
    content: &Content,
    retention: Option<Retention>,
    at: At,
) -> Decision<Record, CompleteOutcome> {
    match standing(record, reference) {
        Standing::Unfinished(record) => {
            let completed = Record {
                completion: Some(completion(content, retention, at)),
                ..record.with(record.lease.ended(Ending::Completed))
            };
            Decision::Write(completed, CompleteOutcome::Completed)
        }
        Standing::Completed(_, stored) if stored.content == *content => {
            Decision::Keep(CompleteOutcome::Completed)
        }
        Standing::Completed(record, _) | Standing::Replaced(record) => {
            Decision::Keep(CompleteOutcome::AlreadyCompleted(record.lease.clone()))
        }
        Standing::Released(stale) | Standing::Stale(stale) => {
            Decision::Keep(CompleteOutcome::Stale(stale))
        }
    }
}

fn completion(content: &Content, retention: Option<Retention>, at: At) -> Completion {
    Completion {
        at: at.now,
        until: retention.map(|retention| at.now.keep_for(retention)),
        content: content.clone(),
    }
}

fn renew(
    record: Option<&Record>,
    reference: &Reference,
    ttl: Option<Ttl>,
    at: At,
) -> Decision<Record, RenewOutcome> {
    match standing(record, reference) {
        Standing::Unfinished(record) => {
            let renewed = lease::renew(Some(&record.lease), reference, ttl, at);
            let renewed = renewed.map(|outcome| match outcome {
                lease::RenewOutcome::Renewed(lease) => RenewOutcome::Renewed(lease),
                lease::RenewOutcome::Stale(stale) => RenewOutcome::Stale(stale),
            });
            match renewed {
                Decision::Keep(outcome) => Decision::Keep(outcome),
                Decision::Write(lease, outcome) => Decision::Write(record.with(lease), outcome),
            }
        }
        Standing::Completed(record, _) | Standing::Replaced(record) => {
            Decision::Keep(RenewOutcome::AlreadyCompleted(record.lease.clone()))
        }
        Standing::Released(stale) | Standing::Stale(stale) => {
            Decision::Keep(RenewOutcome::Stale(stale))
        }
    }
}

/// Gives a claim back, lapsed or not. Doing so twice is the same as once, until the next grant.
fn release(
    record: Option<&Record>,
    reference: &Reference,
    unbinds: bool,
) -> Decision<Record, ReleaseOutcome> {
    match standing(record, reference) {
        Standing::Unfinished(record) => {
            Decision::Write(record.ended(Ending::Released, unbinds), ReleaseOutcome::Released)
        }
        Standing::Released(_) => Decision::Keep(ReleaseOutcome::Released),
        Standing::Completed(record, _) | Standing::Replaced(record) => {
            Decision::Keep(ReleaseOutcome::AlreadyCompleted(record.lease.clone()))
        }
        Standing::Stale(stale) => Decision::Keep(ReleaseOutcome::Stale(stale)),
    }
}

/// Stores content without a claim: the last write wins, except against somebody who is at it.
fn put(
    record: Option<&Record>,
    content: &Content,
    retention: Retention,
    at: At,
) -> Decision<Record, PutOutcome> {
    if let Some(record) = record
        && record.is_in_progress(at.now)
    {
        return Decision::Keep(PutOutcome::InProgress(record.lease.clone()));
    }
    let completion = completion(content, Some(retention), at);
    let stored = Record {
        lease: Lease {
            version: at.stamp,
            status: Status::Ended(Ending::Put),
            owner_id: OwnerId::from_stored(""),
            attempt_id: None,
            grant_id: 0,
            ttl: Ttl::from_stored(0),
            acquired_at: at.now,
            expires_at: at.now,
            recovered_from: None,
            metadata: None,
        },
        binding: None,
        correlation_id: None,
        completion: Some(completion.clone()),
    };
    Decision::Write(stored, PutOutcome::Stored { version: at.stamp, completion })
}

fn delete(record: Option<&Record>, at: At) -> Decision<Record, DeleteOutcome> {
    match record {
        Some(record) if record.is_in_progress(at.now) => {
            Decision::Keep(DeleteOutcome::InProgress(record.lease.clone()))
        }
        Some(record) if record.completion.is_some() => {
            Decision::Write(record.ended(Ending::Released, true), DeleteOutcome::Deleted)
        }
        _ => Decision::Keep(DeleteOutcome::Absent),
    }
}

/// Ends a claim that was not completed, held or lapsed: until somebody else begins, its owner could
/// still complete.
fn force_release(
    record: Option<&Record>,
    version: Option<Version>,
    unbinds: bool,
) -> Decision<Record, ForceReleaseOutcome> {
    let is_meant = |record: &&Record| version.is_none_or(|v| v == record.lease.version);
    match record.filter(is_meant) {
        Some(record) if record.is_unfinished() => Decision::Write(
            record.ended(Ending::Revoked, unbinds),
            ForceReleaseOutcome::Released(record.lease.version),
        ),
        _ => Decision::Keep(ForceReleaseOutcome::NotHeld),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{execution, idempotency};

    /// One key, its clock, and the rule of stamps.
    struct Cell {
        row: Option<(Version, Record)>,
        now: i64,
        grants: i64,
    }

    impl Cell {
        fn new() -> Self {
            Self { row: None, now: 1_000_000, grants: 0 }
        }

        fn run(&mut self, command: &Command) -> Outcome {
            let now = Timestamp::from_micros(self.now);
            let stamp = Version::next(self.row.as_ref().map(|row| row.0), 0, now).unwrap();
            let record = self.row.as_ref().map(|row| &row.1);
            match RecordMachine::apply(record, command, At { now, stamp }) {
                Decision::Keep(outcome) => outcome,
                Decision::Write(record, outcome) => {
                    self.row = Some((stamp, record));
                    outcome
                }
            }
        }

        fn pass(&mut self, millis: i64) {
            self.now += millis * 1_000;
        }

        fn wish(&mut self, owner: &str) -> Claim {
            self.grants += 1;
            Claim {
                owner_id: OwnerId::from_stored(owner),
                ttl: Ttl::from_stored(1_000),
                attempt_id: None,
                grant_id: self.grants,
                metadata: None,
                may_take: true,
            }
        }

        fn execute(&mut self, owner: &str, intent: &str) -> ClaimOutcome {
            let wish = self.wish(owner);
            self.claimed(&execution::claim(wish, Binding::from_stored(intent), None))
        }

        fn write(&mut self, owner: &str, fingerprint: Option<&str>) -> ClaimOutcome {
            let wish = self.wish(owner);
            self.claimed(&idempotency::claim(wish, fingerprint.map(Binding::from_stored)))
        }

        fn claimed(&mut self, command: &Command) -> ClaimOutcome {
            match self.run(command) {
                Outcome::Claim(outcome) => outcome,
                other => panic!("{other:?}"),
            }
        }

        fn complete(&mut self, reference: &Reference, text: &str) -> CompleteOutcome {
            match self.run(&execution::complete(reference.clone(), text.into(), None)) {
                Outcome::Complete(outcome) => outcome,
                other => panic!("{other:?}"),
            }
        }

        fn put(&mut self, text: &str) -> Outcome {
            let content = Content { text: text.into(), body: None };
            self.run(&Command::Put { content, retention: Retention::ONE_DAY })
        }
    }

    fn reference(outcome: ClaimOutcome) -> Reference {
        match outcome {
            ClaimOutcome::Claimed { lease, .. } => {
                Reference { owner_id: lease.owner_id, version: lease.version }
            }
            other => panic!("{other:?}"),
        }
    }

    fn recovered(outcome: ClaimOutcome) -> Option<Version> {
        match outcome {
            ClaimOutcome::Claimed { lease, .. } => lease.recovered_from,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn another_intent_conflicts_in_every_state() {
        let mut key = Cell::new();
        let first = reference(key.execute("a", "one"));
        assert_eq!(key.execute("b", "two"), ClaimOutcome::Conflict);
        key.pass(1_000);
        assert_eq!(key.execute("b", "two"), ClaimOutcome::Conflict);
        key.run(&execution::release(first));
        assert_eq!(key.execute("b", "two"), ClaimOutcome::Conflict);
        let second = reference(key.execute("b", "one"));
        key.complete(&second, "1");
        assert_eq!(key.execute("c", "two"), ClaimOutcome::Conflict);
        assert!(matches!(key.execute("c", "one"), ClaimOutcome::Completed(..)));
    }

    #[test]
    fn a_late_completion_counts_until_somebody_else_has_begun() {
        let mut key = Cell::new();
        let first = reference(key.execute("a", "i"));
        key.pass(5_000);
        assert_eq!(key.complete(&first, "1"), CompleteOutcome::Completed);

        let mut key = Cell::new();
        let first = reference(key.execute("a", "i"));
        key.pass(1_000);
        let second = key.execute("b", "i");
        assert_eq!(recovered(second), Some(first.version));
        let before = key.row.clone();
        assert!(matches!(
            key.complete(&first, "1"),
            CompleteOutcome::Stale(Stale { reason: StaleReason::Superseded, .. })
        ));
        assert_eq!(key.row, before);
    }

    #[test]
    fn the_same_completion_twice_is_fine_and_another_one_is_not() {
        let mut key = Cell::new();
        let claim = reference(key.execute("a", "i"));
        assert_eq!(key.complete(&claim, "1"), CompleteOutcome::Completed);
        assert_eq!(key.complete(&claim, "1"), CompleteOutcome::Completed);
        assert!(matches!(key.complete(&claim, "1.0"), CompleteOutcome::AlreadyCompleted(_)));
        assert!(matches!(
            key.run(&execution::release(claim)),
            Outcome::Release(ReleaseOutcome::AlreadyCompleted(_))
        ));
    }

    #[test]
    fn a_released_claim_cannot_complete_and_its_next_one_recovers_nothing() {
        let mut key = Cell::new();
        let claim = reference(key.execute("a", "i"));
        key.pass(1_000);
        let release = execution::release(claim.clone());
        assert_eq!(key.run(&release), Outcome::Release(ReleaseOutcome::Released));
        assert_eq!(key.run(&release), Outcome::Release(ReleaseOutcome::Released));
        assert!(matches!(
            key.complete(&claim, "1"),
            CompleteOutcome::Stale(Stale { reason: StaleReason::Released, .. })
        ));
        assert_eq!(recovered(key.execute("b", "i")), None);
    }

    #[test]
    fn a_fingerprint_is_forgotten_by_a_release_and_kept_by_a_lapse() {
        let mut key = Cell::new();
        let claim = reference(key.write("a", Some("f")));
        assert_eq!(key.write("b", Some("g")), ClaimOutcome::Conflict);
        assert!(matches!(key.write("b", None), ClaimOutcome::InProgress(_)));
        key.run(&idempotency::release(claim));
        reference(key.write("b", Some("g")));
        key.pass(1_000);
        assert_eq!(key.write("c", Some("f")), ClaimOutcome::Conflict);
        reference(key.write("c", None));
        assert_eq!(key.write("d", Some("f")), ClaimOutcome::Conflict);
    }

    #[test]
    fn a_put_wins_over_what_is_stored_but_not_over_a_claim() {
        let mut key = Cell::new();
        let claim = reference(key.write("a", None));
        assert!(matches!(key.put("1"), Outcome::Put(PutOutcome::InProgress(_))));
        key.pass(1_000);
        assert!(matches!(key.put("2"), Outcome::Put(PutOutcome::Stored { .. })));
        assert!(matches!(key.put("3"), Outcome::Put(PutOutcome::Stored { .. })));
        assert!(matches!(key.complete(&claim, "3"), CompleteOutcome::AlreadyCompleted(_)));
        let ClaimOutcome::Completed(_, completion) = key.write("b", Some("f")) else {
            panic!("not completed")
        };
        assert_eq!(&*completion.content.text, "3");
    }

    #[test]
    fn what_is_kept_for_a_time_is_gone_after_it_and_its_versions_go_on() {
        let mut key = Cell::new();
        key.put("1");
        let stored = key.row.as_ref().unwrap().1.lease.version;
        key.pass(86_400_000 - 1);
        assert!(matches!(key.write("a", Some("f")), ClaimOutcome::Completed(..)));
        key.pass(1);
        assert_eq!(key.run(&Command::Read), Outcome::Read(None));
        let claim = reference(key.write("a", Some("g")));
        assert!(claim.version > stored);
        assert_eq!(key.row.as_ref().unwrap().1.lease.recovered_from, None);
    }

    #[test]
    fn a_deleted_record_can_be_claimed_and_a_claimed_one_not_deleted() {
        let mut key = Cell::new();
        assert_eq!(key.run(&Command::Delete), Outcome::Delete(DeleteOutcome::Absent));
        let claim = reference(key.write("a", Some("f")));
        assert!(matches!(key.run(&Command::Delete), Outcome::Delete(DeleteOutcome::InProgress(_))));
        key.complete(&claim, "1");
        assert_eq!(key.run(&Command::Delete), Outcome::Delete(DeleteOutcome::Deleted));
        assert!(reference(key.write("b", Some("g"))).version > claim.version);
    }

    #[test]
    fn a_lapsed_claim_cannot_be_renewed_but_may_still_complete() {
        let mut key = Cell::new();
        let claim = reference(key.write("a", None));
        key.pass(1_000);
        assert!(matches!(
            key.run(&idempotency::renew(claim.clone(), None)),
            Outcome::Renew(RenewOutcome::Stale(Stale { reason: StaleReason::Expired, .. }))
        ));
        assert_eq!(key.complete(&claim, "1"), CompleteOutcome::Completed);
    }

    #[test]
    fn a_lapsed_claim_can_be_freed_so_that_it_cannot_complete_any_more() {
        let mut key = Cell::new();
        let claim = reference(key.write("a", Some("f")));
        key.pass(1_000);
        assert_eq!(
            key.run(&idempotency::force_release(None)),
            Outcome::ForceRelease(ForceReleaseOutcome::Released(claim.version))
        );
        assert!(matches!(
            key.complete(&claim, "1"),
            CompleteOutcome::Stale(Stale { reason: StaleReason::Revoked, .. })
        ));
        assert_eq!(recovered(key.write("b", Some("g"))), Some(claim.version));
    }

    #[test]
    fn a_claim_freed_by_force_is_recovered_by_the_next() {
        let mut key = Cell::new();
        let claim = reference(key.execute("a", "i"));
        key.run(&execution::force_release(None));
        assert!(matches!(
            key.complete(&claim, "1"),
            CompleteOutcome::Stale(Stale { reason: StaleReason::Revoked, .. })
        ));
        assert_eq!(recovered(key.execute("b", "i")), Some(claim.version));
    }
}
