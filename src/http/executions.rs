//! `/v1/executions`: run one logical invocation once, recover it safely, replay its result.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Extension, State};
use axum::response::Response;
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::leases::ForceReleaseResult;
use super::openapi::{Problems, ReadProblems, RecordConflict};
use super::problem::Problem;
use super::request::{
    AnyJson, Items, Limit, Optional, Required, Strict, StrictQuery, WaitMs, request,
};
use super::router::{App, Received};
use super::shape::{
    Holder, LeaseBody, RecordStateName, Subject, audit, default_ttl, instant, millis, ok,
    polling_hint, stale_lease,
};
use super::token::PageToken;
use crate::coordinator::{ClaimExecution, Reply};
use crate::domain::execution::DEFAULT_TTL_MS;
use crate::domain::ids::{Binding, CorrelationId, Kind, Name, OwnerId, Prefix, Reason};
use crate::domain::lease::Reference;
use crate::domain::record::{ClaimOutcome, CompleteOutcome, Record, RecordState, ReleaseOutcome};
use crate::domain::time::Ttl;
use crate::domain::version::Version;
use crate::engine::EngineError;
use crate::store::StoreClock;

/// The largest result, in bytes of JSON.
pub(super) const RESULT_BYTES: (&str, usize) = ("result_bytes", 1 << 20);
/// The largest body of `complete`: a result and the members around it.
const COMPLETE_BYTES: (&str, usize) = ("result_bytes", (1 << 20) + (64 << 10));
/// The largest body of a `-many` call.
const MANY_BYTES: (&str, usize) = super::leases::MANY_BYTES;

/// The routes.
pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(claim_execution))
        .routes(routes!(claim_many_executions))
        .routes(routes!(complete_execution))
        .routes(routes!(complete_many_executions))
        .routes(routes!(release_execution))
        .routes(routes!(get_execution_state))
        .routes(routes!(list_executions))
        .routes(routes!(force_release_execution))
}

request! {
    /// A wish to run an invocation, or to learn what it came to.
    body ClaimExecutionRequest {
        /// The invocation: 1 to 512 bytes of any text without control characters.
        #[schema(min_length = 1, max_length = 512)]
        execution_id: Required<Name> as String,
        /// What the invocation is, 1 to 512 bytes: bound to the id at the first claim, for as long
        /// as the execution is known.
        #[schema(min_length = 1, max_length = 512)]
        intent: Required<Binding> as String,
        /// Who asks: 1 to 256 bytes.
        #[schema(min_length = 1, max_length = 256)]
        owner_id: Required<OwnerId> as String,
        /// A name in the caller's traces, 1 to 256 bytes; decides nothing.
        #[schema(min_length = 1, max_length = 256)]
        correlation_id: Optional<CorrelationId> as Option<String>,
        /// How long the claim lasts; there is no renewal. If left out, 30000.
        #[schema(minimum = 100, maximum = 86_400_000)]
        ttl_ms: Optional<Ttl> as Option<i64>,
        /// A fresh UUID for each attempt, the same when the request is repeated.
        attempt_id: Optional<Uuid> as Option<Uuid>,
        /// How long to wait for one that runs. If left out, 0: answer at once.
        #[schema(minimum = 0, maximum = 50_000)]
        wait_ms: Optional<WaitMs> as Option<i32>,
    }
}

