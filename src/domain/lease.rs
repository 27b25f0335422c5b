//! The lease: one owner at a time for a key, until it releases or its time is over.
//!
//! A key holds its newest *generation*. A generation is **held** from its grant until it ends: by
//! release, by expiry, by force, or by being undone because nobody received the grant. Each grant
//! takes a version above all earlier ones of the key. What has ended never lives again: a lapsed
//! lease cannot be renewed even if nobody else came, since followers may have been told already.
//!
//! An expiry that is *told* is always *written* (see [`Ending::Expired`]): a renewal that was
//! decided a moment earlier on another replica then loses its compare-and-swap, instead of
//! reviving a lease that somebody was told is over.

use uuid::Uuid;

use super::ids::OwnerId;
use super::time::{Timestamp, Ttl};
use super::version::Version;
use super::{At, Decision, Machine};

/// The lease machine.
#[derive(Debug)]
pub enum LeaseMachine {}

/// What a key holds: its newest generation.
#[derive(Clone, Debug, PartialEq)]
pub struct Lease {
    /// The fencing token of this generation.
    pub version: Version,
    /// Whether it is held, and if not, how it ended.
    pub status: Status,
    /// Who was granted it.
    pub owner_id: OwnerId,
    /// The caller's name for its attempt. It stays on the ended generation, so that a late
    /// duplicate of the request is refused instead of granted.
    pub attempt_id: Option<Uuid>,
    /// The engine's own name for the grant, by which it knows it again after a lost reply.
    pub grant_id: i64,
    /// The length that a renewal without one extends by.
    pub ttl: Ttl,
    /// When it was granted.
    pub acquired_at: Timestamp,
    /// When it ends unless renewed. A claim at exactly this instant succeeds.
    pub expires_at: Timestamp,
    /// The generation before this one, if that one was lost rather than given back.
    pub recovered_from: Option<Version>,
    /// What the owner wants others to know, as the text of a JSON object.
    pub metadata: Option<String>,
}

/// Whether a generation is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Until `expires_at`.
    Held,
    /// No longer.
    Ended(Ending),
}

/// How a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The owner gave it back.
    Released,
    /// Its time ran out, and that was written.
    Expired,
    /// An administrator freed it.
    Revoked,
    /// The grant reached nobody and was taken back.
    Undone,
}

/// A lease as its owner names it; all of it must match.
#[derive(Clone, Debug, PartialEq)]
pub struct Reference {
    /// Who claims to hold it.
    pub owner_id: OwnerId,
    /// The generation.
    pub version: Version,
}

/// A wish to hold the key.
#[derive(Clone, Debug, PartialEq)]
pub struct Claim {
    /// Who asks.
    pub owner_id: OwnerId,
    /// For how long.
    pub ttl: Ttl,
    /// The caller's name for this attempt, the same in each repeat.
    pub attempt_id: Option<Uuid>,
    /// The engine's name for this attempt.
    pub grant_id: i64,
    /// To be shown to others while held.
    pub metadata: Option<String>,
    /// `false` for a claim that stands in line behind others: it learns what there is to learn,
    /// and takes nothing.
    pub may_take: bool,
}

/// What can be asked of a lease.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// See [`claim`].
    Claim(Claim),
    /// See [`renew`].
    Renew {
        /// The lease.
        reference: Reference,
        /// The new length, or the lease's own.
        ttl: Option<Ttl>,
    },
    /// See [`release`].
    Release(Reference),
    /// See [`watch`].
    Watch {
        /// The generation, or whichever holds the key now.
        version: Option<Version>,
    },
    /// What the key holds.
    Read,
    /// See [`force_release`].
    ForceRelease {
        /// Free only this generation.
        version: Option<Version>,
    },
    /// Takes back a grant that nobody received.
    Undo {
        /// The grant.
        grant_id: i64,
    },
}

/// The answers, one variant for each command.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// To [`Command::Claim`].
    Claim(ClaimOutcome),
    /// To [`Command::Renew`].
    Renew(RenewOutcome),
    /// To [`Command::Release`].
    Release(ReleaseOutcome),
    /// To [`Command::Watch`].
    Watch(WatchOutcome),
    /// To [`Command::Read`].
    Read(Option<Lease>),
    /// To [`Command::ForceRelease`].
    ForceRelease(ForceReleaseOutcome),
    /// To [`Command::Undo`].
    Undo,
}

/// The answer to a claim.
#[derive(Clone, Debug, PartialEq)]
pub enum ClaimOutcome {
    /// The caller owns the key.
    Claimed {
        /// The lease.
        lease: Lease,
        /// The grant was made to an earlier request of the same attempt.
        repeated: bool,
    },
    /// Somebody, perhaps the caller, holds it.
    Held(Lease),
    /// Nobody holds it, and the claim was not to take it.
    Free,
    /// The attempt had its grant, and that has ended.
    Stale(Stale),
}

