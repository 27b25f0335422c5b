//! Leases, in-process.

use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use super::Shared;
use super::reply::{MAX_SCAN, Page, Reply, list};
use crate::domain::ids::{Key, Kind, Name, OwnerId, Prefix, Scope};
use crate::domain::lease::{
    self, Claim, ClaimOutcome, Command, ForceReleaseOutcome, Lease, LeaseMachine, Outcome,
    OverReason, Reference, ReleaseOutcome, RenewOutcome, WatchOutcome,
};
use crate::domain::time::Ttl;
use crate::domain::version::Version;
use crate::engine::{Answer, EngineError, Question, Verdict};
use crate::store::{ListQuery, StoreError};

/// A wish to hold a key.
#[derive(Clone, Debug)]
pub struct ClaimLease {
    /// Who asks.
    pub owner_id: OwnerId,
    /// For how long.
    pub ttl: Ttl,
    /// The caller's name for the attempt.
    pub attempt_id: Option<Uuid>,
    /// To be shown to others, as the text of a JSON object of strings.
    pub metadata: Option<String>,
    /// How long to stand in line; zero: not at all.
    pub wait: Duration,
}

impl ClaimLease {
    /// A wish that does not wait, without an attempt id or metadata.
    #[must_use]
    pub fn new(owner_id: OwnerId, ttl: Ttl) -> Self {
        Self { owner_id, ttl, attempt_id: None, metadata: None, wait: Duration::ZERO }
    }
}

/// How a wait ended.
#[derive(Debug)]
pub enum WaitOutcome {
    /// The generation does not hold the key.
    Over(OverReason),
    /// It still does.
    TimedOut(Lease),
}

/// What can be done with leases; [`crate::domain::lease`] has the rules.
#[derive(Clone, Copy, Debug)]
pub struct Leases<'a> {
    shared: &'a Arc<Shared>,
    kind: Kind,
}

/// Picks the outcome of one command.
macro_rules! outcome {
    ($answer:expr, $variant:ident) => {
        Reply::from_answer($answer, |outcome| match outcome {
            Outcome::$variant(outcome) => Some(outcome),
            _ => None,
        })
    };
}
pub(super) use outcome;

impl<'a> Leases<'a> {
    pub(super) fn new(shared: &'a Arc<Shared>) -> Self {
        Self { shared, kind: Kind::Lease }
    }

    /// The same for another kind of key that holds leases.
    pub(super) fn of_kind(shared: &'a Arc<Shared>, kind: Kind) -> Self {
        Self { shared, kind }
    }

    pub(super) fn key(&self, name: &Name) -> Key {
        self.shared.key(self.kind, &Scope::none(), name)
    }

    async fn ask(
        &self,
        name: &Name,
        command: Command,
    ) -> Result<Answer<LeaseMachine>, EngineError> {
        self.shared.leases.ask(&self.key(name), command).await
    }

