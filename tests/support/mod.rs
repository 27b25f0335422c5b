//! What the suites share: stores, services in this process and in others, and a client.
//!
//! Nothing is mocked: the service listens on a port of its own, over a fresh store, and is spoken
//! to over HTTP.

#![allow(dead_code, reason = "each suite uses its own part")]

pub mod database;
pub mod process;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use fencepost::config::Dsn;
use fencepost::coordinator::{Coordinator, CoordinatorOptions};
use fencepost::http::{self, Rival};
use fencepost::telemetry::Metrics;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use database::Database;

/// The stores that every law holds on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Memory,
    Sqlite,
    Postgres,
}

/// A store that outlives the services on it.
pub struct World {
    pub kind: Kind,
    directory: tempfile::TempDir,
    pub database: Option<Database>,
}

impl World {
    /// A fresh, empty store.
    pub async fn new(kind: Kind) -> Self {
        let database = match kind {
            Kind::Postgres => Some(Database::create().await),
            Kind::Memory | Kind::Sqlite => None,
        };
        Self { kind, directory: tempfile::tempdir().unwrap(), database }
    }

    pub fn sqlite_file(&self) -> PathBuf {
        self.directory.path().join("fencepost.db")
    }

    /// The value of `--database-url` for this store.
    pub fn url(&self) -> String {
        match self.kind {
            Kind::Memory => "memory:".to_owned(),
            Kind::Sqlite => format!("sqlite:{}", self.sqlite_file().display()),
            Kind::Postgres => self.database.as_ref().unwrap().url.clone(),
        }
    }

    pub fn dsn(&self) -> Dsn {
        Dsn::parse(&[self.url()]).unwrap()
    }

    /// Starts a service in this process.
    pub async fn serve(&self, options: CoordinatorOptions) -> Service {
        let coordinator = Coordinator::open_dsn(&self.dsn(), options.clone()).await.unwrap();
        Service::on(coordinator, options.metrics).await
    }
}

/// A service in this process, on a port of its own.
pub struct Service {
    pub client: Client,
    pub app: Arc<http::App>,
    stop: CancellationToken,
    serving: Option<JoinHandle<()>>,
    /// Kept for as long as the service runs.
    world: Option<World>,
}

impl Service {
    /// A service with default options on a fresh store.
    pub async fn start(kind: Kind) -> Self {
        Self::start_with(kind, CoordinatorOptions::default()).await
    }

    pub async fn start_with(kind: Kind, options: CoordinatorOptions) -> Self {
        let world = World::new(kind).await;
        let mut service = world.serve(options).await;
        service.world = Some(world);
        service
    }

    /// A service on a coordinator, which may be on a store that misbehaves.
    pub async fn on(coordinator: Coordinator, metrics: Arc<Metrics>) -> Self {
        Self::with_rivals(coordinator, metrics, Vec::new()).await
    }

    /// The same, with other ways to grant a claim at their paths.
    pub async fn with_rivals(
        coordinator: Coordinator,
        metrics: Arc<Metrics>,
        rivals: Vec<(&'static str, Rival)>,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base = format!("http://{}", listener.local_addr().unwrap());
        let (router, app) = http::router_with_rivals(coordinator, metrics, rivals);
        let stop = CancellationToken::new();
        let served = http::serve(listener, router, Arc::clone(&app), stop.clone());
        let serving = tokio::spawn(served);
        Self { client: Client::new(base), app, stop, serving: Some(serving), world: None }
    }

    /// The store of a service that was started on a fresh one.
    pub fn world(&self) -> &World {
        self.world.as_ref().unwrap()
    }

    /// Asks the service to end, as SIGTERM does.
    pub fn begin_stop(&self) {
        self.stop.cancel();
    }

    /// Ends the service and waits until it has.
    pub async fn stop(mut self) {
        self.stop.cancel();
        self.serving.take().unwrap().await.unwrap();
    }
}

impl std::ops::Deref for Service {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Speaks to one service.
#[derive(Clone, Debug)]
pub struct Client {
    pub base: String,
    pub http: reqwest::Client,
}

/// A reply, whatever its status.
#[derive(Clone, Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: reqwest::header::HeaderMap,
    pub text: String,
    /// `null` if the body is not JSON.
    pub body: Value,
}

impl Reply {
    async fn read(response: reqwest::Response) -> Result<Self, reqwest::Error> {
        let status = response.status().as_u16();
        let headers = response.headers().clone();
        let text = response.text().await?;
        let body = serde_json::from_str(&text).unwrap_or(Value::Null);
        Ok(Self { status, headers, text, body })
    }

    /// The outcome of a 200, or the code of a problem.
    pub fn outcome(&self) -> &str {
        let member = if self.status == 200 { "outcome" } else { "code" };
        self.body[member].as_str().unwrap_or("")
    }

    /// The version of the lease in it.
    pub fn version(&self) -> i64 {
        self.body["lease"]["version"].as_i64().unwrap_or_else(|| panic!("no lease: {self:?}"))
    }

    pub fn reason(&self) -> &str {
        self.body["reason"].as_str().unwrap_or("")
    }

    /// Fails unless the outcome, or the problem's code, is this.
    #[track_caller]
    pub fn expect(self, outcome: &str) -> Self {
        assert_eq!(self.outcome(), outcome, "{self:#?}");
        self
    }

