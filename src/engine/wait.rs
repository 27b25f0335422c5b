//! Calls that wait: watch, read, decide, sleep until something may have changed, read again.
//!
//! No call holds a connection while it sleeps. It is woken by the hub, at the end of the lease it
//! waits for, at its own deadline, or when the replica drains; and it answers only from a read
//! made after that.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use prometheus_client::metrics::gauge::Gauge;
use tokio::time::{Instant, sleep, sleep_until};

use super::hub::Place;
use super::{Answer, Engine, EngineError};
use crate::domain::Machine;
use crate::domain::ids::Key;
use crate::store::{Backend, Waker as _};

/// How much later than its wait a call may answer: less than the promised second, to leave time
/// for the reply.
const GRACE: Duration = Duration::from_millis(900);

/// Something to be asked again and again until its answer is final.
pub trait Question<M: Machine>: Send {
    /// What the caller gets.
    type Answer: Send;

    /// The next command. `is_first` is false while others stand before the caller in line.
    fn command(&mut self, is_first: bool) -> M::Command;

    /// Whether a command may give the caller something.
    fn may_grant(&self) -> bool;

    /// Whether a caller in line must look at every change, and not only when it is first: an answer
    /// may be for all of them.
    fn heeds_every_change(&self) -> bool {
        false
    }

    /// What the outcome means for the caller.
    fn judge(&mut self, answer: Answer<M>) -> Verdict<Self::Answer>;
}

/// The meaning of one outcome to a waiting call.
#[derive(Debug)]
pub enum Verdict<A> {
    /// The answer.
    Final(A),
    /// The answer only if time is out.
    Pending {
        /// What to say then.
        answer: A,
        /// When the store's time alone may change it.
        look_again_in: Duration,
    },
}

impl<M: Machine> Engine<M> {
    /// Asks until the answer is final or `wait` is over. With `in_line`, callers for one key take
    /// turns in the order of their arrival at this replica.
    ///
    /// # Errors
    ///
    /// See [`EngineError`]; [`EngineError::ShuttingDown`] to all that wait when the replica drains.
    pub async fn wait<Q: Question<M>>(
        &self,
        key: &Key,
        mut question: Q,
        wait: Duration,
        in_line: bool,
    ) -> Result<Q::Answer, EngineError> {
        let deadline = Instant::now() + wait;
        let limit = deadline + GRACE;
        let mut watch = self.hub.watch(key);
        // After `watch`, so that it is dropped before it.
        let mut place = in_line.then(|| watch.stand_in_line());
        let _counted = CountedWaiter::new(&self.metrics.waiters);
        loop {
            let is_out_of_time = Instant::now() >= deadline;
            let is_first = is_out_of_time || place.as_ref().is_none_or(Place::is_first);
            watch.mark_read();
            let until = limit.min(Instant::now() + self.limits.request_timeout);
            let asking = self.submit(key, question.command(is_first), until);
            let answer = tokio::select! {
                answer = asking => answer?,
                error = self.drained(question.may_grant()) => return Err(error),
            };
            watch.observe(answer.revision);
            let (answer, look_again_in) = match question.judge(answer) {
                Verdict::Final(answer) => return Ok(answer),
                Verdict::Pending { answer, look_again_in } => (answer, look_again_in),
            };
            if is_out_of_time {
                return Ok(answer);
            }
            // At least a millisecond: the estimate of the store's time errs on the late side.
            let look_again = Instant::now() + look_again_in.min(wait).max(Duration::from_millis(1));
            tokio::select! {
                biased;
                () = self.draining.cancelled() => return Err(EngineError::ShuttingDown),
                () = watch.woken(), if is_first || question.heeds_every_change() => {}
                () = turn(place.as_mut()), if !is_first => {}
                () = sleep_until(look_again.min(deadline)), if is_first => {}
                () = sleep_until(deadline), if !is_first => {}
            }
        }
    }
}

impl<M: Machine> Engine<M> {
    /// Resolves when a call that is at the store must be answered because the replica drains. One
    /// that may be granted something has a moment to learn of it, and if it does not, cannot be
    /// told that nothing was applied.
    async fn drained(&self, may_grant: bool) -> EngineError {
        self.draining.cancelled().await;
        if !may_grant {
            return EngineError::ShuttingDown;
        }
        sleep(GRACE).await;
        EngineError::unavailable("this replica is shutting down")
    }
}

async fn turn(place: Option<&mut Place>) {
    match place {
        Some(place) => place.first().await,
        None => std::future::pending().await,
    }
}

struct CountedWaiter<'a>(&'a Gauge);

impl<'a> CountedWaiter<'a> {
    fn new(gauge: &'a Gauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for CountedWaiter<'_> {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Reads all watched keys every second or two, for the case that a wake-up was lost: its sender
/// may have died between its commit and its notification. A key that cannot be read wakes its
/// watchers too, so that they learn that the store is away.
pub(super) async fn safety_poll<M: Machine>(engine: Arc<Engine<M>>, backend: Arc<dyn Backend>) {
    loop {
        tokio::select! {
            () = sleep_until(Instant::now() + backend.wake_path().safety_poll()) => {}
            () = engine.draining.cancelled() => return,
        }
        let mut keys = engine.hub.watched();
        // The hub is shared by all engines.
        keys.retain(|key| key.kind().is_some_and(|kind| M::KINDS.contains(&kind)));
        let reads = keys.iter().map(|key| engine.ask(key, M::read()));
        for (key, answer) in keys.iter().zip(join_all(reads).await) {
            match answer {
                Ok(answer) => engine.hub.observe(key, answer.revision),
                Err(_) => engine.hub.wake(key.hash64()),
            }
        }
    }
}
