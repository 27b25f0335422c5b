//! The contract: what the service promises, as laws that hold on every store, over HTTP.

#[path = "../support/mod.rs"]
mod support;

mod check;
mod claims;
mod field_cases;
mod layers;
mod model;
mod operations;
mod reads;
mod releases;
mod renewals;
mod requests;
mod waits;
mod wire;
