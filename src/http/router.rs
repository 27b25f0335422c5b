//! The routes, and what happens around every request.

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::set_header::SetResponseHeaderLayer;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use uuid::Uuid;

use super::openapi::{Api, Documents};
use super::problem::Problem;
use super::{executions, idempotency, leaders, leases, operations};
use crate::coordinator::Coordinator;
use crate::telemetry::{Metrics, RouteLabels};

/// What handlers work with.
#[derive(Debug)]
pub struct App {
    /// The machines.
    pub coordinator: Coordinator,
    /// Where to count.
    pub metrics: Arc<Metrics>,
    /// The published documents.
    pub(super) documents: Documents,
}

/// What is known of a request from its arrival on.
#[derive(Clone, Debug)]
pub(super) struct Received {
    at: Instant,
    request_id: Arc<str>,
}

impl Received {
    pub(super) fn elapsed_ms(&self) -> i64 {
        super::shape::millis(self.at.elapsed())
    }

    pub(super) fn request_id(&self) -> &str {
        &self.request_id
    }
}

static REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

fn api() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::with_openapi(Api::openapi())
        .merge(leases::routes())
        .merge(executions::routes())
        .merge(idempotency::routes())
        .merge(leaders::routes())
        .merge(operations::routes())
}

/// The OpenAPI documents of this version.
#[must_use]
pub fn documents() -> Documents {
    Documents::of(&api().into_openapi())
}

/// The service as a router.
pub fn router(coordinator: Coordinator, metrics: Arc<Metrics>) -> (Router, Arc<App>) {
    build(coordinator, metrics, Router::new())
}

/// The service, and beside it, at their paths, what a benchmark measures it against.
#[doc(hidden)]
pub fn router_with_rivals(
    coordinator: Coordinator,
    metrics: Arc<Metrics>,
    rivals: Vec<(&'static str, leases::Rival)>,
) -> (Router, Arc<App>) {
    build(coordinator, metrics, leases::rivals(rivals))
}

fn build(
    coordinator: Coordinator,
    metrics: Arc<Metrics>,
    more: Router<Arc<App>>,
) -> (Router, Arc<App>) {
    let (routes, api) = api().split_for_parts();
    let documents = Documents::of(&api);
    let app = Arc::new(App { coordinator, metrics, documents });
    let no_store = HeaderValue::from_static("no-store");
    let served = routes
        .merge(operations::pages())
        .merge(more)
        .fallback(|uri: Uri| async move { Problem::route_not_found(uri.path()) })
        .method_not_allowed_fallback(|method: Method| async move {
            Problem::method_not_allowed(method.as_str())
        })
        // From the outside in. In one call, since each makes another boxed future of every request.
        .layer((
            from_fn_with_state(Arc::clone(&app), envelope),
            SetResponseHeaderLayer::overriding(header::CACHE_CONTROL, no_store),
            CatchPanicLayer::custom(|panic: Box<dyn std::any::Any + Send>| {
                let message = panic.downcast_ref::<String>().map(String::as_str);
                let message = message.or_else(|| panic.downcast_ref::<&str>().copied());
                let message = message.unwrap_or("unknown");
                Problem::internal(format!("a handler panicked: {message}")).into_response()
            }),
        ))
        .with_state(Arc::clone(&app));
    (served, app)
}

/// Gives each request its id, counts it, words its problem if it ends in one, and logs it.
///
/// One line at the end says all: a span around each request took a sixth of the server's part of it.
async fn envelope(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let at = Instant::now();
    let request_id = request_id(request.headers());
    let trace_id = trace_id(request.headers()).map(str::to_owned);
    let method = request.method().clone();
    let matched = request.extensions().get::<MatchedPath>();
    let route = matched.map_or("other", MatchedPath::as_str).to_owned();
    request.extensions_mut().insert(Received { at, request_id: Arc::clone(&request_id) });
    let mut reply = next.run(request).await;
    let mut failure = None;
    if let Some(problem) = reply.extensions_mut().remove::<Problem>() {
        failure = problem.failure();
        let allow = reply.headers_mut().remove(header::ALLOW);
        let no_store = reply.headers_mut().remove(header::CACHE_CONTROL);
        reply = problem.into_reply(&request_id);
        reply.headers_mut().extend(allow.map(|allow| (header::ALLOW, allow)));
        reply.headers_mut().extend(no_store.map(|value| (header::CACHE_CONTROL, value)));
    }
    if let Ok(value) = HeaderValue::from_str(&request_id) {
        reply.headers_mut().insert(&REQUEST_ID, value);
    }
    let (status, took) = (reply.status().as_u16(), at.elapsed());
    let (method, millis) = (method.as_str(), super::shape::millis(took));
    let (request_id, trace_id) = (&*request_id, trace_id.as_deref());
    macro_rules! log {
        ($level:ident, $message:literal $(, $cause:ident)?) => {
            tracing::$level!(
                method, route, status, millis, request_id, trace_id, $($cause,)? $message
            )
        };
    }
    match failure {
        Some(cause) if status == 500 => log!(error, "this is a bug", cause),
        Some(cause) => log!(warn, "request failed", cause),
        None => log!(debug, "request"),
    }
    let labels = RouteLabels { route, status };
    app.metrics.http_requests.get_or_create(&labels).observe(took.as_secs_f64());
    reply
}

/// The caller's id, or a new one.
fn request_id(headers: &HeaderMap) -> Arc<str> {
    let given = headers.get(&REQUEST_ID).and_then(|value| value.to_str().ok());
    let is_fine =
        |id: &&str| (1..=128).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic());
    match given.filter(is_fine) {
        Some(id) => Arc::from(id),
        None => {
            Arc::from(Uuid::now_v7().hyphenated().encode_lower(&mut Uuid::encode_buffer()) as &str)
        }
    }
}

/// The trace that the caller works in (W3C Trace Context).
fn trace_id(headers: &HeaderMap) -> Option<&str> {
    let header = headers.get("traceparent")?.to_str().ok()?;
    let mut parts = header.split('-');
    let (_version, trace_id) = (parts.next()?, parts.next()?);
    let is_fine = trace_id.len() == 32 && trace_id.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_fine.then_some(trace_id)
}
