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

    async fn ask_many(
        &self,
        scope: &Scope,
        commands: impl Iterator<Item = (Name, Command)>,
    ) -> Vec<Result<Answer<RecordMachine>, EngineError>> {
        let key = |(name, command)| (self.shared.key(self.kind, scope, &name), command);
        self.shared.records.ask_many(commands.map(key)).await
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
        still_running(reply)
    }

    /// Claims, each by itself and none waiting.
    pub(super) async fn claim_many(
        &self,
        scope: &Scope,
        commands: impl Iterator<Item = (Name, Command)>,
    ) -> Vec<Result<Reply<ClaimOutcome>, EngineError>> {
        if self.shared.records.is_draining() {
            return commands.map(|_| Err(EngineError::ShuttingDown)).collect();
        }
        let answers = self.ask_many(scope, commands).await;
        answers.into_iter().map(|answer| still_running(outcome!(answer?, Claim)?)).collect()
    }

    pub(super) async fn complete(
        &self,
        scope: &Scope,
        name: &Name,
        command: Command,
    ) -> Result<Reply<CompleteOutcome>, EngineError> {
        outcome!(self.ask(scope, name, command).await?, Complete)
    }

    /// Completions, each by itself.
    pub(super) async fn complete_many(
        &self,
        scope: &Scope,
        commands: impl Iterator<Item = (Name, Command)>,
    ) -> Vec<Result<Reply<CompleteOutcome>, EngineError>> {
        let answers = self.ask_many(scope, commands).await;
        answers.into_iter().map(|answer| outcome!(answer?, Complete)).collect()
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

fn still_running(reply: Reply<ClaimOutcome>) -> Result<Reply<ClaimOutcome>, EngineError> {
    reply.still_running(|outcome| match outcome {
        ClaimOutcome::Claimed { lease, .. } => Some(lease),
        _ => None,
    })
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
