//! Rows in this process' memory: for tests and throw-away use. A restart forgets everything.
//!
//! Of stored responses, the newest 4,096 of each namespace are kept. Those still in progress do
//! not count, and are never dropped.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;

use super::clock::{EmbeddedClock, TimeSource};
use super::{
    Backend, Cleaned, Cursor, KeyMap, ListQuery, Listed, Loaded, Moment, Row, Store, StoreError,
    Stored, WakePath, Write, first, plausible,
};
use crate::domain::Machine;
use crate::domain::ids::{Key, Kind, Name};
use crate::domain::lease::{Lease, LeaseMachine};
use crate::domain::record::{Content, Record, RecordMachine};
use crate::domain::time::Timestamp;

/// The most stored responses of one namespace.
pub const MAX_STORED_RESPONSES: usize = 4_096;

/// The store.
#[derive(Debug)]
pub struct MemoryStore {
    clock: EmbeddedClock,
    tables: Mutex<Tables>,
}

#[derive(Debug, Default)]
struct Tables {
    floor: i64,
    leases: KeyMap<Row<Lease>>,
    records: KeyMap<Row<Record>>,
    /// By namespace.
    responses: HashMap<String, Queue>,
}

/// Stored responses in the order in which they were first stored.
#[derive(Debug, Default)]
struct Queue {
    next: u64,
    by_place: BTreeMap<u64, Key>,
    places: KeyMap<u64>,
}

impl MemoryStore {
    /// An empty store on the machine's clocks.
    #[must_use]
    pub fn new() -> Self {
        Self::with_time(TimeSource::system())
    }

