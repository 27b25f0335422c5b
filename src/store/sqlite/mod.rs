//! Rows in one SQLite file: durable, with nothing to install, for one process at a time.
//!
//! The process holds SQLite's exclusive lock for as long as it runs, so a second one is refused at
//! start, and a killed one leaves no lock behind. Each batch is one transaction with one fsync
//! (`journal_mode=WAL`, `synchronous=FULL`), which also records the service's clock.

mod leases;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqliteLockingMode, SqliteSynchronous,
};
use sqlx::{ConnectOptions, Connection, Row as _};
use tokio::sync::Mutex;

use super::clock::{EmbeddedClock, TimeSource};
use super::{
    Backend, Link, ListQuery, Listed, Loaded, OpenError, Store, StoreError, Stored, WakePath, Write,
};
use crate::domain::ids::Key;
use crate::domain::lease::{Lease, LeaseMachine};
use crate::domain::time::Timestamp;

static MIGRATIONS: sqlx::migrate::Migrator = sqlx::migrate!("migrations/sqlite");

/// How long to wait for another process to let go of the file: a predecessor that is just ending.
const BUSY_TIMEOUT: Duration = Duration::from_secs(1);

/// The store.
#[derive(Clone, Debug)]
pub struct SqliteStore {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    clock: EmbeddedClock,
    /// `None` after [`Backend::close`].
    file: Mutex<Option<File>>,
}

#[derive(Debug)]
struct File {
    connection: SqliteConnection,
    floor: i64,
}

impl SqliteStore {
    /// Opens the file, creating it if need be, and takes it for this process.
    ///
    /// # Errors
    ///
    /// The file cannot be opened, belongs to another process, is not a database, or has no tables
    /// while `migrate` is off.
    pub async fn open(path: &Path, migrate: bool) -> Result<Self, OpenError> {
        Self::open_with_time(path, migrate, TimeSource::system()).await
    }

    /// [`Self::open`] on the given clocks.
    ///
    /// # Errors
    ///
    /// As there.
    pub async fn open_with_time(
        path: &Path,
        migrate: bool,
        source: TimeSource,
    ) -> Result<Self, OpenError> {
        let mut connection = connect(path).await?;
        if migrate {
            run_migrations(&mut connection, path).await?;
        }
        let state = sqlx::query("SELECT floor, clock FROM state")
            .fetch_one(&mut connection)
            .await
            .map_err(|error| {
                OpenError::Configuration(format!(
                    "{} has no tables of Fencepost ({error}): run `fencepost migrate`, or leave \
                     --migrate on",
                    path.display()
                ))
            })?;
        let clock = Timestamp::from_micros(state.get(1));
        let file = File {
            connection,
            floor: state.get(0),
        };
        Ok(Self {
            shared: Arc::new(Shared {
                clock: EmbeddedClock::starting_at(clock, source),
                file: Mutex::new(Some(file)),
            }),
        })
    }
}

/// Creates or updates the tables.
///
/// # Errors
///
/// As [`SqliteStore::open`].
pub async fn migrate(path: &Path) -> Result<(), OpenError> {
    let mut connection = connect(path).await?;
    run_migrations(&mut connection, path).await?;
    let _ = connection.close().await;
    Ok(())
}

async fn connect(path: &Path) -> Result<SqliteConnection, OpenError> {
    let explain = |error: sqlx::Error| {
        let is_locked = error
            .as_database_error()
            .is_some_and(|error| matches!(error.code().as_deref(), Some("5" | "261" | "773")));
        let path = path.display();
        if is_locked {
            OpenError::Configuration(format!(
                "{path} is in use by another process: a SQLite file serves one process at a \
                 time; end the other one, give this one another file, or use Postgres to run \
                 several replicas"
            ))
        } else {
            OpenError::Configuration(format!("cannot open {path}: {error}"))
        }
    };
    let mut connection = SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(true)
        .locking_mode(SqliteLockingMode::Exclusive)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
        .busy_timeout(BUSY_TIMEOUT)
        .disable_statement_logging()
        .connect()
        .await
        .map_err(explain)?;
    // The first write takes the lock that the locking mode then keeps.
    sqlx::raw_sql("BEGIN EXCLUSIVE; COMMIT")
        .execute(&mut connection)
        .await
        .map_err(explain)?;
    Ok(connection)
}

