//! `/v1/leases`: who may do the downstream work for a key.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Extension, State};
use axum::response::Response;
use futures_util::future::BoxFuture;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::openapi::{OwnershipLost, Problems, ReadProblems};
use super::problem::{Problem, stale_reason};
use super::request::{
    Items, Limit, Metadata, Optional, Required, Strict, StrictQuery, WaitMs, request,
};
use super::router::{App, Received};
use super::shape::{
    Holder, LeaseBody, Subject, audit, instant, metadata, millis, ok, polling_hint, stale_lease,
};
use super::token::PageToken;
use crate::coordinator::{ClaimLease, Reply, WaitOutcome};
use crate::domain::ids::{Kind, Name, OwnerId, Prefix, Reason};
use crate::domain::lease::{
    ClaimOutcome, ForceReleaseOutcome, Lease, OverReason, Reference, ReleaseOutcome, RenewOutcome,
    Status,
};
use crate::domain::time::{Timestamp, Ttl};
use crate::domain::version::Version;
use crate::engine::EngineError;
use crate::store::StoreClock;

/// The routes.
pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(claim_lease))
        .routes(routes!(renew_lease))
        .routes(routes!(renew_many_leases))
        .routes(routes!(release_lease))
        .routes(routes!(wait_for_lease))
        .routes(routes!(verify_lease))
        .routes(routes!(get_lease_state))
        .routes(routes!(list_leases))
        .routes(routes!(force_release_lease))
}

/// Another way to grant a claim, to measure the service against: gives the version, if granted.
#[doc(hidden)]
pub type Rival =
    Arc<dyn Fn(Name, OwnerId, Ttl) -> BoxFuture<'static, Option<i64>> + Send + Sync + 'static>;