/// The answer to a claim of an execution, or to one item of `claimManyExecutions`.
#[derive(Default, Serialize, ToSchema)]
struct ClaimExecutionResult {
    /// `claimed`: run it. `completed`: it was run; `result` is what it came to.
    /// `already_in_progress`: somebody runs it. `intent_conflict`: the id is bound to another
    /// intent. For an item of `claimManyExecutions`, also the code of the problem that a single
    /// claim would answer. More may be added.
    #[schema(example = "claimed")]
    outcome: &'static str,
    /// With `claimed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    lease: Option<LeaseBody>,
    /// With `claimed`: whether an earlier request of the same attempt got this grant.
    #[serde(skip_serializing_if = "Option::is_none")]
    repeated: Option<bool>,
    /// With `claimed`, if true: the claim before this one was lost, by expiry or by force, and not
    /// given back; its work may have been done in part.
    #[serde(skip_serializing_if = "Option::is_none")]
    recovered: Option<bool>,
    /// With `recovered`: the version of the lost claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    previous_version: Option<i64>,
    /// With `completed`: any JSON value, exactly as it was sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<serde_json::Value>)]
    result: Option<Box<RawValue>>,
    /// With `completed`: the version of the claim that completed it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    version: Option<i64>,
    /// With `completed`, if the claim that completed it had one.
    #[serde(skip_serializing_if = "Option::is_none")]
    correlation_id: Option<String>,
    /// With `completed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    completed_at: Option<String>,
    /// With `already_in_progress`.
    #[serde(skip_serializing_if = "Option::is_none")]
    holder: Option<Holder>,
    /// With `already_in_progress`: a hint for callers that poll instead of waiting.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0, maximum = 1_000)]
    retry_after_ms: Option<i64>,
    /// Of an item of `claimManyExecutions` that failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    execution_id: Option<String>,
    /// With `stale_lease`: as in the problem.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    /// Of a single claim: the server's time from receiving the request to writing this.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0)]
    elapsed_ms: Option<i64>,
}

fn claimed(
    id: &Name,
    outcome: ClaimOutcome,
    clock: StoreClock,
) -> Result<ClaimExecutionResult, Problem> {
    let none = ClaimExecutionResult::default();
    Ok(match outcome {
        ClaimOutcome::Claimed { lease, repeated } => ClaimExecutionResult {
            outcome: "claimed",
            repeated: Some(repeated),
            recovered: lease.recovered_from.map(|_| true),
            previous_version: lease.recovered_from.map(Version::get),
            lease: Some(LeaseBody::new(Subject::Execution(id), &lease, clock)),
            ..none
        },
        ClaimOutcome::Completed(record, completion) => ClaimExecutionResult {
            outcome: "completed",
            result: RawValue::from_string(completion.content.text.to_string()).ok(),
            version: Some(record.lease.version.get()),
            correlation_id: record.correlation_id.map(|id| id.as_str().to_owned()),
            completed_at: Some(instant(completion.at)),
            ..none
        },
        ClaimOutcome::InProgress(lease) => {
            let holder = Holder::new(&lease, clock);
            ClaimExecutionResult {
                outcome: "already_in_progress",
                retry_after_ms: Some(polling_hint(holder.expires_in_ms)),
                holder: Some(holder),
                ..none
            }
        }
        ClaimOutcome::Conflict => ClaimExecutionResult { outcome: "intent_conflict", ..none },
        ClaimOutcome::Stale(stale) => return Err(stale_lease(Kind::Execution, &stale, clock)),
        ClaimOutcome::Free => {
            return Err(EngineError::Internal("a claim was not decided".into()).into());
        }
    })
}

/// Claim an execution
///
/// For an operation that must run once. Whoever is told `claimed` runs it and then stores its
/// result with `completeExecution`; everybody who claims it afterwards, with the same intent, is
/// given that result, exactly as it was sent: member order, spelling of numbers and inner white
/// space included. The intent is checked first, in every state. There is no renewal, on purpose: a
/// run that takes longer than its ttl may be taken over, and then learns so.
///
/// With `wait_ms`, the call attaches to the one that runs: it answers when that completes, or
/// claims when that is released or lapses.
#[utoipa::path(
    post, path = "/v1/executions/claim", operation_id = "claimExecution", tag = "executions",
    request_body(content = ClaimExecutionRequest, example = json!({
        "execution_id": "charge:order-7", "intent": "sha256:9f86d081", "owner_id": "worker-1"
    })),
    responses(
        (status = 200, description = "Who runs it, or what it came to.",
         body = ClaimExecutionResult,
         example = json!({
            "outcome": "completed", "result": {"charge": "ch_1"},
            "version": 1_796_025_600_000_000_i64, "completed_at": "2026-11-30T12:00:00.000Z",
            "elapsed_ms": 2
         })),
        Problems,
        RecordConflict
    )
)]
async fn claim_execution(
    State(app): State<Arc<App>>,
    Extension(received): Extension<Received>,
    Strict(request): Strict<ClaimExecutionRequest>,
) -> Result<Response, Problem> {
    let ClaimExecutionRequest {
        execution_id,
        intent,
        owner_id,
        correlation_id,
        ttl_ms,
        attempt_id,
        wait_ms,
    } = request;
    let wish = ClaimExecution {
        intent,
        owner_id,
        correlation_id,
        ttl: ttl_ms.unwrap_or(default_ttl(DEFAULT_TTL_MS)),
        attempt_id,
        wait: wait_ms.map_or(Duration::ZERO, WaitMs::duration),
    };
    let reply = app.coordinator.executions().claim(&execution_id, wish).await?;
    let (outcome, clock) = reply.keep();
    let elapsed_ms = Some(received.elapsed_ms());
    let result = claimed(&execution_id, outcome, clock)?;
    Ok(ok(ClaimExecutionResult { elapsed_ms, ..result }))
}

