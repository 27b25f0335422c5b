//! Commands in, answers out: group commit by compare-and-swap.
//!
//! Each key belongs to one shard of a replica, and each shard works in batches: it takes all that
//! has queued up, loads the rows of all keys concerned in one statement, runs each key's commands
//! in their order through the machine, and writes each changed row once. Rows whose commands will
//! end in a write, going by what the shard remembers, are not loaded. While one batch is at the
//! store the next one gathers, so batching adds no delay: a lone request meets one round trip or
//! two, and a thousand callers on one hot key share one row read. A shard whose last commands came
//! together lets tasks that are ready run before it goes on: most of them submit more.
//!
//! Replicas need no agreement beyond the guarded write. Of two that decide on the same row at
//! once, one is accepted; the other loads again and decides anew.
//!
//! * [`batch`]: the shard loop and what happens when the store fails.
//! * [`recall`]: what spares a load.
//! * [`hub`]: wake-ups and lines.
//! * [`wait`]: calls that wait for a change.

mod batch;
mod hub;
mod recall;
mod wait;

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use hub::Hub;
pub use wait::{Question, Verdict};

use crate::domain::Machine;
use crate::domain::ids::Key;
use crate::shutdown::spawn_vital;
use crate::store::{Backend, Store, StoreClock};
use crate::telemetry::Metrics;
use batch::{Pending, Shard};

/// Time limits of an engine.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How long a call that does not wait may take.
    pub request_timeout: Duration,
    /// How long one call to the store may take before its link is dropped.
    pub store_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            request_timeout: Duration::from_secs(5),
            store_timeout: Duration::from_millis(2_500),
        }
    }
}

/// Why a command has no outcome.
#[derive(Clone, Debug, thiserror::Error)]
pub enum EngineError {
    /// The store did not answer in time, or its answer was lost: the command may have been
    /// applied.
    #[error("the outcome is not known: {0}")]
    Unavailable(Arc<str>),
    /// This process is ending; certainly nothing was applied.
    #[error("this replica is shutting down")]
    ShuttingDown,
    /// The store refuses this command for good, which the rules should have prevented.
    #[error("the store refused the write: {0}")]
    Internal(Arc<str>),
}

impl EngineError {
    fn unavailable(reason: impl Into<Arc<str>>) -> Self {
        Self::Unavailable(reason.into())
    }
}

/// What became of a command.
#[derive(Debug)]
pub struct Answer<M: Machine> {
    /// The machine's word.
    pub outcome: M::Outcome,
    /// The store's time behind it.
    pub clock: StoreClock,
    /// The row's revision that it rests on; 0 for no row.
    pub revision: i64,
    /// Set for a grant that would be lost with this answer.
    pub grant: Option<Box<Grant<M>>>,
}

/// A new grant on its way to the caller. Dropped anywhere on that way, it is taken back, so that
/// a key is not held for somebody who has gone.
#[derive(Debug)]
pub struct Grant<M: Machine> {
    undo: Option<Pending<M>>,
    shard: mpsc::UnboundedSender<Pending<M>>,
}

impl<M: Machine> Grant<M> {
    /// The caller has it.
    pub fn keep(&mut self) {
        self.undo = None;
    }

    /// Nobody will have it: what takes it back.
    fn give_up(&mut self) -> Option<Pending<M>> {
        self.undo.take()
    }
}

impl<M: Machine> Drop for Grant<M> {
    fn drop(&mut self) {
        if let Some(undo) = self.undo.take() {
            // Fails only after the engine has closed; the lease then ends by its ttl.
            let _ = self.shard.send(undo);
        }
    }
}

/// Runs the commands of one machine on one store.
#[derive(Debug)]
pub struct Engine<M: Machine> {
    shards: Vec<mpsc::UnboundedSender<Pending<M>>>,
    hub: Arc<Hub>,
    limits: Limits,
    metrics: Arc<Metrics>,
    /// Ends what waits.
    draining: CancellationToken,
    /// Ends the shards once they have nothing left to do.
    closing: CancellationToken,
    tasks: TaskTracker,
}

