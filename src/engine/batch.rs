//! The shard loop: gather, load what must be loaded, decide, store, answer.
//!
//! What the store's failures mean here:
//!
//! | the store | was it applied? | then |
//! | --- | --- | --- |
//! | does not accept a write | no | decide again on a fresh load |
//! | is away, or a load fails | no | try again; once it has been away for a while, fail at once |
//! | refuses a statement | no | each row by itself, so that a bad one fails alone |
//! | breaks off during a write | unknown | load again and see; an answer that denies is no longer certain |
//!
//! Nothing here sleeps while other keys have work: a key that must wait is parked, with all
//! commands that arrive for it, and the loop goes on.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::recall::{Guess, Recall};
use super::{Answer, EngineError, Grant, Hub, Limits};
use crate::domain::ids::Key;
use crate::domain::version::Version;
use crate::domain::{At, Decision, Machine};
use crate::store::{
    Backend, KeyMap, Loaded, Moment, Row, Store, StoreClock, StoreError, Stored, Waker as _, Write,
};
use crate::telemetry::{FailureLabels, Metrics};

/// The most commands in one batch.
const MAX_BATCH: usize = 8_192;
/// The most keys in one load, so that a statement stays short.
const MAX_KEYS: usize = 5_000;
/// The most bytes of commands in one batch; a single command may be larger.
const MAX_BYTES: usize = 4 << 20;
/// How long the engine goes on trying to take back a grant that nobody received. The lease ends
/// by itself if the store stays away for longer.
const UNDO_FOR: Duration = Duration::from_secs(30);
/// How long commands wait for a store that is away before they are refused at once.
const PATIENCE: Duration = Duration::from_secs(1);
/// The longest pause before a parked key is tried again.
const MAX_PAUSE: Duration = Duration::from_millis(50);

type Reply<M> = oneshot::Sender<Result<Answer<M>, EngineError>>;

/// A command in a queue.
#[derive(Debug)]
pub(super) struct Pending<M: Machine> {
    key: Key,
    command: M::Command,
    deadline: Instant,
    /// `None` for what the engine asks of itself.
    reply: Option<Reply<M>>,
    /// An earlier try may have been applied.
    uncertain: bool,
}

impl<M: Machine> Pending<M> {
    pub(super) fn new(
        key: Key,
        command: M::Command,
        deadline: Instant,
        reply: Option<Reply<M>>,
    ) -> Self {
        Self { key, command, deadline, reply, uncertain: false }
    }

    /// The command that takes back what this one may have granted.
    fn undo(&self) -> Option<Self> {
        let command = M::undo(&self.command)?;
        let deadline = Instant::now() + UNDO_FOR;
        Some(Self::new(self.key.clone(), command, deadline, None))
    }

    fn fail(self, error: EngineError) {
        if let Some(reply) = self.reply {
            let _ = reply.send(Err(error));
        }
    }

    /// What is left to do for this command: itself, its undoing, or nothing.
    fn still_wanted(self, now: Instant) -> Option<Self> {
        let caller_left = self.reply.as_ref().is_some_and(oneshot::Sender::is_closed);
        let is_void = caller_left && M::is_void_without_caller(&self.command);
        if !is_void && now < self.deadline {
            return Some(self);
        }
        let undo = if self.uncertain { self.undo() } else { None };
        self.fail(EngineError::unavailable("the store did not answer in time"));
        undo
    }
}

/// The commands on one key, in their order.
struct Group<M: Machine> {
    key: Key,
    commands: Vec<Pending<M>>,
    /// Failed tries in a row.
    tries: u32,
    /// Not to be tried before.
    due: Instant,
}

/// What a group's commands come to if a write is accepted.
struct Decided<M: Machine> {
    tries: u32,
    /// In order.
    answers: Vec<(Pending<M>, M::Outcome, i64)>,
    wakes: bool,
    /// Whether the row was remembered, not loaded.
    is_guess: bool,
}

/// What a batch comes to: decisions, and the writes that they wait for, in the same order.
struct Plan<M: Machine> {
    decided: Vec<Decided<M>>,
    writes: Vec<Write<M::State>>,
}

/// A group, and what its key is taken to hold.
type Guessed<M> = (Group<M>, Option<Row<<M as Machine>::State>>);

/// A batch before anything is loaded.
struct Sorted<M: Machine> {
    /// To be decided on what is remembered.
    guessed: Vec<Guessed<M>>,
    /// What the store could tell without being asked.
    known: Option<Moment>,
    /// To be loaded.
    asked: Vec<Group<M>>,
}