request! {
    /// Invocations to run, or to learn what they came to.
    body ClaimManyExecutionsRequest max MANY_BYTES {
        /// 1 to 1,000 claims.
        #[schema(min_items = 1, max_items = 1_000)]
        items: Items<ClaimExecutionItemRequest> as Vec<ClaimExecutionItemRequest>,
    }
}

request! {
    /// One of the claims.
    body ClaimExecutionItemRequest {
        /// The invocation.
        #[schema(min_length = 1, max_length = 512)]
        execution_id: Required<Name> as String,
        /// What the invocation is.
        #[schema(min_length = 1, max_length = 512)]
        intent: Required<Binding> as String,
        /// Who asks.
        #[schema(min_length = 1, max_length = 256)]
        owner_id: Required<OwnerId> as String,
        /// A name in the caller's traces.
        #[schema(min_length = 1, max_length = 256)]
        correlation_id: Optional<CorrelationId> as Option<String>,
        /// How long the claim lasts. If left out, 30000.
        #[schema(minimum = 100, maximum = 86_400_000)]
        ttl_ms: Optional<Ttl> as Option<i64>,
        /// A fresh UUID for each attempt, the same when the request is repeated.
        attempt_id: Optional<Uuid> as Option<Uuid>,
    }
}

/// The answer to claims of many.
#[derive(Serialize, ToSchema)]
struct ClaimManyExecutionsResult {
    /// One for each item, in their order.
    results: Vec<ClaimExecutionResult>,
    /// The server's time from receiving the request to writing this.
    #[schema(minimum = 0)]
    elapsed_ms: i64,
}

/// Claim many executions
///
/// Each as `claimExecution` does without waiting, and each by itself: for consumers that sort out
/// the duplicates of a batch of messages.
#[utoipa::path(
    post, path = "/v1/executions/claim-many", operation_id = "claimManyExecutions",
    tag = "executions",
    request_body(content = ClaimManyExecutionsRequest, example = json!({
        "items": [
            {"execution_id": "message-1", "intent": "sha256:9f86d081", "owner_id": "worker-1"}
        ]
    })),
    responses(
        (status = 200, description = "What became of each.", body = ClaimManyExecutionsResult,
         example = json!({"results": [{"outcome": "intent_conflict"}], "elapsed_ms": 2})),
        Problems
    )
)]
async fn claim_many_executions(
    State(app): State<Arc<App>>,
    Extension(received): Extension<Received>,
    Strict(request): Strict<ClaimManyExecutionsRequest>,
) -> Result<Response, Problem> {
    let mut ids = Vec::with_capacity(request.items.len());
    let wishes = request.items.into_iter().map(|item| {
        ids.push(item.execution_id.clone());
        let wish = ClaimExecution {
            intent: item.intent,
            owner_id: item.owner_id,
            correlation_id: item.correlation_id,
            ttl: item.ttl_ms.unwrap_or(default_ttl(DEFAULT_TTL_MS)),
            attempt_id: item.attempt_id,
            wait: Duration::ZERO,
        };
        (item.execution_id, wish)
    });
    let replies = app.coordinator.executions().claim_many(wishes).await;
    let elapsed_ms = received.elapsed_ms();
    let results = ids.iter().zip(replies).map(|(id, reply)| {
        let result = reply.map_err(Problem::from).and_then(|reply| {
            let (outcome, clock) = reply.keep();
            claimed(id, outcome, clock)
        });
        result.unwrap_or_else(|problem| ClaimExecutionResult {
            outcome: problem.code(),
            reason: problem.reason(),
            execution_id: Some(id.as_str().to_owned()),
            ..ClaimExecutionResult::default()
        })
    });
    Ok(ok(ClaimManyExecutionsResult { results: results.collect(), elapsed_ms }))
}

