//! What these tests share: one at a time, slow stores, and histories of grants with their checks.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use fencepost::coordinator::{Coordinator, CoordinatorOptions, Stores};
use fencepost::domain::ids::Key;
use fencepost::domain::lease::{Lease, LeaseMachine};
use fencepost::engine::Hub;
use fencepost::store::memory::MemoryStore;
use fencepost::store::postgres::PostgresStore;
use fencepost::store::sqlite::SqliteStore;
use fencepost::store::{
    ListQuery, Listed, Loaded, Moment, Store, StoreError, Stored, Waker, Write,
};
use sqlx::postgres::PgConnectOptions;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, MutexGuard, watch};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::support::{Kind, Reply, Service, World};

/// To be taken first in each test: figures taken side by side would mean nothing.
pub(crate) async fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::const_new(());
    ALONE.lock().await
}

/// A store that takes its time between a load and the store that was decided on it.
#[derive(Debug)]
struct SlowStore {
    inner: Arc<dyn Store<LeaseMachine>>,
    at_most: Duration,
}

#[async_trait]
impl Store<LeaseMachine> for SlowStore {
    async fn load(&self, lane: usize, keys: &[Key]) -> Result<Loaded<Lease>, StoreError> {
        self.inner.load(lane, keys).await
    }

    async fn known(&self, lane: usize) -> Option<Moment> {
        self.inner.known(lane).await
    }

    async fn store(&self, lane: usize, moment: Moment, writes: Arc<[Write<Lease>]>) -> Vec<Stored> {
        // Mostly short and now and then long: so that others do a lot during the long ones.
        sleep(self.at_most.mul_f64(rand::random_range(0.0..1.0_f64).powi(4))).await;
        self.inner.store(lane, moment, writes).await
    }

    async fn list(&self, query: ListQuery) -> Result<Listed<Lease>, StoreError> {
        self.inner.list(query).await
    }
}

/// Starts a service on a store whose writes are held back for up to `at_most`.
pub(crate) async fn slow_replica(
    world: &World,
    options: &CoordinatorOptions,
    at_most: Duration,
) -> Service {
    let options = CoordinatorOptions { metrics: Arc::default(), ..options.clone() };
    let hub = Arc::new(Hub::default());
    let stores = match world.kind {
        Kind::Memory => Stores::of(MemoryStore::new()),
        Kind::Sqlite => Stores::of(SqliteStore::open(&world.sqlite_file(), true).await.unwrap()),
        Kind::Postgres => {
            let waker = Arc::clone(&hub) as Arc<dyn Waker>;
            let (urls, metrics) = ([world.url()], Arc::clone(&options.metrics));
            Stores::of(PostgresStore::open(&urls, None, true, waker, metrics).await.unwrap())
        }
    };
    let leases = Arc::new(SlowStore { inner: Arc::clone(&stores.leases), at_most });
    let coordinator = Coordinator::on(Stores { leases, ..stores }, hub, options.clone());
    Service::on(coordinator, options.metrics).await
}

/// Starts as many services as a store allows, up to two; each counts for itself.
pub(crate) async fn replicas(
    world: &World,
    options: &CoordinatorOptions,
    delay: Option<Duration>,
) -> Vec<Service> {
    let count = if world.kind == Kind::Postgres { 2 } else { 1 };
    let mut services = Vec::new();
    for _ in 0..count {
        let options = CoordinatorOptions { metrics: Arc::default(), ..options.clone() };
        services.push(match delay {
            Some(at_most) => slow_replica(world, &options, at_most).await,
            None => world.serve(options).await,
        });
    }
    services
}

/// What a [`Proxy`] does with what it is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    /// Passes it on.
    Open,
    /// Keeps it, to pass it on once it is open again, however late.
    Held,
    /// Closes every connection, new ones too.
    Cut,
}

/// A way to a Postgres server that can be cut.
#[derive(Debug)]
pub(crate) struct Proxy {
    /// The database's URL by this way.
    pub(crate) url: String,
    flow: watch::Sender<Flow>,
    serving: JoinHandle<()>,
}