/// The answer to a renewal.
#[derive(Clone, Debug, PartialEq)]
pub enum RenewOutcome {
    /// The lease as it is now.
    Renewed(Lease),
    /// The caller does not hold the key.
    Stale(Stale),
}

/// The answer to a release.
#[derive(Clone, Debug, PartialEq)]
pub enum ReleaseOutcome {
    /// The key is free, by this release or an earlier one of the same reference.
    Released,
    /// The caller does not hold the key.
    Stale(Stale),
}

/// The answer to a look at one generation.
#[derive(Clone, Debug, PartialEq)]
pub enum WatchOutcome {
    /// It holds the key.
    Holding(Lease),
    /// It does not, and never will again.
    Over(OverReason),
}

/// The answer to a release by force.
#[derive(Clone, Debug, PartialEq)]
pub enum ForceReleaseOutcome {
    /// The generation that was ended.
    Released(Version),
    /// There was nothing to free.
    NotHeld,
}

/// Why a watched generation does not hold the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverReason {
    /// Given back by its owner, or taken back because nobody received it.
    Released,
    /// Its time ran out.
    Expired,
    /// A newer generation has begun.
    Superseded,
    /// Freed by an administrator.
    Revoked,
    /// Nobody held it.
    NotHeld,
}

/// A refusal of somebody who does not hold the key.
#[derive(Clone, Debug, PartialEq)]
pub struct Stale {
    /// How the ownership was lost.
    pub reason: StaleReason,
    /// What the key holds instead.
    pub current: Option<Lease>,
}

/// How ownership was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StaleReason {
    /// A newer generation has begun.
    Superseded,
    /// Time ran out.
    Expired,
    /// It was given back.
    Released,
    /// An administrator freed it.
    Revoked,
    /// The key has never seen this reference, or no longer remembers it.
    Unknown,
}

/// Where a generation stands at one moment.
enum Standing {
    Held,
    /// Time is over, and that is not written yet.
    Lapsed,
    Ended(Ending),
}

impl Lease {
    fn standing(&self, now: Timestamp) -> Standing {
        match self.status {
            Status::Held if now < self.expires_at => Standing::Held,
            Status::Held => Standing::Lapsed,
            Status::Ended(ending) => Standing::Ended(ending),
        }
    }

    /// Since when the key has not been in use, given the time of its last write.
    #[must_use]
    pub fn idle_since(&self, last_write: Timestamp) -> Timestamp {
        match self.status {
            Status::Held => self.expires_at,
            Status::Ended(_) => last_write,
        }
    }

    /// Whether this generation holds the key at `now`.
    #[must_use]
    pub fn is_held(&self, now: Timestamp) -> bool {
        matches!(self.standing(now), Standing::Held)
    }

    fn ended(&self, ending: Ending) -> Self {
        Self { status: Status::Ended(ending), ..self.clone() }
    }

    fn matches(&self, reference: &Reference) -> bool {
        self.version == reference.version && self.owner_id == reference.owner_id
    }
}

impl Ending {
    fn stale_reason(self) -> StaleReason {
        match self {
            Self::Released | Self::Undone => StaleReason::Released,
            Self::Expired => StaleReason::Expired,
            Self::Revoked => StaleReason::Revoked,
        }
    }

    fn over_reason(self) -> OverReason {
        match self {
            Self::Released | Self::Undone => OverReason::Released,
            Self::Expired => OverReason::Expired,
            Self::Revoked => OverReason::Revoked,
        }
    }
}

impl Machine for LeaseMachine {
    type State = Lease;
    type Command = Command;
    type Outcome = Outcome;

    fn apply(state: Option<&Lease>, command: &Command, at: At) -> Decision<Lease, Outcome> {
        match command {
            Command::Claim(wish) => claim(state, wish, at).map(Outcome::Claim),
            Command::Renew { reference, ttl } => {
                renew(state, reference, *ttl, at).map(Outcome::Renew)
            }
            Command::Release(reference) => release(state, reference, at).map(Outcome::Release),
            Command::Watch { version } => watch(state, *version, at).map(Outcome::Watch),
            Command::Read => Decision::Keep(Outcome::Read(state.cloned())),
            Command::ForceRelease { version } => {
                force_release(state, *version, at).map(Outcome::ForceRelease)
            }
            Command::Undo { grant_id } => undo(state, *grant_id),
        }
    }

    fn read() -> Command {
        Command::Read
    }

    fn bytes(command: &Command) -> usize {
        match command {
            Command::Claim(claim) => {
                claim.owner_id.as_str().len() + claim.metadata.as_ref().map_or(0, String::len)
            }
            Command::Renew { reference, .. } | Command::Release(reference) => {
                reference.owner_id.as_str().len()
            }
            Command::Watch { .. }
            | Command::Read
            | Command::ForceRelease { .. }
            | Command::Undo { .. } => 0,
        }
    }

