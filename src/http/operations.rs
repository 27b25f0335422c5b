//! Health, limits, figures, and the documents.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Path, State};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::openapi::ReadProblems;
use super::problem::Problem;
use super::request::{Limit, Members, Metadata, Nothing, StrictQuery, WaitMs};
use super::router::App;
use super::shape::{millis, ok};
use crate::domain::idempotency::Head;
use crate::domain::ids::{Binding, CorrelationId, Name, OwnerId, Reason, Scope};
use crate::domain::time::{Retention, Ttl};
use crate::domain::version::Version;
use crate::domain::{execution, idempotency};

/// The routes in the OpenAPI document.
pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(check_liveness))
        .routes(routes!(check_readiness))
        .routes(routes!(get_capabilities))
}

/// The pages beside it.
pub(super) fn pages() -> Router<Arc<App>> {
    Router::new()
        .route("/metrics", get(metrics))
        .route(
            "/openapi.json",
            get(|State(app): State<Arc<App>>| async move { json_text(app.documents.v3_1.clone()) }),
        )
        .route(
            "/openapi-3.0.json",
            get(|State(app): State<Arc<App>>| async move { json_text(app.documents.v3_0.clone()) }),
        )
        .route("/docs", get(|| async { Redirect::permanent("/docs/") }))
        .route("/docs/", get(|| async { docs("index.html") }))
        .route("/docs/{*file}", get(|Path(file): Path<String>| async move { docs(&file) }))
}

/// The process lives.
#[derive(Serialize, ToSchema)]
struct Liveness {
    /// `alive`.
    #[schema(example = "alive")]
    status: &'static str,
}

/// Check that the process lives
///
/// Says nothing of the store: a process that cannot reach it is not helped by a restart.
#[utoipa::path(
    get, path = "/livez", operation_id = "checkLiveness", tag = "operations",
    responses(
        (status = 200, description = "It lives.", body = Liveness,
         example = json!({"status": "alive"})),
        ReadProblems
    )
)]
async fn check_liveness() -> Response {
    ok(Liveness { status: "alive" })
}

/// The service can do its work.
#[derive(Serialize, ToSchema)]
struct Readiness {
    /// `ready`.
    #[schema(example = "ready")]
    status: &'static str,
    /// `postgres`, `sqlite` or `memory`.
    #[schema(example = "postgres")]
    store: &'static str,
    /// How changes made by other replicas reach this one's waiting calls: `listen`; `poll`, when
    /// notifications do not arrive, so that a change is seen after up to a second; `local`, when
    /// there are no other replicas.
    #[schema(example = "listen")]
    wake_path: &'static str,
}

/// Check that the service can work
///
/// 503 with the reasons while the store cannot be reached, and from SIGTERM on.
#[utoipa::path(
    get, path = "/readyz", operation_id = "checkReadiness", tag = "operations",
    responses(
        (status = 200, description = "It can.", body = Readiness,
         example = json!({"status": "ready", "store": "postgres", "wake_path": "listen"})),
        ReadProblems
    )
)]
async fn check_readiness(State(app): State<Arc<App>>) -> Result<Response, Problem> {
    if app.coordinator.is_draining() {
        return Err(Problem::shutting_down());
    }
    let backend = Arc::clone(app.coordinator.backend());
    let (store, wake_path) = (backend.name(), backend.wake_path().as_str());
    // In a task of its own: a prober that leaves must not tear the store's connection.
    match tokio::spawn(async move { backend.check().await }).await {
        Ok(Ok(())) => Ok(ok(Readiness { status: "ready", store, wake_path })),
        Ok(Err(error)) => Err(Problem::not_ready(&[format!("the store is away: {error}")])),
        Err(error) => Err(Problem::internal(error.to_string())),
    }
}

/// What this service is, and its limits.
#[derive(Serialize, ToSchema)]
struct Capabilities {
    /// The version of the service.
    #[schema(example = "0.1.0")]
    version: &'static str,
    /// `postgres`, `sqlite` or `memory`.
    #[schema(example = "postgres")]
    store: &'static str,
    /// The resources that it serves.
    #[schema(example = json!(["leases", "executions", "idempotency", "leaders"]))]
    resources: &'static [&'static str],
    /// The limits that requests must keep.
    limits: CapabilityLimits,
    /// What members that are left out stand for.
    defaults: CapabilityDefaults,
}

