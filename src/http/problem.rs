//! Errors as RFC 9457 problems: every reply that is not 2xx is one.
//!
//! A handler returns a [`Problem`]; the outermost layer writes it as the body, since only that one
//! knows the request's id. So the problems of the router and of the body reader look alike.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use crate::domain::lease::{Lease, Stale, StaleReason};
use crate::engine::EngineError;
use crate::store::StoreError;

/// A reply that is not 2xx.
#[derive(Clone, Debug)]
pub(super) struct Problem(Box<ProblemBody>);

/// What went wrong, where, and what to do (RFC 9457).
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = Problem)]
pub(super) struct ProblemBody {
    /// Always `about:blank`: `code` names the kind of problem.
    #[serde(rename = "type")]
    kind: &'static str,
    /// The HTTP status in words.
    title: &'static str,
    /// The HTTP status.
    #[schema(minimum = 400, maximum = 599)]
    status: u16,
    /// What went wrong, for a person.
    detail: String,
    /// What went wrong, for a program; more may be added.
    #[schema(example = "stale_lease")]
    code: &'static str,
    /// Whether the same request may succeed later.
    retryable: bool,
    /// The `X-Request-Id` of this reply.
    request_id: String,
    /// With `stale_lease`: how the ownership was lost: `superseded`, `expired`, `released`,
    /// `revoked` or `unknown`.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    /// With 429 and 503: when to try again.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0)]
    retry_after_ms: Option<u32>,
    /// The limit that was passed, by its name in `GET /v1/capabilities`.
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<&'static str>,
    /// With `invalid_request`: each member at fault.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    errors: Vec<FieldError>,
    /// With `stale_lease`: what the key holds instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    current: Option<Current>,
    /// For the log alone.
    #[serde(skip)]
    #[schema(ignore)]
    cause: Option<String>,
}

/// One member of a request that is wrong.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(super) struct FieldError {
    /// Its name, as in `ttl_ms` or `items[3].version`.
    pub(super) field: String,
    /// What is wrong with it.
    pub(super) message: String,
}

/// What a key holds.
#[derive(Clone, Debug, Serialize, ToSchema)]
struct Current {
    /// As in the resource's `state`.
    #[schema(example = "free")]
    state: &'static str,
    /// The newest owner; absent where something was put without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    owner_id: Option<String>,
    /// The newest version.
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    version: i64,
}

impl Current {
    fn of(lease: &Lease, state: &'static str) -> Self {
        let owner_id = Some(lease.owner_id.as_str().to_owned()).filter(|id| !id.is_empty());
        Self { state, owner_id, version: lease.version.get() }
    }
}

impl Problem {
    fn new(status: StatusCode, code: &'static str, detail: impl Into<String>) -> Self {
        Self(Box::new(ProblemBody {
            kind: "about:blank",
            title: status.canonical_reason().unwrap_or("Error"),
            status: status.as_u16(),
            detail: detail.into(),
            code,
            retryable: false,
            request_id: String::new(),
            reason: None,
            retry_after_ms: None,
            limit: None,
            errors: Vec::new(),
            current: None,
            cause: None,
        }))
    }

    fn with(mut self, change: impl FnOnce(&mut ProblemBody)) -> Self {
        change(&mut self.0);
        self
    }

    pub(super) fn invalid_json(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_json", detail)
    }

    pub(super) fn invalid_request(errors: Vec<FieldError>) -> Self {
        let named: Vec<String> =
            errors.iter().map(|e| format!("{}: {}", e.field, e.message)).collect();
        Self::new(StatusCode::BAD_REQUEST, "invalid_request", named.join("; "))
            .with(|body| body.errors = errors)
    }

    /// One member that is wrong.
    pub(super) fn invalid_member(field: String, message: String) -> Self {
        Self::invalid_request(vec![FieldError { field, message }])
    }

    pub(super) fn route_not_found(path: &str) -> Self {
        let detail = format!("there is no {path}; see /docs for what there is");
        Self::new(StatusCode::NOT_FOUND, "route_not_found", detail)
    }

    pub(super) fn method_not_allowed(method: &str) -> Self {
        let detail = format!("{method} does not work here; the Allow header names what does");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", detail)
    }

    pub(super) fn unsupported_media_type() -> Self {
        let detail = "send JSON with the header content-type: application/json";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", detail)
    }