/// Claims that are read and answered like any other, but granted by a rival.
pub(super) fn rivals(rivals: Vec<(&'static str, Rival)>) -> axum::Router<Arc<App>> {
    rivals.into_iter().fold(axum::Router::new(), |router, (path, rival)| {
        router.route(
            path,
            axum::routing::post(
                |Extension(received): Extension<Received>,
                 Strict(request): Strict<ClaimLeaseRequest>| {
                    claim_from_rival(rival, received, request)
                },
            ),
        )
    })
}

async fn claim_from_rival(
    rival: Rival,
    received: Received,
    request: ClaimLeaseRequest,
) -> Result<Response, Problem> {
    let ClaimLeaseRequest { key, owner_id, ttl_ms: ttl, attempt_id, metadata, .. } = request;
    let sent = std::time::Instant::now();
    let granted = rival(key.clone(), owner_id.clone(), ttl).await;
    let version = granted.and_then(Version::new).ok_or_else(|| Problem::internal("no version"))?;
    let now = Timestamp::from_micros(1_796_025_600_000_000);
    let lease = Lease {
        version,
        status: Status::Held,
        owner_id,
        attempt_id,
        grant_id: 0,
        ttl,
        acquired_at: now,
        expires_at: now.after(ttl),
        recovered_from: None,
        metadata: metadata.map(|Metadata(text)| text),
    };
    Ok(claimed(&key, &lease, false, StoreClock { now, sent }, received.elapsed_ms()))
}

/// The largest body of a `-many` call.
pub(super) const MANY_BYTES: (&str, usize) = ("many_request_body_bytes", 1 << 20);

/// How long `wait` waits if not told.
pub(super) const DEFAULT_WAIT: WaitMs = WaitMs(20_000);

impl WaitMs {
    pub(super) fn duration(self) -> Duration {
        Duration::from_millis(u64::from(self.0))
    }
}

request! {
    /// A wish to hold a key.
    body ClaimLeaseRequest {
        /// 1 to 512 bytes of any text without control characters, compared byte by byte.
        #[schema(min_length = 1, max_length = 512)]
        key: Required<Name> as String,
        /// Who asks: 1 to 256 bytes. Two callers with one id are told apart by `version` only.
        #[schema(min_length = 1, max_length = 256)]
        owner_id: Required<OwnerId> as String,
        /// How long the lease lasts unless renewed; it starts at the grant.
        #[schema(minimum = 100, maximum = 86_400_000)]
        ttl_ms: Required<Ttl> as i64,
        /// A fresh UUID for each attempt, the same when the request is repeated.
        attempt_id: Optional<Uuid> as Option<Uuid>,
        /// How long to stay in line if the key is held. If left out, 0: answer at once.
        #[schema(minimum = 0, maximum = 50_000)]
        wait_ms: Optional<WaitMs> as Option<i32>,
        /// Strings to show to others while the lease is held, at most 4,096 bytes as compact JSON.
        metadata: Optional<Metadata> as Option<BTreeMap<String, String>>,
    }
}

/// The answer to a claim.
#[derive(Serialize, ToSchema)]
struct ClaimLeaseResult {
    /// `claimed`: the caller owns the key. `held`: somebody does. More may be added.
    #[schema(example = "claimed")]
    outcome: &'static str,
    /// With `claimed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    lease: Option<LeaseBody>,
    /// With `claimed`: whether an earlier request of the same attempt got this grant.
    #[serde(skip_serializing_if = "Option::is_none")]
    repeated: Option<bool>,
    /// With `claimed`, if true: the lease before this one was lost, by expiry or by force, and not
    /// given back; its work may have been done in part.
    #[serde(skip_serializing_if = "Option::is_none")]
    recovered: Option<bool>,
    /// With `recovered`: the version of the lost lease.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    previous_version: Option<i64>,
    /// With `held`.
    #[serde(skip_serializing_if = "Option::is_none")]
    holder: Option<Holder>,
    /// With `held`: a hint for callers that poll instead of waiting.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0, maximum = 1_000)]
    retry_after_ms: Option<i64>,
    /// The server's time from receiving the request to writing this. On the caller's monotonic
    /// clock, the lease is safe until send time + `elapsed_ms` + `lease.expires_in_ms`.
    #[schema(minimum = 0)]
    elapsed_ms: i64,
}

/// Claim a key
///
/// Takes the key if nobody holds it. `held` is an answer, not an error: somebody else does the
/// work; wait for its end with `waitForLease`, giving `holder.version`. An owner that already
/// holds the key is told `held` like anyone else, unless it repeats the same `attempt_id`: then it
/// gets the same grant, not extended. Once that grant has ended, a late repeat gets 409
/// `stale_lease` for as long as the key remembers the attempt.
///
/// With `wait_ms`, claims on one replica are served in the order of their arrival, except that one
/// whose time is out takes a key that is free at that moment; across replicas there is no order. A caller that vanishes before the reply, and sent no `attempt_id`, leaves no
/// lease behind, on a best-effort basis.
#[utoipa::path(
    post, path = "/v1/leases/claim", operation_id = "claimLease", tag = "leases",
    request_body(content = ClaimLeaseRequest, example = json!({
        "key": "report:2026-11", "owner_id": "worker-1", "ttl_ms": 30_000, "wait_ms": 0
    })),
    responses(
        (status = 200, description = "Who holds the key now.", body = ClaimLeaseResult,
         example = json!({
            "outcome": "claimed",
            "lease": {
                "key": "report:2026-11", "owner_id": "worker-1", "version": 1_796_025_600_000_000_i64,
                "ttl_ms": 30_000, "acquired_at": "2026-11-30T12:00:00.000Z",
                "expires_at": "2026-11-30T12:00:30.000Z", "expires_in_ms": 29_998,
                "renew_after_ms": 10_000
            },
            "repeated": false, "elapsed_ms": 2
         })),
        Problems,
        OwnershipLost
    )
)]
async fn claim_lease(
    State(app): State<Arc<App>>,
    Extension(received): Extension<Received>,
    Strict(request): Strict<ClaimLeaseRequest>,
) -> Result<Response, Problem> {
    let ClaimLeaseRequest { key, owner_id, ttl_ms, attempt_id, wait_ms, metadata } = request;
    let claim = ClaimLease {
        owner_id,
        ttl: ttl_ms,
        attempt_id,
        metadata: metadata.map(|Metadata(text)| text),
        wait: wait_ms.map_or(Duration::ZERO, WaitMs::duration),
    };
    let reply = app.coordinator.leases().claim(&key, claim).await?;
    // From here on nothing waits, so the reply is on its way to the connection.
    let (outcome, clock) = reply.keep();
    let elapsed_ms = received.elapsed_ms();
    match outcome {
        ClaimOutcome::Claimed { lease, repeated } => {
            Ok(claimed(&key, &lease, repeated, clock, elapsed_ms))
        }
        ClaimOutcome::Held(lease) => {
            let holder = Holder::new(&lease, clock);
            Ok(ok(ClaimLeaseResult {
                outcome: "held",
                lease: None,
                repeated: None,
                recovered: None,
                previous_version: None,
                retry_after_ms: Some(polling_hint(holder.expires_in_ms)),
                holder: Some(holder),
                elapsed_ms,
            }))
        }
        ClaimOutcome::Free => Err(EngineError::Internal("a claim was not decided".into()).into()),
        ClaimOutcome::Stale(stale) => Err(stale_lease(Kind::Lease, &stale, clock)),
    }
}

