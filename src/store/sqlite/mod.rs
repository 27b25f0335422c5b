//! Rows in one SQLite file: durable, with nothing to install, for one process at a time.
//!
//! The process holds SQLite's exclusive lock for as long as it runs, so a second one is refused at
//! start, and a killed one leaves no lock behind. Each batch is one transaction with one fsync
//! (`journal_mode=WAL`, `synchronous=FULL`), which also records the service's clock.

mod index;
mod leases;
mod records;
mod table;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use sqlx::migrate::MigrateError;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqliteLockingMode, SqliteSynchronous,
};
use sqlx::{ConnectOptions, Connection, Row as _};
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::clock::{EmbeddedClock, TimeSource};
use super::{
    Backend, Cleaned, Cursor, CursorTable, ListQuery, Listed, Loaded, Moment, OpenError, Store,
    StoreError, Stored, WakePath, Write, plausible,
};
use crate::domain::ids::Key;
use crate::domain::lease::LeaseMachine;
use crate::domain::record::RecordMachine;
use crate::domain::time::Timestamp;
use crate::domain::version::Version;

use index::Index;
use table::{MAX_ROWS, Table};

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
    /// As in the file.
    floor: AtomicI64,
    /// `None` after [`Backend::close`].
    file: Mutex<Option<File>>,
}

/// The file, and what is known of it.
#[derive(Debug)]
struct File {
    connection: SqliteConnection,
    indexes: Indexes,
}

/// Which row a key has. `None` where what a write has come to is not known: read from the file.
#[derive(Debug, Default)]
struct Indexes {
    leases: Option<Index>,
    records: Option<Index>,
}

