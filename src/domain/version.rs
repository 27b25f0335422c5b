//! Versions: the fencing tokens, and the stamps that rows are guarded by.

use super::time::Timestamp;

/// A fencing token and, for a row, its revision: 1 ..= 2^53 − 1, so that it survives JSON parsers
/// that keep numbers as doubles (RFC 8259 §6).
///
/// Both come from one rule ([`Version::next`]): every write of a row takes a stamp above all
/// earlier ones of that key, and a new generation takes its write's stamp as its version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(i64);

impl Version {
    /// The largest version, 2^53 − 1.
    pub const MAX: i64 = (1 << 53) - 1;
    /// The largest stamp that is still given out. The distance to [`Self::MAX`] is 2^40
    /// microseconds, about twelve days: one bogus clock must not use up a key for good.
    const LAST_STAMP: i64 = (1 << 53) - (1 << 40);

    /// Whether a clock that says `now` can be right. Nothing may be decided on one that cannot, and
    /// nothing deleted.
    #[must_use]
    pub const fn is_plausible(now: Timestamp) -> bool {
        now.as_micros() > 0 && now.as_micros() <= Self::LAST_STAMP
    }

    /// A version; `None` outside 1 ..= 2^53 − 1.
    #[must_use]
    pub const fn new(value: i64) -> Option<Self> {
        if value >= 1 && value <= Self::MAX { Some(Self(value)) } else { None }
    }

    /// A version that a store kept.
    #[must_use]
    pub const fn from_stored(value: i64) -> Self {
        Self(value)
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> i64 {
        self.0
    }

    /// The stamp of the next write: above the row's last one, above every stamp that clean-up has
    /// deleted (`floor`), and not below the store's clock. The clock makes versions rise even
    /// where rows are lost, as in a failover that dropped the last commits; the other two make
    /// them rise when the clock is set back.
    ///
    /// `None` when the result would pass the largest stamp: then nothing may be written.
    #[must_use]
    pub fn next(previous: Option<Self>, floor: i64, now: Timestamp) -> Option<Self> {
        let previous = previous.map_or(0, Self::get);
        let stamp = previous.max(floor).checked_add(1)?.max(now.as_micros());
        (stamp <= Self::LAST_STAMP && Self::is_plausible(now)).then_some(Self(stamp))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_is_above_the_row_the_floor_and_not_below_the_clock() {
        let now = Timestamp::from_micros(1_000);
        let next = |previous: i64, floor| {
            Version::next(Version::new(previous), floor, now).map(Version::get)
        };
        assert_eq!(next(5, 7), Some(1_000));
        assert_eq!(next(2_000, 7), Some(2_001));
        assert_eq!(next(2_000, 3_000), Some(3_001));
        assert_eq!(next(0, 0), Some(1_000));
    }

    #[test]
    fn a_stamp_near_two_to_the_53_is_refused() {
        let last = Version::LAST_STAMP;
        let at = |micros| Version::next(None, 0, Timestamp::from_micros(micros));
        assert!(at(last).is_some());
        assert!(at(last + 1).is_none());
        assert!(Version::next(Version::new(last), 0, Timestamp::from_micros(1)).is_none());
        assert!(Version::next(None, i64::MAX, Timestamp::from_micros(1)).is_none());
        assert!(at(-1).is_none());
    }
}
