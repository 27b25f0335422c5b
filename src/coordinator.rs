//! The service without HTTP: opens a store, runs the machines on it, and ends in order.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::config::Dsn;
use crate::domain::ids::{Key, Kind, Name, Namespace, OwnerId};
use crate::domain::lease::{
    self, Claim, ClaimOutcome, Command, ForceReleaseOutcome, Lease, LeaseMachine, Outcome,
    OverReason, Reference, ReleaseOutcome, RenewOutcome, WatchOutcome,
};
use crate::domain::time::{Timestamp, Ttl};
use crate::domain::version::Version;
use crate::engine::{Answer, Engine, EngineError, Grant, Hub, Limits, Question, Verdict};
use crate::shutdown::spawn_vital;
use crate::store::memory::MemoryStore;
use crate::store::postgres::PostgresStore;
use crate::store::sqlite::SqliteStore;
use crate::store::{Backend, ListQuery, OpenError, Store, StoreClock, StoreError};
use crate::telemetry::Metrics;

/// How a [`Coordinator`] works.
#[derive(Clone, Debug)]
pub struct CoordinatorOptions {
    /// Create or update the tables when opening.
    pub migrate: bool,
    /// How long to go on trying to reach the store.
    pub connect_timeout: Duration,
    /// A direct Postgres URL for LISTEN and NOTIFY.
    pub notify_url: Option<String>,
    /// How long a key stays known after its last use.
    pub idle_key_retention: Duration,
    /// How often idle keys are looked for.
    pub cleanup_interval: Duration,
    /// Time limits of single calls.
    pub limits: Limits,
    /// Where to count.
    pub metrics: Arc<Metrics>,
}

impl Default for CoordinatorOptions {
    fn default() -> Self {
        Self {
            migrate: true,
            connect_timeout: Duration::from_secs(30),
            notify_url: None,
            idle_key_retention: Duration::from_hours(24),
            cleanup_interval: Duration::from_mins(1),
            limits: Limits::default(),
            metrics: Arc::default(),
        }
    }
}

