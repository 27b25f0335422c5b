//! Leaders, in-process: leases in a key space of their own, whose versions are terms.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, timeout_at};

use super::Shared;
use super::leases::{Leases, WaitOutcome, outcome};
use super::reply::{Page, Reply};
use crate::domain::ids::{Kind, Name, OwnerId, Prefix};
use crate::domain::lease::{
    CampaignOutcome, Claim, Command, ForceReleaseOutcome, Lease, LeaseMachine, Outcome, Reference,
    ReleaseOutcome,
};
use crate::domain::time::Ttl;
use crate::domain::version::Version;
use crate::engine::{Answer, EngineError, Question, Verdict};
use crate::store::StoreError;

/// A wish to lead, or to go on leading.
#[derive(Clone, Debug)]
pub struct Campaign {
    /// Who asks; must be unique to one run of one process.
    pub owner_id: OwnerId,
    /// Extend this term only.
    pub version: Option<Version>,
    /// For how long, from now on.
    pub ttl: Ttl,
    /// To be shown to others, as the text of a JSON object of strings.
    pub metadata: Option<String>,
    /// How long to stand in line; zero: not at all.
    pub wait: Duration,
}

/// What can be done with leaders.
#[derive(Clone, Copy, Debug)]
pub struct Leaders<'a> {
    shared: &'a Arc<Shared>,
    leases: Leases<'a>,
}

impl<'a> Leaders<'a> {
    pub(super) fn new(shared: &'a Arc<Shared>) -> Self {
        Self { shared, leases: Leases::of_kind(shared, Kind::Leader) }
    }

    /// Asks whether the caller leads, taking or extending the leadership if it can.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn campaign(
        &self,
        name: &Name,
        wish: Campaign,
    ) -> Result<Reply<CampaignOutcome>, EngineError> {
        let Campaign { owner_id, version, ttl, metadata, wait } = wish;
        let grant_id = rand::random();
        let claim = Claim { owner_id, ttl, attempt_id: None, grant_id, metadata, may_take: true };
        let engine = &self.shared.leases;
        if engine.is_draining() {
            return Err(EngineError::ShuttingDown);
        }
        let key = self.leases.key(name);
        let reply = if wait.is_zero() {
            outcome!(engine.ask(&key, Command::Campaign { claim, version }).await?, Campaign)?
        } else {
            engine.wait(&key, CampaignInLine { claim, version }, wait, true).await??
        };
        reply.still_running(|outcome| match outcome {
            CampaignOutcome::Leading { lease, .. } => Some(lease),
            _ => None,
        })
    }

    /// Ends a term.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn resign(
        &self,
        name: &Name,
        owner_id: &OwnerId,
        version: Version,
    ) -> Result<Reply<ReleaseOutcome>, EngineError> {
        self.leases.release(name, Reference { owner_id: owner_id.clone(), version }).await
    }

    /// Waits for the end of a term: the one named, or the present one.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn wait(
        &self,
        name: &Name,
        version: Option<Version>,
        wait: Duration,
    ) -> Result<Reply<WaitOutcome>, EngineError> {
        self.leases.wait(name, version, wait).await
    }

    /// Who leads.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn state(&self, name: &Name) -> Result<Reply<Option<Lease>>, EngineError> {
        self.leases.state(name).await
    }

    /// The present term, if `owner_id` leads now.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn gate(
        &self,
        name: &Name,
        owner_id: &OwnerId,
    ) -> Result<Reply<Option<Lease>>, EngineError> {
        let reply = self.state(name).await?;
        let now = reply.clock.estimate();
        Ok(reply.map(|lease| lease.filter(|l| l.is_held(now) && l.owner_id == *owner_id)))
    }

    /// Ends a term, whoever leads.
    ///
    /// # Errors
    ///
    /// See [`EngineError`].
    pub async fn force_release(
        &self,
        name: &Name,
        version: Option<Version>,
    ) -> Result<Reply<ForceReleaseOutcome>, EngineError> {
        self.leases.force_release(name, version).await
    }

    /// Lists names, as [`Leases::list`].
    ///
    /// # Errors
    ///
    /// The store cannot be read.
    pub async fn list(
        &self,
        prefix: Option<Prefix>,
        led: Option<bool>,
        after: Option<Name>,
        limit: usize,
    ) -> Result<Page<Lease>, StoreError> {
        self.leases.list(prefix, led, after, limit).await
    }
}

/// A campaign that waits for its turn.
struct CampaignInLine {
    claim: Claim,
    version: Option<Version>,
}

impl Question<LeaseMachine> for CampaignInLine {
    type Answer = Result<Reply<CampaignOutcome>, EngineError>;

    fn command(&mut self, is_first: bool) -> Command {
        let claim = Claim { may_take: is_first, ..self.claim.clone() };
        Command::Campaign { claim, version: self.version }
    }

