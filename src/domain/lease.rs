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

use super::ids::{Kind, OwnerId};
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
    /// The work was completed. Of records only.
    Completed,
    /// Something was stored without a claim. Of records only.
    Put,
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
    /// See [`campaign`].
    Campaign {
        /// The wish to lead; its `attempt_id` is not used.
        claim: Claim,
        /// Extend only this term.
        version: Option<Version>,
    },
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
    /// To [`Command::Campaign`].
    Campaign(CampaignOutcome),
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

/// The answer to a campaign.
#[derive(Clone, Debug, PartialEq)]
pub enum CampaignOutcome {
    /// The caller leads.
    Leading {
        /// The term.
        lease: Lease,
        /// Whether it begins here.
        is_new: bool,
    },
    /// Somebody else does.
    Following(Lease),
    /// Nobody does, and the caller was not to.
    Free,
    /// The term that was to be extended is over.
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

    pub(super) fn ended(&self, ending: Ending) -> Self {
        Self { status: Status::Ended(ending), ..self.clone() }
    }

    pub(super) fn matches(&self, reference: &Reference) -> bool {
        self.version == reference.version && self.owner_id == reference.owner_id
    }
}

impl Ending {
    pub(super) fn stale_reason(self) -> StaleReason {
        match self {
            Self::Released | Self::Undone | Self::Completed | Self::Put => StaleReason::Released,
            Self::Expired => StaleReason::Expired,
            Self::Revoked => StaleReason::Revoked,
        }
    }

    fn over_reason(self) -> OverReason {
        match self {
            Self::Released | Self::Undone | Self::Completed | Self::Put => OverReason::Released,
            Self::Expired => OverReason::Expired,
            Self::Revoked => OverReason::Revoked,
        }
    }
}

impl Machine for LeaseMachine {
    type State = Lease;
    type Command = Command;
    type Outcome = Outcome;

    const KINDS: &'static [Kind] = &[Kind::Lease, Kind::Leader];