fn claimed(
    key: &Name,
    lease: &Lease,
    repeated: bool,
    clock: StoreClock,
    elapsed_ms: i64,
) -> Response {
    ok(ClaimLeaseResult {
        outcome: "claimed",
        repeated: Some(repeated),
        recovered: lease.recovered_from.map(|_| true),
        previous_version: lease.recovered_from.map(Version::get),
        lease: Some(LeaseBody::new(Subject::Lease(key), lease, clock)),
        holder: None,
        retry_after_ms: None,
        elapsed_ms,
    })
}

request! {
    /// A lease to extend.
    body RenewLeaseRequest {
        /// The key.
        #[schema(min_length = 1, max_length = 512)]
        key: Required<Name> as String,
        /// Its owner.
        #[schema(min_length = 1, max_length = 256)]
        owner_id: Required<OwnerId> as String,
        /// Its version.
        #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
        version: Required<Version> as i64,
        /// The new length, from now on that of the lease. If left out, the lease's own.
        #[schema(minimum = 100, maximum = 86_400_000)]
        ttl_ms: Optional<Ttl> as Option<i64>,
    }
}

/// The answer to a renewal.
#[derive(Serialize, ToSchema)]
pub(super) struct RenewResult {
    /// `renewed`. More may be added.
    #[schema(example = "renewed")]
    outcome: &'static str,
    /// The lease as it is now.
    lease: LeaseBody,
    /// The server's time from receiving the request to writing this.
    #[schema(minimum = 0)]
    elapsed_ms: i64,
}

/// Renew a lease
///
/// The lease then ends at the later of its present end and now + ttl: a renewal never shortens.
/// A lease that has expired cannot be renewed, even if nobody else came, since others may have
/// been told of its end: 409 `stale_lease` with `reason: expired`.
#[utoipa::path(
    post, path = "/v1/leases/renew", operation_id = "renewLease", tag = "leases",
    request_body(content = RenewLeaseRequest, example = json!({
        "key": "report:2026-11", "owner_id": "worker-1", "version": 1_796_025_600_000_000_i64
    })),
    responses(
        (status = 200, description = "The lease is extended.", body = RenewResult,
         example = json!({
            "outcome": "renewed",
            "lease": {
                "key": "report:2026-11", "owner_id": "worker-1", "version": 1_796_025_600_000_000_i64,
                "ttl_ms": 30_000, "acquired_at": "2026-11-30T12:00:00.000Z",
                "expires_at": "2026-11-30T12:00:40.000Z", "expires_in_ms": 29_998,
                "renew_after_ms": 10_000
            },
            "elapsed_ms": 2
         })),
        Problems,
        OwnershipLost
    )
)]
async fn renew_lease(
    State(app): State<Arc<App>>,
    Extension(received): Extension<Received>,
    Strict(request): Strict<RenewLeaseRequest>,
) -> Result<Response, Problem> {
    let RenewLeaseRequest { key, owner_id, version, ttl_ms } = request;
    let reference = Reference { owner_id, version };
    let reply = app.coordinator.leases().renew(&key, reference, ttl_ms).await?;
    match reply.keep() {
        (RenewOutcome::Renewed(lease), clock) => {
            Ok(ok(RenewResult::new(Subject::Lease(&key), &lease, clock, &received)))
        }
        (RenewOutcome::Stale(stale), clock) => Err(stale_lease(Kind::Lease, &stale, clock)),
    }
}

