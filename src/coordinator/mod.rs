//! The service without HTTP: opens a store, runs the machines on it, and ends in order.
//!
//! For programs in Rust that want no service in between:
//!
//! ```
//! use fencepost::coordinator::{ClaimLease, Coordinator, CoordinatorOptions};
//! use fencepost::domain::lease::ClaimOutcome;
//! use fencepost::domain::time::Ttl;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let coordinator = Coordinator::open("memory:", CoordinatorOptions::default()).await?;
//! let wish = ClaimLease::new("worker-1".parse()?, Ttl::from_millis(30_000).unwrap());
//! match coordinator.leases().claim(&"report:42".parse()?, wish).await?.keep().0 {
//!     ClaimOutcome::Claimed { lease, .. } => println!("mine, version {}", lease.version.get()),
//!     other => println!("not mine: {other:?}"),
//! }
//! coordinator.close().await;
//! # Ok(())
//! # }
//! ```

mod executions;
mod idempotency;
mod leaders;
mod leases;
mod records;
mod reply;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

pub use executions::{ClaimExecution, Executions};
pub use idempotency::{ClaimRecord, Idempotency};
pub use leaders::{Campaign, Leader, Leaders};
pub use leases::{ClaimLease, Leases, WaitOutcome};
pub use reply::{Page, Reply};

use crate::config::Dsn;
use crate::domain::ids::{Key, Kind, Name, Namespace, OwnerId, Scope};
use crate::domain::lease::LeaseMachine;
use crate::domain::record::RecordMachine;
use crate::domain::time::Retention;
use crate::engine::{Engine, Hub, Limits};
use crate::shutdown::spawn_vital;
use crate::store::memory::MemoryStore;
use crate::store::postgres::PostgresStore;
use crate::store::sqlite::SqliteStore;
use crate::store::{Backend, OpenError, PgPool, Store};
use crate::telemetry::Metrics;

/// How a [`Coordinator`] works.
#[derive(Clone, Debug)]
pub struct CoordinatorOptions {
    /// Who this process is where it leads; must be unique to this run of it. `None`: a new UUID.
    pub owner_id: Option<OwnerId>,
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
    /// How long a stored response is kept if its caller does not say.
    pub idempotency_retention: Retention,
    /// How long a completed execution is kept; `None`: for ever.
    pub execution_retention: Option<Retention>,
    /// Time limits of single calls.
    pub limits: Limits,
    /// Where to count.
    pub metrics: Arc<Metrics>,
}

impl Default for CoordinatorOptions {
    fn default() -> Self {
        Self {
            owner_id: None,
            migrate: true,
            connect_timeout: Duration::from_secs(30),
            notify_url: None,
            idle_key_retention: Duration::from_hours(24),
            cleanup_interval: Duration::from_mins(1),
            idempotency_retention: Retention::ONE_DAY,
            execution_retention: None,
            limits: Limits::default(),
            metrics: Arc::default(),
        }
    }
}

/// All machines on one store. Clones share it.
#[derive(Clone, Debug)]
pub struct Coordinator {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    backend: Arc<dyn Backend>,
    lease_store: Arc<dyn Store<LeaseMachine>>,
    record_store: Arc<dyn Store<RecordMachine>>,
    leases: Arc<Engine<LeaseMachine>>,
    records: Arc<Engine<RecordMachine>>,
    /// The tenant, the only one for as long as there is no access control.
    namespace: Namespace,
    owner_id: OwnerId,
    /// This process' part in each leadership that it was asked for.
    parts: Mutex<HashMap<Name, Arc<leaders::Part>>>,
    options: CoordinatorOptions,
    tasks: TaskTracker,
    stop: CancellationToken,
}

/// The stores of one backend.
#[derive(Clone, Debug)]
pub struct Stores {
    /// What they share.
    pub backend: Arc<dyn Backend>,
    /// Leases and leaders.
    pub leases: Arc<dyn Store<LeaseMachine>>,
    /// Executions and stored responses.
    pub records: Arc<dyn Store<RecordMachine>>,
}

impl Stores {
    /// Of a store that keeps the rows of every machine.
    #[must_use]
    pub fn of<S>(store: S) -> Self
    where
        S: Backend + Store<LeaseMachine> + Store<RecordMachine>,
    {
        let store = Arc::new(store);
        Self { backend: Arc::clone(&store) as _, leases: Arc::clone(&store) as _, records: store }
    }
}

impl Coordinator {
    /// Opens a store, waiting for it if it cannot be reached yet. `url` is `memory:`,
    /// `sqlite:FILE`, or a Postgres URL, or several of these separated by commas.
    ///
    /// # Errors
    ///
    /// It cannot be reached in time, or cannot be used as it is.
    pub async fn open(url: &str, options: CoordinatorOptions) -> Result<Self, OpenError> {
        let urls: Vec<String> = url.split(',').map(str::to_owned).collect();
        let dsn = Dsn::parse(&urls).map_err(OpenError::Configuration)?;
        Self::open_dsn(&dsn, options).await
    }

