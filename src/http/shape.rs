//! The parts that replies have in common.

use std::time::{Duration, UNIX_EPOCH};

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::leases::ForceReleaseResult;
use super::problem::Problem;
use super::request::Field;
use super::router::Received;
use crate::domain::ids::{Kind, Name, Reason, Scope};
use crate::domain::lease::{Ending, Lease, Stale, Status};
use crate::domain::record::RecordState;
use crate::domain::time::{Timestamp, Ttl};
use crate::store::StoreClock;

/// The end of the year 9999, in microseconds since the Unix epoch.
const LAST_INSTANT: i64 = 253_402_300_799_999_999;

/// RFC 3339 in UTC with milliseconds.
pub(super) fn instant(at: Timestamp) -> String {
    let micros = at.as_micros().clamp(0, LAST_INSTANT);
    let at = UNIX_EPOCH + Duration::from_micros(micros.unsigned_abs());
    humantime::format_rfc3339_millis(at).to_string()
}

pub(super) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// Metadata as it was stored. What is not JSON, which only a hand-edited row can hold, is left out.
pub(super) fn metadata(lease: &Lease) -> Option<Box<RawValue>> {
    lease.metadata.clone().and_then(|text| RawValue::from_string(text).ok())
}

/// When a polling caller should ask again: within a second, at a random moment, so that callers
/// refused together do not come back together.
pub(super) fn polling_hint(until_free_ms: i64) -> i64 {
    let latest = until_free_ms.clamp(50, 1_000);
    rand::random_range(latest / 2..=latest)
}

/// What a lease is for, by the name that its resource gives it.
#[derive(Clone, Copy)]
pub(super) enum Subject<'a> {
    Lease(&'a Name),
    Leader(&'a Name),
    Execution(&'a Name),
    Record(&'a Scope, &'a Name),
}

/// A lease, told to its owner.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct LeaseBody {
    /// Of a lease, or of a stored response: the key.
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    /// Of an execution: its id.
    #[serde(skip_serializing_if = "Option::is_none")]
    execution_id: Option<String>,
    /// Of a leader: the name.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// Of a stored response: its scope, unless that is empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    scope: Option<String>,
    /// Who holds it.
    owner_id: String,
    /// The fencing token: above all earlier ones of this key. Send it with every write that the
    /// lease guards.
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    version: i64,
    /// The length that a renewal without `ttl_ms` extends by.
    #[schema(minimum = 100, maximum = 86_400_000)]
    ttl_ms: i64,
    /// When it was granted, by the store's clock.
    #[schema(format = DateTime)]
    acquired_at: String,
    /// When it ends unless renewed, by the store's clock.
    #[schema(format = DateTime)]
    expires_at: String,
    /// How long until then, when this was written.
    #[schema(minimum = 0)]
    expires_in_ms: i64,
    /// Where there is renewal: when to renew, after a third of the ttl.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0)]
    renew_after_ms: Option<i64>,
    /// As claimed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<std::collections::BTreeMap<String, String>>)]
    metadata: Option<Box<RawValue>>,
}

impl LeaseBody {
    /// To be made after the `elapsed_ms` beside it was taken: callers add the two, and the sum
    /// must not be late.
    pub(super) fn new(subject: Subject<'_>, lease: &Lease, clock: StoreClock) -> Self {
        let text = |name: &Name| Some(name.as_str().to_owned());
        let (mut key, mut execution_id, mut name, mut scope) = (None, None, None, None);
        match subject {
            Subject::Lease(subject) => key = text(subject),
            Subject::Leader(subject) => name = text(subject),
            Subject::Execution(subject) => execution_id = text(subject),
            Subject::Record(in_scope, subject) => {
                key = text(subject);
                scope = Some(in_scope.as_str().to_owned()).filter(|scope| !scope.is_empty());
            }
        }
        let is_renewable = !matches!(subject, Subject::Execution(_));
        Self {
            key,
            execution_id,
            name,
            scope,
            owner_id: lease.owner_id.as_str().to_owned(),
            version: lease.version.get(),
            ttl_ms: lease.ttl.as_millis(),
            acquired_at: instant(lease.acquired_at),
            expires_at: instant(lease.expires_at),
            expires_in_ms: millis(clock.remaining(lease.expires_at)),
            renew_after_ms: is_renewable.then_some(lease.ttl.as_millis() / 3),
            metadata: metadata(lease),
        }
    }
}

/// A lease, told to others.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Holder {
    /// Who holds it.
    owner_id: String,
    /// Its fencing token.
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    version: i64,
    /// When it was granted.
    #[schema(format = DateTime)]
    acquired_at: String,
    /// When it ends unless renewed.
    #[schema(format = DateTime)]
    expires_at: String,
    /// How long until then, when this was written.
    #[schema(minimum = 0)]
    pub(super) expires_in_ms: i64,
    /// What the holder wants others to know.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<std::collections::BTreeMap<String, String>>)]
    metadata: Option<Box<RawValue>>,
}

