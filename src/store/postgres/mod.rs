//! Rows in PostgreSQL 13 or later, shared by any number of replicas.
//!
//! The rules that keep it correct and fast, each learnt from a failure somewhere:
//!
//! * No transaction spans two messages on the request path, and no request runs statements itself:
//!   a request can be cancelled anywhere. A connection is taken out of its slot for a statement
//!   and put back after its last byte; whatever goes wrong in between drops it, socket and all.
//! * A batch is at most one load, then at most one statement that only updates and one that only
//!   inserts. In a combined one, two replicas deadlock.
//! * No statement waits for a lock of a row. Rows that somebody else has locked are skipped and
//!   tried again.
//! * Nothing is ever cancelled on the server: a cancelled wait for a standby counts as committed.

mod leases;
mod link;
mod records;
mod table;
mod wakes;

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use sqlx::migrate::MigrateError;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, PgPoolOptions};
use sqlx::{ConnectOptions, Connection};
use tokio::sync::{Mutex, mpsc};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::{
    Backend, Cleaned, Cursor, CursorTable, ListQuery, Listed, Loaded, Moment, OpenError, Store,
    StoreClock, StoreError, Stored, WakePath, Waker, Write,
};
use crate::domain::ids::Key;
use crate::domain::lease::LeaseMachine;
use crate::domain::record::RecordMachine;
use crate::shutdown::spawn_vital;
use crate::telemetry::Metrics;
use link::{Linked, Servers, classify};
use table::{Guard, Surroundings, Table};
use wakes::{Message, Wakes};

/// How many connections batches have: at least two, so that while one commits the other works, and up
/// to four where there are processors for them. More only make the batches smaller.
fn lanes() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from).clamp(2, 4)
}

/// How long reads outside batches may take.
const READ_TIMEOUT: Duration = Duration::from_secs(3);
/// How long looking at the tables, and changing them, may take at start.
const START_TIMEOUT: Duration = Duration::from_mins(1);
/// The longest pause of a lane whose writes are not confirmed.
const MAX_REST: Duration = Duration::from_secs(30);
/// How long after a load its time and floor serve for decisions that end in a write.
const MAX_AGE: Duration = Duration::from_secs(10);
/// After a load that took longer, they do not: its time is not known well enough.
const MAX_ROUND_TRIP: Duration = Duration::from_millis(20);
/// How old such a decision may be when its write is made.
const LEEWAY: Duration = Duration::from_millis(100);
/// How often all servers are looked at, where there are several.
const SURVEY_EVERY: Duration = Duration::from_millis(1_500);
/// The lock that keeps replicas from migrating at the same time: "fencepos" in ASCII.
const MIGRATION_LOCK: i64 = 0x6665_6e63_6570_6f73;