    /// [`Self::open`] for a URL that was read already.
    ///
    /// # Errors
    ///
    /// As there.
    pub async fn open_dsn(dsn: &Dsn, options: CoordinatorOptions) -> Result<Self, OpenError> {
        let hub = Arc::new(Hub::default());
        let deadline = Instant::now() + options.connect_timeout;
        loop {
            match open_store(dsn, &options, &hub).await {
                Ok(stores) => return Ok(Self::on(stores, hub, options)),
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

    /// Runs the machines on stores that are open already. `hub` receives the wake-ups that come
    /// from other replicas.
    #[must_use]
    pub fn on(stores: Stores, hub: Arc<Hub>, options: CoordinatorOptions) -> Self {
        let Stores { backend, leases: lease_store, records: record_store } = stores;
        let (limits, metrics) = (options.limits, &options.metrics);
        let leases =
            Engine::start(&lease_store, Arc::clone(&backend), Arc::clone(&hub), limits, metrics);
        let records = Engine::start(&record_store, Arc::clone(&backend), hub, limits, metrics);
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        spawn_vital(&tasks, clean_up(Arc::clone(&backend), options.clone(), stop.clone()));
        let owner_id = options.owner_id.clone();
        let shared = Shared {
            backend,
            lease_store,
            record_store,
            leases,
            records,
            namespace: Namespace::default_namespace(),
            owner_id: owner_id.unwrap_or_else(|| OwnerId::from_stored(Uuid::new_v4().to_string())),
            parts: Mutex::default(),
            options,
            tasks,
            stop,
        };
        Self { shared: Arc::new(shared) }
    }

    /// Leases: who may do the work for a key.
    #[must_use]
    pub fn leases(&self) -> Leases<'_> {
        Leases::new(&self.shared)
    }

    /// Leaders: who of many runs the scheduler.
    #[must_use]
    pub fn leaders(&self) -> Leaders<'_> {
        Leaders::new(&self.shared)
    }

    /// Executions: what must run once.
    #[must_use]
    pub fn executions(&self) -> Executions<'_> {
        Executions::new(&self.shared)
    }

    /// Stored responses: what was answered to a write.
    #[must_use]
    pub fn idempotency(&self) -> Idempotency<'_> {
        Idempotency::new(&self.shared)
    }

    /// This process' part in one leadership.
    #[must_use]
    pub fn leader(&self, name: Name) -> Leader {
        Leader::new(Arc::clone(&self.shared), name)
    }

    /// Who this process is where it leads.
    #[must_use]
    pub fn owner_id(&self) -> &OwnerId {
        &self.shared.owner_id
    }

    /// The store, for what people ask about it.
    #[must_use]
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.shared.backend
    }

    /// A pool of connections to the same Postgres, for the program's own tables; `None` on other
    /// stores.
    #[must_use]
    pub fn pool(&self) -> Option<PgPool> {
        self.shared.backend.pool()
    }

    /// How this coordinator works.
    #[must_use]
    pub fn options(&self) -> &CoordinatorOptions {
        &self.shared.options
    }

    /// Answers every waiting call, and refuses new claims and waits from here on.
    pub fn drain(&self) {
        self.shared.leases.drain();
        self.shared.records.drain();
    }

    /// Whether [`Self::drain`] was called.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.shared.leases.is_draining()
    }

    /// Resigns what this process leads, finishes what was begun, and lets go of the store.
    pub async fn close(&self) {
        // First, so that no campaign begins behind the resignations.
        self.drain();
        let parts: Vec<(Name, Arc<leaders::Part>)> = {
            let mut parts = self.shared.parts.lock().unwrap_or_else(PoisonError::into_inner);
            parts.drain().collect()
        };
        let resigning = parts.into_iter().map(|(name, part)| async move {
            if let Err(error) = part.resign(&self.shared, &name).await {
                tracing::warn!(%error, name = name.as_str(), "cannot resign; the term will lapse");
            }
        });
        join_all(resigning).await;
        let Shared { stop, tasks, leases, records, backend, .. } = &*self.shared;
        stop.cancel();
        tasks.close();
        leases.close().await;
        records.close().await;
        tasks.wait().await;
        backend.close().await;
    }
}

impl Shared {
    fn key(&self, kind: Kind, scope: &Scope, name: &Name) -> Key {
        Key::new(kind, &self.namespace, scope, name.as_str())
    }
}

async fn open_store(
    dsn: &Dsn,
    options: &CoordinatorOptions,
    hub: &Arc<Hub>,
) -> Result<Stores, OpenError> {
    Ok(match dsn {
        Dsn::Memory => Stores::of(MemoryStore::new()),
        Dsn::Sqlite(path) => Stores::of(SqliteStore::open(path, options.migrate).await?),
        Dsn::Postgres(urls) => {
            let opening = PostgresStore::open(
                urls,
                options.notify_url.as_deref(),
                options.migrate,
                Arc::clone(hub) as _,
                Arc::clone(&options.metrics),
            );
            Stores::of(opening.await?)
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