impl Holder {
    pub(super) fn new(lease: &Lease, clock: StoreClock) -> Self {
        Self {
            owner_id: lease.owner_id.as_str().to_owned(),
            version: lease.version.get(),
            acquired_at: instant(lease.acquired_at),
            expires_at: instant(lease.expires_at),
            expires_in_ms: millis(clock.remaining(lease.expires_at)),
            metadata: metadata(lease),
        }
    }
}

/// The problem of a caller that does not hold what it refers to; `current.state` in the words of
/// the resource's own `state`.
pub(super) fn stale_lease(resource: Kind, stale: &Stale, clock: StoreClock) -> Problem {
    let lease = stale.current.as_ref();
    let is_held = lease.is_some_and(|lease| lease.is_held(clock.estimate()));
    let current = match (resource, lease.map(|lease| lease.status)) {
        (Kind::Lease, _) => {
            if is_held {
                "held"
            } else {
                "free"
            }
        }
        (Kind::Leader, _) => {
            if is_held {
                "led"
            } else {
                "vacant"
            }
        }
        (_, Some(Status::Held | Status::Ended(Ending::Expired))) => "in_progress",
        (_, Some(Status::Ended(Ending::Completed | Ending::Put))) => "completed",
        (Kind::Execution, _) => "released",
        (Kind::Idempotency, _) => "absent",
    };
    Problem::stale_lease(stale, current)
}

/// The length of a claim that names none.
pub(super) const fn default_ttl(millis: i64) -> Ttl {
    Ttl::from_stored(millis)
}

/// A filter on the state of a record.
#[derive(Clone, Copy)]
pub(super) enum RecordStateName {
    InProgress,
    Released,
    Completed,
}

impl RecordStateName {
    pub(super) fn is(self, state: RecordState) -> bool {
        match state {
            RecordState::InProgress { .. } => matches!(self, Self::InProgress),
            RecordState::Released => matches!(self, Self::Released),
            RecordState::Completed => matches!(self, Self::Completed),
        }
    }
}

impl Field for RecordStateName {
    fn from_json(_json: &RawValue) -> Result<Self, String> {
        Err("must be a query parameter".to_owned())
    }

    fn from_text(text: &str) -> Result<Self, String> {
        match text {
            "in_progress" => Ok(Self::InProgress),
            "released" => Ok(Self::Released),
            "completed" => Ok(Self::Completed),
            _ => Err("must be in_progress, released or completed".to_owned()),
        }
    }
}

/// The same for stored responses, of which released ones are as good as absent.
#[derive(Clone, Copy)]
pub(super) struct IdempotencyStateName(pub(super) RecordStateName);

impl Field for IdempotencyStateName {
    fn from_json(json: &RawValue) -> Result<Self, String> {
        RecordStateName::from_json(json).map(Self)
    }

    fn from_text(text: &str) -> Result<Self, String> {
        match RecordStateName::from_text(text) {
            Ok(RecordStateName::Released) | Err(_) => {
                Err("must be in_progress or completed".to_owned())
            }
            Ok(state) => Ok(Self(state)),
        }
    }
}

/// Writes down what an administrator did, and why.
pub(super) fn audit(
    action: &'static str,
    name: &Name,
    reason: &Reason,
    result: &ForceReleaseResult,
    received: &Received,
) {
    tracing::info!(
        target: "audit",
        action,
        key = name.as_str(),
        reason = reason.as_str(),
        outcome = result.outcome,
        version = result.version,
        request_id = received.request_id(),
    );
}

/// A 200 reply.
pub(super) fn ok(body: impl Serialize) -> Response {
    (StatusCode::OK, Json(body)).into_response()
}
