//! `/v1/idempotency`: the stored HTTP response of a write, shared by all replicas.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Extension, State};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::executions::ReleaseRecordResult;
use super::leases::{ForceReleaseResult, RenewResult};
use super::openapi::{Problems, ReadProblems, RecordConflict};
use super::problem::Problem;
use super::request::{
    Field, Limit, Object, Optional, Required, Strict, StrictQuery, WaitMs, request,
};
use super::router::{App, Received};
use super::shape::{
    Holder, IdempotencyStateName, LeaseBody, Subject, audit, default_ttl, instant, millis, ok,
    polling_hint, stale_lease,
};
use super::token::PageToken;
use crate::coordinator::ClaimRecord;
use crate::domain::idempotency::{DEFAULT_TTL_MS, Head, StoredResponse};
use crate::domain::ids::{Binding, Kind, Name, OwnerId, Prefix, Reason, Scope};
use crate::domain::lease::Reference;
use crate::domain::record::{
    ClaimOutcome, CompleteOutcome, Completion, DeleteOutcome, PutOutcome, Record, RecordState,
    RenewOutcome,
};
use crate::domain::time::{Retention, Ttl};
use crate::domain::version::Version;
use crate::engine::EngineError;
use crate::store::StoreClock;

/// The largest stored body, in bytes.
pub(super) const BODY_BYTES: (&str, usize) = ("body_bytes", 1 << 20);
/// The largest request that stores one: a body in base64, headers with escapes, and the rest.
const STORE_BYTES: (&str, usize) = ("body_bytes", 3 << 20);

/// The routes.
pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(get_idempotency_record, put_idempotency_record, delete_idempotency_record))
        .routes(routes!(claim_idempotency_record))
        .routes(routes!(complete_idempotency_record))
        .routes(routes!(renew_idempotency_record))
        .routes(routes!(release_idempotency_record))
        .routes(routes!(get_idempotency_state))
        .routes(routes!(list_idempotency_records))
        .routes(routes!(force_release_idempotency_record))
}

/// The status of a stored response.
struct Status(u16);

impl Field for Status {
    fn from_json(json: &RawValue) -> Result<Self, String> {
        Self::from_text(json.get())
    }

    fn from_text(text: &str) -> Result<Self, String> {
        let status: Option<u16> = serde_json::from_str(text).ok();
        status
            .filter(|status| (200..=599).contains(status))
            .map(Self)
            .ok_or_else(|| "must be an integer from 200 to 599".to_owned())
    }
}

/// The headers of a stored response.
struct Headers(Vec<(String, String)>);

impl Field for Headers {
    fn from_json(json: &RawValue) -> Result<Self, String> {
        serde_json::from_str(json.get())
            .map(Self)
            .map_err(|_| "must be an array of [name, value] pairs of strings".to_owned())
    }

    fn from_text(_text: &str) -> Result<Self, String> {
        Err("must be JSON".to_owned())
    }
}

/// The Content-Type of a stored response.
struct ContentType(String);

impl Field for ContentType {
    fn from_json(json: &RawValue) -> Result<Self, String> {
        serde_json::from_str(json.get()).map(Self).map_err(|_| "must be a string".to_owned())
    }

    fn from_text(text: &str) -> Result<Self, String> {
        Ok(Self(text.to_owned()))
    }
}

/// The body of a stored response.
struct Body(Bytes);

impl Field for Body {
    fn from_json(json: &RawValue) -> Result<Self, String> {
        let text: String =
            serde_json::from_str(json.get()).map_err(|_| "must be a string".to_owned())?;
        Self::from_text(&text)
    }

    fn from_text(text: &str) -> Result<Self, String> {
        STANDARD
            .decode(text)
            .map(|bytes| Self(bytes.into()))
            .map_err(|_| "must be standard base64 with padding (RFC 4648 §4)".to_owned())
    }
}

request! {
    /// An HTTP response to store.
    body StoredResponseRequest {
        /// Its status.
        #[schema(minimum = 200, maximum = 599)]
        status: Required<Status> as i32,
        /// Its Content-Type, which does not go into `headers`.
        content_type: Optional<ContentType> as Option<String>,
        /// Its other headers as [name, value], in order, with repeats: at most 200 and 32 KiB. A
        /// value has one character U+0001 to U+00FF for each octet, and no CR or LF.
        #[schema(max_items = 200)]
        headers: Optional<Headers> as Option<Vec<Vec<String>>>,
        /// Its body in standard base64 with padding, at most 1 MiB when decoded. Empty is a body
        /// of 0 bytes; left out, the body was not stored.
        body_base64: Optional<Body> as Option<String>,
    }
}