/// All machines on one store.
#[derive(Debug)]
pub struct Coordinator {
    backend: Arc<dyn Backend>,
    lease_store: Arc<dyn Store<LeaseMachine>>,
    leases: Arc<Engine<LeaseMachine>>,
    limits: Limits,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl Coordinator {
    /// Opens the store, waiting for it if it cannot be reached yet.
    ///
    /// # Errors
    ///
    /// It cannot be reached in time, or cannot be used as it is.
    pub async fn open(dsn: &Dsn, options: CoordinatorOptions) -> Result<Self, OpenError> {
        let hub = Arc::new(Hub::default());
        let deadline = Instant::now() + options.connect_timeout;
        loop {
            match open_store(dsn, &options, &hub).await {
                Ok((backend, leases)) => return Ok(Self::on(backend, leases, hub, &options)),
                Err(OpenError::Unreachable(reason)) if Instant::now() < deadline => {
                    tracing::warn!(%reason, "cannot reach the store; trying again");
                    sleep(Duration::from_millis(500)).await;
                }
                Err(OpenError::Unreachable(reason)) => {
                    let waited = humantime::format_duration(options.connect_timeout);
                    return Err(OpenError::Unreachable(format!(
                        "the store cannot be reached, tried for {waited}: {reason}"
                    )));
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Runs the machines on a store that is open already.
    #[must_use]
    pub fn on(
        backend: Arc<dyn Backend>,
        lease_store: Arc<dyn Store<LeaseMachine>>,
        hub: Arc<Hub>,
        options: &CoordinatorOptions,
    ) -> Self {
        let leases = Engine::start(
            &lease_store,
            Arc::clone(&backend),
            hub,
            options.limits,
            Arc::clone(&options.metrics),
        );
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let clean = clean_up(Arc::clone(&backend), options.clone(), stop.clone());
        spawn_vital(&tasks, clean);
        Self { backend, lease_store, leases, limits: options.limits, tasks, stop }
    }

    /// Leases.
    #[must_use]
    pub fn leases(&self) -> Leases<'_> {
        Leases { coordinator: self }
    }

    /// The store, for what people ask about it.
    #[must_use]
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// The time limits in force.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Answers every waiting call, and refuses new claims and waits from here on.
    pub fn drain(&self) {
        self.leases.drain();
    }

    /// Whether [`Self::drain`] was called.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.leases.is_draining()
    }

    /// Finishes what was begun and lets go of the store.
    pub async fn close(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.leases.close().await;
        self.tasks.wait().await;
        self.backend.close().await;
    }
}

type Opened = (Arc<dyn Backend>, Arc<dyn Store<LeaseMachine>>);

async fn open_store(
    dsn: &Dsn,
    options: &CoordinatorOptions,
    hub: &Arc<Hub>,
) -> Result<Opened, OpenError> {
    Ok(match dsn {
        Dsn::Memory => {
            let store = Arc::new(MemoryStore::new());
            (Arc::clone(&store) as _, store as _)
        }
        Dsn::Sqlite(path) => {
            let store = Arc::new(SqliteStore::open(path, options.migrate).await?);
            (Arc::clone(&store) as _, store as _)
        }
        Dsn::Postgres(urls) => {
            let store = PostgresStore::open(
                urls,
                options.notify_url.as_deref(),
                options.migrate,
                Arc::clone(hub) as _,
                Arc::clone(&options.metrics),
            );
            let store = Arc::new(store.await?);
            (Arc::clone(&store) as _, store as _)
        }
    })
}

/// Deletes idle keys now and then, in bounded chunks; each replica does, at its own moments. A
/// pass that fails goes on where it was.
async fn clean_up(backend: Arc<dyn Backend>, options: CoordinatorOptions, stop: CancellationToken) {
    let mut after = None;
    loop {
        if after.is_none() {
            let pause = options.cleanup_interval.mul_f64(rand::random_range(0.9..1.1));
            tokio::select! {
                () = sleep(pause) => {}
                () = stop.cancelled() => return,
            }
        }
        let chunk = backend.clean_up(options.idle_key_retention, after.clone());
        let chunk = tokio::select! {
            chunk = timeout(CLEAN_UP_TIMEOUT, chunk) => chunk,
            () = stop.cancelled() => return,
        };
        let error = match chunk {
            Ok(Ok(chunk)) => {
                options.metrics.cleaned_keys.inc_by(chunk.deleted);
                after = chunk.next;
                continue;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => "the store did not answer in time".to_owned(),
        };
        tracing::warn!(error, "clean-up was interrupted and goes on");
        tokio::select! {
            () = sleep(Duration::from_secs(1)) => {}
            () = stop.cancelled() => return,
        }
    }
}

/// How long one chunk of clean-up may take.
const CLEAN_UP_TIMEOUT: Duration = Duration::from_secs(10);

/// An outcome with the store's time behind it.
#[derive(Debug)]
pub struct Reply<T> {
    /// The machine's word.
    pub outcome: T,
    /// The store's time.
    pub clock: StoreClock,
    grant: Option<Grant<LeaseMachine>>,
}

impl<T> Reply<T> {
    /// Takes the outcome. Until then a new grant in it is taken back when the reply is dropped,
    /// as a caller that gave up does.
    pub fn keep(self) -> (T, StoreClock) {
        if let Some(grant) = self.grant {
            grant.keep();
        }
        (self.outcome, self.clock)
    }

    fn map<U>(self, convert: impl FnOnce(T) -> U) -> Reply<U> {
        Reply { outcome: convert(self.outcome), clock: self.clock, grant: self.grant }
    }
}

/// A claim as a caller words it.
#[derive(Clone, Debug)]
pub struct ClaimRequest {
    /// Who asks.
    pub owner_id: OwnerId,
    /// For how long.
    pub ttl: Ttl,
    /// The caller's name for the attempt.
    pub attempt_id: Option<Uuid>,
    /// To be shown to others.
    pub metadata: Option<String>,
    /// How long to stand in line; zero: not at all.
    pub wait: Duration,
}

/// How a wait ended.
#[derive(Debug)]
pub enum WaitOutcome {
    /// The generation does not hold the key.
    Over(OverReason),
    /// It still does.
    TimedOut(Lease),
}

/// One stretch of a list.
#[derive(Debug)]
pub struct Page {
    /// Keys in the order of their bytes; whether each is held.
    pub items: Vec<(Name, Lease, bool)>,
    /// Where the next stretch begins, if there may be one.
    pub next: Option<Name>,
    /// The store's time.
    pub clock: StoreClock,
}

/// What can be done with leases; see [`crate::domain::lease`] for the rules.
#[derive(Clone, Copy, Debug)]
pub struct Leases<'a> {
    coordinator: &'a Coordinator,
}

/// A command was answered with another command's outcome.
fn mismatched() -> EngineError {
    EngineError::Internal("the machine answered another command".into())
}

macro_rules! outcome {
    ($answer:expr, $variant:ident) => {{
        let Answer { outcome, clock, grant, .. } = $answer;
        match outcome {
            Outcome::$variant(outcome) => Ok(Reply { outcome, clock, grant }),
            _ => Err(mismatched()),
        }
    }};
}

impl Leases<'_> {
    fn key(namespace: &Namespace, name: &Name) -> Key {
        Key { kind: Kind::Lease, namespace: namespace.clone(), name: name.clone() }
    }

    fn engine(&self) -> &Engine<LeaseMachine> {
        &self.coordinator.leases
    }

    /// Claims a key.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn claim(
        &self,
        namespace: &Namespace,
        name: &Name,
        request: ClaimRequest,
    ) -> Result<Reply<ClaimOutcome>, EngineError> {
        if self.engine().is_draining() {
            return Err(EngineError::ShuttingDown);
        }
        let key = Self::key(namespace, name);
        let claim = Claim {
            owner_id: request.owner_id,
            ttl: request.ttl,
            attempt_id: request.attempt_id,
            grant_id: rand::random(),
            metadata: request.metadata,
            may_take: true,
        };
        let reply = if request.wait.is_zero() {
            outcome!(self.engine().ask(&key, Command::Claim(claim)).await?, Claim)?
        } else {
            self.engine().wait(&key, ClaimInLine { claim }, request.wait, true).await??
        };
        if let ClaimOutcome::Claimed { lease, .. } = &reply.outcome {
            still_running(lease, reply.clock)?;
        }
        Ok(reply)
    }

    /// Extends a lease that is held.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn renew(
        &self,
        namespace: &Namespace,
        name: &Name,
        reference: Reference,
        ttl: Option<Ttl>,
    ) -> Result<Reply<RenewOutcome>, EngineError> {
        let command = Command::Renew { reference, ttl };
        let reply =
            outcome!(self.engine().ask(&Self::key(namespace, name), command).await?, Renew)?;
        if let RenewOutcome::Renewed(lease) = &reply.outcome {
            still_running(lease, reply.clock)?;
        }
        Ok(reply)
    }

