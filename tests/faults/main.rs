//! What must hold when processes die, connections break, rows stay locked and callers race.
//!
//! These tests measure, so they run one at a time, whatever the test runner does. Each prints its
//! figures in lines that begin with `figure:`.

#[path = "../support/mod.rs"]
mod support;

mod clocks;
mod crashes;
mod deadlocks;
mod expiry;
mod locks;
mod rig;
mod versions;
mod wakes;