impl RenewResult {
    pub(super) fn new(
        subject: Subject<'_>,
        lease: &Lease,
        clock: StoreClock,
        received: &Received,
    ) -> Self {
        let elapsed_ms = received.elapsed_ms();
        Self { outcome: "renewed", lease: LeaseBody::new(subject, lease, clock), elapsed_ms }
    }
}

request! {
    /// Leases of one owner to extend.
    body RenewManyLeasesRequest max MANY_BYTES {
        /// Their owner.
        #[schema(min_length = 1, max_length = 256)]
        owner_id: Required<OwnerId> as String,
        /// The new length of each. If left out, each lease's own.
        #[schema(minimum = 100, maximum = 86_400_000)]
        ttl_ms: Optional<Ttl> as Option<i64>,
        /// 1 to 1,000 leases.
        #[schema(min_items = 1, max_items = 1_000)]
        items: Items<RenewItemRequest> as Vec<RenewItemRequest>,
    }
}

request! {
    /// One of the leases.
    body RenewItemRequest {
        /// The key.
        #[schema(min_length = 1, max_length = 512)]
        key: Required<Name> as String,
        /// Its version.
        #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
        version: Required<Version> as i64,
    }
}

/// The answer to a renewal of many.
#[derive(Serialize, ToSchema)]
struct RenewManyLeasesResult {
    /// One for each item, in their order.
    results: Vec<RenewItemResult>,
    /// The server's time from receiving the request to writing this.
    #[schema(minimum = 0)]
    elapsed_ms: i64,
}

/// What became of one of the leases.
#[derive(Serialize, ToSchema)]
struct RenewItemResult {
    /// `renewed`, or the code of the problem that `renewLease` would answer: `stale_lease`,
    /// `unavailable`. More may be added.
    #[schema(example = "renewed")]
    outcome: &'static str,
    /// With `renewed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    lease: Option<LeaseBody>,
    /// With anything else.
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    /// With `stale_lease`: as in the problem.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
}

/// Renew many leases
///
/// Each as `renewLease` does, and each by itself: some may be renewed and others not.
#[utoipa::path(
    post, path = "/v1/leases/renew-many", operation_id = "renewManyLeases", tag = "leases",
    request_body(content = RenewManyLeasesRequest, example = json!({
        "owner_id": "worker-1",
        "items": [{"key": "report:2026-11", "version": 1_796_025_600_000_000_i64}]
    })),
    responses(
        (status = 200, description = "What became of each.", body = RenewManyLeasesResult,
         example = json!({
            "results": [{"outcome": "stale_lease", "key": "report:2026-11", "reason": "expired"}],
            "elapsed_ms": 2
         })),
        Problems
    )
)]
async fn renew_many_leases(
    State(app): State<Arc<App>>,
    Extension(received): Extension<Received>,
    Strict(request): Strict<RenewManyLeasesRequest>,
) -> Result<Response, Problem> {
    let RenewManyLeasesRequest { owner_id, ttl_ms, items } = request;
    let mut keys = Vec::with_capacity(items.len());
    let renewals = items.into_iter().map(|item| {
        keys.push(item.key.clone());
        (item.key, Reference { owner_id: owner_id.clone(), version: item.version })
    });
    let replies = app.coordinator.leases().renew_many(renewals, ttl_ms).await;
    let elapsed_ms = received.elapsed_ms();
    let results = keys.iter().zip(replies).map(|(key, reply)| {
        let failed = |outcome, reason| RenewItemResult {
            outcome,
            lease: None,
            key: Some(key.as_str().to_owned()),
            reason,
        };
        match reply {
            Ok(reply) => match reply.keep() {
                (RenewOutcome::Renewed(lease), clock) => RenewItemResult {
                    outcome: "renewed",
                    lease: Some(LeaseBody::new(Subject::Lease(key), &lease, clock)),
                    key: None,
                    reason: None,
                },
                (RenewOutcome::Stale(stale), _) => {
                    failed("stale_lease", Some(stale_reason(stale.reason)))
                }
            },
            Err(error) => failed(Problem::from(error).code(), None),
        }
    });
    Ok(ok(RenewManyLeasesResult { results: results.collect(), elapsed_ms }))
}