    /// Gives a lease back.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn release(
        &self,
        namespace: &Namespace,
        name: &Name,
        reference: Reference,
    ) -> Result<Reply<ReleaseOutcome>, EngineError> {
        let command = Command::Release(reference);
        outcome!(self.engine().ask(&Self::key(namespace, name), command).await?, Release)
    }

    /// Waits for the end of a generation.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn wait(
        &self,
        namespace: &Namespace,
        name: &Name,
        version: Option<Version>,
        wait: Duration,
    ) -> Result<Reply<WaitOutcome>, EngineError> {
        if self.engine().is_draining() {
            return Err(EngineError::ShuttingDown);
        }
        let key = Self::key(namespace, name);
        self.engine().wait(&key, EndOf { version }, wait, false).await?
    }

    /// What a key holds.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn state(
        &self,
        namespace: &Namespace,
        name: &Name,
    ) -> Result<Reply<Option<Lease>>, EngineError> {
        outcome!(self.engine().ask(&Self::key(namespace, name), Command::Read).await?, Read)
    }

    /// Whether a version holds its key; if not, the version that does.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn verify(
        &self,
        namespace: &Namespace,
        name: &Name,
        version: Version,
    ) -> Result<Result<(), Option<Version>>, EngineError> {
        let reply = self.state(namespace, name).await?;
        Ok(lease::verify(reply.outcome.as_ref(), version, reply.clock.estimate()))
    }

    /// Frees a key, whoever holds it.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn force_release(
        &self,
        namespace: &Namespace,
        name: &Name,
        version: Option<Version>,
    ) -> Result<Reply<ForceReleaseOutcome>, EngineError> {
        let command = Command::ForceRelease { version };
        outcome!(self.engine().ask(&Self::key(namespace, name), command).await?, ForceRelease)
    }

    /// Lists keys. `held`: only those that are held (`true`) or not (`false`). A page may be
    /// shorter than `limit`, even empty, and not be the last: only `next` tells.
    ///
    /// # Errors
    ///
    /// The store cannot be read.
    pub async fn list(
        &self,
        namespace: &Namespace,
        prefix: String,
        held: Option<bool>,
        after: Option<Name>,
        limit: usize,
    ) -> Result<Page, StoreError> {
        let (store, namespace) = (Arc::clone(&self.coordinator.lease_store), namespace.clone());
        // In a task of its own: a caller that leaves must not tear the store's connection.
        let listing = tokio::spawn(async move {
            let sent = std::time::Instant::now();
            let query = ListQuery { kind: Kind::Lease, namespace, prefix, after, limit: MAX_SCAN };
            let listed = store.list(query).await?;
            let clock = StoreClock { now: listed.now, sent };
            let is_whole = listed.rows.len() < MAX_SCAN;
            let mut last = listed.rows.last().map(|(name, _)| name.clone());
            let mut items: Vec<(Name, Lease, bool)> = listed
                .rows
                .into_iter()
                .map(|(name, row)| {
                    let is_held = row.state.is_held(clock.now);
                    (name, row.state, is_held)
                })
                .filter(|(_, _, is_held)| held.is_none_or(|held| *is_held == held))
                .take(limit + 1)
                .collect();
            let is_cut = items.len() > limit;
            if is_cut {
                items.truncate(limit);
                last = items.last().map(|(name, ..)| name.clone());
            }
            let next = last.filter(|_| is_cut || !is_whole);
            Ok(Page { items, next, clock })
        });
        listing.await.unwrap_or_else(|error| Err(StoreError::Away(error.to_string().into())))
    }
}

