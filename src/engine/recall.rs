//! What a shard remembers of rows, to spare loads.
//!
//! What is remembered may be out of date: another replica may have written since. So it serves
//! only where the decision is a write, which the store checks; whatever a refusal rests on is
//! loaded. A key that was never met is taken to have no row, for the same reason.

use crate::domain::Machine;
use crate::domain::ids::Key;
use crate::domain::version::Version;
use crate::store::{KeyMap, Link, Row};

/// How many rows one shard remembers, at least; at most twice as many.
const CAPACITY: usize = 8_192;
/// How many writes the share of right guesses is taken over, roughly.
const WINDOW: f32 = 128.0;
/// Below this share of right guesses, guessing costs more than it spares.
const WORTHWHILE: f32 = 0.5;

/// What a key is taken to hold.
#[derive(Debug)]
pub(super) enum Guess<'a, S> {
    /// This, or nothing.
    Row(Option<&'a Row<S>>),
    /// Something, that was not kept.
    Unclear,
}

/// The memory of one shard.
#[derive(Debug)]
pub(super) struct Recall<M: Machine> {
    /// The link that all this came over; `None` where the store must be asked each time, so that
    /// nothing is remembered.
    link: Option<Link>,
    /// `None` for a row that is not worth keeping.
    young: KeyMap<Option<Row<M::State>>>,
    /// What was young before; forgotten when `young` is full again.
    old: KeyMap<Option<Row<M::State>>>,
    /// The share of guesses that were, or would have been, right.
    luck: f32,
}

impl<M: Machine> Recall<M> {
    pub(super) fn new() -> Self {
        let (young, old) = (KeyMap::default(), KeyMap::default());
        Self { link: None, young, old, luck: 1.0 }
    }

    /// Forgets everything that came over another link: that may have led to another server.
    pub(super) fn follow(&mut self, link: Link) {
        if self.link != Some(link) {
            self.link = Some(link);
            self.young.clear();
            self.old.clear();
        }
    }

    pub(super) fn is_worthwhile(&self) -> bool {
        self.luck >= WORTHWHILE
    }

    pub(super) fn guess(&self, key: &Key) -> Guess<'_, M::State> {
        match self.young.get(key).or_else(|| self.old.get(key)) {
            None => Guess::Row(None),
            Some(Some(row)) => Guess::Row(Some(row)),
            Some(None) => Guess::Unclear,
        }
    }

    /// Whether a guess would have been right, where there is this.
    pub(super) fn would_be_right(&self, key: &Key, found: Option<Version>) -> bool {
        match self.guess(key) {
            Guess::Row(row) => row.map(|row| row.revision) == found,
            Guess::Unclear => true,
        }
    }

    /// Counts one guess.
    pub(super) fn count(&mut self, is_right: bool) {
        self.luck += (f32::from(u8::from(is_right)) - self.luck) / WINDOW;
    }

    /// Remembers what a key holds.
    pub(super) fn remember(&mut self, key: &Key, row: &Row<M::State>) {
        if self.link.is_none() {
            return;
        }
        if self.young.len() >= CAPACITY {
            std::mem::swap(&mut self.young, &mut self.old);
            self.young.clear();
        }
        let row = M::is_worth_remembering(&row.state).then(|| row.clone());
        self.young.insert(key.clone(), row);
    }

    /// Forgets a key that holds nothing, or something unknown.
    pub(super) fn forget(&mut self, key: &Key) {
        self.young.remove(key);
        self.old.remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::ids::{Kind, Namespace, OwnerId, Scope};
    use crate::domain::lease::{Lease, LeaseMachine, Status};
    use crate::domain::time::{Timestamp, Ttl};

    fn key(number: usize) -> Key {
        let name = number.to_string();
        Key::new(Kind::Lease, &Namespace::default_namespace(), &Scope::none(), &name)
    }

    fn row(metadata: Option<String>) -> Row<Lease> {
        let revision = Version::from_stored(1);
        let at = Timestamp::from_micros(1);
        let state = Lease {
            version: revision,
            status: Status::Held,
            owner_id: OwnerId::from_stored("a"),
            attempt_id: None,
            grant_id: 1,
            ttl: Ttl::from_stored(1_000),
            acquired_at: at,
            expires_at: at,
            recovered_from: None,
            metadata,
        };
        Row { revision, state }
    }

    fn following(link: u64) -> Recall<LeaseMachine> {
        let mut recall = Recall::new();
        recall.follow(Link(link));
        recall
    }

    #[test]
    fn what_came_over_another_link_is_forgotten() {
        let mut recall = following(1);
        recall.remember(&key(1), &row(None));
        recall.follow(Link(1));
        assert!(matches!(recall.guess(&key(1)), Guess::Row(Some(_))));
        recall.follow(Link(2));
        assert!(matches!(recall.guess(&key(1)), Guess::Row(None)));
    }

    #[test]
    fn a_large_row_is_known_to_be_there_and_not_kept() {
        let mut recall = following(1);
        recall.remember(&key(1), &row(Some("x".repeat(4_000))));
        assert!(matches!(recall.guess(&key(1)), Guess::Unclear));
    }

    #[test]
    fn the_newest_rows_are_remembered_and_the_memory_is_bounded() {
        let mut recall = following(1);
        for number in 0..5 * CAPACITY {
            recall.remember(&key(number), &row(None));
        }
        for number in 4 * CAPACITY..5 * CAPACITY {
            assert!(matches!(recall.guess(&key(number)), Guess::Row(Some(_))));
        }
        assert!(recall.young.len() + recall.old.len() <= 2 * CAPACITY);
    }

    #[test]
    fn guesses_that_are_mostly_wrong_are_given_up_until_they_would_be_right() {
        let mut recall = following(1);
        (0..200).for_each(|_| recall.count(false));
        assert!(!recall.is_worthwhile());
        (0..200).for_each(|_| recall.count(true));
        assert!(recall.is_worthwhile());
    }
}
