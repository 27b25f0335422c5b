//! Connections: which server, with what settings, and what their failures mean.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgConnection, PgDatabaseError, PgSeverity};
use sqlx::{ConnectOptions, Connection, Row};
use time::OffsetDateTime;
use tokio::time::timeout;

use crate::domain::time::Timestamp;
use crate::store::{Link, StoreError};

/// How long one server may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// What the service's sessions need. The planner settings pin the plans to index lookups: on an
/// empty table a sequential scan looks cheaper, and a cached plan would keep it while the table
/// grows. `lock_timeout` bounds the one wait that is left, for another replica's insert of the
/// same new key.
const SESSION: &str = "
    SET default_transaction_isolation = 'read committed';
    SET default_transaction_read_only = off;
    SET synchronous_commit = on;
    SET lock_timeout = '25ms';
    SET statement_timeout = '5s';
    SET idle_in_transaction_session_timeout = '5s';
    SET enable_seqscan = off;
    SET enable_hashjoin = off;
    SET enable_mergejoin = off;
    SET jit = off;
    SET plan_cache_mode = force_generic_plan";

/// Behind a transaction-mode pooler this may meet another session than the settings did.
const IS_SETTLED: &str = "
    SELECT current_setting('transaction_isolation') = 'read committed'
       AND current_setting('transaction_read_only') = 'off'";

const INSPECT: &str = "
    SELECT pg_is_in_recovery(),
           CASE WHEN pg_is_in_recovery() THEN NULL
                ELSE substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) END,
           (SELECT system_identifier FROM pg_control_system())";

/// A connection to a primary.
#[derive(Debug)]
pub(super) struct Linked {
    pub(super) link: Link,
    pub(super) connection: PgConnection,
    timeline: u32,
    system: i64,
}

impl Linked {
    /// The timeline of the server when the connection was made. A server changes it only by a
    /// restart; but a pooler may put another server in its place.
    pub(super) fn timeline(&self) -> u32 {
        self.timeline
    }
}

/// The servers that the data may be on.
#[derive(Debug)]
pub(super) struct Servers {
    options: Vec<PgConnectOptions>,
    /// The index of the last primary.
    current: AtomicUsize,
    next_link: AtomicU64,
    /// The newest timeline seen of each system, by which an old primary is told from the new one.
    newest: Mutex<std::collections::HashMap<i64, u32>>,
    /// Those that are in the database's own list.
    recorded: Mutex<HashSet<(i64, u32)>>,
}

impl Servers {
    pub(super) fn new(options: Vec<PgConnectOptions>) -> Self {
        Self {
            options,
            current: AtomicUsize::new(0),
            next_link: AtomicU64::new(1),
            newest: Mutex::default(),
            recorded: Mutex::default(),
        }
    }

    /// How to reach the last primary.
    pub(super) fn current(&self) -> PgConnectOptions {
        self.options[self.current.load(Ordering::Relaxed)].clone()
    }

    /// Which of the servers that is.
    pub(super) fn index(&self) -> usize {
        self.current.load(Ordering::Relaxed)
    }

    pub(super) fn count(&self) -> usize {
        self.options.len()
    }

    /// Connects to the first writable primary, beginning with the last one.
    pub(super) async fn connect(&self) -> Result<Linked, StoreError> {
        let mut linked = self.connect_unprepared().await?;
        self.record_timeline(&mut linked).await?;
        Ok(linked)
    }

    /// The same, for a database whose tables may not be there yet.
    pub(super) async fn connect_unprepared(&self) -> Result<Linked, StoreError> {
        let first = self.current.load(Ordering::Relaxed);
        let mut reasons = Vec::new();
        for offset in 0..self.options.len() {
            let index = (first + offset) % self.options.len();
            match self.connect_to(&self.options[index]).await {
                Ok(linked) => {
                    self.current.store(index, Ordering::Relaxed);
                    return Ok(linked);
                }
                Err(reason) => {
                    // A caller that gives up here begins with the next one when it comes back.
                    self.current.store((index + 1) % self.options.len(), Ordering::Relaxed);
                    let options = &self.options[index];
                    reasons.push(format!(
                        "{}:{}: {reason}",
                        options.get_host(),
                        options.get_port()
                    ));
                }
            }
        }
        Err(StoreError::Away(reasons.join("; ").into()))
    }

