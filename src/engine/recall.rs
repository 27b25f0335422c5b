//! What a shard remembers of rows, to spare loads.
//!
//! What is remembered may be out of date: another replica may have written since. So it serves
//! only where the decision is a write, which the store checks; whatever a refusal rests on is
//! loaded. A key that was never met is taken to have no row, for the same reason.

use super::KeyMap;
use crate::domain::Machine;
use crate::domain::ids::Key;
use crate::domain::version::Version;
use crate::store::{Link, Row};

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