impl StoredResponseRequest {
    fn check(self) -> Result<StoredResponse, Problem> {
        let Self { status, content_type, headers, body_base64 } = self;
        let head = Head {
            status: status.0,
            content_type: content_type.map(|ContentType(text)| text),
            headers: headers.map(|Headers(pairs)| pairs).unwrap_or_default(),
        };
        head.check().map_err(|(member, message)| {
            Problem::invalid_member(format!("record.{member}"), message)
        })?;
        let body = body_base64.map(|Body(bytes)| bytes);
        if body.as_ref().is_some_and(|body| body.len() > BODY_BYTES.1) {
            return Err(Problem::payload_too_large(BODY_BYTES.0, BODY_BYTES.1));
        }
        Ok(StoredResponse { head, body })
    }
}

/// A stored HTTP response, as it was sent.
#[derive(Serialize, ToSchema)]
struct StoredResponseBody {
    /// Its status.
    #[schema(minimum = 200, maximum = 599)]
    status: u16,
    /// Its Content-Type.
    #[serde(skip_serializing_if = "Option::is_none")]
    content_type: Option<String>,
    /// Its other headers as [name, value], in order, with repeats.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Option<Vec<Vec<String>>>)]
    headers: Vec<(String, String)>,
    /// Its body in standard base64; absent if it was not stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    body_base64: Option<String>,
}

impl StoredResponseBody {
    fn new(completion: &Completion) -> Option<Self> {
        let StoredResponse { head, body } = StoredResponse::from_content(&completion.content)?;
        Some(Self {
            status: head.status,
            content_type: head.content_type,
            headers: head.headers,
            body_base64: body.map(|body| STANDARD.encode(body)),
        })
    }
}

request! {
    /// A stored response to look for.
    query GetIdempotencyRecordQuery {
        /// The key.
        #[param(min_length = 1, max_length = 512, example = "8e03978e-40d5-43e8-bc93-6894a57f9324")]
        key: Required<Name> as String,
        /// Whose. If left out, empty.
        #[param(max_length = 512, example = "customer-3")]
        scope: Optional<Scope> as Option<String>,
    }
}

/// What was found.
#[derive(Serialize, ToSchema)]
struct GetRecordResult {
    /// `found` or `absent`: never stored, over, or in progress. More may be added.
    #[schema(example = "found")]
    outcome: &'static str,
    /// With `found`.
    #[serde(skip_serializing_if = "Option::is_none")]
    record: Option<StoredResponseBody>,
    /// With `found`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    stored_at: Option<String>,
    /// With `found`: until when it is kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    expires_at: Option<String>,
    /// With `found`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0)]
    expires_in_ms: Option<i64>,
}

/// Get a stored response
///
/// Never 404: what is not there is `absent`.
#[utoipa::path(
    get, path = "/v1/idempotency/record", operation_id = "getIdempotencyRecord",
    tag = "idempotency",
    params(GetIdempotencyRecordQuery),
    responses(
        (status = 200, description = "The stored response, if any.", body = GetRecordResult,
         example = json!({
            "outcome": "found",
            "record": {"status": 201, "content_type": "application/json", "body_base64": "e30="},
            "stored_at": "2026-11-30T12:00:00.000Z", "expires_at": "2026-12-01T12:00:00.000Z",
            "expires_in_ms": 86_399_000
         })),
        ReadProblems
    )
)]
async fn get_idempotency_record(
    State(app): State<Arc<App>>,
    StrictQuery(query): StrictQuery<GetIdempotencyRecordQuery>,
) -> Result<Response, Problem> {
    let scope = query.scope.unwrap_or_default();
    let (record, clock) = app.coordinator.idempotency().state(&scope, &query.key).await?.keep();
    let completion = record.and_then(|record| record.completion);
    let expires_at = completion.as_ref().and_then(|completion| completion.until);
    Ok(ok(GetRecordResult {
        outcome: if completion.is_some() { "found" } else { "absent" },
        record: completion.as_ref().and_then(StoredResponseBody::new),
        stored_at: completion.as_ref().map(|completion| instant(completion.at)),
        expires_at: expires_at.map(instant),
        expires_in_ms: expires_at.map(|at| millis(clock.remaining(at))),
    }))
}

request! {
    /// A response to store without a claim.
    body PutIdempotencyRecordRequest max STORE_BYTES {
        /// The key: 1 to 512 bytes of any text without control characters.
        #[schema(min_length = 1, max_length = 512)]
        key: Required<Name> as String,
        /// Whose, so that no two callers can meet: 0 to 512 bytes. If left out, empty.
        #[schema(max_length = 512)]
        scope: Optional<Scope> as Option<String>,
        /// The response.
        record: Object<StoredResponseRequest> as StoredResponseRequest,
        /// How long to keep it. If left out, as configured, a day by default.
        #[schema(minimum = 1_000, maximum = 31_622_400_000_i64)]
        retention_ms: Optional<Retention> as Option<i64>,
    }
}