request! {
    /// What an execution came to.
    body CompleteExecutionRequest max COMPLETE_BYTES {
        /// The invocation.
        #[schema(min_length = 1, max_length = 512)]
        execution_id: Required<Name> as String,
        /// The owner of the claim.
        #[schema(min_length = 1, max_length = 256)]
        owner_id: Required<OwnerId> as String,
        /// The version of the claim.
        #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
        version: Required<Version> as i64,
        /// Any JSON value, `null` included, at most 1 MiB; kept to the byte.
        result: Required<AnyJson> as serde_json::Value,
    }
}

/// The answer to a completion, or to one item of `completeManyExecutions`.
#[derive(Serialize, ToSchema)]
struct CompleteExecutionResult {
    /// `completed`. For an item of `completeManyExecutions`, also the code of the problem that a
    /// single completion would answer. More may be added.
    #[schema(example = "completed")]
    outcome: &'static str,
    /// Of an item of `completeManyExecutions` that failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    execution_id: Option<String>,
    /// With `stale_lease`: as in the problem.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
}

fn completed(reply: Reply<CompleteOutcome>) -> Result<(), Problem> {
    match reply.keep() {
        (CompleteOutcome::Completed, _) => Ok(()),
        (CompleteOutcome::AlreadyCompleted(lease), _) => Err(Problem::already_completed(&lease)),
        (CompleteOutcome::Stale(stale), clock) => Err(stale_lease(Kind::Execution, &stale, clock)),
    }
}

/// Complete an execution
///
/// Stores the result for good, and wakes those that wait for it. The owner of the newest claim may
/// complete even after its time is over, as long as nobody has claimed anew: the work is done.
/// Repeated with the same result, it succeeds again; with another one, 409 `already_completed`. A
/// claim that is not the newest, or was released, gets 409 `stale_lease`.
#[utoipa::path(
    post, path = "/v1/executions/complete", operation_id = "completeExecution",
    tag = "executions",
    request_body(content = CompleteExecutionRequest, example = json!({
        "execution_id": "charge:order-7", "owner_id": "worker-1",
        "version": 1_796_025_600_000_000_i64, "result": {"charge": "ch_1"}
    })),
    responses(
        (status = 200, description = "The result is stored.", body = CompleteExecutionResult,
         example = json!({"outcome": "completed"})),
        Problems,
        RecordConflict
    )
)]
async fn complete_execution(
    State(app): State<Arc<App>>,
    Strict(request): Strict<CompleteExecutionRequest>,
) -> Result<Response, Problem> {
    let CompleteExecutionRequest { execution_id, owner_id, version, result } = request;
    let AnyJson(result) = result;
    if result.len() > RESULT_BYTES.1 {
        return Err(Problem::payload_too_large(RESULT_BYTES.0, RESULT_BYTES.1));
    }
    let reference = Reference { owner_id, version };
    completed(app.coordinator.executions().complete(&execution_id, reference, result).await?)?;
    Ok(ok(CompleteExecutionResult { outcome: "completed", execution_id: None, reason: None }))
}

request! {
    /// What executions came to.
    body CompleteManyExecutionsRequest max MANY_BYTES {
        /// 1 to 1,000 completions.
        #[schema(min_items = 1, max_items = 1_000)]
        items: Items<CompleteExecutionRequest> as Vec<CompleteExecutionRequest>,
    }
}

/// The answer to completions of many.
#[derive(Serialize, ToSchema)]
struct CompleteManyExecutionsResult {
    /// One for each item, in their order.
    results: Vec<CompleteExecutionResult>,
    /// The server's time from receiving the request to writing this.
    #[schema(minimum = 0)]
    elapsed_ms: i64,
}

