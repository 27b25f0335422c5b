//! Fencepost coordinates processes over the Postgres they already have, or over an embedded file.
//!
//! It answers one question in a way that can be relied on: *who may do this now?* A lease gives a
//! key to one owner until it is released or its time is over, with a version that fences off every
//! owner before; the rules stand in [`domain::lease`]. A leader is a lease. An execution, or the
//! stored response of a write, is claimed like a lease and then completed, once and for all; the
//! rules stand in [`domain::record`].
//!
//! Programs in Rust can do without the HTTP service: see [`coordinator`].
//!
//! # The map
//!
//! | module | holds | may use |
//! | --- | --- | --- |
//! | [`domain`] | the rules: pure state machines | nothing of ours |
//! | [`store`] | where rows are kept: all SQL | `domain` |
//! | [`engine`] | batches, wake-ups, waiting | `store`, `domain` |
//! | [`coordinator`] | the service in-process | `engine` |
//! | [`http`] | the service over HTTP | `coordinator`, and the words of those above |
//! | [`cli`], [`config`] | the binary | all |
//! | [`telemetry`], [`shutdown`] | metrics, logs, the end of tasks | nothing of ours |
//!
//! # The guarantees
//!
//! * At any moment of the store's clock, a key has at most one owner.
//! * A version is above every version ever issued for its key, whatever happened in between.
//! * What a waiting caller was told is over never lives again.
//! * A store that cannot be asked is never guessed about: the caller is told.

pub mod cli;
pub mod config;
pub mod coordinator;
pub mod domain;
pub mod engine;
pub mod http;
pub mod shutdown;
pub mod store;
pub mod telemetry;
