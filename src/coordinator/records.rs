//! What executions and stored responses have in common, in-process.

use std::sync::Arc;
use std::time::Duration;

use super::Shared;
use super::leases::outcome;
use super::reply::{MAX_SCAN, Page, Reply, list};
use crate::domain::ids::{Kind, Name, Prefix, Scope};
use crate::domain::lease::{Claim, ForceReleaseOutcome};
use crate::domain::record::{
    ClaimOutcome, Command, CompleteOutcome, Outcome, Record, RecordMachine, RecordState,
    ReleaseOutcome,
};
use crate::engine::{Answer, EngineError, Question, Verdict};
use crate::store::{ListQuery, StoreError};

/// The records of one kind.
#[derive(Clone, Copy, Debug)]
pub(super) struct Records<'a> {
    pub(super) shared: &'a Arc<Shared>,
    pub(super) kind: Kind,
}

impl Records<'_> {
    pub(super) async fn ask(
        &self,
        scope: &Scope,
        name: &Name,
        command: Command,
    ) -> Result<Answer<RecordMachine>, EngineError> {
        let key = self.shared.key(self.kind, scope, name);
        self.shared.records.ask(&key, command).await
    }

    pub(super) async fn claim(
        &self,
        scope: &Scope,
        name: &Name,
        command: Command,
        wait: Duration,
    ) -> Result<Reply<ClaimOutcome>, EngineError> {
        let engine = &self.shared.records;
        if engine.is_draining() {
            return Err(EngineError::ShuttingDown);
        }
        let reply = if wait.is_zero() {
            outcome!(self.ask(scope, name, command).await?, Claim)?
        } else {
            let key = self.shared.key(self.kind, scope, name);
            engine.wait(&key, ClaimInLine { command }, wait, true).await??
        };
        reply.still_running(|outcome| match outcome {
            ClaimOutcome::Claimed { lease, .. } => Some(lease),
            _ => None,
        })
    }

    pub(super) async fn complete(
        &self,
        scope: &Scope,
        name: &Name,
        command: Command,
    ) -> Result<Reply<CompleteOutcome>, EngineError> {
        outcome!(self.ask(scope, name, command).await?, Complete)
    }

    pub(super) async fn release(
        &self,
        scope: &Scope,
        name: &Name,
        command: Command,
    ) -> Result<Reply<ReleaseOutcome>, EngineError> {
        outcome!(self.ask(scope, name, command).await?, Release)
    }

    pub(super) async fn force_release(
        &self,
        scope: &Scope,
        name: &Name,
        command: Command,
    ) -> Result<Reply<ForceReleaseOutcome>, EngineError> {
        outcome!(self.ask(scope, name, command).await?, ForceRelease)
    }

    pub(super) async fn state(
        &self,
        scope: &Scope,
        name: &Name,
    ) -> Result<Reply<Option<Record>>, EngineError> {
        outcome!(self.ask(scope, name, Command::Read).await?, Read)
    }

    pub(super) async fn list(
        &self,
        scope: Scope,
        prefix: Option<Prefix>,
        is_wanted: impl Fn(RecordState) -> bool + Send + 'static,
        after: Option<Name>,
        limit: usize,
    ) -> Result<Page<Record>, StoreError> {
        let query = ListQuery {
            kind: self.kind,
            namespace: self.shared.namespace.clone(),
            scope,
            prefix: prefix.map_or_else(String::new, |prefix| prefix.as_str().to_owned()),
            after,
            limit: MAX_SCAN,
        };
        let store = Arc::clone(&self.shared.record_store);
        list(store, query, limit, move |record: &Record, clock| {
            !record.is_forgotten(clock.now) && is_wanted(record.state(clock.now))
        })
        .await
    }
}

/// A claim that waits for the record to be free, or done.
struct ClaimInLine {
    command: Command,
}

impl Question<RecordMachine> for ClaimInLine {
    type Answer = Result<Reply<ClaimOutcome>, EngineError>;

    fn command(&mut self, is_first: bool) -> Command {
        match self.command.clone() {
            Command::Claim { claim, binding, correlation_id, unbinds } => Command::Claim {
                claim: Claim { may_take: is_first, ..claim },
                binding,
                correlation_id,
                unbinds,
            },
            other => other,
        }
    }

    fn may_grant(&self) -> bool {
        true
    }

    /// A completion is the answer to everybody in line.
    fn heeds_every_change(&self) -> bool {
        true
    }

    fn judge(&mut self, answer: Answer<RecordMachine>) -> Verdict<Self::Answer> {
        let reply = match outcome!(answer, Claim) {
            Ok(reply) => reply,
            Err(error) => return Verdict::Final(Err(error)),
        };
        let look_again_in = match &reply.outcome {
            ClaimOutcome::InProgress(lease) => reply.clock.remaining(lease.expires_at),
            ClaimOutcome::Free => Duration::MAX,
            ClaimOutcome::Claimed { .. }
            | ClaimOutcome::Completed(..)
            | ClaimOutcome::Conflict
            | ClaimOutcome::Stale(_) => return Verdict::Final(Ok(reply)),
        };
        Verdict::Pending { answer: Ok(reply), look_again_in }
    }
}
