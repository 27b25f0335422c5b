//! Rows in one SQLite file: durable, with nothing to install, for one process at a time.
//!
//! The process holds SQLite's exclusive lock for as long as it runs, so a second one is refused at
//! start, and a killed one leaves no lock behind. Each batch is one transaction with one fsync
//! (`journal_mode=WAL`, `synchronous=FULL`), which also records the service's clock.

mod leases;
mod records;
mod table;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqliteLockingMode, SqliteSynchronous,
};
use sqlx::{ConnectOptions, Connection, Row as _};
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::clock::{EmbeddedClock, TimeSource};
use super::{
    Backend, Cleaned, Cursor, CursorTable, Link, ListQuery, Listed, Loaded, OpenError, Store,
    StoreError, Stored, WakePath, Write, plausible,
};
use crate::domain::ids::Key;
use crate::domain::lease::LeaseMachine;
use crate::domain::record::RecordMachine;
use crate::domain::time::Timestamp;
use crate::domain::version::Version;

use table::Table;

static MIGRATIONS: sqlx::migrate::Migrator = sqlx::migrate!("migrations/sqlite");

/// How long to wait for another process to let go of the file: a predecessor that is just ending.
const BUSY_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a read outside batches may take, waiting for its turn included.
const READ_TIMEOUT: Duration = Duration::from_secs(3);

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
        let file = File { connection, floor: state.get(0) };
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
        // In KiB: keys are met in no order, so pages that are not in here are read again and again.
        .pragma("cache_size", "-65536")
        // In pages: a batch should seldom have to move the log's pages into the file.
        .pragma("wal_autocheckpoint", "4000")
        .disable_statement_logging()
        .connect()
        .await
        .map_err(explain)?;
    // The first write takes the lock that the locking mode then keeps.
    sqlx::raw_sql("BEGIN EXCLUSIVE; COMMIT").execute(&mut connection).await.map_err(explain)?;
    Ok(connection)
}

async fn run_migrations(connection: &mut SqliteConnection, path: &Path) -> Result<(), OpenError> {
    MIGRATIONS.run(connection).await.map_err(|error| {
        OpenError::Configuration(format!("cannot create the tables in {}: {error}", path.display()))
    })
}

impl Shared {
    async fn load<T: Table>(&self, keys: &[Key]) -> Result<Loaded<T::State>, StoreError> {
        let mut file = self.file.lock().await;
        let file = file.as_mut().ok_or_else(closed)?;
        let now = self.clock.now();
        let rows =
            table::load::<T>(&mut file.connection, keys).await.map_err(|error| away(&error))?;
        Ok(Loaded { rows, now, floor: file.floor, link: Link::default() })
    }

    async fn store<T: Table>(&self, writes: &[Write<T::State>]) -> Vec<Stored> {
        let mut file = self.file.lock().await;
        let Some(File { connection, floor }) = file.as_mut() else {
            return vec![Stored::Failed(closed()); writes.len()];
        };
        let now = self.clock.now();
        let floor = *floor;
        let stored = transaction(connection, async |connection| {
            let stored = table::store::<T>(connection, writes, floor).await?;
            if Version::is_plausible(now) {
                record_clock(connection, now).await?;
            }
            Ok(stored)
        });
        stored.await.unwrap_or_else(|error| {
            let message = error.to_string().into();
            let error = StoreError::Refused { message, is_transient: true };
            vec![Stored::Failed(error); writes.len()]
        })
    }

    async fn clean_up(
        &self,
        retention: Duration,
        after: Option<Cursor>,
    ) -> Result<Cleaned, StoreError> {
        let mut file = self.file.lock().await;
        let file = file.as_mut().ok_or_else(closed)?;
        let now = plausible(self.clock.now())?;
        let micros = i64::try_from(retention.as_micros()).unwrap_or(i64::MAX / 2);
        let after = after.unwrap_or_else(Cursor::first);
        let cleaned = transaction(&mut file.connection, async |connection| match after.table {
            CursorTable::Leases => {
                table::clean_up::<LeaseMachine>(connection, &after, micros, now).await
            }
            CursorTable::Records => {
                table::clean_up::<RecordMachine>(connection, &after, micros, now).await
            }
        });
        let (cleaned, floor) = cleaned.await.map_err(|error| away(&error))?;
        file.floor = file.floor.max(floor);
        Ok(cleaned.or_next_table(&after))
    }
}

async fn record_clock(
    connection: &mut SqliteConnection,
    now: Timestamp,
) -> Result<(), sqlx::Error> {
    sqlx::query("UPDATE state SET clock = ?1").bind(now.as_micros()).execute(connection).await?;
    Ok(())
}

/// Runs `work` in a transaction. The library's own kind counts how deep it is and miscounts when a
/// commit fails, as on a full disk: what follows is then "committed" into a transaction that never
/// ends. Plain statements cannot miscount: if one were left open, the next could not begin.
async fn transaction<T>(
    connection: &mut SqliteConnection,
    work: impl AsyncFnOnce(&mut SqliteConnection) -> Result<T, sqlx::Error>,
) -> Result<T, sqlx::Error> {
    sqlx::raw_sql("BEGIN IMMEDIATE").execute(&mut *connection).await?;
    let done = match work(&mut *connection).await {
        Ok(done) => sqlx::raw_sql("COMMIT").execute(&mut *connection).await.map(|_| done),
        Err(error) => Err(error),
    };
    if done.is_err() {
        // Fails if SQLite has rolled back by itself.
        let _ = sqlx::raw_sql("ROLLBACK").execute(&mut *connection).await;
    }
    done
}