    /// The end of a generation, told or overtaken. A first grant and a renewal wake nobody: a
    /// waiter looks again at the end it knew, and finds the new one.
    fn wakes(before: Option<&Lease>, after: &Lease) -> bool {
        before.is_some_and(|before| {
            before.status == Status::Held
                && (after.status != Status::Held || after.version != before.version)
        })
    }

    fn is_void_without_caller(command: &Command) -> bool {
        match command {
            Command::Claim(_) | Command::Watch { .. } | Command::Read => true,
            Command::Renew { .. }
            | Command::Release(_)
            | Command::ForceRelease { .. }
            | Command::Undo { .. } => false,
        }
    }

    fn is_certain_after_unknown_try(outcome: &Outcome) -> bool {
        match outcome {
            Outcome::Claim(ClaimOutcome::Claimed { .. })
            | Outcome::Renew(RenewOutcome::Renewed(_))
            | Outcome::Release(ReleaseOutcome::Released)
            | Outcome::Watch(_)
            | Outcome::Read(_)
            | Outcome::ForceRelease(ForceReleaseOutcome::Released(_))
            | Outcome::Undo => true,
            Outcome::Claim(ClaimOutcome::Held(_) | ClaimOutcome::Free | ClaimOutcome::Stale(_))
            | Outcome::Renew(RenewOutcome::Stale(_))
            | Outcome::Release(ReleaseOutcome::Stale(_))
            | Outcome::ForceRelease(ForceReleaseOutcome::NotHeld) => false,
        }
    }

    /// With an `attempt_id` the caller can ask again and find its grant, so that one stays.
    fn undo(command: &Command) -> Option<Command> {
        match command {
            Command::Claim(claim) if claim.attempt_id.is_none() => {
                Some(Command::Undo { grant_id: claim.grant_id })
            }
            _ => None,
        }
    }

    fn is_new_grant(outcome: &Outcome) -> bool {
        matches!(outcome, Outcome::Claim(ClaimOutcome::Claimed { repeated: false, .. }))
    }
}

/// Grants the key if nobody holds it.
///
/// A repeat of the attempt that holds the key gets the same grant, not extended; a repeat of one
/// whose grant has ended is refused, as it may be a duplicate that the network held back.
fn claim(state: Option<&Lease>, wish: &Claim, at: At) -> Decision<Lease, ClaimOutcome> {
    let grant = |recovered_from| {
        if !wish.may_take {
            return Decision::Keep(ClaimOutcome::Free);
        }
        let lease = Lease {
            version: at.stamp,
            status: Status::Held,
            owner_id: wish.owner_id.clone(),
            attempt_id: wish.attempt_id,
            grant_id: wish.grant_id,
            ttl: wish.ttl,
            acquired_at: at.now,
            expires_at: at.now.after(wish.ttl),
            recovered_from,
            metadata: wish.metadata.clone(),
        };
        Decision::Write(lease.clone(), ClaimOutcome::Claimed { lease, repeated: false })
    };
    let Some(lease) = state else {
        return grant(None);
    };
    let is_own = lease.grant_id == wish.grant_id;
    let is_repeat = wish.attempt_id.is_some()
        && lease.attempt_id == wish.attempt_id
        && lease.owner_id == wish.owner_id;
    match lease.standing(at.now) {
        Standing::Held if is_own || is_repeat => {
            Decision::Keep(ClaimOutcome::Claimed { lease: lease.clone(), repeated: !is_own })
        }
        Standing::Held => Decision::Keep(ClaimOutcome::Held(lease.clone())),
        Standing::Lapsed if is_repeat => stale_by_expiry(lease).map(ClaimOutcome::Stale),
        Standing::Ended(ending) if is_repeat => Decision::Keep(ClaimOutcome::Stale(Stale {
            reason: ending.stale_reason(),
            current: Some(lease.clone()),
        })),
        Standing::Lapsed | Standing::Ended(Ending::Expired | Ending::Revoked) => {
            grant(Some(lease.version))
        }
        Standing::Ended(Ending::Released) => grant(None),
        // As if the undone grant had never been: what it would have recovered is still lost.
        Standing::Ended(Ending::Undone) => grant(lease.recovered_from),
    }
}

/// Moves the end of a held lease to the later of what it was and now + ttl.
fn renew(
    state: Option<&Lease>,
    reference: &Reference,
    ttl: Option<Ttl>,
    at: At,
) -> Decision<Lease, RenewOutcome> {
    owned(state, reference, at, RenewOutcome::Stale, |lease| {
        let ttl = ttl.unwrap_or(lease.ttl);
        let renewed = Lease {
            ttl,
            expires_at: lease.expires_at.max(at.now.after(ttl)),
            ..lease.clone()
        };
        Decision::Write(renewed.clone(), RenewOutcome::Renewed(renewed))
    })
}