    /// Claims a key.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn claim(
        &self,
        name: &Name,
        wish: ClaimLease,
    ) -> Result<Reply<ClaimOutcome>, EngineError> {
        let ClaimLease { owner_id, ttl, attempt_id, metadata, wait } = wish;
        let grant_id = rand::random();
        let claim = Claim { owner_id, ttl, attempt_id, grant_id, metadata, may_take: true };
        let engine = &self.shared.leases;
        if engine.is_draining() {
            return Err(EngineError::ShuttingDown);
        }
        let reply = if wait.is_zero() {
            outcome!(self.ask(name, Command::Claim(claim)).await?, Claim)?
        } else {
            engine.wait(&self.key(name), ClaimInLine { claim }, wait, true).await??
        };
        reply.still_running(|outcome| match outcome {
            ClaimOutcome::Claimed { lease, .. } => Some(lease),
            _ => None,
        })
    }

    /// Extends a lease that is held.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn renew(
        &self,
        name: &Name,
        reference: Reference,
        ttl: Option<Ttl>,
    ) -> Result<Reply<RenewOutcome>, EngineError> {
        renewed(self.ask(name, Command::Renew { reference, ttl }).await)
    }

    /// Extends leases, each by itself; replies come in the same order.
    pub async fn renew_many(
        &self,
        renewals: impl IntoIterator<Item = (Name, Reference)>,
        ttl: Option<Ttl>,
    ) -> Vec<Result<Reply<RenewOutcome>, EngineError>> {
        let commands = renewals
            .into_iter()
            .map(|(name, reference)| (self.key(&name), Command::Renew { reference, ttl }));
        let answers = self.shared.leases.ask_many(commands).await;
        answers.into_iter().map(renewed).collect()
    }

    /// Gives a lease back.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn release(
        &self,
        name: &Name,
        reference: Reference,
    ) -> Result<Reply<ReleaseOutcome>, EngineError> {
        outcome!(self.ask(name, Command::Release(reference)).await?, Release)
    }

    /// Waits for the end of a generation: the one named, or whichever holds the key now.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn wait(
        &self,
        name: &Name,
        version: Option<Version>,
        wait: Duration,
    ) -> Result<Reply<WaitOutcome>, EngineError> {
        let engine = &self.shared.leases;
        if engine.is_draining() {
            return Err(EngineError::ShuttingDown);
        }
        engine.wait(&self.key(name), EndOf { version }, wait, false).await?
    }

    /// What a key holds.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn state(&self, name: &Name) -> Result<Reply<Option<Lease>>, EngineError> {
        outcome!(self.ask(name, Command::Read).await?, Read)
    }

    /// Whether a version holds its key; if not, the version that does.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn verify(
        &self,
        name: &Name,
        version: Version,
    ) -> Result<Result<(), Option<Version>>, EngineError> {
        let reply = self.state(name).await?;
        Ok(lease::verify(reply.outcome.as_ref(), version, reply.clock.estimate()))
    }

    /// Frees a key, whoever holds it; with a version, only that one.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn force_release(
        &self,
        name: &Name,
        version: Option<Version>,
    ) -> Result<Reply<ForceReleaseOutcome>, EngineError> {
        outcome!(self.ask(name, Command::ForceRelease { version }).await?, ForceRelease)
    }

    /// Lists keys. `held`: only those that are held (`true`) or not (`false`). A page may be
    /// shorter than `limit`, even empty, and not be the last: only `next` tells.
    ///
    /// # Errors
    ///
    /// The store cannot be read.
    pub async fn list(
        &self,
        prefix: Option<Prefix>,
        held: Option<bool>,
        after: Option<Name>,
        limit: usize,
    ) -> Result<Page<Lease>, StoreError> {
        let query = ListQuery {
            kind: self.kind,
            namespace: self.shared.namespace.clone(),
            scope: Scope::none(),
            prefix: prefix.map_or_else(String::new, |prefix| prefix.as_str().to_owned()),
            after,
            limit: MAX_SCAN,
        };
        let store = Arc::clone(&self.shared.lease_store);
        list(store, query, limit, move |lease: &Lease, clock| {
            held.is_none_or(|held| lease.is_held(clock.now) == held)
        })
        .await
    }
}

fn renewed(
    answer: Result<Answer<LeaseMachine>, EngineError>,
) -> Result<Reply<RenewOutcome>, EngineError> {
    outcome!(answer?, Renew)?.still_running(|outcome| match outcome {
        RenewOutcome::Renewed(lease) => Some(lease),
        RenewOutcome::Stale(_) => None,
    })
}

/// A claim that waits for its turn.
struct ClaimInLine {
    claim: Claim,
}

impl Question<LeaseMachine> for ClaimInLine {
    type Answer = Result<Reply<ClaimOutcome>, EngineError>;

    fn command(&mut self, is_first: bool) -> Command {
        Command::Claim(Claim { may_take: is_first, ..self.claim.clone() })
    }

    fn may_grant(&self) -> bool {
        true
    }

    fn judge(&mut self, answer: Answer<LeaseMachine>) -> Verdict<Self::Answer> {
        let reply = match outcome!(answer, Claim) {
            Ok(reply) => reply,
            Err(error) => return Verdict::Final(Err(error)),
        };
        let look_again_in = match &reply.outcome {
            ClaimOutcome::Held(lease) => reply.clock.remaining(lease.expires_at),
            // Not this claim's turn: nothing in the store's time changes that.
            ClaimOutcome::Free => Duration::MAX,
            ClaimOutcome::Claimed { .. } | ClaimOutcome::Stale(_) => {
                return Verdict::Final(Ok(reply));
            }
        };
        Verdict::Pending { answer: Ok(reply), look_again_in }
    }
}

/// The end of one generation.
struct EndOf {
    version: Option<Version>,
}

impl Question<LeaseMachine> for EndOf {
    type Answer = Result<Reply<WaitOutcome>, EngineError>;

    fn command(&mut self, _is_first: bool) -> Command {
        Command::Watch { version: self.version }
    }

    fn may_grant(&self) -> bool {
        false
    }

    fn judge(&mut self, answer: Answer<LeaseMachine>) -> Verdict<Self::Answer> {
        let reply = match outcome!(answer, Watch) {
            Ok(reply) => reply,
            Err(error) => return Verdict::Final(Err(error)),
        };
        match reply.outcome.clone() {
            WatchOutcome::Over(reason) => {
                Verdict::Final(Ok(reply.map(|_| WaitOutcome::Over(reason))))
            }
            WatchOutcome::Holding(lease) => {
                self.version = Some(lease.version);
                let look_again_in = reply.clock.remaining(lease.expires_at);
                let answer = Ok(reply.map(|_| WaitOutcome::TimedOut(lease)));
                Verdict::Pending { answer, look_again_in }
            }
        }
    }
}
