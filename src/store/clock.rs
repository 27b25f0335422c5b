//! The clock of the stores that live in this process.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use crate::domain::time::Timestamp;
use crate::domain::version::Version;

/// Where time comes from: the wall clock, and a monotonic one.
#[derive(Clone)]
pub struct TimeSource {
    wall: Arc<dyn Fn() -> Timestamp + Send + Sync>,
    monotonic: Arc<dyn Fn() -> Duration + Send + Sync>,
}

impl std::fmt::Debug for TimeSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TimeSource")
    }
}

impl TimeSource {
    /// The machine's own clocks.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "the one place where wall time comes in")]
    pub fn system() -> Self {
        let start = Instant::now();
        Self::new(
            || {
                let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
                Timestamp::from_micros(0).plus(since_epoch.unwrap_or_default())
            },
            move || start.elapsed(),
        )
    }

    /// Any clocks, for tests of what happens when they jump.
    #[must_use]
    pub fn new(
        wall: impl Fn() -> Timestamp + Send + Sync + 'static,
        monotonic: impl Fn() -> Duration + Send + Sync + 'static,
    ) -> Self {
        Self { wall: Arc::new(wall), monotonic: Arc::new(monotonic) }
    }
}

/// Time that never goes back: `max(wall, last + monotonic elapsed)`.
///
/// A wall clock that jumps ahead ends leases early, which is safe, and covers a suspended machine,
/// whose monotonic clock stood still. One that jumps back is overruled by the monotonic clock, so
/// leases are neither extended nor revived. One that says what no clock can is told as it is, and
/// forgotten when it is right again.
#[derive(Debug)]
pub struct EmbeddedClock {
    source: TimeSource,
    last: Mutex<(Timestamp, Duration)>,
}

impl EmbeddedClock {
    /// A clock that is never earlier than `at_least`, the largest time that was persisted.
    #[must_use]
    pub fn starting_at(at_least: Timestamp, source: TimeSource) -> Self {
        let monotonic = (source.monotonic)();
        Self { source, last: Mutex::new((at_least, monotonic)) }
    }

    /// The time.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let monotonic = (self.source.monotonic)();
        let carried_on = last.0.plus(monotonic.saturating_sub(last.1));
        let wall = (self.source.wall)();
        if !Version::is_plausible(wall) && wall > carried_on {
            // Told, so that nothing is decided on it, but not remembered: it may be mended.
            return wall;
        }
        *last = (wall.max(carried_on), monotonic);
        last.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicI64, Ordering};

    #[test]
    fn the_wall_clock_moves_time_forward_but_never_back() {
        let wall = Arc::new(AtomicI64::new(1_000_000));
        let monotonic = Arc::new(AtomicI64::new(0));
        let (w, m) = (Arc::clone(&wall), Arc::clone(&monotonic));
        let source = TimeSource::new(
            move || Timestamp::from_micros(w.load(Ordering::Relaxed)),
            move || Duration::from_micros(m.load(Ordering::Relaxed).unsigned_abs()),
        );
        let clock = EmbeddedClock::starting_at(Timestamp::from_micros(0), source.clone());
        assert_eq!(clock.now().as_micros(), 1_000_000);
        // A suspended machine: the wall clock alone went on.
        wall.store(5_000_000, Ordering::Relaxed);
        assert_eq!(clock.now().as_micros(), 5_000_000);
        // Set back by an hour: time goes on with the monotonic clock.
        wall.store(1, Ordering::Relaxed);
        monotonic.store(250, Ordering::Relaxed);
        assert_eq!(clock.now().as_micros(), 5_000_250);
        // Restarted with the wall clock still wrong: what was persisted holds.
        let restarted = EmbeddedClock::starting_at(clock.now(), source);
        assert!(restarted.now().as_micros() >= 5_000_250);
    }
}