/// The limits that requests must keep.
#[derive(Serialize, ToSchema)]
struct CapabilityLimits {
    /// The longest key, execution id or name, in bytes of UTF-8.
    key_bytes: usize,
    /// The longest scope, in bytes of UTF-8.
    scope_bytes: usize,
    /// The longest owner id, in bytes of UTF-8.
    owner_id_bytes: usize,
    /// The longest correlation id, in bytes of UTF-8.
    correlation_id_bytes: usize,
    /// The longest intent, in bytes of UTF-8.
    intent_bytes: usize,
    /// The longest fingerprint, in bytes of UTF-8.
    fingerprint_bytes: usize,
    /// The longest reason of a release by force, in bytes of UTF-8.
    reason_bytes: usize,
    /// The largest metadata, in bytes of compact JSON.
    metadata_bytes: usize,
    /// The shortest lease.
    ttl_ms_min: i64,
    /// The longest lease.
    ttl_ms_max: i64,
    /// The shortest time that a response is kept.
    retention_ms_min: i64,
    /// The longest time that a response is kept.
    retention_ms_max: i64,
    /// The longest wait.
    wait_ms_max: u32,
    /// The largest version.
    version_max: i64,
    /// The largest request body, in bytes.
    request_body_bytes: usize,
    /// The largest result of an execution, in bytes of JSON.
    result_bytes: usize,
    /// The largest body of a stored response, in bytes.
    body_bytes: usize,
    /// The most headers of a stored response.
    headers: usize,
    /// The most bytes of all headers of a stored response.
    headers_bytes: usize,
    /// The most stored responses of one namespace; the oldest are dropped beyond. Only on the
    /// memory store.
    #[serde(skip_serializing_if = "Option::is_none")]
    stored_responses: Option<usize>,
    /// The largest request body of the `-many` calls, in bytes.
    many_request_body_bytes: usize,
    /// The most items of a `-many` call.
    many_items: usize,
    /// The most items on a page of a list.
    list_limit: u32,
    /// How long a call that does not wait takes at most.
    request_timeout_ms: i64,
}

/// What members that are left out stand for.
#[derive(Serialize, ToSchema)]
struct CapabilityDefaults {
    /// Of `waitForLease` and `waitForLeader`.
    wait_ms: u32,
    /// Of the claim of an execution.
    execution_ttl_ms: i64,
    /// How long a completed execution is kept; absent: for ever.
    #[serde(skip_serializing_if = "Option::is_none")]
    execution_retention_ms: Option<i64>,
    /// Of the claim of a write.
    idempotency_ttl_ms: i64,
    /// Of a stored response.
    idempotency_retention_ms: i64,
    /// Of a leader.
    leader_ttl_ms: i64,
    /// Of lists.
    list_limit: u32,
}

struct PlainBody;

impl Members for PlainBody {
    fn read(_fields: &mut super::request::Fields<'_>) -> Option<Self> {
        None
    }
}

/// Tell limits and defaults
#[utoipa::path(
    get, path = "/v1/capabilities", operation_id = "getCapabilities", tag = "operations",
    description = "All limits that requests must keep, and what members that are left out stand \
        for, as this replica is configured.",
    responses(
        (status = 200, description = "Limits and defaults.", body = Capabilities),
        ReadProblems
    )
)]
async fn get_capabilities(
    State(app): State<Arc<App>>,
    StrictQuery(Nothing): StrictQuery<Nothing>,
) -> Response {
    let (backend, options) = (app.coordinator.backend(), app.coordinator.options());
    ok(Capabilities {
        version: env!("CARGO_PKG_VERSION"),
        store: backend.name(),
        resources: &["leases", "executions", "idempotency", "leaders"],
        limits: CapabilityLimits {
            key_bytes: Name::MAX_BYTES,
            scope_bytes: Scope::MAX_BYTES,
            owner_id_bytes: OwnerId::MAX_BYTES,
            correlation_id_bytes: CorrelationId::MAX_BYTES,
            intent_bytes: Binding::MAX_BYTES,
            fingerprint_bytes: Binding::MAX_BYTES,
            reason_bytes: Reason::MAX_BYTES,
            metadata_bytes: Metadata::MAX_BYTES,
            ttl_ms_min: Ttl::MIN_MS,
            ttl_ms_max: Ttl::MAX_MS,
            retention_ms_min: Retention::MIN_MS,
            retention_ms_max: Retention::MAX_MS,
            wait_ms_max: WaitMs::MAX,
            version_max: Version::MAX,
            request_body_bytes: PlainBody::MAX_BYTES,
            result_bytes: super::executions::RESULT_BYTES.1,
            body_bytes: super::idempotency::BODY_BYTES.1,
            headers: Head::MAX_HEADERS,
            headers_bytes: Head::MAX_BYTES,
            stored_responses: backend.stored_responses(),
            many_request_body_bytes: super::leases::MANY_BYTES.1,
            many_items: super::request::MAX_ITEMS,
            list_limit: Limit::MAX,
            request_timeout_ms: millis(options.limits.request_timeout),
        },
        defaults: CapabilityDefaults {
            wait_ms: super::leases::DEFAULT_WAIT.0,
            execution_ttl_ms: execution::DEFAULT_TTL_MS,
            execution_retention_ms: options.execution_retention.map(Retention::as_millis),
            idempotency_ttl_ms: idempotency::DEFAULT_TTL_MS,
            idempotency_retention_ms: options.idempotency_retention.as_millis(),
            leader_ttl_ms: Ttl::LEADER.as_millis(),
            list_limit: Limit::DEFAULT.0,
        },
    })
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    let media_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, media_type)], app.metrics.encode()).into_response()
}

fn json_text(text: String) -> Response {
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], text).into_response()
}

/// A file of the API browser, which is part of the binary.
fn docs(file: &str) -> Response {
    // Its validator would ask a server elsewhere.
    let config = utoipa_swagger_ui::Config::from("/openapi.json").validator_url("none");
    match utoipa_swagger_ui::serve(file, Arc::new(config)) {
        Ok(Some(file)) => {
            ([(header::CONTENT_TYPE, file.content_type)], file.bytes.to_vec()).into_response()
        }
        Ok(None) => Problem::route_not_found(&format!("/docs/{file}")).into_response(),
        Err(error) => {
            Problem::internal(format!("the API browser cannot be served: {error}")).into_response()
        }
    }
}
