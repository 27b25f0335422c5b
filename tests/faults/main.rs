//! What must hold when processes die, connections break, rows stay locked and callers race. These
//! tests print their figures; they run one at a time.

#[path = "../support/mod.rs"]
mod support;