    async fn connect_to(&self, options: &PgConnectOptions) -> Result<Linked, String> {
        let opened = async {
            let mut connection = options.connect().await?;
            let row = sqlx::query(INSPECT).persistent(false).fetch_one(&mut connection).await?;
            Ok::<_, sqlx::Error>((connection, row))
        };
        let (mut connection, row) = timeout(CONNECT_TIMEOUT, opened)
            .await
            .map_err(|_| "no answer within 2 s".to_owned())?
            .map_err(|error| error.to_string())?;
        let read = |error: sqlx::Error| error.to_string();
        let timeline: Option<&str> = row.try_get(1).map_err(read)?;
        let Some(timeline) = timeline.and_then(|hex| u32::from_str_radix(hex, 16).ok()) else {
            return Err("a standby, not the primary".to_owned());
        };
        let system: i64 = row.try_get(2).map_err(read)?;
        self.check_timeline(system, timeline)?;
        let settled = async {
            sqlx::raw_sql(SESSION).execute(&mut connection).await?;
            sqlx::query_scalar(IS_SETTLED).persistent(false).fetch_one(&mut connection).await
        };
        let is_settled: bool = timeout(CONNECT_TIMEOUT, settled)
            .await
            .map_err(|_| "no answer within 2 s".to_owned())?
            .map_err(|error| error.to_string())?;
        if !is_settled {
            return Err("session settings do not hold, as behind a transaction-mode pooler, and \
                        the defaults are not fit: set default_transaction_isolation = 'read \
                        committed' and default_transaction_read_only = off for the role"
                .to_owned());
        }
        let link = Link(self.next_link.fetch_add(1, Ordering::Relaxed));
        Ok(Linked { link, connection, timeline, system })
    }

    /// Refuses a server on an older timeline than one already seen: an old primary that does not
    /// know yet that it was replaced.
    fn check_timeline(&self, system: i64, timeline: u32) -> Result<(), String> {
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        let newest = newest.entry(system).or_insert(timeline);
        if timeline < *newest {
            return Err(format!(
                "a former primary, on timeline {timeline} while timeline {newest} exists"
            ));
        }
        *newest = timeline;
        Ok(())
    }

    /// Checks what a load told about its server; the link is of no use if this fails.
    pub(super) fn check(&self, linked: &Linked, timeline: Option<u32>) -> Result<(), StoreError> {
        let reason = match timeline {
            None => "the server has become a standby".to_owned(),
            Some(timeline) if timeline != linked.timeline => {
                "the server was promoted to a new timeline".to_owned()
            }
            Some(timeline) => match self.check_timeline(linked.system, timeline) {
                Ok(()) => return Ok(()),
                Err(reason) => reason,
            },
        };
        Err(StoreError::Away(reason.into()))
    }

    /// Looks at every server, so that a promoted one is known of even while the old one still
    /// answers, and is found without waiting for those before it in the list.
    pub(super) async fn survey(&self) {
        let mut primary = None;
        for (index, options) in self.options.iter().enumerate() {
            if let Ok(linked) = self.connect_to(options).await {
                let newest = primary.map_or(0, |(timeline, _)| timeline);
                if linked.timeline > newest {
                    primary = Some((linked.timeline, index));
                }
                let _ = timeout(CONNECT_TIMEOUT, linked.connection.close()).await;
            }
        }
        if let Some((_, index)) = primary {
            self.current.store(index, Ordering::Relaxed);
        }
    }

