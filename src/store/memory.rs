//! Rows in this process' memory: for tests and throw-away use. A restart forgets everything.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;

use super::clock::{EmbeddedClock, TimeSource};
use super::{
    Backend, Cleaned, Cursor, Link, ListQuery, Listed, Loaded, Row, Store, StoreError, Stored,
    WakePath, Write,
};
use crate::domain::Machine;
use crate::domain::ids::{Key, Kind, Name, Namespace};
use crate::domain::lease::{Lease, LeaseMachine};
use crate::domain::time::Timestamp;

/// The store.
#[derive(Debug)]
pub struct MemoryStore {
    clock: EmbeddedClock,
    tables: Mutex<Tables>,
}

#[derive(Debug, Default)]
struct Tables {
    floor: i64,
    leases: BTreeMap<Key, Row<Lease>>,
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

fn store_rows<S: Clone>(
    table: &mut BTreeMap<Key, Row<S>>,
    floor: i64,
    writes: &[Write<S>],
) -> Vec<Stored> {
    writes
        .iter()
        .map(|write| {
            let is_above_floor = write.expected.is_some() || write.row.revision.get() > floor;
            let is_as_expected = table.get(&write.key).map(|row| row.revision) == write.expected;
            if !is_as_expected || !is_above_floor {
                return Stored::NotAccepted;
            }
            table.insert(write.key.clone(), write.row.clone());
            Stored::Accepted
        })
        .collect()
}

fn list_rows<S: Clone>(table: &BTreeMap<Key, Row<S>>, query: &ListQuery) -> Vec<(Name, Row<S>)> {
    let (lower, upper) = query.bounds();
    let key = |name: String| Key {
        kind: query.kind,
        namespace: query.namespace.clone(),
        name: Name::from_stored(name),
    };
    table
        .range(key(lower)..=key(upper))
        .filter(|(key, _)| query.after.as_ref() != Some(&key.name))
        .filter(|(key, _)| key.name.as_str().starts_with(&query.prefix))
        .take(query.limit)
        .map(|(key, row)| (key.name.clone(), row.clone()))
        .collect()
}

#[async_trait]
impl Store<LeaseMachine> for MemoryStore {
    async fn load(
        &self,
        _lane: usize,
        keys: &[Key],
    ) -> Result<Loaded<<LeaseMachine as Machine>::State>, StoreError> {
        let tables = self.tables();
        Ok(Loaded {
            // Under the lock, so that time and rows are of the same moment.
            now: self.clock.now(),
            rows: keys.iter().map(|key| tables.leases.get(key).cloned()).collect(),
            floor: tables.floor,
            link: Link::default(),
        })
    }

    async fn store(&self, _lane: usize, _link: Link, writes: &[Write<Lease>]) -> Vec<Stored> {
        let Tables { floor, leases } = &mut *self.tables();
        store_rows(leases, *floor, writes)
    }

    async fn list(&self, query: ListQuery) -> Result<Listed<Lease>, StoreError> {
        let tables = self.tables();
        Ok(Listed { now: self.clock.now(), rows: list_rows(&tables.leases, &query) })
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

    fn wake_path(&self) -> WakePath {
        WakePath::Local
    }

    async fn check(&self) -> Result<(), StoreError> {
        Ok(())
    }

    async fn clean_up(
        &self,
        retention: Duration,
        after: Option<Cursor>,
    ) -> Result<Cleaned, StoreError> {
        let mut tables = self.tables();
        let cutoff = self.clock.now().minus(retention);
        let Tables { floor, leases } = &mut *tables;
        let after = after.map(|Cursor(_, namespace, name)| Key {
            kind: Kind::Lease,
            namespace: Namespace::from_stored(namespace),
            name: Name::from_stored(name),
        });
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let looked_at: Vec<(Key, bool)> = leases
            .range((from, Bound::Unbounded))
            .take(Cursor::CHUNK)
            .map(|(key, row)| {
                let last_write = Timestamp::from_micros(row.revision.get());
                (key.clone(), row.state.idle_since(last_write) <= cutoff)
            })
            .collect();
        let mut deleted = 0;
        for (key, _) in looked_at.iter().filter(|(_, is_idle)| *is_idle) {
            if let Some(row) = leases.remove(key) {
                *floor = (*floor).max(row.revision.get());
                deleted += 1;
            }
        }
        let next = looked_at.last().filter(|_| looked_at.len() == Cursor::CHUNK).map(|(key, _)| {
            let namespace = key.namespace.as_str().to_owned();
            Cursor(key.kind as i16, namespace, key.name.as_str().to_owned())
        });
        Ok(Cleaned { deleted, next })
    }

    async fn close(&self) {}
}