/// Complete many executions
///
/// Each as `completeExecution` does, and each by itself.
#[utoipa::path(
    post, path = "/v1/executions/complete-many", operation_id = "completeManyExecutions",
    tag = "executions",
    request_body(content = CompleteManyExecutionsRequest, example = json!({
        "items": [{
            "execution_id": "message-1", "owner_id": "worker-1",
            "version": 1_796_025_600_000_000_i64, "result": null
        }]
    })),
    responses(
        (status = 200, description = "What became of each.", body = CompleteManyExecutionsResult,
         example = json!({"results": [{"outcome": "completed"}], "elapsed_ms": 2})),
        Problems
    )
)]
async fn complete_many_executions(
    State(app): State<Arc<App>>,
    Extension(received): Extension<Received>,
    Strict(request): Strict<CompleteManyExecutionsRequest>,
) -> Result<Response, Problem> {
    // No result in a request of that size is itself too large.
    const { assert!(MANY_BYTES.1 <= RESULT_BYTES.1) };
    let mut ids = Vec::with_capacity(request.items.len());
    let completions = request.items.into_iter().map(|item| {
        let CompleteExecutionRequest { execution_id, owner_id, version, result } = item;
        ids.push(execution_id.clone());
        let AnyJson(result) = result;
        (execution_id, Reference { owner_id, version }, result)
    });
    let replies = app.coordinator.executions().complete_many(completions).await;
    let results = ids.iter().zip(replies).map(|(id, reply)| {
        match reply.map_err(Problem::from).and_then(completed) {
            Ok(()) => {
                CompleteExecutionResult { outcome: "completed", execution_id: None, reason: None }
            }
            Err(problem) => CompleteExecutionResult {
                outcome: problem.code(),
                execution_id: Some(id.as_str().to_owned()),
                reason: problem.reason(),
            },
        }
    });
    let results = results.collect();
    Ok(ok(CompleteManyExecutionsResult { results, elapsed_ms: received.elapsed_ms() }))
}

request! {
    /// A claim to give back.
    body ReleaseExecutionRequest {
        /// The invocation.
        #[schema(min_length = 1, max_length = 512)]
        execution_id: Required<Name> as String,
        /// The owner of the claim.
        #[schema(min_length = 1, max_length = 256)]
        owner_id: Required<OwnerId> as String,
        /// The version of the claim.
        #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
        version: Required<Version> as i64,
    }
}

/// The answer to a release.
#[derive(Serialize, ToSchema)]
pub(super) struct ReleaseRecordResult {
    /// `released`. More may be added.
    #[schema(example = "released")]
    outcome: &'static str,
}

impl ReleaseRecordResult {
    pub(super) fn new(
        resource: Kind,
        outcome: &ReleaseOutcome,
        clock: StoreClock,
    ) -> Result<Self, Problem> {
        match outcome {
            ReleaseOutcome::Released => Ok(Self { outcome: "released" }),
            ReleaseOutcome::AlreadyCompleted(lease) => Err(Problem::already_completed(lease)),
            ReleaseOutcome::Stale(stale) => Err(stale_lease(resource, stale, clock)),
        }
    }
}

/// Release an execution
///
/// Lets another run it at once; the intent stays bound. Allowed after the claim's time is over, as
/// long as nobody has claimed anew. Repeated with the same reference, it succeeds again until the
/// next claim.
#[utoipa::path(
    post, path = "/v1/executions/release", operation_id = "releaseExecution", tag = "executions",
    request_body(content = ReleaseExecutionRequest, example = json!({
        "execution_id": "charge:order-7", "owner_id": "worker-1",
        "version": 1_796_025_600_000_000_i64
    })),
    responses(
        (status = 200, description = "It can be claimed.", body = ReleaseRecordResult,
         example = json!({"outcome": "released"})),
        Problems,
        RecordConflict
    )
)]
async fn release_execution(
    State(app): State<Arc<App>>,
    Strict(request): Strict<ReleaseExecutionRequest>,
) -> Result<Response, Problem> {
    let ReleaseExecutionRequest { execution_id, owner_id, version } = request;
    let reference = Reference { owner_id, version };
    let reply = app.coordinator.executions().release(&execution_id, reference).await?;
    let (outcome, clock) = reply.keep();
    Ok(ok(ReleaseRecordResult::new(Kind::Execution, &outcome, clock)?))
}