/// The answer to a put.
#[derive(Serialize, ToSchema)]
struct PutRecordResult {
    /// `stored`. More may be added.
    #[schema(example = "stored")]
    outcome: &'static str,
    /// The version that it took.
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    version: i64,
    /// Since when.
    #[schema(format = DateTime)]
    stored_at: String,
    /// Until when it is kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    expires_at: Option<String>,
    /// How long until then.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0)]
    expires_in_ms: Option<i64>,
}

/// Put a response
///
/// Stores it without a claim. The last write wins, over a completed record too; against somebody
/// who is at it, 409 `already_in_progress`. It binds no fingerprint.
#[utoipa::path(
    put, path = "/v1/idempotency/record", operation_id = "putIdempotencyRecord",
    tag = "idempotency",
    request_body(content = PutIdempotencyRecordRequest, example = json!({
        "key": "8e03978e-40d5-43e8-bc93-6894a57f9324", "scope": "customer-3",
        "record": {"status": 201, "content_type": "application/json", "body_base64": "e30="}
    })),
    responses(
        (status = 200, description = "It is stored.", body = PutRecordResult,
         example = json!({
            "outcome": "stored", "version": 1_796_025_600_000_000_i64,
            "stored_at": "2026-11-30T12:00:00.000Z", "expires_at": "2026-12-01T12:00:00.000Z",
            "expires_in_ms": 86_400_000
         })),
        Problems,
        RecordConflict
    )
)]
async fn put_idempotency_record(
    State(app): State<Arc<App>>,
    Strict(request): Strict<PutIdempotencyRecordRequest>,
) -> Result<Response, Problem> {
    let PutIdempotencyRecordRequest { key, scope, record, retention_ms } = request;
    let scope = scope.unwrap_or_default();
    let response = record.check()?;
    let reply = app.coordinator.idempotency().put(&scope, &key, response, retention_ms).await?;
    match reply.keep() {
        (PutOutcome::Stored { version, completion }, clock) => Ok(ok(PutRecordResult {
            outcome: "stored",
            version: version.get(),
            stored_at: instant(completion.at),
            expires_at: completion.until.map(instant),
            expires_in_ms: completion.until.map(|at| millis(clock.remaining(at))),
        })),
        (PutOutcome::InProgress(lease), _) => Err(Problem::already_in_progress(&lease)),
    }
}

request! {
    /// A stored response to forget.
    query DeleteIdempotencyRecordQuery {
        /// The key.
        #[param(min_length = 1, max_length = 512, example = "8e03978e-40d5-43e8-bc93-6894a57f9324")]
        key: Required<Name> as String,
        /// Whose. If left out, empty.
        #[param(max_length = 512, example = "customer-3")]
        scope: Optional<Scope> as Option<String>,
    }
}

/// The answer to a deletion.
#[derive(Serialize, ToSchema)]
struct DeleteRecordResult {
    /// `deleted`, or `absent`: there was nothing to forget. More may be added.
    #[schema(example = "deleted")]
    outcome: &'static str,
}

/// Delete a stored response
///
/// For an operator. The key can be claimed anew, with a higher version. Against somebody who is at
/// it, 409 `already_in_progress`.
#[utoipa::path(
    delete, path = "/v1/idempotency/record", operation_id = "deleteIdempotencyRecord",
    tag = "idempotency",
    params(DeleteIdempotencyRecordQuery),
    responses(
        (status = 200, description = "It is forgotten.", body = DeleteRecordResult,
         example = json!({"outcome": "deleted"})),
        ReadProblems,
        RecordConflict
    )
)]
async fn delete_idempotency_record(
    State(app): State<Arc<App>>,
    StrictQuery(query): StrictQuery<DeleteIdempotencyRecordQuery>,
) -> Result<Response, Problem> {
    let scope = query.scope.unwrap_or_default();
    match app.coordinator.idempotency().delete(&scope, &query.key).await?.keep().0 {
        DeleteOutcome::Deleted => Ok(ok(DeleteRecordResult { outcome: "deleted" })),
        DeleteOutcome::Absent => Ok(ok(DeleteRecordResult { outcome: "absent" })),
        DeleteOutcome::InProgress(lease) => Err(Problem::already_in_progress(&lease)),
    }
}