/// Whether the first command of a group is a write, on a row that is not certain.
fn is_write<M: Machine>(group: &Group<M>, row: Option<&Row<M::State>>, moment: Moment) -> bool {
    let (state, revision) = (row.map(|row| &row.state), row.map(|row| row.revision));
    // The store accepts the write up to `until`: before that, time must not change the answer.
    let end = state.and_then(M::changes_at).filter(|end| *end > moment.clock.now);
    let is_unsure = end.is_some_and(|end| moment.until.is_some_and(|until| end <= until));
    let stamp = Version::next(revision, moment.floor, moment.clock.now).filter(|_| !is_unsure);
    let first = group.commands.first();
    first.zip(stamp).is_some_and(|(pending, stamp)| {
        let at = At { now: moment.clock.now, stamp };
        matches!(M::apply(state, &pending.command, at), Decision::Write(..))
    })
}

pub(super) struct Shard<M: Machine> {
    lane: usize,
    store: Arc<dyn Store<M>>,
    backend: Arc<dyn Backend>,
    hub: Arc<Hub>,
    limits: Limits,
    metrics: Arc<Metrics>,
    sender: mpsc::UnboundedSender<Pending<M>>,
    backlog: VecDeque<Pending<M>>,
    parked: KeyMap<Group<M>>,
    recall: Recall<M>,
    /// Since when loads fail, and when the last one did.
    away: Option<(Instant, Instant)>,
}

impl<M: Machine> Shard<M> {
    pub(super) fn new(
        lane: usize,
        store: Arc<dyn Store<M>>,
        backend: Arc<dyn Backend>,
        hub: Arc<Hub>,
        limits: Limits,
        metrics: Arc<Metrics>,
        sender: mpsc::UnboundedSender<Pending<M>>,
    ) -> Self {
        Self {
            lane,
            store,
            backend,
            hub,
            limits,
            metrics,
            sender,
            backlog: VecDeque::new(),
            parked: KeyMap::default(),
            recall: Recall::new(),
            away: None,
        }
    }

    pub(super) async fn run(
        mut self,
        mut incoming: mpsc::UnboundedReceiver<Pending<M>>,
        closing: CancellationToken,
    ) {
        let mut received = Vec::new();
        let mut is_open = true;
        // Whether the last commands came together: a lone caller is not kept waiting for others.
        let mut is_busy = false;
        while is_open || !self.backlog.is_empty() || !self.parked.is_empty() {
            if self.backlog.is_empty() {
                let next_due = self.parked.values().map(|group| group.due).min();
                let due = next_due.unwrap_or_else(Instant::now);
                tokio::select! {
                    biased;
                    count = incoming.recv_many(&mut received, MAX_BATCH), if is_open => {
                        is_open = count > 0;
                        if is_busy {
                            // Whoever is ready to submit does so first, and spares a batch.
                            yield_now().await;
                            while received.len() < MAX_BATCH
                                && let Ok(pending) = incoming.try_recv()
                            {
                                received.push(pending);
                            }
                        }
                        is_busy = received.len() > 1;
                    }
                    () = sleep_until(due), if next_due.is_some() => {}
                    // What was sent before this is still received.
                    () = closing.cancelled(), if !incoming.is_closed() => incoming.close(),
                }
                self.backlog.extend(received.drain(..));
            }
            let groups = self.gather();
            if !groups.is_empty() {
                self.process(groups).await;
            }
        }
    }

    /// Takes what can be worked on now, grouped by key.
    fn gather(&mut self) -> Vec<Group<M>> {
        let now = Instant::now();
        let room = self.backlog.len().min(MAX_KEYS);
        let mut groups: Vec<Group<M>> = Vec::with_capacity(room);
        let mut index: KeyMap<usize> = KeyMap::default();
        index.reserve(room);
        let due: Vec<Key> = self
            .parked
            .iter()
            .filter(|(_, group)| group.due <= now)
            .take(MAX_KEYS)
            .map(|(key, _)| key.clone())
            .collect();
        for key in due {
            if let Some(group) = self.parked.remove(&key) {
                index.insert(key, groups.len());
                groups.push(group);
            }
        }
        let mut bytes = 0;
        while groups.len() < MAX_KEYS
            && bytes < MAX_BYTES
            && let Some(pending) = self.backlog.pop_front()
        {
            bytes += M::bytes(&pending.command);
            if let Some(group) = self.parked.get_mut(&pending.key) {
                group.commands.push(pending);
                continue;
            }
            match index.entry(pending.key.clone()) {
                Entry::Occupied(at) => groups[*at.get()].commands.push(pending),
                Entry::Vacant(at) => {
                    at.insert(groups.len());
                    let key = pending.key.clone();
                    groups.push(Group { key, commands: vec![pending], tries: 0, due: now });
                }
            }
        }
        for group in &mut groups {
            let commands = std::mem::take(&mut group.commands);
            group.commands =
                commands.into_iter().filter_map(|command| command.still_wanted(now)).collect();
        }
        groups.retain(|group| !group.commands.is_empty());
        groups
    }