    /// `limit` is the name of what is too large, in `GET /v1/capabilities`.
    pub(super) fn payload_too_large(limit: &'static str, max: usize) -> Self {
        let detail = format!("more than {max} bytes ({limit}); nothing was changed");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "payload_too_large", detail)
            .with(|body| body.limit = Some(limit))
    }

    pub(super) fn already_completed(lease: &Lease) -> Self {
        let detail = "it is completed already, and not by this; claim to learn with what";
        Self::new(StatusCode::CONFLICT, "already_completed", detail)
            .with(|body| body.current = Some(Current::of(lease, "completed")))
    }

    pub(super) fn already_in_progress(lease: &Lease) -> Self {
        let detail = "somebody is at it; wait for the end of the claim, or free it by force";
        Self::new(StatusCode::CONFLICT, "already_in_progress", detail)
            .with(|body| body.current = Some(Current::of(lease, "in_progress")))
    }

    pub(super) fn not_leader() -> Self {
        Self::new(StatusCode::CONFLICT, "not_leader", "this owner does not lead now")
    }

    /// `current` is the state of what the key holds instead.
    pub(super) fn stale_lease(stale: &Stale, current: &'static str) -> Self {
        let detail = match stale.reason {
            StaleReason::Superseded => {
                "a newer claim was granted; stop the work that this one guarded"
            }
            StaleReason::Expired => {
                "its time ran out, and others may have been told; stop the work and claim anew"
            }
            StaleReason::Released => "it was given back already; claim anew",
            StaleReason::Revoked => "an administrator ended it; stop the work that it guarded",
            StaleReason::Unknown => {
                "nothing is known of this claim: check its name, owner_id and version"
            }
        };
        Self::new(StatusCode::CONFLICT, "stale_lease", detail).with(|body| {
            body.reason = Some(stale_reason(stale.reason));
            body.current = stale.current.as_ref().map(|lease| Current::of(lease, current));
        })
    }

    /// `cause` goes to the log.
    pub(super) fn internal(cause: impl Into<String>) -> Self {
        let detail = "a bug in the service; its log has more under this request id";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", detail)
            .with(|body| body.cause = Some(cause.into()))
    }

    fn try_later(code: &'static str, detail: String) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, code, detail).with(|body| {
            body.retryable = true;
            body.retry_after_ms = Some(1_000);
        })
    }

    pub(super) fn unavailable(reason: &str) -> Self {
        Self::try_later(
            "unavailable",
            format!("{reason}. Repeat with the same attempt_id or reference to learn the outcome"),
        )
    }

    pub(super) fn not_ready(reasons: &[String]) -> Self {
        Self::try_later("unavailable", reasons.join("; "))
    }

    pub(super) fn shutting_down() -> Self {
        Self::try_later(
            "shutting_down",
            "this replica is shutting down and changed nothing; ask another one".to_owned(),
        )
    }

    fn status(&self) -> StatusCode {
        StatusCode::from_u16(self.0.status).unwrap_or_default()
    }

    pub(super) fn code(&self) -> &'static str {
        self.0.code
    }

    /// What to warn of, if the service has failed. That it is asked to stop is no failure.
    pub(super) fn failure(&self) -> Option<String> {
        let body = &self.0;
        let has_failed = self.status().is_server_error() && body.code != "shutting_down";
        has_failed.then(|| body.cause.as_ref().unwrap_or(&body.detail).clone())
    }

    pub(super) fn reason(&self) -> Option<&'static str> {
        self.0.reason
    }

    pub(super) fn into_errors(self) -> Vec<FieldError> {
        self.0.errors
    }

    /// The reply, once the request's id is known.
    pub(super) fn into_reply(mut self, request_id: &str) -> Response {
        request_id.clone_into(&mut self.0.request_id);
        // Strings and numbers only: cannot fail.
        let body = serde_json::to_vec(&self.0).unwrap_or_default();
        let media_type = HeaderValue::from_static("application/problem+json");
        let mut reply = (self.status(), [(header::CONTENT_TYPE, media_type)], body).into_response();
        if self.status() == StatusCode::PAYLOAD_TOO_LARGE {
            // What is left of the body would have to be read first.
            reply.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if let Some(millis) = self.0.retry_after_ms {
            let seconds = millis.div_ceil(1_000).max(1);
            reply.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        reply
    }
}

pub(super) const fn stale_reason(reason: StaleReason) -> &'static str {
    match reason {
        StaleReason::Superseded => "superseded",
        StaleReason::Expired => "expired",
        StaleReason::Released => "released",
        StaleReason::Revoked => "revoked",
        StaleReason::Unknown => "unknown",
    }
}

impl From<EngineError> for Problem {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Unavailable(reason) => Self::unavailable(&reason),
            EngineError::ShuttingDown => Self::shutting_down(),
            EngineError::Internal(reason) => Self::internal(&*reason),
        }
    }
}

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        Self::unavailable(&error.to_string())
    }
}

impl IntoResponse for Problem {
    /// An empty reply that carries the problem to the outermost layer.
    fn into_response(self) -> Response {
        let mut reply = self.status().into_response();
        reply.extensions_mut().insert(self);
        reply
    }
}
