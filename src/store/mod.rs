//! The seam between the engine and where rows are kept.
//!
//! A store does two things for a machine: it loads rows together with its own time, and it stores
//! rows, each guarded by the revision that it was loaded with. It knows no rules. A write that is
//! not accepted has lost a race, or met a row that somebody else keeps locked; either way nothing
//! of it was applied, and the engine decides again on a fresh load.

pub mod clock;
mod columns;
pub mod memory;
pub mod postgres;
pub mod sqlite;

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use clock::EmbeddedClock;
pub use sqlx::PgPool;

use crate::domain::Machine;
use crate::domain::ids::{Key, Kind, Name, Namespace, Scope};
use crate::domain::time::Timestamp;
use crate::domain::version::Version;

/// A map by key, with a faster hash than the standard one's, and seeded like that.
pub(crate) type KeyMap<T> = HashMap<Key, T, foldhash::fast::RandomState>;

/// What a key holds, with the stamp of its last write.
#[derive(Clone, Debug, PartialEq)]
pub struct Row<S> {
    /// The guard of the next write.
    pub revision: Version,
    /// What the machine left there.
    pub state: S,
}

/// The answer to a load.
#[derive(Debug)]
pub struct Loaded<S> {
    /// One entry for each key asked for, in that order.
    pub rows: Vec<Option<Row<S>>>,
    /// When that was so.
    pub moment: Moment,
}

/// What decisions rest on besides rows, and writes are bound to.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// The store's time: never later than when the rows were so, nor than when a write that rests
    /// on it is made.
    pub clock: StoreClock,
    /// The largest stamp that clean-up has deleted.
    pub floor: i64,
    /// The link that this came over. A write decided on it goes over the same one, or not at all:
    /// another link may lead to another server.
    pub link: Link,
    /// Where nothing was loaded, but known from before: a write is accepted only until this time
    /// of the store.
    pub until: Option<Timestamp>,
}

impl Moment {
    /// The present, where the clock is this process' own.
    fn embedded(clock: &EmbeddedClock, floor: i64) -> Self {
        let sent = Instant::now();
        let clock = StoreClock { now: clock.now(), sent };
        Self { clock, floor, link: Link::default(), until: None }
    }
}

/// Identifies one connection of one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Link(pub u64);

/// One guarded write.
#[derive(Clone, Debug)]
pub struct Write<S> {
    /// The row's identity.
    pub key: Key,
    /// The revision that the row must still have; `None`: there must be no row.
    pub expected: Option<Version>,
    /// What the row becomes.
    pub row: Row<S>,
}

/// Where a listing goes on.
#[derive(Clone, Debug)]
pub struct ListQuery {
    /// The machine.
    pub kind: Kind,
    /// The tenant.
    pub namespace: Namespace,
    /// Whose, within the tenant.
    pub scope: Scope,
    /// Only names that begin with this.
    pub prefix: String,
    /// Only names after this one, by bytes.
    pub after: Option<Name>,
    /// At most this many rows.
    pub limit: usize,
}

impl ListQuery {
    fn key(&self, name: &str) -> Key {
        Key::new(self.kind, &self.namespace, &self.scope, name)
    }

    /// What all keys begin with.
    fn prefix(&self) -> Key {
        self.key(&self.prefix)
    }

    /// The key that the last page ended with.
    fn after(&self) -> Option<Key> {
        self.after.as_ref().map(|name| self.key(name.as_str()))
    }

    /// Tells whether a key is one of those asked for, however many.
    fn filter(&self) -> impl Fn(&Key) -> bool {
        let (prefix, after) = (self.prefix(), self.after());
        move |key| {
            key.as_str().starts_with(prefix.as_str())
                && after.as_ref().is_none_or(|after| key > after)
        }
    }

    /// The keys to look at lie between these, bounds included: so an index finds them.
    fn bounds(&self) -> (Key, Key) {
        let prefix = self.prefix();
        // No name has more characters than this, and no character is greater.
        let last = "\u{10ffff}".repeat(Name::MAX_BYTES / 4);
        let upper = self.key(&format!("{}{last}", self.prefix));
        (self.after().map_or(prefix.clone(), |after| after.max(prefix)), upper)
    }
}

/// The first of what was found, in the order of the keys. Without sorting what is beyond: that may
/// be a whole table.
fn first<T>(mut found: Vec<(&Key, T)>, limit: usize) -> Vec<(&Key, T)> {
    if limit < found.len() {
        found.select_nth_unstable_by_key(limit, |(key, _)| *key);
        found.truncate(limit);
    }
    found.sort_unstable_by_key(|(key, _)| *key);
    found
}

/// A stretch of rows in the order of their names' bytes.
#[derive(Debug)]
pub struct Listed<S> {
    /// The rows.
    pub rows: Vec<(Name, Row<S>)>,
    /// The store's time.
    pub now: Timestamp,
}

/// Why a store did not do what it was asked.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// It could not be reached, or did not answer a load: certainly nothing was applied.
    #[error("{0}")]
    Away(Arc<str>),
    /// It refused: certainly nothing was applied.
    #[error("{message}")]
    Refused {
        /// What the store said.
        message: Arc<str>,
        /// Whether the same request may succeed a moment later.
        is_transient: bool,
    },
    /// The link broke, or the deadline passed, during a write: it may have been applied or not.
    #[error("{0}")]
    Unknown(Arc<str>),
}

/// Why a store cannot be opened, worded for the person who starts the service.
#[derive(Clone, Debug, thiserror::Error)]
pub enum OpenError {
    /// Another try will not help.
    #[error("{0}")]
    Configuration(String),
    /// It may be there a moment later.
    #[error("{0}")]
    Unreachable(String),
}

