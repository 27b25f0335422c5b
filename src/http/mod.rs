//! The service over HTTP: JSON in, JSON out. One file for each resource.

mod at_once;
mod executions;
mod idempotency;
mod leaders;
mod leases;
mod lingering;
mod openapi;
mod operations;
mod problem;
mod request;
mod router;
mod serve;
mod shape;
mod token;

pub use leases::Rival;
pub use openapi::Documents;
pub use router::{App, documents, router, router_with_rivals};
pub use serve::serve;
