//! Instants and durations as the store keeps them.

use std::time::Duration;

/// A point in the store's time: microseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(i64);

impl Timestamp {
    /// From microseconds since the Unix epoch.
    #[must_use]
    pub const fn from_micros(micros: i64) -> Self {
        Self(micros)
    }

    /// Microseconds since the Unix epoch.
    #[must_use]
    pub const fn as_micros(self) -> i64 {
        self.0
    }

    /// This instant plus `ttl`.
    #[must_use]
    pub const fn after(self, ttl: Ttl) -> Self {
        Self(self.0.saturating_add(ttl.0.saturating_mul(1_000)))
    }

    /// The end of `retention` that begins now.
    #[must_use]
    pub const fn keep_for(self, retention: Retention) -> Self {
        Self(self.0.saturating_add(retention.0.saturating_mul(1_000)))
    }

    /// This instant plus `elapsed`.
    #[must_use]
    pub fn plus(self, elapsed: Duration) -> Self {
        let micros = i64::try_from(elapsed.as_micros()).unwrap_or(i64::MAX);
        Self(self.0.saturating_add(micros))
    }

    /// This instant minus `age`.
    #[must_use]
    pub fn minus(self, age: Duration) -> Self {
        let micros = i64::try_from(age.as_micros()).unwrap_or(i64::MAX);
        Self(self.0.saturating_sub(micros))
    }

    /// How long from `self` until `later`; zero when that is past.
    #[must_use]
    pub fn until(self, later: Self) -> Duration {
        Duration::from_micros(u64::try_from(later.0.saturating_sub(self.0)).unwrap_or(0))
    }
}

/// How long something is remembered, in whole milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Retention(i64);

impl Retention {
    /// The shortest, in milliseconds: a second.
    pub const MIN_MS: i64 = 1_000;
    /// The longest, in milliseconds: a leap year.
    pub const MAX_MS: i64 = 31_622_400_000;
    /// Of a stored response whose caller names none, unless configured.
    pub const ONE_DAY: Self = Self(86_400_000);

    /// A length in milliseconds; `None` outside [`Self::MIN_MS`]..=[`Self::MAX_MS`].
    #[must_use]
    pub const fn from_millis(millis: i64) -> Option<Self> {
        if millis >= Self::MIN_MS && millis <= Self::MAX_MS { Some(Self(millis)) } else { None }
    }

    /// The length in milliseconds.
    #[must_use]
    pub const fn as_millis(self) -> i64 {
        self.0
    }
}

/// The length of a lease, in whole milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ttl(i64);

impl Ttl {
    /// The shortest lease, in milliseconds.
    pub const MIN_MS: i64 = 100;
    /// The longest lease, in milliseconds: one day.
    pub const MAX_MS: i64 = 86_400_000;
    /// Of a leader that names none: 15 seconds.
    pub const LEADER: Self = Self(15_000);

    /// A length in milliseconds; `None` outside [`Self::MIN_MS`]..=[`Self::MAX_MS`].
    #[must_use]
    pub const fn from_millis(millis: i64) -> Option<Self> {
        if millis >= Self::MIN_MS && millis <= Self::MAX_MS { Some(Self(millis)) } else { None }
    }

    /// A length that a store kept, which was checked when it came in; out-of-range values, which
    /// only a hand-edited row can hold, are clamped.
    #[must_use]
    pub const fn from_stored(millis: i64) -> Self {
        if millis < 0 {
            Self(0)
        } else if millis > Self::MAX_MS {
            Self(Self::MAX_MS)
        } else {
            Self(millis)
        }
    }

    /// The length in milliseconds.
    #[must_use]
    pub const fn as_millis(self) -> i64 {
        self.0
    }
}
