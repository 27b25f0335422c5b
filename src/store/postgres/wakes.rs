//! Wake-ups between replicas, by LISTEN and NOTIFY.
//!
//! Each replica has one connection that listens, and one that notifies, however many calls wait.
//! Notifications are hints, sent after the commit that they tell of, by a task of their own:
//! inside the write they would hold an instance-wide lock through its fsync. A payload names keys
//! by their hashes, several at a time; one that would be too long says "all".
//!
//! Whether notifications arrive is not assumed but probed, every few seconds, by a message to
//! oneself over the same two connections. While that is unproven, as behind a transaction-mode
//! pooler, waiting calls look again every second.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sqlx::ConnectOptions;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgListener, PgPoolOptions};
use tokio::sync::mpsc;
use tokio::time::{Instant, interval, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::link::Servers;
use crate::store::Waker;
use crate::telemetry::Metrics;

const CHANNEL: &str = "fencepost";
/// Postgres takes payloads below 8,000 bytes; this many hashes of 16 digits stay below 6,500.
const MAX_HASHES: usize = 400;
const PROBE_EVERY: Duration = Duration::from_secs(5);
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
const IO_TIMEOUT: Duration = Duration::from_secs(2);
const RECONNECT_PAUSE: Duration = Duration::from_millis(100);
const MAX_RECONNECT_PAUSE: Duration = Duration::from_secs(10);

/// Something to tell the other replicas.
#[derive(Clone, Copy, Debug)]
pub(super) enum Message {
    /// The key with this hash has changed.
    Changed(u64),
    /// Nothing; it is to come back to its sender.
    Probe,
}

/// Where the listener and the notifier connect, and what they share.
#[derive(Debug)]
pub(super) struct Wakes {
    pub(super) servers: Arc<Servers>,
    /// A direct way to the database, where the main one does not pass notifications.
    pub(super) notify_options: Option<PgConnectOptions>,
    /// Random for each start.
    pub(super) replica: String,
    pub(super) waker: Arc<dyn Waker>,
    pub(super) is_listening: AtomicBool,
    pub(super) metrics: Arc<Metrics>,
    pub(super) stop: CancellationToken,
}

impl Wakes {
    fn options(&self) -> PgConnectOptions {
        let options = self.notify_options.clone().unwrap_or_else(|| self.servers.current());
        options.disable_statement_logging()
    }

    /// Sends messages as they come, all that have gathered at once.
    pub(super) async fn notify(self: Arc<Self>, mut messages: mpsc::UnboundedReceiver<Message>) {
        let mut connection: Option<PgConnection> = None;
        let mut server = self.servers.index();
        let mut gathered = Vec::new();
        let mut has_missed = false;
        loop {
            tokio::select! {
                _ = messages.recv_many(&mut gathered, usize::MAX) => {}
                () = self.stop.cancelled() => return,
            }
            if self.servers.index() != server {
                server = self.servers.index();
                connection = None;
            }
            let payload = self.payload(&gathered, has_missed);
            gathered.clear();
            has_missed = true;
            // Once more on a fresh connection; beyond that the safety poll has to do.
            for _ in 0..2 {
                let sent = timeout(IO_TIMEOUT, self.send(&mut connection, &payload)).await;
                if matches!(sent, Ok(Ok(()))) {
                    has_missed = false;
                    break;
                }
                connection = None;
            }
        }
    }

    async fn send(
        &self,
        slot: &mut Option<PgConnection>,
        payload: &str,
    ) -> Result<(), sqlx::Error> {
        let mut connection = match slot.take() {
            Some(connection) => connection,
            None => self.options().connect().await?,
        };
        sqlx::query("SELECT pg_notify($1, $2)")
            .bind(CHANNEL)
            .bind(payload)
            .execute(&mut connection)
            .await?;
        *slot = Some(connection);
        Ok(())
    }

    fn payload(&self, messages: &[Message], is_for_all: bool) -> String {
        let hashes: HashSet<u64> = messages
            .iter()
            .filter_map(|message| match message {
                Message::Changed(hash) => Some(*hash),
                Message::Probe => None,
            })
            .collect();
        let mut payload = format!("{}:", self.replica);
        if is_for_all || hashes.len() > MAX_HASHES {
            payload.push('*');
        } else {
            for hash in hashes {
                // Writing into a `String` cannot fail.
                let _ = write!(payload, "{hash:016x}");
            }
        }
        payload
    }

    /// Wakes whom a payload names; whether it was this replica's own, whose waiters were woken
    /// when it was sent.
    fn receive(&self, payload: &str) -> bool {
        match payload.split_once(':') {
            Some((replica, _)) if replica == self.replica => return true,
            Some((_, hashes)) if hashes.len() % 16 == 0 && hashes.is_ascii() => {
                for start in (0..hashes.len()).step_by(16) {
                    match u64::from_str_radix(&hashes[start..start + 16], 16) {
                        Ok(hash) => self.waker.wake(hash),
                        Err(_) => self.waker.wake_all(),
                    }
                }
            }
            // "All", or something that a later version says.
            _ => self.waker.wake_all(),
        }
        false
    }

    /// Listens for as long as the store is open, connecting anew whenever it must.
    pub(super) async fn listen(self: Arc<Self>, messages: mpsc::UnboundedSender<Message>) {
        let mut failures = 0_u32;
        loop {
            let result = tokio::select! {
                result = self.listen_once(&messages) => result,
                () = self.stop.cancelled() => return,
            };
            let was_listening = self.is_listening.swap(false, Ordering::Relaxed);
            self.metrics.listening.set(0);
            self.metrics.listener_reconnects.inc();
            failures = if was_listening { 0 } else { failures + 1 };
            // Told when it begins, not at every try.
            if failures <= 1 {
                let reason = match result {
                    Ok(()) => "the connection was lost".to_owned(),
                    Err(error) => error.to_string(),
                };
                tracing::warn!(
                    %reason,
                    "notifications from other replicas do not arrive; until they do, waiting \
                     calls look again every second"
                );
            }
            if failures > 0 {
                let pause = RECONNECT_PAUSE * (1 << failures.min(7));
                tokio::select! {
                    () = sleep(pause.min(MAX_RECONNECT_PAUSE)) => {}
                    () = self.stop.cancelled() => return,
                }
            }
        }
    }

    /// Returns when the connection must be given up. A dead one is always dropped here: the
    /// library would keep it after some errors.
    async fn listen_once(
        &self,
        messages: &mpsc::UnboundedSender<Message>,
    ) -> Result<(), sqlx::Error> {
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .acquire_timeout(IO_TIMEOUT)
            .idle_timeout(None)
            .max_lifetime(None)
            .connect_lazy_with(self.options().application_name("fencepost listener"));
        let mut listener = PgListener::connect_with(&pool).await?;
        listener.eager_reconnect(false);
        timeout(IO_TIMEOUT, listener.listen(CHANNEL)).await.map_err(|_| timed_out())??;
        // Only now, so that no change falls between the read and the listening.
        self.waker.wake_all();
        let server = self.servers.index();
        let mut probes = interval(PROBE_EVERY);
        let mut overdue: Option<Instant> = None;
        loop {
            tokio::select! {
                notification = listener.try_recv() => {
                    let Some(notification) = notification? else { return Ok(()) };
                    if self.receive(notification.payload()) {
                        overdue = None;
                        if !self.is_listening.swap(true, Ordering::Relaxed) {
                            tracing::info!("notifications from other replicas arrive");
                            self.metrics.listening.set(1);
                        }
                    }
                }
                _ = probes.tick() => {
                    if self.servers.index() != server {
                        // Another is the primary now, while this one still answers.
                        return Ok(());
                    }
                    let _ = messages.send(Message::Probe);
                    overdue.get_or_insert(Instant::now() + PROBE_TIMEOUT);
                }
                () = until(overdue) => return Err(timed_out()),
            }
        }
    }
}

async fn until(instant: Option<Instant>) {
    match instant {
        Some(instant) => tokio::time::sleep_until(instant).await,
        None => std::future::pending().await,
    }
}

fn timed_out() -> sqlx::Error {
    sqlx::Error::Io(std::io::Error::new(
        std::io::ErrorKind::TimedOut,
        "a notification to oneself did not arrive within 2 s",
    ))
}