    async fn process(&mut self, groups: Vec<Group<M>>) {
        let commands: usize = groups.iter().map(|group| group.commands.len()).sum();
        #[expect(clippy::cast_precision_loss, reason = "batches are small")]
        {
            self.metrics.batch_commands.observe(commands as f64);
            self.metrics.batch_keys.observe(groups.len() as f64);
        }
        let count = groups.len();
        let Sorted { guessed, known, asked } = self.sort_out(groups).await;
        let (decided, writes) = (Vec::with_capacity(count), Vec::with_capacity(count));
        let mut plan = Plan { decided, writes };
        let moment = match (known, asked.is_empty()) {
            (Some(moment), true) => moment,
            _ => match self.load(&asked).await {
                Ok(Loaded { rows, moment }) => {
                    if self.away.take().is_some() {
                        tracing::info!(lane = self.lane, "the store answers again");
                    }
                    // What this store tells without being asked, it could not before its first load.
                    if known.is_some() || self.known().await.is_some() {
                        self.recall.follow(moment.link);
                    }
                    for (group, row) in asked.into_iter().zip(rows) {
                        self.decide_loaded(group, row, moment, &mut plan);
                    }
                    moment
                }
                Err(error) => {
                    let guessed = guessed.into_iter().map(|(group, _)| group);
                    return self.load_failed(guessed.chain(asked).collect(), &error);
                }
            },
        };
        for (group, row) in guessed {
            if known.is_some_and(|known| known.link == moment.link) {
                self.decide(group, row, moment, true, &mut plan);
            } else {
                self.park(Group { tries: 1, ..group });
            }
        }
        let Plan { decided, writes } = plan;
        if writes.is_empty() {
            return;
        }
        let writes: Arc<[Write<M::State>]> = writes.into();
        let results = self.store_writes(moment, Arc::clone(&writes)).await;
        for ((decided, write), result) in decided.into_iter().zip(&*writes).zip(results) {
            self.settle(decided, write, result, moment.clock);
        }
    }

    /// Parts the groups whose first command, going by what is remembered, ends in a write, from
    /// those that must be loaded.
    async fn sort_out(&mut self, groups: Vec<Group<M>>) -> Sorted<M> {
        let mut sorted = Sorted { guessed: Vec::new(), known: None, asked: Vec::new() };
        if self.recall.is_worthwhile() {
            sorted.known = self.known().await;
        }
        let Some(moment) = sorted.known else {
            return Sorted { asked: groups, ..sorted };
        };
        self.recall.follow(moment.link);
        for group in groups {
            match self.recall.guess(&group.key) {
                Guess::Row(row) if group.tries == 0 && is_write(&group, row, moment) => {
                    let row = row.cloned();
                    sorted.guessed.push((group, row));
                }
                _ => sorted.asked.push(group),
            }
        }
        sorted
    }

    async fn known(&self) -> Option<Moment> {
        let known = timeout(self.limits.store_timeout, self.store.known(self.lane)).await;
        known.unwrap_or_default()
    }

    async fn load(&mut self, groups: &[Group<M>]) -> Result<Loaded<M::State>, StoreError> {
        let keys: Vec<Key> = groups.iter().map(|group| group.key.clone()).collect();
        let started = std::time::Instant::now();
        let loaded = timeout(self.limits.store_timeout, self.store.load(self.lane, &keys)).await;
        self.metrics.store_call("load", started.elapsed());
        loaded.unwrap_or_else(|_| Err(StoreError::Away("the store did not answer in time".into())))
    }