request! {
    /// A wish to do a write, or to learn what was answered to it.
    body ClaimIdempotencyRecordRequest {
        /// The key: 1 to 512 bytes of any text without control characters.
        #[schema(min_length = 1, max_length = 512)]
        key: Required<Name> as String,
        /// Whose, so that no two callers can meet: 0 to 512 bytes. If left out, empty.
        #[schema(max_length = 512)]
        scope: Optional<Scope> as Option<String>,
        /// What the request is, 1 to 512 bytes; compared byte by byte when both sides have one.
        #[schema(min_length = 1, max_length = 512)]
        fingerprint: Optional<Binding> as Option<String>,
        /// Who asks: 1 to 256 bytes.
        #[schema(min_length = 1, max_length = 256)]
        owner_id: Required<OwnerId> as String,
        /// How long the claim lasts unless renewed. If left out, 30000.
        #[schema(minimum = 100, maximum = 86_400_000)]
        ttl_ms: Optional<Ttl> as Option<i64>,
        /// A fresh UUID for each attempt, the same when the request is repeated.
        attempt_id: Optional<Uuid> as Option<Uuid>,
        /// How long to wait for one that is at it. If left out, 0: answer at once.
        #[schema(minimum = 0, maximum = 50_000)]
        wait_ms: Optional<WaitMs> as Option<i32>,
    }
}

/// The answer to a claim.
#[derive(Default, Serialize, ToSchema)]
struct ClaimRecordResult {
    /// `claimed`: do the write. `completed`: it was done; `record` is what to answer.
    /// `already_in_progress`: somebody is at it. `fingerprint_mismatch`: the key was used for
    /// another request. More may be added.
    #[schema(example = "claimed")]
    outcome: &'static str,
    /// With `claimed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    lease: Option<LeaseBody>,
    /// With `claimed`: whether an earlier request of the same attempt got this grant.
    #[serde(skip_serializing_if = "Option::is_none")]
    repeated: Option<bool>,
    /// With `claimed`, if true: the claim before this one was lost, by expiry or by force, and not
    /// given back; its write may have been done.
    #[serde(skip_serializing_if = "Option::is_none")]
    recovered: Option<bool>,
    /// With `recovered`: the version of the lost claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    previous_version: Option<i64>,
    /// With `completed`: the response, exactly as it was stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    record: Option<StoredResponseBody>,
    /// With `completed`: the version of the claim that stored it, or that a put took.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    version: Option<i64>,
    /// With `completed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    stored_at: Option<String>,
    /// With `completed`: until when it is kept. Asking does not extend that.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    expires_at: Option<String>,
    /// With `completed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0)]
    expires_in_ms: Option<i64>,
    /// With `already_in_progress`.
    #[serde(skip_serializing_if = "Option::is_none")]
    holder: Option<Holder>,
    /// With `already_in_progress`: a hint for callers that poll instead of waiting.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0, maximum = 1_000)]
    retry_after_ms: Option<i64>,
    /// The server's time from receiving the request to writing this.
    #[schema(minimum = 0)]
    elapsed_ms: i64,
}