/// The store.
#[derive(Debug)]
pub struct PostgresStore {
    servers: Arc<Servers>,
    lanes: Vec<Mutex<Lane>>,
    /// For lists and health checks.
    reads: Slot,
    /// For clean-up.
    cleaning: Slot,
    /// For the program that this is part of; not used here.
    pool: PgPool,
    wakes: Arc<Wakes>,
    messages: mpsc::UnboundedSender<Message>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

/// Where a connection stays between statements.
type Slot = Mutex<Option<Linked>>;

/// One way to the database for batches.
#[derive(Debug, Default)]
struct Lane {
    slot: Option<Linked>,
    /// Set while a write is at the server. If that is given up, it stays set.
    is_writing: bool,
    /// Writes given up in a row.
    abandoned: u32,
    /// No connection is made before.
    rest_until: Option<Instant>,
    /// What the last load told of its moment, and when it had arrived.
    last_load: Option<(Moment, std::time::Instant)>,
}

impl Lane {
    /// A write that was given up goes on at the server, waiting for a standby perhaps, and nothing
    /// ends it. A lane that always came back at once would soon hold every connection that the
    /// server has; so it comes back after growing pauses.
    fn rest_after_abandoned_write(&mut self) -> Result<(), StoreError> {
        if self.is_writing {
            self.is_writing = false;
            self.abandoned += 1;
            let pause = Duration::from_secs(1 << (self.abandoned - 1).min(5));
            self.rest_until = Some(Instant::now() + pause.min(MAX_REST));
        }
        match self.rest_until {
            Some(until) if Instant::now() < until => {
                Err(StoreError::Away("writes are not confirmed in time".into()))
            }
            _ => Ok(()),
        }
    }
}

fn parse(url: &str) -> Result<PgConnectOptions, OpenError> {
    let options = PgConnectOptions::from_str(url).map_err(|error| {
        OpenError::Configuration(format!(
            "not a Postgres URL ({error}); one looks like postgres://user:password@host/database"
        ))
    })?;
    let options = match options.get_application_name() {
        Some(_) => options,
        None => options.application_name("fencepost"),
    };
    Ok(options.disable_statement_logging())
}

fn parse_all(urls: &[String]) -> Result<Arc<Servers>, OpenError> {
    let options = urls.iter().map(|url| parse(url)).collect::<Result<Vec<_>, _>>()?;
    Ok(Arc::new(Servers::new(options)))
}

fn unreachable(error: &StoreError) -> OpenError {
    OpenError::Unreachable(error.to_string())
}

/// Creates or updates the tables.
///
/// # Errors
///
/// The database cannot be reached, or refuses.
pub async fn migrate(urls: &[String]) -> Result<(), OpenError> {
    prepare(&*parse_all(urls)?, true).await
}

fn migrations() -> sqlx::migrate::Migrator {
    let mut migrations = sqlx::migrate!("migrations/postgres");
    // In our own schema, since the database has other users, who may use sqlx as well.
    migrations.dangerous_set_table_name("fencepost.migrations");
    // An older replica still starts after a newer one has migrated.
    migrations.set_ignore_missing(true).set_locking(false);
    migrations
}

/// Makes sure that the tables are there.
async fn prepare(servers: &Servers, migrate: bool) -> Result<(), OpenError> {
    let mut linked = servers.connect_unprepared().await.map_err(|error| unreachable(&error))?;
    let connection = &mut linked.connection;
    let migrations = migrations();
    let failed = |error: &sqlx::Error| match classify(error, false).0 {
        StoreError::Refused { message, is_transient: false } => OpenError::Configuration(format!(
            "cannot create or read the tables of Fencepost: {message}"
        )),
        error => unreachable(&error),
    };
    let is_current = timeout(START_TIMEOUT, is_current(connection, &migrations)).await;
    if is_current.map_err(|_| late())?.map_err(|error| failed(&error))? {
        return Ok(());
    }
    if !migrate {
        return Err(OpenError::Configuration(
            "the database lacks tables of this version of Fencepost: run `fencepost migrate`, or \
             leave --migrate on"
                .to_owned(),
        ));
    }
    let run = async {
        // All in one transaction, under a lock that ends with it even through a pooler.
        let mut transaction = connection.begin().await?;
        sqlx::raw_sql("SET LOCAL lock_timeout = '30s'; SET LOCAL statement_timeout = '60s'")
            .execute(&mut *transaction)
            .await?;
        sqlx::query("SELECT pg_advisory_xact_lock($1)")
            .bind(MIGRATION_LOCK)
            .execute(&mut *transaction)
            .await?;
        sqlx::raw_sql("CREATE SCHEMA IF NOT EXISTS fencepost").execute(&mut *transaction).await?;
        migrations.run_direct(None, &mut *transaction, false).await?;
        transaction.commit().await?;
        Ok::<_, MigrateError>(())
    };
    timeout(START_TIMEOUT, run).await.map_err(|_| late())?.map_err(|error| match error {
        MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _) => failed(&error),
        MigrateError::VersionMismatch(version) => OpenError::Configuration(format!(
            "the tables were made by a build whose migration {version} was another one: use an \
             empty database, or drop the schema fencepost and all that it remembers"
        )),
        error => OpenError::Configuration(format!("cannot update the tables: {error}")),
    })
}