    /// Fails unless this is a 409 `stale_lease` for this reason.
    #[track_caller]
    pub fn expect_stale(self, reason: &str) -> Self {
        assert_eq!((self.status, self.outcome(), self.reason()), (409, "stale_lease", reason));
        self
    }
}

fn encode(query: &[(&str, &str)]) -> String {
    let mut encoded = String::new();
    for (name, value) in query {
        encoded += if encoded.is_empty() { "?" } else { "&" };
        let text: String = form_urlencoded::byte_serialize(value.as_bytes()).collect();
        encoded += name;
        encoded.push('=');
        encoded += &text;
    }
    encoded
}

impl Client {
    pub fn new(base: String) -> Self {
        let http = reqwest::Client::builder().timeout(Duration::from_secs(70)).build().unwrap();
        Self { base, http }
    }

    /// A POST whose connection may break.
    pub async fn try_post(&self, path: &str, body: &Value) -> Result<Reply, reqwest::Error> {
        let request = self.http.post(format!("{}{path}", self.base)).json(body);
        Reply::read(request.send().await?).await
    }

    pub async fn post(&self, path: &str, body: Value) -> Reply {
        self.try_post(path, &body).await.unwrap()
    }

    /// A POST of any bytes as JSON, whose connection may break.
    pub async fn try_post_raw(
        &self,
        path: &str,
        body: impl Into<Vec<u8>>,
    ) -> Result<Reply, reqwest::Error> {
        let request = self
            .http
            .post(format!("{}{path}", self.base))
            .header("content-type", "application/json")
            .body(body.into());
        Reply::read(request.send().await?).await
    }

    /// A POST of any bytes as JSON.
    pub async fn post_raw(&self, path: &str, body: impl Into<Vec<u8>>) -> Reply {
        self.try_post_raw(path, body).await.unwrap()
    }

    pub async fn put(&self, path: &str, body: Value) -> Reply {
        let request = self.http.put(format!("{}{path}", self.base)).json(&body);
        Reply::read(request.send().await.unwrap()).await.unwrap()
    }

    /// A GET; `path` may have a query.
    pub async fn get(&self, path: &str) -> Reply {
        let request = self.http.get(format!("{}{path}", self.base));
        Reply::read(request.send().await.unwrap()).await.unwrap()
    }

    /// A GET with query parameters, encoded here.
    pub async fn get_with(&self, path: &str, query: &[(&str, &str)]) -> Reply {
        self.get(&format!("{path}{}", encode(query))).await
    }

    /// A DELETE with query parameters, encoded here.
    pub async fn delete_with(&self, path: &str, query: &[(&str, &str)]) -> Reply {
        let request = self.http.delete(format!("{}{path}{}", self.base, encode(query)));
        Reply::read(request.send().await.unwrap()).await.unwrap()
    }

    pub async fn claim(&self, key: &str, owner: &str, ttl_ms: i64) -> Reply {
        let body = json!({"key": key, "owner_id": owner, "ttl_ms": ttl_ms});
        self.post("/v1/leases/claim", body).await
    }

    pub async fn renew(&self, key: &str, owner: &str, version: i64) -> Reply {
        let body = json!({"key": key, "owner_id": owner, "version": version});
        self.post("/v1/leases/renew", body).await
    }

    pub async fn release(&self, key: &str, owner: &str, version: i64) -> Reply {
        let body = json!({"key": key, "owner_id": owner, "version": version});
        self.post("/v1/leases/release", body).await
    }

    pub async fn wait(&self, key: &str, version: Option<i64>, wait_ms: i64) -> Reply {
        let body = json!({"key": key, "version": version, "wait_ms": wait_ms});
        self.post("/v1/leases/wait", body).await
    }

    pub async fn state(&self, key: &str) -> Value {
        self.get_with("/v1/leases/state", &[("key", key)]).await.body
    }

    /// Waits until a key's lease has ended, by the service's own word.
    pub async fn until_expired(&self, key: &str, version: i64) {
        self.wait(key, Some(version), 20_000).await.expect("released");
    }

    /// The value of a metric without labels.
    pub async fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").await.text;
        let line = text.lines().find(|line| line.split(' ').next() == Some(name));
        line.and_then(|line| line.split(' ').nth(1)?.parse().ok()).unwrap_or(f64::NAN)
    }

    /// Waits until so many calls wait.
    pub async fn until_waiters(&self, count: usize) {
        eventually(|| async { self.metric("fencepost_waiters").await == count as f64 }).await;
    }
}

/// Waits until a condition holds; fails after a minute.
pub async fn eventually<F: Future<Output = bool>>(mut condition: impl FnMut() -> F) {
    let deadline = tokio::time::Instant::now() + Duration::from_mins(1);
    while !condition().await {
        assert!(tokio::time::Instant::now() < deadline, "it did not happen within a minute");
        tokio::task::yield_now().await;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Defines tests that hold on every store; each gets a service on a fresh one.
#[macro_export]
macro_rules! on_every_store {
    ($($(#[$doc:meta])* async fn $law:ident($service:ident) $body:block)*) => {
        $($(#[$doc])* async fn $law($service: $crate::support::Service) $body)*

        on_every_store!(@on memory Memory $($law)*);
        on_every_store!(@on sqlite Sqlite $($law)*);
        on_every_store!(@on postgres Postgres $($law)*);
    };
    (@on $module:ident $kind:ident $($law:ident)*) => {
        mod $module {
            use $crate::support::{Kind, Service};

            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $law() {
                    super::$law(Service::start(Kind::$kind).await).await;
                }
            )*
        }
    };
}