request! {
    /// A lease to give back.
    body ReleaseLeaseRequest {
        /// The key.
        #[schema(min_length = 1, max_length = 512)]
        key: Required<Name> as String,
        /// Its owner.
        #[schema(min_length = 1, max_length = 256)]
        owner_id: Required<OwnerId> as String,
        /// Its version.
        #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
        version: Required<Version> as i64,
    }
}

/// The answer to a release.
#[derive(Serialize, ToSchema)]
struct ReleaseLeaseResult {
    /// `released`. More may be added.
    #[schema(example = "released")]
    outcome: &'static str,
}

/// Release a lease
///
/// Frees the key and wakes those that wait for it. Repeated with the same reference, it succeeds
/// again until the key's next grant. A lease that expired, or was superseded, gets 409
/// `stale_lease`, and nothing is changed.
#[utoipa::path(
    post, path = "/v1/leases/release", operation_id = "releaseLease", tag = "leases",
    request_body(content = ReleaseLeaseRequest, example = json!({
        "key": "report:2026-11", "owner_id": "worker-1", "version": 1_796_025_600_000_000_i64
    })),
    responses(
        (status = 200, description = "The key is free.", body = ReleaseLeaseResult,
         example = json!({"outcome": "released"})),
        Problems,
        OwnershipLost
    )
)]
async fn release_lease(
    State(app): State<Arc<App>>,
    Strict(request): Strict<ReleaseLeaseRequest>,
) -> Result<Response, Problem> {
    let ReleaseLeaseRequest { key, owner_id, version } = request;
    let reference = Reference { owner_id, version };
    let reply = app.coordinator.leases().release(&key, reference).await?;
    match reply.keep() {
        (ReleaseOutcome::Released, _) => Ok(ok(ReleaseLeaseResult { outcome: "released" })),
        (ReleaseOutcome::Stale(stale), clock) => Err(stale_lease(Kind::Lease, &stale, clock)),
    }
}

request! {
    /// A generation to wait for the end of.
    body WaitForLeaseRequest {
        /// The key.
        #[schema(min_length = 1, max_length = 512)]
        key: Required<Name> as String,
        /// The version to watch: the `holder.version` that a claim was refused with. If left out,
        /// the one that holds the key when this is first looked at.
        #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
        version: Optional<Version> as Option<i64>,
        /// How long to wait. If left out, 20000.
        #[schema(minimum = 0, maximum = 50_000)]
        wait_ms: Optional<WaitMs> as Option<i32>,
    }
}

/// The answer to a wait.
#[derive(Serialize, ToSchema)]
pub(super) struct WaitResult {
    /// `released`: the watched lease is over, see `reason`. `timed_out`: it still holds the key.
    /// More may be added.
    #[schema(example = "released")]
    outcome: &'static str,
    /// With `released`: `released`, `expired`, `superseded` (a newer lease was granted since),
    /// `revoked`, or `not_held` (nobody held it).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(example = "released")]
    reason: Option<&'static str>,
    /// With `timed_out`.
    #[serde(skip_serializing_if = "Option::is_none")]
    holder: Option<Holder>,
    /// The server's time from receiving the request to writing this.
    #[schema(minimum = 0)]
    elapsed_ms: i64,
}