fn late() -> OpenError {
    OpenError::Unreachable("the database did not answer in time".to_owned())
}

async fn is_current(
    connection: &mut PgConnection,
    migrations: &sqlx::migrate::Migrator,
) -> Result<bool, sqlx::Error> {
    let has_table: bool =
        sqlx::query_scalar("SELECT to_regclass('fencepost.migrations') IS NOT NULL")
            .fetch_one(&mut *connection)
            .await?;
    if !has_table {
        return Ok(false);
    }
    let applied: Vec<(i64, Vec<u8>)> =
        sqlx::query_as("SELECT version, checksum FROM fencepost.migrations")
            .fetch_all(connection)
            .await?;
    Ok(migrations.iter().all(|migration| {
        let known = applied.iter().find(|(version, _)| *version == migration.version);
        known.is_some_and(|(_, checksum)| *checksum == *migration.checksum)
    }))
}

impl PostgresStore {
    /// Connects to the first writable primary among `urls`, makes sure that the tables are there,
    /// and starts to listen.
    ///
    /// # Errors
    ///
    /// No primary can be reached, a URL is wrong, or the tables are missing and must not, or
    /// cannot, be created.
    pub async fn open(
        urls: &[String],
        notify_url: Option<&str>,
        migrate: bool,
        waker: Arc<dyn Waker>,
        metrics: Arc<Metrics>,
    ) -> Result<Self, OpenError> {
        let servers = parse_all(urls)?;
        prepare(&servers, migrate).await?;
        // All at once, so that the first requests need not wait for them; one is enough to begin.
        let connecting = (0..lanes()).map(|_| servers.connect());
        let connected = join_all(connecting).await;
        if let Some(Err(error)) = connected.iter().find(|_| connected.iter().all(Result::is_err)) {
            return Err(unreachable(error));
        }
        let lanes = connected
            .into_iter()
            .map(|linked| Mutex::new(Lane { slot: linked.ok(), ..Lane::default() }))
            .collect();
        let stop = CancellationToken::new();
        let pool_options = servers.current();
        let traffic = Arc::new(Wakes {
            servers: Arc::clone(&servers),
            notify_options: notify_url.map(parse).transpose()?,
            replica: format!("{:016x}", rand::random::<u64>()),
            waker,
            is_listening: AtomicBool::new(false),
            metrics,
            stop: stop.clone(),
        });
        let (messages, outgoing) = mpsc::unbounded_channel();
        let tasks = TaskTracker::new();
        spawn_vital(&tasks, Arc::clone(&traffic).notify(outgoing));
        spawn_vital(&tasks, Arc::clone(&traffic).listen(messages.clone()));
        if servers.count() > 1 {
            spawn_vital(&tasks, survey(Arc::clone(&servers), stop.clone()));
        }
        Ok(Self {
            servers,
            lanes,
            reads: Mutex::default(),
            cleaning: Mutex::default(),
            pool: PgPoolOptions::new().connect_lazy_with(pool_options),
            wakes: traffic,
            messages,
            tasks,
            stop,
        })
    }

    /// Reads outside batches. With a failure comes whether it is worth trying again: a connection
    /// that was left lying may have died meanwhile.
    async fn read<T>(
        &self,
        reading: impl AsyncFnOnce(&mut PgConnection) -> Result<T, sqlx::Error>,
    ) -> Result<T, (StoreError, bool)> {
        let whole = async {
            let mut slot = self.reads.lock().await;
            let was_lying = slot.is_some();
            let mut linked = self.linked(&mut slot).await.map_err(|error| (error, false))?;
            let done = reading(&mut linked.connection).await;
            let is_usable = done.as_ref().err().is_none_or(|error| classify(error, false).1);
            *slot = Some(linked).filter(|_| is_usable);
            done.map_err(|error| (classify(&error, false).0, was_lying && !is_usable))
        };
        timeout(READ_TIMEOUT, whole).await.unwrap_or_else(|_| {
            Err((StoreError::Away("the database did not answer in time".into()), false))
        })
    }

