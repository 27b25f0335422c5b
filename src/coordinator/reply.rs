//! What the calls of a coordinator give back.

use std::sync::Arc;

use tokio::time::Instant;

use crate::domain::Machine;
use crate::domain::ids::Name;
use crate::domain::lease::Lease;
use crate::engine::{Answer, EngineError, Grant};
use crate::store::{ListQuery, Store, StoreClock, StoreError};

/// An outcome with the store's time behind it.
#[derive(Debug)]
pub struct Reply<T> {
    /// The machine's word.
    pub outcome: T,
    /// The store's time.
    pub clock: StoreClock,
    grant: Option<Box<dyn Keep>>,
}

/// A grant of whichever machine.
trait Keep: std::fmt::Debug + Send {
    fn keep(&mut self);
}

impl<M: Machine> Keep for Grant<M> {
    fn keep(&mut self) {
        Grant::keep(self);
    }
}

impl<T> Reply<T> {
    /// The answer to a command, which `choose` picks out of its machine's outcomes.
    pub(super) fn from_answer<M: Machine>(
        answer: Answer<M>,
        choose: impl FnOnce(M::Outcome) -> Option<T>,
    ) -> Result<Self, EngineError> {
        let Answer { outcome, clock, grant, .. } = answer;
        let grant = grant.map(|grant| grant as Box<dyn Keep>);
        match choose(outcome) {
            Some(outcome) => Ok(Self { outcome, clock, grant }),
            None => Err(EngineError::Internal("the machine answered another command".into())),
        }
    }

    /// Takes the outcome. Until then a new grant in it is taken back when the reply is dropped,
    /// as a caller that gave up does.
    pub fn keep(self) -> (T, StoreClock) {
        if let Some(mut grant) = self.grant {
            grant.keep();
        }
        (self.outcome, self.clock)
    }

    pub(super) fn map<U>(self, convert: impl FnOnce(T) -> U) -> Reply<U> {
        Reply { outcome: convert(self.outcome), clock: self.clock, grant: self.grant }
    }

    /// Refuses to tell of a lease that took so long to get that nothing is left of it.
    pub(super) fn still_running(
        self,
        lease: impl FnOnce(&T) -> Option<&Lease>,
    ) -> Result<Self, EngineError> {
        let now = self.clock.estimate();
        match lease(&self.outcome) {
            Some(lease) if lease.expires_at <= now => Err(EngineError::Unavailable(
                "the lease was granted or extended, but the store took longer than its ttl".into(),
            )),
            _ => Ok(self),
        }
    }
}

/// One stretch of a list.
#[derive(Debug)]
pub struct Page<S> {
    /// What the keys hold, in the order of their bytes.
    pub items: Vec<(Name, S)>,
    /// Where the next stretch begins, if there may be one.
    pub next: Option<Name>,
    /// The store's time.
    pub clock: StoreClock,
}

/// The most rows that one page of a list looks at.
pub(super) const MAX_SCAN: usize = 1_001;

/// Lists what `is_wanted` at the time of the listing. A page may be shorter than `limit`, even
/// empty, and not be the last.
pub(super) async fn list<M: Machine>(
    store: Arc<dyn Store<M>>,
    query: ListQuery,
    limit: usize,
    is_wanted: impl Fn(&M::State, StoreClock) -> bool + Send + 'static,
) -> Result<Page<M::State>, StoreError> {
    // In a task of its own: a caller that leaves must not tear the store's connection.
    let listing = tokio::spawn(async move {
        let sent = Instant::now().into_std();
        let listed = store.list(query).await?;
        let clock = StoreClock { now: listed.now, sent };
        let is_whole = listed.rows.len() < MAX_SCAN;
        let mut last = listed.rows.last().map(|(name, _)| name.clone());
        let mut items: Vec<(Name, M::State)> = listed
            .rows
            .into_iter()
            .map(|(name, row)| (name, row.state))
            .filter(|(_, state)| is_wanted(state, clock))
            .take(limit + 1)
            .collect();
        let is_cut = items.len() > limit;
        if is_cut {
            items.truncate(limit);
            last = items.last().map(|(name, _)| name.clone());
        }
        let next = last.filter(|_| is_cut || !is_whole);
        Ok(Page { items, next, clock })
    });
    listing.await.unwrap_or_else(|error| Err(StoreError::Away(error.to_string().into())))
}