impl File {
    /// The connection, and the index of a table.
    async fn table<T: Table>(
        &mut self,
    ) -> Result<(&mut SqliteConnection, &mut Index), sqlx::Error> {
        let Self { connection, indexes } = self;
        let index = match T::index(indexes) {
            Some(index) => index,
            unknown => unknown.insert(table::read_index::<T>(connection).await?),
        };
        Ok((connection, index))
    }
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
        let lacking = |error: sqlx::Error| {
            OpenError::Configuration(format!(
                "{} lacks tables of this version of Fencepost ({error}): run `fencepost migrate`, \
                 or leave --migrate on",
                path.display()
            ))
        };
        let state = sqlx::query("SELECT floor, clock FROM state")
            .fetch_one(&mut connection)
            .await
            .map_err(lacking)?;
        let mut file = File { connection, indexes: Indexes::default() };
        file.table::<LeaseMachine>().await.map_err(lacking)?;
        file.table::<RecordMachine>().await.map_err(lacking)?;
        let clock = Timestamp::from_micros(state.get(1));
        Ok(Self {
            shared: Arc::new(Shared {
                clock: EmbeddedClock::starting_at(clock, source),
                floor: AtomicI64::new(state.get(0)),
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
        // Enough for every text of both tables.
        .statement_cache_capacity(200)
        // Rows of a load, which the database's thread would otherwise wait to hand over.
        .row_buffer_size(1_000)
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
        let path = path.display();
        OpenError::Configuration(match error {
            MigrateError::VersionMismatch(version) => format!(
                "{path} was made by a build whose migration {version} was another one: use another \
                 file, or delete this one and all that it remembers"
            ),
            error => format!("cannot create the tables in {path}: {error}"),
        })
    })
}

impl Shared {
    fn moment(&self) -> Moment {
        Moment::embedded(&self.clock, self.floor.load(Ordering::Relaxed))
    }

    async fn load<T: Table>(&self, keys: &[Key]) -> Result<Loaded<T::State>, StoreError> {
        let mut file = self.file.lock().await;
        let file = file.as_mut().ok_or_else(closed)?;
        let (connection, index) = file.table::<T>().await.map_err(|error| away(&error))?;
        let moment = self.moment();
        let rows = table::load::<T>(connection, index, keys).await.map_err(|error| away(&error))?;
        Ok(Loaded { rows, moment })
    }

    async fn store<T: Table>(&self, writes: &[Write<T::State>]) -> Vec<Stored> {
        let mut file = self.file.lock().await;
        let Some(file) = file.as_mut() else {
            return vec![Stored::Failed(closed()); writes.len()];
        };
        let mut results = Vec::with_capacity(writes.len());
        for writes in writes.chunks(MAX_ROWS) {
            match self.store_some::<T>(file, writes).await {
                Ok(accepted) => results.extend(accepted.into_iter().map(|is_accepted| {
                    if is_accepted { Stored::Accepted } else { Stored::NotAccepted }
                })),
                Err(error) => results.extend(vec![Stored::Failed(error); writes.len()]),
            }
        }
        results
    }

    /// Stores at most [`MAX_ROWS`] rows, or none, and a stretch of new keys where one is due.
    async fn store_some<T: Table>(
        &self,
        file: &mut File,
        writes: &[Write<T::State>],
    ) -> Result<Vec<bool>, StoreError> {
        let floor = self.floor.load(Ordering::Relaxed);
        let now = Some(self.clock.now()).filter(|now| Version::is_plausible(*now));
        let (connection, index) = file.table::<T>().await.map_err(|error| away(&error))?;
        table::store::<T>(connection, index, writes, floor, now).await.map_err(|failure| {
            if let Failure::Unknown(_) = failure {
                *T::index(&mut file.indexes) = None;
            }
            failure.explain()
        })
    }

    /// Brings a table's keys up to date, for what walks along them. In between, others write.
    async fn index_all<T: Table>(&self) -> Result<(), StoreError> {
        let stretches = {
            let mut file = self.file.lock().await;
            let file = file.as_mut().ok_or_else(closed)?;
            let (_, index) = file.table::<T>().await.map_err(|error| away(&error))?;
            index.begin_round()
        };
        for _ in 0..stretches {
            let mut file = self.file.lock().await;
            self.store_some::<T>(file.as_mut().ok_or_else(closed)?, &[]).await?;
        }
        Ok(())
    }

    async fn clean<T: Table>(
        &self,
        retention: Duration,
        after: &Cursor,
    ) -> Result<Cleaned, StoreError> {
        if after.key.as_str().is_empty() {
            self.index_all::<T>().await?;
        }
        let mut file = self.file.lock().await;
        let File { connection, .. } = file.as_mut().ok_or_else(closed)?;
        let now = plausible(self.clock.now())?;
        let micros = i64::try_from(retention.as_micros()).unwrap_or(i64::MAX / 2);
        let cleaned = transaction(connection, async |connection| {
            table::clean_up::<T>(connection, after, micros, now).await
        });
        let (cleaned, floor) = cleaned.await.map_err(|error| away(&error))?;
        self.floor.fetch_max(floor, Ordering::Relaxed);
        Ok(cleaned)
    }

    async fn clean_up(
        &self,
        retention: Duration,
        after: Option<Cursor>,
    ) -> Result<Cleaned, StoreError> {
        let after = after.unwrap_or_else(Cursor::first);
        let cleaned = match after.table {
            CursorTable::Leases => self.clean::<LeaseMachine>(retention, &after).await,
            CursorTable::Records => self.clean::<RecordMachine>(retention, &after).await,
        };
        Ok(cleaned?.or_next_table(&after))
    }
}

/// Why a transaction has no answer.
#[derive(Debug)]
enum Failure {
    /// It was rolled back.
    NotApplied(sqlx::Error),
    /// It was committed, but what it came to cannot be told.
    Unknown(sqlx::Error),
}

impl Failure {
    fn explain(&self) -> StoreError {
        match self {
            Self::NotApplied(error) => {
                StoreError::Refused { message: error.to_string().into(), is_transient: true }
            }
            Self::Unknown(error) => StoreError::Unknown(error.to_string().into()),
        }
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
    sqlx::query("BEGIN IMMEDIATE").execute(&mut *connection).await?;
    let done = match work(&mut *connection).await {
        Ok(done) => sqlx::query("COMMIT").execute(&mut *connection).await.map(|_| done),
        Err(error) => Err(error),
    };
    if done.is_err() {
        // Fails if SQLite has rolled back by itself.
        let _ = sqlx::query("ROLLBACK").execute(&mut *connection).await;
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

    async fn known(&self, _lane: usize) -> Option<Moment> {
        Some(self.shared.moment())
    }

    /// Runs in a task of its own, so that a caller who gives up does not leave a transaction open.
    async fn store(
        &self,
        _lane: usize,
        _moment: Moment,
        writes: Arc<[Write<T::State>]>,
    ) -> Vec<Stored> {
        let (shared, count) = (Arc::clone(&self.shared), writes.len());
        let stored = tokio::spawn(async move { shared.store::<T>(&writes).await }).await;
        stored.unwrap_or_else(|error| vec![Stored::Failed(failed(&error)); count])
    }

    async fn list(&self, query: ListQuery) -> Result<Listed<T::State>, StoreError> {
        in_time(async {
            let mut file = self.shared.file.lock().await;
            let file = file.as_mut().ok_or_else(closed)?;
            let (connection, index) = file.table::<T>().await.map_err(|error| away(&error))?;
            let now = self.shared.clock.now();
            let rows = table::list::<T>(connection, index, &query).await;
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

    /// The file is written by one at a time, but while it is, the other's next batch is prepared.
    fn lanes(&self) -> usize {
        2
    }

    fn wake_path(&self) -> WakePath {
        WakePath::Local
    }

    /// Writes, since a full disk can still be read. In a task of its own, as `store`.
    async fn check(&self) -> Result<(), StoreError> {
        let shared = Arc::clone(&self.shared);
        let checking = tokio::spawn(async move {
            let mut file = shared.file.lock().await;
            let File { connection, .. } = file.as_mut().ok_or_else(closed)?;
            let now = plausible(shared.clock.now())?;
            record_clock(connection, now).await.map_err(|error| away(&error))
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
            key: Key::new(Kind::Lease, &Namespace::default_namespace(), &Scope::none(), name),
            expected: None,
            row: Row { revision: stamp, state: lease },
        }
    }

    async fn limit_pages(store: &SqliteStore, sql: &'static str) {
        let mut file = store.shared.file.lock().await;
        sqlx::raw_sql(sql).execute(&mut file.as_mut().unwrap().connection).await.unwrap();
    }

    async fn store_all(store: &SqliteStore, writes: Vec<Write<Lease>>) -> Vec<bool> {
        let moment = store.shared.moment();
        let stored = Store::<LeaseMachine>::store(store, 0, moment, writes.into()).await;
        stored.iter().map(|stored| matches!(stored, Stored::Accepted)).collect()
    }

    async fn is_accepted(store: &SqliteStore, write: Write<Lease>) -> bool {
        store_all(store, vec![write]).await[0]
    }

    #[tokio::test]
    async fn each_write_of_a_large_batch_is_told_its_own_fate() {
        let directory = tempfile::tempdir().unwrap();
        let store = SqliteStore::open(&directory.path().join("test.db"), true).await.unwrap();
        let name = |number: usize| format!("k{number}");
        let stamped = |number, stamp| {
            let mut write = write(&name(number));
            write.row.revision = Version::from_stored(stamp);
            write
        };
        let odd = (0..200).filter(|number| number % 2 == 1).map(|number| stamped(number, 1));
        assert_eq!(store_all(&store, odd.collect()).await, vec![true; 100]);
        let accepted = store_all(&store, (0..200).map(|n| stamped(n, 2)).collect()).await;
        assert!(accepted.iter().enumerate().all(|(number, is)| *is == (number % 2 == 0)));
        let many = (0..1_500).map(|number| write(&format!("many {number}"))).collect();
        assert_eq!(store_all(&store, many).await, vec![true; 1_500]);
        let update = |number| {
            let expected = if number < 70 { 1 + i64::from(number % 2 == 0) } else { 9 };
            Write { expected: Some(Version::from_stored(expected)), ..stamped(number, 10) }
        };
        let accepted = store_all(&store, (0..200).map(update).collect()).await;
        assert!(accepted.iter().enumerate().all(|(number, is)| *is == (number < 70)));
        let keys: Vec<Key> = (0..300).map(|number| write(&name(number)).key).collect();
        let loaded = Store::<LeaseMachine>::load(&store, 0, &keys).await.unwrap();
        assert!(loaded.rows.iter().enumerate().all(|(n, row)| row.is_some() == (n < 200)));
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
            refused += usize::from(!is_accepted(&store, write(&format!("a{number}"))).await);
        }
        assert!(refused > 2, "the disk was never full");
        is_accepted(&store, write("b")).await;
        limit_pages(&store, "PRAGMA max_page_count = 1000000").await;
        assert!(is_accepted(&store, write("c")).await);
        // As a process that is killed: without closing in order.
        kill(&store).await;
        let reopened = SqliteStore::open(&path, true).await.unwrap();
        let loaded = Store::<LeaseMachine>::load(&reopened, 0, &[write("c").key]).await.unwrap();
        assert!(loaded.rows[0].is_some());
    }

    async fn kill(store: &SqliteStore) {
        let file = store.shared.file.lock().await.take().unwrap();
        file.connection.close_hard().await.unwrap();
    }

    async fn count(store: &SqliteStore, of: &'static str) -> i64 {
        let mut file = store.shared.file.lock().await;
        let connection = &mut file.as_mut().unwrap().connection;
        sqlx::query_scalar(of).fetch_one(connection).await.unwrap()
    }

    async fn are_there(store: &SqliteStore, numbers: impl Iterator<Item = usize>) -> bool {
        let keys: Vec<Key> = numbers.map(|number| write(&scattered(number)).key).collect();
        let loaded = Store::<LeaseMachine>::load(store, 0, &keys).await.unwrap();
        loaded.rows.iter().all(Option::is_some)
    }

    /// A name, such that those of numbers in a row fall anywhere in their order.
    fn scattered(number: usize) -> String {
        format!("{:016x}", (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn small(name: &str) -> Write<Lease> {
        let mut write = write(name);
        write.row.state.metadata = None;
        write
    }

    /// Everything that looks for keys finds those that the table of keys has, and those that it does
    /// not have yet.
    #[tokio::test]
    async fn a_key_is_found_wherever_it_is_kept() {
        const ROWS: usize = 70_000;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("test.db");
        let mut store = SqliteStore::open(&path, true).await.unwrap();
        let indexed = "SELECT count(*) FROM lease_keys";
        for from in (0..ROWS).step_by(500) {
            let some = (from..from + 500).map(|number| small(&scattered(number))).collect();
            assert!(store_all(&store, some).await.iter().all(|is| *is));
        }
        for is_reopened in [false, true] {
            let share = count(&store, indexed).await;
            assert!(share > 0 && share < 10_000, "{share} of the keys were indexed");
            assert!(are_there(&store, 0..ROWS).await);
            let again = (0..ROWS).step_by(50).map(|number| small(&scattered(number))).collect();
            assert!(!store_all(&store, again).await.iter().any(|is| *is), "a key has two rows");
            let update = |number| {
                let expected = Some(Version::from_stored(1 + i64::from(is_reopened)));
                let mut write = Write { expected, ..small(&scattered(number)) };
                write.row.revision = Version::from_stored(2 + i64::from(is_reopened));
                write
            };
            let updates = (0..ROWS).step_by(50).map(update).collect();
            assert!(store_all(&store, updates).await.iter().all(|is| *is));
            let names = listed(&store, ROWS).await;
            let mut expected: Vec<String> = (0..ROWS).map(scattered).collect();
            expected.sort();
            assert!(names == expected, "the list is not all keys in order");
            kill(&store).await;
            store = SqliteStore::open(&path, true).await.unwrap();
        }
        let mut after = None;
        let mut deleted = 0;
        loop {
            let cleaned = store.clean_up(Duration::ZERO, after).await.unwrap();
            deleted += cleaned.deleted;
            after = cleaned.next;
            if after.is_none() {
                break;
            }
        }
        assert_eq!(deleted, ROWS as u64);
        let left = "SELECT (SELECT count(*) FROM leases) + (SELECT count(*) FROM lease_keys)";
        assert_eq!(count(&store, left).await, 0);
        let mut anew = small(&scattered(1));
        anew.row.revision = Version::from_stored(100);
        assert!(is_accepted(&store, anew).await);
    }

    /// The names of all leases, some pages long.
    async fn listed(store: &SqliteStore, at_most: usize) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        loop {
            let query = ListQuery {
                kind: Kind::Lease,
                namespace: Namespace::default_namespace(),
                scope: Scope::none(),
                prefix: String::new(),
                after: names.last().map(|name| Name::from_stored(name.as_str())),
                limit: at_most / 3,
            };
            let page = Store::<LeaseMachine>::list(store, query).await.unwrap();
            if page.rows.is_empty() {
                return names;
            }
            names.extend(page.rows.into_iter().map(|(name, _)| name.as_str().to_owned()));
        }
    }

    #[tokio::test]
    async fn a_file_of_the_first_layout_keeps_what_it_holds() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("test.db");
        let mut connection = connect(&path).await.unwrap();
        let first = MIGRATIONS.iter().take(1).cloned().collect();
        sqlx::migrate::Migrator::with_migrations(first).run(&mut connection).await.unwrap();
        let rows = "WITH RECURSIVE n(value) AS (SELECT 0 UNION ALL SELECT value + 1 FROM n LIMIT 100)
                    INSERT INTO leases (id, revision, version, status, owner_id, grant_id, ttl_ms,
                                        acquired_at, expires_at, metadata)
                    SELECT '1\u{1f}default\u{1f}\u{1f}k' || value, 7, 5, 1, 'owner', 3, 1000, 5, 6, '{}'
                    FROM n";
        sqlx::raw_sql(rows).execute(&mut connection).await.unwrap();
        connection.close().await.unwrap();
        match SqliteStore::open(&path, false).await {
            Err(OpenError::Configuration(reason)) => assert!(reason.contains("fencepost migrate")),
            other => panic!("{other:?}"),
        }
        let store = SqliteStore::open(&path, true).await.unwrap();
        let keys: Vec<Key> = (0..100).map(|number| write(&format!("k{number}")).key).collect();
        let loaded = Store::<LeaseMachine>::load(&store, 0, &keys).await.unwrap();
        for row in loaded.rows {
            let Row { revision, state } = row.unwrap();
            assert_eq!((revision.get(), state.version.get()), (7, 5));
            assert_eq!((state.owner_id.as_str(), state.metadata.as_deref()), ("owner", Some("{}")));
        }
        assert!(!is_accepted(&store, write("k7")).await);
    }
}