fn closed() -> StoreError {
    StoreError::Away("the file is closed".into())
}

fn failed(error: &tokio::task::JoinError) -> StoreError {
    StoreError::Unknown(error.to_string().into())
}

fn away(error: &sqlx::Error) -> StoreError {
    StoreError::Away(error.to_string().into())
}

#[async_trait]
impl<T: Table> Store<T> for SqliteStore {
    async fn load(&self, _lane: usize, keys: &[Key]) -> Result<Loaded<T::State>, StoreError> {
        self.shared.load::<T>(keys).await
    }

    /// Runs in a task of its own, so that a caller who gives up does not leave a transaction open.
    async fn store(&self, _lane: usize, _link: Link, writes: &[Write<T::State>]) -> Vec<Stored> {
        let (shared, owned) = (Arc::clone(&self.shared), writes.to_vec());
        let stored = tokio::spawn(async move { shared.store::<T>(&owned).await }).await;
        stored.unwrap_or_else(|error| vec![Stored::Failed(failed(&error)); writes.len()])
    }

    async fn list(&self, query: ListQuery) -> Result<Listed<T::State>, StoreError> {
        in_time(async {
            let mut file = self.shared.file.lock().await;
            let file = file.as_mut().ok_or_else(closed)?;
            let now = self.shared.clock.now();
            let rows = table::list::<T>(&mut file.connection, &query).await;
            Ok(Listed { rows: rows.map_err(|error| away(&error))?, now })
        })
        .await
    }
}

async fn in_time<T>(reading: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
    timeout(READ_TIMEOUT, reading)
        .await
        .unwrap_or_else(|_| Err(StoreError::Away("the file's disk did not answer in time".into())))
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

    /// Writes, since a full disk can still be read. In a task of its own, as `store`.
    async fn check(&self) -> Result<(), StoreError> {
        let shared = Arc::clone(&self.shared);
        let checking = tokio::spawn(async move {
            let mut file = shared.file.lock().await;
            let file = file.as_mut().ok_or_else(closed)?;
            let now = plausible(shared.clock.now())?;
            record_clock(&mut file.connection, now).await.map_err(|error| away(&error))
        });
        in_time(async { checking.await.unwrap_or_else(|error| Err(failed(&error))) }).await
    }

    async fn clean_up(
        &self,
        retention: Duration,
        after: Option<Cursor>,
    ) -> Result<Cleaned, StoreError> {
        let shared = Arc::clone(&self.shared);
        let cleaning = tokio::spawn(async move { shared.clean_up(retention, after).await });
        cleaning.await.unwrap_or_else(|error| Err(failed(&error)))
    }

    async fn close(&self) {
        if let Some(file) = self.shared.file.lock().await.take() {
            let _ = file.connection.close().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::ids::{Kind, Name, Namespace, OwnerId, Scope};
    use crate::domain::lease::{Lease, Status};
    use crate::domain::time::Ttl;
    use crate::domain::version::Version;
    use crate::store::Row;

    fn write(name: &str) -> Write<Lease> {
        let stamp = Version::from_stored(1);
        let lease = Lease {
            version: stamp,
            status: Status::Held,
            owner_id: OwnerId::from_stored("owner"),
            attempt_id: None,
            grant_id: 1,
            ttl: Ttl::from_stored(1_000),
            acquired_at: Timestamp::from_micros(1),
            expires_at: Timestamp::from_micros(2),
            recovered_from: None,
            metadata: Some("x".repeat(2_000)),
        };
        Write {
            key: Key {
                kind: Kind::Lease,
                namespace: Namespace::default_namespace(),
                scope: Scope::none(),
                name: Name::from_stored(name),
            },
            expected: None,
            row: Row { revision: stamp, state: lease },
        }
    }

    async fn limit_pages(store: &SqliteStore, sql: &'static str) {
        let mut file = store.shared.file.lock().await;
        sqlx::raw_sql(sql).execute(&mut file.as_mut().unwrap().connection).await.unwrap();
    }

    #[tokio::test]
    async fn what_is_accepted_after_a_full_disk_is_durable() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("test.db");
        let store = SqliteStore::open(&path, true).await.unwrap();
        // SQLite's own limit fails like a disk that is full.
        limit_pages(&store, "PRAGMA max_page_count = 1").await;
        let mut refused = 0;
        for number in 0..40 {
            let stored = Store::<LeaseMachine>::store(
                &store,
                0,
                Link::default(),
                &[write(&format!("a{number}"))],
            )
            .await;
            refused += usize::from(!matches!(stored[0], Stored::Accepted));
        }
        assert!(refused > 2, "the disk was never full");
        assert!(
            Store::<LeaseMachine>::store(&store, 0, Link::default(), &[write("b")]).await.len()
                == 1
        );
        limit_pages(&store, "PRAGMA max_page_count = 1000000").await;
        let stored = Store::<LeaseMachine>::store(&store, 0, Link::default(), &[write("c")]).await;
        assert!(matches!(stored[0], Stored::Accepted), "{stored:?}");
        // As a process that is killed: without closing in order.
        let file = store.shared.file.lock().await.take().unwrap();
        file.connection.close_hard().await.unwrap();
        let reopened = SqliteStore::open(&path, true).await.unwrap();
        let loaded = Store::<LeaseMachine>::load(&reopened, 0, &[write("c").key]).await.unwrap();
        assert!(loaded.rows[0].is_some());
    }
}