async fn run_migrations(connection: &mut SqliteConnection, path: &Path) -> Result<(), OpenError> {
    MIGRATIONS.run(connection).await.map_err(|error| {
        OpenError::Configuration(format!(
            "cannot create the tables in {}: {error}",
            path.display()
        ))
    })
}

impl Shared {
    async fn load(&self, keys: &[Key]) -> Result<Loaded<Lease>, StoreError> {
        let mut file = self.file.lock().await;
        let file = file.as_mut().ok_or_else(closed)?;
        let now = self.clock.now();
        let rows = leases::load(&mut file.connection, keys)
            .await
            .map_err(|error| away(&error))?;
        Ok(Loaded {
            rows,
            now,
            floor: file.floor,
            link: Link::default(),
        })
    }

    async fn store(&self, writes: &[Write<Lease>]) -> Vec<Stored> {
        let mut file = self.file.lock().await;
        let Some(file) = file.as_mut() else {
            return vec![Stored::Failed(closed()); writes.len()];
        };
        let now = self.clock.now();
        match leases::store(&mut file.connection, writes, file.floor, now).await {
            Ok(accepted) => accepted,
            // SQLite has rolled back, or will when the file is opened next.
            Err(error) => {
                let message = error.to_string().into();
                let error = StoreError::Refused {
                    message,
                    is_transient: true,
                };
                vec![Stored::Failed(error); writes.len()]
            }
        }
    }

    async fn clean_up(&self, retention: Duration) -> Result<u64, StoreError> {
        let cutoff = self.clock.now().minus(retention);
        let mut after = None;
        let mut deleted = 0;
        loop {
            // The file is let go between chunks, so that requests pass.
            let mut file = self.file.lock().await;
            let file = file.as_mut().ok_or_else(closed)?;
            let chunk = leases::clean_up_chunk(&mut file.connection, after.as_ref(), cutoff)
                .await
                .map_err(|error| away(&error))?;
            deleted += chunk.deleted;
            file.floor = file.floor.max(chunk.floor);
            match chunk.last {
                Some(last) => after = Some(last),
                None => return Ok(deleted),
            }
        }
    }
}

fn closed() -> StoreError {
    StoreError::Away("the file is closed".into())
}

fn away(error: &sqlx::Error) -> StoreError {
    StoreError::Away(error.to_string().into())
}

#[async_trait]
impl Store<LeaseMachine> for SqliteStore {
    async fn load(&self, _lane: usize, keys: &[Key]) -> Result<Loaded<Lease>, StoreError> {
        self.shared.load(keys).await
    }

    /// Runs in a task of its own, so that a caller who gives up does not leave a transaction open.
    async fn store(&self, _lane: usize, _link: Link, writes: &[Write<Lease>]) -> Vec<Stored> {
        let (shared, owned) = (Arc::clone(&self.shared), writes.to_vec());
        let stored = tokio::spawn(async move { shared.store(&owned).await }).await;
        stored.unwrap_or_else(|error| {
            vec![Stored::Failed(StoreError::Unknown(error.to_string().into())); writes.len()]
        })
    }

    async fn list(&self, query: ListQuery) -> Result<Listed<Lease>, StoreError> {
        let mut file = self.shared.file.lock().await;
        let file = file.as_mut().ok_or_else(closed)?;
        let now = self.shared.clock.now();
        let rows = leases::list(&mut file.connection, &query)
            .await
            .map_err(|error| away(&error))?;
        Ok(Listed { rows, now })
    }
}

#[async_trait]
impl Backend for SqliteStore {
    fn name(&self) -> &'static str {
        "sqlite"
    }

    fn lanes(&self) -> usize {
        1
    }

    fn wake_path(&self) -> WakePath {
        WakePath::Local
    }

    async fn check(&self) -> Result<(), StoreError> {
        let mut file = self.shared.file.lock().await;
        let file = file.as_mut().ok_or_else(closed)?;
        sqlx::query("SELECT floor FROM state")
            .fetch_one(&mut file.connection)
            .await
            .map_err(|error| away(&error))?;
        Ok(())
    }

    async fn clean_up(&self, retention: Duration) -> Result<u64, StoreError> {
        let shared = Arc::clone(&self.shared);
        tokio::spawn(async move { shared.clean_up(retention).await })
            .await
            .unwrap_or_else(|error| Err(StoreError::Unknown(error.to_string().into())))
    }

    async fn close(&self) {
        if let Some(file) = self.shared.file.lock().await.take() {
            let _ = file.connection.close().await;
        }
    }
}