    /// An empty store on the given clocks.
    #[must_use]
    pub fn with_time(source: TimeSource) -> Self {
        Self {
            clock: EmbeddedClock::starting_at(Timestamp::from_micros(0), source),
            tables: Mutex::default(),
        }
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

/// A machine whose rows are in a table of their own.
trait Table: Machine {
    fn table(tables: &mut Tables) -> &mut KeyMap<Row<Self::State>>;

    /// Since when a row has not been in use; `None` if it is kept for ever.
    fn idle_since(key: &Key, row: &Row<Self::State>, retention: Duration) -> Option<Timestamp>;

    /// A row as lists show it.
    fn listed(row: &Row<Self::State>) -> Row<Self::State> {
        row.clone()
    }

    /// To be called after each write.
    fn written(_tables: &mut Tables, _write: &Write<Self::State>) {}
}

impl Table for LeaseMachine {
    fn table(tables: &mut Tables) -> &mut KeyMap<Row<Lease>> {
        &mut tables.leases
    }

    fn idle_since(_key: &Key, row: &Row<Lease>, retention: Duration) -> Option<Timestamp> {
        let last_write = Timestamp::from_micros(row.revision.get());
        Some(row.state.idle_since(last_write).plus(retention))
    }
}

impl Table for RecordMachine {
    fn table(tables: &mut Tables) -> &mut KeyMap<Row<Record>> {
        &mut tables.records
    }

    fn idle_since(key: &Key, row: &Row<Record>, retention: Duration) -> Option<Timestamp> {
        let last_write = Timestamp::from_micros(row.revision.get());
        match &row.state.completion {
            Some(completion) => completion.until,
            None if key.kind() == Some(Kind::Execution) => None,
            None => Some(row.state.lease.idle_since(last_write).plus(retention)),
        }
    }

    /// Without what is remembered, as on the other stores.
    fn listed(row: &Row<Record>) -> Row<Record> {
        let mut row = row.clone();
        if let Some(completion) = &mut row.state.completion {
            completion.content = Content { text: "".into(), body: None };
        }
        row
    }

    fn written(tables: &mut Tables, write: &Write<Record>) {
        if write.key.kind() != Some(Kind::Idempotency) {
            return;
        }
        let namespace = write.key.namespace().to_owned();
        let queue = tables.responses.entry(namespace).or_default();
        if write.row.state.completion.is_none() {
            queue.remove(&write.key);
        } else if let Some(oldest) = queue.push(&write.key) {
            tables.remove::<Self>(&oldest);
        }
    }
}

impl Queue {
    /// Adds a key, unless it is there; returns the oldest one if there are too many.
    fn push(&mut self, key: &Key) -> Option<Key> {
        if self.places.contains_key(key) {
            return None;
        }
        self.places.insert(key.clone(), self.next);
        self.by_place.insert(self.next, key.clone());
        self.next += 1;
        if self.places.len() <= MAX_STORED_RESPONSES {
            return None;
        }
        let (_, oldest) = self.by_place.pop_first()?;
        self.places.remove(&oldest);
        Some(oldest)
    }

    fn remove(&mut self, key: &Key) {
        if let Some(place) = self.places.remove(key) {
            self.by_place.remove(&place);
        }
    }
}

impl Tables {
    fn store<T: Table>(&mut self, write: &Write<T::State>) -> Stored {
        let Write { key, expected, row } = write;
        let is_above_floor = expected.is_some() || row.revision.get() > self.floor;
        let is_accepted = match T::table(self).entry(key.clone()) {
            Entry::Vacant(place) if expected.is_none() && is_above_floor => {
                place.insert(row.clone());
                true
            }
            Entry::Occupied(mut place) if Some(place.get().revision) == *expected => {
                place.insert(row.clone());
                true
            }
            _ => false,
        };
        if !is_accepted {
            return Stored::NotAccepted;
        }
        T::written(self, write);
        Stored::Accepted
    }

    /// Looks at all rows: what asks for one key, which is far more often, is the faster for it.
    fn list<T: Table>(&mut self, query: &ListQuery) -> Vec<(Name, Row<T::State>)> {
        let is_wanted = query.filter();
        let found = T::table(self).iter().filter(|(key, _)| is_wanted(key)).collect();
        first(found, query.limit)
            .into_iter()
            .map(|(key, row)| (Name::from_stored(key.name()), T::listed(row)))
            .collect()
    }

    /// Deletes a row; its stamp stays below those of all keys to come.
    fn remove<T: Table>(&mut self, key: &Key) {
        if let Some(row) = T::table(self).remove(key) {
            self.floor = self.floor.max(row.revision.get());
        }
    }

    /// Deletes all idle rows; how many.
    fn clean_up<T: Table>(&mut self, retention: Duration, now: Timestamp) -> u64 {
        let is_idle = |key: &Key, row: &Row<T::State>| {
            T::idle_since(key, row, retention).is_some_and(|since| since <= now)
        };
        let rows = T::table(self).iter().filter(|(key, row)| is_idle(key, row));
        let idle: Vec<Key> = rows.map(|(key, _)| key.clone()).collect();
        for key in &idle {
            self.remove::<T>(key);
            if let Some(queue) = self.responses.get_mut(key.namespace()) {
                queue.remove(key);
            }
        }
        idle.len() as u64
    }
}

#[async_trait]
impl<T: Table> Store<T> for MemoryStore {
    async fn load(&self, _lane: usize, keys: &[Key]) -> Result<Loaded<T::State>, StoreError> {
        let mut tables = self.tables();
        let floor = tables.floor;
        let table = T::table(&mut tables);
        // Under the lock, so that time and rows are of the same moment.
        let moment = Moment::embedded(&self.clock, floor);
        let rows = keys.iter().map(|key| table.get(key).cloned()).collect();
        Ok(Loaded { rows, moment })
    }

    async fn store(
        &self,
        _lane: usize,
        _moment: Moment,
        writes: Arc<[Write<T::State>]>,
    ) -> Vec<Stored> {
        let mut tables = self.tables();
        writes.iter().map(|write| tables.store::<T>(write)).collect()
    }

    async fn list(&self, query: ListQuery) -> Result<Listed<T::State>, StoreError> {
        let mut tables = self.tables();
        Ok(Listed { now: self.clock.now(), rows: tables.list::<T>(&query) })
    }
}

#[async_trait]
impl Backend for MemoryStore {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn lanes(&self) -> usize {
        1
    }

    fn stored_responses(&self) -> Option<usize> {
        Some(MAX_STORED_RESPONSES)
    }

    fn wake_path(&self) -> WakePath {
        WakePath::Local
    }

    async fn check(&self) -> Result<(), StoreError> {
        Ok(())
    }

    async fn clean_up(
        &self,
        retention: Duration,
        _after: Option<Cursor>,
    ) -> Result<Cleaned, StoreError> {
        let mut tables = self.tables();
        let now = plausible(self.clock.now())?;
        let deleted = tables.clean_up::<LeaseMachine>(retention, now)
            + tables.clean_up::<RecordMachine>(retention, now);
        Ok(Cleaned { deleted, next: None })
    }

    async fn close(&self) {}
}
