//! Wake-ups within this process, and the lines of claims that wait.
//!
//! A wake-up is a hint: whoever gets one reads again through the engine and decides on that. None
//! is lost, since a [`Watch`] is taken before the first read and remembers every wake-up since.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, watch};

use crate::domain::ids::Key;
use crate::store::Waker;

/// The watched keys of one engine.
#[derive(Debug, Default)]
pub struct Hub {
    cells: Mutex<HashMap<u64, Vec<Arc<Cell>>>>,
}

/// One watched key.
#[derive(Debug)]
struct Cell {
    key: Key,
    wakes: watch::Sender<u64>,
    /// The revision that its watchers go by, 0 for no row, [`UNREAD`] before the first read.
    seen: AtomicI64,
    /// How many watch it; changed only under the lock of the hub's map.
    watchers: AtomicUsize,
    next_ticket: AtomicU64,
    /// Who waits for a turn, by ticket.
    line: Mutex<BTreeMap<u64, Arc<Notify>>>,
}

const UNREAD: i64 = -1;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Hub {
    /// Starts to watch a key.
    pub fn watch(self: &Arc<Self>, key: &Key) -> Watch {
        let mut cells = lock(&self.cells);
        let bucket = cells.entry(key.hash64()).or_default();
        let cell = if let Some(cell) = bucket.iter().find(|cell| cell.key == *key) {
            Arc::clone(cell)
        } else {
            let cell = Arc::new(Cell {
                key: key.clone(),
                wakes: watch::Sender::new(0),
                seen: AtomicI64::new(UNREAD),
                watchers: AtomicUsize::new(0),
                next_ticket: AtomicU64::new(0),
                line: Mutex::default(),
            });
            bucket.push(Arc::clone(&cell));
            cell
        };
        cell.watchers.fetch_add(1, Ordering::Relaxed);
        let wakes = cell.wakes.subscribe();
        Watch { hub: Arc::clone(self), cell, wakes }
    }

    /// The keys that are watched now.
    pub fn watched(&self) -> Vec<Key> {
        lock(&self.cells).values().flatten().map(|cell| cell.key.clone()).collect()
    }

    /// Tells what revision a watched key was read at, and wakes its watchers if they went by
    /// another.
    pub fn observe(&self, key: &Key, revision: i64) {
        let cells = lock(&self.cells);
        let bucket = cells.get(&key.hash64());
        if let Some(cell) = bucket.into_iter().flatten().find(|cell| cell.key == *key) {
            cell.observe(revision);
        }
    }
}

impl Waker for Hub {
    fn wake(&self, hash: u64) {
        let cells = lock(&self.cells);
        for cell in cells.get(&hash).into_iter().flatten() {
            cell.wake();
        }
    }

    fn wake_all(&self) {
        for cell in lock(&self.cells).values().flatten() {
            cell.wake();
        }
    }
}

impl Cell {
    fn wake(&self) {
        self.wakes.send_modify(|count| *count = count.wrapping_add(1));
    }

    fn observe(&self, revision: i64) {
        let before = self.seen.swap(revision, Ordering::AcqRel);
        if before != revision && before != UNREAD {
            self.wake();
        }
    }
}

/// A watch over one key; it ends when dropped.
#[derive(Debug)]
pub struct Watch {
    hub: Arc<Hub>,
    cell: Arc<Cell>,
    wakes: watch::Receiver<u64>,
}

impl Watch {
    /// Waits for the next wake-up, or returns at once if there was one since the last
    /// [`Self::mark_read`].
    pub async fn woken(&mut self) {
        // The sender lives as long as `self.cell`.
        let _ = self.wakes.changed().await;
    }

    /// To be called before each read: wake-ups so far are covered by it.
    pub fn mark_read(&mut self) {
        self.wakes.mark_unchanged();
    }

    /// To be called after each read, with the revision found.
    pub fn observe(&self, revision: i64) {
        self.cell.observe(revision);
    }

    /// Takes the last place in the key's line.
    pub fn stand_in_line(&self) -> Place {
        let turn = Arc::new(Notify::new());
        let ticket = self.cell.next_ticket.fetch_add(1, Ordering::Relaxed);
        lock(&self.cell.line).insert(ticket, Arc::clone(&turn));
        Place { cell: Arc::clone(&self.cell), ticket, turn }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut cells = lock(&self.hub.cells);
        if self.cell.watchers.fetch_sub(1, Ordering::Relaxed) > 1 {
            return;
        }
        let hash = self.cell.key.hash64();
        if let Some(bucket) = cells.get_mut(&hash) {
            bucket.retain(|cell| !Arc::ptr_eq(cell, &self.cell));
            if bucket.is_empty() {
                cells.remove(&hash);
            }
        }
    }
}

/// A place in the line of a key; leaving it, in whatever way, passes the turn on.
#[derive(Debug)]
pub struct Place {
    cell: Arc<Cell>,
    ticket: u64,
    turn: Arc<Notify>,
}

impl Place {
    /// Whether nobody is before.
    pub fn is_first(&self) -> bool {
        lock(&self.cell.line).first_key_value().is_some_and(|(first, _)| *first == self.ticket)
    }

    /// Waits until nobody is before.
    pub async fn first(&self) {
        while !self.is_first() {
            self.turn.notified().await;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut line = lock(&self.cell.line);
        line.remove(&self.ticket);
        if let Some((next, turn)) = line.first_key_value()
            && *next > self.ticket
        {
            turn.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::ids::{Kind, Namespace, Scope};

    fn key(name: &str) -> Key {
        Key::new(Kind::Lease, &Namespace::default_namespace(), &Scope::none(), name)
    }

    #[tokio::test]
    async fn a_wake_up_between_watch_and_wait_is_not_lost() {
        let hub = Arc::new(Hub::default());
        let mut watch = hub.watch(&key("a"));
        watch.mark_read();
        hub.wake(key("a").hash64());
        watch.woken().await;
    }

    #[tokio::test]
    async fn a_leaver_passes_its_turn_on() {
        let hub = Arc::new(Hub::default());
        let watch = hub.watch(&key("a"));
        let first = watch.stand_in_line();
        let second = watch.stand_in_line();
        let third = watch.stand_in_line();
        assert!(first.is_first() && !second.is_first());
        drop(second);
        assert!(!third.is_first());
        drop(first);
        third.first().await;
    }

    #[test]
    fn a_key_is_forgotten_when_its_watchers_leave_together() {
        let hub = Arc::new(Hub::default());
        for _ in 0..200 {
            let watches: Vec<Watch> = (0..8).map(|_| hub.watch(&key("a"))).collect();
            std::thread::scope(|scope| {
                for watch in watches {
                    scope.spawn(move || drop(watch));
                }
            });
            assert!(hub.watched().is_empty());
        }
    }

    #[test]
    fn a_key_is_forgotten_with_its_last_watch() {
        let hub = Arc::new(Hub::default());
        let one = hub.watch(&key("a"));
        let two = hub.watch(&key("a"));
        assert_eq!(hub.watched().len(), 1);
        drop(one);
        assert_eq!(hub.watched().len(), 1);
        drop(two);
        assert!(hub.watched().is_empty());
    }
}
