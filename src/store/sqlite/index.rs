//! Which row a key has, as far as the file's table of keys does not say it yet.
//!
//! Rows are added at the end of their table: a batch of new keys, which fall anywhere in the order
//! of keys, then goes to a few pages. The table of keys is in that order and cannot have that, so
//! new keys gather here first. Once there are enough, a round begins: each write takes a stretch of
//! them along, in order, so that several go to one page. When the round ends, the file notes up to
//! which row its table of keys is complete. What is missing then is read from the rows behind that
//! when the file is opened.

use crate::domain::ids::Key;
use crate::store::KeyMap;

/// How many new keys gather before a round: several for each page of a million keys.
const GATHERED: usize = 65_536;
/// The most keys that one write takes along. No write adds more, so what gathers is bounded.
pub(super) const STRETCH: usize = 512;

/// The new keys of one table.
#[derive(Debug)]
pub(super) struct Index {
    /// The numbers of the rows of those keys that are not in the table of keys.
    recent: KeyMap<i64>,
    /// The number of the next row.
    next: i64,
    /// What is left of the round, the next keys last.
    round: Vec<(Key, i64)>,
    /// When the round ends, the table of keys has all rows up to this number.
    complete: i64,
}

/// New keys that go to the table of keys.
#[derive(Debug, Default)]
pub(super) struct Stretch {
    pub(super) keys: Vec<(Key, i64)>,
    /// If the round ends with it: the number up to which the table of keys has all rows.
    pub(super) complete: Option<i64>,
}

impl Index {
    /// `last` is the greatest number that was used.
    pub(super) fn new(recent: KeyMap<i64>, last: i64) -> Self {
        Self { recent, next: last + 1, round: Vec::new(), complete: 0 }
    }

    /// The number of a new key's row; `None`: the table of keys has it, if there is one.
    pub(super) fn number(&self, key: &Key) -> Option<i64> {
        self.recent.get(key).copied()
    }

    /// The new keys and the numbers of their rows, in no order.
    pub(super) fn recent(&self) -> impl Iterator<Item = (&Key, i64)> {
        self.recent.iter().map(|(key, number)| (key, *number))
    }

    /// The number that the next row will have.
    pub(super) fn next(&self) -> i64 {
        self.next
    }

    /// Rows were added, and the next one has this number.
    pub(super) fn added(&mut self, rows: impl Iterator<Item = (Key, i64)>, next: i64) {
        self.recent.extend(rows);
        self.next = next;
    }

    /// Begins a round, unless one is going on; how many stretches it has.
    pub(super) fn begin_round(&mut self) -> usize {
        if self.round.is_empty() {
            self.round = self.recent.iter().map(|(key, number)| (key.clone(), *number)).collect();
            self.round.sort_unstable_by(|(one, _), (other, _)| other.cmp(one));
            self.complete = self.next - 1;
        }
        self.round.len().div_ceil(STRETCH)
    }

    /// What the next write takes along.
    pub(super) fn due(&mut self) -> Stretch {
        if self.recent.len() >= GATHERED {
            self.begin_round();
        }
        if self.round.is_empty() {
            return Stretch::default();
        }
        let rest = self.round.len().saturating_sub(STRETCH);
        let keys = self.round[rest..].iter().rev().cloned().collect();
        Stretch { keys, complete: Some(self.complete).filter(|_| rest == 0) }
    }

    /// What was due is in the table of keys.
    pub(super) fn taken(&mut self, stretch: &Stretch) {
        self.round.truncate(self.round.len() - stretch.keys.len());
        for (key, _) in &stretch.keys {
            self.recent.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: i64) -> Key {
        Key::from_stored(format!("{:05}", number * 7_919 % 100_000))
    }

    fn with_new_keys(count: i64) -> Index {
        let mut index = Index::new(KeyMap::default(), 0);
        index.added((1..=count).map(|number| (key(number), number)), count + 1);
        index
    }

    #[test]
    fn nothing_is_due_before_enough_have_gathered() {
        assert!(with_new_keys(65_535).due().keys.is_empty());
        assert_eq!(with_new_keys(65_536).due().keys.len(), STRETCH);
    }

    #[test]
    fn a_round_takes_in_order_what_was_there_when_it_began_and_only_then_is_complete() {
        let mut index = with_new_keys(2_000);
        assert_eq!(index.begin_round(), 4);
        index.added([(key(2_001), 2_001)].into_iter(), 2_002);
        assert_eq!(index.begin_round(), 4, "a round that goes on begins again");
        let mut taken = Vec::new();
        for i in 0..4 {
            let stretch = index.due();
            assert_eq!(stretch.complete, Some(2_000).filter(|_| i == 3));
            index.taken(&stretch);
            taken.extend(stretch.keys);
        }
        assert!(index.due().keys.is_empty());
        assert!(taken.is_sorted());
        assert_eq!(taken.len(), 2_000);
        assert_eq!(index.recent().collect::<Vec<_>>(), [(&key(2_001), 2_001)]);
        assert!(taken.iter().all(|(key, _)| index.number(key).is_none()));
    }

    #[test]
    fn what_was_due_stays_so_until_it_is_taken() {
        let mut index = with_new_keys(70_000);
        let failed = index.due().keys;
        assert_eq!(index.due().keys, failed);
        assert_eq!(index.number(&failed[0].0), Some(failed[0].1));
    }
}