    fn apply(state: Option<&Lease>, command: &Command, at: At) -> Decision<Lease, Outcome> {
        match command {
            Command::Claim(wish) => claim(state, wish, at).map(Outcome::Claim),
            Command::Campaign { claim, version } => {
                campaign(state, claim, *version, at).map(Outcome::Campaign)
            }
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
            Command::Claim(claim) | Command::Campaign { claim, .. } => {
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
        has_ended(before, after)
    }

    fn changes_at(lease: &Lease) -> Option<Timestamp> {
        (lease.status == Status::Held).then_some(lease.expires_at)
    }

    fn is_worth_remembering(lease: &Lease) -> bool {
        lease.metadata.as_ref().is_none_or(|metadata| metadata.len() <= 256)
    }

    fn is_void_without_caller(command: &Command) -> bool {
        match command {
            Command::Claim(_)
            | Command::Campaign { .. }
            | Command::Watch { .. }
            | Command::Read => true,
            Command::Renew { .. }
            | Command::Release(_)
            | Command::ForceRelease { .. }
            | Command::Undo { .. } => false,
        }
    }

    fn is_certain_after_unknown_try(outcome: &Outcome) -> bool {
        match outcome {
            Outcome::Claim(ClaimOutcome::Claimed { .. })
            | Outcome::Campaign(CampaignOutcome::Leading { .. })
            | Outcome::Renew(RenewOutcome::Renewed(_))
            | Outcome::Release(ReleaseOutcome::Released)
            | Outcome::Watch(_)
            | Outcome::Read(_)
            | Outcome::ForceRelease(ForceReleaseOutcome::Released(_))
            | Outcome::Undo => true,
            Outcome::Claim(ClaimOutcome::Held(_) | ClaimOutcome::Free | ClaimOutcome::Stale(_))
            | Outcome::Campaign(
                CampaignOutcome::Following(_) | CampaignOutcome::Free | CampaignOutcome::Stale(_),
            )
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
            Command::Campaign { claim, .. } => Some(Command::Undo { grant_id: claim.grant_id }),
            _ => None,
        }
    }

    fn is_new_grant(outcome: &Outcome) -> bool {
        matches!(
            outcome,
            Outcome::Claim(ClaimOutcome::Claimed { repeated: false, .. })
                | Outcome::Campaign(CampaignOutcome::Leading { is_new: true, .. })
        )
    }
}

/// Whether the step from `before` to `after` ends a generation.
pub(super) fn has_ended(before: Option<&Lease>, after: &Lease) -> bool {
    before.is_some_and(|before| {
        before.status == Status::Held
            && (after.status != Status::Held || after.version != before.version)
    })
}

/// Grants the key if nobody holds it.
///
/// A repeat of the attempt that holds the key gets the same grant, not extended; a repeat of one
/// whose grant has ended is refused, as it may be a duplicate that the network held back.
pub(super) fn claim(state: Option<&Lease>, wish: &Claim, at: At) -> Decision<Lease, ClaimOutcome> {
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
        Standing::Ended(Ending::Released | Ending::Completed | Ending::Put) => grant(None),
        // As if the undone grant had never been: what it would have recovered is still lost.
        Standing::Ended(Ending::Undone) => grant(lease.recovered_from),
    }
}

/// Takes or extends a leadership: a lease whose owner may ask again and again whether it leads.
///
/// While more than two thirds of the time remain, asking changes nothing, so that it is cheap at
/// every tick of a scheduler.
fn campaign(
    state: Option<&Lease>,
    wish: &Claim,
    version: Option<Version>,
    at: At,
) -> Decision<Lease, CampaignOutcome> {
    let extend = |lease: &Lease| {
        let remaining = lease.expires_at.as_micros() - at.now.as_micros();
        if remaining * 3 > wish.ttl.as_millis() * 1_000 * 2 {
            // New if it is this very campaign's, come back to after a lost answer.
            let is_new = lease.grant_id == wish.grant_id;
            return Decision::Keep(CampaignOutcome::Leading { lease: lease.clone(), is_new });
        }
        let extended = Lease {
            ttl: wish.ttl,
            expires_at: lease.expires_at.max(at.now.after(wish.ttl)),
            metadata: wish.metadata.clone(),
            ..lease.clone()
        };
        Decision::Write(
            extended.clone(),
            CampaignOutcome::Leading { lease: extended, is_new: false },
        )
    };
    if let Some(version) = version {
        let reference = Reference { owner_id: wish.owner_id.clone(), version };
        return owned(state, &reference, at, CampaignOutcome::Stale, extend);
    }
    match state {
        Some(lease) if lease.is_held(at.now) && lease.owner_id == wish.owner_id => extend(lease),
        _ => claim(state, wish, at).map(|outcome| match outcome {
            ClaimOutcome::Claimed { lease, repeated } => {
                CampaignOutcome::Leading { lease, is_new: !repeated }
            }
            ClaimOutcome::Held(lease) => CampaignOutcome::Following(lease),
            ClaimOutcome::Free => CampaignOutcome::Free,
            ClaimOutcome::Stale(ended) => CampaignOutcome::Stale(ended),
        }),
    }
}

/// Moves the end of a held lease to the later of what it was and now + ttl.
pub(super) fn renew(
    state: Option<&Lease>,
    reference: &Reference,
    ttl: Option<Ttl>,
    at: At,
) -> Decision<Lease, RenewOutcome> {
    owned(state, reference, at, RenewOutcome::Stale, |lease| {
        let ttl = ttl.unwrap_or(lease.ttl);
        let renewed =
            Lease { ttl, expires_at: lease.expires_at.max(at.now.after(ttl)), ..lease.clone() };
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
    let reason = match state {
        Some(lease) if lease.matches(reference) => match lease.standing(at.now) {
            Standing::Held => return act(lease),
            Standing::Lapsed => return stale_by_expiry(lease).map(refuse),
            Standing::Ended(ending) => ending.stale_reason(),
        },
        Some(lease) if reference.version < lease.version => StaleReason::Superseded,
        _ => StaleReason::Unknown,
    };
    Decision::Keep(refuse(Stale { reason, current: state.cloned() }))
}

/// Tells that a lease is over, and writes it first.
fn stale_by_expiry(lease: &Lease) -> Decision<Lease, Stale> {
    let ended = lease.ended(Ending::Expired);
    let current = Some(ended.clone());
    Decision::Write(ended, Stale { reason: StaleReason::Expired, current })
}

/// Looks whether one generation still holds the key, for somebody who waits for its end.
fn watch(state: Option<&Lease>, version: Option<Version>, at: At) -> Decision<Lease, WatchOutcome> {
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
pub(super) fn force_release(
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

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    /// One key, its clock, and the rule of stamps.
    #[derive(Default)]
    struct Cell {
        row: Option<(Version, Lease)>,
        now: i64,
        writes: u32,
    }

    impl Cell {
        fn new() -> Self {
            Self { now: 1_000_000, ..Self::default() }
        }

        fn run(&mut self, command: &Command) -> Outcome {
            let now = Timestamp::from_micros(self.now);
            let stamp = Version::next(self.row.as_ref().map(|row| row.0), 0, now).unwrap();
            let lease = self.row.as_ref().map(|row| &row.1);
            match LeaseMachine::apply(lease, command, At { now, stamp }) {
                Decision::Keep(outcome) => outcome,
                Decision::Write(lease, outcome) => {
                    self.row = Some((stamp, lease));
                    self.writes += 1;
                    outcome
                }
            }
        }

        fn pass(&mut self, millis: i64) {
            self.now += millis * 1_000;
        }

        fn claim(&mut self, owner: &str) -> ClaimOutcome {
            self.claim_as(owner, None)
        }

        fn claim_as(&mut self, owner: &str, attempt_id: Option<Uuid>) -> ClaimOutcome {
            let grant_id = self.now + i64::from(self.writes);
            let claim = Claim { attempt_id, ..wish(owner, grant_id) };
            match self.run(&Command::Claim(claim)) {
                Outcome::Claim(outcome) => outcome,
                other => panic!("{other:?}"),
            }
        }

        fn granted(&mut self, owner: &str) -> Reference {
            match self.claim(owner) {
                ClaimOutcome::Claimed { lease, .. } => reference(&lease),
                other => panic!("{other:?}"),
            }
        }
    }

    fn wish(owner: &str, grant_id: i64) -> Claim {
        Claim {
            owner_id: OwnerId::from_stored(owner),
            ttl: Ttl::from_stored(1_000),
            attempt_id: None,
            grant_id,
            metadata: None,
            may_take: true,
        }
    }

    fn reference(lease: &Lease) -> Reference {
        Reference { owner_id: lease.owner_id.clone(), version: lease.version }
    }

    fn stale(outcome: &Outcome) -> Option<StaleReason> {
        match outcome {
            Outcome::Renew(RenewOutcome::Stale(stale))
            | Outcome::Release(ReleaseOutcome::Stale(stale))
            | Outcome::Claim(ClaimOutcome::Stale(stale)) => Some(stale.reason),
            _ => None,
        }
    }

    #[test]
    fn a_claim_at_the_very_end_succeeds_and_one_before_it_does_not() {
        let mut key = Cell::new();
        key.granted("a");
        key.now += 999_999;
        assert!(matches!(key.claim("b"), ClaimOutcome::Held(_)));
        key.now += 1;
        assert!(matches!(key.claim("b"), ClaimOutcome::Claimed { .. }));
    }

    #[test]
    fn a_lapsed_lease_cannot_be_renewed_though_nobody_came() {
        let mut key = Cell::new();
        let reference = key.granted("a");
        key.pass(1_000);
        let renew = Command::Renew { reference: reference.clone(), ttl: None };
        assert_eq!(stale(&key.run(&renew)), Some(StaleReason::Expired));
        assert_eq!(stale(&key.run(&Command::Release(reference))), Some(StaleReason::Expired));
    }

    #[test]
    fn an_expiry_that_is_told_is_written() {
        let mut key = Cell::new();
        let reference = key.granted("a");
        key.pass(1_000);
        let before = key.writes;
        let told = key.run(&Command::Watch { version: Some(reference.version) });
        assert_eq!(told, Outcome::Watch(WatchOutcome::Over(OverReason::Expired)));
        assert_eq!(key.writes, before + 1);
        // And once is enough.
        key.run(&Command::Watch { version: Some(reference.version) });
        assert_eq!(key.writes, before + 1);
    }

    #[test]
    fn a_renewal_never_shortens() {
        let mut key = Cell::new();
        let reference = key.granted("a");
        let ttl = Some(Ttl::from_stored(100));
        let Outcome::Renew(RenewOutcome::Renewed(lease)) =
            key.run(&Command::Renew { reference, ttl })
        else {
            panic!("not renewed")
        };
        assert_eq!(lease.expires_at.as_micros(), key.now + 1_000_000);
        assert_eq!(lease.ttl.as_millis(), 100);
    }

    #[test]
    fn an_old_owner_of_the_same_name_cannot_end_the_new_generation() {
        let mut key = Cell::new();
        let old = key.granted("a");
        key.pass(1_000);
        let new = key.granted("a");
        let release = Command::Release(old);
        assert_eq!(stale(&key.run(&release)), Some(StaleReason::Superseded));
        assert!(matches!(key.claim("b"), ClaimOutcome::Held(_)));
        assert_eq!(key.run(&Command::Release(new)), Outcome::Release(ReleaseOutcome::Released));
    }

    #[test]
    fn a_late_duplicate_of_a_spent_attempt_is_refused_until_the_next_grant() {
        let attempt = Some(Uuid::from_u128(7));
        let mut key = Cell::new();
        let ClaimOutcome::Claimed { lease, repeated: false } = key.claim_as("a", attempt) else {
            panic!("not granted")
        };
        assert!(matches!(key.claim_as("a", attempt), ClaimOutcome::Claimed { repeated: true, .. }));
        assert!(matches!(key.claim_as("b", attempt), ClaimOutcome::Held(_)));
        key.run(&Command::Release(reference(&lease)));
        let late = key.claim_as("a", attempt);
        assert_eq!(stale(&Outcome::Claim(late)), Some(StaleReason::Released));
        key.granted("b");
        assert!(matches!(key.claim_as("a", attempt), ClaimOutcome::Held(_)));
    }

    #[test]
    fn what_was_lost_is_told_to_the_next_owner_and_what_was_released_is_not() {
        let recovered = |outcome| match outcome {
            ClaimOutcome::Claimed { lease, .. } => lease.recovered_from,
            other => panic!("{other:?}"),
        };
        let mut key = Cell::new();
        let first = key.granted("a");
        key.pass(1_000);
        assert_eq!(recovered(key.claim("b")), Some(first.version));
        let second = key.row.as_ref().unwrap().1.version;
        key.run(&Command::ForceRelease { version: None });
        assert_eq!(recovered(key.claim("c")), Some(second));
        let third = reference(&key.row.as_ref().unwrap().1);
        key.run(&Command::Release(third));
        assert_eq!(recovered(key.claim("d")), None);
    }

    #[test]
    fn an_undone_grant_leaves_what_it_would_have_recovered() {
        let mut key = Cell::new();
        let lost = key.granted("a");
        key.pass(1_000);
        key.granted("b");
        let grant_id = key.row.as_ref().unwrap().1.grant_id;
        key.run(&Command::Undo { grant_id: grant_id + 1 });
        assert!(matches!(key.claim("c"), ClaimOutcome::Held(_)));
        key.run(&Command::Undo { grant_id });
        let ClaimOutcome::Claimed { lease, .. } = key.claim("c") else { panic!("not granted") };
        assert_eq!(lease.recovered_from, Some(lost.version));
    }

    #[test]
    fn the_engine_knows_its_own_grant_again() {
        let mut key = Cell::new();
        let claim = Command::Claim(wish("a", 42));
        key.run(&claim);
        let again = key.run(&claim);
        let Outcome::Claim(ClaimOutcome::Claimed { repeated, .. }) = again else {
            panic!("{again:?}")
        };
        assert!(!repeated);
    }

    #[test]
    fn a_claim_that_may_not_take_changes_nothing() {
        let mut key = Cell::new();
        let claim = Claim { may_take: false, ..wish("a", 1) };
        assert_eq!(key.run(&Command::Claim(claim)), Outcome::Claim(ClaimOutcome::Free));
        assert_eq!(key.writes, 0);
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Claim(u8),
        Renew(u8),
        Release(u8),
        Watch(u8),
        ForceRelease,
        Pass(u16),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..3_u8).prop_map(Step::Claim),
            (0..8_u8).prop_map(Step::Renew),
            (0..8_u8).prop_map(Step::Release),
            (0..8_u8).prop_map(Step::Watch),
            Just(Step::ForceRelease),
            (0..700_u16).prop_map(Step::Pass),
        ]
    }

    proptest! {
        /// Versions rise; only the newest generation, and only while it holds, can act; and what
        /// was told to be over never acts again.
        #[test]
        fn at_most_one_owner_can_act(steps in prop::collection::vec(step(), 1..80)) {
            let mut key = Cell::new();
            let mut grants: Vec<(Reference, i64)> = Vec::new();
            let mut told_over: HashSet<Version> = HashSet::new();
            for step in steps {
                // Not by an index that misses, but by how old it is.
                let chosen = |back: u8| grants.iter().rev().nth(back.into()).cloned();
                match step {
                    Step::Claim(owner) => {
                        let outcome = key.claim(["a", "b", "c"][usize::from(owner)]);
                        if let ClaimOutcome::Claimed { lease, .. } = outcome {
                            if let Some((last, until)) = grants.last() {
                                prop_assert!(lease.version > last.version);
                                prop_assert!(
                                    told_over.contains(&last.version) || *until <= key.now
                                );
                            }
                            let until = lease.expires_at.as_micros();
                            grants.push((reference(&lease), until));
                        }
                    }
                    Step::Renew(back) => {
                        let Some((reference, until)) = chosen(back) else { continue };
                        let version = reference.version;
                        match key.run(&Command::Renew { reference, ttl: None }) {
                            Outcome::Renew(RenewOutcome::Renewed(lease)) => {
                                prop_assert_eq!(back, 0);
                                prop_assert!(key.now < until && !told_over.contains(&version));
                                grants.last_mut().unwrap().1 = lease.expires_at.as_micros();
                            }
                            other => {
                                prop_assert!(stale(&other).is_some());
                                told_over.insert(version);
                            }
                        }
                    }
                    Step::Release(back) => {
                        let Some((reference, until)) = chosen(back) else { continue };
                        let version = reference.version;
                        let was_over = told_over.contains(&version) || until <= key.now;
                        let is_released =
                            key.row.as_ref().unwrap().1.status == Status::Ended(Ending::Released);
                        match key.run(&Command::Release(reference)) {
                            Outcome::Release(ReleaseOutcome::Released) => {
                                prop_assert_eq!(back, 0);
                                prop_assert!(!was_over || is_released);
                            }
                            other => prop_assert!(stale(&other).is_some()),
                        }
                        told_over.insert(version);
                    }
                    Step::Watch(back) => {
                        let Some((reference, until)) = chosen(back) else { continue };
                        let version = reference.version;
                        match key.run(&Command::Watch { version: Some(version) }) {
                            Outcome::Watch(WatchOutcome::Holding(_)) => {
                                prop_assert!(key.now < until && !told_over.contains(&version));
                            }
                            _ => { told_over.insert(version); }
                        }
                    }
                    Step::ForceRelease => {
                        if let Outcome::ForceRelease(ForceReleaseOutcome::Released(version)) =
                            key.run(&Command::ForceRelease { version: None })
                        {
                            told_over.insert(version);
                        }
                    }
                    Step::Pass(millis) => key.pass(millis.into()),
                }
            }
        }
    }
}