/// Wait for the end of a lease
///
/// Answers as soon as the watched lease no longer holds the key, at once if it is over already: a
/// change between a refused claim and this call is never missed. What is told to be over never
/// lives again. `timed_out` is told from a look at the store after the time was out. If the store
/// cannot be asked, the answer is 503 and never a guess, so treat that as "still held".
///
/// A version below the key's newest one is `superseded`; one above it, or of a key that nobody
/// claimed, `not_held`.
#[utoipa::path(
    post, path = "/v1/leases/wait", operation_id = "waitForLease", tag = "leases",
    request_body(content = WaitForLeaseRequest, example = json!({
        "key": "report:2026-11", "version": 1_796_025_600_000_000_i64, "wait_ms": 20_000
    })),
    responses(
        (status = 200, description = "Whether the lease is over.", body = WaitResult,
         example = json!({"outcome": "released", "reason": "released", "elapsed_ms": 840})),
        Problems
    )
)]
async fn wait_for_lease(
    State(app): State<Arc<App>>,
    Extension(received): Extension<Received>,
    Strict(request): Strict<WaitForLeaseRequest>,
) -> Result<Response, Problem> {
    let WaitForLeaseRequest { key, version, wait_ms } = request;
    let wait = wait_ms.unwrap_or(DEFAULT_WAIT).duration();
    let reply = app.coordinator.leases().wait(&key, version, wait).await?;
    Ok(ok(WaitResult::new(reply, &received)))
}

impl WaitResult {
    pub(super) fn new(reply: Reply<WaitOutcome>, received: &Received) -> Self {
        let elapsed_ms = received.elapsed_ms();
        let (outcome, clock) = reply.keep();
        let (outcome, reason, holder) = match &outcome {
            WaitOutcome::Over(reason) => ("released", Some(over_reason(*reason)), None),
            WaitOutcome::TimedOut(lease) => ("timed_out", None, Some(Holder::new(lease, clock))),
        };
        Self { outcome, reason, holder, elapsed_ms }
    }
}

const fn over_reason(reason: OverReason) -> &'static str {
    match reason {
        OverReason::Released => "released",
        OverReason::Expired => "expired",
        OverReason::Superseded => "superseded",
        OverReason::Revoked => "revoked",
        OverReason::NotHeld => "not_held",
    }
}

request! {
    /// A fencing token to check.
    body VerifyLeaseRequest {
        /// The key.
        #[schema(min_length = 1, max_length = 512)]
        key: Required<Name> as String,
        /// The version that came with the write.
        #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
        version: Required<Version> as i64,
    }
}

/// The answer to a check.
#[derive(Serialize, ToSchema)]
struct VerifyLeaseResult {
    /// `current`: this version holds the key. `stale`: it does not. More may be added.
    #[schema(example = "current")]
    outcome: &'static str,
    /// With `stale`, if another version holds the key.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    current_version: Option<i64>,
}

/// Check a fencing token
///
/// For resources that cannot keep the highest version they have seen: whether `version` holds the
/// key at this moment. The moment is over when the answer arrives, so a check by the resource
/// itself, in the same transaction as the write, is stronger.
#[utoipa::path(
    post, path = "/v1/leases/verify", operation_id = "verifyLease", tag = "leases",
    request_body(content = VerifyLeaseRequest, example = json!({
        "key": "report:2026-11", "version": 1_796_025_600_000_000_i64
    })),
    responses(
        (status = 200, description = "Whether it is current.", body = VerifyLeaseResult,
         example = json!({"outcome": "current"})),
        Problems
    )
)]
async fn verify_lease(
    State(app): State<Arc<App>>,
    Strict(request): Strict<VerifyLeaseRequest>,
) -> Result<Response, Problem> {
    let VerifyLeaseRequest { key, version } = request;
    let verdict = app.coordinator.leases().verify(&key, version).await?;
    Ok(ok(match verdict {
        Ok(()) => VerifyLeaseResult { outcome: "current", current_version: None },
        Err(current) => {
            VerifyLeaseResult { outcome: "stale", current_version: current.map(Version::get) }
        }
    }))
}