/// Claim a write
///
/// For a write that comes with an idempotency key. Whoever is told `claimed` does the write and
/// stores its response with `completeIdempotencyRecord`; whoever repeats the request is given that
/// response, on any replica. The fingerprint is checked first; a release forgets it, a lapse keeps
/// it. A crash between claim and complete costs at most the claim's time: the next claim is then
/// told `recovered`.
///
/// With `wait_ms`, the call waits for the one that is at it: it answers when that completes, or
/// claims when that is released or lapses.
#[utoipa::path(
    post, path = "/v1/idempotency/claim", operation_id = "claimIdempotencyRecord",
    tag = "idempotency",
    request_body(content = ClaimIdempotencyRecordRequest, example = json!({
        "key": "8e03978e-40d5-43e8-bc93-6894a57f9324", "scope": "customer-3",
        "fingerprint": "sha256:9f86d081", "owner_id": "api-1"
    })),
    responses(
        (status = 200, description = "Who does the write, or its response.",
         body = ClaimRecordResult,
         example = json!({
            "outcome": "completed",
            "record": {"status": 201, "content_type": "application/json", "body_base64": "e30="},
            "version": 1_796_025_600_000_000_i64, "stored_at": "2026-11-30T12:00:00.000Z",
            "expires_at": "2026-12-01T12:00:00.000Z", "expires_in_ms": 86_399_000,
            "elapsed_ms": 2
         })),
        Problems,
        RecordConflict
    )
)]
async fn claim_idempotency_record(
    State(app): State<Arc<App>>,
    Extension(received): Extension<Received>,
    Strict(request): Strict<ClaimIdempotencyRecordRequest>,
) -> Result<Response, Problem> {
    let scope = request.scope.unwrap_or_default();
    let wish = ClaimRecord {
        fingerprint: request.fingerprint,
        owner_id: request.owner_id,
        ttl: request.ttl_ms.unwrap_or(default_ttl(DEFAULT_TTL_MS)),
        attempt_id: request.attempt_id,
        wait: request.wait_ms.map_or(Duration::ZERO, WaitMs::duration),
    };
    let reply = app.coordinator.idempotency().claim(&scope, &request.key, wish).await?;
    let (outcome, clock) = reply.keep();
    let none = ClaimRecordResult { elapsed_ms: received.elapsed_ms(), ..Default::default() };
    Ok(ok(match outcome {
        ClaimOutcome::Claimed { lease, repeated } => {
            let subject = Subject::Record(&scope, &request.key);
            ClaimRecordResult {
                outcome: "claimed",
                repeated: Some(repeated),
                recovered: lease.recovered_from.map(|_| true),
                previous_version: lease.recovered_from.map(Version::get),
                lease: Some(LeaseBody::new(subject, &lease, clock)),
                ..none
            }
        }
        ClaimOutcome::Completed(record, completion) => ClaimRecordResult {
            outcome: "completed",
            record: StoredResponseBody::new(&completion),
            version: Some(record.lease.version.get()),
            stored_at: Some(instant(completion.at)),
            expires_at: completion.until.map(instant),
            expires_in_ms: completion.until.map(|at| millis(clock.remaining(at))),
            ..none
        },
        ClaimOutcome::InProgress(lease) => {
            let holder = Holder::new(&lease, clock);
            ClaimRecordResult {
                outcome: "already_in_progress",
                retry_after_ms: Some(polling_hint(holder.expires_in_ms)),
                holder: Some(holder),
                ..none
            }
        }
        ClaimOutcome::Conflict => ClaimRecordResult { outcome: "fingerprint_mismatch", ..none },
        ClaimOutcome::Stale(stale) => return Err(stale_lease(Kind::Idempotency, &stale, clock)),
        ClaimOutcome::Free => {
            return Err(EngineError::Internal("a claim was not decided".into()).into());
        }
    }))
}

request! {
    /// The response of the write that was claimed.
    body CompleteIdempotencyRecordRequest max STORE_BYTES {
        /// The key.
        #[schema(min_length = 1, max_length = 512)]
        key: Required<Name> as String,
        /// Whose. If left out, empty.
        #[schema(max_length = 512)]
        scope: Optional<Scope> as Option<String>,
        /// The owner of the claim.
        #[schema(min_length = 1, max_length = 256)]
        owner_id: Required<OwnerId> as String,
        /// The version of the claim.
        #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
        version: Required<Version> as i64,
        /// The response.
        record: Object<StoredResponseRequest> as StoredResponseRequest,
        /// How long to keep it, from now on. If left out, as configured, a day by default.
        #[schema(minimum = 1_000, maximum = 31_622_400_000_i64)]
        retention_ms: Optional<Retention> as Option<i64>,
    }
}

/// The answer to a completion.
#[derive(Serialize, ToSchema)]
struct CompleteRecordResult {
    /// `completed`. More may be added.
    #[schema(example = "completed")]
    outcome: &'static str,
}

/// Complete a write
///
/// Stores the response, whatever its status: what is not to be replayed is released instead. The
/// owner of the newest claim may complete even after its time is over, as long as nobody has
/// claimed anew. Repeated with an equal response, it succeeds again; with another one, or after a
/// put, 409 `already_completed`. A claim that is not the newest, or was released, gets 409
/// `stale_lease`.
#[utoipa::path(
    post, path = "/v1/idempotency/complete", operation_id = "completeIdempotencyRecord",
    tag = "idempotency",
    request_body(content = CompleteIdempotencyRecordRequest, example = json!({
        "key": "8e03978e-40d5-43e8-bc93-6894a57f9324", "scope": "customer-3",
        "owner_id": "api-1", "version": 1_796_025_600_000_000_i64,
        "record": {"status": 201, "content_type": "application/json", "body_base64": "e30="}
    })),
    responses(
        (status = 200, description = "The response is stored.", body = CompleteRecordResult,
         example = json!({"outcome": "completed"})),
        Problems,
        RecordConflict
    )
)]
async fn complete_idempotency_record(
    State(app): State<Arc<App>>,
    Strict(request): Strict<CompleteIdempotencyRecordRequest>,
) -> Result<Response, Problem> {
    let scope = request.scope.unwrap_or_default();
    let reference = Reference { owner_id: request.owner_id, version: request.version };
    let response = request.record.check()?;
    let records = app.coordinator.idempotency();
    let reply =
        records.complete(&scope, &request.key, reference, response, request.retention_ms).await?;
    match reply.keep() {
        (CompleteOutcome::Completed, _) => Ok(ok(CompleteRecordResult { outcome: "completed" })),
        (CompleteOutcome::AlreadyCompleted(lease), _) => Err(Problem::already_completed(&lease)),
        (CompleteOutcome::Stale(stale), clock) => {
            Err(stale_lease(Kind::Idempotency, &stale, clock))
        }
    }
}