/// The most rows that one page of a list looks at.
const MAX_SCAN: usize = 1_001;

/// A grant that took so long that nothing is left of it is not told as one.
fn still_running(lease: &Lease, clock: StoreClock) -> Result<(), EngineError> {
    if clock.estimate() < lease.expires_at {
        return Ok(());
    }
    Err(EngineError::Unavailable(
        "the lease was granted or extended, but the store took longer than its ttl".into(),
    ))
}

/// A claim that waits for its turn.
struct ClaimInLine {
    claim: Claim,
}

impl Question<LeaseMachine> for ClaimInLine {
    type Answer = Result<Reply<ClaimOutcome>, EngineError>;

    fn command(&mut self, is_first: bool) -> Command {
        Command::Claim(Claim { may_take: is_first, ..self.claim.clone() })
    }

    fn may_grant(&self) -> bool {
        true
    }

    fn judge(&mut self, answer: Answer<LeaseMachine>) -> Verdict<Self::Answer> {
        let reply = match outcome!(answer, Claim) {
            Ok(reply) => reply,
            Err(error) => return Verdict::Final(Err(error)),
        };
        let expires_at = match &reply.outcome {
            ClaimOutcome::Held(lease) => lease.expires_at,
            // Not this claim's turn: nothing in the store's time changes that.
            ClaimOutcome::Free => Timestamp::from_micros(i64::MAX),
            ClaimOutcome::Claimed { .. } | ClaimOutcome::Stale(_) => {
                return Verdict::Final(Ok(reply));
            }
        };
        let look_again_in = reply.clock.remaining(expires_at);
        Verdict::Pending { answer: Ok(reply), look_again_in }
    }
}

/// The end of one generation.
struct EndOf {
    version: Option<Version>,
}

impl Question<LeaseMachine> for EndOf {
    type Answer = Result<Reply<WaitOutcome>, EngineError>;

    fn command(&mut self, _is_first: bool) -> Command {
        Command::Watch { version: self.version }
    }

    fn may_grant(&self) -> bool {
        false
    }

    fn judge(&mut self, answer: Answer<LeaseMachine>) -> Verdict<Self::Answer> {
        let reply = match outcome!(answer, Watch) {
            Ok(reply) => reply,
            Err(error) => return Verdict::Final(Err(error)),
        };
        match reply.outcome.clone() {
            WatchOutcome::Over(reason) => {
                Verdict::Final(Ok(reply.map(|_| WaitOutcome::Over(reason))))
            }
            WatchOutcome::Holding(lease) => {
                self.version = Some(lease.version);
                let look_again_in = reply.clock.remaining(lease.expires_at);
                let answer = Ok(reply.map(|_| WaitOutcome::TimedOut(lease)));
                Verdict::Pending { answer, look_again_in }
            }
        }
    }
}