    fn decide_loaded(
        &mut self,
        group: Group<M>,
        row: Option<Row<M::State>>,
        moment: Moment,
        plan: &mut Plan<M>,
    ) {
        let found = row.as_ref().map(|row| row.revision);
        let is_as_remembered = self.recall.would_be_right(&group.key, found);
        match &row {
            Some(row) => self.recall.remember(&group.key, row),
            None => self.recall.forget(&group.key),
        }
        let before = plan.writes.len();
        self.decide(group, row, moment, false, plan);
        if plan.writes.len() > before {
            self.recall.count(is_as_remembered);
        }
    }

    /// Runs a group's commands. Answers at once what does not depend on a write, and plans the
    /// rest with the write that it depends on. What a guess would refuse must be loaded first.
    fn decide(
        &mut self,
        group: Group<M>,
        row: Option<Row<M::State>>,
        moment: Moment,
        is_guess: bool,
        plan: &mut Plan<M>,
    ) {
        let clock = moment.clock;
        let expected = row.as_ref().map(|row| row.revision);
        let mut current = row;
        let mut answers = Vec::with_capacity(group.commands.len());
        let mut unread = Vec::new();
        let mut is_written = false;
        let mut wakes = false;
        let started = Instant::now();
        for pending in group.commands {
            // Callers may have left during the load.
            let Some(pending) = pending.still_wanted(started) else {
                continue;
            };
            if !unread.is_empty() {
                unread.push(pending);
                continue;
            }
            let before = current.as_ref();
            let revision = before.map(|row| row.revision);
            let Some(stamp) = Version::next(revision, moment.floor, moment.clock.now) else {
                pending.fail(EngineError::unavailable(
                    "the store's clock, or this key's version, is beyond what can be counted",
                ));
                continue;
            };
            let at = At { now: moment.clock.now, stamp };
            match M::apply(before.map(|row| &row.state), &pending.command, at) {
                Decision::Keep(_) if is_guess && !is_written => unread.push(pending),
                Decision::Keep(outcome) => {
                    let revision = revision.map_or(0, Version::get);
                    if is_written {
                        answers.push((pending, outcome, revision));
                    } else {
                        self.answer(pending, outcome, revision, clock);
                    }
                }
                Decision::Write(state, outcome) => {
                    wakes |= M::wakes(before.map(|row| &row.state), &state);
                    current = Some(Row { revision: stamp, state });
                    is_written = true;
                    answers.push((pending, outcome, stamp.get()));
                }
            }
        }
        let (key, tries) = (group.key, group.tries);
        if !unread.is_empty() {
            let commands = unread;
            return self.park(Group { key, commands, tries: 1, due: started });
        }
        if let Some(row) = current.filter(|_| is_written) {
            plan.writes.push(Write { key, expected, row });
            plan.decided.push(Decided { tries, answers, wakes, is_guess });
        }
    }

    async fn store_writes(&self, moment: Moment, writes: Arc<[Write<M::State>]>) -> Vec<Stored> {
        let (started, count) = (std::time::Instant::now(), writes.len());
        let stored = self.store.store(self.lane, moment, writes);
        let results = timeout(self.limits.store_timeout, stored).await;
        self.metrics.store_call("store", started.elapsed());
        results.unwrap_or_else(|_| {
            let error = StoreError::Unknown("the store did not confirm a write in time".into());
            vec![Stored::Failed(error); count]
        })
    }

    fn settle(
        &mut self,
        decided: Decided<M>,
        write: &Write<M::State>,
        result: Stored,
        clock: StoreClock,
    ) {
        let is_accepted = matches!(result, Stored::Accepted);
        if decided.is_guess && matches!(result, Stored::Accepted | Stored::NotAccepted) {
            self.recall.count(is_accepted);
        }
        if is_accepted {
            self.recall.remember(&write.key, &write.row);
        } else {
            self.recall.forget(&write.key);
        }
        match result {
            Stored::Accepted => {
                if decided.wakes {
                    self.wake(&write.key);
                }
                for (pending, outcome, revision) in decided.answers {
                    self.answer(pending, outcome, revision, clock);
                }
            }
            Stored::NotAccepted => {
                self.metrics.write_retries.inc();
                self.retry(decided, write, false);
            }
            Stored::Failed(StoreError::Refused { message, is_transient: false }) => {
                self.count_failure("store", "refused", &message);
                for (pending, ..) in decided.answers {
                    pending.fail(EngineError::Internal(Arc::clone(&message)));
                }
            }
            Stored::Failed(StoreError::Refused { message, is_transient: true }) => {
                self.count_failure("store", "refused", &message);
                self.retry(decided, write, false);
            }
            Stored::Failed(StoreError::Away(message)) => {
                self.count_failure("store", "away", &message);
                self.retry(decided, write, false);
            }
            Stored::Failed(StoreError::Unknown(message)) => {
                self.count_failure("store", "unknown", &message);
                // Waiters elsewhere must look, too: it may have been applied.
                if decided.wakes {
                    self.wake(&write.key);
                }
                self.retry(decided, write, true);
            }
        }
    }