request! {
    /// An execution to look at.
    query GetExecutionStateQuery {
        /// The invocation.
        #[param(min_length = 1, max_length = 512, example = "charge:order-7")]
        execution_id: Required<Name> as String,
    }
}

/// What is known of an execution.
#[derive(Serialize, ToSchema)]
struct ExecutionState {
    /// The invocation.
    execution_id: String,
    /// `absent`, `in_progress`, `released` or `completed`. More may be added.
    #[schema(example = "completed")]
    state: &'static str,
    /// With `in_progress`: whether its time is over, so that the next claim gets it.
    #[serde(skip_serializing_if = "Option::is_none")]
    reclaimable: Option<bool>,
    /// What the invocation is.
    #[serde(skip_serializing_if = "Option::is_none")]
    intent: Option<String>,
    /// Of the newest claim, if it had one.
    #[serde(skip_serializing_if = "Option::is_none")]
    correlation_id: Option<String>,
    /// The owner of the newest claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    owner_id: Option<String>,
    /// The version of the newest claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    version: Option<i64>,
    /// When the newest claim was granted.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    acquired_at: Option<String>,
    /// With `in_progress`: the end of the claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    expires_at: Option<String>,
    /// With `in_progress`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0)]
    expires_in_ms: Option<i64>,
    /// With `completed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    completed_at: Option<String>,
    /// With `completed`, but not in lists: any JSON value, exactly as it was sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<serde_json::Value>)]
    result: Option<Box<RawValue>>,
}

impl ExecutionState {
    fn new(
        id: &Name,
        record: Option<&Record>,
        state: Option<RecordState>,
        clock: StoreClock,
    ) -> Self {
        let in_progress = record.filter(|_| matches!(state, Some(RecordState::InProgress { .. })));
        let completion = record.and_then(|record| record.completion.as_ref());
        let result = completion.map(|completion| completion.content.text.to_string());
        Self {
            execution_id: id.as_str().to_owned(),
            state: match state {
                None => "absent",
                Some(RecordState::InProgress { .. }) => "in_progress",
                Some(RecordState::Released) => "released",
                Some(RecordState::Completed) => "completed",
            },
            reclaimable: match state {
                Some(RecordState::InProgress { is_reclaimable }) => Some(is_reclaimable),
                _ => None,
            },
            intent: record.and_then(|r| Some(r.binding.as_ref()?.as_str().to_owned())),
            correlation_id: record
                .and_then(|r| Some(r.correlation_id.as_ref()?.as_str().to_owned())),
            owner_id: record.map(|record| record.lease.owner_id.as_str().to_owned()),
            version: record.map(|record| record.lease.version.get()),
            acquired_at: record.map(|record| instant(record.lease.acquired_at)),
            expires_at: in_progress.map(|record| instant(record.lease.expires_at)),
            expires_in_ms: in_progress.map(|r| millis(clock.remaining(r.lease.expires_at))),
            completed_at: completion.map(|completion| instant(completion.at)),
            // In lists the text is not loaded, and empty is not JSON.
            result: result.and_then(|text| RawValue::from_string(text).ok()),
        }
    }
}

/// Look at an execution
///
/// Never 404: an id that nobody claimed is `absent`.
#[utoipa::path(
    get, path = "/v1/executions/state", operation_id = "getExecutionState", tag = "executions",
    params(GetExecutionStateQuery),
    responses(
        (status = 200, description = "What is known of it.", body = ExecutionState,
         example = json!({"execution_id": "charge:order-7", "state": "absent"})),
        ReadProblems
    )
)]
async fn get_execution_state(
    State(app): State<Arc<App>>,
    StrictQuery(query): StrictQuery<GetExecutionStateQuery>,
) -> Result<Response, Problem> {
    let reply = app.coordinator.executions().state(&query.execution_id).await?;
    let (record, clock) = reply.keep();
    let state = record.as_ref().map(|record| record.state(clock.estimate()));
    Ok(ok(ExecutionState::new(&query.execution_id, record.as_ref(), state, clock)))
}