impl Proxy {
    /// A way to this database.
    pub(crate) async fn start(url: &str) -> Self {
        let options: PgConnectOptions = url.parse().unwrap();
        let (host, port) = (options.get_host().to_owned(), options.get_port());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let by_proxy = listener.local_addr().unwrap().to_string();
        let direct = format!("{host}:{port}");
        assert!(url.contains(&direct), "no host and port to put the proxy's in place of");
        let (flow, state) = watch::channel(Flow::Open);
        let serving = tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                tokio::spawn(forward(client, (host.clone(), port), state.clone()));
            }
        });
        Self { url: url.replace(&direct, &by_proxy), flow, serving }
    }

    pub(crate) fn set(&self, flow: Flow) {
        self.flow.send_replace(flow);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// Passes bytes both ways until either side ends, or the way is cut.
async fn forward(mut client: TcpStream, server: (String, u16), flow: watch::Receiver<Flow>) {
    let mut state = flow.clone();
    if !matches!(state.wait_for(|flow| *flow != Flow::Held).await.as_deref(), Ok(Flow::Open)) {
        return;
    }
    let Ok(mut server) = TcpStream::connect((&*server.0, server.1)).await else { return };
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    tokio::select! {
        () = pipe(from_client, to_server, flow.clone()) => {}
        () = pipe(from_server, to_client, flow) => {}
        _ = state.wait_for(|flow| *flow == Flow::Cut) => {}
    }
}

async fn pipe(
    mut from: tokio::net::tcp::ReadHalf<'_>,
    mut to: tokio::net::tcp::WriteHalf<'_>,
    mut flow: watch::Receiver<Flow>,
) {
    let mut buffer = vec![0; 16_384];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        let is_open = flow.wait_for(|flow| *flow == Flow::Open).await.is_ok();
        if !is_open || to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
    }
}

/// Now, by the clock of this machine, which is that of every store here: milliseconds since the
/// Unix epoch.
pub(crate) fn wall_ms() -> i64 {
    let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    i64::try_from(since_epoch.as_millis()).unwrap()
}

/// An instant of a reply, in milliseconds since the Unix epoch.
pub(crate) fn instant_ms(text: &str) -> i64 {
    let number = |from: usize, to: usize| text[from..to].parse::<i64>().unwrap();
    let (year, month, day) = (number(0, 4), number(5, 7), number(8, 10));
    // Days since the epoch of a date of the Gregorian calendar, counting years from March.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day;
    let seconds = (days - 719_469) * 86_400;
    let of_day = number(11, 13) * 3_600 + number(14, 16) * 60 + number(17, 19);
    (seconds + of_day) * 1_000 + number(20, 23)
}

/// The end of the lease in a reply.
pub(crate) fn expires_at(reply: &Reply) -> i64 {
    instant_ms(reply.body["lease"]["expires_at"].as_str().unwrap())
}

/// The value below which `share` of the durations lie, in milliseconds.
pub(crate) fn percentile(durations: &mut [Duration], share: f64) -> f64 {
    durations.sort_unstable();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        reason = "an index"
    )]
    let index = ((durations.len() as f64 * share).ceil() as usize).clamp(1, durations.len()) - 1;
    durations[index].as_secs_f64() * 1_000.0
}

/// Whether a measured time met its goal, in a word for the figures.
pub(crate) fn verdict(millis: f64, goal: f64) -> &'static str {
    if millis <= goal { "met" } else { "missed" }
}

/// One acknowledged grant, as its client saw it.
#[derive(Clone, Debug)]
pub(crate) struct Grant {
    pub(crate) invoked: Instant,
    pub(crate) returned: Instant,
    pub(crate) version: i64,
    /// By the store's clock.
    pub(crate) acquired_at: i64,
    /// By the store's clock.
    pub(crate) expires_at: i64,
    pub(crate) release_invoked: Option<Instant>,
}