    /// Puts the commands back to the head of their key's queue.
    fn retry(&mut self, decided: Decided<M>, write: &Write<M::State>, is_unknown: bool) {
        let commands = decided
            .answers
            .into_iter()
            .map(|(pending, ..)| Pending { uncertain: pending.uncertain || is_unknown, ..pending })
            .collect();
        let (key, tries) = (write.key.clone(), decided.tries + 1);
        self.park(Group { key, commands, tries, due: Instant::now() });
    }

    fn load_failed(&mut self, groups: Vec<Group<M>>, error: &StoreError) {
        let failure = match error {
            StoreError::Refused { .. } => "refused",
            StoreError::Away(_) | StoreError::Unknown(_) => "away",
        };
        self.count_failure("load", failure, &error.to_string());
        let now = Instant::now();
        let since = self.away_since().unwrap_or(now);
        self.away = Some((since, now));
        let away_for = now - since;
        for mut group in groups {
            if away_for > PATIENCE {
                let commands = std::mem::take(&mut group.commands);
                for pending in commands {
                    let undo = if pending.uncertain { pending.undo() } else { None };
                    if pending.reply.is_some() {
                        pending
                            .fail(EngineError::unavailable(format!("the store is away: {error}")));
                        group.commands.extend(undo);
                    } else {
                        group.commands.push(pending);
                    }
                }
            }
            group.tries += 1;
            if !group.commands.is_empty() {
                self.park(group);
            }
        }
    }

    /// Since when loads fail. A failure of long ago, with no load since, says nothing of now.
    fn away_since(&self) -> Option<Instant> {
        self.away.filter(|(_, last)| last.elapsed() < PATIENCE * 2).map(|(since, _)| since)
    }

    /// Keeps a group until it is due again: at once after the first failure, which is mostly a
    /// lost race, then after growing pauses.
    fn park(&mut self, mut group: Group<M>) {
        let pause = match group.tries {
            0 | 1 => Duration::ZERO,
            tries => {
                let pause = Duration::from_millis(1 << (tries - 2).min(8)).min(MAX_PAUSE);
                pause.mul_f64(rand::random_range(0.5..1.0))
            }
        };
        group.due = Instant::now() + pause;
        self.parked.insert(group.key.clone(), group);
    }

    fn answer(
        &mut self,
        pending: Pending<M>,
        outcome: M::Outcome,
        revision: i64,
        clock: StoreClock,
    ) {
        if pending.uncertain && !M::is_certain_after_unknown_try(&outcome) {
            return pending.fail(EngineError::unavailable(
                "the store broke off during an earlier try, which may have been applied",
            ));
        }
        let undo = if M::is_new_grant(&outcome) { pending.undo() } else { None };
        let Some(reply) = pending.reply else {
            self.metrics.undone_grants.inc();
            return;
        };
        let grant =
            undo.map(|undo| Box::new(Grant { undo: Some(undo), shard: self.sender.clone() }));
        let answer = Answer { outcome, clock, revision, grant };
        // If the caller has gone, the answer comes back. Its grant is undone from here, since
        // while the engine closes there is no way through the queue any more.
        if let Err(Ok(Answer { grant: Some(mut grant), .. })) = reply.send(Ok(answer)) {
            self.backlog.extend(grant.give_up());
        }
    }

    fn wake(&self, key: &Key) {
        let hash = key.hash64();
        self.hub.wake(hash);
        self.backend.announce(hash);
    }

    fn count_failure(&self, operation: &'static str, failure: &'static str, message: &str) {
        self.metrics.store_failures.get_or_create(&FailureLabels { operation, failure }).inc();
        if operation == "load" && self.away_since().is_some() {
            // One line for each try would say nothing new. Each request that fails has its own.
            tracing::debug!(operation, failure, message, "store call failed again");
        } else {
            tracing::warn!(operation, failure, message, "store call failed");
        }
    }
}