request! {
    /// A claim to extend.
    body RenewIdempotencyRecordRequest {
        /// The key.
        #[schema(min_length = 1, max_length = 512)]
        key: Required<Name> as String,
        /// Whose. If left out, empty.
        #[schema(max_length = 512)]
        scope: Optional<Scope> as Option<String>,
        /// The owner of the claim.
        #[schema(min_length = 1, max_length = 256)]
        owner_id: Required<OwnerId> as String,
        /// The version of the claim.
        #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
        version: Required<Version> as i64,
        /// The new length, from now on that of the claim. If left out, the claim's own.
        #[schema(minimum = 100, maximum = 86_400_000)]
        ttl_ms: Optional<Ttl> as Option<i64>,
    }
}

/// Renew the claim of a write
///
/// As `renewLease` does for a lease.
#[utoipa::path(
    post, path = "/v1/idempotency/renew", operation_id = "renewIdempotencyRecord",
    tag = "idempotency",
    request_body(content = RenewIdempotencyRecordRequest, example = json!({
        "key": "8e03978e-40d5-43e8-bc93-6894a57f9324", "scope": "customer-3",
        "owner_id": "api-1", "version": 1_796_025_600_000_000_i64
    })),
    responses(
        (status = 200, description = "The claim is extended.", body = RenewResult,
         example = json!({
            "outcome": "renewed",
            "lease": {
                "key": "8e03978e-40d5-43e8-bc93-6894a57f9324", "scope": "customer-3",
                "owner_id": "api-1", "version": 1_796_025_600_000_000_i64, "ttl_ms": 30_000,
                "acquired_at": "2026-11-30T12:00:00.000Z",
                "expires_at": "2026-11-30T12:00:40.000Z", "expires_in_ms": 29_998,
                "renew_after_ms": 10_000
            },
            "elapsed_ms": 2
         })),
        Problems,
        RecordConflict
    )
)]
async fn renew_idempotency_record(
    State(app): State<Arc<App>>,
    Extension(received): Extension<Received>,
    Strict(request): Strict<RenewIdempotencyRecordRequest>,
) -> Result<Response, Problem> {
    let RenewIdempotencyRecordRequest { key, scope, owner_id, version, ttl_ms } = request;
    let scope = scope.unwrap_or_default();
    let reference = Reference { owner_id, version };
    let reply = app.coordinator.idempotency().renew(&scope, &key, reference, ttl_ms).await?;
    let (outcome, clock) = reply.keep();
    match outcome {
        RenewOutcome::Renewed(lease) => {
            Ok(ok(RenewResult::new(Subject::Record(&scope, &key), &lease, clock, &received)))
        }
        RenewOutcome::AlreadyCompleted(lease) => Err(Problem::already_completed(&lease)),
        RenewOutcome::Stale(stale) => Err(stale_lease(Kind::Idempotency, &stale, clock)),
    }
}

request! {
    /// A claim to give back.
    body ReleaseIdempotencyRecordRequest {
        /// The key.
        #[schema(min_length = 1, max_length = 512)]
        key: Required<Name> as String,
        /// Whose. If left out, empty.
        #[schema(max_length = 512)]
        scope: Optional<Scope> as Option<String>,
        /// The owner of the claim.
        #[schema(min_length = 1, max_length = 256)]
        owner_id: Required<OwnerId> as String,
        /// The version of the claim.
        #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
        version: Required<Version> as i64,
    }
}

/// Release the claim of a write
///
/// Lets another do it at once, with any fingerprint. Allowed after the claim's time is over, as
/// long as nobody has claimed anew. Repeated with the same reference, it succeeds again until the
/// next claim.
#[utoipa::path(
    post, path = "/v1/idempotency/release", operation_id = "releaseIdempotencyRecord",
    tag = "idempotency",
    request_body(content = ReleaseIdempotencyRecordRequest, example = json!({
        "key": "8e03978e-40d5-43e8-bc93-6894a57f9324", "scope": "customer-3",
        "owner_id": "api-1", "version": 1_796_025_600_000_000_i64
    })),
    responses(
        (status = 200, description = "It can be claimed.", body = ReleaseRecordResult,
         example = json!({"outcome": "released"})),
        Problems,
        RecordConflict
    )
)]
async fn release_idempotency_record(
    State(app): State<Arc<App>>,
    Strict(request): Strict<ReleaseIdempotencyRecordRequest>,
) -> Result<Response, Problem> {
    let ReleaseIdempotencyRecordRequest { key, scope, owner_id, version } = request;
    let scope = scope.unwrap_or_default();
    let reference = Reference { owner_id, version };
    let reply = app.coordinator.idempotency().release(&scope, &key, reference).await?;
    let (outcome, clock) = reply.keep();
    Ok(ok(ReleaseRecordResult::new(Kind::Idempotency, &outcome, clock)?))
}