request! {
    /// A key to look at.
    query GetLeaseStateQuery {
        /// The key.
        #[param(min_length = 1, max_length = 512, example = "report:2026-11")]
        key: Required<Name> as String,
    }
}

/// What a key holds.
#[derive(Serialize, ToSchema)]
struct LeaseState {
    /// The key.
    key: String,
    /// `held` or `free`. More may be added.
    #[schema(example = "held")]
    state: &'static str,
    /// The newest version, of the holder or of the last one; absent for a key not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    version: Option<i64>,
    /// With `held`.
    #[serde(skip_serializing_if = "Option::is_none")]
    owner_id: Option<String>,
    /// With `held`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    acquired_at: Option<String>,
    /// With `held`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    expires_at: Option<String>,
    /// With `held`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0)]
    expires_in_ms: Option<i64>,
    /// With `held`, if the holder gave any.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<BTreeMap<String, String>>)]
    metadata: Option<Box<serde_json::value::RawValue>>,
}

impl LeaseState {
    fn new(key: &Name, lease: Option<&Lease>, is_held: bool, clock: StoreClock) -> Self {
        let held = lease.filter(|_| is_held);
        Self {
            key: key.as_str().to_owned(),
            state: if held.is_some() { "held" } else { "free" },
            version: lease.map(|lease| lease.version.get()),
            owner_id: held.map(|lease| lease.owner_id.as_str().to_owned()),
            acquired_at: held.map(|lease| instant(lease.acquired_at)),
            expires_at: held.map(|lease| instant(lease.expires_at)),
            expires_in_ms: held.map(|lease| millis(clock.remaining(lease.expires_at))),
            metadata: held.and_then(metadata),
        }
    }
}

/// Look at a key
///
/// Never 404: a key that nobody claimed is `free`.
#[utoipa::path(
    get, path = "/v1/leases/state", operation_id = "getLeaseState", tag = "leases",
    params(GetLeaseStateQuery),
    responses(
        (status = 200, description = "What the key holds.", body = LeaseState,
         example = json!({"key": "report:2026-11", "state": "free"})),
        ReadProblems
    )
)]
async fn get_lease_state(
    State(app): State<Arc<App>>,
    StrictQuery(query): StrictQuery<GetLeaseStateQuery>,
) -> Result<Response, Problem> {
    let (lease, clock) = app.coordinator.leases().state(&query.key).await?.keep();
    let is_held = lease.as_ref().is_some_and(|lease| lease.is_held(clock.estimate()));
    Ok(ok(LeaseState::new(&query.key, lease.as_ref(), is_held, clock)))
}

/// A filter on `held` or `free`.
enum HeldOrFree {
    Held,
    Free,
}

impl super::request::Field for HeldOrFree {
    fn from_json(_json: &serde_json::value::RawValue) -> Result<Self, String> {
        Err("must be a query parameter".to_owned())
    }

    fn from_text(text: &str) -> Result<Self, String> {
        match text {
            "held" => Ok(Self::Held),
            "free" => Ok(Self::Free),
            _ => Err("must be held or free".to_owned()),
        }
    }
}

request! {
    /// Which keys to list.
    query ListLeasesQuery {
        /// Only keys that begin with this.
        #[param(max_length = 512, example = "report:")]
        prefix: Optional<Prefix> as Option<String>,
        /// Only keys in this state: `held` or `free`.
        #[param(example = "held")]
        state: Optional<HeldOrFree> as Option<String>,
        /// At most this many items. If left out, 100.
        #[param(minimum = 1, maximum = 1_000)]
        limit: Optional<Limit> as Option<i32>,
        /// The `next_page_token` of the page before.
        page_token: Optional<PageToken> as Option<String>,
    }
}

