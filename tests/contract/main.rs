//! The contract: what the service promises, as laws that hold on every store, over HTTP.

#[path = "../support/mod.rs"]
mod support;

mod claims;
mod model;
