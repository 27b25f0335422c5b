//! Stored responses, in-process.

use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use super::Shared;
use super::leases::outcome;
use super::records::Records;
use super::reply::{Page, Reply};
use crate::domain::idempotency::{self, StoredResponse};
use crate::domain::ids::{Binding, Kind, Name, OwnerId, Prefix, Scope};
use crate::domain::lease::{Claim, ForceReleaseOutcome, Reference};
use crate::domain::record::{
    ClaimOutcome, Command, CompleteOutcome, DeleteOutcome, Outcome, PutOutcome, Record,
    RecordState, ReleaseOutcome, RenewOutcome,
};
use crate::domain::time::{Retention, Ttl};
use crate::domain::version::Version;
use crate::engine::EngineError;
use crate::store::StoreError;

/// A wish to do a write, or to learn what was answered to it.
#[derive(Clone, Debug)]
pub struct ClaimRecord {
    /// What the request is; compared only when both sides have one.
    pub fingerprint: Option<Binding>,
    /// Who asks.
    pub owner_id: OwnerId,
    /// For how long.
    pub ttl: Ttl,
    /// The caller's name for the attempt.
    pub attempt_id: Option<Uuid>,
    /// How long to wait for the one that is at it; zero: not at all.
    pub wait: Duration,
}

/// What can be done with stored responses; [`crate::domain::record`] has the rules. Each is named
/// by a scope and a key.
///
/// ```
/// # use fencepost::coordinator::{Coordinator, CoordinatorOptions};
/// # use fencepost::domain::idempotency::{Head, StoredResponse};
/// # use fencepost::domain::ids::Scope;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let coordinator = Coordinator::open("memory:", CoordinatorOptions::default()).await?;
/// let (scope, key): (Scope, _) = ("customer-3".parse()?, "8e03978e".parse()?);
/// let head = Head { status: 201, content_type: None, headers: Vec::new() };
/// let response = StoredResponse { head, body: Some("made".into()) };
/// let records = coordinator.idempotency();
/// records.put(&scope, &key, response.clone(), None).await?;
/// assert_eq!(records.get(&scope, &key).await?, Some(response));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Idempotency<'a> {
    records: Records<'a>,
}

impl<'a> Idempotency<'a> {
    pub(super) fn new(shared: &'a Arc<Shared>) -> Self {
        Self { records: Records { shared, kind: Kind::Idempotency } }
    }

    /// The stored response, if there is one.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn get(
        &self,
        scope: &Scope,
        key: &Name,
    ) -> Result<Option<StoredResponse>, EngineError> {
        let record = self.state(scope, key).await?.outcome;
        let completion = record.and_then(|record| record.completion);
        Ok(completion.and_then(|completion| StoredResponse::from_content(&completion.content)))
    }

    /// Stores a response without a claim.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn put(
        &self,
        scope: &Scope,
        key: &Name,
        response: StoredResponse,
        retention: Option<Retention>,
    ) -> Result<Reply<PutOutcome>, EngineError> {
        let command = idempotency::put(response, self.retention(retention));
        outcome!(self.records.ask(scope, key, command).await?, Put)
    }

    /// Forgets a stored response.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn delete(
        &self,
        scope: &Scope,
        key: &Name,
    ) -> Result<Reply<DeleteOutcome>, EngineError> {
        outcome!(self.records.ask(scope, key, Command::Delete).await?, Delete)
    }

    /// Claims the write, or learns what was answered to it.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn claim(
        &self,
        scope: &Scope,
        key: &Name,
        wish: ClaimRecord,
    ) -> Result<Reply<ClaimOutcome>, EngineError> {
        let ClaimRecord { fingerprint, owner_id, ttl, attempt_id, wait } = wish;
        let grant_id = rand::random();
        let claim = Claim { owner_id, ttl, attempt_id, grant_id, metadata: None, may_take: true };
        self.records.claim(scope, key, idempotency::claim(claim, fingerprint), wait).await
    }

    /// Stores the response of the write that was claimed.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn complete(
        &self,
        scope: &Scope,
        key: &Name,
        reference: Reference,
        response: StoredResponse,
        retention: Option<Retention>,
    ) -> Result<Reply<CompleteOutcome>, EngineError> {
        let command = idempotency::complete(reference, response, self.retention(retention));
        self.records.complete(scope, key, command).await
    }

    /// Extends a claim that is held.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn renew(
        &self,
        scope: &Scope,
        key: &Name,
        reference: Reference,
        ttl: Option<Ttl>,
    ) -> Result<Reply<RenewOutcome>, EngineError> {
        let command = idempotency::renew(reference, ttl);
        let reply = outcome!(self.records.ask(scope, key, command).await?, Renew)?;
        reply.still_running(|outcome| match outcome {
            RenewOutcome::Renewed(lease) => Some(lease),
            RenewOutcome::AlreadyCompleted(_) | RenewOutcome::Stale(_) => None,
        })
    }

    /// Gives the claim back, so that another may do the write.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn release(
        &self,
        scope: &Scope,
        key: &Name,
        reference: Reference,
    ) -> Result<Reply<ReleaseOutcome>, EngineError> {
        self.records.release(scope, key, idempotency::release(reference)).await
    }

    /// Ends the claim, whoever holds it; with a version, only that one.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn force_release(
        &self,
        scope: &Scope,
        key: &Name,
        version: Option<Version>,
    ) -> Result<Reply<ForceReleaseOutcome>, EngineError> {
        self.records.force_release(scope, key, idempotency::force_release(version)).await
    }

    /// What is known of a write.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn state(
        &self,
        scope: &Scope,
        key: &Name,
    ) -> Result<Reply<Option<Record>>, EngineError> {
        self.records.state(scope, key).await
    }

    /// Lists the keys of one scope, without what is stored. A page may be shorter than `limit`,
    /// even empty, and not be the last: only `next` tells.
    ///
    /// # Errors
    ///
    /// The store cannot be read.
    pub async fn list(
        &self,
        scope: Scope,
        prefix: Option<Prefix>,
        is_wanted: impl Fn(RecordState) -> bool + Send + 'static,
        after: Option<Name>,
        limit: usize,
    ) -> Result<Page<Record>, StoreError> {
        self.records.list(scope, prefix, is_wanted, after, limit).await
    }

    fn retention(&self, given: Option<Retention>) -> Retention {
        given.unwrap_or(self.records.shared.options.idempotency_retention)
    }
}