    fn may_grant(&self) -> bool {
        true
    }

    fn judge(&mut self, answer: Answer<LeaseMachine>) -> Verdict<Self::Answer> {
        let reply = match outcome!(answer, Campaign) {
            Ok(reply) => reply,
            Err(error) => return Verdict::Final(Err(error)),
        };
        let look_again_in = match &reply.outcome {
            CampaignOutcome::Following(lease) => reply.clock.remaining(lease.expires_at),
            CampaignOutcome::Free => Duration::MAX,
            CampaignOutcome::Leading { .. } | CampaignOutcome::Stale(_) => {
                return Verdict::Final(Ok(reply));
            }
        };
        Verdict::Pending { answer: Ok(reply), look_again_in }
    }
}

/// This process' part in one leadership.
///
/// ```
/// # use fencepost::coordinator::{Coordinator, CoordinatorOptions};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let coordinator = Coordinator::open("memory:", CoordinatorOptions::default()).await?;
/// let scheduler = coordinator.leader("scheduler".parse()?);
/// // At each tick:
/// if scheduler.is_leader().await {
///     println!("I run the jobs in term {:?}", scheduler.term().await);
/// }
/// coordinator.close().await; // resigns, so that another takes over at once
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Leader {
    shared: Arc<Shared>,
    name: Name,
    ttl: Ttl,
    part: Arc<Part>,
}

/// What this process knows of one leadership, the same for all handles of it.
#[derive(Debug, Default)]
pub(super) struct Part(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// The term that was granted last and not resigned.
    term: Option<Version>,
    /// Until when it can be relied on, by this process' monotonic clock.
    until: Option<Instant>,
}

impl Part {
    /// Ends the term, if there is one.
    pub(super) async fn resign(
        &self,
        shared: &Arc<Shared>,
        name: &Name,
    ) -> Result<(), EngineError> {
        let mut known = self.0.lock().await;
        known.until = None;
        if let Some(term) = known.term.take() {
            Leaders::new(shared).resign(name, &shared.owner_id, term).await?;
        }
        Ok(())
    }
}

impl Leader {
    pub(super) fn new(shared: Arc<Shared>, name: Name) -> Self {
        let part = {
            let mut parts = shared.parts.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(parts.entry(name.clone()).or_default())
        };
        Self { shared, name, ttl: Ttl::LEADER, part }
    }

    /// The same with terms of another length.
    #[must_use]
    pub fn with_ttl(self, ttl: Ttl) -> Self {
        Self { ttl, ..self }
    }

    /// Whether this process leads, taking or extending the leadership if it can.
    ///
    /// Cheap enough for every tick: in the first third of the time that was granted, it asks
    /// nobody. It never says yes beyond the time that the store granted: that is counted from
    /// before the request was sent, on the monotonic clock, less a tenth for what the caller does
    /// with the answer. If the store cannot be asked, or the coordinator closes, it says no.
    pub async fn is_leader(&self) -> bool {
        let mut known = self.part.0.lock().await;
        if self.shared.leases.is_draining() {
            known.until = None;
            return false;
        }
        let ttl = Duration::from_millis(self.ttl.as_millis().unsigned_abs());
        let started = Instant::now();
        // The first third of the time that was granted: what is trusted ends a tenth earlier.
        if known.until.is_some_and(|until| until.duration_since(started) > ttl * 17 / 30) {
            return true;
        }
        // A leader that cannot ask must not be waited for longer than it may lead.
        let trusted = known.until.take().filter(|until| *until > started);
        let give_up =
            trusted.unwrap_or_else(|| started + self.shared.options.limits.request_timeout);
        let wish = Campaign {
            owner_id: self.shared.owner_id.clone(),
            version: None,
            ttl: self.ttl,
            metadata: None,
            wait: Duration::ZERO,
        };
        let leaders = Leaders::new(&self.shared);
        let asked = timeout_at(give_up, leaders.campaign(&self.name, wish)).await;
        let Ok(Ok(reply)) = asked else { return false };
        let (CampaignOutcome::Leading { lease, .. }, clock) = reply.keep() else {
            known.term = None;
            return false;
        };
        let granted = clock.now.until(lease.expires_at);
        let until = started + granted.saturating_sub(ttl / 10);
        *known = Known { term: Some(lease.version), until: Some(until) };
        until > Instant::now()
    }

    /// The term that this process leads, as far as it knows; the fencing token of what it does.
    pub async fn term(&self) -> Option<Version> {
        let known = self.part.0.lock().await;
        known.term.filter(|_| known.until.is_some_and(|until| until > Instant::now()))
    }

    /// Ends this process' term, so that another takes over at once.
    ///
    /// # Errors
    ///
    /// The store cannot be asked; the term then ends by itself.
    pub async fn resign(&self) -> Result<(), EngineError> {
        self.part.resign(&self.shared, &self.name).await
    }
}