impl Grant {
    /// From a reply that says `claimed`.
    pub(crate) fn new(invoked: Instant, reply: &Reply) -> Self {
        Self {
            invoked,
            returned: Instant::now(),
            version: reply.version(),
            acquired_at: instant_ms(reply.body["lease"]["acquired_at"].as_str().unwrap()),
            expires_at: expires_at(reply),
            release_invoked: None,
        }
    }
}

/// A refusal: `held` by this version.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) invoked: Instant,
    pub(crate) version: i64,
}

/// What clients saw of some keys.
#[derive(Debug, Default)]
pub(crate) struct History {
    pub(crate) grants: HashMap<String, Vec<Grant>>,
    pub(crate) refusals: HashMap<String, Vec<Refusal>>,
}

/// What is wrong with a history.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Faults {
    /// Versions that are not above that of a grant which was acknowledged before they were asked
    /// for, or that were given out twice; refusals that name an older holder.
    pub(crate) regressions: usize,
    /// Grants at a moment when, by the store's clock, the one before still held.
    pub(crate) overlaps: usize,
}

impl History {
    pub(crate) fn add(&mut self, other: Self) {
        for (key, grants) in other.grants {
            self.grants.entry(key).or_default().extend(grants);
        }
        for (key, refusals) in other.refusals {
            self.refusals.entry(key).or_default().extend(refusals);
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.grants.values().map(Vec::len).sum()
    }

    /// Checks each key by itself.
    pub(crate) fn check(&self) -> Faults {
        let mut faults = Faults::default();
        for (key, grants) in &self.grants {
            let refusals = self.refusals.get(key).map_or(&[][..], Vec::as_slice);
            faults.regressions += regressions(grants, refusals);
            faults.overlaps += overlaps(key, grants);
        }
        faults
    }
}

fn regressions(grants: &[Grant], refusals: &[Refusal]) -> usize {
    // The largest version that was known at each moment.
    let mut known: Vec<(Instant, i64)> = grants.iter().map(|g| (g.returned, g.version)).collect();
    known.sort_unstable();
    for i in 1..known.len() {
        known[i].1 = known[i].1.max(known[i - 1].1);
    }
    let known_before = |moment: Instant| {
        let count = known.partition_point(|(returned, _)| *returned < moment);
        count.checked_sub(1).map_or(0, |last| known[last].1)
    };
    let lower = grants.iter().filter(|g| g.version <= known_before(g.invoked)).count();
    let older = refusals.iter().filter(|r| r.version < known_before(r.invoked)).count();
    let mut versions: Vec<i64> = grants.iter().map(|g| g.version).collect();
    versions.sort_unstable();
    let twice = versions.windows(2).filter(|pair| pair[0] == pair[1]).count();
    lower + older + twice
}

fn overlaps(key: &str, grants: &[Grant]) -> usize {
    let mut grants: Vec<&Grant> = grants.iter().collect();
    grants.sort_unstable_by_key(|grant| grant.version);
    let is_overlap = |pair: &&[&Grant]| {
        let (before, after) = (pair[0], pair[1]);
        let was_released = before.release_invoked.is_some_and(|at| at < after.returned);
        let had_expired = before.expires_at <= after.acquired_at;
        after.acquired_at < before.acquired_at || !(was_released || had_expired)
    };
    let overlaps: Vec<_> = grants.windows(2).filter(is_overlap).collect();
    for pair in overlaps.iter().take(3) {
        println!("overlap on {key}: {pair:#?}");
    }
    overlaps.len()
}

#[test]
fn instants_are_read_as_they_are_written() {
    assert_eq!(instant_ms("1970-01-01T00:00:00.000Z"), 0);
    assert_eq!(instant_ms("2024-02-29T12:34:56.789Z"), 1_709_210_096_789);
    assert_eq!(instant_ms("2026-11-30T12:00:00.001Z"), 1_796_040_000_001);
}
