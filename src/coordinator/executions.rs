//! Executions, in-process.

use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use super::Shared;
use super::records::Records;
use super::reply::{Page, Reply};
use crate::domain::execution;
use crate::domain::ids::{Binding, CorrelationId, Kind, Name, OwnerId, Prefix, Scope};
use crate::domain::lease::{Claim, ForceReleaseOutcome, Reference};
use crate::domain::record::{
    ClaimOutcome, Command, CompleteOutcome, Record, RecordState, ReleaseOutcome,
};
use crate::domain::time::Ttl;
use crate::domain::version::Version;
use crate::engine::EngineError;
use crate::store::StoreError;

/// A wish to run an invocation, or to learn what it came to.
#[derive(Clone, Debug)]
pub struct ClaimExecution {
    /// What the invocation is. Bound at the first claim, for as long as the execution is known.
    pub intent: Binding,
    /// Who asks.
    pub owner_id: OwnerId,
    /// A name in the caller's traces.
    pub correlation_id: Option<CorrelationId>,
    /// For how long. There is no renewal.
    pub ttl: Ttl,
    /// The caller's name for the attempt.
    pub attempt_id: Option<Uuid>,
    /// How long to wait for the one that runs; zero: not at all.
    pub wait: Duration,
}

impl ClaimExecution {
    fn command(self) -> Command {
        let Self { intent, owner_id, correlation_id, ttl, attempt_id, wait: _ } = self;
        let grant_id = rand::random();
        let claim = Claim { owner_id, ttl, attempt_id, grant_id, metadata: None, may_take: true };
        execution::claim(claim, intent, correlation_id)
    }
}

/// What can be done with executions; [`crate::domain::record`] has the rules.
///
/// ```
/// # use std::time::Duration;
/// # use fencepost::coordinator::{ClaimExecution, Coordinator, CoordinatorOptions};
/// # use fencepost::domain::lease::Reference;
/// # use fencepost::domain::record::ClaimOutcome;
/// # use fencepost::domain::time::Ttl;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let coordinator = Coordinator::open("memory:", CoordinatorOptions::default()).await?;
/// let id = "charge:order-7".parse()?;
/// let wish = ClaimExecution {
///     intent: "charge order 7 with 12.50 EUR".parse()?,
///     owner_id: coordinator.owner_id().clone(),
///     correlation_id: None,
///     ttl: Ttl::from_millis(30_000).unwrap(),
///     attempt_id: None,
///     wait: Duration::ZERO,
/// };
/// match coordinator.executions().claim(&id, wish).await?.keep().0 {
///     ClaimOutcome::Claimed { lease, .. } => {
///         let reference = Reference { owner_id: lease.owner_id, version: lease.version };
///         coordinator.executions().complete(&id, reference, r#"{"charge":"ch_1"}"#.into()).await?;
///     }
///     ClaimOutcome::Completed(_, done) => println!("done before: {}", done.content.text),
///     other => println!("not now: {other:?}"),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Executions<'a> {
    records: Records<'a>,
}

impl<'a> Executions<'a> {
    pub(super) fn new(shared: &'a Arc<Shared>) -> Self {
        Self { records: Records { shared, kind: Kind::Execution } }
    }

    /// Claims an execution, or learns what it came to.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn claim(
        &self,
        id: &Name,
        wish: ClaimExecution,
    ) -> Result<Reply<ClaimOutcome>, EngineError> {
        let wait = wish.wait;
        self.records.claim(&Scope::none(), id, wish.command(), wait).await
    }

    /// Claims executions, each by itself and none waiting; replies come in the same order.
    pub async fn claim_many(
        &self,
        wishes: impl IntoIterator<Item = (Name, ClaimExecution)>,
    ) -> Vec<Result<Reply<ClaimOutcome>, EngineError>> {
        let commands = wishes.into_iter().map(|(id, wish)| (id, wish.command()));
        self.records.claim_many(&Scope::none(), commands).await
    }

    /// Stores the result: any JSON text, kept to the byte.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn complete(
        &self,
        id: &Name,
        reference: Reference,
        result: Arc<str>,
    ) -> Result<Reply<CompleteOutcome>, EngineError> {
        let retention = self.records.shared.options.execution_retention;
        let command = execution::complete(reference, result, retention);
        self.records.complete(&Scope::none(), id, command).await
    }

    /// Stores results, each by itself; replies come in the same order.
    pub async fn complete_many(
        &self,
        results: impl IntoIterator<Item = (Name, Reference, Arc<str>)>,
    ) -> Vec<Result<Reply<CompleteOutcome>, EngineError>> {
        let retention = self.records.shared.options.execution_retention;
        let commands = results
            .into_iter()
            .map(|(id, reference, result)| (id, execution::complete(reference, result, retention)));
        self.records.complete_many(&Scope::none(), commands).await
    }

    /// Gives the claim back, so that another may run it.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn release(
        &self,
        id: &Name,
        reference: Reference,
    ) -> Result<Reply<ReleaseOutcome>, EngineError> {
        self.records.release(&Scope::none(), id, execution::release(reference)).await
    }

    /// Ends the claim, whoever holds it; with a version, only that one.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn force_release(
        &self,
        id: &Name,
        version: Option<Version>,
    ) -> Result<Reply<ForceReleaseOutcome>, EngineError> {
        self.records.force_release(&Scope::none(), id, execution::force_release(version)).await
    }

    /// What is known of an execution.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn state(&self, id: &Name) -> Result<Reply<Option<Record>>, EngineError> {
        self.records.state(&Scope::none(), id).await
    }

    /// Lists executions, without their results. A page may be shorter than `limit`, even empty,
    /// and not be the last: only `next` tells.
    ///
    /// # Errors
    ///
    /// The store cannot be read.
    pub async fn list(
        &self,
        prefix: Option<Prefix>,
        is_wanted: impl Fn(RecordState) -> bool + Send + 'static,
        after: Option<Name>,
        limit: usize,
    ) -> Result<Page<Record>, StoreError> {
        self.records.list(Scope::none(), prefix, is_wanted, after, limit).await
    }
}