impl<M: Machine> Engine<M> {
    /// Starts the shards. `hub` receives the wake-ups that come from other replicas.
    pub fn start(
        store: &Arc<dyn Store<M>>,
        backend: Arc<dyn Backend>,
        hub: Arc<Hub>,
        limits: Limits,
        metrics: &Arc<Metrics>,
    ) -> Arc<Self> {
        let closing = CancellationToken::new();
        let tasks = TaskTracker::new();
        let shards = (0..backend.lanes())
            .map(|lane| {
                let (sender, incoming) = mpsc::unbounded_channel();
                let shard = Shard::new(
                    lane,
                    Arc::clone(store),
                    Arc::clone(&backend),
                    Arc::clone(&hub),
                    limits,
                    Arc::clone(metrics),
                    sender.clone(),
                );
                spawn_vital(&tasks, shard.run(incoming, closing.clone()));
                sender
            })
            .collect();
        let engine = Arc::new(Self {
            shards,
            hub,
            limits,
            metrics: Arc::clone(metrics),
            draining: CancellationToken::new(),
            closing,
            tasks,
        });
        let poll = wait::safety_poll(Arc::clone(&engine), backend);
        spawn_vital(&engine.tasks, poll);
        engine
    }

    /// Runs one command; `deadline` bounds the wait for its answer.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn submit(
        &self,
        key: &Key,
        command: M::Command,
        deadline: Instant,
    ) -> Result<Answer<M>, EngineError> {
        let answer = self.send(key.clone(), command, deadline);
        receive(answer, deadline).await
    }

    /// Runs one command within the request timeout.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn ask(&self, key: &Key, command: M::Command) -> Result<Answer<M>, EngineError> {
        self.submit(key, command, self.deadline()).await
    }

    /// Runs commands, each by itself, within the request timeout; answers come in the same order.
    pub async fn ask_many(
        &self,
        commands: impl IntoIterator<Item = (Key, M::Command)>,
    ) -> Vec<Result<Answer<M>, EngineError>> {
        let deadline = self.deadline();
        let sent: Vec<_> =
            commands.into_iter().map(|(key, command)| self.send(key, command, deadline)).collect();
        let mut answers = Vec::with_capacity(sent.len());
        for answer in sent {
            answers.push(receive(answer, deadline).await);
        }
        answers
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.limits.request_timeout
    }

    /// Puts a command into its shard's queue: where its answer will be.
    fn send(&self, key: Key, command: M::Command, deadline: Instant) -> Awaited<M> {
        let (reply, answer) = oneshot::channel();
        let shard = self.shard(&key);
        let pending = Pending::new(key, command, deadline, Some(reply));
        if shard.send(pending).is_err() { Err(EngineError::ShuttingDown) } else { Ok(answer) }
    }

    /// Answers every waiting call with [`EngineError::ShuttingDown`], now and from here on.
    pub fn drain(&self) {
        self.draining.cancel();
    }

    /// Whether [`Self::drain`] was called.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining.is_cancelled()
    }

    /// Finishes all commands that were submitted, then ends the shards.
    pub async fn close(&self) {
        self.draining.cancel();
        self.closing.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    fn shard(&self, key: &Key) -> &mpsc::UnboundedSender<Pending<M>> {
        let index = key.hash64() % self.shards.len() as u64;
        #[expect(clippy::cast_possible_truncation, reason = "below the number of shards")]
        &self.shards[index as usize]
    }
}

/// Where the answer to a command will be, if the engine takes it.
type Awaited<M> = Result<oneshot::Receiver<Result<Answer<M>, EngineError>>, EngineError>;

async fn receive<M: Machine>(
    answer: Awaited<M>,
    deadline: Instant,
) -> Result<Answer<M>, EngineError> {
    match timeout_at(deadline, answer?).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(_)) => Err(EngineError::unavailable("the replica stopped")),
        Err(_) => Err(EngineError::unavailable("the store did not answer in time")),
    }
}