/// What became of one write.
#[derive(Clone, Debug)]
pub enum Stored {
    /// It is applied, and as durable as this store makes it.
    Accepted,
    /// Its guard did not hold, or somebody else has the row locked: not applied.
    NotAccepted,
    /// It failed.
    Failed(StoreError),
}

/// Keeps the rows of one machine.
#[async_trait]
pub trait Store<M: Machine>: Debug + Send + Sync + 'static {
    /// Loads rows. `keys` are distinct. `lane` is below [`Backend::lanes`]; calls on one lane come
    /// one after the other, and may be dropped halfway.
    async fn load(&self, lane: usize, keys: &[Key]) -> Result<Loaded<M::State>, StoreError>;

    /// What can be told without asking, for decisions that end in a write: the store then checks
    /// what they rest on. `None` where nothing is known, or not well enough.
    async fn known(&self, _lane: usize) -> Option<Moment> {
        None
    }

    /// Stores rows whose guard holds; tells for each write, in order, what became of it. A row
    /// that cannot be stored does not keep the others from it.
    async fn store(
        &self,
        lane: usize,
        moment: Moment,
        writes: Arc<[Write<M::State>]>,
    ) -> Vec<Stored>;

    /// Lists rows.
    async fn list(&self, query: ListQuery) -> Result<Listed<M::State>, StoreError>;
}

/// What all machines of one store share.
#[async_trait]
pub trait Backend: Debug + Send + Sync + 'static {
    /// The name shown to people: `postgres`, `sqlite` or `memory`.
    fn name(&self) -> &'static str;

    /// How many batches it can work on at a time.
    fn lanes(&self) -> usize;

    /// Tells other replicas that waiters for keys with this hash should look again.
    fn announce(&self, _hash: u64) {}

    /// How wake-ups from elsewhere reach this process.
    fn wake_path(&self) -> WakePath;

    /// Whether a write could be made now; the reason if not.
    async fn check(&self) -> Result<(), StoreError>;

    /// Looks at the keys after `after`, a bounded number of them, and deletes those that have been
    /// idle for `retention`.
    async fn clean_up(
        &self,
        retention: Duration,
        after: Option<Cursor>,
    ) -> Result<Cleaned, StoreError>;

    /// The most stored responses of one namespace, where that is bounded.
    fn stored_responses(&self) -> Option<usize> {
        None
    }

    /// A pool of connections to the same database, where that is Postgres.
    fn pool(&self) -> Option<PgPool> {
        None
    }

    /// Ends background work and lets go of connections and files.
    async fn close(&self);
}

/// What one chunk of clean-up came to.
#[derive(Clone, Debug)]
pub struct Cleaned {
    /// How many keys it deleted.
    pub deleted: u64,
    /// Where the next chunk goes on; `None` at the end.
    pub next: Option<Cursor>,
}

/// The time, for clean-up: a bogus clock must not delete what is in use.
fn plausible(now: Timestamp) -> Result<Timestamp, StoreError> {
    if Version::is_plausible(now) {
        return Ok(now);
    }
    Err(StoreError::Away("the clock is beyond what can be counted".into()))
}

impl Cleaned {
    /// At the end of one table, goes on with the next.
    fn or_next_table(mut self, after: &Cursor) -> Self {
        if self.next.is_none() && after.table == CursorTable::Leases {
            self.next = Some(Cursor::first_of(CursorTable::Records));
        }
        self
    }
}

/// A place in the order of all keys: a table, and a key there; the empty one is before all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cursor {
    table: CursorTable,
    key: Key,
}

/// The tables in the order in which they are cleaned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CursorTable {
    Leases,
    Records,
}

impl Cursor {
    /// How many keys one chunk of clean-up looks at.
    const CHUNK: usize = 1_000;

    /// Before all keys.
    fn first() -> Self {
        Self::first_of(CursorTable::Leases)
    }

    fn first_of(table: CursorTable) -> Self {
        Self { table, key: Key::from_stored("") }
    }
}

/// Whom a store tells that something was changed elsewhere.
pub trait Waker: Debug + Send + Sync {
    /// Keys with this hash may have changed.
    fn wake(&self, hash: u64);

    /// Any key may have changed.
    fn wake_all(&self);
}

/// How wake-ups reach this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WakePath {
    /// All changes are made by this process.
    Local,
    /// Notifications from other replicas arrive: proven by a probe of a few seconds ago.
    Listen,
    /// They do not arrive, or that is not proven; waiters look again every second.
    Poll,
}

impl WakePath {
    /// The word that people see.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Listen => "listen",
            Self::Poll => "poll",
        }
    }

    /// How often a watched key is read again in case its wake-up was lost.
    #[must_use]
    pub const fn safety_poll(self) -> Duration {
        match self {
            Self::Local | Self::Listen => Duration::from_secs(2),
            Self::Poll => Duration::from_secs(1),
        }
    }
}

/// The store's time, carried on from a load by the monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct StoreClock {
    /// What the load reported.
    pub now: Timestamp,
    /// When the load was sent, so that the estimate errs on the late side.
    pub sent: Instant,
}

impl StoreClock {
    /// The same, so much later; still not later than the store's time then, if it was not before.
    fn carried_on(self, elapsed: Duration) -> Self {
        Self { now: self.now.plus(elapsed), sent: self.sent + elapsed }
    }

    /// The store's time at this moment, never too early.
    #[must_use]
    pub fn estimate(&self) -> Timestamp {
        self.now.plus(self.sent.elapsed())
    }

    /// How long until `instant`; zero when that is past.
    #[must_use]
    pub fn remaining(&self, instant: Timestamp) -> Duration {
        self.estimate().until(instant)
    }
}