request! {
    /// Which executions to list.
    query ListExecutionsQuery {
        /// Only ids that begin with this.
        #[param(max_length = 512, example = "charge:")]
        prefix: Optional<Prefix> as Option<String>,
        /// Only those in this state: `in_progress`, `released` or `completed`.
        #[param(example = "in_progress")]
        state: Optional<RecordStateName> as Option<String>,
        /// At most this many items. If left out, 100.
        #[param(minimum = 1, maximum = 1_000)]
        limit: Optional<Limit> as Option<i32>,
        /// The `next_page_token` of the page before.
        page_token: Optional<PageToken> as Option<String>,
    }
}

/// One page of a list.
#[derive(Serialize, ToSchema)]
struct ListExecutionsResult {
    /// Ids in the order of their bytes, without results. A page can be short, even empty, and not
    /// be the last.
    items: Vec<ExecutionState>,
    /// For the next page; absent on the last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_page_token: Option<String>,
}

/// List executions
///
/// All that are known, without their results.
#[utoipa::path(
    get, path = "/v1/executions", operation_id = "listExecutions", tag = "executions",
    params(ListExecutionsQuery),
    responses(
        (status = 200, description = "A page of executions.", body = ListExecutionsResult,
         example = json!({"items": []})),
        ReadProblems
    )
)]
async fn list_executions(
    State(app): State<Arc<App>>,
    StrictQuery(query): StrictQuery<ListExecutionsQuery>,
) -> Result<Response, Problem> {
    let ListExecutionsQuery { prefix, state, limit, page_token } = query;
    let is_wanted = move |of| state.is_none_or(|state| state.is(of));
    let after = page_token.map(|PageToken(name)| name);
    let limit = limit.unwrap_or(Limit::DEFAULT).0 as usize;
    let page = app.coordinator.executions().list(prefix, is_wanted, after, limit).await?;
    let items = page.items.iter().map(|(id, record)| {
        let state = Some(record.state(page.clock.now));
        ExecutionState::new(id, Some(record), state, page.clock)
    });
    Ok(ok(ListExecutionsResult {
        items: items.collect(),
        next_page_token: page.next.map(|name| PageToken(name).to_string()),
    }))
}

request! {
    /// A claim to end by force.
    body ForceReleaseExecutionRequest {
        /// The invocation.
        #[schema(min_length = 1, max_length = 512)]
        execution_id: Required<Name> as String,
        /// Why, for the audit log.
        #[schema(min_length = 1, max_length = 512)]
        reason: Required<Reason> as String,
        /// End only this claim, so that a newer one is left alone.
        #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
        version: Optional<Version> as Option<i64>,
    }
}

/// End a claim of an execution by force
///
/// For an operator, when its owner is known to be gone. A claim whose time is over is ended too,
/// as long as nobody has claimed anew: its owner can then no longer complete. The intent stays
/// bound; the next claim is told `recovered`. Logged with its reason.
#[utoipa::path(
    post, path = "/v1/executions/force-release", operation_id = "forceReleaseExecution",
    tag = "executions",
    request_body(content = ForceReleaseExecutionRequest, example = json!({
        "execution_id": "charge:order-7", "reason": "worker-1 was scrapped"
    })),
    responses(
        (status = 200, description = "Whether a claim was ended.", body = ForceReleaseResult,
         example = json!({"outcome": "released", "version": 1_796_025_600_000_000_i64})),
        Problems
    )
)]
async fn force_release_execution(
    State(app): State<Arc<App>>,
    Extension(received): Extension<Received>,
    Strict(request): Strict<ForceReleaseExecutionRequest>,
) -> Result<Response, Problem> {
    let ForceReleaseExecutionRequest { execution_id, reason, version } = request;
    let reply = app.coordinator.executions().force_release(&execution_id, version).await?;
    let result = ForceReleaseResult::from(reply.keep().0);
    audit("force_release_execution", &execution_id, &reason, &result, &received);
    Ok(ok(result))
}