    async fn linked(&self, slot: &mut Option<Linked>) -> Result<Linked, StoreError> {
        match slot.take() {
            Some(linked) => Ok(linked),
            None => self.servers.connect().await,
        }
    }
}

async fn survey(servers: Arc<Servers>, stop: CancellationToken) {
    loop {
        tokio::select! {
            () = async {
                tokio::time::sleep(SURVEY_EVERY).await;
                servers.survey().await;
            } => {}
            () = stop.cancelled() => return,
        }
    }
}

#[async_trait]
impl<T: Table> Store<T> for PostgresStore {
    async fn load(&self, lane: usize, keys: &[Key]) -> Result<Loaded<T::State>, StoreError> {
        let mut lane = self.lanes[lane].lock().await;
        lane.rest_after_abandoned_write()?;
        let mut linked = self.linked(&mut lane.slot).await?;
        let sent = std::time::Instant::now();
        match table::load::<T>(&mut linked.connection, keys).await {
            Ok((rows, Surroundings { now, floor, timeline })) => {
                self.servers.check(&linked, timeline)?;
                let clock = StoreClock { now, sent };
                let moment = Moment { clock, floor, link: linked.link, until: None };
                lane.slot = Some(linked);
                lane.last_load = Some((moment, std::time::Instant::now()));
                Ok(Loaded { rows, moment })
            }
            Err(error) => {
                let (error, is_usable) = classify(&error, false);
                lane.slot = Some(linked).filter(|_| is_usable);
                Err(error)
            }
        }
    }

    async fn known(&self, lane: usize) -> Option<Moment> {
        let lane = self.lanes[lane].lock().await;
        let linked = lane.slot.as_ref()?;
        self.servers.check(linked, Some(linked.timeline())).ok()?;
        let (moment, received) = lane.last_load.filter(|(load, _)| load.link == linked.link)?;
        let age = received.elapsed();
        if age > MAX_AGE || received - moment.clock.sent > MAX_ROUND_TRIP {
            return None;
        }
        // The load's time is of some moment before `received`. Less than what has passed since, by
        // more than two clocks differ in their rates: the store refuses what is ahead of it.
        let clock = moment.clock.carried_on(age.mul_f64(0.999));
        Some(Moment { clock, until: Some(clock.now.plus(LEEWAY)), ..moment })
    }

    async fn store(
        &self,
        lane: usize,
        moment: Moment,
        writes: Arc<[Write<T::State>]>,
    ) -> Vec<Stored> {
        let mut lane = self.lanes[lane].lock().await;
        if lane.slot.as_ref().is_none_or(|linked| linked.link != moment.link) {
            // Not touched: the lane may have to rest, or have another connection by now.
            let error = StoreError::Away("the connection was lost".into());
            return vec![Stored::Failed(error); writes.len()];
        }
        let mut linked = lane.slot.take();
        let mut results = vec![Stored::NotAccepted; writes.len()];
        lane.is_writing = true;
        for is_update in [true, false] {
            let mut chosen: Vec<usize> =
                (0..writes.len()).filter(|&i| writes[i].expected.is_some() == is_update).collect();
            chosen.sort_unstable_by_key(|&i| &writes[i].key);
            store_chosen::<T>(&mut linked, is_update, moment, &writes, &chosen, &mut results).await;
        }
        lane.is_writing = false;
        if linked.is_some() {
            lane.abandoned = 0;
        }
        lane.slot = linked;
        results
    }

    async fn list(&self, query: ListQuery) -> Result<Listed<T::State>, StoreError> {
        let mut listed = self.read(async |c| table::list::<T>(c, &query).await).await;
        if let Err((_, true)) = listed {
            listed = self.read(async |c| table::list::<T>(c, &query).await).await;
        }
        let (rows, now) = listed.map_err(|(error, _)| error)?;
        Ok(Listed { rows, now })
    }
}