/// Frees a held lease. Doing so twice is the same as once, until the next grant.
fn release(
    state: Option<&Lease>,
    reference: &Reference,
    at: At,
) -> Decision<Lease, ReleaseOutcome> {
    let is_repeat = state.is_some_and(|lease| {
        lease.matches(reference) && lease.status == Status::Ended(Ending::Released)
    });
    if is_repeat {
        return Decision::Keep(ReleaseOutcome::Released);
    }
    owned(state, reference, at, ReleaseOutcome::Stale, |lease| {
        Decision::Write(lease.ended(Ending::Released), ReleaseOutcome::Released)
    })
}

/// Runs `act` if `reference` holds the key, and refuses otherwise.
fn owned<O>(
    state: Option<&Lease>,
    reference: &Reference,
    at: At,
    refuse: impl FnOnce(Stale) -> O,
    act: impl FnOnce(&Lease) -> Decision<Lease, O>,
) -> Decision<Lease, O> {
    let stale = |reason| Stale { reason, current: state.cloned() };
    let reason = match state {
        Some(lease) if lease.matches(reference) => match lease.standing(at.now) {
            Standing::Held => return act(lease),
            Standing::Lapsed => return stale_by_expiry(lease).map(refuse),
            Standing::Ended(ending) => ending.stale_reason(),
        },
        Some(lease) if reference.version < lease.version => StaleReason::Superseded,
        _ => StaleReason::Unknown,
    };
    Decision::Keep(refuse(stale(reason)))
}

/// Tells that a lease is over, and writes it first.
fn stale_by_expiry(lease: &Lease) -> Decision<Lease, Stale> {
    let ended = lease.ended(Ending::Expired);
    let current = Some(ended.clone());
    Decision::Write(ended, Stale { reason: StaleReason::Expired, current })
}

/// Looks whether one generation still holds the key, for somebody who waits for its end.
fn watch(
    state: Option<&Lease>,
    version: Option<Version>,
    at: At,
) -> Decision<Lease, WatchOutcome> {
    let over = |reason| Decision::Keep(WatchOutcome::Over(reason));
    let Some(lease) = state else {
        return over(OverReason::NotHeld);
    };
    match version {
        Some(version) if version < lease.version => return over(OverReason::Superseded),
        Some(version) if version > lease.version => return over(OverReason::NotHeld),
        _ => {}
    }
    match (lease.standing(at.now), version) {
        (Standing::Held, _) => Decision::Keep(WatchOutcome::Holding(lease.clone())),
        // Whoever named no generation came too late to follow this one; but it, too, is told
        // only after it is written.
        (Standing::Lapsed, version) => {
            let reason = version.map_or(OverReason::NotHeld, |_| OverReason::Expired);
            Decision::Write(lease.ended(Ending::Expired), WatchOutcome::Over(reason))
        }
        (Standing::Ended(_), None) => over(OverReason::NotHeld),
        (Standing::Ended(ending), Some(_)) => over(ending.over_reason()),
    }
}

/// Ends a held lease whoever owns it.
fn force_release(
    state: Option<&Lease>,
    version: Option<Version>,
    at: At,
) -> Decision<Lease, ForceReleaseOutcome> {
    let Some(lease) = state.filter(|lease| version.is_none_or(|v| v == lease.version)) else {
        return Decision::Keep(ForceReleaseOutcome::NotHeld);
    };
    match lease.standing(at.now) {
        Standing::Held => Decision::Write(
            lease.ended(Ending::Revoked),
            ForceReleaseOutcome::Released(lease.version),
        ),
        Standing::Lapsed => {
            Decision::Write(lease.ended(Ending::Expired), ForceReleaseOutcome::NotHeld)
        }
        Standing::Ended(_) => Decision::Keep(ForceReleaseOutcome::NotHeld),
    }
}

fn undo(state: Option<&Lease>, grant_id: i64) -> Decision<Lease, Outcome> {
    match state {
        Some(lease) if lease.grant_id == grant_id && lease.status == Status::Held => {
            Decision::Write(lease.ended(Ending::Undone), Outcome::Undo)
        }
        _ => Decision::Keep(Outcome::Undo),
    }
}

/// Whether `version` holds the key at `now`; if not, the version that does.
///
/// # Errors
///
/// The version that holds the key instead, if any.
pub fn verify(
    state: Option<&Lease>,
    version: Version,
    now: Timestamp,
) -> Result<(), Option<Version>> {
    match state.filter(|lease| lease.is_held(now)).map(|lease| lease.version) {
        Some(current) if current == version => Ok(()),
        current => Err(current),
    }
}