request! {
    /// A write to look at.
    query GetIdempotencyStateQuery {
        /// The key.
        #[param(min_length = 1, max_length = 512, example = "8e03978e-40d5-43e8-bc93-6894a57f9324")]
        key: Required<Name> as String,
        /// Whose. If left out, empty.
        #[param(max_length = 512, example = "customer-3")]
        scope: Optional<Scope> as Option<String>,
    }
}

/// What is known of a write.
#[derive(Serialize, ToSchema)]
struct IdempotencyState {
    /// The key.
    key: String,
    /// Whose, unless that is empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    scope: Option<String>,
    /// `absent`, `in_progress` or `completed`. More may be added.
    #[schema(example = "completed")]
    state: &'static str,
    /// With `in_progress`: whether its time is over, so that the next claim gets it.
    #[serde(skip_serializing_if = "Option::is_none")]
    reclaimable: Option<bool>,
    /// What the request is, if its claim said so.
    #[serde(skip_serializing_if = "Option::is_none")]
    fingerprint: Option<String>,
    /// The owner of the newest claim; absent after a put.
    #[serde(skip_serializing_if = "Option::is_none")]
    owner_id: Option<String>,
    /// The newest version.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    version: Option<i64>,
    /// With `in_progress`: when the claim was granted.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    acquired_at: Option<String>,
    /// With `completed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    stored_at: Option<String>,
    /// The end of the claim, or with `completed`, until when the response is kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    expires_at: Option<String>,
    /// How long until then.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0)]
    expires_in_ms: Option<i64>,
}

impl IdempotencyState {
    fn new(
        scope: &Scope,
        key: &Name,
        record: Option<&Record>,
        state: Option<RecordState>,
        clock: StoreClock,
    ) -> Self {
        let in_progress = record.filter(|_| matches!(state, Some(RecordState::InProgress { .. })));
        let completion = record.and_then(|record| record.completion.as_ref());
        let expires_at = match completion {
            Some(completion) => completion.until,
            None => in_progress.map(|record| record.lease.expires_at),
        };
        let text = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        Self {
            key: key.as_str().to_owned(),
            scope: text(scope.as_str()),
            state: match state {
                None | Some(RecordState::Released) => "absent",
                Some(RecordState::InProgress { .. }) => "in_progress",
                Some(RecordState::Completed) => "completed",
            },
            reclaimable: match state {
                Some(RecordState::InProgress { is_reclaimable }) => Some(is_reclaimable),
                _ => None,
            },
            fingerprint: record.and_then(|r| Some(r.binding.as_ref()?.as_str().to_owned())),
            owner_id: record.and_then(|record| text(record.lease.owner_id.as_str())),
            version: record.map(|record| record.lease.version.get()),
            acquired_at: in_progress.map(|record| instant(record.lease.acquired_at)),
            stored_at: completion.map(|completion| instant(completion.at)),
            expires_at: expires_at.map(instant),
            expires_in_ms: expires_at.map(|at| millis(clock.remaining(at))),
        }
    }
}

/// Look at a write
///
/// Without the stored response. Never 404: what is not known is `absent`.
#[utoipa::path(
    get, path = "/v1/idempotency/state", operation_id = "getIdempotencyState",
    tag = "idempotency",
    params(GetIdempotencyStateQuery),
    responses(
        (status = 200, description = "What is known of it.", body = IdempotencyState,
         example = json!({
            "key": "8e03978e-40d5-43e8-bc93-6894a57f9324", "scope": "customer-3",
            "state": "absent"
         })),
        ReadProblems
    )
)]
async fn get_idempotency_state(
    State(app): State<Arc<App>>,
    StrictQuery(query): StrictQuery<GetIdempotencyStateQuery>,
) -> Result<Response, Problem> {
    let scope = query.scope.unwrap_or_default();
    let (record, clock) = app.coordinator.idempotency().state(&scope, &query.key).await?.keep();
    let state = record.as_ref().map(|record| record.state(clock.estimate()));
    Ok(ok(IdempotencyState::new(&scope, &query.key, record.as_ref(), state, clock)))
}