/// Stores some of the writes, all updates or all inserts: in one statement, or when that is
/// refused in halves, and so on, until a bad row fails alone.
async fn store_chosen<T: Table>(
    slot: &mut Option<Linked>,
    is_update: bool,
    moment: Moment,
    writes: &[Write<T::State>],
    chosen: &[usize],
    results: &mut [Stored],
) {
    let mut groups: Vec<&[usize]> = vec![chosen];
    while let Some(group) = groups.pop() {
        if group.is_empty() {
            continue;
        }
        let Some(mut linked) = slot.take() else {
            for &i in group {
                results[i] = Stored::Failed(StoreError::Away("the connection was lost".into()));
            }
            continue;
        };
        let rows: Vec<&Write<T::State>> = group.iter().map(|&i| &writes[i]).collect();
        let guard = Guard { moment, timeline: linked.timeline() };
        let stored = if is_update {
            table::update::<T>(&mut linked.connection, guard, &rows).await
        } else {
            table::insert::<T>(&mut linked.connection, guard, &rows).await
        };
        match stored {
            Ok(accepted) => {
                *slot = Some(linked);
                for (&i, accepted) in group.iter().zip(accepted) {
                    results[i] = if accepted { Stored::Accepted } else { Stored::NotAccepted };
                }
            }
            Err(error) => {
                let (error, is_usable) = classify(&error, true);
                if is_usable {
                    *slot = Some(linked);
                }
                if is_usable && group.len() > 1 {
                    groups.extend(group.chunks(group.len().div_ceil(2)).rev());
                } else {
                    for &i in group {
                        results[i] = Stored::Failed(error.clone());
                    }
                }
            }
        }
    }
}

#[async_trait]
impl Backend for PostgresStore {
    fn name(&self) -> &'static str {
        "postgres"
    }

    fn lanes(&self) -> usize {
        self.lanes.len()
    }

    fn announce(&self, hash: u64) {
        // Fails only after `close`.
        let _ = self.messages.send(Message::Changed(hash));
    }

    fn wake_path(&self) -> WakePath {
        if self.wakes.is_listening.load(Ordering::Relaxed) {
            WakePath::Listen
        } else {
            WakePath::Poll
        }
    }

    async fn check(&self) -> Result<(), StoreError> {
        let mut is_standby = self.read(async |c| link::is_standby(c).await).await;
        if let Err((_, true)) = is_standby {
            is_standby = self.read(async |c| link::is_standby(c).await).await;
        }
        if is_standby.map_err(|(error, _)| error)? {
            *self.reads.lock().await = None;
            return Err(StoreError::Away("the server has become a standby".into()));
        }
        Ok(())
    }

    async fn clean_up(
        &self,
        retention: Duration,
        after: Option<Cursor>,
    ) -> Result<Cleaned, StoreError> {
        let mut slot = self.cleaning.lock().await;
        let mut linked = self.linked(&mut slot).await?;
        let micros = i64::try_from(retention.as_micros()).unwrap_or(i64::MAX / 2);
        let after = after.unwrap_or_else(Cursor::first);
        let cleaned = match after.table {
            CursorTable::Leases => {
                table::clean_up::<LeaseMachine>(&mut linked.connection, micros, &after).await
            }
            CursorTable::Records => {
                table::clean_up::<RecordMachine>(&mut linked.connection, micros, &after).await
            }
        };
        match cleaned {
            Ok(cleaned) => {
                *slot = Some(linked);
                Ok(cleaned.or_next_table(&after))
            }
            Err(error) => Err(classify(&error, false).0),
        }
    }

    fn pool(&self) -> Option<PgPool> {
        Some(self.pool.clone())
    }

    async fn close(&self) {
        self.stop.cancel();
        self.pool.close().await;
        self.tasks.close();
        self.tasks.wait().await;
        let mut open = Vec::new();
        for lane in &self.lanes {
            open.extend(lane.lock().await.slot.take());
        }
        for slot in [&self.reads, &self.cleaning] {
            open.extend(slot.lock().await.take());
        }
        let closing = open.into_iter().map(|linked| linked.connection.close());
        let _ = timeout(Duration::from_secs(1), join_all(closing)).await;
    }
}