    /// On a server or timeline that this data was never served from before, versions may have been
    /// given out that it does not know of: commits lost in a failover, or made after the backup.
    /// They cannot be above the clock of that time, so the floor is raised to a minute above this
    /// one's clock, for clocks that differ.
    async fn record_timeline(&self, linked: &mut Linked) -> Result<(), StoreError> {
        let timeline = (linked.system, linked.timeline);
        let recorded = |insert: bool| {
            let mut known = self.recorded.lock().unwrap_or_else(PoisonError::into_inner);
            if insert { known.insert(timeline) } else { known.contains(&timeline) }
        };
        if recorded(false) {
            return Ok(());
        }
        let recording = async {
            let mut transaction = linked.connection.begin().await?;
            let known: Vec<(i64, i32)> =
                sqlx::query_as("SELECT system_identifier, timeline FROM fencepost.timelines")
                    .fetch_all(&mut *transaction)
                    .await?;
            let number = i32::from_ne_bytes(linked.timeline.to_ne_bytes());
            if !known.contains(&(linked.system, number)) {
                sqlx::query("SELECT floor FROM fencepost.floor FOR UPDATE")
                    .execute(&mut *transaction)
                    .await?;
                if !known.is_empty() {
                    tracing::warn!(
                        timeline = linked.timeline,
                        "first start on this server or timeline: raising the floor of versions"
                    );
                    sqlx::query(
                        "UPDATE fencepost.floor SET floor = 60000000
                           + greatest(floor, (extract(epoch FROM now()) * 1000000)::bigint)",
                    )
                    .execute(&mut *transaction)
                    .await?;
                }
                sqlx::query(
                    "INSERT INTO fencepost.timelines (system_identifier, timeline)
                     VALUES ($1, $2) ON CONFLICT DO NOTHING",
                )
                .bind(linked.system)
                .bind(number)
                .execute(&mut *transaction)
                .await?;
            }
            transaction.commit().await
        };
        timeout(CONNECT_TIMEOUT, recording)
            .await
            .map_err(|_| StoreError::Away("the database did not answer in time".into()))?
            .map_err(|error: sqlx::Error| StoreError::Away(explain(&error)))?;
        recorded(true);
        Ok(())
    }
}

/// Whether the server is, or has become, a standby.
pub(super) async fn is_standby(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar("SELECT pg_is_in_recovery()").fetch_one(connection).await
}

/// A time of the server, in the service's own terms.
pub(super) fn micros(time: OffsetDateTime) -> Timestamp {
    let micros = time.unix_timestamp_nanos() / 1_000;
    Timestamp::from_micros(i64::try_from(micros).unwrap_or(i64::MAX))
}

/// The same the other way round.
pub(super) fn timestamp(at: Timestamp) -> OffsetDateTime {
    OffsetDateTime::from_unix_timestamp_nanos(i128::from(at.as_micros()) * 1_000)
        .unwrap_or(OffsetDateTime::UNIX_EPOCH)
}

fn explain(error: &sqlx::Error) -> std::sync::Arc<str> {
    match error.as_database_error().and_then(sqlx::error::DatabaseError::code).as_deref() {
        Some("42P01" | "3F000") => {
            "the database has no tables of Fencepost: run `fencepost migrate`".into()
        }
        Some("42501") => format!("the database role lacks a right: {error}").into(),
        _ => error.to_string().into(),
    }
}

/// What an error means for the statement that met it, and whether the link is still good.
pub(super) fn classify(error: &sqlx::Error, is_write: bool) -> (StoreError, bool) {
    let message = explain(error);
    let database = error.as_database_error().and_then(|e| e.try_downcast_ref::<PgDatabaseError>());
    match database {
        // A server that became read-only is a server that went away; and a statement that is not
        // prepared here, or twice, means that a pooler has put another session in its place.
        Some(error) if matches!(error.code(), "25006" | "26000" | "42P05") => {
            (StoreError::Away(message), false)
        }
        // An error response ends the statement's transaction: certainly not applied. The likes of
        // FATAL also end the session, and then a commit may have been under way.
        Some(error) if error.severity() == PgSeverity::Error => {
            let class = &error.code()[..2];
            let is_transient =
                matches!(class, "40" | "53" | "55" | "57" | "58") || error.code() == "42P01";
            (StoreError::Refused { message, is_transient }, true)
        }
        _ if is_write => (StoreError::Unknown(message), false),
        _ => (StoreError::Away(message), false),
    }
}
