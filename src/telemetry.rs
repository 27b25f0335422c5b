//! What the service tells about itself: metrics and logs.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

/// Labels of one HTTP route.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RouteLabels {
    /// The path as registered, never as requested.
    pub route: String,
    /// The HTTP status.
    pub status: u16,
}

/// Labels of one kind of store call.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct StoreLabels {
    /// `load` or `store`.
    pub operation: &'static str,
}

/// Labels of one store call that failed.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct FailureLabels {
    /// `load` or `store`.
    pub operation: &'static str,
    /// `away`, `refused`, `unknown`.
    pub failure: &'static str,
}

/// Every figure that `/metrics` shows.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Time from the head of a request to its reply, by route and status.
    pub http_requests: Family<RouteLabels, Histogram, fn() -> Histogram>,
    /// Commands in one batch.
    pub batch_commands: Histogram,
    /// Keys in one batch.
    pub batch_keys: Histogram,
    /// Writes that lost their race, or met a locked row, and were decided again.
    pub write_retries: Counter,
    /// Time of store calls.
    pub store_calls: Family<StoreLabels, Histogram, fn() -> Histogram>,
    /// Failed store calls.
    pub store_failures: Family<FailureLabels, Counter>,
    /// Calls parked until something changes.
    pub waiters: Gauge,
    /// Grants taken back because their caller had gone.
    pub undone_grants: Counter,
    /// Keys deleted by clean-up.
    pub cleaned_keys: Counter,
    /// 1 while notifications from other replicas are proven to arrive.
    pub listening: Gauge,
    /// Times the listener had to connect anew.
    pub listener_reconnects: Counter,
}

fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.000_25, 2.0, 18))
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("fencepost");
        let sizes = || Histogram::new(exponential_buckets(1.0, 2.0, 12));
        let metrics = Self {
            http_requests: Family::new_with_constructor(seconds),
            batch_commands: sizes(),
            batch_keys: sizes(),
            write_retries: Counter::default(),
            store_calls: Family::new_with_constructor(seconds),
            store_failures: Family::default(),
            waiters: Gauge::default(),
            undone_grants: Counter::default(),
            cleaned_keys: Counter::default(),
            listening: Gauge::default(),
            listener_reconnects: Counter::default(),
            registry: Registry::default(),
        };
        let m = &metrics;
        registry.register_with_unit(
            "http_request_duration",
            "Time from request to reply, by route and status; waiting included",
            Unit::Seconds,
            m.http_requests.clone(),
        );
        registry.register("batch_commands", "Commands in one batch", m.batch_commands.clone());
        registry.register("batch_keys", "Keys in one batch", m.batch_keys.clone());
        registry.register(
            "write_retries",
            "Writes not accepted by compare-and-swap, and decided again",
            m.write_retries.clone(),
        );
        registry.register_with_unit(
            "store_call_duration",
            "Time of one call to the store",
            Unit::Seconds,
            m.store_calls.clone(),
        );
        registry.register(
            "store_failures",
            "Calls to the store that failed",
            m.store_failures.clone(),
        );
        registry.register("waiters", "Calls that wait for a change", m.waiters.clone());
        registry.register(
            "undone_grants",
            "Grants taken back because their caller had gone",
            m.undone_grants.clone(),
        );
        registry.register("cleaned_keys", "Idle keys deleted", m.cleaned_keys.clone());
        registry.register(
            "listening",
            "1 while notifications from other replicas are proven to arrive",
            m.listening.clone(),
        );
        registry.register(
            "listener_reconnects",
            "Connections made by the listener after its first",
            m.listener_reconnects.clone(),
        );
        Self { registry, ..metrics }
    }
}

impl Metrics {
    /// The figures in the text format of Prometheus (OpenMetrics 1.0).
    #[must_use]
    pub fn encode(&self) -> String {
        let mut text = String::new();
        // Writing into a `String` cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.registry);
        text
    }

    /// Counts one store call.
    pub fn store_call(&self, operation: &'static str, took: Duration) {
        self.store_calls.get_or_create(&StoreLabels { operation }).observe(took.as_secs_f64());
    }
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Sends log lines to standard error.
///
/// # Errors
///
/// `filter` is not a filter as `tracing-subscriber` understands it.
pub fn start_logging(
    filter: &str,
    format: LogFormat,
    with_colour: bool,
) -> Result<(), tracing_subscriber::filter::ParseError> {
    let filter = tracing_subscriber::EnvFilter::builder().parse(filter)?;
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => lines.with_target(false).with_ansi(with_colour).init(),
        LogFormat::Json => lines.json().flatten_event(true).with_span_list(false).init(),
    }
    Ok(())
}