request! {
    /// Which writes to list.
    query ListIdempotencyRecordsQuery {
        /// Whose. If left out, those of the empty scope.
        #[param(max_length = 512, example = "customer-3")]
        scope: Optional<Scope> as Option<String>,
        /// Only keys that begin with this.
        #[param(max_length = 512, example = "8e")]
        prefix: Optional<Prefix> as Option<String>,
        /// Only those in this state: `in_progress` or `completed`.
        #[param(example = "completed")]
        state: Optional<IdempotencyStateName> as Option<String>,
        /// At most this many items. If left out, 100.
        #[param(minimum = 1, maximum = 1_000)]
        limit: Optional<Limit> as Option<i32>,
        /// The `next_page_token` of the page before.
        page_token: Optional<PageToken> as Option<String>,
    }
}

/// One page of a list.
#[derive(Serialize, ToSchema)]
struct ListIdempotencyRecordsResult {
    /// Keys in the order of their bytes, without what is stored. A page can be short, even empty,
    /// and not be the last.
    items: Vec<IdempotencyState>,
    /// For the next page; absent on the last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_page_token: Option<String>,
}

/// List writes
///
/// Those of one scope that are stored or in progress, without their responses.
#[utoipa::path(
    get, path = "/v1/idempotency", operation_id = "listIdempotencyRecords",
    tag = "idempotency",
    params(ListIdempotencyRecordsQuery),
    responses(
        (status = 200, description = "A page of writes.", body = ListIdempotencyRecordsResult,
         example = json!({"items": []})),
        ReadProblems
    )
)]
async fn list_idempotency_records(
    State(app): State<Arc<App>>,
    StrictQuery(query): StrictQuery<ListIdempotencyRecordsQuery>,
) -> Result<Response, Problem> {
    let ListIdempotencyRecordsQuery { scope, prefix, state, limit, page_token } = query;
    let scope = scope.unwrap_or_default();
    let is_wanted = move |of| {
        of != RecordState::Released && state.is_none_or(|IdempotencyStateName(state)| state.is(of))
    };
    let after = page_token.map(|PageToken(name)| name);
    let limit = limit.unwrap_or(Limit::DEFAULT).0 as usize;
    let records = app.coordinator.idempotency();
    let page = records.list(scope.clone(), prefix, is_wanted, after, limit).await?;
    let items = page.items.iter().map(|(key, record)| {
        let state = Some(record.state(page.clock.now));
        IdempotencyState::new(&scope, key, Some(record), state, page.clock)
    });
    Ok(ok(ListIdempotencyRecordsResult {
        items: items.collect(),
        next_page_token: page.next.map(|name| PageToken(name).to_string()),
    }))
}

request! {
    /// A claim to end by force.
    body ForceReleaseIdempotencyRecordRequest {
        /// The key.
        #[schema(min_length = 1, max_length = 512)]
        key: Required<Name> as String,
        /// Whose. If left out, empty.
        #[schema(max_length = 512)]
        scope: Optional<Scope> as Option<String>,
        /// Why, for the audit log.
        #[schema(min_length = 1, max_length = 512)]
        reason: Required<Reason> as String,
        /// End only this claim, so that a newer one is left alone.
        #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
        version: Optional<Version> as Option<i64>,
    }
}

/// End the claim of a write by force
///
/// For an operator, when its owner is known to be gone. A claim whose time is over is ended too,
/// as long as nobody has claimed anew: its owner can then no longer complete. The fingerprint is
/// forgotten; the next claim is told `recovered`. Logged with its reason.
#[utoipa::path(
    post, path = "/v1/idempotency/force-release",
    operation_id = "forceReleaseIdempotencyRecord", tag = "idempotency",
    request_body(content = ForceReleaseIdempotencyRecordRequest, example = json!({
        "key": "8e03978e-40d5-43e8-bc93-6894a57f9324", "scope": "customer-3",
        "reason": "api-1 was scrapped"
    })),
    responses(
        (status = 200, description = "Whether a claim was ended.", body = ForceReleaseResult,
         example = json!({"outcome": "released", "version": 1_796_025_600_000_000_i64})),
        Problems
    )
)]
async fn force_release_idempotency_record(
    State(app): State<Arc<App>>,
    Extension(received): Extension<Received>,
    Strict(request): Strict<ForceReleaseIdempotencyRecordRequest>,
) -> Result<Response, Problem> {
    let ForceReleaseIdempotencyRecordRequest { key, scope, reason, version } = request;
    let scope = scope.unwrap_or_default();
    let reply = app.coordinator.idempotency().force_release(&scope, &key, version).await?;
    let result = ForceReleaseResult::from(reply.keep().0);
    audit("force_release_idempotency_record", &key, &reason, &result, &received);
    Ok(ok(result))
}