/// One page of a list.
#[derive(Serialize, ToSchema)]
struct ListLeasesResult {
    /// Keys in the order of their bytes. A page can be short, even empty, and not be the last.
    items: Vec<LeaseState>,
    /// For the next page; absent on the last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_page_token: Option<String>,
}

/// List keys
///
/// The keys that are held, and those that were and are not forgotten yet.
#[utoipa::path(
    get, path = "/v1/leases", operation_id = "listLeases", tag = "leases",
    params(ListLeasesQuery),
    responses(
        (status = 200, description = "A page of keys.", body = ListLeasesResult,
         example = json!({"items": [{"key": "report:2026-11", "state": "free"}]})),
        ReadProblems
    )
)]
async fn list_leases(
    State(app): State<Arc<App>>,
    StrictQuery(query): StrictQuery<ListLeasesQuery>,
) -> Result<Response, Problem> {
    let ListLeasesQuery { prefix, state, limit, page_token } = query;
    let page = app
        .coordinator
        .leases()
        .list(
            prefix,
            state.map(|state| matches!(state, HeldOrFree::Held)),
            page_token.map(|PageToken(name)| name),
            limit.unwrap_or(Limit::DEFAULT).0 as usize,
        )
        .await?;
    let items = page.items.iter();
    Ok(ok(ListLeasesResult {
        items: items
            .map(|(key, lease)| {
                LeaseState::new(key, Some(lease), lease.is_held(page.clock.now), page.clock)
            })
            .collect(),
        next_page_token: page.next.map(|name| PageToken(name).to_string()),
    }))
}

request! {
    /// A key to free.
    body ForceReleaseLeaseRequest {
        /// The key.
        #[schema(min_length = 1, max_length = 512)]
        key: Required<Name> as String,
        /// Why, for the audit log.
        #[schema(min_length = 1, max_length = 512)]
        reason: Required<Reason> as String,
        /// Free only this version, so that a newer holder is left alone.
        #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
        version: Optional<Version> as Option<i64>,
    }
}

/// The answer to a release by force.
#[derive(Serialize, ToSchema)]
pub(super) struct ForceReleaseResult {
    /// `released`, or `not_held`: there was nothing to free. More may be added.
    #[schema(example = "released")]
    pub(super) outcome: &'static str,
    /// With `released`: the version that was ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    pub(super) version: Option<i64>,
}

/// Free a key by force
///
/// For an operator, when the holder is known to be gone. The holder's next call gets 409
/// `stale_lease` with `reason: revoked`, those that wait are woken, and the next grant has a
/// higher version. Logged with its reason.
#[utoipa::path(
    post, path = "/v1/leases/force-release", operation_id = "forceReleaseLease", tag = "leases",
    request_body(content = ForceReleaseLeaseRequest, example = json!({
        "key": "report:2026-11", "reason": "worker-1 was scrapped"
    })),
    responses(
        (status = 200, description = "Whether a lease was ended.", body = ForceReleaseResult,
         example = json!({"outcome": "released", "version": 1_796_025_600_000_000_i64})),
        Problems
    )
)]
async fn force_release_lease(
    State(app): State<Arc<App>>,
    Extension(received): Extension<Received>,
    Strict(request): Strict<ForceReleaseLeaseRequest>,
) -> Result<Response, Problem> {
    let ForceReleaseLeaseRequest { key, reason, version } = request;
    let reply = app.coordinator.leases().force_release(&key, version).await?;
    let (outcome, _) = reply.keep();
    let result = ForceReleaseResult::from(outcome);
    audit("force_release_lease", &key, &reason, &result, &received);
    Ok(ok(result))
}

impl From<ForceReleaseOutcome> for ForceReleaseResult {
    fn from(outcome: ForceReleaseOutcome) -> Self {
        match outcome {
            ForceReleaseOutcome::Released(version) => {
                Self { outcome: "released", version: Some(version.get()) }
            }
            ForceReleaseOutcome::NotHeld => Self { outcome: "not_held", version: None },
        }
    }
}
